"""The student: a model that the server trains on labels others have voted for, helped by records without labels.

Labels are few, since each costs privacy, while public records cost nothing. Virtual adversarial training (Miyato,
Maeda, Koyama and Ishii, "Virtual Adversarial Training: A Regularization Method for Supervised and Semi-Supervised
Learning", 2018) asks that an answer stay the same near every record, with or without a label, in the direction where it
would change most. Whatever goes in is public or was released before, so what comes out costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fairveil.errors import UserError
from fairveil.models import Model
from fairveil.streams import Stream

PROBE = 0.1  # xi, of the radius: how far the search for the direction looks; much less would drown in float32


@dataclass(frozen=True)
class StudentTraining:
    """How a student is trained.

    The radius is a share of the distance of a record from the mean of all (root mean square), so that one value serves
    images of any size and vectors of any length. Whether smoothness helps depends on the records. It does for digits,
    at 16x16 and at 28x28. For histograms of image features (SURF, 800 numbers, 100 labels) no radius helped, and from
    0.1 on `mlp` fell from 57% to about 45%: there a weight of 0 is better.
    """

    steps: int = 1000
    batch_size: int = 64  # of records with labels in a step, and of records of all kinds for the smoothness
    learning_rate: float = 2e-3  # of Adam, at first: it falls to 0 in a straight line
    vat_weight: float = 1.0  # alpha; 0 trains on the labels alone
    vat_radius: float = 0.2  # epsilon

    def __post_init__(self) -> None:
        counts = min(self.steps, self.batch_size) >= 1
        if not (counts and 0 < self.learning_rate < math.inf and 0 <= self.vat_weight < math.inf):
            raise ValueError(f"{self} makes no sense: counts of at least 1, a rate above 0, a finite weight")
        if not 0 < self.vat_radius < math.inf:
            raise ValueError(f"{self} makes no sense: a finite radius above 0")


def train_student(
    model: Model,
    start: Tensor,
    x: Tensor,
    labels: Tensor,
    unlabelled: Tensor,
    training: StudentTraining,
    stream: Stream,
) -> Tensor:
    """Train a classifier by Adam on the loss of labelled records and the smoothness of its answers.

    Args:
        start: parameters to begin with (p,).
        x: records (n, *features) with their labels (n,), int64, or (n, classes), if a record may have several. They
            may be few, wrong in part, and miss classes.
        unlabelled: more records (m, *features); m may be 0.
        stream: all randomness comes from it.

    Returns:
        Parameters (p,): the start itself where there is no label, for smoothness alone would teach nothing.

    Raises:
        UserError: the model's answers do not change smoothly with its input, and vat_weight is not 0.
    """
    if not len(labels):
        return start.clone()
    pool = torch.cat([x, unlabelled])
    radius = training.vat_radius * _spread(pool)
    smooth = training.vat_weight > 0 and radius > 0
    weights = start.detach().clone().requires_grad_()
    adam = torch.optim.Adam([weights], lr=training.learning_rate)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / training.steps)
    taught = _batches(len(labels), training.batch_size, stream.numpy)
    seen = _batches(len(pool), training.batch_size, stream.numpy)
    for _ in range(training.steps):
        parameters, rows = model.unflatten(weights), next(taught)
        loss = model.losses(parameters, x[rows], labels[rows]).mean()
        if smooth:
            loss = loss + training.vat_weight * roughness(model, parameters, pool[next(seen)], radius, stream)
        adam.zero_grad()
        loss.backward()
        adam.step()
        decay.step()
    return weights.detach()


def roughness(model: Model, parameters: Mapping[str, Tensor], x: Tensor, radius: float, stream: Stream) -> Tensor:
    """The mean of KL(p(x) || p(x + r)), with r the `adversarial` step of each record (LDS): () with a gradient.

    The gradient reaches the parameters through p(x + r) alone: p(x) and r count as given.
    """
    fixed = {name: value.detach() for name, value in parameters.items()}
    with torch.no_grad():
        log_p = log_answers(model, functional_call(model.module, fixed, (x,)))
    moved = x + adversarial(model, fixed, x, log_p, radius, stream)
    return _divergences(log_p, log_answers(model, functional_call(model.module, dict(parameters), (moved,)))).mean()


def adversarial(
    model: Model, parameters: Mapping[str, Tensor], x: Tensor, log_p: Tensor, radius: float, stream: Stream
) -> Tensor:
    """Of each record the step of length `radius` that changes its answer most: (n, *features).

    One power iteration for the largest eigenvector of the Hessian of KL(p(x) || p(x + r)) at r = 0: the gradient a
    little off 0, in a random direction, is the Hessian times that direction. Where the answer does not change at all,
    the step is 0.

    Args:
        parameters: without a gradient.
        log_p: the `log_answers` of x.
    """
    probe = PROBE * radius * _unit(stream.normal(x.shape)).to(x.dtype)
    probe.requires_grad_()
    moved = log_answers(model, functional_call(model.module, dict(parameters), (x + probe,)))
    divergence = _divergences(log_p, moved).sum()
    if not divergence.requires_grad:
        raise UserError(
            f'model.name = "{model.spec.name}" does not change smoothly with its input.',
            "Virtual adversarial training moves each record a little, and token ids cannot be moved.",
            "vat_weight = 0",
        )
    (gradient,) = torch.autograd.grad(divergence, probe)
    return (radius * _unit(gradient.double())).to(x.dtype)


def log_answers(model: Model, output: Tensor) -> Tensor:
    """The logarithms of p(x) (n, classes); of several classes (n, classes, 2): each is there, and it is not."""
    if model.spec.several:
        return F.logsigmoid(torch.stack([output, -output], dim=2))
    return output.log_softmax(dim=1)


def _divergences(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each record (n,): of several classes, which are answered each by itself, the sum over them."""
    return (log_p.exp() * (log_p - log_q)).flatten(1).sum(dim=1)


def _unit(directions: Tensor) -> Tensor:
    """Directions (n, ...), float64, each of length 1; zeros stay zeros. What float32 can hold does not underflow."""
    lengths = directions.flatten(1).norm(dim=1).view(-1, *[1] * (directions.dim() - 1))
    return torch.where(lengths > 0, directions / lengths, 0.0)


def _spread(records: Tensor) -> float:
    """How far records (n, ...) lie from their mean, in root mean square."""
    return math.sqrt(float(records.flatten(1).var(dim=0, correction=0).sum(dtype=torch.float64)))


def _batches(count: int, size: int, shuffle: np.random.Generator) -> Iterator[Tensor]:
    """Rows below `count`, `size` at a time or what is left, pass after pass without end."""
    while True:
        yield from torch.from_numpy(shuffle.permutation(count)).split(size)
