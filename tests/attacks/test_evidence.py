"""What right guesses prove."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog

from fairveil.attacks.evidence import (
    Curve,
    best_guesses,
    gaussian_shift,
    lower_bound,
    p_value,
    refuted_factor,
    refutes,
)


def gaussian_delta(epsilon: np.ndarray, shift: float) -> np.ndarray:
    """Delta of N(shift, 1) against N(0, 1), by integration: no closed form is trusted here."""
    x = np.linspace(-12, 12 + shift, 200_001)
    above = stats.norm.pdf(x - shift)[None] - np.exp(epsilon)[:, None] * stats.norm.pdf(x)[None]
    return np.asarray(np.trapezoid(np.maximum(above, 0.0), x, axis=1))


def gaussian_curve(shift: float) -> Curve:
    epsilon = np.concatenate([[0.0], np.geomspace(0.01, 12, 40)])
    return Curve(tuple(epsilon), tuple(gaussian_delta(epsilon, shift)))


# ---- at one delta -----------------------------------------------------------------------------------


def test_the_p_value_is_that_of_the_formula_written_out() -> None:
    """Steinke, Nasr and Jagielski (2023), Theorem 5.2, by sums of binomial coefficients in exact integers."""
    m, r, v, epsilon, delta = 50, 7, 6, 0.8, 1e-3
    p = math.exp(epsilon) / (1 + math.exp(epsilon))

    def at_least(k: int) -> float:
        return math.fsum(math.comb(r, j) * p**j * (1 - p) ** (r - j) for j in range(max(k, 0), r + 1))

    beta = at_least(v)
    a = max((at_least(v - i) - beta) / i for i in range(1, m + 1))
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(beta + 2 * m * delta * a, rel=1e-12)


def test_without_delta_it_is_the_tail_of_a_binomial_law() -> None:
    assert p_value(10, 4, 4, 0.0, 0.0) == pytest.approx(1 / 16)
    assert p_value(10, 3, 0, 1.0, 0.1) == 1.0


@pytest.mark.parametrize(("m", "r", "v", "delta"), [(1000, 200, 190, 1e-5), (100, 20, 20, 0.0), (1000, 500, 300, 1e-6)])
def test_the_bound_is_where_the_p_value_is_the_significance(m: int, r: int, v: int, delta: float) -> None:
    found = lower_bound(m, r, v, delta, 0.01)
    assert p_value(m, r, v, found, delta) <= 0.01 < p_value(m, r, v, found + 1e-3, delta)


def test_all_right_is_worth_no_more_than_so_many_guesses_can_show() -> None:
    """All of r right: p^r = significance, so epsilon = -ln(significance^(-1/r) - 1)."""
    assert lower_bound(100, 100, 100, 0.0, 1e-3) == pytest.approx(-math.log(1e-3 ** (-1 / 100) - 1), abs=1e-4)


def test_guesses_by_chance_show_nothing() -> None:
    assert lower_bound(1000, 200, 100, 1e-5, 0.05) == 0.0
    assert refuted_factor(1000, 200, 100, gaussian_curve(1.0), 0.05) == 0.0


@pytest.mark.parametrize(("m", "r", "v"), [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_more_guesses_than_canaries_are_refused(m: int, r: int, v: int) -> None:
    with pytest.raises(ValueError, match="make no sense"):
        p_value(m, r, v, 1.0, 0.0)
    with pytest.raises(ValueError, match="make no sense"):
        refutes(m, r, v, gaussian_curve(1.0), 0.05)


# ---- at all deltas ------------------------------------------------------------------------------------


def largest_chance(m: int, r: int, v: int, curve: Curve) -> float:
    """The largest P[W >= v] that the inequalities for all T = {t, ...} allow: a linear program in P[W = i].

    The lines of F are made here from (epsilon, delta), one constraint for each line and t.
    """
    lines = [(d, math.exp(e)) for e, d in zip(curve.epsilon, curve.delta, strict=True)]
    lines += [(1 - math.exp(-e) * (1 - d), math.exp(-e)) for e, d in zip(curve.epsilon, curve.delta, strict=True)]
    i, above, limit = np.arange(r + 1), [], []
    for t, (intercept, slope) in itertools.product(range(1, r + 1), lines):
        row = np.where(i >= t, i, 0) - slope * np.where(i >= t - 1, r - i, 0)
        above.append(row.astype(float))
        limit.append(m * intercept)
    found = linprog(
        -(i >= v).astype(float), A_ub=np.array(above), b_ub=limit, A_eq=np.ones((1, r + 1)), b_eq=[1], bounds=(0, 1)
    )
    return float(-found.fun)


@pytest.mark.parametrize("seed", range(25))
def test_the_chain_refutes_just_what_a_linear_program_finds_too_unlikely(seed: int) -> None:
    random = np.random.default_rng(seed)
    m = int(random.integers(10, 200))
    r = int(random.integers(4, min(m, 40) + 1))
    v = int(random.integers(2 * r // 3, r + 1))
    if seed % 3:
        curve = gaussian_curve(float(random.uniform(0.2, 2.0)))
    else:
        curve = Curve((float(random.uniform(0.2, 2.0)),), (float(random.choice([0.0, 1e-4, 1e-2])),))
    chance = largest_chance(m, r, v, curve)
    if chance < 0.999:
        assert refutes(m, r, v, curve, chance * 1.01 + 1e-9)
    assert not refutes(m, r, v, curve, chance * 0.99)


def test_with_pure_privacy_randomized_response_attains_the_bound() -> None:
    """Each coin is told rightly with p = e^epsilon / (1 + e^epsilon), independently: W is binomial, and that is the
    likeliest there can be. The chain allows no less, and hardly more."""
    epsilon, r = 1.2, 60
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    for v in (50, 54, 57):
        true = float(stats.binom.sf(v - 1, r, p))
        assert not refutes(r, r, v, Curve((epsilon,), (0.0,)), true * 0.999)
        assert refutes(r, r, v, Curve((epsilon,), (0.0,)), true * 1.5)


@pytest.mark.statistical
def test_sound_gaussian_releases_are_not_refuted() -> None:
    """2,000 audits of a Gaussian mechanism by its true curve, at significance 5%: at most 5% are refuted.

    False-alarm rate of this test: below 1e-6, if the bound holds (Bin(2000, 0.05) above 150).
    """
    shift, m, r, random = 1.0, 200, 60, np.random.default_rng(5)
    curve = gaussian_curve(shift)
    wrong = 0
    least = next(v for v in range(r // 2, r + 1) if refutes(m, r, v, curve, 0.05))
    for _ in range(2000):
        coins = random.random(m) < 0.5
        seen = coins * shift + random.standard_normal(m) - shift / 2
        surest = np.argsort(-np.abs(seen))[:r]
        wrong += int(((seen[surest] > 0) == coins[surest]).sum()) >= least
    assert wrong <= 150


def test_a_factor_above_one_is_what_refutes() -> None:
    curve = gaussian_curve(0.5)
    for v in range(60, 101, 5):
        factor = refuted_factor(1000, 100, v, curve, 1e-3)
        assert (factor >= 1) == refutes(1000, 100, v, curve, 1e-3)


def test_with_one_price_at_no_delta_both_bounds_are_close() -> None:
    """The chain with T = {t, ...} and the binomial tail are two bounds of the same."""
    m = r = 200
    chain = refuted_factor(m, r, 170, Curve((1.0,), (0.0,)), 1e-3)
    assert chain == pytest.approx(lower_bound(m, r, 170, 0.0, 1e-3), rel=0.05)


# ---- guesses, and what they are worth -------------------------------------------------------------------


def test_the_shift_of_a_gaussian_mechanism_by_integration() -> None:
    for epsilon, delta in ((2.0, 1e-5), (8.0, 1e-3), (0.5, 1e-4)):
        assert gaussian_delta(np.array([epsilon]), gaussian_shift(epsilon, delta))[0] == pytest.approx(delta, rel=1e-3)


def test_how_many_guesses_depends_on_public_numbers_alone() -> None:
    for m, epsilon in itertools.product((2, 10, 1000, 5000), (0.1, 1.0, 8.0, 100.0, math.inf)):
        guesses = best_guesses(m, epsilon, 1e-5, 1e-3)
        assert 1 <= guesses <= m
        assert guesses == best_guesses(m, epsilon, 1e-5, 1e-3)
    assert best_guesses(1, 1.0, 1e-5, 1e-3) == 1
