"""The student: Adam written out, the adversarial direction against random ones, and what smoothness is worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor

from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.streams import Stream
from fairveil.student import StudentTraining, adversarial, log_answers, roughness, train_student

IMAGES = torch.from_numpy(load_digits().images.astype(np.float32)).unsqueeze(1) / 16
DIGITS = torch.from_numpy(load_digits().target.astype(np.int64))
NONE = IMAGES[:0]


def divergences(model: Model, weights: Tensor, x: Tensor, moved: Tensor) -> np.ndarray:
    """KL(p(x) || p(moved)) of each record, in float64."""
    p, q = (model.predict(weights, records).double().softmax(dim=1).numpy() for records in (x, moved))
    return np.asarray((p * np.log(p / q)).sum(axis=1))


def log_p(model: Model, weights: Tensor, x: Tensor) -> Tensor:
    return model.predict(weights, x).log_softmax(dim=1)


def accuracy(model: Model, weights: Tensor, x: Tensor, y: Tensor) -> float:
    return float((model.predict(weights, x).argmax(dim=1) == y).double().mean())


def test_labels_alone_are_plain_adam_with_falling_rate() -> None:
    """Softmax regression on full batches, by the formulas of Kingma and Ba, "Adam" (2015), in float64."""
    model = ModelSpec("logistic", (1, 8, 8), 10).build()
    start = model.initial(Stream("start"))
    training = StudentTraining(steps=5, batch_size=100, learning_rate=0.01, vat_weight=0)
    found = train_student(model, start, IMAGES[:50], DIGITS[:50], IMAGES[50:99], training, Stream("s"))
    w, flat, own = start.double().numpy(), IMAGES[:50].flatten(1).double().numpy(), np.eye(10)[DIGITS[:50].numpy()]
    first, second = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, 6):
        scores = flat @ w[:640].reshape(10, 64).T + w[640:]
        error = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True) - own
        gradient = np.concatenate([(error.T @ flat / 50).ravel(), error.mean(axis=0)])
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        rate = 0.01 * (1 - (t - 1) / 5)
        w = w - rate * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(found.numpy(), w, atol=1e-4)


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_the_adversarial_step_changes_more_than_random_ones(name: str) -> None:
    """100 records, 20 random steps of the same length each. Seeds fixed.

    Were the step a random one, it would beat the mean of 20 others for about half of the records: 90 of 100 or more
    have probability 2e-17 then.
    """
    model = ModelSpec(name, (1, 8, 8), 10).build()
    x, radius = IMAGES[:100], 0.3
    training = StudentTraining(steps=100, vat_weight=0)
    weights = train_student(model, model.initial(Stream("start")), x, DIGITS[:100], NONE, training, Stream("fit"))
    step = adversarial(model, model.unflatten(weights), x, log_p(model, weights, x), radius, Stream("probe"))
    lengths = step.flatten(1).norm(dim=1)
    assert torch.allclose(lengths, torch.full_like(lengths, radius), rtol=1e-5)
    random = np.random.default_rng(1).standard_normal((20, *x.shape))
    random *= radius / np.sqrt((random**2).sum(axis=(2, 3, 4), keepdims=True))
    others = [divergences(model, weights, x, x + torch.from_numpy(noise.astype(np.float32))) for noise in random]
    assert (divergences(model, weights, x, x + step) > np.mean(others, axis=0)).sum() >= 90


def test_two_classes_have_one_direction() -> None:
    """Softmax regression of two classes: only w_1 - w_0 matters, so that the step is along it, whatever the probe."""
    model = ModelSpec("logistic", (5,), 2).build()
    weights, x = model.initial(Stream("start")), torch.from_numpy(np.random.default_rng(2).random((8, 5), np.float32))
    along = weights[5:10] - weights[:5]
    step = adversarial(model, model.unflatten(weights), x, log_p(model, weights, x), 0.5, Stream("probe"))
    cosine = step @ along / (0.5 * along.norm())
    assert torch.allclose(cosine.abs(), torch.ones(8), atol=1e-4)


def test_roughness_is_the_divergence_of_its_own_step_and_answers_count_as_given() -> None:
    """Its gradient is that of the cross-entropy between p(x), held fixed, and p(x + r)."""
    model = ModelSpec("mlp", (1, 8, 8), 10).build()
    weights, x = model.initial(Stream("start")), IMAGES[:20]
    step = adversarial(model, model.unflatten(weights), x, log_p(model, weights, x), 0.4, Stream("probe"))
    leaf = weights.clone().requires_grad_()
    loss = roughness(model, model.unflatten(leaf), x, 0.4, Stream("probe"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(divergences(model, weights, x, x + step).mean(), rel=1e-3)
    other = weights.clone().requires_grad_()
    given = log_p(model, weights, x).exp()
    each = [model.losses(model.unflatten(other), x + step, torch.full((20,), j)) for j in range(10)]
    (torch.stack(each, dim=1) * given).sum(dim=1).mean().backward()
    assert leaf.grad is not None and other.grad is not None
    assert torch.allclose(leaf.grad, other.grad, atol=1e-6)


def test_where_nothing_changes_the_step_is_zero() -> None:
    model = ModelSpec("svm", (4,), 3).build()  # it starts at zero
    weights, x = model.initial(Stream("start")), torch.ones(2, 4)
    step = adversarial(model, model.unflatten(weights), x, log_p(model, weights, x), 1.0, Stream("probe"))
    assert torch.equal(step, torch.zeros(2, 4))


@pytest.mark.statistical
def test_two_moons_with_six_labels() -> None:
    """Six labels, 500 records without. Seeds fixed: were smoothness no use, five gains have probability 2^-5 = 3%."""
    model = ModelSpec("mlp", (2,), 2, {"hidden": 50}).build()
    gained = []
    for seed in range(5):
        points, sides = make_moons(1000, noise=0.08, random_state=seed)
        x, y = torch.from_numpy(points.astype(np.float32)), torch.from_numpy(sides.astype(np.int64))
        chosen = torch.cat([(y == side).nonzero()[:3, 0] for side in (0, 1)])
        scores = []
        for weight in (0.0, 1.0):
            training = StudentTraining(steps=600, learning_rate=0.01, vat_weight=weight, vat_radius=0.3)
            start = model.initial(Stream("start", seed))
            weights = train_student(model, start, x[chosen], y[chosen], x[:500], training, Stream("s", seed))
            scores.append(accuracy(model, weights, x[500:], y[500:]))
        gained.append(scores[1] - scores[0])
    assert min(gained) > 0


def test_same_stream_same_result_and_nothing_else_is_touched() -> None:
    model = ModelSpec("cnn", (1, 8, 8), 10).build()
    start = model.initial(Stream("start"))
    kept, training = start.clone(), StudentTraining(steps=5)

    def run(seed: int) -> Tensor:
        return train_student(model, start, IMAGES[:40], DIGITS[:40], IMAGES[40:300], training, Stream("s", seed))

    torch.manual_seed(1)
    first = run(0)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, run(0)) and not torch.equal(first, run(1))
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(start, kept) and not first.requires_grad


def test_few_labels() -> None:
    model, training = ModelSpec("mlp", (1, 8, 8), 10).build(), StudentTraining(steps=3)
    start = model.initial(Stream("start"))
    assert torch.equal(train_student(model, start, NONE, DIGITS[:0], IMAGES, training, Stream("s")), start)
    assert torch.equal(train_student(model, start, NONE, DIGITS[:0], NONE, training, Stream("s")), start)
    for count, others in ((1, 0), (1, 1), (3, 200), (65, 0)):  # 65: one is left over for a batch of its own
        found = train_student(
            model, start, IMAGES[:count], DIGITS[:count], IMAGES[-others:] if others else NONE, training, Stream("s")
        )
        assert found.isfinite().all() and not torch.equal(found, start)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("logistic", (800,)), ("linear", (800,)), ("svm", (800,)), ("mlp", (800,)), ("cnn", (1, 8, 8)),
        ("cnn", (1, 28, 28)), ("cnn-dp", (1, 16, 16)), ("alexnet-small", (1, 28, 28)), ("lstm", (6, 4)),
    ],
)  # fmt: skip
def test_any_classifier(name: str, features: tuple[int, ...]) -> None:
    model = ModelSpec(name, features, 10).build()
    x = torch.from_numpy(np.random.default_rng(3).random((40, *features), dtype=np.float32))
    training = StudentTraining(steps=2, batch_size=8)
    found = train_student(model, model.initial(Stream("i")), x[:9], torch.arange(9), x[9:], training, Stream("s"))
    assert found.shape == (model.parameters,) and found.isfinite().all()


def test_token_ids_cannot_be_moved() -> None:
    model = ModelSpec("lstm", (6,), 2, {"vocabulary": 9}).build()
    x, start = torch.arange(24.0).reshape(4, 6) % 9, model.initial(Stream("start"))
    y = torch.tensor([0, 1, 0, 1])
    with pytest.raises(UserError, match="token ids"):
        train_student(model, start, x, y, x[:0], StudentTraining(steps=1), Stream("s"))
    assert (
        train_student(model, start, x, y, x[:0], StudentTraining(steps=1, vat_weight=0), Stream("s")).isfinite().all()
    )


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"vat_weight": -1.0},
     {"vat_radius": 0.0}, {"vat_radius": math.nan}],
)  # fmt: skip
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        StudentTraining(**wrong)  # type: ignore[arg-type]


def bernoulli(model: Model, weights: Tensor, x: Tensor, moved: Tensor) -> np.ndarray:
    """The sum over classes of KL(Bernoulli(p) || Bernoulli(q)), in float64."""
    p, q = (model.predict(weights, records).double().sigmoid().numpy() for records in (x, moved))
    return np.asarray((p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(axis=1))


def test_of_several_classes_roughness_is_the_sum_of_their_divergences() -> None:
    """And its gradient that of the cross-entropies with p(x) held fixed; records of no answer at all stay finite."""
    model = ModelSpec("mlp", (1, 8, 8), 5, several=True).build()
    weights, x = model.initial(Stream("start")), IMAGES[:20]
    given = log_answers(model, model.predict(weights, x))
    assert given.shape == (20, 5, 2) and torch.allclose(given.exp().sum(dim=2), torch.ones(20, 5))
    step = adversarial(model, model.unflatten(weights), x, given, 0.4, Stream("probe"))
    leaf = weights.clone().requires_grad_()
    loss = roughness(model, model.unflatten(leaf), x, 0.4, Stream("probe"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(bernoulli(model, weights, x, x + step).mean(), rel=1e-3)
    random = np.random.default_rng(1).standard_normal((20, *x.shape))
    random *= 0.4 / np.sqrt((random**2).sum(axis=(2, 3, 4), keepdims=True))
    others = [bernoulli(model, weights, x, x + torch.from_numpy(noise.astype(np.float32))) for noise in random]
    assert (bernoulli(model, weights, x, x + step) > np.mean(others, axis=0)).all()
    other = weights.clone().requires_grad_()
    output = torch.func.functional_call(model.module, model.unflatten(other), (x + step,))
    p = model.predict(weights, x).sigmoid()
    torch.nn.functional.binary_cross_entropy_with_logits(output, p, reduction="none").sum(dim=1).mean().backward()
    assert leaf.grad is not None and other.grad is not None
    assert torch.allclose(leaf.grad, other.grad, atol=1e-6)
    far = adversarial(
        model, model.unflatten(1e4 * weights), x, log_answers(model, model.predict(1e4 * weights, x)), 0.4, Stream("p")
    )
    assert far.isfinite().all()


def test_a_student_of_several_classes() -> None:
    """Half planes: 100 labels, the rest without; every class is learned."""
    random = np.random.default_rng(3)
    x = torch.from_numpy(random.standard_normal((600, 4)).astype(np.float32))
    y = (x @ torch.from_numpy(random.standard_normal((4, 3)).astype(np.float32)) > 0).long()
    model = ModelSpec("logistic", (4,), 3, several=True).build()
    training = StudentTraining(steps=300, learning_rate=0.05, vat_weight=0.3)
    found = train_student(model, model.initial(Stream("s")), x[:100], y[:100], x[100:400], training, Stream("fit"))
    right = model.right(model.predict(found, x[400:]), y[400:])
    assert right.shape == (200, 3) and (right.double().mean(dim=0) > 0.9).all()
