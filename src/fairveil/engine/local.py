"""The engine of one machine: tasks run here, or in persistent worker processes, one torch thread each.

A client's reply depends on the run, the request, its inputs and the client alone, so neither the number of workers
nor the size of a block changes a result. Workers come from a fork server that has torch loaded and no database
open; they ignore Ctrl-C (the runner decides) and die with their parent.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fairveil.data.federation import ClientData, Federation
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.release import MINT, Release, Reply
from fairveil.processes import end_with_parent, start
from fairveil.session import Call, Job, Member

CACHED_BYTES = 1 << 30  # of loaded records that one process keeps; the rest is loaded anew each time


class Bench:
    """One process's work place: the model, and the clients' data as far as it is cached."""

    def __init__(self, federation: Federation, spec: ModelSpec, root: str, block: int) -> None:
        self.federation, self.model = federation, spec.build()
        self.root, self.block = root, block
        self._cache: dict[int, ClientData] = {}
        self._cached = 0

    def perform(self, job: Job) -> Iterator[list[tuple[int, Reply]]]:
        """The replies of the job's clients, block by block."""
        for first in range(0, len(job.calls), self.block):
            calls = job.calls[first : first + self.block]
            members = [self._member(job, call) for call in calls]
            before = [_versions(member) for member in members], _state(self.model.module)
            replies = job.task(members)
            if before[0] != [_versions(member) for member in members]:
                raise TypeError(
                    f"task {job.task.__name__} wrote into its inputs, its client's records or personal state in place: "
                    "they are shared with others; work on a clone"
                )
            if before[1] != _state(self.model.module):
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

    def _member(self, job: Job, call: Call) -> Member:
        key = (self.root, job.request, call.client, call.digest.hex())
        inputs = {**job.shared, **call.each}
        return Member(self._data(call.client), self.model, inputs, call.mechanism, call.personal, key, MINT)

    def _data(self, client: int) -> ClientData:
        if client in self._cache:
            return self._cache[client]
        data = self.federation.load(client)
        self._cached += sum(t.nbytes for t in (data.train.x, data.train.y, data.test.x, data.test.y))
        if self._cached < CACHED_BYTES:
            self._cache[client] = data
        return data


def _versions(member: Member) -> list[int]:
    """How often each tensor that the member holds has been written in place."""
    data = (member.data.train.x, member.data.train.y, member.data.test.x, member.data.test.y)
    return [t._version for t in (*data, *member.inputs.values(), *member.personal.values()) if isinstance(t, Tensor)]


def _state(module: nn.Module) -> list[tuple[int, int]]:
    """Which tensors a module holds, and how often each has been written in place."""
    return [(id(tensor), tensor._version) for tensor in (*module.parameters(), *module.buffers())]


class LocalEngine:
    """Runs jobs on this machine.

    Args:
        root: of the random streams of all members.
        workers: processes, one for each core if None; 1 runs everything in this one.
        block: clients that a task sees at once.
    """

    def __init__(
        self, federation: Federation, spec: ModelSpec, *, root: str, workers: int | None = None, block: int = 8
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dismiss()
        self._inline = None
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
            for number, worker in enumerate(self._team):  # a client stays with its worker, which has its data
                calls = [call for call in job.calls if call.client % self.workers == number]
                if calls:
                    busy[worker.connection] = worker
                    worker.send(replace(job, calls=calls))
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

    def _hire(self) -> None:
        if not self._team:
            self._team = [_Worker.start(self._bench) for _ in range(self.workers)]

    def _dismiss(self) -> None:
        for worker in self._team:
            worker.stop()
        self._team = []


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, bench: tuple[Any, ...]) -> _Worker:
        # vmap imports torch._dynamo when it is first used: once here, not in every worker
        preload = ["torch", "torch._dynamo", "fairveil.engine.local", "fairveil.tasks"]
        worker = cls(*start(_work, (), preload=preload, duplex=True, daemon=True))
        worker.send(bench)
        return worker

    def send(self, message: object) -> None:
        try:
            self.connection.send_bytes(_packed(message))
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
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
    torch.set_num_threads(1)
    try:
        bench = Bench(*pickle.loads(connection.recv_bytes()))
        while True:
            job = pickle.loads(connection.recv_bytes())
            try:
                for block in bench.perform(job):
                    connection.send_bytes(_packed(block))
                connection.send_bytes(_packed(None))
            except Exception as error:
                connection.send_bytes(_packed(_portable(error)))
    except (EOFError, OSError):
        os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error itself if it can travel, else one that says the same."""
    try:
        pickle.loads(_packed(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Pickler(pickle.Pickler):
    """Sends tensors as plain arrays: no file descriptor for each tensor, no shared memory left behind."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.detach().numpy(),)
        return NotImplemented


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


def _packed(message: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0))
