"""Who looks on while a rehearsal takes place, and scores its canaries.

Whoever looks on sees what the algorithm sees in each round: every client's release, or the noisy sum over a cohort. It
knows all but the noise and the coins of the canaries.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from fairveil.attacks.canaries import Planting
from fairveil.attacks.rehearsal import Apart, Quiet
from fairveil.data.federation import Federation
from fairveil.plan import Plan
from fairveil.run import Machines
from fairveil.store import Store


class Watch(Apart):
    """Looks on, and scores the canaries.

    Attributes:
        federation: as the tasks of the rehearsal get it.
        machines: on which clients backstage can be asked, between two requests of the rehearsal.
    """

    def __init__(self, planting: Planting, name: str) -> None:
        super().__init__(name)
        self.planting = planting

    def engine(self, plan: Plan, store: Store, federation: Federation) -> Machines:
        self.federation = federation
        self.machines = super().engine(plan, store, federation)
        return Quiet(self.machines, self.planting.absent)

    @abstractmethod
    def log_odds(self) -> NDArray[np.float64]:
        """(m,) for each canary that it is in: the likelier, the larger. The coins play no part in it."""
