"""The section on votes: what was answered, beside the truth, and what these very answers cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairveil.config import make_config
from fairveil.reading import load_run
from fairveil.report import build_page, write_report
from fairveil.report.votes import answers_by_class, votes_table
from fairveil.run import RunResult, start_run


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Eight clients on digits; sigma is small, so that they are mostly right."""
    values: dict[str, Any] = {
        "data": {
            "dataset": "digits",
            "split": {"kind": "iid", "clients": 8},
            "server": {"dataset": "digits", "rows": "test"},
        },
        "model": {"name": "logistic"},
        "algorithm": {"name": "pate-fl", "queries": 50, "student_steps": 20, "publish_cost": True},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "engine": {"workers": 1},
    }
    return start_run(make_config(values), runs=tmp_path_factory.mktemp("votes"))


def test_answers_by_class_are_those_of_the_result(voted: RunResult) -> None:
    chart = answers_by_class(load_run(voted.folder))
    assert chart is not None and voted.votes is not None
    assert chart.data["true"].sum() == chart.data["answers"].sum() == 50
    assert chart.data["right"].sum() == round(50 * voted.votes["accuracy"])
    assert (chart.data["right"] <= chart.data[["true", "answers"]].min(axis=1)).all()
    assert len(chart.marks) == 10 and "n = 50 answers to 50 queries" in chart.caption
    assert chart.svg().startswith("<svg")


def test_the_price_of_these_data_is_labelled(voted: RunResult) -> None:
    table = votes_table(load_run(voted.folder))
    assert table is not None
    rows = {row[0].text: row[1].text for row in table.rows}
    assert rows["queries"] == "50"
    assert any("NOT SANITISED" in name and "not to be published" in name for name in rows)
    assert any("as published with noise" in name for name in rows)


def test_the_page_has_a_section(voted: RunResult, tmp_path: Path) -> None:
    page = write_report(voted.folder, tmp_path / "page.html").read_text()
    assert "Answers by class" in page and "NOT SANITISED" in page and "winners of votes" in page
    assert any(section.key == "votes" for section in build_page(voted.folder).sections)


def test_other_runs_have_no_votes(small: dict[str, Any], runs: Path) -> None:
    run = load_run(start_run(make_config(small), runs=runs).folder)
    assert answers_by_class(run) is None and votes_table(run) is None
