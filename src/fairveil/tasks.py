"""Tasks that several systems share. A task is a pure function of a block of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fairveil.data.federation import Records
from fairveil.models import Model
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.release import Kept, Reply
from fairveil.privacy.training import NoisyTraining, train
from fairveil.session import Member

EVALUATED = 500  # test records that are scored at once


def local_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" under its own mechanism and releases the update (record level)."""
    trained = train([cast(NoisyTraining, member.mechanism) for member in members], members)
    return [Reply(release, diagnostics=diagnostics) for release, diagnostics in trained]


def bounded_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" by plain SGD and shares its bounded update (client level).

    Inputs: "model" (p,), "learning_rate", "local_epochs", "batch_size". The share is the update, clipped.
    """
    replies = []
    for member in members:
        inputs, records = member.inputs, member.data.train
        start = cast(Tensor, inputs["model"])
        weights, shuffle = start.clone(), member.stream("batches").numpy
        for _ in range(cast(int, inputs["local_epochs"])):
            order = torch.from_numpy(shuffle.permutation(len(records.y)))
            for batch in order.split(cast(int, inputs["batch_size"])):
                gradient = member.model.gradient(weights, records.x[batch], records.y[batch])
                weights = weights - cast(float, inputs["learning_rate"]) * gradient
        share, diagnostics = cast(CohortSums, member.mechanism).share({"update": weights - start})
        replies.append(Reply(share, diagnostics=diagnostics))
    return replies


def choose_model(members: Sequence[Member]) -> list[Reply]:
    """Each client privately chooses among the input "models" (m, p) by its own mechanism, and releases the choice."""
    replies = []
    for member in members:
        release, diagnostics = cast(PrivateChoice, member.mechanism).release(member)
        replies.append(Reply(release, diagnostics=diagnostics))
    return replies


def evaluate(members: Sequence[Member]) -> list[Reply]:
    """Score a model on each client's test records. Nothing leaves: the numbers are diagnostics.

    The model is the input "model", or the client's personal "model" where no input is given. A client without test
    records is not scored.
    """
    replies = []
    for member in members:
        weights = cast(Tensor, member.inputs.get("model", member.personal.get("model")))
        records = member.data.test
        if not len(records.y):
            replies.append(Reply(Kept(), diagnostics={"n": 0.0}))
            continue
        output, losses = _tested(member.model, weights, records)
        scores = {"loss": float(losses.double().mean()), "n": float(len(records.y))}
        if member.model.spec.classes:
            scores["accuracy"] = float((output.argmax(dim=1) == records.y).double().mean())
        else:
            error = output.squeeze(1).double() - records.y.double()
            scores["rmse"] = float(error.square().mean().sqrt())
        replies.append(Reply(Kept(), diagnostics=scores))
    return replies


@torch.no_grad()
def _tested(model: Model, weights: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """Outputs (n, ...) and losses (n,), a few hundred records at a time: a large test set need not fit a network."""
    parameters = model.unflatten(weights)
    parts = zip(records.x.split(EVALUATED), records.y.split(EVALUATED), strict=True)
    outputs, losses = zip(*(model.scored(parameters, x, y) for x, y in parts), strict=True)
    return torch.cat(outputs), torch.cat(losses)
