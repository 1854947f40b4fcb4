"""`km-cdpfl`: k-means in every round ("myopic" clustering), a baseline.

Werner et al., "Provably Personalized and Robust Federated Learning" (2023), with local DP-SGD; compared with in
Malekmohammadi, Taik and Farnadi, "Mitigating Disparate Impact of Differential Privacy in Federated Learning through
Robust Clustering" (2024). The server clusters what the clients have just sent, so it costs nothing more. Privacy unit:
one record of a client. Trust: nobody.

Updates of clients that started from different models are not comparable; so local models are clustered, theta + update.
`faithful` clusters the updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import Found, LocalTraining, NoiseFor, check_count, moved
from fairveil.clustering import gram, kmeans, match_labels
from fairveil.session import Facts, Pick, Session


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_m (M, p)
    cluster: np.ndarray  # of each client


class KMCDPFL(LocalTraining[State]):
    name: ClassVar[str] = "km-cdpfl"

    clusters: int = Field(4, ge=1, description="M")
    faithful: bool = Field(False, description="cluster the updates, whatever models they started from")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        check_count(self.clusters, facts)
        return self

    def start(self, session: Session) -> State:
        return State(session.initial_model().repeat(self.clusters, 1), np.zeros(len(session.facts.size), int))

    def round(self, session: Session, state: State) -> State:
        updates = self.updates(session, Pick(state.models, state.cluster))
        local = updates + state.models[state.cluster]
        label = kmeans(gram(updates if self.faithful else local), self.clusters, session.stream("k-means").numpy)
        cluster = match_labels(label, state.cluster, self.clusters)
        if self.faithful:
            return State(moved(state.models, cluster, updates), cluster)
        return State(moved(torch.zeros_like(state.models), cluster, local), cluster)  # k-means leaves no cluster empty

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick(state.models, state.cluster)

    def found(self, state: State) -> Found:
        return Found(state.cluster, len(state.models))
