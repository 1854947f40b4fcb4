"""Calls and replies in envelopes: they come back as they were, and every fault of a task is told as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fairveil.data.federation import Federation
from fairveil.engine import batches
from fairveil.engine.flower import packed, unpacked
from fairveil.engine.local import Bench, LocalEngine
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import Kept, Public, Release, Reply, Share
from fairveil.privacy.training import NoisyTraining
from fairveil.remote import Envelope
from fairveil.session import Call, Job, Member
from fairveil.tasks import local_update

TRAINING = NoisyTraining(0.2, 3, 1.0, 0.7, 32.0)
SUMS = CohortSums((Part("update", (2, 3), 1.0, 0.5), Part("inf", (), 2.0, 0.1)), 0.3)
VALUES: dict[str, Any] = {
    "tensor": torch.linspace(0, 1, 6).reshape(2, 3).t(), "scalar": torch.tensor(1.5), "none": torch.zeros(0, 3),
    "flags": torch.tensor([True, False]), "labels": torch.arange(3), "double": torch.tensor([math.pi, -0.0]).double(),
    "int": 2**70, "float": 0.1, "infinite": -math.inf, "text": "\u03b5 \u2264 8", "true": True,
}  # fmt: skip


def echo(members: Sequence[Member]) -> list[Reply]:
    """Answer with the inputs, keep the personal state, tell of both."""
    return [
        Reply(Public(dict(member.inputs)), dict(member.personal), {"inputs": len(member.inputs), "third": 1 / 3})
        for member in members
    ]


def train_and_write(members: Sequence[Member]) -> list[Reply]:
    """Write into what was released."""
    replies = local_update(members)
    replies[0].out.value["update"].add_(1)  # type: ignore
    return replies


def share(members: Sequence[Member]) -> list[Reply]:
    """A share, part of it clipped."""
    values = {"update": torch.ones(2, 3), "inf": torch.tensor(0.25)}
    return [Reply(member.mechanism.share(values, member)[0]) for member in members]  # type: ignore


def bare(members: Sequence[Member]) -> list[Any]:
    """Something without a price."""
    return [Reply([3.0]) for _ in members]  # type: ignore


def raising(members: Sequence[Member]) -> list[Reply]:
    """Raise what the inputs say."""
    raise ERRORS[members[0].inputs["number"]]  # type: ignore


class Homemade(Exception):
    """Of a user's own."""


ERRORS = [
    TypeError("a gradient of text"), UserError("data.options.x = 3 is wrong.", "It must be 4.", "data.options.x = 4"),
    RunFault("the disk is full"), KeyError("start"), Homemade("the tube is blocked"), ValueError(b"\xff"),
]  # fmt: skip


def job(task: Any, mechanism: Any = None, **shared: Any) -> Job:
    """As a session would ask it, of the clients 0 to 4."""
    calls = [Call(c, {"client": c}, mechanism, {"own": torch.tensor(float(c))}, bytes([c] * 32)) for c in range(5)]
    return Job(task, "round 1, ask 1", shared, calls)


def carried(envelope: Envelope) -> Envelope:
    """As Flower carries it."""
    return unpacked(packed(envelope))


@pytest.fixture(scope="module")
def bench(federation: Federation) -> tuple[Any, ...]:
    """What a bench is made of."""
    return federation, ModelSpec("logistic", federation.features, federation.classes), "a run", 2


def both(bench: tuple[Any, ...], asked: Job) -> tuple[dict[int, Reply], dict[int, Reply]]:
    """The replies by way of envelopes, and those of the local engine."""
    answer = carried(batches.answer(Bench(*bench), carried(batches.question(asked, asked.calls))))
    found = dict(batches.replies_of(answer, asked, {call.client: call for call in asked.calls}, "a run"))
    federation, spec, root, block = bench
    with LocalEngine(federation, spec, root=root, workers=1, block=block) as engine:
        return found, dict(engine.run(asked))


def bits(values: Any) -> Any:
    """Values that compare bit for bit."""
    return {
        name: (v.dtype, tuple(v.shape), v.tolist()) if isinstance(v, torch.Tensor) else (type(v), v)
        for name, v in values.items()
    }


def test_values_come_back_as_they_were(bench: tuple[Any, ...]) -> None:
    found, expected = both(bench, job(echo, **VALUES))
    assert list(found) == list(expected) == [0, 1, 2, 3, 4]
    for client, reply in found.items():
        wanted = expected[client]
        assert bits(reply.out.value) == bits(wanted.out.value)  # type: ignore[union-attr]
        assert bits(reply.keep) == bits(wanted.keep)
        assert reply.diagnostics == wanted.diagnostics


def test_a_release_is_the_same_release(bench: tuple[Any, ...]) -> None:
    """Its values, its mechanism, its key and its digest: all that the session and the ledger look at."""
    found, expected = both(bench, job(local_update, TRAINING, model=torch.zeros(650), learning_rate=0.1))
    for client, reply in found.items():
        assert isinstance(reply.out, Release)
        wanted: Any = expected[client].out
        assert bits(reply.out.value) == bits(wanted.value)
        assert (reply.out.mechanism, reply.out.key, reply.out.digest) == (TRAINING, wanted.key, wanted.digest)
        assert reply.diagnostics == expected[client].diagnostics


def test_what_was_written_into_a_release_shows(bench: tuple[Any, ...]) -> None:
    """The digest is that of the values as they were minted."""
    found, expected = both(bench, job(train_and_write, TRAINING, model=torch.zeros(650), learning_rate=0.1))
    first, wanted = found[0].out, expected[0].out
    assert isinstance(first, Release) and isinstance(wanted, Release)
    assert first.digest == wanted.digest
    assert bits(first.value) == bits(wanted.value)


def test_a_share_is_the_same_share(bench: tuple[Any, ...]) -> None:
    found, expected = both(bench, job(share, SUMS))
    for client, reply in found.items():
        assert isinstance(reply.out, Share) and reply.out.mechanism == SUMS
        assert bits(reply.out.value) == bits(expected[client].out.value)  # type: ignore[union-attr]


def test_what_has_no_price_is_told_by_its_name(bench: tuple[Any, ...]) -> None:
    """The session refuses it, and says what it was."""
    found, _ = both(bench, job(bare))
    assert {type(reply.out).__name__ for reply in found.values()} == {"list"}
    assert not isinstance(found[0].out, Release | Share | Public | Kept)


@pytest.mark.parametrize("number", range(4))
def test_errors_come_back_as_they_were(bench: tuple[Any, ...], number: int) -> None:
    with pytest.raises(type(ERRORS[number])) as raised:
        both(bench, job(raising, number=number))
    assert type(raised.value) is type(ERRORS[number])
    assert str(raised.value) == str(ERRORS[number])


@pytest.mark.parametrize(("number", "text"), [(4, "Homemade: the tube is blocked"), (5, "ValueError: ")])
def test_errors_that_cannot_travel_say_the_same(bench: tuple[Any, ...], number: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        both(bench, job(raising, number=number))


def test_what_many_get_travels_once(bench: tuple[Any, ...]) -> None:
    """Clients that share a model: one array, and one mechanism."""
    model = torch.zeros(650)
    calls = [Call(client, {"model": model}, TRAINING) for client in range(5)]
    envelope = batches.question(Job(echo, "r", {}, calls), calls)
    assert len(envelope.values) == 2  # the text, and the array
    assert envelope.text("text").count("NoisyTraining") == 1


def test_other_numbers_are_refused(bench: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"'x' holds torch.float16"):
        batches.question(job(echo, x=torch.zeros(2).half()), [])
    with pytest.raises(TypeError, match="'x' is a list: tensors and plain values only"):
        batches.question(job(echo, x=[1]), [])


@dataclass(frozen=True)
class Own:
    """A user's own mechanism."""

    scale: float


def test_a_users_own_mechanism_is_refused() -> None:
    with pytest.raises(UserError, match="does not take the mechanism Own"):
        batches.check_mechanisms(job(echo, Own(1.0)).calls)
    batches.check_mechanisms(job(echo, TRAINING).calls)
