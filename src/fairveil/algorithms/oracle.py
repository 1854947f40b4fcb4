"""`oracle`: the true clusters are known from the first round; each trains its own model with local DP-SGD.

The upper reference of Malekmohammadi et al., "Differentially Private Clustered Federated Learning" (2024):
what clustering could reach if it never erred. Privacy unit: one record of a client. Trust: nobody. The true
clusters are taken as public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fairveil.algorithms.base import LocalTraining, moved
from fairveil.session import Facts, Pick, Session


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_m (clusters, p)


class Oracle(LocalTraining[State]):
    name: ClassVar[str] = "oracle"
    public: ClassVar[dict[str, str]] = {
        "the true cluster of every client": "given to the oracle from outside: a reference, not a method"
    }

    def start(self, session: Session) -> State:
        return State(session.initial_model().repeat(int(session.facts.group.max()) + 1, 1))

    def round(self, session: Session, state: State) -> State:
        cluster = session.facts.group
        updates = self.updates(session, Pick(state.models, cluster))
        return State(moved(state.models, cluster, updates))

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick(state.models, facts.group)
