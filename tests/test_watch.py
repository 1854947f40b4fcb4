"""The server of `fairveil watch`: for this machine only, for reading only, and not to be brought down by a folder."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.run import start_run
from fairveil.watch import Watch

Fairveil = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    values = {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 2, "batch_size": 64, "learning_rate": 1.0},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }
    return start_run(make_config(values), runs=tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Watch]]:
    """Start a server of a folder; it is stopped after the test."""
    started: list[tuple[Watch, threading.Thread]] = []

    def start(folder: Path) -> Watch:
        server = Watch(folder)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server(finished: Path) -> Iterator[Watch]:
    """One that is asked much; what it has drawn it keeps."""
    with Watch(finished) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def port_of(server: Watch) -> int:
    return int(server.server_address[1])


def ask(
    server: Watch, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{port_of(server)}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}


def send(server: Watch, data: bytes) -> bytes:
    """All that comes back on a bare connection until the server closes it, or says no more."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        found = b""
        connection.settimeout(1)
        with suppress(TimeoutError, ConnectionError):
            while part := connection.recv(65536):
                found += part
        return found


def well(server: Watch) -> bool:
    """Whether it still answers."""
    status, page, _ = ask(server)
    return status == 200 and page.startswith("<!doctype html>")


# ---- for this machine only -------------------------------------------------------------------------


def own_address() -> str | None:
    """An address of this machine that others can reach; asking for a way there sends nothing."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))
        found = asked.getsockname()[0]
        return None if found.startswith("127.") else str(found)
    return None


def test_it_listens_on_the_loopback_only(server: Watch) -> None:
    assert server.server_address[0] == "127.0.0.1" and server.address == f"http://127.0.0.1:{port_of(server)}/"
    for other in filter(None, ("127.0.0.2", own_address())):
        with pytest.raises(OSError), socket.create_connection((other, port_of(server)), timeout=2):
            pass


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:{}", "127.0.0.1.evil.example", "127.0.0.1.evil.example:{}",
        "localhost.evil.example", "evil.example:127.0.0.1", "127.0.0.2", "[::1]:{}", "0.0.0.0:{}", "", ":{}",
        "127.0.0.1@evil.example", "user@localhost", "127.0.0.1 evil.example", "2130706433",
    ],
)  # fmt: skip
def test_a_page_from_elsewhere_sees_nothing(server: Watch, host: str) -> None:
    """Its own name may be made to point here (DNS rebinding); it is still the name that the browser tells."""
    for path in ("/", "/stamp"):
        status, body, _ = ask(server, path, host=host.format(port_of(server)))
        assert status == 403 and "differentially" not in body and len(body) < 100


def test_local_names_are_served(server: Watch) -> None:
    for host in ("127.0.0.1", "localhost", f"localhost:{port_of(server)}", f"127.0.0.1:{port_of(server)}"):
        assert ask(server, "/stamp", host=host)[0] == 200


def test_a_request_without_a_host_is_refused(server: Watch) -> None:
    for version in ("HTTP/1.1", "HTTP/1.0"):
        assert b" 403 " in send(server, f"GET / {version}\r\nConnection: close\r\n\r\n".encode())
    found = send(server, b"GET /\r\n\r\n")  # HTTP/0.9
    assert b"differentially" not in found


# ---- for reading only ------------------------------------------------------------------------------


def test_there_is_one_page_and_its_stamp(server: Watch) -> None:
    status, page, headers = ask(server)
    assert status == 200 and "differentially private" in page and headers["content-type"] == "text/html; charset=utf-8"
    assert headers["cache-control"] == "no-store" and headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff" and "python" not in headers["server"].lower()
    assert headers["cross-origin-resource-policy"] == "same-origin" and "access-control-allow-origin" not in headers
    status, stamp, headers = ask(server, "/stamp")
    assert status == 200 and headers["content-type"].startswith("text/plain") and f'data-stamp="{stamp}"' in page


@pytest.mark.parametrize(
    "method",
    [
        "POST",
        "PUT",
        "DELETE",
        "HEAD",
        "OPTIONS",
        "TRACE",
        "PATCH",
        "CONNECT",
        "get",
        "GETT",
        "FROB",
        "__class__",
        "X-Y",
    ],
)
def test_only_get_is_answered(server: Watch, method: str) -> None:
    found = send(server, f"{method} / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd".encode())
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 ") and b"\r\nAllow: GET" in head and b"\r\nConnection: close" in head
    assert body == (b"" if method == "HEAD" else b"GET only.\n")  # one answer, and the connection is closed


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/run.sqlite", "/run.sqlite", "/config.toml", "//",
        "//stamp", "/?x", "/stamp?x", "/stamp/", "/.", "/report.html", "/#", "*", "http://127.0.0.1/run.sqlite",
        "file:///etc/passwd", "/statement.json", "/secret.key", "/\\run.sqlite", "/" + "a" * 5000, "/%00",
    ],
)  # fmt: skip
def test_no_file_can_be_reached(server: Watch, path: str) -> None:
    found = send(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert found.startswith(b"HTTP/1.1 404 ") and found.endswith(b"There is one page: /\n")


# ---- readers who misbehave -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n" + b"x" * 100_000,
        b"GET /stamp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n" + b"x" * 1_000_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(500)) + b"\r\n",
        b"GET /" + b"z" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4,  # a browser that wants TLS
        b"\r\n\r\n\r\n", b"\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / FTP/1\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", "GET /ä HTTP/1.1\r\nHost: ö\r\n\r\n".encode(),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_harms_nobody(
    server: Watch, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    send(server, data)
    assert well(server)
    assert capfd.readouterr() == ("", "")


def test_readers_who_say_nothing_or_leave_early_are_no_trouble(
    server: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half-open connections, a half request, and readers who are gone before a large answer is written."""
    address = ("127.0.0.1", port_of(server))
    silent = [socket.create_connection(address) for _ in range(20)]
    silent[0].sendall(b"GET / HTTP/1.1\r\nHost: loc")
    for _ in range(10):
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # reset
    assert well(server)
    for connection in silent:
        connection.close()
    time.sleep(0.2)
    assert well(server)
    assert capfd.readouterr() == ("", "")


def test_a_reader_who_says_nothing_is_let_go(finished: Path, serve: Callable[[Path], Watch]) -> None:
    server = serve(finished)
    server.RequestHandlerClass = type("Hasty", (server.RequestHandlerClass,), {"timeout": 0.2})  # type: ignore[assignment]
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as connection:
        assert connection.recv(1) == b""


def test_several_readers_get_the_same_page(finished: Path, serve: Callable[[Path], Watch]) -> None:
    """It is drawn once: drawing is not for several threads at a time."""
    server = serve(finished)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server), range(16)))
    assert {status for status, *_ in answers} == {200} and len({page for _, page, _ in answers}) == 1


# ---- folders in any state --------------------------------------------------------------------------


def says(server: Watch, *words: str) -> None:
    status, page, _ = ask(server)
    assert status == 200 and "Waiting." in page and "Traceback" not in page
    for word in words:
        assert word in page


def test_an_empty_folder_is_a_page_that_says_so(
    tmp_path: Path, finished: Path, serve: Callable[[Path], Watch], capfd: pytest.CaptureFixture[str]
) -> None:
    """And once a run is there, so is its page."""
    server = serve(tmp_path)
    says(server, "is not a run folder")
    before = ask(server, "/stamp")[1]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    assert ask(server, "/stamp")[1] != before
    assert "differentially private" in ask(server)[1]
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_vanishes_is_a_page_that_says_so(
    folder: Path, serve: Callable[[Path], Watch], capfd: pytest.CaptureFixture[str]
) -> None:
    server = serve(folder)
    assert "differentially private" in ask(server)[1]
    before = ask(server, "/stamp")[1]
    shutil.rmtree(folder)
    assert ask(server, "/stamp")[1] != before
    says(server, "is not a run folder")
    assert capfd.readouterr() == ("", "")


def spoil_header(folder: Path) -> None:
    (folder / "run.sqlite").write_bytes(b"this is no database" * 1000)


def spoil_pages(folder: Path) -> None:
    """The first page stays: only a query finds it out."""
    path = folder / "run.sqlite"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))


def cut_short(folder: Path) -> None:
    path = folder / "run.sqlite"
    path.write_bytes(path.read_bytes()[:8192])


def empty(folder: Path) -> None:
    (folder / "run.sqlite").write_bytes(b"")


def spoil_config(folder: Path) -> None:
    (folder / "config.toml").write_text("name = [")


def other_config(folder: Path) -> None:
    (folder / "config.toml").write_bytes(b"x = '\xff'")


def spoil_statement(folder: Path) -> None:
    (folder / "statement.json").write_text('{"epsilon": 1}')


def no_statement(folder: Path) -> None:
    (folder / "statement.json").write_text("{")


def no_sweep(folder: Path) -> None:
    (folder / "sweep.toml").write_text("name = '<b>'")


def sweep_without_cells(folder: Path) -> None:
    (folder / "sweep.toml").write_text((folder / "config.toml").read_text())


SPOILED = [
    spoil_header, spoil_pages, cut_short, empty, spoil_config, other_config, spoil_statement, no_statement, no_sweep,
    sweep_without_cells,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_damaged_folder_is_a_page_that_says_so(
    folder: Path, serve: Callable[[Path], Watch], capfd: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    for more in ("-wal", "-shm"):
        (folder / f"run.sqlite{more}").unlink(missing_ok=True)
    server = serve(folder)
    spoil(folder)
    says(server)
    assert ask(server, "/stamp")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_report_of_a_damaged_folder_is_a_message(
    fairveil: Fairveil, folder: Path, spoil: Callable[[Path], None]
) -> None:
    for more in ("-wal", "-shm"):
        (folder / f"run.sqlite{more}").unlink(missing_ok=True)
    spoil(folder)
    code, out, err = fairveil("report", str(folder))
    assert code in (1, 2) and out == "" and err and "Traceback" not in err
    assert not (folder / "report.html").exists()


# ---- the command -----------------------------------------------------------------------------------


def test_a_port_in_use_is_a_mistake_that_can_be_mended(fairveil: Fairveil, finished: Path, server: Watch) -> None:
    with pytest.raises(UserError, match=f"--port {port_of(server)} cannot be used"):
        Watch(finished, port_of(server))
    code, out, err = fairveil("watch", str(finished), "--port", str(port_of(server)))
    assert code == 2 and out == "" and "Address already in use" in err and "another --port" in err


def test_what_is_no_folder_is_not_watched(fairveil: Fairveil, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path(__file__)):
        code, _, err = fairveil("watch", str(path))
        assert code == 2 and "is not a folder" in err
    code, _, err = fairveil("watch", str(tmp_path), "--port", "70000")
    assert code == 2 and "70000" in err


def test_ctrl_c_ends_it_well(finished: Path) -> None:
    """Even while readers hold connections open."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from fairveil.cli import main; main()", "watch", str(finished)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout and process.stderr
        told = process.stdout.readline()
        port = int(told.partition("http://127.0.0.1:")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET /stamp HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reader.recv(100).startswith(b"HTTP/1.1 200")
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0 and time.monotonic() - started < 15  # a busy machine is slow to leave
        assert (process.stdout.read(), process.stderr.read()) == ("", "")
