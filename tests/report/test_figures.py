"""The figures of a run: their numbers against pandas and by hand, where their marks are, and where there is nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex

import fairveil
from fairveil.config import make_config
from fairveil.plan import make_plan
from fairveil.reading import Run, load_run
from fairveil.report.budget import budget_by_round
from fairveil.report.chart import COLOURS, GREY, Chart, shape_of, shortened
from fairveil.report.clusters import assignment_ribbon, cluster_confusion, cluster_plane
from fairveil.report.figures import (
    MOST_LINES,
    client_dots,
    client_histogram,
    clipped_by_round,
    scores_by_round,
    signal_by_round,
)
from fairveil.report.page import Page, Section
from fairveil.run import run_plan
from fairveil.store import Score

FIGURES: dict[str, Callable[[Run], Chart | None]] = {
    "scores": lambda run: scores_by_round([run]),
    "clipped": lambda run: clipped_by_round([run]),
    "signal": lambda run: signal_by_round([run]),
    "dots": client_dots,
    "histogram": client_histogram,
    "plane": cluster_plane,
    "ribbon": assignment_ribbon,
    "confusion": cluster_confusion,
}


def accuracies(values: dict[int, list[float]], n: int = 10, metric: str = "accuracy") -> list[Score]:
    """Scores of the served models: a list over clients by round; None: not scored."""
    return [
        Score(number, client, "test", "served", metric, value, 0, n)
        for number, row in values.items()
        for client, value in enumerate(row)
        if value is not None
    ]


# ---- lines over the rounds -------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4),
    groups=st.lists(st.sampled_from("abc"), min_size=4, max_size=4),
)
def test_the_lines_are_the_means_of_the_groups(
    handmade: Callable[..., Run], table: list[list[float]], groups: list[str]
) -> None:
    """By pandas from the long table; and the figure draws what its numbers say."""
    run = handmade(groups, accuracies({2 * number + 1: row for number, row in enumerate(table)}))
    chart = scores_by_round([run])
    assert chart is not None
    metrics = run.metrics[run.metrics["metric"] == "accuracy"]
    expected = metrics.groupby(["group", "round"], observed=True)["value"].mean()
    found = chart.data.set_index(["group", "round"])
    assert sorted(found.index) == sorted(expected.index)
    for column in ("mean", "low", "high"):  # of one seed all three are the same
        assert found[column].to_dict() == pytest.approx(expected.to_dict())
    (axes,) = chart.figure.axes
    for line, name in zip(axes.lines, dict.fromkeys(groups), strict=True):
        assert line.get_ydata().tolist() == pytest.approx(expected[name].tolist())  # type: ignore[union-attr]
        assert line.get_xdata().tolist() == expected[name].index.tolist()  # type: ignore[union-attr]


def test_a_band_goes_from_the_lowest_seed_to_the_highest(handmade: Callable[..., Run]) -> None:
    """Group a over seeds in round 1: .2, .4, .9. The third seed has not come to round 2 yet."""
    seeds = [{1: [0.2, 0.5], 2: [0.3, 0.5]}, {1: [0.4, 0.6], 2: [0.5, 0.5]}, {1: [0.9, 0.7]}]
    chart = scores_by_round([handmade(["a", "b"], accuracies(values)) for values in seeds])
    assert chart is not None and "mean over 3 seeds" in chart.caption
    found = chart.data[chart.data["group"] == "a"]
    assert found["mean"].tolist() == pytest.approx([0.5, 0.4]) and found["seeds"].tolist() == [3, 2]
    assert found["low"].tolist() == [0.2, 0.3] and found["high"].tolist() == [0.9, 0.5]
    bands = [band for band in chart.figure.axes[0].collections if isinstance(band, PolyCollection)]
    heights = bands[0].get_paths()[0].vertices[:, 1]
    assert len(bands) == 2 and {0.2, 0.9, 0.3, 0.5} <= set(np.round(heights, 9))
    assert "a, round 1: 50.0% (20.0% to 90.0%)" in [text for *_, text in chart.marks]


def test_the_worst_group_is_marked(handmade: Callable[..., Run]) -> None:
    """The lowest accuracy, the highest error, in the last round."""
    best = scores_by_round([handmade(["a", "b"], accuracies({1: [0.1, 0.9], 2: [0.8, 0.7]}))])
    error = scores_by_round([handmade(["a", "b"], accuracies({1: [3.0, 2.0]}, metric="rmse"), facts={"classes": 0})])
    assert best is not None and error is not None
    names = [[text.get_text() for text in chart.figure.legends[0].get_texts()] for chart in (best, error)]
    assert names == [["a", "b (worst)"], ["a (worst)", "b"]]


def test_of_many_groups_the_worst_get_a_line_of_their_own(handmade: Callable[..., Run]) -> None:
    """20 groups, group 19 the worst; beyond the first eleven the others are grey, and the numbers hold all."""
    names = [f"group {number}" for number in range(20)]
    chart = scores_by_round([handmade(names, accuracies({1: [1 - number / 20 for number in range(20)]}))])
    assert chart is not None and "9 groups that do better are grey" in chart.caption
    told = {text.get_text() for text in chart.figure.legends[0].get_texts()}
    assert told == {"group 19 (worst)", *names[9:19]} and len(told) == MOST_LINES - 1
    assert sum(line.get_color() == GREY for line in chart.figure.axes[0].lines) == 9 and len(chart.data) == 20


def test_a_group_that_nobody_was_drawn_from_has_a_gap_and_the_page_can_be_read(handmade: Callable[..., Run]) -> None:
    """Under client-level privacy a round draws some clients only. JSON knows no NaN: a browser would read nothing."""
    rows = [
        Score(number, client, "train", "bounded_update, sum 2", "clipped", 0.5)
        for number, drawn in ((1, [0, 1]), (2, [0]), (3, [1]), (4, [0]))
        for client in drawn
    ]
    chart = clipped_by_round([handmade(["a", "b"], rows)])
    assert chart is not None and len(chart.data) == 5  # b has none in rounds 2 and 4, a none in round 3
    assert len(chart.places()) == 5
    html = Page("t", "s", [Section("k", "t", [chart])]).html()
    (block,) = re.findall(r'<script[^>]*id="data"[^>]*>(.*?)</script>', html, re.DOTALL)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(block, parse_constant=refuse)["clipped-by-round"]["marks"]


def test_infinite_values_have_no_place(handmade: Callable[..., Run]) -> None:
    values = {1: 2.0, 2: math.inf}
    rows = [Score(r, 0, "train", "local_update, ask 1", m, v) for r, v in values.items() for m in ("signal_to_noise",)]
    rows += [Score(r, 0, "train", "local_update, ask 1", "clipped", 0.5) for r in values]
    chart = signal_by_round([handmade(["a"], rows)])
    assert chart is not None and len(chart.places()) == 1 and "(10 parameters)" in chart.caption


# ---- every client ----------------------------------------------------------------------------------


def test_dots_are_sorted_from_the_worst(handmade: Callable[..., Run]) -> None:
    """Client 2 has no tests, and so no dot."""
    run = handmade(["a", "b", "b", "a"], accuracies({1: [0.9, 0.1, None, 0.5]}))  # type: ignore[list-item]
    chart = client_dots(run)
    assert chart is not None and chart.data["client"].tolist() == [1, 3, 0]
    assert [text for *_, text in chart.marks] == ["client 1 (b): 10.0%", "client 3 (a): 50.0%", "client 0 (a): 90.0%"]
    drawn = [dots.get_offsets().tolist() for dots in chart.figure.axes[0].collections]  # type: ignore[union-attr]
    assert drawn == [[[2, 0.5], [3, 0.9]], [[1, 0.1]]]  # group by group, in the colours of the other figures
    assert chart.caption == "3 clients in round 1, one dot each; each tested on 10 records."
    assert chart.figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(0.5)  # type: ignore[index]


def test_of_errors_the_highest_is_the_worst(handmade: Callable[..., Run]) -> None:
    run = handmade(["a"] * 3, accuracies({1: [2.0, 3.0, 1.0]}, metric="rmse"), facts={"classes": 0})
    chart = client_dots(run)
    assert chart is not None and chart.data["rmse"].tolist() == [3.0, 2.0, 1.0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=1, max_size=12), errors=st.booleans())
def test_the_histogram_counts_everyone(handmade: Callable[..., Run], values: list[float], errors: bool) -> None:
    """40 bins, of which the last is closed: an accuracy of exactly 0 or 1 counts, and so does the largest error."""
    groups = ["a" if number % 3 else "b" for number in range(len(values))]
    scores = accuracies({1: values}, metric="rmse" if errors else "accuracy")
    chart = client_histogram(handmade(groups, scores, facts={"classes": 0 if errors else 2}))
    assert chart is not None and len(chart.data) == 40
    assert {g: int(chart.data[f"clients of {g}"].sum()) for g in groups} == {g: groups.count(g) for g in groups}
    heights = sum(bar.get_height() for bar in chart.figure.axes[0].patches)
    assert heights == len(values)
    if not errors:
        low, high = chart.data["from"].to_numpy(), chart.data["to"].to_numpy()
        assert low == pytest.approx(np.arange(40) / 40) and high == pytest.approx(np.arange(1, 41) / 40)
        total = chart.data.drop(columns=["from", "to"]).sum(axis=1)
        assert total.iloc[0] >= values.count(0.0) and total.iloc[-1] >= values.count(1.0)


def test_no_two_kinds_of_points_look_the_same(handmade: Callable[..., Run]) -> None:
    """There are seven colours and seven shapes: past seven a colour comes with another shape."""
    assert len({(COLOURS[number % len(COLOURS)], shape_of(number)) for number in range(40)}) == 40
    chart = client_dots(handmade([f"group {number}" for number in range(12)], accuracies({1: [0.5] * 12})))
    assert chart is not None
    looks = set()
    for dots in chart.figure.axes[0].collections:
        assert isinstance(dots, PathCollection)
        looks.add((to_hex(dots.get_facecolor()[0]), dots.get_paths()[0].vertices.tobytes()))  # type: ignore[index]
    assert len(looks) == 12


# ---- where marks are -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with clusters, an attribute-free federation and a reference: all that a figure can show."""
    data = {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 4, 4]}}
    algorithm = {"name": "r-dpcfl", "clusters": 3, "rounds": 4, "batch_size": 64, "learning_rate": 4.0}
    plain = {"data": data, "model": {"name": "logistic"}, "algorithm": algorithm, "engine": {"workers": 1}}
    plan = make_plan(make_config(plain | {"privacy": {"epsilon": 8.0, "delta": 1e-3}}))
    return run_plan(plan, runs=tmp_path_factory.mktemp("runs")).folder


EVERY = {**FIGURES, "budget": budget_by_round}


@pytest.mark.parametrize("name", EVERY)
def test_every_figure_of_a_loaded_run_can_be_saved(clustered: Path, tmp_path: Path, name: str) -> None:
    chart = EVERY[name](fairveil.load_run(clustered))
    assert chart is not None and len(chart.data) and chart.marks and chart.caption.endswith(".")
    begins = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG", "csv": chart.csv().encode()}
    for end, start in begins.items():
        chart.save(tmp_path / f"{name}.{end}")
        assert (tmp_path / f"{name}.{end}").read_bytes().startswith(start)
    again = EVERY[name](fairveil.load_run(clustered))
    fresh = EVERY[name](fairveil.load_run(clustered))
    assert again is not None and fresh is not None and again.svg() == fresh.svg()  # the same run, the same picture


@pytest.mark.parametrize("name", EVERY)
def test_marks_are_where_matplotlib_draws(clustered: Path, name: str) -> None:
    """By matplotlib's own transformation, after the layout is done; and within the picture."""
    chart = EVERY[name](load_run(clustered))
    assert chart is not None
    places = chart.places()
    assert len(places) == len(chart.marks)
    box = chart.figure.bbox
    for (across, down, text), (axes, x, y, told) in zip(places, chart.marks, strict=True):
        right, up = axes.transData.transform((x, y))
        assert (across, 1 - down, text) == (
            pytest.approx(right / box.width, abs=1e-4),
            pytest.approx(up / box.height, abs=1e-4),
            told,
        )
        assert 0 <= across <= 1 and 0 <= down <= 1


@pytest.mark.parametrize("name", ["scores", "dots", "plane"])
def test_marks_are_where_the_picture_has_its_points(clustered: Path, name: str) -> None:
    """The points are read from the picture that a page holds; it is laid out anew, to within a hundredth."""
    chart = EVERY[name](load_run(clustered))
    assert chart is not None
    svg = chart.svg()
    (box,) = re.findall(r'viewBox="([^"]*)"', svg)
    width, height = (float(part) for part in box.split()[2:])
    drawn = [(float(x) / width, float(y) / height) for x, y in re.findall(r'<use [^>]*?x="([\d.]+)" y="([\d.]+)"', svg)]
    for across, down, _ in chart.places():
        assert min(max(abs(across - x), abs(down - y)) for x, y in drawn) < 0.01


def test_names_are_never_read_as_markup_or_formulas(handmade: Callable[..., Run]) -> None:
    """Nor does a name that begins with an underscore vanish from the legend, as matplotlib has it."""
    names = ["$x^2$", "_hidden", "<script>alert(1)</script>", "a\nb\x07", "", "x" * 60]
    chart = scores_by_round([handmade(names, accuracies({1: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}))])
    assert chart is not None
    svg = chart.svg()
    assert "$x^2$" in svg and "<script" not in svg and "&lt;script" in svg and "_hidden" in svg and "(no name)" in svg
    assert "a b" in svg and "\x07" not in svg and "x" * 60 not in svg and len(shortened("x" * 60)) == 22


# ---- where there is nothing ------------------------------------------------------------------------

CLUSTERS = {"count": 1, "ari": 1.0, "mss": None, "mpo": None, "switch_round": None, "iterations": None}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, set()),
        ({"scores": [Score(1, 0, "train", "local_update, ask 1", "clipped", 0.5)]}, {"clipped"}),
        ({"scores": accuracies({1: [math.nan, math.nan]})}, set()),
        ({"scores": accuracies({1: [0.5, math.nan]})}, {"scores", "dots", "histogram"}),
        ({"scores": accuracies({3: [0.5, 0.5]})}, {"scores", "dots", "histogram"}),
        ({"groups": ["a"], "scores": accuracies({1: [1.0]})}, {"scores", "dots", "histogram"}),
        ({"groups": ["a"], "clusters": CLUSTERS | {"of_client": [0], "plane": [[0.0, 0.0]]}}, {"plane", "confusion"}),
        ({"clusters": CLUSTERS | {"of_client": [0, 0], "plane": None}}, {"confusion"}),
        ({"groups": [str(g) for g in range(41)], "clusters": CLUSTERS | {"of_client": [0] * 41}}, set()),
    ],
    ids=["nothing", "no evaluation", "all NaN", "one NaN", "one round", "one client", "one point", "no plane", "large"],
)  # fmt: skip
def test_a_figure_without_anything_to_show_is_none(
    handmade: Callable[..., Run], name: str, given: dict[str, Any], expected: set[str]
) -> None:
    """Never an error: a page is drawn while a run begins."""
    run = handmade(**{"groups": ["a", "b"], **given})
    chart = FIGURES[name](run)
    assert (chart is not None) == (name in expected)
    if chart is not None:
        chart.places()
        assert chart.svg()
