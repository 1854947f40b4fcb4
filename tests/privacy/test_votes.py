"""Votes: sensitivities by brute force on neighbours, answers by their exact law, prices in closed form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from dp_accounting import NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats
from scipy.special import log_ndtr, ndtr
from torch import Tensor

from fairveil.errors import RunFault
from fairveil.privacy.accounting import ORDERS, Adjacency, price, rdp_epsilon, smooth_rdp
from fairveil.privacy.consensus import SmoothedPrice
from fairveil.privacy.mechanisms import Client, Sharers, canonical, from_canonical
from fairveil.privacy.votes import UNANSWERED, NeighbourVotes, NoisyVotes, Protected, Several, within
from fairveil.streams import Stream

Floats = NDArray[np.float64]
ADJACENCIES: list[Adjacency] = ["add-remove", "replace"]
UNITS: list[Protected] = ["client", "record"]
ROOT_2 = math.sqrt(2)


def pate(queries: int = 4, classes: int = 3, noise: float = 1.0, **changed: Any) -> NoisyVotes:
    terms: dict[str, Any] = {"unit": "client", "adjacency": "add-remove", "answers": queries} | changed
    return NoisyVotes(queries=queries, classes=classes, noise_multiplier=noise, **terms)


def knn(queries: int = 4, classes: int = 3, noise: float = 1.0, k: int = 3, **changed: Any) -> NeighbourVotes:
    terms: dict[str, Any] = {"unit": "record", "adjacency": "add-remove", "answers": queries} | changed
    return NeighbourVotes(queries=queries, classes=classes, noise_multiplier=noise, neighbours=k, **terms)


def client(x: Tensor | None = None, y: Tensor | None = None, queries: Tensor | None = None, key: int = 0) -> Client:
    """What votes ask of a client; labels (n, C) where records have several classes."""
    features = () if x is None else tuple(x.shape[1:])
    found = SimpleNamespace(
        data=SimpleNamespace(train=SimpleNamespace(x=x, y=y)),
        model=SimpleNamespace(spec=SimpleNamespace(features=features)),
        inputs={"queries": queries},
        key=(key,),
        noise=lambda: Stream("noise of votes", key),
    )
    return cast(Client, found)


def summed(mechanism: NoisyVotes, voters: Iterable[tuple[dict[str, Tensor], Client]]) -> dict[str, Tensor]:
    """The fixed-point sums that are noised."""
    exact = mechanism.zero()
    for values, voter in voters:
        share, _ = mechanism.share(values, voter)
        mechanism.add(exact, share)
    return exact


def plain(mechanism: NoisyVotes, exact: dict[str, Tensor]) -> Floats:
    """Fixed-point sums (Q, C) in votes: the scale is what one vote of one client comes to."""
    return cast(Floats, (mechanism._sums.value(exact)["votes"] / mechanism.weight).numpy())


def of_votes(mechanism: NoisyVotes, *votes: Any) -> dict[str, Tensor]:
    given = [torch.as_tensor(np.asarray(rows, dtype=np.float64)) for rows in votes]
    return summed(mechanism, [({"votes": rows}, client(key=i)) for i, rows in enumerate(given)])


def hard(labels: Any, classes: int) -> Floats:
    return cast(Floats, np.eye(classes)[np.asarray(labels)])


def lengths(rows: Floats) -> Floats:
    return cast(Floats, np.sqrt((rows**2).sum(axis=-1)))


# ---- sensitivity: votes as clients say -------------------------------------------------------------


def wild(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Votes of every kind: corners, shares, far too large, negative, no numbers."""
    kind = random.integers(6, size=(*shape[:-1], 1))
    corners = hard(random.integers(shape[-1], size=shape[:-1]), shape[-1])
    others = random.choice([math.nan, math.inf, -math.inf, -1.0, 1e308, 0.0, 0.3, 1 / 3, 1.0, 7.0], size=shape)
    several = (random.uniform(size=shape) < 0.5).astype(np.float64)
    rows = np.where(kind == 0, corners, random.dirichlet(np.ones(shape[-1]), size=shape[:-1]))
    rows = np.where(kind == 2, others, rows)
    rows = np.where(kind == 3, 10 * random.uniform(size=shape), rows)
    rows = np.where(kind == 4, several, rows)
    return cast(Floats, np.where(kind == 5, corners * 1e30, rows))


@pytest.mark.parametrize(("classes", "tau"), [(2, None), (3, None), (10, None), (6, 1), (6, 2), (6, 5), (4, 4)])
def test_no_votes_are_longer_or_further_apart_than_is_priced(classes: int, tau: int | None) -> None:
    """One client alone, and every pair, measured where they are added up; corners attain all of it.

    By hand: sqrt tau and sqrt(min(2 tau, C)).
    """
    random, queries, several = np.random.default_rng(classes), 12, None if tau is None else Several(tau, 1.0)
    alone, most = pate(queries, classes, several=several), tau or 1
    replaced, record = replace(alone, adjacency="replace"), replace(alone, unit="record")
    assert alone.sensitivity == pytest.approx(math.sqrt(most), rel=1e-15)
    apart = math.sqrt(min(2 * most, classes))
    assert {m.sensitivity for m in (replaced, record, replace(record, adjacency="replace"))} == {apart}
    corners = np.zeros((queries, classes))
    corners[:, :most] = 1.0
    votes = [wild(random, (queries, classes)) for _ in range(60)] + [corners, corners[:, ::-1].copy(), 0 * corners]
    found = np.array([plain(alone, of_votes(alone, rows)) for rows in votes])
    assert (found >= 0).all() and (found <= 1).all() and (found.sum(axis=2) <= most).all()
    # Beside others nothing changes: the sums are exact.
    before = of_votes(alone, *votes[:5])
    together = plain(alone, of_votes(alone, *votes[:6])) - plain(alone, before)
    assert np.array_equal(together, found[5])
    sizes = lengths(found)
    assert sizes.max() <= alone.sensitivity and sizes.max() == pytest.approx(alone.sensitivity, rel=1e-9)
    distances = lengths(found[:, None] - found[None])
    assert distances.max() <= replaced.sensitivity * (1 + 1e-15)
    assert distances.max() == pytest.approx(replaced.sensitivity, rel=1e-9)


def test_what_is_no_vote_counts_as_written_down() -> None:
    """By hand."""
    rows = [[math.nan, -3.0, 0.5], [math.inf, 0.0, 0.0], [2.0, 2.0, 0.0], [0.2, 0.3, 0.4], [math.inf, 1.0, 0.5]]
    expected = [[0, 0, 0.5], [1, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.4], [0.4, 0.4, 0.2]]
    found = within(torch.tensor(rows), 1).numpy()
    assert found == pytest.approx(np.array(expected), abs=1e-7) and found.dtype == np.float64
    assert within(torch.tensor(rows), 2)[[1, 2, 4]].tolist() == [
        [1, 0, 0], [1, 1, 0], pytest.approx([0.8, 0.8, 0.4], rel=1e-11)
    ]  # fmt: skip
    whole = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(within(whole, 2), whole)  # what is within is left as it is, to the last bit


@pytest.mark.parametrize("classes", [2, 5])
def test_the_largest_vote_and_the_lead_move_as_far_as_they_say(classes: int) -> None:
    """Sums of a few clients, one added, removed or replaced; a record may do to its client's vote what replacing
    does."""
    random, queries = np.random.default_rng(classes), 400
    most: dict[str, list[float]] = {"count alone": [], "count": [], "gap alone": [], "gap": []}
    mechanism = pate(queries, classes)
    for _ in range(12):
        others = [wild(random, (queries, classes)) for _ in range(3)]
        others += [hard(random.integers(classes, size=queries), classes) for _ in range(4)]
        one, two = (hard(random.integers(classes, size=queries), classes) for _ in range(2))
        ranked = [np.sort(plain(mechanism, of_votes(mechanism, *others, *more)), axis=1) for more in ([], [one], [two])]
        tops, gaps = [rows[:, -1] for rows in ranked], [rows[:, -1] - rows[:, -2] for rows in ranked]
        for name, values in (("count", tops), ("gap", gaps)):
            most[f"{name} alone"].append(np.abs(values[1] - values[0]).max())
            most[name].append(np.abs(values[1] - values[2]).max())
    for unit, adjacency in itertools.product(UNITS, ADJACENCIES):
        here, alone = replace(mechanism, unit=unit, adjacency=adjacency), (unit, adjacency) == ("client", "add-remove")
        assert here.count_sensitivity == 1.0 and here.gap_step == (1.0 if alone else 2.0)
        assert max(most["count alone" if alone else "count"]) == pytest.approx(here.count_sensitivity, rel=1e-9)
        assert max(most["gap alone" if alone else "gap"]) == pytest.approx(here.gap_step, rel=1e-9)
        near = knn(queries, classes, k=4, unit=unit, adjacency=adjacency)
        assert near.count_sensitivity == here.count_sensitivity / (1 if unit == "client" else 4)
        assert near.gap_step == (here.gap_step if unit == "client" else 2 / 4)


# ---- sensitivity: votes of neighbours --------------------------------------------------------------


def near_votes(mechanism: NeighbourVotes, x: Tensor, y: Tensor, queries: Tensor) -> Floats:
    return plain(mechanism, summed(mechanism, [({}, client(x, y, queries))]))


def space(random: np.random.Generator, count: int) -> Tensor:
    """Points of a small grid, so that many are equally near or the same; a few that are no points at all."""
    x = random.integers(-2, 3, size=(count, 2)) * random.choice([1.0, 0.5, 1e-9])
    x[random.uniform(size=x.shape) < 0.03] = random.choice([math.nan, math.inf, 1e30])
    return torch.from_numpy(x.astype(np.float32))


def labels(random: np.random.Generator, count: int, classes: int, several: Several | None) -> Tensor:
    if several is None:
        return torch.from_numpy(random.integers(classes, size=count))
    rows = wild(random, (count, classes))
    rows[: count // 2] = random.uniform(size=(count // 2, classes)) < 0.5
    return torch.from_numpy(rows)


def one_record(x: Tensor, y: Tensor, extra: tuple[Tensor, Tensor]) -> Iterable[tuple[str, Tensor, Tensor]]:
    """All neighbours: one record gone, or in its place another (there, or at the end); one more, in any place."""
    for at in range(len(x) + 1):
        new_x, new_y = (torch.cat([rows[:at], more, rows[at:]]) for rows, more in ((x, extra[0]), (y, extra[1])))
        yield "add", new_x, new_y
        if at < len(x):
            keep = torch.arange(len(x)) != at
            yield "remove", x[keep], y[keep]
            yield "replace", torch.cat([x[keep], extra[0]]), torch.cat([y[keep], extra[1]])
            there_x, there_y = x.clone(), y.clone()
            there_x[at], there_y[at] = extra[0][0], extra[1][0]
            yield "replace", there_x, there_y


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("several", [None, Several(1, 1.0), Several(2, 1.0), Several(4, 1.0)], ids=str)
def test_one_record_exchanges_one_neighbour(k: int, several: Several | None) -> None:
    """Random small clients, with equal distances, duplicates and fewer than k records; by hand sqrt(min(2 tau, C))/k.

    The largest vote moves by 1/k, and the lead by 2/k at most. A client is within what a client is priced at.
    """
    random, classes, queries = np.random.default_rng(10 * k), 4, 6
    mechanism = knn(queries, classes, k=k, several=several)
    most = 1 if several is None else several.most
    assert mechanism.sensitivity == pytest.approx(math.sqrt(min(2 * most, classes)) / k, rel=1e-15)
    widest = top = lead = 0.0
    for count in (0, 1, 2, 3, 5, 8, 8):
        asked, x = space(random, queries), space(random, count)
        y, extra = (labels(random, n, classes, several) for n in (count, 1))
        before = near_votes(mechanism, x, y, asked)
        assert (before.sum(axis=1) <= most).all() and (lengths(before) <= math.sqrt(most) * (1 + 1e-12)).all()
        if several is None:
            assert before.sum(axis=1) * k == pytest.approx(min(k, count), rel=1e-12)
        for _, other_x, other_y in one_record(x, y, (space(random, 1), extra)):
            after = near_votes(mechanism, other_x, other_y, asked)
            widest = max(widest, lengths(after - before).max())
            # beside other clients, among whom one class is ahead: alone, a vote that turns leads as far as before
            ranked = [np.sort(rows + np.array([11.0, 10.0, 0.0, 0.0]), axis=1) for rows in (before, after)]
            top = max(top, np.abs(ranked[0][:, -1] - ranked[1][:, -1]).max())
            lead = max(lead, np.abs(np.diff(ranked[0])[:, -1] - np.diff(ranked[1])[:, -1]).max())
    assert widest <= mechanism.sensitivity * (1 + 1e-12)
    if several is None:
        assert widest == pytest.approx(mechanism.sensitivity, rel=1e-12)
        assert top <= mechanism.count_sensitivity + 1e-12 and lead <= mechanism.gap_step + 1e-12
        assert top == pytest.approx(1 / k, rel=1e-9) and lead == pytest.approx(2 / k, rel=1e-9)


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_the_worst_record_of_several_classes_attains_its_price(tau: int) -> None:
    """The nearest record turns from the first tau classes to tau of the others, of five: sqrt(min(2 tau, 5))/k."""
    k, mechanism = 3, knn(2, 5, k=3, several=Several(tau, 1.0))
    x, asked = torch.arange(4.0).view(4, 1), torch.zeros(2, 1)
    y = torch.zeros(4, 5)
    y[0, :tau] = 1.0
    other = y.clone()
    other[0, :tau], other[0, tau : 2 * tau] = 0.0, 1.0
    moved = near_votes(mechanism, x, other, asked) - near_votes(mechanism, x, y, asked)
    assert lengths(moved) == pytest.approx(math.sqrt(min(2 * tau, 5)) / k, rel=1e-12)


@pytest.mark.parametrize(("k", "queries"), [(3, 6), (3, 13), (5, 7), (7, 24), (10, 100)])
def test_counts_are_added_up_as_whole_numbers(k: int, queries: int) -> None:
    """A record moves the one query it is near to, and no other, even where all k of a client agree on every query.

    Fixed point holds whole counts exactly; a clipping of the whole share by a hair would move all of it at once.
    """
    mechanism = knn(queries, 2, k=k)
    asked = torch.arange(float(queries)).view(-1, 1)
    x, y = asked.repeat_interleave(k, 0), torch.zeros(k * queries, dtype=torch.int64)
    before = summed(mechanism, [({}, client(x, y, asked))])["votes"]
    y[0] = 1
    after = summed(mechanism, [({}, client(x, y, asked))])["votes"]
    moved = (after - before).abs().sum(dim=1)
    assert moved[0] > 0 and not moved[1:].any()
    assert before[:, 1].eq(0).all() and before[:, 0].eq(before[0, 0]).all() and before[0, 0] % k == 0


def test_votes_of_neighbours_take_none_from_outside() -> None:
    with pytest.raises(TypeError, match="counted by the mechanism itself"):
        knn().share({"votes": torch.ones(4, 3)}, client())


# ---- the law of the answer -------------------------------------------------------------------------


def exactly(mechanism: NoisyVotes, votes: Any) -> dict[str, Tensor]:
    """Fixed-point sums of so many votes (Q, C): whole ones of clients that each name one class."""
    one = plain(mechanism, of_one(mechanism))[0, 0]
    unit = int(of_one(mechanism)["votes"][0, 0])
    assert one == 1
    return {"votes": torch.from_numpy(np.round(np.asarray(votes) * unit).astype(np.int64))}


def of_one(mechanism: NoisyVotes) -> dict[str, Tensor]:
    """The sums of one client that votes for the first class every time."""
    if not isinstance(mechanism, NeighbourVotes):
        return of_votes(mechanism, hard(np.zeros(mechanism.queries, dtype=int), mechanism.classes))
    k, asked = mechanism.neighbours, torch.zeros(mechanism.queries, 1)
    y = torch.zeros(k, dtype=torch.int64)
    if mechanism.several is not None:
        y = torch.eye(mechanism.classes)[y]
    return summed(mechanism, [({}, client(torch.zeros(k, 1), y, asked))])


def likely(found: Tensor | NDArray[Any], chance: float, alarm: float) -> bool:
    """Exact binomial test, two-sided, of so many coins."""
    hits = np.asarray(found)
    return bool(stats.binomtest(int(hits.sum()), hits.size, chance).pvalue > alarm)


@pytest.mark.statistical
@pytest.mark.parametrize("gap", [-4.0, -0.5, 0.0, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("make", [pate, knn])
def test_of_two_classes_the_first_wins_by_the_normal_law(make: Any, gap: float) -> None:
    """P = Phi(gap/(sqrt 2 sigma)), 40,000 queries at once; false alarm 1e-5 each of twelve (fixed seed).

    Noise of a tenth more is told apart, so that the test has the power to fail.
    """
    queries, sigma = 40_000, 2.5
    mechanism = make(queries, 2, sigma, unit="client")
    votes = np.tile([5.0 + max(gap, 0.0), 5.0 - min(gap, 0.0)], (queries, 1))
    found, _ = mechanism.finish(exactly(mechanism, votes), Stream("two", int(10 * gap)), 0)
    assert found.keys() == {"labels"} and found["labels"].shape == (queries,)
    assert likely(found["labels"] == 0, ndtr(gap / (ROOT_2 * sigma)), 1e-5)
    if gap in (-4.0, 3.0, 8.0):
        assert not likely(found["labels"] == 0, ndtr(gap / (ROOT_2 * 1.1 * sigma)), 1e-5)


def chances(votes: Floats, std: float) -> Floats:
    """P(argmax_j n_j + N(0, std^2) = j): the integral over the noise of j, by the trapezium rule."""
    nodes = np.linspace(-12, 12, 4001)
    density = stats.norm.pdf(nodes) * (nodes[1] - nodes[0])
    others = ndtr(nodes + (votes[:, None, None] - votes[None, :, None]) / std)
    others[range(len(votes)), range(len(votes))] = 1.0
    return cast(Floats, others.prod(axis=1) @ density)


@pytest.mark.statistical
@pytest.mark.parametrize("make", [pate, knn])
def test_of_ten_classes_each_wins_by_its_integral(make: Any) -> None:
    """Chi-square on 60,000 queries; false alarm 1e-5 each of two (fixed seed)."""
    queries, sigma, votes = 60_000, 4.0, np.array([9.0, 2.0, 0.0, 6.0, 7.0, 1.0, 1.0, 3.0, 5.0, 0.0])
    mechanism, expected = make(queries, 10, sigma), chances(votes, sigma)
    assert expected.sum() == pytest.approx(1, rel=1e-9)
    found, _ = mechanism.finish(exactly(mechanism, np.tile(votes, (queries, 1))), Stream("ten"), 0)
    counts = np.bincount(found["labels"].numpy(), minlength=10)
    assert stats.chisquare(counts, queries * expected / expected.sum()).pvalue > 1e-5
    wrong = chances(votes, 1.05 * sigma)
    assert stats.chisquare(counts, queries * wrong / wrong.sum()).pvalue < 1e-5


@pytest.mark.parametrize("make", [pate, knn])
def test_without_noise_the_most_votes_win_and_ties_go_to_the_lowest_class(make: Any) -> None:
    mechanism = make(5, 3, 0.0)
    votes = [[2, 2, 2], [0, 3, 3], [1, 0, 4], [0, 0, 0], [5, 1, 5]]
    found, _ = mechanism.finish(exactly(mechanism, votes), Stream(1), 0)
    assert found["labels"].tolist() == [0, 1, 2, 0, 0]
    assert mechanism.event == NonPrivateDpEvent()


def noise_of(mechanism: NoisyVotes, stream: Stream, senders: int = 0) -> Floats:
    """What is added to sums of no votes, in votes."""
    exact = mechanism.zero()
    asked, none = torch.zeros(mechanism.queries, 1), torch.zeros(0, dtype=torch.int64)
    for number in range(senders):
        near = isinstance(mechanism, NeighbourVotes)
        values = {} if near else {"votes": torch.zeros(mechanism.queries, mechanism.classes)}
        share, _ = mechanism.share(values, client(torch.zeros(0, 1), none, asked, number))
        mechanism.add(exact, share)
    silent = mechanism.noised_by.clients - senders if mechanism.noised_by else 0
    noisy, _ = mechanism._sums.finish(exact, stream, silent)
    return cast(Floats, (noisy["votes"] / mechanism.weight).double().numpy().ravel())


def spread(values: Floats, std: float, alarm: float) -> bool:
    """Whether normal values have that standard deviation: chi-square, two-sided."""
    low, high = stats.chi2.ppf([alarm / 2, 1 - alarm / 2], values.size)
    return bool(low < (values**2).sum() / std**2 < high)


@pytest.mark.statistical
@pytest.mark.parametrize("several", [None, Several(3, 2.0)], ids=str)
@pytest.mark.parametrize("make", [pate, knn])
def test_the_noise_of_a_class_is_sigma_votes(make: Any, several: Several | None) -> None:
    """40,000 values; Kolmogorov-Smirnov and chi-square, false alarm 1e-5 each (fixed seed)."""
    found = noise_of(make(10_000, 4, 2.5, several=several), Stream("sigma"))
    assert stats.kstest(found / 2.5, "norm").pvalue > 1e-5 and spread(found, 2.5, 1e-5)


@pytest.mark.statistical
@pytest.mark.parametrize(("sharers", "senders"), [((6, 0), 6), ((6, 2), 6), ((6, 2), 5), ((6, 2), 4), ((1, 0), 1)])
@pytest.mark.parametrize("make", [pate, knn])
def test_clients_make_the_noise_together(make: Any, sharers: tuple[int, int], senders: int) -> None:
    """m of N send: variance m/(N - t) sigma^2, so N/(N - t) of it if all do, and sigma^2 with t missing; never less.

    40,000 values; false alarm 2e-5 each of ten (fixed seed).
    """
    mechanism = make(10_000, 4, 2.5, noised_by=Sharers(*sharers))
    found, std = noise_of(mechanism, Stream("nobody's"), senders), 2.5 * math.sqrt(senders / (sharers[0] - sharers[1]))
    assert std >= 2.5 * (1 - 1e-12)
    assert stats.kstest(found / std, "norm").pvalue > 1e-5 and spread(found, std, 1e-5)
    assert mechanism.event == make(10_000, 4, 2.5).event  # priced as what is always there


@pytest.mark.parametrize("several", [None, Several(2, 1.0)], ids=str)
def test_without_enough_noise_nothing_is_released(several: Several | None) -> None:
    mechanism = pate(noised_by=Sharers(5, 2), several=several)
    assert mechanism.finish(mechanism.zero(), Stream(1), 2)[0].keys() == {"labels"}
    with pytest.raises(RunFault, match="Nothing was released"):
        mechanism.finish(mechanism.zero(), Stream(1), 3)
    pate(several=several).finish(mechanism.zero(), Stream(1), 4)  # the server's noise misses nobody


@pytest.mark.statistical
def test_each_of_several_classes_is_an_answer_of_its_own() -> None:
    """P = Phi((n_c - needed)/sigma), 20,000 queries; false alarm 1e-5 each of ten (fixed seed).

    Classes are independent: a two by two table, false alarm 1e-5 each of two.
    """
    votes, needed, sigma = np.array([0.0, 4.0, 5.0, 6.0, 9.0]), 5.0, 3.0
    for make in (pate, knn):
        mechanism = make(20_000, 5, sigma, several=Several(2, needed))
        values, insight = mechanism.finish(exactly(mechanism, np.tile(votes, (20_000, 1))), Stream("several"), 0)
        found = values["labels"]
        assert values.keys() == {"labels"} and found.shape == (20_000, 5) and not insight
        assert set(found.unique().tolist()) == {0, 1}
        for number, count in enumerate(votes):
            assert likely(found[:, number], ndtr((count - needed) / sigma), 1e-5)
        table = np.histogram2d(found[:, 2], found[:, 3], bins=2)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-5


def test_several_classes_without_noise_need_more_than_is_needed() -> None:
    for make in (pate, knn):
        mechanism = make(2, 3, 0.0, several=Several(2, 2.0))
        found, _ = mechanism.finish(exactly(mechanism, [[2, 3, 0], [1, 2, 5]]), Stream(1), 0)
        assert found["labels"].tolist() == [[0, 1, 0], [0, 0, 1]]


# ---- confident answers -----------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("top", [4.0, 9.0, 10.0, 12.0])
@pytest.mark.parametrize("make", [pate, knn])
def test_a_query_is_answered_by_the_law_of_its_count(make: Any, top: float) -> None:
    """P = Phi((top - T)/threshold_noise); the winner's law is as ever, whether answered or not.

    40,000 queries; false alarm 1e-5, twice, each of eight (fixed seed).
    """
    queries, sigma, checked = 40_000, 2.0, 3.0
    mechanism = make(queries, 2, sigma, threshold=10.0, threshold_noise=checked)
    votes = np.tile([top, top - 2], (queries, 1))
    found, insight = mechanism.finish(exactly(mechanism, votes), Stream("sure", int(top)), 0)
    answered = found["labels"] != UNANSWERED
    assert likely(answered, ndtr((top - 10) / checked), 1e-5)
    assert likely(found["labels"][answered] == 0, ndtr(2 / (ROOT_2 * sigma)), 1e-5)
    assert insight["answered"] == answered.sum()
    if top in (4.0, 12.0):
        assert not likely(answered, ndtr((top - 10) / (1.1 * checked)), 1e-5)


def test_only_so_many_are_answered_and_they_are_the_first() -> None:
    """By hand, without noise; and with it, a smaller limit leaves the first of the same answers."""
    votes = [[9, 0], [3, 5], [0, 6], [5, 4], [0, 8], [7, 7]]
    mechanism = pate(6, 2, 0.0, answers=3, threshold=6.0)
    found, _ = mechanism.finish(exactly(mechanism, votes), Stream(1), 0)
    assert found["labels"].tolist() == [0, -1, 1, -1, 1, -1] and UNANSWERED == -1
    everything = replace(mechanism, answers=6).finish(exactly(mechanism, votes), Stream(1), 0)[0]["labels"]
    assert everything.tolist() == [0, -1, 1, -1, 1, 0]
    noisy = pate(500, 3, 2.0, threshold=5.0, threshold_noise=4.0)
    sums = exactly(noisy, np.random.default_rng(1).integers(9, size=(500, 3)))
    whole = noisy.finish(sums, Stream(2), 0)[0]["labels"]
    which = (whole != UNANSWERED).nonzero().flatten()
    for answers in (1, 7, 100):
        some = replace(noisy, answers=answers).finish(sums, Stream(2), 0)[0]["labels"]
        assert torch.equal((some != UNANSWERED).nonzero().flatten(), which[:answers])
        assert torch.equal(some[which[:answers]], whole[which[:answers]])


# ---- the price -------------------------------------------------------------------------------------


def analytic(shift: float, delta: float) -> float:
    """The epsilon of N(0, 1) against N(shift, 1): Balle and Wang (2018), Theorem 8, solved."""

    def excess(epsilon: float) -> float:
        less = math.exp(epsilon + log_ndtr(-shift / 2 - epsilon / shift))
        return float(ndtr(shift / 2 - epsilon / shift)) - less - delta

    return float(optimize.brentq(excess, 0, 200))


CHECKS = [  # of the specification: sigma, delta, epsilon of a client and of a record, Renyi and exact
    (25.0, 1e-3, (3.09, 4.72), (2.735, 4.208)),
    (25.0, 1e-5, (4.16, 6.21), (3.849, 5.759)),
    (30.0, 1e-3, (2.48, 3.77), (2.189, 3.350)),
]


@pytest.mark.parametrize(("sigma", "delta", "renyi", "exact"), CHECKS)
@pytest.mark.parametrize("unit", UNITS)
def test_five_hundred_answers_cost_what_the_specification_says(
    unit: Protected, sigma: float, delta: float, renyi: tuple[float, float], exact: tuple[float, float]
) -> None:
    """To half a percent. Renyi figures are by the conversion of Canonne, Kamath and Steinke (2020)."""
    event, which = pate(500, 10, sigma, unit=unit).event, UNITS.index(unit)
    assert price({event: 1}, delta, accountant="rdp").epsilon == pytest.approx(renyi[which], rel=5e-3)
    found = price({event: 1}, delta, accountant="pld").epsilon
    assert found == pytest.approx(exact[which], rel=5e-3)
    by_hand = analytic(math.sqrt(500) * (1, ROOT_2)[which] / sigma, delta)
    assert by_hand <= found <= by_hand * 1.002


FORMS = [  # what one unit moves the answers by, and the largest vote; by hand
    (pate, "client", "add-remove", 1.0, 1.0),
    (pate, "client", "replace", ROOT_2, 1.0),
    (pate, "record", "add-remove", ROOT_2, 1.0),
    (pate, "record", "replace", ROOT_2, 1.0),
    (knn, "client", "add-remove", 1.0, 1.0),
    (knn, "client", "replace", ROOT_2, 1.0),
    (knn, "record", "add-remove", ROOT_2 / 3, 1 / 3),
    (knn, "record", "replace", ROOT_2 / 3, 1 / 3),
]


@pytest.mark.parametrize(("make", "unit", "adjacency", "moved", "counted"), FORMS)
def test_every_form_is_priced_as_one_gaussian(
    make: Any, unit: Protected, adjacency: Adjacency, moved: float, counted: float
) -> None:
    """1/z^2 = A s^2/sigma^2 + Q s_c^2/sigma_c^2, against the analytic Gaussian mechanism; never below it.

    Rounds compose: two of them are one of twice the precision.
    """
    sigma, checked, delta = 25.0, 60.0, 1e-4
    for answers, threshold in ((400, None), (150, 100.0)):
        terms: dict[str, Any] = {"unit": unit, "adjacency": adjacency, "answers": answers}
        if threshold is not None:
            terms |= {"threshold": threshold, "threshold_noise": checked}
        precision = answers * moved**2 / sigma**2 + (400 * counted**2 / checked**2 if threshold else 0.0)
        event = make(400, 10, sigma, **terms).event
        for times in (1, 2):
            by_hand = analytic(math.sqrt(times * precision), delta)
            assert by_hand <= price({event: times}, delta, adjacency=adjacency).epsilon <= by_hand * 1.002


@pytest.mark.parametrize(
    ("tau", "alone", "apart"), [(1, 1.0, ROOT_2), (3, math.sqrt(3), math.sqrt(6)), (5, 5**0.5, 8**0.5)]
)
def test_several_classes_cost_more(tau: int, alone: float, apart: float) -> None:
    """Of eight classes, by hand; of k neighbours a k-th for a record."""
    several, delta = Several(tau, 9.0), 1e-3
    for mechanism, moved in (
        (pate(100, 8, 20.0, several=several), alone),
        (pate(100, 8, 20.0, several=several, adjacency="replace"), apart),
        (pate(100, 8, 20.0, several=several, unit="record"), apart),
        (knn(100, 8, 20.0, several=several, unit="client"), alone),
        (knn(100, 8, 20.0, several=several), apart / 3),
    ):
        found = price({mechanism.event: 1}, delta, adjacency=mechanism.adjacency).epsilon
        by_hand = analytic(10 * moved / 20, delta)
        assert by_hand <= found <= by_hand * 1.002


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_no_noise_is_no_guarantee(adjacency: Adjacency) -> None:
    silent = [
        pate(noise=0.0, adjacency=adjacency),
        pate(noise=3.0, adjacency=adjacency, threshold=2.0),
        pate(noise=0.0, adjacency=adjacency, threshold=2.0, threshold_noise=3.0),
        knn(noise=0.0, adjacency=adjacency, several=Several(1, 1.0)),
    ]
    for mechanism in silent:
        assert price({mechanism.event: 1}, 1e-3, adjacency=adjacency).epsilon == math.inf


def test_noise_beyond_all_proportion_has_a_price() -> None:
    assert price({pate(500, 10, 1e-200).event: 1}, 1e-3).epsilon == math.inf
    assert price({pate(500, 10, 1e300).event: 1}, 1e-3).epsilon == 0.0  # a shift of 1e-299: delta alone covers it


def test_a_published_cost_is_paid_for() -> None:
    """The Renyi curves add up at every order: a/2 * precision, and the smooth event's; then the best order, by hand."""
    published, delta = SmoothedPrice(), 1e-3
    with_cost = pate(500, 10, 25.0, cost=published)
    found = price({with_cost.event: 1}, delta)
    precision = 500 / 625
    least = math.inf
    for order in np.linspace(1.05, 15, 2000):
        rdp = order * precision / 2 + smooth_rdp(published.event, float(order))
        least = min(least, rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    assert least * (1 - 1e-4) <= found.epsilon <= least * 1.005 and found.accountant == "rdp"
    assert found.epsilon > price({replace(with_cost, cost=None).event: 1}, delta).epsilon


# ---- what comes out --------------------------------------------------------------------------------


def some_votes(queries: int = 50, clients: int = 40, agreed: float = 0.8) -> Floats:
    """Whole votes for five classes, of clients that agree more or less."""
    random = np.random.default_rng(5)
    return cast(Floats, random.multinomial(clients, [agreed, *[(1 - agreed) / 4] * 4], size=queries).astype(float))


@pytest.mark.parametrize("make", [pate, knn])
def test_only_labels_and_the_cost_come_out(make: Any) -> None:
    votes = some_votes()
    for terms, names in (
        ({}, {"labels"}),
        ({"threshold": 20.0, "threshold_noise": 9.0}, {"labels"}),
        ({"cost": SmoothedPrice()}, {"labels", "cost"}),
        ({"several": Several(2, 20.0)}, {"labels"}),
        ({"noised_by": Sharers(40, 3)}, {"labels"}),
    ):
        mechanism = make(50, 5, 4.0, **terms)
        values, insight = mechanism.finish(
            mechanism.zero() if "noised_by" in terms else exactly(mechanism, votes), Stream(3), 0
        )
        assert values.keys() == names and values["labels"].dtype == torch.int64
        assert "cost" not in values or (values["cost"].shape == (1,) and values["cost"].dtype == torch.float64)
        assert bool(insight) == ("several" not in terms and "noised_by" not in terms)


def test_a_share_shows_no_diagnostics_and_is_none_of_another_kind() -> None:
    mechanism = pate(2, 3)
    share, diagnostics = mechanism.share({"votes": torch.eye(3)[:2]}, client())
    assert share.mechanism == mechanism and diagnostics == {}
    with pytest.raises(TypeError, match="shape"):
        mechanism.share({"votes": torch.ones(3, 3)}, client())


@pytest.mark.parametrize(("unit", "make"), list(itertools.product(UNITS, [pate, knn])))
def test_the_price_of_these_data_is_no_more_than_that_of_all_and_falls_with_agreement(
    unit: Protected, make: Any
) -> None:
    """At every order, by hand a/2 * precision; next to nothing is left for the answers of clients that all agree."""
    for terms, share in (({}, 0.0), ({"threshold": 10.0, "threshold_noise": 12.0, "answers": 45}, 1.0)):
        mechanism = make(50, 5, 4.0, unit=unit, **terms)
        moved, counted = {  # by hand, as in FORMS
            (pate, "client"): (1.0, 1.0), (pate, "record"): (ROOT_2, 1.0),
            (knn, "client"): (1.0, 1.0), (knn, "record"): (ROOT_2 / 3, 1 / 3),
        }[make, unit]  # fmt: skip
        checks = share * 50 * counted**2 / 12**2
        always = np.array(ORDERS) / 2 * ((45 if share else 50) * moved**2 / 4**2 + checks)
        epsilons = []
        for agreed in (0.3, 0.6, 0.8, 0.95):
            _, insight = mechanism.finish(exactly(mechanism, some_votes(agreed=agreed)), Stream(4), 0)
            curve = np.array([insight[f"rdp@{order!r}"] for order in ORDERS])
            assert (curve <= always * (1 + 1e-9)).all() and (curve >= checks * np.array(ORDERS) / 2 * (1 - 1e-12)).all()
            epsilons.append(rdp_epsilon(curve, 1e-3))
        assert epsilons == sorted(epsilons, reverse=True) and (share or epsilons[-1] < 0.9 * epsilons[0])
        _, insight = mechanism.finish(exactly(mechanism, np.tile([500.0, 0, 0, 0, 0], (50, 1))), Stream(4), 0)
        for order in (order for order in ORDERS if order < 10):  # higher ones pay for what never happens
            assert insight[f"rdp@{order!r}"] == pytest.approx(order * checks / 2, rel=1e-12, abs=1e-12)
        assert insight["agreement"] == 500 and insight["won"] == 1.0


def test_with_a_threshold_whatever_could_be_answered_is_counted() -> None:
    """Two queries, one tied and one clear, and one answer: the tied one is paid for also if it is passed over."""
    mechanism = pate(2, 2, 1.0, answers=1, threshold=30.0, threshold_noise=1e-6)
    values, insight = mechanism.finish(exactly(mechanism, np.array([[20.0, 20.0], [40.0, 0.0]])), Stream(1), 0)
    assert values["labels"].tolist() == [-1, 0]
    assert insight["rdp@2.0"] == pytest.approx(2 * (1 / 2 + 2 / 1e-12 / 2), rel=1e-12)


def test_a_published_cost_counts_in_the_price_of_these_data() -> None:
    plain, published = pate(50, 5, 4.0), pate(50, 5, 4.0, cost=SmoothedPrice())
    found = [m.finish(exactly(m, some_votes()), Stream(4), 0)[1]["rdp@9.0"] for m in (plain, published)]
    assert found[1] - found[0] == pytest.approx(smooth_rdp(SmoothedPrice().event, 9.0), rel=1e-6)


# ---- forms -----------------------------------------------------------------------------------------


@st.composite
def mechanisms(draw: st.DrawFn) -> NoisyVotes:
    """Every form there is."""
    queries, classes = draw(st.integers(1, 10**6)), draw(st.integers(2, 1000))
    finite, positive = st.floats(0, 1e12), st.floats(1e-3, 1e12)
    terms: dict[str, Any] = {
        "queries": queries, "classes": classes, "noise_multiplier": draw(finite), "unit": draw(st.sampled_from(UNITS)),
        "adjacency": draw(st.sampled_from(ADJACENCIES)), "answers": queries,
    }  # fmt: skip
    form = draw(st.sampled_from(["plain", "threshold", "shared", "several", "several shared"]))
    if form == "threshold":
        terms |= {
            "answers": draw(st.integers(1, queries)),
            "threshold": draw(positive),
            "threshold_noise": draw(finite),
        }
    if "shared" in form:
        clients = draw(st.integers(1, 10**5))
        terms["noised_by"] = Sharers(clients, draw(st.integers(0, clients - 1)))
    if "several" in form:
        terms["several"] = Several(draw(st.integers(1, classes)), draw(finite))
    private = terms["noise_multiplier"] and terms["adjacency"] == "add-remove"
    if form == "plain" and private and draw(st.booleans()):
        order = draw(st.floats(1.1, 100))
        beta = draw(st.floats(1e-6, 0.99)) * -math.log1p(-1 / order) / 2
        terms["cost"] = SmoothedPrice(order, beta, draw(positive), draw(st.floats(1e-9, 0.49)))
    if draw(st.booleans()):
        return NoisyVotes(**terms)
    return NeighbourVotes(**terms, neighbours=draw(st.integers(1, 1000)), features=draw(st.text(max_size=8)))


@settings(max_examples=150, deadline=None)
@given(mechanisms())
def test_every_form_is_told_by_its_text(mechanism: NoisyVotes) -> None:
    text = canonical(mechanism)
    found = from_canonical(text)
    assert found == mechanism and type(found) is type(mechanism) and canonical(found) == text
    assert hash(found) == hash(mechanism) and found.describe() == mechanism.describe()


NONSENSE: list[dict[str, Any]] = [
    {"unit": "house"}, {"adjacency": "beside"}, {"answers": 0}, {"answers": 5}, {"answers": 3}, {"queries": 0},
    {"classes": 1}, {"noise_multiplier": -1.0}, {"noise_multiplier": math.inf}, {"noise_multiplier": math.nan},
    {"threshold": 0.0}, {"threshold": -1.0}, {"threshold": math.inf}, {"threshold": math.nan}, {"threshold_noise": 1.0},
    {"threshold_noise": math.nan}, {"threshold": 1.0, "threshold_noise": -1.0},
    {"threshold": 1.0, "threshold_noise": math.inf}, {"threshold": 1.0, "threshold_noise": math.nan},
    {"threshold": 1.0, "answers": 5}, {"noised_by": Sharers(3, 1), "threshold": 1.0},
    {"noised_by": Sharers(3, 1), "cost": SmoothedPrice()}, {"several": Several(4, 1.0)},
    {"threshold": 1.0, "threshold_noise": 1.0, "cost": SmoothedPrice()},
    {"adjacency": "replace", "cost": SmoothedPrice()}, {"noise_multiplier": 0.0, "cost": SmoothedPrice()},
    {"several": Several(1, 1.0), "threshold": 1.0}, {"several": Several(1, 1.0), "cost": SmoothedPrice()},
]  # fmt: skip


@pytest.mark.parametrize("changed", NONSENSE, ids=str)
def test_nonsense_is_refused(changed: dict[str, Any]) -> None:
    for make in (pate, knn):
        with pytest.raises(ValueError, match=r"makes no sense|go(es)? with neither"):
            replace(make(), **changed)


def test_nonsense_of_the_parts_is_refused() -> None:
    for most, needed in ((0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)):
        with pytest.raises(ValueError, match="makes no sense"):
            Several(most, needed)
    with pytest.raises(ValueError, match="0 neighbours"):
        knn(k=0)
