"""How well the clients are served: counted by hand from the served model; and the reference, trained once and gone."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fairveil import evaluation
from fairveil.config import RunConfig, make_config
from fairveil.contract import differ, outcome
from fairveil.data.federation import ClientData, Decision, Federation, Records
from fairveil.evaluation import reference_model
from fairveil.models import Model, ModelSpec
from fairveil.plan import make_plan
from fairveil.privacy.release import MINT
from fairveil.reading import Run, load_run
from fairveil.run import resume_run, run_in, start_run
from fairveil.session import Member
from fairveil.store import Store
from fairveil.tasks import confuse

NOISE = {"noise_multiplier": 1.0, "delta": 1e-3}


@pytest.fixture
def visits(tmp_path: Path) -> dict[str, Any]:
    """A file of three clients with 60, 40 and 30 records; client d has one, and is not tested. Nobody tested is "x"."""
    random = np.random.default_rng(0)
    client = np.repeat(["a", "b", "c", "d"], [60, 40, 30, 1])
    table = pd.DataFrame(random.normal(size=(131, 3)), columns=["u", "v", "w"]).assign(client=client)
    table["y"] = np.digitize(table["u"] - table["v"], [-0.7, 0.7])
    table["sex"] = np.where(client == "d", "x", random.choice(["f", "m"], 131))
    table["band"] = random.choice([20, 40, 60], 131)
    table.to_csv(tmp_path / "visits.csv", index=False)
    return {
        "data": {"dataset": "file", "options": {"path": str(tmp_path / "visits.csv"), "sensitive": ["sex", "band"]}},
        "model": {"name": "logistic"},
        "algorithm": {"name": "global", "rounds": 3, "batch_size": 16, "learning_rate": 0.5},
        "privacy": NOISE,
        "fairness": {"groups": "sex"},
        "engine": {"workers": 1},
    }


def ran(plain: dict[str, Any], runs: Path, **sections: Any) -> Run:
    return load_run(start_run(make_config(plain | sections), runs=runs).folder)


def logits(folder: Path, x: Tensor) -> np.ndarray:
    """Of the one served model, a linear layer, by numpy."""
    tensors = load_file(folder / "models/served.safetensors")
    (weight,) = (value for name, value in tensors.items() if name.endswith("weight"))
    (bias,) = (value for name, value in tensors.items() if name.endswith("bias"))
    return x.flatten(1).double().numpy() @ weight.double().numpy().T + bias.double().numpy()


# ---- attributes and confusion ----------------------------------------------------------------------


def test_scores_by_attribute_are_counted_by_hand(visits: dict[str, Any], runs: Path) -> None:
    """Accuracy, loss and number of records of every client and value, from the model that is served at the end."""
    run, federation = ran(visits, runs), make_config(visits).build_federation()
    seen: Counter[str] = Counter()
    for client in range(3):
        data = federation.load(client)
        output, y = logits(run.folder, data.test.x), data.test.y.numpy()
        losses = np.log(np.exp(output).sum(axis=1)) - output[np.arange(len(y)), y]
        for code, sex in enumerate(federation.attributes["sex"]):
            of = data.attributes["sex"] == code
            split = f"test, sex = {sex}"
            if not of.any():
                assert run.scores("accuracy", split=split).get(client, pd.Series([np.nan])).isna().all()
                continue
            seen[sex] += int(of.sum())
            assert run.counts("accuracy", split=split).loc[3, client] == of.sum()
            right = (output[of].argmax(axis=1) == y[of]).mean()
            assert run.scores("accuracy", split=split).loc[3, client] == pytest.approx(right, abs=1e-12)
            assert run.scores("loss", split=split).loc[3, client] == pytest.approx(losses[of].mean(), rel=1e-5)
    assert seen["f"] and seen["m"] and not seen["x"]
    whole = run.counts("accuracy").loc[3]
    assert whole.iloc[:3].sum() == seen.total() == 12 + 8 + 6 and math.isnan(whole[3])  # a fifth of each
    by_group = run.by_group("accuracy")
    assert by_group.columns.tolist() == ["f", "m"] and len(by_group) == 3
    part = {sex: run.counts("accuracy", split=f"test, sex = {sex}").loc[3].sum() for sex in "fm"}
    weighted = sum(part[sex] * by_group.loc[3, sex] for sex in "fm") / sum(part.values())
    assert weighted == pytest.approx((run.scores("accuracy").loc[3] * whole).sum() / whole.sum())


def test_confusion_is_counted_by_hand(visits: dict[str, Any], runs: Path) -> None:
    """In all and by every attribute, whichever of them the run is judged by; every record once in each."""
    run, federation = ran(visits, runs), make_config(visits).build_federation()
    expected: Counter[tuple[Any, ...]] = Counter()
    for client in range(3):
        data = federation.load(client)
        pairs = list(zip(data.test.y.tolist(), logits(run.folder, data.test.x).argmax(axis=1).tolist(), strict=True))
        expected.update((client, "", "", *pair) for pair in pairs)
        for name, codes in data.attributes.items():
            values = [federation.attributes[name][code] for code in codes]
            expected.update((client, name, value, *pair) for value, pair in zip(values, pairs, strict=True))
    columns = ["client", "attribute", "value", "actual", "predicted"]
    found = run.confusion.set_index(columns)["n"].to_dict()
    assert found == expected
    n = run.counts("accuracy").loc[3]
    for _, part in run.confusion.groupby("attribute"):
        assert part.groupby("client")["n"].sum().to_dict() == n.dropna().to_dict()


def test_common_test_records_are_confused_once(small: dict[str, Any], runs: Path) -> None:
    """Two groups under one model: one client of each stands for all, with the 359 test records of digits."""
    run = ran(small, runs)
    assert run.facts["common_tests"] and run.confusion.groupby("client")["n"].sum().to_dict() == {0: 359, 2: 359}
    assert run.counts("accuracy").iloc[-1].tolist() == [359] * 5  # and all have their score
    chosen = ran(
        small, runs, algorithm={"name": "metric-pfl", "hypotheses": 1, "rounds": 2},
        privacy={"noise_multiplier": 1.0, "clip_norm": 1.0},
    )  # fmt: skip
    assert chosen.confusion.groupby("client")["n"].sum().to_dict() == {0: 359, 2: 359}  # also where clients choose
    local = ran(small, runs, algorithm=small["algorithm"] | {"name": "local"})
    assert local.confusion.groupby("client")["n"].sum().to_dict() == dict.fromkeys(range(5), 359)


def test_a_regression_has_no_confusion_and_errors_by_attribute(visits: dict[str, Any], runs: Path) -> None:
    options = visits["data"]["options"] | {"task": "regression"}
    run = ran(visits, runs, data={"dataset": "file", "options": options}, model={"name": "linear"})
    assert run.main == "rmse" and run.confusion.empty
    federation = make_config(visits | {"data": {"dataset": "file", "options": options}}).build_federation()
    squares: dict[str, list[float]] = {"f": [], "m": []}
    for client in range(3):
        data = federation.load(client)
        off = logits(run.folder, data.test.x)[:, 0] - data.test.y.double().numpy()
        for code, error in zip(data.attributes["sex"], off, strict=True):
            squares[federation.attributes["sex"][code]].append(float(error**2))
    expected = {sex: math.sqrt(sum(many) / len(many)) for sex, many in squares.items()}
    assert run.by_group("rmse").loc[3].to_dict() == pytest.approx(expected, rel=1e-5)


def test_judged_by_clients_there_are_no_scores_by_attribute(visits: dict[str, Any], runs: Path) -> None:
    run = ran(visits, runs, fairness={})
    assert set(run.metrics["split"]) == {"test", "train"} and run.by_group("accuracy").columns.tolist() == ["all"]
    assert set(run.confusion["attribute"]) == {"", "sex", "band"}


# ---- decisions -------------------------------------------------------------------------------------


@pytest.fixture
def loans(visits: dict[str, Any]) -> dict[str, Any]:
    """Five clients of the majority and four of the minority under one linear model, which suits neither."""
    data = {"dataset": "loan-groups", "options": {"clients": [5, 4], "test_records": 30}}
    return visits | {"data": data, "model": {"name": "linear"}, "fairness": {}}


def test_decisions_of_a_model_made_by_hand() -> None:
    """It predicts 2a - b + 1. Up to 3 is a 1, and so is 3 itself: true numbers 3, 4, 2, 9 and predicted 3, 5, 4, -1."""
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 1.0], [0.0, 2.0]])
    rows = Records(x, torch.tensor([3.0, 4.0, 2.0, 9.0]))
    model = ModelSpec("linear", (2,), 0).build()
    weights = torch.tensor([2.0, -1.0, 1.0])
    assert model.scored(model.unflatten(weights), rows.x, rows.y)[0][:, 0].tolist() == [3.0, 5.0, 4.0, -1.0]
    data = ClientData(rows, rows, {"sex": np.array([0, 1, 1, 0])}, Decision(3.0, above=False))
    (reply,) = confuse([Member(data, model, {"model": weights}, None, {}, (0,), MINT)])
    everyone = {"/0/1/1": 1.0, "/0/0/0": 1.0, "/0/1/0": 1.0, "/0/0/1": 1.0}
    assert reply.diagnostics == everyone | {"sex/0/1/1": 1.0, "sex/1/0/0": 1.0, "sex/1/1/0": 1.0, "sex/0/0/1": 1.0}


def test_decisions_are_counted_by_hand(loans: dict[str, Any], runs: Path) -> None:
    """From the model that is served at the end, and from the law of the data: below 0 no loan for the majority, above
    15 none for the minority."""
    run, federation = ran(loans, runs), make_config(loans).build_federation()
    expected: Counter[tuple[int, ...]] = Counter()
    for client in range(9):
        test = federation.load(client).test
        numbers = test.y.double().numpy(), logits(run.folder, test.x)[:, 0]
        decided = [(y >= 0 if client < 5 else y <= 15).astype(int).tolist() for y in numbers]
        expected.update((client, *pair) for pair in zip(*decided, strict=True))
    assert run.confusion.set_index(["client", "actual", "predicted"])["n"].to_dict() == expected
    assert run.confusion["n"].sum() == 9 * 30 and run.main == "rmse"  # what is predicted is still a number


def test_decisions_travel_to_other_processes(loans: dict[str, Any], runs: Path) -> None:
    """Whether a client is asked in this process or in another, alone or side by side with others."""
    engines = ({"workers": 1, "block": 1}, {"workers": 2, "block": 3})
    alone, apart = (ran(loans, runs, engine=engine).confusion for engine in engines)
    pd.testing.assert_frame_equal(alone, apart)
    assert set(apart["client"]) == set(range(9)) and apart["n"].sum() == 9 * 30


def test_decisions_are_compared_between_groups(
    loans: dict[str, Any], fairveil: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """By the command, where no class is named: differences in its JSON, rates in the report."""
    (tmp_path / "loans.toml").write_text(make_config(loans).to_toml())
    code, out, _ = fairveil("run", "loans.toml", "--json")
    said = json.loads(out)
    assert code == 0 and "rmse" in said
    run = load_run(said["run"])
    assert run.positive == 1 and run.facts["decided"]
    counts = run.confusion.assign(group=np.where(run.confusion["client"] < 5, "majority", "minority"))
    rates: dict[str, list[float]] = {"selected": [], "true": [], "false": []}
    for _, of in counts.groupby("group"):
        for name, among in (("selected", of), ("true", of[of["actual"] == 1]), ("false", of[of["actual"] == 0])):
            rates[name].append(among.loc[among["predicted"] == 1, "n"].sum() / among["n"].sum())
    apart = {name: abs(majority - minority) for name, (majority, minority) in rates.items()}
    found = {name: difference["value"] for name, difference in said["fairness"]["clients"].items()}
    assert found.pop("accuracy") > 0
    assert found == pytest.approx(
        {
            "demographic parity": apart["selected"],
            "equalised odds": max(apart["true"], apart["false"]),
            "equal opportunity": apart["true"],
        }
    )
    code, _, _ = fairveil("report", said["run"], "--out", "report.html")
    page = (tmp_path / "report.html").read_text()
    assert code == 0 and "By group of clients, over test records. Class 1 is the advantage." in page
    assert all(word in page for word in ("majority", "minority", "selection rate", "equal opportunity"))


def test_the_decision_for_somebody_is_the_advantage(handmade: Callable[..., Run]) -> None:
    assert handmade(["a"], facts={"classes": 0, "decided": True}).positive == 1
    assert handmade(["a"], facts={"classes": 0, "decided": False}).positive is None
    assert handmade(["a"], facts={"classes": 0}).positive is None  # a folder from before there were decisions


# ---- another way to judge changes no release -------------------------------------------------------


def test_how_a_run_is_judged_changes_nothing_that_is_planned(visits: dict[str, Any]) -> None:
    """The same records, releases, price and noise: what is sent is the same, and tells nothing more. The config is
    another one, since the result is. What is typed as it would be by default leaves the config as it is."""
    plans = {
        name: make_plan(make_config(visits | {"fairness": fairness}))
        for name, fairness in {
            "left out": {},
            "typed": {"groups": "cluster"},
            "sex": {"groups": "sex"},
            "positive": {"positive": 2},
            "reference": {"reference": "central"},
        }.items()
    }
    plain = plans["left out"]
    for plan in plans.values():
        assert plan.federation.fingerprint == plain.federation.fingerprint
        assert plan.releases == plain.releases and plan.price == plain.price
    assert len({plan.root for plan in plans.values()}) == 1
    assert plans["typed"].config.digest() == plain.config.digest()
    assert len({plan.config.digest() for plan in plans.values()}) == 4


def test_a_run_sends_the_same_however_it_is_judged(
    visits: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise and all: every answer in the ledger has the same digest."""
    monkeypatch.setattr(evaluation, "LEAST_STEPS", 20)
    sent = []
    for fairness in ({}, {"groups": "sex", "reference": "central", "positive": 2}):
        folder = start_run(make_config(visits | {"fairness": fairness}), runs=runs).folder
        with Store(folder) as store:
            sent.append(store.ledger.entries())
    assert sent[0] == sent[1] and sent[0]


def test_without_noise_a_run_is_the_same_however_it_is_judged(
    visits: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no noise and no sampling is drawn anew, training is the same to the last bit."""
    monkeypatch.setattr(evaluation, "LEAST_STEPS", 20)
    options = {key: value for key, value in visits["data"]["options"].items() if key != "sensitive"}
    options["features"] = ["u", "v", "w"]  # band is numeric, and would be a feature where it is not sensitive
    silent = visits | {"privacy": {"noise_multiplier": 0.0, "clip_norm": 1.0, "delta": 1e-3}}
    silent["algorithm"] = silent["algorithm"] | {"batch_size": 1000}
    plain = silent | {"data": {"dataset": "file", "options": options}, "fairness": {}}
    judged = silent | {
        "data": {"dataset": "file", "options": options | {"sensitive": ["sex", "band"]}},
        "fairness": {"groups": "sex", "reference": "central", "positive": 2},
    }
    one, two = (start_run(make_config(values), runs=runs).folder for values in (plain, judged))
    left, right = outcome(one).checkpoint.state, outcome(two).checkpoint.state
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# ---- the reference ---------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Tensor]:
    """Every reference model that is trained, in a cache of its own."""
    models: list[Tensor] = []

    def watched(model: Model, federation: Federation, group: int) -> Tensor:
        models.append(reference_model(model, federation, group))
        return models[-1]

    monkeypatch.setattr(evaluation, "reference_model", watched)
    forget(monkeypatch, tmp_path / "cache")
    return models


def forget(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As a new process with this cache."""
    monkeypatch.setattr("fairveil.cache._memory", {})
    monkeypatch.setenv("FAIRVEIL_CACHE", str(folder))


@pytest.fixture
def central(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A short run with a reference that is trained for thirty steps."""
    monkeypatch.setattr(evaluation, "EPOCHS", 1)
    monkeypatch.setattr(evaluation, "LEAST_STEPS", 30)
    algorithm = {"name": "global", "rounds": 2, "batch_size": 64, "learning_rate": 1.0}
    return small | {"algorithm": algorithm, "privacy": NOISE, "fairness": {"reference": "central"}}


def test_a_reference_is_trained_once_for_each_group_and_scored_on_every_client(
    central: dict[str, Any], runs: Path, trained: list[Tensor]
) -> None:
    """Scores on test and training records, by hand from the models as they were trained."""
    run = ran(central, runs)
    assert len(trained) == 2
    model = ModelSpec("logistic", (1, 8, 8), 10).build()
    federation = make_config(central).build_federation()
    for client, group in enumerate([0, 0, 1, 1, 1]):
        data, weights = federation.load(client), model.unflatten(trained[group])
        for split, records in (("test", data.test), ("train", data.train)):
            output, losses = model.scored(weights, records.x, records.y)
            right = float((output.argmax(dim=1) == records.y).double().mean())
            for metric, expected in (("accuracy", right), ("loss", float(losses.double().mean()))):
                found = run.scores(metric, split=split, model="reference")
                assert found.index.tolist() == [2] and found.loc[2, client] == pytest.approx(expected, rel=1e-6)
                assert run.counts(metric, split=split, model="reference").loc[2, client] == len(records)
    assert set(run.metrics.loc[run.metrics["model"] == "served", "split"]) == {"test", "train"}
    assert "Reference models are trained without privacy" in run.statement["sentence"]


def test_a_reference_is_as_good_as_least_squares() -> None:
    """Of a linear model the best is known in closed form. Two groups of 600 records, each with its own slope."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1200, 4)).astype(np.float32)
    group = np.repeat([0, 1], 600)
    slopes = random.normal(size=(2, 4))
    y = ((x * slopes[group]).sum(axis=1) + random.normal(size=1200)).astype(np.float32)
    parts = [Records(torch.from_numpy(x[group == g]), torch.from_numpy(y[group == g])) for g in range(2)]

    class Two:
        def load(self, client: int) -> ClientData:
            return ClientData(parts[client], parts[client])

    federation = Federation("two", np.array([600] * 2), np.arange(2), ("a", "b", "nobody"), (4,), 0, Two(), "")
    model = ModelSpec("linear", (4,), 0).build()
    for g in range(2):
        weights = reference_model(model, federation, g)
        output, _ = model.scored(model.unflatten(weights), parts[g].x, parts[g].y)
        error = float((output[:, 0] - parts[g].y).square().mean())
        ones = np.column_stack([x[group == g], np.ones(600)]).astype(float)
        _, (residue,), *_ = np.linalg.lstsq(ones, y[group == g].astype(float), rcond=None)
        assert error == pytest.approx(residue / 600, rel=0.02)
    assert reference_model(model, federation, 2).isfinite().all()  # a group without clients has nothing to learn from


def test_a_reference_is_near_the_best_logistic_model(small: dict[str, Any]) -> None:
    """Digits turned by 90 degrees: as many test records right as by scikit-learn's own fit, but for one in a hundred.
    (Five in a hundred were missing when it was not trained to its end.)"""
    federation = make_config(small).build_federation()
    train = [federation.load(client).train for client in (2, 3, 4)]
    x, y = (torch.cat([getattr(part, name) for part in train]).flatten(1 if name == "x" else 0) for name in "xy")
    test = federation.load(2).test
    best = LogisticRegression(C=100.0, max_iter=2000).fit(x.numpy(), y.numpy())
    model = ModelSpec("logistic", (1, 8, 8), 10).build()
    output, _ = model.scored(model.unflatten(reference_model(model, federation, 1)), test.x, test.y)
    found = float((output.argmax(dim=1) == test.y).double().mean())
    assert found > best.score(test.x.flatten(1).numpy(), test.y.numpy()) - 0.01


def test_another_budget_does_not_train_the_reference_again(
    central: dict[str, Any], runs: Path, trained: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers come from the cache, in this process and in the next; so do those of another algorithm."""
    first = ran(central, runs)
    others = [
        {"privacy": NOISE | {"noise_multiplier": 3.0}},
        {"algorithm": central["algorithm"] | {"name": "local"}},
        {"metrics": {"every": 2}},
    ]
    reference = first.metrics[first.metrics["model"] == "reference"].reset_index(drop=True)
    for place, sections in enumerate(others):
        if place == 1:
            forget(monkeypatch, tmp_path / "cache")
        metrics = ran(central, runs, **sections).metrics
        again = metrics[metrics["model"] == "reference"].reset_index(drop=True)
        pd.testing.assert_frame_equal(again, reference, check_exact=True)
    assert len(trained) == 2


@pytest.mark.parametrize("change", ["seed", "data", "model", "code", "recipe"])
def test_whatever_the_reference_is_made_of_trains_it_again(
    central: dict[str, Any], runs: Path, trained: list[Tensor], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    central |= {"model": {"name": "mlp", "hidden": 8}}
    ran(central, runs)
    split = {"kind": "rotate", "degrees": [0, 180], "clients": [2, 3]}
    sections: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1},
        "data": {"data": {"dataset": "digits", "split": split}},
        "model": {"model": {"name": "mlp", "hidden": 9}},
    }
    if change == "code":
        monkeypatch.setattr(RunConfig, "code", lambda self: "other")
    if change == "recipe":
        monkeypatch.setattr(evaluation, "RATE", 2e-3)
    ran(central, runs, **sections.get(change, {}))
    assert len(trained) == 4


def test_the_reference_is_the_same_on_any_number_of_workers(
    central: dict[str, Any], runs: Path, trained: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for workers, threads in ((1, 1), (2, 2)):
        forget(monkeypatch, tmp_path / f"cache-{workers}")
        torch.set_num_threads(threads)
        try:
            found.append(ran(central, runs, engine={"workers": workers}).metrics)
        finally:
            torch.set_num_threads(1)
    pd.testing.assert_frame_equal(*found, check_exact=True)
    assert len(trained) == 4 and torch.equal(trained[0], trained[2]) and torch.equal(trained[1], trained[3])


def test_the_reference_is_written_nowhere(
    central: dict[str, Any], runs: Path, trained: list[Tensor], tmp_path: Path
) -> None:
    """An unprotected copy of the records. No eight of its weights in a row are in any file, in whatever form."""
    run = ran(central, runs)
    files = [path for folder in (run.folder, tmp_path / "cache") for path in folder.rglob("*") if path.is_file()]
    assert any("numbers.sqlite" in path.name for path in files)
    served = load_file(run.folder / "models/served.safetensors")
    assert served and not any(torch.equal(value.flatten()[:8], trained[0][:8]) for value in served.values())
    held = [path.read_bytes() for path in files]
    for weights in trained:
        used = weights[weights != 0]
        for start in range(0, len(used) - 8, 101):
            eight = used[start : start + 8]
            single, double = eight.numpy(), eight.double().numpy()
            texts = [" ".join(form(float(value)) for value in eight) for form in (float.hex, repr)]
            for needle in (single.tobytes(), double.tobytes(), *(text.encode() for text in texts)):
                assert not any(needle in content for content in held)


def test_without_a_reference_nothing_of_it_is_done(small: dict[str, Any], runs: Path, trained: list[Tensor]) -> None:
    run = ran(small, runs, algorithm=small["algorithm"] | {"rounds": 1})
    assert not trained and "reference" not in set(run.metrics["model"])
    assert run.scores("loss", split="train").empty


# ---- a crash in the last round ---------------------------------------------------------------------


class Crash(BaseException):
    """The end of a process, as far as this one can have it."""


@pytest.mark.parametrize("where", ["cost_scores", "save_confusion", "Store.checkpoint"])
def test_a_crash_in_the_last_round_leaves_the_same_rows(
    visits: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Before the reference, after it, and between the metrics and the checkpoint: resumed, nothing differs."""
    monkeypatch.setattr(evaluation, "EPOCHS", 1)
    monkeypatch.setattr(evaluation, "LEAST_STEPS", 20)
    config = make_config(visits | {"fairness": {"groups": "sex", "reference": "central"}})
    whole = load_run(start_run(config, runs=runs).folder)
    owner, name = (Store, "checkpoint") if where == "Store.checkpoint" else ("fairveil.run", where)
    original: Callable[..., Any] = Store.checkpoint if owner is Store else getattr(evaluation, name)

    def deadly(*arguments: Any) -> Any:
        if where != "Store.checkpoint" or arguments[1] == 3:
            raise Crash
        return original(*arguments)

    with monkeypatch.context() as planted:
        if owner is Store:
            planted.setattr(Store, name, deadly)
        else:
            planted.setattr(f"{owner}.{name}", deadly)
        with pytest.raises(Crash):
            run_in(config, runs / "torn")
    resume_run(runs / "torn")
    again = load_run(runs / "torn")
    pd.testing.assert_frame_equal(again.metrics, whole.metrics, check_exact=True)
    pd.testing.assert_frame_equal(again.confusion, whole.confusion)
    assert differ(outcome(runs / "torn"), outcome(whole.folder)) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from fairveil import evaluation
from fairveil.config import load_config
from fairveil.run import run_in
from fairveil.store import Store

evaluation.EPOCHS, evaluation.LEAST_STEPS = 1, 20
original = Store.checkpoint

def deadly(self, number, *rest):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, number, *rest)

Store.checkpoint = deadly
run_in(load_config(Path(sys.argv[1])), Path(sys.argv[2]))
"""


def test_a_run_killed_in_the_last_round_gives_the_same_rows(
    visits: dict[str, Any], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after the metrics are committed; the reference is then taken from the cache."""
    monkeypatch.setattr(evaluation, "EPOCHS", 1)
    monkeypatch.setattr(evaluation, "LEAST_STEPS", 20)
    config = make_config(visits | {"fairness": {"groups": "sex", "reference": "central"}})
    whole = load_run(start_run(config, runs=runs).folder)
    (tmp_path / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config.toml"), str(runs / "torn")]
    assert subprocess.run(command, env=os.environ, timeout=120).returncode == -signal.SIGKILL
    torn = load_run(runs / "torn")
    assert torn.result is None and not torn.running and len(torn.metrics) == len(whole.metrics)
    resume_run(runs / "torn")
    again = load_run(runs / "torn")
    pd.testing.assert_frame_equal(again.metrics, whole.metrics, check_exact=True)
    pd.testing.assert_frame_equal(again.confusion, whole.confusion)
