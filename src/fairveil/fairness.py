"""From evaluations to figures: how well the clients are served, and how evenly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fairveil.errors import UserError
from fairveil.intervals import Interval, client_weights, percentiles

if TYPE_CHECKING:
    import pandas as pd
    from fairlearn.metrics import MetricFrame


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


def pooled(values: np.ndarray, n: np.ndarray, metric: str) -> np.ndarray:
    """The metric over all records together, of values (..., clients) over n (..., clients) records each; NaN: none."""
    power = 2 if metric == "rmse" else 1  # errors add up by their squares
    with np.errstate(invalid="ignore"):
        return (np.nansum(values**power * n, axis=-1) / np.nansum(n, axis=-1)) ** (1 / power)


def histogram(values: np.ndarray, bins: int = 40, *, higher_is_better: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Counts (bins,) and edges (bins + 1,) of values (clients,): over [0, 1] for accuracies, else over [min, max]."""
    return np.histogram(values, bins, range=(0.0, 1.0) if higher_is_better else None)


# ---- values of an attribute: sex, age, ... ----


def group_frame(confusion: pd.DataFrame, positive: int | None) -> MetricFrame:
    """Records, accuracy, and (with a positive class) selection, true and false positive rate for each value.

    Every record counts the same, whoever holds it. A rate of no records is NaN; fairlearn alone would call it 0.

    Args:
        confusion: client, value (text), actual, predicted, n: counts of one attribute.
        positive: the class that counts as selected; None: only what needs no such class.

    Raises:
        UserError: there are no records, or those of several attributes.
    """
    from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate
    from sklearn.metrics import accuracy_score

    confusion = confusion[confusion["n"] > 0]
    if confusion.empty or ("attribute" in confusion and confusion["attribute"].nunique() > 1):
        raise UserError(
            f"confusion holds {'several attributes' if len(confusion) else 'no records'}.",
            "Values are compared within one attribute of the test records; each record counts once.",
            'confusion[confusion["attribute"] == name], for an attribute of the data',
        )
    metrics: dict[str, Callable[..., float]] = {"records": _records, "accuracy": accuracy_score}
    if positive is not None:
        metrics["selection rate"] = _rate(selection_rate, positive, among=None)
        metrics["true positive rate"] = _rate(true_positive_rate, positive, among=True)
        metrics["false positive rate"] = _rate(false_positive_rate, positive, among=False)
    return MetricFrame(
        metrics=metrics,
        y_true=confusion["actual"],
        y_pred=confusion["predicted"],
        sensitive_features=confusion["value"],
        sample_params={name: {"sample_weight": confusion["n"]} for name in metrics},
    )


def group_differences(
    confusion: pd.DataFrame, positive: int | None, *, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> dict[str, Interval]:
    """The largest difference between two values: "accuracy" and, with a positive class, "demographic parity"
    (selection rates), "equalised odds" (true or false positive rates, the larger difference), "equal opportunity"
    (true positive rates). Arguments and errors as in `group_frame`.

    Intervals resample whole clients with all their records, not within groups. Where a value has the records of one
    client only, there is no drawing another: then it is the records of every value that are redrawn. A replicate in
    which a rate is of no records for some value is left out (`draws` counts the others). NaN: a rate is not defined, or
    there is one value.
    """
    frame = group_frame(confusion, positive)
    rates = frame.by_group
    exact = _named(frame.difference().astype(float).where(rates.notna().all() & (len(rates) > 1)))
    confusion, random = confusion[confusion["n"] > 0], np.random.default_rng(seed)
    if confusion.groupby("value")["client"].nunique().min() == 1:
        n, unit = int(confusion["n"].sum()), "test records"
        parts = [_differences(_redrawn(confusion, positive, draws, random))]
    else:
        counts = _counts(confusion, positive)
        n, unit = counts.shape[1], "clients"
        parts = [_differences(weights @ counts) for weights in client_weights(n, draws, random)]
    return {
        name: percentiles(value, np.concatenate([part[name] for part in parts]), n, unit, level)
        for name, value in exact.items()
    }


def _records(actual: np.ndarray, predicted: np.ndarray, sample_weight: np.ndarray) -> int:
    """fairlearn's own count ignores weights."""
    return int(np.sum(sample_weight))


def _rate(metric: Callable[..., float], positive: int, among: bool | None) -> Callable[..., float]:
    """A rate of fairlearn's for one class against the others; NaN if no record is of its kind (None: any)."""

    def rate(actual: Any, predicted: Any, sample_weight: Any) -> float:
        true, taken = (np.asarray(labels) == positive for labels in (actual, predicted))
        if among is not None and not (true == among).any():
            return math.nan
        return metric(true.astype(int), taken.astype(int), sample_weight=np.asarray(sample_weight), pos_label=1)

    return rate


def _named(apart: Mapping[str, Any]) -> dict[str, Any]:
    """Differences between values, under the names that are known for them."""
    found = {"accuracy": apart["accuracy"]}
    if "selection rate" in apart:
        found["demographic parity"] = apart["selection rate"]
        found["equalised odds"] = np.maximum(apart["true positive rate"], apart["false positive rate"])  # NaN stays
        found["equal opportunity"] = apart["true positive rate"]
    return found


def _counts(confusion: pd.DataFrame, positive: int | None) -> np.ndarray:
    """(kind, clients, values): records, right ones and, with a positive class, taken for it, of it, both."""
    client, value = (np.unique(confusion[name], return_inverse=True)[1] for name in ("client", "value"))
    n, shape = confusion["n"].to_numpy(), (client.max() + 1, value.max() + 1)
    place, cells = client * shape[1] + value, shape[0] * shape[1]
    return np.stack([np.bincount(place, n * kind, cells).reshape(shape) for kind in _kinds(confusion, positive)])


def _redrawn(confusion: pd.DataFrame, positive: int | None, draws: int, random: np.random.Generator) -> np.ndarray:
    """(kind, draws, values): the same, but of records redrawn with replacement, as many of each value as there are."""
    values = []
    for _, rows in confusion.groupby("value"):
        total = rows["n"].sum()
        drawn = random.multinomial(total, rows["n"] / total, size=draws)
        values.append(np.stack([drawn @ kind for kind in _kinds(rows, positive)]))
    return np.stack(values, axis=2).astype(float)


def _kinds(confusion: pd.DataFrame, positive: int | None) -> list[np.ndarray]:
    """Which rows count as what."""
    actual, predicted = (confusion[name].to_numpy() for name in ("actual", "predicted"))
    kinds = [np.ones(len(actual), bool), actual == predicted]
    if positive is not None:
        kinds += [predicted == positive, actual == positive, (actual == positive) & (predicted == positive)]
    return kinds


def _differences(counts: np.ndarray) -> dict[str, np.ndarray]:
    """(draws,) each, of counts (kind, draws, values); as fairlearn's differences, and NaN where a rate is of nobody."""
    rates = {"accuracy": (counts[1], counts[0])}
    if len(counts) > 2:
        records, _, taken, true, both = counts
        rates["selection rate"] = taken, records
        rates["true positive rate"] = both, true
        rates["false positive rate"] = taken - both, records - true
    with np.errstate(invalid="ignore"):
        apart = {name: np.ptp(part / whole, axis=1) for name, (part, whole) in rates.items()}
    return _named(apart if counts.shape[2] > 1 else {name: np.full_like(rate, np.nan) for name, rate in apart.items()})


# ---- the cost of privacy ----


@dataclass(frozen=True, eq=False)
class PrivacyCost:
    """What each client loses against a reference without privacy; above 0: it is served worse."""

    by_client: np.ndarray  # (clients,)
    by_group: dict[str, float]  # means
    fairness: float  # max_ij |cost_i - cost_j|: 0 if privacy costs all the same
    clients: int


def fairness_symbol(metric: str) -> str:
    """What the paper calls the largest difference of such costs: F_acc, F_loss."""
    return "F_acc" if metric == "accuracy" else f"F_{metric}"


def privacy_cost(
    served: np.ndarray, reference: np.ndarray, group: np.ndarray, *, higher_is_better: bool = True
) -> PrivacyCost:
    """The cost of privacy for each client, and how unevenly it is borne.

    As F_acc and F_loss of Malekmohammadi, Taik and Farnadi, "Mitigating Disparate Impact of Differential Privacy in
    Federated Learning through Robust Clustering" (2024): acc_i(reference) - acc_i(served), and for losses (higher is
    not better) loss_i(served) - loss_i(reference).

    Args:
        served, reference: (clients,) the same clients on the same test records.
        group: (clients,) names or codes.
    """
    cost = reference - served if higher_is_better else served - reference
    by_group = {str(name): float(cost[group == name].mean()) for name in np.unique(group)}
    return PrivacyCost(cost, by_group, float(np.ptp(cost)), len(cost))
