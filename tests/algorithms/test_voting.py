"""The voting systems against their definitions: teachers and neighbours vote, the winners teach a student."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.neighbors import NearestNeighbors

from fairveil.config import RunConfig, make_config
from fairveil.contract import outcome
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.votes import NeighbourVotes, NoisyVotes
from fairveil.reading import load_run
from fairveil.run import RunResult, run_plan, start_run

QUERIES = 60


def config(name: str, privacy: dict[str, Any] | None = None, split: Any = None, **algorithm: Any) -> RunConfig:
    """Eight clients with digits, and a server that holds some of the test rows."""
    return make_config(
        {
            "data": {
                "dataset": "digits",
                "split": split or {"kind": "iid", "clients": 8},
                "server": {"dataset": "digits", "rows": "test"},
            },
            "model": {"name": "logistic"},
            "algorithm": {"name": name, "queries": QUERIES, "student_steps": 50} | algorithm,
            "privacy": {"noise_multiplier": 0.0, "delta": 1e-4} if privacy is None else privacy,
            "engine": {"workers": 1},
        }
    )


def state_of(result: RunResult) -> dict[str, Any]:
    return dict(outcome(result.folder).checkpoint.state)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact, of a Gaussian release of mean mu over its deviation (Balle and Wang 2018, Theorem 8)."""

    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    return float(brentq(excess, 0, 200))


# ---- votes -----------------------------------------------------------------------------------------


def test_without_noise_the_label_is_what_most_teachers_say(runs: Path) -> None:
    """Counted by hand from the teachers, which are linear and the clients' personal state; ties to the lowest class."""
    result = start_run(config("pate-fl"), runs=runs)
    found = outcome(result.folder).checkpoint
    public = config("pate-fl").build_federation().server.x[:QUERIES].flatten(1)  # type: ignore[union-attr]
    counts = np.zeros((QUERIES, 10), int)
    assert sorted(found.personal) == list(range(8))
    for kept in found.personal.values():
        weight, bias = kept["model"][:640].reshape(10, 64), kept["model"][640:]
        counts[np.arange(QUERIES), (public @ weight.T + bias).argmax(dim=1).numpy()] += 1
    assert found.state["labels"].tolist() == counts.argmax(axis=1).tolist()
    assert (counts.max(axis=1) < 8).any()  # they do not always agree
    assert len({tuple(kept["model"].tolist()) for kept in found.personal.values()}) == 8


@pytest.mark.parametrize("k", [1, 4])
def test_without_noise_the_label_is_that_of_most_neighbours(runs: Path, k: int) -> None:
    """By scikit-learn's neighbours. Where two distances are as good as equal, hers may be others: such queries are left
    out, and they are few."""
    result = start_run(config("knn-fl", neighbours=k), runs=runs)
    federation = config("knn-fl").build_federation()
    assert federation.server is not None
    public = federation.server.x[:QUERIES].flatten(1).double().numpy()
    counts, clear = np.zeros((QUERIES, 10)), np.ones(QUERIES, bool)
    for client in range(8):
        train = federation.load(client).train
        distance, index = (
            NearestNeighbors(n_neighbors=k + 1).fit(train.x.flatten(1).double().numpy()).kneighbors(public)
        )
        clear &= distance[:, k] - distance[:, k - 1] > 1e-4
        for column in index.T[:k]:
            counts[np.arange(QUERIES), train.y.numpy()[column]] += 1
    labels = np.asarray(state_of(result)["labels"])
    assert clear.sum() > 0.8 * QUERIES
    assert labels[clear].tolist() == counts.argmax(axis=1)[clear].tolist()
    assert not outcome(result.folder).checkpoint.personal  # nothing is trained at the clients


def test_queries_in_parts_are_the_same_queries(runs: Path) -> None:
    """Asked in three rounds, each once: without noise the labels are those of one round, and the price is the same."""
    whole, parts = (start_run(config("knn-fl", rounds=n), runs=runs) for n in (1, 3))
    assert state_of(whole)["labels"].tolist() == state_of(parts)["labels"].tolist()
    noisy = [make_plan(config("knn-fl", {"noise_multiplier": 9.0, "delta": 1e-4}, rounds=n)) for n in (1, 3)]
    assert noisy[0].price.epsilon == pytest.approx(noisy[1].price.epsilon, rel=1e-6)
    assert sum(count for count in noisy[1].releases[FEDERATION].values()) == 3
    odd = make_plan(config("knn-fl", {"noise_multiplier": 9.0, "delta": 1e-4}, rounds=7))
    assert sum(m.queries * n for m, n in odd.releases[FEDERATION].items()) == QUERIES  # type: ignore[attr-defined]


def test_only_confident_answers_teach(runs: Path) -> None:
    """Almost without noise: answered where enough agree, the first of them; others stay without a label."""
    privacy = {"noise_multiplier": 1e-3, "delta": 1e-4}
    everything = start_run(config("knn-fl", {"noise_multiplier": 0.0, "delta": 1e-4}), runs=runs)
    some = start_run(config("knn-fl", privacy, confidence=0.9, answers=20), runs=runs)
    labels, all_labels = state_of(some)["labels"], state_of(everything)["labels"]
    answered = labels >= 0
    assert answered.sum() == 20 and (labels[answered] == all_labels[answered]).all()
    assert some.votes is not None and some.votes["answered"] == 20 and some.votes["queries"] == QUERIES
    confident = load_run(some.folder).metrics.query("metric == 'agreement'")
    assert float(confident["value"].iloc[0]) >= 0.9 * 8 - 0.01 and confident["group"].isna().all()
    nobody = start_run(config("knn-fl", privacy, confidence=1.0, answers=1, neighbours=40), runs=runs)
    assert nobody.votes is not None and nobody.votes["answered"] <= 1  # with 40 neighbours hardly all agree


def test_a_student_learns_what_the_clients_know(runs: Path) -> None:
    """It is right for most test records after 60 noisy labels; and what is told of the answers adds up."""
    result = start_run(config("pate-fl", {"noise_multiplier": 0.5, "delta": 1e-4}, student_steps=600), runs=runs)
    assert result.votes is not None and result.votes["accuracy"] > 0.8
    assert result.metrics["accuracy"].mean > 0.7
    by_class = result.votes["by_class"]
    assert sum(by_class["answers"]) == sum(by_class["true"]) == QUERIES
    assert sum(by_class["right"]) == round(QUERIES * result.votes["accuracy"])


def test_classes_that_no_client_has_seen_are_not_the_answer(runs: Path) -> None:
    """Three clients with two records each hold at most six of ten classes. Their neighbours name no others; a teacher
    may, and is then right by chance alone. The run goes on."""
    law = {"clients": [3], "records": 2, "test_records": 5, "classes": 10}
    for name, own in (("knn-fl", {"neighbours": 2}), ("pate-fl", {"local_epochs": 100})):
        chosen = config(name, {"noise_multiplier": 0.01, "delta": 1e-4}, **own).resolved()
        server = {"dataset": "gaussian-clusters", "options": law | {"clients": [1], "records": 100}}
        chosen["data"] = {"dataset": "gaussian-clusters", "options": law, "server": server}
        federation = make_config(chosen).build_federation()
        seen = {int(y) for client in range(3) for y in federation.load(client).train.y}
        assert federation.server is not None and len(seen) <= 6 < len(federation.server.labels[:QUERIES].unique())
        result = start_run(make_config(chosen), runs=runs)
        assert name == "pate-fl" or set(state_of(result)["labels"].tolist()) <= seen
        assert result.votes is not None and 0 < result.votes["accuracy"] < 1


# ---- the price -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unit", "adjacency", "sensitivity"),
    [
        ("pate-fl", "client", "add-remove", 1.0),
        ("pate-fl", "client", "replace", math.sqrt(2)),
        ("pate-fl", "record", "add-remove", math.sqrt(2)),
        ("knn-fl", "client", "add-remove", 1.0),
        ("knn-fl", "record", "add-remove", math.sqrt(2) / 3),
        ("knn-fl", "record", "replace", math.sqrt(2) / 3),
    ],
)
def test_the_price_of_a_run_is_that_of_its_queries(name: str, unit: str, adjacency: str, sensitivity: float) -> None:
    """Q Gaussian sums of this sensitivity, exactly."""
    own = {"neighbours": 3} if name == "knn-fl" else {}
    privacy = {"noise_multiplier": 5.0, "delta": 1e-4, "unit": unit, "adjacency": adjacency, "accountant": "pld"}
    plan = make_plan(config(name, privacy, **own))
    exact = gaussian_epsilon(math.sqrt(QUERIES) * sensitivity / 5.0, 1e-4)
    assert exact <= plan.price.epsilon <= exact * 1.002
    (mechanism,) = plan.releases[FEDERATION]
    assert isinstance(mechanism, NeighbourVotes if own else NoisyVotes) and plan.pooled and plan.unit == unit
    assert ("one record of any client" if unit == "record" else "one client") in plan.statement().sentence()


@pytest.mark.parametrize("more", [{}, {"confidence": 0.5, "answers": 30}, {"publish_cost": True}])
def test_the_noise_is_solved_for_a_budget(more: dict[str, Any], runs: Path) -> None:
    plan = make_plan(config("pate-fl", {"epsilon": 6.0, "delta": 1e-4}, **more))
    assert 5.9 < plan.price.epsilon <= 6.0
    result = run_plan(plan, runs=runs)
    assert result.statement.epsilon_spent == pytest.approx(plan.price.epsilon)
    assert result.votes is not None
    for key in ("epsilon_not_sanitised", *(["epsilon_sanitised"] if "publish_cost" in more else [])):
        assert 0 < result.votes[key] <= plan.price.epsilon + 1e-9
    assert "epsilon_sanitised" in result.votes or "publish_cost" not in more
    assert json.loads((result.folder / "result.json").read_text())["votes"] == result.votes


def test_without_noise_no_price_is_published(runs: Path) -> None:
    result = start_run(config("pate-fl", publish_cost=True), runs=runs)
    assert result.statement.epsilon == math.inf and result.votes is not None
    assert "epsilon_sanitised" not in result.votes and "epsilon_not_sanitised" not in result.votes


def test_noise_that_clients_make_needs_no_more_than_the_servers(runs: Path) -> None:
    """Two may fail; the statement says that the server sees what each sends, unless a secure sum is simulated."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4}
    plan = make_plan(config("pate-fl", privacy, noise="distributed", tolerated=2))
    assert plan.price == make_plan(config("pate-fl", privacy)).price
    words = dict(plan.statement().lines())
    assert "up to 2 of the 8 may drop out" in words["Trusted"] and "the server is trusted too" in words["Trusted"]
    secure = make_plan(config("pate-fl", privacy | {"trust": "secure-sum"}, noise="distributed"))
    assert "only SIMULATED" in dict(secure.statement().lines())["Trusted"]
    result = run_plan(plan, runs=runs)
    assert result.votes is not None and result.votes["accuracy"] > 0.6
    assert "epsilon_not_sanitised" not in result.votes  # nobody has seen the votes without noise


def test_teachers_are_served_to_nobody(runs: Path) -> None:
    """The folder's models are the student alone; what is published of it is a function of labels and public records."""
    result = start_run(config("pate-fl", {"noise_multiplier": 1.0, "delta": 1e-4}), runs=runs)
    served = (result.folder / "models" / "served.safetensors").stat().st_size
    assert served < 2 * 4 * 650
    labels = state_of(result)["labels"]
    assert isinstance(labels, np.ndarray | torch.Tensor) and len(labels) == QUERIES
    assert load_run(result.folder).posted(FEDERATION)[0][2] == "winners of votes"


# ---- adaptation ------------------------------------------------------------------------------------


def test_adapted_teachers_are_others_and_see_public_records_only(runs: Path) -> None:
    plain, drawn = (start_run(config("pate-fl", adaptation=w), runs=runs) for w in (0.0, 0.5))
    kept = [outcome(result.folder).checkpoint.personal for result in (plain, drawn)]
    assert all(not torch.equal(kept[0][c]["model"], kept[1][c]["model"]) for c in range(8))
    assert drawn.votes is not None and drawn.votes["accuracy"] > 0.7


# ---- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "algorithm", "words"),
    [
        ("pate-fl", {"queries": 0}, "queries = 0"),
        ("pate-fl", {"queries": 180}, "is more than the server has records: 179"),
        ("pate-fl", {"rounds": 61}, "rounds = 61 is more than algorithm.queries = 60"),
        ("pate-fl", {"answers": 10}, "answers = 10 makes no sense"),
        ("pate-fl", {"confidence": 0.5, "answers": 61}, "answers = 61 makes no sense"),
        ("pate-fl", {"tolerated": 1}, "tolerated = 1 makes no sense"),
        ("pate-fl", {"noise": "distributed", "tolerated": 8}, "tolerated = 8 makes no sense"),
        ("pate-fl", {"noise": "distributed", "confidence": 0.5}, "confidence does not go with"),
        ("pate-fl", {"noise": "distributed", "publish_cost": True}, "publish_cost does not go with"),
        ("pate-fl", {"confidence": 0.5, "publish_cost": True}, "does not go with algorithm.confidence"),
        ("pate-fl", {"neighbours": 3}, "neighbours = 3 is not a known key"),
        ("knn-fl", {"neighbours": 0}, "neighbours = 0"),
        ("knn-fl", {"neighbours": 200}, "neighbours = 200 is more than a client has records: 177"),
        ("knn-fl", {"features": "hogs"}, 'features = "hogs"'),
        ("knn-fl", {"features": "nowhere:Net"}, "nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, algorithm: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        make_plan(config(name, {"noise_multiplier": 1.0, "delta": 1e-4}, **algorithm))
    assert words in error.value.what


def test_a_system_of_votes_needs_public_records() -> None:
    plain = config("pate-fl").resolved()
    del plain["data"]["server"]
    with pytest.raises(UserError, match=r"data\.server is missing"):
        make_plan(make_config(plain))


def test_a_published_price_is_for_added_or_removed_units() -> None:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-4, "adjacency": "replace"}
    with pytest.raises(UserError, match="publish_cost"):
        make_plan(config("pate-fl", privacy, publish_cost=True))


def test_records_that_several_clients_hold_have_no_price_in_a_vote() -> None:
    split = {"kind": "iid", "clients": 8, "records": 300, "overlap": True}
    with pytest.raises(UserError, match="where clients overlap"):
        make_plan(config("knn-fl", {"noise_multiplier": 1.0, "delta": 1e-4, "unit": "record"}, split))
    assert make_plan(config("knn-fl", {"noise_multiplier": 1.0, "delta": 1e-4}, split)).price.epsilon < math.inf


def test_clients_without_records_are_refused() -> None:
    with pytest.raises(UserError, match="clients = 1439"):
        make_plan(config("knn-fl", {"noise_multiplier": 1.0, "delta": 1e-4}, {"kind": "iid", "clients": 1439}))


def test_numbers_cannot_be_voted_for() -> None:
    chosen = config("pate-fl").resolved()
    chosen["data"] = {"dataset": "linear-clusters"}
    chosen["model"] = {"name": "linear"}
    with pytest.raises(UserError, match=r"data\.server is missing"):
        make_plan(make_config(chosen))
