"""Whether models tell who was in the training data: what `fairveil.attacks.membership` has found, drawn and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fairveil.privacy.statement import rounded_up
from fairveil.reading import Run
from fairveil.report.chart import COLOURS, GREY, Chart, legend_below, new_axes, shape_of, shortened, styled
from fairveil.report.page import Cell, Table, number, words

ALLOWED = "guarantee allows"
EVERYONE = "all records"
LEVELS = ("0.01", "0.001")  # false positive rates, as they are written in the file
MOST_GROUPS = 12  # that are drawn, the most exposed
APART = 0.22  # of a row, between the dots of two attacks

Found = Mapping[str, Any]  # what is in the file


def membership_roc(run: Run) -> Chart | None:
    """The share of members that each attack finds, over the share of others that it takes for members."""
    found = run.attack("membership")
    if found is None or _of_all(found)["outside"] < 2:
        return None
    curves = {name: attack["roc"] for name, attack in found["attacks"].items()}
    styles: list[dict[str, Any]] = [  # in steps: between two thresholds there is none
        {"color": colour, "drawstyle": "steps-post"} for colour, _ in zip(COLOURS, curves, strict=False)
    ]
    if found["promise"] is not None:
        curves[ALLOWED] = found["promise"]["roc"]
        styles.append({"color": COLOURS[-1], "linestyle": "--"})
    least = 1 / _of_all(found)["outside"]
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        for style, (name, curve) in zip(styles, curves.items(), strict=True):
            (line,) = axes.plot(curve["fpr"], curve["tpr"], **style)
            entries.append((line, name))
        (line,) = axes.plot([least, 1], [least, 1], color=GREY, linewidth=1, linestyle="--")
        entries.append((line, "guessing"))
        for which, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            axes.set(**{f"{which}scale": "log", f"{which}lim": (least, 1.0)})
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_major_formatter(FuncFormatter(lambda share, _: _percent(share)))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("others taken for members (false positive rate)")
        axes.set_ylabel("members found (true positive rate)")
        legend_below(figure, entries)
    data = pd.concat([pd.DataFrame(curve).assign(attack=name) for name, curve in curves.items()], ignore_index=True)
    data = data[["attack", "fpr", "tpr"]]
    marks = [
        (axes, fpr, tpr, f"{name}: {_percent(tpr)} of the members, at {_percent(fpr)} of the others")
        for name, fpr, tpr in data[(data[["fpr", "tpr"]] >= least).all(axis=1)].itertuples(index=False)
    ]
    caption = (
        f"{_over(found)} Far left are the guesses that are nearly sure; on the line of guessing, chance finds as many. "
        f"{_bounded(found)}"
    )
    return Chart("membership", "Can members be told from others?", caption, figure, data, marks)


def membership_groups(run: Run) -> Chart | None:
    """How exposed the records of each group are: by each attack a dot, with its interval."""
    found = run.attack("membership")
    told = [] if found is None else [(name, rates) for name, rates in _rates(found) if rates["auc"] is not None]
    best = {rates["name"]: 0.0 for _, rates in told if rates["name"] is not None}
    if found is None or len(best) < 2:
        return None
    for name in best:
        best[name] = max(rates["auc"]["value"] for _, rates in told if rates["name"] == name)
    rows = [None, *sorted(best, key=lambda name: -best[name])[:MOST_GROUPS]]
    place = {name: -float(at) for at, name in enumerate(rows)}
    tables, marks = [], []
    with styled():
        figure, axes = new_axes(1.5 + 0.4 * len(rows))
        axes.axvline(0.5, color=GREY, linewidth=1, linestyle="--")
        entries: list[tuple[Artist, str]] = []
        for k, attack in enumerate(found["attacks"]):
            some = [rates for name, rates in told if name == attack and rates["name"] in place]
            at = [place[rates["name"]] + (0.5 - k) * APART for rates in some]
            part = pd.DataFrame([_exposed(attack, rates) for rates in some])
            style: dict[str, Any] = {"color": COLOURS[k], "zorder": 3}
            axes.hlines(at, part["low"], part["high"], linewidth=1.6, **style)
            dots = axes.scatter(part["auc"], at, 30, marker=shape_of(k), linewidths=0, **style)
            entries.append((dots, attack))
            tables.append(part)
            marks += [
                (axes, float(row.auc), y, f"{row.group}, {attack}: {_interval(row.auc, row.low, row.high)}, n = "
                 f"{row.records:,} records of {row.clients:,} clients")
                for y, row in zip(at, part.itertuples(), strict=True)
            ]  # fmt: skip
        axes.set_yticks(list(place.values()), [shortened(_group(name), 18) for name in rows])
        axes.set_ylim(0.5 - len(rows), 0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("AUC (at the line: no better than guessing)")
        legend_below(figure, entries)
    left = f" The {MOST_GROUPS} most exposed of {len(best):,} groups." if len(best) > MOST_GROUPS else ""
    caption = (
        f"{_over(found)} AUC: how often a member scores higher than another record of the same group. Bars: 95% "
        f"intervals, bootstrap over the records of each client; other clients may differ more.{left}"
    )
    return Chart("membership-groups", "Whose records are more exposed?", caption, figure, pd.concat(tables), marks)


def membership_table(run: Run) -> Table | None:
    """A row for each attack and group, and one for what the guarantee allows."""
    found = run.attack("membership")
    if found is None:
        return None
    columns = [
        "attack", "group", "clients", "records", "AUC", "95% interval", "above other groups", "TPR at 1%",
        "95% interval", "own FPR", "TPR at 0.1%", "95% interval",
    ]  # fmt: skip
    lines = [_line(name, rates) for name, rates in _rates(found)]
    promise = found["promise"]
    if promise is not None:
        allowed = [_share(promise["tpr"][level]) for level in LEVELS]
        none, auc = number(None), number(promise["auc"])
        row = [words(ALLOWED), words(EVERYONE), none, none, auc, none, none, allowed[0], none, none, allowed[1], none]
        lines.append(row)
    caption = (
        f"Membership inference. {_over(found)} Seen: {found['seen']}. TPR: the share of members found, by one "
        "threshold for all groups, at which 1% (0.1%) of all others are taken for members; own FPR: how many of the "
        f"group's own others are, at the first. Empty: too few records. {_bounded(found)}{_spared(found)}"
    )
    return Table("membership-rates", caption, columns, lines)


def _rates(found: Found) -> list[tuple[str, Mapping[str, Any]]]:
    """By attack, the rates of all records and, where there are several, of each group."""
    return [
        (name, rates)
        for name, attack in found["attacks"].items()
        for rates in (attack["everyone"], *(attack["groups"] if len(attack["groups"]) > 1 else ()))
    ]


def _of_all(found: Found) -> Mapping[str, Any]:
    return _rates(found)[0][1]


def _group(name: str | None) -> str:
    return EVERYONE if name is None else name


def _exposed(name: str, rates: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the figure's numbers."""
    low, high = rates["auc"]["low"], rates["auc"]["high"]
    counts = {key: rates[key] for key in ("clients", "records")}
    return {
        "attack": name,
        "group": _group(rates["name"]),
        "auc": rates["auc"]["value"],
        "low": low,
        "high": high,
    } | counts


def _line(name: str, rates: Mapping[str, Any]) -> list[Cell]:
    apart = rates["difference"]
    tpr = [cell for level in LEVELS for cell in _with_interval(rates["tpr"][level], _share)]
    return [
        words(name), words(_group(rates["name"])), number(rates["clients"], ",.0f"),
        number(rates["records"], ",.0f"), *_with_interval(rates["auc"], number),
        Cell("", np.nan) if apart is None else Cell(_interval(*_three(apart), sign="+"), apart["value"]),
        *tpr[:2], _share(rates["fpr"][LEVELS[0]]), *tpr[2:],
    ]  # fmt: skip


def _with_interval(found: Mapping[str, float | None] | None, said: Callable[[float | None], Cell]) -> list[Cell]:
    if found is None:
        return [number(None), number(None)]
    value, low, high = (said(part) for part in _three(found))
    return [value, Cell(f"{low.text} to {high.text}" if low.text else "", low.order)]


def _share(share: float | None) -> Cell:
    """A cell of a percentage."""
    return number(None) if share is None or np.isnan(share) else Cell(f"{100 * share:.2f}%", float(share))


def _three(found: Mapping[str, float | None]) -> tuple[float, float, float]:
    """Value, low and high; what is not known is NaN."""
    value, low, high = (np.nan if found[key] is None else float(found[key] or 0) for key in ("value", "low", "high"))
    return value, low, high


def _interval(value: float, low: float, high: float, sign: str = "") -> str:
    around = "" if np.isnan(low) else f" ({low:{sign}.3f} to {high:{sign}.3f})"
    return f"{value:{sign}.3f}{around}"


def _over(found: Found) -> str:
    return (
        f"n = {found['records']:,} training records of {found['clients']:,} clients, {found['models']} rehearsals of "
        "this run, each with noise of its own and a random half of the records: its members."
    )


def _bounded(found: Found) -> str:
    """What the guarantee has to say."""
    promise = found["promise"]
    if promise is None:
        return f"No bound: {found['unbounded']}."
    whom = ", for a client with all its records" if promise["steps"] > 1 else ""
    most = " and ".join(f"{_percent(promise['tpr'][level])} at {_percent(float(level))}" for level in LEVELS)
    return (
        f"The guarantee (epsilon {rounded_up(promise['epsilon'])} at delta {promise['delta']:g}{whom}; and what it is "
        f"at other deltas) allows any attack at most {most}. More would refute it, unless by chance."
    )


def _spared(found: Found) -> str:
    """Which records the figures leave out, or do not do justice to."""
    left = f" {found['spared']:,} more records were always in: each client has to hold one." if found["spared"] else ""
    if found["holders"] > 1:
        left += f" Up to {found['holders']} clients hold one record, which may be in by another; that is not counted."
    return left


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
