"""The figures of a clustered run: on labelings written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.patches import Ellipse
from sklearn.metrics import adjusted_rand_score

from fairveil.config import make_config
from fairveil.plan import make_plan
from fairveil.reading import Run, load_run
from fairveil.report.clusters import (
    MOST_MODELS,
    assignment_ribbon,
    cluster_confusion,
    cluster_plane,
    final_clusters,
    recovery,
)
from fairveil.run import run_plan
from fairveil.store import Score

GROUPS = ["min", "min", "b", "b", "b", "c", "c", "c"]


def found(of_client: list[int], plane: Any = None) -> dict[str, Any]:
    """What a clustered system leaves in its folder."""
    figures = {"mss": 2.5, "mpo": 0.01, "switch_round": 3, "iterations": 7}
    ari = float(adjusted_rand_score(GROUPS[: len(of_client)], of_client))
    return {"count": len(set(of_client)), "ari": ari, **figures, "of_client": of_client, "plane": plane}


# ---- was it right? ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "exact", "alone", "ari"),
    [
        ([0, 0, 1, 1, 1, 2, 2, 2], True, True, 1.0),
        ([2, 2, 0, 0, 0, 1, 1, 1], True, True, 1.0),  # the numbers of clusters mean nothing
        ([0, 0, 1, 1, 1, 1, 1, 1], False, True, None),  # the minority by itself, the others in one
        ([0, 0, 0, 0, 0, 1, 1, 1], False, False, None),  # the minority with another group
        ([0, 3, 1, 1, 1, 2, 2, 2], False, False, None),  # the minority torn apart
        ([0, 0, 1, 1, 0, 2, 2, 2], False, False, None),  # one stranger in the minority's cluster
        ([0] * 8, False, False, 0.0),
        (list(range(8)), False, False, 0.0),
    ],
)
def test_recovery_by_hand(
    handmade: Callable[..., Run], label: list[int], exact: bool, alone: bool, ari: float | None
) -> None:
    run = handmade(GROUPS, clusters=found(label))
    told = recovery(run)
    assert told is not None and (told["exact"], told["minority_alone"]) == (exact, alone)
    assert (told["minority"], told["groups"], told["count"]) == ("min", 3, len(set(label)))
    assert told["ari"] == pytest.approx(adjusted_rand_score(GROUPS, label))
    assert ari is None or told["ari"] == pytest.approx(ari)
    assert (told["mss"], told["switch_round"]) == (2.5, 3)


def test_a_run_without_clusters_has_none_to_recover(handmade: Callable[..., Run]) -> None:
    run = handmade(GROUPS)
    assert recovery(run) is None and final_clusters(run) is None


def test_the_index_of_a_real_run_is_that_of_scikit_learn(small: dict[str, Any], runs: Path) -> None:
    algorithm = {"name": "ifca", "clusters": 2, "rounds": 2, "batch_size": 64, "learning_rate": 1.0}
    run = load_run(run_plan(make_plan(make_config(small | {"algorithm": algorithm})), runs=runs).folder)
    told, label = recovery(run), final_clusters(run)
    assert told is not None and label is not None
    assert told["ari"] == pytest.approx(adjusted_rand_score(run.clients["group"], label))
    assert run.assignment().iloc[-1].tolist() == label.tolist()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(label=st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_the_table_of_clusters_counts_every_client_once(handmade: Callable[..., Run], label: list[int]) -> None:
    chart = cluster_confusion(handmade(GROUPS, clusters=found(label)))
    assert chart is not None and chart.data["group"].tolist() == ["min", "b", "c"]
    table = chart.data.set_index("group")
    expected = Counter(zip(GROUPS, map(str, label), strict=True))
    assert {(g, c): table.loc[g, c] for g in table.index for c in table.columns if table.loc[g, c]} == expected
    assert table.to_numpy().sum() == 8 and len(chart.marks) == len(expected)


# ---- who was served by which model -----------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=1, max_size=5),
    untested=st.sets(st.integers(0, 7), max_size=7), every=st.integers(1, 3),
)  # fmt: skip
def test_the_segments_cover_every_client_in_every_evaluated_round_once(
    handmade: Callable[..., Run], rows: list[list[int]], untested: set[int], every: int
) -> None:
    """Clients without test records are not known to be served by anything."""
    scores = [
        Score(every * (number + 1), client, "test", "served", "accuracy", 0.5, model, 10)
        for number, row in enumerate(rows)
        for client, model in enumerate(row)
        if client not in untested
    ]
    chart = assignment_ribbon(handmade(GROUPS, scores))
    used = {score.cluster for score in scores}
    assert (chart is None) == (max(used) == 0)  # type: ignore[type-var, operator]
    if chart is None:
        return
    rounds = [every * (number + 1) for number in range(len(rows))]
    covered: Counter[tuple[str, int, int]] = Counter()
    for segment in chart.data.to_dict("records"):
        inside = [r for r in rounds if segment["from_round"] <= r <= segment["to_round"]]
        covered.update((segment["client"], number, segment["model"]) for number in inside)
    expected = Counter((f"client {score.client}", score.round, score.cluster) for score in scores)
    assert covered == expected
    (mesh,) = [part for part in chart.figure.axes[0].collections if isinstance(part, QuadMesh)]
    drawn = np.ma.filled(mesh.get_array(), np.nan).reshape(8, len(rows))
    for group in set(GROUPS):  # in order already; within a group those served alike stand side by side
        clients = [client for client, name in enumerate(GROUPS) if name == group]
        seen = [[-1 if client in untested else row[client] for row in rows] for client in clients]
        assert sorted(np.nan_to_num(drawn[clients], nan=-1).tolist()) == sorted(seen)


def test_a_model_for_every_client_is_no_ribbon(handmade: Callable[..., Run]) -> None:
    many = [Score(1, c, "test", "served", "accuracy", 0.5, c, 10) for c in range(MOST_MODELS + 1)]
    assert assignment_ribbon(handmade(["a"] * (MOST_MODELS + 1), many)) is None
    personal = [Score(1, c, "test", "served", "accuracy", 0.5, None, 10) for c in range(3)]
    assert assignment_ribbon(handmade(["a"] * 3, personal)) is None


# ---- what the server saw ---------------------------------------------------------------------------


def cloud(count: int, covariance: np.ndarray, mean: tuple[float, float], seed: int) -> np.ndarray:
    """Points with exactly this mean and covariance (divided by n - 1)."""
    points = np.random.default_rng(seed).normal(size=(count, 2))
    points -= points.mean(axis=0)
    white = points @ np.linalg.inv(np.linalg.cholesky(np.cov(points.T))).T
    return white @ np.linalg.cholesky(covariance).T + np.array(mean)


def turned(degrees: float, long: float, short: float) -> np.ndarray:
    """The covariance of deviations `long` and `short` along axes that are turned by so much."""
    angle = np.radians(degrees)
    axes = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return axes @ np.diag([long**2, short**2]) @ axes.T


@pytest.mark.parametrize("degrees", [0.0, 30.0, 90.0, 150.0])
def test_an_ellipse_reaches_two_deviations_along_its_axes(handmade: Callable[..., Run], degrees: float) -> None:
    """Deviations 3 and 1: axes of length 12 and 4 from end to end, the longer one turned by the given angle."""
    plane = cloud(8, turned(degrees, 3.0, 1.0), (5.0, -2.0), 1)
    chart = cluster_plane(handmade(GROUPS, clusters=found([0] * 8, plane.tolist())))
    assert chart is not None
    (ellipse,) = [patch for patch in chart.figure.axes[0].patches if isinstance(patch, Ellipse)]
    lengths = {"width": ellipse.width, "height": ellipse.height}
    assert sorted(lengths.values()) == pytest.approx([4, 12]) and ellipse.center == pytest.approx((5, -2))
    along = ellipse.angle + (0 if ellipse.width > ellipse.height else 90)
    assert min((along - degrees) % 180, (degrees - along) % 180) == pytest.approx(0, abs=1e-6)


def test_a_few_points_take_the_shape_of_all(handmade: Callable[..., Run]) -> None:
    """Clusters of 2, 3 and 3: none tells its own shape. Pooled over 8 points and 3 means, by numpy."""
    label, plane = [0, 0, 1, 1, 1, 2, 2, 2], cloud(8, turned(20, 2, 1), (0, 0), 2)
    chart = cluster_plane(handmade(GROUPS, clusters=found(label, plane.tolist())))
    assert chart is not None
    parts = [plane[np.array(label) == c] for c in range(3)]
    scatter = sum((len(part) - 1) * np.cov(part.T) for part in parts)
    expected = 4 * np.sqrt(np.linalg.eigvalsh(scatter / (8 - 3)))
    ellipses = [patch for patch in chart.figure.axes[0].patches if isinstance(patch, Ellipse)]
    assert len(ellipses) == 3
    for ellipse, part in zip(ellipses, parts, strict=True):
        assert sorted([ellipse.width, ellipse.height]) == pytest.approx(sorted(expected))
        assert ellipse.center == pytest.approx(tuple(part.mean(axis=0)))
    assert chart.data[["first", "second"]].to_numpy() == pytest.approx(plane)
    assert chart.data["cluster"].tolist() == label and chart.data["group"].tolist() == GROUPS
    assert np.array([(x, y) for _, x, y, _ in chart.marks]) == pytest.approx(plane)


def test_points_that_all_lie_together_can_be_drawn(handmade: Callable[..., Run]) -> None:
    chart = cluster_plane(handmade(GROUPS, clusters=found([0] * 8, [[1.0, 1.0]] * 8)))
    assert chart is not None and len(chart.places()) == 8
