"""The process of one run of a sweep, from both ends.

Whatever happens in it (an exception, a crash, no memory left) stays in it. It comes from a fork server that has
torch loaded, tells its rounds through a pipe, leaves its result in its folder, and dies with the sweep.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from fairveil.config import RunConfig
from fairveil.errors import PrivacyError, RunFault, UserError
from fairveil.processes import end_with_parent, keep_memory, start
from fairveil.run import Interrupted, RoundReport, run_in

OUTPUT = "output.txt"  # what a run prints itself: it would garble the display of the sweep
PATIENCE = 10.0  # seconds for a process that has been told to end
TAIL = 4000  # characters of its output that are told of a process that died without a word
# what a run imports when it is under way (vmap its compiler, digits their dataset): once, not in every process
PRELOAD = ["torch._dynamo", "sklearn.datasets", "fairveil.sweep"]


@dataclass(frozen=True)
class Round:
    """A round is done."""

    round: int
    rounds: int
    worst: float | None  # the worst group's main metric, if this round was evaluated


@dataclass(frozen=True)
class Failure:
    """Why a run failed: in short, and all that is known."""

    head: str
    text: str


class CellProcess:
    """A run under way, seen from the sweep."""

    failure: Failure | None = None  # as told by the process

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder, self.ended = folder, False
        self.process, self.connection = start(
            _live, (config, folder), preload=PRELOAD, duplex=False, daemon=False
        )  # fmt: skip

    @property
    def handles(self) -> list[Connection | int]:
        """One of them is ready when there is something to read, or when the process has ended."""
        return [self.connection, self.process.sentinel]

    def read(self) -> Iterator[Round]:
        """The rounds that it has told since; notices if it has ended."""
        dead = not self.process.is_alive()  # before the pipe is read: what it said last is still in there
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Failure):
                    self.failure = message
                else:
                    yield message
        except (EOFError, OSError):
            dead = True
        self.ended = dead

    def stop(self) -> None:
        """Tell it to end after saving."""
        self.process.terminate()

    def close(self, patience: float = PATIENCE) -> Failure:
        """Wait for its end, then force it. Gives the reason, if there is no result."""
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for _ in self.read():
            pass
        self.connection.close()
        return self.failure or self._died()

    def _died(self) -> Failure:
        code = self.process.exitcode or 0
        if code < 0:
            hint = ": often the operating system, reclaiming memory; fewer --jobs need less" if code == -9 else ""
            head = f"its process was killed by signal {-code} ({signal.Signals(-code).name}{hint})."
        else:
            head = f"its process ended with exit code {code} before the run did."
        with suppress(OSError):
            printed = (self.folder / OUTPUT).read_text(errors="replace")[-TAIL:].strip()
            if printed:
                return Failure(head, f"{head}\n\nThe last that it printed:\n{printed}")
        return Failure(head, head)


def _live(connection: Connection, config: RunConfig, folder: Path) -> None:
    """The life of a run's process."""
    end_with_parent()
    keep_memory()
    signal.signal(signal.SIGTERM, _interrupted)
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(output, number)
    faulthandler.enable()  # a crash in a library leaves its traceback in the output
    torch.set_num_threads(1)

    def tell(report: RoundReport) -> None:
        summary = report.summary
        worst = summary.by_group[summary.worst_group] if summary else None
        connection.send(Round(report.round, report.rounds, worst))

    try:
        _wait_for(folder)
        run_in(config, folder, progress=tell)
    except (Interrupted, KeyboardInterrupt):
        pass  # the sweep knows
    except (UserError, PrivacyError, RunFault) as error:
        connection.send(Failure(str(error), str(error)))
    except BaseException as error:
        head = "".join(traceback.format_exception_only(error)).strip()
        connection.send(Failure(head, traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()


def _interrupted(*_: object) -> NoReturn:
    """The sweep says stop: once, so that saving is not interrupted again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _wait_for(folder: Path) -> None:
    """The run of a sweep that was killed a moment ago may not be quite dead; the folder is free when it is."""
    deadline = time.monotonic() + PATIENCE
    with (folder / "lock").open("a") as lock:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.02)
