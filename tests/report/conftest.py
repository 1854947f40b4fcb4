"""Shared by the tests of the report: run folders written by hand, with whatever names and numbers a test wants."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tomli_w
import torch

from fairveil.privacy.accounting import price
from fairveil.privacy.ledger import Entry
from fairveil.privacy.mechanisms import events_of
from fairveil.privacy.statement import ReleaseKind, Statement
from fairveil.privacy.training import NoisyTraining
from fairveil.store import Score, Store, UnitPlan
from fairveil.watch import Watch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TRAINING = NoisyTraining(0.05, 4, clip_norm=1.0, noise_multiplier=2.0, expected_batch=32.0)


@dataclass(frozen=True)
class State:
    """What a checkpoint needs."""

    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(3))


@dataclass
class Written:
    """A run as it would write itself: clients in groups, scores of every round, a ledger, a statement.

    Attributes:
        clients: name and group of each.
        attributes: of the records, with their values.
        texts: fields of the statement to be replaced.
        models: served, one for each cluster.
    """

    folder: Path
    clients: Sequence[tuple[str, str]]
    rounds: int = 2
    planned: int | None = None
    models: int = 0
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    texts: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = "digits"
    reply: int = 32  # bytes of a digest in the ledger

    def write(self) -> Path:
        with Store(self.folder) as store:
            self.plan(store)
            for number in range(1, self.rounds + 1):
                self.round(store, number)
            self.confuse(store)
        return self.folder

    @property
    def last(self) -> int:
        return self.planned or self.rounds

    def plan(self, store: Store) -> None:
        """What is on disk before the first round."""
        config: dict[str, Any] = {
            "schema_version": 1,
            "name": "written",
            "seed": 0,
            "data": {"dataset": self.dataset},
            "model": {"name": "logistic"},
            "algorithm": {"name": "r-dpcfl" if self.models else "global", "rounds": self.last},
            "privacy": {"adjacency": "add-remove", "epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"},
            "fairness": {"groups": "cluster"},
        }
        store.write("config.toml", tomli_w.dumps(config | dict(self.config)).encode())
        store.ledger.set_plan({client: {TRAINING: self.last} for client in range(len(self.clients))})
        epsilon = price(events_of({TRAINING: self.last}, 1), 1e-3, adjacency="add-remove", accountant="rdp").epsilon
        facts = {
            "features": [64], "classes": 2, "record": "one image", "dataset": self.dataset, "holders": 1,
            "common_tests": False, "parameters": 650, "attributes": {k: list(v) for k, v in self.attributes.items()},
        }  # fmt: skip
        meta = {"data": "f" * 16, "config": "c" * 12, "code": "d" * 12, "commit": "none", "fairveil": "0.1.0"}
        units = [UnitPlan(client, 100, 2.0, epsilon, "rdp") for client in range(len(self.clients))]
        store.save_units(units, list(self.clients), meta | {"settled": "{}", "facts": json.dumps(facts)})
        statement = Statement(
            unit="record", record="one image", holders=1, units=len(units), adjacency="add-remove", epsilon=epsilon,
            epsilon_without_leaks=epsilon, leaks=(), epsilon_spent=None, delta=1e-3, accountant="rdp",
            accountant_version="0.6.0", trust="nobody", noise_source="secret", not_covered="other runs", public={},
            releases=(ReleaseKind("model update", TRAINING.describe(), (self.last,) * 2, None),), complete=False,
        ).to_json()  # fmt: skip
        store.write("statement.json", json.dumps(statement | dict(self.texts)).encode())

    def round(self, store: Store, number: int) -> None:
        """Scores of every client, and its post in the ledger."""
        random = np.random.default_rng(number)
        clients, model = range(len(self.clients)), self._model()
        reply = bytes(self.reply)
        store.ledger.post([Entry(c, f"round {number}, ask 1", TRAINING, random.bytes(32), reply) for c in clients])
        step = 1 - math.exp(-4 * number / self.last)
        scores = []
        for metric, split, served in (
            ("accuracy", "test", True), ("loss", "test", True), ("clipped", "train", False),
            ("signal_to_noise", "train", False),
        ):  # fmt: skip
            values = np.clip(step * random.normal(0.8, 0.05, len(clients)), 0, 1)
            kind = "served" if served else "local_update, ask 1"
            scores += [
                Score(number, client, split, kind, metric, float(value), row, 50 if served else None)
                for client, value, row in zip(clients, values, model, strict=True)
            ]
        self.save(store, number, scores)
        if self.models:
            store.write("clusters.json", json.dumps(self._clusters(model)).encode())

    def save(self, store: Store, number: int, scores: Sequence[Score]) -> None:
        store.finish_round(number, 0.1, scores, State(), {})

    def confuse(self, store: Store) -> None:
        """Counts of classes, in all and by every value of every attribute."""
        of = [("", "")] + [(name, value) for name, values in self.attributes.items() for value in values]
        rows = [
            (client, name, value, actual, predicted, 5 + (actual == predicted) * (client + place))
            for client in range(len(self.clients))
            for place, (name, value) in enumerate(of)
            for actual in (0, 1)
            for predicted in (0, 1)
        ]
        store.save_confusion(rows)

    def _model(self) -> list[int | None]:
        groups = list(dict.fromkeys(group for _, group in self.clients))
        return [groups.index(group) % self.models if self.models else None for _, group in self.clients]

    def _clusters(self, model: Sequence[int | None]) -> dict[str, Any]:
        found = {"count": self.models, "mss": 3.0, "mpo": 0.01, "switch_round": 1, "iterations": 3, "ari": 0.9}
        places = np.random.default_rng(0).normal(0, 0.2, (len(model), 2)) + np.array([[m or 0, 0] for m in model])
        return found | {"of_client": list(model), "plane": places.round(9).tolist()}


@pytest.fixture(scope="session")
def written() -> Callable[..., Written]:
    return Written


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A chromium without a window, as the system has it."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in the browser, and all that it has said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))


HASTE = "const slow = setTimeout; window.setTimeout = (what, ms) => slow(what, Math.min(ms, 150));"


@pytest.fixture(scope="session")
def opened(browser: Browser) -> Callable[..., Any]:
    """Open an address, or a file, at a width; with a page that asks its server for news more often than it would."""

    @contextmanager
    def open_page(where: Path | str, width: int = 1280) -> Iterator[Opened]:
        context = browser.new_context(viewport={"width": width, "height": 900})
        context.add_init_script(HASTE)
        page = context.new_page()
        page.set_default_timeout(20_000)
        found = Opened(page)
        page.goto(where.as_uri() if isinstance(where, Path) else where)
        yield found
        context.close()

    return open_page


@contextmanager
def _watching(folder: Path, port: int = 0) -> Iterator[Watch]:
    with Watch(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def watching() -> Callable[..., Any]:
    """Serve a folder for as long as a block lasts."""
    return _watching
