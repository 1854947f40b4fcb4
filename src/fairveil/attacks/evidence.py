"""What right guesses prove: a lower bound on epsilon, from one run or several, with many canaries.

Of m canaries each is in by a fair coin of its own. Whoever has seen what a run gives away guesses for r of them whether
they are in, and W guesses are right. How many guesses, and by which rule, is fixed beforehand; for which canaries may
depend on what was seen. Canaries of several runs that share no randomness count together: one run of all of them.

Two bounds on P[W >= v] hold whatever the guesses are, if the run keeps its promise. Whoever guesses badly finds less,
never something wrong, but with the chance that is stated.

**At one delta** (`p_value`): Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (2023), Theorem
5.2. Under (epsilon, delta)-DP, with p = e^epsilon / (1 + e^epsilon),

    P[W >= v] <= beta + 2 m delta a,   beta = P[Bin(r, p) >= v],   a = max_i (P[Bin(r, p) >= v - i] - beta) / i.

**At all of them** (`refutes`): a plan promises more than one number. Its events have a price at every delta, and
all these prices hold at once. So, after Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run"
(2024): let F(x), increasing and concave, be the largest chance that an event of chance x for one neighbour may have
for the other. For a set T of numbers and canary j take the event E: the guess for j is u, and W would be in T if that
were right. It is an event of the output and of the other coins, which are independent of coin j. If coin j is u, W is
in T and the guess is right; else it is wrong and W + 1 is in T. So

    P[right, W in T | u]  <=  F(P[wrong, W + 1 in T | not u]).

The mean of that over j and u, and Jensen, give with p_i = P[W = i]

    sum_{i in T} i p_i  <=  m F( (1/m) sum_{i in T} (r - i + 1) p_{i-1} ).

With T = {t, t + 1, ...} for all t <= v that is a chain: so much chance at v and above needs so much just below, and so
on down. If all of it together is more than 1, W >= v was less likely than what was assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

LARGEST = 100.0  # epsilon beyond which none is looked for: so many guesses there never are
USUAL, SPARE = 8.0, 0.3


@dataclass(frozen=True)
class Curve:
    """Prices of the same releases: (epsilon, delta)-DP for each pair. All of them hold."""

    epsilon: tuple[float, ...]
    delta: tuple[float, ...]

    def scaled(self, factor: float) -> Curve:
        """If every epsilon were so many times as large."""
        return Curve(tuple(factor * epsilon for epsilon in self.epsilon), self.delta)

    def lines(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """F(x) is the least of these lines: intercepts and slopes.

        P[E] <= e^epsilon P'[E] + delta; and for the complement, 1 - P[E] >= e^-epsilon (1 - P'[E] - delta).
        """
        epsilon, delta = np.array(self.epsilon), np.array(self.delta)
        steep, flat = np.exp(np.minimum(epsilon, 600.0)), np.exp(-epsilon)
        return np.concatenate([delta, 1 - flat * (1 - delta)]), np.concatenate([steep, flat])


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The chance, or more, of so many right guesses if the run is (epsilon, delta)-DP.

    Args:
        canaries: m, all of them, guessed or not.
        guesses: r.
        correct: v.
    """
    _check(canaries, guesses, correct)
    right = 1 / (1 + math.exp(-epsilon))  # p
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if not delta or not correct:
        return min(1.0, beta)
    # P[Bin >= v - i] - beta = P[v - i <= Bin < v]
    fewer = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    allowed = float((fewer / np.arange(1, correct + 1)).max())  # a
    return min(1.0, beta + 2 * canaries * delta * allowed)


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, significance: float) -> float:
    """An epsilon that so many right guesses refute at this delta and significance, as large as can be; 0 if none.

    A run that is (epsilon, delta)-DP is so for every larger epsilon: what is refuted refutes all below it.
    """
    return _largest(lambda epsilon: p_value(canaries, guesses, correct, epsilon, delta) <= significance)


def refutes(canaries: int, guesses: int, correct: int, curve: Curve, significance: float) -> bool:
    """Whether so many right guesses are less likely than `significance` under all these prices together."""
    _check(canaries, guesses, correct)
    intercept, slope = curve.lines()
    # `right`, `wrong`: the sums of i p_i and of (r - i) p_i over what is at t and above; as little as there can be
    right, wrong = correct * significance, (guesses - correct) * significance
    for t in range(correct, 0, -1):
        with np.errstate(over="ignore", divide="ignore"):  # of epsilons in the hundreds
            needed = float(((right - canaries * intercept) / slope).max())
        if needed > wrong:
            right += (t - 1) * (needed - wrong) / (guesses - t + 1)
            wrong = needed
        if right + wrong > guesses:  # r times the chance of it all
            return True
    return False


def refuted_factor(canaries: int, guesses: int, correct: int, curve: Curve, significance: float) -> float:
    """The largest factor by which all epsilons could be multiplied and would still be refuted; 0 if none.

    Above 1 the prices themselves are refuted, and nothing is assumed for that but them. How far above says how wrong
    they are if the true curve has the same shape.
    """
    return _largest(lambda factor: refutes(canaries, guesses, correct, curve.scaled(factor), significance))


def gaussian_shift(epsilon: float, delta: float) -> float:
    """How far apart two normal laws of variance 1 are that are just (epsilon, delta)-indistinguishable.

    Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy" (2018), Theorem 8.
    """

    def leak(shift: float) -> float:
        upper, lower = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
        return float(stats.norm.cdf(upper) - math.exp(epsilon + stats.norm.logcdf(lower)) - delta)

    return float(optimize.brentq(leak, 1e-6, 100.0, xtol=1e-12))


def enough_guesses(canaries: int, epsilon: float, delta: float, curve: Curve, significance: float) -> int:
    """How many guesses there are to be, from public numbers alone: it is fixed before anything is seen.

    So many as promise the largest bound. But more, up to half of the canaries, if it takes more to refute, with all of
    them right, prices that are larger by a SPARE part, or at least these: an audit should be able to fail.
    """
    best = best_guesses(canaries, epsilon, delta, significance)
    more = np.unique(np.geomspace(best, max(best, canaries // 2), 40).astype(int)).tolist()
    for prices in (curve.scaled(1 + SPARE), curve) if curve.delta else ():
        for guesses in (best, *more):
            if refutes(canaries, guesses, guesses, prices, significance):
                return guesses
    return best


def best_guesses(canaries: int, epsilon: float, delta: float, significance: float) -> int:
    """How many guesses, an even number, promise the largest bound against a Gaussian mechanism of this price.

    Few guesses are surer, many count more. Of a larger price than USUAL an attack does not see all.
    """
    if canaries < 2:
        return canaries
    shift = gaussian_shift(min(epsilon, USUAL), min(max(delta, 1e-9), 0.1))
    half = np.unique(np.geomspace(1, canaries // 2, 60).round().astype(int))
    found = [_expected(canaries, 2 * int(k), shift, significance) for k in half]
    return 2 * int(half[int(np.argmax(found))]) if max(found) > 0 else 2 * (canaries // 2)


def _expected(canaries: int, guesses: int, shift: float, significance: float) -> float:
    """The bound, at no delta, that the mean number of right guesses gives, if the surest are guessed."""

    def missing(threshold: float) -> float:
        inside, outside = stats.norm.sf(threshold - shift), stats.norm.sf(threshold)
        return float((inside + outside) / 2 - guesses / 2 / canaries)

    threshold = float(optimize.brentq(missing, -100.0, 200.0))
    inside, outside = float(stats.norm.sf(threshold - shift)), float(stats.norm.sf(threshold))
    return lower_bound(canaries, guesses, math.floor(guesses * inside / (inside + outside)), 0.0, significance)


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest number, up to LARGEST, below which all are refuted as far as bisection sees."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 0.125
    while refuted(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return low
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _check(canaries: int, guesses: int, correct: int) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} right of {guesses} guesses about {canaries} canaries make no sense")
