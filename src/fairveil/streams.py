"""Random streams: one for each (seed, purpose, client, round ...), so that nothing depends on order.

A stream is derived from what it is for, never from who ran before it. So a run gives the same result for any
number of workers, any block size, and after any interruption.

Noise and samples come from AES-256 in counter mode under a key derived from the stream's. Whoever does not know the
key cannot tell them from true randomness. Whoever knows it, as everybody does who knows the seed of a run, can
subtract the noise. That is right for a simulation, and the privacy statement says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property
from operator import index

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

try:
    from fairveil import _noise
except ImportError:  # installed without a compiler
    COMPILED = False
else:
    COMPILED = True


class Stream:
    """A random stream named by its key; equal keys draw equal values.

    Args:
        key: whatever names the stream; integers and strings.
    """

    def __init__(self, *key: int | str) -> None:
        # A client's number counts the same whether it comes as a numpy integer or not.
        name = "\x1f".join(f"word:{part}" if isinstance(part, str) else f"number:{index(part)}" for part in key)
        self._digest = hashlib.sha256(name.encode()).digest()
        self._block = 0  # the next one of AES; every call begins at a new one

    @cached_property
    def numpy(self) -> np.random.Generator:
        """For whatever needs no secrecy, such as splits of data.

        The whole 256-bit digest seeds it: torch's own generator would keep 32 bits of it, and among a million streams
        of one run thousands of pairs would then be equal.
        """
        return np.random.Generator(np.random.PCG64DXSM(int.from_bytes(self._digest, "big")))

    def coins(self, count: int, probability: float) -> Tensor:
        """The indices below `count` whose coin came up: each independently with `probability` (Poisson sampling).

        The true probability is `probability` rounded down to a multiple of 2^-64, so never above what was priced.
        """
        if probability >= 1:
            return torch.arange(count)
        words = self._words(-(-count // 2))[:count]
        return torch.from_numpy(np.flatnonzero(words.view("<u8") < np.uint64(int(probability * 2.0**64))))

    def uniform(self, count: int) -> Tensor:
        """Independent uniform values (count,) of (0, 1), float64: (|w| + 1/2) / 2^63 of a signed word w of 64 bits.

        Those near 0 are as fine as 2^-64; near 1 they are multiples of 2^-53, like all such floats, and 1 itself is
        left out.
        """
        words = torch.from_numpy(self._words(-(-count // 2))[:count])
        return words.double().abs_().add_(0.5).mul_(2.0**-63).clamp_(max=1 - 2.0**-53)

    def normal(self, shape: int | Sequence[int]) -> Tensor:
        """Independent standard normal values, float64.

        Of every 16 words of 64 bits (w signed), the first 8 make radii r = sqrt(-2 ln u), u = (|w| + 1/2) / 2^63, which
        reach to 9.4; the others make angles, w / 2^64 of a turn, of which 53 bits or more are kept. The first 8 values
        are r times the cosines, the others r times the sines (Box and Muller, 1958).

        In float64, since noise is rounded to a public grid together with what it hides. On a grid of 2^-12 standard
        deviations the probabilities of the cells are then regular to about 2^-38 (less so, in proportion, where a total
        is many times the noise). In float32 it would be 2^-12, which adds up over millions of coordinates to a real
        loss of privacy.
        """
        values = torch.zeros(shape, dtype=torch.float64)
        self._add(values.view(-1), 1.0, 0.0)
        return values

    def add_noise(self, total: Tensor, std: float, grid: float) -> None:
        """Add `std` times the next normal values to a total, in place, and round it to multiples of `grid`.

        Ties go to the even multiple, and there is no -0: its sign would tell the halves of a cell apart. NaN stays NaN.

        Args:
            total: a dense vector, float32 or float64; summed and rounded to the grid in float64.
            std: standard deviation of the noise.
            grid: a power of two, within 2^±499.
        """
        dense = total.dim() == 1 and total.is_contiguous() and total.dtype in (torch.float32, torch.float64)
        mantissa, exponent = math.frexp(grid)
        if not (dense and 0 <= std < math.inf and mantissa == 0.5 and abs(exponent) <= 500):
            raise ValueError(f"no noise of {std} on a grid of {grid} for {total.dtype} of shape {tuple(total.shape)}")
        self._add(total, std, grid)

    def _add(self, total: Tensor, std: float, grid: float) -> None:
        """As `add_noise`; a grid of 0 is none."""
        if not COMPILED:
            for part in total.split(2**15):  # small enough for the cache
                noisy = _normal(self._words(_blocks(len(part))))[: len(part)].mul_(std).add_(part)
                part.copy_(noisy.mul_(1 / grid).round_().mul_(grid).add_(0.0) if grid else noisy)
        elif _noise.LEVEL == 0:
            _noise.add(total.numpy(), std, grid, self._words(_blocks(len(total))), 0, 0)
        else:
            _noise.add(total.numpy(), std, grid, self._key, self._block, _noise.LEVEL)
            self._block += _blocks(len(total))

    @cached_property
    def _key(self) -> bytes:
        # Not what seeds `numpy`: that might be found out from what it drew.
        return hashlib.sha256(b"noise" + self._digest).digest()

    @cached_property
    def _cipher(self) -> CipherContext:
        return Cipher(AES(self._key), CTR(bytes(16))).encryptor()

    def _words(self, blocks: int) -> NDArray[np.int64]:
        """The bits of the next blocks, two words each."""
        bits = np.empty(16 * blocks, np.uint8)
        self._cipher.reset_nonce(self._block.to_bytes(16, "big"))
        self._cipher.update_into(bytes(16 * blocks), bits.data)
        self._block += blocks
        return bits.view("<i8")


def _blocks(count: int) -> int:
    """How many blocks of AES so many normal values take: whole groups of 16 words."""
    return -(-count // 16) * 8


def _normal(words: NDArray[np.int64]) -> Tensor:
    """One normal value for each word, in the pure form."""
    radius, angle = torch.from_numpy(words).view(-1, 2, 8).unbind(1)
    length = radius.double().abs_().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
    turn = angle.double().mul_(2.0**-63 * math.pi)
    return torch.stack((turn.cos().mul_(length), length.mul_(turn.sin_())), 1).view(-1)
