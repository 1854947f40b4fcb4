"""The best linear guess from noisy sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fairveil.attacks.decoder import Decoder
from fairveil.attacks.evidence import Curve, enough_guesses, gaussian_shift, lower_bound, refuted_factor
from fairveil.privacy.accounting import price
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import MINT, Share
from fairveil.streams import Stream


def test_alone_in_its_direction_a_canary_has_the_exact_log_odds() -> None:
    """y ~ N(s b, 1): log P(y | 1) - log P(y | 0) = s y - s^2 / 2."""
    lengths = torch.tensor([0.5, 1.0, 3.0])
    decoder, y = Decoder(3), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    decoder.see(y, torch.diag(lengths), 1.0, 0.0)
    assert decoder.log_odds() == pytest.approx((lengths * y - lengths.square() / 2).numpy())


def test_over_rounds_log_odds_add_up() -> None:
    decoder, total = Decoder(1), 0.0
    for length, y in ((1.0, 0.7), (0.4, 2.0), (2.0, -1.0)):
        decoder.see(torch.tensor([y]), torch.tensor([[length]]), 1.0, 0.0)
        total += length * y - length**2 / 2
    assert decoder.log_odds()[0] == pytest.approx(total)


def test_what_is_told_beside_is_added() -> None:
    decoder = Decoder(2)
    decoder.tell(torch.tensor([0.25, -2.0]))
    assert decoder.log_odds() == pytest.approx([0.25, -2.0])


def test_it_takes_off_what_canaries_do_to_each_other() -> None:
    """Six canaries in five dimensions, all with much in common: against the exact posterior, over all 64 coins."""
    random = np.random.default_rng(1)
    parts = random.standard_normal((6, 5)) + 2.0
    coins, agree, naive = np.array(list(itertools.product([0, 1], repeat=6))), [], []
    for _ in range(300):
        inside = random.random(6) < 0.5
        y = inside @ parts + 0.5 * random.standard_normal(5)
        weight = np.exp(-((y - coins @ parts) ** 2).sum(axis=1) / (2 * 0.25))
        exact = (weight @ coins / weight.sum()) > 0.5
        decoder = Decoder(6)
        decoder.see(torch.from_numpy(y / 0.5), torch.from_numpy(parts / 0.5), 1.0, 0.0)
        agree.append(((decoder.log_odds() > 0) == exact).mean())
        naive.append(((parts @ (y - parts.sum(axis=0) / 2) > 0) == exact).mean())
    assert np.mean(agree) > 0.75  # the exact posterior knows that coins are 0 or 1; a linear one does not
    assert np.mean(agree) > np.mean(naive) + 0.05


def test_whom_a_draw_takes_is_noise_for_the_others() -> None:
    """Two canaries in one direction, drawn with q: the variance of the other's part is in the exact linear estimate."""
    q, length, y = 0.3, 2.0, 1.5
    decoder = Decoder(2)
    decoder.see(torch.tensor([y]), torch.tensor([[length], [length]]), q, q * (1 - q))
    # y - mean = q s (b1 - 1/2) + q s (b2 - 1/2) + noise of variance 1 + 2 s^2 q (1 - q) / 2
    noise = 1 + length**2 * q * (1 - q)
    covariance = np.array([[1.0, 1.0], [1.0, 1.0]]) * (q * length) ** 2 / noise + 4 * np.eye(2)
    inverse = np.linalg.inv(covariance)
    mean = inverse @ np.full(2, q * length * (y - q * length) / noise)
    assert decoder.log_odds() == pytest.approx(mean / np.diag(inverse))


def _bounds(epsilon: float, seeds: int, significance: float) -> tuple[float, float]:
    """A sum of 1,000 canaries, each alone in its coordinate, noised by the mechanism that trains, at delta 1e-5.

    Returns:
        the medians over seeds of both bounds: by prices at all deltas, and by the one.
    """
    m, delta = 1000, 1e-5
    shift = gaussian_shift(epsilon, delta)
    sums = CohortSums((Part("update", (m,), 1.0, 1 / shift),), 1.0)
    deltas = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.2, 0.35)
    prices = [price({sums.event: 1}, each).epsilon for each in deltas]
    assert prices[2] == pytest.approx(epsilon, rel=1e-2)
    curve = Curve(tuple(prices), deltas)
    guesses = enough_guesses(m, epsilon, delta, curve, significance)
    bounds = []
    for seed in range(seeds):
        inside = np.random.default_rng(seed).random(m) < 0.5
        exact = sums.zero()
        for j in np.flatnonzero(inside).tolist():
            share = torch.zeros(m, dtype=torch.float64)
            share[j] = 1.0
            sums.add(exact, Share({"update": share}, sums, MINT))
        noisy, _ = sums.finish(exact, Stream("power", epsilon.hex(), seed), 0)
        decoder = Decoder(m)
        decoder.see(noisy["update"] * shift, shift * torch.eye(m), 1.0, 0.0)
        odds = decoder.log_odds()
        surest = np.argsort(-np.abs(odds), kind="stable")[:guesses]
        correct = int(((odds[surest] > 0) == inside[surest]).sum())
        everywhere = epsilon * refuted_factor(m, guesses, correct, curve, significance)
        bounds.append((everywhere, lower_bound(m, guesses, correct, delta, significance)))
    medians = np.median(bounds, axis=0)
    return float(medians[0]), float(medians[1])


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [2.0, 4.0, 8.0])
def test_the_bound_has_power(epsilon: float) -> None:
    """1,000 canaries, confidence 95%, medians over 15 seeds: both bounds are at least a quarter of the true epsilon.

    Seeds are fixed; by the spread of the bounds over seeds a median below a quarter has a chance under 1e-3.
    """
    everywhere, at_delta = _bounds(epsilon, 15, 0.05)
    assert epsilon > everywhere >= epsilon / 4 and epsilon > at_delta >= epsilon / 4


@pytest.mark.statistical
@pytest.mark.parametrize("epsilon", [4.0, 8.0])
def test_it_has_power_at_a_confidence_of_a_thousandth(epsilon: float) -> None:
    """By prices at all deltas. At epsilon 2 it is 0.23 of it, and it takes more than 1,000 canaries for a quarter."""
    assert _bounds(epsilon, 15, 1e-3)[0] >= epsilon / 4
