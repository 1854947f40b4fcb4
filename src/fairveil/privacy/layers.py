"""The layers that book-keeping knows, and what they leave behind: one gradient for each record.

There are three ways to hold these: as sums of outer products (`Outer`), as rows added to a table (`Lookup`), or as they
are (`Whole`). Each gives the norms of the gradients, and their weighted sums, without more work than it must.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from fairveil import _convolution
except ImportError:  # installed without a compiler, or on another processor
    LEVEL = 0
else:
    LEVEL = _convolution.LEVEL

# How many times longer than its gradient the sum of a record's terms may be before it is clipped by the latter. Ghost
# norms subtract large terms from each other: beyond this the rounding of float32 could hide a gradient of any length.
CANCELLATION = 32.0
SMALL = 1 << 12  # numbers of a matrix that is sooner copied than multiplied by itself
TINY, LONG = 1e-15, 1 << 16  # what is added to a length; and how many squares float32 can add up


# ---- one gradient for each record ------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """Gradients as they are, in pieces (m, n, ...) of an order that `restore` brings to that of the parameter.

    A sum that is made of these is made of vectors whose norms are known: nothing can cancel.
    """

    pieces: Tensor
    restore: Callable[[Tensor], Tensor]  # (m, n, ...) -> (n, *parameter)
    lengths: Tensor | None = None  # (n,) if they are known

    @classmethod
    def of(cls, values: Tensor) -> Whole:
        """Of (n, *parameter)."""
        return cls(values.unsqueeze(0), _only)

    def settled(self) -> Whole:
        return self

    def norms(self) -> Tensor:
        return _lengths(self.pieces.flatten(2)) if self.lengths is None else self.lengths.unsqueeze(0)

    def write_sum(self, total: Tensor, factor: Tensor) -> None:
        clients, rows = factor.shape
        m, shape = self.pieces.shape[0], self.pieces.shape[2:]
        values = self.pieces.reshape(m * clients, rows, -1).to(factor.dtype)
        summed = torch.bmm((factor if m == 1 else factor.repeat(m, 1)).unsqueeze(1), values)
        total.copy_(self.restore(summed.view(m, clients, *shape)).view_as(total))

    def whole(self) -> Tensor:
        return self.restore(self.pieces)

    def without(self, bad: Tensor) -> Whole:
        return replace(self, pieces=self.pieces.masked_fill(_along(bad, self.pieces[0]), 0.0))

    @property
    def numbers(self) -> int:
        return self.pieces[:, :1].numel()


@dataclass(frozen=True)
class Outer:
    """Sums of outer products: the gradient of record n is sum over t of g[n, t] x[n, t]'; x (n, t, i), g (n, t, o)."""

    x: Tensor
    g: Tensor
    restore: Callable[[Tensor], Tensor]
    g_lengths: Tensor | None = None  # (n, t) if they are known

    def settled(self) -> Outer | Whole:
        """As whole gradients, if these take less work than products of positions with each other."""
        if _few(self.x.shape[1], self.x.shape[2], self.g.shape[2]):
            return self
        return Whole(self._products().unsqueeze(0), lambda v: self.restore(v[0]))

    def norms(self) -> Tensor:
        """|sum g x'|^2 = sum over t, s of (x_t . x_s)(g_t . g_s)."""
        terms = _lengths(self.x) * (_lengths(self.g) if self.g_lengths is None else self.g_lengths)
        if self.x.shape[1] == 1:
            return terms.mT
        return _trusted(torch.bmm(self.x, self.x.mT).mul_(torch.bmm(self.g, self.g.mT)), terms)

    def write_sum(self, total: Tensor, factor: Tensor) -> None:
        clients, rows = factor.shape
        (_, t, i), o = self.x.shape, self.g.shape[2]
        weighted = (self.g.reshape(clients, rows, t * o) * factor.unsqueeze(2)).view(clients, rows * t, o)
        x = self.x.reshape(clients, rows * t, i).to(factor.dtype)
        if self.restore is _same and min(i, o) > 1 and i * o > SMALL:
            torch.bmm(weighted.mT, x, out=total.view(clients, o, i))  # matrix by matrix, which spares a copy of them
        else:
            total.copy_(self.restore(_product(weighted.mT, x)).reshape(total.shape))

    def whole(self) -> Tensor:
        return self.restore(self._products())

    def without(self, bad: Tensor) -> Outer:
        return replace(
            self, x=self.x.masked_fill(_along(bad, self.x), 0.0), g=self.g.masked_fill(_along(bad, self.g), 0.0)
        )

    @property
    def numbers(self) -> int:
        (_, t, i), o = self.x.shape, self.g.shape[2]
        return t * (i + o + 2 * t)

    def _products(self) -> Tensor:
        return torch.bmm(self.g.mT, self.x)


@dataclass(frozen=True)
class Lookup:
    """Rows of a table: the gradient of record n has g[n, t] added to row ids[n, t], for ids (n, t), g (n, t, d)."""

    ids: Tensor
    g: Tensor
    table: tuple[int, int]

    def settled(self) -> Lookup | Whole:
        t, d = self.g.shape[1:]
        return self if t * (t + d) <= math.prod(self.table) else Whole.of(self.whole())

    def norms(self) -> Tensor:
        same = self.ids.unsqueeze(1) == self.ids.unsqueeze(2)
        return _trusted(torch.bmm(self.g, self.g.mT).mul_(same), _lengths(self.g))

    def write_sum(self, total: Tensor, factor: Tensor) -> None:
        clients, rows = factor.shape
        t, d = self.g.shape[1:]
        weighted = self.g.reshape(clients, rows, t, d) * factor[:, :, None, None].double()
        ids = self.ids.view(clients, rows * t, 1).expand(-1, -1, d)
        table = weighted.new_zeros(clients, *self.table)  # float64: one row may get thousands of terms, one by one
        total.copy_(table.scatter_add_(1, ids, weighted.reshape(clients, rows * t, d)))

    def whole(self) -> Tensor:
        whole = self.g.new_zeros(len(self.ids), *self.table)
        return whole.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.g), self.g)

    def without(self, bad: Tensor) -> Lookup:
        return replace(self, g=self.g.masked_fill(_along(bad, self.g), 0.0))

    @property
    def numbers(self) -> int:
        t, d = self.g.shape[1:]
        return t * (t + d)


Gradients = Whole | Outer | Lookup


def joined(parts: Sequence[Gradients]) -> Gradients:
    """The gradients of a parameter that is used several times: they add up."""
    first = parts[0]
    if len(parts) == 1:
        return first.settled()
    if isinstance(first, Outer) and all(isinstance(p, Outer) and p.restore is first.restore for p in parts):
        outers = [part for part in parts if isinstance(part, Outer)]
        x, g = torch.cat([p.x for p in outers], 1), torch.cat([p.g for p in outers], 1)
        return Outer(x, g, first.restore).settled()
    return Whole.of(torch.stack([part.whole().flatten(1) for part in parts]).sum(dim=0))


def _few(t: int, i: int, o: int) -> bool:
    """Whether products of t positions with each other take less work than a whole gradient (o, i)."""
    return t == 1 or t * (i + o) <= i * o


def _same(values: Tensor) -> Tensor:
    return values


def _only(pieces: Tensor) -> Tensor:
    return pieces[0]


def _trusted(products: Tensor, terms: Tensor) -> Tensor:
    """Norms (1, n) from the products (n, t, t) of terms of these lengths (n, t), as far as rounding can be trusted.

    Where terms all but cancel, the sum of their lengths bounds the norm; and where products have left the range of
    float32, nothing else does.
    """
    squared, most = products.sum(dim=(1, 2)), terms.sum(dim=1)
    right = squared.isfinite() & (products.diagonal(dim1=1, dim2=2).sum(dim=1) >= 0.99 * terms.square().sum(dim=1))
    return torch.maximum(squared.clamp(min=0.0).sqrt(), most / CANCELLATION).where(right, most).unsqueeze(0)


def _lengths(vectors: Tensor) -> Tensor:
    """Of the last axis, and never less than the truth: squares of numbers below 1e-19 vanish in float32."""
    many = vectors.shape[-1] > LONG  # whose squares float32 cannot add up
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64 if many else None).add_(TINY)


def _along(bad: Tensor, values: Tensor) -> Tensor:
    """A mask (n,) in a shape to go with values (n, ...)."""
    return bad.view(-1, *[1] * (values.dim() - 1))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (k, m, j) times b (k, j, n), the same to the last bit whatever k is.

    With a single row or column BLAS would take another path for one matrix than for several; with two it does not.
    """
    m, n = a.shape[1], b.shape[2]
    if m == 1:
        a = F.pad(a, (0, 0, 0, 1))
    if n == 1:
        b = F.pad(b, (0, 1))
    return torch.bmm(a, b)[:, :m, :n].contiguous()


# ---- layers ----------------------------------------------------------------------------------------


class Layer:
    """One use of one operation with parameters: computes it for every client, and makes gradients of what it has seen.

    Attributes:
        names: of the parameters it takes, None where it takes none.
        clients: how many are folded into the batch axis.
        x, g: what went in, and the gradient that came back, both without history.
    """

    def __init__(self, clients: int, names: Sequence[str | None], parameters: Sequence[Tensor | None]) -> None:
        self.clients, self.names, self.parameters = clients, names, parameters
        self.x: Tensor
        self.g: Tensor | None = None  # stays None where the output does not touch the loss

    def forward(self, x: Tensor) -> Tensor:
        """Under autograd, for the gradient of x; parameters have none."""
        raise NotImplementedError

    def gradients(self, g: Tensor) -> list[tuple[str, Gradients]]:
        """For each parameter, one gradient for each record, from what came back."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        assert self.parameters[0] is not None
        return self.parameters[0]

    def _named(self, weight: Callable[[], Gradients], bias: Callable[[], Gradients]) -> list[tuple[str, Gradients]]:
        found = zip(self.names, (weight, bias), strict=False)
        return [(name, gradients()) for name, gradients in found if name is not None]


class Linear(Layer):
    """F.linear on (n, ..., i): any positions between the record and the vector."""

    def forward(self, x: Tensor) -> Tensor:
        flat, bias = x.reshape(self.clients, -1, x.shape[-1]), self.parameters[1]
        if bias is None or min(*flat.shape[1:], self.weight.shape[1]) == 1:
            out = _product(flat, self.weight.mT)
            out = out if bias is None else out + bias.unsqueeze(1)
        elif x.requires_grad:
            out = torch.baddbmm(bias.unsqueeze(1), flat, self.weight.mT)
        else:  # Weights on the left are a third faster, but would give the gradient of x a layout that slows the rest.
            out = torch.baddbmm(bias.unsqueeze(2), self.weight, flat.mT).mT.contiguous()
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[2]))

    def gradients(self, g: Tensor) -> list[tuple[str, Gradients]]:
        g = g.reshape(len(g), -1, g.shape[-1]).contiguous()
        x = self.x.reshape(len(self.x), -1, self.x.shape[-1])
        if g.shape[1] > 1:
            return self._named(lambda: Outer(x, g, _same), lambda: Whole.of(g.sum(dim=1)))
        lengths = _lengths(g)
        return self._named(
            lambda: Outer(x, g, _same, lengths), lambda: Whole(g.transpose(0, 1), _only, lengths.squeeze(1))
        )


class Convolution(Layer):
    """F.conv2d without groups; a one-dimensional one comes with a height of 1.

    Everything is kept with the channels last, if the module bears it: that is what the fast kernels want, and
    max-pooling above all.
    """

    def __init__(
        self, clients: int, names: Sequence[str | None], parameters: Sequence[Tensor | None],
        stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], laid: Callable[[Tensor], Tensor],
    ) -> None:  # fmt: skip
        super().__init__(clients, names, parameters)
        self.stride, self.padding, self.dilation, self.laid = stride, padding, dilation, laid

    def forward(self, x: Tensor) -> Tensor:
        bias, images = self.parameters[1], self.laid(x)
        biases = [None] * self.clients if bias is None else bias.unbind()
        by_client = [images] if self.clients == 1 else images.chunk(self.clients)
        each = zip(by_client, self.weight.unbind(), biases, strict=True)
        outputs = [F.conv2d(*one, self.stride, self.padding, self.dilation) for one in each]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def gradients(self, g: Tensor) -> list[tuple[str, Gradients]]:
        positions = g.permute(0, 2, 3, 1)  # (n, height, width, o)
        kernel, bias = self._compiled(positions) or (None, None)
        return self._named(
            lambda: kernel or self._kernel_gradients(positions),
            lambda: Whole.of(positions.sum(dim=(1, 2)) if bias is None else bias),
        )

    def _compiled(self, g: Tensor) -> tuple[Whole, Tensor] | None:
        """The gradients of the kernel and of the bias (n, o), by the compiled kernel; None: it has no such form."""
        o, c, kh, kw = self.weight.shape[1:]
        n, t = g.shape[0], g.shape[1:3].numel()
        simple = self.dilation[1] == 1 and g.device.type == "cpu" and g.dtype == torch.float32
        if not LEVEL or not simple or _few(t, c * kh * kw, o):
            return None
        values, bias, lengths = g.new_empty(n, kh, kw, c, o), g.new_empty(n, o), g.new_empty(n, dtype=torch.float64)
        images, g = self.x.permute(0, 2, 3, 1).contiguous(), g.contiguous()
        if not _convolution.gradients(
            images.numpy(), g.numpy(), values.numpy(), bias.numpy(), lengths.numpy(),
            self.stride, self.padding, self.dilation[0], LEVEL,
        ):  # fmt: skip
            return None
        return Whole(values.unsqueeze(0), lambda v: v[0].permute(0, 4, 3, 1, 2), lengths), bias

    def _kernel_gradients(self, g: Tensor) -> Gradients:
        """For g (n, height, width, o)."""
        o, c, kh, kw = self.weight.shape[1:]
        n, height, width = g.shape[:3]
        t, i, g = height * width, c * kh * kw, g.flatten(1, 2)
        above, beside = self.padding
        padded = F.pad(self.x.permute(0, 2, 3, 1), (0, 0, beside, beside, above, above))
        columns = _windows(padded, 2, kw, width, self.stride[1], self.dilation[1])  # (n, h, width, kw, c)
        if _few(t, i, o):
            # (n, height, kh, width, kw, c)
            patches = _windows(columns, 1, kh, height, self.stride[0], self.dilation[0])
            x = patches.transpose(2, 3).reshape(n, t, i)
            return Outer(x, g, lambda v: v.unflatten(2, (kh, kw, c)).permute(0, 1, 4, 2, 3))
        # Otherwise one product for each row of the kernel, on views of what is unfolded along the width only: the
        # whole unfolding would be kh times as large, and copying it costs more than the products.
        flat = columns.flatten(3).contiguous()
        values = g.new_empty(kh, n, kw * c, o)
        for r in range(kh):
            row = flat[:, r * self.dilation[0] :][:, : (height - 1) * self.stride[0] + 1 : self.stride[0]]
            torch.bmm(row.reshape(n, t, kw * c).mT, g, out=values[r])
        return Whole(values, lambda v: v.unflatten(2, (kw, c)).permute(1, 4, 3, 0, 2))


def channels_last(x: Tensor) -> Tensor:
    """Images with the channels innermost. With a single channel the strides must say so, or nothing follows suit."""
    x = x.contiguous(memory_format=torch.channels_last)
    if x.shape[1] == 1:
        height, width = x.shape[2:]
        x = x.as_strided(x.shape, (height * width, 1, width, 1))
    return x


def _windows(x: Tensor, dim: int, size: int, count: int, stride: int, dilation: int) -> Tensor:
    """A view of x with axis `dim` as (count, size): window j holds j * stride + (0, ..., size - 1) * dilation."""
    steps = x.stride(dim)
    shape = (*x.shape[:dim], count, size, *x.shape[dim + 1 :])
    strides = (*x.stride()[:dim], steps * stride, steps * dilation, *x.stride()[dim + 1 :])
    return x.as_strided(shape, strides, x.storage_offset())


class Affine(Layer):
    """x * weight + bias along one axis or several, as it ends LayerNorm and GroupNorm; the rest has no parameters.

    Args:
        shape: (1, ...) that the parameters take to be multiplied with a record.
    """

    def __init__(
        self, clients: int, names: Sequence[str | None], parameters: Sequence[Tensor | None], shape: Sequence[int]
    ) -> None:
        super().__init__(clients, names, parameters)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        each = (self.clients, len(x) // self.clients if self.clients > 1 else 1, *self.shape)
        weight, bias = (
            p if p is None else p.reshape(self.clients, 1, *self.shape).expand(each).reshape(-1, *self.shape)
            for p in self.parameters
        )
        out = x if weight is None else x * weight
        return out if bias is None else out + bias

    def gradients(self, g: Tensor) -> list[tuple[str, Gradients]]:
        return self._named(lambda: self._summed(g * self.x), lambda: self._summed(g))

    def _summed(self, values: Tensor) -> Whole:
        """Sums over the positions that share a parameter."""
        shared = [1 + axis for axis, length in enumerate(self.shape) if length == 1 and values.shape[1 + axis] > 1]
        summed = values.sum(dim=shared) if shared else values
        return Whole.of(summed.flatten(1))


class Embedding(Layer):
    """F.embedding of whole numbers (n, ...)."""

    def __init__(
        self, clients: int, names: Sequence[str | None], parameters: Sequence[Tensor | None], padding: int | None
    ) -> None:
        super().__init__(clients, names, parameters)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        words, width = self.weight.shape[1:]
        first = words * torch.arange(self.clients, device=x.device).repeat_interleave(len(x) // self.clients)
        rows = x.reshape(len(x), -1) + first.unsqueeze(1)
        if ((x < 0) | (x >= words)).any():
            raise IndexError("index out of range in self")
        return self.weight.reshape(-1, width)[rows].reshape(*x.shape, width)

    def gradients(self, g: Tensor) -> list[tuple[str, Gradients]]:
        assert self.names[0] is not None
        words, width = self.weight.shape[1:]
        ids = self.x.reshape(len(self.x), -1).long()
        g = g.reshape(len(ids), -1, width)
        if self.padding is not None:
            g = g.masked_fill((ids == self.padding % words).unsqueeze(2), 0.0)
        return [(self.names[0], Lookup(ids, g, (words, width)))]
