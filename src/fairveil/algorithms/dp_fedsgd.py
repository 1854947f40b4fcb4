"""`dp-fedsgd`: one noisy step of every client in a round, and their mean.

Federated SGD of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017),
with the noisy steps of Abadi et al., "Deep Learning with Differential Privacy" (2016), as Zhu et al., "Voting-based
Approaches for Differentially Private Federated Learning" (2020), compare with it. Privacy unit: one record of a client.
Trust: nobody.

Departure: each client's own step is noised for itself, and no price is lowered because only the mean would be seen.
"""

from __future__ import annotations

from typing import ClassVar

from fairveil.algorithms.global_ import Global
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Terms


class DPFedSGD(Global):
    name: ClassVar[str] = "dp-fedsgd"

    local_epochs: ClassVar[int] = 1  # type: ignore[misc]  # no option: there are no passes, but a single step

    def training(self, terms: Terms) -> NoisyTraining:
        """One step on a Poisson batch of b expected records."""
        assert terms.size is not None
        batch = min(self.batch_size, terms.size)
        facts = terms.facts
        return NoisyTraining(batch / terms.size, 1, facts.clip_norm, terms.noise_multiplier, float(batch))
