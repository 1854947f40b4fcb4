"""Shared by all tests: one cache of calibrations for the session, small configs, a fast small run."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from rich.console import Console

from fairveil import cli, terminal
from fairveil.reading import Run, load_run
from fairveil.store import Score, Store, UnitPlan

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calibrations of this session only, shared by its worker processes; never the user's own cache."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["FAIRVEIL_CACHE"] = str(root / "fairveil-cache")


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """The command ignores Ctrl-C once it ends, since its process ends; here the process goes on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def small() -> dict[str, Any]:
    """A small federation of digits: 5 clients in two rotated clusters, 4 rounds, one process."""
    return {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 4, "batch_size": 64, "learning_rate": 1.0},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Where run folders go."""
    return tmp_path / "runs"


@pytest.fixture
def fairveil(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Call the command in this process, in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fairveil", *arguments])
        for name, stderr in (("out", False), ("err", True)):
            console = Console(highlight=False, width=300, stderr=stderr)
            for module in (cli, terminal):
                monkeypatch.setattr(module, name, console)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, printed.err

    return call


@dataclass(frozen=True)
class Nothing:
    """The state of an algorithm that has none."""


@pytest.fixture
def handmade(tmp_path: Path) -> Callable[..., Run]:
    """Write a run folder by hand and read it: who the clients are, and what they scored. Nothing is trained."""

    def write(
        groups: Sequence[str], scores: Sequence[Score] = (), *, facts: Mapping[str, Any] | None = None,
        confusion: Sequence[tuple[int, str, str, int, int, int]] = (), clusters: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Run:  # fmt: skip
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        made_of = {"classes": 2, "common_tests": False, "attributes": {}, "parameters": 10, **(facts or {})}
        plain = {"seed": 0, "algorithm": {"name": "global", "rounds": 9}, "privacy": {"delta": 1e-3}, **config}
        with Store(folder) as store:
            store.database.execute("PRAGMA synchronous = OFF")  # nothing is lost with it
            units = [UnitPlan(client, 100, 1.0, 8.0, "pld") for client in range(len(groups))]
            names = [(f"client {client}", group) for client, group in enumerate(groups)]
            store.save_units(units, names, {"data": "abc", "facts": json.dumps(made_of)})
            rounds = sorted({score.round for score in scores})
            store.database.executemany("INSERT INTO round VALUES (?, 0.1)", [(number,) for number in rounds[:-1]])
            if rounds:
                store.finish_round(rounds[-1], 0.1, scores, Nothing(), {})
            store.save_confusion(confusion)
            store.write("config.toml", tomli_w.dumps(plain).encode())
            store.write("statement.json", b"{}")
            if clusters is not None:
                store.write("clusters.json", json.dumps(clusters).encode())
        return load_run(folder)

    return write
