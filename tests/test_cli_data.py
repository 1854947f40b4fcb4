"""The commands on published files: list, get, check. A local server, never the real one."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fairveil.data.archive import Archive, Asset, Stored
from fairveil.data.datasets import DATASETS
from fairveil.data.federation import Pool

Fairveil = Callable[..., tuple[int, str, str]]
CONTENT = b"published bytes"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def data(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fairveil]:
    """The data commands, and `things` as the only published dataset, served from the folder `site`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "things.bin").write_bytes(CONTENT)
    handler = functools.partial(Quiet, directory=str(tmp_path / "site"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()

    url = f"http://127.0.0.1:{server.server_port}/things.bin"
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    things = Archive("things", "things_v1", (Asset("things.bin", sha256, 15, (url,)),), 3, "CC0", "Ask the authors.")

    class Things(Stored):
        """Three things."""

        archive = things

        def load(self, seed: int) -> Pool:
            raise NotImplementedError

    for name in [name for name, dataset in DATASETS.items() if issubclass(dataset, Stored)]:
        monkeypatch.delitem(DATASETS, name)
    monkeypatch.setitem(DATASETS, "things", Things)
    monkeypatch.setenv("FAIRVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAIRVEIL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("fairveil.data.download.PAUSES", (0.0, 0.0))
    yield functools.partial(fairveil, "data")
    server.shutdown()
    server.server_close()
    thread.join(5)


def rows(text: str) -> list[dict[str, Any]]:
    assert text.count("\n") == 1
    return json.loads(text)


def test_list_get_check(data: Fairveil, tmp_path: Path) -> None:
    at = tmp_path / "cache" / "data" / "things_v1" / "things.bin"
    code, out, _ = data("list", "--json")
    expected = {"name": "things", "what": "Three things.", "records": 3, "licence": "CC0"}
    assert code == 0 and rows(out) == [expected | {"where": "missing; fairveil data get things"}]
    code, out, err = data("get", "things")
    assert code == 0 and out == f"downloaded:    {at}\n" and "things.bin" in err and at.read_bytes() == CONTENT
    code, out, err = data("get", "things")
    assert code == 0 and out == f"there already: {at}\n" and err.strip() == ""
    code, out, _ = data("list", "--json")
    assert rows(out)[0]["where"] == str(at.parent)
    code, out, _ = data("check", "--json")
    row = {"dataset": "things", "file": "things.bin", "state": "ok", "where": str(at), "note": ""}
    assert code == 0 and rows(out) == [row]
    for command in ("list", "check"):
        code, out, _ = data(command)
        assert code == 0 and "things" in out


def test_a_folder_of_the_users_own(data: Fairveil, tmp_path: Path) -> None:
    code, out, _ = data("get", "things", "--folder", "mine")
    at = Path("mine") / "things_v1" / "things.bin"
    assert code == 0 and out == f"downloaded:    {at}\n" and (tmp_path / at).read_bytes() == CONTENT
    code, out, _ = data("check", "things", "--folder", "mine", "--json")
    assert code == 0 and rows(out)[0]["state"] == "ok"
    code, out, _ = data("check", "things", "--json")
    assert code == 1 and rows(out)[0]["state"] == "missing"  # nowhere else, and it was asked for
    at.write_bytes(b"something else.")
    code, out, _ = data("check", "--folder", "mine", "--json")
    assert code == 1 and rows(out)[0]["state"] == "wrong"
    code, out, err = data("get", "things", "--folder", "mine")
    assert code == 2 and "is not the file of things that was published" in err and at.read_bytes() != CONTENT


def test_faults_and_mistakes(data: Fairveil, tmp_path: Path) -> None:
    (tmp_path / "site" / "things.bin").unlink()
    code, _, err = data("get", "things")
    assert code == 1 and "things.bin could not be downloaded" in err and "HTTP 404" in err and "Traceback" not in err
    code, _, err = data("get", "digits")
    assert code == 2 and "digits is not a set of published files" in err
    for command in ("get", "check"):
        code, _, err = data(command, "thing")
        assert code == 2 and '"thing" is not known' in err and "things" in err
