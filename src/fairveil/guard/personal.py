"""A client's personal state in a run: on its own disk, readable by its owner alone, the last versions of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fairveil.guard.policy import Refused
from fairveil.store import write_whole


class Versions:
    """The versions of a client's personal state, numbered from 1, each tagged with the request that made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def newest(self) -> int:
        """The number of the newest one; 0: there is none yet."""
        return max((int(path.stem) for path in self._paths()), default=0)

    def state(self, number: int) -> dict[str, Tensor]:
        """One of them; nothing, before the first."""
        path = self._path(number)
        if number and not path.exists():
            raise Refused("that was answered long ago: the personal state from before it is gone")
        return load_file(path) if number else {}

    def keep(self, number: int, request: str, state: Mapping[str, Tensor]) -> None:
        """Write a version; those of the last two rounds stay, older ones go."""
        for each in (self.folder.parent, self.folder):
            each.mkdir(exist_ok=True, mode=0o700)
        path = self._path(number)
        if path.exists() and _request(path) != request:
            raise Refused("another request has changed the personal state since")
        tensors = {name: value.clone().contiguous() for name, value in state.items()}
        write_whole(path, save(tensors, {"request": request}), mode=0o600)
        rounds: list[str] = []
        for old in reversed(self._paths()):
            of = _request(old).partition(",")[0]
            if len(rounds) == 3:  # one more than two: the state before the older of them
                old.unlink()
            elif of not in rounds:
                rounds.append(of)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:09d}.safetensors"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def _request(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["request"])
