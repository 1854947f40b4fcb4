"""What trackers hold, read back by their own readers, is what the run folder holds; and they never end a run."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.fairness import summarise
from fairveil.options import flattened
from fairveil.reading import load_run
from fairveil.run import Interrupted, RoundReport, resume_run, start_run
from fairveil.tracking import measured, plain_names, trackers

Fairveil = Callable[..., tuple[int, str, str]]
BOTH = ("tensorboard", "mlflow")
Scalars = dict[str, dict[int, list[float]]]  # by name and round, all values that were logged


@pytest.fixture(autouse=True)
def _mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own settings are not in force here, and those of the tracker do not stay."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def from_tensorboard(folder: Path) -> Scalars:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found: Scalars = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(name, {}).setdefault(event.step, []).append(event.value)
    return found


def mlflow_run(runs: Path) -> tuple[Any, Any]:
    """The client, and the only run that there is."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(runs / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fairveil")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def from_mlflow(runs: Path) -> Scalars:
    client, run = mlflow_run(runs)
    found: Scalars = {}
    for name in run.data.metrics:
        for entry in client.get_metric_history(run.info.run_id, name):
            found.setdefault(name, {}).setdefault(entry.step, []).append(entry.value)
    return found


def expected(folder: Path) -> Scalars:
    """The same from the table of metrics."""
    table = load_run(folder).metrics.query("split == 'test' and model == 'served' and metric == 'accuracy'")
    found: dict[str, dict[int, list[float]]] = {}

    def add(name: str, series: pd.Series) -> None:
        found[name] = {int(number): [value] for number, value in series.items()}

    by_round = table.groupby("round")["value"]
    by_group = table.groupby(["round", "group"], observed=True)["value"].mean().unstack()
    add("mean", by_round.mean())
    add("worst_group", by_group.min(axis=1))
    add("worst_10_percent", by_round.min())  # of five clients: one
    add("disparity", by_round.max() - by_round.min())
    for group in by_group:
        add(f"group/{group.replace('°', '_')}", by_group[group])
    return found


def check_same(found: Scalars, folder: Path, rounds: int = 4) -> None:
    epsilons = {name: found.pop(name) for name in ("epsilon_spent", "epsilon_planned")}
    wanted = expected(folder)
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert {step: pytest.approx(value, rel=1e-6) for step, value in values.items()} == found[name], name
    planned = pytest.approx(json.loads((folder / "statement.json").read_text())["epsilon"], rel=1e-6)
    assert epsilons["epsilon_planned"] == {number: [planned] for number in range(1, rounds + 1)}
    spent = [value for _, (value,) in sorted(epsilons["epsilon_spent"].items())]
    assert len(spent) == rounds and spent == sorted(spent) and spent[-1] == planned


def test_what_is_tracked_is_what_was_measured(small: dict[str, Any], runs: Path) -> None:
    with trackers(BOTH, pytest.fail) as tracking:
        folder = start_run(make_config(small), runs=runs, progress=tracking.show).folder
    check_same(from_tensorboard(folder), folder)
    check_same(from_mlflow(runs), folder)
    _, run = mlflow_run(runs)
    config = tomllib.loads((folder / "config.toml").read_text())
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flattened(config).items()}
    result = json.loads((folder / "result.json").read_text())
    assert run.data.params == texts and texts["data.split.degrees"] == "[0, 90]"
    assert run.data.tags == {  # and nothing of the machine or its user
        "mlflow.runName": folder.name, "fairveil.run": folder.name, "fairveil.config_hash": result["config_hash"],
        "fairveil.epsilon": str(result["epsilon"]), "fairveil.guarantee": result["guarantee"],
        "fairveil.metric": "accuracy",
    }  # fmt: skip
    assert run.info.status == "FINISHED" and run.info.user_id == "unknown"


def test_rounds_that_are_not_evaluated_have_a_price_only(small: dict[str, Any], runs: Path) -> None:
    with trackers(BOTH, pytest.fail) as tracking:
        folder = start_run(make_config(small, ["metrics.every=3"]), runs=runs, progress=tracking.show).folder
    for found in (from_tensorboard(folder), from_mlflow(runs)):
        assert set(found["mean"]) == {3, 4} and set(found["epsilon_spent"]) == {1, 2, 3, 4}


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "runs a round again"])
def test_a_resumed_run_goes_on_in_the_same_place(small: dict[str, Any], runs: Path, again: bool) -> None:
    """No step is there twice, even if the last checkpoint was lost and its round is run again."""
    with pytest.raises(Interrupted), trackers(BOTH, pytest.fail) as tracking:

        def stop(report: RoundReport) -> None:
            tracking.show(report)
            if report.round == 2:
                raise KeyboardInterrupt

        start_run(make_config(small), runs=runs, progress=stop)
    (folder,) = (path.parent for path in runs.glob("*/config.toml"))
    assert mlflow_run(runs)[1].info.status == "KILLED"
    if again:
        (folder / "checkpoints" / "round-000002.safetensors").write_bytes(b"damaged")
    with trackers(BOTH, pytest.fail) as tracking:
        resume_run(folder, progress=tracking.show)
    check_same(from_tensorboard(folder), folder)
    check_same(from_mlflow(runs), folder)
    assert mlflow_run(runs)[1].info.status == "FINISHED"


def test_two_runs_are_two(small: dict[str, Any], runs: Path) -> None:
    from mlflow.tracking import MlflowClient

    for _ in range(2):  # of one and the same config
        with trackers(("mlflow",), pytest.fail) as tracking:
            start_run(make_config(small), runs=runs, progress=tracking.show)
    client = MlflowClient(tracking_uri=(runs / "mlruns").as_uri())
    found = client.search_runs([client.get_experiment_by_name("fairveil").experiment_id])
    assert len({run.data.tags["fairveil.run"] for run in found}) == 2


def test_a_tracker_that_fails_says_so_once_and_the_run_goes_on(
    small: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody is there
    said: list[str] = []
    with trackers(BOTH, said.append) as tracking:

        def show(report: RoundReport) -> None:
            (report.folder / "tensorboard").write_text("in the way")
            tracking.show(report)

        result = start_run(make_config(small), runs=runs, progress=show)
    assert result.rounds == 4 and sorted(text.split()[0] for text in said) == ["mlflow", "tensorboard"]


def test_the_command(fairveil: Fairveil) -> None:
    fairveil("new")
    small = ("--set", "algorithm.rounds=2", "--set", "engine.workers=1")
    code, out, err = fairveil("run", "fairveil.toml", *small, "--track", "tensorboard", "--track", "mlflow", "--json")
    assert code == 0 and out.count("\n") == 1 and "Warning" not in err
    folder = Path(json.loads(out)["run"])
    for found in (from_tensorboard(folder), from_mlflow(folder.parent.resolve())):
        assert {step for steps in found.values() for step in steps} == {1, 2}
    code, _, _ = fairveil("run", str(folder), "--resume", "--track", "tensorboard")
    assert code == 0


@pytest.mark.parametrize("kind", BOTH)
def test_a_missing_package_is_told_before_anything_is_run(
    fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fairveil("new")
    monkeypatch.setitem(sys.modules, kind, None)
    code, out, err = fairveil("run", "fairveil.toml", "--track", kind)
    assert code == 2 and out == "" and "pip install 'fairveil[track]'" in err and not Path("runs").exists()


def test_an_unknown_tracker() -> None:
    with pytest.raises(UserError, match="--track tensorbord is not known") as error:
        trackers(["tensorbord"], pytest.fail)
    assert error.value.fix == "--track tensorboard"


NAMES = ["90°", "90'", "..", ".", "", "a/../b", "a|b", "a<b", "A<B", "new\nline", "-2"]
NAMES += ["x" * 300, "x" * 299, "中" * 100]


def test_every_group_has_a_name_that_trackers_take() -> None:
    from mlflow.utils.validation import _validate_metric_name

    names = plain_names(NAMES)
    assert len({name.casefold() for name in names.values()}) == len(NAMES) and names["-2"] == "-2"
    for name in names.values():
        _validate_metric_name(f"group/{name}")
        assert name not in ("", ".", "..") and "/" not in name and len(name.encode()) < 250


def test_an_infinite_price_is_left_out() -> None:
    summary = summarise(np.array([0.4, 0.6]), np.zeros(2, int), ["a/b"], higher_is_better=True)
    found = measured(RoundReport(1, 2, float("inf"), float("inf"), summary, Path()))
    expected = {"mean": 0.5, "worst_group": 0.5, "worst_10_percent": 0.4, "disparity": 0.2, "group/a_b": 0.5}
    assert found == pytest.approx(expected)
