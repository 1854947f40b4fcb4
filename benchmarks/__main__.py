"""`python -m benchmarks`: measure everything (about a quarter of an hour), then write docs/benchmarks.md.

python -m benchmarks page only writes the page again, from what was measured before.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.common import HERE
from benchmarks.page import render

if __name__ == "__main__":
    if sys.argv[1:] != ["page"]:
        for name in ("step", "runs", "overhead"):  # each in a process of its own: what one leaves behind slows no other
            subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)
    render()
