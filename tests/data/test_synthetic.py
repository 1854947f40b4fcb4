"""Generated federations obey the laws they are said to be drawn from."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fairveil.data.datasets import build_federation
from fairveil.data.federation import Decision, Federation
from fairveil.data.synthetic import Attributes, GaussianClusters, Synthetic

NAMES = ["attributes", "gaussian-clusters", "linear-clusters", "loan-groups", "synthetic"]


def build(name: str, seed: int = 0, **options: Any) -> Federation:
    return build_federation(name, options, None, seed)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_at_each_call_in_any_order_and_after_pickling(name: str) -> None:
    federation, again = build(name), pickle.loads(pickle.dumps(build(name)))
    assert federation.fingerprint == again.fingerprint
    assert (federation.size == again.size).all()
    for client in (5, 0, np.int64(5)):  # a numpy integer is the same client
        for part in ("train", "test"):
            left, right = getattr(federation.load(client), part), getattr(again.load(int(client)), part)
            assert torch.equal(left.x, right.x) and torch.equal(left.y, right.y)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_clients_and_options_differ(name: str) -> None:
    federation, other = build(name, seed=0), build(name, seed=1)
    first = federation.load(0).train.x
    assert not torch.equal(first[:10], other.load(0).train.x[:10])
    assert not torch.equal(first[:10], federation.load(1).train.x[:10])
    data = federation.load(0)
    assert not torch.equal(data.train.x[:5], data.test.x[:5])
    smaller = build(name, clients=[2, 3] if name not in ("attributes", "synthetic") else 5)
    assert smaller.clients == 5
    assert len({federation.fingerprint, other.fingerprint, smaller.fingerprint}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_loaded_records_do_not_drag_the_others_along(name: str) -> None:
    train = build(name).load(0).train
    assert train.x.untyped_storage().nbytes() == train.x.nelement() * 4


def test_many_clients_cost_only_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was drawn")

    monkeypatch.setattr(Synthetic, "draw", refuse)
    start = time.perf_counter()
    federation = build("synthetic", clients=5_000)
    assert time.perf_counter() - start < 0.5
    assert federation.clients == 5_000
    assert len(pickle.dumps(federation)) < 5_000 * 8 * 6  # a handful of columns


def test_gaussian_clusters_shape() -> None:
    federation = build("gaussian-clusters")
    assert federation.clients == 21 and federation.features == (10,) and federation.classes == 4
    assert np.bincount(federation.group).tolist() == [3, 6, 6, 6]
    assert federation.groups == ("cluster 0", "cluster 1", "cluster 2", "cluster 3")
    data = federation.load(20)
    assert data.train.x.shape == (200, 10) and data.test.x.shape == (100, 10)
    assert data.train.y.dtype == torch.int64 and set(data.train.y.tolist()) == {0, 1, 2, 3}


@pytest.mark.statistical
def test_gaussian_clusters_law() -> None:
    options = GaussianClusters(clients=(1, 1), records=20_000, features=5, separation=4.0, noise=0.5)
    federation, means = options.load(0), options.means(0)
    assert np.allclose(np.linalg.norm(means, axis=-1), 4)
    for client in (0, 1):
        train = federation.load(client).train
        x, y = train.x.numpy(), train.y.numpy()
        for label in range(4):
            own = x[y == label]
            assert abs(len(own) - 5_000) < 5 * np.sqrt(20_000 * 0.25 * 0.75)
            # 40 means and 40 variances at five standard errors: false alarm below 1e-4.
            assert np.abs(own.mean(0) - means[client, label]).max() < 5 * 0.5 / np.sqrt(len(own))
            assert np.abs(own.var(0) - 0.25).max() < 5 * 0.25 * np.sqrt(2 / len(own))
    assert np.abs(means[0] - means[1]).max() > 0.5  # each cluster has its own


@pytest.mark.statistical
def test_least_squares_finds_theta_in_each_linear_cluster() -> None:
    federation = build("linear-clusters", clients=[40, 60])
    assert federation.classes == 0 and federation.features == (2,)
    assert federation.size.tolist() == [10] * 100
    assert np.bincount(federation.group).tolist() == [40, 60]
    for cluster, theta in enumerate([(5.0, 6.0), (4.0, -4.5)]):
        clients = np.flatnonzero(federation.group == cluster)
        records = [part for c in clients for part in (federation.load(c).train, federation.load(c).test)]
        assert all(part.y.dtype == torch.float32 for part in records)
        x = np.concatenate([part.x.numpy() for part in records])
        y = np.concatenate([part.y.numpy() for part in records])
        found, *_ = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)
        # u has variance 1/12 and mean 1/2; five standard errors, six coefficients: false alarm below 1e-5.
        error = 5 * np.sqrt(1 / 12 / len(x))
        assert np.abs(found - [*theta, 0.5]).max() < error
        noise = y - x @ np.array(theta)
        assert noise.min() > -1e-5 and noise.max() < 1 + 1e-5
        assert np.abs(np.cov(x.T) - np.eye(2)).max() < 5 * np.sqrt(2 / len(x))


@pytest.mark.statistical
def test_loan_groups_law() -> None:
    federation = build("loan-groups")
    assert federation.classes == 0 and federation.features == (2,) and federation.decided
    assert federation.groups == ("majority", "minority") and np.bincount(federation.group).tolist() == [800, 200]
    assert federation.size.tolist() == [10] * 1000 and len(federation.load(999).test) == 100
    # y - (0 or 15) is N(0, |theta|^2) + u, so it is above 0 with chance 1/2 + E[u]/(|theta| sqrt(2 pi)): the majority's
    # label 1; the minority's has the other chance. |theta|^2 = 61 and 36.25.
    laws = [((5.0, 6.0), 0.0, Decision(0.0, above=True), 0.5 + 0.5 / np.sqrt(61 * 2 * np.pi))]
    laws += [((4.0, -4.5), 15.0, Decision(15.0, above=False), 0.5 - 0.5 / np.sqrt(36.25 * 2 * np.pi))]
    for cluster, (theta, shift, decision, approved) in enumerate(laws):
        held = [federation.load(client) for client in np.flatnonzero(federation.group == cluster)]
        assert all(data.decision == decision for data in held)
        x, y = (torch.cat([getattr(data.test, name) for data in held]).double().numpy() for name in "xy")
        noise = y - x @ np.array(theta) - shift
        assert noise.min() > -1e-5 and noise.max() < 1 + 1e-5
        # Two means, two variances and two shares at five standard errors, over 20,000 records at least: below 1e-5.
        assert abs(noise.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(y))
        assert np.abs(np.cov(x.T) - np.eye(2)).max() < 5 * np.sqrt(2 / len(y))
        ones = (y >= 0) if cluster == 0 else (y <= 15)
        assert abs(ones.mean() - approved) < 5 * np.sqrt(0.25 / len(y))
        assert decision.about(torch.from_numpy(y)).tolist() == ones.astype(int).tolist()


def test_other_generated_federations_decide_nothing() -> None:
    for name in set(NAMES) - {"loan-groups"}:
        assert not build(name).decided and build(name).load(0).decision is None


@pytest.mark.statistical
def test_synthetic_sizes() -> None:
    federation = build("synthetic", clients=4_000, max_records=2_000)
    source: Any = federation.source
    held = source.train + source.test
    assert (federation.size == source.train).all()
    assert held.min() >= 50 and held.max() == 2_000
    # log(held - 50) ~ N(4, 2): the median of 4,000 has standard error 2 sqrt(pi/2/4000) = 0.04, and the
    # floor moves it by less than 1/54; 4 standard errors and the floor: false alarm below 1e-4.
    assert abs(np.log(np.median(held) - 50) - 4) < 4 * 0.04 + 0.02
    # P[lognormal(4, 2) >= 1950] = P[Z >= (7.576 - 4)/2] = P[Z >= 1.788] = 0.0369.
    assert abs((held == 2_000).mean() - 0.0369) < 4 * np.sqrt(0.0369 / 4_000)
    assert np.abs(source.test - 0.2 * held).max() <= 0.5
    assert build("synthetic").clients == 100


@pytest.mark.statistical
def test_synthetic_features_and_labels() -> None:
    options = Synthetic(clients=300)
    federation = options.load(0)
    assert federation.features == (60,) and federation.classes == 10 and federation.groups == ("all",)
    records = options.draw(0, 7, 0, 20_000)
    x = records.x.double().numpy()
    expected = np.array([j**-1.2 for j in range(1, 61)])
    # 60 variances at 5 standard errors: false alarm below 1e-4.
    assert np.abs(x.var(0) / expected - 1).max() < 5 * np.sqrt(2 / 20_000)
    correlation = np.corrcoef(x.T) - np.eye(60)
    assert np.abs(correlation).max() < 6 / np.sqrt(20_000)
    # v_k ~ N(B_k, 1), B_k ~ N(0, 1): between clients a feature's mean has variance 2, of which 1 is common.
    means = np.stack([options.draw(0, client, 0, 400).x.double().mean(0).numpy() for client in range(300)])
    assert abs(means.var() - 2) < 5 * np.sqrt(2 / 300) * 2
    assert abs(means.mean(1).var() - 1) < 5 * np.sqrt(2 / 300) * 1.1
    assert abs(means.var(axis=1).mean() - 1) < 0.1
    assert records.y.dtype == torch.int64 and records.y.min() >= 0 and records.y.max() < 10


def test_synthetic_labels_are_those_of_a_linear_model() -> None:
    from sklearn.linear_model import LogisticRegression

    records = Synthetic(features=5, classes=3).draw(0, 1, 0, 2_000)
    fitted = LogisticRegression(C=1e4, max_iter=2_000).fit(records.x, records.y)
    assert fitted.score(records.x, records.y) > 0.99


def test_alpha_moves_no_label() -> None:
    # u_k adds u_k (sum x + 1) to every class: the order of the scores does not depend on it.
    for client in range(20):
        drawn = [Synthetic(alpha=alpha).draw(0, client, 0, 200) for alpha in (0.0, 1.0)]
        assert torch.equal(drawn[0].x, drawn[1].x) and torch.equal(drawn[0].y, drawn[1].y)


def test_beta_zero_centres_the_features() -> None:
    means = [Synthetic(beta=0.0).draw(0, client, 0, 50).x.mean().item() for client in range(100)]
    assert np.std(means) < 0.2  # 1/sqrt(60) = 0.13 from v_k; with beta = 1 it would be 1


def test_attributes_obey_their_law() -> None:
    """Without noise y = [a.h > t] and x = M h exactly; h is N(0, 1 + shift^2) over all clients, so that class c has the
    probability Phi(-t_c / sqrt(1 + shift^2)). 300 clients of 50 records: 0.05 is more than three standard deviations.
    """
    options: dict[str, Any] = {"clients": 300, "records": 50, "noise": 0.0, "label_noise": 0.0, "shift": 0.7}
    federation, law = build("attributes", **options), Attributes(**options)
    assert federation.several and federation.classes == 8 and federation.features == (20,)
    directions, thresholds, image = law.law(0)
    assert np.allclose(np.linalg.norm(directions, axis=1), 1) and len(set(thresholds)) == 8
    parts = [federation.load(client).train for client in range(300)]
    x, y = (torch.cat([getattr(part, side) for part in parts]).numpy() for side in ("x", "y"))
    hidden = np.linalg.lstsq(image, x.T.astype(float), rcond=None)[0].T
    assert np.allclose(hidden @ image.T, x, atol=1e-4)
    sure = np.abs(hidden @ directions.T - thresholds) > 1e-4
    assert ((hidden @ directions.T > thresholds) == y)[sure].all() and sure.mean() > 0.99
    assert np.abs(y.mean(axis=0) - norm.cdf(-thresholds / np.sqrt(1.49))).max() < 0.05
    centres = np.array([part.mean(axis=0) for part in np.split(hidden, 300)])
    assert centres.std() == pytest.approx(np.sqrt(0.49 + 1 / 50), rel=0.1)  # of 1,200 numbers


def test_attributes_are_noisy_as_they_say() -> None:
    law = Attributes(clients=1, records=4000, noise=0.5, label_noise=0.8, shift=0.0)
    directions, thresholds, image = law.law(3)
    drawn = law.draw(3, 0, 0, 4000)
    covariance = np.cov(drawn.x.numpy().T)
    assert np.abs(covariance - image @ image.T - 0.25 * np.eye(20)).max() < 0.25
    expected = norm.cdf(-thresholds / np.sqrt(1 + 0.64))
    assert np.abs(drawn.y.numpy().mean(axis=0) - expected).max() < 0.04  # five standard deviations of 0.008
    together = np.corrcoef(drawn.y.numpy().T)[np.triu_indices(8, 1)]
    assert np.corrcoef(together, (directions @ directions.T)[np.triu_indices(8, 1)])[0, 1] > 0.95
