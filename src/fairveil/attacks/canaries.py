"""Canaries: records, or whole clients, that are in a rehearsal or not, by a fair coin each.

A promise holds for whatever records there are, so these are made to stand out: every feature is plus or minus the
largest amount there is in the data, at random, and the label is drawn. Two of them have little in common, and their
gradients are long. Under add/remove a canary is there or not; under replace it is one of two that pull opposite ways.

Whoever guesses knows everything but the coins: the records of all others, and both forms of every canary. To find out
what a canary would send, that is asked of it: so beside the clients that take part there are clients *backstage*, with
numbers beyond those of the plan, whom the algorithm never asks. What they hold does not depend on the coins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fairveil.attacks.rehearsal import planted
from fairveil.data.federation import Records
from fairveil.plan import Plan
from fairveil.privacy.votes import NoisyVotes
from fairveil.streams import Stream

Key = tuple[int | str, ...]
SIZES = 10  # of clients with canaries, at most
LOOKED_AT = 20  # clients whose records say what amounts there are
VOTERS = 50  # the more vote, the less does one of them count
HELD = 64  # copies of its record that a whole client holds, at most
MOST_AT_ONCE = 1 << 27  # numbers in the gradients of one client's canaries, or in what canary clients send


@dataclass(frozen=True, eq=False)
class Planting:
    """A plan with canaries in it, and what is known of them.

    Attributes:
        before: the plan without them.
        plan: to be rehearsed; its federation has clients backstage.
        inside: (m,) the coins. They are for the last word only: no score may see them.
        whole: whether canaries are whole clients.
        holders: (m, h) the clients that hold a canary; of a whole client (m, 1) itself.
        canaries: (m, ...) the records that are there if the coin says so; of whole clients one of each.
        instead: (m, ...) what is there otherwise; None: nothing.
        backstage: (m,) whole clients as they are if the coin says so; else none.
        otherwise: (m,) and as they are if it does not; None: they are nobody then.
        others: the clients without any canary, as they are backstage: what they hold is known.
    """

    before: Plan
    plan: Plan
    inside: np.ndarray
    whole: bool
    holders: np.ndarray
    canaries: Records
    instead: Records | None
    backstage: np.ndarray
    otherwise: np.ndarray | None
    others: np.ndarray

    @property
    def absent(self) -> frozenset[int]:
        """The clients that are nobody: they contribute nothing to any sum."""
        nobody = self.whole and self.instead is None
        return frozenset(self.holders[~self.inside, 0].tolist()) if nobody else frozenset()


def capacity(plan: Plan) -> int:
    """How many canaries of one rehearsal can be told apart; more of them would only hide each other."""
    clients, parameters = len(plan.facts.size), plan.facts.parameters
    if plan.unit == "metric":
        return clients
    if plan.pooled and plan.unit == "record":
        return clients * votes_of(plan).queries
    if plan.algorithm.needs_public:
        return VOTERS
    if plan.pooled:
        return max(8, min(400, parameters // 3, MOST_AT_ONCE // parameters))
    at_one = max(4, min(200, parameters // 10, MOST_AT_ONCE // parameters))
    return max(1, len(bearers(plan)) * at_one // plan.holders)


def votes_of(plan: Plan) -> NoisyVotes:
    """The mechanism of a voting system, with the queries of all rounds."""
    rounds = [m for releases in plan.releases.values() for m in releases.elements() if isinstance(m, NoisyVotes)]
    return replace(rounds[0], queries=sum(m.queries for m in rounds), answers=sum(m.answers for m in rounds))


def plant(plan: Plan, count: int, key: Key) -> Planting:
    """Plant so many canaries; coins and contents are drawn from streams of this key."""
    coins = np.zeros(count, bool)
    coins[Stream(*key, "coins").coins(count, 0.5).numpy()] = True
    if plan.unit == "metric":
        return _plant_pairs(plan, coins, key)
    if plan.pooled and plan.unit == "client":
        return _plant_clients(plan, coins, key)
    return _plant_records(plan, coins, key)


def bearers(plan: Plan) -> np.ndarray:
    """The clients that get canaries: those of the largest epsilon, since the promise is for the worst.

    If these have declared many different sizes, those of the commonest: a price at every delta takes its time.
    """
    if plan.pooled or plan.unit == "metric":
        return plan.facts.clients
    most = max(unit.epsilon for unit in plan.units)
    worst = [unit for unit in plan.units if unit.epsilon >= 0.99 * most]
    sizes = {size for size, _ in Counter(unit.size for unit in worst).most_common(SIZES)}
    return np.array([unit.unit for unit in worst if unit.size in sizes])


def _plant_records(plan: Plan, coins: np.ndarray, key: Key) -> Planting:
    """A record each, spread over the clients. Where it is voted, a canary is one of the queries under a drawn label."""
    federation, who, count = plan.federation, bearers(plan), len(coins)
    holders = who[(np.arange(count)[:, None] + np.arange(plan.holders)) % len(who)]
    canaries, opposite = _pairs(plan, count, key)
    if plan.pooled:
        assert federation.server is not None
        asked = np.arange(count) // len(who) % votes_of(plan).queries
        x = federation.server.x[torch.from_numpy(asked)]
        canaries, opposite = Records(x, canaries.y), Records(x, _labels(plan, count, (*key, "others")))
    instead = opposite if plan.facts.adjacency == "replace" else None
    more = {}
    for client in np.unique(holders).tolist():
        mine = (holders == client).any(axis=1)
        there = [canaries.take(np.flatnonzero(mine & coins))]
        if instead is not None:
            there.append(instead.take(np.flatnonzero(mine & ~coins)))
        more[client] = _joined(there)
    return Planting(
        plan, replace(plan, federation=planted(federation, more)), coins, False, holders, canaries, instead,
        np.zeros(0, int), None, plan.facts.clients,
    )  # fmt: skip


def _plant_clients(plan: Plan, coins: np.ndarray, key: Key) -> Planting:
    """New clients. Where it is voted the others hold such votes as well: where they agreed, nobody would count."""
    facts, count = plan.facts, len(coins)
    canaries, opposite = _pairs(plan, count, key)
    acting = len(facts.size) + np.arange(count)
    backstage, otherwise = acting + count, acting + 2 * count
    enough = max(HELD, getattr(plan.algorithm, "size_cap", 0))  # that a client weighs as much as any
    sizes = [min(enough, int(facts.size.max()))] * count
    there, away = (_holdings(plan, made, sizes, (*key, form)) for made, form in _forms(canaries, opposite))
    pairs = facts.adjacency == "replace"
    held = [a if coin or not pairs else b for coin, a, b in zip(coins, there, away, strict=True)]
    more = dict(zip(acting.tolist(), held, strict=True)) | dict(zip(backstage.tolist(), there, strict=True))
    if pairs:
        more |= dict(zip(otherwise.tolist(), away, strict=True))
    gone: dict[int, np.ndarray] = {}
    if plan.algorithm.needs_public:
        own = plan.federation.size.tolist()
        gone = {client: np.arange(size) for client, size in enumerate(own)}
        more |= dict(enumerate(_holdings(plan, canaries, own, (*key, "others"))))
    wider = replace(
        facts,
        size=np.concatenate([facts.size, [len(each) for each in held]]),
        group=np.concatenate([facts.group, np.zeros(count, np.int64)]),
    )
    return Planting(
        plan, replace(plan, federation=planted(plan.federation, more, gone), facts=wider), coins, True, acting[:, None],
        canaries, opposite if pairs else None, backstage, otherwise if pairs else None, facts.clients,
    )  # fmt: skip


def _plant_pairs(plan: Plan, coins: np.ndarray, key: Key) -> Planting:
    """Clients of the plan, with all their records exchanged for others: one set of them or another."""
    federation, clients, count = plan.federation, len(plan.facts.size), len(coins)
    who = np.sort(Stream(*key, "who").numpy.choice(clients, count, replace=False))
    canaries, _ = _pairs(plan, count, key)
    opposite = Records(canaries.x, _others(plan, canaries.y))  # which chooses the same hypothesis now and then
    own = federation.size[who].tolist()
    sizes = [min(HELD, size) for size in own]
    there, away = (_holdings(plan, made, sizes, (*key, form)) for made, form in _forms(canaries, opposite))
    held = [a if coin else b for coin, a, b in zip(coins, there, away, strict=True)]
    backstage, otherwise = clients + np.arange(count), clients + count + np.arange(count)
    numbers = np.concatenate([who, backstage, otherwise]).tolist()
    more = dict(zip(numbers, [*held, *there, *away], strict=True))
    gone = {int(client): np.arange(size) for client, size in zip(who, own, strict=True)}
    return Planting(
        plan, replace(plan, federation=planted(federation, more, gone)), coins, True, who[:, None], canaries, opposite,
        backstage, otherwise, np.zeros(0, int),
    )  # fmt: skip


def _holdings(plan: Plan, made: Records, sizes: Sequence[int], key: Key) -> list[Records]:
    """What whole clients hold: copies of their record, so that the order of their batches does not matter.

    Where it is voted they hold the queries, under labels of their own, so often that a vote is all theirs.
    """
    if not plan.algorithm.needs_public:
        return [made.take(np.full(size, j)) for j, size in enumerate(sizes)]
    votes, server = votes_of(plan), plan.federation.server
    assert server is not None
    x = server.x[: votes.queries]
    labels = (_labels(plan, votes.queries, (*key, "queries", j)) for j in range(len(sizes)))
    return [_joined([Records(x, y)] * votes.weight) for y in labels]


def _forms(canaries: Records, opposite: Records) -> tuple[tuple[Records, str], tuple[Records, str]]:
    return (canaries, "in"), (opposite, "instead")


def _pairs(plan: Plan, count: int, key: Key) -> tuple[Records, Records]:
    """Records that stand out (count, ...), and those that are there in their stead under replace."""
    federation, draw = plan.federation, Stream(*key, "records").numpy
    shape, y = (count, *federation.features), _labels(plan, count, key)
    if federation.tokens is not None:
        first, second = (torch.from_numpy(draw.integers(0, federation.tokens, shape)).float() for _ in range(2))
        return Records(first, y), Records(second, _labels(plan, count, (*key, "others")))
    looked = range(min(LOOKED_AT, federation.clients))
    largest = max(float(federation.load(client).train.x.abs().max()) for client in looked) or 1.0
    x = torch.from_numpy(largest * draw.choice([-1.0, 1.0], shape)).float()
    return Records(x, y), Records(-x, y)  # in a linear layer the gradients are just opposite


def _labels(plan: Plan, count: int, key: Key) -> Tensor:
    """Drawn targets (count,), or (count, classes)."""
    federation, draw = plan.federation, Stream(*key, "labels").numpy
    if federation.several:
        return torch.from_numpy(draw.integers(0, 2, (count, federation.classes)))
    if federation.classes:
        return torch.from_numpy(draw.integers(0, federation.classes, count))
    looked = range(min(LOOKED_AT, federation.clients))
    largest = max(float(federation.load(client).train.y.abs().max()) for client in looked) or 1.0
    return torch.from_numpy(largest * draw.choice([-1.0, 1.0], count)).float()


def _others(plan: Plan, y: Tensor) -> Tensor:
    """Targets that are none of these: the next class, the classes that a record does not have, the number negated."""
    if plan.federation.several:
        return 1 - y
    return (y + 1) % plan.federation.classes if plan.federation.classes else -y


def _joined(many: Sequence[Records]) -> Records:
    return Records(torch.cat([each.x for each in many]), torch.cat([each.y for each in many]))
