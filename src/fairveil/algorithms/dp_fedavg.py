"""`dp-fedavg`: federated averaging over sampled cohorts, clipped updates, noise added once at the server.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (2018). Privacy unit: one client
with all its records. Trust: the server, with the exact sum of the clipped updates and the secrecy of the draw.

Departure: the sum is divided by the expected cohort q*n, never by the number drawn, which would be a release of
its own; clients weigh the same, so that the bound of one client does not depend on its size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import Algorithm, Unit
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import bounded_update


@dataclass(frozen=True)
class State:
    model: Tensor  # theta (p,)


class DPFedAvg(Algorithm[State]):
    name: ClassVar[str] = "dp-fedavg"
    unit: ClassVar[Unit] = "client"
    trust: ClassVar[str] = (
        "the server: every client that is drawn sends it a contribution within bounds, but without noise; it adds "
        "them up, adds the noise, and keeps secret who was drawn and what each has sent"
    )

    sample_rate: float = Field(0.2, gt=0, le=1, description="q, chance of a client to take part")
    local_epochs: int = Field(1, ge=1, description="passes over a client's records in a round")
    batch_size: int = Field(32, ge=1, description="b, of the client's plain SGD")
    learning_rate: float = Field(0.5, gt=0, description="eta, at the client")
    server_learning_rate: float = Field(1.0, gt=0, description="step along the noisy mean")

    def cohort_sum(self, terms: Terms) -> CohortSums:
        """The sum of one round: bound S = clip_norm, noise z * S."""
        update = Part("update", (terms.facts.parameters,), terms.facts.clip_norm, terms.noise_multiplier)
        return CohortSums((update,), self.sample_rate)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter({self.cohort_sum(terms): self.rounds}) if terms.size is None else Counter()

    def start(self, session: Session) -> State:
        return State(session.initial_model())

    def round(self, session: Session, state: State) -> State:
        cohort = session.cohort(self.sample_rate)
        noisy = session.sum(
            bounded_update, cohort, self.cohort_sum(session.federation_terms),
            shared={
                "model": state.model,
                "learning_rate": self.learning_rate,
                "local_epochs": self.local_epochs,
                "batch_size": self.batch_size,
            },
        )  # fmt: skip
        expected = self.sample_rate * len(session.facts.size)  # q * n
        return State(state.model + (self.server_learning_rate / expected) * noisy["update"])

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.same(state.model, facts)
