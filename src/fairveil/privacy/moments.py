"""Means and standard deviations of columns, released before training so that features can be standardised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dp_accounting import DpEvent
from torch import Tensor

from fairveil.privacy.mechanisms import Client, noise_std, on_grid, sampled_gaussian
from fairveil.privacy.release import MINT, Plain, Release

LEAST_DEVIATION = 0.01  # of half the public range: a column that hardly varies is not blown up by the noise

Pairs = tuple[tuple[int, int | None], ...]  # features, each with the one that is 1 where it is missing


def contributions(x: Tensor, columns: Pairs) -> Tensor:
    """(n, 3d) float64: what each record adds: of each column 1, the value and its square, or zeros if it is missing."""
    values = x[:, [column for column, _ in columns]].double().nan_to_num(0.0).clamp(-1, 1)
    there = torch.ones_like(values)
    for number, (_, missing) in enumerate(columns):
        if missing is not None:
            there[:, number] = x[:, missing] == 0
    return torch.cat([there, there * values, there * values.square()], dim=1)


def bound(columns: Pairs) -> float:
    """The largest Euclidean norm of one record's contribution."""
    return math.sqrt(3 * len(columns))


@dataclass(frozen=True)
class NoisyMoments:
    """Of d columns, how many of a client's records have a value, its sum and sum of squares, with Gaussian noise.

    Unit: one record of the client. Neighbours (add/remove): two datasets that differ in one record. A record adds a
    vector of 3d numbers, each within [-1, 1] whatever the record holds, so it moves the sums by at most sqrt(3d) in the
    Euclidean norm (by at most twice that under replace, which the accountant knows). All records take part.
    """

    columns: Pairs
    noise_multiplier: float

    def __post_init__(self) -> None:
        # whole numbers only: what else torch takes for an index would change the shape, and with it the bound
        pairs = all(type(at) is int and (missing is None or type(missing) is int) for at, missing in self.columns)
        if not (pairs and 0 <= self.noise_multiplier < math.inf):
            raise ValueError(f"{self} makes no sense")

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
        """The noisy sums (3d,), float64."""
        x = client.data.train.x
        if x.dim() != 2:
            raise ValueError(f"records of shape {tuple(x.shape[1:])} have no columns")
        total = contributions(x, self.columns).sum(dim=0)
        std = noise_std(bound(self.columns), self.noise_multiplier)
        if std:
            total = on_grid(total + std * client.noise().normal(len(total)), std)
        return Release({"moments": total}, self, client.key, MINT), {}

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """The sums over no records."""
        return {"moments": torch.zeros(3 * len(self.columns), dtype=torch.float64)}


def mean_and_deviation(moments: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (d,) from noisy sums (3d,): a function of what was released, so it costs nothing.

    Noise can make a variance negative and a mean leave its bounds: both are brought back.
    """
    count, total, squares = moments.double().numpy().reshape(3, -1)
    count = np.maximum(count, 1.0)
    mean = np.clip(total / count, -1, 1)
    return mean, np.sqrt(np.clip(squares / count - mean**2, LEAST_DEVIATION**2, 1.0))
