"""`knn-fl`: each client votes with the labels of its records that are nearest to a public query (Private-kNN across
clients).

Zhu, Yu, Tsai, Pittaluga, Faraki, Chandraker and Wang, "Voting-based Approaches for Differentially Private Federated
Learning" (2020). With a public feature extractor phi, agent i votes (1/k) * sum of onehot(y) over its k records whose
phi(x) is nearest to that of the query; y = argmax of the sum, with noise N(0, sigma^2 I). Nothing is trained at the
clients. Privacy unit: a client, or a record (`privacy.unit`), which moves a vote by sqrt 2 / k only. Trust: the server
with the votes, see `fairveil.algorithms.voting`.

Departures: for records Zhu et al. have the sensitivity sqrt(2/k); `fairveil.privacy.votes` has the proof of a smaller
one. A client with fewer than k records would have less than one vote: it is refused at the start, by its declared size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

from pydantic import Field

from fairveil.algorithms.base import NoiseFor
from fairveil.algorithms.voting import Voting
from fairveil.errors import UserError
from fairveil.neighbours import find_extractor
from fairveil.privacy.release import Reply
from fairveil.privacy.votes import NeighbourVotes, NoisyVotes
from fairveil.remote import Array, deployable
from fairveil.session import Facts, Member, Task, Terms


@deployable(by=NeighbourVotes, queries=Array(("q", "f")))
def neighbour_votes(members: Sequence[Member]) -> list[Reply]:
    """Each client votes on the input "queries" (Q, d) with its nearest records."""
    replies = []
    for member in members:
        share, diagnostics = cast(NeighbourVotes, member.mechanism).share({}, member)
        replies.append(Reply(share, diagnostics=diagnostics))
    return replies


class KnnFL(Voting):
    name: ClassVar[str] = "knn-fl"
    task: ClassVar[Task] = neighbour_votes

    neighbours: int = Field(5, ge=1, description="k, of a query among a client's records")
    features: str = Field("raw", description='phi: "raw", "hog", or your own "package.module:Name"; public')

    def settled(self, facts: Facts, noise: NoiseFor) -> Self:
        find_extractor(self.features, facts.features)
        if self.neighbours > facts.size.min():
            raise UserError(
                f"algorithm.neighbours = {self.neighbours} is more than a client has records: {facts.size.min()}.",
                "It would have less than one vote (sizes are as clients declare them). Nothing was run.",
                f"algorithm.neighbours = {facts.size.min()}, or fewer",
            )
        return super().settled(facts, noise)

    def votes(self, terms: Terms, asked: dict[str, Any]) -> NoisyVotes:
        return NeighbourVotes(**asked, neighbours=self.neighbours, features=self.features)
