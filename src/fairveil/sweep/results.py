"""The results of a sweep: one row for each run, on disk as soon as there is one, and what they say together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fairveil.config import RunConfig
from fairveil.options import shown
from fairveil.privacy.statement import json_number, rounded_up
from fairveil.store import write_whole
from fairveil.sweep.config import Cell, Sweep

WORDS = ("variant", "status", "error", "config_hash", "commit", "data_fingerprint", "fairveil", "algorithm")
COUNTS = ("seed", "rounds")
NUMBERS = ("epsilon", "epsilon_spent", "delta", "seconds")
FROM_RESULT = ("commit", "data_fingerprint", "fairveil", "algorithm", "rounds", *NUMBERS)
CLUSTERS = ("count", "ari", "mss", "mpo", "switch_round")  # of a clustered system
# of every metric; what does not apply to it, or was not known yet when a run was finished, is left empty
FIGURES = (
    *("worst", "best", "worst_10_percent", "best_10_percent", "disparity", "variance", "sampling_variance_removed"),
    *("deviation", "jain", "gap", "clients"),
)
# of models that clients fine-tune, and of those that they train alone
PERSONAL_FIGURES = ("mean", "worst_10_percent", "variance", "sampling_variance_removed")


def read_result(folder: Path, digest: str) -> dict[str, Any] | None:
    """The result of a finished run of this config, or None."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (FileNotFoundError, ValueError):  # not finished; or damaged: the run writes it again
        return None
    return result if result.get("config_hash") == digest else None


def main_metric(result: Mapping[str, Any]) -> str:
    """The metric that people ask for first."""
    return "accuracy" if "accuracy" in result else "rmse"


def worst_group(result: Mapping[str, Any]) -> float:
    """The main metric of the worst group."""
    summary = result[main_metric(result)]
    return float(summary["by_group"][summary["worst_group"]])


def make_table(sweep: Sweep, results: Mapping[Cell, Mapping[str, Any]], errors: Mapping[Cell, str]) -> pd.DataFrame:
    """One row for each run of the sweep, in its order, finished or not."""
    rows = []
    for cell in sweep.cells:
        result = results.get(cell, {})
        row: dict[str, Any] = {"variant": cell.variant, **cell.point, "seed": cell.seed}
        row["status"] = "finished" if result else "failed" if cell in errors else "unfinished"
        row |= {"error": errors.get(cell), "config_hash": cell.digest}
        row |= {key: result.get(key) for key in FROM_RESULT}
        for metric, summary in result.items():
            if isinstance(summary, dict) and "by_group" in summary:
                row |= _figures(metric, summary)
        row |= _personal(result)
        row |= _between_groups(result.get("fairness", {}))
        row |= {f"clusters_{key}": result["clusters"][key] for key in CLUSTERS if "clusters" in result}
        row |= {f"budget_{key}": value for key, value in result.get("budget", {}).items()}
        row |= {f"votes_{key}": value for key, value in result.get("votes", {}).items() if key != "by_class"}
        rows.append(row)
    table = pd.DataFrame(rows, columns=list(dict.fromkeys(key for row in rows for key in row)))
    for key in sweep.keys:
        table[key] = _column([row[key] for row in rows])
    for key in table.columns:
        if key in WORDS or key.endswith("_worst_group_name"):
            table[key] = table[key].astype("str").where(table[key].notna(), None)
        elif key in COUNTS or key.endswith("_clients"):
            table[key] = table[key].astype("Int64")
        elif key in NUMBERS or key.startswith(("clusters_", "budget_", "votes_")):
            table[key] = table[key].replace("infinity", math.inf).astype(float)
    return table


def _figures(metric: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    worst = summary["worst_group"]
    by_group = {f"{metric}[{group}]": value for group, value in summary["by_group"].items()}
    return {
        f"{metric}_mean": summary["mean"],
        f"{metric}_worst_group": summary["by_group"][worst],
        f"{metric}_worst_group_name": worst,
        **{f"{metric}_{figure}": summary[figure] for figure in FIGURES if summary.get(figure) is not None},
        **by_group,
    }


def _personal(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of fine-tuned and of local-only models; empty: there are none."""
    row: dict[str, Any] = {}
    for model, metrics in result.get("finetune", {}).items():
        for metric, summary in metrics.items():
            found = {f"{model}_{metric}_{figure}": summary[figure] for figure in PERSONAL_FIGURES}
            row |= {name: value for name, value in found.items() if value is not None}
    return row


def _between_groups(fairness: Mapping[str, Any]) -> dict[str, Any]:
    """F_acc and F_loss; differences of rates as "sex: equalised odds"."""
    row = {}
    for name, found in fairness.items():
        if "value" in found:
            row[name] = found["value"]
        else:
            row |= {f"{name}: {what}": interval["value"] for what, interval in found.items()}
    return row


def _column(values: Sequence[Any]) -> pd.Series:
    """Values of one key of the grid as a column of one type: numbers if all are, else as they would be typed."""
    kinds = {type(value) for value in values}
    if kinds <= {int, float} or kinds == {bool} or kinds == {str}:
        return pd.Series(values)
    return pd.Series([value if isinstance(value, str) else shown(value) for value in values], dtype="str")


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON can hold them: null for what is missing, "infinity" for what is infinite."""

    def plain(value: Any) -> Any:
        if pd.isna(value):
            return None
        value = value.item() if hasattr(value, "item") else value
        return json_number(value) if isinstance(value, float) else value

    return [{key: plain(value) for key, value in row.items()} for row in table.to_dict("records")]


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV (floats as they are, to the last digit) or parquet, by the name of the file."""
    data = table.to_csv(index=False).encode() if path.suffix == ".csv" else table.to_parquet(index=False)
    write_whole(path, data)


def _protected(config: RunConfig) -> str:
    """What a run protects, in words."""
    unit = config.unit
    return "client's local models (metric privacy)" if unit == "metric" else f"{unit} under {config.privacy.adjacency}"


@dataclass(frozen=True)
class Composed:
    """The price of all finished runs together, for whoever sees them all."""

    runs: int
    epsilon: float | None  # None if they protect different things, whose prices do not add up
    delta: float | None
    protects: tuple[str, ...]  # "record under add-remove"

    @classmethod
    def of(cls, finished: Mapping[Cell, Mapping[str, Any]]) -> Composed:
        """Basic composition: epsilons and deltas add up."""
        protects = {_protected(cell.config): None for cell in finished}
        if len(protects) > 1:
            return cls(len(finished), None, None, tuple(protects))
        epsilon = math.fsum(float(result["epsilon"]) for result in finished.values())  # float("infinity") is infinite
        delta = math.fsum(result["delta"] for result in finished.values())
        return cls(len(finished), epsilon, delta, tuple(protects))

    def to_json(self) -> dict[str, Any]:
        epsilon = None if self.epsilon is None else json_number(self.epsilon)
        return {"runs": self.runs, "epsilon": epsilon, "delta": self.delta, "protects": list(self.protects)}

    def sentence(self, others: int) -> str:
        """The honest one.

        Args:
            others: runs in the folder that were begun and are not among these.
        """
        parts = ["Each run's guarantee is its own."]
        if self.epsilon is None or self.delta is None:
            parts.append(
                f"The {self.runs} finished runs protect different things (each {', each '.join(self.protects)}), so "
                "their prices are not added up here; whoever sees them all has more than any one of them gives."
            )
        elif self.runs:
            void = " That is no guarantee." if math.isinf(self.epsilon) or self.delta >= 1 else ""
            parts.append(
                f"Whoever sees them all ({self.runs} finished {'run' if self.runs == 1 else 'runs'}) "
                f"has at most epsilon {rounded_up(self.epsilon)} and delta {self.delta!r} for each "
                f"{self.protects[0]}, by basic composition.{void}"
            )
        if others:
            parts.append(
                f"{others} more {'was' if others == 1 else 'were'} begun in this folder; what they have sent comes "
                "on top."
            )
        parts.append("Choosing a setting by looking at private results is itself not priced.")
        return " ".join(parts)
