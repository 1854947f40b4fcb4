"""A user's file: the same federation from each format, and errors that say where the mistake is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation
from fairveil.errors import UserError

CLIENTS = ["bern", "aarau", "chur", "bern"]


@pytest.fixture
def table() -> pd.DataFrame:
    random = np.random.default_rng(0)
    client = np.array(CLIENTS)[np.arange(60) % 4]
    return pd.DataFrame(
        {
            "age": random.integers(20, 90, 60),
            "pressure": random.normal(120, 15, 60),
            "client": client,
            "size": np.where(client == "bern", "large", "small"),
            "y": random.integers(0, 3, 60) * 10,
            "note": ["text"] * 60,
        }
    )


def write(table: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        x = table[["age", "pressure"]].to_numpy(dtype=float)
        text = {"client": table["client"], "group": table["size"]}
        columns = {name: column.to_numpy(dtype=str) for name, column in text.items()}
        np.savez(path, x=x, y=table["y"].to_numpy(), **columns)
    return path


def load(path: Path, seed: int = 0, **options: Any) -> Federation:
    return build_federation("file", {"path": str(path), **options}, None, seed)


def fails(path: Path, **options: Any) -> UserError:
    with pytest.raises(UserError) as error:
        load(path, **options)
    return error.value


def rows_of(federation: Federation, client: int) -> tuple[set[tuple[float, ...]], set[tuple[float, ...]]]:
    data = federation.load(client)
    train, test = ({tuple(row) for row in part.x.tolist()} for part in (data.train, data.test))
    return train, test


def test_the_three_formats_give_one_federation(table: pd.DataFrame, tmp_path: Path) -> None:
    options: dict[str, dict[str, str]] = {
        ".csv": {"group": "size"},
        ".parquet": {"group": "size"},
        ".npz": {},
    }
    loaded = [load(write(table, tmp_path / f"t{end}"), **chosen) for end, chosen in options.items()]
    first = loaded[0]
    assert first.name == "t.csv" and first.clients == 3 and first.features == (2,) and first.classes == 3
    assert first.groups == ("large", "small") and first.group.tolist() == [1, 0, 1]  # aarau, bern, chur
    assert len({federation.fingerprint for federation in loaded}) == 1
    for other in loaded[1:]:
        for client in range(3):
            left, right = first.load(client), other.load(client)
            assert torch.equal(left.train.x, right.train.x) and torch.equal(left.train.y, right.train.y)
            assert torch.equal(left.test.x, right.test.x) and torch.equal(left.test.y, right.test.y)


def test_each_record_stays_with_its_client_and_is_held_out_or_not(table: pd.DataFrame, tmp_path: Path) -> None:
    federation = load(write(table, tmp_path / "t.csv"))
    assert federation.size.tolist() == [12, 24, 12]  # 15, 30, 15 records less a fifth
    for client, name in enumerate(["aarau", "bern", "chur"]):
        train, test = rows_of(federation, client)
        own = table[table["client"] == name][["age", "pressure"]].to_numpy(dtype=np.float32)
        assert not train & test
        assert train | test == {tuple(row) for row in own.tolist()}
    data = federation.load(0)
    row = int(np.flatnonzero(table["pressure"].to_numpy(np.float32) == data.train.x[0, 1].item())[0])
    assert data.train.y[0].item() == table["y"][row] // 10  # labels 0, 10, 20 become 0, 1, 2


def test_seeds_and_pickling(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.csv")
    first, same, other = load(path, 0), load(path, 0), load(path, 1)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert rows_of(first, 1) == rows_of(same, 1) != rows_of(other, 1)
    again = pickle.loads(pickle.dumps(first))
    assert rows_of(again, 1) == rows_of(first, 1)
    changed = table.copy()
    changed.loc[3, "age"] += 1
    assert load(write(changed, tmp_path / "u.csv"), 0).fingerprint != first.fingerprint


def test_options(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.parquet")
    assert load(path, features=["pressure"]).features == (1,)
    assert load(path, test_fraction=0.5).size.tolist() == [7, 15, 7]  # 7.5 rounds to 8 for testing
    regression = load(path, target="pressure", task="regression")
    assert regression.classes == 0 and regression.features == (2,)  # age and y
    assert regression.load(0).train.y.dtype == torch.float32
    words = load(path, target="size")
    assert words.classes == 2 and words.load(1).train.y.unique().tolist() == [0]  # bern is large: one class


def test_npz_images_keep_their_shape(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    np.savez(path, x=np.ones((8, 1, 4, 4), np.uint8), y=np.arange(8) % 2, client=np.arange(8) // 4)
    federation = load(path)
    assert federation.features == (1, 4, 4) and federation.groups == ("all",)


def test_names_that_look_like_missing_values(table: pd.DataFrame, tmp_path: Path) -> None:
    table["client"] = table["client"].replace({"bern": "NA"})
    table["y"] = table["y"].map({0: "None", 10: "null", 20: "nan"})
    federation = load(write(table, tmp_path / "t.csv"))
    assert federation.clients == 3 and federation.classes == 3
    assert load(write(table, tmp_path / "t.parquet")).fingerprint == federation.fingerprint


def test_nullable_and_boolean_columns(table: pd.DataFrame, tmp_path: Path) -> None:
    table["age"] = table["age"].astype("Int64")
    table["y"] = (table["y"] > 0).astype("boolean")
    table["smoker"] = table["pressure"] > 120
    federation = load(write(table, tmp_path / "t.parquet"))
    assert federation.features == (3,) and federation.classes == 2
    table.loc[4, "age"] = pd.NA
    assert '1 values in column "age"' in fails(write(table, tmp_path / "t.parquet")).what
    table["y"] = table["y"].astype("Int64")
    table.loc[7, "y"] = pd.NA
    error = fails(write(table, tmp_path / "t.parquet"), features=["pressure"])
    assert 'data.options.target = "y" has 1 values that are missing' in error.what and "row 8" in error.why


def test_missing_and_unreadable_files(table: pd.DataFrame, tmp_path: Path) -> None:
    error = fails(Path("nowhere.csv"))
    assert error.what == 'data.options.path = "nowhere.csv" does not exist.'
    assert str(Path.cwd() / "nowhere.csv") in error.why
    assert "is not a file" in fails(tmp_path).what
    (tmp_path / "t.xlsx").write_bytes(b"")
    error = fails(tmp_path / "t.xlsx")
    assert "unknown extension" in error.what and ".parquet" in error.why and "t.csv" in error.fix
    for name, content in {
        "empty.csv": b"",
        "torn.csv": b'client,y,a\n1,2,"3',
        "long.csv": b"client,y,a\n1,2,3\n1,2,3,4\n",
        "bytes.csv": b"client,y,a\n\xff\xfe,1,2\n",
        "empty.parquet": b"",
        "torn.parquet": b"PAR1....",
        "empty.npz": b"",
        "torn.npz": b"PK\x03\x04....",
        "text.npz": b"not an archive",
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        error = fails(path)
        assert error.what == f'data.options.path = "{path}" cannot be read.', name
        assert error.fix.startswith(f"write the file again as {path.suffix[1:]}")


def test_rows_longer_than_the_header_are_not_shifted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("client,y,a\n1,0,3,9\n2,1,3,9\n")
    assert "cannot be read" in fails(path).what


def test_columns_called_alike_and_columns_without_a_name(table: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("client,y,a,y\n1,0,3,0\n2,1,3,1\n")
    error = fails(path)
    assert "cannot be read" in error.what and 'two columns are called "y"' in error.why
    table.to_csv(path)  # pandas writes row numbers in a first column without a name
    assert load(path).features == (2,)
    assert load(path).fingerprint == load(write(table, tmp_path / "u.csv")).fingerprint


def test_categories_are_sorted_by_name(table: pd.DataFrame, tmp_path: Path) -> None:
    expected = load(write(table, tmp_path / "t.csv"), group="size").fingerprint
    table["client"] = pd.Categorical(table["client"], categories=["chur", "bern", "aarau", "nobody"])
    table["y"] = pd.Categorical(table["y"], categories=[20, 0, 10])
    assert load(write(table, tmp_path / "t.parquet"), group="size").fingerprint == expected


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "exploded").touch, ())

    path = tmp_path / "t.npz"
    np.savez(path, x=np.ones((4, 2)), y=np.arange(4) % 2, client=np.array([Bomb()] * 4, dtype=object))
    error = fails(path)
    assert "cannot be read" in error.what and "never unpickled" in error.fix
    assert not (tmp_path / "exploded").exists()
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    assert "np.savez" in fails(tmp_path / "one.npz").why


def test_missing_columns_name_the_nearest(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.csv")
    error = fails(path, client="cleint")
    assert error.what == 'data.options.client = "cleint" is not a column of t.csv.'
    assert "age, pressure, client" in error.why and error.fix == 'data.options.client = "client"'
    assert fails(path, group="sizes").fix == 'data.options.group = "size"'
    assert fails(path, target="label").what == 'data.options.target = "label" is not a column of t.csv.'
    error = fails(path, features=["age", "presure"])
    assert error.what == 'data.options.features holds "presure", which is not a column of t.csv.'
    assert error.fix == 'data.options.features = ["pressure"]'
    assert 'data.options.target = "z"' in fails(write(table, tmp_path / "t.npz"), target="z").what


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("end", ["csv", "parquet", "npz"])
def test_features_that_are_not_finite(table: pd.DataFrame, tmp_path: Path, value: float, end: str) -> None:
    table.loc[[4, 9], "pressure"] = value
    error = fails(write(table, tmp_path / f"t.{end}"), **({"group": "size"} if end != "npz" else {}))
    column = 'column "pressure"' if end != "npz" else "x[:, 1]"
    assert f"has 2 values in {column}" in error.what
    assert "row 5 (the first record is row 1)" in error.why and "fill them in" in error.fix


def test_features_that_are_not_numbers(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.csv")
    error = fails(path, features=["age", "note"])
    assert error.what == 'column "note" is not numeric.' and '"text"' in error.why
    error = fails(path, features=["age", "y"])
    assert "also the client, target or group" in error.what
    assert error.fix == 'data.options.features = ["age"]'
    path = write(table[["client", "y", "note"]], tmp_path / "u.csv")
    assert "has no numeric columns to learn from" in fails(path).what
    assert "has no records" in fails(write(table[:0], tmp_path / "v.parquet")).what


@pytest.mark.parametrize("end", ["csv", "parquet"])
@pytest.mark.parametrize(("option", "column"), [("client", "client"), ("target", "note"), ("group", "size")])
def test_missing_names(table: pd.DataFrame, tmp_path: Path, option: str, column: str, end: str) -> None:
    table["note"] = np.where(table["age"] > 50, "old", "young")
    table.loc[[2, 3, 8], column] = None
    error = fails(write(table, tmp_path / f"t.{end}"), **{option: column})
    assert error.what == f'data.options.{option} = "{column}" has 3 values that are missing or infinite.'
    assert "row 3" in error.why and f'"{column}"' in error.fix


def test_targets_of_the_wrong_kind(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "t.csv")
    error = fails(path, target="pressure")
    assert error.what == 'data.options.task = "classification", but the target "pressure" holds fractions.'
    assert error.fix == 'data.options.task = "regression"'
    error = fails(path, target="note", task="regression")
    assert "is not numeric" in error.what and error.fix == 'data.options.task = "classification"'
    error = fails(path, target="note")
    assert error.what == 'data.options.target = "note" holds one class only, "text".'
    assert "nothing to learn" in error.why and "two values" in error.fix


def test_too_few_clients_or_records(table: pd.DataFrame, tmp_path: Path) -> None:
    error = fails(write(table, tmp_path / "t.csv"), client="note")
    assert error.what == 'data.options.client = "note" names one client only, "text".'
    assert "at least two" in error.why
    table["client"] = [f"client {row}" for row in range(len(table))]
    error = fails(write(table, tmp_path / "u.csv"))
    assert error.what == 'data.options.client = "client": every client has 1 record only.'
    assert "nobody could be tested" in error.why


def test_a_client_with_one_record_trains_on_it_and_is_tested_on_none(table: pd.DataFrame, tmp_path: Path) -> None:
    table.loc[0, "client"] = "zug"
    federation = load(write(table, tmp_path / "t.csv"))
    alone = federation.load(federation.names.index("zug"))
    assert (len(alone.train), len(alone.test)) == (1, 0)
    assert federation.size.sum() + sum(len(federation.load(i).test) for i in range(4)) == len(table)


def test_a_client_in_two_groups(table: pd.DataFrame, tmp_path: Path) -> None:
    table.loc[0, "size"] = "small"
    error = fails(write(table, tmp_path / "t.csv"), group="size")
    assert error.what == 'data.options.group = "size": client "bern" is in two groups.'
    assert '"small"' in error.why and '"large"' in error.why


def test_npz_arrays_that_do_not_fit(tmp_path: Path) -> None:
    good: dict[str, Any] = {"x": np.ones((4, 2)), "y": np.arange(4) % 2, "client": np.arange(4) // 2}
    for number, changed in enumerate(
        [{"x": np.ones(4)}, {"y": np.ones((4, 2))}, {"client": np.ones(3)}, {"x": np.full((4, 2), "a")}]
    ):
        path = tmp_path / f"{number}.npz"
        np.savez(path, **(good | changed))
        error = fails(path)
        assert "do not fit together" in error.what and "(records, *features)" in error.why
    np.savez(tmp_path / "good.npz", **good)
    assert "leave out" in fails(tmp_path / "good.npz", features=["a"]).fix
    assert load(tmp_path / "good.npz").clients == 2
    np.savez(tmp_path / "no.npz", y=good["y"], client=good["client"])
    assert "has no array called x" in fails(tmp_path / "no.npz").what
    np.savez(tmp_path / "none.npz", x=np.ones((0, 2)), y=np.ones(0), client=np.ones(0))
    assert "has no records" in fails(tmp_path / "none.npz").what


# ---- sensitive attributes --------------------------------------------------------------------------


def with_attributes(table: pd.DataFrame) -> pd.DataFrame:
    """Sex as text, and a numeric band; "NA" is a value here, as a name is."""
    random = np.random.default_rng(1)
    return table.assign(sex=random.choice(["NA", "f", "m"], len(table)), band=random.choice([10, 9, 200], len(table)))


@pytest.mark.parametrize("end", ["csv", "parquet", "npz"])
def test_every_test_record_keeps_its_attributes(table: pd.DataFrame, tmp_path: Path, end: str) -> None:
    """Found again by its pressure, which is different for each. Values are sorted; numbers as numbers are."""
    table = with_attributes(table)
    path = tmp_path / f"t.{end}"
    write(table, path)
    if end == "npz":
        arrays = dict(np.load(path)) | {"sex": table["sex"].to_numpy(str), "band": table["band"].to_numpy()}
        np.savez(path, **arrays)
    federation = load(path, sensitive=["sex", "band"])
    assert federation.attributes == {"sex": ("NA", "f", "m"), "band": ("9", "10", "200")}
    of = {np.float32(p): (s, str(b)) for p, s, b in zip(table["pressure"], table["sex"], table["band"], strict=True)}
    for client in range(federation.clients):
        data = federation.load(client)
        codes = zip(data.attributes["sex"], data.attributes["band"], strict=True)
        found = [(federation.attributes["sex"][s], federation.attributes["band"][b]) for s, b in codes]
        assert found == [of[np.float32(x)] for x in data.test.x[:, 1].tolist()]


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_attributes_are_no_features_unless_they_are_named(table: pd.DataFrame, tmp_path: Path, end: str) -> None:
    path = write(with_attributes(table), tmp_path / f"t.{end}")
    assert load(path).features == (3,)  # age, pressure, band
    assert load(path, sensitive=["band", "sex"]).features == (2,)
    assert load(path, sensitive=["band"], features=["age", "band"]).features == (2,)
    prepared = {"sex": {"kind": "category", "values": ["NA", "f", "m"]}}
    declared = load(path, sensitive=["sex", "band"], prepare=prepared)
    assert declared.features == (5,) and declared.attributes["sex"] == ("NA", "f", "m")
    named = load(path, sensitive=["band"], features=["age", "band"])
    for client in range(3):  # what it is judged by is what the model sees
        data = named.load(client)
        values = [float(named.attributes["band"][code]) for code in data.attributes["band"]]
        assert values == data.test.x[:, 1].tolist()


def test_attributes_change_neither_the_records_nor_who_is_tested(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(with_attributes(table).drop(columns="band"), tmp_path / "t.csv")
    plain, judged = load(path), load(path, sensitive=["sex"])
    assert plain.fingerprint == judged.fingerprint and not plain.load(0).attributes
    for client in range(3):
        assert rows_of(plain, client) == rows_of(judged, client)
    again = pickle.loads(pickle.dumps(judged)).load(1).attributes["sex"]
    assert again.tolist() == judged.load(1).attributes["sex"].tolist()


@pytest.mark.parametrize("end", ["csv", "parquet"])
@pytest.mark.parametrize("column", ["sex", "band"])
def test_missing_attributes_are_refused(table: pd.DataFrame, tmp_path: Path, end: str, column: str) -> None:
    table = with_attributes(table)
    table[column] = table[column].astype(object)
    table.loc[[6, 7], column] = None
    table[column] = table[column].convert_dtypes()
    error = fails(write(table, tmp_path / f"t.{end}"), sensitive=["sex", "band"], features=["age"])
    assert error.what == f'data.options.sensitive = "{column}" has 2 values that are missing or infinite.'
    assert "row 7" in error.why and f'"{column}"' in error.fix


def test_missing_attributes_of_an_npz_are_refused(tmp_path: Path) -> None:
    arrays = {"x": np.ones((4, 2)), "y": np.arange(4) % 2, "client": np.arange(4) // 2}
    np.savez(tmp_path / "t.npz", **arrays, band=np.array([1.0, np.nan, 1.0, 2.0]))
    assert 'data.options.sensitive = "band" has 1 values' in fails(tmp_path / "t.npz", sensitive=["band"]).what


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros(9), np.zeros((4, 2)), np.zeros(())])
def test_attributes_of_an_npz_must_fit_its_records(tmp_path: Path, wrong: np.ndarray) -> None:
    """Too many would be taken for those of other records without a word."""
    arrays = {"x": np.ones((4, 2)), "y": np.arange(4) % 2, "client": np.arange(4) // 2}
    np.savez(tmp_path / "t.npz", **arrays, band=wrong)
    error = fails(tmp_path / "t.npz", sensitive=["band"])
    assert "do not fit together" in error.what and f"band is {wrong.shape}" in error.why


@pytest.mark.parametrize("end", ["csv", "parquet", "npz"])
def test_one_client_may_hold_the_whole_file(table: pd.DataFrame, tmp_path: Path, end: str) -> None:
    """As each does in a deployment: nobody else is in its file."""
    path = write(table.assign(size="large"), tmp_path / f"clinic.{end}")
    federation = load(path, client="", **({} if end == "npz" else {"features": ["age", "pressure"]}))
    assert (federation.clients, federation.names) == (1, ("clinic",))
    train, test = rows_of(federation, 0)
    assert len(train | test) == 60 and not train & test


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_declared_labels_number_the_classes_alike_in_every_file(table: pd.DataFrame, tmp_path: Path, end: str) -> None:
    """The second file lacks the class 10: by what is found there, 20 would become class 1."""
    options: dict[str, Any] = {"client": "", "features": ["age"], "test_fraction": 0.1}
    few = table[table["y"] != 10]
    for rows in (table, few):
        path = write(rows, tmp_path / f"some.{end}")
        for labels in ([0, 10, 20], ["0", "10", "20"]):
            federation = load(path, labels=labels, **options)
            data = federation.load(0)
            y = torch.cat([data.train.y, data.test.y])
            expected = sorted(int(value) // 10 for value in rows["y"])
            assert federation.classes == 3 and sorted(y.tolist()) == expected
    turned = load(path, labels=[20, 10, 0], **options).load(0)
    assert sorted(torch.cat([turned.train.y, turned.test.y]).tolist()) == sorted(2 - value for value in expected)


def test_labels_that_do_not_fit(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(table, tmp_path / "visits.csv")
    assert 'also holds "20"' in str(fails(path, features=["age"], labels=[0, 10]))
    assert "twice" in str(fails(path, features=["age"], labels=[0, 10, 20, 10]))
    assert "labels" in str(fails(path, features=["age"], labels=[0]))


# ---- several target columns ------------------------------------------------------------------------


def with_classes(table: pd.DataFrame) -> pd.DataFrame:
    """As whole numbers, truth values and fractions; each a class that a record has or has not."""
    random = np.random.default_rng(5)
    a, b, c = random.integers(0, 2, (3, 60))
    return table.assign(a=a, b=b.astype(bool), c=c.astype(float))


@pytest.mark.parametrize("end", ["csv", "parquet", "npz"])
def test_several_target_columns_are_classes_that_a_record_may_have_at_once(
    table: pd.DataFrame, tmp_path: Path, end: str
) -> None:
    table, path = with_classes(table), tmp_path / f"t.{end}"
    if end == "npz":
        columns = {name: table[name].to_numpy() for name in ("a", "b", "c")}
        np.savez(path, x=table[["age", "pressure"]].to_numpy(), client=table["client"].to_numpy(str), **columns)
    else:
        write(table, path)
    found = load(path, target=["a", "b", "c"], **({} if end == "npz" else {"features": ["age", "pressure"]}))
    assert found.several and found.classes == 3 and found.features == (2,)
    expected = {
        (x, y): row for x, y, *row in table[["age", "pressure", "a", "b", "c"]].astype("float32").to_numpy().tolist()
    }
    for client in range(found.clients):
        for part in (found.load(client).train, found.load(client).test):
            assert all(expected[tuple(x)] == y for x, y in zip(part.x.tolist(), part.y.float().tolist(), strict=True))


def test_several_targets_are_no_features(table: pd.DataFrame, tmp_path: Path) -> None:
    path = write(with_classes(table), tmp_path / "t.csv")
    assert load(path, target=["a", "b", "c"]).features == (3,)  # age, pressure, y
    assert "also the client, target or group" in fails(path, target=["a", "b"], features=["age", "b"]).what


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"target": ["a", "y"]}, 'target holds "y", a column with the value "10"'),
        ({"target": ["a", "note"]}, 'target holds "note", a column with the value "text"'),
        ({"target": ["a", "holes"]}, 'target = "holes" has 1 values that are missing'),
        ({"target": ["a", "nothing"]}, 'target = "nothing" is not a column'),
        ({"target": ["a", "a"]}, 'names the column "a" twice'),
        ({"target": ["a", "client"]}, 'names the column "client" twice'),
        ({"target": ["a"]}, 'target = ["a"] is not valid'),
        ({"target": ["a", "b"], "labels": [0, 1]}, "labels does not go with several columns"),
        ({"target": ["a", "b"], "task": "regression"}, "task does not go with several columns"),
    ],
)
def test_several_targets_that_are_not_0_and_1(
    table: pd.DataFrame, tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    table = with_classes(table)
    path = write(table.assign(holes=table["c"].where(table.index != 7)), tmp_path / "t.csv")
    assert what in fails(path, **({"features": ["age"]} | options)).what
