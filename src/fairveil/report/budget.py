"""What a run has spent, priced anew from its ledger."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fairveil.privacy.accounting import ORDERS, Floats, MetricDpEvent, Price, price, rdp_curve
from fairveil.privacy.mechanisms import Mechanism, events_of, without_leaks
from fairveil.privacy.statement import rounded_up
from fairveil.reading import Run
from fairveil.report.chart import COLOURS, Chart, legend_below, new_axes, styled

MOST_PRICES = 24  # rounds for which a price is computed: the last, and others evenly spread


@dataclass(frozen=True)
class Spending:
    """The unit that has spent most, as its ledger has it.

    Attributes:
        unit: a client, or -1 for the federation.
        planned, posted: the price of each, computed here; None where a mechanism is not this library's.
        by_round: cumulative epsilon after each round, a column for each kind of release; empty if there is no price.
    """

    unit: int
    planned: Price | None
    posted: Price | None
    by_round: pd.DataFrame


def spending(run: Run) -> Spending:
    """Price what was planned and posted by the unit whose plan costs most. What leaks is left out of it."""
    unit = _worst(run)
    total, posted = _planned(run, unit), run.posted(unit)
    known = [(number, mechanism, kind) for number, mechanism, kind in posted if mechanism is not None]
    if total is None or len(known) < len(posted):
        return Spending(unit, None, None, pd.DataFrame())
    spent = Counter(mechanism for _, mechanism, _ in known)
    by_round = _by_round(run, known) if known and 0 < total.epsilon < math.inf else pd.DataFrame()
    return Spending(unit, total, _priced(run, spent), by_round)


def _worst(run: Run) -> int:
    """The unit whose plan costs most. Where something leaks all cost infinitely much, and the rest of it decides; under
    metric privacy all plans are alike, and what was done decides."""
    if run.metric is not None:
        return run.busiest()
    worst = run.units.loc[run.units["epsilon"].astype(float).idxmax()]
    if math.isfinite(worst["epsilon"]):
        return int(worst["unit"])
    alike = run.units.drop_duplicates(["size", "noise_multiplier"])  # those of equal terms have equal plans
    prices = {int(unit): _planned(run, int(unit)) for unit in alike["unit"]}
    return max(prices, key=lambda unit: found.epsilon if (found := prices[unit]) else 0.0)


def _planned(run: Run, unit: int) -> Price | None:
    """The price of a unit's plan, without what leaks; None if it holds a mechanism that is not this library's."""
    planned = run.planned(unit)
    return None if None in planned else _priced(run, Counter({m: n for m, n in planned.items() if m is not None}))


def _priced(run: Run, releases: Counter[Mechanism]) -> Price:
    privacy = run.config["privacy"]
    events = events_of(without_leaks(releases), _holders(run))
    return price(
        events, privacy["delta"], adjacency=privacy["adjacency"], accountant=privacy.get("accountant", "tightest")
    )


def _holders(run: Run) -> int:
    return int(run.facts.get("holders", 1))


def _by_round(run: Run, posted: Sequence[tuple[int, Mechanism, str]]) -> pd.DataFrame:
    """Cumulative epsilon, shared out among the kinds of release in proportion to their Renyi divergence at the order
    that is best for the total (epsilons of kinds do not add up; those of metric privacy do)."""
    delta = run.config["privacy"]["delta"]  # metric privacy has none
    loss = math.log(1 / delta) if delta else 0.0
    kinds, numbers = list(dict.fromkeys(kind for *_, kind in posted)), sorted({number for number, *_ in posted})
    curves = {m: _curve(m) for m in without_leaks(Counter(mechanism for _, mechanism, _ in posted))}
    places = np.unique(np.linspace(0, len(numbers) - 1, MOST_PRICES).round().astype(int))
    wanted = {numbers[place] for place in places}
    sums = {kind: np.zeros(len(ORDERS)) for kind in kinds}
    spent: Counter[Mechanism] = Counter()
    rows = []
    for number, releases in itertools.groupby(posted, key=lambda release: release[0]):
        for _, mechanism, kind in releases:
            spent[mechanism] += 1
            sums[kind] = sums[kind] + curves.get(mechanism, 0.0)
        if number in wanted:
            epsilon, total = _priced(run, spent).epsilon, np.sum(list(sums.values()), axis=0)
            best = int(np.argmin(total + loss / (np.array(ORDERS) - 1)))
            share = {kind: sums[kind][best] / total[best] if total[best] else 0.0 for kind in kinds}
            rows.append({"round": number} | {kind: epsilon * share[kind] for kind in kinds})
    return pd.DataFrame(rows)


def _curve(mechanism: Mechanism) -> Floats:
    """What adds up over releases, at ORDERS: Renyi divergences, or an epsilon that is the same at all of them."""
    event = mechanism.event
    if isinstance(event, MetricDpEvent):
        return np.full(len(ORDERS), event.epsilon * event.distance)
    return rdp_curve(event)


def budget_by_round(run: Run, spent: Spending | None = None) -> Chart | None:
    """Epsilon spent up to each round, stacked by kind of release, under the plan."""
    spent = spent or spending(run)
    table = spent.by_round
    if table.empty or spent.planned is None:
        return None
    kinds = [column for column in table.columns if column != "round"]
    rounds, planned = table["round"].to_numpy(), spent.planned.epsilon
    with styled():
        figure, axes = new_axes()
        bottom = np.zeros(len(table))
        entries: list[tuple[Artist, str]] = []
        edges = np.append(rounds[0] - 1, rounds) + 0.5  # a bar reaches back to the last round that has one ...
        if len(table) < MOST_PRICES:  # ... or, if none was left out, on to the next in which something is sent
            edges = np.append(rounds, max(rounds[-1], len(run.rounds)) + 1) - 0.5
        for number, kind in enumerate(kinds):
            colour, hatch = COLOURS[number % len(COLOURS)], ("", "///", "...")[number % 3]
            axes.bar(
                edges[:-1], table[kind], np.diff(edges), bottom, align="edge", color=colour, hatch=hatch,
                edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            bottom = bottom + table[kind].to_numpy()
            entries.append((Patch(facecolor=colour, hatch=hatch, edgecolor="white"), kind))
        line = axes.axhline(planned, color="#000000", linestyle="--", linewidth=1.2)
        axes.set_xlim(left=min(0.5, edges[0]))
        axes.set_ylim(0, planned * 1.12)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylabel("epsilon, at most")
        legend_below(figure, [*entries, (line, f"planned {rounded_up(planned)}")])
    marks = [
        (axes, float(row["round"]), float(top), f"after round {row['round']:.0f}: at most {rounded_up(top)} spent")
        for (_, row), top in zip(table.iterrows(), bottom, strict=True)
    ]
    whose = "the federation" if spent.unit < 0 else f"client {run.clients['name'].iloc[spent.unit]}"
    chosen = "whose plan costs most" if run.metric is None else "which has sent most"
    shared = (
        "Epsilons of metric privacy add up."
        if spent.planned.accountant == "sum"
        else "Prices of kinds do not add up; they share the total in proportion to their Renyi divergence."
    )
    caption = f"Of {whose}, {chosen}: all that it had released after a round, priced anew from the ledger. {shared}"
    return Chart("budget", "Budget spent, by kind of release", caption, figure, table, marks)
