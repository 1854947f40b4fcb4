"""`ifca`: clusters by loss alone (the baselines f-CDPFL, and DP-IFCA).

Ghosh et al., "An Efficient Framework for Clustered Federated Learning" (2020), with local DP-SGD and private choices as
Liu et al., "On Privacy and Personalization in Cross-Silo Federated Learning" (2022) do it. M different models start at
random; each client chooses the one that suits it best and trains it. Privacy unit: one record of a client. Trust:
nobody. `faithful` chooses the exact lowest loss, as Ghosh et al. do without privacy: no epsilon covers that.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import Found, LocalTraining, NoiseFor, check_count, check_score, moved
from fairveil.privacy.choice import PrivateChoice, Score
from fairveil.privacy.mechanisms import Mechanism
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import choose_model


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_m (M, p)
    cluster: np.ndarray  # of each client


class IFCA(LocalTraining[State]):
    name: ClassVar[str] = "ifca"

    clusters: int = Field(4, ge=1, description="M")
    select_rounds: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        "all", description="choose in so many first rounds"
    )
    select_epsilon: float = Field(0.1, gt=0, le=100, description="of one choice: its bounded range (faithful: none)")
    score: Score = Field("correct", description='"correct" records, or their clipped "loss" (faithful: exact loss)')
    faithful: bool = Field(False, description="choose by the exact loss: without a guarantee")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        check_count(self.clusters, facts)
        check_score("loss" if self.faithful else self.score, facts)
        return self

    def choice(self, terms: Terms) -> PrivateChoice:
        """One private choice among the models; without any noise in training, the exact best."""
        if self.faithful:
            return PrivateChoice(math.inf, terms.facts.adjacency, "loss")
        return PrivateChoice(
            self.select_epsilon if terms.noise_multiplier else math.inf, terms.facts.adjacency, self.score
        )

    @property
    def choices(self) -> int:
        return self.rounds if self.select_rounds == "all" else min(self.select_rounds, self.rounds)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        if terms.size is None:
            return Counter()
        return +(super().releases(terms) + Counter({self.choice(terms): self.choices}))

    def start(self, session: Session) -> State:
        models = [session.initial_model(f"model of cluster {m}") for m in range(self.clusters)]
        return State(torch.stack(models), np.zeros(len(session.facts.size), int))

    def round(self, session: Session, state: State) -> State:
        cluster = state.cluster
        if session.round <= self.choices:
            replies = session.ask(
                choose_model, session.facts.clients, mechanism=self.choice, shared={"models": state.models}
            )
            cluster = np.array([reply["choice"] for reply in replies])
        updates = self.updates(session, Pick(state.models, cluster))
        return State(moved(state.models, cluster, updates), cluster)

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick(state.models, state.cluster)

    def found(self, state: State) -> Found:
        return Found(state.cluster, len(state.models))
