"""Figures over clients and over values of an attribute: by hand, by enumeration, and against fairlearn."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from random import Random

import fairlearn.metrics as fl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fairveil.errors import UserError
from fairveil.fairness import (
    group_differences,
    group_frame,
    histogram,
    jain_index,
    privacy_cost,
    spread_of,
    summarise,
)
from fairveil.intervals import client_weights

# ---- clients ----


def test_accuracy_by_hand() -> None:
    values = np.array([0.5, 0.9, 0.7, 0.8])
    found = summarise(values, np.array([0, 1, 0, 2]), ["a", "b", "c", "empty"], higher_is_better=True)
    assert found.by_group == pytest.approx({"a": 0.6, "b": 0.9, "c": 0.8})
    assert found.by_group_clients == {"a": 2, "b": 1, "c": 1}
    assert (found.worst_group, found.clients) == ("a", 4)
    assert found.mean == pytest.approx(0.725)
    assert (found.worst, found.best) == (0.5, 0.9)
    assert found.disparity == pytest.approx(0.4) and found.gap == pytest.approx(0.3)
    # deviations -.225, .175, -.025, .075: squares .050625 + .030625 + .000625 + .005625 = .0875, over 4
    assert found.variance == pytest.approx(0.021875) and found.deviation == pytest.approx(math.sqrt(0.021875))
    # sum 2.9, squares .25 + .81 + .49 + .64 = 2.19: 8.41/(4 * 2.19)
    assert found.jain == pytest.approx(8.41 / 8.76)
    assert (found.worst_10_percent, found.best_10_percent) == (0.5, 0.9)  # a tenth of 4 clients is one
    assert found.sampling_variance_removed is None  # the sizes of the tests are not known


def test_tenths_of_twenty_clients() -> None:
    values = np.arange(20) / 20  # a tenth is two clients: (0 + .05)/2 and (.95 + .9)/2
    found = summarise(values, np.zeros(20, int), ["all"], higher_is_better=True)
    assert found.worst_10_percent == pytest.approx(0.025) and found.best_10_percent == pytest.approx(0.925)
    assert found.gap == 0  # of one group


def test_for_a_loss_the_worst_is_the_highest() -> None:
    values, group, tests = np.array([1.0, 3.0]), np.array([0, 1]), np.array([9, 9])
    found = summarise(values, group, ["a", "b"], higher_is_better=False, tests=tests)
    assert (found.worst, found.best, found.worst_group, found.worst_10_percent) == (3.0, 1.0, "b", 3.0)
    assert (found.gap, found.jain, found.sampling_variance_removed) == (2.0, None, None)


scores = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(2, 50)), min_size=1, max_size=30)


@given(scores, st.booleans(), st.randoms())
def test_the_order_of_clients_changes_nothing(
    clients: list[tuple[float, int, int]], higher: bool, random: Random
) -> None:
    names, found = ["a", "b", "c", "d"], []
    for _ in range(2):
        values, group, tests = (np.array(column) for column in zip(*clients, strict=True))
        found.append(asdict(summarise(values, group, names, higher_is_better=higher, tests=tests)))
        random.shuffle(clients)
    first, second = found
    by_group = first.pop("by_group")
    assert second.pop("by_group") == pytest.approx(by_group, abs=1e-12)
    worst = by_group[first.pop("worst_group")], by_group[second.pop("worst_group")]  # of equals it may be either
    assert worst[0] == pytest.approx(worst[1], abs=1e-12)
    assert first.pop("by_group_clients") == second.pop("by_group_clients")
    assert first == pytest.approx(second, abs=1e-12)
    assert first["gap"] >= 0 and first["deviation"] ** 2 == pytest.approx(first["variance"])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(1e-3, 1e3))
def test_jain_lies_between_one_of_n_and_one(values: list[float], factor: float) -> None:
    array = np.array(values)
    found = jain_index(array)
    assert 1 / len(values) - 1e-12 <= found <= 1
    if array.max() > 1e-300:
        assert jain_index(array * factor) == pytest.approx(found)  # no unit


def test_jain_at_its_ends() -> None:
    assert jain_index(np.full(7, 0.3)) == pytest.approx(1) and jain_index(np.eye(5)[2]) == pytest.approx(1 / 5)
    assert jain_index(np.zeros(3)) == 1  # all are equal


def test_the_variance_without_sampling_by_hand() -> None:
    """a = .5 on 11 records, .9 on 10: variance .04; (.25/10 + .09/9)/2 = .0175, of which a half is in the variance."""
    values, tests = np.array([0.5, 0.9]), np.array([11, 10])
    found = summarise(values, np.zeros(2, int), ["all"], higher_is_better=True, tests=tests)
    assert found.sampling_variance_removed == pytest.approx(0.04 - 0.00875)
    equal = spread_of(np.array([0.5, 0.5]), np.array([2, 2]))  # (.25 + .25)/2/2 = .125, and nothing to take it from
    assert equal == pytest.approx(-0.125)
    assert spread_of(values, np.array([11, 1])) is None  # one record says nothing about how much it varies


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(2, 4)), min_size=1, max_size=3))
def test_the_variance_without_sampling_has_no_bias(clients: list[tuple[float, int]]) -> None:
    """The expectation over all outcomes of all tests, each with its binomial probability, is the true variance."""
    true, tests = np.array([p for p, _ in clients]), np.array([n for _, n in clients])
    expected = 0.0
    for right in itertools.product(*(range(n + 1) for n in tests)):
        found = spread_of(np.array(right) / tests, tests)
        assert found is not None
        outcome = zip(right, tests.tolist(), true.tolist(), strict=True)
        expected += found * math.prod(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k, n, p in outcome)
    assert expected == pytest.approx(float(true.var()), abs=1e-12)


def test_histograms() -> None:
    counts, edges = histogram(np.array([0.0, 0.02, 0.5, 1.0, 1.0]))
    assert len(counts) == 40 and (edges[0], edges[-1]) == (0, 1)
    assert (counts[0], counts[20], counts[39], counts.sum()) == (2, 1, 2, 5)  # bins of 0.025; the last one is closed
    counts, edges = histogram(np.array([2.0, 3.0, 6.0]), bins=4, higher_is_better=False)
    assert counts.tolist() == [1, 1, 0, 1] and edges.tolist() == [2, 3, 4, 5, 6]


# ---- values of an attribute ----


def table(*rows: tuple[int, str, int, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["client", "value", "actual", "predicted", "n"])


SMALL = table(
    (0, "f", 1, 1, 6), (0, "f", 1, 0, 2), (0, "f", 0, 0, 3), (0, "f", 0, 1, 1),
    (0, "m", 1, 1, 5), (0, "m", 0, 0, 5),
    (1, "m", 1, 0, 4), (1, "m", 0, 1, 2), (1, "m", 2, 2, 4),
)  # fmt: skip


def test_rates_by_hand() -> None:
    """f: 12 records, 9 right, 7 taken for class 1, 6 of 8 of class 1, 1 of 4 others.
    m: 20 records, 14 right, 7 taken for class 1, 5 of 9 of class 1, 2 of 11 others."""
    found = group_frame(SMALL, 1)
    names = ["records", "accuracy", "selection rate", "true positive rate", "false positive rate"]
    assert list(found.by_group.columns) == names
    assert found.by_group.loc["f"].tolist() == pytest.approx([12, 9 / 12, 7 / 12, 6 / 8, 1 / 4])
    assert found.by_group.loc["m"].tolist() == pytest.approx([20, 14 / 20, 7 / 20, 5 / 9, 2 / 11])
    assert found.overall.tolist() == pytest.approx([32, 23 / 32, 14 / 32, 11 / 17, 3 / 15])
    apart = group_differences(SMALL, 1)
    assert {name: interval.value for name, interval in apart.items()} == pytest.approx(
        {
            "accuracy": 0.05,
            "demographic parity": 14 / 60,
            "equalised odds": 6 / 8 - 5 / 9,  # more than 1/4 - 2/11
            "equal opportunity": 6 / 8 - 5 / 9,
        }
    )
    assert {(interval.n, interval.unit) for interval in apart.values()} == {(32, "test records")}  # client 1 has no f


def test_without_a_positive_class_there_is_the_accuracy() -> None:
    assert list(group_frame(SMALL, None).by_group.columns) == ["records", "accuracy"]
    assert list(group_differences(SMALL, None)) == ["accuracy"]


def by_fairlearn(confusion: pd.DataFrame, positive: int, values: set[str]) -> dict[str, float]:
    """All differences, by fairlearn's functions on one row for each record; NaN where a rate is of no record."""
    records = confusion.loc[confusion.index.repeat(confusion["n"])]
    actual, predicted = (records["actual"] == positive).astype(int), (records["predicted"] == positive).astype(int)
    of = {"sensitive_features": records["value"]}
    right = (records["actual"] == records["predicted"]).groupby(records["value"]).mean()
    found = {
        "accuracy": right.max() - right.min(),
        "demographic parity": fl.demographic_parity_difference(actual, predicted, **of),
        "equalised odds": fl.equalized_odds_difference(actual, predicted, **of),
        "equal opportunity": fl.equal_opportunity_difference(actual, predicted, **of),
    }
    some = set(records["value"]) == values and len(values) > 1
    positives, negatives = (set(records["value"][actual == kind]) == values for kind in (1, 0))
    defined = {"equalised odds": some and positives and negatives, "equal opportunity": some and positives}
    return {name: value if defined.get(name, some) else math.nan for name, value in found.items()}


cells = st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 2))


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(cells, st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 2))
def test_differences_are_those_of_fairlearn(counts: dict[tuple[int, str, int, int], int], positive: int) -> None:
    confusion = table(*((*cell, n) for cell, n in counts.items()))
    if not confusion["n"].any():
        return
    expected = by_fairlearn(confusion, positive, set(confusion["value"][confusion["n"] > 0]))
    found = group_differences(confusion, positive, draws=10)
    assert {name: interval.value for name, interval in found.items()} == pytest.approx(expected, nan_ok=True)


def random_confusion(clients: int, seed: int) -> pd.DataFrame:
    """Few records a client, so that some replicates miss a rate."""
    random = np.random.default_rng(seed)
    kinds = itertools.product(range(clients), ["a", "b", "c"], range(3), range(3))
    return table(*((*kind, int(n)) for kind, n in zip(kinds, random.poisson(0.5, clients * 27), strict=True)))


def test_every_replicate_is_that_of_fairlearn() -> None:
    """One draw makes low and high that one replicate: each client's records as often as the client was drawn."""
    confusion, undefined = random_confusion(5, 3), 0
    values = set(confusion["value"][confusion["n"] > 0])
    for seed in range(25):
        (weights,) = next(client_weights(5, 1, np.random.default_rng(seed))).astype(int)
        expected = by_fairlearn(confusion.assign(n=confusion["n"] * weights[confusion["client"]]), 1, values)
        found = group_differences(confusion, 1, draws=1, seed=seed)
        assert {name: i.low for name, i in found.items()} == pytest.approx(expected, nan_ok=True)
        assert {name: i.draws for name, i in found.items()} == {n: int(v == v) for n, v in expected.items()}
        undefined += sum(math.isnan(value) for value in expected.values())
    assert undefined  # it happens here


@pytest.mark.statistical
def test_replicates_that_are_not_defined_are_left_out() -> None:
    """Clients 0 and 1 have the value "b", client 2 has not: among three drawn it is missing in one of 27 draws.

    4,000 draws, so 3,852 with a deviation of sqrt(4000 * 26)/27 = 12: allowed 62. False alarms: 3e-7.
    """
    with_b = [(c, *row) for c in (0, 1) for row in (("a", 1, 1, 5), ("b", 1, 0, 5), ("b", 0, 0, 5))]
    found = group_differences(table(*with_b, (2, "a", 0, 0, 9)), 1, draws=4000)["accuracy"]
    assert found.draws == pytest.approx(3852, abs=62)
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)  # a is always right, b half the time


@pytest.mark.statistical
def test_where_a_value_has_one_client_its_records_are_redrawn() -> None:
    """Two sites, right in 60 of 100 and 180 of 200: the difference of two binomial shares, so its deviation is
    sqrt(.6 * .4/100 + .9 * .1/200) = .0534. Quantiles of 10,000 draws are within .15 of it. False alarms: below 1e-5.
    """
    confusion = table((0, "x", 1, 1, 60), (0, "x", 1, 0, 40), (1, "y", 0, 0, 180), (1, "y", 0, 1, 20))
    found = group_differences(confusion, None, draws=10_000)["accuracy"]
    assert (found.value, found.n, found.unit) == (pytest.approx(0.3), 300, "test records")
    assert found.low == pytest.approx(0.3 - 1.96 * 0.0534, abs=0.15 * 0.0534)
    assert found.high == pytest.approx(0.3 + 1.96 * 0.0534, abs=0.15 * 0.0534)


@pytest.mark.statistical
def test_the_interval_of_a_difference_is_the_normal_one() -> None:
    """100 clients, 20 records of either value each. The difference is a mean over clients, so its interval is the
    normal one within 0.15 standard errors (quantiles of 10,000 draws: 0.03). False alarms: below 1e-5."""
    random = np.random.default_rng(8)
    right = {value: random.binomial(20, rate, 100) for value, rate in (("a", 0.9), ("b", 0.7))}
    rows = [
        (client, value, 1, int(hit), int(n if hit else 20 - n))
        for value, counts in right.items() for client, n in enumerate(counts) for hit in (True, False)
    ]  # fmt: skip
    found = group_differences(table(*rows), 1, draws=10_000)["accuracy"]
    apart = (right["a"] - right["b"]) / 20
    error = apart.std() / 10
    expected = apart.mean() + stats.norm.ppf([0.025, 0.975]) * error
    assert found.value == pytest.approx(apart.mean())
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.15 * error)


@pytest.mark.parametrize(
    ("missing", "undefined"),
    [
        (table((1, "b", 0, 0, 3), (1, "b", 0, 1, 2)), {"equalised odds", "equal opportunity"}),
        (table((1, "b", 1, 0, 3), (1, "b", 1, 1, 2)), {"equalised odds"}),
        (table(), {"accuracy", "demographic parity", "equalised odds", "equal opportunity"}),
    ],
    ids=["no positives", "no negatives", "one value"],
)
def test_what_is_not_defined_is_nan(missing: pd.DataFrame, undefined: set[str]) -> None:
    a = table((0, "a", 1, 1, 4), (0, "a", 0, 0, 4), (1, "a", 0, 1, 4))
    confusion = pd.concat([a, missing]) if len(missing) else a
    found = group_differences(confusion, 1)
    assert {name for name, interval in found.items() if math.isnan(interval.value)} == undefined
    assert all(math.isnan(found[name].low) and found[name].draws == 0 for name in undefined)
    rates = group_frame(confusion, 1).by_group
    assert rates.isna().sum().sum() == (1 if len(missing) else 0)


def test_of_a_single_client_the_records_are_redrawn() -> None:
    found = group_differences(SMALL[SMALL["client"] == 0], 1)["demographic parity"]
    assert found.value == pytest.approx(abs(7 / 12 - 5 / 10)) and (found.n, found.unit) == (22, "test records")


def test_counts_of_zero_are_no_records() -> None:
    more = pd.concat([SMALL, table((2, "x", 1, 1, 0))])
    assert group_frame(more, 1).by_group.index.tolist() == ["f", "m"]
    assert group_differences(more, 1) == group_differences(SMALL, 1)


def test_attributes_are_not_mixed() -> None:
    both = pd.concat([SMALL.assign(attribute="sex"), SMALL.assign(attribute="age")])
    with pytest.raises(UserError, match="several attributes"):
        group_frame(both, 1)
    with pytest.raises(UserError, match="no records"):
        group_differences(SMALL[:0], 1)
    assert len(group_frame(both[both["attribute"] == "sex"], 1).by_group) == 2


# ---- the cost of privacy ----


def test_the_cost_of_privacy_by_hand() -> None:
    """.9 - .8 = .1, .9 - .6 = .3, .5 - .6 = -.1: the third is served better. Groups: (.1 + .3)/2 and -.1."""
    served, reference, group = np.array([0.8, 0.6, 0.6]), np.array([0.9, 0.9, 0.5]), np.array(["x", "x", "y"])
    found = privacy_cost(served, reference, group)
    assert found.by_client == pytest.approx([0.1, 0.3, -0.1]) and found.clients == 3
    assert found.by_group == pytest.approx({"x": 0.2, "y": -0.1}) and found.fairness == pytest.approx(0.4)
    loss = privacy_cost(np.array([1.5, 2.0]), np.array([1.0, 0.5]), np.array([0, 1]), higher_is_better=False)
    assert loss.by_client == pytest.approx([0.5, 1.5]) and loss.fairness == pytest.approx(1.0)
    assert loss.by_group == pytest.approx({"0": 0.5, "1": 1.5})


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20), st.floats(-1, 1))
def test_a_cost_that_all_bear_alike_is_fair(clients: list[tuple[float, float]], shift: float) -> None:
    served, reference = (np.array(column) for column in zip(*clients, strict=True))
    group = np.zeros(len(served), int)
    found = privacy_cost(served, reference, group).fairness
    pairs = [abs((r - s) - (q - p)) for (s, r), (p, q) in itertools.product(clients, repeat=2)]
    assert found == pytest.approx(max(pairs), abs=1e-12)
    assert privacy_cost(served, served + shift, group).fairness == pytest.approx(0, abs=1e-12)
