"""What a client's ledger says, for its owner."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from fairveil.guard.guard import END
from fairveil.guard.policy import Proposal, read_client


def status(folder: Path) -> dict[str, Any]:
    """What a client's ledger says, for its owner; another process may be using it."""
    config, policy = read_client(folder)
    found: dict[str, Any] = {
        "name": config.name, "server": config.server,
        "policy": {"epsilon": policy.epsilon, "delta": policy.delta, "trust": policy.trust},
        "spent": {"epsilon": 0.0, "delta": 0.0}, "runs": [], "refusals": [],
    }  # fmt: skip
    path = folder / "ledger.sqlite"
    if not path.exists():
        return found
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not {"run", "refusal", "diagnostic", "ledger"} <= tables:
            return found
        posted = dict(database.execute("SELECT unit, COUNT(*) FROM ledger GROUP BY unit"))
        planned = dict(database.execute("SELECT unit, SUM(count) FROM plan GROUP BY unit"))
        query = "SELECT id, name, proposal, epsilon, delta, state, since FROM run ORDER BY id"
        for number, name, text, epsilon, delta, state, since in database.execute(query):
            unit = Proposal.read(text).unit
            if number in posted:
                found["spent"]["epsilon"] += epsilon
                found["spent"]["delta"] += delta
            scores = "SELECT name, value FROM diagnostic WHERE run = ? AND request = ?"
            found["runs"].append(
                {
                    "run": name, "since": since, "state": state, "protects": unit, "epsilon": epsilon, "delta": delta,
                    "released": posted.get(number, 0), "accepted": planned.get(number, 0),
                    "own_test": dict(database.execute(scores, (number, END))),
                }
            )  # fmt: skip
        refusals = "SELECT since, run, request, why FROM refusal ORDER BY rowid"
        keys = ("since", "run", "request", "why")
        found["refusals"] = [dict(zip(keys, row, strict=True)) for row in database.execute(refusals)]
    return found
