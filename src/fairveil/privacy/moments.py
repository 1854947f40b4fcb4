"""Means and standard deviations of columns, released before training so that features can be standardised."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import DpEvent
from torch import Tensor

from fairveil.privacy.mechanisms import Client, noise_std, on_grid, sampled_gaussian
from fairveil.privacy.release import MINT, Release

LEAST_DEVIATION = 0.01  # of half the public range: a column that hardly varies is not blown up by the noise


def contributions(x: Tensor) -> Tensor:
    """(n, 1 + 2d) float64: what each record (n, d) adds. 1, its values and their squares, each within [-1, 1]."""
    bounded = x.double().nan_to_num(0.0).clamp(-1, 1)
    return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), bounded, bounded.square()], dim=1)


def bound(columns: int) -> float:
    """The largest Euclidean norm of one record's contribution."""
    return math.sqrt(1 + 2 * columns)


@dataclass(frozen=True)
class NoisyMoments:
    """The number of a client's records, and the sums of d columns and of their squares, with Gaussian noise.

    Unit: one record of the client. Neighbours (add/remove): two datasets that differ in one record. A record adds a
    vector of 1 + 2d numbers, each within [-1, 1] whatever the record holds, so it moves the sums by at most
    sqrt(1 + 2d) in the Euclidean norm (by twice that under replace, which the accountant knows). All records take part.
    """

    columns: tuple[int, ...]  # of the features
    noise_multiplier: float

    @property
    def kind(self) -> str:
        return "column statistics"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("moments",)

    @property
    def event(self) -> DpEvent:
        return sampled_gaussian(1.0, self.noise_multiplier)

    def describe(self) -> str:
        columns = f"{len(self.columns)} column{'s' * (len(self.columns) > 1)}"
        return f"count, sum and sum of squares of {columns}, noise multiplier {self.noise_multiplier:.4f}"

    def release(self, client: Client) -> tuple[Release, dict[str, float]]:
        """The noisy sums (1 + 2d,), float64."""
        total = contributions(client.data.train.x[:, list(self.columns)]).sum(dim=0)
        std = noise_std(bound(len(self.columns)), self.noise_multiplier)
        if std:
            total = on_grid(total + std * client.noise().normal(len(total)), std)
        return Release({"moments": total}, self, MINT), {}


def mean_and_deviation(moments: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) from noisy sums (1 + 2d,): a function of what was released, so it costs nothing.

    Noise can make a variance negative and a mean leave its bounds: both are brought back.
    """
    values = moments.double().numpy()
    d = (len(values) - 1) // 2
    count = max(values[0], 1.0)
    mean = np.clip(values[1 : 1 + d] / count, -1, 1)
    variance = values[1 + d :] / count - mean**2
    return mean, np.sqrt(np.clip(variance, LEAST_DEVIATION**2, 1.0))
