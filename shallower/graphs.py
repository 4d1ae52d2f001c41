"""torch.fx graphs as parts of a module: cut out, chained, and run over the module's own children."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, fx, nn


def dependents(graph: fx.Graph, source: fx.Node) -> set[fx.Node]:
    found = {source}
    for node in graph.nodes:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(node: fx.Node, *, stop: fx.Node | None = None) -> set[fx.Node]:
    found, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current is not stop:
            fresh = [n for n in current.all_input_nodes if n not in found]
            found.update(fresh)
            pending.extend(fresh)
    return found


def extract(graph: fx.Graph, start: fx.Node, end: fx.Node, *, copy: bool = False) -> fx.Graph:
    """The part of `graph` that computes `end` from `start`, or from a copy, as a graph of one input `z`."""
    part = fx.Graph()
    z = part.placeholder("z")
    mapped = {start: part.call_method("clone", (z,)) if copy else z}
    needed = ancestors(end, stop=start)
    for node in graph.nodes:
        if node in needed and node not in mapped:
            mapped[node] = part.node_copy(node, mapped.__getitem__)
    part.output(mapped[end])
    return part


def chain(*parts: fx.Graph) -> fx.Graph:
    """One graph that applies `parts` one after the other."""
    whole = fx.Graph()
    value: Any = whole.placeholder("z")
    for part in parts:
        (source,) = (node for node in part.nodes if node.op == "placeholder")
        value = whole.graph_copy(part, {source: value})
    whole.output(value)
    return whole


def is_identity(part: fx.Graph) -> bool:
    return all(node.op in ("placeholder", "output") for node in part.nodes)


def without_identities(module: nn.Module, part: fx.Graph) -> fx.Graph:
    """`part` less the calls of `nn.Identity` and of empty `nn.Sequential`s."""
    for node in list(part.nodes):
        child = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(child, nn.Identity) or (type(child) is nn.Sequential and len(child) == 0):
            node.replace_all_uses_with(node.args[0])
            part.erase_node(node)
    return part


def compiled(part: fx.Graph) -> Callable[[nn.Module, Tensor], Tensor]:
    """`part` as a function of the module and its input.

    The children are looked up in the module at every call, so one that is exchanged later counts.
    """
    code = part.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<shallower block>", "exec"), scope)
    return scope["forward"]


def targets(part: fx.Graph) -> Iterator[str]:
    """The names of the children and parameters that `part` uses."""
    return (str(node.target) for node in part.nodes if node.op in ("call_module", "get_attr"))


def used(module: nn.Module, part: fx.Graph) -> dict[str, nn.Parameter]:
    """The parameters of `module` that `part` uses, by name."""
    names = set(targets(part))
    return {n: p for n, p in module.named_parameters() if any(n == t or n.startswith(f"{t}.") for t in names)}


def used_modules(module: nn.Module, part: fx.Graph) -> Iterable[nn.Module]:
    """The modules, at every depth, that `part` runs."""
    called = [str(node.target) for node in part.nodes if node.op == "call_module"]
    return {m: None for name in called for m in module.get_submodule(name).modules()}


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` at `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
