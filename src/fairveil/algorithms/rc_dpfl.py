"""`rc-dpfl`: robust clustered differentially private federated learning, the forerunner of `r-dpcfl`.

Malekmohammadi, Taik and Farnadi, "Mitigating Disparate Impact of Differential Privacy in Federated Learning through
Robust Clustering" (2024), Algorithm 1. As r-dpcfl with the number of clusters given, the round of the switch fixed,
and clients weighted by their size. Its clients then choose the model with the exact lowest loss in every round, which
tells about their records without noise: `faithful` does so, and no epsilon covers it. By default they choose privately.
Privacy unit: one record of a client. Trust: nobody.

Two things differ in `faithful`, too. A client chooses before the round that uses the choice, from round E_c + 1 on; the
paper's clients choose at the end of a round, from that one on, and once more after the last. And the gradients of the
copies of a record (section 4.3 of the paper) are averaged before they are clipped; the paper clips each of them.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fairveil.algorithms.r_dpcfl import RDPCFL
from fairveil.privacy.choice import PrivateChoice, Score
from fairveil.session import Terms


class RCDPFL(RDPCFL):
    name: ClassVar[str] = "rc-dpfl"

    clusters: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(4, description="M")
    switch_round: int = Field(10, ge=1, description="E_c, the last round of the mixture; at most E - select_rounds")
    score: Score = Field("loss", description='what a choice counts: "correct" records, or their clipped "loss"')
    weights: Literal["equal", "size"] = Field("size", description="of clients in a cluster: equal, or declared size")

    def switch_after(self, mpo: float) -> int:
        """Fixed, whatever the overlap."""
        return self.switch_round

    @property
    def choices(self) -> int:
        """Faithful: a choice in every round after the switch."""
        return max(0, self.rounds - self.switch_round) if self.faithful else self.select_rounds

    def choice(self, terms: Terms) -> PrivateChoice:
        """Faithful: exact, and so without a guarantee."""
        if self.faithful:
            return PrivateChoice(math.inf, terms.facts.adjacency, "loss")
        return super().choice(terms)
