"""Composition: plan a run, run it, resume it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from fairveil.config import RunConfig, load_config
from fairveil.data.federation import Federation
from fairveil.diagnosis import explain_scores
from fairveil.engine.blocks import best_block
from fairveil.engine.local import LocalEngine
from fairveil.engine.ray import RayEngine
from fairveil.errors import PrivacyError, RunFault, UserError
from fairveil.evaluation import cost_scores, finetuned, save_confusion, scores_of, votes_of
from fairveil.fairness import Summary, fairness_symbol, group_differences
from fairveil.plan import Plan, make_plan, materials
from fairveil.preparation import feature_statistics
from fairveil.privacy.accounting import rdp_curve, rdp_epsilon
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import canonical
from fairveil.privacy.release import Plain
from fairveil.privacy.statement import Statement, json_number
from fairveil.provenance import commit, published, resume_command, versions
from fairveil.reading import SCORES_STAY, Run, load_run
from fairveil.serving import (
    PERSONAL,
    Served,
    averaged,
    check_finite,
    clusters_of,
    save_clusters,
    save_models,
    served_models,
    summaries,
)
from fairveil.session import Engine, Job, Session
from fairveil.store import Score, Store, disk_faults, new_folder


@dataclass(frozen=True)
class RoundReport:
    """What can be shown after a round."""

    round: int
    rounds: int
    epsilon: float  # planned
    epsilon_spent: float  # an upper bound
    summary: Summary | None  # of accuracy or error, if this round was evaluated
    folder: Path  # of the run


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    folder: Path
    algorithm: str
    rounds: int
    seconds: float
    statement: Statement
    metrics: Mapping[str, Summary]  # "loss", and "accuracy" or "rmse", over test records; empty if clients keep them
    provenance: Mapping[str, str | int]  # name, seed, config_hash, commit, data_fingerprint, fairveil, code
    clients: int  # all of them; those without test records are not in the metrics
    clusters: Mapping[str, Any] | None = None  # count, ari, mss, mpo, switch_round ... of a clustered system
    fairness: Mapping[str, Any] = field(default_factory=dict)  # F_acc, F_loss; differences of rates between groups
    # of metric privacy: epsilon at the radius, median and maximum over clients; and the radius, if it is a public one
    budget: Mapping[str, float] | None = None
    # of a voting system: queries, answered, accuracy of the answers, epsilon of these very answers
    votes: Mapping[str, Any] | None = None
    # of "finetuned" models, and of the "local" ones that clients train alone: the metrics of each; empty: not asked for
    finetune: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    taken_back: Mapping[str, int] = field(default_factory=dict)  # of these, how many were no better for it

    @property
    def main(self) -> tuple[str, Summary] | None:
        """The metric that people ask for first; None: clients keep what they measure to themselves."""
        name = "accuracy" if "accuracy" in self.metrics else "rmse"
        return (name, self.metrics[name]) if self.metrics else None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.folder),
            "algorithm": self.algorithm,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 3),
            "epsilon": json_number(self.statement.epsilon),
            "epsilon_spent": json_number(self.statement.epsilon_spent or 0.0),
            "delta": self.statement.delta,
            **self.provenance,
            "clients": self.clients,
            **(_plain_metrics(self.metrics) or {"scores": SCORES_STAY}),
            **({"clusters": self.clusters} if self.clusters else {}),
            **({"fairness": self.fairness} if self.fairness else {}),
            **({"votes": self.votes} if self.votes else {}),
            **({"finetune": {name: _plain_metrics(of) for name, of in self.finetune.items()}} if self.finetune else {}),
            **({"taken_back": self.taken_back} if self.taken_back else {}),
            **({"budget": {key: json_number(value) for key, value in self.budget.items()}} if self.budget else {}),
            "guarantee": self.statement.sentence(),
        }


def _plain_metrics(metrics: Mapping[str, Summary]) -> dict[str, Any]:
    return {name: asdict(summary) for name, summary in metrics.items()}


class Interrupted(Exception):
    """The user stopped the run. What was finished is safe."""


Progress = Callable[[RoundReport], None]


class Machines(Engine, Protocol):
    """An engine, for as long as it is needed."""

    @property
    def measures(self) -> bool:
        """Whether what clients measure comes back; otherwise it stays with them."""

    def deliver(self, served: Served) -> None:
        """Let each client have the model that serves it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Place:
    """Where a run takes place, and the root of its randomness: here, or on a cluster."""

    def witness(self, job: Job, values: Mapping[int, Mapping[str, Plain]]) -> None:
        """Sees all that the algorithm sees, when it sees it."""

    def engine(self, plan: Plan, store: Store, federation: Federation) -> Machines:
        """What runs the tasks of this run on these records."""
        spec, engine = plan.config.model_spec(federation), plan.config.engine
        block = engine.block
        if block is None and plan.unit == "record" and not plan.pooled:  # others take one client after the other
            block = best_block(plan.model)
        elif block is None and plan.unit == "metric":  # all that they send is there at once, in float64
            block = max(1, min(64, (1 << 22) // plan.facts.parameters))
        root, workers = self.root(plan, store), engine.workers
        if engine.kind == "ray":
            return RayEngine(federation, spec, root=root, workers=workers, block=block, address=engine.address)
        return LocalEngine(federation, spec, root=root, workers=workers, block=block)

    def root(self, plan: Plan, store: Store) -> str:
        """The run's name, and its secret if it has one."""
        return plan.root if plan.config.privacy.noise == "reproducible" else f"{plan.root} {store.secret()}"


HERE = Place()


def start_run(config: RunConfig, *, runs: Path = Path("runs"), progress: Progress | None = None) -> RunResult:
    """Plan and run a config in a new folder under `runs`.

    Raises:
        UserError, PrivacyError, RunFault, Interrupted: each with a message of its own; nothing finished is lost.
    """
    return run_plan(make_plan(config), runs=runs, progress=progress)


def run_plan(plan: Plan, *, runs: Path = Path("runs"), progress: Progress | None = None) -> RunResult:
    """Run what was planned, in a new folder under `runs`."""
    if plan.federation.elsewhere:
        raise _elsewhere("the records of this config")
    with Store(new_folder(runs, plan.config.name)) as store:
        return _carry_out(plan, store, progress)


def run_in(
    config: RunConfig, folder: Path, *, progress: Progress | None = None, place: Place = HERE
) -> RunResult:  # fmt: skip
    """Run a config in this very folder, or go on with it where it was begun there: what a sweep does."""
    if (folder / "config.toml").exists():
        begun = load_config(folder / "config.toml")
        if begun.digest() != config.digest():
            raise UserError(
                f"{folder} holds the run of another config.",
                "Its rounds belong to that one; going on with them would mix two runs.",
                "another folder, or move that one away",
            )
        return _resume(begun.model_copy(update={"engine": config.engine}), folder, progress, place)
    plan = make_plan(config)
    with Store(folder) as store:
        return _carry_out(plan, store, progress, place)


def resume_run(path: Path, *, runs: Path = Path("runs"), progress: Progress | None = None) -> RunResult:
    """Go on with an interrupted run: a run folder, or a config whose newest run is meant.

    Nothing is calibrated anew and nothing is paid twice. A finished run gives its result again.
    """
    folder = path if path.is_dir() else _newest_run(load_config(path), runs)
    if not (folder / "config.toml").exists():
        raise UserError(
            f"{folder} is not a run folder.",
            "It has no config.toml, so nothing was planned there and nothing released.",
            "fairveil list runs, then one of those",
        )
    if (folder / "submission.json").exists():
        raise _elsewhere(f"the records of {folder}", resume_command(folder))
    return _resume(load_config(folder / "config.toml"), folder, progress)


def _elsewhere(whose: str, fix: str = "fairveil deploy submit CONFIG --server DIR") -> UserError:
    """The error of a run that cannot take place here."""
    return UserError(
        f"{whose} are on the machines of its clients.",
        "Such a run is submitted to the server of their federation, see docs/deployment.md. Nothing was run.",
        fix,
    )


def _resume(config: RunConfig, folder: Path, progress: Progress | None, place: Place = HERE) -> RunResult:
    with Store(folder) as store:
        checkpoint = store.latest()
        if checkpoint and (not store.units() or len(store.ledger) < checkpoint.entries):
            raise PrivacyError(
                f"{folder}: its ledger is gone, or older than its checkpoints. It has forgotten what was released, so "
                "the run cannot go on. Restore run.sqlite as it was."
            )
        plan = planned(store, config) or make_plan(config)
        return _carry_out(plan, store, progress, place)


def planned(store: Store, config: RunConfig) -> Plan | None:
    """The plan of a run as it was made, with its noise; None: planning was cut short.

    Raises:
        UserError: config, data or code are others now.
    """
    units = store.units()
    if not units:
        return None
    plan = Plan(config, *materials(config, json.loads(store.meta("settled") or "{}")), tuple(units))
    for what, now in (("config", config.digest()), ("data", plan.federation.fingerprint), ("code", plan.code)):
        if store.meta(what) != now:
            raise UserError(
                f"the {what} of {store.folder} {'have' if what == 'data' else 'has'} changed since it was planned.",
                "A run keeps what it promised: the same records, the same budget, the same steps.\n"
                "Nothing was released.",
                "restore it as it was, or start a new run",
            )
    return plan


def _carry_out(plan: Plan, store: Store, progress: Progress | None, place: Place = HERE) -> RunResult:
    """Promise, run, and state what was done; whatever stops it, say what is safe and how to go on."""
    try:
        with disk_faults(store.folder):
            begin(plan, store)
            state = drive(plan, store, progress, place)
            return _finish(plan, store, state)
    except KeyboardInterrupt:
        if not (store.folder / "config.toml").exists():
            raise Interrupted("Stopped before anything was planned; nothing was released.") from None
        if store.units():
            _state(plan, store, complete=False)
        checkpoint = store.latest()
        raise Interrupted(
            f"Stopped after round {checkpoint.round if checkpoint else 0} of {plan.algorithm.rounds}; everything up to "
            f"there is saved. Go on with:\n  {resume_command(store.folder)}"
        ) from None
    except RunFault as fault:
        raise RunFault(
            f"{fault}\n  What was finished is safe. Go on with:\n  {resume_command(store.folder)}"
        ) from fault


def begin(plan: Plan, store: Store) -> None:
    """Write down what is promised. Each step is repeated harmlessly if a crash cut the last one off.

    Raises:
        PrivacyError: the folder holds another promise.
    """
    if not (store.folder / "config.toml").exists():
        store.write("config.toml", plan.config.to_toml().encode())
    if not store.ledger.planned():
        store.ledger.set_plan(plan.releases)
    promised = {u: Counter({canonical(m): n for m, n in r.items()}) for u, r in plan.releases.items() if r}
    if promised != store.ledger.planned():
        raise PrivacyError(
            f"{store.folder}: the releases that the algorithm declares are no longer those that were planned. "
            "The code or the config has changed; start a new run."
        )
    if not store.units():  # last: a folder that has units has its whole plan
        federation = plan.federation
        names = federation.names or [str(client) for client in range(federation.clients)]
        clients = [(name, federation.groups[g]) for name, g in zip(names, federation.group, strict=True)]
        facts = {"data": federation.fingerprint, "config": plan.config.digest(), "code": plan.code, "commit": commit()}
        made_of = {  # for whoever reads the folder without the data
            "features": federation.features, "classes": federation.classes, "decided": federation.decided,
            "record": federation.record, "dataset": federation.name, "holders": plan.holders,
            "elsewhere": federation.elsewhere, "several": federation.several,
            "common_tests": federation.common_tests, "parameters": plan.facts.parameters,
            "attributes": dict(federation.attributes), "tokens": federation.tokens,
            "model_options": dict(plan.model.spec.options),  # with what the data added to those of the config
            "declared_sizes": [int(plan.facts.size.min()), int(plan.facts.size.max())],
        }  # fmt: skip
        facts |= versions() | {"settled": json.dumps(plan.settled), "facts": json.dumps(made_of)}
        store.save_units(plan.units, clients, facts)
        store.write("statement.json", json.dumps(plan.statement().to_json(), indent=2).encode())


def drive(plan: Plan, store: Store, progress: Progress | None = None, place: Place = HERE) -> object:
    """The loop: rounds, evaluation, checkpoints. Returns the algorithm's last state."""
    config, algorithm = plan.config, plan.algorithm
    scores: list[Score] = []

    def observe(client: int, task: str, diagnostics: Mapping[str, float]) -> None:
        if client == FEDERATION and plan.federation.elsewhere:
            return  # of a sum over clients that are really others: for nobody to keep
        scores.extend(Score(session.round, client, "train", task, name, value) for name, value in diagnostics.items())

    checkpoint = store.latest()
    personal = dict(checkpoint.personal) if checkpoint else {}
    scales = _scales(plan, store, place)
    federation = plan.federation.standardised(*scales) if scales else plan.federation
    with place.engine(plan, store, federation) as engine:
        session = Session(
            plan.facts, plan.terms, model=plan.model, engine=engine, ledger=store.ledger, seed=config.seed,
            root=place.root(plan, store), personal=personal, observe=observe, public_tasks=algorithm.public_tasks,
            public=None if plan.federation.server is None else plan.federation.server.x, witness=place.witness,
        )  # fmt: skip
        state, done = algorithm.start(session), 0
        gauge = _Gauge(plan, store) if progress else None
        average = None
        if checkpoint is not None:
            done, state, average = checkpoint.round, type(state)(**checkpoint.state), checkpoint.average
        for number in range(done + 1, algorithm.rounds + 1):
            started = time.perf_counter()
            session.begin(number)
            state = algorithm.round(session, state)
            check_finite(state, number)
            average = averaged(plan, number, state, average)
            evaluated = number % config.metrics.every == 0 or number == algorithm.rounds
            served = served_models(plan, state, average)
            if evaluated and engine.measures:
                scores += scores_of(plan, engine, number, served, personal)
            if number == algorithm.rounds and engine.measures:
                scores += cost_scores(plan, engine, number, served, personal, federation, scales)
                scores += explain_scores(plan, engine, number, state, personal)
                save_confusion(plan, engine, store, served, personal)
                tuned, kept = finetuned(plan, engine, number, served, personal, session.initial_model())
                scores += tuned
                personal |= kept  # after all that is asked of clients: no request can see it
            store.finish_round(number, time.perf_counter() - started, scores, state, personal, average)
            if evaluated:
                save_clusters(plan, store, state)
            scores.clear()
            if progress and gauge:
                progress(gauge.report(number, summaries(plan, store)[1] if evaluated and engine.measures else None))
        served = served_models(plan, state, average)
        engine.deliver(served)
        save_models(plan, store, served, scales)
    return state


def _scales(plan: Plan, store: Store, place: Place) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation by which features are standardised, as the clients release them; None if none are."""
    standardise = plan.federation.standardise
    if standardise is None:
        return None
    with place.engine(plan, store, plan.federation) as engine:
        session = Session(
            plan.facts, plan.terms, model=plan.model, engine=engine, ledger=store.ledger, seed=plan.config.seed,
            root=place.root(plan, store), personal={}, observe=lambda *measured: None, stage="preparation",
            witness=place.witness,
        )  # fmt: skip
        return feature_statistics(standardise, session, federation=plan.pooled)


def _finish(plan: Plan, store: Store, state: object) -> RunResult:
    """The statement and the result of a run whose rounds are all done."""
    statement = _state(plan, store, complete=True)
    metrics = {} if plan.federation.elsewhere else summaries(plan, store)[0]
    name = plan.config.algorithm.name
    provenance: dict[str, str | int] = {
        "name": plan.config.name,
        "seed": plan.config.seed,
        "config_hash": plan.config.digest(),
        "commit": store.meta("commit") or "none",  # of the code that began the run
        "data_fingerprint": published(plan.federation.fingerprint),
        "fairveil": store.meta("fairveil") or "none",
        "code": plan.code,
    }
    run = load_run(store.folder)
    result = RunResult(
        store.folder, name, plan.algorithm.rounds, store.seconds(), statement, metrics, provenance,
        plan.federation.clients, clusters_of(plan, state), _fairness(run),
        _budget(run, statement), votes_of(plan, store, state),
        {model: summaries(plan, store, model)[0] for model in PERSONAL} if plan.config.finetune else {},
        {model: round(sum(store.scores("taken back", model=model).values())) for model in PERSONAL}
        if plan.config.finetune else {},
    )  # fmt: skip
    store.write("result.json", json.dumps(result.to_json(), indent=2).encode())
    return result


def _fairness(run: Run) -> dict[str, Any]:
    """Figures between groups that are no summary of one metric: the cost of privacy, differences of rates."""
    found: dict[str, Any] = {
        fairness_symbol(metric): {"value": cost.fairness, "n": cost.clients} for metric, cost in run.costs().items()
    }
    for name, counts in run.confusions().items():
        differences = group_differences(counts, run.positive).items()
        found[name or "clients"] = {what: _plain(asdict(interval)) for what, interval in differences}
    return found


def _budget(run: Run, statement: Statement) -> dict[str, float] | None:
    """What clients have spent of metric privacy; over the radius it is epsilon for each unit of distance."""
    budgets = run.metric_budgets()
    if budgets is None or statement.metric is None:
        return None
    known = {} if statement.metric.radius is None else {"radius": statement.metric.radius}
    return {"median": float(budgets.median()), "maximum": float(budgets.max())} | known


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN: null says that there is no such number."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def _state(plan: Plan, store: Store, *, complete: bool) -> Statement:
    """Write the statement of what has been posted so far."""
    posted, spent = plan.spent(store.ledger)
    statement = plan.statement(posted, spent, complete=complete)
    store.write("statement.json", json.dumps(statement.to_json(), indent=2).encode())
    return statement


class _Gauge:
    """What has been spent after each round, as an upper bound that costs next to nothing.

    Renyi divergences of what was posted add up; the plan's price bounds them too, since what was posted is part of it.
    (Under replace there is no Renyi price: the plan's stands. Of metric privacy the epsilons themselves add up.)
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        mechanisms = {canonical(m): m for releases in plan.releases.values() for m in releases}
        known = plan.config.privacy.adjacency == "add-remove" and plan.unit != "metric"
        self.curves = {what: plan.holders * rdp_curve(m.event) for what, m in mechanisms.items() if known}

    def report(self, number: int, summary: Summary | None) -> RoundReport:
        privacy, spent = self.plan.config.privacy, self.plan.price.epsilon
        if self.plan.unit == "metric":
            spent = self.plan.spent(self.store.ledger)[1]
        elif self.curves:
            posted = {frozenset(counts.items()) for counts in self.plan.by_record(self.store.ledger.posted())}
            curves = [np.sum([n * self.curves[what] for what, n in counts], axis=0) for counts in posted]
            spent = min(spent, max((rdp_epsilon(curve, privacy.delta) for curve in curves), default=0.0))
        rounds, folder = self.plan.algorithm.rounds, self.store.folder
        return RoundReport(number, rounds, self.plan.price.epsilon, spent, summary, folder)


def _newest_run(config: RunConfig, runs: Path) -> Path:
    wanted = config.resolved()
    found = sorted(runs.glob(f"{config.name}-*/config.toml"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in found:
        with contextlib.suppress(UserError):  # a run of code that is gone is not the one that is meant
            if load_config(path).resolved() == wanted:
                return path.parent
    raise UserError(
        f"there is no run of this config under {runs}.",
        "A run is resumed from its folder, or from the very config it was started with.",
        f"its folder (fairveil list runs --runs {runs}), if it was started with --set or under another name",
    )
