"""The model card, read back: as Markdown by another program, its code run, its figures computed again."""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

import fairveil
from fairveil.config import make_config
from fairveil.export.card import plain
from fairveil.reading import Run, load_run
from fairveil.run import start_run

LINK = "# *bold* _it_ `code` [x](http://evil.example)"
GROUPS = ('<img src=x onerror="alert(1)">', "a | b || c", LINK, "$x$ &lt; ~~n~~")
CLIENTS = ("Saint\n\n# Mary's", "</td>|<!--", "plain", '"quoted"', "\\", "www.evil.example", "```", "2. two")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of clients and groups with names that mean something in Markdown and HTML."""
    folder = tmp_path_factory.mktemp("odd")
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"x": random.normal(size=160), "who": [CLIENTS[n % 8] for n in range(160)]})
    rows["kind"] = [GROUPS[n % 4] for n in range(160)]
    rows["y"] = (rows["x"] + random.normal(size=160) > 0).astype(int)
    rows.to_csv(folder / "odd.csv", index=False)
    options = {"path": str(folder / "odd.csv"), "client": "who", "group": "kind"}
    config = {
        "data": {"dataset": "file", "options": options},
        "model": {"name": "logistic"},
        "algorithm": {"name": "oracle", "rounds": 2, "batch_size": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }
    return load_run(start_run(make_config(config), runs=folder / "runs").folder)


@pytest.fixture(scope="module")
def exported(odd: Run, tmp_path_factory: pytest.TempPathFactory) -> fairveil.Exported:
    """Its export, in a folder of its own."""
    return fairveil.export_run(odd, tmp_path_factory.mktemp("exported"))


def rendered(text: str) -> str:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)


def cells(page: str) -> list[list[str]]:
    """The rows of all tables of a page, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row, re.DOTALL)] for row in rows]


def flat(name: str) -> str:
    return " ".join(name.split())


def test_names_are_text_whatever_they_hold(odd: Run, exported: fairveil.Exported) -> None:
    card = exported.files[-1].read_text()
    page = rendered(card)
    found = cells(page)
    by_group = {row[0]: row for row in found if len(row) == 4}
    assert {flat(group) for group in GROUPS} <= set(by_group)
    serving = " ; ".join(row[1] for row in found if row[0].endswith(".onnx"))
    assert all(flat(client) in serving for client in CLIENTS)
    allowed = "h1 h2 p ul li table thead tbody tr th td strong blockquote pre code"
    assert set(re.findall(r"</?([a-zA-Z0-9!-]+)", page)) <= set(allowed.split())
    assert re.findall(r"<h1>(.*?)</h1>", page) == [f"Model card: {odd.name}"]
    assert page.count("<h2>") == len(re.findall(r"^## ", card, re.MULTILINE)) == 9
    assert "http://" not in card and "www." not in card  # some readers make links of these by themselves


@pytest.mark.parametrize("name", [*GROUPS, *CLIENTS, "tab\tand\x00nul\x1b[31m", "‮reversed", "é°中"])
def test_a_name_in_a_cell_reads_as_it_is(name: str) -> None:
    page = rendered(f"| a | b |\n|---|---|\n| {plain(name)} | end |\n")
    (row,) = (row for row in cells(page) if row[1] == "end")
    expected = "".join(char if char.isprintable() else "\ufffd" for char in flat(name))
    assert row[0] == expected


def test_the_figures_are_those_of_the_metrics(odd: Run, exported: fairveil.Exported) -> None:
    card = exported.files[-1].read_text()
    found = cells(rendered(card))
    table = odd.metrics.query("round == 2 and split == 'test' and model == 'served' and metric == 'accuracy'")
    for group, part in table.groupby("group", observed=True):
        row = [flat(str(group)), str(len(part)), str(part["n"].sum()), f"{part['value'].mean():.3f}"]
        assert row in found
    by_group = table.groupby("group", observed=True)["value"].mean()
    for name, value in (
        ("mean", table["value"].mean()),
        ("worst client", table["value"].min()),
        ("worst 10% of clients", table["value"].min()),  # of eight: one
        ("gap between the best and the worst group", by_group.max() - by_group.min()),
    ):
        assert [name, f"{value:.3f}"] in found
    assert "computed without noise" in card


def test_an_error_is_worst_where_it_is_largest(small: dict[str, Any], tmp_path: Path, runs: Path) -> None:
    random = np.random.default_rng(0)
    rows = pd.DataFrame({"x": random.normal(size=200), "client": np.arange(200) % 4})
    rows["y"] = rows["x"] * np.where(rows["client"] == 3, -3.0, 1.0)
    rows.to_csv(tmp_path / "t.csv", index=False)
    options = {"path": str(tmp_path / "t.csv"), "task": "regression", "group": "client"}
    changes = {"data": {"dataset": "file", "options": options}, "model": {"name": "linear"}}
    config = make_config(small | changes | {"algorithm": {"name": "global", "rounds": 2, "batch_size": 16}})
    run = load_run(start_run(config, runs=runs).folder)
    card = fairveil.export_run(run).files[-1].read_text()
    last = run.metrics.query("round == 2 and metric == 'rmse'")["value"]
    assert ["worst client", f"{last.max():.3f}"] in cells(rendered(card)) and "Less is better" in card


def test_the_card_says_what_was_promised_and_of_which_files(odd: Run, exported: fairveil.Exported) -> None:
    page = rendered(exported.files[-1].read_text())
    text, found = html.unescape(re.sub(r"<[^>]+>", "", page)), cells(page)
    assert odd.statement["sentence"] in text and odd.statement["not_covered"] in text
    assert odd.result and odd.result["data_fingerprint"] in text and odd.result["config_hash"] in text
    assert all(warning in text for warning in exported.warnings)
    marks = {row[0]: row[3] for row in found if len(row) == 4}
    for path in exported.files[:-1]:
        assert marks[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    settings = {row[0]: row[1] for row in found if len(row) == 2}
    assert settings["algorithm.batch_size"] == "8" and settings["algorithm.learning_rate"] == "0.5"
    assert settings["seed"] == "0" and settings["delta"] == "0.001"
    assert str(odd.folder.parent.parent) not in text and "odd.csv" in text  # the name of the data, never where they lie
    assert not re.search(r"TODO|TBD|FIXME|\{\{|\}\}|\bnan\b", text)


def run_code(card: Path, where: Path, classes: int) -> None:
    """Run every Python block of a card in its folder, with the modules of `where` at hand."""
    blocks = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert len(blocks) == 2
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(where)])}
    for block in blocks:
        code = f"{block}\nassert scores.shape == (1, {classes}), scores.shape\n"
        subprocess.run([sys.executable, "-c", code], cwd=card.parent, env=environment, timeout=60, check=True)


def test_the_code_in_the_card_runs(exported: fairveil.Exported) -> None:
    run_code(exported.files[-1], exported.folder, 2)


def test_the_code_for_a_model_of_ones_own_runs(
    small: dict[str, Any], tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one whose file could not be named in an import statement."""
    code = "from torch import nn\n\ndef net(features, classes):\n"
    (tmp_path / "my-nets.py").write_text(code + "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = load_run(start_run(make_config(small | {"model": {"name": "my-nets:net"}}), runs=runs).folder)
    exported = fairveil.export_run(run)
    run_code(exported.files[-1], tmp_path, 10)
    assert not [warning for warning in exported.warnings if "code has changed" in warning]
    (tmp_path / "my-nets.py").write_text(f"# changed\n{(tmp_path / 'my-nets.py').read_text()}")
    assert [warning for warning in fairveil.export_run(run).warnings if "code has changed" in warning]


def test_a_card_of_one_client_speaks_of_its_model_only(odd: Run, tmp_path: Path) -> None:
    exported = fairveil.export_run(odd, tmp_path, "plain")
    found = cells(rendered(exported.files[-1].read_text()))
    files = [row[0] for row in found if row[0].endswith((".onnx", ".safetensors"))]
    assert files == [path.name for path in exported.files[:-1]] and len(files) == 2
