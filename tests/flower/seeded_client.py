"""A guard whose noise a test can repeat. No message and no config leads here: only a test that starts this file."""

import sys
from pathlib import Path

from fairveil.deploy import client
from fairveil.guard import Guard


class Seeded(Guard):
    def root(self, run: str) -> str:
        return "test"


if __name__ == "__main__":
    client.main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Seeded)
