"""Where the hypotheses of the synthetic experiment end: `python -m benchmarks.hypotheses SWEEP [--out FOLDER]`.

Galli, Jung, Biswas, Palamidessi and Cucinotta, "Advancing Personalized Federated Learning: Group Privacy, Fairness, and
Beyond" (2023), Figure 1. SWEEP is the folder that the sweep examples/metric-privacy/synthetic-sweep.toml has made.

metric-synthetic-models.csv  for each run the distance from (5, 6) and from (4, -4.5) to the nearest hypothesis, and how
                             far along the way from the first to the second that of one hypothesis is
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds the folder it stands in only

from benchmarks.common import RESULTS, say
from fairveil.data.synthetic import LinearClusters
from fairveil.sweep import read_sweep


def ended(folder: Path) -> dict[str, Any]:
    """Of one run: how far the true parameters are from the nearest hypothesis."""
    models = np.stack([value.ravel() for value in load_file(folder / "models/served.safetensors").values()])
    first, second = LinearClusters.THETA
    near = [float(np.linalg.norm(models - theta, axis=1).min()) for theta in (first, second)]
    way = second - first
    along = float((models[0] - first) @ way / (way @ way)) if len(models) == 1 else None
    return {"to_first": near[0], "to_second": near[1], "along": along}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = read_sweep(given.sweep)
    kept = ["variant", *found.sweep.keys, "seed", "config_hash", "commit", "rmse_mean", "clusters_ari"]
    rows = [ended(found.folders[cell]) for cell in found.sweep.cells]
    table = pd.concat([found.result.table[kept], pd.DataFrame(rows)], axis=1)
    table.to_csv(given.out / "metric-synthetic-models.csv", index=False)
    figures = table.groupby(["variant", *found.sweep.keys])[["to_first", "to_second", "along"]]
    say(figures.agg(["median", "max"]).round(3).to_string())


if __name__ == "__main__":
    main()
