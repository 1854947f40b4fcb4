"""The section on attacks: what an audit has found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairveil.reading import Run, load_run
from fairveil.report import build_page
from fairveil.report.audit import audit_card, audit_figure, audit_table

FOUND: dict[str, Any] = {
    "epsilon_claimed": 7.9951, "epsilon_priced": 7.9951, "epsilon_lower_bound": 2.7949,
    "epsilon_lower_bound_at_delta": 0.0, "ceiling": 3.6,
    "delta": 1e-3, "confidence": 0.999, "canaries": 1000, "guesses": 254, "correct": 251, "rehearsals": 2,
    "unit": "record", "adjacency": "add-remove", "algorithm": "global", "rounds": 2, "seconds": 7.2,
    "by_certainty": [[1, 1], [10, 10], [100, 100], [254, 251]], "alarm": False,
}  # fmt: skip


@pytest.fixture
def audited(tmp_path: Path, written: Callable[..., Any]) -> Callable[..., Run]:
    def make(**found: Any) -> Run:
        folder = written(tmp_path / "run", [("a", "x"), ("b", "y")]).write()
        (folder / "attacks").mkdir()
        (folder / "attacks" / "audit.json").write_text(json.dumps(FOUND | found))
        return load_run(folder)

    return make


def rows(run: Run) -> dict[str, str]:
    table = audit_table(run)
    assert table is not None
    return {name.text: value.text for name, value in table.rows}


def test_a_lower_bound_is_rounded_down_and_a_claim_up(audited: Callable[..., Run]) -> None:
    found = rows(audited())
    assert found["epsilon, claimed"] == "7.996"
    least = [value for name, value in found.items() if name.startswith("epsilon, at least, with confidence 99.9%")]
    assert least == ["2.794"]
    assert found["verdict"] == "the claim was not refuted"


def test_an_alarm_is_loud(audited: Callable[..., Run]) -> None:
    run = audited(epsilon_lower_bound=9.0, alarm=True)
    card = audit_card(run)
    assert card is not None and card.warn and card.value == "ALARM: ε ≥ 9.000"
    assert rows(run)["verdict"].startswith("ALARM")


def test_guesses_are_drawn_as_they_were(audited: Callable[..., Run]) -> None:
    chart = audit_figure(audited())
    assert chart is not None
    assert chart.data["share"].tolist() == pytest.approx([1, 1, 1, 251 / 254])
    assert len(chart.marks) == 4 and "251 of the 254 surest" in chart.marks[-1][3]
    assert chart.svg().startswith("<svg")


def test_without_a_claim_there_is_no_line_for_it(audited: Callable[..., Run]) -> None:
    run = audited(epsilon_claimed="infinity")
    chart = audit_figure(run)
    assert chart is not None and len(chart.figure.legends[0].get_texts()) == 2
    assert rows(run)["epsilon, claimed"] == "none (infinite)"


def test_the_page_shows_it_and_only_if_it_is_there(audited: Callable[..., Run], tmp_path: Path) -> None:
    run = audited()
    page = build_page(run.folder)
    section = next(section for section in page.sections if section.key == "attacks")
    assert [block.key for block in section.of("Figure")] == ["audit-guesses", "audit"]  # type: ignore[union-attr]
    assert "How well canaries are found" in page.html() and "What attacks find" in page.html()
    assert any(card.label == "Audit" for card in page.sections[0].of("Card"))  # type: ignore[union-attr]
    (run.folder / "attacks" / "audit.json").unlink()
    assert "What attacks find" not in build_page(run.folder).html()
