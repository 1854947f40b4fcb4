"""What attacks find on scikit-learn's digits: `python -m benchmarks.attacks [--out FOLDER]`. About ten minutes.

`attacks-membership.csv`: the demo's ten clients (examples/digits), with and without noise, 16 shadows.
`attacks-inversion.csv`: one record, looked for in what it would send alone, by network and strength of protection.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.common import RESULTS, ROOT, say
from fairveil.attacks.inversion import attack_updates
from fairveil.attacks.membership import attack_members
from fairveil.config import make_config
from fairveil.plan import Plan, make_plan
from fairveil.privacy.statement import json_number
from fairveil.provenance import commit

EXAMPLES = ROOT / "examples" / "digits"
BUDGET: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-3}
NOTHING: dict[str, Any] = {"noise_multiplier": 0.0, "delta": 1e-3}
MEMBERS = {
    "global, epsilon 8": ("global", BUDGET),
    "r-dpcfl, epsilon 8": ("r-dpcfl", BUDGET),
    "global, without noise": ("global", NOTHING),
    "r-dpcfl, without noise": ("r-dpcfl", NOTHING),
}
NETWORKS = ("fairveil.attacks.dlg:LeNet", "logistic", "mlp", "cnn")
METRIC = {"name": "metric-pfl", "faithful": True, "rounds": 10, "learning_rate": 0.5}
SYSTEMS = {"record": ({"learning_rate": 0.5}, BUDGET), "metric": (METRIC, {"noise_multiplier": 1.0})}


def planned(name: str, privacy: Mapping[str, Any], algorithm: Mapping[str, Any], **sections: Any) -> Plan:
    """An example under another budget, with other hyper-parameters; a name of its own exchanges the algorithm."""
    values = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    own = {} if "name" in algorithm else values["algorithm"]
    return make_plan(make_config({**values, "algorithm": {**own, **algorithm}, "privacy": privacy, **sections}))


def members() -> Iterator[dict[str, Any]]:
    for what, (name, privacy) in MEMBERS.items():
        plan = planned(name, privacy, {})
        found = attack_members(plan)
        for attack, exposure in found.found.items():
            for rates in (exposure.everyone, *exposure.groups):
                row: dict[str, Any] = {"run": what, "attack": attack, "group": rates.name or "all"}
                row |= {"records": rates.records, "models": found.models, "auc": rates.auc.value}
                row |= {"auc_low": rates.auc.low, "auc_high": rates.auc.high}
                row |= {"tpr_0.1%": rates.tpr[0].value, "tpr_1%": rates.tpr[1].value}
                if found.promise is not None:
                    row |= {"allowed_auc": found.promise.auc, "allowed_1%": found.promise.most(0.01)}
                say(str(row))
                yield row | _made(plan)


def pictures() -> Iterator[dict[str, Any]]:
    for network in NETWORKS:
        for unit, (algorithm, privacy) in SYSTEMS.items():
            plan = planned("global", privacy, algorithm, model={"name": network})
            found = attack_updates(plan)
            guess = found.guesses["mean"].psnr
            for attempt in found.attempts:
                row: dict[str, Any] = {"network": network.partition(":")[2] or network, "unit": unit}
                row |= {"parameters": plan.facts.parameters, "strength": attempt.strength, "seen": attempt.seen}
                row |= {"noise_multiplier": attempt.noise_multiplier, "psnr": json_number(attempt.likeness.psnr)}
                row |= {"ssim": attempt.likeness.ssim, "guess_psnr": guess}
                say(str(row))
                yield row | _made(plan)


def _made(plan: Plan) -> dict[str, Any]:
    return {"seed": plan.config.seed, "config_hash": plan.config.digest(), "commit": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for name, rows in (("inversion", pictures()), ("membership", members())):
        pd.DataFrame(rows).to_csv(out / f"attacks-{name}.csv", index=False)


if __name__ == "__main__":
    main()
