"""What serves the clients: which models, in which clusters, how well in figures, and the file that holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save

from fairveil.clustering import adjusted_rand
from fairveil.errors import UserError
from fairveil.fairness import Summary, pooled, summarise
from fairveil.plan import Plan
from fairveil.session import Offer, Pick
from fairveil.store import Store, of_records

Served = Pick | Offer | Literal["personal"]
PERSONAL = ("finetuned", "local")  # models that every client has for itself, where fine-tuning is asked for


def taken_back(counts: Mapping[str, int]) -> str:
    """What there is to say of training for oneself that was taken back, by `PERSONAL` model; empty: nothing."""
    said = []
    why = "that did not lower their loss (finetune.learning_rate is too large, or they have nothing to train on)"
    if back := counts.get("finetuned", 0):
        said.append(f"Fine-tuning was taken back for {back:,} clients, who keep the released model: {why}.")
    if back := counts.get("local", 0):
        said.append(f"Training alone was taken back for {back:,}: what stands for these is an untrained model.")
    return " ".join(said)


def served_models(plan: Plan, state: object, average: torch.Tensor | None) -> Served:
    """Which model serves which client."""
    served = plan.algorithm.serve(plan.facts, state)
    return served if average is None or isinstance(served, str) else replace(served, rows=average)


def averaged(plan: Plan, number: int, state: object, average: torch.Tensor | None) -> torch.Tensor | None:
    """The mean of the served models over the last rounds up to this one; None: they are not averaged (yet)."""
    rounds, last = plan.algorithm.rounds, plan.algorithm.average_last
    served = plan.algorithm.serve(plan.facts, state)
    if last == 1 or number <= rounds - last:
        return None
    if isinstance(served, str):
        raise UserError(
            f"algorithm.average_last = {last} does not go with models that clients keep to themselves.",
            "Only what is released can be averaged by the server. The rounds before this one are saved.",
            "algorithm.average_last = 1",
        )
    return served.rows if average is None else average + (served.rows - average) / (number - (rounds - last))


def summaries(plan: Plan, store: Store, model: str = "served") -> tuple[dict[str, Summary], Summary]:
    """All metrics of the last evaluated round, and the main one."""
    main = "accuracy" if plan.facts.classes else "rmse"
    found = {}
    for metric in (main, "loss"):
        by_client = store.scores(metric, model=model)
        if not by_client:
            raise UserError(
                f"nobody of {plan.federation.name} has test records.",
                "There is nothing to score the models on.",
                "data with some records for testing",
            )
        scored = np.array(sorted(by_client))
        values = np.array([by_client[client] for client in scored.tolist()])
        counts = {} if plan.federation.common_tests else store.counts(metric, model=model)
        found[metric] = summarise(
            values, plan.facts.group[scored], plan.federation.groups, higher_is_better=metric == "accuracy",
            tests=np.array([counts[client] for client in scored.tolist()]) if counts else None,
        )  # fmt: skip
        if plan.config.fairness.groups != "cluster":
            found[metric] = _by_attribute(plan, store, metric, model, found[metric])
    return found, found[main]


def _by_attribute(plan: Plan, store: Store, metric: str, model: str, summary: Summary) -> Summary:
    """The same, but its groups are those of the records by the attribute that the run is judged by, each record
    counting the same."""
    attribute, by_group, clients = plan.config.fairness.groups, {}, {}
    for value in plan.federation.attributes[attribute]:
        split = of_records(attribute, value)
        scores, n = store.scores(metric, split, model), store.counts(metric, split, model)
        if scores:
            by_group[value] = float(pooled(np.array([*scores.values()]), np.array([*n.values()]), metric))
            clients[value] = len(scores)
    worst = (min if metric == "accuracy" else max)(by_group, key=lambda value: by_group[value])
    gap = max(by_group.values()) - min(by_group.values())
    return replace(summary, by_group=by_group, by_group_clients=clients, worst_group=worst, gap=gap)


def clusters_of(plan: Plan, state: object) -> dict[str, Any] | None:
    """What a clustered system found, with the adjusted Rand index against the groups of the data."""
    found = plan.algorithm.found(state)
    if found is None:
        return None
    figures = {key: value for key, value in vars(found).items() if key not in ("cluster", "plane", "centres")}
    seen = found.cluster >= 0
    ari = adjusted_rand(found.cluster[seen], plan.facts.group[seen]) if seen.any() else 0.0
    return figures | {"ari": ari, "of_client": found.cluster.tolist()}


def save_clusters(plan: Plan, store: Store, state: object) -> None:
    """What a clustered system has found so far, with what it saw, for whoever looks at the folder."""
    found = plan.algorithm.found(state)
    if found is not None:
        seen = {"plane": _listed(found.plane), "centres": _listed(found.centres)}
        text = json.dumps((clusters_of(plan, state) or {}) | seen)
        if store.text("clusters.json") != text:  # it changes rarely, and writing waits for the disk
            store.write("clusters.json", text.encode())


def _listed(points: np.ndarray | None) -> list[list[float] | None] | None:
    """For JSON, which has no NaN."""
    if points is None:
        return None
    return [None if np.isnan(point).any() else np.round(point, 9).tolist() for point in points]


def save_models(plan: Plan, store: Store, served: Served, scales: tuple[np.ndarray, np.ndarray] | None) -> None:
    """The served models under the module's own parameter names, one prefix for each row.

    Models that clients keep to themselves stay in the checkpoint; what all need to use theirs is written instead.
    """
    metadata: dict[str, Any] = {"model": plan.config.model.name}
    if scales and plan.federation.standardise:  # what its inputs must be standardised by
        columns = plan.federation.standardise.columns
        metadata["standardise"] = {"columns": columns, "mean": scales[0].tolist(), "scale": scales[1].tolist()}
    if isinstance(served, str):
        store.write("models/personal.json", json.dumps(metadata).encode())
        return
    if isinstance(served, Pick):
        metadata["row_of_client"] = np.asarray(served.index).tolist()
    tensors = {
        f"{row}/{name}": value.contiguous()
        for row, weights in enumerate(served.rows)
        for name, value in plan.model.unflatten(weights.clone()).items()
    }
    store.write("models/served.safetensors", save(tensors, {"fairveil": json.dumps(metadata)}))


def check_finite(state: Any, number: int) -> None:
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor) and not torch.isfinite(value).all():
            raise diverged(number, name)


def diverged(number: int, what: str, fix: str = "a smaller algorithm.learning_rate") -> UserError:
    """The error of a run that cannot go on."""
    return UserError(
        f"round {number}: {what} is no longer finite.",
        "The training has diverged; the rounds before this one are saved.",
        fix,
    )
