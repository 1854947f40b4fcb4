"""`fedfdp`: one model for all clients; records that fare worse than the mean weigh more, before they are clipped.

Ling, Fu, Chen, Wang, Li, Cheng, Xu and Li, "FedFDP: Federated Learning with Fairness and Differential Privacy" (2024,
arXiv 2402.16028). To the loss is added a penalty for unfairness, lambda/2 sum_i (F_i(w) - F(w))^2. That multiplies the
gradient of a record with loss l by 1 + lambda (l - F), and the product is clipped ("fair clipping").
Privacy unit: one record of a client. Trust: nobody.

F is the mean loss that the clients released in the round before, with noise; in round 1 there is none, and all records
weigh the same. The losses are summed over the batches of the gradients, so both are one event: see `FairTraining`.
Here l is bounded by B in the coefficient as well, and the coefficient is not below 0: nobody's loss is to be increased.
B is a constant here; the paper adapts it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fairveil.algorithms.base import LocalTraining
from fairveil.errors import UserError
from fairveil.privacy.fair_training import LARGEST_COEFFICIENT, FairTraining
from fairveil.privacy.mechanisms import Mechanism, Part
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import fair_update


@dataclass(frozen=True)
class State:
    model: Tensor  # w (p,)
    loss: float  # F, as released in the last round; before the first it is not used


class FedFDP(LocalTraining[State]):
    name: ClassVar[str] = "fedfdp"

    penalty: float = Field(0.1, ge=0, description="lambda, of unfairness; 0 is `global`")
    loss_bound: float = Field(5.0, gt=0, description="B, the most that a record's loss counts for")
    loss_noise: float = Field(6.0, gt=0, description="z_l / z, noise multiplier of the loss over that of the gradient")

    @model_validator(mode="after")
    def _within(self) -> Self:
        most = LARGEST_COEFFICIENT - 1
        if self.penalty * self.loss_bound > most:
            raise UserError(
                f"algorithm.penalty = {self.penalty:g} is too large at algorithm.loss_bound = {self.loss_bound:g}.",
                "The gradient of a record is multiplied by up to 1 + penalty * loss_bound, and its rounding with it:\n"
                f"beyond {LARGEST_COEFFICIENT:g} the bound on what a record can do would not be safe.",
                f"algorithm.penalty = {math.floor(1e3 * most / self.loss_bound) / 1e3:g}, or less",
            )
        return self

    def fair_training(self, terms: Terms) -> FairTraining:
        """One round of local training under a client's terms."""
        loss = Part("loss", (), self.loss_bound, self.loss_noise * terms.noise_multiplier)
        return FairTraining(self.training(terms), loss)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        if terms.size is None:
            return Counter()
        return Counter({self.fair_training(terms): self.rounds})

    def start(self, session: Session) -> State:
        return State(session.initial_model(), 0.0)

    def round(self, session: Session, state: State) -> State:
        replies = session.ask(
            fair_update, session.facts.clients, mechanism=self.fair_training,
            shared={
                "model": state.model, "learning_rate": self.rate(session), "global_loss": state.loss,
                "penalty": self.penalty if session.round > 1 else 0.0,
            },
        )  # fmt: skip
        updates = torch.stack([cast(Tensor, reply["update"]) for reply in replies])
        losses = np.array([cast(float, reply["loss"]) for reply in replies])
        told = losses[np.isfinite(losses)]  # by those that were there
        loss = float(np.clip(told.mean(), 0.0, self.loss_bound)) if len(told) else state.loss
        return State(state.model + updates.mean(dim=0), loss)

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.same(state.model, facts)
