"""`q-fedavg`: federated averaging of losses to the power q + 1, with a step size of its own.

Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning" (2020). With F_k the loss of client k
at w and G_k = (w - w_k)/eta: D_k = F_k^q G_k, h_k = q F_k^(q-1) |G_k|^2 + F_k^q/eta, w -= sum D_k / sum h_k. (q, the
fairness, is `fairness_power` here; `sample_rate` is the chance to be drawn.) Privacy unit: one client; trust: the
server, with the exact sums.

Departures: F_k is clipped to [F_min, B] and |G_k| to C = C_t/eta, so that |D_k| <= B^q C and h_k <= h_max =
q C^2 max(F_min^(q-1), B^(q-1)) + B^q/eta, whatever the client holds. Both sums are over the same draw and so in the
same event. The noisy sum of h is not let below a half of what clients of loss F_min would bring, N F_min^q/eta times
the chance to be drawn. `faithful`: losses as they are, the exact median of the drawn norms as C; nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self, cast

import torch
from pydantic import Field, model_validator

from fairveil.algorithms.cohorts import WEIGHED, PublishedTraining, Tracked, serve_one, shared, trained, unit_of
from fairveil.errors import UserError
from fairveil.privacy.faithful import MedianClipped
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import Reply
from fairveil.remote import Positive, deployable
from fairveil.session import Facts, Member, Pick, Session, Terms

CURVATURE_NOISE = 2.0  # of h, over that of the update: what it divides needs to be known better than the mean loss


class QFedAvg(PublishedTraining[Tracked]):
    name: ClassVar[str] = "q-fedavg"
    capped: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = ("curvature",)

    fairness_power: float = Field(1.0, ge=0, description="q: 0 is fedavg, more is fairer")
    least_loss: float = Field(0.1, gt=0, description="F_min, from which on a smaller loss counts as this")
    largest_loss: float = Field(4.0, gt=0, description="B, from which on a larger loss counts as this")

    @model_validator(mode="after")
    def _losses(self) -> Self:
        if self.least_loss > self.largest_loss:
            raise UserError(
                f"algorithm.least_loss = {self.least_loss:g} is above algorithm.largest_loss = {self.largest_loss:g}.",
                "No loss lies between them.",
                "algorithm.least_loss = 0.1 and algorithm.largest_loss = 4.0",
            )
        return self

    def more_parts(self, terms: Terms) -> tuple[Part, ...]:
        bound = 1.0 if math.isfinite(terms.facts.clip_norm) else math.inf  # without a bound h is sent as it is
        return (Part("curvature", (1,), bound, CURVATURE_NOISE * terms.noise_multiplier),)

    def exact_whole(self, facts: Facts) -> float:
        return self.sample_rate * len(facts.size)  # so that sigma C is noise on a mean, as in the other baselines

    def start(self, session: Session) -> Tracked:
        return Tracked.first(session)

    def round(self, session: Session, state: Tracked) -> Tracked:
        eta, q = self.rate(session.round), self.fairness_power
        noisy = self.asked(
            session, powered_update, state, fairness_power=q, least_loss=self.least_loss, largest_loss=self.largest_loss
        )
        top = largest_curvature(state.clip / eta, eta, q, self.least_loss, self.largest_loss)
        if self.faithful or not math.isfinite(top):
            top = 1.0
        expected = self.sample_rate * len(session.facts.size)
        least = 0.5 * expected * self.least_loss**q / eta
        curvature = max(float(noisy["curvature"]) * top, least)  # sum of h
        weight = expected if self.faithful else self.largest_loss**q * unit_of(state.clip, session.facts.clip_norm)
        step = self.server_learning_rate * (weight / (eta * curvature)) * noisy["update"]  # -sum D / sum h
        return Tracked(state.model + step, *self.followed(session.facts, state, noisy))

    def serve(self, facts: Facts, state: Tracked) -> Pick:
        return serve_one(facts, state)


def largest_curvature(clip: float, eta: float, q: float, least: float, largest: float) -> float:
    """h_max of a loss from `least` to `largest` and |G| <= clip."""
    steepest = max(least ** (q - 1), largest ** (q - 1)) if q else 0.0
    return (q * clip**2 * steepest if q else 0.0) + largest**q / eta


@deployable(
    by=CohortSums, **WEIGHED, fairness_power=Positive(zero=True), least_loss=Positive(), largest_loss=Positive()
)  # fmt: skip
def powered_update(members: Sequence[Member]) -> list[Reply]:
    """Each client shares F^q times its clipped update, and h."""
    replies = []
    for member, update, loss in trained(members):
        eta, q, clip = (cast(float, member.inputs[name]) for name in ("learning_rate", "fairness_power", "clip"))
        least, largest = (cast(float, member.inputs[name]) for name in ("least_loss", "largest_loss"))
        exact, norm = isinstance(member.mechanism, MedianClipped), float(torch.linalg.vector_norm(update)) / eta
        top = 1.0
        if not exact:
            loss, norm = min(max(loss, least), largest), min(norm, clip / eta)
            bound = largest_curvature(clip / eta, eta, q, least, largest)
            top = bound if math.isfinite(bound) else 1.0
        steep = q * loss ** (q - 1) * norm**2 if q and loss > 0 else 0.0
        h = torch.tensor((steep + loss**q / eta) / top)
        weight = loss**q if exact else (loss / largest) ** q
        replies.append(shared(member, update, weight, loss, curvature=h if exact else h.view(1)))
    return replies
