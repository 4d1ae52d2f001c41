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

from shallower.aside import copied, frozen_statistics, in_mode, same_dice
from shallower.compilation import Compiler
from shallower.gate import GATE, Gate, Gated, derived
from shallower.graphs import husk
from shallower.tracing import author

WHOLE = "shallower_whole"
ADDS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.detach.default}


@dataclass(frozen=True)
class Whole:
    """A module that is gated as a whole. `rest` says what it returns beside its sum: None, or an argument."""

    name: str
    first: str  # its input, as the forward calls it
    rest: tuple[int | str | None, ...] | None  # None: it returns the sum alone
    flags: tuple[str, ...] = ()  # the arguments that were True on the example, on which `rest` may depend
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
        asked = [name for name, value in kwargs.items() if value is True and name not in self.flags]
        if self.rest and asked:
            raise TypeError(
                f"The layer {self.name!r} is called with {asked[0]}=True, which it was not on the example: "
                "what it returns beside its sum is not known. Call it as on the example."
            )
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        return (total, *(None if place is None else given.get(place) for place in self.rest))


class _Sums(TorchDispatchMode):
    """Which tensors are the input with something added to it, once each."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self.source = source
        self.found: list[Tensor] = [source]  # kept, so that no memory is used again
        self.added = False

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(_is_same(value, one) for one in self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        adds = func in ADDS and any(map(self.holds, args[:2]))
        plain = adds and self._plain(args, kwargs)
        on_the_way = plain or (func in VIEWS and self.holds(args[0]))
        self.added = self.added or adds
        out = func(*args, **kwargs)
        self._forget_written(func, args, kwargs, keep=out if plain else None)
        if on_the_way and not self.holds(out):
            self.found.append(out)
        return out

    def _plain(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """One operand is the sum so far, as it is; the other is not."""
        return kwargs.get("alpha", 1) == 1 and sum(map(self.holds, args[:2])) == 1

    def _forget_written(self, func: Any, args: Any, kwargs: dict[str, Any], keep: Any) -> None:
        """What is overwritten, but by a sum, is no sum any more."""
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, Tensor) and value is not keep:
                memory = value.untyped_storage().data_ptr()
                self.found = [one for one in self.found if one.untyped_storage().data_ptr() != memory]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


@dataclass(frozen=True)
class Look:
    """What an example shows of a module: the block, or why it is none, and whether it adds to its input."""

    block: Whole | None
    reason: str = ""
    adds: bool = True


def find_whole(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Look:
    """The module as one block, if the example shows that it adds to its first input and does nothing else."""
    names = list(inspect.signature(author(module).forward).parameters)[1:]
    z = args[0] if args else kwargs.get(names[0]) if names else None
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return Look(None, "its first input is no tensor of numbers")
    seen: list[Whole | None] = []
    adds = False
    for training in (False, True):
        sums = _Sums(z.clone())
        # Caches and the like change when a module runs.
        mine, named = copied(args), copied(kwargs)
        mine, named = ((sums.source, *mine[1:]), named) if args else (mine, {**named, names[0]: sums.source})
        version = sums.source._version
        try:
            with torch.no_grad(), in_mode(module, training=training), same_dice(module, seed=0), sums:
                out = module(*mine, **named)
            seen.append(_whole(name, names[0], z, out, sums, mine, named))
        except Exception as error:  # whatever the module raises when it is run by itself
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return Look(None, f"it cannot be run by itself on the example ({reason})")
        adds = adds or sums.added
        if sums.source._version != version:
            return Look(None, "it overwrites its input in place", adds)
    if seen[0] is None or seen[0] != seen[1]:
        reason = "it does more to its input than to add to it, or returns more than its input tells"
        return Look(None, reason, adds)
    return Look(seen[0])


def _whole(
    name: str, source: str, z: Tensor, out: Any, sums: _Sums, args: Sequence[Any], kwargs: dict[str, Any]
) -> Whole | None:
    first, *beside = out if isinstance(out, tuple) else (out,)
    if not isinstance(first, Tensor) or not sums.holds(first) or first.shape != z.shape:
        return None
    rest = _rest(beside, args, kwargs)
    if rest is None or _is_same(first, sums.source) or not sums.holds(sums.source):
        return None
    flags = tuple(name for name, value in kwargs.items() if value is True)
    return Whole(name, source, rest if isinstance(out, tuple) else None, flags)


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
            return self.block.put(self.replay.popleft()(), args, kwargs)
        total, beside = self._total(whole, args, kwargs)
        if self.record is not None:
            self.record.append((self, total.clone()))
        return self.block.put(total, args, kwargs) if beside is None else (total, *beside)

    def _total(
        self, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Sequence[Any] | None]:
        """The sum, and what the module itself returned beside it, if it ran."""
        compiled = self.compiled

        def run() -> tuple[Tensor, Sequence[Any] | None]:
            out = whole(*args, **kwargs) if compiled is None else compiled(self.module, *args, **kwargs)
            return (out[0], out[1:]) if isinstance(out, tuple) else (out, None)

        z, watching = self.block.input(args, kwargs), self.watching and torch.is_grad_enabled()
        if not self.module.training:
            self.theta.fill_(self.rate)
            self._hear(run)
            out, beside = run()
            return torch.lerp(z.to(out.dtype), out, self.theta.to(out.dtype)), beside
        if self.xi:
            out, beside = run()
            if not watching:
                return out, beside
            added = out.detach() - z.detach()
            return self.listener.watch(out, added, self.alias), beside  # (1), xi = 1
        if not self.watching:
            return z.clone(), None
        with torch.no_grad(), frozen_statistics(self.inside):
            out, beside = run()
        if not watching:  # as in the first pass of reentrant checkpointing, whose dice must be the same
            return z.clone(), beside
        return self.listener.watch(z, out - z, False), beside  # (1) with xi = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "block": self.block}

    def restore(self) -> None:
        self._prepare(self.block)


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
        module._modules[name] = husk(module._modules[name])
    module._parameters.update(dict.fromkeys(module._parameters))
    module._buffers.clear()
