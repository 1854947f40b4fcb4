"""The session: what an algorithm sees of the federation, and the only door through which values come.

`ask` brings each client's release, noised by the client itself. `sum` brings sums of bounded shares over a
cohort, noised once. Both post to the ledger before they return. What is neither a release, nor public, nor kept
is a type error.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol, cast

import numpy as np
from torch import Tensor

from fairveil.data.federation import ClientData
from fairveil.errors import PrivacyError, RunFault
from fairveil.models import Model
from fairveil.privacy.accounting import Adjacency
from fairveil.privacy.ledger import FEDERATION, Entry, Ledger
from fairveil.privacy.mechanisms import ClientMechanism, Mechanism, SumMechanism, canonical
from fairveil.privacy.release import MINT, Kept, Plain, Public, Release, Reply, Share, digest_values
from fairveil.streams import Stream

Unit = Literal["record", "client", "metric"]  # what a guarantee protects


@dataclass(frozen=True)
class Facts:
    """The public constants of a run."""

    size: np.ndarray  # declared nominal sizes N_i, by client
    group: np.ndarray  # declared group of each client; only the oracle may use it to train
    features: tuple[int, ...]
    classes: int
    parameters: int  # p
    clip_norm: float  # c
    adjacency: Adjacency = "add-remove"
    unit: Unit = "record"
    public: int = 0  # records that the server holds
    several: bool = False  # whether a record may have several of the classes at once

    @cached_property
    def clients(self) -> np.ndarray:
        """All clients, by number."""
        return np.arange(len(self.size))


@dataclass(frozen=True)
class Terms:
    """What the releases of one unit are made of: the facts, its own size, and the noise solved for it.

    `size` is None for the federation as a whole.
    """

    facts: Facts
    size: int | None
    noise_multiplier: float  # z


@dataclass(frozen=True)
class Cohort:
    """Clients drawn independently at `sample_rate`; it may be summed once.

    Who was drawn, and how many, is secret: it does not say.
    """

    sample_rate: float
    draw: str


@dataclass(frozen=True)
class Pick:
    """Client i gets rows[index[i]] and no other."""

    rows: Tensor  # (m, ...)
    index: np.ndarray  # (clients,)

    @classmethod
    def same(cls, model: Tensor, facts: Facts) -> Pick:
        """The same row for every client."""
        return cls(model.unsqueeze(0), np.zeros(len(facts.size), int))

    @classmethod
    def own(cls, models: Tensor) -> Pick:
        """Row i for client i."""
        return cls(models, np.arange(len(models)))

    def __getitem__(self, client: int) -> Tensor:
        return self._rows[int(self.index[client])]

    @cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        return self.rows.unbind()


@dataclass(frozen=True)
class Offer:
    """Every client gets all rows, takes the one that suits its own records best, and does not say which."""

    rows: Tensor  # (m, ...)


@dataclass(frozen=True)
class Member:
    """One client of a block, as a task sees it. What it holds is read, never written.

    Engines make members. A mechanism reads its records and its start from the member it is given, so a member made
    up by a task would let it feed a mechanism what the price does not cover.
    """

    data: ClientData
    model: Model
    inputs: Mapping[str, Plain]
    mechanism: Mechanism | None
    personal: Mapping[str, Tensor]
    key: tuple[int | str, ...]  # names the client's random streams in this request
    mint: InitVar[object] = None

    def __post_init__(self, mint: object) -> None:
        if mint is not MINT:
            raise TypeError("a Member is made by the engine: a task works with the members it is given")

    def stream(self, purpose: str) -> Stream:
        """Randomness of this client for this request, for the task."""
        return Stream(*self.key, "task", purpose)

    def noise(self) -> Stream:
        """Randomness of this client for this request, for its mechanism alone."""
        return Stream(*self.key, "mechanism")


Task = Callable[[Sequence[Member]], list[Reply]]


@dataclass(frozen=True)
class Call:
    """What one client is asked, besides what all are."""

    client: int
    each: Mapping[str, Plain] = field(default_factory=dict)
    mechanism: Mechanism | None = None
    personal: Mapping[str, Tensor] = field(default_factory=dict)
    digest: bytes = b""  # of all that decides the reply, besides the client's records and the request


@dataclass(frozen=True)
class Job:
    """One task for many clients. Request, client and digest name a client's random streams within the run."""

    task: Task
    request: str
    shared: Mapping[str, Plain]
    calls: Sequence[Call]
    digest: bytes = b""  # of the task and of what all get


class Engine(Protocol):
    """Where tasks run."""

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The reply of every client of the job, in any order; without those that it may do without."""


Observe = Callable[[int, str, Mapping[str, float]], None]
# Takes a job and what came of it, by client, as the algorithm sees it. A sum is one call, to the FEDERATION.
Witness = Callable[[Job, Mapping[int, Mapping[str, Plain]]], None]


class Session:
    """The door. One object serves a whole run; the runner begins the rounds.

    Args:
        terms: by unit, as planned.
        public_tasks: names of the tasks that may answer with public values; the statement gives their reasons.
        seed: of the run; the root of what may be the same in other runs (the first model).
        root: of all other randomness. It names the whole run (seed, config, data), so that no two runs share noise:
            two budgets under one noise would give the data away.
        personal: by client, as the runner saves it.
        observe: takes (client, task, diagnostics) to the metrics table.
        public: the records that the server holds (n, *features), without labels; None: none.
        stage: what requests are named by before a round begins; while it is empty nothing can be asked.
        witness: sees all that the algorithm sees, when it sees it: for an audit.
    """

    def __init__(
        self, facts: Facts, terms: Mapping[int, Terms], *, model: Model, engine: Engine, ledger: Ledger,
        seed: int, root: str, personal: dict[int, Mapping[str, Tensor]], observe: Observe,
        public_tasks: Container[str] = (), public: Tensor | None = None, stage: str = "",
        witness: Witness = lambda job, values: None,
    ) -> None:  # fmt: skip
        self.facts, self.terms, self.model = facts, terms, model
        self._engine, self._ledger, self._observe, self._personal = engine, ledger, observe, personal
        self._seed, self._root, self._public_tasks, self._public = seed, root, public_tasks, public
        self._witness = witness
        self._round = self._asked = 0
        self._stage = stage
        self._drawn: dict[Cohort, np.ndarray] = {}  # who is in the cohorts of this round that are not yet summed

    @property
    def round(self) -> int:
        """The number of this round, from 1; 0 in start()."""
        return self._round

    def begin(self, number: int) -> None:
        """Start a round; for the runner. A round that is over does not come again."""
        if number <= self._round:
            raise PrivacyError(f"round {number} cannot begin again: its requests have been answered")
        self._round, self._asked, self._stage = number, 0, f"round {number}"
        self._drawn.clear()

    def stream(self, purpose: str) -> Stream:
        """Randomness for the server itself, anew each round."""
        return Stream(self._root, "server", purpose, self.round)

    def initial_model(self, purpose: str = "initial model") -> Tensor:
        """Fresh parameters (p,); the same for the same seed and purpose, in this run and others."""
        return self.model.initial(Stream(self._seed, purpose))

    @property
    def public(self) -> Tensor:
        """The public records of the server (n, *features), in an order drawn by the seed."""
        if self._public is None:
            raise TypeError("the server holds no public records: an algorithm that needs some says so (needs_public)")
        return self._public

    @property
    def federation_terms(self) -> Terms:
        """The terms of what is summed over clients."""
        if FEDERATION not in self.terms:
            raise PrivacyError("nothing is summed over clients here: the plan protects each client's records by itself")
        return self.terms[FEDERATION]

    def cohort(self, sample_rate: float) -> Cohort:
        """Draw every client independently with probability `sample_rate`: a new draw at each call."""
        cohort = Cohort(sample_rate, self._next("cohort"))
        self._drawn[cohort] = Stream(self._root, cohort.draw).coins(len(self.facts.size), sample_rate).numpy()
        return cohort

    def ask(
        self,
        task: Task,
        clients: np.ndarray,
        *,
        mechanism: Callable[[Terms], ClientMechanism] | None = None,
        shared: Mapping[str, Plain] | None = None,
        each: Mapping[str, Pick] | None = None,
    ) -> list[Mapping[str, Plain]]:
        """What each client releases, in the order of `clients`.

        Args:
            mechanism: made from each client's own terms. With one, every client must release by it; without one, all
                keep everything to themselves, or all answer with public values.
            shared: inputs that all get.
            each: inputs of which every client gets its own row.

        Raises:
            TypeError: a client answered with something that has no price, or did not answer as the others.
            PrivacyError: what was released was not planned. No value becomes visible.
        """
        if mechanism and not all(int(i) in self.terms for i in clients):
            raise PrivacyError("single clients release nothing here: the plan protects whole clients, see Session.sum")
        mechanisms = [mechanism(self.terms[int(i)]) if mechanism else None for i in clients]
        job = self._job("ask", task, clients, mechanisms, shared or {}, each or {})
        # one that was answered before, by all or by some, is answered by the same now: later requests depend on whom
        before = self._ledger.units(job.request)
        again = [call for call in job.calls if call.client in before] if before else job.calls
        replies = dict(self._engine.run(replace(job, calls=again)))
        if before - replies.keys():
            raise RunFault(f"{job.request} was answered before by clients that do not answer now: {before}")
        answered = [call for call in job.calls if call.client in replies]
        outs = [replies[call.client].out for call in answered]
        values = dict(zip((call.client for call in answered), self._checked(job, answered, outs), strict=True))
        self._ledger.post(
            [
                Entry(call.client, job.request, out.mechanism, call.digest, out.digest)
                for call, out in zip(answered, outs, strict=True)
                if isinstance(out, Release)
            ]
        )
        self._keep(job, replies)
        self._witness(job, values)
        return [values[c.client] if c.client in values else _silence(job, c, values) for c in job.calls]

    def sum(
        self,
        task: Task,
        cohort: Cohort,
        mechanism: SumMechanism,
        *,
        shared: Mapping[str, Plain] | None = None,
    ) -> Mapping[str, Tensor]:
        """Noisy sums of the cohort's shares: one event in the federation's ledger, whoever was drawn.

        Raises:
            TypeError: a client answered with something else than a share of this mechanism; a draw summed twice.
            PrivacyError: not planned. No value becomes visible.
            RunFault: so few clients answered that what they sent may not be seen.
        """
        if cohort not in self._drawn:
            raise TypeError(
                "only a cohort that this session drew in this round can be summed, and only once: the price is that of "
                "a random draw; put all that is needed of one draw into one mechanism"
            )
        if cohort.sample_rate != mechanism.asked:
            raise TypeError(f"cohort drawn at {cohort.sample_rate}, the mechanism asks at {mechanism.asked}")
        if mechanism.noised_by and mechanism.noised_by.clients != len(self.facts.size):
            raise TypeError(f"{len(self.facts.size)} clients cannot make the noise of {mechanism.noised_by.clients}")
        clients = self._drawn.pop(cohort)
        job = self._job("sum", task, clients, [mechanism] * len(clients), shared or {}, {})
        exact, replies = mechanism.zero(), {}
        for client, reply in self._engine.run(job):  # in any order: the sum is exact
            if not isinstance(reply.out, Share) or reply.out.mechanism != mechanism:
                raise _unpriced(task, reply.out, "Session.sum takes a Share of the mechanism it was given")
            mechanism.add(exact, reply.out)
            replies[client] = Reply(Kept(), reply.keep, reply.diagnostics)  # the share itself is let go
        # without personal state: on a federation the server has none of it, and the noise must be the same
        before = mechanism_digest(mechanism, job.digest)
        own = [digest_values(call.each, before=before) for call in job.calls]
        asked = b"".join([job.digest, *own])
        inputs = digest_values({"mechanism": canonical(mechanism)}, before=asked)
        stream = Stream(self._root, job.request, "noise", inputs.hex())
        noisy, diagnostics = mechanism.finish(exact, stream, len(job.calls) - len(replies))
        self._ledger.post([Entry(FEDERATION, job.request, mechanism, inputs, digest_values(noisy))])
        self._keep(job, {**replies, FEDERATION: Reply(Kept(), diagnostics=diagnostics)})
        self._witness(replace(job, calls=[Call(FEDERATION, mechanism=mechanism)]), {FEDERATION: noisy})
        return noisy

    def _job(
        self, what: str, task: Task, clients: np.ndarray, mechanisms: Sequence[Mechanism | None],
        shared: Mapping[str, Plain], each: Mapping[str, Pick],
    ) -> Job:  # fmt: skip
        """The job with every client's digest, taken before any task has touched an input."""
        if "<locals>" in task.__qualname__:
            raise TypeError(
                f"task {task.__qualname__} must be a function of a module: it travels, and sees its members only"
            )
        if len(set(clients.tolist())) < len(clients):
            raise TypeError("a client is asked twice in one request: its second answer would be an unpriced one")
        digest = job_digest(task, shared)  # once for all clients
        alike: dict[Mechanism | None, tuple[Mechanism | None, bytes]] = {}
        calls = []
        for client, given in zip(clients.tolist(), mechanisms, strict=True):
            if given not in alike:
                alike[given] = given, mechanism_digest(given, digest)
            mechanism, before = alike[given]  # equal ones are one object, which travels once
            own = {name: pick[client] for name, pick in each.items()}
            kept = self._personal.get(client, {})
            calls.append(Call(client, own, mechanism, kept, digest_values(own, kept, before=before)))
        return Job(task, self._next(what), shared, calls, digest)

    def _checked(self, job: Job, calls: Sequence[Call], outs: Sequence[object]) -> list[Mapping[str, Plain]]:
        """The values of replies that all have a price, or all need none.

        Who releases and who does not would itself be a message, so clients answer alike.
        """
        task, values = job.task, []
        for call, out in zip(calls, outs, strict=True):
            if isinstance(out, Release):
                if out.mechanism != call.mechanism:
                    raise TypeError(f"task {task.__name__}: released by {out.mechanism}, asked {call.mechanism}")
                if set(out.value) != set(out.mechanism.outputs):
                    raise TypeError(f"task {task.__name__}: {sorted(out.value)} sent, {out.mechanism.outputs} priced")
                if digest_values(out.value) != out.digest:
                    raise TypeError(f"task {task.__name__} wrote into what its mechanism had released")
            elif call.mechanism is not None:
                raise _unpriced(task, out, "asked with a mechanism, every client answers with a Release by it")
            elif isinstance(out, Public):
                if task.__name__ not in self._public_tasks:
                    raise TypeError(f"task {task.__name__} is not among the algorithm's public_tasks, with its reason")
            elif not isinstance(out, Kept):
                raise _unpriced(task, out, "asked without a mechanism, a client answers with Kept or Public")
            values.append({} if isinstance(out, Kept) else out.value)
        if len({frozenset(value) for value in values}) > 1:
            raise TypeError(f"task {task.__name__}: clients answered with different things; that itself says something")
        return values

    def _keep(self, job: Job, replies: Mapping[int, Reply]) -> None:
        asked = f"{job.task.__name__}, {job.request.partition(', ')[2]}"  # a task may be asked twice in a round
        for client, reply in replies.items():
            if reply.keep is not None:
                # clones: the memory that it came in holds the client's update as well, and would stay
                self._personal[client] = {name: value.clone() for name, value in reply.keep.items()}
            if reply.diagnostics:
                self._observe(client, asked, reply.diagnostics)

    def _next(self, what: str) -> str:
        if not self._stage:
            raise TypeError("start() asks nothing: what is asked of clients belongs to a round")
        self._asked += 1
        return f"{self._stage}, {what} {self._asked}"


def job_digest(task: Task, shared: Mapping[str, Plain]) -> bytes:
    """Of the task and of what all clients get."""
    return digest_values({"task": f"{task.__module__}.{task.__qualname__}"}, shared)


def mechanism_digest(mechanism: Mechanism | None, before: bytes) -> bytes:
    """Of the mechanism too. With a client's own inputs and its personal state this is the digest of a call."""
    return digest_values({"mechanism": canonical(mechanism) if mechanism else ""}, before=before)


def _silence(job: Job, call: Call, others: Mapping[int, Mapping[str, Plain]]) -> Mapping[str, Plain]:
    """What stands for the answer of a client that gave none, where the engine lets a run go on without it.

    Nothing came from it, so nothing is posted, and what stands here is a function of what it was asked.
    """
    if call.mechanism is not None:
        return cast(ClientMechanism, call.mechanism).nothing({**job.shared, **call.each})
    if any(others.values()):
        raise RunFault(f"client {call.client} did not answer {job.request}, and nothing public can stand for it")
    return {}


def _unpriced(task: Task, out: object, rule: str) -> TypeError:
    return TypeError(
        f"task {task.__name__} answered with {type(out).__name__}, which has no price here: {rule}. A number for "
        "the metrics table goes into diagnostics, a client's own state into keep."
    )
