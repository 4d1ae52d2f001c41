"""Regional compilation: one compiled function for all blocks of a kind."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Compiled = Callable[[nn.Module, Tensor], Tensor]


class Compiler:
    """Compiles functions of a module and its input, with the options of torch.compile.

    Modules with the same code and the same shapes share one function, because torch.compile takes parameters
    as inputs. Each kind has a code object of its own: torch.compile counts recompilations by code object, and
    gives up on one that needs many.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._functions: dict[Any, Compiled] = {}

    def __call__(self, function: Callable[..., Tensor], module: nn.Module) -> Compiled:
        key = (_meaning(function), _kind(module))
        if key not in self._functions:
            own = _copied(function, len(self._functions))
            self._functions[key] = torch.compile(own, **self.options)
        return self._functions[key]

    def in_place(self, module: nn.Module) -> None:
        """As `module.compile()`, but with one function for all modules of a kind.

        PyTorch's own counts recompilations for all modules of a class together, and gives up after eight:
        five kinds of blocks in training and in evaluation are ten.
        """
        if _has_hooks(module):
            module.compile(**self.options)
        else:  # not copied and not pickled by nn.Module
            module._compiled_call_impl = partial(_call, module, self(type(module).forward, module))


def _call(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Hooks that have come since are not part of the function.
    return module._call_impl(*args, **kwargs) if _has_hooks(module) else own(module, *args, **kwargs)


def _has_hooks(module: nn.Module) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    own = before or after or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or _has_any_global_hook()


def _meaning(function: Callable[..., Tensor]) -> Any:
    """What a function computes: its code, and the very things that its names stand for.

    The parts of two blocks are two functions of one text, which mean the same; the methods of two classes may
    have one text and mean two things.
    """
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__
    names = [(name, id(function.__globals__.get(name))) for name in code.co_names]
    cells = [id(cell.cell_contents) for cell in function.__closure__ or ()]
    defaults = repr((function.__defaults__, function.__kwdefaults__))
    return code.co_code, repr(code.co_consts), tuple(names), tuple(cells), defaults


def _kind(module: nn.Module) -> str:
    """The modules inside, with their settings, and the shapes of their parameters."""
    shapes = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
    inside = [(name, type(m), m.extra_repr()) for name, m in module.named_modules(remove_duplicate=False)]
    return repr((inside[1:], shapes))


def _copied(function: Callable[..., Tensor], number: int) -> Callable[..., Tensor]:
    if not isinstance(function, FunctionType):
        return function
    copy = FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{number}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
