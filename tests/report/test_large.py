"""Large runs: a folder that can be kept, a report that can be waited for and mailed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairveil.reading import load_run
from fairveil.report import write_report


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def measured(written: Callable[..., Any], folder: Path, clients: int, rounds: int) -> tuple[float, float, float]:
    """Build a run, then its report: MB of the folder, seconds of work for the report, MB of the page."""
    names = [(f"client {number}", f"group {number % 6}") for number in range(clients)]
    privacy = {"adjacency": "add-remove", "epsilon": 8.0, "delta": 1e-3, "accountant": "tightest"}
    written(folder, names, rounds=rounds, models=4, config={"privacy": privacy}).write()
    size, started = megabytes(folder), time.process_time()  # of this process alone: others may want the machine
    path = write_report(folder)
    return size, time.process_time() - started, path.stat().st_size / 1e6


def test_a_run_of_200_clients_and_100_rounds_is_small_and_quick(written: Callable[..., Any], tmp_path: Path) -> None:
    size, seconds, page = measured(written, tmp_path / "run", 200, 100)
    assert size < 6 and seconds < 10 and page < 1


@pytest.mark.slow
def test_a_run_of_1000_clients_and_500_rounds_is_small_and_quick(written: Callable[..., Any], tmp_path: Path) -> None:
    size, seconds, page = measured(written, tmp_path / "run", 1000, 500)
    assert size < 100 and seconds < 10 and page < 3
    run = load_run(tmp_path / "run")
    assert run.metrics.shape[0] == 4 * 1000 * 500 and len(run.posted(0)) == 500
