"""What gradient inversion makes of an update, at several strengths of protection: pictures, and how close they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fairveil.reading import Run
from fairveil.report.chart import SIZE, Chart, new_axes, styled
from fairveil.report.page import Cell, Table, number, words

COLUMNS = 4  # pictures side by side: on a phone each is a quarter of its width
PICTURE, TITLE = SIZE[0] / COLUMNS - 0.15, 0.45  # inches: a side of a picture, and two lines above it
SHOWN = {"none": "unprotected", "share": "client's share"}  # the others as they are
GUESSES = {"mean": "mean of {others:,} other records", "flat": "the mean level of these"}
KEEP = "It shows a training record: keep it as you keep the data."


def inversion_figure(run: Run) -> Chart | None:
    """The true record, then what was found at each strength; None: there was no such attack, or it is no image."""
    found = run.attack("inversion")
    if found is None or not found["image"]:
        return None
    label = "" if found["label"] is None else f"label {found['label']:.4g}"
    pictures = [("true record", label, _pixels(found, found["truth"]), _truth(found))]
    for attempt in found["attempts"]:
        pictures.append((_strength(attempt), _decibels(attempt), _pixels(found, attempt["x"]), _in_words(attempt)))
    rows = math.ceil(len(pictures) / COLUMNS)
    marks = []
    with styled():
        figure, axes = new_axes(rows * (PICTURE + TITLE))
        axes.remove()
        places = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for place in places[len(pictures) :]:
            place.set_axis_off()
        for place, (above, below, pixels, text) in zip(places, pictures, strict=False):
            place.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            place.set_title(f"{above}\n{below}", fontsize=9.5, pad=3)
            place.set(xticks=[], yticks=[])
            place.spines[["top", "right"]].set_visible(True)
            marks.append((place, (pixels.shape[1] - 1) / 2, (pixels.shape[0] - 1) / 2, text))
    keys = ("strength", "noise_multiplier", "noise", "psnr", "ssim", "error", "guessed")
    data = pd.DataFrame([{key: attempt[key] for key in keys} for attempt in found["attempts"]])
    for column in ("noise", "psnr"):
        data[column] = data[column].astype(float)
    guess = _decibels(found["guesses"]["mean"])
    caption = (
        f"{_truth(found)[0].upper()}{_truth(found)[1:]}, and what gradient inversion finds in the update that it would "
        f"send alone in round 1, with each strength of protection. n = 1 record; of a few searches for each, the one "
        f"that came closest is shown. Whoever guesses the mean of {found['others']:,} other records has {guess}. {KEEP}"
    )
    return Chart("inversion", "What can be seen in an update", caption, figure, data, marks)


def inversion_table(run: Run) -> Table | None:
    """How close each reconstruction comes, beside mere guesses; None: there was no such attack."""
    found = run.attack("inversion")
    if found is None:
        return None
    image, metric = found["image"], found["unit"] == "metric"
    rows: list[list[Cell]] = []
    for attempt in found["attempts"]:
        row = [words(_strength(attempt)), *_closeness(attempt, image), words(_label(found, attempt))]
        row += [words(attempt["seen"]), number(attempt["noise_multiplier"], ".4g")]
        row += [] if metric else [number(float(attempt["epsilon"]), ",.4g")]
        rows.append([*row, number(float(attempt["noise"]), ",.3g")])
    for name, guess in found["guesses"].items():
        what = words(f"guess: {GUESSES[name].format(others=found['others'])}")
        rows.append(
            [what, *_closeness(guess, image), words(""), words("nothing"), *[number(None)] * (2 + (not metric))]
        )
    close = ["PSNR (dB)", "SSIM"] if image else []
    noise = ["noise ν"] if metric else ["noise z", "its ε"]
    columns = ["strength", *close, "error", "label read off", "what is seen", *noise, "noise / update"]
    return Table("inversion-closeness", _caption(found), columns, rows)


def _caption(found: Mapping[str, Any]) -> str:
    steps, more = found["steps"], ""
    if found["unit"] != "metric":
        more = " An ε is that of this one release, to somebody who knows that the record takes part."
    if any(attempt["strength"] == "share" for attempt in found["attempts"]):
        more += " A client's share is what the server sees, which is trusted to add up; the sum is what all see."
    return (
        "Gradient inversion of one update (after Zhu, Liu and Han, 2019, and Geiping et al., 2020), in the best case "
        f"for the attacker: one training record makes it alone, in {steps} step{'s' * (steps > 1)}; the model, all "
        f"hyper-parameters, the record's label and the range of the data are known.{more} Error: root mean square, "
        "over the range of each feature. The label is also read off the last layer, if it can be (Zhao et al., 2020). "
        "What comes no closer than a guess was not found."
    )


def _closeness(of: Mapping[str, Any], image: bool) -> list[Cell]:
    """PSNR and SSIM of an image, and the error."""
    decibels = float(of["psnr"])
    shown = [Cell("exact", decibels) if math.isinf(decibels) else number(decibels, "z.1f"), number(of["ssim"], "z.2f")]
    return [*(shown if image else []), number(of["error"], ".3f")]


def _label(found: Mapping[str, Any], attempt: Mapping[str, Any]) -> str:
    if attempt["guessed"] is None:
        return "not from this model"
    return f"{attempt['guessed']}, {'right' if attempt['guessed'] == found['label'] else 'wrong'}"


def _truth(found: Mapping[str, Any]) -> str:
    label = "" if found["label"] is None else f" (label {found['label']:.4g})"
    return f"a training record of client {found['client']}{label}"


def _strength(attempt: Mapping[str, Any]) -> str:
    return str(SHOWN.get(attempt["strength"], attempt["strength"]))


def _decibels(of: Mapping[str, Any]) -> str:
    decibels = float(of["psnr"])
    return "exact" if math.isinf(decibels) else f"{decibels:z.1f} dB"


def _in_words(attempt: Mapping[str, Any]) -> str:
    return (
        f"{_strength(attempt)} ({attempt['seen']}): {_decibels(attempt)}, SSIM {attempt['ssim']:z.2f}; noise "
        f"{float(attempt['noise']):.3g} times as long as what it hides"
    )


def _pixels(found: Mapping[str, Any], values: list[float]) -> np.ndarray:
    """(height, width) of a grey image, (height, width, 3) of a coloured one."""
    pixels = np.asarray(values).reshape(found["features"])
    return pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)
