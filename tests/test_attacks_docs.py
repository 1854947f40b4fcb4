"""docs/attacks.md says what the benchmarks have: `python tests/test_attacks_docs.py` prints its tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/attacks.md"


def read(name: str) -> pd.DataFrame:
    table = pd.read_csv(ROOT / f"docs/results/{name}.csv")
    assert not table["commit"].str.contains("dirty").any()
    return table


def lines(rows: list[list[str]]) -> str:
    head, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *others])


def power() -> str:
    """Bounds by claim and share of the noise, and in bold where every seed gave an alarm."""
    table = read("audit-power")
    factors = sorted(table["noise"].unique(), reverse=True)
    rows = [["claimed", "canaries", *("sound" if f == 1 else f"{100 * f:.0f}% of the noise" for f in factors)]]
    for (epsilon, canaries), part in table.groupby(["epsilon", "canaries"]):
        cells = []
        for factor in factors:
            some = part[part["noise"] == factor]
            mean = f"{some['epsilon_lower_bound'].mean():.2f}"
            cells.append(f"**{mean}**" if some["alarm"].all() else mean)
        rows.append([f"{epsilon:g}", f"{canaries:,}", *cells])
    return lines(rows)


def algorithms() -> str:
    rows = [["algorithm", "claimed", "at least", "right", "of guesses", "seconds"]]
    for _, row in read("audit-algorithms").iterrows():
        cells = [f"{row.epsilon_claimed:.3g}", f"{row.epsilon_lower_bound:.2f}", f"{row.correct:,}", f"{row.guesses:,}"]
        rows.append([f"`{row.algorithm}`", *cells, f"{row.seconds:.0f}"])
    return lines(rows)


def membership() -> str:
    table = read("attacks-membership")
    rows = [
        [
            "run",
            "attack",
            "AUC, all",
            *(f"AUC, {g}" for g in ("0°", "90°", "180°")),
            "TPR at 1%",
            "at 0.1%",
            "allowed at 1%",
        ]
    ]
    for (run, attack), part in table.groupby(["run", "attack"], sort=False):
        found = part.set_index("group")
        cells = [
            f"{found.auc[g]:.3f} ({found.auc_low[g]:.3f} to {found.auc_high[g]:.3f})"
            for g in ("all", "0°", "90°", "180°")
        ]
        everyone = found.loc["all"]
        most = "all" if pd.isna(everyone["allowed_1%"]) else f"{everyone['allowed_1%']:.1%}"
        rows.append([run, attack, *cells, f"{everyone['tpr_1%']:.1%}", f"{everyone['tpr_0.1%']:.2%}", most])
    return lines(rows)


def inversion() -> str:
    table = read("attacks-inversion")
    own = table["strength"] == "this run"
    table = table[~((table["unit"] == "metric") & (own | (table["strength"] == "none")))]
    strengths = list(dict.fromkeys(table["strength"]))
    rows = [["network", "parameters", *("unprotected" if s == "none" else s for s in strengths)]]
    for network, part in table.groupby("network", sort=False):
        found = part.set_index("strength")["psnr"].astype(float)
        rows.append([network, f"{part['parameters'].iloc[0]:,}", *(f"{found[s]:.1f}" for s in strengths)])
    return lines(rows)


TABLES: dict[str, Callable[[], str]] = {
    "power": power, "algorithms": algorithms, "membership": membership, "inversion": inversion,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_the_results(name: str) -> None:
    assert TABLES[name]() in PAGE.read_text()


def test_guessing_has_the_figure_of_the_page() -> None:
    guess = read("attacks-inversion")["guess_psnr"]
    assert guess.nunique() == 1 and f"guessing the mean of others has {guess[0]:.1f}" in PAGE.read_text()


def test_no_sound_run_gave_an_alarm() -> None:
    table = read("audit-power")
    assert not table[table["noise"] == 1]["alarm"].any() and not read("audit-algorithms")["alarm"].any()


def test_what_the_page_says_of_faults_is_so() -> None:
    table = read("audit-power").set_index(["noise", "canaries", "epsilon"])["alarm"].sort_index()
    assert table.loc[0.0, 1000, [1.0, 2.0, 4.0]].all() and not table.loc[0.0, 1000, 8.0].any()
    assert table.loc[0.0, 5000].all() and table.loc[0.0, 20_000].all()
    assert table.loc[0.5, 20_000, [2.0, 4.0]].all()
    assert not table.loc[0.7].any()


def test_what_the_page_says_of_minorities_is_so() -> None:
    found = read("attacks-membership").set_index(["run", "attack", "group"]).sort_index()

    def apart(run: str, attack: str) -> bool:
        """Whether the interval of the minority begins above those of all others."""
        rows = found.loc[run, attack]
        return bool(rows.auc_low["0°"] > max(rows.auc_high["90°"], rows.auc_high["180°"]))

    assert apart("r-dpcfl, epsilon 8", "loss threshold") and apart("r-dpcfl, without noise", "likelihood ratio")
    assert apart("global, without noise", "likelihood ratio")
    assert not any(apart("global, epsilon 8", attack) for attack in ("loss threshold", "likelihood ratio"))


def test_what_the_page_says_of_pictures_is_so() -> None:
    found = read("attacks-inversion").set_index(["network", "strength"])
    psnr, guess = found["psnr"].astype(float), found["guess_psnr"].iloc[0]
    assert (psnr.xs("none", level="strength") > 20).all()
    assert (psnr.xs("ε = 10", level="strength") < guess + 2).all() and (
        psnr.xs("ν = 10", level="strength") < guess + 2
    ).all()
    assert psnr["LeNet", "ν = 0.1"] > 20 and psnr["LeNet", "ν = 1"] < guess + 2
    assert (psnr[["logistic", "mlp"]].xs("ν = 1", level="strength") > guess + 2).all()


if __name__ == "__main__":
    for name, table in TABLES.items():
        print(f"<!-- {name} -->\n{table()}\n")  # noqa: T201
    print(re.escape(str(read("attacks-inversion")["guess_psnr"][0])))  # noqa: T201
