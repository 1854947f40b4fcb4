"""The plan of a run: what will be sent, how often, with what noise, at what price. Nothing is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

from dp_accounting import DpEvent

from fairveil.algorithms.base import Algorithm, Unit
from fairveil.config import FairnessConfig, PrivacyConfig, RunConfig
from fairveil.data.federation import GRID_PER_DECADE, Federation, nominal_sizes
from fairveil.errors import UserError, nearest
from fairveil.models import Model
from fairveil.options import shown
from fairveil.preparation import preparation_releases
from fairveil.privacy.accounting import Price, calibrate_many, price
from fairveil.privacy.faithful import MedianClipped
from fairveil.privacy.gradients import path_of
from fairveil.privacy.ledger import FEDERATION, Ledger
from fairveil.privacy.mechanisms import Mechanism, Releases, Sharers, canonical, events_of, without_leaks
from fairveil.privacy.metric import GaussianBall, Sanitiser
from fairveil.privacy.statement import (
    PUBLISHED,
    SECURE_SUM,
    SHARED_DRAW,
    SHARED_NOISE,
    SHARED_SUM,
    NoiseSource,
    Statement,
    json_number,
    make_statement,
)
from fairveil.session import Facts, Terms
from fairveil.store import UnitPlan

SIZES_PUBLIC = {
    "public": "exact, declared public in the config",
    "rounded": "declared, rounded down to a grid of 24 per decade",
}
SIZES_ELSEWHERE = "declared by each client: rounded down to a grid of 24 per decade, or exact if its policy says so"


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

    @property
    def unit(self) -> Unit:
        """What is protected."""
        return self.facts.unit

    @property
    def pooled(self) -> bool:
        """Whether what is published are sums over all clients."""
        return is_pooled(self.algorithm, self.facts)

    @cached_property
    def releases(self) -> dict[int, Counter[Mechanism]]:
        """All that each unit will ever release."""
        return {unit: all_releases(self.algorithm, self.federation, terms) for unit, terms in self.terms.items()}

    @property
    def root(self) -> str:
        """Names this run among all others: the root of its noise.

        The same config with other code is another run: under the same noise their difference would show the records.
        """
        unsent = {"fairness": FairnessConfig(), "finetune": None}  # how it is judged, and used, changes no release
        trained = self.config.model_copy(update=unsent)
        return f"{self.config.seed} {trained.digest()} {self.federation.fingerprint} {self.code}"

    @cached_property
    def code(self) -> str:
        """What `RunConfig.code` was when the run was planned: later edits do not change a run under way."""
        return self.config.code()

    @property
    def note(self) -> str | None:
        """What the user may want to know beforehand: that the model will be slow, and why; that clusters may hide."""
        notes = [self.algorithm.caution(sorted(self.terms.values(), key=lambda terms: terms.size or 0))]
        obstacle = path_of(self.model).obstacle if self.unit == "record" and not self.pooled else None
        if obstacle:
            notes.append(
                "Per-record gradients of this model go through torch.func.vmap, the slower way: there is no "
                f"rule for {obstacle}."
            )
        return " ".join(note for note in notes if note) or None

    @property
    def settled(self) -> dict[str, Any]:
        """The hyper-parameters that the config left to the planner."""
        given = self.config.build_algorithm().model_dump()
        return {key: value for key, value in self.algorithm.model_dump().items() if value != given[key]}

    @property
    def protected(self) -> list[int]:
        """The units that have a ledger of their own: every client, or the federation."""
        return protected_units(self.algorithm, self.facts)

    @property
    def holders(self) -> int:
        """How many clients' releases tell of one protected unit."""
        return unit_holders(self.algorithm, self.federation, self.facts)

    @property
    def price(self) -> Price:
        """The guarantee: the largest price over protected units."""
        worst = max(self.units, key=lambda unit: unit.epsilon)
        privacy = self.config.privacy
        delta = 0.0 if worst.accountant == "sum" else privacy.delta
        return Price(worst.epsilon, delta, worst.accountant, privacy.adjacency)  # type: ignore[arg-type]

    def spent(self, ledger: Ledger) -> tuple[dict[int, Counter[Mechanism]], float]:
        """What has been posted, by unit, and the largest price of it over units."""
        by_name = {canonical(m): m for releases in self.releases.values() for m in releases}
        posted = {
            unit: Counter({by_name[what]: count for what, count in counts.items()})
            for unit, counts in ledger.posted().items()
        }
        prices = _prices(self.by_record(posted), self.config.privacy, self.holders)
        return posted, max((found.epsilon for found in prices), default=0.0)

    def by_record(self, posted: Mapping[int, Counter[Any]]) -> list[Counter[Any]]:
        """What each unit's holders have posted, as a bound for one holder: where clients overlap, the most of any."""
        if self.holders == 1:
            return list(posted.values())
        return [reduce(or_, posted.values(), Counter())]

    def statement(
        self,
        posted: Mapping[int, Releases] | None = None,
        spent: float | None = None,
        *,
        complete: bool = False,
    ) -> Statement:
        """The guarantee, with what has been posted so far."""
        elsewhere = self.federation.elsewhere
        public = {
            "client sizes": SIZES_ELSEWHERE if elsewhere else SIZES_PUBLIC[self.config.data.sizes],
            "number and groups of clients, shape of a record, classes": "declared by the clients"
            if elsewhere
            else "read from the data, taken as declared",
            "who holds which record, and which are for testing": "the guarantee is for training records, given these",
            **self.federation.public,
            "hyper-parameters and clip norm": "given in the config; tuning them on private data is not priced",
        }
        public |= self.algorithm.public | {f"answers of {k}": v for k, v in self.algorithm.public_tasks.items()}
        by_size = sorted(self.protected, key=lambda unit: self.terms[unit].size or 0)
        noised = [without_leaks(releases) for releases in self.releases.values()]
        told = any(noised) and not _unpriced(self.algorithm, self.terms.values())
        prices = _prices(noised, self.config.privacy, self.holders) if told else []
        return make_statement(
            unit=self.unit,
            pooled=self.pooled,
            record=self.federation.record,
            holders=self.federation.holders,
            price=self.price,
            noised=max((found.epsilon for found in prices), default=math.inf),
            spent=spent,
            planned=[self.releases[unit] for unit in by_size],
            posted=None if posted is None else [posted.get(unit, {}) for unit in by_size],
            trust=self._trust(),
            noise=self._added_by() if elsewhere else self.config.privacy.noise,
            public=public,
            reference=self.config.fairness.reference is not None,
            complete=complete,
            elsewhere=elsewhere,
            finetuned=self.config.finetune is not None,
        )

    @property
    def _sharers(self) -> Sharers | None:
        """The clients that make the noise of a sum together; None: it is not made so."""
        found = (getattr(mechanism, "noised_by", None) for each in self.releases.values() for mechanism in each)
        return next((sharers for sharers in found if sharers is not None), None)

    def _trust(self) -> str:
        secure = self.config.privacy.trust == "secure-sum"
        if _seen_whole(self.releases.values()):
            return PUBLISHED
        if self._sharers is None:
            return SECURE_SUM if secure else self.algorithm.trust
        drawn = any(getattr(mechanism, "sample_rate", 1.0) < 1 for each in self.releases.values() for mechanism in each)
        words = {"sum": SHARED_SUM[secure], "draw": SHARED_DRAW if drawn else ""}
        return SHARED_NOISE.format(clients=self._sharers.clients, tolerated=self._sharers.tolerated, **words)

    def _added_by(self) -> NoiseSource:
        """Whose randomness the noise is, where clients are on machines of their own."""
        return "server" if self.pooled and self._sharers is None else "clients"

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
            "settled": self.settled,
            "statement": self.statement().to_json(),
            "note": self.note,
        }


def make_plan(config: RunConfig) -> Plan:
    """Load the data, price every declared release, and solve the noise. Trains nothing.

    Raises:
        UserError: whatever in the config cannot be run or promised.
    """
    algorithm, federation, model, facts = materials(config)
    _check_delta(config, algorithm, federation, facts)
    _check_metric(config, algorithm, federation, facts)
    clients = [Terms(facts, int(size), 0.0) for size in facts.size]
    terms = dict(enumerate(clients)) | {FEDERATION: Terms(facts, None, 0.0)}
    protected = protected_units(algorithm, facts)
    _check_scope(algorithm, terms, set(protected))
    privacy = config.privacy
    holders = unit_holders(algorithm, federation, facts)

    def releases_at(unit: int, z: float) -> Counter[Mechanism]:
        return all_releases(algorithm, federation, replace(terms[unit], noise_multiplier=z))

    # units of one size need the same noise
    declared = {terms[unit].size: partial(releases_at, unit) for unit in protected}
    solved = _solve(declared, privacy, holders)
    noise = [solved[terms[unit].size] for unit in protected]
    releases = [releases_at(unit, z) for unit, z in zip(protected, noise, strict=True)]
    prices = _prices(releases, privacy, holders)
    noised = [without_leaks(each) for each in releases]
    if privacy.epsilon is not None and _unpriced(algorithm, terms.values()):
        raise UserError(
            f"privacy.epsilon = {privacy.epsilon:g} cannot be met.",
            f"Nothing that {config.algorithm.name} would send has a price, so that no noise can be solved for.\n"
            "Nothing was run.",
            "privacy.noise_multiplier = 1.0 instead of epsilon, or leave out algorithm.faithful",
        )
    if privacy.trust == "secure-sum" and _seen_whole(releases):
        raise UserError(
            'privacy.trust = "secure-sum" does not go with algorithm.faithful.',
            "The published form clips what clients have sent when it has seen all of it, which no sum in secret can.\n"
            "Nothing was run.",
            'privacy.trust = "server", or leave out algorithm.faithful',
        )
    _check_budget(privacy, max(found.epsilon for found in _prices(noised, privacy, holders)))
    if any(getattr(m, "adjacency", privacy.adjacency) != privacy.adjacency for each in releases for m in each):
        raise TypeError(f"{type(algorithm).__name__} noises for another relation between neighbours than is priced")
    units = [
        UnitPlan(unit, terms[unit].size, z, found.epsilon, found.accountant)
        for unit, z, found in zip(protected, noise, prices, strict=True)
    ]
    return Plan(config, algorithm, federation, model, facts, tuple(units))


def _seen_whole(releases: Iterable[Releases]) -> bool:
    """Whether a sum is clipped by what all have sent, so that whoever adds up sees each update as it is."""
    return any(isinstance(mechanism, MedianClipped) for each in releases for mechanism in each)


def _unpriced(algorithm: Algorithm[Any], terms: Iterable[Terms]) -> bool:
    """Whether the training sends something, of which nothing has a price: what is sent before it is no help."""
    sent = [algorithm.releases(each) for each in terms]
    return any(sent) and not any(map(without_leaks, sent))


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

    def events_at(releases_at: Callable[[float], Releases]) -> Callable[[float], Counter[DpEvent]]:
        return lambda z: events_of(without_leaks(releases_at(z)), holders)

    requests = {size: events_at(releases_at) for size, releases_at in declared.items()}
    noisy = {size: events for size, events in requests.items() if events(1.0) != events(2.0)}
    found = calibrate_many(
        noisy.values(), privacy.epsilon, privacy.delta, adjacency=privacy.adjacency, accountant=privacy.accountant
    )
    return dict.fromkeys(declared, 0.0) | dict(zip(noisy, found, strict=True))  # releases nothing: no noise to solve


def protected_units(algorithm: Algorithm[Any], facts: Facts) -> list[int]:
    """Of sums over clients: one ledger, the federation's. Otherwise one for each client."""
    return [FEDERATION] if is_pooled(algorithm, facts) else facts.clients.tolist()


def is_pooled(algorithm: Algorithm[Any], facts: Facts) -> bool:
    """Whether what is published are sums over all clients."""
    return facts.unit == "client" or algorithm.pooled


def unit_holders(algorithm: Algorithm[Any], federation: Federation, facts: Facts) -> int:
    """Record level: how many clients hold one original record; what they all release tells of it."""
    return federation.holders if facts.unit == "record" and not is_pooled(algorithm, facts) else 1


def materials(
    config: RunConfig, settled: Mapping[str, Any] | None = None
) -> tuple[Algorithm[Any], Federation, Model, Facts]:
    """What a plan is made of, before anything is priced.

    Args:
        settled: what was left to the planner, as an earlier plan has it; None: it is settled now.
    """
    algorithm = config.build_algorithm()
    federation = config.build_federation()
    _check_fairness(config, algorithm, federation)
    _check_public(config, algorithm, federation)
    model = config.model_spec(federation).build()
    if config.fairness.explain:
        model.check_hessian()
    if config.unit == "record" and not algorithm.pooled:
        path_of(model)  # refuses what has no per-record gradients
    facts = Facts(
        size=nominal_sizes(federation.size, config.data.sizes),
        group=federation.group,
        features=federation.features,
        classes=federation.classes,
        parameters=model.parameters,
        clip_norm=config.privacy.clip_norm,
        adjacency=config.privacy.adjacency,
        unit=config.unit,
        public=0 if federation.server is None else len(federation.server.x),
        several=federation.several,
    )

    def noise(variant: Algorithm[Any], size: int) -> float:
        def releases_at(z: float) -> Counter[Mechanism]:
            return all_releases(variant, federation, Terms(facts, size, z))

        return _solve({size: releases_at}, config.privacy, unit_holders(variant, federation, facts))[size]

    found = algorithm.settled(facts, noise) if settled is None else algorithm.model_copy(update=settled)
    return found, federation, model, facts


def _check_fairness(config: RunConfig, algorithm: Algorithm[Any], federation: Federation) -> None:
    """What the run is to be judged by must be there."""
    if config.fairness.explain and type(algorithm).next_round is Algorithm.next_round:
        raise UserError(
            f"fairness.explain = true makes no sense with {config.algorithm.name}.",
            "It needs a client-level algorithm with one model, whose step is a mean of updates that clients have "
            "clipped. Nothing was run.",
            'leave out fairness.explain, or algorithm.name = "fedavg"',
        )
    if config.fairness.explain and getattr(algorithm, "faithful", False):
        raise UserError(
            "fairness.explain = true does not go with algorithm.faithful.",
            "The published form clips when it has seen all: there is no share of a client to be explained. "
            "Nothing was run.",
            "leave out algorithm.faithful, or fairness.explain",
        )
    groups, positive = config.fairness.groups, config.fairness.positive
    known = ["cluster", *federation.attributes]
    if groups not in known:
        raise UserError(
            f"fairness.groups = {shown(groups)} is not an attribute of {federation.name}.",
            f"There are: {', '.join(known)}. A file names its own in data.options.sensitive. Nothing was run.",
            f"fairness.groups = {shown(nearest(groups, known) or 'cluster')}",
        )
    if positive is not None and federation.several:
        raise UserError(
            f"fairness.positive = {positive} makes no sense for {federation.name}.",
            "Its records may have several classes at once, and what is taken for what is not counted. Nothing was run.",
            "leave out fairness.positive",
        )
    classes = 2 if federation.decided else federation.classes
    if positive is not None and positive >= classes:
        raise UserError(
            f"fairness.positive = {positive} is not a class of {federation.name}.",
            f"It has {classes} classes, numbered from 0. Nothing was run."
            if classes
            else "It is a regression, and has none. Nothing was run.",
            "fairness.positive = 1, or leave it out" if classes else "leave out fairness.positive",
        )


def _check_public(config: RunConfig, algorithm: Algorithm[Any], federation: Federation) -> None:
    """Whether there are the public records that the algorithm needs, and sums that have a price."""
    if algorithm.needs_public and federation.server is None:
        raise UserError(
            "data.server is missing.",
            f"{config.algorithm.name} asks the clients about public records that the server holds. Nothing was run.",
            '[data.server] with dataset = "usps", say; or rows = "test" of the same dataset (docs/voting.md)',
        )
    if config.unit == "record" and algorithm.pooled and federation.holders > 1:
        raise UserError(
            f'privacy.unit = "record" does not go with {config.algorithm.name} where clients overlap.',
            f"A record that {federation.holders} clients hold moves the votes of all of them, which has no price\n"
            "here. Nothing was run.",
            'data.split.overlap = false, or privacy.unit = "client"',
        )


def _check_budget(privacy: PrivacyConfig, epsilon: float) -> None:
    """What does not depend on the noise that is solved for may cost more than there is."""
    if privacy.epsilon is not None and epsilon > privacy.epsilon:
        raise UserError(
            f"privacy.epsilon = {privacy.epsilon:g} is less than what is released costs: {epsilon:.3f}.",
            "More noise in training would not help: column statistics and private choices have a noise of their own.",
            "a larger data.options.statistics_noise, a smaller algorithm.select_epsilon, or a larger privacy.epsilon",
        )


def _check_delta(config: RunConfig, algorithm: Algorithm[Any], federation: Federation, facts: Facts) -> None:
    """Below 1/n for every client (record level), or for the number of clients."""
    delta = config.privacy.delta
    if facts.unit == "record" and federation.originals is not None and federation.holders > 1:
        count, who = federation.originals, f"Overlapping clients hold {federation.originals:,} different records"
    elif facts.unit == "record":
        # A rounded size may stand for any up to the next on the grid. Clients elsewhere round by their own policies.
        exact = config.data.sizes == "public" and not federation.elsewhere
        whose, held = "The largest client has", facts.size.max()
        if algorithm.pooled:
            whose, held = "All clients together have", facts.size.sum()
        count = int(held * (1 if exact else 10 ** (1 / GRID_PER_DECADE)))
        who = f"{whose} {'' if exact else 'up to '}{count:,} records"
    else:
        count, who = len(facts.size), f"There are {len(facts.size):,} clients"
    if facts.unit == "metric" and not delta:
        return  # whether one is needed, the price of what is released will say
    if delta >= 1 / count:
        raise UserError(
            f"privacy.delta = {delta:g} is too large.",
            f"{who}; delta must stay below 1/n = {1 / count:.2g},\n"
            f"or whole {'records' if facts.unit == 'record' else 'clients'} could be published and still satisfy "
            "the guarantee.",
            f"privacy.delta = {_below(count)}",
        )


def _below(count: int) -> str:
    """A power of ten below 1/count."""
    return f"{10.0 ** math.floor(math.log10(0.9 / count)):.0e}"


def _check_metric(config: RunConfig, algorithm: Algorithm[Any], federation: Federation, facts: Facts) -> None:
    """What does not go with metric privacy; and local models go with nothing else."""
    released = algorithm.releases(Terms(facts, int(facts.size[0]), 0.0))
    if any(isinstance(mechanism, Sanitiser) != (algorithm.unit == "metric") for mechanism in released):
        raise TypeError(f"{type(algorithm).__name__}: local models are for the unit metric, and for no other unit")
    if algorithm.unit != "metric":
        return
    if not config.privacy.delta and any(isinstance(mechanism, GaussianBall) for mechanism in released):
        raise UserError(
            "privacy.delta is missing.",
            f'With algorithm.noise = "gaussian" what {config.algorithm.name} guarantees may fail with this chance.\n'
            "Nothing was run.",
            f'privacy.delta = {_below(len(facts.size))}, or algorithm.noise = "laplace"',
        )
    if config.privacy.adjacency != "add-remove":
        raise UserError(
            f"privacy.adjacency = {shown(config.privacy.adjacency)} makes no sense with {config.algorithm.name}.",
            "Metric privacy compares local models by their distance; it knows no other neighbours.",
            "leave out privacy.adjacency",
        )
    if federation.standardise is not None:
        raise UserError(
            f"the features of {federation.name} are to be standardised by statistics of its records.",
            f"These have a price for each record, which does not add up with that of {config.algorithm.name}.\n"
            "Nothing was run.",
            "ranges of the columns that are known beforehand (docs/data.md)",
        )


def _check_scope(algorithm: Algorithm[Any], terms: Mapping[int, Terms], protected: set[int]) -> None:
    """What an algorithm releases must be releases of the units it says it protects."""
    outside = next((t for unit, t in terms.items() if unit not in protected and algorithm.releases(t)), None)
    if outside is not None:
        raise TypeError(
            f"{type(algorithm).__name__} {'sums over clients' if outside.size else 'has no sums'} but declares "
            f"releases of {'the federation' if outside.size is None else 'single clients'}, which that does not cover"
        )


def _prices(many: Iterable[Releases], privacy: PrivacyConfig, holders: int) -> list[Price]:
    """The price of each multiset, made by every holder; equal ones (clients of one size) are priced once."""
    known: dict[frozenset[tuple[DpEvent, int]], Price] = {}
    found = []
    for releases in many:
        events = events_of(releases, holders)
        key = frozenset(events.items())
        if key not in known:
            known[key] = price(events, privacy.delta, adjacency=privacy.adjacency, accountant=privacy.accountant)
        found.append(known[key])
    return found
