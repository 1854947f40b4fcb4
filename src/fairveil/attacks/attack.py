"""Attacks on a config, or on a run: its plan is carried out again, and what is found is kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fairveil.attacks.audit import SIGNIFICANCE, Audit, audit
from fairveil.attacks.inversion import Inversion, attack_updates
from fairveil.attacks.membership import Membership, attack_members
from fairveil.config import load_config
from fairveil.errors import UserError
from fairveil.plan import Plan, make_plan
from fairveil.run import planned
from fairveil.store import Store

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Attacked:
    """What attacks have found.

    Attributes:
        members, pictures: None: not asked for.
        folder: of the run that was attacked, where the report finds it; None: a config was.
    """

    audit: Audit
    members: Membership | None
    pictures: Inversion | None
    folder: Path | None

    def to_json(self) -> dict[str, Any]:
        found = self.audit.to_json()
        if self.members is not None:
            found["membership"] = self.members.to_json()
        if self.pictures is not None:
            found["inversion"] = self.pictures.to_json()
        return found


def attack(
    path: Path, settings: Sequence[str] = (), *, canaries: int = 1000, rehearsals: int | None = None,
    guesses: int | None = None, significance: float = SIGNIFICANCE, members: bool = False, pictures: bool = False,
    shadows: int = 16, tell: Tell = lambda what, done, of: None,
) -> Attacked:  # fmt: skip
    """Audit a config, or a run with the noise that was solved for it; and look for members and records, if asked to.

    Args:
        path: of a config, or the folder of a run.
        settings: laid over a config.
        tell: takes what is done, how often it is, and how often it will be.

    Raises:
        UserError: a folder that is no run, one with settings; whatever the attacks refuse.
    """
    with ExitStack() as opened:
        store = opened.enter_context(Store(path)) if _is_run(path, settings) else None
        plan = _plan(path, settings, store)
        seen = attack_updates(plan) if pictures else None  # first what is refused soonest
        audited = audit(
            plan, canaries=canaries, rehearsals=rehearsals, guesses=guesses, significance=significance,
            tell=partial(tell, "audit"),
        )  # fmt: skip
        told = attack_members(plan, shadows=shadows, tell=partial(tell, "membership")) if members else None
        if store is not None:
            for name, found in (("audit", audited), ("membership", told), ("inversion", seen)):
                if found is not None:
                    text = json.dumps(found.to_json(), indent=None if name == "inversion" else 2, allow_nan=False)
                    store.write(f"attacks/{name}.json", text.encode())
    return Attacked(audited, told, seen, None if store is None else path)


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
