"""What a round costs on a federation before any work: `python -m benchmarks.federation [--rounds N] [--out FILE]
[--ways ...]`.

Three clients on this machine, TLS, node keys, 650 parameters (logistic regression on digits). Four ways, each with its
own SuperLink and SuperNodes:

- app: Flower as it comes. It starts a process for every message, which imports torch and fairveil and loads records.
- empty app: the same with an app that imports nothing and answers at once: what the processes and the waiting cost.
- door: our resident guard behind Flower's own SuperNode, with its waiting times.
- fairveil: as `fairveil deploy` does it, with shorter waiting times on both sides.

A round is one request to all clients and their answers (for the last two: one step of local DP-SGD).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pandas as pd
import tomli_w

from benchmarks.common import RESULTS, busy, say
from fairveil.config import make_config
from fairveil.deploy.folders import init_client, init_server
from fairveil.deploy.programs import environment, flwr
from fairveil.provenance import commit

CLIENTS = 3
SPLIT = {"kind": "iid", "clients": CLIENTS}
BIN = Path(sys.executable).parent

APP = """
import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
app = ServerApp()

@client.query()
def answer(message, context):
    {work}
    return Message(RecordDict({{"arrays": message.content["arrays"]}}), reply_to=message)

@app.main()
def main(grid, context):
    config, seconds = context.run_config, []
    while len(list(grid.get_node_ids())) < {clients}:
        time.sleep(0.2)
    for number in range(int(config["rounds"])):
        started = time.perf_counter()
        arrays = ArrayRecord({{"model": Array(np.full(650, number, np.float32))}})
        messages = [Message(RecordDict({{"arrays": arrays}}), dst_node_id=node, message_type="query", group_id="x")
                    for node in grid.get_node_ids()]
        assert all(not reply.has_error() for reply in grid.send_and_receive(messages))
        seconds.append(time.perf_counter() - started)
    Path(config["folder"], "seconds.json").write_text(json.dumps(seconds))
"""
LOADING = "import torch, fairveil.guard; from fairveil.data.datasets import build_federation; " + (
    f"build_federation('digits', {{}}, {SPLIT!r}, 0).load(0)"
)
PROJECT = """
[project]
name = "bench"
version = "0.1.0"
description = "a benchmark"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fairveil"
[tool.flwr.app.components]
serverapp = "bench_app:app"
clientapp = "bench_app:client"
[tool.flwr.app.config]
folder = ""
rounds = 0
"""
FAIRVEIL = """
from fairveil.deploy.federation import main
from fairveil.engine.flower import client_app, server_app
app = server_app(main)
client = client_app()
"""
GUARD = """
import io, sys
from pathlib import Path
from fairveil.deploy import client
from fairveil.engine import flower
if not {brisk}:
    flower._fetch_briskly = lambda: None
sys.stdin = io.StringIO("joined")
client.main(Path({folder!r}), "127.0.0.1:{port}", Path({folder!r}, "door.secret"))
"""
PLAIN = """
import time
from fairveil.deploy.federation import main
from fairveil.engine import flower
flower.LOOK, flower._fetch_briskly = 3.0, lambda: None  # as Flower waits
app = flower.server_app(main)
client = flower.client_app()
"""
WAYS = {"app": APP.format(work=LOADING, clients=CLIENTS), "empty app": APP.format(work="pass", clients=CLIENTS)}
WAYS |= {"door": PLAIN, "fairveil": FAIRVEIL}


class Federation:
    """A server and its clients in a folder, one way."""

    def __init__(self, folder: Path, way: str, stack: ExitStack) -> None:
        self.folder, self.way, self.stack = folder, way, stack
        self.guarded, self.brisk = way in ("door", "fairveil"), way == "fairveil"
        self.port = _port()
        init_server(folder / "server", ["localhost"], self.port)

    def program(self, command: list[str], home: Path, **more: str) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            values = environment(home) | more
            process = subprocess.Popen(command, env=values, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

        def stop() -> None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self.stack.callback(stop)

    def flower(self, what: str) -> list[str]:
        ours = [sys.executable, "-m", "fairveil.engine.flower", what]
        return ours if self.brisk else [str(BIN / f"flower-{what}")]

    def start(self) -> None:
        server = self.folder / "server"
        files = {"ssl-ca-certfile": "ca.crt", "ssl-certfile": "server.crt", "ssl-keyfile": "server.key"}
        options = [part for option, name in files.items() for part in (f"--{option}", str(server / name))]
        options += ["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--host", "127.0.0.1"]
        interval = {} if self.brisk else {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}
        self.program([*self.flower("superlink"), *options, "--port", str(self.port)], server / "flower", **interval)
        _reached(self.port)
        for number in range(CLIENTS):
            self._client(f"client-{number}", number, interval)

    def _client(self, name: str, number: int, interval: dict[str, str]) -> None:
        folder, server = self.folder / name, self.folder / "server"
        init_client(folder, name, f"localhost:{self.port}", server / "ca.crt")
        flwr(server / "flower", "supernode", "register", str(folder / f"{name}.pub"), "here", "--name", name)
        port, secret = _port(), folder / "door.secret"
        secret.write_bytes(secrets.token_bytes(32))
        options = ["--root-certificates", str(server / "ca.crt"), "--superlink", f"localhost:{self.port}"]
        options += [
            "--auth-supernode-private-key",
            str(folder / "node.key"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        if self.guarded:
            options += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        self.program([*self.flower("supernode"), *options], folder / "flower", **interval)
        if self.guarded:
            _reached(port)
            data = {"dataset": "digits", "split": SPLIT, "client": str(number)}
            values = {"name": name, "server": f"localhost:{self.port}", "data": data}
            (folder / "client.toml").write_text(tomli_w.dumps(values))
            (folder / "policy.toml").write_text(tomli_w.dumps({"epsilon": 1e6, "delta": 0.1, "smallest_noise": 0.1}))
            guard = GUARD.format(folder=str(folder), port=port, brisk=self.brisk)
            self.program([sys.executable, "-c", guard], folder / "flower")

    def seconds(self, rounds: int) -> list[float]:
        """Of every round of a run."""
        app, run = self.folder / "app", self.folder / "run"
        app.mkdir()
        run.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        (app / "bench_app.py").write_text(WAYS[self.way])
        algorithm = {"name": "global", "rounds": rounds, "batch_size": 10**6}
        privacy = {"noise_multiplier": 1.0, "delta": 1e-3}
        data, model = {"dataset": "clients"}, {"name": "logistic"}
        config = make_config({"data": data, "model": model, "algorithm": algorithm, "privacy": privacy})
        (run / "submitted.toml").write_text(config.to_toml())
        (run / "submission.json").write_text(json.dumps({"run": secrets.token_hex(16), "clients": CLIENTS}))
        home = self.folder / "server" / "flower"
        flwr(home, "run", str(app), "here", "-c", f'folder="{run}" rounds={rounds}')
        deadline = time.monotonic() + 120 + 20 * rounds
        while time.monotonic() < deadline and not (run / "failure.json").exists():
            if (run / "seconds.json").exists():
                return list(json.loads((run / "seconds.json").read_text()))
            if (run / "result.json").exists():
                return list(pd.read_sql("SELECT seconds FROM round", f"sqlite:///{run / 'run.sqlite'}").seconds)
            time.sleep(0.2)
        raise RuntimeError((self.folder / "log.txt").read_text()[-3000:])


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _reached(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("a server did not start")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=RESULTS / "federation-overhead.csv")
    given = parser.parse_args()
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    say(f"others use {busy():.0%} of the machine")
    rows = []
    for way in given.ways:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            federation = Federation(Path(folder), way, stack)
            federation.start()
            seconds = federation.seconds(given.rounds)
        say(f"{way}: median {median(seconds):.2f} s a round")
        rows += [(way, n, round(s, 3), CLIENTS, commit()) for n, s in enumerate(seconds, 1)]
    pd.DataFrame(rows, columns=["way", "round", "seconds", "clients", "commit"]).to_csv(given.out, index=False)
