"""The price of a schedule of releases, or the noise for a budget, without a config and without data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_args

from dp_accounting import DpEvent

from fairveil.errors import UserError, nearest
from fairveil.privacy.accounting import Accountant, Adjacency, SelectionDpEvent, calibrate, price
from fairveil.privacy.mechanisms import Mechanism, events_of
from fairveil.privacy.statement import json_number
from fairveil.privacy.training import NoisyTraining
from fairveil.privacy.votes import NeighbourVotes, NoisyVotes, Protected, Several

UNITS: dict[str, Protected] = {"agent": "client", "instance": "record", "client": "client", "record": "record"}


@dataclass(frozen=True)
class Schedule:
    """The releases of one client, in numbers: DP-SGD rounds and private choices."""

    noise: ClassVar[str] = "--noise-multiplier"
    example: ClassVar[str] = "--records 2286 --batch 32 --rounds 200"

    records: int  # N
    batch: int  # b
    rounds: int  # E
    local_epochs: int = 1  # K
    full_first_round: bool = False
    first_round_factor: float = 1.0  # f: round 1 has f * z
    select_rounds: int = 0  # T
    select_epsilon: float | None = None

    def events(self, z: float, adjacency: Adjacency = "add-remove") -> Counter[DpEvent]:
        """All events at noise multiplier z; they are the same under either adjacency."""
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

    def facts(self, z: float, adjacency: Adjacency) -> dict[str, Any]:
        """What an answer tells besides the price."""
        return {}

    def check(self, noise: float | None, delta: float) -> None:
        """Raise a UserError for what makes no sense in itself."""
        for key, number in (
            ("--first-round-factor", self.first_round_factor),
            ("--select-epsilon", 1.0 if self.select_epsilon is None else self.select_epsilon),
        ):
            _check_positive(key, number)
        if self.select_rounds and self.select_epsilon is None:
            raise UserError(
                f"--select-rounds {self.select_rounds} needs --select-epsilon.",
                "Each private choice has a price of its own.",
                "--select-epsilon 0.1",
            )
        if delta >= 1 / self.records:
            raise UserError(
                f"--delta {delta:g} is too large.",
                f"With {self.records:,} records delta must stay below 1/n = {1 / self.records:.2g},\n"
                "or whole records could be published and still satisfy the guarantee.",
                "--delta 1e-4" if self.records < 10_000 else f"--delta {0.1 / self.records:.0e}",
            )

    def used_up(self, error: UserError) -> UserError:
        """A budget that no noise can meet, in the words of who typed options and no config."""
        return UserError(error.what.replace("privacy.epsilon =", "--epsilon"), error.why, error.fix)


@dataclass(frozen=True)
class Votes:
    """The votes of all clients on public queries, in numbers: see `fairveil.privacy.votes`."""

    noise: ClassVar[str] = "--sigma"
    example: ClassVar[str] = "--queries 500 --unit agent"

    queries: int  # Q
    unit: str  # a key of UNITS: the paper's word, or ours
    neighbours: int | None = None  # k; None: each client votes with a model of its own
    answers: int | None = None  # A; None: every query is answered
    threshold_noise: float | None = None  # standard deviation of the count that decides on an answer, in votes
    labels: int | None = None  # tau; None: a record has one class
    classes: int | None = None  # C; None: however many

    def mechanism(self, sigma: float, adjacency: Adjacency) -> NoisyVotes:
        """All of them as one release."""
        most = self.labels or 1
        asked: dict[str, Any] = {
            "queries": self.queries,
            "classes": self.classes or 2 * most,  # from there on two votes need not share a class: more change nothing
            "noise_multiplier": sigma,
            "unit": UNITS[self.unit],
            "adjacency": adjacency,
            "answers": self.answers or self.queries,
            "several": Several(most, needed=0.0) if self.labels else None,  # how many are needed has no price
        }
        if self.threshold_noise is not None:
            asked |= {"threshold": 1.0, "threshold_noise": self.threshold_noise}  # nor has the threshold
        return NoisyVotes(**asked) if self.neighbours is None else NeighbourVotes(**asked, neighbours=self.neighbours)

    def events(self, z: float, adjacency: Adjacency) -> Counter[DpEvent]:
        """All events at noise of standard deviation z, in votes."""
        return Counter({self.mechanism(z, adjacency).event: 1})

    def facts(self, z: float, adjacency: Adjacency) -> dict[str, Any]:
        """What an answer tells besides the price. The sensitivity is that of one query."""
        votes = self.mechanism(z, adjacency)
        return {"unit": votes.unit, "queries": votes.queries, "sensitivity": votes.sensitivity}

    def check(self, noise: float | None, delta: float) -> None:
        """Raise a UserError for what makes no sense in itself."""
        for key, number, least in (
            ("--queries", self.queries, 1),
            ("--neighbours", self.neighbours, 1),
            ("--answers", self.answers, 1),
            ("--labels", self.labels, 1),
            ("--classes", self.classes, 2),
        ):
            if number is not None and number < least:
                raise UserError(f"{key} {number} makes no sense.", f"It must be at least {least}.", f"{key} {least}")
        _check_known("--unit", self.unit, tuple(UNITS))
        self._check_confidence()
        self._check_labels()
        try:
            for z in (1e-2, 1e6) if noise is None else (noise,):  # the range in which a noise is solved
                self.events(z, "add-remove")
        except ArithmeticError:
            raise UserError(
                f"--queries {self.queries}{'' if noise is None else f' --sigma {noise:g}'} is out of all proportion.",
                "The price of so many votes, with so much or so little noise, is beyond what a float can hold.",
                "--queries 500 --sigma 25",
            ) from None

    def _check_confidence(self) -> None:
        if (self.answers is None) != (self.threshold_noise is None):
            given, other = ("--answers", "--threshold-noise") if self.answers else ("--threshold-noise", "--answers")
            value = self.answers if self.answers else self.threshold_noise
            raise UserError(
                f"{given} {value} needs {other}.",
                "A noisy count decides whether a query is answered: every count is paid for, and the most answers.",
                "--answers 250 --threshold-noise 75, or neither",
            )
        if self.answers is not None and self.answers > self.queries:
            raise UserError(
                f"--answers {self.answers} is more than --queries {self.queries}.",
                "Each query is answered once at most.",
                f"--answers {self.queries}, or fewer",
            )
        _check_noise("--threshold-noise", self.threshold_noise)

    def _check_labels(self) -> None:
        if self.labels is not None and self.answers is not None:
            raise UserError(
                f"--labels {self.labels} does not go with --answers {self.answers}.",
                "Among several classes there is no single winner whose votes could be counted.",
                "--labels, or --answers and --threshold-noise",
            )
        if self.labels is not None and self.classes is not None and self.labels > self.classes:
            raise UserError(
                f"--labels {self.labels} is more than --classes {self.classes}.",
                "A vote names each class once at most.",
                f"--labels {self.classes}, or fewer",
            )

    def used_up(self, error: UserError) -> UserError:
        """A budget that no noise can meet, in the words of who typed options and no config."""
        why, fix = "No noise of up to a million votes makes the answers that cheap", "a larger --epsilon"
        if self.threshold_noise is not None:
            why += f",\nnext to {self.queries:,} counts with noise {self.threshold_noise:g}, which cost something too"
            fix += ", a larger --threshold-noise"
        what = error.what.replace("privacy.epsilon =", "--epsilon")
        return UserError(what, f"{why}.", f"{fix}, or fewer --queries")


def account_options(vote: bool, training: Mapping[str, Any], votes: Mapping[str, Any], **terms: Any) -> dict[str, Any]:
    """`account_schedule` for options as they were typed, of training or of votes; None and False: not given.

    Raises:
        UserError: options of the other kind, or too few.
    """
    kind: type[Schedule | Votes] = Votes if vote else Schedule
    given, others = (
        {key: value for key, value in options.items() if value is not None and value is not False}
        for options in ((votes, training) if vote else (training, votes))
    )
    for key, value in others.items():
        typed = _option(key) if value is True else f"{_option(key)} {value}"
        raise UserError(
            f"{typed} is out of place {'with' if vote else 'without'} --vote.",
            "Training is priced by records, batch and rounds; votes (--vote) by queries and sigma.",
            f"leave it out, or {'leave out' if vote else 'add'} --vote",
        )
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [_option(key) for key in needed if key not in given]:
        raise UserError(
            f"{', '.join(missing)}: not given.",
            f"The price of {'votes' if vote else 'training'} depends on {', '.join(map(_option, needed))}.",
            f"{'--vote ' if vote else ''}{kind.example}{'' if vote else ', or --vote for the price of votes'}",
        )
    noise = given.pop("sigma" if vote else "noise_multiplier", None)
    return account_schedule(kind(**given), noise_multiplier=noise, **terms)


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def account_schedule(
    schedule: Schedule | Votes, *, epsilon: float | None, noise_multiplier: float | None, delta: float, adjacency: str,
    accountant: str,
) -> dict[str, Any]:  # fmt: skip
    """The noise multiplier (of votes: sigma) for a budget, or the price of a noise multiplier.

    Raises:
        UserError: both or neither of epsilon and noise_multiplier, or a value that makes no sense.
    """
    _check_account(schedule.noise, epsilon, noise_multiplier, delta, adjacency, accountant)
    schedule.check(noise_multiplier, delta)
    relation: Adjacency = "replace" if adjacency == "replace" else "add-remove"
    terms: dict[str, Any] = {"adjacency": relation, "accountant": accountant}

    def events(z: float) -> Counter[DpEvent]:
        return schedule.events(z, relation)

    try:
        z = noise_multiplier if epsilon is None else calibrate(events, epsilon, delta, **terms)
    except UserError as error:
        raise schedule.used_up(error) from None
    assert z is not None
    found = price(events(z), delta, **terms)
    return {
        "noise_multiplier": z,
        "epsilon": json_number(found.epsilon),
        "delta": delta,
        "accountant": found.accountant,
        "adjacency": adjacency,
        **schedule.facts(z, relation),
    }


def _check_account(
    key: str, epsilon: float | None, noise: float | None, delta: float, adjacency: str, accountant: str
) -> None:
    if (epsilon is None) == (noise is None):
        given = "neither is given" if epsilon is None else f"{epsilon:g} and {noise:g} are both given"
        raise UserError(
            f"--epsilon and {key}: {given}.",
            "One is the question, the other the answer.",
            f"--epsilon 5, or {key} {'25' if key == Votes.noise else '1.0'}",
        )
    _check_known("--adjacency", adjacency, get_args(Adjacency))
    _check_known("--accountant", accountant, get_args(Accountant))
    _check_positive("--epsilon", 1.0 if epsilon is None else epsilon)
    _check_noise(key, noise)
    if adjacency == "replace" and accountant == "rdp":
        raise UserError(
            "--accountant rdp does not go with --adjacency replace.",
            "The Renyi accountant prices a replaced record like a removed one, which would be too little.",
            "--accountant pld",
        )
    if not 0 < delta < 1:
        raise UserError(f"--delta {delta:g} is not a probability.", "It must lie between 0 and 1.", "--delta 1e-4")


def _check_known(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = nearest(value, known) or known[0]
        raise UserError(f"{key} {value} is not known.", f"It must be one of: {', '.join(known)}.", f"{key} {near}")


def _check_positive(key: str, number: float) -> None:
    if not 0 < number < math.inf:
        raise UserError(f"{key} {number:g} makes no sense.", "It must be positive and finite.", f"{key} 1.0")


def _check_noise(key: str, number: float | None) -> None:
    if number is not None and not 0 <= number < math.inf:
        raise UserError(f"{key} {number:g} makes no sense.", "It must be finite, and not negative.", f"{key} 1")
