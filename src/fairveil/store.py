"""The run folder: config, ledger, metrics, checkpoints, models, statement.

Whatever is written here is either whole or absent after a crash: the database commits transactions to disk,
files are written beside and renamed. One process at a time holds a folder.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fairveil.errors import PrivacyError, RunFault, UserError
from fairveil.privacy.ledger import Ledger

FORMAT = 1  # of the run folder
CLIENT, VALUE = np.dtype("<i4"), np.dtype("<f8")  # in the columns of the table of scores
DISK_FAULTS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)

SCHEMA = """
CREATE TABLE IF NOT EXISTS unit (
    unit INTEGER PRIMARY KEY, size INTEGER, noise_multiplier REAL NOT NULL, epsilon REAL NOT NULL,
    accountant TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS client (client INTEGER PRIMARY KEY, name TEXT NOT NULL, "group" TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS scores (
    round INTEGER NOT NULL, split TEXT NOT NULL, model TEXT NOT NULL, metric TEXT NOT NULL,
    client BLOB NOT NULL, value BLOB NOT NULL, cluster BLOB, n BLOB,
    PRIMARY KEY (round, split, model, metric));
CREATE TABLE IF NOT EXISTS confusion (
    client INTEGER NOT NULL, attribute TEXT NOT NULL, of TEXT NOT NULL, actual INTEGER NOT NULL,
    predicted INTEGER NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (client, attribute, of, actual, predicted)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS round (round INTEGER PRIMARY KEY, seconds REAL NOT NULL);
"""


class Score(NamedTuple):
    """One row of the metrics table.

    Attributes:
        split: which records it was measured on ("test", "train").
        model: which model ("served", "finetuned", "local", "reference"), or which task made it.
        cluster: which row of the served models, if there are several.
        n: the number of records behind the value.
    """

    round: int
    client: int
    split: str
    model: str
    metric: str
    value: float
    cluster: int | None = None
    n: int | None = None


@dataclass(frozen=True)
class UnitPlan:
    """What was solved for one protected unit when the run was planned."""

    unit: int
    size: int | None
    noise_multiplier: float
    epsilon: float
    accountant: str


@dataclass(frozen=True)
class Checkpoint:
    """A finished round."""

    round: int
    entries: int  # in the ledger when it was saved
    state: Mapping[str, Any]
    personal: dict[int, Mapping[str, Tensor]]
    average: Tensor | None = None  # of the served models over the last rounds, where that is asked for


class Store:
    """An open run folder, held by this process alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk_faults(folder), ExitStack() as opened:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((folder / "lock").open("w"))
            hold(lock, folder, "Another process is running this run; two at once would spend its budget twice.")
            self.database = opened.enter_context(closing(sqlite3.connect(folder / "run.sqlite")))
            self.database.execute("PRAGMA journal_mode = WAL")
            self.database.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
            self.database.executescript(SCHEMA)
            self.ledger = Ledger(self.database)
            self._opened = opened.pop_all()  # all went well: they stay open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    # ---- the plan ----------------------------------------------------------------------------------

    def save_units(
        self, units: Sequence[UnitPlan], clients: Sequence[tuple[str, str]], meta: Mapping[str, str]
    ) -> None:
        """Write what was solved for every unit, each client's name and group, and what the plan was made from."""
        with self.database:
            self.database.executemany(
                "INSERT INTO unit VALUES (:unit, :size, :noise_multiplier, :epsilon, :accountant)",
                [asdict(unit) for unit in units],
            )
            rows = [(number, *client) for number, client in enumerate(clients)]
            self.database.executemany("INSERT INTO client VALUES (?, ?, ?)", rows)
            self.database.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())

    def meta(self, key: str) -> str | None:
        """One of the facts that the plan was made from."""
        row = self.database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def units(self) -> list[UnitPlan]:
        """What was solved when the run was planned; empty for a folder whose planning was cut short."""
        return [UnitPlan(*row) for row in self.database.execute("SELECT * FROM unit ORDER BY unit")]

    # ---- rounds ------------------------------------------------------------------------------------

    def finish_round(
        self, number: int, seconds: float, scores: Sequence[Score], state: object,
        personal: Mapping[int, Mapping[str, Tensor]], average: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Save a finished round: its metrics, then the checkpoint from which the next one starts.

        A crash between the two leaves metrics of a round that will be run again: it writes the same rows.
        """
        with disk_faults(self.folder):
            with self.database:
                self.database.execute("INSERT OR REPLACE INTO round VALUES (?, ?)", (number, seconds))
                self.database.executemany(
                    "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _columns(scores)
                )
            self.checkpoint(number, state, personal, average)

    def checkpoint(
        self, number: int, state: object, personal: Mapping[int, Mapping[str, Tensor]], average: Tensor | None = None
    ) -> None:
        """Write a checkpoint; the one before it stays, older ones go."""
        tensors, plain = _take_apart(state)
        if average is not None:
            tensors["average/"] = average
        for client, kept in personal.items():
            tensors |= {f"personal/{client}/{name}": value for name, value in kept.items()}
        metadata = {"format": FORMAT, "round": number, "entries": len(self.ledger), "plain": plain}
        # clones, since two clients may keep what is one tensor in memory
        data = save(
            {name: value.clone().contiguous() for name, value in tensors.items()}, {"run": json.dumps(metadata)}
        )
        self.write(f"checkpoints/round-{number:06d}.safetensors", data)
        for old in sorted((self.folder / "checkpoints").glob("round-*.safetensors"))[:-2]:
            old.unlink()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None before the first round is done."""
        return latest_checkpoint(self.folder)

    # ---- reading and writing -----------------------------------------------------------------------

    def scores(self, metric: str, split: str = "test", model: str = "served") -> dict[int, float]:
        """A metric of these models in the last round in which they were evaluated, by client."""
        return self._last("value", VALUE, metric, split, model)

    def counts(self, metric: str, split: str = "test", model: str = "served") -> dict[int, int]:
        """How many records are behind each of these scores; empty: that was not written down."""
        return self._last("n", CLIENT, metric, split, model)

    def _last(self, column: str, kind: np.dtype[Any], metric: str, split: str, model: str) -> dict[int, Any]:
        query = f"SELECT client, {column} FROM scores WHERE split = ? AND model = ? AND metric = ?"
        row = self.database.execute(f"{query} ORDER BY round DESC LIMIT 1", (split, model, metric)).fetchone()
        if row is None or row[1] is None:
            return {}
        return dict(zip(np.frombuffer(row[0], CLIENT).tolist(), np.frombuffer(row[1], kind).tolist(), strict=True))

    def totals(self, unit: int) -> dict[str, float]:
        """By metric, the sums over rounds of what was measured of one unit alone: of the federation, say."""
        found: dict[str, float] = {}
        alone = np.array([unit], CLIENT).tobytes()
        for metric, value in self.database.execute("SELECT metric, value FROM scores WHERE client = ?", (alone,)):
            found[metric] = found.get(metric, 0.0) + float(np.frombuffer(value, VALUE)[0])
        return found

    def save_confusion(self, rows: Sequence[tuple[int, str, str, int, int, int]]) -> None:
        """How often the served models took one class for another, at the end.

        Args:
            rows: client, attribute of the records and its value (both "" for all records), true class, predicted class,
                number of records.
        """
        with disk_faults(self.folder), self.database:
            self.database.executemany("INSERT OR REPLACE INTO confusion VALUES (?, ?, ?, ?, ?, ?)", rows)

    def seconds(self) -> float:
        """Time spent in finished rounds, over all interruptions."""
        return float(self.database.execute("SELECT COALESCE(SUM(seconds), 0) FROM round").fetchone()[0])

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the folder: whole or not at all, and on disk when this returns."""
        path = self.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return path

    def text(self, name: str) -> str | None:
        """What a file of the folder holds; None: there is none."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def secret(self) -> str:
        """The key of the run's noise, 256 random bits in a file that only its owner may read; made when first asked.

        Raises:
            PrivacyError: it is gone, and other noise would give away what was released.
        """
        path = self.folder / "secret.key"
        try:
            if not path.exists():
                if len(self.ledger):
                    raise PrivacyError(
                        f"{path} is gone. What was released cannot be released again with other noise: whoever saw "
                        "both could tell the records from their difference. Restore it, or start a new run."
                    )
                write_whole(path, secrets.token_hex(32).encode(), mode=0o600)
            return path.read_text()
        except OSError as error:
            raise _unwritable(self.folder, error) from error


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """What `Store.latest` gives, without holding the folder."""
    for path in sorted((folder / "checkpoints").glob("round-*.safetensors"), reverse=True):
        try:
            return _read_checkpoint(path)
        except Exception:  # damaged by the disk itself: the one before it gives the same run
            continue
    return None


def _columns(scores: Sequence[Score]) -> Iterator[tuple[Any, ...]]:
    """Scores as rows of the table: one for all clients that were measured in the same way.

    A thousand clients over five hundred rounds make millions of values, which would each need a row of their own.
    """
    alike: defaultdict[tuple[int, str, str, str], list[Score]] = defaultdict(list)
    for score in scores:
        alike[score.round, score.split, score.model, score.metric].append(score)
    for key, found in alike.items():
        found.sort(key=lambda score: score.client)
        client = np.array([score.client for score in found], CLIENT).tobytes()
        value = np.array([score.value for score in found], VALUE).tobytes()
        optional = ([score.cluster for score in found], [score.n for score in found])
        yield *key, client, value, *(None if None in many else np.array(many, CLIENT).tobytes() for many in optional)


def of_records(attribute: str, value: str) -> str:
    """The split of the test records that have this value of an attribute."""
    return f"test, {attribute} = {value}"


def hold(lock: TextIO, folder: Path, why: str) -> None:
    """Take a folder for this process alone, for as long as its lock file is open."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is in use.", why, "wait for it, or stop it first") from None


def is_held(folder: Path) -> bool:
    """Whether some process holds a folder now. Asks the system (Linux) and never the lock, which a run may want."""
    try:
        inode = (folder / "lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(line.split()[1] == "FLOCK" and line.split()[5].endswith(f":{inode}") for line in locks.splitlines())


def new_folder(runs: Path, name: str) -> Path:
    """A folder for a run that begins now."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            folder = runs / (f"{name}-{stamp}" + (f"-{number}" if number else ""))
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise UserError(
            f"{runs} cannot be written.",
            f"A run keeps its ledger and checkpoints there ({error.strerror}). Nothing was released.",
            "--runs FOLDER, a folder you may write to",
        ) from error
    return folder


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all; it is on disk when this returns."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.unlink(missing_ok=True)  # what a crash left there would keep its own mode
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)  # the rename itself
    os.close(directory)


@contextmanager
def disk_faults(folder: Path) -> Iterator[None]:
    """Turn what a disk can do to us into an error that is not a traceback."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError) as error:
        ours = type(error) is sqlite3.DatabaseError or isinstance(error, sqlite3.OperationalError)
        if not ours and getattr(error, "errno", None) not in DISK_FAULTS:
            raise
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: Exception) -> RunFault:
    return RunFault(
        f"{folder} could not be written: {error}.\n"
        "  Nothing is released that is not in the ledger. If the disk is full, free some space first."
    )


def _take_apart(state: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the plain values of a state dataclass. Floats are kept exactly, in hexadecimal."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for item in fields(state):  # type: ignore[arg-type]
        value = getattr(state, item.name)
        if isinstance(value, Tensor):
            tensors[f"state/{item.name}"] = value
        elif isinstance(value, np.ndarray):
            tensors[f"array/{item.name}"] = torch.from_numpy(value)
        elif isinstance(value, float):
            plain[item.name] = {"float": value.hex()}
        elif value is None or isinstance(value, int | str | bool):
            plain[item.name] = value
        else:
            raise TypeError(
                f"{type(state).__name__}.{item.name} is a {type(value).__name__}: a state holds tensors, "
                "arrays, numbers, strings and None, so that it can be saved and resumed exactly"
            )
    return tensors, plain


def _read_checkpoint(path: Path) -> Checkpoint:
    state: dict[str, Any] = {}
    personal: dict[int, dict[str, Tensor]] = {}
    average = None
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["run"])
        for key in file.keys():  # noqa: SIM118 (it is not a dictionary)
            kind, _, name = key.partition("/")
            if kind == "average":
                average = file.get_tensor(key)
            elif kind == "personal":
                client, _, name = name.partition("/")
                personal.setdefault(int(client), {})[name] = file.get_tensor(key)
            else:
                value = file.get_tensor(key)
                state[name] = value.numpy() if kind == "array" else value
    for name, value in metadata["plain"].items():
        state[name] = float.fromhex(value["float"]) if isinstance(value, dict) else value
    return Checkpoint(metadata["round"], metadata["entries"], state, dict(personal), average)
