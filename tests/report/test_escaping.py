"""Names and texts as an enemy, or a spreadsheet, would choose them: each is shown as the text that it is."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from fairveil.config import make_config
from fairveil.report import Chart, build_page, write_report
from fairveil.report.chart import printable, shortened
from fairveil.run import run_in, start_run
from fairveil.sweep.config import make_sweep
from fairveil.sweep.summary import cell_folders
from fairveil.watch import Watch

HIT = "window.__hit = true"
HOSTILE = [
    "<script>alert(1)</script>",
    f'"><img src=x onerror="{HIT}">',
    f"</script><script>{HIT}</script>",
    f"'><svg onload='{HIT}'>",
    "</td></table></section><h1>owned</h1>",
    "]]><!-- --><![CDATA[ <b>x</b>",
    "'single' \"double\" `back`",
    "a &amp; b &lt;c&gt; &#60;",
    "$x^2$ and \\frac{1}{2} and $unbalanced",
    "back\\slash \\n \\u003c \\1 \\g<0>",
    "two\nlines\r\nand\ttabs\rand more",
    "lone\rreturn",
    "nul\x00 bell\x07 escape\x1b[31m delete\x7f",
    "_hidden",
    "__dunder__",
    "שלום עולם والسلام",
    "evil\u202eesrever\u2066 and \ufeffmark",
    "👩‍👩‍👧 🏳️‍🌈 ناهم‌خوان",
    "हिन्दी ไทย 日本語　東京 \u00a0 space",
    "long " + "x" * 495,
    "{{ 7*7 }} {% raw %} {# note #} ${7*7} #{7*7} %s %(name)s {0}",
    'id="stolen" href="#stolen" url(#stolen)',
    "from",
    "to",
    "round",
    "group of clients",
    "=1+1",
    ",;comma",
    " ",
    "",
    "nan",
    "\u2028line\u2029paragraph\x85next",
    "constructor",
    "javascript:alert(1)",
]
CHUNKS = [HOSTILE[start : start + 9] for start in range(0, len(HOSTILE), 9)]


class Seen(HTMLParser):
    """The elements of a page, its texts, and what its blocks of JSON and pictures hold."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.inside: str | None = None
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)


PLAIN = {
    "html", "head", "meta", "title", "link", "style", "body", "main", "header", "p", "h1", "h2", "h3", "nav", "a",
    "section", "div", "table", "thead", "tbody", "tr", "th", "td", "button", "pre", "figure", "figcaption", "footer",
    "script",
}  # fmt: skip
DRAWN = {"svg", "g", "path", "defs", "use", "text", "image", "clippath", "rect", "style", "pattern", "metadata"}


page_of = functools.cache(build_page)  # of folders that do not change


@functools.cache
def html_of(folder: Path) -> str:
    return page_of(folder).html()


def check_page(folder: Path) -> Seen:
    """What must be true of the page of any folder; gives what a reader of the file finds in it."""
    page, text = page_of(folder), html_of(folder)
    odd = {letter for letter in text if not letter.isprintable() and not letter.isspace()}
    assert odd <= set("\u200b\u200c\u200d")  # none that a page cannot hold, or that turns what follows around
    seen = Seen(text)
    assert seen.elements <= PLAIN | DRAWN
    assert not {name for name in seen.attributes if name.startswith("on")}
    assert len(seen.scripts) == 2  # the numbers, and the one that reads them
    data = json.loads(seen.scripts[0])
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    assert set(data) == {chart.key for chart in charts} and len(data) == len(charts)
    ids = re.findall(r'\bid="([^"]*)"', re.sub(r">[^<]*<", "><", text))
    assert len(ids) == len(set(ids)), "ids are there once"
    for chart in charts:
        assert re.fullmatch(r"[A-Za-z0-9-]+", chart.key)
        assert xml(chart).find(".//{*}text") is not None
        assert data[chart.key]["csv"] == chart.csv()
    return seen


def charts_of(folder: Path) -> dict[str, Chart]:
    found = [block for section in page_of(folder).sections for block in section.blocks if isinstance(block, Chart)]
    return {chart.key: chart for chart in found}


def xml(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(f'<x xmlns:xlink="http://www.w3.org/1999/xlink">{chart.svg()}</x>')


@pytest.fixture(scope="module", params=range(len(CHUNKS)))
def hostile(
    request: pytest.FixtureRequest, written: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run whose groups, clients, attributes, values, dataset and statement are called so; and these names."""
    names = CHUNKS[request.param]
    text = " ".join(names)
    texts = {
        "record": text, "trust": text, "noise_source": text, "not_covered": text, "public": dict.fromkeys(names, text),
        "releases": [
            {"kind": name, "what": f"{name}!", "planned_per_unit": [1, 2], "posted_per_unit": None, "mixed": False}
            for name in names
        ],
    }  # fmt: skip
    safe = "".join(letter for letter in text if letter not in "/\x00")[:70]
    one = written(
        tmp_path_factory.mktemp("runs") / f"run {safe}", [(f"{name}#{n}", name) for n, name in enumerate(names * 2)],
        models=len(names), texts=texts, attributes={name: [f"{name} 1", f"{name} 2"] for name in names}, dataset=text,
    )  # fmt: skip
    return one.write(), names


def test_a_page_of_hostile_names_is_whole(hostile: tuple[Path, list[str]]) -> None:
    """No warning, no element from a name, pictures that are XML, and every name among the texts."""
    folder, names = hostile
    seen = check_page(folder)
    for name in names:
        for told in (f"{name} 1", f"{name} 2", f"{name}!"):
            assert printable(told) in seen.texts
    for n, name in enumerate(names * 2):
        assert printable(f"{name}#{n}") in seen.texts
    assert printable(folder.name) in seen.texts


def test_pictures_hold_the_names_as_texts(hostile: tuple[Path, list[str]]) -> None:
    """In a legend they are cut, and none is hidden or read as a formula."""
    folder, names = hostile
    charts = charts_of(folder)
    for key in ("clients", "histogram"):
        drawn = xml(charts[key])
        texts = {"".join(element.itertext()).strip() for element in drawn.iter() if element.tag.endswith("text")}
        for name in names:
            assert shortened(name).strip() in texts, (key, name)


def test_numbers_are_read_back_under_the_same_names(hostile: tuple[Path, list[str]]) -> None:
    folder, names = hostile
    found: dict[str, pd.DataFrame] = {}
    for key, chart in charts_of(folder).items():
        found[key] = pd.read_csv(io.StringIO(chart.csv()), keep_default_na=False)
        assert list(found[key].columns) == [str(column) for column in chart.data.columns]
        assert len(found[key]) == len(chart.data)
    clients = {(f"{name}#{n}", name) for n, name in enumerate(names * 2)}
    for key, client in (("clients", "name"), ("clusters", "client"), ("assignment", "client")):
        read = found[key]
        assert set(zip(read[client], read["group"], strict=True)) == clients, key
    assert set(found["accuracy-by-round"]["group"]) == set(names)
    assert list(found["histogram"].columns) == ["from", "to", *(f"clients of {name}" for name in names)]
    assert set(found["confusion"]["group"]) == set(names)


CREATED = """[...document.querySelectorAll("main *")].filter((e) => !e.closest("svg"))
    .map((e) => e.tagName.toLowerCase())"""


@pytest.mark.browser
def test_a_browser_shows_hostile_names_as_text(hostile: tuple[Path, list[str]], opened: Callable[..., Any]) -> None:
    """Nothing runs, nothing is asked for, nothing is made of them, nothing is wider than a phone."""
    folder, names = hostile
    path = folder.parent / "report.html"
    path.write_bytes(html_of(folder).encode())
    with opened(path, 390) as found:
        page = found.page
        assert page.evaluate("window.__hit") is None and found.said == []
        assert {url for url in found.asked if not url.startswith("data:")} == {page.url}
        assert set(page.evaluate(CREATED)) <= PLAIN | {"svg"}
        assert page.evaluate("document.querySelectorAll('main h1').length") == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cells = page.evaluate("[...document.querySelectorAll('#every-client td')].map((cell) => cell.textContent)")
        for n, name in enumerate(names * 2):
            assert printable(f"{name}#{n}") in cells and printable(name) in cells
        marks = json.loads(page.locator("#data").text_content())["clients"]["marks"]
        canvas = page.locator("figure[data-chart='clients'] .canvas")
        canvas.evaluate("canvas => canvas.scrollIntoView({ block: 'center', behavior: 'instant' })")
        box = canvas.bounding_box()
        for x, y, text in marks:
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            assert page.locator("#tip").text_content() == text
        for heading in page.locator("#every-client th button").all():
            heading.click()
        with page.expect_download() as started:
            page.locator("button[data-csv='clients']").click()
        read = pd.read_csv(started.value.path(), keep_default_na=False)
        assert set(read["group"]) == set(names)
        assert page.evaluate("window.__hit") is None and found.said == []


def test_no_script_but_its_own_may_run(hostile: tuple[Path, list[str]]) -> None:
    """Even if something got through: the policy names the hash of the one script, and nothing may be loaded."""
    text = html_of(hostile[0])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy and "default-src 'none'" in policy[1] and "unsafe-inline'; img-src data:" in policy[1]
    (scripts,) = re.findall(r"script-src ([^;]*)", policy[1])
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", scripts)


# ---- from a file of records to a page --------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV whose clients, groups, columns and values have names that a CSV can hold; the file too."""
    random = np.random.default_rng(0)
    names = [name for name in HOSTILE if name.strip() and "\x00" not in name and "\r" not in name and name != "nan"][
        :12
    ]
    client = np.repeat(np.arange(len(names)), 20)
    table = pd.DataFrame({"x": random.normal(size=len(client)), "y": random.integers(0, 2, len(client))})
    table["client <b>"] = [f"{names[c]}!" for c in client]
    table["group & $g$"] = [names[c % 4] for c in client]
    table['sex "><i>'] = random.choice(names[:3], len(client))
    path = tmp_path_factory.mktemp("data") / "<img src=x onerror=window.__hit=1> & 'records'.csv"
    table.to_csv(path, index=False)
    return path


def config_of(records: Path, **more: Any) -> dict[str, Any]:
    options = {
        "path": str(records), "client": "client <b>", "group": "group & $g$", "sensitive": ['sex "><i>'],
        "features": ["x"],
    }  # fmt: skip
    return {
        "data": {"dataset": "file", "options": options},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 1, "batch_size": 8},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"workers": 1},
        **more,
    }


@pytest.mark.parametrize("groups", ["cluster", 'sex "><i>'])
def test_a_file_of_hostile_names_makes_a_whole_page(records: Path, tmp_path: Path, groups: str) -> None:
    config = make_config(config_of(records, name="run", fairness={"groups": groups}))
    seen = check_page(start_run(config, runs=tmp_path).folder)
    assert any(records.name in text for text in seen.texts)
    table = pd.read_csv(records)
    for name in {*table["client <b>"], *table["group & $g$"], *table['sex "><i>']}:
        assert printable(name) in seen.texts
    assert 'sex "><i>' in seen.texts


@pytest.fixture(scope="module")
def sweep(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Over files of such names, in a folder of such a name; a run has failed with such a text."""
    other = records.with_name("</script><script>window.__hit = 1</script> {{ 7*7 }}.csv".replace("/", "∕"))
    shutil.copy(records, other)
    base = config_of(records)
    del base["data"]["options"]["path"]
    folder = tmp_path_factory.mktemp("sweeps") / "<b>sweep</b> & $s$"
    made = make_sweep(
        {
            "name": "sweep",
            "base": base,
            "seeds": [0, 1],
            "baseline": "global",
            "grid": {"data.options.path": [str(records), str(other)]},
            "variants": [{"name": "global"}, {"name": "oracle", "set": {"algorithm.name": "oracle"}}],
        }
    )
    (folder / "cells").mkdir(parents=True)
    (folder / "sweep.toml").write_text(made.config.to_toml())
    *cells, (_, failed) = cell_folders(made, folder).items()
    for cell, at in cells:
        run_in(cell.config, at)
    failed.mkdir()
    (failed / "failure.txt").write_text("\n".join(name for name in HOSTILE if name.isprintable()))
    return folder


def test_a_sweep_over_hostile_names_makes_a_whole_page(sweep: Path, records: Path) -> None:
    seen = check_page(sweep)
    assert str(records) in seen.texts
    assert any("<script>alert(1)</script>" in text and "{{ 7*7 }}" in text for text in seen.texts)


@pytest.mark.browser
def test_a_browser_shows_a_sweep_over_hostile_names(sweep: Path, opened: Callable[..., Any], watching: Any) -> None:
    with watching(sweep) as server, opened(server.address, 390) as found:
        assert found.page.evaluate("window.__hit") is None and found.said == []
        assert set(found.page.evaluate(CREATED)) <= PLAIN | {"svg"}
        assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "<script>alert(1)</script>" in found.page.locator("#failures pre").text_content()


# ---- what else is said -----------------------------------------------------------------------------


def test_errors_are_shown_as_text(tmp_path: Path) -> None:
    """Of a watched folder that is none, under a name of its own."""
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    (folder / "sweep.toml").write_text("name = '</pre><script>alert(1)</script>'\nbase = {}\nseeds = [0]\n")
    with Watch(folder) as server:
        seen = Seen(server.page().decode())
    assert seen.elements <= PLAIN and len(seen.scripts) == 2
    assert any("</pre><script>alert(1)</script>" in text for text in seen.texts) and folder.name in seen.texts


def test_a_folder_whose_name_is_no_text_has_a_page(written: Callable[..., Any], tmp_path: Path) -> None:
    """Names of files are bytes; these are not UTF-8."""
    folder = Path(str(tmp_path / "run-") + b"\xff\xfe".decode("utf-8", "surrogateescape"))
    written(folder, [("a", "x"), ("b", "y")], rounds=1).write()
    assert write_report(folder).stat().st_size > 10_000
    with Watch(folder) as server:
        assert b"Not finished" in server.page()


def test_many_variants_with_long_names_stay_apart(tmp_path: Path, small: dict[str, Any]) -> None:
    """Names that begin alike, more of them than a legend has room for: no warning, and a line for each."""
    long = "a-very-long-name-that-many-variants-share"
    variants = [{"name": f"{long}-{n}", "set": {"algorithm.learning_rate": 1.0 + n}} for n in range(30)]
    made = make_sweep(
        {"name": "many", "base": small, "seeds": [0, 1], "baseline": f"{long}-0", "variants": variants,
         "grid": {"privacy.epsilon": [2.0, 8.0]}}
    )  # fmt: skip
    (tmp_path / "cells").mkdir()
    (tmp_path / "sweep.toml").write_text(made.config.to_toml())
    random = np.random.default_rng(0)
    for cell, at in cell_folders(made, tmp_path).items():
        mean = float(random.uniform(0.5, 0.9))
        summary = {"mean": mean, "by_group": {"a": mean - 0.1, "b": mean}, "worst_group": "a", "worst_10_percent": 0.1}
        result = {"config_hash": cell.digest, "epsilon": 2.0, "delta": 1e-3, "accuracy": summary}
        at.mkdir()
        (at / "result.json").write_text(json.dumps(result))
    check_page(tmp_path)
    charts = charts_of(tmp_path)
    differences = charts["differences"]
    assert len({round(y, 6) for _, _, y, _ in differences.marks}) == len(differences.marks) == 29 * 2 * 2
    assert len({text for *_, text in differences.marks}) == len(differences.marks)
    for chart in charts.values():
        heights = [axes.get_position().height * chart.figure.get_figheight() for axes in chart.figure.axes]
        assert min(heights) > 1
