"""What gradient inversion finds in the updates of a plan: one record, at several strengths of protection.

The attacker's best case. One training record makes the update alone: whoever knows all other records of a client can
take theirs off, and a client may hold one record only. It takes part for certain, from the model of the first round.
The attacker knows that model, every hyper-parameter, the bound that was clipped at, the law of the noise, the record's
label, and the range of the data; and of all attempts the one that comes closest to the truth is shown, which only the
truth can tell. What fails here withstands this attack on one update; an attacker who knows what records look like,
or who has many updates of one record, may do better.

Updates are made by the code that makes them in a run: `local_update`, `personal_update`, or `descent` with the share
and the sum of a cohort. Noise is solved for ONE such release, by somebody who knows that the record takes part, and not
for all rounds of the run; only "this run" has its own noise. Steps are as many as the record is drawn for on average in
a round, and at least one. Weights below 1, perturbed copies and extra parts of a sum, which some systems have, are
left out: they only make the update shorter, or dearer. Features are as they were loaded.

Noise of metric privacy is so many times as long as a step, and has n coordinates: nu says little without n and the
network. In the form of Galli et al., at nu = 1, the sigmoids of `LeNet` (n = 8,026) leave a blur of a digit of 8 by 8
pixels, no closer than a guess, as in their Figure 5. Logistic regression (650), one hidden layer of ReLU (9,610) and
a convolutional network (14,538) give the digit away at 16 to 28 dB. At nu = 10 none does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fairveil.attacks.dlg import COSINE, ORIGINAL, LocalSteps, Matching, guess_label, invert, psnr, ssim
from fairveil.data.federation import ClientData, Records
from fairveil.errors import UserError
from fairveil.plan import Plan
from fairveil.privacy.accounting import calibrate, price
from fairveil.privacy.fair_training import FairTraining
from fairveil.privacy.faithful import MedianClipped
from fairveil.privacy.gradients import ROUNDING
from fairveil.privacy.ledger import FEDERATION
from fairveil.privacy.mechanisms import CohortSums, events_of
from fairveil.privacy.metric import Ball, Sanitiser
from fairveil.privacy.release import MINT, Plain, Release
from fairveil.privacy.statement import json_number
from fairveil.privacy.training import NoisyTraining
from fairveil.session import Member
from fairveil.streams import Stream
from fairveil.tasks import descent, local_update, personal_update

EPSILONS = (1000.0, 100.0, 10.0)  # of one release
MULTIPLIERS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # nu, of metric privacy
FORMS = (ORIGINAL, COSINE, replace(COSINE, total_variation=1e-2))  # the last for much noise
OTHERS, SAMPLE = 20, 200  # clients, and records of each, that tell what a record looks like to those who only guess
SMALLEST = 3  # pixels to the side of an image
Own = NoisyTraining | Sanitiser | CohortSums | MedianClipped


@dataclass(frozen=True)
class Likeness:
    """How close a guess comes to the true record. Both in units of the range of each feature, from 0 to 1.

    Attributes:
        error: root mean square of the difference.
        psnr: in decibels, -20 log10 of the error: infinite for the record itself.
        ssim: structural similarity; None: the record is no image.
    """

    error: float
    psnr: float
    ssim: float | None

    @classmethod
    def of(cls, guess: Tensor, truth: Tensor) -> Likeness:
        similar = ssim(guess, truth) if is_image(truth.shape) else None
        return cls(float((guess.double() - truth.double()).square().mean().sqrt()), psnr(guess, truth), similar)

    def to_json(self) -> dict[str, Any]:
        return {"error": self.error, "psnr": json_number(self.psnr), "ssim": self.ssim}


@dataclass(frozen=True)
class Attempt:
    """What was found in one form of the update.

    Attributes:
        strength: "none", "share", "ε = 10", "ν = 0.1", "this run".
        seen: what the attacker saw.
        noise_multiplier: z, or nu.
        epsilon: of this one release; None: metric privacy, which is stated otherwise.
        noise: length of the noise, over that of what it hides.
        guessed: the label that the last layer gives away; None: it cannot be read off this model. The record was looked
            for with its true label.
        form: the objective that found it.
        x: (*features), from 0 to 1.
    """

    strength: str
    seen: str
    noise_multiplier: float
    epsilon: float | None
    noise: float
    guessed: int | None
    form: str
    x: Tensor
    likeness: Likeness

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self) | self.likeness.to_json()
        del plain["likeness"]
        epsilon = None if self.epsilon is None else json_number(self.epsilon)
        return plain | {"epsilon": epsilon, "noise": json_number(self.noise), "x": _listed(self.x)}


@dataclass(frozen=True)
class Inversion:
    """An attack on the updates of a plan.

    Attributes:
        client: whose record it is, the first of its training records.
        label: its class, or its number; None: it has several classes.
        truth: the record (*features), from 0 to 1 as the least and the most of each feature; of an image, of each
            channel.
        guesses: what comes of guessing: the mean of other records, and one brightness.
        others: how many those are.
        steps: of local training behind the update.
    """

    unit: str
    client: int
    label: float | int | None
    truth: Tensor
    guesses: Mapping[str, Likeness]
    others: int
    steps: int
    attempts: Sequence[Attempt]

    def to_json(self) -> dict[str, Any]:
        """Strictly JSON: an infinite number is the word "infinity"."""
        return {
            "unit": self.unit, "client": self.client, "label": self.label, "features": list(self.truth.shape),
            "image": is_image(self.truth.shape), "truth": _listed(self.truth),
            "guesses": {name: likeness.to_json() for name, likeness in self.guesses.items()},
            "others": self.others, "steps": self.steps, "attempts": [attempt.to_json() for attempt in self.attempts],
        }  # fmt: skip


def is_image(features: Sequence[int]) -> bool:
    """Whether a record can be drawn: (1 or 3 channels, height, width)."""
    return len(features) == 3 and features[0] in (1, 3) and min(features[1:]) >= SMALLEST


def attack_updates(plan: Plan, forms: Sequence[Matching] = FORMS) -> Inversion:
    """Look for a training record of the smallest client in what it would send, at several strengths of protection.

    The same plan, the same result. About half a minute for images of 8 by 8 pixels and small networks; in proportion to
    one forward and backward pass of the model, of which there are some thousands for each strength.

    Raises:
        UserError: no updates are sent, the records are not here, or they cannot be looked for by their gradients.
    """
    own = _mechanism(plan)
    client = int(plan.federation.size.argmin())
    record, others = _records(plan, client)
    low, high = _range(torch.cat([record.x, others.x]), is_image(plan.facts.features))
    attacker = _Attacker(plan, client, own, record, low, high, forms)
    attempts = [attacker.attempt(strength, mechanism) for strength, mechanism in _strengths(plan, own)]
    if isinstance(own, CohortSums | MedianClipped) and plan.config.privacy.trust != "secure-sum":
        attempts.insert(1, attacker.attempt("share", own, share=True))
    truth, known = attacker.unit(record.x[0]), attacker.unit(others.x)
    mean = known.mean(dim=0) if len(known) else torch.full_like(truth, 0.5)
    guesses = {"mean": mean, "flat": torch.full_like(mean, float(mean.mean()))}
    likeness = {name: Likeness.of(guess, truth) for name, guess in guesses.items()}
    label = record.y[0].item() if record.y.dim() == 1 else None
    return Inversion(plan.unit, client, label, truth, likeness, len(others), attacker.steps, attempts)


def _mechanism(plan: Plan) -> Own:
    """That by which an update leaves the client in a round, as the single record has it: with the least noise."""
    name, found = plan.config.algorithm.name, list[Own]()
    client = int(plan.federation.size.argmin())
    for released in plan.releases[FEDERATION if plan.pooled else client]:
        mechanism = released.training if isinstance(released, FairTraining) else released
        if isinstance(mechanism, NoisyTraining):
            drawn = max(1, round(mechanism.steps * mechanism.sample_rate))
            found.append(replace(mechanism, sample_rate=1.0, steps=drawn, expected_batch=1.0, copies=1))
        elif isinstance(mechanism, Sanitiser):
            found.append(mechanism)
        elif isinstance(mechanism, MedianClipped):
            found.append(MedianClipped(mechanism.length, 1.0, mechanism.noise_multiplier))
        elif isinstance(mechanism, CohortSums):
            alone = [replace(p, shape=(plan.facts.parameters,)) for p in mechanism.parts if p.name == "update"]
            found += [CohortSums((part,), 1.0, mechanism.noised_by) for part in alone]
    if not found:
        raise UserError(
            f'algorithm.name = "{name}" sends no updates.',
            "Gradient inversion looks for a record in an update of a model; from votes there is none to look in.\n"
            "Nothing was attacked.",
            "an audit, or membership inference",
        )
    if not isinstance(getattr(plan.algorithm, "learning_rate", None), int | float):
        raise UserError(
            f'algorithm.name = "{name}" does not say how its clients train.',
            "Gradient inversion goes through their steps, of a learning_rate that it must know. Nothing was attacked.",
            "a field learning_rate of the algorithm, as those of this library have it",
        )
    return min(found, key=_noise_of)


def _records(plan: Plan, client: int) -> tuple[Records, Records]:
    """The record that is looked for, and others: those of its client, and of the first clients besides."""
    federation = plan.federation
    if federation.elsewhere:
        raise UserError(
            "the records of this run are on the machines of its clients.",
            "How close an attack comes can only be told beside the true record. Nothing was attacked.",
            "the same config on records that are here, such as a public dataset of the same kind",
        )
    if federation.tokens is not None:
        raise UserError(
            f"the records of {federation.name} are words, by their numbers.",
            "A loss has no gradient by a number of a word, and gradient inversion follows it. Nothing was attacked.",
            "an audit, or membership inference",
        )
    own = federation.load(client).train
    others = [own.take(np.arange(1, min(len(own), SAMPLE)))]
    for other in range(min(OTHERS, federation.clients)):
        if other != client:
            records = federation.load(other).train
            others.append(records.take(np.arange(min(len(records), SAMPLE))))
    pooled = Records(torch.cat([records.x for records in others]), torch.cat([records.y for records in others]))
    return own.take(np.arange(1)), pooled


def _range(x: Tensor, image: bool) -> tuple[Tensor, Tensor]:
    """The least and the most of each feature over records (n, *features); of images, of each channel."""
    over = (0, 2, 3) if image else (0,)
    least, most = x.amin(dim=over), x.amax(dim=over)
    return (least.view(-1, 1, 1), most.view(-1, 1, 1)) if image else (least, most)


def _strengths(plan: Plan, own: Own) -> list[tuple[str, Own]]:
    """The mechanism of the plan, from no protection at all to its own."""
    privacy, levels = plan.config.privacy, list[tuple[str, Own]]()
    if isinstance(own, Sanitiser):
        bounded = not isinstance(own, Ball) or math.isfinite(own.radius)
        levels = [(f"ν = {nu:g}", _noised(own, nu)) for nu in MULTIPLIERS if bounded]
    elif math.isfinite(_bound(own)):
        for epsilon in EPSILONS:
            z = calibrate(
                lambda z: events_of({_noised(own, z): 1}), epsilon, privacy.delta,
                adjacency=privacy.adjacency, accountant=privacy.accountant,
            )  # fmt: skip
            levels.append((f"ε = {epsilon:g}", _noised(own, z)))
    return [("none", _noised(own, 0.0, math.inf)), *levels, ("this run", own)]


def _noised(own: Own, z: float, bound: float | None = None) -> Own:
    """The mechanism with this noise, and with this bound instead of its own."""
    if isinstance(own, CohortSums):
        (part,) = own.parts
        part = replace(part, noise_multiplier=z, bound=part.bound if bound is None else bound)
        return replace(own, parts=(part,))
    if isinstance(own, NoisyTraining) and bound is not None:
        return replace(own, noise_multiplier=z, clip_norm=bound)
    if isinstance(own, Ball) and bound is not None:
        return replace(own, noise_multiplier=z, radius=bound)
    return replace(own, noise_multiplier=z)


def _noise_of(own: Own) -> float:
    """z, or nu."""
    return own.parts[0].noise_multiplier if isinstance(own, CohortSums) else own.noise_multiplier


def _bound(own: Own) -> float:
    """The most that an update may be long, in each step of private training; infinite: as long as it is."""
    if isinstance(own, NoisyTraining):
        return own.clip_norm
    if isinstance(own, CohortSums):
        return own.parts[0].bound
    return own.radius if isinstance(own, Ball) else math.inf


def _listed(x: Tensor) -> list[float]:
    """A record as JSON holds it: to four places."""
    return [round(value, 4) for value in x.double().flatten().tolist()]


class _Attacker:
    """One record of a client, what it sends, and what can be made of that."""

    def __init__(
        self, plan: Plan, client: int, own: Own, record: Records, low: Tensor, high: Tensor, forms: Sequence[Matching]
    ) -> None:
        self.plan, self.client, self.record, self.low, self.high = plan, client, record, low, high
        alike = forms if is_image(plan.facts.features) else [replace(form, total_variation=0.0) for form in forms]
        self.forms = tuple(dict.fromkeys(alike))
        self.steps = own.steps if isinstance(own, NoisyTraining) else int(getattr(plan.algorithm, "local_epochs", 1))
        self.rate = float(cast(Any, plan.algorithm).learning_rate)
        first = "hypothesis 0" if isinstance(own, Sanitiser) else "initial model"
        self.start = plan.model.initial(Stream(plan.config.seed, first))

    def unit(self, x: Tensor) -> Tensor:
        """Records in units of the range, from 0 to 1; a feature that never differs is 0."""
        return (x - self.low) / torch.where(self.high > self.low, self.high - self.low, 1.0)

    def attempt(self, strength: str, mechanism: Own, share: bool = False) -> Attempt:
        """What is found in the update that is sent by this mechanism; of a sum over clients, or in its share."""
        sent, hidden = self._sent(strength, mechanism, share), self._sent(strength, _noised(mechanism, 0.0), share)
        if not sent.isfinite().all():
            raise UserError(
                f"algorithm.learning_rate = {self.rate:g} is too large for a single record.",
                "The training of one record diverges, and there is no update to look into. Nothing was attacked.",
                f"algorithm.learning_rate = {self.rate / 10:g}",
            )
        length, apart = (float(torch.linalg.vector_norm(v.double())) for v in (hidden, sent.double() - hidden.double()))
        noise = apart / length if length else math.inf if apart else 0.0
        tried = [(form, self._found(strength, mechanism, sent, form)) for form in self.forms]
        truth = self.unit(self.record.x[0])
        form, x = max(tried, key=lambda pair: psnr(pair[1], truth))
        z, seen = self._as_seen(mechanism, share)
        return Attempt(
            strength, seen, z, self._epsilon(_noised(mechanism, z)), noise, guess_label(self.plan.model, sent),
            form.objective, x, Likeness.of(x, truth),
        )  # fmt: skip

    def _sent(self, strength: str, mechanism: Own, share: bool) -> Tensor:
        """What leaves the client, or the sum in which it is alone (p,): parameters less those of the start."""
        inputs: dict[str, Plain] = {
            "model": self.start, "models": self.start.unsqueeze(0), "learning_rate": self.rate,
            "local_epochs": self.steps, "batch_size": 1,
        }  # fmt: skip
        key = (f"{self.plan.root} inversion", strength, self.client, "")
        data = ClientData(self.record, self.record.take(np.arange(0)))
        member = Member(data, self.plan.model, inputs, mechanism, {}, key, MINT)
        if isinstance(mechanism, NoisyTraining):
            return cast(Tensor, cast(Release, local_update([member])[0].out).value["update"])
        if isinstance(mechanism, Sanitiser):
            return cast(Tensor, cast(Release, personal_update([member])[0].out).value["model"]) - self.start
        values = {"update": descent([member], self.start.unsqueeze(0))[0] - self.start}
        if isinstance(mechanism, MedianClipped):
            values["weight"] = torch.tensor(1.0)
        if share:
            return mechanism.share(values, member)[0].value["update"].float()
        if isinstance(mechanism, CohortSums):
            mechanism = replace(mechanism, noised_by=None)  # which adds all of the noise that is priced, and no more
        exact = mechanism.zero()
        mechanism.add(exact, mechanism.share(values, member)[0])
        return mechanism.finish(exact, member.noise(), 0)[0]["update"]

    def _found(self, strength: str, mechanism: Own, sent: Tensor, form: Matching) -> Tensor:
        """The record that was found (*features), in units of the range."""
        bound = _bound(mechanism)
        how = LocalSteps(self.rate, self.steps, update_clip=bound)
        if isinstance(mechanism, NoisyTraining):
            how = LocalSteps(self.rate, self.steps, record_clip=bound * ROUNDING)
        found = invert(
            self.plan.model, self.start, sent, how, 1, low=self.low, high=self.high, labels=self.record.y,
            matching=form, stream=Stream(self.plan.root, "inversion", strength, form.objective),
        )  # fmt: skip
        return self.unit(found.x[0]).clamp(0, 1)

    def _as_seen(self, mechanism: Own, share: bool) -> tuple[float, str]:
        """The noise multiplier of what is seen, and what that is."""
        z = _noise_of(mechanism)
        if isinstance(mechanism, NoisyTraining):
            return z, "the client's update"
        if isinstance(mechanism, Sanitiser):
            return z, "the client's local model"
        if not share:
            return z, "the sum over clients"
        sharers = mechanism.noised_by
        return z / math.sqrt(sharers.clients - sharers.tolerated) if sharers else 0.0, "the client's share of the sum"

    def _epsilon(self, mechanism: Own) -> float | None:
        if isinstance(mechanism, Sanitiser):
            return None
        privacy = self.plan.config.privacy
        terms: dict[str, Any] = {"adjacency": privacy.adjacency, "accountant": privacy.accountant}
        return price(events_of({mechanism: 1}), privacy.delta, **terms).epsilon
