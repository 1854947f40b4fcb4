"""Runs on a federation of real processes on loopback, with TLS and node keys: one SuperLink, three SuperNodes, three
guards. With noise that the test build repeats they must end as on one machine, whatever is killed on the way.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fairveil.algorithms import find_algorithm
from fairveil.config import RunConfig, make_config
from fairveil.contract import Outcome, outcome
from fairveil.deploy.folders import init_client, init_server
from fairveil.deploy.programs import flwr
from fairveil.guard import status
from fairveil.plan import Plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.run import Place, run_in
from fairveil.store import Store

pytestmark = pytest.mark.flower

HERE = Path(__file__).parent
SPLIT = {"kind": "rotate", "degrees": [0, 90], "clients": [2, 1]}
NAMES = ["client-0", "client-1", "client-2"]
POLICY: dict[str, Any] = {
    "epsilon": 40.0, "delta": 1e-2, "trust": "server", "smallest_noise": 0.05, "largest_message": 10_000_000,
    "tasks": [
        "local_update", "choose_model", "release_moments", "evaluate", "bounded_update", "share_moments",
        "train_teacher", "teacher_votes",
    ],
}  # fmt: skip
PATE = {"name": "pate-fl", "rounds": 2, "queries": 40, "student_steps": 10, "local_epochs": 3}


def config(algorithm: dict[str, Any], local: bool = False, **sections: Any) -> RunConfig:
    data: dict[str, Any] = {"dataset": "digits", "split": SPLIT} if local else {"dataset": "clients"}
    if find_algorithm(algorithm["name"]).needs_public:
        data["server"] = {"dataset": "digits", "rows": "test"}  # on the server's own machine
    values = {
        "data": data, "model": {"name": "logistic"}, "algorithm": algorithm, "engine": {"timeout": 15.0, "retries": 20},
        "privacy": {"epsilon": 4.0, "delta": 1e-3},
    }  # fmt: skip
    return make_config(values | sections)


class Federation:
    """A server and three clients, whose guards are the test build."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.server = folder, folder / "server"
        init_server(self.server, ["localhost"], port)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for number, name in enumerate(NAMES):
            client = folder / name
            init_client(client, name, f"localhost:{port}", self.server / "ca.crt")
            data = {"dataset": "digits", "split": SPLIT, "client": str(number)}
            toml = {"name": name, "server": f"localhost:{port}", "data": data}
            (client / "client.toml").write_text(tomli_w.dumps(toml))
            (client / "policy.toml").write_text(tomli_w.dumps(POLICY))
            (self.server / "clients" / f"{name}.pub").write_bytes((client / f"{name}.pub").read_bytes())

    def start(self, *names: str) -> None:
        """Start the server, clients, or both, and wait until they are there."""
        for name in names:
            script = "from fairveil.cli import main; main()"
            command = [sys.executable, "-c", script, "deploy", "serve", str(self.server)]
            if name != "server":
                command = [sys.executable, str(HERE / "seeded_join.py"), str(self.folder / name)]
            environment = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
            environment["PYTHONUNBUFFERED"] = "1"
            log = (self.folder / f"{name}.txt").open("wb")
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            log.close()
            if name == "server":
                self.wait(lambda: "Ready" in self.said("server"), 60)
        for name in names:
            self.wait(lambda name=name: name == "server" or "Joined" in self.said(name), 90)  # type: ignore[misc]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            said = {name: self.said(name)[-2000:] for name in self.running}
            assert not dead and time.monotonic() < deadline, f"dead {dead}; {said}"
            time.sleep(0.1)

    def begin(self, app: str, folder: Path) -> None:
        """Start an app of this folder on the server, as `submit` starts its own."""
        home = folder / "app"
        home.mkdir(exist_ok=True)
        (home / "pyproject.toml").write_text(
            '[project]\nname = "test"\nversion = "0.1.0"\ndescription = "a test"\nlicense = "Apache-2.0"\n'
            'dependencies = []\n[tool.flwr.app]\npublisher = "test"\n[tool.flwr.app.config]\nfolder = ""\n'
            f'[tool.flwr.app.components]\nserverapp = "{app}:app"\nclientapp = "{app}:client"\n'
        )
        (home / f"{app}.py").write_text((HERE / "apps" / f"{app}.py").read_text())
        flwr(self.server / "flower", "run", str(home), "here", "-c", f'folder="{folder}"')

    def submit(self, name: str, wanted: RunConfig) -> Path:
        folder = self.folder / name
        folder.mkdir()
        (folder / "submitted.toml").write_text(wanted.to_toml())
        (folder / "submission.json").write_text(json.dumps({"run": secrets.token_hex(16), "clients": 3}))
        self.begin("seeded_app", folder)
        return folder

    def finished(self, folder: Path, seconds: float = 120) -> Outcome:
        self.wait(lambda: (folder / "result.json").exists() or (folder / "failure.json").exists(), seconds)
        assert not (folder / "failure.json").exists(), (folder / "failure.json").read_text()
        self.wait(lambda: not held(folder), 30)
        return outcome(folder)

    def kill(self, *names: str) -> None:
        """kill -9; what they started ends with them."""
        for name in names:
            process = self.running.pop(name)
            process.kill()
            process.wait()

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def held(folder: Path) -> bool:
    from fairveil.store import is_held

    return is_held(folder)


def rounds(folder: Path) -> int:
    try:
        with sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True, timeout=5) as database:
            return int(database.execute("SELECT COUNT(*) FROM round").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


class Seeded(Place):
    def root(self, plan: Plan, store: Store) -> str:
        return "test"


def local(folder: Path, algorithm: dict[str, Any]) -> Outcome:
    """The same run on one machine."""
    run_in(config(algorithm, local=True, engine={"workers": 1, "block": 1}), folder, place=Seeded())
    return outcome(folder)


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.ledger == other.ledger
    for name, value in one.checkpoint.state.items():
        if hasattr(value, "shape"):
            assert torch.allclose(torch.as_tensor(value), torch.as_tensor(other.checkpoint.state[name]), atol=1e-4)


def own_ledger(folder: Path, run: Path) -> list[tuple[str, str, bytes, bytes]]:
    """What a client's own ledger says of a run."""
    name = json.loads((run / "submission.json").read_text())["run"]
    query = (
        "SELECT request, what, digest, reply FROM ledger JOIN mechanism ON mechanism.id = mechanism "
        "JOIN run ON run.id = unit WHERE run.name = ?"
    )
    with sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True, timeout=5) as database:
        return sorted(database.execute(query, (name,)))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    made = Federation(tmp_path_factory.mktemp("federation"), port)
    try:
        made.start("server", *NAMES)
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("algorithm", [{"name": "r-dpcfl", "rounds": 6}, {"name": "dp-fedavg", "rounds": 4}, PATE])
def test_a_run_ends_as_on_one_machine(federation: Federation, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    folder = federation.submit(algorithm["name"], config(algorithm))
    deployed, here = federation.finished(folder), local(tmp_path / "local", algorithm)
    assert_same(deployed, here)
    for number, name in enumerate(NAMES):
        ours = own_ledger(federation.folder / name, folder)
        if algorithm["name"] == "r-dpcfl":
            assert ours == [entry[1:] for entry in here.ledger if entry[0] == number]
        else:  # the federation has one entry a round, a client one for each round that it was drawn in
            requests = [request for unit, request, *_ in here.ledger if unit == FEDERATION]
            assert {request for request, *_ in ours} <= set(requests)
        if algorithm is PATE:  # everybody votes in every round, with a teacher that nobody else has
            (teachers,) = (federation.folder / name / "personal").iterdir()
            kept = load_file(max(teachers.iterdir()))
            assert torch.allclose(kept["model"], here.checkpoint.personal[number]["model"], atol=1e-4)
            assert len(ours) == 2 and deployed.checkpoint.personal == {}
        run = status(federation.folder / name)["runs"][-1]
        assert run["state"] == "finished" and run["own_test"]["n"] > 0  # scores are there, and stay there
    assert json.loads((folder / "result.json").read_text()).keys().isdisjoint({"accuracy", "loss"})


def test_a_malicious_server_gets_nothing(federation: Federation) -> None:
    victim = federation.folder / "client-2"
    before = status(victim)
    folder = federation.folder / "malicious"
    folder.mkdir()
    (folder / "victim.json").write_text(json.dumps(["client-2"]))
    federation.begin("malicious_app", folder)
    federation.wait((folder / "answers.json").exists, 90)
    answers = json.loads((folder / "answers.json").read_text())
    fair = {"a fair proposal": "accepted", "a fair request": "release", "the same request again": "release"}
    fair |= {"the second round": "release", "an evaluation": "kept"}
    for attack, answer in answers.items():
        assert answer["kind"] == fair.get(attack, "refused"), (attack, answer)
        if attack not in fair:
            assert set(answer["values"]) == {"why"}
    assert answers["the same request again"] == answers["a fair request"]
    assert answers["an evaluation"]["values"] == {}
    after = status(victim)
    run = after["runs"][-1]
    assert run["run"] == "0" * 32 and run["released"] == 2 == run["accepted"]
    assert len(after["refusals"]) - len(before["refusals"]) == len(answers) - len(fair)
    assert after["spent"]["epsilon"] == pytest.approx(before["spent"]["epsilon"] + run["epsilon"])
    log = (victim / "join.log").read_text()
    assert all(refusal["why"] in log for refusal in after["refusals"])


def test_whatever_is_killed_the_run_goes_on_to_the_same_end(federation: Federation, tmp_path: Path) -> None:
    algorithm = {"name": "global", "rounds": 14, "local_epochs": 20}
    here = local(tmp_path / "local", algorithm)
    folder = federation.submit("killed", config(algorithm))

    def until(number: int) -> None:
        federation.wait(lambda: rounds(folder) >= number or (folder / "failure.json").exists(), 120)
        assert not (folder / "failure.json").exists(), (folder / "failure.json").read_text()
        time.sleep(0.4)  # into the next round

    def child(name: str, module: str) -> int:
        """The process below a client's supervisor that runs a module."""
        pid = federation.running[name].pid
        done = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=True
        )
        return next(int(line.split()[0]) for line in done.stdout.splitlines() if module in line)

    until(1)
    os.kill(child("client-0", "supernode"), signal.SIGKILL)
    until(3)
    os.kill(child("client-1", "seeded_client"), signal.SIGKILL)
    until(5)
    federation.kill("client-2")
    federation.start("client-2")
    until(7)
    federation.kill("server")  # and the ServerApp with it
    federation.wait(lambda: not held(folder), 30)
    federation.start("server")
    federation.begin("seeded_app", folder)
    until(10)
    federation.kill("server", *NAMES)
    federation.wait(lambda: not held(folder), 30)
    federation.start("server", *NAMES)
    federation.begin("seeded_app", folder)
    assert_same(federation.finished(folder, 180), here)
    for number, name in enumerate(NAMES):
        assert own_ledger(federation.folder / name, folder) == [e[1:] for e in here.ledger if e[0] == number]
