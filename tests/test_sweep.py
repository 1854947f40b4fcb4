"""Sweeps: their configs, their results, runs that fail, and sweeps that are killed and go on."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from rich.console import Console

from fairveil import cli
from fairveil.comparison import compare
from fairveil.config import load_config
from fairveil.contract import differ, outcome
from fairveil.errors import RunFault, UserError
from fairveil.run import Interrupted
from fairveil.sweep import Cell, CellState, Sweep, SweepResult, load_sweep, make_sweep, run_sweep, runner
from fairveil.sweep.cell import CellProcess
from fairveil.sweep.display import Display, print_sweep
from fairveil.sweep.results import Composed, make_table, plain_rows

MARK = "FAIRVEIL_TEST_MARK"  # in the environment of a command and of all processes that it starts
TROUBLE = '''
"""An algorithm of a user that can go wrong in its second round."""
import os
import signal
import time
from pathlib import Path

from fairveil.algorithms.global_ import Global


class Trouble(Global):
    trouble: str = "none"

    def round(self, session, state):
        if session.round == 2 and self.trouble != "none":
            print("this is", self.trouble, flush=True)
            if self.trouble == "raise" or (self.trouble == "mend" and Path("broken").exists()):
                raise ArithmeticError("two and two are five")
            if self.trouble == "leave":
                raise SystemExit(4)
            if self.trouble == "exit":
                os._exit(3)
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "wait":
                time.sleep(600)
        return super().round(session, state)
'''


@pytest.fixture
def base(small: dict[str, Any]) -> dict[str, Any]:
    """Three short rounds."""
    return small | {
        "algorithm": {"name": "global", "rounds": 3, "batch_size": 64, "learning_rate": 1.0},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an algorithm that can go wrong; the current one."""
    (tmp_path / "trouble.py").write_text(TROUBLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "trouble", raising=False)
    return tmp_path


def variant(name: str, /, **settings: Any) -> dict[str, Any]:
    return {"name": name, "set": settings}


def troubles(base: dict[str, Any], *kinds: str, **sweep: Any) -> dict[str, Any]:
    """A sweep with a variant for each kind of trouble."""
    algorithm = base["algorithm"] | {"name": "trouble:Trouble"}
    return {
        "name": "troubles",
        "base": base,
        "seeds": [0],
        "variants": [variant(kind, algorithm=algorithm | {"trouble": kind}) for kind in kinds],
        **sweep,
    }


def events(folder: Path) -> list[tuple[str, str]]:
    """The log of the sweep: what happened, to which run; empty before there is one."""
    log = folder / "sweep.log"
    return [tuple(line.split()[1:]) for line in log.read_text().splitlines()] if log.exists() else []  # type: ignore[misc]


def timeless(table: pd.DataFrame) -> pd.DataFrame:
    """The results without the time that they took, and the commit, which may change while the tests run."""
    return table.drop(columns=["seconds", "commit"])


def wait_for(what: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def write(values: dict[str, Any]) -> str:
    Path("sweep.toml").write_text(tomli_w.dumps(values))
    return "sweep.toml"


def waiting(base: dict[str, Any]) -> tuple[str, Callable[[], bool]]:
    """A sweep of four runs, of which two wait forever; and whether the first of these does, and another is finished."""
    path, cells = write(troubles(base, "wait", "none", seeds=[0, 1])), Path("sweeps/troubles/cells")

    def ready() -> bool:
        waits = any(cells.glob("wait*seed-0*/checkpoints/round-000001.safetensors"))
        return waits and any(cells.glob("*/result.json"))

    return path, ready


# ---- the config ------------------------------------------------------------------------------------


def test_cells_are_variants_times_grid_times_seeds(base: dict[str, Any]) -> None:
    sweep = make_sweep(
        {
            "name": "all",
            "base": base,
            "seeds": [3, 5],
            "grid": {"privacy.noise_multiplier": [1.0, 2.0], "algorithm.learning_rate": [0.5, 1, 1e-5]},
            "variants": [{"name": "a"}, variant("b", **{"algorithm.rounds": 2, "model": {"name": "mlp"}})],
        }
    )
    assert len(sweep.cells) == 2 * 2 * 3 * 2 and len({cell.digest for cell in sweep.cells}) == 24
    cell = sweep.cells[-1]
    assert (cell.variant, cell.seed, cell.config.seed) == ("b", 5, 5)
    assert cell.point == {"privacy.noise_multiplier": 2.0, "algorithm.learning_rate": 1e-5}
    assert cell.label == cell.config.name == "b_noise_multiplier-2.0_learning_rate-1e-05_seed-5"
    assert cell.digest == cell.config.digest()
    assert str(cell) == "b, privacy.noise_multiplier = 2.0, algorithm.learning_rate = 1e-05, seed 5"
    assert cell.config.algorithm.options["rounds"] == 2 and cell.config.model.name == "mlp"
    assert sweep.cells[0].config.model.name == "logistic"


def test_a_section_of_a_variant_replaces_that_of_the_base(base: dict[str, Any]) -> None:
    """What it leaves out has its default, and is not taken from the base; the grid reaches into it."""
    sweep = make_sweep(
        {
            "name": "section",
            "base": base,
            "seeds": [0],
            "grid": {"algorithm.batch_size": [8]},
            "variants": [variant("own", algorithm={"name": "local", "rounds": 7})],
        }
    )
    assert sweep.cells[0].config.algorithm.options == {"rounds": 7, "batch_size": 8}


def test_labels_are_good_file_names(base: dict[str, Any]) -> None:
    split = {"kind": "iid", "clients": 5}
    grid = {"data.split": [split, {"kind": "iid", "clients": 4}], "algorithm.name": ["global", "local"]}
    labels = [cell.label for cell in make_sweep({"name": "x", "base": base, "seeds": [0], "grid": grid}).cells]
    assert labels[0] == "split-kind-iid-clients-5_name-global_seed-0"
    long = make_sweep({"name": "x", "base": base, "seeds": [0], "variants": [{"name": "v" * 300}]}).cells[0]
    assert len(long.label) == 80


def test_the_example_is_read(tmp_path: Path) -> None:
    """Its base lies beside it; written out with its base it is the same sweep."""
    path = Path(__file__).parents[1] / "examples/digits/sweep.toml"
    sweep = load_sweep(path)
    assert len(sweep.cells) == 12
    (tmp_path / "sweep.toml").write_text(sweep.config.to_toml())
    again = load_sweep(tmp_path / "sweep.toml")
    assert [cell.digest for cell in again.cells] == [cell.digest for cell in sweep.cells]
    assert again.config == sweep.config


NOISE = "privacy.noise_multiplier"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sedes": [1]}, ["sedes", "is not a known key", "seeds = [1]"]),
        ({"seeds": []}, ["seeds = [] is empty"]),
        ({"seeds": [0, 1, 0]}, ["has 0 twice"]),
        ({"seeds": ["0"]}, ["seeds[0]", "valid integer"]),
        ({"seeds": None}, ["seeds", "list"]),
        ({"name": "a/b"}, ["name", "a/b"]),
        ({"base": "nowhere.toml"}, ["nowhere.toml cannot be read", "base ="]),
        ({"base": 3}, ["base = 3 is not valid"]),
        ({"base": {"name": "x"}}, ["(base, seed 0): data is missing"]),
        ({"grid": {NOISE: []}}, [NOISE, "not a list", "Nothing was run"]),
        ({"grid": {NOISE: 1.0}}, [NOISE, "not a list", f'"{NOISE}" = [1.0]']),
        ({"grid": {"privacy": {"delta": [1e-3]}}}, ["in quotes", '"privacy.delta" = [0.001]']),
        ({"grid": {"privacy": [1]}}, ["whole section", "[[variants]]"]),
        ({"grid": {"seed": [1]}}, ["grid.seed cannot be set here", "seeds ="]),
        ({"grid": {"privacy.": [1]}}, ["is not a key"]),
        ({"grid": {"privacy.nois": [1.0]}}, ["privacy.nois = 1.0 is not a known key", "seed 0"]),
        ({"grid": {"seed.x": [1.0]}}, ["reaches into 'seed'"]),
        ({"grid": {"data.split": [{}], "data.split.kind": ["iid"]}}, ['"data.split" and "data.split.kind"']),
        ({"variants": {"name": "a"}}, ["variants", "list"]),
        ({"variants": [{"name": "a"}, {"name": "a", "set": {"model.name": "mlp"}}]}, ['two variants are named "a"']),
        ({"variants": [{"name": "a", "sett": {}}]}, ["variants[0].sett", "variants[0].set ="]),
        ({"variants": [{"set": {}}]}, ["variants[0].name is missing"]),
        ({"variants": [variant("a", name="b")]}, ['variant "a"', "cannot be set here"]),
        ({"variants": [variant("a", **{"algorithm.nam": "local"})]}, ["(a, seed 0)", "algorithm.nam"]),
        ({"variants": [{"name": "a"}, {"name": "b"}]}, ["(a, seed 0) and (b, seed 0) are the same run"]),
        ({"grid": {"engine.workers": [1, 2]}}, ["are the same run", "[engine] do not count"]),
        ({"variants": [variant("a", **{NOISE: 2.0})], "grid": {NOISE: [1.0]}}, ["by the grid and by variant"]),
        ({"variants": [variant("a", privacy={"noise_multiplier": 2.0})], "grid": {NOISE: [1.0]}}, ['set."privacy"']),
        ({"variants": [variant("a", **{"data.split.kind": "iid"})], "grid": {"data.split": [{}]}}, ["by the grid"]),
        ({"variants": [{"name": "global"}], "baseline": "globl"}, ['baseline = "global"', "not a variant"]),
        ({"baseline": "global"}, ["not a variant", "none"]),
        ({"seeds": [2**70]}, ["seeds[0]", "less than"]),
        ({"grid": {"model.hidden": [1, 2]}}, ["model.hidden = 1 is not an option"]),
        ({"grid": {"data.split.clients": [[2, 3], [2]]}}, ["data.split.clients"]),
        ({"grid": {"data.options": [{"path": "x.csv"}]}}, ["data.options.path"]),
        ({"variants": [variant("a", **{"data.options": {"x": date(2020, 1, 1)}})]}, ["date", "in quotes"]),
    ],
)  # fmt: skip
def test_mistakes(base: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    """Each is found before anything runs, and says what to type."""
    with pytest.raises(UserError) as error:
        make_sweep({"name": "wrong", "base": base | {"seed": 0}, "seeds": [0], **change})
    for word in words:
        assert word in str(error.value)


# ---- results ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, SweepResult]:
    """Two variants, two points, two seeds; both at a time."""
    base = {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 3, "batch_size": 64},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    }
    sweep = make_sweep(
        {
            "name": "finished",
            "base": base,
            "seeds": [0, 1],
            "baseline": "global",
            "grid": {NOISE: [0, 1.0]},
            "variants": [{"name": "global"}, variant("oracle", **{"algorithm.name": "oracle"})],
        }
    )
    return sweep, run_sweep(sweep, tmp_path_factory.mktemp("sweeps") / "finished", 2)


def test_the_table_holds_what_the_results_hold(finished: tuple[Sweep, SweepResult]) -> None:
    sweep, found = finished
    assert list(found.table["status"]) == ["finished"] * 8 and found.failures == () and found.skipped == 0
    read = pd.read_csv(found.folder / "results.csv")
    parquet = pd.read_parquet(found.folder / "results.parquet")
    pd.testing.assert_frame_equal(parquet, found.table)
    for table in (found.table, read, parquet):
        for cell, (_, row) in zip(sweep.cells, table.iterrows(), strict=True):
            folder = found.folder / "cells" / f"{cell.label}-{cell.digest[:8]}"
            assert load_config(folder / "config.toml").digest() == cell.digest
            result = json.loads((folder / "result.json").read_text())
            assert (row["variant"], row[NOISE], row["seed"]) == (cell.variant, cell.point[NOISE], cell.seed)
            for key in (
                "config_hash",
                "commit",
                "data_fingerprint",
                "fairveil",
                "algorithm",
                "rounds",
                "delta",
                "seconds",
            ):
                assert row[key] == result[key]
            for key in ("epsilon", "epsilon_spent"):
                assert row[key] == (math.inf if cell.point[NOISE] == 0 else result[key])
            for metric in ("accuracy", "loss"):
                summary = result[metric]
                for key in ("mean", "worst", "best", "worst_10_percent", "disparity", "variance", "clients"):
                    assert row[f"{metric}_{key}"] == summary[key]
                for key in ("deviation", "gap"):
                    assert row[f"{metric}_{key}"] == summary[key]
                assert row[f"{metric}_worst_group_name"] == summary["worst_group"]
                assert row[f"{metric}_worst_group"] == summary["by_group"][summary["worst_group"]]
                assert {group: row[f"{metric}[{group}]"] for group in ("0°", "90°")} == summary["by_group"]


def test_the_comparison_is_that_of_the_table(finished: tuple[Sweep, SweepResult]) -> None:
    sweep, found = finished
    measures = {f"accuracy_{figure}": True for figure in ("mean", "worst_group", "worst_10_percent")}
    pd.testing.assert_frame_equal(found.comparison, compare(found.table, [NOISE], "global", measures))
    assert list(found.comparison["n"]) == [2] * 6 and len(found.means) == 12
    written = pd.read_csv(found.folder / "comparison.csv")
    pd.testing.assert_frame_equal(written, found.comparison, check_dtype=False)
    summary = json.loads((found.folder / "sweep.json").read_text())
    assert summary["cells"] == {"total": 8, "finished": 8, "failed": 0, "skipped": 0}
    assert summary["composed"] == {
        "runs": 8, "epsilon": "infinity", "delta": 0.008, "protects": ["record under add-remove"]
    }  # fmt: skip
    assert [cell.digest for cell in load_sweep(found.folder / "sweep.toml").cells] == [c.digest for c in sweep.cells]


def test_one_at_a_time_gives_the_same(finished: tuple[Sweep, SweepResult], tmp_path: Path) -> None:
    sweep, found = finished
    few = Sweep(sweep.config, tuple(c for c in sweep.cells if c.seed == 0 and c.point[NOISE] == 1.0))
    engine = {"workers": 1}  # a process for each run is what is tested here
    cells = [c.config.model_copy(update={"engine": c.config.engine.model_copy(update=engine)}) for c in few.cells]
    one = run_sweep(Sweep(few.config, tuple(_with(c, x) for c, x in zip(few.cells, cells, strict=True))), tmp_path, 1)
    kept = found.table[(found.table["seed"] == 0) & (found.table[NOISE] == 1.0)].reset_index(drop=True)
    pd.testing.assert_frame_equal(timeless(one.table), timeless(kept), check_dtype=False)


def _with(cell: Cell, config: Any) -> Cell:
    return Cell(cell.variant, cell.point, cell.seed, cell.label, config, cell.digest)


def test_nothing_is_run_twice(finished: tuple[Sweep, SweepResult]) -> None:
    """Called again, it starts no process and gives the same; more seeds run the new runs only."""
    sweep, found = finished
    before = events(found.folder)
    again = run_sweep(sweep, found.folder, 2)
    assert again.skipped == 8 and events(found.folder) == before
    pd.testing.assert_frame_equal(again.table, found.table)
    pd.testing.assert_frame_equal(again.comparison, found.comparison)
    values = sweep.config.model_dump() | {"seeds": [1, 4], "grid": {NOISE: [1.0]}}
    renamed = values["variants"][1] | {"name": "told"}
    more = run_sweep(make_sweep(values | {"variants": [values["variants"][0], renamed]}), found.folder, 2)
    assert (more.skipped, list(more.table["seed"]), more.others) == (2, [1, 4, 1, 4], 6)
    assert list(more.table["variant"]) == ["global", "global", "told", "told"]
    started = [name for what, name in events(found.folder)[len(before) :] if what == "start"]
    assert len(started) == 2 and all("seed-4" in name for name in started)
    assert "6 more were begun in this folder" in more.composed.sentence(more.others)
    assert run_sweep(sweep, found.folder, 2).skipped == 8  # they were left where they were


def test_values_of_any_type_make_a_column(base: dict[str, Any]) -> None:
    grid = {"data.split": [{"kind": "iid", "clients": 3}, {"kind": "iid", "clients": 4}], "algorithm.rounds": [1, 2]}
    sweep = make_sweep({"name": "x", "base": base, "seeds": [0], "grid": grid})
    table = make_table(sweep, {}, {sweep.cells[0]: "it broke"})
    assert table["data.split"][0] == '{ kind = "iid", clients = 3 }' and table["algorithm.rounds"].dtype == int
    assert list(table["status"]) == ["failed", "unfinished", "unfinished", "unfinished"]
    assert plain_rows(table)[0]["error"] == "it broke" and plain_rows(table)[1]["error"] is None


def test_results_of_earlier_versions_are_read(base: dict[str, Any], finished: tuple[Sweep, SweepResult]) -> None:
    """They lack some figures, whose cells stay empty. So do those that do not go with a metric."""
    sweep = make_sweep({"name": "x", "base": base, "seeds": [0, 1]})
    new = json.loads(next((finished[1].folder / "cells").glob("*/result.json")).read_text())
    added = ("deviation", "jain", "gap")
    old = new | {"accuracy": {key: value for key, value in new["accuracy"].items() if key not in added}}
    table = make_table(sweep, dict(zip(sweep.cells, (old, new), strict=True)), {})
    for key in added:
        column = table[f"accuracy_{key}"]
        assert math.isnan(column[0]) and column[1] == new["accuracy"][key] and column.dtype == float
    assert "loss_jain" not in table and plain_rows(table)[0]["accuracy_gap"] is None
    only_old = make_table(sweep, dict.fromkeys(sweep.cells, old), {})
    assert "accuracy_gap" not in only_old and (only_old["accuracy_mean"] == new["accuracy"]["mean"]).all()


def test_prices_of_different_promises_are_not_added(base: dict[str, Any]) -> None:
    client = {"name": "dp-fedavg", "rounds": 2, "sample_rate": 0.5}
    sweep = make_sweep(
        {"name": "x", "base": base, "seeds": [0], "variants": [{"name": "record"}, variant("client", algorithm=client)]}
    )
    prices = {cell: {"epsilon": 2.0, "delta": 1e-3} for cell in sweep.cells}
    both, one = Composed.of(prices), Composed.of({sweep.cells[0]: prices[sweep.cells[0]]})
    assert both.to_json()["epsilon"] is None and "protect different things" in both.sentence(0)
    assert (one.epsilon, one.delta) == (2.0, 1e-3) and "epsilon 2 and delta 0.001" in one.sentence(0)
    assert Composed.of({}).to_json() == {"runs": 0, "epsilon": 0.0, "delta": 0.0, "protects": []}


@pytest.mark.parametrize("cells", [500])
def test_writing_the_table_stays_cheap(base: dict[str, Any], cells: int, finished: tuple[Sweep, SweepResult]) -> None:
    """A table of 500 runs takes well under a second; how often it is written depends on how long that takes."""
    sweep = make_sweep({"name": "many", "base": base, "seeds": list(range(cells))})
    path = next((finished[1].folder / "cells").glob("*/result.json"))
    result = json.loads(path.read_text())
    started = time.monotonic()
    table = make_table(sweep, dict.fromkeys(sweep.cells, result), {})
    assert len(table) == cells and time.monotonic() - started < 1


# ---- what is shown ---------------------------------------------------------------------------------


def console(**options: Any) -> Console:
    return Console(record=True, file=io.StringIO(), **options)


def test_the_grid_fits_the_screen(base: dict[str, Any]) -> None:
    grid = {NOISE: [float(n) for n in range(1, 41)]}
    sweep = make_sweep({"name": "big", "base": base, "seeds": [0, 1], "grid": grid})
    shown = console(width=80, height=20, force_terminal=True)
    display = Display(sweep, shown)
    display(sweep.cells[0], CellState("kept", worst=0.75))
    display(sweep.cells[1], CellState("failed", error="no"))
    display(sweep.cells[60], CellState("running", 3, 9))
    shown.print(display.render())
    text = shown.export_text()
    assert len(text.splitlines()) < 20 and "... and 28 more rows" in text
    for words in ("base, noise_multiplier 1.0", "0.750", "failed", "3/9", "1 of 80 finished (1 of them before)"):
        assert words in text
    narrow = make_sweep({"name": "wide", "base": base, "seeds": list(range(30))})
    small = console(width=60, height=20, force_terminal=True)
    small.print(Display(narrow, small).render())
    assert "·" * 30 in small.export_text()


def test_the_end_is_told(finished: tuple[Sweep, SweepResult]) -> None:
    sweep, found = finished
    shown = console(width=120)
    print_sweep(found, sweep, shown)
    text = shown.export_text()
    for words in (
        "accuracy over seeds", "compared with global", "worst group", "±", f"Sweep folder: {found.folder}",
        "8 finished runs", "epsilon infinity and delta 0.008", "That is no guarantee", "is itself not priced",
    ):  # fmt: skip
        assert words in text


# ---- runs that fail --------------------------------------------------------------------------------


def test_a_failure_stays_in_its_run(base: dict[str, Any], here: Path) -> None:
    """Exceptions, exits and kills: each listed, with its log; the others finish."""
    kinds = ("none", "raise", "leave", "exit", "kill", "diverge", "plan")
    values = troubles(base, *kinds[:5])
    values["variants"] += [
        variant("diverge", **{"algorithm.learning_rate": 1e300}),
        variant("plan", **{"privacy.delta": 0.5}),  # refused when the run is planned
    ]
    told: list[tuple[str, str]] = []
    sweep = make_sweep(values)
    found = run_sweep(sweep, Path("sweeps/troubles"), 2, lambda cell, state: told.append((cell.variant, state.status)))
    assert dict(zip(found.table["variant"], found.table["status"], strict=True)) == {
        kind: "finished" if kind == "none" else "failed" for kind in kinds
    }
    errors = {failure.cell.partition(",")[0]: failure for failure in found.failures}
    assert errors["raise"].error == "ArithmeticError: two and two are five"
    assert errors["leave"].error == "SystemExit: 4"
    assert "exit code 3" in errors["exit"].error
    assert "signal 9 (SIGKILL" in errors["kill"].error and "memory" in errors["kill"].error
    assert "no longer finite" in errors["diverge"].error and "Try:" in errors["diverge"].error
    assert "privacy.delta = 0.5 is too large" in errors["plan"].error
    texts = {kind: failure.log.read_text() for kind, failure in errors.items()}
    assert "Traceback" in texts["raise"] and "trouble.py" in texts["raise"]
    assert "Traceback" not in texts["diverge"] + texts["plan"] + texts["exit"]
    assert "The last that it printed:\nthis is exit" in texts["exit"]
    assert next(iter(found.table["error"].dropna())) == "ArithmeticError: two and two are five"
    assert Counter(told)["none", "running"] == 4 and ("raise", "failed") in told  # at its start, and after each round
    (good,) = Path("sweeps/troubles/cells").glob("none_*")
    assert not (good / "failure.txt").exists() and "this is" not in (good / "result.json").read_text()


def test_a_failed_run_is_tried_again_from_where_it_was(base: dict[str, Any], here: Path) -> None:
    sweep, folder = make_sweep(troubles(base, "mend", "none")), Path("sweeps/troubles")
    Path("broken").touch()
    first = run_sweep(sweep, folder, 2)
    assert len(first.failures) == 1 and first.others == 1
    log = first.failures[0].log
    assert log.exists() and (log.parent / "checkpoints/round-000001.safetensors").exists()
    Path("broken").unlink()
    rounds: list[int] = []
    second = run_sweep(sweep, folder, 2, lambda cell, state: rounds.append(state.round) if state.round else None)
    assert second.failures == () and second.skipped == 1 and second.others == 0 and not log.exists()
    assert rounds == [2, 3]
    names = [name for what, name in events(folder) if what == "start"]
    assert sorted(Counter(names).values()) == [1, 2]


def visits(path: Path, rows: int) -> dict[str, Any]:
    random_numbers = np.random.default_rng(rows)
    table = pd.DataFrame({"x": random_numbers.normal(size=rows), "client": np.arange(rows) % 3})
    table.assign(y=table["x"] > 0).astype({"y": int}).to_csv(path, index=False)
    return {"dataset": "file", "options": {"path": str(path)}}


def test_other_data_or_code_is_not_compared_with_what_is_there(base: dict[str, Any], here: Path) -> None:
    values = {"name": "v", "base": base | {"data": visits(here / "v.csv", 60)}, "seeds": [0]}
    run_sweep(make_sweep(values), here / "v", 1)
    visits(here / "v.csv", 90)
    assert run_sweep(make_sweep(values), here / "v", 1).skipped == 1  # nothing is added, so nothing is compared
    with pytest.raises(UserError, match=r"the data of .* have changed"):
        run_sweep(make_sweep(values | {"seeds": [0, 1]}), here / "v", 1)
    visits(here / "v.csv", 60)
    assert run_sweep(make_sweep(values | {"seeds": [0, 1]}), here / "v", 1).skipped == 1
    path = next((here / "v" / "cells").glob("*/result.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "another"}))
    with pytest.raises(UserError, match=r"the code of .* has changed"):
        run_sweep(make_sweep(values | {"seeds": [0, 1, 2]}), here / "v", 1)


def test_a_damaged_result_is_made_again(base: dict[str, Any], here: Path) -> None:
    values = {"name": "d", "base": base, "seeds": [0]}
    whole = run_sweep(make_sweep(values), here / "d", 1)
    next((here / "d" / "cells").glob("*/result.json")).write_text("{ torn")
    again = run_sweep(make_sweep(values), here / "d", 1)
    assert again.skipped == 0
    pd.testing.assert_frame_equal(timeless(again.table), timeless(whole.table))


def test_regression_beside_classification(base: dict[str, Any], here: Path) -> None:
    """Each has its own figures, whichever run was finished first."""
    base = {**base, "data": {}, "model": {"name": "linear"}}
    data = [{"dataset": "digits"}, {"dataset": "linear-clusters", "options": {"clients": [2, 2]}}]
    values = {"name": "two", "base": base, "seeds": [0], "variants": [variant(d["dataset"], data=d) for d in data]}  # type: ignore[arg-type]
    result = run_sweep(make_sweep(values), here / "two", 2)
    assert result.metrics == ("accuracy", "rmse")
    assert set(result.means.query("n == 1")["measure"]) >= {"accuracy_mean", "rmse_mean"}
    again = run_sweep(make_sweep(values), here / "two", 2)
    pd.testing.assert_frame_equal(again.means, result.means)


def test_a_column_with_an_odd_name_can_be_in_the_grid(base: dict[str, Any], here: Path) -> None:
    data = visits(here / "v.csv", 60)
    table = pd.read_csv(here / "v.csv").rename(columns={"x": "â.x y"})
    table.to_csv(here / "v.csv", index=False)
    grid = {'data.options.prepare."â.x y"': [{"kind": "range", "low": -1, "high": high} for high in (1, 2)]}
    sweep = make_sweep({"name": "odd", "base": base | {"data": data}, "seeds": [0], "grid": grid})
    assert len(run_sweep(sweep, here / "odd", 2).table) == 2


def test_two_at_once_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    sweep = make_sweep({"name": "x", "base": base, "seeds": [0]})
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use"):
            run_sweep(sweep, tmp_path)
    assert not (tmp_path / "results.csv").exists()


def test_a_folder_that_cannot_be_made(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run_sweep(make_sweep({"name": "x", "base": base, "seeds": [0]}), tmp_path / "file" / "x")


def test_a_full_disk_stops_the_sweep_and_its_runs(
    base: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback, and no process left."""
    processes: list[CellProcess] = []

    def start(*args: Any) -> CellProcess:
        processes.append(CellProcess(*args))
        return processes[-1]

    def full(*args: Any) -> None:
        if processes:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "CellProcess", start)
    monkeypatch.setattr(runner, "write_table", full)
    with pytest.raises(RunFault, match="No space left"):
        run_sweep(make_sweep(troubles(base, "none", "wait")), here / "x", 2)
    assert len(processes) == 2 and not any(process.process.is_alive() for process in processes)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_stops_after_saving(base: dict[str, Any], here: Path) -> None:
    """Runs under way are told to end, and state what they have spent; the rest of the sweep is as it was."""
    path, ready = waiting(base)
    pressing = threading.Thread(target=lambda: (wait_for(ready), os.kill(os.getpid(), signal.SIGINT)))
    pressing.start()
    with pytest.raises(Interrupted, match="1 of 4 runs are finished"):
        run_sweep(load_sweep(Path(path)), Path("sweeps/troubles"), 2)
    pressing.join()
    folder = next(Path("sweeps/troubles/cells").glob("wait*seed-0*"))
    statement = json.loads((folder / "statement.json").read_text())
    assert statement["epsilon_spent"] > 0 and not statement["complete"]
    assert "failure" not in {what for what, _ in events(Path("sweeps/troubles"))}
    assert Counter(pd.read_csv("sweeps/troubles/results.csv")["status"]) == {"unfinished": 3, "finished": 1}


def test_the_command_tells_failures_and_exits_with_1(
    base: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fairveil(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["fairveil", "sweep", *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        assert leaving.value.code == 1
        return capsys.readouterr()

    path = write(troubles(base, "none", "raise", grid={NOISE: [1.0]}, baseline="none"))
    out, err = fairveil(path, "--sweeps", "elsewhere", "--jobs", "2", "--json")
    answer = json.loads(out)
    assert answer["folder"] == "elsewhere/troubles"
    assert answer["cells"] == {"total": 2, "finished": 1, "failed": 1, "skipped": 0}
    assert [row["status"] for row in answer["rows"]] == ["finished", "failed"]
    assert answer["rows"][1]["accuracy_mean"] is None and answer["comparison"][0]["n"] == 0
    assert answer["failures"][0]["error"] == "ArithmeticError: two and two are five"
    assert Path(answer["failures"][0]["log"]).exists()
    assert answer["composed"]["epsilon"] == answer["rows"][0]["epsilon"]
    assert [line[:5] for line in err.splitlines()] == ["[1/2]", "[2/2]"]  # no terminal: a line for each run
    out, err = fairveil(path, "--sweeps", "elsewhere")
    for words in ("Failed: raise", "two and two are five", "failure.txt", "tries them again", "Sweep folder:"):
        assert words in out


# ---- the command, interrupted and killed -----------------------------------------------------------


@dataclass
class Command:
    """`fairveil sweep`, leader of its own process group."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    @property
    def text(self) -> str:
        return self.log.read_text()

    def children(self) -> list[int]:
        """All that it started, at any depth."""
        found, wanted = [], f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return [pid for pid in found if pid != self.process.pid]

    def kill(self) -> None:
        """SIGKILL to this one process; whatever it started is gone within a few seconds."""
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not self.children(), 10)


@pytest.fixture
def start(here: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; what is left of them ends with the test."""
    begun: list[Command] = []

    def command(*arguments: str) -> Command:
        mark, log = f"{here}-{len(begun)}", here / f"log-{len(begun)}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("fairveil"), "sweep", *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env=os.environ | {MARK: mark},
            )  # fmt: skip
        begun.append(Command(process, log, mark))
        return begun[-1]

    yield command
    for one in begun:
        one.process.kill()
        one.process.wait()
        for pid in one.children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_kill_leaves_no_process_and_a_table(base: dict[str, Any], start: Callable[..., Command]) -> None:
    """kill -9 of the sweep ends runs in the midst of a round; a second command meanwhile was refused."""
    path, ready = waiting(base)
    first = start(path, "--jobs", "2")
    wait_for(ready)
    wait_for(lambda: "finished" in Path("sweeps/troubles/results.csv").read_text())
    assert len(first.children()) >= 3  # a fork server, a resource tracker, the run that waits
    second = start(path)
    assert second.process.wait() == 2 and "is in use" in second.text
    first.kill()
    assert first.process.returncode == -signal.SIGKILL
    table = pd.read_csv("sweeps/troubles/results.csv")
    assert set(table["status"]) == {"finished", "unfinished"}


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(base: dict[str, Any], start: Callable[..., Command]) -> None:
    """As a terminal sends it, to the whole group: no traceback from any of them, no process left."""
    path, ready = waiting(base)
    command = start(path, "--jobs", "2", "--json")
    wait_for(ready)
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait() == 130
    wait_for(lambda: not command.children(), 10)
    assert "Traceback" not in command.text and "KeyboardInterrupt" not in command.text
    assert "1 of 4 runs are finished" in command.text and f"fairveil sweep {path} --jobs 2 --json" in command.text


@pytest.mark.slow
def test_a_run_may_have_workers_of_its_own(base: dict[str, Any], start: Callable[..., Command]) -> None:
    """One run at a time uses all cores; its workers die with the sweep as well."""
    values = troubles(base, "none", "wait")
    values["base"] = base | {"engine": {"workers": 2, "block": 1}}
    values["variants"].reverse()
    path = write(values)
    command = start(path, "--jobs", "1")
    wait_for(lambda: list(Path("sweeps/troubles/cells").glob("*/checkpoints/round-000001.safetensors")))
    assert len(command.children()) >= 6  # two fork servers, a resource tracker, the run, its two workers
    command.kill()
    del values["variants"][0]
    write(values)
    assert start(path, "--jobs", "1").process.wait() == 0
    result = run_sweep(make_sweep(troubles(base, "none")), Path("other"), 2)
    table = pd.read_parquet("sweeps/troubles/results.parquet")
    pd.testing.assert_frame_equal(timeless(table), timeless(result.table))


def untouched(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file of a run: which it is, when it was written, how long it is."""
    stats = {str(path.relative_to(folder)): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}


@pytest.mark.slow
def test_killed_again_and_again(base: dict[str, Any], start: Callable[..., Command]) -> None:
    """24 runs, killed with kill -9 at random moments until they are all finished.

    Nothing that was finished is run or written again, no process survives, and the results are those of a sweep that
    was left in peace.
    """
    values = {
        "name": "killed",
        "base": base | {"privacy": {"delta": 1e-3}},
        "seeds": [0, 1, 2, 3],
        "baseline": "global",
        "grid": {"privacy.epsilon": [2.0, 4.0, 8.0]},
        "variants": [{"name": "global"}, variant("oracle", **{"algorithm.name": "oracle"})],
    }
    path, folder, chance, kills = write(values), Path("sweeps/killed"), random.Random(0), 0
    cells: dict[Path, dict[str, tuple[int, int, int]]] = {}
    while True:
        begun = len(events(folder))
        command = start(path, "--jobs", "2")
        if kills % 4:  # once in a while at any moment, else when runs are under way
            goal = begun + chance.randint(2, 12)
            wait_for(lambda: command.process.poll() is not None or len(events(folder)) >= goal)  # noqa: B023
        time.sleep(chance.uniform(0, 0.5 if kills % 4 else 5))
        if command.process.poll() is None:
            kills += 1
        command.kill()
        assert "Traceback" not in command.text
        started = {name for what, name in events(folder)[begun:] if what == "start"}
        assert not {cell.name for cell in cells} & started
        for cell, files in cells.items():
            assert untouched(cell) == files
        cells = {result.parent: untouched(result.parent) for result in folder.glob("cells/*/result.json")}
        if command.process.returncode == 0:
            break
        assert command.process.returncode == -signal.SIGKILL
    assert len(cells) == 24 and kills >= 4
    assert not list(folder.rglob(".*.part"))
    done = Counter(name for what, name in events(folder) if what == "finish")
    assert set(done.values()) == {1}
    peace = run_sweep(load_sweep(Path(path)), Path("peace"), 2)
    table = pd.read_parquet(folder / "results.parquet")
    pd.testing.assert_frame_equal(timeless(table), timeless(peace.table))
    assert (folder / "comparison.csv").read_bytes() == Path("peace/comparison.csv").read_bytes()
    for cell in cells:
        ours, theirs = outcome(cell), outcome(Path("peace/cells", cell.name))
        assert differ(ours, theirs) is None and differ(theirs, ours) is None
