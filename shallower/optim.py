"""The optimiser is a patient too: forget removed parameters, keep closed ones decaying; a step for theta."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def forget(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Drop `parameters`, with their state, from every group of `optimizer`, and their gradients.

    The other parameters keep their places, their state and their groups. A group that is left empty
    stays, because learning-rate schedulers count the groups.
    """
    dead = set(parameters)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in dead]
    for p in dead:
        optimizer.state.pop(p, None)
        p.grad = None  # or it would count wherever somebody else holds the parameter, as to clip by a norm


def adopt(optimizer: Optimizer, parameter: nn.Parameter, *, like: Tensor) -> None:
    """Let `optimizer` train `parameter` in the group that holds `like`."""
    for group in optimizer.param_groups:
        if any(p is like for p in group["params"]):
            group["params"].append(parameter)
    if like in optimizer.state:
        _begin(optimizer, parameter, optimizer.state[like])


def restart(optimizer: Optimizer, parameter: Tensor) -> None:
    """Let `parameter`, which has other values now, begin anew in `optimizer`, as if it had taken no step."""
    _begin(optimizer, parameter, optimizer.state.pop(parameter, {}))


def _begin(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Fused SGD takes momentum of every parameter or of none, so that of a new one is 0 beside the others.

    From there its first step is that of a new parameter, or with dampening a shorter one.
    """
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    of_sgd = state.keys() == {"momentum_buffer"} and state["momentum_buffer"] is not None
    if group.get("fused") and of_sgd:
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def unknown(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> list[str]:
    """The names of the trainable parameters that `optimizer` does not hold."""
    known = {p for group in optimizer.param_groups for p in group["params"]}
    return [name for name, p in parameters.items() if p.requires_grad and p not in known]


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Zero gradients where there are none: PyTorch's optimisers skip None, and with it decay and momentum."""
    for p in parameters:
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


class ThetaAdam(torch.optim.Adam):
    """Adam for one small tensor, as theta is: the arithmetic alone, a third of the time of PyTorch's own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p] or self._start(p)
                state["step"] += 1
                n = state["step"].item()
                # NumPy shares the tensors' memory, and its calls take a fifth of the time of PyTorch's.
                theta, gradient = p.detach().numpy(), p.grad.numpy()
                mean, square = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
                mean += (1 - beta1) * (gradient - mean)
                square *= beta2
                square += (1 - beta2) * gradient * gradient
                theta -= lr / (1 - beta1**n) * mean / (np.sqrt(square / (1 - beta2**n)) + eps)

    step.hooked = True  # type: ignore[attr-defined]  # no profiler's record of each call: half of the time

    def _start(self, p: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        self.state[p] = {"step": torch.zeros(()), **moments}
        return self.state[p]


class RobbinsMonro(Optimizer):
    """Plain gradient descent with the step a(n) = lr / (1 + n / halving)**power.

    The sum of a(n) diverges and the sum of a(n)^2 converges, as the convergence theorems need it, for
    1/2 < power <= 1. For theta:

        Pruner(..., theta_optimizer=RobbinsMonro, theta_lr=1e-6)
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, *, halving: float = 1000.0, power: float = 1.0
    ) -> None:
        if not 0.5 < power <= 1.0:
            raise ValueError(
                f"Found power={power}, but a Robbins-Monro step needs 1/2 < power <= 1: "
                "a larger one stops too early, a smaller one never settles."
            )
        if lr <= 0 or halving <= 0:
            raise ValueError(f"Found lr={lr} and halving={halving}; both must be positive.")
        super().__init__(params, {"lr": lr, "halving": halving, "power": power, "n": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            a = group["lr"] / (1 + group["n"] / group["halving"]) ** group["power"]
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(a * p.grad)
            group["n"] += 1
