"""Votes over all clients: they are added up and noised once, and only who won is published.

Papernot et al., "Scalable Private Learning with PATE" (2018); for clients and their nearest records, Zhu et al.,
"Voting-based Approaches for Differentially Private Federated Learning" (2020). Every client gives a vote to each of Q
public queries: a row of C numbers from 0 on that add up to 1 at most. Released is the class with the most votes once
noise of standard deviation sigma has been added to each class (ties to the lowest class).

**Neighbours.** `unit = "client"`: two federations that differ in one client, added or removed, or (replace) exchanged.
`unit = "record"`: in one record of one client.

**Sensitivity** of the sum for one query, as a Euclidean distance s. A client that is added or removed moves it by its
vote, 1 at most; one that is replaced by sqrt 2, since two rows of non-negative numbers that add up to 1 at most are no
further apart. A record may turn its client's vote into any other: sqrt 2 again. Of a vote by the k nearest records it
moves less: who adds, removes or replaces one record exchanges at most one of the k nearest, each of which counts 1/k:
sqrt 2 / k. (Zhu et al. have sqrt(2/k), which is larger.)

**Several classes at once.** Of a record that may have several of the classes (`Several`) a vote names tau at most: its
numbers are at most 1 each, and tau together. One such row is no longer than sqrt tau, and two are no further apart than
sqrt(2 tau), nor than sqrt C: that is s in place of 1 and sqrt 2. Each class is an answer of its own: it is given to the
record if its noisy votes are more than are needed.

**Event.** A answers are A sums with independent noise: one Gaussian release with 1/z^2 = A s^2 / sigma^2. That only the
winners of the sums are seen is not used, so that the price holds for the noisy sums themselves.

**Confident answers.** With a `threshold` only queries are answered whose winner has enough votes, by a noisy count of
its own. The largest of C counts moves by no more than any of them: 1, or 1/k. All Q counts are paid for, and the
answers up to the most that there may be: which queries are answered is known from what was published before, and for
every outcome the answers are A Gaussian sums at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from torch import Tensor

from fairveil.neighbours import find_extractor, nearest, neighbour_counts
from fairveil.privacy.accounting import ORDERS, Adjacency, rdp_curve
from fairveil.privacy.consensus import SmoothedPrice, consensus_rdp
from fairveil.privacy.mechanisms import Client, CohortSums, Part, Sharers
from fairveil.privacy.release import MINT, Share
from fairveil.streams import Stream

Protected = Literal["record", "client"]
UNANSWERED = -1  # in the place of a label


@dataclass(frozen=True)
class Several:
    """A record may have several classes at once."""

    most: int  # tau, that one vote names
    needed: float  # votes that a class must exceed: half of all clients

    def __post_init__(self) -> None:
        if not (self.most >= 1 and 0 <= self.needed < math.inf):
            raise ValueError(f"{self} makes no sense")


@dataclass(frozen=True)
class NoisyVotes:
    """The winners of one round of votes, each client's vote as it says: see the module."""

    queries: int  # Q
    classes: int  # C
    noise_multiplier: float  # sigma, over the vote of one client
    unit: Protected
    adjacency: Adjacency
    answers: int  # A, the most queries that are answered
    threshold: float | None = None  # T, votes that a winner needs; None: every query is answered
    threshold_noise: float = 0.0  # standard deviation of the count that is held against it
    noised_by: Sharers | None = None  # the clients, if they make the noise together; None: the server
    cost: SmoothedPrice | None = None  # how the price for these very data is published; None: it is not
    several: Several | None = None  # None: a record has one class, and the winner is the label

    def __post_init__(self) -> None:
        parts = (self.noised_by, Sharers), (self.cost, SmoothedPrice), (self.several, Several)
        if any(value is not None and not isinstance(value, kind) for value, kind in parts):
            raise TypeError(f"{self} is made of something else than it should be")  # its text may come from a server
        known = self.unit in get_args(Protected) and self.adjacency in get_args(Adjacency)
        counted = 1 <= self.answers <= self.queries and self.classes >= 2 and 0 <= self.noise_multiplier < math.inf
        all_answered = self.threshold is None and self.answers == self.queries and not self.threshold_noise
        some = self.threshold is not None and 0 < self.threshold < math.inf and 0 <= self.threshold_noise < math.inf
        if not (known and counted and (all_answered or some)):
            raise ValueError(f"{self} makes no sense")
        if self.cost is not None and (some or self.adjacency == "replace" or not self.noise_multiplier):
            # which queries are answered is drawn too: the price given one pattern is not that of the draw; and smooth
            # noise has a price for added or removed units only
            raise ValueError("a published price goes with neither a threshold nor replaced units, and needs noise")
        if self.noised_by is not None and (some or self.cost is not None):
            # clients that noise a sum show it whole: a count or a price of the exact sum is nobody's to make
            raise ValueError("noise that clients make together goes with neither a threshold nor a published price")
        if self.several is not None and (some or self.cost is not None or self.several.most > self.classes):
            # there is no single winner whose lead could tell how sure an answer is
            raise ValueError(
                "several classes go with neither a threshold nor a published price, and are no more than all"
            )

    # ---- the price ---------------------------------------------------------------------------------

    @property
    def weight(self) -> int:
        """By how much the votes are multiplied where they are added up, so that they are whole numbers."""
        return 1

    @property
    def most(self) -> int:
        """What the votes of one client for one query add up to, at most."""
        return 1 if self.several is None else self.several.most

    @property
    def sensitivity(self) -> float:
        """s, of the answer to one query."""
        return math.sqrt(self.most) if self.unit == "client" and self.adjacency == "add-remove" else self._apart

    @property
    def _apart(self) -> float:
        """How far two votes for one query are from each other, at most."""
        return math.sqrt(min(2 * self.most, self.classes))

    @property
    def count_sensitivity(self) -> float:
        """Of the largest number of votes."""
        return 1.0

    @property
    def gap_step(self) -> float:
        """How far one unit moves the winner's lead: who is added or removed has one vote, others take one away too."""
        return 1.0 if self.unit == "client" and self.adjacency == "add-remove" else 2.0

    @property
    def precision(self) -> float:
        """1 / z^2 of the one Gaussian release that all of it is worth."""
        each = [(self.answers, self.sensitivity / self.noise_multiplier)]
        if self.threshold is not None:
            each.append((self.queries, self.count_sensitivity / self.threshold_noise))
        return sum(times * shift * shift for times, shift in each)  # infinite, if need be, where ** would fail

    @property
    def event(self) -> DpEvent:
        if not self.noise_multiplier or (self.threshold is not None and not self.threshold_noise):
            return NonPrivateDpEvent()
        # an accountant of replacement takes it that a unit moves a sum twice as far as by its removal; here s says it
        times = 1 if self.adjacency == "add-remove" else 2
        gaussian = GaussianDpEvent(times / math.sqrt(max(self.precision, 1e-300)))  # so small that a float may hold 0
        return gaussian if self.cost is None else ComposedDpEvent((gaussian, self.cost.event))

    @property
    def kind(self) -> str:
        return "winners of votes"

    def describe(self) -> str:
        winner = (
            "the class with the most votes"
            if self.several is None
            else f"each class with more than {self.several.needed:g} votes (a client has {self.several.most:,} of them)"
        )
        found = (
            f"{self.queries:,} queries, {self._voters()}: {winner} after noise of standard deviation "
            f"{self.noise_multiplier:g}; one {self.unit} moves the votes by {self.sensitivity:.4g}"
        )
        if self.threshold is not None:
            found += (
                f"; at most {self.answers:,} are answered, where a count of the largest vote, with noise "
                f"{self.threshold_noise:g}, reaches {self.threshold:g}"
            )
        if self.noised_by is not None:
            found += f"; each of {self.noised_by.clients:,} clients adds its share of the noise"
            found += f", {self.noised_by.tolerated:,} of them may fail"
        return found + (f"; {self.cost.describe()}" if self.cost is not None else "")

    def _voters(self) -> str:
        return "each client votes with a model of its own"

    # ---- what is done ------------------------------------------------------------------------------

    @property
    def asked(self) -> float:
        return 1.0

    @property
    def sample_rate(self) -> float:
        return 1.0

    @cached_property
    def _sums(self) -> CohortSums:
        # Q rows, none longer than sqrt tau; one root, so that rounding does not leave whole votes a hair too long
        longest = math.sqrt(self.weight**2 * self.queries * self.most)
        part = Part("votes", (self.queries, self.classes), longest, self.weight * self.noise_multiplier / longest)
        return CohortSums((part,), 1.0, self.noised_by)

    def check(self, queries: Tensor) -> None:
        """Refuse queries (Q, d) that are not as many as are priced (ValueError). What a client holds plays no part."""
        if len(queries) != self.queries:
            raise ValueError(f"{len(queries):,} queries, and a price for {self.queries:,}")

    def share(self, values: Mapping[str, Tensor], client: Client) -> tuple[Share, dict[str, float]]:
        """Bound one client's votes {"votes": (Q, C)}, see `within`."""
        return self._share(within(values["votes"], self.most), client)

    def _share(self, votes: Tensor, client: Client) -> tuple[Share, dict[str, float]]:
        share, _ = self._sums.share({"votes": votes}, client)
        return Share(share.value, self, MINT), {}

    def zero(self) -> dict[str, Tensor]:
        """No votes at all."""
        return self._sums.zero()

    def add(self, exact: dict[str, Tensor], share: Share) -> None:
        """Add a share to the fixed-point sums, in place; a TypeError if it has more votes than a client has."""
        added = self._sums.zero()
        self._sums.add(added, share)
        votes, most = share.value["votes"], self.weight * (1 + 1e-9)
        if self.noised_by is None and not ((votes >= 0) & (votes <= most)).all():
            raise TypeError("votes below 0, or more than one for a class")
        if self.noised_by is None and not (votes.sum(dim=1) <= self.most * most).all():
            raise TypeError("more votes for a query than a client has")
        exact["votes"] += added["votes"]

    def finish(
        self, exact: Mapping[str, Tensor], stream: Stream, silent: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The winners (Q,), UNANSWERED where there is none; diagnostics tell how sure the votes were.

        Where a record may have several classes, 1 for each that it has (Q, C). With a published price also "cost" (1,):
        see `SmoothedPrice`.
        """
        noisy, _ = self._sums.finish(exact, stream, silent)
        if self.several is not None:
            return {"labels": (noisy["votes"] > self.several.needed * self.weight).long()}, {}
        winners = noisy["votes"].argmax(dim=1)
        votes = self._sums.value(exact)["votes"] / self.weight
        answered = torch.ones(self.queries, dtype=torch.bool)
        if self.threshold is not None:
            count = votes.max(dim=1).values + self.threshold_noise * stream.normal(self.queries)
            answered = count >= self.threshold
            answered &= answered.cumsum(dim=0) <= self.answers  # the first of them
        values = {"labels": winners.masked_fill(~answered, UNANSWERED)}
        if self.cost is not None:
            top = votes.topk(2, dim=1).values
            gaps = (top[:, 0] - top[:, 1])[answered].numpy()
            values["cost"] = torch.tensor([self._cost(gaps, stream)], dtype=torch.float64)
        return values, {} if self.noised_by is not None else self._insight(votes, winners, answered)

    def _cost(self, gaps: np.ndarray, stream: Stream) -> float:
        assert self.cost is not None
        return self.cost.publish(
            gaps, classes=self.classes, std=self.noise_multiplier, sensitivity=self.sensitivity, step=self.gap_step,
            stream=stream,
        )  # fmt: skip

    def _insight(self, votes: Tensor, winners: Tensor, answered: Tensor) -> dict[str, float]:
        """What only a simulation may know: how the votes were cast, and the price for these very data.

        After Papernot et al. (2018), Theorem 6: the more the clients agree, the less an answer tells. That number
        itself tells of the data, so that it is not for publication: not sanitised.
        """
        found = {"answered": float(answered.sum())}
        chosen = votes[answered]
        if len(chosen):
            found["agreement"] = float(chosen.max(dim=1).values.mean())
            found["won"] = float((chosen.argmax(dim=1) == winners[answered]).double().mean())
        if self.noise_multiplier and (self.threshold is None or self.threshold_noise):
            curve = consensus_rdp(votes.numpy(), self.noise_multiplier, self.sensitivity, ORDERS, self.answers)
            if self.threshold is not None:
                rate = self.queries * (self.count_sensitivity / self.threshold_noise) ** 2 / 2
                curve = curve + rate * np.array(ORDERS)
            if self.cost is not None:
                curve = curve + rdp_curve(self.cost.event)
            found |= {f"rdp@{order!r}": float(value) for order, value in zip(ORDERS, curve, strict=True)}
        return found


@dataclass(frozen=True)
class NeighbourVotes(NoisyVotes):
    """The same, where each client votes by the labels of its k nearest records in a public space of features.

    The mechanism looks for them itself: that one record exchanges one neighbour is what the price rests on.
    """

    neighbours: int = 1  # k
    features: str = "raw"  # phi, by the name that `fairveil.neighbours` knows it by

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours < 1:
            raise ValueError(f"{self.neighbours} neighbours make no vote")

    @property
    def weight(self) -> int:
        return self.neighbours

    @property
    def sensitivity(self) -> float:
        return super().sensitivity if self.unit == "client" else self._apart / self.neighbours

    @property
    def count_sensitivity(self) -> float:
        return 1.0 if self.unit == "client" else 1 / self.neighbours

    @property
    def gap_step(self) -> float:
        return super().gap_step if self.unit == "client" else 2 / self.neighbours

    def _voters(self) -> str:
        return (
            f"each client votes with the labels of its {self.neighbours:,} nearest records ({self.features} features)"
        )

    def share(self, values: Mapping[str, Tensor], client: Client) -> tuple[Share, dict[str, float]]:
        """One client's votes for the input "queries" (Q, d): how many of its nearest records have each label."""
        if values:
            raise TypeError("votes of neighbours are counted by the mechanism itself: give it none")
        queries, records, shape = client.inputs["queries"], client.data.train, client.model.spec.features
        extract = find_extractor(self.features, shape)
        index = nearest(extract(queries.reshape(-1, *shape)), extract(records.x), self.neighbours)
        if self.several is None:
            return self._share(neighbour_counts(records.y, index, self.classes).double(), client)
        # on the grid of the sums, so that the sum over neighbours is exact, and moves as far as one of them
        scale = self._sums.scale(self._sums.parts[0])
        each = (within(records.y, self.most) * scale).floor() / scale
        return self._share(each[index].sum(dim=1), client)


def which_answered(labels: np.ndarray) -> np.ndarray:
    """Which queries have an answer (Q,), by their labels (Q,); or (Q, C), where a record may have several classes."""
    return np.asarray((labels != UNANSWERED).all(axis=tuple(range(1, labels.ndim))))


def within(votes: Tensor, most: int) -> Tensor:
    """Votes (n, C) as float64, each within 0 and 1; rows that add up to more than `most` are scaled down to it.

    What is negative or not a number counts as 0.
    """
    bounded = votes.to(torch.float64).nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0)
    total = bounded.sum(dim=1, keepdim=True)
    # a hair less, so that rounding never leaves a row with more
    return torch.where(total > most, bounded * (most * (1 - 1e-12) / total.clamp(min=most)), bounded)
