"""Generated federations: drawn on loading from (seed, client), so a thousand clients cost a few columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt

from fairveil.data.federation import ClientData, Dataset, Decision, Federation, Records, fingerprint
from fairveil.data.partition import TestFraction, held_out
from fairveil.streams import Stream


class Generated(Dataset):
    """A dataset that is drawn from its options and a seed.

    Attributes:
        name: in the registry, in the fingerprint, and of its random streams.
        groups: names of the clusters; empty: they are known by their numbers.
        several: whether a record may have several of the classes at once.
    """

    name: ClassVar[str]
    groups: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = False

    @abstractmethod
    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """`count` independent records of one client, the same at each call."""

    def decision(self, cluster: int) -> Decision | None:
        """What follows from the numbers of a cluster's clients; None: nothing, whatever the cluster."""
        return None

    def federation(
        self,
        seed: int,
        train: np.ndarray,
        test: np.ndarray,
        clusters: Sequence[int],
        features: int,
        classes: int,
    ) -> Federation:
        """The federation of clients with `train` and `test` (clients,) records, cluster after cluster.

        `clusters` says how many clients each has.
        """
        group = np.repeat(np.arange(len(clusters)), clusters)
        groups = tuple(f"cluster {m}" for m in range(len(clusters))) if len(clusters) > 1 else ("all",)
        groups, decided = self.groups or groups, self.decision(0) is not None
        source = Drawn(self, seed, group, train, test)
        mark = fingerprint(self.name, self.model_dump_json(), seed)
        return Federation(
            self.name, train, group, groups, (features,), classes, source, mark, decided=decided, several=self.several
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """A source that draws a client's records when they are asked for."""

    dataset: Generated
    seed: int
    group: np.ndarray
    train: np.ndarray
    test: np.ndarray

    def load(self, client: int) -> ClientData:
        """Records are independent, so the first ones are as good a training set as any."""
        train, test, cluster = int(self.train[client]), int(self.test[client]), int(self.group[client])
        drawn = self.dataset.draw(self.seed, client, cluster, train + test)
        # Clones: a slice would keep (and send, when pickled) the whole storage.
        first, last = (
            Records(drawn.x[part].clone(), drawn.y[part].clone()) for part in (slice(None, train), slice(train, None))
        )
        return ClientData(first, last, decision=self.dataset.decision(cluster))


class GaussianClusters(Generated):
    """Classification; each cluster has class means of its own.

    The mean of class c in cluster m is drawn once, uniformly on the sphere of radius `separation`; a record
    is a uniformly drawn label and x ~ N(mean, noise^2 I). Two means lie about sqrt(2) * separation apart.

    Attributes:
        clients: in each cluster.
        records, test_records: of each client.
        features, classes: dimensions.
        separation: distance of each mean from the origin.
        noise: standard deviation of each feature about its mean.
    """

    name = "gaussian-clusters"
    clients: tuple[PositiveInt, ...] = Field((3, 6, 6, 6), min_length=1)
    records: PositiveInt = 200
    test_records: PositiveInt = 100
    features: PositiveInt = 10
    classes: Annotated[int, Field(ge=2)] = 4
    separation: PositiveFloat = 3.0
    noise: PositiveFloat = 1.0

    def load(self, seed: int) -> Federation:
        """Clients of equal size."""
        train, test = (np.full(sum(self.clients), count) for count in (self.records, self.test_records))
        return self.federation(seed, train, test, self.clients, self.features, self.classes)

    def means(self, seed: int) -> np.ndarray:
        """(clusters, classes, features): where each class of each cluster sits."""
        shape = (len(self.clients), self.classes, self.features)
        drawn = Stream(seed, self.name, "means").numpy.standard_normal(shape)
        return np.asarray(self.separation * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))

    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """See the class."""
        random = Stream(seed, self.name, "client", client).numpy
        y = random.integers(self.classes, size=count)
        x = self.means(seed)[cluster, y] + self.noise * random.standard_normal((count, self.features))
        return _records(x, torch.from_numpy(y))


class LinearClusters(Generated):
    """Regression; y = x^T theta_m + u, u ~ Uniform[0, 1), with theta_1 = (5, 6) and theta_2 = (4, -4.5).

    Galli, Jung, Biswas, Palamidessi, Cucinotta, "Advancing Personalized Federated Learning: Group Privacy,
    Fairness, and Beyond", 2023. The paper does not give the law of x: here x ~ N(0, I). Nor does it centre u,
    so the best linear model has the intercept 1/2.

    Attributes:
        clients: in each of the two clusters.
        records, test_records: of each client.
    """

    name = "linear-clusters"
    THETA: ClassVar[np.ndarray] = np.array([[5.0, 6.0], [4.0, -4.5]])  # theta*_1, theta*_2
    clients: tuple[PositiveInt, PositiveInt] = (50, 50)
    records: PositiveInt = 10
    test_records: PositiveInt = 100

    def load(self, seed: int) -> Federation:
        """Clients of equal size."""
        train, test = (np.full(sum(self.clients), count) for count in (self.records, self.test_records))
        return self.federation(seed, train, test, self.clients, 2, 0)

    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """See the class."""
        random = Stream(seed, self.name, "client", client).numpy
        x = random.standard_normal((count, 2))
        y = x @ self.THETA[cluster] + random.random(count)
        return _records(x, torch.from_numpy(y.astype(np.float32)))


class LoanGroups(LinearClusters):
    """Regression, and a loan by it; y = x^T theta_1 + u for a majority, x^T theta_2 + 15 + u for a minority.

    Galli, Jung, Biswas, Palamidessi, Cucinotta, "Advancing Personalized Federated Learning: Group Privacy,
    Fairness, and Beyond", 2023, the fairness analysis. theta, u and x as in `LinearClusters`. A model predicts y; a
    loan (1) is approved for the majority where Sigmoid(y) >= 1/2, so y >= 0, and for the minority where
    Sigmoid(y - 15) <= 1/2, so y <= 15: both of the true y and of the predicted one.

    Attributes:
        clients: in the majority and in the minority.
        records, test_records: of each client.
    """

    name = "loan-groups"
    groups = ("majority", "minority")
    SHIFT: ClassVar[tuple[float, float]] = (0.0, 15.0)
    clients: tuple[PositiveInt, PositiveInt] = (800, 200)

    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """See the class."""
        drawn = super().draw(seed, client, cluster, count)
        return Records(drawn.x, drawn.y + self.SHIFT[cluster])

    def decision(self, cluster: int) -> Decision:
        """The minority's is inverted."""
        return Decision(self.SHIFT[cluster], above=cluster == 0)


class Synthetic(Generated):
    """Synthetic(alpha, beta): every client has a model and a feature distribution of its own.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", 2020;
    with alpha = beta = 1 and 100 clients in Du, Xiang, Wu, "Mitigating Unfairness in Differentially-Private
    Federated Learning", 2025. For client k:

        y = argmax(softmax(W_k x + b_k)),  W_k, b_k ~ N(u_k, 1) elementwise,  u_k ~ N(0, alpha)
        x ~ N(v_k, Sigma),  Sigma = diag(j^-1.2),  v_k ~ N(B_k, 1) elementwise,  B_k ~ N(0, beta)

    alpha and beta are standard deviations, as in the generator that Li et al. published. Because u_k adds the
    same amount to the score of every class, alpha moves no label: models differ between clients already at
    alpha = 0. A client holds floor(lognormal(4, 2)) + 50 records in all (median 104), at most `max_records`:
    the tail is so heavy that one client in 200 would hold more than 10,000.

    Attributes:
        alpha, beta: spread of u_k and of B_k between clients.
        clients: how many.
        features, classes: dimensions.
        max_records: the most that a client holds, before the test records are set aside.
        test_fraction: of each client's records.
    """

    name = "synthetic"
    alpha: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(ge=0)] = 1.0
    clients: PositiveInt = 100
    features: PositiveInt = 60
    classes: Annotated[int, Field(ge=2)] = 10
    max_records: Annotated[int, Field(ge=50)] = 10_000
    test_fraction: TestFraction = 0.2

    def load(self, seed: int) -> Federation:
        """Sizes are drawn here, records when a client is loaded."""
        drawn = Stream(seed, self.name, "sizes").numpy.lognormal(4, 2, self.clients)
        held = np.minimum(np.floor(drawn) + 50, self.max_records).astype(np.int64)
        test = held_out(held, self.test_fraction)
        return self.federation(seed, held - test, test, (self.clients,), self.features, self.classes)

    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """See the class."""
        random = Stream(seed, self.name, "client", client).numpy
        shift = self.alpha * random.standard_normal()  # u_k
        centre = self.beta * random.standard_normal()  # B_k
        weights = shift + random.standard_normal((self.classes, self.features))  # W_k
        bias = shift + random.standard_normal(self.classes)  # b_k
        mean = centre + random.standard_normal(self.features)  # v_k
        deviation = np.arange(1, self.features + 1) ** (-1.2 / 2)  # sqrt of Sigma's diagonal
        x = mean + deviation * random.standard_normal((count, self.features))
        y = (x @ weights.T + bias).argmax(axis=1)  # softmax keeps the order
        return _records(x, torch.from_numpy(y))


class Attributes(Generated):
    """Records that may have several classes at once, like the attributes of a face: some often go together.

    A record has hidden factors h ~ N(b_k, I), around a centre b_k ~ N(0, shift^2 I) of its client k. It has class c if
    a_c.h + u > t_c, and one sees x = M h + e. The law is the same for all clients: each a_c is drawn uniformly on the
    unit sphere, t_c ~ N(0, 1/4), so that some classes are rarer than others, and M ~ N(0, 1/factors) elementwise;
    u ~ N(0, label_noise^2) and e ~ N(0, noise^2 I) are drawn for each record.

    Attributes:
        clients: how many.
        records, test_records: of each client.
        features, classes: dimensions of x and y.
        factors: dimension of h; the fewer, the more the classes tell of each other.
        shift: how far clients lie apart: what one holds is a part of the whole only.
        noise, label_noise: standard deviations.
    """

    name = "attributes"
    several = True
    clients: PositiveInt = 100
    records: PositiveInt = 100
    test_records: PositiveInt = 50
    features: PositiveInt = 20
    classes: Annotated[int, Field(ge=2)] = 8
    factors: PositiveInt = 4
    shift: Annotated[float, Field(ge=0)] = 0.5
    noise: Annotated[float, Field(ge=0)] = 0.3
    label_noise: Annotated[float, Field(ge=0)] = 0.2

    def load(self, seed: int) -> Federation:
        """Clients of equal size."""
        train, test = (np.full(self.clients, count) for count in (self.records, self.test_records))
        return self.federation(seed, train, test, (self.clients,), self.features, self.classes)

    def law(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The a_c (classes, factors), t (classes,) and M (features, factors)."""
        random = Stream(seed, self.name, "law").numpy
        directions = random.standard_normal((self.classes, self.factors))
        thresholds = random.standard_normal(self.classes) / 2
        image = random.standard_normal((self.features, self.factors)) / np.sqrt(self.factors)
        return directions / np.linalg.norm(directions, axis=1, keepdims=True), thresholds, image

    def draw(self, seed: int, client: int, cluster: int, count: int) -> Records:
        """See the class."""
        random = Stream(seed, self.name, "client", client).numpy
        directions, thresholds, image = self.law(seed)
        centre = self.shift * random.standard_normal(self.factors)
        hidden = centre + random.standard_normal((count, self.factors))
        scores = hidden @ directions.T + self.label_noise * random.standard_normal((count, self.classes))
        x = hidden @ image.T + self.noise * random.standard_normal((count, self.features))
        return _records(x, torch.from_numpy((scores > thresholds).astype(np.int64)))


def _records(x: np.ndarray, y: torch.Tensor) -> Records:
    return Records(torch.from_numpy(x.astype(np.float32)), y)
