"""With the noise off and no clipping each algorithm is the plain one, written out here from its definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairveil.algorithms.dp_fedsgd import DPFedSGD
from fairveil.config import RunConfig, make_config
from fairveil.contract import outcome
from fairveil.data.federation import ClientData
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import MINT, Share
from fairveil.privacy.training import NoisyTraining
from fairveil.run import run_plan
from fairveil.session import Facts, Member, Terms
from fairveil.streams import Stream
from fairveil.tasks import bounded_update

OFF = {"noise_multiplier": 0.0, "clip_norm": float("inf"), "delta": 1e-3}


def final(config: RunConfig, runs: Path) -> Tensor:
    """The state after the last round: one model (p,), or several (m, p)."""
    (state,) = outcome(run_plan(make_plan(config), runs=runs).folder).checkpoint.state.values()
    return torch.as_tensor(state)


def clients_of(config: RunConfig) -> list[ClientData]:
    federation = config.build_federation()
    return [federation.load(i) for i in range(federation.clients)]


def start_of(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Weights (10, 64) and bias (10,) of the first model."""
    flat = config.model_spec(config.build_federation()).build().initial(Stream(config.seed, "initial model"))
    return flat[:640].reshape(10, 64), flat[640:]


def gradient(weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean cross-entropy of logistic regression, in closed form: (softmax - onehot)^T x / n."""
    x = x.reshape(len(x), -1)
    error = (torch.softmax(x @ weight.T + bias, dim=1) - F.one_hot(y, 10)) / len(x)
    return error.T @ x, error.sum(dim=0)


def descend(weight: Tensor, bias: Tensor, batches: list[tuple[Tensor, Tensor]], rate: float) -> Tensor:
    """Plain gradient descent over batches; the update as one vector."""
    first = weight, bias
    for x, y in batches:
        dw, db = gradient(weight, bias, x, y)
        weight, bias = weight - rate * dw, bias - rate * db
    return torch.cat([(weight - first[0]).reshape(-1), bias - first[1]])


def full_batches(data: ClientData, steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(data.train.x, data.train.y)] * steps


def federated_averaging(
    config: RunConfig, members: np.ndarray, weights: np.ndarray, rounds: int, steps: int, rate: float
) -> Tensor:
    """McMahan et al. (2017) with full local batches: w += sum_k weight_k * update_k."""
    data = clients_of(config)
    weight, bias = start_of(config)
    for _ in range(rounds):
        updates = [descend(weight, bias, full_batches(data[k], steps), rate) for k in members]
        step = sum(share * update for share, update in zip(weights, updates, strict=True))
        assert isinstance(step, Tensor)
        weight, bias = weight + step[:640].reshape(10, 64), bias + step[640:]
    return torch.cat([weight.reshape(-1), bias])


@pytest.fixture
def plain(small: dict[str, Any]) -> dict[str, Any]:
    """Full batches, so that there is nothing random left; sizes public, so that they are the true ones."""
    algorithm = {"rounds": 3, "batch_size": 10_000, "learning_rate": 0.8, "local_epochs": 2}
    return small | {"privacy": OFF, "algorithm": algorithm, "data": small["data"] | {"sizes": "public"}}


def named(plain: dict[str, Any], name: str, **options: Any) -> RunConfig:
    return make_config(plain | {"algorithm": plain["algorithm"] | {"name": name} | options})


def test_global_is_federated_averaging(plain: dict[str, Any], runs: Path) -> None:
    config = named(plain, "global")
    expected = federated_averaging(config, np.arange(5), np.full(5, 1 / 5), 3, 2, 0.8)
    assert torch.allclose(final(config, runs), expected, atol=2e-6)


def test_global_weighted_by_size(plain: dict[str, Any], runs: Path) -> None:
    config = named(plain, "global", weights="size")
    size = config.build_federation().size
    assert len(set(size.tolist())) > 1  # or the test could not tell it from equal weights
    expected = federated_averaging(config, np.arange(5), size / size.sum(), 3, 2, 0.8)
    assert torch.allclose(final(config, runs), expected, atol=2e-6)


def test_oracle_is_federated_averaging_within_each_true_cluster(plain: dict[str, Any], runs: Path) -> None:
    config = named(plain, "oracle")
    models = final(config, runs)
    for m, members in enumerate([np.array([0, 1]), np.array([2, 3, 4])]):
        weights = np.full(len(members), 1 / len(members))
        assert torch.allclose(models[m], federated_averaging(config, members, weights, 3, 2, 0.8), atol=2e-6)


def test_local_is_gradient_descent_alone(plain: dict[str, Any], runs: Path) -> None:
    config = named(plain, "local")
    models = final(config, runs)
    for k in range(5):
        assert torch.allclose(models[k], federated_averaging(config, np.array([k]), np.ones(1), 3, 2, 0.8), atol=2e-6)


def test_dp_fedavg_is_federated_averaging_when_everybody_takes_part(plain: dict[str, Any], runs: Path) -> None:
    config = named(plain, "dp-fedavg", sample_rate=1.0)
    expected = federated_averaging(config, np.arange(5), np.full(5, 1 / 5), 3, 2, 0.8)
    assert torch.allclose(final(config, runs), expected, atol=2e-6)


def test_dp_fedavg_divides_by_the_expected_cohort(plain: dict[str, Any], runs: Path) -> None:
    """One round at q = 0.6 of 5 clients: the sum over those drawn, over 3, however many were drawn."""
    for seed in range(20):
        config = named(plain | {"seed": seed}, "dp-fedavg", sample_rate=0.6, rounds=1)
        drawn = Stream(make_plan(config).root, "round 1, cohort 1").coins(5, 0.6).tolist()
        if len(drawn) not in (0, 3):
            break
    assert len(drawn) not in (0, 3)  # or the test could not tell the two divisors apart
    expected = federated_averaging(config, np.array(drawn), np.full(len(drawn), 1 / 3), 1, 2, 0.8)
    assert torch.allclose(final(config, runs), expected, atol=2e-6)


def test_dp_fedavg_with_decay(plain: dict[str, Any], runs: Path) -> None:
    """Of three rounds the last two go at two thirds and one third of the rate."""
    config = named(plain, "dp-fedavg", sample_rate=1.0, decay="linear")
    weight, bias = start_of(config)
    for rate in (0.8, 0.8 * 2 / 3, 0.8 / 3):
        step = torch.stack([descend(weight, bias, full_batches(d, 2), rate) for d in clients_of(config)]).mean(dim=0)
        weight, bias = weight + step[:640].reshape(10, 64), bias + step[640:]
    assert torch.allclose(final(config, runs), torch.cat([weight.reshape(-1), bias]), atol=2e-6)


def test_dp_fedsgd_is_gradient_descent_on_the_mean_loss(plain: dict[str, Any], runs: Path) -> None:
    """One step of each client from the same model, averaged: one step along the mean of their gradients."""
    algorithm = {key: value for key, value in plain["algorithm"].items() if key != "local_epochs"}
    config = named(plain | {"algorithm": algorithm}, "dp-fedsgd")
    expected = federated_averaging(config, np.arange(5), np.full(5, 1 / 5), 3, 1, 0.8)
    assert torch.allclose(final(config, runs), expected, atol=2e-6)


def test_dp_fedsgd_pays_for_one_step_in_a_round(plain: dict[str, Any]) -> None:
    """On a Poisson batch of b of N records, or all of a client that has no more than b."""
    facts = Facts(np.array([100, 20]), np.zeros(2, int), (64,), 10, 650, 1.5)
    algorithm = DPFedSGD(rounds=7, batch_size=32)
    for size, rate, batch in ((100, 0.32, 32.0), (20, 1.0, 20.0)):
        assert algorithm.releases(Terms(facts, size, 1.2)) == {NoisyTraining(rate, 1, 1.5, 1.2, batch): 7}
    assert not algorithm.releases(Terms(facts, None, 1.2))
    with pytest.raises(UserError, match="local_epochs"):  # there are no passes over the records
        make_plan(named(plain, "dp-fedsgd"))


def test_dp_fedavg_with_small_local_batches(plain: dict[str, Any]) -> None:
    """The client's inner loop: shuffled batches, each record once in an epoch, plain SGD."""
    config = named(plain, "dp-fedavg", sample_rate=1.0, rounds=1, batch_size=50)
    data = clients_of(config)[0]
    weight, bias = start_of(config)
    start = torch.cat([weight.reshape(-1), bias])
    sums = CohortSums((Part("update", (650,), math.inf, 0.0),), 1.0)
    inputs = {"model": start, "learning_rate": 0.8, "local_epochs": 2, "batch_size": 50}
    model = config.model_spec(config.build_federation()).build()
    (reply,) = bounded_update([Member(data, model, inputs, sums, {}, ("here",), MINT)])
    shuffle, batches = Stream("here", "task", "batches").numpy, []
    for _ in range(2):
        order = torch.from_numpy(shuffle.permutation(len(data.train)))
        assert sorted(order.tolist()) == list(range(len(data.train)))
        batches += [(data.train.x[i], data.train.y[i]) for i in order.split(50)]
    assert isinstance(reply.out, Share)
    assert torch.allclose(reply.out.value["update"].float(), descend(weight, bias, batches, 0.8), atol=2e-6)
