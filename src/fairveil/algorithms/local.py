"""`local`: no federation. Each client trains alone with local DP-SGD; its model is released, and used by itself.

A baseline. The models are released under the same price as the federated ones, so that accuracies compare at
equal privacy. Privacy unit: one record of a client. Trust: nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fairveil.algorithms.base import LocalTraining
from fairveil.session import Facts, Pick, Session


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_i (clients, p)


class Local(LocalTraining[State]):
    name: ClassVar[str] = "local"

    def start(self, session: Session) -> State:
        return State(session.initial_model().repeat(len(session.facts.size), 1))

    def round(self, session: Session, state: State) -> State:
        return State(state.models + self.updates(session, Pick.own(state.models)))

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.own(state.models)
