"""`fairfed`: federated averaging whose weights follow how far a client's loss is from the mean.

Ezzeldin, Yan, He, Ferrara and Avestimehr, "FairFed: Enabling Group Fairness in Federated Learning" (2023), as Du, Xiang
and Wu, "Mitigating Unfairness in Differentially-Private Federated Learning" (2025), adapt it to clients: weight_k -=
beta (mean loss - loss_k), from n_k/n on. Privacy unit: one client; trust: the server, with the exact sums.

Departures: as printed, the weights are clamped at 0 and divided by their sum, so that one client changes the weight of
every other one. Sound: omega_k = clamp(N n_k/n + beta (L_k - Lbar), 0, omega_max), with public n and the released mean
loss Lbar, and no division: a number from 0 to omega_max times a vector of norm at most C_t, so that one client moves
the sum by at most omega_max C_t. The loss is in the same event. (Weights are N times those of the paper: 1 is the
average client.) `faithful`: every client keeps its weight, updates are clipped at the exact median of the drawn norms,
the weights are divided by their sum; nothing is claimed then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import NextRound
from fairveil.algorithms.cohorts import WEIGHED, PublishedTraining, Tracked, serve_one, shared, trained
from fairveil.privacy.faithful import MedianClipped
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.release import Plain, Reply
from fairveil.remote import Positive, deployable
from fairveil.session import Facts, Member, Pick, Session, Terms


class FairFed(PublishedTraining[Tracked]):
    name: ClassVar[str] = "fairfed"
    needs_loss: ClassVar[bool] = True
    capped: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = ("loss", "one")

    beta: float = Field(1.0, ge=0, description="beta, how fast a weight follows the loss")
    largest_weight: float = Field(3.0, gt=0, description="omega_max, over that of an average client")

    def exact_whole(self, facts: Facts) -> float:
        return 0.0  # the weights are divided by their sum

    def start(self, session: Session) -> Tracked:
        return Tracked.first(session)

    def round(self, session: Session, state: Tracked) -> Tracked:
        noisy = self.asked(session, follow_loss, state, **self.settings(session.facts))
        step = self.server_learning_rate * self.step(session.facts, state) * noisy["update"]
        return Tracked(state.model + step, *self.followed(session.facts, state, noisy))

    def settings(self, facts: Facts) -> dict[str, Plain]:
        """What a client needs to find its weight, besides what all such tasks take."""
        mean_size = float(facts.size.mean())  # n/N
        return {"beta": self.beta, "largest_weight": self.largest_weight, "mean_size": mean_size}

    def step(self, facts: Facts, state: Tracked) -> float:
        return super().step(facts, state) * (1.0 if self.faithful else self.largest_weight)

    def followed(self, facts: Facts, state: Tracked, noisy: Mapping[str, Tensor]) -> tuple[float, float]:
        if not self.faithful:
            return super().followed(facts, state, noisy)
        drawn = float(noisy["one"])
        return state.clip, float(noisy["loss"]) / drawn if drawn else state.loss  # exactly

    def next_round(self, facts: Facts, state: Tracked, terms: Terms) -> NextRound | None:
        return self.ahead(follow_loss, state, terms, **self.settings(facts))

    def serve(self, facts: Facts, state: Tracked) -> Pick:
        return serve_one(facts, state)


@deployable(by=CohortSums, **WEIGHED, beta=float, largest_weight=Positive(), mean_size=Positive())
def follow_loss(members: Sequence[Member]) -> list[Reply]:
    """Each client shares its clipped update, by how far its loss is above the mean."""
    replies = []
    for member, update, loss in trained(members):
        given = {name: cast(float, member.inputs[name]) for name in ("beta", "largest_weight", "mean_size")}
        more = given["beta"] * (loss - cast(float, member.inputs["mean_loss"]))
        own = len(member.data.train.y) / given["mean_size"]
        if isinstance(member.mechanism, MedianClipped):
            weight = max(0.0, float(member.personal.get("weight", torch.tensor(own))) + more)
            reply = shared(member, update, weight, loss, one=torch.tensor(1.0))
            replies.append(replace(reply, keep={"weight": torch.tensor(weight)}))
        else:
            weight = min(max(0.0, own + more), given["largest_weight"])
            replies.append(shared(member, update, weight / given["largest_weight"], loss))
    return replies
