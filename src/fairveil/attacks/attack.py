"""Attacks on a config, or on a run: its plan is carried out again, and what is found is kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairveil.attacks.audit import SIGNIFICANCE, Audit, audit
from fairveil.config import load_config
from fairveil.errors import UserError
from fairveil.plan import Plan, make_plan
from fairveil.run import planned
from fairveil.store import Store


@dataclass(frozen=True)
class Attacked:
    """What attacks have found.

    Attributes:
        folder: of the run that was attacked, where the report finds it; None: a config was.
    """

    audit: Audit
    folder: Path | None

    def to_json(self) -> dict[str, Any]:
        return self.audit.to_json()


def attack(
    path: Path, settings: Sequence[str] = (), *, canaries: int = 1000, rehearsals: int | None = None,
    guesses: int | None = None, significance: float = SIGNIFICANCE,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Attacked:  # fmt: skip
    """Audit a config, or a run with the noise that was solved for it.

    Args:
        path: of a config, or the folder of a run.
        settings: laid over a config.

    Raises:
        UserError: a folder that is no run, one with settings; whatever `audit` refuses.
    """
    with ExitStack() as opened:
        store = opened.enter_context(Store(path)) if _is_run(path, settings) else None
        found = audit(
            _plan(path, settings, store), canaries=canaries, rehearsals=rehearsals, guesses=guesses,
            significance=significance, tell=tell,
        )  # fmt: skip
        if store is not None:
            store.write("attacks/audit.json", json.dumps(found.to_json(), indent=2).encode())
    return Attacked(found, None if store is None else path)


def _is_run(path: Path, settings: Sequence[str]) -> bool:
    if not path.is_dir():
        return False
    if not (path / "config.toml").exists():
        raise UserError(
            f"{path} is not a run folder.",
            "It has no config.toml, so nothing was planned there. Nothing was attacked.",
            "fairveil list runs, then one of those; or a config",
        )
    if settings:
        raise UserError(
            f"--set {settings[0]} cannot change what a run has promised.",
            "A run is attacked as it was planned. Nothing was attacked.",
            "its config, with that setting",
        )
    return True


def _plan(path: Path, settings: Sequence[str], store: Store | None) -> Plan:
    if store is None:
        return make_plan(load_config(path, settings))
    config = load_config(path / "config.toml")
    return planned(store, config) or make_plan(config)
