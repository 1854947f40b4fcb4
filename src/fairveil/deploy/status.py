"""How a server or a client is doing, for its keeper."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairveil.deploy.folders import server_config
from fairveil.deploy.programs import flwr, require_flower
from fairveil.deploy.submit import run_states, submitted
from fairveil.errors import UserError
from fairveil.store import is_held


def status(folder: Path) -> dict[str, Any]:
    """Of a server: its clients and runs. Of a client: what it has spent, on which runs, and what it refused.

    Raises:
        UserError: the folder is neither.
    """
    if (folder / "server.toml").exists():
        return _server(folder)
    if not (folder / "client.toml").exists():
        raise UserError(
            f"{folder} is neither the folder of a server nor that of a client.",
            "It has neither a server.toml nor a client.toml.",
            "the folder that `fairveil deploy init-server` or `init-client` made",
        )
    from fairveil.guard import status as of_client  # it loads torch

    return {"kind": "client", "running": is_held(folder), **of_client(folder)}


def _server(folder: Path) -> dict[str, Any]:
    config, running = server_config(folder), is_held(folder)
    known: dict[str, Any] = {}
    nodes: dict[str, str] = {}
    states: dict[str, str] = {}
    if running:
        require_flower()
        with suppress(FileNotFoundError):  # it is just starting
            known = json.loads((folder / "registered.json").read_text())
            found = flwr(folder / "flower", "supernode", "list", "here")["nodes"]
            nodes = {node["node-id"]: node["status"] for node in found}
            states = run_states(folder)
    clients = []
    for path in sorted((folder / "clients").glob("*.pub")):
        entry = known.get(path.stem)
        state = nodes.get(entry["node"], "unknown") if entry else "not admitted yet"
        words = {"online": "online", "registered": "has not joined yet", "offline": "offline"}
        clients.append({"name": path.stem, "state": words.get(state, state) if running else "no server is running"})
    runs = [
        {"run": str(run), "state": _run_state(run, states.get(number))} for run, number in submitted(folder).items()
    ]
    return {
        "kind": "server", "running": running, "listen": config.listen, "port": config.port, "hosts": config.hosts,
        "clients": clients, "runs": runs,
    }  # fmt: skip


def _run_state(run: Path, state: str | None) -> str:
    """By its folder; `state` is what Flower says, or None if it knows of no such run."""
    if (run / "result.json").exists():
        return "finished"
    if state is not None and not state.startswith("finished"):
        return "under way"
    return "failed" if (run / "failure.json").exists() else "interrupted" if run.exists() else "its folder is gone"
