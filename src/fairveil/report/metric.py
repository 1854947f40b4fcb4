"""The figures of a run under metric privacy: what its clients have spent, and how long their steps are.

Budgets are counted as Galli, Jung, Biswas, Palamidessi and Cucinotta have it, "Advancing Personalized Federated
Learning: Group Privacy, Fairness, and Beyond" (2023), Figures 2 and 4: epsilon at the distance of the radius, summed
over all times that a client took part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullLocator

from fairveil.privacy.statement import MetricTerms, rounded_up
from fairveil.reading import Run
from fairveil.report.chart import DASHES, Chart, legend_below, new_axes, style_of, styled
from fairveil.report.figures import MOST_MARKS, ranged, series_of, training_task

BINS = 40
BLACK = "#000000"


def metric_budget_by_round(run: Run) -> Chart | None:
    """The largest budget that any client of a group has spent up to each round, and the median over all clients."""
    spent = _cumulative(run)
    if spent is None:
        return None
    group, rounds = run.clients["group"], spent.index.to_numpy()
    lines: list[tuple[str, pd.Series, int, dict[str, Any]]] = []
    for number, one in enumerate(several := series_of(run)):
        inside = group.isin(one.groups).to_numpy()
        behind = min(3, len(several) - 1 - number)  # lines often lie upon each other: those below are wider
        style = style_of(number) | {"color": one.colour, "linewidth": 1.8 + 1.6 * behind}
        lines.append((one.name, spent.loc[:, inside].max(axis=1), int(inside.sum()), style))
    median = spent.median(axis=1)
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        marks = []
        for name, largest, clients, style in lines:
            (drawn,) = axes.plot(rounds, largest, marker="." if len(rounds) < 40 else "", **style)
            entries.append((drawn, name))
            marks += [
                (axes, float(at), float(value), f"{name}, round {at}: at most {value:.4g} (n = {clients:,} clients)")
                for at, value in largest.items()
            ]
        (drawn,) = axes.plot(
            rounds, median, color=BLACK, linestyle="--", linewidth=1.2, clip_on=False
        )  # it may lie on the axis
        entries.append((drawn, "median of all"))
        marks += [
            (axes, float(at), float(value), f"median of {len(group):,} clients, round {at}: {value:.4g}")
            for at, value in median.items()
        ]
        _rounds_across(axes)
        axes.set_ylabel("epsilon at the radius")
        axes.set_ylim(bottom=0)
        legend_below(figure, entries)
    columns = [(name, "largest", largest, clients) for name, largest, clients, _ in lines]
    columns.append(("all", "median", median, len(group)))
    data = pd.concat(
        [
            pd.DataFrame({"group": name, "what": what, "round": rounds, "epsilon": values, "clients": clients})
            for name, what, values, clients in columns
        ],
        ignore_index=True,
    )
    caption = (
        f"The largest budget of any client in a group after each round, and the median over all {len(group):,} "
        f"clients. A line is level while those that have spent most are not drawn. {_counted(run)}"
    )
    step = max(1, len(marks) // MOST_MARKS)
    return Chart("metric-budget", "Largest budget of a client, by group", caption, figure, data, marks[::step])


def metric_budget_histogram(run: Run) -> Chart | None:
    """How the budgets are spread over the clients so far, with their median and maximum."""
    spent, terms = _cumulative(run), run.metric
    if spent is None or terms is None:
        return None
    budgets = spent.iloc[-1].to_numpy()
    each, most = terms.at_radius / terms.participations, float(budgets.max())
    times = round(most / each)
    few = times < BINS  # then a bar for each number of times
    edges = each * (np.arange(times + 2) - 0.5) if few else np.linspace(0, most, BINS + 1)
    group = run.clients["group"]
    counts = {g: np.histogram(budgets[(group == g).to_numpy()], edges)[0] for g in dict.fromkeys(group)}
    median = float(np.median(budgets))
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        bottom = np.zeros(len(edges) - 1)
        for one in series_of(run):
            look: Any = {"hatch": one.hatch, "edgecolor": "white"}
            heights = np.sum([counts[name] for name in one.groups], axis=0)
            axes.bar(edges[:-1], heights, np.diff(edges), bottom, align="edge", color=one.colour, linewidth=0.4, **look)
            bottom = bottom + heights
            entries.append((Patch(facecolor=one.colour, **look), one.name))
        for what, value, dashes in (("median", median, "--"), ("maximum", most, DASHES[2])):
            line = axes.axvline(value, color=BLACK, linestyle=dashes, linewidth=1.2)
            entries.append((line, f"{what} {value:.4g}"))
        axes.set_xlabel("epsilon at the radius, summed")
        if few:
            axes.xaxis.set_major_locator(MultipleLocator(each * math.ceil((times + 1) / 9)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.set_ylabel("clients")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, entries)
    middles = (edges[:-1] + edges[1:]) / 2
    told = [
        f"{value:.4g}" if few else f"from {low:.4g} to {high:.4g}"
        for value, low, high in zip(middles, edges[:-1], edges[1:], strict=True)
    ]
    marks = [
        (axes, float(x), float(n), f"{n:,.0f} clients have spent {what}")
        for x, n, what in zip(middles, bottom, told, strict=True)
        if n
    ]
    of = {f"clients of {name}": heights for name, heights in counts.items()}
    data = pd.DataFrame(({"epsilon": middles} if few else {"from": edges[:-1], "to": edges[1:]}) | of)
    caption = (
        f"{len(budgets):,} clients after round {spent.index[-1]}, by group: median {median:.4g}, maximum {most:.4g}; "
        f"{int((budgets == 0).sum()):,} have not taken part. Each time costs n/nu = {terms.parameters:,}/"
        f"{terms.noise_multiplier:g} = {each:.4g}. {_counted(run)}"
    )
    return Chart("metric-budgets", "How budgets are spread over clients", caption, figure, data, marks)


def step_lengths(run: Run) -> Chart | None:
    """How long the steps of the clients are over the rounds, by group, against the radius."""
    terms = run.metric
    steps = pd.DataFrame() if terms is None else run.scores("step", split="train", model=training_task(run))
    if terms is None or steps.empty or steps.isna().all().all():
        return None
    group = run.clients["group"]
    parts = []
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        marks = []
        for number, one in enumerate(series_of(run)):
            of = steps.loc[:, group.isin(one.groups).to_numpy()].dropna(how="all")  # a round without any has none
            if of.empty:
                continue
            low, median, high = (of.quantile(share, axis=1) for share in (0.1, 0.5, 0.9))
            style, n = style_of(number) | {"color": one.colour}, of.count(axis=1)
            (drawn,) = axes.plot(of.index, median, marker="." if len(of) < 40 else "", **style)
            axes.fill_between(of.index, low, high, color=one.colour, alpha=0.14, linewidth=0)
            entries.append((drawn, one.name))
            frame = {"group": one.name, "round": of.index, "median": median, "low": low, "high": high, "clients": n}
            parts.append(pd.DataFrame(frame))
            marks += [
                (axes, float(row["round"]), row["median"], _step_told(one.name, row)) for _, row in parts[-1].iterrows()
            ]
        if terms.radius is not None:
            radius = axes.axhline(terms.radius, color=BLACK, linestyle="--", linewidth=1.2)
            entries.append((radius, f"radius {terms.radius:g}"))
        data = pd.concat(parts, ignore_index=True)
        if data["low"].min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # 10^-1 would be a formula
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        _rounds_across(axes)
        axes.set_ylabel("length of a step")
        legend_below(figure, entries)
    taking = steps.count(axis=1)
    caption = (
        f"How far a client's training moves its model, before anything is clipped: median of the clients of a group "
        f"that took part (n = {ranged(taking.min(), taking.max())} a round); bands hold the middle 80% of them. "
        f"{_of_radius(terms)} A diagnostic of the simulation, not released."
    )
    step = max(1, len(marks) // MOST_MARKS)
    return Chart("steps-by-round", "How long the steps are", caption, figure, data, marks[::step])


def _step_told(name: str, row: Any) -> str:
    return (
        f"{name}, round {row['round']}: median {row['median']:.3g} ({row['low']:.3g} to {row['high']:.3g}, "
        f"n = {row['clients']})"
    )


def _of_radius(terms: MetricTerms) -> str:
    """What the radius does, given the steps."""
    if terms.radius is None:
        noise = "; the noise is in proportion to these lengths, and gives them away" if terms.noise_multiplier else ""
        return f"Nothing is clipped{noise}."
    if not terms.noise_multiplier:
        return "Longer steps than the radius are shortened to it."
    many = math.sqrt(terms.parameters) if terms.law == "gaussian" else 1.0
    price = "and a larger epsilon, since the spread stays" if terms.spread else "for the same epsilon"
    return (
        f"Longer steps than the radius are shortened to it, and every step gets noise of about the length "
        f"{terms.noise_multiplier * terms.radius * many:.3g}, in proportion to the radius. If steps stay far below it, "
        f"a smaller one gives less noise {price}; choosing it by this figure is not priced."
    )


def _cumulative(run: Run) -> pd.DataFrame | None:
    """What each client has spent after each round (rounds, clients), at the radius; None: there is no such number."""
    terms = run.metric
    releases = None if terms is None or not terms.noise_multiplier else run.metric_releases()
    if releases is None or releases.empty:
        return None
    table = releases.pivot_table(index="round", columns="client", values="epsilon", aggfunc="sum")
    last = max(int(releases["round"].max()), *run.rounds["round"].tolist(), 0)
    return table.reindex(index=pd.RangeIndex(1, last + 1), columns=range(len(run.clients))).fillna(0.0).cumsum()


def _counted(run: Run) -> str:
    """How it is counted, and what that says."""
    terms = run.metric
    if terms is None:
        return ""
    if terms.radius is None:
        return (
            "Counted as Galli et al. (2023) do, at the distance of each client's own step: that is not proved, and not "
            "a guarantee."
        )
    return (
        f"Counted as Galli et al. (2023) do, at the distance {terms.radius:g}, the radius. The guarantee is for "
        f"the distance {terms.farthest:g}: its epsilon is {rounded_up(terms.farthest / terms.radius)} times as large."
    )


def _rounds_across(axes: Any) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
