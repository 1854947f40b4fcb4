"""Bounds by brute force on neighbours, noise by its law, events by hand."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fairveil.data.federation import ClientData, Records
from fairveil.models import Model, ModelSpec
from fairveil.privacy.choice import PrivateChoice
from fairveil.privacy.gradients import ROUNDING
from fairveil.privacy.mechanisms import CohortSums, Mechanism, Part, Sharers, canonical, from_canonical, on_grid
from fairveil.privacy.moments import NoisyMoments
from fairveil.privacy.release import Release, Share
from fairveil.privacy.training import NoisyTraining
from fairveil.streams import Stream


@dataclass
class FakeClient:
    """A client with nothing but what a mechanism asks for."""

    model: Model
    train: Records
    inputs: dict[str, Any]
    key: tuple[Any, ...] = (0,)
    data: ClientData = field(init=False)

    def __post_init__(self) -> None:
        self.data = ClientData(self.train, self.train)

    def noise(self) -> Stream:
        return Stream(*self.key)


MODELS = {
    "logistic": ModelSpec("logistic", (1, 4, 4), 3),
    "mlp": ModelSpec("mlp", (1, 4, 4), 3, {"hidden": 5}),
    "cnn": ModelSpec("cnn", (1, 4, 4), 3),
    "linear": ModelSpec("linear", (6,), 0),
}


def records(spec: ModelSpec, count: int, seed: int, scale: float = 1.0) -> Records:
    random = Stream(seed, "records").numpy
    x = torch.from_numpy((scale * random.standard_normal((count, *spec.features))).astype(np.float32))
    if spec.classes:
        return Records(x, torch.from_numpy(random.integers(spec.classes, size=count)))
    return Records(x, torch.from_numpy((scale * random.standard_normal(count)).astype(np.float32)))


def without(rows: Records, gone: int) -> Records:
    keep = torch.arange(len(rows)) != gone
    return Records(rows.x[keep], rows.y[keep])


# ---- NoisyTraining ---------------------------------------------------------------------------------


def train(mechanism: NoisyTraining, rows: Records, spec: ModelSpec, key: tuple[Any, ...] = (0,)) -> Tensor:
    model = spec.build()
    start = model.initial(Stream(9))
    release, _ = mechanism.release(FakeClient(model, rows, {"model": start, "learning_rate": 0.5}, key))
    update = release.value["update"]
    assert isinstance(update, Tensor)
    return update


def test_a_step_without_noise_moves_by_at_most_its_sensitivity() -> None:
    """Full batch, one step: the released update is -eta/b times the sum, so neighbours differ by eta*c/b."""
    spec = MODELS["mlp"]
    rows = records(spec, 6, 5, scale=10.0)
    mechanism = NoisyTraining(1.0, 1, clip_norm=0.7, noise_multiplier=0.0, expected_batch=6.0)
    whole = train(mechanism, rows, spec)
    for gone in range(6):
        moved = whole - train(mechanism, without(rows, gone), spec)
        assert torch.linalg.vector_norm(moved) <= 0.5 * 0.7 / 6 * (1 + 1e-4)


def test_several_steps_written_out() -> None:
    """DP-SGD with a full batch and no noise is clipped gradient descent with the fixed denominator."""
    spec = MODELS["linear"]
    model, rows = spec.build(), records(spec, 8, 4)
    mechanism = NoisyTraining(1.0, 3, clip_norm=1.0, noise_multiplier=0.0, expected_batch=10.0)
    weights = start = model.initial(Stream(9))
    for _ in range(3):
        total = torch.zeros(7)
        for i in range(8):
            gradient = model.gradient(weights, rows.x[i : i + 1], rows.y[i : i + 1])
            total += gradient * min(1.0, ROUNDING / float(gradient.norm()))
        weights = weights - 0.5 * total / 10.0
    assert torch.allclose(train(mechanism, rows, spec), weights - start, atol=1e-5)


@pytest.mark.statistical
def test_the_noise_has_the_law_that_is_priced() -> None:
    """No records: what is released is noise alone, N(0, (eta*c*z/b)^2 * steps). False alarm below 1e-6."""
    spec = ModelSpec("logistic", (5000,), 20)  # 100,020 parameters
    mechanism = NoisyTraining(0.1, 4, clip_norm=2.0, noise_multiplier=1.5, expected_batch=16.0)
    update = train(mechanism, records(spec, 0, 0), spec).double().numpy()
    std = 0.5 / 16 * 2.0 * 1.5 * math.sqrt(4)
    assert stats.kstest(update / std, "norm").pvalue > 1e-6
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], update.size)
    assert low < (update**2).sum() / std**2 < high


def diagnosed(mechanism: NoisyTraining, rows: Records, model: Model, key: int = 0, **inputs: Any) -> tuple[Any, Any]:
    """The update (p,) as float64, and the diagnostics."""
    given = {"model": model.initial(Stream(9)), "learning_rate": 0.5, **inputs}
    release, diagnostics = mechanism.release(FakeClient(model, rows, given, (key,)))
    return np.asarray(release.value["update"], dtype=float), diagnostics


NOBODY = records(ModelSpec("logistic", (5000,), 20), 0, 0)


@pytest.fixture(scope="module")
def large() -> Model:
    """100,020 parameters: a sample of noise by itself."""
    return ModelSpec("logistic", (5000,), 20).build()


@pytest.mark.statistical
def test_noise_alone_has_no_signal(large: Model) -> None:
    """|noise|^2 over its expectation is off by sqrt(2/p) = 0.0045: its excess is below 5.2 of these, and half the time
    there is none at all. Eight draws; false alarm 8e-7, and 2 * 2^-8 that all are on one side: the seed is fixed."""
    mechanism = NoisyTraining(0.1, 4, clip_norm=2.0, noise_multiplier=1.5, expected_batch=16.0)
    found = [diagnosed(mechanism, NOBODY, large, key)[1]["signal_to_noise"] for key in range(8)]
    assert max(found) ** 2 < 5.2 * math.sqrt(2 / 100_020) and 0 < found.count(0.0) < 8


@pytest.mark.statistical
@pytest.mark.parametrize("z", [0.15, 0.3, 0.6])
def test_a_known_signal_is_found(z: float) -> None:
    """One step with six records that all push the same way, each clipped: the sum has norm 6c, its noise cz sqrt(p).

    The square of the estimate is a non-central chi-squared variable over p, less 1: without bias, and of variance
    2/p + 4 s^2/p. The mean of 400 lies within five standard errors: false alarm 6e-7 each.
    """
    model, one = MODELS["logistic"].build(), records(MODELS["logistic"], 1, 5, scale=50.0)
    output, _ = model.scored(model.unflatten(model.initial(Stream(9))), one.x, one.y)
    rows = Records(one.x.repeat(6, 1, 1, 1), output.argmin(dim=1).repeat(6))  # the answer that is most surprising
    mechanism = NoisyTraining(1.0, 1, clip_norm=0.7, noise_multiplier=z, expected_batch=6.0)
    p = model.parameters
    square = (6 * ROUNDING / z) ** 2 / p
    assert p == 51 and square > 1.8  # so far from 0 that the estimate is never cut off there
    found = np.array([diagnosed(mechanism, rows, model, key)[1]["signal_to_noise"] ** 2 for key in range(400)])
    assert found.min() > 0
    assert abs(found.mean() - square) < 5 * math.sqrt((2 / p + 4 * square / p) / 400)


@pytest.mark.statistical
@pytest.mark.parametrize(("pull", "inside"), [(0.0, False), (0.5, False), (2.0, False), (0.5, True)])
def test_a_pull_shortens_the_noise_of_earlier_steps(large: Model, pull: float, inside: bool) -> None:
    """Outside the clip each later step leaves 1 - eta*lambda of what came before: by simulation of the noise alone.

    Without records the update is N(0, s^2), s^2 = (eta*c*z/b)^2 times the sum over j < 4 of (1 - eta*lambda)^2j; inside
    the clip nothing pulls where there is no record. False alarm 1e-6 each. What is left over 1 is called signal.
    """
    mechanism = NoisyTraining(0.1, 4, clip_norm=2.0, noise_multiplier=1.5, expected_batch=16.0)
    centre = large.initial(Stream(9))  # where it starts: else the way to the centre would be a signal
    inputs = {"centre": centre, "pull": pull, "pull_inside": inside}
    update, diagnostics = diagnosed(mechanism, NOBODY, large, **inputs)
    left = 1.0 if inside else 1 - 0.5 * pull
    std = 0.5 * 2.0 * 1.5 / 16 * math.sqrt(1 + left**2 + left**4 + left**6)
    assert stats.kstest(update / std, "norm").pvalue > 1e-6
    excess = (update**2).sum() / (len(update) * std**2) - 1
    assert diagnostics["signal_to_noise"] ** 2 == pytest.approx(max(0.0, excess), abs=1e-9)


def test_the_way_to_a_far_centre_is_signal(large: Model) -> None:
    """One step, no records: the update is eta*lambda of the way, plus noise. (Within the noise of one draw.)"""
    mechanism = NoisyTraining(0.1, 1, clip_norm=2.0, noise_multiplier=1.5, expected_batch=16.0)
    centre = large.initial(Stream(9)) + 1.0
    _, diagnostics = diagnosed(mechanism, NOBODY, large, centre=centre, pull=0.4)
    assert diagnostics["signal_to_noise"] == pytest.approx(0.2 / (0.5 * 2.0 * 1.5 / 16), rel=0.02)


def test_without_noise_there_is_no_ratio_to_it() -> None:
    spec = MODELS["logistic"]
    mechanism = NoisyTraining(1.0, 2, clip_norm=0.7, noise_multiplier=0.0, expected_batch=6.0)
    assert set(diagnosed(mechanism, records(spec, 6, 5), spec.build())[1]) == {"clipped"}


@pytest.mark.statistical
def test_batches_are_poisson_samples() -> None:
    """Every record is drawn independently at rate q. False alarm below 1e-6 in all."""
    draws = [Stream(1, i).coins(50, 0.3).numpy() for i in range(4000)]
    sizes = np.array([len(draw) for draw in draws])
    low, high = stats.binom.ppf([1e-7, 1 - 1e-7], 4000 * 50, 0.3)
    assert low <= sizes.sum() <= high
    expected = 4000 * np.diff(stats.binom.cdf([-1, 9, 11, 13, 15, 17, 19, 50], 50, 0.3))
    counted = np.histogram(sizes, bins=[0, 10, 12, 14, 16, 18, 20, 51])[0]
    assert stats.chisquare(counted, expected).pvalue > 1e-7  # sizes vary as they must, they are not fixed
    together = sum(1 for draw in draws if {3, 4} <= set(draw.tolist()))
    low, high = stats.binom.ppf([1e-7, 1 - 1e-7], 4000, 0.09)
    assert low <= together <= high


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    spec = MODELS["logistic"]
    rows = records(spec, 3, 1)
    rare = NoisyTraining(1e-12, 2, clip_norm=1.0, noise_multiplier=1.0, expected_batch=1.0)
    assert torch.equal(train(rare, rows, spec), train(rare, rows, spec))
    none = train(rare, records(spec, 0, 0), spec)
    assert none.abs().min() > 0  # noise on every coordinate, though nobody was drawn


def test_events_and_schedule_of_local_epochs() -> None:
    mechanism = NoisyTraining.epochs(100, 32, 2, clip_norm=1.0, noise_multiplier=1.25)
    assert (mechanism.sample_rate, mechanism.steps, mechanism.expected_batch) == (0.32, 2 * 4, 32.0)
    assert mechanism.event == SelfComposedDpEvent(PoissonSampledDpEvent(0.32, GaussianDpEvent(1.25)), 8)
    full = NoisyTraining.epochs(20, 32, 3, clip_norm=1.0, noise_multiplier=1.25)
    assert (full.sample_rate, full.steps, full.expected_batch) == (1.0, 3, 20.0)
    assert full.event == SelfComposedDpEvent(GaussianDpEvent(1.25), 3)
    silent = NoisyTraining.epochs(20, 32, 3, clip_norm=1.0, noise_multiplier=0.0)
    assert silent.event == SelfComposedDpEvent(NonPrivateDpEvent(), 3)


def test_an_infinite_clip_norm_is_never_noised() -> None:
    with pytest.raises(ValueError, match="noise_multiplier must then be 0"):
        NoisyTraining(1.0, 1, math.inf, 1.0, 1.0)


# ---- CohortSums ------------------------------------------------------------------------------------


def two_parts(bound: float = 1.0, z: float = 1.0) -> CohortSums:
    parts = (Part("update", (4,), bound, z), Part("loss", (), 0.5, 4.0))
    return CohortSums(parts, 0.25)


ANYONE = FakeClient(MODELS["linear"].build(), records(MODELS["linear"], 0, 0), {})


def total(mechanism: CohortSums, values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    exact = mechanism.zero()
    for value in values:
        mechanism.add(exact, mechanism.share(value, ANYONE)[0])
    return exact


numbers = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, 0.0, 3e38])
contribution = st.tuples(st.lists(numbers, min_size=4, max_size=4), numbers).map(
    lambda pair: {"update": torch.tensor(pair[0]), "loss": torch.tensor(pair[1])}
)


@settings(deadline=None)
@given(clients=st.lists(contribution, min_size=1, max_size=6), bound=st.sampled_from([1e-3, 0.3, 1.0, 50.0]))
def test_a_client_moves_each_sum_by_at_most_its_bound(clients: list[dict[str, Tensor]], bound: float) -> None:
    """Exactly, not to rounding: the sums are fixed-point and truncation shortens."""
    mechanism = two_parts(bound)
    whole = total(mechanism, clients)
    for gone in range(len(clients)):
        less = total(mechanism, clients[:gone] + clients[gone + 1 :])
        for part in mechanism.parts:
            moved = (whole[part.name] - less[part.name]).double() / mechanism.scale(part)
            assert torch.linalg.vector_norm(moved) <= part.bound


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_sums_do_not_depend_on_the_order(seed: int) -> None:
    random = Stream(seed).numpy
    scales = 10.0 ** random.integers(-6, 3, size=9)
    clients = [
        {"update": torch.from_numpy(scale * random.standard_normal(4)), "loss": torch.tensor(0.1)} for scale in scales
    ]
    mechanism = two_parts()
    forth, back = total(mechanism, clients), total(mechanism, clients[::-1])
    assert all(torch.equal(forth[name], back[name]) for name in forth)


def test_a_share_within_its_bound_is_summed_as_it_is() -> None:
    mechanism = two_parts(bound=10.0, z=0.0)
    values = [{"update": torch.tensor([1.0, -2.0, 0.5, 3.0]), "loss": torch.tensor(0.25)}] * 3
    silent = CohortSums((Part("update", (4,), 10.0, 0.0), Part("loss", (), 0.5, 0.0)), 0.25)
    sums, diagnostics = silent.finish(total(silent, values), Stream(0), 0)
    assert torch.equal(sums["update"], torch.tensor([3.0, -6.0, 1.5, 9.0])) and float(sums["loss"]) == 0.75
    assert diagnostics == {}
    assert mechanism.event == NonPrivateDpEvent()


def test_one_cohort_is_one_event() -> None:
    """1/z^2 = 1/1^2 + 1/4^2, of one Poisson draw."""
    event = two_parts().event
    assert isinstance(event, PoissonSampledDpEvent) and event.sampling_probability == 0.25
    assert event.event.noise_multiplier == pytest.approx((1 + 1 / 16) ** -0.5, rel=1e-12)
    everyone = CohortSums(two_parts().parts, 1.0)
    assert isinstance(everyone.event, GaussianDpEvent)


@pytest.mark.statistical
def test_the_noise_on_a_cohort_even_an_empty_one() -> None:
    """Each part has noise of z times its bound, whoever was drawn. False alarm below 1e-6."""
    mechanism = CohortSums((Part("a", (50_000,), 2.0, 1.5), Part("b", (50_000,), 0.5, 3.0)), 0.1)
    sums, _ = mechanism.finish(mechanism.zero(), Stream(3), 0)
    for name, std in (("a", 3.0), ("b", 1.5)):
        assert stats.kstest(sums[name].double().numpy() / std, "norm").pvalue > 2.5e-7
    assert abs(float(torch.corrcoef(torch.stack([sums["a"], sums["b"]]))[0, 1])) < 5 / math.sqrt(50_000)


def test_released_values_lie_on_a_public_grid() -> None:
    """Whatever went into a float sum, its low bits are gone: only multiples of the grid can come out."""
    noisy = on_grid(torch.tensor([0.1, -3.7, 1e-9, 12345.678], dtype=torch.float64), std=1.5)
    steps = noisy / 2.0**-12  # the power of two at or below 1.5 * 2^-12
    assert torch.equal(steps, steps.round()) and (noisy[0] - 0.1).abs() <= 2.0**-13


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Part("a", (2,), 1.0, 1.0), Part("a", (2,), 1.0, 1.0)),  # one client would move the sum twice
        (Part("a", (2,), 0.0, 1.0),),
        (Part("a", (2,), 1.0, -1.0),),
        (Part("a", (2,), math.inf, 1.0),),
    ],
)
def test_sums_that_make_no_sense_are_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ValueError):
        CohortSums(parts, 0.5)


@pytest.mark.statistical
@pytest.mark.parametrize("z", [1e-3, 1.0, 1e5, 1e8, 1e12])
def test_noise_of_any_size_fits_the_fixed_point(z: float) -> None:
    """No overflow: N(5, z^2) on a sum of five aligned clients. False alarm below 1e-6 each."""
    mechanism = CohortSums((Part("a", (20_000,), 1.0, z),), 1.0)
    one = torch.full((20_000,), 20_000**-0.5, dtype=torch.float64)
    found, _ = mechanism.finish(total(mechanism, [{"a": one}] * 5), Stream(4, "noise"), 0)
    sums = found["a"].double().numpy()
    assert stats.kstest((sums - 5 * 20_000**-0.5) / z, "norm").pvalue > 1e-6


def test_a_share_that_is_not_a_number_is_not_added() -> None:
    mechanism = two_parts()
    share, _ = mechanism.share({"update": torch.zeros(4), "loss": torch.tensor(0.0)}, ANYONE)
    share.value["update"][0] = math.nan  # written after it was bounded
    with pytest.raises(TypeError, match="longer than its bound"):
        mechanism.add(mechanism.zero(), share)


def test_a_share_of_the_wrong_shape_or_name_is_refused() -> None:
    mechanism = two_parts()
    with pytest.raises(TypeError, match="shape"):
        mechanism.share({"update": torch.zeros(5), "loss": torch.tensor(0.0)}, ANYONE)
    with pytest.raises(TypeError, match="planned"):
        mechanism.share({"update": torch.zeros(4)}, ANYONE)


# ---- minting ---------------------------------------------------------------------------------------


def test_only_mechanisms_mint() -> None:
    with pytest.raises(TypeError, match=r"return mechanism\.release"):
        Release({"update": torch.zeros(1)}, NoisyTraining(1.0, 1, 1.0, 1.0, 1.0), ())
    with pytest.raises(TypeError, match=r"return mechanism\.share"):
        Share({"update": torch.zeros(1)}, two_parts())


def test_the_canonical_form_tells_any_two_mechanisms_apart() -> None:
    base = {"sample_rate": 0.1, "steps": 3, "clip_norm": 1.0, "noise_multiplier": 1.1, "expected_batch": 32.0}
    changed = [
        base | {key: value * (1 + 2**-52) if isinstance(value, float) else value + 1} for key, value in base.items()
    ]
    texts = {canonical(NoisyTraining(**values)) for values in [base, *changed]}  # type: ignore[arg-type]
    assert len(texts) == 6
    assert canonical(two_parts()) != canonical(two_parts(z=1.0000001))


# ---- from text and back ----------------------------------------------------------------------------

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
RATE = st.floats(min_value=0, max_value=1, exclude_min=True)
NOISE = st.just(0.0) | st.floats(1e-6, 1e6)
NOISED = st.tuples(POSITIVE, NOISE) | st.just((math.inf, 0.0))  # a bound and its noise multiplier
WORD = st.text(max_size=8) | st.sampled_from(["inf", "-inf", "nan", "0x1.8p+1"])  # as floats are written


def trainings() -> st.SearchStrategy[NoisyTraining]:
    return st.builds(
        lambda rate, steps, noised, batch, copies: NoisyTraining(rate, steps, *noised, batch, copies),
        RATE, st.integers(1, 10**9), NOISED, POSITIVE, st.integers(1, 50),
    )  # fmt: skip


def choices() -> st.SearchStrategy[PrivateChoice]:
    epsilon = POSITIVE | st.just(math.inf)
    adjacency, score = st.sampled_from(["add-remove", "replace"]), st.sampled_from(["correct", "loss"])
    return st.builds(PrivateChoice, epsilon, adjacency, score, POSITIVE)


def sums() -> st.SearchStrategy[CohortSums]:
    shape = st.lists(st.integers(0, 10**6), max_size=3).map(tuple)
    part = st.builds(lambda name, shape, noised: Part(name, shape, *noised), WORD, shape, NOISED)
    parts = st.lists(part, min_size=1, max_size=3, unique_by=lambda part: part.name).map(tuple)
    sharers = st.tuples(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
    noised_by = st.none() | sharers.map(lambda pair: Sharers(pair[0], int(pair[0] * pair[1])))
    return st.builds(CohortSums, parts, RATE, noised_by)


def moments() -> st.SearchStrategy[NoisyMoments]:
    columns = st.lists(st.tuples(st.integers(0, 99), st.none() | st.integers(0, 99)), max_size=4).map(tuple)
    return st.builds(NoisyMoments, columns, NOISE)


@settings(max_examples=200, deadline=None)
@given(mechanism=trainings() | choices() | sums() | moments())
def test_every_mechanism_can_be_read_back_from_its_canonical_form(mechanism: Mechanism) -> None:
    """Bit for bit, infinities included: a price that is computed from a ledger is that of what was released."""
    again = from_canonical(canonical(mechanism))
    assert again == mechanism and type(again) is type(mechanism) and again.event == mechanism.event


def changed(**fields: Any) -> str:
    """The canonical form of a training with other fields; None takes one away."""
    plain = json.loads(canonical(NoisyTraining(0.5, 2, 1.0, 1.0, 32.0))) | fields
    return json.dumps({key: value for key, value in plain.items() if value is not None}, sort_keys=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "7", "[]", "{}", '"inf"', "[" * 100_000,
        changed(extra=1), changed(type=None), changed(steps=None), changed(type=7), changed(type="NoisyTraining"),
        changed(sample_rate="0x1.8p+1"), changed(sample_rate="0x1.0p+9999"), changed(sample_rate="a half"),
        changed(steps="three"), changed(steps=[]), changed(noise_multiplier="nan"),
        changed(sample_rate=0.5),  # not as `canonical` writes it
        changed(steps="0x1.8000000000000p+0"), changed(clip_norm=1), changed(steps=True),
        changed(type="fairveil.privacy.training.train"), changed(type="fairveil.privacy.nowhere.NoisyTraining"),
        changed(type="fairveil.privacy..training.NoisyTraining"),
        canonical(Part("a", (2,), 1.0, 1.0)),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_is_no_mechanism_of_the_library_is_none(text: str) -> None:
    """A part of a mechanism has no price either."""
    assert from_canonical(text) is None


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"type": "this.Mechanism"}),
        json.dumps({"type": "fairveil.privacy_of_mine.Mechanism"}),
        json.dumps({"type": "fairveil.privacy.mechanisms.import_module", "name": "this"}),
        json.dumps({"parts": [{"type": "this.s"}], "type": "fairveil.privacy.mechanisms.CohortSums"}, sort_keys=True),
    ],
)
def test_reading_a_ledger_imports_nothing_that_it_names(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger may come from anywhere. The library's modules also hold functions of others, such as import_module."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    before = set(sys.modules)
    assert from_canonical(text) is None and set(sys.modules) == before


@dataclass(frozen=True)
class Mine(NoisyTraining):
    """A mechanism of a user."""


def test_a_mechanism_of_a_user_is_not_guessed() -> None:
    assert from_canonical(canonical(Mine(0.5, 2, 1.0, 1.0, 32.0))) is None
