"""Canaries that are whole clients: scored by the noisy sums over cohorts, or by the local models that they release.

What a canary would have sent is asked of its form backstage, by the same task with the same inputs and without noise;
so is what the clients without canaries have. Nobody backstage is ever asked by the algorithm, and none of it depends on
the coins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairveil.attacks.canaries import Planting
from fairveil.attacks.decoder import Decoder
from fairveil.attacks.watch import Watch
from fairveil.attacks.watch_records import LEAST_NOISE, Inputs
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import CohortSums, Mechanism
from fairveil.privacy.metric import GaussianBall, LaplaceBall
from fairveil.privacy.release import Plain, Release, Reply, Share
from fairveil.privacy.votes import UNANSWERED, NoisyVotes
from fairveil.session import Call, Job
from fairveil.streams import Stream
from fairveil.tasks import best_model

KNOWN = 100  # clients without canaries; more are stood for by these
DRAWS, TOGETHER = 2000, 1 << 23  # of the noise of votes; numbers that are held at once
MOST_AT_ONCE = 1 << 26  # numbers that clients backstage contribute at once
REQUEST = "audit"  # under which clients backstage are asked


class ClientWatch(Watch):
    """Scores whole clients."""

    def __init__(self, planting: Planting, name: str) -> None:
        super().__init__(planting, name)
        self._decoder = Decoder(len(planting.inside))
        self._personal: dict[int, Mapping[str, Tensor]] = {}  # of clients backstage
        drawn = Stream(name, "known").numpy.permutation(len(planting.others))[:KNOWN]
        self._known = planting.others[np.sort(drawn)]  # clients whose contributions are asked for
        self._stand_for = len(planting.others) / max(1, len(self._known))
        self._over = False  # whether what is seen from now on is not covered

    def log_odds(self) -> NDArray[np.float64]:
        return self._decoder.log_odds()

    def witness(self, job: Job, values: Mapping[int, Mapping[str, Plain]]) -> None:
        first = job.calls[0].mechanism
        if isinstance(first, CohortSums):
            self._see_sums(job, first, cast(Mapping[str, Tensor], values[FEDERATION]))
        elif isinstance(first, NoisyVotes):
            self._see_winners(job, first, cast(Tensor, values[FEDERATION]["labels"]))
        elif isinstance(first, LaplaceBall | GaussianBall):
            self._see_models(job, first, values)
        elif first is None and not any(values.values()):
            self._repeat(job)

    # ---- sums over cohorts -------------------------------------------------------------------------

    def _see_sums(self, job: Job, mechanism: CohortSums, noisy: Mapping[str, Tensor]) -> None:
        """All parts of the sum as one vector, in standard deviations of their noise."""
        planting, silent = self.planting, replace(mechanism, noised_by=None)

        def whole(values: Mapping[str, Tensor]) -> Tensor:
            parts = ((values[part.name], part.bound * max(part.noise_multiplier, LEAST_NOISE)) for part in silent.parts)
            return torch.cat([value.double().flatten() / (std if math.isfinite(std) else 1.0) for value, std in parts])

        base = torch.zeros(sum(math.prod(part.shape) for part in silent.parts), dtype=torch.float64)
        for share in self._shares(job, silent, self._known):
            base += self._stand_for * whole(share)
        parts = torch.stack([whole(share) for share in self._shares(job, silent, planting.backstage)])
        if planting.otherwise is not None:
            instead = torch.stack([whole(share) for share in self._shares(job, silent, planting.otherwise)])
            parts, base = parts - instead, base + instead.sum(dim=0)
        rate = mechanism.sample_rate
        self._decoder.see(whole(noisy) - rate * base, parts, rate, rate * (1 - rate))

    def _shares(self, job: Job, mechanism: Mechanism, clients: np.ndarray) -> Iterator[Mapping[str, Tensor]]:
        """What clients backstage would have contributed, in their order; some at a time."""
        together = max(8, MOST_AT_ONCE // self.planting.plan.facts.parameters)
        for first in range(0, len(clients), together):
            replies = self._ask(job, mechanism, clients[first : first + together])
            yield from (cast(Share, reply.out).value for reply in replies)

    def _ask(
        self, job: Job, mechanism: Mechanism | None, clients: np.ndarray, each: Sequence[Inputs] = ()
    ) -> list[Reply]:
        """The replies of clients backstage to what the algorithm asks of others."""
        own = each or [{}] * len(clients)
        calls = [Call(c, e, mechanism, self._personal.get(c, {})) for c, e in zip(clients.tolist(), own, strict=True)]
        replies = dict(self.machines.run(Job(job.task, REQUEST, job.shared, calls)))
        return [replies[client] for client in clients.tolist()]

    def _repeat(self, job: Job) -> None:
        """Let those backstage do for themselves what the clients do: a teacher is trained, say, and nothing leaves."""
        planting, asked = self.planting, {call.client: call.each for call in job.calls}
        acting = planting.holders[:, 0].tolist()
        for clients, like in (
            (self._known, self._known),
            (planting.backstage, acting),
            (planting.otherwise, acting),
        ):
            if clients is not None:
                replies = self._ask(job, None, clients, [asked[int(client)] for client in like])
                for client, reply in zip(clients.tolist(), replies, strict=True):
                    self._personal[client] = {name: value.clone() for name, value in (reply.keep or {}).items()}

    # ---- votes -------------------------------------------------------------------------------------

    def _see_winners(self, job: Job, mechanism: NoisyVotes, labels: Tensor) -> None:
        """How much likelier the winners are with each canary's votes: by the derivative of their probability.

        Other canaries count as normal noise beside that of the mechanism.
        """
        planting, silent = self.planting, replace(mechanism, noised_by=None)

        def votes(clients: np.ndarray) -> Tensor:
            found = [share["votes"] / mechanism.weight for share in self._shares(job, silent, clients)]
            return torch.stack(found) if found else torch.zeros(1, mechanism.queries, mechanism.classes)

        added, mean = votes(planting.backstage).double(), self._stand_for * votes(self._known).double().sum(dim=0)
        if planting.otherwise is not None:
            instead = votes(planting.otherwise).double()
            added, mean = added - instead, mean + instead.sum(dim=0)
        mean = mean + added.sum(dim=0) / 2
        std = (max(mechanism.noise_multiplier, LEAST_NOISE) ** 2 + added.square().sum(dim=0) / 4).sqrt()
        if mechanism.several is None:
            slope = _argmax_slope(labels, mean, std, Stream(self.name, job.request))
        else:
            slope = _threshold_slope(labels, (mean - mechanism.several.needed) / std) / std
        self._decoder.tell((added * slope).sum(dim=(1, 2)))

    # ---- local models ------------------------------------------------------------------------------

    def _see_models(self, job: Job, law: LaplaceBall | GaussianBall, values: Mapping[int, Mapping[str, Plain]]) -> None:
        """The ratio of the densities of what was sent, for both forms of a canary.

        Where hypotheses may be anywhere, the promise is for histories in which both forms choose the same one. So those
        canaries are looked at whose forms do; and once there is one whose forms do not, nobody any more, since what it
        sent moves what all get from the next round on.
        """
        if self._over:
            return
        planting, model = self.planting, self.planting.before.model
        assert planting.otherwise is not None and planting.instead is not None
        forms = (planting.canaries, planting.instead)
        models, silent = cast(Tensor, job.shared["models"]), replace(law, noise_multiplier=0.0)
        asked = [j for j, client in enumerate(planting.holders[:, 0].tolist()) if client in values]
        there = asked
        if not math.isfinite(law.spread):
            there = [
                j for j in asked if len({best_model(model, models, form.take(np.array([j]))) for form in forms}) == 1
            ]
            self._over = len(there) < len(asked)
        replies = [self._ask(job, silent, numbers[there]) for numbers in (planting.backstage, planting.otherwise)]
        found = torch.zeros(len(planting.inside), dtype=torch.float64)
        for j, *pair in zip(there, *replies, strict=True):
            sent = cast(Tensor, values[int(planting.holders[j, 0])]["model"]).double()
            far = [float((sent - cast(Tensor, cast(Release, reply.out).value["model"])).norm()) for reply in pair]
            found[j] = _log_density(law, far[0]) - _log_density(law, far[1])
        self._decoder.tell(found)


def _log_density(law: LaplaceBall | GaussianBall, distance: float) -> float:
    """Of the noise at this distance, up to a constant."""
    scale = max(law.noise_multiplier, LEAST_NOISE) * law.radius
    if isinstance(law, LaplaceBall):
        return -distance * law.dimension / scale
    return -((distance / scale) ** 2) / 2


def _argmax_slope(labels: Tensor, mean: Tensor, std: Tensor, stream: Stream) -> Tensor:
    """The derivative of log P[the label wins] in the mean votes (Q, C), by draws of the noise (Stein's identity)."""
    slope = torch.zeros_like(mean)
    queries, classes = mean.shape
    for some in torch.arange(queries).split(max(1, TOGETHER // (DRAWS * classes))):
        noise = stream.normal((len(some), DRAWS, classes))
        winner = (mean[some].unsqueeze(1) + std[some].unsqueeze(1) * noise).argmax(dim=2)
        won = (winner == labels[some].unsqueeze(1)).double()
        slope[some] = torch.einsum("qd,qdc->qc", won, noise) / won.sum(dim=1, keepdim=True).clamp(min=1.0) / std[some]
    return slope * (labels != UNANSWERED).unsqueeze(1)


def _threshold_slope(labels: Tensor, above: Tensor) -> Tensor:
    """The derivative of log P[the answers], each of them 1 where a normal variable exceeds 0, in its mean."""
    side = 2.0 * labels - 1
    density = torch.exp(-above.square() / 2 - torch.special.log_ndtr(side * above)) / math.sqrt(2 * math.pi)
    return side * density
