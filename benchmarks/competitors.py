"""One training step, as different libraries take it: gather the batch, forward, clipped gradients, noise, update.

Each competitor is built from the same `Task` and has `step()`, which trains every client of the task on its next batch.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fairveil.data.federation import Records, side_by_side
from fairveil.models import Model, ModelSpec
from fairveil.privacy.gradients import clipped_sums
from fairveil.privacy.mechanisms import grid
from fairveil.streams import Stream

BATCH, CLIP_NORM, NOISE_MULTIPLIER, LEARNING_RATE = 32, 1.0, 1.0, 0.05
PREPARED = 72  # batches that are drawn beforehand, about an epoch; they come round again

warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of Opacus' hooks; harmless


@dataclass
class Task:
    """A model, the clients' records, and the rows of every batch: the same for all competitors."""

    spec: ModelSpec
    clients: int
    records: int
    noise_multiplier: float = NOISE_MULTIPLIER
    x: Tensor = field(init=False)  # (clients, records, *features): of one piece, so that one gather can serve all
    y: Tensor = field(init=False)
    rows: Tensor = field(init=False)  # (PREPARED, clients, BATCH)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (self.clients, self.records, *self.spec.features)
        if self.spec.name == "lstm":
            self.x = torch.randint(1, self.spec.options["vocabulary"], shape, generator=random).float()
        else:
            self.x = torch.rand(shape, generator=random)
        self.y = torch.randint(self.spec.classes, shape[:2], generator=random)
        draws = [torch.randperm(self.records, generator=random)[:BATCH] for _ in range(PREPARED * self.clients)]
        self.rows = torch.stack(draws).view(PREPARED, self.clients, BATCH)

    def module(self) -> nn.Module:
        """A fresh module with the same start for everyone."""
        return self.spec.module(Stream("benchmark"))


class Plain:
    """Not private: autograd and an update in place, one client."""

    memory_format = torch.contiguous_format

    def __init__(self, task: Task) -> None:
        assert task.clients == 1
        images = task.x.dim() == 5
        self.format = self.memory_format if images else torch.preserve_format
        self.x, self.y, self.rows = task.x[0], task.y[0], itertools.cycle(task.rows[:, 0])
        self.model = task.module().to(memory_format=self.format)
        self.parameters = list(self.model.parameters())

    def step(self) -> None:
        rows = next(self.rows)
        x = self.x.index_select(0, rows).to(memory_format=self.format)
        loss = F.cross_entropy(self.model(x), self.y.index_select(0, rows))
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-LEARNING_RATE)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters]).unsqueeze(0)


class PlainChannelsLast(Plain):
    """The same in the layout that suits convolutions on a CPU."""

    memory_format = torch.channels_last


class PlainBatched:
    """Not private: linear layers with ReLU between them for all clients in batched products, by autograd."""

    transposed = False  # weights are kept as (in, out)

    def __init__(self, task: Task) -> None:
        count = task.clients
        self.x, self.y = task.x.view(-1, math.prod(task.spec.features)), task.y.view(-1)
        offset = torch.arange(count).unsqueeze(1) * task.records
        self.rows, self.clients = itertools.cycle((task.rows + offset).flatten(1)), count  # one gather serves all
        linear = [layer for layer in task.module().modules() if isinstance(layer, nn.Linear)]
        kept = [layer.weight.detach() if self.transposed else layer.weight.detach().T for layer in linear]
        self.w = [w.expand(count, *w.shape).clone(memory_format=torch.contiguous_format) for w in kept]
        self.b = [layer.bias.detach().expand(count, 1, -1).clone() for layer in linear]
        self.parameters = [p.requires_grad_() for pair in zip(self.w, self.b, strict=True) for p in pair]

    def step(self) -> None:
        rows = next(self.rows)
        output = self.x.index_select(0, rows).view(self.clients, BATCH, -1)
        for number, (w, b) in enumerate(zip(self.w, self.b, strict=True)):
            output = torch.baddbmm(b, output.relu() if number else output, w.mT if self.transposed else w)
        loss = F.cross_entropy(output.flatten(0, 1), self.y.index_select(0, rows), reduction="sum") / BATCH
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-LEARNING_RATE)

    def weights(self) -> Tensor:
        parts = []
        for w, b in zip(self.w, self.b, strict=True):
            parts += [(w if self.transposed else w.mT).detach().flatten(1), b.detach().flatten(1)]
        return torch.cat(parts, dim=1)


class PlainBatchedTransposed(PlainBatched):
    """The same with weights as (out, in), as torch keeps them."""

    transposed = True


class PlainByHand(PlainBatched):
    """The same without autograd: the gradient of this very model written out, and never stored but subtracted at once.

    No framework does this for a user's module; it shows what is left between autograd and the machine.
    """

    @torch.no_grad()
    def step(self) -> None:
        rows = next(self.rows)
        inputs = [self.x.index_select(0, rows).view(self.clients, BATCH, -1)]
        for number, (w, b) in enumerate(zip(self.w, self.b, strict=True)):
            output = torch.baddbmm(b, inputs[-1], w)
            inputs.append(output.relu_() if number + 1 < len(self.w) else output)
        g = inputs.pop().softmax(dim=2)
        g.view(len(rows), -1)[torch.arange(len(rows)), self.y.index_select(0, rows)] -= 1
        rate = -LEARNING_RATE / BATCH
        for number in reversed(range(len(self.w))):
            w, x = self.w[number], inputs[number]
            before = torch.bmm(g, w.mT).mul_(x > 0) if number else g
            w.baddbmm_(x.mT, g, alpha=rate)
            self.b[number].add_(g.sum(dim=1, keepdim=True), alpha=rate)
            g = before


class _OneByOne:
    """Clients one after the other, each with a model of its own."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.batches = itertools.cycle(task.rows)
        self.modules = [task.module() for _ in range(task.clients)]

    def step(self) -> None:
        for client, rows in enumerate(next(self.batches)):
            self.train(client, self.task.x[client].index_select(0, rows), self.task.y[client].index_select(0, rows))

    def train(self, client: int, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError

    def weights(self) -> Tensor:
        return torch.stack([torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in self.modules])


class OpacusHooks(_OneByOne):
    """Opacus as it comes: hooks keep every record's gradient, the optimizer clips, noises and steps."""

    wrapper, optimizer_class = GradSampleModule, DPOptimizer

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.wrapped = [self.wrapper(module) for module in self.modules]
        self.optimizers = [
            self.optimizer_class(
                torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
                noise_multiplier=task.noise_multiplier, max_grad_norm=CLIP_NORM, expected_batch_size=BATCH,
            )
            for module in self.wrapped
        ]  # fmt: skip

    def train(self, client: int, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers[client]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.wrapped[client](x), y).backward()
        optimizer.step()


class OpacusGhost(OpacusHooks):
    """Opacus' fast gradient clipping: norms without gradients, then a second backward pass of the weighted loss."""

    optimizer_class = DPOptimizerFastGradientClipping

    @staticmethod
    def wrapper(module: nn.Module) -> nn.Module:
        return GradSampleModuleFastGradientClipping(module, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.losses = [
            DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())
            for module, optimizer in zip(self.wrapped, self.optimizers, strict=True)
        ]

    def train(self, client: int, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers[client]
        optimizer.zero_grad(set_to_none=True)
        self.losses[client](self.wrapped[client](x), y).backward()
        optimizer.step()


class Vmap(_OneByOne):
    """torch.func: vmap over grad gives every record's gradient; clip, sum, noise and step by hand."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        skeleton = task.module()

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(skeleton, parameters, (x.unsqueeze(0),))
            return F.cross_entropy(output, y.unsqueeze(0))

        self.gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def train(self, client: int, x: Tensor, y: Tensor) -> None:
        parameters = {name: p.detach() for name, p in self.modules[client].named_parameters()}
        gradients = self.gradients(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factor = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)
        for name, weights in parameters.items():
            total = torch.tensordot(factor, gradients[name], dims=1)
            if self.task.noise_multiplier:
                total += torch.randn_like(total) * (CLIP_NORM * self.task.noise_multiplier)
            weights.sub_(total, alpha=LEARNING_RATE / BATCH)


class Fairveil:
    """fairveil's step as its engine takes it: all clients of a block at once, noise from reproducible streams."""

    def __init__(self, task: Task) -> None:
        self.model: Model = task.spec.build()
        start = self.model.flatten(task.module())
        self.current = start.expand(task.clients, -1).clone()
        self.records = side_by_side([Records(x, y) for x, y in zip(task.x, task.y, strict=True)])
        self.batches: Iterator[Sequence[Tensor]] = itertools.cycle([list(rows) for rows in task.rows])
        self.streams = [Stream("benchmark", "noise", client) for client in range(task.clients)]
        self.std = CLIP_NORM * task.noise_multiplier

    def step(self) -> None:
        total = clipped_sums(self.model, self.current, self.records, next(self.batches), CLIP_NORM).total
        rate = LEARNING_RATE / BATCH
        if not self.std:
            self.current.sub_(total, alpha=rate)
            return
        for stream, weights, mine in zip(self.streams, self.current, total, strict=True):
            stream.add_noise(mine, self.std, grid(self.std))
            weights.sub_(mine, alpha=rate)

    def weights(self) -> Tensor:
        return self.current.clone()
