"""Models: parameters counted, records kept apart, seeds honoured, mixing layers refused."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from fairveil.errors import UserError
from fairveil.models import ModelSpec
from fairveil.streams import Stream


@pytest.mark.parametrize(
    ("name", "features", "classes", "parameters"),
    [
        ("cnn", (1, 28, 28), 10, 28_938),  # as the paper counts; 416 + 12,832 + 15,690
        ("cnn", (3, 32, 32), 10, (3 * 25 + 1) * 16 + (16 * 25 + 1) * 32 + (32 * 64 + 1) * 10),
        ("logistic", (1, 8, 8), 10, 650),
        ("linear", (7,), 0, 8),
        ("mlp", (60,), 10, 61 * 128 + 129 * 10),
    ],
)
def test_parameters(name: str, features: tuple[int, ...], classes: int, parameters: int) -> None:
    assert ModelSpec(name, features, classes).build().parameters == parameters


def test_the_flat_vector_holds_the_modules_parameters() -> None:
    model = ModelSpec("mlp", (4,), 3, {"hidden": 5}).build()
    flat = model.initial(Stream(0))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    module = ModelSpec("mlp", (4,), 3, {"hidden": 5}).module(Stream(0))
    assert torch.equal(model.flatten(module), flat)
    assert torch.allclose(model.predict(flat, x), module(x).detach())


def test_initial_parameters_follow_the_stream_and_leave_the_global_generator_alone() -> None:
    model = ModelSpec("logistic", (4,), 3).build()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = model.initial(Stream(1)), model.initial(Stream(1)), model.initial(Stream(2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    """Linear regression: the mean of (w.x + b - y) * (x, 1)."""
    model = ModelSpec("linear", (2,), 0).build()
    x, y = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0])
    # weights (1, 1), bias 1: residuals 1 + 2 + 1 - 1 = 3 and -1 + 1 - 0 = 0
    assert torch.allclose(model.gradient(torch.ones(3), x, y), torch.tensor([1.5, 3.0, 1.5]))


class WithBatchNorm(nn.Sequential):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(features[0], 48), nn.BatchNorm1d(48), nn.Linear(48, classes))


class Lazy(nn.Sequential):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.LazyBatchNorm1d(), nn.Linear(features[0], classes))


class Misshapen(nn.Linear):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes + 1)


class Choosy(nn.Linear):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0] + 1, classes)


class Mixing(nn.Linear):
    """Batch normalisation by hand: no layer to refuse by name."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(dim=0))


class Dropping(nn.Sequential):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Dropout(0.5), nn.Linear(features[0], classes))


class Remembering(nn.Linear):
    """Carries the records of one client into the next."""

    seen: torch.Tensor

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes)
        self.register_buffer("seen", torch.zeros(features[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean(dim=0) + 1
        return super().forward(x)


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_nets")
    vars(module).update(
        {c.__name__: c for c in (WithBatchNorm, Misshapen, Choosy, Dropping, Remembering, Mixing, Lazy)}
    )
    vars(module)["number"] = lambda features, classes: 3
    monkeypatch.setitem(sys.modules, "own_nets", module)


@pytest.mark.parametrize(
    ("spec", "what", "fix"),
    [
        (ModelSpec("own_nets:WithBatchNorm", (4,), 3), "'1' is BatchNorm1d", "torch.nn.GroupNorm(16, 48)"),
        (ModelSpec("own_nets:Lazy", (4,), 3), "'0' is LazyBatchNorm1d", "torch.nn.GroupNorm(1, channels)"),
        (ModelSpec("own_nets:Misshapen", (4,), 3), "outputs of shape (2, 4)", "width 3"),
        (ModelSpec("own_nets:Choosy", (4,), 3), "does not fit records of shape (4,)", "first layer"),
        (ModelSpec("own_nets:Dropping", (4,), 3), "answers differently each time", "remove the dropout"),
        (ModelSpec("own_nets:Mixing", (4,), 3), "mixes the records of a batch", "GroupNorm"),
        (ModelSpec("own_nets:Remembering", (4,), 3), "answers differently each time", "keeps running values"),
        (ModelSpec("own_nets:number", (4,), 3), "did not give a torch.nn.Module but int", "torch.nn.Module"),
        (ModelSpec("lgistic", (4,), 3), 'model.name = "lgistic" is not known', 'model.name = "logistic"'),
        (ModelSpec("logistic", (4,), 0), "does not fit a regression", '"linear"'),
        (ModelSpec("cnn", (4,), 3), "does not fit records of shape (4,)", '"mlp"'),
        (ModelSpec("mlp", (4,), 3, {"hiden": 3}), "model.hiden = 3", "model.hidden"),
    ],
)
def test_mistakes(spec: ModelSpec, what: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        spec.build()
    assert what in error.value.what and fix in error.value.fix
