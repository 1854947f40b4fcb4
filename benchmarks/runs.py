"""Whole runs of the same private federated averaging: fairveil's engine, a bare loop with Opacus, Flower with Opacus.

21 clients of 2,286 images, the CNN, Poisson batches of 32, one local epoch (72 steps), clip 1, the same noise. What is
timed are the rounds after the first, without evaluation: start-up and first use are not what a long run is made of.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds the folder it stands in only

import fairveil
from benchmarks import images, opacus_client
from benchmarks.common import CORES, Unavailable, busy, environment, in_environment, machine, save, say

FLOWER = ("flwr[simulation]==1.41.0", "opacus==1.6.0")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def fairveil_engine(folder: Path, clients: int, rounds: int) -> list[float]:
    """fairveil as a user runs it: ledger, checkpoint and progress included. One round more, since the last one is
    always evaluated."""
    c = opacus_client
    config = fairveil.make_config({
        "name": "benchmark",
        "data": {
            "dataset": "benchmarks.images:Images", "options": {"folder": str(folder)}, "sizes": "public",
            "split": {"kind": "iid", "clients": clients},
        },
        "model": {"name": "cnn"},
        "algorithm": {"name": "global", "rounds": rounds + 1, "batch_size": c.BATCH, "learning_rate": c.LEARNING_RATE},
        "privacy": {"noise_multiplier": c.NOISE_MULTIPLIER, "clip_norm": c.CLIP_NORM, "delta": 1e-4},
        "engine": {"workers": min(CORES, clients)},
        "metrics": {"every": rounds + 1},
    })  # fmt: skip
    finished = [time.perf_counter()]
    fairveil.start_run(config, runs=folder / "runs", progress=lambda report: finished.append(time.perf_counter()))
    return np.diff(finished).tolist()[:rounds]


def opacus_loop(folder: Path, clients: int, rounds: int) -> list[float]:
    """What people write today: a pool of one process for each core, each with one thread; broadcast, train, average."""
    weights = [p.detach().numpy() for p in opacus_client.cnn().parameters()]
    finished = [time.perf_counter()]
    with multiprocessing.get_context("spawn").Pool(min(CORES, clients)) as pool:
        for _ in range(rounds):
            work = [(str(folder), client, weights) for client in range(clients)]
            trained = pool.starmap(opacus_client.train, work, chunksize=1)
            weights = [np.mean(parts, axis=0) for parts in zip(*trained, strict=True)]
            finished.append(time.perf_counter())
    return np.diff(finished).tolist()


def flower_simulation(folder: Path, clients: int, rounds: int) -> list[float]:
    """Flower's simulation engine with its FedAvg strategy and the same Opacus client."""
    python = environment("flower", *FLOWER)
    seconds: list[float] = in_environment(python, "flower_app.py", folder, clients, rounds, CORES, **QUIET)
    return seconds


RUNNERS: dict[str, Callable[[Path, int, int], list[float]]] = {
    "fairveil": fairveil_engine,
    "opacus_loop": opacus_loop,
    "flower": flower_simulation,
}


def measure(clients: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Seconds of each timed round of every runner, the best of its repeats; why one is missing."""
    found: dict[str, list[list[float]]] = {}
    skipped = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = images.prepare(folder, clients * opacus_client.RECORDS)
        for repeat in range(repeats):
            for name, runner in RUNNERS.items():
                if name in skipped:
                    continue
                say(f"runs: {name}, {repeat + 1} of {repeats}")
                try:
                    found.setdefault(name, []).append(runner(folder, clients, rounds + 1))
                except Unavailable as reason:
                    skipped[name] = str(reason)
                    say(f"skipped: {reason}")
    timed = {name: min(sum(run[1:]) for run in repeated) for name, repeated in found.items() if repeated}
    return {
        "data": data,
        "clients": clients,
        "records": opacus_client.RECORDS,
        "steps": opacus_client.STEPS,
        "rounds": rounds,
        "seconds": timed,
        "speedup": {name: seconds / timed["fairveil"] for name, seconds in timed.items()},
        "seconds_of_each_round": found,
        "skipped": skipped,
        "flower": FLOWER[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients", type=int, default=opacus_client.CLIENTS, help="fewer for a trial: nothing is written"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are timed, after one that is not")
    parser.add_argument("--repeats", type=int, default=2, help="whole runs of each; the best counts")
    options = parser.parse_args()
    others = busy()
    found = measure(options.clients, options.rounds, options.repeats)
    if options.clients == opacus_client.CLIENTS:
        save("runs", machine("opacus", threads=1, others=others) | found)
    for name, seconds in found["seconds"].items():
        sys.stdout.write(f"{name:14}{seconds:8.1f} s for {options.rounds} rounds, {found['speedup'][name]:.2f}\n")
    for name, reason in found["skipped"].items():
        sys.stdout.write(f"{name:14}skipped: {reason}\n")


if __name__ == "__main__":
    main()
