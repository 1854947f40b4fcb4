"""Standardisation by released statistics: planned, priced, posted, the same after a resume, and right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from fairveil.algorithms.local import Local
from fairveil.config import make_config
from fairveil.data.federation import Federation, Standardise
from fairveil.errors import PrivacyError, UserError
from fairveil.plan import make_plan
from fairveil.privacy.accounting import price
from fairveil.privacy.mechanisms import CohortSums, Mechanism
from fairveil.privacy.moments import NoisyMoments
from fairveil.run import Interrupted, begin, drive, resume_run, start_run
from fairveil.session import Terms
from fairveil.store import Store


class Silent(Local):
    """It trains nothing."""

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter()


BOUNDS = {"kind": "standard", "low": 0.0, "high": 200.0}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Six clients with 50 records each; pressure is far from mean 0 and deviation 1."""
    random = np.random.default_rng(0)
    pressure = random.normal(120, 15, 300)
    table = pd.DataFrame(
        {
            "pressure": pressure,
            "smoker": random.integers(0, 2, 300),
            "client": np.arange(300) % 6,
            "y": (pressure + random.normal(0, 5, 300) > 120).astype(int),
        }
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    options = {"path": str(tmp_path / "t.csv"), "prepare": {"pressure": BOUNDS}, "statistics_noise": 3.0}
    return {
        "data": {"dataset": "file", "options": options},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 3, "batch_size": 16},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }


CLIENT_LEVEL = {"name": "dp-fedavg", "rounds": 3, "sample_rate": 0.5}


def exact(federation: Federation) -> tuple[float, float]:
    x = torch.cat([federation.load(client).train.x[:, 0] for client in range(federation.clients)]).double()
    return float(x.mean()), float(x.std(correction=0))


def test_the_statistics_are_planned_and_priced_with_everything_else(config: dict[str, Any]) -> None:
    plan = make_plan(make_config(config))
    moments = NoisyMoments(((0, None),), 3.0)
    assert all(releases[moments] == 1 for releases in plan.releases.values())
    events = Counter({m.event: n for m, n in plan.releases[0].items()})
    assert plan.price.epsilon == price(events, 1e-3).epsilon > price(events - Counter({moments.event: 1}), 1e-3).epsilon
    text = plan.statement().sentence()
    assert "column statistics" in text and "noise multiplier 3.0000" in text
    budget = make_plan(make_config(config | {"privacy": {"epsilon": 6.0, "delta": 1e-3}}))
    assert budget.price.epsilon <= 6 and budget.releases[0][moments] == 1


def test_statistics_that_alone_exceed_the_budget_are_refused(config: dict[str, Any]) -> None:
    config["data"]["options"]["statistics_noise"] = 0.2
    with pytest.raises(UserError, match="epsilon"):
        make_plan(make_config(config | {"privacy": {"epsilon": 6.0, "delta": 1e-3}}))


@pytest.mark.parametrize("algorithm", [None, CLIENT_LEVEL])
def test_clients_release_once_and_train_on_what_was_standardised(
    config: dict[str, Any], runs: Path, algorithm: dict[str, Any] | None
) -> None:
    if algorithm:
        config["algorithm"] = algorithm
    config["data"]["options"]["statistics_noise"] = 0.01  # next to nothing, so that the figures can be checked
    made = make_config(config)
    result = start_run(made, runs=runs)
    with Store(result.folder) as store:
        first = [entry for entry in store.ledger.entries() if entry[1].startswith("preparation")]
        assert store.ledger.planned() == store.ledger.posted() or algorithm
    assert len(first) == (1 if algorithm else 6)
    with safe_open(result.folder / "models" / "served.safetensors", "pt") as file:
        used = json.loads(file.metadata()["fairveil"])["standardise"]
    mean, deviation = exact(made.build_federation())
    assert used["columns"] == [[0, None]]
    # client level weighs clients, not records; here all hold equally many
    assert used["mean"] == pytest.approx([mean], abs=0.05) and used["scale"] == pytest.approx([deviation], abs=0.05)


def test_standardised_records_have_mean_0_and_deviation_1(config: dict[str, Any]) -> None:
    federation = make_config(config).build_federation()
    assert federation.standardise == Standardise(((0, None),), 3.0)
    mean, deviation = exact(federation)
    after = federation.standardised(np.array([mean]), np.array([deviation]))
    assert exact(after) == pytest.approx((0, 1), abs=1e-5) and after.standardise is None
    before, data = federation.load(2), after.load(2)
    assert torch.equal(data.train.x[:, 1], before.train.x[:, 1]) and torch.equal(data.test.y, before.test.y)
    assert torch.equal(federation.load(2).train.x, before.train.x)  # the records themselves are as they were


def test_what_is_missing_counts_nowhere_and_stays_zero(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = pd.read_csv(path)
    table.loc[table.index % 3 == 0, "pressure"] = np.nan
    table.to_csv(path, index=False)
    config["data"]["options"] |= {"prepare": {"pressure": BOUNDS | {"missing": []}}, "statistics_noise": 0.01}
    made = make_config(config)
    federation = made.build_federation()
    assert federation.standardise == Standardise(((0, 1),), 0.01)
    there = torch.cat([data.train.x[data.train.x[:, 1] == 0, 0] for data in map(federation.load, range(6))]).double()
    result = start_run(made, runs=tmp_path / "runs")
    with safe_open(result.folder / "models" / "served.safetensors", "pt") as file:
        used = json.loads(file.metadata()["fairveil"])["standardise"]
    assert used["mean"] == pytest.approx([float(there.mean())], abs=0.01)
    x = federation.standardised(np.array(used["mean"]), np.array(used["scale"])).load(0).train.x
    assert (x[x[:, 1] == 1, 0] == 0).all() and (x[x[:, 1] == 0, 0] != 0).all()


@pytest.mark.parametrize("algorithm", [None, CLIENT_LEVEL])
def test_a_resumed_run_asks_again_and_pays_nothing(
    config: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any] | None
) -> None:
    if algorithm:
        config["algorithm"] = algorithm
    made = make_config(config)
    whole = start_run(made, runs=runs / "whole")

    def stop(report: Any) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        start_run(made, runs=runs / "cut", progress=stop)
    (folder,) = (runs / "cut").iterdir()
    again = resume_run(folder)
    assert again.metrics == whole.metrics and again.statement == whole.statement
    with Store(whole.folder) as one, Store(folder) as other:
        assert one.ledger.entries() == other.ledger.entries()
    names = [path / "models" / "served.safetensors" for path in (whole.folder, folder)]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_a_budget_holds_for_what_comes_before_training_too(config: dict[str, Any]) -> None:
    """An algorithm that releases nothing leaves no noise to solve, so the budget is checked by itself."""
    config["data"]["options"]["statistics_noise"] = 0.1
    config |= {"algorithm": {"name": f"{__name__}:Silent", "rounds": 1}, "privacy": {"epsilon": 0.5, "delta": 1e-3}}
    with pytest.raises(UserError, match="less than what is released costs"):
        make_plan(make_config(config))


def test_more_noise_for_the_budget_of_less_is_not_taken_back_later(config: dict[str, Any], tmp_path: Path) -> None:
    """A run whose statistics come with less noise than planned is refused before anything is seen."""
    plan = make_plan(make_config(config))
    with Store(tmp_path / "run") as store:
        begin(plan, store)
        assert plan.federation.standardise is not None
        object.__setattr__(plan.federation, "standardise", Standardise(((0, None),), 2.9))
        with pytest.raises(PrivacyError, match="not planned"):
            drive(plan, store)
        assert len(store.ledger) == 0


def test_the_federation_sums_once_for_all_columns(config: dict[str, Any]) -> None:
    """One cohort, one event, whatever the number of columns."""
    config["algorithm"] = CLIENT_LEVEL
    config["data"]["options"]["prepare"]["smoker"] = {"kind": "standard", "low": -1.0, "high": 2.0}
    plan = make_plan(make_config(config))
    (releases,) = plan.releases.values()
    sums = [m for m in releases if isinstance(m, CohortSums) and m.parts[0].name == "moments"]
    assert len(sums) == 1 and releases[sums[0]] == 1
    assert sums[0].parts[0].shape == (6,) and sums[0].parts[0].bound == pytest.approx(6**0.5)
