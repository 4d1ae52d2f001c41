"""What a block is worth: functions of one signature; a user's own is passed the same way.

Each returns one number per gate, in nats of the mean loss: loss(xi=1) - loss(xi=0), negative for a block
that helps. The pruner calls it without gradients and with the running statistics frozen. An estimator whose
attribute `needs_loss` is true runs the network again: it is called at the weights with which the step's
gradient was taken, and gates need not watch the backward pass for it. One whose attribute `free` is false
has every gate watch its sum, and none use Euler's identity.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shallower.gate import Gate

Closure = Callable[[], Tensor]
Estimator = Callable[[Sequence[Gate], Closure | None], Sequence[Tensor] | Tensor]


def first_order(gates: Sequence[Gate], closure: Closure | None = None) -> Tensor:
    """<dloss/dsum, branch(z)>, left behind by the backward pass. No extra forward.                  (3)

    An open block's share is read off the gradients of its last layer, so the loss must see that layer through
    the network alone; with a penalty on weights in the loss, use `at_the_sum`.
    """
    parts = [gate.credits for gate in gates]
    if not all(parts):
        missing = [gate.name for gate in gates if not gate.credits]
        raise RuntimeError(
            f"No gradient reached the gates of {_some(missing)} since the last step. Call `loss.backward()` "
            "before `pruner.step()`, with the model in training mode (`model.train()`) and every block "
            "on the way to the loss."
        )
    return sums(parts)


@torch.no_grad()
def flip(gates: Sequence[Gate], closure: Closure | None = None) -> list[Tensor]:
    """loss(xi=1) - loss(xi=0) by running the network again with one gate flipped: exact.            (4)

    `closure` runs the model on the batch and returns the mean loss. With dropout the two networks have other
    masks, so the difference is right on average only. What runs before the flipped gate is
    the same in both networks, so the gated blocks below it return what they returned the first time.
    """
    if closure is None:
        raise TypeError(
            "The estimator `flip` runs the network again and needs the loss as a function: "
            "`pruner.step(lambda: F.cross_entropy(model(images), labels))`."
        )
    idle = [gate.name for gate in gates if not gate.training]
    if idle:
        raise RuntimeError(f"The gates of {_some(idle)} are in evaluation mode: call `model.train()` first.")
    loss, calls = _recorded(gates, closure)
    order = [call.gate for call in calls]
    missing = [gate.name for gate in gates if gate not in order]
    if missing:
        raise RuntimeError(f"The closure did not run {_some(missing)}: it must run the gated model itself.")
    differences, copied = [], False
    for gate in gates:
        with _flipped(gate, prefix=calls[: order.index(gate)], copied=copied):
            other = closure()
        differences.append(loss - other if gate.xi else other - loss)  # (4)
        if not copied and any(call.overwritten for call in calls):  # in place, by a layer behind its block
            copied, (_, calls) = True, _recorded(gates, closure)
    return differences


flip.needs_loss = True  # type: ignore[attr-defined]


def at_the_sum(gates: Sequence[Gate], closure: Closure | None = None) -> Tensor:
    """`first_order` where the loss reads weights in other ways than through the network, as a penalty does.

    The estimate is then taken at every block's sum; an open block keeps the output of its branch for that.
    """
    return first_order(gates, closure)


at_the_sum.free = False  # type: ignore[attr-defined]


def sums(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """The sum of each row, as one vector."""
    first = parts[0][0]
    if first.device.type == "cpu":  # numbers are at hand, and faster than operations on them
        return torch.tensor([sum([value.item() for value in row]) for row in parts], dtype=first.dtype)
    return _sums_on_device(parts)


def _sums_on_device(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """A few small operations for any number of gates, and no waiting."""
    width = max(map(len, parts))
    zero = parts[0][0].new_zeros(())  # for rows that are shorter, as those of closed blocks are
    values = torch.stack([value for row in parts for value in (*row, *[zero] * (width - len(row)))])
    return values.view(len(parts), width).sum(1)


def needs_loss(estimator: Estimator) -> bool:
    return bool(getattr(estimator, "needs_loss", False))


class _Call:
    """What a gated block returned, kept to be returned again."""

    def __init__(self, gate: Gate, output: Tensor) -> None:
        self.gate, self.output, self._version = gate, output, output._version

    @property
    def overwritten(self) -> bool:
        return self.output._version != self._version


def _recorded(gates: Sequence[Gate], closure: Closure) -> tuple[Tensor, list[_Call]]:
    """The loss, and the calls of the gated blocks in their order."""
    calls: list[tuple[Gate, Tensor]] = []
    for gate in gates:
        gate.record = calls
    try:
        loss = closure()
    finally:
        for gate in gates:
            gate.record = None
    return loss, [_Call(gate, output) for gate, output in calls]


@contextmanager
def _flipped(gate: Gate, *, prefix: Sequence[_Call], copied: bool) -> Iterator[None]:
    for call in prefix:
        output = call.output
        call.gate.replay.append(output.clone if copied else partial(_same, output))
    gate.xi = not gate.xi
    try:
        yield
    finally:
        gate.xi = not gate.xi
        for call in prefix:
            call.gate.replay.clear()


def _same(output: Tensor) -> Tensor:
    return output


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
