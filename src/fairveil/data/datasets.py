"""The datasets by name, and the one way in: `build_federation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from fairveil.data.declared import Clients
from fairveil.data.federation import Dataset, Federation, Pool, Records
from fairveil.data.files import File
from fairveil.data.hospitals import HeartDisease, HospitalCharges
from fairveil.data.images import Cifar10, Cifar10Subset, FashionMnist, Mnist, Usps
from fairveil.data.natural import OfficeCaltech, QmnistWriters, Vehicle
from fairveil.data.partition import Split, parse_split
from fairveil.data.synthetic import Attributes, GaussianClusters, LinearClusters, LoanGroups, Synthetic
from fairveil.errors import UserError, unknown
from fairveil.options import parse
from fairveil.plugins import load_object
from fairveil.streams import Stream


class Digits(Dataset):
    """1,797 handwritten digits of 8 by 8 pixels, in [0, 1], 10 classes; comes with scikit-learn.

    A fifth of the rows is held out as the common test set: the same rows whatever the seed, like the test set
    of a published benchmark, so that runs with different seeds are judged by the same records.
    """

    default_split: ClassVar[Mapping[str, Any]] = {"kind": "iid", "clients": 10}

    def load(self, seed: int) -> Pool:
        """1,438 training rows and 359 test rows, (n, 1, 8, 8)."""
        from sklearn.datasets import load_digits  # slow to import

        x, y = load_digits(return_X_y=True)
        images = torch.from_numpy((x / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
        rows = Records(images, torch.from_numpy(y.astype(np.int64)))
        shuffled = Stream("digits", "held out").numpy.permutation(len(rows))
        test = len(rows) // 5
        return Pool("digits", rows.take(shuffled[test:]), rows.take(shuffled[:test]), 10, record="one image")


DATASETS: dict[str, type[Dataset]] = {
    "attributes": Attributes,
    "cifar10": Cifar10,
    "cifar10-subset": Cifar10Subset,
    "clients": Clients,
    "digits": Digits,
    "fashion-mnist": FashionMnist,
    "file": File,
    "gaussian-clusters": GaussianClusters,
    "heart-disease": HeartDisease,
    "hospital-charges": HospitalCharges,
    "linear-clusters": LinearClusters,
    "loan-groups": LoanGroups,
    "mnist": Mnist,
    "office-caltech10": OfficeCaltech,
    "qmnist-writers": QmnistWriters,
    "synthetic": Synthetic,
    "usps": Usps,
    "vehicle": Vehicle,
}


def build_federation(
    dataset: str, options: Mapping[str, Any], split: Mapping[str, Any] | Split | None, seed: int
) -> Federation:
    """The federation that `[data]` describes.

    Args:
        dataset: a name in `DATASETS`, or "package.module:Name" for a `Dataset` of the user's own.
        options: of the dataset.
        split: how to cut it; None: the dataset's default.
        seed: of the run. Equal arguments give equal data and an equal fingerprint.

    Raises:
        UserError: for a mistake in any of them, before anything is cut.
    """
    chosen, how = check_dataset(dataset, options, split)
    return how.apply(chosen.load(int(seed)), int(seed))


def check_dataset(
    dataset: str, options: Mapping[str, Any], split: Mapping[str, Any] | Split | None
) -> tuple[Dataset, Split]:
    """The dataset and the split that are meant, as far as they can be checked without loading anything."""
    found = find_dataset(dataset)
    return parse(found, options, "data.options"), parse_split(found.default_split if split is None else split)


def find_dataset(name: str) -> type[Dataset]:
    """The dataset of this name, or at this "package.module:Name"."""
    if name in DATASETS:
        return DATASETS[name]
    if ":" not in name:
        raise unknown("data.dataset", name, DATASETS)
    found = load_object("data.dataset", name)
    if not (isinstance(found, type) and issubclass(found, Dataset)):
        raise UserError(
            f'data.dataset = "{name}" is not a dataset.',
            "It must be a class derived from fairveil.data.federation.Dataset, with the method load(seed).",
            f"class {name.partition(':')[2]}(Dataset): ...",
        )
    return found
