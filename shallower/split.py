"""Split one module into the parts of a residual block.

    output = tail(skip(h) + branch(h)),    h = head(input)                                        (1)

`head` is what skip and branch have in common, and nearly always the identity. A module is traced with
torch.fx, its children as opaque calls, so only its own few lines must be traceable; the four parts are
graphs over the module's own children, under the children's own names.
"""

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parameter import is_lazy

from shallower.graphs import ancestors, chain, dependents, extract, is_identity, used, without_identities
from shallower.residual import ChannelCopy, ZeroPad

# Exact types: a subclass may do more, as a BatchNorm with a fused activation does.
CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm}
AFFINE = {nn.Linear, *CONVOLUTIONS, *NORMS}
TRANSPARENT = {
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.Flatten),
}
LINEAR_MODULES = AFFINE | TRANSPARENT | {ChannelCopy, ZeroPad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d}
SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
LINEAR_CALLS = {
    *(*SUMS, operator.getitem, operator.mul, torch.mul, torch.cat, torch.concat, F.pad, F.avg_pool2d),
    *("repeat", "contiguous", "clone", "mul"),
}


class NotResidual(ValueError):
    """Why a module is no residual block that can be gated; `near` if it computes a sum all the same."""

    def __init__(self, reason: str, *, near: bool = True) -> None:
        super().__init__(reason)
        self.near = near


@dataclass(frozen=True)
class Block:
    """One residual block, split. Each part maps one tensor to one tensor; see (1) above."""

    name: str
    head: fx.Graph
    branch: fx.Graph
    skip: fx.Graph
    tail: fx.Graph

    def prunable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that only the branch uses: those that leave when the block is removed."""
        kept = {id(p) for part in (self.head, self.skip, self.tail) for p in used(module, part).values()}
        return {n: p for n, p in used(module, self.branch).items() if id(p) not in kept}

    def bypass(self, module: nn.Module) -> nn.Module:
        """What stays when the branch is gone: tail(skip(head(z))), over the very same children."""
        graph = without_identities(module, chain(self.head, self.skip, self.tail))
        if is_identity(graph):
            return nn.Identity()
        rest = fx.GraphModule(module, graph, class_name=f"Bypass{type(module).__name__}")
        return rest.train(module.training)


class _OwnForward(fx.Tracer):
    """Traces a module's own `forward`; every child is one opaque call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def split(module: nn.Module, *, name: str = "") -> Block:
    """Split one residual module by (1), or raise `NotResidual` with the reason and what to do."""
    if any(is_lazy(p) for p in module.parameters()):
        raise NotResidual("it has uninitialised lazy parameters; run one batch through the model first")
    graph = _trace_both_modes(module)
    source = next(node for node in graph.nodes if node.op == "placeholder")
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(value, fx.Node):
        raise NotResidual("it returns something other than one tensor; return the sum itself", near=False)
    depends = dependents(graph, source)
    total = _last_sum(graph, source, value, depends)
    skip, branch, start = _operands(module, graph, total, depends)
    _check_in_place(module, graph, {source, start})
    return Block(
        name=name,
        head=extract(graph, source, start),
        branch=extract(graph, start, branch),
        skip=extract(graph, start, skip),
        tail=extract(graph, total, value, copy=_tail_in_place(module, total)),
    )


def _trace_both_modes(module: nn.Module) -> fx.Graph:
    """The graph of `forward`; it must not depend on `self.training`, which tracing would freeze."""
    modes = {m: m.training for m in module.modules()}
    try:
        graphs = []
        for mode in (True, False):
            for m in modes:
                m.training = mode
            graphs.append(_OwnForward().trace(module, concrete_args=defaults(module)))
    except Exception as error:  # torch.fx lets through whatever a user's forward raises on a symbolic input
        raise NotResidual(
            f"torch.fx cannot trace its forward ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "write the block as `shallower.Residual(branch, skip, tail)`"
        ) from error
    finally:
        for m, mode in modes.items():
            m.training = mode
    train, evaluate = (graph.python_code("self").src for graph in graphs)
    if train != evaluate:
        raise NotResidual(
            "its forward depends on `self.training`, which tracing would freeze; "
            "use modules that know their mode, such as `nn.Dropout` for `F.dropout`"
        )
    return graphs[0]


def defaults(module: nn.Module) -> dict[str, Any]:
    """Arguments after the first are fixed at their defaults; a gate refuses calls that set them."""
    _, *rest = inspect.signature(module.forward).parameters.values()
    required = [p.name for p in rest if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if required:
        raise TypeError(f"forward needs more than one input ({', '.join(required)})")
    return {p.name: p.default for p in rest if p.default is not p.empty}


def _is_sum(node: fx.Node, depends: set[fx.Node]) -> bool:
    return (
        node.op in ("call_function", "call_method")
        and node.target in SUMS
        and len(node.args) == 2
        and bool(node.kwargs.get("alpha", 1) == 1)
        and all(isinstance(arg, fx.Node) and arg in depends for arg in node.args)
    )


def _last_sum(graph: fx.Graph, source: fx.Node, value: fx.Node, depends: set[fx.Node]) -> fx.Node:
    """The last sum that every path from the input to the output goes through."""
    sums = [node for node in graph.nodes if _is_sum(node, depends) and node in ancestors(value)]
    if not sums:
        raise NotResidual("it computes no sum of two functions of its input", near=False)
    through = [node for node in sums if source not in ancestors(value, stop=node)]
    if not through:
        raise NotResidual(
            "its output depends on more than its last sum; "
            "write the block as `shallower.Residual(branch, skip, tail)`"
        )
    return through[-1]


def _operands(
    module: nn.Module, graph: fx.Graph, total: fx.Node, depends: set[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Which operand of the sum is the skip, which the branch, and the value where both start."""
    left, right = (arg for arg in total.args if isinstance(arg, fx.Node))
    behind = {node: ancestors(node) & depends for node in (left, right)}
    shared = behind[left] & behind[right]
    fork = {n for n in shared if n in (left, right) or any(u in depends - shared for u in n.users)}
    fork = {n for n in fork if n in (left, right) or any(u in behind[left] | behind[right] for u in n.users)}
    if len(fork) != 1 or left is right:
        raise NotResidual(
            "its skip and its branch share more than their input; "
            "write the block as `shallower.Residual(branch, skip, tail)`"
        )
    (start,) = fork
    if any(_is_sum(node, depends) for node in ancestors(start)):
        raise NotResidual(
            "it computes two residual sums, one after the other; give each a module of its own: "
            "`nn.Sequential(shallower.Residual(first), shallower.Residual(second))`"
        )
    skip = _which_is_skip(module, graph, left, right, start)
    return skip, right if skip is left else left, start


def _which_is_skip(
    module: nn.Module, graph: fx.Graph, left: fx.Node, right: fx.Node, start: fx.Node
) -> fx.Node:
    """The skip is the input itself; else what has no parameters; else what is linear; else the smaller."""
    if start in (left, right):
        return start
    parts = {node: extract(graph, start, node) for node in (left, right)}
    sizes = {node: sum(p.numel() for p in used(module, part).values()) for node, part in parts.items()}
    linear = {node: _is_linear(module, part) for node, part in parts.items()}
    by_size, by_kind = sorted(parts, key=sizes.__getitem__), [n for n in parts if linear[n]]
    if sizes[by_size[0]] == 0 < sizes[by_size[1]]:
        return by_size[0]
    if len(by_kind) == 1:
        return by_kind[0]
    if len(by_kind) == 2 and sizes[by_size[0]] < sizes[by_size[1]]:
        return by_size[0]
    raise NotResidual(
        f"it cannot be told which operand of its sum is the skip ({left} or {right}); "
        "write the block as `shallower.Residual(branch, skip, tail)`"
    )


def _is_linear(module: nn.Module, part: fx.Graph) -> bool:
    for node in part.nodes:
        if node.op == "call_module" and not _is_linear_module(module.get_submodule(str(node.target))):
            return False
        if node.op in ("call_function", "call_method") and node.target not in LINEAR_CALLS:
            return False
    return True


def _is_linear_module(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return all(map(_is_linear_module, module))
    return type(module) in LINEAR_MODULES


# -- operations in place ------------------------------------------------------------------------------


def _in_place(module: nn.Module, node: fx.Node) -> bool:
    """Whether `node` overwrites its first argument."""
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        first = next(iter(child), child) if isinstance(child, nn.Sequential) else child
        return bool(getattr(first, "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    named = getattr(node.target, "__name__", "")
    by_name = node.op == "call_function" and (named.endswith("_") or named in ("iadd", "imul", "isub"))
    return bool(by_name or node.kwargs.get("inplace") is True)


def _check_in_place(module: nn.Module, graph: fx.Graph, shared: set[fx.Node]) -> None:
    for node in graph.nodes:
        first = next(iter(node.all_input_nodes), None)
        if first in shared and len(first.users) > 1 and _in_place(module, node) and node.target not in SUMS:
            raise NotResidual(
                f"{node} overwrites in place a value that its skip also reads; set inplace=False there"
            )


def _tail_in_place(module: nn.Module, total: fx.Node) -> bool:
    """A tail that overwrites the sum must not overwrite the block's input when only the skip is left."""
    return any(_in_place(module, user) for user in total.users)


# -- what a branch ends in -----------------------------------------------------------------------------


def linear_parameters(module: nn.Module, part: fx.Graph) -> list[nn.Parameter]:
    """The parameters of the affine map that `part` ends in, whose output is linear in them; or none.

    Dropout and averaging may follow the map. An empty list means that it is not plain from the types.
    """
    value = next(node for node in part.nodes if node.op == "output").args[0]
    while isinstance(value, fx.Node) and value.op == "call_module":
        for leaf in _leaves_backwards(module.get_submodule(str(value.target))):
            if type(leaf) in AFFINE and not nn.utils.parametrize.is_parametrized(leaf):
                return list(leaf.parameters())
            if type(leaf) not in TRANSPARENT:
                return []
        value = value.args[0]
    return []


def _leaves_backwards(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in reversed(module):
            yield from _leaves_backwards(child)
    else:
        yield module
