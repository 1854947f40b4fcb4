"""The engine of many machines: the same tasks on a Flower federation. The only file that imports flwr.

Server: a ServerApp drives a run through the Grid. Client: a SuperNode (Flower's own process, which faces the network
and holds no records) takes messages, and the *door* carries them to the client's guard, see guard.py. The door is a
resident process: nothing is imported or loaded anew for a message, and the app that a server sends along, which Flower
would install and run on the client, is never even looked at. No code of a server's choice runs where records are.

Flower's processes are started through this file (`python -m fairveil.engine.flower superlink|supernode ...`), which
lets them wait less between looks at their queues, and lets a SuperLink take orders from its own machine only.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import uuid4

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fairveil.data.federation import Federation, Standardised
from fairveil.engine import batches, messages
from fairveil.engine.local import Bench, usable_cores
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.mechanisms import ClientMechanism, CohortSums, canonical
from fairveil.privacy.release import MINT, Kept, Plain, Release, Reply, Share
from fairveil.processes import keep_memory
from fairveil.remote import DTYPES, Envelope, Malformed, check_finite, check_release, name_of
from fairveil.session import Call, Job, Pick

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

LOOK = 0.1  # seconds between looks at a queue; Flower has 3 for messages and 0.5 for replies
ROLL_CALL = 1.0  # seconds between looks at who is there
REACH = 10.0  # seconds for the first machine of a cluster to answer
LEAVE = 10.0  # seconds for Flower's threads to end: they look up once a second
SOON = 0.005  # seconds between looks at a queue of this process; Flower has 0.1
MESSAGE = 1 << 28  # bytes that a message in a simulation may have, about
SILENT = {  # nobody is told that somebody uses Flower or Ray
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of what it will do about GPUs some day
}

log = logging.getLogger(__name__)
Answer = Callable[[Envelope], Envelope]


# ---- what travels ----------------------------------------------------------------------------------


def packed(envelope: Envelope) -> RecordDict:
    """An envelope as Flower carries it: arrays in one record, plain values in another. Nothing is pickled."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, value in envelope.values.items():
        if isinstance(value, Tensor):
            arrays[name] = Array(value.detach().contiguous().numpy())
        else:
            plain[name] = value
    kind = ConfigRecord({"kind": envelope.kind})
    return RecordDict({"kind": kind, "plain": ConfigRecord(plain), "arrays": ArrayRecord(arrays)})


def unpacked(records: RecordDict, largest: int | None = None) -> Envelope:
    """What `packed` made, or anything else that came.

    Args:
        largest: bytes that are looked at; None: any number.

    Raises:
        Malformed: it is no envelope.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    if set(records) != {"kind", "plain", "arrays"}:
        raise Malformed(f"no envelope: it holds {sorted(map(str, records))[:10]}")
    kind, plain, arrays = records["kind"], records["plain"], records["arrays"]
    if not (isinstance(kind, ConfigRecord) and isinstance(plain, ConfigRecord) and isinstance(arrays, ArrayRecord)):
        raise Malformed("no envelope: its records are of other types")
    size = sum(len(array.data) for array in arrays.values())
    if largest is not None and size > largest:
        raise Malformed(f"a message of {size:,} bytes is larger than {largest:,}")
    word = kind.get("kind")
    if not isinstance(word, str) or set(plain) & set(arrays):
        raise Malformed("no envelope: it does not say what it is")
    values: dict[str, Plain] = {}
    for name, value in plain.items():
        if not isinstance(value, int | float | str | bool):
            raise Malformed(f"{name[:100]!r} is a {type(value).__name__}: arrays and plain values only")
        values[name] = value
    return Envelope(word, values | {name: _tensor(name, array) for name, array in arrays.items()})


def _tensor(name: str, array: Any) -> Tensor:
    """An array as it came, if its bytes are just what it says they are."""
    stream = BytesIO(array.data)
    try:
        if array.stype != "numpy.ndarray" or npy.read_magic(stream) != (1, 0):
            raise ValueError(array.stype)
        shape, fortran, dtype = npy.read_array_header_1_0(stream)
        bytes_left = len(array.data) - stream.tell()
        if fortran or dtype.hasobject or int(np.prod(shape, dtype=object)) * dtype.itemsize != bytes_left:
            raise ValueError(f"{shape} of {dtype} in {bytes_left} bytes")
        found = torch.from_numpy(np.frombuffer(array.data, dtype, offset=stream.tell()).reshape(shape).copy())
    except Exception as error:  # numpy reads the header as Python: tokenize.TokenError is one of many
        raise Malformed(f"the array {name[:100]!r} cannot be read") from error
    if found.dtype not in DTYPES:
        raise Malformed(f"the array {name[:100]!r} holds {found.dtype}")
    return found


# ---- the server's side -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Patience:
    """How long to wait for clients, and how many must answer.

    Attributes:
        timeout: seconds after which a request is sent once more; the same one, which costs a client nothing.
        retries: how often.
        minimum: of all clients, how many must answer a request for the run to go on.
    """

    timeout: float
    retries: int
    minimum: int


class Roll:
    """Who takes part: the clients by number, and the nodes they are at.

    A node is known by the name under which its key was registered at the server, not by what it says of itself.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.names: list[str] = []  # by client
        self._nodes: dict[str, tuple[int, str]] = {}
        self._called = -ROLL_CALL

    def present(self) -> dict[str, tuple[int, str]]:
        """Node and time of arrival of each client that is there now, by name."""
        if time.monotonic() > self._called + ROLL_CALL:
            nodes = list(cast(Any, self.grid).get_nodes())
            self._nodes = {node.name: (node.node_id, node.last_activated_at) for node in nodes}
            if len(self._nodes) < len(nodes):
                raise RunFault("two nodes are registered under one name")
            self._called = time.monotonic()
        return self._nodes

    def ask(self, asked: Mapping[str, Envelope], patience: Patience) -> Iterator[tuple[str, Envelope]]:
        """Send each client its envelope and bring the answers as they come; of some there may be none.

        A request is sent again when it has waited for too long, or when its client has been away since: then it was
        lost. Whichever copy is answered first counts.
        """
        from flwr.app import Message

        open_, sent, arrivals = dict(asked), dict[str, str](), dict[str, str]()
        sent_at, times = dict.fromkeys(asked, -1e9), dict.fromkeys(asked, 0)
        started = time.monotonic()
        while open_ and time.monotonic() < started + patience.timeout * (patience.retries + 1):
            present, messages = self.present(), {}
            for name, envelope in open_.items():
                waited = time.monotonic() - sent_at[name]
                if name not in present or (waited < patience.timeout and arrivals.get(name) == present[name][1]):
                    continue
                node, arrivals[name] = present[name]
                sent_at[name], times[name] = time.monotonic(), times[name] + 1
                message = Message(packed(envelope), dst_node_id=node, message_type="query", group_id=f"{times[name]}")
                messages[name] = message
            if messages:
                for name, number in zip(messages, self.grid.push_messages(messages.values()), strict=True):
                    if number is not None:
                        sent[number] = name
            for reply in self.grid.pull_messages(list(sent)) if sent else []:
                name = sent.pop(reply.metadata.reply_to_message_id)
                if name not in open_:
                    continue
                if reply.has_error():
                    log.warning("%s: %s", name, reply.error.reason)
                    arrivals.pop(name, None)  # send it again
                    time.sleep(LOOK)
                    continue
                del open_[name]
                try:
                    yield name, unpacked(reply.content)
                except Malformed as error:
                    yield name, Envelope("failed", {"why": f"its answer is not well formed: {error}"})
            if open_:
                time.sleep(LOOK)


class FlowerEngine:
    """Runs jobs on the clients of a federation, each on its own machine.

    Args:
        run: names the run to the clients; the same after a resume.
        federation: as it was declared; if it is standardised, clients are told by what.
    """

    measures = False  # what clients measure stays with them

    def __init__(self, roll: Roll, run: str, federation: Federation, patience: Patience) -> None:
        self.roll, self.run_name, self.patience = roll, run, patience
        self.scales: dict[str, Plain] = {}
        if isinstance(federation.source, Standardised):
            mean, deviation = federation.source.mean, federation.source.scale
            self.scales = {"scales.mean": torch.from_numpy(mean), "scales.deviation": torch.from_numpy(deviation)}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The replies of the clients that answer as they should.

        Raises:
            RunFault: too few did.
        """
        envelopes = {call.client: self._envelope(job, call) for call in job.calls}
        calls = {call.client: call for call in job.calls}
        yield from self._asked(envelopes, job.request, lambda client, answer: _reply(job, calls[client], answer))

    def propose(self, proposals: Mapping[int, str]) -> dict[int, float]:
        """Propose the run to its clients; the epsilon that each has found for it by itself."""
        envelopes = {c: Envelope("propose", {"run": self.run_name, "proposal": text}) for c, text in proposals.items()}
        return dict(self._asked(envelopes, "the proposal", _accepted))

    def deliver(self, served: Pick | str) -> None:
        """Give each client the model that serves it, and tell it that the run is over."""
        own = served if isinstance(served, Pick) else None
        common: dict[str, Plain] = {"run": self.run_name, **self.scales}
        envelopes = {
            client: Envelope("finish", common | ({"model": own[client].clone()} if own else {}))
            for client in range(len(self.roll.names))
        }
        for _ in self._asked(envelopes, "the end", _finished):
            pass

    def _envelope(self, job: Job, call: Call) -> Envelope:
        values: dict[str, Plain] = {
            "run": self.run_name, "request": job.request, "task": name_of(job.task),
            "mechanism": canonical(call.mechanism) if call.mechanism else "", **self.scales,
        }  # fmt: skip
        values |= {f"shared.{name}": value for name, value in job.shared.items()}
        return Envelope("task", values | {f"each.{name}": value for name, value in call.each.items()})

    def _asked(
        self, envelopes: Mapping[int, Envelope], what: str, read: Callable[[int, Envelope], Any]
    ) -> Iterator[tuple[int, Any]]:
        """What clients answered, read; and a fault if there are too few of them."""
        names = self.roll.names
        silent = dict.fromkeys(envelopes, "no answer")
        by_name = {names[client]: envelope for client, envelope in envelopes.items()}
        for name, answer in self.roll.ask(by_name, self.patience):
            client = names.index(name)
            try:
                if answer.kind in ("refused", "failed"):
                    raise Malformed(f"{answer.kind}: {answer.values.get('why', '')}")
                found = read(client, answer)
            except Malformed as error:
                silent[client] = str(error)
                continue
            del silent[client]
            yield client, found
        told = "\n".join(f"  {names[client]}: {why}" for client, why in sorted(silent.items()))
        if len(silent) > len(names) - self.patience.minimum:
            raise RunFault(
                f"{what}: {len(names) - len(silent)} of {len(names)} clients are there, {self.patience.minimum} must "
                f"be (engine.minimum_clients).\n{told}"
            )
        if silent:
            log.warning("%s goes on without:\n%s", what, told)


def _reply(job: Job, call: Call, answer: Envelope) -> Reply:
    """The reply of a client, minted anew here if it is what was asked for."""
    mechanism = call.mechanism
    if answer.kind == "kept" and mechanism is None and not answer.values:
        return Reply(Kept())
    if answer.kind == "release" and mechanism is not None and not isinstance(mechanism, CohortSums):
        by = cast(ClientMechanism, mechanism)
        check_release(answer.values, by, {**job.shared, **call.each})
        return Reply(Release(answer.values, by, ("flower", job.request, call.client), MINT))
    if answer.kind == "share" and isinstance(mechanism, CohortSums):
        check_finite(answer.values)
        shapes = {n: (v.dtype, tuple(v.shape)) for n, v in answer.values.items() if isinstance(v, Tensor)}
        if shapes != {part.name: (torch.float64, part.shape) for part in mechanism.parts}:
            raise Malformed(f"a contribution of the shapes {shapes}")
        values = cast(Mapping[str, Tensor], answer.values)
        if any(torch.linalg.vector_norm(values[part.name]) > part.bound for part in mechanism.parts):
            raise Malformed("a contribution beyond its bound")
        return Reply(Share(values, mechanism, MINT))
    raise Malformed(f"{answer.kind!r} is no answer to {job.request}")


def _accepted(client: int, answer: Envelope) -> float:
    epsilon = answer.values.get("epsilon")
    if answer.kind != "accepted" or not isinstance(epsilon, float):
        raise Malformed(f"{answer.kind!r} is no answer to a proposal")
    return epsilon


def _finished(client: int, answer: Envelope) -> None:
    if answer.kind != "finished":
        raise Malformed(f"{answer.kind!r} is no answer to the end")


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """An app that Flower starts on the server: calls main(grid, run config)."""
    from flwr.app import Context
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def started(grid: Grid, context: Context) -> None:
        _fetch_briskly()
        main(grid, context.run_config)

    return app


# ---- a simulation on a Ray cluster -----------------------------------------------------------------


class RayEngine:
    """Runs the jobs of a simulation in the processes of a Ray cluster, which Flower's simulation engine feeds.

    The same answers as those of the local engine, bit for bit. Each process is one of Flower's nodes, and a client
    stays with its node.

    Args:
        root: of the random streams of all members.
        workers: processes, one for each core of the cluster if None.
        block: clients that a task sees at once.
        address: of a cluster; a Ray on this machine, for as long as the engine is open, if None.

    Raises:
        UserError: Flower or Ray is not installed.
    """

    measures = True  # a simulation sees what its clients measure

    def __init__(
        self, federation: Federation, spec: ModelSpec, *, root: str, workers: int | None = None,
        block: int | None = None, address: str | None = None,
    ) -> None:  # fmt: skip
        if missing := [name for name in ("flwr", "ray") if find_spec(name) is None]:
            raise UserError(
                f'engine.kind = "ray" needs {" and ".join(missing)}, which is not installed.',
                "A simulation is spread over a cluster by Flower's simulation engine, and that by Ray.",
                "pip install 'fairveil[ray]'",
            )
        self.root, self.address = root, address
        self._bench, self._workers = (federation, spec, root, block), workers
        self._most = max(1, MESSAGE // (8 * spec.build().parameters))  # clients in a message
        self._simulation: _Simulation | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # also here: sums must come out the same as in a worker
        try:
            self._start()
        except BaseException:
            torch.set_num_threads(self._threads)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        torch.set_num_threads(self._threads)

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The reply of every client, as messages come back.

        Raises:
            RunFault: a process of the cluster died, or the cluster is gone.
        """
        if job.task.__module__ == "__main__":
            raise UserError(
                f"task {job.task.__name__} is defined in the script itself.",
                "The processes of a cluster must import it, and a script cannot be imported.",
                'move it to a module of its own, or engine.kind = "local"',
            )
        batches.check_mechanisms(job.calls)
        simulation, calls = self._start(), {call.client: call for call in job.calls}
        queues: dict[int, list[list[Call]]] = {}
        for number in range(simulation.nodes):
            own = [call for call in job.calls if call.client % simulation.nodes == number]
            queues[number] = [own[first : first + self._most] for first in range(0, len(own), self._most)]
        busy = {number for number, queue in queues.items() if queue}
        try:
            for number in busy:
                simulation.send(number, batches.question(job, queues[number].pop(0)))
            while busy:
                for number, answer in simulation.receive():
                    busy.remove(number)
                    replies = list(batches.replies_of(answer, job, calls, self.root))
                    if queues[number]:
                        simulation.send(number, batches.question(job, queues[number].pop(0)))
                        busy.add(number)
                    yield from replies
        finally:
            if busy:  # failed or abandoned: what is still under way must not go on
                self._stop()

    def deliver(self, served: Pick | str) -> None:
        """Nobody waits for a model in a simulation."""

    def _start(self) -> _Simulation:
        if self._simulation is None:
            clients = self._bench[0].clients
            with ExitStack() as stack:
                cores = stack.enter_context(_ray(self.address, min(self._workers or usable_cores(), clients)))
                nodes = min(self._workers or cores, cores, clients)
                self._simulation = stack.enter_context(_Simulation(nodes, self._bench))
                self._open = stack.pop_all()
        return self._simulation

    def _stop(self) -> None:
        self._simulation = None
        with _own_signals(hold=True):
            self._open.close()


@contextmanager
def _ray(address: str | None, cores: int) -> Iterator[int]:
    """A connection to Ray, and the number of its cores.

    Args:
        address: of a cluster; None starts one on this machine, with this number of cores, and ends it afterwards.

    Raises:
        UserError: there is no such cluster.
    """
    os.environ.update(SILENT)
    import ray

    if ray.is_initialized():  # the user's own: it is used, and left to him
        yield _cores()
        return
    # modules that this process finds must be found there too; what is installed is there already
    installed = {sys.prefix, sys.base_prefix}
    paths = [path or str(Path.cwd()) for path in sys.path if not any(path.startswith(prefix) for prefix in installed)]
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}}
    own = None if address or "RAY_TMPDIR" in os.environ else tempfile.mkdtemp(prefix="fairveil-", dir="/tmp")
    if not address:
        options |= {"num_cpus": cores, "include_dashboard": False}
    if own:
        options["_temp_dir"] = own  # short, as the names of sockets must be; records may lie in it
    try:
        try:
            if address and ":" in address:  # Ray tries for minutes to reach one that is not there
                host, _, port = address.removeprefix("ray://").rpartition(":")
                socket.create_connection((host, int(port)), REACH).close()
            with _own_signals(hold=not address):
                # what happens on the cluster it would print on standard output
                cast(Any, ray)._private.worker.print_to_stdstream = lambda data, **_: log.info("%s", data.get("lines"))
                # "local", or it would join a cluster that happens to be there
                ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
        except (OSError, ValueError) as error:  # ConnectionError is one
            raise UserError(
                f"engine.address = {address!r} cannot be reached." if address else "Ray cannot be started here.",
                f"{error}",
                'the address that "ray start" has shown on its first machine, or none: a Ray on this machine',
            ) from error
        yield _cores()
    finally:
        ray.shutdown()
        if own:
            shutil.rmtree(own, ignore_errors=True)


def _cores() -> int:
    """The cores of the cluster, each machine's by itself: a process cannot have half a core here and half there."""
    import ray

    machines = cast(Any, ray).nodes()
    cores = sum(int(machine["Resources"].get("CPU", 0)) for machine in machines if machine["Alive"])
    if not cores:
        raise UserError(
            "the Ray cluster has no machine with a core to spare.",
            "Each process of a simulation takes one core of the cluster, and there is none.",
            "ray start --address=... --num-cpus=4 on another machine",
        )
    return cores


@contextmanager
def _own_signals(*, hold: bool) -> Iterator[None]:
    """Signals do afterwards what they did before: Ray has a handler of its own for SIGTERM.

    Args:
        hold: Ctrl-C and SIGTERM (Ctrl-C in a sweep) wait until this is over: a Ray that is half started or stopped
            leaves processes behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before if hold else ():
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in dict.fromkeys(came):
        signal.raise_signal(late)


class _Simulation:
    """Flower's simulation engine in a thread of this process, with one process of the cluster for each node.

    This is what Flower's run_simulation sets up, without the parts that do not fit: that one is deprecated, wants its
    server's side in a thread of its own, reports to Flower's makers, sends the whole app (and with it the federation)
    along with each message, gives a node's messages to any process that is free, and does not end before they do.
    """

    def __init__(self, nodes: int, bench: tuple[Federation, ModelSpec, str, int | None]) -> None:
        self.nodes, self._bench = nodes, bench
        self._sent: dict[str, int] = {}
        self._stopped = _Stop()
        self._error: BaseException | None = None
        self._fault: RunFault | None = None
        self._actors: list[Any] = []

    def __enter__(self) -> Self:
        import ray
        from flwr.proto.task_pb2 import Task
        from flwr.server.superlink.fleet.vce import vce_api
        from flwr.server.superlink.fleet.vce.metrics import VceMetrics
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
        from flwr.simulation.ray_transport.ray_actor import ClientAppActor
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.run import Run
        from flwr.superlink.federation import NoOpFederationManager
        from flwr.superlink.grid import InMemoryGrid

        self._flower = logging.getLogger("flwr")
        self._level = self._flower.level
        self._flower.setLevel(logging.CRITICAL)  # what it has to say of a fault is said by the fault
        with messages.packed(self._bench) as (bench,):
            self._app = partial(_client_app, uuid4().hex, ray.put(bench.whole()))  # one copy for all of a machine
        self._actors = [cast(Any, ClientAppActor).options(num_cpus=1).remote() for _ in range(self.nodes)]
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        run, state = Run.create_empty(run_id=1), cast(Any, factory.state())
        run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
        state.run_ids[run.run_id], state.task_store[1] = RunRecord(run=run), Task(task_id=1, run_id=run.run_id)
        self._run = run
        self.grid = InMemoryGrid(factory)
        self.grid.set_run(run)
        places = vce_api._register_nodes(self.nodes, factory)
        stores = vce_api._register_node_info_stores(places, run)
        self._ids = {number: node for node, number in places.items()}

        def serve() -> None:
            try:
                backend = cast(Any, lambda: self)
                vce_api.run_api(self._app, backend, places, factory, stores, self._stopped, VceMetrics())
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=serve, name="fairveil simulation", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self.terminate()
        self._thread.join(LEAVE)
        self._flower.setLevel(self._level)

    def send(self, number: int, envelope: Envelope) -> None:
        """Send an envelope to a node."""
        from flwr.app import Message
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.task_identity import TaskIdentity

        # who sends a message, as Flower sees it: the same for the whole process
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, self._run.run_id, SUPERLINK_NODE_ID
        message = Message(packed(envelope), dst_node_id=self._ids[number], message_type="query", group_id="")
        (sent,) = self.grid.push_messages([message])
        self._sent[sent] = number

    def receive(self) -> Iterator[tuple[int, Envelope]]:
        """The answers that have come by now, each with its node; at least one.

        Raises:
            RunFault: none will come.
        """
        while not (replies := list(self.grid.pull_messages(list(self._sent)))):
            if not self._thread.is_alive():
                raise RunFault(f"the simulation on the Ray cluster has ended by itself: {self._error}")
            time.sleep(SOON)
        for reply in replies:
            number = self._sent.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                raise self._fault or RunFault(f"the Ray cluster has failed: {reply.error.reason}")
            yield number, unpacked(reply.content)

    # what Flower asks of a backend

    @property
    def num_workers(self) -> int:
        return self.nodes

    def build(self, app: Any) -> None:
        pass

    def process_message(self, message: Message, context: Any) -> tuple[Message, Any]:
        """Have a message answered by the process of its node."""
        import ray

        if self._stopped.is_set():
            raise RunFault("the simulation is over")  # Ray would start another cluster for what comes too late
        number = context.node_config["partition-id"]
        try:
            _, answer, after = ray.get(self._actors[number].run.remote(self._app, message, str(number), context))
        except ray.exceptions.RayActorError as error:
            where = re.findall(r"^\s*(?:pid|ip): (\S+)$", str(error), re.MULTILINE)
            self._fault = RunFault(
                f"a process of the Ray cluster died ({' at '.join(where)}). Often that is the operating system "
                "reclaiming memory: fewer engine.workers or a smaller engine.block need less."
            )
            raise
        except Exception as error:
            self._fault = RunFault(
                f"a process of the Ray cluster has failed: {str(error).strip().splitlines()[-1]}\n  All machines of a "
                "cluster need the same Python, fairveil as it is here, and your own modules, if you use any."
            )
            raise
        return answer, after

    def terminate(self) -> None:
        """End the processes, in the midst of whatever they do."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


class _Stop(threading.Event):
    """Tells Flower's threads to stop. They wait for it between looks at their queues: not for long."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(SOON if timeout is None else min(SOON, timeout))


_BENCHES: dict[str, Bench] = {}  # of a process of a cluster: its only one, by the simulation that it belongs to


def _client_app(key: str, held: Any) -> ClientApp:
    """What a process of the cluster does with a message. Flower asks for it each time.

    Args:
        held: a reference to what the bench is made of.
    """
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def perform(message: Message, context: Context) -> Message:
        try:
            answer = batches.answer(_bench(key, held), unpacked(message.content))
        except Exception as error:
            answer = batches.failed(error)
        return Message(packed(answer), reply_to=message)

    return app


def _bench(key: str, held: Any) -> Bench:
    import ray

    if key not in _BENCHES:
        torch.set_num_threads(1)
        keep_memory()
        text, places, memory = ray.get(held)
        # a copy: Ray's own memory cannot be written, and a task that writes must be told so, not ended by the system
        _BENCHES[key] = Bench(*messages.opened(text, places, memory.copy()))
    return _BENCHES[key]


# ---- the client's side -----------------------------------------------------------------------------


def door(address: str, answer: Answer, *, secret: bytes, largest: int | None = None) -> None:
    """Carry messages from the SuperNode at a loopback address to the guard and its answers back; never returns.

    To the SuperNode this is what runs its apps. The app that came with the run is left where it is.

    Args:
        secret: shared with the SuperNode, so that nobody else on this machine fetches its messages.
        largest: bytes of a message that is looked at.
    """
    from flwr.common.constant import SubStatus
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    def connected(proof: Any) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=address, insecure=True, root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), proof],
            retry_invoker=make_simple_http_retry_invoker(),
        )  # fmt: skip

    _fetch_briskly()
    method = "/flwr.proto.Runtime/AcquireTask"
    queue = connected(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={method}))
    while True:
        next_ = queue.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not (next_.HasField("task") and next_.token):
            time.sleep(LOOK / 2)
            continue
        task = connected(RuntimeTokenHttpInterceptor(next_.token))
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(task))
        heartbeat.start()
        try:
            message, context, _, _ = pull_task_input(task)
            push_message(task, _answered(message, answer, largest), context)
            push_task_output(task, context, SubStatus.COMPLETED, "")
        finally:
            heartbeat.stop()
            task.close()


def _answered(message: Message, answer: Answer, largest: int | None) -> Message:
    from flwr.app import Message

    try:
        asked = unpacked(message.content, largest)
    except Malformed as error:
        asked = Envelope("malformed", {"run": "", "request": "", "why": str(error)})
    return Message(packed(answer(asked)), reply_to=message)


def client_app() -> ClientApp:
    """Flower starts no run without one. It does nothing: clients do not run what a server sends."""
    from flwr.clientapp import ClientApp

    return ClientApp()


# ---- Flower's processes ----------------------------------------------------------------------------


def _fetch_briskly() -> None:
    """Look again after LOOK for a part of a message that is still on its way, and not after a second.

    Whoever looks often finds most messages before all of their parts have arrived.
    """
    from flwr.supercore.inflatable import inflatable_utils

    inflatable_utils.pull_objects.__kwdefaults__["initial_backoff"] = LOOK / 2  # type: ignore[index]


def _brisk() -> Any:
    """The module `time` with a sleep that is never longer than LOOK."""
    brisk = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    brisk.sleep = lambda seconds: time.sleep(min(seconds, LOOK))
    return brisk


def supernode() -> None:
    """Flower's SuperNode, with the arguments of `flower-supernode`."""
    from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    # a client that was killed is taken for present, and not let in again, until it has missed two beats of its heart
    for module in (heartbeat, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_MIN_INTERVAL  # type: ignore[attr-defined]
    _fetch_briskly()
    start_client_internal.time = _brisk()  # type: ignore[attr-defined]
    flower_supernode()


def superlink() -> None:
    """Flower's SuperLink, with the arguments of `flower-superlink`.

    Flower answers whoever reaches the port: he could start an app of his own on the server, or register a key. Here all
    but the interface for clients, who prove their keys, is for processes of this machine.
    """
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(_OwnMachineOnly),)
    flower_superlink()


class _OwnMachineOnly:
    """Refuses (403) what is not for clients, unless it comes from the address that it goes to, or from loopback."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan" and not scope["path"].startswith("/v1/fleet/"):
            (client, *_), (server, *_) = scope.get("client") or ("",), scope.get("server") or (None,)
            if client not in ("127.0.0.1", "::1", server):
                await send({"type": "http.response.start", "status": 403, "headers": []})
                await send({"type": "http.response.body", "body": b"only for processes of this machine"})
                return
        await self.app(scope, receive, send)


if __name__ == "__main__":
    process = {"superlink": superlink, "supernode": supernode}[sys.argv.pop(1)]
    process()
