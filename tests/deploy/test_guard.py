"""The guard, asked by a server that means harm: nothing leaves that was not accepted, priced and written down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fairveil.data.federation import Records
from fairveil.errors import UserError
from fairveil.guard import Guard, Proposal
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, canonical
from fairveil.privacy.moments import NoisyMoments
from fairveil.privacy.release import digest_values
from fairveil.privacy.training import NoisyTraining
from fairveil.remote import Envelope

from .conftest import client_folder

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
    def refusals(self) -> list[str]:
        return [why for (why,) in self.guard.database.execute("SELECT why FROM refusal")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(client_folder(tmp_path / "north", "north", data(tmp_path)))
    yield server
    server.guard.close()


def is_refused(answer: Envelope, server: Server, why: str) -> None:
    """It says why and nothing else, and the client has it in writing."""
    assert answer.kind == "refused", answer
    assert why in answer.values["why"] and set(answer.values) == {"why"}  # type: ignore[operator]
    assert server.refusals[-1] == answer.values["why"]


# ---- attacks that once succeeded -------------------------------------------------------------------


def changed(mechanism: Mechanism, **fields: Any) -> str:
    """The canonical form with other fields."""
    return json.dumps(json.loads(canonical(mechanism)) | fields, sort_keys=True)


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


def test_what_is_measured_does_not_show(server: Server) -> None:
    """NaN could not be written down once, and the client said that it had failed.

    A model whose outputs overflow for some records only could ask of each of them, at no price.
    """
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
        ({"scales_deviation": torch.ones(2)}, "type"), ({"scales_deviation": torch.zeros(2).double()}, "positive"),
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
