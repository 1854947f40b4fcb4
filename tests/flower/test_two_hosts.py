"""Two network namespaces stand in for two hosts: each with an address of its own, and nothing but a wire in between."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import tomli_w

from fairveil.deploy.folders import init_client, init_server

pytestmark = pytest.mark.flower

FAIRVEIL = [sys.executable, "-c", "from fairveil.cli import main; main()", "deploy"]
PORT = 9092
CONFIG = """
[data]
dataset = "clients"
[model]
name = "logistic"
[algorithm]
name = "global"
rounds = 3
[privacy]
epsilon = 4.0
delta = 1e-3
"""
# What anybody who reaches the port may try: Flower's interface for orders.
ORDER = """
import ssl, sys, urllib.request, urllib.error
context = ssl.create_default_context(cafile=sys.argv[1])
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[2], data=b"", method="POST"), context=context)
    sys.stdout.write(str(answer.status))
except urllib.error.HTTPError as error:
    sys.stdout.write(str(error.code))
"""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[dict[str, tuple[str, list[str]]]]:
    """Of a server's and a client's host the address, and what to put before a command that is to run there."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 on this machine")
    mark = secrets.token_hex(3)
    names = {"server": f"fv-s-{mark}", "client": f"fv-c-{mark}"}
    subnet = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250) + 1}"
    found = {}
    made: list[str] = []
    try:
        try:
            for space in names.values():
                ip("netns", "add", space)
                made.append(space)
            ends = {"server": f"fs{mark}", "client": f"fc{mark}"}
            ip("link", "add", ends["server"], "netns", names["server"], "type", "veth", "peer", "name", ends["client"],
               "netns", names["client"])  # fmt: skip
            for number, (host, space) in enumerate(names.items(), 1):
                address = f"{subnet}.{number}"
                ip("-n", space, "addr", "add", f"{address}/24", "dev", ends[host])
                ip("-n", space, "link", "set", ends[host], "up")
                ip("-n", space, "link", "set", "lo", "up")
                found[host] = address, ["ip", "netns", "exec", space]
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield found
    finally:
        for space in made:
            ip("netns", "delete", space)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, Sequence[str]], Path]]:
    """Start a command; it is stopped by its process id. Gives the file that holds what it says."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str, command: Sequence[str]) -> Path:
        path = tmp_path / f"{name}.txt"
        with path.open("wb") as log:
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return path

    yield begin
    for process in reversed(running):
        process.terminate()
    for process in running:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def said(path: Path, text: str, seconds: float = 90) -> None:
    import time

    deadline = time.monotonic() + seconds
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r}: {path.read_text()}"
        time.sleep(0.1)


def test_a_run_between_two_hosts(
    hosts: dict[str, tuple[str, list[str]]], start: Callable[[str, Sequence[str]], Path], tmp_path: Path
) -> None:
    (address, there), (_, here) = hosts["server"], hosts["client"]
    server, clients = tmp_path / "server", [tmp_path / name for name in ("north", "south")]
    init_server(server, [address], PORT)
    for number, client in enumerate(clients):
        init_client(client, client.name, f"{address}:{PORT}", server / "ca.crt")
        data = {"dataset": "digits", "split": {"kind": "iid", "clients": 2}, "client": str(number)}
        toml = {"name": client.name, "server": f"{address}:{PORT}", "data": data}
        (client / "client.toml").write_text(tomli_w.dumps(toml))
        (client / "policy.toml").write_text(tomli_w.dumps({"epsilon": 4.0, "delta": 1e-3}))
        shutil.copy(client / f"{client.name}.pub", server / "clients")
    said(start("serve", [*there, *FAIRVEIL, "serve", str(server)]), "Ready")
    for client in clients:
        said(start(client.name, [*here, *FAIRVEIL, "join", str(client)]), "Joined")

    def ordered(host: list[str]) -> str:
        order = [sys.executable, "-c", ORDER, str(server / "ca.crt"), f"https://{address}:{PORT}/v1/control/list-runs"]
        return subprocess.run([*host, *order], capture_output=True, text=True, check=True, timeout=30).stdout

    assert ordered(here) == "403"  # from another host nobody gives orders
    assert ordered(there) != "403"
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    submit = [*there, *FAIRVEIL, "submit", str(config), "--server", str(server), "--runs", str(tmp_path / "runs")]
    done = subprocess.run([*submit, "--json"], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rounds"] == 3 and result["clients"] == 2 and result["epsilon"] <= 4
    for client in clients:
        status = [*FAIRVEIL, "status", str(client), "--json"]
        (run,) = json.loads(subprocess.run(status, capture_output=True, check=True, timeout=60).stdout)["runs"]
        assert run["state"] == "finished" and run["released"] == run["accepted"] == 3
