"""Was this record trained on? Membership inference against the models that serve the clients.

Loss threshold: Yeom, Giacomelli, Fredrikson and Jha, "Privacy Risk in Machine Learning: Analyzing the Connection to
Overfitting" (2018). A record whose loss is low is taken for a member; one threshold for all.

Likelihood ratio: Carlini, Chien, Nasr, Song, Terzis and Tramèr, "Membership Inference Attacks From First Principles"
(2022). How confident the model is of a record is compared with how confident models (shadows) are that were trained on
it, and that were not: see `fairveil.attacks.likelihood`.

The run is done over, each time with noise of its own and with a random half of every client's training records. So
members and others are exchangeable: of the same client and the same law, told apart by a coin alone. Training and test
records would also be told apart by how they were split. What clients have declared stays as planned, and with it
sampling, noise and price: it is the planned mechanism that is attacked, on half of the records. Coins of different
rehearsals are independent: if every record were in exactly half of them, shadows would give away whether it is in the
next. Every rehearsal is attacked once, the others being its shadows, and all guesses are judged together.

Whoever attacks knows all records and the config, but not the coins, and sees the model that serves a record's client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairveil.attacks.claims import claimed_curve
from fairveil.attacks.evidence import Curve
from fairveil.attacks.exposure import LEVELS, Exposure, exposed
from fairveil.attacks.likelihood import likelihood_ratios
from fairveil.attacks.rehearsal import Apart, Rehearsed, planted, rehearse
from fairveil.data.federation import Federation, Records, Standardised
from fairveil.errors import UserError
from fairveil.models import Model
from fairveil.plan import Plan
from fairveil.run import Machines
from fairveil.serving import Served, diverged
from fairveil.session import Offer, Pick
from fairveil.store import Store
from fairveil.streams import Stream
from fairveil.tasks import best_model

LEAST_SHADOWS = 4
SCORED = 500  # records that are scored at once
SHOWN = 60  # points of the bound that are kept


@dataclass(frozen=True)
class Promise:
    """What a run promises a single record, whoever looks at what is released.

    Attributes:
        epsilon, delta: of the guarantee.
        curve: all pairs that are looked at; each of them holds.
        steps: how many neighbours apart it is whether a record is held: 2 if a client is added or removed as a whole
            (without the record removed, with it added), otherwise 1.
    """

    epsilon: float
    delta: float
    curve: Curve
    steps: int

    def most(self, fpr: float) -> float:
        """The largest true positive rate that any attack can have at this false positive rate.

        TPR <= e^epsilon FPR + delta, and 1 - FPR <= e^epsilon (1 - TPR) + delta.
        """
        for _ in range(self.steps):
            intercepts, slopes = self.curve.lines()
            fpr = min(1.0, float((intercepts + slopes * fpr).min()))
        return fpr

    @property
    def auc(self) -> float:
        """The largest area under a curve of such rates: a sum of 1,000 slices, each as high as its higher end."""
        return float(np.mean([self.most((k + 1) / 1000) for k in range(1000)]))

    def to_json(self) -> dict[str, Any]:
        fpr = [float(f"{x:.6g}") for x in np.geomspace(1e-6, 1, SHOWN)]
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            "auc": self.auc,
            "tpr": {str(level): self.most(level) for level in LEVELS},
            "roc": {"fpr": fpr, "tpr": [self.most(x) for x in fpr]},
        }


@dataclass(frozen=True)
class Membership:
    """What the attacks have found.

    Attributes:
        models: rehearsals; each was attacked, with the others as shadows.
        clients, records: that were attacked.
        spared: training records that were in every rehearsal, since a client has to hold some.
        seen: what whoever attacks sees, in words.
        holders: the most clients that hold one original record. Above 1 a record that its client was trained without
            may have been in by another, which these figures leave out of account.
        promise: what bounds any such attack; None: nothing does, and `unbounded` says why.
        found: by attack, "loss threshold" and "likelihood ratio".
    """

    models: int
    clients: int
    records: int
    spared: int
    seen: str
    holders: int
    promise: Promise | None
    unbounded: str
    found: Mapping[str, Exposure]

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for what there are too few pairs to say."""
        counts = {key: getattr(self, key) for key in ("models", "clients", "records", "spared", "seen", "holders")}
        promise = None if self.promise is None else self.promise.to_json()
        attacks = {name: exposure.to_json() for name, exposure in self.found.items()}
        return {**counts, "promise": promise, "unbounded": self.unbounded, "attacks": attacks}


def attack_members(
    plan: Plan, *, shadows: int = 16, tell: Callable[[int, int], None] = lambda done, of: None
) -> Membership:  # fmt: skip
    """Attack the models of a planned run.

    Args:
        shadows: for each attacked model; so many rehearsals, and one more.
        tell: takes how many rehearsals are done, and of how many.

    Raises:
        UserError: too few shadows, nobody has records enough, or the records are not here.
    """
    federation, models = plan.federation, shadows + 1
    attacked = _attacked(plan)
    _check(shadows, attacked)
    told = []
    for number in range(models):
        told.append(_rehearsed(plan, number, attacked))
        tell(number + 1, models)
    coins = np.stack([each.inside for each in told])
    scores = {
        "loss threshold": -np.stack([each.losses for each in told]),
        "likelihood ratio": likelihood_ratios(np.stack([each.odds for each in told]), coins),
    }
    client = np.repeat(np.arange(federation.clients), [int(some.sum()) for some in attacked])
    served = told[0].served
    unbounded = _unbounded(plan, served)
    return Membership(
        models=models,
        clients=len(np.unique(client)),
        records=len(client),
        spared=int(federation.size.sum()) - len(client),
        seen=_seen(served),
        holders=federation.holders,
        promise=None if unbounded else promised(plan),
        unbounded=unbounded,
        found={
            name: exposed(each, coins, client, federation.group, federation.groups) for name, each in scores.items()
        },
    )


def _check(shadows: int, attacked: list[np.ndarray]) -> None:
    if shadows < LEAST_SHADOWS:
        raise UserError(
            f"shadows = {shadows} are too few.",
            f"They show how confident models are that know a record, and others: it takes {LEAST_SHADOWS} at least.\n"
            "Nothing was run.",
            "--shadows 16",
        )
    if not any(some.any() for some in attacked):
        raise UserError(
            "no client has two training records.",
            "Each has to hold one, so that there is none whose membership could be in question. Nothing was run.",
            "data with more records at each client",
        )


# ---- halves ----


def _attacked(plan: Plan) -> list[np.ndarray]:
    """By client, which of its records (n,) are in by chance. Coins go by what the guarantee calls neighbours.

    Added or removed: every record has a coin of its own, whatever the others show; but one, drawn here, is always in,
    since a client has to hold one. Replaced: the number of members is fixed.
    """
    found = []
    for client, n in enumerate(plan.federation.size.tolist()):
        some = np.full(n, n > 1)
        if plan.facts.adjacency == "add-remove":
            some[Stream(plan.root, "membership", "always in", client).numpy.integers(n)] = False
        found.append(some)
    return found


def _half(plan: Plan, number: int, client: int, attacked: np.ndarray) -> np.ndarray:
    """Which of a client's records (n,) it holds in a rehearsal."""
    n, stream = len(attacked), Stream(plan.root, "membership", number, client)
    inside = ~attacked
    drawn = stream.coins(n, 0.5).numpy()
    if plan.facts.adjacency == "replace":
        drawn = stream.numpy.permutation(n)[: max(1, n // 2)]
    inside[drawn] = True
    return inside


# ---- what models say of records ----


class _Told(NamedTuple):
    """What a rehearsal tells of the attacked records (records,)."""

    inside: np.ndarray
    odds: np.ndarray
    losses: np.ndarray
    served: Served


def _rehearsed(plan: Plan, number: int, attacked: list[np.ndarray]) -> _Told:
    halves = [_half(plan, number, client, some) for client, some in enumerate(attacked)]
    without = {client: np.flatnonzero(~half) for client, half in enumerate(halves)}
    place = _Prepared(f"membership {number}")
    found = rehearse(replace(plan, federation=planted(plan.federation, {}, without)), place)
    odds, losses = _said(plan, place.prepared(plan.federation), found, halves)
    some = np.concatenate(attacked)
    return _Told(np.concatenate(halves)[some], odds[some], losses[some], found.served)


class _Prepared(Apart):
    """A place that notes what models take their features standardised by."""

    def engine(self, plan: Plan, store: Store, federation: Federation) -> Machines:
        self._source = federation.source
        return super().engine(plan, store, federation)

    def prepared(self, federation: Federation) -> Federation:
        """A federation with its records as the models take them."""
        if not isinstance(self._source, Standardised):
            return federation
        return federation.standardised(self._source.mean, self._source.scale)


def _said(
    plan: Plan, federation: Federation, found: Rehearsed, halves: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """How confident of each record, and by which loss, the model is that serves its client: (records,) both."""
    said = []
    for client, half in enumerate(halves):
        records = federation.load(client).train
        if isinstance(found.served, Pick):
            weights = found.served[client]
        elif isinstance(found.served, Offer):
            rows = found.served.rows
            weights = rows[best_model(plan.model, rows, records.take(np.flatnonzero(half)))]
        else:
            weights = found.personal[client]["model"]
        said.append(confidence(plan.model, weights, records))
    odds, losses = (torch.cat(part).numpy() for part in zip(*said, strict=True))
    if not np.isfinite(odds + losses).all():
        raise diverged(plan.algorithm.rounds, "the loss of a record")
    return odds, losses


@torch.no_grad()
def confidence(model: Model, weights: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """How confident a model (p,) is of each record's label (n,), and the record's loss (n,); float64.

    log(p / (1 - p)) of the true class, whose law is about normal; where there is no such class (a regression, or
    several classes at once) minus the loss.
    """
    parameters, odds, losses = model.unflatten(weights), [], []
    for x, y in zip(records.x.split(SCORED), records.y.split(SCORED), strict=True):
        output, loss = model.scored(parameters, x, y)
        losses.append(loss.double())
        of_class = model.spec.classes and not model.spec.several
        odds.append(log_odds(output.double(), y) if of_class else -losses[-1])
    return torch.cat(odds), torch.cat(losses)


def log_odds(output: Tensor, y: Tensor) -> Tensor:
    """log(p / (1 - p)) of the classes y (n,) by logits (n, classes): what sets the one apart from all others together.

    The difference of logits, so that a p next to 1 is not rounded to it.
    """
    own = output.gather(1, y[:, None])
    others = output.scatter(1, y[:, None], -math.inf).logsumexp(dim=1)
    return own[:, 0] - others


# ---- what was promised ----


def promised(plan: Plan) -> Promise:
    """What the plan promises of whether one record is held: of all units the largest price at every delta."""
    steps = 2 if plan.unit == "client" and plan.facts.adjacency == "add-remove" else 1
    return Promise(plan.price.epsilon, plan.price.delta, claimed_curve(plan, plan.protected), steps)


def _unbounded(plan: Plan, served: Served) -> str:
    """Why the guarantee says nothing of this attack; empty: it does."""
    if math.isinf(plan.price.epsilon):
        return "the run promises nothing: its epsilon is infinite"
    if plan.unit == "metric":
        return "metric privacy does not say how well one record is hidden"
    if isinstance(served, Offer):
        return "which of the released models a client takes is its own secret, and no release"
    if not isinstance(served, Pick):
        return "what a client keeps to itself is no release"
    return ""


def _seen(served: Served) -> str:
    if isinstance(served, Offer):
        return "of the released models the one that the record's client takes, which only that client knows"
    if not isinstance(served, Pick):
        return "the model of the record's client, which only that client sees"
    return "the released model" if len(served.rows) == 1 else "the released model that serves the record's client"
