"""The ledger: what each protected unit has released, on disk before anyone sees the value.

A unit is a client (record-level privacy: its records are protected, client by client) or the whole federation
(client-level privacy). Each unit has a plan: the multiset of mechanisms that the run may apply to it. A post
must stay inside the plan; comparing is counting, nothing is priced here. Posting the same request with the
same inputs and the same answer again costs nothing, which is what a resumed run does; anything else is refused, since
two different answers to one request would cancel each other's noise.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fairveil.errors import PrivacyError
from fairveil.privacy.mechanisms import Mechanism, canonical

FEDERATION = -1  # the unit of everything that is summed over clients

SCHEMA = """
CREATE TABLE IF NOT EXISTS mechanism (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, what TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS plan (
    unit INTEGER NOT NULL, mechanism INTEGER NOT NULL REFERENCES mechanism, count INTEGER NOT NULL,
    PRIMARY KEY (unit, mechanism)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger (
    unit INTEGER NOT NULL, request TEXT NOT NULL, mechanism INTEGER NOT NULL REFERENCES mechanism,
    digest BLOB NOT NULL, reply BLOB NOT NULL, PRIMARY KEY (request, unit)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Entry:
    """One application of a mechanism to one unit.

    Attributes:
        request: names what was asked, once for each unit ("round 3, ask 1").
        digest: of all inputs; the same request must come with the same inputs.
        reply: digest of the answer; the same request must get the same answer, whatever has become of the code.
    """

    unit: int
    request: str
    mechanism: Mechanism
    digest: bytes
    reply: bytes


class Ledger:
    """The durable record over an open database (write-ahead log, synchronous FULL)."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database
        database.executescript(SCHEMA)
        self._ids: dict[str, int] = dict(database.execute("SELECT what, id FROM mechanism"))
        # how often, by (unit, mechanism)
        self._planned = _counts(database.execute("SELECT unit, mechanism, count FROM plan"))
        self._posted = _counts(
            database.execute("SELECT unit, mechanism, COUNT(*) FROM ledger GROUP BY unit, mechanism")
        )

    def set_plan(self, planned: Mapping[int, Mapping[Mechanism, int]]) -> None:
        """Write the plan of these units; a plan that is already there never changes."""
        if planned.keys() & {unit for unit, _ in self._planned}:
            raise PrivacyError("this run already has a plan: what was promised cannot be changed afterwards")
        known = dict(self._ids)
        try:
            with self.database:
                rows = [(u, self._id(m), count) for u, releases in planned.items() for m, count in releases.items()]
                self.database.executemany("INSERT INTO plan VALUES (?, ?, ?)", rows)
        except BaseException:
            self._ids = known  # the numbers that were given out just now are free again: another will get them
            raise
        self._planned.update(_counts(rows))

    def post(self, entries: Sequence[Entry]) -> None:
        """Post entries in one transaction; when this returns they are on disk.

        Raises:
            PrivacyError: an entry outside the plan, or a known request with other inputs. Nothing is posted.
        """
        ids = {mechanism: self._ids.get(canonical(mechanism)) for mechanism in {entry.mechanism for entry in entries}}
        known = {request: self._answered(request) for request in {entry.request for entry in entries}}
        fresh: list[tuple[int, str, int, bytes, bytes]] = []
        asked: Counter[tuple[int, int]] = Counter()
        for entry in entries:
            mechanism = ids[entry.mechanism]
            before = known[entry.request].get(entry.unit)
            if before is not None:
                if before != (mechanism, entry.digest, entry.reply):
                    what = "in another way" if before[:2] == (mechanism, entry.digest) else "with other inputs"
                    raise PrivacyError(
                        f"{_unit(entry.unit)}: {entry.request} was answered before {what}. A second, different answer "
                        "under the same noise would give it away, so it was not given. If the code, a package or the "
                        "machine has changed, go back to how it was, or start a new run."
                    )
                continue
            if mechanism is None or (entry.unit, mechanism) not in self._planned:
                raise PrivacyError(self._not_planned(entry))
            place = (entry.unit, mechanism)
            asked[place] += 1
            spent = self._posted[place] + asked[place]
            if spent > self._planned[place]:
                raise PrivacyError(
                    f"{_unit(entry.unit)}: {entry.mechanism.kind} asked for {spent} times, "
                    f"{self._planned[place]} planned ({entry.mechanism.describe()}). Nothing was released."
                )
            fresh.append((entry.unit, entry.request, mechanism, entry.digest, entry.reply))
        with self.database:
            self.database.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?, ?)", fresh)
        self._posted.update(asked)

    def __len__(self) -> int:
        """How many entries there are, over all units."""
        return self._posted.total()

    def entries(self) -> list[tuple[int, str, str, bytes, bytes]]:
        """Every entry: unit, request, mechanism in canonical form, digests of the inputs and of the reply."""
        query = "SELECT unit, request, what, digest, reply FROM ledger JOIN mechanism ON id = mechanism"
        return sorted(self.database.execute(query))

    def units(self, request: str) -> set[int]:
        """Who has answered a request."""
        return set(self._answered(request))

    def answered(self, request: str, unit: int) -> tuple[str, bytes, bytes] | None:
        """What a unit has released upon a request: mechanism in canonical form, digests of the inputs and the reply."""
        query = "SELECT what, digest, reply FROM ledger JOIN mechanism ON id = mechanism WHERE request = ? AND unit = ?"
        row: tuple[str, bytes, bytes] | None = self.database.execute(query, (request, unit)).fetchone()
        return row

    def planned(self) -> dict[int, Counter[str]]:
        """The plan of each unit, mechanisms in canonical form."""
        return self._by_unit(self._planned)

    def posted(self) -> dict[int, Counter[str]]:
        """What each unit has released so far, mechanisms in canonical form."""
        return self._by_unit(self._posted)

    def _by_unit(self, counts: Counter[tuple[int, int]]) -> dict[int, Counter[str]]:
        what = {number: text for text, number in self._ids.items()}
        by_unit: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for (unit, mechanism), count in counts.items():
            by_unit[unit][what[mechanism]] = count
        return dict(by_unit)

    def _answered(self, request: str) -> dict[int, tuple[int, bytes, bytes]]:
        """What is on disk of a request, by unit: mechanism, digests of the inputs and of the reply."""
        query = "SELECT unit, mechanism, digest, reply FROM ledger WHERE request = ?"
        return {unit: tuple(entry) for unit, *entry in self.database.execute(query, (request,))}

    def _id(self, mechanism: Mechanism) -> int:
        what = canonical(mechanism)
        if what not in self._ids:
            cursor = self.database.execute("INSERT INTO mechanism (kind, what) VALUES (?, ?)", (mechanism.kind, what))
            assert cursor.lastrowid is not None
            self._ids[what] = cursor.lastrowid
        return self._ids[what]

    def _not_planned(self, entry: Entry) -> str:
        """Say which fields differ from what was planned for this unit under the same type."""
        asked = json.loads(canonical(entry.mechanism))
        lines = [
            f"{_unit(entry.unit)}: this {entry.mechanism.kind} was not planned, so it was not released.",
            f"  Asked:   {entry.mechanism.describe()}",
        ]
        planned = [json.loads(what) for what in self.planned().get(entry.unit, Counter())]
        for other in planned:
            if other["type"] == asked["type"]:
                different = [key for key in asked if asked[key] != other.get(key)]
                lines.append(f"  Planned: the same with other {', '.join(different)}")
        if not planned:
            lines.append("  Planned: nothing at all for this unit")
        lines.append("  Declare it in releases(), with the same numbers as in round().")
        return "\n".join(lines)


def _counts(rows: Iterable[tuple[int, int, int]]) -> Counter[tuple[int, int]]:
    return Counter({(unit, mechanism): count for unit, mechanism, count in rows})


def _unit(unit: int) -> str:
    return "the federation" if unit == FEDERATION else f"client {unit}"
