"""Canaries that are single records: scored by what the clients that hold them release, each for itself.

For each release it is worked out what every canary would have added, and what the other records of the client have. A
client that takes several steps before it answers moves its model on the way, which nobody sees: there a canary's part
is taken at the model that the round starts from. Close enough for a guess; no guess needs to be right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairveil.attacks.canaries import Planting
from fairveil.attacks.decoder import Decoder
from fairveil.attacks.watch import Watch
from fairveil.data.federation import ClientData, Records, Standardised
from fairveil.models import Model
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.fair_training import FairTraining
from fairveil.privacy.gradients import clipped_sums, exact_losses
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import Mechanism
from fairveil.privacy.moments import NoisyMoments, bound, contributions
from fairveil.privacy.release import MINT, Plain
from fairveil.privacy.training import NoisyTraining
from fairveil.privacy.votes import NoisyVotes
from fairveil.session import Call, Job, Member

Inputs = Mapping[str, Plain]
LEAST_NOISE = 1e-3  # over the bound: where there is none, sums are seen as if there were so much


class RecordWatch(Watch):
    """Scores records."""

    def __init__(self, planting: Planting, name: str) -> None:
        super().__init__(planting, name)
        holders = planting.holders
        self._rows = {int(c): np.flatnonzero((holders == c).any(axis=1)) for c in np.unique(holders)}
        self._decoders = {client: Decoder(len(rows)) for client, rows in self._rows.items()}

    def log_odds(self) -> NDArray[np.float64]:
        total = np.zeros(len(self.planting.inside))
        for client, rows in self._rows.items():
            total[rows] += self._decoders[client].log_odds()  # where several hold it, their noise is independent
        return total

    def witness(self, job: Job, values: Mapping[int, Mapping[str, Plain]]) -> None:
        for call in job.calls:
            if isinstance(call.mechanism, NoisyVotes):
                self._see_winners(job, cast(Tensor, values[FEDERATION]["labels"]))
            elif call.client in self._rows and values.get(call.client):
                self._see(call, {**job.shared, **call.each}, values[call.client])

    def _see(self, call: Call, inputs: Inputs, value: Mapping[str, Plain]) -> None:
        planting, rows, decoder = self.planting, self._rows[call.client], self._decoders[call.client]
        canaries = self._prepared(planting.canaries.take(rows))
        instead = None if planting.instead is None else self._prepared(planting.instead.take(rows))
        known = self._prepared(planting.before.federation.load(call.client).train)
        if isinstance(call.mechanism, PrivateChoice):
            decoder.tell(self._choice(call.mechanism, inputs, cast(int, value["choice"]), canaries, instead, known))
        elif (view := _view(call.mechanism, planting.before.model, inputs, value)) is not None:
            parts, base = view.each(canaries), view.total(known)
            if instead is not None:
                others = view.each(instead)
                parts, base = parts - others, base + others.sum(dim=0)
            decoder.see(view.seen - view.rate * base, parts, view.rate, view.variance)

    def _choice(
        self, choice: PrivateChoice, inputs: Inputs, chosen: int, canaries: Records, instead: Records | None,
        known: Records,
    ) -> Tensor:  # fmt: skip
        """How much likelier this choice is with each canary there, (m,): by the derivative of its probability."""
        if choice.epsilon == math.inf:
            return torch.zeros(len(canaries), dtype=torch.float64)
        model = self.planting.before.model

        def scores(records: Records) -> Tensor:
            client = Member(ClientData(records, records), model, inputs, choice, {}, ("audit",), MINT)
            return choice.scores(client) / choice.gumbel_scale

        def each(records: Records) -> Tensor:
            return torch.stack([scores(records.take(np.array([row]))) for row in range(len(records))])

        added = each(canaries) if instead is None else each(canaries) - each(instead)
        prior = cast(Tensor, inputs.get("prior", torch.zeros(added.shape[1]))).double()
        expected = torch.softmax(prior + scores(known) + added.sum(dim=0) / 2, dim=0)
        return added[:, chosen] - (added * torch.where(expected > 0, expected, 0.0)).sum(dim=1)

    def _see_winners(self, job: Job, labels: Tensor) -> None:
        """A canary is one of the queries, under a label: did that win? (What else it changes is not looked at.)"""
        asked = cast(Tensor, job.shared["queries"])
        canaries, instead = self.planting.canaries, self.planting.instead
        where = {row.numpy().tobytes(): number for number, row in enumerate(asked)}
        for client, rows in self._rows.items():
            found = torch.zeros(len(rows), dtype=torch.float64)
            for k, row in enumerate(rows.tolist()):
                query = where.get(canaries.x[row].flatten().numpy().tobytes())
                if query is not None:
                    found[k] = _agreement(labels[query], canaries.y[row])
                    if instead is not None:
                        found[k] -= _agreement(labels[query], instead.y[row])
            self._decoders[client].tell(found)

    def _prepared(self, records: Records) -> Records:
        """Records in the form in which tasks get them."""
        source = self.federation.source
        return source.applied(records) if isinstance(source, Standardised) else records


def _agreement(winner: Tensor, label: Tensor) -> float:
    return float((winner == label).double().mean())


class _View(Protocol):
    """A release as one noisy sum over records, in standard deviations of its noise."""

    rate: float  # how often a record comes up, in the mean
    variance: float  # and the variance of that
    seen: Tensor  # (d,)

    def each(self, records: Records) -> Tensor:
        """What every record adds when it comes up (n, d)."""

    def total(self, records: Records) -> Tensor:
        """What they all add together (d,)."""


def _view(mechanism: Mechanism | None, model: Model, inputs: Inputs, value: Mapping[str, Plain]) -> _View | None:
    match mechanism:
        case NoisyTraining():
            return _Training(mechanism, model, inputs, value)
        case FairTraining():
            return _Fairly(mechanism, model, inputs, value)
        case NoisyMoments():
            return _Moments(mechanism, value)
    return None


class _Training:
    """The steps of local training, added up: their gradients are those at the start, and so is the noise of each.

    A pull towards a centre after the clip is undone: it is a function of what the server knows.
    """

    def __init__(self, by: NoisyTraining, model: Model, inputs: Inputs, value: Mapping[str, Plain]) -> None:
        self.model, self.start, self.clip_norm = model, cast(Tensor, inputs["model"]), by.clip_norm
        learning_rate = cast(float, inputs["learning_rate"])
        centre = cast(Tensor | None, inputs.get("centre"))
        inside = centre is None or bool(inputs.get("pull_inside", False))
        left = 1.0 if inside else 1 - learning_rate * cast(float, inputs["pull"])  # of a step, after the next one
        powers = left ** np.arange(by.steps)
        bound = by.clip_norm if math.isfinite(by.clip_norm) else 1.0
        self.std = bound * max(by.noise_multiplier, LEAST_NOISE) * math.sqrt(float((powers**2).sum()))
        self.rate = by.sample_rate * float(powers.sum())
        self.variance = by.sample_rate * (1 - by.sample_rate) * float((powers**2).sum())
        moved = cast(Tensor, value["update"]).double()
        if centre is not None and not inside:
            moved = moved - (left**by.steps - 1) * (self.start - centre).double()
        self.seen = moved * (-by.expected_batch / learning_rate / self.std)

    def each(self, records: Records) -> Tensor:
        rows = [torch.tensor([row]) for row in range(len(records))]
        weights = self.start.expand(len(rows), -1).contiguous()
        sums = clipped_sums(
            self.model, weights, [records] * len(rows), rows, self.clip_norm, self._coefficients(records, rows)
        )
        return sums.total.double() / self.std

    def total(self, records: Records) -> Tensor:
        rows = [torch.arange(len(records))]
        sums = clipped_sums(
            self.model, self.start.unsqueeze(0), [records], rows, self.clip_norm, self._coefficients(records, rows)
        )
        return sums.total[0].double() / self.std

    def _coefficients(self, records: Records, rows: list[Tensor]) -> list[Tensor] | None:
        return None


class _Fairly(_Training):
    """The same with fair clipping, and the sum of the losses beside it."""

    def __init__(self, by: FairTraining, model: Model, inputs: Inputs, value: Mapping[str, Plain]) -> None:
        super().__init__(by.training, model, inputs, value)
        self.bound, self.penalty = by.loss.bound, cast(float, inputs["penalty"])
        self.global_loss = cast(float, inputs["global_loss"])
        steps = by.training.steps
        self.loss_std = by.loss.bound * max(by.loss.noise_multiplier, LEAST_NOISE) * math.sqrt(steps)
        losses = cast(float, value["loss"]) * steps * by.training.expected_batch / self.loss_std
        self.seen = torch.cat([self.seen, torch.tensor([losses], dtype=torch.float64)])

    def each(self, records: Records) -> Tensor:
        return torch.cat([super().each(records), self._losses(records).unsqueeze(1) / self.loss_std], dim=1)

    def total(self, records: Records) -> Tensor:
        return torch.cat([super().total(records), self._losses(records).sum().unsqueeze(0) / self.loss_std])

    def _losses(self, records: Records) -> Tensor:
        found = exact_losses(self.model, self.start, records, torch.arange(len(records))).double()
        return found.nan_to_num(self.bound).clamp(0.0, self.bound)

    def _coefficients(self, records: Records, rows: list[Tensor]) -> list[Tensor]:
        found = (1 + self.penalty * (self._losses(records) - self.global_loss)).clamp(min=0.0).float()
        return [found[row] for row in rows]


class _Moments:
    """Sums over columns."""

    rate, variance = 1.0, 0.0

    def __init__(self, by: NoisyMoments, value: Mapping[str, Plain]) -> None:
        self.columns = by.columns
        self.std = bound(by.columns) * max(by.noise_multiplier, LEAST_NOISE)
        self.seen = cast(Tensor, value["moments"]).double() / self.std

    def each(self, records: Records) -> Tensor:
        return contributions(records.x, self.columns) / self.std

    def total(self, records: Records) -> Tensor:
        return self.each(records).sum(dim=0)
