"""Random streams: named, independent of order, and far enough apart."""

from __future__ import annotations

import numpy as np
import torch

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
