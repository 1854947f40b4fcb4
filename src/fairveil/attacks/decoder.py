"""Which canaries are in? The best linear guess from noisy sums that each of them may be part of."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Decoder:
    """Collects what is seen of m canaries, whose coins are fair and independent.

    A sum is seen as y = base + sum_j n_j u_j + noise of variance 1 in each coordinate, where canary j, if it is in, has
    come up n_j times, `rate` times in the mean; if it is not, n_j = 0. Given the u_j, the linear estimate of least
    error follows from sums of m x m matrices. It takes off what canaries do to each other, which a correlation
    y . u_j alone would not. That it is the best needs all this to be so; that a guess is fair does not.
    """

    def __init__(self, count: int) -> None:
        self._precision = torch.zeros(count, count, dtype=torch.float64)
        self._pull = torch.zeros(count, dtype=torch.float64)
        self._more = torch.zeros(count, dtype=torch.float64)

    def see(self, rest: Tensor, parts: Tensor, rate: float, variance: float) -> None:
        """Take a sum.

        Args:
            rest: y - base (p,).
            parts: u_j, a row each (m, p).
            rate: the mean of n_j if canary j is in.
            variance: of n_j then: whom a draw takes is noise for all others.
        """
        parts = parts.double()
        gram = parts @ parts.T
        seen = parts @ rest.double() - rate / 2 * gram.sum(dim=1)  # fair coins: half of them are in
        noisy = torch.eye(len(gram), dtype=torch.float64) + variance / 2 * gram
        self._precision += rate**2 * torch.linalg.solve(noisy, gram)
        self._pull += rate * torch.linalg.solve(noisy, seen)

    def tell(self, log_ratio: Tensor) -> None:
        """Take (m,) how much likelier something else that was seen is with each canary in than without."""
        self._more += log_ratio.double()

    def log_odds(self) -> NDArray[np.float64]:
        """(m,) for being in: what is seen of canary j as one number with normal noise, times what that is worth."""
        count = len(self._pull)
        inverse = torch.linalg.inv(
            self._precision + 4 * torch.eye(count, dtype=torch.float64)
        )  # a coin has variance 1/4
        found: NDArray[np.float64] = (inverse @ self._pull / inverse.diagonal() + self._more).numpy()
        return found
