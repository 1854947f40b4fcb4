"""Processes of our own: from a fork server that has the heavy modules loaded, and ended with whoever started them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec it would be too late


def start(
    target: Callable[..., None], args: tuple[Any, ...], *, preload: Sequence[str], duplex: bool, daemon: bool
) -> tuple[BaseProcess, Connection]:
    """Start a process that calls target(connection, *args), and our end of that connection.

    The target calls `end_with_parent` first. Ctrl-C is not for it: it is for whoever started it to decide.

    Args:
        preload: modules that the fork server loads once, for all processes; only the first call can say.
    """
    CONTEXT.set_forkserver_preload(list(preload))
    ours, theirs = CONTEXT.Pipe(duplex)
    process = CONTEXT.Process(target=target, args=(theirs, *args), daemon=daemon)
    with _without_main():
        resource_tracker.ensure_running()  # or the fork server starts it, and it takes the mask off again
        unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()  # it inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
        process.start()
    theirs.close()
    return process, ours


def die_with_parent() -> None:
    """Let the system kill this process when the one that started it has ended, however it ended."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def keep_memory() -> None:
    """Let freed memory stay with this process. Otherwise every training step gives its large tensors back to the system
    and gets them again page by page, each page cleared: up to half of the time that a step of a small model takes.
    """
    if hasattr(LIBC, "mallopt"):  # of the GNU library
        LIBC.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: what is larger is still mapped and given back
        LIBC.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def end_with_parent() -> None:
    """However the parent ends (by kill -9, say), its fork server ends with it, and this process with that."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The fork server ends when nobody holds this descriptor any more; its own children must not.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script: a process would import it, and so run it again if it has no guard for that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
