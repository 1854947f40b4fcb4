"""Published sets of images, as rows that belong to nobody: MNIST, Fashion-MNIST, CIFAR-10, USPS."""

from __future__ import annotations

import io
import math
import tarfile
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fairveil.data.archive import Archive, Asset, Stored
from fairveil.data.federation import Pool, Records
from fairveil.data.pickles import read_batch
from fairveil.errors import UserError

Size = Annotated[int | None, Field(ge=4, le=64, examples=[16])]  # 60,000 images of 64 by 64 are 1 GB
Labelled = tuple[np.ndarray, np.ndarray]  # images (n, channels, height, width) uint8, labels (n,)


def _idx_files(places: tuple[str, ...], *sha256: str) -> tuple[Asset, ...]:
    """The four files of MNIST, and of what took its form."""
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    each = zip(names, sha256, sizes, strict=True)
    return tuple(Asset(name, sha, size, tuple(at + name for at in places), packed=True) for name, sha, size in each)


MNIST = Archive(
    "mnist",
    "mnist",
    _idx_files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    records=70_000,
    licence="CC BY-SA 3.0",
    source="MNIST, by Y. LeCun, C. Cortes and C. J. C. Burges; the four .gz files of the IDX format.",
)

FASHION_MNIST = Archive(
    "fashion-mnist",
    "fashion_mnist",
    _idx_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    records=70_000,
    licence="MIT",
    source="Fashion-MNIST, by Zalando Research, https://github.com/zalandoresearch/fashion-mnist; also the Debian "
    "package dataset-fashion-mnist.",
    elsewhere=(Path("/usr/share/datasets/fashion-mnist"),),
)

CIFAR10 = Archive(
    "cifar10",
    "cifar10",
    (
        Asset(
            "cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            170_498_071,
            ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
        ),
    ),
    records=60_000,
    licence="none stated; cite A. Krizhevsky, 2009",
    source="CIFAR-10, python version, https://www.cs.toronto.edu/~kriz/cifar.html.",
    unpacked=tuple(
        Asset(f"cifar-10-batches-py/{name}", sha256, size)
        for name, sha256, size in (
            ("data_batch_1", "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd", 31_035_704),
            ("data_batch_2", "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8", 31_035_320),
            ("data_batch_3", "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9", 31_035_999),
            ("data_batch_4", "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b", 31_035_696),
            ("data_batch_5", "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154", 31_035_623),
            ("test_batch", "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831", 31_035_526),
        )
    ),
)

CIFAR10_SUBSET = Archive(
    "cifar10-subset",
    "cifar10",
    (
        Asset(
            "cifar10_15k_5k_uint8.npz",
            "430cb22dcfd6121264c17fbcaacd8c32be20bbf92a5cde2e624b0b32690e373f",
            56_545_382,
        ),
    ),
    records=20_000,
    licence="none stated; cite A. Krizhevsky, 2009",
    source="1,500 training and 500 test images of each class of CIFAR-10, put together for this project. Who does not "
    "have the file can use all of cifar10.",
)

USPS = Archive(
    "usps",
    "usps",
    tuple(
        Asset(name, sha256, size, (f"https://hastie.su.domains/ElemStatLearn/datasets/{name}",), packed=True)
        for name, sha256, size in (
            ("zip.train.gz", "abc9f5c75b997cabe66b5d01727d5a681c69298e1641a8d37b55433a52129dc0", 14_512_253),
            ("zip.test.gz", "6bde17b4f1cd68e0630cd2751d6495b5795d9165ab2dc4a0be8b7002b732f4cc", 2_029_542),
        )
    ),
    records=9_298,
    licence="none stated; made available by AT&T for The Elements of Statistical Learning",
    source="Zip code digits of the U.S. Postal Service, https://hastie.su.domains/ElemStatLearn/data.html.",
)


class Images(Stored):
    """Published images of unsigned bytes, with a test set of their own.

    Attributes:
        inputs: pixels in [0, 1], or from these (pixel - mean) / deviation by the published `mean` and `deviation` of
            each channel over the training images.
        size: pixels to a side, to which images are resized (see `resized`); None: as published.
    """

    default_split: ClassVar[Mapping[str, Any]] = {"kind": "iid", "clients": 10}
    title: ClassVar[str]
    mean: ClassVar[tuple[float, ...]]
    deviation: ClassVar[tuple[float, ...]]
    inputs: Literal["unit", "standardised"] = "unit"
    size: Size = None

    @abstractmethod
    def rows(self) -> tuple[Labelled, Labelled]:
        """For training, and for testing."""

    def load(self, seed: int) -> Pool:
        """All rows; the seed changes nothing."""
        train, test = (self._records(*labelled) for labelled in self.rows())
        public = {}
        if self.inputs == "standardised":
            mean, deviation = (", ".join(f"{value:.4f}" for value in each) for each in (self.mean, self.deviation))
            public[f"mean ({mean}) and standard deviation ({deviation}) of the pixels"] = (
                f"published statistics of the training images of {self.title}, taken as public"
            )
        return Pool(self.archive.name, train, test, 10, record="one image", public=public)

    def _records(self, images: np.ndarray, labels: np.ndarray) -> Records:
        if images.shape[:1] != labels.shape or labels.max() > 9:
            raise _malformed(self.archive.name, f"images {images.shape} and labels {labels.shape} do not fit")
        x = resized(torch.from_numpy(np.divide(images, 255, dtype=np.float32)), self.size)
        if self.inputs == "standardised":
            mean, deviation = (torch.tensor(values).reshape(-1, 1, 1) for values in (self.mean, self.deviation))
            x.sub_(mean).div_(deviation)
        return Records(x, torch.from_numpy(labels.astype(np.int64)))


class Mnist(Images):
    """MNIST: 70,000 handwritten digits of 28 by 28 pixels, 10 classes."""

    archive = MNIST
    title, mean, deviation = "MNIST", (0.1307,), (0.3081,)

    def rows(self) -> tuple[Labelled, Labelled]:
        """60,000 and 10,000 rows, (n, 1, 28, 28)."""
        return self.part("train"), self.part("t10k")

    def part(self, part: Literal["train", "t10k"]) -> Labelled:
        """Images and labels for training, or for testing."""
        images, labels = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
        pixels = read_idx(self.file(images), images, np.dtype("u1"), 3)
        return pixels[:, None], read_idx(self.file(labels), labels, np.dtype("u1"), 1)


class FashionMnist(Mnist):
    """Fashion-MNIST: 70,000 pictures of clothes, 28 by 28 pixels, 10 classes."""

    archive = FASHION_MNIST
    title, mean, deviation = "Fashion-MNIST", (0.2860,), (0.3530,)


class Cifar10(Images):
    """CIFAR-10: 60,000 colour photographs of 32 by 32 pixels, 10 classes."""

    archive = CIFAR10
    title, mean, deviation = "CIFAR-10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def rows(self) -> tuple[Labelled, Labelled]:
        """50,000 and 10,000 rows, (n, 3, 32, 32)."""
        *train, test = (read_batch(data, name) for name, data in self._batches().items())
        images, labels = zip(*train, strict=True)
        return (np.concatenate(images), np.concatenate(labels)), test

    def _batches(self) -> dict[str, bytes]:
        """The files of images, from the archive without unpacking it to disk, or from where it was unpacked."""
        names = [asset.name for asset in self.archive.unpacked]
        if self.archive.files(self.folder) == self.archive.unpacked:
            return {name: self.file(name) for name in names}
        whole = io.BytesIO(self.file(self.archive.assets[0].name))
        with tarfile.open(fileobj=whole, mode="r:gz") as members:
            return {name: _member(members, name) for name in names}


class Cifar10Subset(Images):
    """A third of CIFAR-10: 20,000 colour photographs of 32 by 32 pixels, 10 classes of equal size."""

    archive = CIFAR10_SUBSET
    title, mean, deviation = "CIFAR-10 (all 50,000)", Cifar10.mean, Cifar10.deviation

    def rows(self) -> tuple[Labelled, Labelled]:
        """15,000 and 5,000 rows, (n, 3, 32, 32)."""
        with np.load(io.BytesIO(self.file(self.archive.assets[0].name)), allow_pickle=False) as arrays:
            train, test = (
                (np.ascontiguousarray(arrays[f"x_{part}"].transpose(0, 3, 1, 2)), arrays[f"y_{part}"])
                for part in ("train", "test")
            )
            return train, test


class Usps(Stored):
    """USPS: 9,298 digits from envelopes, 16 by 16 pixels in [0, 1], 10 classes.

    Attributes:
        size: pixels to a side, to which images are resized (see `resized`); None: as published.
    """

    archive = USPS
    default_split: ClassVar[Mapping[str, Any]] = {"kind": "iid", "clients": 10}
    size: Size = None

    def load(self, seed: int) -> Pool:
        """7,291 training and 2,007 test rows, (n, 1, 16, 16); the seed changes nothing."""
        train, test = (self._records(f"zip.{part}.gz") for part in ("train", "test"))
        return Pool("usps", train, test, 10, record="one image")

    def _records(self, name: str) -> Records:
        """A line is a label and 256 numbers from -1 (white) to 1."""
        text = self.file(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # how numpy says that it stopped at a word
            try:
                values = np.fromstring(text.decode("ascii"), np.float32, sep=" ").reshape(text.count(b"\n"), 257)
            except (ValueError, DeprecationWarning) as error:
                raise _malformed(name, f"it is not lines of 257 numbers: {error}") from error
        labels, pixels = values[:, 0], values[:, 1:]
        if not len(values) or not np.isin(labels, range(10)).all() or not (np.abs(pixels) <= 1).all():
            raise _malformed(name, "its labels are not 0 to 9, or its pixels not -1 to 1")
        x = torch.from_numpy((pixels + 1) / 2).reshape(-1, 1, 16, 16)
        return Records(resized(x, self.size), torch.from_numpy(labels.astype(np.int64)))


def resized(x: Tensor, size: int | None) -> Tensor:
    """Images brought to size by size pixels, each by itself: linear interpolation, antialiased where they shrink.

    A pixel becomes a weighted mean of those around it, with the weights of a triangle as wide as the new pixels are far
    apart (but no narrower than two old ones). So values stay in [0, 1].

    Args:
        x: (n, channels, height, width) float32 in [0, 1].
        size: None: as they are.

    Returns:
        (n, channels, size, size) float32; `x` itself if there is nothing to do.
    """
    if size is None or x.shape[2:] == (size, size):
        return x
    return nn.functional.interpolate(x, (size, size), mode="bilinear", antialias=True).clamp_(0, 1)


def read_idx(data: bytes, name: str, dtype: np.dtype[Any], dimensions: int) -> np.ndarray:
    """The array of an IDX file: two zeros, a code for the type, the number of dimensions, each of them, the values.

    Args:
        data: the file, uncompressed.
        name: of the file, for the error.
        dtype, dimensions: what it must hold; unsigned bytes or big-endian 32-bit integers.
    """
    start = 4 + 4 * dimensions
    expected = bytes((0, 0, {"u1": 0x08, ">i4": 0x0C}[dtype.str.lstrip("|")], dimensions))
    if len(data) < start or data[:4] != expected:
        raise _malformed(name, f"it begins with {data[:4].hex()}, not with {expected.hex()}")
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    if len(data) - start != math.prod(shape) * dtype.itemsize or not len(data) > start:
        raise _malformed(name, f"its header says {shape}, but {len(data) - start:,} bytes follow")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _member(members: tarfile.TarFile, name: str) -> bytes:
    try:
        file = members.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise _malformed(name, "the archive does not hold it as a file")
    return file.read()


def _malformed(name: str, why: str) -> UserError:
    return UserError(
        f"{name} is not in the format it should have.",
        f"{why[0].upper()}{why[1:]}. Nothing was loaded.",
        "fairveil data check",
    )
