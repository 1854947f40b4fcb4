"""Whatever is wrong, the command line says what, why and what to type; nothing is lost, nothing half-made stays."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fairveil import cli
from fairveil.contract import differ, outcome
from fairveil.run import RoundReport
from fairveil.store import Store

ROUNDS = 6
CONFIG: dict[str, Any] = {
    "name": "bad",
    "data": {"dataset": "digits", "split": {"kind": "iid", "clients": 4}},
    "model": {"name": "logistic"},
    "algorithm": {"name": "global", "rounds": ROUNDS, "batch_size": 64},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    "engine": {"workers": 1},
}


@dataclass(frozen=True)
class Answer:
    """What a command answered."""

    code: int
    out: str
    err: str

    def refuses(self, *words: str, code: int = 2) -> None:
        """A user's mistake: exit code 2, every word on standard error, a fix, nothing on standard output."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err
        assert "Try:" in self.err
        assert self.out == ""

    def stops(self, *words: str) -> None:
        """A fault: exit code 1, every word on standard error, the way to go on, nothing on standard output."""
        assert self.code == 1, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err
        assert self.out == ""


Fairveil = Callable[..., Answer]


@pytest.fixture
def fairveil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fairveil:
    """The command, in an empty folder. An exception that it lets through fails the test by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # it may add the folder

    def command(*argv: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fairveil", *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return Answer(leaving.value.code, printed.out, printed.err)

    return command


def config(**sections: Any) -> Path:
    """The small config with sections replaced (None: left out), as a file in the current folder."""
    values = {key: value for key, value in (CONFIG | sections).items() if value is not None}
    path = Path("bad.toml")
    path.write_text(tomli_w.dumps(values))
    return path


def no_run() -> None:
    """No run folder was made."""
    assert not Path("runs").exists()


def setting(text: str) -> list[str]:
    """`text` as a --set option."""
    return ["--set", text]


# ---- the config file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.name=os:path"], ['model.name = "os:path" is not a model']),
        (["model.name=mlp", "model.hidden=10000000000000"], ["could not be built", "smaller model"]),
        (["seed=9223372036854775808"], ["seed", "less than"]),
        (["data.options={ x = 2020-01-01 }"], ["data.options.x", "2020-01-01"]),
    ],
)
def test_absurd_settings(fairveil: Fairveil, settings: list[str], words: list[str]) -> None:
    fairveil("plan", config(), *(part for text in settings for part in setting(text))).refuses(*words)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_missing_config(fairveil: Fairveil, command: str) -> None:
    """A config that is not there."""
    fairveil(command, "nowhere.toml").refuses("nowhere.toml cannot be read", "No such file", "fairveil new")
    no_run()


def test_folder_as_config(fairveil: Fairveil, tmp_path: Path) -> None:
    """A folder where a config is meant."""
    fairveil("plan", tmp_path).refuses(f"{tmp_path} cannot be read", "TOML")


@pytest.mark.parametrize("content", ["rounds = = 3", "[data\n", 'name = "a"\nname = "b"\n[data]'])
def test_malformed_toml(fairveil: Fairveil, content: str) -> None:
    """A file that is no TOML: the line is named."""
    Path("bad.toml").write_text(content)
    fairveil("plan", "bad.toml").refuses("bad.toml is not valid TOML", "line ")


def test_binary_config(fairveil: Fairveil) -> None:
    """A file that is no text."""
    Path("bad.toml").write_bytes(b"\xff\xfe\x00name")
    fairveil("plan", "bad.toml").refuses("bad.toml")


def test_empty_config(fairveil: Fairveil) -> None:
    """An empty file: the first section that is missing is named."""
    Path("bad.toml").write_text("")
    fairveil("plan", "bad.toml").refuses("data is missing")


def test_schema_version(fairveil: Fairveil) -> None:
    """A config of a later fairveil."""
    fairveil("plan", config(schema_version=2)).refuses("schema_version = 2 is not known", "schema_version = 1")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("sede=3", ["sede = 3", "not a known key", "seed = 3"]),
        ("privacy.epsilom=3", ["privacy.epsilom = 3", "not a known key", "privacy.epsilon = 3"]),
        ("algorithm.lerning_rate=0.1", ["algorithm.lerning_rate = 0.1", "Try: algorithm.learning_rate = 0.1"]),
        ("algorithm.sample_rate=0.1", ["algorithm.sample_rate = 0.1", "not a known key", "batch_size"]),
        ("data.split.client=3", ["data.split.client = 3", "data.split.clients = 3"]),
        ("data.options.size=3", ["data.options.size = 3", "not a known key"]),
        ("model.hiden=3", ["model.hiden = 3", "not an option"]),
        ("engine.worker=3", ["engine.worker = 3", "engine.workers = 3"]),
    ],
)
def test_unknown_key(fairveil: Fairveil, typed: str, words: list[str]) -> None:
    """A misspelt key is named with its value, and with the nearest that there is."""
    fairveil("run", config(), *setting(typed)).refuses(*words)
    no_run()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ('seed="three"', ['seed = "three"', "integer"]),
        ("seed=-1", ["seed = -1", "greater than or equal to 0"]),
        ("seed=1.5", ["seed = 1.5", "integer"]),
        ("seed=true", ["seed = true", "integer"]),
        ("seed=2024-01-01", ["seed = ", "2024-01-01", "integer"]),
        ('name="a/b"', ['name = "a/b"']),
        ('name="../up"', ['name = "../up"']),
        ("privacy=3", ["privacy = 3"]),
        ("privacy.epsilon=abc", ['privacy.epsilon = "abc"', "number", "privacy.epsilon = 5.0"]),
        ("privacy.delta=[1]", ["privacy.delta = [1]", "number"]),
        ("algorithm.rounds=0", ["algorithm.rounds = 0", "greater than or equal to 1"]),
        ("algorithm.rounds=2.5", ["algorithm.rounds = 2.5", "integer"]),
        ("algorithm.learning_rate=0", ["algorithm.learning_rate = 0", "greater than 0"]),
        ("algorithm.learning_rate=nan", ["algorithm.learning_rate = NaN", "finite number"]),
        ("algorithm.learning_rate=inf", ["algorithm.learning_rate = Infinity", "finite number"]),
        ("engine.workers=0", ["engine.workers = 0", "greater than or equal to 1"]),
        ("engine.kind=flowr", ['engine.kind = "flowr"', 'engine.kind = "flower"']),
        ("metrics.every=0", ["metrics.every = 0"]),
        ("data.sizes=exact", ['data.sizes = "exact"', "'rounded' or 'public'"]),
        ("data.split.clients=0", ["data.split.clients = 0"]),
        ("data.split.clients=5000", ["data.split.clients = 5000", "1,438 training records"]),
        ("data.split.kind=idd", ['data.split.kind = "idd"', 'data.split.kind = "iid"']),
        ("model.name=7", ["model.name = 7", "string"]),
    ],
)
def test_wrong_value(fairveil: Fairveil, typed: str, words: list[str]) -> None:
    """A value of the wrong type, or out of range, is named with the rule."""
    fairveil("run", config(), *setting(typed)).refuses(*words)
    no_run()


@pytest.mark.parametrize("typed", ["nonsense", "=3", "privacy.=3", " =3"])
def test_set_needs_key_and_value(fairveil: Fairveil, typed: str) -> None:
    """What is no setting."""
    fairveil("plan", config(), *setting(typed)).refuses(f"--set {typed} is not a setting", "key=value")


def test_set_reaches_into_a_value(fairveil: Fairveil) -> None:
    """A key below a value that is no section."""
    fairveil("plan", config(seed=3), *setting("seed.low=1")).refuses("--set seed.low=1", "not a section")


def test_set_is_typed(fairveil: Fairveil) -> None:
    """--set lays typed values over the config: numbers are numbers."""
    path = config(privacy={"epsilon": 8.0, "delta": 1e-3})
    answer = fairveil("plan", path, "--json", *setting("privacy.epsilon=3"), *setting("algorithm.rounds=2"))
    assert answer.code == 0
    planned = json.loads(answer.out)
    assert (2.9 < planned["epsilon"] <= 3, planned["rounds"]) == (True, 2)


# ---- privacy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_is_no_budget(fairveil: Fairveil, value: float) -> None:
    """A budget of zero, below, or without a bound."""
    answer = fairveil("run", config(privacy={"epsilon": value, "delta": 1e-3}))
    answer.refuses(f"privacy.epsilon = {value:g} is not a budget", "positive and finite", "privacy.epsilon = 5.0")
    no_run()


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, -1e-5, float("nan")])
def test_delta_is_no_probability(fairveil: Fairveil, value: float) -> None:
    """A delta outside (0, 1)."""
    answer = fairveil("run", config(privacy={"epsilon": 5.0, "delta": value}))
    answer.refuses(f"privacy.delta = {value:g} is not a probability", "1/n", "privacy.delta = 1e-4")
    no_run()


def test_delta_above_one_in_n_records(fairveil: Fairveil) -> None:
    """A delta at which whole records could be published: 1,438 records of 4 clients are 360 at most."""
    data = CONFIG["data"] | {"sizes": "public"}
    answer = fairveil("run", config(data=data, privacy={"epsilon": 5.0, "delta": 0.0028}))
    answer.refuses("privacy.delta = 0.0028 is too large", "360 records", "1/n = 0.0028", "privacy.delta = 1e-03")
    no_run()


def test_delta_above_one_in_n_clients(fairveil: Fairveil) -> None:
    """A delta at which a whole client could be published; the one below goes."""
    algorithm = {"name": "dp-fedavg", "rounds": 2}
    answer = fairveil("run", config(algorithm=algorithm, privacy={"noise_multiplier": 1.0, "delta": 0.25}))
    answer.refuses("privacy.delta = 0.25 is too large", "4 clients", "privacy.delta = 1e-01")
    no_run()
    path = config(algorithm=algorithm, privacy={"noise_multiplier": 1.0, "delta": 0.1})
    assert fairveil("plan", path, "--json").code == 0


def test_epsilon_and_noise_multiplier(fairveil: Fairveil) -> None:
    """Both, or neither."""
    both = config(privacy={"epsilon": 5.0, "noise_multiplier": 1.0, "delta": 1e-3})
    words = ["privacy.epsilon = 5 and privacy.noise_multiplier = 1", "both given", "remove privacy.noise_multiplier"]
    fairveil("run", both).refuses(*words)
    fairveil("run", config(privacy={"delta": 1e-3})).refuses("privacy.epsilon is missing", "noise_multiplier")
    fairveil("run", config(privacy={"epsilon": 5.0})).refuses("privacy.delta is missing", "privacy.delta = 0.0001")
    fairveil("run", config(privacy=None)).refuses("privacy is missing")
    no_run()


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"noise_multiplier": -1.0}, ["privacy.noise_multiplier = -1.0", "greater than or equal to 0"]),
        ({"noise_multiplier": float("inf")}, ["privacy.noise_multiplier = Infinity", "finite"]),
        ({"epsilon": 5.0, "clip_norm": 0.0}, ["privacy.clip_norm = 0.0", "greater than 0"]),
        ({"epsilon": 5.0, "clip_norm": -1.0}, ["privacy.clip_norm = -1.0", "greater than 0"]),
        ({"epsilon": 5.0, "clip_norm": float("inf")}, ["privacy.clip_norm = inf", "privacy.clip_norm = 1.0"]),
        ({"epsilon": 5.0, "unit": "client"}, ['privacy.unit = "client"', "global", 'privacy.unit = "record"']),
        ({"epsilon": 5.0, "unit": "hospital"}, ['privacy.unit = "hospital"', "'record', 'client' or 'metric'"]),
        ({"epsilon": 5.0, "adjacency": "add"}, ['privacy.adjacency = "add"', 'privacy.adjacency = "add-remove"']),
        ({"epsilon": 5.0, "accountant": "plb"}, ['privacy.accountant = "plb"', 'privacy.accountant = "pld"']),
        ({"epsilon": 5.0, "accountant": "rdp", "adjacency": "replace"}, ['privacy.accountant = "rdp"', "replace"]),
    ],
)
def test_wrong_privacy(fairveil: Fairveil, privacy: dict[str, Any], words: list[str]) -> None:
    """What cannot be promised is named before anything runs."""
    fairveil("run", config(privacy={"delta": 1e-3} | privacy)).refuses(*words)
    no_run()


def test_infinite_clip_norm_without_noise(fairveil: Fairveil) -> None:
    """Without noise there is nothing to bound: it runs, and claims nothing."""
    path = config(privacy={"noise_multiplier": 0.0, "clip_norm": float("inf"), "delta": 1e-3})
    answer = fairveil("run", path, "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["epsilon"] not in (0, 0.0)
    assert "NaN" not in answer.out


# ---- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("algorithm.name=gobal", 'algorithm.name = "global"'),
        ("algorithm.name=dpfedavg", 'algorithm.name = "dp-fedavg"'),
        ("model.name=logistics", 'model.name = "logistic"'),
        ("data.dataset=digit", 'data.dataset = "digits"'),
        ("data.dataset=gausian-clusters", 'data.dataset = "gaussian-clusters"'),
    ],
)
def test_unknown_name(fairveil: Fairveil, typed: str, near: str) -> None:
    """A name that is not in the registry: the nearest is named, and all others."""
    key, _, value = typed.partition("=")
    fairveil("run", config(), *setting(typed)).refuses(f'{key} = "{value}" is not known', f"Try: {near}", "one of")
    no_run()


@pytest.mark.parametrize("key", ["algorithm.name", "model.name", "data.dataset"])
@pytest.mark.parametrize("path", ["nowhere.at.all:Net", "json:Net", ":", "json:", "a b:c"])
def test_own_class_that_is_not_there(fairveil: Fairveil, key: str, path: str) -> None:
    """A module or a class that cannot be found."""
    fairveil("plan", config(), *setting(f'{key}="{path}"')).refuses(f'{key} = "{path}" cannot be imported')


@pytest.mark.parametrize("key", ["algorithm.name", "data.dataset"])
def test_own_class_of_the_wrong_kind(fairveil: Fairveil, key: str) -> None:
    """A class that is something else."""
    words = [f'{key} = "json:JSONDecoder" is not a', "derived from"]
    fairveil("plan", config(), *setting(f'{key}="json:JSONDecoder"')).refuses(*words)


def test_own_module_with_an_error(fairveil: Fairveil) -> None:
    """A module that fails when it is imported: its own words come through."""
    Path("brokenmodule.py").write_text("import nothing_of_this_name\n")
    words = ['model.name = "brokenmodule:Net" cannot be imported', "nothing_of_this_name"]
    fairveil("plan", config(), *setting('model.name="brokenmodule:Net"')).refuses(*words)


# ---- models ----------------------------------------------------------------------------------------

NETS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, features, classes):
        super().__init__({layers})
"""


def net(name: str, layers: str) -> list[str]:
    """A user's network in a module of its own, in the current folder."""
    Path(f"{name}.py").write_text(NETS.format(layers=layers))
    return setting(f'model.name="{name}:Net"')


def test_batch_norm(fairveil: Fairveil) -> None:
    """Layers that mix records are refused by name, with the layer to put there."""
    one = net("bn_one", "nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Linear(24, classes)")
    fairveil("run", config(), *one).refuses("model layer '2' is BatchNorm1d", "privacy", "torch.nn.GroupNorm(8, 24)")
    two = net("bn_two", "nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, classes)")
    fairveil("run", config(), *two).refuses("model layer '1' is BatchNorm2d", "torch.nn.GroupNorm(8, 8)")
    inner = net("bn_in", "nn.Sequential(nn.Flatten(), nn.SyncBatchNorm(64)), nn.Linear(64, classes)")
    fairveil("run", config(), *inner).refuses("model layer '0.1' is SyncBatchNorm", "torch.nn.GroupNorm(32, 64)")
    no_run()


@pytest.mark.parametrize(
    ("name", "layers", "words"),
    [
        ("narrow", "nn.Flatten(), nn.Linear(64, 7)", ["outputs of shape (2, 7)", "(2, 10)", "width 10"]),
        ("flat", "nn.Flatten(0), nn.Linear(128, classes)", ['model.name = "flat:Net"', "shape"]),
        ("misfit", "nn.Flatten(), nn.Linear(63, classes)", ["does not fit records of shape (1, 8, 8)"]),
        ("image", "nn.Conv2d(1, classes, 3)", ["outputs of shape (2, 10, 6, 6)", "(2, 10)"]),
        ("bare", "nn.Flatten(), nn.Softmax(1)", ["model.name"]),
        ("dropout", "nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes)", ["Dropout"]),
    ],
)
def test_model_does_not_fit(fairveil: Fairveil, name: str, layers: str, words: list[str]) -> None:
    """A model that cannot work is found before anything runs."""
    fairveil("run", config(), *net(name, layers)).refuses(*words)
    no_run()


def test_dropout_in_client_level_training(fairveil: Fairveil) -> None:
    """A layer that draws from torch's own generator would give another run after each interruption."""
    algorithm = {"name": "dp-fedavg", "rounds": 2, "sample_rate": 1.0}
    path = config(algorithm=algorithm, privacy={"noise_multiplier": 1.0, "delta": 0.1})
    fairveil("run", path, *net("dropping", "nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes)")).refuses("Dropout")
    no_run()


def test_model_with_another_signature(fairveil: Fairveil) -> None:
    """A class that is not made from features and classes: it is told how it is called."""
    Path("signature.py").write_text("from torch import nn\n\nclass Net(nn.Linear):\n    def __init__(self): pass\n")
    words = ["signature:Net", "features, classes"]
    fairveil("run", config(), *setting('model.name="signature:Net"')).refuses(*words)
    no_run()


@pytest.mark.parametrize(
    "forward",
    ["return (self.last(x.flatten(1)),)", "return self.last(x.flatten(1) if x.sum() < 1e9 else 0 * x.flatten(1))"],
    ids=["tuple", "branch"],
)
def test_model_that_cannot_be_trained(fairveil: Fairveil, forward: str, request: pytest.FixtureRequest) -> None:
    """Outputs that are no tensor, and a branch on the records, which gradients by record cannot follow."""
    name = f"untrainable_{request.node.callspec.id}"
    lines = ["super().__init__()", "self.last = nn.Linear(64, classes)"]
    Path(f"{name}.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n"
        f"    def __init__(self, features, classes):\n        {'; '.join(lines)}\n"
        f"    def forward(self, x):\n        {forward}\n"
    )
    fairveil("run", config(), *setting(f'model.name="{name}:Net"')).refuses(f'model.name = "{name}:Net"')
    no_run()


def test_model_that_is_no_module(fairveil: Fairveil) -> None:
    """A function that gives something else."""
    Path("nomodule.py").write_text("def net(features, classes):\n    return 3\n")
    words = ['model.name = "nomodule:net"', "torch.nn.Module", "int"]
    fairveil("run", config(), *setting('model.name="nomodule:net"')).refuses(*words)


def test_cnn_on_a_table(fairveil: Fairveil) -> None:
    """A convolution on records that are no images."""
    data = {"dataset": "gaussian-clusters"}
    words = ['model.name = "cnn" does not fit', 'model.name = "mlp"']
    fairveil("plan", config(data=data, model={"name": "cnn"})).refuses(*words)


# ---- a user's file ---------------------------------------------------------------------------------


def table(rows: list[tuple[Any, ...]] | None = None) -> dict[str, Any]:
    """A CSV of three hospitals with twenty records each, and then `rows`; as the data section of a config."""
    good = [(f"h{i % 3}", i / 10, (i * 7) % 5, i % 2) for i in range(60)]
    lines = [",".join(map(str, row)) for row in [("hospital", "age", "dose", "outcome"), *good, *(rows or [])]]
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    return {"dataset": "file", "options": {"path": "visits.csv", "client": "hospital", "target": "outcome"}}


def test_csv_runs(fairveil: Fairveil) -> None:
    """The good file runs, so that the tests below fail for their own reason."""
    answer = fairveil("run", config(data=table()), "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["rounds"] == ROUNDS


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"kind": "range", "low": "a", "high": 1}, ["data.options.prepare.age.low", "valid number"]),
        ({"kind": "range", "low": 0, "high": 1, "extra": 3}, ["data.options.prepare.age.extra", "Known here: high"]),
        ({"kind": "range", "low": 0}, ["data.options.prepare.age.high is missing"]),
        ({"kind": "ragne", "low": 0, "high": 1}, ["data.options.prepare.age.kind", 'kind = "range"']),
        ({"low": 0, "high": 1}, ["data.options.prepare.age.kind is missing"]),
        ({"kind": "category", "values": [1, 1]}, ["one value twice", "values = [1]"]),
        ({"kind": "standard", "reason": "short"}, ["data.options.prepare.age.reason"]),
        ({"kind": "text", "length": 10**12}, ["data.options.prepare.age.length"]),
    ],
)
def test_a_column_declared_wrongly(fairveil: Fairveil, declared: dict[str, Any], words: list[str]) -> None:
    """The error names the column and what its kind takes."""
    data = table()
    data["options"]["prepare"] = {"age": declared}
    fairveil("plan", config(data=data)).refuses(*words)


def test_odd_values_in_a_declared_range_are_clipped(fairveil: Fairveil) -> None:
    data = table([("h0", "1e308", 1, 1), ("h0", "-inf", 1, 0), ("h0", "True", 1, 0)])
    data["options"]["prepare"] = {"age": {"kind": "range", "low": 0, "high": 6}}
    assert fairveil("plan", config(data=data)).code == 0


def test_csv_missing(fairveil: Fairveil) -> None:
    """A file that is not there: where it was looked for is told."""
    data = table()
    Path("visits.csv").unlink()
    words = ['data.options.path = "visits.csv" does not exist', str(Path.cwd() / "visits.csv")]
    fairveil("run", config(data=data)).refuses(*words)
    no_run()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("h0", "", 1, 1)], ['"age"', "row 61", "NaN"]),
        ([("h0", 3, 1, 1), ("h1", 3, "inf", 0), ("h1", 3, "inf", 0)], ['"dose"', "2 values", "row 62"]),
        ([("", 3, 1, 1)], ['data.options.client = "hospital"', "row 61"]),
        ([("h0", 3, 1, "")], ['data.options.target = "outcome"', "row 61"]),
        ([("h0", 3, 1, 0.5)], ['data.options.task = "classification"', "regression"]),
        ([("h0", 3, 1, 1, 1)], ["visits.csv", "cannot be read"]),
    ],
    ids=["empty", "infinite", "nobody", "no-target", "fraction", "long-row"],
)
def test_csv_with_a_bad_row(fairveil: Fairveil, rows: list[tuple[Any, ...]], words: list[str]) -> None:
    """A record that cannot be used is named with its row."""
    fairveil("run", config(data=table(rows))).refuses(*words)
    no_run()


def test_csv_with_one_class(fairveil: Fairveil) -> None:
    """Nothing to learn."""
    data = table()
    lines = Path("visits.csv").read_text().splitlines()
    Path("visits.csv").write_text("\n".join([lines[0], *[line[:-1] + "1" for line in lines[1:]]]))
    fairveil("run", config(data=data)).refuses('data.options.target = "outcome" holds one class only')
    no_run()


def test_csv_with_one_client(fairveil: Fairveil) -> None:
    """No federation."""
    data = table()
    Path("visits.csv").write_text(Path("visits.csv").read_text().replace("h1", "h0").replace("h2", "h0"))
    fairveil("run", config(data=data)).refuses('data.options.client = "hospital" names one client only')


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": "hopsital"}, ['data.options.client = "hopsital"', 'data.options.client = "hospital"']),
        ({"target": "outcom"}, ['data.options.target = "outcom"', 'data.options.target = "outcome"']),
        ({"features": ["age", "height"]}, ['"height"', "hospital, age, dose, outcome"]),
        ({"features": ["age", "outcome"]}, ['"outcome"', "also the client, target or group"]),
        ({"test_fraction": 1.0}, ["data.options.test_fraction = 1.0", "less than 1"]),
        ({"path": "visits.txt"}, ["visits.txt"]),
        ({"path": "."}, ["is not a file"]),
        (
            {"sensitive": ["dose", "aeg"]},
            ['data.options.sensitive holds "aeg", which is not a column', 'data.options.sensitive = ["age"]'],
        ),
        ({"sensitive": "age"}, ['data.options.sensitive = "age"']),
    ],
)
def test_csv_options(fairveil: Fairveil, options: dict[str, Any], words: list[str]) -> None:
    """A column that is not there, or not for this."""
    data = table()
    data["options"] |= options
    fairveil("run", config(data=data)).refuses(*words)
    no_run()


@pytest.mark.parametrize(
    ("options", "fairness", "words"),
    [
        ({}, {"groups": "dose"}, [
            'fairness.groups = "dose" is not an attribute of visits.csv', "There are: cluster.",
            "data.options.sensitive", 'fairness.groups = "cluster"',
        ]),
        ({"sensitive": ["dose"]}, {"groups": "doses"}, ["There are: cluster, dose.", 'fairness.groups = "dose"']),
        ({}, {"positive": 2}, [
            "fairness.positive = 2 is not a class of visits.csv", "It has 2 classes, numbered from 0",
            "fairness.positive = 1",
        ]),
        ({}, {"positive": -1}, ["fairness.positive = -1", "greater than or equal to 0"]),
        ({}, {"positive": True}, ["fairness.positive = true"]),
        ({}, {"reference": "centre"}, ['fairness.reference = "centre"', 'fairness.reference = "central"']),
        ({}, {"group": "dose"}, ['fairness.group = "dose" is not a known key', 'fairness.groups = "dose"']),
    ],
)  # fmt: skip
def test_what_a_run_cannot_be_judged_by(
    fairveil: Fairveil, options: dict[str, Any], fairness: dict[str, Any], words: list[str]
) -> None:
    """The key, the value, what there is, and what to type."""
    data = table()
    data["options"] |= options
    fairveil("run", config(data=data, fairness=fairness)).refuses(*words)
    no_run()


def test_a_regression_has_no_advantage(fairveil: Fairveil) -> None:
    """Whatever number is typed, there is no class of it: the fix is to leave it out."""
    data = table()
    data["options"] |= {"task": "regression"}
    answer = fairveil("run", config(data=data, model={"name": "linear"}, fairness={"positive": 1}))
    answer.refuses("fairness.positive = 1 is not a class", "It is a regression", "leave out fairness.positive")
    assert "Try: fairness.positive" not in answer.err
    no_run()


def test_csv_is_cut_by_nature(fairveil: Fairveil) -> None:
    """Records that have an owner are not dealt out to others."""
    split = {"kind": "iid", "clients": 3}
    words = ['data.split.kind = "iid"', "already belongs to a client", 'kind = "natural"']
    fairveil("run", config(data=table() | {"split": split})).refuses(*words)


def test_more_classes_in_a_rotated_table(fairveil: Fairveil) -> None:
    """A table cannot be turned."""
    data = {"dataset": "gaussian-clusters", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [1, 1]}}
    fairveil("run", config(data=data)).refuses("data.split.kind")


# ---- run folders -----------------------------------------------------------------------------------


def finished(fairveil: Fairveil, path: Path, *more: str) -> Path:
    """The folder of a run that went well."""
    answer = fairveil("run", path, "--json", *more)
    assert answer.code == 0, answer.err
    return Path(json.loads(answer.out)["run"])


class Stop(BaseException):
    """Ends a command on the spot, as a crash would."""


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """Whatever runs in here stops when it would save round `number`."""
    save = Store.checkpoint

    def checkpoint(store: Store, at: int, *rest: Any) -> None:
        if at == number:
            raise Stop
        save(store, at, *rest)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Store, "checkpoint", checkpoint)
        yield


def unfinished(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """The folder of a run that was cut off in round 3."""
    with crashing(monkeypatch, 3):
        fairveil("run", path)
    (folder,) = Path("runs").iterdir()
    return folder


def test_resume_of_something_else(fairveil: Fairveil, tmp_path: Path) -> None:
    """A folder that is no run, or not there; a config that never ran."""
    Path("other").mkdir()
    fairveil("run", "other", "--resume").refuses("other is not a run folder", "config.toml", "fairveil list runs")
    assert list(Path("other").iterdir()) == []
    fairveil("run", "nowhere", "--resume").refuses("nowhere cannot be read")
    fairveil("run", config(), "--resume").refuses("no run of this config under runs", "fairveil list runs")
    no_run()


def test_resume_with_settings(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is under way keeps what was promised."""
    folder = unfinished(fairveil, monkeypatch, config())
    answer = fairveil("run", folder, "--resume", *setting("privacy.noise_multiplier=0.5"))
    answer.refuses("--set privacy.noise_multiplier=0.5", "under way", "without --resume")
    assert fairveil("run", folder, "--resume").code == 0


def test_run_on_a_run_folder(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --resume a folder is refused, and told how."""
    folder = unfinished(fairveil, monkeypatch, config())
    fairveil("run", folder).refuses(f"{folder} is a folder", f"fairveil run {folder} --resume")
    assert fairveil("run", folder, "--resume").code == 0


def test_resume_when_the_data_changed(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other records under the same name: refused, until they are restored."""
    path = config(data=table())
    folder, before = unfinished(fairveil, monkeypatch, path), Path("visits.csv").read_text()
    Path("visits.csv").write_text(before.replace("h0,0.3,1,1", "h0,0.4,1,1"))
    assert Path("visits.csv").read_text() != before
    fairveil("run", folder, "--resume").refuses(f"data of {folder} have changed", "the same records", "restore")
    Path("visits.csv").write_text(before + "h0,0.3,1,1\n")
    fairveil("run", folder, "--resume").refuses(f"data of {folder} have changed")
    Path("visits.csv").write_text(before)
    assert fairveil("run", folder, "--resume").code == 0
    other = finished(fairveil, path)
    assert differ(outcome(folder), outcome(other)) is None


@pytest.mark.parametrize(
    ("key", "value"), [("rounds", ROUNDS + 1), ("batch_size", 32), ("learning_rate", 0.25), ("seed", 1)]
)
def test_resume_when_the_config_changed(
    fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch, key: str, value: float
) -> None:
    """A config that was edited inside the run folder is no longer what was promised, even where the price is."""
    folder = unfinished(fairveil, monkeypatch, config())
    stored = folder / "config.toml"
    values, before = tomllib.loads(stored.read_text()), stored.read_text()
    (values if key == "seed" else values["algorithm"])[key] = value
    stored.write_text(tomli_w.dumps(values))
    answer = fairveil("run", folder, "--resume")
    assert answer.code in (1, 2)
    assert "changed" in answer.err
    stored.write_text(before)
    assert fairveil("run", folder, "--resume").code == 0


def test_damaged_database(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that cannot be read is a fault, told without a traceback; nothing is written over it."""
    folder = unfinished(fairveil, monkeypatch, config())
    for name in ("run.sqlite-wal", "run.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "run.sqlite").write_bytes(b"this is no database" * 1000)
    answer = fairveil("run", folder, "--resume")
    assert answer.code in (1, 2)
    assert str(folder) in answer.err
    assert (folder / "run.sqlite").read_bytes().startswith(b"this is no database")


def test_run_of_another_algorithm_is_not_in_the_way(fairveil: Fairveil) -> None:
    """An old run of the same name whose algorithm cannot be imported any more does not stop --resume CONFIG."""
    path = config()
    folder = finished(fairveil, path)
    old = Path("runs/bad-20200101-000000")
    old.mkdir()
    (old / "config.toml").write_text((folder / "config.toml").read_text().replace('"global"', '"gone:Algorithm"'))
    os.utime(folder / "config.toml", (1e9, 1e9))  # so that the old one is looked at first
    assert fairveil("run", path, "--resume").code == 0


# ---- the disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", ["file/runs", "file", "/proc/nowhere/runs", "dangling"])
def test_unwritable_runs_folder(fairveil: Fairveil, runs: str) -> None:
    """A runs folder that cannot be made."""
    Path("file").write_text("kept")
    Path("dangling").symlink_to("/nowhere/at/all")
    fairveil("run", config(), "--runs", runs).refuses(f"{runs} cannot be written", "--runs FOLDER")
    assert Path("file").read_text() == "kept"


def test_name_too_long_for_a_folder(fairveil: Fairveil) -> None:
    """A name that no file system takes."""
    answer = fairveil("run", config(name="a" * 300))
    assert answer.code in (1, 2)
    assert "name" in answer.err


@contextmanager
def mounted(folder: Path, kilobytes: int) -> Iterator[None]:
    """A small file system of its own; the test is skipped where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_read_only_disk(fairveil: Fairveil, tmp_path: Path) -> None:
    """A disk that is mounted read-only."""
    with mounted(tmp_path / "small", 1024):
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
        fairveil("run", config(), "--runs", "small").refuses("small cannot be written", "--runs FOLDER")


def test_disk_turns_read_only(fairveil: Fairveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that turns read-only in the middle of a run: a fault; what was released is not denied."""
    expected = outcome(finished(fairveil, config()))
    small = str(tmp_path / "small")
    with mounted(tmp_path / "small", 8192):
        with monkeypatch.context() as patch:
            save = Store.finish_round

            def finish_round(store: Store, number: int, *rest: Any) -> None:
                if number == 3:
                    # Open for writing: it cannot be remounted, so its files refuse what is written to them.
                    patch.setattr(os, "fsync", refuse)
                save(store, number, *rest)

            def refuse(*_: Any) -> None:
                raise OSError(30, "Read-only file system")

            patch.setattr(Store, "finish_round", finish_round)
            answer = fairveil("run", config(), "--runs", small)
        answer.stops("Read-only file system", "--resume")
        assert "Nothing was released" not in answer.err
        (folder,) = Path(small).iterdir()
        assert fairveil("run", folder, "--resume").code == 0
        assert differ(outcome(folder), expected) is None


@pytest.mark.parametrize("free", [0, 8, 40, 90, 130, 170])
def test_full_disk(fairveil: Fairveil, tmp_path: Path, free: int) -> None:
    """A disk that fills up, anywhere in a run: a clear fault; with space again the same run is finished."""
    expected = outcome(finished(fairveil, config()))
    small, ballast = tmp_path / "small", tmp_path / "small" / "ballast"
    with mounted(small, 4096):
        space = os.statvfs(small)
        ballast.write_bytes(bytes(space.f_bavail * space.f_bsize - free * 1024))
        answer = fairveil("run", config(), "--runs", small)
        gc.collect()  # a file that was left open says so here, and in no other test
        answer.stops("could not be written")
        assert "full" in answer.err or "space" in answer.err
        ballast.unlink()
        folders = [path for path in small.iterdir() if (path / "config.toml").exists()]
        if not folders:  # it had not promised anything yet
            folders = [finished(fairveil, config(), "--runs", str(small))]
        assert fairveil("run", folders[0], "--resume").code == 0
        assert differ(outcome(folders[0]), expected) is None


def test_disk_fills_in_the_middle(fairveil: Fairveil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills up after round 3: what was finished is safe, and the command to go on is told."""
    expected = outcome(finished(fairveil, config()))
    small, ballast = tmp_path / "small", tmp_path / "small" / "ballast"
    with mounted(small, 4096):
        show = cli.RoundBar.show

        def fill(bar: cli.RoundBar, report: RoundReport) -> None:
            show(bar, report)
            if report.round == 3:
                space = os.statvfs(small)
                ballast.write_bytes(bytes(space.f_bavail * space.f_bsize))

        with monkeypatch.context() as patch:
            patch.setattr(cli.RoundBar, "show", fill)
            answer = fairveil("run", config(), "--runs", small)
        (folder,) = [path for path in small.iterdir() if path.is_dir()]
        answer.stops(f"{folder} could not be written", "What was finished is safe", f"fairveil run {folder} --resume")
        assert 3 <= outcome(folder).checkpoint.round < ROUNDS
        # As long as it is full it stops again, and still loses nothing.
        fairveil("run", folder, "--resume").stops("could not be written")
        ballast.unlink()
        assert fairveil("run", folder, "--resume").code == 0
        assert differ(outcome(folder), expected) is None


def test_file_size_limit(fairveil: Fairveil) -> None:
    """A quota on the size of files does the same, for any user."""
    expected = outcome(finished(fairveil, config()))
    shutil.rmtree("runs")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        answer = fairveil("run", config())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gc.collect()
    answer.stops("could not be written")
    (folder,) = Path("runs").iterdir()
    if not (folder / "config.toml").exists():
        folder = finished(fairveil, config())
    assert fairveil("run", folder, "--resume").code == 0
    assert differ(outcome(folder), expected) is None


# ---- the other commands ----------------------------------------------------------------------------


def test_new_does_not_overwrite(fairveil: Fairveil) -> None:
    """What is there stays; an algorithm that is not there, or a folder that is not, is named."""
    Path("mine.toml").write_text("mine")
    fairveil("new", "mine.toml").refuses("mine.toml exists", "left as it is", "another name")
    assert Path("mine.toml").read_text() == "mine"
    fairveil("new", "other.toml", "--example", "gobal").refuses('"gobal" is not known', '"global"')
    fairveil("new", "nowhere/other.toml").refuses("nowhere/other.toml cannot be written", "No such file")
    assert not Path("other.toml").exists()


@pytest.mark.parametrize("algorithm", ["global", "local", "oracle", "dp-fedavg"])
def test_new_can_be_planned(fairveil: Fairveil, algorithm: str) -> None:
    """What `new` writes is right."""
    assert fairveil("new", "fresh.toml", "--example", algorithm).code == 0
    rounds = setting("algorithm.rounds=1")
    assert json.loads(fairveil("plan", "fresh.toml", "--json", *rounds).out)["algorithm"] == algorithm


ACCOUNT = ["account", "--records", "1000", "--batch", "50", "--rounds", "3"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ["--epsilon and --noise-multiplier", "neither is given"]),
        ("--epsilon 3 --noise-multiplier 2", ["--epsilon and --noise-multiplier", "3 and 2", "both given"]),
        ("--epsilon 0", ["epsilon", "0", "It must"]),
        ("--epsilon -2", ["epsilon", "-2", "It must"]),
        ("--epsilon nan", ["epsilon", "nan", "It must"]),
        ("--epsilon inf", ["epsilon", "inf", "It must"]),
        ("--noise-multiplier -1", ["--noise-multiplier -1", "finite, and not negative"]),
        ("--noise-multiplier nan", ["--noise-multiplier nan", "finite, and not negative"]),
        ("--noise-multiplier inf", ["--noise-multiplier inf", "finite, and not negative"]),
        ("--epsilon 3 --delta 0", ["delta", "0", "It must"]),
        ("--epsilon 3 --delta nan", ["delta", "nan", "It must"]),
        ("--epsilon 3 --delta 0.001", ["--delta 0.001 is too large", "1,000 records", "1/n = 0.001"]),
        ("--epsilon 3 --adjacency sideways", ["--adjacency", "sideways", "add-remove, replace"]),
        ("--epsilon 3 --accountant ours", ["--accountant", "ours", "rdp, pld, tightest"]),
        ("--epsilon 3 --accountant rdp --adjacency replace", ["rdp", "replace", "pld"]),
        ("--epsilon 3 --first-round-factor 0", ["--first-round-factor 0", "positive and finite"]),
        ("--epsilon 3 --select-rounds 2", ["--select-rounds 2 needs --select-epsilon"]),
        ("--epsilon 3 --select-rounds 2 --select-epsilon -1", ["--select-epsilon -1"]),
    ],
)
def test_account(fairveil: Fairveil, more: str, words: list[str]) -> None:
    """Numbers that make no question."""
    fairveil(*ACCOUNT, "--delta", "1e-4", *more.split()).refuses(*words)


@pytest.mark.parametrize("more", ["--epsilon abc", "--records 0", "--batch -1", "--rounds 1.5", "--nonsense 3"])
def test_account_usage(fairveil: Fairveil, more: str) -> None:
    """What is no number at all is refused by the parser: the option is named."""
    answer = fairveil(*ACCOUNT, "--delta", "1e-4", "--epsilon", "3", *more.split())
    assert answer.code == 2
    assert more.split()[0] in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("left_out", ["records", "batch", "rounds"])
def test_account_of_training_needs_all_of_it(fairveil: Fairveil, left_out: str) -> None:
    given = {"--records": "1000", "--batch": "50", "--rounds": "3", "--delta": "1e-4", "--epsilon": "3"}
    del given[f"--{left_out}"]
    answer = fairveil("account", *(part for pair in given.items() for part in pair))
    answer.refuses(f"--{left_out}: not given", "The price of training", "--vote")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--unit agent --sigma 25", ["--queries: not given", "The price of votes"]),
        ("--sigma 25", ["--queries, --unit: not given"]),
        ("--queries 500 --sigma 25", ["--unit: not given"]),
        ("--queries 500 --unit agent", ["--epsilon and --sigma", "neither is given"]),
        ("--queries 500 --unit agent --sigma 25 --epsilon 3", ["--epsilon and --sigma", "3 and 25", "both given"]),
        ("--queries 0 --unit agent --sigma 25", ["--queries 0", "at least 1"]),
        ("--queries -5 --unit agent --sigma 25", ["--queries -5", "at least 1"]),
        ("--queries 500 --unit agnet --sigma 25", ["--unit agnet", "agent, instance", "Try: --unit agent"]),
        ("--queries 500 --unit agent --sigma -1", ["--sigma -1", "finite, and not negative"]),
        ("--queries 500 --unit agent --sigma nan", ["--sigma nan", "finite, and not negative"]),
        ("--queries 500 --unit agent --sigma inf", ["--sigma inf", "finite, and not negative"]),
        (f"--queries {10**400} --unit agent --epsilon 3", ["--queries 1000", "out of all proportion"]),
        ("--queries 500 --unit agent --epsilon 0", ["--epsilon 0", "positive and finite"]),
        ("--queries 500 --unit agent --sigma 25 --delta 0", ["--delta 0", "between 0 and 1"]),
        ("--queries 500 --unit agent --sigma 25 --delta 1", ["--delta 1", "between 0 and 1"]),
        ("--queries 500 --unit agent --sigma 25 --delta nan", ["--delta nan", "between 0 and 1"]),
        ("--queries 500 --unit instance --sigma 25 --neighbours 0", ["--neighbours 0", "at least 1"]),
        ("--queries 500 --unit agent --sigma 25 --adjacency sideways", ["--adjacency sideways", "add-remove, replace"]),
        ("--queries 500 --unit agent --sigma 25 --accountant ours", ["--accountant ours", "rdp, pld, tightest"]),
        ("--queries 500 --unit agent --sigma 25 --adjacency replace --accountant rdp", ["rdp", "replace", "pld"]),
        ("--queries 500 --unit agent --sigma 25 --answers 9", ["--answers 9 needs --threshold-noise"]),
        ("--queries 500 --unit agent --sigma 25 --threshold-noise 9", ["--threshold-noise 9.0 needs --answers"]),
        ("--queries 5 --unit agent --sigma 25 --answers 6 --threshold-noise 9", ["--answers 6", "--queries 5"]),
        ("--queries 5 --unit agent --sigma 25 --answers 0 --threshold-noise 9", ["--answers 0", "at least 1"]),
        ("--queries 5 --unit agent --sigma 25 --answers 2 --threshold-noise -9", ["--threshold-noise -9", "negative"]),
        (
            "--queries 500 --unit agent --epsilon 1 --answers 9 --threshold-noise 5",
            ["--epsilon 1", "used up", "noise 5"],
        ),
        (
            "--queries 500 --unit agent --epsilon 1 --answers 9 --threshold-noise 0",
            ["--epsilon 1", "used up", "noise 0"],
        ),
        ("--queries 500 --unit agent --sigma 25 --labels 0", ["--labels 0", "at least 1"]),
        ("--queries 500 --unit agent --sigma 25 --labels 4 --classes 3", ["--labels 4", "--classes 3"]),
        ("--queries 500 --unit agent --sigma 25 --classes 1", ["--classes 1", "at least 2"]),
        (
            "--queries 5 --unit agent --sigma 25 --labels 4 --answers 3 --threshold-noise 9",
            ["--labels 4", "--answers 3"],
        ),
        ("--queries 500 --unit agent --sigma 25 --records 100", ["--records 100 is out of place with --vote"]),
        ("--queries 500 --unit agent --sigma 25 --batch 32", ["--batch 32 is out of place with --vote"]),
        ("--queries 500 --unit agent --sigma 25 --rounds 2", ["--rounds 2 is out of place with --vote"]),
        ("--queries 500 --unit agent --sigma 25 --local-epochs 1", ["--local-epochs 1 is out of place with --vote"]),
        (
            "--queries 500 --unit agent --sigma 25 --full-first-round",
            ["--full-first-round is out of place with --vote"],
        ),
        ("--queries 500 --unit agent --noise-multiplier 1", ["--noise-multiplier 1.0 is out of place with --vote"]),
    ],
)
def test_account_of_votes(fairveil: Fairveil, more: str, words: list[str]) -> None:
    """Numbers that make no question, or belong to another one."""
    fairveil("account", "--vote", "--delta", "1e-3", *more.split()).refuses(*words)


@pytest.mark.parametrize("more", ["--queries 500", "--sigma 25.0", "--unit agent", "--neighbours 5", "--labels 2"])
def test_account_of_votes_needs_to_be_asked_for(fairveil: Fairveil, more: str) -> None:
    answer = fairveil(*ACCOUNT, "--delta", "1e-4", "--epsilon", "3", *more.split())
    answer.refuses(f"{more} is out of place without --vote", "add --vote")


# ---- training that diverges ------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["1e39", "3e38", "2e38"])
def test_divergence(fairveil: Fairveil, rate: str) -> None:
    """A learning rate far too large: told as that, and never as a fault or a number that is none."""
    answer = fairveil("run", config(), "--json", *setting(f"algorithm.learning_rate={rate}"))
    assert "Warning" not in answer.err
    if answer.code == 0:  # large, but numbers to the end
        assert "Infinity" not in answer.out
    else:
        answer.refuses("no longer finite", "diverged", "a smaller algorithm.learning_rate")


# ---- one real process ------------------------------------------------------------------------------


def test_from_a_shell(tmp_path: Path) -> None:
    """A mistake in a command as the user starts it: nothing but the message, on standard error."""
    Path(tmp_path, "bad.toml").write_text(tomli_w.dumps(CONFIG | {"privacy": {"epsilon": 0.0, "delta": 1e-3}}))
    answer = subprocess.run(
        [Path(sys.executable).with_name("fairveil"), "plan", "bad.toml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")
    expected = """\
        privacy.epsilon = 0 is not a budget.
          It must be positive and finite: at 0 nothing could be learned from any record,
          and without a bound nothing would be promised. Nothing was run.
          Try: privacy.epsilon = 5.0 (or privacy.noise_multiplier = 0 for a run without privacy)
        """
    assert answer.stderr == textwrap.dedent(expected)
