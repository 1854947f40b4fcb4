"""Where the time of fairveil's step goes, by Python's own profiler: a step has few calls, so it hardly disturbs."""

from __future__ import annotations

import cProfile
import pstats
import time

from benchmarks import competitors as c
from benchmarks.common import say

# What a part of the step is called in the table: the function that does it, and the file that calls it. A function that
# no longer exists leaves its part out, and its time goes to the rest; that is said aloud.
PARTS = {
    "gather": ("_gathered", "privacy/gradients.py"),
    "forward": ("_wrapped_call_impl", "privacy/bookkeeping.py"),
    "backward": ("grad", "privacy/bookkeeping.py"),
    "per-record gradients": ("gradients", "privacy/gradients.py"),
    "norms": ("_norms", "privacy/gradients.py"),
    "clipped sums": ("_summed", "privacy/gradients.py"),
    "noise": ("add_noise", "competitors.py"),
}


def measure(task: c.Task, seconds: float = 3.0) -> dict[str, float]:
    """Milliseconds of each part of one step of all clients; "update and the rest" is what no part accounts for."""
    competitor = c.Fairveil(task)
    competitor.step()
    profile, steps, started = cProfile.Profile(), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        profile.runcall(competitor.step)
        steps += 1
    spent = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found: dict[str, float] = {}
    whole = 0.0
    for (_, _, function), (_, _, _, cumulative, callers) in spent.items():
        for part, (name, file) in PARTS.items():
            here = [1000 * times[3] / steps for caller, times in callers.items() if caller[0].endswith(file)]
            if function == name and here:
                found[part] = found.get(part, 0.0) + sum(here)
        if function == "step":
            whole += 1000 * cumulative / steps
    missing = PARTS.keys() - found.keys()
    if missing:
        say(f"no function was called for: {', '.join(sorted(missing))}; see PARTS")
    parts = {part: found[part] for part in PARTS if part in found}
    return parts | {"update and the rest": whole - sum(parts.values()), "whole step": whole}
