"""Evidence that a removed block was dead: Theorem 4 of the paper.

Near w = 0, theta = 0 the Lyapunov function

    Lambda(w, theta) = (|w|^2 + theta^2) / 2                                                        (11)

falls along every trajectory, and whatever enters

    A0 = { Lambda < min((-log gamma / (kappa + eta))^2, 1) / 2 }                                    (12)

dies there, with |C1 - C0| <= kappa |w| and |w . grad C1| <= eta |w|. Both constants are estimated from the
block's last steps: to first order in w, C1 - C0 = w . grad C1, so that one number serves for both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shallower.pruner import Pruner, Removal
from shallower.vitals import Vital

Finding = Literal["dead", "dying", "undecided"]


@dataclass(frozen=True)
class Death:
    """A removed block, as it was in its last steps."""

    block: str
    step: int
    theta: float  # when it was removed
    norm: float  # |w| then
    slope: float  # dL/dtheta then: C1 - C0 - log gamma, positive for a block that does not earn its price
    lyapunov: tuple[float, ...]  # Lambda over its last steps, the oldest first
    kappa: float  # as is eta
    radius: float  # of A0, in (w, theta)
    entered: int | None  # the first of its last steps at which it was in A0
    finding: Finding

    @property
    def falls(self) -> bool:
        """Whether Lambda was lower in the second half of the last steps than in the first."""
        return _falls(self.lyapunov)


def deaths(pruner: Pruner) -> list[Death]:
    """What is known of every removed block, in the order of their removal."""
    times = dict(zip(pruner.names, pruner.multipliers.tolist(), strict=True))
    found = []
    for event in pruner.events:
        price = -pruner.log_gamma(event.step - 1) * times[event.block]  # of the step that removed it
        found.append(_death(event, list(pruner.vitals.rows[event.block]), price))
    return found


def _death(event: Removal, rows: Sequence[Vital], price: float) -> Death:
    values = tuple((row.norm**2 + row.theta**2) / 2 for row in rows)  # (11)
    kappa = max((abs(row.change) / row.norm for row in rows if row.norm > 0), default=math.nan)
    radius = min(price / (2 * kappa), 1.0) if kappa > 0 else 1.0  # (12), eta = kappa
    inside = [row.step for row, value in zip(rows, values, strict=True) if value < radius**2 / 2]
    last = rows[-1] if rows else Vital(event.step, event.theta, math.nan, math.nan)
    slope = last.change + price
    finding: Finding = "undecided"
    if rows and inside and inside[-1] == last.step:
        finding = "dead"
    elif rows and slope > 0 and _falls(values):
        finding = "dying"
    return Death(
        block=event.block,
        step=event.step,
        theta=event.theta,
        norm=last.norm,
        slope=slope,
        lyapunov=values,
        kappa=kappa,
        radius=radius,
        entered=inside[0] if inside else None,
        finding=finding,
    )


def _falls(values: Sequence[float]) -> bool:
    half = len(values) // 2
    return half > 0 and sum(values[-half:]) < sum(values[:half])
