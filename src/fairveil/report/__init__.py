"""The report: figures of a run or a sweep, each a function, and the page that holds them."""

from __future__ import annotations

from pathlib import Path

from fairveil.errors import UserError
from fairveil.reading import load_run
from fairveil.report.chart import Chart
from fairveil.report.page import Page
from fairveil.report.run_page import run_page
from fairveil.report.sweep_page import sweep_page
from fairveil.store import write_whole
from fairveil.sweep import read_sweep

__all__ = ["Chart", "Page", "build_page", "run_page", "sweep_page", "write_report"]


def build_page(path: Path | str) -> Page:
    """The page of a run folder or of the folder of a sweep.

    Raises:
        UserError: it is neither.
        RunFault: it is damaged.
    """
    folder = Path(path)
    return sweep_page(read_sweep(folder)) if (folder / "sweep.toml").exists() else run_page(load_run(folder))


def write_report(path: Path | str, out: Path | None = None) -> Path:
    """Write the page of a run or a sweep as one HTML file; into its folder, as report.html, if not told otherwise."""
    folder = Path(path)
    page = build_page(folder).html()
    to = out or folder / "report.html"
    try:
        write_whole(to, page.encode())
    except OSError as error:
        raise UserError(
            f"{to} cannot be written.", f"{error.strerror}.", "--out, in a folder you may write to"
        ) from error
    return to
