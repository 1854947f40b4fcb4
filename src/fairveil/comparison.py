"""Is it better, or was it the seed? Means over seeds, and paired differences, each with a 95% interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95


def interval(values: np.ndarray) -> tuple[float, float] | None:
    """Student's t interval for the mean of independent normal values; None for fewer than two of them."""
    n = len(values)
    if n < 2:
        return None
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * float(values.std(ddof=1)) / math.sqrt(n)
    return float(values.mean()) - half, float(values.mean()) + half


def over_seeds(table: pd.DataFrame, points: Sequence[str], measures: Sequence[str]) -> pd.DataFrame:
    """Each measure over the seeds of each setting.

    Args:
        table: one row for each run: "variant", the points, "seed", the measures (NaN where a run is not finished).
        points: the columns that tell the settings of one variant apart.
    """
    rows = []
    for variant, point, part in _settings(table, points):
        for measure in measures:
            values = part[measure].dropna().to_numpy(dtype=float)
            values = values[np.isfinite(values)]  # an infinite budget has no mean
            low, high = interval(values) or (math.nan, math.nan)
            rows.append(
                {
                    "variant": variant,
                    **point,
                    "measure": measure,
                    "n": len(values),
                    "mean": float(values.mean()) if len(values) else math.nan,
                    "deviation": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                    "low": low,
                    "high": high,
                }
            )
    names = ["variant", *points, "measure", "n", "mean", "deviation", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def compare(table: pd.DataFrame, points: Sequence[str], baseline: str, measures: Mapping[str, bool]) -> pd.DataFrame:
    """Every other variant against the baseline at the same point, over the seeds that both have finished.

    A seed gives both the same split of the records, so what a split does to both cancels in the difference.

    Args:
        measures: each with whether higher is better.
    """
    base = {tuple(point.values()): part for variant, point, part in _settings(table, points) if variant == baseline}
    rows = []
    for variant, point, part in _settings(table, points):
        if variant == baseline:
            continue
        for measure, higher_is_better in measures.items():
            ours, theirs = (
                found.set_index("seed")[measure].dropna().astype(float) for found in (part, base[tuple(point.values())])
            )
            seeds = ours.index.intersection(theirs.index)
            ours, theirs = ours[seeds].to_numpy(), theirs[seeds].to_numpy()
            difference = ours - theirs
            low, high = interval(difference) or (math.nan, math.nan)
            rows.append(
                {
                    "variant": variant,
                    "baseline": baseline,
                    **point,
                    "measure": measure,
                    "n": len(difference),
                    "variant_mean": float(ours.mean()) if len(seeds) else math.nan,
                    "baseline_mean": float(theirs.mean()) if len(seeds) else math.nan,
                    "difference": float(difference.mean()) if len(seeds) else math.nan,
                    "low": low,
                    "high": high,
                    "better": int((difference > 0).sum() if higher_is_better else (difference < 0).sum()),
                }
            )
    names = ["variant", "baseline", *points, "measure", "n", "variant_mean", "baseline_mean", "difference"]
    return pd.DataFrame(rows, columns=[*names, "low", "high", "better"])


def _settings(table: pd.DataFrame, points: Sequence[str]) -> list[tuple[str, dict[str, object], pd.DataFrame]]:
    """The rows of each variant at each point, in the order of the table."""
    found = table.groupby(["variant", *points], sort=False)
    return [(key[0], dict(zip(points, key[1:], strict=True)), part) for key, part in found]
