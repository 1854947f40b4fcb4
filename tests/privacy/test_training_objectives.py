"""Objectives of a client's own (perturbed copies, a pull inside the clip): bounded, and what they are said to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.data.federation import ClientData, Records
from fairveil.models import Model, ModelSpec
from fairveil.privacy.gradients import MICRO_BATCH, ROUNDING, clipped_sums, objective_sum
from fairveil.privacy.mechanisms import Client, canonical
from fairveil.privacy.training import SHIFT, NoisyTraining, perturbed
from fairveil.streams import Stream

MODELS = {
    "logistic": ModelSpec("logistic", (1, 6, 6), 3),
    "mlp": ModelSpec("mlp", (1, 6, 6), 3, {"hidden": 5}),
    "cnn": ModelSpec("cnn", (1, 8, 8), 3),
}
Copied = Callable[[Tensor], Tensor]


def records(spec: ModelSpec, count: int, seed: int, scale: float = 1.0) -> Records:
    random = np.random.default_rng(seed)
    x = torch.from_numpy((scale * random.standard_normal((count, *spec.features))).astype(np.float32))
    return Records(x, torch.from_numpy(random.integers(spec.classes, size=count)))


def with_outliers(spec: ModelSpec, count: int, seed: int) -> Records:
    """Ordinary records, tiny and huge ones, and two whose gradients are no numbers."""
    rows = records(spec, count, seed)
    rows.x[1] *= 1e3
    rows.x[2] *= 1e15
    rows.x[3] *= 1e-6
    rows.x[4, 0, 0, 0] = math.nan
    rows.x[5, 0, 1, 1] = math.inf
    return rows


def without(rows: Records, gone: int) -> Records:
    keep = torch.arange(len(rows)) != gone
    return Records(rows.x[keep], rows.y[keep])


def mirrored(x: Tensor) -> Tensor:
    """Three copies that depend on the record alone, so that neighbours have the same: (n, 3, ...)."""
    return torch.stack([x, x.flip(-1), x.roll(1, -2)], dim=1)


def written_out(
    model: Model, weights: Tensor, rows: Records, clip: float, copied: Copied | None = None, extra: Tensor | None = None
) -> Tensor:
    """The clipped sum in float64 by plain autograd, a record and a copy at a time."""
    total = torch.zeros(model.parameters, dtype=torch.float64)
    for i in range(len(rows)):
        x = rows.x[i : i + 1]
        several = x if copied is None else copied(x)[0]
        each = [model.gradient(weights, one.unsqueeze(0), rows.y[i : i + 1]).double() for one in several]
        gradient = torch.stack(each).mean(dim=0) + (0.0 if extra is None else extra.double())
        norm = float(gradient.norm())
        if math.isfinite(norm):
            total += gradient * min(1.0, clip * ROUNDING / norm)
    return total


# ---- the bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logistic", "mlp"])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("with_copies", [False, True])
@pytest.mark.parametrize("pull", [None, 0.1, 1e4])
def test_a_record_moves_the_sum_by_at_most_the_clip_norm(
    name: str, clip: float, with_copies: bool, pull: float | None
) -> None:
    """Every record in turn is removed, whatever it is, with copies, with something added, with both."""
    spec = MODELS[name]
    model, rows = spec.build(), with_outliers(spec, 9, 7)
    weights = model.initial(Stream(3))
    extra = None if pull is None else pull * (weights - model.initial(Stream(4)))
    options: dict[str, Any] = {"copied": mirrored if with_copies else None, "extra": extra}

    def total(of: Records) -> Tensor:
        return objective_sum(model, weights, of, torch.arange(len(of)), clip, **options).total[0]

    whole, moves = total(rows), []
    assert whole.isfinite().all()
    for gone in range(len(rows)):
        moves.append(float((whole - total(without(rows, gone))).norm()))
    assert max(moves) <= clip  # not to rounding
    assert max(moves) > 0.99 * clip  # and an outlier goes all the way: the bound is not met by shrinking everything
    assert moves[4] <= 1e-6 * clip and moves[5] <= 1e-6 * clip  # what is not finite contributes nothing


def test_the_bound_holds_over_several_micro_batches_and_whatever_copies_are_drawn() -> None:
    """300 aligned records of five copies each: the last one goes, then one that shifts all micro-batches."""
    spec = MODELS["logistic"]
    model, weights = spec.build(), torch.zeros(spec.build().parameters)
    one = records(spec, 1, 0, scale=5.0)
    rows = Records(one.x.repeat(300, 1, 1, 1), one.y.repeat(300))
    assert len(rows) > 2 * MICRO_BATCH

    def total(of: Records) -> Tensor:
        return objective_sum(model, weights, of, torch.arange(len(of)), 0.3, copied=mirrored).total[0]

    whole = total(rows)
    for gone in (0, 299):
        assert 0.29 < (whole - total(without(rows, gone))).norm() <= 0.3
    # random copies differ between neighbours only in what is drawn for them: a record alone is within its bound
    for seed in range(20):
        copied = partial(perturbed, copies=5, stream=Stream(seed))
        alone = objective_sum(model, weights, one, torch.arange(1), 0.3, copied=copied)
        assert alone.total.norm() <= 0.3 and int(alone.clipped) == 1


@pytest.mark.parametrize("name", MODELS)
def test_no_records_give_zero_even_with_something_added(name: str) -> None:
    spec = MODELS[name]
    model = spec.build()
    weights = model.initial(Stream(0))
    found = objective_sum(
        model, weights, records(spec, 3, 0), torch.arange(0), 1.0, copied=mirrored, extra=torch.ones_like(weights)
    )
    assert found.total.shape == (1, model.parameters) and not found.total.any()
    assert int(found.clipped) == int(found.not_finite) == 0


# ---- what is summed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_mean_over_copies_is_the_gradient_of_the_mean_loss(name: str) -> None:
    """Without a clip: the sum over records of the gradient of the mean loss over that record's explicit copies."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 5, 2)
    weights, expected = model.initial(Stream(1)), torch.zeros(model.parameters)
    for i in range(5):
        leaf = weights.clone().requires_grad_()
        copies = mirrored(rows.x[i : i + 1])[0]
        losses = model.losses(model.unflatten(leaf), copies, rows.y[i].repeat(3))
        (gradient,) = torch.autograd.grad(losses.mean(), leaf)
        expected += gradient
    found = objective_sum(model, weights, rows, torch.arange(5), math.inf, copied=mirrored)
    assert torch.allclose(found.total[0].float(), expected, atol=1e-5)
    assert int(found.clipped) == 0


@pytest.mark.parametrize("name", MODELS)
def test_each_mean_with_what_is_added_is_clipped(name: str) -> None:
    """The copies are averaged first, the extra is added next, and the sum of both is clipped: counted as well."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 6, 5)
    weights = model.initial(Stream(1))
    extra = 0.2 * torch.sin(torch.arange(model.parameters, dtype=torch.float32))
    clip = 1.0
    found = objective_sum(model, weights, rows, torch.arange(6), clip, copied=mirrored, extra=extra)
    assert torch.allclose(found.total[0], written_out(model, weights, rows, clip, mirrored, extra), atol=1e-5)
    norms = []
    for i in range(6):
        own = written_out(model, weights, Records(rows.x[i : i + 1], rows.y[i : i + 1]), math.inf, mirrored, extra)
        norms.append(float(own.norm()))
    assert int(found.clipped) == sum(norm > clip for norm in norms) > 0


@pytest.mark.parametrize("name", MODELS)
def test_without_copies_and_extra_both_paths_agree(name: str) -> None:
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 20, 8, scale=2.0)
    weights, drawn = model.initial(Stream(2)), torch.tensor([0, 3, 4, 9, 11, 17])
    slow = objective_sum(model, weights, rows, drawn, 0.8)
    fast = clipped_sums(model, weights.unsqueeze(0), [rows], [drawn], 0.8)
    assert torch.allclose(slow.total.float(), fast.total.float(), atol=1e-5)
    assert torch.equal(slow.clipped, fast.clipped) and torch.equal(slow.not_finite, fast.not_finite)


# ---- copies ----------------------------------------------------------------------------------------


def test_copies_are_shifts_with_repeated_edges() -> None:
    """Every copy is one of the 25 shifts, written out with clamped indices; the first is the image itself."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 2, 7, 5)).astype(np.float32))
    found = perturbed(x, 6, Stream(1))
    assert found.shape == (40, 6, 2, 7, 5)
    assert torch.equal(found[:, 0], x)
    seen = set()
    for i in range(40):
        for copy in found[i, 1:]:
            fits = [
                (down, right)
                for down in range(-SHIFT, SHIFT + 1)
                for right in range(-SHIFT, SHIFT + 1)
                if torch.equal(
                    copy, x[i][:, (torch.arange(7) + down).clamp(0, 6)][:, :, (torch.arange(5) + right).clamp(0, 4)]
                )
            ]
            assert len(fits) == 1
            seen.add(fits[0])
    assert SHIFT == 2 and len(seen) == 25  # 200 draws of 25: one is missing with probability 25 * (24/25)^200 = 0.7%


def test_copies_are_the_same_for_the_same_stream() -> None:
    x = records(MODELS["logistic"], 10, 0).x
    one, same, other = (perturbed(x, 3, Stream(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(perturbed(x, 1, Stream(0)), x.unsqueeze(1))


# ---- training --------------------------------------------------------------------------------------


def client(model: Model, rows: Records, key: int, **inputs: Any) -> Client:
    start = model.initial(Stream(9))
    return cast(
        Client,
        SimpleNamespace(
            data=ClientData(rows, rows),
            model=model,
            inputs={"model": start, "learning_rate": 0.5, **inputs},
            key=(key,),
            noise=lambda: Stream(key, "mechanism"),
        ),
    )


def trained(mechanism: NoisyTraining, member: Client) -> Tensor:
    update = mechanism.release(member)[0].value["update"]
    assert isinstance(update, Tensor)
    return update


@pytest.mark.parametrize("rate", [0.4, 1.0])
@pytest.mark.parametrize("name", ["logistic", "cnn"])
def test_training_on_copies_is_a_plain_loop(name: str, rate: float) -> None:
    """Draw, copy, clip the mean gradient of each record, divide by the expected batch, step; nothing else."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 12, 4, scale=2.0)
    mechanism = NoisyTraining(rate, 3, clip_norm=0.9, noise_multiplier=0.0, expected_batch=12 * rate, copies=3)
    member = client(model, rows, 21)
    batches, shifts = Stream(21, "mechanism"), Stream(21, "mechanism", "copies")
    start = weights = model.initial(Stream(9))
    sizes = []
    for _ in range(3):
        drawn = batches.coins(12, rate)
        sizes.append(len(drawn))
        copies = perturbed(rows.x[drawn], 3, shifts)
        total = torch.zeros(model.parameters, dtype=torch.float64)
        for copy, y in zip(copies, rows.y[drawn], strict=True):
            gradient = model.gradient(weights, copy, y.repeat(3)).double()  # of the mean over copies
            total += gradient * min(1.0, 0.9 * ROUNDING / float(gradient.norm()))
        weights = weights - 0.5 / (12 * rate) * total.float()
    assert (rate == 1.0) == (sizes == [12] * 3)
    assert torch.allclose(trained(mechanism, member), weights - start, atol=1e-5)


def test_copies_make_another_update_at_the_same_price() -> None:
    plain = NoisyTraining(0.4, 3, 1.0, 1.3, 5.0)
    copied = NoisyTraining(0.4, 3, 1.0, 1.3, 5.0, copies=3)
    assert plain.event == copied.event
    assert canonical(plain) != canonical(copied) and plain != copied  # the ledger tells them apart
    assert "3 perturbed copies" in copied.describe() and "copies" not in plain.describe()
    model, rows = MODELS["logistic"].build(), records(MODELS["logistic"], 12, 0)
    assert not torch.equal(trained(plain, client(model, rows, 1)), trained(copied, client(model, rows, 1)))
    with pytest.raises(ValueError, match="makes no sense"):
        NoisyTraining(0.4, 3, 1.0, 1.3, 5.0, copies=0)


def test_copies_draw_the_same_batches_and_the_same_noise() -> None:
    """No records: what is left is the noise, and it must not depend on whether there are copies."""
    spec = MODELS["logistic"]
    model, none = spec.build(), records(spec, 0, 0)
    plain, copied = (NoisyTraining(0.4, 3, 1.0, 1.3, 5.0, copies=copies) for copies in (1, 3))
    noise = trained(plain, client(model, none, 1))
    assert noise.abs().min() > 0
    assert torch.allclose(noise, trained(copied, client(model, none, 1)), atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_a_pulled_training_is_a_plain_loop(inside: bool, rate: float) -> None:
    """Inside: every record's gradient gets the pull, then the clip. Outside: the step gets it, at full strength."""
    spec = MODELS["logistic"]
    model, rows = spec.build(), records(spec, 12, 6)
    centre, pull, clip = model.initial(Stream(77)), 0.7, 1.2
    mechanism = NoisyTraining(rate, 3, clip_norm=clip, noise_multiplier=0.0, expected_batch=12 * rate)
    member = client(model, rows, 5, centre=centre, pull=pull, pull_inside=inside)
    batches = Stream(5, "mechanism")
    start = weights = model.initial(Stream(9))
    for _ in range(3):
        drawn = batches.coins(12, rate)
        towards = pull * (weights - centre)
        some = Records(rows.x[drawn], rows.y[drawn])
        total = written_out(model, weights, some, clip, extra=towards if inside else None).float()
        weights = weights - 0.5 * (total / (12 * rate) + (0.0 if inside else towards))
    assert torch.allclose(trained(mechanism, member), weights - start, atol=1e-5)


@pytest.mark.parametrize("inside", [False, True])
def test_a_record_moves_a_pulled_step_by_no_more_than_any_other(inside: bool) -> None:
    """The pull is the same for neighbours; inside or outside the clip a record moves one step by eta c / b at most."""
    spec = MODELS["mlp"]
    model, rows = spec.build(), with_outliers(spec, 9, 1)
    mechanism = NoisyTraining(1.0, 1, clip_norm=0.7, noise_multiplier=0.0, expected_batch=9.0)
    inputs = {"centre": 5 * model.initial(Stream(8)), "pull": 1.5, "pull_inside": inside}
    whole = trained(mechanism, client(model, rows, 2, **inputs))
    for gone in range(9):
        moved = whole - trained(mechanism, client(model, without(rows, gone), 2, **inputs))
        assert torch.linalg.vector_norm(moved) <= 0.5 * 0.7 / 9 * (1 + 1e-4)
