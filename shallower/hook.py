"""What must happen inside `optimizer.step()`, after the last backward pass and before the weights move."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shallower.gate import Gate
from shallower.optim import fill_gradients

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
PASS_IT = "Pass it, or every estimate is too large by its scale: `Pruner(..., grad_scaler=scaler)`."


class BeforeStep:
    """A hook of the optimiser: gives closed blocks zero gradients, keeps the step's scale and weights."""

    def __init__(
        self,
        optimizer: Optimizer,
        gates: Mapping[str, Gate],
        prunable: Mapping[str, Sequence[Tensor]],
        *,
        grad_scaler: torch.amp.GradScaler | None,
        keep_weights: bool,
    ) -> None:
        self.optimizer, self.gates, self.prunable = optimizer, gates, prunable
        self.grad_scaler, self.keep_weights = grad_scaler, keep_weights
        self.ran, self._checks = False, 3
        self.scale: Tensor | None = None  # of the loss under a GradScaler, on the device of the gradients
        self.overflow: Tensor | None = None  # above 0 if a gradient overflowed and a fused step does nothing
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._handle = optimizer.register_step_pre_hook(self)

    def remove(self) -> None:
        self._handle.remove()
        self._weights = []

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        self.ran = True
        # A fused optimiser is stepped by the GradScaler whatever happens, and looks at these itself.
        self.overflow = getattr(optimizer, "found_inf", None)
        if self.grad_scaler is not None:
            where = next((gate.theta.device for gate in self.gates.values()), None)
            one = torch.ones((), device=where)
            self.scale = self.grad_scaler.scale(one)  # and not get_scale(), which waits for the device
        elif self.overflow is not None:
            for name in ("found_inf", "grad_scale"):  # the scaler takes them off behind the step alone
                vars(optimizer).pop(name, None)
            raise RuntimeError(f"The optimizer is stepped by a GradScaler, which scales the loss. {PASS_IT}")
        elif self._checks > 0:
            self._check_unscaled()
        if self.keep_weights:
            self._weights = [
                (p, _values(p).detach().clone()) for g in optimizer.param_groups for p in g["params"]
            ]
        self._fill()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None
        # An optimiser that runs a closure sets the gradients anew in it.
        return (args[0],), {**kwargs, "closure": self._filling(closure)}

    def _fill(self) -> None:
        for name in self.gates:
            fill_gradients(self.prunable[name])

    def _filling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def filled() -> Any:
            loss = closure()
            self._fill()
            return loss

        return filled

    @contextmanager
    def weights_before(self) -> Iterator[None]:
        """The weights with which the gradient was taken, so that an estimate is of that very network."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        moved = [(p, _values(p)) for p, _ in self._weights]
        for p, data in self._weights:
            if hasattr(p, "to_local"):  # FSDP2 reads its own memory, of which this is a view
                p.to_local().copy_(data)
            else:
                p.data = data
        self._weights = moved

    def _check_unscaled(self) -> None:
        """A GradScaler that the pruner does not know of would make every estimate many times too large."""
        for gate in self.gates.values():
            worth, last = gate.worth, [p for _, _, p in gate.reader.last if p.grad is not None]
            if worth is None or not gate.xi or not last:
                continue
            self._checks -= 1
            now = math.fsum((p.grad * p).sum().item() for p in last if p.grad is not None)
            ratio = abs(float(worth) / now) if now else 1.0
            if math.isfinite(ratio):
                _check_ratio(ratio)
            return


def _check_ratio(ratio: float) -> None:
    """By how much gradients shrank: a GradScaler's is a power of two, unless they were clipped as well."""
    found = f"Between the backward pass and optimizer.step() the gradients became {ratio:.0f} times smaller"
    if ratio > 255 and abs(math.log2(ratio) - round(math.log2(ratio))) < 1e-3:
        raise RuntimeError(f"{found}, as with a GradScaler that scales the loss. {PASS_IT}")
    if ratio > 4096:
        warnings.warn(f"{found}. If a GradScaler scales the loss: {PASS_IT}", stacklevel=2)


def _values(p: Tensor) -> Tensor:
    """What a parameter holds now, of which a sharded one has this rank's part, as a copy."""
    return p.to_local().detach().clone() if hasattr(p, "to_local") else p.data
