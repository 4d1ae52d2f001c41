"""The flattening hyper-prior, and the price that it puts on a block.

The prior rate pi of a gate has the density p(pi | gamma) below, 0 < gamma < 1. Minimised over pi, the
part of the objective that belongs to one gate is linear in theta,

    J(pi*(theta)) = (1 - theta) log gamma,    dJ/dtheta = -log gamma,

so a block costs a constant `-log gamma` nats over the dataset, whatever its theta: its price. Everything
here takes log gamma, because gamma itself underflows (the paper goes down to exp(-17500)).
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Schedule = Callable[[int], float]
MOST = 1e100  # nats; theta's optimiser squares them


def log_density(pi: Tensor, log_gamma: float) -> Tensor:
    """log p(pi | gamma),  p = (gamma - 1) / log gamma / (1 + (gamma - 1)(1 - pi)).                  (8)"""
    scale = math.log(-math.expm1(log_gamma)) - math.log(-log_gamma)
    return scale - torch.logaddexp(pi.log(), log_gamma + torch.log1p(-pi))


def divergence(theta: Tensor, pi: Tensor) -> Tensor:
    """KL(Bernoulli(theta) || Bernoulli(pi))."""
    on = torch.xlogy(theta, theta) - torch.xlogy(theta, pi)
    return on + torch.xlogy(1 - theta, 1 - theta) - torch.special.xlog1py(1 - theta, -pi)


def J(pi: Tensor, theta: Tensor, log_gamma: float) -> Tensor:
    """KL(q || p) - log p(pi | gamma), without its constant: what one gate costs at prior rate pi."""
    return divergence(theta, pi) + torch.logaddexp(pi.log(), log_gamma + torch.log1p(-pi))


def pi_star(theta: Tensor, log_gamma: float) -> Tensor:
    """argmin over pi of J:  gamma theta / (1 + theta (gamma - 1)).                                  (9)"""
    on = log_gamma + theta.log()
    return torch.exp(on - torch.logaddexp(torch.log1p(-theta), on))


def J_star(theta: Tensor, log_gamma: float) -> Tensor:
    """J at pi*:  (1 - theta) log gamma.                                                            (10)"""
    return (1 - theta) * log_gamma


def gradient(log_gamma: float) -> float:
    """dJ(pi*)/dtheta, the same at every theta: the price of a block, in nats over the dataset."""
    return -log_gamma


# -- how strong the prior is: over time, and from block to block ---------------------------------------


def constant(log_gamma: float) -> Schedule:
    """The same log gamma at every step."""
    return lambda step: log_gamma


def linear_ramp(log_gamma: float, steps: int, *, begin: int = 0) -> Schedule:
    """0 up to step `begin`, from there linearly to `log_gamma` at step `steps`, and constant after it."""
    if not log_gamma < 0:
        raise ValueError(
            f"Found log_gamma={log_gamma}; a ramp leads to a negative one: {-abs(log_gamma) or -250}."
        )
    if steps <= 0:
        raise ValueError(f"Found a ramp over {steps} steps; it needs at least one: `constant(log_gamma)`?")
    if not 0 <= begin < steps:
        raise ValueError(
            f"Found a ramp from step {begin} to step {steps}; it begins at 0 or later, and before it ends."
        )
    return lambda step: log_gamma * min(1.0, max(0.0, (step - begin) / (steps - begin)))


def schedule(
    log_gamma: float | Schedule | None, price: float | Schedule | None, dataset_size: int
) -> Schedule:
    """One schedule of log gamma from what the user gave, in either unit: log gamma = -N * price."""
    if (log_gamma is None) == (price is None):
        found = "neither" if log_gamma is None else "both"
        raise ValueError(
            f"Found {found} of log_gamma and price; give one: log_gamma=-250 (nats over the dataset) or "
            "price=0.005 (nats per sample that a block must save to survive)."
        )
    if price is not None:
        cost = price
        if callable(cost):
            return lambda step: -dataset_size * cost(step)
        if not 0 < cost < MOST / dataset_size:
            raise ValueError(
                f"Found price={cost}; the price of a block must be positive, in nats per sample: price=0.005."
            )
        return constant(-dataset_size * cost)
    if callable(log_gamma):
        return log_gamma
    assert log_gamma is not None
    if not -MOST < log_gamma < 0:
        raise ValueError(
            f"Found log_gamma={log_gamma}; the hyper-prior needs 0 < gamma < 1, so log_gamma must be "
            f"negative, and above {-MOST:g}: log_gamma={-abs(log_gamma) if 0 < log_gamma < MOST else -250}."
        )
    return constant(float(log_gamma))


def multiplier_vector(multipliers: Mapping[str, float] | None, names: Sequence[str]) -> Tensor:
    """How many times the common log gamma each block has; 1 for those that are not named."""
    multipliers = dict(multipliers or {})
    strangers = [name for name in multipliers if name not in names]
    if strangers:
        raise ValueError(
            f"Found multipliers for {strangers}, which are no gated blocks; these are: {list(names)}."
        )
    wrong = {n: m for n, m in multipliers.items() if not (m > 0 and math.isfinite(m))}
    if wrong:
        raise ValueError(
            f"Found multipliers {wrong}; each must be positive, and 1.0 leaves a block's price alone."
        )
    return torch.tensor([multipliers.get(name, 1.0) for name in names], dtype=torch.float64)
