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
from fairveil.report.comparisons import between_groups, frontier, over_budgets, paired_differences
from fairveil.report.page import Table
from fairveil.report.sweep_page import sweep_page
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
        score: Score, *, failed: Callable[[Cell], bool] = lambda cell: False, metric: str = "accuracy",
        more: Callable[[Cell], dict[str, Any]] = lambda cell: {}, **sweep: Any,
    ) -> SweepFolder:  # fmt: skip
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
                (at / "result.json").write_text(json.dumps(result(cell, *found, metric) | more(cell)))
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


# ---- metric privacy: against the noise -------------------------------------------------------------

NOISES, HYPOTHESES = [0.0, 0.1, 1.0, 5.0], [1, 3]
METRIC = {
    "base": {
        "data": {"dataset": "linear-clusters", "options": {"clients": [4, 4]}},
        "model": {"name": "linear"},
        "algorithm": {"name": "metric-pfl", "rounds": 2},
        "privacy": {"noise_multiplier": 1.0, "clip_norm": 0.5},
    },
    "grid": {"algorithm.hypotheses": HYPOTHESES, "privacy.noise_multiplier": NOISES},
    "metric": "rmse",
}
PARITY = "clients: demographic parity"


def noisy(cell: Cell) -> tuple[float, int]:
    return cell.point["privacy.noise_multiplier"], cell.point["algorithm.hypotheses"]


def differences_and_budgets(cell: Cell) -> dict[str, Any]:
    """Parity nu/10 + k/100 + seed/1000; budgets k/nu and 10 k/nu, and one more for the next seed."""
    nu, k = noisy(cell)
    parity = {"value": nu / 10 + k / 100 + cell.seed / 1000, "low": 0.0, "high": 1.0, "n": 9, "unit": "clients"}
    spent = {"median": k / nu + cell.seed, "maximum": 10 * k / nu + cell.seed} if nu else {}
    return {
        "fairness": {"clients": {"accuracy": parity, "demographic parity": parity}},
        "budget": spent or dict.fromkeys(("median", "maximum"), "infinity"),
    }


def test_differences_between_groups_against_the_noise(swept: Callable[..., SweepFolder]) -> None:
    """A line for each number of hypotheses, whichever key comes first in the grid; a noise of 0 has its place."""
    folder = swept(lambda cell: (noisy(cell)[0] + noisy(cell)[1], 9.0), more=differences_and_budgets, **METRIC)
    assert between_groups(folder.result) == [PARITY]
    half = stats.t.ppf(0.975, 2) * 0.001 / math.sqrt(3)
    chart, error = (over_budgets(folder.sweep, folder.result, measure) for measure in (PARITY, "mean"))
    assert chart is not None and error is not None
    assert chart.title == "Demographic parity difference against noise multiplier"
    assert len(chart.data) == 8
    for row in chart.data.to_dict("records"):
        mean = row["privacy.noise_multiplier"] / 10 + row["algorithm.hypotheses"] / 100 + 0.001
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((mean, mean - half, mean + half))
    for one, at in ((chart, lambda nu, k: nu / 10 + k / 100 + 0.001), (error, lambda nu, k: nu + k)):
        (axes,) = one.figure.axes
        drawn = [part.lines[0].get_xydata() for part in axes.containers]  # type: ignore[attr-defined]
        assert len(drawn) == 2
        for k, points in zip(HYPOTHESES, drawn, strict=True):
            assert points == pytest.approx(np.array([(nu, at(nu, k)) for nu in NOISES]))
        names = [text.get_text() for text in one.figure.legends[0].get_texts()]
        assert names == ["hypotheses 1", "hypotheses 3"] and axes.get_xlabel() == "noise multiplier"
        across = [place for place, *_ in one.places()][:4]
        assert min(np.diff(across)) > 0.1  # 0 and 0.1 are not on top of each other
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.1", "1", "5"]
    assert chart.figure.axes[0].get_ylim()[0] >= -0.02 and error.figure.axes[0].get_ylim()[0] >= 0


def budgets_of(folder: SweepFolder) -> list[Table]:
    (section,) = [section for section in sweep_page(folder).sections if section.key == "comparison"]
    return [block for block in section.blocks if isinstance(block, Table) and block.key == "budgets"]


def test_budgets_as_a_table_of_noise_and_hypotheses(swept: Callable[..., SweepFolder]) -> None:
    """Mean over three seeds: k/nu + 1 and 10 k/nu + 1. The runs with three hypotheses at 5.0 have failed."""
    folder = swept(
        lambda cell: (1.0, 1.0), more=differences_and_budgets, failed=lambda cell: noisy(cell) == (5.0, 3), **METRIC
    )
    (table,) = budgets_of(folder)
    assert table.columns == ["noise multiplier", "1 hypothesis", "3 hypotheses"] and "(n = 3)" in table.caption
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["0", "–, –", "–, –"],
        ["0.1", "11, 101", "31, 301"],
        ["1", "2, 11", "4, 31"],
        ["5", "1.2, 3", ""],
    ]
    html = build_page(folder.result.folder).html()
    assert "Demographic parity difference against noise multiplier" in html and "–, –" in html


def test_budgets_of_other_grids_have_a_line_for_each_setting(swept: Callable[..., SweepFolder]) -> None:
    def more(cell: Cell) -> dict[str, Any]:
        return {"budget": {"median": 2.0, "maximum": 8.5}} if cell.variant == "plain" else {}

    variants = [{"name": "plain"}, {"name": "gauss", "set": {"algorithm.noise": "gaussian", "privacy.delta": 1e-4}}]
    grid = {"algorithm.rounds": [2, 3]}
    folder = swept(lambda cell: (1.0, 1.0), more=more, variants=variants, **(METRIC | {"grid": grid}))
    (table,) = budgets_of(folder)
    assert table.columns == ["variant", "rounds", "median, maximum"]
    assert [[cell.text for cell in row] for row in table.rows] == [["plain", r, "2, 8.5"] for r in ("2", "3")]


def test_other_sweeps_have_no_table_of_budgets(swept: Callable[..., SweepFolder]) -> None:
    folder = swept(by_setting(FOUR), grid=EPSILONS, variants=VARIANTS)
    assert budgets_of(folder) == [] and between_groups(folder.result) == []


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


def test_a_single_variant_is_not_named_where_the_grid_tells_settings_apart(swept: Callable[..., SweepFolder]) -> None:
    """Its name would leave no room in a legend for what differs."""
    grid = EPSILONS | {"algorithm.rounds": [1, 2]}
    budget = figures(swept(lambda cell: (0.5, 0.4), grid=grid, variants=VARIANTS[:1]))[0]
    assert budget is not None and {text.partition(",")[0] for *_, text in budget.marks} == {"rounds 1", "rounds 2"}


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
