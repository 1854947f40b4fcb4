"""The noise: its law, its bits, and that every form of the generator makes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from scipy import stats
from torch import Tensor

from fairveil import streams
from fairveil.streams import Stream

if streams.COMPILED:
    from fairveil import _noise

    LEVELS = range(_noise.LEVEL + 1)
else:
    LEVELS = range(0)

FORMS = {"pure": -1} | {("plain", "AVX2", "AVX-512")[level]: level for level in LEVELS}
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 1023, 1024, 1025, 2049, 32_768, 32_769, 70_001]  # around groups and pieces


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Switches to a form of the generator."""

    def switch(form: str) -> None:
        monkeypatch.setattr(streams, "COMPILED", form != "pure")
        if form != "pure":
            monkeypatch.setattr(_noise, "LEVEL", FORMS[form])

    return switch


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, use: Callable[[str], None]) -> Iterator[str]:
    use(request.param)
    return request.param


def bits(key: bytes, block: int, words: int) -> np.ndarray:
    """AES-256-CTR as the library makes it."""
    cipher = Cipher(AES(key), CTR(block.to_bytes(16, "big"))).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * words)), "<i8")


def box_muller(words: np.ndarray) -> np.ndarray:
    """The documented map from words to values, with the angle cut to 2^-54 of a turn and reduced exactly."""
    radius, angle = words.reshape(-1, 2, 8).swapaxes(0, 1)
    r = np.sqrt(-2 * np.log((np.abs(radius.astype(np.float64)) + 0.5) * 2.0**-63))
    quarters = angle.view(np.uint64) + np.uint64(2**61)
    t = ((quarters % 2**62) >> 10).astype(np.float64) * 2.0**-52 - 0.5
    cosine, sine = np.cos(np.pi / 2 * t), np.sin(np.pi / 2 * t)
    turns = [(cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine)]
    x, y = (np.choose((quarters >> 62).astype(int), [turn[i] for turn in turns]) for i in range(2))
    return np.stack((r * x, r * y), 1).ravel()


def test_the_kernel_is_exact_to_the_last_places() -> None:
    if not streams.COMPILED:
        pytest.skip("no kernel")
    words = bits(bytes(32), 0, 16 * 20_000).copy().reshape(-1, 2, 8)
    words[:8, 0] = (2 ** np.arange(64, dtype=np.uint64)).view(np.int64).reshape(8, 8)  # all magnitudes of u
    words[8:16, 0] = 2**63 - 1 - words[:8, 0].clip(0)  # u near 1
    words[16:24, 1] = words[:8, 0]  # angles near a quarter turn, an eighth ...
    words[24:32, 1] = words[:8, 0] - 1
    values = np.zeros(words.size)
    _noise.add(values, 1.0, 0.0, words.tobytes(), 0, 0)
    np.testing.assert_allclose(values, box_muller(words.ravel()), rtol=2e-15, atol=0)


def test_the_tails_reach_beyond_nine(form: str) -> None:
    words = np.zeros(16, np.int64)
    assert streams._normal(words)[0] == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-15)
    if streams.COMPILED:
        values = np.zeros(16)
        _noise.add(values, 1.0, 0.0, words.tobytes(), 0, 0)
        assert values[0] == pytest.approx(math.sqrt(128 * math.log(2)), rel=1e-15)


@pytest.mark.parametrize("block", [0, 1, 255, 2**16 - 3, 2**32 - 5, 2**56 - 1])
def test_the_bits_are_those_of_aes_in_counter_mode(form: str, block: int) -> None:
    """Also where the counter carries. One wrong bit within AES would spoil every value made of the block."""
    stream = Stream("bits")
    stream._block = block
    expected = box_muller(bits(stream._key, block, 16 * 200))
    exact = {"rtol": 0, "atol": 1e-14} if form == "pure" else {"rtol": 2e-15, "atol": 0}
    np.testing.assert_allclose(stream.normal(16 * 200).numpy(), expected, **exact)


def test_a_stream_draws_what_it_always_drew(form: str) -> None:
    """A change here changes every seeded run."""
    stream = Stream(0, "known")
    expected = [-0.6930831832499142, 0.909767389672352, 1.4568043357523293]
    np.testing.assert_allclose(stream.normal(3).numpy(), expected, rtol=1e-13)
    assert stream.coins(40, 0.1).tolist() == [13, 37]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_every_form_makes_the_same(use: Callable[[str], None], size: int, kind: torch.dtype) -> None:
    def drawn(form: str) -> tuple[Tensor, Tensor]:
        use(form)
        total, stream = torch.linspace(-50, 50, size, dtype=kind), Stream("forms", size)
        stream.add_noise(total, 3.0, 2.0**-10)
        return total, stream.normal(size)

    total, values = drawn("pure")
    for form in FORMS:
        other, others = drawn(form)
        assert torch.equal(total, other)
        torch.testing.assert_close(values, others, rtol=0, atol=1e-14)


@pytest.mark.statistical
def test_millions_of_noisy_coordinates_are_equal_in_every_form(use: Callable[[str], None]) -> None:
    """The forms differ by 1e-15, so a coordinate falls on another point of the grid once in 10^11: here 4e-5."""
    totals = []
    for form in FORMS:
        use(form)
        totals.append(torch.zeros(4_000_000))
        Stream("equal").add_noise(totals[-1], 1.0, 2.0**-12)
    assert all(torch.equal(totals[0], other) for other in totals)


@pytest.mark.parametrize("size", SIZES)
def test_noise_is_the_normal_values_in_their_order(form: str, size: int) -> None:
    total = torch.linspace(-3, 9, size)
    noisy, one, other = total.clone(), Stream("order"), Stream("order")
    one.add_noise(noisy, 0.7, 2.0**-12)
    expected = ((total.double() + 0.7 * other.normal(size)) * 2.0**12).round() / 2.0**12
    assert torch.equal(noisy, expected.float())
    assert torch.equal(one.normal(5), other.normal(5))  # both took the same bits


def test_only_the_total_is_written(form: str) -> None:
    """A part of a vector, wherever it begins."""
    for kind in (torch.float32, torch.float64):
        for first, last in [(1, 2), (3, 20), (5, 5), (7, 2100)]:
            whole, alone = torch.zeros(2200, dtype=kind), torch.zeros(last - first, dtype=kind)
            Stream("part").add_noise(whole[first:last], 1.0, 2.0**-12)
            Stream("part").add_noise(alone, 1.0, 2.0**-12)
            assert torch.equal(whole[first:last], alone)
            assert not whole[:first].any() and not whole[last:].any()


def test_mixed_calls_go_on_where_the_last_one_ended(use: Callable[[str], None]) -> None:
    def drawn(form: str) -> list[Tensor]:
        use(form)
        stream, total = Stream("mixed"), torch.zeros(21, dtype=torch.float64)
        first = [stream.coins(5, 0.5), stream.normal(0), stream.normal((3, 7)), stream.coins(1000, 0.25)]
        stream.add_noise(total, 1.0, 2.0**-30)
        return [*first, total, stream.normal(16), stream.coins(9, 0.5), stream.normal(16)]

    expected = drawn("pure")
    for form in FORMS:
        for one, other in zip(expected, drawn(form), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    key, block = Stream("mixed")._key, 3 + 0 + 16 + 500 + 16  # each call begins at a new block
    np.testing.assert_allclose(expected[5].numpy(), box_muller(bits(key, block, 16)), rtol=0, atol=1e-14)


def test_what_is_not_finite_stays_so(form: str) -> None:
    total = torch.zeros(37)
    total[[0, 9, 20, 36]], total[5], total[30] = math.nan, math.inf, -math.inf
    Stream("odd").add_noise(total, 1.0, 2.0**-12)
    assert total.isnan().nonzero().flatten().tolist() == [0, 9, 20, 36]
    assert total.isinf().nonzero().flatten().tolist() == [5, 30] and total[5] > 0 > total[30]


def test_noise_may_be_larger_than_any_float32(form: str) -> None:
    total, wide = torch.zeros(50), torch.zeros(50, dtype=torch.float64)
    Stream("huge").add_noise(total, 2.0**300, 2.0**288)
    Stream("huge").add_noise(wide, 2.0**300, 2.0**288)
    assert torch.equal(total, wide.float()) and total.isinf().all() and wide.isfinite().all()


def test_ties_go_to_even_and_zero_has_no_sign(form: str) -> None:
    for kind in (torch.float32, torch.float64):
        total = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -0.25, -0.0, 2.0**40 + 0.0, 7.75], dtype=kind) / 4
        Stream("ties").add_noise(total, 0.0, 0.25)
        assert (total * 4).tolist() == [0, 2, 2, 0, -2, 0, 0, 2.0**40, 8]
        assert not total[[0, 3, 5, 6]].signbit().any()


def test_large_totals_stay_on_the_grid(form: str) -> None:
    """Where a double still holds halves of the grid, and where it is coarser than the grid."""
    total = torch.tensor([2.0**51 + 0.5, 2.0**51 + 1.5, -(2.0**52) - 1, 2.0**53 + 2, 2.0**70], dtype=torch.float64)
    Stream("large").add_noise(total, 0.0, 1.0)
    assert total.tolist() == [2.0**51, 2.0**51 + 2, -(2.0**52) - 1, 2.0**53 + 2, 2.0**70]


@pytest.mark.parametrize(
    ("total", "std", "grid"),
    [
        (torch.zeros(4), 1.0, 0.3),
        (torch.zeros(4), 1.0, 0.0),
        (torch.zeros(4), 1.0, -0.5),
        (torch.zeros(4), 1.0, math.inf),
        (torch.zeros(4), 1.0, math.nan),
        (torch.zeros(4), 1.0, 2.0**-1030),
        (torch.zeros(4), -1.0, 0.5),
        (torch.zeros(4), math.inf, 0.5),
        (torch.zeros(4), math.nan, 0.5),
        (torch.zeros(4, 4), 1.0, 0.5),
        (torch.zeros(8)[::2], 1.0, 0.5),
        (torch.zeros(4, dtype=torch.int64), 1.0, 0.5),
        (torch.zeros(4, dtype=torch.float16), 1.0, 0.5),
    ],
)
def test_what_cannot_be_noised_is_refused(form: str, total: Tensor, std: float, grid: float) -> None:
    before = total.clone()
    with pytest.raises(ValueError, match="no noise"):
        Stream("refused").add_noise(total, std, grid)
    assert torch.equal(total, before)


def test_the_kernel_refuses_what_it_cannot_read() -> None:
    if not streams.COMPILED:
        pytest.skip("no kernel")
    values, level = np.zeros(17), _noise.LEVEL
    for total, source, other, error in [
        (values, bytes(255), 0, ValueError),
        (values, bytes(256), level + 1, ValueError),
        (values, bytes(256), -1, ValueError),
        (values.astype(int), bytes(256), 0, TypeError),
        (values[::2], bytes(256), 0, (BufferError, ValueError)),
        (b"12345678", bytes(256), 0, BufferError),
    ] + [(values, bytes(31), level, ValueError)] * (level > 0):
        with pytest.raises(error):
            _noise.add(total, 1.0, 0.0, source, 0, other)
    assert not values.any()


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return Stream("law").normal(4_000_000).numpy()


def small(correlation: float, size: int) -> bool:
    return abs(correlation) * math.sqrt(size) < 5


@pytest.mark.statistical
def test_the_values_are_normal(values: np.ndarray) -> None:
    """Each of the five checks raises a false alarm once in a million seeds."""
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(values.mean()) * math.sqrt(len(values)) < 4.9
    assert abs(values.var() - 1) * math.sqrt(len(values) / 2) < 4.9
    for far in (4, 5):
        count = int((np.abs(values) > far).sum())
        assert stats.binomtest(count, len(values), 2 * stats.norm.sf(far)).pvalue > 1e-6


@pytest.mark.statistical
def test_radius_and_angle_have_their_laws(values: np.ndarray) -> None:
    """Each of the three checks raises a false alarm once in a million seeds."""
    x, y = values.reshape(-1, 2, 8).swapaxes(0, 1)
    square, turn = ((x**2 + y**2) / 2).ravel(), (np.arctan2(y, x) / (2 * np.pi) + 0.5).ravel()
    assert stats.kstest(square, "expon").pvalue > 1e-6
    assert stats.kstest(turn, "uniform").pvalue > 1e-6
    assert small(np.corrcoef(square, turn)[0, 1], len(turn))


@pytest.mark.statistical
def test_values_do_not_depend_on_each_other(values: np.ndarray) -> None:
    """Of a pair, of neighbours and of what other forms compute together: each a false alarm in 1.7 million seeds."""
    x, y = (part.ravel() for part in values.reshape(-1, 2, 8).swapaxes(0, 1))
    for one, other in [(x, y)] + [(values[:-lag], values[lag:]) for lag in (1, 2, 8, 16, 1024)]:
        assert small(np.corrcoef(one, other)[0, 1], len(one))
        assert small(np.corrcoef(one**2, other**2)[0, 1], len(one))
        assert small(np.corrcoef(one, other**2)[0, 1], len(one))


@pytest.mark.statistical
def test_other_keys_give_unrelated_values() -> None:
    """Ten pairs of streams, each a false alarm in 1.7 million seeds."""
    drawn = [Stream(*key).normal(300_000).numpy() for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), ("0", "a")]]
    correlation = np.corrcoef(drawn)
    assert all(small(correlation[i, j], 300_000) for i in range(5) for j in range(i))
