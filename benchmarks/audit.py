"""What an audit can see: `python -m benchmarks.audit [--out FOLDER]`. About half an hour.

`audit-power.csv`: local training whose noise is less than what is claimed, by a factor. Ten clients of 50 records in
200 dimensions, logistic regression, two rounds with all records, delta 1e-5: the noise multiplier alone decides, and 1
is sound. `audit-algorithms.csv`: every registered algorithm as it is, on scikit-learn's digits at epsilon 4, delta 1e-5
(metric privacy: whatever its noise costs), 1,000 canaries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch

from benchmarks.common import RESULTS, say
from fairveil.algorithms import ALGORITHMS
from fairveil.attacks.audit import Audit, audit
from fairveil.config import make_config
from fairveil.plan import Plan, make_plan
from fairveil.privacy import mechanisms, training
from fairveil.privacy.statement import json_number
from fairveil.provenance import commit

EPSILONS, FACTORS, CANARIES, SEEDS = (1.0, 2.0, 4.0, 8.0), (1.0, 0.7, 0.5, 0.3, 0.0), (1000, 5000, 20_000), (0, 1, 2)
PER_REHEARSAL = 1000


def whole_batches(epsilon: float, seed: int) -> Plan:
    """Every step takes all records."""
    options = {"clients": [10], "records": 50, "test_records": 1, "features": 200, "classes": 10}
    values = {
        "seed": seed,
        "data": {"dataset": "gaussian-clusters", "options": options},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 2, "batch_size": 50, "learning_rate": 1.0},
        "privacy": {"epsilon": epsilon, "delta": 1e-5},
        "engine": {"workers": 1},
    }
    return make_plan(make_config(values))


@contextmanager
def noise_times(factor: float) -> Iterator[None]:
    """So much of the noise that is claimed."""
    with patch.object(training, "noise_std", lambda bound, z: factor * mechanisms.noise_std(bound, z)):
        yield


def power() -> Iterator[dict[str, Any]]:
    for epsilon in EPSILONS:
        for seed in SEEDS:
            plan = whole_batches(epsilon, seed)
            for canaries in CANARIES:
                for factor in FACTORS:
                    with noise_times(factor):
                        found = audit(plan, canaries=canaries, rehearsals=-(-canaries // PER_REHEARSAL))
                    yield {"epsilon": epsilon, "seed": seed, "noise": factor, **_row(found, plan)}


def algorithms() -> Iterator[dict[str, Any]]:
    for name, cls in sorted(ALGORITHMS.items()):
        split: dict[str, Any] = {"kind": "iid", "clients": 100 if cls.unit != "record" else 10}
        algorithm: dict[str, Any] = {"name": name}
        privacy: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5}
        if cls.unit == "metric":
            privacy, algorithm["hypotheses"] = {"noise_multiplier": 100.0}, 1
        data: dict[str, Any] = {"dataset": "digits", "split": split}
        if cls.needs_public:
            data["server"] = {"dataset": "digits", "rows": "test"}
            algorithm |= {"student_steps": 1, "vat": 0.0}
        elif cls.unit != "metric":
            algorithm["rounds"] = 10
        else:
            algorithm["rounds"] = 2
        config = {"data": data, "model": {"name": "logistic"}, "algorithm": algorithm, "privacy": privacy}
        plan = make_plan(make_config(config))
        yield {"algorithm": name, **_row(audit(plan, canaries=1000), plan)}


def _row(found: Audit, plan: Plan) -> dict[str, Any]:
    kept = ("canaries", "rehearsals", "guesses", "correct", "epsilon_lower_bound", "epsilon_lower_bound_at_delta")
    row = {"epsilon_claimed": json_number(found.epsilon_claimed)} | {name: getattr(found, name) for name in kept}
    row |= {"ceiling": found.ceiling, "confidence": found.confidence, "alarm": found.alarm, "seconds": found.seconds}
    say(f"{plan.config.algorithm.name}: {row}")
    return row | {"config_hash": plan.config.digest(), "commit": commit()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for name, rows in (("algorithms", algorithms()), ("power", power())):
        pd.DataFrame(rows).to_csv(out / f"audit-{name}.csv", index=False)


if __name__ == "__main__":
    main()
