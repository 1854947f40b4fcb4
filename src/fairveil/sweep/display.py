"""What a person sees of a sweep: a grid while it runs, tables at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fairveil.options import shown
from fairveil.sweep.config import Cell, Sweep
from fairveil.sweep.runner import CellState
from fairveil.sweep.summary import SweepResult

SIGNS = {"waiting": "·", "running": "▸", "finished": "✓", "kept": "✓", "failed": "✗"}
STYLES = {"waiting": "dim", "running": "cyan", "finished": "green", "kept": "green", "failed": "bold red"}
ENDS = ("finished", "kept", "failed")
CELL_WIDTH = 10  # of a run in the grid, with its borders
LINES = 8  # of the screen that the grid does not use: title, head, borders, totals, the prompt


class Display:
    """The progress of a sweep: a live grid on a terminal, else one line for each run that ends."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self.sweep, self.console = sweep, console
        self.states = {cell: CellState("waiting") for cell in sweep.cells}
        self.rows: dict[str, list[Cell]] = {}
        for cell in sweep.cells:
            values = (f"{sweep.short[key]} {shown(value)}" for key, value in cell.point.items())
            self.rows.setdefault(", ".join([cell.variant, *values]), []).append(cell)
        self.started = time.monotonic()
        self.live = Live(console=console, get_renderable=self.render, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, cell: Cell, state: CellState) -> None:
        """Take the state of a run."""
        self.states[cell] = state
        if self.live or state.status not in ("finished", "failed"):
            return
        ended = sum(other.status in ENDS for other in self.states.values())
        what = state.error if state.status == "failed" else f"worst group {state.worst:.3f}"
        self.console.print(f"[{ended}/{len(self.states)}] {state.status}: {cell}: {what}", markup=False, soft_wrap=True)

    def render(self) -> Group:
        """The grid, as much of it as fits the screen."""
        seeds = self.sweep.config.seeds
        label = max(len(row) for row in self.rows)
        wide = label + CELL_WIDTH * len(seeds) < self.console.width
        fits = max(1, self.console.height - LINES)
        # those with something under way before all others, in the order of the sweep
        rows = sorted(self.rows, key=lambda row: not self._under_way(row))[:fits]
        table = Table(title=f"{self.sweep.name}: worst group", title_justify="left")
        table.add_column("setting", overflow="ellipsis", no_wrap=True)
        for seed in seeds if wide else ["seeds"]:
            table.add_column(f"seed {seed}" if wide else "seeds", justify="right" if wide else "left")
        for row in [row for row in self.rows if row in rows]:
            cells = [self._show(self.states[cell], wide) for cell in self.rows[row]]
            table.add_row(row, *(cells if wide else [Text.assemble(*cells)]))
        more = len(self.rows) - len(rows)
        return Group(table, *([f"... and {more} more rows"] if more else []), self._totals())

    def _under_way(self, row: str) -> bool:
        return any(self.states[cell].status == "running" for cell in self.rows[row])

    def _show(self, state: CellState, wide: bool) -> Text:
        text = SIGNS[state.status]
        if wide and state.status == "running" and state.rounds:
            text = f"{state.round}/{state.rounds}"
        elif wide and state.worst is not None:
            text = f"{state.worst:.3f}"
        elif wide and state.status == "failed":
            text = "failed"
        return Text(text, style=STYLES[state.status])

    def _totals(self) -> str:
        count = dict.fromkeys(SIGNS, 0)
        for state in self.states.values():
            count[state.status] += 1
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        before = f" ({count['kept']} of them before)" if count["kept"] else ""
        return (
            f"{count['finished'] + count['kept']} of {len(self.states)} finished{before}, {count['running']} running, "
            f"{count['waiting']} waiting, {count['failed']} failed, {minutes}:{seconds:02d}"
        )


def print_sweep(result: SweepResult, sweep: Sweep, console: Console) -> None:
    """Means and comparison with their intervals, failures, the folder, and what it all costs."""
    keys = list(sweep.short.values())
    measures = list(dict.fromkeys(result.means["measure"]))
    if measures:
        title = f"{sweep.name}: {' and '.join(result.metrics)} over seeds, mean and 95% interval"
        table = _table(title, ["variant", *keys], ["n", *(_figure(measure, result) for measure in measures)])
        for setting, part in result.means.groupby(["variant", *sweep.keys], sort=False):
            cells = [_plus_minus(row["mean"], row["low"], row["high"]) for _, row in part.iterrows()]
            table.add_row(*_words(setting), str(part["n"].max()), *cells)
        console.print(table)
    _print_comparison(result, sweep, console)
    for failure in result.failures:
        lines = failure.error.splitlines()
        console.print(Text(f"Failed: {failure.cell}", style="bold red"))
        console.print("\n".join(f"  {line}" for line in [*lines[:4], str(failure.log)]), markup=False, soft_wrap=True)
    if result.failures:
        console.print("The same command tries them again.")
    console.print(f"Sweep folder: {result.folder} (results.csv, comparison.csv)", markup=False, soft_wrap=True)
    console.print(f"Privacy: {result.composed.sentence(result.others)}", markup=False, soft_wrap=True)


def _print_comparison(result: SweepResult, sweep: Sweep, console: Console) -> None:
    baseline, others = sweep.config.baseline, len(sweep.config.variants) - 1
    if baseline is None or others < 1 or result.comparison.empty:
        why = "there are no other variants" if others < 1 else "baseline is not set"
        console.print(f"No comparison: {why if baseline is None or others < 1 else 'nothing is finished'}.")
        return
    keys = list(sweep.short.values())
    title = f"{' and '.join(result.metrics)} compared with {baseline}, seed by seed"
    table = _table(title, ["variant", *keys, ""], ["n", "difference", "95% interval", "better"])
    for _, row in result.comparison.iterrows():
        interval = "" if math.isnan(row["low"]) else f"{row['low']:+.3f} to {row['high']:+.3f}"
        difference = "" if math.isnan(row["difference"]) else f"{row['difference']:+.3f}"
        table.add_row(
            *_words([row["variant"], *(row[key] for key in sweep.keys)]), _figure(row["measure"], result),
            str(row["n"]), difference, interval, f"{row['better']} of {row['n']}",
        )  # fmt: skip
    console.print(table)


def _figure(measure: str, result: SweepResult) -> str:
    """ "accuracy_worst_group" under a title that names the metric, if that is the only one."""
    known = f"{result.metrics[0]}_" if len(result.metrics) == 1 else ""
    return measure.removeprefix(known).replace("_", " ").replace(" percent", "%")


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _words(values: Sequence[Any]) -> list[str]:
    return [value if isinstance(value, str) else shown(value) for value in values]


def _plus_minus(mean: float, low: float, high: float) -> str:
    if math.isnan(mean):
        return ""
    return f"{mean:.3f}" if pd.isna(low) else f"{mean:.3f} ± {(high - low) / 2:.3f}"
