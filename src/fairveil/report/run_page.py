"""The page of a run: verdict, fairness, privacy, clusters, training, and how to have it again."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from fairveil.errors import RunFault
from fairveil.fairness import group_differences
from fairveil.intervals import gap_by_chance, gap_of, mean_of
from fairveil.privacy.statement import VACUOUS, Statement, rounded_up
from fairveil.provenance import PACKAGES, resume_command
from fairveil.reading import SCORES_STAY, Run
from fairveil.report.audit import audit_card, audit_figure, audit_table
from fairveil.report.budget import Spending, budget_by_round, spending
from fairveil.report.chart import Chart, in_words, shortened
from fairveil.report.clusters import assignment_ribbon, cluster_confusion, cluster_plane, recovery
from fairveil.report.figures import client_dots, client_histogram, clipped_by_round, scores_by_round, signal_by_round
from fairveil.report.generated import data_plane
from fairveil.report.inversion import inversion_figure, inversion_table
from fairveil.report.membership import membership_groups, membership_roc, membership_table
from fairveil.report.metric import metric_budget_by_round, metric_budget_histogram, step_lengths
from fairveil.report.page import Card, Page, Section, Table, Text, words
from fairveil.report.personal import personal_dots, personal_table
from fairveil.report.tables import (
    Judged,
    attribute_tables,
    client_table,
    cost_tables,
    declared_table,
    figure_table,
    group_table,
    in_range,
)
from fairveil.report.votes import answers_by_class, votes_table
from fairveil.report.why import why_dots, why_tables


def run_page(run: Run) -> Page:
    """All there is to see of a run, finished or not."""
    try:
        statement = Statement.from_json(run.statement)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFault(
            f"{run.folder} could not be read: its statement.json is damaged, or of another version ({error!r})."
        ) from error
    spent = spending(run)
    judged = Judged.of(run)
    rounds = int(run.config["algorithm"]["rounds"])
    sections = [
        Section("verdict", "Verdict", _verdict(run, statement, spent, judged), intro=_guarantee(statement)),
        _clients(run) if run.elsewhere else Section("fairness", "Who is served how well", _fairness(run, judged)),
        Section("clusters", "Clusters", _clusters(run)),
        Section("votes", "Votes", [*charts(lambda: answers_by_class(run)), *filter(None, [votes_table(run)])]),
        Section("privacy", "Privacy", _privacy(run, statement, spent), intro=PRIVACY),
        Section(
            "training",
            "Signal and noise",
            charts(lambda: clipped_by_round([run]), lambda: signal_by_round([run]), lambda: step_lengths(run)),
        ),
        Section("attacks", "What attacks find", _attacks(run), intro=ATTACKS),
        Section("reproduce", "How to have it again", reproduce(run)),
    ]
    about = f"{len(run.clients):,} clients, {rounds} round{'s' if rounds > 1 else ''}, seed {run.config['seed']}"
    if run.elsewhere:
        about = f"{run.algorithm} on a federation: {about}"
        return Page(run.name, about, sections, state_of(run), footer=ELSEWHERE)
    about = f"{run.algorithm} on {run.facts.get('dataset', run.config['data']['dataset'])}, {about}"
    return Page(run.name, about, sections, state_of(run))


PRIVACY = (
    "What was promised before the first round, what was sent, and what it cost. The statement is derived from the plan "
    "and the ledger; prices in this section were computed anew from the run folder."
)
ATTACKS = (
    "What somebody who tries can find out. Attacks give lower bounds, proofs give upper ones: what is found must be "
    "less than what the guarantee allows, or there is a fault."
)
ELSEWHERE = "What is on this page was sent with noise, was declared by the clients, or is public."


def state_of(run: Run) -> str:
    """How far a run is, for who watches it; empty when it is finished."""
    if run.result is not None:
        return ""
    done, rounds = len(run.rounds), int(run.config["algorithm"]["rounds"])
    if run.running:
        return f"Running: {done} of {rounds} rounds are done."
    return f"Not finished: {done} of {rounds} rounds are done. Go on with: {resume_command(run.folder)}"


def _guarantee(statement: Statement) -> str:
    sentence = statement.lines()[0][1]
    return f"{sentence[0].upper()}{sentence[1:]}."


def _verdict(run: Run, statement: Statement, spent: Spending, judged: Judged | None) -> list[Card]:
    cards = [_guaranteed(statement), _spent(run, statement, spent), *filter(None, [audit_card(run)])]
    if run.elsewhere:
        return [*cards, Card("Scores", "with the clients", "what they measure is not sent")]
    if judged is None:
        return [*cards, Card("Scores", "none yet", "the first evaluated round is still to come")]
    metric, summary = judged.metric, judged.summary
    mean, gap = judged.interval(mean_of), judged.interval(gap_of)
    by_group = run.by_group(metric).iloc[-1]
    worst = str(by_group.idxmin() if judged.better else by_group.idxmax())
    spread = float(by_group.max() - by_group.min())
    cards.append(Card(f"Mean {metric}", in_words(summary.mean, metric), in_range(mean, metric)))
    if len(by_group) == 1:
        note = f"of {summary.clients:,} clients, which are one group"
        return [*cards, Card("Worst client", in_words(summary.worst, metric), note)]
    if run.attribute is None:
        chance = gap_by_chance(judged.sample)
        alone = "" if math.isnan(chance) else f"; chance alone gives up to {_points(chance, metric)}"
        worst_note, gap_note = in_range(judged.interval(judged.worst), metric), in_range(gap, metric, _points) + alone
    else:
        worst_note = gap_note = f"over test records, by {run.attribute}"
        if run.attribute in (found := run.confusions()):
            apart = group_differences(found[run.attribute], run.positive)["accuracy"]
            gap_note = f"by {run.attribute}; {in_range(apart, metric, _points)}"
    cards.append(Card("Worst group", f"{in_words(by_group[worst], metric)}: {shortened(worst, 40)}", worst_note))
    cards.append(
        Card("Gap between groups", _points(spread, metric), gap_note, warn=metric == "accuracy" and spread > 0.1)
    )
    return cards


def _guaranteed(statement: Statement) -> Card:
    """The guarantee in a few words: how much, and for whom."""
    metric, infinite = statement.metric, math.isinf(statement.epsilon)
    if metric is not None and infinite:
        step = "each client's noise is in proportion to its own step, and gives its length away"
        why = step if metric.noise_multiplier else "local models are sent without noise"
        return Card("Guarantee", "none", f"for nobody: {why}", warn=True)
    if metric is None:
        whom = f"{'one client' if statement.unit == 'client' else 'one record'} ({statement.adjacency})"
    elif metric.chosen_freely:
        whom = "one client with all its records, replaced by any others"
    else:
        whom = "one client, among records that choose the same models; not for its choice"
    noted = (
        f"{statement.accountant.upper()} accountant" if statement.accountant != "sum" else "metric privacy, added up"
    )
    noted = "something is sent without noise that would hide it" if infinite else noted
    vacuous = VACUOUS < statement.epsilon < math.inf
    large = "; so large that the number alone protects nobody" if vacuous else ""
    return Card(
        "Guarantee", "none" if infinite else f"ε = {rounded_up(statement.epsilon)}",
        f"δ = {statement.delta:g}, for {whom}; {noted}{large}", warn=infinite or vacuous,
    )  # fmt: skip


def _spent(run: Run, statement: Statement, spent: Spending) -> Card:
    used = statement.epsilon_spent if spent.posted is None else spent.posted.epsilon
    of_budget = f"{'up to all' if used is None else rounded_up(used)} of {rounded_up(statement.epsilon)}"
    infinite, rounds = math.isinf(statement.epsilon), run.config["algorithm"]["rounds"]
    note = "all rounds are done" if run.result else f"after {len(run.rounds)} of {rounds} rounds"
    if statement.metric is not None:
        note += f"; by the client that has sent most, of {len(run.clients):,}" if not infinite else _as_counted(run)
    return Card("Budget spent", "unbounded" if infinite else of_budget, note, warn=infinite)


def _as_counted(run: Run) -> str:
    """What Galli et al. would say was spent, where there is no guarantee; empty if they would not either."""
    budgets = run.metric_budgets()
    if budgets is None or not math.isfinite(most := float(budgets.max())):
        return ""
    return f"; Galli et al. (2023) count {most:.4g} at most, which is not a guarantee"


def _points(value: float, metric: str) -> str:
    return f"{100 * value:.1f} points" if metric == "accuracy" else f"{value:.4g}"


def charts(*makers: Callable[[], Chart | None]) -> list[Chart]:
    return [chart for make in makers if (chart := make()) is not None]


def _fairness(run: Run, judged: Judged | None) -> list[Any]:
    if judged is None:
        return []
    figures = charts(
        lambda: scores_by_round([run]), lambda: client_dots(run), lambda: client_histogram(run),
        lambda: personal_dots(run), lambda: why_dots(run),
    )  # fmt: skip
    personal = filter(None, [personal_table(run)])
    tables = [group_table(judged), figure_table(judged), *personal, *attribute_tables(run), *cost_tables(run)]
    tables += why_tables(run)
    return [*figures, *tables, client_table(run, judged), *charts(lambda: data_plane(run))]


def _clients(run: Run) -> Section:
    """Who takes part, instead of how well each is served."""
    return Section("clients", "Clients", [declared_table(run)], intro=SCORES_STAY)


def _clusters(run: Run) -> list[Any]:
    figures = charts(lambda: cluster_plane(run), lambda: assignment_ribbon(run), lambda: cluster_confusion(run))
    found = recovery(run)
    if found is None:
        return figures
    whose = "the clients declare" if run.elsewhere else "the data have"
    alone = f"the smallest group ({found['minority']}) in a cluster of its own"
    lines = [
        ("clusters found", f"{found['count']}; {whose} {found['groups']} groups"),
        ("adjusted Rand index against the groups", f"{found['ari']:.3f}"),
        ("every group in a cluster of its own", "yes" if found["exact"] else "no"),
        (alone, "yes" if found["minority_alone"] else "no"),
    ]
    if found["mss"] is not None:
        lines += [
            ("smallest separation of two clusters (MSS)", f"{found['mss']:.2f}"),
            ("largest overlap of two clusters (MPO)", f"{found['mpo']:.2g}"),
            ("the first round decides up to round", str(found["switch_round"])),
            ("iterations of the fit", str(found["iterations"])),
        ]
    rows = [[words(name), words(value)] for name, value in lines]
    never = len(run.clients) - found["seen"]
    others = f"; {never:,} others have never taken part" if never else ""
    caption = f"n = {found['seen']:,} clients{others}."
    return [*figures, Table("recovery", caption, ["what", "found"], rows, beside=True)]


def _privacy(run: Run, statement: Statement, spent: Spending) -> list[Any]:
    blocks: list[Any] = charts(
        lambda: budget_by_round(run, spent), lambda: metric_budget_by_round(run), lambda: metric_budget_histogram(run)
    )
    texts = [Text(f"{text[0].upper()}{text[1:]}.", heading=heading) for heading, text in statement.lines() if text]
    rows = []
    for release in statement.releases:
        posted = release.posted_per_unit
        rows.append(
            [
                words(release.kind), words(_times(release.planned_per_unit)),
                words("" if posted is None else _times(posted)), words(release.what),
            ]
        )  # fmt: skip
    per = "the federation" if statement.pooled else "each client"
    columns = ["release", "planned", "posted", "each time"]
    blocks += [Table("releases", f"What is sent, by {per}.", columns, rows, beside=True)]
    return [*texts, *blocks, Text(_checked(run, statement, spent), heading="Checked for this page")]


def _attacks(run: Run) -> list[Any]:
    audited = [*charts(lambda: audit_figure(run)), *filter(None, [audit_table(run)])]
    figures = charts(lambda: inversion_figure(run), lambda: membership_roc(run), lambda: membership_groups(run))
    return [*audited, *figures, *filter(None, [inversion_table(run), membership_table(run)])]


def _times(fewest_most: tuple[int, int]) -> str:
    fewest, most = fewest_most
    return f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"


def _checked(run: Run, statement: Statement, spent: Spending) -> str:
    """Whether the price in the statement is that of the ledger."""
    if statement.metric is not None and statement.metric.law == "step":
        return f"What is sent has no price: that it hides anything is not proved{_as_counted(run)}."
    if spent.planned is None or spent.posted is None:
        return "The ledger holds mechanisms that are not this library's, so the price could not be computed anew."
    claimed = statement.epsilon_without_leaks if statement.leaks else statement.epsilon
    agree = spent.planned.epsilon <= claimed * (1 + 1e-9)
    verdict = "as stated" if agree else f"MORE THAN STATED ({rounded_up(claimed)})"
    leaks = f" Without {' and '.join(statement.leaks)}, which have no noise." if statement.leaks else ""
    return (
        f"What was planned for the unit that pays most costs epsilon {rounded_up(spent.planned.epsilon)}, {verdict}; "
        f"what the ledger holds of it costs {rounded_up(spent.posted.epsilon)}.{leaks}"
    )


def reproduce(run: Run) -> list[Text]:
    """Command, config, versions, hashes."""
    folder = Path("runs") / run.name
    command = f"fairveil run {shlex.quote(str(folder / 'config.toml'))}"
    heading = "Command"
    if run.elsewhere:
        heading = "Command: a new run with other noise, and a price of its own"
        command = f"fairveil deploy submit {shlex.quote(str(folder / 'submitted.toml'))} --server DIR"
    facts = {"config hash": run.provenance.get("config"), "code": run.provenance.get("code")}
    data = "what the clients declare (published hash)" if run.elsewhere else "data (published hash)"
    facts |= {"commit": run.provenance.get("commit"), data: run.provenance.get("data")}
    versions = {name: run.provenance[name] for name in PACKAGES if name in run.provenance}
    settled = run.facts.get("settled") or {}
    lines = [f"{name}: {value}" for name, value in {**facts, **versions}.items()]
    lines += [f"settled by the planner: algorithm.{key} = {value}" for key, value in settled.items()]
    lines += [f"this page: {time.strftime('%Y-%m-%d %H:%M:%S')}"]
    return [
        Text(command, plain=True, heading=heading),
        Text("\n".join(lines), plain=True, heading="Made from"),
        Text(tomli_w.dumps(dict(run.config)), plain=True, heading="Config, with every default (config.toml)"),
    ]
