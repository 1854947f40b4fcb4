"""What can leave a client, and in which form.

A task answers with one `Reply` per client. Its `out` says what leaves: a `Release` (noised at the client), a
`Share` (bounded, not noised: for an aggregator, never seen by an algorithm), a `Public` value, or nothing
(`Kept`). Releases and shares are minted by mechanisms only, so an unpriced leak is a type error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from fairveil.privacy.mechanisms import ClientMechanism, CohortSums

Plain = int | float | str | bool | Tensor

MINT = object()  # held by mechanisms; unpickling in another process does not ask for it again


@dataclass(frozen=True)
class Release:
    """Values noised at the client by `mechanism`, which says what they cost."""

    value: Mapping[str, Plain]
    mechanism: ClientMechanism
    mint: InitVar[object] = None

    def __post_init__(self, mint: object) -> None:
        if mint is not MINT:
            raise TypeError(
                "a Release is minted by a mechanism, which adds the noise and owns the price: "
                "return mechanism.release(...), never Release(...) of your own"
            )


@dataclass(frozen=True)
class Share:
    """Values bounded by `mechanism` but NOT noised: `Session.sum` adds them up and noises the sum."""

    value: Mapping[str, Tensor]
    mechanism: CohortSums
    mint: InitVar[object] = None

    def __post_init__(self, mint: object) -> None:
        if mint is not MINT:
            raise TypeError(
                "a Share is minted by CohortSums, which bounds it: return mechanism.share(...), "
                "never Share(...) of your own"
            )


@dataclass(frozen=True)
class Public:
    """Values that cost nothing, with the reason why."""

    value: Mapping[str, Plain]
    reason: Literal["declared fact", "from released values"]


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
