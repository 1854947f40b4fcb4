"""Models of one client: exported only when named, with a warning, for their owner; and what an export refuses."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fairveil
from fairveil.algorithms.base import LocalTraining
from fairveil.config import make_config
from fairveil.errors import RunFault, UserError
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.release import Kept, Reply
from fairveil.reading import Run, load_run
from fairveil.run import Interrupted, RoundReport, start_run
from fairveil.session import Facts, Member, Session, Terms

Fairveil = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Nothing:
    count: int


def learn_alone(members: Sequence[Member]) -> list[Reply]:
    replies = []
    for member in members:
        weights = member.personal.get("model", torch.zeros(member.model.parameters))
        train = member.data.train
        replies.append(Reply(Kept(), keep={"model": weights - member.model.gradient(weights, train.x, train.y)}))
    return replies


class Alone(LocalTraining[Nothing]):
    """Every client keeps its model to itself."""

    name: ClassVar[str] = "alone"

    def releases(self, terms: Terms) -> Counter[Mechanism]:
        return Counter()

    def start(self, session: Session) -> Nothing:
        return Nothing(0)

    def round(self, session: Session, state: Nothing) -> Nothing:
        session.ask(learn_alone, session.facts.clients)
        return Nothing(state.count + 1)

    def serve(self, facts: Facts, state: Nothing) -> Literal["personal"]:
        return "personal"


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class above as a module that "own:Name" finds."""
    module = types.ModuleType("own")
    vars(module).update({"Alone": Alone})
    monkeypatch.setitem(sys.modules, "own", module)


@pytest.fixture
def ran(small: dict[str, Any], runs: Path) -> Callable[..., Run]:
    """The small run by another algorithm."""

    def run(algorithm: str, **options: Any) -> Run:
        config = small | {"algorithm": {"name": algorithm, "rounds": 2, "batch_size": 64, **options}}
        return load_run(start_run(make_config(config), runs=runs).folder)

    return run


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize("algorithm", ["local", "mr-mtl", "own:Alone"])
def test_personal_models_are_exported_only_when_named(ran: Callable[..., Run], algorithm: str) -> None:
    run = ran(algorithm)
    with pytest.raises(UserError, match="each client has a model of its own: --client NAME"):
        fairveil.export_run(run)
    assert not (run.folder / "export").exists()


@pytest.mark.parametrize("algorithm", ["local", "mr-mtl"])
def test_a_released_model_of_one_client(ran: Callable[..., Run], algorithm: str) -> None:
    run = ran(algorithm)
    exported = fairveil.export_run(run, client="3")
    path = exported.files[0]
    assert [file.name for file in exported.files] == ["model-3.safetensors", "model-3.onnx", "MODEL_CARD.md"]
    assert [stat.S_IMODE(file.stat().st_mode) & 0o077 for file in exported.files[:2]] == [0, 0]
    served = load_file(run.folder / "models" / "served.safetensors")
    assert torch.equal(load_file(path)["1.weight"], served["3/1.weight"])
    (said,) = (warning for warning in exported.warnings if "model-3" in warning)
    assert "one client alone, 3" in said and "epsilon 8," in said.replace("7.994", "8") and "delta 0.001" in said
    about = metadata(path)
    assert (
        about["warning"] == said and about["epsilon"] == str(run.statement["epsilon"]) and about["clients"] == '["3"]'
    )


def test_a_kept_model_is_not_covered_and_says_so_everywhere(ran: Callable[..., Run]) -> None:
    run = ran("own:Alone")
    exported = fairveil.export_run(run, client="1")
    path, _, card = exported.files
    assert path.name == "personal-1.safetensors" and stat.S_IMODE(path.stat().st_mode) == 0o600
    (said,) = (warning for warning in exported.warnings if "personal-1" in warning)
    for words in ("never released", "not covered by the guarantee", "a release outside the ledger", "Only its owner"):
        assert words in said and words in card.read_text()
    about = metadata(path)
    assert about["warning"] == said and about["epsilon"] == "infinity" and about["guarantee"].startswith("NONE")
    kept = load_file(run.folder / "checkpoints" / "round-000002.safetensors")["personal/1/model"]
    weights = load_file(path)
    assert torch.equal(torch.cat([weights["1.weight"].reshape(-1), weights["1.bias"]]), kept)
    test = make_config(dict(run.config)).build_federation().load(1).test
    correct = (fairveil.load_model(path)(test.x).argmax(dim=1) == test.y).double().mean()
    assert float(correct) == run.scores("accuracy").loc[2, 1]


def test_a_kept_model_takes_raw_records_too(small: dict[str, Any], tmp_path: Path, runs: Path) -> None:
    x = np.random.default_rng(0).normal(120, 15, 200)
    table = pd.DataFrame({"x": x, "client": np.arange(200) % 4, "y": (x > 120).astype(int)})
    table.to_csv(tmp_path / "t.csv", index=False)
    prepare = {"x": {"kind": "standard", "low": 0.0, "high": 200.0}}
    options = {
        "path": str(tmp_path / "t.csv"),
        "prepare": prepare,
        "statistics_noise": 0.01,
    }  # the path decides the noise
    data = {"dataset": "file", "options": options}
    algorithm, privacy = {"name": "own:Alone", "rounds": 2}, {"noise_multiplier": 0.0, "delta": 1e-3}
    config = make_config(small | {"data": data, "algorithm": algorithm, "privacy": privacy})
    run = load_run(start_run(config, runs=runs).folder)
    path = fairveil.export_run(run, client="2").files[0]
    test = config.build_federation().load(2).test
    correct = (fairveil.load_model(path)(test.x).argmax(dim=1) == test.y).double().mean()
    assert float(correct) == run.scores("accuracy").loc[2, 2] > 0.6


def test_a_kept_model_whose_checkpoint_is_damaged_is_not_replaced_by_an_older_one(ran: Callable[..., Run]) -> None:
    run = ran("own:Alone")
    (run.folder / "checkpoints" / "round-000002.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunFault, match="last round is gone or damaged"):
        fairveil.export_run(run, client="1")


def test_the_model_that_serves_a_client(ran: Callable[..., Run], tmp_path: Path) -> None:
    run = ran("oracle")
    exported = fairveil.export_run(run, tmp_path / "there", "4")
    assert [path.name for path in exported.files] == ["model-1.safetensors", "model-1.onnx", "MODEL_CARD.md"]
    assert exported.folder == tmp_path / "there" and metadata(exported.files[0])["clients"] == '["2", "3", "4"]'
    with pytest.raises(UserError, match="--client 44 is not a client") as error:
        fairveil.export_run(run, client="44")
    assert error.value.fix == '--client "4"'


def test_an_unfinished_run_is_not_exported(small: dict[str, Any], runs: Path) -> None:
    def stop(report: RoundReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        start_run(make_config(small), runs=runs, progress=stop)
    (folder,) = runs.iterdir()
    with pytest.raises(UserError, match="not finished") as error:
        fairveil.export_run(load_run(folder))
    assert error.value.fix == f"fairveil run {folder} --resume" and not (folder / "export").exists()


def test_models_that_are_gone_or_damaged(ran: Callable[..., Run]) -> None:
    run = ran("global")
    path = run.folder / "models" / "served.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(RunFault, match="could not be read"):
        fairveil.export_run(run)
    path.unlink()
    with pytest.raises(RunFault, match="is gone"):
        fairveil.export_run(run)


def test_a_folder_that_cannot_be_written(ran: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        fairveil.export_run(ran("global"), tmp_path / "file" / "folder")


def test_a_file_of_somebody_else_is_not_loaded(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    for path in (tmp_path / "a.safetensors", tmp_path / "none.safetensors"):
        with pytest.raises(UserError, match="not an exported model"):
            fairveil.load_model(path)
    about = {"model": "os:system", "features": "[1]", "classes": "2", "options": "{}"}
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors", about)
    with pytest.raises(UserError, match="not run by itself"):
        fairveil.load_model(tmp_path / "a.safetensors")


def test_the_command(fairveil: Fairveil, ran: Callable[..., Run]) -> None:
    run = ran("local")
    code, out, err = fairveil("export", str(run.folder))
    assert code == 2 and out == "" and "--client NAME" in err
    code, out, err = fairveil("export", str(run.folder), "--client", "0", "--json")
    answer = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and set(answer) == {"folder", "files", "warnings"}
    assert all(Path(path).is_file() for path in answer["files"]) and len(answer["files"]) == 3
    assert answer["folder"] == str(run.folder / "export" / "client-0")
    assert len(answer["warnings"]) == 2 and all(f"Warning: {warning}" in err for warning in answer["warnings"])
    code, out, _ = fairveil("export", str(run.folder), "--client", "0", "--out", "elsewhere")
    assert code == 0 and out.count("Wrote elsewhere/") == 3


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['fairveil', '--help']\ntry:\n import fairveil.cli; fairveil.cli.main()\nexcept "
    code += "SystemExit: print(sorted({'torch', 'onnx', 'mlflow', 'tensorboard', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "export" in done.stdout and done.stdout.splitlines()[-1] == "[]"


# ---- models among which clients choose -------------------------------------------------------------


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two models and as many clients of each of two kinds: every client takes the one that suits it."""
    values = {
        "data": {"dataset": "linear-clusters", "options": {"clients": [2, 2]}},
        "model": {"name": "linear", "intercept": False},
        "algorithm": {"name": "metric-pfl", "rounds": 30, "local_epochs": 5, "batch_size": 10, "hypotheses": 2},
        "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
        "engine": {"workers": 1},
    }
    return load_run(start_run(make_config(values), runs=tmp_path_factory.mktemp("chosen")).folder)


def test_which_model_a_client_chose_is_exported_nowhere(chosen: Run) -> None:
    """A simulation knows it, but it was not released: in the files and in the card every model serves everybody."""
    assert set(chosen.assignment().iloc[-1]) == {0, 1}
    exported = fairveil.export_run(chosen)
    files = [path for path in exported.files if path.suffix == ".safetensors"]
    assert [path.name for path in files] == ["model-0.safetensors", "model-1.safetensors"]
    for path in files:
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["clients"]) == ["0", "1", "2", "3"]
    card = (exported.folder / "MODEL_CARD.md").read_text()
    assert card.count("4 clients: whom it suits best; each chooses by itself") == len(exported.files) - 1
    assert "metric privacy" in card and "adding or removing" not in card and "epsilons are added up" in card


def test_the_choice_of_one_client_is_its_own(chosen: Run) -> None:
    with pytest.raises(UserError, match="which of the models serves 2 is its own secret"):
        fairveil.export_run(chosen, client="2")
