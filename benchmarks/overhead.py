"""What a simulated client costs beside its training: an almost empty model, one step each, many clients.

fairveil does everything that it always does: two worker processes, per-record clipping, noise, ledger, metrics and a
checkpoint on disk in every round. pfl takes one plain step for each client, with nothing private and nothing saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds the folder it stands in only

import fairveil
from benchmarks.common import CORES, Unavailable, busy, environment, in_environment, machine, save, say

SIZES = (10, 100, 1000)  # clients
RECORDS = 4
PFL = ("pfl[pytorch]==0.6.0",)


def fairveil_rounds(clients: int, rounds: int) -> list[float]:
    """Seconds of each round after the first. One round more is run, since the last one is always evaluated."""
    config = fairveil.make_config({
        "name": "overhead",
        "data": {
            "dataset": "gaussian-clusters", "sizes": "public",
            "options": {"clients": [clients], "records": RECORDS, "test_records": 1, "features": 2, "classes": 2},
        },
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": rounds + 2, "batch_size": RECORDS, "learning_rate": 0.1},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"workers": CORES},
        "metrics": {"every": rounds + 2},
    })  # fmt: skip
    finished: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fairveil.start_run(config, runs=Path(folder), progress=lambda report: finished.append(time.perf_counter()))
    return np.diff(finished).tolist()[:rounds]


def pfl_rounds(rounds: int, processes: int) -> dict[int, list[float]]:
    """Seconds of each round after the first, by number of clients, with this many processes of pfl."""
    python = environment("pfl", *PFL)
    found = in_environment(python, "pfl_app.py", RECORDS, rounds, *SIZES, processes=processes)
    return {int(clients): seconds for clients, seconds in found.items()}


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds per client and round: the median round, since a round in the middle is what a run is made of."""
    seconds: dict[str, dict[int, list[float]]] = {"fairveil": {}}
    skipped = {}
    for clients in SIZES:
        say(f"overhead: fairveil, {clients} clients")
        seconds["fairveil"][clients] = fairveil_rounds(clients, rounds)
    for processes in sorted({1, CORES}):
        name = f"pfl, {processes} process{'es' * (processes > 1)}"
        say(f"overhead: {name}")
        try:
            seconds[name] = pfl_rounds(rounds, processes)
        except Unavailable as reason:
            skipped[name] = str(reason)
            say(f"skipped: {reason}")
    return {
        "rounds": rounds,
        "records": RECORDS,
        "milliseconds_per_client": {
            name: {clients: 1000 * float(np.median(times)) / clients for clients, times in by_size.items()}
            for name, by_size in seconds.items()
        },
        "seconds_of_each_round": seconds,
        "skipped": skipped,
        "pfl": PFL[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are timed, after one that is not")
    options = parser.parse_args()
    others = busy()
    found = measure(options.rounds)
    save("overhead", machine(threads=1, others=others) | found)
    for name, by_size in found["milliseconds_per_client"].items():
        row = ", ".join(f"{cost:.3f} ms ({clients} clients)" for clients, cost in by_size.items())
        sys.stdout.write(f"{name:18}{row}\n")
    for name, reason in found["skipped"].items():
        sys.stdout.write(f"{name:18}skipped: {reason}\n")


if __name__ == "__main__":
    main()
