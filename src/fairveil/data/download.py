"""One file over a network that drops: resumed where it broke off, and never taken for whole before it is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fairveil.errors import RunFault

TIMEOUT = 30.0  # seconds without a byte
PAUSES = (0.5, 2.0)  # seconds to wait after the first and the second try in a row that brought next to nothing
PROGRESS = 1 << 16  # bytes that make a try worth another one
TRANSIENT = (408, 429, 500, 502, 503, 504)  # what a server says when it may do better in a moment


class NotHad(Exception):
    """Why a URL did not give the file."""


def download(
    url: str,
    part: Path,
    check: Callable[[Path], tuple[bytes, str]],
    most: int,
    tell: Callable[[int, int | None], None],
) -> bytes:
    """The contents of a file, which is then at `part`, whole and checked.

    What an earlier attempt left at `part` is gone on from. Should the pieces not fit together (the file was another one
    then), they are thrown away, and it is fetched once more from the beginning.

    Args:
        check: contents of a path, and what is wrong with them; empty: nothing.
        most: bytes, more than which nobody will be given the disk for.
        tell: called with the bytes there are, and how many there will be (if the server says so).

    Raises:
        NotHad: the network or the server did not give it; what came so far stays at `part`, unless it is wrong.
        RunFault: the disk failed.
    """
    for again in (True, False):
        in_one_go = _gather(url, part, most, tell)
        data, wrong = check(part)
        if not wrong:
            return data
        part.unlink()
        if in_one_go or not again:
            break
    raise NotHad(wrong)


def _gather(url: str, part: Path, most: int, tell: Callable[[int, int | None], None]) -> bool:
    """Fill `part` to the end, over any number of connections; whether one gave it all."""
    fruitless = 0
    while True:
        have = _size(part)
        try:
            return _receive(url, part, have, most, tell) == 0
        except HTTPError as error:
            error.close()
            if error.code == 416 and have:  # nothing can follow what is here, so it is no beginning of this file
                part.unlink()
                continue
            reason = f"HTTP {error.code} {error.reason}"
            if error.code not in TRANSIENT:
                raise NotHad(reason) from error
        except (OSError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        fruitless = 0 if _size(part) - have >= PROGRESS else fruitless + 1
        if fruitless > len(PAUSES):
            raise NotHad(reason)
        time.sleep(PAUSES[fruitless - 1] if fruitless else 0)


def _receive(url: str, part: Path, have: int, most: int, tell: Callable[[int, int | None], None]) -> int:
    """Take what one connection gives until the end of the file; how much of what was there before is still in it."""
    headers = {"User-Agent": "fairveil", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
        kept = have if response.status == 206 else 0  # a server may give the whole file all the same
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise NotHad(f"the server sent {response.headers.get('Content-Range')}, not the bytes from {have} on")
        length = response.headers.get("Content-Length", "")
        total = kept + int(length) if length.isdigit() else None
        done = kept
        with disk_faults(part):
            file = part.open("ab" if kept else "wb", buffering=0)
        with file:
            while chunk := response.read1(1 << 16):
                done += len(chunk)
                if done > most:
                    file.truncate(0)  # or the next attempt would go on from here
                    raise NotHad(f"the server sends more than {most:,} bytes: this is another file")
                with disk_faults(part):
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
                tell(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke off after {done:,} of {total:,} bytes")
    return kept


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn what a disk can do to us into an error that is not a traceback, and not taken for the network's."""
    try:
        yield
    except OSError as error:
        raise RunFault(
            f"{path} could not be written: {error.strerror or error}.\n"
            "  Free some space, or set FAIRVEIL_CACHE to a folder on another disk that you may write to."
        ) from error
