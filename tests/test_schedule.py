"""The price of votes, against closed forms for one Gaussian release with mu = sensitivity / noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from fairveil.errors import UserError
from fairveil.schedule import Schedule, Votes, account_options, account_schedule

TERMS: dict[str, Any] = {"epsilon": None, "delta": 1e-3, "adjacency": "add-remove", "accountant": "pld"}


def delta_at(epsilon: float, mu: float) -> float:
    """Balle and Wang (2018), Theorem 8."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def exact(squared: float, delta: float = 1e-3) -> float:
    """The epsilon of mu^2 = `squared`."""
    return float(brentq(lambda epsilon: delta_at(epsilon, math.sqrt(squared)) - delta, 0, 100))


def renyi(squared: float, delta: float = 1e-3) -> float:
    """The same by way of Renyi: Canonne, Kamath and Steinke (2020), Proposition 12, at its best order."""

    def bound(log: float) -> float:
        order = 1 + math.exp(log)
        return order * squared / 2 + math.log1p(-1 / order) - math.log(order * delta) / (order - 1)

    return float(minimize_scalar(bound, bounds=(-4, 6), method="bounded").fun)


CONFIDENT = {"answers": 250, "threshold_noise": 50.0}


@pytest.mark.parametrize(
    ("unit", "adjacency", "options", "sensitivity", "squared"),
    [  # Q = 500 and sigma = 25: A s^2 / sigma^2 = 0.8 s^2 with all answers, 0.4 s^2 with half of them
        ("agent", "add-remove", {}, 1, 0.8),
        ("client", "add-remove", {}, 1, 0.8),
        ("instance", "add-remove", {}, math.sqrt(2), 1.6),
        ("record", "add-remove", {}, math.sqrt(2), 1.6),
        ("agent", "replace", {}, math.sqrt(2), 1.6),
        ("instance", "replace", {}, math.sqrt(2), 1.6),
        ("agent", "add-remove", {"neighbours": 5}, 1, 0.8),  # a client may change all of its vote
        ("instance", "add-remove", {"neighbours": 5}, math.sqrt(2) / 5, 1.6 / 25),
        ("instance", "replace", {"neighbours": 5}, math.sqrt(2) / 5, 1.6 / 25),
        ("agent", "add-remove", CONFIDENT, 1, 0.4 + 500 / 50**2),  # all counts are paid for
        ("instance", "add-remove", CONFIDENT, math.sqrt(2), 0.8 + 500 / 50**2),
        ("instance", "add-remove", CONFIDENT | {"neighbours": 2}, math.sqrt(2) / 2, (0.8 + 500 / 50**2) / 4),
        ("agent", "add-remove", {"labels": 4}, 2, 3.2),
        ("agent", "add-remove", {"labels": 4, "classes": 4}, 2, 3.2),
        ("agent", "replace", {"labels": 4}, math.sqrt(8), 6.4),
        ("instance", "add-remove", {"labels": 4, "classes": 40}, math.sqrt(8), 6.4),
        ("instance", "add-remove", {"labels": 4, "classes": 6}, math.sqrt(6), 4.8),  # two votes share two classes
        ("instance", "add-remove", {"labels": 4, "neighbours": 2}, math.sqrt(2), 1.6),
    ],
)
def test_the_price_of_votes(
    unit: str, adjacency: str, options: dict[str, Any], sensitivity: float, squared: float
) -> None:
    votes, terms = Votes(500, unit, **options), TERMS | {"adjacency": adjacency}
    answer = account_schedule(votes, noise_multiplier=25.0, **terms)
    assert answer["sensitivity"] == pytest.approx(sensitivity)
    assert exact(squared) <= answer["epsilon"] * (1 + 1e-9) and answer["epsilon"] == pytest.approx(
        exact(squared), rel=1e-3
    )
    if adjacency == "add-remove":
        rdp = account_schedule(votes, noise_multiplier=25.0, **terms | {"accountant": "rdp"})["epsilon"]
        assert rdp == pytest.approx(renyi(squared), rel=1e-3) and rdp > answer["epsilon"]
    tightest = account_schedule(votes, noise_multiplier=25.0, **terms | {"accountant": "tightest"})
    assert tightest == answer


@pytest.mark.parametrize(
    ("options", "adjacency", "squared", "fixed"),
    [  # mu^2 = squared / sigma^2 + fixed
        ({}, "add-remove", 1000, 0.0),
        ({"neighbours": 5}, "replace", 1000 / 25, 0.0),
        (CONFIDENT, "add-remove", 500, 0.2),
        ({"labels": 3, "classes": 4}, "add-remove", 2000, 0.0),
    ],
)
def test_the_noise_of_votes(options: dict[str, Any], adjacency: str, squared: float, fixed: float) -> None:
    votes, terms = Votes(500, "instance", **options), TERMS | {"adjacency": adjacency, "epsilon": 3.0}
    answer = account_schedule(votes, noise_multiplier=None, **terms)
    assert answer["epsilon"] <= 3
    mu = brentq(lambda mu: delta_at(3.0, mu) - 1e-3, 0.1, 10)
    least = math.sqrt(squared / (mu**2 - fixed))
    assert least * (1 - 1e-9) <= answer["noise_multiplier"] <= least * 1.005


def test_all_votes_are_one_gaussian_release() -> None:
    """An accountant of replacement doubles the sensitivity by itself: sqrt(2 * 500) / 25 is twice half of it."""
    ((event, count),) = Votes(500, "agent").events(25.0, "add-remove").items()
    assert count == 1 and isinstance(event, GaussianDpEvent)
    assert event.noise_multiplier == pytest.approx(25 / math.sqrt(500))
    ((event, count),) = Votes(500, "agent").events(25.0, "replace").items()
    assert count == 1 and event.noise_multiplier == pytest.approx(2 * 25 / math.sqrt(1000))


@pytest.mark.parametrize(
    ("sigma", "options"), [(0.0, {}), (0.0, {"neighbours": 5}), (25.0, {"answers": 9, "threshold_noise": 0.0})]
)
def test_votes_without_noise_have_no_price(sigma: float, options: dict[str, Any]) -> None:
    assert account_schedule(Votes(500, "agent", **options), noise_multiplier=sigma, **TERMS)["epsilon"] == "infinity"


def test_options_that_are_not_typed_have_the_defaults_of_a_schedule() -> None:
    training = {"records": 1000, "batch": 50, "rounds": 3, "noise_multiplier": 2.0}
    left_out = {"local_epochs": None, "full_first_round": False, "select_rounds": None, "first_round_factor": None}
    terms = TERMS | {"delta": 1e-4}
    found = account_options(False, training | left_out, {"queries": None, "sigma": None}, **terms)
    assert found == account_schedule(Schedule(1000, 50, 3), noise_multiplier=2.0, **terms)
    assert set(found) == {"noise_multiplier", "epsilon", "delta", "accountant", "adjacency"}


def test_a_zero_is_an_option_that_was_typed() -> None:
    """Neither 0 queries nor noise 0 may pass for "not given"."""
    with pytest.raises(UserError, match="--queries 0 makes no sense"):
        account_options(True, {}, {"queries": 0, "unit": "agent", "sigma": 1.0}, **TERMS)
    with pytest.raises(UserError, match="--select-rounds 0 is out of place with --vote"):
        account_options(True, {"select_rounds": 0}, {"queries": 5, "unit": "agent", "sigma": 1.0}, **TERMS)
    free = account_options(True, {}, {"queries": 5, "unit": "agent", "sigma": 0.0}, **TERMS)
    assert free["epsilon"] == "infinity"
