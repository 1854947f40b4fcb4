"""Text from end to end: a user's file of sentences, words as hashed numbers, an LSTM, a private run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fairveil.config import make_config
from fairveil.errors import UserError
from fairveil.plan import make_plan
from fairveil.run import start_run

GOOD, BAD = ["good", "great", "lovely", "fine"], ["bad", "awful", "poor", "sad"]
FILLER = ["the", "a", "film", "was", "it", "and", "plot", "cast", "music", "very", "quite"]


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Four clients with 60 sentences each; whether a sentence is kind hangs on one word of it."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(240):
        y = int(random.integers(2))
        words = list(random.choice(FILLER, random.integers(2, 6)))
        words.insert(random.integers(len(words) + 1), random.choice(GOOD if y else BAD))
        rows.append({"review": " ".join(words).capitalize() + ".", "site": f"site {number % 4}", "y": y})
    pd.DataFrame(rows).to_csv(tmp_path / "reviews.csv", index=False)
    return tmp_path / "reviews.csv"


def config(path: Path, privacy: dict[str, Any], rounds: int) -> dict[str, Any]:
    prepare = {"review": {"kind": "text", "length": 8, "vocabulary": 1024}}
    options = {"path": str(path), "client": "site", "features": ["review"], "prepare": prepare}
    return {
        "data": {"dataset": "file", "options": options},
        "model": {"name": "lstm", "embedding": 8, "hidden": 12},
        "algorithm": {"name": "global", "rounds": rounds, "batch_size": 16, "learning_rate": 3.0},
        "privacy": {"delta": 1e-3, **privacy},
        "engine": {"workers": 1},
        "metrics": {"every": rounds},
    }


def test_sentences_are_told_apart(reviews: Path, runs: Path) -> None:
    result = start_run(make_config(config(reviews, {"noise_multiplier": 0.0, "clip_norm": 5.0}, 20)), runs=runs)
    assert result.metrics["accuracy"].mean > 0.9


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "logistic"}, ["does not fit", "names and not amounts", 'model.name = "lstm"']),
        ({"name": "lstm", "vocabulary": 64}, ["model.vocabulary = 64", "1,024"]),
    ],
)
def test_words_are_not_amounts(reviews: Path, model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        make_plan(make_config(config(reviews, {"epsilon": 8.0}, 2) | {"model": model}))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_amounts_are_not_words(small: dict[str, Any]) -> None:
    data = {"dataset": "gaussian-clusters"}
    with pytest.raises(UserError, match="does not fit gaussian-clusters"):
        make_plan(make_config(small | {"data": data, "model": {"name": "lstm"}}))


def test_records_that_hold_numbers_of_words_already_need_the_vocabulary(small: dict[str, Any], tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 50, (40, 6)).astype(np.float32)
    np.savez(tmp_path / "ids.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) % 4)
    data = {"dataset": "file", "options": {"path": str(tmp_path / "ids.npz")}}
    with pytest.raises(UserError, match=r"model\.vocabulary = how many"):
        make_plan(make_config(small | {"data": data, "model": {"name": "lstm"}}))
    plan = make_plan(make_config(small | {"data": data, "model": {"name": "lstm", "vocabulary": 50}}))
    assert plan.config.model_spec(plan.federation).options["vocabulary"] == 50


def test_sentences_privately(reviews: Path, runs: Path) -> None:
    result = start_run(make_config(config(reviews, {"epsilon": 8.0}, 2)), runs=runs)
    assert result.statement.epsilon <= 8 and result.metrics["accuracy"].clients == 4
