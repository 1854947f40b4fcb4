"""How sure a figure is: bootstrap intervals over clients, test records and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

CELLS = 2_000_000  # of a matrix (draws, clients) at once: a few such matrices stay well below 200 MB


@dataclass(frozen=True)
class Interval:
    """A figure and where it may lie. low and high are NaN where there was nothing to resample, or nothing defined."""

    value: float
    low: float
    high: float
    n: int  # how many were resampled
    unit: str  # what: "clients", "test records", "seeds"
    draws: int = 0  # replicates that low and high come from


@dataclass(frozen=True, eq=False)
class Sample:
    """What one run (one seed) scored.

    Attributes:
        values: (clients,).
        group: (clients,) codes.
        tests: (clients,) how many test records each value is the share of, if it is an accuracy.
        shared: (clients,) for tests that clients share: those with the same number were tested on the same records by
            the same model, so their values are one and the same. None: every client has test records of its own.
    """

    values: np.ndarray
    group: np.ndarray
    tests: np.ndarray | None = None
    shared: np.ndarray | None = None


Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]  # values (draws, clients), group (clients,) -> (draws,)


def mean_of(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Mean over clients, each counting the same."""
    return values.mean(axis=1)


def worst_group_of(values: np.ndarray, group: np.ndarray, *, higher_is_better: bool = True) -> np.ndarray:
    """Mean of the group that is worst in each draw."""
    means = _group_means(values, group)
    return means.min(axis=1) if higher_is_better else means.max(axis=1)


def gap_of(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Best group - worst group. Noise makes it larger, never smaller than 0: of few clients it is too large."""
    return np.ptp(_group_means(values, group), axis=1)


def worst_tenth_of(values: np.ndarray, group: np.ndarray, *, higher_is_better: bool = True) -> np.ndarray:
    """Mean over the worst tenth of the clients, at least one."""
    tenth = int(np.ceil(0.1 * values.shape[1]))
    if higher_is_better:
        return np.partition(values, tenth - 1, axis=1)[:, :tenth].mean(axis=1)
    return np.partition(values, -tenth, axis=1)[:, -tenth:].mean(axis=1)


def group_of(code: int) -> Statistic:
    """The mean of one group."""
    return lambda values, group: values[:, group == code].mean(axis=1)


def bootstrap(
    federations: Sequence[Sample], statistic: Statistic, *, draws: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Percentile interval of a statistic of one run or, of several (one for each seed), of its mean over them.

    What was drawn is resampled. Clients with test records of their own: they, with replacement, within each group, so
    that every group keeps its size. Clients that share test records have one and the same score, and resampling them
    would show no uncertainty at all: there the records are redrawn, and the accuracy a of a shared set becomes
    Binomial(n, a)/n. (So also for named sites that are all there are: give each a number of its own in `shared`.)
    Shared losses, which come without `tests`, cannot be redrawn. Several runs: first the seeds, then the clients or
    records within each seed that was drawn.

    Of few the interval is too narrow, and a group of one client adds no uncertainty: docs/fairness.md says how much.

    Raises:
        ValueError: clients that share their test records differ in value or in number of records.
    """
    random, runs = np.random.default_rng(seed), len(federations)
    value = np.mean([statistic(one.values[None], one.group)[0] for one in federations])
    chosen = random.integers(runs, size=(draws, runs))
    found = np.empty((draws, runs))
    for number, one in enumerate(federations):
        here = chosen == number
        parts = [statistic(values, one.group) for values in _resampled(one, int(here.sum()), random)]
        found[here] = np.concatenate([np.empty(0), *parts])
    if runs > 1:
        return percentiles(value, found.mean(axis=1), runs, "seeds", level)
    n, unit = _resampled_of(federations[0])
    if unit == "clients" and n < len(federations[0].values) and not np.ptp(found):
        n = 0  # a statistic of clients that are alone in their groups: certainty would be a lie
    return percentiles(value, found[:, 0], n, unit, level)


def gap_by_chance(one: Sample, *, draws: int = 2000, seed: int = 0, level: float = 0.95) -> float:
    """How large a gap between groups chance alone gives: if all were served alike, so many would be smaller.

    Clients are dealt out to the groups at random; of shared test records every set is redrawn at the common accuracy.
    NaN: a shared loss, which cannot be redrawn.
    """
    random, found = np.random.default_rng(seed), []
    for rows in _chunks(draws, len(one.values)):
        if one.shared is None:
            values = random.permuted(np.broadcast_to(one.values, (rows, len(one.values))), axis=1)
        elif one.tests is None:
            return math.nan
        else:
            n, accuracy, place = _shared_sets(one.values, one.tests, one.shared)
            common = min(1.0, float(n @ accuracy / n.sum()))
            values = (random.binomial(n, common, size=(rows, len(n))) / n)[:, place]
        found.append(gap_of(values, one.group))
    return float(np.quantile(np.concatenate(found), level))


def client_weights(clients: int, draws: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each client was drawn, (part of the draws, clients) at a time."""
    for rows in _chunks(draws, clients):
        drawn = random.integers(clients, size=(rows, clients)) + clients * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * clients).reshape(rows, clients).astype(float)


def percentiles(value: float, found: np.ndarray, n: int, unit: str, level: float) -> Interval:
    """The percentiles of the replicates (draws,) that are defined."""
    found = found[~np.isnan(found)]
    if n < 2 or not len(found):
        return Interval(float(value), math.nan, math.nan, n, unit, 0)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high), n, unit, len(found))


def _group_means(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(draws, groups) of values (draws, clients)."""
    order = np.argsort(group, kind="stable")
    _, start, size = np.unique(group[order], return_index=True, return_counts=True)
    return np.add.reduceat(values[:, order], start, axis=1) / size


def _chunks(draws: int, clients: int) -> Iterator[int]:
    """So many draws at once that a matrix (draws, clients) stays small."""
    most = max(1, CELLS // clients)
    yield from (min(most, draws - done) for done in range(0, draws, most))


def _resampled(one: Sample, draws: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Replicates of the values, (part of the draws, clients) at a time."""
    for rows in _chunks(draws, len(one.values)):
        if one.shared is None:
            values = np.empty((rows, len(one.values)))
            for code in np.unique(one.group):
                inside = one.group == code
                values[:, inside] = random.choice(one.values[inside], size=(rows, int(inside.sum())))
            yield values
        elif one.tests is None:
            yield np.broadcast_to(one.values, (rows, len(one.values)))
        else:
            n, accuracy, place = _shared_sets(one.values, one.tests, one.shared)
            yield (random.binomial(n, accuracy, size=(rows, len(n))) / n)[:, place]


def _resampled_of(one: Sample) -> tuple[int, str]:
    """How many of what were resampled in a single run. Who is alone in a group can be drawn in one way only."""
    if one.shared is None:
        sizes = np.unique(one.group, return_counts=True)[1]
        return int(sizes[sizes > 1].sum()), "clients"
    return 0 if one.tests is None else int(_shared_sets(one.values, one.tests, one.shared)[0].sum()), "test records"


def _shared_sets(
    values: np.ndarray, tests: np.ndarray, shared: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Records (sets,) and accuracy (sets,) of each set of test records, and (clients,) which of them is a client's."""
    _, first, place = np.unique(shared, return_index=True, return_inverse=True)
    if (values[first][place] != values).any() or (tests[first][place] != tests).any():
        raise ValueError("clients that share their test records must have the same value and number of records")
    return tests[first], values[first], place
