"""The pages in a browser: on a phone and on a desk, offline, read, sorted, pointed at, downloaded, printed, watched."""

from __future__ import annotations

import fcntl
import functools
import io
import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from fairveil.config import load_config
from fairveil.reading import load_run
from fairveil.report import Chart, build_page, write_report
from fairveil.report.figures import client_dots, scores_by_round
from fairveil.report.page import Cell, Table
from fairveil.run import run_in, start_run
from fairveil.store import Store
from fairveil.sweep import read_sweep
from fairveil.sweep.config import make_sweep
from fairveil.sweep.summary import cell_folders

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser
EXAMPLES = Path(__file__).parents[2] / "examples/digits"
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clustered run."""
    config = load_config(EXAMPLES / "r-dpcfl.toml", ["algorithm.rounds=3", "engine.workers=1"])
    return start_run(config, runs=tmp_path_factory.mktemp("runs")).folder


@pytest.fixture(scope="module")
def metric_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under metric privacy."""
    path = EXAMPLES.parent / "metric-privacy/synthetic.toml"
    changes = ["algorithm.rounds=3", "algorithm.clients_per_round=20", "engine.workers=1"]
    return start_run(
        load_config(path, [*changes, "data.options.clients=[30, 30]"]), runs=tmp_path_factory.mktemp("m")
    ).folder


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    """Its page."""
    return write_report(run)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two systems, two budgets, two seeds; run one after the other in this process."""
    folder = tmp_path_factory.mktemp("sweeps") / "budgets"
    base = tomllib.loads((EXAMPLES / "global.toml").read_text())
    base |= {"algorithm": base["algorithm"] | {"rounds": 2}, "engine": {"workers": 1}}
    made = make_sweep(
        {
            "name": "budgets",
            "base": base,
            "seeds": [0, 1],
            "baseline": "global",
            "grid": {"privacy.epsilon": [2.0, 8.0]},
            "variants": [{"name": "global"}, {"name": "oracle", "set": {"algorithm.name": "oracle"}}],
        }
    )
    (folder / "cells").mkdir(parents=True)
    (folder / "sweep.toml").write_text(made.config.to_toml())
    for cell, at in cell_folders(made, folder).items():
        run_in(cell.config, at)
    return folder


@pytest.fixture(scope="module")
def under_way(written: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clustered run after three of five rounds, held by a process."""
    clients = [(f"client {number}", f"{90 * (number % 3)}°") for number in range(9)]
    values = {"sex": ("f", "m")}
    one = written(
        tmp_path_factory.mktemp("runs") / "under-way", clients, rounds=3, planned=5, models=3, attributes=values
    )
    one.write()
    with Store(one.folder):
        yield one.folder


@pytest.fixture(scope="module", params=[(kind, width) for kind in ("run", "sweep", "watched") for width in WIDTHS])
def shown(
    request: pytest.FixtureRequest, run: Path, sweep: Path, under_way: Path, opened: Callable[..., Any],
    watching: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, Path]]:  # fmt: skip
    """A page, open in the browser, and the folder that it shows."""
    kind, width = request.param
    if kind == "watched":
        with watching(under_way) as server, opened(server.address, width) as found:
            yield found, under_way
    else:
        folder = run if kind == "run" else sweep
        path = write_report(folder, tmp_path_factory.mktemp("report") / "report.html")
        with opened(path, width) as found:
            yield found, folder


page_of = functools.cache(build_page)  # of folders that do not change


def blocks(folder: Path, kind: type) -> list[Any]:
    """The charts, or the tables, of a page."""
    return [block for section in page_of(folder).sections for block in section.blocks if isinstance(block, kind)]


def data_of(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.locator("#data").text_content() or "")
    return found


# ---- what is there ---------------------------------------------------------------------------------


def test_every_figure_is_drawn(shown: tuple[Any, Path]) -> None:
    """With texts, each inside its picture, and with colours that can be seen."""
    opened, folder = shown
    figures = opened.page.locator("figure.chart")
    charts = blocks(folder, Chart)
    assert figures.count() == len(charts) >= 7
    for place, chart in enumerate(charts):
        figure = figures.nth(place)
        assert figure.get_attribute("data-chart") == chart.key and figure.locator("h3").inner_text() == chart.title
        figure.scroll_into_view_if_needed()
        drawn = figure.evaluate(LOOK)
        assert drawn["width"] > 300 and drawn["height"] > 120, chart.key
        assert drawn["inside"] and drawn["painted"] > 5 and drawn["texts"] > 4, (chart.key, drawn)
        assert drawn["outside"] == [], chart.key
        pixels = seen(figure.locator("svg"))
        assert coloured(pixels).mean() > 0.001 and (pixels.mean(axis=2) < 100).mean() > 0.001, chart.key


LOOK = """figure => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const within = (r) => r.left >= box.left - 2 && r.right <= box.right + 2
        && r.top >= box.top - 2 && r.bottom <= box.bottom + 2;
    const painted = [...svg.querySelectorAll("path, use, image, rect")].filter((element) => {
        const r = element.getBoundingClientRect(), style = getComputedStyle(element);
        const visible = element.tagName !== "path" || style.fill !== "none" || style.stroke !== "none";
        return visible && (r.width > 0 || r.height > 0);
    });
    const texts = [...svg.querySelectorAll("text")].filter((text) => text.getBoundingClientRect().width > 0);
    return {
        width: box.width, height: box.height, inside: box.left >= 0 && box.right <= innerWidth,
        painted: painted.length, texts: texts.length,
        outside: texts.filter((text) => !within(text.getBoundingClientRect())).map((text) => text.textContent),
    };
}"""


def seen(element: Locator) -> np.ndarray:
    """What an element looks like: (height, width, 3) from 0 to 255."""
    return np.asarray(Image.open(io.BytesIO(element.screenshot())).convert("RGB"), dtype=float)


def coloured(pixels: np.ndarray) -> np.ndarray:
    """Where there is a colour that is no grey."""
    return np.asarray(np.ptp(pixels, axis=2) > 40)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_under_metric_privacy_is_drawn(metric_run: Path, opened: Callable[..., Any], width: int) -> None:
    with opened(write_report(metric_run), width) as found:
        test_every_figure_is_drawn((found, metric_run))
        test_nothing_is_wider_than_the_window((found, metric_run))
        test_tables_fit_their_place_on_a_desk((found, metric_run))
        for key in ("metric-budget", "metric-budgets", "steps-by-round", "records", "clusters"):
            assert found.page.locator(f'figure[data-chart="{key}"] svg').count() == 1
        assert found.said == [] and len(found.asked) == 1


def test_nothing_is_wider_than_the_window(shown: tuple[Any, Path]) -> None:
    """What is wide within a table scrolls with it; what it is a table of is seen at once."""
    page = shown[0].page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    beyond = page.evaluate(
        """[...document.querySelectorAll("main *")]
            .filter((e) => !e.closest(".table, svg") && e.getBoundingClientRect().right > innerWidth + 0.5)
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    assert page.evaluate("""[...document.querySelectorAll(".table:not(.long)")].every(
        (table) => table.scrollHeight <= table.clientHeight + 1)""")


def test_tables_fit_their_place_on_a_desk(shown: tuple[Any, Path]) -> None:
    page = shown[0].page
    cut = page.evaluate(
        """[...document.querySelectorAll(".table")].filter((table) => table.scrollWidth > table.clientWidth + 1)
            .map((table) => table.querySelector("table").id)"""
    )
    assert cut == [] or page.viewport_size == {"width": 390, "height": 900}


# ---- tables ----------------------------------------------------------------------------------------


def rows_of(table: Locator) -> list[list[str]]:
    found: list[list[str]] = table.evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))"
    )
    return found


def in_order(rows: list[list[Cell]], column: int, *, falling: bool) -> list[list[Cell]]:
    """As Python would sort it, numbers as numbers; what is none comes last."""

    def key(row: list[Cell]) -> tuple[bool, float]:
        value = float(row[column].order)
        return math.isnan(value), 0.0 if math.isnan(value) else -value if falling else value

    return sorted(rows, key=key)


def test_a_click_on_a_heading_sorts_its_table(shown: tuple[Any, Path]) -> None:
    """Every table by every column of numbers; a second click turns it round."""
    opened, folder = shown
    clicked = 0
    for table in blocks(folder, Table):
        found = opened.page.locator(f"table[id='{table.key}']")
        rows: list[Any] = list(table.rows)
        assert rows_of(found) == [[cell.text for cell in row] for row in rows]
        for column, (_, numeric) in enumerate(table.headings):
            if not numeric:
                continue
            heading = found.locator("th").nth(column)
            for falling in (False, True):
                heading.locator("button").click()
                rows = in_order(rows, column, falling=falling)
                assert rows_of(found) == [[cell.text for cell in row] for row in rows]
                assert heading.get_attribute("aria-sort") == ("descending" if falling else "ascending")
                assert found.locator("th[aria-sort]").count() == 1
                clicked += 1
    assert clicked >= 8


def test_clients_are_sorted_as_the_data_say(opened: Callable[..., Any], run: Path, report: Path) -> None:
    """Names as people count them, and scores from the database itself."""
    clients, values = load_run(run).clients, load_run(run).scores("accuracy").iloc[-1]
    with opened(report) as found:
        table = found.page.locator("#every-client")
        table.locator("th", has_text="client").first.locator("button").click()
        assert [row[0] for row in rows_of(table)] == [str(number) for number in range(10)]
        table.locator("th", has_text="accuracy").locator("button").click()
        assert [row[2] for row in rows_of(table)] == [f"{100 * value:.1f}%" for value in sorted(values)]
        table.locator("th", has_text="group").locator("button").click()
        assert [row[1] for row in rows_of(table)] == sorted(clients["group"], key=lambda name: int(name[:-1]))


def test_headings_are_reached_and_pressed_without_a_mouse(opened: Callable[..., Any], report: Path) -> None:
    with opened(report) as found:
        button = found.page.locator("#every-client th button").nth(2)
        button.focus()
        found.page.keyboard.press("Enter")
        found.page.keyboard.press("Enter")
        assert found.page.locator("#every-client th").nth(2).get_attribute("aria-sort") == "descending"
        nameless = found.page.evaluate(
            "[...document.querySelectorAll('button')].filter(b => !b.textContent.trim()).length"
        )
        assert nameless == 0


def test_an_infinite_number_is_sorted_as_one_and_none_is_last(opened: Callable[..., Any], tmp_path: Path) -> None:
    from fairveil.report.page import Page as Report
    from fairveil.report.page import Section, number

    values = [3.0, None, math.inf, -math.inf, 10.0, math.nan]
    table = Table("t", "", ["n"], [[number(value)] for value in values])
    (tmp_path / "page.html").write_text(Report("x", "", [Section("s", "s", [table])]).html())
    with opened(tmp_path / "page.html") as found:
        shown = found.page.locator("#t")
        for expected in (["infinity", "3.000", "10.000", "infinity"], ["infinity", "10.000", "3.000", "infinity"]):
            shown.locator("button").click()
            assert [row[0] for row in rows_of(shown)] == [*expected, "", ""]


# ---- figures ---------------------------------------------------------------------------------------


def test_pointing_at_a_mark_shows_its_value(shown: tuple[Any, Path]) -> None:
    """Where the mark is said to be there is something drawn; the text is that of a mark at this place."""
    opened, folder = shown
    page, data = opened.page, data_of(opened.page)
    tip = page.locator("#tip")
    for chart in blocks(folder, Chart):
        marks = data[chart.key]["marks"]
        assert marks and [mark[2] for mark in marks] == [text for *_, text in chart.marks]
        canvas = page.locator(f"figure[data-chart='{chart.key}'] .canvas")
        canvas.evaluate("canvas => canvas.scrollIntoView({ block: 'center', behavior: 'instant' })")
        page.mouse.move(1, 1)
        pixels, box = coloured(seen(canvas)), canvas.bounding_box()
        assert box
        for x, y, _ in marks[:: max(1, len(marks) // 3)]:
            at = int(y * box["height"]), int(x * box["width"])
            assert pixels[max(0, at[0] - 4) : at[0] + 5, max(0, at[1] - 4) : at[1] + 5].any(), chart.key
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            assert tip.is_visible() and page.locator(".dot").count() == 1
            near = {text for a, b, text in marks if math.hypot((a - x) * box["width"], (b - y) * box["height"]) < 2}
            assert tip.inner_text() in near
            where = tip.bounding_box()
            assert where and where["x"] >= 0 and where["x"] + where["width"] <= page.evaluate("innerWidth")
        page.mouse.move(1, 1)
        assert not tip.is_visible() and page.locator(".dot").count() == 0


def test_the_numbers_of_a_figure_can_be_downloaded(shown: tuple[Any, Path]) -> None:
    opened, folder = shown
    for chart in blocks(folder, Chart):
        with opened.page.expect_download() as started:
            opened.page.locator(f"button[data-csv='{chart.key}']").click()
        assert started.value.suggested_filename == f"{chart.key}.csv"
        assert started.value.path().read_bytes().decode() == chart.csv() != ""


def test_the_numbers_are_those_of_the_functions(opened: Callable[..., Any], run: Path, report: Path) -> None:
    read = load_run(run)
    with opened(report) as found:
        data = data_of(found.page)
    for chart in (scores_by_round([read]), client_dots(read)):
        assert chart and data[chart.key]["csv"] == chart.csv()


# ---- as a whole ------------------------------------------------------------------------------------


def test_a_printed_page_has_no_buttons_and_whole_tables(shown: tuple[Any, Path]) -> None:
    page = shown[0].page
    before = page.viewport_size
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 990})  # a sheet of A4 between its margins
    try:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator(".download").count() and page.locator(".download:visible").count() == 0
        assert not page.locator("nav").is_visible() and not page.locator("#tip").is_visible()
        assert page.locator(".sort:visible").count() > 5  # the headings themselves stay
        arrows = page.evaluate(
            """[...document.querySelectorAll(".sort")].map((b) => getComputedStyle(b, "::after").display)"""
        )
        assert set(arrows) == {"none"}
        assert page.evaluate("""[...document.querySelectorAll(".table")].every(
            (t) => getComputedStyle(t).overflowY === "visible" && getComputedStyle(t).maxHeight === "none")""")
    finally:
        page.emulate_media(media="screen")
        page.set_viewport_size(before)


CONTRAST = """selector => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const behind = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = channels(getComputedStyle(e).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
            if (colour[3] !== 0) throw new Error("half transparent");
        }
        return [255, 255, 255];
    };
    return [...document.querySelectorAll(selector)].map((element) => {
        const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""
TEXTS = (
    ".note", ".intro", "th", "th .sort", "td", "figcaption", ".label", ".value", ".subtitle", ".brand", ".caption",
    "nav a", ".download", "footer p", "pre", "h1", "h2", "h3", "section > p",
)  # fmt: skip


def test_texts_can_be_read(shown: tuple[Any, Path]) -> None:
    """The contrast of WCAG 2.2, level AA, for small text: 4.5."""
    page = shown[0].page
    for selector in TEXTS:
        ratios = page.evaluate(CONTRAST, selector)
        assert selector in (".intro", "section > p", "td", ".note") or ratios
        assert min(ratios, default=21) >= 4.5, selector
    for selector in (".state", "td.good", "td.bad", "td.busy"):
        assert min(page.evaluate(CONTRAST, selector), default=21) >= 4.5, selector


def test_nothing_is_said_on_the_console_and_nothing_leaves_the_page(shown: tuple[Any, Path]) -> None:
    """After all that was done to it above, too."""
    opened, _ = shown
    assert opened.said == []
    own = opened.page.url
    allowed = [own, f"{own}stamp"] if own.startswith("http") else [own]
    assert {url for url in opened.asked if not url.startswith(("data:", "blob:"))} <= set(allowed)


# ---- watched ---------------------------------------------------------------------------------------


def state_is(page: Page, text: str) -> None:
    page.wait_for_function("text => document.getElementById('state').textContent.includes(text)", arg=text)


def test_a_watched_page_follows_its_run(
    opened: Callable[..., Any], watching: Callable[..., Any], written: Callable[..., Any], tmp_path: Path
) -> None:
    """Without being loaded again, and in the order that was chosen; to the end, and to the end of its server."""
    clients = [(f"client {number}", "near" if number % 2 else "far") for number in range(12)]
    one = written(tmp_path / "run", clients, planned=3, models=2)
    with Store(one.folder) as store:
        one.plan(store)
        with watching(one.folder) as server, opened(server.address) as found:
            page, port = found.page, server.server_address[1]
            state_is(page, "Running: 0 of 3 rounds are done.")
            page.evaluate("window.here = 'still the same page'")
            one.round(store, 1)
            state_is(page, "Running: 1 of 3 rounds are done.")
            heading = page.locator("#every-client th").nth(2)
            heading.locator("button").click()
            heading.locator("button").click()
            for number in (2, 3):
                one.round(store, number)
                state_is(page, f"Running: {number} of 3 rounds are done.")
                assert heading.get_attribute("aria-sort") == "descending"
                values = sorted(load_run(one.folder).scores("accuracy").iloc[-1], reverse=True)
                assert [row[2] for row in rows_of(page.locator("#every-client"))] == [f"{100 * v:.1f}%" for v in values]
                assert len(data_of(page)["accuracy-by-round"]["marks"]) == 2 * number
            store.write("result.json", b'{"accuracy": {}}')
            state_is(page, "Finished.")
            assert "all rounds are done" in page.locator("#verdict").inner_text()
            assert page.evaluate("window.here") == "still the same page"
            assert found.said == []
            server.shutdown()
            server.server_close()
            state_is(page, "The server of this page has stopped")
            with watching(one.folder, port):
                state_is(page, "Finished.")
            assert heading.get_attribute("aria-sort") == "descending"


def test_what_happens_while_a_page_is_drawn_is_not_missed(
    opened: Callable[..., Any], watching: Callable[..., Any], written: Callable[..., Any], tmp_path: Path
) -> None:
    """A run may end between the drawing of its page and the first question for news."""
    one = written(tmp_path / "run", [("a", "x"), ("b", "y")], rounds=1, planned=2)
    one.write()
    with Store(one.folder) as store, watching(one.folder) as server, opened("about:blank") as found:

        def late(route: Any) -> None:
            answer = route.fetch()
            if not (one.folder / "result.json").exists():
                one.round(store, 2)
                store.write("result.json", b'{"accuracy": {}}')
            route.fulfill(response=answer)

        found.page.route(server.address, late)
        found.page.goto(server.address)
        state_is(found.page, "Finished.")


def test_a_watched_sweep_shows_the_state_of_every_run(
    opened: Callable[..., Any], watching: Callable[..., Any], sweep: Path, tmp_path: Path
) -> None:
    """Finished, failed, waiting, running and stopped; with the worst group's accuracy and epsilon as soon as known."""
    folder = Path(shutil.copytree(sweep, tmp_path / "budgets"))
    read = read_sweep(folder)
    by_name = {str(cell): at for cell, at in read.folders.items()}
    name = "{}, privacy.epsilon = {}, seed {}".format
    failed, waiting = by_name[name("global", 2.0, 0)], by_name[name("global", 2.0, 1)]
    running, stopped = by_name[name("global", 8.0, 0)], by_name[name("global", 8.0, 1)]
    for at in (failed, running, stopped):
        (at / "result.json").unlink()
    (failed / "failure.txt").write_text("ArithmeticError: two and two are five\nin line 3\n")
    shutil.rmtree(waiting)
    with (
        closing((running / "lock").open("w")) as lock,
        watching(folder) as server,
        opened(server.address) as found,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = found.page
        state_is(page, "4 of 8 finished, 1 running.")
        told = {(row[0], row[1]): row[2:] for row in rows_of(page.locator("#cells"))}
        assert told["global", "2"][0].startswith("failed · ") and told["global", "2"][1] == "waiting"
        assert told["global", "8"][0].startswith("running, 2 of 2 rounds · ")
        assert told["global", "8"][1].startswith("stopped · ")
        for budget in ("2", "8"):
            for seed, text in enumerate(told["oracle", budget]):
                at = by_name[name("oracle", float(budget), seed)]
                result = json.loads((at / "result.json").read_text())["accuracy"]
                worst = result["by_group"][result["worst_group"]]
                assert text.startswith(f"finished · {100 * worst:.1f}% · ε ")
                assert float(text.rpartition(" ")[2]) == pytest.approx(float(budget), abs=0.01)
        for kind, count in (("good", 4), ("bad", 1), ("busy", 1)):
            assert page.locator(f"#cells td.{kind}").count() == count
            assert min(page.evaluate(CONTRAST, f"td.{kind}")) >= 4.5
        assert "two and two are five" in page.locator("#failures pre").inner_text()
        fcntl.flock(lock, fcntl.LOCK_UN)
        state_is(page, "4 of 8 finished, 0 running.")
        shutil.copy(sweep / "cells" / stopped.name / "result.json", stopped)
        state_is(page, "5 of 8 finished, 0 running.")
        assert found.said == []


def test_a_folder_where_nothing_is_yet_becomes_a_page(
    opened: Callable[..., Any], watching: Callable[..., Any], written: Callable[..., Any], tmp_path: Path
) -> None:
    one = written(tmp_path / "run", [("a", "x"), ("b", "y")], rounds=1)
    one.folder.mkdir()
    with watching(one.folder) as server, opened(server.address) as found:
        state_is(found.page, "Waiting.")
        one.write()
        state_is(found.page, "Not finished: 1 of 1 rounds are done.")
        shutil.rmtree(one.folder)
        state_is(found.page, "Waiting.")
        assert found.said == []


# ---- other kinds of runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("example", "rounds"), [("dp-fedavg", 2), ("local", 1)])
def test_runs_of_other_systems_have_pages_too(
    opened: Callable[..., Any], tmp_path: Path, example: str, rounds: int
) -> None:
    """Client-level privacy, one group only; a model for every client, and a single round."""
    config = load_config(EXAMPLES / f"{example}.toml", [f"algorithm.rounds={rounds}", "engine.workers=1"])
    path = write_report(start_run(config, runs=tmp_path).folder)
    for width in WIDTHS:
        with opened(path, width) as found:
            assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth") and found.said == []
            for place in range(found.page.locator("figure.chart").count()):
                assert found.page.locator("figure.chart").nth(place).evaluate(LOOK)["outside"] == []
            one_group = example == "dp-fedavg"
            assert ("Gap between groups" in found.page.locator("#verdict").inner_text()) != one_group
