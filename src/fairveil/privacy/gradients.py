"""Per-record clipped gradient sums: the one place where a record meets its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap

from fairveil.errors import UserError
from fairveil.options import shown

if TYPE_CHECKING:
    from fairveil.models import Model

# Records whose gradients are held at once, so that memory does not grow with the batch: at most so many, and at most
# so many numbers in all (a ResNet-18 of 11 million parameters would need 9 GB for 64 of them).
MICRO_BATCH, MICRO_NUMBERS = 64, 1 << 26
ROUNDING = 1 - 1e-6  # a record's float32 gradient depends on its batch in the last bits; this keeps the sum in bounds


@dataclass(frozen=True)
class ClippedSum:
    """Attributes: total (p,) float64, the sum of clipped gradients; how many records were clipped, or left out.

    In float32 the rounding of a long sum would exceed the bound: by 4% for 100,000 aligned gradients.
    """

    total: Tensor
    clipped: int
    not_finite: int


def clipped_sum(model: Model, weights: Tensor, x: Tensor, y: Tensor, clip_norm: float) -> ClippedSum:
    """Sum over records of clip(gradient of the record's loss, clip_norm).

    A record whose gradient is not finite contributes zero and is counted: it must not break the bound for the
    others, and NaN times zero would be NaN.

    Args:
        weights: flat parameters (p,).
        x, y: records (n, ...), (n,); n may be 0.
    """
    total = torch.zeros_like(weights, dtype=torch.float64)
    clipped = not_finite = 0
    at_once = max(1, min(MICRO_BATCH, MICRO_NUMBERS // len(weights)))
    for start in range(0, len(y), at_once):
        records = slice(start, start + at_once)
        gradients = record_gradients(model, weights, x[records], y[records])
        norm = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (clip_norm * ROUNDING / norm).clamp(max=1.0), 0.0)
        if not finite.all():
            gradients[~finite] = 0.0
        total += factor @ gradients.to(torch.float64)
        clipped += int((norm[finite] > clip_norm).sum())
        not_finite += int((~finite).sum())
    return ClippedSum(total, clipped, not_finite)


def record_gradients(model: Model, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each record's loss, (n, p), by vmap: exact for any module that treats records apart."""

    def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        return model.losses(parameters, one_x.unsqueeze(0), one_y.unsqueeze(0)).squeeze(0)

    by_name = vmap(grad(loss), in_dims=(None, 0, 0), randomness="error")(model.unflatten(weights), x, y)
    return torch.cat([by_name[name].reshape(len(y), -1) for name in model.names], dim=1)


def check_record_gradients(model: Model) -> None:
    """Refuse a model whose per-record gradients cannot be had, before anything is planned.

    Raises:
        UserError: naming what stands in the way.
    """
    spec = model.spec
    x = torch.linspace(-1, 1, 2 * math.prod(spec.features)).reshape(2, *spec.features)
    y = torch.arange(2) if spec.classes else torch.ones(2)
    weights = model.flatten(model.module)
    try:
        together = record_gradients(model, weights, x, y)
    except RuntimeError as error:
        raise UserError(
            f"model.name = {shown(spec.name)} has no per-record gradients.",
            f"torch.func.vmap could not follow it: {str(error).splitlines()[0]}\n"
            "Record-level privacy clips the gradient of each record on its own.",
            "a model without branches on its data, nn.GRU or nn.LSTM; or a client-level algorithm (dp-fedavg)",
        ) from error
    alone = torch.stack([model.gradient(weights, x[i : i + 1], y[i : i + 1]) for i in range(2)])
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-5):
        raise UserError(
            f"model.name = {shown(spec.name)} has per-record gradients that disagree with its own.",
            "Those of torch.func.vmap differ from those of each record alone, so no bound on them can be trusted.",
            "a model of layers that treat each record apart",
        )
