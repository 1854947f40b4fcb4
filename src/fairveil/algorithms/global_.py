"""`global`: one model for all clients, trained with local DP-SGD (the baseline DPFedAvg).

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), with the
record-level privacy of Malekmohammadi et al., "Differentially Private Clustered Federated Learning" (2024).
Privacy unit: one record of a client. Trust: nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import LocalTraining
from fairveil.session import Facts, Pick, Session


@dataclass(frozen=True)
class State:
    model: Tensor  # theta (p,)


class Global(LocalTraining[State]):
    name: ClassVar[str] = "global"

    weights: Literal["equal", "size"] = Field("equal", description="of clients: 1/n, or by declared size N_i")

    def start(self, session: Session) -> State:
        return State(session.initial_model())

    def round(self, session: Session, state: State) -> State:
        updates = self.updates(session, state.model)
        if self.weights == "equal":
            return State(state.model + updates.mean(dim=0))
        size = session.facts.size
        return State(state.model + torch.from_numpy(size / size.sum()).float() @ updates)

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.same(state.model, facts)
