"""Columns become numbers as declared, and never by a look at the records that was not declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fairveil.data.columns import Category, Declared, Prepared, Range, Standard, Text, prepare
from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation, Standardise
from fairveil.data.shares import Columns
from fairveil.errors import UserError


def prepared(declared: Declared, values: list[Any], name: str = "a") -> Prepared:
    return prepare({name: pd.Series(values)}, [name], {name: declared})


def refused(declared: Declared, values: list[Any]) -> UserError:
    with pytest.raises(UserError) as error:
        prepared(declared, values)
    return error.value


def test_a_range_is_clipped_and_mapped() -> None:
    got = prepared(Range(low=20, high=80), [20, 50, 80, 10, 1e9])
    assert got.x.tolist() == [[-1], [0], [1], [-1], [1]] and got.names == ("a",)
    assert "taken as chosen without a look at the records" in got.public.values()


def test_what_is_missing_says_so_in_a_column_of_its_own() -> None:
    got = prepared(Range(low=0, high=10, missing=(0,)), [0, 10, None, 5])
    assert got.x.tolist() == [[0, 1], [1, 0], [0, 1], [0, 0]] and got.names == ("a", "a missing")
    with_none_missing = prepared(Range(low=0, high=10, missing=()), [1.0, 10.0])
    assert with_none_missing.x.shape == (2, 2)  # the shape follows the declaration, not the records
    error = refused(Range(low=0, high=10), [1, None])
    assert 'column "a" that are missing' in error.what and "row 2" in error.why and "missing = []" in error.fix


def test_categories_are_a_public_list() -> None:
    got = prepared(Category(values=(1, 2, 4)), [4, 1, 2])
    assert got.x.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]] and got.names == ("a=1", "a=2", "a=4")
    words = prepared(Category(values=("yes", "no"), other=True, missing=("?",)), ["no", "perhaps", "?", None])
    assert words.x.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]]
    error = refused(Category(values=(1, 2)), [1, 7, 8])
    assert (
        "2 values are not in the list" in error.what and '"7.0" in row 2' in error.why and "other = true" in error.fix
    )
    assert "holds text, but the column holds numbers" in refused(Category(values=("1",)), [1, 2]).what


def test_standard_takes_published_figures() -> None:
    got = prepared(Standard(mean=100, std=20), [100, 140])
    assert got.x.tolist() == [[0], [2]] and got.to_standardise == ()


def test_standard_with_bounds_is_left_to_what_the_clients_release() -> None:
    got = prepared(Standard(low=0, high=200), [100, 200, 999])
    assert got.x.tolist() == [[0], [1], [1]] and got.to_standardise == ((0, None),)


def test_standard_computed_without_noise_needs_a_reason_and_states_it() -> None:
    got = prepared(Standard(reason="the registry publishes them every year"), [1.0, 3.0])
    assert got.x.tolist() == [[-1], [1]] and got.to_standardise == ()
    assert "the registry publishes them every year" in got.public.values()
    flat = prepared(Standard(reason="the registry publishes them"), [3.0, 3.0])
    assert flat.x.tolist() == [[0], [0]]


@pytest.mark.parametrize("given", [{}, {"mean": 1.0}, {"low": 0.0}, {"mean": 0.0, "std": 1.0, "low": 0.0, "high": 1.0}])
def test_standard_must_say_where_its_figures_come_from(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="lacks a source of mean and std"):
        Standard(**given)


@pytest.mark.parametrize("kind", [Range, Standard])
def test_bounds_must_be_in_order(kind: type[Declared]) -> None:
    with pytest.raises(UserError, match="is not below high"):
        kind(low=1.0, high=1.0)  # type: ignore[call-arg]


KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "codes written as floats": ({"kind": "category", "values": [3, 6, 7], "other": True}, ["3.0", "6.0", "7.0", "3.0"]),
    "codes and a word": ({"kind": "category", "values": ["3", "6"], "other": True}, ["3", "6", "3.0", "6"]),
    "a sign for missing": ({"kind": "range", "low": 0, "high": 9, "missing": [-9, "?"]}, ["-9", "3", "-9.0", "5"]),
    "released": ({"kind": "standard", "low": 0, "high": 9, "missing": []}, ["1", "2", "3", "NA"]),
    "text": ({"kind": "text", "length": 3}, ["007", "7", "seven", "1.0"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ["unknown", "", "1e999", "7", "NA", "-9"])
def test_one_odd_cell_changes_no_other_record(kind: str, odd: str, tmp_path: Path) -> None:
    """A column whose type followed from all of its cells would give every client other features for one record."""
    declared, cells = KINDS[kind]
    declared = declared | {"missing": [*declared.get("missing", []), odd]}

    def features(last: str) -> np.ndarray:
        rows = [*cells * 3, last]
        table = pd.DataFrame({"a": rows, "client": np.arange(13) % 3, "y": np.arange(13) % 2})
        table.to_csv(tmp_path / "t.csv", index=False)
        options = {"path": str(tmp_path / "t.csv"), "features": ["a"], "prepare": {"a": declared}}
        source = build_federation("file", options, None, 0).source
        assert isinstance(source, Columns)
        return source.train.x.numpy()

    assert np.array_equal(features(cells[0])[:-1], features(odd)[:-1])


def test_words_get_numbers_that_do_not_depend_on_other_records() -> None:
    how = Text(length=4, vocabulary=50)
    got = prepared(how, ["Hello, hello world", "one two three four five six", "", None][:3], "note")
    first, second, empty = got.x.tolist()
    assert first[0] == first[1] != first[2] and first[3] == 0 and empty == [0, 0, 0, 0]
    assert all(1 <= token < 50 for token in second)
    assert prepared(how, ["world"], "note").x[0, 0] == first[2]
    with pytest.raises(UserError, match="mixes a text with other columns"):
        prepare({"note": pd.Series(["a"]), "b": pd.Series([1])}, ["note", "b"], {"note": how})


# ---- in a file -------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": random.integers(20, 90, 40),
            "country": random.choice(["NA", "CH", "DE"], 40),  # NA is Namibia
            "dose": np.where(random.random(40) < 0.3, np.nan, random.normal(5, 2, 40)),
            "client": np.arange(40) % 4,
            "y": random.integers(0, 2, 40),
        }
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


PREPARE = {
    "age": {"kind": "standard", "low": 0, "high": 120},
    "country": {"kind": "category", "values": ["CH", "DE", "NA"]},
    "dose": {"kind": "range", "low": 0, "high": 10, "missing": []},
}


def load(path: Path, **options: Any) -> Federation:
    return build_federation("file", {"path": str(path), **options}, None, 0)


def test_a_file_is_prepared_as_declared(table: Path) -> None:
    federation = load(table, prepare=PREPARE, statistics_noise=7.0)
    assert federation.features == (6,)  # age, three countries, dose and whether it is missing
    assert federation.standardise == Standardise(((0, None),), 7.0)
    x = federation.load(0).train.x
    assert (x[:, 1:4].sum(dim=1) == 1).all() and x.abs().max() <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prepare": {"agee": PREPARE["age"]}}, ["data.options.prepare", "agee", "age"]),
        ({"prepare": {"age": {"kind": "rang", "low": 0, "high": 1}}}, ["data.options.prepare", "rang"]),
        ({"prepare": {"age": {"kind": "range", "low": 0}}}, ["data.options.prepare", "high"]),
        ({"prepare": {"y": {"kind": "range", "low": 0, "high": 1}}}, ["target"]),
        ({"prepare": PREPARE, "features": ["age", "country"]}, ["dose", "not among the features"]),
        ({"prepare": PREPARE, "statistics_noise": 0}, ["statistics_noise"]),
        ({"features": ["country"]}, ["country", "not numeric", "category"]),
        ({"features": ["age", "dose"]}, ["dose", "missing"]),
    ],
)
def test_mistakes_are_named(table: Path, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(table, **options)
    assert all(word in str(error.value) for word in words), str(error.value)
