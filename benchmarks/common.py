"""What the benchmarks share: taking turns, the facts of the machine, and where results go."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fairveil.provenance import commit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
CORES = len(os.sched_getaffinity(0))


def say(text: str) -> None:
    """Progress goes to stderr: stdout is for results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def take_turns(
    steps: Mapping[str, Callable[[], object]], *, turns: int, seconds: float
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of processor time per call, for each competitor and turn; for steps that run on one thread.

    On a quiet machine that is the time on the clock; what others take away is not counted. The machine's speed drifts,
    so competitors take turns: each sees the same good and bad moments, and the best of its turns is what it can do.
    """
    count = {}
    for name, step in steps.items():
        step()  # warm up: caches, compiled kernels, lazy imports
        started = time.process_time()
        step()
        count[name] = max(1, round(seconds / (time.process_time() - started)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            started = time.process_time()
            for _ in range(count[name]):
                step()
            times[name].append((time.process_time() - started) / count[name])
    return times


def busy(seconds: float = 2.0) -> float:
    """The share of the machine that others use, while we do nothing: above a few percent no number can be trusted."""

    def clock() -> tuple[int, int]:
        ticks = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all, and those of which nobody made use

    whole, idle = clock()
    time.sleep(seconds)
    whole_after, idle_after = clock()
    share = 1 - (idle_after - idle) / (whole_after - whole)
    if share > 0.1:
        say(f"others use {share:.0%} of this machine: the numbers will not be reliable")
    return round(share, 3)


def machine(*packages: str, threads: int, others: float) -> dict[str, Any]:
    """What the numbers depend on; `others` as `busy` found it before the measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": CORES,
        "threads": threads,
        "busy_before": others,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
        "commit": commit(),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def save(name: str, result: Mapping[str, Any]) -> Path:
    """Write a result where the page finds it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"benchmark-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {path.relative_to(ROOT)}")
    return path


class Unavailable(Exception):
    """A peer that cannot be measured here, with the reason."""


def environment(name: str, *packages: str) -> Path:
    """The interpreter of a peer's own virtual environment, made on first use; fairveil's own stays as it is.

    torch comes first and pinned to ours: a peer's range would pull another build.

    Raises:
        Unavailable: it cannot be installed.
    """
    folder = HERE / ".venvs" / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    wanted = " ".join(packages)
    if done.exists() and done.read_text() == wanted:
        return python
    say(f"installing {wanted} (some minutes, once)")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pinned = f"torch=={torch.__version__.partition('+')[0]}"
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, pinned], [*pip, pinned, *packages]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            lines = [line for line in made.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
            raise Unavailable(f"{wanted} could not be installed: {lines[-1]}")
    done.write_text(wanted)
    return python


def in_environment(
    python: Path, script: str, *arguments: object, processes: int = 1, timeout: float = 1800, **switches: str
) -> Any:
    """What a script beside this file prints as its last line, as JSON, under a peer's interpreter.

    Args:
        processes: above 1 torch starts so many that know of each other.
        switches: variables of the environment.

    Raises:
        Unavailable: it failed.
    """
    together = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [str(python), *together, str(HERE / script), *map(str, arguments)]
    switches = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **switches}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, env={**os.environ, **switches}
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{script} did not end within {timeout:.0f} s") from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or ["no reason given"]
        raise Unavailable(f"{script} failed: {next((line for line in lines if 'Error: ' in line), lines[-1])}")
    return json.loads(ran.stdout.strip().splitlines()[-1])
