"""A federation within one process: real guards and the real wire format, and a Grid that carries bytes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from flwr.supercore.task_identity import TaskIdentity

from fairveil.algorithms import find_algorithm
from fairveil.config import RunConfig, make_config
from fairveil.deploy.federation import Federated, carry_out
from fairveil.engine import flower
from fairveil.guard import Guard
from fairveil.plan import Plan
from fairveil.remote import Envelope
from fairveil.store import Store

SPLIT = {"kind": "rotate", "degrees": [0, 90], "clients": [2, 1]}
POLICY: dict[str, Any] = {
    "epsilon": 20.0, "delta": 1e-2, "trust": "server",
    "tasks": [
        "local_update", "fair_update", "choose_model", "release_moments", "evaluate", "bounded_update", "share_moments",
        "personal_update", "train_teacher", "teacher_votes", "neighbour_votes", "weighed_update", "follow_loss",
        "root_weighed_update", "powered_update", "fairly_clipped_update", "split_update",
    ],
    "smallest_noise": 0.05, "largest_clip": 10.0, "open_choice": True,
}  # fmt: skip


def client_folder(folder: Path, name: str, data: Mapping[str, Any], **policy: Any) -> Path:
    """A client's folder as `init-client` makes it, filled in."""
    folder.mkdir(parents=True)
    config = {"name": name, "server": "localhost:9092", "data": dict(data)}
    (folder / "client.toml").write_text(tomli_w.dumps(config))
    (folder / "policy.toml").write_text(tomli_w.dumps(POLICY | policy))
    (folder / "secret.key").write_text(secrets.token_hex(32))
    return folder


class Wire:
    """What Flower does between a server and its clients, without the network: messages arrive as copies.

    Attributes:
        lose: of the next so many messages the answer is lost.
        tamper: changes what a client answers.
    """

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a process that Flower has started
        self.guards = dict(guards)
        self.absent: set[str] = set()
        self.lose = 0
        self.tamper: Callable[[str, Envelope], Envelope] = lambda name, answer: answer
        self.seen: list[tuple[str, Envelope, Envelope]] = []  # client, asked, answered
        self._replies: dict[str, Any] = {}

    def get_nodes(self) -> list[Any]:
        present = [name for name in self.guards if name not in self.absent]
        return [SimpleNamespace(name=name, node_id=i + 1, last_activated_at="") for i, name in enumerate(present)]

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        numbers = []
        nodes = {node.node_id: node.name for node in self.get_nodes()}
        for message in messages:
            number = str(len(numbers) + len(self.seen) + 10**6 * len(self._replies))
            name = nodes[message.metadata.dst_node_id]
            asked = flower.unpacked(message.content)
            answer = self.guards[name].answer(asked)
            self.seen.append((name, asked, answer))
            if self.lose:
                self.lose -= 1
            else:
                self._replies[number] = flower.packed(self.tamper(name, answer))
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
        found = []
        for number in numbers:
            if number in self._replies:
                metadata = SimpleNamespace(reply_to_message_id=number)
                content = self._replies.pop(number)
                found.append(SimpleNamespace(metadata=metadata, content=content, has_error=lambda: False))
        return found


class Seeded(Guard):
    """A guard whose noise a test can repeat. It can be made by a test alone."""

    def root(self, run: str) -> str:
        return "test"


class SeededServer(Federated):
    def root(self, plan: Plan, store: Store) -> str:
        return "test"


def submit(folder: Path, config: RunConfig, clients: int) -> Path:
    """A run folder as `submit` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "submitted.toml").write_text(config.to_toml())
    (folder / "submission.json").write_text(json.dumps({"run": secrets.token_hex(16), "clients": clients}))
    return folder


class Small:
    """Three clients with digits, two of them alike."""

    def __init__(self, folder: Path, guard: type[Guard] = Seeded, **policy: Any) -> None:
        self.folder, self.guard = folder, guard
        self.data = self.records()
        self.names = [f"client-{number}" for number in range(3)]
        for number, name in enumerate(self.names):
            client_folder(folder / name, name, self.data | {"client": self.called(number)}, **policy)
        self.wire = Wire({})
        self.open()

    def records(self) -> dict[str, Any]:
        """The section [data]."""
        return {"dataset": "digits", "split": SPLIT}

    def called(self, number: int) -> str:
        """A client, in its data."""
        return str(number)

    def open(self) -> None:
        """(Re)start the guards."""
        self.close()
        self.wire.guards = {name: self.guard(self.folder / name) for name in self.names}

    def close(self) -> None:
        for guard in self.wire.guards.values():
            guard.close()
        self.wire.guards = {}

    def config(self, algorithm: Mapping[str, Any], local: bool = False, **sections: Any) -> RunConfig:
        data = self.data if local else {"dataset": "clients"}
        if find_algorithm(algorithm["name"]).needs_public:
            data = data | {"server": {"dataset": "digits", "rows": "test"}}
        values = {
            "data": data,
            "model": {"name": "logistic"},
            "algorithm": {"rounds": 3} | dict(algorithm),
            "privacy": {"epsilon": 8.0, "delta": 1e-3},
            "engine": {"workers": 1, "block": 1, "timeout": 0.5, "retries": 1},
        }
        return make_config(values | sections)

    def run(self, config: RunConfig, place: type[Federated] = SeededServer, name: str = "run") -> Path:
        folder = submit(self.folder / name, config, len(self.names))
        carry_out(self.wire, folder, place)
        return folder


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    federation = Small(tmp_path)
    yield federation
    federation.close()


@pytest.fixture(scope="session")
def make_small() -> type[Small]:
    """For fixtures that outlive a test."""
    return Small
