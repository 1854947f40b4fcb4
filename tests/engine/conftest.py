"""Shared by the tests of the engine: a small federation, and tasks that workers can import."""

from __future__ import annotations

import pytest

from fairveil.data.datasets import build_federation
from fairveil.data.federation import Federation


@pytest.fixture(autouse=True)
def importable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import the tasks of a test's file under the name that pytest gave it."""
    monkeypatch.syspath_prepend(str(request.path.parents[request.module.__name__.count(".")]))


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Seven clients with little data, and a common test set."""
    return build_federation("digits", {}, {"kind": "iid", "clients": 7}, seed=0)
