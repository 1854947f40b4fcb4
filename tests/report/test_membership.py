"""What membership inference has found, on the page: from files written by hand, and from an attack itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairveil.attacks.membership import attack_members
from fairveil.config import make_config
from fairveil.plan import make_plan
from fairveil.reading import Run, load_run
from fairveil.report.membership import membership_groups, membership_roc, membership_table

Reader = Callable[..., Run]


def about(value: float | None) -> dict[str, float] | None:
    return None if value is None else {"value": value, "low": value - 0.02, "high": value + 0.02}


def rates(name: str | None, auc: float | None, **others: Any) -> dict[str, Any]:
    """What the file says of a group, or of all records (None)."""
    plain = {
        "name": name, "clients": 2, "records": 300, "inside": 2500, "outside": 2600, "auc": about(auc),
        "tpr": {"0.01": about(0.05), "0.001": about(0.021)}, "fpr": {"0.01": 0.0123, "0.001": 0.0011},
        "difference": None if name is None or auc is None else about(auc - 0.6),
    }  # fmt: skip
    return plain | others


def found(groups: dict[str, float | None], **others: Any) -> dict[str, Any]:
    """A file: two attacks, the second of which finds 0.1 more."""
    attacks = {
        attack: {
            "everyone": rates(None, 0.55 + more, outside=10_000),
            "groups": [rates(name, None if auc is None else auc + more) for name, auc in groups.items()],
            "roc": {"fpr": [0.0, 0.0001, 0.01, 1.0], "tpr": [0.0, 0.002 + more / 10, 0.05 + more, 1.0]},
        }
        for attack, more in (("loss threshold", 0.0), ("likelihood ratio", 0.1))
    }
    promise = {
        "epsilon": 7.9952, "delta": 1e-3, "steps": 1, "auc": 0.95, "tpr": {"0.01": 0.383, "0.001": 0.149},
        "roc": {"fpr": [1e-6, 0.01, 1.0], "tpr": [0.001, 0.383, 1.0]},
    }  # fmt: skip
    plain = {
        "models": 17, "clients": 10, "records": 1428, "spared": 10, "seen": "the released model", "holders": 1,
        "promise": promise, "unbounded": "", "attacks": attacks,
    }  # fmt: skip
    return plain | others


@pytest.fixture
def read(written: Callable[..., Any], tmp_path: Path) -> Reader:
    """A run with what an attack is said to have found; None: it was not attacked."""

    def read_run(values: dict[str, Any] | None) -> Run:
        folder = written(tmp_path / "run", [("a", "north"), ("b", "south")], rounds=1).write()
        if values is not None:
            (folder / "attacks").mkdir()
            (folder / "attacks" / "membership.json").write_text(json.dumps(values, allow_nan=False))
        return load_run(folder)

    return read_run


def test_a_run_that_was_not_attacked_shows_nothing(read: Reader) -> None:
    run = read(None)
    assert membership_roc(run) is None and membership_groups(run) is None and membership_table(run) is None


def test_the_curves_are_those_of_the_file(read: Reader) -> None:
    values = found({"north": 0.6, "south": 0.5})
    chart = membership_roc(read(values))
    assert chart is not None
    names = ["loss threshold", "likelihood ratio", "guarantee allows"]
    assert list(dict.fromkeys(chart.data["attack"])) == names
    ours = chart.data[chart.data["attack"] == "likelihood ratio"]
    assert {key: ours[key].tolist() for key in ("fpr", "tpr")} == values["attacks"]["likelihood ratio"]["roc"]
    (axes,) = chart.figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == pytest.approx((1e-4, 1)) == axes.get_ylim()  # one of 10,000 pairs outside
    assert [text.get_text() for text in chart.figure.legends[0].get_texts()] == [*names, "guessing"]
    assert "n = 1,428 training records of 10 clients, 17 rehearsals" in chart.caption
    assert "epsilon 7.996 at delta 0.001" in chart.caption and "38.3% at 1% and 14.9% at 0.1%" in chart.caption
    assert len(chart.marks) == 3 + 3 + 2 == len(chart.places())  # what is off the axes cannot be pointed at
    assert chart.marks[1][3] == "loss threshold: 5% of the members, at 1% of the others"
    assert chart.svg().startswith("<svg") and len(chart.csv().splitlines()) == 1 + 4 + 4 + 3


def test_a_run_without_a_bound_says_why(read: Reader) -> None:
    run = read(found({"north": 0.6, "south": 0.5}, promise=None, unbounded="the run promises nothing"))
    chart, table = membership_roc(run), membership_table(run)
    assert chart is not None and table is not None
    assert "guarantee allows" not in set(chart.data["attack"]) and "guarantee allows" not in str(table.rows)
    assert "No bound: the run promises nothing." in chart.caption and "No bound" in table.caption


def test_groups_are_in_the_order_of_what_is_found(read: Reader) -> None:
    chart = membership_groups(read(found({"north": 0.52, "south": 0.61, "east": 0.57})))
    assert chart is not None
    (axes,) = chart.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["all records", "south", "east", "north"] and list(axes.get_yticks()) == [0, -1, -2, -3]
    assert len(chart.data) == len(chart.marks) == 2 * 4
    ours = chart.data[chart.data["attack"] == "likelihood ratio"].set_index("group")
    assert ours["auc"].round(9).to_dict() == {"all records": 0.65, "south": 0.71, "east": 0.67, "north": 0.62}
    assert ours.loc["south", ["low", "high"]].tolist() == pytest.approx([0.69, 0.73])
    of_south = [mark for mark in chart.marks if mark[3].startswith("south, likelihood ratio: 0.710 (0.690 to 0.730)")]
    assert [mark[1:3] for mark in of_south] == [(pytest.approx(0.71), pytest.approx(-1.11))]
    assert "n = 300 records of 2 clients" in of_south[0][3]


def test_of_many_groups_the_most_exposed_are_drawn(read: Reader) -> None:
    chart = membership_groups(read(found({f"group {k}": 0.5 + 0.01 * k for k in range(30)})))
    assert chart is not None and "The 12 most exposed of 30 groups." in chart.caption
    assert set(chart.data["group"]) == {"all records", *(f"group {k}" for k in range(18, 30))}


def test_the_table_holds_all_that_was_found(read: Reader) -> None:
    table = membership_table(read(found({"north": 0.6, "south": 0.5})))
    assert table is not None
    rows = [[cell.text for cell in row] for row in table.rows]
    assert all(len(row) == len(table.columns) for row in rows)
    assert [row[:2] for row in rows] == [
        ["loss threshold", "all records"], ["loss threshold", "north"], ["loss threshold", "south"],
        ["likelihood ratio", "all records"], ["likelihood ratio", "north"], ["likelihood ratio", "south"],
        ["guarantee allows", "all records"],
    ]  # fmt: skip
    assert rows[4][2:] == [
        "2", "300", "0.700", "0.680 to 0.720", "+0.100 (+0.080 to +0.120)", "5.00%", "3.00% to 7.00%", "1.23%",
        "2.10%", "0.10% to 4.10%",
    ]  # fmt: skip
    assert rows[6][4] == "0.950" and rows[6][7] == "38.30%" and rows[6][10] == "14.90%" and rows[6][2] == ""
    assert [numeric for _, numeric in table.headings] == [False, False, *[True] * 10]
    assert "Seen: the released model." in table.caption and "10 more records were always in" in table.caption
    assert "one threshold for all groups" in table.caption


def test_what_is_not_known_is_left_empty(read: Reader) -> None:
    few = found({"north": 0.6, "south": None})
    for attack in few["attacks"].values():
        for each in (attack["everyone"], *attack["groups"]):
            each["tpr"] = each["fpr"] = {"0.01": None, "0.001": None}
        attack["groups"][0]["auc"] |= {"low": None, "high": None}  # a single record
    run = read(few)
    table = membership_table(run)
    assert table is not None
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows[1][4:] == ["0.600", "", "+0.000 (-0.020 to +0.020)", "", "", "", "", ""]
    assert rows[2][4:] == [""] * 8
    assert membership_groups(run) is None  # one group has something to show
    few["attacks"]["loss threshold"]["everyone"]["outside"] = 1
    (run.folder / "attacks" / "membership.json").write_text(json.dumps(few))
    assert membership_roc(run) is None


def test_one_group_is_all_there_is(read: Reader) -> None:
    run = read(found({"all": 0.55}))
    table = membership_table(run)
    assert membership_groups(run) is None and table is not None
    assert [row[1].text for row in table.rows] == ["all records"] * 3


def test_what_else_is_to_be_known_is_said(read: Reader) -> None:
    values = found({"north": 0.6}, holders=3, spared=0)
    values["promise"]["steps"] = 2
    table = membership_table(read(values))
    assert table is not None and "always in" not in table.caption
    assert "Up to 3 clients hold one record" in table.caption and "for a client with all its records" in table.caption


def test_names_are_texts(read: Reader) -> None:
    names = {"$a_b$": 0.6, "<b>x</b>": 0.55, "": 0.5, "_hidden": 0.5, "all records": 0.5, "n" * 60: 0.52}
    run = read(found(dict(names)))
    chart = membership_groups(run)
    assert chart is not None and len(chart.data) == 2 * (1 + len(names)) == len(chart.marks)
    svg = chart.svg()
    assert "$a_b$" in svg and "<b>" not in svg and "&lt;b&gt;" in svg and "n" * 60 not in svg
    (axes,) = chart.figure.axes
    assert len(axes.get_yticks()) == 1 + len(names)  # a group that is called so is a row of its own


def test_what_an_attack_writes_can_be_read(read: Reader) -> None:
    values = {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 1, "batch_size": 64},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }
    attacked = attack_members(make_plan(make_config(values)), shadows=4)
    run = read(attacked.to_json())
    roc, groups, table = membership_roc(run), membership_groups(run), membership_table(run)
    assert roc is not None and groups is not None and table is not None
    ours = groups.data.set_index(["attack", "group"])["auc"]
    for name, exposure in attacked.found.items():
        assert ours[name, "all records"] == exposure.everyone.auc.value
        assert [ours[name, g.name] for g in exposure.groups] == [g.auc.value for g in exposure.groups]
    assert attacked.promise is not None
    at_one = roc.data[(roc.data["attack"] == "guarantee allows")]
    assert np.interp(0.01, at_one["fpr"], at_one["tpr"]) == pytest.approx(attacked.promise.most(0.01), rel=0.02)
