"""The process of a guard: what it cannot serve it says at once, before anybody is met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from .conftest import client_folder


def test_records_of_several_classes_are_not_yet_for_a_federation(tmp_path: Path) -> None:
    columns = np.random.default_rng(0).integers(0, 2, (3, 40))
    pd.DataFrame(dict(zip("xab", columns, strict=True))).to_csv(tmp_path / "t.csv", index=False)
    data = {"dataset": "file", "options": {"path": str(tmp_path / "t.csv"), "client": "", "target": ["a", "b"]}}
    folder = client_folder(tmp_path / "north", "north", data)
    command = [sys.executable, "-m", "fairveil.deploy.client", str(folder), "127.0.0.1:1", str(folder / "door.secret")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 2 and "open" not in done.stdout
    assert "may have several classes at once" in done.stdout and "a federation does not yet" in done.stdout
