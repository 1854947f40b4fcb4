"""Flower's programs as processes of ours: started with a log, ended with whoever started them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from fairveil.errors import RunFault, UserError
from fairveil.processes import die_with_parent

PATIENCE = 10.0  # seconds for a program to end by itself, before it is killed

Tell = Callable[[str], None]


class Told(UserError):
    """A user's mistake that another process has found, in its words."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "", "")

    def __str__(self) -> str:
        return self.what


def require_flower() -> None:
    """Raise a UserError unless Flower is installed."""
    if find_spec("flwr") is None:
        raise UserError(
            "Flower is not installed.",
            "It carries the messages between server and clients. Nothing was started.",
            "pip install 'fairveil[flower]'",
        )


class Program:
    """A running program and all that it starts.

    It dies with this process, even by kill -9. (What it starts itself, Flower's programs watch: they end with it.)

    Args:
        arguments: a module and what it is called with.
        home: Flower's folder.
        log: where its output goes.
        cwd: where it works; relative paths and modules are looked for there.
        piped: its standard input and output are for us.
    """

    def __init__(
        self, arguments: Sequence[str], *, home: Path, log: IO[bytes], cwd: Path | None = None, piped: bool = False
    ) -> None:
        parent = os.getpid()

        def begin() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it is dead already
                os._exit(1)

        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment(home), cwd=cwd, stderr=log, preexec_fn=begin,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL, stdout=subprocess.PIPE if piped else log,
            start_new_session=True,  # Ctrl-C is for us, who stop it in good order
        )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        """End it and whatever it started, by their process ids: politely, and after a while by force."""
        handles = [handle for pid in _family(self.process.pid) if (handle := _handle(pid)) is not None]
        try:
            if not self.ended:
                self.process.terminate()
            deadline = time.monotonic() + PATIENCE
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
            while time.monotonic() < deadline and any(_alive(handle) for handle in handles):
                time.sleep(0.05)
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            self.process.wait()
        finally:
            for handle in handles:
                os.close(handle)


def environment(home: Path) -> dict[str, str]:
    """For Flower's programs: their own folder, nothing told to its makers, and their commands on the path."""
    return os.environ | {
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def flwr(home: Path, *arguments: str, timeout: float = 60) -> dict[str, Any]:
    """What the command `flwr` answers, as it tells it in JSON.

    Raises:
        RunFault: it failed, or the server does not answer.
    """
    command = [str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RunFault(f"The server did not answer within {timeout:g} seconds: flwr {' '.join(arguments)}") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if not answer.get("success"):
        why = answer.get("error-message") or done.stderr.strip() or done.stdout.strip()
        raise RunFault(f"The server refused: flwr {' '.join(arguments)}\n  {str(why).strip()}")
    return answer


def new_text(path: Path, start: int) -> str:
    """What was written to a log since it had this many bytes."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM alike leave this block by KeyboardInterrupt, and are swallowed: to be stopped is no fault."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {which: signal.signal(which, stop) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family


def _handle(pid: int) -> int | None:
    """A descriptor that means this process and never another one that gets its number later."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _alive(handle: int) -> bool:
    return not select.select([handle], [], [], 0)[0]
