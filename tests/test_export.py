"""What is exported is what was trained and scored: checked by torch alone, by onnxruntime, and by the run's metrics."""

from __future__ import annotations

import io
import json
import re
import sys
import types
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import fairveil
from fairveil.config import make_config
from fairveil.data.federation import Federation
from fairveil.errors import UserError
from fairveil.export.graph import NotExported, onnx_bytes
from fairveil.models import ModelSpec
from fairveil.networks import MODELS, logistic
from fairveil.reading import Run, load_run
from fairveil.run import start_run
from fairveil.streams import Stream


class Net(nn.Module):
    """With what is not trained: a random buffer and a frozen layer; and with parameters that are tied."""

    def __init__(self, features: tuple[int, ...], classes: int, width: int = 5) -> None:
        super().__init__()
        self.draw = nn.Buffer(torch.randn(64, width))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.second(self.first(self.frozen(x.flatten(1) @ self.draw).tanh()).tanh()))


class Branch(nn.Module):
    """It looks at values to decide what to do: nothing that a graph can hold."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.output(row.flatten()) * (2 if row.sum() > 9 else 1) for row in x])


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above as a module that "own:Name" finds."""
    module = types.ModuleType("own")
    vars(module).update({cls.__name__: cls for cls in (Net, Branch)})
    monkeypatch.setitem(sys.modules, "own", module)


@pytest.fixture
def ran(small: dict[str, Any], runs: Path) -> Callable[..., Run]:
    """The small run, with other settings."""

    def run(**changes: Any) -> Run:
        config = {**small, **changes, "algorithm": small["algorithm"] | {"rounds": 2} | changes.get("algorithm", {})}
        return load_run(start_run(make_config(config), runs=runs).folder)

    return run


def accuracy(predict: Callable[[Tensor], Tensor], federation: Federation, client: int) -> float:
    test = federation.load(client).test
    return float((predict(test.x).argmax(dim=1) == test.y).double().mean())


def by_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    session = onnxruntime.InferenceSession(path)
    return lambda x: torch.from_numpy(session.run(["scores"], {"records": x.numpy()})[0])


def check_scores(run: Run, files: dict[int, Path], federation: Federation) -> None:
    """The exported model of every client is as accurate as the one that the run scored, in torch and in onnxruntime."""
    scored = run.metrics.query("round == 2 and split == 'test' and metric == 'accuracy'").set_index("client")["value"]
    for client, path in files.items():
        model = fairveil.load_model(path)
        assert accuracy(model, federation, client) == scored[client]
        assert accuracy(by_onnx(path.with_suffix(".onnx")), federation, client) == scored[client]


def test_every_cluster_has_files_that_score_as_the_run_did(ran: Callable[..., Run], small: dict[str, Any]) -> None:
    run = ran(algorithm={"name": "oracle"})
    exported = fairveil.export_run(run)
    assert exported.folder == run.folder / "export" and [path.name for path in exported.files] == [
        "model-0.safetensors", "model-0.onnx", "model-1.safetensors", "model-1.onnx", "MODEL_CARD.md",
    ]  # fmt: skip
    assert sorted(exported.folder.iterdir()) == sorted(exported.files)
    files = {client: exported.folder / f"model-{int(client >= 2)}.safetensors" for client in range(5)}
    check_scores(run, files, make_config(small).build_federation())
    module = logistic((1, 8, 8), 10)
    module.load_state_dict(load_file(files[0]))  # strictly: plain names, nothing more and nothing less


def test_one_model_has_no_number_and_its_metadata_is_complete(ran: Callable[..., Run]) -> None:
    run = ran()
    exported = fairveil.export_run(run)
    assert [path.name for path in exported.files] == ["model.safetensors", "model.onnx", "MODEL_CARD.md"]
    with safe_open(exported.files[0], "pt") as file:
        about = file.metadata()
    statement = json.loads((run.folder / "statement.json").read_text())
    assert about == {
        "fairveil": version("fairveil"), "run": run.folder.name, "dataset": "digits", "model": "logistic",
        "config_hash": json.loads((run.folder / "result.json").read_text())["config_hash"], "options": "{}",
        "features": "[1, 8, 8]", "classes": "10", "epsilon": str(statement["epsilon"]), "delta": "0.001",
        "unit": "record", "adjacency": "add-remove", "guarantee": statement["sentence"],
        "clients": '["0", "1", "2", "3", "4"]', "groups": '["0°", "90°"]',
    }  # fmt: skip
    proto = onnx.load(exported.files[1])
    assert {prop.key: prop.value for prop in proto.metadata_props} == about
    assert b".py" not in proto.SerializeToString()  # nothing of the machine that it was made on
    assert any("reproducible" in warning for warning in exported.warnings)


def test_a_run_without_noise_says_that_nothing_is_guaranteed(ran: Callable[..., Run]) -> None:
    exported = fairveil.export_run(ran(privacy={"noise_multiplier": 0.0, "delta": 1e-3}))
    assert any("guarantees nothing" in warning for warning in exported.warnings)
    with safe_open(exported.files[0], "pt") as file:
        assert file.metadata()["epsilon"] == "infinity"


@pytest.mark.parametrize(
    ("name", "features", "classes", "options"),
    [
        ("logistic", (1, 4, 4), 10, {}),
        ("linear", (5,), 0, {}),
        ("svm", (5,), 2, {}),
        ("svm", (5,), 3, {}),
        ("mlp", (5,), 3, {"hidden": 7}),
        ("cnn", (1, 9, 8), 10, {}),
        ("cnn-dp", (1, 16, 16), 10, {}),
        ("alexnet-small", (1, 28, 28), 3, {}),
        ("resnet18-gn", (3, 17, 17), 3, {}),
        ("lstm", (3,), 2, {"vocabulary": 20, "hidden": 4, "layers": 1}),
        ("lstm", (3, 4), 2, {"hidden": 4}),
    ],
)
def test_onnxruntime_computes_what_torch_does(name: str, features: tuple[int, ...], classes: int, options: Any) -> None:
    module = ModelSpec(name, features, classes, options).module(Stream("test"))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in module.parameters():  # some start at zero, and would hide what they do
            value += 0.05 * torch.randn(value.shape, generator=random)
    printed = io.StringIO()
    with redirect_stdout(printed):
        data = onnx_bytes(module, features, {"a": "b"})
    assert printed.getvalue() == ""
    session = onnxruntime.InferenceSession(data)
    for batch in (1, 2, 7):
        x = torch.randn(batch, *features, generator=random)
        if "vocabulary" in options:
            x = torch.randint(0, 25, (batch, *features), generator=random).float()
        (found,) = session.run(None, {"records": x.numpy()})
        assert found.shape == (batch, classes or 1)
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_every_reference_model_is_among_those() -> None:
    (mark,) = (m for m in test_onnxruntime_computes_what_torch_does.pytestmark if m.name == "parametrize")
    assert {name for name, *_ in mark.args[1]} == set(MODELS)


def test_standardisation_is_inside_the_model(small: dict[str, Any], tmp_path: Path, runs: Path) -> None:
    """Inputs are as the federation has them; a missing value stays 0, whatever stands in its place."""
    random = np.random.default_rng(0)
    pressure = random.normal(120, 15, 300)
    table = pd.DataFrame({"age": random.uniform(20, 90, 300), "pressure": pressure, "client": np.arange(300) % 6})
    table["y"] = (pressure > 120).astype(int)
    table.loc[table.index % 3 == 0, "pressure"] = np.nan
    table.to_csv(tmp_path / "t.csv", index=False)
    prepare = {
        "pressure": {"kind": "standard", "low": 0.0, "high": 200.0, "missing": []},
        "age": {"kind": "standard", "low": 0.0, "high": 120.0},
    }
    data = {
        "dataset": "file",
        "options": {"path": str(tmp_path / "t.csv"), "prepare": prepare},
    }
    config = make_config(small | {"data": data, "algorithm": {"name": "global", "rounds": 2, "batch_size": 16}})
    run = load_run(start_run(config, runs=runs).folder)
    path = fairveil.export_run(run).files[0]
    federation = config.build_federation()
    check_scores(run, dict.fromkeys(range(6), path), federation)
    with safe_open(path, "pt") as file:
        used = json.loads(file.metadata()["standardise"])
    module = logistic(federation.features, 2)
    module.load_state_dict(load_file(path))
    raw = federation.load(0).test.x
    inside = federation.standardised(np.array(used["mean"]), np.array(used["scale"])).load(0).test.x
    assert {missing is None for _, missing in used["columns"]} == {True, False}
    assert torch.equal(fairveil.load_model(path)(raw), module(inside)) and not torch.equal(raw, inside)


def test_words_are_read_by_the_vocabulary_of_the_data(small: dict[str, Any], tmp_path: Path, runs: Path) -> None:
    texts = [{"text": f"word{n % 7} more", "site": str(n % 4), "y": n % 2} for n in range(80)]
    pd.DataFrame(texts).to_csv(tmp_path / "t.csv", index=False)
    prepare = {"text": {"kind": "text", "length": 3, "vocabulary": 100}}
    options = {"path": str(tmp_path / "t.csv"), "client": "site", "features": ["text"], "prepare": prepare}
    changes = {"data": {"dataset": "file", "options": options}, "model": {"name": "lstm", "hidden": 4, "layers": 1}}
    config = make_config(small | changes | {"algorithm": {"name": "global", "rounds": 2, "batch_size": 16}})
    run = load_run(start_run(config, runs=runs).folder)
    path = fairveil.export_run(run).files[0]
    assert load_file(path)["embedding.weight"].shape == (100, 32)
    check_scores(run, dict.fromkeys(range(4), path), config.build_federation())


def test_a_model_of_ones_own(ran: Callable[..., Run]) -> None:
    run = ran(model={"name": "own:Net", "width": 6})
    path = fairveil.export_run(run).files[0]
    module = Net((1, 8, 8), 10, 6)
    module.load_state_dict(load_file(path))
    x = torch.randn(3, 1, 8, 8)
    np.testing.assert_allclose(by_onnx(path.with_suffix(".onnx"))(x), module(x).detach(), atol=1e-5)
    assert torch.equal(fairveil.load_model(path, Net)(x), module(x))
    with pytest.raises(UserError, match="somebody's own"):  # what a file names is not imported
        fairveil.load_model(path)


def test_a_model_that_no_graph_can_hold_is_still_written(ran: Callable[..., Run]) -> None:
    run = ran(model={"name": "own:Branch"}, algorithm={"name": "dp-fedavg", "sample_rate": 0.5})
    exported = fairveil.export_run(run)
    assert [path.name for path in exported.files] == ["model.safetensors", "MODEL_CARD.md"]
    assert any(warning.startswith("model.onnx was not written: ") for warning in exported.warnings)


class Other(nn.Module):
    """It computes something else while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if torch.compiler.is_exporting() else x


def test_a_graph_that_computes_something_else_is_not_written() -> None:
    with pytest.raises(NotExported, match="other scores"):
        onnx_bytes(Other(), (3,), {})


def test_without_the_packages_all_else_is_written(ran: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.delitem(sys.modules, "onnx")
    exported = fairveil.export_run(ran())
    assert [path.name for path in exported.files] == ["model.safetensors", "MODEL_CARD.md"]
    assert [warning for warning in exported.warnings if "pip install 'fairveil[onnx]'" in warning]
    assert "onnxruntime" not in exported.files[-1].read_text()


def test_the_document_shows_how_to_load_it(ran: Callable[..., Run]) -> None:
    folder = fairveil.export_run(ran()).folder
    text = (Path(__file__).parents[1] / "docs" / "export.md").read_text().replace("runs/NAME/export", str(folder))
    values: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, values)
        assert values["scores"].shape == (3, 10)
    assert torch.equal(values["module"](torch.ones(1, 1, 8, 8)), values["model"](torch.ones(1, 1, 8, 8)))
