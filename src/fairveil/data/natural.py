"""Published data whose records have an owner by nature: a writer, a sensor, the place a picture was taken from."""

from __future__ import annotations

import io
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt, field_validator, model_validator

from fairveil.data.archive import Archive, Asset, Stored
from fairveil.data.federation import Federation, Records
from fairveil.data.images import MNIST, Mnist, read_idx
from fairveil.data.partition import TestFraction, owned
from fairveil.data.shifts import rotate
from fairveil.errors import UserError, nearest
from fairveil.options import shown
from fairveil.streams import Stream

QMNIST_AT = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
QMNIST_WRITERS = Archive(
    "qmnist-writers",
    "qmnist_writers",
    tuple(
        Asset(name, sha256, 1_920_012, (QMNIST_AT + name,), packed=True)
        for name, sha256 in (
            ("qmnist-train-labels-idx2-int.gz", "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5"),
            ("qmnist-test-labels-idx2-int.gz", "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd"),
        )
    ),
    records=70_000,
    licence="BSD 3-Clause (who wrote which digit), CC BY-SA 3.0 (the images, of MNIST)",
    source="QMNIST, by C. Yadav and L. Bottou, https://github.com/facebookresearch/qmnist.",
    also=(MNIST,),
)

VEHICLE = Archive(
    "vehicle",
    "vehicle23",
    (Asset("vehicle23_train.npz", "1785164583d5f7c969a2310796b2c119cc0962433fca7e1e4df8b267cbca20cb", 689_034),),
    records=1_860,
    licence="MIT",
    source="Sensors by a road, of M. Duarte and Y. H. Hu, 2004: the part that https://github.com/litian96/ditto gives, "
    "as arrays x, y and client.",
)

DOMAINS = ("amazon", "caltech", "dslr", "webcam")
OFFICE_CALTECH = Archive(
    "office-caltech10",
    "office_caltech10_surf",
    tuple(
        Asset(f"{domain}_SURF_L10.mat", sha256, size)
        for domain, sha256, size in zip(
            DOMAINS,
            (
                "df32548b994e18d364c99e1f317e1fae100597259f0423a41b90f4f68187bb1f",
                "4f9334c8ced489d5054de97a5fd51a61f017f3bcd1f38c9a85c6d78cb9d7bda5",
                "44d673c68e1d07b837893aa74dba3b986e4a6cc3fd66f0dd357683bdef059216",
                "a6a9c78b4b7181dfbb58bcfd351d4ebd737f171c31247b8884948aa156d3f700",
            ),
            (104_970, 150_751, 18_348, 32_406),
            strict=True,
        )
    ),
    records=2_533,
    licence="none stated; cite B. Gong, Y. Shi, F. Sha and K. Grauman, 2012",
    source="Office-Caltech10, the SURF features of B. Gong et al., 2012 (the domain caltech is Caltech10_SURF_L10.mat "
    "there); the authors' page is gone, copies are in public collections for domain adaptation.",
)


class QmnistWriters(Stored):
    """MNIST by writer: 539 people (836 with the test set) and the digits that each of them wrote.

    QMNIST says who wrote each digit: employees of the Census Bureau, or students of a high school, whose hand is
    harder to read.

    Attributes:
        part: writers of MNIST's training set (19 to 131 digits each), of its test set (8 to 130), or both. Nobody
            wrote for both.
        rotated: share of the writers whose digits are turned, drawn at random. Above 0 the groups are who is upright
            and who is turned.
        degrees: how far, counter-clockwise.
        target: the "digit", or its "parity": class 1 if it is even.
        inverted: whether class 1 means odd for those who are turned, as in Galli, Jung, Biswas, Palamidessi,
            Cucinotta, "Advancing Personalized Federated Learning: Group Privacy, Fairness, and Beyond", 2023.
        test_fraction: share of each writer's digits kept for testing, at least one.
    """

    archive = QMNIST_WRITERS
    part: Literal["train", "test", "both"] = "train"
    rotated: float = Field(0.0, ge=0, lt=1)
    degrees: float = 90.0
    target: Literal["digit", "parity"] = "digit"
    inverted: bool = False
    test_fraction: TestFraction = 0.2

    @model_validator(mode="after")
    def _something_to_invert(self) -> Self:
        if self.inverted and (self.target != "parity" or not self.rotated):
            what = "the parity" if self.target != "parity" else "writers whose digits are turned"
            raise UserError(
                f"data.options.inverted = true needs {what}.",
                "It is the parity that is inverted, for those who are turned; else nothing would be.",
                'data.options.target = "parity" and data.options.rotated = 0.2, or data.options.inverted = false',
            )
        return self

    @model_validator(mode="after")
    def _turned_at_all(self) -> Self:
        if self.rotated and self.degrees % 360 == 0:
            raise UserError(
                f"data.options.degrees = {self.degrees:g} turns nothing.",
                "The two groups would be alike under different names.",
                "data.options.degrees = 90, or data.options.rotated = 0",
            )
        return self

    def load(self, seed: int) -> Federation:
        """A client for each writer, in the order of their numbers."""
        parts = [self._part(part) for part in ("train", "test") if self.part in (part, "both")]
        images, labels, series, writers = (np.concatenate(each) for each in zip(*parts, strict=True))
        numbers, client = np.unique(writers, return_inverse=True)
        group, groups = np.zeros(len(numbers), dtype=np.int64), ("census employees", "students")
        group[client] = series == 4  # each writer is in one series only
        x = torch.from_numpy(np.divide(images, 255, dtype=np.float32))
        if self.rotated:
            group, groups = self._turned(len(numbers), seed), ("upright", "turned")
            turned = torch.from_numpy(np.flatnonzero(group[client]))
            x[turned] = rotate(x[turned], self.degrees)
        y = labels.astype(np.int64)
        if self.target == "parity":
            y = (y + 1 + (group[client] if self.inverted else 0)) % 2
        return owned(
            self.archive.name, Records(x, torch.from_numpy(y)), client, classes=2 if self.target == "parity" else 10,
            test_fraction=self.test_fraction, seed=seed, group=group, groups=groups,
            names=tuple(f"writer {number}" for number in numbers), record="one image",
        )  # fmt: skip

    def _turned(self, writers: int, seed: int) -> np.ndarray:
        """(writers,) 1 for those whose digits are turned, else 0; there is at least one of each."""
        many = int(np.clip(round(self.rotated * writers), 1, writers - 1))
        turned = np.zeros(writers, dtype=np.int64)
        turned[Stream(seed, self.archive.name, "turned").numpy.permutation(writers)[:many]] = 1
        return turned

    def _part(self, part: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Images, labels, series and writers, row by row; QMNIST's test set goes on where that of MNIST ends."""
        images, labels = Mnist(folder=self.folder).part("train" if part == "train" else "t10k")
        name = f"qmnist-{part}-labels-idx2-int.gz"
        columns = read_idx(self.file(name), name, np.dtype(">i4"), 2)[: len(labels)]
        if not np.array_equal(columns[:, 0], labels):
            raise UserError(
                f"{name} does not belong to these images.",
                "Its labels are not those of MNIST, so that digits would be given to people who did not write them.",
                f"fairveil data check {self.archive.name}",
            )
        return images, labels, columns[:, 1], columns[:, 2]


class Vehicle(Stored):
    """Vehicle: 23 road-side sensors that tell two kinds of vehicle apart, 1,860 time windows of 100 features.

    Attributes:
        test_fraction: share of each sensor's records (7 to 534) kept for testing, at least one.
    """

    archive = VEHICLE
    test_fraction: TestFraction = 0.2

    def load(self, seed: int) -> Federation:
        """A client for each sensor; labels 0 and 1 for -1 and +1."""
        with np.load(io.BytesIO(self.file(self.archive.assets[0].name)), allow_pickle=False) as arrays:
            x, y, client = (arrays[name] for name in ("x", "y", "client"))
        return owned(
            self.archive.name, Records(torch.from_numpy(x), torch.from_numpy((y > 0).astype(np.int64))),
            client.astype(np.int64), classes=2, test_fraction=self.test_fraction, seed=seed,
            names=tuple(f"sensor {number}" for number in range(client.max() + 1)),
            record="one time window of a sensor",
            public={
                "mean and standard deviation of each sensor's own features": "the publishers standardised each client "
                "with exact statistics of its own data, which no noise protects; taken as public with the data"
            },
        )  # fmt: skip


class OfficeCaltech(Stored):
    """Office-Caltech10: 2,533 pictures of 10 things from 4 sources (domains), as 800 visual words each.

    A record is the square root of the share of each word in its picture: a vector of length 1 that depends on that
    record alone.

    Attributes:
        domains: which of them; so that clients may hold some, and a server others.
        clients_per_domain: among whom the records of each domain are dealt out evenly, at random.
        test_fraction: share of each client's records kept for testing, at least one.
    """

    archive = OFFICE_CALTECH
    domains: tuple[str, ...] = Field(DOMAINS, min_length=1)
    clients_per_domain: PositiveInt = 1
    test_fraction: TestFraction = 0.2

    @field_validator("domains")
    @classmethod
    def _known_and_distinct(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        strange = next((domain for domain in domains if domain not in DOMAINS), None)
        if strange is not None or len(set(domains)) < len(domains):
            meant = dict.fromkeys(nearest(domain, DOMAINS) for domain in domains)
            right = [domain for domain in meant if domain is not None]
            raise UserError(
                f"data.options.domains = {shown(domains)} "
                + ("names one twice." if strange is None else f"holds {shown(strange)}, which is not known."),
                f"There are: {', '.join(DOMAINS)}; each of them is taken once. Nothing was loaded.",
                f"data.options.domains = {shown(right or DOMAINS)}",
            )
        return tuple(domain for domain in DOMAINS if domain in domains)  # in whatever order they were typed

    def load(self, seed: int) -> Federation:
        """The clients of each domain, domain after domain; the domains are the groups."""
        domains = self.domains
        each = [_read_mat(self.file(name), name) for name in (f"{domain}_SURF_L10.mat" for domain in domains)]
        sizes, many = [len(labels) for _, labels in each], self.clients_per_domain
        if many > min(sizes) // 2:
            raise UserError(
                f"data.options.clients_per_domain = {many} is too many.",
                f"{domains[int(np.argmin(sizes))]} has {min(sizes):,} records; a client needs one for training and one "
                "for testing.",
                f"data.options.clients_per_domain = {min(sizes) // 2}",
            )
        client = np.concatenate(
            [
                number * many + Stream(seed, self.archive.name, domain).numpy.permutation(np.arange(size) % many)
                for number, (domain, size) in enumerate(zip(domains, sizes, strict=True))
            ]
        )
        counts = np.concatenate([counts for counts, _ in each]).astype(np.float64)
        x = np.sqrt(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
        y = np.concatenate([labels for _, labels in each]).astype(np.int64) - 1
        numbers = [f" {number + 1}" for number in range(many)] if many > 1 else [""]
        return owned(
            self.archive.name, Records(torch.from_numpy(x), torch.from_numpy(y)), client, classes=10,
            test_fraction=self.test_fraction, seed=seed, group=np.repeat(np.arange(len(domains)), many), groups=domains,
            names=tuple(f"{domain}{number}" for domain in domains for number in numbers), record="one picture",
            public={
                "the 800 visual words": "the publishers found them by clustering pictures of the domain amazon, which "
                "no noise protects; taken as public with the data"
            },
        )  # fmt: skip


def _read_mat(data: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Counts of words (n, 800) and labels (n,) from 1 to 10; refuses a file that holds anything else."""
    from scipy import io as scipy_io  # slow to import

    try:
        if data[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
            raise ValueError("it is not a MAT-file of version 5")
        held = {key: kind for key, _, kind in scipy_io.whosmat(io.BytesIO(data))}
        numbers = {"double", "single", "uint8", "uint16", "int16", "int32"}
        if set(held) != {"fts", "labels"} or not set(held.values()) <= numbers:
            raise ValueError(f"it holds {held}, not the numbers fts and labels")
        arrays = scipy_io.loadmat(io.BytesIO(data), variable_names=("fts", "labels"))
        counts, labels = arrays["fts"], arrays["labels"]
        if counts.ndim != 2 or labels.shape != (len(counts), 1) or not set(np.unique(labels)) <= set(range(1, 11)):
            raise ValueError(f"fts is {counts.shape} and labels {labels.shape}, not (n, words) and (n, 1) from 1 to 10")
        if not (counts >= 0).all() or not (counts.sum(axis=1) > 0).all():
            raise ValueError("a record has no words, or a negative number of one")
    except Exception as error:  # the reader fails in any way there is on a broken file
        raise UserError(
            f"{name} is not a file of Office-Caltech10.",
            f"{type(error).__name__}: {error}. Nothing was loaded.",
            "fairveil data check office-caltech10",
        ) from error
    return counts, labels[:, 0]
