"""How well the clients are served: scores on test records, what was taken for what, and what privacy has cost.

The numbers go to the metrics table only, and no algorithm can read them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairveil.cache import kept
from fairveil.data.federation import Federation, Records
from fairveil.models import Model
from fairveil.plan import Plan
from fairveil.privacy.accounting import ORDERS, rdp_epsilon
from fairveil.privacy.consensus import smoothed_epsilon
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.release import Plain
from fairveil.privacy.statement import json_number
from fairveil.privacy.votes import which_answered
from fairveil.serving import PERSONAL, Served, diverged
from fairveil.session import Call, Engine, Job, Offer, Pick, Task
from fairveil.store import Score, Store, of_records
from fairveil.streams import Stream
from fairveil.tasks import confuse, evaluate, finetune

Personal = Mapping[int, Mapping[str, Tensor]]
Scales = tuple[np.ndarray, np.ndarray] | None

# the recipe of a reference model: Adam, its rate falling to 0, and enough steps to come near the end whatever the
# number of records (a step moves a weight by about the rate: in a thousand at 0.001 a linear model does not get there)
EPOCHS, LEAST_STEPS, BATCH, RATE = 20, 4000, 64, 3e-3


def scores_of(plan: Plan, engine: Engine, number: int, served: Served, personal: Personal) -> list[Score]:
    """Score the served models on the clients' test records, and by the attribute that the run is judged by."""
    by = _attribute(plan)
    scores = []
    shared: dict[str, Plain] = {"by": by} if by else {}
    for clients, row, values in _asked(plan, engine, evaluate, f"round {number}, evaluation", served, personal, shared):
        if not all(math.isfinite(value) for value in values.values()):
            raise diverged(number, f"the loss of client {clients[0]}")
        scores += _rows(plan, number, "served", clients, row, values)
    return scores


def finetuned(
    plan: Plan, engine: Engine, number: int, served: Served, personal: Personal, initial: Tensor
) -> tuple[list[Score], dict[int, dict[str, Tensor]]]:
    """Let every client fine-tune the model that serves it, if the config asks for it.

    Returns:
        the scores of the fine-tuned models and of those that clients train alone, from `initial`; and by client the
        personal state, with the fine-tuned model in it.
    """
    config, by = plan.config.finetune, _attribute(plan)
    if config is None:
        return [], {}
    shared: dict[str, Plain] = {**config.model_dump(), "initial": initial} | ({"by": by} if by else {})
    calls = [_call(served, personal, client) for client in plan.facts.clients.tolist()]
    scores, kept = [], {}
    for client, reply in engine.run(Job(finetune, "the end, fine-tuning", _with_offer(shared, served), calls)):
        # clones: the memory that it came in holds the other replies as well, and would stay
        kept[client] = {name: value.clone() for name, value in (reply.keep or {}).items()}
        for model in PERSONAL:
            own = {k.removeprefix(f"{model}/"): v for k, v in reply.diagnostics.items() if k.startswith(f"{model}/")}
            if not all(math.isfinite(value) for value in own.values()):
                raise diverged(number, f"the {model} loss of client {client}", "a smaller finetune.learning_rate")
            scores += _rows(plan, number, model, [client], None, own)
    return scores, dict(sorted(kept.items()))


def _attribute(plan: Plan) -> str:
    """The attribute of the records that the run is judged by; empty: by groups of clients."""
    groups = plan.config.fairness.groups
    return "" if groups == "cluster" else groups


def _rows(
    plan: Plan, number: int, model: str, clients: Sequence[int], row: int | None, values: Mapping[str, float]
) -> list[Score]:
    """Rows of the metrics table, from what a task tells of a model: "accuracy", "accuracy@v", "n" ..."""
    by, scores = _attribute(plan), []
    for key, value in values.items():
        metric, _, of = key.partition("@")
        n = int(values[f"n@{of}" if of else "n"])  # 0: nothing to be tested on, and no score
        split = of_records(by, plan.federation.attributes[by][int(of)]) if of else "test"
        if metric != "n":
            scores += [Score(number, c, split, model, metric, value, row, n) for c in clients]
    return scores


def save_confusion(plan: Plan, engine: Engine, store: Store, served: Served, personal: Personal) -> None:
    """Count what the served models take for what, in all and by every attribute of the records.

    Where clients share their test records and their model, one of them stands for all.
    """
    if not plan.facts.classes and not plan.federation.decided:
        return
    if plan.facts.several:  # no class is taken for another; so demographic parity and the like are not told either
        return
    rows, seen = [], set()
    found = _asked(plan, engine, confuse, "the end, confusion", served, personal, {})
    for clients, row, counts in sorted(found, key=lambda one: one[0][0]):
        alike = (
            clients[0] if row is None or not plan.federation.common_tests else (row, int(plan.facts.group[clients[0]]))
        )
        if alike in seen:
            continue
        seen.add(alike)
        for key, n in counts.items():
            attribute, value, actual, predicted = key.rsplit("/", 3)
            name = plan.federation.attributes[attribute][int(value)] if attribute else ""
            rows.append((clients[0], attribute, name, int(actual), int(predicted), int(n)))
    store.save_confusion(rows)


def cost_scores(
    plan: Plan, engine: Engine, number: int, served: Served, personal: Personal, federation: Federation,
    scales: Scales,
) -> list[Score]:  # fmt: skip
    """What the cost of privacy is measured by, if the config asks for it: reference models, on test and training
    records, and the served ones on training records too."""
    if plan.config.fairness.reference is None:
        return []
    main = "accuracy" if plan.facts.classes else "rmse"
    group = plan.facts.group
    scores = []
    for clients, row, values in _asked(plan, engine, evaluate, "the end, training", served, personal, TRAINING):
        n = int(values["n"])
        for metric in (main, "loss"):
            scores += [Score(number, c, "train", "served", metric, values[metric], row, n) for c in clients]

    def compute() -> list[float]:
        models = torch.stack([reference_model(plan.model, federation, g) for g in range(len(federation.groups))])
        return _reference_scores(plan, engine, Pick(models, group), main)

    # numbers, and not the models: those would be unprotected copies of the records
    scaled = None if scales is None else [scale.tolist() for scale in scales]
    of = (federation.fingerprint, repr(plan.config.model_spec(federation)), plan.code, scaled)
    found = kept(("reference/2", version("torch"), EPOCHS, LEAST_STEPS, BATCH, RATE, *of), compute)
    for client, six in enumerate(np.reshape(found, (-1, 6)).tolist()):
        for split, (first, loss, n) in (("test", six[:3]), ("train", six[3:])):
            for metric, value in ((main, first), ("loss", loss)) if n else ():
                scores.append(Score(number, client, split, "reference", metric, value, int(group[client]), int(n)))
    return scores


TRAINING: Mapping[str, Plain] = {"split": "train"}


def _reference_scores(plan: Plan, engine: Engine, models: Pick, main: str) -> list[float]:
    """By client: main metric, loss and number of test records, and the same of training records."""
    table = np.zeros((len(models.index), 6))
    for place, shared in ((0, {}), (3, TRAINING)):
        for clients, _, values in _asked(plan, engine, evaluate, "the end, reference", models, {}, shared):
            if values["n"]:
                table[clients, place : place + 3] = values[main], values["loss"], values["n"]
    return [float(value) for value in table.ravel()]


def reference_model(model: Model, federation: Federation, group: int) -> Tensor:
    """A model (p,) of all training records of a group, without any privacy: for evaluation only.

    It estimates how well the group could be served at best. One thread: the same numbers on any machine.
    """
    members = np.flatnonzero(federation.group == group).tolist()
    weights = model.initial(Stream("reference", group)).requires_grad_()
    if not members:
        return weights.detach()
    parts = [federation.load(client).train for client in members]
    records = Records(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    optimiser, shuffle = torch.optim.Adam([weights], RATE), Stream("reference batches", group).numpy
    steps = left = max(LEAST_STEPS, EPOCHS * math.ceil(len(records) / BATCH))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while left > 0:
            for rows in torch.from_numpy(shuffle.permutation(len(records))).split(BATCH)[:left]:
                optimiser.param_groups[0]["lr"] = RATE * left / steps
                optimiser.zero_grad()
                model.losses(model.unflatten(weights), records.x[rows], records.y[rows]).mean().backward()
                optimiser.step()
                left -= 1
    finally:
        torch.set_num_threads(threads)
    return weights.detach()


def votes_of(plan: Plan, store: Store, state: object) -> dict[str, Any] | None:
    """What a voting system found, beside the true labels of the server's records; None: nobody votes.

    "accuracy" is the share of answers that are right; of several classes, of (record, class) decisions.
    "epsilon_not_sanitised" is the price of these very answers. It tells of the records, so that it is for the eyes of
    whoever may see them: a simulation has it, a federation has not. "epsilon_sanitised" was published, at a price.
    """
    found, server = plan.algorithm.voted(state), plan.federation.server
    if found is None or server is None:
        return None
    answered, delta = which_answered(found.labels), plan.config.privacy.delta
    truth = server.labels[: len(found.labels)].numpy()
    figures: dict[str, Any] = {"queries": len(found.labels), "answered": int(answered.sum())}
    figures["accuracy"] = float((found.labels == truth)[answered].mean()) if answered.any() else None
    true, answers = (_has(labels, plan.facts.classes) for labels in (truth, found.labels))
    counted = {"true": true, "answers": answers, "right": true & answers}
    figures["by_class"] = {name: has.sum(axis=0).tolist() for name, has in counted.items()}
    measured = store.totals(FEDERATION)
    if all(f"rdp@{order!r}" in measured for order in ORDERS):
        curve = np.array([measured[f"rdp@{order!r}"] for order in ORDERS])
        figures["epsilon_not_sanitised"] = json_number(min(rdp_epsilon(curve, delta), plan.price.epsilon))
    if found.cost is not None:
        cost = found.cost
        of_these = smoothed_epsilon(cost.total, cost.price, delta, cost.times)
        figures["epsilon_sanitised"] = json_number(min(of_these, plan.price.epsilon))  # which covers all data
    return figures


def _has(labels: np.ndarray, classes: int) -> np.ndarray:
    """Which classes the records have (n, C), by their labels (n,), or (n, C) where they may have several."""
    return labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(classes)


def _asked(
    plan: Plan, engine: Engine, task: Task, request: str, served: Served, personal: Personal,
    shared: Mapping[str, Plain],
) -> Iterator[tuple[list[int], int | None, dict[str, float]]]:  # fmt: skip
    """What a task tells of the clients under their models: who they are, the row that serves them, the diagnostics.

    Clients that share their test records and their model are asked once. Of several models each takes its own choice.
    """
    shared = _with_offer(shared, served)
    rows = served.index.tolist() if isinstance(served, Pick) else None
    common = plan.federation.common_tests and shared.get("split") != "train"
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for client, group in enumerate(plan.federation.group.tolist()):
        alike[(rows[client], group) if rows and common else (client,)].append(client)
    by_first = {clients[0]: clients for clients in alike.values()}
    calls = [_call(served, personal, client) for client in by_first]
    for first, reply in engine.run(Job(task, request, shared, calls)):
        found = dict(reply.diagnostics)
        choice = found.pop("choice", None)
        yield by_first[first], rows[first] if rows else None if choice is None else int(choice), found


def _with_offer(shared: Mapping[str, Plain], served: Served) -> Mapping[str, Plain]:
    """What all clients get, with the models among which each chooses, where they do."""
    return {**shared, "models": served.rows} if isinstance(served, Offer) else shared


def _call(served: Served, personal: Personal, client: int) -> Call:
    """What one client gets: the model that serves it, unless it has its own or chooses."""
    own = {"model": served[client]} if isinstance(served, Pick) else {}
    return Call(client, own, personal=personal.get(client, {}))
