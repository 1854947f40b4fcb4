"""What generated records look like: nobody's secret, so that a report may show them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fairveil.data.datasets import DATASETS, build_federation
from fairveil.data.synthetic import Generated
from fairveil.errors import UserError
from fairveil.provenance import published
from fairveil.reading import Run
from fairveil.report.chart import COLOURS, MOST_DRAWN, SIZE, Chart, legend_below, shape_of, shortened, styled
from fairveil.report.figures import MOST_MARKS

MOST_CLIENTS = 40  # of a group
MOST_GROUPS = 3  # that get a panel of their own
MOST_CLASSES = 7


def data_plane(run: Run) -> Chart | None:
    """The records of a generated federation with two features: each group, and all of them in one picture.

    They are drawn again from config and seed. Of any other data nothing is read: records have no place in a report.
    """
    found = _drawn_again(run)
    if found is None or found.table["group"].nunique() > MOST_GROUPS:
        return None
    table, names = found.table, list(dict.fromkeys(found.table["group"]))
    panels = [*([[name] for name in names] if len(names) > 1 else []), names]
    values = np.unique(table["colour"])
    limits = table["colour"].quantile([0.02, 0.98]).tolist()
    with styled():
        figure = Figure(figsize=(SIZE[0], 2.9 if len(panels) > 1 else SIZE[1]))
        FigureCanvasAgg(figure)
        axes: list[Axes] = list(figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0])
        size, many = 9 if len(table) <= 600 else 4, len(table) > MOST_DRAWN
        drawn: Artist | None = None
        for place, inside in zip(axes, panels, strict=True):
            for number, name in enumerate(names):
                part = table[table["group"] == name] if name in inside else table[:0]
                look: Any = {"marker": shape_of(number), "s": size, "linewidths": 0, "alpha": 0.75, "rasterized": many}
                if found.classes:
                    shades = [COLOURS[int(value) % len(COLOURS)] for value in part["colour"]]
                    place.scatter(part["x1"], part["x2"], c=shades, **look)
                else:
                    drawn = place.scatter(
                        part["x1"], part["x2"], c=part["colour"], cmap="cividis", vmin=limits[0], vmax=limits[1], **look
                    )
            place.set_title(shortened(str(inside[0]), 18) if len(inside) == 1 else "all", fontsize=9.5)
            place.set_xlabel("first feature")
            place.set_box_aspect(1)
        axes[0].set_ylabel("second feature")
        entries: list[tuple[Artist, str]] = [
            (Line2D([], [], marker=shape_of(number), color="#444444", linestyle="", markersize=5), str(name))
            for number, name in enumerate(names if len(names) > 1 else [])
        ]
        if found.classes:
            entries += [
                (
                    Line2D([], [], marker="o", color=COLOURS[int(value) % len(COLOURS)], linestyle=""),
                    f"{found.what} {value:g}",
                )
                for value in values
            ]
        elif drawn is not None:
            figure.colorbar(drawn, ax=axes, shrink=0.75, label=found.what)  # type: ignore[arg-type]
        legend_below(figure, entries)
    clients = table.groupby("group", sort=False)["client"].nunique()
    whom = (
        f"{clients.max()} clients of each group" if clients.nunique() == 1 else f"up to {MOST_CLIENTS} clients a group"
    )
    caption = (
        f"{len(table):,} training records of {whom}, drawn again from config and seed: this dataset is generated, and "
        f"its records are nobody's. Colour: {found.told}; shape: group."
    )
    marks = [
        (place, row["x1"], row["x2"], f"{row['client']} ({row['group']}): {found.what} {row['colour']:.3g}")
        for place, inside in zip(axes, panels, strict=True)
        for _, row in table[table["group"].isin(inside)].iterrows()
    ]
    data, step = table.rename(columns={"colour": found.what}), max(1, len(marks) // MOST_MARKS)
    return Chart("records", "The generated records", caption, figure, data, marks[::step])


class _Found(NamedTuple):
    """Records of some clients: client, group, x1, x2, y, and what gives each its colour."""

    table: pd.DataFrame
    what: str  # the colour is
    told: str  # at more length
    classes: bool  # whether it is one of a few


def _drawn_again(run: Run) -> _Found | None:
    """The training records of the first clients of each group; None: these are not data to be shown."""
    given = run.config.get("data", {})
    kind = DATASETS.get(given.get("dataset", ""))
    if kind is None or not issubclass(kind, Generated) or run.facts.get("features") != [2] or run.elsewhere:
        return None
    if run.facts.get("several"):  # a dot has one colour
        return None
    try:
        federation = build_federation(
            given["dataset"], given.get("options", {}), given.get("split"), run.config["seed"]
        )
    except UserError:  # its options have changed
        return None
    if published(federation.fingerprint) != run.provenance["data"]:  # of another version: other records
        return None
    parts = []
    for code, name in enumerate(federation.groups):
        for client in np.flatnonzero(federation.group == code)[:MOST_CLIENTS].tolist():
            data = federation.load(client)
            x, y = data.train.x.numpy(), data.train.y.numpy()
            colour = y if data.decision is None else data.decision.about(data.train.y).numpy()
            frame = {"client": run.clients["name"].iloc[client], "group": name, "x1": x[:, 0], "x2": x[:, 1], "y": y}
            parts.append(pd.DataFrame(frame | {"colour": colour.astype(float)}))
    table = pd.concat(parts, ignore_index=True)
    if federation.decided:
        return _Found(table, "decision", "what is decided by the target", classes=True)
    if 0 < federation.classes <= MOST_CLASSES:
        return _Found(table.drop(columns="y"), "class", "the class", classes=True)
    return _Found(table.drop(columns="y"), "target", "the target", classes=False)
