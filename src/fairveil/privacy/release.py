"""What can leave a client, and in which form.

A task answers with one `Reply` per client. Its `out` says what leaves: a `Release` (noised at the client), a
`Share` (bounded, with too little noise or none: for an aggregator, never seen by an algorithm), a `Public` value, or
nothing (`Kept`). Releases and shares are minted by mechanisms only, so an unpriced leak is a type error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from fairveil.privacy.mechanisms import ClientMechanism, SumMechanism

Plain = int | float | str | bool | Tensor

MINT = object()  # held by mechanisms; unpickling in another process does not ask for it again


def digest_values(*many: Mapping[str, Plain], before: bytes = b"") -> bytes:
    """A digest of named values, with their types and shapes, and of what came before them.

    Raises:
        TypeError: a value that is neither a tensor nor plain, and so could not be told from others.
    """
    state = hashlib.sha256()

    def add(data: bytes | memoryview) -> None:
        state.update(len(data).to_bytes(8, "big"))  # so that no two lists of fields run together
        state.update(data)

    add(before)
    for number, values in enumerate(many):
        for name in sorted(values):
            value = values[name]
            if isinstance(value, Tensor):
                add(f"{number} {name} {value.dtype} {tuple(value.shape)}".encode())
                add(value.detach().contiguous().view(-1).numpy().view(np.uint8).data)
            elif isinstance(value, int | float | str | bool):
                text = value.hex() if isinstance(value, float) else repr(value)
                add(f"{number} {name} {type(value).__name__} {text}".encode())
            else:
                raise TypeError(f"{name!r} is a {type(value).__name__}: tensors and plain values only")
    return state.digest()


@dataclass(frozen=True)
class Release:
    """Values noised at the client by `mechanism`, which says what they cost."""

    value: Mapping[str, Plain]
    mechanism: ClientMechanism
    key: tuple[int | str, ...]  # of the client whose records it tells of, in this request
    mint: InitVar[object] = None
    digest: bytes = field(init=False)  # of the values as they were minted

    def __post_init__(self, mint: object) -> None:
        if mint is not MINT:
            raise TypeError(
                "a Release is minted by a mechanism, which adds the noise and owns the price: "
                "return mechanism.release(...), never Release(...) of your own"
            )
        object.__setattr__(self, "digest", digest_values(self.value))


@dataclass(frozen=True)
class Share:
    """Values bounded by `mechanism` but NOT noised, or with a part of the noise only: `Session.sum` adds them up.

    The whole of the noise is in the sum: the mechanism adds it there, or all shares together bring it along.
    """

    value: Mapping[str, Tensor]
    mechanism: SumMechanism
    mint: InitVar[object] = None

    def __post_init__(self, mint: object) -> None:
        if mint is not MINT:
            raise TypeError(
                "a Share is minted by a mechanism for sums, which bounds it: return mechanism.share(...), "
                "never Share(...) of your own"
            )


@dataclass(frozen=True)
class Public:
    """Values that cost nothing: declared facts, or functions of released values.

    The algorithm names the task that sends them in its `public_tasks`, with the reason; the statement repeats it.
    """

    value: Mapping[str, Plain]


@dataclass(frozen=True)
class Kept:
    """Nothing leaves."""


@dataclass(frozen=True)
class Reply:
    """One client's answer.

    Attributes:
        out: what leaves the client.
        keep: the client's personal state from now on; None leaves it as it is.
        diagnostics: numbers for the metrics table, in simulation only; an algorithm cannot read them.
    """

    out: Release | Share | Public | Kept
    keep: Mapping[str, Tensor] | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)
