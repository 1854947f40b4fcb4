"""`metric-pfl`: personalised federated learning under metric privacy.

Galli, Jung, Biswas, Palamidessi and Cucinotta, "Advancing Personalized Federated Learning: Group Privacy, Fairness, and
Beyond" (2023), Algorithms 1 and 2. The server offers k hypotheses; each client takes the one that suits it best, trains
it, and sends the local model with noise; the server clusters what it got, by k-means started at the hypotheses. Trust:
nobody. What is promised is metric privacy in the space of parameters (`fairveil.privacy.metric`), and not a bound for
single records.

Departures: the paper scales the noise by the length of the client's own step, which is secret and shows in the noise.
Here steps are clipped to a public radius r (`privacy.clip_norm`), and the noise is scaled by it: epsilon = n/(nu r).
`faithful` is the paper's form, with no guarantee. (Its Algorithm 2 prints epsilon = nu/|delta|; its text and Table 2
agree with n/(nu |delta|), which is what is done here.) `spread` keeps the hypotheses together, so that the choice among
them is protected too, at a price.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self, cast

import numpy as np
import torch
from pydantic import Field
from scipy import stats
from torch import Tensor

from fairveil.algorithms.base import Algorithm, Found, NoiseFor, Unit
from fairveil.clustering import kmeans_from, plane_of
from fairveil.errors import UserError
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.metric import GaussianBall, LaplaceBall, LaplaceStep, Sanitiser, diameter
from fairveil.privacy.statement import VACUOUS
from fairveil.session import Facts, Offer, Session, Terms
from fairveil.tasks import personal_update

SHOWN = 300  # clients in a picture


@dataclass(frozen=True)
class State:
    models: Tensor  # theta_j (k, n)
    participations: np.ndarray  # of each client so far
    cluster: np.ndarray  # in which k-means has put each client when it last took part; -1: never
    shown: np.ndarray  # some of the clients of the last round ...
    plane: np.ndarray  # ... and what they sent, then the hypotheses (shown + k, 2)


class MetricPFL(Algorithm[State]):
    name: ClassVar[str] = "metric-pfl"
    unit: ClassVar[Unit] = "metric"
    trust: ClassVar[str] = "nobody: every client adds the noise itself, before anything leaves it"
    public: ClassVar[dict[str, str]] = {
        "who takes part in which round": "drawn by the server; no protection is claimed from it"
    }

    hypotheses: int = Field(2, ge=1, description="k; 1 is federated averaging")
    clients_per_round: Annotated[int, Field(ge=1)] | Literal["all"] = Field("all", description="U")
    max_participations: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="of one client; it then sits out (auto: so many that hardly anyone has to)"
    )
    local_epochs: int = Field(1, ge=1, description="E, passes over a client's records in a round")
    batch_size: int = Field(32, ge=1, description="B_s, of the client's plain SGD")
    learning_rate: float = Field(0.1, gt=0, description="s, at the client")
    noise: Literal["laplace", "gaussian"] = Field("laplace", description="on the local model")
    spread: Annotated[float, Field(gt=0)] | None = Field(
        None, examples=[2.0], description="the most that two hypotheses may lie apart; if given, their choice is hidden"
    )
    faithful: bool = Field(False, description="noise in proportion to each client's own step: without a guarantee")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        clients = len(facts.size)
        per_round = clients if self.clients_per_round == "all" else self.clients_per_round
        if per_round > clients:
            raise UserError(
                f"algorithm.clients_per_round = {per_round} is more than there are clients: {clients}.",
                "Nobody takes part twice in a round. Nothing was run.",
                'algorithm.clients_per_round = "all"',
            )
        if per_round < self.hypotheses:
            raise UserError(
                f"algorithm.clients_per_round = {per_round} is fewer than algorithm.hypotheses = {self.hypotheses}.",
                "A hypothesis that nobody trains stays as it began. Nothing was run.",
                f"algorithm.hypotheses = {per_round}, or more clients in a round",
            )
        if self.faithful and (self.noise != "laplace" or self.spread):
            given = f'noise = "{self.noise}"' if self.noise != "laplace" else f"spread = {self.spread:g}"
            raise UserError(
                f"algorithm.{given} does not go with algorithm.faithful.",
                "The paper's noise is Laplace noise, and its hypotheses go anywhere. Nothing was run.",
                "leave out one of them",
            )
        most = self.max_participations
        if most == "auto":
            # the least that all clients together exceed with a chance of 1% at most
            most = int(stats.binom.isf(0.01 / clients, self.rounds, per_round / clients))
        if most * clients < self.rounds * per_round:
            raise UserError(
                f"algorithm.max_participations = {most} is too little.",
                f"{self.rounds} rounds of {per_round} clients take {self.rounds * per_round:,} participations, and\n"
                f"{clients} clients have {most * clients:,}. Nothing was run.",
                f"algorithm.max_participations = {-(-self.rounds * per_round // clients)}, or more",
            )
        return self.model_copy(update={"clients_per_round": per_round, "max_participations": min(most, self.rounds)})

    def caution(self, terms: Sequence[Terms]) -> str | None:
        law = self.sanitiser(terms[0])
        if isinstance(law, LaplaceBall) and law.noise_multiplier and (each := law.epsilon * law.farthest) > VACUOUS:
            return (
                f"Each time a client takes part costs epsilon {each:.4g}, so large a number that it alone protects "
                f"nobody: with {law.dimension:,} parameters the noise would have to be {each:.0f} times longer to "
                "bring it to 1."
            )
        return None

    def sanitiser(self, terms: Terms) -> Sanitiser:
        """What each client applies to its local model."""
        dimension, radius = terms.facts.parameters, terms.facts.clip_norm
        if self.faithful:
            return LaplaceStep(dimension, terms.noise_multiplier)
        law = LaplaceBall if self.noise == "laplace" else GaussianBall
        return law(dimension, terms.noise_multiplier, radius, 0.0 if self.hypotheses == 1 else self.spread or math.inf)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter() if terms.size is None else Counter({self.sanitiser(terms): self._most})

    @property
    def _most(self) -> int:
        return self.rounds if self.max_participations == "auto" else self.max_participations

    def start(self, session: Session) -> State:
        models = torch.stack([session.initial_model(f"hypothesis {j}") for j in range(self.hypotheses)])
        if self.hypotheses > 1 and not diameter(models):  # a model that always starts alike: nothing to choose among
            models = models + session.stream("hypotheses").normal(models.shape).to(models.dtype)
        models = self._together(models)
        clients = len(session.facts.size)
        nobody = np.zeros(0, int)
        return State(models, np.zeros(clients, int), np.full(clients, -1), nobody, plane_of(models))

    def round(self, session: Session, state: State) -> State:
        asked = self._sampled(session, state)  # SampleUserSubset(U)
        replies = session.ask(  # BroadcastParameterVectors; there: the best of them, LocalUpdate, SanitizeUpdate
            personal_update, asked, mechanism=self.sanitiser,
            shared={
                "models": state.models,
                "learning_rate": self.learning_rate,
                "local_epochs": self.local_epochs,
                "batch_size": self.batch_size,
            },
        )  # fmt: skip
        sent = torch.stack([cast(Tensor, reply["model"]) for reply in replies])
        participations, cluster = state.participations.copy(), state.cluster.copy()
        participations[asked[~sent.isnan().all(dim=1).numpy()]] += 1  # without those that did not answer
        usable = sent.isfinite().all(dim=1)
        asked, sent = asked[usable.numpy()], sent[usable]
        cluster[asked], models = kmeans_from(sent, state.models)  # the mean of each cluster; one without members stays
        models = self._together(models)
        shown = np.unique(np.linspace(0, len(asked) - 1, min(SHOWN, len(asked))).round().astype(int))
        plane = plane_of(torch.cat([sent[shown], models]))
        return State(models, participations, cluster, asked[shown], plane)

    def _together(self, models: Tensor) -> Tensor:
        """Hypotheses within the spread of each other: drawn towards their middle, if need be."""
        apart = diameter(models)
        if self.spread is None or apart <= self.spread:
            return models
        middle, nearer, less = models.double().mean(dim=0), self.spread / apart, 0.999
        while diameter(found := (middle + nearer * (models.double() - middle)).to(models.dtype)) > self.spread:
            nearer, less = nearer * less, less * less  # rounding to float32 has moved them apart again
        return found

    def _sampled(self, session: Session, state: State) -> np.ndarray:
        """U clients of those that may still take part, or all of these."""
        left = np.flatnonzero(state.participations < self._most)
        many = len(left) if self.clients_per_round == "all" else min(self.clients_per_round, len(left))
        return np.sort(session.stream("clients").numpy.choice(left, many, replace=False))

    def serve(self, facts: Facts, state: State) -> Offer:
        return Offer(state.models)

    def found(self, state: State) -> Found:
        plane = np.full((len(state.cluster), 2), np.nan)
        plane[state.shown] = state.plane[: len(state.shown)]
        return Found(state.cluster, len(state.models), plane=plane, centres=state.plane[len(state.shown) :])
