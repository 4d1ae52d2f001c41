"""The forward of a module as a torch.fx graph, in training and in evaluation; the module stays as it was."""

import copy
import inspect
import operator
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shallower.aside import OF_ALL_THREADS

IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}

GONE = "shallower_gone"  # an attribute: the parameters that a pruned module has lost, which its forward names
MIXIN = "_shallower_mixin"  # of the classes that come before an author's own


class Untraceable(ValueError):
    """Why torch.fx cannot follow a module's forward, or would freeze what changes from call to call."""


class _Proxy(fx.Proxy):
    """Also tells `x += y` from `x = x + y`, which torch.fx takes for the same."""


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, y: x.tracer.create_proxy("call_function", function, (x, y), {})


for _function in IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class Tracer(fx.Tracer):
    """Traces in its own thread; modules that run in others meanwhile, as in another training, run as ever."""

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        self.thread = threading.get_ident()
        return super().trace(*args, **kwargs)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class OwnForward(Tracer):
    """Traces a module's own `forward`; every child is one opaque call."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_modes(
    module: nn.Module, tracer: Callable[[], Tracer], *, forward: Callable[..., Any] | None = None
) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of `forward` in training and in evaluation; the module is left as it was.

    By default it is the module's own, with all arguments that have a default at it.
    """
    if "forward" in vars(module):
        raise Untraceable("its forward was replaced on this one instance, where torch.fx does not look")
    modes = {m: m.training for m in module.modules()}
    graphs = []
    try:
        for mode in (True, False):
            for m in modes:
                m.training = mode
            with OF_ALL_THREADS, _without_dice(), _without_switches():
                fixed = defaults(module) if forward is None else None
                shadow, before = _shadow(module, forward)
                graphs.append(tracer().trace(shadow, concrete_args=fixed))
                _check_unwritten(shadow, before)
    except Untraceable:
        raise
    except Exception as error:  # torch.fx lets through whatever a user's forward raises on a symbolic input
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Untraceable(f"torch.fx cannot trace its forward ({reason})") from error
    finally:
        for m, mode in modes.items():
            m.training = mode
    if any(node.op == "get_attr" and "_tensor_constant" in str(node.target) for node in graphs[0].nodes):
        raise Untraceable("its forward makes a tensor, which tracing would freeze; register it as a buffer")
    return graphs[0], graphs[1]


def author(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it."""
    return next(cls for cls in type(module).__mro__ if MIXIN not in vars(cls))


def defaults(module: nn.Module) -> dict[str, Any]:
    """The arguments of `forward` that have a default, to be fixed at it."""
    arguments = inspect.signature(module.forward).parameters.values()
    return {p.name: p.default for p in arguments if p.default is not p.empty}


def _shadow(
    module: nn.Module, forward: Callable[..., Any] | None
) -> tuple[nn.Module, dict[str, tuple[Any, Any]]]:
    """`module` over the same children and parameters; what a forward writes to itself is written here.

    Beside it, its attributes: each with what stood in it, if it is a container.
    """
    cls = type(module)
    own = {"forward": forward, "__module__": cls.__module__}
    shadow: nn.Module = object.__new__(cls if forward is None else type(cls.__name__, (cls,), own))
    own_state = {k: copy.copy(v) if _is_container(k, v) else v for k, v in vars(module).items()}
    vars(shadow).update(own_state)
    before = {k: (v, copy.copy(v) if _is_container(k, v) else None) for k, v in own_state.items()}
    gone = {name: nn.Parameter(torch.empty(0)) for name in vars(module).get(GONE, ())}
    vars(shadow)["_parameters"] = {**module._parameters, **gone}
    vars(shadow)["_buffers"] = {n: b if b is None else b.clone() for n, b in module._buffers.items()}
    return shadow, before


INTERNAL = frozenset(vars(nn.Module()))


def _is_container(name: str, value: Any) -> bool:
    return name not in INTERNAL and type(value) in (list, dict, set)


def _check_unwritten(shadow: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    """A value that a forward leaves in its module would be that of the trace, for ever."""
    for name, value in vars(shadow).items():
        if name in INTERNAL or name.startswith("_tensor_constant"):
            continue
        old, content = before.get(name, (None, None))
        grown = content is not None and (
            len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True))
        )
        if grown or (value is not old and not isinstance(value, bool | int | float | str | None)):
            raise Untraceable(f"its forward writes to itself ({name}), which tracing would freeze")


@contextmanager
def _without_switches() -> Iterator[None]:
    """A graph knows nothing of contexts: a forward must neither enter one nor ask for it."""

    here = threading.get_ident()

    def refusing(old: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return old(*args, **kwargs)
            raise Untraceable(
                "its forward switches gradients or autocast, or asks for them, which tracing would lose"
            )

        return refuse

    places: list[tuple[Any, str]] = [
        *((torch, n) for n in ("is_grad_enabled", "set_grad_enabled", "is_autocast_enabled")),
        *((kind, "__enter__") for kind in (torch.autocast, torch.inference_mode)),
    ]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), old in zip(places, before, strict=True):
        setattr(owner, name, refusing(old))
    try:
        yield
    finally:
        for (owner, name), old in zip(places, before, strict=True):
            setattr(owner, name, old)


SIMPLE = {bool, int, float, str, type(None)}


def held_numbers(module: nn.Module) -> dict[str, str]:
    """The plain values that a module holds, itself or in a configuration: tracing writes them into graphs."""
    found = {}
    for name, value in vars(module).items():
        if name in INTERNAL or name.startswith("shallower_"):
            continue
        if type(value) in SIMPLE:
            found[name] = repr(value)
        elif type(value) in (list, tuple):
            found[name] = repr([v for v in value if type(v) in SIMPLE])
        elif not isinstance(value, nn.Module | Tensor | type) and not callable(value):
            inside = value if type(value) is dict else getattr(value, "__dict__", {})
            found |= {f"{name}.{k}": repr(v) for k, v in list(inside.items()) if type(v) in SIMPLE}
    return found


class _Dice(TorchDispatchMode):
    """Notices the random numbers that PyTorch draws, on any device, in this thread."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_dice() -> Iterator[None]:
    torch_state, state, numpy_state = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False),
    )
    dice, others = _Dice(), False
    try:
        with dice:
            yield
    finally:
        if dice.drawn:
            torch.set_rng_state(torch_state)
        now = random.getstate(), np.random.get_state(legacy=False)
        if others := state != now[0] or repr(numpy_state) != repr(now[1]):
            random.setstate(state)
            np.random.set_state(numpy_state)
    if dice.drawn or others:
        raise Untraceable("its forward draws random numbers, which tracing would freeze")
