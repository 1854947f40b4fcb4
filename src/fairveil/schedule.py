"""The price of a schedule of releases, or the noise for a budget, without a config and without data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

from dp_accounting import DpEvent

from fairveil.errors import UserError, nearest
from fairveil.privacy.accounting import Accountant, Adjacency, SelectionDpEvent, calibrate, price
from fairveil.privacy.mechanisms import Mechanism, events_of
from fairveil.privacy.statement import json_number
from fairveil.privacy.training import NoisyTraining


@dataclass(frozen=True)
class Schedule:
    """The releases of one client, in numbers: DP-SGD rounds and private choices."""

    records: int  # N
    batch: int  # b
    rounds: int  # E
    local_epochs: int = 1  # K
    full_first_round: bool = False
    first_round_factor: float = 1.0  # f: round 1 has f * z
    select_rounds: int = 0  # T
    select_epsilon: float | None = None

    def events(self, z: float) -> Counter[DpEvent]:
        """All events at noise multiplier z."""
        first = self.full_first_round or self.first_round_factor != 1.0
        usual = self._training(self.batch, z)
        releases: Counter[Mechanism] = Counter({usual: self.rounds - first})
        if first:
            batch = self.records if self.full_first_round else self.batch
            releases[self._training(batch, self.first_round_factor * z)] += 1
        events = events_of(+releases)
        if self.select_rounds:
            assert self.select_epsilon is not None
            events[SelectionDpEvent(self.select_epsilon)] += self.select_rounds
        return events

    def _training(self, batch: int, z: float) -> NoisyTraining:
        return NoisyTraining.epochs(self.records, batch, self.local_epochs, clip_norm=1.0, noise_multiplier=z)


def account_schedule(
    schedule: Schedule, *, epsilon: float | None, noise_multiplier: float | None, delta: float, adjacency: str,
    accountant: str,
) -> dict[str, Any]:  # fmt: skip
    """The noise multiplier for a budget, or the price of a noise multiplier.

    Raises:
        UserError: both or neither of epsilon and noise_multiplier, or a value that makes no sense.
    """
    _check_account(schedule, epsilon, noise_multiplier, delta, adjacency, accountant)
    terms: dict[str, Any] = {"adjacency": adjacency, "accountant": accountant}
    try:
        z = noise_multiplier if epsilon is None else calibrate(schedule.events, epsilon, delta, **terms)
    except UserError as error:  # the same words, for who typed options and no config
        raise UserError(error.what.replace("privacy.epsilon =", "--epsilon"), error.why, error.fix) from None
    assert z is not None
    found = price(schedule.events(z), delta, **terms)
    return {
        "noise_multiplier": z,
        "epsilon": json_number(found.epsilon),
        "delta": delta,
        "accountant": found.accountant,
        "adjacency": adjacency,
    }


def _check_account(
    schedule: Schedule,
    epsilon: float | None,
    noise: float | None,
    delta: float,
    adjacency: str,
    accountant: str,
) -> None:
    if (epsilon is None) == (noise is None):
        given = "neither is given" if epsilon is None else f"{epsilon:g} and {noise:g} are both given"
        raise UserError(
            f"--epsilon and --noise-multiplier: {given}.",
            "One is the question, the other the answer.",
            "--epsilon 5, or --noise-multiplier 1.0",
        )
    for key, value, known in (
        ("--adjacency", adjacency, get_args(Adjacency)),
        ("--accountant", accountant, get_args(Accountant)),
    ):
        if value not in known:
            near = nearest(value, known) or known[0]
            raise UserError(f"{key} {value} is not known.", f"It must be one of: {', '.join(known)}.", f"{key} {near}")
    for key, number in (
        ("--epsilon", 1.0 if epsilon is None else epsilon),
        ("--first-round-factor", schedule.first_round_factor),
        ("--select-epsilon", 1.0 if schedule.select_epsilon is None else schedule.select_epsilon),
    ):
        if not 0 < number < math.inf:
            raise UserError(f"{key} {number:g} makes no sense.", "It must be positive and finite.", f"{key} 1.0")
    if noise is not None and not 0 <= noise < math.inf:
        raise UserError(
            f"--noise-multiplier {noise:g} makes no sense.",
            "It must be finite, and not negative.",
            "--noise-multiplier 1",
        )
    if adjacency == "replace" and accountant == "rdp":
        raise UserError(
            "--accountant rdp does not go with --adjacency replace.",
            "The Renyi accountant prices a replaced record like a removed one, which would be too little.",
            "--accountant pld",
        )
    if not 0 < delta < 1:
        raise UserError(f"--delta {delta:g} is not a probability.", "It must lie between 0 and 1.", "--delta 1e-4")
    if schedule.select_rounds and schedule.select_epsilon is None:
        raise UserError(
            f"--select-rounds {schedule.select_rounds} needs --select-epsilon.",
            "Each private choice has a price of its own.",
            "--select-epsilon 0.1",
        )
    if delta >= 1 / schedule.records:
        raise UserError(
            f"--delta {delta:g} is too large.",
            f"With {schedule.records:,} records delta must stay below 1/n = {1 / schedule.records:.2g},\n"
            "or whole records could be published and still satisfy the guarantee.",
            "--delta 1e-4" if schedule.records < 10_000 else f"--delta {0.1 / schedule.records:.0e}",
        )
