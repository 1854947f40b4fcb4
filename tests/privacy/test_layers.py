"""What makes the private step fast must not change it: the compiled kernel, pooling first, records side by side."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fairveil.data.federation import Records, side_by_side
from fairveil.models import LANES, ModelSpec, _cross_entropies
from fairveil.privacy import layers
from fairveil.privacy.bookkeeping import Book
from fairveil.privacy.gradients import clipped_sums
from fairveil.privacy.layers import Convolution, Whole, channels_last

some = settings(deadline=None, derandomize=True, max_examples=60)
LEVELS = [pytest.param(level, id=("pure", "AVX2", "AVX-512")[level]) for level in range(layers.LEVEL + 1)]


def gradients_alone(x: Tensor, g: Tensor, kernel: tuple[int, ...], **steps: object) -> Tensor:
    """Each record's gradient (n, *kernel), by autograd in float64."""
    each = []
    for one, back in zip(x.double(), g.double(), strict=True):
        weight = torch.zeros(kernel, dtype=torch.float64, requires_grad=True)
        out = F.conv2d(one.unsqueeze(0), weight, None, **steps)  # type: ignore[arg-type]
        each.append(torch.autograd.grad(out, weight, back.unsqueeze(0))[0])
    return torch.stack(each)


@pytest.mark.parametrize("level", LEVELS)
@some
@given(
    channels=st.sampled_from([1, 2, 3, 5, 8, 16, 20]), outputs=st.sampled_from([8, 11, 16, 17, 32, 40, 50, 64]),
    kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)), stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=st.integers(1, 2),
    size=st.tuples(st.integers(3, 12), st.integers(3, 12)), rows=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_gradients_of_a_convolution(
    level: int, channels: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    dilation: int, size: tuple[int, int], rows: int, seed: int,
) -> None:  # fmt: skip
    """Gradients, lengths and the bias, by every form that fits: float32 sums of at most 144 terms, to 1e-5."""
    assume(size[0] + 2 * padding[0] > dilation * (kernel[0] - 1) and size[1] + 2 * padding[1] >= kernel[1])
    random = torch.Generator().manual_seed(seed)
    shape, spread = (outputs, channels, *kernel), (dilation, 1)
    x = torch.randn(rows, channels, *size, generator=random)
    out = F.conv2d(x, torch.zeros(shape), None, stride, padding, spread)
    g = torch.randn(out.shape, generator=random)
    parameters = [torch.zeros(1, *shape), torch.zeros(1, outputs)]
    layer = Convolution(1, ["weight", "bias"], parameters, stride, padding, spread, channels_last)
    layer.x = channels_last(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "LEVEL", level)
        found = dict(layer.gradients(g))
    expected = gradients_alone(x, g, shape, stride=stride, padding=padding, dilation=spread)
    largest, lengths = expected.abs().max(), expected.flatten(1).norm(dim=1)
    assert (found["weight"].whole() - expected).abs().max() <= 1e-5 * largest
    norms = torch.linalg.vector_norm(found["weight"].norms(), dim=0)
    assert (norms - lengths).abs().max() <= 1e-5 * lengths.max()
    assert torch.allclose(found["bias"].whole().double(), g.double().sum(dim=(2, 3)), atol=1e-4)
    total, factor = torch.empty(1, *shape), torch.rand(1, rows, generator=random)
    found["weight"].write_sum(total, factor)
    assert (total[0] - torch.tensordot(factor[0].double(), expected, 1)).abs().max() <= 1e-5 * rows * largest


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_form_of_the_compiled_kernel(level: int) -> None:
    """All shapes of a grid on which each form is the best for some: blocks that fit, that overlap, and that do not."""
    from fairveil import _convolution

    random = torch.Generator().manual_seed(0)
    size, able = 7, 0
    for rows, columns, channels in itertools.product((1, 2, 3, 5), (1, 3, 5), (1, 2, 3, 8, 16, 24)):
        x = torch.randn(2, size, size, channels, generator=random)
        patches = F.unfold(x.permute(0, 3, 1, 2).double(), (rows, columns)).unflatten(1, (channels, rows, columns))
        for outputs in (8, 16, 24, 32, 50):
            g = torch.randn(2, size - rows + 1, size - columns + 1, outputs, generator=random)
            out, sums = torch.empty(2, rows, columns, channels, outputs), torch.empty(2, outputs)
            lengths = torch.empty(2, dtype=torch.float64)
            arrays = [t.numpy() for t in (x, g, out, sums, lengths)]
            if not _convolution.gradients(*arrays, (1, 1), (0, 0), 1, level):
                continue
            able += 1
            expected = torch.einsum("ncrst,nto->nrsco", patches, g.flatten(1, 2).double())
            assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
            assert torch.allclose(lengths, expected.flatten(1).norm(dim=1), rtol=1e-5)
            assert torch.allclose(sums.double(), g.double().sum(dim=(1, 2)), atol=1e-4)
    assert able > 150  # of 360: the others have a kernel or outputs too small for any block


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [(50, 60), (1, 40_000), (3, 2500)])
def test_many_positions_are_added_up_in_stretches(
    level: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal signs, so that rounding adds up: 40,000 one after the other would be off by twice what is allowed."""
    monkeypatch.setattr(layers, "LEVEL", level)
    random = torch.Generator().manual_seed(0)
    x, g = torch.rand(2, 3, *size, generator=random), torch.rand(2, 16, *size, generator=random)
    parameters = [torch.zeros(1, 16, 3, 1, 3), torch.zeros(1, 16)]
    layer = Convolution(1, ["weight", "bias"], parameters, (1, 1), (0, 1), (1, 1), channels_last)
    layer.x = channels_last(x)
    found = dict(layer.gradients(g))
    expected = gradients_alone(x, g, (16, 3, 1, 3), padding=(0, 1))
    assert (found["weight"].whole() - expected).abs().max() <= 5e-6 * expected.abs().max()
    bias = g.double().sum(dim=(2, 3))
    assert (found["bias"].whole() - bias).abs().max() <= 5e-6 * bias.max()


@pytest.mark.parametrize("level", LEVELS[1:])
def test_the_compiled_kernel_is_used_and_each_record_is_alone(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layers of the usual networks; and what a record gets is the same to the last bit beside any other."""
    monkeypatch.setattr(layers, "LEVEL", level)
    random = torch.Generator().manual_seed(0)
    for channels, outputs, side, size in ((1, 16, 5, 28), (16, 32, 5, 14), (3, 64, 3, 32), (64, 64, 3, 16)):
        weight = torch.zeros(1, outputs, channels, side, side)
        layer = Convolution(1, ["weight", None], [weight, None], (1, 1), (side // 2,) * 2, (1, 1), channels_last)
        x = torch.randn(5, channels, size, size, generator=random)
        g = torch.randn(5, outputs, size, size, generator=random)
        layer.x = channels_last(x)
        ((_, together),) = layer.gradients(g)
        assert isinstance(together, Whole) and together.lengths is not None
        layer.x = channels_last(x[3:4])
        ((_, alone),) = layer.gradients(g[3:4])
        assert isinstance(alone, Whole) and torch.equal(alone.pieces[:, 0], together.pieces[:, 3])


@pytest.mark.skipif(not layers.LEVEL, reason="there is no compiled kernel")
def test_the_compiled_kernel_refuses_what_would_make_it_read_or_write_beside() -> None:
    from fairveil import _convolution

    def arrays(**change: np.ndarray) -> list[np.ndarray]:
        shapes = {"x": (2, 6, 6, 3), "g": (2, 4, 4, 16), "out": (2, 3, 3, 3, 16), "sums": (2, 16)}
        made = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} | {"lengths": np.zeros(2)}
        return list((made | change).values())

    fine = ((1, 1), (0, 0), 1)
    assert _convolution.gradients(*arrays(), *fine, layers.LEVEL) is True
    assert _convolution.gradients(*arrays(), *fine, 0) is False  # there is no form of no level
    for wrong in (
        {"x": np.zeros((2, 5, 6, 3), np.float32)}, {"x": np.zeros((2, 6, 5, 3), np.float32)},
        {"x": np.zeros((1, 6, 6, 3), np.float32)}, {"g": np.zeros((1, 4, 4, 16), np.float32)},
        {"g": np.zeros((2, 4, 4, 17), np.float32)}, {"g": np.zeros((2, 5, 4, 16), np.float32)},
        {"out": np.zeros((2, 4, 3, 3, 16), np.float32)}, {"out": np.zeros((2, 3, 3, 2, 16), np.float32)},
        {"sums": np.zeros((2, 15), np.float32)}, {"sums": np.zeros((1, 16), np.float32)}, {"lengths": np.zeros(1)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not go together"):
            _convolution.gradients(*arrays(**wrong), *fine, layers.LEVEL)
    for stepped in (((2, 1), (0, 0), 1), ((1, 1), (0, 0), 2), ((0, 1), (0, 0), 1), ((1, 1), (-1, 0), 1)):
        with pytest.raises(ValueError, match="do not go together"):
            _convolution.gradients(*arrays(), *stepped, layers.LEVEL)
    for wrong in ({"x": np.zeros((2, 6, 6, 3))}, {"g": np.zeros((2, 16), np.float32)}, {"lengths": np.zeros(2, "f")}):
        with pytest.raises(TypeError):
            _convolution.gradients(*arrays(**wrong), *fine, layers.LEVEL)
    with pytest.raises((BufferError, ValueError)):
        _convolution.gradients(*arrays(out=np.zeros((16, 3, 3, 3, 2), np.float32).T), *fine, layers.LEVEL)
    with pytest.raises(ValueError, match="no such level"):
        _convolution.gradients(*arrays(), *fine, 3)


# ---- max-pooling before ReLU -----------------------------------------------------------------------


def chain(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3), *parts, nn.Flatten(), nn.LazyLinear(3))


def kinds(module: nn.Module) -> list[str]:
    return [type(part).__name__ for part in module.children()]


def test_pooling_comes_first_and_changes_no_bit() -> None:
    """Values and gradients are the same, ties and negative windows included: the images hold few different numbers."""
    plain = chain(nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randint(-1, 2, (6, 1, 12, 12), generator=torch.Generator().manual_seed(0)).float()
    plain(x)  # which makes the lazy layer
    swapped = nn.Sequential(*(plain[number] for number in (0, 2, 1, 3, 4)))
    assert kinds(Book(plain, dict(plain.named_parameters())).module) == kinds(swapped)
    assert kinds(plain) == ["Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear"]  # the user's own is left alone
    outputs = [module(x) for module in (plain, swapped)]
    assert torch.equal(*outputs)
    found = [torch.autograd.grad(out.square().sum(), list(plain.parameters())) for out in outputs]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class MyReLU(nn.ReLU):
    pass


def hooked(back: bool) -> nn.Module:
    relu = nn.ReLU()
    if back:
        relu.register_full_backward_hook(lambda module, inputs, outputs: None)
    else:
        relu.register_forward_hook(lambda module, inputs, output: None)
    return relu


@pytest.mark.parametrize("first", [MyReLU(), hooked(False), hooked(True), nn.GELU()])
def test_pooling_stays_where_the_order_might_matter(first: nn.Module) -> None:
    module = chain(first, nn.MaxPool2d(2))
    module(torch.zeros(2, 1, 12, 12))
    assert kinds(Book(module, dict(module.named_parameters())).module) == kinds(module)


# ---- records side by side --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_records_side_by_side_give_the_same_sums(name: str) -> None:
    """To the last bit, for batches of all lengths, whoever lies beside whom; and the records are the same ones."""
    random = torch.Generator().manual_seed(0)
    model = ModelSpec(name, (12,), 4).build()
    weights = model.flatten(model.module) + 0.1 * torch.randn(5, model.parameters, generator=random)
    sizes = [9, 30, 1, 17, 40]
    apart = [Records(torch.randn(n, 12, generator=random), torch.randint(4, (n,), generator=random)) for n in sizes]
    together = side_by_side(apart)
    assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(apart, together, strict=True))
    assert len({records.x.untyped_storage().data_ptr() for records in together}) == 1
    mixed = [*together[:2], *side_by_side(apart[2:4]), apart[4]]
    for count in (1, 8, 20):
        drawn = [torch.randperm(n, generator=random)[:count] for n in sizes]
        sums = [clipped_sums(model, weights, records, drawn, 0.5) for records in (apart, together, mixed)]
        for one, other in itertools.pairwise(sums):
            assert torch.equal(one.total, other.total) and torch.equal(one.clipped, other.clipped)


def test_batches_are_filled_up_with_drawn_records_only() -> None:
    """One that is not drawn has no part in anything, whatever is in it: not even in what has no weight."""
    random = torch.Generator().manual_seed(0)
    model = ModelSpec("mlp", (12,), 4).build()
    weights = model.flatten(model.module).expand(2, -1)
    fine = [Records(torch.randn(9, 12, generator=random), torch.zeros(9, dtype=torch.int64)) for _ in range(2)]
    spoilt = [Records(torch.cat([torch.full((1, 12), math.nan), rows.x[1:]]), rows.y) for rows in fine]
    drawn = [torch.tensor([4, 2, 7]), torch.tensor([1, 2, 3, 4, 5])]
    for laid in (list, side_by_side):
        expected, found = (clipped_sums(model, weights, laid(held), drawn, 0.5) for held in (fine, spoilt))
        assert torch.equal(found.total, expected.total) and torch.equal(found.clipped, expected.clipped)
        assert not found.not_finite.any()


# ---- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10, LANES, LANES + 1, 40])
def test_cross_entropy_is_that_of_torch_and_a_matter_of_each_record_alone(classes: int) -> None:
    random = torch.Generator().manual_seed(classes)
    output = 5 * torch.randn(100, classes, generator=random)
    y = torch.randint(classes, (100,), generator=random)
    expected = F.cross_entropy(output.double(), y, reduction="none")
    assert (_cross_entropies(output, y).double() - expected).abs().max() <= 1e-6 * math.log(classes) + 5e-6
    for count in (1, 7, 16, 33):
        assert torch.equal(_cross_entropies(output[:count], y[:count]), _cross_entropies(output, y)[:count])
