"""A run on a federation: what Flower starts on the server for each `fairveil deploy submit`.

The algorithm, the plan, the ledger, the checkpoints and the statement are those of a run on one machine; only the
engine is another. First the clients say what kind of records they hold, as far as that is public. From this the run is
planned and priced, and proposed to each client with all that it will ever release. Each prices it by itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairveil.config import EngineConfig, RunConfig, load_config
from fairveil.data.declared import declared
from fairveil.data.federation import Federation
from fairveil.engine.flower import FlowerEngine, Patience, Roll
from fairveil.errors import PrivacyError, RunFault, UserError
from fairveil.guard import Proposal
from fairveil.plan import Plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import canonical
from fairveil.provenance import versions
from fairveil.remote import Envelope
from fairveil.run import Place, Progress, run_in
from fairveil.store import Store, write_whole

log = logging.getLogger(__name__)


class Federated(Place):
    """The machines of a federation.

    Args:
        run: names the run to the clients.
        patience: how long to wait for them, and how many must answer.
    """

    def __init__(self, roll: Roll, run: str, patience: Patience) -> None:
        self.roll, self.run, self.patience = roll, run, patience
        self._proposed = False

    def engine(self, plan: Plan, store: Store, federation: Federation) -> FlowerEngine:
        """The clients; the run is proposed to them when they are first needed."""
        engine = FlowerEngine(self.roll, self.run, federation, self.patience)
        if not self._proposed:
            accepted = engine.propose({c: proposal(plan, c).text() for c in plan.facts.clients.tolist()})
            log.info("accepted by %d of %d clients", len(accepted), len(self.roll.names))
            self._proposed = True
        return engine

    def root(self, plan: Plan, store: Store) -> str:
        """Of what the server draws and adds: always with its secret."""
        return f"{plan.root} {store.secret()}"


def proposal(plan: Plan, client: int) -> Proposal:
    """All that a run will ever ask of a client."""
    unit = FEDERATION if plan.pooled else client
    releases = sorted((canonical(mechanism), count) for mechanism, count in plan.releases[unit].items())
    spec = plan.model.spec
    privacy = plan.config.privacy
    return Proposal(client, plan.unit, privacy.delta, spec.name, dict(spec.options), tuple(releases))


def carry_out(grid: Any, folder: Path, place: type[Federated] = Federated, progress: Progress | None = None) -> None:
    """Run what was submitted in this folder, or go on with it; whatever goes wrong is written there as well.

    Args:
        grid: Flower's.
        folder: with submitted.toml, and submission.json: {"run": its name to clients, "clients": how many take part}.
    """
    try:
        submitted = load_config(folder / "submitted.toml")
        submission = json.loads((folder / "submission.json").read_text())
        roll = Roll(grid)
        if (folder / "config.toml").exists():
            config = load_config(folder / "config.toml").model_copy(update={"engine": _engine(submitted)})
        else:
            config = _with_clients(submitted, roll, int(submission["clients"]))
        roll.names = [client["name"] for client in config.data.options["clients"]]
        patience = _patience(config, len(roll.names))
        run_in(config, folder, place=place(roll, submission["run"], patience), progress=progress)
    except (UserError, PrivacyError, RunFault) as error:
        code = 2 if isinstance(error, UserError) else 1
        write_whole(folder / "failure.json", json.dumps({"error": str(error), "code": code}).encode())
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        write_whole(folder / "failure.json", json.dumps({"error": told, "code": 1}).encode())
        raise


def _patience(config: RunConfig, clients: int) -> Patience:
    engine = config.engine
    minimum = clients if engine.minimum_clients is None else min(engine.minimum_clients, clients)
    return Patience(engine.timeout, engine.retries, minimum)


def _with_clients(config: RunConfig, roll: Roll, expected: int) -> RunConfig:
    """The config with what the clients declare of themselves; waits until enough of them are there."""
    patience = _patience(config, expected)
    deadline = time.monotonic() + patience.timeout * (patience.retries + 1)
    while len(roll.present()) < expected and time.monotonic() < deadline:
        time.sleep(0.1)
    asked = {name: Envelope("describe") for name in roll.present()}
    answers = dict(roll.ask(asked, replace(patience, minimum=1)))
    described = [_description(name, answer) for name, answer in answers.items() if answer.kind == "description"]
    if len(described) < patience.minimum:
        raise RunFault(
            f"{len(described)} of {expected} clients are there ({', '.join(sorted(answers)) or 'none'}), and "
            f"{patience.minimum} must be (engine.minimum_clients)."
        )
    data = config.data.model_copy(update={"options": declared(described)})
    privacy = config.privacy.model_copy(update={"noise": "secret"})  # as it is here, whatever was asked for
    return config.model_copy(update={"data": data, "privacy": privacy, "engine": _engine(config)})


def _engine(config: RunConfig) -> EngineConfig:
    """As the config has it, and as it is."""
    return config.engine.model_copy(update={"kind": "flower"})


def _description(name: str, answer: Envelope) -> dict[str, Any]:
    """What a client declares, under the name by which its key was registered."""
    values: Mapping[str, Any] = answer.values
    try:
        if values["name"] != name:
            raise UserError(
                f"the client whose key was registered as {name} calls itself {values['name']}.",
                "Clients are known by the names under which the server's keeper has registered their keys.",
                f'name = "{name}" in its client.toml, or register the key under that name',
            )
        if values["fairveil"] != versions()["fairveil"]:
            raise UserError(
                f"{name} has fairveil {values['fairveil']}, the server {versions()['fairveil']}.",
                "Client and server must mean the same by every task and mechanism.",
                "the same version everywhere",
            )
        columns = [(at, -1 if missing is None else missing) for at, missing in json.loads(values["columns"])]
        return {
            "name": name, "size": int(values["size"]), "group": str(values["group"]),
            "features": json.loads(values["features"]), "classes": int(values["classes"]),
            "record": str(values["record"]), "tokens": None if values["tokens"] < 0 else int(values["tokens"]),
            "columns": columns, "statistics_noise": float(values["statistics_noise"]),
            "public": json.loads(values["public"]),
        }  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise RunFault(f"{name} describes its records in a way that is not understood: {error!r}") from error


def main(grid: Any, run_config: Mapping[str, Any]) -> None:
    """What the app does when Flower starts it."""
    carry_out(grid, Path(run_config["folder"]))
