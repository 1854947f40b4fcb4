"""Run a sweep: what is finished is kept, what is not is run, a few at a time; the same call goes on after any end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TextIO

import pandas as pd

from fairveil.engine.local import usable_cores
from fairveil.errors import RunFault, UserError
from fairveil.provenance import published
from fairveil.run import Interrupted
from fairveil.store import disk_faults, hold, write_whole
from fairveil.sweep.cell import OUTPUT, PATIENCE, CellProcess, Failure
from fairveil.sweep.config import Cell, Sweep
from fairveil.sweep.results import make_table, read_result, worst_group, write_table
from fairveil.sweep.summary import SweepResult, cell_folders, summarise_sweep

WRITING = 0.05  # of the time of a sweep may go into writing its table


@dataclass(frozen=True)
class CellState:
    """How far a run of the sweep is."""

    status: Literal["waiting", "running", "finished", "kept", "failed"]  # kept: finished before
    round: int = 0
    rounds: int = 0
    worst: float | None = None  # the worst group's main metric
    error: str = ""


Progress = Callable[[Cell, CellState], None]


def run_sweep(sweep: Sweep, folder: Path, jobs: int | None = None, progress: Progress | None = None) -> SweepResult:
    """Run what is not finished yet of a sweep.

    A run that fails takes no other with it; it is listed, and tried again by the next call.

    Args:
        folder: of this sweep; the next call with it goes on.
        jobs: runs at a time, one for each core if None.

    Raises:
        UserError: the folder is in use, or cannot be written.
        RunFault: the disk has failed.
        Interrupted: Ctrl-C. What was finished is safe.
    """
    with _held(folder), disk_faults(folder), (folder / "sweep.log").open("a") as log:
        return _Runner(sweep, folder, log, progress or (lambda cell, state: None)).run(jobs or usable_cores())


class _Runner:
    def __init__(self, sweep: Sweep, folder: Path, log: TextIO, tell: Progress) -> None:
        self.sweep, self.folder, self.log, self.tell = sweep, folder, log, tell
        self.folders = cell_folders(sweep, folder)
        self.results: dict[Cell, dict[str, Any]] = {}
        self.failures: dict[Cell, Failure] = {}
        self.dirty, self.next_write = True, 0.0

    def run(self, jobs: int) -> SweepResult:
        """All that is waiting, then the summary."""
        write_whole(self.folder / "sweep.toml", self.sweep.config.to_toml().encode())
        for cell, folder in self.folders.items():
            if (found := read_result(folder, cell.digest)) is not None:
                self.results[cell] = found
            self.tell(cell, CellState("kept", worst=worst_group(found)) if found else CellState("waiting"))
        kept = len(self.results)
        if 0 < kept < len(self.sweep.cells):
            self._check_kept()
        # Seed by seed, so that a sweep cut short has every setting at some seeds, and not some settings at every seed.
        waiting = deque(sorted((cell for cell in self.sweep.cells if cell not in self.results), key=self._seed))
        self._save()
        stopped = self._work(waiting, min(jobs, len(waiting)))
        self._save(now=True)
        result = self._summary(kept)
        if stopped:
            raise Interrupted(
                f"Stopped: {len(self.results)} of {len(self.sweep.cells)} runs are finished, and the rounds that "
                f"others have done are saved, in {self.folder}."
            )
        return result

    def _check_kept(self) -> None:
        """What is added must be of the same data and code as what is there: else they could not be compared."""
        looked: set[str] = set()
        for cell, result in self.results.items():
            changed = "code" if result.get("code") != cell.config.code() else ""
            data = cell.config.data.model_dump_json()
            if not changed and data not in looked:  # one run of each kind of data will do
                looked.add(data)
                now = published(cell.config.build_federation().fingerprint)
                changed = "data" if result.get("data_fingerprint") != now else ""
            if changed:
                raise UserError(
                    f"the {changed} of {self.folder} {'have' if changed == 'data' else 'has'} changed since "
                    f"({cell}) was run.",
                    f"{len(self.results)} runs are finished; others would be compared with them as if nothing else\n"
                    "were different. Nothing was run.",
                    "restore it as it was, or another name for the sweep",
                )

    def _work(self, waiting: deque[Cell], jobs: int) -> bool:
        """Run them, `jobs` at a time; whether the user stopped it."""
        busy: dict[Cell, CellProcess] = {}
        with _ctrl_c() as pressed:
            try:
                while waiting or busy:
                    while waiting and len(busy) < jobs:
                        cell = waiting.popleft()
                        busy[cell] = self._start(cell, jobs)
                    handles = [handle for process in busy.values() for handle in process.handles]
                    if pressed in wait([pressed, *handles], self._until_write()):
                        self._stop(busy, pressed)
                        return True
                    for cell in list(busy):
                        self._follow(cell, busy)
                    self._save()
            finally:
                for process in busy.values():
                    process.close(patience=0)
        return False

    def _start(self, cell: Cell, jobs: int) -> CellProcess:
        config, folder = cell.config, self.folders[cell]
        if jobs > 1:  # the processes are the cores' share; which engine it is does not change a result
            engine = config.engine.model_copy(update={"workers": 1})
            config = config.model_copy(update={"engine": engine})
        folder.mkdir(exist_ok=True)
        (folder / "failure.txt").unlink(missing_ok=True)
        self._note("start", cell)
        self.tell(cell, CellState("running"))
        try:
            return CellProcess(config, folder)
        except (EOFError, OSError) as error:
            raise RunFault(
                f"no process could be started for {cell} ({error}): too little memory, or too many processes?\n"
                "  What was finished is safe; the same command goes on."
            ) from error

    def _follow(self, cell: Cell, busy: dict[Cell, CellProcess], stopped: bool = False) -> None:
        """Take what a process has told; if it has ended, its result or its failure."""
        process = busy[cell]
        for done in process.read():
            self.tell(cell, CellState("running", done.round, done.rounds, done.worst))
        if not process.ended:
            return
        del busy[cell]
        failure = process.close()
        folder = self.folders[cell]
        self.dirty = True
        if (folder / OUTPUT).exists() and (folder / OUTPUT).stat().st_size == 0:
            (folder / OUTPUT).unlink()
        if (result := read_result(folder, cell.digest)) is not None:
            self.results[cell] = result
            self._note("finish", cell)
            self.tell(cell, CellState("finished", worst=worst_group(result)))
        elif not stopped:
            self.failures[cell] = failure
            write_whole(folder / "failure.txt", f"{failure.text.rstrip()}\n".encode())
            self._note("failure", cell)
            self.tell(cell, CellState("failed", error=_first_line(failure)))

    def _stop(self, busy: dict[Cell, CellProcess], pressed: int) -> None:
        """Let them save what they have; the impatient press Ctrl-C again."""
        os.read(pressed, 1)
        for process in busy.values():
            process.stop()
        deadline = time.monotonic() + PATIENCE
        while busy and (left := deadline - time.monotonic()) > 0:
            handles = [handle for process in busy.values() for handle in process.handles]
            if pressed in wait([pressed, *handles], left):
                return
            for cell in list(busy):
                self._follow(cell, busy, stopped=True)

    def _note(self, what: str, cell: Cell) -> None:
        """A line of the log, which tells every start and end there ever was."""
        self.log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {what:7} {self.folders[cell].name}\n")
        self.log.flush()

    def _table(self) -> pd.DataFrame:
        errors = {cell: _first_line(failure) for cell, failure in self.failures.items()}
        return make_table(self.sweep, self.results, errors)

    def _until_write(self) -> float | None:
        return max(0.0, self.next_write - time.monotonic()) if self.dirty else None

    def _save(self, now: bool = False) -> None:
        """Write the table if it has changed, soon: when it is large, and runs are short, not after each of them."""
        started = time.monotonic()
        if not self.dirty or (started < self.next_write and not now):
            return
        table = self._table()
        for name in ("results.csv", "results.parquet"):
            write_table(table, self.folder / name)
        ended = time.monotonic()
        self.dirty, self.next_write = False, ended + (ended - started) / WRITING

    def _summary(self, kept: int) -> SweepResult:
        errors = {cell: failure.head for cell, failure in self.failures.items()}
        result = summarise_sweep(self.sweep, self.folder, self.folders, self.results, errors, kept)
        write_table(result.comparison, self.folder / "comparison.csv")
        summary = result.to_json()
        del summary["rows"]  # they are the results
        write_whole(self.folder / "sweep.json", json.dumps(summary, indent=2).encode())
        return result

    def _seed(self, cell: Cell) -> int:
        return self.sweep.config.seeds.index(cell.seed)


def _first_line(failure: Failure) -> str:
    return failure.head.splitlines()[0] if failure.head else "no reason was given"


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder of a sweep, for this process alone."""
    with ExitStack() as opened:
        try:
            (folder / "cells").mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context((folder / "lock").open("w"))
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written.",
                f"A sweep keeps its runs and results there ({error.strerror}). Nothing was run.",
                "--sweeps FOLDER, a folder you may write to",
            ) from error
        hold(lock, folder, "Another process is running this sweep; two at once would do its runs twice.")
        yield


@contextmanager
def _ctrl_c() -> Iterator[int]:
    """A file descriptor with something to read for each Ctrl-C: it must not strike while a process is started."""
    ready, press = os.pipe()

    def pressed(*_: object) -> None:
        os.write(press, b"!")

    try:
        before = signal.signal(signal.SIGINT, pressed)
    except ValueError:  # not the main thread, which is the one that Ctrl-C goes to
        before = None
    try:
        yield ready
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
        os.close(ready)
        os.close(press)
