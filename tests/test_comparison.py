"""Intervals and paired comparisons over seeds."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fairveil.comparison import compare, interval, over_seeds


def test_an_interval_by_hand() -> None:
    """1, 2, 3, 4: mean 2.5, s = sqrt(5/3), t(0.975; 3) = 3.1824 from the printed tables."""
    low, high = interval(np.array([1.0, 2.0, 3.0, 4.0])) or (0.0, 0.0)
    half = 3.1824 * math.sqrt(5 / 3) / 2
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-4)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_an_interval_is_that_of_scipy(n: int) -> None:
    chance = np.random.default_rng(n)
    ours, theirs = chance.normal(size=n), chance.normal(size=n)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert interval(ours - theirs) == pytest.approx((expected.low, expected.high), rel=1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_one_value_has_no_interval(n: int) -> None:
    assert interval(np.ones(n)) is None


@pytest.mark.statistical
def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """20,000 pairs of 4 seeds with a common effect of the seed: 95% within 5 standard deviations, 0.77%.

    False alarms: 6e-7, if the coverage is exact.
    """
    chance, trials, truth, covered = np.random.default_rng(0), 20_000, 0.1, 0
    for _ in range(trials):
        seed = chance.normal(scale=3.0, size=4)  # cancels in the difference
        low, high = interval(
            (truth + seed + chance.normal(scale=0.2, size=4)) - (seed + chance.normal(scale=0.1, size=4))
        ) or (0.0, 0.0)
        covered += low <= truth <= high
    assert covered / trials == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / trials))


@pytest.fixture
def table() -> pd.DataFrame:
    """Two variants at two points; one run of the other variant is missing, and one seed of the baseline."""
    rows = [
        ("base", 1.0, 0, 0.50, 9.0), ("base", 1.0, 1, 0.60, 8.0), ("base", 1.0, 2, math.nan, math.nan),
        ("base", 2.0, 0, 0.70, 7.0), ("base", 2.0, 1, 0.80, 6.0), ("base", 2.0, 2, 0.90, 5.0),
        ("other", 1.0, 0, 0.55, 8.0), ("other", 1.0, 1, 0.59, 7.0), ("other", 1.0, 2, 0.99, 1.0),
        ("other", 2.0, 0, math.nan, math.nan), ("other", 2.0, 1, 0.85, 5.0), ("other", 2.0, 2, math.nan, math.nan),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["variant", "epsilon", "seed", "accuracy_mean", "loss_mean"])


def test_only_seeds_that_both_have_are_compared(table: pd.DataFrame) -> None:
    found = compare(table, ["epsilon"], "base", {"accuracy_mean": True, "loss_mean": False})
    assert list(found["variant"]) == ["other"] * 4
    first, loss, second, _ = (row for _, row in found.iterrows())
    assert (first["epsilon"], first["measure"], first["n"], first["better"]) == (1.0, "accuracy_mean", 2, 1)
    means = (first["variant_mean"], first["baseline_mean"], first["difference"])
    assert means == pytest.approx((0.57, 0.55, 0.02))
    expected = stats.ttest_rel([0.55, 0.59], [0.50, 0.60]).confidence_interval(0.95)
    assert (first["low"], first["high"]) == pytest.approx((expected.low, expected.high))
    assert (loss["difference"], loss["better"]) == (-1.0, 2)  # a lower loss is better
    assert (second["n"], second["better"]) == (1, 1) and second["difference"] == pytest.approx(0.05)
    assert math.isnan(second["low"]) and math.isnan(second["high"])


def test_a_pair_without_a_common_seed_has_no_difference(table: pd.DataFrame) -> None:
    table.loc[table["variant"] == "other", "accuracy_mean"] = math.nan
    found = compare(table, ["epsilon"], "base", {"accuracy_mean": True})
    assert list(found["n"]) == [0, 0] and found["difference"].isna().all() and list(found["better"]) == [0, 0]


def test_means_over_seeds(table: pd.DataFrame) -> None:
    found = over_seeds(table, ["epsilon"], ["accuracy_mean"]).set_index(["variant", "epsilon"])
    row = found.loc[("base", 2.0)]
    assert row["n"] == 3 and row["mean"] == pytest.approx(0.8) and row["deviation"] == pytest.approx(0.1)
    expected = stats.t.interval(0.95, 2, loc=0.8, scale=0.1 / math.sqrt(3))
    assert (row["low"], row["high"]) == pytest.approx(expected)
    lonely = found.loc[("other", 2.0)]
    assert (lonely["n"], lonely["mean"]) == (1, 0.85) and math.isnan(lonely["low"]) and math.isnan(lonely["deviation"])


def test_without_a_grid_there_is_one_point(table: pd.DataFrame) -> None:
    table = table[table["epsilon"] == 1.0].drop(columns="epsilon")
    assert list(compare(table, [], "base", {"accuracy_mean": True})["n"]) == [2]
    assert list(over_seeds(table, [], ["accuracy_mean"])["n"]) == [2, 3]
