"""What fair clipping costs: `python -m benchmarks.clipping [--out FOLDER]`.

clipping-part.csv: the server's part of a round of the published form, from 100 updates of a million numbers to the
noisy sum (inner products, multiplier steps, sum, noise), on one thread, in a process of its own; the peak of its memory
in units of the updates. clipping-seconds.csv: a round of every method on the sets of the examples
fair-clipping/paper-*.toml, in one worker, all clients; the median of the rounds after the first, as in Table 3 of Du,
Xiang and Wu (2025).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.common import RESULTS, ROOT, say
from fairveil.config import load_config
from fairveil.provenance import commit
from fairveil.reading import load_run
from fairveil.run import start_run

PART = """
import json, resource, sys, time, torch
from fairveil.privacy.faithful import MultiplierClipped
from fairveil.privacy.multipliers import Multipliers
from fairveil.streams import Stream
torch.set_num_threads(1)
clients, length = int(sys.argv[1]), int(sys.argv[2])
by = MultiplierClipped(length, 0.5, 1.0, method=Multipliers(0.1, 2.0, 0.0, 0.0, 30.0, 1e-4, 0.005, 5))
random, exact = torch.Generator().manual_seed(0), by.zero()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for k in range(clients):
    update = torch.randn(length, generator=random)
    values = {"update": update, "weight": torch.tensor(0.02), "loss": torch.tensor(1.0 + k / 100)}
    by.add(exact, by.share(values, None)[0])
started = time.perf_counter()
by.finish(exact, Stream(1), 0)
seconds = time.perf_counter() - started
used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps({"seconds": round(seconds, 2), "memory": round(used / (4 * clients * length), 2)}))
"""
SIZES = ((100, 100_000), (100, 1_000_000))
TIMES = 3
SETS = {"synthetic": 30, "vehicle": 30, "fashion": 10, "cifar10": 3}  # rounds
PUBLISHED = ["algorithm.alpha=2.0", "algorithm.clip_rate=1e-4", "algorithm.faithful=true"]
METHODS: dict[str, list[str]] = {
    "fedavg": [],
    "q-fedavg": ["algorithm.name=q-fedavg"],
    "fairfed": ["algorithm.name=fairfed"],
    "fair-fedavg": ["algorithm.name=fair-fedavg"],
    "fair-fedavg, as published": ["algorithm.name=fair-fedavg", *PUBLISHED],
    "root-loss": ["algorithm.name=root-loss"],
    "loss-split": ["algorithm.name=loss-split"],
}


def part(clients: int, length: int) -> dict[str, Any]:
    """The fastest of some processes, and the most memory of any."""
    command = [sys.executable, "-c", PART, str(clients), str(length)]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(TIMES)]
    return {"seconds": min(run["seconds"] for run in runs), "memory": max(run["memory"] for run in runs)}


def round_seconds(name: str, rounds: int, settings: list[str]) -> float:
    """Median over all rounds but the first, which also loads the clients."""
    few = [f"algorithm.rounds={rounds}", f"metrics.every={rounds}", "algorithm.sample_rate=1.0", "engine.workers=1"]
    config = load_config(ROOT / "examples" / "fair-clipping" / f"paper-{name}.toml", [*few, *settings])
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(start_run(config, runs=Path(folder)).folder)
    return float(run.rounds["seconds"].iloc[1:-1].median())  # the last one is judged, too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    parts = [{"clients": m, "parameters": d} | part(m, d) | {"commit": commit()} for m, d in SIZES]
    pd.DataFrame(parts).to_csv(out / "clipping-part.csv", index=False)
    say(str(parts))
    rows = []
    for name, rounds in SETS.items():
        for method, settings in METHODS.items():
            seconds = round_seconds(name, rounds, settings)
            rows.append({"set": name, "method": method, "seconds": round(seconds, 4), "commit": commit()})
            say(f"{name}, {method}: {seconds:.4f} s")
    pd.DataFrame(rows).to_csv(out / "clipping-seconds.csv", index=False)


if __name__ == "__main__":
    main()
