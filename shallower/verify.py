"""Two roads to one value: what tracing made of a forward is held against the forward itself.

A trace sees what a forward does with symbols, and may miss what it does with tensors, as where it asks for
their type, or where a child works in place on what others read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shallower.aside import copied, in_mode, same_dice
from shallower.tracing import author

TOLERANCE = 1e-4
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def fault(
    module: nn.Module, ours: Callable[..., Any], given: Arguments, *, may_write: bool = False
) -> str | None:
    """What is wrong with `ours` as the forward of `module` on these arguments, in evaluation."""
    if any(t.is_meta for t in tree_leaves(given) if isinstance(t, Tensor)):
        return None  # no numbers to compare
    with torch.no_grad(), in_mode(module, training=False), same_dice(module, seed=0):
        args, kwargs = _afresh(given)
        before = [t._version for t in _tensors((args, kwargs))]
        theirs = author(module).forward(module, *args, **kwargs)
        written = before != [t._version for t in _tensors((args, kwargs))]
    if written and not may_write:
        return "a part of it works in place on its input, which others read"
    with torch.no_grad(), in_mode(module, training=False), same_dice(module, seed=0):
        args, kwargs = _afresh(given)
        mine = ours(*args, **kwargs)
    return None if _alike(theirs, mine) else "traced, it computes something else than it does on tensors"


def _afresh(given: Arguments) -> Arguments:
    """The arguments once more, with memory of their own."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, copied(given))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and not value.is_inference()]


def _alike(theirs: Any, mine: Any) -> bool:
    one, other = (
        [v for v in tree_leaves(values) if isinstance(v, Tensor) or v is None] for values in (theirs, mine)
    )
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape:
            return False
        elif a.is_floating_point():
            scale = a.abs().max().clamp(min=1.0) if a.numel() else 1.0
            if not torch.allclose(a / scale, b / scale, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return False
        elif not torch.equal(a, b):
            return False
    return True


def check_first_use(module: nn.Module, gates: Sequence[Any], given: Arguments) -> None:
    """Hold a gated module, with its gates open, against its author's forward, in its first training step.

    Not while somebody counts what is run.
    """
    if not (module.training and torch.is_grad_enabled()) or torch._C._len_torch_dispatch_stack():
        return
    rates = [gate.rate for gate in gates]
    for gate in gates:
        gate.unseen, gate.rate = False, 1.0  # the mean network of open gates is the network itself
    try:
        wrong = fault(module, module.forward, given, may_write=any(gate.overwrites for gate in gates))
    finally:
        for gate, rate in zip(gates, rates, strict=True):
            gate.rate = rate
    if wrong is not None:
        names = ", ".join(repr(gate.name) for gate in gates)
        raise RuntimeError(
            f"{names} cannot be pruned: {wrong}. Leave it out, `Pruner(..., blocks=[...])`, or write it as "
            "`shallower.Residual(branch, skip, tail)`."
        )
