"""Regional compilation: one compiled function for all blocks of a kind."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

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
        assert isinstance(function, FunctionType)
        code = function.__code__
        shapes = [(n, p.shape, p.dtype) for n, p in module.named_parameters()]
        kinds = [(n, type(m), m.extra_repr()) for n, m in module.named_modules(remove_duplicate=False)]
        key = (code.co_code, code.co_consts, code.co_names, repr(kinds[1:]), repr(shapes))
        if key not in self._functions:
            own = FunctionType(
                code.replace(co_name=f"{code.co_name}_{len(self._functions)}"),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            own.__kwdefaults__ = function.__kwdefaults__
            self._functions[key] = torch.compile(own, **self.options)
        return self._functions[key]
