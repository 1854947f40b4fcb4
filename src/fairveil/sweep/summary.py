"""What the runs of a sweep say together, and the folder of a sweep, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fairveil.comparison import compare, over_seeds
from fairveil.config import read_toml
from fairveil.serving import PERSONAL
from fairveil.sweep.config import Cell, Sweep, make_sweep
from fairveil.sweep.results import Composed, main_metric, make_table, plain_rows, read_result

MEASURES = ("mean", "worst_group", "worst_10_percent")  # of the main metric, which variants are compared by
PERSONAL_MEASURES = ("mean", "worst_10_percent")  # the same, of models that clients have for themselves
BETWEEN_GROUPS = (": demographic parity", ": equalised odds", ": equal opportunity")  # so are these, of any attribute
BUDGETS = ("budget_median", "budget_maximum")  # of metric privacy: no measure of quality


@dataclass(frozen=True)
class CellFailure:
    """A run that failed, and where all that is known of it is written."""

    cell: str
    error: str
    log: Path


@dataclass(frozen=True)
class SweepResult:
    """A sweep whose runs are all finished or failed."""

    folder: Path
    table: pd.DataFrame  # one row for each run
    means: pd.DataFrame  # over seeds, for each setting
    comparison: pd.DataFrame  # with the baseline, over the seeds that both have finished; empty without one
    metrics: tuple[str, ...]  # which the means and the comparison are of; several if datasets differ in kind
    failures: tuple[CellFailure, ...]
    skipped: int  # runs that were finished before
    composed: Composed
    others: int  # runs begun in the folder that are not among the finished ones

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite epsilon is the string "infinity"."""
        finished = int((self.table["status"] == "finished").sum())
        return {
            "folder": str(self.folder),
            "cells": {
                "total": len(self.table),
                "finished": finished,
                "failed": len(self.failures),
                "skipped": self.skipped,
            },
            "rows": plain_rows(self.table),
            "means": plain_rows(self.means),
            "comparison": plain_rows(self.comparison),
            "failures": [vars(failure) | {"log": str(failure.log)} for failure in self.failures],
            "composed": self.composed.to_json(),
        }


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep, finished or not, as it is at the moment of reading."""

    sweep: Sweep
    folders: Mapping[Cell, Path]
    result: SweepResult
    errors: Mapping[Cell, str]  # of runs that failed


def read_sweep(folder: Path) -> SweepFolder:
    """Read a sweep. Nothing is locked or written.

    Raises:
        UserError: it is not the folder of a sweep, or its config can no longer be read.
    """
    sweep = make_sweep(read_toml(folder / "sweep.toml", "the folder of a sweep: it holds sweep.toml"))
    folders = cell_folders(sweep, folder)
    results = {c: found for c, at in folders.items() if (found := read_result(at, c.digest)) is not None}
    failed = {cell: at / "failure.txt" for cell, at in folders.items() if cell not in results}
    errors = {cell: path.read_text().strip() for cell, path in failed.items() if path.exists()}
    return SweepFolder(sweep, folders, summarise_sweep(sweep, folder, folders, results, errors, len(results)), errors)


def cell_folders(sweep: Sweep, folder: Path) -> dict[Cell, Path]:
    """Where each run of a sweep is, or will be."""
    begun = _begun(folder)
    return {
        cell: begun.get(cell.digest[:8], folder / "cells" / f"{cell.label}-{cell.digest[:8]}") for cell in sweep.cells
    }


def _begun(folder: Path) -> dict[str, Path]:
    """The runs begun in the folder of a sweep, under whatever label, by the start of their hash."""
    return {path.name[-8:]: path for path in folder.glob("cells/*")}


def summarise_sweep(
    sweep: Sweep, folder: Path, folders: Mapping[Cell, Path], results: Mapping[Cell, Mapping[str, Any]],
    errors: Mapping[Cell, str], kept: int,
) -> SweepResult:  # fmt: skip
    """What the finished runs say.

    Args:
        errors: why runs failed, at length.
        kept: runs that were finished before.
    """
    heads = {cell: (text.splitlines() or ["no reason was given"])[0] for cell, text in errors.items()}
    table, keys, config = make_table(sweep, results, heads), sweep.keys, sweep.config
    finished = [results[cell] for cell in sweep.cells if cell in results]
    metrics = tuple(dict.fromkeys(map(main_metric, finished)))
    names = [(metric, f"{metric}_{figure}") for metric in metrics for figure in MEASURES]
    names += [
        (metric, f"{m}_{metric}_{figure}") for metric in metrics for m in PERSONAL for figure in PERSONAL_MEASURES
    ]
    measures = {name: metric == "accuracy" for metric, name in names if name in table}
    measures |= {name: False for name in table.columns if name.endswith(BETWEEN_GROUPS)}
    unfinished = {at for cell, at in folders.items() if cell not in results}
    others = set(_begun(folder).values()) - set(folders.values())  # of an earlier config of the sweep
    return SweepResult(
        folder=folder,
        table=table,
        means=over_seeds(table, keys, [*measures, *(name for name in BUDGETS if name in table)]),
        comparison=compare(table, keys, config.baseline or "", measures if config.baseline else {}),
        metrics=metrics,
        failures=tuple(CellFailure(str(cell), text, folders[cell] / "failure.txt") for cell, text in errors.items()),
        skipped=kept,
        composed=Composed.of(results),
        others=sum((at / "statement.json").exists() for at in others | unfinished),
    )
