"""The run folder: whole or absent, exact, and held by one process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.errors import UserError
from fairveil.reading import load_run
from fairveil.store import Score, Store


@dataclass(frozen=True)
class State:
    model: Tensor
    assignment: np.ndarray
    tiny: float
    infinite: float
    count: int
    word: str
    nothing: int | None
    flag: bool


STATE = State(torch.tensor([0.1, -0.0, 1e-40]), np.array([2, 0, 1]), 0.1 + 0.2, math.inf, 2**60, "a\nb", None, True)
PERSONAL = {3: {"model": torch.tensor([1 / 3])}, 11: {"model": torch.tensor([2 / 3]), "x": torch.zeros(0)}}


def test_a_checkpoint_gives_back_exactly_what_it_was_given(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.checkpoint(4, STATE, PERSONAL)
        found = store.latest()
    assert found is not None and found.round == 4
    again = State(**found.state)
    assert torch.equal(again.model, STATE.model) and torch.signbit(again.model[1])
    assert again.assignment.tolist() == [2, 0, 1] and isinstance(again.assignment, np.ndarray)
    plain = ("tiny", "infinite", "count", "word", "nothing", "flag")
    assert [getattr(again, key) for key in plain] == [getattr(STATE, key) for key in plain]
    assert {c: sorted(kept) for c, kept in found.personal.items()} == {3: ["model"], 11: ["model", "x"]}
    assert torch.equal(found.personal[3]["model"], PERSONAL[3]["model"])


def test_the_last_two_checkpoints_stay_and_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert store.latest() is None
        for number in (1, 2, 3):
            store.checkpoint(number, STATE, {})
        files = sorted((tmp_path / "checkpoints").iterdir())
        assert [file.name for file in files] == ["round-000002.safetensors", "round-000003.safetensors"]
        files[-1].write_bytes(files[-1].read_bytes()[:40])
        found = store.latest()
    assert found is not None and found.round == 2


def test_a_state_that_cannot_be_saved_exactly_is_refused(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Nested:
        models: list[Tensor]

    with Store(tmp_path) as store, pytest.raises(TypeError, match=r"Nested\.models is a list"):
        store.checkpoint(1, Nested([torch.zeros(1)]), {})


def test_one_process_holds_a_folder(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(UserError, match="in use"):
        Store(tmp_path)
    with Store(tmp_path):  # and lets it go
        pass


def test_metrics_are_one_long_table_and_a_round_run_again_replaces_its_rows(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.save_units([], [("a", "north"), ("b", "south")], {"data": "abc"})
        rows = [Score(1, c, "test", "served", "accuracy", 0.5 + c / 10, cluster=c, n=50) for c in (0, 1)]
        for _ in range(2):
            store.finish_round(1, 0.25, rows, STATE, {})
        store.write("config.toml", b"")
        store.write("statement.json", b"{}")
        table = load_run(tmp_path).metrics
        assert list(table.columns) == ["round", "client", "group", "cluster", "split", "model", "metric", "value", "n"]
        assert table.to_numpy().tolist() == [
            [1, 0, "north", 0, "test", "served", "accuracy", 0.5, 50],
            [1, 1, "south", 1, "test", "served", "accuracy", 0.6, 50],
        ]
        assert store.scores("accuracy") == {0: 0.5, 1: 0.6} and store.counts("accuracy") == {0: 50, 1: 50}
        assert store.seconds() == 0.25 and store.meta("data") == "abc" and store.meta("none") is None


def test_scores_are_those_of_the_last_evaluated_round(tmp_path: Path) -> None:
    """Later rounds have diagnostics of their tasks only."""
    with Store(tmp_path) as store:
        assert store.scores("accuracy") == {}
        for number in (1, 2, 3, 4):
            rows = [Score(number, 0, "train", "update, ask 1", "accuracy", 0.0)]
            if number < 3:
                rows += [Score(number, c, "test", "served", "accuracy", number / 10) for c in (0, 1)]
            store.finish_round(number, 0.1, rows, STATE, {})
        assert store.scores("accuracy") == {0: 0.2, 1: 0.2} and store.scores("loss") == {}
        assert store.counts("accuracy") == {} == store.counts("loss")  # they were not given


def test_the_database_syncs_every_commit(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        assert store.database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store.database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
