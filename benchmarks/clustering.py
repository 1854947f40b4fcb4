"""Are the clusters found? Simulated updates with known truth: `python -m benchmarks.clustering [--quick] [--out FILE]`.

Seeds: 20260000 and up, used for nothing else. The constants of fairveil.clustering were chosen on others (1 to 3).

Updates are not drawn coordinate by coordinate. Methods see inner products only, and a rotation changes none, so let
the means (and the scatter that is not isotropic) lie in the first k coordinates. The noise is as Gaussian after the
rotation as before: the other p - k coordinates hold nothing but noise, and their Gram matrix is, exactly, a Wishart
matrix, which Bartlett's decomposition draws from n^2/2 numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common import RESULTS, say
from fairveil.clustering import Clusters, Projection, adjusted_rand, find_clusters
from fairveil.provenance import commit

FIRST_SEED = 20_260_000
SUBSPACE = 20  # dimensions of the scatter that is not isotropic
SIZES = {10: (2, 4, 4), 21: (3, 6, 6, 6), 100: (10, 30, 30, 30)}


@dataclass(frozen=True)
class Cell:
    """A setting. Lengths are in units of s, the root mean square noise per coordinate."""

    clients: int
    unequal: int  # noise levels log-normal: 95% within a factor of 10^unequal
    dimension: int  # p
    separation: float  # D/s, all pairs of clusters but the last; 0: one cluster
    scatter: float  # norm of what each client adds to its cluster's mean
    subspace: bool  # that in 20 dimensions, or in all
    trials: int
    unknown: bool = True  # whether M is also searched for
    nearest: float = 1.0  # the last two clusters are only this share of D apart


def wishart(n: int, degrees: int, random: np.random.Generator) -> np.ndarray:
    """Z Z^T (n, n) of standard normal Z (n, degrees), by Bartlett's decomposition."""
    lower = np.tril(random.standard_normal((n, n)), -1)
    lower[np.diag_indices(n)] = np.sqrt(random.chisquare(degrees - np.arange(n)))
    return lower @ lower.T


def draw(cell: Cell, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gram matrix (n, n), known noise levels (n,) and true labels (n,)."""
    n, sizes = cell.clients, SIZES[cell.clients]
    known = np.exp(random.standard_normal(n) * math.log(10) / 4 * cell.unequal)
    known /= np.sqrt((known**2).mean())
    label = np.repeat(np.arange(len(sizes)), sizes)
    signal = np.zeros((n, len(sizes) + SUBSPACE))
    means = np.eye(len(sizes))  # at distance sqrt 2; the last is turned towards the one before, and keeps its length
    means[-1, -2:] = 1 - cell.nearest**2, math.sqrt(1 - (1 - cell.nearest**2) ** 2)
    signal[:, : len(sizes)] = cell.separation / math.sqrt(2) * means[label]
    noise = known
    if cell.subspace:
        signal[:, len(sizes) :] = random.standard_normal((n, SUBSPACE)) * cell.scatter / math.sqrt(SUBSPACE)
    else:
        noise = np.sqrt(known**2 + cell.scatter**2 / cell.dimension)
    seen = signal + noise[:, None] * random.standard_normal(signal.shape)
    gram = seen @ seen.T + np.outer(noise, noise) * wishart(n, cell.dimension - signal.shape[1], random)
    return gram, known, label * (cell.separation > 0)


def cells(quick: bool) -> Iterator[Cell]:
    """All settings; distances in units of p^(1/4), where it is decided whether clusters can be seen."""
    trials = {10: 100, 21: 60, 100: 16} if not quick else {10: 4, 21: 2, 100: 1}
    for unequal in (0, 1):
        for separation in (0, 10, 12, 16, 24):
            yield Cell(10, unequal, 650, separation, 0, False, trials[10])
        for clients in (21, 100):
            for dimension in (650, 28_938, 1_000_000):
                for k in (0, 1.5, 2, 2.5, 4):
                    yield Cell(clients, unequal, dimension, k * dimension**0.25, 0, False, trials[clients])
            for subspace in (False, True) if clients == 21 else (True,):
                for separation, scatter in ((0, 20), (32, 8), (80, 20)):
                    yield Cell(clients, unequal, 28_938, separation, scatter, subspace, trials[clients])
    for k, scatter in ((0, 0), (0, 20), (0.5, 0), (1, 0), (1.5, 0), (2, 0), (2.5, 0)):
        yield Cell(21, 2, 28_938, k * 28_938**0.25, scatter, False, trials[21])
    for nearest in (1 / 2, 2 / 5, 1 / 3):
        yield Cell(21, 0, 28_938, 160, 0, False, trials[21], nearest=nearest)
    for clients in (10, 21):  # where it begins to work
        for dimension in (650, 28_938, 1_000_000):
            for k in (1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5):
                yield Cell(clients, 0, dimension, k * dimension**0.25, 0, False, 4 if quick else 100, unknown=False)


def measure(cell: Cell, projection: Projection) -> dict[str, object]:
    """One row of the table."""
    sizes = SIZES[cell.clients]
    given: list[tuple[Clusters, float]] = []
    found: list[tuple[Clusters, float]] = []
    for trial in range(cell.trials):
        random = np.random.default_rng([FIRST_SEED + trial, *(round(100 * value) for value in astuple(cell))])
        gram, noise, truth = draw(cell, random)
        for results, count in ((given, len(sizes)), (found, None)):
            if count is not None or cell.unknown:
                clusters = find_clusters(gram, cell.dimension, noise, count=count, projection=projection, random=random)
                results.append((clusters, adjusted_rand(clusters.label, truth)))
    true_count = len(sizes) if cell.separation else 1
    row: dict[str, object] = {
        "clients": cell.clients,
        "sizes": "/".join(map(str, sizes)) if cell.separation else str(cell.clients),
        "noise": ("equal", "unequal", "very unequal")[cell.unequal],
        "dimension": cell.dimension,
        "separation": round(cell.separation, 2),
        "separation_over_p_quarter": round(cell.separation / cell.dimension**0.25, 2),
        "nearest": round(cell.nearest, 2),
        "scatter": cell.scatter,
        "scatter_kind": "" if not cell.scatter else "20 dimensions" if cell.subspace else "isotropic",
        "projection": projection,
        "trials": cell.trials,
        "first_seed": FIRST_SEED,
        "commit": commit(),
    }
    for name, results in (("given", given), ("unknown", found)):
        if not results:
            continue
        ari = np.array([each for _, each in results])
        mss = np.array([clusters.mss for clusters, _ in results])
        row |= {
            f"ari_{name}": ari.mean(),
            f"perfect_{name}": (ari == 1).mean(),
            f"confident_{name}": (mss > 2).mean(),
            f"confident_wrong_{name}": ((mss > 2) & (ari < 0.5)).mean(),
            f"median_mss_{name}": np.median(mss),
        }
    row["iterations_given"] = np.mean([clusters.iterations for clusters, _ in given])
    if found:
        row["count_found"] = np.mean([clusters.count == true_count for clusters, _ in found])
    return {name: round(float(value), 3) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few trials, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "clustering.csv")
    arguments = parser.parse_args()
    rows = []
    for cell in cells(arguments.quick):
        for projection in ("paper", "loo") if cell.unknown else ("loo",):
            rows.append(measure(cell, projection))
        say(f"{cell}: {rows[-1]['ari_given']}")
    pd.DataFrame(rows).to_csv(arguments.out, index=False, lineterminator="\n")
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
