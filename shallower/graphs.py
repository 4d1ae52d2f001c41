"""Parts of a module as torch.fx graphs: cut out, chained, and run over the module's own children."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
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


def append_copy(part: fx.Graph) -> None:
    """Let `part` return memory of its own."""
    output = next(node for node in part.nodes if node.op == "output")
    with part.inserting_before(output):
        output.args = (part.call_function(torch.clone, (output.args[0],)),)


def without_identities(module: nn.Module, part: fx.Graph) -> fx.Graph:
    """`part` less the calls of `nn.Identity` and of empty `nn.Sequential`s."""
    for node in list(part.nodes):
        child = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(child) is nn.Identity or (type(child) is nn.Sequential and len(child) == 0):
            node.replace_all_uses_with(node.all_input_nodes[0])
            part.erase_node(node)
    return part


def compiled(part: fx.Graph) -> Callable[[nn.Module, Tensor], Tensor]:
    """`part` as a function of the module and its input.

    The children are looked up in the module at every call, so one that is exchanged later counts.
    """
    for node in part.nodes:
        if node.name == "self":  # after a child of that name, as BERT's attention has one
            node.name = "self_"
    code = part.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<shallower block>", "exec"), scope)
    return scope["forward"]


def source(part: fx.Graph) -> str:
    """What `part` computes, as text."""
    return part.python_code("self").src


def uses(module: nn.Module, part: fx.Graph) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `module` that `part` uses, as often as it uses them."""
    return used_by(module, part.nodes)


def used_by(module: nn.Module, nodes: Iterable[fx.Node]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `module` that `nodes` use, as often as they use them."""
    everything = list(module.named_parameters(remove_duplicate=False))
    names = [str(node.target) for node in nodes if node.op in ("call_module", "get_attr")]
    return [(n, p) for t in names for n, p in everything if n == t or n.startswith(f"{t}.")]


def used(module: nn.Module, part: fx.Graph) -> dict[str, nn.Parameter]:
    """The parameters of `module` that `part` uses, by name; each once, though it have two names."""
    once: dict[nn.Parameter, str] = {}
    for name, parameter in uses(module, part):
        once.setdefault(parameter, name)
    return {name: parameter for parameter, name in once.items()}


def used_modules(module: nn.Module, part: fx.Graph) -> Iterable[nn.Module]:
    """The modules, at every depth, that `part` runs."""
    called = [str(node.target) for node in part.nodes if node.op == "call_module"]
    return {m: None for name in called for m in module.get_submodule(name).modules()}


def is_sequential(module: nn.Module) -> bool:
    """Whether `module` runs its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def husk(module: nn.Module | None) -> nn.Module:
    """Nothing in the place of a module, but what others may read of it: its plain attributes, and of its
    parameters all but the values, as in `self.norm.weight.dtype`."""
    empty = nn.Identity()
    if module is not None:
        plain = {k: v for k, v in vars(module).items() if type(v) in (bool, int, float, str)}
        tensors = {k: _no_values(p) for k, p in module._parameters.items() if p is not None}
        # Outside of the tree of modules: nothing of this is a parameter or a child.
        vars(empty).update(plain, **tensors, **{k: husk(m) for k, m in module._modules.items()})
    return empty


def _no_values(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` at `name`, in the mode of what stood there."""
    modes = {path: m.training for path, m in model.get_submodule(name).named_modules()}
    for path, m in module.named_modules():  # torch.fx makes containers anew
        m.training = modes.get(path, m.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
