"""Federated averaging of an almost empty model on pfl's simulated backend; runs in pfl's own environment.

pfl has no record-level DP-SGD, so each user takes one plain step: less than fairveil does. Clients come one after the
other, as in pfl; every client takes part in every round; nothing is evaluated or saved.

python pfl_app.py RECORDS ROUNDS CLIENTS... prints the seconds of each round by number of clients as the last line.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

torch.set_num_threads(1)


class Logistic(nn.Module):
    """Two features, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.linear(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.times.append(time.perf_counter())
        return False, Metrics()


def seconds(clients: int, records: int, rounds: int) -> list[float]:
    """Of each round after the first."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((clients, records, 2), dtype=np.float32))
    y = torch.from_numpy(random.integers(2, size=(clients, records)))
    users = itertools.cycle(range(clients))
    data = FederatedDataset(lambda user: Dataset(raw_data=[x[user], y[user]]), lambda: next(users))
    module = Logistic()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            # the first round is evaluated by pfl's rule, and is not timed
            central_num_iterations=rounds + 1, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.1, local_batch_size=None
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )  # fmt: skip
    return np.diff(clock.times).tolist()


if __name__ == "__main__":
    records, rounds, *sizes = map(int, sys.argv[1:])
    found = {clients: seconds(clients, records, rounds) for clients in sizes}
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        sys.exit()  # under torchrun the first process speaks for all
    sys.stdout.write("\n" + json.dumps(found) + "\n")
