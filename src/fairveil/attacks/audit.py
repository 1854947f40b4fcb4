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

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fairveil.attacks.canaries import Planting, bearers, capacity, plant
from fairveil.attacks.claims import claimed_curve
from fairveil.attacks.evidence import enough_guesses, lower_bound, refuted_factor
from fairveil.attacks.rehearsal import check_here, rehearse
from fairveil.attacks.watch import Watch
from fairveil.attacks.watch_clients import ClientWatch
from fairveil.attacks.watch_records import RecordWatch
from fairveil.errors import UserError
from fairveil.plan import Plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.statement import json_number

SIGNIFICANCE = 1e-3
MOST_UNASKED = 20  # rehearsals


@dataclass(frozen=True)
class Audit:
    """What an audit has found."""

    epsilon_claimed: float
    epsilon_lower_bound: float  # by all prices that are claimed together, see `evidence.refuted_factor`
    epsilon_lower_bound_at_delta: float  # by the one at this delta, whatever the others are
    ceiling: float  # the bound, if all guesses had been right: below the claim, no fault could give an alarm
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
        return max(self.epsilon_lower_bound, self.epsilon_lower_bound_at_delta) > self.epsilon_claimed

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"epsilon_claimed": json_number(self.epsilon_claimed), "alarm": self.alarm}


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
    check_here(plan)
    canaries, rehearsals = _spread(plan, canaries, rehearsals)
    _check(plan, canaries, guesses, significance)
    curve = claimed_curve(plan, [FEDERATION] if plan.pooled else bearers(plan).tolist())
    if guesses is None:
        guesses = enough_guesses(canaries, claimed, delta, curve, significance)
    inside, odds = [], []
    for number, some in enumerate(np.array_split(np.arange(canaries), rehearsals)):
        planting = plant(plan, len(some), (plan.root, "audit", number))
        watch = watch_of(planting, f"audit {number}")
        rehearse(planting.plan, watch)
        inside.append(planting.inside)
        odds.append(watch.log_odds())
        tell(number + 1, rehearsals)
    right = _guessed(np.concatenate(odds), np.concatenate(inside), guesses)
    correct = int(right.sum())

    def bound(right: int) -> float:
        if not curve.delta:
            return lower_bound(canaries, guesses, right, delta, significance)
        return claimed * refuted_factor(canaries, guesses, right, curve, significance)

    return Audit(
        epsilon_claimed=claimed,
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


def watch_of(planting: Planting, name: str) -> Watch:
    """Who looks on."""
    return (ClientWatch if planting.whole else RecordWatch)(planting, name)


def _spread(plan: Plan, canaries: int, rehearsals: int | None) -> tuple[int, int]:
    """How many canaries in how many rehearsals: no more in one than can be told apart."""
    at_once = capacity(plan)
    if rehearsals is None:
        rehearsals = min(MOST_UNASKED, -(-canaries // at_once))
    return min(canaries, rehearsals * at_once), rehearsals


def _guessed(odds: np.ndarray, inside: np.ndarray, guesses: int) -> np.ndarray:
    """Whether each guess is right, the surest first."""
    surest = np.argsort(-np.abs(odds), kind="stable")[:guesses]
    found: np.ndarray = (odds[surest] > 0) == inside[surest]
    return found


def _check(plan: Plan, canaries: int, guesses: int | None, significance: float) -> None:
    if not 0 < significance < 1:
        raise UserError(
            f"significance = {significance:g} makes no sense.",
            "It is the chance that the bound is too large: between 0 and 1. Nothing was run.",
            "--significance 0.001",
        )
    if guesses is not None and not 1 <= guesses <= canaries:
        raise UserError(
            f"guesses = {guesses} makes no sense with {canaries:,} canaries.",
            "There is a guess for some of them, at least one. Nothing was run.",
            f"--guesses {max(1, canaries // 4)}, or leave it out",
        )
    if not any(plan.releases.values()):
        raise UserError(
            f"{plan.config.algorithm.name} releases nothing here.",
            "There is nothing to look at, and nothing to be audited. Nothing was run.",
            "another algorithm",
        )
    shared = [m for each in plan.releases.values() for m in each if getattr(m, "noised_by", None) is not None]
    if shared and plan.unit == "client":
        raise UserError(
            'algorithm.noise = "distributed" cannot be audited yet.',
            "A client that is left out would take its share of the noise with it, which the promise does not allow\n"
            "for. Nothing was run.",
            'algorithm.noise = "server": the law of the sum is the same',
        )
