"""Book-keeping: every rule against vmap, every client as if alone, and bounds that hold for the worst of records."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fairveil.data.federation import ClientData, Records
from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.networks import MODELS
from fairveil.privacy import gradients
from fairveil.privacy.gradients import ROUNDING, ClippedSums, clipped_sums, path_of, record_gradients
from fairveil.privacy.layers import Gradients, Lookup, Outer, Whole
from fairveil.privacy.training import NoisyTraining, train
from fairveil.streams import Stream

# How far gradients and norms may be off, as a share of the largest entry of all the gradients they are compared with.
TOLERANCE = 1e-5

some = settings(deadline=None, derandomize=True, max_examples=40)
clients = st.sampled_from([1, 2, 3, 5])


# ---- modules ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers, and a fixed readout by which all that comes out of them touches the loss, every entry differently."""

    readout: Tensor

    def __init__(self, features: Sequence[int], classes: int, layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = layers()
        width = self.layers(torch.zeros(2, *features)).flatten(1).shape[1]
        outputs = classes or 1
        entries = torch.arange(1.0, width * outputs + 1).cos() / math.sqrt(width)
        self.register_buffer("readout", entries.view(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x)).flatten(1) @ self.readout


class Ids(nn.Module):
    """Small whole numbers of whatever comes in; the same ones come often."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).abs().nan_to_num().clamp(max=self.words - 1).long()


class Again(nn.Module):
    """The same layer several times over."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


class Coarse(nn.Module):
    """The same layer on every position and on their mean: (n, t, i) and (n, i)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)).mean(dim=1))


class Tied(nn.Module):
    """A table whose rows are also the weights of the last layer, as in language models."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.ids, self.table = Ids(words), nn.Embedding(words, width)
        self.scores = nn.Linear(width, words)
        self.scores.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.table(self.ids(x))).mean(dim=1))


class SharedBias(nn.Module):
    """One vector is the bias of a linear layer, and of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.norm.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Weighed(nn.Module):
    """sum over positions t of c_t . W x_t, where a record brings both x_t and c_t: its gradient is sum c_t x_t'.

    So a record can have any gradient at all, and any terms that add up to it.
    """

    def __init__(self, features: Sequence[int], classes: int) -> None:
        super().__init__()
        self.width = features[1] // 2
        self.linear = nn.Linear(self.width, self.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x[:, :, : self.width]) * x[:, :, self.width :]).sum(dim=(1, 2)).unsqueeze(1)


class Looked(nn.Module):
    """sum over positions of e[1] c_t, where a record brings the c_t: all positions look up the same row."""

    def __init__(self, features: Sequence[int], classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(features[0] * (features[0] + 1), 1)  # large enough never to be written out

    def forward(self, x: Tensor) -> Tensor:
        return (self.table(torch.ones_like(x).long()).squeeze(2) * x).sum(dim=1, keepdim=True)


class Plain(nn.Linear):
    """Linear regression without the bias, whose gradient would make every record long."""

    def __init__(self, features: Sequence[int], classes: int) -> None:
        super().__init__(features[0], classes or 1, bias=False)


class Directed(nn.Module):
    """Divides a record by its length: not a number where there is nothing, as in padding."""

    def __init__(self, features: Sequence[int], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x / torch.linalg.vector_norm(x, dim=1, keepdim=True))


def model_of(features: Sequence[int], layers: Callable[[], nn.Module], classes: int = 3) -> Model:
    """The layers as a model; every call of `layers` makes fresh ones."""
    return ModelSpec(f"{__name__}:Net", tuple(features), classes, {"layers": layers}).build()


def own(kind: type[nn.Module], features: Sequence[int], classes: int = 0) -> Model:
    """A class of this file, named as a user would name it."""
    return ModelSpec(f"{__name__}:{kind.__name__}", tuple(features), classes).build()


# ---- records, and what is compared -----------------------------------------------------------------


def weights_of(model: Model, number: int, seed: int) -> Tensor:
    """Different parameters for each client, far from those the module was built with, if it is not too deep for it."""
    start, random = model.flatten(model.module), torch.Generator().manual_seed(seed)
    return start + (0.3 if len(start) < 1e6 else 0.003) * torch.randn(number, len(start), generator=random)


def draw(model: Model, count: Sequence[int], seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Records (*count, *features) and their targets."""
    random, spec = torch.Generator().manual_seed(seed), model.spec
    x = scale * torch.randn(*count, *spec.features, generator=random)
    if spec.name == "lstm" and len(spec.features) == 1:
        x = torch.randint(spec.options["vocabulary"], x.shape, generator=random).float()
    if spec.classes:
        return x, torch.randint(spec.classes, tuple(count), generator=random)
    return x, torch.randn(*count, generator=random)


def holding(model: Model, sizes: Sequence[int], seed: int, scale: float = 1.0) -> list[Records]:
    """What each of several clients holds."""
    return [Records(*draw(model, [size], seed + number, scale)) for number, size in enumerate(sizes)]


def all_of(records: Sequence[Records]) -> list[Tensor]:
    return [torch.arange(len(rows)) for rows in records]


def by_book(model: Model, weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Gradients]]:
    """Each record's gradient (clients, rows, p) and norm (clients, rows), and what held the gradients."""
    book = path_of(model).book
    assert book is not None
    tape = book.write(model.unflatten(weights), x.flatten(0, 1), y.flatten())
    held, found = tape.gradients(), []
    for row in range(y.shape[1]):
        only, total = torch.zeros(y.shape), torch.zeros_like(weights)
        only[:, row] = 1.0
        parts = model.unflatten(total)
        for name, one in held.items():
            one.write_sum(parts[name], only)
        found.append(total)
    norms = torch.linalg.vector_norm(torch.cat([one.norms() for one in held.values()]), dim=0)
    return torch.stack(found, dim=1), norms.view(y.shape), held


def agree(model: Model, number: int, rows: int, seed: int = 0) -> Mapping[str, Gradients]:
    """Compare gradients and norms with those of vmap, for clients with a model each; tell what held them."""
    weights, (x, y) = weights_of(model, number, seed), draw(model, [number, rows], seed)
    found, norms, held = by_book(model, weights, x, y)
    expected = torch.stack([record_gradients(model, *one) for one in zip(weights, x, y, strict=True)])
    largest = expected.abs().max()
    assert largest > 0
    assert (found - expected).abs().max() <= TOLERANCE * largest
    lengths = torch.linalg.vector_norm(expected, dim=2, dtype=torch.float64)
    assert (norms - lengths).abs().max() <= TOLERANCE * lengths.max()
    return held


def expected_sums(
    model: Model, weights: Tensor, records: Sequence[Records], drawn: Sequence[Tensor], clip_norm: float
) -> ClippedSums:
    """By vmap and by hand, in float64; a record whose gradient is not finite counts for nothing."""
    totals, clipped, left_out = [], [], []
    for mine, rows, batch in zip(weights, records, drawn, strict=True):
        x, y = rows.x[batch], rows.y[batch]
        each = (record_gradients(model, mine, x, y) if len(y) else torch.zeros(0, model.parameters)).double()
        norm = torch.linalg.vector_norm(each, dim=1)
        finite = norm.isfinite()
        factor = (clip_norm * ROUNDING / norm[finite]).clamp(max=1.0)
        totals.append(factor @ each[finite])
        clipped.append((norm[finite] > clip_norm).sum())
        left_out.append((~finite).sum())
    return ClippedSums(torch.stack(totals), torch.stack(clipped), torch.stack(left_out))


def assert_sums(found: ClippedSums, expected: ClippedSums, tolerance: float = TOLERANCE) -> None:
    largest = expected.total.abs().max()
    assert (found.total - expected.total).abs().max() <= tolerance * largest
    assert torch.equal(found.clipped, expected.clipped) and torch.equal(found.not_finite, expected.not_finite)


def total(model: Model, weights: Tensor, x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
    """The clipped sum (p,) of one client, in float64."""
    found = clipped_sums(model, weights.unsqueeze(0), [Records(x, y)], [torch.arange(len(y))], clip_norm)
    return found.total[0].double()


# ---- the rules, one by one -------------------------------------------------------------------------


@some
@given(
    clients=clients, leading=st.lists(st.integers(1, 4), max_size=2), inputs=st.integers(1, 9),
    outputs=st.integers(1, 9), bias=st.booleans(), rows=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear(clients: int, leading: list[int], inputs: int, outputs: int, bias: bool, rows: int, seed: int) -> None:
    """On (n, i), (n, t, i) and (n, s, t, i); the first of two layers also needs the gradient of the second's input."""
    model = model_of(
        (*leading, inputs),
        lambda: nn.Sequential(
            nn.Linear(inputs, outputs, bias=bias), nn.Tanh(), nn.Linear(outputs, inputs, bias=not bias)
        ),
    )
    agree(model, clients, rows, seed)


@some
@given(
    clients=clients, channels=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.sampled_from([0, 1, 2, (0, 2), (2, 1), "valid", "same"]),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)), size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    bias=st.booleans(), rows=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_conv2d(
    clients: int, channels: tuple[int, int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: Any,
    dilation: tuple[int, int], size: tuple[int, int], bias: bool, rows: int, seed: int,
) -> None:  # fmt: skip
    """Two in a row, so that the second asks the first for nothing, and the first is asked for its input's gradient."""
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        assume(all(length % 2 for length in reach))  # else one side has more: see below
        stride = (1, 1)
    first, second, third = channels
    both = (padding,) * 2 if isinstance(padding, int) else (0, 0) if isinstance(padding, str) else padding
    assume(all(s + 2 * p >= r for s, p, r in zip(size, both, reach, strict=True)))
    model = model_of(
        (first, *size),
        lambda: nn.Sequential(
            nn.Conv2d(first, second, kernel, stride, padding, dilation, bias=bias),
            nn.Tanh(),
            nn.Conv2d(second, third, 3, padding=1, bias=not bias),
        ),
    )
    assert path_of(model).obstacle is None
    agree(model, clients, rows, seed)


@some
@given(
    clients=clients, channels=st.tuples(st.integers(1, 4), st.integers(1, 5)), kernel=st.integers(1, 4),
    stride=st.integers(1, 3), padding=st.sampled_from([0, 1, 2, (2,), "valid", "same"]), dilation=st.integers(1, 2),
    length=st.integers(7, 12), bias=st.booleans(), rows=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_conv1d(
    clients: int, channels: tuple[int, int], kernel: int, stride: int, padding: Any, dilation: int, length: int,
    bias: bool, rows: int, seed: int,
) -> None:  # fmt: skip
    if padding == "same":
        assume(dilation * (kernel - 1) % 2 == 0)
        stride = 1
    model = model_of(
        (channels[0], length),
        lambda: nn.Sequential(
            nn.Conv1d(*channels, kernel, stride, padding, dilation, bias=bias), nn.Tanh(), nn.Conv1d(channels[1], 2, 1)
        ),
    )
    assert path_of(model).obstacle is None
    agree(model, clients, rows, seed)


@some
@given(
    clients=clients, shape=st.lists(st.integers(2, 5), min_size=1, max_size=3), axes=st.integers(1, 2),
    affine=st.booleans(), bias=st.booleans(), rows=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_layer_norm(clients: int, shape: list[int], axes: int, affine: bool, bias: bool, rows: int, seed: int) -> None:
    """Over the last axis or the last two, of two to four."""
    axes = min(axes, len(shape))
    assume(math.prod(shape[-axes:]) > 2)  # one number becomes 0 and two become 1 and -1: gradients are rounding
    model = model_of(
        shape,
        lambda: nn.Sequential(
            nn.Linear(shape[-1], shape[-1]),
            nn.LayerNorm(shape[-axes:], elementwise_affine=affine, bias=bias),
            nn.Linear(shape[-1], 2),
        ),
    )
    agree(model, clients, rows, seed)


@some
@given(
    clients=clients, groups=st.integers(1, 3), each=st.integers(2, 4),
    inner=st.lists(st.integers(2, 4), max_size=2), affine=st.booleans(), rows=st.integers(1, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_group_norm(clients: int, groups: int, each: int, inner: list[int], affine: bool, rows: int, seed: int) -> None:
    """On (n, c), (n, c, t) and (n, c, h, w)."""
    assume(each * math.prod(inner) > 2)
    channels = groups * each
    layer: Callable[[], nn.Module] = {
        0: lambda: nn.Linear(channels, channels),
        1: lambda: nn.Conv1d(channels, channels, 1),
        2: lambda: nn.Conv2d(channels, channels, 1),
    }[len(inner)]
    model = model_of(
        (channels, *inner), lambda: nn.Sequential(layer(), nn.GroupNorm(groups, channels, affine=affine), layer())
    )
    agree(model, clients, rows, seed)


@some
@given(
    clients=clients, words=st.integers(2, 30), width=st.integers(1, 6),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2), padding=st.none() | st.integers(-2, 1),
    rows=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_embedding(
    clients: int, words: int, width: int, shape: list[int], padding: int | None, rows: int, seed: int
) -> None:
    """Ids repeat, within a record and among records; a padding row has no gradient."""
    model = model_of(shape, lambda: nn.Sequential(Ids(words), nn.Embedding(words, width, padding_idx=padding)))
    agree(model, clients, rows, seed)


@pytest.mark.parametrize(
    ("features", "layers"),
    [
        ((4,), lambda: Again(nn.Linear(4, 4), 3)),
        ((3, 4), lambda: Again(nn.Linear(4, 4, bias=False), 2)),
        ((2, 6, 6), lambda: Again(nn.Conv2d(2, 2, 3, padding=1), 2)),
        ((2, 9), lambda: Again(nn.Conv1d(2, 2, 3, padding=1), 3)),
        ((5,), lambda: Again(nn.LayerNorm(5), 2)),
        ((4, 3, 3), lambda: Again(nn.GroupNorm(2, 4), 2)),
        ((6, 4), lambda: Coarse(nn.Linear(4, 4))),
        ((40, 30), lambda: Coarse(nn.Linear(30, 30))),
        ((6,), lambda: Tied(9, 4)),
        ((3,), lambda: Tied(40, 8)),
        ((6,), lambda: SharedBias(6)),
        ((4, 6), lambda: SharedBias(6)),
    ],
)
@pytest.mark.parametrize("number", [1, 3])
def test_parameters_that_are_used_more_than_once(
    features: Sequence[int], layers: Callable[[], nn.Module], number: int
) -> None:
    model = model_of(features, layers)
    assert path_of(model).obstacle is None
    agree(model, number, 3)


@pytest.mark.parametrize(
    ("features", "layers", "held", "positions"),
    [
        ((5,), lambda: nn.Linear(5, 4), Outer, 1),
        ((1, 5), lambda: nn.Linear(5, 4), Outer, 1),
        ((3, 20), lambda: nn.Linear(20, 20), Outer, 3),
        ((10, 20), lambda: nn.Linear(20, 20), Outer, 10),  # as much work by pairs of positions as written out
        ((11, 20), lambda: nn.Linear(20, 20), Whole, 0),
        ((2, 2, 20), lambda: nn.Linear(20, 20), Outer, 4),
        ((20,), lambda: Again(nn.Linear(20, 20), 3), Outer, 3),
        ((4,), lambda: Again(nn.Linear(4, 4), 3), Whole, 0),
        ((1, 6, 6), lambda: nn.Conv2d(1, 4, 3), Whole, 0),
        ((2, 3, 3), lambda: nn.Conv2d(2, 4, 3), Outer, 1),
        ((8, 3, 4), lambda: nn.Conv2d(8, 20, 2), Outer, 6),
        ((8, 7), lambda: nn.Conv1d(8, 20, 3), Outer, 5),
        ((6,), lambda: nn.LayerNorm(6), Whole, 0),
        ((6, 2, 2), lambda: nn.GroupNorm(2, 6), Whole, 0),
        ((6,), lambda: nn.Sequential(Ids(20), nn.Embedding(20, 4)), Lookup, 6),
        ((6,), lambda: nn.Sequential(Ids(9), nn.Embedding(9, 4)), Whole, 0),
        ((6,), lambda: Tied(9, 4), Whole, 0),
    ],
)
def test_what_holds_the_gradients(
    features: Sequence[int], layers: Callable[[], nn.Module], held: type, positions: int
) -> None:
    """Every form is reached, and whichever it is, it agrees with vmap."""
    found = agree(model_of(features, layers), 3, 4)
    weight = next(one for name, one in found.items() if name.endswith("weight"))
    assert type(weight) is held
    if isinstance(weight, Outer | Lookup):
        assert weight.g.shape[1] == positions


BUILT_IN = {
    "logistic": ModelSpec("logistic", (1, 4, 4), 3),
    "linear": ModelSpec("linear", (6,), 0),
    "linear, one feature": ModelSpec("linear", (1,), 0),
    "svm of two": ModelSpec("svm", (6,), 2),
    "svm of four": ModelSpec("svm", (1, 4, 4), 4),
    "mlp, 5": ModelSpec("mlp", (13,), 3, {"hidden": 5}),
    "mlp, 17": ModelSpec("mlp", (13,), 3, {"hidden": 17}),
    "mlp, 128": ModelSpec("mlp", (60,), 10),
    "cnn": ModelSpec("cnn", (1, 6, 5), 3),
    "cnn-dp": ModelSpec("cnn-dp", (2, 17, 20), 3),
    "lstm of ids": ModelSpec("lstm", (7,), 2, {"vocabulary": 40, "embedding": 3, "hidden": 5}),
    "lstm of vectors": ModelSpec("lstm", (7, 4), 0, {"hidden": 5, "layers": 3}),
    "lstm, wide": ModelSpec("lstm", (5,), 2, {"vocabulary": 50, "embedding": 20, "hidden": 20}),
    "alexnet": ModelSpec("alexnet-small", (1, 28, 28), 3),
    "resnet": ModelSpec("resnet18-gn", (1, 8, 8), 0, {"stem": "cifar"}),
}
LARGE = ("alexnet", "resnet")
SMALL = [name for name in BUILT_IN if name not in LARGE]


@pytest.mark.parametrize("name", [*SMALL, "alexnet", pytest.param("resnet", marks=pytest.mark.slow)])
def test_built_in_models(name: str) -> None:
    model = BUILT_IN[name].build()
    assert path_of(model).obstacle is None
    agree(model, 2, 1 if name in LARGE else 4)


def test_every_built_in_model_is_tried() -> None:
    assert {spec.name for spec in BUILT_IN.values()} == set(MODELS)


# ---- several clients in one call -------------------------------------------------------------------

GHOST = {
    "linear on positions": ((3, 20), lambda: nn.Linear(20, 20)),
    "convolution of few positions": ((8, 3, 4), lambda: nn.Conv2d(8, 20, 2)),
    "lookup": ((6,), lambda: nn.Sequential(Ids(20), nn.Embedding(20, 4))),
    "norms": ((4, 3, 3), lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))),
}


@settings(some, max_examples=60)
@given(
    name=st.sampled_from([*SMALL, *GHOST]), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    clip=st.sampled_from([0.01, 0.5, 3.0, math.inf]), micro_batch=st.sampled_from([4, 11, 128]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_each_client_gets_the_sum_of_its_own_clipped_gradients(
    name: str, sizes: list[int], clip: float, micro_batch: int, seed: int
) -> None:
    """Whatever the others draw: batches of different sizes are cut into micro-batches, and padded to go together."""
    assume(any(sizes))
    model = BUILT_IN[name].build() if name in BUILT_IN else model_of(*GHOST[name])
    weights, records = weights_of(model, len(sizes), seed), holding(model, [size + 3 for size in sizes], seed)
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(size + 3, generator=random)[:size] for size in sizes]
    with patch.object(gradients, "MICRO_BATCH", micro_batch):
        found = clipped_sums(model, weights, records, drawn, clip)
    assert_sums(found, expected_sums(model, weights, records, drawn, clip))


def test_micro_batches_of_one_client_are_not_taken_for_clients() -> None:
    """As many as there are clients, all of the same length."""
    model = BUILT_IN["logistic"].build()
    weights, records = weights_of(model, 2, 0), holding(model, [3, 2 * gradients.MICRO_BATCH], 0)
    drawn = [torch.arange(0), torch.arange(len(records[1]))]
    found = clipped_sums(model, weights, records, drawn, 0.5)
    assert_sums(found, expected_sums(model, weights, records, drawn, 0.5))
    assert not found.total[0].any()


@pytest.mark.parametrize("name", SMALL)
def test_a_client_gets_the_same_bits_in_any_company(name: str) -> None:
    """Else what a run gives would depend on the size of its blocks."""
    model = BUILT_IN[name].build()
    number, random = 7, torch.Generator().manual_seed(1)
    weights, records = weights_of(model, number, 0), holding(model, [60] * number, 0, scale=3.0)
    for turn in range(9):
        sizes = torch.randint(0, 61, (number,), generator=random)
        if turn % 3 == 0:
            sizes[:] = sizes[0]  # all alike: nobody is padded beyond the others
        drawn = [torch.randperm(60, generator=random)[:size].sort().values for size in sizes.tolist()]
        alone = [clipped_sums(model, weights[[k]], [records[k]], [drawn[k]], 1.0) for k in range(number)]
        for block in ([0, 1], [4, 2, 3], [6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
            shared = clipped_sums(model, weights[block], [records[k] for k in block], [drawn[k] for k in block], 1.0)
            for row, k in enumerate(block):
                assert torch.equal(shared.total[row], alone[k].total[0])
                assert shared.clipped[row] == alone[k].clipped[0]


def test_every_size_of_batch_gives_the_same_bits_in_any_company() -> None:
    model = BUILT_IN["mlp, 17"].build()
    weights, records = weights_of(model, 3, 0), holding(model, [60] * 3, 0)
    for size in range(1, 61):
        drawn = [torch.arange(size), torch.arange(60 - size, 60), torch.arange(0, 60, 2)]
        shared = clipped_sums(model, weights, records, drawn, 1.0)
        for k in range(3):
            alone = clipped_sums(model, weights[[k]], [records[k]], [drawn[k]], 1.0)
            assert torch.equal(shared.total[k], alone.total[0])


def test_micro_batches_give_the_same_bits_in_any_company() -> None:
    """Where a batch is cut depends on that batch alone; 11 is no multiple of what batches are padded to."""
    model = BUILT_IN["mlp, 5"].build()
    weights, records = weights_of(model, 3, 0), holding(model, [40] * 3, 0)
    drawn = [torch.arange(11), torch.arange(12), torch.arange(40)]
    with patch.object(gradients, "MICRO_BATCH", 11):
        shared = clipped_sums(model, weights, records, drawn, 1.0)
        for k in range(3):
            alone = clipped_sums(model, weights[[k]], [records[k]], [drawn[k]], 1.0)
            assert torch.equal(shared.total[k].double(), alone.total[0].double())


@dataclass
class FakeClient:
    """A client with nothing but what a mechanism asks for."""

    model: Model
    rows: Records
    inputs: dict[str, Any]
    key: tuple[int | str, ...]
    data: ClientData = field(init=False)

    def __post_init__(self) -> None:
        self.data = ClientData(self.rows, self.rows)

    def noise(self) -> Stream:
        return Stream(*self.key)


@pytest.mark.parametrize("noise", [0.0, 1.1])
@pytest.mark.parametrize("name", ["logistic", "mlp, 17", "cnn", "lstm of ids"])
def test_training_in_blocks_of_any_size_releases_the_same_bits(name: str, noise: float) -> None:
    """Clients of different sizes, rates and bounds, who do not march in step."""
    model = BUILT_IN[name].build()
    sizes = [30, 30, 12, 50, 7]
    mechanisms = [
        NoisyTraining.epochs(size, 8, 2, clip_norm=1.0 if k < 3 else 0.3, noise_multiplier=noise)
        for k, size in enumerate(sizes)
    ]
    starts = weights_of(model, 5, 0)
    members = [
        FakeClient(model, rows, {"model": starts[k], "learning_rate": 0.5}, ("client", k))
        for k, rows in enumerate(holding(model, sizes, 0))
    ]

    def trained(block: int) -> list[Tensor]:
        parts = pairwise([*range(0, 5, block), 5])
        replies = [reply for low, high in parts for reply in train(mechanisms[low:high], members[low:high])]
        return [release.value["update"] for release, _ in replies]

    alone = trained(1)
    assert all(update.any() for update in alone)
    for block in (2, 5):
        assert all(torch.equal(one, other) for one, other in zip(trained(block), alone, strict=True))


# ---- bounds ----------------------------------------------------------------------------------------


@settings(some, max_examples=60)
@given(
    name=st.sampled_from([*SMALL, *GHOST]), count=st.integers(1, 9), seed=st.integers(0, 10**6),
    clip=st.sampled_from([1e-3, 0.1, 1.0, 30.0]), scale=st.sampled_from([1e-3, 1.0, 1e3, 1e8, 1e15]),
)  # fmt: skip
def test_a_record_moves_the_sum_by_at_most_the_clip_norm(
    name: str, count: int, seed: int, clip: float, scale: float
) -> None:
    model = BUILT_IN[name].build() if name in BUILT_IN else model_of(*GHOST[name], classes=0)
    weights, (x, y) = weights_of(model, 1, seed)[0], draw(model, [count], seed, scale)
    if not model.spec.classes:
        y = scale * y
    whole = total(model, weights, x, y, clip)
    for gone in range(count):
        keep = torch.arange(count) != gone
        moved = whole - total(model, weights, x[keep], y[keep], clip)
        assert torch.linalg.vector_norm(moved) <= clip


@settings(some, max_examples=100)
@given(
    positions=st.sampled_from([2, 3, 8, 16]), kept=st.sampled_from([0.5, 1 / 8, 1 / 15.9, 1e-2, 1e-4, 1e-7, 0.0]),
    size=st.sampled_from([1e-10, 1e-3, 1.0, 1e6, 1e15]), uneven=st.booleans(),
    noise=st.sampled_from([0.0, 1e-3, 0.1]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_terms_that_cancel_cannot_hide_a_gradient(
    positions: int, kept: float, size: float, uneven: bool, noise: float, seed: int
) -> None:
    """Norms of positions taken in pairs are differences of large numbers: rounding must not make a record longer."""
    model, random = own(Weighed, (positions, 2 * 64)), torch.Generator().manual_seed(seed)
    inner, outer = (torch.randn(64, generator=random) if uneven else torch.full((64,), 1.3) for _ in range(2))
    sign = torch.ones(positions, 1)
    sign[1::2] = kept - 1
    inputs = inner * (1 + noise * torch.randn(positions, 64, generator=random))
    x = torch.cat([inputs, sign * outer * size], dim=1).unsqueeze(0)
    for clip in (1e-3, 1.0):
        assert torch.linalg.vector_norm(total(model, torch.zeros(64 * 64), x, torch.tensor([-1e4]), clip)) <= clip


@pytest.mark.parametrize("kind", [Weighed, Looked])
@pytest.mark.parametrize("positions", [8, 16, 32])
def test_terms_that_overflow_cannot_hide_a_gradient(kind: type[nn.Module], positions: int) -> None:
    """One position against all the others, so large that sums of their products overflow to minus infinity."""
    wide = 2 * positions
    model = own(kind, (positions, 2 * wide) if kind is Weighed else (positions,))
    weights, worst = torch.zeros(model.parameters), 0.0
    for size in torch.logspace(18, 19.26, 12).tolist():
        for share in (1.5, 2.5, 4.0, 5.0, 10.0):
            for against in {0, positions // 2, positions - 1}:
                each = torch.full((positions,), size / share)
                each[against] = -size
                if kind is Weighed:
                    x = torch.zeros(positions, 2 * wide)
                    x[:, 0], x[:, wide] = math.sqrt(size), each / math.sqrt(size)
                else:
                    x = each
                moved = total(model, weights, x.unsqueeze(0), torch.tensor([-1.0]), 1.0)
                worst = max(worst, float(torch.linalg.vector_norm(moved)))
    assert worst <= 1.0


@pytest.mark.parametrize("clip", [1e-3, 1e-2, 1.0])
@pytest.mark.parametrize("tiny", [1e-45, 1e-30, 2.6e-23, 1e-20])
def test_a_tiny_input_times_a_huge_error_is_clipped(tiny: float, clip: float) -> None:
    """The square of the one is zero in float32, their product is not small at all."""
    for huge in (1e18, 1.8e19, 1e30):
        model = own(Plain, (10_000,))
        moved = total(model, torch.zeros(10_000), torch.full((1, 10_000), tiny), torch.tensor([-huge]), clip)
        assert torch.linalg.vector_norm(moved) <= clip
        model = own(Weighed, (2, 200))
        x = torch.full((1, 2, 200), tiny)
        x[:, :, 100:] = huge / 10
        assert torch.linalg.vector_norm(total(model, torch.zeros(10_000), x, torch.tensor([-1.0]), clip)) <= clip


@pytest.mark.parametrize("clip", [1e-7, 1e-6, 1e-5, 1e-3])
def test_the_longest_gradients_are_clipped_to_the_shortest_bounds(clip: float) -> None:
    """Their factor is a denormal number, of which float32 has few."""
    model = own(Plain, (1,))
    for share in torch.linspace(0.1, 1, 50):
        moved = total(model, torch.zeros(1), share.view(1, 1) * 1.8e19, torch.tensor([-1.8e19]), clip)
        assert torch.linalg.vector_norm(moved) <= clip


def test_norms_of_long_vectors_are_not_rounded_down() -> None:
    """Sixteen million equal squares, added up in float32, can be more than two per cent short."""
    for value in (1.2051, 1.4359, 1.6154):
        x = torch.full((1, 1, 1 << 24), value)
        true = torch.linalg.vector_norm(x, dtype=torch.float64)
        for held in (Outer(x, torch.ones(1, 1, 1), lambda v: v), Whole.of(x[0])):
            assert float(held.norms()) >= float(true) * (1 - 2**-9)


def test_many_positions_on_one_row_of_a_table_keep_the_bound() -> None:
    """Records that bring a row's sum to the edge of a power of two, and others that are rounded away beyond it."""
    positions, many = 200, 64
    model = own(Looked, (positions,))
    clip = 64 / (many - 0.1) / ROUNDING  # the sum of all 64 lies above 64, without one of them below
    x, y = torch.ones(127, positions), torch.full((127,), -1e3)
    y[many:] = 0.49 * 64 * 2**-23
    weights = torch.zeros(model.parameters)
    moved = total(model, weights, x, y, clip) - total(model, weights, x[1:], y[1:], clip)
    assert torch.linalg.vector_norm(moved) <= clip


@pytest.mark.parametrize("batches", [8, 160, 800])
def test_a_record_that_shifts_all_micro_batches_keeps_the_bound(batches: int) -> None:
    """The same edge in every micro-batch: a record at the front brings every one of them over it."""
    model = ModelSpec("linear", (1,), 0).build()
    clip = 64 / 63.95 / ROUNDING
    small = torch.full((64,), 0.49 * 64 * 2**-23)
    one = torch.cat([torch.full((63,), -1e3), small, torch.full((1,), -1e3)])
    y = torch.cat([torch.full((1,), -1e3), one.repeat(batches)])
    x = torch.zeros(len(y), 1)  # so that the gradient is that of the bias alone
    moved = total(model, torch.zeros(2), x, y, clip) - total(model, torch.zeros(2), x[1:], y[1:], clip)
    assert torch.linalg.vector_norm(moved) <= clip


@pytest.mark.xfail(strict=False, reason="torch may take another kernel for 32 rows than for 33; see the docstring")
def test_the_gradients_of_the_others_do_not_depend_on_a_record() -> None:
    """Records whose error is nothing but rounding: another length of the batch, another rounding, another sign.

    A known limit: the bound is proved for exact arithmetic and checked for the rounding of sums. What a record's own
    gradient loses by rounding depends, in its last bits, on how many records are beside it. These are made so that
    nothing but the last bits is left, and then all of them turn at once.
    """
    model, worst = ModelSpec("linear", (5,), 0).build(), 0.0
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        one, weights = 1e6 * torch.randn(1, 5, generator=random), torch.randn(6, generator=random)
        y = (one.double() @ weights[:5].double() + weights[5].double()).float().repeat(33)
        x = one.repeat(33, 1)
        moved = total(model, weights, x, y, 1.0) - total(model, weights, x[1:], y[1:], 1.0)
        worst = max(worst, float(torch.linalg.vector_norm(moved)))
    assert worst <= 1.0


# ---- gradients that are not finite -----------------------------------------------------------------

HOLDERS = {
    "outer": ((5,), lambda: nn.Linear(5, 4), Outer),
    "outer, several positions": ((3, 20), lambda: nn.Linear(20, 20), Outer),
    "whole": ((11, 4), lambda: nn.Linear(4, 4), Whole),
    "whole, convolution": ((1, 6, 6), lambda: nn.Conv2d(1, 4, 3), Whole),
    "whole, norm": ((6,), lambda: nn.LayerNorm(6), Whole),
    "lookup": ((6,), lambda: nn.Sequential(Ids(20), nn.Embedding(20, 4)), Lookup),
}


@pytest.mark.parametrize("where", ["target", "whole record", "one entry"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_gradient_that_is_not_finite_counts_for_nothing(name: str, bad: float, where: str) -> None:
    """And leaves the others as they are: those of the same client, and of the next one."""
    features, layers, held = HOLDERS[name]
    model = model_of(features, layers, classes=0)
    weights, records = weights_of(model, 2, 0), holding(model, [6, 5], 0)
    if where == "target":
        records[0].y[2] = bad
    elif where == "whole record":
        records[0].x[2] = bad
    else:
        records[0].x[2].view(-1)[1] = bad
    drawn = all_of(records)
    found = clipped_sums(model, weights, records, drawn, 0.5)
    expected = expected_sums(model, weights, records, [torch.tensor([0, 1, 3, 4, 5]), drawn[1]], 0.5)
    largest, added = expected.total.abs().max(), found.total - expected.total
    assert added[1].abs().max() <= TOLERANCE * largest and found.not_finite[1] == 0
    if where == "target" or found.not_finite[0]:
        assert found.not_finite[0] == 1 and added[0].abs().max() <= TOLERANCE * largest
        assert torch.equal(found.clipped, expected.clipped)
    else:  # what is not finite was squashed on the way to the loss, and the record is one like others
        assert torch.linalg.vector_norm(added[0]) <= 0.5
    weight = next(one for key, one in agree(model, 1, 2).items() if key.endswith("weight"))
    assert type(weight) is held


def test_padding_that_is_not_a_number_is_no_record() -> None:
    model = own(Directed, (4,), 3)
    weights, records = weights_of(model, 3, 0), holding(model, [3, 9, 1], 0)
    drawn = all_of(records)
    found = clipped_sums(model, weights, records, drawn, 0.5)
    assert_sums(found, expected_sums(model, weights, records, drawn, 0.5))
    records[1].x[4] = 0.0  # now it is a record
    assert clipped_sums(model, weights, records, drawn, 0.5).not_finite.tolist() == [0, 1, 0]


# ---- what users write ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A module that a user might write: its parts, and what it does with them before the last layer (n, 5).

    Attributes:
        why: it has no rule, in words that the obstacle must hold; empty if book-keeping follows it.
    """

    features: tuple[int, ...]
    parts: Callable[[], Mapping[str, Any]]
    hidden: Callable[[Any, Tensor], Tensor]
    why: str = ""


class User(nn.Module):
    def __init__(self, features: Sequence[int], classes: int, written: Written) -> None:
        super().__init__()
        self.written, self.out = written, nn.Linear(5, classes)
        for name, part in written.parts().items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.written.hidden(self, x))


def user(written: Written) -> Model:
    return ModelSpec(f"{__name__}:User", written.features, 3, {"written": written}).build()


def linear() -> Mapping[str, Any]:
    return {"first": nn.Linear(6, 5)}


def on_words() -> Mapping[str, Any]:
    return {"first": nn.Linear(4, 5)}


def on_images() -> Mapping[str, Any]:
    return {"first": nn.Conv2d(2, 4, 3, padding=1), "last": nn.Linear(36, 5)}


def matrix() -> Mapping[str, Any]:
    return {"weight": nn.Parameter(torch.ones(6, 5).cumsum(dim=0).cos())}


def pooled(m: Any, x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(m.first(x)), 2)


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1 + m.first(x).tanh()
    return F.relu(m.first(x)) * scale


def looking(m: Any, x: Tensor) -> Tensor:
    weight = m.first.weight
    assert weight.shape == (5, x.shape[1]) and weight.ndim == 2 and weight.is_floating_point()
    return F.relu(m.first(x.to(weight.device, weight.dtype)))


def in_place(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    more = m.rest(F.relu(x, inplace=True))
    more += x
    return F.relu(more, inplace=True)


FOLLOWED = {
    "a view": Written((2, 6, 6), on_images, lambda m, x: m.last(pooled(m, x).view(len(x), -1))),
    "a view of unknown length": Written((2, 6, 6), on_images, lambda m, x: m.last(pooled(m, x).view(-1, 36))),
    "a view of the input": Written(
        (2, 6, 6), lambda: {"first": nn.Linear(72, 5)}, lambda m, x: F.relu(m.first(x.view(len(x), -1)))
    ),
    "keywords": Written(
        (6,), linear, lambda m, x: F.relu(F.linear(input=x, weight=m.first.weight, bias=m.first.bias))
    ),
    "keywords, images": Written(
        (2, 6, 6), on_images,
        lambda m, x: m.last(F.conv2d(input=x, weight=m.first.weight, stride=2, padding=1).flatten(1)),
    ),
    "keywords, norm": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "norm": nn.LayerNorm(5)},
        lambda m, x: F.layer_norm(input=m.first(x), normalized_shape=(5,), weight=m.norm.weight, bias=m.norm.bias),
    ),
    "in place": Written((6,), lambda: {"first": nn.Linear(6, 5), "rest": nn.Linear(5, 5)}, in_place),
    "in place, norm": Written(
        (6,), lambda: {"first": nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))},
        lambda m, x: F.relu(m.first(x), inplace=True),
    ),
    "in place, images": Written(
        (2, 6, 6),
        lambda: {"first": nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 4)),
                 "last": nn.Linear(36, 5)},
        lambda m, x: m.last(F.max_pool2d(F.relu(m.first(x), inplace=True), 2).flatten(1)),
    ),
    "instance norm": Written(
        (2, 6, 6), lambda: {"norm": nn.InstanceNorm2d(2), **on_images()},
        lambda m, x: m.last(pooled(m, m.norm(x)).flatten(1)),
    ),
    "attention by hand": Written(
        (5, 24), lambda: {name: nn.Linear(24, 24) for name in ("query", "key", "value")} | {"last": nn.Linear(24, 5)},
        lambda m, x: m.last((torch.softmax(m.query(x) @ m.key(x).mT, dim=2) @ m.value(x)).mean(dim=1)),
    ),
    "shape and type of a parameter": Written((6,), linear, looking),
    "a frozen bias": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "bias": torch.ones(5)},
        lambda m, x: F.relu(F.linear(x, m.first.weight, m.bias)),
    ),
    "a frozen layer": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "rest": nn.Linear(5, 5).requires_grad_(False)},
        lambda m, x: F.relu(m.rest(F.relu(m.first(x)))),
    ),
    "a layer that is not used": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "rest": nn.Linear(5, 5)}, lambda m, x: F.relu(m.first(x))
    ),
    "without a gradient": Written((6,), linear, without_gradient),
    "functional_call": Written(
        (6,), linear,
        lambda m, x: F.relu(torch.func.functional_call(m.first, dict(m.first.named_parameters()), (x,))),
    ),
    "one position, folded away": Written(
        (1, 4), on_words, lambda m, x: F.relu(m.first(x.reshape(-1, 4))).reshape(len(x), -1, 5).mean(dim=1)
    ),
    "a list of parameters that torch knows": Written(
        (6,), lambda: {"kept": nn.ParameterList([torch.ones(5, 6).cumsum(dim=1).cos(), torch.zeros(5)])},
        lambda m, x: F.relu(F.linear(x, *m.kept)),
    ),
}  # fmt: skip

SLOW = {
    "a bare parameter": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "scale": nn.Parameter(torch.ones(5))},
        lambda m, x: F.relu(m.first(x)) * m.scale, "mul",
    ),
    "a parameter without axes": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "scale": nn.Parameter(torch.tensor(1.5))},
        lambda m, x: F.relu(m.first(x)) * m.scale, "mul",
    ),
    "groups": Written(
        (2, 6, 6), lambda: {"first": nn.Conv2d(2, 4, 3, padding=1, groups=2), "last": nn.Linear(36, 5)},
        lambda m, x: m.last(pooled(m, x).flatten(1)), "groups",
    ),
    "more padding on one side": Written(
        (2, 6, 6), lambda: {"first": nn.Conv2d(2, 4, 2, padding="same"), "last": nn.Linear(36, 5)},
        lambda m, x: m.last(pooled(m, x).flatten(1)), "more on one side",
    ),
    "a product": Written((6,), matrix, lambda m, x: F.relu(x @ m.weight), "matmul"),
    "a transposed weight": Written((6,), matrix, lambda m, x: F.relu(F.linear(x, m.weight.t())), "Tensor.t"),
    "there and back": Written(
        (6,), linear, lambda m, x: m.first(F.linear(m.first(x).tanh(), m.first.weight.t())), "Tensor.t"
    ),
    "einsum": Written((6,), matrix, lambda m, x: F.relu(torch.einsum("ni,io->no", x, m.weight)), "einsum"),
    "an index": Written((6,), matrix, lambda m, x: m.weight[Ids(6)(x)].mean(dim=1), "__getitem__"),
    "bilinear": Written((6,), lambda: {"first": nn.Bilinear(6, 6, 5)}, lambda m, x: m.first(x, x), "bilinear"),
    "weight norm": Written(
        (6,), lambda: {"first": parametrizations.weight_norm(nn.Linear(6, 5))}, lambda m, x: F.relu(m.first(x)),
        "weight_norm",
    ),
    "added positions": Written(
        (7, 4), lambda: {"first": nn.Linear(4, 5), "places": nn.Parameter(torch.ones(7, 4).cumsum(dim=0).sin())},
        lambda m, x: F.relu(m.first(x + m.places)).mean(dim=1), "add",
    ),
    "looked up positions": Written(
        (7, 4), lambda: {"first": nn.Linear(4, 5), "places": nn.Embedding(7, 4)},
        lambda m, x: F.relu(m.first(x + m.places(torch.arange(7)))).mean(dim=1), "records are not first",
    ),
    "attention": Written(
        (7, 4), lambda: {"first": nn.MultiheadAttention(4, 2, batch_first=True), "last": nn.Linear(4, 5)},
        lambda m, x: m.last(m.first(x, x, x)[0].mean(dim=1)), "multi_head_attention",
    ),
    "a transformer": Written(
        (7, 4),
        lambda: {"first": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), "last": nn.Linear(4, 5)},
        lambda m, x: m.last(m.first(x).mean(dim=1)), "multi_head_attention",
    ),
    "time first": Written(
        (7, 4), on_words, lambda m, x: F.relu(m.first(x.transpose(0, 1))).mean(dim=0), "records are not first"
    ),
    "time first, of length one": Written(
        (1, 4), on_words, lambda m, x: F.relu(m.first(x.transpose(0, 1))).mean(dim=0), "records are not first"
    ),
    "positions folded into records": Written(
        (7, 4), on_words, lambda m, x: F.relu(m.first(x.flatten(0, 1))).unflatten(0, (-1, 7)).mean(dim=1),
        "records are not first",
    ),
    "a layer on what all records share": Written(
        (6,), linear, lambda m, x: F.relu(m.first(torch.ones(1, 6))) * x.mean(dim=1, keepdim=True),
        "records are not first",
    ),
    "values of a parameter": Written((6,), linear, lambda m, x: m.first(x) / m.first.weight.data.norm(), "data"),
}  # fmt: skip


REFUSED = {
    "gru": (Written((7, 4), lambda: {"first": nn.GRU(4, 5, batch_first=True)}, lambda m, x: m.first(x)[0][:, -1]),
            "'first' is nn.GRU", "LSTMLayer"),
    "rnn": (Written((7, 4), lambda: {"first": nn.RNN(4, 5, batch_first=True)}, lambda m, x: m.first(x)[0][:, -1]),
            "'first' is nn.RNN", "LSTMLayer"),
    "batch norm": (
        Written((6,), lambda: {"norm": nn.BatchNorm1d(6), **linear()}, lambda m, x: m.first(m.norm(x))),
        "'norm' is BatchNorm1d", "GroupNorm",
    ),
    "batch norm with neither parameters nor buffers": (
        Written((6,), lambda: {"norm": nn.BatchNorm1d(6, affine=False, track_running_stats=False), **linear()},
                lambda m, x: m.first(m.norm(x))),
        "'norm' is BatchNorm1d", "GroupNorm",
    ),
    "batch norm by hand": (
        Written((6,), linear, lambda m, x: m.first(F.batch_norm(x, None, None, training=True))),
        "mixes the records", "GroupNorm",
    ),
    "less the mean of the batch": (
        Written((6,), linear, lambda m, x: F.relu(m.first(x - x.mean(dim=0)))), "mixes the records", "GroupNorm"
    ),
}  # fmt: skip


class Product(torch.autograd.Function):
    """A linear layer of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g[0] @ weight, g[0].t() @ x


class VmapProduct(Product):
    """The same in the newer form, which vmap can follow."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


def mean_in_gradients_only(m: Any, x: Tensor) -> Tensor:
    x = m.first(x)
    mean = x.mean(dim=0)
    return x + mean - mean.detach()


def sorted_by_length(m: Any, x: Tensor) -> Tensor:
    """As for packed sequences, where zeros are padding: the order depends on the records."""
    order = (x != 0).any(dim=2).sum(dim=1).sort(descending=True, stable=True).indices
    return F.relu(m.first(x[order])).sum(dim=1)[order.argsort()]


def without_empty_records(m: Any, x: Tensor) -> Tensor:
    here = (x != 0).any(dim=1)
    hidden = x.new_zeros(len(x), 5)
    hidden[here] = F.relu(m.first(x[here]))
    return hidden


def written_to_later(m: Any, x: Tensor) -> Tensor:
    """Plain autograd cannot do with it either."""
    x = m.first(x)
    more = m.rest(x)
    x += more
    return x


def half_precision(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.relu(m.first(x))
    return hidden.float()


def two() -> Mapping[str, Any]:
    return {"first": nn.Linear(6, 5), "rest": nn.Sequential(nn.ReLU(), nn.Linear(5, 5), nn.ReLU())}


def kept_in_a_list() -> Mapping[str, Any]:
    """Whoever sets other parameters for the module does not find these."""
    first = nn.Linear(6, 5)
    return {"first": first, "kept": [first.weight, first.bias]}


def table(**options: Any) -> Written:
    return Written((6,), lambda: {"first": nn.Embedding(9, 5, **options)}, lambda m, x: m.first(Ids(9)(x)).mean(dim=1))


NEVER_WRONG = {
    "lstm": Written((7, 4), lambda: {"first": nn.LSTM(4, 5, batch_first=True)}, lambda m, x: m.first(x)[0][:, -1]),
    "lstm cell": Written((6,), lambda: {"first": nn.LSTMCell(6, 5)}, lambda m, x: m.first(x)[0]),
    "a mean over the batch in the gradients only": Written((6,), linear, mean_in_gradients_only),
    "records in another order": Written((6,), linear, lambda m, x: F.relu(m.first(x.flip(0))).flip(0)),
    "records sorted by length": Written((7, 4), on_words, sorted_by_length),
    "without empty records": Written((6,), linear, without_empty_records),
    "not a number for most records": Written((6,), linear, lambda m, x: m.first(x.asin().flip(0)).flip(0)),
    "time first, as long as a trial": Written((6, 4), on_words, lambda m, x: m.first(x.transpose(0, 1)).mean(dim=0)),
    "as many positions as records in a trial": Written(
        (6, 4), lambda: {"first": nn.Linear(4, 5), "places": nn.Embedding(6, 4)},
        lambda m, x: F.relu(m.first(x + m.places(torch.arange(6)))).mean(dim=1),
    ),
    "written to later": Written((6,), lambda: {"first": nn.Linear(6, 5), "rest": nn.Linear(5, 5)}, written_to_later),
    "own function": Written((6,), linear, lambda m, x: F.relu(Product.apply(x, m.first.weight))),
    "own function, not first": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "weight": nn.Parameter(torch.eye(5))},
        lambda m, x: F.relu(Product.apply(m.first(x), m.weight)),
    ),
    "own function for vmap": Written((6,), linear, lambda m, x: F.relu(VmapProduct.apply(x, m.first.weight))),
    "a number": Written(
        (6,), lambda: {"first": nn.Linear(6, 5), "scale": nn.Parameter(torch.ones(1))},
        lambda m, x: F.relu(m.first(x)) * m.scale.item(),
    ),
    "recomputed layers": Written((6,), two, lambda m, x: checkpoint(m.rest, m.first(x), use_reentrant=False)),
    "recomputed first layers": Written(
        (6,), two, lambda m, x: checkpoint(lambda x: m.rest(m.first(x)), x, use_reentrant=False)
    ),
    "recomputed layers, unchecked": Written(
        (6,), two, lambda m, x: checkpoint(m.rest, m.first(x), use_reentrant=False, determinism_check="none")
    ),
    "recomputed layers, the older kind": Written(
        (6,), two, lambda m, x: checkpoint(m.rest, m.first(x), use_reentrant=True)
    ),
    "recomputed activation": Written(
        (6,), linear, lambda m, x: checkpoint(torch.tanh, m.first(x), use_reentrant=False)
    ),
    "compiled": Written((6,), lambda: {"first": torch.jit.script(nn.Linear(6, 5))}, lambda m, x: F.relu(m.first(x))),
    "parameters in a list": Written((6,), kept_in_a_list, lambda m, x: F.relu(F.linear(x, *m.kept))),
    "a product with parameters in a list": Written((6,), kept_in_a_list, lambda m, x: F.relu(x @ m.kept[0].t())),
    "a layer in a list": Written((6,), lambda: {"kept": [nn.Linear(6, 5)]}, lambda m, x: F.relu(m.kept[0](x))),
    "vmap over records": Written((7, 4), on_words, lambda m, x: F.relu(torch.vmap(m.first)(x)).mean(dim=1)),
    "vmap over positions": Written(
        (7, 4), on_words, lambda m, x: F.relu(torch.vmap(m.first, in_dims=1, out_dims=1)(x)).mean(dim=1)
    ),
    "half precision": Written((6,), linear, half_precision),
    "double precision": Written(
        (6,), lambda: {"first": nn.Linear(6, 5).double(), "out": nn.Linear(5, 3).double()},
        lambda m, x: F.relu(m.first(x.double())),
    ),
    "memory as it lies": Written(
        (2, 6, 6), lambda: {"first": nn.Linear(72, 5)}, lambda m, x: m.first(x.as_strided((len(x), 72), (72, 1)))
    ),
    "a bag of words": Written((6,), lambda: {"first": nn.EmbeddingBag(9, 5)}, lambda m, x: m.first(Ids(9)(x))),
    "a sparse table": table(sparse=True),
    "a table that looking up changes": table(max_norm=1.0),
    "a table that counts the batch": table(scale_grad_by_freq=True),
    "ids that are in no table": Written(
        (6,), lambda: {"first": nn.Embedding(9, 5)}, lambda m, x: m.first(x.long()).mean(dim=1)
    ),
}  # fmt: skip


def alone(model: Model, weights: Tensor, rows: Records) -> Tensor:
    """Each record's gradient (n, p) by plain autograd, in a copy of the module that holds the parameters itself."""
    module, gradients = copy.deepcopy(model.module), []
    for name, value in model.unflatten(weights).items():
        module.get_parameter(name).data = value
    for x, y in zip(rows.x.split(1), rows.y.split(1), strict=True):
        module.zero_grad()
        F.cross_entropy(module(x.clone()), y).backward()
        found = [module.get_parameter(name) for name in model.names]
        gradients.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in found]))
    return torch.stack(gradients).double()


def assert_right(model: Model, tolerance: float = 1e-4) -> None:
    """At parameters far from the start, on records of different lengths; zeros are what batches are padded with."""
    for seed in range(4):
        weights, records = weights_of(model, 3, seed), holding(model, [5, 9, 1], seed, scale=0.4)
        for i, x in enumerate([x for rows in records for x in rows.x] if seed % 2 else []):
            x[len(x) * (i % 3) // 2 :] = 0.0
        found = clipped_sums(model, weights, records, all_of(records), 0.3)
        for mine, rows, sum_ in zip(weights, records, found.total, strict=True):
            each = alone(model, mine, rows)
            factor = (0.3 * ROUNDING / torch.linalg.vector_norm(each, dim=1, keepdim=True)).clamp(max=1.0)
            expected = (factor * each).sum(dim=0)
            assert (sum_ - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_book_keeping_follows(name: str) -> None:
    model = user(FOLLOWED[name])
    assert path_of(model).obstacle is None
    assert_right(model)


@pytest.mark.filterwarnings("ignore")  # of torch, about its own speed
@pytest.mark.parametrize("name", SLOW)
def test_what_has_no_rule_takes_the_slow_path_and_says_why(name: str) -> None:
    model = user(SLOW[name])
    assert SLOW[name].why in (path_of(model).obstacle or "nothing")
    assert_right(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradients_of_records_is_refused(name: str) -> None:
    written, what, fix = REFUSED[name]
    with pytest.raises(UserError) as error:
        path_of(user(written))
    assert what in error.value.what and fix in error.value.fix


@pytest.mark.filterwarnings("ignore")  # of torch, about its own speed and what it will drop
@pytest.mark.parametrize("name", NEVER_WRONG)
def test_right_or_refused_and_never_silently_wrong(name: str) -> None:
    """By book-keeping or the slow path; what is refused is refused in words, not by an error of torch."""
    try:
        model = user(NEVER_WRONG[name])
        path_of(model)
    except UserError:
        return
    assert_right(model, 1e-2 if name == "half precision" else 1e-4)


MIXES_RARELY: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a branch": lambda m, x: m.first(x if x.sum() < 1e9 else 0 * x),
    "a number": lambda m, x: m.first(x * min(1.0, 1e9 / max(x.abs().max().item(), 1.0))),
    "a choice": lambda m, x: m.first(torch.where(x.sum() < 1e9, x, 0 * x)),
    "a scale": lambda m, x: m.first(x / x.max().clamp(min=1e9) * 1e9),
}


@pytest.mark.parametrize("name", MIXES_RARELY)
def test_what_one_record_out_of_bounds_would_do_to_all_others_is_refused(name: str) -> None:
    """On ordinary records these treat each apart; a single huge one would change the gradients of the whole batch."""
    with pytest.raises(UserError):
        path_of(user(Written((6,), linear, MIXES_RARELY[name])))


# ---- memory, and other devices ---------------------------------------------------------------------


def resident() -> float:
    """Megabytes that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


@needs_proc
def test_a_thousand_steps_hold_no_more_memory_than_ten() -> None:
    """What is written down must not keep itself alive: a cycle through C++ is never collected."""
    model = ModelSpec("cnn", (1, 8, 8), 3).build()
    weights, records = weights_of(model, 1, 0), holding(model, [8], 0)
    for step in range(1000):
        clipped_sums(model, weights, records, all_of(records), 1.0)
        if step == 10:
            before = resident()
    assert resident() - before < 30


@needs_proc
def test_a_full_batch_needs_no_more_memory_than_a_few_micro_batches() -> None:
    """All gradients of 20,000 records at once would be a gigabyte."""
    model = ModelSpec("cnn", (1, 8, 8), 3).build()
    weights, records = weights_of(model, 1, 0), holding(model, [20_000], 0)
    clipped_sums(model, weights, records, [torch.arange(512)], 1.0)
    before, seen, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    clipped_sums(model, weights, records, all_of(records), 1.0)
    done.set()
    watcher.join()
    assert max(seen) - before < 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SMALL)
def test_a_gpu_gives_the_same_sums(name: str) -> None:
    model = BUILT_IN[name].build()
    weights, records = weights_of(model, 3, 0), holding(model, [5, 9, 0], 0)
    expected = clipped_sums(model, weights, records, all_of(records), 0.5)
    moved = [Records(rows.x.cuda(), rows.y.cuda()) for rows in records]
    found = clipped_sums(model, weights.cuda(), moved, [rows.cuda() for rows in all_of(records)], 0.5)
    assert (found.total.cpu() - expected.total).abs().max() <= 1e-4 * expected.total.abs().max()
    assert torch.equal(found.clipped.cpu(), expected.clipped)
