"""Split one module into the parts of a residual block.

    output = tail(skip(h) + branch(h)),    h = head(input)                                        (1)

`head` is what skip and branch have in common, and nearly always the identity. A module is traced with
torch.fx, its children as opaque calls, so only its own few lines must be traceable; the four parts are
graphs over the module's own children, under the children's own names.
"""

import inspect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parameter import is_lazy

from shallower.graphs import (
    ancestors,
    append_copy,
    chain,
    dependents,
    extract,
    is_identity,
    is_sequential,
    used,
    uses,
    without_identities,
)
from shallower.residual import ChannelCopy, Residual, ZeroPad
from shallower.tracing import IN_PLACE, OwnForward, Untraceable, trace_modes

# Exact types: a subclass may do more, as a BatchNorm with a fused activation does.
CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm}
AFFINE = {nn.Linear, *CONVOLUTIONS, *NORMS}
# They may hand on their very input, as dropout does in evaluation.
VIEWS = {nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten}
TRANSPARENT = {
    *(*VIEWS, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
}
# Of degree one: h(a x) = a h(x) for a > 0, so Euler's identity reaches through them.
HOMOGENEOUS = TRANSPARENT | {nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d}
LINEAR_MODULES = AFFINE | TRANSPARENT | {ChannelCopy, ZeroPad, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d}
SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
LINEAR_CALLS = {
    *(*SUMS, operator.getitem, operator.mul, torch.mul, torch.cat, torch.concat, F.pad, F.avg_pool2d),
    *("repeat", "contiguous", "clone", "mul"),
}
REWRITE = "write the block as `shallower.Residual(branch, skip, tail)`"


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
    overwrites: bool = False  # its own forward changes its input in place

    @property
    def path(self) -> str:
        """Where its module stands in the model."""
        return self.name

    def prunable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that only the branch uses: those that leave when the block is removed."""
        kept = {id(p) for part in (self.head, self.skip, self.tail) for p in used(module, part).values()}
        return {n: p for n, p in used(module, self.branch).items() if id(p) not in kept}

    def bypass(self, module: nn.Module, *, alias: bool = True) -> nn.Module:
        """What stays when the branch is gone: tail(skip(head(z))), over the very same children.

        It may hand on its very input, unless `alias` is false because somebody works on one of them in place.
        """
        graph = without_identities(module, chain(self.head, self.skip, self.tail))
        if not alias:
            append_copy(graph)
        if is_identity(graph):
            return nn.Identity()
        return fx.GraphModule(module, graph, class_name=f"Bypass{type(module).__name__}")


def split(module: nn.Module, *, name: str = "") -> Block:
    """Split one residual module by (1), or raise `NotResidual` with the reason and what to do."""
    if any(is_lazy(p) for p in module.parameters()):
        raise NotResidual("it has uninitialised lazy parameters; run one batch through the model first")
    graph = _trace(module)
    source, *others = (node for node in graph.nodes if node.op == "placeholder")
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    depends = dependents(graph, source)
    near = any(_is_sum(node, depends) for node in graph.nodes)
    if not isinstance(value, fx.Node):
        raise NotResidual("it returns something other than one tensor; return the sum itself", near=near)
    _check_in_place(module, graph, value, near)
    total = _last_sum(graph, source, value, depends)
    skip, branch, start = _operands(module, graph, total, depends)
    if overwritten(module, total) is source:  # whoever else holds the input would see the change, or not
        raise NotResidual("its sum overwrites its input in place; write `x = x + branch`")
    if ancestors(value) & set(others):
        raise NotResidual(f"its forward reads more than one input ({others[0].target}); {REWRITE}")
    _check_shared(module, graph, {source, start}, total)
    tail = ancestors(value, stop=total) - {total}
    return Block(
        name=name,
        head=extract(graph, source, start),
        branch=extract(graph, start, branch),
        skip=extract(graph, start, skip),
        # A tail that overwrites the sum must not overwrite the block's input when only the skip is left.
        tail=extract(graph, total, value, copy=any(overwritten(module, node) for node in tail)),
        overwrites=any(overwritten(module, node) is source for node in graph.nodes),
    )


def _trace(module: nn.Module) -> fx.Graph:
    """The graph of `forward`; it must not depend on `self.training`, which tracing would freeze."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    if not arguments:
        raise NotResidual("its forward has no input", near=False)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if required := [p.name for p in arguments[1:] if p.default is p.empty and p.kind not in variadic]:
        raise NotResidual(f"its forward needs more than one input ({', '.join(required)}); {REWRITE}")
    try:
        train, evaluate = trace_modes(module, OwnForward)
    except Untraceable as no:
        raise NotResidual(f"{no}; {REWRITE}") from no
    if train.python_code("self").src != evaluate.python_code("self").src:
        raise NotResidual(
            "its forward depends on `self.training`, which tracing would freeze; "
            "use modules that know their mode, such as `nn.Dropout` for `F.dropout`"
        )
    for graph_sum in [node for node in train.nodes if node.kwargs.get("alpha", 1) != 1]:
        write_out_alpha(train, graph_sum)
    return train


def write_out_alpha(graph: fx.Graph, node: fx.Node) -> None:
    """a + alpha * b, as a sum and a product."""
    if node.target in SUMS and len(both := terms(node)) == 2:
        with graph.inserting_before(node):
            scaled = graph.call_function(operator.mul, (both[1], node.kwargs["alpha"]))
        node.args, node.kwargs = (both[0], scaled), {}


def terms(node: fx.Node) -> list[Any]:
    return [*node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs)]


def _is_sum(node: fx.Node, depends: set[fx.Node]) -> bool:
    return (
        node.op in ("call_function", "call_method")
        and node.target in SUMS
        and len(terms(node)) == 2
        and all(isinstance(term, fx.Node) and term in depends for term in terms(node))
    )


def _last_sum(graph: fx.Graph, source: fx.Node, value: fx.Node, depends: set[fx.Node]) -> fx.Node:
    """The last sum that every path from the input to the output goes through."""
    sums = [node for node in graph.nodes if _is_sum(node, depends) and node in ancestors(value)]
    if not sums:
        raise NotResidual("it computes no sum of two functions of its input", near=False)
    through = [node for node in sums if source not in ancestors(value, stop=node)]
    if not through:
        raise NotResidual(f"its output depends on more than its last sum; {REWRITE}")
    return through[-1]


def _operands(
    module: nn.Module, graph: fx.Graph, total: fx.Node, depends: set[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Which operand of the sum is the skip, which the branch, and the value where both start."""
    left, right = terms(total)
    behind = {node: ancestors(node) & depends for node in (left, right)}
    shared = behind[left] & behind[right]
    fork = {n for n in shared if n in (left, right) or any(u in depends - shared for u in n.users)}
    fork = {n for n in fork if n in (left, right) or any(u in behind[left] | behind[right] for u in n.users)}
    if len(fork) != 1 or left is right:
        raise NotResidual(f"its skip and its branch share more than their input; {REWRITE}")
    (start,) = fork
    if any(_is_sum(node, depends) for node in ancestors(start)):
        raise NotResidual(
            "it computes two residual sums, one after the other; give each a module of its own: "
            "`nn.Sequential(shallower.Residual(first), shallower.Residual(second))`"
        )
    skip = which_is_skip(module, graph, left, right, start)
    if skip is not start and holds(skip, start):
        raise NotResidual(f"it adds more than one branch to its input; {REWRITE}, each in one of its own")
    return skip, right if skip is left else left, start


def holds(node: fx.Node, start: fx.Node) -> bool:
    """Whether a value is `start` itself with something added to it, or nothing."""
    if node is start:
        return True
    is_sum = node.op in ("call_function", "call_method") and node.target in SUMS
    return is_sum and any(isinstance(term, fx.Node) and holds(term, start) for term in terms(node))


def which_is_skip(
    module: nn.Module, graph: fx.Graph, left: fx.Node, right: fx.Node, start: fx.Node
) -> fx.Node:
    """The skip is the input itself, or what was added to it before; else what has no parameters; else what
    is linear; else the smaller, if it is one layer or both are linear."""
    if start in (left, right):
        return start
    if holds(left, start) != holds(right, start):
        return left if holds(left, start) else right
    if type(module).forward is Residual.forward:  # its author has told
        return left
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
    layers = [sum(p.ndim > 1 for p in used(module, parts[node]).values()) for node in by_size]
    if layers[0] == 1 < layers[1] and sizes[by_size[0]] < sizes[by_size[1]]:
        return by_size[0]
    raise NotResidual(
        f"it cannot be told which operand of its sum is the skip ({left} or {right}); {REWRITE}"
    )


def _is_linear(module: nn.Module, part: fx.Graph) -> bool:
    for node in part.nodes:
        if node.op == "call_module" and not _is_linear_module(module.get_submodule(str(node.target))):
            return False
        if node.op in ("call_function", "call_method") and node.target not in LINEAR_CALLS:
            return False
    return True


def _is_linear_module(module: nn.Module) -> bool:
    if is_sequential(module):
        return all(map(_is_linear_module, module.children()))
    return type(module) in LINEAR_MODULES


# -- operations in place ------------------------------------------------------------------------------


def overwritten(module: nn.Module, node: fx.Node) -> fx.Node | None:
    """The value that `node` overwrites, if it works in place."""
    if node.op == "call_module":
        changes = (
            leaf for leaf in _leaves(module.get_submodule(str(node.target))) if type(leaf) not in VIEWS
        )
        in_place = bool(getattr(next(changes, None), "inplace", False))
    elif node.op == "call_method":
        in_place = str(node.target).endswith("_") and not str(node.target).endswith("__")
    elif node.op == "call_function":
        named = getattr(node.target, "__name__", "")
        in_place = named.endswith("_") or node.target in IN_PLACE or node.kwargs.get("inplace") is True
    else:
        return None
    return node.all_input_nodes[0] if in_place and node.all_input_nodes else None


def _check_in_place(module: nn.Module, graph: fx.Graph, value: fx.Node, near: bool) -> None:
    """What is overwritten must be read under its new name: a graph does not know of the old one's change."""
    needed, seen = ancestors(value), set()
    for node in graph.nodes:
        seen.add(node)
        old = overwritten(module, node)
        if old is not None and (node not in needed or not seen.issuperset(old.users)):
            reason = f"{node} overwrites {old} in place, which is read later; write it out of place"
            raise NotResidual(reason, near=near)


def _check_shared(module: nn.Module, graph: fx.Graph, shared: set[fx.Node], total: fx.Node) -> None:
    """Skip and branch run in any order, so neither may overwrite what both read."""
    for node in graph.nodes:
        old = overwritten(module, node)
        if old in shared and len(old.users) > 1 and node is not total:
            raise NotResidual(
                f"{node} overwrites in place a value that its skip also reads; write it out of place"
            )


# -- what a branch ends in -----------------------------------------------------------------------------


Owned = tuple[nn.Module, str, nn.Parameter]  # a parameter, the module that has it, and its name there


def linear_parameters(module: nn.Module, block: Block) -> list[Owned]:
    """The parameters of the affine map that the branch ends in, for Euler's identity; or none.

    Dropout, pooling and ReLU may follow the map: what does is homogeneous of degree one, so the output is so
    in the map's parameters. An empty list means that it is not plain from the types.
    """
    parts = (block.head, block.branch, block.skip, block.tail)
    return last_affine_parameters(module, block.branch, *parts)


def last_affine_parameters(module: nn.Module, branch: fx.Graph, *parts: fx.Graph) -> list[Owned]:
    """The same for a branch of a module that consists of `parts`."""
    leaf = _last_affine(module, branch)
    return [] if leaf is None else _once(module, parts, leaf)


def _last_affine(module: nn.Module, graph: fx.Graph) -> nn.Module | None:
    """The affine layer that `graph` over `module` ends in, but for what is homogeneous."""
    value = next(node for node in graph.nodes if node.op == "output").args[0]
    while isinstance(value, fx.Node) and value.op == "call_module":
        for leaf in reversed(list(_leaves(module.get_submodule(str(value.target))))):
            if type(leaf) in AFFINE:
                return leaf
            if type(leaf) not in HOMOGENEOUS:
                alone = len(value.args) == 1 and not value.kwargs  # it is looked at with its defaults
                return _last_affine_inside(leaf) if alone else None
        value = value.all_input_nodes[0]
    return None


def _last_affine_inside(module: nn.Module) -> nn.Module | None:
    """The same for a module of its author's own, as attention is one, if its forward can be followed."""
    if not any(type(child) in AFFINE for child in module.modules()):
        return None
    try:
        graph, _ = trace_modes(module, OwnForward)
    except Untraceable:
        return None
    leaf = _last_affine(module, graph)
    used = [id(p) for _, p in uses(module, graph)]
    once = leaf is not None and all(used.count(id(p)) == 1 for p in leaf.parameters())
    return leaf if once else None


def _once(module: nn.Module, parts: Sequence[fx.Graph], leaf: nn.Module) -> list[Owned]:
    """The weight and bias of `leaf`, if it has nothing else and the module uses them in one place."""
    times = [id(p) for part in parts for _, p in uses(module, part)]
    owned = [(leaf, name, p) for name, p in leaf.named_parameters()]
    plain = all(name in ("weight", "bias") and times.count(id(p)) == 1 for _, name, p in owned)
    return owned if plain else []


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential) and is_sequential(module):
        for child in module:  # not children(), which leaves out a repetition
            yield from _leaves(child)
    else:
        yield module
