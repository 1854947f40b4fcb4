"""A run folder, read: what was put in comes out, at any time, and what cannot be read says why."""

from __future__ import annotations

import math
import operator
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fairveil
from fairveil.errors import RunFault, UserError
from fairveil.reading import Run, load_run
from fairveil.store import Score, Store, is_held, of_records

COLUMNS = ["round", "client", "group", "cluster", "split", "model", "metric", "value", "n"]


# ---- what was put in comes out ---------------------------------------------------------------------


@st.composite
def measured(draw: st.DrawFn) -> tuple[list[str], list[Score]]:
    """Groups of clients, and scores: in every measurement some clients, with or without clusters and counts."""
    groups = draw(st.lists(st.sampled_from(["north", "south", "°"]), min_size=1, max_size=5))
    keys = st.tuples(
        st.integers(1, 5), st.sampled_from(["test", "train"]), st.sampled_from(["served", "local_update, ask 1"]),
        st.sampled_from(["accuracy", "loss"]),
    )  # fmt: skip
    scores = []
    for number, split, model, metric in draw(st.lists(keys, max_size=6, unique=True)):
        clients = draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, unique=True))
        cluster, n = draw(st.booleans()), draw(st.booleans())
        for client in clients:
            value = draw(st.floats(allow_nan=False))
            row = draw(st.integers(0, 2**31 - 1)) if cluster else None
            records = draw(st.integers(0, 2**31 - 1)) if n else None
            scores.append(Score(number, client, split, model, metric, value, row, records))
    return groups, scores


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=measured())
def test_the_metrics_are_the_scores_that_were_put_in(
    handmade: Callable[..., Run], given: tuple[list[str], list[Score]]
) -> None:
    groups, scores = given
    table = handmade(groups, scores).metrics
    assert list(table.columns) == COLUMNS
    found = [tuple(None if cell is pd.NA else cell for cell in row) for row in table.itertuples(index=False)]
    expected = [
        (s.round, s.client, groups[s.client], s.cluster, s.split, s.model, s.metric, s.value, s.n) for s in scores
    ]
    names = operator.itemgetter(0, 4, 5, 6, 1)  # round, split, model, metric, client
    assert sorted(found, key=names) == sorted(expected, key=names)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=measured())
def test_tables_of_one_metric_say_the_same_as_all_metrics(
    handmade: Callable[..., Run], given: tuple[list[str], list[Score]]
) -> None:
    """Against a pivot of what was put in: a row for each round, a column for each client, NaN elsewhere."""
    groups, scores = given
    run = handmade(groups, scores)
    for metric, split, model in (("accuracy", "test", "served"), ("loss", "train", "local_update")):
        put = [s for s in scores if (s.metric, s.split) == (metric, split) and s.model.partition(",")[0] == model]
        rounds = sorted({s.round for s in put})
        for table, column in ((run.scores, "value"), (run.counts, "n")):
            expected = np.full((len(rounds), len(groups)), np.nan)
            for s in put:
                expected[rounds.index(s.round), s.client] = np.nan if getattr(s, column) is None else getattr(s, column)
            found = table(metric, split=split, model=model)
            assert found.index.tolist() == rounds and np.array_equal(found.to_numpy(), expected, equal_nan=True)


def test_load_run_is_part_of_the_package(handmade: Callable[..., Run]) -> None:
    """As the documentation has it: nine columns, one value a row; an empty table before the first round."""
    run = handmade(["a"], [Score(1, 0, "test", "served", "accuracy", 0.5, 0, 10)])
    metrics = fairveil.load_run(str(run.folder)).metrics
    assert isinstance(metrics, pd.DataFrame) and list(metrics.columns) == COLUMNS and len(metrics) == 1
    empty = handmade(["a"]).metrics
    assert list(empty.columns) == COLUMNS and empty.empty


def test_who_is_served_by_which_model_is_read_by_round(handmade: Callable[..., Run]) -> None:
    """Client 2 has no test records, so that nothing is known of it; client 1 changes its model in round 4."""
    rows = [Score(r, c, "test", "served", "accuracy", 0.5, int(c == 1 and r == 4), 7) for r in (2, 4) for c in (0, 1)]
    table = handmade(["a", "a", "b"], rows).assignment()
    assert table.index.tolist() == [2, 4]
    assert np.array_equal(table.to_numpy(), [[0, 0, np.nan], [0, 1, np.nan]], equal_nan=True)


def test_a_group_counts_its_clients_equally(handmade: Callable[..., Run]) -> None:
    """North: (0.2 + 0.4)/2, whatever they were tested on. Nobody of the west was scored, so it is left out."""
    rows = [Score(1, c, "test", "served", "accuracy", v, 0, n) for c, v, n in ((0, 0.2, 1), (1, 0.4, 99), (2, 0.9, 5))]
    table = handmade(["north", "north", "south", "west"], rows).by_group("accuracy")
    assert table.columns.tolist() == ["north", "south"]
    assert table.loc[1].tolist() == pytest.approx([0.3, 0.9])


def by_sex(metric: str, values: dict[str, list[tuple[int, float, int]]]) -> list[Score]:
    """Scores of client, value, number of records, by the value of an attribute."""
    rows = [(sex, *row) for sex, many in values.items() for row in many]
    return [Score(1, c, of_records("sex", sex), "served", metric, v, 0, n) for sex, c, v, n in rows]


def test_an_attribute_counts_its_records_equally(handmade: Callable[..., Run]) -> None:
    """Men: 1 of 1 right at one client and 3 of 9 at the other are 4 of 10. No test record has the value "other"."""
    rows = by_sex("accuracy", {"male": [(0, 1.0, 1), (1, 3 / 9, 9)], "female": [(1, 0.5, 4)]})
    facts = {"attributes": {"sex": ["female", "male", "other"]}}
    run = handmade(["a", "b"], rows, facts=facts, fairness={"groups": "sex"})
    assert run.attribute == "sex" and run.groups == ["female", "male", "other"]
    assert run.by_group("accuracy").loc[1].to_dict() == pytest.approx({"female": 0.5, "male": 0.4})


def test_errors_of_records_add_up_by_their_squares(handmade: Callable[..., Run]) -> None:
    """One record off by 3 and three off by 1 are sqrt((9 + 3)/4) = 1.73 off; a mean of the two would say 1.5."""
    rows = by_sex("rmse", {"male": [(0, 3.0, 1), (1, 1.0, 3)]})
    facts = {"classes": 0, "attributes": {"sex": ["female", "male"]}}
    run = handmade(["a", "b"], rows, facts=facts, fairness={"groups": "sex"})
    assert run.main == "rmse" and run.by_group("rmse").loc[1].to_dict() == pytest.approx({"male": 3**0.5})


def test_scores_of_another_model_are_not_those_of_the_served_ones(handmade: Callable[..., Run]) -> None:
    """A reference is not scored by attribute: it has no value there, and never that of the served models."""
    rows = by_sex("accuracy", {"male": [(0, 1.0, 1)], "female": [(0, 0.5, 4)]})
    facts = {"attributes": {"sex": ["female", "male"]}}
    run = handmade(["a"], rows, facts=facts, fairness={"groups": "sex"})
    assert run.by_group("accuracy", model="reference").empty


# ---- at any time -----------------------------------------------------------------------------------

WRITER = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from fairveil.store import Score, Store

@dataclass(frozen=True)
class Nothing: pass

with Store(Path(sys.argv[1])) as store:
    store.finish_round(2, 0.1, [Score(2, 0, "test", "served", "accuracy", 0.75, 0, 4)], Nothing(), {})
    print("written", flush=True)
    time.sleep(600)
"""


def test_a_run_under_way_is_read_while_it_is_written(handmade: Callable[..., Run]) -> None:
    """In the same process: what a commit has finished is seen, and neither waits for the other."""
    folder = handmade(["a"], [Score(1, 0, "test", "served", "accuracy", 0.5, 0, 4)]).folder
    assert not is_held(folder) and not load_run(folder).running
    with Store(folder) as store:
        assert is_held(folder) and load_run(folder).running
        for number in (2, 3):
            with store.database:
                store.database.execute("INSERT INTO round VALUES (?, 0.1)", (number,))
                assert load_run(folder).rounds["round"].tolist() == list(range(1, number))  # not committed yet
            assert load_run(folder).rounds["round"].tolist() == list(range(1, number + 1))
    assert not is_held(folder)


def test_the_run_of_another_process_is_read_and_known_to_be_held(handmade: Callable[..., Run]) -> None:
    folder = handmade(["a"], [Score(1, 0, "test", "served", "accuracy", 0.5, 0, 4)]).folder
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        run = load_run(folder)
        assert run.running and run.scores("accuracy")[0].tolist() == [0.5, 0.75]
        with pytest.raises(UserError, match="in use"):
            Store(folder)
    finally:
        writer.kill()
        writer.communicate()
    assert not is_held(folder)  # a killed process holds nothing, and what it had committed is there
    assert not load_run(folder).running and load_run(folder).scores("accuracy")[0].tolist() == [0.5, 0.75]


def test_a_finished_run_is_not_running(handmade: Callable[..., Run]) -> None:
    folder = handmade(["a"]).folder
    with Store(folder) as store:
        store.write("result.json", b"{}")
        assert not load_run(folder).running and load_run(folder).result == {}


def test_a_folder_without_a_lock_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path) and not is_held(tmp_path / "nowhere")


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database as in a folder that cannot be written: not even a lock can be taken. (Root may write anywhere.)"""
    connect = sqlite3.connect

    def refused(name: Any, **options: Any) -> sqlite3.Connection:
        if "mode=ro" in str(name):
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, **options)

    monkeypatch.setattr("fairveil.reading.sqlite3.connect", refused)


@pytest.mark.usefixtures("unwritable")
def test_a_finished_run_in_a_folder_that_cannot_be_written_is_read(handmade: Callable[..., Run]) -> None:
    run = handmade(["a"], [Score(1, 0, "test", "served", "accuracy", 0.5, 0, 4)])
    assert run.metrics["value"].tolist() == [0.5]


@pytest.mark.usefixtures("unwritable")
def test_rounds_that_are_only_in_the_log_are_not_passed_over(handmade: Callable[..., Run], tmp_path: Path) -> None:
    """Without locks the write-ahead log is not read: of a run that was killed the last rounds would be missing."""
    folder = handmade(["a"]).folder
    with Store(folder) as store:
        with store.database:
            store.database.execute("INSERT INTO round VALUES (1, 0.1)")
        shutil.copytree(folder, tmp_path / "killed")
    with pytest.raises(RunFault, match="copy it"):
        load_run(tmp_path / "killed")


# ---- what cannot be read ---------------------------------------------------------------------------


def test_a_folder_that_holds_no_run_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="is not a run folder") as error:
            load_run(folder)
        assert str(folder) in error.value.what and "fairveil list runs" in error.value.fix


def test_a_folder_of_an_earlier_version_says_so(handmade: Callable[..., Run]) -> None:
    """It kept one value a row, in a table called score."""
    folder = handmade(["a"]).folder
    with sqlite3.connect(folder / "run.sqlite") as database:
        database.execute("DROP TABLE scores")
        database.execute("CREATE TABLE score (round INTEGER, client INTEGER, value REAL)")
    database.close()
    with pytest.raises(UserError, match="written by an earlier version"):
        load_run(folder)


@pytest.mark.parametrize("left", ["nothing", "tables", "units"])
def test_a_run_that_is_still_being_planned_says_so(handmade: Callable[..., Run], left: str) -> None:
    folder = handmade(["a"]).folder
    if left == "units":  # the statement is what comes last
        (folder / "statement.json").unlink()
    else:
        (folder / "run.sqlite").unlink()
        (folder / "run.sqlite").touch()
    if left == "tables":
        Store(folder).__exit__(None, None, None)
    with pytest.raises(UserError, match="still being planned"):
        load_run(folder)


def damaged(database: bytes, how: str) -> bytes:
    """A database of pages of 4,096 bytes: the first holds the names of the tables."""
    return {
        "text": b"this is not a database",
        "first page": b"\0" * 4096 + database[4096:],
        "cut short": database[: 4096 * 3],
        "later pages": database[:4096] + b"\xff" * (len(database) - 4096),
    }[how]


@pytest.mark.parametrize("how", ["text", "first page", "cut short", "later pages"])
def test_a_damaged_database_is_no_traceback(handmade: Callable[..., Run], how: str) -> None:
    folder = handmade(["a"], [Score(1, 0, "test", "served", "accuracy", 0.5, 0, 4)]).folder
    whole = (folder / "run.sqlite").read_bytes()
    (folder / "run.sqlite").write_bytes(damaged(whole, how))
    with pytest.raises(RunFault, match="could not be read: its database is damaged"):
        load_run(folder)


def test_damage_that_shows_only_later_is_no_traceback_either(handmade: Callable[..., Run]) -> None:
    """Only the pages of the scores are overwritten, which load_run itself does not read."""
    rows = [Score(r, 0, "test", "served", "accuracy", 0.5, 0, 4) for r in range(1, 60)]
    run = handmade(["a"], rows)
    whole = bytearray((run.folder / "run.sqlite").read_bytes())
    with sqlite3.connect(run.folder / "run.sqlite") as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name LIKE '%scores%'"
        pages = [page for (page,) in database.execute(query)]
    database.close()
    for page in pages:
        whole[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    (run.folder / "run.sqlite").write_bytes(whole)
    again = load_run(run.folder)
    for read in (lambda: again.metrics, lambda: again.scores("accuracy"), lambda: again.measured("accuracy")):
        with pytest.raises(RunFault, match="could not be read: its database is damaged"):
            read()


def test_a_database_that_cannot_be_opened_is_no_traceback(handmade: Callable[..., Run]) -> None:
    """As without permission to read it; here a folder stands in its place."""
    folder = handmade(["a"]).folder
    (folder / "run.sqlite").unlink()
    (folder / "run.sqlite").mkdir()
    with pytest.raises(RunFault, match="could not be read: unable to open database file"):
        load_run(folder)


def test_a_config_that_is_no_toml_is_no_traceback(handmade: Callable[..., Run]) -> None:
    folder = handmade(["a"]).folder
    (folder / "config.toml").write_text("= 3")
    with pytest.raises(UserError, match=r"config.toml is not valid TOML"):
        load_run(folder)


def test_infinite_values_survive(handmade: Callable[..., Run]) -> None:
    run = handmade(["a"], [Score(1, 0, "train", "local_update, ask 1", "signal_to_noise", math.inf)])
    assert run.scores("signal_to_noise", split="train", model="local_update").loc[1, 0] == math.inf
    assert run.measured("signal_to_noise") == ["local_update"]
