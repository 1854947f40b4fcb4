"""Federated learning that is private, fair and personal.

config = fairveil.load_config("run.toml")
print(fairveil.make_plan(config).statement().sentence())   # what it will cost, before it is paid
result = fairveil.start_run(config)
fairveil.load_run(result.folder).metrics                    # all that was measured, as a DataFrame
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before MKL multiplies its first matrices: on some processors its products of several matrices at once differ in the
# last bit from those of one alone, and a run would depend on the size of its blocks.
os.environ.setdefault("MKL_CBWR", "AUTO")

if TYPE_CHECKING:
    from fairveil.config import RunConfig, load_config, make_config
    from fairveil.errors import PrivacyError, RunFault, UserError
    from fairveil.export import Exported, export_run, load_model
    from fairveil.plan import Plan, make_plan
    from fairveil.reading import Run, load_run
    from fairveil.run import Interrupted, RunResult, resume_run, run_plan, start_run
    from fairveil.sweep import Sweep, SweepResult, load_sweep, run_sweep

__all__ = [
    "Exported",
    "Interrupted",
    "Plan",
    "PrivacyError",
    "Run",
    "RunConfig",
    "RunFault",
    "RunResult",
    "Sweep",
    "SweepResult",
    "UserError",
    "export_run",
    "load_config",
    "load_model",
    "load_run",
    "load_sweep",
    "make_config",
    "make_plan",
    "resume_run",
    "run_plan",
    "run_sweep",
    "start_run",
]
_HOMES = ("errors", "config", "plan", "reading", "run", "sweep", "export")


def __getattr__(name: str) -> Any:
    """Import on first use: a worker process, or `--help`, does not need all of it."""
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"fairveil.{home}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'fairveil' has no attribute {name!r}")
