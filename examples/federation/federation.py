"""A federation of four hospitals on this machine: its folders, its processes, a run, and an orderly end.

    python examples/federation/federation.py [FOLDER]

What is done here with one FOLDER is done on five machines with the same commands; see docs/deployment.md.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fairveil.data.hospitals import HeartDisease

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-c", "from fairveil.cli import main; main()", "deploy"]
PORT = 9093
POLICY = """\
epsilon = 4.0
delta = 1e-3
"""


def fairveil(*arguments: str | Path) -> int:
    """A `fairveil deploy` command, to its end."""
    sys.stdout.write(f"\n$ fairveil deploy {' '.join(map(str, arguments))}\n")
    sys.stdout.flush()
    return subprocess.run([*COMMAND, *map(str, arguments)], check=False).returncode


def start(log: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """A `fairveil deploy` command that stays; what it says goes to a file."""
    sys.stdout.write(f"\n$ fairveil deploy {' '.join(map(str, arguments))} > {log} &\n")
    sys.stdout.flush()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        return subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=file, stderr=file, env=environment)


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{log} does not say {text!r}:\n{log.read_text()}")
        time.sleep(0.1)


def make_folders(folder: Path) -> list[Path]:
    """A server, and four hospitals with their own patients only. Returns the hospitals' folders."""
    server = folder / "server"
    if fairveil("init-server", server, "--host", "localhost", "--port", str(PORT)):
        sys.exit(1)
    patients = pd.read_csv(io.BytesIO(HeartDisease().file("heart_disease.csv")))
    patients["disease"] = (patients["num"] > 0).astype(int)
    hospitals = []
    for name, own in patients.groupby("hospital"):
        client = folder / str(name)
        address = f"localhost:{PORT}"
        if fairveil("init-client", client, "--name", str(name), "--server", address, "--ca", server / "ca.crt"):
            sys.exit(1)
        own.drop(columns=["hospital", "num"]).to_csv(client / "records.csv", index=False)
        identity = f'name = "{name}"\nserver = "{address}"\ngroup = "{name}"\n\n'
        (client / "client.toml").write_text(identity + (HERE / "hospital.toml").read_text())
        (client / "policy.toml").write_text(POLICY)
        hospitals.append(client)
    return hospitals


def run(folder: Path, hospitals: Sequence[Path]) -> int:
    """Start all, submit, show what became of it, stop all."""
    server = folder / "server"
    keys = [part for client in hospitals for part in ("--allow", client / f"{client.name}.pub")]
    processes = []
    try:
        logs = [folder / "server.txt", *(folder / f"{client.name}.txt" for client in hospitals)]
        processes.append(start(logs[0], "serve", server, *keys))
        wait_for("Ready", logs[0], processes[0])
        processes += [start(log, "join", client) for log, client in zip(logs[1:], hospitals, strict=True)]
        for log, process in zip(logs[1:], processes[1:], strict=True):
            wait_for("Joined", log, process)
        code = fairveil("submit", HERE / "heart.toml", "--server", server, "--runs", folder / "runs")
        fairveil("status", server)
        for client in hospitals:
            fairveil("status", client)
        return code
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="federation-"))
    sys.exit(run(place, make_folders(place)))
