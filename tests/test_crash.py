"""The same run, interrupted or not: kill -9 anywhere, Ctrl-C, dead workers, damaged files, then --resume."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fairveil.algorithms.base import LocalTraining
from fairveil.algorithms.global_ import Global
from fairveil.algorithms.global_ import State as GlobalState
from fairveil.config import RunConfig, make_config
from fairveil.contract import Outcome, differ, outcome
from fairveil.plan import make_plan
from fairveil.privacy.ledger import FEDERATION, Ledger
from fairveil.privacy.mechanisms import ClientMechanism, Mechanism
from fairveil.privacy.release import Kept, Reply
from fairveil.run import resume_run, run_plan
from fairveil.session import Facts, Member, Session, Terms
from fairveil.store import Store

ROOT = Path(__file__).parents[__name__.count(".")]  # from here this file is imported under its own name
CLIENTS, ROUNDS = 4, 6
PAUSE = "FAIRVEIL_TEST_PAUSE"  # seconds that a round of `Slow` waits
MARK = "FAIRVEIL_TEST_MARK"  # in the environment of a command and of all processes that it starts


# ---- algorithms for these tests only ---------------------------------------------------------------


class Slow(Global):
    """`global`, with a wait in every round: time to be interrupted in."""

    name: ClassVar[str] = "slow"

    def round(self, session: Session, state: GlobalState) -> GlobalState:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        return super().round(session, state)


@dataclass(frozen=True)
class DiaryState:
    """Every kind of value that a state may hold."""

    model: Tensor
    weights: np.ndarray
    total: float
    rounds: int
    word: str
    nothing: None


class Diary(LocalTraining[DiaryState]):
    """A model for all is released; each client also keeps one of its own, and is served by that."""

    name: ClassVar[str] = "diary"

    def start(self, session: Session) -> DiaryState:
        return DiaryState(session.initial_model(), np.zeros(3), 0.1, 0, "start", None)

    def round(self, session: Session, state: DiaryState) -> DiaryState:
        shared: dict[str, Any] = {"model": state.model, "learning_rate": self.learning_rate}
        replies = session.ask(write_diary, session.facts.clients, mechanism=self.training, shared=shared)
        update = torch.stack([reply["update"] for reply in replies]).mean(dim=0)  # type: ignore[arg-type]
        steps = session.stream("walk").numpy.normal(size=3)
        total = state.total / 3 + float(update.norm())
        return DiaryState(state.model + update, state.weights + steps, total, state.rounds + 1, "on", None)

    def serve(self, facts: Facts, state: DiaryState) -> Literal["personal"]:
        return "personal"


def write_diary(members: Sequence[Member]) -> list[Reply]:
    """Release an update; keep a model that no other client ever sees, and how often it was changed."""
    replies = []
    for member in members:
        mechanism: ClientMechanism = member.mechanism  # type: ignore[assignment]
        release, diagnostics = mechanism.release(member)
        own = member.personal.get("model", member.inputs["model"])
        gradient = member.model.gradient(own, member.data.train.x, member.data.train.y)  # type: ignore[arg-type]
        moved = own - 0.1 * gradient + 0.01 * member.stream("wander").normal(len(gradient)).float()  # type: ignore[operator]
        count = member.personal.get("count", torch.zeros((), dtype=torch.int64)) + 1
        replies.append(Reply(release, {"model": moved, "count": count}, diagnostics))
    return replies


class Hermit(Diary):
    """Nothing ever leaves a client; what was given to all is what each keeps."""

    name: ClassVar[str] = "hermit"

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter()

    def round(self, session: Session, state: DiaryState) -> DiaryState:
        session.ask(keep_all, session.facts.clients, shared={"model": state.model})
        return DiaryState(state.model / 2, state.weights, state.total, state.rounds + 1, "on", None)


class Copier(Diary):
    """Every client keeps the model that it was given."""

    name: ClassVar[str] = "copier"

    def round(self, session: Session, state: DiaryState) -> DiaryState:
        after = super().round(session, state)
        session.ask(keep_all, session.facts.clients, shared={"model": after.model})
        return after


def keep_all(members: Sequence[Member]) -> list[Reply]:
    """Keep the input as it is, under two names."""
    model: Tensor
    return [Reply(Kept(), {"model": (model := member.inputs["model"]), "again": model}) for member in members]  # type: ignore[assignment]


# ---- commands --------------------------------------------------------------------------------------


def plant(where: str, when: str, call: int) -> None:
    """Make this process kill itself before or after the given call (from 1) of a function, or interrupt it there."""
    owner, name = {
        "Store.checkpoint": (Store, "checkpoint"),
        "Store.finish_round": (Store, "finish_round"),
        "Store.save_units": (Store, "save_units"),
        "Store.write": (Store, "write"),
        "Ledger.post": (Ledger, "post"),
        "Ledger.set_plan": (Ledger, "set_plan"),
        "Path.rename": (Path, "rename"),
        "os.fsync": (os, "fsync"),
    }[where]
    original, calls = getattr(owner, name), 0

    def deadly(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when != "after":
            os.kill(os.getpid(), signal.SIGKILL if when == "before" else signal.SIGINT)
        result = original(*args, **options)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def nursery() -> None:
    """A process that has torch loaded and forks a `fairveil` command for each line of its input.

    A command started this way is the same process as one from the shell, two seconds sooner.
    """
    import sklearn.datasets  # noqa: F401 (what a run would load first)
    import torch._dynamo  # noqa: F401

    import fairveil.cli  # noqa: F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _become(order)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _become(order: dict[str, Any]) -> None:
    os.setsid()
    os.chdir(order["cwd"])
    os.environ |= order["environ"]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(source, number)
    sys.argv = ["fairveil", *order["argv"]]
    import fairveil.cli

    if order["crash"]:
        plant(*order["crash"])
    try:
        fairveil.cli.main()
    except SystemExit as leaving:
        sys.stdout.flush()
        sys.stderr.flush()
        # as at the end of an interpreter: what multiprocessing started is ended
        from multiprocessing.util import _exit_function  # type: ignore[attr-defined]

        _exit_function()
        os._exit(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


@dataclass
class Command:
    """A `fairveil` command under way, leader of its own session and process group."""

    pid: int
    log: Path
    mark: str
    end: Callable[[], int]

    def wait(self) -> int:
        """Its exit code; minus the signal that killed it."""
        return self.end()

    def kill(self) -> None:
        """SIGKILL, to this one process."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text()

    def children(self) -> dict[int, str]:
        """The processes that it started, at any depth, with their command lines."""
        found, wanted = {}, f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        found.pop(self.pid, None)
        return found

    def leaves_nothing(self) -> None:
        """Every process that it started is gone within a few seconds."""
        deadline = time.monotonic() + 10
        while (left := self.children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


class Commands:
    """Starts commands in a folder of their own."""

    def __init__(self, folder: Path, nursery: subprocess.Popen[str]) -> None:
        self.folder, self.nursery, self.started = folder, nursery, 0

    def _order(self) -> tuple[Path, str, dict[str, str]]:
        self.started += 1
        mark = f"{self.folder}-{self.started}"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return self.folder / f"log-{self.started}.txt", mark, {MARK: mark, PAUSE: "0.1", "PYTHONPATH": path}

    def start(self, *argv: str | Path, crash: tuple[str, str, int] | None = None) -> Command:
        """A command from the nursery, with a crash planted in it."""
        log, mark, environ = self._order()
        order = {"argv": [str(part) for part in argv], "crash": crash, "environ": environ}
        pid = self._ask(order | {"cwd": str(self.folder), "log": str(log)})
        return Command(pid, log, mark, lambda: self._ask({"wait": pid}))

    def shell(self, *argv: str | Path) -> Command:
        """A command as it is started from a shell."""
        log, mark, environ = self._order()
        with log.open("w") as file:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("fairveil"), *argv],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self.folder, start_new_session=True,
                env=os.environ | environ,
            )  # fmt: skip
        return Command(process.pid, log, mark, lambda: process.wait(timeout=120))

    def _ask(self, order: dict[str, Any]) -> int:
        assert self.nursery.stdin and self.nursery.stdout
        self.nursery.stdin.write(json.dumps(order) + "\n")
        self.nursery.stdin.flush()
        return int(self.nursery.stdout.readline())

    @property
    def run(self) -> Path:
        """The one run folder."""
        (found,) = (self.folder / "runs").iterdir()
        return found

    def rounds(self) -> int:
        """The newest finished round of the one run; 0 before there is any."""
        names = [path.stem for path in (self.folder / "runs").glob("*/checkpoints/round-*.safetensors")]
        return max((int(name.removeprefix("round-")) for name in names), default=0)

    def wait_for(self, what: Callable[[], Any], seconds: float = 60) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)


@pytest.fixture(scope="module")
def one_nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that commands are forked from."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import nursery; nursery()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.fixture
def commands(tmp_path: Path, one_nursery: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands in a temporary folder, and the algorithms of this file importable."""
    monkeypatch.syspath_prepend(str(ROOT))
    return Commands(tmp_path, one_nursery)


# ---- what is compared ------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"sample_rate": 0.5, "batch_size": 64},
}


def config(algorithm: str, workers: int = 1, rounds: int = ROUNDS) -> RunConfig:
    """A small run."""
    return make_config(
        {
            "name": "crash",
            "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 2]}},
            "model": {"name": "logistic"},
            "algorithm": {"name": algorithm, "rounds": rounds, "batch_size": 64, **OPTIONS.get(algorithm, {})},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
            "engine": {"workers": workers, "block": 2},
            "metrics": {"every": 2},
        }
    )


def write(folder: Path, what: RunConfig) -> Path:
    """The config as a file."""
    path = folder / "crash.toml"
    path.write_text(what.to_toml())
    return path


@dataclass(frozen=True)
class Whole:
    """A finished run: everything that must not depend on how it went."""

    outcome: Outcome
    planned: dict[int, Counter[str]]
    posted: dict[int, Counter[str]]
    metrics: list[tuple[Any, ...]]
    statement: dict[str, Any]
    result: dict[str, Any]
    models: dict[str, list[Any]]

    @classmethod
    def read(cls, folder: Path) -> Whole:
        """What a run folder holds."""
        with Store(folder) as store:
            planned, posted = store.ledger.planned(), store.ledger.posted()
            rows = store.database.execute("SELECT * FROM scores ORDER BY 1, 2, 3, 4").fetchall()
        result = json.loads((folder / "result.json").read_text())
        del result["run"], result["seconds"]
        models = folder / "models" / "served.safetensors"
        return cls(
            outcome(folder), planned, posted, rows, json.loads((folder / "statement.json").read_text()), result,
            {name: value.tolist() for name, value in load_file(models).items()} if models.exists() else {},
        )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Whole]:
    """The run that was left in peace, by algorithm."""
    known: dict[Any, Whole] = {}

    def find(algorithm: str, rounds: int = ROUNDS) -> Whole:
        if (algorithm, rounds) not in known:
            done = run_plan(make_plan(config(algorithm, rounds=rounds)), runs=tmp_path_factory.mktemp("peace"))
            known[algorithm, rounds] = Whole.read(done.folder)
        return known[algorithm, rounds]

    return find


def same(folder: Path, expected: Whole, rounds: int = ROUNDS) -> None:
    """A run folder holds exactly what the uninterrupted run holds, every entry of the ledger once."""
    found = Whole.read(folder)
    assert differ(found.outcome, expected.outcome) is None
    assert differ(expected.outcome, found.outcome) is None
    assert found.outcome.checkpoint.round == rounds
    assert found == Whole(found.outcome, *list(vars(expected).values())[1:])
    by_unit = Counter(unit for unit, *_ in found.outcome.ledger)
    federation = set(by_unit) == {FEDERATION}
    assert by_unit == dict.fromkeys([FEDERATION] if federation else range(CLIENTS), rounds)
    assert len({(unit, request) for unit, request, *_ in found.outcome.ledger}) == len(found.outcome.ledger)
    assert found.posted == found.planned  # neither a gap nor an entry too many
    assert not list(folder.rglob(".*.part"))
    with sqlite3.connect(folder / "run.sqlite") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


# ---- kill -9 in the narrow windows -----------------------------------------------------------------

MINE = {cls.name: f"{__name__}:{cls.__name__}" for cls in (Slow, Diary, Hermit, Copier)}
PREFACE = 2  # files that are written before the first round: the config, the statement of what is planned
WINDOWS = [
    ("Ledger.post", "before", 3),
    ("Ledger.post", "after", 3),
    ("Store.finish_round", "before", 3),
    ("Store.checkpoint", "before", 3),
    ("Path.rename", "before", PREFACE + 3),
    ("Store.checkpoint", "after", 3),
]
OTHER_WINDOWS = [
    ("Store.save_units", "before", 1),
    ("Store.save_units", "after", 1),
    ("Ledger.set_plan", "after", 1),
    ("Store.write", "before", 2),  # the statement of what is planned
    ("Ledger.post", "after", 1),
    ("Store.checkpoint", "before", 1),
    ("os.fsync", "before", 2 * (PREFACE + 4) - 1),  # round 4: the temporary file is written, perhaps not on the disk
    ("os.fsync", "before", 2 * (PREFACE + 4)),  # round 4: renamed, perhaps not on the disk
    ("Ledger.post", "after", ROUNDS),
    ("Store.checkpoint", "before", ROUNDS),
    ("Store.write", "before", PREFACE + ROUNDS + 1),  # models
    ("Store.write", "before", PREFACE + ROUNDS + 2),  # statement
    ("Store.write", "before", PREFACE + ROUNDS + 3),  # result
]


def name_of(value: Any) -> str:
    """A window in words, for the list of tests."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("algorithm", "window"),
    [("global", window) for window in WINDOWS]
    + [(name, window) for name in ("local", "dp-fedavg", "diary") for window in WINDOWS[1::2]],
    ids=name_of,
)
def test_kill_between_ledger_and_checkpoint(
    commands: Commands, uninterrupted: Callable[..., Whole], algorithm: str, window: tuple[str, str, int]
) -> None:
    """Killed in the middle of a round, wherever that is: resumed to the same run."""
    algorithm = MINE.get(algorithm, algorithm)
    killed = commands.start("run", write(commands.folder, config(algorithm)), crash=window)
    assert killed.wait() == -signal.SIGKILL
    before = commands.rounds()
    assert before in (2, 3)
    resume_run(commands.run)
    same(commands.run, uninterrupted(algorithm))


@pytest.mark.parametrize("window", OTHER_WINDOWS, ids=name_of)
def test_kill_at_the_ends(
    commands: Commands, uninterrupted: Callable[..., Whole], window: tuple[str, str, int]
) -> None:
    """Killed while promising, in the first round, in the last one, or while the result is written."""
    killed = commands.start("run", write(commands.folder, config("global")), crash=window)
    assert killed.wait() == -signal.SIGKILL
    resume_run(commands.run)
    same(commands.run, uninterrupted("global"))


def test_kill_before_anything_was_promised(commands: Commands) -> None:
    """Killed before the config was written: an empty folder, which says so; the run starts anew."""
    path = write(commands.folder, config("global"))
    assert commands.start("run", path, crash=("Store.write", "before", 1)).wait() == -signal.SIGKILL
    refused = commands.start("run", commands.run, "--resume")
    assert refused.wait() == 2
    assert f"{commands.run} is not a run folder" in refused.text
    assert commands.start("run", path).wait() == 0


def test_killed_in_every_round(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """A run that is killed after each post, again and again, makes progress with every second start."""
    path: Path = write(commands.folder, config("global"))
    arguments: list[str | Path] = ["run", path]
    for number in range(2 * ROUNDS):
        # The first post of a process replays the round whose checkpoint was lost, or posts a new one.
        crash = ("Ledger.post", "after", 1) if number % 2 == 0 else ("Store.checkpoint", "after", 1)
        assert commands.start(*arguments, crash=crash).wait() == -signal.SIGKILL
        assert commands.rounds() == (number + 1) // 2
        arguments = ["run", commands.run, "--resume"]
    assert commands.start(*arguments).wait() == 0
    same(commands.run, uninterrupted("global"))


def test_resuming_a_finished_run_changes_nothing(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """It gives its result again."""
    assert commands.start("run", write(commands.folder, config("global"))).wait() == 0
    again = commands.start("run", commands.run, "--resume", "--json")
    assert again.wait() == 0
    assert json.loads(again.text.splitlines()[-1])["run"] == str(commands.run)
    same(commands.run, uninterrupted("global"))


def test_resume_by_config(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """The config finds its newest run by itself."""
    path = write(commands.folder, config("local"))
    assert commands.start("run", path, crash=("Store.checkpoint", "before", 4)).wait() == -signal.SIGKILL
    assert commands.start("run", path, "--resume").wait() == 0
    same(commands.run, uninterrupted("local"))


# ---- kill -9 at random -----------------------------------------------------------------------------


def hunt(commands: Commands, path: Path, kills: int, span: float, chance: random.Random) -> None:
    """Start a run, kill it after a random time, go on, again and again; then let it finish."""
    for _ in range(kills):
        started = list((commands.folder / "runs").glob("*/config.toml"))
        command = commands.start("run", *([commands.run, "--resume"] if started else [path]))
        time.sleep(chance.uniform(0, span))
        command.kill()
        assert command.wait() in (-signal.SIGKILL, 0)
        command.leaves_nothing()
        assert "Traceback" not in command.text
        if not list((commands.folder / "runs").glob("*/config.toml")):
            shutil.rmtree(commands.folder / "runs", ignore_errors=True)  # it had not come far enough to be resumed
    last = commands.start("run", *([commands.run, "--resume"] if (commands.folder / "runs").exists() else [path]))
    assert last.wait() == 0
    last.leaves_nothing()


def measured(commands: Commands, path: Path) -> float:
    """How long an uninterrupted command takes, now that all prices are known."""
    started = time.monotonic()
    assert commands.start("run", path, "--runs", "measured").wait() == 0
    return time.monotonic() - started


@pytest.mark.parametrize("algorithm", ["global", "dp-fedavg", "diary"])
def test_random_kills(commands: Commands, uninterrupted: Callable[..., Whole], algorithm: str) -> None:
    """Six kills at random instants of a run without workers."""
    algorithm = MINE.get(algorithm, algorithm)
    path, expected = write(commands.folder, config(algorithm)), uninterrupted(algorithm)
    hunt(commands, path, 6, measured(commands, path), random.Random(1))
    same(commands.run, expected)


def test_random_kills_with_workers(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """Kills at random instants of a run with two workers; no process stays behind."""
    path, expected = write(commands.folder, config(MINE["slow"], workers=2)), uninterrupted(MINE["slow"])
    hunt(commands, path, 2, measured(commands, path), random.Random(2))
    same(commands.run, expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("algorithm", ["global", "local", "dp-fedavg", "diary"])
def test_many_random_kills(
    commands: Commands, uninterrupted: Callable[..., Whole], algorithm: str, workers: int
) -> None:
    """The same, longer."""
    algorithm, rounds = MINE.get(algorithm, algorithm), 12
    path, expected = write(commands.folder, config(algorithm, workers, rounds)), uninterrupted(algorithm, rounds)
    span = measured(commands, path)
    for seed in range(4 if workers == 1 else 1):
        shutil.rmtree(commands.folder / "runs", ignore_errors=True)
        hunt(commands, path, 8, span, random.Random(seed))
        same(commands.run, expected, rounds)


# ---- personal state --------------------------------------------------------------------------------


def test_personal_state_is_saved(uninterrupted: Callable[..., Whole]) -> None:
    """What each client keeps is in the checkpoint, and differs from client to client."""
    found = uninterrupted(MINE["diary"]).outcome.checkpoint
    assert sorted(found.personal) == list(range(CLIENTS))
    assert all(kept["count"] == ROUNDS for kept in found.personal.values())
    assert len({tuple(kept["model"].tolist()) for kept in found.personal.values()}) == CLIENTS
    assert (found.state["rounds"], found.state["word"], found.state["nothing"]) == (ROUNDS, "on", None)
    assert isinstance(found.state["weights"], np.ndarray)


def test_clients_may_keep_what_they_were_given(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """Personal states that are one tensor in memory are saved as any others."""
    path = write(commands.folder, config(MINE["copier"]))
    assert commands.start("run", path, crash=("Store.checkpoint", "before", 4)).wait() == -signal.SIGKILL
    resume_run(commands.run)
    same(commands.run, uninterrupted(MINE["copier"]))


def test_an_algorithm_that_releases_nothing(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """It has an empty ledger, and is resumed like any other."""
    path = write(commands.folder, config(MINE["hermit"]))
    assert commands.start("run", path, crash=("Store.checkpoint", "before", 4)).wait() == -signal.SIGKILL
    resume_run(commands.run)
    expected, found = uninterrupted(MINE["hermit"]), Whole.read(commands.run)
    assert differ(expected.outcome, found.outcome) is None
    assert found.outcome.ledger == []
    assert found.result["epsilon"] == 0


# ---- processes -------------------------------------------------------------------------------------


def workers_of(command: Command) -> list[int]:
    """The worker processes: all that torch was loaded in, which the fork server, their parent, is as well."""
    processes = {pid: line for pid, line in command.children().items() if "forkserver" in line}
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in processes}
    return sorted(pid for pid, parent in parents.items() if parent in processes)


def test_kill_leaves_no_process(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """kill -9 of the runner ends workers, fork server and resource tracker; so does a normal end."""
    command = commands.shell("run", write(commands.folder, config(MINE["slow"], workers=2)))
    commands.wait_for(lambda: commands.rounds() >= 2)
    assert len(workers_of(command)) == 2
    assert len(command.children()) == 4  # and the fork server, and the resource tracker
    command.kill()
    assert command.wait() == -signal.SIGKILL
    command.leaves_nothing()
    again = commands.start("run", commands.run, "--resume")
    assert again.wait() == 0
    again.leaves_nothing()
    same(commands.run, uninterrupted(MINE["slow"]))


def test_kill_while_workers_start(commands: Commands) -> None:
    """The fork server is still loading torch when the runner is killed: it ends all the same."""
    command = commands.start("run", write(commands.folder, config("global", workers=2)))
    commands.wait_for(command.children)
    time.sleep(0.3)
    command.kill()
    assert command.wait() == -signal.SIGKILL
    command.leaves_nothing()


def interrupted(command: Command, commands: Commands) -> None:
    """Ctrl-C, as a terminal sends it; the command says how to go on, and is gone."""
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    command.leaves_nothing()
    assert "Traceback" not in command.text
    assert "KeyboardInterrupt" not in command.text
    assert f"fairveil run {commands.run.relative_to(commands.folder)} --resume" in command.text


@pytest.mark.parametrize(
    "where",
    [
        ("Store.save_units", 1), ("Ledger.set_plan", 1), ("Ledger.post", 1), ("Store.finish_round", 3),
        ("os.fsync", 2 * PREFACE + 7), ("Store.write", PREFACE + ROUNDS + 2),
    ],
    ids=name_of,
)  # fmt: skip
def test_ctrl_c_in_a_window(commands: Commands, uninterrupted: Callable[..., Whole], where: tuple[str, int]) -> None:
    """Ctrl-C where it hurts most: exit code 130, the way to go on, the same result."""
    name, call = where
    command = commands.start("run", write(commands.folder, config("global")), crash=(name, "interrupt", call))
    assert command.wait() == 130
    assert "Traceback" not in command.text
    assert f"fairveil run {commands.run.relative_to(commands.folder)} --resume" in command.text
    resume_run(commands.run)
    same(commands.run, uninterrupted("global"))


def test_ctrl_c_before_there_is_a_config(commands: Commands) -> None:
    """Ctrl-C when the folder is still empty: it must not be called a run that one could go on with."""
    path = write(commands.folder, config("global"))
    command = commands.start("run", path, crash=("Store.write", "interrupt", 1))
    assert command.wait() == 130
    assert "Traceback" not in command.text
    assert "--resume" not in command.text


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c(commands: Commands, uninterrupted: Callable[..., Whole], workers: int) -> None:
    """Ctrl-C between two rounds or within one: exit code 130, the way to go on, the same result."""
    command = commands.start("run", write(commands.folder, config(MINE["slow"], workers)))
    commands.wait_for(lambda: commands.rounds() >= 3)
    interrupted(command, commands)
    stopped = commands.rounds()
    assert f"Stopped after round {stopped} of {ROUNDS}" in command.text
    resume_run(commands.run)
    same(commands.run, uninterrupted(MINE["slow"]))


def test_ctrl_c_while_workers_start(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """The fork server and the workers are not yet ready to ignore it: still no traceback, from any of them."""
    command = commands.start("run", write(commands.folder, config("global", workers=2)))
    commands.wait_for(lambda: any("forkserver" in line for line in command.children().values()))
    time.sleep(0.5)
    interrupted(command, commands)
    resume_run(commands.run)
    same(commands.run, uninterrupted("global"))


def test_ctrl_c_before_anything_was_promised(commands: Commands) -> None:
    """Ctrl-C while planning: nothing to go on with, so nothing is said of it; no traceback."""
    command = commands.shell("run", write(commands.folder, config("global", workers=2)))
    commands.wait_for(lambda: Path(f"/proc/{command.pid}/maps").read_text().count("torch") > 0)
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert "Traceback" not in command.text
    assert "--resume" not in command.text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_at_random(commands: Commands, uninterrupted: Callable[..., Whole], workers: int) -> None:
    """Ctrl-C at any instant of a run, twice in a row half of the time: 130 or done, never a traceback."""
    path = write(commands.folder, config(MINE["slow"], workers))
    span, chance = measured(commands, path), random.Random(3)
    for number in range(12):
        shutil.rmtree(commands.folder / "runs", ignore_errors=True)
        command = commands.start("run", path)
        commands.wait_for(lambda: list((commands.folder / "runs").glob("*/config.toml")))
        time.sleep(chance.uniform(0, span))
        if Path(f"/proc/{command.pid}/exe").exists():
            os.killpg(command.pid, signal.SIGINT)
            if number % 2:
                time.sleep(chance.uniform(0, 0.2))
                os.killpg(command.pid, signal.SIGINT)
        assert command.wait() in (130, 0), command.text
        assert "Traceback" not in command.text
        command.leaves_nothing()
        resume_run(commands.run)
        same(commands.run, uninterrupted(MINE["slow"]))


def test_killed_worker(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """SIGKILL of one worker: exit code 1, a message that says what died and how to go on; resume works."""
    command = commands.start("run", write(commands.folder, config(MINE["slow"], workers=2)))
    commands.wait_for(lambda: commands.rounds() >= 2)
    worker = workers_of(command)[0]
    os.kill(worker, signal.SIGKILL)
    assert command.wait() == 1
    assert f"worker process {worker} died (exit code -9" in command.text
    assert f"fairveil run {commands.run.relative_to(commands.folder)} --resume" in command.text
    assert "Traceback" not in command.text
    command.leaves_nothing()
    resume_run(commands.run)
    same(commands.run, uninterrupted(MINE["slow"]))


def test_killed_fork_server(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """SIGKILL of the fork server ends all workers: the same."""
    command = commands.start("run", write(commands.folder, config(MINE["slow"], workers=2)))
    commands.wait_for(lambda: commands.rounds() >= 2)
    workers = workers_of(command)
    servers = [pid for pid, line in command.children().items() if "forkserver" in line and pid not in workers]
    os.kill(servers[0], signal.SIGKILL)
    assert command.wait() == 1
    assert "died" in command.text
    assert "Traceback" not in command.text
    command.leaves_nothing()
    resume_run(commands.run)
    same(commands.run, uninterrupted(MINE["slow"]))


def test_two_at_once(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """While a process runs a folder, another is refused; the first does not notice."""
    first = commands.start("run", write(commands.folder, config(MINE["slow"])))
    commands.wait_for(lambda: commands.rounds() >= 1)
    second = commands.start("run", commands.run, "--resume")
    assert second.wait() == 2
    assert f"{commands.run} is in use" in second.text
    assert "Try:" in second.text
    assert "Traceback" not in second.text
    assert first.wait() == 0
    same(commands.run, uninterrupted(MINE["slow"]))


# ---- damaged files ---------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Lose the second half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Lose everything but the name."""
    os.truncate(path, 0)


def garble(path: Path) -> None:
    """Zeros where the header was, as after a lost sector."""
    with path.open("r+b") as file:
        file.write(bytes(512))


@pytest.mark.parametrize(
    ("algorithm", "damage", "both"),
    [
        ("global", cut, False),
        ("global", cut, True),
        ("diary", cut, False),
        ("diary", empty, True),
        ("diary", garble, False),
        ("diary", Path.unlink, False),
    ],
)
def test_damaged_checkpoint(
    commands: Commands,
    uninterrupted: Callable[..., Whole],
    algorithm: str,
    damage: Callable[[Path], None],
    both: bool,
) -> None:
    """A checkpoint that cannot be read: the one before it, or the very beginning, gives the same run."""
    algorithm = MINE.get(algorithm, algorithm)
    killed = commands.start("run", write(commands.folder, config(algorithm)), crash=("Ledger.post", "after", 5))
    assert killed.wait() == -signal.SIGKILL
    older, newer = sorted((commands.run / "checkpoints").glob("round-*.safetensors"))
    for path in (older, newer) if both else (newer,):
        damage(path)
    resume_run(commands.run)
    same(commands.run, uninterrupted(algorithm))


def test_ledger_older_than_the_checkpoint(commands: Commands, uninterrupted: Callable[..., Whole]) -> None:
    """A database restored from before the checkpoint has forgotten what was released: never a ledger with a gap."""
    killed = commands.start("run", write(commands.folder, config("global")), crash=("Store.checkpoint", "after", 2))
    assert killed.wait() == -signal.SIGKILL
    database = commands.run / "run.sqlite"
    with sqlite3.connect(database) as now, sqlite3.connect(commands.folder / "backup") as backup:
        now.backup(backup)
    now.close()
    backup.close()
    killed = commands.start("run", commands.run, "--resume", crash=("Store.checkpoint", "after", 2))
    assert killed.wait() == -signal.SIGKILL
    for name in ("run.sqlite", "run.sqlite-wal", "run.sqlite-shm"):
        (commands.run / name).unlink(missing_ok=True)
    shutil.copy(commands.folder / "backup", database)
    resumed = commands.start("run", commands.run, "--resume")
    if resumed.wait() == 0:  # it went back to where the ledger is complete
        same(commands.run, uninterrupted("global"))
    else:
        assert "ledger" in resumed.text
        assert "Traceback" not in resumed.text


def test_lost_write_ahead_log(commands: Commands) -> None:
    """A folder copied without its write-ahead log has lost entries: it is refused, or nothing was missing."""
    killed = commands.start("run", write(commands.folder, config("global")), crash=("Ledger.post", "after", 4))
    assert killed.wait() == -signal.SIGKILL
    for name in ("run.sqlite-wal", "run.sqlite-shm"):
        (commands.run / name).unlink()
    resumed = commands.start("run", commands.run, "--resume")
    assert resumed.wait() in (1, 2)
    assert "Traceback" not in resumed.text
