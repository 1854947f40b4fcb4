"""The memory of the local engine: shared where it can be, and given back."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.data.federation import ClientData, Federation, Records
from fairveil.engine.local import Bench, LocalEngine
from fairveil.errors import RunFault
from fairveil.models import ModelSpec
from fairveil.privacy.release import Kept, Public, Reply
from fairveil.session import Call, Job, Member

CLIENTS = 7
NUMBERS = 100_000  # in a tensor that is mapped


def spec(federation: Federation) -> ModelSpec:
    return ModelSpec("logistic", federation.features, federation.classes)


def engine(federation: Federation, block: int = 2) -> LocalEngine:
    return LocalEngine(federation, spec(federation), root="a run", workers=2, block=block)


def job(task: Any, clients: Sequence[int] = range(CLIENTS), **shared: Any) -> Job:
    return Job(task, "round 1, ask 1", shared, [Call(client, {"client": client}) for client in clients])


@dataclass(frozen=True, eq=False)
class Rows:
    """A source of views: client i trains on row i, and all are tested on row 0."""

    x: Tensor

    def load(self, client: int) -> ClientData:
        y = torch.zeros(1, dtype=torch.int64)
        return ClientData(Records(self.x[client : client + 1], y), Records(self.x[:1], y))

    def federation(self) -> Federation:
        ones = np.ones(len(self.x), int)
        return Federation("rows", ones, 0 * ones, ("all",), tuple(self.x.shape[1:]), 2, self, "rows")


def echo(members: Sequence[Member]) -> list[Reply]:
    """Answer with something large, keep it too, and tell what this process has open and takes up."""
    replies = []
    for member in members:
        large = cast(Tensor, member.inputs["start"]) + cast(int, member.inputs["client"])
        replies.append(Reply(Public({"large": large}), {"large": large}, _usage()))
    return replies


def look(members: Sequence[Member]) -> list[Reply]:
    """Look at every record there is, not only at the client's own."""
    whole = members[0].data.train.x._base
    assert whole is not None
    return [Reply(Kept(), diagnostics={"sum": float(whole.sum()), "pid": os.getpid()}) for _ in members]


def _usage() -> dict[str, float]:
    """Open descriptors and resident megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return {"descriptors": descriptors, "megabytes": pages * os.sysconf("SC_PAGESIZE") / 2**20}


def test_rounds_leave_nothing_behind(federation: Federation) -> None:
    """After 300 jobs with large inputs and answers nobody has more open, or takes up more, than after the first."""
    start = torch.zeros(NUMBERS)
    usage: list[list[float]] = []
    with engine(federation, 1) as running:
        for number in range(300):
            replies = dict(running.run(job(echo, start=start)))
            assert all(int(reply.out.value["large"][-1]) == client for client, reply in replies.items())  # type: ignore[union-attr]
            if number % 100 in (20, 99):
                spent = [_usage(), replies[0].diagnostics, replies[1].diagnostics]
                usage.append([value for process in spent for value in process.values()])
    first, last = usage[0], usage[-1]
    assert first[0::2] == last[0::2]
    assert np.array(last[1::2]).max() - np.array(first[1::2]).max() < 20, usage


def test_workers_share_one_copy_of_the_records() -> None:
    """A federation of 100 MB takes 100 MB more for two workers that have both seen all of it."""
    taken = []
    for width in (1, 1 << 18):
        records = Rows(torch.ones(100, width))
        with engine(records.federation()) as running:
            replies = dict(running.run(job(look, range(100))))
            pids = {int(reply.diagnostics["pid"]) for reply in replies.values()}
            taken.append([sum(_part(pid, what) for pid in pids) for what in ("Pss_Shmem", "Pss_Anon")])
        assert {reply.diagnostics["sum"] for reply in replies.values()} == {100.0 * width}
    shared, own = np.subtract(*reversed(taken))
    assert 99 < shared < 101 and own < 100, taken  # a copy for each would be 200


def _part(pid: int, what: str) -> float:
    """A part of a process's memory, in megabytes; pages that several processes have are shared out among them."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found
    return int(found[1]) / 1024


def die(members: Sequence[Member]) -> list[Reply]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_killed_worker_leaves_nothing_behind(federation: Federation) -> None:
    shared = set(Path("/dev/shm").glob("torch_*"))
    usage = []
    for _ in range(3):
        with pytest.raises(RunFault, match="died"), engine(federation) as running:
            list(running.run(job(die, start=torch.zeros(NUMBERS))))
        usage.append(_usage()["descriptors"])
    assert usage[0] == usage[-1]  # the first time starts the fork server
    assert set(Path("/dev/shm").glob("torch_*")) <= shared


def test_cached_records_count_once_and_no_more_are_kept_than_fit(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients are tested on the same records; their own are copies."""
    sizes = [sum(t.nbytes for t in (data.train.x, data.train.y)) for data in map(federation.load, range(CLIENTS))]
    common = federation.load(0).test
    limit = common.x.nbytes + common.y.nbytes + sum(sizes[:3]) + 1
    monkeypatch.setattr("fairveil.engine.local.CACHED_BYTES", limit)
    bench = Bench(federation, spec(federation), "a run", 2)
    loaded = [[bench._data([client])[0] for client in range(CLIENTS)] for _ in range(2)]
    kept = [one is other for one, other in zip(*loaded, strict=True)]
    assert kept == [True] * 3 + [False] * (CLIENTS - 3)
