"""What the documents show is run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

import fairveil
from fairveil.contract import check_algorithm
from fairveil.data.archive import Stored
from fairveil.data.datasets import find_dataset
from fairveil.data.files import File
from fairveil.options import parse
from fairveil.sweep import load_sweep

ROOT = Path(__file__).parents[1]


def block(document: str, language: str, number: int = 0) -> str:
    """A fenced block of a document."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)[number]


@pytest.fixture
def momentum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The algorithm of the document, saved as it says, in a folder of its own."""
    code = block("docs/your-own-algorithm.md", "python")
    (tmp_path / "momentum.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "momentum", raising=False)
    return code


def test_your_own_algorithm_has_fewer_than_30_lines(momentum: str) -> None:
    assert len([line for line in momentum.splitlines() if line.strip()]) < 30


def test_your_own_algorithm_keeps_the_contract(momentum: str) -> None:
    results = check_algorithm("momentum:Momentum")
    assert [result for result in results if not result.passed] == []


def test_your_own_algorithm_runs_from_a_config(momentum: str) -> None:
    (Path("own.toml")).write_text(
        (ROOT / "examples/digits/global.toml").read_text().split("[algorithm]")[0]
        + block("docs/your-own-algorithm.md", "toml")
        + "rounds = 8\nlearning_rate = 1.0\n[privacy]\nepsilon = 8.0\ndelta = 1e-3\n[engine]\nworkers = 1\n"
    )
    result = fairveil.start_run(fairveil.load_config(Path("own.toml")))
    assert result.metrics["accuracy"].mean > 0.4  # ten classes: it has learned


def test_the_readme_example_runs_as_a_script(tmp_path: Path) -> None:
    """With two workers: they must not run the script again."""
    code = block("README.md", "python").replace("examples/", f"{ROOT}/examples/")
    script = tmp_path / "script.py"
    script.write_text(code.replace('"algorithm.rounds=10"', '"algorithm.rounds=10", "engine.workers=2"'))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("differentially private") == 1 and "worst group" in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("name", ["global", "r-dpcfl", "oracle"])
def test_the_readme_shows_what_the_demo_prints(name: str, tmp_path: Path) -> None:
    """Within 0.02: another machine may round a gradient differently, and one of 359 test records is 0.003."""
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"│ {name} "))
    shown = [float(cell) for cell in row.strip("│").split("│")[1:]]
    result = fairveil.start_run(fairveil.load_config(ROOT / f"examples/digits/{name}.toml"), runs=tmp_path)
    found = result.metrics["accuracy"]
    printed = [found.by_group["0°"], found.by_group[found.worst_group], found.mean, found.disparity]
    assert printed == pytest.approx(shown, abs=0.02)


def test_the_columns_that_the_document_declares_can_be_declared() -> None:
    data = tomllib.loads(block("docs/data.md", "toml"))["data"]
    file = parse(File, data["options"], "data.options")
    assert find_dataset(data["dataset"]) is File and set(file.prepare) > {"age", "ward", "weight"}


def test_the_sweep_that_the_document_shows_is_the_example() -> None:
    shown = tomllib.loads(block("docs/sweeps.md", "toml"))
    assert shown == tomllib.loads((ROOT / "examples/digits/sweep.toml").read_text())


def test_the_results_shown_are_those_in_the_tables() -> None:
    """Every figure of the table of hospitals, and those of the README, follow from the CSV."""
    table = pd.read_csv(ROOT / "docs/results/heart-epsilon.csv")
    assert table["commit"].nunique() == 1 and not table["commit"].str.contains("dirty").any()
    by = table.groupby(["privacy.epsilon", "variant"])[["accuracy_mean", "accuracy_worst_group"]].mean()
    paired = pd.read_csv(ROOT / "docs/results/heart-epsilon-comparison.csv").query("measure == 'accuracy_worst_group'")
    shown = (ROOT / "docs/results/README.md").read_text()
    for (epsilon, part), (_, row) in zip(by.groupby(level=0), paired.iterrows(), strict=True):
        alone, together = part.loc[(epsilon, "local")], part.loc[(epsilon, "global")]
        cells = [f"{value:.3f}" for value in (*alone, *together)]
        cells.append(f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})")
        assert f"| {epsilon:g} | {' | '.join(cells)} |" in shown
    one = paired.query("`privacy.epsilon` == 1").iloc[0]
    readme = " ".join((ROOT / "README.md").read_text().split())
    for value in (f"{one['variant_mean']:.3f}", f"{one['baseline_mean']:.3f}", f"{one['difference']:+.3f}"):
        assert value in readme
    assert f"from {one['low']:+.3f} to {one['high']:+.3f}" in readme


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("mnist-rotated", "accuracy[0°]"),
        ("fashion-rotated", "accuracy[0°]"),
        ("mnist-flipped", "accuracy[labels +0]"),
        ("mnist-clusters", "accuracy_worst_group"),
    ],
)
def test_the_tables_of_methods_are_those_of_the_sweeps(name: str, smallest: str) -> None:
    """Every row of docs/recommended.md: mean and deviation over seeds, in percent; how often clusters were found."""
    path = ROOT / f"docs/results/{name}.csv"
    table = pd.read_csv(path)
    assert (table["status"] == "finished").all() and not table["commit"].str.contains("dirty").any()
    shown = (ROOT / "docs/recommended.md").read_text()
    for variant, part in table.groupby("variant"):
        cells = []
        for _, runs in part.groupby("privacy.epsilon") if "privacy.epsilon" in part else [(None, part)]:
            for column in ("accuracy_mean", smallest):
                cells.append(f"{100 * runs[column].mean():.1f} ± {100 * runs[column].std():.1f}")
            found = runs["clusters_ari"].dropna()
            cells.append(f"{(found == 1).sum()} of {len(found)}" if len(found) else "")
        assert f"| `{variant}` | {' | '.join(cells)} |" in shown


def test_the_papers_own_settings_are_those_of_the_sweep() -> None:
    table = pd.read_csv(ROOT / "docs/results/mnist-paper.csv")
    assert (table["status"] == "finished").all() and not table["commit"].str.contains("dirty").any()
    assert table["clusters_ari"].dropna().tolist() == [1]
    shown = (ROOT / "docs/recommended.md").read_text()
    for _, run in table.iterrows():
        assert f"| `{run['variant']}` | {100 * run['accuracy_mean']:.1f} | {100 * run['accuracy[0°]']:.1f} |" in shown


def test_what_each_setting_brings_is_what_the_sweep_has() -> None:
    table = pd.read_csv(ROOT / "docs/results/mnist-tuning.csv")
    assert (table["status"] == "finished").all() and not table["commit"].str.contains("dirty").any()
    shown = (ROOT / "docs/recommended.md").read_text()
    for _, run in table.iterrows():
        figures = f"{100 * run['accuracy_mean']:.1f} | {100 * run['accuracy[0°]']:.1f} |"
        assert re.search(rf"\| `{run['variant']}` \| [^|]+ \| {re.escape(figures)}", shown)


def test_the_tables_of_clusterings_are_those_of_the_bench() -> None:
    """Every row of the three tables in docs/clustering.md with both ways of clustering, and of that of the limit."""
    table = pd.read_csv(ROOT / "docs/results/clustering.csv", keep_default_na=False)
    assert not table["commit"].str.contains("dirty").any()
    text = (ROOT / "docs/clustering.md").read_text()
    lines = text.split("## Measured")[1].splitlines()
    shown = {line for line in lines if line[-3:-2].isdigit() and line[:3] in ("| 1", "| 2", "| e", "| u", "| v")}
    measures = "ari_given", "ari_unknown", "count_found", "confident_wrong_given", "confident_wrong_unknown"
    rows = set()
    kept = table[(table["nearest"] == 1) & (table["count_found"] != "")]
    cells = ["clients", "noise", "dimension", "separation", "scatter_kind", "scatter"]
    for cell, both in kept.groupby(cells, sort=False):
        clients, noise, dimension, separation, kind, scatter = cell
        apart = f"{separation:.1f}".removesuffix(".0") if separation else "none"
        paper, ours = (both[both["projection"] == name].iloc[0] for name in ("paper", "loo"))
        figures = " | ".join(f"{float(paper[m]):z.2f} / {float(ours[m]):z.2f}" for m in measures)
        names = [str(clients)] * (clients != 10) + [noise] + ([kind, f"{scatter}"] if kind else []) + [apart]
        if dimension != 1_000_000 and (clients == 10 or dimension == 28_938):
            rows.add(f"| {' | '.join(names)} | {figures} |")
    limit = table[table["count_found"] == ""].groupby(["clients", "dimension"])["perfect_given"]
    rows |= {f"| {n} | {p:,} | {' | '.join(f'{share:.2f}' for share in shares)} |" for (n, p), shares in limit}
    assert rows == shown


def coverage_rows(table: pd.DataFrame) -> list[str]:
    """The rows of the tables of docs/fairness.md, in their order."""
    clients, seeds, records, values = (
        table[table["unit"].eq(unit) & table["figure"].str.startswith("difference").eq(of_values)]
        for unit, of_values in (("clients", False), ("seeds", False), ("test records", False), ("clients", True))
    )

    def row(name: str, cells: pd.Series) -> str:
        return f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"

    found = [row("mean", clients[clients["figure"] == "mean"]["coverage"])]
    for (figure, apart), part in clients.groupby(["figure", "apart"], sort=False):
        found.append(row(f"{figure}, {'one is worse by 1' if apart else 'all are equal'}", part["coverage"]))
    for apart, part in clients[clients["figure"] == "gap"].groupby("apart"):
        found.append(row(f"{apart:.0f}", part["mean_value"]))
    for between, part in seeds.groupby("between"):
        found.append(row(f"{between:g}", part["coverage"]))
    for accuracy, part in records.groupby("accuracy"):
        found.append(row(f"{accuracy:g}", part.set_index("n")["coverage"].reindex([20, 100, 1000])).replace("nan", ""))
    for apart, part in values.groupby("apart"):
        found.append(row(f"{apart:g}", part["coverage"]))
    return found


def test_the_coverage_in_the_document_is_that_of_the_simulation() -> None:
    table = pd.read_csv(ROOT / "docs/results/interval-coverage.csv")
    assert table["commit"].nunique() == 1 and not table["commit"].str.contains("dirty").any()
    text = (ROOT / "docs/fairness.md").read_text().partition("### When not to trust them")[2]
    bodies = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert "".join(bodies).splitlines() == coverage_rows(table)
    values = table["figure"].str.startswith("difference")
    assert table["coverage_error"][~values].max() <= 0.008 and table["coverage_error"][values].max() <= 0.016


@pytest.mark.parametrize("name", ["global", "oracle", "local"])
def test_the_intervals_in_the_document_can_be_made(
    name: str, small: dict[str, Any], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients of a group share their test records: one model for all, one for each group, and one for each client."""
    algorithm = small["algorithm"] | {"name": name}
    result = fairveil.start_run(fairveil.make_config(small | {"algorithm": algorithm}), runs=runs)
    code = block("docs/fairness.md", "python").replace("runs/mine", str(result.folder))
    exec(code)
    printed = capsys.readouterr().out
    found = result.metrics["accuracy"]
    values = [float(value) for value in re.findall(r"value=([^,]+)", printed)]
    assert values == pytest.approx([found.mean, found.by_group[found.worst_group], found.gap])
    unit = "n=5, unit='clients'" if name == "local" else "n=718, unit='test records'"  # two groups, 359 records each
    assert printed.count(unit) == 3 and "nan" not in printed


# ---- docs/metric-privacy.md ------------------------------------------------------------------------

NOISE, HYPOTHESES = "privacy.noise_multiplier", "algorithm.hypotheses"
TABLE_2 = {  # of Galli et al. (2023): median and maximum by noise, for 1, 3, 5 and 7 hypotheses
    0.0: ["–, –"] * 4,
    0.1: ["528, 1540", "473, 1386", "418, 1342", "517, 1551"],
    1.0: ["49.5, 147.4", "44, 138.6", "40.7, 127.6", "36.3, 126.5"],
    2.0: ["21.5, 66.6", "22, 69.3", "14.3, 54.5", "15.4, 57.8"],
    3.0: ["12.1, 40", "12.5, 40", "8.4, 36.7", "7.7, 32.3"],
    5.0: ["5.3, 20.9", "5.5, 21.6", "5.9, 22", "5.7, 21.3"],
}
TABLE_3 = {  # of the same: accuracy by noise, for cross-entropy and RMSE
    0.0: (83.2, 80.1), 0.001: (84.3, 81.3), 0.01: (83.2, 80.5), 0.1: (83.4, 80.8), 1.0: (83.4, 81.4), 3.0: (83.5, 82.5),
    5.0: (81.2, 78.7), 10.0: (69.2, 68.7), 15.0: (56.1, 62.2),
}  # fmt: skip


def finished(name: str) -> pd.DataFrame:
    """The results of a sweep, all of them of committed code."""
    table = pd.read_csv(ROOT / f"docs/results/{name}.csv")
    whole = (table["status"] == "finished").all() if "status" in table else True
    assert whole and not table["commit"].str.contains("dirty").any()
    return table


def spread_of(values: pd.Series, scale: float = 1.0, form: str = ".3f") -> str:
    return f"{format(scale * values.mean(), form)} ± {format(scale * values.std(), form)}"


def rows_of_hypotheses() -> list[str]:
    """Where they end, the farthest over seeds."""
    rows = []
    for (form, k, nu), part in finished("metric-synthetic-models").groupby(["variant", HYPOTHESES, NOISE], sort=False):
        along = f"{part['along'].min():.2f} to {part['along'].max():.2f}" if k == 1 else ""
        rows.append(
            f"| {form} | {k} | {nu:g} | {part['to_first'].max():.2f} | {part['to_second'].max():.2f} | {along} |"
        )
    return rows


def rows_of_errors() -> list[str]:
    """RMSE: noise down, hypotheses across."""
    return [
        f"| {nu:g} | {' | '.join(spread_of(runs['rmse_mean']) for _, runs in part.groupby(HYPOTHESES))} |"
        for nu, part in finished("metric-charges").groupby(NOISE)
    ]


def rows_of_budgets() -> list[str]:
    """Median and maximum, mean over seeds; the paper's beside them."""
    rows = []
    for nu, part in finished("metric-charges").groupby(NOISE):
        cells = []
        for (_, runs), paper in zip(part.groupby(HYPOTHESES), TABLE_2[nu], strict=True):
            ours = [runs[f"budget_{what}"].mean() for what in ("median", "maximum")]
            cells.append(f"{', '.join('–' if math.isinf(value) else f'{value:.4g}' for value in ours)} ({paper})")
        rows.append(f"| {nu:g} | {' | '.join(cells)} |")
    return rows


def rows_of_fairness(name: str) -> list[str]:
    """Differences between the groups: one hypothesis, two, and the paired difference with its interval."""
    table, paired = finished(name), pd.read_csv(ROOT / f"docs/results/{name}-comparison.csv")
    rows = []
    for nu, part in table.groupby(NOISE):
        cells = []
        for measure in ("demographic parity", "equalised odds", "equal opportunity"):
            one, two = (part[part["variant"] == v][f"clients: {measure}"].mean() for v in ("one", "two"))
            of = paired[(paired["measure"] == f"clients: {measure}") & (paired[NOISE] == nu)].iloc[0]
            cells.append(f"{one:.3f} → {two:.3f} ({of['low']:+.3f} to {of['high']:+.3f})")
        rows.append(f"| {nu:g} | {' | '.join(cells)} |")
    return rows


def rows_of_handwriting() -> list[str]:
    """Accuracy in percent, and the paper's."""
    rows = []
    for nu, part in finished("metric-handwriting").groupby(NOISE):
        cells = []
        for variant, paper in zip(("cross-entropy", "squared"), TABLE_3[nu], strict=True):
            cells += [spread_of(part[part["variant"] == variant]["accuracy_mean"], 100, ".1f"), f"{paper}"]
        rows.append(f"| {nu:g} | {' | '.join(cells)} |")
    return rows


def rows_of_epsilons() -> list[str]:
    table = finished("metric-charges-epsilon")
    return [
        f"| {epsilon:g} | "
        + " | ".join(spread_of(part[part["variant"] == v]["rmse_mean"]) for v in ("laplace", "gaussian"))
        + " |"
        for epsilon, part in table.groupby("privacy.epsilon")
    ]


def metric_tables() -> list[list[str]]:
    """Every table of results in docs/metric-privacy.md, in their order."""
    return [
        rows_of_hypotheses(), rows_of_errors(), rows_of_budgets(), rows_of_epsilons(), rows_of_fairness("metric-loans"),
        rows_of_fairness("metric-parity"), rows_of_handwriting(),
    ]  # fmt: skip


def test_the_tables_of_metric_privacy_are_those_of_the_sweeps() -> None:
    text = (ROOT / "docs/metric-privacy.md").read_text().partition("## Experiments")[2]
    bodies = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [body.splitlines() for body in bodies] == metric_tables()


def test_what_is_said_of_metric_privacy_holds() -> None:
    """The claims beside the tables: both parameters found, budgets that fall as 1/nu, two models fairer than one."""
    ended = finished("metric-synthetic-models").query(f"`{HYPOTHESES}` == 2 and `{NOISE}` == 1")
    assert len(ended) == 20 and ended[["to_first", "to_second"]].max().max() < 0.3
    alone = finished("metric-synthetic-models").query(f"`{HYPOTHESES}` == 1")
    assert alone["along"].between(0.3, 0.7).all()
    charges = finished("metric-charges")
    assert charges.groupby([HYPOTHESES, NOISE])["seed"].nunique().eq(10).all()
    noisy = charges[charges[NOISE] > 0]
    for what in ("budget_median", "budget_maximum"):
        assert (noisy[what] * noisy[NOISE]).std() / (noisy[what] * noisy[NOISE]).mean() < 0.15
    by_count = charges.groupby([NOISE, HYPOTHESES])["rmse_mean"].mean().unstack()
    assert (by_count[3] < by_count[1]).all()
    text = " ".join((ROOT / "docs/metric-privacy.md").read_text().split())
    scales = {"majority": math.hypot(5.0, 6.0), "minority": -math.hypot(4.0, -4.5)}  # x.theta ~ N(0, |theta|^2)
    for group, scale in scales.items():
        u = np.linspace(0, 1, 100_001)  # a loan where x.theta + u >= 0; of the minority where it is <= 0
        assert f"{norm.cdf(u / scale).mean():.3f} in the {group}" in text


def test_the_charges_in_the_readme_are_those_of_the_sweep() -> None:
    runs = finished("metric-charges").query(f"`{NOISE}` == 1").groupby(HYPOTHESES)["rmse_mean"].mean()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"is off by {runs[1]:.3f} (RMSE of a logarithm), five" in readme and f"chooses by {runs[5]:.3f}," in readme
    gaussian = finished("metric-charges-epsilon").query("variant == 'gaussian' and `privacy.epsilon` == 8")["rmse_mean"]
    assert f"with trust in nobody, is off by {gaussian.mean():.3f}." in readme


def test_of_exported_models_the_best_can_be_taken(tmp_path: Path) -> None:
    """The line of docs/metric-privacy.md: for each kind of clients another one."""
    result = fairveil.start_run(fairveil.load_config(ROOT / "examples/metric-privacy/synthetic.toml"), runs=tmp_path)
    exported = fairveil.export_run(fairveil.load_run(result.folder))
    paths = [path for path in exported.files if path.suffix == ".safetensors"]
    line = block("docs/metric-privacy.md", "python")
    federation, taken = fairveil.load_config(ROOT / "examples/metric-privacy/synthetic.toml").build_federation(), []
    for client in (0, 999):
        records = federation.load(client).train
        names = {"fairveil": fairveil, "paths": paths, "x": records.x, "y": records.y}
        exec(line, names)
        (weights,) = (value.flatten().tolist() for value in names["model"].state_dict().values())  # type: ignore[attr-defined]
        taken.append(weights)
    assert taken == [pytest.approx([5, 6], abs=0.3), pytest.approx([4, -4.5], abs=0.3)]


# ---- docs/voting.md --------------------------------------------------------------------------------

VOTING = {
    "knn-fl-gradients": "`knn-fl`, gradients", "pate-fl-adapted": "`pate-fl`, adapted", "pate-fl": "`pate-fl`",
    "knn-fl-pixels": "`knn-fl`, pixels", "dp-fedavg": "`dp-fedavg`",
}  # fmt: skip


def rows_of_votes() -> list[str]:
    """Accuracy of the student, of the labels, the price of these answers, and accuracy without privacy, in percent."""
    runs, limits = finished("voting-mnist-usps"), finished("voting-mnist-usps-limits").set_index("variant")
    rows = []
    for variant, name in VOTING.items():
        part = runs[runs["variant"] == variant]
        cells = [spread_of(part["accuracy_mean"], 100, ".1f"), "-", "-"]
        if part["votes_accuracy"].notna().all():
            cells[1:] = [
                spread_of(part["votes_accuracy"], 100, ".1f"),
                f"{part['votes_epsilon_not_sanitised'].mean():.2f}",
            ]
        open_one = f"{100 * limits.loc[variant, 'accuracy_mean']:.1f}" if variant in limits.index else "-"
        rows.append(f"| {name} | {' | '.join(cells)} | {open_one} |")
    return rows


def rows_of_domains() -> list[str]:
    runs = finished("voting-office-caltech")
    rows = []
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        parts = [runs[runs["variant"] == f"{name}-to-{domain}"] for name in ("knn-fl", "pate-fl", "dp-fedsgd")]
        rows.append(f"| {domain} | {' | '.join(spread_of(part['accuracy_mean'], 100, '.1f') for part in parts)} |")
    return rows


def rows_of_seconds() -> list[str]:
    measured = pd.read_csv(ROOT / "docs/results/voting-seconds.csv")
    return [f"| {row.method} | {row.seconds:.1f} |" for row in measured.itertuples()]


def test_the_tables_of_votes_are_those_of_the_sweeps() -> None:
    text = (ROOT / "docs/voting.md").read_text().partition("## Results")[2]
    bodies = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [body.splitlines() for body in bodies] == [rows_of_votes(), rows_of_domains(), rows_of_seconds()]


def test_what_is_said_of_votes_holds() -> None:
    runs = finished("voting-mnist-usps")
    assert runs.groupby("variant")["seed"].nunique().eq(3).all() and (runs["epsilon"] <= 2.736).all()
    by_method = runs.pivot_table("accuracy_mean", "seed", "variant")
    for voting in ("knn-fl-gradients", "pate-fl-adapted"):
        assert (by_method[voting] > by_method["dp-fedavg"]).all()
    assert pd.read_csv(ROOT / "docs/results/voting-seconds.csv")["seconds"].max() < 5
    best, averaged = (100 * by_method[name].mean() for name in ("knn-fl-gradients", "dp-fedavg"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"is right for {best:.1f}% of USPS" in readme and f"private updates for {averaged:.1f}%" in readme
    paired = pd.read_csv(ROOT / "docs/results/voting-mnist-usps-comparison.csv").query("measure == 'accuracy_mean'")
    text = " ".join((ROOT / "docs/voting.md").read_text().split())
    first, *others = (
        100 * paired.set_index("variant").loc[[*VOTING][:4], ["difference", "low", "high"]]
    ).values.tolist()
    assert "+{:.1f} (95%: {:.1f} to {:.1f})".format(*first) in text
    assert all("+{:.1f} ({:.1f} to {:.1f})".format(*row) in text for row in others)


def test_the_pull_in_the_document_is_that_of_the_sweep() -> None:
    table = pd.read_csv(ROOT / "docs/results/mr-mtl-pull.csv")
    assert (table["status"] == "finished").all() and not table["commit"].str.contains("dirty").any()
    shown = (ROOT / "docs/recommended.md").read_text()
    for turned, part in table.groupby("variant"):
        means = part.groupby("algorithm.pull")["accuracy_mean"].mean()
        degrees = ", ".join(f"{angle}°" for angle in str(turned).split("-"))
        assert f"| {degrees} | {' | '.join(f'{mean:.3f}' for mean in means)} |" in shown


def test_what_a_round_costs_is_what_was_measured() -> None:
    measured = pd.read_csv(ROOT / "docs/results/federation-overhead.csv").groupby("way").seconds.median()
    text = (ROOT / "docs/deployment.md").read_text()
    shown = re.findall(r"^\| .* \| ([0-9.]+) \|$", text.partition("seconds a round")[2], re.MULTILINE)
    assert shown == [f"{measured[way]:.1f}" for way in ("app", "empty app", "door", "fairveil")]


def test_the_demo_finds_its_clusters_in_every_seed() -> None:
    """As the README says; and, if their number is not told, as the example says."""
    table = pd.read_csv(ROOT / "docs/results/digits-clusters.csv")
    perfect = table.groupby("variant")["clusters_ari"].apply(lambda found: int((found == 1).sum()))
    assert (perfect["r-dpcfl"], perfect["r-dpcfl-auto"]) == (10, 8)
    assert "in all of 10 seeds" in " ".join((ROOT / "README.md").read_text().split())
    assert "in 8 of 10 seeds" in (ROOT / "examples/digits/r-dpcfl.toml").read_text()


def test_the_clusters_in_the_readme_are_those_of_the_sweep() -> None:
    table = pd.read_csv(ROOT / "docs/results/mnist-rotated.csv").query("`privacy.epsilon` == 2")
    figures = 100 * table.groupby("variant")[["accuracy_mean", "accuracy[0°]"]].mean()
    found = {name: (f"{mean:.1f}", f"{minority:.1f}") for name, (mean, minority) in figures.iterrows()}
    readme = " ".join((ROOT / "README.md").read_text().split())
    (mean, minority), oracle = found["r-dpcfl"], found["oracle"]
    assert f"is right for {mean}% of the test images and for {minority}% in the smallest cluster" in readme
    assert f"the oracle for {oracle[0]} and {oracle[1]}" in readme
    assert "one model for all for {} and {}".format(*found["global"]) in readme
    assert "training alone for {} and {}".format(*found["local"]) in readme


def test_the_speed_in_the_readme_is_what_was_measured() -> None:
    models = json.loads((ROOT / "docs/results/benchmark-step.json").read_text())["models"].values()
    opacus, plain = ([found[ratio] for found in models] for ratio in ("vs_opacus", "vs_plain"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(opacus):.1f} to {max(opacus):.0f} times as fast as Opacus" in readme
    assert f"{min(plain):.2f} to {max(plain):.2f} of the speed without privacy" in readme


# the example of a federation is planned with its clients: tests/test_deploy.py and tests/flower
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.parent.name != "federation")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_can_be_planned(path: Path) -> None:
    text = path.read_text()
    if "seeds =" in text:
        assert load_sweep(path).cells
        return
    config = fairveil.load_config(path)
    for name in filter(None, (config.data.dataset, config.data.server and config.data.server.dataset)):
        dataset = find_dataset(name)
        if issubclass(dataset, Stored) and dataset.archive.missing():
            pytest.skip(f"{name} is not here")
    plan = fairveil.make_plan(config)
    # those that repeat a paper have its noise, and print what that means
    bounded = plan.algorithm.unit != "metric" and not path.stem.startswith("paper-")
    assert 0 < plan.price.epsilon <= (8.0 if bounded else math.inf)
