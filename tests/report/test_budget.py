"""What a run has spent, priced anew from its ledger: against the price of what was planned and done, by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from fairveil.algorithms.global_ import Global
from fairveil.config import make_config
from fairveil.plan import Plan, make_plan
from fairveil.privacy.accounting import SelectionDpEvent, price
from fairveil.privacy.ledger import Entry
from fairveil.privacy.statement import Statement
from fairveil.privacy.training import NoisyTraining
from fairveil.reading import Run, load_run
from fairveil.report import build_page
from fairveil.report.budget import MOST_PRICES, budget_by_round, spending
from fairveil.report.run_page import run_page
from fairveil.run import Interrupted, RoundReport, begin, run_plan
from fairveil.session import Terms
from fairveil.store import Store

NOISE = {"noise_multiplier": 1.0, "delta": 1e-3}
LOCAL = {"rounds": 4, "batch_size": 64, "learning_rate": 1.0}


@pytest.fixture
def ran(small: dict[str, Any], runs: Path) -> Callable[..., tuple[Plan, Run]]:
    """Run the small config with other sections, up to a round, and read it."""

    def run(*, stop: int | None = None, **sections: Any) -> tuple[Plan, Run]:
        plan = make_plan(make_config(small | sections))

        def watch(report: RoundReport) -> None:
            if report.round == stop:
                raise KeyboardInterrupt

        if stop == 0:
            with Store(runs / "begun") as store:
                begin(plan, store)
        elif stop is not None:
            with pytest.raises(Interrupted):
                run_plan(plan, runs=runs, progress=watch)
        else:
            run_plan(plan, runs=runs)
        (folder,) = runs.iterdir()
        return plan, load_run(folder)

    return run


def rounds_of(size: int, rounds: int, z: float = 1.0, batch: int = 64) -> Counter[Any]:
    """Events of so many rounds of local DP-SGD, by hand: ceil(N/b) steps a round, each record drawn at b/N."""
    return Counter({PoissonSampledDpEvent(batch / size, GaussianDpEvent(z)): rounds * math.ceil(size / batch)})


def check_by_round(table: pd.DataFrame, posted: float, rounds: list[int]) -> None:
    """It rises, kind by kind, to what was posted; kinds add up to the total."""
    assert table["round"].tolist() == rounds
    total = table.drop(columns="round").sum(axis=1).to_numpy()
    assert (table.to_numpy() >= 0).all() and (np.diff(total) > 0).all()
    assert total[-1] == pytest.approx(posted, rel=1e-12)


def test_a_client_has_spent_what_its_rounds_cost(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """287 declared records at every client; four rounds in all."""
    _, run = ran(privacy=NOISE)
    found, expected = spending(run), price(rounds_of(287, 4), 1e-3)
    assert found.planned == found.posted == expected and found.unit == 0
    check_by_round(found.by_round, expected.epsilon, [1, 2, 3, 4])
    for number, epsilon in zip([1, 2, 3, 4], found.by_round["model update"], strict=True):
        assert epsilon == pytest.approx(price(rounds_of(287, number), 1e-3).epsilon, rel=1e-12)


def test_a_run_that_was_stopped_has_spent_what_it_did(ran: Callable[..., tuple[Plan, Run]]) -> None:
    _, run = ran(privacy=NOISE, stop=2)
    found = spending(run)
    assert found.planned == price(rounds_of(287, 4), 1e-3) and found.posted == price(rounds_of(287, 2), 1e-3)
    check_by_round(found.by_round, price(rounds_of(287, 2), 1e-3).epsilon, [1, 2])


def test_before_the_first_round_nothing_is_spent_and_the_page_is_there(ran: Callable[..., tuple[Plan, Run]]) -> None:
    plan, run = ran(stop=0)
    found = spending(run)
    assert found.planned == plan.price and found.posted is not None and found.posted.epsilon == 0
    assert found.by_round.empty and budget_by_round(run) is None
    assert "none yet" in build_page(run.folder).html()


def test_the_client_that_pays_most_is_the_one_that_is_priced(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """With the same noise a small client draws a larger share of its records, and pays more."""
    split = {"kind": "iid", "clients": 4, "spread": 0.8}
    plan, run = ran(privacy=NOISE, data={"dataset": "digits", "split": split})
    found, smallest = spending(run), int(plan.facts.size.argmin())
    assert len(set(plan.facts.size)) > 1 and plan.facts.size[found.unit] == plan.facts.size[smallest]
    expected = price(rounds_of(int(plan.facts.size.min()), 4, batch=min(64, int(plan.facts.size.min()))), 1e-3)
    assert found.planned == found.posted == expected


def test_the_federation_has_spent_what_its_sums_cost(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """Client level: one ledger, one sum of a Poisson draw of clients a round."""
    _, run = ran(privacy=NOISE, algorithm={"name": "dp-fedavg", "rounds": 4, "sample_rate": 0.5})
    found = spending(run)
    expected = price({PoissonSampledDpEvent(0.5, GaussianDpEvent(1.0)): 4}, 1e-3)
    assert found.unit == -1 and found.planned == found.posted == expected
    check_by_round(found.by_round, expected.epsilon, [1, 2, 3, 4])
    chart = budget_by_round(run)
    assert chart is not None and "Of the federation" in chart.caption


def test_a_record_that_several_hold_is_paid_for_by_all_of_them(ran: Callable[..., tuple[Plan, Run]]) -> None:
    split = {"kind": "rotate", "degrees": [0, 90], "clients": [3, 3], "records": 200, "overlap": True}
    plan, run = ran(privacy=NOISE, data={"dataset": "digits", "split": split})
    assert plan.holders > 1
    size = int(plan.facts.size[0])
    expected = price(Counter({event: plan.holders * n for event, n in rounds_of(size, 4).items()}), 1e-3)
    assert spending(run).planned == spending(run).posted == expected
    check_by_round(spending(run).by_round, expected.epsilon, [1, 2, 3, 4])


def test_replacing_a_record_is_priced_as_such(ran: Callable[..., tuple[Plan, Run]]) -> None:
    _, run = ran(privacy=NOISE | {"adjacency": "replace"})
    found, expected = spending(run), price(rounds_of(287, 4), 1e-3, adjacency="replace")
    assert found.planned == found.posted == expected
    assert expected.epsilon > price(rounds_of(287, 4), 1e-3).epsilon
    check_by_round(found.by_round, expected.epsilon, [1, 2, 3, 4])


def test_kinds_of_release_share_the_price_of_all(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """Private choices in two of four rounds. The price is that of the mixture, not of the kinds one by one."""
    algorithm = {"name": "ifca", **LOCAL, "clusters": 2, "select_rounds": 2, "select_epsilon": 0.5}
    _, run = ran(privacy=NOISE, algorithm=algorithm)
    found = spending(run)
    expected = price(rounds_of(287, 4) + Counter({SelectionDpEvent(0.5): 2}), 1e-3)
    assert found.planned == found.posted == expected
    assert set(found.by_round.columns) == {"round", "model update", "choice of a model"}
    check_by_round(found.by_round, expected.epsilon, [1, 2, 3, 4])
    alone = sum(price(events, 1e-3).epsilon for events in (rounds_of(287, 4), Counter({SelectionDpEvent(0.5): 2})))
    assert expected.epsilon < alone


def test_statistics_before_training_are_spent_in_round_0(ran: Callable[..., tuple[Plan, Run]], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame({"client": np.repeat(["a", "b"], 100), "x": random.uniform(0, 9, 200)})
    table.assign(y=(table["x"] > 4).astype(int)).to_csv(tmp_path / "t.csv", index=False)
    prepare = {"x": {"kind": "standard", "low": 0, "high": 9}}
    options = {"path": str(tmp_path / "t.csv"), "prepare": prepare, "statistics_noise": 8.0}
    plan, run = ran(privacy=NOISE, data={"dataset": "file", "options": options})
    size = int(plan.facts.size[0])
    expected = price(rounds_of(size, 4) + Counter({GaussianDpEvent(8.0): 1}), 1e-3)
    found = spending(run)
    assert found.planned == found.posted == expected
    check_by_round(found.by_round, expected.epsilon, [0, 1, 2, 3, 4])
    first = found.by_round.iloc[0]
    assert first["model update"] == 0 and first["column statistics"] == pytest.approx(
        price({GaussianDpEvent(8.0): 1}, 1e-3).epsilon
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ifca", "clusters": 2, "faithful": True},
        {"name": "rc-dpfl", "clusters": 2, "switch_round": 2, "faithful": True},
    ],
)
def test_what_leaks_is_left_out_and_said_to_be(ran: Callable[..., tuple[Plan, Run]], algorithm: dict[str, Any]) -> None:
    """The guarantee is none; the price of the rest is told beside it, for the client whose rest costs most.

    Sizes differ, so that with the same noise the client that pays most is not simply the first.
    """
    split = {"kind": "iid", "clients": 4, "spread": 0.8}
    plan, run = ran(privacy=NOISE, data={"dataset": "digits", "split": split}, algorithm=LOCAL | algorithm)
    assert math.isinf(plan.price.epsilon) and plan.statement().leaks == ("exact choice of a model",)
    found = spending(run)
    assert found.planned is not None and found.planned.epsilon == plan.statement().epsilon_without_leaks < math.inf
    assert found.posted == found.planned
    check_by_round(found.by_round, found.planned.epsilon, [1, 2, 3, 4])
    assert (found.by_round.get("exact choice of a model", pd.Series([0.0])) == 0).all()
    html = build_page(run.folder).html()
    assert "Without exact choice of a model, which have no noise." in html and "MORE THAN STATED" not in html


def test_without_any_noise_no_price_is_drawn(ran: Callable[..., tuple[Plan, Run]]) -> None:
    _, run = ran(privacy={"noise_multiplier": 0.0, "delta": 1e-3})
    found = spending(run)
    assert found.planned is not None and math.isinf(found.planned.epsilon) and budget_by_round(run) is None
    assert "unbounded" in build_page(run.folder).html()


@dataclass(frozen=True)
class Mine(NoisyTraining):
    """A mechanism of a user: the library does not know what it does."""


class Own(Global):
    name: ClassVar[str] = "own"

    def training(self, terms: Terms) -> NoisyTraining:
        return Mine(**vars(super().training(terms)))


@pytest.mark.parametrize("stop", [None, 2])
def test_a_mechanism_of_a_user_is_not_priced_here(ran: Callable[..., tuple[Plan, Run]], stop: int | None) -> None:
    """The page says so. Of a run under way it does not claim that nothing is spent: only the plan is known."""
    plan, run = ran(algorithm={"name": f"{__name__}:Own", **LOCAL}, stop=stop)
    found = spending(run)
    assert found.planned is None and found.posted is None and found.by_round.empty and budget_by_round(run) is None
    if stop:  # as it is until the run ends
        (run.folder / "statement.json").write_text(json.dumps(plan.statement().to_json()))
    html = build_page(run.folder).html()
    assert "could not be computed anew" in html and "0 of 8" not in html
    assert ("up to all of" in html) == bool(stop)


def test_nothing_that_is_released_costs_nothing(ran: Callable[..., tuple[Plan, Run]]) -> None:
    _, run = ran(algorithm={"name": f"{__name__}:Silent", **LOCAL})
    found = spending(run)
    assert found.planned is not None and found.planned.epsilon == 0 and found.by_round.empty
    assert budget_by_round(run) is None and "0 of 0" in build_page(run.folder).html()


class Silent(Global):
    """Never asks anybody."""

    name: ClassVar[str] = "silent"

    def releases(self, terms: Terms) -> Counter[Any]:
        return Counter()

    def round(self, session: Any, state: Any) -> Any:
        return state


def test_a_long_run_is_priced_at_some_rounds_and_at_the_last(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """Its ledger is written by hand: forty rounds of the one client that is looked at."""
    plan, run = ran(privacy=NOISE | {"accountant": "rdp"}, algorithm=LOCAL | {"name": "global", "rounds": 40}, stop=0)
    (training,) = plan.releases[0]
    with Store(run.folder) as store:
        store.ledger.post([Entry(0, f"round {number}, ask 1", training, b"", b"") for number in range(1, 41)])
    table = spending(run).by_round
    assert len(table) == MOST_PRICES and table["round"].iloc[[0, -1]].tolist() == [1, 40]
    check_by_round(table, plan.price.epsilon, table["round"].tolist())


def test_the_figure_draws_what_was_priced(ran: Callable[..., tuple[Plan, Run]]) -> None:
    _, run = ran(privacy=NOISE)
    chart, found = budget_by_round(run), spending(run)
    assert chart is not None and found.planned is not None
    assert chart.data.equals(found.by_round) and len(chart.marks) == 4
    (axes,) = chart.figure.axes
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx(found.by_round["model update"].tolist())
    assert [mark[2] for mark in chart.marks] == pytest.approx(heights)
    assert axes.lines[0].get_ydata()[0] == found.planned.epsilon  # type: ignore[index]


def test_the_page_compares_the_ledger_with_the_statement(ran: Callable[..., tuple[Plan, Run]]) -> None:
    """A statement that promises less than the plan costs is caught."""
    _, run = ran(privacy=NOISE, stop=2)
    html = run_page(run).html()
    assert "as stated" in html and "MORE THAN STATED" not in html
    lower = Statement.from_json(run.statement | {"epsilon": 0.5})
    (run.folder / "statement.json").write_text(json.dumps(lower.to_json()))
    assert "MORE THAN STATED (0.5)" in run_page(load_run(run.folder)).html()
