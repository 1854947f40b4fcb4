"""Splits: who gets which rows of a pool, and under which shift. Rows never belong to two clients.

A split is checked against the pool before anything is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from fairveil.data.federation import ClientData, Federation, Pool, Records, fingerprint
from fairveil.data.shifts import Shift, check_rotatable
from fairveil.errors import UserError, nearest
from fairveil.options import parse, shown
from fairveil.streams import Stream


@dataclass(frozen=True, eq=False)
class Shares:
    """Row numbers by client, end to end: client i holds rows[start[i]:start[i + 1]]."""

    rows: np.ndarray
    start: np.ndarray

    @classmethod
    def of(cls, by_client: Sequence[np.ndarray]) -> Shares:
        """Shares from one array of row numbers for each client."""
        start = np.cumsum([0, *map(len, by_client)])
        return cls(np.concatenate(by_client).astype(np.int64), start)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.rows[self.start[client] : self.start[client + 1]]

    @property
    def size(self) -> np.ndarray:
        """(clients,) number of rows."""
        return np.diff(self.start)


@dataclass(frozen=True, eq=False)
class Columns:
    """A source: the rows once, each client's share of them as row numbers, shifts applied on loading.

    Attributes:
        train, share: rows, and who trains on which.
        test, held: rows, and who is tested on which; held = None: everyone on all of them.
        group, shifts: (clients,) and, by group, what sets it apart.
        classes: number of labels; 0 for regression.
    """

    train: Records
    share: Shares
    test: Records
    held: Shares | None
    group: np.ndarray
    shifts: tuple[Shift, ...]
    classes: int
    # Clients of one group share one shifted copy of a common test set: 20 copies of MNIST's would be 600 MB.
    _tests: dict[int, Records] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tests": {}}  # a worker shifts for itself what it needs

    def load(self, client: int) -> ClientData:
        """The client's rows under its group's shift."""
        group = int(self.group[client])
        train = self._shifted(self.train.take(self.share[client]), group)
        if self.held is not None:
            return ClientData(train, self._shifted(self.test.take(self.held[client]), group))
        if group not in self._tests:
            self._tests[group] = self._shifted(self.test, group)
        return ClientData(train, self._tests[group])

    def _shifted(self, records: Records, group: int) -> Records:
        return Records(*self.shifts[group].apply(records.x, records.y, self.classes))

    def federation(self, name: str, groups: tuple[str, ...], **more: Any) -> Federation:
        """The federation of these clients, fingerprinted by data, shares and shifts; `more` as in Federation."""
        held = (self.held.rows, self.held.start) if self.held is not None else ("common test set",)
        shifts = [part for shift in self.shifts for part in (float(shift.degrees), shift.offset)]
        data = (self.train.x, self.train.y, self.test.x, self.test.y, self.classes)
        mark = fingerprint(*data, self.share.rows, self.share.start, *held, self.group, *groups, *shifts)
        features = tuple(self.train.x.shape[1:])
        return Federation(name, self.share.size, self.group, groups, features, self.classes, self, mark, **more)


def held_out(held: np.ndarray, fraction: float) -> np.ndarray:
    """(clients,) how many of each client's records are for testing; at least one stays on each side.

    Who has a single record trains on it, and is tested on none.
    """
    return np.clip(np.rint(held * fraction), np.minimum(1, held - 1), held - 1).astype(np.int64)


def owned(
    name: str, records: Records, client: np.ndarray, *, classes: int, test_fraction: float, seed: int,
    group: np.ndarray | None = None, groups: tuple[str, ...] = ("all",), **more: Any,
) -> Federation:  # fmt: skip
    """The federation of records that have an owner; each client keeps a random share of its own for testing.

    Args:
        client: (records,) who holds each, from 0 on without a gap.
        group: (clients,) index into `groups`; None: all in one.
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
    source = Columns(records, Shares.of(train), records, Shares.of(test), group, shifts, classes)
    return source.federation(name, groups, **more)


class Split(BaseModel, ABC):
    """How clients come about; the frozen model of `data.split`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    kind: str

    @abstractmethod
    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """The federation that this split makes of the data, after checking that it can."""


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
    """A split that deals shuffled rows out in equal shares (sizes differ by at most one), group by group."""

    clients: int | tuple[int, ...]  # in all, or in each group

    @abstractmethod
    def parts(self, pool: Pool) -> list[tuple[str, Shift, int]]:
        """Name, shift and number of clients of each group; raises if they do not fit the pool."""

    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """Disjoint shares of the whole pool."""
        if isinstance(data, Federation):
            raise UserError(
                f"data.split.kind = {shown(self.kind)} does not fit {data.name}.",
                f"Each record of {data.name} already belongs to a client; cutting would give it to another,\n"
                "and the guarantee would speak of clients that do not exist.",
                'data.split = { kind = "natural" }, or leave data.split out',
            )
        names, shifts, clients = zip(*self.parts(data), strict=True)
        rows = len(data.train)
        if sum(clients) > rows:
            raise UserError(
                f"data.split.clients = {shown(self.clients)} asks for {sum(clients):,} clients.",
                f"{data.name} has {rows:,} training records; some client would hold none.",
                f"data.split.clients = {rows if len(clients) == 1 else f'numbers that add up to {rows}'}",
            )
        shuffled = Stream(seed, "partition").numpy.permutation(rows)
        share = Shares.of(np.array_split(shuffled, sum(clients)))
        group = np.repeat(np.arange(len(names)), clients)
        source = Columns(data.train, share, data.test, None, group, tuple(shifts), data.classes)
        return source.federation(data.name, tuple(names), record=data.record, public=data.public)


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
        if pool.classes == 0:
            raise UserError(
                f'data.split.kind = "label-flip" does not fit {pool.name}.',
                "It is a regression task: there are no labels to move on.",
                'data.split = { kind = "iid", clients = 10 }',
            )
        turned = [offset % pool.classes for offset in self.offsets]
        _distinct("offsets", self.offsets, turned, f"{pool.classes} classes")
        pairs = zip(self.offsets, self.clients, strict=True)
        return [(f"labels {offset:+d}", Shift(offset=offset), clients) for offset, clients in pairs]


AnySplit = Annotated[Natural | Iid | Rotate | LabelFlip, Field(discriminator="kind")]
SPLITS: dict[str, type[Split]] = {"natural": Natural, "iid": Iid, "rotate": Rotate, "label-flip": LabelFlip}


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
