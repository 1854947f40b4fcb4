"""The session: what has no price does not come through."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fairveil.data.federation import ClientData, Records
from fairveil.errors import PrivacyError
from fairveil.models import ModelSpec
from fairveil.privacy.ledger import FEDERATION, Ledger
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import MINT, Kept, Public, Reply, digest_values
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Cohort, Facts, Job, Member, Pick, Session, Task, Terms
from fairveil.tasks import bounded_update, local_update

SPEC = ModelSpec("logistic", (2,), 2)  # 6 parameters
FACTS = Facts(np.array([4, 4, 4]), np.array([0, 0, 1]), (2,), 2, 6, 1.0)
ROWS = Records(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1]))


MEMBER = Member(ClientData(ROWS, ROWS), SPEC.build(), {}, None, {}, (0,), MINT)


class InlineEngine:
    """Runs a task here, one client at a time, in the order that is asked for."""

    def __init__(self, backwards: bool = False) -> None:
        self.backwards, self.model = backwards, SPEC.build()

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        for call in reversed(job.calls) if self.backwards else job.calls:
            member = Member(
                ClientData(ROWS, ROWS), self.model, {**job.shared, **call.each}, call.mechanism, call.personal,
                (0, job.request, call.client), MINT,
            )  # fmt: skip
            yield call.client, job.task([member])[0]


def training(terms: Terms) -> NoisyTraining:
    assert terms.size is not None
    return NoisyTraining.epochs(terms.size, 2, 1, clip_norm=1.0, noise_multiplier=terms.noise_multiplier)


def sums(sample_rate: float = 1.0) -> CohortSums:
    return CohortSums((Part("update", (6,), 1.0, 1.0),), sample_rate)


SEEN: list[tuple[int, str, Mapping[str, float]]] = []
PERSONAL: dict[int, Mapping[str, torch.Tensor]] = {}
ANSWERS: list[Any] = []


@pytest.fixture
def make() -> Callable[..., Session]:
    def build(backwards: bool = False, plan: Any = None) -> Session:
        ledger = Ledger(sqlite3.connect(":memory:"))
        terms = {i: Terms(FACTS, 4, 1.0) for i in range(3)} | {FEDERATION: Terms(FACTS, None, 1.0)}
        ledger.set_plan(
            plan or {i: {training(terms[i]): 2} for i in range(3)} | {FEDERATION: {sums(): 2, sums(0.5): 2}}
        )
        SEEN.clear()
        PERSONAL.clear()
        session = Session(
            FACTS, terms, model=SPEC.build(), engine=InlineEngine(backwards), ledger=ledger, seed=0, root="root",
            personal=PERSONAL, observe=lambda *seen: SEEN.append(seen), public_tasks={"answer", "echo"},
        )  # fmt: skip
        session.begin(1)
        return session

    return build


INPUTS = {"model": torch.zeros(6), "learning_rate": 0.1}
PLAIN = INPUTS | {"local_epochs": 1, "batch_size": 2}


def answer(members: Sequence[Member]) -> list[Reply]:
    """Answers with what the test put down, one for each client in turn."""
    replies = [ANSWERS.pop(0) for _ in members]
    return [reply if isinstance(reply, Reply) else Reply(reply) for reply in replies]


def echo(members: Sequence[Member]) -> list[Reply]:
    return [Reply(Public(dict(member.inputs))) for member in members]


def cheaper(members: Sequence[Member]) -> list[Reply]:
    weaker = NoisyTraining.epochs(4, 2, 1, clip_norm=1.0, noise_multiplier=0.01)
    return [Reply(weaker.release(member)[0]) for member in members]


def chatty(members: Sequence[Member]) -> list[Reply]:
    replies = local_update(members)
    for reply, member in zip(replies, members, strict=True):
        reply.out.value["n"] = len(member.data.train)  # type: ignore[union-attr, index]
    return replies


def overwriting(members: Sequence[Member]) -> list[Reply]:
    replies = local_update(members)
    for reply, member in zip(replies, members, strict=True):
        reply.out.value["update"].add_(member.data.train.x.mean())  # type: ignore[union-attr]
    return replies


def answering(*values: Any) -> Task:
    """A task that gives these answers; one value stands for all clients."""
    ANSWERS[:] = values if len(values) > 1 else values * 3
    return answer


# ---- ask -------------------------------------------------------------------------------------------


def test_releases_come_in_order_and_are_posted(make: Callable[..., Session]) -> None:
    session, other = make(), make(backwards=True)
    clients = np.array([2, 0])
    one = session.ask(local_update, clients, mechanism=training, shared=INPUTS)
    two = other.ask(local_update, clients, mechanism=training, shared=INPUTS)
    assert [set(reply) for reply in one] == [{"update"}] * 2
    assert all(torch.equal(a["update"], b["update"]) for a, b in zip(one, two, strict=True))  # type: ignore[arg-type]
    assert [(unit, request) for unit, request, *_ in session._ledger.entries()] == [
        (0, "round 1, ask 1"),
        (2, "round 1, ask 1"),
    ]


@pytest.mark.parametrize("leak", [torch.zeros(6), {"update": torch.zeros(6)}, 3.5, None])
def test_an_unpriced_value_is_a_type_error(make: Callable[..., Session], leak: Any) -> None:
    session = make()
    with pytest.raises(TypeError, match="has no price"):
        session.ask(answering(leak), FACTS.clients, mechanism=training, shared=INPUTS)
    assert session._ledger.entries() == []


def test_a_share_does_not_pass_through_ask(make: Callable[..., Session]) -> None:
    share, _ = sums().share({"update": torch.ones(6)}, MEMBER)
    with pytest.raises(TypeError, match=r"answered with Share, which has no price"):
        make().ask(answering(share), FACTS.clients, shared=INPUTS)


def test_a_release_by_another_mechanism_than_asked_is_refused(make: Callable[..., Session]) -> None:
    with pytest.raises(TypeError, match="released by"):
        make().ask(cheaper, FACTS.clients, mechanism=training, shared=INPUTS)
    with pytest.raises(TypeError, match="released by"):  # or by one where none was asked for
        make().ask(cheaper, FACTS.clients, shared=INPUTS)


def test_less_noise_than_planned_is_refused_before_anything_is_seen(make: Callable[..., Session]) -> None:
    session = make()

    def quieter(terms: Terms) -> NoisyTraining:
        return NoisyTraining.epochs(4, 2, 1, clip_norm=1.0, noise_multiplier=terms.noise_multiplier / 2)

    with pytest.raises(PrivacyError, match="was not planned"):
        session.ask(local_update, FACTS.clients, mechanism=quieter, shared=INPUTS)
    assert session._ledger.entries() == [] and SEEN == []


def test_more_often_than_planned_is_refused(make: Callable[..., Session]) -> None:
    session = make()
    for _ in range(2):
        session.ask(local_update, FACTS.clients, mechanism=training, shared=INPUTS)
    with pytest.raises(PrivacyError, match="planned"):
        session.ask(local_update, FACTS.clients, mechanism=training, shared=INPUTS)


def test_kept_and_public_cost_nothing(make: Callable[..., Session]) -> None:
    session = make()
    kept = session.ask(answering(Reply(Kept(), keep={"w": torch.ones(2)})), FACTS.clients)
    assert kept == [{}, {}, {}] and torch.equal(PERSONAL[1]["w"], torch.ones(2))
    public = session.ask(answering(Public({"size": 4})), FACTS.clients)
    assert public == [{"size": 4}] * 3 and session._ledger.entries() == []


def test_public_values_come_only_from_tasks_that_the_algorithm_names(make: Callable[..., Session]) -> None:
    session = make()
    session._public_tasks = ()
    with pytest.raises(TypeError, match="public_tasks"):
        session.ask(echo, FACTS.clients, shared={"a": 1})


@pytest.mark.parametrize(
    "answers",
    [
        (Kept(), Public({"a": 1}), Kept()),
        (Public({"a": 1}), Public({"b": 1}), Public({"a": 1})),
    ],
)
def test_who_answers_is_itself_a_message(make: Callable[..., Session], answers: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="different things"):
        make().ask(answering(*answers), FACTS.clients)


def test_asked_with_a_mechanism_nobody_stays_silent(make: Callable[..., Session]) -> None:
    with pytest.raises(TypeError, match="every client answers with a Release"):
        make().ask(answering(Kept()), FACTS.clients, mechanism=training, shared=INPUTS)


def test_nothing_travels_beside_what_is_priced(make: Callable[..., Session]) -> None:
    with pytest.raises(TypeError, match=r"\['n', 'update'\] sent"):
        make().ask(chatty, FACTS.clients, mechanism=training, shared=INPUTS)


def test_what_was_released_cannot_be_written_over(make: Callable[..., Session]) -> None:
    with pytest.raises(TypeError, match="wrote into what its mechanism had released"):
        make().ask(overwriting, FACTS.clients, mechanism=training, shared=INPUTS)


def test_a_client_is_asked_once_in_a_request(make: Callable[..., Session]) -> None:
    with pytest.raises(TypeError, match="asked twice"):
        make().ask(local_update, np.array([1, 1]), mechanism=training, shared=INPUTS)


def test_a_task_is_a_function_of_a_module(make: Callable[..., Session]) -> None:
    seen: list[Any] = []

    def peeking(members: Sequence[Member]) -> list[Reply]:
        seen.extend(member.data.train.x for member in members)
        return local_update(members)

    with pytest.raises(TypeError, match="function of a module"):
        make().ask(peeking, FACTS.clients, mechanism=training, shared=INPUTS)
    assert seen == []


def test_a_member_cannot_be_made_up() -> None:
    """A mechanism given other records, or a start of the client's own, would not be what was priced."""
    member = Member(ClientData(ROWS, ROWS), SPEC.build(), INPUTS, None, {}, (0,), MINT)
    with pytest.raises((TypeError, ValueError)):
        replace(member, inputs={"model": torch.ones(6), "learning_rate": 0.1})
    with pytest.raises(TypeError, match="made by the engine"):
        Member(ClientData(ROWS, ROWS), SPEC.build(), INPUTS, None, {}, (0,))


def test_diagnostics_go_to_the_table_and_not_to_the_algorithm(make: Callable[..., Session]) -> None:
    got = make().ask(answering(Reply(Kept(), diagnostics={"norm": 7.0})), np.array([1]))
    assert got == [{}] and SEEN == [(1, "answer, ask 1", {"norm": 7.0})]


def test_start_asks_nothing(make: Callable[..., Session]) -> None:
    session = make()
    session._round, session._stage = 0, ""
    with pytest.raises(TypeError, match="start"):
        session.ask(local_update, FACTS.clients, mechanism=training, shared=INPUTS)


def test_a_client_sees_its_own_row_only(make: Callable[..., Session]) -> None:
    rows = torch.arange(4.0).reshape(2, 2)
    got = make().ask(echo, FACTS.clients, each={"row": Pick(rows, np.array([1, 0, 1]))})
    assert [reply["row"].tolist() for reply in got] == [[2, 3], [0, 1], [2, 3]]  # type: ignore[union-attr]


# ---- sum -------------------------------------------------------------------------------------------


def test_a_sum_is_one_event_whoever_was_drawn(make: Callable[..., Session]) -> None:
    session = make()
    noisy = session.sum(bounded_update, session.cohort(1.0), sums(), shared=PLAIN)
    assert noisy["update"].shape == (6,)
    entries = session._ledger.entries()
    assert [(unit, request) for unit, request, *_ in entries] == [(FEDERATION, "round 1, sum 2")]


def test_an_empty_cohort_is_noise_alone_and_is_posted(make: Callable[..., Session]) -> None:
    session = make()
    cohort = session.cohort(0.5)
    session._drawn[cohort] = np.array([], dtype=int)
    noisy = session.sum(bounded_update, cohort, sums(0.5), shared=PLAIN)
    assert noisy["update"].abs().min() > 0 and len(session._ledger.entries()) == 1


def test_who_was_drawn_is_not_said(make: Callable[..., Session]) -> None:
    assert set(vars(make().cohort(0.5))) == {"sample_rate", "draw"}


def test_sums_do_not_depend_on_the_order_of_arrival(make: Callable[..., Session]) -> None:
    one, two = make(), make(backwards=True)
    a = one.sum(bounded_update, one.cohort(1.0), sums(), shared=PLAIN)
    b = two.sum(bounded_update, two.cohort(1.0), sums(), shared=PLAIN)
    assert torch.equal(a["update"], b["update"])


def test_a_draw_may_be_summed_once(make: Callable[..., Session]) -> None:
    session = make()
    cohort = session.cohort(0.5)
    session.sum(bounded_update, cohort, sums(0.5), shared=PLAIN)
    with pytest.raises(TypeError, match="only once"):
        session.sum(bounded_update, cohort, sums(0.5), shared=PLAIN)


def test_a_cohort_made_by_hand_or_of_an_earlier_round_is_refused(make: Callable[..., Session]) -> None:
    """What is not a random draw of this round would be claimed amplification for nothing."""
    session = make()
    drawn = session.cohort(0.5)
    everyone = session.cohort(1.0)
    for cohort, rate in ((Cohort(0.5, "mine"), 0.5), (replace(everyone, sample_rate=0.5), 0.5)):
        with pytest.raises(TypeError, match="this session drew"):  # the second: drawn at 1, to be priced at 0.5
            session.sum(bounded_update, cohort, sums(rate), shared=PLAIN)
    session.begin(2)
    with pytest.raises(TypeError, match="in this round"):
        session.sum(bounded_update, drawn, sums(0.5), shared=PLAIN)
    assert session._ledger.entries() == []


def test_a_cohort_is_priced_at_the_rate_it_was_drawn_at(make: Callable[..., Session]) -> None:
    session = make()
    with pytest.raises(TypeError, match=r"drawn at 1\.0"):
        session.sum(bounded_update, session.cohort(1.0), sums(0.5), shared=PLAIN)


def test_only_shares_of_this_mechanism_are_summed(make: Callable[..., Session]) -> None:
    session = make()
    foreign, _ = sums(0.5).share({"update": torch.ones(6)}, MEMBER)
    for leak in (Kept(), Public({"update": torch.ones(6)}), foreign, torch.ones(6)):
        with pytest.raises(TypeError, match="has no price"):
            session.sum(answering(leak), session.cohort(1.0), sums(), shared=PLAIN)
    assert session._ledger.entries() == []


class Measuring(CohortSums):
    """Has something to say about a sum."""

    def finish(self, exact: Any, stream: Any, silent: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        return super().finish(exact, stream, silent)[0], {"silent": float(silent)}


def test_what_is_measured_of_a_sum_goes_to_the_table_of_the_federation(make: Callable[..., Session]) -> None:
    """Once the sum is in the ledger, and not to the algorithm. CohortSums itself has nothing to say."""
    mechanism = Measuring(sums().parts, 1.0)
    session = make(plan={FEDERATION: {mechanism: 1, sums(): 1}})
    noisy = session.sum(bounded_update, session.cohort(1.0), mechanism, shared=PLAIN)
    assert set(noisy) == {"update"}
    assert [seen for seen in SEEN if seen[0] == FEDERATION] == [(FEDERATION, "bounded_update, sum 2", {"silent": 0.0})]
    SEEN.clear()
    with pytest.raises(PrivacyError):  # planned once
        session.sum(bounded_update, session.cohort(1.0), mechanism, shared=PLAIN)
    assert SEEN == []
    session.sum(bounded_update, session.cohort(1.0), sums(), shared=PLAIN)
    assert {client for client, *_ in SEEN} == {0, 1, 2}


# ---- rounds and digests ----------------------------------------------------------------------------


def test_a_round_does_not_come_again(make: Callable[..., Session]) -> None:
    session = make()
    session.begin(2)
    for number in (2, 1, 0):
        with pytest.raises(PrivacyError, match="cannot begin again"):
            session.begin(number)


def test_other_inputs_get_other_noise(make: Callable[..., Session]) -> None:
    """The same request with another learning rate must not reuse the noise, or two answers would cancel it."""
    noise = []
    for rate in (0.1, 0.2):
        noisy = make().ask(local_update, np.array([0]), mechanism=training, shared=INPUTS | {"learning_rate": rate})
        noise.append(noisy[0]["update"])
    assert not torch.allclose(noise[1], 2 * noise[0], rtol=0.1)  # type: ignore[arg-type, operator]


def digest(
    session: Session, task: Task = echo, mechanism: Any = None, shared: Any = None, own: Any = None, kept: Any = None
) -> bytes:
    """Of what client 0 is asked."""
    PERSONAL[0] = kept or {}
    each = {name: Pick.same(value, FACTS) for name, value in (own or {}).items()}
    return session._job("ask", task, np.array([0]), [mechanism], shared or {}, each).calls[0].digest


def test_the_digest_tells_inputs_apart(make: Callable[..., Session]) -> None:
    session = make()
    tensors: list[dict[str, Any]] = [
        {"a": torch.tensor([1.0])},
        {"a": torch.tensor([[1.0]])},
        {"a": torch.tensor(1.0)},
        {"a": torch.tensor([1.0], dtype=torch.float64)},
        {"a": torch.tensor([1.0000001])},
        {"a": torch.tensor([1, 2, 3, 4]).view(2, 2)},
        {"a": torch.tensor([1, 2, 3, 4]).view(2, 2).t()},
        {"b": torch.tensor([True])},
        {"b": torch.tensor([], dtype=torch.bool)},
        {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])},
    ]
    plain: list[dict[str, Any]] = [
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"b": 1},
        {"a": "x", "b": "y"},
        {"a": "x input b str 'y'"},
    ]
    digests = [digest(session), digest(session, local_update)]
    digests += [digest(session, mechanism=mechanism) for mechanism in (sums(), sums(0.5), training(session.terms[0]))]
    digests += [digest(session, shared=given) for given in tensors + plain]
    digests += [digest(session, own=given) for given in tensors]
    digests += [digest(session, kept=given) for given in tensors]
    digests += [digest(session, mechanism=sums(), shared=given) for given in tensors]
    digests += [digest(session, own=tensors[0], kept=tensors[0]), digest(session, shared=tensors[0], own=tensors[0])]
    assert len(set(digests)) == len(digests)
    assert digest(session) == digests[0] and digest(session, own=tensors[6]) == digest(
        session, own={"a": tensors[6]["a"].contiguous()}
    )


@pytest.mark.parametrize("value", [np.zeros(3), [torch.zeros(1)], None, {"a": 1}])
def test_an_input_that_cannot_be_told_apart_is_refused(make: Callable[..., Session], value: Any) -> None:
    with pytest.raises(TypeError, match="tensors and plain values only"):
        make().ask(echo, FACTS.clients, shared={"a": value})


def test_a_sum_is_named_by_everything_that_went_into_it(make: Callable[..., Session]) -> None:
    """Also with nobody drawn: the noise of one sum must not be that of another."""
    digests = []
    for shared, drawn, rate in ((PLAIN, [], 0.5), (PLAIN, [0], 0.5), (PLAIN, [0, 1], 0.5), (PLAIN, [], 1.0),
                                (PLAIN | {"learning_rate": 0.2}, [], 0.5)):  # fmt: skip
        session = make()
        cohort = session.cohort(rate)
        session._drawn[cohort] = np.array(drawn, dtype=int)
        session.sum(bounded_update, cohort, sums(rate), shared=shared)
        digests += [inputs for *_, inputs, _ in session._ledger.entries()]
    assert len(set(digests)) == len(digests) == 5


def test_the_ledger_holds_the_digest_of_what_was_released(make: Callable[..., Session]) -> None:
    session = make()
    values = session.ask(local_update, FACTS.clients, mechanism=training, shared=INPUTS)
    assert [reply for *_, reply in session._ledger.entries()] == [digest_values(value) for value in values]


def test_what_a_client_keeps_is_a_memory_of_its_own(make: Callable[..., Session]) -> None:
    """A view would keep alive, and could be changed through, all that came with it."""
    block = torch.zeros(3, 2)
    make().ask(answering(*(Reply(Kept(), keep={"w": row}) for row in block)), FACTS.clients)
    block += 1
    assert [PERSONAL[client]["w"].tolist() for client in range(3)] == [[0, 0]] * 3
    assert PERSONAL[0]["w"].untyped_storage().nbytes() == 8


def test_equal_mechanisms_and_rows_are_one_object(make: Callable[..., Session]) -> None:
    """So that they travel once for all clients that have them."""
    session, rows = make(), Pick(torch.zeros(2, 3), np.array([1, 0, 1]))
    mechanisms = [training(session.terms[client]) for client in range(3)]
    calls = session._job("ask", echo, FACTS.clients, mechanisms, {}, {"row": rows}).calls
    assert all(call.mechanism is mechanisms[0] for call in calls)
    assert calls[0].each["row"] is calls[2].each["row"] is not calls[1].each["row"]
