"""Local DP-SGD with Opacus on one client, as it is written today, and written well; for the bare loop and for Flower.

It imports nothing of fairveil: Flower's environment does not have it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

torch.set_num_threads(1)
warnings.filterwarnings("ignore")

CLIENTS, RECORDS = 21, 2286
BATCH, LEARNING_RATE, CLIP_NORM, NOISE_MULTIPLIER = 32, 0.1, 1.0, 1.0
STEPS = math.ceil(RECORDS / BATCH)


def cnn() -> nn.Module:
    """fairveil's "cnn" for 28x28 and 10 classes: 28,938 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 10),
    )


@cache
def _records(folder: str, client: int) -> tuple[Tensor, Tensor]:
    """A client's records, loaded once by each process that trains it."""
    rows = slice(client * RECORDS, (client + 1) * RECORDS)
    x, y = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r")[rows] for name in ("x", "y"))
    return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())


@cache
def _trainer() -> tuple[nn.Module, DPOptimizer]:
    """The hooked model, wrapped once for each process and not for each client."""
    model = GradSampleModule(cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    private = DPOptimizer(
        optimizer, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP_NORM, expected_batch_size=BATCH
    )
    return model, private


def train(folder: str, client: int, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One epoch of DP-SGD with Poisson batches from these weights; the weights after it."""
    x, y = _records(folder, client)
    model, optimizer = _trainer()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(value))
    for _ in range(STEPS):
        rows = (torch.rand(RECORDS) < BATCH / RECORDS).nonzero().squeeze(1)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x.index_select(0, rows)), y.index_select(0, rows)).backward()
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()]
