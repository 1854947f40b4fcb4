"""The figures of a sweep: against brute force and against the comparison itself; whatever is finished, or not."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from fairveil.comparison import compare
from fairveil.report import build_page
from fairveil.report.chart import Chart
from fairveil.report.comparisons import frontier, over_budgets, paired_differences
from fairveil.sweep import Cell, Sweep, SweepFolder, make_sweep, read_sweep, run_sweep

Score = Callable[[Cell], tuple[float, float] | None]  # mean and worst group of a run; None: not finished
EPSILONS = {"privacy.epsilon": [2.0, 8.0]}
VARIANTS = [{"name": "global"}, {"name": "oracle", "set": {"algorithm.name": "oracle"}}]


def result(cell: Cell, mean: float, worst: float, metric: str = "accuracy") -> dict[str, Any]:
    """What a finished run leaves, as far as a sweep reads it."""
    summary = {"mean": mean, "by_group": {"a": worst, "b": 2 * mean - worst}, "worst_group": "a"}
    summary |= {"worst_10_percent": worst, "worst": worst, "best": 1.0, "clients": 5}
    told = {"commit": "none", "data_fingerprint": "x", "fairveil": "0", "algorithm": "global", "rounds": 3}
    told |= {"epsilon": cell.config.privacy.epsilon or "infinity", "epsilon_spent": 1.0, "delta": 1e-3, "seconds": 1.0}
    return {"config_hash": cell.digest, **told, metric: summary}


@pytest.fixture
def swept(small: dict[str, Any], tmp_path: Path) -> Callable[..., SweepFolder]:
    """The folder of a sweep whose runs have these scores, as if they had been run, and read."""
    count = itertools.count()

    def write(
        score: Score, *, failed: Callable[[Cell], bool] = lambda cell: False, metric: str = "accuracy", **sweep: Any
    ) -> SweepFolder:
        made = make_sweep({"name": "trial", "base": small, "seeds": [0, 1, 2], **sweep})
        folder = tmp_path / str(next(count))
        (folder / "cells").mkdir(parents=True)
        (folder / "sweep.toml").write_text(made.config.to_toml())
        for cell in made.cells:
            at = folder / "cells" / f"{cell.label}-{cell.digest[:8]}"
            at.mkdir()
            found = score(cell)
            if failed(cell):
                (at / "failure.txt").write_text("it broke\nat length")
            elif found is not None:
                (at / "result.json").write_text(json.dumps(result(cell, *found, metric)))
        return read_sweep(folder)

    return write


def by_setting(values: Mapping[tuple[str, float], tuple[float, float]]) -> Score:
    """The same score for every seed, and a thousandth more for the next seed."""

    def score(cell: Cell) -> tuple[float, float]:
        mean, worst = values[cell.variant, cell.point["privacy.epsilon"]]
        return mean + cell.seed / 1000, worst

    return score


FOUR = {
    ("global", 2.0): (0.5, 0.3),
    ("global", 8.0): (0.7, 0.4),
    ("oracle", 2.0): (0.6, 0.5),
    ("oracle", 8.0): (0.8, 0.6),
}


# ---- against the budget ----------------------------------------------------------------------------


def test_a_measure_against_the_budget(swept: Callable[..., SweepFolder]) -> None:
    """Means of m, m + .001 and m + .002; Student's t with two degrees of freedom for the interval."""
    folder = swept(by_setting(FOUR), grid=EPSILONS, variants=VARIANTS)
    chart = over_budgets(folder.sweep, folder.result, "mean")
    assert chart is not None and chart.title == "Mean accuracy against epsilon" and "n = 3 seeds" in chart.caption
    half = stats.t.ppf(0.975, 2) * 0.001 / math.sqrt(3)
    for row in chart.data.to_dict("records"):
        expected = FOUR[row["variant"], row["privacy.epsilon"]][0] + 0.001
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((expected, expected - half, expected + half))
    (axes,) = chart.figure.axes
    drawn = {tuple(round(float(y), 9) for y in part.lines[0].get_ydata()) for part in axes.containers}  # type: ignore[attr-defined]
    assert drawn == {(0.501, 0.701), (0.601, 0.801)}
    worst = over_budgets(folder.sweep, folder.result, "worst_group")
    assert worst is not None and sorted(worst.data["mean"]) == pytest.approx([0.3, 0.4, 0.5, 0.6])


@pytest.mark.parametrize(
    ("grid", "across"),
    [
        ({"algorithm.rounds": [2, 3], "privacy.epsilon": [2.0, 8.0]}, "epsilon"),
        ({"algorithm.rounds": [2, 3], "algorithm.batch_size": [8, 16]}, "rounds"),
        ({"data.sizes": ["public", "rounded"], "algorithm.rounds": [2, 3]}, "rounds"),
        ({"privacy.epsilon": [8.0], "algorithm.rounds": [2, 3]}, "rounds"),
        ({"data.sizes": ["public", "rounded"]}, None),
        ({"privacy.epsilon": [8.0]}, None),
        ({}, None),
    ],
)
def test_what_goes_across_is_the_budget_or_the_first_key_with_numbers(
    swept: Callable[..., SweepFolder], grid: dict[str, Any], across: str | None
) -> None:
    folder = swept(lambda cell: (0.5, 0.4), grid=grid)
    chart = over_budgets(folder.sweep, folder.result, "mean")
    assert (chart.figure.axes[0].get_xlabel() if chart else None) == across
    other = frontier(folder.sweep, folder.result)
    assert other is not None and len(other.data) == len(folder.sweep.cells) // 3


def test_of_one_seed_no_interval_is_drawn_or_claimed(swept: Callable[..., SweepFolder]) -> None:
    """A bar of length 0 would look like certainty."""
    folder = swept(by_setting(FOUR), grid=EPSILONS, variants=VARIANTS, baseline="global", seeds=[0])
    charts = [
        over_budgets(folder.sweep, folder.result, "mean"), frontier(folder.sweep, folder.result),
        paired_differences(folder.sweep, folder.result),
    ]  # fmt: skip
    for chart in charts:
        assert chart is not None and "n = 1 seed, which gives no interval" in chart.caption
        for part in chart.figure.axes[0].containers:
            _, caps, bars = part.lines  # type: ignore[attr-defined]
            ends = [path.vertices for bar in bars for path in bar.get_paths()]
            assert all(np.isnan(end).any() for end in ends if len(end))
            assert all(np.isnan(np.array(cap.get_xydata(), float)).any(axis=1).all() for cap in caps)


# ---- mean and worst group --------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([0.1, 0.2, 0.3])), min_size=6, max_size=6
    ),
    errors=st.booleans(),
)
def test_the_frontier_holds_whatever_is_not_beaten_in_both(
    swept: Callable[..., SweepFolder], values: list[tuple[float, float]], errors: bool
) -> None:
    """By brute force over all pairs; an error is better when it is lower."""
    points = dict(zip(itertools.product(["global", "oracle"], [2.0, 4.0, 8.0]), values, strict=True))
    folder = swept(
        lambda cell: points[cell.variant, cell.point["privacy.epsilon"]], metric="rmse" if errors else "accuracy",
        grid={"privacy.epsilon": [2.0, 4.0, 8.0]}, variants=VARIANTS, seeds=[0],
    )  # fmt: skip
    chart = frontier(folder.sweep, folder.result)
    assert chart is not None
    sign = -1 if errors else 1

    def beaten(one: tuple[float, float]) -> bool:
        pairs = [(sign * (mean - one[0]), sign * (worst - one[1])) for mean, worst in values]
        return any(a >= 0 and b >= 0 and (a > 0 or b > 0) for a, b in pairs)

    assert len(chart.data) == 6
    for row in chart.data.to_dict("records"):
        point = points[row["variant"], row["privacy.epsilon"]]
        assert (row["mean_mean"], row["mean_worst"]) == pytest.approx(point)
        assert row["not_beaten"] == (not beaten(point))


# ---- paired differences ----------------------------------------------------------------------------


def test_differences_are_those_of_the_comparison(swept: Callable[..., SweepFolder]) -> None:
    random = np.random.default_rng(0)
    scores: dict[str, tuple[float, float]] = {}
    folder = swept(
        lambda cell: scores.setdefault(str(cell), tuple(random.uniform(0, 1, 2))),  # type: ignore[arg-type]
        grid=EPSILONS, variants=VARIANTS, baseline="global",
    )  # fmt: skip
    chart = paired_differences(folder.sweep, folder.result)
    assert chart is not None
    rows = [
        {"variant": c.variant, **c.point, "seed": c.seed, "accuracy_mean": scores[str(c)][0],
         "accuracy_worst_group": scores[str(c)][1]} for c in folder.sweep.cells
    ]  # fmt: skip
    measures = {"accuracy_mean": True, "accuracy_worst_group": True}
    expected = compare(pd.DataFrame(rows), ["privacy.epsilon"], "global", measures).drop(columns="better")
    key = ["privacy.epsilon", "measure"]
    pd.testing.assert_frame_equal(
        chart.data.sort_values(key, ignore_index=True), expected.sort_values(key, ignore_index=True)
    )
    drawn = sorted(x for part in chart.figure.axes[0].containers for x in part.lines[0].get_xdata())  # type: ignore[attr-defined]
    assert drawn == pytest.approx(sorted(expected["difference"]))
    assert len(chart.marks) == 4 and all("points" in text for *_, text in chart.marks)


def test_settings_with_long_names_keep_a_line_each(swept: Callable[..., SweepFolder]) -> None:
    """Names are shortened where they are written, and nowhere else: these two begin with the same forty letters."""
    long = "a-variant-with-a-name-that-is-far-too-long"
    variants = [
        {"name": "global"},
        {"name": f"{long}-1", "set": {"algorithm.batch_size": 32}},
        {"name": f"{long}-2", "set": {"algorithm.batch_size": 16}},
    ]
    folder = swept(lambda cell: (0.5 + len(cell.variant) / 1000, 0.4), variants=variants, baseline="global")
    chart = paired_differences(folder.sweep, folder.result)
    assert chart is not None
    (axes,) = chart.figure.axes
    assert len(axes.get_yticks()) == 2
    heights = {round(y, 6) for part in axes.containers for y in part.lines[0].get_ydata()}  # type: ignore[attr-defined]
    assert heights == {-0.15, 0.15, 0.85, 1.15}
    assert any(text.startswith(f"{long}-2") for *_, text in chart.marks)


def test_without_a_baseline_nothing_is_compared(swept: Callable[..., SweepFolder]) -> None:
    folder = swept(by_setting(FOUR), grid=EPSILONS, variants=VARIANTS)
    assert paired_differences(folder.sweep, folder.result) is None


# ---- whatever is finished, or not ------------------------------------------------------------------


def figures(folder: SweepFolder) -> list[Chart | None]:
    sweep, found = folder.sweep, folder.result
    return [over_budgets(sweep, found, "mean"), over_budgets(sweep, found, "worst_group"), frontier(sweep, found),
            paired_differences(sweep, found)]  # fmt: skip


def test_failed_and_unfinished_runs_are_left_out(swept: Callable[..., SweepFolder]) -> None:
    """Seed 2 is not there yet, and seed 1 of the oracle at 2.0 has failed: it has one seed, the others two."""
    folder = swept(
        lambda cell: by_setting(FOUR)(cell) if cell.seed < 2 else None,
        failed=lambda cell: (cell.variant, cell.point["privacy.epsilon"], cell.seed) == ("oracle", 2.0, 1),
        grid=EPSILONS, variants=VARIANTS, baseline="global",
    )  # fmt: skip
    assert [failure.error.splitlines()[0] for failure in folder.result.failures] == ["it broke"]
    budget, _, front, paired = figures(folder)
    assert budget is not None and front is not None and paired is not None
    counts = {(row["variant"], row["privacy.epsilon"]): row["n"] for row in budget.data.to_dict("records")}
    assert counts == {("global", 2.0): 2, ("global", 8.0): 2, ("oracle", 2.0): 1, ("oracle", 8.0): 2}
    assert "n = 1 to 2 seeds" in budget.caption and len(front.data) == 4 and set(paired.data["n"]) == {1, 2}
    html = build_page(folder.result.folder).html()
    assert "7 of 12" in html and "it broke" in html


@pytest.mark.parametrize("sweep", [{}, {"grid": EPSILONS}, {"variants": VARIANTS, "baseline": "global"}])
def test_of_a_sweep_that_has_just_begun_there_is_a_page_and_no_figure(
    swept: Callable[..., SweepFolder], sweep: dict[str, Any]
) -> None:
    """Without variants, without a grid, with neither; and before any run has a folder."""
    folder = swept(lambda cell: None, **sweep)
    assert figures(folder) == [None] * 4
    at = folder.result.folder
    assert "0 of" in build_page(at).html()
    for path in (*at.glob("cells/*"), at / "cells"):
        path.rmdir()
    assert "0 of" in build_page(at).html()


def test_a_sweep_of_nothing_but_seeds_is_one_setting(swept: Callable[..., SweepFolder]) -> None:
    folder = swept(lambda cell: (0.5 + cell.seed / 10, 0.4))
    budget, worst, front, paired = figures(folder)
    assert budget is None and worst is None and paired is None and front is not None
    assert front.data["mean_mean"].tolist() == pytest.approx([0.6]) and front.data["not_beaten"].tolist() == [True]
    assert [text for *_, text in front.marks] == ["trial: mean 60.0%, worst group 40.0%"]


def test_an_infinite_price_is_no_guarantee_for_all(swept: Callable[..., SweepFolder]) -> None:
    privacy = {"name": "plain", "set": {"privacy": {"noise_multiplier": 0.0, "delta": 1e-3}}}
    folder = swept(lambda cell: (0.5, 0.4), variants=[VARIANTS[0], privacy])
    assert "That is no guarantee." in build_page(folder.result.folder).html()


@pytest.mark.slow
def test_the_page_of_a_real_sweep(small: dict[str, Any], tmp_path: Path) -> None:
    """Bands over seeds: the lowest and the highest of the two runs that are there."""
    base = small | {"algorithm": {"name": "global", "rounds": 2, "batch_size": 64, "learning_rate": 1.0}}
    sweep: Sweep = make_sweep({"name": "real", "base": base, "seeds": [0, 1], "grid": EPSILONS})
    run_sweep(sweep, tmp_path / "real", jobs=2)
    html = build_page(tmp_path / "real").html()
    assert "4 of 4" in html and "mean over 2 seeds" in html and "finished" in html
