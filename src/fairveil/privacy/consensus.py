"""What answers by vote cost where the voters agree, and how to publish that price privately.

For each query the votes are summed to n (C,), and only argmax_j(n_j + N(0, std^2)) is released, ties to the lowest
class. Whatever n is, that costs order * sensitivity^2 / (2 std^2) in Renyi divergence at most. Where one class is far
ahead, noise hardly ever decides, and the answer says little of any single voter: it costs much less.

Such a price depends on the data, so it is private itself: `consensus_rdp` is for the owner's eyes, or is to be labelled
"not sanitised". `SmoothedPrice` publishes an upper estimate with noise by smooth sensitivity, and is priced for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting.rdp import compute_epsilon
from scipy import special

from fairveil.privacy.accounting import Floats, SmoothDpEvent, smooth_rdp
from fairveil.streams import Stream

LEAST = -700.0  # the log of the least chance of another answer that we count with: smaller ones are priced as this
GRID = 2.0**-20  # what is published is a multiple of it: the bits below would tell of the total
ROUNDING = 1e-6  # of a bucket: sums of fractions such as 1/3 miss their multiples by far less


def consensus_rdp(
    votes: Floats, std: float, sensitivity: float, orders: Sequence[float], answers: int | None = None
) -> Floats:
    """An upper bound on the Renyi divergences of all answers between these data and any neighbour, both ways.

    Unit: whatever moves the votes of each query by at most `sensitivity` in Euclidean distance (one agent added or
    removed: 1; one agent, or all that one record can do to its agent's vote, replaced: sqrt 2; one record among k
    neighbours: sqrt(2)/k). Never more than the bound for all data; not sanitised, see above.

    Args:
        votes: sums of votes (Q, C), without noise.
        std: of the noise on each sum.
        sensitivity: see above.
        orders: each above 1.
        answers: the most queries that are answered, where others may be passed over: then the dearest count, whichever
            were answered, since another pattern might have been.

    Returns:
        The total over the queries, one number for each order.
    """
    if votes.ndim != 2 or votes.shape[1] < 2 or not (std > 0 and sensitivity >= 0 and all(a > 1 for a in orders)):
        raise ValueError(f"no price for votes {votes.shape}, std {std}, sensitivity {sensitivity}, orders {orders}")
    behind = np.sort(votes, axis=1)
    behind = behind[:, -1:] - behind[:, :-1]
    # By the union bound: class j wins against the first with N(0, 2 std^2) > its distance (Papernot et al., Prop. 7).
    wrong = special.logsumexp(special.log_ndtr(-behind / (math.sqrt(2) * std)), axis=1)
    most = len(votes) if answers is None else answers
    return np.array([np.sort(_divergence(wrong, sensitivity / std, order))[::-1][:most].sum() for order in orders])


def _divergence(log_wrong: Floats, shift: float, order: float) -> Floats:
    """A bound on the divergence of one answer of a chance of at most q = e^log_wrong to be another than the first.

    P and P' are the laws of the noisy votes for neighbours: Gaussians, `shift` = m standard deviations apart. v = P'/P
    is log-normal, and E is where the answer is another than the first class of these data, P(E) = q. Let g(v) = v^a - 1
    - a (v - 1), which is convex and 0 at 1, with a = order for the divergence of P' from P, or a = 1 - order for that
    of P from P'. Answers are a function of noisy votes, and the linear part of g cancels in the sum over all of them:

        exp((order - 1) D) - 1 <= (1 - q) g(P'(not E)/P(not E)) + the integral of g(v) over E by P.

    By the lemma of Neyman and Pearson P'(E) is within Phi(z - m) and Phi(z + m), z = Phi^-1(q): that bounds the first
    part, by what rises with q. The second is largest where E consists of the two tails of v: see `_in_tails`. It rises
    with q too, so that an upper bound on q will do. Never more than a m^2/2 (a = order), the bound for all data.

    Papernot, Song, Mironov, Raghunathan, Talwar and Erlingsson, "Scalable Private Learning with PATE" (2018), Theorem
    6, bound the two parts by Hoelder's inequality, without the linear terms that cancel, under conditions, and for the
    divergence of P from P' only (that of P' from P may be larger than their bound). This is up to ten times smaller for
    noise of a tenth to a quarter of the gap.
    """
    always, log_q = order * shift**2 / 2, np.clip(log_wrong, LEAST, math.log(0.5))
    z, excess = special.ndtri_exp(log_q), np.zeros_like(log_q)
    with np.errstate(over="ignore", invalid="ignore"):  # where nothing is gained
        for power in (order, 1 - order):  # a
            kept = [special.log_ndtr(-z - way * shift) - special.log_ndtr(-z) for way in (1, -1)]
            first = np.maximum(*[_bend(log_ratio, power) for log_ratio in kept])
            excess = np.maximum(excess, first + _in_tails(log_q, shift, power))
        return np.where(log_wrong < math.log(0.5), np.minimum(np.log1p(excess) / (order - 1), always), always)


def _bend(log_ratio: Floats, power: float) -> Floats:
    """g(v) = v^a - 1 - a (v - 1) at log v."""
    return np.expm1(power * log_ratio) - power * np.expm1(log_ratio)


def _in_tails(log_q: Floats, shift: float, power: float) -> Floats:
    """A bound on the integral of g(v) over any set E with P(E) = q <= 1/2, v = P'/P as in `_divergence`.

    g falls below v = 1 and rises above: what E has on either side weighs no more than in the tail there. So with r of
    its q above, the integral is at most T(r) + T'(q - r), the integrals over the tails of such chances. Each is at most
    what it is at q. And T, T' are concave, with the slopes g at the ends of the tails: so T(q/2) + T'(q/2) plus q/2
    times the difference of the slopes is a bound as well (if the tails of q/2 end on their sides of v = 1).
    """
    log_k = power * (power - 1) * shift**2 / 2  # the integral of v^a over the tails is K Phi(z +- a m)

    def tails(z: Floats) -> Floats:
        powers = np.exp(log_k + np.logaddexp(*[special.log_ndtr(z + way * power * shift) for way in (1, -1)]))
        others, q = special.ndtr(z + shift) + special.ndtr(z - shift), special.ndtr(z)
        size = powers + 2 * q + abs(power) * (others + 2 * q)
        return powers - 2 * q - power * (others - 2 * q) + 1e-12 * size  # more than what rounding takes away

    half = special.ndtri_exp(log_q - math.log(2))
    ends = [_bend(-way * half * shift - shift**2 / 2, power) for way in (1, -1)]
    divided = tails(half) + np.exp(log_q) / 2 * np.abs(ends[0] - ends[1])
    whole = tails(special.ndtri_exp(log_q))
    return np.where(half <= -shift / 2, np.fmin(whole, divided), whole)


@dataclass(frozen=True)
class SmoothedPrice:
    """The private publication of the price of answers, at one order: f + S (N(0, s^2) + c), rounded to a public grid.

    f = sum of h(gap_i) over the queries, where the gap is how far the first class is ahead of the second, and h is
    `_divergence` at q = (C - 1)/2 erfc(gap/(2 std)): all others as strong as the second, so it never falls short.

    Unit and neighbours: as for the votes. A neighbour moves each gap by at most `step` (one agent added or removed: 1,
    replaced: 2, one record among k neighbours: 2/k). S is a beta-smooth bound on the sensitivity (Nissim, Raskhodnikova
    and Smith, "Smooth Sensitivity and Sampling in Private Data Analysis", 2007): |f - f'| <= S, and S <= e^beta S' for
    all neighbours. c = s Phi^-1(1 - failure) lifts the number above f with a chance of 1 - failure. Since c S moves as
    well, by c (e^beta - 1) min(S, S') at most, the means of neighbours are (1 + c (e^beta - 1)) min(S, S') apart, and
    the event states s divided by that factor.

    All four numbers, the noise of the votes, how many queries and classes there are, and `step` are public: choose them
    before looking at votes. The defaults suit 500 to 5,000 answers of some 250 agents, and cost an epsilon of 0.8 at
    delta = 1e-3 on their own. They pay off where that is little beside the bound for all data, and the noise of votes
    is below a fifth or so of the voters; with more of it agreement hardly counts.
    """

    order: float = 8.0
    beta: float = 0.025
    noise_multiplier: float = 8.0  # s
    failure: float = 1e-3  # chance that the number published is too small

    def __post_init__(self) -> None:
        smooth = self.order > 1 and 0 < self.beta < -math.log1p(-1 / self.order) / 2  # else there is no price
        if not (smooth and self.noise_multiplier > 0 and 0 < self.failure < 0.5):
            raise ValueError(f"{self} makes no sense: beta must be within 0 and -log(1 - 1/order)/2")

    @property
    def _lift(self) -> float:
        return self.noise_multiplier * float(special.ndtri(1 - self.failure))  # c

    @property
    def event(self) -> SmoothDpEvent:
        return SmoothDpEvent(self.beta, self.noise_multiplier / (1 + self._lift * math.expm1(self.beta)))

    def describe(self) -> str:
        """One publication in words."""
        return (
            f"the price of these very answers at order {self.order:g}, by smooth sensitivity (beta {self.beta:g}, "
            f"noise multiplier {self.noise_multiplier:g}), too small with a chance of {self.failure:g}"
        )

    def publish(
        self, gaps: Floats, *, classes: int, std: float, sensitivity: float, step: float, stream: Stream
    ) -> float:
        """An upper estimate of the divergence of all answers at `order`; below the true one with a chance of `failure`.

        Args:
            gaps: how far the first class is ahead of the second, without noise (Q,), multiples of step/2; others are
                rounded down to one.
            classes: C, at least 2.
            std: of the noise on each sum of votes.
            sensitivity: of the votes of a query, Euclidean; see `consensus_rdp`.
            step: by how much a neighbour may move a gap.
            stream: of the noise of the number.
        """
        if gaps.ndim != 1 or (gaps < 0).any() or classes < 2 or not (std > 0 and sensitivity >= 0 and step > 0):
            raise ValueError(f"no price for gaps {gaps.shape} of {classes} classes, {std=}, {sensitivity=}, {step=}")
        levels = self._levels(classes, std, sensitivity, step)
        buckets = np.minimum(np.floor(gaps / (step / 2) + ROUNDING).astype(np.int64), len(levels) - 1)
        scale = smooth_sensitivity(levels, buckets, self.beta)
        total = torch.tensor([math.fsum(levels[buckets]) + scale * self._lift + GRID / 2], dtype=torch.float64)
        stream.add_noise(total, scale * self.noise_multiplier, GRID)
        return max(0.0, float(total))

    def _levels(self, classes: int, std: float, sensitivity: float, step: float) -> Floats:
        """h at the multiples of step/2, up to where it does not change any more; non-increasing."""
        unit = step / 2 / (math.sqrt(2) * std)
        last = math.ceil(-float(special.ndtri_exp(LEAST - math.log(classes - 1))) / unit) + 1
        gaps = np.maximum(np.arange(last + 1) - ROUNDING, 0.0) * unit
        levels = _divergence(math.log(classes - 1) + special.log_ndtr(-gaps), sensitivity / std, self.order)
        return np.maximum.accumulate(levels[::-1])[::-1]  # by rounding only


def smooth_sensitivity(levels: Floats, buckets: np.ndarray, beta: float) -> float:
    """A beta-smooth bound on how much the sum of levels[buckets] changes, when no bucket moves by more than 2.

    The change of one is at most w_i = levels[i - 2] - levels[i], i the larger. At d neighbours from here buckets b lie
    within 2d, so i within [b - 2d, b + 2d + 2]. A_d, the sum over all of the largest such w_i, bounds the sensitivity
    (d = 0); and A_d <= A_(d+1) of a neighbour, whose ranges for d + 1 cover these. So max_d e^(-beta d) A_d is smooth.

    We raise w to have one peak; the largest w_i of a range is then the one nearest to the peak.

    Args:
        levels: (B,), non-increasing; after the last they stay as it is.
        buckets: indices (Q,).
        beta: above 0.
    """
    drops = levels[np.maximum(np.arange(len(levels)) - 2, 0)] - levels
    peak = int(drops.argmax())
    rising, falling = np.maximum.accumulate(drops[:peak]), np.maximum.accumulate(drops[peak:][::-1])[::-1]
    drops = np.concatenate([rising, falling])
    places, counts = np.unique(buckets, return_counts=True)
    found, distance, most = 0.0, 0, float(drops[peak] * counts.sum())
    while True:
        nearest = np.clip(peak, places - 2 * distance, places + 2 * distance + 2)
        found = max(found, math.exp(-beta * distance) * float(counts @ drops[nearest]))
        distance += 1
        if math.exp(-beta * distance) * most <= found:  # which happens once all ranges hold the peak, at the latest
            return found


def smoothed_epsilon(published: float, price: SmoothedPrice, delta: float, times: int = 1) -> float:
    """The epsilon at `delta` of all answers and of the published numbers together.

    It is a statement about these data: their answers cannot be told from those of any neighbour's by more. It holds
    with a chance of 1 - times * price.failure over the noise of the numbers, and is no bound for other data: that is
    the price of the Gaussian events together with those of `price.event`.

    Args:
        published: the sum of so many (`times`) numbers, each of other answers.
    """
    return float(compute_epsilon([price.order], [published + times * smooth_rdp(price.event, price.order)], delta)[0])
