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
    """What is claimed for these units: the claimed epsilon at the run's delta, and at others in proportion.

    The proportions are those of `priced_curve`. If that costs more than is claimed, all of it is scaled down to the
    claim: it is the claim that is put to the test, whatever a price computed anew says of it. Empty: nothing is
    claimed.
    """
    curve, claimed = priced_curve(plan, units), plan.price
    if not curve.delta or claimed.accountant == "sum":
        return Curve((claimed.epsilon,), (0.0,)) if curve.delta else curve
    anew = dict(zip(curve.delta, curve.epsilon, strict=True)).get(claimed.delta, 0.0)
    return curve.scaled(claimed.epsilon / anew) if anew > claimed.epsilon else curve


def priced_curve(plan: Plan, units: Sequence[int]) -> Curve:
    """What everything that one of these units releases costs, at every delta the most that it costs any of them."""
    privacy = plan.config.privacy
    if plan.price.accountant == "sum":
        found = (price(events_of(plan.releases[unit], plan.holders), 0.0).epsilon for unit in units)
        return Curve((max(found),), (0.0,))
    kinds = {frozenset(events_of(plan.releases[unit], plan.holders).items()) for unit in units}
    known = {}
    for delta in sorted({*DELTAS, privacy.delta}):
        prices = [
            price(dict(kind), delta, adjacency=privacy.adjacency, accountant=privacy.accountant) for kind in kinds
        ]
        known[delta] = max(found.epsilon for found in prices)
    finite = {delta: epsilon for delta, epsilon in known.items() if epsilon < math.inf}
    return Curve(tuple(finite.values()), tuple(finite))
