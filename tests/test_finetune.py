"""Fine-tuning: for oneself, at no price, after a training that it does not change; and what is said about it."""

from __future__ import annotations

import json
import stat
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fairveil
from fairveil.algorithms import ALGORITHMS
from fairveil.algorithms.base import LocalTraining
from fairveil.config import make_config
from fairveil.contract import differ, outcome
from fairveil.data.federation import Records
from fairveil.errors import UserError
from fairveil.models import ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.release import Kept, Reply
from fairveil.privacy.statement import Statement
from fairveil.reading import Run, load_run
from fairveil.report.personal import personal_dots, personal_table
from fairveil.report.run_page import run_page
from fairveil.run import begin, drive, resume_run, start_run
from fairveil.serving import taken_back
from fairveil.session import Facts, Member, Session, Terms
from fairveil.store import Store
from fairveil.streams import Stream
from fairveil.sweep import make_sweep
from fairveil.sweep.summary import summarise_sweep
from fairveil.tasks import TUNED, descended

Fairveil = Callable[..., tuple[int, str, str]]
TINY = {"steps": 3, "learning_rate": 0.5, "local_steps": 4}


def personal(run: Run, client: int, name: str = "finetuned") -> torch.Tensor:
    """What a client has kept at the end."""
    (path,) = sorted((run.folder / "checkpoints").glob("*.safetensors"))[-1:]
    return load_file(path)[f"personal/{client}/{name}"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The same run without fine-tuning, and with it."""
    values: dict[str, Any] = {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90], "clients": [2, 3]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 3, "batch_size": 64, "learning_rate": 1.0},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "engine": {"workers": 1},
    }
    runs = tmp_path_factory.mktemp("both")
    plain, tuned = (start_run(make_config(each), runs=runs) for each in (values, values | {"finetune": TINY}))
    return load_run(plain.folder), load_run(tuned.folder)


# ---- what it does not change -----------------------------------------------------------------------


def test_the_released_model_and_the_ledger_are_the_same_bit_for_bit(both: tuple[Run, Run]) -> None:
    plain, tuned = both
    served = [(run.folder / "models" / "served.safetensors").read_bytes() for run in both]
    assert served[0] == served[1]
    first, second = outcome(plain.folder), outcome(tuned.folder)
    assert first.ledger == second.ledger and first.checkpoint.entries == second.checkpoint.entries
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(second.checkpoint.state[k])) for k, v in
               first.checkpoint.state.items())  # fmt: skip
    assert plain.statement["epsilon"] == tuned.statement["epsilon"]
    assert plain.statement["epsilon_spent"] == tuned.statement["epsilon_spent"]
    for metric in ("accuracy", "loss"):
        assert plain.scores(metric).equals(tuned.scores(metric))


def test_it_is_another_config_and_the_same_noise(small: dict[str, Any]) -> None:
    plain, tuned = make_config(small), make_config(small | {"finetune": TINY})
    assert "finetune" not in plain.resolved() and plain.digest() != tuned.digest()
    assert make_plan(plain).root == make_plan(tuned).root
    assert make_plan(plain).releases == make_plan(tuned).releases


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_takes_it(name: str, runs: Path) -> None:
    values: dict[str, Any] = {
        "data": {"dataset": "digits", "split": {"kind": "rotate", "degrees": [0, 90, 180], "clients": [2, 2, 2]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": name, "rounds": 2},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "engine": {"workers": 1, "block": 1},
        "finetune": TINY,
    }
    if ALGORITHMS[name].needs_public:
        values["data"]["server"] = {"dataset": "digits", "rows": "test"}
    run = load_run(start_run(make_config(values), runs=runs).folder)
    for model in ("served", "finetuned", "local"):
        assert run.scores("accuracy", model=model).iloc[-1].notna().all()
    train, now = _losses(run, 1)
    assert now < train and all(personal(run, client).isfinite().all() for client in range(6))


def _losses(run: Run, client: int) -> tuple[float, float]:
    """The loss on a client's training records of the first of the models that may serve it, and of the tuned one."""
    config = make_config(dict(run.config))
    federation = config.build_federation()
    model, records = config.model_spec(federation).build(), federation.load(client).train
    path = run.folder / "models" / "served.safetensors"
    weights = load_file(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["fairveil"])
    rows = [about["row_of_client"][client]] if "row_of_client" in about else range(len(weights) // 2)
    flat = [torch.cat([weights[f"{row}/1.weight"].reshape(-1), weights[f"{row}/1.bias"]]) for row in rows]
    *before, after = (
        float(model.losses(model.unflatten(w), records.x, records.y).mean()) for w in [*flat, personal(run, client)]
    )
    return min(before), after


@dataclass(frozen=True)
class Nothing:
    count: int


def learn_alone(members: Sequence[Member]) -> list[Reply]:
    replies = []
    for member in members:
        weights, train = member.personal.get("model", torch.zeros(member.model.parameters)), member.data.train
        kept = {"model": weights - member.model.gradient(weights, train.x, train.y), "own": torch.ones(2)}
        replies.append(Reply(Kept(), keep=kept))
    return replies


class Alone(LocalTraining[Nothing]):
    """A plug-in: every client keeps its model, and something else, to itself."""

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


def test_a_plug_in_whose_clients_keep_their_models(
    small: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("own")
    vars(module).update({"Alone": Alone})
    monkeypatch.setitem(sys.modules, "own", module)
    config = small | {"algorithm": {"name": "own:Alone", "rounds": 2}, "finetune": TINY}
    run = load_run(start_run(make_config(config), runs=runs).folder)
    model, train = ModelSpec("logistic", (1, 8, 8), 10).build(), make_config(config).build_federation().load(4).train
    expected = descended(model, personal(run, 4, "model"), train, 3, 0.5)
    assert expected is not None and torch.equal(personal(run, 4), expected)
    assert torch.equal(personal(run, 4, "own"), torch.ones(2))
    files = [fairveil.export_run(run, client="4", finetuned=tuned).files[0].name for tuned in (False, True)]
    assert files == ["personal-4.safetensors", "finetuned-4.safetensors"]


# ---- what it does ----------------------------------------------------------------------------------


def test_one_step_is_that_of_autograd(both: tuple[Run, Run]) -> None:
    run = both[1]
    federation = make_config(dict(run.config)).build_federation()
    records = federation.load(2).train
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model = ModelSpec("logistic", (1, 8, 8), 10).build()
    start = model.initial(Stream("somewhere"))
    torch.nn.utils.vector_to_parameters(start.clone(), module.parameters())
    torch.nn.functional.cross_entropy(module(records.x), records.y).backward()
    expected = start - 0.3 * torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    found = descended(model, start, records, 1, 0.3)
    assert found is not None and torch.allclose(found, expected, atol=1e-7) and not torch.equal(found, start)


def test_many_records_make_the_same_step() -> None:
    model, random = ModelSpec("linear", (3,), 0).build(), np.random.default_rng(0)
    x = torch.from_numpy(random.normal(size=(2 * TUNED + 7, 3)).astype(np.float32))
    records, start = Records(x, x.sum(dim=1)), model.initial(Stream("start"))
    found = descended(model, start, records, 1, 0.1)
    assert found is not None
    assert torch.allclose(found, start - 0.1 * model.gradient(start, records.x, records.y), atol=1e-6)


def test_the_tuned_model_is_that_of_the_steps_and_its_score_that_of_test_records(both: tuple[Run, Run]) -> None:
    run = both[1]
    federation = make_config(dict(run.config)).build_federation()
    model, data = ModelSpec("logistic", (1, 8, 8), 10).build(), federation.load(3)
    served = load_file(run.folder / "models" / "served.safetensors")
    start = torch.cat([served["0/1.weight"].reshape(-1), served["0/1.bias"]])
    expected = descended(model, start, data.train, 3, 0.5)
    assert expected is not None and torch.equal(personal(run, 3), expected)
    for name, weights in (("finetuned", expected), ("local", _alone(model, data.train))):
        right = (model.predict(weights, data.test.x).argmax(dim=1) == data.test.y).double().mean()
        assert run.scores("accuracy", model=name).iloc[-1, 3] == float(right)


def _alone(model: Any, records: Records) -> torch.Tensor:
    """What a client learns by itself: a function of the seed, the steps and its own records."""
    weights = model.initial(Stream(0, "initial model"))
    for _ in range(TINY["local_steps"]):
        weights = weights - TINY["learning_rate"] * model.gradient(weights, records.x, records.y)
    return weights


def test_local_only_does_not_depend_on_the_others(both: tuple[Run, Run], runs: Path) -> None:
    """Another algorithm, other noise, other released models: the same local-only scores."""
    one = both[1]
    config = dict(one.config) | {
        "algorithm": {"name": "local", "rounds": 1},
        "privacy": {"epsilon": 1.0, "delta": 1e-3},
    }
    other = load_run(start_run(make_config(config), runs=runs).folder)
    assert not one.scores("loss", model="finetuned").iloc[-1].equals(other.scores("loss", model="finetuned").iloc[-1])
    for metric in ("accuracy", "loss"):
        alone = [run.scores(metric, model="local").iloc[-1].to_numpy() for run in (one, other)]
        assert np.array_equal(*alone)


def test_diverged_fine_tuning_is_taken_back(small: dict[str, Any], runs: Path) -> None:
    tuned = TINY | {"learning_rate": 1e30}
    result = start_run(make_config(small | {"finetune": tuned}), runs=runs)
    run = load_run(result.folder)
    served = load_file(run.folder / "models" / "served.safetensors")
    kept = torch.cat([served["0/1.weight"].reshape(-1), served["0/1.bias"]])
    assert all(torch.equal(personal(run, client), kept) for client in range(5))
    assert run.scores("loss", model="finetuned").iloc[-1].equals(run.scores("loss").iloc[-1])
    assert run.scores("taken back", model="finetuned").iloc[-1].eq(1.0).all()
    table = personal_table(run)
    assert result.to_json()["taken_back"] == {"finetuned": 5, "local": 5}
    said = taken_back(result.taken_back)
    assert "taken back for 5 clients, who keep the released model" in said and "Training alone was taken back" in said
    assert table is not None and said in table.caption


def test_a_regression_whose_clients_choose_their_model(runs: Path) -> None:
    config = {
        "data": {"dataset": "linear-clusters", "options": {"clients": [2, 2]}},
        "model": {"name": "linear", "intercept": False},
        "algorithm": {"name": "metric-pfl", "rounds": 3, "local_epochs": 5, "batch_size": 10, "hypotheses": 2},
        "privacy": {"noise_multiplier": 0.1, "clip_norm": 1.0},
        "engine": {"workers": 1},
        "finetune": {"steps": 30, "learning_rate": 0.1},
    }
    result = start_run(make_config(config), runs=runs)
    assert set(result.finetune) == {"finetuned", "local"} and set(result.finetune["local"]) == {"rmse", "loss"}
    assert result.finetune["finetuned"]["rmse"].mean < result.metrics["rmse"].mean
    assert run_page(load_run(result.folder)).html()
    # which of the models it chose is its own secret; what it made of it can be exported, as a release of its own
    exported = fairveil.export_run(load_run(result.folder), client="2", finetuned=True)
    assert exported.files[0].name == "finetuned-2.safetensors"


def test_by_an_attribute_of_the_records_and_without_what_small_tests_add(
    small: dict[str, Any], runs: Path, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    table = pd.DataFrame(
        {"x": random.normal(size=240), "client": np.arange(240) % 4, "sex": random.choice(["a", "b"], 240)}
    )
    table["y"] = ((table["x"] > 0) == (table["client"] < 2)).astype(int)  # what two clients learn is wrong for two
    table.to_csv(tmp_path / "t.csv", index=False)
    options = {"path": str(tmp_path / "t.csv"), "features": ["x"], "sensitive": ["sex"]}
    data = {"dataset": "file", "options": options}
    config = small | {"data": data, "fairness": {"groups": "sex"}, "finetune": {"steps": 100}}
    result = start_run(make_config(config), runs=runs)
    served, tuned = (metrics["accuracy"] for metrics in (result.metrics, result.finetune["finetuned"]))
    assert tuned.mean > 0.8 > served.mean and set(tuned.by_group) == {"a", "b"} and tuned.gap < 0.2
    assert tuned.sampling_variance_removed == tuned.variance == 0.0  # all of them are always right
    assert served.sampling_variance_removed is not None and served.sampling_variance_removed < served.variance
    page = personal_table(load_run(result.folder))
    assert page is not None and [row[-1].text == "" for row in page.rows] == [False] * 3


@pytest.mark.parametrize("values", [{"steps": 0}, {"learning_rate": 0.0}, {"local_steps": 0}, {"rounds": 1}])
def test_wrong_values_are_refused(small: dict[str, Any], values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"finetune.{next(iter(values))}"):
        make_config(small | {"finetune": values})


def test_a_federation_refuses_it(small: dict[str, Any]) -> None:
    config = small | {"data": {"dataset": "clients"}, "engine": {"kind": "flower"}, "finetune": TINY}
    with pytest.raises(UserError, match=r"\[finetune\] is not for a federation yet"):
        make_config(config)


# ---- interruptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["checkpoint", "write"])
def test_a_crash_at_the_end_changes_nothing(
    both: tuple[Run, Run], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last round is saved, and after it, before the models are written."""

    class Crash(BaseException):
        pass

    plan, whole = make_plan(make_config(dict(both[1].config))), getattr(Store, where)

    def crash(store: Store, what: Any, *rest: Any, **named: Any) -> Any:
        if what in (3, "models/served.safetensors"):
            raise Crash
        return whole(store, what, *rest, **named)

    with Store(tmp_path / "crashed") as store:
        begin(plan, store)
        with patch.object(Store, where, crash), pytest.raises(Crash):
            drive(plan, store)
    result = resume_run(tmp_path / "crashed")
    assert differ(outcome(both[1].folder), outcome(tmp_path / "crashed")) is None
    before = both[1].result
    assert before is not None and before["finetune"] == json.loads(json.dumps(result.to_json()["finetune"]))


def test_workers_and_blocks_change_nothing(both: tuple[Run, Run], runs: Path) -> None:
    config = dict(both[1].config) | {"engine": {"workers": 2, "block": 3}}
    assert differ(outcome(both[1].folder), outcome(start_run(make_config(config), runs=runs).folder)) is None


# ---- what is said ----------------------------------------------------------------------------------


def test_the_statement_says_who_may_see_a_personal_model(both: tuple[Run, Run]) -> None:
    plain, tuned = (dict(Statement.from_json(run.statement).lines()) for run in both)
    assert "Personal models" not in plain
    for words in ("costs nothing", "joint", "all other clients together", "who alone may see it", "no price here"):
        assert words in tuned["Personal models"]
    assert {k: v for k, v in tuned.items() if k != "Personal models"} == plain
    old = {key: value for key, value in both[0].statement.items() if key != "finetuned"}
    assert Statement.from_json(old) == Statement.from_json(both[0].statement)


def test_results_and_the_command_name_both_models(
    fairveil: Fairveil, small: dict[str, Any], tmp_path: Path, both: tuple[Run, Run]
) -> None:
    import tomli_w

    config = small | {"algorithm": small["algorithm"] | {"rounds": 1}, "finetune": TINY}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config))
    code, out, _ = fairveil("run", "c.toml")
    lines = out.splitlines()
    for name in ("served (released)", "fine-tuned", "local only"):
        assert sum(name in line for line in lines) >= 2  # of accuracy and of loss
    assert code == 0 and "without what small tests add" in out and "its owner's alone" in out
    plain, tuned = (run.result for run in both)
    assert plain is not None and tuned is not None and "finetune" not in plain
    for model in ("finetuned", "local"):
        for metric in ("accuracy", "loss"):
            assert {"mean", "worst_10_percent", "variance", "sampling_variance_removed"} <= set(
                tuned["finetune"][model][metric]
            )


def test_the_report_has_a_table_and_a_picture(both: tuple[Run, Run]) -> None:
    plain, tuned = both
    assert personal_table(plain) is None and personal_dots(plain) is None
    table, chart = personal_table(tuned), personal_dots(tuned)
    assert table is not None and chart is not None and len(chart.data) == len(chart.marks) == 5
    assert [row[0].text for row in table.rows] == ["served (released)", "fine-tuned", "local only"]
    assert table.columns[1] == "mean accuracy" and table.columns[-2:] == [
        "variance x 10,000", "without what small tests add",
    ]  # fmt: skip
    assert tuned.result is not None
    assert table.rows[1][1].order == pytest.approx(tuned.result["finetune"]["finetuned"]["accuracy"]["mean"])
    html = run_page(tuned).html()
    assert "Personal models" in html and "fine-tuned" in html and "fine-tuned" not in run_page(plain).html()


def test_columns_of_a_sweep(small: dict[str, Any], both: tuple[Run, Run], tmp_path: Path) -> None:
    sweep = make_sweep({"name": "s", "base": small, "seeds": [0]})
    (cell,) = sweep.cells
    results = [{cell: deepcopy(dict(run.result))} for run in both if run.result is not None]
    for metrics in results[1][cell]["finetune"].values():  # clients share their tests: it has none
        metrics["accuracy"] = metrics["accuracy"] | {"sampling_variance_removed": 0.25}
    plain, tuned = (summarise_sweep(sweep, tmp_path, {cell: tmp_path}, found, {}, 0) for found in results)
    kept = [column for column in tuned.table.columns if column in plain.table.columns]
    added = [column for column in tuned.table.columns if column not in plain.table.columns]
    figures = ("mean", "worst_10_percent", "variance", "sampling_variance_removed")
    wanted = {f"{model}_accuracy_{figure}" for model in ("finetuned", "local") for figure in figures}
    assert kept == list(plain.table.columns) and wanted <= set(added)
    assert all(c.startswith(("finetuned_", "local_")) for c in added)
    assert {"finetuned_accuracy_mean", "local_accuracy_worst_10_percent"} <= set(tuned.means["measure"])


# ---- exports ---------------------------------------------------------------------------------------


def test_a_fine_tuned_model_is_exported_as_a_release_of_its_own(both: tuple[Run, Run], tmp_path: Path) -> None:
    run = both[1]
    exported = fairveil.export_run(run, client="1", finetuned=True)
    path, card = exported.files[0], exported.files[-1]
    assert path.name == "finetuned-1.safetensors" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert exported.folder == run.folder / "export" / "client-1-finetuned"
    (said,) = (warning for warning in exported.warnings if "finetuned-1" in warning)
    for words in ("never released", "not covered by the guarantee", "a release outside the ledger", "Only its owner"):
        assert words in said and words in card.read_text()
    test = make_config(dict(run.config)).build_federation().load(1).test
    correct = float((fairveil.load_model(path)(test.x).argmax(dim=1) == test.y).double().mean())
    assert correct == run.scores("accuracy", model="finetuned").iloc[-1, 1]
    assert f"| mean over the 1 that the files of this card serve | {correct:.3f} |" in card.read_text()
    assert "| finetune.steps | 3 |" in card.read_text()
    # and the released model is exported as it was
    assert fairveil.export_run(run, tmp_path / "shared").files[0].name == "model.safetensors"


def test_what_is_not_there_is_not_exported(both: tuple[Run, Run], fairveil: Fairveil) -> None:
    plain, tuned = both
    code, _, err = fairveil("export", str(tuned.folder), "--finetuned")
    assert code == 2 and "each client has a fine-tuned model of its own: --client NAME" in err
    code, _, err = fairveil("export", str(plain.folder), "--finetuned", "--client", "0")
    assert code == 2 and "have fine-tuned nothing" in err
