"""Plans, statements, and whole runs."""

from __future__ import annotations

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from safetensors.torch import load_file

import fairveil
from fairveil import models
from fairveil.config import make_config
from fairveil.contract import differ, outcome
from fairveil.errors import PrivacyError, UserError
from fairveil.plan import Plan, make_plan
from fairveil.privacy.accounting import price
from fairveil.privacy.ledger import FEDERATION
from fairveil.reading import load_run
from fairveil.run import Interrupted, RoundReport, begin, drive, resume_run, run_in, run_plan, start_run
from fairveil.schedule import Schedule
from fairveil.store import Store

CLIENT_LEVEL = {"name": "dp-fedavg", "rounds": 4, "sample_rate": 0.5}


# ---- plan ------------------------------------------------------------------------------------------


def test_a_plan_declares_every_release_of_every_client(small: dict[str, Any]) -> None:
    """1,438 digits over 5 clients: 287 or 288 records, both declared as 287 = floor(10^(59/24))."""
    plan = make_plan(make_config(small))
    assert plan.facts.size.tolist() == [287] * 5 and plan.protected == [0, 1, 2, 3, 4]
    z = plan.units[0].noise_multiplier
    step = PoissonSampledDpEvent(64 / 287, GaussianDpEvent(z))
    for unit in plan.protected:
        ((mechanism, count),) = plan.releases[unit].items()
        assert mechanism.event == SelfComposedDpEvent(step, 5) and count == 4  # ceil(287 / 64) steps, 4 rounds
    assert 7.9 < plan.price.epsilon <= 8.0


def test_client_level_privacy_has_one_ledger(small: dict[str, Any]) -> None:
    plan = make_plan(make_config(small | {"algorithm": CLIENT_LEVEL}))
    assert plan.protected == [FEDERATION]
    ((mechanism, count),) = plan.releases[FEDERATION].items()
    assert mechanism.event == PoissonSampledDpEvent(0.5, GaussianDpEvent(plan.units[0].noise_multiplier)) and count == 4


def test_a_given_noise_is_priced(small: dict[str, Any]) -> None:
    plan = make_plan(make_config(small))
    again = make_plan(
        make_config(small | {"privacy": {"noise_multiplier": plan.units[0].noise_multiplier, "delta": 1e-3}})
    )
    assert again.price == plan.price


def test_replace_needs_more_noise(small: dict[str, Any]) -> None:
    add_remove, replace = (
        make_plan(make_config(small | {"privacy": small["privacy"] | {"adjacency": adjacency}}))
        for adjacency in ("add-remove", "replace")
    )
    ratio = replace.units[0].noise_multiplier / add_remove.units[0].noise_multiplier
    assert 1.05 < ratio <= 2  # a record moves the sum by up to 2c; with little noise sampling hides part of it


@pytest.mark.parametrize(("sizes", "declared"), [("public", [288, 288, 288, 287, 287]), ("rounded", [287] * 5)])
def test_sizes_are_declared(small: dict[str, Any], sizes: str, declared: list[int]) -> None:
    plan = make_plan(make_config(small | {"data": small["data"] | {"sizes": sizes}}))
    assert sorted(plan.facts.size.tolist(), reverse=True) == declared
    assert ("exact" if sizes == "public" else "rounded down") in plan.statement().public["client sizes"]


@pytest.mark.parametrize(
    ("algorithm", "delta", "count"),
    [({"name": "global"}, 0.004, "up to 315 records"), (CLIENT_LEVEL, 0.2, "5 clients")],
)
def test_delta_must_stay_below_one_over_n(small: dict[str, Any], algorithm: Any, delta: float, count: str) -> None:
    config = make_config(small | {"algorithm": algorithm, "privacy": {"epsilon": 8.0, "delta": delta}})
    with pytest.raises(UserError, match=f"privacy.delta = {delta} is too large") as error:
        make_plan(config)
    assert count in error.value.why


def test_the_schedule_of_account_is_that_of_a_run(small: dict[str, Any]) -> None:
    plan = make_plan(make_config(small))
    z = plan.units[0].noise_multiplier
    ((event, count),) = Schedule(records=287, batch=64, rounds=4).events(z).items()
    ((mechanism, planned),) = plan.releases[0].items()
    assert (event, count) == (mechanism.event, planned)


# ---- statement -------------------------------------------------------------------------------------


def test_the_statement_says_what_was_done(small: dict[str, Any], runs: Path) -> None:
    result = run_plan(make_plan(make_config(small)), runs=runs)
    text = result.statement.sentence()
    for words in (
        "differentially private for adding or removing one record of that client",
        "PLD accountant of dp-accounting",
        "0.001",
        "nobody",
        "model update by each client, 4 times, each: ",
        "client sizes",
        "whoever knows these can remove the noise",
        "other runs on the same records, whose prices add up",
    ):
        assert words in text
    saved = json.loads((result.folder / "statement.json").read_text())
    assert saved["unit"] == "record" and saved["adjacency"] == "add-remove" and saved["complete"] is True
    assert saved["releases"][0]["planned_per_unit"] == saved["releases"][0]["posted_per_unit"] == [4, 4]
    assert saved["epsilon"] == saved["epsilon_spent"] == result.statement.epsilon


def test_the_printed_epsilon_is_never_below_the_proved_one(small: dict[str, Any]) -> None:
    plan = make_plan(make_config(small))
    text = plan.statement().sentence()
    printed = float(text.split("is (")[1].split(",")[0])
    assert plan.price.epsilon <= printed <= plan.price.epsilon + 0.001


def test_client_level_statement_names_the_trusted_server(small: dict[str, Any]) -> None:
    text = make_plan(make_config(small | {"algorithm": CLIENT_LEVEL})).statement().sentence()
    assert "one client with all its records" in text and "Trusted: the server" in text
    assert "noisy sum over a cohort (update) by the federation, 4 times, each: " in text


def test_without_noise_no_number_is_claimed(small: dict[str, Any], runs: Path) -> None:
    config = make_config(small | {"privacy": {"noise_multiplier": 0.0, "delta": 1e-3}})
    result = run_plan(make_plan(config), runs=runs)
    assert math.isinf(result.statement.epsilon) and "NONE (epsilon is infinite)" in result.statement.sentence()
    assert result.to_json()["epsilon"] == "infinity"
    json.dumps(result.to_json(), allow_nan=False)


# ---- runs ------------------------------------------------------------------------------------------


def test_a_run_leaves_a_whole_folder(small: dict[str, Any], runs: Path) -> None:
    reports: list[RoundReport] = []
    plan = make_plan(make_config(small))
    result = run_plan(plan, runs=runs, progress=reports.append)
    names = {str(path.relative_to(result.folder)) for path in result.folder.rglob("*") if path.is_file()}
    assert {"config.toml", "run.sqlite", "statement.json", "result.json", "models/served.safetensors"} <= names
    assert not [name for name in names if name.endswith(".part")]
    assert [report.round for report in reports] == [1, 2, 3, 4]
    spent = [report.epsilon_spent for report in reports]
    assert spent == sorted(spent) and spent[-1] == reports[0].epsilon  # RDP's price is larger: the plan's bounds it
    for report in reports:  # an upper bound in every round
        events = Schedule(records=287, batch=64, rounds=report.round).events(plan.units[0].noise_multiplier)
        assert price(events, 1e-3).epsilon <= report.epsilon_spent <= 1.5 * price(events, 1e-3).epsilon
    served = load_file(result.folder / "models/served.safetensors")
    state = outcome(result.folder).checkpoint.state["model"]
    assert torch.equal(torch.cat([served["0/1.weight"].reshape(-1), served["0/1.bias"]]), state)


def test_the_result_has_what_people_ask_for(small: dict[str, Any], runs: Path) -> None:
    result = run_plan(make_plan(make_config(small)), runs=runs).to_json()
    assert {"run", "algorithm", "rounds", "seconds", "epsilon", "delta", "accuracy", "loss"} <= set(result)
    assert set(result["accuracy"]["by_group"]) == {"0°", "90°"}
    by_group = result["accuracy"]["by_group"]
    assert result["accuracy"]["mean"] == pytest.approx((2 * by_group["0°"] + 3 * by_group["90°"]) / 5)
    assert result["accuracy"]["worst"] <= min(by_group.values())
    assert result["accuracy"]["by_group_clients"] == {"0°": 2, "90°": 3}
    assert result["accuracy"]["gap"] == pytest.approx(abs(by_group["0°"] - by_group["90°"]))
    assert result["accuracy"]["sampling_variance_removed"] is None  # the clients of a group share their test records


def test_clients_with_tests_of_their_own_show_their_spread(small: dict[str, Any], runs: Path) -> None:
    """var - (1 - 1/n) mean(a (1 - a)/(n_i - 1)), from what the folder says of each client."""
    split = {"kind": "dirichlet", "clients": 4, "alpha": 5.0, "test": "own"}
    result = run_plan(make_plan(make_config(small | {"data": {"dataset": "digits", "split": split}})), runs=runs)
    run = load_run(result.folder)
    a, n = (table.iloc[-1].to_numpy() for table in (run.scores("accuracy"), run.counts("accuracy")))
    assert len(set(n)) > 1
    expected = a.var() - 3 / 4 * (a * (1 - a) / (n - 1)).mean()
    assert result.metrics["accuracy"].sampling_variance_removed == pytest.approx(expected)
    assert result.metrics["loss"].sampling_variance_removed is None and result.metrics["loss"].jain is None


@pytest.mark.parametrize("algorithm", ["global", "mr-mtl"])
def test_diagnostics_do_not_depend_on_who_works_with_whom(small: dict[str, Any], runs: Path, algorithm: str) -> None:
    """Scores, clipped shares and signal to noise, to the last bit: blocks of any size, one worker or two."""
    plain = small | {"algorithm": {"name": algorithm, "rounds": 2, "batch_size": 64}}
    engines = ({"workers": 1, "block": 1}, {"workers": 1, "block": 5}, {"workers": 2, "block": 2})
    found = [load_run(start_run(make_config(plain | {"engine": engine}), runs=runs).folder) for engine in engines]
    signal = found[0].scores("signal_to_noise", split="train", model="local_update")
    assert signal.shape == (2, 5) and (signal > 0).all(axis=None)
    for other in found[1:]:
        pd.testing.assert_frame_equal(found[0].metrics, other.metrics, check_exact=True)


def test_a_regression_reports_rmse(small: dict[str, Any], runs: Path) -> None:
    data = {"dataset": "linear-clusters", "options": {"clients": [3, 3], "records": 60}}
    algorithm = {"name": "oracle", "rounds": 20, "learning_rate": 0.2, "batch_size": 60}
    privacy = {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}
    config = make_config(
        small | {"data": data, "model": {"name": "linear"}, "algorithm": algorithm, "privacy": privacy}
    )
    name, summary = run_plan(make_plan(config), runs=runs).main
    assert name == "rmse" and summary.mean < 0.6  # the noise is U[0, 1): the best linear model has sqrt(1/12) = 0.29


def test_evaluation_can_be_rarer_but_the_last_round_is_always_evaluated(small: dict[str, Any], runs: Path) -> None:
    result = run_plan(make_plan(make_config(small | {"metrics": {"every": 3}})), runs=runs)
    with Store(result.folder) as store:
        rounds = store.database.execute("SELECT DISTINCT round FROM scores WHERE metric = 'accuracy'").fetchall()
    assert rounds == [(3,), (4,)]


def test_two_seeds_differ(small: dict[str, Any], runs: Path) -> None:
    one, two = (outcome(run_plan(make_plan(make_config(small | {"seed": s})), runs=runs).folder) for s in (0, 1))
    assert differ(one, two)


def test_a_finished_run_gives_its_result_again(small: dict[str, Any], runs: Path) -> None:
    result = run_plan(make_plan(make_config(small)), runs=runs)
    before = outcome(result.folder)
    again = resume_run(result.folder)
    assert again.to_json() == result.to_json() and differ(before, outcome(result.folder)) is None


def test_resume_by_config_finds_the_newest_run_of_it(small: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    config = make_config(small)
    result = run_plan(make_plan(config), runs=runs)
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert resume_run(path, runs=runs).folder == result.folder
    path.write_text(make_config(small | {"seed": 5}).to_toml())
    with pytest.raises(UserError, match="no run of this config"):
        resume_run(path, runs=runs)


def test_a_resumed_run_never_recalibrates(small: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_plan(make_plan(make_config(small)), runs=runs)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("calibrated anew")

    monkeypatch.setattr("fairveil.plan.calibrate_many", forbidden)
    assert resume_run(result.folder).statement == result.statement


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rounds = 4", "rounds = 5"),
        ("delta = 0.001", "delta = 1e-12"),
        ('adjacency = "add-remove"', 'adjacency = "replace"'),
        ("learning_rate = 1.0", "learning_rate = 0.9"),
        ("seed = 0", "seed = 1"),
    ],
)
def test_a_config_edited_after_planning_is_refused(small: dict[str, Any], runs: Path, old: str, new: str) -> None:
    folder = run_plan(make_plan(make_config(small)), runs=runs).folder
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError, match=r"the config of .* has changed since it was planned"):
        resume_run(folder)


def test_a_changed_promise_is_refused(small: dict[str, Any], runs: Path) -> None:
    """The code may change too: what the algorithm declares now must be what was planned."""
    plan = make_plan(make_config(small))
    other = make_plan(make_config(small | {"algorithm": small["algorithm"] | {"rounds": 5}}))
    with Store(runs) as store:
        begin(plan, store)
        with pytest.raises(PrivacyError, match="no longer those that were planned"):
            begin(other, store)


def test_checkpoints_without_a_ledger_are_refused(small: dict[str, Any], runs: Path) -> None:
    folder = run_plan(make_plan(make_config(small)), runs=runs).folder
    for path in folder.glob("run.sqlite*"):
        path.unlink()
    with pytest.raises(PrivacyError, match="ledger is gone, or older"):
        resume_run(folder)


def test_two_budgets_share_no_noise(small: dict[str, Any], runs: Path) -> None:
    """One step each at z = 1 and z = 2 under one noise N: 2 (g + N) - (g + 2 N) = g would be the bare gradient."""
    algorithm = {"name": "local", "rounds": 1, "batch_size": 10_000, "learning_rate": 1.0}
    found = {}
    for z in (0.0, 1.0, 2.0):
        config = make_config(small | {"algorithm": algorithm, "privacy": {"noise_multiplier": z, "delta": 1e-3}})
        found[z] = outcome(run_plan(make_plan(config), runs=runs).folder).checkpoint.state["models"]
    solved = 2 * found[1.0] - found[2.0]
    size = 0.5 * 1.0 / 287  # half of what the noise alone does to a coordinate
    assert (solved - found[0.0]).std() > size


@pytest.fixture
def without_checkpoints(small: dict[str, Any], runs: Path) -> Plan:
    """A run in `runs` whose rounds are posted, but none of them saved: all will be asked again."""
    plan = make_plan(make_config(small))
    with Store(runs) as store:
        begin(plan, store)
        drive(plan, store)
    for checkpoint in (runs / "checkpoints").iterdir():
        checkpoint.unlink()
    return plan


def test_changed_inputs_are_refused(without_checkpoints: Plan, small: dict[str, Any], runs: Path) -> None:
    """Another learning rate: the ledger knows the inputs of every request."""
    other = make_config(small | {"algorithm": small["algorithm"] | {"learning_rate": 0.7}})
    with Store(runs) as store, pytest.raises(PrivacyError, match="answered before with other inputs"):
        drive(make_plan(other), store)


def test_changed_code_is_refused(without_checkpoints: Plan, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that computes another loss: same request, same inputs, another answer."""
    scored = models._Scored.forward

    def other(self: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, losses = scored(self, x, y)
        return output, 0.9 * losses

    monkeypatch.setattr(models._Scored, "forward", other)
    with Store(runs) as store, pytest.raises(PrivacyError, match="answered before in another way"):
        drive(without_checkpoints, store)


def test_the_statement_of_a_stopped_run_says_what_was_spent(small: dict[str, Any], runs: Path) -> None:
    def stop(report: RoundReport) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    plan = make_plan(make_config(small))
    with pytest.raises(Interrupted, match="Stopped after round 2 of 4"):
        run_plan(plan, runs=runs, progress=stop)
    (folder,) = runs.iterdir()
    saved = json.loads((folder / "statement.json").read_text())
    events = Schedule(records=287, batch=64, rounds=2).events(plan.units[0].noise_multiplier)
    assert saved["complete"] is False and saved["releases"][0]["posted_per_unit"] == [2, 2]
    assert saved["epsilon_spent"] == price(events, 1e-3).epsilon < saved["epsilon"]


def test_diverging_training_is_said(small: dict[str, Any], runs: Path) -> None:
    privacy = {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}
    data = {"dataset": "linear-clusters", "options": {"clients": [2, 2], "records": 60}}
    algorithm = {"name": "global", "rounds": 40, "learning_rate": 1e6, "batch_size": 60}
    config = make_config(
        small | {"privacy": privacy, "data": data, "model": {"name": "linear"}, "algorithm": algorithm}
    )
    with pytest.raises(UserError, match="no longer finite") as error:
        run_plan(make_plan(config), runs=runs)
    assert "learning_rate" in error.value.fix


def test_records_that_lie_are_not_trusted(small: dict[str, Any]) -> None:
    """Sampling rates are computed from declared sizes; a source that loads another number is refused."""
    federation = make_config(small).build_federation()
    with pytest.raises(ValueError, match="client 0 loads 288 records"):
        object.__setattr__(federation, "size", federation.size + 1)
        federation.load(0)


def test_secret_noise_is_nobodys_but_the_run_s(small: dict[str, Any], runs: Path) -> None:
    """Equal configs give different runs; one that was cut off goes on to the same end; the key stays with its owner."""
    config = make_config(small | {"privacy": small["privacy"] | {"noise": "secret"}})
    one, other = (start_run(config, runs=runs) for _ in range(2))
    assert one.metrics["loss"].mean != other.metrics["loss"].mean and "secret.key" in one.statement.noise_source
    key = one.folder / "secret.key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_text()) == 64
    assert key.read_text() not in "".join(p.read_text() for p in one.folder.glob("*.json"))
    before = outcome(one.folder)
    for checkpoint in (one.folder / "checkpoints").iterdir():
        checkpoint.unlink()
    resume_run(one.folder, runs=runs)  # every round again, with the same answers: the ledger would refuse others
    assert not differ(before, outcome(one.folder))
    key.unlink()
    with pytest.raises(PrivacyError, match=r"secret.key is gone"):
        resume_run(one.folder, runs=runs)


def test_the_python_interface_is_what_it_says() -> None:
    for name in fairveil.__all__:
        assert getattr(fairveil, name)
    with pytest.raises(AttributeError):
        _ = fairveil.nonsense
    assert np.isfinite(fairveil.make_plan(fairveil.load_config(Path("examples/digits/global.toml"))).price.epsilon)


# ---- which run it is -------------------------------------------------------------------------------


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.linear = torch.nn.Linear(64, classes)
    def forward(self, x):
        return self.linear(x.flatten(1)){}
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own model, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    path = tmp_path / "own_net.py"
    path.write_text(NET.format(""))
    return path


def test_edited_code_is_another_run_with_other_noise(small: dict[str, Any], net: Path, runs: Path) -> None:
    """Under the same noise, the difference of two models would be the difference of exact sums."""
    config = make_config(small | {"model": {"name": "own_net:Net"}})
    before = make_plan(config)
    folder = run_plan(before, runs=runs).folder
    assert make_plan(config).root == before.root
    net.write_text(NET.format(" * 1.0"))
    sys.modules.pop("own_net")
    after = make_plan(config)
    assert after.root != before.root and after.config.digest() == before.config.digest()
    with pytest.raises(UserError, match=r"the code of .* has changed"):
        resume_run(folder)


def test_a_run_in_a_given_folder_starts_there_and_goes_on_there(small: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(small)

    def stop(report: RoundReport) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_in(config, tmp_path / "here", progress=stop)
    two = make_config(small | {"engine": {"workers": 2}})  # another engine, the same run
    assert run_in(two, tmp_path / "here").metrics == run_in(config, tmp_path / "there").metrics
    with pytest.raises(UserError, match="another config"):
        run_in(make_config(small | {"seed": 1}), tmp_path / "here")


def test_a_result_says_what_it_is_a_result_of_and_not_the_key_to_its_noise(small: dict[str, Any], runs: Path) -> None:
    config = make_config(small | {"seed": 3})
    result = start_run(config, runs=runs)
    written = json.loads((result.folder / "result.json").read_text())
    assert written["seed"] == 3 and written["config_hash"] == config.digest() and written["name"] == "run"
    assert written["commit"] and written["fairveil"] == version("fairveil") and written["clients"] == 5
    fingerprint = config.build_federation().fingerprint
    assert fingerprint not in (result.folder / "result.json").read_text()
    assert fingerprint not in (result.folder / "statement.json").read_text()
    other = start_run(make_config(small | {"seed": 4}), runs=runs)
    assert written["data_fingerprint"] != other.provenance["data_fingerprint"]  # another split


def test_clients_without_test_records_take_part_and_are_not_scored(tmp_path: Path) -> None:
    rows = [f"{client},{n % 2},{n}" for client in "abc" for n in range(20 if client != "c" else 1)]
    (tmp_path / "t.csv").write_text("\n".join(["client,y,x", *rows]))
    config = {
        "data": {"dataset": "file", "options": {"path": str(tmp_path / "t.csv")}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "local", "rounds": 1},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }
    result = start_run(make_config(config), runs=tmp_path / "runs")
    assert result.clients == 3 and result.metrics["accuracy"].clients == 2
    with Store(result.folder) as store:
        assert {unit for unit, *_ in store.ledger.entries()} == {0, 1, 2}
        assert store.database.execute("SELECT name FROM client ORDER BY client").fetchall() == [("a",), ("b",), ("c",)]
