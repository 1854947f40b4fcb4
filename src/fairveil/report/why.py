"""Why a client is worse off: the terms that a run with `fairness.explain` has left, in a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.artist import Artist

from fairveil.reading import Run
from fairveil.report.chart import COLOURS, GREY, Chart, legend_below, new_axes, shape_of, shortened, styled
from fairveil.report.page import Cell, Table, number, words

TERMS = ("initial gap", "a", "b", "c", "d")  # their sum is the gap after one more round
OTHERS = ("error of d", "bias", "variance", "kept")
WORST = 10  # clients in table and picture
MOST_GROUPS = 12  # of which the means are told
CERTAIN = 2.0  # standard errors from 0, before noise is called a reason
WHOLE = 0.995  # so much of an update counts as all of it


def why_terms(run: Run) -> pd.DataFrame | None:
    """The terms of every client that has training records, the worst off first; None: the run was not asked.

    Columns: client, name, group, "gap" after one more round, and the terms as `fairveil.diagnosis` names them.
    """
    tables = {metric: run.scores(metric, split="train", model="explain") for metric in (*TERMS, *OTHERS)}
    if any(table.empty for table in tables.values()):
        return None
    found = run.clients[["name", "group"]].copy()
    found.insert(0, "client", np.arange(len(found)))
    for metric, table in tables.items():
        found[metric] = table.iloc[-1].to_numpy()
    found["gap"] = found[list(TERMS)].sum(axis=1)
    found["step"] = found["a"] + found["b"]
    return found.dropna(subset=["initial gap"]).sort_values("gap", kind="stable").reset_index(drop=True)


def why(term: Mapping[str, float]) -> str:
    """What weighs most on a client in one more round, in a sentence; `term` is a row of `why_terms`."""
    clipped = f"; clipping (or its weight) keeps {100 * term['kept']:.0f}% of its update"
    return f"{_cause(term)}{clipped if term['kept'] < WHOLE else ''}."


def _cause(term: Mapping[str, float]) -> str:
    """What the gap of a client comes from: what there was before, or the next round."""
    if term["gap"] >= 0:
        return "it is better off than the mean"
    added, before = term["step"] + term["c"] + term["d"], term["initial gap"]
    if added >= 0:
        return "earlier rounds: the next one brings it closer to the mean"
    if before < added:
        return f"earlier rounds, {100 * before / (before + added):.0f}% of it; in the next one: {_loss(term)}"
    return _loss(term)


def _loss(term: Mapping[str, float]) -> str:
    """The largest of the terms by which the next round makes a client worse off."""
    certain = term["d"] < -CERTAIN * term["error of d"]
    against = {"step": term["step"], "c": term["c"], "d": term["d"] if certain else 0.0}
    said = {
        "step": "the mean step points away from it" if term["b"] < 0 else "the mean step helps it less than others",
        "c": "the step is too long for it: its loss bends up more than that of others",
        "d": "noise: its loss is more sensitive to it than that of others",
    }
    worst = min(against, key=lambda name: against[name])
    return said[worst] if against[worst] < 0 else "noise, perhaps: the probes cannot tell"


def why_tables(run: Run) -> list[Table]:
    """The means of the groups, then the clients that are worst off: what weighs most on each, and its terms."""
    terms = why_terms(run)
    if terms is None:
        return []
    asked: list[tuple[str, str, Mapping[str, float]]] = []
    for name in list(dict.fromkeys(terms["group"]))[:MOST_GROUPS]:
        inside = terms[terms["group"] == name]
        # probes are the same for all clients, so that the errors of a group do not average out
        means = inside[["gap", *TERMS, *OTHERS, "step"]].mean().to_dict()
        asked.append((f"mean of {len(inside):,}", str(name), means))
    asked += [(row["name"], row["group"], row.to_dict()) for _, row in terms.head(WORST).iterrows()]
    shown = ["gap", *TERMS, "error of d", "bias", "variance"]
    reasons: list[list[Cell]] = []
    figures: list[list[Cell]] = []
    for name, group, term in asked:
        whom = [words(name), words(group)]
        reasons.append([*whom, number(term["gap"], ",.4g"), words(why(term))])
        figures.append([*whom, *(number(term[column], ",.4g") for column in shown)])
    caption = (
        f"Why a client is worse off. One more round taken apart, for {len(terms):,} clients on their training records: "
        "means by group, then the worst off. Gap: mean loss of all clients less that of this one; below 0 it is worse "
        "off. Computed without noise, in a simulation."
    )
    explained = (
        "The same in figures. The gap after the round is the sum of the gap now, a and b (what the mean step gains all "
        "clients, and this one), c (curvature along the step) and d (noise; ± its standard error). Bias and variance: "
        "how far clipping, and how far noise (the same for all), moves a client's update (l1). After Du, Xiang and Wu "
        "(2025), Theorems 1 and 2."
    )
    columns = ["client", "group", "gap after", "gap now", "a", "b", "c", "d", "± d", "bias", "variance"]
    return [
        Table("why", caption, ["client", "group", "gap after", "what weighs"], reasons),
        Table("why-terms", explained, columns, figures),
    ]


def why_dots(run: Run) -> Chart | None:
    """What one more round adds to the gap of those that are worst off: a dot for each cause."""
    terms = why_terms(run)
    if terms is None or terms.empty:
        return None
    data = terms.head(WORST)[["client", "name", "group", "gap", "initial gap", "step", "c", "d"]]
    place = np.arange(len(data))[::-1]  # the worst on top
    causes = (("step", "mean step (a + b)"), ("c", "curvature (c)"), ("d", "noise (d)"))
    with styled():
        figure, axes = new_axes()
        axes.axvline(0, color=GREY, linewidth=1)
        entries: list[tuple[Artist, str]] = [
            (axes.scatter(data[column], place, 30, COLOURS[i], marker=shape_of(i), linewidths=0, alpha=0.85), name)
            for i, (column, name) in enumerate(causes)
        ]
        axes.set_yticks(place, [shortened(str(name), 16) for name in data["name"]])
        axes.set_xlabel("added to the gap; left: worse off")
        axes.set_ylabel("client")
        legend_below(figure, entries)
    marks = [
        (axes, float(row[column]), float(at), f"{row['name']} ({row['group']}), {name}: {row[column]:.3g}")
        for at, (_, row) in zip(place, data.iterrows(), strict=True)
        for column, name in causes
    ]
    caption = (
        f"The {len(data)} worst off of {len(terms):,} clients, the worst on top: how one more round would change the "
        "gap between the mean loss and theirs, by cause."
    )
    return Chart("why-clients", "Why a client is worse off", caption, figure, data, marks)
