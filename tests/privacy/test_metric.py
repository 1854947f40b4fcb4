"""Metric privacy: the law of the noise, the bound by brute force on pairs of local models, and prices by hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, special, stats
from scipy.optimize import brentq
from torch import Tensor

from fairveil.privacy import metric
from fairveil.privacy.accounting import MetricDpEvent, price
from fairveil.privacy.mechanisms import Client, canonical, from_canonical, without_leaks
from fairveil.privacy.metric import GaussianBall, LaplaceBall, LaplaceStep, Sanitiser, gamma, laplace, sanitised
from fairveil.streams import Stream

Floats = NDArray[np.float64]
BALLS: list[type[LaplaceBall] | type[GaussianBall]] = [LaplaceBall, GaussianBall]


def holder(models: Tensor, *key: int | str) -> Client:
    return cast(Client, SimpleNamespace(inputs={"models": models}, key=key, noise=lambda: Stream("metric", *key)))


def sent(mechanism: Sanitiser, local: Tensor, models: Tensor, chosen: int = 0, first: int = 0) -> Tensor:
    """What clients with these local models (clients, n) send, who all started from one hypothesis."""
    clients = [holder(models, first + i) for i in range(len(local))]
    found = sanitised(mechanism, clients, [chosen] * len(clients), local)
    for client, (release, _) in zip(clients, found, strict=True):
        assert release.mechanism == mechanism and release.key == client.key and release.value.keys() == {"model"}
    return torch.stack([cast(Tensor, release.value["model"]) for release, _ in found])


def many(mechanism: Sanitiser, step: list[float], count: int, first: int) -> Floats:
    """`count` releases of one local model (count, n), each with noise of its own; the hypothesis is 0."""
    models = torch.zeros(1, mechanism.dimension, dtype=torch.float64)
    return sent(mechanism, torch.tensor([step] * count, dtype=torch.float64), models, first=first).numpy()


def noise(count: int, dimension: int, *key: int | str) -> Floats:
    """Laplace noise of epsilon 1 (count, n)."""
    return laplace([Stream("noise", *key, i) for i in range(count)], dimension).numpy()


# ---- the law of the noise --------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("dimension", [1, 2, 3, 11, 1000])
def test_the_length_of_the_noise_is_a_gamma_variable(dimension: int) -> None:
    """Kolmogorov-Smirnov on 5,000 values against Gamma(n); false alarm 1e-4 each.

    Gamma(n + 1/2) is told apart, so that the test has the power to fail; at n = 1000 it differs by 1% of a deviation.
    """
    length = np.linalg.norm(noise(5000, dimension, "length"), axis=1)
    assert stats.kstest(length, stats.gamma(dimension).cdf).pvalue > 1e-4
    if dimension < 100:
        assert stats.kstest(length, stats.gamma(dimension + 0.5).cdf).pvalue < 1e-4


@pytest.mark.statistical
def test_in_one_dimension_it_is_the_laplace_distribution() -> None:
    """Kolmogorov-Smirnov on 10,000 values; false alarm 1e-4."""
    assert stats.kstest(noise(10_000, 1, "one")[:, 0], "laplace").pvalue > 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("dimension", [1, 2, 3, 11, 200])
def test_a_coordinate_has_the_variance_n_plus_1(dimension: int) -> None:
    """CLT on 5,000 values of the first and of the last coordinate; false alarm 1e-5 each.

    By hand: with R ~ Gamma(n) and u uniform on the sphere E x^2 = E R^2 / n = n + 1, and
    E x^4 = E R^4 * E u^4 = n(n+1)(n+2)(n+3) * 3 / (n(n+2)) = 3 (n+1)(n+3).
    """
    n, rows = dimension, noise(5000, dimension, "variance")
    deviation = math.sqrt((3 * (n + 1) * (n + 3) - (n + 1) ** 2) / len(rows))
    for column in (0, n - 1):
        assert abs(np.mean(rows[:, column] ** 2) - (n + 1)) < stats.norm.isf(0.5e-5) * deviation
        assert abs(rows[:, column].mean()) < stats.norm.isf(0.5e-5) * math.sqrt((n + 1) / len(rows))


@pytest.mark.statistical
@pytest.mark.parametrize("dimension", [2, 3, 11])
def test_its_direction_is_uniform_and_says_nothing_of_its_length(dimension: int) -> None:
    """5,000 values; false alarm below 1e-3 for all tests of one dimension together.

    The square of the projection on a fixed unit vector is Beta(1/2, (n-1)/2): Kolmogorov-Smirnov for axes and random
    vectors. n |mean|^2 is chi-square over the number. Second moments are 1/n and 0, of known variance, each by the CLT.
    """
    n, rows = dimension, noise(5000, dimension, "direction")
    length = np.linalg.norm(rows, axis=1)
    unit = rows / length[:, None]
    fixed = np.random.default_rng(1).standard_normal((3, n))
    for vector in [*np.eye(n)[:2], *(fixed / np.linalg.norm(fixed, axis=1, keepdims=True))]:
        assert stats.kstest((unit @ vector) ** 2, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 2e-5
        assert stats.spearmanr(unit @ vector, length).pvalue > 2e-5
    assert len(rows) * n * np.sum(unit.mean(axis=0) ** 2) < stats.chi2(n).isf(1e-4)
    moments, fourth = unit.T @ unit / len(rows), 1 / (n * (n + 2))  # E u_i^2 u_j^2
    deviation = np.where(np.eye(n, dtype=bool), math.sqrt(3 * fourth - 1 / n**2), math.sqrt(fourth))
    limit = stats.norm.isf(1e-4 / n**2) / math.sqrt(len(rows))
    assert (np.abs(moments - np.eye(n) / n) <= limit * deviation).all()


def density(point: Floats, epsilon: float) -> Floats:
    """K exp(-epsilon |x|) at points (..., n), with the constant of Galli et al. (2023), Proposition 4.1."""
    n = point.shape[-1]
    constant = epsilon**n * special.gamma(n / 2) / (2 * math.pi ** (n / 2) * special.gamma(n))
    return cast(Floats, constant * np.exp(-epsilon * np.linalg.norm(point, axis=-1)))


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_density_integrates_to_one(epsilon: float) -> None:
    """In Cartesian coordinates, so that nothing of how the noise is drawn is used."""
    line = 2 * integrate.quad(lambda x: float(density(np.array([x]), epsilon)), 0, 60 / epsilon)[0]
    assert line == pytest.approx(1, abs=1e-6)
    node, weight = np.polynomial.legendre.leggauss(80)
    x, w = (node + 1) / 2, weight / 2
    x, w = 40 / epsilon * x**2, 40 / epsilon * w * 2 * x  # finer at the peak
    plane = 4 * density(np.stack(np.meshgrid(x, x), -1), epsilon) @ w @ w
    assert plane == pytest.approx(1, abs=1e-4)
    space = 8 * density(np.stack(np.meshgrid(x, x, x), -1), epsilon) @ w @ w @ w
    assert space == pytest.approx(1, abs=1e-4)


@pytest.mark.statistical
def test_what_is_sent_has_that_density_in_the_plane() -> None:
    """Chi-square over 36 cells and the rest, 10,000 releases of (0.3, -0.1), epsilon = 2/(0.8 * 0.5); false alarm 1e-4.

    An epsilon that is 5% off is told apart.
    """
    mechanism = LaplaceBall(2, 0.8, 0.5)
    assert mechanism.epsilon == pytest.approx(5.0)
    rows = many(mechanism, [0.3, -0.1], 10_000, first=10**6) - [0.3, -0.1]
    edges = np.array([-0.9, -0.4, -0.15, 0.0, 0.15, 0.4, 0.9])
    counts = np.histogram2d(*rows.T, bins=[edges, edges])[0].ravel()
    node, weight = np.polynomial.legendre.leggauss(24)

    def expected(epsilon: float) -> Floats:
        half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
        at, w = middle[:, None] + half[:, None] * node, half[:, None] * weight  # (cells, nodes)
        grid = np.stack(np.broadcast_arrays(at[:, None, :, None], at[None, :, None, :]), -1)
        inside = np.einsum("abij,ai,bj->ab", density(grid, epsilon), w, w).ravel()
        return cast(Floats, len(rows) * np.append(inside, 1 - inside.sum()))

    found = np.append(counts, len(rows) - counts.sum())
    assert expected(5.0).min() > 20
    assert stats.chisquare(found, expected(5.0)).pvalue > 1e-4
    assert stats.chisquare(found, expected(5.25)).pvalue < 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("shape", [1, 2, 10, 10**7])
def test_gamma_variables(shape: int) -> None:
    """Kolmogorov-Smirnov on 20,000 values; mean by the CLT, variance by its own (fourth cumulant 6/shape).

    False alarm below 1e-3 in all.
    """
    values = gamma([Stream("gamma", shape)] * 20_000, shape).numpy()  # one stream, drawn from again and again
    assert stats.kstest(values, stats.gamma(shape).cdf).pvalue > 1e-4
    assert abs(values.mean() - shape) < 4.5 * math.sqrt(shape / len(values))
    deviation = math.sqrt((2 + 6 / shape) / len(values))
    assert abs(values.var() / shape - 1) < 4.5 * deviation
    assert (values > 0).all()


@pytest.mark.statistical
@pytest.mark.parametrize("shape", [1, 10])
def test_gamma_variables_when_every_attempt_may_fail(shape: int) -> None:
    """With one attempt, 5% are drawn anew (Gamma(1)): the same law. Kolmogorov-Smirnov on 5,000; false alarm 1e-4."""
    with patch.object(metric, "ATTEMPTS", 1):
        values = gamma([Stream("again", shape, i) for i in range(5000)], shape).numpy()
    first = gamma([Stream("again", shape, i) for i in range(5000)], shape).numpy()
    assert 0.5 < np.mean(values == first) < 1.0 or shape > 1  # those accepted at once need no second draw
    assert stats.kstest(values, stats.gamma(shape).cdf).pvalue > 1e-4


def test_an_attempt_at_a_gamma_variable_fails_less_often_than_claimed() -> None:
    """The chance by numerical integration over x of Marsaglia and Tsang (2000): below 5% for all shapes from 1 on.

    So 16 fail together less than once in 10^20.
    """
    for shape in (1, 2, 10, 10**7):
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)

        def accepted(x: float, c: float = c, d: float = d) -> float:
            v = (1 + c * x) ** 3
            return math.exp(-x * x / 2) * min(1.0, math.exp(x * x / 2 + d * (1 - v + math.log(v)))) if v > 0 else 0.0

        share = integrate.quad(accepted, max(-1 / c, -12), 12, points=[0.0], limit=200)[0] / math.sqrt(2 * math.pi)
        assert 0.95 < share <= 1 + 1e-6
    assert 0.05**metric.ATTEMPTS < 1e-20


def test_ten_million_parameters() -> None:
    """Finite, of the length n within six of its standard deviations sqrt(n); scaled as the mechanism says."""
    n = 10**7
    values = laplace([Stream("large")], n)[0]
    assert values.dtype == torch.float64 and values.isfinite().all()
    assert abs(float(torch.linalg.vector_norm(values)) - n) < 6 * math.sqrt(n)
    assert abs(float(values.mean())) < 6 * math.sqrt((n + 1) / n)
    out = sent(LaplaceBall(n, 0.5, 3.0), torch.zeros(1, n), torch.zeros(1, n))[0]
    assert out.dtype == torch.float32
    assert float(torch.linalg.vector_norm(out.double())) == pytest.approx(1.5, rel=1e-2)


# ---- d-privacy by brute force ----------------------------------------------------------------------

# local models x and x' of the hypothesis 0, as steps before they are clipped to 0.5
PAIRS = {
    "inside": (0.1, -0.2),
    "on the boundary": (0.5, -0.5),
    "both clipped, on opposite sides": (3.0, -1e6),
    "both clipped, alike": (2.0, 1e30),
    "one clipped": (0.1, 7.0),
}


@pytest.mark.statistical
@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_set_of_outputs_is_more_than_e_to_the_epsilon_d_likelier(pair: str, dimension: int) -> None:
    """10,000 releases of each local model, in cells; false alarm 1e-3 for each pair, by Bonferroni.

    Of the a + b releases in a cell, a come from x with a probability of at most p = e^(epsilon d)/(1 + e^(epsilon d)).
    A cell with P[Binomial(a + b, p) >= a] too small breaks the bound. Beyond x, seen from x', the bound is attained (in
    the plane nearly so, in a narrow wedge): three quarters of this epsilon would not do.
    """
    mechanism, count = LaplaceBall(dimension, 1.5, 0.5), 10_000
    steps = [[value] + [0.0] * (dimension - 1) for value in PAIRS[pair]]
    at = [min(max(value, -0.5), 0.5) for value in PAIRS[pair]]
    distance = abs(at[0] - at[1])
    number = list(PAIRS).index(pair)
    x, other = (many(mechanism, step, count, first=10**7 * (2 * number + i + 1)) for i, step in enumerate(steps))

    def worst(epsilon: float) -> float:
        """The smallest p-value over all cells, either way round."""
        line = np.quantile(np.concatenate([x, other])[:, 0], np.linspace(0, 1, 25)[1:-1])
        side = [np.array([-0.4, 0.0, 0.4])] * (dimension - 1)
        found = 1.0
        share = special.expit(epsilon * distance)
        edges = [np.concatenate([[-np.inf], e, [np.inf]]) for e in (line, *side)]
        a, b = (np.histogramdd(rows, bins=edges)[0].ravel() for rows in (x, other))
        for one, two in ((a, b), (b, a)):
            tail = stats.binom.sf(one - 1, one + two, share)
            found = min(found, float(tail[one + two >= 50].min()))
        return found

    cells = 2 * 24 * (4 if dimension == 2 else 1)
    assert worst(mechanism.epsilon) > 1e-3 / cells
    if distance > 0.5:
        sign = math.copysign(1.0, at[0] - at[1])

        def beyond(rows: Floats) -> int:
            further = sign * (rows[:, 0] - at[0])
            return int(np.sum((further > 0) & (np.abs(rows[:, 1:]).sum(axis=1) < 0.15 * further + 0.02)))

        a, b = beyond(x), beyond(other)
        low = stats.beta.ppf(1e-4, a, b + 1)  # Clopper and Pearson's
        assert special.expit(0.75 * mechanism.epsilon * distance) < low <= special.expit(mechanism.epsilon * distance)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_the_ratio_of_densities_is_at_most_epsilon_times_the_distance_and_attains_it(dimension: int) -> None:
    """On 20,000 outputs and the points beyond each model, by the closed form."""
    random = np.random.default_rng(dimension)
    mechanism = LaplaceBall(dimension, 0.7, 2.0)
    steps = 3 * random.standard_normal((40, dimension))
    models = mechanism.bounded(torch.from_numpy(steps)).numpy()
    outputs = 4 * random.standard_normal((500, dimension))
    for x, other in itertools.combinations(models, 2):
        beyond = x + np.outer([0.0, 0.5, 9.0], x - other)
        y = np.concatenate([outputs, beyond])
        ratio = mechanism.epsilon * (np.linalg.norm(y - other, axis=1) - np.linalg.norm(y - x, axis=1))
        limit = mechanism.epsilon * math.dist(x, other)
        assert np.abs(ratio).max() <= limit + 1e-9 and ratio[-1] == pytest.approx(limit, abs=1e-9)
        assert limit <= price({mechanism.event: 1}, 0.0).epsilon * (1 + 1e-9)


# ---- the bound of a step ---------------------------------------------------------------------------

anything = st.floats(width=32, allow_nan=True, allow_infinity=True)
radii = st.sampled_from([1e-9, 0.3, 1.0, 1e3])


def length(values: list[float]) -> float:
    return math.hypot(*values)


@settings(max_examples=300, deadline=None)
@given(st.lists(anything, min_size=1, max_size=6), radii)
def test_a_bounded_step_is_within_the_radius(step: list[float], radius: float) -> None:
    steps = torch.tensor([step], dtype=torch.float32).double()
    for ball in BALLS:
        found = ball(len(step), 1.0, radius).bounded(steps)[0].tolist()
        assert length(found) <= radius
        if not all(map(math.isfinite, step)):
            assert found == [0.0] * len(step)  # it counts as none
        elif length(step) <= radius * (1 - 1e-9):
            assert found == steps[0].tolist()  # as it is
        else:
            assert length(found) >= radius * (1 - 1e-8)
            assert all(f * s >= 0 for f, s in zip(found, step, strict=True))
    found = LaplaceStep(len(step), 1.0).bounded(steps)[0].tolist()
    assert found == (steps[0].tolist() if all(map(math.isfinite, step)) else [0.0] * len(step))


@settings(max_examples=300, deadline=None)
@given(st.data(), radii)
def test_clipping_moves_no_two_steps_further_apart(data: st.DataObject, radius: float) -> None:
    """1-Lipschitz, up to rounding: in any pair, at all scales, and so at most 2r."""
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    near = st.floats(-2 * radius, 2 * radius)
    size = data.draw(st.integers(1, 5))
    one, two = (data.draw(st.lists(finite | near, min_size=size, max_size=size)) for _ in range(2))
    found = LaplaceBall(size, 1.0, radius).bounded(torch.tensor([one, two], dtype=torch.float64)).tolist()
    assert math.dist(*found) <= min(2 * radius, math.dist(one, two) * (1 + 1e-9)) + 1e-15 * radius


def test_a_step_that_is_just_too_long_is_clipped_without_a_jump() -> None:
    steps = torch.tensor([[1 - 1e-6], [1 - 1e-13], [1.0], [1 + 1e-13], [1 + 1e-6]], dtype=torch.float64)
    found = LaplaceBall(1, 1.0, 1.0).bounded(steps)[:, 0]
    assert (found.diff() >= -1e-15).all() and found.diff().max() < 1.1e-6 and found[-1] <= 1


def test_the_bound_holds_for_a_million_equal_values() -> None:
    """Where the errors of a sum of squares all go one way; the length from exact integers."""
    steps = torch.full((1, 10**6), 0.1, dtype=torch.float64)
    value = LaplaceBall(10**6, 1.0, 1.0).bounded(steps)[0]
    assert (value == value[0]).all()
    numerator, denominator = float(value[0]).as_integer_ratio()
    assert numerator**2 * 10**6 <= denominator**2 * (1 + 1e-9)


@pytest.mark.parametrize("ball", BALLS)
def test_local_models_of_one_hypothesis_are_at_most_2r_apart(ball: type[LaplaceBall] | type[GaussianBall]) -> None:
    """Without noise, wherever training ended: what is sent lies in the ball of its own hypothesis."""
    random = np.random.default_rng(5)
    models = torch.from_numpy(10 * random.standard_normal((3, 4)))
    local = torch.from_numpy(random.standard_normal((60, 4)) * np.geomspace(1e-6, 1e30, 60)[:, None])
    local[7, 2], local[8, 1] = math.nan, -math.inf
    mechanism = ball(4, 0.0, 0.25, math.inf)
    for j in range(3):
        out = sent(mechanism, models[j] + local, models, chosen=j)
        assert torch.linalg.vector_norm(out - models[j], dim=1).max() <= 0.25 * (1 + 1e-9)
        assert torch.cdist(out, out).max() <= 0.5 * (1 + 1e-9)
        assert torch.equal(out[7], models[j]) and torch.equal(out[8], models[j])
    other = sent(mechanism, models[0] + local, models, chosen=1)  # they are bound to where they started, not ended
    assert torch.linalg.vector_norm(other - models[1], dim=1).max() <= 0.25 * (1 + 1e-9)


# ---- hypotheses within a spread --------------------------------------------------------------------


@pytest.mark.parametrize("ball", BALLS)
def test_a_spread_bounds_local_models_of_different_hypotheses(ball: type[LaplaceBall] | type[GaussianBall]) -> None:
    """2r + spread, attained by steps away from each other; and the price is for that distance."""
    models = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)  # 1 apart
    direction = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    random = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 2)))
    mechanism = ball(2, 0.0, 0.25, spread=1.0)
    one = sent(mechanism, models[0] + torch.cat([-9 * direction, random]), models, chosen=0)
    two = sent(mechanism, models[1] + torch.cat([9 * direction, random]), models, chosen=1)
    assert torch.cdist(one, two).max() == pytest.approx(1.5)
    nu, r, spread = 3.0, 0.25, 1.0
    laplace_event = LaplaceBall(2, nu, r, spread).event
    assert laplace_event == MetricDpEvent(2 / (nu * r), 1.5) and price({laplace_event: 4}, 0.0).epsilon == 16.0
    exact = gaussian_epsilon(2 * 1.5 / (nu * r), 1e-5)  # four releases: sqrt(4) times as far apart
    found = price({GaussianBall(2, nu, r, spread).event: 4}, 1e-5).epsilon
    assert exact * (1 - 1e-9) <= found <= exact * 1.002


@pytest.mark.statistical
def test_the_bound_holds_for_different_hypotheses_within_the_spread() -> None:
    """On the line, 10,000 releases of each of the two local models farthest apart, 24 cells; false alarm 1e-3.

    Attained beyond them: nine tenths of this epsilon would not do.
    """
    mechanism, models = LaplaceBall(1, 2.0, 0.25, spread=0.5), torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    far = [torch.full((10_000, 1), value, dtype=torch.float64) for value in (-5.0, 5.0)]
    x, other = (sent(mechanism, f, models, j, 10**8 * (j + 1)).numpy()[:, 0] for j, f in enumerate(far))
    distance = cast(MetricDpEvent, mechanism.event).distance
    assert distance == 1.0
    edges = np.quantile(np.concatenate([x, other]), np.linspace(0, 1, 25)[1:-1])
    a, b = (np.bincount(np.digitize(rows, edges), minlength=24) for rows in (x, other))
    share = special.expit(mechanism.epsilon * distance)
    for one, two in ((a, b), (b, a)):
        assert stats.binom.sf(one - 1, one + two, share).min() > 1e-3 / 48
    low = stats.beta.ppf(1e-4, np.sum(x < -0.25), 1 + np.sum(other < -0.25))
    assert special.expit(0.9 * mechanism.epsilon * distance) < low <= share


@pytest.mark.parametrize("ball", BALLS)
def test_hypotheses_further_apart_than_the_noise_is_made_for_are_refused(
    ball: type[LaplaceBall] | type[GaussianBall],
) -> None:
    """One hypothesis is a spread of 0: of two models a client would tell which it prefers."""
    models = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    for spread in (0.0, 4.999):
        with pytest.raises(ValueError, match="5 apart"):
            sent(ball(2, 1.0, 0.5, spread), torch.zeros(1, 2), models)
    for spread, fitting in ((5.0, models), (0.0, models[:1]), (0.0, models[:1].repeat(3, 1)), (math.inf, models)):
        assert sent(ball(2, 1.0, 0.5, spread), torch.zeros(1, 2), fitting).isfinite().all()
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="apart"):
            sent(ball(2, 1.0, 0.5, 9.0), torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [bad, 0.0]]))


# ---- Gaussian noise --------------------------------------------------------------------------------


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Balle and Wang (2018), Theorem 8, for two points `shift` standard deviations apart."""

    def gap(e: float) -> float:
        return special.ndtr(shift / 2 - e / shift) - math.exp(e + special.log_ndtr(-shift / 2 - e / shift)) - delta

    return 0.0 if gap(0.0) <= 0 else brentq(gap, 0.0, shift**2 + 20 * shift, xtol=1e-12)


@pytest.mark.parametrize(("nu", "radius", "times"), [(2.0, 0.5, 1), (8.0, 3.0, 10), (1.0, 1e-3, 3), (40.0, 1.0, 100)])
def test_the_price_of_gaussian_noise_is_the_exact_one(nu: float, radius: float, times: int) -> None:
    """s = 2r, sigma = nu r; T of them are one with sigma / sqrt(T)."""
    mechanism = GaussianBall(7, nu, radius)
    assert mechanism.event == GaussianDpEvent(nu / 2)
    exact = gaussian_epsilon(2 * radius * math.sqrt(times) / (nu * radius), 1e-5)
    found = price({mechanism.event: times}, 1e-5).epsilon
    assert exact * (1 - 1e-9) <= found <= exact * 1.002


@pytest.mark.statistical
def test_gaussian_noise_has_its_deviation_in_each_coordinate() -> None:
    """Kolmogorov-Smirnov on 3,000 releases, both coordinates; the step is clipped first. False alarm 1e-4 each."""
    rows = many(GaussianBall(2, 3.0, 0.5), [30.0, 40.0], 3000, first=0) - [0.3, 0.4]  # 0.5 in the same direction
    for column in rows.T:
        assert stats.kstest(column / 1.5, "norm").pvalue > 1e-4
    assert stats.spearmanr(*rows.T).pvalue > 1e-4


# ---- noise in proportion to the step ---------------------------------------------------------------


def test_noise_as_published_is_proportional_to_the_step_and_promises_nothing() -> None:
    """Four times the step, four times the noise, bit for bit: how long it is gives the secret away."""
    mechanism, models = LaplaceStep(3, 2.0), torch.zeros(1, 3)
    steps = torch.tensor([[0.5, 0.25, -1.0]])
    once, four = (sent(mechanism, factor * steps, models) for factor in (1, 4))
    assert torch.equal(4 * once, four) and not torch.equal(once, steps)
    assert mechanism.event == NonPrivateDpEvent() and price({mechanism.event: 1}, 0.0).epsilon == math.inf
    assert mechanism.leak and without_leaks({mechanism: 3}) == {}
    assert "own step" in mechanism.describe() and "own step" in mechanism.kind


@pytest.mark.statistical
def test_its_mean_length_is_nu_times_that_of_the_step() -> None:
    """|rho| n / (nu |delta|) ~ Gamma(n): Kolmogorov-Smirnov on 2,000 releases; false alarm 1e-4."""
    step = [0.3, -0.4, 1.2]  # of length 1.3
    rho = np.linalg.norm(many(LaplaceStep(3, 2.0), step, 2000, first=0) - step, axis=1)
    assert stats.kstest(rho * 3 / (2.0 * 1.3), stats.gamma(3).cdf).pvalue > 1e-4


def test_a_client_that_does_not_move_sends_its_hypothesis() -> None:
    """Without any noise if noise is in proportion to the step; with the same as all others in a ball."""
    models = torch.tensor([[0.1, -0.2, 0.3], [5.0, 6.0, 7.0]])
    still = torch.stack([models[1], models[1] + torch.tensor([math.nan, 0.0, 0.0]), models[1] + math.inf])
    assert torch.equal(sent(LaplaceStep(3, 2.0), still, models, chosen=1), models[1].repeat(3, 1))
    for ball in BALLS:
        out = sent(ball(3, 2.0, 0.5, math.inf), still, models, chosen=1)
        assert out.isfinite().all() and (out != models[1]).all()


def test_one_client_that_does_not_move_among_others() -> None:
    """In one block: the others get their noise."""
    models = torch.zeros(1, 3)
    local = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    out = sent(LaplaceStep(3, 2.0), local, models)
    assert torch.equal(out[0], models[0]) and (out[1] != local[1]).all() and out.isfinite().all()


# ---- without noise, and nonsense -------------------------------------------------------------------


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("radius", [0.5, math.inf])
def test_without_noise_nothing_is_promised(ball: type[LaplaceBall] | type[GaussianBall], radius: float) -> None:
    mechanism = ball(2, 0.0, radius)
    assert mechanism.event == NonPrivateDpEvent() and price({mechanism.event: 1}, 0.0).epsilon == math.inf
    if isinstance(mechanism, LaplaceBall):
        assert mechanism.epsilon == math.inf
    assert "without noise" in mechanism.describe() and ("within" in mechanism.describe()) == (radius == 0.5)
    local = torch.tensor([[3.0, 4.0], [0.3, 0.0], [0.0, 0.0]])
    out = sent(mechanism, local, torch.zeros(1, 2))
    expected = local if radius == math.inf else torch.tensor([[0.3, 0.4], [0.3, 0.0], [0.0, 0.0]])
    assert torch.allclose(out, expected, atol=1e-7)


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize(
    "fields",
    [
        {"radius": math.inf},  # with noise
        {"radius": math.inf, "noise_multiplier": 1e-300},
        {"radius": 0.0},
        {"radius": 0.0, "noise_multiplier": 0.0},
        {"radius": -1.0},
        {"radius": math.nan},
        {"radius": math.nan, "noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"dimension": 0},
        {"dimension": -3},
        {"spread": -1.0},
        {"spread": math.nan},
    ],
)
def test_mechanisms_that_make_no_sense_are_refused(
    ball: type[LaplaceBall] | type[GaussianBall], fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"makes? no sense"):
        replace(ball(2, 1.0, 0.5), **fields)
    if not fields.keys() & {"radius", "spread"}:
        with pytest.raises(ValueError, match=r"makes? no sense"):
            replace(LaplaceStep(2, 1.0), **fields)


@pytest.mark.parametrize("dimension", [1, 3, 4, 6])
def test_noise_for_another_number_of_parameters_is_refused(dimension: int) -> None:
    """It would be priced for too few of them."""
    for mechanism in (LaplaceBall(dimension, 1.0, 0.5), GaussianBall(dimension, 1.0, 0.5), LaplaceStep(dimension, 1.0)):
        with pytest.raises(ValueError, match="models of 5 parameters"):
            sent(mechanism, torch.zeros(2, 5), torch.zeros(1, 5))


def test_canonical_forms_come_back_and_tell_any_two_apart() -> None:
    base = LaplaceBall(3, 1.0, 0.5)
    others: list[Sanitiser] = [
        replace(base, dimension=4),
        replace(base, noise_multiplier=1 + 2**-52),
        replace(base, radius=0.5 + 2**-53),
        replace(base, spread=math.inf),
        replace(base, spread=2.0),
        GaussianBall(3, 1.0, 0.5),
        LaplaceStep(3, 1.0),
        replace(base, noise_multiplier=0.0, radius=math.inf),
    ]
    forms = [canonical(mechanism) for mechanism in (base, *others)]
    assert len(set(forms)) == len(forms)
    assert [from_canonical(form) for form in forms] == [base, *others]
    assert from_canonical(forms[0]).event == base.event  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "fields",
    [
        {"dimension": 3.0},
        {"dimension": (3.0).hex()},  # "0x1.8...": a float, as which it would be read
        {"dimension": True},
        {"dimension": "3"},
        {"dimension": 0},
        {"dimension": None},
        {"noise_multiplier": 1},
        {"noise_multiplier": "nan"},
        {"noise_multiplier": "inf"},
        {"noise_multiplier": (-1.0).hex()},
        {"radius": 1},
        {"radius": "inf"},
        {"radius": (0.0).hex()},
        {"spread": 0},
        {"spread": "nan"},
        {"spread": (-1.0).hex()},
        {"leak": False},
        {"type": "fairveil.privacy.metric.Sanitiser"},
        {"type": "fairveil.privacy.metric.sanitised"},
        {"type": "fairveil.privacy.metric.LaplaceStep"},  # it has no radius
    ],
)
def test_canonical_forms_that_make_no_sense_are_none(fields: dict[str, Any]) -> None:
    plain = json.loads(canonical(LaplaceBall(3, 1.0, 0.5))) | fields
    assert from_canonical(json.dumps(plain, sort_keys=True)) is None


def test_nothing_is_a_model_that_no_client_can_send() -> None:
    """Of the same type and shape, and all NaN; what is sent is finite even where all that it is made of is not."""
    for mechanism in (LaplaceBall(3, 1.0, 0.5), GaussianBall(3, 1.0, 0.5), LaplaceStep(3, 1.0)):
        model = cast(Tensor, mechanism.nothing({"models": torch.zeros(2, 3)})["model"])
        assert model.shape == (3,) and model.dtype == torch.float32 and model.isnan().all()
        out = sent(mechanism, torch.full((1, 3), math.nan), torch.zeros(2, 3))
        assert out.isfinite().all() and out.dtype == torch.float32


def test_diagnostics_tell_how_long_the_step_was_and_whether_it_was_clipped() -> None:
    models, local = torch.zeros(1, 2), torch.tensor([[3.0, 4.0], [0.0, 0.25], [0.0, 0.0], [math.nan, 0.0], [0.5, 0.0]])
    clients = [holder(models, i) for i in range(5)]
    found = [each for _, each in sanitised(LaplaceBall(2, 1.0, 0.5), clients, [0] * 5, local)]
    assert [each["step"] for each in found] == pytest.approx([5.0, 0.25, 0.0, 0.0, 0.5])
    assert [each["clipped"] for each in found] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [each.get("not_finite", 0.0) for each in found] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_what_it_says_of_itself() -> None:
    mechanism = LaplaceBall(1000, 2.0, 0.5)
    assert mechanism.epsilon == 1000.0  # n / (nu r), the mean length 1 of the noise being n / epsilon
    assert mechanism.event == MetricDpEvent(1000.0, 1.0)
    assert mechanism.describe() == (
        "1,000 parameters within 0.5 of the hypothesis, Laplace noise of mean length 1: epsilon 1000 for each unit of "
        "distance"
    )
    assert GaussianBall(1000, 2.0, 0.5).describe() == (
        "1,000 parameters within 0.5 of the hypothesis, Gaussian noise of standard deviation 1"
    )
    kinds = {LaplaceBall(1, 1.0, 1.0).kind, GaussianBall(1, 1.0, 1.0).kind, LaplaceStep(1, 1.0).kind}
    assert len(kinds) == 3
    assert LaplaceBall.outputs == GaussianBall.outputs == LaplaceStep.outputs == ("model",)


# ---- streams, blocks, the grid ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism", [LaplaceBall(5, 1.0, 0.5, 9.0), GaussianBall(5, 1.0, 0.5, 9.0), LaplaceStep(5, 1.0)]
)
def test_the_same_bits_for_any_block_of_clients(mechanism: Sanitiser) -> None:
    models = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32))
    local = torch.from_numpy(np.random.default_rng(1).standard_normal((7, 5)).astype(np.float32))
    local[3] = math.nan
    together = sent(mechanism, local, models)
    for size in (1, 2, 4):
        parts = [sent(mechanism, local[i : i + size], models, first=i) for i in range(0, 7, size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.statistical
def test_noise_is_independent_between_clients_requests_and_inputs() -> None:
    """Correlations of the noise (n = 2,000) of 24 keys that differ in one part each, and of its length with others.

    Each correlation is N(0, 1/n) nearly; false alarm 1e-4 for all 276 together.
    """
    keys = itertools.product(
        (0, 1, 10), ("round 1, ask 1", "round 1, ask 2", "round 11, ask 1", "round 2"), ("ab", "ac")
    )
    streams = [Stream("run", request, client, digest, "mechanism") for client, request, digest in keys]
    rows = laplace(streams, 2000).numpy()
    found = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    assert np.abs(found).max() < stats.norm.isf(0.5e-4 / len(found)) / math.sqrt(2000)
    assert len(np.unique(np.linalg.norm(rows, axis=1))) == len(rows)


@pytest.mark.parametrize(("nu", "radius"), [(1.0, 0.5), (0.01, 1e-3), (1e4, 30.0)])
def test_what_is_sent_lies_on_a_grid_that_everybody_knows(nu: float, radius: float) -> None:
    """Multiples of a power of two near 1/4096 of the standard deviation, whatever the model (Mironov, 2012)."""
    models = torch.tensor([[0.1, -0.7], [0.3, 1.1]], dtype=torch.float64)
    for mechanism in (LaplaceBall(2, nu, radius, math.inf), GaussianBall(2, nu, radius, math.inf)):
        std = nu * radius * (math.sqrt(3) / 2 if isinstance(mechanism, LaplaceBall) else 1.0)
        step = 2.0 ** (math.floor(math.log2(std)) - 12)
        for j in range(2):
            multiples = sent(mechanism, models[j] + 1e-7 * torch.rand(20, 2).double(), models, chosen=j) / step
            assert torch.equal(multiples, multiples.round())
