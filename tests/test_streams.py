"""Random streams: named, independent of order, and far enough apart."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from fairveil.streams import Stream


def test_equal_keys_draw_equal_values_and_others_do_not() -> None:
    keys = [(0, "a"), (0, "b"), (1, "a"), (0, "a", 0), (0, "a", "0"), ("0", "a"), (0, 1), (1, 0)]
    drawn = [tuple(Stream(*key).normal(4).tolist()) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn == [tuple(Stream(*key).normal(4).tolist()) for key in keys]


def test_a_numpy_integer_names_the_same_stream() -> None:
    assert torch.equal(Stream(0, np.int64(3)).normal(4), Stream(0, 3).normal(4))


def test_words_do_not_run_together() -> None:
    assert not torch.equal(Stream("ab", "c").normal(4), Stream("a", "bc").normal(4))


def test_a_sample_at_rate_one_is_everyone() -> None:
    assert Stream(0).coins(5, 1.0).tolist() == [0, 1, 2, 3, 4] and len(Stream(0).coins(0, 0.5)) == 0


def test_no_bits_are_spent_on_everyone_or_no_one() -> None:
    one, other = Stream(0), Stream(0)
    one.coins(5, 1.0), one.coins(0, 0.5)
    assert torch.equal(one.normal(4), other.normal(4))


@pytest.mark.parametrize(
    ("probability", "below"),  # how many of the 2^64 words come up
    [
        (0.0, 0),
        (2.0**-65, 0),
        (2.0**-64, 1),
        (2.0**-60, 16),
        (0.1, 1844674407370955264),
        (0.5, 2**63),
        (1 - 2.0**-53, 2**64 - 2**11),
    ],
)
def test_a_coin_has_the_very_probability(monkeypatch: pytest.MonkeyPatch, probability: float, below: int) -> None:
    """Exact at every float from 2^-11 on, and never above."""
    assert 0 <= probability * 2.0**64 - below < 1
    words = [0, below - 1, below, 2**64 - 1]
    drawn = np.array([word % 2**64 for word in words], np.uint64).view(np.int64)
    monkeypatch.setattr(Stream, "_words", lambda self, blocks: drawn[: 2 * blocks])
    assert Stream(0).coins(4, probability).tolist() == [i for i, word in enumerate(words) if 0 <= word < below]


@pytest.mark.statistical
@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.999])
def test_coins_come_up_at_their_rate(probability: float) -> None:
    """False alarm once in a million seeds, for each check."""
    up = Stream("coins").coins(1_000_001, probability)
    assert up.dtype == torch.int64 and stats.binomtest(len(up), 1_000_001, probability).pvalue > 1e-6
    even = int((up % 2 == 0).sum())
    assert stats.binomtest(even, len(up), 500_001 / 1_000_001).pvalue > 1e-6


def test_the_generator_of_numpy_is_seeded_with_the_whole_digest() -> None:
    """Splits of data hang on it; and the noise has a key of its own."""
    digest = hashlib.sha256(b"number:3\x1fword:split").digest()
    expected = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "big")))
    stream = Stream(3, "split")
    stream.normal(10)
    assert stream.numpy.integers(2**63, size=4).tolist() == expected.integers(2**63, size=4).tolist()
    assert stream.numpy is stream.numpy and stream._key != digest


def test_a_shape_is_kept() -> None:
    assert Stream(0).normal((3, 5)).shape == (3, 5) and Stream(0).normal(()).shape == ()
    assert torch.equal(Stream(0).normal((3, 5)).flatten(), Stream(0).normal(15))
