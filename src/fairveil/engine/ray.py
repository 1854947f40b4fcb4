"""A simulation spread over a Ray cluster by Flower's simulation engine. With flower.py the only file that imports flwr.

Unlike on a federation, the cluster is the user's own: it is given the records and the code, and sends back what the
local engine would, diagnostics included.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import uuid4

import torch

from fairveil.data.federation import Federation
from fairveil.engine import batches, messages
from fairveil.engine.flower import packed, unpacked
from fairveil.engine.local import Bench, usable_cores
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.release import Reply
from fairveil.processes import keep_memory
from fairveil.remote import Envelope
from fairveil.session import Call, Job, Offer, Pick

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp

REACH = 10.0  # seconds for the first machine of a cluster to answer
LEAVE = 10.0  # seconds for Flower's threads to end: they look up once a second
SOON = 0.005  # seconds between looks at a queue of this process; Flower has 0.1
MESSAGE = 1 << 28  # bytes that a message may have, about
SILENT = {  # nobody is told that somebody uses Flower or Ray
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of what it will do about GPUs some day
}

log = logging.getLogger(__name__)


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

    def deliver(self, served: Pick | Offer | str) -> None:
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
