"""The diagnostics of the first round: formulas by hand, and one noisy step against the lemma."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

from fairveil.data.federation import ClientData, Records
from fairveil.models import ModelSpec
from fairveil.privacy.training import train
from fairveil.streams import Stream


@pytest.fixture(scope="module")
def first_round() -> ModuleType:
    """The script, which is no part of the package."""
    path = Path(__file__).parents[1] / "benchmarks" / "first_round.py"
    found = importlib.util.spec_from_file_location("first_round", path)
    assert found is not None and found.loader is not None
    module, before = importlib.util.module_from_spec(found), list(sys.path)
    sys.modules["first_round"] = module  # its dataclasses look themselves up there
    try:
        found.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_variance_of_lemma_41_by_hand(first_round: ModuleType) -> None:
    """K N eta^2 p c^2 z^2/b^3 = 2 * 10 * 0.25 * 7 * 9 * 4/64; 3 steps in an epoch where the lemma has 2.5."""
    setting = first_round.Setting(
        1.0, 10, 4, 2, local_epochs=2, learning_rate=0.5, clip_norm=3.0, parameters=7
    )  # fmt: skip
    assert first_round.lemma_variance(setting, 4, 2.0) == pytest.approx(19.6875)
    assert first_round.step_variance(setting, 4, 2.0) == pytest.approx(19.6875 * 3 / 2.5)
    assert first_round.step_variance(setting, 10, 2.0) == pytest.approx(first_round.lemma_variance(setting, 10, 2.0))


def test_score_of_lemma_42_by_hand(first_round: ModuleType) -> None:
    """p = 9, sigma^2 = 36: 2 in each coordinate, so means 12 apart are 6 standard deviations apart, and the score 3."""
    assert first_round.lemma_score(12.0, 36.0, 9) == pytest.approx(3.0)


def test_noise_level_of_the_first_round_by_hand(first_round: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """eta c z/b sqrt(steps) = 4 * 1 * 1.5/32 * sqrt(4)."""
    monkeypatch.setattr(first_round, "noise_multiplier", lambda setting: 1.5)
    assert first_round.noise_level(first_round.Setting(1.0, 100, 32, 16)) == pytest.approx(0.375)


def test_total_variance_by_hand(first_round: ModuleType) -> None:
    """Two coordinates: of (0, 0), (2, 0), (4, 3) the variances are 4 and 3; leaving one out gives 6.5, 12.5 and 2."""
    value, error = first_round.total_variance(torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 3.0]]))
    assert value == pytest.approx(7.0)
    assert error == pytest.approx(math.sqrt(2 * np.var([6.5, 12.5, 2.0])))


def test_distances_do_not_count_what_a_client_adds_by_itself(first_round: ModuleType) -> None:
    """Means (0, 0) and (3, 4); each client is moved along an axis of its own, which no other has."""
    signal = np.array([[0, 0], [0, 0], [3, 4], [3, 4], [3, 4]], float)
    x = np.hstack([signal, 100 * np.eye(5)])
    squared = first_round.squared_distances(x @ x.T, np.array([0, 0, 1, 1, 1]))
    np.testing.assert_allclose(squared, [[0, 25], [25, 0]], atol=1e-9)
    assert first_round.nearest(squared) == pytest.approx(5.0)
    assert first_round.nearest(-squared) == 0.0


@pytest.mark.statistical
def test_one_full_step_has_the_variance_of_lemma_41(first_round: ModuleType) -> None:
    """20 noisy steps of a logistic client with p = 51, all of its records in the batch. Seed fixed.

    Then 19 V/(sigma^2/p) is chi-squared with 19 p degrees of freedom: both tails together have probability 1e-6. That
    the simulated updates (noise-free ones and fresh noise) have the same law is asked of them in the same way.
    """
    random, repeats = Stream(31, "records").numpy, 20
    x = torch.from_numpy(random.standard_normal((40, 1, 4, 4)).astype(np.float32))
    rows = Records(x, torch.from_numpy(random.integers(3, size=40)))
    model = ModelSpec("logistic", (1, 4, 4), 3).build()
    p, z = model.parameters, 1.3
    setting = first_round.Setting(1.0, 40, 40, 8, learning_rate=0.5, clip_norm=2.0, parameters=p)
    lemma = first_round.lemma_variance(setting, 40, z)
    assert lemma == pytest.approx(p * (0.5 * 2.0 * z / 40) ** 2)

    def updates(z: float) -> torch.Tensor:
        inputs = {"model": model.initial(Stream(9)), "learning_rate": 0.5}
        clients = [first_round.Subject(ClientData(rows, rows), model, inputs, (31, k), (31, 0)) for k in range(repeats)]
        trained = train([setting.training(40, z)] * repeats, clients)
        return torch.stack([torch.as_tensor(release.value["update"]) for release, _ in trained])

    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], (repeats - 1) * p)
    value, _ = first_round.total_variance(updates(z))
    assert low <= (repeats - 1) * p * value / lemma <= high

    simulated = first_round.with_noise(updates(0.0), setting, 31)
    value, _ = first_round.total_variance(simulated)
    level = first_round.noise_level(setting)
    assert low <= (repeats - 1) * value / level**2 <= high


def test_batches_and_noise_are_drawn_apart(first_round: ModuleType) -> None:
    """Other noise leaves the batches as they are, and the other way round."""
    draw = first_round._TwoStreams
    one, other, moved = draw((1,), (2,)), draw((1,), (3,)), draw((4,), (2,))
    batches = [stream.coins(1000, 0.5).tolist() for stream in (one, other, moved)]
    assert batches[0] == batches[1] != batches[2]
    noise = [stream.normal(8).tolist() for stream in (one, other, moved)]
    assert noise[0] == noise[2] != noise[1]


def test_noise_grows_with_both_batches(first_round: ModuleType) -> None:
    """Figure 4 in its own setting (Renyi accountant), and less than in proportion; more with b than with b1."""

    def z(b1: int, b: int) -> float:
        return float(first_round.noise_multiplier(replace(first_round.PAPER, first_batch=b1, batch=b), "rdp"))

    first = [z(b1, 32) for b1 in (32, 512, 3300, 6600)]
    later = [z(6600, b) for b in (16, 32, 128, 512)]
    assert first == sorted(first) and first[-1] < 2 * first[0]
    assert later == sorted(later) and later[-1] < 32 * later[0]
    assert later[-1] / later[0] > first[-1] / first[0]


def test_score_of_lemma_42_grows_with_the_first_batch(first_round: ModuleType) -> None:
    """By sqrt(k)/rho from b1 to k b1, with a distance that shrinks with the number of steps, as 1/b1.

    rho is then the ratio of the noise multipliers: 1.2 here, a small constant as the lemma says.
    """
    score = []
    for b1 in (33, 330, 3300, 6600):
        setting = replace(first_round.PAPER, first_batch=b1)
        variance = first_round.lemma_variance(setting, b1, first_round.noise_multiplier(setting, "rdp"))
        score.append(first_round.lemma_score(1 / b1, variance, setting.parameters))
    assert score == sorted(score)
    assert math.sqrt(6600 / 33) / 1.3 < score[-1] / score[0] < math.sqrt(6600 / 33)
