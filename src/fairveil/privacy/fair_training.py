"""Local DP-SGD in which records that fare worse than the mean weigh more; what their mean loss is, is released too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dp_accounting import DpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from torch import Tensor

from fairveil.privacy.gradients import ROUNDING, ClippedSums, clipped_sums, exact_losses
from fairveil.privacy.mechanisms import Client, Part, noise_std, on_grid, sampled_gaussian
from fairveil.privacy.release import MINT, Plain, Release
from fairveil.privacy.training import NoisyTraining, Runner, run
from fairveil.streams import Stream

LARGEST_COEFFICIENT = 32.0  # it multiplies the rounding of small gradients, for which a bound has little room


@dataclass(frozen=True)
class FairTraining:
    """Local DP-SGD with fair clipping, after Ling et al., "FedFDP" (2024): an update, and the mean loss on the way.

    Unit: one record of the client. Neighbours (add/remove): two datasets that differ in one record. Each step draws ONE
    Poisson batch. Record j of it has a loss l_j at the current weights, bounded to [0, B], and a gradient g_j. The step
    sums min(k_j, c / |g_j|) g_j with k_j = max(0, 1 + lambda * (l_j - F)), adding noise of standard deviation z c, and
    it sums l_j, adding noise of standard deviation z_l B. F ("global_loss") and lambda ("penalty") are inputs.

    Sensitivity: given what was released before, the weights, F and lambda are the same for neighbours. So k_j depends
    on record j alone, and a record moves the first sum by at most c, whatever k_j is, and the second by at most B
    (twice that under replace, which the accountant knows). One that is not finite adds zero to both.

    Event: both sums are over the same batch. The first over z c, the second over z_l B: together they are one vector
    with unit noise, which a record of the batch moves by at most sqrt(1/z^2 + 1/z_l^2). So a step is ONE Gaussian sum
    of one Poisson draw, with 1/z_eff^2 = 1/z^2 + 1/z_l^2. Priced as two events, each with a draw of its own, it would
    seem cheaper than it is: what one sum tells of whether a record was drawn, it tells about the other sum as well. The
    steps compose; the update and the mean of the noisy loss sums are functions of them.
    """

    training: NoisyTraining  # q, the steps, c, z and b
    loss: Part  # B and z_l

    def __post_init__(self) -> None:
        # these very types: what is derived from them, or looks like them in a text, has another price
        if type(self.training) is not NoisyTraining or type(self.loss) is not Part:
            raise TypeError(f"{self} makes no sense")
        one_number = (self.loss.name, self.loss.shape) == ("loss", ())
        bounded = 0 < self.loss.bound < math.inf and 0 <= self.loss.noise_multiplier < math.inf
        if not (one_number and bounded and self.training.copies == 1):
            raise ValueError(f"{self} makes no sense")

    @property
    def kind(self) -> str:
        return "model update and mean loss"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("update", "loss")

    @property
    def event(self) -> DpEvent:
        z, z_l = self.training.noise_multiplier, self.loss.noise_multiplier
        if not (z and z_l):
            return NonPrivateDpEvent()
        return SelfComposedDpEvent(
            sampled_gaussian(self.training.sample_rate, (z**-2 + z_l**-2) ** -0.5), self.training.steps
        )

    def describe(self) -> str:
        return (
            f"{self.training.describe()}; over the same batches the sum of losses up to {self.loss.bound:g}, "
            f"noise multiplier {self.loss.noise_multiplier:.4f}"
        )

    def release(self, client: Client) -> tuple[Release, dict[str, float]]:
        """Train from the input "model", see `train_fairly`."""
        return train_fairly([self], [client])[0]

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """No step at all, and no loss: whoever reads it must leave it out."""
        return {"update": torch.zeros_like(inputs["model"]), "loss": math.nan}


def train_fairly(
    mechanisms: Sequence[FairTraining], clients: Sequence[Client]
) -> list[tuple[Release, dict[str, float]]]:
    """Each client trains the input "model" under its own mechanism.

    Inputs: "model" (p,), "learning_rate", "penalty" (lambda), "global_loss" (F).

    Returns:
        For each the release of "update" (p,) and "loss", and diagnostics that stay in the simulation.
    """
    return run([_FairRunner(number, *pair) for number, pair in enumerate(zip(mechanisms, clients, strict=True))])


class _FairRunner(Runner):
    """One client on its way through its steps, with the noisy sum of the losses so far."""

    def __init__(self, number: int, fair: FairTraining, client: Client) -> None:
        super().__init__(number, fair.training, client)
        self.fair, self.plain, self.losses = fair, False, 0.0
        self.penalty: float = client.inputs["penalty"]
        self.global_loss: float = client.inputs["global_loss"]
        largest = 1 + self.penalty * fair.loss.bound
        if not (self.penalty >= 0 and 0 <= self.global_loss < math.inf and largest <= LARGEST_COEFFICIENT):
            raise ValueError(
                'the inputs "penalty" and "global_loss" must be at least 0, and 1 + penalty * the bound of the loss at '
                f"most {LARGEST_COEFFICIENT:g}"
            )
        self.loss_std = noise_std(fair.loss.bound, fair.loss.noise_multiplier)
        self.loss_noise = Stream(*client.key, "mechanism", "loss")

    def own_sum(self, weights: Tensor) -> ClippedSums:
        """The fairly clipped sum of gradients; the losses of the same batch are added to what was there, with noise."""
        records = self.client.data.train
        losses = exact_losses(self.client.model, weights, records, self.batch)
        finite, bounded = losses.isfinite(), losses.clamp(0.0, self.fair.loss.bound * ROUNDING)
        self._add(bounded[finite].sum())
        coefficient = torch.where(finite, 1 + self.penalty * (bounded - self.global_loss), 0.0).clamp(min=0.0)
        return clipped_sums(
            self.client.model, weights.unsqueeze(0), [records], [self.batch], self.mechanism.clip_norm, [coefficient]
        )

    def _add(self, total: Tensor) -> None:
        if self.loss_std:
            total = on_grid(total + self.loss_std * self.loss_noise.normal(1), self.loss_std)
        self.losses += float(total)

    def released(self, update: Tensor) -> tuple[Release, dict[str, float]]:
        _, diagnostics = super().released(update)
        mean = self.losses / (self.mechanism.steps * self.mechanism.expected_batch)
        return Release({"update": update, "loss": mean}, self.fair, self.client.key, MINT), diagnostics
