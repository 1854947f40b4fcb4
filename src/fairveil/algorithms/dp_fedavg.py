"""`dp-fedavg`: federated averaging over sampled cohorts, clipped updates, noise on their sum.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (2018); with the noise added once, at the
server, it is Algorithm 3 of Zhu, Yu, Tsai, Pittaluga, Faraki, Chandraker and Wang, "Voting-based Approaches for
Differentially Private Federated Learning" (2020), and with noise that the clients make together (`noise =
"distributed"`) it stands for their Algorithm 5. Privacy unit: one client with all its records. Trust: the server, with
the exact sum of the clipped updates and the secrecy of the draw; or, with distributed noise, whoever adds up what the
clients send, and no more than `tolerated` clients that drop out or conspire.

Departures: the sum is divided by the expected cohort q*n, never by the number drawn (m_t), which would be a release of
its own; clients weigh the same, so that the bound of one client does not depend on its size. Distributed noise is
shared by all n clients, also those that a round does not draw, and not by the m_t that it does: with 1/m_t of it each,
the sum has too little noise as soon as one is missing, and none where nobody was drawn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from fairveil.algorithms.base import NextRound, NoiseFor, check_tolerated
from fairveil.algorithms.cohorts import SampledTraining
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, Sharers
from fairveil.session import Facts, Pick, Session, Terms
from fairveil.tasks import bounded_update


@dataclass(frozen=True)
class State:
    model: Tensor  # theta (p,)


class DPFedAvg(SampledTraining[State]):
    name: ClassVar[str] = "dp-fedavg"

    noise: Literal["server", "distributed"] = Field("server", description='who makes it: or "distributed", all clients')
    tolerated: int = Field(0, ge=0, description="t, clients that may drop out or conspire then")

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        check_tolerated(self.tolerated, self.noise, facts)
        return self

    def cohort_sum(self, terms: Terms) -> CohortSums:
        """The sum of one round: bound S = clip_norm, noise z * S."""
        update = Part("update", (terms.facts.parameters,), terms.facts.clip_norm, terms.noise_multiplier)
        sharers = Sharers(len(terms.facts.size), self.tolerated) if self.noise == "distributed" else None
        return CohortSums((update,), self.sample_rate, sharers)

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter({self.cohort_sum(terms): self.rounds}) if terms.size is None else Counter()

    def start(self, session: Session) -> State:
        return State(session.initial_model())

    def round(self, session: Session, state: State) -> State:
        mechanism = self.cohort_sum(session.federation_terms)
        noisy = session.sum(
            bounded_update, session.cohort(mechanism.asked), mechanism,
            shared=self.training(state.model, session.round),
        )  # fmt: skip
        return State(state.model + self._scale(session.facts) * noisy["update"])

    def _scale(self, facts: Facts) -> float:
        """The step is so much of the noisy sum: the expected cohort is q * n."""
        return self.server_learning_rate / (self.sample_rate * len(facts.size))

    def next_round(self, facts: Facts, state: State, terms: Terms) -> NextRound:
        inputs = self.training(state.model, self.rounds)
        return NextRound(state.model, bounded_update, self.cohort_sum(terms), inputs, self._scale(facts), 1.0)

    def serve(self, facts: Facts, state: State) -> Pick:
        return Pick.same(state.model, facts)
