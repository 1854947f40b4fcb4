"""The reference networks: counted, compared with those of others, seeded, and refused where they do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs
from sklearn.metrics import hinge_loss
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from fairveil.data.federation import Records
from fairveil.errors import UserError
from fairveil.models import MODELS, Model, ModelSpec
from fairveil.networks import LSTM
from fairveil.privacy.gradients import ROUNDING, clipped_sums, path_of, record_gradients
from fairveil.streams import Stream

SMALL = {
    "logistic": ModelSpec("logistic", (1, 4, 4), 3),
    "linear": ModelSpec("linear", (6,), 0),
    "svm of two": ModelSpec("svm", (6,), 2),
    "svm of four": ModelSpec("svm", (1, 4, 4), 4),
    "mlp": ModelSpec("mlp", (6,), 3, {"hidden": 5}),
    "cnn": ModelSpec("cnn", (1, 4, 4), 3),
    "cnn-dp": ModelSpec("cnn-dp", (1, 16, 18), 3),
    "alexnet": ModelSpec("alexnet-small", (1, 28, 28), 3),
    "alexnet, regression": ModelSpec("alexnet-small", (2, 64, 40), 0),
    "resnet": ModelSpec("resnet18-gn", (3, 32, 32), 10),
    "resnet, cifar": ModelSpec("resnet18-gn", (1, 8, 8), 0, {"stem": "cifar"}),
    "lstm of ids": ModelSpec("lstm", (7,), 2, {"vocabulary": 11, "embedding": 3, "hidden": 5}),
    "lstm of vectors": ModelSpec("lstm", (7, 4), 0, {"hidden": 5, "layers": 3}),
}


def draw(spec: ModelSpec, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records that suit the model: token ids for an LSTM of ids, else normal."""
    random = Stream(seed, "records").numpy
    x = random.standard_normal((count, *spec.features))
    if spec.name == "lstm" and len(spec.features) == 1:
        x = random.integers(spec.options["vocabulary"], size=x.shape).astype(float)
    y = random.integers(spec.classes, size=count) if spec.classes else random.standard_normal(count).astype(np.float32)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def weights_of(model: Model) -> Tensor:
    """Parameters off the start, since the support vector machine starts at zero."""
    start = model.initial(Stream(0))
    return start + 0.02 * Stream("off").normal(model.parameters).float()


def test_every_model_is_tried_here() -> None:
    assert {spec.name for spec in SMALL.values()} == set(MODELS)


# ---- parameters and shapes -------------------------------------------------------------------------


def lstm_parameters(width: int, hidden: int, layers: int, classes: int, table: int = 0) -> int:
    widths = [width, *[hidden] * (layers - 1)]
    return table + sum(4 * hidden * (w + hidden + 1) for w in widths) + hidden * classes + classes


def alexnet_parameters(channels: int, classes: int) -> int:
    layers = [(channels, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]
    return sum((before * size * size + 1) * after for before, after, size in layers) + 257 * classes


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        (ModelSpec("svm", (7,), 2), 8),  # one unit
        (ModelSpec("svm", (1, 8, 8), 10), 650),
        (ModelSpec("resnet18-gn", (3, 32, 32), 10), 11_181_642),  # as in the table of Malekmohammadi et al. (2024)
        (ModelSpec("resnet18-gn", (3, 32, 32), 10, {"stem": "cifar"}), 11_173_962),
        (ModelSpec("alexnet-small", (3, 32, 32), 10), 2_472_266),
        (ModelSpec("alexnet-small", (1, 28, 28), 62), alexnet_parameters(1, 62)),
        (ModelSpec("lstm", (25,), 2), lstm_parameters(32, 64, 2, 2, table=4096 * 32)),
        (ModelSpec("lstm", (25, 300), 2, {"hidden": 100}), lstm_parameters(300, 100, 2, 2)),
        (
            ModelSpec("lstm", (9,), 3, {"vocabulary": 50, "embedding": 8, "hidden": 6, "layers": 1}),
            lstm_parameters(8, 6, 1, 3, table=50 * 8),
        ),
    ],
)
def test_parameters(spec: ModelSpec, parameters: int) -> None:
    assert spec.build().parameters == parameters


def test_alexnets_figure_is_that_of_the_formula() -> None:
    assert alexnet_parameters(3, 10) == 2_472_266


@pytest.mark.parametrize(
    "features", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 28, 64)], ids=lambda shape: "x".join(map(str, shape))
)
def test_alexnet_takes_the_images_it_says(features: tuple[int, ...]) -> None:
    model = ModelSpec("alexnet-small", features, 5).build()
    assert model.predict(model.initial(Stream(0)), torch.zeros(3, *features)).shape == (3, 5)


@pytest.mark.parametrize(
    ("stem", "sides"),
    [
        ("imagenet", [16, 16, 16, 8, 8, 8, 4, 4, 2, 2, 1, 1]),  # convolution, norm, ReLU, pool, then the blocks
        ("cifar", [32, 32, 32, 32, 32, 16, 16, 8, 8, 4, 4]),
    ],
)
def test_resnet_shrinks_the_image_where_he_et_al_do(stem: str, sides: list[int]) -> None:
    module = ModelSpec("resnet18-gn", (3, 32, 32), 10, {"stem": stem}).module(Stream(0))
    assert isinstance(module, nn.Sequential)
    x, found = torch.zeros(2, 3, 32, 32), []
    for layer in module[:-3]:
        x = layer(x)
        found.append(x.shape[-1])
    assert found == sides
    assert x.shape[1] == 512 and module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_resnet_has_18_layers_and_group_normalisation_after_every_convolution(stem: str) -> None:
    module = ModelSpec("resnet18-gn", (3, 32, 32), 10, {"stem": stem}).module(Stream(0))
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    shortcuts = [m for m in convolutions if m.kernel_size == (1, 1)]
    assert len(convolutions) - len(shortcuts) + 1 == 18 and len(shortcuts) == 3
    assert [n.num_channels for n in norms] == [c.out_channels for c in convolutions]
    assert {n.num_groups for n in norms} == {32}
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    for c in convolutions:  # Kaiming: variance 2 / fan-out; 1,728 draws or more: 15% is 4 standard errors
        fan_out = c.out_channels * math.prod(c.kernel_size)
        assert c.bias is None and float(c.weight.detach().var()) == pytest.approx(2 / fan_out, rel=0.15)


# ---- per-record gradients and seeds ----------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_record_gradients_equal_a_loop_of_autograd(name: str) -> None:
    spec = SMALL[name]
    model = spec.build()
    assert path_of(model).obstacle is None
    x, y = draw(spec, 2 if "resnet" in name else 6)
    weights = weights_of(model)
    found = record_gradients(model, weights, x, y)
    for i in range(len(y)):
        one = model.gradient(weights, x[i : i + 1], y[i : i + 1])
        assert torch.allclose(found[i], one, rtol=1e-4, atol=1e-5 * float(one.abs().max().clamp(min=1)))
        assert float(one.abs().max()) > 0 or "svm" in name


@pytest.mark.parametrize("name", SMALL)
def test_outputs_seeds_and_the_global_generator(name: str) -> None:
    spec = SMALL[name]
    model = spec.build()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = model.initial(Stream(1)), model.initial(Stream(1)), model.initial(Stream(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, two) and one.shape == (model.parameters,)
    if spec.name == "svm":
        assert not one.any()  # it starts at zero, whatever the seed
    else:
        assert not torch.equal(one, other)
    assert model.predict(one, draw(spec, 3)[0]).shape == (3, spec.classes or 1)


# ---- the support vector machine --------------------------------------------------------------------


def hinge(weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each record's loss and its gradient (n, p), from the definitions; one unit for two classes."""
    scores, rows = x @ weight.T + bias, np.arange(len(y))
    inner = np.zeros_like(scores)  # the loss's gradient by the units
    if len(bias) == 1:
        sign = 2.0 * y - 1
        losses = np.maximum(0, 1 - sign * scores[:, 0])
        inner[:, 0] = -sign * (losses > 0)
    else:
        others = scores.copy()
        others[rows, y] = -np.inf
        losses = np.maximum(0, 1 - scores[rows, y] + others.max(axis=1))
        inner[rows, y] = -1.0 * (losses > 0)
        inner[rows, others.argmax(axis=1)] += losses > 0
    by_weight = (inner[:, :, None] * x[:, None, :]).reshape(len(y), -1)
    return losses, np.hstack([by_weight, inner])


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_hinge_loss_and_its_gradient_are_those_of_the_definition(classes: int) -> None:
    spec = ModelSpec("svm", (4,), classes)
    model = spec.build()
    x, y = draw(spec, 200, seed=classes)
    units = 1 if classes == 2 else classes
    weights = 0.7 * Stream("svm", classes).normal(model.parameters).float()
    weight, bias = weights[: 4 * units].reshape(units, 4), weights[4 * units :]
    losses, gradients = hinge(weight.double().numpy(), bias.double().numpy(), x.double().numpy(), y.numpy())
    assert model.losses(model.unflatten(weights), x, y).numpy() == pytest.approx(losses, abs=1e-5)
    assert record_gradients(model, weights, x, y).numpy() == pytest.approx(gradients, abs=1e-5)
    assert model.gradient(weights, x, y).numpy() == pytest.approx(gradients.mean(axis=0), abs=1e-5)
    assert 0 < (losses == 0).mean() < 1  # both sides of the kink were met


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_and_losses_are_those_of_scikit_learn(classes: int) -> None:
    """With the weights that LinearSVC finds, and its hinge loss (Crammer and Singer's for more than two classes)."""
    spec = ModelSpec("svm", (6,), classes)
    x, y = draw(spec, 300, seed=1)
    kind = {"multi_class": "crammer_singer"} if classes > 2 else {}
    theirs = LinearSVC(C=0.1, random_state=0, max_iter=100_000, **kind).fit(x.numpy(), y.numpy())
    model = spec.build()
    flat = np.concatenate([theirs.coef_.ravel(), np.atleast_1d(theirs.intercept_)])
    weights = torch.from_numpy(flat).float()
    decision, output = theirs.decision_function(x.numpy()), model.predict(weights, x)
    found = output.numpy() if classes > 2 else (output[:, 1] - output[:, 0]).numpy()
    assert found == pytest.approx(decision, abs=1e-5)
    assert (output.argmax(dim=1).numpy() == theirs.predict(x.numpy())).all()
    losses = model.losses(model.unflatten(weights), x, y)
    assert float(losses.mean()) == pytest.approx(hinge_loss(y.numpy(), decision), abs=1e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_gradient_steps_train_it_as_well_as_scikit_learn(classes: int) -> None:
    points, labels = make_blobs(400, n_features=5, centers=classes, cluster_std=1.5, random_state=3)
    points = (points - points.mean(axis=0)) / points.std(axis=0)
    x, y = torch.from_numpy(points).float(), torch.from_numpy(labels)
    model = ModelSpec("svm", (5,), classes).build()
    weights = model.initial(Stream(0))
    for _ in range(100):
        weights = weights - 0.1 * model.gradient(weights, x[:200], y[:200])
    accuracy = float((model.predict(weights, x[200:]).argmax(dim=1) == y[200:]).double().mean())
    theirs = LinearSVC(random_state=0).fit(points[:200], labels[:200]).score(points[200:], labels[200:])
    assert accuracy >= theirs - 0.01 and theirs > 0.95


def test_clipping_bounds_the_hinge_gradient() -> None:
    """Far outside the margin nothing is added; inside, each record adds its (x, 1), clipped."""
    model = ModelSpec("svm", (2,), 2).build()
    x, y = torch.tensor([[3.0, 4.0], [100.0, 0.0]]), torch.tensor([1, 1])
    weights = torch.tensor([[1.0, -1.0, 0.0]])
    found = clipped_sums(model, weights, [Records(x, y)], [torch.arange(2)], clip_norm=1.0)
    length = math.sqrt(26)  # the first has f = -1: its gradient is -(3, 4, 1); the second has f = 100
    expected = [ROUNDING * part / length for part in (-3, -4, -1)]  # a hair below the bound
    assert found.total[0].numpy() == pytest.approx(expected, abs=1e-5)
    assert found.clipped == 1


# ---- the LSTM --------------------------------------------------------------------------------------


def test_the_lstm_equals_torchs_own() -> None:
    ours = ModelSpec("lstm", (9, 4), 3, {"hidden": 6}).module(Stream(0))
    assert isinstance(ours, LSTM)
    theirs = nn.LSTM(4, 6, num_layers=2, batch_first=True)
    state = {}
    for i, layer in enumerate(ours.layers):
        state |= {f"weight_ih_l{i}": layer.input.weight, f"weight_hh_l{i}": layer.state.weight}
        state |= {f"bias_ih_l{i}": layer.input.bias, f"bias_hh_l{i}": torch.zeros(24)}
        assert layer.input.bias.tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12  # the forget gate starts open
    theirs.load_state_dict(state)
    x = Stream("text").normal((8, 9, 4)).float()
    expected = ours.output(theirs(x)[0][:, -1])
    assert torch.allclose(ours(x), expected, atol=1e-5)


@pytest.mark.parametrize("places", [[0, 1, 2], [5, 6, 7], [0, 3, 7]], ids=["behind", "before", "between"])
@pytest.mark.parametrize("kind", ["ids", "vectors"])
def test_padding_does_not_change_a_record(kind: str, places: list[int]) -> None:
    """Its output, nor its gradient: the text of three tokens alone, and among five of padding."""
    options = {"hidden": 6} | ({"vocabulary": 20, "embedding": 4} if kind == "ids" else {})
    inner = () if kind == "ids" else (4,)
    short, long = (ModelSpec("lstm", (length, *inner), 2, options).build() for length in (3, 8))
    text = torch.tensor([[3.0, 19.0, 7.0]]) if kind == "ids" else Stream("text").normal((1, 3, 4)).float()
    padded = torch.zeros(1, 8, *inner)
    padded[:, places] = text
    weights, y = short.initial(Stream(0)), torch.tensor([1])
    assert torch.allclose(short.predict(weights, text), long.predict(weights, padded), atol=1e-6)
    assert torch.allclose(short.gradient(weights, text, y), long.gradient(weights, padded, y), atol=1e-6)


def test_a_record_of_padding_alone_has_the_zero_state() -> None:
    model = ModelSpec("lstm", (5,), 3, {"vocabulary": 9}).build()
    weights = model.initial(Stream(0))
    assert torch.equal(model.predict(weights, torch.zeros(1, 5))[0], model.unflatten(weights)["output.bias"])
    gradient = record_gradients(model, weights, torch.zeros(1, 5), torch.tensor([1]))
    assert torch.isfinite(gradient).all() and not gradient[0, :-3].any()  # nothing but the last bias is moved


@pytest.mark.parametrize(("given", "read"), [(9.0, 8.0), (1e9, 8.0), (math.inf, 8.0), (-3.0, 0.0), (math.nan, 0.0)])
def test_ids_outside_the_vocabulary_are_read_as_the_nearest_inside(given: float, read: float) -> None:
    model = ModelSpec("lstm", (3,), 2, {"vocabulary": 9}).build()
    weights = model.initial(Stream(0))
    rows = torch.tensor([[1.0, given, 2.0], [1.0, read, 2.0]])
    one, two = model.predict(weights, rows)
    assert torch.equal(one, two)


def test_the_lstm_learns_what_came_first() -> None:
    """The class is the first token, four steps before the end: a bag of the last words would not know."""
    random = Stream("task").numpy
    ids = random.integers(1, 6, size=(200, 5))
    x, y = torch.from_numpy(ids).float(), torch.from_numpy((ids[:, 0] > 2).astype(np.int64))
    model = ModelSpec("lstm", (5,), 2, {"vocabulary": 6, "embedding": 4, "hidden": 8}).build()
    weights = model.initial(Stream(0))
    for _ in range(150):
        weights = weights - 1.0 * model.gradient(weights, x, y)
    assert float((model.predict(weights, x).argmax(dim=1) == y).double().mean()) > 0.95


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "features", "classes", "options", "what", "fix"),
    [
        ("logistic", (4,), 0, {}, '"logistic" does not fit a regression', '"linear"'),
        ("svm", (4,), 0, {}, '"svm" does not fit a regression', '"linear"'),
        ("cnn", (1, 3, 8), 2, {}, "records of shape (1, 3, 8)", '"mlp"'),
        ("alexnet-small", (60,), 2, {}, "records of shape (60,)", '"mlp"'),
        ("alexnet-small", (3, 27, 28), 2, {}, "records of shape (3, 27, 28)", '"mlp"'),
        ("alexnet-small", (3, 64, 65), 2, {}, "records of shape (3, 64, 65)", '"resnet18-gn"'),
        ("resnet18-gn", (28, 28), 2, {}, "records of shape (28, 28)", '"mlp"'),
        ("resnet18-gn", (1, 8, 8), 2, {}, "records of shape (1, 8, 8)", 'model.stem = "cifar"'),
        ("resnet18-gn", (1, 4, 8), 2, {"stem": "cifar"}, "records of shape (1, 4, 8)", '"mlp"'),
        ("resnet18-gn", (3, 32, 32), 2, {"stem": "cifr"}, "model.stem = 'cifr' is not known", 'model.stem = "cifar"'),
        ("resnet18-gn", (3, 32, 32), 2, {"stem": 3}, "model.stem = 3 is not known", 'model.stem = "imagenet"'),
        ("resnet18-gn", (3, 32, 32), 2, {"step": "cifar"}, "model.step", "model.stem"),
        ("lstm", (3, 32, 32), 2, {}, "records of shape (3, 32, 32)", '"cnn"'),
        ("lstm", (25, 8), 2, {"vocabulary": 4096}, "model.vocabulary = 4096 does not apply", "remove model.vocabulary"),
        ("lstm", (25, 8), 2, {"embedding": 8}, "model.embedding = 8 does not apply", "remove model.embedding"),
        ("lstm", (25,), 2, {"vocabulary": 1}, "model.vocabulary = 1 is not valid", "model.vocabulary = 4096"),
        ("lstm", (25,), 2, {"embedding": 0}, "model.embedding = 0 is not valid", "model.embedding = 32"),
        ("lstm", (25,), 2, {"hidden": 2.5}, "model.hidden = 2.5 is not valid", "model.hidden = 64"),
        ("lstm", (25,), 2, {"layers": 0}, "model.layers = 0 is not valid", "model.layers = 2"),
        ("mlp", (4,), 2, {"hidden": True}, "model.hidden = True is not valid", "model.hidden = 128"),
        ("mlp", (4,), 2, {"hidden": -1}, "model.hidden = -1 is not valid", "model.hidden = 128"),
    ],
)
def test_refused(
    name: str, features: tuple[int, ...], classes: int, options: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        ModelSpec(name, features, classes, options).build()
    assert what in error.value.what and fix in error.value.fix
