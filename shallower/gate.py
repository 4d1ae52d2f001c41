"""The gate on a residual block.

    z_next = tail(skip(z) + xi * branch(z)),    xi ~ Bernoulli(theta)                             (1)

A gated module keeps its place, its parameters and their names. Only its class changes, to one whose
`forward` asks the gate which of the two networks to run, as FSDP2's `fully_shard` does it.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from shallower.graphs import compiled, used_modules
from shallower.split import Block, linear_parameters, split

ATTRIBUTE = "shallower_gate"  # a gate is a child of its module under this name; it adds no state_dict key


Whole = Callable[[Tensor], Tensor]  # a module's own forward


class Gate(nn.Module):
    """What one gated block knows: its rate, its current draw, and what the backward pass said it is worth.

    `worth` is the first-order estimate of loss(xi=1) - loss(xi=0), eq. (3): <dloss/dsum, branch(z)>,
    summed over the backward passes of one optimiser step. An open gate reads it off the gradients
    of the branch's last affine map, whose parameters p satisfy, by Euler's identity,

        <dloss/dbranch, branch> = sum(p.grad * p),

    at no cost in activations; a closed gate runs its branch forward only.
    """

    theta: Tensor  # the rate of survival, in [0, 1]; a buffer, so that no weight optimiser sees it

    def __init__(self, block: Block, module: nn.Module, theta: float, *, watching: bool = True) -> None:
        super().__init__()
        self.name = block.name
        self.watching = watching  # whether `worth` is wanted; if not, a closed gate runs nothing
        self.register_buffer("theta", torch.tensor(theta, device=_device(module)), persistent=False)
        self.xi = True
        self.credits: list[Tensor] = []
        self.record: list[tuple[Gate, Tensor]] | None = None  # see `estimators.flip`
        self.replay: deque[Tensor] = deque()
        self._prepare(block, module)

    def _prepare(self, block: Block, module: nn.Module) -> None:
        parts = (block.head, block.branch, block.skip, block.tail)
        self.head, self.branch, self.skip, self.tail = map(compiled, parts)
        self.norms = [m for m in used_modules(module, block.branch) if isinstance(m, _NormBase)]
        last = linear_parameters(module, block.branch)
        self.input = next(iter(inspect.signature(module.forward).parameters))
        self.ready = True
        self.free = bool(last) and all(p.requires_grad for p in last)
        self._handles: list[RemovableHandle] = []
        if self.free and self.watching:
            self._handles = [p.register_hook(partial(self._read, p)) for p in last]

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def worth(self) -> Tensor | None:
        """The estimate (3) so far, or None where no gradient has reached the gate."""
        return sum(self.credits[1:], self.credits[0]) if self.credits else None

    def _read(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A hook of the backward pass: the weights have not moved yet, and nothing has been clipped."""
        if self.training and self.xi:
            self.credits.append(inner(gradient, parameter.detach()))  # (3)

    def run(self, module: nn.Module, whole: Whole, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The forward pass of `module`, whose own forward is `whole`."""
        if self.replay:
            return self.replay.popleft()
        if len(args) + len(kwargs) != 1 or not kwargs.keys() <= {self.input}:
            raise TypeError(
                f"The block {self.name!r} was called with {len(args)} arguments and the keywords "
                f"{list(kwargs)}, but it was split into skip and branch as a function of {self.input!r} "
                "alone, every other argument at its default. Call it so, or leave the block out: "
                "`Pruner(..., blocks=[...])`."
            )
        (z,) = (*args, *kwargs.values())
        out = self._forward(module, whole, z)
        if self.record is not None:
            self.record.append((self, out))
        return out

    def _forward(self, module: nn.Module, whole: Whole, z: Tensor) -> Tensor:
        watching = self.watching and torch.is_grad_enabled()
        if self.training and self.xi and (self.free or not watching):
            return whole(z)  # open: the module as its author wrote it
        z = self.head(module, z)
        if not self.training:
            return self.tail(module, self.skip(module, z) + self.theta * self.branch(module, z))
        if self.xi:
            branch = self.branch(module, z)
            return self.tail(module, Watch.apply(self.skip(module, z) + branch, branch, _anchor(), self))
        if not watching:
            return self.tail(module, self.skip(module, z))
        with torch.no_grad(), frozen_statistics(self.norms):
            idle = self.branch(module, z)
        return self.tail(module, Watch.apply(self.skip(module, z), idle, _anchor(), self))

    def __getstate__(self) -> dict[str, Any]:
        """Compiled parts and hooks stay behind; a copy is a network to evaluate until it is gated anew."""
        state = dict(self.__dict__)
        state.update(credits=[], record=None, replay=deque(), ready=False, norms=[], _handles=[])
        state.update(dict.fromkeys(("head", "branch", "skip", "tail")))
        return state

    def restore(self, module: nn.Module) -> None:
        """Split the block again, in a copy that came out of `deepcopy` or `pickle`."""
        self._prepare(split(module, name=self.name), module)


class Watch(torch.autograd.Function):
    """The identity on the sum, whose backward pass credits the gate with <dloss/dsum, branch>."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, branch: Tensor, anchor: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(branch)
        ctx.gate = gate
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (branch,) = ctx.saved_tensors
        ctx.gate.credits.append(inner(gradient, branch))  # (3)
        return gradient, None, None, None


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, summed in single precision at least."""
    if a.dtype == b.dtype == torch.float32 and a.is_contiguous() and b.is_contiguous():
        return torch.dot(a.flatten(), b.flatten())
    return (a * b).sum(dtype=torch.promote_types(a.dtype, torch.float32))


def _anchor() -> Tensor:
    """Makes the gradient reach a sum that depends on no parameter, as in a network's first block."""
    return torch.zeros((), requires_grad=True)


def _device(module: nn.Module) -> torch.device:
    return next(p.device for p in module.parameters())


@contextmanager
def frozen_statistics(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Batch statistics are used as in training, but the running ones are not touched."""
    tracking = [m for m in norms if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True


# -- the gated class ----------------------------------------------------------------------------------


class Gated(nn.Module):
    """The part of a gated module's class that comes before the class its author wrote."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        gate: Gate = getattr(self, ATTRIBUTE)
        if not gate.ready:
            with _plain(self):
                gate.restore(self)
        return gate.run(self, super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self).__bases__[1],), self.__dict__


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # one gated class for each class, as for isinstance


def _gated(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        own = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _CLASSES[cls] = type(f"Gated{cls.__name__}", (Gated, cls), own)
    return _CLASSES[cls]


def _empty(cls: type[nn.Module]) -> nn.Module:
    gated = _gated(cls)
    return gated.__new__(gated)


def attach(module: nn.Module, block: Block, theta: float, *, watching: bool = True) -> Gate:
    """Gate `module` in place."""
    gate = Gate(block, module, theta, watching=watching).train(module.training)
    module.add_module(ATTRIBUTE, gate)
    module.__class__ = _gated(type(module))
    return gate


def detach(module: nn.Module) -> None:
    """Make a gated module what it was."""
    getattr(module, ATTRIBUTE).release()
    delattr(module, ATTRIBUTE)
    module.__class__ = type(module).__bases__[1]


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    gated = type(module)
    module.__class__ = gated.__bases__[1]
    try:
        yield
    finally:
        module.__class__ = gated
