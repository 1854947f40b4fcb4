"""The command line: what it prints, and where."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Fairveil = Callable[..., tuple[int, str, str]]


def one_object(text: str) -> Any:
    assert text.count("\n") == 1
    return json.loads(text)


SMALL = ("--set", "algorithm.rounds=3", "--set", "engine.workers=1")


def test_new_plan_run_list(fairveil: Fairveil) -> None:
    code, out, _ = fairveil("new")
    assert code == 0 and "fairveil plan fairveil.toml" in out
    code, out, _ = fairveil("plan", "fairveil.toml")
    assert code == 0 and "differentially private" in out and "noise multiplier" in out and not Path("runs").exists()
    code, out, _ = fairveil("run", "fairveil.toml", *SMALL)
    assert code == 0
    for words in ("differentially private", "accuracy by group", "Worst group:", "Run folder: runs/fairveil-"):
        assert words in out
    assert "largest gap between groups" in out
    code, out, _ = fairveil("list", "runs")
    assert code == 0 and "finished" in out


def test_json_is_one_object_on_standard_output(fairveil: Fairveil) -> None:
    fairveil("new", "--example", "oracle")
    code, out, _ = fairveil("plan", "fairveil.toml", "--json", *SMALL)
    plan = one_object(out)
    assert code == 0 and plan["algorithm"] == "oracle" and plan["clients"] == 10 and len(plan["units"]) == 10
    assert plan["statement"]["releases"][0]["planned_per_unit"] == [3, 3]
    code, out, _ = fairveil("run", "fairveil.toml", "--json", *SMALL)
    run = one_object(out)
    assert code == 0 and Path(run["run"]).is_dir() and run["rounds"] == 3
    assert run["epsilon"] == plan["epsilon"] and run["delta"] == 1e-3
    assert {"mean", "worst", "by_group"} <= set(run["accuracy"])
    code, out, _ = fairveil("run", run["run"], "--resume", "--json")
    assert one_object(out) == run


@pytest.mark.parametrize("what", ["algorithms", "models", "datasets"])
def test_lists(fairveil: Fairveil, what: str) -> None:
    code, out, _ = fairveil("list", what, "--json")
    rows = one_object(out)
    assert code == 0 and all(row["name"] and row["what"] for row in rows) and len(rows) >= 4


ACCOUNT = ("account", "--records", "2286", "--batch", "32", "--rounds", "200", "--delta", "1e-4", "--full-first-round")


@pytest.mark.parametrize(
    ("options", "noise"),
    [  # reference figures, from an independent computation
        (("--epsilon", "5", "--accountant", "rdp"), 1.7889),
        (("--epsilon", "5", "--accountant", "pld"), 1.6732),
        (("--epsilon", "2"), 3.4571),
        (("--epsilon", "5", "--first-round-factor", "4"), 1.518),
    ],
)
def test_account_solves_the_noise(fairveil: Fairveil, options: tuple[str, ...], noise: float) -> None:
    code, out, err = fairveil(*ACCOUNT, *options, "--json")
    answer = one_object(out)
    assert code == 0 and err == ""
    assert set(answer) == {"noise_multiplier", "epsilon", "delta", "accountant", "adjacency"}
    assert answer["noise_multiplier"] == pytest.approx(noise, rel=5e-3)
    assert answer["epsilon"] <= float(options[1])


def test_account_prices_a_noise(fairveil: Fairveil) -> None:
    code, out, _ = fairveil(*ACCOUNT, "--noise-multiplier", "1.6732", "--json")
    answer = one_object(out)
    assert code == 0 and answer["epsilon"] == pytest.approx(5.0, rel=5e-3) and answer["accountant"] == "pld"
    code, out, _ = fairveil(*ACCOUNT, "--noise-multiplier", "0", "--json")
    assert one_object(out)["epsilon"] == "infinity"


def test_account_with_selections_needs_more_noise(fairveil: Fairveil) -> None:
    """20 choices at epsilon 0.1 are zCDP of 20 * 0.01 / 8 = 0.025: less than a basic composition's 2 would leave."""
    plain = one_object(fairveil(*ACCOUNT, "--epsilon", "5", "--json")[1])["noise_multiplier"]
    choices = ("--select-rounds", "20", "--select-epsilon", "0.1")
    both = one_object(fairveil(*ACCOUNT, "--epsilon", "5", *choices, "--json")[1])["noise_multiplier"]
    rest = one_object(fairveil(*ACCOUNT, "--epsilon", "3", "--json")[1])["noise_multiplier"]
    assert plain < both < rest


VOTE = ("account", "--vote", "--queries", "500")


@pytest.mark.parametrize(
    ("sigma", "delta", "unit", "rdp", "pld"),
    [  # reference figures, from an independent computation
        ("25", "1e-3", "agent", 3.09, 2.735),
        ("25", "1e-3", "instance", 4.72, 4.208),
        ("25", "1e-5", "agent", 4.16, 3.849),
        ("25", "1e-5", "instance", 6.21, 5.759),
        ("30", "1e-3", "agent", 2.48, 2.189),
        ("30", "1e-3", "instance", 3.77, 3.350),
    ],
)
def test_account_prices_votes(fairveil: Fairveil, sigma: str, delta: str, unit: str, rdp: float, pld: float) -> None:
    for accountant, epsilon, found in (("rdp", rdp, "rdp"), ("pld", pld, "pld"), ("tightest", pld, "pld")):
        asked = ("--sigma", sigma, "--delta", delta, "--unit", unit, "--accountant", accountant)
        code, out, err = fairveil(*VOTE, *asked, "--json")
        answer = one_object(out)
        assert code == 0 and err == ""
        assert answer.pop("epsilon") == pytest.approx(epsilon, rel=2e-3)
        assert answer.pop("sensitivity") == pytest.approx(1 if unit == "agent" else 2**0.5)
        assert answer == {
            "noise_multiplier": float(sigma),
            "delta": float(delta),
            "accountant": found,
            "adjacency": "add-remove",
            "unit": "client" if unit == "agent" else "record",
            "queries": 500,
        }


def test_account_solves_the_noise_of_votes(fairveil: Fairveil) -> None:
    """The reference figures, read the other way round."""
    for unit, epsilon in (("client", "2.735"), ("record", "4.208")):
        code, out, _ = fairveil(*VOTE, "--epsilon", epsilon, "--delta", "1e-3", "--unit", unit, "--json")
        answer = one_object(out)
        assert code == 0 and answer["noise_multiplier"] == pytest.approx(25, rel=3e-3)
        assert answer["epsilon"] <= float(epsilon) and answer["unit"] == unit


def test_account_of_votes_in_lines(fairveil: Fairveil) -> None:
    """Without noise there is no guarantee; --neighbours, confident answers and several classes reach the mechanism."""
    silent = ("--sigma", "0", "--delta", "1e-3", "--unit", "instance")
    code, out, _ = fairveil(*VOTE, *silent, "--neighbours", "5", "--answers", "250", "--threshold-noise", "75")
    lines = dict(line.split() for line in out.splitlines())
    assert code == 0 and lines["epsilon"] == "infinity" and lines["noise_multiplier"] == "0.0"
    assert float(lines["sensitivity"]) == pytest.approx(2**0.5 / 5)
    _, out, _ = fairveil(*VOTE, *silent, "--labels", "4", "--classes", "6", "--adjacency", "replace", "--json")
    assert one_object(out)["sensitivity"] == pytest.approx(6**0.5)


def test_check_prints_every_clause(fairveil: Fairveil) -> None:
    code, out, _ = fairveil("check", "global", "--json")
    answer = one_object(out)
    assert code == 0 and answer["passed"] is True and len(answer["checks"]) == 7


def test_ctrl_c_shows_nothing_of_a_process_that_is_leaving(fairveil: Fairveil) -> None:
    fairveil("list", "algorithms")
    os.kill(os.getpid(), signal.SIGINT)  # would be a KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


AUDITED = {"epsilon_claimed", "epsilon_lower_bound", "confidence", "canaries", "guesses", "correct"}


def test_an_audit_of_a_config_and_of_a_run(fairveil: Fairveil) -> None:
    fairveil("new")
    code, out, _ = fairveil("audit", "fairveil.toml", "--canaries", "60", "--json", *SMALL)
    found = one_object(out)
    assert code == 0 and found.keys() >= AUDITED and found["canaries"] == 60 and found["confidence"] == 0.999
    _, out, _ = fairveil("run", "fairveil.toml", "--json", *SMALL)
    run = one_object(out)
    code, out, _ = fairveil("audit", run["run"], "--canaries", "60", "--guesses", "20")
    assert code == 0 and "of 20 guesses about 60 canaries" in out and "Claimed: epsilon" in out
    assert "more --canaries to refute" in out and "Kept with the run" in out
    kept = json.loads((Path(run["run"]) / "attacks/audit.json").read_text())
    assert kept["epsilon_claimed"] == run["epsilon"] and kept["guesses"] == 20
    fairveil("report", run["run"])
    assert "What attacks find" in (Path(run["run"]) / "report.html").read_text()


def test_an_alarm_is_a_failure(fairveil: Fairveil, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairveil.privacy import training

    monkeypatch.setattr(training, "noise_std", lambda bound, z: 0.0)
    fairveil("new")
    less = ("--set", "privacy.epsilon=1.0", "--set", "privacy.delta=1e-5")
    code, out, _ = fairveil("audit", "fairveil.toml", "--canaries", "600", *SMALL, *less)
    assert code == 1 and "ALARM: what is claimed is refuted" in out


def test_an_audit_of_nothing(fairveil: Fairveil) -> None:
    Path("empty").mkdir()
    code, _, err = fairveil("audit", "empty")
    assert code == 2 and "is not a run folder" in err
    code, _, err = fairveil("audit", "missing.toml")
    assert code == 2 and "missing.toml" in err
