"""Why a client is worse off: what one more round would do to it, taken apart.

After Du, Xiang and Wu, "Mitigating Unfairness in Differentially-Private Federated Learning" (2025), Theorems 1 and 2.
The next model is w + s + noise, with s the expected step and v the variance of each coordinate of the noise. To second
order, and in expectation over the noise, the loss of client k is then

    L_k(w) + <grad L_k, s> + 1/2 s' H_k s + 1/2 v Tr H_k,

and the gap of client j is the mean of this over clients less its own: below 0 it is worse off. How far a client's
update is from what is made of it is at most a bias (of clipping, or of a small weight) and a variance (of noise).

Departures: the paper prints a minus before the second-order terms of client j in (10a), and sqrt(1/pi) for the mean
of |N(0, 1)| in Theorem 2, which is sqrt(2/pi). All numbers are computed from records without noise: they are for the
metrics table of a simulation, and no algorithm can read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fairveil.algorithms.base import NextRound
from fairveil.data.federation import Records
from fairveil.models import Model
from fairveil.plan import Plan
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import CohortSums, Part, noise_std
from fairveil.privacy.release import Kept, Plain, Reply, Share
from fairveil.session import Call, Engine, Job, Member, Task
from fairveil.store import Score
from fairveil.streams import Stream
from fairveil.tasks import bounded_update

PROBES = 16  # random directions by which a trace is estimated
BATCH = 250  # records that are differentiated at once
HELD = 1 << 25  # numbers of updates that are in memory at once
UPDATES = "the end, explanation"  # one request for raw and bounded updates: the same batches make both

Personal = Mapping[int, Mapping[str, Tensor]]


def mean_gradient(model: Model, weights: Tensor, records: Records) -> tuple[float, Tensor]:
    """The mean loss over records, and its gradient (p,) in float64."""
    loss, total = 0.0, torch.zeros(weights.shape, dtype=torch.float64)
    for x, y in _batches(records, weights.dtype):
        with torch.no_grad():
            loss += float(model.losses(model.unflatten(weights), x, y).double().sum())
        total += len(y) * model.gradient(weights, x, y).double()
    return loss / len(records), total / len(records)


def hessian_product(model: Model, weights: Tensor, records: Records, direction: Tensor) -> Tensor:
    """The Hessian of the mean loss over records, times a direction: (p,), float64."""
    total, along = torch.zeros(weights.shape, dtype=torch.float64), direction.to(weights.dtype)
    for x, y in _batches(records, weights.dtype):
        total += len(y) * model.hessian_product(weights, x, y, along).double()
    return total / len(records)


def trace_probes(model: Model, weights: Tensor, records: Records) -> Tensor:
    """z' H z for random signs z (PROBES,): each estimates the trace of the Hessian without bias (Hutchinson, "A
    Stochastic Estimator of the Trace of the Influence Matrix", 1989).

    The signs are the same for all clients, so that what clients have in common cancels in their difference.
    """
    found = []
    for number in range(PROBES):
        bits = Stream("probes of a trace", number).numpy.integers(0, 2, weights.numel())
        signs = torch.from_numpy(2.0 * bits - 1)
        found.append(torch.dot(signs, hessian_product(model, weights, records, signs)))
    return torch.stack(found)


def gap_terms(
    loss: np.ndarray, slope: np.ndarray, bend: np.ndarray, trace: np.ndarray, variance: float
) -> dict[str, np.ndarray]:
    """The terms of Theorem 1 for every client (clients,): their sum is the expected gap after the step.

    Args:
        loss: of each client at w (clients,).
        slope: <grad L_k, s> (clients,).
        bend: s' H_k s (clients,).
        trace: of H_k by probe (clients, probes).
        variance: of each coordinate of the noise in the step, v.

    Returns:
        "initial gap", "a" and "b" of the mean step, "c" of the curvature along it, "d" of the noise; and "error of d",
        the standard error that the probes leave (NaN of a single one).
    """
    by_probe = 0.5 * variance * (trace.mean(axis=0) - trace)
    probes = trace.shape[1]
    spread = by_probe.std(axis=1, ddof=1) if probes > 1 else np.full(len(trace), np.nan)
    return {
        "initial gap": loss.mean() - loss,
        "a": np.full(len(slope), slope.mean()),
        "b": -slope,
        "c": 0.5 * (bend.mean() - bend),
        "d": by_probe.mean(axis=1),
        "error of d": spread / math.sqrt(probes),
    }


def deviation(update: Tensor, kept: Tensor, std: float) -> dict[str, float]:
    """The terms of Theorem 2: together at least the expected l1 distance of a client's update from what stands for it.

    Args:
        update: of the client, as it trained (p,).
        kept: what of it enters the mean (p,).
        std: of the noise in each coordinate of one client's share of the mean.

    Returns:
        "bias" of clipping and weights, "variance" of the noise; and "kept", how much of the update's length is left
        along it.
    """
    update, kept = update.double(), kept.double()
    square = float(update.square().sum())
    return {
        "bias": float((update - kept).abs().sum()),
        "variance": update.numel() * math.sqrt(2 / math.pi) * std,
        "kept": float(torch.dot(update, kept)) / square if square else 1.0,
    }


def explain_scores(plan: Plan, engine: Engine, number: int, state: object, personal: Personal) -> list[Score]:
    """What weighs on each client in one more round, if the config asks for it.

    Args:
        number: of the last round.
        state: of the algorithm after it.
    """
    if not plan.config.fairness.explain:
        return []
    ahead = plan.algorithm.next_round(plan.facts, state, plan.terms[FEDERATION])
    if ahead is None:
        return []
    part = next(part for part in ahead.mechanism.parts if part.name == "update")
    rate, std = ahead.mechanism.sample_rate, _noise_std(ahead.mechanism, part)
    own = std / (ahead.full * rate * len(plan.facts.size))
    total, scores = torch.zeros(part.shape, dtype=torch.float64), []
    for client, update, share in _updates(plan, engine, ahead, part, personal):
        total += share
        found = deviation(update, share / ahead.full, own)
        scores += [_score(number, client, metric, value) for metric, value in found.items()]
    step = ahead.scale * rate * total  # every client takes part with the same chance
    around = dict(_surroundings(plan, engine, ahead.model, step))
    clients = sorted(client for client, found in around.items() if found["n"])  # without records there is no loss
    if clients:
        columns = {key: np.array([around[c][key] for c in clients]) for key in around[clients[0]]}
        trace = np.stack([columns[f"trace {probe}"] for probe in range(PROBES)], axis=1)
        terms = gap_terms(columns["loss"], columns["slope"], columns["bend"], trace, (ahead.scale * std) ** 2)
        for metric, values in terms.items():
            rows = zip(clients, values.tolist(), columns["n"].tolist(), strict=True)
            scores += [_score(number, client, metric, value, int(n)) for client, value, n in rows]
    return scores


def surroundings(members: Sequence[Member]) -> list[Reply]:
    """The loss of each client around a model: its value, slope and bend along a step, and its curvature in all.

    Inputs: "model" (p,), "step" (p,). Over the client's training records. Nothing leaves: the numbers are diagnostics.
    """
    replies = []
    for member in members:
        weights, step = (cast(Tensor, member.inputs[name]) for name in ("model", "step"))
        records = member.data.train
        found = {"n": float(len(records))}
        if len(records):
            loss, gradient = mean_gradient(member.model, weights, records)
            bend = torch.dot(step, hessian_product(member.model, weights, records, step))
            found |= {"loss": loss, "slope": float(torch.dot(gradient, step)), "bend": float(bend)}
            traces = trace_probes(member.model, weights, records).tolist()
            found |= {f"trace {probe}": value for probe, value in enumerate(traces)}
        replies.append(Reply(Kept(), diagnostics=found))
    return replies


def _surroundings(
    plan: Plan, engine: Engine, model: Tensor, step: Tensor
) -> Iterator[tuple[int, Mapping[str, float]]]:  # fmt: skip
    calls = [Call(client) for client in plan.facts.clients.tolist()]
    shared: dict[str, Plain] = {"model": model, "step": step}
    for client, reply in engine.run(Job(surroundings, "the end, surroundings", shared, calls)):
        yield client, reply.diagnostics


def _updates(
    plan: Plan, engine: Engine, ahead: NextRound, part: Part, personal: Personal
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every client's update as it trains, and its share of the sum, both without noise and of the same batches.

    A task may weigh and clip by itself, before its mechanism does. So the update is that of plain training.
    """
    silent = tuple(replace(each, noise_multiplier=0.0) for each in ahead.mechanism.parts)
    bounded = replace(ahead.mechanism, parts=silent, noised_by=None)  # then whoever is asked takes part
    unbounded = CohortSums((Part("update", part.shape, math.inf, 0.0),), 1.0)
    plain = {name: ahead.inputs[name] for name in ("model", "learning_rate", "local_epochs", "batch_size")}
    clients, together = plan.facts.clients.tolist(), max(8, HELD // plan.facts.parameters)
    for first in range(0, len(clients), together):
        block = clients[first : first + together]
        updates = _shares(engine, bounded_update, plain, unbounded, block, {})
        shares = _shares(engine, ahead.task, ahead.inputs, bounded, block, personal)
        for client in block:
            yield client, updates[client], shares[client]


def _shares(
    engine: Engine, task: Task, inputs: Mapping[str, Plain], mechanism: CohortSums, clients: Sequence[int],
    personal: Personal,
) -> dict[int, Tensor]:  # fmt: skip
    """What clients share by a mechanism without noise: for a simulation alone to see."""
    calls = [Call(client, {}, mechanism, personal.get(client, {})) for client in clients]
    found = {}
    for client, reply in engine.run(Job(task, UPDATES, inputs, calls)):
        found[client] = cast(Share, reply.out).value["update"].clone()  # the memory that it came in is used again
    return found


def _noise_std(mechanism: CohortSums, part: Part) -> float:
    """Of the noise in the sum, where nobody fails: clients that make it together then make somewhat more."""
    sharers, std = mechanism.noised_by, noise_std(part.bound, part.noise_multiplier)
    return std if sharers is None else std * math.sqrt(sharers.clients / (sharers.clients - sharers.tolerated))


def _score(number: int, client: int, metric: str, value: float, n: int | None = None) -> Score:
    return Score(number, client, "train", "explain", metric, value, None, n)


def _batches(records: Records, kind: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Some records at a time, in the precision of the parameters."""
    for x, y in zip(records.x.split(BATCH), records.y.split(BATCH), strict=True):
        yield x.to(kind), y.to(kind) if y.is_floating_point() else y
