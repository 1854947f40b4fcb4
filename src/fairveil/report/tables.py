"""The tables of the report that say who is served how well, every figure with its n and, where it can be had, an
interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd

from fairveil.fairness import Summary, fairness_symbol, group_differences, group_frame, summarise
from fairveil.intervals import Interval, Sample, Statistic, bootstrap, mean_of, worst_group_of
from fairveil.reading import Run
from fairveil.report.chart import in_words
from fairveil.report.page import Cell, Table, number, words

MOST_ROWS = 500  # of a table of clients; the download has them all
MOST_VALUES = 50  # of an attribute in a table of rates


class Judged:
    """The scores of the last evaluated round, with what they are resampled by."""

    def __init__(self, run: Run, values: np.ndarray, tests: np.ndarray, row: np.ndarray) -> None:
        self.run, self.metric, self.better = run, run.main, run.main == "accuracy"
        self.scored = ~np.isnan(values)
        self.values, self.tests = values[self.scored], tests[self.scored]
        codes, names = pd.factorize(run.clients["group"])
        self.names, self.group = names.tolist(), codes[self.scored]
        sizes = np.bincount(self.group, minlength=len(self.names))
        shared = None
        if run.facts.get("common_tests"):  # of the same group under the same model: one and the same score
            sets, shared = np.unique(np.stack([self.group, row[self.scored]]), axis=1, return_inverse=True)
            shared = shared if sets.shape[1] < len(self.values) else None  # every client its own model: no two alike
        elif sizes[sizes > 0].max() == 1:  # named sites, and they are all there are
            shared = np.arange(len(self.values))
        known = self.better and not np.isnan(self.tests).any()
        self.sample = Sample(self.values, self.group, self.tests.astype(int) if known else None, shared)
        own = known and not run.facts.get("common_tests")
        self.summary: Summary = summarise(
            self.values, self.group, self.names, higher_is_better=self.better, tests=self.tests if own else None
        )

    @classmethod
    def of(cls, run: Run, model: str = "served") -> Judged | None:
        """None before the first evaluation of these models."""
        values, counts = run.scores(run.main, model=model), run.counts(run.main, model=model)
        if values.empty or values.iloc[-1].isna().all():
            return None
        own = -1.0 - np.arange(values.shape[1])  # a model of its own, which nobody else has
        row = run.assignment().iloc[-1].to_numpy() if model == "served" else own
        row = np.where(np.isnan(row), own, row)
        return cls(run, values.iloc[-1].to_numpy(), counts.iloc[-1].to_numpy(), row)

    def interval(self, statistic: Statistic) -> Interval:
        return bootstrap([self.sample], statistic)

    def of_group(self, code: int) -> Interval:
        """The mean of one group: its own clients are resampled, and others cost no time."""
        inside = self.group == code
        parts = (None if part is None else part[inside] for part in (self.sample.tests, self.sample.shared))
        return bootstrap([Sample(self.values[inside], self.group[inside], *parts)], mean_of)

    @property
    def worst(self) -> Statistic:
        return partial(worst_group_of, higher_is_better=self.better)


def in_range(found: Interval, metric: str, said: Callable[[float, str], str] = in_words) -> str:
    """An interval in words, with its n."""
    if math.isnan(found.low):
        return f"no interval: too few {found.unit} (n = {found.n:,})"
    return f"95%: {said(found.low, metric)} to {said(found.high, metric)} (n = {found.n:,} {found.unit})"


def group_table(judged: Judged) -> Table:
    """A row for each group of clients."""
    rows = []
    worst = judged.summary.worst_group if len(judged.summary.by_group) > 1 else None
    for code, name in enumerate(judged.names):
        inside = judged.group == code
        if inside.any():
            found = judged.of_group(code)
            values, tests = judged.values[inside], judged.tests[inside]
            pick = np.min if judged.better else np.max
            rows.append(
                [
                    words(name), number(float(inside.sum()), ",.0f"), number(_distinct(judged, tests), ",.0f"),
                    _score(found.value, judged, mark="bad" if name == worst else ""),
                    Cell(_low_high(found, judged.metric), found.low),
                    _score(float(pick(values)), judged),
                ]
            )  # fmt: skip
    columns = ["group", "clients", "test records", f"mean {judged.metric}", "95% interval", "worst client"]
    what = {"clients": "clients within each group", "test records": "test records"}[judged.interval(mean_of).unit]
    return Table(
        "groups", f"By group of clients. Intervals: bootstrap over {what}, 2,000 draws.", columns, rows, beside=True
    )


def _distinct(judged: Judged, tests: np.ndarray) -> float:
    """Test records of a group, none counted twice."""
    return float(tests.max() if judged.run.facts.get("common_tests") else tests.sum())


def _low_high(found: Interval, metric: str) -> str:
    return "" if math.isnan(found.low) else f"{in_words(found.low, metric)} to {in_words(found.high, metric)}"


def _score(value: float, judged: Judged, mark: str = "") -> Cell:
    return Cell(in_words(value, judged.metric), value, mark)


def figure_table(judged: Judged) -> Table:
    """Every figure over clients, each with what it is."""
    s, n = judged.summary, f"{judged.summary.clients:,} clients"
    tenth = f"{math.ceil(0.1 * s.clients):,} of {n}"
    figures = [
        ("mean", s.mean, n), ("worst client", s.worst, n), ("best client", s.best, n),
        ("worst 10%", s.worst_10_percent, tenth), ("best 10%", s.best_10_percent, tenth),
        ("largest gap between two clients", s.disparity, n),
        ("gap between groups of clients", s.gap if len(s.by_group) > 1 else None, f"{len(s.by_group)} groups"),
        ("standard deviation over clients", s.deviation, n), ("variance x 10,000", 1e4 * s.variance, n),
        ("variance x 10,000 without what small tests add",
         None if s.sampling_variance_removed is None else 1e4 * s.sampling_variance_removed, n),
        ("Jain index (1: all equal)", s.jain, n),
    ]  # fmt: skip
    rows = [[words(name), number(value, ",.4f"), words(over)] for name, value, over in figures if value is not None]
    return Table(
        "figures", f"{judged.metric.capitalize()} over clients, each counting the same.", ["figure", "value", "n"], rows
    )


def attribute_tables(run: Run) -> list[Table]:
    """What a user of fairlearn expects: rates by group of clients, and by every attribute with not too many values."""
    order = {"": list(dict.fromkeys(run.clients["group"])), **run.facts.get("attributes", {})}
    return [
        table
        for place, (name, counts) in enumerate(run.confusions().items())
        if counts["value"].nunique() <= MOST_VALUES
        for table in _rates(place, name or "group of clients", counts, run.positive, order[name])
    ]


def _rates(place: int, name: str, counts: pd.DataFrame, positive: int | None, order: Sequence[str]) -> list[Table]:
    """A row for each value, in the order in which the data have them: "below 45" comes before "45 to 54"."""
    rates = group_frame(counts, positive).by_group
    rates = rates.loc[[value for value in order if value in rates.index]]
    columns = list(rates.columns)
    rows = [
        [words(value), *(number(float(row[c]), ",.0f" if c == "records" else ",.3f") for c in columns)]
        for value, row in rates.iterrows()
    ]
    differences = [
        [words(what), number(found.value), Cell(_plain_range(found), found.low), words(f"{found.n:,} {found.unit}")]
        for what, found in group_differences(counts, positive).items()
    ]
    class_ = "" if positive is None else f" Class {positive} is the advantage."
    return [
        Table(f"rates-{place}", f"By {name}, over test records.{class_}", [name, *columns], rows),
        Table(
            f"differences-{place}", f"Largest differences by {name}. Intervals: bootstrap, 1,000 draws; a difference "
            "is never below 0, so that low is above 0 does not show one.",
            ["difference", "value", "95% interval", "n"], differences,
        ),
    ]  # fmt: skip


def _plain_range(found: Interval) -> str:
    """Empty where all replicates are alike, too: each group is one client, say, and that is no certainty."""
    return f"{found.low:.3f} to {found.high:.3f}" if found.low < found.high else ""


def cost_tables(run: Run) -> list[Table]:
    """What privacy has cost each group, against a model of its pooled records."""
    rows, fairness = [], []
    for metric, cost in run.costs().items():
        fairness.append(f"{fairness_symbol(metric)} = {cost.fairness:.3f} (n = {cost.clients:,})")
        of = "loss, training records" if metric == "loss" else f"{metric}, test records"
        rows += [[words(name), words(of), number(value)] for name, value in cost.by_group.items()]
    caption = (
        "What privacy costs against a model of each group's pooled records, trained without privacy, for evaluation "
        f"only. Largest difference of that cost between two clients: {', '.join(fairness)}."
    )
    return [Table("cost", caption, ["group", "in", "cost"], rows)] if rows else []


def client_table(run: Run, judged: Judged) -> Table:
    """Every client, the worst first."""
    table = run.clients.loc[judged.scored].copy()
    table["value"], table["tests"] = judged.values, judged.tests
    table = table.sort_values("value", ascending=judged.better, kind="stable")
    sized = table["size"].notna().all()
    rows = [
        [
            words(row["name"]), words(row["group"]), _score(row["value"], judged), number(row["tests"], ",.0f"),
            *([number(row["size"], ",.0f"), number(row["epsilon"])] if sized else []),
        ]
        for _, row in table.head(MOST_ROWS).iterrows()
    ]  # fmt: skip
    columns = ["client", "group", judged.metric, "test records", *(["declared size", "epsilon"] if sized else [])]
    cut = f" The worst {MOST_ROWS}; the figure's numbers hold all." if len(table) > MOST_ROWS else ""
    return Table("every-client", f"{len(table):,} clients, the worst first.{cut}", columns, rows)


def declared_table(run: Run) -> Table:
    """Every client with what it declares of itself, and (record level) what its plan costs."""
    priced = run.clients["epsilon"].notna().all()
    rows = [
        [
            words(row["name"]), words(row["group"]), number(row["size"], ",.0f"),
            *([number(row["noise_multiplier"], ",.4f"), number(row["epsilon"])] if priced else []),
        ]
        for _, row in run.clients.head(MOST_ROWS).iterrows()
    ]  # fmt: skip
    columns = ["client", "group", "declared size", *(["noise multiplier", "epsilon"] if priced else [])]
    cut = f" The first {MOST_ROWS}." if len(run.clients) > MOST_ROWS else ""
    planned = "; noise and epsilon as planned" if priced else ""
    caption = f"{len(run.clients):,} clients: names, groups and sizes as declared{planned}.{cut}"
    return Table("every-client", caption, columns, rows)
