"""The page of a sweep: its runs as a grid, what they say together, and every setting over the rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from fairveil.errors import RunFault, UserError
from fairveil.intervals import bootstrap, gap_of
from fairveil.options import shown
from fairveil.privacy.statement import rounded_up
from fairveil.reading import Run, load_run
from fairveil.report.chart import Chart, in_words
from fairveil.report.comparisons import MEASURES, NOISE, between_groups, frontier, over_budgets, paired_differences
from fairveil.report.figures import ranged, scores_by_round
from fairveil.report.page import Card, Cell, Page, Section, Table, Text, number, words
from fairveil.report.run_page import charts
from fairveil.report.tables import Judged
from fairveil.store import is_held
from fairveil.sweep import Cell as SweepCell
from fairveil.sweep import SweepFolder

HYPOTHESES = "algorithm.hypotheses"
MOST_SETTINGS = 24  # that get a figure of their own


def sweep_page(folder: SweepFolder) -> Page:
    """All there is to see of a sweep, finished or not."""
    sweep, result = folder.sweep, folder.result
    states = {cell: CellView.of(folder, cell) for cell in sweep.cells}
    compared = charts(
        lambda: over_budgets(sweep, result, "mean"), lambda: over_budgets(sweep, result, "worst_group"),
        lambda: frontier(sweep, result), lambda: paired_differences(sweep, result),
        *(partial(over_budgets, sweep, result, measure) for measure in between_groups(result)),
    )  # fmt: skip
    sections = [
        Section("verdict", "Verdict", _cards(folder), intro=result.composed.sentence(result.others)),
        Section("grid", "The runs", [_grid(folder, states)]),
        Section(
            "comparison", "What they say together", [*compared, *_budgets(folder), *_tables(folder), *_gaps(folder)]
        ),
        Section("settings", "Every setting over the rounds", _settings(folder)),
        Section("failures", "Failures", [Text(f.error, plain=True, heading=f.cell) for f in result.failures]),
        Section("reproduce", "How to have it again", _reproduce(folder)),
    ]
    finished = sum(view.status == "finished" for view in states.values())
    seeds = len(sweep.config.seeds)
    about = f"{len(sweep.cells)} runs: {len(sweep.cells) // seeds} settings, {seeds} seeds"
    running = sum(view.status == "running" for view in states.values())
    state = f"{finished} of {len(states)} finished, {running} running." if finished < len(states) else ""
    return Page(f"Sweep {sweep.name}", about, sections, state)


class CellView:
    """How far a run of the sweep is, and how it does."""

    def __init__(self, status: str, worst: float, epsilon: float | None, metric: str, rounds: str = "") -> None:
        self.status, self.worst, self.epsilon, self.metric, self.rounds = status, worst, epsilon, metric, rounds

    @classmethod
    def of(cls, folder: SweepFolder, cell: SweepCell) -> CellView:
        at = folder.folders[cell]
        held = is_held(at)
        try:
            run = load_run(at)
        except (UserError, RunFault):
            return cls("failed" if cell in folder.errors else "running" if held else "waiting", math.nan, None, "")
        found = run.by_group(run.main)
        last = found.iloc[-1] if len(found) else pd.Series(dtype=float)
        worst = math.nan if last.empty else float(last.min() if run.main == "accuracy" else last.max())
        status = "failed" if cell in folder.errors and not held else "running" if held else "stopped"
        status = "finished" if run.result is not None else status
        done = f"{len(run.rounds)} of {run.config['algorithm']['rounds']} rounds"
        epsilon = run.statement.get("epsilon")  # None: the statement is damaged, and its own page says so
        return cls(status, worst, None if epsilon is None else float(epsilon), run.main, done)

    def cell(self) -> Cell:
        mark = {"finished": "good", "failed": "bad", "running": "busy"}.get(self.status, "")
        parts = [self.status if self.status != "running" else f"running, {self.rounds}"]
        if not math.isnan(self.worst):
            parts.append(in_words(self.worst, self.metric))
        if self.epsilon is not None:
            parts.append(f"ε {rounded_up(self.epsilon)}")
        return Cell(" · ".join(parts), self.worst, mark)


def _cards(folder: SweepFolder) -> list[Card]:
    result = folder.result
    metric = result.metrics[0] if result.metrics else ""
    total, finished = len(result.table), int((result.table["status"] == "finished").sum())
    failed = len(result.failures)
    cards = [Card("Runs", f"{finished} of {total}", f"finished; {failed} failed", warn=failed > 0)]
    epsilon = result.composed.epsilon
    if epsilon is not None and finished:
        note = f"δ = {result.composed.delta or 0.0:g}, for whoever sees them all"
        cards.append(Card("All runs together", f"ε = {rounded_up(epsilon)}", note, warn=True))
    for measure, name in MEASURES.items():
        part = result.means[result.means["measure"] == f"{metric}_{measure}"].dropna(subset=["mean"])
        if len(part):
            best = part.loc[part["mean"].idxmax() if metric == "accuracy" else part["mean"].idxmin()]
            seeds = "1 seed" if best["n"] == 1 else f"{best['n']} seeds"
            note = f"{_setting(folder, best)}; n = {seeds}. Chosen by looking: too good by a little"
            cards.append(Card(f"Best {name}", in_words(float(best["mean"]), metric), note))
    return cards


def _setting(folder: SweepFolder, row: Any) -> str:
    keys = [f"{folder.sweep.short[key]} {row[key]}" for key in folder.sweep.keys]
    return ", ".join([str(row["variant"]), *keys])


def _grid(folder: SweepFolder, states: Mapping[SweepCell, CellView]) -> Table:
    """Settings down, seeds across."""
    sweep = folder.sweep
    rows: defaultdict[str, list[Cell]] = defaultdict(list)
    lead: dict[str, list[Cell]] = {}
    for cell in sweep.cells:
        values = (cell.point[key] for key in sweep.keys)
        lead.setdefault(cell.setting, [words(cell.variant), *(_value(value) for value in values)])
        rows[cell.setting].append(states[cell].cell())
    columns = ["variant", *(sweep.short[key] for key in sweep.keys), *(f"seed {seed}" for seed in sweep.config.seeds)]
    caption = "Of every run: its state, the worst group's score so far, and the epsilon that is guaranteed."
    return Table("cells", caption, columns, [lead[setting] + row for setting, row in rows.items()])


def _value(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:g}", float(value))
    return words(value if isinstance(value, str) else shown(value))


def _budgets(folder: SweepFolder) -> list[Table]:
    """Under metric privacy, what the clients have spent: median and maximum, as in Table 2 of Galli et al. (2023)."""
    sweep, table = folder.sweep, folder.result.table
    if not {"budget_median", "budget_maximum"} <= set(table.columns):
        return []
    found = table.dropna(subset=["budget_median"])
    settings = {
        key if isinstance(key, tuple) else (key,): part
        for key, part in found.groupby(["variant", *sweep.keys], sort=False)
    }
    if set(sweep.keys) == {NOISE, HYPOTHESES} and table["variant"].nunique() == 1:
        noises, counts = (sorted(table[key].unique()) for key in (NOISE, HYPOTHESES))
        (variant,) = table["variant"].unique()
        columns = ["noise multiplier", *(f"{k} {'hypothesis' if k == 1 else 'hypotheses'}" for k in counts)]
        places = [[{NOISE: noise, HYPOTHESES: count} for count in counts] for noise in noises]
        rows = [
            [
                _value(float(row[0][NOISE])),
                *(_spent(settings.get((variant, *(at[k] for k in sweep.keys)))) for at in row),
            ]
            for row in places
        ]
    else:
        columns = ["variant", *(sweep.short[key] for key in sweep.keys), "median, maximum"]
        rows = [[words(name), *map(_value, point), _spent(part)] for (name, *point), part in settings.items()]
    seeds = [len(part) for part in settings.values()] or [0]
    caption = (
        "What the clients have spent, median and maximum over all of them, mean over seeds "
        f"(n = {ranged(min(seeds), max(seeds))}). Counted as Galli et al. (2023) do, at the distance of the radius; "
        "what each run guarantees is in the table of the runs. A dash: no noise, and no bound."
    )
    return [Table("budgets", caption, columns, rows)]


def _spent(part: pd.DataFrame | None) -> Cell:
    """Median and maximum of the runs of a setting, in one cell."""
    if part is None:
        return Cell("", math.nan)
    median, most = float(part["budget_median"].mean()), float(part["budget_maximum"].mean())
    return Cell(", ".join("–" if math.isinf(most) else f"{value:,.4g}" for value in (median, most)), median)


def _tables(folder: SweepFolder) -> list[Table]:
    """Means and paired differences, every one with its n."""
    sweep, result = folder.sweep, folder.result
    keys = [sweep.short[key] for key in sweep.keys]
    means = [
        [
            words(row["variant"]), *(_value(row[key]) for key in sweep.keys), words(_measure(row["measure"])),
            number(row["mean"]), Cell(_interval(row), row["low"]), number(float(row["n"]), ".0f"),
        ]
        for _, row in result.means.dropna(subset=["mean"]).iterrows()
    ]  # fmt: skip
    differences = [
        [
            words(row["variant"]), *(_value(row[key]) for key in sweep.keys), words(_measure(row["measure"])),
            number(row["difference"], "+.3f"), Cell(_interval(row, "+.3f"), row["low"]),
            words(f"{row['better']} of {row['n']}"),
        ]
        for _, row in result.comparison.dropna(subset=["difference"]).iterrows()
    ]  # fmt: skip
    tables = []
    if means:
        columns = ["variant", *keys, "of", "mean", "95% interval", "seeds"]
        tables.append(Table("means", "Mean over seeds, with Student's t interval.", columns, means))
    if differences:
        columns = ["variant", *keys, "of", "difference", "95% interval", "better in"]
        caption = f"Difference to {sweep.config.baseline}, seed by seed."
        tables.append(Table("paired", caption, columns, differences))
    return tables


def _measure(measure: str) -> str:
    return measure.replace("_", " ").replace(" percent", "%")


def _interval(row: Any, form: str = ".3f") -> str:
    return "" if pd.isna(row["low"]) else f"{format(row['low'], form)} to {format(row['high'], form)}"


def _settings(folder: SweepFolder) -> list[Chart | Text]:
    """Scores by group over the rounds, a figure for each setting, with bands over its seeds."""
    by_setting = _runs(folder)
    blocks: list[Chart | Text] = []
    for place, (setting, runs) in enumerate(list(by_setting.items())[:MOST_SETTINGS]):
        chart = scores_by_round(runs, setting)
        if chart is not None:
            blocks.append(replace(chart, key=f"setting-{place}"))
    drawn = [axes for block in blocks if isinstance(block, Chart) for axes in block.figure.axes]
    for axes in drawn:  # the same scale for all: they are there to be compared
        axes.set_ylim(min(other.get_ylim()[0] for other in drawn), max(other.get_ylim()[1] for other in drawn))
    if len(by_setting) > MOST_SETTINGS:
        blocks.append(Text(f"The first {MOST_SETTINGS} of {len(by_setting)} settings are shown."))
    return blocks


def _runs(folder: SweepFolder) -> dict[str, list[Run]]:
    """The runs of each setting, as far as they have begun."""
    by_setting: defaultdict[str, list[Run]] = defaultdict(list)
    for cell in folder.sweep.cells:
        with suppress(UserError, RunFault):
            run = load_run(folder.folders[cell])
            by_setting[cell.setting].append(run)  # of a setting that has one
    return by_setting


def _gaps(folder: SweepFolder) -> list[Table]:
    """The gap between groups of every setting whose runs are finished, with an interval over seeds and clients."""
    rows = []
    for setting, runs in _runs(folder).items():
        judged = [found for run in runs if run.result is not None and (found := Judged.of(run)) is not None]
        if judged and len(judged[0].names) > 1:
            gap = bootstrap([one.sample for one in judged], gap_of)
            interval = "" if math.isnan(gap.low) else f"{gap.low:.3f} to {gap.high:.3f}"
            rows.append([words(setting), number(gap.value), Cell(interval, gap.low), words(f"{gap.n} {gap.unit}")])
    caption = (
        "Gap between the best and the worst group of clients, mean over seeds. Intervals: bootstrap over seeds, then "
        "over what each of them drew; of few seeds they are too narrow, and a gap is never below 0."
    )
    return [Table("gaps", caption, ["setting", "gap", "95% interval", "n"], rows)] if rows else []


def _reproduce(folder: SweepFolder) -> list[Text]:
    table = folder.result.table
    done = table[table["status"] == "finished"]

    def all_of(column: str) -> str:
        return ", ".join(sorted(set(done[column].dropna().astype(str)))) or "none"

    lines = [f"commit: {all_of('commit')}", f"fairveil: {all_of('fairveil')}"]
    lines += [f"data (published hashes): {all_of('data_fingerprint')}"]
    hashes = "\n".join(
        f"{row['config_hash']}  {_setting(folder, row)}, seed {row['seed']}: guarantees {rounded_up(row['epsilon'])}"
        for _, row in done.iterrows()
    )
    return [
        Text("fairveil sweep sweep.toml", plain=True, heading="Command"),
        Text("\n".join(lines), plain=True, heading="Made from"),
        Text(hashes or "none is finished", plain=True, heading="Config hashes"),
        Text(folder.sweep.config.to_toml(), plain=True, heading="Config (sweep.toml)"),
    ]
