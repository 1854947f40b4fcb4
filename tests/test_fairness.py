"""Figures over clients and over values of an attribute: by hand, by enumeration, and against fairlearn."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairveil.fairness import histogram, jain_index, spread_of, summarise

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
