"""The page: sections of cards, texts, tables and figures in one HTML file that needs nothing else.

Whatever comes from a config, from the data or from a file name is text: the template escapes it, pictures hold it as
escaped XML, and numbers for hovering and downloading lie in a block of JSON that is read and never run. The one script
of the page is named by its hash in the content security policy, so that a browser would run no other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fairveil.report.chart import Chart, printable


@dataclass(frozen=True)
class Card:
    """One figure that is seen at once."""

    label: str
    value: str
    note: str
    warn: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph; `plain` keeps its lines and spaces, as a config needs it."""

    text: str
    plain: bool = False
    heading: str = ""


@dataclass(frozen=True)
class Cell:
    """One place of a table: what is shown, and what it is sorted by; NaN: by nothing, it stays at the end."""

    text: str
    order: float | str
    mark: str = ""  # a class of the style sheet: "good", "bad", "busy"

    @property
    def sorts(self) -> str:
        """The number it is sorted by, as a script reads it."""
        return str(self.order).replace("inf", "Infinity").replace("nan", "NaN")


@dataclass(frozen=True)
class Table:
    """A table that is sorted by a click on a heading."""

    key: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    beside: bool = False  # among the figures of its section, not below them

    @property
    def headings(self) -> list[tuple[str, bool]]:
        """The columns, and whether each holds numbers."""
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        numeric = [bool(cells) and all(isinstance(cell.order, float) for cell in cells) for cells in columns]
        return list(zip(self.columns, numeric, strict=True))


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    key: str
    title: str
    blocks: Sequence[Card | Text | Table | Chart]
    intro: str = ""

    def of(self, kind: str) -> list[Card | Text | Table | Chart]:
        """The blocks of a kind: "Card", "Text", "Figure" (charts, and tables beside them), "Table" (the others)."""

        def of_kind(block: Card | Text | Table | Chart) -> str:
            return "Figure" if isinstance(block, Chart) or getattr(block, "beside", False) else type(block).__name__

        return [block for block in self.blocks if of_kind(block) == kind]


MEASURED = (
    "Accuracies, losses and diagnostics on this page were computed without noise, for evaluation: keep it as you keep "
    "the data."
)


@dataclass(frozen=True)
class Page:
    """All that a report shows."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    state: str = ""  # how far it is, for who watches
    footer: str = MEASURED  # who may see it

    def html(self, *, stamp: str = "") -> str:
        """One file, which opens without a network.

        Args:
            stamp: of what is shown, if the page is served by `fairveil watch`: it then asks its server for news.
        """
        folder = files("fairveil.report")
        script, style, template = ((folder / f"page.{end}").read_text("utf-8") for end in ("js", "css", "html"))
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        environment.filters["printable"] = printable
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        charts = [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]
        data = {chart.key: {"marks": chart.places(), "csv": chart.csv()} for chart in charts}
        return environment.from_string(template).render(
            page=self, stamp=stamp, style=Markup(style), script=Markup(script), digest=digest,
            pictures={chart.key: Markup(_labelled(chart)) for chart in charts},
            data=Markup(_in_script(data)), alone=[s for s in self.sections if s.blocks],
        )  # fmt: skip


def _labelled(chart: Chart) -> str:
    return chart.svg().replace('role="img"', f'role="img" aria-label="{html.escape(printable(chart.title))}"', 1)


def _in_script(value: object) -> str:
    """JSON that cannot end the block it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)  # a browser reads no NaN
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def words(text: object) -> Cell:
    """A cell of text."""
    return Cell(str(text), str(text))


def number(value: float | None, form: str = ",.3f", mark: str = "") -> Cell:
    """A cell of a number; empty, and last, if there is none."""
    if value is None or math.isnan(value):
        return Cell("", math.nan)
    return Cell("infinity" if math.isinf(value) else format(value, form), float(value), mark)
