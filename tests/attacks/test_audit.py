"""The audit can fail, and does not where nothing is wrong."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import fairveil.attacks.claims
import fairveil.plan
import fairveil.session
from fairveil.algorithms import ALGORITHMS
from fairveil.attacks.attack import attack
from fairveil.attacks.audit import Audit, audit, watch_of
from fairveil.attacks.canaries import Planting, bearers, capacity, plant
from fairveil.attacks.claims import claimed_curve
from fairveil.attacks.evidence import refutes
from fairveil.attacks.rehearsal import rehearse
from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.plan import Plan, make_plan
from fairveil.privacy import choice, mechanisms, metric, training
from fairveil.privacy.gradients import ClippedSums
from fairveil.privacy.mechanisms import CohortSums, events_of
from fairveil.privacy.release import MINT, Share
from fairveil.run import run_plan
from fairveil.streams import Stream

SIGNIFICANCE = 1e-3
REPLACED = ("fedfdp", "mr-mtl", "pate-fl", "r-dpcfl")  # as well
CANARIES = {"client": 100, "metric": 120}  # where they take longer


def plan(algorithm: Mapping[str, Any], privacy: Mapping[str, Any], **sections: Any) -> Plan:
    """Ten clients of 50 records in 200 dimensions, or what is laid over that."""
    options = {"clients": [10], "records": 50, "test_records": 1, "features": 200, "classes": 10}
    values = {
        "data": {"dataset": "gaussian-clusters", "options": options},
        "model": {"name": "logistic"},
        "algorithm": {"learning_rate": 1.0, **algorithm},
        "privacy": {"delta": 1e-5, **privacy},
        "engine": {"workers": 1},
    }
    return make_plan(make_config(values | sections))


def whole_batches(epsilon: float, rounds: int = 2) -> Plan:
    """Every step takes all records: the noise multiplier alone decides."""
    return plan({"name": "global", "rounds": rounds, "batch_size": 50}, {"epsilon": epsilon})


def networks(epsilon: float) -> Plan:
    options = {"clients": [10], "records": 50, "test_records": 1, "features": 50, "classes": 10}
    data = {"dataset": "gaussian-clusters", "options": options}
    model = {"name": "mlp", "hidden": 32}
    algorithm = {"name": "global", "rounds": 2, "batch_size": 50}
    return plan(algorithm, {"epsilon": epsilon}, data=data, model=model)


def cohorts(epsilon: float, sample_rate: float = 1.0, rounds: int = 2) -> Plan:
    options = {"clients": [20], "records": 5, "test_records": 1, "features": 200, "classes": 10}
    data = {"dataset": "gaussian-clusters", "options": options}
    algorithm = {"name": "dp-fedavg", "rounds": rounds, "sample_rate": sample_rate}
    return plan(algorithm, {"epsilon": epsilon}, data=data)


def found(of: Plan, canaries: int, rehearsals: int | None = None) -> Audit:
    return audit(of, canaries=canaries, rehearsals=rehearsals, significance=SIGNIFICANCE)


# ---- planted faults: local training ---------------------------------------------------------------------


def noise_times(factor: float) -> AbstractContextManager[Any]:
    return patch.object(training, "noise_std", lambda bound, z: factor * mechanisms.noise_std(bound, z))


def clip_skipped(first: int, last: int) -> AbstractContextManager[Any]:
    """The parameters from first to last add their gradients as they are; the norm that is clipped is that of all."""
    right = training.clipped_sums

    def partly(*arguments: Any) -> ClippedSums:
        *before, clip_norm = arguments
        sums, free = right(*before, clip_norm), right(*before, 1e9)
        total = sums.total.clone()
        total[:, first:last] = free.total[:, first:last].to(total.dtype)
        return ClippedSums(total, sums.clipped, sums.not_finite)

    return patch.object(training, "clipped_sums", partly)


def everybody_drawn() -> AbstractContextManager[Any]:
    def draw(self: training.Runner) -> bool:
        if self.left:
            self.batch = torch.arange(len(self.client.data.train.y))
            self.drawn += len(self.batch)
        return self.left > 0

    return patch.object(training.Runner, "draw", draw)


@contextmanager
def counted_once_in(times: int, *modules: ModuleType) -> Iterator[None]:
    """The price is that of a part of what is released: less noise is solved for, and a smaller epsilon is claimed."""

    def fewer(releases: Any, holders: int = 1) -> Counter[Any]:
        return Counter({event: max(1, n // times) for event, n in events_of(releases, holders).items()})

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "events_of", fewer))
        yield


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_an_alarm_without_noise(epsilon: float) -> None:
    of = whole_batches(epsilon)
    assert not found(of, 2000).alarm
    with noise_times(0.0):
        assert found(of, 2000).epsilon_lower_bound > epsilon


def test_an_alarm_with_half_the_noise() -> None:
    """Which is epsilon 4.3 for a claim of 2: it takes 20,000 canaries to see it."""
    of = whole_batches(2.0)
    with noise_times(0.5):
        assert found(of, 20_000, 10).epsilon_lower_bound > 2.0
    sound = found(of, 20_000, 10)
    assert 0.5 < sound.epsilon_lower_bound < 2.0


def test_an_alarm_where_a_layer_is_not_clipped() -> None:
    with clip_skipped(0, 2000):
        assert found(whole_batches(2.0), 1000).epsilon_lower_bound > 2.0


@pytest.mark.parametrize("part", ["first", "last"])
def test_an_alarm_where_a_layer_of_a_network_is_not_clipped(part: str) -> None:
    of = networks(1.0)
    p = of.facts.parameters
    assert not found(of, 1000).alarm
    # with more canaries at a time they hide each other in the last layer, which they all fill
    with clip_skipped(*((0, 1600) if part == "first" else (p - 330, p))):
        assert found(of, 1000, 10).epsilon_lower_bound > 1.0


def test_an_alarm_where_batches_are_not_sampled() -> None:
    of = plan({"name": "global", "rounds": 10, "batch_size": 5}, {"epsilon": 1.0})
    assert not found(of, 2000).alarm
    with everybody_drawn():
        assert found(of, 2000).epsilon_lower_bound > 1.0


@pytest.mark.parametrize("modules", [[fairveil.plan], [fairveil.plan, fairveil.attacks.claims]], ids=["plan", "all"])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_an_alarm_where_the_ledger_counts_too_little(modules: list[ModuleType], delta: float) -> None:
    """A tenth of it. Whether the audit prices it right itself or not: it is the claim that is refuted."""
    training = {"name": "global", "rounds": 20, "batch_size": 50}
    with counted_once_in(10, *modules):
        of = plan(training, {"epsilon": 1.0, "delta": delta})
        assert of.price.epsilon <= 1.0
        refuted = found(of, 2000)
    assert refuted.epsilon_lower_bound > 1.0 and refuted.alarm
    assert (refuted.epsilon_priced > 2.0) == (len(modules) == 1)


def test_no_alarm_where_it_counts_all() -> None:
    sound = found(whole_batches(1.0, rounds=20), 2000)
    assert not sound.alarm
    assert sound.epsilon_priced == pytest.approx(sound.epsilon_claimed)


# ---- planted faults: whole clients, choices, votes, local models -----------------------------------------


def sums_noised_by(factor: float) -> AbstractContextManager[Any]:
    right = mechanisms.noise_std
    return patch.object(mechanisms, "noise_std", lambda bound, z: factor * right(bound, z))


def test_alarms_for_whole_clients() -> None:
    of = cohorts(2.0)
    sound = found(of, 1000)
    assert sound.unit == "client"
    assert not sound.alarm
    with sums_noised_by(0.0):
        assert found(of, 1000).epsilon_lower_bound > 2.0
    with shares_unbounded():
        assert found(of, 1000).epsilon_lower_bound > 2.0


@contextmanager
def shares_unbounded() -> Iterator[None]:
    def share(self: CohortSums, values: Mapping[str, Tensor], client: Any) -> tuple[Share, dict[str, float]]:
        return Share({name: value.double() for name, value in values.items()}, self, MINT), {}

    def add(self: CohortSums, exact: dict[str, Tensor], share: Share) -> None:
        for part in self.parts:
            exact[part.name] += self._fixed(part, share.value[part.name])

    with patch.object(CohortSums, "share", share), patch.object(CohortSums, "add", add):
        yield


@pytest.mark.slow
def test_an_alarm_with_half_the_noise_on_sums() -> None:
    with sums_noised_by(0.5):
        assert found(cohorts(2.0), 10_000).epsilon_lower_bound > 2.0


def test_an_alarm_where_a_cohort_is_not_sampled() -> None:
    class Everybody(Stream):
        def coins(self, count: int, probability: float) -> Tensor:
            return torch.arange(count)

    of = cohorts(2.0, sample_rate=0.1, rounds=10)
    with patch.object(fairveil.session, "Stream", Everybody):
        assert found(of, 800).epsilon_lower_bound > 2.0


@pytest.mark.slow
def test_an_alarm_where_a_choice_is_exact() -> None:
    """A canary in a client, which has two records beside it: among more it would hardly ever decide."""
    options = {"clients": [20, 20], "records": 2, "test_records": 1, "features": 50, "classes": 4}
    of = plan(
        {"name": "ifca", "rounds": 4, "clusters": 2, "batch_size": 2, "learning_rate": 0.1,
         "select_epsilon": 0.1, "select_rounds": 4},
        {"noise_multiplier": 50.0}, data={"dataset": "gaussian-clusters", "options": options},
    )  # fmt: skip
    assert of.price.epsilon < 0.4
    assert not found(of, 400, 10).alarm
    with patch.object(choice, "_gumbel", lambda stream, count: torch.zeros(count, dtype=torch.float64)):
        assert found(of, 800, 20).epsilon_lower_bound > of.price.epsilon


def votes(name: str, unit: str = "client") -> Plan:
    data = {
        "dataset": "digits",
        "split": {"kind": "iid", "clients": 20},
        "server": {"dataset": "digits", "rows": "test"},
    }
    algorithm = {"name": name, "rounds": 1, "queries": 100, "student_steps": 1, "vat": 0.0}
    values = {
        "data": data,
        "model": {"name": "logistic"},
        "algorithm": algorithm,
        "privacy": {"unit": unit, "epsilon": 2.0, "delta": 1e-5},
        "engine": {"workers": 1},
    }
    return make_plan(make_config(values))


def test_an_alarm_where_votes_have_no_noise() -> None:
    of = votes("knn-fl")
    assert not found(of, 100).alarm
    with sums_noised_by(0.0):
        assert found(of, 400, 10).epsilon_lower_bound > 2.0


def local_models(noise: str) -> Plan:
    data = {"dataset": "digits", "split": {"kind": "iid", "clients": 60}}
    algorithm = {"name": "metric-pfl", "rounds": 2, "hypotheses": 1, "noise": noise, "learning_rate": 0.1}
    values = {
        "data": data,
        "model": {"name": "logistic"},
        "algorithm": algorithm,
        "privacy": {"noise_multiplier": 12.0 if noise == "gaussian" else 1950.0, "clip_norm": 0.5, "delta": 1e-5},
        "engine": {"workers": 1},
    }
    return make_plan(make_config(values))


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_an_alarm_where_local_models_are_longer_than_their_bound(noise: str) -> None:
    of = local_models(noise)
    assert of.price.epsilon < 2
    assert not found(of, 120).alarm
    with patch.object(metric, "_clipped", lambda steps, radius: 1000.0 * steps):
        assert found(of, 420).epsilon_lower_bound > of.price.epsilon


# ---- the real code -----------------------------------------------------------------------------------------


def registered(name: str, epsilon: float, **privacy: Any) -> Plan:
    """Any system on a few digits. Metric privacy has no delta, and is as large as it is."""
    cls = ALGORITHMS[name]
    several = {"kind": "iid", "clients": 60 if cls.unit == "metric" else 30}
    few = {"kind": "rotate", "degrees": [0, 90], "clients": [3, 3]}
    data: dict[str, Any] = {"dataset": "digits", "split": few if cls.unit == "record" else several}
    algorithm: dict[str, Any] = {"name": name, "rounds": 3}
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5}
    if cls.unit == "metric":
        budget = {"noise_multiplier": 50.0}
    if cls.needs_public:
        data["server"] = {"dataset": "digits", "rows": "test"}
        algorithm |= {"student_steps": 1, "vat": 0.0}
    return make_plan(
        make_config(
            {"data": data, "model": {"name": "logistic"}, "algorithm": algorithm, "privacy": budget | privacy,
             "engine": {"workers": 1}}
        )
    )  # fmt: skip


@pytest.mark.statistical
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_no_registered_algorithm_gives_an_alarm(name: str) -> None:
    """False-alarm rate: 1e-3 each, by the significance; seeds are fixed."""
    of = registered(name, 2.0)
    assert of.price.epsilon < math.inf
    sound = found(of, CANARIES.get(ALGORITHMS[name].unit, 300))
    assert not sound.alarm
    assert sound.guesses > 10


@pytest.mark.statistical
@pytest.mark.parametrize(
    "name", ["fedavg", "global", "knn-fl", *(pytest.param(n, marks=pytest.mark.slow) for n in REPLACED)]
)
def test_none_with_replaced_units(name: str) -> None:
    """Pairs of canaries: one of two is there. False-alarm rate: 1e-3 each."""
    of = registered(name, 2.0, adjacency="replace")
    sound = found(of, CANARIES.get(ALGORITHMS[name].unit, 300))
    assert sound.adjacency == "replace"
    assert not sound.alarm


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["pate-fl", "knn-fl"])
def test_none_where_votes_protect_records(name: str) -> None:
    assert not found(votes(name, "record"), 300).alarm


def test_pairs_are_found_like_canaries_that_are_in_or_not() -> None:
    """Under replace a pair is twice as far apart, and at the same epsilon there is twice the noise."""
    privacy = {"epsilon": 4.0, "adjacency": "replace"}
    of = plan({"name": "global", "rounds": 2, "batch_size": 50}, privacy)
    sound = found(of, 2000)
    assert 1.0 < sound.epsilon_lower_bound < 4.0
    with noise_times(0.0):
        assert found(of, 2000).alarm


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "mr-mtl", "pull": 2.0, "learning_rate": 0.2},
        {"name": "mr-mtl", "pull": 1.0, "faithful": True, "learning_rate": 0.5},
        {"name": "fedfdp", "penalty": 0.5},
    ],
)
def test_other_objectives_are_seen_through(algorithm: dict[str, Any]) -> None:
    of = plan({"rounds": 4, "batch_size": 25, **algorithm}, {"epsilon": 4.0})
    assert 0.5 < found(of, 2000).epsilon_lower_bound < 4.0


def test_records_that_several_clients_hold_are_in_all_of_these() -> None:
    split = {"kind": "rotate", "degrees": [0, 90], "clients": [2, 2], "overlap": True, "records": 200}
    of = plan(
        {"name": "global", "rounds": 2, "batch_size": 200}, {"epsilon": 4.0}, data={"dataset": "digits", "split": split}
    )
    planting = plant(of, 40, ("test",))
    assert planting.holders.shape == (40, of.holders)
    assert of.holders > 1
    sound = found(of, 400)
    assert not sound.alarm
    assert sound.epsilon_lower_bound > 0.5


@pytest.mark.parametrize(
    ("data", "model", "parts"),
    [
        ({"dataset": "linear-clusters"}, {"name": "linear"}, 1.0),
        ({"dataset": "attributes", "options": {"clients": 6, "records": 40}}, {"name": "logistic"}, 0.1),
    ],
)
def test_canaries_of_regressions_and_of_several_classes(
    data: dict[str, Any], model: dict[str, Any], parts: float
) -> None:
    of = plan({"name": "global", "rounds": 2, "batch_size": 20, "learning_rate": parts}, {"epsilon": 4.0},
              data=data, model=model)  # fmt: skip
    sound = found(of, 60)
    assert not sound.alarm
    with noise_times(0.0):
        assert found(of, 60).correct > sound.correct


def test_columns_that_are_standardised_first(tmp_path: Path) -> None:
    """What clients release of their columns is looked at, too; and canaries are standardised like records."""
    random = np.random.default_rng(0)
    lines = ["client,pressure,y", *(f"{i % 4},{random.normal(120, 15):.1f},{i % 3 % 2}" for i in range(200))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    columns = {"pressure": {"kind": "standard", "low": 0.0, "high": 200.0}}
    options = {"path": str(tmp_path / "t.csv"), "prepare": columns, "statistics_noise": 3.0}
    data = {"dataset": "file", "options": options}
    of = plan({"name": "global", "rounds": 2, "batch_size": 30}, {"epsilon": 4.0}, data=data)
    assert of.federation.standardise is not None
    assert not found(of, 20).alarm


# ---- coins -------------------------------------------------------------------------------------------------


def views() -> dict[str, Plan]:
    """A plan for every way in which canaries are looked at."""
    few: dict[str, Any] = {"rounds": 3}
    return {
        "choices": plan({"name": "r-dpcfl", "rounds": 10, "clusters": 2}, {"epsilon": 8.0}),
        "replaced": plan({"name": "global", **few}, {"epsilon": 8.0, "adjacency": "replace"}),
        "losses": plan({"name": "fedfdp", **few}, {"epsilon": 8.0}),
        "sums": cohorts(8.0, sample_rate=0.5),
        "two blocks": plan({"name": "loss-split", **few}, {"epsilon": 8.0, "adjacency": "replace"}),
        "neighbours": votes("knn-fl"),
        "teachers": votes("pate-fl"),
        "votes for records": votes("knn-fl", "record"),
        "local models": local_models("gaussian"),
        "hypotheses": registered("metric-pfl", 1.0),
    }


@pytest.mark.parametrize("view", list(views()))
def test_no_score_looks_at_the_coins(view: str) -> None:
    """The same rehearsal, watched by somebody who is told other coins: the same scores. (Who is away stays as it is: it
    is the engine that leaves them out, and no score asks it.)"""
    planting = plant(views()[view], 20, ("test",))
    absent, told = planting.absent, []
    with patch.object(Planting, "absent", property(lambda planting: absent)):
        for coins in (planting.inside, ~planting.inside):
            watch = watch_of(replace(planting, inside=coins), "same")
            rehearse(planting.plan, watch)
            told.append(watch.log_odds())
    assert np.array_equal(*told)
    assert len(np.unique(told[0])) > 1


def test_who_is_away_is_seen_from_the_sum_alone() -> None:
    """The same canaries, and nobody of them there: the scores fall for those that were in before."""
    of = cohorts(8.0)
    planting, scores = plant(of, 100, ("test",)), []
    for coins in (planting.inside, np.zeros(100, bool)):
        watch = watch_of(replace(planting, inside=coins), "same")
        assert len(watch.planting.absent) == 100 - coins.sum()
        rehearse(planting.plan, watch)
        scores.append(watch.log_odds())
    moved = scores[0] - scores[1]
    assert moved[planting.inside].mean() > 3 * abs(moved[~planting.inside].mean())


def test_clients_backstage_are_never_asked_by_the_algorithm() -> None:
    for of in (cohorts(2.0), local_models("gaussian"), votes("knn-fl")):
        planting = plant(of, 20, ("test",))
        acting = planting.plan.facts.clients
        backstage = [planting.backstage, *([] if planting.otherwise is None else [planting.otherwise])]
        assert not np.isin(np.concatenate(backstage), acting).any()
        assert np.isin(planting.holders, acting).all()


def test_what_is_claimed_does_not_change_with_canaries() -> None:
    """Same releases, same price: records beside those that are declared, or clients beside those, change neither."""
    for of in (whole_batches(2.0), local_models("gaussian")):
        assert plant(of, 20, ("test",)).plan.releases == of.releases
    of = cohorts(2.0)
    planted = plant(of, 20, ("test",)).plan
    assert events_of(planted.releases[-1]) == events_of(of.releases[-1])
    assert claimed_curve(planted, [-1]) == claimed_curve(of, [-1])


def test_the_curve_holds_the_price_that_is_claimed() -> None:
    of = whole_batches(2.0)
    curve = claimed_curve(of, bearers(of).tolist())
    assert curve.epsilon[curve.delta.index(1e-5)] == pytest.approx(of.price.epsilon)
    assert list(curve.epsilon) == sorted(curve.epsilon, reverse=True)


def test_canaries_are_spread_over_rehearsals_where_one_does_not_hold_them() -> None:
    of = local_models("gaussian")
    assert capacity(of) == 60
    assert audit(of, canaries=130, significance=0.05).rehearsals == 3


# ---- what is asked, and what comes of it ------------------------------------------------------------------


def test_a_run_keeps_what_was_found(small: dict[str, Any], runs: Path) -> None:
    folder = run_plan(make_plan(make_config(small)), runs=runs).folder
    attacked = attack(folder, canaries=100)
    kept = json.loads((folder / "attacks" / "audit.json").read_text())
    assert kept == json.loads(json.dumps(attacked.to_json()))
    assert {"epsilon_claimed", "epsilon_lower_bound", "confidence", "canaries", "guesses", "correct"} <= kept.keys()
    assert kept["epsilon_claimed"] == pytest.approx(json.loads((folder / "statement.json").read_text())["epsilon"])
    of = make_plan(make_config(small))
    curve = claimed_curve(of, bearers(of).tolist())
    assert kept["alarm"] == refutes(100, kept["guesses"], kept["correct"], curve, 1e-3)


def test_the_same_audit_finds_the_same(small: dict[str, Any]) -> None:
    of = make_plan(make_config(small))
    one, other = (replace(audit(of, canaries=60), seconds=0.0) for _ in range(2))
    assert one == other


def test_without_a_guarantee_there_is_nothing_to_refute() -> None:
    of = plan({"name": "global", "rounds": 2, "batch_size": 50}, {"noise_multiplier": 0.0})
    exposed = found(of, 200)
    assert exposed.to_json()["epsilon_claimed"] == "infinity"
    assert not exposed.alarm
    assert exposed.epsilon_lower_bound > 2.0
    json.dumps(exposed.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"significance": 0.0}, "significance = 0"),
        ({"significance": 1.0}, "significance = 1"),
        ({"guesses": 11}, "guesses = 11"),
        ({"guesses": 0}, "guesses = 0"),
        ({"canaries": 0}, "0 canaries in None rehearsals"),
        ({"rehearsals": 0}, "10 canaries in 0 rehearsals"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        audit(whole_batches(2.0), **{"canaries": 10, **options})


def test_no_more_guesses_than_there_is_room_for_canaries() -> None:
    of = whole_batches(2.0)
    with pytest.raises(UserError, match=f"with {capacity(of):,} canaries"):
        audit(of, canaries=10 * capacity(of), rehearsals=1, guesses=capacity(of) + 1)


def test_no_more_rehearsals_than_canaries() -> None:
    assert audit(cohorts(2.0), canaries=2, rehearsals=5).rehearsals == 2


def test_what_is_not_looked_at_is_not_audited() -> None:
    """As published: clipped by what the whole cohort sent."""
    of = plan({"name": "fedavg", "faithful": True, "rounds": 2}, {"noise_multiplier": 1.0})
    with pytest.raises(UserError, match="cannot be audited"):
        found(of, 10)


def test_a_claim_of_hundreds_has_bounds_like_any() -> None:
    of = plan({"name": "global", "rounds": 2, "batch_size": 50}, {"noise_multiplier": 0.03})
    assert 100 < of.price.epsilon < math.inf
    assert 2.0 < found(of, 200).epsilon_lower_bound < of.price.epsilon


def test_noise_that_clients_make_together_is_refused() -> None:
    config = make_config(
        {"data": {"dataset": "digits", "split": {"kind": "iid", "clients": 30}}, "model": {"name": "logistic"},
         "algorithm": {"name": "dp-fedavg", "noise": "distributed"}, "privacy": {"epsilon": 2.0, "delta": 1e-5}}
    )  # fmt: skip
    with pytest.raises(UserError, match="distributed"):
        audit(make_plan(config), canaries=10)


def test_a_run_cannot_be_attacked_as_something_else(small: dict[str, Any], runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        attack(tmp_path)
    folder = run_plan(make_plan(make_config(small)), runs=runs).folder
    with pytest.raises(UserError, match="cannot change what a run has promised"):
        attack(folder, ["privacy.epsilon=1"])
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(UserError, match="has changed since it was planned"):
        attack(folder)
