"""The mechanisms: each owns its bound, its noise and its event.

A mechanism is frozen and hashable. `event` says what happened to one protected unit when it is applied once;
what that costs is the accountant's business. Callers never clip and never add noise by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
)
from torch import Tensor

from fairveil.errors import RunFault, UserError
from fairveil.privacy.release import MINT, Plain, Share
from fairveil.streams import Stream

if TYPE_CHECKING:
    from fairveil.data.federation import ClientData
    from fairveil.models import Model


class Mechanism(Protocol):
    """What the ledger and the planner need to know. Implementations are frozen dataclasses."""

    @property
    def kind(self) -> str:
        """The word for it in the statement."""

    @property
    def event(self) -> DpEvent:
        """What one application does to one protected unit."""

    def describe(self) -> str:
        """One application in words, for the plan and the statement."""


class Client(Protocol):
    """What a mechanism needs of the client it runs on (a `Member` of the session)."""

    @property
    def data(self) -> ClientData: ...
    @property
    def model(self) -> Model: ...
    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def key(self) -> tuple[int | str, ...]: ...
    def noise(self) -> Stream: ...


class ClientMechanism(Mechanism, Protocol):
    """A mechanism that the client applies by itself: it mints the `Release`, with diagnostics for the metrics table."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the values it releases."""

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """What stands for the release of a client that is not there; every release has its names, types and shapes."""


@runtime_checkable
class SumMechanism(Mechanism, Protocol):
    """A mechanism whose shares are added up, exactly and in any order, before anything of them becomes visible."""

    @property
    def asked(self) -> float:
        """The rate at which the session draws who is asked for a share."""

    @property
    def noised_by(self) -> Sharers | None:
        """The clients that make the noise together; None: it is added to the sum, once."""

    def share(self, values: Mapping[str, Tensor], client: Client) -> tuple[Share, dict[str, float]]:
        """One client's contribution, with diagnostics for the metrics table."""

    def zero(self) -> dict[str, Tensor]:
        """The sum of no shares at all."""

    def add(self, exact: dict[str, Tensor], share: Share) -> None:
        """Add a share to the sums in place; a TypeError, and nothing added, if it is none of this mechanism."""

    def finish(
        self, exact: Mapping[str, Tensor], stream: Stream, silent: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """What the algorithm may see of the sums, with diagnostics for the metrics table.

        Args:
            stream: randomness of this sum.
            silent: how many of those that were asked did not answer.
        """


def canonical(mechanism: Mechanism) -> str:
    """Every field of a mechanism as JSON with floats in hexadecimal: equal texts, equal mechanisms.

    A field that is None unless it is given is left out while it is None: texts from before it was there stay as they
    are.
    """

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            given = [(f, getattr(value, f.name)) for f in fields(value)]
            named = {f.name: plain(item) for f, item in given if not (item is None and f.default is None)}
            return {"type": f"{type(value).__module__}.{type(value).__qualname__}"} | named
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value.hex() if isinstance(value, float) else value

    return json.dumps(plain(mechanism), sort_keys=True)


HEXADECIMAL = re.compile(r"-?(0x[01]\.[0-9a-f]+p[+-]\d+|inf)|nan")  # how `canonical` writes a float


def from_canonical(text: str) -> Mechanism | None:
    """The mechanism that `canonical` wrote; None if it is not one of this library's.

    The text may come from anywhere: nothing outside this package is imported, nothing but its dataclasses is called.
    """

    def built(value: Any) -> Any:
        if isinstance(value, dict):
            module, _, name = value["type"].rpartition(".")
            if not module.startswith("fairveil.privacy."):
                raise ValueError(f"{module} is not of this library")
            cls = getattr(import_module(module), name)
            if not (isinstance(cls, type) and is_dataclass(cls) and cls.__module__ == module):
                raise ValueError(f"{name} is no mechanism")
            types = {field.name: field.type for field in fields(cls)}
            words = {name for name, kind in types.items() if kind == "str"}  # a sum may be called "inf"
            given = {key: item if key in words else built(item) for key, item in value.items() if key != "type"}
            for key, item in given.items():
                # of 1.5 steps two would be taken, and one and a half be paid for
                if types.get(key) in ("int", "float", "str", "bool") and type(item).__name__ != types[key]:
                    raise TypeError(f"{key} is a {type(item).__name__}")
            return cls(**given)
        if isinstance(value, list):
            return tuple(built(item) for item in value)
        return float.fromhex(value) if isinstance(value, str) and HEXADECIMAL.fullmatch(value) else value

    try:
        mechanism: Mechanism = built(json.loads(text))
        known = isinstance(getattr(type(mechanism), "event", None), property)
        return mechanism if known and canonical(mechanism) == text else None
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, ArithmeticError, RecursionError):
        return None


Releases = Mapping[Mechanism, int]  # a multiset of them


def events_of(releases: Releases, times: int = 1) -> Counter[DpEvent]:
    """The events of a multiset of releases, all of them made `times` times."""
    events: Counter[DpEvent] = Counter()
    for mechanism, count in releases.items():
        events[mechanism.event] += times * count
    return events


def without_leaks(releases: Releases) -> Counter[Mechanism]:
    """Without the mechanisms that declare themselves a `leak`: they release something exactly, as some papers do.

    The guarantee of a run that leaks is none; what the rest would cost can still be told beside it. A mechanism without
    noise that does not say so is no leak but a mistake, and no budget can be solved for it.
    """
    return Counter({m: n for m, n in releases.items() if not getattr(m, "leak", False)})


def sampled_gaussian(sample_rate: float, noise_multiplier: float) -> DpEvent:
    """The event of one noisy sum of a Poisson sample; no noise means no guarantee, never a number."""
    if noise_multiplier <= 0:
        return NonPrivateDpEvent()
    gaussian = GaussianDpEvent(noise_multiplier)
    return gaussian if sample_rate >= 1 else PoissonSampledDpEvent(sample_rate, gaussian)


def noise_std(bound: float, noise_multiplier: float) -> float:
    """Standard deviation of the noise (sigma = c * z); an infinite bound is allowed without noise only."""
    if noise_multiplier == 0:
        return 0.0
    if not math.isfinite(bound):
        raise ValueError(f"a bound of {bound} cannot be noised: noise_multiplier must then be 0")
    return bound * noise_multiplier


def grid(std: float) -> float:
    """The public grid to which noisy values are rounded: a power of two near 1/4096 of the noise.

    The low bits of a floating-point sum can tell which numbers went into it (Mironov, "On Significance of the Least
    Significant Bits for Differential Privacy", 2012). This keeps none of them. Every cell holds about 2^40 values of
    float64 noise, so that all are equally likely to be hit but for the law of the noise; and rounding adds less than
    a hundred-millionth to the variance.
    """
    return 2.0 ** math.floor(math.log2(std) - 12)


def on_grid(noisy: Tensor, std: float) -> Tensor:
    """Noisy values (float64), rounded to the grid of their noise."""
    return (noisy / grid(std)).round() * grid(std)


@dataclass(frozen=True)
class Part:
    """One vector that is summed over a cohort. The shape is here because an empty cohort still sends noise."""

    name: str
    shape: tuple[int, ...]
    bound: float  # largest Euclidean norm of one client's contribution
    noise_multiplier: float  # z_i


@dataclass(frozen=True)
class Sharers:
    """The clients that make the noise of a sum together: all of them, of whom some may fail."""

    clients: int  # N
    tolerated: int  # t, so many may drop out, or conspire and tell each other their noise, or some of them this or that

    def __post_init__(self) -> None:
        if not 0 <= self.tolerated < self.clients:
            raise ValueError(f"{self} makes no sense: at least one of the clients must be left")


FRACTION_BITS = 40  # a contribution within its bound is a fixed-point number of at most this many bits
SHARE_BITS, SUM_BITS = 53, 62  # of a noisy share, and of the sum of all
FARTHEST = 10.0  # standard deviations that no coordinate of the noise reaches: see `Stream.normal`


@dataclass(frozen=True)
class CohortSums:
    """Sums of bounded shares over one sampled cohort, noised once: ONE cohort is ONE event.

    Unit: one client with all its records. Neighbours (add/remove): two federations that differ in one client.
    Every client takes part with probability `sample_rate`. A share's part i is clipped to `bound_i`, so adding
    a client moves sum i by at most `bound_i`. Scaled by their bounds and noise multipliers all parts together
    are one Gaussian sum with 1/z^2 = sum 1/z_i^2, of one Poisson draw. Shares are added as 64-bit fixed-point
    numbers, truncated towards zero (which cannot lengthen them): exact, in any order. The noise is rounded to the
    same grid, so that no low bit of a float says more than the real sum would.

    The noise is added to the sum by whoever adds up; or, with `noised_by`, by the clients (Zhu et al., "Voting-based
    Approaches for Differentially Private Federated Learning", 2020, Algorithm 5, made sound). Then all N are asked, and
    a client that is removed is one that contributes zero. Each tosses its own coin, takes its contribution or zero,
    and adds noise of variance (bound_i z_i)^2 / (N - t) before anything leaves it. So the noise of any N - t clients is
    all that is priced, whatever the other t have done with theirs; more makes it no dearer. One share by itself hides
    next to nothing: only their sum may be seen. That a client may not have taken part lowers the price only for those
    who cannot tell whether it has: neither by its answer, which is noise in any case, nor by the time it takes.

    (As printed, those that are drawn share the noise among them, 1/m_t of it each. Whoever drops out then takes some of
    it away, an empty cohort has none, and who has added noise is who was drawn. That form is not offered.)
    """

    parts: tuple[Part, ...]
    sample_rate: float  # q
    noised_by: Sharers | None = None  # None: by whoever adds the shares up

    def __post_init__(self) -> None:
        names = {part.name for part in self.parts}
        bounded = all(part.bound > 0 and 0 <= part.noise_multiplier < math.inf for part in self.parts)
        if not (self.parts and len(names) == len(self.parts) and bounded and 0 < self.sample_rate <= 1):
            raise ValueError(
                f"{self} makes no sense: parts of different names, with bounds above 0, and a rate in (0, 1]"
            )
        if not isinstance(self.noised_by, Sharers | None):
            raise TypeError(f"{self.noised_by} cannot add noise")
        for part in self.parts:
            noise_std(part.bound, part.noise_multiplier)

    @property
    def kind(self) -> str:
        kind = f"noisy sum over a cohort ({', '.join(part.name for part in self.parts)})"
        if self.noised_by is None:
            return kind
        return f"{kind}, noised by {self.noised_by.clients} clients of whom {self.noised_by.tolerated} may fail"

    @property
    def event(self) -> DpEvent:
        if any(part.noise_multiplier <= 0 for part in self.parts):
            return NonPrivateDpEvent()
        return sampled_gaussian(self.sample_rate, sum(p.noise_multiplier**-2 for p in self.parts) ** -0.5)

    def describe(self) -> str:
        parts = ", ".join(
            f"{p.name} (bound {p.bound:g}, noise multiplier {p.noise_multiplier:.4f})" for p in self.parts
        )
        whole = f"sum over clients sampled at rate {self.sample_rate:.4g}: {parts}"
        if self.noised_by is None:
            return whole
        hidden = "" if self.sample_rate == 1 else "; who takes part is hidden, or the rate would lower no price"
        enough = self.noised_by.clients - self.noised_by.tolerated
        return f"{whole}; each of {self.noised_by.clients} clients adds 1/{enough} of the noise variance{hidden}"

    @property
    def asked(self) -> float:
        return self.sample_rate if self.noised_by is None else 1.0

    def takes_part(self, client: Client) -> bool:
        """Whether a client that is asked contributes anything but noise; a task may spare it the work if not.

        Where the clients make the noise it is a coin of the client's own; otherwise who is asked was drawn.
        """
        coin = Stream(*client.key, "mechanism", "participation")
        return self.noised_by is None or len(coin.coins(1, self.sample_rate)) > 0

    def share(self, values: Mapping[str, Tensor], client: Client) -> tuple[Share, dict[str, float]]:
        """Bound one client's contribution, and noise it if clients do. A value that is not finite contributes zero.

        Of a client that does not take part the values count for nothing, and there are no diagnostics.
        """
        if values.keys() != {part.name for part in self.parts}:
            raise TypeError(f"shares {sorted(values)} given, {sorted(p.name for p in self.parts)} planned")
        bounded: dict[str, Tensor] = {}
        diagnostics: dict[str, float] = {"clipped": 0.0, "not_finite": 0.0}
        for part in self.parts:
            value = values[part.name].to(torch.float64)
            if tuple(value.shape) != part.shape:
                raise TypeError(f"share {part.name!r} has shape {tuple(value.shape)}, planned {part.shape}")
            norm = torch.linalg.vector_norm(value)
            if not torch.isfinite(norm):
                value, diagnostics["not_finite"] = torch.zeros_like(value), 1.0
            elif norm > part.bound:
                # a hair shorter, so that rounding never leaves it longer than the bound
                value, diagnostics["clipped"] = value * (part.bound * (1 - 1e-12) / norm), 1.0
            bounded[part.name] = value
        if self.noised_by is None:
            return Share(bounded, self, MINT), diagnostics
        there = self.takes_part(client)
        return Share(self._noised(bounded, there, client.noise()), self, MINT), diagnostics if there else {}

    def _noised(self, bounded: Mapping[str, Tensor], there: bool, stream: Stream) -> dict[str, Tensor]:
        """A client's own noise on its contribution, or on zero, in fixed point as it will be added up."""
        fixed = self.zero()
        for part in self.parts:
            if there:
                fixed[part.name] += self._fixed(part, bounded[part.name])
            if std := self._share_std(part):
                fixed[part.name] += (std * self.scale(part) * stream.normal(part.shape)).round().to(torch.int64)
        return self.value(fixed)

    def zero(self) -> dict[str, Tensor]:
        return {part.name: torch.zeros(part.shape, dtype=torch.int64) for part in self.parts}

    def add(self, exact: dict[str, Tensor], share: Share) -> None:
        """Add a share to the fixed-point sums in place, after checking its bound once more.

        A noisy share is within its bound and the most that noise can be; so many of them fit the sum.
        """
        fixed: dict[str, Tensor] = {}
        shapes = {name: (value.dtype, tuple(value.shape)) for name, value in share.value.items()}
        if shapes != {part.name: (torch.float64, part.shape) for part in self.parts}:
            raise TypeError(f"a share of the shapes {shapes}")
        for part in self.parts:
            value, longest = share.value[part.name], part.bound + self._farthest(part)
            if not torch.linalg.vector_norm(value) <= longest:  # refuses NaN as well
                raise TypeError(f"a share of {part.name!r} is longer than its bound {longest:g}")
            fixed[part.name] = self._fixed(part, value)
        for name, value in fixed.items():
            exact[name] += value

    def finish(
        self, exact: Mapping[str, Tensor], stream: Stream, silent: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Noise the exact sums, unless the clients have: what the algorithm may see.

        Raises:
            RunFault: so many are silent that the noise of the others may be less than what is priced.
        """
        if self.noised_by is not None and silent > self.noised_by.tolerated:
            raise RunFault(
                f"{silent} of {self.noised_by.clients} clients did not answer, and with them is missing more of the "
                f"noise than was planned for ({self.noised_by.tolerated}, algorithm.tolerated). Nothing was released."
            )
        noisy = dict(exact)
        for part in self.parts:
            std = noise_std(part.bound, part.noise_multiplier)
            if std and self.noised_by is None:
                noise = (std * self.scale(part) * stream.normal(part.shape)).round()
                noisy[part.name] = exact[part.name] + noise.to(torch.int64)
        return {name: value.to(torch.float32) for name, value in self.value(noisy).items()}, {}

    def value(self, fixed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fixed-point sums as numbers, float64. Exact ones are for a mechanism that is made of this one, to noise."""
        return {part.name: fixed[part.name].to(torch.float64) / self.scale(part) for part in self.parts}

    def _fixed(self, part: Part, value: Tensor) -> Tensor:
        fixed = (value * self.scale(part)).trunc_()
        without_bound = math.isinf(part.bound)
        if without_bound and fixed.numel() and fixed.abs().max() > 2.0**FRACTION_BITS:
            raise UserError(
                f"a share of {part.name!r} is too large for an exact sum.",
                "Without a clip norm only updates up to 256 can be added up: the training has diverged.",
                "a smaller algorithm.learning_rate, or a finite privacy.clip_norm",
            )
        return fixed.to(torch.int64)

    def _share_std(self, part: Part) -> float:
        """Standard deviation of the noise in one share."""
        if self.noised_by is None:
            return 0.0
        enough = self.noised_by.clients - self.noised_by.tolerated
        return noise_std(part.bound, part.noise_multiplier) / math.sqrt(enough)

    def _farthest(self, part: Part) -> float:
        """A length that the noise in one share never has."""
        return FARTHEST * self._share_std(part) * math.sqrt(math.prod(part.shape))

    def scale(self, part: Part) -> float:
        """A power of two that maps the bound to FRACTION_BITS bits: scaling by it is exact.

        With a noise multiplier above 2^16 to fewer bits, so that 40 standard deviations of noise and a million
        clients together stay within 64 bits. Where clients add noise, to so few that every share fits the float64 that
        it travels in (rounded there, it could move the sum by more than its bound), and all of them SUM_BITS.
        """
        largest = part.bound if math.isfinite(part.bound) else 256.0
        bits = FRACTION_BITS - math.ceil(math.log2(largest))
        if self.noised_by is None:
            spare = max(0, math.ceil(math.log2(part.noise_multiplier)) - 16) if part.noise_multiplier else 0
            return 2.0 ** (bits - spare)
        longest = largest + self._farthest(part)
        together = self.noised_by.clients * longest
        return 2.0 ** min(bits, SHARE_BITS - math.ceil(math.log2(longest)), SUM_BITS - math.ceil(math.log2(together)))
