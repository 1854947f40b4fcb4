"""Renders docs/benchmarks.md from the results. Every number on the page comes from docs/results/benchmark-*.json."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, say

PAGE = ROOT / "docs" / "benchmarks.md"
NAMES = {
    "fairveil": "**fairveil**",
    "fairveil_without_noise": "fairveil without noise",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost clipping",
    "vmap": "torch.func vmap(grad)",
    "plain": "not private",
    "plain_channels_last": "not private, channels_last",
    "plain_default_layout": "not private, default layout",
    "plain_in_out": "not private, clients batched, weights (in, out)",
    "plain_out_in": "not private, clients batched, weights (out, in)",
    "by_hand": "not private, clients batched, gradients written out by hand",
    "opacus_loop": "bare loop with Opacus",
    "flower": "Flower simulation with Opacus",
}
# model, ratio, what it is compared with, target
STEP_TARGETS = (
    ("cnn", "vs_opacus", "Opacus, hooks", 2.0),
    ("cnn", "vs_plain", "not private", 0.85),
    ("logistic", "vs_opacus", "Opacus, hooks", 10.0),
    ("logistic", "vs_plain", "not private, clients batched", 0.6),
    ("logistic", "vs_plain_without_noise", "the same, noise not counted", 0.8),
    ("mlp", "vs_opacus", "Opacus, hooks", 8.0),
    ("mlp", "vs_plain", "not private, clients batched", 0.45),
    ("mlp", "vs_plain_without_noise", "the same, noise not counted", 0.8),
)
RUN_TARGETS = (("opacus_loop", 2.0), ("flower", 4.0))
OVERHEAD_TARGET = 0.3  # milliseconds per client
# Why a target is missed, if it is: what the profiles below show, in words.
REASONS = {
    ("cnn", "vs_plain"): (
        "the cnn beside plain SGD: what a plain step spends on weight gradients (a quarter of it) a private one "
        "spends on a gradient for each record; norms, clipped sums and about a hundred small operations come on top."
    ),
    ("logistic", "vs_plain"): (
        "logistic regression beside the batched control: a step of 20 clients has so little arithmetic that most of "
        "the difference is what small operations take to begin, a few microseconds each. fairveil makes about five "
        "times as many as the control, views included: norms, factors and weighted sums for any module, in its own "
        "layout, and noise for every client from its own stream."
    ),
    ("mlp", "vs_plain"): (
        "the mlp beside the batched control: noise takes two fifths of the step. The rest goes to norms, and to sums "
        "that are written out so that noise can be added."
    ),
    ("mlp", "vs_plain_without_noise"): (
        "the mlp without noise: norms and small operations take half a millisecond of four, and the weights stay in "
        "the module's own layout, in which the control would be slower still."
    ),
}
INTRODUCTION = """\
# Benchmarks

How fast fairveil is beside what people use today, and beside training without privacy. `make bench` measures it anew
and writes this page; every number on it comes from the JSON files in [results](results/). Ratios travel from machine to
machine, seconds do not.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> list[str]:
    """A Markdown table whose first columns hold words, the others numbers."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * words + "---:|" * (len(head) - words)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def wrapped(line: str) -> str:
    """A paragraph or an item of a list in lines of the usual length; tables stay as they are."""
    if "\n" in line or line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def met(measured: float | None, target: float, unit: str, *, at_most: bool = False) -> tuple[str, str]:
    """What was measured, and whether the target is met; if not, the measured over the target."""
    if measured is None:
        return "not measured", "-"
    good = measured <= target if at_most else measured >= target
    return f"{measured:.2f} {unit}", "met" if good else f"**missed: {measured / target:.2f} of the target**"


def targets(step: Any, runs: Any, overhead: Any) -> list[str]:
    """All targets in one table, met or not."""
    rows = []
    for model, ratio, rival, target in STEP_TARGETS:
        measured = step["models"][model][ratio] if step else None
        rows.append((f"step, {model}", rival, f"{target:g} x", *met(measured, target, "x")))
    for name, target in RUN_TARGETS:
        measured = runs["speedup"].get(name) if runs else None
        rows.append(("whole run, cnn", NAMES[name], f"{target:g} x", *met(measured, target, "x")))
    costs = overhead["milliseconds_per_client"]["fairveil"] if overhead else {"1000": None}
    for clients, cost in costs.items():
        found = met(cost, OVERHEAD_TARGET, "ms", at_most=True)
        rows.append((f"overhead, {int(clients):,} clients", "per client and round", f"{OVERHEAD_TARGET} ms", *found))
    missed = sum("missed" in row[-1] for row in rows)
    unknown = sum(row[-1] == "-" for row in rows)
    said = f"{len(rows) - missed - unknown} of {len(rows)} targets are met, {missed} missed"
    said += f", {unknown} not measured." if unknown else "."
    lines = ["## Targets", "", said, "", *table(("what", "beside", "target", "measured", ""), rows, words=2)]
    measured = {
        (model, ratio): step["models"][model][ratio] / target for model, ratio, _, target in STEP_TARGETS if step
    }
    reasons = [f"- {REASONS[which]}" for which, share in measured.items() if share < 1 and which in REASONS]
    reasons += [f"- {reason}" for reason in (_beside_flower(step, runs), _few_clients(overhead)) if reason]
    return [*lines, "Why, where a target is missed:", "", *reasons, ""] if reasons else lines


def _beside_flower(step: Any, runs: Any) -> str:
    """What the target would mean in seconds, beside those of training without privacy."""
    name, target = RUN_TARGETS[1]
    if not step or not runs or runs["speedup"].get(name, target) >= target:
        return ""
    found = step["models"]["cnn"]
    plain = step["batch"] / found["samples_per_second"][found["baseline"]]
    steps = runs["rounds"] * runs["clients"] * runs["steps"]
    return (
        f"whole runs beside Flower: its simulation adds little to the same client with Opacus once it runs. {target:g} "
        f"times its speed would be {runs['seconds'][name] / target:.1f} s for {steps:,} steps; steps without any "
        f"privacy, {1000 * plain:.1f} ms each on a quiet core, would take {steps * plain / runs['cores']:.1f} s on "
        f"{runs['cores']} cores."
    )


def _few_clients(overhead: Any) -> str:
    """What a round costs that has next to nothing to do."""
    costs = overhead["milliseconds_per_client"]["fairveil"] if overhead else {}
    missed = [(int(clients), cost) for clients, cost in costs.items() if cost > OVERHEAD_TARGET]
    if not missed:
        return ""
    clients, cost = missed[0]
    return (
        f"overhead at {clients} clients: a round takes {clients * cost:.1f} ms however little there is to do: it goes "
        "to the workers and back, and the ledger, the metrics and the checkpoint are on disk before it counts. All "
        "clients of the round share this."
    )


def step_section(step: Any) -> list[str]:
    """Samples per second of one step."""
    lines = [
        "## One private step", "",
        f"Samples per second on one thread, batches of {step['batch']}: gather the batch, forward, clipped gradient of "
        "each record, noise, update. The small models train several clients at once (fairveil and the control that is "
        "not private, in batched products by autograd) or one after the other (the others). The fastest of these "
        "that is not private is the baseline. For the small models there is one more row: the gradient of that very "
        "model written out by hand and never stored, which no framework does for a user's module. fairveil works on a "
        "copy of the module in which max-pooling goes before a ReLU that it follows, which changes no number; the "
        "others run the module as it is.", "",
    ]  # fmt: skip
    for name, found in step["models"].items():
        speeds, baseline = found["samples_per_second"], found["baseline"]
        many = f"{found['clients']} clients" if found["clients"] > 1 else "one client"
        ordered = sorted(speeds, key=speeds.__getitem__, reverse=True)
        rows = [
            (
                NAMES[label] + (" (baseline)" if label == baseline else ""),
                f"{speeds[label]:,.0f}", f"{speeds[label] / speeds[baseline]:.2f}",
                f"{speeds[label] / speeds['opacus_hooks']:.2f}" if "opacus_hooks" in speeds else "-",
            )
            for label in ordered
        ]  # fmt: skip
        lines += [f"**{name}**, {found['parameters']:,} parameters, {many}:", ""]
        lines += table(("", "samples/s", "of the baseline", "of Opacus, hooks"), rows)
        for label, reason in found["left_out"].items():
            lines += [f"Left out: {NAMES[label]} ({reason}).", ""]
        lines += [
            f"fairveil reaches {found['share_of_flop_limit']:.0%} of the arithmetic limit: "
            f"{found['flops_per_sample'] / 1e6:.3g} million operations for a sample's gradient (what privacy adds is "
            f"not counted), {found['sgemm_gflops']:.0f} GFLOP/s in a large matrix product.", "",
        ]  # fmt: skip
    return [*lines, *breakdown_section(step["breakdown"])]


def breakdown_section(breakdown: Any) -> list[str]:
    """Where fairveil's time goes."""
    lines = ["## Where the time goes", "", "Of fairveil's step, by Python's profiler, which costs a little itself:", ""]
    parts = list(dict.fromkeys(part for found in breakdown.values() for part in found))
    parts.sort(key=lambda part: (part.startswith("whole"), part.startswith("update")))  # these stand last
    rows = []
    for part in parts:
        cells = []
        for found in breakdown.values():
            share = found.get(part, 0.0) / found["whole step"]
            cells.append(f"{found[part]:.2f} ms ({share:.0%})" if part in found else "-")
        rows.append((part, *cells))
    return [*lines, *table(("", *breakdown), rows)]


def runs_section(runs: Any) -> list[str]:
    """Whole rounds."""
    lines = [
        "## Whole runs", "",
        f"Federated averaging with DP-SGD at {runs['clients']} clients of {runs['records']:,} images 28x28 "
        f"({runs['data']}), the cnn, Poisson batches of 32, one local epoch ({runs['steps']} steps), clip 1, the same "
        f"noise multiplier, one process of one thread for each of {runs['cores']} cores. Time of {runs['rounds']} "
        "rounds after the first, without evaluation; fairveil's ledger and checkpoints are included. The bare loop "
        "keeps its processes, models and data from round to round; Flower runs its simulation engine with the same "
        "client.", "",
    ]  # fmt: skip
    rows = [
        (NAMES[name], f"{seconds:.1f}", f"{seconds / runs['rounds']:.2f}", f"{runs['speedup'][name]:.2f}")
        for name, seconds in runs["seconds"].items()
    ]
    lines += table(("", "seconds", "per round", "time beside fairveil's"), rows)
    return [*lines, *skipped_lines(runs["skipped"])]


def skipped_lines(skipped: dict[str, str]) -> list[str]:
    """Who could not be measured, and why."""
    return [line for name, reason in skipped.items() for line in (f"Skipped: {NAMES.get(name, name)} ({reason}).", "")]


def overhead_section(overhead: Any) -> list[str]:
    """What a client costs beside its training."""
    costs = overhead["milliseconds_per_client"]
    sizes = list(costs["fairveil"])
    lines = [
        "## Overhead per simulated client", "",
        f"Milliseconds per client and round with next to nothing to train: logistic regression on two features, "
        f"{overhead['records']} records, one step; the median of {overhead['rounds']} rounds after the first. fairveil "
        f"does all that it always does on {overhead['cores']} workers: clipping, noise, ledger, metrics, checkpoint. "
        "pfl takes one plain step without privacy and saves nothing (it has no record-level DP-SGD): it does less.", "",
    ]  # fmt: skip
    rows = [
        (NAMES.get(name, name), *(f"{by_size[size]:.3f}" if size in by_size else "-" for size in sizes))
        for name, by_size in costs.items()
    ]
    lines += table(("", *(f"{int(size):,} clients" for size in sizes)), rows)
    return [*lines, *skipped_lines(overhead["skipped"])]


def agreement(step: Any) -> list[str]:
    """How far the competitors' steps lie apart."""
    if not step:
        return []
    gaps: dict[str, float] = {}
    for found in step["models"].values():
        for name, gap in found["distance_from_vmap"].items():
            gaps[name] = max(gap, gaps.get(name, 0.0))
    said = ", ".join(f"{NAMES[name].strip('*')} {gap:.1g}" for name, gap in gaps.items() if name != "vmap")
    return [
        "- Before a private step is timed it is tried without noise: it must end where vmap ends, or it is left out. "
        f"Largest distance over the length of the step: {said}. (fairveil clips to a little less than the bound, to "
        "have room for rounding.)"
    ]


def method_section(results: dict[str, Any]) -> list[str]:
    """How it was measured, and on what."""
    lines = [
        "## How it was measured", "",
        "- Steps: competitors take turns within one process on one thread, all with the same records and the same "
        "batches. Processor time is measured, which on one thread is the time on a quiet machine's clock. The best "
        "turn of each counts, since whatever disturbs a turn only slows it down.",
        *agreement(results.get("step")),
        "- Whole runs: one after the other, the best of the repeats of each.",
        "- Peers run in environments of their own with the same torch.",
        "- A machine that others use as well gives no numbers to trust, least of all for whole runs. How much of it "
        "others used just before is in the table below.",
        "- A target is compared with the unrounded number.", "",
    ]  # fmt: skip
    rows = []
    for name, found in results.items():
        versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
        peers = [found[key] for key in ("flower", "pfl") if key in found]
        commit = found["commit"][:12] + ("-dirty" if found["commit"].endswith("-dirty") else "")
        on = (found["date"], f"{found['cpu']}, {found['cores']} cores", f"{found['busy_before']:.0%}")
        rows.append((name, *on, ", ".join([versions, *peers]), commit))
    return [*lines, *table(("", "date", "processor", "used by others", "versions", "fairveil"), rows, words=6)]


def render() -> Path:
    """Write the page from what has been measured; what has not says how."""
    results: dict[str, Any] = {}
    for name in ("step", "runs", "overhead"):
        path = RESULTS / f"benchmark-{name}.json"
        if path.exists():
            results[name] = json.loads(path.read_text(encoding="utf-8"))
    lines = [INTRODUCTION, *targets(*(results.get(name) for name in ("step", "runs", "overhead")))]
    sections = {"step": step_section, "runs": runs_section, "overhead": overhead_section}
    for name, section in sections.items():
        missing = [f"## Not measured yet: {name}", "", f"`python benchmarks/{name}.py`", ""]
        lines += section(results[name]) if name in results else missing
    lines += method_section(results)
    PAGE.write_text("\n".join(map(wrapped, lines)).strip() + "\n", encoding="utf-8")
    say(f"wrote {PAGE.relative_to(ROOT)}")
    return PAGE
