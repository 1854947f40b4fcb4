"""Splits: who gets which rows of a pool, and under which shift; and the registry of all of them.

A split is checked against the pool before anything is cut. A row belongs to one client, unless `overlap` is
asked for: then the federation says how many hold the same one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from fairveil.data.federation import Federation, Pool, Records
from fairveil.data.shares import Columns as Columns
from fairveil.data.shares import Shares as Shares
from fairveil.data.shares import Split as Split
from fairveil.data.shifts import Shift, check_rotatable
from fairveil.data.skews import Dirichlet, OneClass, PowerLaw, Shards, apportion
from fairveil.errors import UserError, nearest
from fairveil.options import parse, shown
from fairveil.streams import Stream

TestFraction = Annotated[float, Field(gt=0, lt=1)]  # of each client's records: kept for testing


def held_out(held: np.ndarray, fraction: float) -> np.ndarray:
    """(clients,) how many of each client's records are for testing; at least one stays on each side.

    Who has a single record trains on it, and is tested on none.
    """
    return np.clip(np.rint(held * fraction), np.minimum(1, held - 1), held - 1).astype(np.int64)


def owned(
    name: str, records: Records, client: np.ndarray, *, classes: int, test_fraction: float, seed: int,
    group: np.ndarray | None = None, groups: tuple[str, ...] = ("all",),
    attributes: Mapping[str, tuple[np.ndarray, Sequence[str]]] | None = None, **more: Any,
) -> Federation:  # fmt: skip
    """The federation of records that have an owner; each client keeps a random share of its own for testing.

    Args:
        client: (records,) who holds each, from 0 on without a gap.
        group: (clients,) index into `groups`; None: all in one.
        attributes: of records, by name: (records,) codes, and the values that they stand for. For evaluation only.
        more: as in Federation.
    """
    counts = np.bincount(client)
    train, test = [], []
    by_client = np.split(np.argsort(client, kind="stable"), np.cumsum(counts)[:-1])
    for number, held in enumerate(held_out(counts, test_fraction)):
        shuffled = Stream(seed, "held out", number).numpy.permutation(by_client[number])
        test.append(np.sort(shuffled[:held]))
        train.append(np.sort(shuffled[held:]))
    group = np.zeros(len(counts), dtype=np.int64) if group is None else group
    shifts = (Shift(),) * len(groups)
    codes = {key: values for key, (values, _) in (attributes or {}).items()}
    source = Columns(records, Shares.of(train), records, Shares.of(test), group, shifts, classes, codes)
    named = {key: tuple(values) for key, (_, values) in (attributes or {}).items()}
    return source.federation(name, groups, attributes=named, **more)


class Natural(Split):
    """Every record stays with the client that holds it by nature."""

    kind: Literal["natural"] = "natural"

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """The federation as it is."""
        if isinstance(data, Federation):
            return data
        raise UserError(
            f'data.split.kind = "natural" does not fit {data.name}.',
            f"The records of {data.name} belong to no client by nature, so there is nothing to follow.",
            'data.split = { kind = "iid", clients = 10 }',
        )


class Cut(Split):
    """A split that deals shuffled rows out in equal shares, group by group.

    With `overlap` every client draws its rows from the whole pool by itself, so that one row may be held by
    several clients, also of different groups: so Malekmohammadi et al., "Differentially Private Clustered
    Federated Learning", 2024, draw 8,000 of 60,000 rows for each of 21 clients. The unit of privacy is then the
    original row with all its holders and shifts: each holder's releases tell of it, and all of them compose.
    Federation.holders is the most clients that hold one row, counted from the draw; who draws which rows
    depends on the seed and never on what is in them, so that number may be published.

    Attributes:
        clients: in all, or in each group.
        records: how many each client holds; None: the whole pool is dealt out (sizes differ by at most one).
        overlap: whether clients draw from the whole pool, each by itself; needs `records`.
        spread: of log-normal sizes, the standard deviation of their logarithm; 0: equal. The whole pool is dealt out.
    """

    clients: int | tuple[int, ...]
    records: PositiveInt | None = Field(None, examples=[100])
    overlap: bool = False
    spread: float = Field(0.0, ge=0, le=5)

    @model_validator(mode="after")
    def _equal_or_not(self) -> Self:
        if self.spread and self.records is not None:
            raise UserError(
                f"data.split.spread = {self.spread:g} does not go with data.split.records = {self.records}.",
                "Clients of different sizes share the whole pool.",
                "data.split.spread = 0, or leave out data.split.records",
            )
        return self

    @model_validator(mode="after")
    def _records_to_draw(self) -> Self:
        if self.overlap and self.records is None:
            raise UserError(
                "data.split.overlap = true needs data.split.records.",
                "Clients that draw from the whole pool do not use it up, so their size must be given.",
                "data.split.records = 100, or data.split.overlap = false",
            )
        return self

    @abstractmethod
    def parts(self, pool: Pool) -> list[tuple[str, Shift, int]]:
        """Name, shift and number of clients of each group; raises if they do not fit the pool."""

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Shares of the pool; everyone is tested on the common test set, under its group's shift."""
        pool = self.unowned(data)
        names, shifts, clients = zip(*self.parts(pool), strict=True)
        self._check_rows(pool, clients)
        share = self._share(len(pool.train), sum(clients), seed)
        group = np.repeat(np.arange(len(names)), clients)
        source = Columns(pool.train, share, pool.test, None, group, tuple(shifts), pool.classes)
        held = np.bincount(share.rows)
        return source.federation(
            pool.name, tuple(names), record=pool.record, public=pool.public, holders=int(held.max()),
            originals=int((held > 0).sum()),
        )  # fmt: skip

    def _check_rows(self, pool: Pool, clients: Sequence[int]) -> None:
        """Raise unless there are rows enough."""
        rows, total = len(pool.train), sum(clients)
        has = f"{pool.name} has {rows:,} training records"
        if total > rows and not self.overlap:
            raise UserError(
                f"data.split.clients = {shown(self.clients)} asks for {total:,} clients.",
                f"{has}; some client would hold none.",
                f"data.split.clients = {rows if len(clients) == 1 else f'numbers that add up to {rows}'}",
            )
        if self.records is None:
            return
        if self.records > rows:
            raise UserError(
                f"data.split.records = {self.records} is more than there are.",
                f"{has}, and a client holds each of them at most once.",
                f"data.split.records = {rows if self.overlap else rows // total}",
            )
        if self.records * total > rows and not self.overlap:
            raise UserError(
                f"data.split.records = {self.records} is too many for {total:,} clients.",
                f"{has}; without overlap {total:,} clients need {self.records * total:,}.",
                f"data.split.records = {rows // total}, or data.split.overlap = true",
            )

    def _share(self, rows: int, clients: int, seed: int) -> Shares:
        """Who holds which of the row numbers; a draw by the seed alone."""
        if self.overlap:
            draws = (Stream(seed, "partition", "overlap", client).numpy for client in range(clients))
            return Shares.of([draw.choice(rows, self.records, replace=False) for draw in draws])
        shuffled = Stream(seed, "partition").numpy.permutation(rows)
        if self.spread:
            weights = np.exp(self.spread * Stream(seed, "partition", "sizes").numpy.standard_normal(clients))
            sizes = 1 + apportion(rows - clients, weights)  # nobody is left without a row
            return Shares.of(np.split(shuffled, sizes.cumsum()[:-1]))
        dealt = rows if self.records is None else clients * self.records
        return Shares.of(np.array_split(shuffled[:dealt], clients))


class Iid(Cut):
    """All clients draw from the same distribution."""

    kind: Literal["iid"] = "iid"
    clients: PositiveInt = 10

    def parts(self, pool: Pool) -> list[tuple[str, Shift, int]]:
        """One group."""
        return [("all", Shift(), self.clients)]


class Rotate(Cut):
    """Groups whose images are turned by an angle of their own, counter-clockwise."""

    kind: Literal["rotate"] = "rotate"
    degrees: tuple[int | float, ...] = Field((0, 90, 180, 270), min_length=1)
    clients: tuple[PositiveInt, ...] = Field((3, 6, 6, 6), min_length=1)

    @model_validator(mode="after")
    def _one_number_each(self) -> Self:
        _matched("degrees", self.degrees, self.clients)
        _distinct("degrees", self.degrees, [angle % 360 for angle in self.degrees], "360 degrees")
        return self

    def parts(self, pool: Pool) -> list[tuple[str, Shift, int]]:
        """One group for each angle."""
        for angle in self.degrees:
            check_rotatable(pool.features, angle)
        pairs = zip(self.degrees, self.clients, strict=True)
        return [(f"{angle:g}°", Shift(degrees=angle), clients) for angle, clients in pairs]


class LabelFlip(Cut):
    """Groups whose labels are moved on by an offset of their own: (y + offset) mod classes."""

    kind: Literal["label-flip"] = "label-flip"
    offsets: tuple[int, ...] = Field((0, 1, 2, 3), min_length=1)
    clients: tuple[PositiveInt, ...] = Field((3, 6, 6, 6), min_length=1)

    @model_validator(mode="after")
    def _one_number_each(self) -> Self:
        _matched("offsets", self.offsets, self.clients)
        return self

    def parts(self, pool: Pool) -> list[tuple[str, Shift, int]]:
        """One group for each offset."""
        self.check_labelled(pool)
        turned = [offset % pool.classes for offset in self.offsets]
        _distinct("offsets", self.offsets, turned, f"{pool.classes} classes")
        pairs = zip(self.offsets, self.clients, strict=True)
        return [(f"labels {offset:+d}", Shift(offset=offset), clients) for offset, clients in pairs]


AnySplit = Annotated[
    Natural | Iid | Rotate | LabelFlip | Dirichlet | Shards | PowerLaw | OneClass, Field(discriminator="kind")
]
SPLITS: dict[str, type[Split]] = {
    "natural": Natural,
    "iid": Iid,
    "rotate": Rotate,
    "label-flip": LabelFlip,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "power-law": PowerLaw,
    "one-class": OneClass,
}


def parse_split(split: Mapping[str, Any] | Split) -> Split:
    """The split that was typed under `data.split`."""
    if isinstance(split, Split):
        return split
    if not isinstance(split, Mapping):
        raise UserError(
            f"data.split = {shown(split)} is not a table.",
            "A split has a kind and what that kind needs. Nothing was loaded.",
            'data.split = { kind = "iid", clients = 10 }',
        )
    kind = split.get("kind")
    if not isinstance(kind, str) or kind not in SPLITS:
        near = nearest(str(kind), SPLITS) or "iid"
        given = " is missing" if kind is None else f" = {shown(kind)} is not known"
        raise UserError(
            f"data.split.kind{given}.",
            f"It must be one of: {', '.join(sorted(SPLITS))}. Nothing was loaded.",
            f"data.split.kind = {shown(near)}",
        )
    return parse(SPLITS[kind], split, "data.split")


def _matched(key: str, values: Sequence[float], clients: Sequence[int]) -> None:
    if len(values) != len(clients):
        raise UserError(
            f"data.split.clients = {shown(clients)} has {len(clients)} numbers, but {key} has {len(values)}.",
            f"Each of {key} = {shown(values)} makes one group, and each group needs its number of clients.",
            f"data.split.clients = {shown((*clients, *[clients[-1]] * len(values))[: len(values)])}",
        )


def _distinct(key: str, values: Sequence[float], turned: Sequence[float], circle: str) -> None:
    if len(set(turned)) < len(turned):
        kept = [value for at, value in enumerate(values) if turned[at] not in turned[:at]]
        raise UserError(
            f"data.split.{key} = {shown(values)} names one shift twice (modulo {circle}).",
            "Two groups with the same data cannot be told apart: every score of clustering would be wrong.",
            f"data.split.{key} = {shown(kept)}, with the clients of equal ones added up",
        )
