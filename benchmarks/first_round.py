"""What the first round of `r-dpcfl` shows of the clusters: `python -m benchmarks.first_round [--quick] [--out FOLDER]`.

Lemmas 4.1 and 4.2 and Figures 3, 4, 5, 8 and 9 of Malekmohammadi, Taik and Farnadi, "Differentially Private Clustered
Federated Learning" (2024), for the noise of this library, with rotated MNIST in place of CIFAR-10. Diagnostics of a
simulation: they look at noise-free updates and at true clusters, which no server sees.

first-round-noise.csv       noise multiplier and variance of Lemma 4.1 over both batch sizes (Figures 3 and 4)
first-round-variance.csv    that variance, measured
first-round-separation.csv  distance of the clusters over the noise, and what is found (Lemma 4.2; Figures 5, 8, 9)
first-round-plane.csv       the updates on two principal components (Figures 5 and 8)

Seeds: 20261000 and up, used for nothing else. A trial has its own split, initial model, batches and noise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from dp_accounting import DpEvent
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it finds the folder it stands in only

from benchmarks.common import RESULTS, say
from fairveil.clustering import Clusters, Projection, adjusted_rand, find_clusters, gram
from fairveil.data.datasets import build_federation
from fairveil.data.federation import ClientData
from fairveil.models import Model, ModelSpec
from fairveil.privacy.accounting import Accountant, calibrate
from fairveil.privacy.mechanisms import Mechanism, events_of
from fairveil.privacy.training import NoisyTraining, train
from fairveil.provenance import commit
from fairveil.streams import Stream

FIRST_SEED = 20_261_000
SIZES = (3, 6, 6, 6)  # clients in each cluster; the first is the minority
LARGE, SMALL = 2857, 700  # records of a client: all that MNIST has for 21, and a quarter of it
LARGE_RATE, SMALL_RATE = 4.0, 0.005  # learning rates: of our recommended settings, and of the paper on MNIST
MODEL = "cnn-dp"
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A schedule, one round with batch b1 and E - 1 with batch b, and what a step is made of.

    The private choices of `r-dpcfl` are left out, as in the lemmas. Round 1 has the noise multiplier of the others.
    """

    epsilon: float
    records: int  # N
    first_batch: int  # b1
    batch: int  # b
    delta: float = 1e-4
    rounds: int = 15  # E
    local_epochs: int = 1  # K
    learning_rate: float = LARGE_RATE  # eta
    clip_norm: float = 1.0  # c
    parameters: int = 14_394  # p
    copies: int = 1  # tau, of each image in round 1

    def training(self, batch: int, z: float) -> NoisyTraining:
        """One round with this batch."""
        return NoisyTraining.epochs(
            self.records, batch, self.local_epochs, clip_norm=self.clip_norm, noise_multiplier=z
        )  # fmt: skip

    def events(self, z: float) -> Counter[DpEvent]:
        """All rounds."""
        releases: Counter[Mechanism] = Counter({self.training(self.batch, z): self.rounds - 1})
        releases[self.training(self.first_batch, z)] += 1
        return events_of(+releases)


PAPER = Setting(
    5.0, 6600, 6600, 32, rounds=200, learning_rate=5e-4, clip_norm=3.0, parameters=11_181_642
)  # fmt: skip


@cache
def noise_multiplier(setting: Setting, accountant: Accountant = "tightest") -> float:
    """z at which the schedule costs epsilon."""
    return calibrate(setting.events, setting.epsilon, setting.delta, accountant=accountant)


def lemma_variance(setting: Setting, batch: int, z: float) -> float:
    """Lemma 4.1: K N eta^2 p c^2 z^2/b^3, the variance of an update, summed over coordinates."""
    noise = setting.learning_rate * setting.clip_norm * z
    return setting.local_epochs * setting.records * noise**2 * setting.parameters / batch**3


def step_variance(setting: Setting, batch: int, z: float) -> float:
    """The same with the steps that are taken, K ceil(N/b) for K N/b."""
    training = setting.training(batch, z)
    return setting.parameters * training.steps * (setting.learning_rate * setting.clip_norm * z / batch) ** 2


def lemma_score(distance: float, variance: float, parameters: int) -> float:
    """Lemma 4.2: sqrt(p) Delta/(2 sigma), half the distance of two means in standard deviations of a coordinate."""
    return math.sqrt(parameters / variance) * distance / 2


def total_variance(updates: Tensor) -> tuple[float, float]:
    """Variance of updates (n, p), summed over coordinates, and its standard error (jackknife)."""
    n, products = len(updates), gram(updates - updates.mean(dim=0))
    square = np.diag(products)
    squared = square[:, None] + square - 2 * products
    value = squared.sum() / 2 / n / (n - 1)
    without = (squared.sum() / 2 - squared.sum(axis=1)) / (n - 1) / (n - 2)  # each of them left out in turn
    return float(value), float(np.sqrt((n - 1) * without.var()))


def squared_distances(products: np.ndarray, label: np.ndarray) -> np.ndarray:
    """D^2 (M, M) of the cluster means, from a Gram matrix (n, n) and true labels; clusters of two clients or more.

    From products of different clients only: neither noise nor what a client's own records add makes it larger. It may
    be negative by chance.
    """
    members = (label[:, None] == np.arange(label.max() + 1)).astype(float)
    size = members.sum(axis=0)
    mean = members.T @ products @ members / np.outer(size, size)
    own = (np.diag(mean) * size**2 - members.T @ np.diag(products)) / (size * (size - 1))
    apart: np.ndarray = own[:, None] + own - 2 * mean
    np.fill_diagonal(apart, 0)
    return apart


def nearest(squared: np.ndarray) -> float:
    """The smallest distance of two clusters, from D^2 (M, M); 0 if it is not above 0."""
    return math.sqrt(max(0.0, float(squared[~np.eye(len(squared), dtype=bool)].min())))


# ---- clients of the simulation ----


class _TwoStreams(Stream):
    """Batches and noise by two keys, so that one can be kept while the other is drawn anew."""

    def __init__(self, batches: Sequence[int | str], noise: Sequence[int | str]) -> None:
        super().__init__(*noise)
        self.batches = Stream(*batches)

    def coins(self, count: int, probability: float) -> Tensor:
        return self.batches.coins(count, probability)


@dataclass(frozen=True)
class Subject:
    """A client as DP-SGD sees it."""

    data: ClientData
    model: Model
    inputs: Mapping[str, Any]
    key: tuple[int | str, ...]  # of its noise
    batches: tuple[int | str, ...]

    def noise(self) -> Stream:
        return _TwoStreams((*self.batches, "batches"), (*self.key, "noise"))


@dataclass(frozen=True)
class Trial:
    """A federation of rotated MNIST and an initial model, both drawn by the seed."""

    seed: int
    model: Model
    start: Tensor  # (p,)
    clients: tuple[ClientData, ...]
    label: np.ndarray  # (n,) true cluster

    @classmethod
    def draw(cls, seed: int, records: int) -> Trial:
        split = {"kind": "rotate", "degrees": [0, 90, 180, 270], "clients": list(SIZES), "records": records}
        federation = build_federation("mnist", {}, split, seed)
        model = ModelSpec(MODEL, federation.features, federation.classes).build()
        held = (federation.load(i).train for i in range(federation.clients))
        clients = tuple(ClientData(rows, rows) for rows in held)  # nothing is tested: 21 test sets need not be kept
        return cls(seed, model, model.initial(Stream(seed, "initial model")), clients, federation.group)

    def update(
        self, client: int, training: NoisyTraining, rate: float, *, noise: int | str = 0, batches: int | str = 0
    ) -> Tensor:
        """The update (p,) of one client; draws of other names are independent."""
        name = (self.seed, client)
        inputs = {"model": self.start, "learning_rate": rate}
        subject = Subject(self.clients[client], self.model, inputs, (*name, noise), (*name, batches))
        (release, _), *_ = train([training], [subject])
        update = release.value["update"]
        assert isinstance(update, Tensor)
        return update

    def updates(self, setting: Setting, z: float, noise: int | str = 0) -> Tensor:
        """The first updates (n, p) of all clients."""
        training = replace(setting.training(setting.first_batch, z), copies=setting.copies)
        return torch.stack(
            [self.update(i, training, setting.learning_rate, noise=noise) for i in range(len(self.clients))]
        )


# ---- Figures 3 and 4 ----


def noise_rows(quick: bool) -> Iterator[Row]:
    """z and the variance of Lemma 4.1 in the paper's setting, by its accountant and by ours."""
    first, later = (32, 128, 512, 2048, 3300, 6600), (16, 32, 64, 128, 256, 512)
    for accountant in ("rdp", "tightest"):
        for b1 in first[::5] if quick else first:
            for b in later[::5] if quick else later:
                setting = replace(PAPER, first_batch=b1, batch=b)
                z = noise_multiplier(setting, accountant)
                yield asdict(setting) | {
                    "accountant": accountant,
                    "noise_multiplier": z,
                    "variance_first_round": lemma_variance(setting, b1, z),
                    "variance_later_rounds": lemma_variance(setting, b, z),
                    "variance_first_round_steps": step_variance(setting, b1, z),
                    "variance_later_rounds_steps": step_variance(setting, b, z),
                    "seed": "none",  # nothing is drawn
                }


# ---- Lemma 4.1, measured ----


def variance_rows(quick: bool) -> Iterator[Row]:
    """One client again and again: with other noise, with other batches and no noise, and with both other."""
    repeats = 4 if quick else 16
    trial = Trial.draw(FIRST_SEED, LARGE)
    for rate in (LARGE_RATE,) if quick else (LARGE_RATE, SMALL_RATE):
        for b1 in (512, LARGE) if quick else (32, 128, 512, 2000, LARGE):
            setting = Setting(5.0, LARGE, b1, 256, learning_rate=rate, parameters=trial.model.parameters)
            z = noise_multiplier(setting)
            lemma, steps = lemma_variance(setting, b1, z), step_variance(setting, b1, z)
            row = {"dataset": "mnist", "model": MODEL, "client": 0} | asdict(setting)
            row |= {"steps": setting.training(b1, z).steps, "noise_multiplier": z, "repeats": repeats}
            row |= {"lemma": lemma, "noise_by_steps": steps, "steps_over_lemma": steps / lemma}
            for name, level, noises, batches in (
                ("noise", z, True, False), ("sampling", 0.0, False, True), ("total", z, True, True),
            ):  # fmt: skip
                if b1 == LARGE and name == "sampling":
                    value = error = 0.0  # every record is in the batch
                else:
                    drawn = [
                        trial.update(0, setting.training(b1, level), rate, noise=k * noises, batches=k * batches)
                        for k in range(repeats)
                    ]
                    value, error = total_variance(torch.stack(drawn))
                row |= {name: value, f"{name}_over_lemma": value / lemma, f"{name}_over_lemma_error": error / lemma}
            say(f"variance: rate {rate}, b1 {b1}: {row['total_over_lemma']:.3f} of the lemma's")
            yield row | {"seed": FIRST_SEED}


# ---- Lemma 4.2 and what is found ----


@dataclass
class Cell:
    """A setting and what its trials gave."""

    setting: Setting
    clean: list[np.ndarray]  # D^2 (M, M) of the noise-free updates, by trial
    scatter: list[float]  # squared distance of a noise-free update from its cluster's mean
    noisy: list[np.ndarray]  # D^2 of the noisy ones
    given: dict[Projection, list[tuple[Clusters, float]]]  # clusters and adjusted Rand index, M = 4 given
    found: list[tuple[Clusters, float]]  # M unknown, leave one out


def full_cells(quick: bool) -> list[Cell]:
    """b1 = N: Figure 8 and the right of Figure 9, for both sizes of clients; some with perturbed copies of images."""
    grid = ((e, n, b) for n in (LARGE, SMALL) for e in (2.0, 3.0, 5.0, 10.0) for b in (32, 128, 256, 512))
    chosen = [(2.0, SMALL, 32), (2.0, SMALL, 512)] if quick else list(grid)
    copied = [] if quick else [(e, SMALL, b) for e in (3.0, 5.0) for b in (128, 256)]  # near the limit
    cells = [_empty(Setting(e, n, n, b)) for e, n, b in chosen]
    return cells + [_empty(Setting(e, n, n, b, copies=4)) for e, n, b in copied]


def sampled_cells(quick: bool) -> list[Cell]:
    """b1 < N: Figure 5 and the left of Figure 9.

    With b1 = 32 at the largest budget only, where nothing is found as it is. At the paper's learning rate the noise of
    one step does not reach the gradients of the next. (With b1 = N there is no next, and the rate only a unit.)
    """
    chosen = [(e, b1, LARGE_RATE) for b1 in (128, 512) for e in (2.0, 5.0, 10.0)]
    chosen = [(10.0, 32, LARGE_RATE), *chosen, (10.0, 32, SMALL_RATE), (10.0, 128, SMALL_RATE)]
    return [
        _empty(Setting(e, LARGE, b1, 256, learning_rate=rate)) for e, b1, rate in (chosen[-1:] if quick else chosen)
    ]


def _empty(setting: Setting) -> Cell:
    return Cell(setting, [], [], [], {"paper": [], "loo": []}, [])


def noise_level(setting: Setting) -> float:
    """s: standard deviation of the noise in each coordinate of a first update, by the steps that are taken."""
    return math.sqrt(step_variance(setting, setting.first_batch, noise_multiplier(setting)) / setting.parameters)


def cluster(updates: Tensor, setting: Setting, count: int | None, projection: Projection, seed: int) -> Clusters:
    level = np.full(len(updates), noise_level(setting))
    return find_clusters(
        gram(updates), setting.parameters, level, count=count, projection=projection,
        random=Stream(seed, "mixture").numpy,
    )  # fmt: skip


def with_noise(clean: Tensor, setting: Setting, seed: int) -> Tensor:
    """Noisy first updates from noise-free ones: exact for b1 = N and K = 1, when there is one step and no sampling."""
    assert setting.first_batch == setting.records and setting.local_epochs == 1
    stream = Stream(seed, "first updates", f"{setting.epsilon}", setting.batch, setting.records)
    return (clean.double() + noise_level(setting) * stream.normal(tuple(clean.shape))).float()


def record(cell: Cell, trial: Trial, clean: Tensor, noisy: Tensor) -> None:
    """Add a trial to a cell."""
    products = gram(clean)
    squared = squared_distances(products, trial.label)
    members = (trial.label[:, None] == np.arange(len(SIZES))).astype(float)
    within = np.trace(products) - (np.einsum("im,ij,jm->m", members, products, members) / members.sum(axis=0)).sum()
    cell.clean.append(squared)
    cell.scatter.append(float(within) / (len(products) - len(SIZES)))
    cell.noisy.append(squared_distances(gram(noisy), trial.label))
    for projection, results in cell.given.items():
        found = cluster(noisy, cell.setting, len(SIZES), projection, trial.seed)
        results.append((found, adjusted_rand(found.label, trial.label)))
    found = cluster(noisy, cell.setting, None, "loo", trial.seed)
    cell.found.append((found, adjusted_rand(found.label, trial.label)))


def separation_rows(quick: bool) -> Iterator[Row]:
    """All cells of both kinds, one row for each projection."""
    full, sampled = full_cells(quick), sampled_cells(quick)
    for number in range(1 if quick else 10):
        for records, copies in dict.fromkeys((cell.setting.records, cell.setting.copies) for cell in full):
            trial = Trial.draw(FIRST_SEED + number, records)
            mine = [cell for cell in full if (cell.setting.records, cell.setting.copies) == (records, copies)]
            clean = trial.updates(mine[0].setting, 0.0)  # does not depend on z: once for all of them
            for cell in mine:
                record(cell, trial, clean, with_noise(clean, cell.setting, trial.seed))
        say(f"separation: trial {number} with full batches")
    for number in range(1 if quick else 3):
        trial = Trial.draw(FIRST_SEED + number, LARGE)
        for b1, rate in dict.fromkeys((cell.setting.first_batch, cell.setting.learning_rate) for cell in sampled):
            mine = [c for c in sampled if (c.setting.first_batch, c.setting.learning_rate) == (b1, rate)]
            clean = trial.updates(mine[0].setting, 0.0)  # the batches are those of the noisy runs
            for cell in mine:
                z = noise_multiplier(cell.setting)
                record(cell, trial, clean, trial.updates(cell.setting, z, noise=f"{cell.setting.epsilon}"))
            say(f"separation: trial {number} with b1 {b1}, rate {rate}")
    for cell in (*sampled, *full):
        yield from _rows(cell)


def _rows(cell: Cell) -> Iterator[Row]:
    setting, trials = cell.setting, len(cell.clean)
    z, level = noise_multiplier(setting), noise_level(setting)
    lemma = lemma_variance(setting, setting.first_batch, z)
    distance = nearest(np.mean(cell.clean, axis=0))
    common = {"dataset": "mnist", "model": MODEL, "clients": "/".join(map(str, SIZES))} | asdict(setting)
    common |= {
        "steps": setting.training(setting.first_batch, z).steps,
        "noise_multiplier": z,
        "noise": level,
        "distance": distance,
        "distance_noisy": nearest(np.mean(cell.noisy, axis=0)),
        "scatter": math.sqrt(np.mean(cell.scatter)),
        "distance_over_noise": distance / level,
        "distance_over_noise_p_quarter": distance / level / setting.parameters**0.25,
        "score_lemma": lemma_score(distance, lemma, setting.parameters),
        "score_steps": distance / (2 * level),
        "trials": trials,
        "seed": f"{FIRST_SEED}-{FIRST_SEED + trials - 1}",
    }
    for projection, given in cell.given.items():
        row = common | {"projection": projection} | _summary(given, "given")
        if projection == "loo":
            row |= _summary(cell.found, "unknown")
            row["count_found"] = float(np.mean([each.count == len(SIZES) for each, _ in cell.found]))
        yield row


def _summary(results: list[tuple[Clusters, float]], name: str) -> Row:
    return {
        f"ari_{name}": float(np.mean([ari for _, ari in results])),
        f"median_mss_{name}": float(np.median([clusters.mss for clusters, _ in results])),
        f"iterations_{name}": float(np.mean([clusters.iterations for clusters, _ in results])),
        f"confident_wrong_{name}": float(np.mean([clusters.mss > 2 and ari < 0.5 for clusters, ari in results])),
    }


# ---- Figures 5 and 8 ----


def plane_rows(quick: bool) -> Iterator[Row]:
    """Every client on two principal components: b1 = 32 beside b1 = N, and b = 32 beside b = 512 at b1 = N."""
    settings = [Setting(10.0, SMALL, SMALL, b) for b in (32, 512)]
    if not quick:
        settings += [Setting(2.0, SMALL, SMALL, b) for b in (32, 512)]
        settings += [Setting(10.0, LARGE, *b) for b in ((32, 32), (LARGE, 32), (LARGE, 512))]
    trials = {records: Trial.draw(FIRST_SEED, records) for records in {each.records for each in settings}}
    for setting in settings:
        trial, z = trials[setting.records], noise_multiplier(setting)
        if setting.first_batch < setting.records:
            updates = trial.updates(setting, z, noise="plane")
        else:
            updates = with_noise(trial.updates(setting, 0.0), setting, trial.seed)
        found = cluster(updates, setting, len(SIZES), "paper", trial.seed)
        for client, (x, y) in enumerate(found.plane):
            yield (
                {"dataset": "mnist", "model": MODEL, "clients": "/".join(map(str, SIZES))}
                | asdict(setting)
                | {
                    "noise_multiplier": z,
                    "client": client,
                    "cluster": int(trial.label[client]),
                    "x": float(x),
                    "y": float(y),
                    "found": int(found.label[client]),
                    "mss": found.mss,
                    "ari": adjusted_rand(found.label, trial.label),
                    "seed": trial.seed,
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells and trials, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    made_by = commit()  # now: the checkout may move on while this runs
    tables = {"noise": noise_rows, "plane": plane_rows, "variance": variance_rows, "separation": separation_rows}
    for name, rows in tables.items():
        path = arguments.out / f"first-round-{name}.csv"
        table = pd.DataFrame(list(rows(arguments.quick)))
        table["seed"], table["commit"] = table.pop("seed"), made_by
        table.to_csv(path, index=False, lineterminator="\n", float_format="%.6g")
        say(f"wrote {path}")


if __name__ == "__main__":
    main()
