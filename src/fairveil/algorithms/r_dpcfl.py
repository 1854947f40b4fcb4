"""`r-dpcfl`: robust differentially private clustered federated learning.

Malekmohammadi, Taik and Farnadi, "Differentially Private Clustered Federated Learning" (2024), Algorithm 1. In the
first round every client trains the same model on all its records at once, and the server clusters the noisy updates.
Up to round E_c these clusters are trained. Then each client privately chooses the cluster whose model suits it best.
Privacy unit: one record of a client. Trust: nobody.

What is done otherwise than in the paper, because it is better at the same price; `faithful` does it as the paper does:
- The server knows the noise of every update and takes it out of their distances (see clustering.py). It then also
  sees when there is only one cluster.
- The noise of round 1 need not be that of the others: the planner trades one against the other, for each client by its
  size, so that all first updates are about equally clear (first_round_factor).
- The first updates are the first step of each cluster's training: they are paid for. The paper starts again.
- E_c is at least 5: before that the models hardly differ, and nobody could choose.
- There is one choice where the paper makes E/10 and keeps the last (of several, the cluster chosen most often); and it
  starts from what the first round has shown: the responsibilities are the base measure of the exponential mechanism.
Prices are always this library's: neighbours as the config has them (the paper: replacement), the smaller of RDP and PLD
(RDP), all composed at one delta, and the scale that suffices for a choice (the paper's code: twice that, add/remove).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import Found, LocalTraining, NoiseFor, check_count, check_score, moved
from fairveil.clustering import Projection, find_clusters, gram
from fairveil.errors import UserError
from fairveil.privacy.choice import PrivateChoice, Score
from fairveil.privacy.mechanisms import Mechanism, noise_std
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import choose_model

Factor = Annotated[float, Field(ge=0.01, le=100)]
FactorsBySize = tuple[tuple[int, Factor], ...]  # from so many records on, this factor; made by the planner

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # beyond 4 the first round costs next to nothing anyway
DETECTABLE = 2.5
LEAST_SWITCH = 5  # after fewer rounds the models of the clusters hardly differ, and nobody could choose among them
LEAST_PRIOR = 1e-3  # however sure the mixture is, the records may overrule it


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_m (M, p)
    cluster: np.ndarray  # R(i), of each client
    responsibility: np.ndarray  # pi (clients, M)
    votes: np.ndarray  # (clients, M), how often a client chose a cluster
    plane: np.ndarray  # (clients, 2), the first updates on two principal components, for pictures
    mss: float = 0.0
    mpo: float = 1.0
    switch_round: int = 0  # E_c
    iterations: int = 0


class RDPCFL(LocalTraining[State]):
    name: ClassVar[str] = "r-dpcfl"

    clusters: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="M; auto: found in the first round, may be 1"
    )
    projection: Projection = Field("loo", description='how updates are clustered (faithful: "paper")')
    first_round_factor: Factor | Literal["auto"] | FactorsBySize = Field(
        "auto", description="f: noise multiplier of round 1 over that of the others; auto: decided for each size"
    )
    expected_separation: float = Field(
        0.05, gt=0, description="for auto: distance of two clusters' first updates over learning_rate * clip_norm"
    )
    copies: int = Field(1, ge=1, description="tau, perturbed copies of each image in round 1")
    select_rounds: int = Field(1, ge=0, description="private choices of a cluster after E_c (faithful: E/10)")
    select_epsilon: float = Field(0.1, gt=0, le=100, description="of one choice: its bounded range")
    score: Score = Field("correct", description='what a choice counts: "correct" records, or their clipped "loss"')
    weights: Literal["equal", "size"] = Field("equal", description="of clients in a cluster: equal, or declared size")
    faithful: bool = Field(False, description="cluster, restart and choose as the paper does")

    # ---- what it costs -----------------------------------------------------------------------------

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        """The factors of the first round, if they were left to the planner; and whether all fits."""
        if self.clusters != "auto":
            check_count(self.clusters, facts)
        check_score(self.score, facts)
        if self.copies > 1 and len(facts.features) != 3:
            raise UserError(
                f"algorithm.copies = {self.copies} needs images.",
                f"Copies are images moved by a few pixels; these records have the shape {facts.features}.",
                "algorithm.copies = 1",
            )
        return self.model_copy(update={"first_round_factor": self._factors(facts, noise)})

    def _factors(self, facts: Facts, noise: NoiseFor) -> float | FactorsBySize:
        """For every size the largest factor at which a client of that size should still be told apart.

        More noise in round 1 leaves more of the budget to the training, but hides the clusters. Means at a distance D
        can be told apart under noise s in each of p coordinates while D/s > about 2.5 p^(1/4) (docs/clustering.md).
        Here D = expected_separation * eta * c, an assumption and no look at the data, and s = eta * c * f * z / N. If
        no factor is enough, the smallest is taken: for a small client it is cheap, since its later batches hold a large
        share of its records and cost more. If even that is far off for the median client, nothing is wasted on it.
        """
        if self.first_round_factor != "auto":
            return self.first_round_factor
        if self.faithful:
            return 1.0

        def clarity(size: int, factor: float) -> float:
            variant = self.model_copy(update={"first_round_factor": factor})
            return variant.clarity(Terms(facts, size, noise(variant, size)))

        sizes, place = np.sort(facts.size).tolist(), 0
        smallest: dict[float, int] = {}  # by factor, the smallest client that has it
        for size in sorted(set(sizes)):  # the larger a client, the more noise it bears
            while place + 1 < len(FACTORS) and clarity(size, FACTORS[place + 1]) >= 1:
                place += 1
            smallest.setdefault(FACTORS[place], size)
            if size == sizes[(len(sizes) - 1) // 2] and not place and clarity(size, FACTORS[0]) < 0.5:
                return FACTORS[-1]
        table = tuple((size, factor) for factor, size in smallest.items())
        return table if len(table) > 1 else FACTORS[place]

    def factor(self, size: int) -> float:
        """f of a client with so many records."""
        assert self.first_round_factor != "auto"
        if isinstance(self.first_round_factor, float):
            return self.first_round_factor
        return next(factor for least, factor in reversed(self.first_round_factor) if least <= size)

    def clarity(self, terms: Terms) -> float:
        """D/s over what it takes to tell a client from others by its first update; 1 is just enough."""
        training = self.first_training(terms)
        noise = training.noise_multiplier * math.sqrt(training.steps) / training.expected_batch  # s / (eta c)
        return self.expected_separation / max(noise * DETECTABLE * terms.facts.parameters**0.25, 1e-300)

    def caution(self, terms: Sequence[Terms]) -> str | None:
        """Whether clusters may be hidden by the noise, and that round 1 may be slow."""
        notes, median = [], terms[(len(terms) - 1) // 2]
        if self.clusters != 1 and self.clarity(median) < 1:
            notes.append(
                f"Clusters may not be found. If they are as far apart as algorithm.expected_separation = "
                f"{self.expected_separation:g} says, the first update of the median client ({median.size:,} records, "
                f"{median.facts.parameters:,} parameters) has {1 / self.clarity(median):.1f} times the noise that "
                "would be bearable. What helps: more records, fewer parameters, fewer rounds, a larger budget."
            )
        if self.copies > 1:
            notes.append("Round 1 goes through torch.func.vmap, the slower way: a record has several copies.")
        return " ".join(notes) or None

    def first_training(self, terms: Terms) -> NoisyTraining:
        """Round 1: all records in every step, b_i = N_i, at f times the noise."""
        assert terms.size is not None
        usual = NoisyTraining.epochs(
            terms.size, terms.size, self.local_epochs,
            clip_norm=terms.facts.clip_norm, noise_multiplier=self.factor(terms.size) * terms.noise_multiplier,
        )  # fmt: skip
        return replace(usual, copies=self.copies)

    def choice(self, terms: Terms) -> PrivateChoice:
        """One private choice among the cluster models; without any noise in training, the exact best."""
        epsilon = self.select_epsilon if terms.noise_multiplier else math.inf
        return PrivateChoice(epsilon, terms.facts.adjacency, self.score)

    @property
    def choices(self) -> int:
        """T: how many choices there are at most."""
        return self.rounds // 10 if self.faithful else self.select_rounds

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        if terms.size is None:
            return Counter()
        planned: Counter[Mechanism] = Counter({self.first_training(terms): 1})
        planned[self.training(terms)] += self.rounds - 1
        planned[self.choice(terms)] += min(self.choices, self.rounds - 1)
        return +planned

    # ---- what it does ------------------------------------------------------------------------------

    def start(self, session: Session) -> State:
        clients = len(session.facts.size)
        nobody = np.zeros((clients, 1))
        return State(
            session.initial_model().unsqueeze(0), np.zeros(clients, int), nobody + 1, nobody, np.zeros((clients, 2))
        )

    def round(self, session: Session, state: State) -> State:
        e = session.round
        if e == 1:
            return self._first_round(session, state)
        if e <= state.switch_round:
            state = replace(state, cluster=self._drawn(session, state.responsibility))
        elif e <= state.switch_round + self.choices and len(state.models) > 1:
            state = self._chosen(session, state)
        else:
            state = replace(state, cluster=_settled(state))
        updates = self.updates(session, Pick(state.models, state.cluster))
        return replace(state, models=moved(state.models, state.cluster, updates, self._weight(session)))

    def _first_round(self, session: Session, state: State) -> State:
        """Stage 1: every client trains theta_init on all its records; the server clusters the updates."""
        (initial,) = state.models
        updates = self.updates(session, initial, self.first_training)
        found = find_clusters(
            gram(updates), session.facts.parameters, self._noise(session),
            count=None if self.clusters == "auto" else self.clusters,
            projection="paper" if self.faithful else self.projection,
            random=session.stream("mixture").numpy,
        )  # fmt: skip
        models = initial.repeat(found.count, 1)
        if not self.faithful:
            models = moved(models, found.label, updates, self._weight(session))
        return State(
            models, found.label, found.responsibility, np.zeros_like(found.responsibility), found.plane,
            found.mss, found.mpo, self._switch_round(found.mpo), found.iterations,
        )  # fmt: skip

    def switch_after(self, mpo: float) -> int:
        """E_c = (1 - MPO) E/2: the surer the mixture, the longer it is relied on."""
        switch = math.floor((1 - mpo) * self.rounds / 2)
        return switch if self.faithful else max(LEAST_SWITCH, switch)

    def _switch_round(self, mpo: float) -> int:
        """The same, early enough for the choices that are paid for."""
        return max(1, min(self.switch_after(mpo), self.rounds - self.choices))

    def _noise(self, session: Session) -> np.ndarray:
        """The standard deviation of each first update, in each coordinate: eta c f z_i / N_i, exactly for one step."""
        trainings = [self.first_training(session.terms[i]) for i in session.facts.clients.tolist()]
        each = [noise_std(t.clip_norm, t.noise_multiplier) / t.expected_batch * math.sqrt(t.steps) for t in trainings]
        return self.learning_rate * np.array(each)

    def _drawn(self, session: Session, responsibility: np.ndarray) -> np.ndarray:
        """Stage 2: R(i) = m with probability pi_im, anew in each round."""
        uniform = session.stream("soft clustering").numpy.random((len(responsibility), 1))
        return np.minimum((responsibility.cumsum(axis=1) < uniform).sum(axis=1), responsibility.shape[1] - 1)

    def _chosen(self, session: Session, state: State) -> State:
        """Stage 3: each client privately chooses the model that does best on its records."""
        prior = np.zeros_like(state.responsibility) if self.faithful else np.log(state.responsibility + LEAST_PRIOR)
        replies = session.ask(
            choose_model, session.facts.clients, mechanism=self.choice,
            shared={"models": state.models}, each={"prior": Pick.own(torch.from_numpy(prior))},
        )  # fmt: skip
        choice = np.array([reply["choice"] for reply in replies])
        votes = state.votes.copy()
        votes[session.facts.clients, choice] += 1
        latest = np.eye(votes.shape[1])[choice]
        # the most votes, and among equals the latest choice; the paper takes the latest
        cluster = choice if self.faithful else (votes + 0.5 * latest).argmax(axis=1)
        return replace(state, cluster=cluster, votes=votes)

    def _weight(self, session: Session) -> np.ndarray | None:
        return session.facts.size if self.weights == "size" else None

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick(state.models, _settled(state))

    def found(self, state: State) -> Found:
        return Found(
            _settled(state), len(state.models), state.mss, state.mpo, state.switch_round, state.iterations, state.plane
        )


def _settled(state: State) -> np.ndarray:
    """Where each client belongs as far as is known: where it chose to be, or where the mixture has it; not where a draw
    put it for a round."""
    return state.cluster if state.votes.any() else state.responsibility.argmax(axis=1)
