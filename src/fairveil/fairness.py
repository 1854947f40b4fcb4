"""From evaluations to figures: how well the clients are served, and how evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """One metric over clients, each client counting the same.

    For an accuracy the worst is the lowest value, for a loss or an error the highest.
    """

    mean: float
    worst: float  # of one client
    best: float
    worst_10_percent: float  # mean over the worst tenth of the clients, at least one
    best_10_percent: float
    disparity: float  # max |a_i - a_j|
    variance: float  # over clients; papers print it times 10,000
    by_group: dict[str, float]
    worst_group: str
    clients: int


def summarise(values: np.ndarray, group: np.ndarray, groups: Sequence[str], *, higher_is_better: bool) -> Summary:
    """Summarise a metric.

    Args:
        values: (clients,).
        group: (clients,) index into `groups`; a group without clients is left out.
    """
    worst_first = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    tenth = int(np.ceil(0.1 * len(values)))
    by_group = {name: float(values[group == m].mean()) for m, name in enumerate(groups) if (group == m).any()}
    pick = min if higher_is_better else max
    return Summary(
        mean=float(values.mean()),
        worst=float(worst_first[0]),
        best=float(worst_first[-1]),
        worst_10_percent=float(worst_first[:tenth].mean()),
        best_10_percent=float(worst_first[-tenth:].mean()),
        disparity=float(values.max() - values.min()),
        variance=float(values.var()),
        by_group=by_group,
        worst_group=pick(by_group, key=lambda name: by_group[name]),
        clients=len(values),
    )
