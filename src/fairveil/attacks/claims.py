"""What a plan claims of the units that an attack looks at: not one number, but a price at every delta."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairveil.attacks.evidence import Curve
from fairveil.plan import Plan
from fairveil.privacy.accounting import price
from fairveil.privacy.mechanisms import events_of

DELTAS = (1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.35, 0.5)


def claimed_curve(plan: Plan, units: Sequence[int]) -> Curve:
    """What everything that one of these units releases costs, at every delta the most that it costs any of them.

    Empty: nothing is claimed.
    """
    privacy = plan.config.privacy
    if plan.price.accountant == "sum":
        return Curve((plan.price.epsilon,), (0.0,))
    kinds = {frozenset(events_of(plan.releases[unit], plan.holders).items()) for unit in units}
    known = {}
    for delta in sorted({*DELTAS, privacy.delta}):
        prices = [
            price(dict(kind), delta, adjacency=privacy.adjacency, accountant=privacy.accountant) for kind in kinds
        ]
        known[delta] = max(found.epsilon for found in prices)
    finite = {delta: epsilon for delta, epsilon in known.items() if epsilon < math.inf}
    return Curve(tuple(finite.values()), tuple(finite))
