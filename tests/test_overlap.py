"""Clients that overlap: the unit is the original record, and what all its holders release composes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from fairveil.config import make_config
from fairveil.data.federation import Federation
from fairveil.data.shares import Columns
from fairveil.errors import UserError
from fairveil.plan import Plan, make_plan
from fairveil.run import start_run
from fairveil.store import Store

OVERLAP = {"kind": "rotate", "degrees": [0, 90], "clients": [3, 3], "records": 200, "overlap": True}


def planned(small: dict[str, Any], split: dict[str, Any], **privacy: float) -> Plan:
    config = small | {"data": {"dataset": "digits", "split": split}}
    if privacy:
        config |= {"privacy": {"delta": 1e-3, **privacy}}
    return make_plan(make_config(config))


def holders_of_each_row(federation: Federation) -> Counter[int]:
    source = federation.source
    assert isinstance(source, Columns)
    return Counter(row for client in range(federation.clients) for row in source.share[client].tolist())


def test_the_price_is_that_of_every_holder_together(small: dict[str, Any]) -> None:
    """Against dp-accounting asked directly: `holders` times the steps of one client."""
    plan = planned(small, OVERLAP, noise_multiplier=1.5)
    held = max(holders_of_each_row(plan.federation).values())
    assert plan.holders == plan.federation.holders == held > 1
    (training, rounds), *rest = plan.releases[0].items()
    assert not rest and set(map(frozenset, plan.releases.values())) == {frozenset({training})}
    assert isinstance(training.event, dpa.SelfComposedDpEvent)
    accountant = PLDAccountant()
    accountant.compose(training.event.event, training.event.count * rounds * held)
    assert plan.price.epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=2e-3)
    alone = planned(small, OVERLAP | {"overlap": False}, noise_multiplier=1.5)
    assert alone.holders == 1 and alone.price.epsilon < plan.price.epsilon


def test_a_budget_is_kept_across_all_holders_by_more_noise(small: dict[str, Any]) -> None:
    together, alone = planned(small, OVERLAP), planned(small, OVERLAP | {"overlap": False})
    assert together.price.epsilon <= 8 and alone.price.epsilon <= 8
    assert together.units[0].noise_multiplier > 1.2 * alone.units[0].noise_multiplier


def test_removing_an_original_record_touches_no_more_clients_than_the_price_says(small: dict[str, Any]) -> None:
    federation = planned(small, OVERLAP).federation
    source = federation.source
    assert isinstance(source, Columns)
    for row in range(0, 1438, 7):
        touched = [client for client in range(federation.clients) if row in source.share[client]]
        assert len(touched) <= federation.holders
        assert all((source.share[client] == row).sum() == 1 for client in touched)  # once with each holder


def test_the_statement_names_the_unit(small: dict[str, Any], runs: Path) -> None:
    config = make_config(small | {"data": {"dataset": "digits", "split": OVERLAP}})
    shown: list[float] = []
    result = start_run(config, runs=runs, progress=lambda report: shown.append(report.epsilon_spent))
    text = result.statement.sentence()
    assert "what all clients send together" in text
    assert f"up to {result.statement.holders} hold one record" in text and "one image" in text
    assert result.statement.epsilon_spent == pytest.approx(result.statement.epsilon, rel=1e-9)
    assert shown == sorted(shown) and shown[-1] <= result.statement.epsilon
    assert shown[0] > result.statement.epsilon / 8  # a first round of one client alone would cost less
    with Store(result.folder) as store:
        assert {unit.epsilon for unit in store.units()} == {result.statement.epsilon}


def test_holders_that_posted_different_things_are_bounded_by_the_most_of_any(small: dict[str, Any]) -> None:
    """A and B together can cost more than twice A, and more than twice B."""
    plan = planned(small, OVERLAP, noise_multiplier=1.5)
    posted = {0: Counter(a=3, b=1), 1: Counter(a=1, b=2)}
    assert plan.by_record(posted) == [Counter(a=3, b=2)]
    alone = planned(small, OVERLAP | {"overlap": False}, noise_multiplier=1.5)
    assert alone.by_record(posted) == list(posted.values())


def test_delta_is_below_one_in_all_records_that_are_held(small: dict[str, Any]) -> None:
    """One client holds 200, so 1/200 would do; together they hold about 850 different ones."""
    with pytest.raises(UserError, match=r"delta = 0\.002 is too large") as error:
        planned(small, OVERLAP, noise_multiplier=1.5, delta=0.002)
    assert "Overlapping clients hold" in error.value.why
    assert planned(small, OVERLAP | {"overlap": False}, noise_multiplier=1.5, delta=0.002)


def test_client_level_prices_clients_and_says_that_a_record_may_be_with_several(small: dict[str, Any]) -> None:
    algorithm = {"name": "dp-fedavg", "rounds": 3}
    plan = planned(small | {"algorithm": algorithm}, OVERLAP, noise_multiplier=1.0)
    alone = planned(small | {"algorithm": algorithm}, OVERLAP | {"overlap": False}, noise_multiplier=1.0)
    assert plan.holders == 1 and plan.price == alone.price
    assert "one and the same record" in plan.statement().not_covered
    assert "one and the same record" not in alone.statement().not_covered


def test_overlapping_clients_of_different_sizes_are_refused() -> None:
    """One client's releases stand for those of every holder, which holds among equals only."""
    with pytest.raises(ValueError, match="equally many"):
        Federation("x", np.array([1, 2]), np.zeros(2, int), ("all",), (1,), 2, None, "", holders=2, originals=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be held"):
        Federation("x", np.array([2, 2]), np.zeros(2, int), ("all",), (1,), 2, None, "", holders=3, originals=2)  # type: ignore[arg-type]
