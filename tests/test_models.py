"""Models: parameters counted, records kept apart, seeds honoured, losses as defined, mixing layers refused."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairveil.data.federation import ClientData, Records
from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.privacy.gradients import path_of, record_gradients
from fairveil.privacy.release import MINT
from fairveil.session import Member
from fairveil.streams import Stream
from fairveil.tasks import evaluate


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


class MixingFromZero(nn.Sequential):
    """It starts at zero, where all records have the same score."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Linear(features[0], classes))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Penalised(nn.Linear):
    """The absolute error, and a penalty on the weights: a loss that reads parameters."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes or 1)

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.squeeze(1) - y).abs() + 0.5 * self.weight.square().sum()


class Smoothed(nn.Linear):
    """Cross-entropy with smoothed labels; the base of losses that are refused."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes)

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y, reduction="none", label_smoothing=0.1)


class Averaged(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)


class Counted(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(dim=1) != y).long()


class Listed(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return [1.0, 2.0]  # type: ignore[return-value]


class Centred(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return super().record_losses(output - output.mean(dim=0), y)


class Paired(Smoothed):
    """Fails for one record."""

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return super().record_losses(output[[1, 0]], y[[1, 0]])


class Detached(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return super().record_losses(output.detach(), y)


class Endless(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return super().record_losses(output, y) / 0.0


class Weighing(Smoothed):
    """Weighs a record by how often its class was seen so far: slowly, so that two looks hardly differ."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features, classes)
        self.register_buffer("seen", torch.full((classes,), 1e6))

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        self.seen += F.one_hot(y, len(self.seen)).sum(dim=0)
        return super().record_losses(output, y) * (self.seen.sum() / self.seen[y])


class Failing(Smoothed):
    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return output @ y


class Brier(nn.Linear):
    """A loss for several classes at once."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__(features[0], classes)

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.sigmoid() - y).square().sum(dim=1)


OWN = (WithBatchNorm, Misshapen, Choosy, Dropping, Remembering, Mixing, MixingFromZero, Lazy)
OWN_LOSS = (
    Penalised,
    Smoothed,
    Averaged,
    Counted,
    Listed,
    Centred,
    Paired,
    Detached,
    Endless,
    Weighing,
    Failing,
    Brier,
)


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_nets")
    vars(module).update({c.__name__: c for c in (*OWN, *OWN_LOSS)})
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
        (ModelSpec("own_nets:MixingFromZero", (4,), 3), "mixes the records of a batch", "GroupNorm"),
        (ModelSpec("own_nets:Averaged", (4,), 3), "record_losses that gives ()", "reduction='none'"),
        (ModelSpec("own_nets:Counted", (4,), 3), "record_losses that gives torch.int64", "reduction='none'"),
        (ModelSpec("own_nets:Listed", (4,), 3), "record_losses that gives list", "reduction='none'"),
        (ModelSpec("own_nets:Centred", (4,), 3), "record_losses that mixes the records", "each record's own"),
        (ModelSpec("own_nets:Paired", (4,), 3), "record_losses that mixes the records", "each record's own"),
        (ModelSpec("own_nets:Detached", (4,), 3), "record_losses that has no gradient", "torch operations"),
        (ModelSpec("own_nets:Endless", (4,), 3), "record_losses that gives [inf, inf]", "finite loss"),
        (ModelSpec("own_nets:Weighing", (4,), 3), "record_losses that answers differently", "keeps nothing"),
        (ModelSpec("own_nets:Failing", (4,), 3), "record_losses that fails", "def record_losses(self, output, y)"),
        (ModelSpec("own_nets:Remembering", (4,), 3), "answers differently each time", "keeps running values"),
        (ModelSpec("own_nets:number", (4,), 3), "did not give a torch.nn.Module but int", "torch.nn.Module"),
        (ModelSpec("lgistic", (4,), 3), 'model.name = "lgistic" is not known', 'model.name = "logistic"'),
        (ModelSpec("logistic", (4,), 0), "does not fit a regression", '"linear"'),
        (ModelSpec("cnn", (4,), 3), "does not fit records of shape (4,)", '"mlp"'),
        (ModelSpec("mlp", (4,), 3, {"hiden": 3}), "model.hiden = 3", "model.hidden"),
        (ModelSpec("svm", (4,), 3, several=True), '"svm" with these options does not fit', '"logistic"'),
        (ModelSpec("cnn-dp", (1, 16, 16), 3, {"squared": True}, several=True), '"cnn-dp" with these', '"logistic"'),
        (ModelSpec("own_nets:Smoothed", (4,), 3, several=True), "record_losses that", ""),
    ],
)
def test_mistakes(spec: ModelSpec, what: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        spec.build()
    assert what in error.value.what and fix in error.value.fix


# ---- losses of one's own, and scores ---------------------------------------------------------------


def test_a_modules_own_loss_is_used() -> None:
    model = ModelSpec("own_nets:Smoothed", (4,), 3).build()
    path_of(model)
    weights, x, y = model.initial(Stream(0)), Stream("x").normal((6, 4)).float(), torch.tensor([0, 1, 2, 0, 1, 2])
    log = torch.log_softmax(model.predict(weights, x), dim=1)
    expected = -0.9 * log[torch.arange(6), y] - 0.1 * log.mean(dim=1)
    assert torch.allclose(model.losses(model.unflatten(weights), x, y), expected, atol=1e-6)


def test_a_loss_that_reads_parameters_reads_those_of_the_vector() -> None:
    """Not those the module was built with: the gradient is sign(error) * (x, 1) + (w, 0)."""
    model = ModelSpec("own_nets:Penalised", (2,), 0).build()
    path_of(model)
    weights = torch.tensor([3.0, -2.0, 1.0])
    x, y = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0])  # errors 0 - 1 = -1 and 3 - 0 = 3
    assert model.losses(model.unflatten(weights), x, y).tolist() == [1 + 6.5, 3 + 6.5]
    assert record_gradients(model, weights, x, y).tolist() == [[2.0, -4.0, -1.0], [3.0, -3.0, 1.0]]


def scored(model: Model, weights: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    rows = Records(x, y)
    (reply,) = evaluate([Member(ClientData(rows, rows), model, {"model": weights}, None, {}, (0,), MINT)])
    return dict(reply.diagnostics)


@pytest.mark.parametrize("name", ["linear", "own_nets:Penalised"])
def test_rmse_is_of_the_errors_whatever_the_loss(name: str) -> None:
    x, y = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([1.0, 0.0])
    scores = scored(ModelSpec(name, (2,), 0).build(), torch.tensor([3.0, -2.0, 1.0]), x, y)
    assert scores["rmse"] == pytest.approx(5**0.5) and scores["n"] == 2  # errors -1 and 3
    assert scores["loss"] == pytest.approx(2.5 if name == "linear" else 8.5)


def test_accuracy_and_hinge_loss_of_a_support_vector_machine() -> None:
    x, y = torch.tensor([[2.0], [0.5], [-3.0], [1.0]]), torch.tensor([1, 1, 0, 0])
    scores = scored(ModelSpec("svm", (1,), 2).build(), torch.tensor([1.0, 0.0]), x, y)
    assert scores == {"n": 4.0, "accuracy": 0.75, "loss": pytest.approx((0 + 0.5 + 0 + 2) / 4)}


@pytest.mark.parametrize("classes", [0, 3])
def test_a_client_without_test_records_is_not_scored(classes: int) -> None:
    model = ModelSpec("linear", (2,), classes).build()
    nothing = torch.zeros(0, dtype=torch.int64 if classes else torch.float32)
    assert scored(model, model.initial(Stream(0)), torch.zeros(0, 2), nothing) == {"n": 0.0}


def test_trying_a_model_leaves_the_global_generator_alone() -> None:
    """Its records come from a generator of their own: the same trial each time, and no draw of the user's."""
    before = torch.random.get_rng_state()
    path_of(ModelSpec("linear", (6,), 0).build())
    assert torch.equal(before, torch.random.get_rng_state())


def test_of_several_classes_the_loss_is_the_mean_of_binary_cross_entropies() -> None:
    model = ModelSpec("logistic", (4,), 3, several=True).build()
    path_of(model)
    weights, x = model.initial(Stream(0)), Stream("x").normal((5, 4)).float()
    y = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 1]])
    p = model.predict(weights, x).double().sigmoid()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).mean(dim=1)
    assert torch.allclose(model.losses(model.unflatten(weights), x, y).double(), expected, atol=1e-6)
    extreme = model.losses(model.unflatten(1e4 * weights), x, y)
    assert extreme.isfinite().all()
    scores = scored(model, weights, x, y)
    assert scores["accuracy"] == pytest.approx(float(((p > 0.5) == y.bool()).double().mean())) and scores["n"] == 5


def test_a_loss_of_ones_own_gets_the_rows_of_several_classes() -> None:
    model = ModelSpec("own_nets:Brier", (4,), 3, several=True).build()
    path_of(model)
    weights, x = model.initial(Stream(0)), Stream("x").normal((2, 4)).float()
    y = torch.tensor([[0, 1, 1], [1, 0, 0]])
    expected = (model.predict(weights, x).sigmoid() - y).square().sum(dim=1)
    assert torch.allclose(model.losses(model.unflatten(weights), x, y), expected)
