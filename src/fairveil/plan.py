"""The plan of a run: what will be sent, how often, with what noise, at what price. Nothing is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, get_args

from dp_accounting import DpEvent

from fairveil.algorithms.base import Algorithm
from fairveil.config import PrivacyConfig, RunConfig
from fairveil.data.federation import GRID_PER_DECADE, Federation, nominal_sizes
from fairveil.errors import UserError, nearest
from fairveil.models import Model
from fairveil.preparation import preparation_releases
from fairveil.privacy.accounting import (
    Accountant,
    Adjacency,
    Price,
    SelectionDpEvent,
    calibrate,
    calibrate_many,
    price,
)
from fairveil.privacy.gradients import check_record_gradients
from fairveil.privacy.ledger import FEDERATION, Ledger
from fairveil.privacy.mechanisms import Mechanism, NoisyTraining, canonical
from fairveil.privacy.statement import Statement, json_number, make_statement
from fairveil.session import Facts, Terms
from fairveil.store import UnitPlan

Releases = Mapping[Mechanism, int]
SIZES_PUBLIC = {
    "public": "exact, declared public in the config",
    "rounded": "declared, rounded down to a grid of 24 per decade",
}


@dataclass(frozen=True)
class Plan:
    """A run with its price: everything is known, nothing has been trained."""

    config: RunConfig
    algorithm: Algorithm[Any]
    federation: Federation
    model: Model
    facts: Facts
    units: tuple[UnitPlan, ...]

    @cached_property
    def terms(self) -> dict[int, Terms]:
        """The terms of every protected unit: of each client, or of the federation."""
        return {u.unit: Terms(self.facts, u.size, u.noise_multiplier) for u in self.units}

    @cached_property
    def releases(self) -> dict[int, Counter[Mechanism]]:
        """All that each unit will ever release."""
        return {unit: all_releases(self.algorithm, self.federation, terms) for unit, terms in self.terms.items()}

    @property
    def root(self) -> str:
        """Names this run among all others: the root of its noise."""
        return f"{self.config.seed} {self.config.digest()} {self.federation.fingerprint}"

    @property
    def protected(self) -> list[int]:
        """The units that have a ledger of their own: every client, or the federation."""
        return protected_units(self.algorithm, self.facts)

    @property
    def holders(self) -> int:
        """How many clients' releases tell of one protected unit."""
        return unit_holders(self.algorithm, self.federation)

    @property
    def price(self) -> Price:
        """The guarantee: the largest price over protected units."""
        worst = max(self.units, key=lambda unit: unit.epsilon)
        privacy = self.config.privacy
        return Price(worst.epsilon, privacy.delta, worst.accountant, privacy.adjacency)  # type: ignore[arg-type]

    def spent(self, ledger: Ledger) -> tuple[dict[int, Counter[Mechanism]], float]:
        """What has been posted, by unit, and the largest price of it over units."""
        by_name = {canonical(m): m for releases in self.releases.values() for m in releases}
        posted = {
            unit: Counter({by_name[what]: count for what, count in counts.items()})
            for unit, counts in ledger.posted().items()
        }
        prices = _prices(posted.values(), self.config.privacy, self.holders)
        return posted, max((found.epsilon for found in prices), default=0.0)

    def statement(
        self,
        posted: Mapping[int, Releases] | None = None,
        spent: float | None = None,
        *,
        complete: bool = False,
    ) -> Statement:
        """The guarantee, with what has been posted so far."""
        public = {
            "client sizes": SIZES_PUBLIC[self.config.data.sizes],
            "number and groups of clients, shape of a record, classes": "read from the data, taken as declared",
            **self.federation.public,
            "hyper-parameters and clip norm": "given in the config; tuning them on private data is not priced",
        }
        public |= self.algorithm.public | {f"answers of {k}": v for k, v in self.algorithm.public_tasks.items()}
        by_size = sorted(self.protected, key=lambda unit: self.terms[unit].size or 0)
        return make_statement(
            unit=self.algorithm.unit,
            record=self.federation.record,
            holders=self.federation.holders,
            price=self.price,
            spent=spent,
            planned=[self.releases[unit] for unit in by_size],
            posted=None if posted is None else [posted.get(unit, {}) for unit in by_size],
            trust=self.algorithm.trust,
            public=public,
            complete=complete,
        )

    def to_json(self) -> dict[str, Any]:
        """What will be sent, how often, with what noise, and what it costs."""
        noise = [u.noise_multiplier for u in self.units]
        return {
            "name": self.config.name,
            "algorithm": self.config.algorithm.name,
            "rounds": self.algorithm.rounds,
            "clients": len(self.facts.size),
            "parameters": self.facts.parameters,
            "epsilon": json_number(self.price.epsilon),
            "delta": self.price.delta,
            "noise_multiplier": {"smallest": min(noise), "largest": max(noise)},
            "units": [asdict(u) | {"epsilon": json_number(u.epsilon)} for u in self.units],
            "statement": self.statement().to_json(),
        }


def make_plan(config: RunConfig) -> Plan:
    """Load the data, price every declared release, and solve the noise. Trains nothing.

    Raises:
        UserError: whatever in the config cannot be run or promised.
    """
    algorithm, federation, model, facts = materials(config)
    _check_delta(config, algorithm, facts)
    clients = [Terms(facts, int(size), 0.0) for size in facts.size]
    terms = dict(enumerate(clients)) | {FEDERATION: Terms(facts, None, 0.0)}
    protected = protected_units(algorithm, facts)
    _check_scope(algorithm, terms, set(protected))
    privacy = config.privacy
    holders = unit_holders(algorithm, federation)

    def releases_at(unit: int, z: float) -> Counter[Mechanism]:
        return all_releases(algorithm, federation, replace(terms[unit], noise_multiplier=z))

    # units of one size need the same noise
    declared = {terms[unit].size: partial(releases_at, unit) for unit in protected}
    solved = _solve(declared, privacy, holders)
    noise = [solved[terms[unit].size] for unit in protected]
    releases = [releases_at(unit, z) for unit, z in zip(protected, noise, strict=True)]
    units = [
        UnitPlan(unit, terms[unit].size, z, found.epsilon, found.accountant)
        for unit, z, found in zip(protected, noise, _prices(releases, privacy, holders), strict=True)
    ]
    return Plan(config, algorithm, federation, model, facts, tuple(units))


def all_releases(algorithm: Algorithm[Any], federation: Federation, terms: Terms) -> Counter[Mechanism]:
    """All that one unit will ever release: before training, and in it."""
    whole = terms.size is None
    first = preparation_releases(federation.standardise, federation=whole)
    return first + algorithm.releases(terms)


def _solve(
    declared: Mapping[int | None, Callable[[float], Releases]], privacy: PrivacyConfig, holders: int
) -> dict[int | None, float]:
    """The noise multiplier for each size: as given, or the smallest within the budget."""
    if privacy.noise_multiplier is not None:
        return dict.fromkeys(declared, privacy.noise_multiplier)
    assert privacy.epsilon is not None

    def events_of(releases_at: Callable[[float], Releases]) -> Callable[[float], Counter[DpEvent]]:
        return lambda z: _events(releases_at(z), holders)

    requests = {size: events_of(releases_at) for size, releases_at in declared.items()}
    noisy = {size: events for size, events in requests.items() if events(1.0) != events(2.0)}
    found = calibrate_many(
        noisy.values(), privacy.epsilon, privacy.delta, adjacency=privacy.adjacency, accountant=privacy.accountant
    )
    return dict.fromkeys(declared, 0.0) | dict(zip(noisy, found, strict=True))  # releases nothing: no noise to solve


def protected_units(algorithm: Algorithm[Any], facts: Facts) -> list[int]:
    """Record level: one ledger for each client. Client level: one for the federation."""
    return facts.clients.tolist() if algorithm.unit == "record" else [FEDERATION]


def unit_holders(algorithm: Algorithm[Any], federation: Federation) -> int:
    """Record level: how many clients hold one original record; what they all release tells of it."""
    return federation.holders if algorithm.unit == "record" else 1


def materials(config: RunConfig) -> tuple[Algorithm[Any], Federation, Model, Facts]:
    """What a plan is made of, before anything is priced."""
    algorithm = config.build_algorithm()
    federation = config.build_federation()
    model = config.model_spec(federation).build()
    if algorithm.unit == "record":
        check_record_gradients(model)
    facts = Facts(
        size=nominal_sizes(federation.size, config.data.sizes),
        group=federation.group,
        features=federation.features,
        classes=federation.classes,
        parameters=model.parameters,
        clip_norm=config.privacy.clip_norm,
    )
    return algorithm, federation, model, facts


def _check_delta(config: RunConfig, algorithm: Algorithm[Any], facts: Facts) -> None:
    """Below 1/n for every client (record level), or for the number of clients."""
    delta = config.privacy.delta
    if algorithm.unit == "record":
        # A rounded size may stand for any up to the next on the grid.
        count = int(facts.size.max() * (1 if config.data.sizes == "public" else 10 ** (1 / GRID_PER_DECADE)))
        who = f"The largest client has {'' if config.data.sizes == 'public' else 'up to '}{count:,} records"
    else:
        count, who = len(facts.size), f"There are {len(facts.size):,} clients"
    if delta >= 1 / count:
        raise UserError(
            f"privacy.delta = {delta:g} is too large.",
            f"{who}; delta must stay below 1/n = {1 / count:.2g},\n"
            f"or whole {algorithm.unit}s could be published and still satisfy the guarantee.",
            f"privacy.delta = {10.0 ** math.floor(math.log10(0.5 / count)):.0e}",
        )


def _check_scope(algorithm: Algorithm[Any], terms: Mapping[int, Terms], protected: set[int]) -> None:
    """What an algorithm releases must be releases of the units it says it protects."""
    outside = next((t for unit, t in terms.items() if unit not in protected and algorithm.releases(t)), None)
    if outside is not None:
        raise TypeError(
            f"{type(algorithm).__name__} protects each {algorithm.unit} but declares releases of "
            f"{'the federation' if outside.size is None else 'single clients'}, which that price does not cover"
        )


def _prices(many: Iterable[Releases], privacy: PrivacyConfig, holders: int) -> list[Price]:
    """The price of each multiset, made by every holder; equal ones (clients of one size) are priced once."""
    known: dict[frozenset[tuple[DpEvent, int]], Price] = {}
    found = []
    for releases in many:
        events = _events(releases, holders)
        key = frozenset(events.items())
        if key not in known:
            known[key] = price(events, privacy.delta, adjacency=privacy.adjacency, accountant=privacy.accountant)
        found.append(known[key])
    return found


def _events(releases: Releases, holders: int = 1) -> Counter[DpEvent]:
    events: Counter[DpEvent] = Counter()
    for mechanism, count in releases.items():
        events[mechanism.event] += holders * count
    return events


# ---- without a config ------------------------------------------------------------------------------


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
        events = _events(+releases)
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
