"""Runs on a federation: handed to the server, followed by their folders, resumed."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fairveil.config import load_config
from fairveil.deploy.folders import server_config
from fairveil.deploy.programs import Told, flwr, require_flower
from fairveil.errors import RunFault, UserError
from fairveil.store import is_held, new_folder, write_whole

LOOK, ASK = 0.2, 5.0  # seconds between looks at a run folder, and between questions to Flower

APP = """\
[project]
name = "fairveil-run"
version = "1.0.0"
description = "A fairveil run. Clients do not execute what is in here."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fairveil"

[tool.flwr.app.components]
serverapp = "fairveil_app:app"
clientapp = "fairveil_app:client"

[tool.flwr.app.config]
folder = ""
"""

CODE = """\
from fairveil.deploy.federation import main
from fairveil.engine.flower import client_app, server_app

app = server_app(main)
client = client_app()
"""

Show = Callable[[int, int], None]


def submit_new(path: Path, settings: Sequence[str], server: Path, runs: Path) -> Path:
    """Hand the run of a config to a server. Returns the folder of the run, which goes on by itself.

    Raises:
        UserError: the config names data of its own, no server runs, or no client is admitted.
    """
    config = load_config(path, settings)
    if config.data.dataset != "clients":
        raise UserError(
            f'data.dataset = "{config.data.dataset}" is not for a federation.',
            "There the clients hold the data, and each says in its own client.toml where. Nothing was run.",
            "--set data.dataset=clients",
        )
    admitted = _admitted(server)
    folder = new_folder(runs, config.name)
    write_whole(folder / "submitted.toml", config.to_toml().encode())
    submission = {"run": secrets.token_hex(16), "clients": len(admitted)}
    write_whole(folder / "submission.json", json.dumps(submission).encode())
    _start(folder, server)
    return folder


def submit_again(folder: Path, server: Path) -> None:
    """Let a run that was interrupted go on; one that is finished or still under way stays as it is.

    Raises:
        UserError: this is not a submitted run, or no server runs.
    """
    if not (folder / "submission.json").exists():
        raise UserError(
            f"{folder} is not a run that was submitted.",
            "It has no submission.json, so no client has ever heard of it.",
            f"fairveil deploy submit CONFIG --server {server}",
        )
    if (folder / "result.json").exists():
        return
    _admitted(server)
    if _state(folder, server).startswith("finished"):
        (folder / "failure.json").unlink(missing_ok=True)
        _start(folder, server)


def follow(folder: Path, server: Path, show: Show) -> dict[str, Any]:
    """Wait for a run to end, by what is in its folder. Returns its result.

    Args:
        show: takes the number of rounds that are done, and of how many.

    Raises:
        UserError, RunFault: as the run ended.
    """
    asked, seen, ended = time.monotonic(), -1, False
    while not (folder / "result.json").exists():
        if (folder / "failure.json").exists():
            failure = json.loads((folder / "failure.json").read_text())
            raise Told(failure["error"]) if failure["code"] == 2 else RunFault(failure["error"])
        if ended:
            raise RunFault(
                f"The server's process of this run is gone; {server}/serve.log says more. What was finished is safe.\n"
                f"  Go on with: fairveil deploy submit {folder} --server {server} --resume"
            )
        done = _rounds_done(folder)
        if done != seen:
            show(done, _rounds(folder))
            seen, asked = done, time.monotonic()
        elif time.monotonic() > asked + ASK:
            ended = _state(folder, server).startswith("finished")  # then look into the folder once more
            asked = time.monotonic()
            continue
        time.sleep(LOOK)
    if _rounds(folder):
        show(_rounds(folder), _rounds(folder))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def submitted(server: Path) -> dict[Path, str]:
    """The runs that were handed to a server, oldest first, each with the number that Flower gave it last."""
    found: dict[Path, str] = {}
    with suppress(FileNotFoundError):
        for line in (server / "runs.jsonl").read_text().splitlines():
            with suppress(ValueError):  # the last line may be cut short
                entry = json.loads(line)
                found[Path(entry["folder"])] = entry["flower"]
    return found


def run_states(server: Path) -> dict[str, str]:
    """What Flower says of the runs it knows, by its numbers for them."""
    return {run["run-id"]: run["status"] for run in flwr(server / "flower", "list", "here")["runs"]}


def _admitted(server: Path) -> dict[str, Any]:
    """The clients of a server that is running."""
    require_flower()
    server_config(server)
    if not is_held(server) or not (server / "registered.json").exists():
        raise UserError(
            f"no server is running in {server}.",
            "A run is handed to a running server. Nothing was run.",
            f"fairveil deploy serve {server}, and leave it running",
        )
    admitted: dict[str, Any] = json.loads((server / "registered.json").read_text())
    if not admitted:
        raise UserError(
            f"{server} has no clients.",
            "Nobody is admitted, so nobody could take part. Nothing was run.",
            f"put the NAME.pub of each client into {server}/clients/",
        )
    return admitted


def _start(folder: Path, server: Path) -> None:
    """Have Flower start the run's process on the server."""
    app = server / "app"
    app.mkdir(exist_ok=True)
    write_whole(app / "pyproject.toml", APP.encode())
    write_whole(app / "fairveil_app.py", CODE.encode())
    started = flwr(server / "flower", "run", str(app), "here", "-c", f"folder={json.dumps(str(folder.resolve()))}")
    with (server / "runs.jsonl").open("a") as file:
        file.write(json.dumps({"folder": str(folder.resolve()), "flower": started["run-id"]}) + "\n")


def _state(folder: Path, server: Path) -> str:
    """What Flower says of a run; one that it has forgotten is finished."""
    number = submitted(server).get(folder.resolve())
    return run_states(server).get(number, "finished:forgotten") if number else "finished:never started"


def _rounds_done(folder: Path) -> int:
    path = folder / "run.sqlite"
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)) as database,
    ):
        return int(database.execute("SELECT COALESCE(MAX(round), 0) FROM round").fetchone()[0])
    return 0


def _rounds(folder: Path) -> int:
    """Of a run that is planned; 0 before."""
    path = folder / "config.toml"
    return load_config(path).build_algorithm().rounds if path.exists() else 0
