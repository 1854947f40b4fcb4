"""Nearest records in a public space of features: extractors by name, exact neighbours, and what they vote for.

Whoever publishes votes of nearest records rests on this: with one record added, removed or replaced, at most one of the
k nearest of a query is exchanged for another. It holds if all other records keep their features and their order, to the
last bit. So

- a record's features do not depend on the records beside it: an extractor works in pieces of one length, and what it
  does to a record in one place of a piece it does in every other (the user's own are tried, and refused otherwise);
- features are rounded to a grid that the public queries alone decide, and distances on it are whole numbers that
  float64 holds exactly: no order of summation, block or thread can change which record is nearer;
- equally near records come in the client's own order, which does not change when another one goes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairveil.errors import UserError, unknown
from fairveil.options import shown
from fairveil.plugins import load_object
from fairveil.streams import Stream

Features = tuple[int, ...]
Function = Callable[[Tensor], Tensor]

PIECE = 128  # records whose features are extracted at once
EXACT = 53  # bits: whole numbers up to 2^53 are exact in float64
BLOCK = 1 << 22  # distances held at a time: 32 MB

BINS = 9  # orientations of HOG: 0, 20, ..., 160 degrees
ACROSS = 5  # cells along the shorter side of an image, about
SMALLEST = 8  # pixels along it
CLIP = 0.2  # what one component of a block counts at most (L2-Hys)
FLAT = 1e-5  # length below which a block counts as without any gradient


# ---- extractors ------------------------------------------------------------------------------------


class Extractor:
    """Public features phi of records, each by itself; made by `find_extractor`.

    Attributes:
        features: shape of a record.
        width: d, how many features it has.
    """

    def __init__(self, function: Function, features: Features, width: int) -> None:
        self.features, self.width = features, width
        self._function = function

    def __call__(self, x: Tensor) -> Tensor:
        """The features (n, d), float32, of records (n, *features): of each the same, to the last bit, whatever the
        others are, how many there are and where it stands among them."""
        if tuple(x.shape[1:]) != self.features:
            raise ValueError(f"records of shape {tuple(x.shape[1:])} for an extractor of {self.features}")
        found = torch.empty(len(x), self.width)
        for start in range(0, len(x), PIECE):
            rows = x[start : start + PIECE]
            found[start : start + PIECE] = _of_piece(self._function, rows)[: len(rows)]
        return found


@functools.cache  # clients ask for the same one again and again
def find_extractor(name: str, features: Features) -> Extractor:
    """The extractor of this name for records of shape `features`.

    Names are those of FEATURES, or "package.module:Name" for the user's own: Name(features) gives a function or a
    module that maps (n, *features), float32, to (n, d). A module is put into evaluation mode, and weights that it draws
    are drawn alike every time. That they tell nothing about private records is the user's claim.

    Raises:
        UserError: an unknown name, records that it does not fit, or features of a record that are no finite numbers,
            not the same each time, or not the record's own.
    """
    if ":" not in name:
        if name not in FEATURES:
            raise unknown("algorithm.features", name, FEATURES)
        function = FEATURES[name](features)
        return Extractor(function, features, _of_piece(function, torch.zeros(1, *features)).shape[1])
    factory = load_object("algorithm.features", name)
    function = _built(name, factory, features)
    trial = torch.from_numpy(Stream("features").numpy.random((PIECE, *features), dtype="float32"))
    found = _tried(name, function, trial)
    if not (torch.equal(found, _tried(name, function, trial)) and _alike(name, factory, trial, found)):
        raise _fickle(name)
    _refuse_mixing(name, function, trial, found)
    if not torch.equal(found, _tried(name, function, trial)):  # it remembers what it was given in the meantime
        raise _fickle(name)
    return Extractor(function, features, found.shape[1])


@torch.no_grad()
def _of_piece(function: Function, rows: Tensor) -> Tensor:
    """Features (PIECE, d) of a piece that begins with `rows` and is filled up with zeros.

    Always of one length: beside fewer records a network rounds in another way. And always in memory of its own: where
    that begins can matter too, and a function that writes into its input shall not write into the records.
    """
    piece = torch.zeros(PIECE, *rows.shape[1:])
    piece[: len(rows)] = rows
    return function(piece)


def _built(name: str, factory: Callable[[Features], object], features: Features) -> Function:
    """The user's function; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(Stream("features", name).numpy.integers(2**63)))
        try:
            function = factory(features)
        except UserError:
            raise
        except Exception as error:  # a user's code can fail in any way
            raise UserError(
                f"algorithm.features = {shown(name)} could not be built.",
                f"It is called as Name(features) with the shape {features}, and said: {_said(error)}. Nothing was run.",
                "class Name(torch.nn.Module): def __init__(self, features): ...",
            ) from error
    if not callable(function):
        raise UserError(
            f"algorithm.features = {shown(name)} did not give a function but {type(function).__name__}.",
            "Name(features) must give what maps records (n, *features) to features (n, d). Nothing was run.",
            "derive your class from torch.nn.Module, or return a function",
        )
    return function.eval() if isinstance(function, nn.Module) else function


def _tried(name: str, function: Function, trial: Tensor) -> Tensor:
    """The features (PIECE, d), float32, that the user's function gives for plain records, if they are such."""
    try:
        found = _of_piece(function, trial)
    except Exception as error:
        raise UserError(
            f"algorithm.features = {shown(name)} does not fit records of shape {tuple(trial.shape[1:])}.",
            f"{PIECE} records were refused: {_said(error)}. Nothing was run.",
            "a function that takes (n, *features), float32",
        ) from error
    given = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    fits = isinstance(found, Tensor) and found.dim() == 2 and len(found) == PIECE and found.shape[1] > 0
    if not (fits and found.is_floating_point()):
        raise UserError(
            f"algorithm.features = {shown(name)} gives {given}.",
            f"{PIECE} records must give ({PIECE}, d), floating point: d features for each. Nothing was run.",
            "flatten what you have of each record: output.flatten(1)",
        )
    if not found.isfinite().all():
        raise UserError(
            f"algorithm.features = {shown(name)} gives features that are not finite.",
            "It was given plain records with values within [0, 1]; distances could not be told. Nothing was run.",
            "a function that divides by nothing that can be 0",
        )
    return found.float()


def _alike(name: str, factory: Callable[[Features], object], trial: Tensor, found: Tensor) -> bool:
    """Whether it gives the same when built anew, as each process of a run does."""
    return torch.equal(found, _tried(name, _built(name, factory, tuple(trial.shape[1:])), trial))


def _fickle(name: str) -> UserError:
    return UserError(
        f"algorithm.features = {shown(name)} answers differently each time.",
        "It draws randomness or remembers earlier records, so that a record would move the features of others: the\n"
        "price of a vote would not hold, nor could a run be repeated. Nothing was run.",
        "a function of the record alone, with fixed weights",
    )


def _refuse_mixing(name: str, function: Function, trial: Tensor, found: Tensor) -> None:
    """Refuse a function that gives a record other features, if only by a bit, beside others or in another place."""
    rows = [1, *range(0, PIECE, 17)]
    pairs = [(found[row], _tried(name, function, trial[row : row + 1])[0]) for row in rows]
    pairs += [(found.roll(by, 0), _tried(name, function, trial.roll(by, 0))) for by in (1, 2, 5, 64)]
    for extreme in (math.nan, 1e30, -1e30):  # some mixing shows only then
        beside = trial.clone()
        beside[1::2] = extreme
        try:
            pairs.append((found[::2], _of_piece(function, beside)[::2].float()))
        except Exception:  # such a record stops the run, and so tells nothing to those beside it
            continue
    if all(torch.equal(a, b) for a, b in pairs):
        return
    close = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)
    raise UserError(
        f"algorithm.features = {shown(name)} "
        f"{'rounds a record by its place in' if close else 'mixes the records of'} a batch.",
        "A record would move the features of others, and so more than the one neighbour that is paid for. "
        "Nothing was run.",
        "import fairveil before torch multiplies its first matrices (or leave MKL_CBWR as it sets it)"
        if close
        else "a function of each record by itself, without statistics of the batch",
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or 'nothing').splitlines()[0]}"


# ---- features --------------------------------------------------------------------------------------


def raw(features: Features) -> Function:
    """The records as they are, flattened: pixels, or features that were computed before."""
    return lambda x: x.flatten(1)


class HOG:
    """Histograms of oriented gradients of images (channels, height, width), at least 8x8.

    Dalal and Triggs, "Histograms of Oriented Gradients for Human Detection" (2005): centred differences [-1, 0, 1] of
    the channel where they are strongest; nine unsigned orientations; cells; overlapping blocks of 2x2 cells, each
    brought to length 1, clipped at 0.2 and brought to length 1 again (L2-Hys). A pixel's gradient is shared between the
    four nearest cells, and between the two nearest orientations.

    A cell is a fifth of the shorter side, 2 pixels at least: 2, 3, 5 and 6 for 8x8, 16x16, 28x28 and 32x32, which gives
    324 features for the first and 576 for the others. Pixels left over lie around the cells.

    Departure: a gradient is shared between orientations as the vector it is, g = alpha u_b + beta u_(b+1), in place of
    by its angle; shares differ by less than 0.008 of its length. That needs no arc tangent: only sums, products,
    quotients and roots are taken, one after the other, which every processor rounds in one way. (Sums along an axis are
    not among them: torch adds in an order that depends on the place in memory.)
    """

    def __init__(self, features: Features) -> None:
        if len(features) != 3 or min(features[1:]) < SMALLEST:
            raise UserError(
                f'algorithm.features = "hog" does not fit records of shape {features}.',
                f"It needs images (channels, height, width) of {SMALLEST}x{SMALLEST} pixels or more. Nothing was run.",
                'algorithm.features = "raw"',
            )
        self.cell = max(2, min(features[1:]) // ACROSS)

    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, 36 * blocks)."""
        votes = _oriented(*_strongest_gradient(images))
        cells = _pooled(_pooled(votes, self.cell).mT, self.cell).mT  # (n, BINS, rows, columns)
        rows, columns = cells.shape[2] - 1, cells.shape[3] - 1
        corners = [cells[:, :, i : i + rows, j : j + columns] for i in (0, 1) for j in (0, 1)]
        blocks = torch.cat(corners, dim=1)
        return _to_length_one(_to_length_one(blocks).clamp(max=CLIP)).flatten(1)


def _strongest_gradient(images: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pixel, (n, height, width) to the right and down: that of the channel where it is longest."""
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    right = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    x, y = right[:, 0], down[:, 0]
    for other_x, other_y in zip(right.unbind(1)[1:], down.unbind(1)[1:], strict=True):
        longer = other_x * other_x + other_y * other_y > x * x + y * y
        x, y = torch.where(longer, other_x, x), torch.where(longer, other_y, y)
    return x, y


def _oriented(x: Tensor, y: Tensor) -> Tensor:
    """Gradients (n, height, width) as shares of the nearest directions u_b: (n, BINS, height, width).

    g lies between u_(b-1) and u_(b+1), or opposite, if both cross products have one sign. The smaller of them is what
    u_b gets, in units of sin 20 degrees.
    """
    step = math.pi / BINS
    angle = step * torch.arange(-1, BINS + 1, dtype=torch.float64)
    cosine, sine = (f(angle).float().view(-1, 1, 1) for f in (torch.cos, torch.sin))
    cross = cosine * y.unsqueeze(1) - sine * x.unsqueeze(1)  # u x g
    after, before = cross[:, :-2], -cross[:, 2:]
    inside = torch.maximum(torch.minimum(after, before), -torch.maximum(after, before))
    return inside.clamp(min=0) / math.sin(step)


def _pooled(votes: Tensor, cell: int) -> Tensor:
    """Votes (..., size) shared between the two nearest cells each, by distance: (..., size // cell)."""
    count = votes.shape[-1] // cell
    margin = (votes.shape[-1] - count * cell) / 2  # half a pixel, too: the cells lie in the middle
    padded = F.pad(votes, (cell, cell))
    total = torch.zeros(*votes.shape[:-1], count)
    for offset in range(-cell, 2 * cell):  # cell i and pixel i * cell + offset
        share = 1 - abs(offset + 0.5 - margin - cell / 2) / cell
        if share > 0:
            start = cell + offset
            total += share * padded[..., start : start + (count - 1) * cell + 1 : cell]
    return total


def _to_length_one(blocks: Tensor) -> Tensor:
    """Blocks (n, parts, ...) divided by their length; those without gradients stay 0."""
    square = functools.reduce(torch.add, [part * part for part in blocks.unbind(1)])
    return blocks / (square + FLAT**2).sqrt().unsqueeze(1)


FEATURES: dict[str, Callable[[Features], Function]] = {"raw": raw, "hog": HOG}


# ---- neighbours ------------------------------------------------------------------------------------


def nearest(queries: Tensor, records: Tensor, k: int) -> Tensor:
    """The k records nearest to each query, the nearest first; equally near ones in the order of the records.

    Features are rounded to a grid that is public: 2^b steps to either side of 0, up to the power of two that holds all
    queries. What lies beyond, of the records, counts as its end, and what is no number as 0. With 4 d 4^b <= 2^53 no
    squared distance exceeds 2^53, nor does any sum on the way to it, so that all are exact: b is 21 for 256 features,
    20 for 800. Neither the grid nor the distance of a record depends on other records.

    Args:
        queries: public features (Q, d), float32.
        records: private features (n, d), float32.
        k: at least 1.

    Returns:
        Rows of `records`: (Q, min(k, n)), int64.
    """
    if k < 1 or queries.dim() != 2 or records.dim() != 2 or queries.shape[1] != records.shape[1]:
        raise ValueError(f"{k} nearest of {tuple(records.shape)} to {tuple(queries.shape)}: k >= 1, rows of one width")
    count = min(k, len(records))
    if not count:
        return torch.empty(len(queries), 0, dtype=torch.int64)
    bits = (EXACT - 2 - (queries.shape[1] - 1).bit_length()) // 2
    largest = queries.abs().nan_to_num_(0.0, 0.0).max() if queries.numel() else 0.0  # of finite ones
    _, exponent = math.frexp(float(largest))
    asked, held = (_on_grid(features, bits, exponent) for features in (queries, records))
    lengths = (held * held).sum(dim=1)
    blocks = asked.split(max(1, BLOCK // len(held)))
    # |r|^2 - 2 q.r is the distance, less what is the same for all records
    return torch.cat([_smallest(torch.addmm(lengths, block, held.T, alpha=-2), count) for block in blocks])


def _on_grid(features: Tensor, bits: int, exponent: int) -> Tensor:
    """Whole numbers within +-2^bits, float64: the features in units of 2^(exponent - bits)."""
    steps = features.double() * 2.0 ** (bits - exponent)
    return steps.nan_to_num_(nan=0.0).clamp_(-(2.0**bits), 2.0**bits).round_()


def _smallest(distance: Tensor, count: int) -> Tensor:
    """Columns of the smallest values of each row (rows, count), the smallest first, equals from left to right."""
    last = distance.topk(count, largest=False).values.amax(dim=1, keepdim=True)
    nearer, level = distance < last, distance == last
    room = count - nearer.sum(dim=1, keepdim=True)  # which of equals topk takes is left open: here the first
    column = (nearer | (level & (level.cumsum(dim=1) <= room))).nonzero()[:, 1].view(-1, count)
    return column.gather(1, distance.gather(1, column).argsort(dim=1, stable=True))


def neighbour_counts(labels: Tensor, index: Tensor, classes: int) -> Tensor:
    """How many of the neighbours `index` (Q, m) have each label: (Q, classes), int64, for labels (n,)."""
    counts = torch.zeros(len(index), classes, dtype=torch.int64)
    return counts.scatter_add_(1, labels[index], torch.ones_like(index))
