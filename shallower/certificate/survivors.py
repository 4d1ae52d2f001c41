"""What the paper's optimality conditions ask of a survivor, theta = 1:

    O1   grad^2 C1(w) + lambda >= 0           its last layer is at a minimum, not at a saddle
    O2   C0 - C1 >= -log gamma                it earns its price
    O3   grad C1(w) + lambda w = 0            its last layer is at rest

C1 and C0 are costs over the whole dataset, N times the mean loss, with the block and without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shallower.certificate.cost import Cost, Slope
from shallower.worth import Worth

Verdict = Literal["earns its keep", "undecided", "should have gone"]
Minimum = Literal["holds", "violated", "open"]
CHECK = 10


@dataclass(frozen=True)
class Survivor:
    """A block that is left, against its conditions; costs in nats over the dataset."""

    block: str
    benefit: float  # O2: C0 - C1
    low: float  # its confidence interval of 95 %
    high: float
    price: float
    estimate: float | None  # what the first-order estimator makes of it: -w . grad C1, if w is the last layer
    norm: float  # |w|
    rest: float  # O3: |grad C1 + lambda w| against what single samples and the decay pull; 0 at rest
    curvature: float | None  # O1: of grad^2 C1 + lambda, in the direction where Lanczos found the least
    residual: float | None  # on its samples, some eigenvalue lies within this of the value there, ...
    gap: float | None  # ... and, with 95 %, the smallest at most that much below
    minimum: Minimum | None  # whether O1 holds, so far as these samples tell
    verdict: Verdict


def verdict(worth: Worth) -> Verdict:
    """By O2: whether the confidence interval of what it earns lies above its price, below, or around it."""
    low, high = worth.interval
    if low > worth.price:
        return "earns its keep"
    return "should have gone" if high < worth.price else "undecided"


@dataclass(frozen=True)
class _Bent:
    """O1, as a survivor has it."""

    curvature: float | None = None
    residual: float | None = None
    gap: float | None = None
    minimum: Minimum | None = None


def _bent(cost: Cost, w: Sequence[nn.Parameter], decay: Tensor, limit: int, steps: int) -> _Bent:
    """O1 by Lanczos on some samples; the direction that it finds is tried on CHECK times as many others."""
    if steps == 0:
        return _Bent()
    found = cost.curvature(w, decay, limit, steps)
    value, error = cost.bend(w, decay, found.vector, limit, CHECK * limit)
    minimum: Minimum = "open"
    if value + error < -found.rounding:
        minimum = "violated"
    elif found.value - found.gap >= 0 and value - error >= 0:
        minimum = "holds"
    return _Bent(value, found.residual, found.gap, minimum)


def decays(optimizer: Optimizer, size: int) -> dict[nn.Parameter, float]:
    """lambda of every parameter: N times the optimiser's weight decay."""
    return {
        p: size * group.get("weight_decay", 0.0) for group in optimizer.param_groups for p in group["params"]
    }


def rest(slopes: Sequence[Slope], pull: Sequence[Tensor]) -> float:
    """|dC/dw + lambda w|, against what samples pull one by one (rms) and the decay: 0 at rest, 1 at most;
    nan of nothing."""
    left = _norm([slope.mean + p for slope, p in zip(slopes, pull, strict=True)])
    scale = sum(slope.square for slope in slopes) ** 0.5 + _norm(pull)
    return left / scale if scale > 0 else 0.0 if slopes else math.nan


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()) if tensors else 0.0


def judge(
    cost: Cost, worth: Worth, slopes: Mapping[nn.Parameter, Slope], *, limit: int, steps: int
) -> Survivor:
    """One survivor against its conditions; `slopes` are those of the whole network."""
    pruner = cost.pruner
    w = [p for p in pruner.vitals.weights[worth.block] if isinstance(p, nn.Parameter)]
    decay = decays(pruner.optimizer, pruner.dataset_size)
    slope, pull = [slopes[p] for p in w], [decay.get(p, 0.0) * p.detach() for p in w]
    flat = torch.cat([torch.full_like(p, decay.get(p, 0.0)).flatten() for p in w]).detach()
    bent = _bent(cost, w, flat, limit, steps)  # O1
    low, high = worth.interval
    along = -float(sum((s.mean * p.detach()).sum() for s, p in zip(slope, w, strict=True)))
    return Survivor(
        block=worth.block,
        benefit=worth.benefit,  # O2
        low=low,
        high=high,
        price=worth.price,
        estimate=along if worth.block in pruner.vitals.affine else None,
        norm=_norm([p.detach() for p in w]),
        rest=rest(slope, pull),  # O3
        curvature=bent.curvature,
        residual=bent.residual,
        gap=bent.gap,
        minimum=bent.minimum,
        verdict=verdict(worth),
    )
