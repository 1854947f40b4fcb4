"""The ledger: inside the plan, on disk first, once for each request."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fairveil.errors import PrivacyError
from fairveil.privacy.ledger import FEDERATION, Entry, Ledger
from fairveil.privacy.mechanisms import CohortSums, Part, canonical
from fairveil.privacy.training import NoisyTraining

TRAINING = NoisyTraining(0.25, 4, clip_norm=1.0, noise_multiplier=1.2, expected_batch=32.0)
SUMS = CohortSums((Part("update", (3,), 1.0, 2.0),), 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    ledger = Ledger(sqlite3.connect(path))
    ledger.set_plan({0: {TRAINING: 2}, 1: {TRAINING: 2}, FEDERATION: {SUMS: 1}})
    return ledger


def entry(
    unit: int, number: int, mechanism: NoisyTraining | CohortSums = TRAINING, digest: bytes = b"x", reply: bytes = b"r"
) -> Entry:
    return Entry(unit, f"round {number}", mechanism, digest, reply)


def test_posts_are_counted_by_unit_and_mechanism(ledger: Ledger) -> None:
    ledger.post([entry(0, 1), entry(1, 1)])
    ledger.post([entry(0, 2), entry(FEDERATION, 2, SUMS)])
    assert ledger.posted() == {
        0: Counter({canonical(TRAINING): 2}),
        1: Counter({canonical(TRAINING): 1}),
        FEDERATION: Counter({canonical(SUMS): 1}),
    }


def test_a_post_is_visible_to_another_connection_at_once(ledger: Ledger, path: Path) -> None:
    ledger.post([entry(0, 1)])
    other = sqlite3.connect(path)
    assert other.execute("SELECT unit, request FROM ledger").fetchall() == [(0, "round 1")]


@pytest.mark.parametrize(
    "changed",
    [
        replace(TRAINING, noise_multiplier=1.1999999999999997),  # the next float below 1.2
        replace(TRAINING, clip_norm=1.1),
        replace(TRAINING, steps=5),
        replace(TRAINING, sample_rate=0.26),
        SUMS,
    ],
)
def test_what_was_not_planned_is_refused(ledger: Ledger, changed: NoisyTraining | CohortSums) -> None:
    with pytest.raises(PrivacyError, match=r"client 0: this .* was not planned, so it was not released"):
        ledger.post([entry(0, 1, changed)])
    assert ledger.entries() == []


def test_the_refusal_names_the_field_that_differs(ledger: Ledger) -> None:
    with pytest.raises(PrivacyError, match="the same with other noise_multiplier"):
        ledger.post([entry(0, 1, replace(TRAINING, noise_multiplier=0.6))])
    with pytest.raises(PrivacyError, match="nothing at all for this unit"):
        ledger.post([entry(7, 1)])


def test_more_often_than_planned_is_refused(ledger: Ledger) -> None:
    ledger.post([entry(0, 1), entry(0, 2)])
    with pytest.raises(PrivacyError, match=r"asked for 3 times, 2 planned"):
        ledger.post([entry(0, 3)])
    with pytest.raises(PrivacyError):  # also within one transaction
        ledger.post([entry(1, 1), entry(1, 2), entry(1, 3)])
    assert len(ledger.entries()) == 2


def test_a_refused_post_leaves_nothing_behind(ledger: Ledger, path: Path) -> None:
    with pytest.raises(PrivacyError):
        ledger.post([entry(0, 1), entry(1, 1, replace(TRAINING, steps=5))])
    assert ledger.entries() == [] and ledger.posted() == {}
    assert sqlite3.connect(path).execute("SELECT COUNT(*) FROM ledger").fetchone() == (0,)


def test_the_same_request_costs_nothing_more(ledger: Ledger) -> None:
    for _ in range(5):
        ledger.post([entry(0, 1)])
    assert len(ledger.entries()) == 1


def test_the_same_request_with_other_inputs_is_refused(ledger: Ledger) -> None:
    """Two answers to one request, from one noise stream, would cancel the noise."""
    ledger.post([entry(0, 1)])
    with pytest.raises(PrivacyError, match="answered before with other inputs"):
        ledger.post([entry(0, 1, digest=b"y")])


def test_the_same_request_with_another_answer_is_refused(ledger: Ledger) -> None:
    """Whatever made it different: changed code, another package, a model that draws randomness of its own."""
    ledger.post([entry(0, 1)])
    with pytest.raises(PrivacyError, match="answered before in another way"):
        ledger.post([entry(0, 1, reply=b"s")])


def test_everything_survives_reopening(ledger: Ledger, path: Path) -> None:
    ledger.post([entry(0, 1), entry(0, 2)])
    again = Ledger(sqlite3.connect(path))
    assert again.entries() == ledger.entries() and again.planned() == ledger.planned()
    again.post([entry(0, 2)])  # known: free
    with pytest.raises(PrivacyError):
        again.post([entry(0, 3)])  # the count went on where it stood


def test_requests_of_one_post_are_told_apart(ledger: Ledger) -> None:
    """Some known, some new, of several requests and units at once."""
    ledger.post([entry(0, 1), entry(1, 2)])
    ledger.post([entry(0, 1), entry(0, 2), entry(1, 2), entry(1, 1)])
    assert len(ledger) == 4
    assert ledger.posted() == {unit: Counter({canonical(TRAINING): 2}) for unit in (0, 1)}
    with pytest.raises(PrivacyError, match="client 1: round 2 was answered before with other inputs"):
        ledger.post([entry(0, 1), entry(1, 2, digest=b"y")])
    with pytest.raises(PrivacyError, match="asked for 3 times"):
        ledger.post([entry(0, 1), entry(0, 3)])


def test_a_plan_never_changes(ledger: Ledger) -> None:
    with pytest.raises(PrivacyError, match="already has a plan"):
        ledger.set_plan({0: {replace(TRAINING, noise_multiplier=0.1): 100}})


def test_a_plan_that_could_not_be_written_leaves_no_numbers_behind(path: Path) -> None:
    """Or the next mechanism would get the number of one that is gone, and be taken for it."""
    ledger = Ledger(sqlite3.connect(path))
    unwritable = CohortSums((Part("\ud800", (3,), 1.0, 2.0),), 0.5)  # a lone surrogate is no UTF-8
    for mechanism in (TRAINING, SUMS):
        with pytest.raises(UnicodeEncodeError):
            ledger.set_plan({0: {mechanism: 1, unwritable: 1}})
    ledger.set_plan({0: {TRAINING: 1}})
    assert ledger.planned() == Ledger(sqlite3.connect(path)).planned() == {0: Counter({canonical(TRAINING): 1})}
    with pytest.raises(PrivacyError, match="not planned"):
        ledger.post([entry(0, 1, SUMS)])
