"""What a checkpoint has put into a run, held against what its recipe makes of so many steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

MOMENTS: dict[type[Optimizer], set[str]] = {
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
}
Groups = Sequence[Mapping[str, Any]]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of an optimiser as they are now."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def check_groups(optimizer: Optimizer, before: Groups, *, may_change: Sequence[str] = ()) -> None:
    """Nothing but what a schedule moves is set otherwise than `before`."""
    for now, own in zip(groups_of(optimizer), before, strict=True):
        wrong = sorted(now.keys() ^ own.keys())
        wrong += [k for k in own if k in now and k not in may_change and now[k] != own[k]]
        if wrong:
            raise ValueError(f"its {type(optimizer).__name__} has another {wrong[0]} than the recipe")


def check_moments(optimizer: Optimizer) -> None:
    """PyTorch loads moments of any shape, and fused optimisers then read memory that is not theirs."""
    names = MOMENTS[type(optimizer)]
    for p, entry in optimizer.state.items():
        if set(entry) != names:
            raise ValueError(f"its optimiser holds {sorted(entry)} of a parameter; needed {sorted(names)}")
        for name, value in entry.items():
            if value is None and name == "momentum_buffer":
                continue
            shape = () if name == "step" else p.shape
            fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
            if not fits or not bool(value.isfinite().all()):
                raise ValueError(f"its {name} is not of the shape {tuple(shape)}, or not finite")
            if name != "exp_avg" and name != "momentum_buffer" and bool((value < 0).any()):
                raise ValueError(f"its {name} is negative")


def check_schedule(scheduler: LambdaLR, base: Sequence[float | Tensor], steps: int) -> None:
    """The schedule is where it must be after so many steps, and so is the learning rate."""
    if scheduler.base_lrs != list(base) or scheduler.last_epoch != steps:
        raise ValueError(f"its schedule is at {scheduler.last_epoch}, the data at {steps} steps")
    wanted = [lr * factor(steps) for lr, factor in zip(base, scheduler.lr_lambdas, strict=True)]
    found = [group["lr"] for group in scheduler.optimizer.param_groups]
    if not all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(wanted, found, strict=True)):
        raise ValueError(f"its learning rate is {found[0]}; at this step it is {wanted[0]}")


def check_history(
    history: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]], epochs: int
) -> None:
    """One row for each epoch, all with the same columns."""
    for rows, name in ((history, "history"), (rates, "rates")):
        if name == "rates" and not rows:
            continue
        if [row.get("epoch") for row in rows] != list(range(epochs)):
            raise ValueError(f"it is at epoch {epochs}, and its {name} are of {len(rows)}")
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError(f"the rows of its {name} have different columns")
