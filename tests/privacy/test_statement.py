"""The statement as JSON, and back: the same sentence, whatever was promised."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairveil.config import make_config
from fairveil.plan import make_plan
from fairveil.privacy.statement import REFERENCE, ReleaseKind, Statement

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
