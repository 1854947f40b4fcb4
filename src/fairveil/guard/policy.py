"""What a client allows, what a server proposes, and whether one fits the other."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fairveil.config import DataConfig, Section, read_toml
from fairveil.errors import UserError
from fairveil.neighbours import find_extractor
from fairveil.options import parse
from fairveil.privacy.accounting import Adjacency
from fairveil.privacy.mechanisms import CohortSums, Mechanism, SumMechanism, from_canonical
from fairveil.privacy.metric import Sanitiser
from fairveil.privacy.votes import NeighbourVotes, NoisyVotes
from fairveil.remote import Malformed

# that need trust in nobody
TASKS = ["local_update", "fair_update", "choose_model", "personal_update", "release_moments"]
BOUNDS = ("clip_norm", "bound", "radius")  # fields of mechanisms
LEAST_BOUND = 1e-9  # far above the least numbers of float32, which are rounded by up to their own size


class Policy(Section):
    """What the owner of the records allows, whatever a server asks."""

    epsilon: float = Field(gt=0, allow_inf_nan=False, examples=[4.0])
    delta: float = Field(gt=0, lt=1, examples=[1e-4])
    adjacency: Adjacency = "add-remove"
    trust: Literal["nobody", "server"] = "nobody"  # whether bounded contributions may go to the server without noise
    tasks: list[str] = TASKS
    smallest_noise: float = Field(0.2, gt=0)  # multiplier; of votes: standard deviation, in votes of one client
    largest_clip: float = Field(10.0, gt=0)
    open_choice: bool = False  # whether the choice among models that may be any distance apart may show, at no price
    largest_message: int = Field(100_000_000, gt=0)  # bytes
    sizes: Literal["rounded", "public"] = "rounded"
    plugins: list[str] = Field([])  # modules with tasks; package.module:Name of models, features that may be named


class OwnData(DataConfig):
    """Which records are this client's."""

    client: str = ""  # which one of the dataset, by name or number; empty: it holds a single one
    seed: int = 0


class ClientConfig(Section):
    """Who this client is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    server: str = Field(examples=["fl.example.org:9092"])
    group: str = ""  # by which clients are compared
    data: OwnData


def read_client(folder: Path) -> tuple[ClientConfig, Policy]:
    """Who a client is and what it allows, from the two files in its folder."""
    fix = "fairveil deploy init-client, which writes it"
    config = parse(ClientConfig, read_toml(folder / "client.toml", fix))
    return config, parse(Policy, read_toml(folder / "policy.toml", fix))


class Refused(Exception):
    """A request that the guard does not answer, and why. The words go to the server."""


@dataclass(frozen=True)
class Proposal:
    """All that a run will ever ask of this client, as the server has put it."""

    client: int  # its number in the run
    unit: Literal["record", "client", "metric"]
    delta: float
    model: str
    options: Mapping[str, Any]
    releases: tuple[tuple[str, int], ...]  # mechanisms in canonical form, and how often

    @classmethod
    def read(cls, text: str) -> Proposal:
        """From the text that travels.

        Raises:
            Malformed: it is not one.
        """
        try:
            plain = json.loads(text)
            releases = tuple((str(what), int(count)) for what, count in plain["releases"])
            found = cls(
                int(plain["client"]), plain["unit"], float(plain["delta"]), str(plain["model"]),
                dict(plain["options"]), releases,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise Malformed(f"not a proposal: {error}") from None
        least = 0.0 if found.unit == "metric" else sys.float_info.min  # Laplace noise under a metric needs no delta
        known = found.unit in ("record", "client", "metric") and least <= found.delta < 1 and found.client >= 0
        if not known or any(not 0 < count < 10**9 for _, count in releases) or len(dict(releases)) < len(releases):
            raise Malformed("not a proposal: its numbers make no sense")
        return found

    def text(self) -> str:
        """As it travels."""
        return json.dumps(
            {
                "client": self.client, "unit": self.unit, "delta": self.delta, "model": self.model,
                "options": dict(self.options), "releases": [list(pair) for pair in self.releases],
            },
            sort_keys=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Holding:
    """What a client declares of its records. All of it is public, so that it may show in a refusal."""

    size: int  # rounded down, unless it is public
    features: tuple[int, ...]  # shape of a record
    classes: int


def checked(proposal: Proposal, policy: Policy, holding: Holding) -> dict[Mechanism, int]:
    """The mechanisms of a proposal and how often, each within the policy, and such that it fits the records.

    Whatever is summed over clients (`SumMechanism`) needs trust in the server, whichever unit it protects: a share that
    leaves here is exact within its bound, and the noise that is priced comes on the sum. That holds as well where the
    clients make this noise together (`noised_by`). One share alone then has 1/(N - t) of its variance, which hides next
    to nothing, and N is what the server says; it would need no trust if nobody could see more than the sum, and there
    is no secure sum on a federation.

    Raises:
        Refused: one of them is not.
    """
    if proposal.unit == "client" and policy.trust != "server":
        raise Refused("contributions without noise do not go to the server: the policy trusts nobody")
    releases: dict[Mechanism, int] = {}
    for text, count in proposal.releases:
        mechanism = from_canonical(text)
        if mechanism is None:
            raise Refused("a mechanism that is not known here")
        numbers = list(_numbers(mechanism))
        _check_priced(mechanism)
        if isinstance(mechanism, SumMechanism) and policy.trust != "server":
            raise Refused(f"{mechanism.kind}: shares do not go to the server, the policy trusts nobody")
        if _protects(mechanism) != proposal.unit:
            raise Refused(f"{mechanism.kind} does not go with privacy of each {proposal.unit}")
        if getattr(mechanism, "adjacency", policy.adjacency) != policy.adjacency:
            raise Refused(f"{mechanism.kind} is noised for another relation between neighbours than the policy's")
        for name, value in numbers:
            if name == "noise_multiplier" and not policy.smallest_noise <= value < math.inf:
                raise Refused(f"a noise multiplier of {value:g}: the policy asks for {policy.smallest_noise:g}")
            if name == "expected_batch" and not value >= 1:  # steps would be as long as a server likes
                raise Refused(f"an expected batch of {value:g} records")
            if name == "spread" and math.isinf(value) and not policy.open_choice:
                raise Refused("models any distance apart: which of them a client takes would show, at no price")
            if name in BOUNDS and not LEAST_BOUND <= value <= policy.largest_clip:
                raise Refused(f"a {name} of {value:g}: the policy allows {policy.largest_clip:g}")
        if isinstance(mechanism, NoisyVotes):
            _check_votes(mechanism, policy, holding)
        releases[mechanism] = count
    return releases


def _check_priced(mechanism: Mechanism) -> None:
    """Whether its numbers are such that there is an event: of noise of 1e308, say, there is none."""
    try:
        _ = mechanism.event
    except ArithmeticError:
        raise Refused("a mechanism whose numbers are too large or too small for a price") from None


def _protects(mechanism: Mechanism) -> str:
    """The unit that a mechanism is priced for."""
    if isinstance(mechanism, NoisyVotes):
        return mechanism.unit
    return "metric" if isinstance(mechanism, Sanitiser) else "client" if isinstance(mechanism, CohortSums) else "record"


def _check_votes(votes: NoisyVotes, policy: Policy, holding: Holding) -> None:
    """Whether a client can give such votes; nothing is imported because a server names it."""
    if votes.classes != holding.classes or votes.several is not None:
        raise Refused(f"votes for {votes.classes:,} classes: a record has one of {holding.classes} here")
    if 8 * votes.queries * votes.classes > policy.largest_message:
        raise Refused(f"the votes for {votes.queries:,} queries do not fit the messages that the policy allows")
    if votes.threshold is not None and not votes.threshold_noise >= policy.smallest_noise:
        raise Refused(f"a threshold noise of {votes.threshold_noise:g}: the policy asks for {policy.smallest_noise:g}")
    if not isinstance(votes, NeighbourVotes):
        return
    if votes.neighbours > holding.size:
        raise Refused(f"{votes.neighbours:,} neighbours: this client declares {holding.size:,} records")
    if ":" in votes.features and votes.features not in policy.plugins:
        raise Refused(f"the features {votes.features[:100]!r} are not among the policy's plugins")
    try:
        find_extractor(votes.features, holding.features)
    except UserError as error:
        raise Refused(error.what) from None


def _numbers(mechanism: Any) -> Iterator[tuple[str, float]]:
    """All numbers among the fields of a mechanism and of its parts."""
    for field in fields(mechanism):
        value = getattr(mechanism, field.name)
        for inner in value if isinstance(value, tuple) else [value]:
            if is_dataclass(inner):
                yield from _numbers(inner)
            elif isinstance(inner, int) and abs(inner) >= 2**63:  # beyond 2^1024 there is not even a float of it
                raise Refused(f"a {field.name} of more than 64 bits")
            elif isinstance(inner, int | float):
                yield field.name, float(inner)
