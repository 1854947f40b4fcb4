"""What every figure is: a picture, the numbers behind it, and what it tells where one points at it.

Colours are those of Okabe and Ito (2008), which people with any colour vision can tell apart; past seven of them lines
change their dashes and points their shapes. Texts are never read as formulas or markup: a group may be called "$a$".
"""

from __future__ import annotations

import io
import math
import re
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#9a9a9a"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
SHAPES = "osD^vPX"
SIZE = (5.55, 3.5)  # inches: 400 points wide, so that a text of 10 is still one of 9 on a phone
STYLE: Any = {
    "text.parse_math": False,
    "svg.fonttype": "none",  # texts stay texts: small, and found by a search
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
SHARES = ("accuracy", "clipped")  # metrics that are shares of something
MOST_DRAWN = 2000  # points that are each an element of the picture; more are pixels, or the page would grow with them
LONGEST = 22  # characters of a name in a legend
ROOM, LINE = 4, 0.18  # lines of a legend that a figure has room for, and the inches of one more
JOINERS = "\u200c\u200d"  # letters of some scripts, and faces, are made of parts that these hold together


@dataclass(frozen=True)
class Chart:
    """A figure.

    Attributes:
        key: names it among others, and its file of numbers: letters, digits and "-".
        caption: what is shown, over how many, and how to read it.
        figure: matplotlib's, to be saved in any form.
        data: the numbers that are drawn.
        marks: axes, x, y (in the units of the axes) and what is there, for whoever points at it.
    """

    key: str
    title: str
    caption: str
    figure: Figure
    data: pd.DataFrame
    marks: list[tuple[Axes, float, float, str]] = field(default_factory=list)

    def svg(self) -> str:
        """The picture, to stand in a page."""
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with styled(), mpl.rc_context({"svg.hashsalt": self.key}):  # the same picture, the same file
            self.figure.savefig(file, format="svg", metadata=nothing)
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)  # the page has it
        # ids are names for the whole page: those of this picture get its name, and texts between its tags do not
        text = re.sub("<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.key}-", tag[0]), text)
        return re.sub(
            r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img" class="picture">', text, count=1
        )

    def places(self) -> list[tuple[float, float, str]]:
        """Where the marks are, as shares of width and height from the top left, and their texts.

        What has no value has no place.
        """
        with styled():
            self.figure.draw_without_rendering()  # decides where the axes are
        width, height = float(self.figure.bbox.width), float(self.figure.bbox.height)
        found = []
        for axes, x, y, text in self.marks:
            across, up = axes.transData.transform((x, y))
            if not math.isfinite(across + up):  # nowhere
                continue
            found.append((round(float(across) / width, 4), round(1 - float(up) / height, 4), printable(text)))
        return found

    def csv(self) -> str:
        """The numbers. Lines end as RFC 4180 has it; pandas then puts a name that holds either sign in quotes."""
        return self.data.to_csv(index=False, lineterminator="\r\n")

    def save(self, path: Path | str) -> None:
        """Write the picture (.pdf, .svg, .png), or its numbers (.csv), by the name of the file."""
        if str(path).endswith(".csv"):
            Path(path).write_bytes(self.csv().encode())
        else:
            with styled():
                self.figure.savefig(path, dpi=200)

    def _repr_svg_(self) -> str:
        """For notebooks."""
        return self.svg()


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib as it is meant here; what a user has set is put back."""
    with mpl.rc_context(), warnings.catch_warnings():
        # a browser has more letters than this font
        warnings.filterwarnings("ignore", "Glyph .* missing from font|Matplotlib currently does not support")
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def new_axes(height: float = SIZE[1], **options: Any) -> tuple[Figure, Axes]:
    """An empty figure of the usual width; without a window, and without the state of pyplot (threads draw too)."""
    figure = Figure(figsize=(SIZE[0], height))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot(**options)


def style_of(number: int) -> dict[str, Any]:
    """Colour, dashes of the n-th line."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def shape_of(number: int) -> str:
    """Shape of the n-th kind of points: another one where the colours begin again."""
    return SHAPES[(number + number // len(COLOURS)) % len(SHAPES)]


def shortened(name: str, longest: int = LONGEST) -> str:
    """A name for a legend or an axis, on one line."""
    line = printable(" ".join(name.split())) or "(no name)"
    line = line if len(line) <= longest else f"{line[: longest - 1]}…"
    return f"\u200b{line}" if line.startswith("_") else line  # matplotlib hides names that begin so


def printable(text: str) -> str:
    """Without what neither a page nor a picture can hold."""

    def holds(letter: str) -> bool:
        return letter.isprintable() or letter in "\n\t" or letter in JOINERS or unicodedata.category(letter) == "Zs"

    return text if text.isprintable() else "".join(filter(holds, text))


def slug(text: str) -> str:
    """A text as part of a key."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text)


def legend_below(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> None:
    """The legend under the axes, in as many columns as fit."""
    if entries:
        names = [shortened(name) for _, name in entries]
        columns = max(1, min(len(names), int(56 / (max(map(len, names)) + 5))))
        handles = [handle for handle, _ in entries]
        more = math.ceil(len(names) / columns) - ROOM
        figure.set_figheight(figure.get_figheight() + LINE * max(0, more))  # the axes keep theirs
        figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8.5, handlelength=2.2)


def as_percent(axes: Axes, which: str = "y") -> None:
    """Fractions on an axis as percentages."""
    getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1.0))


def kept_within(axes: Axes, which: str, low: float, high: float) -> None:
    """An axis that ends where values do: intervals of few seeds reach beyond what an accuracy can be."""
    ends = getattr(axes, f"get_{which}lim")()
    getattr(axes, f"set_{which}lim")(max(ends[0], low), min(ends[1], high))


def in_words(value: float, metric: str) -> str:
    """A value for people: a share as a percentage."""
    if value != value:
        return "none"
    return f"{100 * value:.1f}%" if metric in SHARES else f"{value:.4g}"
