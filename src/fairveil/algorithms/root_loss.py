"""`root-loss`: federated averaging in which a client weighs the root of its loss.

A client of loss L_k weighs sqrt(min(L_k, B)/B) (B = `loss_scale`), at most 1, after its update was clipped: who is
served well already moves the model less. Privacy unit: one client; trust: the server, with the exact sums.

Sensitivity: the share is a number from 0 to 1, made of the client's own records and the released model, times a vector
of norm at most C_t. So one client moves the sum by at most C_t, and no loss is released. The sum is divided by the
constant q W of `fedavg`, not by the weights, which are secret: the step shrinks as losses do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, cast

from pydantic import Field

from fairveil.algorithms.base import NextRound
from fairveil.algorithms.cohorts import WEIGHED, BoundedTraining, Tracked, serve_one, shared, size_weight, trained
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.release import Reply
from fairveil.remote import Positive, deployable
from fairveil.session import Facts, Member, Pick, Session, Terms


class RootLoss(BoundedTraining[Tracked]):
    name: ClassVar[str] = "root-loss"

    loss_scale: float = Field(1.0, gt=0, description="B, the loss from which on a client weighs 1")

    def start(self, session: Session) -> Tracked:
        return Tracked.first(session)

    def round(self, session: Session, state: Tracked) -> Tracked:
        noisy = self.asked(session, root_weighed_update, state, loss_scale=self.loss_scale)
        step = self.server_learning_rate * self.step(session.facts, state) * noisy["update"]
        return Tracked(state.model + step, *self.followed(session.facts, state, noisy))

    def next_round(self, facts: Facts, state: Tracked, terms: Terms) -> NextRound | None:
        return self.ahead(root_weighed_update, state, terms, loss_scale=self.loss_scale)

    def serve(self, facts: Facts, state: Tracked) -> Pick:
        return serve_one(facts, state)


@deployable(by=CohortSums, **WEIGHED, loss_scale=Positive())
def root_weighed_update(members: Sequence[Member]) -> list[Reply]:
    """Each client shares its clipped update times the root of its loss."""
    replies = []
    for member, update, loss in trained(members):
        weight = math.sqrt(min(loss / cast(float, member.inputs["loss_scale"]), 1.0)) if loss > 0 else 0.0
        replies.append(shared(member, update, size_weight(member) * weight, loss))
    return replies
