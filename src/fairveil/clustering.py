"""Which clients belong together, told from their noisy first updates.

The server sees x_i = mu_m + r_i + noise: the mean of the client's cluster, what its own records add, and DP noise whose
standard deviation s_i per coordinate it knows exactly. Clients are few (n) and coordinates many (p): all that can be
told is in the n x n Gram matrix of the updates.

Two ways. `paper` is the published one of R-DPCFL (Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered
Federated Learning", 2024): a Gaussian mixture on two principal components. `loo` is ours: the known noise comes off,
clients weigh by how little noise they carry, and a client is compared with the mean of a cluster *without itself*, so
that its own noise never speaks for where it is. docs/clustering.md has the formulas and what was measured.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import squareform
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from torch import Tensor

Projection = Literal["loo", "paper"]

CONFIDENT = 2.0  # a number of clusters is believed only if the two nearest are separated by this score
WORST_OF_BEST = 0.25  # ... and by this share of the best score of any number of clusters
CAUTION = 2.75  # scatter inside clusters that were chosen to be tight looks smaller than it is
MOST_CLUSTERS = 7  # looked for when their number is not known
TRACY_WIDOM_99 = 2.0234  # quantile of the law of the largest eigenvalue of a real Wishart matrix
NOTHING = 1e-12  # of the size of the updates: differences below are rounding
BLOCK = 1 << 22  # numbers turned to float64 at a time: 32 MB


@dataclass(frozen=True)
class Clusters:
    """A clustering of n clients into M clusters, and how sure it is."""

    label: np.ndarray  # (n,) 0..M-1, none empty, numbered by first member: client 0 is in cluster 0
    responsibility: np.ndarray  # pi (n, M), rows sum to 1
    mss: float  # smallest separation score of two clusters; 0 for M = 1
    iterations: int  # of EM (paper), or of refining the start that won (loo)
    plane: np.ndarray  # (n, 2) the updates on their two principal components, for pictures

    @property
    def count(self) -> int:
        return self.responsibility.shape[1]

    @property
    def mpo(self) -> float:
        """Largest overlap of two clusters; 1 for M = 1."""
        return overlap(self.mss)


def overlap(mss: float) -> float:
    """2 Q(MSS): the share of two equal Gaussians, 2 MSS standard deviations apart, that lies nearer to the other."""
    return math.erfc(mss / math.sqrt(2))


def gram(updates: Tensor) -> np.ndarray:
    """G = X X^T (n, n) in float64 of float32 updates (n, p), a block of columns at a time: 11 million need no copy."""
    total = np.zeros((len(updates), len(updates)))
    for block in updates.split(max(1, BLOCK // len(updates)), dim=1):
        columns = block.double()
        total += (columns @ columns.T).numpy()
    return (total + total.T) / 2


def find_clusters(
    gram: np.ndarray,
    dimension: int,
    noise: np.ndarray,
    *,
    count: int | None,
    projection: Projection = "loo",
    random: np.random.Generator,
) -> Clusters:
    """Cluster clients by their updates.

    Args:
        gram: (n, n) inner products of the updates.
        dimension: p, coordinates of an update.
        noise: (n,) s_i, known standard deviation per coordinate of the noise in each update; 0 for none.
        count: M. None: found. `loo` then finds clusters of two or more clients, and one cluster if there is no evidence
            for more; `paper` always finds two or more.

    Raises:
        ValueError: more clusters than clients, or numbers that are not finite.
    """
    n = len(gram)
    if gram.shape != (n, n) or noise.shape != (n,) or not n:
        raise ValueError(
            f"a Gram matrix of shape {gram.shape} and noise of shape {noise.shape}: (n, n) and (n,) needed"
        )
    if not (np.isfinite(gram).all() and np.isfinite(noise).all() and (noise >= 0).all()):
        raise ValueError("updates or noise levels are not finite, or a noise level is negative")
    if count is not None and not 1 <= count <= n:
        raise ValueError(f"{count} clusters of {n} clients: at least 1, at most one for each client")

    with threadpool_limits(1):  # sums over several threads would be rounded otherwise on another machine
        return _found(_Known(gram, dimension, noise), count, projection, random)


def _found(known: _Known, count: int | None, projection: Projection, random: np.random.Generator) -> Clusters:
    n = len(known.gram)
    if count == 1 or n == 1:
        return _single(known)
    if known.scale <= NOTHING * np.trace(known.gram) / n:  # all the same: any clusters are as good as any others
        if count is None:
            return _single(known)
        return Clusters(np.arange(n) % count, np.full((n, count), 1 / count), 0.0, 0, np.zeros((n, 2)))
    return _paper(known, count, random) if projection == "paper" else _leave_one_out(known, count, random)


def kmeans(gram: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Labels (n,) of k-means++ on points of which only the Gram matrix is known.

    Exact: the centred Gram matrix is that of n points in at most n dimensions, at the same distances.
    """
    with threadpool_limits(1):
        return _in_order(_kmeans(_principal(_centred(gram), len(gram)), count, random))


def kmeans_from(points: Tensor, centres: Tensor) -> tuple[np.ndarray, Tensor]:
    """Lloyd's k-means of points (n, p), started at these centres (k, p): labels (n,), and the centres where it ends.

    A centre to which no point is nearest in the end is where it started. Of equally near ones the first is taken.
    """
    points, started = points.double(), centres.double()
    centres = started.clone()
    label = torch.full((len(points),), -1)
    for _ in range(300):  # far more than it takes
        nearest = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)
        if torch.equal(nearest, label):
            break
        label = nearest
        for k in label.unique().tolist():
            centres[k] = points[label == k].mean(dim=0)
    empty = torch.bincount(label, minlength=len(centres)) == 0
    return label.numpy(), torch.where(empty.unsqueeze(1), started, centres).float()


def plane_of(points: Tensor) -> np.ndarray:
    """Points (n, p) for a picture (n, 2): as they are if p is 2, else on their two principal directions."""
    with threadpool_limits(1):
        return points.double().numpy() if points.shape[1] == 2 else _principal(_centred(gram(points)), 2)


def match_labels(label: np.ndarray, previous: np.ndarray, count: int) -> np.ndarray:
    """Renumber `label` (n,) so that as many clients as possible keep the number they had in `previous` (n,)."""
    shared = np.zeros((count, count), int)
    np.add.at(shared, (label, previous), 1)
    _, number = linear_sum_assignment(shared, maximize=True)
    return number[label]


def adjusted_rand(label: np.ndarray, truth: np.ndarray) -> float:
    """Agreement of two clusterings, whatever the numbers: 1 if equal, 0 on average by chance."""
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(truth, label))


@dataclass(frozen=True)
class _Known:
    """What the server knows of n updates."""

    gram: np.ndarray  # G (n, n)
    dimension: int  # p
    noise: np.ndarray  # s (n,)

    @cached_property
    def energy(self) -> np.ndarray:
        """E|noise_i|^2 = p s_i^2 (n,)."""
        return self.dimension * self.noise**2

    @cached_property
    def scale(self) -> float:
        """Mean squared distance from the mean of all."""
        return float(np.trace(_centred(self.gram))) / len(self.gram)

    def weights(self, scatter: float) -> np.ndarray:
        """1/(p s_i^2 + tau^2) (n,): the mean that is least noisy; bounded, so that one client is never the mean."""
        return 1 / np.maximum(self.energy + scatter, 1e-4 * self.scale)

    @cached_property
    def debiased(self) -> np.ndarray:
        """The Gram matrix without what noise is expected to add (n, n)."""
        return self.gram - np.diag(self.energy)

    @cached_property
    def plane(self) -> np.ndarray:
        """The updates on two principal components (n, 2), as far as noise lets them be seen."""
        return _principal(_centred(self.debiased), 2)

    @cached_property
    def components(self) -> np.ndarray:
        """The updates on their principal components, the first ones first (n, n); every client counts by its weight."""
        weights = self.weights(0.0)
        root = np.sqrt(weights)
        return _principal(root[:, None] * _centred(self.debiased, weights) * root, len(root)) / root[:, None]

    @cached_property
    def tree(self) -> np.ndarray:
        """Average linkage of the updates."""
        size = np.diag(self.debiased)
        squared = np.maximum(size[:, None] + size - 2 * self.debiased, 0)
        np.fill_diagonal(squared, 0)
        return linkage(squareform(squared, checks=False), "average")


# --- leave one out ---


def _leave_one_out(known: _Known, count: int | None, random: np.random.Generator) -> Clusters:
    if count is not None:
        return _scored(known, *_best(known, _refined(known, count, random)))
    found = []
    if _differ(known):
        for m in range(2, min(MOST_CLUSTERS, len(known.gram) // 2) + 1):
            whole = [each for each in _refined(known, m, random) if np.bincount(each[0]).min() >= 2]
            if whole:
                found.append(_scored(known, *_best(known, whole)))
    top = max((clusters.mss for clusters in found), default=0.0)
    believed = [clusters for clusters in found if clusters.mss >= max(CONFIDENT, WORST_OF_BEST * top)]
    return believed[-1] if believed else _single(known)


def _differ(known: _Known) -> bool:
    """Whether the updates differ by more than their noise, at the 1% level.

    In units of its own noise every row is standard normal. Centred (by the least noisy mean), the Gram matrix is then
    Wishart in n-1 dimensions, and its largest eigenvalue follows the Tracy-Widom law (Johnstone 2001, with the
    constants of Ma 2012). Nothing is drawn, and only n and p matter, not the noise levels.
    """
    n, p = len(known.gram), known.dimension
    unit = np.sqrt(p / np.maximum(known.energy, 1e-9 * known.scale))
    direction = unit / np.linalg.norm(unit)
    centring = np.eye(n) - np.outer(direction, direction)
    top = np.linalg.eigvalsh(centring @ (unit[:, None] * known.gram * unit) @ centring)[-1]
    a, b = math.sqrt(n - 1.5), math.sqrt(p - 0.5)
    return bool(top > (a + b) ** 2 + TRACY_WIDOM_99 * (a + b) * (1 / a + 1 / b) ** (1 / 3))


def _refined(known: _Known, count: int, random: np.random.Generator) -> list[tuple[np.ndarray, int]]:
    """Labels (n,) from every start, with the iterations they took."""
    return [_refine(known, start) for start in _starts(known, count, random)]


def _best(known: _Known, refined: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, int]:
    """The labels whose clusters agree most."""
    scatter = min(_scatter(known, _members(label)) for label, _ in refined)  # one for all: they are compared
    label, iterations = max(refined, key=lambda each: _agreement(known, _members(each[0]), scatter))
    return _in_order(label), iterations


def _starts(known: _Known, count: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Two rough clusterings (n,), both of the updates with the known noise subtracted.

    k-means on M-1 principal components, in which every client counts by its weight; and average linkage.
    """
    weights = known.weights(0.0)
    yield _kmeans(known.components[:, : count - 1], count, random, weights / weights.max())
    yield cut_tree(known.tree, count)[:, 0]


def _refine(known: _Known, label: np.ndarray) -> tuple[np.ndarray, int]:
    """Move the client that gains most to the cluster it is nearest to, until none gains; labels and iterations.

    From 200 clients on, the hundredth of them that gains most moves at once. No client leaves a cluster of two: the one
    left behind could not be checked against anything. A start may have clusters of one, and they stay unless others
    join.
    """
    label, client, seen = label.copy(), np.arange(len(label)), set()
    while label.tobytes() not in seen:  # it could go round in circles: leaving one out is not a descent
        seen.add(label.tobytes())
        members = _members(label)
        distance, _ = _distances(known, members, _scatter(known, members))
        gain = distance[client, label] - distance.min(axis=1)
        gain[members.sum(axis=0)[label] <= 2] = 0
        for mover in np.argsort(-gain, kind="stable")[: max(1, len(label) // 100)]:
            if gain[mover] > 0 and np.count_nonzero(label == label[mover]) > 2:
                label[mover] = distance[mover].argmin()
    return label, len(seen)


def _scatter(known: _Known, members: np.ndarray) -> float:
    """tau^2: how far updates lie from the mean of their cluster (squared), beyond what the known noise explains."""
    n, count = members.shape
    size = members.sum(axis=0)
    within = np.trace(known.gram) - (np.einsum("im,im->m", members, known.gram @ members) / size).sum()
    expected = (known.energy * (1 - members @ (1 / size))).sum()
    return max(0.0, float(within - expected)) / max(1, n - count)


def _distances(known: _Known, members: np.ndarray, scatter: float) -> tuple[np.ndarray, np.ndarray]:
    """From each client to each cluster without that client.

    Returns:
        d2 (n, M), squared distance from x_i to the weighted mean of m without i, less what noise and scatter add to it;
        and v (n, M), the squared error of that mean. For a client alone in its cluster both are 0, as if on its mean.
    """
    energy = known.energy + scatter
    w = members * known.weights(scatter)[:, None]
    alone = members * (members.sum(axis=0) == 1) > 0
    total = np.where(alone, 1.0, w.sum(axis=0) - w)
    inner = known.gram @ w  # x_i . sum of w_j x_j
    square = np.einsum("im,im->m", w, inner)
    own = np.diag(known.gram)[:, None]
    error = ((w**2).T @ energy - w**2 * energy[:, None]) / total**2
    to_mean = own - 2 * (inner - w * own) / total + (square - 2 * w * inner + w**2 * own) / total**2
    return np.where(alone, 0.0, to_mean - energy[:, None] - error), np.where(alone, 0.0, error)


def _agreement(known: _Known, members: np.ndarray, scatter: float) -> float:
    """Squared distance of the cluster means from the mean of all, weighted, from products of *different* clients only.

    With equal weights: sum over m of sum over i != j in m of B_ij/(n_m - 1), B the centred Gram matrix.
    """
    weights = known.weights(scatter)
    w = members * weights[:, None]
    centred = _centred(known.gram, weights)
    itself = (w**2).T @ np.diag(centred)
    between = np.einsum("im,im->m", w, centred @ w) - itself
    alone = members.sum(axis=0) == 1
    pairs = np.where(alone, 1.0, w.sum(axis=0) - (w**2).sum(axis=0) / w.sum(axis=0))
    single = (itself - (w**2).T @ known.energy) / w.sum(axis=0)  # nobody to be compared with: the known noise must do
    return float(np.where(alone, single, between / pairs).sum())


def _apart(known: _Known, members: np.ndarray, scatter: float) -> tuple[np.ndarray, np.ndarray]:
    """D^2 (M, M) of cluster means, and v (M,), the squared error of each.

    From products of different clients only, which have no bias whatever the noise; the updates are centred first, for
    what all of them share would only add noise. A cluster of one client must rely on the known noise.
    """
    weights, size = known.weights(scatter), members.sum(axis=0)
    share = members * weights[:, None]
    share /= share.sum(axis=0)
    centred = _centred(known.gram, weights)
    product = share.T @ centred @ share
    itself, own = (share**2).T @ np.diag(centred), np.diag(product)
    pairs = np.where(size > 1, 1 - (share**2).sum(axis=0), 1.0)
    square = np.where(size > 1, (own - itself) / pairs, own - (share**2).T @ known.energy)
    apart = np.maximum(square[:, None] + square - 2 * product, 0) * (1 - np.eye(len(size)))
    return apart, (share**2).T @ (known.energy + scatter)


def _scored(known: _Known, label: np.ndarray, iterations: int) -> Clusters:
    """Separation of every pair of clusters, and how sure each client's place is.

    x_i is told from cluster b by its margin u_ib = (d2_ib - d2_ia)/2, a its own. The mean of u is D^2/2, D the distance
    of the two means; its variance is (s_i^2 + r^2)(D^2 + v_a + v_b), r the scatter of updates along lines between
    means. Score: D^2/(2 standard deviations), which is D/(2 sigma) of the paper if the means were known.
    """
    client, members = np.arange(len(label)), _members(label)
    tau, size, variance = _scatter(known, members), members.sum(axis=0), known.noise**2
    distance, error = _distances(known, members, tau)
    apart, noise = _apart(known, members, tau)

    margin = (distance - distance[client, label][:, None]) / 2
    length = apart[label] + error + error[client, label][:, None]  # |mean_a - mean_b|^2 as client i sees it (n, M)
    # r^2, pooled over all pairs: the variance of the margins inside clusters, beyond the known noise
    spread = members.T @ (margin - (members.T @ margin / size[:, None])[label]) ** 2
    expected = members.T @ (variance[:, None] * length) * (1 - 1 / size)[:, None]
    mean_length = members.T @ length / size[:, None]
    counted = (1 - np.eye(len(size)) > 0) & (size[:, None] > 1) & (mean_length > 0)
    excess = np.divide(spread - expected, mean_length, where=counted, out=np.zeros_like(spread)).sum()
    freedom = (counted * (size - 1)[:, None]).sum()
    along = CAUTION * max(0.0, float(excess)) / max(1.0, float(freedom))

    pooled = members.T @ variance
    pair_variance = (pooled[:, None] + pooled) / (size[:, None] + size) + along
    score = _ratio(apart, 2 * np.sqrt(pair_variance * (apart + noise[:, None] + noise)))
    mss = float(score[~np.eye(len(size), dtype=bool)].min())
    # a client held back in a cluster of two may have a negative margin: its places are then equally likely
    sure = _ratio(apart[label], np.sqrt((variance[:, None] + along) * length))
    surprise = _ratio(np.maximum(margin, 0), apart[label]) * sure**2  # u D^2/V
    likely = np.exp(-np.minimum(surprise, 700))
    return Clusters(label, likely / likely.sum(axis=1, keepdims=True), mss, iterations, known.plane)


def _ratio(apart: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """apart/deviation, 0 where nothing is apart, at most a million: without noise it would be infinite."""
    return np.divide(apart, np.maximum(deviation, 1e-6 * apart), where=apart > 0, out=np.zeros_like(apart))


# --- as published ---


def _paper(known: _Known, count: int | None, random: np.random.Generator) -> Clusters:
    """Two principal components, each scaled to [0, 1], and a spherical mixture; M unknown: the largest MSS."""
    n = len(known.gram)
    points = _principal(_centred(known.gram), 2)
    span = np.ptp(points, axis=0)
    scaled = (points - points.min(axis=0)) / np.where(span > 0, span, 1)
    counts = [count] if count is not None else range(2, min(10, n - 1) + 1)
    found = [_mixture(scaled, m, points, random) for m in counts]
    return max(found, key=lambda clusters: clusters.mss, default=_single(known))


def _mixture(scaled: np.ndarray, count: int, plane: np.ndarray, random: np.random.Generator) -> Clusters:
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(
        count,
        covariance_type="spherical",
        init_params="k-means++",
        tol=1e-6,
        reg_covar=1e-6,
        random_state=_seed(random),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged in 100 iterations: the authors go on with what there is
        mixture.fit(scaled)
    mixture.weights_ = np.full(count, 1 / count)
    responsibility = mixture.predict_proba(scaled)
    label = _fill(responsibility.argmax(axis=1), count)
    order = np.argsort([np.flatnonzero(label == m)[0] for m in range(count)])
    centre, deviation = mixture.means_, np.sqrt(mixture.covariances_)
    apart = np.linalg.norm(centre[:, None] - centre, axis=2)
    score = apart / (2 * np.maximum(deviation[:, None], deviation))
    mss = float(score[~np.eye(count, dtype=bool)].min())
    return Clusters(_in_order(label), responsibility[:, order], mss, int(mixture.n_iter_), plane)


# --- shared ---


def _single(known: _Known) -> Clusters:
    n = len(known.gram)
    return Clusters(np.zeros(n, int), np.ones((n, 1)), 0.0, 0, known.plane)


def _centred(gram: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Gram matrix of the points less their (weighted) mean."""
    share = np.full(len(gram), 1 / len(gram)) if weights is None else weights / weights.sum()
    with_mean = gram @ share
    return gram - with_mean[:, None] - with_mean + share @ with_mean


def _principal(gram: np.ndarray, dimensions: int) -> np.ndarray:
    """Coordinates (n, dimensions) of points on their principal axes, from their Gram matrix; signs made definite."""
    value, vector = np.linalg.eigh(gram)
    points = (vector * np.sqrt(np.maximum(value, 0)))[:, ::-1][:, :dimensions]
    points = np.pad(points, ((0, 0), (0, dimensions - points.shape[1])))
    return points * np.where(points[np.abs(points).argmax(axis=0), np.arange(dimensions)] < 0, -1, 1)


def _kmeans(
    points: np.ndarray, count: int, random: np.random.Generator, weights: np.ndarray | None = None
) -> np.ndarray:
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different points than clusters
        label = KMeans(count, n_init=10, random_state=_seed(random)).fit(points, sample_weight=weights).labels_
    return _fill(label.astype(int), count)


def _seed(random: np.random.Generator) -> int:
    return int(random.integers(2**31))


def _fill(label: np.ndarray, count: int) -> np.ndarray:
    """Give every empty cluster the last client of the largest."""
    label = label.copy()
    for empty in sorted(set(range(count)) - set(label.tolist())):
        largest = np.bincount(label).argmax()
        label[np.flatnonzero(label == largest)[-1]] = empty
    return label


def _members(label: np.ndarray) -> np.ndarray:
    """(n, M): 1 where client i is in cluster m, else 0."""
    return (label[:, None] == np.arange(label.max() + 1)).astype(float)


def _in_order(label: np.ndarray) -> np.ndarray:
    """Clusters numbered by their first member."""
    _, first, number = np.unique(label, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]
