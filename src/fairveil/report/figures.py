"""The figures of a run. Each is a function of it, and gives None where the run has nothing of the kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fairveil.fairness import histogram
from fairveil.reading import Run
from fairveil.report.chart import (
    COLOURS,
    GREY,
    LONGEST,
    MOST_DRAWN,
    SHARES,
    Chart,
    as_percent,
    in_words,
    legend_below,
    new_axes,
    shape_of,
    shortened,
    style_of,
    styled,
)

MOST_LINES = 12  # groups that get a line of their own
MOST_MARKS = 3000


def scores_by_round(runs: Sequence[Run], title: str | None = None) -> Chart | None:
    """The main metric of every group over the rounds; several runs that differ in their seed give a band."""
    metric = runs[0].main
    return _by_round(
        runs, metric, key=f"{metric}-by-round", title=title or f"{metric.capitalize()} by group",
        caption=f"Of the served models on test records, by group of {_judged_by(runs[0])}.",
    )  # fmt: skip


def clipped_by_round(runs: Sequence[Run]) -> Chart | None:
    """The share of contributions that were longer than the clip norm, over the rounds."""
    metric = runs[0].metric
    if metric is not None and metric.radius is None:  # nothing is ever clipped
        return None
    what = (
        "Of the records' gradients (under client-level privacy: of the clients' updates), how many were longer than "
        "the clip norm. Near 100%: the clip decides the length of every step."
    )
    if metric is not None:
        what = (
            f"Of the steps of the clients that took part, how many were longer than the radius, {metric.radius:g}. "
            "Near 100%: the radius decides how far every client moves."
        )
    return _by_round(
        runs, "clipped", key="clipped-by-round", title="Share that was clipped", split="train",
        model=training_task(runs[0]),
        caption=f"{what} Near 0%: it could be smaller, and the noise with it. A diagnostic of the simulation, not "
        "released.",
    )  # fmt: skip


def signal_by_round(runs: Sequence[Run]) -> Chart | None:
    """The norm of what is not noise in a client's update, over that of the noise."""
    parameters = int(runs[0].facts.get("parameters", 0))
    return _by_round(
        runs, "signal_to_noise", key="signal-by-round", title="Signal to noise of one update", split="train",
        model=training_task(runs[0]),
        caption="The length of what is not noise in a client's update over the length of its noise, mean over the "
        f"group's clients. Below {(2 / max(parameters, 1)) ** 0.25:.2g} it cannot be told from 0 "
        f"({parameters:,} parameters). Averaging over k clients multiplies it by up to √k.",
    )  # fmt: skip


def client_dots(run: Run) -> Chart | None:
    """Every client's score in the last evaluated round, the worst first."""
    table = _last_scores(run)
    if table is None:
        return None
    metric, ascending = run.main, run.main == "accuracy"
    table = table.sort_values(metric, ascending=ascending, kind="stable").reset_index(drop=True)
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        for one in series_of(run):
            part, size = table[table["group"].isin(one.groups)], 26 if len(table) <= 60 else 10
            dots = axes.scatter(
                part.index + 1, part[metric], size, one.colour, marker=one.shape, linewidths=0, alpha=0.85,
                rasterized=len(table) > MOST_DRAWN,
            )  # fmt: skip
            if len(part):
                entries.append((dots, one.name))
        mean = float(table[metric].mean())
        line = axes.axhline(mean, color=GREY, linewidth=1, linestyle="--")
        axes.set_xlabel("clients, the worst first")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _metric_axis(axes, metric)
        legend_below(figure, [*entries, (line, f"mean {in_words(mean, metric)}")])
    marks = [
        (axes, number + 1, float(row[metric]), f"{row['name']} ({row['group']}): {in_words(row[metric], metric)}")
        for number, row in table.iterrows()
    ]
    n = table["n"].dropna()
    tests = f"; each tested on {ranged(n.min(), n.max())} records" if len(n) else ""
    return Chart(
        "clients", f"{metric.capitalize()} of every client",
        f"{len(table):,} clients in round {_last_round(run)}, one dot each{tests}.", figure, table, marks[:MOST_MARKS],
    )  # fmt: skip


def client_histogram(run: Run) -> Chart | None:
    """How many clients have which score: 40 bins, stacked by group."""
    table = _last_scores(run)
    if table is None:
        return None
    metric, values = run.main, table[run.main].to_numpy(dtype=float)
    edges = histogram(values, higher_is_better=metric == "accuracy")[1]
    groups = dict.fromkeys(run.clients["group"])
    counts = {g: np.histogram(table.loc[table["group"] == g, metric], edges)[0] for g in groups}
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        bottom = np.zeros(len(edges) - 1)
        for one in series_of(run):
            style: Any = {"hatch": one.hatch, "edgecolor": "white"}
            heights = np.sum([counts[group] for group in one.groups], axis=0)
            axes.bar(
                edges[:-1], heights, np.diff(edges), bottom, align="edge", color=one.colour, linewidth=0.4, **style
            )
            bottom = bottom + heights
            entries.append((Patch(facecolor=one.colour, **style), one.name))
        axes.set_ylabel("clients")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(metric)
        if metric == "accuracy":
            as_percent(axes, "x")
        legend_below(figure, entries)
    of = {f"clients of {name}": heights for name, heights in counts.items()}
    data = pd.DataFrame({"from": edges[:-1], "to": edges[1:], **of})
    marks = [
        (axes, float(a + b) / 2, float(n), f"{n:.0f} clients from {in_words(a, metric)} to {in_words(b, metric)}")
        for a, b, n in zip(edges[:-1], edges[1:], bottom, strict=True)
        if n
    ]
    caption = f"{len(table):,} clients in round {_last_round(run)}, 40 bins, by group."
    return Chart("histogram", f"How {metric} is spread over clients", caption, figure, data, marks)


class Series(NamedTuple):
    """Groups of clients that are drawn alike, and how."""

    name: str
    groups: Sequence[str]
    colour: str
    shape: str
    hatch: str


def series_of(run: Run) -> list[Series]:
    """One for each group, in the colours of all figures; of many groups the last are one."""
    groups = list(dict.fromkeys(run.clients["group"]))
    alone = groups if len(groups) <= MOST_LINES else groups[: MOST_LINES - 1]
    found = []
    for number, name in enumerate(alone):
        hatch = ("", "///", "...")[number // len(COLOURS) % 3]
        found.append(Series(name, [name], COLOURS[number % len(COLOURS)], shape_of(number), hatch))
    rest = groups[len(alone) :]
    return [*found, Series(f"{len(rest)} other groups", rest, GREY, ".", "")] if rest else found


def _by_round(
    runs: Sequence[Run], metric: str, *, key: str, title: str, caption: str, split: str = "test", model: str = "served"
) -> Chart | None:
    """Lines by group; with several runs (seeds) their mean, and a band from the lowest to the highest of them."""
    tables = [run.by_group(metric, split=split, model=model) for run in runs]
    tables = [table for table in tables if len(table) and table.size]
    if not tables:
        return None
    names = list(dict.fromkeys(name for table in tables for name in table.columns))
    last = pd.concat([table.ffill().iloc[-1] for table in tables], axis=1).mean(axis=1)
    worst_first = sorted(names, key=lambda name: last[name], reverse=metric not in ("accuracy", "signal_to_noise"))
    by_seed = pd.concat(tables).groupby(level="round")
    means, lows, highs, counts = by_seed.mean(), by_seed.min(), by_seed.max(), by_seed.count()
    shown = set(worst_first if len(names) <= MOST_LINES else worst_first[: MOST_LINES - 1])
    rows: list[pd.DataFrame] = []
    marks = []
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        for number, name in enumerate(names):
            mean = means[name].dropna()  # a round in which nobody of the group took part has none
            low, high, seeds = (part[name][mean.index] for part in (lows, highs, counts))
            style = style_of(number) if name in shown else {"color": GREY, "linewidth": 0.7}
            dot = "." if len(mean) < 40 and name in shown else ""
            (line,) = axes.plot(mean.index, mean, marker=dot, **style)
            if len(tables) > 1 and name in shown:
                axes.fill_between(mean.index, low, high, color=style["color"], alpha=0.16, linewidth=0)
            if name in shown:
                told = " (worst)" if name == worst_first[0] and len(names) > 1 and model == "served" else ""
                entries.append((line, shortened(name, LONGEST - len(told)) + told))
                marks += [
                    (axes, float(at), float(value), f"{name}, round {at}: {_with_span(value, a, b, metric)}")
                    for at, value, a, b in zip(mean.index, mean, low, high, strict=True)
                ]
            frame = {"group": name, "round": mean.index, "mean": mean, "low": low, "high": high}
            rows.append(pd.DataFrame(frame | {"seeds": seeds}))
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _metric_axis(axes, metric)
        legend_below(figure, entries)
    others = f" {len(names) - len(shown)} groups that do better are grey." if len(shown) < len(names) else ""
    if len(tables) > 1:
        caption += f" Lines: mean over {len(tables)} seeds; bands: from the lowest to the highest."
    step = max(1, len(marks) // MOST_MARKS)
    return Chart(key, title, caption + others, figure, pd.concat(rows, ignore_index=True), marks[::step])


def _metric_axis(axes: Axes, metric: str) -> None:
    axes.set_ylabel({"signal_to_noise": "signal / noise", "clipped": "clipped"}.get(metric, metric))
    if metric in SHARES:
        as_percent(axes)
    if metric != "accuracy":
        axes.set_ylim(bottom=0)
    else:  # a difference of a point is not to look like a chasm
        low, high = axes.get_ylim()
        middle = (low + high) / 2
        axes.set_ylim(max(-0.01, min(low, middle - 0.06)), min(1.01, max(high, middle + 0.06)))


def _with_span(value: float, low: float, high: float, metric: str) -> str:
    span = f" ({in_words(low, metric)} to {in_words(high, metric)})" if high > low else ""
    return in_words(value, metric) + span


def _last_scores(run: Run) -> pd.DataFrame | None:
    """One row for each client that was scored in the last evaluated round; None if nobody was."""
    values = run.scores(run.main)
    if values.empty or values.iloc[-1].isna().all():
        return None
    table = run.clients[["name", "group"]].copy()
    table.insert(0, "client", np.arange(len(table)))
    table[run.main] = values.iloc[-1].to_numpy()
    table["n"] = run.counts(run.main).iloc[-1].to_numpy()
    return table.dropna(subset=[run.main])


def _last_round(run: Run) -> int:
    return int(run.scores(run.main).index[-1])


def _judged_by(run: Run) -> str:
    return "clients" if run.attribute is None else f"records by {run.attribute}"


def training_task(run: Run) -> str:
    """The task in which clients train: the one that tells how much it has clipped."""
    models = run.measured("clipped")
    return models[0] if models else "local_update"


def ranged(low: float, high: float) -> str:
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
