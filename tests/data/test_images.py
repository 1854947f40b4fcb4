"""Images: small files of the same forms as the published ones, and the published ones themselves where they are."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairveil.data.archive import Archive, Asset
from fairveil.data.federation import Pool
from fairveil.data.images import Cifar10, Cifar10Subset, FashionMnist, Images, Mnist, Usps, read_idx
from fairveil.data.partition import Iid, parse_split
from fairveil.errors import UserError

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    code = {"|u1": 8, ">i4": 12}[array.dtype.str]
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def put(archive: Archive, folder: Path, contents: dict[str, bytes]) -> Archive:
    """The archive with these contents for its files, which are put into the folder."""
    packed = {asset.name: asset.packed for asset in archive.assets}
    folder.mkdir(exist_ok=True)
    assets = []
    for name, content in contents.items():
        (folder / name).write_bytes(gzip.compress(content, 1) if packed[name] else content)
        assets.append(Asset(name, hashlib.sha256(content).hexdigest(), len(content), packed=packed[name]))
    return replace(archive, assets=tuple(assets))


def small_mnist(archive: Archive, folder: Path, rows: dict[str, int]) -> tuple[Archive, dict[str, np.ndarray]]:
    arrays = {}
    for part, count in rows.items():
        arrays[f"{part}-images-idx3-ubyte.gz"] = RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte.gz"] = np.arange(count, dtype=np.uint8) % 10
    return put(archive, folder, {name: idx(array) for name, array in arrays.items()}), arrays


@pytest.mark.parametrize("dataset", [Mnist, FashionMnist])
def test_mnist_and_its_like(dataset: type[Mnist], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, arrays = small_mnist(dataset.archive, tmp_path, {"train": 30, "t10k": 20})
    monkeypatch.setattr(dataset, "archive", archive)
    pool = dataset(folder=tmp_path).load(0)
    images, labels = (arrays[f"train-{kind}-ubyte.gz"] for kind in ("images-idx3", "labels-idx1"))
    assert pool.name == archive.name and pool.features == (1, 28, 28) and pool.classes == 10 and pool.public == {}
    assert len(pool.train) == 30 and len(pool.test) == 20 and pool.record == "one image"
    assert torch.equal(pool.train.x[:, 0], torch.from_numpy(images.astype(np.float32)) / 255)
    assert pool.train.y.tolist() == labels.tolist() and pool.train.x.is_contiguous()
    federation = parse_split(dataset.default_split).apply(pool, 0)
    assert federation.clients == 10 and federation.groups == ("all",)

    standard = dataset(folder=tmp_path, inputs="standardised").load(0)
    expected = (pool.train.x - dataset.mean[0]) / dataset.deviation[0]
    assert torch.allclose(standard.train.x, expected, atol=1e-6)
    ((what, why),) = standard.public.items()
    assert f"{dataset.mean[0]:.4f}" in what and f"{dataset.deviation[0]:.4f}" in what and dataset.title in why
    assert Iid(clients=2).apply(standard, 0).public == standard.public


def test_images_and_labels_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, arrays = small_mnist(Mnist.archive, tmp_path, {"train": 30, "t10k": 20})
    name = "train-labels-idx1-ubyte.gz"
    for labels in (arrays[name][:-1], arrays[name] + np.uint8(1)):
        contents = {key: idx(array) for key, array in (arrays | {name: labels}).items()}
        monkeypatch.setattr(Mnist, "archive", put(Mnist.archive, tmp_path, contents))
        with pytest.raises(UserError, match="mnist is not in the format it should have"):
            Mnist(folder=tmp_path).load(0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\x00\x08",
        idx(np.zeros((2, 3), np.uint8)),  # of one dimension
        idx(np.zeros((2, 3, 4), ">i4")),
        b"\x00\x01" + idx(np.zeros((2, 3, 4), np.uint8))[2:],
        b"\x1f\x8b" + idx(np.zeros((2, 3, 4), np.uint8))[2:],
        idx(np.zeros((2, 3, 4), np.uint8))[:15],
        idx(np.zeros((2, 3, 4), np.uint8))[:-1],
        idx(np.zeros((2, 3, 4), np.uint8)) + b"?",
        idx(np.zeros((0, 3, 4), np.uint8)),
        struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    ],
)
def test_idx_headers_are_checked(data: bytes) -> None:
    with pytest.raises(UserError, match="images is not in the format it should have"):
        read_idx(data, "images", np.dtype("u1"), 3)


def test_idx_of_integers() -> None:
    array = np.array([[1, -2], [2**31 - 1, 4]], dtype=">i4")
    assert np.array_equal(read_idx(idx(array), "labels", np.dtype(">i4"), 2), array)


@pytest.fixture
def cifar(tmp_path: Path) -> tuple[Archive, dict[str, bytes], np.ndarray]:
    """A CIFAR-10 of two images a batch: the archive in `packed`, the batches in `unpacked`."""
    images = RANDOM.integers(0, 256, (12, 3072), dtype=np.uint8)
    batches = {
        asset.name: pickle.dumps({b"data": images[2 * at : 2 * at + 2], b"labels": [at, 9]}, 2)
        for at, asset in enumerate(Cifar10.archive.unpacked)
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in {"cifar-10-batches-py/readme.html": b"", **batches}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    archive = put(Cifar10.archive, tmp_path / "packed", {"cifar-10-python.tar.gz": buffer.getvalue()})
    (tmp_path / "unpacked" / "cifar-10-batches-py").mkdir(parents=True)
    unpacked = []
    for name, data in batches.items():
        (tmp_path / "unpacked" / name).write_bytes(data)
        unpacked.append(Asset(name, hashlib.sha256(data).hexdigest(), len(data)))
    return replace(archive, unpacked=tuple(unpacked)), batches, images.reshape(-1, 3, 32, 32)


def test_cifar10_from_the_archive_or_from_what_is_in_it(
    cifar: tuple[Archive, dict[str, bytes], np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, _, images = cifar
    monkeypatch.setattr(Cifar10, "archive", archive)
    for folder in ("packed", "unpacked", "unpacked/cifar-10-batches-py"):
        pool = Cifar10(folder=tmp_path / folder).load(0)
        assert pool.features == (3, 32, 32) and len(pool.train) == 10 and len(pool.test) == 2
        assert torch.equal(torch.cat([pool.train.x, pool.test.x]), torch.from_numpy(images.astype(np.float32)) / 255)
        assert pool.train.y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9] and pool.test.y.tolist() == [5, 9]
    assert not (tmp_path / "packed" / "cifar-10-batches-py").exists()  # nothing is unpacked to disk
    standard = Cifar10(folder=tmp_path / "packed", inputs="standardised").load(0)
    for channel in range(3):
        expected = (pool.train.x[:, channel] - Cifar10.mean[channel]) / Cifar10.deviation[channel]
        assert torch.allclose(standard.train.x[:, channel], expected, atol=1e-6)
    (tmp_path / "unpacked" / archive.unpacked[2].name).write_bytes(b"?")
    with pytest.raises(UserError, match="data_batch_3 is not the file of cifar10"):
        Cifar10(folder=tmp_path / "unpacked").load(0)


def test_an_archive_of_cifar10_that_lacks_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-py/readme.html"))
    archive = put(Cifar10.archive, tmp_path, {"cifar-10-python.tar.gz": buffer.getvalue()})
    monkeypatch.setattr(Cifar10, "archive", archive)
    with pytest.raises(UserError, match="data_batch_1 is not in the format"):
        Cifar10(folder=tmp_path).load(0)


def test_cifar10_subset_is_turned_to_channels_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = RANDOM.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(6, dtype=np.uint8)
    file = io.BytesIO()
    index = np.arange(6, dtype=np.int32)
    np.savez_compressed(
        file, x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:], train_index=index
    )
    archive = put(Cifar10Subset.archive, tmp_path, {"cifar10_15k_5k_uint8.npz": file.getvalue()})
    monkeypatch.setattr(Cifar10Subset, "archive", archive)
    pool = Cifar10Subset(folder=tmp_path).load(0)
    assert torch.equal(pool.train.x[3, 2], torch.from_numpy(images[3, :, :, 2].astype(np.float32)) / 255)
    assert pool.features == (3, 32, 32) and pool.test.y.tolist() == [4, 5] and pool.train.x.is_contiguous()


def usps_line(label: Any, pixels: np.ndarray, end: str = " \n") -> bytes:
    return (f"{label:.4f} " + " ".join(f"{value:.4f}" for value in pixels) + end).encode()


def test_usps_is_mapped_to_the_unit_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = RANDOM.uniform(-1, 1, (3, 256)).round(4)
    train = b"".join(usps_line(label, row) for label, row in zip((7, 0, 9), pixels, strict=True))
    test = b"3 " + b" ".join([b"-1"] * 255) + b" 1\n"
    monkeypatch.setattr(Usps, "archive", put(Usps.archive, tmp_path, {"zip.train.gz": train, "zip.test.gz": test}))
    pool = Usps(folder=tmp_path).load(0)
    assert pool.features == (1, 16, 16) and pool.train.y.tolist() == [7, 0, 9] and pool.record == "one image"
    assert np.allclose(pool.train.x.reshape(3, 256).numpy(), (pixels + 1) / 2, atol=1e-6)
    assert pool.test.x.flatten().tolist() == [0.0] * 255 + [1.0] and pool.test.y.tolist() == [3]
    bad = [
        b"",
        usps_line(10, pixels[0]),
        usps_line(1.5, pixels[0]),
        usps_line(1, pixels[0] * 0 + 1.01),
        usps_line(1, pixels[0][1:]),
        usps_line(1, pixels[0]) + usps_line(1, pixels[0][1:]),
        usps_line(1, pixels[0]) + b"word\n",
        usps_line(1, pixels[0], " nan\n"),
    ]
    for train in bad:
        monkeypatch.setattr(Usps, "archive", put(Usps.archive, tmp_path, {"zip.train.gz": train, "zip.test.gz": test}))
        with pytest.raises(UserError, match=r"zip\.train\.gz is not in the format"):
            Usps(folder=tmp_path).load(0)


# ---- the published files ---------------------------------------------------------------------------


def published(dataset: type[Mnist] | type[Images] | type[Usps], **options: Any) -> Pool:
    """The real set, or a skip that says what is missing."""
    root = os.environ.get("FAIRVEIL_DATA")
    if not root or not all(dataset.archive.find(asset, Path(root)) for asset in dataset.archive.assets):
        pytest.skip(f"FAIRVEIL_DATA is not set, or has no {dataset.archive.folder}")
    return dataset(folder=Path(root), **options).load(0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("dataset", "labels", "first", "counts"),
    [
        (Mnist, [5, 0, 4, 1, 9], 27_525, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        (FashionMnist, [9, 0, 0, 3, 0], 76_247, [6000] * 10),
    ],
)
def test_the_real_mnist_and_fashion_mnist(
    dataset: type[Mnist], labels: list[int], first: int, counts: list[int]
) -> None:
    start = time.perf_counter()
    pool = published(dataset)
    seconds = time.perf_counter() - start
    assert pool.train.x.shape == (60_000, 1, 28, 28) and pool.test.x.shape == (10_000, 1, 28, 28)
    assert pool.train.y[:5].tolist() == labels and torch.bincount(pool.train.y).tolist() == counts
    assert (pool.train.x[0] * 255).sum().round() == first and pool.train.x.max() == 1
    assert abs(pool.train.x.mean() - dataset.mean[0]) < 1e-4  # the published constants are those of these pixels
    assert abs(pool.train.x.std() - dataset.deviation[0]) < 1e-4
    start = time.perf_counter()
    federation = Iid(clients=10).apply(pool, 0)
    assert federation.size.tolist() == [6000] * 10
    assert seconds < 6 and time.perf_counter() - start < 6  # about half a second each


@pytest.mark.data
def test_the_real_bytes_of_mnist() -> None:
    published(Mnist)
    content = Mnist.archive.read("train-images-idx3-ubyte.gz", Path(os.environ["FAIRVEIL_DATA"]))
    assert hashlib.md5(content).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"


@pytest.mark.data
def test_the_real_cifar10_subset() -> None:
    start = time.perf_counter()
    pool = published(Cifar10Subset, inputs="standardised")
    assert time.perf_counter() - start < 9  # about one second
    assert pool.train.x.shape == (15_000, 3, 32, 32) and pool.test.x.shape == (5_000, 3, 32, 32)
    assert torch.bincount(pool.train.y).tolist() == [1500] * 10 and torch.bincount(pool.test.y).tolist() == [500] * 10
    assert pool.train.y[:5].tolist() == [6, 9, 9, 4, 1]
    mean, deviation = torch.tensor(Cifar10.mean), torch.tensor(Cifar10.deviation)
    assert ((pool.train.x[0, :, 0, 0] * deviation + mean) * 255).round().tolist() == [59, 62, 63]  # a frog's corner
    assert pool.train.x.mean().abs() < 0.02 and (pool.train.x.std() - 1).abs() < 0.02
    assert "all 50,000" in next(iter(pool.public.values()))


@pytest.mark.data
def test_the_real_usps() -> None:
    pool = published(Usps)
    train = [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    test = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    assert torch.bincount(pool.train.y).tolist() == train and torch.bincount(pool.test.y).tolist() == test
    assert pool.train.y[:5].tolist() == [6, 5, 4, 7, 3]
    first = pool.train.x[0, 0, 0] * 2 - 1
    assert torch.allclose(first[6:11], torch.tensor([-1.0, -0.631, 0.862, -0.167, -1.0]), atol=1e-6)
    assert pool.train.x.min() == 0 and pool.train.x.max() == 1


@pytest.mark.data
def test_the_real_cifar10() -> None:
    pool = published(Cifar10)
    assert torch.bincount(pool.train.y).tolist() == [5000] * 10 and torch.bincount(pool.test.y).tolist() == [1000] * 10
    assert pool.train.y[:5].tolist() == [6, 9, 9, 4, 1] and (pool.train.x[0, :, 0, 0] * 255).tolist() == [59, 62, 63]
