"""Messages: what is sent is what arrives, once for all, and nothing stays behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.engine.messages import ALIGNMENT, LARGE, MAPPED, packed, receive
from fairveil.privacy.mechanisms import CohortSums, Part
from fairveil.privacy.release import MINT, Kept, Public, Release, Reply
from fairveil.session import Call, Job, Pick

Pipe = tuple[Connection, Connection]
BIG = MAPPED // 4 + 1000  # float32 numbers that are mapped
PART = CohortSums((Part("update", (3,), 1.0, 2.0), Part("loss", (), 0.5, 1.5)), 0.5)


@pytest.fixture(params=["memory", "file"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of nameless memory; the second is for systems that have not the first."""
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create")


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def sent(pipe: Pipe, value: Any) -> Any:
    """A value after its journey."""
    with packed(value) as (message,), ThreadPoolExecutor(1) as sender:
        sender.submit(message.send, pipe[0])
        return receive(pipe[1])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type, layout and every bit."""
    if isinstance(one, Tensor | np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        return type(one) is type(other) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


LARGE_ONES = {
    "mapped": torch.arange(BIG, dtype=torch.float32),
    "read": torch.arange(LARGE, dtype=torch.float32),
    "column": torch.arange(2.0 * BIG).view(-1, 2)[:, 1],
    "transposed": torch.arange(2.0 * BIG).view(-1, 2).t(),
    "expanded": torch.arange(3.0).expand(LARGE, 3),
    "channels last": torch.rand(4, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    "negative zero": torch.full((BIG,), -0.0),
    "bool": torch.arange(BIG) % 3 == 0,
    "int8": torch.arange(BIG).to(torch.int8),
    "int64": torch.arange(BIG),
    "half": torch.ones(BIG, dtype=torch.float16),
    "array": np.arange(BIG),
    "columns first": np.asfortranarray(np.arange(2.0 * BIG).reshape(-1, 2)),
    "strided": np.arange(2 * BIG)[::2],
    "text": np.array(["one", "twelve"] * LARGE),
}
SMALL_ONES: dict[str, Any] = {
    "small": torch.arange(5.0),
    "small column": torch.arange(6.0).view(3, 2)[:, 0],
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "bool scalar": torch.tensor(True),
    "numbers": np.array(3.0),
    "nothing": np.zeros((3, 0), np.int32),
    "plain": {"a": [1, 2.5, "text", None, b"bytes", (True,)]},
}


@pytest.mark.usefixtures("kind")
def test_what_is_sent_arrives(pipe: Pipe) -> None:
    """Values of all kinds, alone and together; no warning of arrays that cannot be written."""
    everything = LARGE_ONES | SMALL_ONES
    for name, value in everything.items():
        assert same(sent(pipe, value), value), name
    assert same(sent(pipe, everything), everything)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("size", [5, LARGE, BIG])
def test_what_arrives_can_be_written_and_reaches_no_other(pipe: Pipe, size: int) -> None:
    value = {"tensor": torch.zeros(size), "array": np.zeros(size)}
    with packed(value) as (message,):
        message.send(pipe[0])
        one = receive(pipe[1])
        one["tensor"].add_(1)
        one["array"] += 1
        message.send(pipe[0])
    other = receive(pipe[1])
    for values in (value, other):
        assert not values["tensor"].any() and not values["array"].any()
    assert one["tensor"]._version == 1  # and the tensor knows that it was written


def test_mechanisms_and_replies_arrive_whole(pipe: Pipe) -> None:
    update = torch.arange(float(BIG))
    replies = [
        (3, Reply(Release({"update": update}, PART, ("run", 3), MINT), {"model": update[:LARGE]}, {"norm": 2.0})),  # type: ignore[arg-type]
        (4, Reply(Public({"size": 4, "name": "four"}))),
        (5, Reply(Kept())),
    ]
    arrived = sent(pipe, replies)
    assert [client for client, _ in arrived] == [3, 4, 5]
    release, original = arrived[0][1].out, replies[0][1].out
    assert (release.mechanism, release.key, release.digest) == (PART, ("run", 3), original.digest)  # type: ignore[union-attr]
    assert same(release.value, original.value) and same(arrived[0][1].keep, replies[0][1].keep)  # type: ignore[union-attr]
    assert arrived[0][1].diagnostics == {"norm": 2.0}
    assert arrived[1:] == replies[1:]


def test_what_many_hold_is_laid_out_once() -> None:
    """The inputs of all, and a row that many clients share, whichever worker they go to."""
    shared, rows = torch.rand(BIG), torch.rand(2, BIG)
    pick = Pick(rows, np.arange(100) % 2)
    calls = [Call(client, {"row": pick[client], "again": pick.rows[client % 2]}) for client in range(100)]
    jobs = [Job(same, "ask", {"model": shared}, calls[worker::3]) for worker in range(3)]  # type: ignore[arg-type]
    with packed(*jobs) as messages:
        assert messages[0].memory.size <= 3 * (4 * BIG + ALIGNMENT)
        assert all(len(message.text) < 20_000 for message in messages)


def test_what_only_looks_alike_is_not_taken_for_the_same(pipe: Pipe) -> None:
    """Copies that are made on the way have addresses too, and a later one must not find an earlier one's."""
    values = [torch.full((2, LARGE), float(number)).t()[::2] for number in range(50)]
    assert same(sent(pipe, values), values)


def test_small_messages_need_no_memory() -> None:
    with packed(SMALL_ONES) as (message,):
        assert message.memory.file is None and not message.places


@pytest.mark.usefixtures("kind")
def test_no_descriptor_stays(pipe: Pipe) -> None:
    """Neither here nor there, whether what was received lives on or not."""
    before, kept = _descriptors(), []
    for number in range(200):
        kept.append(sent(pipe, torch.full((BIG,), float(number))))
        if number == 100:
            with pytest.raises(TypeError, match="pickle"), packed([torch.zeros(BIG), (n for n in "a")]):
                raise AssertionError
    assert _descriptors() == before
    assert [int(tensor[-1]) for tensor in kept] == list(range(200))
    mapped = _mappings()
    kept.clear()
    gc.collect()
    assert _mappings() <= mapped - 190  # and the memory goes with the last tensor


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _mappings() -> int:
    return sum("fairveil" in line or "deleted" in line for line in Path("/proc/self/maps").read_text().splitlines())


PEAK = """
import multiprocessing, os, re, torch
from pathlib import Path
from fairveil.engine.messages import packed
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
value = {"x": torch.ones(50 << 20), "y": torch.ones(25 << 20)}  # 300 MB
ours, theirs = multiprocessing.Pipe()
before = peak()
with packed(value) as (message,):
    message.send(ours)
print(peak() - before)
"""


def test_sending_makes_no_copy_on_the_way() -> None:
    """The sender's memory does not grow by what it sends: a large federation would not fit twice."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50
