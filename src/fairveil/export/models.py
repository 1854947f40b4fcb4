"""The models that serve the clients of a finished run, rebuilt without the data; and an exported model, loaded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fairveil.errors import RunFault, UserError, nearest
from fairveil.models import MODELS, ModelSpec
from fairveil.options import shown
from fairveil.reading import Run
from fairveil.store import latest_checkpoint
from fairveil.streams import Stream

Standing = Literal["shared", "own", "kept"]


@dataclass(frozen=True)
class ServedModel:
    """A model of a run.

    Attributes:
        name: of its files, without their endings.
        module: with its weights; it takes records as they were in training, standardised where that was asked for.
        clients: whom it serves, by number.
        standing: "shared" by clients, one client's "own" but released, or "kept": never released.
        measured: by which name the metrics have its scores.
    """

    name: str
    module: nn.Module
    clients: tuple[int, ...]
    standing: Standing
    measured: str = "served"


class Prepared(nn.Module):
    """A model behind the standardisation of its inputs (see `data.federation.Standardised`): it takes raw records."""

    def __init__(self, module: nn.Module, standardise: Mapping[str, Any], width: int) -> None:
        super().__init__()
        self.module = module
        self.mean, self.scale = nn.Buffer(torch.zeros(width)), nn.Buffer(torch.ones(width))
        self.flag = nn.Buffer(torch.zeros(width, dtype=torch.int64))  # the feature that is 1 where this one is missing
        self.has_flag = nn.Buffer(torch.zeros(width, dtype=torch.bool))
        columns = standardise["columns"], standardise["mean"], standardise["scale"]
        for (column, missing), mean, scale in zip(*columns, strict=True):
            self.mean[column], self.scale[column] = mean, scale
            if missing is not None:
                self.flag[column], self.has_flag[column] = missing, True

    def forward(self, x: Tensor) -> Tensor:
        missing = self.has_flag & (x[:, self.flag] != 0)
        return self.module(torch.where(missing, 0.0, (x - self.mean) / self.scale))


def with_raw_inputs(module: nn.Module, standardise: Mapping[str, Any] | None, features: Sequence[int]) -> nn.Module:
    """The same model for records as the clients hold them."""
    return Prepared(module, standardise, features[0]) if standardise else module


def spec_of(run: Run) -> ModelSpec:
    """How the model of a run was built."""
    given = {key: value for key, value in run.config["model"].items() if key != "name"}
    options = run.facts.get("model_options", given)
    features, several = tuple(run.facts["features"]), bool(run.facts.get("several"))
    return ModelSpec(run.config["model"]["name"], features, run.facts["classes"], options, several)


def client_number(run: Run, name: str) -> int:
    """The client of this name.

    Raises:
        UserError: there is none.
    """
    names = run.clients["name"].tolist()
    if name not in names:
        near = nearest(name, names)
        few = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise UserError(
            f"--client {name} is not a client of {run.folder}.",
            f"It has {len(names):,}: {few}. Nothing was written.",
            f"--client {shown(near or names[0])}",
        )
    return int(names.index(name))


def served_models(run: Run, client: int | None) -> tuple[list[ServedModel], dict[str, Any] | None, list[str]]:
    """The models of a finished run, by what their inputs are standardised (None: by nothing), and remarks.

    Args:
        client: only the model that serves this one.

    Raises:
        UserError: every client has a model of its own, and none was named; the model's code has changed.
        RunFault: the files of the run are gone or damaged.
    """
    released, kept = run.folder / "models" / "served.safetensors", run.folder / "models" / "personal.json"
    if released.exists():
        return _released(run, released, client)
    if kept.exists() and run.elsewhere:
        raise UserError(
            f"the models of {run.folder} are with its clients.",
            f"By {run.algorithm} each has a model of its own, which never leaves its machine. Nothing was written.",
            "at the client: the folder models in that of `fairveil deploy join`",
        )
    if kept.exists():
        about = json.loads(kept.read_text())
        return [_kept(run, client)], about.get("standardise"), []
    raise RunFault(f"{released} is gone: the run is finished, but its models are not there. Restore the file.")


def _released(run: Run, path: Path, client: int | None) -> tuple[list[ServedModel], dict[str, Any] | None, list[str]]:
    about, weights = _read(path)
    spec = spec_of(run)
    if "row_of_client" not in about:
        return _offered(run, spec, weights, client), about.get("standardise"), []
    found, remarks = [], []
    serves: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(about["row_of_client"]):
        serves[row].append(number)
    if client is None and len(serves) == len(run.clients) > 1:
        _refuse_all(run)
    for row in sorted(serves) if client is None else [about["row_of_client"][client]]:
        name = "model" if len(serves) == 1 else f"model-{row}"
        standing: Standing = "own" if len(serves[row]) == 1 < len(run.clients) else "shared"
        found.append(ServedModel(name, _filled(spec, weights[row]), tuple(serves[row]), standing))
    if client is None and len(weights) > len(serves):
        remarks.append(f"{len(weights) - len(serves)} of the run's models serve nobody, and were not exported.")
    return found, about.get("standardise"), remarks


def _offered(
    run: Run, spec: ModelSpec, weights: Mapping[int, Mapping[str, Tensor]], client: int | None
) -> list[ServedModel]:
    """Models among which every client chooses by itself. A simulation knows which; to say so would be a release."""
    if client is not None and len(weights) > 1:
        raise UserError(
            f"which of the models serves {run.clients['name'][client]} is its own secret.",
            f"By {run.algorithm} each client chooses for itself, and does not say which. Nothing was written.",
            "leave out --client; on a federation the client has its model in its own folder",
        )
    everybody = tuple(range(len(run.clients)))
    names = {row: "model" if len(weights) == 1 else f"model-{row}" for row in sorted(weights)}
    return [ServedModel(name, _filled(spec, weights[row]), everybody, "shared") for row, name in names.items()]


def _read(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
    """What is said about the served models, and the parameters of each."""
    weights: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["fairveil"])
            for key in file.keys():  # noqa: SIM118 (it is not a dictionary)
                row, _, name = key.partition("/")
                weights[int(row)][name] = file.get_tensor(key)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunFault(f"{path} could not be read: {error}. Restore the file.") from error
    return about, weights


def finetuned_model(run: Run, client: int | None) -> tuple[ServedModel, dict[str, Any] | None]:
    """The model that a client has fine-tuned for itself, and by what its inputs are standardised.

    Raises:
        UserError: none was fine-tuned, or no client was named.
        RunFault: the files of the run are gone or damaged.
    """
    if "finetune" not in run.config:
        raise UserError(
            f"the clients of {run.folder} have fine-tuned nothing.",
            "Its config has no section [finetune]. Nothing was written.",
            "leave out --finetuned; or a run with [finetune], which sends the same and costs the same",
        )
    if client is None:
        raise UserError(
            "each client has a fine-tuned model of its own: --client NAME",
            "It is its owner's alone. Nothing was written.",
            f"--client {shown(run.clients['name'][0])}",
        )
    released, kept = run.folder / "models" / "served.safetensors", run.folder / "models" / "personal.json"
    about = json.loads(kept.read_text()) if kept.exists() else _read(released)[0]
    return _kept(run, client, "finetuned"), about.get("standardise")


def _kept(run: Run, client: int | None, name: str = "model") -> ServedModel:
    """The model that a client has kept to itself, by its name in the personal state."""
    if client is None:
        _refuse_all(run)
    checkpoint = latest_checkpoint(run.folder)
    if checkpoint is None or not run.result or checkpoint.round != run.result["rounds"]:
        raise RunFault(f"{run.folder}: the checkpoint of the last round is gone or damaged. Restore it.")
    weights = checkpoint.personal.get(client, {}).get(name)
    if weights is None:
        raise UserError(
            f"{run.clients['name'][client]} has kept no model of its own.",
            "Its state in the last checkpoint holds none. Nothing was written.",
            "another client",
        )
    spec = spec_of(run)
    filled = _filled(spec, spec.build().unflatten(weights))
    if name == "finetuned":
        return ServedModel(f"finetuned-{client}", filled, (client,), "kept", "finetuned")
    return ServedModel(f"personal-{client}", filled, (client,), "kept")


def _refuse_all(run: Run) -> NoReturn:
    raise UserError(
        "each client has a model of its own: --client NAME",
        f"{run.algorithm} serves every client by another model, which is its owner's. Nothing was written.",
        f"--client {shown(run.clients['name'][0])}",
    )


def _filled(spec: ModelSpec, weights: Mapping[str, Tensor]) -> nn.Module:
    """The module with these parameters. What is not trained (buffers) is as it was in training."""
    module = spec.module(Stream("skeleton"))
    own = {name: value for name, value in module.named_parameters() if value.requires_grad}
    now, then = ({name: tuple(value.shape) for name, value in each.items()} for each in (own, weights))
    if now != then:
        name = next(name for name in [*then, *now] if then.get(name) != now.get(name))
        raise UserError(
            f"model.name = {shown(spec.name)} is not built as it was when it was trained.",
            f"Its parameter {name} has the shape {now.get(name, 'of nothing')}, and had {then.get(name, 'none')}.",
            "the code of that time, see provenance in the run's result.json",
        )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return module


def load_model(path: Path | str, own: Callable[..., nn.Module] | None = None) -> nn.Module:
    """An exported model (.safetensors), ready for records as the clients hold them: (n, *features), float32.

    Args:
        own: your class, if the model is one of your own. A name in a file is never imported: the file may be anybody's.

    Raises:
        UserError: not an exported model, or one whose class must be given.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
        name, features = about["model"], json.loads(about["features"])
        classes, options, standardise = (
            json.loads(about.get(k, "null")) for k in ("classes", "options", "standardise")
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is not an exported model.",
            f"It holds no safetensors with the metadata that `fairveil export` writes ({error}).",
            "fairveil export RUN, then its .safetensors file",
        ) from error
    factory = own or MODELS.get(name)
    if factory is None:
        raise UserError(
            f"{path} holds {shown(name)}, a model of somebody's own.",
            "Code that a file names is not run by itself.",
            "from your_module import Net, then fairveil.load_model(path, Net)",
        )
    with torch.random.fork_rng(devices=[]):
        module = factory(tuple(features), classes, **options)
    module.load_state_dict(load_file(path))
    return with_raw_inputs(module, standardise, features)
