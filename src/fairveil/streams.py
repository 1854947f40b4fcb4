"""Random streams: one for each (seed, purpose, client, round ...), so that nothing depends on order.

A stream is derived from what it is for, never from who ran before it. So a run gives the same result for any
number of workers, any block size, and after any interruption. These streams are *reproducible*: whoever knows
the run's seed can subtract the noise. That is right for a simulation, and the privacy statement says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import index

import numpy as np
import torch
from torch import Tensor


class Stream:
    """A random stream named by its key; equal keys draw equal values.

    Args:
        key: whatever names the stream; integers and strings.
    """

    def __init__(self, *key: int | str) -> None:
        # The whole 256-bit digest seeds the generator: torch's own would keep 32 bits of it, and among a
        # million streams of one run thousands of pairs would then be equal.
        # A client's number counts the same whether it comes as a numpy integer or not.
        name = "\x1f".join(f"word:{part}" if isinstance(part, str) else f"number:{index(part)}" for part in key)
        digest = hashlib.sha256(name.encode()).digest()
        self.numpy = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "big")))

    def normal(self, shape: int | Sequence[int]) -> Tensor:
        """Independent standard normal values, float64."""
        return torch.from_numpy(np.asarray(self.numpy.standard_normal(shape)))

    def coins(self, count: int, probability: float) -> Tensor:
        """The indices below `count` whose coin came up: each independently with `probability` (Poisson sampling)."""
        if probability >= 1:
            return torch.arange(count)
        return torch.from_numpy(np.flatnonzero(self.numpy.random(count) < probability))
