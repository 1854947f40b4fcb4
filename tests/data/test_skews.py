"""Skewed splits deal every row to one client, in the proportions they promise, or say why they cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fairveil.data import partition, skews
from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation, Pool, Records
from fairveil.data.partition import Iid, parse_split
from fairveil.data.skews import TRIES, Dirichlet, OneClass, PowerLaw, Shards, apportion
from fairveil.errors import UserError

TRAIN, TEST = [40, 25, 7, 31], [9, 5, 3, 6]
KINDS = ["dirichlet", "shards", "power-law", "one-class"]


def pool(train: list[int] = TRAIN, test: list[int] = TEST, classes: int | None = None) -> Pool:
    """`train[c]` and `test[c]` rows of class c, in no order, each with its number as its only feature."""

    def records(counts: list[int]) -> Records:
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
        y = torch.from_numpy(labels)
        return Records(torch.arange(float(len(y)))[:, None], y if classes != 0 else y.float())

    return Pool("numbered", records(train), records(test), len(train) if classes is None else classes, "one number")


def held_rows(federation: Federation, side: str = "train") -> list[list[int]]:
    """The row numbers of each client."""
    loaded = (getattr(federation.load(client), side) for client in range(federation.clients))
    return [records.x[:, 0].int().tolist() for records in loaded]


def labels_held(federation: Federation, side: str = "train") -> np.ndarray:
    """(clients, classes) how many records of each label each client holds."""
    loaded = (getattr(federation.load(client), side).y for client in range(federation.clients))
    return np.array([np.bincount(y, minlength=federation.classes) for y in loaded])


def cut(kind: str, data: Pool | Federation | None = None, seed: int = 0, **options: Any) -> Federation:
    return parse_split({"kind": kind, **options}).apply(pool() if data is None else data, seed)


counts = st.lists(st.integers(0, 30), min_size=2, max_size=6)
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=60)
@given(
    train=counts,
    test=counts,
    seed=seeds,
    options=st.one_of(
        st.fixed_dictionaries(
            {"clients": st.integers(1, 6), "alpha": st.floats(0.01, 100), "min_records": st.integers(1, 3)}
        ).map(lambda options: {"kind": "dirichlet", **options}),
        st.fixed_dictionaries({"clients": st.integers(1, 6), "shards_per_client": st.integers(1, 4)}).map(
            lambda options: {"kind": "shards", **options}
        ),
        st.fixed_dictionaries(
            {"clients": st.integers(1, 6), "exponent": st.floats(0.01, 9), "min_records": st.integers(1, 3)}
        ).map(lambda options: {"kind": "power-law", **options}),
        st.fixed_dictionaries({"clients_per_class": st.integers(1, 3)}).map(
            lambda options: {"kind": "one-class", **options}
        ),
    ),
)
def test_every_row_belongs_to_one_client_or_the_split_is_refused(
    train: list[int], test: list[int], seed: int, options: dict[str, Any]
) -> None:
    test = (test * 6)[: len(train)]
    try:
        federation = parse_split(options).apply(pool(train, test), seed)
    except UserError as error:
        assert "data.split." in error.what and "data.split" in error.fix
        return
    rows = held_rows(federation)
    assert sorted(row for client in rows for row in client) == list(range(sum(train)))
    assert [len(client) for client in rows] == federation.size.tolist()
    assert federation.size.min() >= options.get("min_records", 1) and federation.holders == 1
    assert federation.clients == options.get("clients", federation.clients)
    assert federation.record == "one number" and federation.features == (1,)
    tested = [row for client in held_rows(federation, "test") for row in client]
    if options["kind"] in ("dirichlet", "shards"):  # test = "own"
        assert 0 < len(tested) == len(set(tested)) <= sum(test)


@settings(deadline=None)
@given(total=st.integers(0, 10**6), weights=st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=1))
def test_apportionment(total: int, weights: list[float]) -> None:
    if sum(weights) == 0:
        weights = [*weights, 1.0]
    given = np.array(weights)
    shares = apportion(total, given)
    assert shares.sum() == total and shares.min() >= 0
    assert np.abs(shares - total * given / given.sum()).max() <= 1 + 1e-6
    assert shares[given == 0].sum() == 0
    order = np.argsort(given, kind="stable")
    later = given[order][1:] > given[order][:-1]
    assert (np.diff(shares[order])[later] >= 0).all()


def test_apportionment_by_hand() -> None:
    assert apportion(10, np.array([5.0, 3.0, 1.0])).tolist() == [6, 3, 1]  # 5.56, 3.33, 1.11: the first gains
    assert apportion(4, np.array([1.0, 1.0, 1.0])).tolist() == [2, 1, 1]
    assert apportion(0, np.zeros(2)).tolist() == [0, 0]


@pytest.mark.statistical
@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_shares_have_the_mean_and_variance_of_the_law(alpha: float) -> None:
    classes, each = 400, 500
    federation = cut("dirichlet", pool([each] * classes, [1] * classes), alpha=alpha, clients=4, min_records=1)
    shares = labels_held(federation) / each
    # A share is Beta(alpha, 3 alpha); nobody is ever left with nothing of 200,000 rows, so nothing was redrawn.
    law = stats.beta(alpha, 3 * alpha)
    variance, kurtosis = law.var(), float(law.stats("k"))
    assert abs(law.mean() - 1 / 4) < 1e-9 and abs(variance - 3 / 16 / (4 * alpha + 1)) < 1e-9
    # 8 figures at five standard errors, and rounding by less than one row: false alarm below 1e-4.
    assert np.abs(shares.mean(axis=1) - 1 / 4).max() < 5 * np.sqrt(variance / classes) + 1 / each
    spread = np.abs(((shares - 1 / 4) ** 2).mean(axis=1) - variance).max()
    assert spread < 5 * variance * np.sqrt((kurtosis + 2) / classes) + 2 / each


def test_dirichlet_at_both_ends() -> None:
    even = labels_held(cut("dirichlet", pool([40, 80], [5, 5]), alpha=1e6, clients=4))
    assert np.abs(even - [10, 20]).max() <= 1
    pure = labels_held(cut("dirichlet", pool([20] * 8, [5] * 8), alpha=1e-6, clients=3, min_records=1))
    assert (np.count_nonzero(pure, axis=0) == 1).all()  # each class with one client
    assert cut("dirichlet", clients=1).size.tolist() == [sum(TRAIN)]


def test_dirichlet_draws_again_until_nobody_has_too_few() -> None:
    smallest = [cut("dirichlet", seed=seed, clients=6, alpha=0.2, min_records=1).size.min() for seed in range(20)]
    assert min(smallest) < 8
    for seed in range(20):
        assert cut("dirichlet", seed=seed, clients=6, alpha=0.2, min_records=8).size.min() >= 8


def test_own_test_rows_follow_the_training_rows() -> None:
    federation = cut("dirichlet", pool([300, 200, 100], [50, 40, 30]), clients=5, alpha=0.3)
    train, test = labels_held(federation), labels_held(federation, "test")
    assert test.sum(axis=0).tolist() == [50, 40, 30]  # all of them are dealt out
    assert np.abs(test - train / train.sum(axis=0) * [50, 40, 30]).max() < 1
    assert (test[train == 0] == 0).all()


def test_a_client_may_have_no_test_rows_of_its_own() -> None:
    federation = cut("dirichlet", pool([50, 50], [2, 1]), clients=8, alpha=1.0, min_records=1)
    assert sorted(len(client) for client in held_rows(federation, "test")) == [0] * 5 + [1] * 3
    # What nobody trains on is no test of anybody.
    federation = cut("shards", pool([9, 0], [2, 5]), clients=3)
    assert labels_held(federation, "test").sum(axis=0).tolist() == [2, 0]


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_a_common_test_set_is_the_whole_of_it(kind: str) -> None:
    data = pool()
    federation = cut(kind, data, clients=3, test="common")
    assert all(torch.equal(federation.load(client).test.x, data.test.x) for client in range(3))
    # The test rows change nothing in who trains on what.
    assert held_rows(federation) == held_rows(cut(kind, data, clients=3))


def test_shards_that_fit_the_classes_hold_one_label_each() -> None:
    federation = cut("shards", pool([20] * 10, [3] * 10), clients=10)
    held = labels_held(federation)
    assert federation.size.tolist() == [20] * 10
    assert np.isin(held, [0, 10, 20]).all() and (np.count_nonzero(held, axis=1) <= 2).all()


@settings(deadline=None, max_examples=40)
@given(clients=st.integers(1, 10), each=st.integers(1, 3), seed=seeds)
def test_a_shard_holds_one_label_unless_it_straddles_two(clients: int, each: int, seed: int) -> None:
    train = [40, 31, 35, 33]
    federation = cut("shards", pool(train, TEST), seed, clients=clients, shards_per_client=each)
    held = np.count_nonzero(labels_held(federation), axis=1)
    assert federation.size.max() - federation.size.min() <= each
    # Labels change three times along the sorted rows: so often can a shard hold one label more.
    assert held.max() <= each + 3 and held.sum() <= clients * each + 3
    if clients * each >= 5:  # a shard is then no longer than the shortest label, so it straddles two at most
        assert held.max() <= 2 * each


def test_power_law_sizes() -> None:
    # 1 + 1/2 + 1/3 + 1/4 = 25/12: of 50 records 24, 12, 8 and 6, and 2 more for each.
    assert PowerLaw(clients=4, exponent=1.0, min_records=2).sizes(58).tolist() == [26, 14, 10, 8]
    assert PowerLaw(clients=3, exponent=1e300, min_records=2).sizes(9).tolist() == [5, 2, 2]
    assert PowerLaw(clients=1).sizes(10).tolist() == [10]


@given(clients=st.integers(1, 50), exponent=st.floats(1e-3, 50), fewest=st.integers(1, 20), more=st.integers(0, 9_999))
def test_power_law_sizes_fall_with_rank_and_add_up(clients: int, exponent: float, fewest: int, more: int) -> None:
    rows = clients * fewest + more
    sizes = PowerLaw(clients=clients, exponent=exponent, min_records=fewest).sizes(rows)
    assert sizes.sum() == rows and sizes.min() >= fewest and (np.diff(sizes) <= 0).all()


def test_power_law_draws_who_is_large_and_tests_all_alike() -> None:
    data = pool()
    split = PowerLaw(clients=5)
    cuts = [split.apply(data, seed) for seed in range(60)]
    for federation in cuts:
        assert sorted(federation.size, reverse=True) == split.sizes(sum(TRAIN)).tolist()
        assert all(torch.equal(federation.load(client).test.x, data.test.x) for client in range(5))
    assert {int(federation.size.argmax()) for federation in cuts} == {0, 1, 2, 3, 4}  # 5 * 0.8^60 < 1e-5


def test_power_law_cuts_a_regression_pool() -> None:
    federation = cut("power-law", pool(classes=0), clients=3)
    assert federation.classes == 0 and federation.size.sum() == sum(TRAIN)


@pytest.mark.parametrize("each", [1, 3, 7])
def test_one_class_is_pure_in_training_and_test(each: int) -> None:
    federation = cut("one-class", clients_per_class=each)
    assert federation.groups == ("class 0", "class 1", "class 2", "class 3")
    assert federation.group.tolist() == np.repeat(range(4), each).tolist()
    assert federation.common_tests == (each > 1)
    for client, group in enumerate(federation.group):
        data = federation.load(client)
        assert (data.train.y == group).all() and (data.test.y == group).all()
        assert len(data.test) == TEST[group]  # all that there are
        assert abs(len(data.train) - TRAIN[group] / each) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_equal_seeds_give_equal_splits(kind: str) -> None:
    options = {} if kind == "one-class" else {"clients": 4}
    first, same, other = (cut(kind, seed=seed, **(options or {"clients_per_class": 2})) for seed in (1, 1, 2))
    assert held_rows(first) == held_rows(same) != held_rows(other)
    assert first.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_each_cuts_a_dataset_by_name(kind: str) -> None:
    first, same, other = (build_federation("digits", {}, {"kind": kind}, seed) for seed in (1, 1, 2))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.clients == 10 and first.size.sum() == 1_438 and first.record == "one image"
    assert first.groups == (tuple(f"class {digit}" for digit in range(10)) if kind == "one-class" else ("all",))


@pytest.mark.parametrize("kind", ["dirichlet", "shards", "power-law"])
def test_one_client_holds_everything(kind: str) -> None:
    federation = cut(kind, clients=1)
    assert sorted(held_rows(federation)[0]) == list(range(sum(TRAIN)))
    assert len(held_rows(federation, "test")[0]) == sum(TEST)


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever draws before all is checked fails."""

    def drawn(*key: Any) -> None:
        raise AssertionError(f"drawn from {key}")

    for module in (skews, partition):
        monkeypatch.setattr(module, "Stream", drawn)


@pytest.mark.usefixtures("uncut")
@pytest.mark.parametrize(
    ("split", "data", "what", "why", "fix"),
    [
        (
            {"kind": kind, "clients": 11, key: 10},
            pool(),
            f"data.split.clients = 11 with data.split.{key} = 10 needs 110 records.",
            "numbered has 103 training records",
            f"data.split.{key} = 9",
        )
        for kind, key in [
            ("dirichlet", "min_records"),
            ("shards", "shards_per_client"),
            ("power-law", "min_records"),
        ]
    ]
    + [
        (
            {"kind": "power-law", "clients": 104, "min_records": 1},
            pool(),
            "data.split.clients = 104 with data.split.min_records = 1 needs 104 records.",
            "103 training records",
            "data.split.clients = 103, data.split.min_records = 1",
        ),
        (
            {"kind": "one-class", "clients_per_class": 8},
            pool(),
            "data.split.clients_per_class = 8 is too many.",
            "Class 2 of numbered has 7 training records",
            "data.split.clients_per_class = 7",
        ),
        (
            {"kind": "one-class"},
            pool([3, 0, 4], [1, 1, 1]),
            'data.split.kind = "one-class" does not fit numbered.',
            "Class 1 has no training records",
            "dirichlet",
        ),
        (
            {"kind": "one-class"},
            pool([3, 3, 4], [1, 1, 0]),
            'data.split.kind = "one-class" does not fit numbered.',
            "Class 2 has no test records",
            "dirichlet",
        ),
    ]
    + [
        (
            {"kind": kind, "clients": 3},
            data,
            'data.split.test = "own" leaves every client without test records.',
            why,
            'data.split.test = "common"',
        )
        for kind in ("dirichlet", "shards")
        for data, why in [
            (pool([50, 50, 0], [0, 0, 4]), "None of the 4 test records"),
            (pool([50, 50], [0, 0]), "None of the 0 test records"),
        ]
    ]
    + [
        (
            {"kind": kind},
            pool(classes=0),
            f'data.split.kind = "{kind}" does not fit numbered.',
            "regression",
            'kind = "iid"',
        )
        for kind in ("dirichlet", "shards", "one-class")
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_drawn(
    split: dict[str, Any], data: Pool, what: str, why: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        parse_split(split).apply(data, 0)
    assert error.value.what == what and why in error.value.why and fix in error.value.fix


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_an_owner_is_not_cut_again(kind: str) -> None:
    owned = Iid(clients=3).apply(pool(), 0)
    with pytest.raises(UserError) as error:
        cut(kind, owned)
    assert error.value.what == f'data.split.kind = "{kind}" does not fit numbered.'
    assert "already belongs to a client" in error.value.why and '"natural"' in error.value.fix


def test_an_improbable_minimum_says_how_near_the_draws_came() -> None:
    options: dict[str, Any] = {"clients": 10, "alpha": 0.5, "test": "common"}
    with pytest.raises(UserError) as error:
        cut("dirichlet", min_records=10, **options)
    best = int(error.value.fix.rpartition(" ")[2])
    assert error.value.what == (
        "data.split.alpha = 0.5 leaves some client with fewer than data.split.min_records = 10 records."
    )
    assert f"best of {TRIES} tries the smallest of 10 clients got {best}." in error.value.why
    assert error.value.fix.startswith("data.split.alpha = 5, or fewer data.split.clients")
    assert cut("dirichlet", min_records=best, **options).size.min() == best  # what it says to type works
    with pytest.raises(UserError) as error:  # two classes, each with one client: the third has none, ever
        cut("dirichlet", pool([50, 50], [5, 5]), clients=3, alpha=1e-6, min_records=1)
    assert "clients got 0." in error.value.why and "min_records" not in error.value.fix


@pytest.mark.parametrize(
    ("split", "what"),
    [
        ({"kind": "dirichlet", "alpha": 0}, "data.split.alpha = 0"),
        ({"kind": "dirichlet", "alpha": 1e308}, "data.split.alpha = 1e+308"),
        ({"kind": "dirichlet", "min_records": 0}, "data.split.min_records = 0"),
        ({"kind": "dirichlet", "test": "mine"}, 'data.split.test = "mine"'),
        ({"kind": "shards", "shards_per_client": 0}, "data.split.shards_per_client = 0"),
        ({"kind": "power-law", "exponent": -1}, "data.split.exponent = -1"),
        ({"kind": "power-law", "test": "own"}, 'data.split.test = "own" is not a known key.'),
        ({"kind": "one-class", "clients": 3}, "data.split.clients = 3 is not a known key."),
        ({"kind": "dirichlett"}, 'data.split.kind = "dirichlett" is not known.'),
    ],
)
def test_what_is_wrong_in_itself(split: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError) as error:
        parse_split(split)
    assert error.value.what.startswith(what)


def test_defaults() -> None:
    assert parse_split({"kind": "dirichlet"}) == Dirichlet(alpha=0.5, clients=10, min_records=10, test="own")
    assert parse_split({"kind": "shards"}) == Shards(clients=10, shards_per_client=2, test="own")
    assert parse_split({"kind": "power-law"}) == PowerLaw(clients=10, exponent=1.0, min_records=10)
    assert parse_split({"kind": "one-class"}) == OneClass(clients_per_class=1)


def several(shape: tuple[int, ...] = (1,)) -> Pool:
    """120 and 30 rows that may have several of 3 classes at once."""
    train, test = (
        Records(torch.arange(float(n)).view(-1, *[1] * len(shape)).expand(-1, *shape).clone(), torch.randint(2, (n, 3)))
        for n in (120, 30)
    )
    return Pool("several", train, test, 3)


@pytest.mark.parametrize("kind", ["dirichlet", "shards", "one-class", "label-flip"])
def test_splits_by_label_need_one_label_for_each_record(kind: str) -> None:
    with pytest.raises(UserError, match=r"(?s)does not fit several.*several classes at once") as error:
        cut(kind, several())
    assert "iid" in error.value.fix


@pytest.mark.parametrize("kind", ["iid", "power-law", "rotate"])
def test_other_splits_take_records_of_several_classes(kind: str) -> None:
    options: dict[str, Any] = {"degrees": [0, 90], "clients": [2, 3]} if kind == "rotate" else {"clients": 5}
    given = several((1, 4, 4))
    found = cut(kind, given, **options)
    assert found.several and found.classes == 3 and found.size.sum() == 120
    parts = [found.load(client) for client in range(5)]
    rows = torch.cat([part.train.x[:, 0, 0, 0] for part in parts]).long()
    assert torch.equal(torch.cat([part.train.y for part in parts]), given.train.y[rows])
    assert all(torch.equal(part.test.y, given.test.y) for part in parts)
