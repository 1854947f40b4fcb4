"""The guard, asked by a server that means harm: nothing leaves that was not accepted, priced and written down."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fairveil import remote
from fairveil.data.federation import Records
from fairveil.errors import UserError
from fairveil.guard import Guard, Policy, Proposal, status
from fairveil.models import ModelSpec
from fairveil.privacy.accounting import price
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.fair_training import FairTraining
from fairveil.privacy.gradients import clipped_sums
from fairveil.privacy.ledger import Ledger
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, canonical
from fairveil.privacy.metric import GaussianBall, LaplaceBall, LaplaceStep
from fairveil.privacy.moments import NoisyMoments
from fairveil.privacy.release import Kept, Reply, digest_values
from fairveil.privacy.training import NoisyTraining
from fairveil.remote import LARGEST, Array, Envelope, deployable, name_of
from fairveil.session import Member
from fairveil.tasks import local_update

from .conftest import POLICY, client_folder

RUN = "a" * 32
FEATURES, PARAMETERS = 3, 8  # of the records below, and of a logistic model for their two classes
TRAINING = NoisyTraining(0.2, 4, 1.0, 1.0, 10.0)
MOMENTS = NoisyMoments(((0, None), (1, None)), 3.0)
CHOICE = PrivateChoice(0.5, "add-remove")
SCALES = {"scales_mean": torch.tensor([0.0, 0.2]).double(), "scales_deviation": torch.tensor([0.3, 0.2]).double()}


def data(folder: Path, **options: Any) -> dict[str, Any]:
    """A hospital with 60 records: two numbers to be standardised by released statistics, and one that is 0 or 1."""
    random = np.random.default_rng(0)
    columns = {"age": random.normal(60, 15, 160), "pressure": random.normal(120, 20, 160)}
    columns |= {"smoker": random.integers(0, 2, 160), "y": random.integers(0, 2, 160)}
    table = pd.DataFrame(columns | {"client": np.where(np.arange(160) < 80, "north", "south")})
    table.to_csv(folder / "t.csv", index=False)
    prepare = {
        "age": {"kind": "standard", "low": 0.0, "high": 120.0},
        "pressure": {"kind": "standard", "low": 0.0, "high": 200.0},
    }
    options = {"path": str(folder / "t.csv"), "prepare": prepare, "statistics_noise": 3.0} | options
    return {"dataset": "file", "options": options, "client": "north"}


class Server:
    """Whatever a server can send to a guard."""

    def __init__(self, folder: Path, run: str = RUN) -> None:
        self.folder, self.run = folder, run
        self.guard = Guard(folder)

    def restart(self) -> None:
        self.guard.close()
        self.guard = Guard(self.folder)

    def allow(self, **policy: Any) -> None:
        """Change the policy, which the guard reads when it starts."""
        (self.folder / "policy.toml").write_text(tomli_w.dumps(POLICY | policy))
        self.restart()

    def of(self, run: str) -> Server:
        """The same, in another run."""
        self.run = run
        return self

    def send(self, kind: str, **values: Any) -> Envelope:
        return self.guard.answer(Envelope(kind, {"run": self.run} | values))

    def propose(self, *releases: tuple[Mechanism | str, int], **other: Any) -> Envelope:
        texts = tuple((what if isinstance(what, str) else canonical(what), count) for what, count in releases)
        fields = {"client": 0, "unit": "record", "delta": 1e-3, "model": "logistic", "options": {}} | other
        return self.send("propose", proposal=Proposal(releases=texts, **fields).text())

    def ask(
        self, task: str, mechanism: Mechanism | str | None, request: str = "round 1, ask 1", **given: Any
    ) -> Envelope:
        """`shared_model` is the input shared.model, and so on; scales come along where they should."""
        what = mechanism if isinstance(mechanism, str) else canonical(mechanism) if mechanism else ""
        given = ({} if task == "release_moments" else SCALES) | given
        values = {name.replace("_", ".", 1): value for name, value in given.items() if value is not None}
        return self.send("task", request=request, task=task, mechanism=what, **values)

    def train(self, request: str = "round 1, ask 1", mechanism: Mechanism | str = TRAINING, **given: Any) -> Envelope:
        inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 0.5}
        return self.ask("local_update", mechanism, request, **(inputs | given))

    def finish(self, **given: Any) -> Envelope:
        return self.send("finish", **{name.replace("_", "."): value for name, value in SCALES.items()}, **given)

    @property
    def spent(self) -> list[Any]:
        return self.guard.ledger.entries()

    @property
    def refusals(self) -> list[str]:
        return [why for (why,) in self.guard.database.execute("SELECT why FROM refusal")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(client_folder(tmp_path / "north", "north", data(tmp_path)))
    yield server
    server.guard.close()


def changed(mechanism: Mechanism, **fields: Any) -> str:
    """The canonical form with other fields."""
    return json.dumps(json.loads(canonical(mechanism)) | fields, sort_keys=True)


def same(one: Envelope, other: Envelope) -> bool:
    """Bit for bit."""
    return one.kind == other.kind and digest_values(one.values) == digest_values(other.values)


def is_refused(answer: Envelope, server: Server, why: str) -> None:
    """It says why and nothing else, and the client has it in writing."""
    assert answer.kind == "refused", answer
    assert why in answer.values["why"] and set(answer.values) == {"why"}  # type: ignore[operator]
    assert server.refusals[-1] == answer.values["why"]


# ---- proposals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [
        (replace(TRAINING, noise_multiplier=0.0), "noise multiplier of 0"),
        (replace(TRAINING, noise_multiplier=0.049), "noise multiplier of 0.049"),
        (replace(TRAINING, clip_norm=1e9), "clip_norm of 1e+09"),
        (replace(TRAINING, sample_rate=1.0, steps=10**6), "allows 20"),
        (replace(TRAINING, steps=10**18), "allows 20"),
        (NoisyMoments(((0, None),), 0.0), "noise multiplier of 0"),
        (PrivateChoice(math.inf, "add-remove"), "allows 20"),
        (PrivateChoice(1.0, "replace"), "neighbours"),
        (PrivateChoice(50.0, "add-remove"), "allows 20"),
        (CohortSums((Part("update", (PARAMETERS,), 1.0, 1.0),), 1.0), "does not go with privacy of each record"),
        (FairTraining(TRAINING, Part("loss", (), 3.0, 0.04)), "noise multiplier of 0.04"),
        (FairTraining(replace(TRAINING, noise_multiplier=0.04), Part("loss", (), 3.0, 6.0)), "multiplier of 0.04"),
        (FairTraining(TRAINING, Part("loss", (), 11.0, 6.0)), "bound of 11"),
        (changed(TRAINING, noise_multiplier="nan"), "not known"),
        (changed(TRAINING, noise_multiplier="inf"), "not known"),
        (changed(TRAINING, clip_norm="-0x1.0000000000000p+0"), "not known"),
        (changed(TRAINING, sample_rate="0x1.0000000000000p+1"), "not known"),
        (changed(TRAINING, steps=-1), "not known"),
        (changed(TRAINING, type="os.system"), "not known"),
        ("{}", "not known"),
    ],
)  # fmt: skip
def test_mechanisms_outside_the_policy_are_refused(server: Server, mechanism: Mechanism | str, why: str) -> None:
    is_refused(server.propose((mechanism, 1)), server, why)
    assert server.spent == []
    is_refused(server.train(mechanism=mechanism), server, "never accepted")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"delta": 0.5}, "delta"),
        ({"delta": 0.0}, "make no sense"),
        ({"delta": math.nan}, "make no sense"),
        ({"client": -1}, "make no sense"),
        ({"unit": "everything"}, "make no sense"),
        ({"model": "os:system"}, "not known here"),
        ({"model": "fairveil.guard:Guard"}, "not known here"),
        ({"model": "mlp", "options": {"hidden": 10**9}}, "parameters does not fit"),
        ({"model": "cnn"}, "cannot be built"),
        ({"options": {"hidden": 3}}, "cannot be built"),
    ],
)
def test_proposals_that_make_no_sense_are_refused(server: Server, other: dict[str, Any], why: str) -> None:
    is_refused(server.propose((TRAINING, 1), **other), server, why)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", "[" * 10**5, '{"client": 0}', '{"releases": [[1]]}'])
def test_what_is_no_proposal_is_refused(server: Server, text: str) -> None:
    is_refused(server.send("propose", proposal=text), server, "not a proposal")


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_releases_are_counted_in_plain_numbers(server: Server, count: int) -> None:
    is_refused(server.propose((TRAINING, count)), server, "make no sense")
    is_refused(server.propose((TRAINING, 1), (TRAINING, 1)), server, "make no sense")


def test_a_proposal_does_not_change(server: Server) -> None:
    accepted = server.propose((TRAINING, 1))
    assert accepted.kind == "accepted" and server.propose((TRAINING, 1)) == accepted
    for other in ({"releases": 2}, {"delta": 2e-3}, {"model": "svm"}, {"client": 1}):
        is_refused(server.propose((TRAINING, other.pop("releases", 1)), **other), server, "another proposal")
    assert server.propose((TRAINING, 1)) == accepted
    server.restart()
    assert server.propose((TRAINING, 1)) == accepted


def test_the_price_is_the_clients_own(server: Server) -> None:
    """Whatever the server says: that of all releases together, under the policy's adjacency."""
    accepted = server.propose((TRAINING, 10), (CHOICE, 1))
    events = {TRAINING.event: 10, CHOICE.event: 1}
    assert accepted.values == {"epsilon": price(events, 1e-3).epsilon, "delta": 1e-3}


# ---- requests --------------------------------------------------------------------------------------


def test_the_same_request_gets_the_same_answer_and_costs_nothing(server: Server) -> None:
    """Bit for bit, at once, after others, and after the guard was started anew."""
    server.propose((TRAINING, 2))
    first = server.train()
    spent = server.spent
    assert first.kind == "release" and len(spent) == 1
    assert same(server.train(), first)
    second = server.train("round 2, ask 1")
    assert not torch.equal(second.values["update"], first.values["update"])  # type: ignore[arg-type]
    assert same(server.train(), first)
    server.restart()
    assert same(server.train(), first) and same(server.train("round 2, ask 1"), second)
    assert server.spent[:1] == spent and len(server.spent) == 2 and server.refusals == []


def test_the_same_request_with_other_inputs_is_refused(server: Server) -> None:
    server.propose((TRAINING, 3), (replace(TRAINING, steps=1), 1), (CHOICE, 1))
    first = server.train()
    for other in (
        {"shared_model": torch.full((PARAMETERS,), 1e-45)}, {"shared_learning_rate": 0.25},
        {"shared_model": None, "each_model": torch.zeros(PARAMETERS)},  # the same, but given in another way
        {"shared_model": -torch.zeros(PARAMETERS)}, {"mechanism": replace(TRAINING, steps=1)},
        {"shared_centre": torch.zeros(PARAMETERS), "shared_pull": 0.0},
    ):  # fmt: skip
        is_refused(server.train(**other), server, "other inputs")
    models = torch.zeros(2, PARAMETERS)
    is_refused(server.ask("choose_model", CHOICE, shared_models=models), server, "other inputs")
    assert len(server.spent) == 1 and same(server.train(), first)


def test_no_more_than_was_accepted_is_released(server: Server) -> None:
    server.propose((TRAINING, 2))
    answers = [server.train(f"round {number}, ask 1") for number in range(1, 4)]
    assert [answer.kind for answer in answers] == ["release", "release", "refused"]
    is_refused(server.train("round  1, ask 1"), server, "all that was accepted")  # another name, not the same request
    is_refused(server.train("round 4, ask 1", replace(TRAINING, noise_multiplier=0.5)), server, "not in the proposal")
    assert len(server.spent) == 2


def test_the_budget_is_for_all_runs_together(server: Server) -> None:
    """Epsilons and deltas add up from the first release on; a run that was accepted and never begun costs nothing."""
    server.allow(epsilon=2.5 * price({TRAINING.event: 1}, 1e-3).epsilon)
    runs = [letter * 32 for letter in "abcde"]
    accepted = [server.of(run).propose((TRAINING, 1)).kind for run in runs]
    assert accepted == ["accepted"] * 5  # nothing was released yet, so each of them could be begun
    assert [server.of(run).train().kind for run in runs[:3]] == ["release", "release", "refused"]
    is_refused(server.of(runs[4]).train(), server, "the policy allows")
    is_refused(server.of("f" * 32).propose((TRAINING, 1)), server, "the policy allows")
    server.restart()
    is_refused(server.of(runs[4]).train(), server, "the policy allows")
    assert server.of(runs[0]).train().kind == "release" and len(server.spent) == 2  # the same as before
    assert server.of("f" * 32).propose().kind == "accepted"


def test_deltas_add_up_as_well(server: Server) -> None:
    server.allow(delta=2.5e-3)
    kinds = []
    for run in "abc":
        server.of(run * 32).propose((TRAINING, 1))
        kinds.append(server.train().kind)
    assert kinds == ["release", "release", "refused"] and "delta 0.001 more" in server.refusals[-2]


def test_noise_is_never_shared(server: Server) -> None:
    """Not by runs, requests, inputs, or records: all that a server can vary gives noise of its own."""
    releases = (TRAINING, 3), (MOMENTS, 2)
    for run in "ab":
        server.of(run * 32).propose(*releases)
    found = [server.train(), server.train("round 1, ask 2"), server.train("round 1, ask 3", shared_learning_rate=-0.5)]
    found.append(server.of("a" * 32).train())
    updates = torch.stack([cast(Tensor, answer.values["update"]) for answer in found])
    assert len({tuple(row) for row in updates.abs().tolist()}) == 4
    names = "round 1, ask 9", "round 1, ask  9"
    one, other = (server.ask("release_moments", MOMENTS, name).values["moments"] for name in names)
    assert not torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"shared_model": torch.zeros(PARAMETERS + 1)}, "wrong shape"),
        ({"shared_model": torch.zeros(1, PARAMETERS)}, "wrong shape"),
        ({"shared_model": torch.zeros(0)}, "wrong shape"),
        ({"shared_model": torch.tensor(0.0)}, "wrong shape"),
        ({"shared_model": torch.zeros(PARAMETERS).double()}, "wrong type"),
        ({"shared_model": torch.tensor([math.nan] + [0.0] * 7)}, "NaN"),
        ({"shared_model": torch.tensor([math.inf] + [0.0] * 7)}, "NaN or an infinite"),
        ({"shared_learning_rate": math.nan}, "NaN"),
        ({"shared_learning_rate": -math.inf}, "NaN or an infinite"),
        ({"shared_learning_rate": 1}, "must be a float"),
        ({"shared_learning_rate": torch.tensor(1.0)}, "must be a float"),
        ({"shared_model": "zeros"}, "wrong shape"),
        ({"shared_model": None}, "it takes the inputs"),
        ({"shared_more": 1.0}, "it takes the inputs"),
        ({"shared_": 1.0}, "it takes the inputs"),
        ({"each_model": torch.zeros(PARAMETERS)}, "given twice"),
        ({"shared_pull_inside": 1}, "must be a bool"),
    ],
)
def test_inputs_are_what_the_task_takes(server: Server, given: dict[str, Any], why: str) -> None:
    server.propose((TRAINING, 1))
    is_refused(server.train(**given), server, why)
    assert server.spent == [] and server.train().kind == "release"


@pytest.mark.parametrize("task", ["", "confuse", "os.system", "bounded_update", "train", "fairveil.tasks:evaluate"])
def test_only_tasks_on_the_list_run(server: Server, task: str) -> None:
    server.allow(tasks=["local_update", "confuse", "evaluate"])  # the second may not travel at all
    server.propose((TRAINING, 1))
    is_refused(server.ask(task, TRAINING, shared_model=torch.zeros(PARAMETERS)), server, "not on the policy's list")


def test_a_task_answers_by_its_own_kind_of_mechanism(server: Server) -> None:
    server.propose((TRAINING, 1), (MOMENTS, 1))
    is_refused(server.train(mechanism=MOMENTS), server, "does not answer by column statistics")
    is_refused(server.train(mechanism=""), server, "none was given")
    is_refused(server.ask("evaluate", MOMENTS), server, "does not answer by")
    is_refused(server.train(mechanism="{}"), server, "not in the proposal")
    assert server.spent == []


def test_diagnostics_do_not_leave(server: Server) -> None:
    server.propose((TRAINING, 1), (CHOICE, 1))
    model = torch.zeros(PARAMETERS)
    assert server.ask("evaluate", None, "round 1, ask 1", shared_model=model) == Envelope("kept")
    assert set(server.train("round 1, ask 2").values) == {"update"}
    chosen = server.ask("choose_model", CHOICE, "round 1, ask 3", shared_models=torch.zeros(2, PARAMETERS))
    assert set(chosen.values) == {"choice"}
    measured = {name for (name,) in server.guard.database.execute("SELECT name FROM diagnostic")}
    assert {"accuracy", "clipped", "score_gap"} <= measured  # for the owner
    for kind in ("diagnostics", "status", "ledger", "Task", ""):
        is_refused(server.send(kind, request="round 1, ask 1"), server, "nothing that can be asked")


def test_a_message_that_is_too_large_is_refused(server: Server) -> None:
    server.allow(largest_message=10_000)
    server.propose((TRAINING, 1))
    is_refused(server.train(shared_model=torch.zeros(5000)), server, "larger than 10,000")
    is_refused(server.train(shared_model="x" * 20_000), server, "larger than 10,000")
    assert server.train().kind == "release"


@pytest.mark.parametrize("run", ["", "b" * 32, "a" * 31, "A" * 32, "../" + "a" * 29, "a" * 33, 7])
def test_a_run_that_was_never_accepted_is_refused(server: Server, run: Any) -> None:
    server.propose((TRAINING, 1))
    server.run = run
    assert server.train().kind == server.finish().kind == "refused" and server.spent == []


@pytest.mark.parametrize("request_", ["a\x1fb", "a\n", "x" * 101, "round/1", 3])
def test_requests_have_plain_names(server: Server, request_: Any) -> None:
    """They are part of what the noise is derived from."""
    server.propose((TRAINING, 1))
    assert server.train(request_).kind == "refused" and server.spent == []


def test_changed_records_end_what_was_accepted(server: Server) -> None:
    """Two answers to one request, on two states of the records; and the budget goes on."""
    server.allow(epsilon=1.5 * price({TRAINING.event: 1}, 1e-3).epsilon)
    server.propose((TRAINING, 1))
    server.train()
    table = pd.read_csv(server.folder.parent / "t.csv")
    table.iloc[1:].to_csv(server.folder.parent / "t.csv", index=False)
    server.restart()
    is_refused(server.train(), server, "records have changed")
    is_refused(server.of("b" * 32).propose((TRAINING, 1)), server, "the policy allows")


def test_a_stricter_policy_holds_at_once(server: Server) -> None:
    server.propose((TRAINING, 2))
    server.train()
    for policy, why in (
        ({"smallest_noise": 2.0}, "noise multiplier"), ({"largest_clip": 0.5}, "clip_norm"),
        ({"epsilon": 0.1}, "allows 0.1"), ({"delta": 1e-5}, "allows 1e-05"), ({"tasks": ["evaluate"]}, "list"),
    ):  # fmt: skip
        server.allow(**policy)
        is_refused(server.train("round 2, ask 1"), server, why)
    server.allow()
    assert server.train("round 2, ask 1").kind == "release"


def test_contributions_without_noise_need_trust(server: Server) -> None:
    sums = CohortSums((Part("update", (PARAMETERS,), 0.5, 1.0),), 1.0)
    inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 100.0}
    inputs |= {"shared_local_epochs": 2, "shared_batch_size": 10}
    assert server.propose((sums, 1), unit="client").kind == "accepted"
    share = server.ask("bounded_update", sums, **inputs)
    assert share.kind == "share" and 0.4 < torch.linalg.vector_norm(cast(Tensor, share.values["update"])) <= 0.5
    is_refused(server.ask("bounded_update", sums, "round 2, ask 1", **inputs), server, "all that was accepted")
    is_refused(server.of("b" * 32).propose((TRAINING, 1), unit="client"), server, "does not go with")
    server.allow(trust="nobody")
    is_refused(server.of(RUN).ask("bounded_update", sums, **inputs), server, "trusts nobody")
    is_refused(server.of("c" * 32).propose((sums, 1), unit="client"), server, "trusts nobody")


ODD = st.sampled_from(["", "a" * 32, "round 1, ask 1", "local_update", "{}", 0, -1, 1.5, math.nan, True])
KEYS = st.sampled_from(["run", "request", "task", "mechanism", "proposal", "model", "shared.model", "scales.mean"])
TENSORS = st.sampled_from([torch.zeros(0), torch.zeros(PARAMETERS), torch.full((2,), math.nan).double()])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["describe", "propose", "task", "finish", "?"]),
    values=st.dictionaries(KEYS | st.text(max_size=5), ODD | TENSORS | st.text(max_size=9), max_size=6),
)
def test_whatever_comes_is_answered(server: Server, kind: str, values: dict[str, Any]) -> None:
    answer = server.guard.answer(Envelope(kind, values))
    assert answer.kind in ("refused", "description" if kind == "describe" else "failed") and server.spent == []


# ---- what is written down, and when ----------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


def test_the_entry_is_on_disk_before_the_answer_leaves(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash right after it: the answer never left, and when it is asked for again it costs nothing more."""
    server.propose((TRAINING, 1))
    post = Ledger.post

    def crash(ledger: Ledger, entries: Any) -> None:
        post(ledger, entries)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Ledger, "post", crash)
        server.train()
    with closing(sqlite3.connect(server.folder / "ledger.sqlite")) as other:
        assert other.execute("SELECT COUNT(*) FROM ledger").fetchone() == (1,)
    server.restart()
    answer = server.train()
    digest = server.guard.ledger.entries()[0][4]
    assert answer.kind == "release" and digest_values(answer.values) == digest and len(server.spent) == 1


def test_what_cannot_be_written_down_does_not_leave(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.propose((TRAINING, 1))

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full: 58.1 years")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "post", full)
        answer = server.train()
    assert answer == Envelope("failed", {"why": "the client could not do it; its log says why"})
    assert server.spent == [] and server.train().kind == "release"


def test_status_says_what_was_spent(server: Server) -> None:
    nothing = {"epsilon": 0.0, "delta": 0.0}
    assert status(server.folder)["spent"] == nothing
    accepted = server.propose((TRAINING, 2))
    assert status(server.folder)["spent"] == nothing  # accepted, not begun
    server.train()
    server.of("b" * 32).propose((CHOICE, 1))
    server.train("round 9, ask 1")
    said = status(server.folder)
    assert said["spent"] == dict(accepted.values)
    assert [(run["released"], run["accepted"], run["state"]) for run in said["runs"]] == [
        (1, 2, "open"),
        (0, 1, "open"),
    ]
    (refusal,) = said["refusals"]
    assert (refusal["run"], refusal["request"]) == ("b" * 32, "round 9, ask 1") and "not in the" in refusal["why"]


def test_what_a_client_says_of_itself(server: Server) -> None:
    """Its size rounded: 64 training records are between 61 and 68, of 24 steps a decade."""
    said = server.send("describe").values
    assert (said["name"], said["classes"], said["features"]) == ("north", 2, "[3]")
    assert len(server.guard.data.train) == 64 and said["size"] == math.floor(10 ** (43 / 24)) == 61


# ---- personal state --------------------------------------------------------------------------------


@deployable(rate=float)
def learn(members: Sequence[Member]) -> list[Reply]:
    """One plain step of the personal model; nothing leaves."""
    replies = []
    for member in members:
        weights = member.personal.get("model", torch.zeros(member.model.parameters))
        step = member.model.gradient(weights, member.data.train.x, member.data.train.y)
        replies.append(Reply(Kept(), keep={"model": weights - cast(float, member.inputs["rate"]) * step}))
    return replies


@deployable(by=NoisyTraining, model=Array(("p",)), learning_rate=float)
def learn_and_tell(members: Sequence[Member]) -> list[Reply]:
    """A release, and a personal state that has changed as well."""
    told, kept = local_update(members), [reply.keep for reply in learn([_with_rate(member) for member in members])]
    return [replace(reply, keep=keep) for reply, keep in zip(told, kept, strict=True)]


def _with_rate(member: Member) -> Any:
    return SimpleNamespace(model=member.model, data=member.data, personal=member.personal, inputs={"rate": 0.1})


@pytest.fixture
def personal(server: Server) -> Server:
    server.allow(tasks=["local_update", "evaluate", name_of(learn), name_of(learn_and_tell)])
    server.propose((TRAINING, 20))
    return server


def one_round(server: Server, number: int) -> list[Envelope]:
    """Two asks that keep something, and one between them that does not."""
    inputs = {"shared_model": torch.zeros(PARAMETERS), "shared_learning_rate": 0.5}
    return [
        server.ask(name_of(learn), None, f"round {number}, ask 1", shared_rate=0.5),
        server.train(f"round {number}, ask 2"),
        server.ask(name_of(learn_and_tell), TRAINING, f"round {number}, ask 3", **inputs),
    ]


def versions(server: Server) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (server.folder / "personal" / "1").iterdir()}


def test_a_round_that_is_asked_again_finds_the_state_it_found_before(personal: Server) -> None:
    first = one_round(personal, 1)
    assert [answer.kind for answer in first] == ["kept", "release", "release"]
    second, spent, kept = one_round(personal, 2), personal.spent, versions(personal)
    for restart in (False, True):
        if restart:
            personal.restart()
        again = one_round(personal, 2)
        assert all(same(*pair) for pair in zip(second, again, strict=True)) and personal.refusals == []
        assert personal.spent == spent and versions(personal) == kept
    assert all(same(*pair) for pair in zip(first, one_round(personal, 1), strict=True))  # the round before, too


def test_a_crash_between_state_and_ledger_changes_nothing(personal: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    one_round(personal, 1)

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    for place in ("fairveil.guard.personal.write_whole", "fairveil.privacy.ledger.Ledger.post"):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(place, crash)
            one_round(personal, 2)
        personal.restart()
    interrupted = one_round(personal, 2)
    kept = versions(personal)
    assert [answer.kind for answer in interrupted] == ["kept", "release", "release"]
    again = one_round(personal, 2)
    assert all(same(*pair) for pair in zip(interrupted, again, strict=True)) and versions(personal) == kept


def test_versions_are_tagged_and_for_their_owner_alone(personal: Server) -> None:
    for number in range(1, 6):
        one_round(personal, number)
    folder = personal.folder / "personal" / "1"
    tags = []
    for path in sorted(folder.iterdir()):
        assert path.stat().st_mode & 0o777 == 0o600
        with safe_open(path, "pt") as file:
            tags.append(file.metadata()["request"])
    rounds = [f"round {number}, ask {ask}" for number in (4, 5) for ask in (1, 3)]
    assert tags == ["round 3, ask 3", *rounds]  # the last two rounds, and what the first of them began with
    assert [f.stat().st_mode & 0o777 for f in (folder, folder.parent)] == [0o700, 0o700]
    assert (personal.folder / "ledger.sqlite").stat().st_mode & 0o777 == 0o600
    is_refused(personal.train("round 1, ask 2"), personal, "long ago")


def test_what_was_kept_is_not_made_anew_with_other_inputs(personal: Server) -> None:
    """A release that was asked for again told whether the state had changed: of the records, and for nothing."""
    first = one_round(personal, 1)
    again = personal.ask(name_of(learn), None, "round 1, ask 1", shared_rate=0.25)
    is_refused(again, personal, "other inputs")
    assert all(same(*pair) for pair in zip(first, one_round(personal, 1), strict=True))


def test_the_end_leaves_the_model_with_the_client(personal: Server) -> None:
    one_round(personal, 1)
    assert personal.finish() == Envelope("finished")
    (path,) = (personal.folder / "models").iterdir()
    assert path.name == f"0001-{RUN}.safetensors" and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    state = load_file(personal.folder / "personal" / "1" / "000000002.safetensors")["model"]
    assert torch.equal(torch.cat([value.flatten() for value in load_file(path).values()]).sort()[0], state.sort()[0])
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["fairveil"])
    assert about["standardise"]["mean"] == SCALES["scales_mean"].tolist() and about["model"] == "logistic"
    (run,) = status(personal.folder)["runs"]
    assert run["state"] == "finished" and 0 <= run["own_test"]["accuracy"] <= 1 and run["own_test"]["n"] == 16
    assert personal.finish(model=torch.ones(PARAMETERS)) == Envelope("finished")  # the server's, where it has one
    assert torch.equal(torch.cat([value.flatten() for value in load_file(path).values()]), torch.ones(PARAMETERS))
    last = status(personal.folder)["runs"][0]["own_test"]
    is_refused(personal.ask("evaluate", None, "the end", shared_model=torch.zeros(PARAMETERS)), personal, "last scores")
    assert status(personal.folder)["runs"][0]["own_test"] == last
    for wrong in (torch.zeros(3), torch.full((PARAMETERS,), math.nan), "x"):
        assert personal.finish(model=wrong).kind == "refused"


# ---- attacks that once succeeded -------------------------------------------------------------------


def test_columns_are_whole_numbers(server: Server) -> None:
    """A list in place of a column made a matrix of the sums, whose rows all got one noise: their differences none."""
    nested = changed(NoisyMoments(((0, None),), 100.0), columns=[[[0, 1, 2], None]])
    is_refused(server.propose((nested, 1)), server, "not known")


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": "0x1.8000000000000p+0"},
        {"clip_norm": 1},
        {"noise_multiplier": True},
        {"copies": "0x1.0000000000000p+0"},
    ],
)
def test_numbers_are_of_the_type_that_they_should_be(server: Server, fields: dict[str, Any]) -> None:
    """Of 1.5 steps two were taken; twice 1.5 was paid for. And 1 and 1.0 are equal, but not the same text."""
    is_refused(server.propose((changed(TRAINING, **fields), 2)), server, "not known")


def test_what_is_measured_does_not_show(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN could not be written down once, and the client said that it had failed.

    A model whose outputs overflow for some records only could ask of each of them, at no price.
    """
    monkeypatch.setattr(remote, "LARGEST", math.inf)  # such a model would not be let in any more
    server.propose()
    overflowing = torch.zeros(PARAMETERS)
    overflowing[:FEATURES] = 3e38
    for split in ("test", "train"):
        request = f"round 1, ask {split}"
        kept = server.ask("evaluate", None, request, shared_model=overflowing, shared_split=split)
        assert kept == Envelope("kept")
    value = "SELECT value FROM diagnostic WHERE name = 'loss'"
    assert server.guard.database.execute(value).fetchall() == [(None,), (None,)]
    assert server.finish(model=overflowing) == Envelope("finished")


def test_whether_there_are_records_does_not_show(server: Server) -> None:
    """Without a model to score, a client with test records failed, and one without them did not."""
    server.propose()
    some = server.ask("evaluate", None)
    none = Records(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))
    server.guard.data = replace(server.guard.data, test=none)
    server.guard._runs.clear()
    assert server.ask("evaluate", None, "round 1, ask 2") == some


def test_no_input_is_so_large_that_rounding_breaks_the_clip(server: Server) -> None:
    """With weights of 1e8 and nearly equal rows a record's gradient is all rounding, and changes with the length of its
    batch: a server could choose a model at which one record moves the clipped sum by 3.7 times the clip norm.
    """

    def moved(scale: float) -> float:
        """By how much one record more moves the sum, over the clip norm; the most in a fixed search."""
        random = torch.Generator().manual_seed(0)
        model, worst = ModelSpec("logistic", (13,), 2).build(), 0.0
        for _ in range(300):
            n = int(torch.randint(2, 70, (1,), generator=random))
            held = [Records(torch.rand(n, 13, generator=random), torch.randint(0, 2, (n,), generator=random))]
            row = torch.rand(13, generator=random)
            rows = scale * (row + 1e-7 * torch.randn(2, 13, generator=random))
            weights = torch.cat([rows.flatten(), scale * torch.rand(1, generator=random).expand(2)]).unsqueeze(0)
            with_, without = (
                clipped_sums(model, weights, held, [torch.arange(m)], 1.0).total[0] for m in (n, n - 1)
            )  # fmt: skip
            worst = max(worst, float((with_ - without).norm()))
        return worst

    assert moved(1e8) > 2
    assert moved(LARGEST) < 1 and moved(10 * LARGEST) < 1
    server.propose((TRAINING, 1))
    is_refused(server.train(shared_model=torch.full((PARAMETERS,), 1e8)), server, "beyond 1000")
    is_refused(server.train(shared_learning_rate=1e8), server, "beyond 1000")
    beyond = {"shared_centre": torch.ones(PARAMETERS), "shared_pull": 1e3, "shared_learning_rate": 1.0}
    assert server.train(**beyond).kind == "failed" and server.spent == []  # it would grow a thousandfold at each step
    is_refused(server.of("f" * 32).propose((replace(TRAINING, expected_batch=1e-9), 1)), server, "expected batch")


def test_a_refusal_can_always_be_written_down(server: Server) -> None:
    """A lone surrogate in a name made the guard itself fail, and a long name filled its disk."""
    unwritable = CohortSums((Part("\ud800", (1,), 1.0, 1.0),), 1.0)
    is_refused(server.propose((unwritable, 1)), server, "does not go with privacy of each record")
    is_refused(server.propose(options={"\ud800": 1}), server, "not an option")
    server.propose()
    is_refused(server.send("task", request="\ud800", task="", mechanism=""), server, "plain names")
    is_refused(server.ask("evaluate", None, **{f"shared_{'x' * 100_000}": 1}), server, "it takes the inputs")
    assert max(map(len, server.refusals)) < 2000
    assert server.send("\ud800").kind == server.send("propose", proposal="[" * 10**5).kind == "refused"


def test_a_bound_is_no_smaller_than_float32_can_keep(server: Server) -> None:
    """One record whose gradient is rounded up to the least number above 0, which is twice as long as its bound."""
    clip = 0.75e-45
    assert float(torch.tensor(clip)) > 1.8 * clip  # what the sum of clipped gradients would hold
    is_refused(server.propose((replace(TRAINING, clip_norm=clip), 1)), server, "clip_norm")
    is_refused(server.propose((replace(TRAINING, clip_norm=5e-324), 1)), server, "clip_norm")  # noise of 0


def test_prices_for_two_relations_between_neighbours_are_not_added_up(server: Server) -> None:
    """A run that was accepted for records added or removed went on when the policy said replaced, at half its price."""
    server.propose((TRAINING, 1))
    policy = server.folder / "policy.toml"
    policy.write_text(policy.read_text() + 'adjacency = "replace"\n')
    with pytest.raises(UserError, match="adjacency"):
        server.restart()


def test_a_request_is_answered_on_one_form_of_the_records(server: Server) -> None:
    """What had been asked without scales could be asked again with them, and with any.

    The second answer, under the same noise, was refused if it was another, and so said whether it was.
    """
    server.propose((CHOICE, 3), (MOMENTS, 1))
    models = torch.randn(3, PARAMETERS, generator=torch.Generator().manual_seed(0))
    nothing = dict.fromkeys(SCALES)
    is_refused(server.ask("choose_model", CHOICE, shared_models=models, **nothing), server, "scales are needed")
    first = server.ask("choose_model", CHOICE, shared_models=models)
    other = {"scales_mean": SCALES["scales_mean"] + 0.1}
    for wrong, why in (
        (nothing, "needed"), (other, "other scales"), ({"scales_mean": None}, "needed"),
        ({"scales_more": 1}, "needed"), ({"scales_mean": torch.zeros(3).double()}, "shape"),
        ({"scales_deviation": torch.ones(2)}, "type"), ({"scales_deviation": torch.zeros(2).double()}, "no statistics"),
        ({"scales_mean": torch.tensor([0.0, np.nan]).double()}, "NaN"),
    ):  # fmt: skip
        is_refused(server.ask("choose_model", CHOICE, shared_models=models, **wrong), server, why)
    server.restart()
    is_refused(server.ask("choose_model", CHOICE, shared_models=models, **other), server, "other scales")
    assert first.kind == "release" and server.ask("choose_model", CHOICE, shared_models=models) == first


def test_statistics_are_those_of_the_records_as_they_are(server: Server) -> None:
    """A server that has gone back to its last checkpoint asks for them once more, when the scales are long known."""
    server.propose((MOMENTS, 1), (TRAINING, 1))
    first = server.ask("release_moments", MOMENTS, "preparation, ask 1")
    server.train()
    for _ in range(2):
        again = server.ask("release_moments", MOMENTS, "preparation, ask 1")
        assert first.kind == again.kind == "release" and digest_values(again.values) == digest_values(first.values)
        server.restart()


# ---- models that a client chooses among, under metric privacy --------------------------------------

ONE = LaplaceBall(PARAMETERS, 4.0, 0.5, spread=0.0)  # 2n/nu = 4
BOUNDED = LaplaceBall(PARAMETERS, 8.0, 0.5, spread=1.0)  # (2r + 1) n/(nu r) = 4


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Server]:
    """A hospital whose columns have ranges known beforehand: nothing is standardised by statistics."""
    prepare = {name: {"kind": "range", "low": 0.0, "high": 200.0} for name in ("age", "pressure")}
    server = Server(client_folder(tmp_path / "north", "north", data(tmp_path, prepare=prepare)))
    yield server
    server.guard.close()


def chosen_from(
    server: Server, models: Tensor, mechanism: Mechanism | str = ONE, request: str = "round 1, ask 1"
) -> Envelope:
    inputs = {"shared_models": models, "shared_learning_rate": 0.5, "shared_local_epochs": 1, "shared_batch_size": 32}
    return server.ask("personal_update", mechanism, request, **inputs, scales_mean=None, scales_deviation=None)


def test_a_model_under_metric_privacy_is_priced_by_the_client_and_sent_once(plain: Server) -> None:
    """By hand: 2n/nu each time, (2r + spread) n/(nu r) with a spread; no delta is needed, and none is spent."""
    accepted = plain.propose((ONE, 3), (BOUNDED, 1), unit="metric", delta=0.0)
    assert accepted.values == {"epsilon": pytest.approx(16.0), "delta": 0.0}
    first = chosen_from(plain, torch.zeros(1, PARAMETERS))
    assert first.kind == "release" and set(first.values) == {"model"}  # not which, and not how long the step was
    assert same(chosen_from(plain, torch.zeros(1, PARAMETERS)), first) and len(plain.spent) == 1
    is_refused(chosen_from(plain, torch.ones(1, PARAMETERS)), plain, "other inputs")
    two = 0.1 * torch.eye(PARAMETERS)[:2]
    assert chosen_from(plain, two, BOUNDED, "round 2, ask 1").kind == "release"
    is_refused(chosen_from(plain, two, BOUNDED, "round 3, ask 1"), plain, "all that was accepted")
    is_refused(chosen_from(plain, two, replace(ONE, spread=9.0), "round 3, ask 1"), plain, "not in the proposal")
    assert len(plain.spent) == 2


@pytest.mark.parametrize(
    ("mechanism", "models"),
    [
        (ONE, 100.0 * torch.eye(PARAMETERS)[:2]),  # far apart: a client would tell which it prefers
        (ONE, 1e-3 * torch.eye(PARAMETERS)[:2]),
        (BOUNDED, torch.eye(PARAMETERS)[:2]),  # sqrt(2) apart
        (BOUNDED, torch.cat([torch.zeros(40, PARAMETERS), 900.0 * torch.ones(1, PARAMETERS)])),
        (replace(ONE, dimension=1), torch.zeros(1, PARAMETERS)),  # priced for one parameter
        (replace(ONE, dimension=PARAMETERS + 1), torch.zeros(1, PARAMETERS)),
    ],
)
def test_nothing_is_sent_of_models_that_the_noise_is_not_made_for(
    plain: Server, mechanism: Mechanism, models: Tensor
) -> None:
    """Whatever the records are, and nothing is spent."""
    assert plain.propose((mechanism, 1), unit="metric", delta=0.0).kind == "accepted"
    is_refused(chosen_from(plain, models, mechanism), plain, "noise for")
    assert plain.spent == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e4])
def test_models_to_choose_among_are_finite(plain: Server, bad: float) -> None:
    """One that is not would be chosen by nobody, and so tell nothing; but the rest would be."""
    plain.propose((BOUNDED, 1), unit="metric", delta=0.0)
    models = torch.zeros(2, PARAMETERS)
    models[1, 0] = bad
    is_refused(chosen_from(plain, models, BOUNDED), plain, "holds")
    assert plain.spent == []


def test_a_choice_that_nothing_bounds_is_not_within_any_budget(plain: Server) -> None:
    """Of two models far apart a client tells which it prefers: one bit about its records, at no price."""
    plain.allow(open_choice=False)
    answer = plain.propose((replace(ONE, spread=math.inf), 1), unit="metric", delta=0.0)
    is_refused(answer, plain, "models any distance apart")


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [
        (replace(ONE, noise_multiplier=0.0), "noise multiplier of 0"),
        (replace(ONE, noise_multiplier=0.01), "noise multiplier of 0.01"),
        (replace(ONE, radius=1e9), "radius of 1e+09"),
        (replace(ONE, radius=1e-30), "radius of 1e-30"),
        (replace(ONE, dimension=10**9), "allows 20"),
        (replace(BOUNDED, spread=1e3), "allows 20"),
        (LaplaceStep(PARAMETERS, 4.0), "allows 20"),  # it promises nothing
        (changed(ONE, dimension=8.0), "not known"),
        (changed(ONE, spread="-0x1.0000000000000p+0"), "not known"),
        (changed(ONE, spread="nan"), "not known"),
        (TRAINING, "does not go with privacy of each metric"),
    ],
)
def test_metric_mechanisms_outside_the_policy_are_refused(plain: Server, mechanism: Mechanism | str, why: str) -> None:
    is_refused(plain.propose((mechanism, 1), unit="metric", delta=0.0), plain, why)


def test_metric_mechanisms_go_with_metric_privacy_alone(plain: Server) -> None:
    is_refused(plain.propose((ONE, 1)), plain, "does not go with privacy of each record")
    is_refused(plain.propose((ONE, 1), unit="client"), plain, "does not go with privacy of each client")
    is_refused(plain.propose((ONE, 1), (TRAINING, 1), unit="metric"), plain, "does not go with privacy of each metric")


def test_gaussian_noise_on_a_model_needs_a_delta(plain: Server) -> None:
    mechanism = GaussianBall(PARAMETERS, 4.0, 0.5, spread=0.0)
    is_refused(plain.propose((mechanism, 1), unit="metric", delta=0.0), plain, "privacy.delta")
    accepted = plain.propose((mechanism, 1), unit="metric", delta=1e-3)
    assert accepted.values == {"epsilon": price({mechanism.event: 1}, 1e-3).epsilon, "delta": 1e-3}


def test_a_choice_that_shows_must_be_allowed(plain: Server) -> None:
    """By default a client sends one model, or one of some that are close together."""
    policy = Policy(epsilon=1.0, delta=1e-3)
    assert "personal_update" in policy.tasks and not policy.open_choice
    plain.allow(tasks=["local_update"])
    plain.propose((ONE, 1), unit="metric", delta=0.0)
    is_refused(chosen_from(plain, torch.zeros(1, PARAMETERS)), plain, "not on the policy's list")


def test_the_last_models_are_chosen_among_without_a_word(plain: Server) -> None:
    """`finish` with models: the answer is the same whichever suits the records, and only the owner has the model."""
    plain.propose((ONE, 1), unit="metric", delta=0.0)
    answer = plain.send("finish", models=torch.stack([torch.zeros(PARAMETERS), torch.ones(PARAMETERS)]))
    assert answer == Envelope("finished")
    is_refused(
        plain.send("finish", models=torch.zeros(2, PARAMETERS), model=torch.zeros(PARAMETERS)), plain, "one model"
    )
