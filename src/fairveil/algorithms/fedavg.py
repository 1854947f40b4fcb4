"""`fedavg`: federated averaging at client level, below a clipping value that is tracked privately.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (2017), made private as in McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private
Recurrent Language Models" (2018), with the clipping of Andrew et al. (2021); what fair systems are compared with. (See
`dp-fedavg` for noise that the clients make.) Privacy unit: one client. Trust: the server, with the exact sums.

Departures: the sum is divided by the constant q W, never by what the drawn clients weigh. Weights are at most 1, so
that sizes do not change the bound. `faithful`: the exact median of the drawn norms as the clipping value, weights n_k/n
and noise C, as Du, Xiang and Wu (2025) do it with their baselines; nothing is claimed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fairveil.algorithms.base import NextRound
from fairveil.algorithms.cohorts import WEIGHED, PublishedTraining, Tracked, serve_one, shared, size_weight, trained
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.release import Reply
from fairveil.remote import deployable
from fairveil.session import Facts, Member, Pick, Session, Terms


class FedAvg(PublishedTraining[Tracked]):
    name: ClassVar[str] = "fedavg"

    def start(self, session: Session) -> Tracked:
        return Tracked.first(session)

    def round(self, session: Session, state: Tracked) -> Tracked:
        noisy = self.asked(session, weighed_update, state)
        step = self.server_learning_rate * self.step(session.facts, state) * noisy["update"]
        return Tracked(state.model + step, *self.followed(session.facts, state, noisy))

    def next_round(self, facts: Facts, state: Tracked, terms: Terms) -> NextRound | None:
        return self.ahead(weighed_update, state, terms)

    def serve(self, facts: Facts, state: Tracked) -> Pick:
        return serve_one(facts, state)


@deployable(by=CohortSums, **WEIGHED)
def weighed_update(members: Sequence[Member]) -> list[Reply]:
    """Each client shares its clipped update, by its size."""
    return [shared(member, update, size_weight(member), loss) for member, update, loss in trained(members)]
