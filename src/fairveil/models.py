"""Models as functions of a flat vector: the reference networks, and the user's own by "package.module:Class".

A model's parameters live in one flat vector (p,): it can be averaged, noised, sent and saved without asking
what is inside. A user's class is built as Class(features, classes, **options) and maps (n, *features) to
(n, classes), or to (n, 1) when classes is 0 (regression).

Where a record may have several of the classes at once, each output is the logit of one of them, and targets are
(n, classes), of 0 and 1: the network is the same, and only the loss is another.

The loss is cross-entropy (of several classes the mean of their binary cross-entropies), or half the squared error,
unless the class brings its own:

    def record_losses(self, output: Tensor, y: Tensor) -> Tensor: ...

maps the outputs above and the targets, (n,) or (n, classes), to the loss of each record (n,). A record's loss may
depend on that record and on the parameters, never on the records beside it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fairveil.errors import UserError, nearest, unknown
from fairveil.networks import MODELS as MODELS
from fairveil.options import shown
from fairveil.plugins import load_object
from fairveil.streams import Stream

LANES = 16  # float32 numbers in a vector of the processor, at most


@dataclass(frozen=True)
class ModelSpec:
    """All that is needed to build the model again in another process."""

    name: str
    features: tuple[int, ...]
    classes: int  # 0: regression
    options: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False  # whether a record may have several of the classes at once

    @property
    def target(self) -> tuple[int, ...]:
        """Shape of the target of one record."""
        return (self.classes,) if self.several else ()

    def build(self) -> Model:
        """Build and check the model.

        Raises:
            UserError: unknown name or option, a layer that mixes records, a model that does not fit the data.
        """
        return Model(self)

    def module(self, stream: Stream) -> nn.Module:
        """A module with fresh parameters drawn from `stream`; the global generator is left as it was."""
        factory = check_model(self.name, self.options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream.numpy.integers(2**63)))
            try:
                module = factory(self.features, self.classes, **self.options)
            except TypeError as error:
                raise UserError(
                    f"model.name = {shown(self.name)} could not be built.",
                    f"It is called as Class(features, classes, **options), and said: {error}.",
                    "class Net(torch.nn.Module): def __init__(self, features, classes): ...",
                ) from error
            except (RuntimeError, MemoryError) as error:
                raise UserError(
                    f"model.name = {shown(self.name)} could not be built.",
                    f"torch said: {(str(error) or 'no memory').splitlines()[0]}",
                    f"a smaller model than {shown(dict(self.options))}",
                ) from error
        if not isinstance(module, nn.Module):
            raise UserError(
                f"model.name = {shown(self.name)} did not give a torch.nn.Module but {type(module).__name__}.",
                "It is called as Class(features, classes, **options).",
                "derive your class from torch.nn.Module",
            )
        return module


class Model:
    """A module as a function of a flat parameter vector (p,)."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.module = spec.module(Stream("skeleton"))
        _refuse_mixing_layers(self.module)
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if not named:
            raise UserError(
                f"model.name = {shown(spec.name)} has nothing to train.",
                "It has no parameters that require a gradient.",
                "a model with at least one trainable layer",
            )
        self.own = dict(named)  # the module's trainable parameters themselves
        self.names = list(self.own)
        self.shapes = [tuple(p.shape) for _, p in named]
        self._sizes = [p.numel() for _, p in named]
        self.parameters = sum(self._sizes)
        self._check_output()
        self.with_loss = _Scored(self.module, spec)
        if hasattr(self.module, "record_losses"):
            if spec.several and spec.name in MODELS:
                raise UserError(
                    f"model.name = {shown(spec.name)} with these options does not fit records of several classes.",
                    "Its loss is for records that have one class each. Nothing was run.",
                    'model.name = "logistic", or another without a loss of its own',
                )
            self._check_own_loss()
        self._check_swapped()

    def initial(self, stream: Stream) -> Tensor:
        """Fresh parameters (p,)."""
        return self.flatten(self.spec.module(stream))

    def flatten(self, module: nn.Module) -> Tensor:
        """The parameters of a module of this kind as one vector (p,)."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        """Views of flat vectors (..., p) under the module's own names, each (..., *shape)."""
        parts = weights.split_with_sizes(self._sizes, dim=-1)
        many = weights.shape[:-1]
        return {n: part.view((*many, *shape)) for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def scored(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (n, classes) or (n, 1), and the loss of each record (n,)."""
        named = {f"module.{name}": value for name, value in parameters.items()}
        scored: tuple[Tensor, Tensor] = functional_call(self.with_loss, named, (x, y))
        return scored

    def losses(self, parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The loss of each record (n,): the module's own, or cross-entropy, or half the squared error."""
        return self.scored(parameters, x, y)[1]

    def right(self, output: Tensor, y: Tensor) -> Tensor:
        """Which decisions are right: on each record (n,), or on each class that it may have (n, classes)."""
        return (output > 0) == (y > 0) if self.spec.several else output.argmax(dim=1) == y

    def gradient(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The gradient (p,) of the mean loss over records: the plain, non-private step."""
        leaf = weights.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(self.unflatten(leaf), x, y).mean(), leaf)
        return gradient

    def hessian_product(self, weights: Tensor, x: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """The Hessian of the mean loss over records, times a direction (p,).

        Where a network has a kink (ReLU) it is that of the smooth piece around the parameters.
        """
        leaf = weights.detach().requires_grad_()
        loss = self.losses(self.unflatten(leaf), x, y).mean()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        if not gradient.requires_grad:  # a loss of planes, such as a hinge: nothing bends
            return torch.zeros_like(weights)
        # all the way back, and not to the parameters alone: a layer without second derivatives would be passed by
        gradient.backward(direction)
        return torch.zeros_like(weights) if leaf.grad is None else leaf.grad

    def check_hessian(self) -> None:
        """Refuse a model whose loss cannot be differentiated twice."""
        weights, x, y = self._trial()
        try:
            self.hessian_product(weights, x, y, torch.ones_like(weights))
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"fairness.explain = true does not go with model.name = {shown(self.spec.name)}.",
                "It takes second derivatives of the loss, and a layer has none. torch said:\n"
                f"{str(error).splitlines()[0]} Nothing was run.",
                "leave out fairness.explain",
            ) from error

    @torch.no_grad()
    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """Outputs (n, classes), or (n, 1)."""
        output: Tensor = functional_call(self.module, self.unflatten(weights), (x,))
        return output

    def _trial(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters a little off the start, where a layer that starts at zero would hide what it does; two records."""
        start, features = self.flatten(self.module), self.spec.features
        weights = start + 0.01 * torch.arange(self.parameters).cos()
        records = torch.linspace(-1, 1, 2 * math.prod(features)).reshape(2, *features)
        if self.spec.several:
            return weights, records, torch.eye(2, self.spec.classes, dtype=torch.int64)
        return weights, records, torch.arange(2) if self.spec.classes else torch.ones(2)

    def _check_output(self) -> None:
        """Two records must give two rows: of the right width, the same each time, and the same when asked alone."""
        weights, records, _ = self._trial()
        buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        try:
            output, again = self.predict(weights, records), self.predict(weights, records)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UserError(
                f"model.name = {shown(self.spec.name)} does not fit records of shape {self.spec.features}.",
                f"Two records were refused: {str(error).splitlines()[0]}",
                "a model whose first layer takes (n, *features)",
            ) from error
        expected = (2, self.spec.classes or 1)
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != expected:
            raise UserError(
                f"model.name = {shown(self.spec.name)} has outputs of shape {shape}.",
                f"Two records must give {expected}: one score for each class (one number in a regression).",
                f"a last layer of width {expected[1]}",
            )
        if not (self._keeps(buffers) and torch.equal(output, again)):
            raise UserError(
                f"model.name = {shown(self.spec.name)} answers differently each time.",
                "Dropout draws randomness that a resumed run cannot repeat, and a buffer that changes carries one\n"
                "client's records into the next: neither the run nor its guarantee would hold.",
                "remove the dropout, or the layer that keeps running values",
            )
        try:
            alone = torch.cat([self.predict(weights, records[i : i + 1]) for i in range(2)])
        except (RuntimeError, ValueError):
            alone = torch.full_like(output, math.nan)  # it cannot do with one record
        if not torch.allclose(output, alone, rtol=1e-3, atol=1e-5) or self._contagious(weights, records[0], alone[0]):
            raise UserError(
                f"model.name = {shown(self.spec.name)} mixes the records of a batch.",
                "A record's score depends on the records beside it, so clipping would not bound what a record can do.",
                "torch.nn.GroupNorm or LayerNorm in place of what averages over the batch",
            )

    def _contagious(self, weights: Tensor, record: Tensor, alone: Tensor) -> bool:
        """Whether a record's output changes beside one that is out of all bounds: some mixing shows only then."""
        for extreme in (math.nan, 1e30, -1e30):
            try:
                beside = self.predict(weights, torch.stack([record, torch.full_like(record, extreme)]))[0]
            except (RuntimeError, ValueError, IndexError):
                continue  # such a record stops the run, and so tells nothing to those beside it
            if not torch.allclose(beside, alone, rtol=1e-3, atol=1e-5):
                return True
        return False

    def _check_swapped(self) -> None:
        """What is computed with a vector must be what a module that holds its values computes, gradients included."""
        weights, x, y = self._trial()
        module = _Scored(self.spec.module(Stream("skeleton")), self.spec)
        own = dict(module.named_parameters())
        try:
            with torch.no_grad():
                for name, value in self.unflatten(weights).items():
                    own[f"module.{name}"].copy_(value)
            output, losses = module(x, y)
            found = torch.autograd.grad(
                losses.mean(), [own[f"module.{name}"] for name in self.names], allow_unused=True, materialize_grads=True
            )
            pairs = [(output.detach(), self.predict(weights, x))]
            pairs.append((torch.cat([g.flatten() for g in found]), self.gradient(weights, x, y)))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"model.name = {shown(self.spec.name)} cannot be trained.",
                f"Two records were given to it: {str(error).splitlines()[0]}",
                "a module whose loss has a gradient",
            ) from error
        if not all(
            torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(a.abs().max()) + 1e-6, equal_nan=True) for a, b in pairs
        ):
            raise UserError(
                f"model.name = {shown(self.spec.name)} holds parameters where others cannot take their place.",
                "It gives the same answers whatever its parameters are replaced by, or other gradients: it keeps some\n"
                "in a list or a closure, or computes activations anew in the backward pass (torch.utils.checkpoint).",
                "parameters as attributes of their modules, used through these; no checkpointing",
            )

    def _keeps(self, buffers: Mapping[str, Tensor]) -> bool:
        """Whether the module's buffers are still these."""
        return all(torch.equal(value, buffers[name]) for name, value in self.module.named_buffers())

    def _check_own_loss(self) -> None:
        """The module's own loss must give two records two finite numbers, with a gradient, the same when alone."""
        weights, x, y = self._trial()
        parameters = self.unflatten(weights.requires_grad_())
        buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        name = f"model.name = {shown(self.spec.name)}"
        try:
            losses = self.losses(parameters, x, y)
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"{name} has a record_losses that fails.",
                f"It is called with outputs {(2, self.spec.classes or 1)} and targets {(2, *self.spec.target)}, and "
                f"said: {str(error).splitlines()[0]}",
                "def record_losses(self, output, y): ...",
            ) from error
        if shape != (2,) or not losses.is_floating_point():
            raise UserError(
                f"{name} has a record_losses that gives {shape if shape != (2,) else losses.dtype}.",
                "Two records must give two losses (2,), floating point: each record's loss is clipped by itself.",
                "leave out the mean or the sum over records (reduction='none')",
            )
        if not (losses.isfinite().all() and losses.requires_grad):
            raise UserError(
                f"{name} has a record_losses that "
                f"{'has no gradient' if losses.isfinite().all() else f'gives {losses.tolist()}'}.",
                "It was asked for two plain records at the start, where nothing could be trained from it.",
                "a finite loss of torch operations on the output",
            )
        again = self.losses(parameters, x, y)
        if not (torch.equal(losses, again) and self._keeps(buffers)):
            raise UserError(
                f"{name} has a record_losses that answers differently each time.",
                "What it remembers of one client's records would go into the next client's updates.",
                "a loss of the output, the target and the parameters, which keeps nothing",
            )
        try:
            alone = torch.cat([self.losses(parameters, x[i : i + 1], y[i : i + 1]) for i in range(2)])
        except (RuntimeError, ValueError, TypeError, IndexError):
            alone = torch.full_like(losses, math.nan)  # it cannot do with one record
        if not torch.allclose(losses, alone, rtol=1e-3, atol=1e-5):
            raise UserError(
                f"{name} has a record_losses that mixes the records of a batch.",
                "A record's loss depends on the records beside it, so clipping would not bound what a record can do.",
                "a loss of each record's own output and target",
            )


class _Scored(nn.Module):
    """A module and its loss as one, so that a loss that reads parameters (a penalty) reads those of the vector."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.module, self.classes, self.several = module, spec.classes, spec.several
        self.has_own_loss = hasattr(module, "record_losses")

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self.module(x)
        if self.has_own_loss:
            return output, self.module.record_losses(output, y)  # type: ignore[operator]
        if self.several:
            return output, _binary_cross_entropies(output, y)
        if self.classes:
            return output, _cross_entropies(output, y)
        return output, 0.5 * (output.squeeze(-1) - y).square()


def _cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    """Of each record (n,).

    torch's softmax is slow along an axis that does not fill a vector of the processor. Then the records fill it: whole
    vectors of them, since those left over would be rounded in another way, and their number is none of a record's
    business.
    """
    if output.shape[-1] > LANES:
        return F.cross_entropy(output, y, reduction="none")
    columns = F.pad(output.mT, (0, -len(y) % LANES)) if len(y) % LANES else output.mT
    return F.nll_loss(columns.log_softmax(dim=0)[:, : len(y)].mT, y, reduction="none")


def _binary_cross_entropies(output: Tensor, y: Tensor) -> Tensor:
    """Of each record (n,), the mean over its classes.

    All numbers in one row that fills whole vectors of the processor, two at a time as torch takes them: those left over
    would be rounded in another way, see above.
    """
    flat, more = output.flatten(), (0, -output.numel() % (2 * LANES))
    each = F.binary_cross_entropy_with_logits(
        F.pad(flat, more), F.pad(y.flatten().to(flat.dtype), more), reduction="none"
    )
    return each[: flat.numel()].view(output.shape).mean(dim=1)


def check_model(name: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """What builds the model of this name, if it takes these options; all that can be checked without data."""
    factory: Callable[..., nn.Module] | None = load_object("model.name", name) if ":" in name else MODELS.get(name)
    if factory is None:
        raise unknown("model.name", name, MODELS)
    if not callable(factory):
        raise UserError(
            f"model.name = {shown(name)} is not a model.",
            "It is called as Class(features, classes, **options).",
            "a class derived from torch.nn.Module",
        )
    accepted = list(inspect.signature(factory).parameters.values())[2:]
    if any(p.kind is p.VAR_KEYWORD for p in accepted):
        return factory
    names = [p.name for p in accepted]
    for key in options.keys() - set(names):
        near = nearest(key, names)
        raise UserError(
            f"model.{key} = {shown(options[key])} is not an option of this model.",
            f"Its options are: {', '.join(names) or 'none'}.",
            f"model.{near}" if near else f"remove model.{key}",
        )
    return factory


def _refuse_mixing_layers(module: nn.Module) -> None:
    """Refuse layers through which one record's gradient would depend on the other records of its batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            width = layer.num_features if isinstance(layer.num_features, int) else 0  # 0: a lazy layer
            groups = next(g for g in (32, 16, 8, 4, 2, 1) if width % g == 0 and (width or g == 1))
            raise UserError(
                f"model layer {name or 'itself'!r} is {type(layer).__name__}.",
                "It mixes the records of a batch, so that one record moves the gradients of all the others\n"
                "and clipping no longer bounds what a record can do: the privacy guarantee would be void.",
                f"torch.nn.GroupNorm({groups}, {width or 'channels'})",
            )
