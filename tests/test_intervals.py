"""Bootstrap intervals: small cases counted out, large ones against the normal and binomial laws and scipy."""

from __future__ import annotations

import math
import time
import tracemalloc
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fairveil import intervals
from fairveil.fairness import summarise
from fairveil.intervals import (
    Interval,
    Sample,
    Statistic,
    bootstrap,
    client_weights,
    gap_by_chance,
    gap_of,
    group_of,
    mean_of,
    worst_group_of,
    worst_tenth_of,
)


def one_group(*values: float) -> Sample:
    return Sample(np.array(values), np.zeros(len(values), int))


# ---- statistics ----


def test_statistics_by_hand() -> None:
    """Groups 0 and 2, not in order: means (0.5 + 0.7)/2 and (0.9 + 0.6)/2; in the second draw (1 + 0)/2 and 0.2."""
    values, group = np.array([[0.5, 0.9, 0.7, 0.6], [1.0, 0.1, 0.0, 0.3]]), np.array([0, 2, 0, 2])
    assert mean_of(values, group) == pytest.approx([0.675, 0.35])
    assert worst_group_of(values, group) == pytest.approx([0.6, 0.2])
    assert worst_group_of(values, group, higher_is_better=False) == pytest.approx([0.75, 0.5])
    assert gap_of(values, group) == pytest.approx([0.15, 0.3])
    assert group_of(2)(values, group) == pytest.approx([0.75, 0.2])
    assert worst_tenth_of(values, group) == pytest.approx([0.5, 0.0])  # a tenth of 4 clients is one
    assert worst_tenth_of(values, group, higher_is_better=False) == pytest.approx([0.9, 1.0])


def test_a_tenth_of_twenty_clients_is_two() -> None:
    values = np.random.default_rng(0).permutation(np.arange(20.0))[None]
    assert worst_tenth_of(values, np.zeros(20, int)) == pytest.approx([0.5])  # 0 and 1
    assert worst_tenth_of(values, np.zeros(20, int), higher_is_better=False) == pytest.approx([18.5])  # 18 and 19


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=30), st.booleans(), st.randoms()
)  # fmt: skip
def test_statistics_are_those_of_the_summary_in_any_order(
    clients: list[tuple[float, int]], higher: bool, random: Random
) -> None:
    values, group = (np.array(column) for column in zip(*clients, strict=True))
    expected = summarise(values, group, ["a", "b", "c", "d"], higher_is_better=higher)
    random.shuffle(clients)
    values, group = (np.array(column) for column in zip(*clients, strict=True))
    worst = partial(worst_group_of, higher_is_better=higher), partial(worst_tenth_of, higher_is_better=higher)
    found = [float(statistic(values[None], group)[0]) for statistic in (mean_of, gap_of, *worst)]
    wanted = [expected.mean, expected.gap, expected.by_group[expected.worst_group], expected.worst_10_percent]
    assert found == pytest.approx(wanted, abs=1e-12)


# ---- clients ----


def test_two_clients_counted_out() -> None:
    """Two of (0, 1) with replacement: mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4. Interval of 95%: 0 to 1; of 40%,
    from the 30th to the 70th of 100: 1/2 to 1/2. (30% of 2,000 draws is 5 standard deviations above a quarter.)"""
    assert bootstrap([one_group(0.0, 1.0)], mean_of) == Interval(0.5, 0.0, 1.0, 2, "clients", 2000)
    assert bootstrap([one_group(0.0, 1.0)], mean_of, level=0.4) == Interval(0.5, 0.5, 0.5, 2, "clients", 2000)


def test_three_clients_give_their_range() -> None:
    """All three the same, the smallest: 1 in 27, more than 2.5%. So the interval goes from smallest to largest."""
    found = bootstrap([one_group(3.0, 7.0, 4.0)], mean_of, draws=20_000)
    assert (found.low, found.high, found.n) == (3.0, 7.0, 3) and found.value == pytest.approx(14 / 3)


@pytest.mark.statistical
def test_groups_keep_their_clients() -> None:
    """Values say which client they are of: replicates hold those of the group only, each client as often as others.

    In 3,000 draws a client of a group of three comes up once a draw, with a deviation of sqrt(2/3/3000) = 0.015:
    allowed 0.08. False alarms: below 1e-6.
    """
    group = np.array([1, 0, 1, 0, 0, 5])
    seen: list[np.ndarray] = []

    def watch(values: np.ndarray, group: np.ndarray) -> np.ndarray:
        seen.append(values.astype(int))
        return values.mean(axis=1)

    bootstrap([Sample(np.arange(6.0), group)], watch, draws=3000)
    drawn = np.concatenate(seen[1:])  # the first is what was given
    assert drawn.shape == (3000, 6) and (group[drawn] == group).all()
    count = np.bincount(drawn.ravel()) / 3000  # on average each client is drawn once
    assert count == pytest.approx(np.ones(6), abs=0.08)


def test_the_seed_decides() -> None:
    sample = Sample(np.random.default_rng(0).random(30), np.arange(30) % 3)
    assert bootstrap([sample], gap_of, seed=3) == bootstrap([sample], gap_of, seed=3)
    assert bootstrap([sample], gap_of, seed=3) != bootstrap([sample], gap_of, seed=4)


@pytest.mark.statistical
def test_many_clients_give_the_normal_interval() -> None:
    """mean +- 1.96 s/sqrt(n). The 2.5% quantile of 20,000 draws has the standard deviation
    sqrt(0.025 * 0.975/20,000)/phi(1.96) = 0.0189 of a standard error; allowed 0.1 for it. False alarms: below 1e-6."""
    values = np.random.default_rng(5).normal(0.8, 0.1, 1000)
    found = bootstrap([Sample(values, np.zeros(1000, int))], mean_of, draws=20_000)
    error = values.std() / math.sqrt(1000)
    expected = values.mean() + stats.norm.ppf([0.025, 0.975]) * error
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.1 * error)


@pytest.mark.statistical
@pytest.mark.parametrize("n", [6, 40])
def test_the_interval_is_that_of_scipy(n: int) -> None:
    """The mean of skewed values, by scipy.stats.bootstrap. Two quantiles of 20,000 draws, each with a standard
    deviation of about 0.02 standard errors: allowed 0.2 for their difference. False alarms: below 1e-6."""
    values = np.random.default_rng(n).exponential(size=n)
    found = bootstrap([one_group(*values)], mean_of, draws=20_000)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    error = values.std() / math.sqrt(n)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.2 * error)


def test_one_client_has_no_interval() -> None:
    found = bootstrap([one_group(0.5)], mean_of)
    assert (found.value, found.unit, found.draws) == (0.5, "clients", 0)
    assert math.isnan(found.low) and math.isnan(found.high)


@pytest.mark.parametrize("statistic", [mean_of, gap_of, worst_group_of])
def test_clients_that_are_groups_of_their_own_have_no_interval(statistic: Statistic) -> None:
    """Four hospitals, each a group: there is one way to draw them, and no width is no certainty."""
    found = bootstrap([Sample(np.array([0.7, 0.8, 0.9, 0.6]), np.arange(4))], statistic)
    assert found.n == 0 and math.isnan(found.low) and math.isnan(found.high)


def test_a_group_of_one_client_has_no_interval() -> None:
    sample = Sample(np.array([0.7, 0.8, 0.9]), np.array([0, 0, 1]))
    assert math.isnan(bootstrap([sample], group_of(1)).low)
    mean = bootstrap([sample], mean_of)  # the mean does: of two clients that were resampled
    assert (mean.low, mean.n) == (pytest.approx((0.7 + 0.7 + 0.9) / 3), 2)


# ---- records that clients share ----


@pytest.mark.statistical
def test_shared_records_are_redrawn() -> None:
    """Three clients share 1,000 records, of which 0.9 are right: Binomial(1,000, 0.9)/1,000, quantiles by scipy.

    A quantile of 20,000 draws has a standard deviation of 0.0002: allowed 0.0015, a step and a half of the binomial
    law. False alarms: below 1e-9.
    """
    sample = Sample(np.full(3, 0.9), np.zeros(3, int), np.full(3, 1000), np.zeros(3, int))
    found = bootstrap([sample], mean_of, draws=20_000)
    expected = stats.binom.ppf([0.025, 0.975], 1000, 0.9) / 1000
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.0015)
    assert (found.n, found.unit) == (1000, "test records")


def test_clients_that_share_records_stay_equal() -> None:
    shared, seen = np.array([7, 3, 7, 3, 9]), []

    def watch(values: np.ndarray, group: np.ndarray) -> np.ndarray:
        seen.append(values)
        return values.mean(axis=1)

    values, tests = np.array([0.5, 0.25, 0.5, 0.25, 1.0]), np.array([10, 8, 10, 8, 3])
    found = bootstrap([Sample(values, np.zeros(5, int), tests, shared)], watch, draws=500)
    drawn = seen[1]
    assert (drawn[:, 0] == drawn[:, 2]).all() and (drawn[:, 1] == drawn[:, 3]).all() and (drawn[:, 4] == 1).all()
    assert np.allclose(drawn * tests, np.rint(drawn * tests)) and len(np.unique(drawn[:, 0])) > 3
    assert (found.n, found.unit) == (21, "test records")  # 10 + 8 + 3


@pytest.mark.parametrize(
    ("values", "tests"), [([0.5, 0.6], [10, 10]), ([0.5, 0.5], [10, 12])], ids=["value", "records"]
)  # fmt: skip
def test_clients_that_share_records_cannot_differ(values: list[float], tests: list[int]) -> None:
    sample = Sample(np.array(values), np.zeros(2, int), np.array(tests), np.zeros(2, int))
    with pytest.raises(ValueError, match="share their test records"):
        bootstrap([sample], mean_of)


@pytest.mark.statistical
def test_named_sites_can_have_their_records_redrawn() -> None:
    """Four hospitals that are all there are, a number each in `shared`: what was drawn are their patients.

    The width of 20,000 draws has a deviation of 0.7%: allowed 5%. False alarms: below 1e-9.
    """
    values, tests = np.array([0.7, 0.8, 0.9, 0.6]), np.array([40, 50, 60, 30])
    found = bootstrap([Sample(values, np.arange(4), tests, np.arange(4))], mean_of, draws=20_000)
    error = math.sqrt((values * (1 - values) / tests).sum()) / 4
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.05) and found.n == 180


def test_shared_losses_have_no_interval_in_one_run_and_seeds_in_several() -> None:
    runs = [Sample(np.full(3, loss), np.zeros(3, int), None, np.zeros(3, int)) for loss in (1.5, 2.5)]
    alone, both = bootstrap(runs[:1], mean_of), bootstrap(runs, mean_of)
    assert math.isnan(alone.low) and alone.value == 1.5
    assert both == Interval(2.0, 1.5, 2.5, 2, "seeds", 2000)


# ---- seeds ----


def test_two_seeds_counted_out() -> None:
    """Clients within a seed are equal, so only the seeds matter: (0, 0), (0, 1), (1, 0), (1, 1) with 1/4 each."""
    runs = [one_group(0.0, 0.0, 0.0), one_group(1.0, 1.0)]  # federations may differ in size
    assert bootstrap(runs, mean_of) == Interval(0.5, 0.0, 1.0, 2, "seeds", 2000)
    assert bootstrap(runs, mean_of, level=0.4) == Interval(0.5, 0.5, 0.5, 2, "seeds", 2000)


@pytest.mark.statistical
def test_seeds_and_then_clients() -> None:
    """Variance of a replicate: (variance of the seeds' means + mean variance of a seed's mean)/seeds.

    8 seeds of 50 clients, draws far from few; the interval is 2 * 1.96 deviations wide within 6%, when a quantile of
    20,000 draws has 2% of a deviation: 0.7% of the width together. False alarms: below 1e-9 if it were normal.
    """
    random = np.random.default_rng(2)
    runs = [Sample(random.normal(shift, 1.0, 50), np.arange(50) % 2) for shift in random.normal(0, 0.2, 8)]
    groups = [[one.values[one.group == code] for code in (0, 1)] for one in runs]
    within = np.mean([np.mean([part.var() / 25 for part in parts]) / 2 for parts in groups])
    deviation = math.sqrt((np.var([one.values.mean() for one in runs]) + within) / 8)
    found = bootstrap(runs, mean_of, draws=20_000)
    assert (found.high - found.low) / (2 * 1.96 * deviation) == pytest.approx(1, abs=0.06)
    assert (found.n, found.unit) == (8, "seeds")


# ---- cost ----


@pytest.mark.parametrize(("clients", "seconds"), [(1_000, 1.0), (10_000, 5.0)])
def test_many_clients_take_little_time_and_memory(clients: int, seconds: float) -> None:
    random = np.random.default_rng(0)
    sample = Sample(random.random(clients), random.integers(0, 4, clients))
    started = time.process_time()
    for statistic in (gap_of, worst_tenth_of):
        bootstrap([sample], statistic)
    assert (time.process_time() - started) / 2 < seconds
    tracemalloc.start()
    bootstrap([sample], worst_tenth_of, draws=500 if clients == 10_000 else 2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_draws_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many replicates and the same law, whatever fits at once."""
    monkeypatch.setattr(intervals, "CELLS", 7)
    assert bootstrap([one_group(0.0, 1.0)], mean_of) == Interval(0.5, 0.0, 1.0, 2, "clients", 2000)
    assert bootstrap([one_group(*range(20))], mean_of, draws=9).draws == 9  # more clients than fit: one draw at once
    weights = np.concatenate(list(client_weights(3, 10, np.random.default_rng(0))))
    assert weights.shape == (10, 3) and (weights.sum(axis=1) == 3).all()


# ---- how far to trust them ----


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("n", [3, 6, 20, 100])
def test_coverage_over_normal_clients_is_what_the_document_says(n: int) -> None:
    """Bootstrap means of n have the deviation s sqrt((n - 1)/n)/sqrt(n), so the truth is covered if Student's |t| with
    n - 1 degrees is below 1.96 sqrt((n - 1)/n): 0.749, 0.866, 0.929, 0.946. (Three give their range, exactly 3/4.)

    2,000 trials, allowed 5 standard deviations and 0.01 for draws that are not quite normal. False alarms: below 6e-7.
    """
    expected = 1 - 2 * stats.t.sf(stats.norm.ppf(0.975) * math.sqrt((n - 1) / n), n - 1)
    random, trials = np.random.default_rng([n, 7]), 2000
    covered = 0
    for trial in range(trials):
        found = bootstrap([one_group(*random.normal(0.7, 0.1, n))], mean_of, draws=1000, seed=trial)
        covered += found.low <= 0.7 <= found.high
    allowed = 0.01 + 5 * math.sqrt(expected * (1 - expected) / trials)
    assert covered / trials == pytest.approx(expected, abs=allowed)


@pytest.mark.statistical
def test_the_gap_that_chance_gives_to_two_groups() -> None:
    """Two groups of 50 clients whose values have deviation 1: dealt out at random their means differ by a normal
    number of deviation sqrt(2/50) (times sqrt(100/99), for the values are fixed), so 95% of gaps are below 1.96 of
    these. The quantile of 20,000 draws is within 3% of it. False alarms: below 1e-4."""
    values = np.random.default_rng(0).normal(size=100)
    values = (values - values.mean()) / values.std()
    found = gap_by_chance(Sample(values, np.repeat([0, 1], 50)), draws=20_000)
    assert found == pytest.approx(1.96 * math.sqrt(2 / 50 * 100 / 99), rel=0.03)


@pytest.mark.statistical
def test_the_gap_that_chance_gives_on_shared_records() -> None:
    """Right in 450 of 500 and in 430 of 500: at the common 0.88 the difference has deviation sqrt(2 * .88 * .12/500) =
    .02055, and 95% are below 1.96 of these, .0403; binomial counts are coarse: within .002. False alarms: below 1e-4.
    """
    sample = Sample(np.array([0.9, 0.9, 0.86]), np.array([0, 0, 1]), np.full(3, 500), np.array([0, 0, 1]))
    assert gap_by_chance(sample, draws=20_000) == pytest.approx(0.0403, abs=0.002)


def test_no_gap_by_chance_where_nothing_can_be_redrawn() -> None:
    assert math.isnan(gap_by_chance(Sample(np.array([0.3, 0.2]), np.array([0, 1]), None, np.array([0, 1]))))
