"""Column statistics: one record moves them by no more than the bound, and the noise has the stated size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from fairveil.data.federation import ClientData, Records
from fairveil.privacy.accounting import price
from fairveil.privacy.mechanisms import Client
from fairveil.privacy.moments import LEAST_DEVIATION, NoisyMoments, bound, contributions, mean_and_deviation
from fairveil.streams import Stream

ONE = ((0, None),)
NASTY = [0.0, 1.0, -1.0, 1.5, -7.0, 1e30, math.inf, -math.inf, math.nan, 1e-30]


def holder(x: Tensor, seed: int = 0) -> Client:
    records = Records(x, torch.zeros(len(x), dtype=torch.int64))
    stream = Stream("moments", seed)
    return cast(Client, SimpleNamespace(data=ClientData(records, records), noise=lambda: stream, key=(seed,)))


def released(mechanism: NoisyMoments, x: Tensor, seed: int = 0) -> Tensor:
    release, diagnostics = mechanism.release(holder(x, seed))
    assert diagnostics == {} and release.mechanism == mechanism
    return cast(Tensor, release.value["moments"])


@pytest.mark.parametrize("d", [1, 2, 5])
def test_removing_any_record_moves_the_sums_by_at_most_the_bound(d: int) -> None:
    """Brute force over neighbours, records of every kind among them; the bound is attained at the corners."""
    random = np.random.default_rng(d)
    columns = tuple((column, None) for column in range(d))
    mechanism = NoisyMoments(columns, 0.0)
    worst = 0.0
    for _ in range(20):
        rows = torch.from_numpy(random.choice([*NASTY, *random.uniform(-2, 2, 5)], (8, d)).astype(np.float32))
        rows[0] = torch.from_numpy(random.choice([-1.0, 1.0], d).astype(np.float32))
        whole = released(mechanism, rows)
        for out in range(8):
            rest = rows[[row for row in range(8) if row != out]]
            worst = max(worst, float(torch.linalg.vector_norm(whole - released(mechanism, rest))))
    assert worst <= bound(columns) * (1 + 1e-12)
    assert worst == pytest.approx(bound(columns), rel=1e-12) and bound(columns) == math.sqrt(3 * d)


def test_contributions_are_count_values_and_squares() -> None:
    x = torch.tensor([[0.5, -0.25, 0], [2.0, float("nan"), 0], [0.5, 0.5, 1]])
    both = ((0, None), (1, 2))  # the third says where the second is missing
    assert contributions(x, both).tolist() == [
        [1, 1, 0.5, -0.25, 0.25, 0.0625],
        [1, 1, 1, 0, 1, 0],
        [1, 0, 0.5, 0, 0.25, 0],
    ]
    assert released(NoisyMoments(((1, 2),), 0.0), x).tolist() == [2, -0.25, 0.0625]  # the columns it names, no other


@pytest.mark.statistical
def test_the_noise_has_the_stated_law() -> None:
    """Kolmogorov-Smirnov on 3,000 draws; false alarm 1e-4 (fixed seeds)."""
    x, mechanism = torch.tensor([[0.5], [0.1]]), NoisyMoments(ONE, 2.0)
    drawn = torch.stack([released(mechanism, x, seed) for seed in range(1000)])
    noise = (drawn - contributions(x, ONE).sum(dim=0)) / (2.0 * bound(ONE))
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize(("z", "delta"), [(10.0, 1e-5), (1.0, 1e-3)])
def test_the_price_is_that_of_one_gaussian(z: float, delta: float) -> None:
    """Against the closed form of Balle and Wang (2018), solved here."""

    def profile(epsilon: float) -> float:
        normal = stats.norm.cdf
        return float(normal(0.5 / z - epsilon * z) - math.exp(epsilon) * normal(-0.5 / z - epsilon * z)) - delta

    event = NoisyMoments(((0, None), (3, None)), z).event
    assert event == dpa.GaussianDpEvent(z)
    assert price({event: 1}, delta).epsilon == pytest.approx(optimize.brentq(profile, 0, 50), rel=2e-3)
    assert isinstance(NoisyMoments(ONE, 0.0).event, dpa.NonPrivateDpEvent)


def test_mean_and_deviation_of_exact_sums_are_exact_and_of_noisy_ones_usable() -> None:
    x = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (500, 3)).astype(np.float32))
    mean, deviation = mean_and_deviation(contributions(x, ((0, None), (1, None), (2, None))).sum(dim=0))
    assert mean == pytest.approx(x.double().mean(dim=0).numpy(), abs=1e-12)
    assert deviation == pytest.approx(x.double().std(dim=0, correction=0).numpy(), abs=1e-9)
    odd: Any = torch.tensor([-3.0, 50.0, 50.0, 0.0, -1.0, 9.0], dtype=torch.float64)  # what noise can do
    mean, deviation = mean_and_deviation(odd)
    assert (np.abs(mean) <= 1).all() and (deviation >= LEAST_DEVIATION).all() and (deviation <= 1).all()


@pytest.mark.parametrize(
    ("columns", "noise"),
    [
        ((((0, 1, 2), None),), 1.0), (((True, None),), 1.0), (((0, (1,)),), 1.0), (((0.0, None),), 1.0),
        (((0, None),), -1.0), (((0, None),), math.nan), (((0, None),), math.inf),
    ],
)  # fmt: skip
def test_columns_are_pairs_of_whole_numbers(columns: Any, noise: float) -> None:
    """What else torch takes for an index has another shape: one noise would then go to several sums."""
    with pytest.raises(ValueError, match="makes no sense"):
        NoisyMoments(columns, noise)


def test_images_have_no_columns() -> None:
    """Of images as wide as there are sums (3d), every row would get the same noise."""
    records = Records(torch.rand(5, 2, 4, 6), torch.zeros(5, dtype=torch.int64))
    client = SimpleNamespace(data=ClientData(records, records), noise=lambda: Stream("images"), key=())
    with pytest.raises(ValueError, match="no columns"):
        NoisyMoments(((0, None), (1, None)), 1.0).release(cast(Any, client))
