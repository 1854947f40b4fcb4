"""Declared sizes, fingerprints, and the checks of the columns."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from fairveil.data.federation import (
    ClientData,
    Decision,
    Federation,
    Records,
    ServerRecords,
    Standardise,
    fingerprint,
    nominal_sizes,
)


class TwoRecords:
    def load(self, client: int) -> ClientData:
        records = Records(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
        return ClientData(records, records)


def federation(**changed: Any) -> Federation:
    fields: dict[str, Any] = {
        "name": "two",
        "size": np.array([2, 2]),
        "group": np.array([0, 1]),
        "groups": ("a", "b"),
        "features": (3,),
        "classes": 2,
        "source": TwoRecords(),
        "fingerprint": "",
    }
    return Federation(**(fields | changed))


def test_public_sizes_are_exact_and_a_copy() -> None:
    size = np.array([7, 2285, 10_000])
    declared = nominal_sizes(size, "public")
    assert declared.tolist() == [7, 2285, 10_000]
    declared[0] = 1
    assert size[0] == 7


def test_rounded_sizes_by_hand() -> None:
    # 10^(25/24) = 11.007, 10^(28/24) = 14.678, 10^(29/24) = 16.156: 15 lies between 14 and 16.
    # 10^(80/24) = 2154.43, 10^(81/24) = 2371.37; whole decades are on the grid; 10^(71/24) = 908.5.
    size = np.array([11, 14, 15, 16, 2285, 1000, 999, 100, 10_000])
    assert nominal_sizes(size, "rounded").tolist() == [11, 14, 14, 16, 2154, 1000, 908, 100, 10_000]


def test_rounded_sizes_never_exceed_the_true_ones_and_are_few() -> None:
    size = np.arange(1, 20_001)
    declared = nominal_sizes(size, "rounded")
    assert (declared <= size).all()
    assert (declared > 0.9 * size - 1).all()  # 10^(-1/24) = 0.9085, and the floor takes less than one
    assert (np.diff(declared) >= 0).all()
    assert (declared[:14] == size[:14]).all()
    assert len(np.unique(declared)) <= 24 * np.log10(20_000) + 1
    assert (nominal_sizes(declared, "rounded") == declared).all()
    # The grid does not depend on who else is in the federation.
    assert (nominal_sizes(size[:500], "rounded") == declared[:500]).all()


def test_sizes_that_cannot_be_declared() -> None:
    assert nominal_sizes(np.array([], dtype=int), "rounded").size == 0
    with pytest.raises(ValueError, match="size 0"):
        nominal_sizes(np.array([3, 0]), "rounded")
    with pytest.raises(ValueError, match="hidden"):
        nominal_sizes(np.array([3]), "hidden")  # type: ignore[arg-type]


def test_fingerprint_separates_type_shape_and_order() -> None:
    zeros = np.zeros((2, 3), np.float32)
    different = [
        fingerprint(zeros),
        fingerprint(zeros.reshape(3, 2)),
        fingerprint(zeros.astype(np.float64)),
        fingerprint(zeros.view(np.int32)),
        fingerprint("ab", "c"),
        fingerprint("a", "bc"),
        fingerprint(1),
        fingerprint(1.0),
        fingerprint("1"),
    ]
    assert len(set(different)) == len(different)
    assert fingerprint(torch.zeros(2, 3)) == fingerprint(zeros)
    assert fingerprint(zeros.T) == fingerprint(np.zeros((3, 2), np.float32))  # not by layout in memory
    assert fingerprint("ab") == hashlib.sha256(b"str 2 ab\n").hexdigest()


def test_columns_are_checked() -> None:
    assert federation().clients == 2
    assert federation(size=np.array([2, 2], dtype=np.int32)).size.dtype == np.int64
    for changed, message in [
        ({"size": np.array([2, 0])}, "size of client 1 is 0"),
        ({"size": np.array([2.0, 2.0])}, "one integer"),
        ({"size": np.array([], dtype=int), "group": np.array([], dtype=int)}, "one integer"),
        ({"size": np.array([2, 2, 2])}, "3 sizes"),
        ({"group": np.array([0, 2])}, "group 2 has no name"),
        ({"classes": 1}, "at least 2"),
        ({"decided": True}, "not from 2 classes"),
    ]:
        with pytest.raises(ValueError, match=message):
            federation(**changed)


def test_loading_is_checked() -> None:
    assert len(federation().load(1).train) == 2
    for client in (-1, 2):
        with pytest.raises(IndexError):
            federation().load(client)
    with pytest.raises(ValueError, match="client 1 loads 2 records, not 3"):
        federation(size=np.array([2, 3])).load(1)


@pytest.mark.parametrize(("above", "expected"), [(True, [0, 0, 1, 1, 1, 0]), (False, [1, 1, 1, 0, 0, 0])])
def test_decisions_by_hand(above: bool, expected: list[int]) -> None:
    """From the threshold on, or up to it: the threshold itself is among both, and what is no number among neither."""
    numbers = torch.tensor([-torch.inf, 14.999, 15.0, 15.001, torch.inf, torch.nan])
    found = Decision(15.0, above).about(numbers)
    assert found.tolist() == expected and found.dtype == torch.int64
    assert Decision(0.0).about(torch.tensor([-0.0, 0.0])).tolist() == [1, 1]


class Decided:
    def load(self, client: int) -> ClientData:
        records = Records(torch.ones(2, 3), torch.zeros(2))
        return ClientData(records, records, {"sex": np.array([0, 1])}, Decision(float(client)))


def test_decisions_stay_with_their_client() -> None:
    decided = federation(classes=0, decided=True, source=Decided(), standardise=Standardise(((0, None),), 1.0))
    standard = decided.standardised(np.array([1.0]), np.array([2.0]))
    assert standard.decided and standard.load(1).train.x[:, 0].tolist() == [0.0, 0.0]
    for data in (decided.load(1), standard.load(1)):
        assert data.decision == Decision(1.0) and data.attributes["sex"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="client 1 has the decision None, but decided = True"):
        federation(classes=0, decided=True).load(1)
    with pytest.raises(ValueError, match="but decided = False"):
        federation(classes=0, source=Decided()).load(0)


def test_records_are_checked() -> None:
    with pytest.raises(ValueError, match="shape"):
        Records(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        Records(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    taken = Records(torch.arange(3.0)[:, None], torch.arange(3)).take(np.array([2, 0]))
    assert taken.x.tolist() == [[2.0], [0.0]] and taken.y.tolist() == [2, 0]


def test_several_classes_are_rows_of_0_and_1() -> None:
    x, y = torch.zeros(2, 3), torch.tensor([[1, 0], [0, 0]])
    assert len(Records(x, y)) == 2 and Records(x, y).take(np.array([1])).y.tolist() == [[0, 0]]
    for wrong in (y + 1, y.float(), y[:1], y.unsqueeze(2), -y):
        with pytest.raises(ValueError, match=r"y cannot have|of 0 and 1"):
            Records(x, wrong)
    with pytest.raises(ValueError, match="of 0 and 1"):
        ServerRecords("public", x, 2 * y)
    assert ServerRecords("public", x, y).labels is y


def test_a_client_has_targets_as_its_federation_says() -> None:
    with pytest.raises(ValueError, match=r"targets of shape .* several = True"):
        federation(several=True).load(0)

    class Rows:
        def load(self, client: int) -> ClientData:
            records = Records(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64))
            return ClientData(records, records)

    assert federation(source=Rows(), several=True, classes=4).load(0).train.y.shape == (2, 4)
    for other in ({"classes": 4}, {"classes": 3, "several": True}):
        with pytest.raises(ValueError, match="targets of shape"):
            federation(source=Rows(), **other).load(0)
    for other in ({"classes": 0}, {"elsewhere": True}):
        with pytest.raises(ValueError, match="several at once are for classes"):
            federation(several=True, **other)
