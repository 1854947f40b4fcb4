"""The images of the whole-run benchmark, the same for all: MNIST if FAIRVEIL_DATA says where it is, else random."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from fairveil.data.datasets import find_dataset
from fairveil.data.federation import Dataset, Pool, Records

TESTED = 100  # records that fairveil wants for testing; the rounds that are timed are not evaluated


def prepare(folder: Path, count: int) -> str:
    """Write x.npy and y.npy with `count` images; says which images they are."""
    if "FAIRVEIL_DATA" in os.environ:
        pool = find_dataset("mnist")().load(0)
        assert isinstance(pool, Pool)
        x, y, name = pool.train.x[:count].numpy(), pool.train.y[:count].numpy(), "MNIST"
    else:  # the time of a step does not depend on what is in the picture
        random = np.random.default_rng(0)
        x, y, name = random.random((count, 1, 28, 28), np.float32), random.integers(10, size=count), "random images"
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return name


class Images(Dataset):
    """The files that `prepare` wrote, for fairveil's engine."""

    folder: str

    def load(self, seed: int) -> Pool:
        """Rows that belong to nobody yet."""
        x, y = (torch.from_numpy(np.load(Path(self.folder) / f"{name}.npy")) for name in ("x", "y"))
        return Pool("images", Records(x, y), Records(x[:TESTED], y[:TESTED]), 10, record="one image")
