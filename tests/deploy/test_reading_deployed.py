"""What reads a run folder, on that of a federation: it holds no scores, and everything says so in plain words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from rich.console import Console

from fairveil import export_run, load_model, terminal
from fairveil.config import load_config
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.statement import Statement
from fairveil.reading import METRICS, SCORES_STAY, load_run
from fairveil.report import build_page, write_report
from fairveil.run import RunResult, resume_run, run_plan
from fairveil.watch import Watch

Fairveil = Callable[..., tuple[int, str, str]]


class _Federation(Protocol):
    names: list[str]

    def config(self, algorithm: dict[str, Any]) -> Any: ...
    def run(self, config: Any, *, name: str) -> Path: ...
    def close(self) -> None: ...


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_small: Callable[[Path], _Federation]) -> dict[str, Path]:
    """Two finished runs of one federation: at record level with clusters, and at client level."""
    federation = make_small(tmp_path_factory.mktemp("federation"))
    algorithms: dict[str, dict[str, Any]] = {
        "record": {"name": "r-dpcfl", "rounds": 2, "batch_size": 128},
        "client": {"name": "dp-fedavg", "rounds": 2, "sample_rate": 0.5},
    }
    folders = {unit: federation.run(federation.config(a), name=unit) for unit, a in algorithms.items()}
    federation.close()
    return folders


UNITS = pytest.mark.parametrize("unit", ["record", "client"])


@UNITS
def test_the_tables_of_a_run_are_empty_and_no_errors(made: dict[str, Path], unit: str) -> None:
    run = load_run(made[unit])
    assert run.elsewhere and not run.reproducible and run.result is not None and len(run.rounds) == 2
    assert list(run.metrics.columns) == list(METRICS) and run.metrics.empty
    for table in (run.scores("accuracy"), run.counts("accuracy"), run.assignment()):
        assert table.empty and table.shape[1] == 3
    assert run.by_group("accuracy").empty and run.confusion.empty and run.measured("clipped") == []
    assert run.confusions() == {} and run.costs() == {}
    assert run.clients["name"].tolist() == ["client-0", "client-1", "client-2"]
    assert run.clients["size"].tolist() == [464, 464, 464]  # 479 records each, rounded down to the grid
    assert run.groups == ["0°", "90°"] and (run.clusters is None) is (unit == "client")


@UNITS
def test_the_result_is_printed_without_scores(
    made: dict[str, Path], unit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load_run(made[unit])
    assert run.result is not None
    statement = Statement.from_json(run.statement)
    result = RunResult(
        made[unit], run.algorithm, 2, run.result["seconds"], statement, {}, {}, 3, run.result.get("clusters")
    )
    assert result.main is None and result.to_json()["scores"] == SCORES_STAY == run.result["scores"]
    assert "accuracy" not in run.result and "fairness" not in run.result
    monkeypatch.setattr(terminal, "out", Console(width=4000))
    terminal.print_result(result)
    told = capsys.readouterr().out
    for words in ("differentially private", "Not covered", f"{run.algorithm}: 2 rounds in ", SCORES_STAY):
        assert words in told
    assert f"Run folder: {made[unit]}" in told and "nan" not in told and "orst group" not in told
    assert ("Clusters: " in told and "the groups that clients declare" in told) is (unit == "record")


def test_runs_are_listed_and_resumed_where_they_belong(
    made: dict[str, Path], fairveil: Fairveil, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(made["record"], runs / "done")
    shutil.copytree(made["client"], runs / "half")
    (runs / "half" / "result.json").unlink()
    (runs / "sent").mkdir()  # and not planned yet
    (runs / "sent" / "submission.json").write_text("{}")
    code, out, _ = fairveil("list", "runs", "--runs", str(runs), "--json")
    states = {Path(row["run"]).name: row["state"] for row in json.loads(out)}
    assert code == 0 and states.keys() == {"done", "half", "sent"} and states["done"] == "finished"
    again = f"fairveil deploy submit {runs / 'half'} --server DIR --resume"
    assert states["half"] == f"unfinished: {again}" and "deploy submit" in states["sent"]
    code, _, err = fairveil("run", str(runs / "half"), "--resume")
    assert code == 2 and "on the machines of its clients" in err and "--server DIR --resume" in err
    assert again in build_page(runs / "half").state
    with pytest.raises(UserError) as refused:
        export_run(load_run(runs / "half"))
    assert refused.value.fix == again


def test_a_run_of_a_federation_cannot_take_place_here(made: dict[str, Path], tmp_path: Path) -> None:
    """Its config can be planned, which needs no records; nothing is begun."""
    plan = make_plan(load_config(made["client"] / "config.toml"))
    assert plan.price.epsilon == pytest.approx(load_run(made["client"]).statement["epsilon"])
    with pytest.raises(UserError, match="machines of its clients"):
        run_plan(plan, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match="machines of its clients"):
        resume_run(made["client"])


@UNITS
def test_the_report_has_clients_instead_of_scores(made: dict[str, Path], unit: str, tmp_path: Path) -> None:
    page = build_page(made[unit])
    shown = {section.key: section for section in page.sections if section.blocks}
    assert list(shown) == ["verdict", "clients", *(["clusters"] if unit == "record" else []), "privacy", "reproduce"]
    assert shown["clients"].intro == SCORES_STAY
    (table,) = shown["clients"].blocks
    columns = ["client", "group", "declared size", *(["noise multiplier", "epsilon"] if unit == "record" else [])]
    assert table.columns == columns and [cell.text for cell in table.rows[2]][:3] == ["client-2", "90°", "464"]  # type: ignore[union-attr]
    html = write_report(made[unit], tmp_path / "page.html").read_text()
    for words in ("ε = 7.9", "with the clients", "Budget spent, by kind of release", "What is sent, by"):
        assert words in html
    assert html.count(SCORES_STAY) == 1 and "on a federation: 3 clients, 2 rounds" in html
    for words in ("none yet", "computed without noise, for evaluation", ">nan<", "the truth", "fairveil run "):
        assert words not in html
    assert "deploy submit runs/" in html and "submitted.toml --server DIR" in html
    assert ("Clusters against groups" in html and "the clients declare 2 groups" in html) is (unit == "record")


def test_the_page_is_watched(made: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made["record"], tmp_path / "watched"))
    with Watch(folder) as watch:
        assert SCORES_STAY in watch.page().decode() and "Finished." in watch.page().decode()
        before = watch.stamp()
        (folder / "failure.json").write_text("{}")
        assert watch.stamp() != before


@UNITS
def test_models_and_card_are_exported(made: dict[str, Path], unit: str, tmp_path: Path) -> None:
    run = load_run(made[unit])
    exported = export_run(run, tmp_path)
    assert not any("reproducible" in warning for warning in exported.warnings)
    files = [path for path in exported.files if path.suffix == ".safetensors"]
    assert files and load_model(files[0])(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert SCORES_STAY in card and "| None" not in card and "accuracy" not in card
    assert "what the clients hold, each on its own machine" in card and "fairveil deploy submit submitted.toml" in card
    assert 'privacy.noise | "secret"' in card and "0°, 90°, as declared" in card
    assert ("a key of each client, on its own machine" in card) is (unit == "record")
    assert ("key in the run folder" in card) is (unit == "client")


def test_models_that_clients_keep_are_not_here(made: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made["record"], tmp_path / "kept"))
    (folder / "models" / "served.safetensors").unlink()
    (folder / "models" / "personal.json").write_text("{}")
    with pytest.raises(UserError, match="are with its clients"):
        export_run(load_run(folder), client="client-1")


def test_the_statement_of_a_record_level_run(made: dict[str, Path]) -> None:
    """Each sentence is one that a hospital's data officer can hold the federation to."""
    lines = dict(Statement.from_json(load_run(made["record"]).statement).lines())
    assert lines["Guarantee"].startswith("what a client sends is (7.99")
    assert lines["Trusted"] == "nobody: every client adds the noise itself, before anything leaves it"
    assert "its folder), and the server adds none" in lines["Noise"] and "never leaves its machine" in lines["Noise"]
    assert "run folder" not in lines["Noise"] and "reproducible" not in lines["Noise"]
    for words in ("several records", "several clients hold", "how fast it answers", "are not sent"):
        assert words in lines["Not covered"]
    assert "rounded down" in lines["Public"] and "or exact if its policy says so" in lines["Public"]
    assert "read from the data" not in lines["Public"]


def test_the_statement_of_a_client_level_run(made: dict[str, Path]) -> None:
    """The server sees each contribution; nobody is to learn that elsewhere."""
    lines = dict(Statement.from_json(load_run(made["client"]).statement).lines())
    assert lines["Trusted"].startswith("the server: every client that is drawn sends it a contribution")
    assert "without noise" in lines["Trusted"] and "keeps secret who was drawn" in lines["Trusted"]
    assert "the server derives the noise" in lines["Noise"] and "run folder (secret.key)" in lines["Noise"]
    assert "each client derives" not in lines["Noise"]
    for words in ("whoever sees the traffic", "people whose records several clients hold"):
        assert words in lines["Not covered"]
    assert "people who own several records" not in lines["Not covered"]  # all records of a client are protected
