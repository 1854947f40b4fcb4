"""Per-record clipped gradient sums: the one place where a record meets its bound.

Two ways lead to them. Book-keeping (see bookkeeping.py) is the faster one and knows the usual layers; vmap knows
nearly all. Which one a model takes is found out once, by trying it, and whichever it is has agreed with plain autograd
on each record alone; a model on which they disagree is refused. (Objectives that only vmap knows, see `objective_sum`,
are tried when they are met.)
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import grad, vmap

from fairveil.errors import UserError
from fairveil.options import shown
from fairveil.privacy.bookkeeping import Book, NoRule, Tape, Watch
from fairveil.privacy.layers import TINY, Convolution, Gradients, channels_last

if TYPE_CHECKING:
    from fairveil.data.federation import Records
    from fairveil.models import Model

# Records whose gradients are held at once, so that memory does not grow with the batch: at most so many of a client,
# and at most so many numbers in all (64 gradients of a ResNet-18 of 11 million parameters would need 3 GB).
MICRO_BATCH, MICRO_NUMBERS = 128, 1 << 26
GRAIN = 8  # batches of small models are padded to a multiple of this, so that clients can share a call
# A record is clipped to a little less than its bound, since sums of float32 numbers are rounded. The sum of 128
# vectors of length c is off by at most 128^2 c / 2^24 = c / 1024; so are those with and without the record. The rest
# is for what is not proved: sums of products over many positions, and the last bits of a record's own gradient, which
# depend on how many records are beside it. Where these bits are all there is, it is not enough: see sharp-edges.md.
ROUNDING = 1 - 2**-8


@dataclass(frozen=True)
class ClippedSums:
    """Attributes: total (clients, p), the sums of clipped gradients; how many records were clipped, or left out.

    Sums of more than MICRO_BATCH records are float64: in float32 the rounding of a long sum would exceed the bound, by
    4% for 100,000 aligned gradients.
    """

    total: Tensor
    clipped: Tensor  # (clients,)
    not_finite: Tensor  # (clients,)


@dataclass(frozen=True)
class Path:
    """How the per-record gradients of a model are had.

    Attributes:
        book: if book-keeping can follow the model; else vmap does.
        obstacle: why it cannot, in words.
        numbers: held for one record: what its layers write down, and its gradients.
        grain: batches are padded to a multiple of this.
        together: whether several clients may share a call: the result must be the same to the last bit.
    """

    book: Book | None
    obstacle: str | None
    numbers: int
    grain: int = 1
    together: bool = False

    def padded(self, length: int) -> int:
        """The length of a batch in a call. It depends on the client's own alone, and so do the bits of the result."""
        return -(-length // self.grain) * self.grain


# The client's number, the rows of a micro-batch of its batch, and their coefficients if there are any.
_Part = tuple[int, Tensor, Tensor | None]


def clipped_sums(
    model: Model, weights: Tensor, records: Sequence[Records], drawn: Sequence[Tensor], clip_norm: float,
    coefficients: Sequence[Tensor] | None = None,
) -> ClippedSums:  # fmt: skip
    """For each client the sum over its drawn records of clip(gradient of the record's loss, clip_norm).

    A record whose gradient is not finite contributes zero and is counted: it must not break the bound for the
    others, and NaN times zero would be NaN. What a client gets does not depend on the other clients of the call.

    Args:
        weights: each client's flat parameters (clients, p).
        records: what each client holds.
        drawn: the rows of each client's batch; there may be none.
        coefficients: by which each drawn record's gradient is multiplied before it is clipped, from 0 on; None: 1.
    """
    path = path_of(model)
    at_once = max(1, min(MICRO_BATCH, MICRO_NUMBERS // path.numbers))
    calls: dict[tuple[int, bool], list[_Part]] = defaultdict(list)  # micro-batches that may share a call
    for client, rows in enumerate(drawn):
        count, own = rows.shape[0], None if coefficients is None else coefficients[client]
        if count > at_once:
            for part in _split(client, rows, own, at_once):
                calls[path.padded(part[1].shape[0]), True].append(part)
        elif count:
            calls[path.padded(count), False].append((client, rows, own))
    groups = []
    for (length, long), parts in calls.items():
        many = max(1, MICRO_NUMBERS // (length * path.numbers)) if path.together else 1
        groups += [(length, long, parts[first : first + many]) for first in range(0, len(parts), many)]
    if len(groups) == 1 and len(groups[0][2]) == len(drawn) and not groups[0][1]:
        return _called(model, path, weights, records, *groups[0], clip_norm)  # as it mostly is: nothing to add up
    exact = path.book is None or any(long for _, long, _ in groups)
    total = torch.zeros_like(weights, dtype=torch.float64 if exact else weights.dtype)
    clipped, not_finite = torch.zeros(2, len(weights), dtype=torch.int64)
    for length, long, parts in groups:
        clients = [client for client, _, _ in parts]
        sums = _called(model, path, weights[clients], records, length, long, parts, clip_norm)
        for row, client in enumerate(clients):  # a client may be there twice
            total[client] += sums.total[row]
            clipped[client] += sums.clipped[row]
            not_finite[client] += sums.not_finite[row]
    return ClippedSums(total, clipped, not_finite)


def _split(client: int, rows: Tensor, own: Tensor | None, at_once: int) -> Iterator[_Part]:
    """The micro-batches of a long batch, each with its coefficients if there are any."""
    for first in range(0, len(rows), at_once):
        some = slice(first, first + at_once)
        yield client, rows[some], None if own is None else own[some]


def _called(
    model: Model, path: Path, weights: Tensor, records: Sequence[Records], length: int, long: bool,
    parts: Sequence[_Part], clip_norm: float,
) -> ClippedSums:  # fmt: skip
    """One call, for micro-batches of one padded length; weights are those of these clients.

    Args:
        long: each is one of several that are added up. Removing a record shifts the others from one to the next, and
            every sum is rounded anew, so these are float64.
    """
    x, y, present = _gathered([(records[client], rows) for client, rows, _ in parts], length)
    x, y = x.to(weights.device), y.to(weights.device)
    if path.book is None:
        return _by_vmap(model, weights[0], x[0], y[0], clip_norm, parts[0][2])
    try:
        return _by_book(
            model, path.book, weights, x, y, present, clip_norm, torch.float64 if long else weights.dtype,
            _padded([own for _, _, own in parts], length),
        )  # fmt: skip
    except NoRule as obstacle:
        raise UserError(
            f"model.name = {shown(model.spec.name)} does with these records what it did not do with others.",
            f"There is no rule for {obstacle}; at the start, with a few random records, there was no need of one.",
            "a model of layers that treat each record apart, whatever is in it",
        ) from obstacle


def _padded(coefficients: Sequence[Tensor | None], length: int) -> NDArray[np.float64] | float:
    """The coefficients (clients, length) of micro-batches, zero where there is no record; 1: they have none."""
    padded = np.zeros((len(coefficients), length))
    for row, own in zip(padded, coefficients, strict=True):
        if own is None:  # then of none
            return 1.0
        row[: len(own)] = own.cpu().numpy()
    return padded


def _gathered(parts: Sequence[tuple[Records, Tensor]], length: int) -> tuple[Tensor, Tensor, NDArray[np.bool_] | None]:
    """The records (clients, length, ...), their targets, and which of them count; None: all.

    The others are there to make all batches equally long: they repeat a drawn record of their client, with no weight.
    """
    present, index = None, torch.cat([rows for _, rows in parts]).cpu().numpy()
    if index.size == len(parts) * length:
        index = index.reshape(len(parts), length)
    else:
        size = np.array([rows.shape[0] for _, rows in parts])
        present = np.arange(length) < size[:, None]
        drawn, index = index, np.repeat(index[size.cumsum() - size], length).reshape(present.shape)
        index[present] = drawn
    x, y = _picked([records for records, _ in parts], index)
    return x, y, present


def _picked(several: Sequence[Records], index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Rows (clients, length) of each client's records; all at once, if these lie side by side."""
    first = several[0]
    whole = first.within and first.within[0]
    starts = [records.within[1] for records in several if records.within and records.within[0] is whole]
    if whole and len(starts) == len(several):
        rows = torch.from_numpy(index + np.array(starts)[:, None]).flatten().to(whole.x.device)
        x, y = (t.index_select(0, rows).view(*index.shape, *t.shape[1:]) for t in (whole.x, whole.y))
        return x, y
    x, y = (t.new_empty((*index.shape, *t.shape[1:])) for t in (first.x, first.y))
    each = torch.from_numpy(index).to(first.x.device)
    for records, rows, into_x, into_y in zip(several, each, x.unbind(), y.unbind(), strict=True):
        torch.index_select(records.x, 0, rows, out=into_x)
        torch.index_select(records.y, 0, rows, out=into_y)
    return x, y


def _by_book(
    model: Model, book: Book, weights: Tensor, x: Tensor, y: Tensor, present: NDArray[np.bool_] | None,
    clip_norm: float, dtype: torch.dtype, coefficient: NDArray[np.float64] | float = 1.0,
) -> ClippedSums:  # fmt: skip
    """One call of the fast path: weights (clients, p), x (clients, length, ...); sums are made in this type.

    A gradient g with coefficient k becomes min(k, clip_norm / |g|) g: that is k g, clipped.
    """
    gradients = _written(model, book, weights, x, y).gradients()
    # In numpy: a few hundred numbers take it less time than torch takes to begin.
    norm = _norms(gradients, math.prod(y.shape[:2])).reshape(y.shape[:2])
    # A norm so far above the bound would need a factor that float32 has no digits for: it is as good as infinite.
    used = finite = norm <= min(clip_norm * 2.0**100, sys.float_info.max)
    not_finite = np.zeros(len(norm), np.int64)
    if not finite.all():
        bad = torch.from_numpy(~finite).to(weights.device).flatten()
        gradients = {name: one.without(bad) for name, one in gradients.items()}
        not_finite = (~finite if present is None else ~finite & present).sum(axis=1)
    if present is not None:
        used = finite & present
    bounded = np.where(finite, norm, 1.0)  # infinity over infinity would be no number
    factor = np.where(used, np.minimum(clip_norm * ROUNDING / bounded, coefficient), 0.0)
    made = torch.empty_like if len(gradients) == len(model.names) else torch.zeros_like
    total = made(weights, dtype=dtype)
    _summed(model, gradients, torch.from_numpy(factor).to(weights.device, dtype), total)
    clipped = ((coefficient * bounded > clip_norm) & used).sum(axis=1)
    return ClippedSums(total, torch.from_numpy(clipped), torch.from_numpy(not_finite))


def _norms(gradients: Mapping[str, Gradients], records: int) -> NDArray[np.float64]:
    """The norm of each record's gradient over all parameters (records,)."""
    norms = [one.norms() for one in gradients.values()] or [torch.zeros(1, records)]
    return np.sqrt(np.square(torch.cat(norms).cpu().numpy(), dtype=np.float64).sum(axis=0)) + TINY


def _summed(model: Model, gradients: Mapping[str, Gradients], factor: Tensor, total: Tensor) -> Tensor:
    """Write the sums of the gradients, each times its factor (clients, rows), into total (clients, p)."""
    parts = model.unflatten(total)
    for name, one in gradients.items():
        one.write_sum(parts[name], factor)
    return total


def _written(model: Model, book: Book, weights: Tensor, x: Tensor, y: Tensor) -> Tape:
    return book.write(model.unflatten(weights), x.flatten(0, 1), y.flatten(0, 1))


def _by_vmap(
    model: Model, weights: Tensor, x: Tensor, y: Tensor, clip_norm: float, coefficient: Tensor | None
) -> ClippedSums:
    """The same by vmap, for one client; float64 throughout, since speed is lost anyway."""
    return _clipped(record_gradients(model, weights, x, y), clip_norm, coefficient=coefficient)


def _clipped(
    gradients: Tensor, clip_norm: float, extra: Tensor | None = None, coefficient: Tensor | None = None
) -> ClippedSums:
    """The sum of explicit gradients (n, p), each with what is added to it, times its coefficient (n,), clipped."""
    if extra is not None:
        gradients = gradients + extra
    norm = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    finite = torch.isfinite(norm)
    most = torch.ones_like(norm) if coefficient is None else coefficient.to(norm)
    factor = torch.where(finite, torch.minimum(clip_norm * ROUNDING / norm, most), 0.0)
    if not finite.all():
        gradients[~finite] = 0.0
    total = (factor @ gradients.to(torch.float64)).unsqueeze(0)
    clipped = (most * norm)[finite] > clip_norm
    return ClippedSums(total, clipped.sum().view(1).cpu(), (~finite).sum().view(1).cpu())


def objective_sum(
    model: Model, weights: Tensor, records: Records, drawn: Tensor, clip_norm: float, *,
    copied: Callable[[Tensor], Tensor] | None = None, extra: Tensor | None = None,
) -> ClippedSums:  # fmt: skip
    """The clipped sum of one client, by vmap, of gradients that book-keeping does not know.

    Args:
        weights: (p,).
        copied: records (n, ...) -> copies of each (n, copies, ...), over which its gradient is averaged.
        extra: (p,) added to every record's gradient before it is clipped.
    """
    at_once = max(1, min(MICRO_BATCH, MICRO_NUMBERS // model.parameters))
    total = torch.zeros(1, model.parameters, dtype=torch.float64)
    clipped, not_finite = torch.zeros(2, 1, dtype=torch.int64)
    for rows in drawn.split(at_once) if len(drawn) else ():
        x, y = records.x[rows], records.y[rows]
        gradients = record_gradients(model, weights, copied(x) if copied else x, y, copied is not None)
        part = _clipped(gradients, clip_norm, extra)
        total, clipped, not_finite = total + part.total, clipped + part.clipped, not_finite + part.not_finite
    return ClippedSums(total, clipped, not_finite)


@torch.no_grad()
def exact_losses(model: Model, weights: Tensor, records: Records, drawn: Tensor) -> Tensor:
    """The loss of each drawn record (n,), computed in float64: its last bits depend on the records beside it.

    What is multiplied by a function of a loss is moved by these bits. In float64 they are nothing; in float32 a large
    gradient with a small coefficient could move by more than there is room for (ROUNDING).

    Args:
        weights: (p,).

    Raises:
        UserError: the model does not compute in float64.
    """
    fixed = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    parameters = {name: _double(value) for name, value in (fixed | model.unflatten(weights)).items()}
    losses = [torch.zeros(0, dtype=torch.float64)]
    for rows in drawn.split(MICRO_BATCH) if len(drawn) else ():
        try:
            own = model.losses(parameters, _double(records.x[rows]), _double(records.y[rows]))
        except RuntimeError as error:
            raise UserError(
                f"model.name = {shown(model.spec.name)} does not compute in float64.",
                f"Records are weighted by their losses, which must be precise: {str(error).splitlines()[0]}",
                "a model that takes the type of its parameters and records, instead of asking for float32",
            ) from error
        losses.append(own.to(torch.float64))
    return torch.cat(losses)


def _double(value: Tensor) -> Tensor:
    return value.to(torch.float64) if value.is_floating_point() else value


def record_gradients(model: Model, weights: Tensor, x: Tensor, y: Tensor, copies: bool = False) -> Tensor:
    """The gradient of each record's loss, (n, p), by vmap: exact for any module that treats records apart.

    With `copies` x is (n, copies, ...), and a record's loss is the mean over its copies.
    """

    def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        if copies:
            return model.losses(parameters, one_x, one_y.expand(len(one_x), *one_y.shape)).mean()
        return model.losses(parameters, one_x.unsqueeze(0), one_y.unsqueeze(0)).squeeze(0)

    by_name = vmap(grad(loss), in_dims=(None, 0, 0), randomness="error")(model.unflatten(weights), x, y)
    return torch.cat([by_name[name].reshape(len(y), -1) for name in model.names], dim=1)


# ---- which path ------------------------------------------------------------------------------------

_PATHS: WeakKeyDictionary[Model, Path] = WeakKeyDictionary()


def path_of(model: Model) -> Path:
    """How the model's per-record gradients are had; the first time they are tried against each record alone.

    Raises:
        UserError: they cannot be had, or are not what autograd says.
    """
    path = _PATHS.get(model)
    if path is None:
        path = _PATHS[model] = _tried(model)
    return path


def _tried(model: Model) -> Path:
    """Try the ways in turn on two clients with different models and a few records each."""
    random = torch.Generator().manual_seed(0)
    weights = model.flatten(model.module) + 0.01 * torch.randn(2, model.parameters, generator=random)
    # Twice, with another number of records: an axis that is just as long might pass for theirs.
    trials = [_trial(model, weights, rows, random) for rows in (2, 3)]
    for laid in (channels_last, Tensor.contiguous):
        try:
            book = Book(model.with_loss, model.own, laid)
            with Watch():
                tapes = [_written(model, book, weights, trial.x, trial.y) for trial in trials]
            found = [tape.gradients() for tape in tapes]
            for trial, gradients in zip(trials, found, strict=True):
                rows = trial.y.shape[1]
                only = torch.eye(rows).unsqueeze(1).expand(-1, 2, -1)  # one record of each client at a time
                sums = [_summed(model, gradients, factor, torch.zeros_like(weights)) for factor in only]
                _must_agree(
                    model, torch.stack(sums, dim=1), trial, torch.from_numpy(_norms(gradients, 2 * rows)).view(2, rows)
                )
        except UserError:
            raise
        except Exception as error:  # whatever a module does with stand-ins that no rule foresaw
            obstacle = str(error) if isinstance(error, NoRule) else f"a model that says {type(error).__name__}: {error}"
            continue
        layers, records = tapes[1].layers, math.prod(trials[1].y.shape[:2])
        held = sum(layer.x.numel() + layer.g.numel() for layer in layers if layer.g is not None) // records
        numbers = held + sum(one.numbers for one in found[1].values())
        if any(isinstance(layer, Convolution) for layer in layers):
            return Path(book, None, numbers)  # convolutions gain nothing from sharing a call
        alike = [_alike(model, book, weights, *_records(model, rows, random)) for rows in (GRAIN, 4 * GRAIN)]
        return Path(book, None, numbers, *((GRAIN, True) if all(alike) else (1, False)))
    for trial in trials:
        vmapped = _tried_by_vmap(model, weights, trial, obstacle)
        _must_agree(model, vmapped, trial, torch.linalg.vector_norm(vmapped, dim=2))
    return Path(None, obstacle, model.parameters)


@dataclass(frozen=True)
class _Trial:
    """Records (clients, rows, ...) of two clients, and the gradient (clients, rows, p) of each one alone."""

    x: Tensor
    y: Tensor
    alone: Tensor


def _trial(model: Model, weights: Tensor, rows: int, random: torch.Generator) -> _Trial:
    """Records for which the model has finite gradients, and these.

    Raises:
        UserError: there are none.
    """
    records, y = _records(model, rows, random)
    said = "its loss gives no finite gradient"
    for x in (records, 0.05 * records, records.sigmoid()):
        try:
            each = [model.gradient(weights[k], x[k, i : i + 1], y[k, i : i + 1]) for k in range(2) for i in range(rows)]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            said = f"it said {str(error).splitlines()[0]}"
            continue
        alone = torch.stack(each).view(2, rows, -1)
        if alone.isfinite().all():
            return _Trial(x, y, alone)
    raise UserError(
        f"model.name = {shown(model.spec.name)} could not be tried.",
        f"A few random records were given to it, each alone: {said}.",
        "a model that can be trained from where it starts on ordinary records",
    )


def _records(model: Model, rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random records of two clients (2, rows, ...), with their targets.

    Those that may be texts end in zeros, each from another place on, and the last is empty: a model may treat short
    ones in another way or order. (Of images zeros would leave parts without variance, which GroupNorm blows up.)
    """
    spec, count = model.spec, math.prod(model.spec.features)
    if spec.classes:
        y = torch.randint(2 if spec.several else spec.classes, (2, rows, *spec.target), generator=random)
    else:
        y = torch.randn(2, rows, generator=random)
    x = 2 * torch.randn(2, rows, count, generator=random)
    if len(spec.features) < 3:
        length = (0.4 + 0.6 * torch.rand(2, rows, 1, generator=random)) * count
        x *= torch.arange(count) <= length
        x[1, -1] = 0.0
    return x.view(2, rows, *spec.features), y


def _alike(model: Model, book: Book, weights: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether each client gets the same to the last bit in a call of its own."""

    def total(first: int, last: int) -> Tensor:
        mine, some_x, some_y = (t[first:last] for t in (weights, x, y))
        return _by_book(model, book, mine, some_x, some_y, None, 1.0, weights.dtype).total

    return torch.equal(total(0, 2), torch.cat([total(0, 1), total(1, 2)]))


def _tried_by_vmap(model: Model, weights: Tensor, trial: _Trial, obstacle: str) -> Tensor:
    try:
        return torch.stack([record_gradients(model, weights[k], trial.x[k], trial.y[k]) for k in range(2)])
    except RuntimeError as error:
        name = f"model.name = {shown(model.spec.name)}"
        recurrent = [(n, type(m).__name__) for n, m in model.module.named_modules() if isinstance(m, nn.RNNBase)]
        if recurrent:
            layer, kind = recurrent[0]
            raise UserError(
                f"{name} has no per-record gradients: its layer {layer or 'itself'!r} is nn.{kind}.",
                "Its steps run inside one operation, so that neither book-keeping nor torch.func.vmap can tell what\n"
                "each record did to its parameters. Record-level privacy clips the gradient of each record on its own.",
                "fairveil.networks.LSTMLayer, which is made of linear layers; or a client-level algorithm (dp-fedavg)",
            ) from error
        raise UserError(
            f"{name} has no per-record gradients.",
            f"There is no rule for {obstacle}, and torch.func.vmap could not follow it: {str(error).splitlines()[0]}\n"
            "Record-level privacy clips the gradient of each record on its own.",
            "a model of linear layers, convolutions, LayerNorm, GroupNorm and embeddings, without branches on its\n"
            "data; or a client-level algorithm (dp-fedavg)",
        ) from error


def _must_agree(model: Model, found: Tensor, trial: _Trial, norms: Tensor) -> None:
    """Refuse a model whose records are not treated apart: gradients (clients, rows, p), norms (clients, rows).

    Raises:
        UserError: naming the parameter.
    """
    largest, least = trial.alone.abs().max(), torch.linalg.vector_norm(trial.alone, dim=2)
    pairs = zip(model.unflatten(found).items(), model.unflatten(trial.alone).values(), strict=True)
    # Rounding goes far in a deep network that normalises; a mistake goes further.
    slack = 1e-3 * float(largest) + 1e-6
    wrong = [name for (name, one), own in pairs if not (one - own).abs().max() <= 1e-2 * own.abs().max() + slack]
    if wrong or not (norms >= 0.99 * least - 1e-6).all():
        raise UserError(
            f"model.name = {shown(model.spec.name)} has per-record gradients that disagree with its own.",
            f"Those of {wrong[0] if wrong else 'all parameters'} for several records together differ from those of\n"
            "each record alone, so no bound on them can be trusted.",
            "a model of layers that treat each record apart",
        )
