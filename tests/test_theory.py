"""The paper's theorems on networks small enough to enumerate, and its differential equation."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import solve_ivp
from scipy.optimize import minimize
from torch import Tensor, nn

from shallower import Pruner, Residual, flip, split
from shallower.gate import Gate, attach

LOG_GAMMA, N = -3.0, 40


def enumerable(depth: int = 3) -> tuple[Callable[[], Tensor], list[Gate], Tensor]:
    """A network's loss, its gates, and the cost N * loss of each of its 2^L sub-networks."""
    torch.manual_seed(1)
    blocks = [
        Residual(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), skip=nn.Linear(4, 4, bias=False))
        for _ in range(depth)
    ]
    model = nn.Sequential(*blocks, nn.Linear(4, 3)).double()
    gates = [attach(block, split(block, name=str(i)), 0.5) for i, block in enumerate(blocks)]
    x, y = torch.randn(N, 4).double(), torch.randint(0, 3, (N,))
    costs = torch.empty(*[2] * depth, dtype=torch.float64)
    for draws in product((0, 1), repeat=depth):
        for gate, xi in zip(gates, draws, strict=True):
            gate.xi = bool(xi)
        with torch.no_grad():
            costs[draws] = N * F.cross_entropy(model(x), y)
    return lambda: F.cross_entropy(model(x), y), gates, costs


def objective(costs: Tensor, theta: Tensor) -> Tensor:
    """L(W, theta) without the weights' term: the expected cost, minus |theta| log gamma."""
    for rate in theta:  # contracts one axis of the 2 x ... x 2 table after the other
        costs = (1 - rate) * costs[0] + rate * costs[1]
    return costs - theta.sum() * LOG_GAMMA


@pytest.mark.parametrize("rates", [(0.3, 0.6, 0.8), (0.9, 0.1, 0.5)])
def test_the_objective_is_the_mean_cost_of_the_networks_that_the_pruner_draws(
    rates: tuple[float, ...],
) -> None:
    """So the table of all sub-networks, weighted by theta, is what training sees."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Residual(nn.Linear(4, 4)) for _ in rates), nn.Linear(4, 3)).double()
    x, y = torch.randn(N, 4).double(), torch.randint(0, 3, (N,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = Pruner(
        model, optimizer, dataset_size=N, log_gamma=LOG_GAMMA, theta=0.5, theta_lr=1e-12, tolerance=0.0
    )
    pruner.theta.copy_(torch.tensor(rates))
    costs = torch.empty(2, 2, 2, dtype=torch.float64)
    for draws in product((0, 1), repeat=3):
        for gate, xi in zip(pruner.gates.values(), draws, strict=True):
            gate.xi = bool(xi)
        with torch.no_grad():
            costs[draws] = N * F.cross_entropy(model(x), y)
    seen = []
    for _ in range(1500):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        pruner.step()
        seen.append(N * loss.item())
    seen = torch.tensor(seen[1:])  # the first network was drawn at 0.5
    error = float(seen.std()) / len(seen) ** 0.5
    expected = objective(costs, pruner.theta.double()) + pruner.theta.sum() * LOG_GAMMA
    assert float(seen.mean()) == pytest.approx(float(expected), abs=4 * error)
    assert error < 0.1 * float(costs.max() - costs.min())


class Pair:
    """Two blocks z + xi w h(z) and a target: the cost of the four sub-networks as a function of (w1, w2)."""

    def __init__(self, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self.x = dice.normal(size=30)
        self.y = self.x + 0.8 * np.tanh(self.x) + 0.5 * np.tanh(2 * self.x) + 0.2 * dice.normal(size=30)

    def cost(self, w: np.ndarray, first: float, second: float) -> float:
        z = self.x + first * w[0] * np.tanh(self.x)
        z = z + second * w[1] * np.tanh(2 * z)
        return 0.5 * float(((self.y - z) ** 2).sum())

    def objective(self, state: np.ndarray, price: float, decay: float = 0.5) -> float:
        """L(w, theta), the mean over the four draws."""
        w, theta = state[:2], state[2:]
        mean = sum(
            np.prod([t if xi else 1 - t for t, xi in zip(theta, draws, strict=True)]) * self.cost(w, *draws)
            for draws in product((0, 1), repeat=2)
        )
        return float(mean) + price * float(theta.sum()) + 0.5 * decay * float(w @ w)


@pytest.mark.parametrize(("price", "kept"), [(0.02, 2), (2.0, 1), (40.0, 0)])
def test_weights_and_rates_together_are_best_at_a_deterministic_network(price: float, kept: int) -> None:
    """Theorem 1: the best of all sub-networks, each with its own best weights, is not beaten by any rates."""
    pair, dice = Pair(0), np.random.default_rng(1)
    alone = {
        draws: min(
            minimize(lambda w, d=draws: pair.objective(np.append(w, d), price), start).fun
            for start in dice.normal(size=(4, 2))
        )
        for draws in product((0, 1), repeat=2)
    }
    best = min(alone, key=alone.__getitem__)
    assert sum(best) == kept
    starts = np.hstack([dice.normal(size=(25, 2)), dice.uniform(size=(25, 2))])
    bounds = [(None, None)] * 2 + [(0.0, 1.0)] * 2
    ends = [minimize(pair.objective, s, args=(price,), bounds=bounds, method="L-BFGS-B") for s in starts]
    assert min(end.fun for end in ends) == pytest.approx(alone[best], rel=1e-6)
    last = min(ends, key=lambda end: end.fun).x
    at_rest = [theta for theta, w in zip(last[2:], last[:2], strict=True) if abs(w) > 1e-3]
    assert all(min(theta, 1 - theta) < 1e-6 for theta in at_rest)


def test_in_the_rates_alone_the_objective_is_multilinear_and_so_smallest_at_a_corner() -> None:
    """Over the costs of gated forward passes: a step in one rate is a straight line."""
    loss, gates, costs = enumerable()
    grid = torch.linspace(0, 1, 11, dtype=torch.float64)
    values = {
        rates: float(objective(costs, torch.tensor(rates))) for rates in product(grid.tolist(), repeat=3)
    }
    best = min(values, key=values.__getitem__)
    assert set(best) <= {0.0, 1.0}
    for gate, rate in zip(gates, best, strict=True):
        gate.xi = bool(rate)
    with torch.no_grad():
        assert values[best] == pytest.approx(float(N * loss()) - sum(best) * LOG_GAMMA)


def test_the_slope_in_theta_is_c1_minus_c0_minus_log_gamma():
    """By automatic differentiation of the objective over all networks, and by conditioning on xi."""
    _, _, costs = enumerable()
    theta = torch.tensor([0.3, 0.6, 0.8], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(objective(costs, theta), theta)
    with torch.no_grad():
        for k in range(3):
            on, off = theta.clone(), theta.clone()
            on[k], off[k] = 1.0, 0.0
            c1 = objective(costs, on) + on.sum() * LOG_GAMMA
            c0 = objective(costs, off) + off.sum() * LOG_GAMMA
            torch.testing.assert_close(slope[k], c1 - c0 - LOG_GAMMA)


def test_flip_averaged_over_all_networks_is_the_slope_exactly():
    """Not by sampling: the estimator is weighted with the probability of each draw."""
    loss, gates, costs = enumerable()
    rates = torch.tensor([0.3, 0.6, 0.8], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(objective(costs, rates), rates)
    mean = torch.zeros(3, dtype=torch.float64)
    for draws in product((0, 1), repeat=3):
        chance = torch.tensor(
            [r if xi else 1 - r for r, xi in zip(rates.tolist(), draws, strict=True)]
        ).prod()
        for gate, xi in zip(gates, draws, strict=True):
            gate.xi = bool(xi)
        mean += chance * torch.stack(flip(gates, loss))
    torch.testing.assert_close(N * mean - LOG_GAMMA, slope)


class Scalar(nn.Module):
    """branch(z) = w z."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return self.w * z


def trajectory(w: float, theta: float, *, decay: float, log_gamma: float, step: float, time: float) -> list:
    """(w, theta) of the library, for loss (target - (1 + xi w))^2 / 2 and plain gradient descent on both."""
    model = nn.Sequential(Residual(Scalar(w)))
    optimizer = torch.optim.SGD(model.parameters(), lr=step, weight_decay=decay)
    pruner = Pruner(
        model,
        optimizer,
        dataset_size=1,
        log_gamma=log_gamma,
        estimator=flip,
        theta=theta,
        theta_lr=step,
        theta_optimizer=torch.optim.SGD,
        tolerance=0.0,
        seed=4,
    )
    z, target = torch.ones(1, dtype=torch.float64, requires_grad=True), 1.5

    def loss() -> Tensor:
        return 0.5 * (target - model(z)).square().sum()

    path = []
    for _ in range(round(time / step)):
        if not pruner.gates:
            break
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        pruner.step(loss)
        path.append((model[0].branch.w.item() if pruner.gates else 0.0, pruner.thetas["0"]))
    return path


def test_a_dying_layer_follows_the_differential_equation():
    """Section 5: w' = -theta grad C1(w) - lambda w,  theta' = -(C1(w) - C0 - log gamma)."""
    w, theta, decay, log_gamma, time = 0.4, 0.75, 1.0, -0.6, 1.0

    def field(_: float, state) -> list[float]:
        w, theta = state
        c1, c0 = 0.5 * (0.5 - w) ** 2, 0.5 * 0.5**2
        return [-theta * -(0.5 - w) - decay * w, -(c1 - c0 - log_gamma)]

    solution = solve_ivp(field, (0, time), [w, theta], rtol=1e-9, atol=1e-12, dense_output=True)
    errors = []
    for step in (1e-2, 1e-3):
        path = trajectory(w, theta, decay=decay, log_gamma=log_gamma, step=step, time=time)
        exact = [solution.sol((k + 1) * step) for k in range(len(path))]
        errors.append(
            max(max(abs(a - b) for a, b in zip(p, e, strict=True)) for p, e in zip(path, exact, strict=True))
        )
    assert errors[1] < 0.03  # noise of the draws, of the order of sqrt(step)
    assert errors[1] < errors[0]
    assert path[-1][1] < theta - 0.4  # it really is dying


def test_a_layer_in_the_region_of_attraction_dies_and_a_useful_one_survives():
    """Theorem 4 and condition O2: the price decides. Here C0 - C1 is at most 0.125 nats."""
    dying = trajectory(0.05, 0.3, decay=1.0, log_gamma=-0.6, step=5e-3, time=2.0)
    assert dying[-1][1] == 0.0
    living = trajectory(0.4, 0.5, decay=0.01, log_gamma=-0.02, step=5e-3, time=8.0)
    assert living[-1][1] == 1.0
