"""What all splits share: who holds which rows, the source that loads them, and what a split is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from fairveil.data.federation import ClientData, Federation, Pool, Records, fingerprint
from fairveil.data.shifts import Shift
from fairveil.errors import UserError
from fairveil.options import shown


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
        attributes: of the test rows, by name (rows,): which of an attribute's values each has.
    """

    train: Records
    share: Shares
    test: Records
    held: Shares | None
    group: np.ndarray
    shifts: tuple[Shift, ...]
    classes: int
    attributes: Mapping[str, np.ndarray] = field(default_factory=dict)
    # Clients of one group share one shifted copy of a common test set: 20 copies of MNIST's would be 600 MB.
    _tests: dict[int, Records] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tests": {}}  # a worker shifts for itself what it needs

    def load(self, client: int) -> ClientData:
        """The client's rows under its group's shift."""
        group = int(self.group[client])
        train = self._shifted(self.train.take(self.share[client]), group)
        if self.held is not None:
            held = self.held[client]
            attributes = {name: values[held] for name, values in self.attributes.items()}
            return ClientData(train, self._shifted(self.test.take(held), group), attributes)
        if group not in self._tests:
            self._tests[group] = self._shifted(self.test, group)
        return ClientData(train, self._tests[group])

    def _shifted(self, records: Records, group: int) -> Records:
        return Records(*self.shifts[group].apply(records.x, records.y, self.classes))

    def federation(self, name: str, groups: tuple[str, ...], **more: Any) -> Federation:
        """The federation of these clients, fingerprinted by data, shares and shifts; `more` as in Federation."""
        held = (self.held.rows, self.held.start) if self.held is not None else ("common test set",)
        shifts = [part for shift in self.shifts for part in (float(shift.degrees), shift.offset)]
        test = () if self.test is self.train else (self.test.x, self.test.y)  # hashed once
        data = (self.train.x, self.train.y, *test, self.classes)
        mark = fingerprint(*data, self.share.rows, self.share.start, *held, self.group, *groups, *shifts)
        features = tuple(self.train.x.shape[1:])
        more |= {"common_tests": self.held is None, "several": self.train.y.dim() == 2}
        return Federation(name, self.share.size, self.group, groups, features, self.classes, self, mark, **more)


class Split(BaseModel, ABC):
    """How clients come about; the frozen model of `data.split`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    kind: str

    @abstractmethod
    def apply(self, data: Pool | Federation, seed: int) -> Federation:
        """The federation that this split makes of the data, after checking that it can."""

    def unowned(self, data: Pool | Federation) -> Pool:
        """The rows to cut; raises if they have owners by nature."""
        if isinstance(data, Pool):
            return data
        raise UserError(
            f"data.split.kind = {shown(self.kind)} does not fit {data.name}.",
            f"Each record of {data.name} already belongs to a client; cutting would give it to another,\n"
            "and the guarantee would speak of clients that do not exist.",
            'data.split = { kind = "natural" }, or leave data.split out',
        )

    def check_labelled(self, pool: Pool) -> None:
        """Raise unless each row has a label, and one only."""
        if pool.several:
            raise UserError(
                f"data.split.kind = {shown(self.kind)} does not fit {pool.name}.",
                "Its records may have several classes at once, and this split goes by the one class of a record.",
                'data.split = { kind = "iid", clients = 10 }',
            )
        if pool.classes == 0:
            raise UserError(
                f"data.split.kind = {shown(self.kind)} does not fit {pool.name}.",
                "It is a regression task: its records have no labels, and this split is made by labels.",
                'data.split = { kind = "iid", clients = 10 }',
            )
