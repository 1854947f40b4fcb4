"""A run done over, as an attack needs it: with other records, other noise, and somebody who looks on.

What the run promises holds for whatever records its clients have. So whoever wants to break the promise may choose
them: give clients records that stand out, take others away, and look at what the server sees.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fairveil.data.federation import ClientData, Federation, Records, Source
from fairveil.errors import UserError
from fairveil.plan import Plan
from fairveil.privacy.mechanisms import SumMechanism
from fairveil.privacy.release import Reply
from fairveil.run import Machines, Place, drive
from fairveil.serving import Served, served_models
from fairveil.session import Job
from fairveil.store import Store


@dataclass(frozen=True, eq=False)
class Planted:
    """A source whose clients hold other training records than they had. One that it does not know holds these alone."""

    source: Source
    clients: int  # that the source knows
    more: Mapping[int, Records]  # by client, after its own
    without: Mapping[int, np.ndarray]  # by client, rows of its own

    def load(self, client: int) -> ClientData:
        """What the client holds now; it is tested as it was."""
        more = self.more.get(client)
        if client >= self.clients:
            assert more is not None
            like = self.source.load(0)
            return replace(like, train=more, test=like.test.take(np.arange(0)), attributes={})
        data = self.source.load(client)
        kept, gone = data.train, self.without.get(client)
        if gone is not None:
            kept = kept.take(np.setdiff1d(np.arange(len(kept)), gone))
        if more is not None:
            kept = Records(torch.cat([kept.x, more.x]), torch.cat([kept.y, more.y]))
        return replace(data, train=kept)


def planted(
    federation: Federation, more: Mapping[int, Records], without: Mapping[int, np.ndarray] | None = None
) -> Federation:
    """The federation with more training records, and without some; a client from `clients` on is a new one.

    New clients are numbered without a gap, and belong to the first group. Sizes are the true ones: what clients have
    declared is in the facts of a plan, and stays. So is how many clients hold a record: it was priced with the plan.
    """
    without = without or {}
    known = federation.clients
    size = federation.size.copy()
    for client, rows in without.items():
        size[client] -= len(np.unique(rows))
    new = sorted(client for client in more if client >= known)
    assert new == list(range(known, known + len(new)))
    for client, records in more.items():
        if client < known:
            size[client] += len(records)
    return replace(
        federation,
        holders=1,
        originals=None,
        size=np.concatenate([size, [len(more[client]) for client in new]]).astype(np.int64),
        group=np.concatenate([federation.group, np.zeros(len(new), np.int64)]),
        names=federation.names and (*federation.names, *(f"new {client}" for client in new)),
        source=Planted(federation.source, known, dict(more), dict(without)),
    )


@dataclass(frozen=True)
class Rehearsed:
    """What came of a rehearsal."""

    state: object  # the algorithm's last
    served: Served
    personal: Mapping[int, Mapping[str, Tensor]]  # what clients keep for themselves


class Quiet:
    """An engine on which nobody is judged, and some clients contribute nothing to sums: they are not asked."""

    measures = False

    def __init__(self, machines: Machines, absent: frozenset[int] = frozenset()) -> None:
        self._machines, self._absent = machines, absent

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        """The replies of all others."""
        there = [c for c in job.calls if not (isinstance(c.mechanism, SumMechanism) and c.client in self._absent)]
        return self._machines.run(replace(job, calls=there))

    def deliver(self, served: Served) -> None:
        """Nobody waits for a model."""

    def __enter__(self) -> Self:
        self._machines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._machines.__exit__(kind, error, trace)


class Apart(Place):
    """A place whose randomness is that of no other: rehearsals share noise neither with the run nor with each other."""

    def __init__(self, name: str) -> None:
        self.name = name

    def engine(self, plan: Plan, store: Store, federation: Federation) -> Machines:
        return Quiet(super().engine(plan, store, federation))

    def root(self, plan: Plan, store: Store) -> str:
        return f"{plan.root} rehearsal {self.name}"


def rehearse(plan: Plan, place: Apart) -> Rehearsed:
    """Carry out a plan in a folder that is thrown away. The ledger keeps watch as it always does.

    Raises:
        UserError: its records are not here.
    """
    check_here(plan)
    here = plan.config.engine.model_copy(update={"kind": "local"})
    plan = replace(plan, config=plan.config.model_copy(update={"engine": here}))
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "run") as store:
        store.ledger.set_plan(plan.releases)
        state = drive(plan, store, None, place)
        last = store.latest()
        assert last is not None
        return Rehearsed(state, served_models(plan, state, last.average), last.personal)


def check_here(plan: Plan) -> None:
    """Refuse to attack records that are not here (UserError)."""
    if plan.federation.elsewhere:
        raise UserError(
            "the records of this run are on the machines of its clients.",
            "An attack takes records that stand out, and somebody who knows them. Nothing was run.",
            "the same config on records that are here, such as a public dataset of the same kind",
        )
