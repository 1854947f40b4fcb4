"""Runs under metric privacy: budgets against the ledger, read by hand; every form of run has a page that says what it
promises; and nobody else's page shows any of it."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dp_accounting import GaussianDpEvent
from matplotlib.collections import PathCollection

from fairveil.config import make_config
from fairveil.data.synthetic import LinearClusters, LoanGroups
from fairveil.plan import make_plan
from fairveil.privacy.accounting import price
from fairveil.provenance import published
from fairveil.reading import Run, load_run
from fairveil.report import Chart, build_page
from fairveil.report.budget import budget_by_round, spending
from fairveil.report.clusters import assignment_ribbon, cluster_confusion, cluster_plane, recovery
from fairveil.report.figures import clipped_by_round
from fairveil.report.generated import data_plane
from fairveil.report.metric import metric_budget_by_round, metric_budget_histogram, step_lengths
from fairveil.report.page import Card
from fairveil.report.run_page import run_page
from fairveil.run import Interrupted, RoundReport, run_plan
from fairveil.store import Score

FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "laplace": {},
    "one": {"algorithm": {"hypotheses": 1}},
    "spread": {"algorithm": {"spread": 11.0}},
    "faithful": {"algorithm": {"faithful": True}},
    "gaussian": {"algorithm": {"noise": "gaussian"}, "privacy": {"delta": 1e-4}},
    "silent": {"privacy": {"noise_multiplier": 0.0}},
    "much noise": {"privacy": {"noise_multiplier": 4.0}},
    "intercept": {"model": {"intercept": True}},
    "loans": {"data": {"dataset": "loan-groups"}},
}
FIGURES: dict[str, Callable[[Run], Chart | None]] = {
    "by round": metric_budget_by_round,
    "histogram": metric_budget_histogram,
    "steps": step_lengths,
}
RADIUS, ROUNDS, DRAWN, MOST = 0.5, 5, 5, 4


def config_of(form: str) -> dict[str, Any]:
    """Nine clients, of which five take part in a round, and four times at most: not all spend the same."""
    base: dict[str, dict[str, Any]] = {
        "data": {"dataset": "linear-clusters", "options": {"clients": [6, 3], "test_records": 5}},
        "model": {"name": "linear", "intercept": False},
        "algorithm": {
            "name": "metric-pfl", "hypotheses": 2, "rounds": ROUNDS, "clients_per_round": DRAWN,
            "max_participations": MOST, "batch_size": 10,
        },
        "privacy": {"noise_multiplier": 1.0, "clip_norm": RADIUS},
        "engine": {"workers": 1},
    }  # fmt: skip
    return {name: section | FORMS[form].get(name, {}) for name, section in base.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of every form."""
    runs = tmp_path_factory.mktemp("runs")
    return {
        form: run_plan(make_plan(make_config(config_of(form))), runs=runs / form.replace(" ", "-")).folder
        for form in FORMS
    }


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sent(folder: Path) -> list[tuple[int, int]]:
    """Round and client of every release, straight from the ledger: "round 3, ask 1"."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as database:
        rows = database.execute("SELECT request, unit FROM ledger").fetchall()
    return sorted((int(request.split()[1].rstrip(",")), unit) for request, unit in rows)


# ---- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "each"), [("laplace", 2.0), ("faithful", 2.0), ("much noise", 0.5), ("spread", 2.0)])
def test_budgets_are_what_the_ledger_holds(folders: dict[str, Path], form: str, each: float) -> None:
    """Two parameters: each time costs 2/nu at the radius."""
    run, releases = load_run(folders[form]), sent(folders[form])
    assert len(releases) == ROUNDS * DRAWN
    chart = metric_budget_by_round(run)
    assert chart is not None
    found = chart.data.set_index(["group", "round"])["epsilon"]
    for number in range(1, ROUNDS + 1):
        times = Counter(client for at, client in releases if at <= number)
        for name, clients in (("cluster 0", range(6)), ("cluster 1", range(6, 9))):
            assert found[name, number] == each * max(times[client] for client in clients)
        assert found["all", number] == each * float(np.median([times[client] for client in range(9)]))
    drawn = [line.get_ydata().tolist() for line in chart.figure.axes[0].lines]  # type: ignore[union-attr]
    assert drawn == [found[name].tolist() for name in ("cluster 0", "cluster 1", "all")]


@pytest.mark.parametrize(("form", "each"), [("laplace", 2.0), ("faithful", 2.0), ("much noise", 0.5)])
def test_the_histogram_has_a_bar_for_each_number_of_times(folders: dict[str, Path], form: str, each: float) -> None:
    chart = metric_budget_histogram(load_run(folders[form]))
    times = Counter(client for _, client in sent(folders[form]))
    counts = Counter(times[client] for client in range(9))
    assert chart is not None
    values = chart.data["epsilon"].tolist()
    assert values == pytest.approx([each * number for number in range(max(counts) + 1)])
    assert chart.data[["clients of cluster 0", "clients of cluster 1"]].sum(axis=1).tolist() == [
        counts[number] for number in range(max(counts) + 1)
    ]
    median, maximum = (line.get_xdata()[0] for line in chart.figure.axes[0].lines)  # type: ignore[index]
    spent = [each * times[client] for client in range(9)]
    assert (median, maximum) == (float(np.median(spent)), max(spent))
    assert f"median {np.median(spent):.4g}, maximum {max(spent):.4g}" in chart.caption
    told = [text for *_, text in chart.marks]
    assert told == [f"{counts[n]} clients have spent {each * n:.4g}" for n in sorted(counts)]


def test_many_times_are_put_into_forty_bins(folders: dict[str, Path]) -> None:
    """0 to 59 times by 60 clients, at 2 each: from 0 to 118."""
    run = load_run(folders["laplace"])
    clients = pd.DataFrame({"name": [str(c) for c in range(60)], "group": ["a"] * 60})
    rows = [(number, client, 2.0) for client in range(60) for number in range(1, client + 1)]
    releases = pd.DataFrame(rows, columns=["round", "client", "epsilon"])

    class Written(Run):
        def metric_releases(self) -> pd.DataFrame:
            return releases

    chart = metric_budget_histogram(Written(**(vars(run) | {"clients": clients})))
    assert chart is not None and len(chart.data) == 40 and chart.data["clients of a"].sum() == 60
    assert chart.data["to"].iloc[-1] == 118 and "median 59, maximum 118; 1 have not taken part" in chart.caption


def test_what_the_distance_of_the_guarantee_makes_of_them_is_said(folders: dict[str, Path]) -> None:
    """Two local models of one hypothesis are at most 2r = 1 apart; of hypotheses 11 apart, 12 = 24 r."""
    for form, told in (
        ("laplace", "the distance 1: its epsilon is 2 times as large"),
        ("one", "the distance 1: its epsilon is 2 times as large"),
        ("spread", "the distance 12: its epsilon is 24 times as large"),
        ("faithful", "not proved, and not a guarantee"),
    ):
        for figure in (metric_budget_by_round, metric_budget_histogram):
            chart = figure(load_run(folders[form]))
            assert chart is not None and told in chart.caption


@pytest.mark.parametrize(
    ("form", "distance", "epsilon"), [("laplace", 1, 4), ("one", 1, 4), ("spread", 12, 4), ("much noise", 1, 1)]
)
def test_epsilons_of_the_client_that_has_sent_most_add_up(
    folders: dict[str, Path], form: str, distance: float, epsilon: float
) -> None:
    """n/(nu r) = 2/0.5 = 4 for each unit of distance, each time; four times are planned."""
    run, releases = load_run(folders[form]), sent(folders[form])
    times = Counter(client for _, client in releases)
    found, each = spending(run), epsilon * distance
    assert times[found.unit] == max(times.values()) and found.planned is not None and found.posted is not None
    assert (found.planned.epsilon, found.planned.accountant, found.planned.delta) == (MOST * each, "sum", 0.0)
    assert found.posted.epsilon == each * times[found.unit]
    kind = "local model under metric privacy"
    rounds = [number for number, client in releases if client == found.unit]
    assert found.by_round["round"].tolist() == rounds
    assert found.by_round[kind].tolist() == pytest.approx([each * (place + 1) for place in range(len(rounds))])
    chart = budget_by_round(run, found)
    assert chart is not None and "add up" in chart.caption and "Renyi" not in chart.caption


def test_with_gaussian_noise_the_usual_figure_is_drawn(folders: dict[str, Path]) -> None:
    """Standard deviation nu r = 0.5 against a distance of 1: a multiplier of 1/2."""
    run, times = load_run(folders["gaussian"]), Counter(client for _, client in sent(folders["gaussian"]))
    found = spending(run)
    assert found.planned == price({GaussianDpEvent(0.5): MOST}, 1e-4)
    assert found.posted == price({GaussianDpEvent(0.5): max(times.values())}, 1e-4)
    assert budget_by_round(run, found) is not None
    assert metric_budget_by_round(run) is None and metric_budget_histogram(run) is None


def test_a_bar_lasts_until_more_is_sent(folders: dict[str, Path]) -> None:
    run = load_run(folders["laplace"])
    found, chart = spending(run), budget_by_round(run)
    assert chart is not None
    starts = [bar.get_x() for bar in chart.figure.axes[0].patches]  # type: ignore[attr-defined]
    assert starts == [number - 0.5 for number in found.by_round["round"]]
    last = chart.figure.axes[0].patches[-1]
    assert last.get_x() + last.get_width() == ROUNDS + 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["silent", "faithful"])
def test_what_has_no_price_has_no_figure_of_it(folders: dict[str, Path], form: str) -> None:
    run = load_run(folders[form])
    assert budget_by_round(run) is None
    assert (metric_budget_by_round(run) is None) == (form == "silent") == (metric_budget_histogram(run) is None)


# ---- steps -----------------------------------------------------------------------------------------


def test_steps_are_the_medians_of_those_that_took_part(folders: dict[str, Path]) -> None:
    """By pandas from the long table, in which every value stands by itself."""
    run = load_run(folders["laplace"])
    chart, clipped = step_lengths(run), clipped_by_round([run])
    assert chart is not None and clipped is not None
    steps = run.metrics[run.metrics["metric"] == "step"]
    assert len(steps) == ROUNDS * DRAWN
    expected = steps.groupby(["group", "round"], observed=True)["value"]
    found = chart.data.set_index(["group", "round"])
    assert found["median"].to_dict() == pytest.approx(expected.median().to_dict())
    assert found["clients"].to_dict() == expected.count().to_dict()
    radius = chart.figure.axes[0].lines[-1]
    assert radius.get_ydata()[0] == RADIUS and "n = 5 a round" in chart.caption  # type: ignore[index]
    share = steps.assign(long=steps["value"] > RADIUS).groupby(["group", "round"], observed=True)["long"].mean()
    assert clipped.data.set_index(["group", "round"])["mean"].to_dict() == pytest.approx(share.to_dict())
    assert "longer than the radius, 0.5" in clipped.caption and "gradients" not in clipped.caption


def test_where_nothing_is_clipped_no_radius_is_shown(folders: dict[str, Path]) -> None:
    run = load_run(folders["faithful"])
    chart = step_lengths(run)
    assert clipped_by_round([run]) is None and chart is not None and len(chart.figure.axes[0].lines) == 2
    assert "gives them away" in chart.caption


@pytest.mark.parametrize(("form", "length"), [("laplace", "0.5"), ("gaussian", "0.707"), ("much noise", "2")])
def test_the_length_of_the_noise_is_told(folders: dict[str, Path], form: str, length: str) -> None:
    """Laplace: nu r in the mean; Gaussian: about nu r sqrt(2)."""
    chart = step_lengths(load_run(folders[form]))
    assert chart is not None and f"about the length {length}, in proportion" in chart.caption


# ---- clusters --------------------------------------------------------------------------------------


def test_the_plane_shows_the_last_round_and_the_hypotheses(folders: dict[str, Path]) -> None:
    """Two parameters: they are the axes, with their numbers."""
    run = load_run(folders["laplace"])
    chart = cluster_plane(run)
    assert chart is not None and run.clusters is not None and chart.title == "The noisy local models of round 5"
    last = [client for number, client in sent(run.folder) if number == ROUNDS]
    clients, hypotheses = (chart.data[chart.data["what"] == what] for what in ("client", "hypothesis"))
    assert clients["client"].tolist() == [run.clients["name"][client] for client in last]
    assert clients[["first", "second"]].to_numpy().tolist() == [run.clusters["plane"][client] for client in last]
    assert hypotheses[["first", "second"]].to_numpy().tolist() == run.clusters["centres"]
    (axes,) = chart.figure.axes
    assert axes.get_xlabel() == "first parameter" and len(chart.places()) == DRAWN + 2
    assert axes.xaxis.get_tick_params()["labelbottom"]
    stars = [dots for dots in axes.collections if isinstance(dots, PathCollection) and dots.get_sizes()[0] == 190]
    assert [dots.get_offsets().tolist()[0] for dots in stars] == run.clusters["centres"]  # type: ignore[union-attr]
    for x, y in run.clusters["centres"]:
        assert axes.get_xlim()[0] < x < axes.get_xlim()[1] and axes.get_ylim()[0] < y < axes.get_ylim()[1]


def test_more_parameters_are_shown_by_principal_directions(folders: dict[str, Path]) -> None:
    chart = cluster_plane(load_run(folders["intercept"]))
    assert chart is not None and chart.figure.axes[0].get_xlabel() == "first principal direction"
    assert "two directions in which they differ most" in chart.caption
    quiet = cluster_plane(load_run(folders["silent"]))
    assert quiet is not None and "noisy" not in quiet.title + quiet.caption


def test_who_was_never_seen_is_not_counted(handmade: Callable[..., Run]) -> None:
    """Six of eight clients were seen, five of them in the last round: group b by itself, one of a among c."""
    groups = ["a", "a", "a", "b", "b", "c", "c", "c"]
    label, shown = [0, 0, -1, 1, 1, 0, 0, -1], [0, 1, 3, 4, 6]
    plane = [[float(client), 1.0] if client in shown else None for client in range(8)]
    figures: dict[str, Any] = dict.fromkeys(("mss", "mpo", "switch_round", "iterations"))
    found = figures | {"count": 2, "ari": 0.5, "of_client": label, "plane": plane, "centres": [[0.0, 0.0], [4.0, 1.0]]}
    run = handmade(groups, clusters=found)
    told, picture, table = recovery(run), cluster_plane(run), cluster_confusion(run)
    assert told is not None and (told["seen"], told["groups"]) == (6, 3)
    assert (told["exact"], told["minority_alone"]) == (False, told["minority"] == "b")
    assert picture is not None and "of 5 clients" in picture.caption and "nobody is" not in picture.caption
    without = handmade(groups, clusters=found | {"plane": [*plane[:6], None, None]})
    fewer = cluster_plane(without)
    assert fewer is not None and "of 4 clients" in fewer.caption and "Of 1 group nobody is among them." in fewer.caption
    assert picture.data.loc[picture.data["what"] == "client", "first"].tolist() == shown
    assert table is not None and table.data.columns.tolist() == ["group", "0", "1"]
    assert table.data.set_index("group").to_numpy().tolist() == [[2, 0], [0, 2], [2, 0]]
    assert table.caption.startswith("6 clients") and "2 others have never taken part" in table.caption


def test_before_anyone_was_seen_there_are_no_clusters(handmade: Callable[..., Run]) -> None:
    found = {"count": 2, "ari": None, "of_client": [-1, -1], "plane": [None, None], "centres": [[0.0, 0.0], [1.0, 1.0]]}
    run = handmade(["a", "b"], clusters=found)
    assert recovery(run) is None and cluster_plane(run) is None and cluster_confusion(run) is None


def test_the_ribbon_shows_what_clients_choose(folders: dict[str, Path]) -> None:
    run = load_run(folders["laplace"])
    chart, chosen = assignment_ribbon(run), run.assignment()
    assert chart is not None and "each takes the one that fits its own training records best" in chart.caption
    covered = {
        (row["client"], number): row["model"]
        for row in chart.data.to_dict("records")
        for number in range(row["from_round"], row["to_round"] + 1)
    }
    expected = {(run.clients["name"][c], r): chosen.loc[r, c] for r in chosen.index for c in chosen.columns}
    assert covered == expected


def test_a_group_called_like_a_cluster_is_told_from_it(folders: dict[str, Path]) -> None:
    chart = cluster_plane(load_run(folders["laplace"]))
    assert chart is not None
    names = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert names == ["found: cluster 0", "found: cluster 1", "group: cluster 0", "group: cluster 1", "hypothesis"]


# ---- records that were generated -------------------------------------------------------------------


def test_generated_records_are_drawn_again(folders: dict[str, Path]) -> None:
    """As the dataset gives them, client by client; three panels: each group, and all."""
    run = load_run(folders["laplace"])
    chart = data_plane(run)
    assert chart is not None and [axes.get_title() for axes in chart.figure.axes[:3]] == [
        "cluster 0",
        "cluster 1",
        "all",
    ]
    federation = LinearClusters(clients=(6, 3), test_records=5).load(0)
    records = [federation.load(client).train for client in range(9)]
    assert chart.data[["x1", "x2"]].to_numpy() == pytest.approx(np.concatenate([r.x.numpy() for r in records]))
    assert chart.data["target"].to_numpy() == pytest.approx(np.concatenate([r.y.numpy() for r in records]))
    assert "90 training records" in chart.caption and chart.marks and chart.svg()


def test_colours_are_the_decisions_where_there_are_any(folders: dict[str, Path]) -> None:
    """A loan for the majority from 0 on, for the minority up to 15."""
    chart = data_plane(load_run(folders["loans"]))
    assert chart is not None
    y, majority = chart.data["y"].to_numpy(), (chart.data["group"] == "majority").to_numpy()
    assert majority.sum() == 60 and len(y) == 90
    assert chart.data["decision"].tolist() == np.where(majority, y >= LoanGroups.SHIFT[0], y <= 15).tolist()
    names = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert names == ["majority", "minority", "decision 0", "decision 1"]


def test_classes_have_colours_and_many_clients_are_cut(handmade: Callable[..., Run]) -> None:
    """Fifty clients of one group, of which forty are shown: no panel but that of all."""
    data = {"dataset": "gaussian-clusters", "options": {"clients": [50], "features": 2, "classes": 3, "records": 4}}
    federation = make_config(config_of("laplace") | {"data": data}).build_federation()
    run = handmade(["all"] * 50, facts={"features": [2], "classes": 3}, data=data)
    assert data_plane(run) is None  # its fingerprint is another
    chart = data_plane(replace(run, provenance={"data": published(federation.fingerprint)}))
    assert chart is not None and len(chart.data) == 160 and set(chart.data["class"]) <= {0, 1, 2}
    assert len(chart.figure.axes) == 1


@pytest.mark.parametrize(
    "data",
    [
        {"dataset": "digits"},
        {"dataset": "somebody.module:Theirs"},
        {"dataset": "linear-clusters", "options": {"clients": "nonsense"}},
        {"dataset": "gaussian-clusters"},
    ],
)
def test_no_other_records_are_ever_shown(handmade: Callable[..., Run], data: dict[str, Any]) -> None:
    features = [10] if data["dataset"] == "gaussian-clusters" else [2]
    assert data_plane(handmade(["a"], facts={"features": features}, data=data)) is None
    assert data_plane(handmade(["a"])) is None


# ---- the page --------------------------------------------------------------------------------------


def cards(folder: Path) -> dict[str, Card]:
    verdict = run_page(load_run(folder)).sections[0]
    return {card.label: card for card in verdict.blocks if isinstance(card, Card)}


def test_every_form_has_a_page(folders: dict[str, Path], form: str) -> None:
    html = build_page(folders[form]).html()
    assert "What is sent, by each client." in html and "(add-remove)" not in html and "MORE THAN STATED" not in html
    private = form not in ("faithful", "silent")
    assert ("Promised" in html and "Not promised" in html) == private
    assert ("as stated" in html) == (form != "faithful")
    keys = set(re.findall(r'data-chart="([^"]*)"', html))
    assert ("metric-budget" in keys) == ("metric-budgets" in keys) == (form not in ("gaussian", "silent"))
    assert ("budget" in keys) == private and {"steps-by-round", "records", "clusters"} <= keys


@pytest.mark.parametrize(
    ("form", "value", "note", "warn"),
    [
        ("laplace", "ε = 16", "δ = 0, for one client, among records that choose the same models; not for its", False),
        ("one", "ε = 16", "for one client with all its records, replaced by any others; metric privacy", False),
        ("spread", "ε = 192", "any others; metric privacy, added up; so large that the number alone protects no", True),
        ("intercept", "ε = 24", "so large that the number alone protects nobody", True),
        ("much noise", "ε = 4", "metric privacy, added up", False),
        ("faithful", "none", "in proportion to its own step, and gives its length away", True),
        ("silent", "none", "local models are sent without noise", True),
    ],
)
def test_the_verdict_says_what_is_protected(
    folders: dict[str, Path], form: str, value: str, note: str, warn: bool
) -> None:
    """Four times n/nu * 2, by hand: 4 * 2/1 * 2 = 16; with a spread of 11, 4 * 4 * 12 = 192."""
    card = cards(folders[form])["Guarantee"]
    assert (card.value, card.warn) == (value, warn) and note in card.note
    assert ("protects nobody" in card.note) == (warn and value != "none")


def test_the_card_of_the_budget_is_of_the_client_that_spent_most(folders: dict[str, Path]) -> None:
    most = max(Counter(client for _, client in sent(folders["laplace"])).values())
    card = cards(folders["laplace"])["Budget spent"]
    assert card.value == f"{4 * most} of 16" and card.note.endswith("by the client that has sent most, of 9")
    most = max(Counter(client for _, client in sent(folders["faithful"])).values())
    card = cards(folders["faithful"])["Budget spent"]
    assert card.value == "unbounded" and f"Galli et al. (2023) count {2 * most} at most, which is not" in card.note
    assert cards(folders["silent"])["Budget spent"].note == "all rounds are done"


def test_a_run_that_was_stopped_has_a_page(tmp_path: Path) -> None:
    def watch(report: RoundReport) -> None:
        if report.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run_plan(make_plan(make_config(config_of("laplace"))), runs=tmp_path, progress=watch)
    (folder,) = tmp_path.iterdir()
    run = load_run(folder)
    chart, plane = metric_budget_by_round(run), cluster_plane(run)
    assert chart is not None and chart.data["round"].max() == 2 and plane is not None and "round 2" in plane.title
    assert "after 2 of 5 rounds" in build_page(folder).html()


@pytest.mark.parametrize("name", FIGURES)
def test_of_other_promises_there_is_no_such_figure(
    small: dict[str, Any], runs: Path, handmade: Callable[..., Run], name: str
) -> None:
    rows = [Score(1, 0, "train", "local_update, ask 1", metric, 0.5) for metric in ("step", "clipped")]
    assert FIGURES[name](handmade(["a"], rows)) is None
    if name == "steps":
        folder = run_plan(make_plan(make_config(small)), runs=runs).folder
        html = build_page(folder).html()
        keys = set(re.findall(r'data-chart="([^"]*)"', html))
        assert "budget" in keys and not keys & {"metric-budget", "metric-budgets", "steps-by-round", "records"}
        assert "Galli" not in html


@pytest.mark.parametrize("name", [*FIGURES, "plane"])
def test_names_are_texts_in_these_figures_too(folders: dict[str, Path], name: str) -> None:
    run = load_run(folders["laplace"])
    hostile = {"cluster 0": "<script>alert(1)</script>", "cluster 1": "$x^2$ & _"}
    names = [f"</script><b>{client}" for client in range(9)]
    clients = run.clients.assign(group=run.clients["group"].map(hostile), name=names)
    chart = (FIGURES | {"plane": cluster_plane})[name](replace(run, clients=clients))
    assert chart is not None
    svg = chart.svg()
    assert "<script" not in svg and "&lt;script" in svg and "$x^2$ &amp; _" in svg
    assert len(chart.places()) == len(chart.marks)


def test_every_figure_can_be_drawn_and_is_said_in_full(folders: dict[str, Path], form: str) -> None:
    run = load_run(folders[form])
    for section in run_page(run).sections:
        for chart in section.blocks:
            if isinstance(chart, Chart):
                assert len(chart.data) and chart.marks and chart.caption.endswith(".")
                assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y, _ in chart.places())
                json.dumps(chart.places(), allow_nan=False)
                assert not any(isinstance(v, float) and math.isinf(v) for v in chart.data.to_numpy().ravel().tolist())
                assert chart.svg() and chart.csv()
