"""Records that may have several classes at once, from the data to the report: every system on generated attributes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from scipy.stats import norm

from fairveil import contract
from fairveil.algorithms import ALGORITHMS, find_algorithm
from fairveil.config import RunConfig, make_config
from fairveil.contract import CLAUSES, check_algorithm, outcome
from fairveil.errors import UserError
from fairveil.export import export_run, load_model
from fairveil.plan import make_plan
from fairveil.reading import load_run
from fairveil.report import write_report
from fairveil.run import run_plan
from fairveil.streams import Stream
from fairveil.sweep import make_sweep, run_sweep

VOTING = ["knn-fl", "pate-fl"]


def values(name: str = "pate-fl", **algorithm: Any) -> dict[str, Any]:
    """60 clients of 100 records with 8 classes; the server holds half of their test records, and judges by the rest."""
    data: dict[str, Any] = {"dataset": "attributes", "options": {"clients": 60}}
    if find_algorithm(name).needs_public:
        data["server"] = {"dataset": "attributes", "options": {"clients": 60}, "rows": "test"}
        algorithm = {"labels": 4, "queries": 300} | algorithm
    return {
        "data": data,
        "model": {"name": "logistic"},
        "algorithm": {"name": name, **algorithm},
        "privacy": {"noise_multiplier": 6.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }


# ---- voting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VOTING)
def test_the_student_knows_every_class_better_than_by_chance(name: str, runs: Path) -> None:
    """Chance is the more frequent answer of each class. 60 votes under noise 6, seeds fixed."""
    given = values(name, **({"learning_rate": 0.5} if name == "pate-fl" else {}))
    plan = make_plan(make_config(given))
    result = run_plan(plan, runs=runs)
    test = plan.federation.load(0).test  # the server's: the same for all
    weights = torch.as_tensor(outcome(result.folder).checkpoint.state["model"])
    right = ((plan.model.predict(weights, test.x) > 0) == test.y.bool()).double().mean(dim=0)
    share = test.y.double().mean(dim=0)
    chance = torch.maximum(share, 1 - share)
    assert (right > chance - 0.02).all()  # there may be next to nothing to gain of a class that nearly all have
    assert right.mean() > chance.mean() + 0.1
    assert result.main is not None and result.main[1].mean == pytest.approx(float(right.mean()))
    votes = json.loads((result.folder / "result.json").read_text())["votes"]
    assert votes["queries"] == votes["answered"] == 300 and votes["accuracy"] > float(chance.mean()) + 0.1
    labels = torch.as_tensor(outcome(result.folder).checkpoint.state["labels"])
    assert plan.federation.server is not None
    assert votes["accuracy"] == float((labels == plan.federation.server.labels[:300]).double().mean())


def test_without_noise_a_class_is_given_that_more_than_half_of_the_clipped_votes_name(runs: Path) -> None:
    """knn with k = 3, written out with loops: rows of labels scaled to tau, means over neighbours, their sum."""
    given = values("knn-fl", queries=20, neighbours=3, labels=2)
    given["data"]["options"] = {"clients": 7, "classes": 5}
    given["data"]["server"]["options"] = {"clients": 7, "classes": 5}
    given["privacy"]["noise_multiplier"] = 0.0
    plan = make_plan(make_config(given))
    labels = torch.as_tensor(outcome(run_plan(plan, runs=runs).folder).checkpoint.state["labels"]).numpy()
    assert plan.federation.server is not None
    decided = 0
    for query, found in zip(plan.federation.server.x[:20].double().numpy(), labels, strict=True):
        votes = np.zeros(5)
        for client in range(7):
            train = plan.federation.load(client).train
            near = np.argsort(((train.x.double().numpy() - query) ** 2).sum(axis=1), kind="stable")[:3]
            for row in train.y.numpy()[near]:
                votes += row * min(1.0, 2 / max(row.sum(), 1)) / 3
        sure = np.abs(votes - 3.5) > 1e-4  # exactly half is a matter of rounding
        assert (found == (votes > 3.5))[sure].all()
        decided += int(sure.sum())
    assert decided > 90


def epsilon_of(z: float, delta: float) -> float:
    """Of one Gaussian release, exactly: Balle and Wang, "Improving the Gaussian Mechanism ..." (2018), Theorem 8."""

    def excess(epsilon: float) -> float:
        first, second = norm.logcdf(1 / (2 * z) - epsilon * z), epsilon + norm.logcdf(-1 / (2 * z) - epsilon * z)
        return math.exp(first) - math.exp(second) - delta

    return float(brentq(excess, 0.0, 500.0))


@pytest.mark.parametrize(
    ("name", "unit", "tau", "squared"),
    [
        ("pate-fl", "client", 4, 4),  # the square of how far one unit moves the votes for one query
        ("pate-fl", "record", 3, 6),  # sqrt(2 tau)
        ("pate-fl", "record", 6, 8),  # two rows of 8 numbers within [0, 1] are no further apart than sqrt 8
        ("knn-fl", "client", 4, 4),
        ("knn-fl", "record", 3, 6 / 25),  # one of 5 neighbours
    ],
)
def test_the_price_is_that_of_q_gaussian_sums(name: str, unit: str, tau: int, squared: float) -> None:
    """1/z^2 = Q s^2 / sigma^2, and the epsilon that belongs to it in closed form."""
    given = values(name, labels=tau, queries=50)
    given["privacy"] |= {"unit": unit, "noise_multiplier": 20.0, "delta": 1e-5}
    plan = make_plan(make_config(given))
    expected = epsilon_of(20.0 / math.sqrt(50 * squared), 1e-5)
    assert plan.price.epsilon == pytest.approx(expected, rel=2e-3)  # the accountant's grid rounds up
    assert plan.price.epsilon >= expected * (1 - 1e-6)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"labels": None}, "algorithm.labels is missing"),
        ({"labels": 9}, "algorithm.labels = 9 makes no sense.*There are 8 classes"),
        ({"confidence": 0.6}, "algorithm.confidence does not go with records that may have several"),
        ({"publish_cost": True}, "algorithm.publish_cost does not go with records that may have several"),
        ({"adaptation": 0.3}, "algorithm.adaptation = 0.3 does not go with records that may have several"),
    ],
)
def test_what_does_not_go_with_several_classes_is_refused(algorithm: dict[str, Any], words: str) -> None:
    given = values("pate-fl", **algorithm)
    given["algorithm"] = {key: value for key, value in given["algorithm"].items() if value is not None}
    with pytest.raises(UserError, match=f"(?s){words}"):
        make_plan(make_config(given))


@pytest.mark.parametrize("name", VOTING)
def test_a_limit_is_refused_where_each_record_has_one_class(name: str) -> None:
    given = values(name, labels=1)
    given["data"] = {
        "dataset": "digits",
        "split": {"kind": "iid", "clients": 5},
        "server": {"dataset": "digits", "rows": "test"},
    }
    given["algorithm"]["queries"] = 50
    with pytest.raises(UserError, match=r"(?s)algorithm.labels = 1 makes no sense.*of these each has one"):
        make_plan(make_config(given))


# ---- every system ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_registered_algorithm_keeps_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on digits: budget, ledger, workers 1 and 2 bit for bit, a crash and a resume."""

    def config(trial: Any, **sections: dict[str, Any]) -> RunConfig:
        given = values(trial.name, rounds=contract.ROUNDS)
        given["data"]["options"] = {"clients": 6, "records": 40, "classes": 5}
        if "server" in given["data"]:
            given["data"]["server"]["options"] = given["data"]["options"]
            given["algorithm"] |= {"queries": 60, "labels": 3, "student_steps": 30}
        given["privacy"] = {"epsilon": 8.0, "delta": 1e-3}
        given["engine"] = {"workers": 1, "block": 1}
        return make_config(given | sections)

    monkeypatch.setattr(contract._Trial, "config", config)
    results = check_algorithm(name)
    assert [result for result in results if not result.passed] == []
    assert len(results) == len(CLAUSES)


def test_without_noise_a_step_is_plain_gradient_descent(runs: Path) -> None:
    """One full batch; the gradient of the mean over classes, (sigmoid - y)^T x / (n C), in closed form."""
    given = values("global", rounds=1, batch_size=100, learning_rate=0.7)
    given["data"]["options"] = {"clients": 2, "classes": 3}
    given["privacy"] = {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}
    config = make_config(given)
    plan = make_plan(config)
    (state,) = outcome(run_plan(plan, runs=runs).folder).checkpoint.state.values()
    start = plan.model.initial(Stream(config.seed, "initial model"))
    weight, bias, updates = start[:60].view(3, 20), start[60:], []
    for client in range(2):
        train = plan.federation.load(client).train
        error = (torch.sigmoid(train.x @ weight.T + bias) - train.y) / (100 * 3)
        updates.append(torch.cat([(error.T @ train.x).flatten(), error.sum(dim=0)]))
    expected = start - 0.7 * torch.stack(updates).mean(dim=0)
    torch.testing.assert_close(torch.as_tensor(state), expected, rtol=1e-4, atol=1e-6)


def test_accuracy_counts_decisions_and_no_class_is_taken_for_another(runs: Path) -> None:
    """A federation of two classes: without `several` it would have a positive one, and parity between groups."""
    given = values("global", rounds=2)
    given["data"]["options"] = {"clients": 4, "classes": 2}
    given["fairness"] = {"reference": "central"}
    plan = make_plan(make_config(given))
    result = run_plan(plan, runs=runs)
    run = load_run(result.folder)
    (state,) = outcome(result.folder).checkpoint.state.values()
    for client, score in enumerate(run.scores("accuracy").iloc[-1]):
        test = plan.federation.load(client).test
        output = plan.model.predict(torch.as_tensor(state), test.x)
        assert score == pytest.approx(float(((output > 0) == test.y.bool()).double().mean()))
        loss = F.binary_cross_entropy_with_logits(output, test.y.float())
        assert run.scores("loss").iloc[-1, client] == pytest.approx(float(loss), rel=1e-5)
    assert run.confusion.empty and run.confusions() == {} and run.positive is None
    costs = run.costs()
    assert set(costs) == {"accuracy", "loss"}
    with pytest.raises(UserError, match=r"fairness.positive = 1 makes no sense for attributes"):
        make_plan(make_config(given | {"fairness": {"positive": 1}}))


def test_reports_exports_and_sweeps(runs: Path, tmp_path: Path) -> None:
    """Two features: of a generated dataset with one class the report would draw the records."""
    given = values("pate-fl", queries=40, student_steps=50, labels=2)
    options = {"clients": 6, "features": 2, "classes": 3}
    given["data"] |= {"options": options}
    given["data"]["server"] |= {"options": options}
    given["fairness"] = {"reference": "central"}
    folder = run_plan(make_plan(make_config(given)), runs=runs).folder
    assert write_report(folder).stat().st_size > 10_000
    exported = export_run(load_run(folder))
    model = load_model(next(path for path in exported.files if path.suffix == ".safetensors"))
    assert model(torch.zeros(4, 2)).shape == (4, 3)
    card = (exported.folder / "MODEL_CARD.md").read_text()
    assert "a record has each class whose score is above 0" in card and "the largest is its answer" not in card
    sweep = make_sweep({"name": "taus", "base": given, "grid": {"algorithm.labels": [1, 2]}, "seeds": [0, 1]})
    result = run_sweep(sweep, tmp_path / "sweep")
    assert not result.failures and (result.table["status"] == "finished").all()
    assert write_report(result.folder).stat().st_size > 10_000
