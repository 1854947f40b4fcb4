"""The local engine: the same answers from any number of workers, and every fault of a task told as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation
from fairveil.engine.local import LocalEngine
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.privacy.release import Kept, Public, Reply
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Call, Job, Member

CLIENTS = 7


def engine(federation: Federation, workers: int, block: int = 2) -> LocalEngine:
    """An engine of logistic models on `federation`."""
    spec = ModelSpec("logistic", federation.features, federation.classes)
    return LocalEngine(federation, spec, root="a run", workers=workers, block=block)


def job(task: Any, clients: Sequence[int] = range(CLIENTS), **shared: Any) -> Job:
    """`task` for `clients`, as a session would ask it."""
    return Job(task, "round 1, ask 1", shared, [Call(client, {"client": client}) for client in clients])


# ---- tasks -----------------------------------------------------------------------------------------


def draw(members: Sequence[Member]) -> list[Reply]:
    """Answer with random numbers and a sum over the client's own records; keep a model."""
    replies = []
    for member in members:
        stream, start = member.stream("numbers"), member.inputs["start"]
        noise = stream.normal(member.model.parameters).float()
        coins = stream.coins(len(member.data.train), 0.3)
        gradient = member.model.gradient(start + noise, member.data.train.x[coins], member.data.train.y[coins])
        replies.append(
            Reply(
                Public({"gradient": gradient, "drawn": len(coins)}),
                keep={"model": start + noise, "scalar": torch.tensor(1.5), "rows": torch.zeros(2, 3).t()},
                diagnostics={"norm": float(gradient.norm())},
            )
        )
    return replies


def threads(members: Sequence[Member]) -> list[Reply]:
    """Tell how many threads torch has where the task runs, and in which process that is."""
    return [Reply(Kept(), diagnostics={"threads": torch.get_num_threads(), "pid": os.getpid()}) for _ in members]


def refuse(members: Sequence[Member]) -> list[Reply]:
    """Raise a user's error."""
    raise UserError("data.options.x = 3 is wrong.", "It must be 4.", "data.options.x = 4")


def mistype(members: Sequence[Member]) -> list[Reply]:
    """Raise a TypeError."""
    raise TypeError("a gradient of text")


def stumble(members: Sequence[Member]) -> list[Reply]:
    """Raise an error that pickle cannot carry to another process."""

    class Homemade(Exception):
        def __init__(self) -> None:
            super().__init__("the tube is blocked")
            self.handle = lambda: None

    raise Homemade


def twisted(members: Sequence[Member]) -> list[Reply]:
    """Raise an error that pickles, and fails to unpickle."""
    raise Twisted(1, 2)


class Twisted(Exception):
    """Its arguments are not those it was made with."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} are tangled")


def unsendable(members: Sequence[Member]) -> list[Reply]:
    """Answer with something that pickle cannot carry."""
    return [Reply(Public({"f": lambda: 1})) for _ in members]  # type: ignore[dict-item]


def too_few(members: Sequence[Member]) -> list[Reply]:
    """Leave out a client."""
    return [Reply(Kept()) for _ in members[1:]]


def too_many(members: Sequence[Member]) -> list[Reply]:
    """Answer for one client more."""
    return [Reply(Kept()) for _ in [*members, None]]


def bare(members: Sequence[Member]) -> list[Any]:
    """Answer with bare numbers."""
    return [3.0 for _ in members]


def nothing(members: Sequence[Member]) -> Any:
    """Forget to return."""


def one_reply(members: Sequence[Member]) -> Any:
    """Answer with a reply, not with a list of one."""
    return Reply(Kept())


def fail_early(members: Sequence[Member]) -> list[Reply]:
    """Fail for an even client at once; answer for odd ones, later."""
    if any(member.inputs["client"] % 2 == 0 for member in members):  # type: ignore[operator]
        raise ValueError("an even client")
    time.sleep(0.2)
    return [Reply(Public({"from": "the first job"})) for _ in members]


def second(members: Sequence[Member]) -> list[Reply]:
    """Answer who was asked in which job."""
    return [Reply(Public({"from": "the second job"})) for _ in members]


def die(members: Sequence[Member]) -> list[Reply]:
    """End the process without a word, as the operating system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


# ---- the same answers ------------------------------------------------------------------------------


def collected(engine: LocalEngine, job: Job) -> dict[int, Reply]:
    """The replies by client, each client answering once."""
    replies: dict[int, Reply] = {}
    with engine:
        for client, reply in engine.run(job):
            assert client not in replies
            replies[client] = reply
    return replies


def plain(replies: dict[int, Reply]) -> dict[int, Any]:
    """Replies as values that compare bit for bit."""

    def bits(value: Any) -> Any:
        return (value.dtype, tuple(value.shape), value.tolist()) if isinstance(value, torch.Tensor) else value

    return {
        client: (
            {name: bits(value) for name, value in reply.out.value.items()},  # type: ignore[union-attr]
            {name: bits(value) for name, value in (reply.keep or {}).items()},
            reply.diagnostics,
        )
        for client, reply in sorted(replies.items())
    }


def test_workers_and_blocks_change_nothing(federation: Federation) -> None:
    """1, 2 and 3 workers and blocks of 1, 5 and 100 answer the same, bit for bit."""
    asked = job(draw, start=torch.linspace(-1, 1, 650))
    expected = plain(collected(engine(federation, 1, 1), asked))
    assert sorted(expected) == list(range(CLIENTS))
    assert len({str(answer) for answer in expected.values()}) == CLIENTS  # each client has its own stream
    for workers in (1, 2, 3):
        for block in (1, 5, 100):
            assert plain(collected(engine(federation, workers, block), asked)) == expected, (workers, block)


def test_who_else_is_asked_changes_nothing(federation: Federation) -> None:
    """A client answers the same in a small cohort, in any order, as among all."""
    start = torch.linspace(-1, 1, 650)
    everyone = plain(collected(engine(federation, 1), job(draw, start=start)))
    for workers in (1, 2):
        few = plain(collected(engine(federation, workers), job(draw, [6, 1, 3], start=start)))
        assert few == {client: everyone[client] for client in (1, 3, 6)}


def test_request_and_seed_name_the_streams(federation: Federation) -> None:
    """Another request draws other numbers."""
    start = torch.zeros(650)
    one = job(draw, [0], start=start)
    other = Job(draw, "round 1, ask 2", one.shared, one.calls)
    with engine(federation, 1) as running:
        replies = [plain(dict(running.run(asked))) for asked in (one, other, one)]
    assert replies[0] != replies[1]
    assert replies[0] == replies[2]


@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_asked_is_nobody_answered(federation: Federation, workers: int) -> None:
    """An empty cohort is no error."""
    assert collected(engine(federation, workers), job(second, [])) == {}


@pytest.mark.parametrize("workers", [1, 2])
def test_several_jobs_one_after_the_other(federation: Federation, workers: int) -> None:
    """An engine goes on after a job: nothing of it is left over."""
    with engine(federation, workers) as running:
        for clients in ([0, 1, 2], [5], [], list(range(CLIENTS))):
            assert sorted(client for client, _ in running.run(job(second, clients))) == clients


def test_more_workers_than_clients(federation: Federation) -> None:
    """No process is started that would have nothing to do."""
    assert engine(federation, 50).workers == CLIENTS


# ---- threads ---------------------------------------------------------------------------------------


@pytest.fixture
def four_threads() -> Iterator[None]:
    """A caller with torch threads of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("four_threads")
def test_one_thread_each(federation: Federation, workers: int) -> None:
    """Tasks run with one torch thread, in as many processes as asked for; the caller gets its own back."""
    replies = collected(engine(federation, workers), job(threads))
    assert {reply.diagnostics["threads"] for reply in replies.values()} == {1}
    pids = {reply.diagnostics["pid"] for reply in replies.values()}
    assert len(pids) == workers
    assert (os.getpid() in pids) == (workers == 1)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("four_threads")
def test_threads_come_back_after_a_fault(federation: Federation, workers: int) -> None:
    """A failing task leaves the caller's threads as they were."""
    with pytest.raises(TypeError):
        collected(engine(federation, workers), job(mistype))
    assert torch.get_num_threads() == 4


# ---- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_user_error_comes_through(federation: Federation, workers: int) -> None:
    """A user's error keeps what, why and fix on its way from a worker."""
    with pytest.raises(UserError) as caught:
        collected(engine(federation, workers), job(refuse))
    assert (caught.value.what, caught.value.fix) == ("data.options.x = 3 is wrong.", "data.options.x = 4")
    assert "It must be 4." in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_other_errors_come_through(federation: Federation, workers: int) -> None:
    """Any error keeps its type and message."""
    with pytest.raises(TypeError, match="a gradient of text"):
        collected(engine(federation, workers), job(mistype))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("task", "message"), [(stumble, "the tube is blocked"), (twisted, "1 and 2 are tangled")])
def test_error_that_cannot_travel(federation: Federation, workers: int, task: Any, message: str) -> None:
    """An error that pickle cannot carry arrives as one that says the same."""
    with pytest.raises(Exception, match=message) as caught:
        collected(engine(federation, workers), job(task))
    name = {stumble: "Homemade", twisted: "Twisted"}[task]
    assert name in f"{type(caught.value).__name__}: {caught.value}"


def test_reply_that_cannot_travel(federation: Federation) -> None:
    """A reply that pickle cannot carry is an error of the task, not the death of a worker."""
    with pytest.raises(Exception, match=r"(?i)pickle") as caught:
        collected(engine(federation, 2), job(unsendable))
    assert not isinstance(caught.value, RunFault)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("task", [too_few, too_many, bare, nothing, one_reply])
def test_wrong_replies(federation: Federation, workers: int, task: Any) -> None:
    """Another number of replies, or something else than a list of them, is a TypeError that names the task."""
    with pytest.raises(TypeError, match=f"task {task.__name__} must return one Reply for each client"):
        collected(engine(federation, workers), job(task))


def test_dead_worker_is_told(federation: Federation) -> None:
    """A worker that dies is a clear fault, with its exit code."""
    with pytest.raises(RunFault, match=r"worker process \d+ died \(exit code -9"):
        collected(engine(federation, 2), job(die))


def test_dead_idle_worker_is_told(federation: Federation) -> None:
    """So is one that died between two jobs."""
    with engine(federation, 2) as running:
        pids = {int(reply.diagnostics["pid"]) for _, reply in running.run(job(threads))}
        os.kill(min(pids), signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(RunFault, match="died"):
            list(running.run(job(threads)))


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_of_a_failed_job_reaches_the_next(federation: Federation, workers: int) -> None:
    """Answers to a job that failed are never taken for answers to the next one: their noise was drawn before."""
    with engine(federation, workers, 1) as running:
        with pytest.raises(ValueError, match="an even client"):
            list(running.run(job(fail_early)))
        answers = list(running.run(job(second)))
    assert sorted(client for client, _ in answers) == list(range(CLIENTS))
    assert {reply.out.value["from"] for _, reply in answers} == {"the second job"}  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_of_an_abandoned_job_reaches_the_next(federation: Federation, workers: int) -> None:
    """The same where the caller stopped listening, as it does when it refuses the first reply."""
    with engine(federation, workers, 1) as running:
        replies = running.run(job(draw, start=torch.zeros(650)))
        next(replies)
        replies.close()  # type: ignore[attr-defined]
        answers = list(running.run(job(second)))
    assert sorted(client for client, _ in answers) == list(range(CLIENTS))
    assert all("from" in reply.out.value for _, reply in answers)  # type: ignore[union-attr]


def test_workers_end_with_the_engine(federation: Federation) -> None:
    """No process is left behind, whether it was idle or busy."""
    for task in (threads, fail_early):
        pids: set[int] = set()
        with engine(federation, 2, 1) as running:
            pids = {int(reply.diagnostics["pid"]) for _, reply in running.run(job(threads))}
            if task is fail_early:
                with pytest.raises(ValueError, match="even"):
                    list(running.run(job(fail_early)))
        assert len(pids) == 2
        assert not [pid for pid in pids if _alive(pid)]


def _alive(pid: int | str) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- what a task may not touch ---------------------------------------------------------------------


def write_input(members: Sequence[Member]) -> list[Reply]:
    """The careless step: the shared model itself is moved, by each client's own gradient."""
    for member in members:
        train = member.data.train
        start = member.inputs["start"]
        start -= member.model.gradient(start, train.x, train.y)
    return [Reply(Kept()) for _ in members]


def write_records(members: Sequence[Member]) -> list[Reply]:
    """Centring in place: from then on every gradient depends on every record."""
    for member in members:
        member.data.train.x.sub_(member.data.train.x.mean(dim=0))
    return [Reply(Kept()) for _ in members]


def write_personal(members: Sequence[Member]) -> list[Reply]:
    for member in members:
        member.personal["kept"].add_(1)
    return [Reply(Kept()) for _ in members]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("task", [write_input, write_records, write_personal])
def test_nothing_is_written_in_place(task: Any, workers: int) -> None:
    own = build_federation("digits", {}, {"kind": "iid", "clients": CLIENTS}, seed=0)  # its records are spoilt here
    calls = [Call(client, personal={"kept": torch.zeros(3)}) for client in range(CLIENTS)]
    asked = Job(task, "round 1, ask 1", {"start": torch.zeros(650)}, calls)
    with engine(own, workers) as running, pytest.raises(TypeError, match="in place"):
        list(running.run(asked))


def rename_personal(members: Sequence[Member]) -> list[Reply]:
    for member in members:
        member.personal["kept"] = torch.ones(3)  # type: ignore[index]
        member.inputs["start"] = torch.ones(650)  # type: ignore[index]
    return [Reply(Kept()) for _ in members]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_changes_its_dictionaries_changes_nothing_else(federation: Federation, workers: int) -> None:
    """What it means to keep goes into its reply, or it would be kept in one process and not in two."""
    start, kept = torch.zeros(650), {"kept": torch.zeros(3)}
    asked = Job(rename_personal, "round 1, ask 1", {"start": start}, [Call(client, personal=kept) for client in (0, 1)])
    with engine(federation, workers) as running:
        list(running.run(asked))
    assert asked.shared["start"] is start and not kept["kept"].any()


class Counting(torch.nn.Module):
    """A model that counts, in a loss of its own; the first look does not show it."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(int(np.prod(features)), classes)
        self.register_buffer("seen", torch.zeros(1))
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        if self.asked > 20:  # after the checks at the start
            self.count()
        output: Tensor = self.linear(x.flatten(1))
        return output

    def count(self) -> None:
        self.seen += 1


class Renewing(Counting):
    """The same with a new buffer each time, which may take the place in memory, and so the identity, of an old one."""

    def count(self) -> None:
        self.seen = self.seen + 1


def keep_asking(members: Sequence[Member]) -> list[Reply]:
    for member in members:
        for _ in range(30):
            member.model.predict(torch.zeros(member.model.parameters), member.data.train.x)
    return [Reply(Kept()) for _ in members]


@pytest.mark.parametrize("model", ["Counting", "Renewing"])
def test_a_model_that_remembers_is_found_out(model: str) -> None:
    """What it keeps of one client's records would go into the updates of the next."""
    federation = build_federation("digits", {}, {"kind": "iid", "clients": 2}, 0)
    spec = ModelSpec(f"{__name__}:{model}", federation.features, 10)
    job = Job(keep_asking, "round 1, ask 1", {}, [Call(client) for client in range(2)])
    with (
        LocalEngine(federation, spec, root="a run", workers=1) as engine,
        pytest.raises(TypeError, match="running values"),
    ):
        list(engine.run(job))


def release_of_the_first(members: Sequence[Member]) -> list[Reply]:
    """A mistake in a loop: every client answers with what the first one's records give."""
    return [Reply(cast(NoisyTraining, member.mechanism).release(members[0])[0]) for member in members]


def test_a_release_is_of_the_client_it_is_given_for() -> None:
    """Two scales of one noise could be solved for the records, and the second ledger would know nothing of them."""
    federation = build_federation("digits", {}, {"kind": "iid", "clients": 2}, 0)
    spec = ModelSpec("logistic", federation.features, 10)
    inputs: dict[str, Any] = {"model": torch.zeros(650), "learning_rate": 0.1}
    calls = [Call(client, mechanism=NoisyTraining(0.1, 1, 1.0, 1.0, 32.0)) for client in range(2)]
    job = Job(release_of_the_first, "round 1, ask 1", inputs, calls)
    with (
        LocalEngine(federation, spec, root="a run", workers=1) as engine,
        pytest.raises(TypeError, match="the release of another"),
    ):
        list(engine.run(job))


BUSY = """
import os, time
from pathlib import Path
def work(members):
    Path(f"{os.getpid()}.pid").touch()
    time.sleep(60)
"""
RUNNER = """
import busy
from fairveil.data.datasets import build_federation
from fairveil.engine.local import LocalEngine
from fairveil.models import ModelSpec
from fairveil.session import Call, Job
federation = build_federation("digits", {}, {"kind": "iid", "clients": 2}, 0)
with LocalEngine(federation, ModelSpec("logistic", federation.features, 10), root="a run", workers=2) as engine:
    list(engine.run(Job(busy.work, "round 1, ask 1", {}, [Call(0), Call(1)])))
"""


def test_workers_die_with_a_runner_that_is_killed_while_they_are_busy(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "runner.py").write_text(RUNNER)
    runner = subprocess.Popen(
        [sys.executable, "runner.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    try:
        workers = _soon(lambda: [p.stem for p in tmp_path.glob("*.pid")], lambda found: len(found) == 2, 60)
    finally:
        runner.kill()
        runner.wait()
    _soon(lambda: [pid for pid in workers if _alive(pid)], lambda left: not left, 5)


def _soon(look: Any, right: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not right(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
