"""Evidence that a removed block was dead: Theorem 4 of the paper.

Near w = 0, theta = 0 the Lyapunov function

    Lambda(w, theta) = (|w|^2 + theta^2) / 2                                                        (11)

falls along every trajectory, and whatever enters

    A0 = { Lambda < min((-log gamma / (kappa + eta))^2, 1) / 2 }                                    (12)

dies there, with |C1 - C0| <= kappa |w| and |w . grad C1| <= eta |w|. The two constants are bounds over all of
the region; here they are what was seen in the block's last steps, so they are too small, if anything, and the
region too large. The first-order estimate of a closed gate is w . grad C(0), which serves for both: along
t w, 0 <= t <= 1, the way that w takes once theta is 0, a loss that is convex in the last layer gains at most
t times that. An estimator that measures C1 - C0 itself (`flip`) says nothing of the points between: eta is
then how the measured change moved with |w|, and unknown if |w| did not move. The theorem is about w and theta
that follow their slopes at one rate; where w is the faster by far, a block may grow out of A0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shallower.estimators import needs_loss
from shallower.pruner import Pruner, Removal
from shallower.vitals import Vital

Finding = Literal["dead", "dying", "undecided"]
SIGMAS = 2.0  # by which dL/dtheta is to be positive
MOVED = 0.01  # of |w|, between two rows that tell how the change moved with it


@dataclass(frozen=True)
class Death:
    """A removed block, as it was in its last steps.

    dead: it was in A0, as that was seen. dying: theta was pushed to 0, and would have been so all the way to
    w = 0.
    """

    block: str
    step: int
    theta: float  # when it was removed
    norm: float  # |w| then
    slope: float  # dL/dtheta then: C1 - C0 - log gamma, positive for a block that does not earn its price
    noise: float  # the standard error of `slope`
    lyapunov: tuple[float, ...]  # Lambda over its last steps, the oldest first
    kappa: float  # at least
    eta: float  # at least; nan if it is not known
    radius: float  # of A0, in (w, theta), at most; nan if eta is not known, or nothing is to be paid
    entered: int | None  # the first of its last steps from which on it was in A0
    finding: Finding


def deaths(pruner: Pruner) -> list[Death]:
    """What is known of every removed block, in the order of their removal."""
    times = dict(zip(pruner.names, pruner.multipliers.tolist(), strict=True))
    found, exact = [], needs_loss(pruner.estimator)
    for event in pruner.events:
        price = -pruner.log_gamma(event.step - 1) * times[event.block]  # of the step that removed it
        found.append(_death(event, list(pruner.vitals.rows[event.block]), price, exact))
    return found


def _death(event: Removal, rows: Sequence[Vital], price: float, exact: bool) -> Death:
    values = tuple((row.norm**2 + row.theta**2) / 2 for row in rows)  # (11)
    kappa = max((abs(row.change) / row.norm for row in rows if row.norm > 0), default=0.0)
    eta = _secant(rows) if exact else kappa
    radius = min(price / (kappa + eta), 1.0) if kappa + eta != 0 else min(price * math.inf, 1.0)  # (12)
    last = rows[-1] if rows else Vital(event.step, event.theta, math.nan, math.nan, math.nan)
    slope, entered = last.change + price, _entered(rows, values, radius)
    reach = eta * last.norm if exact else -last.change  # the most it could earn on its way to w = 0
    finding: Finding = "undecided"
    if entered is not None:
        finding = "dead"
    elif slope > SIGMAS * last.noise and reach < price:
        finding = "dying"
    return Death(
        block=event.block,
        step=event.step,
        theta=event.theta,
        norm=last.norm,
        slope=slope,
        noise=last.noise,
        lyapunov=values,
        kappa=kappa,
        eta=eta,
        radius=radius,
        entered=entered,
        finding=finding,
    )


def _secant(rows: Sequence[Vital]) -> float:
    """|d(C1 - C0) / d|w||, the largest between two rows; nan if |w| never moved."""
    pairs = [(a, b) for a, b in pairwise(rows) if abs(a.norm - b.norm) > MOVED * max(a.norm, b.norm)]
    return max((abs((a.change - b.change) / (a.norm - b.norm)) for a, b in pairs), default=math.nan)


def _entered(rows: Sequence[Vital], values: Sequence[float], radius: float) -> int | None:
    """The first of the last rows that are all in A0."""
    entered = None
    for row, value in zip(rows, values, strict=True):
        inside = value < radius**2 / 2
        entered = None if not inside else row.step if entered is None else entered
    return entered
