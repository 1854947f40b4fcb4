"""`fair-fedavg`: clipping values that keep every client's loss near the mean.

Du, Xiang and Wu, "Mitigating Unfairness in Differentially-Private Federated Learning" (2025), Algorithm 1; the method
of multipliers is in `privacy/multipliers.py`. Privacy unit: one client; trust: the server, with the exact sums.

The guarantee of the paper does not hold. Its server chooses every C_k from all updates and losses, so that removing a
client changes what all others contribute; its noise is in proportion to max C_k, which tells of the norms; and its
weights p_k/q make one client move the sum by up to max (p_k/q) C_k. `faithful` is that form, and claims nothing.

The sound form, the default. Each client chooses C_k itself: it takes the steps of the method with the last released
aggregate and the released mean loss in the place of the others, and itself as the one whose distance counts; the term
of the noise is left out, since C_k is never above the public C_t, for which the noise is made.

Sensitivity: let D and D' differ in client k, and condition on all earlier releases. The model, the aggregate, how long
its noise is, the mean loss and C_t are functions of these, so they are the same for both. What another client j shares
is a function of its own records and of these: the same for both. What client k shares is weight_k min(1,
C_k/|update_k|) update_k with weight_k <= 1 and C_k in [0.1, 1] C_t: a vector of norm at most C_t, whatever it holds. So
the sum moves by at most C_t; the sum of losses by at most B, since each is clipped to [-B, B] around the released mean;
that of bits by 1/2. All three are of one draw and have noise of their own: one event, see `cohorts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fairveil.algorithms.base import NextRound
from fairveil.algorithms.cohorts import WEIGHED, PublishedTraining, Tracked, serve_one, shared, size_weight, trained
from fairveil.errors import UserError
from fairveil.privacy.faithful import MedianClipped, MultiplierClipped
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.multipliers import Contributors, Multipliers, fair_clips, gram_matrix
from fairveil.privacy.release import Plain, Reply
from fairveil.remote import Array, Count, deployable
from fairveil.session import Facts, Member, Pick, Session, Terms

LEAST_CLIP = 0.1  # of C_t: nobody is silenced


@dataclass(frozen=True)
class State(Tracked):
    aggregate: Tensor  # the last released mean of the clipped updates (p,); 0 before there is one
    noise: float = 0.0  # how long the noise in it is expected to be, as a vector: the root of p times its variance


class FairFedAvg(PublishedTraining[State]):
    name: ClassVar[str] = "fair-fedavg"
    needs_loss: ClassVar[bool] = True
    loss_rate: ClassVar[float] = 1.0  # the whole way, as the noise allows: who is worse off is measured by it
    sums: ClassVar[tuple[str, ...]] = ("loss",)

    alpha: float = Field(
        0.2, ge=0, examples=[0.2], description="how far a loss may lie from the mean; left out: 0.2, faithful 2"
    )
    deviation_weight: float = Field(0.0, ge=0, description="gamma, of what clipping and noise do to single clients")
    penalty: float = Field(0.0, ge=0, description="c, of the squared constraint")
    multiplier: float = Field(30.0, ge=0, description="lambda at the beginning of each round")
    clip_rate: float = Field(
        100.0, gt=0, examples=[100.0], description="zeta, in units of C; left out: 100, faithful 1e-4 (not in units)"
    )
    multiplier_rate: float = Field(0.005, ge=0, description="xi")
    multiplier_steps: int = Field(5, ge=1, description="chi")

    @model_validator(mode="before")
    @classmethod
    def _as_printed(cls, given: Any) -> Any:
        """alpha and zeta of the paper, for its own form."""
        published = isinstance(given, Mapping) and given.get("faithful")
        return {"alpha": 2.0, "clip_rate": 1e-4} | dict(given) if published else given

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.faithful and self.decay != "none":
            raise UserError(
                f'algorithm.decay = "{self.decay}" does not go with algorithm.faithful.',
                "The published form chooses clipping values by one learning rate, which is the same in all rounds.",
                "leave out algorithm.decay",
            )
        return self

    def exact_sum(self, terms: Terms) -> MedianClipped:
        method = Multipliers(
            self.learning_rate, self.alpha, self.deviation_weight, self.penalty, self.multiplier, self.clip_rate,
            self.multiplier_rate, self.multiplier_steps,
        )  # fmt: skip
        facts, z = terms.facts, terms.noise_multiplier
        return MultiplierClipped(
            facts.parameters, self.sample_rate, z, self.sums, self.exact_whole(facts), method=method
        )  # fmt: skip

    def start(self, session: Session) -> State:
        first = Tracked.first(session)
        return State(**vars(first), aggregate=torch.zeros_like(first.model))

    def round(self, session: Session, state: State) -> State:
        noisy = self.asked(session, fairly_clipped_update, state, **self.settings(session.facts, state))
        mean = self.step(session.facts, state) * noisy["update"]
        model = state.model + self.server_learning_rate * mean
        if self.faithful:
            return State(model, state.clip, state.loss, mean)
        noise = self.noise(session.federation_terms, state)
        return State(model, *self.followed(session.facts, state, noisy), mean, noise)

    def noise(self, terms: Terms, state: State) -> float:
        """How long the noise in the mean of a round is expected to be: it is announced, and no secret."""
        std = terms.noise_multiplier * terms.facts.clip_norm if math.isfinite(terms.facts.clip_norm) else 0.0
        return math.sqrt(terms.facts.parameters) * std * self.step(terms.facts, state)

    def settings(self, facts: Facts, state: State) -> dict[str, Plain]:
        """What a client needs to choose its clipping value, besides what all such tasks take."""
        return {
            "aggregate": state.aggregate,
            "noise": state.noise,
            "server_learning_rate": self.server_learning_rate,
            "part": 1 / (self.sample_rate * self.whole(facts)),  # a_k of a client of weight 1
            "alpha": self.alpha,
            "deviation_weight": self.deviation_weight,
            "penalty": self.penalty,
            "multiplier": self.multiplier,
            "clip_rate": self.clip_rate,
            "multiplier_rate": self.multiplier_rate,
            "multiplier_steps": self.multiplier_steps,
        }

    def next_round(self, facts: Facts, state: State, terms: Terms) -> NextRound | None:
        return self.ahead(fairly_clipped_update, state, terms, **self.settings(facts, state))

    def serve(self, facts: Facts, state: State) -> Pick:
        return serve_one(facts, state)


@deployable(
    by=CohortSums, **WEIGHED, aggregate=Array(("p",)), noise=float, server_learning_rate=float, part=float, alpha=float,
    deviation_weight=float, penalty=float, multiplier=float, clip_rate=float, multiplier_rate=float,
    multiplier_steps=Count(),
)  # fmt: skip
def fairly_clipped_update(members: Sequence[Member]) -> list[Reply]:
    """Each client shares its update, clipped at a value of its own below the public one, by its size."""
    replies = []
    for member, update, loss in trained(members):
        weight = size_weight(member)
        if isinstance(member.mechanism, MedianClipped):
            replies.append(shared(member, update, weight, loss))
            continue
        kept = fairly_kept(member, update, loss, weight)
        reply = shared(member, update, weight * kept, loss)
        replies.append(replace(reply, diagnostics=dict(reply.diagnostics) | {"shrunk": float(kept < 1)}))
    return replies


def fairly_kept(member: Member, update: Tensor, loss: float, weight: float) -> float:
    """C_k over the norm of what C_t leaves of the update, at most 1.

    C_k by the method of multipliers, with the released aggregate in the place of the others: "the other contributor"
    has its loss (the released mean), is the mean, and is what the loss is summed over. Lengths are in units of C_t, so
    that the rate of the steps does not depend on the scale of gradients. Since update = -eta g, a step of
    `server_learning_rate` changes the losses by <g, u> = -<update, u>/eta: in these units the method's learning rate is
    server_learning_rate C_t^2/eta.

    The aggregate is a mean with noise, of length `noise`, which is far longer than the mean. What others gain by the
    step is the square of the mean: that of the noise is taken off, or everybody would think itself left behind.
    """
    given = {name: cast(float, value) for name, value in member.inputs.items() if not isinstance(value, Tensor)}
    clip, eta = given["clip"], given["learning_rate"]
    if not math.isfinite(clip):
        return 1.0  # there is no bound to stay below
    gram, sums = gram_matrix([update / clip, cast(Tensor, member.inputs["aggregate"]) / clip])
    gram[1, 1] = max(0.0, float(gram[1, 1]) - (given["noise"] / clip) ** 2)
    norms = gram.diagonal().sqrt()
    length = min(float(norms[0]), 1.0)
    if not 0 < length < math.inf or not math.isfinite(loss):
        return 1.0  # nothing to clip, or nothing that counts
    method = Multipliers(
        given["server_learning_rate"] * clip**2 / eta, given["alpha"], given["deviation_weight"], given["penalty"],
        given["multiplier"], given["clip_rate"], given["multiplier_rate"], int(given["multiplier_steps"]),
    )  # fmt: skip
    only_others = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = Contributors(
        gram=gram,
        sums=sums * clip / eta,
        losses=torch.tensor([loss, given["mean_loss"]], dtype=torch.float64),
        objective=only_others,
        share=torch.tensor([weight * given["part"], 1.0], dtype=torch.float64),
        mean=only_others,
        free=torch.tensor([True, False]),
        about=0,
    )
    chosen = fair_clips(found, method, norms.clamp(max=torch.tensor([1.0, math.inf])), most=1.0)
    return min(1.0, max(LEAST_CLIP, float(chosen[0])) / length)
