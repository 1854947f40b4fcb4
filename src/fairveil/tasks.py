"""Tasks that several systems share. A task is a pure function of a block of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fairveil.privacy.mechanisms import ClientMechanism, CohortSums
from fairveil.privacy.release import Kept, Reply
from fairveil.session import Member


def local_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" under its own mechanism and releases the update (record level)."""
    replies = []
    for member in members:
        release, diagnostics = cast(ClientMechanism, member.mechanism).release(member)
        replies.append(Reply(release, diagnostics=diagnostics))
    return replies


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


def evaluate(members: Sequence[Member]) -> list[Reply]:
    """Score a model on each client's test records. Nothing leaves: the numbers are diagnostics.

    The model is the input "model", or the client's personal "model" where no input is given.
    """
    replies = []
    for member in members:
        weights = cast(Tensor, member.inputs.get("model", member.personal.get("model")))
        records = member.data.test
        with torch.no_grad():
            losses = member.model.losses(member.model.unflatten(weights), records.x, records.y)
        scores = {"loss": float(losses.double().mean()), "n": float(len(records.y))}
        if member.model.spec.classes:
            right = member.model.predict(weights, records.x).argmax(dim=1) == records.y
            scores["accuracy"] = float(right.double().mean())
        else:
            scores["rmse"] = float((2 * losses.double()).mean().sqrt())
        replies.append(Reply(Kept(), diagnostics=scores))
    return replies
