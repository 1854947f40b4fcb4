"""Runs that are handed to a server: followed, interrupted, resumed, refused."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.flower
Start = Callable[..., Any]
CONFIG = """\
name = "small"
[data]
dataset = "clients"
[model]
name = "logistic"
[algorithm]
name = "global"
rounds = {rounds}
batch_size = 16
[privacy]
epsilon = 3.0
delta = 5e-4
"""


def status(start: Start, folder: Path) -> dict[str, Any]:
    asked = start("status", str(folder), "--json")
    assert asked.process.wait(60) == 0, asked.said
    found: dict[str, Any] = json.loads(asked.said)
    return found


def test_a_run_goes_on_through_whatever_happens_and_is_paid_once(
    start: Start, server: Path, make_client: Callable[[str], Path], tmp_path: Path, gone_within: Callable[..., float]
) -> None:
    clients = [make_client(name) for name in ("north", "south")]
    keys = [part for client in clients for part in ("--allow", str(client / f"{client.name}.pub"))]
    config = tmp_path / "small.toml"
    config.write_text(CONFIG.format(rounds=80))
    serving = start("serve", str(server), *keys)
    serving.wait_for("Ready")
    joining = [start("join", str(client)) for client in clients]
    for one in joining:
        one.wait_for("Joined")
    places = ("--server", str(server), "--runs", str(tmp_path / "a folder of runs"))

    following = start("submit", str(config), *places)
    (folder,) = wait_for_rounds(tmp_path / "a folder of runs", 2, following.process)
    assert following.end(signal.SIGINT) == 130 and "The run goes on" in following.said
    assert [run["state"] for run in status(start, server)["runs"]] == ["under way"]

    following = start("submit", str(folder), *places, "--resume")
    following.wait_for("Following")
    wait_for_rounds(folder.parent, 5, following.process)
    family = serving.family()
    assert len(family) == 4  # serve, SuperLink, SuperExec, the run's process
    serving.end(signal.SIGKILL)
    gone_within(family, 20)
    assert following.process.wait(60) == 1 and "Traceback" not in following.said

    serving = start("serve", str(server))
    serving.wait_for("Ready")
    for one in joining:
        one.wait_for("Joined", times=2)
    resumed = start("submit", str(folder), *places, "--resume", "--json")
    assert resumed.process.wait(180) == 0, resumed.said
    result = json.loads(resumed.said.splitlines()[-1])
    assert result["rounds"] == 80 and result["epsilon_spent"] == result["epsilon"] <= 3.0
    for client in clients:
        found = status(start, client)
        (run,) = found["runs"]
        assert (run["state"], run["released"], run["accepted"]) == ("finished", 80, 80)
        assert 2.9 < found["spent"]["epsilon"] <= 3.0 and found["refusals"] == []

    again = start("submit", str(config), *places)  # 3 and 3 are more than the 4 that each allows
    assert again.process.wait(120) != 0 and "Traceback" not in again.said, again.said
    assert again.said.count("the policy allows 4 in all") == 2, again.said
    assert all(len(status(start, client)["refusals"]) == 1 for client in clients)
    states = [run["state"] for run in status(start, server)["runs"]]
    assert states == ["finished", "failed"]


def wait_for_rounds(runs: Path, rounds: int, process: subprocess.Popen[bytes]) -> list[Path]:
    """Until the run in this folder has a checkpoint of this round, or of a later one."""
    deadline = time.monotonic() + 120
    while True:
        found = sorted(runs.glob("*/checkpoints/round-*.safetensors"))
        if found and int(found[-1].stem.removeprefix("round-")) >= rounds:
            return [path for path in runs.iterdir() if path.is_dir()]
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
