"""The audit: how much of what a run promises can be refuted by looking at it?

The planned run is carried out again with canaries among its records (or clients), by the very code that trains, with
noise of its own. Somebody who sees what the server sees in each round guesses which canaries are in. So many guesses
are right that some promises cannot have been kept: what is refuted is a lower bound on epsilon
(`fairveil.attacks.evidence`). If it exceeds the epsilon that is claimed, something is wrong with mechanism, ledger or
price, and the audit is an alarm.

It is no proof of privacy. Guesses are as good as this attack is, and their number limits what they can show: with r
guesses that are all right, epsilon of about ln(r / ln(1 / significance)).

The relation between neighbours is that of the plan: canaries are added or not, or replaced by others. The event is all
that the server sees in all rounds. Whatever decides on a guess is fixed before the coins are looked at: how many
guesses there are follows from the plan alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from dp_accounting import DpEvent

from fairveil.attacks.canaries import Planting, bearers, capacity, plant
from fairveil.attacks.claims import claimed_curve, priced_curve
from fairveil.attacks.evidence import enough_guesses, lower_bound, refuted_factor
from fairveil.attacks.rehearsal import check_here, rehearse
from fairveil.attacks.watch import Watch
from fairveil.attacks.watch_clients import ClientWatch
from fairveil.attacks.watch_records import RecordWatch
from fairveil.errors import UserError
from fairveil.plan import Plan
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.fair_training import FairTraining
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import CohortSums, events_of
from fairveil.privacy.metric import GaussianBall, LaplaceBall
from fairveil.privacy.moments import NoisyMoments
from fairveil.privacy.statement import json_number
from fairveil.privacy.training import NoisyTraining
from fairveil.privacy.votes import NoisyVotes

SIGNIFICANCE = 1e-3
MOST_UNASKED = 20  # rehearsals
LOOKED_AT = (
    NoisyTraining, FairTraining, PrivateChoice, NoisyMoments, CohortSums, NoisyVotes, LaplaceBall, GaussianBall
)  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """What an audit has found."""

    epsilon_claimed: float
    epsilon_priced: float  # what is released, priced anew
    epsilon_lower_bound: float  # by all prices that are claimed together, see `evidence.refuted_factor`
    epsilon_lower_bound_at_delta: float  # by the one at this delta, whatever the others are
    ceiling: float  # what the first would be if all guesses had been right
    delta: float
    confidence: float
    canaries: int
    guesses: int
    correct: int
    rehearsals: int
    unit: str
    adjacency: str
    algorithm: str
    rounds: int
    seconds: float
    by_certainty: tuple[tuple[int, int], ...]  # of the guesses, the surest first: how many, and how many of them right

    @property
    def alarm(self) -> bool:
        """Whether what is claimed is refuted."""
        bounds = self.epsilon_lower_bound, self.epsilon_lower_bound_at_delta
        return max(*bounds, self.epsilon_priced * (1 - 1e-6)) > self.epsilon_claimed

    def to_json(self) -> dict[str, Any]:
        numbers = {name: json_number(getattr(self, name)) for name in ("epsilon_claimed", "epsilon_priced")}
        return asdict(self) | numbers | {"alarm": self.alarm}


def audit(
    plan: Plan, *, canaries: int = 1000, rehearsals: int | None = None, guesses: int | None = None,
    significance: float = SIGNIFICANCE, tell: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:  # fmt: skip
    """Audit a plan.

    Args:
        canaries: in all rehearsals together.
        rehearsals: how many they are spread over; None: as many as it takes to tell them apart.
        guesses: how many; None: what promises most.
        significance: the chance of a bound that is too large.
        tell: takes how many rehearsals are done, and of how many.

    Raises:
        UserError: it makes no sense.
    """
    started, claimed, delta = time.perf_counter(), plan.price.epsilon, plan.price.delta
    _check(plan, canaries, rehearsals, significance)
    canaries, rehearsals = _spread(plan, canaries, rehearsals)
    units = [FEDERATION] if plan.pooled else bearers(plan).tolist()
    curve, anew = claimed_curve(plan, units), priced_curve(plan, units)
    if not curve.delta:
        delta = 0.0  # nothing is claimed, at whatever delta
    if guesses is None:
        guesses = enough_guesses(canaries, claimed, delta, curve, significance)
    elif not 1 <= guesses <= canaries:
        raise UserError(
            f"guesses = {guesses} makes no sense with {canaries:,} canaries.",
            "There is a guess for some of those that there is room for, at least one. Nothing was run.",
            f"--guesses {max(1, canaries // 4)}, or leave it out",
        )
    right = _guessed(*_scored(plan, canaries, rehearsals, tell), guesses)
    correct = int(right.sum())

    def bound(right: int) -> float:
        if not curve.delta:
            return lower_bound(canaries, guesses, right, delta, significance)
        return claimed * refuted_factor(canaries, guesses, right, curve, significance)

    return Audit(
        epsilon_claimed=claimed,
        epsilon_priced=dict(zip(anew.delta, anew.epsilon, strict=True)).get(delta, math.inf),
        epsilon_lower_bound=bound(correct),
        epsilon_lower_bound_at_delta=lower_bound(canaries, guesses, correct, delta, significance),
        ceiling=bound(guesses),
        delta=delta,
        confidence=1 - significance,
        canaries=canaries,
        guesses=guesses,
        correct=correct,
        rehearsals=rehearsals,
        unit=plan.unit,
        adjacency=plan.config.privacy.adjacency,
        algorithm=plan.config.algorithm.name,
        rounds=plan.algorithm.rounds,
        seconds=round(time.perf_counter() - started, 1),
        by_certainty=tuple((int(n), int(right[:n].sum())) for n in np.unique(np.geomspace(1, guesses, 30).astype(int))),
    )


def _scored(
    plan: Plan, canaries: int, rehearsals: int, tell: Callable[[int, int], None]
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The log-odds (canaries,) that each is in, and whether it is."""
    inside, odds = [], []
    for number, some in enumerate(np.array_split(np.arange(canaries), rehearsals)):
        planting = plant(plan, len(some), (plan.root, "audit", number))
        assert _events(planting.plan) == _events(plan)  # or another promise would be audited
        watch = watch_of(planting, f"audit {number}")
        rehearse(planting.plan, watch)
        inside.append(planting.inside)
        odds.append(watch.log_odds())
        tell(number + 1, rehearsals)
    return np.concatenate(odds), np.concatenate(inside)


def watch_of(planting: Planting, name: str) -> Watch:
    """Who looks on."""
    return (ClientWatch if planting.whole else RecordWatch)(planting, name)


def _spread(plan: Plan, canaries: int, rehearsals: int | None) -> tuple[int, int]:
    """How many canaries in how many rehearsals: no more in one than can be told apart."""
    at_once = capacity(plan)
    wanted = min(MOST_UNASKED, -(-canaries // at_once)) if rehearsals is None else min(rehearsals, canaries)
    return min(canaries, wanted * at_once), wanted


def _events(plan: Plan) -> dict[int, Mapping[DpEvent, int]]:
    return {unit: events_of(releases) for unit, releases in plan.releases.items()}


def _guessed(odds: np.ndarray, inside: np.ndarray, guesses: int) -> np.ndarray:
    """Whether each guess is right, the surest first."""
    surest = np.argsort(-np.abs(odds), kind="stable")[:guesses]
    found: np.ndarray = (odds[surest] > 0) == inside[surest]
    return found


def _check(plan: Plan, canaries: int, rehearsals: int | None, significance: float) -> None:
    check_here(plan)
    if canaries < 1 or (rehearsals is not None and rehearsals < 1):
        raise UserError(
            f"{canaries} canaries in {rehearsals} rehearsals make no sense.",
            "There must be at least one of each. Nothing was run.",
            "--canaries 1000",
        )
    if not 0 < significance < 1:
        raise UserError(
            f"significance = {significance:g} makes no sense.",
            "It is the chance that the bound is too large: between 0 and 1. Nothing was run.",
            "--significance 0.001",
        )
    if not any(isinstance(mechanism, LOOKED_AT) for releases in plan.releases.values() for mechanism in releases):
        raise UserError(
            f"what {plan.config.algorithm.name} releases here cannot be audited.",
            "The audit knows how to look at training with noise, at noisy sums, votes, choices and statistics, and at\n"
            "local models within a ball: nothing of that is released. Nothing was run.",
            "leave out algorithm.faithful, or another algorithm",
        )
    shared = [m for each in plan.releases.values() for m in each if getattr(m, "noised_by", None) is not None]
    if shared and plan.unit == "client":
        raise UserError(
            'algorithm.noise = "distributed" cannot be audited yet.',
            "A client that is left out would take its share of the noise with it, which the promise does not allow\n"
            "for. Nothing was run.",
            'algorithm.noise = "server": the law of the sum is the same',
        )
