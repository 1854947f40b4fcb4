"""Writing an export: model files, graphs, the card; and what must be said about them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.export.card import model_card
from fairveil.export.graph import NotExported, can_export, onnx_bytes
from fairveil.export.models import (
    ServedModel,
    client_number,
    finetuned_model,
    served_models,
    spec_of,
    with_raw_inputs,
)
from fairveil.privacy.statement import rounded_up
from fairveil.provenance import resume_command
from fairveil.reading import Run
from fairveil.store import write_whole

OWNER_ONLY, USUAL = 0o600, 0o666
KEPT = (
    "{file} was never released: it is not covered by the guarantee, and exporting it is a release outside the ledger. "
    "Only its owner, {client}, may see it."
)
OWN = (
    "{file} is the model of one client alone, {client}, and shaped by its records before all others'. {price} What the "
    "records of a client have in common is not hidden by noise."
)
REPRODUCIBLE = (
    "The noise of this run is reproducible: whoever knows the seed, the config, the code and the data can remove it. "
    'Do not publish its models as protected ones; for that, train with privacy.noise = "secret".'
)
UNPROTECTED = "This run guarantees nothing: epsilon is infinite. Its models may give away the records."
NO_ONNX = "No ONNX files: the packages onnx and onnxscript are not there. pip install 'fairveil[onnx]'"
OTHER_CODE = (
    "The code has changed since the run (fairveil's version, or your own classes): check what the models compute."
)


@dataclass(frozen=True)
class Exported:
    """What was written, and what its readers must know."""

    folder: Path
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "files": [str(path) for path in self.files], "warnings": [*self.warnings]}


def export_run(run: Run, out: Path | None = None, client: str | None = None, *, finetuned: bool = False) -> Exported:
    """Write the served models of a finished run as safetensors and ONNX, with a model card.

    Args:
        out: the folder; else "export" in the run's, or "export/client-N" ("...-finetuned") for one client.
        client: write only the model that serves this client. Where everyone has one of its own, it must be named.
        finetuned: write the model that this client has fine-tuned for itself. Nothing covers it: it is its owner's.

    Raises:
        UserError: not finished; every client has its own model; no such client; the folder cannot be written.
        RunFault: the files of the run are gone or damaged.
    """
    _check_finished(run)
    number = None if client is None else client_number(run, client)
    if finetuned:
        model, standardise = finetuned_model(run, number)
        models, remarks = [model], list[str]()
    else:
        models, standardise, remarks = served_models(run, number)
    whose = "" if number is None else f"client-{number}{'-finetuned' if finetuned else ''}"
    folder = out or run.folder / "export" / whose
    warnings = [*_about_run(run), *(text for model in models if (text := _about_model(run, model))), *remarks]
    if not can_export():
        warnings.append(NO_ONNX)
    marks: dict[str, str] = {}
    for model in models:
        mode = USUAL if model.standing == "shared" else OWNER_ONLY
        facts = about(run, model, standardise)
        found, failed = _files(model, spec_of(run).features, facts, standardise)
        warnings += failed
        for name, data in found.items():
            _write(folder / name, data, mode)
            marks[name] = hashlib.sha256(data).hexdigest()
    card = model_card(run, models, marks, warnings, standardise is not None)
    _write(folder / "MODEL_CARD.md", card.encode(), USUAL)
    return Exported(folder, tuple(folder / name for name in [*marks, "MODEL_CARD.md"]), tuple(warnings))


def about(run: Run, model: ServedModel, standardise: Mapping[str, Any] | None) -> dict[str, str]:
    """What is written into every file of a model, as strings."""
    statement, spec, clients = run.statement, spec_of(run), run.clients.iloc[list(model.clients)]
    covered = model.standing != "kept"
    warning = _about_model(run, model)
    facts = {
        "fairveil": run.provenance["fairveil"], "run": run.name, "config_hash": run.provenance["config"],
        "dataset": run.facts["dataset"], "model": spec.name, "options": json.dumps(dict(spec.options)),
        "features": json.dumps(spec.features), "classes": str(spec.classes),
        "epsilon": str(statement["epsilon"]) if covered else "infinity", "delta": str(statement["delta"]),
        "unit": statement["unit"], "adjacency": statement["adjacency"],
        "guarantee": statement["sentence"] if covered else f"NONE: {warning}",
        "clients": json.dumps(clients["name"].tolist(), ensure_ascii=False),
        "groups": json.dumps(sorted(set(clients["group"])), ensure_ascii=False),
    }  # fmt: skip
    if spec.several:
        facts["several"] = "a record may have several of the classes: those whose score is above 0"
    if standardise:
        facts["standardise"] = json.dumps(standardise)
    return facts | ({"warning": warning} if warning else {})


def _files(
    model: ServedModel, features: tuple[int, ...], facts: Mapping[str, str], standardise: Mapping[str, Any] | None
) -> tuple[dict[str, bytes], list[str]]:
    """The files of a model by name, and what could not be made."""
    state = {name: value.clone().contiguous() for name, value in model.module.state_dict().items()}  # tied: two copies
    files, failed = {f"{model.name}.safetensors": save(state, dict(facts))}, []
    if can_export():
        try:
            whole = with_raw_inputs(model.module, standardise, features)
            files[f"{model.name}.onnx"] = onnx_bytes(whole, features, facts)
        except NotExported as why:
            failed.append(f"{model.name}.onnx was not written: {why}")
    return files, failed


def _about_run(run: Run) -> list[str]:
    """What must be said of every model of a run."""
    found = []
    if run.statement["epsilon"] == "infinity":
        found.append(UNPROTECTED)
    elif run.reproducible:
        found.append(REPRODUCIBLE)
    try:
        changed = make_config(run.config).code() != run.provenance["code"]
    except UserError:  # the class of its data or algorithm is not here, and not needed
        changed = False
    return [*found, *([OTHER_CODE] if changed else [])]


def _about_model(run: Run, model: ServedModel) -> str | None:
    """What must be said of a model that is one client's."""
    if model.standing == "shared":
        return None
    client = run.clients.iloc[model.clients[0]]
    file = f"{model.name}.safetensors"
    if model.standing == "kept":
        return KEPT.format(file=file, client=client["name"])
    epsilon, unit = client["epsilon"], "one record of it"
    if run.statement["unit"] == "client":
        epsilon, unit = float(run.statement["epsilon"]), "a client with all its records"
    price = (
        f"The guarantee for what it sends: epsilon {rounded_up(epsilon)}, delta {run.statement['delta']!r}, for {unit}."
    )
    return OWN.format(file=file, client=client["name"], price="It has no guarantee." if math.isinf(epsilon) else price)


def _check_finished(run: Run) -> None:
    if run.result is None:
        raise UserError(
            f"{run.folder} is not finished.",
            "Its models are those of a round on the way, and its statement speaks of a part. Nothing was written.",
            "wait for it" if run.running else resume_command(run.folder),
        )


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, mode)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written.", f"{error.strerror}.", "--out FOLDER, a folder you may write to"
        ) from error
