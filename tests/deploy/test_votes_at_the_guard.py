"""The guard and votes: what a server that means harm asks of a client that votes, and does not get."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fairveil.privacy.consensus import SmoothedPrice
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, Sharers, canonical
from fairveil.privacy.votes import NeighbourVotes, NoisyVotes, Several
from fairveil.remote import DEPLOYABLE, Envelope, Malformed

from .conftest import client_folder
from .test_guard import FEATURES, PARAMETERS, RUN, Server, changed, data, is_refused, same

VOTES = NoisyVotes(4, 2, 5.0, "client", "add-remove", 4)
BY_RECORD = replace(VOTES, unit="record")
NEAREST = NeighbourVotes(4, 2, 5.0, "record", "add-remove", 4, neighbours=5)
TOGETHER = Sharers(3, 1)  # clients that make the noise together
UPDATE = CohortSums((Part("update", (PARAMETERS,), 0.5, 1.0),), 1.0)
QUERIES = torch.rand(4, FEATURES, generator=torch.Generator().manual_seed(0))
NO_SCALES: dict[str, Any] = {"scales_mean": None, "scales_deviation": None}


class Polls(Server):
    """A server that asks for votes."""

    def train(self, request: str = "round 1, ask 1", mechanism: Any = None, **given: Any) -> Envelope:
        inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 0.5}
        inputs |= {"shared_local_epochs": 2, "shared_batch_size": 8} | NO_SCALES
        return self.ask("train_teacher", mechanism, request, **(inputs | given))

    def poll(
        self, mechanism: Mechanism | str = VOTES, request: str = "round 1, sum 2", task: str = "", **given: Any
    ) -> Envelope:
        task = task or ("neighbour_votes" if isinstance(mechanism, NeighbourVotes) else "teacher_votes")
        return self.ask(task, mechanism, request, **({"shared_queries": QUERIES} | NO_SCALES | given))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Polls]:
    """A hospital of 64 training records, declared as 61, of three numbers and two classes."""
    prepare = {name: {"kind": "range", "low": 0.0, "high": 200.0} for name in ("age", "pressure")}
    server = Polls(client_folder(tmp_path / "north", "north", data(tmp_path, prepare=prepare)))
    yield server
    server.guard.close()


def unit_of(mechanism: Mechanism) -> str:
    return str(getattr(mechanism, "unit", "client"))


# ---- a fair server ---------------------------------------------------------------------------------


def test_a_client_votes_in_one_message_and_its_teacher_stays(server: Polls) -> None:
    assert server.propose((VOTES, 1), unit="client").kind == "accepted"
    assert server.train() == Envelope("kept")
    first = server.poll()
    votes = cast(Tensor, first.values["votes"])
    assert first.kind == "share" and set(first.values) == {"votes"} and votes.shape == (4, 2)
    assert set(votes.flatten().tolist()) <= {0.0, 1.0} and votes.sum(dim=1).tolist() == [1.0] * 4
    assert same(server.poll(), first) and len(server.spent) == 1 and server.refusals == []
    server.restart()
    assert same(server.poll(), first) and len(server.spent) == 1


def test_a_client_votes_by_its_nearest_records(server: Polls) -> None:
    assert server.propose((NEAREST, 1)).kind == "accepted"
    votes = cast(Tensor, server.poll(NEAREST).values["votes"])
    held = server.guard.data.train
    near = torch.cdist(QUERIES.double(), held.x.double()).argsort(dim=1)[:, :5]
    assert votes.tolist() == [[float((held.y[row] == c).sum()) for c in (0, 1)] for row in near]


def test_the_clients_share_of_the_noise_is_its_own_secret(server: Polls) -> None:
    """Of three clients, of whom one may fail, each adds half of the variance: of N(0, 12.5)."""
    mechanism = replace(NEAREST, noised_by=TOGETHER)
    server.propose((mechanism, 1), (NEAREST, 1))
    noisy, plain = (cast(Tensor, server.poll(m, f"round {k}, sum 1").values["votes"]) for k, m in
                    enumerate((mechanism, NEAREST), 1))  # fmt: skip
    apart = (noisy - plain) / 5  # in votes: k neighbours stand for one
    assert apart.abs().min() > 0 and 0.2 < float(apart.std()) / 12.5**0.5 < 3


# ---- trust and units -------------------------------------------------------------------------------

SUMS: dict[str, Mechanism] = {
    "votes": VOTES,
    "votes, for records": BY_RECORD,
    "neighbours": NEAREST,
    "neighbours, for clients": replace(NEAREST, unit="client"),
    "votes, noised together": replace(VOTES, noised_by=TOGETHER),
    "votes for records, noised together": replace(BY_RECORD, noised_by=TOGETHER),
    "updates": UPDATE,
    "updates, noised together": replace(UPDATE, noised_by=TOGETHER),
}


@pytest.mark.parametrize("which", SUMS)
def test_what_is_summed_over_clients_needs_trust_in_the_server(server: Polls, which: str) -> None:
    """Whichever unit is protected: a share without noise of the client's own was accepted at trust in nobody."""
    mechanism = SUMS[which]
    assert server.propose((mechanism, 1), unit=unit_of(mechanism)).kind == "accepted"
    server.allow(trust="nobody")
    is_refused(server.of("b" * 32).propose((mechanism, 1), unit=unit_of(mechanism)), server, "trusts nobody")
    server.run = RUN  # what was accepted before, too
    is_refused(server.poll(mechanism), server, "trusts nobody")
    assert server.spent == []


@pytest.mark.parametrize(
    ("mechanism", "unit"), [(VOTES, "record"), (VOTES, "metric"), (BY_RECORD, "client"), (NEAREST, "client")]
)
def test_votes_protect_what_the_proposal_says(server: Polls, mechanism: Mechanism, unit: str) -> None:
    is_refused(server.propose((mechanism, 1), unit=unit), server, f"does not go with privacy of each {unit}")


def test_votes_are_noised_for_the_clients_own_relation_between_neighbours(server: Polls) -> None:
    """One client more moves the sum by 1, one that is replaced by sqrt 2: the server may not choose."""
    other = replace(VOTES, adjacency="replace")
    is_refused(server.propose((other, 1), unit="client"), server, "neighbours")
    server.allow(adjacency="replace")
    assert server.propose((other, 1), unit="client").kind == "accepted"
    is_refused(server.of("b" * 32).propose((VOTES, 1), unit="client"), server, "neighbours")


# ---- proposals that make no sense ------------------------------------------------------------------

PART = json.loads(canonical(UPDATE))["parts"][0]


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [
        (replace(BY_RECORD, classes=3), "votes for 3 classes"),
        (replace(NEAREST, classes=10), "votes for 10 classes"),
        (replace(BY_RECORD, several=Several(1, 0.5)), "a record has one of 2"),
        (replace(NEAREST, several=Several(2, 0.5)), "a record has one of 2"),
        (replace(NEAREST, neighbours=62), "declares 61 records"),  # it has 64, which is for nobody to know
        (replace(NEAREST, neighbours=10**9), "declares 61 records"),
        (replace(BY_RECORD, noise_multiplier=0.049), "noise multiplier of 0.049"),
        (replace(NEAREST, noise_multiplier=0.0), "noise multiplier of 0"),
        (replace(BY_RECORD, threshold=2.0, threshold_noise=0.049), "threshold noise of 0.049"),
        (replace(NEAREST, threshold=2.0, threshold_noise=0.0), "threshold noise of 0"),
        (replace(BY_RECORD, cost=SmoothedPrice(noise_multiplier=0.01)), "noise multiplier of 0.01"),
        (replace(NEAREST, features="hog"), "does not fit records of shape (3,)"),
        (replace(NEAREST, features="x"), "algorithm.features"),
        (replace(NEAREST, features=""), "algorithm.features"),
        (replace(BY_RECORD, queries=10**7, answers=10**7), "do not fit the messages"),
        (replace(BY_RECORD, queries=10**400, answers=1, threshold=2.0, threshold_noise=1.0), "more than 64 bits"),
        (replace(NEAREST, neighbours=10**400), "more than 64 bits"),
        (replace(BY_RECORD, noised_by=Sharers(10**400, 0)), "more than 64 bits"),
        (replace(BY_RECORD, noise_multiplier=0.06), "allows 20"),
        (changed(BY_RECORD, cost=PART), "not known"),
        (changed(BY_RECORD, several=PART), "not known"),
        (changed(BY_RECORD, noised_by=PART), "not known"),
        (changed(BY_RECORD, several=json.loads(canonical(NEAREST))), "not known"),
        (changed(BY_RECORD, answers=5), "not known"),
        (changed(BY_RECORD, answers=0), "not known"),
        (changed(BY_RECORD, unit="metric"), "not known"),
        (changed(BY_RECORD, adjacency="none"), "not known"),
        (changed(NEAREST, neighbours=0), "not known"),
    ],
)  # fmt: skip
def test_votes_that_a_client_cannot_give_are_refused_at_once(
    server: Polls, mechanism: Mechanism | str, why: str
) -> None:
    is_refused(server.propose((mechanism, 1)), server, why)
    is_refused(server.poll(mechanism), server, "never accepted")
    assert server.spent == []


def test_every_odd_proposal_of_votes_is_answered_in_words(server: Polls) -> None:
    """Whatever stands in whichever field, the guard accepts or refuses; it never fails."""
    odd = [-1, 0, 1, 2**70, 10**400, True, "", "x", "inf", "nan", (5e-324).hex(), (1e308).hex(), [], [1], {}, PART]
    answers = []
    for field in fields(NEAREST):
        for value in odd:
            self_made = changed(NEAREST, **{field.name: value})
            answers.append((field.name, value, server.of(f"{len(answers):032x}").propose((self_made, 1)).kind))
    assert not [answer for answer in answers if answer[2] not in ("accepted", "refused")]
    assert sum(kind == "accepted" for _, _, kind in answers) < 20


# ---- code of the server's choice -------------------------------------------------------------------

MODULE = """
from pathlib import Path
Path(__file__).with_suffix(".imported").touch()
def features(shape): return lambda x: x.flatten(1)
def others(shape): return lambda x: x.flatten(1)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that lies where it would be found, and leaves a trace when it is imported."""
    (tmp_path / "votes_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield "votes_of_mine"
    sys.modules.pop("votes_of_mine", None)


def test_a_server_does_not_make_a_client_import_anything(server: Polls, module: str, tmp_path: Path) -> None:
    for name in (f"{module}:features", f"{module}:nothing", "os:system", f"{module}.x:y", ":", "a:b:c"):
        is_refused(server.propose((replace(NEAREST, features=name), 1)), server, "not among the policy's plugins")
        assert server.poll(replace(NEAREST, features=name)).kind == "refused"
    is_refused(server.propose((replace(NEAREST, features=module), 1)), server, "algorithm.features")
    assert module not in sys.modules and not (tmp_path / f"{module}.imported").exists()


def test_features_are_allowed_by_their_very_name(server: Polls, module: str) -> None:
    mine, other = (replace(NEAREST, features=f"{module}:{name}") for name in ("features", "others"))
    server.allow(plugins=[module])  # for the tasks in it
    is_refused(server.propose((mine, 1)), server, "not among the policy's plugins")
    server.allow(plugins=[f"{module}:features"])
    is_refused(server.propose((other, 1)), server, "not among the policy's plugins")
    assert server.propose((mine, 2)).kind == "accepted" and server.poll(mine).kind == "share"
    server.allow()  # not any more
    is_refused(server.poll(mine, "round 2, sum 1"), server, "not among the policy's plugins")
    assert len(server.spent) == 1


# ---- requests --------------------------------------------------------------------------------------


def unasked(server: Polls) -> None:
    """Nothing was computed: nothing is in the ledger, measured or kept."""
    assert server.spent == [] and not (server.folder / "personal").exists()
    assert server.guard.database.execute("SELECT COUNT(*) FROM diagnostic").fetchone() == (0,)


def test_there_is_no_vote_before_there_is_a_teacher(server: Polls) -> None:
    server.propose((VOTES, 1), unit="client")
    is_refused(server.poll(), server, "needs a personal model")
    unasked(server)
    server.of("b" * 32).propose((VOTES, 1), unit="client")
    server.train()
    server.run = RUN
    is_refused(server.poll(), server, "needs a personal model")  # that of another run is none
    server.train()
    assert server.poll().kind == "share"


def test_a_teacher_is_asked_once_for_each_round_that_was_accepted(server: Polls) -> None:
    server.propose((VOTES, 2), unit="client")
    server.train()
    first = server.poll()
    for other in (QUERIES.flip(0), QUERIES + 1e-6, -QUERIES):
        is_refused(server.poll(shared_queries=other), server, "other inputs")
    is_refused(server.poll(shared_queries=None, each_queries=QUERIES), server, "other inputs")
    is_refused(server.train("round 1, sum 2"), server, "other inputs")
    assert server.poll(request="round 2, sum 1", shared_queries=QUERIES.flip(0)).kind == "share"
    for request in ("round 3, sum 1", "round 1, sum  2", "x"):
        is_refused(server.poll(request=request), server, "all that was accepted")
    assert same(server.poll(), first) and len(server.spent) == 2


@pytest.mark.parametrize("mechanism", [BY_RECORD, NEAREST])
def test_what_was_accepted_is_not_exchanged_for_something_else(server: Polls, mechanism: NoisyVotes) -> None:
    server.propose((mechanism, 2))
    server.train()
    lax = {"threshold": 0.1, "threshold_noise": 1.0}
    for other in (
        {"answers": 3, **lax}, {"unit": "client"}, {"noise_multiplier": 1.0}, {"adjacency": "replace"}, lax,
        {"queries": 5, "answers": 5}, {"classes": 3}, {"noised_by": TOGETHER}, {"cost": SmoothedPrice()},
    ):  # fmt: skip
        is_refused(server.poll(replace(mechanism, **other)), server, "not in the proposal")  # type: ignore[arg-type]
    assert server.spent == [] and server.poll(mechanism).kind == "share"


def test_a_task_votes_by_its_own_mechanism_alone(server: Polls) -> None:
    """A vote of neighbours moves by sqrt 2 / k with one record, that of a teacher by sqrt 2: at k = 5 the price of a
    teacher's votes would be that of noise five times as large."""
    assert NEAREST.sensitivity == pytest.approx(BY_RECORD.sensitivity / 5) and isinstance(NEAREST, NoisyVotes)
    server.propose((BY_RECORD, 1), (NEAREST, 1))
    is_refused(server.poll(BY_RECORD, task="neighbour_votes"), server, "does not answer by winners of votes")
    is_refused(server.poll(NEAREST, task="teacher_votes"), server, "does not answer by winners of votes")
    is_refused(server.poll("", task="teacher_votes"), server, "none was given")
    is_refused(server.train(mechanism=BY_RECORD), server, "does not answer by")
    inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 0.5, "shared_local_epochs": 1}
    update = server.ask("bounded_update", BY_RECORD, **inputs, shared_batch_size=8, **NO_SCALES)
    is_refused(update, server, "does not answer by")
    unasked(server)


def test_votes_are_on_the_policys_list_or_not_given(server: Polls) -> None:
    server.allow(tasks=["local_update", "train_teacher"])
    server.propose((BY_RECORD, 1), (NEAREST, 1))
    for mechanism in (BY_RECORD, NEAREST):
        is_refused(server.poll(mechanism), server, "not on the policy's list")


@pytest.mark.parametrize("mechanism", [BY_RECORD, NEAREST])
@pytest.mark.parametrize(
    ("queries", "why"),
    [
        (QUERIES[:3], "3 queries, and a price for 4"),
        (torch.zeros(5, FEATURES), "5 queries, and a price for 4"),
        (torch.zeros(4, FEATURES + 1), "wrong shape"),
        (torch.zeros(6, FEATURES - 1), "wrong shape"),  # as many numbers as four records
        (torch.zeros(12), "wrong shape"),
        (torch.zeros(2, 2, FEATURES), "wrong shape"),
        (torch.zeros(0, FEATURES), "wrong shape"),
        (QUERIES.double(), "wrong type"),
        (QUERIES * torch.nan, "NaN"),
        (QUERIES * torch.inf, "infinite"),
        ("all", "wrong shape"),
        (None, "it takes the inputs"),
    ],
)
def test_queries_are_records_and_as_many_as_were_priced(
    server: Polls, mechanism: NoisyVotes, queries: Any, why: str
) -> None:
    server.propose((mechanism, 1))
    is_refused(server.poll(mechanism, shared_queries=queries), server, why)
    unasked(server)
    server.train()
    is_refused(server.poll(mechanism, shared_queries=queries), server, why)
    assert server.spent == [] and server.poll(mechanism).kind == "share"


def test_queries_may_hold_what_records_hold(server: Polls) -> None:
    """An income of 50,000 was refused as if it were a weight. Numbers of words are those that there are."""
    server.propose((NEAREST, 1))
    assert server.poll(NEAREST, shared_queries=50_000 * QUERIES).kind == "share"
    votes = DEPLOYABLE["teacher_votes"]
    words = torch.tensor([[0.0, 1.0, 7.0]])
    votes.check({"queries": words}, parameters=8, record=3, tokens=8)
    for wrong in (words + 1, words - 1, words / 2):
        with pytest.raises(Malformed, match="no number of a word"):
            votes.check({"queries": wrong}, parameters=8, record=3, tokens=8)


PUBLIC = {"shared_public": torch.rand(6, FEATURES), "shared_adaptation": 0.5}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *(({f"shared_{name}": value}, f"'{name}' must be a whole number from 1")
          for name in ("local_epochs", "batch_size") for value in (0, -1, -(2**62), 2**62, True, 1.0, "1")),
        (PUBLIC | {"shared_public": torch.rand(6, FEATURES + 1)}, "wrong shape"),
        (PUBLIC | {"shared_public": torch.rand(6, 1)}, "wrong shape"),
        (PUBLIC | {"shared_public": torch.rand(0, FEATURES)}, "wrong shape"),
        (PUBLIC | {"shared_public": torch.rand(6, FEATURES).double()}, "wrong type"),
        (PUBLIC | {"shared_public": torch.full((6, FEATURES), torch.nan)}, "NaN"),
        (PUBLIC | {"shared_public": None}, "go together"),
        (PUBLIC | {"shared_adaptation": None}, "go together"),
        (PUBLIC | {"shared_adaptation": torch.nan}, "NaN"),
        (PUBLIC | {"shared_adaptation": 1e9}, "beyond 1000"),
        ({"shared_model": torch.zeros(PARAMETERS + 1)}, "wrong shape"),
        ({"shared_learning_rate": 1e9}, "beyond 1000"),
    ],
)  # fmt: skip
def test_a_teacher_is_trained_on_what_makes_sense(server: Polls, given: dict[str, Any], why: str) -> None:
    server.propose((BY_RECORD, 1))
    is_refused(server.train(**given), server, why)
    unasked(server)
    assert server.train(**PUBLIC) == Envelope("kept")


@pytest.mark.parametrize("name", ["local_epochs", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_an_update_takes_whole_numbers_as_well(server: Polls, name: str, value: int) -> None:
    server.propose((UPDATE, 1), unit="client")
    inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 0.5, "shared_local_epochs": 1}
    inputs |= {"shared_batch_size": 8, f"shared_{name}": value}
    is_refused(server.ask("bounded_update", UPDATE, **inputs, **NO_SCALES), server, "whole number from 1")
    unasked(server)
