"""The modified method of differential multipliers for clipping values, on inner products alone.

Du, Xiang and Wu, "Mitigating Unfairness in Differentially-Private Federated Learning" (2025), equations (14) to (21).
With u = -eta * sum_k a_k g_k min(1, C_k/|g_k|) the losses after the step are about L_k + <g_k, u>. The clipping values
C_k are to make their weighted sum small, and the largest distance of one of them from their mean at most alpha:

    minimise over C   sum_k p_k <g_k, u> + gamma (variance * max_k C_k + sum_k |g_k|_1 max(0, 1 - C_k/|g_k|))
    subject to        f = max(0, max_j |mean_k Lhat_k - Lhat_j| - alpha) = 0

by descent in C and ascent in the multiplier lambda. All gradients come from the matrix of inner products <g_i, g_j>, so
that vectors of any length are touched once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 14  # coordinates that are turned into float64 at once


@dataclass(frozen=True)
class Multipliers:
    """What the paper leaves to whoever runs it."""

    learning_rate: float  # eta, of the step that is foreseen
    alpha: float  # how far a loss may lie from the mean
    deviation_weight: float  # gamma, of what clipping and noise do to single clients
    penalty: float  # c, of the squared constraint
    start: float  # lambda at the beginning of each round
    clip_rate: float  # zeta
    multiplier_rate: float  # xi
    steps: int  # chi


@dataclass(frozen=True)
class Contributors:
    """Those whose clipping values are sought, as they are seen by whoever seeks them.

    Attributes:
        gram: inner products <g_i, g_j> (m, m), float64.
        sums: |g_i|_1 (m,).
        losses: L_i before the step (m,).
        objective: p_i, how much the loss of each counts (m,).
        share: a_i, what the step is made of: p_i/q for the clients of a cohort (m,).
        mean: how much each counts in the mean loss (m,).
        free: whose clipping values are sought (m,) bool; the others contribute in full.
        about: the one whose distance from the mean counts; None: whoever is farthest away.
        variance: what a larger bound on all costs: d sqrt(2/pi) sigma (the paper prints sqrt(1/pi)), or 0.
    """

    gram: Tensor
    sums: Tensor
    losses: Tensor
    objective: Tensor
    share: Tensor
    mean: Tensor
    free: Tensor
    about: int | None = None
    variance: float = 0.0


def gram_matrix(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Inner products (m, m) and sums of absolute values (m,) of vectors (p,), in float64, a part at a time."""
    count, length = len(rows), rows[0].numel()
    gram, sums = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for first in range(0, length, CHUNK):
        part = torch.stack([row[first : first + CHUNK] for row in rows]).to(torch.float64)
        gram += part @ part.T
        sums += part.abs().sum(dim=1)
    return gram, sums


def fair_clips(found: Contributors, given: Multipliers, start: Tensor, most: float = math.inf) -> Tensor:
    """The clipping values C (m,) after the steps of the paper, each from 0 to `most`.

    Args:
        start: C (m,) at the beginning; in the paper the norms themselves.
    """
    clips, multiplier = start.clone(), given.start
    for _ in range(given.steps):
        slope, distance = clip_slopes(found, given, clips, multiplier)
        clips = torch.where(found.free, (clips - given.clip_rate * slope).clamp(0.0, most), clips)
        multiplier += given.multiplier_rate * distance
    return clips


def clip_slopes(
    found: Contributors, given: Multipliers, clips: Tensor, multiplier: float
) -> tuple[Tensor, float]:  # fmt: skip
    """The derivative of the Lagrangian by every clipping value (m,), equation (17), and f."""
    norm = found.gram.diagonal().clamp(min=0.0).sqrt()
    safe = norm.clamp(min=torch.finfo(torch.float64).tiny)
    kept = torch.where(norm > 0, (clips / safe).clamp(max=1.0), 1.0)  # min(1, C_k/|g_k|)
    # of min(1, C/|g|) by C: from the left where they are equal, or a start at the norms would never be left
    below = clips <= norm * (1 + 1e-9)  # a norm is known to rounding only
    bend = torch.where(below & (norm > 0), 1.0 / safe, 0.0)  # s_i
    eta, by_step = given.learning_rate, found.share * bend
    foreseen = found.losses - eta * found.gram @ (found.share * kept)  # Lhat
    apart = found.mean @ foreseen - foreseen
    j = int(apart.abs().argmax()) if found.about is None else found.about
    distance = max(0.0, abs(float(apart[j])) - given.alpha)  # f
    slope = -eta * by_step * (found.gram @ found.objective) - given.deviation_weight * found.sums * bend
    if found.variance:
        slope = slope + given.deviation_weight * found.variance * (clips == clips.max()).to(slope.dtype)
    if distance:
        away = found.gram @ found.mean - found.gram[:, j]  # <mean g - g_j*, g_i>
        sign = math.copysign(1.0, float(apart[j]))  # omega
        slope = slope + (multiplier + given.penalty * distance) * (-sign * eta * by_step * away)
    return slope, distance
