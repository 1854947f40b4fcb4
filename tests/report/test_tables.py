"""The tables of the report: by hand, on run folders written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from fairveil.reading import Run
from fairveil.report.page import Table
from fairveil.report.tables import Judged, attribute_tables, client_table, cost_tables, figure_table, group_table
from fairveil.store import Score


def scored(values: Sequence[float | None], *, n: int = 10, row: Sequence[int | None] | int | None = 0) -> list[Score]:
    """Accuracies of the served models by client, in one round."""
    rows = row if isinstance(row, Sequence) else [row] * len(values)
    return [
        Score(1, client, "test", "served", "accuracy", value, rows[client], n)
        for client, value in enumerate(values)
        if value is not None
    ]


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def judged(run: Run) -> Judged:
    found = Judged.of(run)
    assert found is not None
    return found


# ---- groups and clients ----------------------------------------------------------------------------


def test_groups_by_hand(handmade: Callable[..., Run]) -> None:
    """a: (.5 + .7)/2, two clients with ten records each; b: .2; client 3 has no tests."""
    run = handmade(["a", "a", "b", "b"], scored([0.5, 0.7, 0.2, None]))
    rows = texts(group_table(judged(run)))
    assert [[row[i] for i in (0, 1, 2, 3, 5)] for row in rows] == [
        ["a", "2", "20", "60.0%", "50.0%"],
        ["b", "1", "10", "20.0%", "20.0%"],
    ]
    assert rows[0][4] == "50.0% to 70.0%" and rows[1][4] == ""  # of a single client nothing is resampled


def test_a_group_whose_clients_are_not_scored_is_left_out(handmade: Callable[..., Run]) -> None:
    run = handmade(["a", "a", "none"], scored([0.5, 0.7, None]))
    assert [row[0] for row in texts(group_table(judged(run)))] == ["a"]
    figures = {row[0]: row[1] for row in texts(figure_table(judged(run)))}
    assert figures["mean"] == "0.6000" and not any("groups" in name for name in figures)  # one group has no gap
    assert [row[0] for row in texts(client_table(run, judged(run)))] == ["client 0", "client 1"]


def test_common_test_records_are_counted_once(handmade: Callable[..., Run]) -> None:
    """Three clients of a group under one model have one score on the same 40 records: these are redrawn."""
    run = handmade(["a"] * 3 + ["b"], scored([0.5, 0.5, 0.5, 0.25], n=40), facts={"common_tests": True})
    table = group_table(judged(run))
    assert [row[2] for row in texts(table)] == ["40", "40"] and "over test records" in table.caption
    low, high = (float(part.rstrip("%")) for part in texts(table)[0][4].split(" to "))
    assert (low, high) == pytest.approx((34.5, 65.5), abs=2.6)  # 50% plus and minus 1.96 sqrt(.25/40); steps of 2.5


@pytest.mark.parametrize("common", [True, False])
def test_models_that_clients_keep_to_themselves_share_no_score(handmade: Callable[..., Run], common: bool) -> None:
    """Tested on the same records, but each by a model of its own: no row says which."""
    run = handmade(["a", "a", "b"], scored([0.5, 0.7, 0.2], row=None), facts={"common_tests": common})
    assert [row[3] for row in texts(group_table(judged(run)))] == ["60.0%", "20.0%"]
    assert judged(run).sample.shared is None


def test_before_the_first_evaluation_nothing_is_judged(handmade: Callable[..., Run]) -> None:
    assert Judged.of(handmade(["a"])) is None
    assert Judged.of(handmade(["a"], scored([math.nan]))) is None


# ---- attributes ------------------------------------------------------------------------------------

CONFUSION = [  # client, attribute, value, actual, predicted, records
    (0, "", "", 1, 1, 6), (0, "", "", 0, 1, 2), (0, "", "", 0, 0, 2),
    (1, "", "", 1, 0, 3), (1, "", "", 0, 0, 7),
    (0, "sex", "f", 1, 1, 4), (0, "sex", "f", 0, 0, 2), (0, "sex", "m", 1, 1, 2), (0, "sex", "m", 0, 1, 2),
    (1, "sex", "f", 0, 0, 5), (1, "sex", "m", 1, 0, 3), (1, "sex", "m", 0, 0, 2),
]  # fmt: skip


def test_rates_by_group_and_by_attribute(handmade: Callable[..., Run]) -> None:
    """Client 0, group a: 8 of 10 right, 8 of 10 taken for class 1, 6 of 6, 2 of 4. Client 1, group b: 7 of 10, none.
    Women: 11 of 11 right, 4 taken, 4 of 4, 0 of 7. Men: 4 of 9 right, 4 taken, 2 of 5, 2 of 4."""
    facts = {"attributes": {"sex": ["f", "m", "other"]}}
    run = handmade(["a", "b"], scored([0.8, 0.7]), facts=facts, confusion=CONFUSION)
    groups, _, sexes, apart = attribute_tables(run)
    assert texts(groups) == [
        ["a", "10", "0.800", "0.800", "1.000", "0.500"],
        ["b", "10", "0.700", "0.000", "0.000", "0.000"],
    ]
    assert texts(sexes) == [
        ["f", "11", "1.000", "0.364", "1.000", "0.000"],
        ["m", "9", "0.444", "0.444", "0.400", "0.500"],
    ]
    found = {row[0]: row[1] for row in texts(apart)}
    assert found == {
        "accuracy": "0.556", "demographic parity": "0.081", "equalised odds": "0.600", "equal opportunity": "0.600",
    }  # fmt: skip


def test_values_come_in_the_order_of_the_data(handmade: Callable[..., Run]) -> None:
    confusion = [(0, "age", age, 1, 1, 2) for age in ("45 to 54", "65 and above", "below 45")]
    facts = {"attributes": {"age": ["below 45", "45 to 54", "55 to 64", "65 and above"]}}
    rates, _ = attribute_tables(handmade(["a"], scored([1.0]), facts=facts, confusion=confusion))
    assert [row[0] for row in texts(rates)] == ["below 45", "45 to 54", "65 and above"]


def test_an_interval_without_width_is_not_shown(handmade: Callable[..., Run]) -> None:
    """Each group is one client, so records are redrawn. All of class 1 are found at a, none at b, however often they
    are redrawn: an interval of that would look like certainty."""
    run = handmade(["a", "b"], scored([0.8, 0.7]), confusion=CONFUSION[:5])
    _, apart = attribute_tables(run)
    shown = {row[0]: row[2] for row in texts(apart)}
    assert shown["accuracy"] and not shown["equal opportunity"]
    assert {row[3] for row in texts(apart)} == {"20 test records"}


def test_of_more_classes_there_is_no_advantage_unless_it_is_named(handmade: Callable[..., Run]) -> None:
    """62 classes, and one of them only: rates of no record are left empty, without a warning."""
    confusion = [(0, "", "", 7, 7, 5), (1, "", "", 7, 61, 5)]
    assert attribute_tables(handmade(["a", "b"], scored([1.0, 0.0]), facts={"classes": 62}, confusion=confusion)) == []
    run = handmade(["a", "b"], scored([1.0, 0.0]), facts={"classes": 62}, confusion=confusion, fairness={"positive": 7})
    rates, apart = attribute_tables(run)
    assert texts(rates) == [["a", "5", "1.000", "1.000", "1.000", ""], ["b", "5", "0.000", "0.000", "0.000", ""]]
    assert {row[0]: row[1] for row in texts(apart)}["equalised odds"] == ""  # of false positives nothing is known


# ---- the cost of privacy ---------------------------------------------------------------------------


def test_the_cost_of_privacy_by_hand(handmade: Callable[..., Run]) -> None:
    """Accuracies cost .1, .4 and .05, so F_acc = .4 - .05 (Malekmohammadi et al. 2024); client 3 has no tests and does
    not count. Losses over training records: .6, .1, .4, and .3 for client 3, so F_loss = .6 - .1."""
    served = {"accuracy": [0.8, 0.5, 0.9], "loss": [1.0, 0.7, 0.6, 0.9]}
    reference = {"accuracy": [0.9, 0.9, 0.95], "loss": [0.4, 0.6, 0.2, 0.6]}
    rows = [
        Score(2, client, "test" if metric == "accuracy" else "train", model, metric, value, 0, 10)
        for model, by_metric in (("served", served), ("reference", reference))
        for metric, values in by_metric.items()
        for client, value in enumerate(values)
    ]
    rows += [Score(1, client, "test", "served", "accuracy", 0.0, 0, 10) for client in range(3)]  # an earlier round
    run = handmade(["a", "a", "b", "b"], rows)
    (table,) = cost_tables(run)
    assert "F_acc = 0.350 (n = 3), F_loss = 0.500 (n = 4)" in table.caption
    assert texts(table) == [
        ["a", "accuracy, test records", "0.250"], ["b", "accuracy, test records", "0.050"],
        ["a", "loss, training records", "0.350"], ["b", "loss, training records", "0.350"],
    ]  # fmt: skip


def test_without_a_reference_there_is_no_cost(handmade: Callable[..., Run]) -> None:
    run = handmade(["a", "b"], scored([0.5, 0.6]))
    assert cost_tables(run) == []
