"""Shared by all tests: one cache of calibrations for the session, small configs, a fast small run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fairveil import cli, terminal

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
