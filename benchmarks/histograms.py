"""How accuracy is spread over clients in runs of sweeps: `python -m benchmarks.histograms SWEEP... [--out FILE]`.

Du, Xiang and Wu (2025), Figures 2 to 6, as a table: for every run, how many clients have which accuracy, in ten bins;
and, where the sum is clipped as it was published, the share of an update that this takes away, over all rounds.
SWEEPs are folders that `fairveil sweep` has made, of examples/fair-clipping.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from benchmarks.common import RESULTS
from fairveil.fairness import histogram
from fairveil.reading import load_run
from fairveil.sweep import read_sweep

BINS = 10


def counted(folder: Path) -> pd.DataFrame:
    """A row for each run."""
    found = read_sweep(folder)
    rows = []
    for cell in found.sweep.cells:
        run = load_run(found.folders[cell])
        counts = histogram(run.scores("accuracy").iloc[-1].to_numpy(dtype=float), BINS)[0]
        metrics = run.metrics
        away = metrics.loc[metrics["metric"] == "clipped_away", "value"].mean()
        rows.append([*counts, away])
    names = [*(f"from_{100 * k // BINS}" for k in range(BINS)), "clipped_away"]
    kept = found.result.table[["variant", *found.sweep.keys, "seed", "config_hash", "commit"]]
    return pd.concat([kept, pd.DataFrame(rows, columns=names)], axis=1).assign(sweep=found.sweep.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "fair-histograms.csv")
    given = parser.parse_args()
    pd.concat([counted(folder) for folder in given.sweeps]).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
