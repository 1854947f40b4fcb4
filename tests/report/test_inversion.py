"""What gradient inversion has found, as the report shows it: a run folder and a finding written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairveil.reading import Run, load_run
from fairveil.report.inversion import inversion_figure, inversion_table
from fairveil.report.page import Page, Section


def attempt(strength: str, value: float, **more: Any) -> dict[str, Any]:
    """An image of one value, off by as much from a truth of zeros."""
    decibels = 0.0 - 20 * math.log10(value) if value else "infinity"
    plain = {
        "strength": strength, "seen": "the client's update", "noise_multiplier": 0.5, "epsilon": 8.25, "noise": 12.0,
        "guessed": 3, "form": "squared", "x": [value] * 12, "error": value, "psnr": decibels, "ssim": 0.25,
    }  # fmt: skip
    return plain | more


def finding(**more: Any) -> dict[str, Any]:
    none = attempt("none", 0.0, epsilon="infinity", noise=0.0, noise_multiplier=0.0, ssim=1.0)
    mean, flat = {"error": 0.1, "psnr": 20.0, "ssim": 0.4}, {"error": 0.2, "psnr": 14.0, "ssim": -0.001}
    plain = {
        "unit": "record", "client": 2, "label": 3, "features": [1, 3, 4], "image": True, "truth": [0.0] * 12,
        "guesses": {"mean": mean, "flat": flat}, "others": 1234, "steps": 1,
        "attempts": [none, attempt("ε = 10", 0.5), attempt("this run", 1.0, guessed=7)],
    }  # fmt: skip
    return plain | more


@pytest.fixture
def attacked(written: Callable[..., Any], tmp_path: Path) -> Callable[..., Run]:
    def write(found: dict[str, Any] | None) -> Run:
        folder = written(tmp_path / "run", [("a", "all"), ("b", "all")]).write()
        if found is not None:
            (folder / "attacks").mkdir()
            (folder / "attacks" / "inversion.json").write_text(json.dumps(found, allow_nan=False))
        return load_run(folder)

    return write


def texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[cell.text for cell in row] for row in rows]


def test_pictures_of_what_was_found(attacked: Callable[..., Run]) -> None:
    chart = inversion_figure(attacked(finding()))
    assert chart is not None
    assert [axes.get_title() for axes, *_ in chart.marks] == [
        "true record\nlabel 3", "unprotected\nexact", "ε = 10\n6.0 dB", "this run\n0.0 dB",
    ]  # fmt: skip
    for (axes, x, y, _), value in zip(chart.marks, (0.0, 0.0, 0.5, 1.0), strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), np.full((3, 4), value))
        assert image.get_clim() == (0, 1) and (x, y) == (1.5, 1.0)  # one scale for all pictures
    assert chart.marks[2][3] == (
        "ε = 10 (the client's update): 6.0 dB, SSIM 0.25; noise 12 times as long as what it hides"
    )
    assert "A training record of client 2 (label 3)" in chart.caption and "n = 1 record" in chart.caption
    assert "the mean of 1,234 other records has 20.0 dB" in chart.caption
    assert list(chart.data["strength"]) == ["none", "ε = 10", "this run"]
    assert chart.data["psnr"].iloc[0] == math.inf and chart.svg().count("<image") == 4
    assert len(chart.places()) == 4 and all(0 < x < 1 and 0 < y < 1 for x, y, _ in chart.places())


def test_pictures_in_colour(attacked: Callable[..., Run]) -> None:
    """Red, green, blue lie one behind the other in a record, and side by side in a picture."""
    channels = [1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0]
    found = finding(features=[3, 2, 2], truth=channels, attempts=[attempt("none", 0.0, x=channels)])
    chart = inversion_figure(attacked(found))
    assert chart is not None
    for axes, *_ in chart.marks:
        np.testing.assert_array_equal(axes.get_images()[0].get_array()[0, 0], [1.0, 0.5, 0.0])
        np.testing.assert_array_equal(axes.get_images()[0].get_array()[1, 1], [0.0, 0.5, 1.0])


def test_figures_of_what_was_found(attacked: Callable[..., Run]) -> None:
    table = inversion_table(attacked(finding()))
    assert table is not None
    assert [*table.columns[:5]] == ["strength", "PSNR (dB)", "SSIM", "error", "label read off"]
    assert [*table.columns[5:]] == ["what is seen", "noise z", "its ε", "noise / update"]
    assert texts(table.rows) == [
        ["unprotected", "exact", "1.00", "0.000", "3, right", "the client's update", "0", "infinity", "0"],
        ["ε = 10", "6.0", "0.25", "0.500", "3, right", "the client's update", "0.5", "8.25", "12"],
        ["this run", "0.0", "0.25", "1.000", "7, wrong", "the client's update", "0.5", "8.25", "12"],
        ["guess: mean of 1,234 other records", "20.0", "0.40", "0.100", "", "nothing", "", "", ""],
        ["guess: the mean level of these", "14.0", "0.00", "0.200", "", "nothing", "", "", ""],
    ]
    assert "in 1 step;" in table.caption and "one release" in table.caption and "share" not in table.caption


def test_a_share_is_what_a_trusted_server_sees(attacked: Callable[..., Run]) -> None:
    share = attempt("share", 0.0, seen="the client's share of the sum", guessed=None)
    table = inversion_table(attacked(finding(unit="client", steps=4, attempts=[share])))
    assert table is not None and "what the server sees" in table.caption and "in 4 steps;" in table.caption
    assert texts(table.rows)[0][:6] == [
        "client's share", "exact", "0.25", "0.000", "not from this model", "the client's share of the sum",
    ]  # fmt: skip


def test_metric_privacy_has_no_epsilon_of_one_release(attacked: Callable[..., Run]) -> None:
    found = finding(unit="metric", attempts=[attempt("ν = 0.1", 0.1, epsilon=None, noise_multiplier=0.1)])
    table = inversion_table(attacked(found))
    assert table is not None and "noise ν" in table.columns and "its ε" not in table.columns
    assert all(len(row) == len(table.columns) for row in table.rows) and "one release" not in table.caption


def test_records_that_are_no_images_have_a_table_only(attacked: Callable[..., Run]) -> None:
    flat = {"error": 0.2, "psnr": 14.0, "ssim": None}
    found = finding(
        features=[12], image=False, label=None, guesses={"mean": flat, "flat": flat},
        attempts=[attempt("none", 0.1, ssim=None, noise="infinity")],
    )  # fmt: skip
    run = attacked(found)
    assert inversion_figure(run) is None
    table = inversion_table(run)
    assert table is not None and "PSNR (dB)" not in table.columns
    assert texts(table.rows)[0][1] == "0.100" and texts(table.rows)[0][-1] == "infinity"


def test_a_run_that_was_not_attacked(attacked: Callable[..., Run]) -> None:
    run = attacked(None)
    assert inversion_figure(run) is None and inversion_table(run) is None


def test_on_a_page(attacked: Callable[..., Run]) -> None:
    """Numbers for hovering are strict JSON also where a record was found exactly; a picture brings its pixels along."""
    run = attacked(finding())
    figure, table = inversion_figure(run), inversion_table(run)
    assert figure is not None and table is not None
    html = Page("title", "about", [Section("attacks", "Attacks", [figure, table])]).html()
    assert html.count("data:image/png;base64,") >= 4 and "What can be seen in an update" in html
