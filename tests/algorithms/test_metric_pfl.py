"""Personalised learning under metric privacy: without noise it is what its paper says, written out here; who takes
part how often, what a run says of itself, and the synthetic experiment."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.cluster import KMeans
from torch import Tensor

from fairveil.algorithms import ALGORITHMS
from fairveil.algorithms.base import Unit
from fairveil.algorithms.metric_pfl import MetricPFL
from fairveil.clustering import kmeans_from
from fairveil.config import RunConfig, make_config
from fairveil.contract import differ, outcome
from fairveil.data.federation import Records
from fairveil.data.synthetic import LinearClusters
from fairveil.errors import UserError
from fairveil.models import ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.metric import GaussianBall, LaplaceBall, LaplaceStep
from fairveil.privacy.release import digest_values
from fairveil.privacy.statement import MetricTerms
from fairveil.privacy.training import NoisyTraining
from fairveil.reading import load_run
from fairveil.run import Interrupted, RoundReport, resume_run, run_plan, start_run
from fairveil.session import Session, Terms
from fairveil.store import Store
from fairveil.streams import Stream
from fairveil.tasks import best_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "metric-privacy" / "synthetic.toml"
THETA = np.array([[5.0, 6.0], [4.0, -4.5]])  # Galli et al. (2023)
RATE = 0.1


def config(sections: dict[str, Any] | None = None, clients: tuple[int, int] = (4, 4), **options: Any) -> RunConfig:
    """Two kinds of clients with 10 records each, full batches, two parameters; no noise unless `sections` say so."""
    values: dict[str, Any] = {
        "data": {"dataset": "linear-clusters", "options": {"clients": list(clients)}, "sizes": "public"},
        "model": {"name": "linear", "intercept": False},
        "algorithm": {"name": "metric-pfl", "rounds": 4, "batch_size": 100, "learning_rate": RATE, "local_epochs": 3},
        "privacy": {"noise_multiplier": 0.0, "clip_norm": math.inf},
        "engine": {"workers": 1},
        "metrics": {"every": 100},
    }
    return make_config(values | {"algorithm": values["algorithm"] | options} | (sections or {}))


def noisy(nu: float = 1.0, radius: float = 0.5, **privacy: Any) -> dict[str, Any]:
    return {"privacy": {"noise_multiplier": nu, "clip_norm": radius} | privacy}


def run(of: RunConfig, runs: Path) -> dict[str, Any]:
    """The last state of a run."""
    return outcome(run_plan(make_plan(of), runs=runs).folder).checkpoint.state


def models_of(state: dict[str, Any]) -> np.ndarray:
    return torch.as_tensor(state["models"]).double().numpy()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]]:
    """What clients were asked with, and what the server got, request by request: who, hypotheses, replies."""
    found: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]] = []
    ask = Session.ask

    def note(self: Session, task: Any, clients: np.ndarray, **given: Any) -> Any:
        replies = ask(self, task, clients, **given)
        if task.__name__ == "personal_update":
            found.append((clients.copy(), given["shared"]["models"].clone(), cast(Any, replies)))
        return replies

    monkeypatch.setattr(Session, "ask", note)
    return found


class Written:
    """Linear regression on the clients' records, in numpy: loss (y - x.w)^2 / 2, its gradient x (x.w - y)."""

    def __init__(self, of: RunConfig) -> None:
        federation = of.build_federation()
        data = [federation.load(i).train for i in range(federation.clients)]
        self.x = [d.x.double().numpy().reshape(len(d), -1) for d in data]
        self.y = [d.y.double().numpy() for d in data]
        model = of.model_spec(federation).build()
        count = of.build_algorithm().hypotheses  # type: ignore[attr-defined]
        self.first = np.stack(
            [model.initial(Stream(of.seed, f"hypothesis {j}")).double().numpy() for j in range(count)]
        )

    def loss(self, client: int, w: np.ndarray) -> float:
        return float(np.mean((self.x[client] @ w - self.y[client]) ** 2) / 2)

    def descended(self, client: int, w: np.ndarray, steps: int = 3) -> np.ndarray:
        for _ in range(steps):
            w = w - RATE * self.x[client].T @ (self.x[client] @ w - self.y[client]) / len(self.y[client])
        return w

    def rounds(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Algorithm 1 of Galli et al. without noise, all clients; the hypotheses, and the label of each client."""
        models = self.first
        for _ in range(count):
            best = [int(np.argmin([self.loss(c, w) for w in models])) for c in range(len(self.x))]
            local = np.stack([self.descended(c, models[j]) for c, j in enumerate(best)])
            models, labels, before = models.copy(), np.zeros(len(local), int), None
            while before is None or (labels != before).any():  # Lloyd's k-means; a centre that nobody is near stays
                before, labels = labels, np.linalg.norm(local[:, None] - models, axis=2).argmin(axis=1)
                for j in set(labels.tolist()):
                    models[j] = local[labels == j].mean(axis=0)
        return models, labels


# ---- without noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 6])
def test_one_hypothesis_is_federated_averaging(runs: Path, rounds: int) -> None:
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017)."""
    of = config(hypotheses=1, rounds=rounds)
    found = models_of(run(of, runs))
    assert np.allclose(found, Written(of).rounds(rounds)[0], atol=1e-5)
    assert not np.allclose(found, Written(of).rounds(rounds + 1)[0], atol=1e-3)  # or nothing would be told


def test_several_hypotheses_are_the_papers_algorithm(runs: Path) -> None:
    """Chosen by the least loss, trained, clustered by k-means from the hypotheses.

    With this seed one hypothesis has nobody for four rounds: it stays until the other has left it some clients.
    """
    of = config(hypotheses=2, rounds=9)
    state = run(of, runs)
    models, labels = Written(of).rounds(9)
    assert np.array_equal(Written(of).rounds(4)[0][0], Written(of).first[0])
    assert np.allclose(models_of(state), models, atol=1e-5)
    assert np.asarray(state["cluster"]).tolist() == labels.tolist()
    assert len(set(labels[:4])) == len(set(labels[4:])) == 1 and labels[0] != labels[4]  # and it tells them apart


def test_with_noise_the_model_is_the_mean_of_what_was_sent(
    runs: Path, seen: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]]
) -> None:
    """Each release is what the ledger has the digest of, and nothing but a model: no choice, no length, no loss."""
    of = config(noisy(3.0), hypotheses=1, clients_per_round=5)
    result = run_plan(make_plan(of), runs=runs)
    assert len(seen) == 4
    after = [models for _, models, _ in seen[1:]] + [torch.as_tensor(outcome(result.folder).checkpoint.state["models"])]
    with Store(result.folder) as store:
        digests = {(request, unit): reply for unit, request, _, _, reply in store.ledger.entries()}
    for number, ((clients, _, replies), models) in enumerate(zip(seen, after, strict=True), 1):
        assert len(clients) == 5 and all(reply.keys() == {"model"} for reply in replies)
        mean = torch.stack([reply["model"] for reply in replies]).double().mean(dim=0)
        assert torch.allclose(models[0].double(), mean, atol=1e-6)
        for client, reply in zip(clients.tolist(), replies, strict=True):
            assert digests[f"round {number}, ask 1", client] == digest_values(reply)


def test_a_client_trains_the_hypothesis_of_the_least_loss(
    runs: Path, seen: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]]
) -> None:
    """In balls so small that what it sends shows its choice: the argmin of the loss, written out."""
    of = config(noisy(0.0, 1e-4), hypotheses=3)
    run(of, runs)
    written, chosen = Written(of), []
    for clients, models, replies in seen:
        for client, reply in zip(clients.tolist(), replies, strict=True):
            distance = torch.linalg.vector_norm(models - reply["model"], dim=1)
            best = int(np.argmin([written.loss(client, w) for w in models.double().numpy()]))
            assert distance.argmin() == best and distance.min() <= 1.01e-4
            chosen.append(best)
    assert len(set(chosen)) > 1


def test_the_best_model_is_the_first_of_the_least_mean_loss() -> None:
    """Never one whose loss is no number, unless none has one; a client without records takes the first."""
    model = ModelSpec("linear", (2,), 0, {"intercept": False}).build()
    records = Records(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 3.0]))
    right, wrong, nan, inf = torch.tensor([[2.0, 3.0], [0.0, 0.0], [math.nan, 3.0], [math.inf, 3.0]])
    for models, best in (
        ([wrong, right, right], 1),
        ([right, right], 0),
        ([nan, wrong], 1),
        ([inf, wrong], 1),
        ([nan, inf, right], 2),
        ([nan, nan], 0),
        ([inf, nan], 0),
        ([wrong], 0),
    ):
        assert best_model(model, torch.stack(models), records) == best
    assert best_model(model, torch.stack([wrong, right]), Records(torch.zeros(0, 2), torch.zeros(0))) == 0


# ---- the server's k-means --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_k_means_is_that_of_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    k, p = int(random.integers(2, 6)), int(random.integers(1, 30))
    points = random.standard_normal((80, p)) + 3 * random.standard_normal((k, p))[random.integers(k, size=80)]
    start = points[random.choice(80, k, replace=False)] + 0.01  # so that none begins empty
    theirs = KMeans(k, init=start, n_init=1, algorithm="lloyd", tol=0.0, max_iter=300).fit(points)
    label, centres = kmeans_from(torch.from_numpy(points), torch.from_numpy(start))
    assert label.tolist() == theirs.labels_.tolist()
    assert centres.dtype == torch.float32 and np.allclose(centres.numpy(), theirs.cluster_centers_, atol=1e-5)


def test_an_empty_cluster_stays_and_of_equals_the_first_is_taken() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0]])
    label, centres = kmeans_from(points, torch.tensor([[0.4], [500.0], [9.0]]))
    assert label.tolist() == [0, 0, 2] and centres.flatten().tolist() == [0.5, 500.0, 10.0]
    label, centres = kmeans_from(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]]))
    assert label.tolist() == [0, 0] and centres.flatten().tolist() == [1.0, 2.0]
    losing = torch.tensor([[16.0], [5.0], [3.0], [7.0], [17.0], [21.0]])  # the second has two at first, and loses them
    label, centres = kmeans_from(losing, torch.tensor([[1.0], [9.0], [23.0]]))
    assert label.tolist() == [2, 0, 0, 0, 2, 2] and centres.flatten().tolist() == [5.0, 9.0, 18.0]
    label, centres = kmeans_from(torch.zeros(0, 2), torch.ones(3, 2))  # nobody answered
    assert label.tolist() == [] and torch.equal(centres, torch.ones(3, 2))
    start = torch.zeros(2, 1)
    kmeans_from(points, start)
    assert torch.equal(start, torch.zeros(2, 1))  # it does not write into what it was given


# ---- who takes part --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_round", "rounds", "most"), [(4, 6, 3), (4, 6, 4), (3, 5, 2), (8, 3, 3), ("all", 3, "auto"), (2, 8, "auto")]
)
def test_nobody_takes_part_more_often_than_is_paid_for(
    runs: Path, per_round: int | str, rounds: int, most: int | str,
    seen: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]],
) -> None:  # fmt: skip
    """The ledger, the state and what was asked agree for every client; who has reached the limit is not asked."""
    of = config(noisy(2.0), clients_per_round=per_round, rounds=rounds, max_participations=most, hypotheses=2)
    plan = make_plan(of)
    limit = cast(MetricPFL, plan.algorithm)._most
    assert most == "auto" or limit == most
    result = run_plan(plan, runs=runs)
    asked = Counter(client for clients, *_ in seen for client in clients.tolist())
    for before, (clients, *_) in enumerate(seen):
        earlier = Counter(c for others, *_ in seen[:before] for c in others.tolist())
        left = sum(earlier[c] < limit for c in range(8))
        assert len(set(clients.tolist())) == len(clients) == min(8 if per_round == "all" else per_round, left)
    assert max(asked.values()) <= limit
    found = outcome(result.folder)
    assert np.asarray(found.checkpoint.state["participations"]).tolist() == [asked[c] for c in range(8)]
    with Store(result.folder) as store:
        planned, posted = store.ledger.planned(), store.ledger.posted()
    assert {c: counts.total() for c, counts in planned.items()} == dict.fromkeys(range(8), limit)
    assert {c: counts.total() for c, counts in posted.items()} == dict(asked)
    # by hand: 2n/nu = 2 each time, n/nu = 1 at the distance of the radius
    assert result.statement.epsilon == pytest.approx(2.0 * limit)
    assert result.statement.epsilon_spent == pytest.approx(2.0 * max(asked.values()))
    budgets = load_run(result.folder).metric_budgets()
    assert budgets is not None and budgets.tolist() == pytest.approx([1.0 * asked[c] for c in range(8)])
    times = [asked[c] for c in range(8)]
    assert result.budget == pytest.approx({"median": np.median(times), "maximum": max(times), "radius": 0.5})
    assert result.to_json()["budget"] == result.budget


@pytest.mark.parametrize(
    ("clients", "per_round", "rounds"), [((4, 4), 2, 30), ((50, 50), 10, 25), ((500, 500), 100, 25)]
)
def test_hardly_anyone_has_to_sit_out(clients: tuple[int, int], per_round: int, rounds: int) -> None:
    """The least number that all together exceed with a chance of 1% (union bound over Binomial(T, U/N))."""
    of = config(noisy(), clients=clients, clients_per_round=per_round, rounds=rounds)
    most, number = cast(MetricPFL, make_plan(of).algorithm)._most, sum(clients)
    taken = stats.binom(rounds, per_round / number)
    assert number * taken.sf(most) <= 0.01 < number * taken.sf(most - 1)


def test_the_budget_of_a_run_with_a_target_is_met(runs: Path) -> None:
    """nu = 2nT/epsilon by hand: n = 2, T = 3."""
    of = config({"privacy": {"epsilon": 6.0, "clip_norm": 0.5}}, rounds=3)
    plan = make_plan(of)
    (nu,) = {unit.noise_multiplier for unit in plan.units}
    assert 2.0 <= nu <= 2.004 and plan.price.epsilon <= 6.0 and plan.price.delta == 0.0
    assert run_plan(plan, runs=runs).statement.epsilon_spent == plan.price.epsilon


def test_the_mechanism_is_the_one_that_was_asked_for() -> None:
    for options, expected in (
        ({"hypotheses": 1}, LaplaceBall(2, 2.0, 0.5, spread=0.0)),
        ({"hypotheses": 2}, LaplaceBall(2, 2.0, 0.5, spread=math.inf)),
        ({"hypotheses": 2, "spread": 3.0}, LaplaceBall(2, 2.0, 0.5, spread=3.0)),
        ({"hypotheses": 1, "spread": 3.0}, LaplaceBall(2, 2.0, 0.5, spread=0.0)),
        ({"hypotheses": 2, "noise": "gaussian"}, GaussianBall(2, 2.0, 0.5, spread=math.inf)),
        ({"hypotheses": 2, "faithful": True}, LaplaceStep(2, 2.0)),
    ):
        plan = make_plan(config(noisy(2.0, delta=1e-3), **options))
        assert list(plan.releases[0]) == [expected] and plan.releases[0][expected] == 4


def test_a_spread_holds_in_every_round_and_is_priced(
    runs: Path, seen: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]]
) -> None:
    """By hand: (2r + spread) n/(nu r) = (1 + 3) * 2 / (2 * 0.5) = 8 each time, four times."""
    of = config(noisy(2.0), hypotheses=3, spread=3.0, rounds=4)
    result = run_plan(make_plan(of), runs=runs)
    assert result.statement.epsilon == pytest.approx(32.0)
    offered = [models for _, models, _ in seen] + [torch.as_tensor(outcome(result.folder).checkpoint.state["models"])]
    for models in offered:
        assert torch.cdist(models.double(), models.double()).max() <= 3.0


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_hypotheses_are_drawn_together_wherever_they_lie(offset: float) -> None:
    """Also where float32 is coarse: a client would refuse those that rounding has left too far apart."""
    algorithm = MetricPFL(hypotheses=2, spread=1e-3)
    models = offset + torch.from_numpy(np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32))
    together = algorithm._together(models).double()
    assert torch.cdist(together, together, compute_mode="donot_use_mm_for_euclid_dist").max() <= 1e-3


# ---- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sections", "words"),
    [
        ({"clients_per_round": 3, "hypotheses": 4}, {}, ["clients_per_round = 3", "hypotheses = 4", "as it began"]),
        ({"clients_per_round": 9}, {}, ["clients_per_round = 9", "8", "twice", '"all"']),
        ({"max_participations": 1}, {}, ["max_participations = 1", "32", "max_participations = 4"]),
        ({"clients_per_round": 3, "max_participations": 1}, {}, ["max_participations = 1", "12", "= 2"]),
        ({"faithful": True, "noise": "gaussian"}, {}, ['noise = "gaussian"', "faithful", "Laplace", "leave out"]),
        ({"faithful": True, "spread": 1.0}, {}, ["spread = 1", "faithful", "leave out"]),
        ({}, {"privacy": {"clip_norm": 0.5}}, ["privacy.epsilon is missing"]),
        ({}, noisy(1.0, math.inf), ["privacy.clip_norm = inf"]),
        ({}, noisy(adjacency="replace"), ["privacy.adjacency", "metric-pfl", "leave out"]),
        ({"noise": "gaussian"}, noisy(), ["privacy.delta is missing", "gaussian", "privacy.delta = 1e-01"]),
        ({"faithful": True}, {"privacy": {"epsilon": 5.0}}, ["privacy.epsilon = 5", "has a price", "noise_multiplier"]),
        ({"noise": "gaussian"}, noisy(delta=0.2), ["privacy.delta = 0.2", "8 clients", "1/n"]),
        ({"noise": "gaussian"}, noisy(delta=1.0), ["privacy.delta"]),
        ({"noise": "uniform"}, {}, ["noise"]),
        ({"hypotheses": 0}, {}, ["hypotheses"]),
        ({"spread": 0.0}, {}, ["spread"]),
        ({"max_participations": 0}, {}, ["max_participations"]),
        ({"clients_per_round": "some"}, {}, ["clients_per_round"]),
    ],
)  # fmt: skip
def test_bad_input_is_explained(options: dict[str, Any], sections: dict[str, Any], words: list[str]) -> None:
    """Key and value, the rule, what would happen, and what to type."""
    with pytest.raises(UserError) as caught:
        make_plan(config(noisy() | sections, **{"hypotheses": 1} | options))
    error = caught.value
    assert error.what and error.why and error.fix
    for word in words:
        assert word in str(error), error


def test_standardised_columns_are_refused(tmp_path: Path) -> None:
    """Their statistics have a price for each record, which is no part of metric privacy."""
    rows = [f"{i},{i % 7},{i % 2},{'a' if i < 40 else 'b'}" for i in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["u,v,y,client", *rows]))
    prepare = {"u": {"kind": "standard", "low": 0.0, "high": 80.0}}
    data = {
        "dataset": "file",
        "options": {"path": str(tmp_path / "t.csv"), "prepare": prepare, "statistics_noise": 3.0},
    }
    with pytest.raises(UserError, match="standardised") as caught:
        make_plan(config(noisy() | {"data": data, "model": {"name": "logistic"}}, hypotheses=1))
    assert "Nothing was run" in caught.value.why and caught.value.fix


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_laplace_noise_needs_no_delta_and_spends_none(delta: float) -> None:
    plan = make_plan(config(noisy(2.0, delta=delta), hypotheses=1))
    assert (plan.price.epsilon, plan.price.delta, plan.price.accountant) == (pytest.approx(8.0), 0.0, "sum")
    assert plan.statement().delta == 0.0


# ---- what is not finite, or does not move ----------------------------------------------------------


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Client 1 holds an infinite feature, client 2 a number that is none, client 3 only zeros."""
    draw = LinearClusters.draw

    def spoil(self: LinearClusters, seed: int, client: int, cluster: int, count: int) -> Records:
        records = draw(self, seed, client, cluster, count)
        if client == 1:
            records.x[0, 0] = math.inf
        elif client == 2:
            records.y[3] = math.nan
        elif client == 3:
            records.x.zero_()
            records.y.zero_()
        return records

    monkeypatch.setattr(LinearClusters, "draw", spoil)
    yield


@pytest.mark.parametrize("options", [{}, {"noise": "gaussian"}, {"faithful": True}, {"hypotheses": 1}])
def test_records_that_are_not_finite_do_no_harm(
    runs: Path, options: dict[str, Any], spoilt: None,
    seen: list[tuple[np.ndarray, Tensor, list[dict[str, Tensor]]]],
) -> None:  # fmt: skip
    """Everybody sends a model, those who do not move as well: with the same noise, or with none if it goes by the step.

    What is counted of a client's numbers that are none is not part of the guarantee; that nothing else breaks is.
    """
    of = config(noisy(2.0, delta=1e-3), **{"hypotheses": 2} | options)
    found = models_of(run(of, runs))
    assert np.isfinite(found).all() and not np.allclose(found, Written(of).first)
    for clients, models, replies in seen:
        sent = dict(zip(clients.tolist(), (reply["model"] for reply in replies), strict=True))
        assert all(model.isfinite().all() for model in sent.values())
        distance = torch.linalg.vector_norm(models - sent[3], dim=1).min()
        assert (distance == 0.0) == options.get("faithful", False)  # no gradient, no step, and then no noise


def test_a_learning_rate_that_diverges_leaves_everyone_where_he_is(runs: Path) -> None:
    of = config(noisy(0.0, 0.5), hypotheses=2, learning_rate=1e30, local_epochs=5)
    assert np.array_equal(models_of(run(of, runs)).astype(np.float32)[0], Written(of).first[0].astype(np.float32))


# ---- what is said ----------------------------------------------------------------------------------


def sentence(sections: dict[str, Any] | None = None, **options: Any) -> str:
    return make_plan(config(sections or noisy(2.0), **options)).statement().sentence()


def test_the_statement_of_one_hypothesis() -> None:
    """By hand: n = 2, nu = 2, r = 0.5, four rounds: 2n/nu * 4 = 8, n/(nu r) * 4 = 8 for each unit, 4 at r."""
    said = sentence(hypotheses=1)
    assert said.startswith(
        "what a client sends is (8, 0.0)-indistinguishable for any two sets of records that it may hold: their local "
        "models, as clipped, are at most 1 apart each time. It is metric privacy: epsilon 8 for each unit of "
        "Euclidean distance"
    )
    assert "4 at the distance 0.5" in said and "local differential privacy for one client with all its records" in said
    assert "same hypothesis" not in said and "not protected" not in said and "protects nobody" not in said
    assert "Trusted: nobody" in said and "differentially private for adding" not in said


def test_the_statement_of_several_hypotheses_says_that_the_choice_is_not_protected() -> None:
    said = sentence(hypotheses=2)
    assert "both would have chosen the same hypotheses" in said and "is not protected" in said
    assert "local differential privacy" not in said
    assert "for single records or patients" in said and "tips the choice" in said


def test_the_statement_with_a_spread_covers_the_choice() -> None:
    """(2r + spread) n/(nu r) * 4 = (1 + 3) * 2 * 4 = 32: vacuous, and it says so."""
    said = sentence(hypotheses=2, spread=3.0)
    assert "(32, 0.0)-indistinguishable for any two sets of records that it may hold: their local models," in said
    assert "at most 4 apart" in said and "same hypothesis" not in said and "is not protected" not in said
    assert "protects nobody" in said


def test_the_statement_of_one_hypothesis_does_not_count_a_spread() -> None:
    """There is nothing to be spread: the words go with the price."""
    said = sentence(hypotheses=1, spread=3.0)
    assert "(8, 0.0)-indistinguishable" in said and "at most 1 apart" in said


class Unsaid(MetricPFL):
    """Releases local models, and says that records are protected."""

    name: ClassVar[str] = "unsaid"
    unit: ClassVar[Unit] = "record"


class Trained(MetricPFL):
    """The other way round."""

    name: ClassVar[str] = "trained"

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        training = NoisyTraining.epochs(10, 5, 1, clip_norm=1.0, noise_multiplier=terms.noise_multiplier)
        return Counter() if terms.size is None else Counter({training: 1})


@pytest.mark.parametrize("algorithm", [Unsaid, Trained])
def test_local_models_go_with_metric_privacy_alone(algorithm: type[MetricPFL], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the statement would promise records what was proved for distances only, or the other way round."""
    monkeypatch.setitem(ALGORITHMS, algorithm.name, algorithm)
    values = config(noisy(delta=1e-3)).model_dump() | {"algorithm": {"name": algorithm.name}}
    with pytest.raises(TypeError, match="local models are for the unit metric"):
        make_plan(make_config(values))


def test_the_statement_is_made_of_what_is_planned() -> None:
    """Not of what an algorithm says of itself: an open choice is said, whoever declares it."""
    planned = {LaplaceBall(3, 2.0, 0.5, math.inf): 4}
    terms = MetricTerms.of(planned)
    assert terms == MetricTerms("laplace", 3, 0.5, None, 2.0, 4) and not terms.chosen_freely and terms.farthest == 1.0
    assert MetricTerms.of({GaussianBall(3, 2.0, 0.5, 1.5): 4}) == MetricTerms("gaussian", 3, 0.5, 1.5, 2.0, 4)
    assert MetricTerms.of({LaplaceStep(3, 2.0): 4}) == MetricTerms("step", 3, None, None, 2.0, 4)
    assert MetricTerms.of({}) is None
    with pytest.raises(TypeError, match="2 ways"):
        MetricTerms.of({**planned, LaplaceStep(3, 2.0): 1})


def test_the_statement_without_noise_and_radius_is_json() -> None:
    plain = make_plan(config(hypotheses=1)).statement().to_json()
    assert plain["metric"]["radius"] is None and plain["adjacency"] == "replace"
    assert json.loads(json.dumps(plain, allow_nan=False)) == json.loads(json.dumps(plain))


def test_the_statement_of_gaussian_noise() -> None:
    """The price of four releases of multiplier nu/2 = 10 at delta 1e-3; no metric privacy is claimed."""
    plan = make_plan(config(noisy(20.0, delta=1e-3), hypotheses=1, noise="gaussian"))
    said = plan.statement().sentence()
    assert ", 0.001)-indistinguishable for any two sets" in said and "metric privacy" not in said.split("Public")[0]
    # Balle and Wang (2018): shift 2 * 2/20 = 0.2
    exact = stats.norm.cdf(0.1 - plan.price.epsilon / 0.2) - math.exp(plan.price.epsilon) * stats.norm.cdf(
        -0.1 - plan.price.epsilon / 0.2
    )
    assert 0.99e-3 < exact <= 1e-3


@pytest.mark.parametrize(
    ("options", "sections", "why"),
    [({"faithful": True}, noisy(2.0), "secret length of its own step"), ({}, noisy(0.0), "without noise")],
)
@pytest.mark.parametrize("hypotheses", [1, 2])
def test_where_nothing_is_promised_it_says_none(
    options: dict[str, Any], sections: dict[str, Any], why: str, hypotheses: int
) -> None:
    plan = make_plan(config(sections, hypotheses=hypotheses, **options))
    said = plan.statement().sentence()
    assert said.startswith("NONE (epsilon is infinite)") and why in said and "Promised:" not in said
    assert plan.price.epsilon == math.inf and plan.statement().to_json()["epsilon"] == "infinity"
    if options:
        assert "n/nu = 1 each time" in said and "at most 4 in all" in said and "not a guarantee" in said


@pytest.mark.parametrize(("nu", "vacuous"), [(0.81, False), (0.79, True)])
def test_above_20_it_says_that_the_number_protects_nobody(nu: float, vacuous: bool) -> None:
    """4 * 2n/nu = 16/nu: 19.8 and 20.3."""
    assert ("protects nobody" in sentence(noisy(nu), hypotheses=1)) == vacuous


def test_a_large_price_is_told_beforehand() -> None:
    """2n/nu = 40 each time."""
    note = make_plan(config(noisy(0.1), hypotheses=1)).note
    assert note is not None and "40" in note and "2 parameters" in note
    assert make_plan(config(noisy(2.0), hypotheses=1)).note is None
    assert make_plan(config(noisy(0.0), hypotheses=1)).note is None


def test_the_statement_of_a_run_has_the_numbers_of_its_plan(runs: Path) -> None:
    plan = make_plan(config(noisy(2.0), clients_per_round=4, rounds=4, max_participations=3))
    result = run_plan(plan, runs=runs)
    written = json.loads((result.folder / "statement.json").read_text())
    assert written["epsilon"] == pytest.approx(6.0) and written["delta"] == 0.0 and written["unit"] == "metric"
    assert written["sentence"] == result.statement.sentence()
    assert "0 to 3" not in written["sentence"] and "3 times" in written["sentence"]


# ---- the synthetic experiment ----------------------------------------------------------------------


def synthetic(seed: int, runs: Path, **options: Any) -> np.ndarray:
    """The hypotheses at the end of the example."""
    values = tomllib.loads(EXAMPLE.read_text())
    values |= {"seed": seed, "engine": {"workers": 1}, "metrics": {"every": 100}}
    values["algorithm"] |= options
    return models_of(run(make_config(values), runs))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_two_hypotheses_find_both_kinds_of_clients(seed: int, runs: Path) -> None:
    """Galli et al. (2023), Figure 1g-i: with nu = 1 both end within 0.3 of (5, 6) and (4, -4.5)."""
    distance = np.linalg.norm(synthetic(seed, runs)[:, None] - THETA, axis=2)
    assert sorted(distance.argmin(axis=1)) == [0, 1] and distance.min(axis=1).max() < 0.3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_one_hypothesis_ends_between_them(seed: int, runs: Path) -> None:
    """Figure 1a-c: more than 2 from both, and within 1 of the segment that joins them."""
    (found,) = synthetic(seed, runs, hypotheses=1)
    assert np.linalg.norm(found - THETA, axis=1).min() > 2
    along = THETA[1] - THETA[0]
    share = (found - THETA[0]) @ along / (along @ along)
    assert 0 < share < 1 and np.linalg.norm(found - THETA[0] - share * along) < 1


# ---- the contract ----------------------------------------------------------------------------------


def test_it_is_among_those_that_the_contract_is_checked_for() -> None:
    """Which does so with all clients in every round; below, some of them take part."""
    assert ALGORITHMS["metric-pfl"] is MetricPFL


@pytest.mark.parametrize("options", [{"noise": "laplace"}, {"noise": "gaussian"}, {"faithful": True}])
def test_workers_and_blocks_change_nothing_where_some_take_part(runs: Path, options: dict[str, Any]) -> None:
    given = {"clients_per_round": 5, "max_participations": 4, "rounds": 5, "batch_size": 3} | options
    one, other = (
        outcome(run_plan(make_plan(config(noisy(delta=1e-3) | {"engine": engine}, **given)), runs=runs).folder)
        for engine in ({"workers": 1, "block": 1}, {"workers": 2, "block": 3})
    )
    assert differ(one, other) is None


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_stopped_comes_out_the_same(runs: Path, after: int) -> None:
    """Who took part, how often and what the hypotheses were is all in the state."""
    of = config(noisy(), clients_per_round=5, max_participations=4, rounds=5)

    def stop(report: RoundReport) -> None:
        if report.round == after:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        start_run(of, runs=runs, progress=stop)
    (folder,) = runs.glob("*")
    resume_run(folder)
    assert differ(outcome(folder), outcome(run_plan(make_plan(of), runs=runs).folder)) is None
