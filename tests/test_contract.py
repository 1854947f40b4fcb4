"""The contract suite passes on all that is registered, and fails on what breaks it."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from fairveil.algorithms import ALGORITHMS
from fairveil.algorithms.base import LocalTraining
from fairveil.algorithms.global_ import Global, State
from fairveil.contract import CLAUSES, CheckResult, check_algorithm
from fairveil.errors import UserError
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.release import Kept, Reply
from fairveil.session import Facts, Member, Session, Terms


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_registered_algorithm_keeps_the_contract(name: str) -> None:
    results = check_algorithm(name)
    assert [result.what for result in results if not result.passed] == [], results
    assert len(results) == len(CLAUSES)
    posted = next(result for result in results if "inside its plan" in result.what)
    assert posted.detail == "posted equals planned"  # all take part in every round, or the federation does


# ---- algorithms that break it ----------------------------------------------------------------------


class Silent(Global):
    """Declares half of what it releases."""

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter({mechanism: count // 2 for mechanism, count in super().releases(terms).items()})


class Eager(Global):
    """Asks in start()."""

    def start(self, session: Session) -> State:
        return self.round(session, super().start(session))


class Forgetful(Global):
    """Keeps something outside its state, so a resumed run differs."""

    memory: ClassVar[list[Tensor]] = []

    def start(self, session: Session) -> State:
        self.memory.clear()
        return super().start(session)

    def round(self, session: Session, state: State) -> State:
        self.memory.append(state.model)
        return State(super().round(session, state).model + 0.01 * torch.stack(self.memory).mean(dim=0))


class Moody(Global):
    """Uses the global generator."""

    def round(self, session: Session, state: State) -> State:
        return State(super().round(session, state).model + 0.01 * torch.randn(state.model.shape))


def leak(members: Sequence[Member]) -> list[Reply]:
    """Sends the mean of the client's records as it is."""
    return [Reply({"mean": member.data.train.x.mean()}) for member in members]  # type: ignore[arg-type]


class Leaky(Global):
    def round(self, session: Session, state: State) -> State:
        session.ask(leak, session.facts.clients)
        return super().round(session, state)


@dataclass(frozen=True)
class Nothing:
    count: int


def learn_alone(members: Sequence[Member]) -> list[Reply]:
    """One plain step on the client's own records; nothing leaves."""
    replies = []
    for member in members:
        weights = member.personal.get("model", torch.zeros(member.model.parameters))
        train = member.data.train
        weights = weights - 0.5 * member.model.gradient(weights, train.x, train.y)
        replies.append(Reply(Kept(), keep={"model": weights}))
    return replies


class Alone(LocalTraining[Nothing]):
    """Personal models that are never released: sound, and free."""

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter()

    def start(self, session: Session) -> Nothing:
        return Nothing(0)

    def round(self, session: Session, state: Nothing) -> Nothing:
        session.ask(learn_alone, session.facts.clients)
        return Nothing(state.count + 1)

    def serve(self, facts: Facts, state: Nothing) -> Literal["personal"]:
        return "personal"


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above as a module that "own:Name" finds; worker processes are not needed for most clauses."""
    module = types.ModuleType("own")
    vars(module).update({c.__name__: c for c in (Silent, Eager, Forgetful, Moody, Leaky, Alone)})
    monkeypatch.setitem(sys.modules, "own", module)


def failed(name: str) -> dict[str, CheckResult]:
    return {result.what: result for result in check_algorithm(name) if not result.passed}


@pytest.mark.parametrize(
    ("name", "clause", "detail"),
    [
        ("own:Silent", "what it posts stays inside its plan", "3 planned"),
        ("own:Eager", "it is priced within its budget, and runs", "start() asks nothing"),
        ("own:Forgetful", "a crash between ledger and checkpoint changes nothing", "differ"),
        ("own:Moody", "the same seed gives the same run", "differ"),
        ("own:Leaky", "it is priced within its budget, and runs", "has no price"),
    ],
)
def test_a_broken_algorithm_is_found_out(name: str, clause: str, detail: str) -> None:
    found = failed(name)
    assert clause in found, found
    assert detail in found[clause].detail


def test_personal_models_that_nobody_sees_cost_nothing() -> None:
    found = failed("own:Alone")
    assert set(found) <= {"workers and block size change nothing"}, found  # these classes live in this process only


def test_a_name_that_is_nothing_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="not known"):
        check_algorithm("gobal")
