"""A run or a sweep, watched: its report served on this machine while it goes on.

Only this machine can connect (loopback), only by GET, and only under a local name: a page from elsewhere that had its
own name point here would see nothing. What is served are evaluations without noise.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fairveil.errors import PrivacyError, RunFault, UserError
from fairveil.report import build_page
from fairveil.report.page import Page, Section, Text
from fairveil.store import is_held

LOCAL = "127.0.0.1"
CALLED = ("127.0.0.1", "localhost")
WATCHED = (
    "config.toml", "sweep.toml", "run.sqlite", "run.sqlite-wal", "result.json", "statement.json", "failure.txt",
    "failure.json", "clusters.json",
)  # fmt: skip


class Watch(ThreadingHTTPServer):
    """The server of one folder. `serve_forever` serves, `shutdown` ends it.

    Args:
        port: 0: any that is free.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        _check(folder)
        self.folder = folder
        self._drawing = threading.Lock()  # matplotlib draws one picture at a time
        self._drawn: tuple[str, bytes] = ("", b"")
        try:
            super().__init__((LOCAL, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port {port} cannot be used.", f"{error.strerror}.", "another --port, or 0 for any that is free"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{LOCAL}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """The page as it is now; drawn anew only if something has changed."""
        with self._drawing:
            stamp = self.stamp()
            if stamp != self._drawn[0]:
                self._drawn = stamp, self._html(stamp).encode()
            return self._drawn[1]

    def stamp(self) -> str:
        """Changes whenever the folder does."""
        folders = [self.folder]
        with suppress(OSError):  # of a run, or gone
            folders += sorted((self.folder / "cells").iterdir())
        marks = []
        for place, folder in enumerate(folders):
            marks.append(str(is_held(folder)))
            for name in WATCHED:
                try:
                    found = (folder / name).stat()
                except OSError:
                    continue
                if found.st_size:  # reading makes an empty log beside the database
                    marks.append(f"{place} {name} {found.st_mtime_ns} {found.st_size}")
        return str(hash(tuple(marks)))

    def _html(self, stamp: str) -> str:
        try:
            return build_page(self.folder).html(stamp=stamp)
        except (UserError, RunFault, PrivacyError) as error:  # not planned yet, or in the middle of a write
            why = str(error)
        except Exception as error:  # whatever has become of the folder: the next page may be a good one
            why = f"{type(error).__name__}: {error}"
        return Page(self.folder.name, "", [Section("wait", "Not yet", [Text(why, plain=True)])], "Waiting.").html(
            stamp=stamp
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who is gone in the middle of an answer is no fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder.", "A run or a sweep is watched by its folder.", "fairveil list runs"
        )


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fairveil", ""
    timeout = 60  # seconds for a reader who says nothing

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        asked = self.requestline.split()[1]  # `path` would take // for /
        if host not in CALLED:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page is for this machine only.\n")
        elif asked == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page())
        elif asked == "/stamp":
            self._answer(HTTPStatus.OK, "text/plain", self.server.stamp().encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is one page: /\n")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # whatever else was asked
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only.\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # what else a reader sends is not read
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page that asks every two seconds would fill the terminal."""
