"""Votes and noise that clients make together, on a federation: the bits of the local engine, and who must be there."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w
import torch
from torch import Tensor

from fairveil.config import RunConfig
from fairveil.contract import differ, outcome
from fairveil.data.federation import Federation
from fairveil.engine import flower
from fairveil.errors import RunFault
from fairveil.guard import status
from fairveil.privacy.statement import Statement
from fairveil.remote import Envelope
from fairveil.store import Store

from .conftest import POLICY, SeededServer, Small, carry_out
from .test_federation import Crash, entries, here, ledgers_agree, whole

PATE: dict[str, Any] = {"name": "pate-fl", "rounds": 2, "queries": 30, "student_steps": 5, "local_epochs": 2}
KNN: dict[str, Any] = {"name": "knn-fl", "rounds": 2, "queries": 30, "student_steps": 5}
SHARED: dict[str, Any] = {"noise": "distributed", "tolerated": 1}
FEDAVG: dict[str, Any] = {"name": "dp-fedavg", "rounds": 2, "sample_rate": 0.6} | SHARED
PRIVACY: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-4}
PATIENT = {"workers": 1, "block": 1, "timeout": 0.1, "retries": 1}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "LOOK", 0.001)
    monkeypatch.setattr(flower, "ROLL_CALL", 0.01)


def allow(small: Small, name: str, **policy: Any) -> None:
    """Change a client's policy, and start its guard anew."""
    small.wire.guards.pop(name).close()
    (small.folder / name / "policy.toml").write_text(tomli_w.dumps(POLICY | policy))
    small.wire.guards[name] = small.guard(small.folder / name)


def leave(small: Small, name: str, when: str) -> None:
    """A client goes away once somebody has answered with this word."""

    def watch(_: str, answer: Envelope) -> Envelope:
        if answer.kind == when:
            small.wire.absent = {name}
        return answer

    small.wire.tamper = watch


def shares(small: Small) -> Counter[str]:
    return Counter(name for name, _, answer in small.wire.seen if answer.kind == "share")


# ---- what travels, and what comes of it ------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PATE, KNN])
def test_all_queries_of_a_round_travel_in_one_message(small: Small, algorithm: dict[str, Any]) -> None:
    """And all votes in one: to each client one message a round, besides its teacher's training."""
    small.run(small.config(algorithm, privacy=PRIVACY))
    sent: Counter[tuple[str, str]] = Counter()
    for name, asked, answer in small.wire.seen:
        sent[name, str(asked.values.get("task", asked.kind))] += 1
        if "shared.queries" in asked.values:
            assert cast(Tensor, asked.values["shared.queries"]).shape == (15, 64)
            assert answer.kind == "share" and set(answer.values) == {"votes"}
            assert cast(Tensor, answer.values["votes"]).shape == (15, 10)
    wanted = {"describe": 1, "propose": 1, "finish": 1, f"{'teacher' if algorithm is PATE else 'neighbour'}_votes": 2}
    wanted |= {"train_teacher": 1} if algorithm is PATE else {}
    assert sent == {(name, task): count for name in small.names for task, count in wanted.items()}


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapted": (PATE | {"adaptation": 0.3}, {}),
    "where they agree": (PATE | {"confidence": 0.5, "answers": 20}, {}),
    "with a published price": (KNN | {"publish_cost": True}, {}),
    "for records": (PATE, {"unit": "record"}),
    "noised together": (PATE | SHARED, {}),
    "neighbours, for records": (KNN | {"features": "hog", "neighbours": 3}, {"unit": "record", "adjacency": "replace"}),
    "neighbours, noised together": (KNN | SHARED, {"unit": "record"}),
    "updates, noised together": (FEDAVG, {}),
}


@pytest.mark.parametrize("which", VARIANTS)
def test_every_way_of_voting_gives_the_bits_of_the_local_engine(small: Small, which: str) -> None:
    algorithm, privacy = VARIANTS[which]
    if privacy.get("adjacency"):
        for name in small.names:
            allow(small, name, adjacency="replace")
    privacy = {"privacy": PRIVACY | {"epsilon": 15.0} | privacy}
    found = whole(small, outcome(small.run(small.config(algorithm, **privacy))))
    assert differ(here(small.config(algorithm, local=True, **privacy), small.folder / "here"), found) is None
    ledgers_agree(small, found)
    assert not {answer.kind for _, _, answer in small.wire.seen} & {"refused", "failed"}
    assert shares(small) == dict.fromkeys(small.names, 2)  # with shared noise nobody is left out


@pytest.mark.parametrize("algorithm", [PATE | SHARED, FEDAVG], ids=lambda algorithm: algorithm["name"])
def test_shared_noise_is_the_same_after_a_crash(
    small: Small, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    save = Store.checkpoint

    def crash(store: Store, number: int, *rest: Any) -> None:
        if number == 2:
            raise Crash
        save(store, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Store, "checkpoint", crash)
        small.run(small.config(algorithm, privacy=PRIVACY))
    before = {name: entries(small.folder / name) for name in small.names}
    small.open()
    carry_out(small.wire, small.folder / "run", SeededServer)
    found = whole(small, outcome(small.folder / "run"))
    local = here(small.config(algorithm, local=True, privacy=PRIVACY), small.folder / "here")
    assert differ(local, found) is None
    assert {name: entries(small.folder / name) for name in small.names} == before


def test_the_labels_of_the_servers_records_are_for_evaluating_alone(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other labels everything is the same, but for how good the answers are said to be."""
    first = small.run(small.config(KNN, privacy=PRIVACY), name="first")
    build = RunConfig.build_federation

    def other(config: RunConfig) -> Federation:
        federation = build(config)
        assert federation.server is not None and federation.elsewhere
        return replace(federation, server=replace(federation.server, labels=(federation.server.labels + 1) % 10))

    monkeypatch.setattr(RunConfig, "build_federation", other)
    second = small.run(small.config(KNN, privacy=PRIVACY), name="second")
    assert differ(outcome(first), outcome(second)) is None
    said = [json.loads((folder / "result.json").read_text())["votes"]["accuracy"] for folder in (first, second)]
    assert said[0] > said[1]


# ---- clients that are not there --------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PATE, KNN], ids=lambda algorithm: algorithm["name"])
def test_without_a_client_there_are_fewer_votes(small: Small, algorithm: dict[str, Any]) -> None:
    leave(small, "client-2", "accepted")
    with pytest.raises(RunFault, match=r"(?s)2 of 3 clients.*client-2: no answer"):
        small.run(small.config(algorithm, privacy=PRIVACY, engine=PATIENT), name="strict")
    small.wire.absent, small.wire.seen = set(), []
    config = small.config(algorithm, privacy=PRIVACY, engine=PATIENT | {"minimum_clients": 2})
    found = outcome(small.run(config))
    assert shares(small) == {"client-0": 2, "client-1": 2} and len(found.ledger) == 2
    assert entries(small.folder / "client-2") == []


def test_who_was_away_when_teachers_were_trained_does_not_vote(small: Small) -> None:
    """It comes back for the second round, and has nothing to vote with."""

    def come_and_go(_: str, answer: Envelope) -> Envelope:
        small.wire.absent = {"accepted": {"client-2"}, "share": set[str]()}.get(answer.kind, small.wire.absent)
        return answer

    small.wire.tamper = come_and_go
    small.run(small.config(PATE, privacy=PRIVACY, engine=PATIENT | {"minimum_clients": 2}))
    assert shares(small) == {"client-0": 2, "client-1": 2}
    refusals = status(small.folder / "client-2")["refusals"]
    assert refusals and all("needs a personal model" in refusal["why"] for refusal in refusals)


@pytest.mark.parametrize("algorithm", [PATE, KNN, FEDAVG], ids=lambda algorithm: algorithm["name"])
@pytest.mark.parametrize("tolerated", [0, 1])
def test_shared_noise_needs_all_but_those_that_may_fail(
    small: Small, algorithm: dict[str, Any], tolerated: int
) -> None:
    leave(small, "client-2", "accepted")
    engine = PATIENT | {"minimum_clients": 1}
    config = small.config(algorithm | SHARED | {"tolerated": tolerated}, privacy=PRIVACY, engine=engine)
    if tolerated:
        assert len(outcome(small.run(config)).ledger) == 2
        assert shares(small) == {"client-0": 2, "client-1": 2}
        return
    with pytest.raises(RunFault, match=r"(?s)1 of 3 clients did not answer.*noise than was planned for \(0"):
        small.run(config)
    with closing(sqlite3.connect(small.folder / "run" / "run.sqlite")) as database:
        assert database.execute("SELECT COUNT(*) FROM ledger").fetchone() == (0,)


@pytest.mark.parametrize(
    ("votes", "why"),
    [
        (torch.eye(15, 10) * torch.tensor([3.0] + [0.0] * 9), "more than one for a class"),
        (torch.full((15, 10), 0.3), "more votes for a query"),
        (torch.full((15, 10), -0.1), "votes below 0"),
        (torch.zeros(15, 10).index_fill_(0, torch.tensor([0]), 1.0), "more votes for a query"),  # all at once
    ],
)
def test_a_client_has_one_vote(small: Small, votes: Tensor, why: str) -> None:
    """The bound on all queries together let it have sqrt(15) of them on one."""
    small.wire.tamper = lambda name, answer: (
        Envelope("share", {"votes": votes.double()}) if name == "client-1" and answer.kind == "share" else answer
    )
    with pytest.raises(RunFault, match=f"(?s)2 of 3 clients.*client-1: .*{why}"):
        small.run(small.config(PATE, privacy=PRIVACY))


@pytest.mark.parametrize("privacy", [{"unit": "client"}, {"unit": "record"}])
def test_a_client_that_trusts_nobody_does_not_vote(small: Small, privacy: dict[str, Any]) -> None:
    allow(small, "client-0", trust="nobody")
    with pytest.raises(RunFault, match=r"(?s)the proposal: 2 of 3 clients.*client-0: refused: .*trusts nobody"):
        small.run(small.config(KNN, privacy=PRIVACY | privacy))
    assert not shares(small) and len(status(small.folder / "client-0")["refusals"]) == 1


# ---- the statement ---------------------------------------------------------------------------------


def lines(folder: Path) -> dict[str, str]:
    return dict(Statement.from_json(json.loads((folder / "statement.json").read_text())).lines())


def test_the_statement_says_who_is_trusted_with_votes(small: Small) -> None:
    said = lines(small.run(small.config(KNN | {"rounds": 1}, privacy=PRIVACY | {"unit": "record"})))
    assert "one record of any client" in said["Guarantee"] and "what is published" in said["Guarantee"]
    assert said["Trusted"].startswith("the server: every client sends it its votes without noise")
    assert "the server derives the noise of the sums" in said["Noise"]
    assert "digits, without labels: public by declaration" in said["Public"]
    assert "people who own several records" in said["Not covered"]
    assert "how fast it answers" in said["Not covered"] and "drawn" not in said["Not covered"]  # all are asked


@pytest.mark.parametrize("algorithm", [PATE | SHARED | {"rounds": 1}, FEDAVG], ids=lambda one: one["name"])
def test_the_statement_says_who_is_trusted_with_shares_of_noise(small: Small, algorithm: dict[str, Any]) -> None:
    """There is no secure sum on a federation: one share hides next to nothing, and the server sees it."""
    said = lines(small.run(small.config(algorithm, privacy=PRIVACY)))
    assert said["Trusted"].startswith("clients, to add their shares of the noise: up to 1 of the 3 may drop out")
    assert "So the server is trusted too: it sees what every single client sends" in said["Trusted"]
    assert "SIMULATED" not in said["Trusted"]
    assert "each client derives its own" in said["Noise"] and "the server adds none" in said["Noise"]
    assert "drawn" not in said["Not covered"] and "people whose records several clients hold" in said["Not covered"]
