"""Figures over clients, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fairveil.fairness import summarise


def test_accuracy_by_hand() -> None:
    values = np.array([0.5, 0.9, 0.7, 0.8])
    found = summarise(values, np.array([0, 1, 0, 2]), ["a", "b", "c", "empty"], higher_is_better=True)
    assert found.by_group == pytest.approx({"a": 0.6, "b": 0.9, "c": 0.8})
    assert (found.worst_group, found.clients) == ("a", 4)
    assert found.mean == pytest.approx(0.725)
    assert (found.worst, found.best) == (0.5, 0.9)
    assert found.disparity == pytest.approx(0.4)
    # deviations -.225, .175, -.025, .075: squares .050625 + .030625 + .000625 + .005625 = .0875, over 4
    assert found.variance == pytest.approx(0.021875)
    assert (found.worst_10_percent, found.best_10_percent) == (0.5, 0.9)  # a tenth of 4 clients is one


def test_tenths_of_twenty_clients() -> None:
    values = np.arange(20) / 20  # a tenth is two clients: (0 + .05)/2 and (.95 + .9)/2
    found = summarise(values, np.zeros(20, int), ["all"], higher_is_better=True)
    assert found.worst_10_percent == pytest.approx(0.025) and found.best_10_percent == pytest.approx(0.925)


def test_for_a_loss_the_worst_is_the_highest() -> None:
    found = summarise(np.array([1.0, 3.0]), np.array([0, 1]), ["a", "b"], higher_is_better=False)
    assert (found.worst, found.best, found.worst_group, found.worst_10_percent) == (3.0, 1.0, "b", 3.0)
