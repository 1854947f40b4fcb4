"""The engine of one machine: tasks run here, or in persistent worker processes, one torch thread each.

A client's reply depends on the run, the request, its inputs and the client alone, so neither the number of workers
nor the size of a block changes a result. Workers come from a fork server that has torch loaded and no database
open; they ignore Ctrl-C (the runner decides) and die with their parent.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from fairveil.data.federation import ClientData, Federation, Source, side_by_side
from fairveil.engine.messages import Message, packed, receive
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.release import MINT, Release, Reply
from fairveil.processes import end_with_parent, keep_memory, start
from fairveil.session import Call, Job, Member, Offer, Pick

CACHED_BYTES = 1 << 30  # of loaded records that one process keeps; the rest is loaded anew each time
BLOCK = 8  # clients, where nobody says
MOMENT = 0.02  # seconds for which replies are put together


class Bench:
    """One process's work place: the model, and the clients' data as far as it is cached."""

    def __init__(self, source: Source, spec: ModelSpec, root: str, block: int | None) -> None:
        self.source, self.model, self.root = source, spec.build(), root
        self.block = block or BLOCK
        self._tensors = _tensors(self.model.module)  # held, so that no other takes the identity of one that is gone
        self._untouched = _state(self._tensors)
        self._cache: dict[int, ClientData] = {}
        self._cached_bytes = 0
        self._cached_storages: set[int] = set()  # clients may share one, a common test set say: it counts once

    def perform(self, job: Job) -> Iterator[list[tuple[int, Reply]]]:
        """The replies of the job's clients, block by block."""
        for first in range(0, len(job.calls), self.block):
            calls = job.calls[first : first + self.block]
            data = self._data([call.client for call in calls])
            members = [self._member(job, *pair) for pair in zip(calls, data, strict=True)]
            held = [tensor for member in members for tensor in _held(member)]
            versions = [tensor._version for tensor in held]
            replies = job.task(members)
            if versions != [tensor._version for tensor in held]:
                raise TypeError(
                    f"task {job.task.__name__} wrote into its inputs, its client's records or personal state in place: "
                    "they are shared with others; work on a clone"
                )
            if self._untouched != _state(_tensors(self.model.module)):
                raise TypeError(
                    f"task {job.task.__name__}: the model has changed a parameter or buffer of its own, which carries "
                    "one client's records to the next at no price; keep no running values in it"
                )
            whole = isinstance(replies, list) and len(replies) == len(calls)
            if not whole or not all(isinstance(reply, Reply) for reply in replies):
                names = [type(reply).__name__ for reply in replies] if isinstance(replies, list) else type(replies)
                raise TypeError(
                    f"task {job.task.__name__} must return one Reply for each client of its block ({len(calls)}), in a "
                    f"list; it returned {names}"
                )
            for member, reply in zip(members, replies, strict=True):
                if isinstance(reply.out, Release) and reply.out.key != member.key:
                    raise TypeError(
                        f"task {job.task.__name__} answered for one client with the release of another, of which the "
                        "other's ledger would say nothing"
                    )
            yield [(call.client, reply) for call, reply in zip(calls, replies, strict=True)]

    def _member(self, job: Job, call: Call, data: ClientData) -> Member:
        key = (self.root, job.request, call.client, call.digest.hex())
        inputs, personal = {**job.shared, **call.each}, dict(call.personal)  # a task may change its dictionaries
        return Member(data, self.model, inputs, call.mechanism, personal, key, MINT)

    def _data(self, clients: Sequence[int]) -> list[ClientData]:
        """What these clients hold. Those that are loaded together lie side by side, as they will train together."""
        missing = [client for client in clients if client not in self._cache]
        loaded = {client: self.source.load(client) for client in missing}
        if len(missing) > 1 and not any(_shared(data.train.x) for data in loaded.values()):
            trains = side_by_side([data.train for data in loaded.values()])
            loaded = {c: replace(data, train=train) for (c, data), train in zip(loaded.items(), trains, strict=True)}
        found = [self._cache[client] if client in self._cache else loaded[client] for client in clients]
        for client, data in loaded.items():
            storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, _records(data))}
            more = sum(size for address, size in storages.items() if address not in self._cached_storages)
            if self._cached_bytes + more < CACHED_BYTES:
                self._cache[client] = data
                self._cached_bytes += more
                self._cached_storages |= storages.keys()
        return found


def _shared(tensor: Tensor) -> bool:
    """Whether it is part of something larger, of which a copy would take up memory."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _records(data: ClientData) -> tuple[Tensor, ...]:
    return data.train.x, data.train.y, data.test.x, data.test.y


def _held(member: Member) -> list[Tensor]:
    """All tensors that a task is given with a member."""
    values = (*_records(member.data), *member.inputs.values(), *member.personal.values())
    return [value for value in values if isinstance(value, Tensor)]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _state(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each has been written in place."""
    return [(id(tensor), tensor._version) for tensor in tensors]


class LocalEngine:
    """Runs jobs on this machine.

    Args:
        root: of the random streams of all members.
        workers: processes, one for each core if None; 1 runs everything in this one.
        block: clients that a task sees at once.
    """

    measures = True  # a simulation sees what its clients measure

    def __init__(
        self,
        federation: Federation,
        spec: ModelSpec,
        *,
        root: str,
        workers: int | None = None,
        block: int | None = None,
    ) -> None:
        self.workers = min(workers or usable_cores(), federation.clients)
        self._bench = (federation, spec, root, block)
        self._inline: Bench | None = None
        self._team: list[_Worker] = []

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # also here: sums must come out the same as in a worker
        if self.workers == 1:
            self._inline = Bench(*self._bench)
        else:
            self._hire()
        gc.collect()
        gc.freeze()  # or all modules are looked through for garbage every few rounds, a tenth of a second each time
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dismiss()
        self._inline = None
        gc.unfreeze()
        torch.set_num_threads(self._threads)

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The reply of every client, as blocks finish.

        Raises:
            RunFault: a worker process died.
        """
        if self._inline:
            for block in self._inline.perform(job):
                yield from block
            return
        if job.task.__module__ == "__main__":
            raise UserError(
                f"task {job.task.__name__} is defined in the script itself.",
                f"{self.workers} worker processes must import it, and a script cannot be imported.",
                "move it to a module of its own, or engine.workers = 1",
            )
        self._hire()
        busy: dict[Any, _Worker] = {}
        try:
            parts = []
            for number, worker in enumerate(self._team):  # a client stays with its worker, which has its data
                calls = [call for call in job.calls if call.client % self.workers == number]
                if calls:
                    parts.append((worker, replace(job, calls=calls)))
            with packed(*(part for _, part in parts)) as messages:
                for (worker, _), message in zip(parts, messages, strict=True):
                    busy[worker.connection] = worker
                    worker.send(message)
            while busy:
                for ready in wait(list(busy)):
                    answer = busy[ready].receive()
                    if answer is None:
                        del busy[ready]
                    elif isinstance(answer, BaseException):
                        raise answer
                    else:
                        yield from answer
        finally:
            if busy:  # failed or abandoned: what is still under way must not be taken for answers to the next job
                self._dismiss()

    def deliver(self, served: Pick | Offer | str) -> None:
        """Nobody waits for a model in a simulation."""

    def _hire(self) -> None:
        if not self._team:
            self._team = [_Worker.start() for _ in range(self.workers)]
            with packed(self._bench) as (bench,):  # one federation in memory, for all of them
                for worker in self._team:
                    worker.send(bench)

    def _dismiss(self) -> None:
        for worker in self._team:
            worker.stop()
        self._team = []


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls) -> _Worker:
        # vmap imports torch._dynamo when it is first used: once here, not in every worker
        preload = ["torch", "torch._dynamo", "fairveil.engine.local", "fairveil.tasks"]
        return cls(*start(_work, (), preload=preload, duplex=True, daemon=True))

    def send(self, message: Message) -> None:
        try:
            message.send(self.connection)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        try:
            return receive(self.connection)
        except (EOFError, OSError) as error:
            raise self._died() from error

    def stop(self) -> None:
        self.connection.close()  # an idle worker ends at the end of its input
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _died(self) -> RunFault:
        self.process.join(5)
        return RunFault(
            f"worker process {self.process.pid} died (exit code {self.process.exitcode}; -9 is often the "
            "operating system reclaiming memory: fewer engine.workers or a smaller engine.block need less)."
        )


def _work(connection: Connection) -> None:
    """The life of a worker: a bench, then jobs until the other end closes."""
    end_with_parent()
    keep_memory()
    torch.set_num_threads(1)
    try:
        bench = Bench(*receive(connection))
        gc.freeze()  # what the fork server has loaded: looking through it would also copy its pages
        while True:
            _answer(bench, connection)
    except (EOFError, OSError):
        os._exit(0)


def _answer(bench: Bench, connection: Connection) -> None:
    job = receive(connection)
    try:
        for replies in _gathered(bench.perform(job)):
            _send(replies, connection)
        _send(None, connection)
    except Exception as error:
        _send(_portable(error), connection)


def _gathered(blocks: Iterator[list[tuple[int, Reply]]]) -> Iterator[list[tuple[int, Reply]]]:
    """Blocks put together for a moment: a message for each would cost more than a small task."""
    replies, since = [], time.monotonic()
    for block in blocks:
        replies += block
        if time.monotonic() > since + MOMENT:
            yield replies
            replies, since = [], time.monotonic()
    if replies:
        yield replies


def _send(message: object, connection: Connection) -> None:
    with packed(message) as (only,):
        only.send(connection)


def _portable(error: Exception) -> Exception:
    """The error itself if it can travel, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0))
