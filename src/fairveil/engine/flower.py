"""The engine of many machines: the same tasks on a Flower federation. With ray.py the only file that imports flwr.

Server: a ServerApp drives a run through the Grid. Client: a SuperNode (Flower's own process, which faces the network
and holds no records) takes messages, and the *door* carries them to the client's guard, see guard.py. The door is a
resident process: nothing is imported or loaded anew for a message, and the app that a server sends along, which Flower
would install and run on the client, is never even looked at. No code of a server's choice runs where records are.

Flower's processes are started through this file (`python -m fairveil.engine.flower superlink|supernode ...`), which
lets them wait less between looks at their queues, and lets a SuperLink take orders from its own machine only.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fairveil.data.federation import Federation, Standardised
from fairveil.errors import RunFault
from fairveil.privacy.mechanisms import ClientMechanism, SumMechanism, canonical
from fairveil.privacy.release import MINT, Kept, Plain, Release, Reply, Share
from fairveil.processes import die_with_parent
from fairveil.remote import DTYPES, Envelope, Malformed, check_release, name_of
from fairveil.session import Call, Job, Offer, Pick

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

LOOK = 0.1  # seconds between looks at a queue; Flower has 3 for messages and 0.5 for replies
QUIET, SELDOM = 60.0, 1.0  # after so many seconds without a message, seconds between looks
SMALL = 1 << 18  # bytes of an array that goes along with plain values
ROLL_CALL = 1.0  # seconds between looks at who is there

log = logging.getLogger(__name__)
Answer = Callable[[Envelope], Envelope]


# ---- what travels ----------------------------------------------------------------------------------


def packed(envelope: Envelope) -> RecordDict:
    """An envelope as Flower carries it: arrays and plain values. Nothing is pickled.

    Flower fetches every part of a message by a request of its own, and a small array has three of them: small ones go
    along with the plain values, as bytes. Large ones that go to many clients Flower sends to the server once.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    plain: dict[str, Any] = {"kind": envelope.kind}
    arrays: dict[str, Any] = {}
    for name, value in envelope.values.items():
        if not isinstance(value, Tensor):
            plain[f"={name}"] = value
        elif value.nbytes > SMALL:
            arrays[name] = Array(value.detach().contiguous().numpy())
        else:
            stream = BytesIO()
            npy.write_array(stream, value.detach().contiguous().numpy(), (1, 0), allow_pickle=False)
            plain[f"@{name}"] = stream.getvalue()
    records = RecordDict({"envelope": ConfigRecord(plain)})
    if arrays:
        records["arrays"] = ArrayRecord(arrays)
    return records


def unpacked(records: RecordDict, largest: int | None = None) -> Envelope:
    """What `packed` made, or anything else that came.

    Args:
        largest: bytes that are looked at; None: any number.

    Raises:
        Malformed: it is no envelope.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    plain, arrays = records.get("envelope"), records.get("arrays", ArrayRecord({}))
    if not (isinstance(plain, ConfigRecord) and isinstance(arrays, ArrayRecord)) or set(records) - {
        "envelope",
        "arrays",
    }:
        raise Malformed(f"no envelope: it holds {sorted(map(str, records))[:10]}")
    size = sum(len(array.data) for array in arrays.values())
    size += sum(len(value) for value in plain.values() if isinstance(value, bytes | str))
    if largest is not None and size > largest:
        raise Malformed(f"a message of {size:,} bytes is larger than {largest:,}")
    kind, values = plain.get("kind"), dict[str, Plain]()
    if not isinstance(kind, str):
        raise Malformed("no envelope: it does not say what it is")
    for key, value in plain.items():
        mark, name = key[:1], key[1:]
        if mark == "=" and isinstance(value, int | float | str | bool) and name not in values:
            values[name] = value
        elif mark == "@" and isinstance(value, bytes) and name not in values:
            values[name] = _tensor(name, value)
        elif key != "kind":
            raise Malformed(f"{key[:100]!r} is a {type(value).__name__}: arrays and plain values only")
    for name, array in arrays.items():
        if name in values or array.stype != "numpy.ndarray":
            raise Malformed(f"the array {name[:100]!r} cannot be read, or is there twice")
        values[name] = _tensor(name, array.data)
    return Envelope(kind, values)


def _tensor(name: str, data: bytes) -> Tensor:
    """An array from its bytes, if they are just what they say they are."""
    stream = BytesIO(data)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError("another version")
        shape, fortran, dtype = npy.read_array_header_1_0(stream)
        left = len(data) - stream.tell()
        if fortran or dtype.hasobject or int(np.prod(shape, dtype=object)) * dtype.itemsize != left:
            raise ValueError(f"{shape} of {dtype} in {left} bytes")
        found = torch.from_numpy(np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy())
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

        _give_up_after(patience.timeout)
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

    def deliver(self, served: Pick | Offer | str) -> None:
        """Give each client the model that serves it, or those among which it chooses, and say that the run is over."""
        common: dict[str, Plain] = {"run": self.run_name, **self.scales}
        if isinstance(served, Offer):
            common["models"] = served.rows
        envelopes = {
            client: Envelope("finish", common | ({"model": served[client].clone()} if isinstance(served, Pick) else {}))
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
    if answer.kind == "release" and mechanism is not None and not isinstance(mechanism, SumMechanism):
        by = cast(ClientMechanism, mechanism)
        check_release(answer.values, by, {**job.shared, **call.each})
        return Reply(Release(answer.values, by, ("flower", job.request, call.client), MINT))
    if answer.kind == "share" and isinstance(mechanism, SumMechanism):
        if not all(isinstance(value, Tensor) for value in answer.values.values()):
            raise Malformed("a contribution that is not made of arrays")
        share = Share(cast(Mapping[str, Tensor], answer.values), mechanism, MINT)
        try:
            mechanism.add(mechanism.zero(), share)  # one that cannot be added must not end the run
        except TypeError as error:
            raise Malformed(str(error)) from None
        return Reply(share)
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
        # Told to end after its SuperLink was killed, Flower's process may wait for the dead for ever, and hold the run
        # folder: the system ends it.
        die_with_parent()
        _fetch_briskly()
        main(grid, context.run_config)

    return app


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
    waiting = _Waiting()
    method = "/flwr.proto.Runtime/AcquireTask"
    queue = connected(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={method}))
    while True:
        next_ = queue.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not (next_.HasField("task") and next_.token):
            waiting.sleep(SELDOM)
            continue
        waiting.busy()
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
    from flwr.supercore.inflatable import inflatable_utils as parts

    for fetch in (parts.pull_objects, parts.pull_and_inflate_object_from_tree):
        cast(Any, fetch).__kwdefaults__["initial_backoff"] = LOOK / 2


def _give_up_after(seconds: float) -> None:
    """Wait so long for the missing parts of an answer, and not for two hours: then it is an error, and is asked again.

    A client that is killed while it sends leaves an answer of which parts never come, and whoever fetches it waits.
    """
    from flwr.supercore.inflatable import inflatable_utils as parts

    cast(Any, parts.pull_objects).__kwdefaults__["max_time"] = seconds


class _Waiting:
    """How long to wait until the next look at a queue: not long, but where nothing has come for a while."""

    def __init__(self) -> None:
        self.busy()

    def busy(self) -> None:
        """Something has come."""
        self._since = time.monotonic()

    def sleep(self, most: float) -> None:
        """Wait, for so long at most."""
        time.sleep(min(most, LOOK if time.monotonic() < self._since + QUIET else SELDOM))


def _brisk() -> Any:
    """The module `time` for a SuperNode, with a shorter sleep. It sleeps for 3 seconds if no message has come, and for
    half a second while one is answered."""
    waiting = _Waiting()

    def sleep(seconds: float) -> None:
        if seconds < 1:
            waiting.busy()
        waiting.sleep(seconds)

    brisk = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    brisk.sleep = sleep
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
