"""The client-level systems: their sensitivity by brute force, their price by hand, and what they are in plain cases."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from fairveil.algorithms import ALGORITHMS
from fairveil.algorithms.cohorts import CLIP_RATE, BoundedTraining, PublishedTraining, Tracked
from fairveil.algorithms.fair_fedavg import FairFedAvg, fairly_kept
from fairveil.algorithms.fair_fedavg import State as FairState
from fairveil.algorithms.fairfed import FairFed
from fairveil.algorithms.fedavg import FedAvg
from fairveil.algorithms.loss_split import LossSplit
from fairveil.algorithms.q_fedavg import QFedAvg
from fairveil.algorithms.root_loss import RootLoss
from fairveil.config import make_config
from fairveil.data.federation import ClientData, Records
from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.faithful import MedianClipped, MultiplierClipped
from fairveil.privacy.mechanisms import CohortSums, canonical, from_canonical
from fairveil.privacy.multipliers import Multipliers
from fairveil.privacy.release import MINT
from fairveil.reading import load_run
from fairveil.remote import DEPLOYABLE, Malformed, Positive
from fairveil.run import run_plan
from fairveil.session import Cohort, Facts, Member, Terms
from fairveil.streams import Stream
from fairveil.tasks import descent

SPEC = ModelSpec("logistic", (4,), 3)
SOUND = [name for name, cls in ALGORITHMS.items() if issubclass(cls, BoundedTraining)]
CAPPED = [name for name in SOUND if ALGORITHMS[name].capped]  # type: ignore[attr-defined]
PUBLISHED = [name for name, cls in ALGORITHMS.items() if issubclass(cls, PublishedTraining)]


@dataclass
class OneRound:
    """A session that asks given clients, adds up exactly, and remembers the sums."""

    clients: Mapping[int, Records]
    facts: Facts
    noise_multiplier: float = 0.0
    round: int = 1
    model: Model = field(default_factory=SPEC.build)
    sums: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    personal: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    asked: list[tuple[Any, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def federation_terms(self) -> Terms:
        return Terms(self.facts, None, self.noise_multiplier)

    def initial_model(self, purpose: str = "") -> Tensor:
        return self.model.initial(Stream(5))

    def cohort(self, sample_rate: float) -> Cohort:
        return Cohort(sample_rate, "all")

    def sum(self, task: Any, cohort: Cohort, mechanism: Any, *, shared: Mapping[str, Any]) -> dict[str, Tensor]:
        self.asked.append((task, shared))
        members = [
            Member(ClientData(r, r), self.model, shared, mechanism, self.personal.get(k, {}), (k,), MINT)
            for k, r in self.clients.items()
        ]
        exact = mechanism.zero()
        for member, reply in zip(members, task(members), strict=True):
            mechanism.add(exact, reply.out)
            if reply.keep is not None:
                self.personal[int(member.key[0])] = reply.keep
        if isinstance(mechanism, CohortSums):
            self.sums = mechanism.value(exact)
            self.bounds = {part.name: part.bound for part in mechanism.parts}
        noisy, _ = mechanism.finish(exact, Stream(0), 0)
        if isinstance(mechanism, MedianClipped):
            self.sums = noisy
        return noisy


def facts_of(clients: Mapping[int, Records], clip_norm: float = 1.0) -> Facts:
    size = np.array([len(r) for r in clients.values()])
    return Facts(size, np.zeros(len(size), int), SPEC.features, 3, SPEC.build().parameters, clip_norm, unit="client")


def draw_clients(seed: int, count: int = 6, scale: float | None = None) -> dict[int, Records]:
    """Clients of unequal sizes; some have features so large that their updates are out of all proportion."""
    random = np.random.default_rng(seed)
    found = {}
    for k in range(count):
        n, size = int(random.integers(1, 30)), scale or 10 ** random.uniform(-1, 2)
        x = (size * random.standard_normal((n, *SPEC.features))).astype(np.float32)
        found[k] = Records(torch.from_numpy(x), torch.from_numpy(random.integers(3, size=n)))
    return found


def released(algorithm: BoundedTraining[Any], session: OneRound, seed: int) -> Any:
    """Some state that earlier releases may have led to."""
    random = Stream(seed, "state").numpy
    state = algorithm.start(session)  # type: ignore[arg-type]
    more: dict[str, Any] = {
        "model": state.model + 0.3 * torch.from_numpy(random.standard_normal(len(state.model)).astype(np.float32)),
        "clip": float(10 ** random.uniform(-2, 1)),
        "loss": float(random.uniform(0, 4)),
    }
    for name in ("aggregate", "second"):
        if hasattr(state, name):
            more[name] = torch.from_numpy((0.5 * random.standard_normal(len(state.model))).astype(np.float32))
    if hasattr(state, "share"):
        more["share"] = torch.from_numpy(random.uniform(0, 1, 2).astype(np.float32))
    return replace(state, **more)


@pytest.mark.parametrize("size_cap", [0, 10])
@pytest.mark.parametrize("name", SOUND)
def test_leaving_a_client_out_moves_no_sum_beyond_its_bound(name: str, size_cap: int) -> None:
    """150 pairs of neighbours for each system and weighting; the whole round is computed anew without the client."""
    farthest: dict[str, float] = {}
    for seed in range(25):
        clients = draw_clients(seed)
        facts = facts_of(clients)
        by_size = {"size_cap": size_cap} if name in CAPPED else {}
        algorithm = ALGORITHMS[name](rounds=10, learning_rate=0.3, **by_size)
        state = released(algorithm, OneRound(clients, facts), seed)  # type: ignore[arg-type]
        both = OneRound(clients, facts, round=1 + seed % 10)
        algorithm.round(both, state)  # type: ignore[arg-type]
        for gone in clients:
            rest = OneRound({k: r for k, r in clients.items() if k != gone}, facts, round=both.round)
            algorithm.round(rest, state)  # type: ignore[arg-type]
            for part, bound in both.bounds.items():
                moved = float(torch.linalg.vector_norm(both.sums[part] - rest.sums[part])) / bound
                farthest[part] = max(farthest.get(part, 0.0), moved)
    assert max(farthest.values()) <= 1 + 1e-9, farthest
    assert all(value > 0.5 for value in farthest.values()), farthest  # the bounds are needed: no empty test


def test_a_client_with_long_batches_changes_no_other_update() -> None:
    """Not by one bit: an unstable training would make more than the bound of it."""
    few, many = (draw_clients(seed, count=4, scale=1.0) for seed in (1, 2))
    longer = [_repeated(records, n) for records, n in zip(many.values(), (100, 100, 300, 129), strict=True)]
    clients = dict(enumerate([*few.values(), *longer]))
    facts = facts_of(clients)
    inputs = {"model": SPEC.build().initial(Stream(5)), "learning_rate": 10.0, "local_epochs": 10, "batch_size": 256}

    def ends(numbers: Sequence[int]) -> dict[int, Tensor]:
        session = OneRound(clients, facts)
        members = [
            Member(ClientData(clients[k], clients[k]), session.model, inputs, None, {}, (k,), MINT) for k in numbers
        ]
        return dict(zip(numbers, descent(members, torch.stack([inputs["model"]] * len(numbers))), strict=True))

    together = ends(range(8))
    for k in range(8):
        assert torch.equal(ends([k])[k], together[k]), k
        rest = [j for j in range(8) if j != k]
        assert all(torch.equal(one, together[j]) for j, one in ends(rest).items()), k


def _repeated(records: Records, n: int) -> Records:
    rows = torch.arange(n) % len(records)
    return Records(records.x[rows] + 0.1 * torch.randn(n, *SPEC.features, generator=torch.Generator()), records.y[rows])


@pytest.mark.parametrize("name", SOUND)
def test_what_would_fail_by_a_client_s_loss_is_refused_before_it_is_known(name: str) -> None:
    """A request that is answered or not, as the loss is 0 or not, would tell one bit without any noise."""
    clients = draw_clients(0)
    session, algorithm = OneRound(clients, facts_of(clients)), ALGORITHMS[name](rounds=10)
    algorithm.round(session, algorithm.start(session))  # type: ignore[arg-type]
    ((task, shared),) = session.asked
    (known,) = (each for each in DEPLOYABLE.values() if each.task is task)
    known.check(shared, parameters=15, record=4)
    positive = {key: kind for key, kind in known.inputs.items() if isinstance(kind, Positive)}
    assert {"clip", "learning_rate"} <= positive.keys()
    for key, kind in positive.items():
        for wrong in (-1.0, -1e-300, *([] if kind.zero else [0.0, -0.0]), 1, True, "1"):
            with pytest.raises(Malformed, match=f"'{key}' must be a number above 0"):
                known.check({**shared, key: wrong}, parameters=15, record=4)


@pytest.mark.parametrize("name", SOUND)
def test_all_of_one_draw_is_one_event(name: str) -> None:
    """By hand, and against the wrong way of pricing every sum by itself, which comes out too cheap."""
    algorithm, facts = ALGORITHMS[name](rounds=100, sample_rate=0.1), facts_of(draw_clients(0))
    (mechanism,) = algorithm.releases(Terms(facts, None, 1.5))
    assert isinstance(mechanism, CohortSums)
    z = [part.noise_multiplier for part in mechanism.parts]
    together = 1 / math.sqrt(sum(each**-2 for each in z))
    assert isinstance(mechanism.event, PoissonSampledDpEvent) and mechanism.event.sampling_probability == 0.1
    assert mechanism.event.event.noise_multiplier == pytest.approx(together, rel=1e-12)
    assert together < 1.5 and len(z) >= 2
    right, wrong = PLDAccountant(), PLDAccountant()
    right.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(together)), 100)
    for each in z:
        wrong.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(each)), 100)
    assert wrong.get_epsilon(1e-3) < right.get_epsilon(1e-3)


def values(name: str, **more: Any) -> dict[str, Any]:
    return {
        "data": {"dataset": "digits", "split": {"kind": "power-law", "clients": 12}},
        "model": {"name": "logistic"},
        "algorithm": {"name": name, "rounds": 4, "sample_rate": 0.5, **more},
        "privacy": {"epsilon": 4.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }


@pytest.mark.parametrize("name", SOUND)
def test_the_posted_epsilon_is_that_of_the_ledger_by_an_accountant_of_its_own(name: str, tmp_path: Any) -> None:
    """With weights by size. The noise is solved for epsilon 4; dp-accounting prices the event that was posted."""
    plan = make_plan(make_config(values(name, **({"size_cap": 60} if name in CAPPED else {}))))
    result = run_plan(plan, runs=tmp_path)
    (mechanism,) = plan.releases[-1]
    assert isinstance(mechanism, CohortSums)
    z = 1 / math.sqrt(sum(part.noise_multiplier**-2 for part in mechanism.parts))
    account = PLDAccountant(value_discretization_interval=1e-3)
    account.compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(z)), 4)
    assert result.statement.epsilon_spent == pytest.approx(account.get_epsilon(1e-3), rel=5e-3)
    assert 3.9 < result.statement.epsilon <= 4.0


# ---- plain cases -----------------------------------------------------------------------------------


def after_one_round(algorithm: Any, clients: Mapping[int, Records], **state: Any) -> Tensor:
    session = OneRound(clients, facts_of(clients, state.pop("clip_norm", 1.0)))
    return algorithm.round(session, replace(algorithm.start(session), **state)).model


PLAIN: dict[str, Any] = {"rounds": 10, "sample_rate": 1.0, "learning_rate": 0.1, "clip": "fixed"}


@pytest.mark.parametrize(
    "algorithm",
    [
        RootLoss(**PLAIN, loss_scale=1e-9),  # everybody weighs 1
        QFedAvg(**PLAIN, fairness_power=0.0),
        FairFedAvg(**PLAIN),  # nothing has been released yet: the mean loss is 1, and alpha out of reach
        LossSplit(**PLAIN),  # all train the first model
    ],
    ids=lambda algorithm: algorithm.name,
)
@pytest.mark.parametrize("clip_norm", [0.05, math.inf])
def test_in_the_plain_case_all_are_fedavg(algorithm: Any, clip_norm: float) -> None:
    clients = draw_clients(3, scale=1.0)
    if isinstance(algorithm, FairFedAvg):
        algorithm = algorithm.model_copy(update={"alpha": 1e6})
    found = after_one_round(algorithm, clients, clip_norm=clip_norm)
    expected = after_one_round(FedAvg(**PLAIN), clients, clip_norm=clip_norm)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def full_batch(session: OneRound, records: Records, weights: Tensor) -> tuple[Tensor, float]:
    """The gradient on all records, by autograd, and the loss before it."""
    weights = weights.clone().requires_grad_()
    loss = session.model.losses(session.model.unflatten(weights), records.x, records.y).mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    return gradient, float(loss.detach())


def clipped(update: Tensor, bound: float) -> Tensor:
    return update * min(1.0, bound / float(update.norm()))


def test_fairfed_follows_the_losses_written_out() -> None:
    """clamp(n_k N/n + beta (L_k - Lbar), 0, omega_max), with losses on both sides of the mean, and every clamp used."""
    clients = draw_clients(4, count=8, scale=1.0)
    session = OneRound(clients, facts_of(clients, 0.05))
    algorithm = FairFed(**PLAIN, batch_size=100, beta=2.0, largest_weight=1.6)
    state = replace(algorithm.start(session), loss=1.3)  # type: ignore[arg-type]
    sizes, total, weights = session.facts.size, torch.zeros_like(state.model), []
    for k, records in clients.items():
        gradient, loss = full_batch(session, records, state.model)
        weights.append(min(max(len(records) / sizes.mean() + 2.0 * (loss - 1.3), 0.0), 1.6))
        total += weights[k] * clipped(-0.1 * gradient, 0.05)
    assert {0.0, 1.6} < set(weights)
    found = algorithm.round(session, state).model  # type: ignore[arg-type]
    torch.testing.assert_close(found, state.model + total / len(clients), atol=1e-6, rtol=1e-4)


def test_published_fairfed_keeps_its_weights_written_out() -> None:
    """Two rounds: weight_k -= beta (mean loss - loss_k), divided by their sum; updates clipped at the median."""
    clients = draw_clients(9, count=5, scale=1.0)
    session = OneRound(clients, facts_of(clients))
    algorithm = FairFed(**PLAIN, batch_size=100, beta=0.5, faithful=True)
    state = replace(algorithm.start(session), loss=1.2)  # type: ignore[arg-type]
    sizes = session.facts.size
    weights, mean, model = {k: len(r) / sizes.mean() for k, r in clients.items()}, 1.2, state.model
    for _ in range(2):
        told = {k: full_batch(session, records, model) for k, records in clients.items()}
        weights = {k: max(0.0, weights[k] + 0.5 * (told[k][1] - mean)) for k in clients}
        median = float(np.median([0.1 * float(gradient.norm()) for gradient, _ in told.values()]))
        steps = [weights[k] * clipped(-0.1 * gradient, median) for k, (gradient, _) in told.items()]
        model = model + torch.stack(steps).sum(dim=0) / sum(weights.values())
        mean = float(np.mean([loss for _, loss in told.values()]))
        state = algorithm.round(session, state)  # type: ignore[arg-type]
        torch.testing.assert_close(state.model, model, atol=1e-6, rtol=1e-4)
        assert state.loss == pytest.approx(mean, rel=1e-6)


def test_published_q_fedavg_written_out() -> None:
    """F_k^q times what the median leaves of G_k, over the sum of h_k; noise of the median on the mean of them."""
    clients, q = draw_clients(6, scale=1.0), 2.0
    session = OneRound(clients, facts_of(clients))
    algorithm = QFedAvg(**PLAIN, batch_size=100, fairness_power=q, faithful=True)
    state = algorithm.start(session)  # type: ignore[arg-type]
    told = [full_batch(session, records, state.model) for records in clients.values()]
    median = float(np.median([float(gradient.norm()) for gradient, _ in told]))
    top = torch.stack([F**q * clipped(gradient, median) for gradient, F in told]).sum(dim=0)
    bottom = sum(q * F ** (q - 1) * float(gradient.norm()) ** 2 + F**q / 0.1 for gradient, F in told)
    found = algorithm.round(session, state).model  # type: ignore[arg-type]
    torch.testing.assert_close(found, state.model - top / bottom, atol=1e-6, rtol=1e-4)
    noisy = algorithm.round(replace(session, noise_multiplier=2.0), state).model - found  # type: ignore[arg-type, type-var]
    drawn = 2.0 * 0.1 * median * Stream(0).normal((len(noisy),))
    torch.testing.assert_close(noisy, (len(clients) / (0.1 * bottom) * drawn).float(), atol=1e-5, rtol=1e-3)


def test_loss_split_written_out() -> None:
    """A late round: each takes the model of lower loss; V_j/(W sqrt(p_j)), and p follows the counts."""
    clients = draw_clients(11, count=8, scale=1.0)
    session = OneRound(clients, facts_of(clients, 0.05), round=10)
    algorithm = LossSplit(**PLAIN, batch_size=100)
    first = algorithm.start(session)  # type: ignore[arg-type]
    second = first.model + 0.3 * Stream(1).normal((len(first.model),)).float()
    state = replace(first, second=second, share=torch.tensor([0.64, 0.36]))
    sums, counts = torch.zeros(2, len(second)), [0, 0]
    for records in clients.values():
        told = [full_batch(session, records, weights) for weights in (state.model, second)]
        j = int(told[1][1] < told[0][1])
        counts[j] += 1
        sums[j] += clipped(-0.1 * told[j][0], 0.05)
    assert sorted(counts)[0] >= 1 and counts[0] != counts[1]
    after = algorithm.round(session, state)  # type: ignore[arg-type]
    torch.testing.assert_close(after.model, state.model + sums[0] / (8 * 0.8), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(after.second, second + sums[1] / (8 * 0.6), atol=1e-6, rtol=1e-4)
    kept = [0.9 * share + 0.1 * count / 8 for share, count in zip((0.64, 0.36), counts, strict=True)]
    torch.testing.assert_close(after.share, torch.tensor(kept))


def test_fairfed_without_beta_weighs_by_size() -> None:
    clients = draw_clients(4, scale=1.0)
    largest = max(len(r) for r in clients.values())
    found = after_one_round(FairFed(**PLAIN, beta=0.0, largest_weight=10.0), clients)
    expected = after_one_round(FedAvg(**PLAIN, size_cap=largest), clients)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_fedavg_is_the_mean_of_clipped_updates_by_autograd() -> None:
    """One full-batch step of each client, written out."""
    clients = draw_clients(5, scale=1.0)
    session = OneRound(clients, facts_of(clients, 0.02))
    algorithm = FedAvg(**PLAIN, batch_size=100)
    start = session.initial_model()
    updates = [-0.1 * full_batch(session, records, start)[0] for records in clients.values()]
    found = algorithm.round(session, algorithm.start(session)).model  # type: ignore[arg-type]
    torch.testing.assert_close(
        found, start + torch.stack([clipped(update, 0.02) for update in updates]).mean(dim=0), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("clip_norm", [2.0, math.inf])
def test_q_fedavg_is_the_paper_without_bounds(clip_norm: float) -> None:
    """w - sum D / sum h, from full-batch gradients by autograd; a step of plain SGD makes G the gradient."""
    clients, q = draw_clients(6, scale=1.0), 2.0
    session = OneRound(clients, facts_of(clients, clip_norm))
    algorithm = QFedAvg(
        **PLAIN, batch_size=100, fairness_power=q, least_loss=1e-9, largest_loss=5.0
    )  # bounds that bind nobody
    start = session.initial_model()
    top, bottom = torch.zeros_like(start), 0.0
    for records in clients.values():
        gradient, F = full_batch(session, records, start)
        top += F**q * gradient
        bottom += q * F ** (q - 1) * float(gradient.norm()) ** 2 + F**q / 0.1
    found = algorithm.round(session, algorithm.start(session)).model  # type: ignore[arg-type]
    torch.testing.assert_close(found, start - top / bottom, atol=1e-5, rtol=1e-3)


def test_fair_clips_favour_who_is_worse_off() -> None:
    """Two kinds of clients; the released mean loss lies between theirs. Who is above it keeps its whole update."""
    clients = draw_clients(7, count=8, scale=1.0)
    session = OneRound(clients, facts_of(clients, 0.05))
    fair, plain = FairFedAvg(**PLAIN, alpha=0.0), FedAvg(**PLAIN)
    losses = {}
    for k, records in clients.items():
        weights = session.initial_model()
        losses[k] = float(session.model.losses(session.model.unflatten(weights), records.x, records.y).mean())
    mean = float(np.median(list(losses.values())))
    kept = {}
    for k, records in clients.items():
        pair = []
        for algorithm in (fair, plain):
            alone = OneRound({k: records}, session.facts)
            algorithm.round(alone, replace(algorithm.start(alone), loss=mean))  # type: ignore[arg-type,attr-defined]
            pair.append(float(alone.sums["update"].norm()))
        kept[k] = pair[0] / pair[1]
    better = [kept[k] for k in clients if losses[k] < mean]
    worse = [kept[k] for k in clients if losses[k] > mean]
    assert min(worse) == pytest.approx(1.0, abs=1e-6)
    assert max(better) < 1 and min(better) >= 0.0999


@pytest.mark.parametrize(
    ("loss", "mean", "deviation_weight"), [(0.4, 1.1, 0.0), (1.05, 0.9, 0.0), (0.4, 1.1, 0.02), (3.0, 0.5, 0.0)]
)
def test_a_sound_fair_clip_is_the_multiplier_method_on_vectors(
    loss: float, mean: float, deviation_weight: float
) -> None:
    """The Lagrangian of a client and the aggregate by autograd, with the announced noise taken off its square."""
    random = torch.Generator().manual_seed(3)
    update, aggregate = (0.3 * torch.randn(15, generator=random, dtype=torch.float64) for _ in range(2))
    aggregate += 0.5 * update
    algorithm = FairFedAvg(
        rounds=10, learning_rate=0.1, sample_rate=0.5, server_learning_rate=1.5, alpha=0.1, clip_rate=0.004,
        penalty=0.3, multiplier=2.0, multiplier_rate=0.5, deviation_weight=deviation_weight,
    )  # fmt: skip
    clients = draw_clients(0)
    clip, noise, eta, part = 0.8, 0.7, 0.1, 1 / (0.5 * len(clients))
    state = FairState(torch.zeros(15), clip, mean, aggregate.float(), noise)
    inputs = algorithm.inputs(state, 3) | algorithm.settings(facts_of(clients), state)
    member = Member(ClientData(clients[0], clients[0]), SPEC.build(), inputs, None, {}, (0,), MINT)
    found = fairly_kept(member, update.float(), loss, 0.9)

    length = float(update.norm())
    C, multiplier, energy = torch.tensor(min(length, clip) / clip), 2.0, float(aggregate @ aggregate) - noise**2
    assert energy > 0
    for _ in range(5):
        C = C.double().requires_grad_()
        kept = C * clip / length
        # u = server rate (a_k kept update + aggregate); losses change by -<update of its client, u>/eta
        own = loss - 1.5 / eta * (0.9 * part * kept * update @ update + update @ aggregate)
        other = mean - 1.5 / eta * (0.9 * part * kept * update @ aggregate + energy)
        f = torch.relu((other - own).abs() - 0.1)
        bias = deviation_weight * float(update.abs().sum()) / eta * (1 - kept)
        ((other - mean) + bias + multiplier * f + 0.15 * f**2).backward()
        multiplier += 0.5 * float(f.detach())
        C = (C - 0.004 * C.grad).clamp(0.0, 1.0).detach()  # type: ignore[operator]
    assert float(C) > 0.1 and (found == 1.0) == (loss > 2)
    assert found == pytest.approx(min(1.0, max(0.1, float(C)) / (min(length, clip) / clip)), rel=1e-4)


def test_the_noise_in_the_aggregate_is_as_long_as_announced() -> None:
    """3,000 normal numbers; their mean square is farther than 12%, 4.6 deviations, for one seed in 200,000."""
    algorithm, facts = FairFedAvg(rounds=10, sample_rate=0.3, size_cap=12), facts_of(draw_clients(2), 0.7)
    terms = Terms(facts, None, 1.4)
    state = FairState(torch.zeros(15), 2.5, 1.0, torch.zeros(15))
    mechanism, squares = algorithm.cohort_sum(terms), []
    for seed in range(200):
        noisy = mechanism.finish(mechanism.zero(), Stream(seed), 0)[0]["update"]
        squares.append(float((algorithm.step(facts, state) * noisy).square().sum()))
    assert np.mean(squares) == pytest.approx(algorithm.noise(terms, state) ** 2, rel=0.12)


def test_fair_fedavg_is_not_idle_under_noise(tmp_path: Path) -> None:
    """What is released is mostly noise. Some clients shrink all the same; with it left in, none does (seed 0)."""
    given = values("fair-fedavg", rounds=10, learning_rate=0.1)
    run = load_run(run_plan(make_plan(make_config(given)), runs=tmp_path).folder)
    shrunk = run.metrics[run.metrics["metric"] == "shrunk"]
    assert 0.1 < shrunk[shrunk["round"] > 2]["value"].mean() < 0.9


def test_the_next_round_of_fair_fedavg_knows_the_last_aggregate() -> None:
    clients = draw_clients(2)
    session = OneRound(clients, facts_of(clients, 0.7), noise_multiplier=1.4)
    algorithm = FairFedAvg(rounds=10, sample_rate=0.3, server_learning_rate=1.5)
    first = algorithm.start(session)  # type: ignore[arg-type]
    second = algorithm.round(session, first)  # type: ignore[arg-type]
    assert float(second.aggregate.norm()) > 0 and first.noise == 0
    torch.testing.assert_close(second.model - first.model, 1.5 * second.aggregate)
    assert second.noise == algorithm.noise(session.federation_terms, first) > 0
    asked = algorithm.settings(session.facts, second)
    assert torch.equal(asked["aggregate"], second.aggregate) and asked["noise"] == second.noise  # type: ignore[arg-type]


def test_the_clipping_value_finds_the_quantile() -> None:
    """Updates of known norms 1..100 and no noise: C settles between the 70th and the 71st, whatever it began with."""
    algorithm = FedAvg(rounds=10, sample_rate=1.0, quantile=0.7)
    facts = Facts(np.ones(100, int), np.zeros(100, int), (1,), 2, 1, 1.0)
    for start in (0.01, 1e4):
        state = Tracked(torch.zeros(1), start, 0.0)
        for _ in range(2000):
            within = sum(0.5 if norm <= state.clip else -0.5 for norm in range(1, 101))
            clip, loss = algorithm.followed(facts, state, {"within": torch.tensor([within])})
            state = replace(state, clip=clip, loss=loss)
        # within half a step of exp(rate / 100) around the jump
        assert 70 * math.exp(-CLIP_RATE / 100) <= state.clip <= 71 * math.exp(CLIP_RATE / 100)


def test_the_mean_loss_is_followed() -> None:
    algorithm = FairFed(rounds=10, sample_rate=1.0)
    facts = Facts(np.ones(10, int), np.zeros(10, int), (1,), 2, 1, 1.0)
    state = Tracked(torch.zeros(1), 1.0, 5.0)
    for _ in range(100):  # every client has loss 2: the increments are clipped to B = 1
        increments = 10 * max(-1.0, min(1.0, 2.0 - state.loss))
        state = replace(state, loss=algorithm.followed(facts, state, {"loss": torch.tensor([increments])})[1])
    assert state.loss == pytest.approx(2.0, abs=1e-6)


def test_loss_split_separates_two_kinds_of_clients(tmp_path: Any) -> None:
    """Half of the digits are turned: without noise each half ends with a model of its own."""
    given = values("loss-split", rounds=60, sample_rate=1.0, learning_rate=0.5, margin=0.05)
    given["algorithm"]["rounds"] = 60
    given["data"]["split"] = {"kind": "rotate", "degrees": [0, 180], "clients": [8, 4]}
    given["privacy"] = {"noise_multiplier": 0.0, "clip_norm": 1.0, "delta": 1e-3}
    split = run_plan(make_plan(make_config(given)), runs=tmp_path).metrics["accuracy"]
    given["algorithm"] = {k: v for k, v in given["algorithm"].items() if k != "margin"} | {"name": "fedavg"}
    one = run_plan(make_plan(make_config(given)), runs=tmp_path).metrics["accuracy"]
    assert split.by_group[split.worst_group] > one.by_group[one.worst_group] + 0.03


# ---- as it was published ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("fairfed", {"size_cap": 10}, "size_cap = 10 makes no sense with fairfed"),
        ("q-fedavg", {"size_cap": 10}, "size_cap = 10 makes no sense with q-fedavg"),
        ("q-fedavg", {"least_loss": 5.0, "largest_loss": 1.0}, "least_loss = 5 is above"),
        ("fair-fedavg", {"faithful": True, "decay": "linear"}, "does not go with algorithm.faithful"),
    ],
)
def test_what_would_be_wrong_or_idle_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make_plan(make_config(values(name, **given)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_budget_is_solved_for_the_published_form(name: str, tmp_path: Path) -> None:
    """Not even where the statistics of the columns have a price: the training would have no noise."""
    rows = [f"{k},{random:.3f},{k % 2}" for k in range(12) for random in np.random.default_rng(k).random(8)]
    (tmp_path / "records.csv").write_text("\n".join(["client,a,y", *rows]))
    prepared = {"a": {"kind": "standard", "low": 0.0, "high": 1.0}}
    options = {"path": str(tmp_path / "records.csv"), "statistics_noise": 4.0, "prepare": prepared}
    given = values(name, faithful=True)
    for data in (given["data"], {"dataset": "file", "options": options}):
        with pytest.raises(UserError, match="cannot be met"):
            make_plan(make_config(given | {"data": data}))
    given |= {"data": {"dataset": "file", "options": options}, "privacy": {"noise_multiplier": 1.0, "delta": 1e-3}}
    said = make_plan(make_config(given)).statement()
    assert math.isinf(said.epsilon) and "it would be" not in said.sentence()


@pytest.mark.parametrize("name", PUBLISHED)
def test_who_runs_the_published_form_trusts_the_server_with_everything(name: str) -> None:
    given = values(name, faithful=True)
    given["privacy"] = {"noise_multiplier": 1.0, "delta": 1e-3}
    said = make_plan(make_config(given)).statement().sentence()
    assert "an update without bound or noise" in said and "within bounds" not in said
    given["privacy"]["trust"] = "secure-sum"
    with pytest.raises(UserError, match=r"does not go with algorithm\.faithful"):
        make_plan(make_config(given))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_form_claims_nothing(name: str, tmp_path: Any) -> None:
    given = values(name, faithful=True)
    given["privacy"] = {"noise_multiplier": 1.0, "delta": 1e-3}
    plan = make_plan(make_config(given))
    (mechanism,) = plan.releases[-1]
    assert mechanism.event == NonPrivateDpEvent() and from_canonical(canonical(mechanism)) == mechanism
    result = run_plan(plan, runs=tmp_path)
    assert math.isinf(result.statement.epsilon)
    assert "NONE" in result.statement.sentence()


def test_the_published_baseline_clips_at_the_median() -> None:
    """p_k/q g_k min(1, median/|g_k|), written out."""
    clients = draw_clients(8, count=5, scale=1.0)
    session = OneRound(clients, facts_of(clients))
    algorithm = FedAvg(**PLAIN | {"sample_rate": 0.5}, faithful=True)
    alone = {}
    for k, records in clients.items():
        one = OneRound({k: records}, facts_of(clients))
        FedAvg(**PLAIN).round(one, replace(algorithm.start(one), clip=1e6))  # type: ignore[arg-type]
        alone[k] = one.sums["update"] * 1e6
    median = float(np.median([float(update.norm()) for update in alone.values()]))
    n = sum(len(r) for r in clients.values())
    parts = [
        len(clients[k]) / n / 0.5 * update * min(1.0, median / float(update.norm())) for k, update in alone.items()
    ]
    start = session.initial_model()
    found = algorithm.round(session, algorithm.start(session)).model  # type: ignore[arg-type]
    torch.testing.assert_close(found, start + torch.stack(parts).sum(dim=0).float(), atol=1e-6, rtol=1e-4)


@dataclass(frozen=True)
class Excess:
    """How far neighbours of the published form lie apart, over what its proof allows."""

    moved: float  # |sum - sum'| over max C_k of the smaller cohort
    scale: float  # ratio of the two noises


def excess(clients: Mapping[int, Records], algorithm: FairFedAvg) -> Excess:
    facts = facts_of(clients)
    both = OneRound(clients, facts)
    algorithm.round(both, algorithm.start(both))  # type: ignore[arg-type]
    moved, scale = 0.0, 1.0
    for gone in clients:
        rest = OneRound({k: r for k, r in clients.items() if k != gone}, facts)
        algorithm.round(rest, algorithm.start(rest))  # type: ignore[arg-type]
        stated = min(float(both.sums["clip"]), float(rest.sums["clip"]))
        moved = max(moved, float(torch.linalg.vector_norm(both.sums["update"] - rest.sums["update"])) / stated)
        scale = max(scale, float(both.sums["clip"]) / float(rest.sums["clip"]))
    return Excess(moved, scale)


def test_the_published_form_exceeds_the_sensitivity_that_it_states() -> None:
    """The same leave-one-out test as above: it fails, by the weights p_k/q and by the noise, which tells of norms."""
    algorithm = FairFedAvg(rounds=10, sample_rate=0.1, learning_rate=0.1, faithful=True)
    assert (algorithm.alpha, algorithm.clip_rate) == (2.0, 1e-4)  # as printed
    found = [excess(draw_clients(seed, count=10), algorithm) for seed in range(25)]
    moved = max(one.moved for one in found)  # the proof says at most 1
    scale = max(one.scale for one in found)  # one client more or less: other noise for all parameters
    assert moved > 7 and scale > 10
    page = " ".join((Path(__file__).parents[2] / "docs/fair-clipping.md").read_text().split())
    usual = [float(np.median(values)) for values in ([one.moved for one in found], [one.scale for one in found])]
    assert f"it is more than {usual[0]:.2f} and {usual[1]:.2f} times" in page
    assert f"by up to {moved:.1f} times what the proof" in page and f"up to {scale:.0f} times more noise" in page


def test_arrival_order_changes_nothing_in_the_published_form() -> None:
    by = MultiplierClipped(12, 0.5, 1.0, method=Multipliers(0.1, 2.0, 0.0, 0.0, 30.0, 1e-4, 0.005, 5))
    random = torch.Generator().manual_seed(0)
    shares = []
    for k in range(6):
        sent = {"update": torch.randn(12, generator=random), "weight": torch.tensor(0.2), "loss": torch.tensor(1.0 + k)}
        shares.append(by.share(sent, None)[0])  # type: ignore[arg-type]
    found = []
    for order in (range(6), reversed(range(6))):
        exact = by.zero()
        for k in order:
            by.add(exact, shares[k])
        found.append(by.finish(exact, Stream(3), 0)[0]["update"])
    assert torch.equal(*found)
