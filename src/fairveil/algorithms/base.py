"""What every algorithm is: hyper-parameters, the releases it declares, and three functions of its state.

The runner owns the loop, the checkpoint and the progress bar; the algorithm owns the mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import ClassVar, Generic, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.release import Plain
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import local_update

Unit = Literal["record", "client"]
S = TypeVar("S")


class Algorithm(BaseModel, ABC, Generic[S]):
    """A federated learning system. Its fields are its hyper-parameters; it holds no state of its own.

    The state S is a dataclass of tensors and numbers; the runner saves it after every round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    unit: ClassVar[Unit]  # what the guarantee protects
    trust: ClassVar[str]  # who is trusted with what, in words, for the statement
    public: ClassVar[dict[str, str]] = {}  # what else is used as public, and why
    public_tasks: ClassVar[dict[str, str]] = {}  # tasks that may answer with Public values, and why they are public

    rounds: int = Field(30, ge=1, description="E, global rounds")

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
    def serve(self, facts: Facts, state: S) -> Pick | Literal["personal"]:
        """Which model serves which client: a row for each, or its own "model" in its personal state."""


class LocalTraining(Algorithm[S]):
    """What the record-level systems share: every client trains in every round with local DP-SGD.

    Privacy unit: one record of a client. Nobody is trusted: each client noises its own update.
    """

    unit: ClassVar[Unit] = "record"
    trust: ClassVar[str] = "nobody: every client adds the noise itself, before anything leaves it"

    local_epochs: int = Field(1, ge=1, description="K, passes over the records in a round")
    batch_size: int = Field(32, ge=1, description="b, expected size of a Poisson batch")
    learning_rate: float = Field(0.5, gt=0, description="eta")

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

    def updates(self, session: Session, models: Tensor | Pick) -> Tensor:
        """Every client trains the model (p,), or its own row, and releases the update: (clients, p)."""
        shared: dict[str, Plain] = {"learning_rate": self.learning_rate}
        each = {}
        if isinstance(models, Pick):
            each["model"] = models
        else:
            shared["model"] = models
        replies = session.ask(local_update, session.facts.clients, mechanism=self.training, shared=shared, each=each)
        return torch.stack([cast(Tensor, reply["update"]) for reply in replies])
