"""Pages of runs and sweeps in every state: begun, with one group, with very many, with rounds that lack someone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fairveil.reading import load_run
from fairveil.report import build_page
from fairveil.report.budget import budget_by_round
from fairveil.report.chart import COLOURS, shape_of
from fairveil.report.figures import client_dots, client_histogram, scores_by_round, signal_by_round
from fairveil.report.page import Card, Table
from fairveil.report.tables import Judged, group_table
from fairveil.store import Score, Store
from fairveil.sweep import make_sweep

Make = Callable[..., Any]
TWO = [("a", "near"), ("b", "near"), ("c", "far"), ("d", "far")]


def data_of(html: str) -> dict[str, Any]:
    """The block of JSON, read as strictly as a browser does."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    plain: dict[str, Any] = json.loads(found[1], parse_constant=refuse)
    return plain


def cards_of(folder: Path) -> dict[str, Card]:
    return {block.label: block for block in build_page(folder).sections[0].blocks if isinstance(block, Card)}


def test_a_run_in_its_first_round_has_a_page(written: Make, tmp_path: Path) -> None:
    """Planned and promised, and nothing released or scored yet."""
    written(tmp_path / "run", TWO, rounds=0, planned=3).write()
    page = build_page(tmp_path / "run")
    assert page.state.startswith("Not finished: 0 of 3 rounds are done.")
    assert cards_of(tmp_path / "run")["Scores"].value == "none yet"
    assert data_of(page.html()) == {}


def test_groups_have_the_same_colour_in_every_figure(written: Make, tmp_path: Path) -> None:
    """Whichever of them comes first among the dots, where the worst client is first."""
    names = ["x", "y", "z"]
    one = written(tmp_path / "run", [(f"{group}{n}", group) for n in range(3) for group in names])
    run = load_run(one.write())
    found = []
    for make in (lambda: scores_by_round([run]), lambda: client_dots(run), lambda: client_histogram(run)):
        chart = make()
        assert chart
        (legend,) = chart.figure.legends
        texts = [text.get_text().split()[0] for text in legend.get_texts()]
        handles = dict(zip(texts, legend.legend_handles, strict=True))
        colours = {}
        for name in names:
            handle: Any = handles[name]
            colour = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
            colours[name] = to_hex(np.ravel(colour)[:3] if not isinstance(colour, str) else colour).upper()
        found.append(colours)
    assert found == [dict(zip(names, COLOURS[:3], strict=True))] * 3


def test_points_differ_in_colour_or_shape() -> None:
    assert len({(COLOURS[n % len(COLOURS)], shape_of(n)) for n in range(49)}) == 49


def test_a_long_name_does_not_hide_who_is_worst(written: Make, tmp_path: Path) -> None:
    clients = [(str(n), f"{'long' * 20} {n % 2}") for n in range(4)]
    chart = scores_by_round([load_run(written(tmp_path / "run", clients).write())])
    assert chart
    texts = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert sum(text.endswith("… (worst)") for text in texts) == 1


def test_bars_of_the_budget_leave_no_holes(written: Make, tmp_path: Path) -> None:
    """More rounds than prices: a bar reaches back to the one before it, and is what was spent at its end."""
    chart = budget_by_round(load_run(written(tmp_path / "run", TWO, rounds=60).write()))
    assert chart and len(chart.data) == 24
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in chart.figure.axes[0].patches]
    assert bars[0][0] == 0.5 and bars[-1][1] == 60.5
    assert [end for _, end in bars[:-1]] == pytest.approx([start for start, _ in bars[1:]])
    assert (np.diff(chart.data["model update"]) > 0).all()


def test_one_group_is_not_called_the_worst(written: Make, tmp_path: Path) -> None:
    folder = written(tmp_path / "run", [(str(n), "all") for n in range(4)]).write()
    judged = Judged.of(load_run(folder))
    assert judged and {"Worst group", "Gap between groups"}.isdisjoint(cards_of(folder))
    assert cards_of(folder)["Worst client"].note == "of 4 clients, which are one group"
    assert {cell.mark for row in group_table(judged).rows for cell in row} == {""}
    tables = {t.key: t for s in build_page(folder).sections for t in s.blocks if isinstance(t, Table)}
    assert "gap between groups" not in [row[0].text for row in tables["figures"].rows]


def test_a_round_without_someone_leaves_a_page_that_can_be_read(written: Make, tmp_path: Path) -> None:
    """Where clients are sampled, nobody of a group may have taken part: a mark at no place would spoil all others."""
    one = written(tmp_path / "run", TWO, rounds=2)
    one.write()
    with Store(one.folder) as store:
        kept = [Score(2, c, "train", "local_update, ask 1", "signal_to_noise", 0.5) for c in (0, 1)]  # "near" only
        one.save(store, 2, kept)
    chart = signal_by_round([load_run(one.folder)])
    assert chart and [(row["group"], row["round"]) for _, row in chart.data.iterrows()] == [
        ("near", 1), ("near", 2), ("far", 1)
    ]  # fmt: skip
    data = data_of(build_page(one.folder).html())
    assert len(data["signal-by-round"]["marks"]) == 3


def test_very_many_groups_make_a_page_in_time(written: Make, tmp_path: Path) -> None:
    """Every client a group of its own: the first have colours, the others are one, and no table is without end."""
    folder = written(tmp_path / "run", [(f"client {n}", f"group {n}") for n in range(300)]).write()
    started = time.process_time()
    html = build_page(folder).html()
    assert time.process_time() - started < 15 and len(html) < 3e6
    assert "289 other groups" in html and "289 groups that do better are grey" in html
    histogram = client_histogram(load_run(folder))
    assert histogram and histogram.data.shape == (40, 302) and histogram.data.iloc[:, 2:].sum().sum() == 300


def test_a_sweep_that_has_hardly_begun_has_a_page(tmp_path: Path, small: dict[str, Any]) -> None:
    """None of a setting's runs, or none at all, has left anything yet."""
    made = make_sweep({"name": "new", "base": small, "seeds": [0, 1], "grid": {"privacy.epsilon": [2.0, 8.0]}})
    (tmp_path / "cells").mkdir()
    (tmp_path / "sweep.toml").write_text(made.config.to_toml())
    page = build_page(tmp_path)
    assert page.state == "0 of 4 finished, 0 running." and page.html().count("waiting") == 4
