"""Before round 1: what the clients release so that features can be standardised.

It is part of the plan like every other release, and goes through the same door. A resumed run asks again, gets the same
answer and pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fairveil.data.federation import Standardise
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part
from fairveil.privacy.moments import NoisyMoments, bound, contributions, mean_and_deviation
from fairveil.privacy.release import Reply
from fairveil.remote import Array, deployable
from fairveil.session import Member, Session


def preparation_releases(standardise: Standardise | None, *, federation: bool) -> Counter[Mechanism]:
    """What one unit releases before training: a client (record level), or the federation (client level)."""
    if standardise is None:
        return Counter()
    return Counter({_cohort_moments(standardise) if federation else _moments(standardise): 1})


def feature_statistics(
    standardise: Standardise, session: Session, *, federation: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Released mean and standard deviation (columns,) over all clients.

    Record level: each client releases noisy sums over its records; added up, every record counts the same. Client
    level: the sum over clients of each one's means is noised once; every client counts the same.
    """
    if federation:
        columns = torch.tensor([(at, -1 if missing is None else missing) for at, missing in standardise.columns])
        sums = session.sum(
            share_moments, session.cohort(1.0), _cohort_moments(standardise), shared={"columns": columns}
        )
        return mean_and_deviation(sums["moments"])
    replies = session.ask(release_moments, session.facts.clients, mechanism=lambda terms: _moments(standardise))
    return mean_and_deviation(torch.stack([cast(Tensor, reply["moments"]) for reply in replies]).sum(dim=0))


@deployable(by=NoisyMoments, prepares=True)
def release_moments(members: Sequence[Member]) -> list[Reply]:
    """Each client releases the noisy moments of its own records."""
    return [Reply(cast(NoisyMoments, member.mechanism).release(member)[0]) for member in members]


@deployable(by=CohortSums, prepares=True, columns=Array(("d", 2), torch.int64))
def share_moments(members: Sequence[Member]) -> list[Reply]:
    """Each client shares the mean contribution of its records to the moments.

    Input "columns" (d, 2): which features, each with the one that says where it is missing (-1: none).
    """
    replies = []
    for member in members:
        pairs = cast(Tensor, member.inputs["columns"]).tolist()
        columns = tuple((column, None if missing < 0 else missing) for column, missing in pairs)
        mean = contributions(member.data.train.x, columns).mean(dim=0)
        replies.append(Reply(cast(CohortSums, member.mechanism).share({"moments": mean}, member)[0]))
    return replies


def _moments(standardise: Standardise) -> NoisyMoments:
    return NoisyMoments(standardise.columns, standardise.noise_multiplier)


def _cohort_moments(standardise: Standardise) -> CohortSums:
    shape, reach = (3 * len(standardise.columns),), bound(standardise.columns)
    return CohortSums((Part("moments", shape, reach, standardise.noise_multiplier),), 1.0)
