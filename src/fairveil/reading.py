"""A run folder, read: config, promises, metrics and ledger. Nothing is locked, so a run under way can be read too."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from fairveil.config import read_toml
from fairveil.errors import RunFault, UserError
from fairveil.fairness import PrivacyCost, pooled, privacy_cost
from fairveil.privacy.mechanisms import Mechanism, from_canonical
from fairveil.privacy.metric import Sanitiser
from fairveil.privacy.statement import MetricTerms
from fairveil.provenance import published
from fairveil.store import CLIENT, VALUE, is_held, of_records

METRICS = ("round", "client", "group", "cluster", "split", "model", "metric", "value", "n")
PLANNING = "The run is still being planned."
SCORES_STAY = (
    "Scores stay with the clients: each tests the model that serves it on its own machine, and does not send what it "
    "measures."
)


@dataclass(frozen=True)
class Run:
    """A run as its folder has it at the moment of reading.

    Attributes:
        config: resolved, as plain values.
        statement: what is guaranteed (statement.json).
        result: of a finished run (result.json); None: it is not finished.
        facts: of the data, for whoever reads this without them: features, classes, attributes, ...
        provenance: hashes of config and code, versions. That of the data is the published one.
        clients: one row for each: name, group, and (record level) declared size, noise multiplier, planned epsilon.
            Where they are elsewhere they have declared their sizes at client level, too.
        rounds: those that are done: round, seconds.
    """

    folder: Path
    config: Mapping[str, Any]
    statement: Mapping[str, Any]
    result: Mapping[str, Any] | None
    facts: Mapping[str, Any]
    provenance: Mapping[str, str]
    clients: pd.DataFrame
    rounds: pd.DataFrame

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def algorithm(self) -> str:
        return str(self.config["algorithm"]["name"])

    @property
    def elsewhere(self) -> bool:
        """Whether clients are on machines of their own: they keep what they measure there, and no scores are here."""
        return bool(self.facts.get("elsewhere"))

    @property
    def reproducible(self) -> bool:
        """Whether the noise follows from seed, config, code and data."""
        return not self.elsewhere and self.config["privacy"]["noise"] == "reproducible"

    @property
    def running(self) -> bool:
        """Whether a process is at work on it now."""
        return self.result is None and is_held(self.folder)

    @property
    def main(self) -> str:
        """The metric that people ask for first."""
        return "rmse" if self.facts.get("classes") == 0 else "accuracy"

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """All that was measured, one value a row: round, client, group, cluster, split, model, metric, value, n."""
        query = "SELECT round, split, model, metric, client, value, cluster, n FROM scores ORDER BY round, metric"
        with self._open() as database:
            rows = database.execute(query).fetchall()
        if not rows:
            return pd.DataFrame(columns=list(METRICS))
        *same, clients, values, clusters, numbers = zip(*rows, strict=True)
        client = np.frombuffer(b"".join(clients), CLIENT)
        length = [len(packed) // CLIENT.itemsize for packed in clients]
        columns: dict[str, Any] = {
            name: pd.Categorical(column).repeat(length) if name != "round" else np.repeat(column, length)
            for name, column in zip(("round", "split", "model", "metric"), same, strict=True)
        }
        columns |= {"client": client, "value": np.frombuffer(b"".join(values), VALUE)}
        groups = pd.Categorical(self.clients["group"])
        codes = np.where(client < 0, -1, groups.codes[client])  # a sum over all clients is of no group
        columns |= {"group": pd.Categorical.from_codes(codes, dtype=groups.dtype)}
        columns |= {"cluster": _whole(clusters, length), "n": _whole(numbers, length)}
        return pd.DataFrame(columns)[list(METRICS)]

    def scores(self, metric: str, *, split: str = "test", model: str = "served") -> pd.DataFrame:
        """One metric as a table: a row for each evaluated round, a column for each client; NaN: not scored.

        Args:
            model: or what begins like it: "local_update" finds "local_update, ask 1".
        """
        return self._matrix("value", metric, split, model)

    def counts(self, metric: str, *, split: str = "test", model: str = "served") -> pd.DataFrame:
        """How many records are behind each of the scores, in the same shape."""
        return self._matrix("n", metric, split, model)

    def assignment(self) -> pd.DataFrame:
        """Which of the models serves whom: a row for each evaluated round, a column for each client."""
        return self._matrix("cluster", self.main, "test", "served")

    @cached_property
    def groups(self) -> list[str]:
        """By which the run is judged: the groups of the clients, or the values of an attribute of the records."""
        if self.attribute is None:
            return list(dict.fromkeys(self.clients["group"]))
        return list(self.facts["attributes"][self.attribute])

    @property
    def attribute(self) -> str | None:
        """The attribute of the records by which the run is judged; None: by groups of clients."""
        groups = self.config.get("fairness", {}).get("groups", "cluster")
        return None if groups == "cluster" else str(groups)

    def by_group(self, metric: str, *, split: str = "test", model: str = "served") -> pd.DataFrame:
        """A metric by group: a row for each evaluated round, a column for each group.

        The mean over the clients of a group; over the records that have an attribute's value, wherever they are.
        """
        if self.attribute is None or split != "test":
            values = self.scores(metric, split=split, model=model)
            found = values.T.groupby(self.clients["group"].to_numpy(), sort=False).mean().T
        else:
            columns = {}
            for name in self.groups:
                split = of_records(self.attribute, name)
                values, n = (table(metric, split=split, model=model) for table in (self.scores, self.counts))
                columns[name] = pd.Series(pooled(values.to_numpy(), n.to_numpy(), metric), values.index)
            found = pd.DataFrame(columns)
        return found.dropna(axis=1, how="all")

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """How often the served models took one class for another at the end; attribute "" counts all test records."""
        with self._open() as database:
            table = pd.read_sql_query("SELECT * FROM confusion", database)
        return table.rename(columns={"of": "value"})

    @property
    def positive(self) -> int | None:
        """The class, or decision, that is an advantage; None: no class is."""
        given = self.config.get("fairness", {}).get("positive")
        two = (self.facts.get("classes") == 2 and not self.facts.get("several")) or self.facts.get("decided")
        return given if given is not None else 1 if two else None

    def confusions(self) -> dict[str, pd.DataFrame]:
        """The confusion counts by group of clients ("") and by every attribute of the records, where they tell some
        apart: client, value, actual, predicted, n."""
        group, table = self.clients["group"].to_numpy(), self.confusion
        if table.empty:  # it is counted at the end
            return {}
        everyone = table[table["attribute"] == ""]
        found = {"": everyone.assign(value=group[everyone["client"].to_numpy()])} if self.positive is not None else {}
        found |= {name: table[table["attribute"] == name] for name in self.facts.get("attributes", {})}
        return {name: counts for name, counts in found.items() if counts["value"].nunique() > 1}

    def costs(self) -> dict[str, PrivacyCost]:
        """What privacy costs every client against a model of its group's pooled records, where the run has measured
        it: in accuracy (or rmse) on test records, and in loss on training records."""
        found = {}
        for metric, split in ((self.main, "test"), ("loss", "train")):
            served, reference = (self.scores(metric, split=split, model=model) for model in ("served", "reference"))
            if len(served) and len(reference):
                values = np.stack([table.iloc[-1].to_numpy() for table in (served, reference)])
                both = ~np.isnan(values).any(axis=0)
                group = self.clients["group"].to_numpy()[both]
                ours, theirs = values[:, both]
                found[metric] = privacy_cost(ours, theirs, group, higher_is_better=metric == "accuracy")
        return found

    @cached_property
    def clusters(self) -> Mapping[str, Any] | None:
        """What a clustered system has found so far: count, of_client, ari, mss, mpo, switch_round, plane ..."""
        return _json(self.folder / "clusters.json")

    def attack(self, name: str) -> Mapping[str, Any] | None:
        """What an attack on the run has found ("audit", "membership", "inversion"); None: it was not attacked so."""
        return _json(self.folder / "attacks" / f"{name}.json")

    def planned(self, unit: int) -> Counter[Mechanism | None]:
        """All that a unit may ever release. None stands for mechanisms that this library does not know."""
        query = "SELECT what, count FROM plan JOIN mechanism ON id = mechanism WHERE unit = ?"
        planned: Counter[Mechanism | None] = Counter()
        with self._open() as database:
            for what, count in database.execute(query, (unit,)):
                planned[from_canonical(what)] += count
        return planned

    def posted(self, unit: int) -> list[tuple[int, Mechanism | None, str]]:
        """What a unit has released, in order: the round (0: before training), by which mechanism, of which kind."""
        query = "SELECT request, what, kind FROM ledger JOIN mechanism ON id = mechanism WHERE unit = ?"
        with self._open() as database:
            rows = database.execute(query, (unit,)).fetchall()
        known = {what: from_canonical(what) for _, what, _ in rows}
        return sorted(((_round(request), known[what], kind) for request, what, kind in rows), key=lambda row: row[0])

    @property
    def metric(self) -> MetricTerms | None:
        """What metric privacy promises in this run; None: it promises something else."""
        terms = self.statement.get("metric")
        return None if terms is None else MetricTerms(**terms)

    def metric_releases(self) -> pd.DataFrame | None:
        """Under metric privacy with Laplace noise, every release: round, client, and its epsilon at the distance of the
        radius (for `faithful`, as the paper counts it). None: this run promises something else."""
        query = "SELECT request, unit, what FROM ledger JOIN mechanism ON id = mechanism"
        with self._open() as database:
            planned = [from_canonical(what) for (what,) in database.execute("SELECT what FROM mechanism")]
            if not any(isinstance(mechanism, Sanitiser) and mechanism.at_radius is not None for mechanism in planned):
                return None
            rows = database.execute(query).fetchall()
        known = {what: cast(Sanitiser, from_canonical(what)).at_radius for what in {what for *_, what in rows}}
        found = [(_round(request), unit, known[what]) for request, unit, what in rows]
        return pd.DataFrame(found, columns=["round", "client", "epsilon"]).sort_values(["round", "client"])

    def metric_budgets(self) -> pd.Series | None:
        """The sums of these epsilons (clients,), 0 for whoever never took part: what each client has spent."""
        releases = self.metric_releases()
        if releases is None:
            return None
        return releases.groupby("client")["epsilon"].sum().reindex(range(len(self.clients)), fill_value=0.0)

    def busiest(self) -> int:
        """The unit that has released most often, the first of several."""
        query = "SELECT unit FROM ledger GROUP BY unit ORDER BY count(*) DESC, unit LIMIT 1"
        with self._open() as database:
            return next((unit for (unit,) in database.execute(query)), 0)

    @cached_property
    def units(self) -> pd.DataFrame:
        """What was solved for every protected unit: unit (a client, or -1: the federation), size, noise, epsilon."""
        with self._open() as database:
            return pd.read_sql_query("SELECT * FROM unit ORDER BY unit", database)

    def measured(self, metric: str) -> list[str]:
        """The models and tasks that a metric was measured of."""
        with self._open() as database:
            rows = database.execute("SELECT DISTINCT model FROM scores WHERE metric = ? ORDER BY model", (metric,))
            return list(dict.fromkeys(model.partition(",")[0] for (model,) in rows))

    def _matrix(self, column: str, metric: str, split: str, model: str) -> pd.DataFrame:
        query = (
            f"SELECT round, client, {column} FROM scores WHERE metric = ? AND split = ? "
            "AND (model = ? OR model LIKE ? || ',%') ORDER BY round"
        )
        kind = VALUE if column == "value" else CLIENT
        rounds: dict[int, np.ndarray] = {}
        with self._open() as database:
            for number, client, values in database.execute(query, (metric, split, model, model)):
                line = rounds.setdefault(number, np.full(len(self.clients), np.nan))
                if values is not None:
                    line[np.frombuffer(client, CLIENT)] = np.frombuffer(values, kind)
        return pd.DataFrame(
            np.array(list(rounds.values())).reshape(len(rounds), len(self.clients)),
            index=pd.Index(list(rounds), name="round", dtype=int),
        )

    def _open(self) -> AbstractContextManager[sqlite3.Connection]:
        return _connected(self.folder)


def load_run(path: Path | str) -> Run:
    """Read a run folder, finished or not.

    Raises:
        UserError: it is not one, or nothing has been planned in it yet.
    """
    folder = Path(path)
    if not (folder / "run.sqlite").exists() or not (folder / "config.toml").exists():
        raise UserError(
            f"{folder} is not a run folder.",
            "It holds no run: neither a config nor a ledger.",
            "fairveil list runs, then one of those",
        )
    with _connected(folder) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if not tables:
            raise UserError(f"{folder} holds nothing yet.", PLANNING, "wait for its first round")
        if "scores" not in tables:
            raise UserError(
                f"{folder} was written by an earlier version of fairveil.",
                "Its metrics are kept in another form, which this version does not read.",
                "run it again: fairveil run, with its config.toml",
            )
        meta = dict(database.execute("SELECT key, value FROM meta"))
        query = 'SELECT name, "group", size, noise_multiplier, epsilon FROM client LEFT JOIN unit ON unit = client'
        clients = pd.read_sql_query(f"{query} ORDER BY client", database)
        rounds = pd.read_sql_query("SELECT round, seconds FROM round ORDER BY round", database)
    if clients.empty:
        raise UserError(f"{folder} holds nothing yet.", PLANNING, "wait for its first round")
    config = read_toml(folder / "config.toml", "restore it as it was")
    statement = _json(folder / "statement.json")
    if statement is None:
        raise UserError(f"{folder} holds no statement.", PLANNING, "wait for its first round")
    facts, settled = (json.loads(meta.pop(key, "{}")) for key in ("facts", "settled"))
    provenance = meta | {"data": published(meta["data"])}
    if facts.get("elsewhere"):
        clients["size"] = [client["size"] for client in config["data"]["options"]["clients"]]
    result = _json(folder / "result.json")
    return Run(folder, config, statement, result, facts | {"settled": settled}, provenance, clients, rounds)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return values


@contextmanager
def _connected(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database, for reading; what is wrong with it is found out when it is opened, or on the way."""
    try:
        with closing(_database(folder)) as database:
            yield database
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise RunFault(f"{folder} could not be read: its database is damaged ({error}).") from error


def _database(folder: Path) -> sqlite3.Connection:
    """Where not even a lock may be written beside it, it is read as a file that nobody changes.

    Where nobody writes, too: reading would leave an empty log beside it.
    """
    log = folder / "run.sqlite-wal"
    try:
        if log.exists():  # whoever writes has one
            return _opened(folder, "mode=ro")
    except sqlite3.OperationalError as error:
        if log.exists() and log.stat().st_size:  # it would be passed over, and with it the last rounds
            raise RunFault(
                f"{folder} could not be read: {error}. The run is not finished, and reading its last rounds takes a "
                "folder that can be written: copy it to one."
            ) from error
    try:
        return _opened(folder, "immutable=1")
    except sqlite3.OperationalError as error:
        raise RunFault(f"{folder} could not be read: {error}.") from error


def _opened(folder: Path, mode: str) -> sqlite3.Connection:
    database = sqlite3.connect(f"{(folder / 'run.sqlite').resolve().as_uri()}?{mode}", uri=True)
    try:
        database.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def _whole(packed: Sequence[bytes | None], length: Sequence[int]) -> pd.arrays.IntegerArray:
    """Columns of whole numbers below one another; what is missing is missing."""
    missing = np.repeat([part is None for part in packed], length)
    parts = [bytes(CLIENT.itemsize * n) if part is None else part for part, n in zip(packed, length, strict=True)]
    return pd.arrays.IntegerArray(np.frombuffer(b"".join(parts), CLIENT).astype(np.int64), missing.astype(bool))


def _round(request: str) -> int:
    """The round of a request: "round 3, ask 1"."""
    stage = request.partition(",")[0].split()
    return int(stage[1]) if stage[0] == "round" else 0
