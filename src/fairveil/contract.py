"""The contract that every algorithm keeps, as a suite: ours in the tests, a user's own by `fairveil check`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fairveil.algorithms import find_algorithm
from fairveil.config import RunConfig, make_config
from fairveil.errors import PrivacyError
from fairveil.plan import Plan, make_plan
from fairveil.privacy.mechanisms import canonical
from fairveil.run import begin, drive, resume_run, run_plan
from fairveil.store import Checkpoint, Store

ROUNDS = 6


@dataclass(frozen=True)
class CheckResult:
    """One clause of the contract, and how it went."""

    what: str
    passed: bool
    detail: str


class Broken(Exception):
    """A clause of the contract does not hold."""


def check_algorithm(name: str, *, tell: Callable[[str], None] = lambda text: None) -> list[CheckResult]:
    """Run the whole contract on an algorithm, on a small federation of digits in three rotated clusters.

    Args:
        name: of the registry, or "package.module:Name".
        tell: takes the clause that is being checked.
    """
    find_algorithm(name)  # a name that is nothing is the user's mistake, not a broken contract
    with tempfile.TemporaryDirectory() as folder:
        trial = _Trial(name, Path(folder))
        results = []
        for what, clause in CLAUSES.items():
            tell(what)
            try:
                results.append(CheckResult(what, True, clause(trial)))
            except Exception as error:  # whatever a user's code can do is a finding, not a crash of the suite
                results.append(CheckResult(what, False, f"{type(error).__name__}: {error}"))
        return results


@dataclass(frozen=True)
class Outcome:
    """All that two equal runs have in common."""

    checkpoint: Checkpoint
    ledger: list[tuple[Any, ...]]


class _Trial:
    """An algorithm and the small runs it is judged by."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._plain: Outcome | None = None

    def config(self, **sections: dict[str, Any]) -> RunConfig:
        """The small federation; `sections` are laid over it.

        Where the server must hold public records, they are test records of the same digits.
        """
        values: dict[str, Any] = {
            "data": {
                "dataset": "digits",
                "split": {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 2, 2]},
            },
            "model": {"name": "logistic"},
            "algorithm": {"name": self.name, "rounds": ROUNDS},
            "privacy": {"epsilon": 8.0, "delta": 1e-3},
            "engine": {"workers": 1, "block": 1},
        }
        if find_algorithm(self.name).needs_public:
            values["data"]["server"] = {"dataset": "digits", "rows": "test"}
        return make_config(values | sections)

    @property
    def plain(self) -> Outcome:
        """The run that the others are compared with."""
        if self._plain is None:
            self._plain = self.run(self.config())
        return self._plain

    def run(self, config: RunConfig) -> Outcome:
        return outcome(run_plan(make_plan(config), runs=self.folder).folder)

    @contextmanager
    def store(self, plan: Plan) -> Iterator[Store]:
        """An open folder in which `plan` has been promised."""
        with Store(Path(tempfile.mkdtemp(dir=self.folder))) as store:
            begin(plan, store)
            yield store


def outcome(folder: Path) -> Outcome:
    """What a run folder holds that must not depend on how the run went."""
    with Store(folder) as store:
        checkpoint = store.latest()
        if checkpoint is None:
            raise Broken("the run left no checkpoint")
        return Outcome(checkpoint, store.ledger.entries())


def differ(one: Outcome, other: Outcome) -> str | None:
    """The first difference between two outcomes, or None. Tensors must agree bit for bit."""
    if one.ledger != other.ledger:
        return "the ledgers differ"
    kept, others = one.checkpoint.personal, other.checkpoint.personal
    pairs: list[tuple[str, Any, Any]] = [("the set of clients with personal state", set(kept), set(others))]
    pairs += [(key, value, other.checkpoint.state[key]) for key, value in one.checkpoint.state.items()]
    pairs.append(("the average of the served models", one.checkpoint.average, other.checkpoint.average))
    for client in set(kept) & set(others):
        pairs += [(f"{key} of client {client}", v, others[client].get(key)) for key, v in kept[client].items()]
    for what, left, right in pairs:
        same = torch.equal(torch.as_tensor(left), torch.as_tensor(right)) if hasattr(left, "shape") else left == right
        if not same:
            return f"{what} differs"
    return None


def _prices_and_runs(trial: _Trial) -> str:
    plan = make_plan(trial.config())
    found = plan.price
    if not found.epsilon <= 8.0:
        raise Broken(f"planned epsilon {found.epsilon}, asked for 8")
    _ = trial.plain
    return f"epsilon {found.epsilon:.3f} by {found.accountant}"


def _posts_inside_plan(trial: _Trial) -> str:
    plan = make_plan(trial.config())
    with trial.store(plan) as store:
        drive(plan, store)
        planned, posted = store.ledger.planned(), store.ledger.posted()
    return "posted equals planned" if planned == posted else "posted less than planned"


def _same_seed(trial: _Trial) -> str:
    return _must_equal(trial.plain, trial.run(trial.config()), "the same seed, twice")


def _workers_and_blocks(trial: _Trial) -> str:
    other = trial.run(trial.config(engine={"workers": 2, "block": 5}))
    return _must_equal(trial.plain, other, "1 worker with blocks of 1, 2 workers with blocks of 5")


def _resumes(trial: _Trial) -> str:
    """A crash in the narrowest window: after the ledger was posted, before the round was saved."""

    class Crash(BaseException):
        pass

    plan, save = make_plan(trial.config()), Store.checkpoint

    def crash(store: Store, number: int, *rest: Any) -> None:
        if number == ROUNDS // 2:
            raise Crash
        save(store, number, *rest)

    with trial.store(plan) as store, patch.object(Store, "checkpoint", crash):
        try:
            drive(plan, store)
        except Crash:
            pass
        else:
            raise Broken("the planted crash did not happen")
    resume_run(store.folder)
    return _must_equal(trial.plain, outcome(store.folder), "uninterrupted, and resumed after a crash")


def _without_noise(trial: _Trial) -> str:
    plan = make_plan(trial.config(privacy={"noise_multiplier": 0.0, "clip_norm": float("inf"), "delta": 1e-3}))
    if plan.price.epsilon != float("inf") and any(plan.releases.values()):
        raise Broken(f"without noise it still claims epsilon {plan.price.epsilon}")
    run_plan(plan, runs=trial.folder)
    return "runs, and claims no guarantee"


def _lowered_noise(trial: _Trial) -> str:
    plan = make_plan(trial.config())
    lowered = replace(plan, units=tuple(replace(u, noise_multiplier=u.noise_multiplier / 2) for u in plan.units))
    if lowered.releases == plan.releases:
        return "nothing that it releases depends on the noise multiplier"
    with trial.store(plan) as store:
        try:
            drive(lowered, store)
        except PrivacyError:
            # what has a noise of its own (a private choice) may have come before
            planned = {canonical(m) for releases in plan.releases.values() for m in releases}
            if any(what not in planned for counts in store.ledger.posted().values() for what in counts):
                raise Broken("it was refused, but only after something was released") from None
            return "refused"
    raise Broken("half the planned noise was accepted")


def _must_equal(one: Outcome, other: Outcome, what: str) -> str:
    difference = differ(one, other)
    if difference:
        raise Broken(f"{what}: {difference}")
    return "identical, bit for bit"


CLAUSES: dict[str, Callable[[_Trial], str]] = {
    "it is priced within its budget, and runs": _prices_and_runs,
    "what it posts stays inside its plan": _posts_inside_plan,
    "the same seed gives the same run": _same_seed,
    "workers and block size change nothing": _workers_and_blocks,
    "a crash between ledger and checkpoint changes nothing": _resumes,
    "without noise it runs and claims nothing": _without_noise,
    "noise lowered after planning is refused": _lowered_noise,
}
