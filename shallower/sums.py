"""The residual sums in one module's forward, however many, whatever else it reads and returns.

    x = x + attention(norm1(x), mask)                 total = skip + branch
    x = x + mlp(norm2(x))

A forward is traced as it is called: tensors (and whatever else is not a plain constant) are inputs of the
graph, plain constants are part of it. What only the branch of a sum needs is its *region*: it runs if the
gate is open, and leaves the network if the sum is pruned.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from shallower.graphs import ancestors, dependents, used_by
from shallower.split import SUMS, NotResidual, overwritten, terms, which_is_skip

_METHODS = (
    *(
        "view",
        "view_as",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "t",
        "squeeze",
        "unsqueeze",
    ),
    *(
        "expand",
        "expand_as",
        "narrow",
        "select",
        "chunk",
        "split",
        "unbind",
        "detach",
        "contiguous",
        "to",
        "T",
    ),
)
VIEWS = {operator.getitem, getattr, *_METHODS, *(getattr(torch, m) for m in _METHODS if hasattr(torch, m))}


# -- its sums -----------------------------------------------------------------------------------------


@dataclass
class Sum:
    """total = skip + branch in a graph; what only the branch needs, and what it reads from outside."""

    total: fx.Node
    skip: fx.Node
    branch: fx.Node
    region: list[fx.Node]
    reads: list[fx.Node]
    sides: dict[fx.Node, Any] = field(default_factory=dict)  # beside the branch, as attention weights
    touched: bool = False  # somebody works on the total in place

    def targets(self) -> list[str]:
        """The children and parameters in the region."""
        return [str(n.target) for n in self.region if n.op in ("call_module", "get_attr")]


def residual_sums(
    module: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any]
) -> dict[int, Sum | NotResidual]:
    """Every residual sum, or why one cannot be gated, by its number among all sums of two values.

    `values` are what the nodes computed on an example, for those that stand beside a branch.
    """
    found: dict[int, Sum | NotResidual] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(_all_sums(graph)):
        try:
            left, right = terms(node)
            skip, branch = _skip_and_branch(module, graph, left, right, inputs)
            found[index] = _sum(module, graph, node, skip, branch, inputs, values)
        except _NoSkip:
            if joins_inputs(node):
                found[index] = NotResidual(
                    "it adds one of its inputs to what it makes of another; its sum is a block of the module "
                    "that calls it, or of none"
                )
        except NotResidual as no:
            found[index] = no
    return found


@dataclass(frozen=True)
class Mark:
    """By what a sum is known again when the module is called in another way, or has lost other sums."""

    left: bool  # the skip is the first operand
    targets: tuple[str, ...]  # the children and parameters in its region


def marked_sums(
    module: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any], marks: Mapping[int, Mark]
) -> dict[int, Sum]:
    """The sums of a graph that have these marks; what is found twice, or not at all, is left out."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found: dict[int, list[Sum]] = {key: [] for key in marks}
    for node in _all_sums(graph):
        for key, mark in marks.items():
            skip, branch = terms(node) if mark.left else terms(node)[::-1]
            try:
                one = _sum(module, graph, node, skip, branch, inputs, values)
            except NotResidual:
                continue
            if tuple(one.targets()) == mark.targets:
                found[key].append(one)
    return {key: sums[0] for key, sums in found.items() if len(sums) == 1}


def _all_sums(graph: fx.Graph) -> list[fx.Node]:
    needed = ancestors(next(node for node in graph.nodes if node.op == "output"))
    return [node for node in graph.nodes if node in needed and adds_two(node)]


def joins_inputs(node: fx.Node) -> bool:
    """Whether a sum adds an input to what does not depend on it, but on another."""
    for one, other in (terms(node), terms(node)[::-1]):
        if one.op == "placeholder" and one not in ancestors(other):
            return any(n.op == "placeholder" for n in ancestors(other))
    return False


class _NoSkip(ValueError):
    """A sum of two things, neither of which is a skip around the other."""


def adds_two(node: fx.Node) -> bool:
    operands = terms(node) if node.op in ("call_function", "call_method") and node.target in SUMS else []
    return len(operands) == 2 and all(isinstance(term, fx.Node) for term in operands)


def _sum(
    module: nn.Module,
    graph: fx.Graph,
    total: fx.Node,
    skip: fx.Node,
    branch: fx.Node,
    inputs: list[fx.Node],
    values: Mapping[fx.Node, Any],
) -> Sum:
    region, sides = _region(graph, total, skip, branch, values, inputs)
    if branch not in region:
        raise NotResidual("what it adds is used elsewhere, too")
    _check_taken_apart(region)
    reads = [n for n in graph.nodes if n not in region and any(user in region for user in n.users)]
    reads = [n for n in reads if n.op != "get_attr"]
    _check_places(module, graph, total, skip, region)
    touched = any(overwritten(module, user) is total for user in total.users)
    return Sum(total, skip, branch, [n for n in graph.nodes if n in region], reads, sides, touched)


def _check_taken_apart(region: set[fx.Node]) -> None:
    """A child that returns the branch and something else that is needed would stay, for that alone."""
    for node in region:
        child = node.args[0] if node.target is operator.getitem else None
        if isinstance(child, fx.Node) and child.op == "call_module" and child not in region:
            raise NotResidual(
                f"{child.target} returns more than the branch, such as attention weights, and it is needed "
                "elsewhere; let the model ask for nothing else of it"
            )


def _skip_and_branch(
    module: nn.Module, graph: fx.Graph, left: fx.Node, right: fx.Node, inputs: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    if left is right:
        raise _NoSkip
    pairs = ((left, right), (right, left))
    behind = {node: _values_behind(node) for node in (left, right)}
    if not all(any(n.op == "placeholder" for n in values) for values in behind.values()):
        raise _NoSkip  # it knows its inputs by their sizes alone, as a table of positions does
    for skip, branch in pairs:
        if skip in ancestors(branch) and skip.op != "get_attr":
            return skip, branch
    # x + attention(x) + mlp(x): what a branch starts from, with another branch added to it before.
    over = [(one, other) for one, other in pairs if adds_two(one) and _bases(one) & behind[other]]
    if len(over) == 1:
        return over[0]
    starts = [n for n in inputs if n in ancestors(left) and n in ancestors(right)]
    if not starts:
        raise _NoSkip
    depends = dependents(graph, starts[0])
    shared = ancestors(left) & ancestors(right) & depends
    fork = [n for n in graph.nodes if n in shared and any(u not in shared for u in n.users)]
    if len(fork) != 1:
        raise _NoSkip
    skip = which_is_skip(module, graph, left, right, fork[0])
    return skip, right if skip is left else left


def _values_behind(node: fx.Node) -> set[fx.Node]:
    """What a value is computed from; not that of which it knows the size alone."""
    found, pending = {node}, [node]
    while pending:
        current = pending.pop()
        asks = current.target is getattr and current.args[1] in ("shape", "dtype", "device", "ndim")
        if asks or (current.op == "call_method" and current.target in ("size", "dim", "numel")):
            continue
        fresh = [n for n in current.all_input_nodes if n not in found]
        found.update(fresh)
        pending.extend(fresh)
    return found


def _bases(node: fx.Node) -> set[fx.Node]:
    """The values to which a sum, or a sum of sums, adds the others."""
    if not adds_two(node):
        return {node} if node.op != "get_attr" else set()
    return set().union(*(_bases(term) for term in terms(node)))


def _region(
    graph: fx.Graph,
    total: fx.Node,
    skip: fx.Node,
    branch: fx.Node,
    values: Mapping[fx.Node, Any],
    inputs: list[fx.Node],
) -> tuple[set[fx.Node], dict[fx.Node, Any]]:
    """What only the branch needs. Elements beside it may be None, or what the module was given."""
    above = ancestors(branch) - ancestors(skip)
    region: set[fx.Node] = set()
    sides: dict[fx.Node, Any] = {}
    for node in reversed(list(graph.nodes)):
        if node not in above or node.op == "placeholder":
            continue
        others = [user for user in node.users if user not in region and user is not total]
        stand_ins = {user: _stand_in(user, values, inputs) for user in others}
        if all(value is not _UNKNOWN for value in stand_ins.values()):
            region.add(node)
            sides |= stand_ins
    return region, sides


_UNKNOWN = object()


def _stand_in(node: fx.Node, values: Mapping[fx.Node, Any], inputs: list[fx.Node]) -> Any:
    """What an element beside a branch is without it: None, or one of the inputs."""
    if node.target is not operator.getitem or node not in values:
        return _UNKNOWN
    if values[node] is None:
        return None
    return next((i for i in inputs if values[i] is values[node]), _UNKNOWN)


def _check_places(
    module: nn.Module, graph: fx.Graph, total: fx.Node, skip: fx.Node, region: set[fx.Node]
) -> None:
    """The region moves to its sum, so nothing that it reads may be overwritten on the way, nor by itself."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        old = overwritten(module, node)
        if old is None:
            continue
        if node is total and old is skip and skip.op == "placeholder":
            raise NotResidual("its sum overwrites its input in place; write `x = x + branch`")
        if old.target in VIEWS:
            raise NotResidual(f"{node} overwrites {old}, a view of another value; write it out of place")
        reads = any(user in region for user in old.users)
        late = any(order[user] > order[node] for user in old.users)
        if node is total:
            wrong = old is skip and len(old.users) > 1
        else:
            wrong = late or (reads and old not in region)
        if wrong:
            reason = f"{node} overwrites {old} in place, which is read elsewhere; write it out of place"
            raise NotResidual(reason)


# -- on an example ------------------------------------------------------------------------------------


class Recorder(fx.Interpreter):
    """Runs a graph over a module; keeps what its inputs and elements of tuples are, and all shapes."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.values: dict[fx.Node, Any] = {}
        self.shapes: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = [v for v in map(self.env.get, n.all_input_nodes) if isinstance(v, Tensor)]
        before = [tensor._version for tensor in given]
        value = super().run_node(n)
        written = n.op == "call_module" and before != [tensor._version for tensor in given]
        if written and isinstance(self.module, nn.Module) and overwritten(self.module, n) is None:
            raise NotResidual(f"{n.target} works in place on what it is given; write it out of place")
        if n.op == "placeholder" or n.target is operator.getitem:
            self.values[n] = value
        self.shapes[n] = getattr(value, "shape", None)
        return value


def only_in(module: nn.Module, graph: fx.Graph, region: Sequence[fx.Node]) -> dict[str, nn.Parameter]:
    """The parameters that the region uses and nothing else does, by name."""
    inside, outside = [n for n in graph.nodes if n in region], [n for n in graph.nodes if n not in region]
    kept = {id(p) for _, p in used_by(module, outside)}
    once: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in used_by(module, inside):
        if id(parameter) not in kept:
            once.setdefault(id(parameter), (name, parameter))
    return dict(once.values())
