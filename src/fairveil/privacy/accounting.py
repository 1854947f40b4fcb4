"""What releases cost, and how little noise a budget allows: events -> epsilon, epsilon -> noise multiplier.

A multiset of events is ONE composition priced at ONE delta. Two prices exist, and each is an upper bound on the
true epsilon: Renyi ("rdp") and privacy loss distributions ("pld"), both computed by Google's dp_accounting.
"tightest" reports the smaller. Under "replace" only "pld" holds: dp_accounting's RDP prices a Gaussian release
as if the record had been removed, at half the sensitivity. Prices and calibrations are cached on disk.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import optimize, special

from fairveil.cache import kept
from fairveil.errors import UserError

Accountant = Literal["rdp", "pld", "tightest"]
Adjacency = Literal["add-remove", "replace"]
Events = Mapping[dpa.DpEvent, int]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_NUMBERS = f"2/{version('dp-accounting')}"  # raise the first whenever a price could come out differently
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6  # calibration looks nowhere else
# Without sampling the first is enough. With it, nobody has proved that removal is the worse under composition.
_DIRECTIONS = {"add-remove": [AdjacencyType.REMOVE, AdjacencyType.ADD], "replace": [AdjacencyType.REPLACE]}
# This warning says that an order was left out of the search for the best: nothing a user could or should mend.
logging.getLogger("absl").addFilter(lambda record: "_compute_log_a_frac failed" not in str(record.msg))


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SelectionDpEvent(dpa.DpEvent):
    """One choice by the exponential mechanism, of *bounded range* epsilon.

    The log-ratio of the probabilities of any two outcomes moves by at most `epsilon` between neighbours, under whatever
    adjacency: the mechanism sees to that (Gumbel of scale Delta/epsilon for a monotone score, else 2*Delta/epsilon).
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class MetricDpEvent(dpa.DpEvent):
    """One release that is epsilon-d-private: values a distance apart are indistinguishable up to epsilon times that.

    `distance` is the largest between values that the guarantee is to hide from each other, in the same unit. It is the
    mechanism that bounds it, and the statement that says for whom; a price is for that distance.
    """

    epsilon: float
    distance: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SmoothDpEvent(dpa.DpEvent):
    """One number released with Gaussian noise whose scale follows the data, smoothly.

    The standard deviations for neighbours, under whatever adjacency, are within a factor e^beta of each other, and
    their means no more than the smaller of these divided by `noise_multiplier` apart: the mechanism sees to that. Only
    the Renyi accountant has a price for it.
    """

    beta: float
    noise_multiplier: float


@dataclass(frozen=True)
class Price:
    """An (epsilon, delta) guarantee, the relation between neighbours it is for, and which accountant found it.

    "sum": no accountant, the epsilons of metric privacy were added up; delta is then 0.
    """

    epsilon: float
    delta: float
    accountant: Literal["rdp", "pld", "sum"]
    adjacency: Adjacency


def price(
    events: Events, delta: float, *, adjacency: Adjacency = "add-remove", accountant: Accountant = "tightest"
) -> Price:
    """The epsilon of all events composed, at `delta`: always an upper bound, infinity if there is none.

    Args:
        events: event -> how often. Gaussian, Poisson-sampled Gaussian, selection, smooth, no-op and non-private events,
            and compositions of them (a ComposedDpEvent can only be a key if it holds a tuple); or metric events alone.
        delta: in (0, 1). Metric events need none.
        adjacency: between neighbours a unit is added or removed, or replaced by another.
        accountant: "tightest" takes the smaller of both prices; "rdp" is refused (UserError) under "replace".
    """
    if metric := _metric(events):
        return Price(math.fsum(n * e.epsilon * e.distance for e, n in metric), 0.0, "sum", adjacency)
    certain = all(isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent) for event, n in events.items() if n)
    if delta or not certain:  # nothing, or everything, is given away at any delta
        _check(1.0, delta, adjacency, accountant)
    return _price(_compose(events.items()), float(delta), adjacency, accountant)


def calibrate(
    events_at: Callable[[float], Events],
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency = "add-remove",
    accountant: Accountant = "tightest",
) -> float:
    """The smallest noise multiplier (from 0.01 on) whose events cost at most `epsilon`, to about 0.1%.

    Never too little noise: for the z returned, `price(events_at(z), ...).epsilon <= epsilon` holds as floats.

    Args:
        events_at: noise multiplier z -> all events; what they cost must not rise with z.
        epsilon: the budget; a UserError if it is not positive, or used up by events that do not depend on z.
        delta: in (0, 1).
        adjacency: as in `price`; so is the accountant.
    """
    if _metric(events_at(1.0)):  # whose epsilon falls as 1/z
        _check_range("epsilon", epsilon, math.inf, 5.0)
        z = price(events_at(1.0), delta).epsilon / epsilon
        while price(events_at(z), delta).epsilon > epsilon:  # by rounding
            z *= 1 + 2.0**-50
        return z
    _check(epsilon, delta, adjacency, accountant)

    def compose(z: float) -> _Composition:
        return _compose(events_at(z).items())

    def cost(z: float) -> float:
        return _price(compose(z), float(delta), adjacency, accountant).epsilon

    def solve() -> list[float]:
        return [_solve(lambda x: _estimate(compose(math.exp(x)), delta, adjacency), cost, float(epsilon))]

    # A function has no name: its events at a few multipliers stand for it. Functions that agree there and differ
    # elsewhere do no harm, because what was solved before is priced again with the events at hand.
    probes = [compose(z) for z in (1.0, 1.7, 3.1)]
    (z,) = kept((_NUMBERS, "calibrate", *probes, float(epsilon), float(delta), adjacency, accountant), solve)
    return z if cost(z) <= epsilon else solve()[0]


def calibrate_many(
    requests: Iterable[Callable[[float], Events]], epsilon: float, delta: float, **terms: Any
) -> list[float]:
    """`calibrate` for each unit (client, say) on the same terms; equal requests are solved once: they are cached."""
    return [calibrate(events_at, epsilon, delta, **terms) for events_at in requests]


def _metric(events: Events) -> list[tuple[MetricDpEvent, int]]:
    """The metric events and how often, if there are any: they protect something else than others do."""
    found = [(event, count) for event, count in events.items() if isinstance(event, MetricDpEvent) and count]
    if found and len(found) < sum(map(bool, events.values())):
        raise dpa.UnsupportedEventError("metric privacy does not add up with what protects records or clients.")
    for event, count in found:
        if not (event.epsilon >= 0 and event.distance >= 0 and count > 0):  # refuses NaN as well
            raise ValueError(f"{event} cannot happen {count} times")
    return found


def _check_range(name: str, value: float, limit: float, fix: float) -> None:
    if not 0 < value < limit:  # refuses NaN as well
        raise UserError(
            f"privacy.{name} = {value} is out of range.",
            f"It must lie strictly between 0 and {limit}: no noise reaches 0, and {limit} promises nothing.",
            f"privacy.{name} = {fix}",
        )


def _check(epsilon: float, delta: float, adjacency: Adjacency, accountant: Accountant) -> None:
    _check_range("epsilon", epsilon, math.inf, 5.0)
    _check_range("delta", delta, 1, 1e-5)
    if accountant == "rdp" and adjacency == "replace":
        raise UserError(
            'privacy.accountant = "rdp" does not go with privacy.adjacency = "replace".',
            "Replacing a record moves a clipped sum twice as far as removing one, but the Renyi accountant\n"
            "prices it like a removal: it would print an epsilon that was not proved.",
            'privacy.accountant = "pld"',
        )


ORDERS = tuple(1 + 2 ** (k / 4) for k in range(-8, 20)) + tuple(range(32, 513, 32))


def rdp_curve(event: dpa.DpEvent) -> Floats:
    """The Renyi divergence of one event at ORDERS, add/remove. Curves of composed events add up: a running total."""
    what = _compose([(event, 1)])
    return np.array([_rdp_at(what, order) for order in ORDERS])


def rdp_epsilon(curve: Floats, delta: float) -> float:
    """The epsilon of a (summed) curve: cheap, and an upper bound like every price."""
    return float(compute_epsilon(ORDERS, curve, delta)[0]) if np.isfinite(curve).any() else math.inf


class _Composition(NamedTuple):
    """All events in normal form: the same events give the same value, however they were nested."""

    precision: float  # sum of 1/z^2 over Gaussian releases: k of them are exactly one with z/sqrt(k)
    sampled: tuple[tuple[float, float, int], ...]  # (sample rate q, z, count)
    selections: tuple[tuple[float, int], ...]  # (epsilon, count)
    smooth: tuple[tuple[float, float, int], ...]  # (beta, z, count), beta > 0: with none it is a Gaussian release


def _compose(events: Iterable[tuple[dpa.DpEvent, int]]) -> _Composition:
    precisions: list[float] = [0.0]
    sampled: Counter[tuple[float, float]] = Counter()
    selections: Counter[float] = Counter()
    smooth: Counter[tuple[float, float]] = Counter()
    todo = list(events)
    while todo:
        event, count = todo.pop()
        if count < 0 or count != int(count):
            raise ValueError(f"{event} cannot happen {count} times")
        if count == 0 or isinstance(event, dpa.NoOpDpEvent):
            continue
        if isinstance(event, dpa.SelfComposedDpEvent):
            todo.append((event.event, event.count * count))
        elif isinstance(event, dpa.ComposedDpEvent):
            todo.extend((part, count) for part in event.events)
        elif isinstance(event, dpa.GaussianDpEvent):
            z = _within(event.noise_multiplier, math.inf, event)
            precisions.append(count / z / z if z else math.inf)
        elif isinstance(event, dpa.PoissonSampledDpEvent):
            # One draw is one event: whatever is released from it has one effective multiplier.
            q, inner = _within(event.sampling_probability, 1, event), _compose([(event.event, 1)])
            if inner.sampled or inner.selections or inner.smooth:
                raise dpa.UnsupportedEventError(f"{event}: only Gaussian releases can be sampled.")
            if q == 1 or (q and inner.precision == math.inf):
                precisions.append(count * inner.precision)
            elif q and inner.precision:
                sampled[q, 1 / math.sqrt(inner.precision)] += int(count)
        elif isinstance(event, SelectionDpEvent):
            selections[_within(event.epsilon, 1e300, event)] += int(count)
        elif isinstance(event, SmoothDpEvent):
            beta, z = _within(event.beta, 10, event), _within(event.noise_multiplier, math.inf, event)
            if beta and z:
                smooth[beta, z] += int(count)
            else:
                precisions.append(count / z / z if z else math.inf)
        elif isinstance(event, dpa.NonPrivateDpEvent):
            precisions.append(math.inf)  # no noise, no guarantee
        else:
            raise dpa.UnsupportedEventError(f"{event} has no price here.")
    steps, choices = [(q, z, n) for (q, z), n in sampled.items()], [(e, n) for e, n in selections.items() if e]
    others = [(beta, z, n) for (beta, z), n in smooth.items()]
    return _Composition(math.fsum(precisions), tuple(sorted(steps)), tuple(sorted(choices)), tuple(sorted(others)))


def _within(value: float, high: float, event: dpa.DpEvent) -> float:
    if not 0 <= value <= high:  # refuses NaN as well
        raise ValueError(f"{event}: {value} is not within [0, {high:g}]")
    return float(value)


@np.errstate(all="ignore")
def _price(what: _Composition, delta: float, adjacency: Adjacency, accountant: Accountant) -> Price:
    def compute() -> list[float]:
        rdp = _rdp_epsilon(what, delta) if accountant != "pld" and adjacency == "add-remove" else math.inf
        return [rdp, _pld_epsilon(what, delta, adjacency) if accountant != "rdp" else math.inf]

    rdp = pld = what.precision
    if rdp < math.inf and any(what):
        rdp, pld = kept((_NUMBERS, "price", what, delta, adjacency, accountant), compute)
    return Price(min(rdp, pld), delta, "rdp" if rdp < pld or accountant == "rdp" else "pld", adjacency)


def _rdp_epsilon(what: _Composition, delta: float) -> float:
    """The smallest bound over all orders; each is valid, and downhill is the way (it falls, then rises)."""

    @functools.cache
    def bound(log_order: float) -> float:
        order = 1 + 2.0**log_order if log_order < 5 else 1 + round(2**log_order)  # a large one must be an integer
        return float(compute_epsilon([order], [_rdp_at(what, order)], delta)[0])

    best = 0.0  # order 2; orders of 2,000 and more are slow, and of use for tiny prices only
    for beta, *_ in what.smooth:  # which has no price at orders from 1 + 1/expm1(2 beta) on
        best = min(best, math.ceil(-math.log2(math.expm1(2 * beta))) - 1.0)
    for step in (1.0, 0.25, 0.05):
        while best < 11 and bound(nearer := min(best - step, best + step, key=bound)) < bound(best):
            best = nearer
    return bound(best)


def _rdp_at(what: _Composition, order: float) -> float:
    """The Renyi divergence at one order; infinite where it cannot be had."""
    accountant = RdpAccountant([order])
    for q, z, count in what.sampled:
        accountant.compose(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z)), count)
    rdp = float(accountant.rdp[0]) + order * what.precision / 2
    # Bounded range epsilon is epsilon^2/8-zCDP (Cesar and Rogers 2021); it is also epsilon-DP.
    rdp += sum(count * min(order * e * e / 8, e) for e, count in what.selections)
    rdp += sum(count * smooth_rdp(SmoothDpEvent(beta, z), order) for beta, z, count in what.smooth)
    # What rounding makes negative would be priced at 0: we add more than its error (1e-15 a step, by mpmath).
    rdp = max(rdp, 0.0) * (1 + 1e-12) + 1e-12 * sum(count for *_, count in what.sampled + what.smooth)
    return math.inf if math.isnan(rdp) else rdp


def smooth_rdp(event: SmoothDpEvent, order: float) -> float:
    """The Renyi divergence of a smooth event at one order above 1; infinite from order 1 + 1/expm1(2 beta) on.

    Between N(0, r^2) and N(t, 1) it is order t^2/(2v) - log r - log(v)/(2(order-1)), v = order - (order-1) r^2, for
    v > 0 (Gil, Alajaji and Linder 2013). Here e^-beta <= r <= e^beta and t <= min(r, 1)/z. The term with t rises with
    r; the others have their minimum at r = 1, and are larger at e^beta than at e^-beta. So r = e^beta, t = 1/z is the
    worst, and this is exact. (Papernot et al. 2018, Theorem 23, print order e^(2 beta)/z^2 for the term with t, which
    is too little where 2 order beta comes near 1.)
    """
    beta, z = event.beta, event.noise_multiplier
    v = 1 - (order - 1) * math.expm1(2 * beta)
    if v <= 0 or z == 0:
        return math.inf
    return order / (2 * v) / z / z + max(0.0, -beta - math.log(v) / (2 * (order - 1)))


class _Step(NamedTuple):
    """One kind of step: its privacy curve, the range where that is not trivial, and the variance of its loss."""

    curve: Callable[[Floats], Floats]  # x -> delta(x), the hockey-stick divergence at e^x
    low: float
    high: float
    times: int
    variance: float


def _pld_epsilon(what: _Composition, delta: float, adjacency: Adjacency) -> float:
    if what.smooth:
        return math.inf
    # Rounding moves the curve of a step, and the FFT of its loss, by some 1e-16 in delta (measured against long
    # doubles), and that adds up over the steps. So we price at a delta that is smaller by more than that.
    steps = 1 + sum(n for *_, n in what.sampled) + sum(n for *_, n in what.selections)
    target = delta - 2e-15 * steps
    if target < delta / 2:
        return math.inf
    epsilon, spare = 0.0, 1e-6 * delta  # tails of this mass are cut off, and counted as infinite loss
    for direction in _DIRECTIONS[adjacency][: 2 if what.sampled else 1]:
        kinds = _steps(what, direction, math.log(spare / steps))
        interval = _interval(kinds)
        if not interval < 1:  # losses of 100,000 and more: no number means anything, and floats overflow
            return math.inf
        pmfs = []
        for kind in kinds:
            low, high = math.floor(kind.low / interval), math.ceil(kind.high / interval)
            curve = kind.curve(np.arange(low, high + 1, dtype=np.float64) * interval)
            pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, curve)
            if kind.times * (pmf.get_delta_for_epsilon(-math.inf) - 1) > 1:  # more mass than 1: all rounding
                return math.inf
            pmfs.append(_repeat(pmf.to_dense_pmf(), kind, spare))
        pmf = functools.reduce(lambda a, b: a.compose(b, spare), pmfs)
        epsilon = max(epsilon, float(pmf.get_epsilon_for_delta(target)))
    return epsilon * (1 + 1e-6)  # the library adds up its grid of losses float by float


def _repeat(pmf: pld_pmf.DensePLDPmf, kind: _Step, spare: float) -> pld_pmf.DensePLDPmf:
    """`kind.times` of a step. (Dense: the library's sparse form first computes size**times, an endless integer.)"""
    if kind.times * kind.variance < 4 * (kind.high - kind.low) ** 2:
        return pmf if kind.times == 1 else pmf.self_compose(kind.times, spare)
    # The library bounds the tails of a sum by exponential moments of an order not below 1/size. Where the sum is much
    # wider than a step, that leaves arrays many times too long: so we go by way of sqrt(times).
    outer, rest = divmod(kind.times, inner := math.isqrt(kind.times))
    whole = pmf.self_compose(inner, spare / outer).self_compose(outer, spare)
    return whole.compose(pmf.self_compose(rest, spare), spare) if rest else whole


def _steps(what: _Composition, direction: AdjacencyType, log_tail: float) -> list[_Step]:
    replace, steps = direction == AdjacencyType.REPLACE, []
    for q, z, times in what.sampled:
        loss = GaussianPrivacyLoss(z, 1, True, log_tail, q, direction)
        ends, variance = loss.connect_dots_bounds(), _variance(q, z, replace)
        steps.append(_Step(loss.get_delta_for_epsilon, ends.epsilon_lower, ends.epsilon_upper, times, variance))
    if what.precision:
        shift = (2 if replace else 1) * math.sqrt(what.precision)  # of the mean, in standard deviations
        mean, reach = shift**2 / 2, -shift * float(special.ndtri_exp(log_tail))
        steps.append(_Step(functools.partial(_gaussian_curve, shift), mean - reach, mean + reach, 1, shift**2))
    for e, times in what.selections:
        steps.append(_Step(functools.partial(_selection_curve, e), -e, e, times, min(e * e / 3, 4.0)))
    return steps


def _gaussian_curve(shift: float, x: Floats) -> Floats:
    """delta(x) of N(shift, 1) against N(0, 1) (Balle and Wang 2018); the library's takes a Python call a point."""
    below = np.exp(x + special.log_ndtr(-x / shift - shift / 2))
    return np.clip(special.ndtr(shift / 2 - x / shift) - below, 0, 1)


def _selection_curve(epsilon: float, x: Floats) -> Floats:
    """delta(x) of a choice of bounded range epsilon.

    The largest over all two-point pairs with losses t and t - epsilon (at t = (x + epsilon)/2); one of those dominates
    any pair of bounded range (Dong, Durfee and Rogers 2020). Convex in e^x, so itself the curve of a pair: it composes.
    """
    inside = np.expm1((np.clip(x, -epsilon, epsilon) - epsilon) / 2) ** 2 / -math.expm1(-epsilon)
    return np.where(x < -epsilon, -np.expm1(x), inside)


def _variance(q: float, z: float, replace: bool) -> float:
    """The variance of the privacy loss of a sampled Gaussian, roughly: for grids and first guesses."""
    nodes = np.linspace(-8, 8, 321)
    density = np.exp(-(nodes**2) / 2)
    x, weights = np.concatenate([z * nodes, z * nodes + 1]), np.concatenate([(1 - q) * density, q * density])
    loss = np.logaddexp(np.log1p(-q), np.log(q) + (x - 0.5) / z**2)
    if replace:
        loss -= np.logaddexp(np.log1p(-q), np.log(q) - (x + 0.5) / z**2)
    return float(np.cov(loss, aweights=weights))


def _interval(kinds: Sequence[_Step]) -> float:
    """The grid of privacy losses.

    Rounding a loss to its two neighbours on the grid adds h^2/6 to the variance of each step, and epsilon grows by no
    more than the share of that in the whole: we allow 1e-3 (about 0.06% of epsilon). A fixed grid would be far too
    coarse for many small steps. (The losses of selections are bounded and hardly count: others make the tail.)
    """
    steps = sum(kind.times for kind in kinds)
    variance = sum(kind.times * kind.variance * (1e-4 if kind.high == -kind.low else 1) for kind in kinds)
    width = sum(kind.high - kind.low + 17 * math.sqrt(kind.times * kind.variance) for kind in kinds)
    widest = max(kind.high - kind.low for kind in kinds)
    # 20,000 points cost next to nothing; the limits are what a second and 300 MB allow, and rounding (1e-16 a point).
    finest = max(width / 500_000, widest / 100_000, 1e-12 * steps)
    return max(finest, min(width / 20_000, math.sqrt(6e-3 * variance / steps)))


@np.errstate(all="ignore")
def _estimate(what: _Composition, delta: float, adjacency: Adjacency) -> float:
    """The log of what a normally distributed loss would cost; its mean is half its variance."""
    variance = 1e-300 + sum(kind.times * kind.variance for kind in _steps(what, _DIRECTIONS[adjacency][0], -30.0))
    return math.log(variance / 2 + max(float(special.ndtri(1 - delta)), 0.1) * math.sqrt(variance))


def _solve(estimate: Callable[[float], float], cost: Callable[[float], float], epsilon: float) -> float:
    """The root of cost(z) = epsilon, from above: secants in the logarithms, first guess and slope by the estimate."""
    low, high, goal, best, attempt = math.log(_LEAST_NOISE), math.log(_MOST_NOISE), math.log(epsilon), None, 0
    x = optimize.brentq(lambda x: estimate(x) - goal, low, high) if estimate(low) > goal > estimate(high) else 0.0
    slope, before = (estimate(x + 0.01) - estimate(x)) / 0.01, (0.0, math.inf)
    while high - low > 5e-4:
        spent, attempt = cost(z := math.exp(x)), attempt + 1
        gap = math.log(spent) - goal if 0 < spent < math.inf else math.copysign(math.inf, spent - epsilon)
        if math.isfinite(before[1] - gap) and abs(before[0] - x) > 1e-6:
            slope = (before[1] - gap) / (before[0] - x)
        slope, before = min(slope, -1e-2), (x, gap)
        window = min(2e-3, -1e-3 * slope)  # 0.1% less noise, or 0.2% more epsilon
        if spent <= epsilon and gap >= -window:
            return z
        low, high, best = (x, high, best) if spent > epsilon else (low, x, z)
        x -= (gap + 0.4 * window) / slope
        if best is None and x > high:
            x = high
        elif not low < x < high or attempt % 4 == 0:
            x = (low + high) / 2
    if best is None:
        floor = cost(_MOST_NOISE)
        raise UserError(
            f"privacy.epsilon = {epsilon:g} is used up before any noise can help.",
            f"The releases whose noise is fixed (private selections, column statistics) cost {floor:.4g} on their own\n"
            f"({floor / epsilon:.0%} of the budget). No noise multiplier, however large, makes up for it.",
            f"a budget well above {floor:.4g}, fewer or noisier selections, or a larger data.options.statistics_noise",
        )
    return best
