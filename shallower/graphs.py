"""torch.fx graphs as parts of a module: traced, cut out, chained, and run over the module's own children."""

import copy
import inspect
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}

GONE = "shallower_gone"  # an attribute: the parameters that a pruned module has lost, which its forward names
MIXIN = "_shallower_mixin"  # of the classes that come before an author's own

# -- tracing ------------------------------------------------------------------------------------------


class Untraceable(ValueError):
    """Why torch.fx cannot follow a module's forward, or would freeze what changes from call to call."""


class _Proxy(fx.Proxy):
    """Also tells `x += y` from `x = x + y`, which torch.fx takes for the same."""


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda x, y: x.tracer.create_proxy("call_function", function, (x, y), {})


for _function in IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _in_place(_function))


class OwnForward(fx.Tracer):
    """Traces a module's own `forward`; every child is one opaque call."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_modes(
    module: nn.Module, tracer: Callable[[], fx.Tracer], *, forward: Callable[..., Any] | None = None
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
            with _without_dice(), _without_switches():
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

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Untraceable(
            "its forward switches gradients or autocast, or asks for them, which tracing would lose"
        )

    places: list[tuple[Any, str]] = [
        *((torch, n) for n in ("is_grad_enabled", "set_grad_enabled", "is_autocast_enabled")),
        *((kind, "__enter__") for kind in (torch.autocast, torch.inference_mode)),
    ]
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, refuse)
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


@contextmanager
def _without_dice() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        now = np.random.get_state(legacy=False)
        drawn = not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()
        drawn = drawn or repr(now) != repr(before[2])
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
    if drawn:
        raise Untraceable("its forward draws random numbers, which tracing would freeze")


# -- parts --------------------------------------------------------------------------------------------


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


@contextmanager
def frozen_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Batch statistics are used as in training, but running ones and all other buffers stay as they were."""
    modules = list(modules)
    norms = [m for m in modules if isinstance(m, _NormBase) and m.track_running_stats and m.training]
    buffers = [
        b for m in modules if not isinstance(m, _NormBase) for b in m._buffers.values() if b is not None
    ]
    before, versions = [b.clone() for b in buffers], list(map(_version, buffers))
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
        for buffer, old, version in zip(buffers, before, versions, strict=True):
            if (
                version is None or _version(buffer) != version
            ):  # to write it is seen by autograd, if somebody else has saved it
                buffer.copy_(old)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; inference tensors do not count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def same_dice(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn here are drawn again afterwards; with a seed, they are the same every time."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng([d.index for d in devices], device_type=kind):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def no_fast_path() -> Iterator[None]:
    """PyTorch's own encoders compute what their layers say, and not in one operator of their own."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All of `model` in one mode for a while, with its running statistics frozen."""
    modes = {m: m.training for m in model.modules()}
    model.train(training)
    try:
        with frozen_statistics(model.modules()):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def copied(values: Any) -> Any:
    """Arguments as they were given: tensors themselves, everything else copied, with the tensors inside."""
    if isinstance(values, Tensor):
        return values
    if type(values) in (tuple, list):
        return type(values)(map(copied, values))
    if type(values) is dict:
        return {key: copied(value) for key, value in values.items()}
    inside: dict[int, Any] = {}
    _collect(values, inside)
    # PyTorch does not copy what has a history, as keys and values in a cache have in training.
    return copy.deepcopy(
        values, {key: v.detach().clone() for key, v in inside.items() if isinstance(v, Tensor)}
    )


def _collect(value: Any, found: dict[int, Any]) -> None:
    """All that is held by a value, by its identity."""
    if id(value) in found or isinstance(value, nn.Module | type):
        return
    found[id(value)] = value
    if isinstance(value, Tensor):
        return
    if isinstance(value, dict):
        parts = list(value.values())
    else:
        parts = list(value) if isinstance(value, list | tuple | set) else []
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        _collect(part, found)
