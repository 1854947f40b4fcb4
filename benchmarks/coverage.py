"""How often do intervals hold the truth? Simulated federations: `python -m benchmarks.coverage [--quick] [--out FILE]`.

95% intervals of `fairveil.intervals.bootstrap` and `fairveil.fairness.group_differences`, where the truth is known.
Clients are normal with standard deviation 1. Seeds: 20262000 and up, used for nothing else.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common import RESULTS, say
from fairveil.fairness import group_differences
from fairveil.intervals import Interval, Sample, bootstrap, gap_of, mean_of, worst_group_of
from fairveil.provenance import commit

FIRST_SEED = 20_262_000
GROUPS = 4  # of which the last is worse than the others, or not
CLIENTS = 20  # of one seed
RECORDS = 20  # of one client, for each value of the attribute
BETA = 15.0  # accuracies of clients are Beta with this as the sum of its parameters: a deviation of about 0.1


@dataclass(frozen=True)
class Cell:
    """A setting.

    Attributes:
        unit: what is resampled; n: how many (for "gap" and "worst group": clients in each group).
        apart: how far the last group, or the second value, is below the others.
        accuracy: of the shared test records; or of the first value.
        between: standard deviation between seeds.
    """

    figure: str
    unit: str
    n: int
    apart: float = math.nan
    accuracy: float = math.nan
    between: float = math.nan
    trials: int = 4000
    draws: int = 2000


def cells() -> Iterator[Cell]:
    """All settings."""
    for n in (3, 6, 20, 100):
        yield Cell("mean", "clients", n, trials=20_000)
    for figure, apart, n in product(("worst group", "gap"), (0.0, 1.0), (3, 6, 20, 100)):
        yield Cell(figure, "clients", n, apart=apart)
    for accuracy, n in ((0.9, 20), (0.9, 100), (0.9, 1000), (0.99, 100), (0.99, 1000)):
        yield Cell("mean", "test records", n, accuracy=accuracy)
    for between, n in product((0.0, 0.5), (3, 5, 10, 20)):
        yield Cell("mean", "seeds", n, between=between)
    for apart, n in product((0.0, 0.1), (6, 20, 100)):
        yield Cell("difference in accuracy", "clients", n, apart=apart, accuracy=0.8, trials=1000, draws=1000)


def trial(cell: Cell, random: np.random.Generator, seed: int) -> tuple[float, Interval]:
    """The truth, and the interval that one experiment gives for it."""
    if cell.figure == "difference in accuracy":
        confusion = _confusion(cell, random)
        return cell.apart, group_differences(confusion, None, draws=cell.draws, seed=seed)["accuracy"]
    if cell.unit == "seeds":
        shifts = random.normal(0.0, cell.between, cell.n)
        samples = [Sample(random.normal(shift, 1.0, CLIENTS), np.zeros(CLIENTS, int)) for shift in shifts]
        return 0.0, bootstrap(samples, mean_of, draws=cell.draws, seed=seed)
    if cell.unit == "test records":
        right = random.binomial(cell.n, cell.accuracy) / cell.n
        sample = Sample(np.array([right]), np.zeros(1, int), np.array([cell.n]), np.zeros(1, int))
        return cell.accuracy, bootstrap([sample], mean_of, draws=cell.draws, seed=seed)
    if cell.figure == "mean":
        sample = Sample(random.normal(size=cell.n), np.zeros(cell.n, int))
        return 0.0, bootstrap([sample], mean_of, draws=cell.draws, seed=seed)
    group = np.repeat(np.arange(GROUPS), cell.n)
    sample = Sample(random.normal(np.where(group == GROUPS - 1, -cell.apart, 0.0)), group)
    truth, statistic = (cell.apart, gap_of) if cell.figure == "gap" else (-cell.apart, worst_group_of)
    return truth, bootstrap([sample], statistic, draws=cell.draws, seed=seed)


def _confusion(cell: Cell, random: np.random.Generator) -> pd.DataFrame:
    """Clients with as many records of either value, each with accuracies of its own."""
    parts = []
    for value, accuracy in (("a", cell.accuracy), ("b", cell.accuracy - cell.apart)):
        right = random.binomial(RECORDS, random.beta(BETA * accuracy, BETA * (1 - accuracy), cell.n))
        for predicted, n in ((1, right), (0, RECORDS - right)):
            columns = {"client": np.arange(cell.n), "value": value, "actual": 1, "predicted": predicted, "n": n}
            parts.append(pd.DataFrame(columns))
    return pd.concat(parts)


def measure(number: int, cell: Cell, trials: int) -> dict[str, object]:
    """One row of the table."""
    random = np.random.default_rng([FIRST_SEED, number])
    found = [trial(cell, random, FIRST_SEED + k) for k in range(trials)]
    covered = float(np.mean([interval.low <= truth <= interval.high for truth, interval in found]))
    figures = {
        "coverage": covered,
        "coverage_error": math.sqrt(covered * (1 - covered) / trials),
        "truth": found[0][0],
        "mean_value": np.mean([interval.value for _, interval in found]),
        "mean_width": np.mean([interval.high - interval.low for _, interval in found]),
    }
    rounded = {name: round(float(value), 4) for name, value in figures.items()}
    return asdict(cell) | {"trials": trials} | rounded | {"first_seed": FIRST_SEED, "commit": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few trials, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "interval-coverage.csv")
    arguments = parser.parse_args()
    rows = []
    for number, cell in enumerate(cells()):
        rows.append(measure(number, cell, 20 if arguments.quick else cell.trials))
        say(f"{cell}: {rows[-1]['coverage']}")
    pd.DataFrame(rows).to_csv(arguments.out, index=False, lineterminator="\n")
    say(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
