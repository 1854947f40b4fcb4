"""The statement as JSON, and back: the same sentence, whatever was promised."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.statement import REFERENCE, SECURE_SUM, ReleaseKind, Statement

EPSILON = st.floats(0, 1e6) | st.just(math.inf)
COUNTS = st.tuples(st.integers(0, 99), st.integers(0, 99))
WORDS = st.text(max_size=12)


def statements() -> st.SearchStrategy[Statement]:
    kind = st.builds(ReleaseKind, WORDS, WORDS, COUNTS, st.none() | COUNTS, st.booleans())
    return st.builds(
        Statement, unit=st.sampled_from(["record", "client"]), record=WORDS, holders=st.integers(1, 9),
        units=st.integers(1, 99), adjacency=st.sampled_from(["add-remove", "replace"]), epsilon=EPSILON,
        epsilon_without_leaks=EPSILON, leaks=st.lists(WORDS, max_size=2).map(tuple),
        epsilon_spent=st.none() | EPSILON, delta=st.floats(1e-12, 0.5), accountant=st.sampled_from(["rdp", "pld"]),
        releases=st.lists(kind, max_size=3).map(tuple), public=st.dictionaries(WORDS, WORDS, max_size=3),
        complete=st.booleans(), accountant_version=WORDS, trust=WORDS, noise_source=WORDS, not_covered=WORDS,
    )  # fmt: skip


@given(statement=statements())
def test_a_statement_can_be_read_back(statement: Statement) -> None:
    """Through real JSON, which knows neither tuples nor infinity."""
    text = json.dumps(statement.to_json(), allow_nan=False)
    again = Statement.from_json(json.loads(text))
    assert again == statement and again.sentence() == statement.sentence() and again.lines() == statement.lines()
    assert json.loads(text)["sentence"] == statement.sentence()


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"privacy": {"noise_multiplier": 0.0, "delta": 1e-3}},
        {"algorithm": {"name": "ifca", "clusters": 2, "rounds": 4, "faithful": True}},
        {"algorithm": {"name": "dp-fedavg", "rounds": 4, "sample_rate": 0.5}},
        {"fairness": {"reference": "central"}},
    ],
    ids=["record", "no noise", "leak", "client", "reference"],
)
def test_the_statement_of_a_plan_can_be_read_back(small: dict[str, Any], sections: dict[str, Any]) -> None:
    statement = make_plan(make_config(small | sections)).statement()
    again = Statement.from_json(json.loads(json.dumps(statement.to_json(), allow_nan=False)))
    assert again == statement and again.sentence() == statement.sentence()


def test_a_leak_is_named_with_what_the_rest_would_cost(small: dict[str, Any]) -> None:
    algorithm = {"name": "ifca", "clusters": 2, "rounds": 4, "faithful": True}
    plain = make_plan(make_config(small | {"algorithm": algorithm})).statement().to_json()
    assert plain["epsilon"] == "infinity" and 7.9 < plain["epsilon_without_leaks"] <= 8
    again = Statement.from_json(plain)
    assert math.isinf(again.epsilon) and again.leaks == ("exact choice of a model",)
    assert (
        "NONE (epsilon is infinite)" in again.sentence() and "but for the exact choice of a model" in again.sentence()
    )


def test_a_reference_is_stated_and_only_where_there_is_one(small: dict[str, Any]) -> None:
    """It is trained without privacy: whoever reads the statement has to know."""
    with_one = make_plan(make_config(small | {"fairness": {"reference": "central"}})).statement()
    assert REFERENCE in with_one.not_covered and "trained without privacy on the pooled records" in with_one.sentence()
    assert "Reference models" not in make_plan(make_config(small)).statement().sentence()


def trusted(small: dict[str, Any], **privacy: str) -> dict[str, Any]:
    """A client-level config of a simulation."""
    algorithm = {"name": "dp-fedavg", "rounds": 4, "sample_rate": 0.5}
    return small | {"algorithm": algorithm, "privacy": {"epsilon": 8.0, "delta": 1e-3} | privacy}


def test_contributions_without_noise_go_to_the_server_unless_a_secure_sum_is_simulated(small: dict[str, Any]) -> None:
    plain, server, secure = (
        make_plan(make_config(trusted(small, **privacy)))
        for privacy in ({}, {"trust": "server"}, {"trust": "secure-sum"})
    )
    trust = plain.statement().trust
    assert "sends it a contribution within bounds, but without noise" in trust and server.statement().trust == trust
    assert secure.statement().trust == SECURE_SUM and "only SIMULATED" in SECURE_SUM
    assert "exact sum" in SECURE_SUM and "saw every contribution" in SECURE_SUM
    # nothing but these words differs: the same releases under the same noise multiplier at the same price ...
    assert secure.releases == plain.releases and secure.price == plain.price
    others = [dict(plan.statement().to_json(), trust="", sentence="") for plan in (plain, secure)]
    assert others[0] == others[1]
    # ... but it is another config, and so another run, whose noise is drawn anew
    assert len({plan.root for plan in (plain, server, secure)}) == 3


def test_a_config_without_trust_keeps_its_hash(small: dict[str, Any]) -> None:
    """It is part of the root of the noise, and of the names of results that are already there."""
    config = make_config(trusted(small))
    assert "trust" not in config.resolved()["privacy"] and "trust" not in config.to_toml()
    assert make_config(trusted(small, trust="server")).digest() != config.digest()


def test_a_federation_refuses_what_can_only_be_simulated(small: dict[str, Any]) -> None:
    """Before anything is submitted: a config that promises it is not even read."""
    elsewhere = {"data": {"dataset": "clients"}}
    make_config(trusted(small, trust="server") | elsewhere)
    with pytest.raises(UserError, match="is not for a federation") as refused:
        make_config(trusted(small, trust="secure-sum") | elsewhere)
    assert 'privacy.trust = "server"' in refused.value.fix and "only simulated" in refused.value.why
    with pytest.raises(UserError, match=r"fairness\.reference"):
        make_config(trusted(small) | elsewhere | {"fairness": {"reference": "central"}})


def test_a_federation_is_not_planned_without_its_clients(small: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no clients here") as refused:
        make_plan(make_config(small | {"data": {"dataset": "clients"}}))
    assert "on their own machines" in refused.value.why and "fairveil deploy submit" in refused.value.fix
