"""How many clients should share a call: measured once for each kind of model and machine, and remembered.

Small models are bound by the number of calls, not by arithmetic, so that twenty clients in one call take little longer
than one. Large ones gain nothing. The choice changes no result.
"""

from __future__ import annotations

import platform
import time

import torch

from fairveil.cache import kept
from fairveil.data.federation import Records, side_by_side
from fairveil.models import Model
from fairveil.privacy.gradients import clipped_sums, path_of

BATCH, MOST = 32, 64  # records of a client in the trial; clients at once
LONG = 0.1  # seconds: a call that takes so long is not bound by its overhead
NUMBERS = 1 << 25  # that the models of a block may hold: their weights, gradients and noise are in memory at once


def best_block(model: Model) -> int:
    """The number of clients at which a training step takes least time for each."""
    if not path_of(model).together:
        return 1  # they would be worked on one after the other anyway
    machine = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability())
    (block,) = kept(("block", repr(model.spec), torch.__version__, *machine), lambda: [float(_measured(model))])
    return int(block)


def _measured(model: Model) -> int:
    """Double the block until a client no longer gains a tenth by it."""
    x = torch.zeros(BATCH, *model.spec.features)
    kind = torch.int64 if model.spec.classes else torch.float32
    records = Records(x, torch.zeros(BATCH, *model.spec.target, dtype=kind))
    weights, rows = model.flatten(model.module), torch.arange(BATCH)

    def each(clients: int) -> float:
        many, held = weights.repeat(clients, 1), side_by_side([records] * clients)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            clipped_sums(model, many, held, [rows] * clients, 1.0)
            times.append(time.perf_counter() - started)
        return min(times[1:]) / clients

    block, best = 1, each(1)
    while best * block < LONG and 2 * block <= min(MOST, NUMBERS // model.parameters):
        found = each(2 * block)
        if found > 0.9 * best:
            break
        block, best = 2 * block, found
    return block
