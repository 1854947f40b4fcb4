"""The private choice of a model: a client names the one that suits its records best, by the exponential mechanism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from dp_accounting import DpEvent, NonPrivateDpEvent
from torch import Tensor

from fairveil.privacy.accounting import Adjacency, SelectionDpEvent
from fairveil.privacy.mechanisms import Client
from fairveil.privacy.release import MINT, Plain, Release
from fairveil.streams import Stream

Score = Literal["correct", "loss"]

PIECE = 128  # records that are scored at once
HUGE = 1e200  # what an infinite loss counts where there is no bound: sums stay finite, and can be compared
UNIT = 2.0**-32  # what a record adds is a multiple of it: sums are exact, in any order, up to two million records


@dataclass(frozen=True)
class PrivateChoice:
    """One choice among models by the exponential mechanism (McSherry and Talwar, "Mechanism Design via Differential
    Privacy", 2007), drawn by adding Gumbel noise to the scores and taking the largest.

    Unit: one record of the client. Neighbours: two datasets that differ in one record, added or removed or (replace)
    exchanged for another. P(m) is proportional to exp(prior_m + epsilon * s_m / k). The score s_m is the number of
    records that model m classifies correctly, or minus the sum of their losses, each within [0, loss_bound] and divided
    by loss_bound. So a record adds to all s_m numbers within [0, 1], or to all within [-1, 0].

    The log-ratio of P(m) between neighbours is epsilon * (s_m - s'_m) / k plus a constant, the same for all m. Models
    and prior come from the server: functions of earlier releases, equal for both neighbours, so the prior cancels.
    With a record added or removed, all s_m - s'_m lie within one interval of length 1 (the score is monotone): k = 1.
    With one replaced they lie within [-1, 1]: k = 2. Either way the log-ratios of no two outcomes differ by more than
    epsilon. That is a *bounded range* (Dong, Durfee and Rogers, "Optimal Differential Privacy Composition for
    Exponential Mechanisms", 2020), and epsilon^2/8-zCDP (Cesar and Rogers, "Bounding, Concentrating, and Truncating:
    Unifying Privacy Loss Composition for Data Analytics", 2021; a short proof is in Rogers and Steinke, "A Better
    Privacy Analysis of the Exponential Mechanism", 2021). The event states the range and the accountant prices it.

    An infinite epsilon is the exact best, the first among equals, whatever their prior and with losses as they are: no
    guarantee.
    """

    epsilon: float  # bounded range
    adjacency: Adjacency
    score: Score = "correct"
    loss_bound: float = 4.0  # B

    def __post_init__(self) -> None:
        known = self.adjacency in get_args(Adjacency) and self.score in get_args(Score)
        if not (known and self.epsilon > 0 and 0 < self.loss_bound < math.inf):
            raise ValueError(f"{self} makes no sense: epsilon and a finite loss_bound above 0")

    @property
    def kind(self) -> str:
        return "exact choice of a model" if self.epsilon == math.inf else "choice of a model"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("choice",)

    @property
    def leak(self) -> bool:
        """Whether it is exact on purpose, see `without_leaks`."""
        return self.epsilon == math.inf

    @property
    def event(self) -> DpEvent:
        return NonPrivateDpEvent() if self.epsilon == math.inf else SelectionDpEvent(self.epsilon)

    @property
    def gumbel_scale(self) -> float:
        """Of the noise, in units of the score: k / epsilon."""
        return (1 if self.adjacency == "add-remove" else 2) / self.epsilon

    def describe(self) -> str:
        by = "correctly classified records" if self.score == "correct" else f"losses within [0, {self.loss_bound:g}]"
        noise = f"Gumbel noise of scale {self.gumbel_scale:.4g}, bounded range {self.epsilon:g}"
        if self.epsilon == math.inf:
            noise = "without noise"
        return f"the best model by {by}, {noise}"

    def release(self, client: Client) -> tuple[Release, dict[str, float]]:
        """Choose among the rows of the input "models" (M, p). How many there are is public, and changes no price.

        The input "prior" (M,), if there is one, holds log-weights up to a constant; -inf excludes a model.

        Returns:
            The release of "choice", a row; and of the models not excluded the exact best, whether it was chosen, and
            how far its score is ahead of the next (0 if there is none).
        """
        scores = self.scores(client)
        prior = _prior(client, len(scores))
        excluded = prior == -math.inf
        scores.masked_fill_(excluded, -math.inf)
        ahead = scores - scores.max()  # exact; and where noise decides, floats are fine
        best = chosen = int((ahead == 0).nonzero()[0])
        if self.epsilon < math.inf:
            noisy = prior + ahead / self.gumbel_scale + _gumbel(client.noise(), len(prior))
            chosen = int(noisy.masked_fill_(excluded, -math.inf).argmax())
        others = ahead[torch.arange(len(ahead)) != best]
        gap = abs(float(others.max())) if len(others) and others.max() > -math.inf else 0.0
        diagnostics = {"score_gap": gap, "best": float(best), "chosen_best": float(chosen == best)}
        return Release({"choice": chosen}, self, client.key, MINT), diagnostics

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """The model that is likeliest beforehand."""
        prior = inputs.get("prior")
        return {"choice": 0 if prior is None else int(prior.argmax())}

    @torch.no_grad()
    def scores(self, client: Client) -> Tensor:
        """The exact scores (M,), float64: private. Zeros for a client without records.

        All pieces are filled up to one length. Beside fewer records a network rounds an output in another way (those of
        pieces shorter than 16 differ, in most networks), and then a record's going would move what others add.
        """
        models, model, records = client.inputs["models"], client.model, client.data.train
        shape = tuple(models.shape) if isinstance(models, Tensor) else type(models).__name__
        if len(shape) != 2 or not shape[0] or shape[1] != model.parameters:
            raise ValueError(f'the input "models" is {shape}: it must be rows of {model.parameters} parameters')
        if self.score == "correct" and not model.spec.classes:
            raise ValueError('a regression classifies no record correctly: its score can be "loss" only')
        scores = torch.zeros(len(models), dtype=torch.float64)
        for start in range(0, len(records), PIECE):
            x, y = records.x[start : start + PIECE], records.y[start : start + PIECE]
            rows, missing = len(y), PIECE - len(y)
            x, y = (F.pad(each, (0, 0) * (each.dim() - 1) + (0, missing)) for each in (x, y))
            for number, weights in enumerate(models):
                output, losses = model.scored(model.unflatten(weights), x, y)
                if self.score == "correct":
                    added = model.right(output, y).view(PIECE, -1).all(dim=1) & output.isfinite().all(dim=1)
                else:
                    added = -self._bounded(losses)
                scores[number] += added[:rows].sum(dtype=torch.float64)
        return scores

    def _bounded(self, losses: Tensor) -> Tensor:
        """Losses (n,) as shares of the bound, within [0, 1]; one that is not finite counts as the bound.

        The exact choice promises nothing, so it needs no bound.
        """
        if self.epsilon == math.inf:
            return losses.double().nan_to_num(nan=HUGE, posinf=HUGE).clamp(max=HUGE)
        losses = losses.double().where(losses.isfinite(), self.loss_bound)
        return (losses.clamp(0, self.loss_bound) / self.loss_bound / UNIT).trunc() * UNIT


def _prior(client: Client, count: int) -> Tensor:
    """Log-weights (count,), float64, the largest 0."""
    prior = client.inputs.get("prior", torch.zeros(count))
    if not isinstance(prior, Tensor) or tuple(prior.shape) != (count,):
        shape = tuple(prior.shape) if isinstance(prior, Tensor) else type(prior).__name__
        raise ValueError(f'the input "prior" is {shape}: it must be one number for each of {count} models')
    if not prior.max().isfinite():  # NaN is the largest of all
        raise ValueError(f'the input "prior" is {prior.tolist()}: finite log-weights, or -inf for some of the models')
    return prior.double() - prior.double().max()


def _gumbel(stream: Stream, count: int) -> Tensor:
    """Independent standard Gumbel values (count,), float64: -ln(-ln(1 - u)).

    Small u make the upper tail, which decides how often a model far behind is chosen. Values are within -3.6 and 44.4,
    where 2^-53 and 2^-64 of the mass are left. So a choice less likely than about 2^-64 never happens, and others are
    off by about 2^-53 in probability: far below any delta.
    """
    return -torch.log(-torch.log1p(-stream.uniform(count)))
