"""`fairveil deploy join`, with the guard of seeded_client.py."""

import sys
from pathlib import Path

from fairveil.deploy import join

if __name__ == "__main__":
    join.GUARD = "seeded_client"
    join.join(Path(sys.argv[1]), lambda text: sys.stdout.write(text + "\n"))
