"""Sums that are clipped by what the whole cohort sent, as some papers do: without a price.

The bound of one client, and the noise with it, depend on what all others have sent. So a client that is removed changes
every contribution, and the noise tells of the norms. Du, Xiang and Wu, "Mitigating Unfairness in Differentially-Private
Federated Learning" (2025), count them as a Gaussian sum all the same; here their event is that of no privacy at all.
`tests/algorithms/test_cohorts.py` shows neighbours whose sums lie farther apart than the paper's sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from dp_accounting import DpEvent, NonPrivateDpEvent
from torch import Tensor

from fairveil.privacy.mechanisms import Client
from fairveil.privacy.multipliers import Contributors, Multipliers, fair_clips, gram_matrix
from fairveil.privacy.release import MINT, Share, digest_values
from fairveil.streams import Stream


@dataclass(frozen=True)
class Contribution:
    """What one client sent, as it is."""

    update: Tensor  # (p,)
    weight: float
    others: Mapping[str, float]


@dataclass(frozen=True)
class MedianClipped:
    """The sum of weighted updates, each clipped at the median norm of all that were drawn, and noise in proportion.

    Unit: one client. No bound holds for neighbours, so the event is `NonPrivateDpEvent`: see above.

    Attributes:
        others: names of numbers that are summed exactly beside the update.
        whole: what the weights are divided by; 0: the sum of those that were drawn.
    """

    leak: ClassVar[bool] = True

    length: int  # p
    sample_rate: float  # q
    noise_multiplier: float  # sigma, over the largest clipping value
    others: tuple[str, ...] = ()
    whole: float = 1.0

    @property
    def kind(self) -> str:
        return "sum over a cohort that is clipped by what the cohort sent"

    @property
    def event(self) -> DpEvent:
        return NonPrivateDpEvent()

    @property
    def asked(self) -> float:
        return self.sample_rate

    @property
    def noised_by(self) -> None:
        return None

    def describe(self) -> str:
        return (
            f"sum over clients sampled at rate {self.sample_rate:.4g}, clipped at the exact median of their norms, "
            f"with noise of {self.noise_multiplier:g} times that median"
        )

    def share(self, values: Mapping[str, Tensor], client: Client) -> tuple[Share, dict[str, float]]:
        """One client's contribution as it is; of one that is not finite, zeros."""
        wanted = {"update": (self.length,), "weight": (), **dict.fromkeys(self.others, ())}
        if {name: tuple(value.shape) for name, value in values.items()} != wanted:
            raise TypeError(f"shares {sorted(values)} given, {sorted(wanted)} planned")
        finite = all(bool(value.isfinite().all()) for value in values.values())
        sent = {name: value.to(torch.float32 if value.ndim else torch.float64) for name, value in values.items()}
        if not finite:
            sent = {name: torch.zeros_like(value) for name, value in sent.items()}
        return Share(sent, self, MINT), {"not_finite": float(not finite)}

    def zero(self) -> dict[str, Tensor]:
        return {}

    def add(self, exact: dict[str, Tensor], share: Share) -> None:
        """Collect a share: what one contributes depends on all of them."""
        number, update = len(exact) // len(share.value), share.value.get("update")
        if update is None or update.shape != (self.length,):
            raise TypeError("a share without an update of the planned length")
        exact |= {f"{number}/{name}": value for name, value in share.value.items()}

    def finish(
        self, exact: Mapping[str, Tensor], stream: Stream, silent: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Clip, add up, and add noise in proportion to the largest clipping value; "clip" tells it."""
        sent = self._sorted(exact)
        total = torch.zeros(self.length, dtype=torch.float64)
        top, moved = 0.0, 0.0
        if sent:
            weights = torch.tensor([one.weight for one in sent], dtype=torch.float64)
            weights /= self.whole or float(weights.sum()) or 1.0
            clips, norms = self.clips(sent, weights)
            top = float(clips.max())
            kept = torch.where(norms > 0, (clips / norms.clamp(min=1e-300)).clamp(max=1.0), 1.0)
            moved = float((1 - kept).mean())
            for one, factor in zip(sent, (weights * kept).tolist(), strict=True):
                total.add_(one.update, alpha=factor)
        if std := self.noise_multiplier * top:
            total += std * stream.normal((self.length,))
        sums = {name: torch.tensor([math.fsum(one.others[name] for one in sent)]) for name in self.others}
        found = {"update": total.to(torch.float32), "clip": torch.tensor([top]), **sums}
        return found, {"clip": top, "clipped_away": moved}

    def clips(self, sent: list[Contribution], weights: Tensor) -> tuple[Tensor, Tensor]:
        """The clipping value of each, and its norm (m,)."""
        norms = torch.stack([torch.linalg.vector_norm(one.update, dtype=torch.float64) for one in sent])
        return torch.full_like(norms, float(norms.quantile(0.5))), norms

    def _sorted(self, exact: Mapping[str, Tensor]) -> list[Contribution]:
        """The contributions in an order that does not depend on when they came."""
        names = ("update", "weight", *self.others)
        rows = [{name: exact[f"{k}/{name}"] for name in names} for k in range(len(exact) // len(names))]
        rows.sort(key=lambda row: digest_values(row))
        return [
            Contribution(row["update"], float(row["weight"]), {name: float(row[name]) for name in self.others})
            for row in rows
        ]


@dataclass(frozen=True)
class MultiplierClipped(MedianClipped):
    """The same, but every update has a clipping value of its own, by the method of multipliers (Algorithm 1, line 9).

    The updates are w_k - w_t = -eta g_k; the weights are p_k/q; "loss" is L_k(w_t). Noise is in proportion to the
    largest clipping value.
    """

    others: tuple[str, ...] = ("loss",)
    method: Multipliers = field(kw_only=True)

    def describe(self) -> str:
        return (
            f"sum over clients sampled at rate {self.sample_rate:.4g}, each clipped at a value that depends on all of "
            f"them, with noise of {self.noise_multiplier:g} times the largest of these"
        )

    def clips(self, sent: list[Contribution], weights: Tensor) -> tuple[Tensor, Tensor]:
        eta, count = self.method.learning_rate, len(sent)
        gram, sums = gram_matrix([one.update for one in sent])
        gram, sums = gram / eta**2, sums / eta  # of g_k = -(w_k - w_t)/eta
        norms = gram.diagonal().sqrt()
        found = Contributors(
            gram=gram,
            sums=sums,
            losses=torch.tensor([one.others["loss"] for one in sent], dtype=torch.float64),
            objective=self.sample_rate * weights,  # p_k
            share=weights,
            mean=torch.full((count,), 1.0 / count, dtype=torch.float64),
            free=torch.ones(count, dtype=torch.bool),
            variance=self.length * math.sqrt(2 / math.pi) * self.noise_multiplier,
        )
        return eta * fair_clips(found, self._rated(norms), norms), eta * norms

    def _rated(self, norms: Tensor) -> Multipliers:
        """With the rate of the paper: no more than the square of the smallest norm, or 1/|g| would run away."""
        rate = min(self.method.clip_rate, float(norms.min()) ** 2)
        return replace(self.method, clip_rate=rate)
