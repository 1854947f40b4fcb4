"""Who looks on while a rehearsal takes place, and scores its canaries.

Whoever looks on sees what the algorithm sees in each round: every client's release, or the noisy sum over a cohort. It
knows all but the noise and the coins of the canaries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fairveil.attacks.canaries import Planting
from fairveil.attacks.rehearsal import Apart
from fairveil.data.federation import Federation
from fairveil.plan import Plan
from fairveil.privacy.mechanisms import SumMechanism
from fairveil.privacy.release import Reply
from fairveil.run import Machines
from fairveil.serving import Served
from fairveil.session import Job
from fairveil.store import Store


class Watch(Apart):
    """Looks on, and scores the canaries. Before a round is over, nothing else asks the engine."""

    def __init__(self, planting: Planting, name: str) -> None:
        super().__init__(name)
        self.planting = planting

    def engine(self, plan: Plan, store: Store, federation: Federation) -> Machines:
        self.machines, self.federation = super().engine(plan, store, federation), federation
        absent = self.planting.absent
        return Without(self.machines, absent) if absent else self.machines

    @abstractmethod
    def log_odds(self) -> NDArray[np.float64]:
        """(m,) for each canary that it is in: the likelier, the larger. The coins play no part in it."""


class Without:
    """An engine on which some clients contribute nothing to sums: they are not asked."""

    def __init__(self, machines: Machines, absent: frozenset[int]) -> None:
        self._machines, self._absent = machines, absent

    @property
    def measures(self) -> bool:
        return self._machines.measures

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The replies of all others."""
        there = [c for c in job.calls if not (isinstance(c.mechanism, SumMechanism) and c.client in self._absent)]
        return self._machines.run(replace(job, calls=there))

    def deliver(self, served: Served) -> None:
        self._machines.deliver(served)

    def __enter__(self) -> Self:
        self._machines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._machines.__exit__(kind, error, trace)
