"""`loss-split`: two models, and each client trains the one that serves it better.

Ours. For `first_rounds` all train the first model. Then a client whose loss on it is above the released mean by more
than `margin` trains the second one, which starts as a copy, for `split_rounds`; afterwards each trains whichever has
the lower loss on its own records, and is served by that one in the end. Which one it is shows in its share alone, which
only the trusted server sees: a block for each model, of which one is not zero; what is published are sums with noise.
Privacy unit: one client; trust: the server, with the exact sums.

Sensitivity: a client's share is (e_j (x) clipped update, e_j, loss - released mean, bit), j its choice: of norms at
most C_t, 1, B and 1/2, whatever it holds and whatever others do, since the choice depends on its own records and on
earlier releases only. Noise is added to both blocks always. All of it is of one draw: one event, see `cohorts.py`.

A model that few train has a sum of few updates under the same noise. Its step is divided by q N sqrt(p_j), p_j the
noisy share of clients that train it, and not by q N p_j: between a mean, which would blow up the noise, and a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import NoiseFor
from fairveil.algorithms.cohorts import WEIGHED, BoundedTraining, Tracked, shared, size_weight, unit_of
from fairveil.errors import UserError
from fairveil.privacy.mechanisms import CohortSums, Part, SumMechanism
from fairveil.privacy.release import Reply
from fairveil.remote import Array, deployable
from fairveil.session import Facts, Member, Offer, Session, Terms
from fairveil.tasks import descent, mean_loss

LEAST_SHARE, FORGET = 0.05, 0.1  # p_j is not taken below the first, and follows the counts at the second


@dataclass(frozen=True)
class State(Tracked):
    second: Tensor  # w2 (p,); w1 is `model`
    share: Tensor  # p (2,), the share of the clients that train each, as released


class LossSplit(BoundedTraining[State]):
    name: ClassVar[str] = "loss-split"
    needs_loss: ClassVar[bool] = True

    first_rounds: float = Field(0.2, ge=0, le=1, description="T0, share of the rounds in which there is one model")
    split_rounds: float = Field(0.1, ge=0, le=1, description="T1, share of them in which losses decide")
    margin: float = Field(0.2, ge=0, description="m, of a loss above the mean that makes a client change over")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        if self.first_rounds + self.split_rounds > 1:
            raise UserError(
                f"algorithm.first_rounds = {self.first_rounds:g} and algorithm.split_rounds = {self.split_rounds:g} "
                "are more than all rounds.",
                "After these shares of the rounds each client takes the model that suits it. Nothing was run.",
                "algorithm.first_rounds = 0.2 and algorithm.split_rounds = 0.1",
            )
        return self

    def cohort_sum(self, terms: Terms) -> SumMechanism:
        usual = cast(CohortSums, super().cohort_sum(terms))
        update, *others = usual.parts
        blocks = replace(update, shape=(2, terms.facts.parameters))
        return replace(usual, parts=(blocks, *others))

    def more_parts(self, terms: Terms) -> tuple[Part, ...]:
        return (Part("count", (2,), 1.0, self.side_noise * terms.noise_multiplier),)

    def start(self, session: Session) -> State:
        first = Tracked.first(session)
        return State(**vars(first), second=first.model.clone(), share=torch.tensor([1.0, 0.0]))

    def round(self, session: Session, state: State) -> State:
        models = torch.stack([state.model, state.second])
        noisy = self.asked(session, split_update, state, models=models, margin=self.margin, stage=self.stage(session))
        scale = self.server_learning_rate * unit_of(state.clip, session.facts.clip_norm)
        divisor = self.sample_rate * self.whole(session.facts) * state.share.clamp(min=LEAST_SHARE).sqrt()
        first, second = models + scale * noisy["update"] / divisor.unsqueeze(1)
        if self.stage(session) == "first":
            second = first.clone()  # nobody has trained it: noise alone
        counts = (noisy["count"] / (self.sample_rate * len(session.facts.size))).clamp(0.0, 1.0)
        clip, loss = self.followed(session.facts, state, noisy)
        return State(first, clip, loss, second, (1 - FORGET) * state.share + FORGET * counts)

    def stage(self, session: Session) -> str:
        """How clients choose in this round."""
        done = (session.round - 1) / self.rounds
        if done < self.first_rounds:
            return "first"
        return "split" if done < self.first_rounds + self.split_rounds else "best"

    def serve(self, facts: Facts, state: State) -> Offer:
        return Offer(torch.stack([state.model, state.second]))


@deployable(by=CohortSums, **WEIGHED, models=Array((2, "p")), margin=float, stage=str)
def split_update(members: Sequence[Member]) -> list[Reply]:
    """Each client shares its clipped update in the block of the model that it trained, and which that was."""
    chosen, losses, starts = [], [], []
    for member in members:
        models, stage = cast(Tensor, member.inputs["models"]), member.inputs["stage"]
        first, second = (mean_loss(member.model, weights, member.data.train) for weights in models)
        limit = cast(float, member.inputs["mean_loss"]) + cast(float, member.inputs["margin"])
        j = {"first": 0, "split": int(first > limit)}.get(cast(str, stage), int(second < first))
        chosen.append(j)
        losses.append((first, second)[j])
        starts.append(models[j])
    updates = descent(members, torch.stack(starts)) - torch.stack(starts)
    replies = []
    for member, j, loss, update in zip(members, chosen, losses, updates, strict=True):
        block, count = torch.zeros(2, len(update)), torch.zeros(2)
        block[j], count[j] = update, 1.0
        replies.append(shared(member, block, size_weight(member), loss, count=count))
    return replies
