"""The last resort: a module that adds to its input, but whose forward cannot be followed, as one block.

    z_next = z + xi * (module(z) - z)

Which modules those are is seen on an example: every value from the input to the output must be a sum with the
one before it. Closed, the module is not run but for its estimate; removed, it is its input.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shallower.compilation import Compiler
from shallower.gate import GATE, Gate, Gated, derived
from shallower.graphs import author, frozen_statistics, in_mode, same_dice
from shallower.watch import Watch, new_xi

WHOLE = "shallower_whole"
ADDS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default}


@dataclass(frozen=True)
class Whole:
    """A module that is gated as a whole. `rest` says what it returns beside its sum: None, or an argument."""

    name: str
    first: str  # its input, as the forward calls it
    rest: tuple[int | str | None, ...] | None  # None: it returns the sum alone
    overwrites: bool = True  # nobody knows

    @property
    def path(self) -> str:
        return self.name

    def prunable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return dict(module.named_parameters())

    def input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0] if args else kwargs.get(self.first)

    def put(self, total: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the module returns if its sum is `total`."""
        if self.rest is None:
            return total
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        return (total, *(None if place is None else given.get(place) for place in self.rest))


class _Sums(TorchDispatchMode):
    """Which tensors are the input with something added to it."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self.found: list[Tensor] = [source]  # kept, so that no memory is used again
        self.added = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(
            value.data_ptr() == one.data_ptr() and value.shape == one.shape for one in self.found
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        adds = func in ADDS and any(map(self.holds, args[:2]))
        on_the_way = adds or (func in VIEWS and self.holds(args[0]))
        self.added = self.added or adds
        out = func(*args, **(kwargs or {}))
        if on_the_way and not self.holds(out):
            self.found.append(out)
        return out


def find_whole(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Whole | None, bool]:
    """The module as one block, if the example shows that it adds to its first input; and whether it adds
    anything to it at all."""
    names = list(inspect.signature(author(module).forward).parameters)[1:]
    z = args[0] if args else kwargs.get(names[0]) if names else None
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return None, True
    sums = _Sums(z.clone())
    others = {name: value for name, value in kwargs.items() if args or name != names[0]}
    try:
        with torch.no_grad(), in_mode(module, training=False), same_dice(module), sums:
            out = module(sums.found[0], *args[1:], **others)
    except Exception:  # whatever the module raises when it is run by itself
        return None, True
    first, *beside = out if isinstance(out, tuple) else (out,)
    if not isinstance(first, Tensor) or not sums.holds(first) or first.shape != z.shape:
        return None, sums.added
    rest = _rest(beside, args, kwargs)
    if rest is None or first.data_ptr() == sums.found[0].data_ptr():
        return None, sums.added
    return Whole(name, names[0], rest if isinstance(out, tuple) else None), True


def _rest(
    others: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int | str | None, ...] | None:
    """What stands beside the sum, if it is known without the module."""
    known: list[int | str | None] = []
    for value in others:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        places = [place for place, a in given.items() if place and a is value]
        if value is not None and not places:
            return None
        known.append(None if value is None else places[0])
    return tuple(known)


class WholeGate(Gate):
    """The gate of a module as a whole; see `Gate` for what it learns."""

    shared = ("block", "compiled")

    def _prepare(self, block: Any) -> None:
        self.block, self.inside = cast(Whole, block), list(self.module.modules())
        self._read([])

    def compile(self, compiler: Compiler) -> None:
        self.compiled = compiler(author(self.module).forward, self.module)

    def run(self, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replay:
            return self.block.put(self.replay.popleft().clone(), args, kwargs)
        total = self._total(whole, args, kwargs)
        if self.record is not None:
            self.record.append((self, total.clone()))
        return self.block.put(total, args, kwargs)

    def _total(self, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        compiled = self.compiled

        def run() -> Tensor:
            out = whole(*args, **kwargs) if compiled is None else compiled(self.module, *args, **kwargs)
            return out[0] if isinstance(out, tuple) else out

        z, watching = self.block.input(args, kwargs), self.watching and torch.is_grad_enabled()
        if not self.module.training:
            self.theta.fill_(self.rate)
            self._hear(run)
            out = run()
            return torch.lerp(z.to(out.dtype), out, self.theta.to(out.dtype))
        if self.xi:
            out = run()
            if not watching:
                return out
            return Watch.apply(
                out, out.detach() - z.detach(), new_xi(self.credits), self.alias
            )  # (1), xi = 1
        if not watching:
            return z.clone()
        with torch.no_grad(), frozen_statistics(self.inside):
            idle = run() - z
        return Watch.apply(z, idle, new_xi(self.credits), False)  # (1) with xi = 0


def attach_whole(module: nn.Module, block: Whole, theta: float, **options: bool) -> WholeGate:
    """Gate the module in place."""
    gate = WholeGate(cast(Any, block), module, **options)
    gate.rate = theta
    device = next(p.device for p in module.parameters())
    module.register_buffer(gate.buffer, torch.tensor(theta, device=device), persistent=False)
    vars(module)[GATE] = gate
    module.__class__ = derived(Gated, type(module))
    return gate


class Passed(nn.Module):
    """The part of the class of a module that is left out."""

    _shallower_mixin = True
    __reduce_ex__ = Gated.__reduce_ex__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block: Whole = self.__dict__[WHOLE]
        return block.put(block.input(args, kwargs).clone(), args, kwargs)


def pass_by(module: nn.Module, block: Whole) -> None:
    """Leave the module out; its parameters stay where they are."""
    vars(module)[WHOLE] = block
    module.__class__ = derived(Passed, author(module))


def pass_through(module: nn.Module) -> None:
    """Run the module again."""
    del vars(module)[WHOLE]
    module.__class__ = author(module)


def empty(module: nn.Module) -> None:
    """Take everything out of a module that is left out for good."""
    for name in list(module._modules):
        module._modules[name] = nn.Identity()
    module._parameters.update(dict.fromkeys(module._parameters))
    module._buffers.clear()
