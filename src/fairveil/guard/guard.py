"""The client's guard: what stands between a server and a client's records.

A resident process on the client's own machine holds the records, the ledger, the key of the noise and the policy. A
request comes in an envelope and is answered in one. Whatever a server asks:

- A run is proposed with all that it will ever ask for. The guard prices that by itself, and accepts it once and for all
  or refuses it. A request outside of it, or beyond it, is refused.
- Only tasks on the policy's list run, found by name among those loaded here, with inputs of the shapes they take.
- What was released is in the ledger, on disk, before the answer leaves. The same request with the same inputs gets the
  same answer and costs nothing: the noise is a function of the client's secret key, the run, the request and the
  inputs. The same request with other inputs is refused, since two answers under one noise would give it away.
- Diagnostics stay here, and so do personal models.

Prices of several runs: their epsilons and their deltas add up. That holds even if a later run was chosen by what an
earlier one showed (Rogers, Roth, Ullman and Vadhan, "Privacy Odometers and Filters: Pay-as-you-Go Composition", 2016),
and if requests of several runs come in turns (Haney et al., "Concurrent Composition for Interactive Differential
Privacy with Adaptive Privacy-Loss Parameters", 2023); the tighter price of all mechanisms together need not hold. For
the same reason a run that ends early keeps its whole price, from its first release on: when to stop may depend on what
was seen. Within a run a server chooses the order, but not the multiset, and the price does not depend on the order.
Neighbours are as in the policy. (A run under metric privacy is priced for all records of the client, replaced by any
others, which bounds every relation; with `open_choice` in the policy, only as far as the choice stays the same.) The
budget is for the records of this folder, whatever is added to or taken from them later. A run that publishes sums over
all clients (`trust = "server"`), noised by the server or by the clients together, counts with the price of what is
published, as the server has it; from the server itself nothing is hidden but what the bound cuts off.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

import fairveil.algorithms  # noqa: F401 (for the tasks)
from fairveil.data.datasets import build_federation
from fairveil.data.federation import ClientData, Federation, Source, Standardised, fingerprint, nominal_sizes
from fairveil.engine.local import Bench
from fairveil.errors import PrivacyError, UserError
from fairveil.guard.personal import Versions
from fairveil.guard.policy import Holding, Proposal, Refused, checked, read_client
from fairveil.models import MODELS, ModelSpec
from fairveil.options import shown
from fairveil.plugins import load_object
from fairveil.privacy.accounting import price
from fairveil.privacy.ledger import Entry, Ledger
from fairveil.privacy.mechanisms import Mechanism, canonical, events_of, from_canonical
from fairveil.privacy.metric import Sanitiser
from fairveil.privacy.moments import LEAST_DEVIATION
from fairveil.privacy.release import Kept, Plain, Release, Reply, Share, digest_values
from fairveil.privacy.votes import NoisyVotes
from fairveil.provenance import versions
from fairveil.remote import DEPLOYABLE, Deployable, Envelope, Malformed, check_finite
from fairveil.session import Call, Job, job_digest, mechanism_digest
from fairveil.store import hold, write_whole
from fairveil.streams import Stream
from fairveil.tasks import evaluate

LONGEST = 1000  # letters of a refusal
RUN, REQUEST = re.compile(r"[0-9a-f]{32}"), re.compile(r"[A-Za-z0-9 ,]{0,100}")
END = "the end"  # as what the last scores are written down; no request is called so

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, proposal TEXT NOT NULL, fingerprint TEXT NOT NULL,
    adjacency TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, scales BLOB, state TEXT NOT NULL,
    since TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS refusal (since TEXT NOT NULL, run TEXT NOT NULL, request TEXT NOT NULL, why TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS asked (
    run INTEGER NOT NULL, request TEXT NOT NULL, digest BLOB NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (run, request)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS diagnostic (
    run INTEGER NOT NULL, request TEXT NOT NULL, task TEXT NOT NULL, name TEXT NOT NULL, value REAL,  -- NULL: NaN
    PRIMARY KEY (run, request, task, name)) WITHOUT ROWID;
"""

log = logging.getLogger(__name__)


@dataclass
class _Run:
    """A run that was accepted."""

    id: int
    name: str
    proposal: Proposal
    bench: Bench  # with the records as they are
    personal: Versions
    scales: tuple[np.ndarray, np.ndarray] | None = None
    standardised: Bench | None = None


class Guard:
    """See the module. One process at a time opens a client's folder.

    Args:
        folder: of the client, with client.toml, policy.toml and secret.key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.policy = read_client(folder)
        for plugin in self.policy.plugins:
            load_object("plugins", plugin) if ":" in plugin else import_module(plugin)
        self.federation, own = self._federation()
        self.data = self.federation.load(own)
        self.size = int(nominal_sizes(np.array([len(self.data.train)]), self.policy.sizes)[0])
        self.holding = Holding(self.size, self.federation.features, self.federation.classes)
        self.group = self.config.group or self.federation.groups[self.federation.group[own]]
        self.fingerprint = fingerprint(self.data.train.x, self.data.train.y)
        with ExitStack() as opened:
            lock = opened.enter_context((folder / "guard.lock").open("w"))
            hold(lock, folder, "Another guard has this folder; two at once would spend its budget twice.")
            path = folder / "ledger.sqlite"
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self.database = opened.enter_context(closing(sqlite3.connect(path)))
            self.database.execute("PRAGMA journal_mode = WAL")
            self.database.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
            self.database.executescript(SCHEMA)
            self.ledger = Ledger(self.database)
            self._check_adjacency()
            self._opened = opened.pop_all()
        self._runs: dict[str, _Run] = {}
        self._last: tuple[bytes, Envelope] = b"", Envelope("")

    def close(self) -> None:
        self._opened.close()

    def _check_adjacency(self) -> None:
        """Prices for two relations between neighbours cannot be added up."""
        for (other,) in self.database.execute("SELECT DISTINCT adjacency FROM run"):
            if other != self.policy.adjacency:
                raise UserError(
                    f"adjacency = {shown(self.policy.adjacency)} in policy.toml; runs were accepted at {shown(other)}.",
                    "What these have cost is known for that relation between neighbours only.",
                    f"adjacency = {shown(other)}",
                )

    # ---- answering ---------------------------------------------------------------------------------

    def answer(self, asked: Envelope) -> Envelope:
        """The answer to whatever came, refusals included. Never raises for what a server did."""
        run, request = (_plain(asked.values.get(key, "")) for key in ("run", "request"))
        try:
            answers = {"describe": self._describe, "propose": self._propose, "task": self._task, "finish": self._finish}
            if asked.kind not in answers:
                why = str(asked.values.get("why", "it is nothing that can be asked of a client"))
                raise Refused(f"{asked.kind[:100]!r}: {why[:200]}")
            if asked.size > self.policy.largest_message:
                raise Refused(f"a message of {asked.size:,} bytes is larger than {self.policy.largest_message:,}")
            if not (RUN.fullmatch(run) or asked.kind == "describe") or not REQUEST.fullmatch(request):
                raise Refused("runs and requests have plain names")  # they are part of what the noise is derived from
            return answers[asked.kind](asked)
        except (Refused, Malformed, PrivacyError) as refusal:
            why = _plain(refusal)
            log.warning("refused %s %s: %s", run, request, why)
            with self.database:
                self.database.execute("INSERT INTO refusal VALUES (?, ?, ?, ?)", (_now(), run, request, why))
            return Envelope("refused", {"why": why})
        except Exception:
            # what went wrong may quote a record: it is written down here, and not sent
            log.exception("failed at %s %s", run, request)
            return Envelope("failed", {"why": "the client could not do it; its log says why"})

    def _describe(self, asked: Envelope) -> Envelope:
        """What this client declares of itself: public facts, the size rounded down unless it is public."""
        federation = self.federation
        standardise = federation.standardise
        return Envelope(
            "description",
            {
                "name": self.config.name,
                "group": self.group,
                "size": self.size,
                "features": json.dumps(federation.features),
                "classes": federation.classes,
                "record": federation.record,
                "tokens": -1 if federation.tokens is None else federation.tokens,
                "columns": json.dumps(standardise.columns if standardise else []),
                "statistics_noise": standardise.noise_multiplier if standardise else 0.0,
                "public": json.dumps(dict(federation.public)),
                "sizes": self.policy.sizes,
                "fairveil": versions()["fairveil"],
            },
        )

    def _propose(self, asked: Envelope) -> Envelope:
        """Accept a run, or not. Whoever proposes the same again gets the same answer."""
        name, text = asked.text("run"), asked.text("proposal")
        proposal = Proposal.read(text)
        row = self.database.execute("SELECT proposal FROM run WHERE name = ?", (name,)).fetchone()
        if row is not None:
            if row[0] != proposal.text():
                raise Refused("this run was accepted with another proposal; what was accepted does not change")
            return self._accepted(name)
        releases = checked(proposal, self.policy, self.holding)
        self._bench(name, proposal)  # it can be built
        try:
            found = price(events_of(releases), proposal.delta, adjacency=self.policy.adjacency)
        except UserError as error:  # Gaussian noise without a delta, say
            raise Refused(str(error).partition("\n")[0]) from error
        self._within_budget(found.epsilon, proposal.delta)
        with self.database:
            cursor = self.database.execute(
                "INSERT INTO run (name, proposal, fingerprint, adjacency, epsilon, delta, state, since) "
                "VALUES (?, ?, ?, ?, ?, ?, 'open', ?)",
                (name, proposal.text(), self.fingerprint, found.adjacency, found.epsilon, proposal.delta, _now()),
            )
            number = cast(int, cursor.lastrowid)
            # in one transaction: a run without its plan could never be asked anything
            self.ledger.set_plan({number: releases})
        log.info("accepted run %s: epsilon %.4f at delta %g", name, found.epsilon, proposal.delta)
        return self._accepted(name)

    def _accepted(self, name: str) -> Envelope:
        epsilon, delta = self.database.execute("SELECT epsilon, delta FROM run WHERE name = ?", (name,)).fetchone()
        return Envelope("accepted", {"epsilon": float(epsilon), "delta": float(delta)})

    def _task(self, asked: Envelope) -> Envelope:
        """Run a task, once all of it is known to be allowed."""
        whole = digest_values(asked.values)
        if self._last[0] == whole:  # sent once more by a server that did not get the answer, or not yet
            return self._last[1]
        run, request = self._run(asked.text("run")), asked.text("request")
        if request == END:
            raise Refused("no request is called so: it is how the client names its own last scores")
        deployable, mechanism = self._allowed(run, asked)
        shared, each = asked.under("shared."), asked.under("each.")
        if shared.keys() & each.keys():
            raise Refused(f"inputs {sorted(shared.keys() & each.keys())} are given twice")
        self._check(deployable, run, shared | each)
        _check_made_for(mechanism, shared | each)
        before = job_digest(deployable.task, shared)
        asked_for = digest_values(each, before=mechanism_digest(mechanism, before))
        personal, version = self._personal(run, request, asked_for)
        if deployable.needs - personal.keys():
            raise Refused(f"{asked.text('task')} needs a personal {sorted(deployable.needs)[0]}: none was made yet")
        digest = digest_values(each, personal, before=mechanism_digest(mechanism, before))
        self._payable(run, request, mechanism, digest)
        bench = run.bench if deployable.prepares else self._scaled(run, asked)
        call = Call(run.proposal.client, each, mechanism, personal, digest)
        ((_, reply),) = next(bench.perform(Job(deployable.task, request, shared, [call], before)))
        answer = _answer(call, reply)
        # in this order: whatever is cut off, the same request finds what it found before
        self._noted(run, request, asked.text("task"), reply.diagnostics, (asked_for, version))
        if reply.keep is not None:
            run.personal.keep(version + 1, request, reply.keep)
        if mechanism is not None:
            self.ledger.post([Entry(run.id, request, mechanism, digest, digest_values(answer.values))])
        self._last = whole, answer
        return answer

    def _finish(self, asked: Envelope) -> Envelope:
        """Take the model that serves this client, if there is one besides its own; score it here, for its owner.

        Of several it takes the one that suits its records best, and does not say which.
        """
        run = self._run(asked.text("run"))
        given = {name: asked.values[name] for name in ("model", "models") if name in asked.values}
        if len(given) > 1:
            raise Refused("a client is served by one model, or chooses among some")
        self._check(DEPLOYABLE["evaluate"], run, given)
        bench = self._scaled(run, asked)
        personal, _ = self._personal(run)
        served = next(iter(given.values()), personal.get("model"))
        if isinstance(served, Tensor):
            call = Call(run.proposal.client, given, None, personal)
            ((_, reply),) = next(bench.perform(Job(evaluate, END, {}, [call])))
            self._noted(run, END, "evaluate", reply.diagnostics)
            self._save_model(run, served[int(reply.diagnostics["choice"])] if "models" in given else served)
        with self.database:
            self.database.execute("UPDATE run SET state = 'finished' WHERE id = ?", (run.id,))
        return Envelope("finished")

    # ---- what is allowed ---------------------------------------------------------------------------

    def _within_budget(self, epsilon: float, delta: float) -> None:
        """Whether a run may begin: what was begun before and this one, added up, whatever each of them protects."""
        query = "SELECT epsilon, delta FROM run WHERE id IN (SELECT DISTINCT unit FROM ledger)"
        begun = self.database.execute(query).fetchall()
        total = math.fsum([epsilon, *(e for e, _ in begun)]), math.fsum([delta, *(d for _, d in begun)])
        limits = self.policy.epsilon, self.policy.delta
        for what, spent, limit, new in zip(("epsilon", "delta"), total, limits, (epsilon, delta), strict=True):
            if not spent <= limit * (1 + 1e-12):  # the last bit of a sum
                raise Refused(f"{what} {new:.6g} more would make {spent:.6g}: the policy allows {limit:.6g} in all")

    def _allowed(self, run: _Run, asked: Envelope) -> tuple[Deployable, Mechanism | None]:
        """The task, and the mechanism it is to answer by, as the accepted proposal has it."""
        task, what = asked.text("task"), asked.text("mechanism")
        if task not in self.policy.tasks or task not in DEPLOYABLE:
            raise Refused(f"the task {task[:100]!r} is not on the policy's list")
        deployable = DEPLOYABLE[task]
        if not what:
            if deployable.by is not None:
                raise Refused(f"{task} answers by a mechanism, and none was given")
            return deployable, None
        mechanism = from_canonical(what)
        if mechanism is None or what not in self.ledger.planned().get(run.id, {}):
            raise Refused(f"not in the proposal that was accepted: {mechanism.describe() if mechanism else 'unknown'}")
        if not deployable.answers_by(mechanism):
            raise Refused(f"{task} does not answer by {mechanism.kind} ({type(mechanism).__name__})")
        return deployable, mechanism

    def _check(self, deployable: Deployable, run: _Run, inputs: Mapping[str, Plain]) -> None:
        """Whether a task takes these inputs, for the model of this run and records of this shape."""
        record, tokens = math.prod(self.federation.features), self.federation.tokens
        deployable.check(inputs, parameters=run.bench.model.parameters, record=record, tokens=tokens)

    def _payable(self, run: _Run, request: str, mechanism: Mechanism | None, digest: bytes) -> None:
        """Whether the ledger will take it; asked before anything is computed."""
        if mechanism is None:
            return
        what = canonical(mechanism)
        before = self.ledger.answered(request, run.id)
        if before is not None:
            if before[:2] != (what, digest):
                raise Refused(
                    f"{request} was answered before with other inputs; two answers under one noise would give it away"
                )
            return
        posted = self.ledger.posted().get(run.id, Counter())
        if posted[what] >= self.ledger.planned()[run.id][what]:
            raise Refused(f"{mechanism.kind}: all that was accepted has been released, and no more will be")
        # with its first release a run begins to cost: others may have begun since it was accepted
        epsilon, delta = self.database.execute("SELECT epsilon, delta FROM run WHERE id = ?", (run.id,)).fetchone()
        more = 0.0 if posted else 1.0
        self._within_budget(more * epsilon, more * delta)

    # ---- what is done ------------------------------------------------------------------------------

    def _noted(
        self, run: _Run, request: str, task: str, diagnostics: Mapping[str, float],
        asked: tuple[bytes, int] | None = None,
    ) -> None:  # fmt: skip
        """Write down what was measured, NaN included: whether that could be done must not show in the answer.

        Args:
            asked: digest of what was asked, and the version of the personal state before it.
        """
        with self.database:
            rows = [(run.id, request, task, name, float(value)) for name, value in diagnostics.items()]
            self.database.executemany("INSERT OR REPLACE INTO diagnostic VALUES (?, ?, ?, ?, ?)", rows)
            if asked:
                self.database.execute("INSERT OR IGNORE INTO asked VALUES (?, ?, ?, ?)", (run.id, request, *asked))

    def _run(self, name: str) -> _Run:
        """A run that was accepted, made ready when it is first asked for."""
        if name not in self._runs:
            row = self.database.execute(
                "SELECT id, proposal, fingerprint, scales FROM run WHERE name = ?", (name,)
            ).fetchone()
            if row is None:
                raise Refused("this run was never accepted here")
            number, text, mark, scales = row
            if mark != self.fingerprint:
                raise Refused("the records have changed since this run was accepted; a new run can be proposed")
            proposal = Proposal.read(text)
            checked(proposal, self.policy, self.holding)  # the policy may have become stricter since
            personal = Versions(self.folder / "personal" / str(number))
            run = self._runs[name] = _Run(number, name, proposal, self._bench(name, proposal), personal)
            if scales is not None:
                self._set_scales(run, *np.frombuffer(scales).reshape(2, -1))
        return self._runs[name]

    def root(self, run: str) -> str:
        """Of the noise in a run: nothing that a server knows determines it."""
        return f"{self._secret} {self.fingerprint} {run}"

    @cached_property
    def _secret(self) -> str:
        path = self.folder / "secret.key"
        try:
            secret = path.read_text().strip()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read.", f"It is the key of this client's noise ({error.strerror}).", "restore it"
            ) from error
        if len(secret) < 64:
            raise UserError(f"{path} is too short.", "It must hold 256 random bits in hexadecimal.", "restore it")
        return secret

    def _bench(self, run: str, proposal: Proposal, source: Source | None = None) -> Bench:
        """Where the tasks of a run are done: its model, and these records."""
        if proposal.model not in MODELS and proposal.model not in self.policy.plugins:
            raise Refused(f"the model {proposal.model[:100]!r} is not known here")
        spec = ModelSpec(proposal.model, self.federation.features, self.federation.classes, dict(proposal.options))
        try:
            with torch.device("meta"):  # no memory is taken before the size is known
                parameters = sum(p.numel() for p in spec.module(Stream("size")).parameters())
            if 8 * parameters > self.policy.largest_message:
                raise Refused(f"a model of {parameters:,} parameters does not fit the messages that the policy allows")
            return Bench(source or _Own(self.data), spec, self.root(run), 1)
        except UserError as error:
            raise Refused(f"the model cannot be built: {error.what}") from None

    def _scaled(self, run: _Run, asked: Envelope) -> Bench:
        """Where tasks see the records as the run standardises them: by figures that stay the same for all of it.

        Never without them: a request could otherwise be answered once more, by the same noise, on other records.
        """
        given, standardise = asked.under("scales."), self.federation.standardise
        if standardise is None:
            if given:
                raise Refused("scales, and nothing here is standardised")
            return run.bench
        mean, deviation = given.get("mean"), given.get("deviation")
        if not (isinstance(mean, Tensor) and isinstance(deviation, Tensor)) or len(given) != 2:
            raise Refused("scales are needed: a mean and a deviation")
        right = tuple(mean.shape) == tuple(deviation.shape) == (len(standardise.columns),)
        if not right or not mean.dtype == deviation.dtype == torch.float64:
            raise Refused("scales of the wrong shape or type")
        check_finite(given)
        # what `mean_and_deviation` gives; with others features would be so large that rounding breaks the clip
        if not (mean.abs() <= 1).all() or not ((deviation >= LEAST_DEVIATION) & (deviation <= 1)).all():
            raise Refused("scales that no statistics give")
        scales = mean.numpy(), deviation.numpy()
        if run.standardised is None:
            with self.database:
                blob = np.concatenate(scales).tobytes()
                self.database.execute("UPDATE run SET scales = ? WHERE id = ?", (blob, run.id))
            return self._set_scales(run, *scales)
        if run.scales is None or not all(np.array_equal(*pair) for pair in zip(run.scales, scales, strict=True)):
            raise Refused("other scales than before in this run")
        return run.standardised

    def _set_scales(self, run: _Run, mean: np.ndarray, deviation: np.ndarray) -> Bench:
        assert self.federation.standardise is not None
        run.scales = mean, deviation
        source = Standardised(_Own(self.data), self.federation.standardise.columns, mean, deviation)
        run.standardised = self._bench(run.name, run.proposal, source)
        return run.standardised

    def _personal(self, run: _Run, request: str = "", asked: bytes = b"") -> tuple[dict[str, Tensor], int]:
        """The personal state, and the number of its version: the newest one.

        A request that is asked again, since the server has gone back to its last checkpoint, finds the version from
        which it started the first time. With other inputs it is refused, also where nothing was released: what was
        kept then has been used since, and would come out different, or not, which would show.
        """
        query = "SELECT digest, version FROM asked WHERE run = ? AND request = ?"
        before = self.database.execute(query, (run.id, request)).fetchone()
        if before is not None and before[0] != asked:
            raise Refused(
                f"{request} was answered before with other inputs; two answers under one noise would give it away"
            )
        number = before[1] if before else run.personal.newest
        return run.personal.state(number), number

    def _save_model(self, run: _Run, weights: Tensor) -> None:
        """The model that serves this client, under its module's own names, with what is needed to use it."""
        named = run.bench.model.unflatten(weights.clone())
        about: dict[str, Any] = {"model": run.proposal.model, "options": dict(run.proposal.options)}
        if run.scales and self.federation.standardise:
            columns = self.federation.standardise.columns
            about["standardise"] = {"columns": columns, "mean": run.scales[0].tolist(), "scale": run.scales[1].tolist()}
        folder = self.folder / "models"
        folder.mkdir(exist_ok=True, mode=0o700)
        data = save({name: value.contiguous() for name, value in named.items()}, {"fairveil": json.dumps(about)})
        write_whole(folder / f"{run.id:04d}-{run.name}.safetensors", data, mode=0o600)

    def _federation(self) -> tuple[Federation, int]:
        """The dataset, and which of its clients this is."""
        data = self.config.data
        federation = build_federation(data.dataset, data.options, data.split, data.seed)
        if not data.client and federation.clients == 1:
            return federation, 0
        names = list(federation.names) or [str(number) for number in range(federation.clients)]
        if data.client not in names:
            raise UserError(
                f"data.client = {shown(data.client)} is not one of the clients in these records.",
                f"There are: {', '.join(names[:20])}.",
                f"data.client = {shown(names[0])}",
            )
        return federation, names.index(data.client)


@dataclass(frozen=True)
class _Own:
    """A source of this client's records, whatever its number in a run."""

    data: ClientData

    def load(self, client: int) -> ClientData:
        return self.data


def _check_made_for(mechanism: Mechanism | None, inputs: Mapping[str, Plain]) -> None:
    """Whether the noise of a mechanism is made for these inputs."""
    try:
        if isinstance(mechanism, Sanitiser):
            mechanism.check(cast(Tensor, inputs["models"]))
        if isinstance(mechanism, NoisyVotes) and "queries" in inputs:
            mechanism.check(cast(Tensor, inputs["queries"]))
    except ValueError as error:  # of what was sent alone
        raise Refused(str(error)) from None


def _answer(call: Call, reply: Reply) -> Envelope:
    """What leaves of a reply, if it is what was asked for."""
    out = reply.out
    if isinstance(out, Kept) and call.mechanism is None:
        return Envelope("kept")
    if isinstance(out, Release) and out.mechanism == call.mechanism and digest_values(out.value) == out.digest:
        return Envelope("release", dict(out.value))
    if isinstance(out, Share) and out.mechanism == call.mechanism:
        return Envelope("share", dict(out.value))
    raise RuntimeError(f"{type(out).__name__} is no answer by {call.mechanism}, or not as it was released")


def _plain(words: object) -> str:
    """In letters that can be written down and sent, and not too many: a server has a say in them."""
    return str(words)[:LONGEST].encode("ascii", "backslashreplace").decode()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
