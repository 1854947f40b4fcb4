"""The guarantee, in words and as JSON. It is derived from the plan and the ledger, never from intentions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any, Literal

from fairveil.privacy.accounting import Price
from fairveil.privacy.mechanisms import Mechanism, without_leaks
from fairveil.privacy.metric import Ball, GaussianBall, Sanitiser

NoiseSource = Literal["reproducible", "secret", "clients", "server"]
NOISE_SOURCES: Mapping[NoiseSource, str] = {
    "reproducible": (
        "reproducible, derived from the run's seed, config and code and from the fingerprint of the data (in "
        "run.sqlite): right for a simulation, but whoever knows these can remove the noise"
    ),
    "secret": (
        "secret, derived from a random key of 256 bits in the run folder (secret.key): whoever has that file can "
        "remove the noise, so delete it when the run is finished; nobody can then repeat the run"
    ),
    "clients": (
        "secret: each client derives its own from a random key of 256 bits that never leaves its machine (secret.key "
        "in its folder), and the server adds none. Whoever has a client's key can remove that client's noise, so it is "
        "to be kept as its records are"
    ),
    "server": (
        "secret: the server derives the noise of the sums, and who is drawn, from a random key of 256 bits in the run "
        "folder (secret.key): whoever has that file can remove the noise, so delete it when the run is finished"
    ),
}
PUBLISHED = (
    "the server: every client that is drawn sends it an update without bound or noise; how these are clipped, and how "
    "much noise there is, follows what they are"
)
NOT_COVERED = (
    "other runs on the same records, whose prices add up; people who own several records; and the run folder apart "
    "from the models: its metrics are computed without noise, and it holds the clients' checkpoints, who took part "
    "when, and the fingerprint of the data. Keep it as you keep the data. Error messages may quote a record"
)
REFERENCE = (
    ". Reference models are trained without privacy on the pooled records of each group, for evaluation only: they are "
    "not kept, but their scores are in the run folder and in the cache of numbers"
)
PERSONAL = (
    "after the last round each client fine-tunes the model that serves it on its own records, for itself. That sends "
    "nothing and costs nothing, but it has no noise. So the guarantee of the whole is a joint one: whoever does not "
    "hold a record learns no more of it than is guaranteed above (those apart who are trusted with more), even all "
    "other clients together with all their personal models. A personal model shows the records of its owner, who "
    "alone may see it and its answers: handing it on, exporting it or answering others by it is a release that has "
    "no price here"
)
ELSEWHERE: Mapping[str, str] = {  # by whether clients add the noise themselves
    "record": (
        "other runs on the same records, whose prices add up (each client keeps account of those it took part in); "
        "people who own several records, and records that several clients hold; what a client declares of itself "
        "(name, group, size, kind of records); whether and how fast it answers; and what stays on its machine: "
        "records, key, ledger, models, and its scores, which are computed without noise and are not sent"
    ),
    "client": (
        "other runs with the same clients, whose prices add up (each client keeps account of those it took part in); "
        "people {people}; what a client declares of itself (name, group, size, kind of records); {shows}, which "
        "whoever sees the traffic between clients and server can tell; and what stays on a client's machine: records, "
        "ledger, models, and its scores, which are computed without noise and are not sent"
    ),
}
PEOPLE: Mapping[str, str] = {  # by what is protected
    "record": "who own several records, or whose records several clients hold",
    "client": "whose records several clients hold",
}
SHOWS: Mapping[bool, str] = {  # by whether the server draws who is asked
    True: "who is drawn when",
    False: "whether and how fast it answers",
}
SECURE_SUM = (
    "the server, with the exact sum of what clients contribute within bounds, to which it adds the noise, and with the "
    "secrecy of who took part. That it learns no single contribution takes a secure sum, which was only SIMULATED: the "
    "process of this run saw every contribution"
)
SHARED_NOISE = (
    "clients, to add their shares of the noise: up to {tolerated} of the {clients} may drop out, or conspire and tell "
    "each other theirs, and the noise of the sum is still what was priced. One share alone hides next to nothing. "
    "{sum}{draw}"
)
SHARED_SUM: Mapping[bool, str] = {  # by whether a secure sum is meant
    False: "So the server is trusted too: it sees what every single client sends, and adds it up",
    True: (
        "That nobody sees what a single client sends takes a secure sum, which was only SIMULATED: the process of this "
        "run saw every contribution"
    ),
}
SHARED_DRAW = (
    ". Who takes part in a round is each client's own secret coin; the price holds from those who do not know it"
)
OVERLAP = ". Clients overlap: up to {} of them hold one and the same record, which is not protected as a whole"


@dataclass(frozen=True)
class ReleaseKind:
    """One kind of release: how often one unit makes it, planned and posted, over all units."""

    kind: str
    what: str  # one application in words; for the smallest and the largest unit where they differ
    planned_per_unit: tuple[int, int]  # fewest and most over units
    posted_per_unit: tuple[int, int] | None  # None in a plan
    mixed: bool = False  # whether it is not the same each time


VACUOUS = 20.0  # an epsilon from which on the number alone protects nobody: odds may grow 485 million times


@dataclass(frozen=True)
class MetricTerms:
    """What metric privacy promises, in numbers (see `fairveil.privacy.metric`)."""

    law: Literal["laplace", "gaussian", "step"]  # of the noise; "step": in proportion to the client's own step
    parameters: int  # n
    radius: float | None  # r; None: steps are not clipped
    spread: float | None  # the most that two hypotheses lie apart, 0 if there is one; None: any distance
    noise_multiplier: float  # nu
    participations: int  # the most that a client may take part

    @classmethod
    def of(cls, planned: Mapping[Mechanism, int]) -> MetricTerms | None:
        """The terms of what a client will release; None: nothing of it is under metric privacy.

        Raises:
            TypeError: it releases local models in several ways, for which there are no words.
        """
        found = [(mechanism, count) for mechanism, count in planned.items() if isinstance(mechanism, Sanitiser)]
        if not found:
            return None
        if len(found) > 1:
            raise TypeError(f"a client's local models are released in {len(found)} ways: one is what can be stated")
        ((mechanism, count),) = found
        radius = spread = None
        if isinstance(mechanism, Ball):
            radius, spread = (value if math.isfinite(value) else None for value in (mechanism.radius, mechanism.spread))
        law: Literal["laplace", "gaussian", "step"] = "step"
        if isinstance(mechanism, Ball):
            law = "gaussian" if isinstance(mechanism, GaussianBall) else "laplace"
        return cls(law, mechanism.dimension, radius, spread, mechanism.noise_multiplier, count)

    @property
    def farthest(self) -> float:
        """The largest distance of two local models; of one hypothesis, where these may be any distance apart."""
        return 2 * (self.radius or math.inf) + (self.spread or 0.0)

    @property
    def at_radius(self) -> float:
        """Epsilon at the distance r, over all participations: what Galli et al. count, in "step" as well."""
        return self.participations * (self.parameters / self.noise_multiplier if self.noise_multiplier else math.inf)

    @property
    def chosen_freely(self) -> bool:
        """Whether the bound holds whatever a client chooses."""
        return self.spread is not None

    def guarantee(self, epsilon: float, delta: float) -> str:
        """In the words of the field."""
        if not self.noise_multiplier:
            return "NONE (epsilon is infinite): local models are sent without noise"
        if self.radius is None:
            each, in_all = self.at_radius / self.participations, self.at_radius
            return (
                "NONE (epsilon is infinite): each client's noise is in proportion to the secret length of its own "
                f"step, which it gives away. Galli et al. (2023) count n/nu = {each:g} each time a client takes part, "
                f"at most {in_all:g} in all; that is not proved, and not a guarantee"
            )
        whom = "any two sets of records that it may hold"
        if not self.chosen_freely:
            whom += ", in every outcome in which both would have chosen the same hypotheses"
        found = (
            f"what a client sends is ({rounded_up(epsilon)}, {delta!r})-indistinguishable for {whom}: their local "
            f"models, as clipped, are at most {self.farthest:g} apart each time"
        )
        if self.law == "laplace":
            found += (
                f". It is metric privacy: epsilon {rounded_up(self.at_radius / self.radius)} for each unit of "
                f"Euclidean distance between local models, {rounded_up(self.at_radius)} at the distance {self.radius:g}"
            )
        if self.chosen_freely:
            found += ". That is local differential privacy for one client with all its records, replaced by any others"
        return found

    def in_plain_words(self, epsilon: float) -> list[tuple[str, str]]:
        """What is promised and what is not, for whoever has to answer for the data."""
        if math.isinf(epsilon):
            return []
        among = (
            "whatever its records are" if self.chosen_freely else "among all records that lead it to the same models"
        )
        promised = (
            "a client adds noise to its model before sending it. The more alike two models are, the less can be told "
            f"from what was sent which of them the client had; and {among}, the odds of any guess about them grow at "
            f"most e^epsilon times{', but for a chance of delta' if self.law == 'gaussian' else ''}"
        )
        if epsilon > VACUOUS:
            promised += (
                f". But e^{rounded_up(epsilon)} is so large that this number alone protects nobody: it grows with the "
                f"number of parameters ({self.parameters:,}) and of participations ({self.participations})"
            )
        if self.chosen_freely:
            return [("Promised", promised), ("Not promised", MORE_FOR_ONE)]
        return [("Promised", promised), ("Not promised", f"{NOTHING_FOR_ONE}. {CHOICE}")]


MORE_FOR_ONE = "more for a single record or patient than for all of a client's together: no better bound is proved"
NOTHING_FOR_ONE = "anything for single records or patients: no number here says how well one of them is hidden"
CHOICE = (
    "Which of the offered models a client takes, and so to which kind of clients it belongs, is not protected: models "
    "may be far apart, and what it sends shows from which it came. A record that tips the choice can be told from one "
    "that does not, and a server that picks the models on purpose can ask about one in every round"
)


@dataclass(frozen=True)
class Statement:
    """Everything a data officer has to know about what was guaranteed."""

    unit: Literal["record", "client", "metric"]
    record: str  # what one record is
    holders: int  # the most clients that hold one and the same record
    units: int  # how many ledgers: clients, or 1 for the federation
    adjacency: str
    epsilon: float  # the plan's, the largest over units: what is guaranteed
    epsilon_without_leaks: float  # the same, but for what is sent without noise
    leaks: tuple[str, ...]  # kinds of release that have no noise
    epsilon_spent: float | None  # by what was posted, the largest over units; None in a plan
    delta: float
    accountant: str
    accountant_version: str
    trust: str
    releases: tuple[ReleaseKind, ...]
    public: Mapping[str, str]  # what was taken as public, and why
    noise_source: str
    not_covered: str
    complete: bool  # whether all rounds are done
    metric: MetricTerms | None = None  # of metric privacy
    pooled: bool = False  # whether what is published are sums over all clients
    finetuned: bool = False  # whether clients fine-tune their models at the end, each for itself

    def lines(self) -> list[tuple[str, str]]:
        """The guarantee and all that it rests on, as (heading, text)."""
        public = "; ".join(f"{what} ({why})" for what, why in self.public.items())
        return [
            ("Guarantee", self._guarantee()),
            *([] if self.metric is None else self.metric.in_plain_words(self.epsilon)),
            ("A record is", self.record),
            ("Trusted", self.trust),
            ("Sent", self._sent()),
            *([("Personal models", PERSONAL)] if self.finetuned else []),
            ("Public", public),
            ("Noise", self.noise_source),
            ("Not covered", self.not_covered),
        ]

    def sentence(self) -> str:
        """The same in one paragraph."""
        (_, guarantee), *rest = self.lines()
        return " ".join([f"{guarantee}.", *(f"{heading}: {text}." for heading, text in rest)])

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite epsilon is the string "infinity"."""
        plain = asdict(self)
        plain["epsilon"] = json_number(self.epsilon)
        plain["epsilon_without_leaks"] = json_number(self.epsilon_without_leaks)
        plain["epsilon_spent"] = None if self.epsilon_spent is None else json_number(self.epsilon_spent)
        return plain | {"sentence": self.sentence()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Statement:
        """What `to_json` wrote."""
        values = {f.name: plain[f.name] for f in fields(cls) if f.name not in ("metric", "pooled", "finetuned")}
        values["pooled"] = plain.get("pooled", plain["unit"] == "client")
        values["finetuned"] = plain.get("finetuned", False)
        values["metric"] = MetricTerms(**metric) if (metric := plain.get("metric")) else None
        for key in ("epsilon", "epsilon_without_leaks", "epsilon_spent"):
            values[key] = None if values[key] is None else float(values[key])  # float("infinity") is infinite
        kinds: list[dict[str, Any]] = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in release.items()} for release in values["releases"]
        ]
        values |= {"releases": tuple(ReleaseKind(**kind) for kind in kinds), "leaks": tuple(values["leaks"])}
        return cls(**values)

    def _guarantee(self) -> str:
        if self.metric is not None:
            return self.metric.guarantee(self.epsilon, self.delta)
        if math.isinf(self.epsilon):
            none = "NONE (epsilon is infinite): something is sent without noise that would hide it"
            if math.isinf(self.epsilon_without_leaks):
                return none
            what = " and ".join(self.leaks)
            return f"{none}; but for the {what} it would be ({rounded_up(self.epsilon_without_leaks)}, {self.delta!r})"
        if self.unit == "client":
            seen, whom = "what is published of the training", "one client with all its records"
        elif self.holders == 1 and self.pooled:
            seen, whom = "what is published of the training", "one record of any client"
        elif self.holders == 1:
            seen, whom = "what a client sends", "one record of that client"
        else:
            seen = "what is published of the training" if self.pooled else "what all clients send together"
            whom = f"one original record wherever it is held (clients overlap: up to {self.holders} hold one record)"
        change = {"add-remove": "adding or removing", "replace": "replacing"}[self.adjacency]
        return (
            f"{seen} is ({rounded_up(self.epsilon)}, {self.delta!r})-differentially private for {change} {whom} "
            f"({self.accountant.upper()} accountant of dp-accounting {self.accountant_version})"
        )

    def _sent(self) -> str:
        by = "by the federation" if self.pooled else "by each client"
        parts = []
        for release in self.releases:
            fewest, most = release.planned_per_unit
            count = str(most) if fewest == most else f"{fewest} to {most}"
            each = "" if release.mixed else ", each"
            parts.append(f"{release.kind} {by}, {'once' if count == '1' else f'{count} times{each}'}: {release.what}")
        return "; ".join(parts) or "nothing"


def make_statement(
    *,
    unit: Literal["record", "client", "metric"],
    record: str,
    holders: int,
    price: Price,
    noised: float,
    spent: float | None,
    planned: Sequence[Mapping[Mechanism, int]],
    posted: Sequence[Mapping[Mechanism, int]] | None,
    trust: str,
    public: Mapping[str, str],
    noise: NoiseSource,
    reference: bool,
    complete: bool,
    pooled: bool,
    elsewhere: bool = False,
    finetuned: bool = False,
) -> Statement:
    """The statement of a run.

    Args:
        record, holders: as in Federation.
        price: of the plan, the largest over units.
        noised: epsilon of all that has noise, the largest over units.
        spent: epsilon of what was posted, the largest over units; None before anything could be.
        planned, posted: by unit, in the same order, the smallest unit first.
        reference: whether models are trained without privacy, for evaluation.
        pooled: whether what is published are sums over all clients.
        elsewhere: whether clients are on machines of their own.
        finetuned: whether clients fine-tune their models at the end, each for itself.
    """
    kinds = sorted({mechanism.kind for releases in planned for mechanism in releases})
    metric = MetricTerms.of(planned[0])  # all clients have the same
    return Statement(
        unit=unit,
        record=record,
        holders=holders,
        units=len(planned),
        adjacency=price.adjacency if metric is None else "replace",
        epsilon=price.epsilon,
        epsilon_without_leaks=noised,
        leaks=tuple(sorted({m.kind for releases in planned for m in releases.keys() - without_leaks(releases).keys()})),
        epsilon_spent=spent,
        delta=price.delta,
        accountant=price.accountant,
        accountant_version=version("dp-accounting"),
        trust=trust,
        releases=tuple(_kind(kind, planned, posted) for kind in kinds),
        public=dict(public),
        noise_source=NOISE_SOURCES[noise],
        not_covered=(_not_covered_elsewhere(unit, pooled, planned) if elsewhere else NOT_COVERED)
        + (REFERENCE if reference else "")
        + (OVERLAP.format(holders) if unit != "record" and holders > 1 else ""),
        complete=complete,
        metric=metric,
        pooled=pooled,
        finetuned=finetuned,
    )


def _not_covered_elsewhere(
    unit: Literal["record", "client", "metric"], pooled: bool, planned: Sequence[Mapping[Mechanism, int]]
) -> str:
    if not pooled:
        return ELSEWHERE["record"]
    drawn = any(getattr(mechanism, "asked", 1.0) < 1 for releases in planned for mechanism in releases)
    people = PEOPLE["record" if unit == "record" else "client"]
    return ELSEWHERE["client"].format(people=people, shows=SHOWS[drawn])


def _kind(
    kind: str, planned: Sequence[Mapping[Mechanism, int]], posted: Sequence[Mapping[Mechanism, int]] | None
) -> ReleaseKind:
    def counts(by_unit: Sequence[Mapping[Mechanism, int]]) -> tuple[int, int]:
        totals = [sum(n for m, n in releases.items() if m.kind == kind) for releases in by_unit]
        return min(totals), max(totals)

    texts = [text for releases in planned if (text := _in_words(kind, releases))]
    what = texts[0] if texts[0] == texts[-1] else f"{texts[0]} (the smallest) to {texts[-1]} (the largest)"
    mixed = any(sum(m.kind == kind for m in releases) > 1 for releases in planned)
    return ReleaseKind(kind, what, counts(planned), None if posted is None else counts(posted), mixed)


def _in_words(kind: str, releases: Mapping[Mechanism, int]) -> str:
    of_kind = {m: n for m, n in releases.items() if m.kind == kind}
    if len(of_kind) == 1:
        return next(iter(of_kind)).describe()
    return ", and ".join(f"{'once' if n == 1 else f'{n} times'} {m.describe()}" for m, n in of_kind.items())


def rounded_up(epsilon: float) -> str:
    """An epsilon for people, never below the proved one (but for the last bits of a float, which are rounding)."""
    if math.isinf(epsilon):
        return "infinity"
    return f"{math.ceil(epsilon * 1000 * (1 - 1e-13)) / 1000:.3f}".rstrip("0").rstrip(".")


def json_number(value: float) -> float | str:
    """JSON has no infinity; a word cannot be mistaken for a small number."""
    return "infinity" if math.isinf(value) else value
