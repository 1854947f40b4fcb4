"""The model card: what the model is for, what is guaranteed, how evenly it serves, and its limits, as Markdown."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from fairveil.algorithms import ALGORITHMS
from fairveil.export.models import ServedModel
from fairveil.fairness import summarise
from fairveil.options import flattened
from fairveil.privacy.statement import rounded_up
from fairveil.reading import SCORES_STAY, Run

NAMED = 20  # clients that are listed by name; a file's metadata names all
SMALL_GROUP = 5  # clients, and fewer: what is said of such a group is said of single clients


class Code(str):
    """Text that stands in a fenced block, where nothing is escaped."""


def plain(value: object) -> str:
    """A value as text that Markdown and HTML leave as it is, on one line."""
    if isinstance(value, Code):
        return value
    line = " ".join(str(value).split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    line = html.escape(line, quote=False).replace("://", ":&#47;&#47;").replace("www.", "www&#46;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", line)


def model_card(
    run: Run, models: Sequence[ServedModel], marks: Mapping[str, str], warnings: Sequence[str], standardised: bool
) -> str:
    """The card of these models.

    Args:
        marks: sha256 by file.
        standardised: whether inputs are standardised inside the exported model.
    """
    environment = Environment(  # what is filled in is text, unless it says otherwise
        finalize=plain, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,
    )  # fmt: skip
    environment.filters["span"] = _span
    template = environment.from_string(files("fairveil.export").joinpath("card.md").read_text(encoding="utf-8"))
    return template.render(
        run=run, statement=run.statement, facts=run.facts, provenance=run.provenance, warnings=warnings,
        files=[_file(run, models, name, mark) for name, mark in marks.items()],
        algorithm=_first_line(ALGORITHMS.get(run.algorithm)), kept=models[0].standing == "kept",
        reproducible=run.reproducible, standardised=standardised, price=_price(run), scores_stay=SCORES_STAY,
        groups=sorted(set(run.clients["group"])), fairness=None if run.elsewhere else _fairness(run, models),
        settings=_settings(run, models[0]),
        load=_load(run, models[0].name, onnx=f"{models[0].name}.onnx" in marks),
    )  # fmt: skip


def _file(run: Run, models: Sequence[ServedModel], file: str, mark: str) -> dict[str, Any]:
    (model,) = (model for model in models if model.name == file.rpartition(".")[0])
    clients = run.clients.iloc[list(model.clients)]
    names = clients["name"].tolist()
    several = sum(other.clients == model.clients for other in models) > 1  # then each of them takes the one it likes
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
    listed = "whom it suits best; each chooses by itself" if several else listed
    return {
        "name": file, "sha256": mark, "clients": len(names), "names": listed,
        "groups": ", ".join(sorted(set(clients["group"]))),
    }  # fmt: skip


def _span(ends: Sequence[int]) -> str:
    """A range in words; one number where both ends are the same."""
    fewest, most = (f"{end:,}" for end in ends)
    return most if fewest == most else f"{fewest} to {most}"


def _first_line(algorithm: type | None) -> str:
    """What an algorithm is, in the first line of its file."""
    if algorithm is None:
        return "an algorithm of somebody's own"
    first = (sys.modules[algorithm.__module__].__doc__ or "").strip().splitlines()[0]
    return first.partition(": ")[2].rstrip(".")


def _price(run: Run) -> dict[str, str]:
    planned, spent = (float(run.statement[key]) for key in ("epsilon", "epsilon_spent"))
    return {"planned": rounded_up(planned), "spent": rounded_up(spent)}


def _fairness(run: Run, models: Sequence[ServedModel]) -> dict[str, Any]:
    """The main metric of the last round: by group, over all clients, and over those that these models serve."""
    scores, counts = run.scores(run.main), run.counts(run.main).iloc[-1].to_numpy()
    values = scores.iloc[-1].to_numpy()
    scored = np.flatnonzero(~np.isnan(values))
    names, group = np.unique(run.clients["group"].to_numpy(dtype=str), return_inverse=True)
    summary = summarise(values[scored], group[scored], names.tolist(), higher_is_better=run.main == "accuracy")
    rows = []
    for number, name in enumerate(names.tolist()):
        of_group = scored[group[scored] == number]
        tested = counts[of_group].max(initial=0) if run.facts["common_tests"] else counts[of_group].sum()
        value = f"{summary.by_group[name]:.3f}" if name in summary.by_group else "not scored"
        clients = int((group == number).sum())
        rows.append({"group": name, "clients": clients, "tested": f"{int(tested):,}", "value": value})
    served = np.intersect1d(scored, np.concatenate([model.clients for model in models]).astype(int))
    theirs = run.scores(run.main, model=models[0].measured).iloc[-1].to_numpy()
    by_group = summary.by_group.values()
    return {
        "metric": run.main, "round": int(scores.index[-1]), "rows": rows, "worst_group": summary.worst_group,
        "mean": f"{summary.mean:.3f}", "worst": f"{summary.worst:.3f}", "tenth": f"{summary.worst_10_percent:.3f}",
        "gap": f"{max(by_group) - min(by_group):.3f}", "clients": len(scored), "unscored": len(values) - len(scored),
        "served": f"{theirs[served].mean():.3f}" if len(served) else "not scored", "served_clients": len(served),
        "small": _small([row for row in rows if row["clients"] <= SMALL_GROUP]),
    }  # fmt: skip


def _small(rows: Sequence[Mapping[str, Any]]) -> str:
    """The groups of which too little is known, in words; empty if there is none."""
    named = [f"{row['group']} (clients: {row['clients']}, test records: {row['tested']})" for row in rows[:NAMED]]
    return ", ".join(named) + (f" and {len(rows) - NAMED:,} more" if len(rows) > NAMED else "")


def _settings(run: Run, model: ServedModel) -> dict[str, str]:
    """What decided the training, as it was. Options of the data are left out: they may name paths and columns."""
    config, settled = run.config, run.facts.get("settled", {})
    sections = {
        "seed": config["seed"],
        "data": {key: value for key, value in config["data"].items() if key != "options"},
        "model": config["model"] | run.facts.get("model_options", {}),
        "algorithm": config["algorithm"] | settled,
        "privacy": config["privacy"],
    }
    if model.measured == "finetuned":
        sections["finetune"] = {key: config["finetune"][key] for key in ("steps", "learning_rate")}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flattened(sections).items()}


def _load(run: Run, name: str, *, onnx: bool) -> dict[str, Code]:
    """Working code that loads a model, from the folder of the card."""
    module, own, cls = run.config["model"]["name"].partition(":")
    shape = ", ".join(map(str, run.facts["features"]))
    lines = ["import torch", "", "import fairveil", ""]
    call = f'fairveil.load_model("{name}.safetensors")'
    if own:  # a name that could be imported, in quotes whatever it is
        lines = ["import importlib", "", *lines]
        lines += [f"Net = getattr(importlib.import_module({json.dumps(module)}), {json.dumps(cls)})"]
        call = f'fairveil.load_model("{name}.safetensors", Net)'
    lines += [f"model = {call}", f"scores = model(torch.zeros(1, {shape}))  # one record"]
    graph = [
        "import numpy as np", "import onnxruntime", "", f'session = onnxruntime.InferenceSession("{name}.onnx")',
        f'(scores,) = session.run(None, {{"records": np.zeros((1, {shape}), np.float32)}})',
    ]  # fmt: skip
    return {"torch": Code("\n".join(lines)), "onnx": Code("\n".join(graph) if onnx else "")}
