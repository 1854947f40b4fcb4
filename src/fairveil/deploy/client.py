"""The process of a client's guard: `python -m fairveil.deploy.client FOLDER ADDRESS SECRET_FILE`, started by `join`.

It says "open" on its standard output when data and policy are in order, or what is wrong with them (exit code 2). It
answers messages once it has read a line from its standard input: the client has joined.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch

from fairveil.engine.flower import door
from fairveil.errors import UserError
from fairveil.guard import Guard


def main(folder: Path, address: str, secret: Path, kind: type[Guard] = Guard) -> None:
    """Open the guard, and answer what comes through the door."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("fairveil").setLevel(logging.INFO)
    torch.set_num_threads(1)  # sums come out the same whatever the machine
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by mistake goes to the log
    try:
        guard = kind(folder)
        if guard.federation.several:  # what a client declares, and the models it is sent, do not say so yet
            raise UserError(
                f"the records of {guard.federation.name} may have several classes at once.",
                "Only a simulation knows such records; a federation does not yet. Nothing was sent.",
                "data.options.target = one column in client.toml",
            )
        said.write("open\n")
        said.flush()
        if sys.stdin.readline():  # else the supervisor has ended
            door(address, guard.answer, secret=secret.read_bytes(), largest=guard.policy.largest_message)
    except UserError as error:
        said.write(str(error))
        said.close()
        sys.exit(2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
