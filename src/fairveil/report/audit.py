"""What an audit has found: how many guesses were right, what that refutes, and what is claimed."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.ticker import FuncFormatter, NullFormatter

from fairveil.privacy.statement import rounded_up
from fairveil.reading import Run
from fairveil.report.chart import COLOURS, GREY, Chart, as_percent, legend_below, new_axes, styled
from fairveil.report.page import Card, Table, words


def audit_card(run: Run) -> Card | None:
    """The bound in a few words; None: the run was not audited."""
    found = run.attack("audit")
    if found is None:
        return None
    claimed, alarm = _number(found["epsilon_claimed"]), bool(found["alarm"])
    value = f"ε ≥ {_down(found['epsilon_lower_bound'])}"
    note = f"claimed {claimed}; {found['correct']:,} of {found['guesses']:,} guesses right"
    return Card("Audit", f"ALARM: {value}" if alarm else value, note, warn=alarm)


def audit_table(run: Run) -> Table | None:
    """Claim and findings."""
    found = run.attack("audit")
    if found is None:
        return None
    sure = f"{100 * found['confidence']:.6g}%"
    kind = "whole clients" if found["unit"] != "record" else "records"
    lines = [
        ("epsilon, claimed", _number(found["epsilon_claimed"])),
        ("epsilon of what is released, priced anew", _number(found["epsilon_priced"])),
        (
            f"epsilon, at least, with confidence {sure}, if prices at other deltas are in proportion to those claimed",
            _down(found["epsilon_lower_bound"]),
        ),
        (f"the same, by delta = {found['delta']:g} alone", _down(found["epsilon_lower_bound_at_delta"])),
        (f"canaries ({kind}, {found['adjacency']})", f"{found['canaries']:,}"),
        ("rehearsals of the run that they were in", f"{found['rehearsals']:,}"),
        ("guesses, as many as were fixed beforehand", f"{found['guesses']:,}"),
        ("of these right", f"{found['correct']:,}"),
        ("what they would show if all were right", _down(found["ceiling"])),
        ("verdict", "ALARM: the claim is refuted" if found["alarm"] else "the claim was not refuted"),
    ]
    caption = (
        "The run was carried out again with canaries, each in or not by the toss of a coin; somebody who sees what the "
        "server sees in every round guessed which. The bounds are what so many right guesses refute: all prices of "
        "these releases together (after Mahloujifar, Melis and Chaudhuri, 2024), or one of them (after Steinke, Nasr "
        "and Jagielski, 2023). An audit that finds little proves nothing; one that finds more than is claimed does."
    )
    return Table("audit", caption, ["what", "found"], [[words(a), words(b)] for a, b in lines], beside=True)


def audit_figure(run: Run) -> Chart | None:
    """How many of the surest guesses are right."""
    found = run.attack("audit")
    if found is None:
        return None
    data = pd.DataFrame(found["by_certainty"], columns=["guesses", "right"])
    data["share"] = data["right"] / data["guesses"]
    with styled():
        figure, axes = new_axes()
        (line,) = axes.plot(data["guesses"], data["share"], color=COLOURS[0], marker="o", markersize=3.5)
        entries = [(line, "right")]
        entries.append((axes.axhline(0.5, color=GREY, linewidth=1, linestyle="--"), "by chance"))
        if not isinstance(found["epsilon_claimed"], str):
            allowed = 1 / (1 + math.exp(-found["epsilon_claimed"]))
            most = axes.axhline(allowed, color=COLOURS[1], linewidth=1.2, linestyle=":")
            entries.append((most, "mean, at claimed ε"))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(min(0.45, float(data["share"].min()) - 0.05), 1.03)
        axes.set_xlabel("so many of the surest guesses")
        axes.set_ylabel("are right")
        as_percent(axes)
        legend_below(figure, entries)
    marks = [
        (axes, float(row.guesses), float(row.share), f"{row.right:,} of the {row.guesses:,} surest guesses are right")
        for row in data.itertuples()
    ]
    caption = (
        f"Guesses about {found['canaries']:,} canaries, the surest first. Dotted: how many would be right in the mean "
        "if whoever guesses could do as well as the claimed epsilon allows at delta 0."
    )
    return Chart("audit-guesses", "How well canaries are found", caption, figure, data, marks)


def _number(epsilon: float | str) -> str:
    return "none (infinite)" if isinstance(epsilon, str) else rounded_up(float(epsilon))


def _down(epsilon: float) -> str:
    """A lower bound, never more than it is."""
    return f"{math.floor(epsilon * 1000) / 1000:.3f}"
