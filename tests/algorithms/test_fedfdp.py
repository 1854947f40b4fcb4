"""Fair clipping in a federation: its rounds written out, what it comes to without a penalty, and its price."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from torch import Tensor

from fairveil.algorithms.fedfdp import FedFDP
from fairveil.config import RunConfig, make_config
from fairveil.contract import outcome
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.fair_training import FairTraining
from fairveil.privacy.gradients import ROUNDING
from fairveil.privacy.mechanisms import Part
from fairveil.privacy.training import NoisyTraining
from fairveil.run import run_plan
from fairveil.session import Facts, Terms
from fairveil.streams import Stream

RATE, PENALTY, BOUND = 0.8, 0.6, 4.0


@pytest.fixture
def plain(small: dict[str, Any]) -> dict[str, Any]:
    """Full batches, one step in a round, no noise, no clipping, exact sizes."""
    algorithm = {"name": "fedfdp", "rounds": 3, "batch_size": 10_000, "learning_rate": RATE}
    algorithm |= {"penalty": PENALTY, "loss_bound": BOUND}
    privacy = {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}
    return small | {"privacy": privacy, "algorithm": algorithm, "data": small["data"] | {"sizes": "public"}}


def laid_over(plain: dict[str, Any], privacy: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return make_config(plain | {"algorithm": plain["algorithm"] | options, "privacy": privacy or plain["privacy"]})


def final(config: RunConfig, runs: Path) -> tuple[Tensor, float]:
    state = outcome(run_plan(make_plan(config), runs=runs).folder).checkpoint.state
    return torch.as_tensor(state["model"]), float(state.get("loss", math.nan))


def start_of(config: RunConfig) -> Tensor:
    return config.model_spec(config.build_federation()).build().initial(Stream(config.seed, "initial model"))


def losses_and_gradients(weights: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of logistic regression for each record: -log softmax (n,), and (softmax - onehot) x with the bias (n, 650)."""
    x = x.reshape(len(x), -1).double()
    chance = torch.softmax(x @ weights[:640].reshape(10, 64).T + weights[640:], dim=1)
    error = chance - F.one_hot(y, 10)
    gradients = torch.cat([torch.einsum("ni,nj->nij", error, x).reshape(len(x), -1), error], dim=1)
    return -chance[torch.arange(len(y)), y].log(), gradients


def descended(config: RunConfig, rounds: int, clip: float = math.inf) -> tuple[Tensor, float]:
    """The published round with full batches, in float64: fair clipping by the mean loss of the round before."""
    federation = config.build_federation()
    train = [federation.load(k).train for k in range(federation.clients)]
    weights, mean = start_of(config).double(), math.nan
    for number in range(rounds):
        steps, losses = [], []
        for records in train:
            loss, gradients = losses_and_gradients(weights, records.x, records.y)
            if number:
                gradients = gradients * (1 + PENALTY * (loss - mean)).clamp(min=0.0).unsqueeze(1)
            norm = gradients.norm(dim=1, keepdim=True)
            steps.append((gradients * (clip * ROUNDING / norm).clamp(max=1.0)).mean(dim=0))
            losses.append(float(loss.mean()))
        weights, mean = weights - RATE * torch.stack(steps).mean(dim=0), float(np.mean(losses))
    return weights, mean


# ---- the rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [math.inf, 0.5])
def test_rounds_in_closed_form(plain: dict[str, Any], runs: Path, clip: float) -> None:
    """One round, in which all weigh the same; and three. The loss of a round is that at the weights it began with."""
    privacy = plain["privacy"] | {"clip_norm": clip}
    for rounds in (1, 3):
        config = laid_over(plain, privacy, rounds=rounds)
        model, loss = final(config, runs)
        expected, mean = descended(config, rounds, clip)
        assert torch.allclose(model.double(), expected, atol=5e-6)
        assert loss == pytest.approx(mean, rel=1e-5)


def test_without_a_penalty_it_is_global(plain: dict[str, Any], runs: Path) -> None:
    fair, _ = final(laid_over(plain, local_epochs=2, penalty=0.0), runs)
    shared = {key: value for key, value in plain["algorithm"].items() if key not in ("penalty", "loss_bound")}
    same, _ = final(make_config(plain | {"algorithm": shared | {"name": "global", "local_epochs": 2}}), runs)
    assert torch.allclose(fair, same, atol=1e-6)
    other, _ = final(laid_over(plain, local_epochs=2), runs)
    assert (other - same).norm() > 1e-3 * same.norm()  # a penalty that does nothing would be seen


def test_the_rate_decays(plain: dict[str, Any], runs: Path) -> None:
    """Of two rounds the second goes at half the rate; without a penalty it is gradient descent."""
    config = laid_over(plain, rounds=2, decay="linear", penalty=0.0)
    federation, weights = config.build_federation(), start_of(config).double()
    for rate in (RATE, RATE / 2):
        train = [federation.load(k).train for k in range(federation.clients)]
        steps = [losses_and_gradients(weights, records.x, records.y)[1].mean(dim=0) for records in train]
        weights = weights - rate * torch.stack(steps).mean(dim=0)
    assert torch.allclose(final(config, runs)[0].double(), weights, atol=5e-6)


def test_the_mean_loss_stays_within_its_bound(plain: dict[str, Any], runs: Path) -> None:
    """Noise that is far larger than any loss makes it 0 or B, and not what a client would refuse."""
    noisy = {"noise_multiplier": 50.0, "clip_norm": 1e-3, "delta": 1e-3}
    found = [final(laid_over(plain | {"seed": s}, noisy, rounds=2, loss_noise=1e3), runs)[1] for s in range(8)]
    assert set(found) == {0.0, BOUND}  # each with a chance near 1/2: all alike in one of 128 draws of the noise


def test_a_penalty_that_is_too_large_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        laid_over(plain, penalty=7.8)
    assert "algorithm.penalty = 7.8 is too large" in str(refused.value)
    fix = float(str(refused.value).rpartition("algorithm.penalty = ")[2].split(",")[0])
    laid_over(plain, penalty=fix)  # what it suggests is accepted
    for wrong in ({"penalty": -0.1}, {"loss_bound": 0.0}, {"loss_noise": 0.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            laid_over(plain, **wrong)


# ---- the price -------------------------------------------------------------------------------------


def test_a_round_is_one_release_of_both() -> None:
    facts = Facts(np.array([100, 20]), np.zeros(2, int), (64,), 10, 650, 1.5)
    algorithm = FedFDP(rounds=7, batch_size=32, local_epochs=2, loss_bound=3.0, loss_noise=5.0)
    for size, rate, steps, batch in ((100, 0.32, 8, 32.0), (20, 1.0, 2, 20.0)):
        training = NoisyTraining(rate, steps, 1.5, 1.2, batch)
        assert algorithm.releases(Terms(facts, size, 1.2)) == {
            FairTraining(training, Part("loss", (), 3.0, 5.0 * 1.2)): 7
        }
    assert not algorithm.releases(Terms(facts, None, 1.2))


def test_the_statement_of_a_run_is_the_price_of_the_joint_event(small: dict[str, Any], runs: Path) -> None:
    """By dp_accounting alone: of the smallest client, N records, b = 64, z = 1.3 and z_l = 4 * 1.3, four rounds."""
    algorithm = small["algorithm"] | {"name": "fedfdp", "loss_noise": 4.0}
    data = small["data"] | {"sizes": "public"}
    config = make_config(
        small | {"algorithm": algorithm, "data": data, "privacy": {"noise_multiplier": 1.3, "delta": 1e-3}}
    )
    size = int(config.build_federation().size.min())
    result = run_plan(make_plan(config), runs=runs)
    event = dpa.PoissonSampledDpEvent(64 / size, dpa.GaussianDpEvent(1.3 / math.sqrt(1 + 1 / 16)))
    prices = []
    for accountant in (PLDAccountant(), RdpAccountant()):
        accountant.compose(event, 4 * math.ceil(size / 64))
        prices.append(accountant.get_epsilon(1e-3))
    assert result.statement.epsilon == pytest.approx(min(prices), rel=2e-3)
    named = {**algorithm, "name": "global"}
    named.pop("loss_noise")
    plain = make_plan(make_config(small | {"algorithm": named, "data": data, "privacy": config.privacy.model_dump()}))
    assert plain.price.epsilon < result.statement.epsilon  # the loss has its price
