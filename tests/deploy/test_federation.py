"""Runs on a federation: the bits and the ledgers of the local engine, whatever is lost on the way."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fairveil.algorithms import ALGORITHMS
from fairveil.config import RunConfig, load_config
from fairveil.contract import Outcome, differ, outcome
from fairveil.engine import flower
from fairveil.errors import RunFault, UserError
from fairveil.guard import status
from fairveil.plan import Plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.remote import Envelope
from fairveil.run import Place, run_in
from fairveil.store import Store

from .conftest import SeededServer, Small, carry_out, client_folder

OPTIONS: dict[str, dict[str, Any]] = {name: {"clusters": 2} for name in ("ifca", "km-cdpfl", "r-dpcfl", "rc-dpfl")}
OPTIONS["dp-fedavg"] = {"sample_rate": 0.6}
OPTIONS |= {name: {"queries": 30, "student_steps": 20} for name in ("pate-fl", "knn-fl")}
IFCA = {"name": "ifca", "clusters": 2}
GLOBAL = {"name": "global"}


class Here(Place):
    """This machine, with the noise of the tests."""

    def root(self, plan: Plan, store: Store) -> str:
        return "test"


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "LOOK", 0.001)
    monkeypatch.setattr(flower, "ROLL_CALL", 0.01)


def entries(folder: Path) -> list[tuple[Any, ...]]:
    """Of a client's own ledger, without the number of the run."""
    query = "SELECT request, what, digest, reply FROM ledger JOIN mechanism ON id = mechanism"
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        return sorted(database.execute(query))


def of_unit(found: Outcome, unit: int) -> list[tuple[Any, ...]]:
    return sorted(entry[1:] for entry in found.ledger if entry[0] == unit)


def whole(federation: Small, found: Outcome) -> Outcome:
    """With the personal state of the clients, which is in their own folders and not at the server."""
    assert found.checkpoint.personal == {}
    kept = {
        number: load_file(max((federation.folder / name / "personal" / "1").iterdir()))
        for number, name in enumerate(federation.names)
        if (federation.folder / name / "personal").exists()
    }
    return replace(found, checkpoint=replace(found.checkpoint, personal=kept))


def here(config: RunConfig, folder: Path) -> Outcome:
    """The same on this machine."""
    return outcome(run_in(config, folder, place=Here()).folder)


def ledgers_agree(federation: Small, found: Outcome) -> None:
    for number, name in enumerate(federation.names):
        own = entries(federation.folder / name)
        if any(unit == FEDERATION for unit, *_ in found.ledger):
            posted = {entry[:2] for entry in of_unit(found, FEDERATION)}
            assert {entry[:2] for entry in own} <= posted  # it was not drawn for all of them
        else:
            assert own == of_unit(found, number) != []


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_gives_the_bits_of_the_local_engine(small: Small, name: str) -> None:
    algorithm = {"name": name} | OPTIONS.get(name, {})
    found = whole(small, outcome(small.run(small.config(algorithm))))
    assert differ(here(small.config(algorithm, local=True), small.folder / "here"), found) is None
    ledgers_agree(small, found)
    assert not {answer.kind for _, _, answer in small.wire.seen} & {"refused", "failed"}
    for client in small.names:
        (run,) = status(small.folder / client)["runs"]
        assert run["state"] == "finished" and run["own_test"]["n"] > 0


def test_nothing_but_releases_comes_from_a_client(small: Small) -> None:
    """All that the server got to see, message by message."""
    small.run(small.config(IFCA))
    seen = {(asked.kind, answer.kind): set(answer.values) for _, asked, answer in small.wire.seen}
    assert seen.pop(("describe", "description")) >= {"name", "size", "features"}
    assert seen.pop(("propose", "accepted")) == {"epsilon", "delta"}
    assert seen.pop(("finish", "finished")) == set()
    answered = {frozenset(answer.values) for _, asked, answer in small.wire.seen if asked.kind == "task"}
    assert answered == {frozenset({"update"}), frozenset({"choice"})} and set(seen) == {("task", "release")}


def test_a_lost_answer_is_asked_for_again_and_costs_nothing(small: Small) -> None:
    config = small.config(GLOBAL, engine={"workers": 1, "timeout": 0.05, "retries": 20})
    small.wire.lose = 8  # descriptions, acceptances and updates
    found = outcome(small.run(config))
    assert differ(here(small.config(GLOBAL, local=True), small.folder / "here"), found) is None
    ledgers_agree(small, found)
    assert len(small.wire.seen) == 8 + 3 * (1 + 1 + 3 + 1)


# ---- clients that do not answer as they should -----------------------------------------------------


def spoiled(**values: Any) -> Any:
    """Client 1 answers with these values from round 2 on."""
    return lambda answer: Envelope(answer.kind, dict(answer.values) | values)


NAN = torch.full((650,), math.nan)
SPOILED = {
    "NaN": (GLOBAL, "NaN", lambda answer: Envelope("release", {"update": NAN})),
    "infinite": (GLOBAL, "infinite", lambda answer: Envelope("release", {"update": NAN.nan_to_num(math.inf)})),
    "another shape": (GLOBAL, "came, and not", lambda answer: Envelope("release", {"update": torch.zeros(3)})),
    "another type": (
        GLOBAL,
        "came, and not",
        lambda answer: Envelope("release", {"update": torch.zeros(650).double()}),
    ),
    "more": (GLOBAL, "came, and not", spoiled(accuracy=0.5)),
    "nothing": (GLOBAL, "came, and not", lambda answer: Envelope("release")),
    "another word": (GLOBAL, "no answer", lambda answer: Envelope("kept")),
    "no model": (IFCA, "which there is not", lambda answer: spoiled(choice=9)(answer)),
    "a model below 0": (IFCA, "which there is not", lambda answer: spoiled(choice=-1)(answer)),
    "a refusal": (GLOBAL, "refused: enough", lambda answer: Envelope("refused", {"why": "enough"})),
}


def spoil(small: Small, what: str) -> None:
    _, _, change = SPOILED[what]
    key = "choice" if "model" in what else "update"
    small.wire.tamper = lambda name, answer: change(answer) if name == "client-1" and key in answer.values else answer


@pytest.mark.parametrize("what", SPOILED)
def test_a_client_that_answers_wrongly_stops_a_run_that_needs_it(small: Small, what: str) -> None:
    spoil(small, what)
    algorithm, why, _ = SPOILED[what]
    with pytest.raises(RunFault, match=f"(?s)2 of 3 clients.*client-1: .*{why}"):
        small.run(small.config(algorithm))
    assert "client-1" in json.loads((small.folder / "run" / "failure.json").read_text())["error"]


@pytest.mark.parametrize("what", ["NaN", "no model"])
def test_a_run_goes_on_without_a_client_that_answers_wrongly(small: Small, what: str) -> None:
    spoil(small, what)
    algorithm, *_ = SPOILED[what]
    engine = {"workers": 1, "timeout": 0.5, "retries": 1, "minimum_clients": 2}
    found = outcome(small.run(small.config(algorithm, engine=engine)))
    key = "update" if what == "NaN" else "choice"
    silent = [entry for entry in of_unit(found, 1) if (key == "update") == ("NoisyTraining" in entry[1])]
    assert silent == [] and of_unit(found, 0) == entries(small.folder / "client-0")


@pytest.mark.parametrize("minimum", [None, 2])
def test_an_absent_client(small: Small, minimum: int | None) -> None:
    """It went away when the run had begun; what it would have released is not in the ledger."""
    engine = {"workers": 1, "timeout": 0.1, "retries": 1, "minimum_clients": minimum}
    config = small.config(GLOBAL, engine={key: value for key, value in engine.items() if value is not None})

    def leave(name: str, answer: Envelope) -> Envelope:
        if answer.kind == "accepted":
            small.wire.absent = {"client-2"}
        return answer

    small.wire.tamper = leave
    if minimum is None:
        with pytest.raises(RunFault, match=r"(?s)round 1.*2 of 3 clients.*client-2: no answer"):
            small.run(config)
        return
    found = outcome(small.run(config))
    assert of_unit(found, 2) == entries(small.folder / "client-2") == []
    assert of_unit(found, 0) == entries(small.folder / "client-0") and len(of_unit(found, 0)) == 3


def test_a_client_that_calls_itself_otherwise_is_a_mistake_that_is_named(small: Small) -> None:
    small.wire.tamper = lambda name, answer: (
        Envelope(answer.kind, dict(answer.values) | {"name": "client-0"}) if "name" in answer.values else answer
    )
    with pytest.raises(UserError, match="calls itself client-0"):
        small.run(small.config(GLOBAL))


# ---- a crash ---------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


@pytest.mark.parametrize(
    ("name", "guards"),
    [("ifca", "guards as well"), ("ifca", "the server alone")]
    + [(name, "guards as well") for name in ("dp-fedavg", "pate-fl", "knn-fl")],
)
def test_a_run_goes_on_after_a_crash(small: Small, monkeypatch: pytest.MonkeyPatch, name: str, guards: str) -> None:
    """In the narrowest window: after the ledgers were posted, before the round was saved."""
    save = Store.checkpoint

    def crash(store: Store, number: int, *rest: Any) -> None:
        if number == 2:
            raise Crash
        save(store, number, *rest)

    algorithm = {"name": name} | OPTIONS.get(name, {})
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Store, "checkpoint", crash)
        small.run(small.config(algorithm))
    before = {name: entries(small.folder / name) for name in small.names}
    if guards == "guards as well":
        small.open()
    carry_out(small.wire, small.folder / "run", SeededServer)
    found = whole(small, outcome(small.folder / "run"))
    assert differ(here(small.config(algorithm, local=True), small.folder / "here"), found) is None
    ledgers_agree(small, found)
    for client, posted in before.items():
        assert set(posted) <= set(entries(small.folder / client))
    assert not any(status(small.folder / client)["refusals"] for client in small.names)


# ---- files with columns to be standardised ---------------------------------------------------------


class Hospitals(Small):
    """Three clients with a table each; the columns are standardised by statistics that they release."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(0)
        age = random.normal(60, 15, 300)
        table = pd.DataFrame({"age": age, "smoker": random.integers(0, 2, 300), "y": (age > 60).astype(int)})
        table.assign(client=[f"client-{number % 3}" for number in range(300)]).to_csv(folder / "t.csv", index=False)
        self.folder = folder
        super().__init__(folder)

    def called(self, number: int) -> str:
        return f"client-{number}"

    def records(self) -> dict[str, Any]:
        prepare = {"age": {"kind": "standard", "low": 0.0, "high": 120.0}}
        options = {"path": str(self.folder / "t.csv"), "prepare": prepare, "statistics_noise": 3.0}
        return {"dataset": "file", "options": options}


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[Hospitals]:
    federation = Hospitals(tmp_path)
    yield federation
    federation.close()


@pytest.mark.parametrize("name", ["global", "dp-fedavg"])
def test_standardised_files_give_the_bits_of_the_local_engine(hospitals: Hospitals, name: str) -> None:
    algorithm = {"name": name} | OPTIONS.get(name, {})
    found = outcome(hospitals.run(hospitals.config(algorithm)))
    local = run_in(hospitals.config(algorithm, local=True), hospitals.folder / "here", place=Here()).folder
    assert differ(outcome(local), found) is None
    ledgers_agree(hospitals, found)
    served = load_file(local / "models" / "served.safetensors")
    with Store(local) as store:
        measured = store.scores("accuracy")
    for number, client in enumerate(hospitals.names):
        (path,) = (hospitals.folder / client / "models").iterdir()
        assert all(torch.equal(value, served[f"0/{key}"]) for key, value in load_file(path).items())
        (run,) = status(hospitals.folder / client)["runs"]
        assert run["own_test"]["accuracy"] == measured[number]


def test_statistics_are_asked_for_again_after_a_crash(hospitals: Hospitals, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Store, "checkpoint", crash)
        hospitals.run(hospitals.config(GLOBAL))
    carry_out(hospitals.wire, hospitals.folder / "run", SeededServer)
    found = outcome(hospitals.folder / "run")
    assert differ(here(hospitals.config(GLOBAL, local=True), hospitals.folder / "here"), found) is None
    ledgers_agree(hospitals, found)


def test_clients_with_different_columns_are_a_mistake_that_is_named(tmp_path: Path) -> None:
    """The bounds are each client's own affair; which columns there are is not."""
    hospitals = Hospitals(tmp_path)
    hospitals.close()
    other = hospitals.records()
    other["options"]["features"] = ["smoker"]
    other["options"]["prepare"] = {}
    folder = tmp_path / "other"
    client_folder(folder, "client-2", other | {"client": "client-2"})
    (tmp_path / "client-2" / "client.toml").write_text((folder / "client.toml").read_text())
    hospitals.open()
    with pytest.raises(UserError, match="do not hold the same kind of records"):
        hospitals.run(hospitals.config(GLOBAL))
    hospitals.close()


def test_a_federation_is_no_engine_of_ones_own_data(small: Small) -> None:
    with pytest.raises(UserError, match="flower"):
        small.config({"name": "global"}, local=True, engine={"kind": "flower"})
    folder = small.run(small.config({"name": "global", "rounds": 1}))
    assert load_config(folder / "config.toml").engine.kind == "flower"
