"""The price of agreement against exact divergences of a noisy argmax; its publication by brute force on neighbours."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import erfc, logsumexp, ndtr

from fairveil.privacy.accounting import SmoothDpEvent, price
from fairveil.privacy.consensus import (
    GRID,
    SmoothedPrice,
    _in_tails,
    consensus_rdp,
    smooth_sensitivity,
    smoothed_epsilon,
)
from fairveil.streams import Stream

Floats = NDArray[np.float64]
ORDERS = (1.05, 1.5, 2.0, 4.0, 10.0, 32.0, 100.0)
NODES = np.linspace(-30, 30, 6001)  # the trapezium rule is exact for such integrands, far into the tails
DENSITY = np.exp(-(NODES**2) / 2)
DENSITY /= DENSITY.sum()


def law(votes: Floats, std: float) -> Floats:
    """P(argmax_j n_j + N(0, std^2) = j), the integral over the noise of j."""
    chances = []
    for j in range(len(votes)):
        others = [ndtr(NODES + (votes[j] - votes[i]) / std) for i in range(len(votes)) if i != j]
        chances.append(DENSITY @ np.prod(others, axis=0))
    return np.array(chances)


def renyi(p: Floats, q: Floats, order: float) -> float:
    return float(logsumexp(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)


def neighbours(votes: Floats, unit: str) -> Iterator[tuple[float, ...]]:
    """What one unit can make of the votes of a query; `unit` is a kind, with k for nearest neighbours."""
    kind, _, k = unit.partition(" ")
    size = 1 / int(k or 1)
    for i, j in itertools.permutations(range(len(votes)), 2):
        if kind == "replace" and votes[i] > size / 2:
            yield tuple(votes + size * (np.eye(len(votes))[j] - np.eye(len(votes))[i]))
    for i in range(len(votes)):
        if kind == "add-remove":
            yield tuple(votes + np.eye(len(votes))[i])
            if votes[i]:
                yield tuple(votes - np.eye(len(votes))[i])


UNITS = {  # the sensitivity, and the step of the gap
    "add-remove": (1.0, 1.0),
    "replace": (math.sqrt(2), 2.0),
    "replace 3": (math.sqrt(2) / 3, 2 / 3),
}


def theorem_6(log_q: float, std: float, order: float) -> float:
    """Papernot et al. (2018), Theorem 6 and Proposition 10, for the sensitivity sqrt 2; of P from P' only."""
    always, mu_2 = order / std**2, std * math.sqrt(-log_q)
    mu_1 = mu_2 + 1
    eps_1, eps_2 = mu_1 / std**2, mu_2 / std**2
    if mu_2 <= 1 or order > mu_1 or log_q + eps_2 >= 0:
        return always
    if log_q > (mu_2 - 1) * eps_2 - mu_2 * math.log(mu_1 / (mu_1 - 1) * mu_2 / (mu_2 - 1)):
        return always
    q = math.exp(log_q)
    a = (1 - q) / (1 - math.exp((log_q + eps_2) * (mu_2 - 1) / mu_2))
    log_b = eps_1 - log_q / (mu_1 - 1)
    total = np.logaddexp(math.log1p(-q) + (order - 1) * math.log(a), log_q + (order - 1) * log_b)
    return min(always, float(total) / (order - 1))


# ---- the price of agreement ------------------------------------------------------------------------


def histograms(unit: str) -> list[Floats]:
    """From ties to all agreed, of two and three classes."""
    k = int(unit.partition(" ")[2] or 1)
    rows = [[n - a, a] for n in (6, 13) for a in range(n // 2 + 1)]
    rows += [[n - a - b, a, b] for n in (7, 14) for a in range(0, n // 3 + 1, 2) for b in range(a + 1)]
    rows += [[2, 11], [1, 2, 9], [4, 4, 4]]  # the first is not the first in the row
    return [np.array(row) / k for row in rows]


@pytest.mark.parametrize("std", [0.4, 1.0, 2.5, 8.0])
@pytest.mark.parametrize("unit", UNITS)
def test_no_neighbour_is_further_than_the_price(unit: str, std: float) -> None:
    """Exact divergences, both ways, to every neighbour; and never more than the bound for all data."""
    sensitivity, closest = UNITS[unit][0], 0.0
    for votes in histograms(unit):
        found, here = consensus_rdp(votes[None], std, sensitivity, ORDERS), law(votes, std)
        assert here.min() > 1e-200 and here.sum() == pytest.approx(1, rel=1e-9)
        for other in neighbours(votes, unit):
            there = law(np.array(other), std)
            for order, bound in zip(ORDERS, found, strict=True):
                exact = max(renyi(here, there, order), renyi(there, here, order))
                assert exact <= bound * (1 + 1e-6) + 1e-11 / (order - 1)
                if bound < 0.5 * order * sensitivity**2 / (2 * std**2):  # agreement counts
                    closest = max(closest, exact / bound)
        assert (found <= np.array(ORDERS) * sensitivity**2 / (2 * std**2) * (1 + 1e-12)).all()
    assert closest > 0.2 or std > 2  # not by far too much, either; much noise leaves nothing to gain


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_no_direction_is_further_than_the_price(classes: int) -> None:
    """Neighbours anywhere on the sphere of the sensitivity: random ones, and straight towards the second."""
    random = np.random.default_rng(classes)
    for std, gap in itertools.product((0.7, 1.5), (0.5, 2.0, 4.0, 6.0)):
        votes = np.array([gap, *random.uniform(-2, 0, classes - 2), 0.0]) + 2
        ways = random.standard_normal((12, classes))
        straight = np.zeros((2, classes))
        straight[0, [0, -1]], straight[1, [0, -1]] = (1, -1), (-1, 1)
        for sensitivity in (0.2, 1.0):
            found, here = consensus_rdp(votes[None], std, sensitivity, ORDERS), law(votes, std)
            for way in np.concatenate([ways, straight]):
                there = law(votes + sensitivity * way / np.linalg.norm(way), std)
                for order, bound in zip(ORDERS, found, strict=True):
                    exact = max(renyi(here, there, order), renyi(there, here, order))
                    assert exact <= bound * (1 + 1e-6) + 1e-11 / (order - 1)


@pytest.mark.parametrize("power", [1.05, 2.0, 6.0, 32.0, -0.05, -1.0, -5.0, -31.0])
@pytest.mark.parametrize("shift", [1e-5, 0.003, 0.05, 0.4, 2.0])
def test_no_set_of_that_chance_holds_more(shift: float, power: float) -> None:
    """Brute force: the line in small cells, those of the largest g first, up to the chance q. At most twice that."""
    x = np.linspace(-80, 80, 800_001)
    mass = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    loss = shift * x - shift**2 / 2
    with np.errstate(over="ignore", invalid="ignore"):
        g = np.expm1(power * loss) - power * np.expm1(loss)
        if abs(power) * shift < 0.01:  # by its series, where that is a difference of equal numbers
            g = sum((power**k - power) * loss**k / math.factorial(k) for k in range(2, 9))
        held = np.where(mass > 0, mass * g, 0.0)
    order = np.argsort(-np.where(np.isfinite(g), g, np.inf), kind="stable")
    sums, chances = np.cumsum(held[order]), np.cumsum(mass[order])
    for q in (0.4, 0.1, 1e-3, 1e-6, 1e-9):
        exact = np.interp(q, chances, sums)
        with np.errstate(over="ignore", invalid="ignore"):
            bound = _in_tails(np.log(np.array([q])), shift, power)[0]
        assert exact * (1 - 1e-3) <= bound <= 2.05 * exact + 1e-10 * q


def test_it_is_far_below_the_published_theorem() -> None:
    """Where noise is a quarter or so of the gap; and at no order more than what the other direction asks for."""
    for std, gap in ((25.0, 100), (40.0, 150), (40.0, 200), (100.0, 400)):
        log_q = math.log(2) + float(stats.norm.logsf(gap, scale=math.sqrt(2) * std))
        for order in (2.0, 4.0, 6.0, 10.0, 32.0):
            found = consensus_rdp(np.array([[gap, 0.0, 0.0]]), std, math.sqrt(2), [order])[0]
            assert found < {2.0: 0.15, 4.0: 0.2, 6.0: 0.3, 10.0: 0.5, 32.0: 0.9}[order] * theorem_6(log_q, std, order)


def test_the_published_theorem_holds_one_way_only() -> None:
    """Why both ways are bounded here: the exact divergence of the neighbour from these data is above theirs."""
    votes, std, order = np.array([100.0, 0.0, 0.0]), 10.0, 6.0
    here, there = law(votes, std), law(votes + np.array([-1, 1, 0]), std)
    theirs = theorem_6(math.log(2) + float(stats.norm.logsf(100, scale=math.sqrt(200))), std, order)
    assert renyi(here, there, order) < theirs < renyi(there, here, order)
    assert renyi(there, here, order) < consensus_rdp(votes[None], std, math.sqrt(2), [order])[0]


def test_prices_add_up_and_ties_cost_what_all_data_cost() -> None:
    """By hand: order s^2/(2 std^2) for each query without a clear winner; nothing for none."""
    assert consensus_rdp(np.zeros((0, 3)), 2.0, 1.0, ORDERS).tolist() == [0.0] * len(ORDERS)
    tied = np.array([[5.0, 5.0], [0.0, 0.0], [4.0, 5.0]])
    assert consensus_rdp(tied, 20.0, 1.0, ORDERS) == pytest.approx(3 * np.array(ORDERS) / 800, rel=1e-12)
    assert consensus_rdp(np.full((1, 40), 7.0), 0.1, 1.0, ORDERS) == pytest.approx(np.array(ORDERS) * 50, rel=1e-12)
    clear, mixed = np.array([[0.0, 90.0, 3.0]]), np.array([[0.0, 90.0, 3.0], [5.0, 5.0, 5.0]])
    alone = [consensus_rdp(rows, 20.0, 1.0, ORDERS) for rows in (clear, mixed[1:])]
    assert consensus_rdp(mixed, 20.0, 1.0, ORDERS) == pytest.approx(sum(alone), rel=1e-12)
    assert (consensus_rdp(mixed[:, [2, 0, 1]], 20.0, 1.0, ORDERS) == consensus_rdp(mixed, 20.0, 1.0, ORDERS)).all()


def test_extreme_gaps_are_finite_and_never_rise() -> None:
    for std, sensitivity in ((1e-3, 1.0), (1.0, 1.0), (100.0, 0.01), (1e6, 1.0)):
        gaps = np.concatenate([[0.0], std * np.geomspace(1e-3, 1e12, 400)])
        curves = [consensus_rdp(np.array([[gap, 0.0, 0.0]]), std, sensitivity, ORDERS) for gap in gaps]
        assert np.isfinite(curves).all() and (np.array(curves) >= 0).all()
        assert (np.diff(curves, axis=0) <= 0).all()
        assert max(curves[-1]) < 1e-200 or sensitivity >= std  # no neighbour of such a gap ever answers otherwise
        assert curves[0] == pytest.approx(np.array(ORDERS) * (sensitivity / std) ** 2 / 2, rel=1e-12)


@pytest.mark.parametrize(
    "terms", [(0.0, 1.0, [2.0]), (1.0, -1.0, [2.0]), (1.0, 1.0, [2.0, 1.0]), (math.nan, 1.0, [2.0])]
)
def test_what_has_no_price_is_refused(terms: tuple[float, float, list[float]]) -> None:
    with pytest.raises(ValueError, match="no price"):
        consensus_rdp(np.ones((2, 2)), *terms)
    for shape in ((2, 1), (4,)):
        with pytest.raises(ValueError, match="no price"):
            consensus_rdp(np.ones(shape), 1.0, 1.0, [2.0])


# ---- smooth sensitivity ----------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.05, 0.4, 2.0])
def test_it_is_smooth_and_no_less_than_the_exact_one(beta: float) -> None:
    """Brute force over all pairs of buckets, for arbitrary levels; distances count moves of both by at most 2.

    The exact smooth sensitivity is the least smooth bound there is: no sound computation can give less.
    """
    random = np.random.default_rng(1)
    shapes = [np.sort(random.uniform(size=11))[::-1], np.repeat([3.0, 2.5, 0.0], [4, 1, 6]), np.ones(11)]
    points = list(itertools.product(range(11), repeat=2))
    table = np.array(points)
    distance = -(-np.abs(table[:, None] - table[None]).max(2) // 2)
    for levels in shapes:
        found = np.array([smooth_sensitivity(levels, np.array(point), beta) for point in points])
        totals = levels[table].sum(1)
        local = np.where(distance <= 1, np.abs(totals[:, None] - totals[None]), 0).max(1)
        exact = (np.exp(-beta * distance) * local).max(1)
        assert (exact <= found * (1 + 1e-12)).all()
        near = np.where(distance <= 1, found, math.inf).min(1)
        assert (found <= math.exp(beta) * near * (1 + 1e-12)).all()
        assert found.max() <= 4 * exact.max()  # an estimate, but not any


@pytest.mark.parametrize(("unit", "agents"), [("add-remove", 8), ("replace", 8), ("replace 3", 12)])
def test_neighbours_are_told_apart_by_no_more_than_the_event_says(unit: str, agents: int) -> None:
    """Two queries of three classes, brute force over histograms and all that a unit can do to both at once.

    Means and deviations of what is published; and the total bounds the divergence of the answers.
    """
    (sensitivity, step), std = UNITS[unit], 0.8 if unit != "replace 3" else 0.3
    release = SmoothedPrice(4.0, 0.08, 3.0, 0.01)
    levels, k = release._levels(3, std, sensitivity, step), int(unit.partition(" ")[2] or 1)

    def published(rows: tuple[tuple[float, ...], ...]) -> tuple[float, float]:
        ranked = np.sort(np.array(rows), axis=1)
        buckets = np.floor((ranked[:, -1] - ranked[:, -2]) / (step / 2) + 1e-6).astype(int)
        scale = smooth_sensitivity(levels, buckets, release.beta)
        return levels[buckets].sum() + scale * 3.0 * stats.norm.isf(0.01), scale * 3.0

    single = [(agents - a - b, a, b) for a in range(agents + 1) for b in range(agents + 1 - a)]
    random, widest = np.random.default_rng(3), 0.0
    for _ in range(60):
        rows = [np.array(single[i]) / k for i in random.integers(len(single), size=2)]
        mean, deviation = published(tuple(map(tuple, rows)))
        exact = consensus_rdp(np.array(rows), std, sensitivity, [release.order])[0]
        assert exact <= mean - deviation * stats.norm.isf(0.01) + 1e-12
        for other in itertools.product(*[[tuple(row), *neighbours(row, unit)] for row in rows]):
            mean_2, deviation_2 = published(other)
            assert abs(math.log(deviation_2 / deviation)) <= release.beta * (1 + 1e-12)
            widest = max(widest, abs(mean - mean_2) / min(deviation, deviation_2))
    assert 0.2 < widest * release.event.noise_multiplier <= 1


# ---- the publication -------------------------------------------------------------------------------


def rows_of(queries: int, agents: int = 250, seed: int = 0) -> Floats:
    """Votes of ten classes: mostly agreed, some disputed."""
    random = np.random.default_rng(seed)
    right = random.beta(5, 1, size=queries)
    return np.array([random.multinomial(agents, [p, *[(1 - p) / 9] * 9]) for p in right], dtype=np.float64)


def gaps_of(votes: Floats) -> Floats:
    ranked = np.sort(votes, axis=1)
    return cast(Floats, ranked[:, -1] - ranked[:, -2])


@pytest.mark.statistical
def test_what_is_published_is_an_upper_bound_nearly_always() -> None:
    """1,000 draws; false alarm 1e-4 each for the law (Kolmogorov-Smirnov) and the share below (binomial)."""
    release, gaps = SmoothedPrice(failure=0.05), gaps_of(rows_of(300))
    terms = {"classes": 10, "std": 25.0, "sensitivity": 1.0, "step": 1.0}
    levels = release._levels(10, 25.0, 1.0, 1.0)
    total = sum(levels[int(2 * gap)] for gap in gaps)
    scale = smooth_sensitivity(levels, (2 * gaps).astype(int), release.beta)
    drawn = np.array([release.publish(gaps, **terms, stream=Stream("price", i)) for i in range(1000)])  # type: ignore[arg-type]
    expected = stats.norm(total + scale * 8.0 * stats.norm.isf(0.05), scale * 8.0)
    assert (drawn >= 0).all() and expected.cdf(0) < 1e-3  # nothing to speak of was cut off
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-4
    assert stats.binom.sf((drawn < total).sum() - 1, 1000, 0.05) > 1e-4
    assert (drawn < total).mean() > 0.03  # the power to fail
    assert (drawn / GRID == np.round(drawn / GRID)).all()


def test_levels_are_the_prices_of_votes_of_that_gap() -> None:
    """All other classes as strong as the second: the same q, by hand (C - 1)/2 erfc(gap/(2 std))."""
    release = SmoothedPrice(order=4.0)
    levels = release._levels(5, 10.0, 1.0, 1.0)
    for gap in (0, 20, 33, 50, 90, 200):
        votes = np.array([[300.0, *[300.0 - gap] * 4]])
        assert levels[2 * gap] == pytest.approx(consensus_rdp(votes, 10.0, 1.0, [4.0])[0], rel=1e-4)
        assert levels[2 * gap] >= consensus_rdp(votes, 10.0, 1.0, [4.0])[0]
    assert (np.diff(levels) <= 0).all() and levels[-1] == levels[-2] < 1e-200
    assert 2 * erfc(33 / 20) == pytest.approx(4 * stats.norm.sf(33, scale=math.sqrt(200)), rel=1e-9)


def test_nothing_to_hide_needs_no_noise() -> None:
    """No query; or so much noise that agreement counts nowhere within reach of the votes."""
    terms = {"classes": 3, "sensitivity": 1.0, "step": 1.0, "stream": Stream(1)}
    assert SmoothedPrice().publish(np.zeros(0), std=25.0, **terms) <= GRID  # type: ignore[arg-type]
    loud = SmoothedPrice().publish(np.full(100, 3.0), std=1000.0, **terms)  # type: ignore[arg-type]
    assert loud == pytest.approx(100 * 8 / (2 * 1000**2), abs=2 * GRID)


@pytest.mark.parametrize(("unit", "std"), [("add-remove", 25.0), ("replace", 100.0), ("replace 3", 5.0)])
def test_five_thousand_answers_take_less_than_a_second(unit: str, std: float) -> None:
    sensitivity, step = UNITS[unit]
    votes = rows_of(5000, 750) / 3
    start = time.perf_counter()
    found = SmoothedPrice().publish(
        gaps_of(votes), classes=10, std=std, sensitivity=sensitivity, step=step, stream=Stream(2)
    )
    assert time.perf_counter() - start < 1
    assert found >= consensus_rdp(votes, std, sensitivity, [8.0])[0]  # with this stream, as nearly always


def test_the_epsilon_of_what_was_published_by_hand() -> None:
    """Canonne, Kamath and Steinke (2020): rdp + log(1 - 1/a) - log(a delta)/(a - 1).

    Of the number itself: beta 0.05, order 4, v = 1 - 3(e^0.1 - 1), c = 5 * 2.3263, z = 5/(1 + c(e^0.05 - 1)).
    """
    release, delta = SmoothedPrice(4.0, 0.05, 5.0, 0.01), 1e-3
    v, z = 1 - 3 * (math.exp(0.1) - 1), 5 / (1 + 5 * 2.3263478740408408 * (math.exp(0.05) - 1))
    assert release.event == SmoothDpEvent(0.05, pytest.approx(z, rel=1e-9))
    itself = 4 / (2 * v * z * z) - 0.05 - math.log(v) / 6
    by_hand = 0.7 + itself + math.log(1 - 1 / 4) - math.log(4 * delta) / 3
    assert smoothed_epsilon(0.7, release, delta) == pytest.approx(by_hand, rel=1e-9)
    # One order alone is no better than all of them.
    assert smoothed_epsilon(0.0, release, delta) >= price({release.event: 1}, delta).epsilon * (1 - 1e-9)


def test_agreement_makes_answers_cheaper_even_with_its_publication() -> None:
    """1,000 answers of 250 agents, noise 25: in the order, and far below the bound for all data."""
    votes, release, delta = rows_of(1000), SmoothedPrice(), 1e-3
    found = release.publish(gaps_of(votes), classes=10, std=25.0, sensitivity=1.0, step=1.0, stream=Stream(4))
    always = 1000 * release.order / (2 * 25.0**2)
    assert consensus_rdp(votes, 25.0, 1.0, [release.order])[0] < found < 0.5 * always
    assert smoothed_epsilon(found, release, delta) < 0.7 * 4.208  # exact for all data, by privacy loss distributions


@pytest.mark.parametrize(
    "wrong",
    [
        (1.0, 0.01, 1.0, 0.1),
        (6.0, 0.0, 1.0, 0.1),
        (6.0, 0.0912, 1.0, 0.1),
        (6.0, 0.01, 0.0, 0.1),
        (6.0, 0.01, 1.0, 0.5),
    ],
)
def test_settings_without_a_price_are_refused(wrong: tuple[float, float, float, float]) -> None:
    """-log(1 - 1/6)/2 = 0.09116 is the limit of beta at order 6."""
    with pytest.raises(ValueError, match="makes no sense"):
        SmoothedPrice(*wrong)
    assert SmoothedPrice(6.0, 0.0911).event.beta == 0.0911


def test_gaps_that_make_no_sense_are_refused() -> None:
    for gaps, classes, step in (
        (np.array([-1.0]), 3, 1.0),
        (np.zeros((2, 2)), 3, 1.0),
        (np.ones(2), 1, 1.0),
        (np.ones(2), 3, 0.0),
    ):
        with pytest.raises(ValueError, match="no price"):
            SmoothedPrice().publish(gaps, classes=classes, std=1.0, sensitivity=1.0, step=step, stream=Stream(1))
