"""The forward of a module, written anew: every gated sum a call of its gate, every pruned one its skip."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from shallower.graphs import compiled
from shallower.sums import Sum
from shallower.tracing import held_numbers

WEAVE = "shallower_weave"  # where a module keeps its gates
Side = tuple[str, int, str | None]  # a child, an element of what it returns, and the input that this is


@dataclass
class Pattern:
    """A forward for one way of being called: the function, its sums, and the branches of the gated ones."""

    main: Callable[..., Any]
    written: fx.Graph  # what `main` computes
    graph: fx.Graph  # what the author's forward computes
    sums: dict[int, Sum]
    graphs: dict[int, fx.Graph]
    branches: dict[int, Callable[..., Tensor]]


def write(graph: fx.Graph, sums: dict[int, Sum], removed: set[int], copied: set[int]) -> Pattern:
    graphs = {index: _branch(graph, found) for index, found in sums.items() if index not in removed}
    written = _main(graph, sums, removed, copied)
    branches = {index: compiled(part) for index, part in graphs.items()}
    return Pattern(compiled(written), written, graph, sums, graphs, branches)


def _main(graph: fx.Graph, sums: dict[int, Sum], removed: set[int], copied: set[int]) -> fx.Graph:
    main = fx.Graph()
    me = main.placeholder("module_")
    new: dict[fx.Node, Any] = {}
    totals = {found.total: index for index, found in sums.items()}
    inside = {node for found in sums.values() for node in found.region}
    sides = {node: value for found in sums.values() for node, value in found.sides.items()}

    assert not inside & totals.keys(), "one sum is inside of another's branch"

    def total(index: int, found: Sum) -> fx.Node:
        skip = new[found.skip]
        if index not in removed:
            return main.call_function(at_gate, (me, index, skip, *(new[n] for n in found.reads)))
        return main.call_method("clone", (skip,)) if found.touched or index in copied else skip

    for node in graph.nodes:
        if node in sides:
            new[node] = None if sides[node] is None else new[sides[node]]
        elif node in totals:
            new[node] = total(totals[node], sums[totals[node]])
        elif node not in inside:
            new[node] = main.node_copy(node, new.__getitem__)
    return main


def _branch(graph: fx.Graph, found: Sum) -> fx.Graph:
    part = fx.Graph()
    new = {node: part.placeholder(f"read_{i}") for i, node in enumerate(found.reads)}
    for node in graph.nodes:
        if node in found.region or (node.op == "get_attr" and any(u in found.region for u in node.users)):
            new[node] = part.node_copy(node, new.__getitem__)
    part.output(new[found.branch])
    return part


def at_gate(module: nn.Module, index: int, skip: Tensor, *reads: Any) -> Tensor:
    """In the new forward of a module: the total of the `index`-th sum."""
    total: Tensor = module.__dict__[WEAVE].gates[index].sum(skip, *reads)
    return total


def constants(module: nn.Module, opened: Iterable[type]) -> tuple[Any, ...]:
    """The plain values of a module and of its opened children, which tracing writes into its forward."""
    kinds = tuple(opened)
    owners = (module, *(m for m in module.modules() if type(m) in kinds)) if kinds else (module,)
    return tuple(item for m in owners for item in held_numbers(m).items())


def known_values(graph: fx.Graph, sides: Sequence[Side]) -> dict[fx.Node, Any]:
    """What stands beside branches, by what `sides` says of it."""
    inputs = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    known = {(child, element): name for child, element, name in sides}
    values: dict[fx.Node, Any] = {node: node for node in inputs.values()}
    for node in graph.nodes:
        place = element_of_child(node)
        if place in known:
            name = known[place]
            values[node] = None if name is None else inputs[name]
    return values


def element_of_child(node: fx.Node) -> tuple[str, int] | None:
    """Of which child a value is which element, if it is one."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    return (str(node.args[0].target), node.args[1]) if isinstance(node.args[1], int) else None
