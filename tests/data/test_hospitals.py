"""The hospitals: counts and values against what is published, features as declared, and runs from end to end."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fairveil.config import load_config
from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation, Records
from fairveil.data.hospitals import CHARGES, HEART, REGIONS
from fairveil.data.shares import Columns
from fairveil.plan import make_plan
from fairveil.run import run_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "hospitals"
DATA = os.environ.get("FAIRVEIL_DATA")


def needs(folder: str) -> Any:
    there = DATA is not None and (Path(DATA) / folder).is_dir()
    reason = f"no {folder} under FAIRVEIL_DATA"
    return lambda test: pytest.mark.data(pytest.mark.skipif(not there, reason=reason)(test))


heart, charges = needs(HEART.folder), needs(CHARGES.folder)


def everything(federation: Federation, client: int) -> Records:
    data = federation.load(client)
    return Records(torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y]))


@heart
def test_heart_disease_by_hospital() -> None:
    federation = build_federation("heart-disease", {}, None, 0)
    assert federation.names == federation.groups == ("cleveland", "hungarian", "switzerland", "va")
    held = [everything(federation, client) for client in range(4)]
    assert [len(records) for records in held] == [303, 294, 123, 200]
    assert federation.features == (32,) and federation.classes == 2 and federation.record == "one patient"
    sex = [round(float((records.x[:, 1] == -1).double().mean()), 2) for records in held]
    assert sex == [0.32, 0.28, 0.08, 0.03]  # women
    no_cholesterol = [int(records.x[:, 9].sum()) for records in held]
    assert no_cholesterol == [0, 23, 123, 56]  # empty, or 0, which means the same
    assert sum(int((records.y == 0).sum()) for records in held) == 411
    assert all(records.x.abs().max() <= 1 for records in held)


@heart
def test_the_first_patient_of_cleveland() -> None:
    """63 years, male, typical angina, 145/233, fasting sugar high, 150 beats, depression 2.3, slope 3, ca 0, thal 6."""
    expected = np.zeros(32, dtype=np.float32)
    expected[[0, 1]] = (63 - 20) / 35 - 1, 1
    expected[2] = 1  # cp = 1
    expected[6], expected[8] = (145 - 80) / 60 - 1, (233 - 100) / 150 - 1
    expected[10] = 1  # fbs
    expected[14] = 1  # restecg = 2
    expected[16], expected[18], expected[20] = (150 - 60) / 80 - 1, -1, (2.3 + 3) / 5 - 1
    expected[24] = 1  # slope = 3
    expected[26] = -1  # ca = 0
    expected[29] = 1  # thal = 6
    federation = build_federation("heart-disease", {}, None, 0)
    records = everything(federation, 0)
    same = (records.x - torch.from_numpy(expected)).abs().max(dim=1).values < 1e-6
    assert int(same.sum()) == 1 and records.y[same].item() == 0


@heart
def test_sex_and_age_of_the_patients_are_those_of_the_table() -> None:
    """By the CSV itself, which knows both of all 920 patients; and by the features of those who are tested."""
    assert DATA is not None
    table = pd.read_csv(Path(DATA) / HEART.folder / "heart_disease.csv")
    assert len(table) == 920 and table[["age", "sex"]].notna().all(axis=None) and set(table["sex"]) == {0, 1}
    bands = pd.cut(table["age"], [0, 45, 55, 65, 200], right=False, labels=False)
    federation = build_federation("heart-disease", {}, None, 0)
    assert federation.attributes == {
        "sex": ("female", "male"),
        "age": ("below 45", "45 to 54", "55 to 64", "65 and above"),
    }
    source = federation.source
    assert isinstance(source, Columns)
    assert source.attributes["sex"].tolist() == table["sex"].tolist()
    assert source.attributes["age"].tolist() == bands.tolist()
    for client in range(4):
        data = federation.load(client)
        age, sex = data.test.x[:, 0].double() * 35 + 55, data.test.x[:, 1]  # ranges 20 to 90 and 0 to 1 on [-1, 1]
        assert data.attributes["sex"].tolist() == [int(x == 1) for x in sex.tolist()]
        expected = [sum(round(years) >= limit for limit in (45, 55, 65)) for years in age.tolist()]
        assert data.attributes["age"].tolist() == expected


@heart
def test_severity_has_five_classes() -> None:
    federation = build_federation("heart-disease", {"target": "severity"}, None, 0)
    y = torch.cat([everything(federation, client).y for client in range(4)])
    assert torch.bincount(y).tolist() == [411, 265, 109, 107, 28] and federation.classes == 5


@charges
def test_hospital_charges_by_hospital() -> None:
    federation = build_federation("hospital-charges", {}, None, 0)
    assert federation.clients == 3337 and federation.features == (151,) and federation.classes == 0
    tests = [len(federation.load(client).test) for client in range(federation.clients)]
    assert federation.size.sum() + sum(tests) == 163_065 and tests.count(0) == 95
    held = everything(federation, federation.names.index("SOUTHEAST ALABAMA MEDICAL CENTER (10001)"))
    assert ((held.x > 0).sum(dim=1) == 2).all()  # a state and a procedure
    assert (held.x[:, 1] == 1).all()  # AL, after AK
    assert set(held.x[:, 51:].unique().tolist()) == {0.0, 5.0}
    charge = held.y[held.x[:, 51] > 0]  # the first procedure: extracranial procedures, 39
    assert torch.exp(charge + 10).item() == pytest.approx(32963.07, rel=1e-6)
    assert sum(len(states.split()) for states in REGIONS.values()) == 51
    assert np.bincount(federation.group).sum() == 3337 and len(set(federation.group)) == 4


@charges
def test_hospitals_are_grouped_as_asked() -> None:
    by_size = build_federation("hospital-charges", {"group": "size"}, None, 0)
    for client in (0, 100, 3000):
        records = len(everything(by_size, client))
        assert by_size.group[client] == (0 if records < 20 else 1 if records < 60 else 2)
    by_state = build_federation("hospital-charges", {"group": "state"}, None, 0)
    assert len(by_state.groups) == 51 and by_state.groups[by_state.group[0]] == "AL"
    assert by_state.load(5).train.x.equal(by_size.load(5).train.x)


@charges
def test_kinds_of_procedures_are_ten_columns_of_zeros_and_ones() -> None:
    federation = build_federation("hospital-charges", {"features": "kinds"}, None, 0)
    assert federation.clients == 3337 and federation.features == (10,)
    assert "kinds" in " ".join(federation.public)
    each = build_federation("hospital-charges", {}, None, 0)
    assert each.fingerprint != federation.fingerprint and "kinds" not in " ".join(each.public)
    assert each.load(7).train.y.equal(federation.load(7).train.y)  # the same records, seen otherwise
    assert DATA is not None
    table = pd.read_parquet(Path(DATA) / CHARGES.folder / "cms_ipps_fy2011.parquet", columns=["code", "definition"])
    codes, definitions = (column.to_list() for _, column in table.drop_duplicates().sort_values("code").items())
    assert len(codes) == 100
    held = [everything(pair, client) for pair in (each, federation) for client in range(0, 3337, 10)]
    procedure = torch.cat([records.x for records in held[:334]])[:, 51:].argmax(dim=1).tolist()
    rows = torch.cat([records.x for records in held[334:]])
    assert set(rows.unique().tolist()) == {0.0, 1.0} and (rows[:, :4].sum(dim=1) == 1).all()
    region = np.repeat(federation.group[::10], [len(records) for records in held[334:]])
    assert rows[:, :4].argmax(dim=1).tolist() == region.tolist()
    found = {codes[p]: row for p, row in zip(procedure, rows[:, 4:].int().tolist(), strict=True)}
    by_hand = {  # operation, implant, ventilation, major complications, complications, severe
        39: [1, 0, 0, 0, 0, 0],  # extracranial procedures without complications
        65: [0, 0, 0, 0, 1, 0],  # stroke with complications
        202: [0, 0, 0, 1, 0, 0],  # bronchitis "W CC/MCC"
        207: [0, 0, 1, 0, 0, 0],  # lungs, with a ventilator for four days
        246: [1, 1, 0, 1, 0, 0],  # a stent "W MCC OR 4+ VESSELS/STENTS"
        287: [0, 0, 0, 0, 0, 0],  # "W CARD CATH W/O MCC"
        330: [1, 0, 0, 0, 1, 1],  # bowel surgery with complications
        470: [1, 1, 0, 0, 0, 0],  # a new hip or knee "W/O MCC"
        853: [1, 0, 0, 1, 0, 1],  # infection with an operation "W MCC"
        870: [0, 0, 1, 0, 0, 1],  # sepsis, ventilated
        871: [0, 0, 0, 1, 0, 1],  # "W/O MV 96+ HOURS W MCC"
    }
    assert {code: found[code] for code in by_hand} == by_hand
    for code, definition in zip(codes, definitions, strict=True):  # by words, and not by a pattern
        words = definition.split()
        with_ = {after for before, after in itertools.pairwise(words) if before == "W"}
        assert found[code][3:5] == [int(bool(with_ & {"MCC", "CC/MCC"})), int("CC" in with_)]


@charges
@pytest.mark.parametrize(("features", "rmse"), [("each", 0.372), ("kinds", 0.504)])
def test_a_central_linear_fit_of_the_charges(features: str, rmse: float) -> None:
    """By least squares over all records; a constant is off by their standard deviation."""
    source = build_federation("hospital-charges", {"features": features}, None, 0).source
    assert isinstance(source, Columns)
    y = source.train.y.double().numpy()
    x = np.column_stack([source.train.x.numpy(), np.ones(len(y), np.float32)]).astype(np.float64)
    best, *_ = np.linalg.lstsq(x.T @ x, x.T @ y, rcond=None)  # the normal equations: 152 columns of 163,065
    assert len(y) == 163_065 and y.std() == pytest.approx(0.726, abs=5e-4)
    assert np.sqrt(np.mean((x @ best - y) ** 2)) == pytest.approx(rmse, abs=5e-4)


@heart
@pytest.mark.parametrize("algorithm", ["global", "local"])
def test_heart_disease_runs(runs: Path, algorithm: str) -> None:
    plan = make_plan(load_config(EXAMPLES / "heart.toml", [f"algorithm.name={algorithm}"]))
    result = run_plan(plan, runs=runs)
    accuracy = result.metrics["accuracy"]
    assert set(accuracy.by_group) == {"cleveland", "hungarian", "switzerland", "va"}
    assert result.statement.epsilon <= 4 and result.statement.record == "one patient"
    assert accuracy.mean > 0.7  # "disease" for everybody is right for 0.62, averaged over hospitals


@charges
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["global", "local"])
def test_3337_hospitals_plan_run_and_report_in_two_minutes(runs: Path, algorithm: str) -> None:
    began = time.perf_counter()
    settings = [f"algorithm.name={algorithm}", "algorithm.rounds=2"]
    plan = make_plan(load_config(EXAMPLES / "charges.toml", settings))
    result = run_plan(plan, runs=runs)
    assert time.perf_counter() - began < 120
    assert result.clients == 3337 and result.metrics["rmse"].clients == 3242
    assert result.main[0] == "rmse"
    if algorithm == "global":  # alone, with 49 records and this noise, a hospital does worse than that
        assert result.metrics["rmse"].mean < 0.70  # the best constant
    assert result.statement.units == 3337 and result.statement.epsilon <= 4
