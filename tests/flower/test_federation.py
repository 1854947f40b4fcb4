"""serve and join with Flower's real processes, on loopback: who is let in, and what is left when they end."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairveil.deploy.folders import init_server
from fairveil.deploy.keys import public_key_mark
from fairveil.engine.flower import _OwnMachineOnly

pytestmark = pytest.mark.flower
Start = Callable[..., Any]


def get(port: int, context: ssl.SSLContext | None) -> bytes:
    """The first line of what the server answers to a request over TLS, or over plain HTTP."""
    raw = socket.create_connection(("localhost", port), 10)
    with raw, context.wrap_socket(raw, server_hostname="localhost") if context else raw as line:
        line.sendall(b"GET /v1/fleet/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return line.recv(100).partition(b"\r\n")[0]
        except ConnectionResetError:
            return b""


def test_the_server_answers_by_tls_only(start: Start, server: Path, port: int) -> None:
    start("serve", str(server)).wait_for("Ready")
    ours = ssl.create_default_context(cafile=server / "ca.crt")
    assert get(port, ours).startswith(b"HTTP/1.1 404")  # it is there, and this page is not
    assert get(port, None) == b""
    with pytest.raises(ssl.SSLCertVerificationError):
        get(port, ssl.create_default_context())


def test_a_key_is_let_in_when_its_file_comes_and_not_before(
    start: Start, server: Path, make_client: Callable[[str], Path]
) -> None:
    known, unknown = make_client("known"), make_client("unknown")
    serving = start("serve", str(server), "--allow", str(known / "known.pub"))
    serving.wait_for("Ready")
    joined, waiting = start("join", str(known)), start("join", str(unknown))
    joined.wait_for("Joined")
    waiting.wait_for(f"does not know the key {public_key_mark(unknown / 'unknown.pub')}")
    assert "Traceback" not in waiting.said and "Joined" not in waiting.said
    (server / "clients/unknown.pub").write_bytes((unknown / "unknown.pub").read_bytes())
    serving.wait_for("unknown is admitted")
    waiting.wait_for("Joined")
    assert waiting.said.count("does not know the key") == 1  # told once, however often it was tried
    (server / "clients/known.pub").unlink()
    serving.wait_for("known is no longer admitted")
    joined.wait_for("does not know the key")


def test_nothing_is_left_of_them_when_they_end(
    start: Start, server: Path, make_client: Callable[[str], Path], gone_within: Callable[..., float]
) -> None:
    """By SIGTERM, by Ctrl-C and by kill -9; and each can be started again."""
    client = make_client("north")
    for how in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        serving = start("serve", str(server), "--allow", str(client / "north.pub"))
        serving.wait_for("Ready")
        joining = start("join", str(client))
        joining.wait_for("Joined")
        twice = start("join", str(client)), start("serve", str(server))
        assert [one.process.wait(30) for one in twice] == [2, 2] and all("is in use" in one.said for one in twice)
        family = [*serving.family(), *joining.family()]
        assert len(family) == 6  # serve, SuperLink, SuperExec; join, guard, SuperNode
        codes = [joining.end(how), serving.end(how)]
        assert codes == ([-9, -9] if how is signal.SIGKILL else [0, 0])
        gone_within(family, 10)


def test_a_client_waits_for_its_server_and_comes_back_to_it(
    start: Start, server: Path, make_client: Callable[[str], Path]
) -> None:
    client = make_client("north")
    joining = start("join", str(client))
    joining.wait_for("cannot be reached")
    serving = start("serve", str(server), "--allow", str(client / "north.pub"))
    joining.wait_for("Joined")
    serving.end(signal.SIGKILL)
    start("serve", str(server)).wait_for("Ready")
    joining.wait_for("Joined", times=2)
    assert "Traceback" not in joining.said


def test_a_client_does_not_talk_to_a_server_of_another_authority(
    start: Start, server: Path, make_client: Callable[[str], Path], tmp_path: Path, port: int
) -> None:
    init_server(tmp_path / "false", ["localhost"], port)
    start("serve", str(tmp_path / "false")).wait_for("Ready")
    joining = start("join", str(make_client("north")))
    joining.wait_for("is not the server of ca.crt")
    assert not (tmp_path / "north/join.log").read_bytes()  # no SuperNode was even started


@pytest.mark.parametrize(
    ("path", "client", "answered"),
    [
        ("/v1/fleet/activate-node", "192.0.2.9", True),
        ("/v1/control/start-run", "192.0.2.9", False),
        ("/v1/control/register-node", "192.0.2.9", False),
        ("/v1/runtime/anything", "192.0.2.9", False),
        ("/anything", "192.0.2.9", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "192.0.2.1", True),  # the server's own address
    ],
)
def test_orders_are_taken_from_the_servers_own_machine_only(path: str, client: str, answered: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": (client, 50000), "server": ("192.0.2.1", 9092)}
    asyncio.run(_OwnMachineOnly(app)(scope, None, send))
    assert sent[0]["status"] == (200 if answered else 403)
