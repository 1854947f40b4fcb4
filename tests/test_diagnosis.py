"""Why a client is worse off: the terms of Theorems 1 and 2 of Du, Xiang and Wu (2025) against what they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fairveil import diagnosis
from fairveil.algorithms.base import NextRound
from fairveil.algorithms.dp_fedavg import DPFedAvg, State
from fairveil.config import make_config
from fairveil.data.federation import Records
from fairveil.diagnosis import PROBES, deviation, gap_terms, hessian_product, mean_gradient, trace_probes
from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.release import Reply
from fairveil.reading import Run, load_run
from fairveil.report.run_page import run_page
from fairveil.report.why import TERMS, why, why_dots, why_tables, why_terms
from fairveil.run import start_run
from fairveil.session import Facts, Member, Terms
from fairveil.store import Store
from fairveil.streams import Stream
from fairveil.tasks import descent

SURE = 5.0  # standard errors: a right value is further off once in 1.7 million times
METRICS = ("initial gap", "a", "b", "c", "d", "error of d", "bias", "variance", "kept")


def normal(*key: int | str, shape: Sequence[int]) -> Tensor:
    return Stream("diagnosis test", *key).normal(tuple(shape))


# ---- derivatives -------------------------------------------------------------------------------------


@pytest.fixture
def softmax(monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Tensor, Records]:
    """A tiny classifier, its parameters (12,) and 20 records, in float64 and in batches of 7."""
    monkeypatch.setattr(diagnosis, "BATCH", 7)
    model = ModelSpec("logistic", (3,), 3).build()
    y = torch.from_numpy(Stream("labels").numpy.integers(0, 3, 20))
    return model, normal("weights", shape=(12,)), Records(normal("x", shape=(20, 3)).float(), y)


def dense_hessian(model: Model, weights: Tensor, records: Records) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return model.losses(model.unflatten(w), records.x.double(), records.y).mean()

    return torch.autograd.functional.hessian(loss, weights)


def test_gradient_and_hessian_product_are_those_of_the_mean_loss(softmax: tuple[Model, Tensor, Records]) -> None:
    model, weights, records = softmax
    loss, gradient = mean_gradient(model, weights, records)
    leaf = weights.clone().requires_grad_()
    whole = model.losses(model.unflatten(leaf), records.x.double(), records.y).mean()
    (expected,) = torch.autograd.grad(whole, leaf)
    assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    direction, hessian = normal("direction", shape=(12,)), dense_hessian(model, weights, records)
    torch.testing.assert_close(
        hessian_product(model, weights, records, direction), hessian @ direction, rtol=1e-10, atol=1e-12
    )


def test_the_probes_of_a_trace_are_quadratic_forms_and_hold_it(softmax: tuple[Model, Tensor, Records]) -> None:
    """Within five of their own standard errors; the probes are fixed, so that this holds always or never."""
    model, weights, records = softmax
    found = trace_probes(model, weights, records)
    assert found.shape == (PROBES,)
    torch.testing.assert_close(found, trace_probes(model, weights, records), rtol=0, atol=0)
    exact = float(dense_hessian(model, weights, records).trace())
    assert abs(float(found.mean()) - exact) < SURE * float(found.std()) / math.sqrt(PROBES)


def test_a_diagonal_hessian_has_its_trace_by_every_probe() -> None:
    """Signs square to one: a regression on one feature at a time has nothing off its diagonal."""
    model = ModelSpec("linear", (4,), 0, {"intercept": False}).build()
    records = Records(2.0 * torch.eye(4), torch.zeros(4))
    found = trace_probes(model, torch.zeros(4), records)
    torch.testing.assert_close(found, torch.full((PROBES,), 4.0, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_loss_of_planes_does_not_bend() -> None:
    model = ModelSpec("svm", (3,), 2).build()
    records = Records(normal("plane", shape=(5, 3)).float(), torch.tensor([0, 1, 0, 1, 1]))
    weights = normal("plane weights", shape=(model.parameters,)).float()
    assert not hessian_product(model, weights, records, torch.ones_like(weights)).any()


# ---- Theorem 1 ---------------------------------------------------------------------------------------


@pytest.fixture
def quadratic() -> dict[str, Any]:
    """Four clients of a linear regression (p = 4) with other records each, a step, and the noise in it."""
    model = ModelSpec("linear", (3,), 0).build()
    clients = []
    for k in range(4):
        x = (1 + 0.5 * k) * normal("regression", k, shape=(15 + 5 * k, 3)) + 0.3 * k
        y = x.sum(dim=1) * (1 - 0.4 * k) + normal("targets", k, shape=(len(x),))
        clients.append(Records(x.float(), y.float()))
    start = normal("start", shape=(4,))
    return {"model": model, "clients": clients, "w": start, "step": 0.3 * normal("step", shape=(4,)), "std": 0.2}


def terms_of(model: Model, clients: Sequence[Records], w: Tensor, step: Tensor, std: float) -> dict[str, np.ndarray]:
    """The terms, with the exact trace as a single probe."""
    rows = []
    for records in clients:
        loss, gradient = mean_gradient(model, w, records)
        bend = torch.dot(step, hessian_product(model, w, records, step))
        basis = torch.eye(len(w), dtype=torch.float64)
        trace = sum(float(torch.dot(e, hessian_product(model, w, records, e))) for e in basis)
        rows.append([loss, float(torch.dot(gradient, step)), float(bend), trace])
    loss_, slope, bend_, trace_ = np.array(rows).T
    return gap_terms(loss_, slope, bend_, trace_[:, None], std**2)


def mean_losses(clients: Sequence[Records], weights: Tensor) -> np.ndarray:
    """Half the mean squared error of each client (clients, m) at many parameter vectors (m, p), by hand."""
    return np.stack(
        [
            0.5 * (weights[:, :3] @ c.x.double().mT + weights[:, 3:] - c.y.double()).square().mean(dim=1).numpy()
            for c in clients
        ]
    )  # fmt: skip


def test_of_a_quadratic_loss_the_terms_are_the_expected_gap_exactly(quadratic: dict[str, Any]) -> None:
    """E L(w + s + noise) = L(w + s) + v/2 Tr H, with H the second moment of (x, 1)."""
    clients, after = quadratic["clients"], quadratic["w"] + quadratic["step"]
    trace = np.array([float(c.x.double().square().sum(dim=1).mean()) + 1 for c in clients])
    expected = mean_losses(clients, after[None])[:, 0] + 0.5 * quadratic["std"] ** 2 * trace
    terms = terms_of(**quadratic)
    total = sum(terms[name] for name in TERMS)
    np.testing.assert_allclose(total, expected.mean() - expected, rtol=1e-9, atol=1e-12)
    now = mean_losses(clients, quadratic["w"][None])[:, 0]
    np.testing.assert_allclose(terms["initial gap"], now.mean() - now, rtol=1e-9)
    assert np.isnan(terms["error of d"]).all()  # one probe says nothing of its own error


def test_of_a_quadratic_loss_the_terms_are_the_mean_gap_over_noise(quadratic: dict[str, Any]) -> None:
    """20,000 draws; of four clients a right term is refused once in 400,000 seeds, and the seed is fixed."""
    noise = quadratic["std"] * normal("noise", shape=(20_000, 4))
    losses = mean_losses(quadratic["clients"], quadratic["w"] + quadratic["step"] + noise)
    gaps = losses.mean(axis=0) - losses
    error = gaps.std(axis=1, ddof=1) / math.sqrt(gaps.shape[1])
    terms = terms_of(**quadratic)
    total = sum(terms[name] for name in TERMS)
    assert (np.abs(gaps.mean(axis=1) - total) < SURE * error).all()
    # and it could tell: without the noise, or with its sign turned as (10a) is printed, it is refused
    assert (np.abs(gaps.mean(axis=1) - (total - terms["d"])) > SURE * error).any()
    assert (np.abs(gaps.mean(axis=1) - (total - 2 * terms["c"])) > SURE * error).any()


def test_the_error_of_the_noise_term_is_that_of_differences_between_clients() -> None:
    """What probes do to all clients alike cancels; what they do to one is told."""
    alike = np.array([[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0, 8.0]])
    nothing = np.zeros(2)
    terms = gap_terms(nothing, nothing, nothing, alike, 2.0)
    np.testing.assert_allclose(terms["d"], [0.5, -0.5])
    np.testing.assert_allclose(terms["error of d"], [0.0, 0.0], atol=1e-15)
    apart = alike + np.array([[2.0, -2.0, 2.0, -2.0], [0, 0, 0, 0]])
    each = 0.5 * 2.0 * (apart.mean(axis=0) - apart)[0]
    found = gap_terms(nothing, nothing, nothing, apart, 2.0)["error of d"]
    np.testing.assert_allclose(found, each.std(ddof=1) / 2)


# ---- Theorem 2 ---------------------------------------------------------------------------------------


def test_bias_and_variance_by_hand() -> None:
    found = deviation(torch.tensor([3.0, -4.0]), torch.tensor([1.5, -2.0]), 0.1)
    assert found == pytest.approx({"bias": 3.5, "variance": 2 * 0.7978845608 * 0.1, "kept": 0.5})
    assert deviation(torch.zeros(2), torch.zeros(2), 0.0) == {"bias": 0.0, "variance": 0.0, "kept": 1.0}


def test_the_variance_term_is_the_mean_length_of_noise() -> None:
    """A million normal values: the mean of |N(0, 1)| is sqrt(2/pi), and not the sqrt(1/pi) that is printed."""
    values = normal("lengths", shape=(1_000_000,)).abs()
    error = math.sqrt(1 - 2 / math.pi) / 1000
    per_coordinate = deviation(torch.zeros(7), torch.zeros(7), 1.0)["variance"] / 7
    assert abs(float(values.mean()) - per_coordinate) < SURE * error
    assert abs(float(values.mean()) - math.sqrt(1 / math.pi)) > SURE * error


def test_together_they_bound_the_distance() -> None:
    """By 20,000 draws of the noise, with five standard errors to spare; clipping or noise alone meet it."""
    update = normal("update", shape=(6,))
    for kept, std in ((0.3 * update, 0.2), (update, 0.2), (0.3 * update, 0.0)):
        found = deviation(update, kept, std)
        distance = (kept + std * normal("share", shape=(20_000, 6)) - update).abs().sum(dim=1)
        error = float(distance.std()) / math.sqrt(len(distance))
        bound = found["bias"] + found["variance"]
        assert float(distance.mean()) <= bound + SURE * error + 1e-12
        if not found["bias"] or not found["variance"]:
            assert float(distance.mean()) == pytest.approx(bound, abs=SURE * error + 1e-12)


# ---- a run -------------------------------------------------------------------------------------------


@pytest.fixture
def digits(small: dict[str, Any]) -> dict[str, Any]:
    """Client level, one full-batch step of each client in a round, so that its update is its gradient."""
    algorithm = {"name": "dp-fedavg", "rounds": 2, "sample_rate": 0.5, "batch_size": 5000, "decay": "linear"}
    privacy = {"noise_multiplier": 0.4, "clip_norm": 0.05, "delta": 1e-3}
    return small | {"algorithm": algorithm, "privacy": privacy, "fairness": {"explain": True}}


def run_of(values: dict[str, Any], runs: Path) -> Run:
    return load_run(start_run(make_config(values), runs=runs).folder)


def explained(run: Run, metric: str) -> np.ndarray:
    table = run.scores(metric, split="train", model="explain")
    assert table.index.tolist() == [2]
    return table.iloc[0].to_numpy()


def test_every_client_has_the_terms_that_follow_from_its_records(digits: dict[str, Any], runs: Path) -> None:
    """All by hand from the last state: updates, clipping, step, slopes, bends, and the exact trace of a softmax."""
    run, plan = run_of(digits, runs), make_plan(make_config(digits))
    with Store(run.folder) as store:
        checkpoint = store.latest()
    assert checkpoint is not None
    w, clip, std, rate, n = checkpoint.state["model"], 0.05, 0.4 * 0.05, 0.5, 5
    trains = [plan.federation.load(client).train for client in range(n)]
    losses, gradients = zip(*(mean_gradient(plan.model, w, train) for train in trains), strict=True)
    updates = [-0.25 * gradient for gradient in gradients]  # 0.5, of which the last of two rounds has half
    shares = [update * min(1.0, clip / float(update.norm())) for update in updates]
    assert any(float(update.norm()) > clip for update in updates)
    step = torch.stack(shares).mean(dim=0)  # each is drawn with q, and the sum divided by q n
    slope = np.array([float(torch.dot(gradient, step)) for gradient in gradients])
    loss = np.array(losses)
    for metric, expected in (("initial gap", loss.mean() - loss), ("a", slope.mean() + 0 * slope), ("b", -slope)):
        np.testing.assert_allclose(explained(run, metric), expected, rtol=1e-3, atol=1e-6)
    bend = np.array([float(torch.dot(step, hessian_product(plan.model, w, train, step))) for train in trains])
    np.testing.assert_allclose(explained(run, "c"), 0.5 * (bend.mean() - bend), rtol=1e-3, atol=1e-7)
    chances = [plan.model.predict(w, train.x).double().softmax(dim=1) for train in trains]
    trace = np.array(
        [
            float(((p * (1 - p)).sum(dim=1) * (t.x.double().flatten(1).square().sum(dim=1) + 1)).mean())
            for p, t in zip(chances, trains, strict=True)
        ]
    )
    exact = 0.5 * (std / (rate * n)) ** 2 * (trace.mean() - trace)
    assert (np.abs(explained(run, "d") - exact) < SURE * explained(run, "error of d")).all()
    bias = [float((update - share).abs().sum()) for update, share in zip(updates, shares, strict=True)]
    np.testing.assert_allclose(explained(run, "bias"), bias, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(explained(run, "kept"), [clip / max(clip, float(u.norm())) for u in updates], rtol=1e-3)
    np.testing.assert_allclose(explained(run, "variance"), len(w) * math.sqrt(2 / math.pi) * std / (rate * n))
    n_records = run.counts("a", split="train", model="explain").iloc[0]
    assert n_records.tolist() == [len(train) for train in trains]


def test_a_run_sends_and_serves_the_same_whether_or_not_it_is_explained(digits: dict[str, Any], runs: Path) -> None:
    """And what explains it is the same for any number of workers."""
    found = [run_of(digits, runs), run_of(digits | {"engine": {"workers": 2}}, runs), run_of(digits | NOTHING, runs)]
    sent, models = [], []
    for run in found:
        with Store(run.folder) as store:
            sent.append(store.ledger.entries())
        models.append((run.folder / "models" / "served.safetensors").read_bytes())
    assert sent[0] == sent[1] == sent[2] and sent[0]
    assert models[0] == models[1] == models[2]
    for metric in METRICS:
        np.testing.assert_array_equal(explained(found[0], metric), explained(found[1], metric))
        assert np.isfinite(explained(found[0], metric)).all()
    assert found[2].scores("a", split="train", model="explain").empty
    assert why_terms(found[2]) is None and why_tables(found[2]) == [] and why_dots(found[2]) is None


NOTHING: dict[str, Any] = {"fairness": {}}


def test_noise_that_clients_make_together_is_counted_whole(digits: dict[str, Any], runs: Path) -> None:
    """Each makes 1/(N - t) of the variance: of five of whom one may fail there is 5/4 of it, and shares have none."""
    together = digits | {"algorithm": digits["algorithm"] | {"noise": "distributed", "tolerated": 1}}
    run = run_of(together, runs)
    std = 0.4 * 0.05 * math.sqrt(5 / 4) / (0.5 * 5)
    np.testing.assert_allclose(explained(run, "variance"), run.facts["parameters"] * math.sqrt(2 / math.pi) * std)
    assert (explained(run, "kept") <= 1 + 1e-9).all() and (explained(run, "kept") > 0).all()


def test_weighing_systems_are_taken_apart_in_units_of_their_mean(digits: dict[str, Any], runs: Path) -> None:
    """What is kept of an update is its weight times what clipping leaves: all by hand from the last state."""
    plan = make_plan(make_config(digits))
    trains = [plan.federation.load(client).train for client in range(5)]
    sizes = np.array([len(train) for train in trains])
    weights = {
        "fedavg": lambda losses: np.ones(5),
        "root-loss": lambda losses: np.sqrt(losses / 100.0),
        "fairfed": lambda losses: np.minimum(sizes / plan.facts.size.mean(), 2.0),  # the declared sizes
    }
    more = {"root-loss": {"loss_scale": 100.0}, "fairfed": {"beta": 0.0, "largest_weight": 2.0}}
    for name, weigh in weights.items():
        algorithm = digits["algorithm"] | {"clip": "fixed", "name": name} | more.get(name, {})
        run = run_of(digits | {"algorithm": algorithm}, runs)
        with Store(run.folder) as store:
            checkpoint = store.latest()
        assert checkpoint is not None
        losses, gradients = zip(*(mean_gradient(plan.model, checkpoint.state["model"], t) for t in trains), strict=True)
        clipped = np.array([0.05 / max(0.05, 0.25 * float(gradient.norm())) for gradient in gradients])
        np.testing.assert_allclose(explained(run, "kept"), weigh(np.array(losses)) * clipped, rtol=1e-3, err_msg=name)
        assert all(np.isfinite(explained(run, metric)).all() for metric in METRICS)


def test_what_is_clipped_by_all_together_is_not_taken_apart(digits: dict[str, Any]) -> None:
    for name, more in (("fedavg", {"faithful": True}), ("q-fedavg", {}), ("loss-split", {})):
        algorithm = {"name": name, "rounds": 2, "sample_rate": 0.5} | more
        with pytest.raises(UserError, match="explain"):
            make_plan(make_config(digits | {"algorithm": algorithm}))


def weighed_update(members: Sequence[Member]) -> list[Reply]:
    """Half of the update of every client, times eight: a task that weighs before its mechanism clips."""
    starts = torch.stack([torch.as_tensor(member.inputs["model"]) for member in members])
    replies = []
    for member, update in zip(members, descent(members, starts) - starts, strict=True):
        assert isinstance(member.mechanism, CohortSums)
        replies.append(Reply(member.mechanism.share({"update": 8.0 * 0.5 * update}, member)[0]))
    return replies


def test_weights_of_a_task_count_as_bias(
    digits: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A share is 8 times the update if it is whole; here it is half of that, and never clipped."""
    plain = DPFedAvg.next_round

    def next_round(self: DPFedAvg, facts: Facts, state: State, terms: Terms) -> NextRound:
        return replace(plain(self, facts, state, terms), task=weighed_update, full=8.0, scale=1.0 / (8 * 0.5 * 5))

    monkeypatch.setattr(DPFedAvg, "next_round", next_round)
    run = run_of(digits | {"privacy": digits["privacy"] | {"clip_norm": 100.0}}, runs)
    np.testing.assert_allclose(explained(run, "kept"), 0.5, rtol=1e-6)
    std = 0.4 * 100 / (8.0 * 0.5 * 5)
    np.testing.assert_allclose(explained(run, "variance"), run.facts["parameters"] * math.sqrt(2 / math.pi) * std)


# ---- what is refused ---------------------------------------------------------------------------------


def test_a_config_that_is_not_explained_is_the_same_as_before(digits: dict[str, Any]) -> None:
    left_out = make_config(digits | NOTHING)
    typed = make_config(digits | {"fairness": {"explain": False}})
    assert typed.digest() == left_out.digest() and "explain" not in left_out.resolved()["fairness"]
    assert make_config(digits).digest() != left_out.digest()
    assert make_plan(make_config(digits)).root == make_plan(left_out).root


def test_only_client_level_algorithms_are_explained(small: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"fairness\.explain = true makes no sense with global") as refused:
        make_plan(make_config(small | {"fairness": {"explain": True}}))
    assert "needs a client-level algorithm" in str(refused.value)


def test_clients_elsewhere_are_not_explained(digits: dict[str, Any]) -> None:
    elsewhere = digits | {"data": {"dataset": "clients"}, "engine": {"kind": "flower"}}
    with pytest.raises(UserError, match=r"fairness\.explain = true is not for a federation"):
        make_config(elsewhere)


class _Once(torch.autograd.Function):
    """Twice its input, with a gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Once(nn.Module):
    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(features), classes)

    def forward(self, x: Tensor) -> Tensor:
        return _Once.apply(self.layer(x.flatten(1)))


def test_a_model_without_second_derivatives_is_refused_before_the_run(digits: dict[str, Any]) -> None:
    values = digits | {"model": {"name": f"{__name__}:Once"}}
    with pytest.raises(UserError, match=r"fairness\.explain = true does not go with model\.name"):
        make_plan(make_config(values))
    make_plan(make_config(values | NOTHING))


# ---- the report --------------------------------------------------------------------------------------


def test_the_report_says_why(digits: dict[str, Any], runs: Path) -> None:
    run = run_of(digits, runs)
    terms = why_terms(run)
    assert terms is not None and len(terms) == 5 and terms["gap"].is_monotonic_increasing
    np.testing.assert_allclose(terms["gap"], terms[list(TERMS)].sum(axis=1))
    reasons, figures = why_tables(run)
    first = [row[0].text for row in reasons.rows]
    assert sorted(first[:2]) == ["mean of 2", "mean of 3"] and first[2:] == terms["name"].tolist()
    assert [row[:3] for row in figures.rows] == [row[:3] for row in reasons.rows]
    for row in figures.rows:
        gap, *parts = (cell.order for cell in row[2:8])
        assert sum(parts) == pytest.approx(gap)  # type: ignore[arg-type]
    page = run_page(run).html()
    assert page.count("Why a client is worse off") >= 2  # table and picture
    assert "clipping (or its weight) keeps" in page


BASE = {"gap": -1.0, "initial gap": 0.0, "step": 0.0, "b": 0.1, "c": 0.0, "d": 0.0, "error of d": 0.0} | {
    "kept": 1.0,
    "bias": 0.0,
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"step": -1.0, "b": -0.5}, "the mean step points away from it."),
        ({"step": -1.0}, "the mean step helps it less than others."),
        ({"step": -1.0, "kept": 0.12, "bias": 9.0}, "keeps 12% of its update"),
        ({"step": -0.1, "c": -1.0}, "the step is too long for it"),
        ({"d": -1.0, "error of d": 0.1}, "noise: its loss"),
        ({"d": -1.0, "error of d": 0.6}, "noise, perhaps"),
        ({"step": 1.0, "c": -0.5}, "earlier rounds"),
        ({"gap": 0.5, "step": -1.0}, "it is better off than the mean."),
        (
            {"step": -0.3, "initial gap": -0.7},
            "earlier rounds, 70% of it; in the next one: the mean step helps it less",
        ),
        ({"step": -0.7, "initial gap": -0.3}, "the mean step helps it less than others."),
    ],
)
def test_the_sentence_names_what_weighs_most(given: dict[str, float], said: str) -> None:
    assert said in why({**BASE, **given})
