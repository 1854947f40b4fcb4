"""The session: what an algorithm sees of the federation, and the only door through which values come.

`ask` brings each client's release, noised by the client itself. `sum` brings sums of bounded shares over a
cohort, noised once. Both post to the ledger before they return. What is neither a release, nor public, nor kept
is a type error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fairveil.data.federation import ClientData
from fairveil.errors import PrivacyError
from fairveil.models import Model
from fairveil.privacy.ledger import FEDERATION, Entry, Ledger
from fairveil.privacy.mechanisms import ClientMechanism, CohortSums, Mechanism
from fairveil.privacy.release import Kept, Plain, Public, Release, Reply, Share
from fairveil.streams import Stream


@dataclass(frozen=True)
class Facts:
    """The public constants of a run."""

    size: np.ndarray  # declared nominal sizes N_i, by client
    group: np.ndarray  # declared group of each client; only the oracle may use it to train
    features: tuple[int, ...]
    classes: int
    parameters: int  # p
    clip_norm: float  # c

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
    """Clients drawn independently at `sample_rate`. The draw is secret, and may be summed once."""

    clients: np.ndarray
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
        return self.rows[int(self.index[client])]


@dataclass(frozen=True)
class Member:
    """One client of a block, as a task sees it."""

    data: ClientData
    model: Model
    inputs: Mapping[str, Plain]
    mechanism: Mechanism | None
    personal: Mapping[str, Tensor]
    key: tuple[int | str, ...]  # names the client's random streams in this request

    def stream(self, purpose: str) -> Stream:
        """Randomness of this client for this request."""
        return Stream(*self.key, purpose)


Task = Callable[[Sequence[Member]], list[Reply]]


@dataclass(frozen=True)
class Call:
    """What one client is asked, besides what all are."""

    client: int
    each: Mapping[str, Plain] = field(default_factory=dict)
    mechanism: Mechanism | None = None
    personal: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One task for many clients. `request` names it within the run and is the root of its random streams."""

    task: Task
    request: str
    shared: Mapping[str, Plain]
    calls: Sequence[Call]


class Engine(Protocol):
    """Where tasks run."""

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The reply of every client of the job, in any order."""


Observe = Callable[[int, str, Mapping[str, float]], None]


class Session:
    """The door. One object serves a whole run; the runner sets `round`.

    Args:
        terms: by unit, as planned.
        observe: takes (client, task, diagnostics) to the metrics table.
    """

    def __init__(
        self, facts: Facts, terms: Mapping[int, Terms], *, model: Model, engine: Engine, ledger: Ledger,
        seed: int, observe: Observe,
    ) -> None:  # fmt: skip
        self.facts, self.terms, self.model = facts, terms, model
        self.round = 0
        self.personal: dict[int, Mapping[str, Tensor]] = {}
        self._engine, self._ledger, self._seed, self._observe = engine, ledger, seed, observe
        self._asked = 0
        self._drawn: dict[str, Cohort] = {}  # the cohorts of this round that have not been summed yet

    def begin(self, number: int) -> None:
        """Start a round (from 1); for the runner."""
        self.round, self._asked = number, 0
        self._drawn.clear()

    def stream(self, purpose: str) -> Stream:
        """Randomness for the server itself, anew each round."""
        return Stream(self._seed, "server", purpose, self.round)

    def initial_model(self, purpose: str = "initial model") -> Tensor:
        """Fresh parameters (p,); the same for the same purpose throughout the run."""
        return self.model.initial(Stream(self._seed, purpose))

    @property
    def federation_terms(self) -> Terms:
        """The terms of what is summed over clients."""
        return self.terms[FEDERATION]

    def cohort(self, sample_rate: float) -> Cohort:
        """Draw every client independently with probability `sample_rate`: a new draw at each call."""
        draw = self._next("cohort")
        drawn = Stream(self._seed, draw).coins(len(self.facts.size), sample_rate)
        self._drawn[draw] = Cohort(drawn.numpy(), sample_rate, draw)
        return self._drawn[draw]

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
            mechanism: made from each client's own terms; None where nothing private may leave.
            shared: inputs that all get; each: inputs of which every client gets its own row.

        Raises:
            TypeError: a client answered with something that has no price.
            PrivacyError: what was released was not planned. No value becomes visible.
        """
        shared, each = shared or {}, each or {}
        if mechanism and not all(int(i) in self.terms for i in clients):
            raise PrivacyError("single clients release nothing here: the plan protects whole clients, see Session.sum")
        calls = [
            Call(
                int(i),
                {name: pick[int(i)] for name, pick in each.items()},
                mechanism(self.terms[int(i)]) if mechanism else None,
                self.personal.get(int(i), {}),
            )
            for i in clients
        ]
        job = Job(task, self._next("ask"), shared, calls)
        replies = dict(self._engine.run(job))
        digest = digest_of(task, shared)
        entries = []
        for call in calls:
            out = replies[call.client].out
            if isinstance(out, Release):
                if call.mechanism is None or out.mechanism != call.mechanism:
                    raise TypeError(f"task {task.__name__}: released by {out.mechanism}, asked {call.mechanism}")
                inputs = digest_of(task, call.each, digest)
                entries.append(Entry(call.client, job.request, call.mechanism, inputs))
            elif isinstance(out, Public):
                self._ledger.declare(job.request, task.__name__, out.reason)
            elif not isinstance(out, Kept):
                raise _unpriced(task, out, "Session.ask takes Release, Public or Kept")
        self._ledger.post(entries)
        self._keep(task, replies)
        return [{} if isinstance(out := replies[c.client].out, Kept) else out.value for c in calls]

    def sum(
        self,
        task: Task,
        cohort: Cohort,
        mechanism: CohortSums,
        *,
        shared: Mapping[str, Plain] | None = None,
    ) -> Mapping[str, Tensor]:
        """Noisy sums of the cohort's shares: one event in the federation's ledger, whoever was drawn.

        Raises:
            TypeError: a client answered with something else than a share of this mechanism.
            PrivacyError: not planned, or a draw summed twice.
        """
        shared = shared or {}
        if self._drawn.get(cohort.draw) is not cohort:
            raise TypeError(
                "only a cohort that this session drew in this round can be summed, and only once: the price is that of "
                "a random draw; put all that is needed of one draw into one CohortSums"
            )
        if cohort.sample_rate != mechanism.sample_rate:
            raise TypeError(f"cohort drawn at {cohort.sample_rate}, mechanism priced at {mechanism.sample_rate}")
        del self._drawn[cohort.draw]
        calls = [Call(int(i), {}, mechanism, self.personal.get(int(i), {})) for i in cohort.clients]
        job = Job(task, self._next("sum"), shared, calls)
        exact, replies = mechanism.zero(), {}
        for client, reply in self._engine.run(job):  # in any order: the sum is exact
            if not isinstance(reply.out, Share) or reply.out.mechanism != mechanism:
                raise _unpriced(task, reply.out, "Session.sum takes a Share of the mechanism it was given")
            mechanism.add(exact, reply.out)
            replies[client] = Reply(Kept(), reply.keep, reply.diagnostics)  # the share itself is let go
        noisy = mechanism.finish(exact, Stream(self._seed, job.request, "noise"))
        self._ledger.post([Entry(FEDERATION, job.request, mechanism, digest_of(task, shared))])
        self._keep(task, replies)
        return noisy

    def _keep(self, task: Task, replies: Mapping[int, Reply]) -> None:
        for client, reply in replies.items():
            if reply.keep is not None:
                self.personal[client] = reply.keep
            if reply.diagnostics:
                self._observe(client, task.__name__, reply.diagnostics)

    def _next(self, what: str) -> str:
        if self.round == 0:
            raise TypeError("start() asks nothing: what is asked of clients belongs to a round")
        self._asked += 1
        return f"round {self.round}, {what} {self._asked}"


def _unpriced(task: Task, out: object, rule: str) -> TypeError:
    return TypeError(
        f"task {task.__name__} answered with {type(out).__name__}, which has no price. {rule}; a number for "
        "the metrics table goes into diagnostics, a client's own state into keep."
    )


def digest_of(task: Task, inputs: Mapping[str, Plain], before: bytes = b"") -> bytes:
    """A digest of a task's name and its inputs."""
    state = hashlib.blake2b(before, digest_size=16)
    state.update(f"{task.__module__}.{task.__qualname__}".encode())
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, Tensor):
            state.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
            state.update(torch.atleast_1d(value.detach()).contiguous().numpy().tobytes())
        else:
            text = value.hex() if isinstance(value, float) else repr(value)
            state.update(f"{name}:{type(value).__name__}:{text}".encode())
    return state.digest()
