"""Nearest records: distances in whole numbers, one exchange for one record, features that are a record's own."""

from __future__ import annotations

import math
import sys
import time
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fairveil.errors import UserError
from fairveil.neighbours import PIECE, _oriented, find_extractor, nearest, neighbour_counts


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


# ---- exact neighbours ------------------------------------------------------------------------------


def steps(value: float, bits: int, bound: Fraction) -> int:
    """A feature on the grid, in exact arithmetic; half a step goes to the even one."""
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return int(math.copysign(2**bits, value))
    return max(-(2**bits), min(2**bits, round(Fraction(value) * 2**bits / bound)))


def by_hand(queries: Tensor, records: Tensor, k: int) -> list[list[int]]:
    """The rows of the nearest by sorting (distance, row) in Python's whole numbers."""
    width = queries.shape[1]
    bits = max(b for b in range(30) if 4 * width * 4**b <= 2**53)
    largest = max((abs(Fraction(v)) for v in queries.flatten().tolist() if math.isfinite(v)), default=Fraction(0))
    bound = Fraction(1, 2**200)
    while bound < largest or (bound == largest and largest):
        bound *= 2  # the first power of two above; at a power of two, the next
    bound = bound if largest else Fraction(1)
    asked, held = ([[steps(v, bits, bound) for v in row] for row in x.tolist()] for x in (queries, records))
    found = []
    for q in asked:
        distance = [sum((a - b) ** 2 for a, b in zip(q, r, strict=True)) for r in held]
        found.append(sorted(range(len(held)), key=lambda row: (distance[row], row))[:k])
    return found


@pytest.mark.parametrize("width", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("k", [1, 4, 50])
def test_the_nearest_are_those_of_whole_numbers(width: int, k: int) -> None:
    for seed, scale in enumerate((1.0, 3e-30, 7e20)):
        queries, records = (scale * (drawn(seed + 5 * i, n, width) - 0.3) for i, n in enumerate((6, 23)))
        records[3], records[11], records[17] = records[20], 2.5 * records[11], queries[0]  # twice, outside, at a query
        assert nearest(queries, records, k).tolist() == by_hand(queries, records, k)


@pytest.mark.parametrize("width", [1, 3, 800])
def test_ties_come_in_the_order_of_the_records(width: int) -> None:
    """Coarse features: most distances are equal to others. And the same with the extremes of the grid."""
    random = np.random.default_rng(width)
    for values in ([0.0, 1.0], [-1.0, 1.0], [-0.99999, 0.99999, 1.0, -1.0]):
        queries, records = (torch.tensor(random.choice(values, (n, width)), dtype=torch.float32) for n in (5, 40))
        records[20:] = records[:20].flip(0)
        for k in (1, 3, 20, 39, 40):
            assert nearest(queries, records, k).tolist() == by_hand(queries, records, k)
    alike = torch.ones(9, width)
    assert nearest(alike[:2], alike, 4).tolist() == [[0, 1, 2, 3]] * 2


def test_distances_one_apart_are_told_at_the_end_of_the_grid() -> None:
    """A query in one corner, records in the opposite one, where distances are nearly 2^53; float32 would not tell them.

    Record i lies i % 13 steps of the grid nearer in one of its features, another one each time.
    """
    width, step = 512, 2.0**-21  # 4 * 512 * 4^21 = 2^53
    queries, records = torch.full((1, width), step - 1), torch.full((40, width), 1.0)
    for row in range(40):
        records[row, (7 * row) % width] -= (row % 13) * step
    expected = sorted(range(40), key=lambda row: (-(row % 13), row))
    assert nearest(queries, records, 40).tolist() == [expected] == by_hand(queries, records, 40)


def test_what_is_less_than_half_a_step_apart_is_equally_near() -> None:
    """With 256 features a step is 2^-21 of the bound; a finer grid would tell the last record as the nearest."""
    queries, records = torch.full((1, 256), 0.0), torch.full((4, 256), 0.5)
    queries[0, 0] = 0.75  # the bound is 1
    records -= 2.0**-24 * torch.arange(4).unsqueeze(1)
    assert nearest(queries, records, 4).tolist() == [[0, 1, 2, 3]]
    records -= 2.0**-24 * torch.arange(4).unsqueeze(1)  # now 4 and 6 of them: half a step goes to the even one
    assert nearest(queries, records, 4).tolist() == by_hand(queries, records, 4) == [[3, 0, 1, 2]]


def test_what_is_no_number_counts_as_zero_or_as_the_end_of_the_grid() -> None:
    queries = torch.tensor([[0.0, 0.0], [1.5, 1.5], [math.nan, -math.inf]])
    records = torch.tensor([[1.0, 1.0], [math.nan, math.nan], [math.inf, 1e38], [0.0, -1.9], [-1e30, math.nan]])
    for k in (1, 2, 5):
        assert nearest(queries, records, k).tolist() == by_hand(queries, records, k)
    assert nearest(queries, records, 1).flatten().tolist() == [1, 0, 3]
    assert nearest(torch.full((1, 2), math.nan), records, 1).tolist() == [[1]]  # nothing to tell the grid by


def test_the_grid_is_that_of_the_queries_alone() -> None:
    """A record out of all bounds changes nothing among the others."""
    queries, records = drawn(1, 8, 20), drawn(2, 30, 20)
    far = torch.cat([records, torch.full((1, 20), 3e38)])
    rest = [[row for row in rows if row != 30] for rows in nearest(queries, far, 31).tolist()]
    assert nearest(queries, records, 30).tolist() == rest


def test_neither_blocks_nor_threads_nor_the_rest_of_the_records_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, records = drawn(3, 70, 130), drawn(4, 400, 130)
    records[200:] = records[:200]  # ties everywhere
    whole = nearest(queries, records, 7)
    largest = queries[queries.abs().amax(dim=1).argmax()]  # keeps the grid as it is
    alone = [nearest(torch.stack([query, largest]), records, 7)[0] for query in queries]
    assert torch.equal(whole, torch.stack(alone))
    subset = torch.arange(0, 400, 3)
    order = {int(row): place for place, row in enumerate(subset)}
    every = [[order[row] for row in rows if row in order][:7] for rows in nearest(queries, records, 400).tolist()]
    assert nearest(queries, records[subset], 7).tolist() == every
    monkeypatch.setattr("fairveil.neighbours.BLOCK", 1000)  # two queries at a time
    assert torch.equal(whole, nearest(queries, records, 7))
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole, nearest(queries, records, 7))
    finally:
        torch.set_num_threads(1)


def test_few_records_queries_and_widths() -> None:
    assert nearest(torch.zeros(3, 4), torch.zeros(0, 4), 5).shape == (3, 0)
    assert nearest(torch.zeros(0, 4), torch.zeros(2, 4), 5).shape == (0, 2)
    assert nearest(torch.zeros(3, 4), torch.zeros(2, 4), 5).tolist() == [[0, 1]] * 3
    for queries, records, k in [
        (torch.zeros(3, 4), torch.zeros(2, 5), 1),
        (torch.zeros(3, 4), torch.zeros(2, 4), 0),
        (torch.zeros(4), torch.zeros(2, 4), 1),
        (torch.zeros(3, 4), torch.zeros(2, 4, 1), 1),
    ]:
        with pytest.raises(ValueError, match="rows of one width"):
            nearest(queries, records, k)


def test_two_hundred_clients_take_no_time() -> None:
    """A quarter of them here, in time of the processor; what is asked for is below 2 s for all."""
    queries, records = drawn(5, 500, 576), drawn(6, 300, 576)
    start = time.process_time()
    for _ in range(50):
        nearest(queries, records, 5)
    assert time.process_time() - start < 2


# ---- votes -----------------------------------------------------------------------------------------


def test_counts_by_hand() -> None:
    labels, index = torch.tensor([2, 0, 2, 1]), torch.tensor([[0, 2, 1], [3, 1, 0]])
    assert neighbour_counts(labels, index, 4).tolist() == [[1, 0, 2, 0], [1, 1, 1, 0]]
    empty = neighbour_counts(torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), 3)
    assert empty.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("k", [1, 2, 5, 12])
@pytest.mark.parametrize("coarse", [True, False], ids=["ties", "apart"])
def test_one_record_moves_a_vote_by_no_more_than_sqrt_two_over_k(k: int, coarse: bool) -> None:
    """Brute force: each record removed, each of several added at each place, each replaced, in place and at the end.

    In whole numbers: k^2 times the squared distance is 2 at most, and 1 where the number of voters changes.
    """
    worst = 0
    for seed in range(6):
        random = np.random.default_rng(seed)
        pool = torch.tensor(random.integers(0, 3, (14, 2)) if coarse else random.random((14, 2)), dtype=torch.float32)
        pool[5], pool[6, 0] = pool[2], math.nan
        labels = torch.from_numpy(random.integers(0, 3, 14))
        queries = torch.cat([pool[8:12], torch.tensor([[1.0, 1.0]])])
        base = list(range(9))

        def counts(
            rows: list[int], pool: Tensor = pool, labels: Tensor = labels, queries: Tensor = queries
        ) -> tuple[Tensor, Tensor]:
            index = nearest(queries, pool[rows], k)
            whole = neighbour_counts(labels[rows], index, 3)
            return whole, whole.double() / k

        one, one_votes = counts(base)
        others = [base[:i] + base[i + 1 :] for i in base]
        others += [[*base[:i], new, *base[i:]] for i in range(10) for new in (9, 12, 13)]
        others += [[*base[:i], new, *base[i + 1 :]] for i in base for new in (9, 12, 13)]
        others += [[*base[:i], *base[i + 1 :], new] for i in base for new in (9, 12)]
        for other in others:
            two, two_votes = counts(other)
            moved = (one - two).square().sum(dim=1)
            worst = max(worst, int(moved.max()))
            assert moved.max() <= 2
            assert (one_votes - two_votes).norm(dim=1).max() <= math.sqrt(2) / k * (1 + 1e-15)
            if len(other) < k or len(base) < k:
                assert len(other) == len(base) or moved.max() <= 1
    assert worst == 2


# ---- features --------------------------------------------------------------------------------------


def edge(size: int, low: float = 0.2, high: float = 0.7) -> Tensor:
    """One image, dark on the left and bright on the right."""
    image = torch.full((1, 1, size, size), low)
    image[..., size // 2 :] = high
    return image


def blocks(found: Tensor, rows: int, columns: int) -> Tensor:
    """HOG features (n, d) as (n, corner down, corner right, bin, rows, columns)."""
    return found.view(len(found), 2, 2, 9, rows, columns)


def hog_by_hand(image: np.ndarray, cell: int) -> np.ndarray:
    """Of one image (channels, height, width), pixel by pixel, in float64."""
    _, height, width = image.shape
    rows, columns = height // cell, width // cell
    cells = np.zeros((rows, columns, 9))
    for i in range(height):
        for j in range(width):
            up, down = image[:, max(i - 1, 0), j], image[:, min(i + 1, height - 1), j]
            left, right = image[:, i, max(j - 1, 0)], image[:, i, min(j + 1, width - 1)]
            gradients = np.stack([right - left, down - up], axis=1)
            g = max(gradients, key=lambda v: float(v @ v))
            angle = math.degrees(math.atan2(g[1], g[0])) % 180
            first = int(angle // 20) % 9
            u = np.array([[math.cos(math.radians(20 * b)), math.sin(math.radians(20 * b))] for b in (first, first + 1)])
            share = np.abs(np.linalg.solve(u.T, g))  # g = alpha u_b + beta u_(b+1), up to its sign
            for r in range(rows):
                for c in range(columns):
                    y = i + 0.5 - (height - rows * cell) / 2 - (r + 0.5) * cell
                    x = j + 0.5 - (width - columns * cell) / 2 - (c + 0.5) * cell
                    weight = max(0.0, 1 - abs(y) / cell) * max(0.0, 1 - abs(x) / cell)
                    cells[r, c, first] += weight * share[0]
                    cells[r, c, (first + 1) % 9] += weight * share[1]
    found = np.zeros((2, 2, 9, rows - 1, columns - 1))
    for r in range(rows - 1):
        for c in range(columns - 1):
            block = cells[r : r + 2, c : c + 2]
            block = np.minimum(block / math.sqrt((block**2).sum() + 1e-10), 0.2)
            found[..., r, c] = block / math.sqrt((block**2).sum() + 1e-10)
    return found.ravel()


@pytest.mark.parametrize(
    ("features", "cell", "width"),
    [
        ((1, 8, 8), 2, 9 * 36),  # 4x4 cells
        ((1, 16, 16), 3, 16 * 36),  # 5x5
        ((1, 28, 28), 5, 16 * 36),
        ((3, 32, 32), 6, 16 * 36),
        ((2, 9, 14), 2, 3 * 6 * 36),  # 4x7
    ],
)
def test_hog_is_what_is_computed_pixel_by_pixel(features: tuple[int, ...], cell: int, width: int) -> None:
    extract, images = find_extractor("hog", features), drawn(7, 2, *features)
    found = extract(images)
    assert extract.width == width and found.shape == (2, width) and found.dtype == torch.float32
    for image, mine in zip(images.double().numpy(), found.numpy(), strict=True):
        assert mine == pytest.approx(hog_by_hand(image, cell), abs=2e-5)


def test_shares_are_nearly_those_of_linear_interpolation_in_the_angle() -> None:
    """Directions all around, of length 3; the bound 0.008 is the largest of |sin(20 - a) / sin 20 - (1 - a / 20)|."""
    degrees = torch.arange(0.0, 360.0, 0.5, dtype=torch.float64)
    angle = degrees.deg2rad()
    found = _oriented(*(3 * f(angle).float().view(-1, 1, 1) for f in (torch.cos, torch.sin)))[:, :, 0, 0] / 3
    first, rest = (degrees // 20).long() % 9, (degrees % 20) / 20
    expected = torch.zeros(len(degrees), 9, dtype=torch.float64)
    expected.scatter_(1, first.unsqueeze(1), 1 - rest.unsqueeze(1))
    expected.scatter_(1, (first.unsqueeze(1) + 1) % 9, rest.unsqueeze(1))
    assert (found - expected).abs().max() < 0.008
    assert found[expected == 0].abs().max() < 1e-6


def test_the_energy_of_an_edge_is_in_its_own_orientation() -> None:
    """Upright: the gradient points right, bin 0. Lying: 90 degrees, half-way between bins 4 and 5."""
    extract = find_extractor("hog", (1, 20, 20))
    upright, lying = (blocks(extract(image), 4, 4)[0] for image in (edge(20), edge(20).mT))
    assert upright[:, :, 0].max() > 0.3 and upright[:, :, 1:].abs().max() < 1e-6
    assert torch.allclose(lying[:, :, 4], lying[:, :, 5], atol=1e-6) and lying[:, :, 4].max() > 0.3
    assert lying[:, :, [0, 1, 2, 3, 6, 7, 8]].abs().max() < 1e-6
    assert torch.allclose(upright[:, :, 0].square().sum((0, 1)).amax(), torch.tensor(1.0), atol=1e-4)


@pytest.mark.parametrize("size", [8, 16, 28, 32])
def test_an_image_mirrored_or_turned_round_has_the_same_histograms_elsewhere(size: int) -> None:
    """Half a turn keeps orientations without sign; a mirror takes bin b to -b. Cells change places."""
    extract, images = find_extractor("hog", (1, size, size)), drawn(8, 3, 1, size, size)
    side = math.isqrt(extract.width // 36)
    found, turned, mirrored = (blocks(extract(x), side, side) for x in (images, images.flip(2, 3), images.flip(3)))
    assert torch.allclose(turned, found.flip(1, 2, 4, 5), atol=1e-5)
    assert torch.allclose(mirrored, found[:, :, :, [0, 8, 7, 6, 5, 4, 3, 2, 1]].flip(2, 5), atol=1e-5)


def test_brightness_and_contrast_do_not_matter() -> None:
    extract, images = find_extractor("hog", (3, 16, 16)), drawn(9, 4, 3, 16, 16)
    found = extract(images)
    for changed in (images + 0.75, 0.1 * images, 50 * images - 3, 1 - images):  # without sign: a negative is the same
        assert torch.allclose(extract(changed), found, atol=1e-4)
    assert extract(torch.full((1, 3, 16, 16), 0.4)).abs().max() == 0


def test_of_several_channels_the_strongest_gradient_counts() -> None:
    strong, weak = drawn(10, 2, 1, 16, 16), 1e-3 * drawn(11, 2, 1, 16, 16)
    found = find_extractor("hog", (2, 16, 16))(torch.cat([weak, strong], dim=1))
    assert (found - find_extractor("hog", (1, 16, 16))(strong)).abs().max() < 0.05  # a few pixels of `strong` are flat
    alone = torch.cat([torch.full_like(strong, 0.3), strong], dim=1)
    assert torch.equal(find_extractor("hog", (2, 16, 16))(alone), find_extractor("hog", (1, 16, 16))(strong))


def test_raw_features_are_the_records() -> None:
    extract, records = find_extractor("raw", (2, 3)), drawn(12, PIECE + 9, 2, 3)
    assert extract.width == 6 and torch.equal(extract(records), records.view(-1, 6))
    assert extract(records[:0]).shape == (0, 6)
    with pytest.raises(ValueError, match="shape"):
        extract(records.view(-1, 6))


# ---- a record's features are its own ---------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], str]]:
    """Puts an object where "own_features:Name" finds it."""
    module = types.ModuleType("own_features")
    monkeypatch.setitem(sys.modules, "own_features", module)

    def put(thing: Any) -> str:
        find_extractor.cache_clear()
        module.Name = thing  # type: ignore[attr-defined]
        return "own_features:Name"

    yield put
    find_extractor.cache_clear()


def network(features: tuple[int, ...]) -> nn.Module:
    if len(features) == 3:
        return nn.Sequential(
            nn.Conv2d(features[0], 7, 3),
            nn.BatchNorm2d(7),
            nn.Dropout(0.5),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(7 * 49, 9),
        )
    return nn.Sequential(nn.Linear(features[0], 33), nn.GELU(), nn.Linear(33, 7), nn.Softmax(dim=1))


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("raw", (30,)),
        ("hog", (1, 8, 8)),
        ("hog", (3, 13, 9)),
        ("hog", (1, 28, 28)),
        ("own", (30,)),
        ("own", (13,)),
        ("own", (2, 9, 9)),
    ],
)
def test_a_record_has_the_same_features_whoever_is_beside_it(
    name: str, features: tuple[int, ...], own: Callable[[Any], str]
) -> None:
    """To the last bit: alone, once the first is gone, in reverse, beside what is no number, on two threads."""
    extract = find_extractor(own(network) if name == "own" else name, features)
    records = drawn(13, PIECE + 29, *features)
    whole, count = extract(records), PIECE + 29
    assert torch.equal(whole, torch.cat([extract(records[i : i + 1]) for i in range(count)]))
    assert torch.equal(whole[1:], extract(records[1:])) and torch.equal(whole[7:60], extract(records[7:60]))
    assert torch.equal(whole.flip(0), extract(records.flip(0)))
    strange = records.clone()
    strange[::2] = math.nan
    assert torch.equal(whole[1::2], extract(strange)[1::2])
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole, extract(records))
    finally:
        torch.set_num_threads(1)


def test_an_own_module_is_evaluated_with_the_same_weights_every_time(own: Callable[[Any], str]) -> None:
    """Dropout is off, drawn weights are drawn alike, the global generator is left alone, no gradient is kept."""
    before = torch.get_rng_state()
    first = find_extractor(own(network), (30,))
    second = find_extractor(own(network), (30,))
    records = drawn(14, 5, 30)
    assert first is not second and torch.equal(first(records), second(records))
    assert first.width == 7 and not first(records).requires_grad
    assert torch.equal(before, torch.get_rng_state())
    assert find_extractor("own_features:Name", (30,)) is second


def test_an_own_function_cannot_write_into_the_records(own: Callable[[Any], str]) -> None:
    extract = find_extractor(own(lambda features: lambda x: x.mul_(2).double()), (3,))
    records = drawn(15, PIECE, 3)
    kept = records.clone()
    assert torch.equal(extract(records), 2 * kept) and torch.equal(records, kept)


class Remembers:
    """Adds the mean of what it was given the time before."""

    def __init__(self, features: tuple[int, ...]) -> None:
        self.before = torch.zeros(1)

    def __call__(self, x: Tensor) -> Tensor:
        found = x + self.before
        self.before = x[1].nan_to_num().mean()
        return found


class DrawnAnew:
    """Another function in each process."""

    def __init__(self, features: tuple[int, ...]) -> None:
        self.weight = np.random.default_rng().random()

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight


class RemembersExtremes(Remembers):
    """Changes only once something out of bounds has come."""

    def __call__(self, x: Tensor) -> Tensor:
        found = x + self.before
        self.before = self.before + (x.nan_to_num() < -1e6).any().float()
        return found


def mixing(f: Callable[[Tensor], Tensor]) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    return lambda features: f


BAD: dict[str, tuple[Any, str]] = {
    "takes no shape": (lambda: nn.Flatten(), "could not be built"),
    "fails": (lambda features: 1 / 0, "could not be built"),
    "no function": (lambda features: 3, "did not give a function but int"),
    "not callable": (3, "could not be built"),
    "another shape": (mixing(lambda x: x @ torch.ones(7, 2)), "does not fit records of shape"),
    "a list": (mixing(lambda x: x.tolist()), "gives list"),
    "one axis": (mixing(lambda x: x.sum(1)), r"gives \(128,\), torch.float32"),
    "three axes": (mixing(lambda x: x.view(-1, 2, 2)), r"gives \(128, 2, 2\)"),
    "nothing": (mixing(lambda x: x[:, :0]), r"gives \(128, 0\)"),
    "one row": (mixing(lambda x: x[:1]), r"gives \(1, 4\)"),
    "whole numbers": (mixing(lambda x: x.long()), "torch.int64"),
    "no numbers": (mixing(lambda x: x / 0), "not finite"),
    "dropout": (mixing(lambda x: nn.functional.dropout(x)), "answers differently each time"),
    "drawn anew": (DrawnAnew, "answers differently each time"),
    "remembers": (Remembers, "answers differently each time"),
    "remembers extremes": (RemembersExtremes, "answers differently each time"),
    "mean": (mixing(lambda x: x - x.mean(0)), "mixes the records"),
    "next": (mixing(lambda x: x + x.roll(1, 0)), "mixes the records"),
    "rank": (mixing(lambda x: x.argsort(0).float()), "mixes the records"),
    "place": (mixing(lambda x: x + torch.arange(len(x)).unsqueeze(1)), "mixes the records"),
    "clip by the largest": (mixing(lambda x: x / x.nan_to_num().abs().max().clamp(min=9.0)), "mixes the records"),
    "a bit": (mixing(lambda x: x * (1 + 2**-22 * (torch.arange(len(x)) % 2)).unsqueeze(1)), "rounds a record by its"),
}


@pytest.mark.parametrize("case", BAD)
def test_functions_that_would_void_the_price_are_refused(case: str, own: Callable[[Any], str]) -> None:
    thing, said = BAD[case]
    with pytest.raises(UserError, match=said) as error:
        find_extractor(own(thing), (4,))
    assert 'algorithm.features = "own_features:Name"' in error.value.what and error.value.fix


def test_a_function_that_refuses_extremes_is_accepted(own: Callable[[Any], str]) -> None:
    def careful(x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("no numbers")
        return x

    assert find_extractor(own(lambda features: careful), (4,)).width == 4


@pytest.mark.parametrize("features", [(64,), (8, 8), (1, 7, 8), (1, 1, 8, 8)])
def test_hog_is_for_images(features: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="does not fit records of shape") as error:
        find_extractor("hog", features)
    assert error.value.fix == 'algorithm.features = "raw"'


def test_an_unknown_name_is_answered_with_the_nearest(own: Callable[[Any], str]) -> None:
    with pytest.raises(UserError, match='"hogg" is not known') as error:
        find_extractor("hogg", (1, 8, 8))
    assert error.value.fix == 'algorithm.features = "hog"'
    own(network)
    with pytest.raises(UserError, match="cannot be imported"):
        find_extractor("own_features:Nmae", (4,))
