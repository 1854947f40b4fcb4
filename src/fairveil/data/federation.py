"""What a federation is: who holds how many records, to which group each client belongs, and how to load them.

A `Dataset` gives either a `Pool` (rows that belong to nobody yet: a split cuts them into clients) or a
`Federation` (rows that have an owner by nature). Nothing here assumes that all clients fit in memory.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

GRID_PER_DECADE = 24  # rounding down costs at most 1 - 10**(-1/24), 9% of a declared size


@dataclass(frozen=True, eq=False)
class Records:
    """Records in order; read-only by agreement, since clients may share them.

    Attributes:
        x: (n, *features) float32.
        y: (n,) int64 labels, or float32 for regression; where a record may have several of the classes at once,
            (n, classes) int64, 1 for each that it has and 0 for the others.
        within: the records that these are some of, and from which row on; None: they stand alone.
    """

    x: Tensor
    y: Tensor
    within: tuple[Records, int] | None = None

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.y.dtype not in (torch.int64, torch.float32):
            raise ValueError(f"x must be float32, y int64 or float32, not {self.x.dtype} and {self.y.dtype}")
        _check_labels(self.x, self.y)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: np.ndarray) -> Records:
        """A copy of these rows (n,), in this order."""
        index = torch.from_numpy(rows)
        return Records(self.x[index], self.y[index])


def _check_labels(x: Tensor, y: Tensor) -> None:
    """Raise unless there is a label for each record, or a row of 0 and 1."""
    if y.shape[:1] != x.shape[:1] or y.dim() > 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, so its labels y cannot have {tuple(y.shape)}")
    if y.dim() == 2 and (y.is_floating_point() or ((y != 0) & (y != 1)).any()):
        raise ValueError("of several classes a record has each or has it not: y must be int64, of 0 and 1")


def side_by_side(many: Sequence[Records]) -> list[Records]:
    """The same records, copied into one piece of memory: so those of all these clients can be gathered at once."""
    together = Records(torch.cat([records.x for records in many]), torch.cat([records.y for records in many]))
    starts = np.cumsum([0, *map(len, many)]).tolist()
    return [Records(together.x[a:b], together.y[a:b], (together, a)) for a, b in itertools.pairwise(starts)]


@dataclass(frozen=True)
class Decision:
    """What a predicted number means for a person: a loan from `threshold` on, say; or (not above) up to it."""

    threshold: float
    above: bool = True

    def about(self, numbers: Tensor) -> Tensor:
        """Decisions (n,) int64, 1 or 0, about numbers (n,). The threshold itself is a 1; what is no number is a 0."""
        return (numbers >= self.threshold if self.above else numbers <= self.threshold).long()


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds: what it trains on, and what it is judged by.

    Attributes:
        attributes: of the test records, by name (n,): which of the attribute's values each has. For evaluation only.
        decision: that follows from a number, true or predicted (regression); None: none does. For evaluation only.
    """

    train: Records
    test: Records
    attributes: Mapping[str, np.ndarray] = field(default_factory=dict)
    decision: Decision | None = None


class Source(Protocol):
    """Where clients' data come from. It travels to worker processes, so it must be picklable and small."""

    def load(self, client: int) -> ClientData:
        """The data of one client; the same at each call, in any process, whatever was loaded before."""
        ...


@dataclass(frozen=True)
class Standardise:
    """Features that are to be brought to mean 0 and standard deviation 1 by statistics that the clients release.

    Attributes:
        columns: which features, each within [-1, 1] by public bounds; each with the feature that is 1 where it is
            missing (it stays 0 there, and does not count), or None.
        noise_multiplier: of the release, see `privacy.moments.NoisyMoments`.
    """

    columns: tuple[tuple[int, int | None], ...]
    noise_multiplier: float

    @classmethod
    def of(cls, columns: tuple[tuple[int, int | None], ...], noise_multiplier: float) -> Standardise | None:
        """None if there is nothing to standardise."""
        return cls(columns, noise_multiplier) if columns else None


@dataclass(frozen=True, eq=False)
class ServerRecords:
    """Public records that the server holds: algorithms see them without labels.

    Attributes:
        name: of the dataset.
        x: (n, *features) float32, in an order shuffled by the seed of the run.
        labels: (n,) int64, the true ones, or (n, classes), as in `Records`. For evaluation only, as a simulation can
            do it: no algorithm and no task may see them.
    """

    name: str
    x: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.labels.dtype != torch.int64 or not len(self.x):
            raise ValueError(f"{len(self.x)} records: there must be some, float32 with labels of int64")
        _check_labels(self.x, self.labels)


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients as columns, their records on demand.

    Attributes:
        name: of the dataset.
        size: (clients,) true number of training records. Only `nominal_sizes` of it may leave this layer.
        group: (clients,) index into `groups`: the true group, for evaluation and for the oracle.
        groups: their names.
        features: shape of one record.
        classes: number of labels; 0 for regression.
        source: loads a client.
        fingerprint: sha256 of the data and of how they were cut.
        names: of the clients; empty: they are known by their numbers.
        record: what one record is, in the words of the statement.
        public: what was taken as public in making it, and why.
        holders: the most clients that hold one and the same original record. Above 1 clients overlap, and a
            record is protected by what all its holders release together.
        originals: how many different records the clients hold between them, where they overlap.
        tokens: if records hold the numbers of words, from 0 on, how many there are; None: they hold amounts.
        standardise: what is left to be done before training, by statistics that have a price.
        common_tests: whether all clients of a group are tested on the same records.
        attributes: sensitive attributes of records, for evaluation only: by name, the values that there are.
        elsewhere: whether the records are on the clients' own machines, and cannot be loaded here.
        decided: whether decisions follow from the numbers of a regression: then every client has its `Decision`.
        server: public records that the server holds, for systems that ask the clients about them; None: none.
        several: whether a record may have several of the classes at once.
    """

    name: str
    size: np.ndarray
    group: np.ndarray
    groups: tuple[str, ...]
    features: tuple[int, ...]
    classes: int
    source: Source
    fingerprint: str
    names: tuple[str, ...] = ()
    record: str = "one row of the data"
    public: Mapping[str, str] = field(default_factory=dict)
    holders: int = 1
    originals: int | None = None
    tokens: int | None = None
    standardise: Standardise | None = None
    common_tests: bool = False
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    elsewhere: bool = False
    decided: bool = False
    server: ServerRecords | None = None
    several: bool = False

    def __post_init__(self) -> None:
        for column, at_least in (("size", 1), ("group", 0)):
            values = np.asarray(getattr(self, column))
            if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer) or values.size == 0:
                raise ValueError(f"{column} must hold one integer for each client, not {values!r}")
            if values.min() < at_least:
                raise ValueError(f"{column} of client {values.argmin()} is {values.min()}, below {at_least}")
            object.__setattr__(self, column, values.astype(np.int64))
        if len(self.size) != len(self.group):
            raise ValueError(f"{len(self.size)} sizes, but {len(self.group)} groups of clients")
        if self.group.max() >= len(self.groups):
            raise ValueError(f"group {self.group.max()} has no name among {self.groups}")
        if self.classes < 0 or self.classes == 1:
            raise ValueError(f"classes must be 0 (regression) or at least 2, not {self.classes}")
        if self.decided and self.classes:
            raise ValueError(f"decisions follow from the numbers of a regression, and not from {self.classes} classes")
        if self.several and (not self.classes or self.elsewhere):
            raise ValueError("several at once are for classes, and not yet for records on the clients' own machines")
        if self.server is not None and tuple(self.server.x.shape[1:]) != self.features:
            raise ValueError(f"the server's records are {tuple(self.server.x.shape[1:])}, the clients' {self.features}")
        if self.names and len(self.names) != len(self.size):
            raise ValueError(f"{len(self.size)} clients, but {len(self.names)} names")
        if not 1 <= self.holders <= len(self.size):
            raise ValueError(f"a record cannot be held by {self.holders} of {len(self.size)} clients")
        if self.holders > 1 and self.originals is None:
            raise ValueError("clients overlap: how many different records do they hold?")
        if self.holders > 1 and len(set(self.size)) > 1:  # one client's releases stand for those of every holder
            raise ValueError("clients that overlap must hold equally many records")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "server": None}  # a worker loads clients: what the server holds stays with it

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.size)

    def load(self, client: int) -> ClientData:
        """The data of one client, 0 <= client < clients."""
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        data = self.source.load(int(client))  # a numpy integer would name another random stream
        if len(data.train) != self.size[client]:  # sampling rates, and so the price, are computed from size
            raise ValueError(f"client {client} loads {len(data.train)} records, not {self.size[client]}")
        if (data.decision is not None) != self.decided:
            raise ValueError(f"client {client} has the decision {data.decision}, but decided = {self.decided}")
        shape, found = (self.classes,) if self.several else (), {part.y.shape[1:] for part in (data.train, data.test)}
        if found != {shape}:
            raise ValueError(f"client {client} has targets of shape {found}, but several = {self.several}")
        return data

    def standardised(self, mean: np.ndarray, scale: np.ndarray) -> Federation:
        """The same with x -> (x - mean) / scale in the columns that `standardise` names; both (columns,)."""
        assert self.standardise is not None
        return replace(self, source=Standardised(self.source, self.standardise.columns, mean, scale), standardise=None)


@dataclass(frozen=True, eq=False)
class Standardised:
    """A source whose features are standardised on loading."""

    source: Source
    columns: tuple[tuple[int, int | None], ...]
    mean: np.ndarray
    scale: np.ndarray

    def load(self, client: int) -> ClientData:
        """The client's records, standardised."""
        data = self.source.load(client)
        return replace(data, train=self.applied(data.train), test=self.applied(data.test))

    def applied(self, records: Records) -> Records:
        """Any records in this form."""
        x = records.x.clone()
        for (column, missing), mean, scale in zip(self.columns, self.mean, self.scale, strict=True):
            x[:, column] = (x[:, column] - float(mean)) / float(scale)
            if missing is not None:
                x[x[:, missing] != 0, column] = 0.0
        return Records(x, records.y)


@dataclass(frozen=True, eq=False)
class Pool:
    """Rows that belong to nobody yet, for a split to cut; `test` is common to all clients.

    Attributes:
        name: of the dataset.
        train: rows to be shared out.
        test: held out; every client is tested on all of it, under its own shift.
        classes: number of labels; 0 for regression.
        record: what one record is, in the words of the statement.
        public: what was taken as public in making the rows, and why.
    """

    name: str
    train: Records
    test: Records
    classes: int
    record: str = "one row of the data"
    public: Mapping[str, str] = field(default_factory=dict)

    @property
    def features(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.train.x.shape[1:])

    @property
    def several(self) -> bool:
        """Whether a record may have several of the classes at once."""
        return self.train.y.dim() == 2


class Dataset(BaseModel, ABC):
    """A dataset is the frozen model of its options; subclass it for your own ("package.module:Name").

    Attributes:
        default_split: how it is cut if the user does not say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    default_split: ClassVar[Mapping[str, Any]] = {"kind": "natural"}

    @abstractmethod
    def load(self, seed: int) -> Pool | Federation:
        """A `Federation` if each record has an owner by nature, else a `Pool`; equal seeds, equal data."""


def nominal_sizes(size: np.ndarray, declared: Literal["public", "rounded"]) -> np.ndarray:
    """The sizes that clients declare, never above the true ones.

    Args:
        size: (clients,) true sizes, at least 1.
        declared: "public": exact. "rounded": rounded down to the integers among floor(10**(k/24)); the grid
            holds every integer up to 14, so small sizes stay as they are.

    Returns:
        (clients,) int64.
    """
    size = np.asarray(size, dtype=np.int64)
    if size.size and size.min() < 1:
        raise ValueError(f"a client of size {size.min()} cannot declare a size")
    if declared == "public" or not size.size:
        return size.copy()
    if declared != "rounded":
        raise ValueError(f"declared = {declared!r}: either 'public' or 'rounded'")
    steps = int(np.ceil(GRID_PER_DECADE * np.log10(size.max()))) + 2
    # The small term keeps whole decades whole, should 10**(k/24) come out a hair below an integer.
    grid = np.unique(np.floor(10 ** (np.arange(steps) / GRID_PER_DECADE) + 1e-9).astype(np.int64))
    return grid[np.searchsorted(grid, size, side="right") - 1]


def fingerprint(*parts: np.ndarray | Tensor | str | int | float) -> str:
    """sha256 (hex) of the parts in order, each with its type and shape, so that no two run together."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray | Tensor):
            array = np.ascontiguousarray(part)
            digest.update(f"{array.dtype.str}{array.shape}\n".encode())
            digest.update(array.data)
        else:
            text = part if isinstance(part, str) else repr(part)
            digest.update(f"{type(part).__name__} {len(text)} {text}\n".encode())
    return digest.hexdigest()
