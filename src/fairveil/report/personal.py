"""Models that clients fine-tune for themselves, beside the released ones and what each would learn alone."""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist

from fairveil.reading import Run
from fairveil.report.chart import GREY, MOST_DRAWN, Chart, as_percent, in_words, legend_below, new_axes, styled
from fairveil.report.figures import MOST_MARKS, series_of
from fairveil.report.page import Table, number, words
from fairveil.report.tables import Judged
from fairveil.serving import PERSONAL, taken_back

MODELS = {"served": "served (released)", "finetuned": "fine-tuned", "local": "local only"}


def personal_table(run: Run) -> Table | None:
    """A row for each kind of model. No spread stands there without its mean, nor without the corrected one."""
    found = {name: Judged.of(run, model) for model, name in MODELS.items()}
    rows = []
    for name, judged in found.items():
        if judged is None:
            return None
        s, corrected = judged.summary, judged.summary.sampling_variance_removed
        figures = [s.mean, s.worst_10_percent, s.best_10_percent, 1e4 * s.variance]
        figures += [float("nan") if corrected is None else 1e4 * corrected]
        rows.append([words(name), *(number(value, ",.4f") for value in figures)])
    columns = [
        "model",
        f"mean {run.main}",
        "worst 10%",
        "best 10%",
        "variance x 10,000",
        "without what small tests add",
    ]
    tuned = run.config["finetune"]
    caption = (
        f"Fine-tuned: {tuned['steps']} full-batch steps from the model that serves the client, on its own training "
        f"records. Local only: {tuned['local_steps']} steps from the first model, and nothing of the federation. What "
        "local only reaches as well is no merit of the federation. A fine-tuned model is its owner's alone."
    )
    counts = {model: run.scores("taken back", model=model) for model in PERSONAL}
    if said := taken_back({model: int(table.iloc[-1].sum()) for model, table in counts.items() if len(table)}):
        caption += f" {said}"
    return Table("personal", caption, columns, rows)


def personal_dots(run: Run) -> Chart | None:
    """Every client's score before and after fine-tuning."""
    metric = run.main
    tables = [run.scores(metric, model=model) for model in MODELS]
    if any(table.empty for table in tables):
        return None
    table = run.clients[["name", "group"]].copy()
    table[list(MODELS)] = pd.concat([part.iloc[-1] for part in tables], axis=1).to_numpy()
    table = table.dropna(subset=list(MODELS))
    with styled():
        figure, axes = new_axes()
        entries: list[tuple[Artist, str]] = []
        for one in series_of(run):
            part = table[table["group"].isin(one.groups)]
            dots = axes.scatter(
                part["served"], part["finetuned"], 26 if len(table) <= 60 else 10, one.colour, marker=one.shape,
                linewidths=0, alpha=0.85, rasterized=len(table) > MOST_DRAWN,
            )  # fmt: skip
            if len(part):
                entries.append((dots, one.name))
        low = float(table[["served", "finetuned"]].min(axis=None))  # the line stretches the axes to where it begins
        line = axes.axline((low, low), slope=1.0, color=GREY, linewidth=1, linestyle="--")
        axes.set_xlabel(f"{metric}, served")
        axes.set_ylabel(f"{metric}, fine-tuned")
        if metric == "accuracy":
            as_percent(axes, "x")
            as_percent(axes)
        legend_below(figure, [*entries, (line, "no change")])
    marks = [(axes, float(row["served"]), float(row["finetuned"]), _told(row, metric)) for _, row in table.iterrows()]
    above = "above" if metric == "accuracy" else "below"
    caption = f"{len(table):,} clients, one dot each; {above} the line: fine-tuning helps."
    title = f"{metric.capitalize()} before and after fine-tuning"
    return Chart("personal-clients", title, caption, figure, table, marks[:MOST_MARKS])


def _told(row: pd.Series, metric: str) -> str:
    scores = ", ".join(f"{name} {in_words(float(row[model]), metric)}" for model, name in MODELS.items())
    return f"{row['name']} ({row['group']}): {scores}"
