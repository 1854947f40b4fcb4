"""Sweeps: many runs of one experiment, each in a process of its own, and what they say together."""

from fairveil.sweep.config import Cell, Sweep, load_sweep, make_sweep
from fairveil.sweep.runner import CellState, run_sweep
from fairveil.sweep.summary import SweepFolder, SweepResult, read_sweep

__all__ = [
    "Cell",
    "CellState",
    "Sweep",
    "SweepFolder",
    "SweepResult",
    "load_sweep",
    "make_sweep",
    "read_sweep",
    "run_sweep",
]
