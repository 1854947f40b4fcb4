"""Clustered systems: without noise they are what their papers say, written out here; what they send, and its price."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dp_accounting as dpa
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting.rdp import RdpAccountant
from safetensors.torch import load_file
from torch import Tensor

from fairveil.algorithms import km_cdpfl
from fairveil.algorithms.base import moved
from fairveil.algorithms.dp_fedavg import DPFedAvg
from fairveil.algorithms.r_dpcfl import FACTORS, RDPCFL
from fairveil.algorithms.rc_dpfl import RCDPFL
from fairveil.clustering import overlap
from fairveil.config import RunConfig, make_config
from fairveil.contract import Outcome, differ, outcome
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.training import NoisyTraining
from fairveil.run import Interrupted, RoundReport, RunResult, resume_run, run_plan, start_run
from fairveil.session import Terms
from fairveil.store import Store, _read_checkpoint
from fairveil.streams import Stream

OFF = {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}
RATE = 0.8


@pytest.fixture
def plain(small: dict[str, Any]) -> dict[str, Any]:
    """Ten clients in three rotated clusters, full batches and exact sizes: nothing random is left, no noise."""
    split = {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 4, 4]}
    return small | {
        "data": {"dataset": "digits", "split": split, "sizes": "public"},
        "algorithm": {"rounds": 8, "batch_size": 10_000, "learning_rate": RATE, "local_epochs": 2},
        "privacy": OFF,
        "metrics": {"every": 100},
    }


def laid_over(values: dict[str, Any], name: str, sections: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return make_config(values | {"algorithm": values["algorithm"] | {"name": name} | options} | (sections or {}))


def run(config: RunConfig, runs: Path) -> tuple[RunResult, dict[str, Any]]:
    """The result, and the algorithm's last state."""
    result = run_plan(make_plan(config), runs=runs)
    return result, outcome(result.folder).checkpoint.state


def each_clients(state: dict[str, Any]) -> Tensor:
    """The model that serves each client (clients, p), however clusters are numbered."""
    return torch.as_tensor(state["models"])[np.asarray(state["cluster"])]


# ---- logistic regression, written out --------------------------------------------------------------


class Silos:
    """The clients' records, and plain gradient descent on them."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.federation = config, config.build_federation()
        data = [self.federation.load(i) for i in range(self.federation.clients)]
        self.x = [d.train.x.reshape(len(d.train), -1) for d in data]
        self.y = [d.train.y for d in data]
        self.test = [(d.test.x.reshape(len(d.test), -1), d.test.y) for d in data]
        self.size, self.group = self.federation.size, self.federation.group

    def first(self, purpose: str = "initial model") -> Tensor:
        return self.config.model_spec(self.federation).build().initial(Stream(self.config.seed, purpose))

    def scores(self, model: Tensor, x: Tensor) -> Tensor:
        return x @ model[:640].reshape(10, 64).T + model[640:]

    def loss(self, client: int, model: Tensor) -> float:
        """Mean cross-entropy."""
        return float(F.cross_entropy(self.scores(model, self.x[client]), self.y[client]))

    def correct(self, client: int, model: Tensor) -> int:
        return int((self.scores(model, self.x[client]).argmax(dim=1) == self.y[client]).sum())

    def descended(self, client: int, model: Tensor, steps: int = 2, rate: float = RATE) -> Tensor:
        """After full-batch steps; the gradient is (softmax - onehot)^T x / n."""
        x, y = self.x[client], self.y[client]
        for _ in range(steps):
            error = (torch.softmax(self.scores(model, x), dim=1) - F.one_hot(y, 10)) / len(y)
            model = model - rate * torch.cat([(error.T @ x).reshape(-1), error.sum(dim=0)])
        return model

    def oracle(self, rounds: int, weight: np.ndarray) -> Tensor:
        """Weighted federated averaging in each true cluster; the model of each client (clients, p)."""
        models = self.first().repeat(len(self.size), 1)
        for _ in range(rounds):
            trained = torch.stack([self.descended(i, model) for i, model in enumerate(models)])
            for m in np.unique(self.group):
                members = np.flatnonzero(self.group == m)
                share = torch.from_numpy(weight[members] / weight[members].sum()).float()
                models[members] = share @ trained[members]
        return models

    def ifca(self, rounds: int, clusters: int, best: Callable[[int, Tensor], float]) -> tuple[Tensor, list[int]]:
        """Ghosh et al. (2020), Algorithm 1 with model averaging: choose, train, average within clusters."""
        models = [self.first(f"model of cluster {m}") for m in range(clusters)]
        for _ in range(rounds):
            values = [[best(i, model) for model in models] for i in range(len(self.size))]
            choice = [row.index(max(row)) for row in values]
            trained = [self.descended(i, models[m]) for i, m in enumerate(choice)]
            for m in range(clusters):
                mine = [trained[i] for i in range(len(choice)) if choice[i] == m]
                if mine:
                    models[m] = torch.stack(mine).mean(dim=0)
        return torch.stack(models), choice


@pytest.fixture
def oracle(plain: dict[str, Any]) -> Callable[[int], Tensor]:
    """The model of each client after so many rounds in its true cluster."""
    silos = Silos(laid_over(plain, "oracle"))
    return lambda rounds: silos.oracle(rounds, np.ones(len(silos.size)))


# ---- 1: without noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("clusters", ["auto", 3])
def test_r_dpcfl_is_the_oracle(
    plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor], clusters: str | int
) -> None:
    """It finds the true clusters, and its first round is not lost: as many rounds give the same models."""
    result, state = run(laid_over(plain, "r-dpcfl", clusters=clusters), runs)
    assert result.clusters is not None
    assert (result.clusters["count"], result.clusters["ari"], result.clusters["switch_round"]) == (3, 1.0, 5)
    assert torch.allclose(each_clients(state), oracle(8), atol=1e-5)
    if clusters == "auto":
        config = laid_over(plain, "oracle")
        theirs = torch.as_tensor(run(config, runs)[1]["models"])[config.build_federation().group]
        assert torch.allclose(each_clients(state), theirs, atol=1e-5)
    assert not torch.allclose(each_clients(state), oracle(7), atol=1e-3)  # or nothing would be told


def test_the_first_round_of_r_dpcfl_is_that_of_the_oracle(
    plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor]
) -> None:
    """Whatever batches the others have, it trains on all records."""
    _, state = run(laid_over(plain, "r-dpcfl", rounds=1, batch_size=8), runs)
    assert torch.allclose(each_clients(state), oracle(1), atol=1e-5)


@pytest.mark.parametrize("clusters", ["auto", 3])
def test_the_faithful_form_starts_again(
    plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor], clusters: str | int
) -> None:
    """The clusters are right, but a round is lost: E rounds are E - 1 of the oracle. One choice in 12 rounds."""
    result, state = run(laid_over(plain, "r-dpcfl", rounds=12, clusters=clusters, faithful=True), runs)
    assert result.clusters is not None and result.clusters["ari"] == 1.0
    assert result.clusters["switch_round"] == 6  # E/2, since nothing overlaps
    assert torch.allclose(each_clients(state), oracle(11), atol=1e-5)


def test_the_papers_projection_runs_to_the_end(
    plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor]
) -> None:
    """Through a choice as well, in a run that is not interrupted."""
    _, state = run(laid_over(plain, "r-dpcfl", clusters=3, projection="paper"), runs)
    assert torch.allclose(each_clients(state), oracle(8), atol=1e-5)


@pytest.mark.parametrize("faithful", [False, True])
def test_km_cdpfl_is_the_oracle(
    plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor], faithful: bool
) -> None:
    """Clusters so far apart are found in every round."""
    result, state = run(laid_over(plain, "km-cdpfl", clusters=3, rounds=4, faithful=faithful), runs)
    assert result.clusters is not None and result.clusters["ari"] == 1.0
    assert torch.allclose(each_clients(state), oracle(4), atol=1e-5)


@pytest.mark.parametrize("faithful", [False, True])
def test_a_client_that_changes_its_cluster_in_km_cdpfl(
    plain: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch, faithful: bool
) -> None:
    """It takes its local model along: theta_m is the mean of its members' models. Faithful: only the update."""
    labels = iter([[0, 0, 0, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])  # as if k-means had found these; client 2 leaves
    monkeypatch.setattr(km_cdpfl, "kmeans", lambda *_: np.array(next(labels)))
    plain["data"]["split"] = {"kind": "iid", "clients": 5}
    config = laid_over(plain, "km-cdpfl", clusters=2, rounds=3, faithful=faithful)
    folder = run_plan(make_plan(config), runs=runs).folder
    before, after = (
        _read_checkpoint(folder / "checkpoints" / f"round-{number:06d}.safetensors").state for number in (2, 3)
    )
    start, cluster = each_clients(before), np.asarray(after["cluster"])
    assert np.asarray(before["cluster"]).tolist() == [0, 0, 0, 1, 1]  # renumbered as they were
    assert cluster.tolist() == [0, 0, 1, 1, 1]
    silos = Silos(config)
    local = torch.stack([silos.descended(i, model) for i, model in enumerate(start)])
    for m, found in enumerate(torch.as_tensor(after["models"])):
        members = np.flatnonzero(cluster == m)
        old = torch.as_tensor(before["models"])[m]
        expected = old + (local - start)[members].mean(dim=0) if faithful else local[members].mean(dim=0)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("weights", ["size", "equal"])
def test_rc_dpfl_is_an_oracle_weighted_by_size(plain: dict[str, Any], runs: Path, weights: str) -> None:
    """Through all three stages: the mixture up to round 3, a choice in round 4, and two more rounds."""
    plain["data"]["split"]["spread"] = 0.6
    config = laid_over(plain, "rc-dpfl", clusters=3, rounds=6, switch_round=3, weights=weights)
    silos = Silos(config)
    assert all(np.ptp(silos.size[silos.group == m]) > 20 for m in range(3))  # or weights would hardly matter
    result, state = run(config, runs)
    assert result.clusters is not None
    assert (result.clusters["ari"], result.clusters["switch_round"]) == (1.0, 3)
    found, by_size = each_clients(state), silos.oracle(6, silos.size)
    expected = by_size if weights == "size" else silos.oracle(6, np.ones(len(silos.size)))
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(found, by_size, atol=1e-5) == (weights == "size")  # the two can be told apart


@pytest.mark.parametrize(("faithful", "seed"), [(False, 0), (True, 0), (True, 1)])
def test_ifca_written_out(plain: dict[str, Any], runs: Path, faithful: bool, seed: int) -> None:
    """The exact choice: the most correct records by default, the lowest loss in the faithful form."""
    config = laid_over(plain | {"seed": seed}, "ifca", clusters=3, rounds=4, faithful=faithful)
    silos = Silos(config)
    models, choice = silos.ifca(4, 3, (lambda i, model: -silos.loss(i, model)) if faithful else silos.correct)
    assert len(set(choice)) > 1
    _, state = run(config, runs)
    assert np.asarray(state["cluster"]).tolist() == choice
    assert torch.allclose(torch.as_tensor(state["models"]), models, atol=1e-5)


def test_ifca_chooses_in_the_first_rounds_only(plain: dict[str, Any], runs: Path) -> None:
    config = laid_over(plain, "ifca", clusters=3, rounds=5, select_rounds=2)
    silos = Silos(config)
    models, choice = silos.ifca(2, 3, silos.correct)
    for _ in range(3):
        trained = [silos.descended(i, models[m]) for i, m in enumerate(choice)]
        mine = {m: [t for t, c in zip(trained, choice, strict=True) if c == m] for m in set(choice)}
        models = torch.stack([torch.stack(mine[m]).mean(dim=0) if m in mine else models[m] for m in range(3)])
    result, state = run(config, runs)
    assert np.asarray(state["cluster"]).tolist() == choice
    assert torch.allclose(torch.as_tensor(state["models"]), models, atol=1e-5)
    kinds = {kind.kind: kind.planned_per_unit for kind in result.statement.releases}
    assert kinds["exact choice of a model"] == (2, 2)


def test_the_exact_lowest_loss_is_not_a_bounded_one(runs: Path) -> None:
    """Faithful in a regression, where losses are large: the lowest *exact* mean loss is chosen, whatever its size.

    y = 5 x_1 + 6 x_2 or 4 x_1 - 4.5 x_2: at random models a record's loss is about 25. One round, no noise.
    """
    for seed in range(3):
        config = make_config(
            {
                "seed": seed,
                "data": {"dataset": "linear-clusters", "options": {"clients": [4, 4], "records": 40}},
                "model": {"name": "linear"},
                "algorithm": {"name": "ifca", "clusters": 3, "rounds": 1, "faithful": True, "score": "loss",
                              "batch_size": 1000, "learning_rate": 0.05},
                "privacy": OFF,
                "engine": {"workers": 1},
            }
        )  # fmt: skip
        federation = config.build_federation()
        spec = config.model_spec(federation)
        starts = [spec.build().initial(Stream(seed, f"model of cluster {m}")) for m in range(3)]
        expected = []
        for i in range(8):
            records = federation.load(i).train
            losses = [float((records.x @ w[:2] + w[2] - records.y).square().mean()) for w in starts]
            expected.append(int(np.argmin(losses)))
        _, state = run(config, runs)
        assert np.asarray(state["cluster"]).tolist() == expected, f"seed {seed}"


# ---- 2: what is sent -------------------------------------------------------------------------------


def noisy(plain: dict[str, Any], **privacy: Any) -> dict[str, Any]:
    return plain | {"privacy": {"delta": 1e-3} | (privacy or {"epsilon": 8.0})}


@pytest.mark.parametrize("adjacency", ["add-remove", "replace"])
def test_releases_are_those_of_algorithm_1(plain: dict[str, Any], adjacency: str) -> None:
    """K full-batch steps at f z, E - 1 rounds of K ceil(N/b) steps at q = b/N and z, T choices."""
    values = noisy(plain, noise_multiplier=1.3, adjacency=adjacency, clip_norm=0.7)
    plan = make_plan(
        laid_over(values, "r-dpcfl", rounds=7, local_epochs=2, batch_size=30, first_round_factor=1.5, select_rounds=2,
                  select_epsilon=0.25)
    )  # fmt: skip
    assert plan.releases.keys() == set(range(10))
    for client, size in enumerate(plan.facts.size.tolist()):
        choice = PrivateChoice(0.25, adjacency, "correct")  # type: ignore[arg-type]
        expected = {
            NoisyTraining(1.0, 2, 0.7, 1.5 * 1.3, float(size)): 1,
            NoisyTraining(30 / size, 2 * math.ceil(size / 30), 0.7, 1.3, 30.0): 6,
            choice: 2,
        }
        assert plan.releases[client] == Counter(expected)
        assert choice.gumbel_scale == {"add-remove": 4.0, "replace": 8.0}[adjacency]


@pytest.mark.parametrize(("rounds", "choices"), [(1, 0), (9, 0), (10, 1), (19, 1), (35, 3)])
def test_the_faithful_form_plans_a_tenth_of_the_rounds_as_choices(
    plain: dict[str, Any], rounds: int, choices: int
) -> None:
    plan = make_plan(laid_over(noisy(plain, noise_multiplier=1.0), "r-dpcfl", rounds=rounds, faithful=True))
    for releases in plan.releases.values():
        kinds = Counter({mechanism.kind: count for mechanism, count in releases.items()})
        assert kinds["choice of a model"] == choices
        assert sum(count for m, count in releases.items() if isinstance(m, NoisyTraining)) == rounds


def test_the_price_lies_between_two_others(plain: dict[str, Any]) -> None:
    """At most the budget and at most the Renyi price of all; at least the exact price of the training alone."""
    plan = make_plan(laid_over(noisy(plain), "r-dpcfl", rounds=5, batch_size=30, first_round_factor=2.0,
                               select_epsilon=0.5, select_rounds=2))  # fmt: skip
    assert 7.9 < plan.price.epsilon <= 8.0
    for unit in plan.units[:3]:
        size, z = unit.size, unit.noise_multiplier
        assert size is not None
        training = [
            dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(2.0 * z), 2),
            dpa.SelfComposedDpEvent(
                dpa.PoissonSampledDpEvent(30 / size, dpa.GaussianDpEvent(z)), 4 * 2 * math.ceil(size / 30)
            ),
        ]
        choices = dpa.SelfComposedDpEvent(dpa.ZCDpEvent(0.5**2 / 8), 2)
        most = RdpAccountant().compose(dpa.ComposedDpEvent([*training, choices])).get_epsilon(1e-3)
        accountant = dpa.pld.PLDAccountant(value_discretization_interval=1e-3)
        least = accountant.compose(dpa.ComposedDpEvent(training)).get_epsilon(1e-3)
        assert least - 0.05 <= unit.epsilon <= min(most, 8.0)  # its own grid makes the exact one a little pessimistic


def posted_and_planned(folder: Path) -> tuple[dict[int, Counter[str]], dict[int, Counter[str]]]:
    with Store(folder) as store:
        return store.ledger.posted(), store.ledger.planned()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("r-dpcfl", {"select_rounds": 3}),
        ("r-dpcfl", {"rounds": 11, "faithful": True}),
        ("rc-dpfl", {"switch_round": 2}),
        ("ifca", {"select_rounds": 2}),
        ("km-cdpfl", {}),
    ],
)
def test_all_that_was_planned_is_posted(plain: dict[str, Any], runs: Path, name: str, options: dict[str, Any]) -> None:
    """As long as there is more than one cluster."""
    config = laid_over(noisy(plain), name, **{"rounds": 5, "batch_size": 64, "clusters": 3} | options)
    result, _ = run(config, runs)
    posted, planned = posted_and_planned(result.folder)
    assert posted == planned
    assert result.statement.epsilon_spent == result.statement.epsilon <= 8


def test_one_cluster_is_asked_for_no_choice(plain: dict[str, Any], runs: Path) -> None:
    """Clients that are all alike: M = 1 is found, and what the choices would have cost is not spent."""
    alike = plain["data"] | {"split": {"kind": "iid", "clients": 5}}
    config = laid_over(noisy(plain) | {"data": alike}, "r-dpcfl", rounds=8, batch_size=64, select_epsilon=2.0)
    result, _ = run(config, runs)
    assert result.clusters is not None
    assert (result.clusters["count"], result.clusters["mss"], result.clusters["mpo"]) == (1, 0.0, 1.0)
    posted, planned = posted_and_planned(result.folder)
    for client, sent in posted.items():
        missing = planned[client] - sent
        assert sum(missing.values()) == 1 and "PrivateChoice" in next(iter(missing))
    spent = result.statement.epsilon_spent
    assert spent is not None and spent < result.statement.epsilon - 0.05


# ---- 3: the noise of the first round ---------------------------------------------------------------


def test_the_factor_is_settled_by_the_planner(plain: dict[str, Any]) -> None:
    """A number of the table, shown in the plan; more expected separation never gives less noise, unless hopeless."""
    factors = []
    for separation in (0.07, 0.1, 0.15, 0.3, 10.0):
        config = laid_over(noisy(plain), "r-dpcfl", rounds=4, batch_size=64, expected_separation=separation)
        settled = json.loads(json.dumps(make_plan(config).to_json()))["settled"]
        assert settled.keys() == {"first_round_factor"}
        factors.append(settled["first_round_factor"])
    assert factors == sorted(factors) and set(factors) <= set(FACTORS)
    assert factors[0] == min(FACTORS) and factors[-1] == max(FACTORS) and len(set(factors)) > 2


def test_the_factor_is_decided_without_a_look_at_the_records(plain: dict[str, Any]) -> None:
    """It rests on sizes and budgets: other rotations of the same sizes settle alike."""
    turned = plain["data"] | {"split": plain["data"]["split"] | {"degrees": [0, 45, 180]}}
    options: dict[str, Any] = {"rounds": 4, "batch_size": 64, "expected_separation": 0.1}
    one, other = (
        make_plan(laid_over(noisy(plain) | {"data": data}, "r-dpcfl", **options)) for data in (plain["data"], turned)
    )
    assert one.federation.fingerprint != other.federation.fingerprint
    assert one.facts.size.tolist() == other.facts.size.tolist()
    assert one.settled == other.settled


def test_every_client_has_the_factor_that_suits_its_size(plain: dict[str, Any]) -> None:
    """It is told apart at its factor, and would not be at the next: the noise is calibrated anew for each."""
    spread = plain | {"data": plain["data"] | {"split": plain["data"]["split"] | {"spread": 0.8}}}
    options: dict[str, Any] = {"rounds": 4, "batch_size": 30, "expected_separation": 0.3}
    plan = make_plan(laid_over(noisy(spread), "r-dpcfl", **options))
    assert isinstance(plan.algorithm, RDPCFL) and plan.note is None
    factors = {client: plan.algorithm.factor(size) for client, size in enumerate(plan.facts.size.tolist())}
    assert len(set(factors.values())) > 2
    for factor in sorted(set(factors.values())):
        louder = make_plan(laid_over(noisy(spread), "r-dpcfl", **options, first_round_factor=factor * 1.43))
        for client in (client for client in factors if factors[client] == factor):
            assert plan.algorithm.clarity(plan.terms[client]) >= 1 or factor == FACTORS[0]
            assert louder.algorithm.clarity(louder.terms[client]) < 1 or factor == FACTORS[-1]
    for client, terms in plan.terms.items():
        first = plan.algorithm.first_training(terms)
        assert first in plan.releases[client]
        assert first.noise_multiplier == pytest.approx(factors[client] * terms.noise_multiplier)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7, 4])
def test_a_given_factor_is_kept(plain: dict[str, Any], factor: float) -> None:
    plan = make_plan(laid_over(noisy(plain, noise_multiplier=0.9), "r-dpcfl", batch_size=30, first_round_factor=factor))
    assert "first_round_factor" not in plan.settled
    assert isinstance(plan.algorithm, RDPCFL) and plan.algorithm.first_round_factor == factor
    for releases in plan.releases.values():
        first, usual = sorted((m for m in releases if isinstance(m, NoisyTraining)), key=lambda m: -m.sample_rate)
        assert first.noise_multiplier == pytest.approx(factor * usual.noise_multiplier, rel=1e-12)
        assert (releases[first], releases[usual]) == (1, 7)


def test_the_faithful_factor_is_one(plain: dict[str, Any]) -> None:
    for name in ("r-dpcfl", "rc-dpfl"):
        plan = make_plan(laid_over(noisy(plain, noise_multiplier=1.0), name, faithful=True))
        assert plan.settled == {"first_round_factor": 1.0}


def test_more_noise_in_round_1_leaves_less_for_the_others(plain: dict[str, Any]) -> None:
    """At the same epsilon."""
    noise = []
    for factor in (0.7, 1.0, 2.0, 4.0):
        plan = make_plan(laid_over(noisy(plain), "r-dpcfl", rounds=4, batch_size=64, first_round_factor=factor))
        assert 7.9 < plan.price.epsilon <= 8
        noise.append([unit.noise_multiplier for unit in plan.units])
    assert (np.diff(noise, axis=0) < 0).all()


def interrupted(config: RunConfig, runs: Path, after: int) -> Path:
    """The folder of a run that was stopped after a round."""

    def stop(report: RoundReport) -> None:
        if report.round == after:
            raise KeyboardInterrupt

    before = set(runs.glob("*"))
    with pytest.raises(Interrupted):
        start_run(config, runs=runs, progress=stop)
    (folder,) = set(runs.glob("*")) - before
    return folder


def served_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "models" / "served.safetensors")


@pytest.mark.parametrize(("after", "options"), [(1, {}), (4, {}), (3, {"projection": "paper", "clusters": 3})])
def test_a_resumed_run_settles_to_the_same(
    plain: dict[str, Any], runs: Path, after: int, options: dict[str, Any]
) -> None:
    """Long before, before, and just before the choice: the plan stands, and all comes out the same to the last bit."""
    config = laid_over(noisy(plain), "r-dpcfl", **{"rounds": 5, "batch_size": 64} | options)
    whole = run_plan(make_plan(config), runs=runs)
    assert whole.clusters is not None and whole.clusters["switch_round"] == 4
    folder = interrupted(config, runs, after)
    resumed = resume_run(folder)
    assert differ(outcome(folder), outcome(whole.folder)) is None
    assert resumed.clusters == whole.clusters
    assert posted_and_planned(folder) == posted_and_planned(whole.folder)


# ---- 4: what no epsilon covers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "leaks"), [("ifca", {"clusters": 3}, 4), ("rc-dpfl", {"clusters": 3, "switch_round": 2}, 2)]
)
def test_an_exact_choice_has_no_guarantee(
    plain: dict[str, Any], runs: Path, name: str, options: dict[str, Any], leaks: int
) -> None:
    """Epsilon is infinite; the noise is still that of the budget; the statement says both, and the run ends."""
    config = laid_over(noisy(plain), name, faithful=True, rounds=4, batch_size=64, **options)
    plan = make_plan(config)
    assert plan.price.epsilon == math.inf
    assert all(unit.epsilon == math.inf and unit.noise_multiplier > 0.1 for unit in plan.units)
    statement = plan.statement()
    assert 7.9 < statement.epsilon_without_leaks <= 8
    assert statement.leaks == ("exact choice of a model",)
    promise = dict(statement.lines())["Guarantee"]
    assert promise.startswith("NONE (epsilon is infinite)")
    assert "but for the exact choice of a model it would be (" in promise
    told = float(promise.rpartition("(")[2].split(",")[0])
    assert statement.epsilon_without_leaks <= told <= 8 and promise.endswith(", 0.001)")
    for releases in plan.releases.values():
        exact = {m: n for m, n in releases.items() if isinstance(m, PrivateChoice)}
        assert list(exact.values()) == [leaks] and all(m.epsilon == math.inf for m in exact)

    result, _ = run(config, runs)
    for text in ((result.folder / "statement.json").read_text(), json.dumps(plan.to_json()["statement"])):
        saved = json.loads(text)
        assert saved["epsilon"] == "infinity" and saved["leaks"] == ["exact choice of a model"]
        assert saved["epsilon_without_leaks"] == pytest.approx(statement.epsilon_without_leaks)
    finished = json.loads((result.folder / "result.json").read_text())
    assert finished["epsilon"] == finished["epsilon_spent"] == "infinity"
    assert finished["rounds"] == 4 and "NONE" in finished["guarantee"]
    posted, planned = posted_and_planned(result.folder)
    assert posted == planned


def test_the_noise_beside_a_leak_is_that_of_the_rest(plain: dict[str, Any]) -> None:
    """Faithful ifca trains as `local` does, and is noised like it."""
    options: dict[str, Any] = {"rounds": 4, "batch_size": 64}
    leaky = make_plan(laid_over(noisy(plain), "ifca", clusters=3, faithful=True, **options))
    local = make_plan(laid_over(noisy(plain), "local", **options))
    assert [u.noise_multiplier for u in leaky.units] == [u.noise_multiplier for u in local.units]
    assert leaky.statement().epsilon_without_leaks == local.price.epsilon


# ---- 5: what is told of the clusters ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl", "ifca", "km-cdpfl", "global", "local", "oracle", "mr-mtl"])
def test_clusters_in_the_result(plain: dict[str, Any], runs: Path, name: str) -> None:
    clustered = name in ("r-dpcfl", "rc-dpfl", "ifca", "km-cdpfl")
    result, state = run(laid_over(plain, name, rounds=2, **({"clusters": 3} if clustered else {})), runs)
    told = json.loads((result.folder / "result.json").read_text())
    assert ("clusters" in told) == clustered
    if not clustered:
        return
    found = told["clusters"]
    assert found["count"] == 3 and -0.5 <= found["ari"] <= 1
    assert found["of_client"] == np.asarray(state["cluster"]).tolist()
    if name in ("r-dpcfl", "rc-dpfl"):
        assert found["mss"] > 2 and found["mpo"] == pytest.approx(overlap(found["mss"]))
        assert found["switch_round"] == 1 and found["iterations"] >= 1
    else:
        assert found["mss"] is found["mpo"] is found["switch_round"] is None


# ---- 6: what cannot be run -------------------------------------------------------------------------


def refused(config: Callable[[], RunConfig], runs: Path, *words: str) -> None:
    """Refused when it is planned, in words that say what and what to type; no folder is made."""
    with pytest.raises(UserError) as error:
        start_run(config(), runs=runs)
    for word in (*words, "Try:"):
        assert word in str(error.value)
    assert not runs.exists()


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl", "ifca", "km-cdpfl"])
def test_more_clusters_than_clients(plain: dict[str, Any], runs: Path, name: str) -> None:
    refused(lambda: laid_over(plain, name, clusters=11), runs, "algorithm.clusters = 11", "clients: 10")


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl", "ifca", "km-cdpfl"])
@pytest.mark.parametrize("clusters", [0, -1])
def test_no_clusters_at_all(plain: dict[str, Any], runs: Path, name: str, clusters: int) -> None:
    refused(lambda: laid_over(plain, name, clusters=clusters), runs, "algorithm.clusters")


@pytest.mark.parametrize("name", ["r-dpcfl", "km-cdpfl"])
def test_as_many_clusters_as_clients(plain: dict[str, Any], runs: Path, name: str) -> None:
    """Allowed: everybody may end up alone."""
    result, _ = run(laid_over(noisy(plain, noise_multiplier=1.0), name, clusters=10, rounds=3), runs)
    assert result.clusters is not None and result.clusters["count"] == 10


ALONE = {"dataset": "digits", "split": {"kind": "iid", "clients": 1}}


@pytest.mark.parametrize("options", [{}, {"faithful": True}])
def test_one_client_alone_is_one_cluster(plain: dict[str, Any], runs: Path, options: dict[str, Any]) -> None:
    values = noisy(plain, noise_multiplier=1.0, delta=1e-4) | {"data": ALONE}
    result, _ = run(laid_over(values, "r-dpcfl", rounds=3, batch_size=200, **options), runs)
    assert result.clusters is not None
    assert (result.clusters["count"], result.clusters["of_client"]) == (1, [0])


def test_one_client_is_not_two_clusters(plain: dict[str, Any], runs: Path) -> None:
    values = noisy(plain, noise_multiplier=1.0, delta=1e-4) | {"data": ALONE}
    refused(lambda: laid_over(values, "ifca", clusters=2), runs, "algorithm.clusters = 2", "clients: 1")


REGRESSION = {
    "data": {"dataset": "linear-clusters", "options": {"clients": [3, 3], "records": 100}},
    "model": {"name": "linear"},
}


@pytest.mark.parametrize("name", ["r-dpcfl", "rc-dpfl", "ifca"])
def test_nothing_is_correct_in_a_regression(plain: dict[str, Any], runs: Path, name: str) -> None:
    """And by the loss it runs."""
    values, options = noisy(plain) | REGRESSION, {"clusters": 2, "rounds": 3, "batch_size": 50}
    refused(
        lambda: laid_over(values, name, **options, score="correct"), runs, "algorithm.score", "regression", '"loss"'
    )
    result, _ = run(laid_over(values, name, **options, score="loss"), runs)
    assert "rmse" in result.metrics


def test_copies_need_images(plain: dict[str, Any], runs: Path) -> None:
    values = noisy(plain) | REGRESSION
    refused(lambda: laid_over(values, "r-dpcfl", score="loss", copies=2), runs, "algorithm.copies = 2", "images")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("r-dpcfl", {}),
        ("r-dpcfl", {"first_round_factor": 1.0}),
        ("rc-dpfl", {"clusters": 3}),
        ("ifca", {"clusters": 3}),
    ],
)
def test_a_choice_that_costs_more_than_there_is(
    plain: dict[str, Any], runs: Path, name: str, options: dict[str, Any]
) -> None:
    """Said before anything runs, and the selections are named."""
    values = noisy(plain, epsilon=2.0)
    refused(
        lambda: laid_over(values, name, select_epsilon=30.0, rounds=3, **options), runs,
        "privacy.epsilon = 2", "used up", "selections",
    )  # fmt: skip


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_factor_that_is_none(plain: dict[str, Any], runs: Path, factor: float) -> None:
    """No noise in round 1, or less than none: the setting is named, not the accountant's trouble with it."""
    refused(lambda: laid_over(noisy(plain), "r-dpcfl", first_round_factor=factor), runs, "algorithm.first_round_factor")


def test_fewer_choices_than_none(plain: dict[str, Any], runs: Path) -> None:
    for name in ("r-dpcfl", "rc-dpfl", "ifca"):
        refused(lambda name=name: laid_over(plain, name, clusters=3, select_rounds=-1), runs, "algorithm.select_rounds")


@pytest.mark.parametrize("name", ["r-dpcfl", "global", "mr-mtl", "dp-fedavg"])
def test_more_rounds_averaged_than_there_are(plain: dict[str, Any], runs: Path, name: str) -> None:
    refused(lambda: laid_over(plain, name, average_last=9), runs, "algorithm.average_last = 9", "rounds: 8")


@pytest.mark.parametrize("select_rounds", [1, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_very_short_runs(small: dict[str, Any], runs: Path, rounds: int, select_rounds: int) -> None:
    """They end, with all that was planned posted: at most E - 1 choices."""
    values = noisy(small, noise_multiplier=0.8)
    config = laid_over(values, "r-dpcfl", rounds=rounds, select_rounds=select_rounds)
    result, _ = run(config, runs)
    assert result.clusters is not None and 1 <= result.clusters["switch_round"] <= rounds
    sent = {kind.kind: kind.posted_per_unit for kind in result.statement.releases}
    assert sent["model update"] == (rounds, rounds)
    most = min(select_rounds, rounds - 1)
    assert result.clusters["count"] > 1  # 90 degrees are seen at this noise
    assert sent.get("choice of a model", (0, 0)) == (most, most)


def test_the_switch_leaves_room_for_the_choices() -> None:
    """E_c + T <= E wherever that can be, and never below 1; the sure mixture decides up to E/2, the unsure to 5."""
    for rounds in range(1, 31):
        for choices in range(6):
            for mpo in (0.0, 1e-9, 0.3, 0.5, 0.99, 1.0):
                both = [
                    RDPCFL(rounds=rounds, select_rounds=choices),
                    RCDPFL(rounds=rounds, select_rounds=choices, switch_round=10),
                ]
                for algorithm in both:
                    switch = algorithm._switch_round(mpo)
                    assert 1 <= switch <= rounds
                    assert switch + min(choices, rounds - 1) <= rounds
        faithful = RCDPFL(rounds=rounds, switch_round=10, faithful=True)
        assert faithful.choices == max(0, rounds - 10) and faithful._switch_round(0.5) == min(10, rounds)
    assert RDPCFL(rounds=30)._switch_round(0.0) == 15
    assert RDPCFL(rounds=30)._switch_round(0.5) == 7
    assert RDPCFL(rounds=30)._switch_round(1.0) == 5
    assert RDPCFL(rounds=30, faithful=True)._switch_round(0.5) == 7
    assert RDPCFL(rounds=30, faithful=True)._switch_round(0.99) == 1


def test_a_cluster_that_empties_stays_as_it_is() -> None:
    models = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    updates = torch.tensor([[1.0, 0.0], [0.0, 2.0], [4.0, 4.0]])
    cluster = np.array([2, 0, 2])
    equal = moved(models, cluster, updates)
    assert equal.tolist() == [[1.0, 4.0], [3.0, 4.0], [7.5, 8.0]]
    weighted = moved(models, cluster, updates, np.array([3.0, 7.0, 1.0]))
    assert torch.allclose(weighted, torch.tensor([[1.0, 4.0], [3.0, 4.0], [6.75, 7.0]]))
    assert torch.equal(weighted[1], models[1])
    sizes = moved(models, cluster, updates, np.array([300, 700, 100]))  # as declared: whole numbers
    assert torch.allclose(sizes, weighted)
    assert models.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]  # it is left as it was


# ---- 8: averages and decay -------------------------------------------------------------------------


def test_the_served_models_are_means_over_the_last_rounds(plain: dict[str, Any], runs: Path) -> None:
    """Of rounds 2, 3 and 4, from runs of so many rounds; the metrics are theirs; the training itself is not changed."""
    finals = [
        torch.as_tensor(run(laid_over(plain, "oracle", rounds=rounds), runs)[1]["models"]) for rounds in (2, 3, 4)
    ]
    config = laid_over(plain, "oracle", rounds=4, average_last=3)
    result, state = run(config, runs)
    assert torch.equal(torch.as_tensor(state["models"]), finals[-1])
    model, silos = config.model_spec(config.build_federation()).build(), Silos(config)
    expected = torch.stack(finals).mean(dim=0)
    served = served_of(result.folder)
    assert len(served) == 3 * len(model.names)
    for m in range(3):
        for name, value in model.unflatten(expected[m]).items():
            assert torch.allclose(served[f"{m}/{name}"], value, atol=1e-6)
    accuracy = [
        float((silos.scores(expected[silos.group[i]], x).argmax(dim=1) == y).double().mean())
        for i, (x, y) in enumerate(silos.test)
    ]
    assert result.metrics["accuracy"].mean == pytest.approx(np.mean(accuracy), abs=1e-9)


@pytest.mark.parametrize("name", ["r-dpcfl", "mr-mtl"])
def test_an_average_survives_an_interruption(plain: dict[str, Any], runs: Path, name: str) -> None:
    """Stopped just before the average begins, and in its middle."""
    config = laid_over(noisy(plain, noise_multiplier=0.8), name, rounds=4, average_last=3, batch_size=64)
    whole: Outcome | None = None
    folders = [run_plan(make_plan(config), runs=runs).folder]
    for after in (1, 3):
        folders.append(interrupted(config, runs, after))
        resume_run(folders[-1])
    for folder in folders:
        now = outcome(folder)
        whole = whole or now
        assert now.checkpoint.average is not None
        assert differ(now, whole) is None
        assert all(torch.equal(v, served_of(folders[0])[k]) for k, v in served_of(folder).items())
    last = torch.as_tensor(outcome(folders[0]).checkpoint.state["models"])
    average = outcome(folders[0]).checkpoint.average
    assert average is not None and not torch.allclose(average, last, atol=1e-4)


def test_steps_decay_linearly(plain: dict[str, Any], runs: Path) -> None:
    """Round e of E steps at eta (1 - (e-1)/E): the first in full, the last at eta/E."""
    config = laid_over(plain, "local", rounds=4, decay="linear")
    silos = Silos(config)
    models = torch.as_tensor(run(config, runs)[1]["models"])
    for client, found in enumerate(models):
        expected = silos.first()
        for rate in (1.0, 0.75, 0.5, 0.25):
            expected = silos.descended(client, expected, rate=RATE * rate)
        assert torch.allclose(found, expected, atol=5e-6)


def test_decay_in_all_stages_of_r_dpcfl(plain: dict[str, Any], runs: Path, oracle: Callable[[int], Tensor]) -> None:
    """As in the oracle: the first round is in full."""
    mine = each_clients(run(laid_over(plain, "r-dpcfl", decay="linear"), runs)[1])
    config = laid_over(plain, "oracle", decay="linear")
    theirs = torch.as_tensor(run(config, runs)[1]["models"])[config.build_federation().group]
    assert torch.allclose(mine, theirs, atol=1e-5)
    assert not torch.allclose(mine, oracle(8), atol=1e-3)


# ---- 9: what a second reading found ----------------------------------------------------------------


class HalfBare(DPFedAvg):
    """A count without noise beside a noised update."""

    def cohort_sum(self, terms: Terms) -> CohortSums:
        (update,) = super().cohort_sum(terms).parts
        return CohortSums((update, Part("count", (1,), 1.0, 0.0)), self.sample_rate)


def test_a_release_without_noise_that_does_not_say_so_is_no_leak(small: dict[str, Any], runs: Path) -> None:
    """No budget can be solved for it, so it is refused; it must not pass for something that needs no noise at all."""
    config = make_config(small | {"algorithm": {"name": "dp-fedavg"}, "privacy": {"epsilon": 5.0, "delta": 1e-3}})
    with (
        patch.object(RunConfig, "build_algorithm", lambda self: HalfBare()),
        pytest.raises(UserError, match="less than what is released costs: inf"),
    ):
        make_plan(config)


def test_without_any_noise_nothing_is_called_a_leak_only(plain: dict[str, Any]) -> None:
    """The training has none either: there is no "but for"."""
    promise = dict(make_plan(laid_over(plain, "ifca", clusters=3)).statement().lines())["Guarantee"]
    assert promise.startswith("NONE") and "but for" not in promise


@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_a_resumed_run_solves_nothing_anew(plain: dict[str, Any], runs: Path, spread: float) -> None:
    """What the planner has settled is in the folder: another accountant could come to another number."""
    data = plain["data"] | {"split": plain["data"]["split"] | {"spread": spread}}
    options: dict[str, Any] = {"rounds": 5, "batch_size": 30, "expected_separation": 0.3}
    config = laid_over(noisy(plain | {"data": data}), "r-dpcfl", **options)
    assert isinstance(make_plan(config).settled["first_round_factor"], tuple) == bool(spread)  # one for each size
    whole = run_plan(make_plan(config), runs=runs)
    folder = interrupted(config, runs, 2)
    with patch("fairveil.plan.calibrate_many", side_effect=AssertionError("calibrated again")):
        resume_run(folder)
    assert differ(outcome(folder), outcome(whole.folder)) is None
    assert posted_and_planned(folder) == posted_and_planned(whole.folder)


def test_clients_stay_where_they_most_likely_belong_if_nobody_chooses(plain: dict[str, Any], runs: Path) -> None:
    """Not where a draw for one round has put them."""
    config = laid_over(noisy(plain), "r-dpcfl", clusters=3, rounds=8, batch_size=64, select_rounds=0)
    result, state = run(config, runs)
    most_likely = np.asarray(state["responsibility"]).argmax(axis=1)
    assert np.asarray(state["cluster"]).tolist() == most_likely.tolist()
    assert result.clusters is not None and result.clusters["of_client"] == most_likely.tolist()


def test_nothing_is_wasted_on_clusters_that_cannot_be_seen(plain: dict[str, Any]) -> None:
    """A little too much noise: the least is tried. Far too much: the first round is the cheapest. The plan warns."""
    for separation, factor in ((0.1, min(FACTORS)), (1e-3, max(FACTORS))):
        config = laid_over(noisy(plain), "r-dpcfl", rounds=10, batch_size=64, expected_separation=separation)
        plan = make_plan(config)
        assert plan.settled == {"first_round_factor": factor}
        assert plan.note is not None and "Clusters may not be found" in plan.note and "0.0 times" not in plan.note
