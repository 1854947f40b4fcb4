"""The figures of a clustered run: what was seen, who was put where, and whether it was right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Patch
from matplotlib.ticker import MaxNLocator

from fairveil.reading import Run
from fairveil.report.chart import COLOURS, MOST_DRAWN, Chart, legend_below, new_axes, shape_of, shortened, styled

MOST_MODELS = 12  # beyond it every client has a model of its own, and there are no clusters to show
MOST_SEGMENTS = 2000
LARGEST_TABLE = 40


def final_clusters(run: Run) -> np.ndarray | None:
    """Which cluster each client ended in (clients,), -1 for those never seen; None: nobody looked for any."""
    return np.array(run.clusters["of_client"]) if run.clusters else None


def recovery(run: Run) -> Mapping[str, Any] | None:
    """How the clusters agree with the groups of the data, over the clients that were ever seen."""
    label = final_clusters(run)
    if label is None or run.clusters is None:
        return None
    seen = label >= 0
    if not seen.any():
        return None
    group = run.clients["group"][seen]
    table = pd.crosstab(group.to_numpy(), label[seen])
    smallest = group.value_counts().idxmin()
    of_smallest = table.loc[smallest][table.loc[smallest] > 0]
    alone = len(of_smallest) == 1 and table[of_smallest.index[0]].sum() == of_smallest.iloc[0]
    one_each = bool(((table > 0).sum(axis=0) == 1).all() and ((table > 0).sum(axis=1) == 1).all())
    found = {key: run.clusters.get(key) for key in ("count", "ari", "mss", "mpo", "switch_round", "iterations")}
    found |= {"groups": len(table), "exact": one_each, "minority": str(smallest), "minority_alone": bool(alone)}
    return found | {"seen": int(seen.sum())}


def cluster_plane(run: Run) -> Chart | None:
    """What the server got, with its noise, on two axes: colour and ellipse by cluster found, shape by group of the
    data. Of metric privacy the last round, with the hypotheses; of others the first."""
    label = final_clusters(run)
    if label is None or run.clusters is None or run.clusters.get("plane") is None:
        return None
    places = [(math.nan, math.nan) if place is None else place for place in run.clusters["plane"]]
    plane = np.array(places, dtype=float)
    shown = ~np.isnan(plane).any(axis=1) & (label >= 0)
    if not shown.any():
        return None
    names = list(dict.fromkeys(run.clients["group"]))
    clients, plane, label = run.clients[shown], plane[shown], label[shown]
    group = clients["group"].to_numpy()
    centres = np.array(run.clusters.get("centres") or [], dtype=float).reshape(-1, 2)
    seen = _Seen.of(run, len(clients), len(set(names) - set(group)))
    pooled = _within(plane, label)
    with styled():
        figure, axes = new_axes(4.1)
        for cluster in np.unique(label):
            inside, colour = label == cluster, COLOURS[cluster % len(COLOURS)]
            axes.add_patch(_ellipse(plane[inside], pooled, colour))
            for number, name in enumerate(names):
                dots = plane[inside & (group == name)]
                size = 34 if len(plane) <= 100 else 12
                many = len(plane) > MOST_DRAWN
                axes.scatter(dots[:, 0], dots[:, 1], size, colour, marker=shape_of(number), alpha=0.9, rasterized=many)
        for cluster, (x, y) in enumerate(centres):
            axes.scatter(x, y, 190, COLOURS[cluster % len(COLOURS)], marker="*", edgecolors="#000000", zorder=3)
        axes.set_xlabel(seen.across)
        axes.set_ylabel(seen.up)
        axes.margins(0.12)
        if len(centres):  # equal scales would cut into the margin
            every = np.concatenate([plane, centres])
            room = 0.07 * np.ptp(every, axis=0).max()
            axes.update_datalim([every.min(axis=0) - room, every.max(axis=0) + room])
        axes.set_aspect("equal", adjustable="datalim")
        if not seen.scaled:
            axes.tick_params(labelbottom=False, labelleft=False)
        drawn = np.unique([*label, *range(len(centres))])[:MOST_MODELS].tolist()
        mixed = any(f"cluster {c}" in names for c in drawn)  # a group may be called so, too
        told = "found: cluster" if mixed else "cluster"
        entries: list[tuple[Artist, str]] = [(Patch(color=COLOURS[c % len(COLOURS)]), f"{told} {c}") for c in drawn]
        entries += [
            (Line2D([], [], marker=shape_of(number), color="#444444", linestyle=""), f"{'group: ' * mixed}{name}")
            for number, name in enumerate(names[:MOST_MODELS])
        ]
        if len(centres):
            star = Line2D([], [], marker="*", color="#444444", markeredgecolor="#000000", markersize=11, linestyle="")
            entries.append((star, "hypothesis"))
        legend_below(figure, entries)
    data = pd.DataFrame(
        {"client": clients["name"], "group": group, "cluster": label, "first": plane[:, 0], "second": plane[:, 1]}
    )
    marks = [
        (axes, float(x), float(y), f"{name} ({of}), cluster {c}")
        for (x, y), name, of, c in zip(plane, clients["name"], group, label, strict=True)
    ]
    if len(centres):
        rows = [["", "", c, *centre] for c, centre in enumerate(centres.tolist())]
        data = pd.concat(
            [data.assign(what="client"), pd.DataFrame(rows, columns=data.columns).assign(what="hypothesis")]
        )
        marks += [(axes, x, y, f"hypothesis {c}{seen.at(x, y)}") for _, _, c, x, y in rows]
    return Chart("clusters", seen.title, seen.caption, figure, data, marks)


class _Seen(NamedTuple):
    """What a plane shows, in words."""

    title: str
    caption: str
    across: str
    up: str
    scaled: bool = False  # whether numbers on the axes mean something

    @classmethod
    def of(cls, run: Run, shown: int, missing: int) -> _Seen:
        if not run.clusters or run.clusters.get("centres") is None:
            return cls(
                "The noisy updates of round 1",
                "What the server sees in round 1: every client's update with its noise, on the two directions in which "
                "they differ most. Ellipses: two standard deviations of a cluster. The mixture looks at more than two "
                "directions.",
                "first principal direction of the updates", "second",
            )  # fmt: skip
        bare = run.metric is not None and not run.metric.noise_multiplier
        noisy = "local models" if bare else "noisy local models"
        two = run.facts.get("parameters") == 2
        on = "their two parameters" if two else "the two directions in which they differ most"
        done, every = len(run.rounds), int(run.config.get("metrics", {}).get("every", 1))
        number = done if run.result is not None else done - done % every  # it is kept when a round is evaluated
        caption = (
            f"What the server got in round {number}: {noisy} of {shown:,} clients that took part, on {on}. Colours: "
            "the clusters that it found; stars: the hypotheses that it made of them. Ellipses: two standard deviations "
            "of a cluster."
        )
        if missing:
            caption += f" Of {missing} {'group' if missing == 1 else 'groups'} nobody is among them."
        axes = ("first parameter", "second parameter") if two else ("first principal direction", "second")
        return cls(f"The {noisy} of round {number}", caption, *axes, scaled=two)

    def at(self, x: float, y: float) -> str:
        return f": ({x:.3g}, {y:.3g})" if self.scaled else ""


def assignment_ribbon(run: Run) -> Chart | None:
    """Which model served whom in which round: a row for each client, by group."""
    table = run.assignment()
    if table.empty or table.isna().all().all() or not 1 < table.max().max() + 1 <= MOST_MODELS:
        return None
    group = run.clients["group"].to_numpy()
    names = list(dict.fromkeys(group))
    ends = table.iloc[[-1, 0]].fillna(-1).to_numpy()
    order = np.lexsort([ends[1], ends[0], [names.index(name) for name in group]])  # those served alike side by side
    values, rounds = table.to_numpy()[:, order].T, table.index.to_numpy()
    models = int(np.nanmax(values)) + 1
    with styled():
        figure, axes = new_axes(4.1)
        axes.grid(visible=False)
        edges = np.append(0.5, rounds + 0.5)  # what was seen in a round holds since the one before
        colours = ListedColormap([COLOURS[m % len(COLOURS)] for m in range(models)])
        axes.pcolormesh(
            edges, np.arange(len(order) + 1), values, cmap=colours, vmin=-0.5, vmax=models - 0.5, rasterized=True
        )
        bounds = np.flatnonzero(group[order][1:] != group[order][:-1]) + 1
        for bound in bounds.tolist():
            axes.axhline(bound, color="white", linewidth=1.6)
        starts = np.append(0, bounds)
        if len(names) <= MOST_MODELS:
            middles = (starts + np.append(bounds, len(order))) / 2
            axes.set_yticks(middles, [shortened(name, 14) for name in group[order][starts]])
        axes.invert_yaxis()
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("clients, by group")
        legend_below(figure, [(Patch(color=colours(m)), f"model {m}") for m in range(models)])
    segments = _segments(values, rounds, order, run)
    marks = [
        (axes, (row["from_round"] + row["to_round"]) / 2, row["line"] + 0.5,
         f"{row['client']} ({row['group']}): model {row['model']}, rounds {row['from_round']} to {row['to_round']}")
        for row in segments[:MOST_SEGMENTS]
    ]  # fmt: skip
    data = pd.DataFrame(segments).drop(columns="line")
    caption = f"{len(order):,} clients, one line each; the colour says which of {models} models serves it."
    if run.metric is not None:
        caption += " All are offered all models, and each takes the one that fits its own training records best."
    return Chart("assignment", "Who is served by which model", caption, figure, data, marks)


def cluster_confusion(run: Run) -> Chart | None:
    """How many clients of each group ended in each cluster."""
    label = final_clusters(run)
    if label is None or not (label >= 0).any():
        return None
    group, label = run.clients["group"][label >= 0], label[label >= 0]
    table = pd.crosstab(group.to_numpy(), label)
    table = table.loc[list(dict.fromkeys(group))]
    if max(table.shape) > LARGEST_TABLE:
        return None
    with styled():
        figure, axes = new_axes(max(2.6, 1.1 + 0.42 * len(table)))
        axes.grid(visible=False)
        axes.imshow(table.to_numpy(), cmap="Blues", vmin=0, vmax=table.to_numpy().max() * 2, aspect="auto")
        for (row, column), count in np.ndenumerate(table.to_numpy()):
            axes.text(column, row, str(count) if count else "", ha="center", va="center", fontsize=11)
        axes.set_xticks(
            range(table.shape[1]), [f"cluster {c}" if table.shape[1] < 7 else str(c) for c in table.columns]
        )
        axes.set_yticks(range(table.shape[0]), [shortened(str(name), 16) for name in table.index])
        axes.set_ylabel("declared group" if run.elsewhere else "group of the data")
        for spine in axes.spines.values():
            spine.set_visible(False)
    marks = [
        (axes, float(column), float(row), f"{count} clients of {table.index[row]} in cluster {table.columns[column]}")
        for (row, column), count in np.ndenumerate(table.to_numpy())
        if count
    ]
    data = table.reset_index(names="group").rename(columns=str)
    title, groups, used = "Clusters against the truth", "true groups", "The truth is used for this figure only."
    if run.elsewhere:  # nobody knows the truth
        title, groups, used = "Clusters against groups", "declared groups", "Clusters are found without the groups."
    never = len(run.clients) - len(label)
    others = f" {never:,} others have never taken part." if never else ""
    caption = f"{len(label):,} clients: {groups} down, clusters found across.{others} {used}"
    return Chart("confusion", title, caption, figure, data, marks)


def _within(points: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The pooled covariance (2, 2) of points around the mean of their cluster."""
    centred = np.concatenate([points[label == c] - points[label == c].mean(axis=0) for c in np.unique(label)])
    return np.asarray(centred.T @ centred) / max(1, len(points) - len(np.unique(label)))


def _ellipse(points: np.ndarray, pooled: np.ndarray, colour: str) -> Ellipse:
    """Two standard deviations around the mean; a few points do not tell their own shape, and take that of all."""
    values, vectors = np.linalg.eigh(np.cov(points.T) if len(points) >= 5 else pooled)
    width, height = 4 * np.sqrt(np.maximum(values, 1e-30))
    angle = float(np.degrees(np.arctan2(vectors[1, 0], vectors[0, 0])))
    middle = tuple(points.mean(axis=0))
    return Ellipse(middle, width, height, angle=angle, facecolor=colour, alpha=0.14, edgecolor=colour, linewidth=1.2)


def _segments(values: np.ndarray, rounds: np.ndarray, order: np.ndarray, run: Run) -> list[dict[str, Any]]:
    """Runs of rounds in which a client kept its model; values (clients in order, rounds)."""
    found = []
    for line, (client, row) in enumerate(zip(order.tolist(), values, strict=True)):
        starts = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
        for start, end in zip(starts, np.append(starts[1:], len(row)) - 1, strict=True):
            if not np.isnan(row[start]):
                found.append(
                    {
                        "client": run.clients["name"].iloc[client], "group": run.clients["group"].iloc[client],
                        "from_round": int(rounds[start]), "to_round": int(rounds[end]), "model": int(row[start]),
                        "line": line,
                    }
                )  # fmt: skip
    return found
