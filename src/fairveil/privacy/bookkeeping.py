"""Book-keeping: one forward and one backward pass for many records of many clients, each with its own model.

The idea is that of Bu et al., "Differentially Private Optimization on Large Model at Small Cost" (2023). A layer that
has parameters is a sum of products, and a record's gradient follows from what went into the layer and from the
gradient that came back. So the backward pass computes gradients of activations only; what went in and came back is
written down; each record's norm follows from that, then its clip factor, then the clipped sum by one weighted product.

Clients are folded into the batch axis: a module sees (clients * rows, ...) and runs unmodified. Only the operations
that take parameters are intercepted and unfold it, since each client has its own. In a `Book` parameters have
stand-ins that intercept; the rules below make a layer of the operation (layers.py), which writes down on the `Tape`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name

from fairveil.privacy.layers import (
    Affine,
    Convolution,
    Embedding,
    Gradients,
    Layer,
    Linear,
    channels_last,
    joined,
)


class NoRule(Exception):
    """The module does something with a parameter for which there is no rule here."""


class Book:
    """A copy of a module in which stand-ins take the place of its parameters. Buffers are shared with the module.

    Args:
        module: maps (x, y) to (outputs, losses), one of each for a record.
        parameters: of the module, by name.
        laid: brings images to the layout in which they are kept; a module that asks for a view may need another.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], laid: Callable[[Tensor], Tensor] = channels_last
    ) -> None:
        self.laid = laid
        self.tape: Tape | None = None  # of the pass that is under way
        memo: dict[int, Any] = {id(own): StandIn.of(own, name, self) for name, own in parameters.items()}
        for part in module.modules():
            memo |= {id(part._buffers): part._buffers}
            memo |= {id(own): own for own in part._parameters.values() if own is not None and not own.requires_grad}
        self.module = copy.deepcopy(module, memo)
        for part in self.module.modules():
            if type(part) is nn.Sequential:
                _pool_first(part)

    def write(self, values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tape:
        """One forward and one backward pass, for records of all clients; the records are the first axis of x and y.

        Args:
            values: of the parameters (clients, *shape), by name.

        Raises:
            NoRule: the module does something with a parameter that no rule covers.
        """
        self.tape = tape = Tape(values, len(y), self.laid)
        try:
            with torch.enable_grad():
                tape.play_back(self.module(self.laid(x) if x.dim() == 4 else x, y)[1])
        finally:
            self.tape = None
        return tape


def _pool_first(chain: nn.Sequential) -> None:
    """Let max-pooling come before a ReLU that it follows: the same, gradients included, on a quarter of the numbers."""
    for first, second in itertools.pairwise(list(chain._modules)):
        relu, pool = chain._modules[first], chain._modules[second]
        if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d or pool.return_indices:
            continue
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if not any(getattr(part, kind) for part in (relu, pool) for kind in hooks):  # which would see other numbers
            chain._modules[first], chain._modules[second] = pool, relu


class Watch(TorchFunctionMode):
    """While it is on, a module may not make Python numbers of tensors: with them it could decide for all records of a
    batch by what is in one of them, and no bound on that one's own gradient would hold.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in DECISIVE:
            raise NoRule(f"a decision that may depend on the records ({resolve_name(func)})")
        return func(*args, **(kwargs or {}))


class StandIn(Tensor):
    """Has the shape of a parameter and no value: every operation on it comes to `__torch_function__`, no other does."""

    stands_for: str  # a parameter's name
    book: Book

    @classmethod
    def of(cls, parameter: Tensor, name: str, book: Book) -> StandIn:
        value = parameter.detach().new_zeros(()).expand(parameter.shape)
        stand_in: StandIn = Tensor._make_subclass(cls, value)
        stand_in.stands_for, stand_in.book = name, book
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule, found = RULES.get(func), _stand_in((args, *kwargs.values()))
        if rule is None or found is None or found.book.tape is None:
            raise NoRule(resolve_name(func) or getattr(func, "__name__", str(func)))
        return rule(found.book.tape, *args, **kwargs)


def _stand_in(values: Iterable[Any]) -> StandIn | None:
    for value in values:
        found = value if isinstance(value, StandIn) else _stand_in(value) if isinstance(value, tuple | list) else None
        if found is not None:
            return found
    return None


class Tape:
    """The layers of one pass, in the order in which they were applied.

    Args:
        values: of all parameters (clients, *shape), by name.
        records: in the batch, of all clients together.
        laid: brings images to the layout in which they are kept.
    """

    def __init__(self, values: Mapping[str, Tensor], records: int, laid: Callable[[Tensor], Tensor]) -> None:
        self.values, self.records, self.laid = values, records, laid
        self.clients = len(next(iter(values.values())))
        self.layers: list[Layer] = []
        # For each: where the gradient of its output arrives, and how often its input had been written to.
        self._seen: list[tuple[Layer, GradientEdge, int]] = []

    def gradients(self) -> dict[str, Gradients]:
        """For every parameter that touched the loss, one gradient for each record."""
        parts: dict[str, list[Gradients]] = {}
        for layer in self.layers:
            if layer.g is not None:
                for name, gradients in layer.gradients(layer.g):
                    parts.setdefault(name, []).append(gradients)
        return {name: joined(found) for name, found in parts.items()}

    def written(self, layer: Layer, x: Tensor) -> Tensor:
        """Apply a layer to a batch whose first axis is the records."""
        if x.shape[:1] != (self.records,):
            raise NoRule(f"{type(layer).__name__} on a tensor of shape {tuple(x.shape)}, whose records are not first")
        with torch._C.DisableTorchFunction():  # what a layer does is none of a watch's business
            output = layer.forward(x)
            if output._is_view():  # what is written into a view in place goes round it on the way back
                output = output.clone()
            layer.x = x.detach()  # with its history it would keep itself alive
            if torch.is_grad_enabled():  # or the module does not want it
                if not output.requires_grad:
                    _give_history(output)
                self._seen.append((layer, get_gradient_edge(output), x._version))
        self.layers.append(layer)
        return output

    def play_back(self, losses: Tensor) -> None:
        """The backward pass: the gradient of every layer's output."""
        if losses.requires_grad and self._seen:
            found = torch.autograd.grad(losses.sum(), [edge for _, edge, _ in self._seen], allow_unused=True)
            for (layer, _, version), g in zip(self._seen, found, strict=True):
                if layer.x._version != version:
                    raise NoRule(f"{type(layer).__name__} on a tensor that was written to in place later on")
                layer.g = g
        self._seen = []

    def taken(self, *tensors: Tensor | None) -> tuple[list[str | None], list[Tensor | None]]:
        """The names and all clients' values of what an operation takes; the same for all, where it is no parameter."""
        names = [tensor.stands_for if isinstance(tensor, StandIn) else None for tensor in tensors]
        values: list[Tensor | None] = []
        for tensor, name in zip(tensors, names, strict=True):
            if tensor is None or name is not None:
                values.append(self.values[name] if name else None)
            elif tensor.requires_grad:
                raise NoRule("an operation one of whose parameters is computed from the records")
            else:
                values.append(tensor.expand(self.clients, *tensor.shape))
        return names, values


def _give_history(output: Tensor) -> None:
    """Have autograd follow a tensor from here on, as no leaf: those may not be written into. Nothing is added to it."""
    nothing = output.new_empty(0, *output.shape[1:]).requires_grad_()
    output.index_add_(0, torch.empty(0, dtype=torch.int64, device=output.device), nothing)


def _linear(tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return tape.written(Linear(tape.clients, *tape.taken(weight, bias)), input)


def _conv2d(
    tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    if groups != 1:
        raise NoRule("a convolution with groups")
    spread = _numbers(dilation, 2)
    beside = _padding(padding, weight.shape[2:], spread)
    layer = Convolution(tape.clients, *tape.taken(weight, bias), _numbers(stride, 2), beside, spread, tape.laid)
    return tape.written(layer, input)


def _conv1d(
    tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    if groups != 1:
        raise NoRule("a convolution with groups")
    names, (weights, biases) = tape.taken(weight, bias)
    assert weights is not None
    (step,), (spread,) = _numbers(stride, 1), _numbers(dilation, 1)
    (beside,) = _padding(padding, weight.shape[2:], (spread,))
    both = [weights.unsqueeze(3), biases]
    layer = Convolution(tape.clients, names, both, (1, step), (0, beside), (1, spread), tape.laid)
    return tape.written(layer, input.unsqueeze(2)).squeeze(2)


def _padding(padding: Any, size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """In numbers; the same on both sides."""
    if padding == "valid":
        return (0,) * len(size)
    if padding == "same":
        both = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
        if any(length % 2 for length in both):
            raise NoRule("a convolution padded more on one side than on the other")
        return tuple(length // 2 for length in both)
    return _numbers(padding, len(size))


def _numbers(value: Any, count: int) -> tuple[int, ...]:
    """One number for each axis, of one that counts for all or of as many."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values if len(values) == count else values * count


def _layer_norm(
    tape: Tape, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    shape = (*[1] * (input.dim() - 1 - len(normalized_shape)), *normalized_shape)
    return tape.written(Affine(tape.clients, *tape.taken(weight, bias), shape), normal)


def _group_norm(
    tape: Tape,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = F.group_norm(input, num_groups, None, None, eps)
    shape = (input.shape[1], *[1] * (input.dim() - 2))
    return tape.written(Affine(tape.clients, *tape.taken(weight, bias), shape), normal)


def _embedding(
    tape: Tape, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NoRule("an embedding that changes its rows, or scales by frequencies in the batch")
    return tape.written(Embedding(tape.clients, *tape.taken(weight), padding_idx), input)


RULES: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.conv1d: _conv1d,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.embedding: _embedding,
}
DECISIVE = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__complex__, Tensor.item, Tensor.tolist,
    Tensor.numpy, Tensor.__array__,
}  # fmt: skip
# What one may ask of a parameter without using its values.
HARMLESS = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, torch.is_tensor, torch.numel, torch.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_sparse", "is_nested",
                     "is_mkldnn", "is_quantized", "is_meta", "grad_fn", "is_leaf", "_version")
    ),
}  # fmt: skip
