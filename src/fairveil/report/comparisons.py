"""The figures of a sweep: what a budget buys, who pays for it, and whether a difference is more than the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fairveil.options import shown
from fairveil.report.chart import (
    COLOURS,
    GREY,
    Chart,
    as_percent,
    in_words,
    kept_within,
    legend_below,
    new_axes,
    shape_of,
    shortened,
    slug,
    style_of,
    styled,
)
from fairveil.sweep import Sweep, SweepResult
from fairveil.sweep.summary import BETWEEN_GROUPS

BUDGET, NOISE = "privacy.epsilon", "privacy.noise_multiplier"
MEASURES = {"mean": "mean", "worst_group": "worst group"}


def over_budgets(sweep: Sweep, result: SweepResult, measure: str) -> Chart | None:
    """A measure against epsilon (or the noise, or the first key of the grid with numbers), a line for each setting.

    Args:
        measure: one of MEASURES, of the main metric; or a difference between groups, as the results have it.
    """
    metric, key = result.metrics[0] if result.metrics else "", _across(sweep)
    named = f"{MEASURES[measure]} {metric}" if measure in MEASURES else _difference_named(measure)
    column, metric = (f"{metric}_{measure}", metric) if measure in MEASURES else (measure, "")
    part = result.means[result.means["measure"] == column].dropna(subset=["mean"])
    if key is None or part.empty:
        return None
    others, across = [other for other in sweep.keys if other != key], sweep.short[key].replace("_", " ")
    part = part.assign(line=[_label(row, others, sweep) for _, row in part.iterrows()])
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        marks = []
        for number, (name, line) in enumerate(part.groupby("line", sort=False)):
            line = line.sort_values(key)
            style, x = style_of(number), line[key].to_numpy(dtype=float)
            half = ((line["high"] - line["low"]) / 2).to_numpy(dtype=float)
            look: Any = style | {"marker": shape_of(number), "markersize": 5, "capsize": 3, "elinewidth": 1.1}
            drawn, *_ = axes.errorbar(x, line["mean"], half, **look)
            entries.append((drawn, str(name)))
            marks += [
                (axes, float(at), row["mean"], f"{name}, {across} {at:g}: {_told(row, metric)}")
                for at, (_, row) in zip(x, line.iterrows(), strict=True)
            ]
        _scaled(axes, sorted(part[key].unique()))
        axes.set_xlabel(shortened(across, 60))
        axes.set_ylabel(shortened(named, 44))
        if metric == "accuracy":
            as_percent(axes)
        kept_within(axes, "y", *_ends(metric))
        legend_below(figure, entries)
    lower = "" if measure in MEASURES else " 0: no difference by this measure; it is never below."
    caption = f"Mean over seeds with its 95% interval (Student's t; {_counts(part)}).{lower}"
    title = f"{named[0].upper()}{named[1:]} against {across}"
    data = part[["variant", *sweep.keys, "n", "mean", "low", "high"]]
    return Chart(slug(f"{measure}-by-{sweep.short[key]}"), title, caption, figure, data, marks)


def _ends(metric: str) -> tuple[float, float]:
    """Between which values can be: errors are at least 0, accuracies (and differences of rates) at most 1, too."""
    return (0.0, math.inf) if metric == "rmse" else (-0.02, 1.02)


def between_groups(result: SweepResult) -> list[str]:
    """The differences between groups that the runs were judged by: demographic parity, equalised odds, ..."""
    return [name for name in dict.fromkeys(result.means["measure"]) if str(name).endswith(BETWEEN_GROUPS)]


def _difference_named(measure: str) -> str:
    """ "sex: equalised odds" in the words of an axis; clients are told apart by their groups."""
    of, _, what = measure.rpartition(": ")
    return f"{what} difference" + ("" if of == "clients" else f" by {of}")


def _scaled(axes: Axes, values: Sequence[float]) -> None:
    """Ticks at the values; in proportion where they go far, with room for a 0."""
    above = [value for value in values if value > 0]
    if len(above) > 1 and max(above) / min(above) > 4 and min(values) >= 0:
        if len(above) == len(values):
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=min(above), linscale=0.6)
    axes.xaxis.set_major_locator(FixedLocator([float(value) for value in values]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{value:g}" for value in values])


def frontier(sweep: Sweep, result: SweepResult) -> Chart | None:
    """Mean against worst group, a point for each setting; the line joins those that nobody beats in both."""
    metric = result.metrics[0] if result.metrics else ""
    wide = _both(sweep, result, metric)
    if wide is None:
        return None
    better = 1 if metric == "accuracy" else -1
    values = better * wide[["mean_mean", "mean_worst"]].to_numpy()
    front = [i for i, v in enumerate(values) if not ((values >= v).all(axis=1) & (values > v).any(axis=1)).any()]
    variants = list(dict.fromkeys(wide["variant"]))
    with styled():
        figure, axes = new_axes(4.0)
        entries: list[tuple[Artist, str]] = []
        for number, name in enumerate(variants):
            part = wide[wide["variant"] == name]
            drawn, *_ = axes.errorbar(
                part["mean_mean"], part["mean_worst"], part["half_worst"], part["half_mean"], linestyle="", capsize=2,
                marker=shape_of(number), color=COLOURS[number % len(COLOURS)], markersize=6,
            )  # fmt: skip
            entries.append((drawn, name))
        best = wide.iloc[front].sort_values("mean_mean")
        (line,) = axes.plot(best["mean_mean"], best["mean_worst"], color=GREY, linestyle="--", linewidth=1, zorder=0)
        low = min(axes.get_xlim()[0], axes.get_ylim()[0])
        high = max(axes.get_xlim()[1], axes.get_ylim()[1])
        (equal,) = axes.plot([low, high], [low, high], color="#c8c8c8", linewidth=0.8, zorder=0)
        axes.set_xlabel(f"mean {metric}")
        axes.set_ylabel(f"worst group {metric}")
        for which in "xy":
            if metric == "accuracy":
                as_percent(axes, which)
            kept_within(axes, which, *_ends(metric))
        legend_below(figure, [*entries, (line, "not beaten in both"), (equal, "no gap")])
    marks = [
        (axes, row["mean_mean"], row["mean_worst"], f"{row['setting']}: mean {mean}, worst group {worst}")
        for _, row in wide.iterrows()
        for mean, worst in [(in_words(row["mean_mean"], metric), in_words(row["mean_worst"], metric))]
    ]
    data = wide.assign(not_beaten=[i in front for i in range(len(wide))]).drop(columns="setting")
    caption = (
        f"Every setting of the sweep, mean over seeds with its 95% intervals ({_counts(wide)}). On the thin line all "
        "groups are served alike."
    )
    return Chart("frontier", "Fairness and accuracy", caption, figure, data, marks)


def paired_differences(sweep: Sweep, result: SweepResult) -> Chart | None:
    """Every variant minus the baseline, seed by seed, with the interval of the mean difference."""
    metric = result.metrics[0] if result.metrics else ""
    wanted = {f"{metric}_{measure}": name for measure, name in MEASURES.items()}
    part = result.comparison[result.comparison["measure"].isin(wanted)].dropna(subset=["difference"])
    if part.empty:
        return None
    names = [_label(row, sweep.keys, sweep) for _, row in part.iterrows()]
    rows = list(dict.fromkeys(names))
    with styled():
        figure, axes = new_axes(max(2.6, 1.4 + 0.42 * len(rows)))
        entries: list[tuple[Artist, str]] = []
        marks = []
        for number, (measure, told) in enumerate(wanted.items()):
            named = zip(names, part.iterrows(), strict=True)
            lines = [(name, row) for name, (_, row) in named if row["measure"] == measure]
            y = np.array([rows.index(name) for name, _ in lines]) + (number - 0.5) * 0.3
            x = np.array([row["difference"] for _, row in lines])
            half = np.array([(row["high"] - row["low"]) / 2 for _, row in lines])
            drawn, *_ = axes.errorbar(
                x, y, xerr=half, linestyle="", marker=shape_of(number), color=COLOURS[number], capsize=3, markersize=5
            )
            entries.append((drawn, told))
            marks += [
                (axes, float(at), float(up), f"{name}, {told}: {_difference(row, metric)}")
                for at, up, (name, row) in zip(x, y, lines, strict=True)
            ]
        axes.axvline(0, color="#000000", linewidth=1)
        axes.set_yticks(range(len(rows)), [shortened(name, 34) for name in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(f"{metric} minus that of {shortened(str(sweep.config.baseline))}")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if metric == "accuracy":
            as_percent(axes, "x")
            kept_within(axes, "x", -1.02, 1.02)
        legend_below(figure, entries)
    caption = (
        "Seed by seed, so that what a split does to both cancels. Bars: 95% interval of the mean difference (Student's "
        f"t; {_counts(part)}). Where a bar crosses 0, the seeds do not tell them apart."
    )
    data = part.drop(columns="better")
    return Chart("differences", f"Compared with {sweep.config.baseline}", caption, figure, data, marks)


def _across(sweep: Sweep) -> str | None:
    """The key of the grid that goes across: the budget, the noise, or the first that holds numbers."""
    numeric = [
        key
        for key, values in sweep.config.grid.items()
        if len(values) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    ]
    return next(iter([*(key for key in (BUDGET, NOISE) if key in numeric), *numeric]), None)


def _label(row: Any, keys: Sequence[str], sweep: Sweep) -> str:
    """A setting in a few words."""
    alone = 1 if keys else 0  # a single variant says nothing by its name, if there is something else to tell apart
    named = [str(row["variant"])] if len(sweep.config.variants) > alone else []
    values = [f"{sweep.short[k]} {row[k] if isinstance(row[k], str) else shown(_plain(row[k]))}" for k in keys]
    return ", ".join([*named, *values]) or sweep.name


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _both(sweep: Sweep, result: SweepResult, metric: str) -> pd.DataFrame | None:
    """Mean and worst group of every setting side by side."""
    parts = []
    for measure, name in (("mean", "mean"), ("worst_group", "worst")):
        part = result.means[result.means["measure"] == f"{metric}_{measure}"].dropna(subset=["mean"])
        part = part.assign(half=(part["high"] - part["low"]) / 2).drop(columns=["measure", "deviation"])
        parts.append(part.rename(columns={k: f"{k}_{name}" for k in ("mean", "half", "low", "high")}))
    if parts[0].empty:
        return None
    wide = parts[0].merge(parts[1].drop(columns="n"), on=["variant", *sweep.keys])
    return wide.assign(setting=[_label(row, sweep.keys, sweep) for _, row in wide.iterrows()])


def _told(row: Any, metric: str) -> str:
    interval = "" if pd.isna(row["low"]) else f" ({in_words(row['low'], metric)} to {in_words(row['high'], metric)})"
    return f"{in_words(row['mean'], metric)}{interval}, n = {row['n']}"


def _difference(row: Any, metric: str) -> str:
    scale, unit = (100, " points") if metric == "accuracy" else (1, "")
    interval = "" if pd.isna(row["low"]) else f" ({scale * row['low']:+.2f} to {scale * row['high']:+.2f})"
    return f"{scale * row['difference']:+.2f}{unit}{interval}, n = {row['n']}"


def _counts(part: pd.DataFrame) -> str:
    low, high = int(part["n"].min()), int(part["n"].max())
    if high == 1:
        return "n = 1 seed, which gives no interval"
    return f"n = {high if low == high else f'{low} to {high}'} seeds"
