"""What the client-level systems share: plain SGD at the clients of a drawn cohort, and one noisy sum in each round.

Privacy unit: one client with all its records. Neighbours: the same declared federation, in which one client contributes
nothing. Everything that one draw is asked for is ONE event: the update (bound C), the loss (bound B) and whether the
update was within the clipping value (bound 1/2) have noise z, z_l, z_b over their bounds, and together they are one
Gaussian sum of one Poisson draw, 1/z^2 + 1/z_l^2 + 1/z_b^2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fairveil.algorithms.base import Algorithm, NextRound, Unit
from fairveil.errors import UserError
from fairveil.privacy.faithful import MedianClipped
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, SumMechanism
from fairveil.privacy.release import Plain, Reply
from fairveil.remote import Array, Count, Positive
from fairveil.session import Facts, Member, Pick, Session, Task, Terms
from fairveil.tasks import descent, mean_loss

S = TypeVar("S")
# what every task of these systems takes; see `BoundedTraining.inputs`
WEIGHED: dict[str, Any] = {
    "model": Array(("p",)), "learning_rate": Positive(), "local_epochs": Count(), "batch_size": Count(),
    "clip": Positive(), "size_cap": int, "mean_loss": float,
}  # fmt: skip
LARGEST_SIZE = 1 << 30  # a cap on sizes that caps none
CLIP_RATE = 0.2  # how fast the clipping value follows the quantile, as Andrew et al. recommend


class SampledTraining(Algorithm[S]):
    """Federated averaging over sampled cohorts: the part that all such systems have."""

    unit: ClassVar[Unit] = "client"
    trust: ClassVar[str] = (
        "the server: every client that is drawn sends it a contribution within bounds, but without noise; it adds "
        "them up, adds the noise, and keeps secret who was drawn and what each has sent"
    )

    sample_rate: float = Field(0.2, gt=0, le=1, description="q, chance of a client to take part")
    local_epochs: int = Field(1, ge=1, description="passes over a client's records in a round")
    batch_size: int = Field(32, ge=1, description="b, of the client's plain SGD")
    learning_rate: float = Field(0.5, gt=0, description="eta, at the client")
    decay: Literal["none", "linear"] = Field("none", description="of eta: linear falls to eta/E in the last round")
    server_learning_rate: float = Field(1.0, gt=0, description="step along the noisy mean")

    def rate(self, round: int) -> float:
        """eta of a round."""
        return self.learning_rate * (1 - (round - 1) / self.rounds if self.decay == "linear" else 1.0)

    def training(self, model: Tensor, round: int) -> dict[str, Plain]:
        """What a client needs to train this model."""
        return {
            "model": model,
            "learning_rate": self.rate(round),
            "local_epochs": self.local_epochs,
            "batch_size": self.batch_size,
        }


@dataclass(frozen=True)
class Tracked:
    """A model, and what is known of the clients by what they released."""

    model: Tensor  # w (p,)
    clip: float  # C_t, from rounds before this one
    loss: float  # mean loss of the clients, as far as it is tracked

    @classmethod
    def first(cls, session: Session) -> Tracked:
        """Before round 1: a model that knows nothing has about this loss."""
        facts = session.facts
        return cls(session.initial_model(), facts.clip_norm, math.log(facts.classes) if facts.classes else 1.0)


class BoundedTraining(SampledTraining[S]):
    """Cohorts whose clients weigh at most 1, below a clipping value that may follow a private quantile.

    The share of a client is weight * min(1, C_t/|update|) * update, in units in which C_t is `privacy.clip_norm`: what
    is planned does not change when C_t does. C_t and the mean loss are functions of earlier releases.

    `clip = "quantile"`: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive
    Clipping" (2021). A client says whether its update was within C_t, as -1/2 or 1/2, in the same sum as the update.
    """

    needs_loss: ClassVar[bool] = False  # whether the mean loss of the clients is tracked
    loss_rate: ClassVar[float] = 0.3  # how fast the mean loss follows what a cohort says
    capped: ClassVar[bool] = True  # whether clients weigh by `size_weight`

    clip: Literal["quantile", "fixed"] = Field(
        "quantile", description='C: it follows a quantile of the norms from privacy.clip_norm on; or "fixed"'
    )
    quantile: float = Field(0.8, gt=0, lt=1, description="share of the updates that are not to be clipped")
    size_cap: int = Field(
        0, ge=0, description="n_hat: a client weighs min(n_k, n_hat)/n_hat; 0: all the same"
    )  # fmt: skip
    loss_bound: float = Field(1.0, gt=0, description="B, the most that one client may move the mean loss by")
    side_noise: float = Field(6.0, gt=0, description="noise of losses and norms, over that of the update")

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.size_cap and not self.capped:
            raise UserError(
                f"algorithm.size_cap = {self.size_cap} makes no sense with {self.name}.",
                "Its clients have weights of their own, which no cap on sizes enters.",
                "leave out algorithm.size_cap",
            )
        return self

    def adapts(self, facts: Facts) -> bool:
        """Whether the clipping value moves; without a bound there is nothing that could."""
        return self.clip == "quantile" and math.isfinite(facts.clip_norm)

    def cohort_sum(self, terms: Terms) -> SumMechanism:
        """The sum of one round."""
        facts, z = terms.facts, terms.noise_multiplier
        parts = [Part("update", (facts.parameters,), facts.clip_norm, z)]
        if self.needs_loss:
            parts.append(Part("loss", (1,), self.loss_bound, self.side_noise * z))
        if self.adapts(facts):
            parts.append(Part("within", (1,), 0.5, self.side_noise * z))
        return CohortSums((*parts, *self.more_parts(terms)), self.sample_rate)

    def more_parts(self, terms: Terms) -> tuple[Part, ...]:
        """What else a client sends."""
        return ()

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter({self.cohort_sum(terms): self.rounds}) if terms.size is None else Counter()

    def inputs(self, state: Tracked, round: int) -> dict[str, Plain]:
        """What every task of these systems takes."""
        known = {"clip": state.clip, "size_cap": self.size_cap, "mean_loss": state.loss}
        return self.training(state.model, round) | known

    def asked(self, session: Session, task: Task, state: Tracked, **more: Plain) -> Mapping[str, Tensor]:
        """The noisy sums of this round, of a cohort that is drawn for it; "update" is in units of C_t."""
        mechanism = self.cohort_sum(session.federation_terms)
        inputs = self.inputs(state, session.round) | more
        return session.sum(task, session.cohort(mechanism.asked), mechanism, shared=inputs)

    def step(self, facts: Facts, state: Tracked) -> float:
        """The noisy sum times this is the weighted mean of the clipped updates: C_t/(clip_norm q sum_k weight_k)."""
        return unit_of(state.clip, facts.clip_norm) / (self.sample_rate * self.whole(facts))

    def ahead(self, task: Task, state: Tracked, terms: Terms, **more: Plain) -> NextRound | None:
        """One more round, of a system whose step is the weighted mean; see `Algorithm.next_round`."""
        mechanism = self.cohort_sum(terms)
        if not isinstance(mechanism, CohortSums):
            return None  # as published it clips when it has seen all
        step = self.step(terms.facts, state)
        inputs = self.inputs(state, self.rounds) | more
        full = 1 / (step * self.sample_rate * len(terms.facts.size))  # of a client that weighs as much as the others
        return NextRound(state.model, task, mechanism, inputs, self.server_learning_rate * step, full)

    def whole(self, facts: Facts) -> float:
        """W: what all clients weigh together, by their declared sizes. A constant: the drawn ones are not summed."""
        if not self.size_cap:
            return float(len(facts.size))
        return float(np.minimum(facts.size, self.size_cap).sum() / self.size_cap)

    def followed(self, facts: Facts, state: Tracked, noisy: Mapping[str, Tensor]) -> tuple[float, float]:
        """The clipping value and the mean loss after this round, from what was released."""
        expected = self.sample_rate * len(facts.size)  # q N
        clip, loss = state.clip, state.loss
        if "within" in noisy:
            within = min(1.0, max(0.0, float(noisy["within"]) / expected + 0.5))
            clip = state.clip * math.exp(-CLIP_RATE * (within - self.quantile))
        if "loss" in noisy:
            loss = max(0.0, state.loss + self.loss_rate * float(noisy["loss"]) / expected)
        return clip, loss


class PublishedTraining(BoundedTraining[S]):
    """A baseline of Du, Xiang and Wu (2025), which clip at the exact median of the norms of those that were drawn.

    That median tells of every client, so `faithful` has no guarantee.
    """

    sums: ClassVar[tuple[str, ...]] = ()  # what is summed exactly beside the update, as it was published

    faithful: bool = Field(False, description="clip at the exact median of the drawn norms: without a guarantee")

    def cohort_sum(self, terms: Terms) -> SumMechanism:
        if not self.faithful:
            return super().cohort_sum(terms)
        return self.exact_sum(terms)

    def exact_sum(self, terms: Terms) -> MedianClipped:
        """The sum of one round, as it was published: a client weighs p_k/q, p_k = n_k/n, and the noise C."""
        return MedianClipped(
            terms.facts.parameters, self.sample_rate, terms.noise_multiplier, self.sums, self.exact_whole(terms.facts)
        )

    def exact_whole(self, facts: Facts) -> float:
        """q n, in the units in which `size_weight` counts records here."""
        return float(self.sample_rate * facts.size.sum()) / LARGEST_SIZE

    def inputs(self, state: Tracked, round: int) -> dict[str, Plain]:
        return super().inputs(state, round) | ({"size_cap": LARGEST_SIZE} if self.faithful else {})

    def step(self, facts: Facts, state: Tracked) -> float:
        return 1.0 if self.faithful else super().step(facts, state)


def serve_one(facts: Facts, state: Tracked) -> Pick:
    """The same model for all."""
    return Pick.same(state.model, facts)


def unit_of(clip: float, clip_norm: float) -> float:
    """What one unit of a share's update is worth; without a bound updates are sent as they are."""
    return clip / clip_norm if math.isfinite(clip_norm) else 1.0


def trained(members: Sequence[Member]) -> Iterator[tuple[Member, Tensor, float]]:
    """Each client with its update, by plain SGD from the input "model", and its mean loss before it."""
    starts = torch.stack([cast(Tensor, member.inputs["model"]) for member in members])
    updates = descent(members, starts) - starts
    for member, start, update in zip(members, starts, updates, strict=True):
        yield member, update, mean_loss(member.model, start, member.data.train)


def size_weight(member: Member) -> float:
    """min(n_k, n_hat)/n_hat of the client's own records, or 1."""
    cap = cast(int, member.inputs["size_cap"])
    return min(len(member.data.train.y), cap) / cap if cap else 1.0


def shared(member: Member, update: Tensor, weight: float, loss: float, **more: Tensor) -> Reply:
    """A client's contribution: its update, clipped at the input "clip" and then times a weight from 0 to 1; and, where
    the mechanism sums them, its loss and whether its update was within the clipping value.

    Adding or removing the client moves each sum by at most the bound of its part, whatever the client holds: the weight
    and the loss are its own, and the clipping value is a function of earlier releases.
    """
    mechanism, clip = member.mechanism, cast(float, member.inputs["clip"])
    if isinstance(mechanism, MedianClipped):  # which clips when it has seen all
        exact = {"update": update, "weight": torch.tensor(weight), "loss": torch.tensor(loss), **more}
        share, diagnostics = mechanism.share({k: exact[k] for k in ("update", "weight", *mechanism.others)}, member)
        return Reply(share, diagnostics=diagnostics)
    bounded = cast(CohortSums, mechanism)
    parts = {part.name: part for part in bounded.parts}
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    factor = weight * min(1.0, clip / norm if norm else 1.0) / unit_of(clip, parts["update"].bound)
    given = {
        "update": factor * update,
        "loss": torch.tensor([loss - cast(float, member.inputs["mean_loss"])]),
        "within": torch.tensor([0.5 if norm <= clip else -0.5]),
        **more,
    }
    share, diagnostics = bounded.share({name: given[name] for name in parts}, member)
    return Reply(share, diagnostics=diagnostics | {"clipped": float(norm > clip)})
