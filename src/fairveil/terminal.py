"""What the command line shows: progress, guarantees, results, tables."""

from __future__ import annotations

import json
import sys
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

out, err = Console(highlight=False), Console(stderr=True, highlight=False)


class RoundBar:
    """The progress bar: rounds, epsilon spent and planned, the worst group."""

    def __enter__(self) -> RoundBar:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"), console=err,
        )  # fmt: skip
        self.bar.start()
        self.task = self.bar.add_task("planning", total=None, note="")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, report: Any) -> None:
        """Take the report of a round."""
        from fairveil.privacy.statement import rounded_up

        note = f"epsilon {rounded_up(report.epsilon_spent)} of {rounded_up(report.epsilon)}"
        if report.summary:
            worst = report.summary.by_group[report.summary.worst_group]
            note += f"  worst group {worst:.3f}"
        self.bar.update(self.task, description="rounds", completed=report.round, total=report.rounds, note=note)

    def count(self, done: int, rounds: int) -> None:
        """Take how many rounds are done, of a run on other machines; 0 of 0: it is not planned yet."""
        self.bar.update(self.task, description="rounds" if rounds else "planning", completed=done, total=rounds or None)


class Lines:
    """The progress of several things, a line each."""

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, Progress, TextColumn

        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), *self.columns(), console=err)
        self.bar.start()
        self.tasks: dict[str, Any] = {}
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def columns(self) -> tuple[Any, ...]:
        """What is told beside the bars."""
        raise NotImplementedError

    def show(self, what: str, done: int, of: int | None) -> None:
        """Take how much of a thing is done, and how much there is to do."""
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what)
        self.bar.update(self.tasks[what], completed=done, total=of)


class ByteBar(Lines):
    """Downloads, by file."""

    def columns(self) -> tuple[Any, ...]:
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return DownloadColumn(), TransferSpeedColumn()


class CountBar(Lines):
    """Things that are done so many times."""

    def columns(self) -> tuple[Any, ...]:
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn

        return MofNCompleteColumn(), TimeElapsedColumn()


def print_statement(statement: Any) -> None:
    """The guarantee and what it rests on, a line each."""
    table = Table.grid(padding=(0, 2))
    for heading, text in statement.lines():
        table.add_row(f"[bold]{heading}[/]", Text(text))
    out.print(table)


def print_result(result: Any) -> None:
    """The guarantee, the figures by group, the worst group, the folder."""
    print_statement(result.statement)
    if result.main is None:
        from fairveil.reading import SCORES_STAY

        out.print(f"{result.algorithm}: {result.rounds} rounds in {result.seconds:.1f} s, {result.clients:,} clients.")
        if result.clusters:
            out.print(_clusters_line(result.clusters, "the groups that clients declare"))
        if result.votes:
            out.print(_votes_line(result.votes))
        out.print(SCORES_STAY)
    else:
        _print_scores(result, *result.main)
    out.print(f"Run folder: {result.folder}", soft_wrap=True)


def _print_scores(result: Any, metric: str, summary: Any) -> None:
    """The figures by group, over clients, and of what was found."""
    table = Table(title=f"{result.algorithm}: {metric} by group", title_justify="left")
    table.add_column("group")
    table.add_column(metric, justify="right")
    for group, value in summary.by_group.items():
        table.add_row(group + ("  (worst)" if group == summary.worst_group else ""), f"{value:.3f}")
    table.add_section()
    table.add_row(f"mean over {summary.clients:,} clients", f"{summary.mean:.3f}")
    table.add_row("worst client", f"{summary.worst:.3f}")
    table.add_row("largest gap between clients", f"{summary.disparity:.3f}")
    if len(summary.by_group) > 1:
        table.add_row("largest gap between groups", f"{summary.gap:.3f}")
    out.print(table)
    if result.finetune:
        _print_personal(result)
    if summary.clients < result.clients:
        out.print(f"{result.clients - summary.clients:,} clients have no test records and are not scored.")
    if result.clusters:
        out.print(_clusters_line(result.clusters, "the groups of the data"))
    if result.votes:
        out.print(_votes_line(result.votes), soft_wrap=True)
    for name, found in result.fairness.items():
        if "value" in found:
            what = "largest difference in what privacy costs two clients"
            out.print(f"{name}: {found['value']:.3f} ({what}, n = {found['n']})")
        else:
            parts = [f"{what} {one['value']:.3f}" for what, one in found.items() if one["value"] is not None]
            out.print(f"Differences by {name}: {', '.join(parts)}", markup=False, soft_wrap=True)
    out.print(f"Worst group: {summary.worst_group} ({metric} {summary.by_group[summary.worst_group]:.3f})")


def _print_personal(result: Any) -> None:
    """What fine-tuning brings each client, beside what it learns alone; no spread without its mean."""
    from fairveil.serving import taken_back

    for metric, served in result.metrics.items():
        table = Table(title=f"{metric} with a model of one's own", title_justify="left")
        table.add_column("model")
        for column in ("mean", "worst 10%", "variance x 10,000", "without what small tests add"):
            table.add_column(column, justify="right")
        models = {"served": served, **{name: metrics[metric] for name, metrics in result.finetune.items()}}
        for name, summary in models.items():
            spreads = (summary.variance, summary.sampling_variance_removed)
            told = ["" if spread is None else f"{1e4 * spread:.1f}" for spread in spreads]
            table.add_row(PERSONAL[name], f"{summary.mean:.3f}", f"{summary.worst_10_percent:.3f}", *told)
        out.print(table)
    out.print("A fine-tuned model is its owner's alone. What local only reaches is no merit of the federation.")
    if said := taken_back(result.taken_back):
        out.print(said)


PERSONAL = {"served": "served (released)", "finetuned": "fine-tuned", "local": "local only"}


def _votes_line(found: Any) -> str:
    right = "" if found["accuracy"] is None else f", {100 * found['accuracy']:.1f}% of them rightly"
    line = f"Votes: {found['answered']:,} of {found['queries']:,} queries answered{right}"
    if "epsilon_sanitised" in found:
        line += f". Epsilon of these very answers, as published: {found['epsilon_sanitised']:.3f}"
    if "epsilon_not_sanitised" in found:
        line += f". Not sanitised, not to be published: {found['epsilon_not_sanitised']:.3f}"
    return line


def _clusters_line(found: Any, groups: str) -> str:
    line = f"Clusters: {found['count']}, adjusted Rand index {found['ari']:.3f} against {groups}"
    if found["mss"] is not None:
        line += f"; smallest separation {found['mss']:.1f}, first round decides up to round {found['switch_round']}"
    return line


def print_attacked(attacked: Any) -> None:
    """What attacks have found, a line each; an alarm is one."""
    from fairveil.privacy.statement import rounded_up

    found = attacked.audit
    bound, alone, ceiling = (
        f"{int(1000 * e) / 1000:.3f}"
        for e in (found.epsilon_lower_bound, found.epsilon_lower_bound_at_delta, found.ceiling)
    )
    times = f"{found.rehearsals:,} rehearsal{'s' * (found.rehearsals > 1)}"
    lines = [
        f"Claimed: epsilon {rounded_up(found.epsilon_claimed)} at delta {found.delta:g} ({found.adjacency}).",
        f"Found: {found.correct:,} of {found.guesses:,} guesses about {found.canaries:,} canaries are right, in "
        f"{times} of {found.rounds:,} rounds ({found.seconds:.0f} s).",
        f"With confidence {100 * found.confidence:.6g}%: epsilon is at least {bound}, if prices at other deltas are in "
        f"proportion to those claimed; at least {alone}, whatever they are.",
    ]
    if found.alarm:
        lines.append("ALARM: what is claimed is refuted. Do not rely on this guarantee.")
    if found.epsilon_priced > found.epsilon_claimed * (1 + 1e-6):
        lines.append(f"What is released costs epsilon {rounded_up(found.epsilon_priced)}, priced anew.")
    if not found.alarm and found.ceiling <= found.epsilon_claimed < float("inf"):
        lines.append(f"With all guesses right it would be {ceiling}: it takes more --canaries to refute such a claim.")
    elif not found.alarm and found.epsilon_claimed < float("inf"):
        lines.append("The claim was not refuted. That is no proof: the truth is somewhere between the two.")
    for line in lines:
        out.print(line, soft_wrap=True)
    if attacked.members is not None:
        _print_members(attacked.members)
    if attacked.pictures is not None:
        _print_pictures(attacked.pictures)
    if attacked.folder is not None:
        out.print(f"Kept with the run: fairveil report {attacked.folder} shows it.", markup=False, soft_wrap=True)


def _print_members(members: Any) -> None:
    """How well members are told from others, in all and by group."""
    told = f"Membership inference, {members.records:,} records, {members.models} rehearsals"
    table = Table(title=told, title_justify="left")
    for column in ("attack", "group", "AUC", "TPR at 1% FPR", "TPR at 0.1% FPR"):
        table.add_column(column, justify="left" if column in ("attack", "group") else "right")
    for name, exposure in members.found.items():
        for rates in (exposure.everyone, *(exposure.groups if len(exposure.groups) > 1 else ())):
            low, high = (Text("too few" if rate.value != rate.value else f"{rate.value:.2%}") for rate in rates.tpr)
            table.add_row(Text(name), Text(rates.name or "all records"), f"{rates.auc.value:.3f}", high, low)
    out.print(table)


def _print_pictures(found: Any) -> None:
    """How close a record was come to at each strength of protection."""
    image = found.guesses["mean"].ssim is not None
    table = Table(title=f"A record of client {found.client}, as found in its update", title_justify="left")
    for column in ("protection", "PSNR (dB)" if image else "error"):
        table.add_column(column)
    for name, likeness in [(a.strength, a.likeness) for a in found.attempts] + [("a guess", found.guesses["mean"])]:
        table.add_row(name, f"{likeness.psnr:.1f}" if image else f"{likeness.error:.3f}")
    out.print(table)


def print_submitted(result: dict[str, Any]) -> None:
    """What a run on other machines came to: the clients keep their own scores."""
    from fairveil.privacy.statement import rounded_up

    out.print(str(result["guarantee"]), markup=False, emoji=False, soft_wrap=True)
    spent, planned = (rounded_up(float(result[key])) for key in ("epsilon_spent", "epsilon"))
    what = f"{result['algorithm']}: {result['rounds']} rounds with {result['clients']} clients"
    out.print(f"{what} in {result['seconds']:.0f} s, epsilon {spent} of {planned} at delta {result['delta']:g}")
    out.print("Each client scores its model itself: fairveil deploy status, in its own folder.")
    out.print(f"Run folder: {result['run']}", markup=False, emoji=False, soft_wrap=True)


def print_deployment(found: dict[str, Any]) -> None:
    """The state of a server or of a client: some lines, and a table for each list."""
    running = "running" if found["running"] else "not running"
    if found["kind"] == "server":
        names = ", ".join(f"{host}:{found['port']}" for host in found["hosts"])
        lines, tables = [f"Server at {names}: {running}."], {"Clients": found["clients"], "Runs": found["runs"]}
    else:
        policy = found["policy"]
        lines = [
            f"Client {found['name']} of {found['server']}: {running}.",
            f"Allowed: epsilon {policy['epsilon']:g}, delta {policy['delta']:g}; trusts {policy['trust']}.",
            f"Spent: epsilon {found['spent']['epsilon']:.4f}, delta {found['spent']['delta']:g}.",
        ]
        tables = {"Runs": [_own_run(run) for run in found["runs"]], "Refusals": found["refusals"]}
    for line in lines:
        out.print(line, markup=False, emoji=False, soft_wrap=True)
    for title, rows in tables.items():
        out.print(f"{title}:{'' if rows else ' none'}")
        if rows:
            print_rows(rows, False)


def _own_run(run: dict[str, Any]) -> dict[str, Any]:
    """A run as a client's keeper sees it."""
    scores = dict(run["own_test"])
    records = scores.pop("n", None)
    return {
        "run": run["run"][:8],  # its name to the server is long and says nothing
        "since": run["since"],
        "state": run["state"],
        "epsilon": f"{run['epsilon']:.4f} for {protected(run['protects'])}",
        "sent": f"{run['released']} of {run['accepted']}",
        "own test records": ", ".join(
            [f"{name} {value:.3f}" for name, value in scores.items()] + ([f"n = {records:.0f}"] if records else [])
        ),
    }


def protected(unit: str) -> str:
    """What a guarantee is for, in words."""
    return "a client's local models, by distance" if unit == "metric" else f"each {unit}"


def first_line(documented: Any) -> str:
    return str(documented.__doc__ or "").strip().splitlines()[0]


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    table = Table()
    for number, column in enumerate(rows[0] if rows else ()):
        table.add_column(column, no_wrap=number == 0, overflow="fold")  # what one types next is shown whole
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    out.print(table if rows else "none", markup=False)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
