"""Configs: TOML in, the same run out; settings are typed; the template is what it says."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fairveil.algorithms import ALGORITHMS
from fairveil.config import load_config, make_config
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.template import template


def test_the_resolved_config_reads_back_as_the_same(small: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(small)
    path = tmp_path / "resolved.toml"
    path.write_text(config.to_toml())
    again = load_config(path)
    assert again.resolved() == config.resolved() and again.to_toml() == config.to_toml()
    assert tomllib.loads(config.to_toml())["algorithm"]["local_epochs"] == 1  # defaults are written out


def test_infinite_clip_survives_toml(small: dict[str, Any], tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 0.0, "clip_norm": float("inf"), "delta": 1e-3}
    config = make_config(small | {"privacy": privacy})
    path = tmp_path / "plain.toml"
    path.write_text(config.to_toml())
    assert load_config(path).privacy.clip_norm == float("inf")


def test_the_digest_follows_what_decides_the_result(small: dict[str, Any]) -> None:
    digest = make_config(small).digest()
    assert make_config(small | {"name": "other", "engine": {"workers": 2}}).digest() == digest
    assert make_config(small | {"seed": 1}).digest() != digest


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("privacy.epsilon=3", ("privacy", "epsilon"), 3.0),
        ("privacy.epsilon = 2.5", ("privacy", "epsilon"), 2.5),
        ("seed=7", ("seed",), 7),
        ("algorithm.name=oracle", ("algorithm", "name"), "oracle"),
        ('model.name="mlp"', ("model", "name"), "mlp"),
        ("data.split.clients=[1, 2]", ("data", "split", "clients"), [1, 2]),
        ("metrics.every=2", ("metrics", "every"), 2),
    ],
)
def test_settings_are_typed(small: dict[str, Any], setting: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = make_config(small, [setting]).resolved()
    for key in path:
        found = found[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"sed": 1}, "sed = 1 is not a known key.", "seed = 1"),
        ({"privacy": {"epsilon": 8.0, "delta": 1e-3, "clip": 1.0}}, "privacy.clip = 1.0", "privacy.clip_norm = 1.0"),
        ({"privacy": {"epsilon": "8", "delta": 1e-3}}, 'privacy.epsilon = "8" is not valid.', "privacy.epsilon = 5.0"),
        ({"privacy": {"epsilon": 8.0}}, "privacy.delta is missing.", "privacy.delta = 0.0001"),
        ({"algorithm": {"name": "global", "round": 3}}, "algorithm.round = 3", "algorithm.rounds = 3"),
        ({"algorithm": {"name": "global", "rounds": 0}}, "algorithm.rounds = 0 is not valid.", "algorithm.rounds = 30"),
        (
            {"algorithm": {"name": "r-dpcfl", "clusters": "x"}},
            'algorithm.clusters = "x" is not valid.',
            'algorithm.clusters = "auto"',
        ),
        ({"algorithm": {"name": "global", "rounds": True}}, "algorithm.rounds = true", "algorithm.rounds = 30"),
        ({"algorithm": {"rounds": 3}}, "algorithm.name is missing.", 'algorithm.name = "global"'),
        ({"engine": {"kind": "locl"}}, 'engine.kind = "locl" is not valid.', 'engine.kind = "local"'),
        ({"name": "a/b"}, 'name = "a/b" is not valid.', 'name = "run"'),
        ({"model": 3}, "model = 3 is not valid.", "model = "),
        ({"model": {"name": 7}}, "model.name = 7 is not valid.", 'model.name = "logistic"'),
        ({"data": {"dataset": "digits", "split": 3}}, "data.split = 3", 'data.split = { kind = "iid", clients = 10 }'),
        ({"schema_version": 2}, "schema_version = 2 is not known.", "schema_version = 1"),
    ],
)
def test_mistakes(small: dict[str, Any], change: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        make_config(small | change)
    assert error.value.what.startswith(what) and error.value.fix.startswith(fix)
    assert error.value.why


@pytest.mark.parametrize("setting", ["nonsense", "privacy..epsilon=3", ".epsilon=3", "=3", "seed.x=3"])
def test_settings_that_are_none(small: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError, match="--set"):
        make_config(small | {"seed": 0}, [setting])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_template_of_every_algorithm_can_be_planned(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new.toml"
    path.write_text(template(name, str(path)))
    config = load_config(path)
    assert config.algorithm.name == name
    epsilon = make_plan(config).price.epsilon
    assert epsilon <= 8.0 or (config.build_algorithm().unit == "metric" and math.isfinite(epsilon))  # by its noise
    defaults = ALGORITHMS[name]().model_dump()
    shown = config.resolved()["algorithm"]
    assert {key: shown.get(key) for key in defaults} == defaults  # what is not shown is none
