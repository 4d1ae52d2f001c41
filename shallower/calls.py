"""How a module is called, and the graph of its forward when it is called like that.

Tensors, and whatever else is not a plain constant, are inputs of the graph; plain constants are part of it.
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shallower.split import write_out_alpha
from shallower.tracing import OwnForward, Untraceable, author, trace_modes

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
CHECKS = {torch._assert}


def _encoder_layer(
    self: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """What PyTorch's own forward computes when none of its shortcuts is taken."""
    masks = (src_mask, src_key_padding_mask)
    if self.norm_first:
        x = src + self._sa_block(self.norm1(src), *masks, is_causal=is_causal)
        return x + self._ff_block(self.norm2(x))
    x = self.norm1(src + self._sa_block(src, *masks, is_causal=is_causal))
    return self.norm2(x + self._ff_block(x))


FORWARDS: dict[type, Any] = {nn.TransformerEncoderLayer: _encoder_layer}  # common, and not to be traced


class Constant:
    """A plain value as a key: 1, 1.0 and True are three."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Call:
    """The arguments of a call: the names of the inputs, and the constants with their values."""

    live: tuple[str, ...] = ()
    fixed: tuple[tuple[str, Constant], ...] = ()

    def constants(self) -> dict[str, Any]:
        return {name: constant.value for name, constant in self.fixed}


def arrange(
    forward: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, list[Any]]:
    """A call of a method of the signature `forward`, and the values of its inputs."""
    given: dict[str, Any] = {}
    names = list(forward.parameters.values())[1:]
    for parameter, value in zip(names, args, strict=False):
        given[parameter.name] = value
    if len(args) > len(names) or any(p.kind is p.VAR_POSITIONAL for p in names[: len(args)]):
        raise Untraceable("it is called with more positional arguments than its forward names")
    given |= kwargs
    fixed = {name: value for name, value in given.items() if _is_plain(value)}
    live = [name for name in given if name not in fixed]
    return Call(tuple(live), tuple((n, Constant(v)) for n, v in fixed.items())), [given[n] for n in live]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def default_call(module: nn.Module) -> Call:
    """As one input, or as many as have no default."""
    _, *parameters = inspect.signature(author(module).forward).parameters.values()
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return Call(tuple(p.name for p in parameters if p.default is p.empty and p.kind in single))


class _Tracer(OwnForward):
    """Opens the modules in `opened`; every other child is one opaque call. Buffers are no constants."""

    proxy_buffer_attributes = True

    def __init__(self, opened: set[type]) -> None:
        super().__init__()
        self.opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) not in self.opened


def trace_call(module: nn.Module, call: Call, *, opened: set[type] | None = None) -> dict[bool, fx.Graph]:
    """The graphs of `module` called like that, in training (True) and in evaluation (False)."""
    train, evaluate = trace_modes(module, lambda: _Tracer(opened or set()), forward=_forward(module, call))
    for graph in (train, evaluate):
        _tidy(graph, module)
    return {True: train, False: evaluate}


def _forward(module: nn.Module, call: Call) -> Any:
    """The module's forward as a function of the inputs alone."""
    arguments = [f"{n}={n}" for n in call.live] + [f"{n}=_fixed[{n!r}]" for n, _ in call.fixed]
    text = f"def forward(self, {', '.join(call.live)}):\n    return _whole(self, {', '.join(arguments)})"
    scope: dict[str, Any] = {
        "_whole": FORWARDS.get(author(module), author(module).forward),
        "_fixed": call.constants(),
    }
    exec(text, scope)
    return scope["forward"]


def _tidy(graph: fx.Graph, module: nn.Module) -> None:
    """Checks go, and so do elements of tuples that nobody reads; a + alpha * b is written out.

    What a forward asks of a parameter but its values, as in `self.norm.weight.dtype`, is a constant.
    """
    for node in [n for n in graph.nodes if n.target is getattr and n.args[1] in ("dtype", "shape", "ndim")]:
        of = node.args[0]
        if isinstance(of, fx.Node) and of.op == "get_attr":
            value = getattr(_attribute(module, str(of.target)), str(node.args[1]))
            _put(node, value)
            graph.erase_node(node)
            if not of.users:
                graph.erase_node(of)
    for node in reversed(list(graph.nodes)):
        idle = node.op == "call_function" and node.target in (operator.getitem, getattr) and not node.users
        if node.target in CHECKS or idle:
            graph.erase_node(node)
    for node in [n for n in graph.nodes if n.kwargs.get("alpha", 1) != 1]:
        write_out_alpha(graph, node)


def _put(node: fx.Node, value: Any) -> None:
    """A value in the place of a node, wherever it is read."""

    def put(n: fx.Node) -> Any:
        return value if n is node else n

    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(user.args, put), fx.map_arg(user.kwargs, put)


def _attribute(module: nn.Module, path: str) -> Any:
    parent, _, name = path.rpartition(".")
    return getattr(module.get_submodule(parent), name)
