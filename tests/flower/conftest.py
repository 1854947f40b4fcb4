"""A federation on this machine's own address: folders under tmp_path, processes that are stopped by their ids."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fairveil.deploy.folders import init_client, init_server

COMMAND = [sys.executable, "-c", "from fairveil.cli import main; main()", "deploy"]


class Running:
    """A `fairveil deploy` command under way, and what it has said."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str, times: int = 1, seconds: float = 90) -> None:
        """Until it has said this."""
        deadline = time.monotonic() + seconds
        while self.said.count(text) < times:
            assert self.process.poll() is None, f"it ended, without {text!r}: {self.said}"
            assert time.monotonic() < deadline, f"no {text!r} within {seconds} s: {self.said}"
            time.sleep(0.1)

    def family(self) -> list[int]:
        """Its process and all below it."""
        family = [self.process.pid]
        for pid in family:
            family += children(pid)
        return family

    def end(self, how: signal.Signals = signal.SIGTERM, seconds: float = 30) -> int:
        self.process.send_signal(how)
        return self.process.wait(seconds)


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split() if alive(int(word))]


def alive(pid: int) -> bool:
    """Whether there is such a process (one that has ended and was not yet taken note of is none)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> float:
    """How long it took until none of these processes was left."""
    started = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < started + seconds, f"left: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a command; it and whatever it started is gone after the test."""
    started: list[Running] = []

    def begin(*arguments: str) -> Running:
        started.append(Running(*arguments, log=tmp_path / f"output-{len(started)}.txt"))
        return started[-1]

    yield begin
    families = [pid for one in started for pid in one.family()]
    for one in reversed(started):
        if one.process.poll() is None:
            one.process.terminate()
    for one in started:
        try:
            one.process.wait(30)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
    wait_until_gone(families, 15)


@pytest.fixture
def gone_within() -> Callable[[list[int], float], float]:
    """How long it takes until none of these processes is left."""
    return wait_until_gone


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, port: int) -> Path:
    """The folder of a server on loopback."""
    init_server(tmp_path / "server", ["localhost"], port)
    return tmp_path / "server"


@pytest.fixture
def make_client(tmp_path: Path, port: int, server: Path) -> Callable[[str], Path]:
    """The folder of a client with 100 records of its own; the server does not know it yet."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        init_client(folder, name, f"localhost:{port}", server / "ca.crt")
        random = np.random.default_rng(sum(name.encode()))
        x = random.uniform(-1, 1, (100, 3))
        pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": (x.sum(1) > 0).astype(int)}).to_csv(
            folder / "records.csv", index=False
        )
        policy = (folder / "policy.toml").read_text()
        (folder / "policy.toml").write_text(policy.replace("delta = 1e-4", "delta = 1e-3"))
        return folder

    return make
