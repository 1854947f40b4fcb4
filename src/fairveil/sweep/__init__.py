"""Sweeps: many runs of one experiment, each in a process of its own, and what they say together."""

from fairveil.sweep.config import Cell, Sweep, load_sweep, make_sweep
from fairveil.sweep.runner import CellState, SweepResult, run_sweep

__all__ = ["Cell", "CellState", "Sweep", "SweepResult", "load_sweep", "make_sweep", "run_sweep"]
