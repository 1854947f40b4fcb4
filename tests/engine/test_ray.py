"""A simulation on a Ray of this machine: the same run as on the local engine, bit for bit; nothing is left behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fairveil.config import make_config
from fairveil.data.federation import Federation
from fairveil.engine import ray
from fairveil.engine.local import LocalEngine
from fairveil.engine.ray import RayEngine
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.release import Kept, Public, Reply
from fairveil.run import run_in
from fairveil.session import Call, Job, Member

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own files and processes
]


def processes() -> list[str]:
    """What runs of Ray, started here."""
    listed = subprocess.run(["ps", "-eo", "ppid,stat,args"], capture_output=True, text=True, timeout=20).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()[1:]]
    return [args for parent, state, args in rows if parent == str(os.getpid()) and "Z" not in state and "ray" in args]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of Ray, no folder of it, and the handlers of signals as before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert processes() == []
    assert list(Path("/tmp").glob(f"fairveil-*/session_*_{os.getpid()}")) == []  # others may have theirs
    assert signal.getsignal(signal.SIGTERM) is before


def tables(folder: Path) -> dict[str, list[Any]]:
    """All that the database of a run holds, without the time that rounds took."""
    database = sqlite3.connect(folder / "run.sqlite")
    try:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: sorted(map(repr, database.execute(f"SELECT * FROM {name}"))) for name in names}
    finally:
        database.close()
    found["round"] = [row.split(",")[0] for row in found["round"]]
    return found


def models(folder: Path) -> dict[str, bytes]:
    """The models and checkpoints of a run, byte by byte."""
    files = [*(folder / "models").rglob("*"), *(folder / "checkpoints").rglob("*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


ALGORITHMS: dict[str, Mapping[str, Any]] = {
    "r-dpcfl": {"name": "r-dpcfl", "clusters": 2, "rounds": 3, "batch_size": 64, "learning_rate": 1.0},
    "dp-fedavg": {"name": "dp-fedavg", "rounds": 3, "sample_rate": 0.7, "local_epochs": 1, "batch_size": 32},
}


@pytest.mark.parametrize(("name", "workers"), [("r-dpcfl", 2), ("dp-fedavg", 1)])
def test_the_same_run(
    small: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, workers: int
) -> None:
    """Ledger, metrics, models and checkpoints; and not a word from Ray or Flower."""
    small["algorithm"] = ALGORITHMS[name]
    for kind in ("local", "ray"):
        small["engine"] = {"kind": kind, "workers": workers}
        run_in(make_config(small), tmp_path / kind)
        assert capfd.readouterr() == ("", "")
    expected = tables(tmp_path / "local")
    assert expected["ledger"] and expected["scores"]
    assert tables(tmp_path / "ray") == expected
    assert models(tmp_path / "ray") == models(tmp_path / "local")


# ---- tasks -----------------------------------------------------------------------------------------


def draw(members: Sequence[Member]) -> list[Reply]:
    """Answer with random numbers, and keep some."""
    drawn = [member.stream("numbers").normal(3) for member in members]
    return [Reply(Public({"drawn": numbers}), {"kept": numbers[0]}, {"pid": os.getpid()}) for numbers in drawn]


def refuse(members: Sequence[Member]) -> list[Reply]:
    """Raise a user's error."""
    raise UserError("data.options.x = 3 is wrong.", "It must be 4.", "data.options.x = 4")


def write(members: Sequence[Member]) -> list[Reply]:
    """Write into the client's records."""
    for member in members:
        member.data.train.x.zero_()
    return [Reply(Kept()) for _ in members]


def die(members: Sequence[Member]) -> list[Reply]:
    """End the process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def job(task: Any, clients: Sequence[int] = range(7)) -> Job:
    """As a session would ask it."""
    return Job(task, "round 1, ask 1", {}, [Call(client) for client in clients])


def test_an_engine(federation: Federation, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Several messages to a node, a client always at the same one; faults of tasks; a process that dies."""
    monkeypatch.setattr(ray, "MESSAGE", 8 * 650 * 2)  # two clients in a message
    spec = ModelSpec("logistic", federation.features, federation.classes)
    with LocalEngine(federation, spec, root="a run", workers=1) as local:
        expected = {client: reply.out.value["drawn"] for client, reply in local.run(job(draw))}  # type: ignore
    with RayEngine(federation, spec, root="a run", workers=2, block=2) as engine:
        assert list(engine.run(job(draw, []))) == []
        seen = []
        for clients in (range(7), [5, 2], range(7)):
            replies = dict(engine.run(job(draw, clients)))
            assert sorted(replies) == sorted(clients)
            for client, reply in replies.items():
                assert torch.equal(reply.out.value["drawn"], expected[client])  # type: ignore
                assert reply.keep is not None and reply.keep["kept"].shape == ()
            seen += [(client % 2, reply.diagnostics["pid"]) for client, reply in replies.items()]
        assert len(set(seen)) == 2
        with pytest.raises(UserError) as refused:
            list(engine.run(job(refuse, [0])))
        assert "It must be 4." in str(refused.value)
        with pytest.raises(TypeError, match="task write wrote into its inputs, its client's records"):
            list(engine.run(job(write, [0])))
        assert {reply.diagnostics["pid"] for _, reply in engine.run(job(draw, [0]))} <= {pid for _, pid in seen}
        with pytest.raises(RunFault, match=r"a process of the Ray cluster died \(\d+ at [\d.]+\)"):
            list(engine.run(job(die, [1])))
        started = time.monotonic()
    assert time.monotonic() < started + 5
    assert capfd.readouterr() == ("", "")


def test_without_ray(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setattr(ray, "find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(UserError, match=r"needs ray, which is not installed(.|\n)*pip install 'fairveil\[ray\]'"):
        RayEngine(federation, ModelSpec("logistic", federation.features, federation.classes), root="a run")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1", "ray://no port"])
def test_a_cluster_that_is_not_there(federation: Federation, address: str) -> None:
    """It says so, soon, and starts none instead."""
    spec = ModelSpec("logistic", federation.features, federation.classes)
    threads = torch.get_num_threads()
    with (
        pytest.raises(UserError, match=f"engine.address = '{address}' cannot be reached"),
        RayEngine(federation, spec, root="a run", address=address),
    ):
        raise AssertionError
    assert torch.get_num_threads() == threads
