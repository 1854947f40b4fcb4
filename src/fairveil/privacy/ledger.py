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
from collections import Counter
from collections.abc import Mapping, Sequence
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
    digest BLOB NOT NULL, reply BLOB NOT NULL, PRIMARY KEY (unit, request)) WITHOUT ROWID;
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
        self._plan: dict[int, Counter[int]] = {}
        for unit, mechanism, count in database.execute("SELECT unit, mechanism, count FROM plan"):
            self._plan.setdefault(unit, Counter())[mechanism] = count
        self._posted: dict[int, dict[str, tuple[int | None, bytes, bytes]]] = {}
        query = "SELECT unit, request, mechanism, digest, reply FROM ledger"
        for unit, request, mechanism, digest, reply in database.execute(query):
            self._posted.setdefault(unit, {})[request] = (mechanism, digest, reply)
        self._counts = {
            unit: Counter(mechanism for mechanism, *_ in entries.values() if mechanism is not None)
            for unit, entries in self._posted.items()
        }

    def set_plan(self, planned: Mapping[int, Mapping[Mechanism, int]]) -> None:
        """Write the plan of every unit; a plan that is already there never changes."""
        if self._plan:
            raise PrivacyError("this run already has a plan: what was promised cannot be changed afterwards")
        with self.database:
            for unit, releases in planned.items():
                counts = Counter({self._id(mechanism): count for mechanism, count in releases.items()})
                if counts:
                    self._plan[unit] = counts
                self.database.executemany(
                    "INSERT INTO plan VALUES (?, ?, ?)", [(unit, m, count) for m, count in counts.items()]
                )

    def post(self, entries: Sequence[Entry]) -> None:
        """Post entries in one transaction; when this returns they are on disk.

        Raises:
            PrivacyError: an entry outside the plan, or a known request with other inputs. Nothing is posted.
        """
        fresh: list[tuple[Entry, int]] = []
        asked: dict[int, Counter[int]] = {}
        for entry in entries:
            mechanism = self._ids.get(canonical(entry.mechanism))
            before = self._posted.get(entry.unit, {}).get(entry.request)
            if before is not None:
                if before != (mechanism, entry.digest, entry.reply):
                    what = "in another way" if before[:2] == (mechanism, entry.digest) else "with other inputs"
                    raise PrivacyError(
                        f"{_unit(entry.unit)}: {entry.request} was answered before {what}. A second, different answer "
                        "under the same noise would give it away, so it was not given. If the code, a package or the "
                        "machine has changed, go back to how it was, or start a new run."
                    )
                continue
            planned = self._plan.get(entry.unit, Counter())
            if mechanism is None or mechanism not in planned:
                raise PrivacyError(self._not_planned(entry))
            counts = asked.setdefault(entry.unit, Counter())
            counts[mechanism] += 1
            spent = self._counts.get(entry.unit, Counter())[mechanism] + counts[mechanism]
            if spent > planned[mechanism]:
                raise PrivacyError(
                    f"{_unit(entry.unit)}: {entry.mechanism.kind} asked for {spent} times, "
                    f"{planned[mechanism]} planned ({entry.mechanism.describe()}). Nothing was released."
                )
            fresh.append((entry, mechanism))
        with self.database:
            self.database.executemany(
                "INSERT INTO ledger VALUES (?, ?, ?, ?, ?)",
                [(entry.unit, entry.request, mechanism, entry.digest, entry.reply) for entry, mechanism in fresh],
            )
        for entry, mechanism in fresh:
            self._posted.setdefault(entry.unit, {})[entry.request] = (mechanism, entry.digest, entry.reply)
            self._counts.setdefault(entry.unit, Counter())[mechanism] += 1

    def __len__(self) -> int:
        """How many entries there are, over all units."""
        return sum(len(entries) for entries in self._posted.values())

    def entries(self) -> list[tuple[int, str, str, bytes, bytes]]:
        """Every entry: unit, request, mechanism in canonical form, digests of the inputs and of the reply."""
        query = "SELECT unit, request, what, digest, reply FROM ledger JOIN mechanism ON id = mechanism"
        return sorted(self.database.execute(query))

    def planned(self) -> dict[int, Counter[str]]:
        """The plan of each unit, mechanisms in canonical form."""
        return self._named(self._plan)

    def posted(self) -> dict[int, Counter[str]]:
        """What each unit has released so far, mechanisms in canonical form."""
        return self._named(self._counts)

    def _named(self, counts: Mapping[int, Counter[int]]) -> dict[int, Counter[str]]:
        what = {number: text for text, number in self._ids.items()}
        return {
            unit: Counter({what[m]: count for m, count in by_mechanism.items()})
            for unit, by_mechanism in counts.items()
        }

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


def _unit(unit: int) -> str:
    return "the federation" if unit == FEDERATION else f"client {unit}"
