"""Numbers that take long to compute, kept on disk for the next time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

_memory: dict[str, list[float]] = {}  # the cache of this process, in front of the one on disk


def kept(parts: tuple[object, ...], compute: Callable[[], list[float]]) -> list[float]:
    """What `compute` gave the first time for these parts, which name all that it depends on."""
    key = hashlib.sha256(repr(parts).encode()).hexdigest()  # the repr of a float is exact
    if key not in _memory:
        row = _database("SELECT value, seal FROM kept WHERE key = ?", key)
        if row and row[1] == hashlib.sha256(f"{key} {row[0]}".encode()).hexdigest():  # no damaged row is believed
            _memory[key] = [float.fromhex(number) for number in row[0].split()]
        else:
            _memory[key] = compute()
            value = " ".join(number.hex() for number in _memory[key])
            seal = hashlib.sha256(f"{key} {value}".encode()).hexdigest()
            _database("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", key, value, seal)
    return _memory[key]


def _database(statement: str, *values: str) -> Any:
    """The first row of the answer; None if the cache cannot be used (read-only, corrupt, locked ...)."""
    with contextlib.suppress(sqlite3.Error, OSError, RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("FAIRVEIL_CACHE") or Path(base, "fairveil"))
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(folder / "numbers.sqlite", timeout=1)) as database, database:
            database.execute("PRAGMA synchronous=OFF")  # what is lost with the power is computed again
            database.execute("CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT, seal TEXT)")
            return database.execute(statement, values).fetchone()
    return None
