"""Noise that clients make together: its law, what drop-outs leave of it, and `dp-fedavg` with it."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fairveil.algorithms.dp_fedavg import DPFedAvg
from fairveil.config import make_config
from fairveil.contract import CLAUSES, check_algorithm, outcome
from fairveil.data.federation import ClientData, Records
from fairveil.engine.flower import _reply
from fairveil.errors import RunFault, UserError
from fairveil.models import ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.ledger import FEDERATION, Ledger
from fairveil.privacy.mechanisms import CohortSums, Part, Sharers, canonical, from_canonical
from fairveil.privacy.release import MINT, Reply, Share
from fairveil.remote import Envelope, Malformed
from fairveil.run import run_plan
from fairveil.session import Call, Facts, Job, Member, Session, Terms
from fairveil.streams import Stream
from fairveil.tasks import bounded_update

SPEC = ModelSpec("logistic", (2,), 2)  # 6 parameters
ROWS = Records(torch.randn(4, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1]))
MODEL = SPEC.build()


def member(client: int, mechanism: Any = None, request: str = "here", inputs: dict[str, Any] | None = None) -> Member:
    return Member(ClientData(ROWS, ROWS), MODEL, inputs or {}, mechanism, {}, (0, request, client), MINT)


def sums(rate: float, clients: int, tolerated: int, *parts: Part) -> CohortSums:
    return CohortSums(parts or (Part("update", (6,), 1.0, 1.0),), rate, Sharers(clients, tolerated))


def total(mechanism: CohortSums, values: list[dict[str, Tensor]], drop: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """The fixed-point sums of the shares of clients 0, 1, ..."""
    exact = mechanism.zero()
    for client, value in enumerate(values):
        if client not in drop:
            mechanism.add(exact, mechanism.share(value, member(client))[0])
    return exact


# ---- the law of the noise --------------------------------------------------------------------------


@pytest.mark.statistical
def test_the_sum_of_shares_has_the_law_that_is_priced() -> None:
    """N(sum of clipped, N/(N-t) (bound z)^2) for each part; of those that are left without t, (bound z)^2 exactly.

    Two parts, three sets of shares, a test of the law and one of the variance for each, at 5e-8: false alarm 6e-7.
    """
    parts = Part("a", (50_000,), 2.0, 1.5), Part("b", (50_000,), 0.5, 3.0)
    mechanism, std = sums(1.0, 7, 2, *parts), {"a": 3.0, "b": 1.5}
    long = {"a": torch.full((50_000,), 1.0), "b": torch.zeros(50_000)}  # "a" is clipped to 2 / sqrt 50,000 each
    for drop in ((), (0, 4), (5, 6)):
        noisy, diagnostics = mechanism.finish(total(mechanism, [long] * 7, drop), Stream("none"), len(drop))
        assert diagnostics == {}
        there = 7 - len(drop)
        for name, mean in (("a", there * 2 / math.sqrt(50_000)), ("b", 0.0)):
            found = (noisy[name].double().numpy() - mean) / (std[name] * math.sqrt(there / 5))
            assert stats.kstest(found, "norm").pvalue > 5e-8
            low, high = stats.chi2.ppf([2.5e-8, 1 - 2.5e-8], found.size)
            assert low < (found**2).sum() < high


@pytest.mark.parametrize(("clients", "tolerated"), [(1, 0), (2, 1), (7, 2), (1000, 999), (10**6, 1)])
def test_any_that_are_left_have_all_of_the_noise(clients: int, tolerated: int) -> None:
    """One share's noise, over that of its stream, is bound z / sqrt(N - t): N - t of their squares are (bound z)^2."""
    mechanism = sums(1.0, clients, tolerated, Part("a", (1000,), 3.0, 0.7))
    share, _ = mechanism.share({"a": torch.zeros(1000)}, member(0))
    unit = Stream(0, "here", 0, "mechanism").normal(1000)
    at = int(unit.abs().argmax())
    std = Fraction(float(share.value["a"][at])) / Fraction(float(unit[at]))
    assert float((clients - tolerated) * std**2 / (Fraction(3) * Fraction(0.7)) ** 2) == pytest.approx(1, abs=1e-8)
    assert torch.allclose(share.value["a"], float(std) * unit, atol=1e-9)


def test_no_two_clients_and_no_two_requests_have_the_same_noise() -> None:
    mechanism = sums(1.0, 5, 0)
    keys = [member(client, request=request) for client in range(5) for request in ("one", "two")]
    shares = [mechanism.share({"update": torch.zeros(6)}, key)[0].value["update"] for key in keys]
    assert all(not (a == b).any() for a, b in itertools.combinations(shares, 2))


def test_more_noise_than_planned_is_no_dearer() -> None:
    """The event is that of noise at the server, whoever may fail."""
    part = Part("update", (6,), 1.0, 1.3)
    for rate in (0.2, 1.0):
        events = [CohortSums((part,), rate, by).event for by in (None, Sharers(5, 0), Sharers(100, 99))]
        assert events[0] == events[1] == events[2]
    assert sums(0.2, 9, 3, part).event == PoissonSampledDpEvent(0.2, GaussianDpEvent(1.3))


# ---- who takes part --------------------------------------------------------------------------------


@pytest.mark.statistical
def test_each_client_tosses_its_own_coin() -> None:
    """At rate q, independently of the others and from one request to the next. False alarm below 1e-6."""
    mechanism = sums(0.3, 2000, 0)
    took = np.array([[mechanism.takes_part(member(c, request=r)) for c in range(2000)] for r in ("one", "two")])
    for many, chance in ((took[0].sum(), 0.3), (took[1].sum(), 0.3), (took.all(axis=0).sum(), 0.09)):
        low, high = stats.binom.ppf([1e-7, 1 - 1e-7], 2000, chance)
        assert low <= many <= high
    assert mechanism.asked == 1.0 and CohortSums(mechanism.parts, 0.3).asked == 0.3


def test_who_does_not_take_part_answers_like_any_other() -> None:
    """Noise on every coordinate, and nothing of what it was given."""
    mechanism = sums(0.5, 40, 0)
    values, nothing = {"update": torch.ones(6)}, {"update": torch.zeros(6)}
    took = [mechanism.takes_part(member(client)) for client in range(40)]
    assert 0 < sum(took) < 40
    looks = set()
    for client, there in enumerate(took):
        share, diagnostics = mechanism.share(values, member(client))
        same = torch.equal(share.value["update"], mechanism.share(nothing, member(client))[0].value["update"])
        assert same != there and share.value["update"].abs().min() > 0 and bool(diagnostics) == there
        steps = share.value["update"] * mechanism.scale(mechanism.parts[0])
        looks |= {(value.dtype, value.shape, value.is_contiguous()) for value in share.value.values()}
        assert torch.equal(steps, steps.round()) and share.mechanism is mechanism  # on one grid, all of them
    assert len(looks) == 1


def test_a_task_spares_the_training_of_those_who_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or in a block with others, everybody answers the same."""
    mechanism = sums(0.5, 12, 0)
    inputs = {"model": torch.zeros(6), "learning_rate": 0.1, "local_epochs": 1, "batch_size": 2}
    asked = [member(client, mechanism, inputs=inputs) for client in range(12)]
    trained: list[int] = []

    def steps(one: Member) -> Iterator[Tensor]:
        trained.append(int(one.key[2]))
        yield torch.tensor([0, 1])

    monkeypatch.setattr("fairveil.tasks._batches", steps)
    together = bounded_update(asked)
    assert trained == [c for c in range(12) if mechanism.takes_part(asked[c])] and 0 < len(trained) < 12
    for one, reply in zip(asked, together, strict=True):
        (alone,) = bounded_update([one])
        assert isinstance(reply.out, Share) and isinstance(alone.out, Share)
        assert torch.equal(reply.out.value["update"], alone.out.value["update"])


# ---- sensitivity and the fixed point ---------------------------------------------------------------

numbers = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, 0.0, 3e38])


@settings(deadline=None)
@given(
    many=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6),
    bound=st.sampled_from([1e-3, 0.3, 1.0, 50.0]), z=st.sampled_from([0.0, 1e-3, 1.0, 1e6]),
    rate=st.sampled_from([0.5, 1.0]),
)  # fmt: skip
def test_a_client_moves_the_sum_by_at_most_its_bound(
    many: list[list[float]], bound: float, z: float, rate: float
) -> None:
    """Exactly, with the same coins and the same noise: removed is who contributes zero. The noise is that of nobody's
    records, and stays."""
    part = Part("a", (3,), bound, z)
    mechanism = sums(rate, len(many), 0, part)
    values = [{"a": torch.tensor(value)} for value in many]
    whole = total(mechanism, values)
    for gone in range(len(many)):
        less = total(mechanism, [{"a": torch.zeros(3)} if k == gone else value for k, value in enumerate(values)])
        moved = (whole["a"] - less["a"]).tolist()
        limit = Fraction(bound) * Fraction(mechanism.scale(part))
        assert sum(Fraction(steps) ** 2 for steps in moved) <= limit**2
        assert mechanism.takes_part(member(gone)) or not any(moved)


@settings(deadline=None)
@given(
    clients=st.integers(1, 10**7), left=st.floats(0, 1, exclude_min=True), bound=st.floats(1e-9, 1e9),
    z=st.just(0.0) | st.floats(1e-6, 1e15), size=st.integers(1, 10**8),
)  # fmt: skip
def test_no_sum_of_shares_overflows(clients: int, left: float, bound: float, z: float, size: int) -> None:
    """The longest shares that are taken, all N of them the same way, in exact arithmetic."""
    tolerated = clients - max(1, math.ceil(clients * left))
    part = Part("a", (size,), bound, z)
    mechanism = sums(1.0, clients, tolerated, part)
    longest = Fraction(bound) + Fraction(10 * bound * z) * Fraction(math.sqrt(size / (clients - tolerated)))
    steps = longest * Fraction(mechanism.scale(part))
    assert steps < 2**53 * Fraction(1 + 1e-12) and clients * steps < 2**63  # whole numbers of float64, and of int64
    assert mechanism._share_std(part) * mechanism.scale(part) > 2**6 or z < 1e-3  # and the grid is far below the noise


@pytest.mark.statistical
@pytest.mark.parametrize("z", [1e-3, 1.0, 1e5, 1e12])
def test_noise_of_any_size_fits_the_fixed_point(z: float) -> None:
    """N(5, 5/2 z^2) on the sum of five aligned clients of whom three may fail. False alarm below 1e-6 each."""
    mechanism = sums(1.0, 5, 3, Part("a", (20_000,), 1.0, z))
    one = torch.full((20_000,), 20_000**-0.5, dtype=torch.float64)
    found = mechanism.value(total(mechanism, [{"a": one}] * 5))["a"].numpy()
    assert stats.kstest((found - 5 * 20_000**-0.5) / (z * math.sqrt(2.5)), "norm").pvalue > 1e-6


def test_without_a_clip_and_without_noise_it_is_the_plain_sum() -> None:
    mechanism = sums(0.5, 9, 4, Part("a", (2,), math.inf, 0.0))
    values = [{"a": torch.tensor([k + 0.5, -2.0])} for k in range(9)]
    took = [k for k in range(9) if mechanism.takes_part(member(k))]
    noisy, _ = mechanism.finish(total(mechanism, values), Stream(0), 0)
    assert noisy["a"].tolist() == [sum(k + 0.5 for k in took), -2.0 * len(took)] and 0 < len(took) < 9
    with pytest.raises(UserError, match="too large for an exact sum"):
        total(sums(1.0, 9, 4, *mechanism.parts), [{"a": torch.full((2,), 300.0)}])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e4])
def test_what_no_noise_can_be_is_not_added(wrong: float) -> None:
    mechanism = sums(1.0, 4, 1)
    share, _ = mechanism.share({"update": torch.zeros(6)}, member(0))
    share.value["update"][2] = wrong
    exact = mechanism.zero()
    with pytest.raises(TypeError, match="longer than its bound"):
        mechanism.add(exact, share)
    assert not exact["update"].any()


# ---- words and texts -------------------------------------------------------------------------------


def test_it_says_who_makes_the_noise() -> None:
    mechanism, server = sums(0.25, 10, 3), CohortSums(sums(0.25, 10, 3).parts, 0.25)
    assert mechanism.kind == f"{server.kind}, noised by 10 clients of whom 3 may fail"
    assert "each of 10 clients adds 1/7 of the noise variance" in mechanism.describe()
    assert "who takes part is hidden" in mechanism.describe() and "hidden" not in sums(1.0, 10, 3).describe()
    assert "noised by" not in server.kind + server.describe()


@pytest.mark.parametrize("wrong", [(0, 0), (5, 5), (5, -1), (5, 7)])
def test_sharers_that_make_no_sense_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Sharers(*wrong)


OLD = (
    '{"parts": [{"bound": "0x1.0000000000000p+0", "name": "update", "noise_multiplier": "0x1.8000000000000p+0", '
    '"shape": [6], "type": "fairveil.privacy.mechanisms.Part"}], "sample_rate": "0x1.0000000000000p-1", '
    '"type": "fairveil.privacy.mechanisms.CohortSums"}'
)  # as ledgers have it that were written before clients could make noise


def test_old_ledgers_are_read_and_written_as_they_were() -> None:
    server = CohortSums((Part("update", (6,), 1.0, 1.5),), 0.5)
    assert canonical(server) == OLD and from_canonical(OLD) == server


@pytest.mark.parametrize(
    "by",
    [
        None, 0, False, 7, "inf", [], {"type": "fairveil.privacy.mechanisms.Sharers", "clients": 5},
        {"type": "fairveil.privacy.mechanisms.Sharers", "clients": 5, "tolerated": 5},
        {"type": "fairveil.privacy.mechanisms.Sharers", "clients": 5.5, "tolerated": 1},
        json.loads(OLD)["parts"][0],
    ],
)  # fmt: skip
def test_nothing_else_makes_noise(by: Any) -> None:
    """A text from anywhere, such as a server's proposal: one mechanism has one text, and no other is taken."""
    assert from_canonical(json.dumps(json.loads(OLD) | {"noised_by": by}, sort_keys=True)) is None


# ---- the session -----------------------------------------------------------------------------------

INPUTS = {"model": torch.zeros(6), "learning_rate": 0.1, "local_epochs": 1, "batch_size": 2}


class Unreliable:
    """Runs a task here; some clients never answer."""

    def __init__(self, silent: tuple[int, ...], backwards: bool = False) -> None:
        self.silent, self.backwards, self.asked = silent, backwards, 0

    def run(self, job: Job) -> Iterator[tuple[int, Reply]]:
        self.asked = len(job.calls)
        for call in reversed(job.calls) if self.backwards else job.calls:
            if call.client not in self.silent:
                inputs = {**job.shared, **call.each}
                yield call.client, job.task([member(call.client, call.mechanism, job.request, inputs)])[0]


def session_of(engine: Unreliable, mechanism: CohortSums, seen: list[Any]) -> Session:
    facts = Facts(np.full(5, 4), np.zeros(5, int), (2,), 2, 6, 1.0)
    ledger = Ledger(sqlite3.connect(":memory:"))
    ledger.set_plan({FEDERATION: {mechanism: 1}})
    session = Session(
        facts, {FEDERATION: Terms(facts, None, 1.0)}, model=MODEL, engine=engine, ledger=ledger, seed=0, root="root",
        personal={}, observe=lambda *what: seen.append(what),
    )  # fmt: skip
    session.begin(1)
    return session


@pytest.mark.parametrize("silent", [(), (3,), (0, 4), (0, 1, 2), (0, 1, 2, 3, 4)])
def test_so_many_may_drop_out_and_no_more(silent: tuple[int, ...]) -> None:
    seen: list[Any] = []
    mechanism, engine = sums(0.5, 5, 2), Unreliable(silent)
    session = session_of(engine, mechanism, seen)
    cohort = session.cohort(mechanism.asked)
    if len(silent) <= 2:
        noisy = session.sum(bounded_update, cohort, mechanism, shared=INPUTS)
        assert noisy["update"].abs().min() > 0 and len(session._ledger.entries()) == 1
    else:
        with pytest.raises(RunFault, match=rf"{len(silent)} of 5 clients did not answer"):
            session.sum(bounded_update, cohort, mechanism, shared=INPUTS)
        assert session._ledger.entries() == [] and seen == []
    assert engine.asked == 5  # whoever takes part


def test_the_sum_does_not_depend_on_the_order_of_arrival() -> None:
    mechanism, found = sums(0.5, 5, 1), []
    for backwards in (False, True):
        session = session_of(Unreliable((2,), backwards), mechanism, [])
        found.append(session.sum(bounded_update, session.cohort(1.0), mechanism, shared=INPUTS)["update"])
    assert torch.equal(*found)


def test_noise_for_more_clients_than_there_are_is_refused() -> None:
    """Five would make five sixths of it. And nobody but the clients themselves draws who takes part."""
    mechanism = sums(0.5, 6, 0)
    session = session_of(Unreliable(()), mechanism, [])
    with pytest.raises(TypeError, match="5 clients cannot make the noise of 6"):
        session.sum(bounded_update, session.cohort(1.0), mechanism, shared=INPUTS)
    with pytest.raises(TypeError, match=r"drawn at 0\.5"):
        session.sum(bounded_update, session.cohort(0.5), mechanism, shared=INPUTS)
    assert session._ledger.entries() == []


def test_what_a_client_elsewhere_sends_is_looked_at() -> None:
    """A share that cannot be added is that client's fault, and not the end of the run."""
    mechanism = sums(0.5, 5, 1)
    call = Call(0, mechanism=mechanism)
    job = Job(bounded_update, "round 1, sum 2", INPUTS, [call])
    share, _ = mechanism.share({"update": torch.ones(6)}, member(0))
    reply = _reply(job, call, Envelope("share", dict(share.value)))
    assert isinstance(reply.out, Share) and torch.equal(reply.out.value["update"], share.value["update"])
    wrong: list[dict[str, Any]] = [
        {}, {"update": 1.0}, {"update": torch.zeros(5).double()}, {"update": torch.zeros(6)},
        {"update": torch.full((6,), math.nan).double()}, {"update": torch.full((6,), 1e3).double()},
        {**share.value, "more": torch.zeros(1).double()},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(Malformed):
            _reply(job, call, Envelope("share", values))


# ---- dp-fedavg -------------------------------------------------------------------------------------


class Shared(DPFedAvg):
    """`dp-fedavg` as the contract runs it, which gives no options."""

    noise: Literal["server", "distributed"] = "distributed"
    tolerated: int = 2
    sample_rate: float = 0.5


def test_the_contract_holds_with_distributed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, with other workers and blocks: bit for bit the same."""
    module = types.ModuleType("sharing")
    vars(module)["Shared"] = Shared
    monkeypatch.setitem(sys.modules, "sharing", module)
    results = check_algorithm("sharing:Shared")
    assert [result for result in results if not result.passed] == [] and len(results) == len(CLAUSES)


def final(values: dict[str, Any], runs: Path, **options: Any) -> Tensor:
    algorithm = {"name": "dp-fedavg", "rounds": 1, "batch_size": 10_000, "local_epochs": 2} | options
    folder = run_plan(make_plan(make_config(values | {"algorithm": algorithm})), runs=runs).folder
    return torch.as_tensor(outcome(folder).checkpoint.state["model"])


@pytest.mark.parametrize("clip", [0.05, math.inf])
def test_without_noise_it_is_the_mean_of_noise_at_the_server(small: dict[str, Any], runs: Path, clip: float) -> None:
    """Everybody takes part, and full batches leave nothing to chance: bit for bit the same."""
    values = small | {"privacy": {"noise_multiplier": 0.0, "clip_norm": clip, "delta": 1e-3}}
    one = final(values, runs, sample_rate=1.0, rounds=3)
    assert torch.equal(final(values, runs, sample_rate=1.0, rounds=3, noise="distributed", tolerated=3), one)


def test_the_sum_is_divided_by_the_expected_cohort(small: dict[str, Any], runs: Path) -> None:
    """At q = 0.6 of 5 clients the step is a third of the sum over those whose coin came up, however many."""
    values = small | {"privacy": {"noise_multiplier": 0.0, "clip_norm": math.inf, "delta": 1e-3}}
    config = make_config(values)
    federation, model = config.build_federation(), config.model_spec(config.build_federation()).build()
    start = model.initial(Stream(config.seed, "initial model"))
    updates = []
    for client in range(5):
        weights, train = start, federation.load(client).train
        for _ in range(2):
            weights = weights - 0.5 * model.gradient(weights, train.x, train.y)
        updates.append(weights - start)
    counts = set()
    for tolerated in range(4):  # each is a run of its own, with the same start
        moved = final(values, runs, sample_rate=0.6, noise="distributed", tolerated=tolerated) - start
        fits = [
            drawn for many in range(6) for drawn in itertools.combinations(range(5), many)
            if torch.allclose(sum((updates[k] for k in drawn), torch.zeros(650)) / 3, moved, atol=2e-6)
        ]  # fmt: skip
        assert len(fits) == 1
        counts.add(len(fits[0]))
    assert counts - {0, 3}  # or the test could not tell the two divisors apart


def test_the_price_is_that_of_noise_at_the_server(small: dict[str, Any]) -> None:
    plans = [
        make_plan(make_config(small | {"algorithm": {"name": "dp-fedavg", "rounds": 4, "sample_rate": 0.4} | options}))
        for options in ({}, {"noise": "distributed"}, {"noise": "distributed", "tolerated": 4})
    ]
    assert len({plan.price for plan in plans}) == 1
    assert len({plan.units[0].noise_multiplier for plan in plans}) == 1 and plans[0].units[0].noise_multiplier > 0
    assert len({canonical(m) for plan in plans for m in plan.releases[FEDERATION]}) == 3


@pytest.mark.parametrize(
    "options", [{"tolerated": 1}, {"noise": "distributed", "tolerated": 5}, {"noise": "distributed", "tolerated": 50}]
)
def test_tolerated_clients_that_make_no_sense(small: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"algorithm\.tolerated = \d+ makes no sense here") as error:
        make_plan(make_config(small | {"algorithm": {"name": "dp-fedavg", "rounds": 2} | options}))
    fix = {"noise": "distributed", "tolerated": min(options["tolerated"], 4)}
    assert f'algorithm.noise = "distributed" and algorithm.tolerated = {fix["tolerated"]}' in error.value.fix
    make_plan(make_config(small | {"algorithm": {"name": "dp-fedavg", "rounds": 2} | fix}))
