"""Tasks that several systems share. A task is a pure function of a block of clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fairveil.data.federation import Records
from fairveil.errors import UserError
from fairveil.models import Model
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.fair_training import FairTraining, train_fairly
from fairveil.privacy.gradients import clipped_sums, path_of
from fairveil.privacy.mechanisms import CohortSums
from fairveil.privacy.metric import Sanitiser, sanitised
from fairveil.privacy.release import Kept, Reply
from fairveil.privacy.training import NoisyTraining, train
from fairveil.remote import Array, Count, deployable
from fairveil.session import Member

EVALUATED = 500  # test records that are scored at once
TUNED = 512  # training records in one call of a full-batch step


@deployable(
    by=NoisyTraining, model=Array(("p",)), learning_rate=float, centre=Array(("p",)), pull=float, pull_inside=bool,
    optional=("centre", "pull", "pull_inside"),
)  # fmt: skip
def local_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" under its own mechanism and releases the update (record level)."""
    trained = train([cast(NoisyTraining, member.mechanism) for member in members], members)
    return [Reply(release, diagnostics=diagnostics) for release, diagnostics in trained]


@deployable(by=FairTraining, model=Array(("p",)), learning_rate=float, penalty=float, global_loss=float)
def fair_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" with fair clipping, and releases the update and its mean loss."""
    trained = train_fairly([cast(FairTraining, member.mechanism) for member in members], members)
    return [Reply(release, diagnostics=diagnostics) for release, diagnostics in trained]


@deployable(by=CohortSums, model=Array(("p",)), learning_rate=float, local_epochs=Count(), batch_size=Count())
def bounded_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the input "model" by plain SGD and shares its bounded update (client level).

    Inputs: "model" (p,), "learning_rate", "local_epochs", "batch_size". The share is the update, clipped; of a client
    that does not take part it is noise alone, and it does not train.
    """
    by = [cast(CohortSums, member.mechanism) for member in members]
    starts = torch.stack([cast(Tensor, member.inputs["model"]) for member in members])
    updates = torch.zeros_like(starts)
    there = [k for k, member in enumerate(members) if by[k].takes_part(member)]
    if there:
        updates[there] = descent([members[k] for k in there], starts[there]) - starts[there]
    replies = []
    for member, mechanism, update in zip(members, by, updates, strict=True):
        share, diagnostics = mechanism.share({"update": update}, member)
        replies.append(Reply(share, diagnostics=diagnostics))
    return replies


def descent(members: Sequence[Member], starts: Tensor) -> Tensor:
    """Where plain SGD on each client's own records leads from its start: (clients, p).

    Inputs: "learning_rate", "local_epochs", "batch_size". Clients of small models take their steps together, by the way
    of private training without its bound. What a client gets does not depend on the others.
    """
    model, together = members[0].model, _together(members[0].model)
    weights = starts.clone()
    left = [_batches(member) for member in members]
    while rows := {k: batch for k, batches in enumerate(left) if (batch := next(batches, None)) is not None}:
        records = [members[k].data.train for k in rows]
        if together:
            sums = clipped_sums(model, weights[list(rows)], records, list(rows.values()), math.inf).total
            sums = sums.to(weights.dtype)  # else the long batch of one client would make the others' sums more exact
            gradients = sums / torch.tensor([len(batch) for batch in rows.values()]).unsqueeze(1)
        else:
            each = zip(rows.items(), records, strict=True)
            steps = [model.gradient(weights[k], held.x[batch], held.y[batch]) for (k, batch), held in each]
            gradients = torch.stack(steps)
        rate = torch.tensor([cast(float, members[k].inputs["learning_rate"]) for k in rows]).unsqueeze(1)
        weights[list(rows)] -= (rate * gradients).to(weights.dtype)
    return weights


def _batches(member: Member) -> Iterator[Tensor]:
    """The rows of a client's records in every step of its training."""
    shuffle, inputs = member.stream("batches").numpy, member.inputs
    for _ in range(cast(int, inputs["local_epochs"])):
        order = torch.from_numpy(shuffle.permutation(len(member.data.train.y)))
        yield from order.split(cast(int, inputs["batch_size"]))


def _together(model: Model) -> bool:
    """Whether several clients may share a call."""
    try:
        return path_of(model).together
    except UserError:
        return False  # there are no gradients of single records; plain SGD needs none


@deployable(by=Sanitiser, models=Array(("m", "p")), learning_rate=float, local_epochs=Count(), batch_size=Count())
def personal_update(members: Sequence[Member]) -> list[Reply]:
    """Each client trains the hypothesis that suits it best by plain SGD, and releases the local model with noise.

    Inputs: "models" (m, p), and those of `descent`. Which hypothesis it took is not said.
    """
    offered = [cast(Tensor, member.inputs["models"]) for member in members]
    pairs = list(zip(members, offered, strict=True))
    chosen = [best_model(member.model, models, member.data.train) for member, models in pairs]
    starts = torch.stack([models[j] for models, j in zip(offered, chosen, strict=True)])
    released = sanitised(cast(Sanitiser, members[0].mechanism), members, chosen, descent(members, starts))
    return [Reply(release, diagnostics=diagnostics) for release, diagnostics in released]


@deployable(by=PrivateChoice, models=Array(("m", "p")), prior=Array(("m",), torch.float64), optional=("prior",))
def choose_model(members: Sequence[Member]) -> list[Reply]:
    """Each client privately chooses among the input "models" (m, p) by its own mechanism, and releases the choice."""
    replies = []
    for member in members:
        release, diagnostics = cast(PrivateChoice, member.mechanism).release(member)
        replies.append(Reply(release, diagnostics=diagnostics))
    return replies


@deployable(model=Array(("p",)), models=Array(("m", "p")), split=str, optional=("model", "models", "split"))
def evaluate(members: Sequence[Member]) -> list[Reply]:
    """Score a model on each client's test records. Nothing leaves: the numbers are diagnostics.

    The model is the input "model"; or that of the input "models" which suits the client's training records best, and
    its number is the diagnostic "choice"; or the client's personal "model" where no input is given. A client without
    such records is not scored: its "n" is 0.

    Inputs: "split", which records ("test" if left out). "by", an attribute of the test records: the scores of those
    that have its value v are told beside the others, as "accuracy@v" and so on.
    """
    replies = []
    for member in members:
        weights, choice = _serving(member)  # before a look at the records: whether there are any is for nobody to know
        records = member.data.train if member.inputs.get("split") == "train" else member.data.test
        if not len(records.y):
            replies.append(Reply(Kept(), diagnostics={"n": 0.0} | choice))
            continue
        replies.append(Reply(Kept(), diagnostics=_judged(member, weights, records) | choice))
    return replies


def finetune(members: Sequence[Member]) -> list[Reply]:
    """Each client fine-tunes the model that serves it on its own training records, for itself. Nothing leaves.

    Inputs: those of `evaluate` that name the serving model, and "by"; "steps" and "learning_rate" of full-batch
    gradient descent; "initial" (p,) and "local_steps" of the model that the client trains alone, from what all begin
    with.

    The tuned model is kept in the personal state as "finetuned". Scores on test records are told of both models as
    "finetuned/accuracy", "local/accuracy" and so on, and "finetuned/taken back" is 1 where training has diverged: see
    `descended`. Test records decide nothing. A client without them has a tuned model, and is not scored.
    """
    replies = []
    for member in members:
        inputs, rate = member.inputs, cast(float, member.inputs["learning_rate"])
        served, initial = _serving(member)[0], cast(Tensor, inputs["initial"])
        scores: dict[str, float] = {}
        kept = dict(member.personal)
        for name, start, steps in (("finetuned", served, "steps"), ("local", initial, "local_steps")):
            weights = descended(member.model, start, member.data.train, cast(int, inputs[steps]), rate)
            if name == "finetuned":
                kept[name] = start if weights is None else weights
            if len(member.data.test.y):
                found = _judged(member, start if weights is None else weights, member.data.test)
                scores |= {f"{name}/{key}": value for key, value in found.items()}
                scores[f"{name}/taken back"] = float(weights is None)
        replies.append(Reply(Kept(), keep=kept, diagnostics=scores))
    return replies


def descended(model: Model, start: Tensor, records: Records, steps: int, learning_rate: float) -> Tensor | None:
    """Where full-batch gradient descent leads from `start` (p,): (p,). It draws nothing.

    None: the loss on these records is not lower than before. Such small steps down a gradient lower it, unless they are
    too long and the training diverges (or there is nothing to train on): then the start is the better model.
    """
    if not len(records.y):
        return None
    weights = start
    for _ in range(steps):
        weights = weights - learning_rate * _full_gradient(model, weights, records)
    before, after = (float(_tested(model, w, records)[1].double().mean()) for w in (start, weights))
    return weights if weights.isfinite().all() and after < before else None


def _full_gradient(model: Model, weights: Tensor, records: Records) -> Tensor:
    """The gradient (p,) of the mean loss over all records, some hundreds at a time."""
    n = len(records.y)
    if n <= TUNED:
        return model.gradient(weights, records.x, records.y)
    parts = zip(records.x.split(TUNED), records.y.split(TUNED), strict=True)
    return torch.stack([model.gradient(weights, x, y) * (len(y) / n) for x, y in parts]).sum(dim=0)


def _judged(member: Member, weights: Tensor, records: Records) -> dict[str, float]:
    """The scores of a model on a client's records, and apart by the attribute that the input "by" names."""
    output, losses = _tested(member.model, weights, records)
    scores = _scores(member.model, output, losses, records.y)
    if by := cast(str, member.inputs.get("by", "")):
        value = torch.from_numpy(member.data.attributes[by])
        for v in value.unique().tolist():
            of = value == v
            found = _scores(member.model, output[of], losses[of], records.y[of])
            scores |= {f"{key}@{v}": n for key, n in found.items()}
    return scores


def _serving(member: Member) -> tuple[Tensor, dict[str, float]]:
    """The model that serves a client, and the diagnostic that says which it chose, if it had a choice."""
    if "models" in member.inputs:
        models = cast(Tensor, member.inputs["models"])
        chosen = best_model(member.model, models, member.data.train)
        return models[chosen], {"choice": float(chosen)}
    weights = cast(Tensor | None, member.inputs.get("model", member.personal.get("model")))
    if weights is None:
        raise ValueError("there is no model to score")
    return weights, {}


@torch.no_grad()
def best_model(model: Model, models: Tensor, records: Records) -> int:
    """Which of the models (m, p) has the lowest mean loss on the records: the first among equals.

    One whose loss is not a number is never chosen, unless none has one.
    """
    losses = torch.tensor([mean_loss(model, weights, records) for weights in models], dtype=torch.float64)
    return int(losses.nan_to_num(nan=torch.inf).argmin())


@torch.no_grad()
def mean_loss(model: Model, weights: Tensor, records: Records) -> float:
    """The mean loss of a model (p,) on records."""
    return float(_tested(model, weights, records)[1].double().mean())


def _scores(model: Model, output: Tensor, losses: Tensor, y: Tensor) -> dict[str, float]:
    scores = {"loss": float(losses.double().mean()), "n": float(len(y))}
    if y.is_floating_point():
        scores["rmse"] = float((output.squeeze(1).double() - y.double()).square().mean().sqrt())
    else:
        scores["accuracy"] = float(model.right(output, y).double().mean())
    return scores


def confuse(members: Sequence[Member]) -> list[Reply]:
    """How often a model, given as in `evaluate`, takes one class for another on each client's test records.

    Where a client has a decision, its classes are what is decided about the true number and the predicted one. The
    diagnostics "attribute/v/actual/predicted" count records that have value v of an attribute; "/0/..." all.
    """
    replies = []
    for member in members:
        weights, choice = _serving(member)
        records, counts = member.data.test, Counter[str]()
        if len(records.y):
            output, decision = _tested(member.model, weights, records)[0], member.data.decision
            actual, predicted = (
                (records.y, output.argmax(dim=1))
                if decision is None
                else (decision.about(records.y), decision.about(output[:, 0]))
            )
            pairs = list(zip(actual.tolist(), predicted.tolist(), strict=True))
            for name, values in {"": np.zeros(len(pairs), int), **member.data.attributes}.items():
                counts.update(f"{name}/{v}/{a}/{p}" for v, (a, p) in zip(values.tolist(), pairs, strict=True))
        replies.append(Reply(Kept(), diagnostics={key: float(n) for key, n in counts.items()} | choice))
    return replies


@torch.no_grad()
def _tested(model: Model, weights: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """Outputs (n, ...) and losses (n,), a few hundred records at a time: a large test set need not fit a network."""
    parameters = model.unflatten(weights)
    parts = zip(records.x.split(EVALUATED), records.y.split(EVALUATED), strict=True)
    outputs, losses = zip(*(model.scored(parameters, x, y) for x, y in parts), strict=True)
    return torch.cat(outputs), torch.cat(losses)
