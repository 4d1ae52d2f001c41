"""The paper's convergence theorems on problems small enough to know all about."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from shallower import Pruner, Residual, RobbinsMonro, flip
from shallower.certificate.deaths import _death
from shallower.pruner import Removal
from shallower.vitals import Vital

# -- Section 3, case 1: no minimum with 0 < theta < 1 ----------------------------------------------------


def reduced(state: Tensor, decay: float, price: float) -> Tensor:
    """L(w, theta) of the loss (1.5 - (1 + xi w))^2 / 2 on one sample: theta A(w) + lambda w^2 / 2."""
    w, theta = state
    c1, c0 = 0.5 * (0.5 - w) ** 2, 0.125
    return theta * (c1 - c0 + price) + 0.5 * decay * w**2


@pytest.mark.parametrize("price", [0.02, 0.06, 0.12])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_stationary_point_between_0_and_1_is_a_saddle(price: float, share: float) -> None:
    """A(w) = 0 gives w; lambda is chosen so that w rests there at theta = share."""
    w = 0.5 - (0.25 - 2 * price) ** 0.5
    decay = share * (0.5 - w) / w
    state = torch.tensor([w, share], dtype=torch.float64)
    gradient = torch.autograd.functional.jacobian(lambda s: reduced(s, decay, price), state)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))  # it is stationary
    hessian = torch.autograd.functional.hessian(lambda s: reduced(s, decay, price), state)
    low, high = torch.linalg.eigvalsh(hessian).tolist()
    assert low < 0 < high
    # The paper's minor: the entry of theta is 0, so that its determinant is -(dA/dw)^2.
    assert float(torch.linalg.det(hessian)) == pytest.approx(-((0.5 - w) ** 2))
    down = torch.linalg.eigh(hessian)[1][:, 0]
    beside = [float(reduced(state + step * down, decay, price)) for step in (-1e-2, 1e-2)]
    assert max(beside) < float(reduced(state, decay, price))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("theta", [0.2, 0.7])
def test_so_it_is_with_many_weights(seed: int, theta: float) -> None:
    """w rests at its minimum for theta; the price is what the layer is worth there."""
    layer, decay = Layer(seed), 0.8
    hidden, left = torch.from_numpy(layer.hidden), torch.from_numpy(layer.left)
    gram = theta * hidden.T @ hidden + decay * torch.eye(3, dtype=torch.float64)
    w = torch.linalg.solve(gram, theta * hidden.T @ left)
    price = -layer.change(w.numpy().ravel())
    assert price > 0

    def reduced(state: Tensor) -> Tensor:
        w = state[:-1].view(3, 2)
        change = 0.5 * ((left - hidden @ w).square().sum() - left.square().sum())
        return state[-1] * (change + price) + 0.5 * decay * w.square().sum()

    state = torch.cat([w.flatten(), torch.tensor([theta], dtype=torch.float64)])
    slope = torch.autograd.functional.jacobian(reduced, state)
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(reduced, state))
    assert values[0] < -1e-3
    assert values[-1] > 1e-3


# -- Theorem 4: what is in A0 dies -----------------------------------------------------------------------


class Layer:
    """y ~ z + xi W2 h(z) on a few samples: C1 - C0, its gradient in w = W2, the bounds kappa and eta."""

    def __init__(self, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self.hidden = np.tanh(dice.normal(size=(20, 3)))
        self.left = 0.3 * dice.normal(size=(20, 2))  # y - z, which the layer could explain
        reach = np.linalg.norm(self.left, axis=1) @ np.linalg.norm(self.hidden, axis=1)
        size = (np.linalg.norm(self.hidden, axis=1) ** 2).sum()
        self.kappa, self.eta = reach + size / 2, reach + size  # for |w| <= 1

    def change(self, w: np.ndarray) -> float:
        """C1 - C0."""
        left = self.left - self.hidden @ w.reshape(3, 2)
        return 0.5 * float((left**2).sum() - (self.left**2).sum())

    def slope(self, w: np.ndarray) -> np.ndarray:
        return -(self.hidden.T @ (self.left - self.hidden @ w.reshape(3, 2))).ravel()

    def best(self) -> np.ndarray:
        return np.linalg.lstsq(self.hidden, self.left, rcond=None)[0].ravel()


def solve(
    layer: Layer,
    w: np.ndarray,
    theta: float,
    *,
    decay: float,
    price: float,
    time: float,
    drift: float = 0.0,
    until: float | None = None,
) -> Any:
    """The paper's ODE, projected: theta is held at 0 and at 1 when it is pushed beyond.

    With `drift`, the other layers learn meanwhile: what this one could explain waxes and wanes. It ends when
    theta has fallen to `until`.
    """
    still = layer.left

    def field(time: float, state: np.ndarray) -> np.ndarray:
        layer.left = still * (1 + drift * np.sin(3 * time))
        w, theta = state[:-1], min(max(state[-1], 0.0), 1.0)
        push = -(layer.change(w) + price)
        held = (state[-1] <= 0 and push < 0) or (state[-1] >= 1 and push > 0)
        return np.append(-theta * layer.slope(w) - decay * w, 0.0 if held else push)

    def low(_: float, state: np.ndarray) -> float:
        return 1.0 if until is None else float(state[-1] - until)

    low.terminal = True  # type: ignore[attr-defined]
    times = np.linspace(0, time, 400)
    found = solve_ivp(
        field, (0, time), np.append(w, theta), t_eval=times, rtol=1e-8, atol=1e-10, max_step=0.01, events=low
    )
    layer.left = still
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_bounds_hold_that_make_a0(seed: int) -> None:
    layer, dice = Layer(seed), np.random.default_rng(100 + seed)
    for _ in range(200):
        w = dice.normal(size=6)
        w *= dice.uniform(0, 1) / np.linalg.norm(w)
        size = np.linalg.norm(w)
        assert abs(layer.change(w)) <= layer.kappa * size + 1e-12
        assert abs(w @ layer.slope(w)) <= layer.eta * size + 1e-12


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_a_trajectory_that_starts_in_a0_ends_at_the_dead_point_and_lambda_only_falls(
    seed: int, drift: float
) -> None:
    layer, dice, price = Layer(seed), np.random.default_rng(200 + seed), 3.0
    # reach, in kappa and eta, grows with what the layer could explain at the most
    radius = min(price / ((1 + drift) * (layer.kappa + layer.eta)), 1.0)
    start = dice.normal(size=7)
    start *= 0.99 * radius / np.linalg.norm(start)
    found = solve(layer, start[:-1], abs(start[-1]), decay=1.0, price=price, time=20.0, drift=drift)
    lyapunov = 0.5 * (found.y**2).sum(0)
    assert lyapunov[0] < radius**2 / 2
    assert (np.diff(lyapunov) <= 1e-9).all()
    assert np.abs(found.y[:, -1]).max() < 1e-6


@pytest.mark.parametrize("exact", [False, True])
def test_what_the_certificate_calls_dead_or_dying_dies(exact: bool) -> None:
    """Layers of all worths, from many starts, until theta falls to its tolerance: their last steps are put
    before the certificate, and then the equation goes on as if nothing had been removed."""
    says: dict[str, list[bool]] = {"dead": [], "dying": [], "undecided": []}
    for seed in range(30):
        layer, dice = Layer(seed), np.random.default_rng(300 + seed)
        price = -layer.change(layer.best()) * float(dice.uniform(0.1, 1.5))
        options = {"decay": float(dice.uniform(0.05, 1.0)), "price": price}
        w = float(dice.choice([0.05, 0.3, 1.9, 2.3])) * layer.best()  # beyond 2, it does harm at first
        before = solve(layer, w, float(dice.uniform(0.02, 0.15)), time=4.0, until=0.01, **options)
        if before.y[-1, -1] > 0.02:
            continue  # it lives
        rows = [
            Vital(step, state[-1], float(np.linalg.norm(state[:-1])), measure(layer, state[:-1], exact), 0.0)
            for step, state in enumerate(before.y.T[-40:])
        ]
        end = before.y[:, -1]
        finding = _death(Removal(len(rows), "b", float(end[-1])), rows, price, exact).finding
        after = solve(layer, end[:-1], end[-1], time=20.0, **options)
        says[finding].append(bool(after.y[-1, -1] < 1e-6))
    assert len(says["dead"]) > 5
    assert exact or len(says["dying"]) > 2
    assert all(says["dead"] + says["dying"]), says
    assert not all(says["undecided"]), says  # some do come back


def measure(layer: Layer, w: np.ndarray, exact: bool) -> float:
    """C1 - C0 as `flip` has it, or w . grad C(0), as a closed gate estimates it."""
    return layer.change(w) if exact else float(w @ layer.slope(np.zeros(6)))


def test_a_useful_layer_outside_of_a0_lives() -> None:
    """So the test above is not one of a system in which everything dies."""
    layer, decay = Layer(0), 0.01
    worth = -layer.change(layer.best())
    found = solve(layer, layer.best(), 0.9, decay=decay, price=worth / 3, time=30.0)
    assert found.y[-1, -1] == pytest.approx(1.0, abs=1e-3)
    assert np.linalg.norm(found.y[:-1, -1]) > 0.9 * np.linalg.norm(layer.best())


# -- Theorems 2 and 3: stochastic descent ends at a deterministic network --------------------------------


def regression(seed: int) -> Pruner:
    """Gaussian likelihood, steps a(n) that Robbins and Monro ask for on weights and rates, blocks of tanh."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 3, generator=generator)
    y = x[:, :1].abs() + 0.1 * torch.randn(64, 1, generator=generator)
    torch.manual_seed(seed)
    blocks = [Residual(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 / 64)
    decreasing = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 400))
    options: dict[str, Any] = {"theta_optimizer": RobbinsMonro, "theta_lr": 1e-2, "tolerance": 0.0}
    pruner = Pruner(
        model, optimizer, dataset_size=64, log_gamma=-1.0, theta=0.5, estimator=flip, seed=seed, **options
    )
    for _ in range(1200):
        index = torch.randint(0, 64, (16,), generator=generator)

        def loss(index: Tensor = index) -> Tensor:
            return 0.5 * F.mse_loss(model(x[index]), y[index])

        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        pruner.step(loss)
        decreasing.step()
    return pruner


def test_a_robbins_monro_descent_on_a_regression_ends_deterministic_whatever_the_seed() -> None:
    found = [regression(seed) for seed in range(8)]
    rates = [sorted(pruner.thetas.values()) for pruner in found]
    assert all(rate in (0.0, 1.0) for row in rates for rate in row), rates
    assert {rate for row in rates for rate in row} == {0.0, 1.0}  # some go, and some stay
