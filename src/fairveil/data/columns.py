"""How the columns of a table become numbers, by declaration.

Whatever is typed in the config (a range, a list of categories, a mean) is taken as chosen without a look at the
records, and so as public. A statistic that is computed from the records is something else: it is either released, with
noise and a price (`Standard` with bounds), or declared public, for a reason that the statement repeats (`Standard` with
a reason).

A declared column is read cell by cell. What becomes of a cell never depends on the cells of other records (but for
statistics declared public): a single odd one would otherwise turn a column of numbers into one of text, and change the
features of every client.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from fairveil.data.tables import MISSING_NUMBER, numeric
from fairveil.errors import UserError, nearest
from fairveil.options import parse, shown

if TYPE_CHECKING:
    from fairveil.data.tables import Column

Value = int | float | str


class Declared(BaseModel, ABC):
    """How one column becomes one or more columns of numbers.

    Attributes:
        missing: values that stand for a missing one, besides an empty cell ([] for the empty cell alone). The column is
            then followed by another that says whether it was missing, and holds 0 where it was. None: nothing may be
            missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    missing: tuple[Value, ...] | None = None

    @property
    def holds_words(self) -> bool:
        """Whether the column holds words, among which "NA" is one more word."""
        return False

    @abstractmethod
    def names(self, name: str) -> list[str]:
        """What its columns are called, but for the one of missing values."""

    @abstractmethod
    def encode(self, cells: Cells, absent: np.ndarray, name: str) -> np.ndarray:
        """(n, width) float64; where `absent` (n,), anything finite."""


class Range(Declared):
    """A number between public bounds: clipped to [low, high] and mapped to [-1, 1]."""

    kind: Literal["range"] = "range"
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_bounds(self.low, self.high)
        return self

    def names(self, name: str) -> list[str]:
        return [name]

    def encode(self, cells: Cells, absent: np.ndarray, name: str) -> np.ndarray:
        return _between(cells.numbers(absent, name, bounded=True), self.low, self.high)[:, None]


class Category(Declared):
    """One of a public list of values: a column of 0 and 1 for each.

    Attributes:
        values: numbers for a column of numbers, else text.
        other: whether a value outside the list is allowed; it is 0 in every column.
    """

    kind: Literal["category"] = "category"
    values: tuple[Value, ...] = Field(min_length=1)
    other: bool = False

    @model_validator(mode="after")
    def _different(self) -> Self:
        if len(set(self.values)) < len(self.values):
            raise UserError(
                f"data.options.prepare: values = {shown(self.values)} has one value twice.",
                "Each makes a column of its own.",
                f"values = {shown(list(dict.fromkeys(self.values)))}",
            )
        return self

    @property
    def holds_words(self) -> bool:
        return any(isinstance(value, str) for value in self.values)

    def names(self, name: str) -> list[str]:
        return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for value in self.values]

    def encode(self, cells: Cells, absent: np.ndarray, name: str) -> np.ndarray:
        hit = cells.equal(self.values, f"{name}.values")
        strange = ~hit.any(axis=1) & ~absent
        if strange.any() and not self.other:
            row = int(strange.argmax())
            raise UserError(
                f"data.options.prepare.{name}: {strange.sum():,} values are not in the list of categories.",
                f"The first is {shown(cells.shown(row))} in row {row + 1:,}; the list is {shown(self.values)}.\n"
                "A list made from the records would itself tell of them, so it is not completed here.",
                f"add it to data.options.prepare.{name}.values, or other = true",
            )
        return hit.astype(np.float64)


class Standard(Declared):
    """A number brought to mean 0 and standard deviation 1. It must say where the two come from:

    - `mean` and `std`: published figures, typed here. They are public.
    - `low` and `high`: public bounds; mean and deviation are released by the clients before training, with noise, and
      are priced like everything else that leaves them.
    - `reason`: mean and deviation of all records are computed without noise and taken as public, for this reason.
    """

    kind: Literal["standard"] = "standard"
    mean: float | None = None
    std: PositiveFloat | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = Field(None, min_length=10)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        pairs = [(self.mean, self.std), (self.low, self.high), (self.reason, self.reason)]
        given = [pair for pair in pairs if pair != (None, None)]
        if len(given) != 1 or None in given[0]:
            raise UserError(
                f"data.options.prepare: {shown(self.model_dump(exclude_none=True))} lacks a source of mean and std.",
                "Published figures are public; bounds let the clients release them with noise, at a price; anything\n"
                "computed from records without noise must be declared public, for a reason. One of the three.",
                'mean = 0.0, std = 1.0; or low = 0.0, high = 1.0; or reason = "why these statistics are public"',
            )
        if self.low is not None and self.high is not None:
            _check_bounds(self.low, self.high)
        return self

    def names(self, name: str) -> list[str]:
        return [name]

    def encode(self, cells: Cells, absent: np.ndarray, name: str) -> np.ndarray:
        values = cells.numbers(absent, name, bounded=self.low is not None)
        if self.low is not None and self.high is not None:
            return _between(values, self.low, self.high)[:, None]  # standardised later, by what is released
        mean, std = self.mean or 0.0, self.std
        if std is None and not absent.all():
            mean, std = float(values[~absent].mean()), float(values[~absent].std())
        return ((values - mean) / (std or 1.0))[:, None]


class Text(Declared):
    """Text as the numbers of its words: the first `length` words, 0 where the text is shorter.

    A word's number is a public hash of it in [1, vocabulary): a vocabulary learned from the records would tell of them.
    """

    kind: Literal["text"] = "text"
    length: Annotated[int, Field(ge=1, le=10_000)] = 25
    vocabulary: Annotated[int, Field(ge=2, le=10_000_000)] = 4096

    @property
    def holds_words(self) -> bool:
        return True

    def names(self, name: str) -> list[str]:
        return [f"{name}[{place}]" for place in range(self.length)]

    def encode(self, cells: Cells, absent: np.ndarray, name: str) -> np.ndarray:
        tokens = np.zeros((len(absent), self.length))
        known: dict[str, int] = {}
        for row in np.flatnonzero(~absent).tolist():
            words = re.findall(r"\w+", cells.shown(row).lower())[: self.length]
            for place, word in enumerate(words):
                if word not in known:
                    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                    known[word] = 1 + int.from_bytes(digest, "big") % (self.vocabulary - 1)
                tokens[row, place] = known[word]
        return tokens


AnyColumn = Range | Category | Standard | Text
KINDS: dict[str, type[AnyColumn]] = {"range": Range, "category": Category, "standard": Standard, "text": Text}


def parse_columns(prepare: Any) -> Any:
    """The declarations that were typed, one by one, so that an error names the column and what its kind takes."""
    if not isinstance(prepare, Mapping):
        return prepare
    found = {}
    for name, values in prepare.items():
        key = f"data.options.prepare.{name}"
        kind = values.get("kind") if isinstance(values, Mapping) else getattr(values, "kind", None)
        if kind not in KINDS:
            given = " is missing" if kind is None else f" = {shown(kind)} is not known"
            raise UserError(
                f"{key}.kind{given}.",
                f"It must be one of: {', '.join(KINDS)}. Nothing was run.",
                f"{key}.kind = {shown(nearest(str(kind), KINDS) or 'range')}",
            )
        found[name] = parse(KINDS[kind], values, key) if isinstance(values, Mapping) else values
    return found


@dataclass(frozen=True, eq=False)
class Prepared:
    """Features ready for a model.

    Attributes:
        x: (n, d) float32, all finite.
        names: of the d columns.
        to_standardise: which of them are to be standardised by statistics that the clients release, each with the
            column that says where it is missing.
        public: what was taken as public on the way, and why.
        tokens: how many words there are, if these are their numbers.
    """

    x: np.ndarray
    names: tuple[str, ...]
    to_standardise: tuple[tuple[int, int | None], ...]
    public: Mapping[str, str]
    tokens: int | None = None


def prepare(columns: Mapping[str, Column], chosen: Sequence[str], declared: Mapping[str, Declared]) -> Prepared:
    """The chosen columns as numbers; one that is not declared must be numeric, and stays as it is.

    Raises:
        UserError: naming column, row and what to declare.
    """
    text = next((name for name in chosen if isinstance(declared.get(name), Text)), None)
    if text and len(chosen) > 1:
        raise UserError(
            f"data.options.features = {shown(list(chosen))} mixes a text with other columns.",
            "The numbers of words are names, not amounts; a model reads either words or amounts.",
            f"data.options.features = [{shown(text)}]",
        )
    parts, names, released, public = [], [], [], {}
    for name in chosen:
        cells, how = Cells.of(columns[name]), declared.get(name)
        if how is None:
            cells.numbers(cells.empty, name)  # a column of words is not one with missing numbers
        absent = _absent(cells, how, name)
        if how is None:
            parts.append(cells.numbers(absent, name)[:, None])
            names.append(name)
            continue
        encoded = how.encode(cells, absent, name)
        encoded[absent] = 0.0
        if isinstance(how, Standard):
            if how.low is not None:
                released.append((len(names), None if how.missing is None else len(names) + 1))
            elif how.reason:
                public[f"mean and standard deviation of {name} over all records, computed without noise"] = how.reason
        parts.append(encoded)
        names += how.names(name)
        if how.missing is not None:
            parts.append(absent.astype(np.float64)[:, None])
            names.append(f"{name} missing")
    x = np.concatenate(parts, axis=1)
    _check_finite(x, names)
    if declared:
        public["ranges, categories and constants of the columns"] = "taken as chosen without a look at the records"
    how = declared[text] if text else None
    tokens = how.vocabulary if isinstance(how, Text) else None
    return Prepared(x.astype(np.float32), tuple(names), tuple(released), public, tokens)


@dataclass(frozen=True, eq=False)
class Cells:
    """A column cell by cell.

    Attributes:
        number: (n,) float64; NaN where a cell is not a number.
        text: (n,) the cells as they stand in the file; None if the file itself says that they are numbers.
        empty: (n,) where there is nothing.
    """

    number: np.ndarray
    text: np.ndarray | None
    empty: np.ndarray

    @classmethod
    def of(cls, column: Column) -> Cells:
        """The cells of a column."""
        import pandas as pd

        series = pd.Series(column)
        empty = series.isna().to_numpy(dtype=bool)
        if numeric(column):
            return cls(np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan)), None, empty)
        text = series.astype("object").where(~empty, "").astype(str)
        # truth values are numbers, as they are in a file that knows types
        spelt = text.str.strip().str.lower().map({"true": "1", "false": "0"}).fillna(text)
        return cls(np.asarray(pd.to_numeric(spelt, errors="coerce"), dtype=np.float64), text.to_numpy(object), empty)

    def shown(self, row: int) -> str:
        """A cell as text."""
        return str(self.number[row]) if self.text is None else str(self.text[row])

    def equal(self, values: Sequence[Value], key: str) -> np.ndarray:
        """(n, values) where a cell equals a value: as numbers for a number, as text for a text."""
        words = [value for value in values if isinstance(value, str)]
        if words and self.text is None:
            raise UserError(
                f"data.options.prepare.{key} = {shown(list(values))} holds text, but the column holds numbers.",
                "A number never equals a text, so these values would never be found.",
                f"data.options.prepare.{key} = numbers",
            )
        columns = [self.text == value if isinstance(value, str) else self.number == value for value in values]
        return np.stack([np.asarray(column, dtype=bool) for column in columns], axis=1)

    def numbers(self, absent: np.ndarray, name: str, *, bounded: bool = False) -> np.ndarray:
        """(n,) float64, 0 where absent; bounded: however large, since they are going to be clipped."""
        values = np.where(absent, 0.0, self.number)
        # NaN, infinite, or so as float32
        bad = np.isnan(values) if bounded else ~(np.abs(values) <= np.finfo(np.float32).max)
        if not bad.any():
            return values
        row = int(bad.argmax())
        if self.text is not None and np.isnan(values[row]):
            first = shown(self.shown(row))
            raise UserError(
                f"column {shown(name)} is not numeric.",
                f"{bad.sum():,} of its values are not numbers; the first is {first} in row {row + 1:,}.\n"
                "A model takes numbers only.",
                f'data.options.prepare.{name} = {{ kind = "category", values = [{first}] }} with all its values,\n'
                f"  or missing = [{first}] in it, if that is what it stands for, or leave it out",
            )
        raise UserError(
            f"data.options.path has {bad.sum():,} values in column {shown(name)} that are NaN or infinite.",
            f"The first is in row {row + 1:,} (the first record is row 1).\n"
            "One such value would turn every weight of the model into NaN.",
            "fill them in or leave out those rows; or leave the column out of data.options.features",
        )


def _absent(cells: Cells, how: Declared | None, name: str) -> np.ndarray:
    """(n,) where the column has no value."""
    absent = cells.empty
    if cells.text is not None and how is not None and not how.holds_words:
        absent = absent | np.isin(cells.text.astype(str), MISSING_NUMBER)
    if how is not None and how.missing:
        absent = absent | cells.equal(how.missing, f"{name}.missing").any(axis=1)
    if absent.any() and (how is None or how.missing is None):
        raise UserError(
            f"data.options.path has {absent.sum():,} values in column {shown(name)} that are missing.",
            f"The first is in row {int(absent.argmax()) + 1:,} (the first record is row 1).\n"
            "One such value would turn every weight of the model into NaN.",
            f'data.options.prepare.{name} = {{ kind = "range", low = 0.0, high = 1.0, missing = [] }}, which adds a\n'
            "  column that says so; or fill them in, or leave the column out of data.options.features",
        )
    return absent


def _check_finite(x: np.ndarray, names: Sequence[str]) -> None:
    """A tiny std can make any number too large."""
    bad = ~(np.abs(x) <= np.finfo(np.float32).max).all(axis=0)
    if bad.any():
        raise UserError(
            f"data.options.prepare makes values of {shown(names[int(bad.argmax())])} that are too large.",
            "One such value would turn every weight of the model into NaN.",
            "a larger std, or bounds that lie further apart",
        )


def _between(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.asarray((np.clip(values, low, high) - low) * (2 / (high - low)) - 1)


def _check_bounds(low: float, high: float) -> None:
    if not low < high:
        raise UserError(
            f"data.options.prepare: low = {low:g} is not below high = {high:g}.",
            "Values are clipped to what lies between the two.",
            f"low = {high:g}, high = {low:g}" if high < low else "two different bounds",
        )
