"""A user's own records, with a column that says which client holds each of them.

What is missing, infinite, not a number or ambiguous is an error that says where it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator

from fairveil.data.columns import AnyColumn, Prepared, parse_columns, prepare
from fairveil.data.federation import Dataset, Federation, Records, Standardise
from fairveil.data.partition import TestFraction, owned
from fairveil.data.tables import numeric, pick, read_columns
from fairveil.errors import UserError
from fairveil.options import shown

if TYPE_CHECKING:
    from fairveil.data.tables import Column


class File(Dataset):
    """Records from a file; each client keeps a random share of its own records for testing.

    An npz holds arrays of equal length: `x` (n, *features), and those that `target`, `client` and `group`
    name (one called "group" is used without being named). Clients, classes and groups are the sorted distinct
    values of their columns, unless `labels` says otherwise: the three lists are thereby declared public.

    Attributes:
        path: .csv, .parquet or .npz.
        client: column that says who holds the record; "": one client holds them all, as in a deployment.
        target: column to predict; or several, each 1 where a record has the class that it stands for and 0 where not:
            then a record may have several classes at once.
        labels: the values of the target, in the order of their classes; None: those that are found, sorted. Clients on
            several machines must give it, for one that lacks a class would number the others differently.
        features: columns to predict it from; None: all other numeric ones with a name, and those of `prepare`.
        prepare: how columns become numbers, by name (see `fairveil.data.columns`); others stay as they are.
        statistics_noise: noise multiplier of the means and deviations that clients release to standardise columns.
        group: column with one value for each client, for fairness between groups.
        sensitive: columns such as sex or age band, one value for each record, for fairness between groups of records.
            They are for evaluation only, and no features unless `features` names them. Their values are public.
        task: whether the target is a label or a number.
        test_fraction: share of each client's records kept for testing, at least one record. A client that has one
            record trains on it and is not scored.
    """

    path: Path = Field(examples=["records.csv"])
    client: str = "client"
    target: str | Annotated[tuple[str, ...], Field(min_length=2)] = "y"
    labels: tuple[str | int, ...] | None = Field(None, min_length=2, examples=[[0, 1]])
    features: tuple[str, ...] | None = Field(None, min_length=1)
    prepare: dict[str, AnyColumn] = Field(default_factory=dict)
    statistics_noise: Annotated[float, Field(ge=0.01, le=1e6)] = 10.0
    group: str | None = None
    sensitive: tuple[str, ...] = ()
    task: Literal["classification", "regression"] = "classification"
    test_fraction: TestFraction = 0.2

    @field_validator("prepare", mode="before")
    @classmethod
    def _one_by_one(cls, prepare: Any) -> Any:
        return parse_columns(prepare)

    @model_validator(mode="after")
    def _different_columns(self) -> Self:
        for names in (self.features or (), (self.client, *self._targeted)):
            twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
            if twice is not None:
                raise UserError(
                    f"data.options names the column {shown(twice)} twice.",
                    "Client and target are different columns, and so are all features. Nothing was run.",
                    "each column once",
                )
        return self

    @model_validator(mode="after")
    def _several_classes(self) -> Self:
        if len(self._targeted) > 1 and (self.labels is not None or self.task == "regression"):
            what = "labels" if self.labels is not None else "task"
            raise UserError(
                f"data.options.{what} does not go with several columns in data.options.target.",
                "Each of them holds 0 or 1: whether a record has that class. Nothing was run.",
                f"leave out data.options.{what}",
            )
        return self

    @property
    def _targeted(self) -> tuple[str, ...]:
        """The columns to predict."""
        return (self.target,) if isinstance(self.target, str) else self.target

    def load(self, seed: int) -> Federation:
        """Read, check, and set test records aside."""
        labels = self._targeted if self.task == "classification" else ()
        apart = set(self.sensitive) - set(self.prepare) - set(self.features or ())
        texts = {name for name in (self.client, self.group, *labels, *apart) if name}
        columns = read_columns(self.path, texts, set(self.prepare))
        targets = (("target", name) for name in self._targeted)
        sensitive = (("sensitive", name) for name in self.sensitive)
        for option, name in (("client", self.client), *targets, ("group", self.group), *sensitive):
            if name not in (None, ""):
                pick(columns, self.path, option, name)
        prepared = self._features(columns)
        y, classes = self._targets(columns)
        if self.client:
            client, names = self._codes(columns, "client", self.client)
            self._check_clients(client, names)
        else:
            client, names = np.zeros(len(y), dtype=np.int64), [self.path.stem]
        group, groups = self._groups(columns, client, names)
        return owned(
            self.path.name, Records(torch.from_numpy(prepared.x), torch.from_numpy(y)), client, classes=classes,
            test_fraction=self.test_fraction, seed=seed, group=group, groups=groups, names=tuple(names),
            public=prepared.public, tokens=prepared.tokens,
            attributes={name: self._codes(columns, "sensitive", name) for name in self.sensitive},
            standardise=Standardise.of(prepared.to_standardise, self.statistics_noise),
        )  # fmt: skip

    def _features(self, columns: dict[str, Column]) -> Prepared:
        if self.path.suffix.lower() != ".npz":
            if not len(columns[self._targeted[0]]):
                raise self._nothing("records")
            return prepare(columns, self._chosen(columns), self.prepare)
        return Prepared(self._array(columns), (), (), {})

    def _chosen(self, columns: dict[str, Column]) -> tuple[str, ...]:
        """The feature columns of a table, none of them the answer."""
        own = {self.client, *self._targeted, self.group}
        for option, names in (("features", self.features or ()), ("prepare", tuple(self.prepare))):
            for name in names:
                pick(columns, self.path, option, name)
            shared = next((name for name in names if name in own), None)
            if shared is not None:
                kept = shown([name for name in names if name not in own])
                raise UserError(
                    f"data.options.{option} holds {shown(shared)}, which is also the client, target or group.",
                    "A model that is shown the answer, or who holds the record, learns nothing else.",
                    f"data.options.features = {kept}" if option == "features" else f"leave {shown(shared)} out",
                )
        if self.features is None:
            usable = {name for name, column in columns.items() if numeric(column) or name in self.prepare}
            found = tuple(name for name in columns if name in usable - own - (set(self.sensitive) - set(self.prepare)))
            if not found:
                raise self._nothing("numeric columns to learn from")
            return found
        unused = next((name for name in self.prepare if name not in self.features), None)
        if unused is not None:
            raise UserError(
                f"data.options.prepare declares {shown(unused)}, which is not among the features.",
                "It would have no effect.",
                f"data.options.features = {shown([*self.features, unused])}, or leave it out of prepare",
            )
        return self.features

    def _array(self, columns: dict[str, Column]) -> np.ndarray:
        """The array x of an npz, of a shape that fits the others."""
        for option, value in (("features", self.features), ("prepare", self.prepare)):
            if value:
                raise UserError(
                    f"data.options.{option} = {shown(value)} does not fit an npz file.",
                    "The columns of its array x have no names: all of them are features, as they are.",
                    f"leave out data.options.{option}",
                )
        if "x" not in columns:
            raise self._nothing("array called x")
        x = np.asarray(columns["x"])
        names = (*self._targeted, self.client, self.group or "group", *self.sensitive)
        others = {name: columns[name] for name in names if name in columns}
        if x.ndim < 2 or not numeric(x) or any(column.shape != x.shape[:1] for column in others.values()):
            shapes = ", ".join(f"{name} is {column.shape}" for name, column in others.items())
            raise UserError(
                f"data.options.path = {shown(self.path)} holds arrays that do not fit together.",
                f"x is {x.dtype} of shape {x.shape}; {shapes}.\n"
                "x must be numeric and (records, *features), the others (records,): one entry a record.",
                "x = x.reshape(records, features), and a client, a target and any other column for each record",
            )
        if not x.size:
            raise self._nothing("records")
        bad = _unusable(x).reshape(len(x), -1)
        if bad.any():
            worst = int(bad.sum(axis=0).argmax())
            raise UserError(
                f"data.options.path = {shown(self.path)} has {bad[:, worst].sum():,} values in x[:, {worst}] "
                "(flattened) that are missing, NaN or infinite.",
                f"The first is in {_row(bad[:, worst])}; {bad.any(axis=0).sum()} column(s) are affected.\n"
                "One such value would turn every weight of the model into NaN.",
                "fill them in or leave out those rows",
            )
        return np.ascontiguousarray(x, dtype=np.float32)

    def _targets(self, columns: dict[str, Column]) -> tuple[np.ndarray, int]:
        """(n,) int64 labels, or (n, classes) of 0 and 1, and the number of classes; or (n,) float32 and 0."""
        if not isinstance(self.target, str):
            return np.stack([self._has_class(columns, name) for name in self.target], axis=1), len(self.target)
        given = pick(columns, self.path, "target", self.target)
        whole = True
        if numeric(given):
            values = _floats(given)
            self._complete("target", self.target, _unusable(values))
            whole = bool((values == np.rint(values)).all())
        if self.task == "regression":
            if not numeric(given):
                raise self._mistaken("is not numeric", "A regression predicts numbers", "classification")
            return values.astype(np.float32), 0
        if not whole:
            raise self._mistaken("holds fractions", "Each distinct value would become a class", "regression")
        labels, names = self._codes(columns, "target", self.target)
        if self.labels is not None:
            return self._declared(labels, names)
        if len(names) < 2:
            raise UserError(
                f"data.options.target = {shown(self.target)} holds one class only, {shown(names[0])}.",
                "Every model that always answers so is perfect: there is nothing to learn.",
                "data.options.target = a column with at least two values",
            )
        return labels, len(names)

    def _has_class(self, columns: dict[str, Column], name: str) -> np.ndarray:
        """(n,) int64, 1 where a record has the class that a column stands for."""
        codes, values = self._codes(columns, "target", name)
        known = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}  # as numbers and truth values are written
        strange = next((value for value in values if value not in known), None)
        if strange is not None:
            raise UserError(
                f"data.options.target holds {shown(name)}, a column with the value {shown(strange)}.",
                "Of several target columns each holds 1 where a record has that class, and 0 where it has not.\n"
                "Nothing was loaded.",
                f"columns of 0 and 1; or one column, data.options.target = {shown(name)}",
            )
        return np.array([known[value] for value in values], dtype=np.int64)[codes]

    def _declared(self, codes: np.ndarray, names: list[str]) -> tuple[np.ndarray, int]:
        """(n,) int64 index into the labels that were declared, and how many they are."""
        known = [str(label) for label in self.labels or ()]
        strange = [name for name in names if name not in known]
        if strange or len(set(known)) < len(known):
            raise UserError(
                f"data.options.labels = {shown(list(self.labels or ()))} does not fit {shown(self.target)}.",
                f"The column also holds {shown(strange[0])}." if strange else "One of them is there twice.",
                f"data.options.labels = {shown(sorted({*known, *names}))}",
            )
        return np.array([known.index(name) for name in names], dtype=np.int64)[codes], len(known)

    def _codes(self, columns: dict[str, Column], option: str, name: str) -> tuple[np.ndarray, list[str]]:
        """(n,) int64 index into the sorted distinct values of a column, and these as text."""
        import pandas as pd

        column = pd.Series(pick(columns, self.path, option, name))
        self._complete(option, name, column.isna().to_numpy(dtype=bool))
        if isinstance(column.dtype, pd.CategoricalDtype):  # it sorts by an order of its own
            column = column.astype(column.cat.categories.dtype)
        try:
            codes, names = pd.factorize(column, sort=True)
        except TypeError as error:
            raise UserError(
                f"data.options.{option} = {shown(name)} holds values that cannot be sorted ({column.dtype}).",
                "Clients, labels and groups must be numbers or text, or their order would be arbitrary.",
                f"data.options.{option} = a column of numbers or text",
            ) from error
        return codes.astype(np.int64), [str(value) for value in names]

    def _complete(self, option: str, name: str, missing: np.ndarray) -> None:
        count = missing.sum()
        if count:
            raise UserError(
                f"data.options.{option} = {shown(name)} has {count:,} values that are missing or infinite.",
                f"The first is in {_row(missing)}.\nA record without it counts nowhere.",
                f"fill in the column {shown(name)}, or leave out those rows",
            )

    def _check_clients(self, client: np.ndarray, names: list[str]) -> None:
        if len(names) < 2:
            raise UserError(
                f"data.options.client = {shown(self.client)} names one client only, {shown(names[0])}.",
                "A federation needs at least two; with one there is nobody to learn together with.",
                "data.options.client = a column with at least two values",
            )
        if np.bincount(client).max() < 2:
            raise UserError(
                f"data.options.client = {shown(self.client)}: every client has 1 record only.",
                "It is needed for training, so that nobody could be tested.",
                "data.options.client = a column whose values come more than once",
            )

    def _groups(
        self, columns: dict[str, Column], client: np.ndarray, names: list[str]
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """(clients,) index of the group of each client, and the groups' names."""
        name = self.group
        if name is None and self.path.suffix.lower() == ".npz" and "group" in columns:
            name = "group"
        if name is None:
            return np.zeros(len(names), dtype=np.int64), ("all",)
        codes, groups = self._codes(columns, "group", name)
        group = np.zeros(len(names), dtype=np.int64)
        group[client] = codes
        torn = np.flatnonzero(group[client] != codes)
        if len(torn):
            who = client[torn[0]]
            raise UserError(
                f"data.options.group = {shown(name)}: client {shown(names[who])} is in two groups.",
                f"It holds {shown(groups[codes[torn[0]]])} and {shown(groups[group[who]])}; "
                "fairness is measured between clients, so each has one group.",
                "data.options.group = a column with one value for each client",
            )
        return group, tuple(groups)

    def _nothing(self, what: str) -> UserError:
        return UserError(
            f"data.options.path = {shown(self.path)} has no {what}.",
            "There is nothing to learn from. Nothing was loaded.",
            "data.options.path = a file with records: features, a target and a client for each",
        )

    def _mistaken(self, what: str, why: str, task: str) -> UserError:
        return UserError(
            f'data.options.task = "{self.task}", but the target {shown(self.target)} {what}.',
            f"{why}, so the model would fit something other than what is meant.",
            f"data.options.task = {shown(task)}",
        )


def _floats(column: Column) -> np.ndarray:
    """(n,) float64, NaN where the column has no value (nullable columns have several ways to say so)."""
    import pandas as pd

    return np.asarray(pd.Series(column).to_numpy(dtype=np.float64, na_value=np.nan))


def _unusable(values: np.ndarray) -> np.ndarray:
    """Where values are NaN, infinite, or would become so as float32."""
    return np.asarray(~(np.abs(values) <= np.finfo(np.float32).max))


def _row(marked: np.ndarray) -> str:
    return f"row {int(marked.argmax()) + 1:,} (the first record is row 1)"
