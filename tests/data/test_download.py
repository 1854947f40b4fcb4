"""Downloads over a network that misbehaves: a local server, never the real one."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fairveil.data.archive import Archive, Asset
from fairveil.errors import RunFault

CONTENT = np.random.default_rng(0).bytes(300_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive(*urls: str) -> Archive:
    """An archive of one file."""
    one = Asset("set.bin", sha256(CONTENT), len(CONTENT), urls)
    return Archive("things", "things_v1", (one,), 3, "CC0", "Ask the authors.")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, no shared data, no proxy between us and the local server, no waiting."""
    monkeypatch.setenv("FAIRVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRVEIL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("fairveil.data.download.PAUSES", (0.0, 0.0))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "data" / "things_v1"


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@dataclass
class Site:
    """A local server; each request of a path takes the next of its steps, the last one again and again."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range
    sent: int = 0

    def serve(self, path: str, content: bytes, *steps: str) -> str:
        self.files[path], self.steps[path] = content, list(steps) or ["ok"]
        return f"{self.url}/{path}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, wanted = request.path[1:], request.headers.get("Range")
        self.asked.append((path, wanted))
        content, steps = self.files.get(path, b""), self.steps.get(path, ["404"])
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        if step.isdigit():
            request.send_error(int(step))
            return
        start = int(wanted[6:-1]) if wanted and step != "no range" else 0
        if start >= len(content):
            request.send_error(416)
            return
        if step == "slow":
            time.sleep(0.5)
        request.send_response(206 if start else 200)
        if start:
            shift = 1 if step == "other range" else 0
            request.send_header("Content-Range", f"bytes {start + shift}-{len(content) - 1}/{len(content)}")
        body = content[start:]
        if step != "endless":
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if step == "half":
            body = body[: max(1, len(body) // 2)]
        elif step == "nothing":
            body = b""
        while True:
            request.wfile.write(body)
            self.sent += len(body)
            if step != "endless":
                return


@pytest.fixture
def site() -> Iterator[Site]:
    here = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                here.answer(self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    here.url = f"http://127.0.0.1:{server.server_port}"
    yield here
    server.shutdown()
    server.server_close()
    thread.join(5)


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"set.bin.lock"}


def test_a_missing_file_is_downloaded_once(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT))
    assert things.read("set.bin") == CONTENT and left(cache) == {"set.bin"}
    assert things.read("set.bin") == CONTENT and site.asked == [("set.bin", None)]
    assert things.fetch() == {cache / "set.bin": False}


def test_progress_and_folder(site: Site, cache: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    things = archive(site.serve("set.bin", CONTENT))
    for folder in (tmp_path / "mine", tmp_path / "other" / "things_v1"):
        at = folder / "things_v1" / "set.bin" if folder.name == "mine" else folder / "set.bin"
        assert things.fetch(folder, lambda *now: told.append(now)) == {at: True}
        assert things.read("set.bin", folder) == CONTENT and not cache.exists()
    done = [now for _, now, _ in told[: len(told) // 2]]
    assert told[-1] == ("set.bin", len(CONTENT), len(CONTENT)) and done == sorted(done)


def test_gzip_is_downloaded_as_it_is(site: Site, cache: Path) -> None:
    content = gzip.compress(CONTENT)  # longer than what is in it, which is random
    one = Asset("set.gz", sha256(CONTENT), len(CONTENT), (site.serve("set.gz", content),), packed=True)
    things = replace(archive(), assets=(one,))
    assert things.read("set.gz") == CONTENT and (cache / "set.gz").read_bytes() == content


def test_a_download_that_breaks_off_goes_on_where_it_stopped(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT, "half", "half", "ok"))
    assert things.read("set.bin") == CONTENT and left(cache) == {"set.bin"}
    assert [wanted for _, wanted in site.asked] == [None, "bytes=150000-", "bytes=225000-"]
    assert site.sent == len(CONTENT)  # no byte twice


def test_the_next_attempt_goes_on_where_the_last_one_failed(site: Site, cache: Path) -> None:
    url = site.serve("set.bin", CONTENT, "half", "503")
    things = archive(url)
    with pytest.raises(RunFault, match="HTTP 503"):
        things.read("set.bin")
    assert left(cache) == {"set.bin.part"} and (cache / "set.bin.part").stat().st_size == 150_000
    site.serve("set.bin", CONTENT)
    assert things.read("set.bin") == CONTENT and site.asked[-1] == ("set.bin", "bytes=150000-")
    assert site.sent == len(CONTENT) and left(cache) == {"set.bin"}


def test_a_server_that_gives_ever_less_is_given_up(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT, "half", "nothing"))
    with pytest.raises(RunFault, match="broke off after 150,000 of 300,000 bytes"):
        things.read("set.bin")
    assert len(site.asked) == 4  # one that brought something, then three in a row that did not


@pytest.mark.parametrize("before", [CONTENT[:1000], CONTENT, CONTENT + b"?"], ids=["shorter", "whole", "longer"])
def test_a_server_without_ranges_starts_anew(site: Site, cache: Path, before: bytes) -> None:
    put(cache / "set.bin.part", before)
    things = archive(site.serve("set.bin", CONTENT, "no range"))
    assert things.read("set.bin") == CONTENT and len(site.asked) == 1 and left(cache) == {"set.bin"}


@pytest.mark.parametrize("before", [b"another version", b"?" * len(CONTENT), b"?" * 400_000])
def test_what_is_left_of_another_file_is_thrown_away(site: Site, cache: Path, before: bytes) -> None:
    put(cache / "set.bin.part", before)
    things = archive(site.serve("set.bin", CONTENT))
    assert things.read("set.bin") == CONTENT and left(cache) == {"set.bin"}
    assert [wanted for _, wanted in site.asked] == [f"bytes={len(before)}-", None]


def test_another_file_than_the_one_published(site: Site, cache: Path) -> None:
    wrong = b"?" * len(CONTENT)
    things = archive(site.serve("set.bin", wrong))
    with pytest.raises(RunFault) as error:
        things.read("set.bin")
    for words in (site.url, sha256(wrong), sha256(CONTENT), str(cache), "Ask the authors."):
        assert words in str(error.value)
    assert len(site.asked) == 1 and left(cache) == set()
    site.serve("set.bin", wrong, "half", "ok", "half", "ok")  # in pieces: fetched once more, but not for ever
    with pytest.raises(RunFault, match=sha256(wrong)):
        things.read("set.bin")
    assert len(site.asked) == 5 and left(cache) == set()


def test_a_server_that_never_ends_does_not_fill_the_disk(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT, "endless"))
    with pytest.raises(RunFault, match="sends more than 300,000 bytes"):
        things.read("set.bin")
    assert (cache / "set.bin.part").stat().st_size == 0


def test_a_server_that_answers_with_other_bytes(site: Site, cache: Path) -> None:
    put(cache / "set.bin.part", CONTENT[:10])
    things = archive(site.serve("set.bin", CONTENT, "other range"))
    with pytest.raises(RunFault, match="not the bytes from 10 on"):
        things.read("set.bin")


def test_not_found_and_refused_name_every_url(site: Site, cache: Path) -> None:
    urls = (f"{site.url}/gone", "http://127.0.0.1:1/refused")
    with pytest.raises(RunFault) as error:
        archive(*urls).read("set.bin")
    text = str(error.value)
    assert f"{urls[0]}: HTTP 404 Not Found" in text and f"{urls[1]}: [Errno" in text and "refused" in text
    assert f"put the file into {cache} by hand" in text and len(site.asked) == 1


def test_the_second_url_is_tried_after_the_first(site: Site, cache: Path) -> None:
    for first in ("http://127.0.0.1:1/", site.serve("wrong", b"?"), f"{site.url}/gone"):
        things = archive(first, site.serve("set.bin", CONTENT))
        assert things.read("set.bin") == CONTENT and left(cache) == {"set.bin"}
        (cache / "set.bin").unlink()


def test_a_corrupt_file_in_the_cache_is_replaced(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT))
    put(cache / "set.bin", b"rot")
    assert things.check()[0]["state"] == "wrong"
    assert things.fetch() == {cache / "set.bin": True} and things.check()[0]["state"] == "ok"
    put(cache / "set.bin", b"rot")
    assert things.read("set.bin") == CONTENT


def test_disk_full(site: Site, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "set.bin.part").symlink_to("/dev/full")
    things = archive(site.serve("set.bin", CONTENT))
    with pytest.raises(RunFault, match=r"set\.bin\.part could not be written: No space left"):
        things.read("set.bin")
    assert len(site.asked) == 1  # the disk's fault is not taken for the network's


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRVEIL_CACHE", str(put(tmp_path / "a-file")))
    with pytest.raises(RunFault, match=r"could not be written: Not a directory.\n.*FAIRVEIL_CACHE"):
        archive("http://127.0.0.1:1/").read("set.bin")


def test_two_at_once_download_once(site: Site, cache: Path) -> None:
    things = archive(site.serve("set.bin", CONTENT, "slow"))
    with ThreadPoolExecutor(2) as pool:  # each opens the lock file for itself, as two processes do
        assert list(pool.map(things.read, ["set.bin"] * 2)) == [CONTENT] * 2
    assert len(site.asked) == 1 and left(cache) == {"set.bin"}


@pytest.mark.slow
def test_two_processes_at_once_download_once(site: Site, cache: Path) -> None:
    url = site.serve("set.bin", CONTENT, "slow")
    program = (
        "import hashlib\n"
        "from fairveil.data.archive import Archive, Asset\n"
        f"one = Asset('set.bin', '{sha256(CONTENT)}', {len(CONTENT)}, ('{url}',))\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "data = Archive('things', 'things_v1', (one,), 3, 'CC0', 'Ask.').read('set.bin')\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
        for process in both:  # the server takes its time: the other one comes in the midst of it
            process.stdin.write("\n")
            process.stdin.flush()
        assert [process.communicate(timeout=60)[0].strip() for process in both] == [sha256(CONTENT)] * 2
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert len(site.asked) == 1 and left(cache) == {"set.bin"}
