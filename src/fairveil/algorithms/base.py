"""What every algorithm is: hyper-parameters, the releases it declares, and three functions of its state.

The runner owns the loop, the checkpoint and the progress bar; the algorithm owns the mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fairveil.errors import UserError
from fairveil.privacy.choice import Score
from fairveil.privacy.consensus import SmoothedPrice
from fairveil.privacy.mechanisms import CohortSums, Mechanism
from fairveil.privacy.release import Plain
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Facts, Offer, Pick, Session, Task, Terms
from fairveil.session import Unit as Unit
from fairveil.tasks import local_update

S = TypeVar("S")
# The noise multiplier that a variant of an algorithm would need for a client of this size.
NoiseFor = Callable[["Algorithm[Any]", int], float]


@dataclass(frozen=True)
class Found:
    """The clusters of the clients as a system sees them."""

    cluster: np.ndarray  # (clients,); -1: not seen yet
    count: int  # M
    mss: float | None = None  # smallest separation score over pairs of clusters
    mpo: float | None = None  # largest overlap of a pair
    switch_round: int | None = None  # E_c, the last round in which the mixture of the first updates decides
    iterations: int | None = None  # of the fit
    plane: np.ndarray | None = None  # (clients, 2), what was clustered, for pictures; NaN: nothing of this client
    centres: np.ndarray | None = None  # (M, 2), the models of the clusters in the same plane


@dataclass(frozen=True)
class Voted:
    """What the clients' votes have made of the public records so far."""

    labels: np.ndarray  # of the first public records (Q,); -1: nobody won. Of several classes (Q, C), of 0 and 1
    cost: SmoothedCost | None = None  # a published price for these very data


@dataclass(frozen=True)
class SmoothedCost:
    """A price of answers for these very data, as it was published, and how."""

    total: float  # Renyi divergence, over all publications
    price: SmoothedPrice
    times: int  # how many publications


@dataclass(frozen=True)
class NextRound:
    """What a client-level system would do next, for whoever asks why a client is worse off. Simulation only."""

    model: Tensor  # w (p,)
    task: Task  # its clients share by it
    mechanism: CohortSums  # with a part "update" (p,)
    inputs: Mapping[str, Plain]
    scale: float  # the step is scale * (noisy sum of "update"); expected cohort and clip rescaling are in it
    full: float  # a client's update times this is its share, if it were neither clipped nor weighed down


class Algorithm(BaseModel, ABC, Generic[S]):
    """A federated learning system. Its fields are its hyper-parameters; it holds no state of its own.

    The state S is a dataclass of tensors and numbers; the runner saves it after every round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    unit: ClassVar[Unit]  # what the guarantee protects, unless `privacy.unit` names another one
    other_units: ClassVar[tuple[Unit, ...]] = ()  # that it may name; `Facts.unit` is the one that is meant
    # Whether only sums over all clients are published, whatever is protected: there is one ledger, the federation's.
    # Where whole clients are protected it cannot be otherwise.
    pooled: ClassVar[bool] = False
    needs_public: ClassVar[bool] = False  # whether the server must hold public records (`data.server`)
    trust: ClassVar[str]  # who is trusted with what, in words, for the statement
    public: ClassVar[dict[str, str]] = {}  # what else is used as public, and why
    public_tasks: ClassVar[dict[str, str]] = {}  # tasks that may answer with Public values, and why they are public

    rounds: int = Field(30, ge=1, description="E, global rounds")
    average_last: int = Field(1, ge=1, description="the served models are the means over so many last rounds")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.average_last > self.rounds:
            raise UserError(
                f"algorithm.average_last = {self.average_last} is more than there are rounds: {self.rounds}.",
                "The models of rounds that never were cannot be averaged. Nothing was run.",
                f"algorithm.average_last = {self.rounds}",
            )
        return self

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        """This algorithm for this federation: what was left to the planner is decided here, from public facts alone.

        Raises:
            UserError: it does not fit the federation.
        """
        return self

    def caution(self, terms: Sequence[Terms]) -> str | None:
        """What may go wrong under the terms of the clients, the smallest first, for whoever reads the plan."""
        return None

    @abstractmethod
    def releases(self, terms: Terms) -> Counter[Mechanism]:
        """All that one unit will ever release, for a client or (`terms.size` is None) for the federation.

        A run may post nothing outside this multiset, and the price of this multiset is the guarantee.
        """

    @abstractmethod
    def start(self, session: Session) -> S:
        """The state before round 1. It asks nothing of the clients."""

    @abstractmethod
    def round(self, session: Session, state: S) -> S:
        """One round."""

    @abstractmethod
    def serve(self, facts: Facts, state: S) -> Pick | Offer | Literal["personal"]:
        """Which model serves which client: a row for each, one of some by its own choice, or its own "model" in its
        personal state."""

    def found(self, state: S) -> Found | None:
        """What a clustered system has found so far; None: it does not look for clusters."""
        return None

    def voted(self, state: S) -> Voted | None:
        """What a voting system has found so far; None: nobody votes."""
        return None

    def next_round(self, facts: Facts, state: S, terms: Terms) -> NextRound | None:
        """What one more round would do, for `fairness.explain`; None: it is no mean of clients' updates.

        Its inputs are those of `tasks.bounded_update` and whatever else its task takes.
        """
        return None


class LocalTraining(Algorithm[S]):
    """What the record-level systems share: every client trains in every round with local DP-SGD.

    Privacy unit: one record of a client. Nobody is trusted: each client noises its own update.
    """

    unit: ClassVar[Unit] = "record"
    trust: ClassVar[str] = "nobody: every client adds the noise itself, before anything leaves it"

    local_epochs: int = Field(1, ge=1, description="K, passes over the records in a round")
    batch_size: int = Field(32, ge=1, description="b, expected size of a Poisson batch")
    learning_rate: float = Field(0.5, gt=0, description="eta")
    decay: Literal["none", "linear"] = Field("none", description="of eta: linear falls to eta/E in the last round")

    def training(self, terms: Terms) -> NoisyTraining:
        """One round of local training under a client's terms."""
        assert terms.size is not None
        return NoisyTraining.epochs(
            terms.size, self.batch_size, self.local_epochs,
            clip_norm=terms.facts.clip_norm, noise_multiplier=terms.noise_multiplier,
        )  # fmt: skip

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        if terms.size is None:
            return Counter()
        return Counter({self.training(terms): self.rounds})

    def rate(self, session: Session) -> float:
        """Eta in this round."""
        left = 1 - (session.round - 1) / self.rounds if self.decay == "linear" else 1.0
        return self.learning_rate * left

    def updates(
        self, session: Session, models: Tensor | Pick, training: Callable[[Terms], NoisyTraining] | None = None,
        **inputs: Plain,
    ) -> Tensor:  # fmt: skip
        """Every client trains the model (p,), or its own row, and releases the update: (clients, p).

        Args:
            training: other than the usual round.
            inputs: what else the training takes, the same for all.
        """
        shared: dict[str, Plain] = {"learning_rate": self.rate(session), **inputs}
        each = {}
        if isinstance(models, Pick):
            each["model"] = models
        else:
            shared["model"] = models
        mechanism = training or self.training
        replies = session.ask(local_update, session.facts.clients, mechanism=mechanism, shared=shared, each=each)
        return torch.stack([cast(Tensor, reply["update"]) for reply in replies])


def moved(models: Tensor, cluster: np.ndarray, updates: Tensor, weight: np.ndarray | None = None) -> Tensor:
    """theta_m + the weighted mean of its members' updates; a cluster without members stays as it is.

    Args:
        models: (clusters, p).
        cluster: of each client (clients,).
        updates: (clients, p).
        weight: of each client (clients,); None: all the same.
    """
    share = np.zeros((len(models), len(cluster)))
    share[cluster, np.arange(len(cluster))] = 1.0 if weight is None else weight
    share /= np.maximum(share.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return models + torch.from_numpy(share).to(updates.dtype) @ updates


def check_count(clusters: int, facts: Facts) -> None:
    """Refuse more clusters than there are clients."""
    clients = len(facts.size)
    if clusters > clients:
        raise UserError(
            f"algorithm.clusters = {clusters} is more than there are clients: {clients}.",
            "A cluster without a client has nobody to train its model. Nothing was run.",
            f"algorithm.clusters = {clients}, or fewer",
        )


def check_tolerated(tolerated: int, noise: str, facts: Facts) -> None:
    """Refuse to do without the noise of clients that make none, or of all that do."""
    clients = len(facts.size)
    if tolerated and (noise == "server" or tolerated >= clients):
        raise UserError(
            f"algorithm.tolerated = {tolerated} makes no sense here.",
            f"It counts those of {clients} clients whose share of the noise may be missing, where clients make it:\n"
            "less than all of them. Nothing was run.",
            f'algorithm.noise = "distributed" and algorithm.tolerated = {min(tolerated, clients - 1)}, or 0',
        )


def check_score(score: Score, facts: Facts) -> None:
    """Refuse to count correct predictions where none can be."""
    if score == "correct" and not facts.classes:
        raise UserError(
            'algorithm.score = "correct" makes no sense in a regression.',
            "No prediction of a number is simply right. Nothing was run.",
            'algorithm.score = "loss"',
        )
