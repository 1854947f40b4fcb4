"""Local DP-SGD: the mechanism behind every record-level system, for many clients at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from dp_accounting import DpEvent, SelfComposedDpEvent
from torch import Tensor

from fairveil.privacy.gradients import ClippedSums, clipped_sums, objective_sum, path_of
from fairveil.privacy.mechanisms import Client, grid, noise_std, sampled_gaussian
from fairveil.privacy.release import MINT, Plain, Release
from fairveil.streams import Stream

SHIFT = 2  # pixels by which a perturbed copy is moved at most, each way


@dataclass(frozen=True)
class NoisyTraining:
    """Local DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", 2016): `steps` noisy steps.

    Unit: one record of the client. Neighbours (add/remove): two datasets that differ in one record. Each step
    draws every record with probability `sample_rate`, clips its gradient to `clip_norm`, adds the sum up and
    adds Gaussian noise of standard deviation `clip_norm * noise_multiplier`. One record moves the sum by at
    most `clip_norm` (by 2 * `clip_norm` under replace, which the accountant knows). Dividing by the constant
    `expected_batch`, taking the step and sending the difference after the last step is post-processing. An
    empty batch is a noise-only step: whether a batch was empty is not visible.

    With `copies` a record comes with all its perturbed copies at once, and it is the mean of their gradients that is
    clipped. The perturbations are independent over records and never leave the client. So neighbours can be compared
    with the same perturbations for every record that both hold, and the sum then moves by at most `clip_norm`; averaged
    over the perturbations they are no easier to tell apart (the hockey-stick divergence is jointly convex). Who knew
    them could do better: they are drawn by position, and the next record takes the place of one that is gone.
    """

    sample_rate: float  # q
    steps: int
    clip_norm: float  # c
    noise_multiplier: float  # z
    expected_batch: float  # b; public, never the drawn size
    copies: int = 1  # tau, of each record; the first is the record itself

    def __post_init__(self) -> None:
        sampled = 0 < self.sample_rate <= 1 and self.steps >= 1 and self.copies >= 1
        if not (sampled and self.clip_norm > 0 and 0 <= self.noise_multiplier < math.inf):
            raise ValueError(f"{self} makes no sense")
        noise_std(self.clip_norm, self.noise_multiplier)

    @classmethod
    def epochs(cls, size: int, batch_size: int, epochs: int, *, clip_norm: float, noise_multiplier: float) -> Self:
        """`epochs` passes over `size` declared records: q = b/N, ceil(N/b) steps each."""
        batch = min(batch_size, size)
        return cls(batch / size, epochs * math.ceil(size / batch), clip_norm, noise_multiplier, float(batch))

    @property
    def kind(self) -> str:
        return "model update"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("update",)

    @property
    def event(self) -> DpEvent:
        return SelfComposedDpEvent(sampled_gaussian(self.sample_rate, self.noise_multiplier), self.steps)

    def describe(self) -> str:
        copies = f" of the mean over {self.copies} perturbed copies" if self.copies > 1 else ""
        return (
            f"{self.steps} DP-SGD step{'s' * (self.steps > 1)}, sampling rate {self.sample_rate:.4g}, "
            f"clip {self.clip_norm:g}{copies}, noise multiplier {self.noise_multiplier:.4f}"
        )

    def release(self, client: Client) -> tuple[Release, dict[str, float]]:
        """Train from the input "model" at the input "learning_rate" and release the update, see `train`.

        With an input "centre" (p,) every step is pulled towards it: the gradient gets "pull" * (weights - centre) on
        top, after the clip, or with each record's gradient inside it ("pull_inside").
        """
        return train([self], [client])[0]

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """No step at all."""
        return {"update": torch.zeros_like(inputs["model"])}


def train(mechanisms: Sequence[NoisyTraining], clients: Sequence[Client]) -> list[tuple[Release, dict[str, float]]]:
    """Each client trains under its own mechanism; they share what arithmetic they can, and nothing else.

    The start is an input, so it came from the server and is a function of earlier releases; so is a centre. A start
    from the client's own state could depend on a record, and then every gradient would: no bound would hold.

    Clients draw batches of different sizes, so they do not march in step: those whose next batches are equally long
    go together, the largest such group first. A client's own steps come in order, each from its own stream, so that
    nobody's result depends on who else is here.

    Returns:
        For each the release of "update" (p,), and diagnostics that stay in the simulation.
    """
    return run([Runner(number, *pair) for number, pair in enumerate(zip(mechanisms, clients, strict=True))])


def run(runners: Sequence[Runner]) -> list[tuple[Release, dict[str, float]]]:
    """All runners, which are numbered in their order, through all their steps."""
    model = runners[0].client.model
    path = path_of(model)
    start = torch.stack([runner.client.inputs["model"] for runner in runners])
    weights = start.clone()
    waiting: dict[tuple[int, float, int], list[Runner]] = defaultdict(list)

    def draw(runner: Runner) -> None:
        if runner.draw():
            alone = -1 if runner.plain else runner.number
            waiting[path.padded(len(runner.batch)), runner.mechanism.clip_norm, alone].append(runner)

    for runner in runners:
        draw(runner)
    while waiting:
        ready = max(waiting, key=lambda length: len(waiting[length]))
        group = sorted(waiting.pop(ready), key=lambda runner: runner.number)
        rows = [runner.number for runner in group]
        mine = weights if len(group) == len(runners) else weights[rows]
        records = [runner.client.data.train for runner in group]
        if group[0].plain:
            sums = clipped_sums(model, mine, records, [runner.batch for runner in group], ready[1])
        else:
            sums = group[0].own_sum(mine[0])
        counts = torch.stack([sums.clipped, sums.not_finite], dim=1).tolist()
        for runner, total, (clipped, not_finite) in zip(group, sums.total, counts, strict=True):
            runner.step(weights[runner.number], total)
            runner.clipped += clipped
            runner.not_finite += not_finite
            draw(runner)
    updates = weights - start
    return [runner.released(update) for runner, update in zip(runners, updates, strict=True)]


class Runner:
    """One client on its way through its steps."""

    def __init__(self, number: int, mechanism: NoisyTraining, client: Client) -> None:
        self.number, self.mechanism, self.client = number, mechanism, client
        self.stream, self.left = client.noise(), mechanism.steps
        self.std = noise_std(mechanism.clip_norm, mechanism.noise_multiplier)
        largest = torch.finfo(torch.float32).max  # beyond it torch refuses; so large a step ends the run anyway
        self.rate = min(client.inputs["learning_rate"] / mechanism.expected_batch, largest)
        self.centre: Tensor | None = client.inputs.get("centre")
        self.pull: float = client.inputs["pull"] if self.centre is not None else 0.0
        self.inside = bool(client.inputs.get("pull_inside", False))
        if not self.inside and not 0 <= client.inputs["learning_rate"] * self.pull <= 1:
            # beyond the centre it would go on growing, to where rounding alone moves a clipped sum beyond its bound
            raise ValueError('the inputs "learning_rate" times "pull" must lie within 0 and 1')
        self.copies = Stream(*client.key, "mechanism", "copies") if mechanism.copies > 1 else None
        self.plain = self.copies is None and not self.inside  # gradients that the fast path knows
        self.batch: Tensor
        self.drawn = self.clipped = self.not_finite = 0

    def draw(self) -> bool:
        """Draw the next batch, if there is a step left."""
        if self.left:
            self.batch = self.stream.coins(len(self.client.data.train.y), self.mechanism.sample_rate)
            self.drawn += len(self.batch)
        return self.left > 0

    def own_sum(self, weights: Tensor) -> ClippedSums:
        """The clipped sum of an objective of its own: the mean over copies, or a pull inside the clip.

        Not called where `plain` says that it has none.
        """
        records, extra, copied = self.client.data.train, None, None
        if self.inside and self.centre is not None:
            extra = self.pull * (weights - self.centre)
        if self.copies is not None:
            copied = partial(perturbed, copies=self.mechanism.copies, stream=self.copies)
        return objective_sum(
            self.client.model, weights, records, self.batch, self.mechanism.clip_norm, copied=copied, extra=extra
        )

    def step(self, weights: Tensor, total: Tensor) -> None:
        """Noise the sum of clipped gradients (p,), both in place, and take the step."""
        if self.std:
            self.stream.add_noise(total, self.std, grid(self.std))
        if self.centre is not None and not self.inside:
            weights.lerp_(self.centre, self.client.inputs["learning_rate"] * self.pull)
        weights.sub_(total, alpha=self.rate)  # client by client, while the sum is still in the cache
        self.left -= 1

    def released(self, update: Tensor) -> tuple[Release, dict[str, float]]:
        diagnostics = {"clipped": self.clipped / max(self.drawn, 1)}
        if self.not_finite:  # so rare that a thousand clients need not say no in every round
            diagnostics["not_finite"] = float(self.not_finite)
        if self.std:
            diagnostics["signal_to_noise"] = self._signal_to_noise(update)
        return Release({"update": update}, self.mechanism, self.client.key, MINT), diagnostics

    def _signal_to_noise(self, update: Tensor) -> float:
        """The norm of what is not noise in the update over that of the noise, estimated from the update alone.

        E|update|^2 = |signal|^2 + |noise|^2, and the latter is known. With p parameters the estimate of the square is
        off by about sqrt(2/p).
        """
        kept = 1.0 if self.inside else (1 - self.client.inputs["learning_rate"] * self.pull) ** 2  # of earlier noise
        steps = math.fsum(kept**later for later in range(self.mechanism.steps))
        noise = (self.rate * self.std) ** 2 * steps * len(update)
        return math.sqrt(max(0.0, float(update.double().square().sum()) / noise - 1)) if noise else math.inf


def perturbed(x: Tensor, copies: int, stream: Stream) -> Tensor:
    """Images (n, channels, height, width) -> (n, copies, channels, height, width).

    The first copy is the image itself; each other one is moved by up to SHIFT pixels each way, its edge repeated.
    """
    height, width = x.shape[-2:]
    padded = F.pad(x, (SHIFT,) * 4, mode="replicate")
    placed = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (n, channels, down, right, height, width)
    at = (stream.uniform(2 * len(x) * copies) * (2 * SHIFT + 1)).long().view(2, len(x), copies)
    at[:, :, 0] = SHIFT
    return placed[torch.arange(len(x)).unsqueeze(1), :, at[0], at[1]]
