"""docs/fair-clipping.md says what the sweeps have: `python tests/test_fair_clipping_docs.py` prints its tables."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

from fairveil.privacy.accounting import calibrate
from fairveil.session import Facts, Terms
from fairveil.sweep import load_sweep

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/fair-clipping.md"
FIGURES = (("mean", 100, ".1f"), ("worst_10_percent", 100, ".1f"), ("variance", 1e4, ".0f"))
METHODS = {
    "fedavg": "`fedavg`, clip best for the mean", "fedavg-worst": "`fedavg`, clip best for the worst tenth",
    "fair-fedavg": "`fair-fedavg`", "root-loss": "`root-loss`", "fairfed": "`fairfed`", "q-fedavg": "`q-fedavg`",
    "loss-split": "`loss-split`", "fedfdp": "`fedfdp` (protects a record only)",
    "fair-fedavg-faithful": "`fair-fedavg`, `faithful` (no epsilon)",
}  # fmt: skip
PUBLISHED = {
    "fedavg-faithful": "`fedavg`, exact median", "q-fedavg-faithful": "`q-fedavg`, exact median",
    "fairfed-faithful": "`fairfed`, exact median", "fair-fedavg-faithful": "`fair-fedavg`, as published",
    "fedavg": "`fedavg`", "q-fedavg": "`q-fedavg`", "fairfed": "`fairfed`", "fair-fedavg": "`fair-fedavg`",
    "fedfdp": "`fedfdp` (a record)",
}  # fmt: skip
# mean, worst 10%, best 10%, variance: Table 2 of Du, Xiang and Wu (2025)
PAPER = {
    "synthetic": "75.8/10.8/100/845 63.3/0.0/100/1290 62.4/0.0/100/1121 78.5/15.5/100/735 68.3/0.0/100/1606",
    "vehicle": "83.3/43.2/94.3/249 84.5/46.7/94.8/243 84.3/38.3/96.0/324 74.5/42.4/85.4/170 85.0/43.2/96.5/280",
    "fashion": "62.1/28.5/92.4/311 60.9/26.9/87/201 58.8/0.0/100/1070 60.6/32.2/85.6/241 62.6/27.4/92.9/497",
    "cifar10": "50.3/42.0/57.0/23 52.9/42.0/61.9/38 41.1/35.0/72.7/289 49.9/43.2/57.0/17 50.1/40.8/57.4/21",
}
PAPER_ROWS = ("fedavg-faithful", "q-fedavg-faithful", "fairfed-faithful", "fair-fedavg-faithful", "fedfdp")


def read(name: str) -> pd.DataFrame:
    table = pd.read_csv(ROOT / f"docs/results/fair-{name}.csv")
    assert (table["status"] == "finished").all() and not table["commit"].str.contains("dirty").any()
    return table


def cell(part: pd.DataFrame, model: str = "", figures: tuple[tuple[str, float, str], ...] = FIGURES) -> str:
    """Mean and deviation over seeds."""
    found = []
    for figure, scale, form in figures:
        values = scale * part[f"{model}accuracy_{figure}"]
        spread = f" ± {format(values.std(), form)}" if len(values) > 1 else ""
        found.append(format(values.mean(), form) + spread)
    return " / ".join(found)


def rows_of_methods(*names: str) -> list[str]:
    """Every method on some sets, then what clients make of it for themselves."""
    tables = [read(name) for name in names]
    rows = []
    for variant, name in METHODS.items():
        parts = [table[table["variant"] == variant] for table in tables]
        if any(len(part) for part in parts):
            rows.append(f"| {name} | {' | '.join(cell(part) if len(part) else '-' for part in parts)} |")
    tuned = [(f"`{variant}` and fine-tuning", variant, "finetuned_") for variant in ("fedavg", "loss-split")]
    for name, variant, model in (*tuned, ("each client alone", "fedavg", "local_")):
        rows.append(f"| {name} | {' | '.join(cell(t[t['variant'] == variant], model) for t in tables)} |")
    return rows


def difference(table: pd.DataFrame, variant: str, model: str = "") -> tuple[float, float, float]:
    """Of the worst tenth from that of `fedavg-worst`, in points: mean, and a 95% interval by Student's t over seeds."""
    column = f"{model}accuracy_worst_10_percent"
    one = table[table["variant"] == variant].set_index("seed")[column]
    paired = 100 * (one - table[table["variant"] == "fedavg-worst"].set_index("seed")["accuracy_worst_10_percent"])
    half = stats.t.ppf(0.975, len(paired) - 1) * paired.std() / math.sqrt(len(paired))
    return paired.mean(), paired.mean() - half, paired.mean() + half


def rows_of_differences() -> list[str]:
    tables = [read(name) for name in WRITERS]
    wanted = [(name, variant, "") for variant, name in METHODS.items() if variant not in ("fedavg", "fedavg-worst")][:5]
    wanted += [(f"`{variant}` and fine-tuning", variant, "finetuned_") for variant in ("fedavg", "loss-split")]
    rows = []
    for name, variant, model in wanted:
        given = [difference(table, variant, model) if variant in set(table["variant"]) else () for table in tables]
        cells = ("{:+.1f} ({:+.1f} to {:+.1f})".format(*each) if each else "-" for each in given)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


WRITERS = ("writers", "writers-2", "few", "natural")
# mean / worst tenth / variance of an earlier program on the same writers, five seeds each; it is not kept
TRIAL = {
    "fedavg": "81.6/47.9/242 79.7/42.4/296 77.5/38.5/334 89.7/69.4/89",
    "fedavg-worst": "81.4/50.2/214 78.6/46.0/247 76.8/41.2/288 89.7/69.4/89",
    "fair-fedavg": "80.6/52.2/187 77.4/46.4/227 76.2/41.5/281 89.5/68.6/93",
    "root-loss": "81.1/51.5/194 77.9/46.9/229 76.2/42.8/263 89.5/69.1/90",
    "loss-split": "87.7/65.3/108 83.6/57.6/152 81.9/53.7/183 89.7/68.8/92",
    "fair-fedavg-faithful": "78.9/47.8/226 73.2/41.2/260 - 87.6/66.4/102",
    "fedavg finetuned_": "94.0/79.3/43 93.8/78.9/45 79.7/51.7/193 95.1/82.4/33",
    "loss-split finetuned_": "94.4/80.4/39 93.4/78.6/46 80.7/55.3/156 95.1/82.2/33",
    "fedavg local_": "93.1/76.5/56 93.1/76.5/56 63.5/38.5/194 92.6/75.9/59",
}  # fmt: skip


def away_from_the_trial() -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """By row and set: the trial's three figures, and how many of our standard deviations they are from our means."""
    found = {}
    for key, printed in TRIAL.items():
        variant, _, model = key.partition(" ")
        for name, cells in zip(WRITERS, printed.split(), strict=True):
            if cells == "-":
                continue
            table, theirs = read(name), [float(figure) for figure in cells.split("/")]
            part = table[table["variant"] == variant]
            ours = [scale * part[f"{model}accuracy_{figure}"] for figure, scale, _ in FIGURES]
            off = [(figure - values.mean()) / values.std() for figure, values in zip(theirs, ours, strict=True)]
            found[key, name] = theirs, off
    return found


def rows_of_the_trial() -> list[str]:
    """What it had; in brackets by how many standard deviations, where that is more than two."""
    named = {"fedavg finetuned_": "`fedavg` and fine-tuning", "loss-split finetuned_": "`loss-split` and fine-tuning"}
    named |= {"fedavg local_": "each client alone"}
    away, rows = away_from_the_trial(), []
    for key in TRIAL:
        cells = []
        for name in WRITERS:
            if (key, name) not in away:
                cells.append("-")
                continue
            shown = (
                format(value, form) + (f" ({off:+.1f})" if abs(off) > 2 else "")
                for value, off, (_, _, form) in zip(*away[key, name], FIGURES, strict=True)
            )
            cells.append(" / ".join(shown))
        rows.append(f"| {named.get(key) or METHODS[key]} | {' | '.join(cells)} |")
    return rows


def rows_of_the_paper() -> list[str]:
    figures = (("mean", 100, ".1f"), ("worst_10_percent", 100, ".1f"), ("best_10_percent", 100, ".1f"), FIGURES[2])
    rows = []
    for name, printed in PAPER.items():
        table, in_paper = read(f"paper-{name}"), dict(zip(PAPER_ROWS, printed.split(), strict=True))
        for variant, shown in PUBLISHED.items():
            parts = [table[(table["variant"] == variant) & (table["privacy.noise_multiplier"] == z)] for z in (0, 1)]
            plain = [
                " / ".join(text.partition(" ±")[0] for text in cell(part, "", figures).split(" / ")) for part in parts
            ]
            epsilon = parts[1]["epsilon"].max()
            price = "none" if math.isinf(epsilon) else f"{epsilon:.1f}"
            rows.append(f"| {name} | {shown} | {' | '.join(plain)} | {price} | {in_paper.get(variant, '-')} |")
    return rows


def rows_of_histograms() -> list[str]:
    """Clients out of a hundred, in fifths of the scale."""
    table = pd.read_csv(ROOT / "docs/results/fair-histograms.csv")
    assert not table["commit"].str.contains("dirty").any()
    bins = [column for column in table.columns if column.startswith("from_")]
    rows = []
    for name in PAPER:
        for variant in ("fedavg-faithful", "fair-fedavg-faithful", "fair-fedavg"):
            for noise in (0.0, 1.0):
                given = (table["privacy.noise_multiplier"] == noise) & (table["variant"] == variant)
                counts = table[given & (table["sweep"] == f"fair-paper-{name}")][bins].sum().to_numpy()
                fifths = 100 * counts.reshape(5, 2).sum(axis=1) / counts.sum()
                rows.append(f"| {name} | {PUBLISHED[variant]} | {noise:g} | {' | '.join(f'{x:.0f}' for x in fifths)} |")
    return rows


def clipped_away() -> str:
    """The largest share of an update, over the runs of the published form, that clipping has taken away."""
    table = pd.read_csv(ROOT / "docs/results/fair-histograms.csv")
    return f"{100 * table[table['variant'] == 'fair-fedavg-faithful']['clipped_away'].max():.2f}%"


def rows_of_alpha() -> list[str]:
    sound, published = read("alpha"), read("paper-alpha")
    rows = [f"| writers, `fair-fedavg` | - | {a:g} | {cell(t)} |" for a, t in sound.groupby("algorithm.alpha")]
    by = published.groupby(["algorithm.clip_rate", "algorithm.alpha"])
    return [*rows, *(f"| vehicle, as published, no noise | {z:g} | {a:g} | {cell(t)} |" for (z, a), t in by)]


def rows_of_seconds() -> list[str]:
    table = pd.read_csv(ROOT / "docs/results/clipping-seconds.csv")
    assert not table["commit"].str.contains("dirty").any()
    wide = table.pivot_table("seconds", "method", "set", sort=False)[list(PAPER)]
    return [
        f"| {method} | {' | '.join(f'{x:.3f}' for x in row)} |"
        for method, row in zip(wide.index, wide.values, strict=True)
    ]


def rows_of_the_part() -> list[str]:
    table = pd.read_csv(ROOT / "docs/results/clipping-part.csv")
    return [f"| {r.clients} | {r.parameters:,} | {r.seconds:.2f} | {r.memory:.2f} |" for r in table.itertuples()]


def tables() -> list[list[str]]:
    """In the order of the page."""
    return [
        rows_of_methods(*WRITERS), rows_of_differences(), rows_of_the_trial(),
        rows_of_methods("synthetic", "fashion"), rows_of_the_paper(), rows_of_histograms(), rows_of_alpha(),
        rows_of_seconds(), rows_of_the_part(),
    ]  # fmt: skip


def test_the_tables_are_those_of_the_sweeps() -> None:
    text = PAGE.read_text().partition("## Results")[2]
    bodies = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [body.splitlines() for body in bodies] == tables()


def test_the_readme_has_figures_of_the_sweep() -> None:
    table, readme = read("writers"), " ".join((ROOT / "README.md").read_text().split())
    for variant, model, said in (
        ("fedavg-worst", "", "{}% on average and for {}% in the worst tenth"),
        ("fair-fedavg", "", "by fair clipping for {} and {};"),
        ("loss-split", "", "reach {} and {}, fine-tuning"),
        ("fedavg", "finetuned_", "which costs nothing, {} and {}."),
        ("fedavg", "local_", "A writer alone: {} and {}."),
    ):
        part = table[table["variant"] == variant]
        figures = [f"{100 * part[f'{model}accuracy_{figure}'].mean():.1f}" for figure in ("mean", "worst_10_percent")]
        assert said.format(*figures) in readme


def test_what_is_said_holds() -> None:
    """At equal epsilon: two models beat every single one, what is personal beats both; five seeds each."""
    for name, epsilon in (
        ("writers", 8),
        ("writers-2", 2),
        ("few", 2),
        ("natural", 8),
        ("synthetic", 8),
        ("fashion", 8),
    ):
        table = read(name)
        assert table.groupby("variant")["seed"].nunique().eq(5).all()
        sound = table[table["variant"] != "fair-fedavg-faithful"]
        assert (sound["epsilon"].between(0.999 * epsilon, epsilon)).all()
        if "fair-fedavg-faithful" in set(table["variant"]):
            assert table[table["variant"] == "fair-fedavg-faithful"]["epsilon"].eq(math.inf).all()
    for name in ("writers", "writers-2"):
        table = read(name)
        assert difference(table, "loss-split")[1] > 10
        assert difference(table, "fedavg", "finetuned_")[1] > difference(table, "loss-split")[0]
    single, above = ("fair-fedavg", "root-loss", "fairfed", "q-fedavg"), set()
    for name in WRITERS:
        table = read(name)
        there = [variant for variant in single if variant in set(table["variant"])]
        above |= {(name, variant) for variant in there if difference(table, variant)[1] > 0}
        if name != "natural":  # evener on every seed, and the mean pays for it
            by_seed = table.set_index(["variant", "seed"])
            for figure in ("accuracy_variance", "accuracy_mean"):
                assert (by_seed.loc["fair-fedavg"][figure] < by_seed.loc["fedavg-worst"][figure]).all()
    assert above == {("writers", "fair-fedavg"), ("few", "fair-fedavg")}
    few = read("few")[lambda table: table["variant"] == "fedavg"]
    assert few["finetuned_accuracy_mean"].min() > few["local_accuracy_mean"].max() + 0.1  # there is something to share
    assert f"stay within {clipped_away()} of the norms" in " ".join(PAGE.read_text().split())
    for part in pd.read_csv(ROOT / "docs/results/clipping-part.csv").itertuples():
        assert part.seconds < 3 and part.memory < 2


def test_how_much_of_the_aggregate_is_noise() -> None:
    """Of the writers at epsilon 8, in units of C_t; the noise is that of the plan, for as many clients and numbers."""
    cells = load_sweep(ROOT / "examples/fair-clipping/writers-sweep.toml").cells
    config = next(cell.config for cell in cells if cell.config.algorithm.name == "fair-fedavg")
    algorithm = config.build_algorithm()
    facts = Facts(np.full(539, 90), np.zeros(539, int), (1, 28, 28), 10, 7850, 1.0, unit="client")

    def events(z: float) -> dict[DpEvent, int]:
        return {m.event: n for m, n in algorithm.releases(Terms(facts, None, z)).items()}

    z = calibrate(events, 8.0, 1e-3)
    assert f"p (z/(q N))^2 = {7850 * (z / (0.2 * 539)) ** 2:.2f} C_t^2" in " ".join(PAGE.read_text().split())


@pytest.mark.parametrize(
    ("rate", "rounds", "exact", "renyi"), [(0.1, 1000, "19.7", "22.6"), (1.0, 800, "486", "506")]
)  # fmt: skip
def test_what_the_papers_settings_would_mean(rate: float, rounds: int, exact: str, renyi: str) -> None:
    """sigma 1, delta 1e-3. At rate 1 also in closed form (Balle and Wang, 2018), independent of any accountant."""
    event: DpEvent = GaussianDpEvent(1.0)
    event = PoissonSampledDpEvent(rate, event) if rate < 1 else event
    found = [accountant.compose(event, rounds).get_epsilon(1e-3) for accountant in (PLDAccountant(), RdpAccountant())]
    assert [f"{found[0]:.3g}", f"{found[1]:.3g}"] == [exact, renyi]
    if rate == 1:
        epsilon, mu = found[0], math.sqrt(rounds)
        log_second = epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2)
        delta = stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(log_second)
        assert delta == pytest.approx(1e-3, rel=0.02)
    assert f"{exact} ({renyi} by Rényi" in " ".join(PAGE.read_text().split())


if __name__ == "__main__":
    for table in tables():
        print("\n".join(table), end="\n\n")  # noqa: T201
