"""The systems, one file each, and their registry."""

from __future__ import annotations

from typing import Any

from fairveil.algorithms.base import Algorithm
from fairveil.algorithms.dp_fedavg import DPFedAvg
from fairveil.algorithms.dp_fedsgd import DPFedSGD
from fairveil.algorithms.fair_fedavg import FairFedAvg
from fairveil.algorithms.fairfed import FairFed
from fairveil.algorithms.fedavg import FedAvg
from fairveil.algorithms.fedfdp import FedFDP
from fairveil.algorithms.global_ import Global
from fairveil.algorithms.ifca import IFCA
from fairveil.algorithms.km_cdpfl import KMCDPFL
from fairveil.algorithms.knn_fl import KnnFL
from fairveil.algorithms.local import Local
from fairveil.algorithms.loss_split import LossSplit
from fairveil.algorithms.metric_pfl import MetricPFL
from fairveil.algorithms.mr_mtl import MRMTL
from fairveil.algorithms.oracle import Oracle
from fairveil.algorithms.pate_fl import PateFL
from fairveil.algorithms.q_fedavg import QFedAvg
from fairveil.algorithms.r_dpcfl import RDPCFL
from fairveil.algorithms.rc_dpfl import RCDPFL
from fairveil.algorithms.root_loss import RootLoss
from fairveil.errors import UserError, unknown
from fairveil.options import shown
from fairveil.plugins import load_object

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    cls.name: cls
    for cls in (
        DPFedAvg,
        DPFedSGD,
        FairFed,
        FairFedAvg,
        FedAvg,
        FedFDP,
        Global,
        IFCA,
        KMCDPFL,
        KnnFL,
        Local,
        LossSplit,
        MetricPFL,
        MRMTL,
        Oracle,
        PateFL,
        QFedAvg,
        RDPCFL,
        RCDPFL,
        RootLoss,
    )
}


def find_algorithm(name: str) -> type[Algorithm[Any]]:
    """The class behind a name of the registry, or behind the user's "package.module:Name"."""
    if ":" not in name:
        if name not in ALGORITHMS:
            raise unknown("algorithm.name", name, ALGORITHMS)
        return ALGORITHMS[name]
    found = load_object("algorithm.name", name)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UserError(
            f"algorithm.name = {shown(name)} is not an algorithm.",
            "It must be a class derived from fairveil.algorithms.base.Algorithm.",
            "see docs/your-own-algorithm.md",
        )
    return found
