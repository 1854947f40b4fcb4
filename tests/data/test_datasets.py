"""The registry, the digits, and what is said about mistakes in [data]."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fairveil.data.datasets import DATASETS, build_federation, find_dataset
from fairveil.data.federation import Dataset, Pool, Records
from fairveil.data.partition import Iid, parse_split
from fairveil.errors import UserError


def fails(dataset: str, options: Any = None, split: Any = None) -> UserError:
    with pytest.raises(UserError) as error:
        build_federation(dataset, {} if options is None else options, split, 0)
    return error.value


def as_rows(images: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in (images.reshape(len(images), -1) * 16).round().int().tolist()]


def test_digits_are_all_there_once() -> None:
    federation = build_federation("digits", {}, None, 0)
    assert federation.clients == 10 and federation.groups == ("all",)
    assert federation.features == (1, 8, 8) and federation.classes == 10
    assert federation.size.sum() == 1438 and len(federation.load(0).test) == 359  # 1797 = 1438 + 359
    loaded = [federation.load(client) for client in range(10)]
    images = torch.cat([data.train.x for data in loaded] + [loaded[0].test.x])
    labels = torch.cat([data.train.y for data in loaded] + [loaded[0].test.y])
    assert images.min() == 0 and images.max() == 1
    x, y = load_digits(return_X_y=True)
    expected = sorted(zip([tuple(row) for row in x.astype(int).tolist()], y.tolist(), strict=True))
    assert sorted(zip(as_rows(images), labels.tolist(), strict=True)) == expected


def test_rotated_digits_are_the_same_pixels_turned() -> None:
    split = {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 4, 4]}
    plain = build_federation("digits", {}, {"kind": "iid", "clients": 10}, 5)
    turned = build_federation("digits", {}, split, 5)
    assert turned.groups == ("0°", "90°", "180°") and np.bincount(turned.group).tolist() == [2, 4, 4]
    for client, turns in ((0, 0), (2, 1), (9, 2)):
        left, right = plain.load(client), turned.load(client)
        for before, after in ((left.train, right.train), (left.test, right.test)):
            assert torch.equal(after.x, before.x.rot90(turns, (2, 3)))
            assert torch.equal(after.y, before.y)


def test_digits_by_seed() -> None:
    first, same, other = (build_federation("digits", {}, None, seed) for seed in (0, np.int64(0), 1))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert torch.equal(first.load(3).train.x, same.load(3).train.x)
    assert not torch.equal(first.load(3).train.x, other.load(3).train.x)
    assert torch.equal(first.load(0).test.x, other.load(9).test.x)  # held out once, whatever the seed
    again = pickle.loads(pickle.dumps(first))
    assert torch.equal(again.load(3).train.x, first.load(3).train.x)


def test_every_registered_dataset_has_a_default_split_that_is_valid() -> None:
    pools = {"cifar10", "cifar10-subset", "digits", "fashion-mnist", "mnist", "usps"}  # rows that nobody owns
    for name, dataset in DATASETS.items():
        assert parse_split(dataset.default_split).kind == ("iid" if name in pools else "natural")


def test_a_split_model_is_accepted() -> None:
    assert build_federation("digits", {}, Iid(clients=7), 0).clients == 7


@pytest.fixture
def own_module() -> Iterator[types.ModuleType]:
    class Dots(Dataset):
        default_split: ClassVar[dict[str, Any]] = {"kind": "iid", "clients": 2}
        rows: int

        def load(self, seed: int) -> Pool:
            records = Records(torch.ones(self.rows, 3), torch.arange(self.rows) % 2)
            return Pool("dots", records, records, classes=2)

    module = types.ModuleType("dots_of_a_user")
    module.Dots = Dots  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_a_dataset_of_the_users_own(own_module: types.ModuleType) -> None:
    federation = build_federation("dots_of_a_user:Dots", {"rows": 6}, None, 0)
    assert federation.name == "dots" and federation.size.tolist() == [3, 3]
    error = fails("dots_of_a_user:Dots")
    assert error.what == "data.options.rows is missing." and error.fix == "data.options.rows = ..."
    error = fails("dots_of_a_user:Dot")
    assert error.what == 'data.dataset = "dots_of_a_user:Dot" cannot be imported.' and "'Dot'" in error.why
    assert error.fix == 'data.dataset = "dots_of_a_user:Dots"'


def test_unknown_datasets() -> None:
    error = fails("digit")
    assert error.what == 'data.dataset = "digit" is not known.' and "digits" in error.fix
    error = fails("no_such_package.data:Mine")
    assert "cannot be imported" in error.what and "No module named 'no_such_package'" in error.why
    error = fails("fairveil.streams:Stream")
    assert error.what == 'data.dataset = "fairveil.streams:Stream" is not a dataset.'
    assert find_dataset("synthetic") is DATASETS["synthetic"]
    for odd in (":", "os:", ":Name"):
        assert "cannot be imported" in fails(odd).what


@pytest.mark.parametrize(
    ("dataset", "options", "what", "why", "fix"),
    [
        (
            "synthetic",
            {"client": 3},
            "data.options.client = 3 is not a known key.",
            "alpha, beta, classes, clients",
            "data.options.clients = 3",
        ),
        ("digits", {"zzz": 1}, "data.options.zzz = 1 is not a", "none", "leave out data.options.zzz"),
        (
            "synthetic",
            {"clients": 0},
            "data.options.clients = 0 is not valid.",
            "greater than 0",
            "data.options.clients = 100",
        ),
        (
            "gaussian-clusters",
            {"clients": [3, -1]},
            "data.options.clients[1] = -1 is not valid.",
            "greater than 0",
            "data.options.clients = [3, 6, 6, 6]",
        ),
        (
            "linear-clusters",
            {"clients": [3, 4, 5]},
            "data.options.clients = [3, 4, 5] is not valid.",
            "at most 2 items",
            "data.options.clients = [50, 50]",
        ),
        (
            "loan-groups",
            {"clients": [0, 5]},
            "data.options.clients[0] = 0 is not valid.",
            "greater than 0",
            "data.options.clients = [800, 200]",
        ),
        (
            "gaussian-clusters",
            {"separation": float("nan")},
            "data.options.separation = NaN is not valid.",
            "finite",
            "data.options.separation = 3.0",
        ),
        (
            "file",
            {"path": "x.csv", "task": "regresion"},
            'data.options.task = "regresion" is not valid.',
            "'regression'",
            'data.options.task = "regression"',
        ),
        ("file", {}, "data.options.path is missing.", "no default", 'data.options.path = "records.csv"'),
        ("digits", 5, "data.options = 5 is not valid.", "dictionary", "data.options = {}"),
    ],
)
def test_mistakes_in_options(dataset: str, options: Any, what: str, why: str, fix: str) -> None:
    error = fails(dataset, options)
    assert error.what.startswith(what)
    assert why in error.why
    assert error.fix == fix


def test_splits_that_do_not_fit_the_dataset() -> None:
    assert "does not fit synthetic" in fails("synthetic", {}, {"kind": "iid"}).what
    assert "does not fit digits" in fails("digits", {}, {"kind": "natural"}).what
    error = fails("digits", {}, {"kind": "iid", "clients": 1439})
    assert error.what == "data.split.clients = 1439 asks for 1,439 clients." and "1,438" in error.why
