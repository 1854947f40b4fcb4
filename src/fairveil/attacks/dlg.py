"""Gradient inversion: which records would have made the update that a client sent?

Zhu, Liu and Han, "Deep Leakage from Gradients" (2019): dummy records, and soft labels if the labels are not known, are
moved until what they would have sent lies where the observed update does. Geiping, Bauermeister, Dröge and Moeller,
"Inverting Gradients - How Easy Is It to Break Privacy in Federated Learning?" (2020), compare directions only, and ask
for smooth images; they also undo several local steps, by going through all of them with the dummy records.

The attacker knows the model at the start, the learning rate, how many steps there were over how many records, and the
bound of whatever was clipped. It knows the range of the data too, and never leaves it: the L-BFGS is the one with
bounds (Byrd, Lu, Nocedal and Zhu, "A Limited Memory Algorithm for Bound Constrained Optimization", 1995), where Zhu et
al. take steps of length 1 anywhere. All of it is in float64.

What it cannot do: find a record from a gradient that does not depend on it (a ReLU network none of whose units is
awake, a layer behind an output layer that starts at zero), tell apart records that one step takes together where their
gradients are alike, or put several records in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

from fairveil.errors import UserError
from fairveil.models import Model
from fairveil.networks import Features
from fairveil.streams import Stream

SMOOTH = 1e-6  # under the root of a squared difference, so that total variation has a gradient where there is none
HUGE = 1e300  # in place of an objective that is no number
TOLERANCE = 1e-15  # of L-BFGS, by which the objective must still fall; more would be lost in rounding
MEMORY = 100  # pairs of vectors from which L-BFGS guesses the curvature
RATE, FALLS = 0.1, (3 / 8, 5 / 8, 7 / 8)  # of signed Adam, as Geiping et al.: a tenth of the rate after these shares
WINDOW, DEVIATION, K1, K2 = 11, 1.5, 0.01, 0.03  # of Wang et al.
Objective = Callable[[Tensor], tuple[float, Tensor]]  # with its gradient


class LeNet(nn.Module):
    """The network that Zhu et al. attack: "fairveil.attacks.dlg:LeNet" as a model's name.

    Sigmoids, which have all derivatives, strides in place of pooling, and parameters uniform in (-1/2, 1/2). 8,026
    parameters for 8x8 and 13,426 for 28x28 grey images of 10 classes.
    """

    def __init__(self, features: Features, classes: int) -> None:
        super().__init__()
        if len(features) != 3:
            raise UserError(
                f'model.name = "fairveil.attacks.dlg:LeNet" does not fit records of shape {tuple(features)}.',
                "A convolution needs images (channels, height, width).",
                'model.name = "mlp"',
            )
        height, width = (-(-side // 4) for side in features[1:])
        self.layers = nn.Sequential(
            nn.Conv2d(features[0], 12, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 5, stride=2, padding=2),
            nn.Sigmoid(),
            nn.Conv2d(12, 12, 5, padding=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(12 * height * width, classes or 1),
        )
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


@dataclass(frozen=True)
class LocalSteps:
    """How a client came from its start to what it sent: plain SGD on its records, as far as the attacker knows it.

    Attributes:
        learning_rate: of each step.
        steps: how many there were.
        batch: records in each step, in turn, and in the same order in every pass; None: all of them.
        record_clip: c, the most that the gradient of one record may be long, in every step (record level).
        update_clip: the most that the whole difference may be long (client level; a ball of metric privacy).
    """

    learning_rate: float
    steps: int = 1
    batch: int | None = None
    record_clip: float = math.inf
    update_clip: float = math.inf

    def update(self, model: Model, start: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """What these records would have sent (p,), without noise; differentiable in the records and soft labels.

        Args:
            labels: (n,) as the model takes them, or soft ones (n, classes), floating point.
        """
        weights, n = start.detach().requires_grad_(), len(x)
        batch = min(self.batch or n, n)
        for step in range(self.steps):
            rows = (torch.arange(batch) + step * batch) % n
            weights = weights - self.learning_rate * self._gradient(model, weights, x[rows], labels[rows])
        return clipped(weights - start, self.update_clip)

    def _gradient(self, model: Model, weights: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """The mean over records of their gradients, each clipped (p,)."""
        losses = _losses(model, model.unflatten(weights), x, labels)
        parts = losses.split(1) if math.isfinite(self.record_clip) else [losses.mean()]
        gradients = [torch.autograd.grad(part.sum(), weights, create_graph=True)[0] for part in parts]
        return torch.stack([clipped(gradient, self.record_clip) for gradient in gradients]).mean(dim=0)


def clipped(vector: Tensor, bound: float) -> Tensor:
    """A vector (p,) that is no longer than the bound."""
    return vector * (bound / torch.linalg.vector_norm(vector).clamp(min=bound)) if math.isfinite(bound) else vector


def _losses(model: Model, parameters: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
    """The loss of each record (n,). With soft labels it is the mean over labels; of cross-entropy that is the same."""
    if labels.shape[1:] == model.spec.target:
        return model.losses(parameters, x, labels)
    n, classes = labels.shape
    each = model.losses(parameters, x.repeat_interleave(classes, 0), torch.arange(classes).repeat(n))
    return (each.view(n, classes) * labels).sum(dim=1)


@dataclass(frozen=True)
class Matching:
    """How dummy records are fitted to an update.

    Attributes:
        objective: "squared", the squared distance of the updates over that of the observed one from no update (Zhu et
            al.); "cosine", one less their cosine (Geiping et al.).
        search: "l-bfgs"; or "adam", by the signs of the gradients alone, which finds its way over the kinks of ReLU.
        total_variation: weight of the mean absolute difference of neighbouring pixels, of images.
        restarts: starts, of which the one that ends lowest counts.
    """

    objective: Literal["squared", "cosine"]
    search: Literal["l-bfgs", "adam"]
    iterations: int
    total_variation: float = 0.0
    restarts: int = 2


ORIGINAL = Matching("squared", "l-bfgs", 300)
COSINE = Matching("cosine", "adam", 400, total_variation=1e-4)


@dataclass(frozen=True)
class Found:
    """Records as an attack has found them."""

    x: Tensor  # (n, *features) float32
    labels: Tensor  # (n,), as the model takes them
    objective: float  # what is left of it


def invert(
    model: Model, start: Tensor, update: Tensor, how: LocalSteps, records: int, *, low: Tensor, high: Tensor,
    stream: Stream, matching: Matching = ORIGINAL, labels: Tensor | None = None,
) -> Found:  # fmt: skip
    """Records that would have sent an update like this one.

    Args:
        start: parameters that the client began with (p,).
        update: what it sent: the parameters that it ended with, less the start (p,).
        records: n, how many the client has.
        low, high: the range of each feature, each of a shape that broadcasts to a record.
        stream: of the dummy records to begin with, N(0, 1) in units of half the range.
        labels: of the records (n,), known or guessed (`guess_label`); None: found with them, as soft labels.

    Raises:
        UserError: the loss of the model cannot be differentiated twice; or labels are not known and there are none to
            be found, since the model predicts a number or several classes at once.
    """
    features, classes = model.spec.features, model.spec.classes
    if labels is None and (not classes or model.spec.several):
        raise UserError(
            "the labels of the records are not known.",
            "A soft label is one among classes; this model predicts a number, or several classes at once.",
            "invert(..., labels=y)",
        )
    if start.shape != (model.parameters,) or update.shape != start.shape:
        raise ValueError(
            f"start {tuple(start.shape)} and update {tuple(update.shape)} of {model.parameters} parameters"
        )
    start, update = start.detach().double(), update.detach().double()
    low, high = (end.double().expand(features) for end in (low, high))
    pixels = records * math.prod(features)

    def read(v: Tensor) -> tuple[Tensor, Tensor]:
        """Dummy records in the unit box, and their labels."""
        x = v[:pixels].view(records, *features)
        return x, labels if labels is not None else v[pixels:].view(records, classes).softmax(dim=1)

    def objective(v: Tensor) -> Tensor:
        x, y = read(v)
        distance = _distance(how.update(model, start, low + (high - low) * x, y), update, matching.objective)
        return distance + matching.total_variation * _variation(x) if matching.total_variation else distance

    descend = _descent(objective)
    search = _quasi_newton if matching.search == "l-bfgs" else _signed_adam
    best, lowest = torch.empty(0), math.inf
    for _ in range(matching.restarts):
        dummy = (0.5 + 0.5 * stream.normal(pixels)).clamp(0, 1)
        soft = stream.normal(records * classes) if labels is None else torch.empty(0, dtype=torch.float64)
        begin = torch.cat([dummy, soft])
        if not len(best):
            _check_twice(objective, begin, model)
        end = search(descend, begin, pixels, matching.iterations)
        left = descend(end)[0]
        if not len(best) or left < lowest:
            best, lowest = end, left
    x, y = read(best)
    return Found((low + (high - low) * x).float(), y if labels is not None else y.argmax(dim=1), lowest)


def _distance(found: Tensor, update: Tensor, objective: str) -> Tensor:
    """Of two updates (p,)."""
    least, length = torch.finfo(update.dtype).tiny, torch.linalg.vector_norm(update)
    if objective == "squared":
        return (found - update).square().sum() / length.square().clamp(min=least)
    return 1 - (found @ update) / (torch.linalg.vector_norm(found) * length).clamp(min=least)


def _variation(x: Tensor) -> Tensor:
    """Mean absolute difference of pixels side by side, and of those below one another; 0 of what is no image."""
    if x.dim() != 4:
        return x.new_zeros(())
    return sum(((x.diff(dim=dim).square() + SMOOTH).sqrt().mean() for dim in (-1, -2)), x.new_zeros(()))


def _check_twice(objective: Callable[[Tensor], Tensor], v: Tensor, model: Model) -> None:
    """Refuse a model of which the gradient of a gradient cannot be had."""
    try:
        # all the way back, and not to the records alone: a layer without second derivatives would be passed by
        objective(v.clone().requires_grad_()).backward()
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(
            f'gradient inversion does not go with model.name = "{model.spec.name}".',
            "It takes second derivatives of the loss, in float64, and a layer has none. torch said:\n"
            f"{str(error).splitlines()[0]}",
            "an audit, or membership inference",
        ) from error


def _descent(objective: Callable[[Tensor], Tensor]) -> Objective:
    """The objective with its gradient."""

    def both(v: Tensor) -> tuple[float, Tensor]:
        leaf = v.detach().requires_grad_()
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        if not value.isfinite():  # training that has diverged: somewhere else is better
            return HUGE, torch.zeros_like(gradient)
        return float(value.detach()), gradient.nan_to_num()

    return both


def _quasi_newton(objective: Objective, v: Tensor, boxed: int, iterations: int) -> Tensor:
    """L-BFGS; the first `boxed` values stay within 0 and 1."""
    bounds = [(0.0, 1.0)] * boxed + [(None, None)] * (len(v) - boxed)

    def both(values):  # type: ignore[no-untyped-def]
        value, gradient = objective(torch.from_numpy(values.copy()))
        return value, gradient.numpy()

    options = {"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": MEMORY, "ftol": TOLERANCE, "gtol": 0.0}
    found = minimize(both, v.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.from_numpy(found.x)


def _signed_adam(objective: Objective, v: Tensor, boxed: int, iterations: int) -> Tensor:
    """Adam by signs of gradients; after each step the first `boxed` values are put back within 0 and 1."""
    v = v.clone()
    adam = torch.optim.Adam([v], lr=RATE)
    falling = torch.optim.lr_scheduler.MultiStepLR(adam, [int(share * iterations) for share in FALLS], 0.1)
    for _ in range(iterations):
        v.grad = objective(v)[1].sign()
        adam.step()
        falling.step()
        v[:boxed].clamp_(0, 1)
    return v


def guess_label(model: Model, update: Tensor) -> int | None:
    """The label of the single record behind an update (p,), from what it does to the last layer.

    Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients" (2020): with cross-entropy the row of the
    record's own class, alone, points against those of all others, whatever the sign of the activations. Noise may turn
    any of these products, so the row with the lowest sum of them is taken. With two classes, or another loss, two rows
    may point against each other: then the class whose bias has grown most is taken.

    None: it cannot be read off, as there is no last layer with a row for each class, or no bias where one is needed.
    """
    classes, parts = model.spec.classes, list(model.unflatten(update.double()).values())
    bias = parts.pop() if parts[-1].shape == (classes,) else None
    if model.spec.several or not parts or parts[-1].shape[:1] != (classes,) or parts[-1].dim() < 2:
        return None
    if classes == 2 or hasattr(model.module, "record_losses"):
        return None if bias is None else int(bias.argmax())
    rows = parts[-1].flatten(1) if bias is None else torch.cat([parts[-1].flatten(1), bias.unsqueeze(1)], dim=1)
    products = rows @ rows.sum(dim=0) - rows.square().sum(dim=1)  # of each row with all others
    return int(products.argmin())


def psnr(a: Tensor, b: Tensor, range: float = 1.0) -> float:
    """Peak signal-to-noise ratio in decibels of two records of the same shape; infinite if they are equal.

    Args:
        range: of a value, from the least to the most that it can be.
    """
    error = float((a.double() - b.double()).square().mean())
    return 10 * math.log10(range**2 / error) if error else math.inf


def ssim(a: Tensor, b: Tensor, range: float = 1.0) -> float:
    """Structural similarity of two images (channels, height, width): the mean over all places and channels.

    Wang, Bovik, Sheikh and Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity"
    (2004): Gaussian windows of 11 by 11 pixels, those within the image. A smaller image gets the largest window of odd
    length that fits, with the same deviation; numbers for images of different size then do not compare.
    """
    shorter = min(a.shape[-2:])
    side = min(WINDOW, shorter - (shorter + 1) % 2)
    bell = torch.exp(-((torch.arange(side, dtype=torch.float64) - side // 2) ** 2) / (2 * DEVIATION**2))
    window = torch.outer(bell, bell) / bell.sum() ** 2

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(values.unsqueeze(1), window.view(1, 1, side, side))

    a, b = a.double(), b.double()
    mean_a, mean_b = mean(a), mean(b)
    variances = mean(a * a) - mean_a**2 + mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = (K1 * range) ** 2, (K2 * range) ** 2
    similar = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((similar / ((mean_a**2 + mean_b**2 + c1) * (variances + c2))).mean())
