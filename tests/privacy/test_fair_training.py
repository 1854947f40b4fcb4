"""Training with fair clipping: the bounds, the coefficients written out, and the price of both sums together."""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from fairveil.data.federation import ClientData, Records
from fairveil.errors import UserError
from fairveil.models import Model, ModelSpec
from fairveil.privacy import gradients
from fairveil.privacy.accounting import price
from fairveil.privacy.fair_training import LARGEST_COEFFICIENT, FairTraining, train_fairly
from fairveil.privacy.gradients import MICRO_BATCH, ROUNDING, Path, clipped_sums, exact_losses
from fairveil.privacy.mechanisms import Client, CohortSums, Part, canonical, from_canonical
from fairveil.privacy.training import NoisyTraining
from fairveil.streams import Stream

MODELS = {
    "logistic": ModelSpec("logistic", (1, 6, 6), 3),
    "mlp": ModelSpec("mlp", (1, 6, 6), 3, {"hidden": 5}),
    "cnn": ModelSpec("cnn", (1, 8, 8), 3),
    "linear": ModelSpec("linear", (40,), 0),
}


def records(spec: ModelSpec, count: int, seed: int, scale: float = 1.0) -> Records:
    random = np.random.default_rng(seed)
    x = torch.from_numpy((scale * random.standard_normal((count, *spec.features))).astype(np.float32))
    return Records(x, torch.from_numpy(random.integers(spec.classes, size=count)))


def without(rows: Records, gone: int) -> Records:
    keep = torch.arange(len(rows)) != gone
    return Records(rows.x[keep], rows.y[keep])


def fair(
    rate: float = 1.0, steps: int = 1, *, clip: float = 1.0, z: float = 0.0, batch: float = 1.0, bound: float = 3.0,
    z_l: float = 0.0,
) -> FairTraining:  # fmt: skip
    return FairTraining(NoisyTraining(rate, steps, clip, z, batch), Part("loss", (), bound, z_l))


def client(model: Model, rows: Records, start: Tensor, key: int = 0, **inputs: Any) -> Client:
    given = {"model": start, "learning_rate": 1.0, "penalty": 0.0, "global_loss": 0.0} | inputs
    member = SimpleNamespace(
        data=ClientData(rows, rows), model=model, inputs=given, key=(key,), noise=lambda: Stream(key, "mechanism")
    )
    return cast(Client, member)


def released(mechanism: FairTraining, member: Client) -> tuple[Tensor, float]:
    value = mechanism.release(member)[0].value
    update, loss = value["update"], value["loss"]
    assert tuple(value) == mechanism.outputs and isinstance(update, Tensor) and isinstance(loss, float)
    return update, loss


def loss_and_gradient(model: Model, weights: Tensor, rows: Records, i: int) -> tuple[float, Tensor]:
    """Of one record alone, by plain autograd."""
    leaf = weights.clone().requires_grad_()
    (loss,) = model.losses(model.unflatten(leaf), rows.x[i : i + 1], rows.y[i : i + 1])
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient.double()


def written_out(
    model: Model, weights: Tensor, rows: Records, clip: float, bound: float, penalty: float, global_loss: float
) -> tuple[Tensor, float]:
    """Both sums, a record at a time: the gradient times its coefficient, then the clip."""
    total, losses = torch.zeros(model.parameters, dtype=torch.float64), 0.0
    for i in range(len(rows)):
        loss, gradient = loss_and_gradient(model, weights, rows, i)
        loss = min(max(loss, 0.0), bound * ROUNDING)
        product = max(0.0, 1 + penalty * (loss - global_loss)) * gradient
        norm = float(product.norm())
        total += product * min(1.0, clip * ROUNDING / norm) if norm else product
        losses += loss
    return total, losses


# ---- the bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logistic", "mlp"])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(("penalty", "global_loss"), [(0.0, 0.0), (0.5, 1.0), (10.0, 2.9), (10.0, 0.0)])
def test_a_record_moves_each_sum_by_at_most_its_bound(
    name: str, clip: float, penalty: float, global_loss: float
) -> None:
    """Every record in turn is removed: ordinary, tiny, with a huge loss and gradient, or with none that is a number."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 12, 7, scale=2.0)
    rows.x[1] *= 1e3
    rows.x[2] *= 1e15
    rows.x[3] *= 1e-6
    rows.x[4, 0, 0, 0] = math.nan
    rows.x[5, 0, 1, 1] = math.inf
    start, mechanism = model.initial(Stream(3)), fair(clip=clip)

    def sums(of: Records) -> tuple[Tensor, float]:
        """At rate 1 and a batch of 1 the update is the sum, and so is the loss."""
        update, loss = released(mechanism, client(model, of, start, penalty=penalty, global_loss=global_loss))
        return update.double(), loss

    (update, loss), moves, loss_moves = sums(rows), [], []
    assert update.isfinite().all() and math.isfinite(loss)
    for gone in range(len(rows)):
        other, other_loss = sums(without(rows, gone))
        moves.append(float((update - other).norm()))
        loss_moves.append(abs(loss - other_loss))
    rounding = 1e-6 * float(start.norm() + update.norm())  # of weights after the step, in float32; not of the sums
    assert max(moves) <= clip + rounding and max(loss_moves) <= 3.0
    assert max(moves) > 0.9 * min(clip, 1.0) and max(loss_moves) > 0.99 * 3.0  # an outlier goes all the way
    for gone in (4, 5):  # what is not finite contributes nothing
        assert moves[gone] <= rounding + 1e-6 * clip and loss_moves[gone] <= 1e-12


def test_rounding_of_losses_does_not_break_the_bound() -> None:
    """A hundred large gradients whose coefficients nearly vanish: there the last bits of a loss weigh most.

    Linear regression, |x| = 1e4 and errors of about 1: losses of 1/2, and F such that the coefficients are 5e-5. Losses
    in float32 are off by 1e-7 or so. That moves such a record by up to 1e-3; with them the rest moved by 3e-3 here.
    """
    model, random = MODELS["linear"].build(), np.random.default_rng(0)
    x = random.standard_normal((100, 40))
    x *= 1e4 / np.linalg.norm(x, axis=1, keepdims=True)
    start = 1e-4 * torch.from_numpy(random.standard_normal(model.parameters)).float()
    rows = Records(torch.from_numpy(x.astype(np.float32)), torch.zeros(100))
    rows = Records(rows.x, (model.predict(start.double(), rows.x.double())[:, 0] - 1).float())

    def total(of: Records) -> Tensor:
        drawn = torch.arange(len(of))
        coefficient = (1 + exact_losses(model, start, of, drawn) - (1.5 - 5e-5)).clamp(min=0.0)
        assert 0.2 < float(coefficient.max()) * 1e4 < 1.0  # not clipped, and not zero
        return clipped_sums(model, start.unsqueeze(0), [of], [drawn], 1.0, [coefficient]).total[0].double()

    whole = total(rows)
    for gone in range(0, 100, 7):
        own = total(Records(rows.x[gone : gone + 1], rows.y[gone : gone + 1]))
        assert torch.linalg.vector_norm(whole - total(without(rows, gone)) - own) <= 1e-4  # nobody else has moved
        assert torch.linalg.vector_norm(own) <= 1.0


def test_inputs_that_would_break_a_bound_are_refused() -> None:
    model, rows = MODELS["logistic"].build(), records(MODELS["logistic"], 3, 0)
    start = model.initial(Stream(0))
    largest = (LARGEST_COEFFICIENT - 1) / 3.0
    released(fair(), client(model, rows, start, penalty=largest))
    for penalty, global_loss in ((1.01 * largest, 0.0), (-0.1, 0.0), (0.1, -1.0), (0.1, math.nan), (math.nan, 0.0)):
        with pytest.raises(ValueError, match="must be at least 0"):
            released(fair(), client(model, rows, start, penalty=penalty, global_loss=global_loss))


# ---- what is summed --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("clip", [0.5, 4.0, math.inf])
def test_coefficients_are_those_of_the_formula(name: str, clip: float) -> None:
    """Against each record alone by autograd; some are clipped, some weigh more than 1, one or more nothing."""
    spec = MODELS[name]
    model, rows = spec.build(), records(spec, 9, 5, scale=2.0)
    start, penalty = model.initial(Stream(1)), 3.0
    each = [loss_and_gradient(model, start, rows, i)[0] for i in range(9)]
    global_loss = sorted(each)[3] + 1 / penalty - 1e-3  # the three least are weighted by zero
    expected, losses = written_out(model, start, rows, clip, 3.0, penalty, global_loss)
    update, loss = released(fair(clip=clip), client(model, rows, start, penalty=penalty, global_loss=global_loss))
    assert torch.allclose(-update.double(), expected, atol=1e-5)
    assert loss == pytest.approx(losses, abs=1e-5)
    plain, _ = released(fair(clip=clip), client(model, rows, start))
    assert (plain - update).norm() > 0.1 * plain.norm()  # or a coefficient that does nothing would pass


def test_several_steps_are_a_plain_loop() -> None:
    """Draw, both sums over that batch, divide by the expected batch; the loss is the mean over all steps."""
    spec = MODELS["logistic"]
    model, rows = spec.build(), records(spec, 20, 4, scale=2.0)
    start = weights = model.initial(Stream(9))
    mechanism = fair(0.4, 3, clip=0.9, batch=8.0)
    member = client(model, rows, start, 21, learning_rate=0.5, penalty=0.7, global_loss=1.1)
    batches, losses = Stream(21, "mechanism"), 0.0
    for _ in range(3):
        drawn = batches.coins(20, 0.4)
        total, more = written_out(model, weights, Records(rows.x[drawn], rows.y[drawn]), 0.9, 3.0, 0.7, 1.1)
        weights, losses = weights - 0.5 / 8 * total.float(), losses + more
    update, loss = released(mechanism, member)
    assert torch.allclose(update, weights - start, atol=1e-5)
    assert loss == pytest.approx(losses / (3 * 8), abs=1e-5)


@pytest.mark.parametrize("by_vmap", [False, True])
def test_coefficients_find_their_records_in_any_batch(by_vmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients with batches of several micro-batches, of a few records and of none, by either path."""
    spec = MODELS["logistic"]
    model = spec.build()
    if by_vmap:
        monkeypatch.setitem(gradients._PATHS, model, Path(None, "a test", model.parameters))
    held = [records(spec, count, seed) for seed, count in enumerate((300, 11, 5))]
    drawn = [torch.arange(1, 300, 2), torch.tensor([0, 7, 10]), torch.arange(0)]
    assert len(drawn[0]) > MICRO_BATCH
    weights = torch.stack([model.initial(Stream(seed)) for seed in range(3)])
    coefficients = [torch.rand(len(rows), dtype=torch.float64) * 3 for rows in drawn]
    found = clipped_sums(model, weights, held, drawn, 2.0, coefficients)
    for k in range(3):
        total, clipped = torch.zeros(model.parameters, dtype=torch.float64), 0
        for row, coefficient in zip(drawn[k].tolist(), coefficients[k].tolist(), strict=True):
            product = coefficient * loss_and_gradient(model, weights[k], held[k], row)[1]
            total += product * min(1.0, 2.0 * ROUNDING / float(product.norm()))
            clipped += bool(product.norm() > 2.0)
        assert torch.allclose(found.total[k].double(), total, atol=1e-4)
        assert int(found.clipped[k]) == clipped
    ones = [torch.ones(len(rows)) for rows in drawn]
    same, plain = (clipped_sums(model, weights, held, drawn, 2.0, given) for given in (ones, None))
    assert torch.equal(same.total, plain.total) and torch.equal(same.clipped, plain.clipped)


def test_those_who_fare_worse_have_a_larger_share() -> None:
    """Nine records in one direction that are nearly learned, one in another that is not: its share rises with lambda.

    Two classes, weights such that the margins are 2 and -1: losses log(1 + e^-2) = 0.127 and log(1 + e) = 1.313. With F
    their mean 0.246 and lambda 2 the coefficients are 0.762 and 3.135, so the share of the tenth rises 4.1-fold.
    """
    spec = ModelSpec("logistic", (2,), 2)
    model = spec.build()
    start = torch.tensor([1.0, -0.5, -1.0, 0.5, 0.0, 0.0])  # weights (2, 2), then biases
    rows = Records(torch.tensor([[1.0, 0.0]] * 9 + [[0.0, 1.0]]), torch.zeros(10, dtype=torch.int64))
    mean = (9 * math.log1p(math.exp(-2)) + math.log1p(math.exp(1))) / 10
    parts = []
    for penalty in (0.0, 2.0):
        update, _ = released(fair(clip=math.inf), client(model, rows, start, penalty=penalty, global_loss=mean))
        many, one = float(update[0]), float(update[1])  # each direction has a weight of its own
        parts.append(one / many)
    assert parts[0] == pytest.approx((1 / (1 + math.exp(-1))) / (9 / (1 + math.exp(2))), rel=1e-5)
    assert parts[1] / parts[0] == pytest.approx(3.135 / 0.762, rel=2e-3)


def test_clients_do_not_depend_on_each_other() -> None:
    spec = MODELS["logistic"]
    model = spec.build()
    start, mechanism = model.initial(Stream(0)), fair(0.5, 4, z=1.0, z_l=6.0, batch=10.0)
    members = [client(model, records(spec, 20, k), start, k, penalty=0.3, global_loss=1.0) for k in range(3)]
    together = train_fairly([mechanism] * 3, members)
    for member, (release, _) in zip(members, together, strict=True):
        assert mechanism.release(member)[0].digest == release.digest


def test_noise_has_the_deviation_that_is_priced() -> None:
    """No records: 400 releases of two steps. The loss has deviation z_l B / (b sqrt(steps)), within 5 errors."""
    spec = MODELS["logistic"]
    model, none = spec.build(), records(spec, 0, 0)
    mechanism = fair(0.5, 2, clip=0.7, z=1.5, z_l=4.0, batch=8.0)
    found = [released(mechanism, client(model, none, torch.zeros(model.parameters), key)) for key in range(400)]
    losses = np.array([loss for _, loss in found])
    assert losses.std() / (4.0 * 3.0 / (8 * math.sqrt(2))) == pytest.approx(1, abs=5 / math.sqrt(2 * 400))
    updates = torch.stack([update for update, _ in found]).double()
    expected = 1.5 * 0.7 / 8 * math.sqrt(2)
    assert float(updates.std()) / expected == pytest.approx(1, abs=5 / math.sqrt(2 * updates.numel()))
    first = updates[:, 0].numpy()
    assert abs(np.corrcoef(losses, first)[0, 1]) < 5 / math.sqrt(400)  # two noises, not one twice


def test_who_is_not_there_has_no_loss() -> None:
    start = torch.ones(5)
    nothing = fair().nothing({"model": start})
    assert torch.equal(cast(Tensor, nothing["update"]), torch.zeros(5))
    assert isinstance(nothing["loss"], float) and math.isnan(nothing["loss"])


class Single(torch.nn.Module):
    """Insists on float32."""

    def __init__(self, features: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(features[0], classes)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x.float()))


def test_a_model_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own")
    vars(module)["Single"] = Single
    monkeypatch.setitem(sys.modules, "own", module)
    spec = ModelSpec("own:Single", (4,), 2)
    model = spec.build()
    with pytest.raises(UserError, match="does not compute in float64"):
        exact_losses(model, model.initial(Stream(0)), records(spec, 3, 0), torch.arange(3))


# ---- the price -------------------------------------------------------------------------------------


def pld(*events: tuple[DpEvent, int]) -> float:
    accountant = PLDAccountant()
    for event, count in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(1e-5))


def test_a_step_is_one_event_of_both_sums() -> None:
    """z = 3 and z_l = 4 make 1 / sqrt(1/9 + 1/16) = 2.4."""
    assert fair(0.1, 7, z=3.0, z_l=4.0).event == SelfComposedDpEvent(
        PoissonSampledDpEvent(0.1, GaussianDpEvent((1 / 9 + 1 / 16) ** -0.5)), 7
    )
    whole = fair(1.0, 1, z=3.0, z_l=4.0).event  # without sampling
    assert isinstance(whole, SelfComposedDpEvent) and isinstance(whole.event, GaussianDpEvent)
    assert whole.event.noise_multiplier == pytest.approx(2.4, rel=1e-12)
    for z, z_l in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        assert fair(0.1, 7, z=z, z_l=z_l).event == NonPrivateDpEvent()


def test_two_events_would_be_priced_too_low() -> None:
    """One draw for both sums costs more than a draw for each; our price is that of dp_accounting for the former."""
    joint = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2 / math.sqrt(1 + 1 / 1.5**2)))
    mechanism = fair(0.05, 200, z=1.2, z_l=1.8)
    ours = price({mechanism.event: 1}, 1e-5, accountant="pld").epsilon
    assert ours == pytest.approx(pld((joint, 200)), rel=2e-3)
    parts = [(PoissonSampledDpEvent(0.05, GaussianDpEvent(z)), 200) for z in (1.2, 1.8)]
    assert pld(*parts) < 0.95 * ours
    assert ours > price({fair(0.05, 200, z=1.2, z_l=7.2).event: 1}, 1e-5, accountant="pld").epsilon


def test_it_can_be_read_back_from_its_canonical_form() -> None:
    mechanism = fair(0.1, 7, z=1.1, z_l=6.6)
    text = canonical(mechanism)
    again = from_canonical(text)
    assert again == mechanism and type(again) is FairTraining and again.event == mechanism.event
    texts = {canonical(m) for m in (mechanism, fair(0.1, 7, z=1.1, z_l=6.7), fair(0.1, 7, z=1.1, z_l=6.6, bound=2.0))}
    assert len(texts) == 3
    for old, new in (
        ('"copies": 1', '"copies": 2'),
        ('"name": "loss"', '"name": "x"'),
        ('"shape": []', '"shape": [2]'),
    ):
        assert old in text and from_canonical(text.replace(old, new)) is None


def test_what_makes_no_sense_is_refused() -> None:
    training, loss = NoisyTraining(0.1, 7, 1.0, 1.1, 32.0), Part("loss", (), 3.0, 6.6)
    FairTraining(training, loss)
    for bound, z_l in ((0.0, 1.0), (-1.0, 1.0), (math.inf, 0.0), (math.nan, 1.0), (1.0, -1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="makes no sense"):
            FairTraining(training, Part("loss", (), bound, z_l))
    with pytest.raises(TypeError, match="makes no sense"):
        FairTraining(cast(Any, CohortSums((loss,), 0.5)), loss)
