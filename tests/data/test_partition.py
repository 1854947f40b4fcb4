"""Splits give every row to one client, or say how many hold it, under the right shift; or say why they cannot."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fairveil.data import partition
from fairveil.data.datasets import build_federation
from fairveil.data.federation import ClientData, Federation, Pool, Records
from fairveil.data.partition import SPLITS, AnySplit, Iid, LabelFlip, Natural, Rotate, Shares, held_out, parse_split
from fairveil.errors import UserError

ROWS = 23


def pool(rows: int = ROWS, features: tuple[int, ...] = (1, 2, 2), classes: int = 3) -> Pool:
    """Rows that carry their number in every feature, and the position as decimals, so that turns show."""
    number = torch.arange(float(rows)).reshape(-1, *[1] * len(features))
    position = torch.arange(float(np.prod(features))).reshape(features) / 100
    x = number + position
    y = torch.arange(rows) % classes if classes else torch.arange(float(rows))
    test = Records(-x[:5] - 1, y[:5])
    return Pool("numbered", Records(x, y), test, classes)


def held_rows(federation: Federation) -> list[list[int]]:
    """The row numbers of each client; the whole part of any pixel is the row's number."""
    loaded = (federation.load(client).train.x for client in range(federation.clients))
    return [x.flatten(1)[:, 0].floor().int().tolist() for x in loaded]


def equal(a: ClientData, b: ClientData) -> bool:
    pairs = [(a.train.x, b.train.x), (a.train.y, b.train.y), (a.test.x, b.test.x), (a.test.y, b.test.y)]
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize(
    "split",
    [
        Iid(clients=4),
        Iid(clients=1),
        Iid(clients=ROWS),
        Rotate(degrees=(0, 90, 180), clients=(2, 4, 4)),
        LabelFlip(offsets=(0, 1), clients=(1, 6)),
    ],
    ids=str,
)
def test_shares_are_disjoint_equal_and_cover_the_pool(split: Any) -> None:
    federation = split.apply(pool(), seed=0)
    rows = held_rows(federation)
    assert sorted(row for client in rows for row in client) == list(range(ROWS))
    assert [len(client) for client in rows] == federation.size.tolist()
    assert federation.size.max() - federation.size.min() <= 1
    assert federation.name == "numbered" and federation.features == (1, 2, 2) and federation.classes == 3


@settings(deadline=None)
@given(clients=st.integers(1, ROWS), seed=st.integers(0, 2**32), data=st.data())
def test_shares_of_a_given_size_are_disjoint(clients: int, seed: int, data: st.DataObject) -> None:
    records = data.draw(st.integers(1, ROWS // clients))
    federation = Iid(clients=clients, records=records).apply(pool(), seed)
    dealt = [row for client in held_rows(federation) for row in client]
    assert federation.size.tolist() == [records] * clients and federation.holders == 1
    assert len(dealt) == len(set(dealt)) and set(dealt) <= set(range(ROWS))


@pytest.mark.parametrize(
    "split",
    [
        Iid(clients=8, records=5, overlap=True),
        Iid(clients=1, records=ROWS, overlap=True),
        Iid(clients=2, records=1, overlap=True),  # hardly ever the same row
        Iid(clients=50, records=3, overlap=True),  # more clients than rows
        Rotate(degrees=(0, 90), clients=(3, 4), records=9, overlap=True),
        LabelFlip(offsets=(0, 1), clients=(2, 2), records=ROWS, overlap=True),
    ],
    ids=str,
)
def test_holders_is_the_most_clients_that_hold_one_row(split: Any) -> None:
    seen = set()
    for seed in range(10):
        federation = split.apply(pool(), seed)
        rows = held_rows(federation)
        assert all(len(client) == len(set(client)) == split.records for client in rows)  # none twice
        assert federation.holders == max(sum(row in client for client in rows) for row in range(ROWS))
        seen.add(federation.fingerprint)
    assert len(seen) == 10
    assert split.apply(pool(), 3).fingerprint in seen


def test_the_draw_knows_nothing_of_the_records() -> None:
    data = pool()
    other = Pool("numbered", Records(torch.zeros(ROWS, 5), torch.zeros(ROWS)), Records(data.test.x, data.test.y), 0)
    split = Iid(clients=6, records=7, overlap=True)
    ours, theirs = (split.apply(rows, seed=5) for rows in (data, other))
    assert ours.holders == theirs.holders
    assert ours.source.share.rows.tolist() == theirs.source.share.rows.tolist()  # type: ignore[attr-defined]


def test_a_client_draws_by_itself() -> None:
    few, many = (held_rows(Iid(clients=n, records=7, overlap=True).apply(pool(), seed=5)) for n in (3, 9))
    assert many[:3] == few  # whoever else there is


def test_overlap_crosses_groups_and_each_holder_shifts_its_own_copy() -> None:
    data = pool()
    federation = LabelFlip(offsets=(0, 1), clients=(1, 1), records=ROWS, overlap=True).apply(data, seed=0)
    assert federation.holders == 2
    for client, offset in enumerate((0, 1)):
        train = federation.load(client).train
        rows = train.x[:, 0, 0, 0].floor().long()
        assert sorted(rows.tolist()) == list(range(ROWS))
        assert torch.equal(train.y, (data.train.y[rows] + offset) % 3)


@pytest.mark.statistical
def test_overlapping_clients_draw_uniformly_and_independently() -> None:
    clients, rows, records = 2_000, 50, 10
    federation = Iid(clients=clients, records=records, overlap=True).apply(pool(rows), seed=0)
    held = np.zeros((clients, rows))
    for client, numbers in enumerate(held_rows(federation)):
        held[client, numbers] = 1
    # 50 rates at five standard errors, and one more: false alarm below 1e-4.
    assert np.abs(held.mean(axis=0) - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / clients)
    # What two clients share is hypergeometric: mean 10 * 10/50 = 2, variance 2 * 0.8 * 40/49.
    common = (held[::2] * held[1::2]).sum(axis=1)
    assert abs(common.mean() - 2) < 5 * np.sqrt(1.6 * 40 / 49 / (clients / 2))


def test_iid_is_one_group() -> None:
    federation = Iid(clients=4).apply(pool(), seed=0)
    assert federation.groups == ("all",) and federation.group.tolist() == [0, 0, 0, 0]
    assert federation.size.tolist() == [6, 6, 6, 5]  # 23 = 6 + 6 + 6 + 5


def test_rotation_turns_train_and_test_of_its_group_only() -> None:
    data = pool()
    federation = Rotate(degrees=(0, 90, -90.5), clients=(1, 2, 1)).apply(data, seed=3)
    assert federation.groups == ("0°", "90°", "-90.5°")
    assert federation.group.tolist() == [0, 1, 1, 2]
    plain, turned = federation.load(0), federation.load(1)
    rows = plain.train.x[:, 0, 0, 0].floor()
    assert torch.equal(plain.train.x, data.train.x[rows.long()])
    assert torch.equal(plain.train.y, data.train.y[rows.long()])
    rows = turned.train.x[:, 0, 0, 0].floor().long()
    assert torch.equal(turned.train.x, data.train.x[rows].rot90(1, (2, 3)))
    assert torch.equal(turned.train.y, data.train.y[rows])
    assert torch.equal(plain.test.x, data.test.x)
    assert torch.equal(turned.test.x, data.test.x.rot90(1, (2, 3)))
    assert torch.equal(turned.test.y, data.test.y)


def test_clients_of_a_group_share_one_test_set() -> None:
    federation = Rotate(degrees=(0, 90), clients=(1, 2)).apply(pool(), seed=0)
    assert federation.load(1).test is federation.load(2).test
    assert federation.load(0).test is not federation.load(1).test


def test_label_flip_moves_the_labels_of_train_and_test() -> None:
    data = pool()
    federation = LabelFlip(offsets=(0, 1, -1), clients=(1, 1, 1)).apply(data, seed=0)
    assert federation.groups == ("labels +0", "labels +1", "labels -1")
    for client, offset in enumerate((0, 1, 2)):
        loaded = federation.load(client)
        rows = loaded.train.x[:, 0, 0, 0].floor().long()
        assert torch.equal(loaded.train.y, (rows % 3 + offset) % 3)
        assert torch.equal(loaded.test.y, (data.test.y + offset) % 3)
        assert torch.equal(loaded.test.x, data.test.x)


def test_seeds_and_fingerprints() -> None:
    first, same, other = (Iid(clients=4).apply(pool(), seed) for seed in (1, 1, 2))
    assert held_rows(first) == held_rows(same) != held_rows(other)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert len(first.fingerprint) == 64
    # Data, shares and shifts each change it, and nothing else does.
    splits = [
        Iid(clients=4),
        Iid(clients=5),
        Rotate(degrees=(0, 90), clients=(2, 2)),
        Rotate(degrees=(0, 180), clients=(2, 2)),
        Rotate(degrees=(0, 90), clients=(1, 3)),
        LabelFlip(offsets=(0, 1), clients=(2, 2)),
    ]
    marks = {split.apply(pool(), seed=1).fingerprint for split in splits}
    marks.add(Iid(clients=4).apply(pool(classes=4), seed=1).fingerprint)
    assert len(marks) == 7
    floats = Rotate(degrees=(0.0, 90.0), clients=(2, 2)).apply(pool(), seed=1)
    assert floats.fingerprint == splits[2].apply(pool(), seed=1).fingerprint


def test_pickling_keeps_everything_but_the_shifted_copies() -> None:
    federation = Rotate(degrees=(0, 90), clients=(2, 2)).apply(pool(), seed=0)
    before = len(pickle.dumps(federation))
    loaded = [federation.load(client) for client in range(4)]
    again = pickle.loads(pickle.dumps(federation))
    assert len(pickle.dumps(federation)) <= before + 16
    assert again.fingerprint == federation.fingerprint and again.groups == federation.groups
    assert (again.size == federation.size).all() and (again.group == federation.group).all()
    assert all(equal(again.load(client), loaded[client]) for client in range(4))


def test_shares_end_to_end() -> None:
    shares = Shares.of([np.array([4, 1]), np.array([], dtype=int), np.array([0])])
    assert shares.size.tolist() == [2, 0, 1]
    assert [shares[client].tolist() for client in range(3)] == [[4, 1], [], [0]]


def test_held_out_keeps_one_on_each_side() -> None:
    held = np.array([2, 3, 10, 104, 50])
    assert held_out(held, 0.2).tolist() == [1, 1, 2, 21, 10]  # 0.4 and 0.6 -> 1; 20.8 -> 21
    assert held_out(held, 0.99).tolist() == [1, 2, 9, 103, 49]


def fails(split: Any, data: Pool | Federation) -> UserError:
    with pytest.raises(UserError) as error:
        parse_split(split).apply(data, 0)
    return error.value


def test_what_does_not_fit_the_pool() -> None:
    error = fails({"kind": "iid", "clients": 24}, pool())
    assert error.what == "data.split.clients = 24 asks for 24 clients."
    assert "23 training records" in error.why and error.fix == "data.split.clients = 23"

    error = fails({"kind": "rotate", "degrees": [0, 90], "clients": [20, 4]}, pool())
    assert error.what == "data.split.clients = [20, 4] asks for 24 clients." and "add up to 23" in error.fix

    error = fails({"kind": "rotate", "degrees": [0, 90], "clients": [1, 1]}, pool(features=(7,)))
    assert 'data.split.kind = "rotate" does not fit records of shape (7,)' in error.what

    error = fails({"kind": "rotate", "degrees": [0, 90], "clients": [1, 1]}, pool(features=(1, 2, 3)))
    assert "data.split.degrees holds 90, but the images are 2 by 3." in error.what

    error = fails({"kind": "label-flip", "offsets": [0, 3], "clients": [1, 1]}, pool())
    assert error.what == "data.split.offsets = [0, 3] names one shift twice (modulo 3 classes)."

    error = fails({"kind": "label-flip", "offsets": [0, 1], "clients": [1, 1]}, pool(classes=0))
    assert 'data.split.kind = "label-flip" does not fit numbered.' in error.what
    assert "regression" in error.why

    error = fails({"kind": "natural"}, pool())
    assert error.what == 'data.split.kind = "natural" does not fit numbered.' and '"iid"' in error.fix


@pytest.mark.parametrize(
    ("split", "what", "why", "fix"),
    [
        (
            {"kind": "iid", "clients": 6, "records": 4},
            "data.split.records = 4 is too many for 6 clients.",
            "without overlap 6 clients need 24",
            "data.split.records = 3, or data.split.overlap = true",
        ),
        (
            {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3], "records": 24},
            "data.split.records = 24 is more than there are.",
            "23 training records",
            "data.split.records = 4",
        ),
        (
            {"kind": "label-flip", "offsets": [0, 1], "clients": [2, 30], "records": 24, "overlap": True},
            "data.split.records = 24 is more than there are.",
            "at most once",
            "data.split.records = 23",
        ),
        (
            {"kind": "iid", "clients": 24, "records": 1},
            "data.split.clients = 24 asks for 24 clients.",
            "23 training records",
            "data.split.clients = 23",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_drawn(
    split: Any, what: str, why: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "Stream", None)
    error = fails(split, pool())
    assert error.what == what and why in error.why and error.fix == fix


def test_a_dataset_is_cut_with_overlap_by_name() -> None:
    split = {"kind": "rotate", "degrees": [0, 90, 180, 270], "clients": [3, 6, 6, 6], "records": 400, "overlap": True}
    first, same, other = (build_federation("digits", {}, split, seed) for seed in (1, 1, 2))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.size.tolist() == [400] * 21
    # A row is held by Binomial(21, 400/1438) clients: of 1,438 rows some surely by more than 10, none by all.
    assert 10 < first.holders < 21


def test_what_has_an_owner_is_not_cut_again() -> None:
    owned = Iid(clients=3).apply(pool(), seed=0)
    assert Natural().apply(owned, seed=0) is owned
    error = fails({"kind": "iid", "clients": 2}, owned)
    assert error.what == 'data.split.kind = "iid" does not fit numbered.' and '"natural"' in error.fix


@pytest.mark.parametrize(
    ("split", "what", "fix"),
    [
        ({"kind": "rotat"}, 'data.split.kind = "rotat" is not known.', 'data.split.kind = "rotate"'),
        ({"kind": ["iid"]}, 'data.split.kind = ["iid"] is not known.', 'data.split.kind = "iid"'),
        ({"clients": 3}, "data.split.kind is missing.", 'data.split.kind = "iid"'),
        ("iid", 'data.split = "iid" is not a table.', 'data.split = { kind = "iid", clients = 10 }'),
        ({"kind": "iid", "clients": 0}, "data.split.clients = 0 is not valid.", "data.split.clients = 10"),
        ({"kind": "iid", "records": 0}, "data.split.records = 0 is not valid.", "data.split.records = 100"),
        (
            {"kind": "rotate", "overlap": True},
            "data.split.overlap = true needs data.split.records.",
            "data.split.records = 100, or data.split.overlap = false",
        ),
        (
            {"kind": "iid", "client": 5},
            "data.split.client = 5 is not a known key.",
            "data.split.clients = 5",
        ),
        (
            {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 4]},
            "data.split.clients = [2, 4] has 2 numbers, but degrees has 3.",
            "data.split.clients = [2, 4, 4]",
        ),
        (
            {"kind": "label-flip", "offsets": [0], "clients": [2, 4]},
            "data.split.clients = [2, 4] has 2 numbers, but offsets has 1.",
            "data.split.clients = [2]",
        ),
        (
            {"kind": "rotate", "degrees": [0, -90, 270], "clients": [2, 4, 4]},
            "data.split.degrees = [0, -90, 270] names one shift twice (modulo 360 degrees).",
            "data.split.degrees = [0, -90], with the clients of equal ones added up",
        ),
        (
            {"kind": "rotate", "degrees": [0, float("nan")], "clients": [2, 4]},
            "data.split.degrees[1]",
            "data.split.degrees = [0, 90, 180, 270]",
        ),
    ],
)
def test_what_is_wrong_in_itself(split: Any, what: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        parse_split(split)
    assert error.value.what.startswith(what)
    assert error.value.fix == fix


def test_a_config_can_hold_any_split() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(AnySplit)
    for kind, cls in SPLITS.items():
        assert type(adapter.validate_python({"kind": kind})) is cls
    assert adapter.validate_python({"kind": "iid", "clients": 3}) == Iid(clients=3)
    assert isinstance(adapter.validate_python({"kind": "rotate"}), Rotate)
    with pytest.raises(UserError):  # raised as it is, not wrapped by pydantic
        adapter.validate_python({"kind": "rotate", "degrees": [0], "clients": [1, 2]})
    split = Iid(clients=3)
    assert parse_split(split) is split
