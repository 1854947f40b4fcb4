"""Metric privacy: a client's local model leaves it with noise in proportion to a distance in the space of parameters.

Chatzikokolakis, Andres, Bordenabe and Palamidessi, "Broadening the Scope of Differential Privacy Using Metrics" (2013);
for models, Galli, Jung, Biswas, Palamidessi and Cucinotta, "Advancing Personalized Federated Learning: Group Privacy,
Fairness, and Beyond" (2023). Here `n` is the number of parameters, `r` a public radius and `nu` the noise multiplier.

**The secret** is the local model x of a client: what it has trained from one of the hypotheses that it was sent, with
the step clipped to length r. **Neighbours** are any two local models; how well they are hidden depends on how far apart
they are. A mechanism is epsilon-d-private if for all x, x' and all sets S of outputs
P[M(x) in S] <= exp(epsilon * |x - x'|) P[M(x') in S].

**What follows for records.** Let two sets of records of one client lead it to the same hypothesis. Then both local
models lie in the ball of radius r around that hypothesis, at most 2r apart: they are indistinguishable up to
epsilon * 2r, whatever the records are. Over several rounds that adds up, also if later hypotheses depend on earlier
releases, since it holds for every history. With one hypothesis there is nothing to choose, and the sum is a bound for
the client with all its records, under replacement, with trust in nobody. With several, two sets of records that choose
different hypotheses j and j' are only epsilon * (|theta_j - theta_j'| + 2r) apart: **the choice is not protected**,
unless the hypotheses are known to lie within a `spread` of each other. Every client sees them all, and sends nothing
if they do not; then the bound is epsilon * (spread + 2r), whatever the records are.

Without a spread what remains is: for records D, D' and every set S of histories in all of which both choose alike,
P[S | D] <= e^epsilon P[S | D'] + delta, with the epsilon (and, for Gaussian noise, the delta) of steps 2r apart. For
let a client use D' as long as the choices agree and D from then on. Against D that is an adaptive composition of
mechanisms whose inputs are never more than 2r apart; and on S it is D'.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from torch import Tensor

from fairveil.privacy.accounting import MetricDpEvent
from fairveil.privacy.mechanisms import Client, on_grid
from fairveil.privacy.release import MINT, Plain, Release
from fairveil.streams import Stream

ATTEMPTS = 16  # at a Gamma variable; each fails with a chance below 5%


@dataclass(frozen=True)
class Sanitiser(ABC):
    """What the mechanisms of this module share: the local model, clipped, and noise of their own kind."""

    dimension: int  # n
    noise_multiplier: float  # nu

    outputs: ClassVar[tuple[str, ...]] = ("model",)

    def __post_init__(self) -> None:
        if not (self.dimension >= 1 and 0 <= self.noise_multiplier < math.inf):
            raise ValueError(f"{self} makes no sense")

    @property
    @abstractmethod
    def kind(self) -> str:
        """The word for it in the statement."""

    @property
    @abstractmethod
    def event(self) -> DpEvent:
        """What one application does to one client."""

    @abstractmethod
    def describe(self) -> str:
        """One application in words."""

    @property
    def at_radius(self) -> float | None:
        """Epsilon at the distance r, n / nu: what Galli et al. count for one release. None: there is no such number."""
        return self.dimension / self.noise_multiplier if self.noise_multiplier else math.inf

    def check(self, models: Tensor) -> None:
        """Refuse hypotheses (m, n) for which the noise is not made (ValueError). What a client holds plays no part."""
        if models.shape[1] != self.dimension:  # a shorter noise would be spread over all of them, or cut off
            raise ValueError(f"models of {models.shape[1]} parameters, and noise for {self.dimension}")

    @abstractmethod
    def bounded(self, steps: Tensor) -> Tensor:
        """Steps (clients, n) that are short enough, each by itself; float64."""

    @abstractmethod
    def deviations(self, steps: Tensor) -> Tensor:
        """Standard deviation (clients,) of the noise in each coordinate, given the bounded steps."""

    def unit_noise(self, streams: Sequence[Stream]) -> Tensor:
        """Noise (clients, n) of standard deviation 1 in each coordinate."""
        return laplace(streams, self.dimension) / math.sqrt(self.dimension + 1)

    def nothing(self, inputs: Mapping[str, Any]) -> dict[str, Plain]:
        """No model at all, which no client can send: whoever reads it must leave it out."""
        return {"model": torch.full_like(inputs["models"][0], math.nan)}


@dataclass(frozen=True)
class Ball(Sanitiser):
    """Noise for a public ball: a step is clipped to the radius, and the noise is the same for every step.

    A step that is not finite counts as none; a step of length 0 gets the same noise as any other. Clipping moves no two
    local models of one hypothesis further apart; of different ones it may.
    """

    radius: float  # r, public
    spread: float = 0.0  # the most that two hypotheses lie apart; infinite: it is not known

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.radius > 0 and (math.isfinite(self.radius) or not self.noise_multiplier) and self.spread >= 0
        if not known:
            raise ValueError(f"a radius of {self.radius} and a spread of {self.spread} make no sense with this noise")

    @property
    def farthest(self) -> float:
        """The largest distance of two local models of one client; of one hypothesis, where their spread is unknown."""
        return 2 * self.radius + (self.spread if math.isfinite(self.spread) else 0.0)

    def check(self, models: Tensor) -> None:
        super().check(models)
        if math.isfinite(self.spread) and not diameter(models) <= self.spread:  # refuses NaN as well
            raise ValueError(f"hypotheses that are {diameter(models):g} apart, and noise for {self.spread:g}")

    def bounded(self, steps: Tensor) -> Tensor:
        return _clipped(steps, self.radius)

    def describe(self) -> str:
        within = f" within {self.radius:g} of the hypothesis" if math.isfinite(self.radius) else ""
        noise = self._noise() if self.noise_multiplier else "without noise"
        return f"{self.dimension:,} parameters{within}, {noise}"

    @abstractmethod
    def _noise(self) -> str: ...


@dataclass(frozen=True)
class LaplaceBall(Ball):
    """Laplace noise in R^n under the Euclidean norm: density K exp(-epsilon |rho|), epsilon = n / (nu * r).

    The noise does not depend on the client, so that the ratio of the densities of x + rho and x' + rho is at most
    exp(epsilon |x - x'|) by the triangle inequality: epsilon-d-private. |rho| has the law Gamma(n, 1/epsilon), its mean
    is nu * r.
    """

    @property
    def epsilon(self) -> float:
        """For each unit of distance."""
        return self.dimension / (self.noise_multiplier * self.radius) if self.noise_multiplier else math.inf

    @property
    def kind(self) -> str:
        return "local model under metric privacy"

    @property
    def event(self) -> DpEvent:
        return MetricDpEvent(self.epsilon, self.farthest) if self.noise_multiplier else NonPrivateDpEvent()

    def deviations(self, steps: Tensor) -> Tensor:
        std = math.sqrt(self.dimension + 1) / self.epsilon
        return torch.full((len(steps),), std, dtype=torch.float64)

    def _noise(self) -> str:
        return (
            f"Laplace noise of mean length {self.noise_multiplier * self.radius:g}: epsilon {self.epsilon:.6g} for "
            "each unit of distance"
        )


@dataclass(frozen=True)
class GaussianBall(Ball):
    """Gaussian noise of standard deviation nu * r in each coordinate, on a step clipped to r.

    Two local models are at most `farthest` apart: a Gaussian event of multiplier nu * r / farthest, which is nu / 2 for
    one hypothesis. At equal privacy its length grows with sqrt(n), that of Laplace noise with n.
    """

    @property
    def kind(self) -> str:
        return "local model with Gaussian noise"

    @property
    def event(self) -> DpEvent:
        std = self.noise_multiplier * self.radius
        return GaussianDpEvent(std / self.farthest) if self.noise_multiplier else NonPrivateDpEvent()

    @property
    def at_radius(self) -> None:
        return None

    def deviations(self, steps: Tensor) -> Tensor:
        std = self.noise_multiplier * self.radius if self.noise_multiplier else 0.0
        return torch.full((len(steps),), std, dtype=torch.float64)

    def unit_noise(self, streams: Sequence[Stream]) -> Tensor:
        return torch.stack([stream.normal(self.dimension) for stream in streams])

    def _noise(self) -> str:
        return f"Gaussian noise of standard deviation {self.noise_multiplier * self.radius:g}"


@dataclass(frozen=True)
class LaplaceStep(Sanitiser):
    """As Galli et al. have it: Laplace noise with epsilon = n / (nu * |delta|), delta the client's own step, unclipped.

    No guarantee is claimed. How much noise there is tells how long the secret step is, and a client that does not move
    sends its hypothesis without any. The paper counts epsilon * |delta| = n / nu for each time a client takes part.
    """

    leak: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "local model with noise in proportion to its own step"

    @property
    def event(self) -> DpEvent:
        return NonPrivateDpEvent()

    def describe(self) -> str:
        return (
            f"{self.dimension:,} parameters, Laplace noise whose mean length is {self.noise_multiplier:g} times that "
            "of the client's own step"
        )

    def bounded(self, steps: Tensor) -> Tensor:
        return _clipped(steps, math.inf)

    def deviations(self, steps: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(steps, dim=1)
        return length * (self.noise_multiplier / self.dimension * math.sqrt(self.dimension + 1))


def sanitised(
    mechanism: Sanitiser, clients: Sequence[Client], chosen: Sequence[int], local: Tensor
) -> list[tuple[Release, dict[str, float]]]:
    """What the clients send of their local models, all at once.

    The start is one of the inputs "models", so the ball lies where the server knows it.

    Args:
        chosen: (clients,) the hypothesis from which each has started: a row of its input "models".
        local: (clients, n) where its training has ended.

    Returns:
        For each the release of "model" (n,), and diagnostics that stay in the simulation.

    Raises:
        ValueError: the noise is not made for these hypotheses.
    """
    for models in {id(client.inputs["models"]): client.inputs["models"] for client in clients}.values():
        mechanism.check(models)
    start = torch.stack([client.inputs["models"][j] for client, j in zip(clients, chosen, strict=True)]).double()
    steps = local.double() - start
    length = torch.linalg.vector_norm(steps, dim=1)
    bounded = mechanism.bounded(steps)
    deviations = mechanism.deviations(bounded)
    noise = mechanism.unit_noise([client.noise() for client in clients]) if deviations.any() else None
    found = []
    for row, (client, std) in enumerate(zip(clients, deviations.tolist(), strict=True)):
        model = start[row] + bounded[row]
        if noise is not None and std:
            model = on_grid(model + std * noise[row], std)
        kept = float(torch.linalg.vector_norm(bounded[row]))
        diagnostics = {"step": float(length[row]), "clipped": float(kept < float(length[row]) * (1 - 1e-6))}
        if not math.isfinite(diagnostics["step"]):
            diagnostics = {"step": 0.0, "clipped": 0.0, "not_finite": 1.0}
        released = {"model": model.to(client.inputs["models"].dtype)}
        found.append((Release(released, mechanism, client.key, MINT), diagnostics))
    return found


def laplace(streams: Sequence[Stream], dimension: int) -> Tensor:
    """Laplace noise of epsilon 1 in R^n under the Euclidean norm (streams, n), float64, a row from each stream.

    The radius has the law Gamma(n, 1), the direction is uniform on the sphere: n normal values, divided by their
    length. Coordinates have the variance n + 1.
    """
    radius = gamma(streams, dimension)
    noise = torch.stack([stream.normal(dimension) for stream in streams])
    return noise.mul_((radius / torch.linalg.vector_norm(noise, dim=1)).unsqueeze(1))


def gamma(streams: Sequence[Stream], shape: int) -> Tensor:
    """Gamma(shape, 1) for an integer shape from 1 on (streams,), one value from each stream.

    Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables" (2000): exact for every shape, and so for
    millions of parameters, where a sum of exponential variables would take as many draws.
    """
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    normal = torch.stack([stream.normal(ATTEMPTS) for stream in streams])
    uniform = torch.stack([stream.uniform(ATTEMPTS) for stream in streams])
    v = (1 + c * normal) ** 3
    log_v = v.clamp(min=torch.finfo(torch.float64).tiny).log()
    accepted = (v > 0) & (uniform.log() < normal.square() / 2 + d * (1 - v + log_v))
    first = accepted.int().argmax(dim=1, keepdim=True)
    found = d * v.gather(1, first).squeeze(1)
    for row in (~accepted.any(dim=1)).nonzero().flatten().tolist():  # once in 10^20 draws
        found[row] = gamma([streams[row]], shape)[0]
    return found


def diameter(models: Tensor) -> float:
    """The largest distance of two of the models (m, n); NaN if one is not a number."""
    models = models.double()
    return float(torch.stack([torch.linalg.vector_norm(models - model, dim=1).max() for model in models]).max())


def _clipped(steps: Tensor, radius: float) -> Tensor:
    """Each row no longer than the radius; a row that is not finite becomes 0."""
    length = torch.linalg.vector_norm(steps, dim=1, keepdim=True)
    scale = (radius * (1 - 1e-9) / length).clamp(max=1.0)  # a hair shorter, so that rounding leaves none too long
    return torch.where(length.isfinite(), steps * torch.where(length > 0, scale, 1.0), 0.0)
