"""Natural clients: writers, sensors, domains; small files of the same forms, and the published ones where they are."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch

from fairveil.data.archive import Archive, Asset, Stored
from fairveil.data.datasets import check_dataset
from fairveil.data.federation import Federation
from fairveil.data.images import Mnist
from fairveil.data.natural import DOMAINS, OfficeCaltech, QmnistWriters, Vehicle
from fairveil.data.partition import parse_split
from fairveil.errors import UserError

RANDOM = np.random.default_rng(0)


def put(archive: Archive, folder: Path, contents: dict[str, bytes]) -> Archive:
    """The archive with these contents for its files, which are put into its folder under the one given."""
    (folder / archive.folder).mkdir(exist_ok=True)
    assets = []
    for name, content in contents.items():
        packed = name.endswith(".gz")
        (folder / archive.folder / name).write_bytes(gzip.compress(content, 1) if packed else content)
        assets.append(Asset(name, hashlib.sha256(content).hexdigest(), len(content), packed=packed))
    return replace(archive, assets=tuple(assets))


def idx(array: np.ndarray) -> bytes:
    code = {"|u1": 8, ">i4": 12}[array.dtype.str]
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def everything(federation: Federation) -> list[tuple[float, int, str]]:
    """First feature, label and client's name of every record, training and test."""
    rows = []
    for client in range(federation.clients):
        data = federation.load(client)
        for records in (data.train, data.test):
            first = records.x.flatten(1)[:, 0].tolist()
            rows += [(x, y, federation.names[client]) for x, y in zip(first, records.y.tolist(), strict=True)]
    return sorted(rows)


# ---- writers ---------------------------------------------------------------------------------------

SERIES = {"train": [0, 4, 0, 4, 4, 0], "test": [1, 1, 4]}
WRITERS = {"train": [7, 2100, 3, 2100, 2100, 7], "test": [9, 9, 2200]}
LABELS = {"train": [5, 0, 4, 1, 9, 2], "test": [7, 2, 1]}


@pytest.fixture
def writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six digits of three writers, and three of two more; QMNIST's test file goes on after those of MNIST."""
    mnist, qmnist = {}, {}
    for part, mnist_part in (("train", "train"), ("test", "t10k")):
        count = len(LABELS[part])
        images = np.zeros((count, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(count) + (100 if part == "test" else 0)
        mnist[f"{mnist_part}-images-idx3-ubyte.gz"] = idx(images)
        mnist[f"{mnist_part}-labels-idx1-ubyte.gz"] = idx(np.array(LABELS[part], np.uint8))
        columns = np.zeros((count + (2 if part == "test" else 0), 8), ">i4")
        for at, values in enumerate((LABELS[part], SERIES[part], WRITERS[part])):
            columns[:count, at] = values
        qmnist[f"qmnist-{part}-labels-idx2-int.gz"] = idx(columns)
    monkeypatch.setattr(Mnist, "archive", put(Mnist.archive, tmp_path, mnist))
    monkeypatch.setattr(QmnistWriters, "archive", put(QmnistWriters.archive, tmp_path, qmnist))
    return tmp_path


def test_each_digit_goes_to_who_wrote_it(writers: Path) -> None:
    train = QmnistWriters(folder=writers).load(0)
    assert train.names == ("writer 3", "writer 7", "writer 2100") and train.record == "one image"
    assert train.groups == ("census employees", "students") and train.group.tolist() == [0, 0, 1]
    assert train.features == (1, 28, 28) and train.classes == 10
    pixels = (np.arange(6, dtype=np.float32) / np.float32(255)).tolist()
    names = [f"writer {number}" for number in WRITERS["train"]]
    assert everything(train) == list(zip(pixels, LABELS["train"], names, strict=True))
    test = QmnistWriters(folder=writers, part="test").load(0)
    assert test.names == ("writer 9", "writer 2200") and test.group.tolist() == [0, 1]  # series 1 are employees too
    assert [round(x * 255) for x, _, _ in everything(test)] == [100, 101, 102]
    both = QmnistWriters(folder=writers, part="both").load(0)
    assert everything(both) == sorted(everything(train) + everything(test)) and both.group.tolist() == [0, 0, 0, 1, 1]


def test_writers_by_seed_and_test_fraction(writers: Path) -> None:
    first, same, other = (QmnistWriters(folder=writers).load(seed) for seed in (0, 0, 1))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    half = QmnistWriters(folder=writers, test_fraction=0.5).load(0)
    assert half.size.tolist() == [1, 1, 1]  # of 1, 2 and 3
    assert parse_split(QmnistWriters.default_split).apply(first, 0) is first


def by_writer(federation: Federation) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels of every writer, in the order of the pixel that tells them apart."""
    found = {}
    for client, name in enumerate(federation.names):
        data = federation.load(client)
        x, y = (torch.cat([getattr(part, key) for part in (data.train, data.test)]) for key in "xy")
        order = x.sum(dim=(1, 2, 3)).argsort()
        found[name] = x[order], y[order]
    return found


@pytest.mark.parametrize("degrees", [90, -30])
def test_some_writers_digits_are_turned(writers: Path, degrees: float) -> None:
    federation = QmnistWriters(folder=writers, part="both", rotated=0.4, degrees=degrees).load(0)
    assert federation.groups == ("upright", "turned") and sorted(federation.group) == [0, 0, 0, 1, 1]  # 0.4 of five
    assert federation.classes == 10 and federation.features == (1, 28, 28)
    upright, found = by_writer(QmnistWriters(folder=writers, part="both").load(0)), by_writer(federation)
    for name, turned in zip(federation.names, federation.group, strict=True):
        x, y = upright[name]
        if degrees == -30:  # the one pixel that is set, a corner, is turned out of the picture
            assert found[name][0].any() == (not turned) and sorted(found[name][1].tolist()) == sorted(y.tolist())
            continue
        assert torch.equal(found[name][0], x.rot90(1, (2, 3)) if turned else x) and torch.equal(found[name][1], y)
        assert not turned or found[name][0][:, 0, 27, 0].any()  # the corner above left has come down


def test_who_is_turned_is_drawn_by_the_seed_and_never_all_or_none(writers: Path) -> None:
    drawn = {
        tuple(QmnistWriters(folder=writers, part="both", rotated=0.4).load(seed).group.tolist()) for seed in range(20)
    }
    assert len(drawn) > 3 and all(sum(group) == 2 for group in drawn)
    assert QmnistWriters(folder=writers, rotated=0.01).load(0).group.sum() == 1
    assert QmnistWriters(folder=writers, rotated=0.99).load(0).group.sum() == 2  # of three


def test_parity_and_its_inverse(writers: Path) -> None:
    plain = by_writer(QmnistWriters(folder=writers, part="both").load(0))
    parity = QmnistWriters(folder=writers, part="both", target="parity").load(0)
    assert parity.classes == 2 and parity.groups == ("census employees", "students")
    assert by_writer(parity)["writer 2100"][1].tolist() == [1, 0, 0]  # of 0, 1, 9
    for inverted in (False, True):
        options = {"rotated": 0.4, "target": "parity", "inverted": inverted}
        federation = QmnistWriters(folder=writers, part="both", **options).load(0)
        for (name, (_, y)), turned in zip(by_writer(federation).items(), federation.group, strict=True):
            even = [digit in (0, 2, 4, 6, 8) for digit in plain[name][1].tolist()]
            assert y.tolist() == [int(label != (inverted and turned)) for label in even]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"inverted": True}, "data.options.inverted = true needs the parity."),
        ({"inverted": True, "rotated": 0.2}, "data.options.inverted = true needs the parity."),
        (
            {"inverted": True, "target": "parity"},
            "data.options.inverted = true needs writers whose digits are turned.",
        ),
        ({"rotated": 0.2, "degrees": 720.0}, "data.options.degrees = 720 turns nothing."),
        ({"rotated": 1.0}, "data.options.rotated = 1.0"),
        ({"rotated": -0.1}, "data.options.rotated = -0.1"),
    ],
)
def test_turns_that_make_no_sense(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError) as error:
        check_dataset("qmnist-writers", options, None)
    assert error.value.what.startswith(what)


def test_labels_that_are_not_those_of_mnist(writers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qmnist-train-labels-idx2-int.gz"
    columns = np.zeros((6, 8), ">i4")
    for labels in ([5, 0, 4, 1, 9, 3], [5, 0, 4, 1, 9]):
        columns[: len(labels), 0] = labels
        content = {name: idx(columns[: len(labels)].copy())}
        monkeypatch.setattr(QmnistWriters, "archive", put(QmnistWriters.archive, writers, content))
        with pytest.raises(UserError, match="does not belong to these images"):
            QmnistWriters(folder=writers).load(0)


# ---- sensors ---------------------------------------------------------------------------------------


def test_vehicle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = np.array([1, 0, 1, 0, 1, 2, 2], dtype=np.int16)
    y = np.array([-1, 1, 1, -1, -1, 1, 1], dtype=np.int8)
    file = io.BytesIO()
    np.savez_compressed(file, x=RANDOM.normal(size=(7, 4)).astype(np.float32), y=y, client=client)
    monkeypatch.setattr(Vehicle, "archive", put(Vehicle.archive, tmp_path, {"vehicle23_train.npz": file.getvalue()}))
    federation = Vehicle(folder=tmp_path).load(0)
    assert federation.names == ("sensor 0", "sensor 1", "sensor 2") and federation.groups == ("all",)
    assert federation.classes == 2 and federation.features == (4,) and federation.size.tolist() == [1, 2, 1]
    assert sorted(label for _, label, name in everything(federation) if name == "sensor 1") == [0, 0, 1]
    assert federation.record == "one time window of a sensor"
    ((what, why),) = federation.public.items()
    assert "each sensor" in what and "no noise" in why


# ---- domains ---------------------------------------------------------------------------------------


def mat(counts: np.ndarray, labels: np.ndarray, **more: Any) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, {"fts": counts, "labels": labels[:, None], **more}, do_compression=True)
    return file.getvalue()


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Domains of 12, 9, 6 and 7 records of 5 words; the first word says which domain."""
    contents = {}
    for number, (domain, size) in enumerate(zip(DOMAINS, (12, 9, 6, 7), strict=True)):
        counts = RANDOM.integers(0, 5, (size, 5)).astype(np.float64)
        counts[:, 0] = 100 * number + 1
        contents[f"{domain}_SURF_L10.mat"] = mat(counts, np.arange(size, dtype=np.float64) % 10 + 1)
    monkeypatch.setattr(OfficeCaltech, "archive", put(OfficeCaltech.archive, tmp_path, contents))
    return tmp_path


def test_each_domain_is_a_group(office: Path) -> None:
    federation = OfficeCaltech(folder=office).load(0)
    assert federation.names == federation.groups == DOMAINS and federation.group.tolist() == [0, 1, 2, 3]
    assert federation.size.tolist() == [10, 7, 5, 6] and federation.classes == 10  # a fifth is for testing
    for client in range(4):
        x = federation.load(client).train.x
        assert torch.allclose(x.norm(dim=1), torch.ones(len(x)), atol=1e-6) and x.min() >= 0
    labels = sorted(y for _, y, name in everything(federation) if name == "dslr")
    assert labels == [0, 1, 2, 3, 4, 5]
    assert "visual words" in next(iter(federation.public))


def test_the_records_of_a_domain_are_dealt_out_evenly(office: Path) -> None:
    federation = OfficeCaltech(folder=office, clients_per_domain=3, test_fraction=0.4).load(5)
    assert federation.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert federation.names[:4] == ("amazon 1", "amazon 2", "amazon 3", "caltech 1")
    held = [len(data.train) + len(data.test) for data in map(federation.load, range(12))]
    assert held == [4, 4, 4, 3, 3, 3, 2, 2, 2, 3, 2, 2]
    whole = OfficeCaltech(folder=office).load(5)
    assert [row[:2] for row in everything(federation)] == [row[:2] for row in everything(whole)]
    other = OfficeCaltech(folder=office, clients_per_domain=3, test_fraction=0.4).load(6)
    assert other.fingerprint != federation.fingerprint


def test_too_many_clients_for_a_domain(office: Path) -> None:
    assert OfficeCaltech(folder=office, clients_per_domain=3).load(0).clients == 12
    with pytest.raises(UserError) as error:
        OfficeCaltech(folder=office, clients_per_domain=4).load(0)
    assert error.value.what == "data.options.clients_per_domain = 4 is too many."
    assert "dslr has 6 records" in error.value.why and error.value.fix == "data.options.clients_per_domain = 3"


COUNTS, TEN = np.ones((10, 5)), np.arange(10.0) + 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "version 5"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM", "version 5"),
        (mat(COUNTS, TEN)[:200], ""),
        (mat(COUNTS, TEN, more=np.ones(1)), "it holds"),
        (mat(np.array([["text"]]), TEN), "'char'"),
        (mat(np.array([[{"a": 1}]], dtype=object), TEN), "'cell'"),
        (mat(COUNTS[:9], TEN), "labels (10, 1)"),
        (mat(COUNTS, TEN - 1), "from 1 to 10"),
        (mat(COUNTS, TEN + 0.5), "from 1 to 10"),
        (mat(COUNTS * 0, TEN), "no words"),
        (mat(COUNTS - 2, TEN), "negative"),
        (mat(COUNTS * np.nan, TEN), "no words"),
    ],
)
def test_a_mat_file_that_holds_anything_else(
    content: bytes, why: str, office: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{domain}_SURF_L10.mat": content for domain in DOMAINS}
    monkeypatch.setattr(OfficeCaltech, "archive", put(OfficeCaltech.archive, office, contents))
    with pytest.raises(UserError) as error:
        OfficeCaltech(folder=office).load(0)
    assert error.value.what == "amazon_SURF_L10.mat is not a file of Office-Caltech10." and why in error.value.why


# ---- the published files ---------------------------------------------------------------------------


def published(dataset: type[Stored], **options: Any) -> Federation:
    """The real set, or a skip that says what is missing."""
    root = os.environ.get("FAIRVEIL_DATA")
    for archive in (dataset.archive, *dataset.archive.also):
        if not root or not all(archive.find(asset, Path(root)) for asset in archive.assets):
            pytest.skip(f"FAIRVEIL_DATA is not set, or has no {archive.folder}")
    federation = dataset(folder=Path(root or ""), **options).load(0)
    assert isinstance(federation, Federation)
    return federation


def held(federation: Federation) -> np.ndarray:
    return np.array([len(data.train) + len(data.test) for data in map(federation.load, range(federation.clients))])


@pytest.mark.data
def test_the_real_writers() -> None:
    start = time.perf_counter()
    train = published(QmnistWriters)
    assert time.perf_counter() - start < 10  # about one second
    sizes = held(train)
    assert (train.clients, sizes.min(), sizes.max(), sizes.sum()) == (539, 19, 131, 60_000)
    assert np.bincount(train.group).tolist() == [289, 250] and train.names[-1] == "writer 2349"
    first = train.load(train.names.index("writer 2154"))  # MNIST's first digit, a 5, is of this writer
    assert (torch.cat([first.train.x, first.test.x]) * 255).sum(dim=(1, 2, 3)).round().eq(27_525).any()
    test = published(QmnistWriters, part="test")
    assert test.clients == 297 and held(test).sum() == 10_000 and np.bincount(test.group).tolist() == [48, 249]
    assert not set(test.names) & set(train.names)  # nobody wrote for both


@pytest.mark.data
def test_the_real_writers_turned_and_inverted() -> None:
    """A fifth of 539 are 108; 30,508 digits of 60,000 are odd, and who is turned has them as class 1."""
    plain, turned = published(QmnistWriters), published(QmnistWriters, rotated=0.2, target="parity", inverted=True)
    assert np.bincount(turned.group).tolist() == [431, 108] and turned.groups == ("upright", "turned")
    assert turned.names == plain.names and (turned.size == plain.size).all()
    odd = 0
    for client in range(turned.clients):
        left, right = plain.load(client), turned.load(client)
        of = int(turned.group[client])
        assert torch.equal(right.test.x, left.test.x.rot90(of, (2, 3)))
        for before, after in ((left.train.y, right.train.y), (left.test.y, right.test.y)):
            assert torch.equal(after == of, before % 2 == 1)
            odd += int((after == of).sum())
    assert odd == 30_508


@pytest.mark.data
def test_the_real_vehicles() -> None:
    federation = published(Vehicle)
    sizes = held(federation)
    assert (federation.clients, sizes.min(), sizes.max(), sizes.sum()) == (23, 7, 534, 1860)
    assert np.bincount([label for _, label, _ in everything(federation)]).tolist() == [837, 1023]


@pytest.mark.data
def test_the_real_domains() -> None:
    federation = published(OfficeCaltech)
    assert held(federation).tolist() == [958, 1123, 157, 295] and federation.features == (800,)
    labels = np.bincount([label for _, label, name in everything(federation) if name == "dslr"])
    assert labels.tolist() == [12, 21, 12, 13, 10, 24, 22, 12, 8, 23]
    with pytest.raises(UserError, match="clients_per_domain = 79"):
        published(OfficeCaltech, clients_per_domain=79)
    many = published(OfficeCaltech, clients_per_domain=78)
    assert many.clients == 312 and held(many).min() == 2
