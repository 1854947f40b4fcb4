"""Sums of clipped gradients: as written out by hand, and never moved by a record further than its bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairveil.data.federation import Records
from fairveil.models import Model, ModelSpec
from fairveil.privacy.gradients import (
    MICRO_BATCH,
    ROUNDING,
    ClippedSums,
    clipped_sums,
    objective_sum,
    path_of,
    record_gradients,
)
from fairveil.streams import Stream

MODELS = {
    "logistic": ModelSpec("logistic", (1, 4, 4), 3),
    "mlp": ModelSpec("mlp", (1, 4, 4), 3, {"hidden": 5}),
    "cnn": ModelSpec("cnn", (1, 4, 4), 3),
    "linear": ModelSpec("linear", (6,), 0),
    "several": ModelSpec("mlp", (1, 4, 4), 3, {"hidden": 5}, several=True),
}


def records(spec: ModelSpec, count: int, seed: int, scale: float = 1.0) -> Records:
    random = Stream(seed, "records").numpy
    x = torch.from_numpy((scale * random.standard_normal((count, *spec.features))).astype(np.float32))
    if spec.classes:
        shape = (count, *spec.target)
        return Records(x, torch.from_numpy(random.integers(2 if spec.several else spec.classes, size=shape)))
    return Records(x, torch.from_numpy((scale * random.standard_normal(count)).astype(np.float32)))


def clipped_sum(model: Model, weights: Tensor, rows: Records, clip_norm: float) -> ClippedSums:
    """Of one client whose batch is all it holds."""
    return clipped_sums(model, weights.unsqueeze(0), [rows], [torch.arange(len(rows))], clip_norm)


def without(rows: Records, gone: int) -> Records:
    keep = torch.arange(len(rows)) != gone
    return Records(rows.x[keep], rows.y[keep])


@pytest.mark.parametrize("name", MODELS)
def test_record_gradients_equal_a_loop_of_autograd(name: str) -> None:
    model = MODELS[name].build()
    rows, weights = records(MODELS[name], 7, 1), model.initial(Stream(0))
    found = record_gradients(model, weights, rows.x, rows.y)
    for i in range(7):
        one = model.gradient(weights, rows.x[i : i + 1], rows.y[i : i + 1])
        assert torch.allclose(found[i], one, atol=1e-6)


def test_clipped_sums_written_out_for_linear_regression() -> None:
    """Half the squared error of w.x + b has gradient (w.x + b - y) * (x, 1): clip each by hand and add."""
    spec = MODELS["linear"]
    model, rows = spec.build(), records(spec, 200, 3, scale=2.0)
    weights = torch.arange(7.0) / 7
    x, y, w = rows.x.double().numpy(), rows.y.double().numpy(), weights.double().numpy()
    gradient = (x @ w[:6] + w[6] - y)[:, None] * np.hstack([x, np.ones((200, 1))])
    norm = np.linalg.norm(gradient, axis=1)
    expected = (gradient * np.minimum(1, 1.5 * ROUNDING / norm)[:, None]).sum(axis=0)
    found = clipped_sum(model, weights, rows, 1.5)
    assert found.total[0].numpy() == pytest.approx(expected, abs=2e-4)
    assert found.clipped == (norm > 1.5).sum() and found.not_finite == 0
    assert MICRO_BATCH < 200  # so that the sum above went through several micro-batches


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 10**6),
    clip=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e3, 1e15]),
)
def test_a_record_moves_the_sum_by_at_most_the_clip_norm(name: str, seed: int, clip: float, scale: float) -> None:
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 5, seed, scale)
    weights = model.initial(Stream(seed))
    whole = clipped_sum(model, weights, rows, clip).total.double()
    for gone in range(5):
        moved = whole - clipped_sum(model, weights, without(rows, gone), clip).total.double()
        assert torch.linalg.vector_norm(moved) <= clip  # not to rounding: the sum is kept a hair below the bound
    alone = clipped_sum(model, weights, Records(rows.x[:1], rows.y[:1]), clip).total.double()
    assert torch.linalg.vector_norm(alone) <= clip  # one record on its own: exactly within


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_a_record_with_a_gradient_that_is_not_finite_contributes_zero(bad: float) -> None:
    spec = MODELS["linear"]
    model, rows = spec.build(), records(spec, 4, 2)
    weights = torch.ones(7)
    rows.x[2, 0] = bad
    found = clipped_sum(model, weights, rows, 1.0)
    expected = clipped_sum(model, weights, without(rows, 2), 1.0).total
    assert torch.allclose(found.total, expected, rtol=1e-6) and found.not_finite == 1


@pytest.mark.parametrize("name", MODELS)
def test_no_records_give_zero(name: str) -> None:
    """Alone, and beside a client that has some."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 3, 0)
    weights = model.initial(Stream(0)).repeat(2, 1)
    none = torch.arange(0)
    assert not clipped_sums(model, weights[:1], [rows], [none], 1.0).total.any()
    both = clipped_sums(model, weights, [rows, rows], [none, torch.arange(3)], 1.0)
    assert not both.total[0].any() and both.total[1].any() and both.clipped[0] == 0


def test_the_bound_holds_for_long_sums_of_aligned_gradients() -> None:
    """100,000 records that all push the same way: a float32 sum would move by 1.04 times the clip norm."""
    model = ModelSpec("linear", (1,), 0).build()
    x, y = torch.ones(100_000, 1), torch.full((100_000,), -30.0)
    whole = clipped_sum(model, torch.zeros(2), Records(x, y), 0.3).total
    moved = whole - clipped_sum(model, torch.zeros(2), Records(x[1:], y[1:]), 0.3).total
    assert 0.2988 < torch.linalg.vector_norm(moved) <= 0.3


def test_clipped_sums_of_several_classes_written_out() -> None:
    """The gradient of the mean of C binary cross-entropies is (sigmoid(z_c) - y_c) / C * (x, 1) for class c."""
    spec = ModelSpec("logistic", (6,), 5, several=True)
    model, rows = spec.build(), records(spec, 200, 3, scale=2.0)
    weights = model.initial(Stream(0))
    w, x = weights.double().numpy(), rows.x.double().numpy()
    error = (1 / (1 + np.exp(-(x @ w[:30].reshape(5, 6).T + w[30:]))) - rows.y.numpy()) / 5
    gradient = np.hstack([(error[:, :, None] * x[:, None, :]).reshape(200, 30), error])
    norm = np.linalg.norm(gradient, axis=1)
    factor = np.minimum(1, 0.5 * ROUNDING / norm)
    found = clipped_sum(model, weights, rows, 0.5)
    assert found.total[0].numpy() == pytest.approx(factor @ gradient, abs=2e-4)
    assert found.clipped == (norm > 0.5).sum() > 0
    copied = objective_sum(
        model, weights, rows, torch.arange(200), 0.5, copied=lambda x: torch.stack([x, x], dim=1), extra=None
    )
    assert copied.total[0].numpy() == pytest.approx(factor @ gradient, abs=2e-4)


@pytest.mark.parametrize("classes", [2, 3, 5, 8, 17, 40])
def test_with_several_classes_a_client_gets_the_same_to_the_last_bit_in_any_company(classes: int) -> None:
    spec = ModelSpec("mlp", (7,), classes, {"hidden": 9}, several=True)
    model = spec.build()
    assert path_of(model).together
    held = [records(spec, 30, seed) for seed in range(6)]
    drawn = [torch.arange(size) for size in (1, 7, 8, 13, 29, 30)]
    weights = torch.stack([model.initial(Stream(seed)) for seed in range(6)])
    together = clipped_sums(model, weights, held, drawn, 0.3).total
    for k in range(6):
        alone = clipped_sums(model, weights[k : k + 1], held[k : k + 1], drawn[k : k + 1], 0.3).total
        assert torch.equal(together[k], alone[0])
