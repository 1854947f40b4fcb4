"""How long votes take once teachers are trained: `python -m benchmarks.votes [--out FILE]`.

200 agents with 300 MNIST digits each, 500 queries of USPS, 10 classes (examples/voting/mnist-usps.toml): from the
request to the published winners, ledger included, with the workers started before. Three times each, the fastest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.common import RESULTS, say
from fairveil.algorithms.voting import Voting
from fairveil.config import load_config
from fairveil.plan import Plan, make_plan
from fairveil.provenance import commit
from fairveil.run import HERE, begin
from fairveil.session import Session
from fairveil.store import Store

EXAMPLE = Path(__file__).parents[1] / "examples" / "voting" / "mnist-usps-agents.toml"
TIMES = 3
WAYS: dict[str, list[str]] = {
    "pate-fl": ["algorithm.local_epochs=1"],  # a better teacher takes no longer to ask
    "knn-fl, pixels": ["algorithm.name=knn-fl"],
    "knn-fl, gradients": ["algorithm.name=knn-fl", "algorithm.features=hog"],
}


def seconds(plan: Plan) -> float:
    """Of the fastest of some rounds of votes, after the clients have prepared themselves."""
    algorithm: Any = plan.algorithm
    assert isinstance(algorithm, Voting) and plan.federation.server is not None
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "run") as store:
        begin(plan, store)
        with HERE.engine(plan, store, plan.federation) as engine:
            session = Session(
                plan.facts, plan.terms, model=plan.model, engine=engine, ledger=store.ledger, seed=0,
                root="benchmark", personal={}, observe=lambda *measured: None, public=plan.federation.server.x,
            )  # fmt: skip
            session.begin(1)
            algorithm.prepare(session)

            def vote(number: int) -> None:
                first, last = algorithm.part(number)
                queries = session.public[first:last].flatten(1)
                mechanism = algorithm.in_round(session.federation_terms, number)
                session.sum(type(algorithm).task, session.cohort(1.0), mechanism, shared={"queries": queries})

            return min(_timed(lambda number=number: vote(number)) for number in range(1, TIMES + 1))


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "voting-seconds.csv")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = []
    for name, settings in WAYS.items():
        # so many rounds of 500 queries each
        asked = [f"algorithm.queries={500 * TIMES}", f"algorithm.rounds={TIMES}", *settings]
        plan = make_plan(load_config(EXAMPLE, asked))
        row = {"method": name, "agents": len(plan.facts.size), "queries": 500, "classes": plan.facts.classes}
        rows.append(row | {"seconds": round(seconds(plan), 3), "commit": commit()})
        say(f"{name}: {rows[-1]['seconds']} s")
    pd.DataFrame(rows).to_csv(out, index=False)


if __name__ == "__main__":
    main()
