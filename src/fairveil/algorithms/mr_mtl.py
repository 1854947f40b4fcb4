"""`mr-mtl`: a model for each client, pulled towards the mean of all (mean-regularised multi-task learning).

Liu et al., "On Privacy and Personalization in Cross-Silo Federated Learning" (2022). Client k keeps w_k and descends
f_k(w) + lambda/2 |w - w_bar|^2; w_bar is the mean over clients. lambda = 0 is `local`; a large one comes near `global`.
Privacy unit: one record of a client. Trust: nobody.

The pull is a function of released models, so it costs nothing and needs no clipping. Inside the clip, as the paper has
it (`faithful`), it is weakened together with the records' gradients, at the start more than ten-fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor

from fairveil.algorithms.base import LocalTraining
from fairveil.errors import UserError
from fairveil.session import Facts, Pick, Session, Terms


@dataclass(frozen=True)
class State:
    models: Tensor  # w_k (clients, p)


class MRMTL(LocalTraining[State]):
    name: ClassVar[str] = "mr-mtl"

    pull: float = Field(0.1, ge=0, description="lambda, towards the mean of all models")
    faithful: bool = Field(False, description="the pull inside the clip, with each record's gradient")

    @model_validator(mode="after")
    def _stable(self) -> Self:
        if self.learning_rate * self.pull > 1:
            raise UserError(
                f"algorithm.pull = {self.pull:g} overshoots at algorithm.learning_rate = {self.learning_rate:g}.",
                "A step would carry a model beyond the mean it is pulled to: learning_rate * pull must not exceed 1.",
                f"algorithm.pull = {1 / self.learning_rate:.3g}, or less",
            )
        return self

    def caution(self, terms: Sequence[Terms]) -> str | None:
        """That the published form is slow."""
        slow = "The pull inside the clip goes through torch.func.vmap, the slower way."
        return slow if self.faithful else None

    def start(self, session: Session) -> State:
        return State(session.initial_model().repeat(len(session.facts.size), 1))

    def round(self, session: Session, state: State) -> State:
        mean = state.models.mean(dim=0)  # w_bar
        updates = self.updates(session, Pick.own(state.models), centre=mean, pull=self.pull, pull_inside=self.faithful)
        return State(state.models + updates)

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.own(state.models)
