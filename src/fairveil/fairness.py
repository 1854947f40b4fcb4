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
    deviation: float  # its root
    sampling_variance_removed: float | None  # the variance without what small tests add; see spread_of
    jain: float | None  # (sum a)^2 / (n sum a^2), 1 if all are equal; of accuracies
    gap: float  # best group - worst group, never negative
    by_group: dict[str, float]
    by_group_clients: dict[str, int]
    worst_group: str
    clients: int


def summarise(
    values: np.ndarray, group: np.ndarray, groups: Sequence[str], *, higher_is_better: bool,
    tests: np.ndarray | None = None,
) -> Summary:  # fmt: skip
    """Summarise a metric.

    Args:
        values: (clients,).
        group: (clients,) index into `groups`; a group without clients is left out.
        tests: (clients,) how many test records of its own each client has; None: unknown, or clients share them.
    """
    worst_first = np.sort(values) if higher_is_better else np.sort(values)[::-1]
    tenth = int(np.ceil(0.1 * len(values)))
    members = {name: group == m for m, name in enumerate(groups) if (group == m).any()}
    by_group = {name: float(values[inside].mean()) for name, inside in members.items()}
    pick = min if higher_is_better else max
    return Summary(
        mean=float(values.mean()),
        worst=float(worst_first[0]),
        best=float(worst_first[-1]),
        worst_10_percent=float(worst_first[:tenth].mean()),
        best_10_percent=float(worst_first[-tenth:].mean()),
        disparity=float(values.max() - values.min()),
        variance=float(values.var()),
        deviation=float(values.std()),
        sampling_variance_removed=spread_of(values, tests) if higher_is_better and tests is not None else None,
        jain=jain_index(values) if higher_is_better else None,
        gap=max(by_group.values()) - min(by_group.values()),
        by_group=by_group,
        by_group_clients={name: int(inside.sum()) for name, inside in members.items()},
        worst_group=pick(by_group, key=lambda name: by_group[name]),
        clients=len(values),
    )


def jain_index(values: np.ndarray) -> float:
    """(sum a)^2 / (n sum a^2) of values (n,) that are not negative: from 1/n (one has all) to 1 (all are equal)."""
    largest = values.max()
    if not largest:
        return 1.0  # nobody has anything: all are equal
    share = values / largest  # the index does not change, and no square is too small to be held
    return float(min(1.0, share.sum() ** 2 / (len(share) * (share**2).sum())))


def spread_of(accuracies: np.ndarray, tests: np.ndarray) -> float | None:
    """The variance (divided by n) of these clients' true accuracies, from accuracies (n,) on tests (n,) of their own.

    An accuracy on few records varies by itself. var(a) - (1 - 1/n) mean(a_i (1 - a_i)/(n_i - 1)) is without bias for
    any accuracies and test sizes, and may therefore be negative: read that as "no spread to be seen". None if a client
    has fewer than two test records: then nothing says how much its accuracy varies.
    """
    if tests.min() < 2:
        return None
    sampling = (accuracies * (1 - accuracies) / (tests - 1)).mean()
    return float(accuracies.var() - (1 - 1 / len(accuracies)) * sampling)


def histogram(values: np.ndarray, bins: int = 40, *, higher_is_better: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Counts (bins,) and edges (bins + 1,) of values (clients,): over [0, 1] for accuracies, else over [min, max]."""
    return np.histogram(values, bins, range=(0.0, 1.0) if higher_is_better else None)
