"""Splits that skew labels or sizes: no two clients need be alike, and every row belongs to exactly one.

Who holds a row follows from the labels of all rows, as nowhere in real life: these are test beds. The guarantee
speaks of the clients that come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt

from fairveil.data.federation import Federation, Pool
from fairveil.data.shares import Columns, Shares, Split
from fairveil.data.shifts import Shift
from fairveil.errors import UserError
from fairveil.options import shown
from fairveil.streams import Stream

TRIES = 500  # a tenth of a second for 100 clients and 10 classes


class LabelSkew(Split):
    """A split whose clients hold the labels in different proportions.

    Attributes:
        clients: how many.
        test: "own": test rows are dealt out too, those of a class in proportion to who trains on it (a client may
            get none, and is then not scored); "common": everyone is tested on the whole test set.
    """

    clients: PositiveInt = 10
    test: Literal["own", "common"] = "own"

    def check_tested(self, pool: Pool) -> None:
        """Raise if no client would have test rows."""
        if self.test == "own" and not np.intersect1d(pool.train.y.numpy(), pool.test.y.numpy()).size:
            raise UserError(
                'data.split.test = "own" leaves every client without test records.',
                f"None of the {len(pool.test):,} test records of {pool.name} has a label that somebody trains on.",
                'data.split.test = "common"',
            )

    def dealt(self, pool: Pool, owner: np.ndarray, seed: int) -> Federation:
        """The federation in which `owner` (rows,) holds each training row, and is tested as `test` says."""
        held = None
        if self.test == "own":
            counts = np.zeros((pool.classes, self.clients), dtype=np.int64)
            np.add.at(counts, (pool.train.y.numpy(), owner), 1)
            labels = pool.test.y.numpy()
            there = np.bincount(labels, minlength=pool.classes) * counts.any(axis=1)  # else nobody trains on it
            tested = np.array([apportion(rows, weights) for rows, weights in zip(there, counts, strict=True)])
            random = Stream(seed, "partition", self.kind, "test").numpy
            held = shares_of(deal(labels, tested, random), self.clients)
        return in_one_group(pool, shares_of(owner, self.clients), held)


class Dirichlet(LabelSkew):
    """Of each class, the clients hold shares drawn from Dirichlet(alpha): the smaller alpha, the more unlike.

    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", 2019; the idea also in Hsu,
    Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
    2019, who draw the classes of each client instead. All is drawn again until every client holds
    `min_records`, so the law is Dirichlet's given that nobody holds fewer.

    Attributes:
        alpha: concentration; 1e6 gives equal shares of each class, 1e-6 each class to one client.
        min_records: the fewest that a client may hold.
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)] = 0.5  # beyond these, nothing changes but rounding errors
    min_records: PositiveInt = 10

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Disjoint shares of the whole pool."""
        pool = self.unowned(data)
        self.check_labelled(pool)
        check_enough(pool, self.clients, "min_records", self.min_records)
        self.check_tested(pool)
        labels = pool.train.y.numpy()
        counts = self._counts(np.bincount(labels, minlength=pool.classes), seed)
        return self.dealt(pool, deal(labels, counts, Stream(seed, "partition", self.kind).numpy), seed)

    def _counts(self, there: np.ndarray, seed: int) -> np.ndarray:
        """(classes, clients): how many rows of each class each client holds, if `there` (classes,) are in all."""
        best = 0
        for number in range(TRIES):
            random = Stream(seed, "partition", self.kind, "try", number).numpy
            drawn = random.dirichlet(np.full(self.clients, self.alpha), size=len(there))
            counts = np.array([apportion(rows, shares) for rows, shares in zip(there, drawn, strict=True)])
            smallest = int(counts.sum(axis=0).min())
            if smallest >= self.min_records:
                return counts
            best = max(best, smallest)
        lower = f", or data.split.min_records = {best}" if best else ""
        raise UserError(
            f"data.split.alpha = {shown(self.alpha)} leaves some client with fewer than "
            f"data.split.min_records = {self.min_records} records.",
            f"In the best of {TRIES} tries the smallest of {self.clients:,} clients got {best}.\n"
            "A smaller alpha or more clients make the smallest share smaller.",
            f"data.split.alpha = {min(10 * self.alpha, 1e6):g}, or fewer data.split.clients{lower}",
        )


class Shards(LabelSkew):
    """Rows sorted by label are cut into shards of equal size (they differ by at most one), dealt at random.

    So a client holds few labels. McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient
    Learning of Deep Networks from Decentralized Data", 2017.

    Attributes:
        shards_per_client: how many each client gets.
    """

    kind: Literal["shards"] = "shards"
    shards_per_client: PositiveInt = 2

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Disjoint shares of the whole pool."""
        pool = self.unowned(data)
        self.check_labelled(pool)
        check_enough(pool, self.clients, "shards_per_client", self.shards_per_client)
        self.check_tested(pool)
        random = Stream(seed, "partition", self.kind).numpy
        shuffled = random.permutation(len(pool.train))
        by_label = shuffled[np.argsort(pool.train.y.numpy()[shuffled], kind="stable")]
        holder = random.permutation(np.repeat(np.arange(self.clients), self.shards_per_client))
        owner = np.empty(len(by_label), dtype=np.int64)
        for client, shard in zip(holder, np.array_split(by_label, len(holder)), strict=True):
            owner[shard] = client
        return self.dealt(pool, owner, seed)


class PowerLaw(Split):
    """Clients of very different sizes, alike in all else; everyone is tested on the common test set.

    The client of rank r = 1, 2, ... holds min_records plus a share in proportion to r^-exponent of what is left
    of the pool. Which client has which rank is drawn. Sizes by a power law are the custom since Li et al.,
    "Federated Optimization in Heterogeneous Networks", 2020.

    Attributes:
        clients: how many.
        exponent: 1 is Zipf's law: the second share is half the first. The larger, the more unequal.
        min_records: the fewest that a client holds.
    """

    kind: Literal["power-law"] = "power-law"
    clients: PositiveInt = 10
    exponent: PositiveFloat = 1.0
    min_records: PositiveInt = 10

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Disjoint shares of the whole pool."""
        pool = self.unowned(data)
        check_enough(pool, self.clients, "min_records", self.min_records)
        random = Stream(seed, "partition", self.kind).numpy
        rows = len(pool.train)
        share = Shares.of(np.split(random.permutation(rows), np.cumsum(random.permutation(self.sizes(rows)))[:-1]))
        return in_one_group(pool, share, None)

    def sizes(self, rows: int) -> np.ndarray:
        """(clients,) sizes by rank, which add up to `rows`."""
        weights = np.arange(1.0, self.clients + 1) ** -self.exponent
        return self.min_records + apportion(rows - self.clients * self.min_records, weights)


class OneClass(Split):
    """Every client holds rows of one class, and is tested on the test rows of that class; groups are the classes.

    Du, Xiang, Wu, "Mitigating Unfairness in Differentially-Private Federated Learning", 2025, make the samples of
    one label one client. With several clients for a class, its training rows are dealt out among them in equal
    shares; they are tested on the same rows.

    Attributes:
        clients_per_class: how many clients hold rows of the same class.
    """

    kind: Literal["one-class"] = "one-class"
    clients_per_class: PositiveInt = 1

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Disjoint shares of the whole pool, in the order of the classes."""
        pool = self.unowned(data)
        self.check_labelled(pool)
        self._check_classes(pool)
        random = Stream(seed, "partition", self.kind).numpy
        share, held = [], []
        for label in range(pool.classes):
            train = random.permutation(np.flatnonzero(pool.train.y.numpy() == label))
            share += np.array_split(train, self.clients_per_class)
            held += [np.flatnonzero(pool.test.y.numpy() == label)] * self.clients_per_class
        group = np.repeat(np.arange(pool.classes), self.clients_per_class)
        groups = tuple(f"class {label}" for label in range(pool.classes))
        federation = cut_up(pool, Shares.of(share), Shares.of(held), group, groups)
        return replace(federation, common_tests=self.clients_per_class > 1)

    def _check_classes(self, pool: Pool) -> None:
        """Raise unless each class has a training row for each of its clients, and a test row."""
        labels = (pool.train.y.numpy(), pool.test.y.numpy())
        train, test = (np.bincount(side, minlength=pool.classes) for side in labels)
        for side, counts in (("training", train), ("test", test)):
            if not counts.all():
                raise UserError(
                    f'data.split.kind = "one-class" does not fit {pool.name}.',
                    f"Class {counts.argmin()} has no {side} records, and its clients would hold nothing else.",
                    'data.split = { kind = "dirichlet", clients = 10 }',
                )
        if train.min() < self.clients_per_class:
            raise UserError(
                f"data.split.clients_per_class = {self.clients_per_class} is too many.",
                f"Class {train.argmin()} of {pool.name} has {train.min():,} training records; "
                "some client would hold none.",
                f"data.split.clients_per_class = {train.min()}",
            )


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to the weights that add up to `total`, by largest remainder.

    Args:
        total: what is shared out; at least 0.
        weights: (n,) at least 0; all 0 only if total is.

    Returns:
        (n,) int64. A larger weight never gets less, and a weight of 0 gets nothing.
    """
    quota = total * (weights / weights.sum()) if total else np.zeros(len(weights))
    counts = np.floor(quota).astype(np.int64)
    last = np.argsort(counts - quota, kind="stable")[: total - counts.sum()]
    counts[last] += 1
    return counts


def deal(labels: np.ndarray, counts: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """(rows,) who gets each row, -1 for nobody, so that client i gets counts[c, i] rows of class c, at random."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    for label, row in enumerate(counts):
        found = random.permutation(np.flatnonzero(labels == label))
        owner[found[: row.sum()]] = np.repeat(np.arange(len(row)), row)
    return owner


def shares_of(owner: np.ndarray, clients: int) -> Shares:
    """Shares from the owner of each row; -1: nobody."""
    order = np.argsort(owner, kind="stable")
    start = np.searchsorted(owner[order], np.arange(clients + 1))
    return Shares(order[start[0] :], start - start[0])


def in_one_group(pool: Pool, share: Shares, held: Shares | None) -> Federation:
    """The federation of these shares, all clients in one group."""
    return cut_up(pool, share, held, np.zeros(len(share.size), dtype=np.int64), ("all",))


def cut_up(pool: Pool, share: Shares, held: Shares | None, group: np.ndarray, groups: Sequence[str]) -> Federation:
    """The federation of these shares of the pool, without shifts."""
    source = Columns(pool.train, share, pool.test, held, group, (Shift(),) * len(groups), pool.classes)
    return source.federation(pool.name, tuple(groups), record=pool.record, public=pool.public)


def check_enough(pool: Pool, clients: int, key: str, each: int) -> None:
    """Raise unless there are rows for `clients` clients with `each` of what `key` counts."""
    rows = len(pool.train)
    if clients * each > rows:
        fewer = f"data.split.{key} = {rows // clients}" if clients <= rows else ""
        raise UserError(
            f"data.split.clients = {clients} with data.split.{key} = {each} needs {clients * each:,} records.",
            f"{pool.name} has {rows:,} training records, and each belongs to one client.",
            fewer or f"data.split.clients = {rows}, data.split.{key} = 1",
        )
