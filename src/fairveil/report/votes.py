"""What clients have voted for, and what these very answers were worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.ticker import MaxNLocator

from fairveil.privacy.statement import rounded_up
from fairveil.reading import Run
from fairveil.report.chart import COLOURS, GREY, Chart, legend_below, new_axes, styled
from fairveil.report.page import Table, words


def answers_by_class(run: Run) -> Chart | None:
    """How often each class is the answer, how often rightly, and how often it would be the right one."""
    votes = _votes(run)
    if votes is None:
        return None
    data = pd.DataFrame(votes["by_class"]).assign(**{"class": range(len(votes["by_class"]["answers"]))})
    place = data["class"].to_numpy()
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        bars = (("true", "truly of this class", GREY, -0.2), ("answers", "answered", COLOURS[4], 0.2))
        for column, name, colour, aside in bars:
            entries.append((axes.bar(place + aside, data[column], 0.38, color=colour)[0], name))
        entries.append((axes.bar(place + 0.2, data["right"], 0.38, color=COLOURS[0])[0], "of these, rightly"))
        axes.set_xlabel("class")
        axes.set_ylabel("queries")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        legend_below(figure, entries)
    marks = [
        (axes, float(at), float(max(row.answers, row.true)), f"class {at}: {row.true:,} of the queries, answered "
         f"{row.answers:,} times, {row.right:,} of them rightly")
        for at, row in zip(place.tolist(), data.itertuples(), strict=True)
    ]  # fmt: skip
    caption = (
        f"The labels that {len(run.clients):,} clients have voted for, beside the true ones of the server's records, "
        f"which only this page has seen. n = {votes['answered']:,} answers to {votes['queries']:,} queries."
    )
    return Chart("answers", "Answers by class", caption, figure, data[["class", "true", "answers", "right"]], marks)


def votes_table(run: Run) -> Table | None:
    """How many queries were answered, how well, and what the answers cost: for all data, and for these."""
    votes = _votes(run)
    if votes is None:
        return None
    lines: list[tuple[str, str]] = [("queries", f"{votes['queries']:,}"), ("answered", f"{votes['answered']:,}")]
    if votes["accuracy"] is not None:
        lines.append(("of these, rightly", f"{100 * votes['accuracy']:.1f}%"))
    lines.append(("epsilon for all data: the guarantee", _epsilon(run.statement["epsilon"])))
    if "epsilon_sanitised" in votes:
        lines.append(("epsilon of these very answers, as published with noise", _epsilon(votes["epsilon_sanitised"])))
    if "epsilon_not_sanitised" in votes:
        lines.append(
            ("epsilon of these very answers, NOT SANITISED: it tells of the records, and is not to be published",
             _epsilon(votes["epsilon_not_sanitised"]))
        )  # fmt: skip
    caption = "Where clients agree, an answer tells less of any single one than the guarantee allows for."
    return Table("votes", caption, ["what", "figure"], [[words(a), words(b)] for a, b in lines], beside=True)


def _votes(run: Run) -> dict[str, Any] | None:
    return None if run.result is None else run.result.get("votes")


def _epsilon(value: float | str) -> str:
    number = float(np.inf if isinstance(value, str) else value)
    return "infinite" if np.isinf(number) else rounded_up(number)
