"""Find the residual sums in a model's modules, each looked at as the model calls it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shallower.aside import copied, in_mode, no_fast_path, same_dice
from shallower.calls import Call, arrange, default_call, trace_call
from shallower.graphs import ancestors
from shallower.rewrite import Side, element_of_child, known_values
from shallower.split import NotResidual, overwritten, terms
from shallower.sums import (
    Mark,
    Recorder,
    Sum,
    adds_two,
    joins_inputs,
    marked_sums,
    only_in,
    residual_sums,
)
from shallower.tracing import Untraceable, author
from shallower.verify import fault
from shallower.weave import Strand

NESTED = ("its branch holds blocks of its own", "its branch holds another sum that is a block")


@dataclass
class Called:
    """One call of a module on the example."""

    call: Call
    values: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plain(self, module: nn.Module) -> bool:
        """Whether it was called with one tensor, and every other argument at its default."""
        _, *parameters = inspect.signature(author(module).forward).parameters.values()
        given = {p.name: p.default for p in parameters}
        as_default = all(
            name in given and repr(given[name]) == repr(value)
            for name, value in self.call.constants().items()
        )
        return as_default and len(self.values) == 1 and isinstance(self.values[0], Tensor)


def run_example(model: nn.Module, example: Any) -> Any:
    """`model` on a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def record_calls(model: nn.Module, example: Any) -> dict[str, Called]:
    """How the model calls its modules on `example`, which runs once, in evaluation; nothing is learned."""
    found: dict[str, Called] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            call, values = arrange(inspect.signature(author(module).forward), args, kwargs)
        except Untraceable:
            return
        if name not in found:
            found[name] = Called(call, _own(values), *_as_given(args, kwargs))

    handles = []
    for name, module in model.named_modules():
        hook = lambda m, args, kwargs, name=name: keep(name, m, args, kwargs)  # noqa: E731
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), in_mode(model, training=False), same_dice(model), no_fast_path():
            run_example(model, example)
    except Exception as error:  # whatever a model raises on what it cannot take
        raise ValueError(
            f"The model cannot be run on the example ({type(error).__name__}: {error}). Give a tensor, a "
            "tuple of arguments or a dict of keyword arguments that `model` takes, as your loop does."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def joins(model: nn.Module, calls: Mapping[str, Called] | None) -> frozenset[type]:
    """The classes that add one of their inputs to what they make of another, as BERT's output layers do.

    Their sum is a residual one in the module that calls them, so they are opened there.
    """
    found, seen = set(), set()
    for name, module in model.named_modules():
        cls = author(module)
        if cls in seen or cls.__module__.startswith("torch.") or (calls is not None and name not in calls):
            continue
        seen.add(cls)
        call = default_call(module) if calls is None else calls[name].call
        if len(call.live) < 2 or not any(True for _ in module.parameters()):
            continue
        try:
            graph = trace_call(module, call)[False]
        except Untraceable:
            continue
        if any(joins_inputs(node) for node in graph.nodes if adds_two(node)):
            found.add(cls)
    return frozenset(found)


def find_strands(
    path: str, module: nn.Module, called: Called | None, opened: frozenset[type], inner: Sequence[str]
) -> tuple[list[Strand], list[str]]:
    """The residual sums in the module's own forward that can be gated, and why others cannot; or
    `NotResidual` if there is none."""
    call = default_call(module) if called is None else called.call
    if not call.live:
        raise NotResidual("its forward has no input", near=False)
    try:
        graphs = trace_call(module, call, opened=set(opened))
    except Untraceable as no:
        raise NotResidual(str(no)) from no
    ran = None if called is None else _ran(module, graphs[False], called)
    found = residual_sums(module, graphs[False], {} if ran is None else ran.values)
    sums = {i: s for i, s in found.items() if isinstance(s, Sum) and _same_shape(s, ran)}
    sides = _sides(sums.values())
    marks = {i: Mark(s.skip is terms(s.total)[0], tuple(s.targets())) for i, s in sums.items()}
    twins = marked_sums(module, graphs[True], known_values(graphs[True], sides), marks)
    children = [p[len(path) + 1 if path else 0 :] for p in inner]
    strands, reasons = [], [str(s) for s in found.values() if isinstance(s, NotResidual)]
    taken: list[Sum] = []
    for index, each in sums.items():
        parameters = only_in(module, graphs[False], each.region)
        reason = _reason(each, graphs[False], parameters, children, taken, index in twins)
        if reason is not None:
            reasons.append(reason)
        if reason is not None or not parameters:
            continue
        taken.append(each)
        strands.append(
            Strand(
                name=_name(path, parameters),
                path=path,
                index=index,
                call=call,
                parameters=tuple(parameters),
                mark=marks[index],
                opened=opened,
                sides=sides,
                touched=each.touched,
                overwrites=any(_overwrites_input(module, node) for node in graphs[False].nodes),
            )
        )
    if not strands:
        raise NotResidual(
            reasons[0] if reasons else "it has no sum with a branch of its own", near=bool(reasons)
        )
    return _named(path, strands, alone=not inner and not reasons), [r for r in reasons if r not in NESTED]


def _reason(
    each: Sum,
    graph: fx.Graph,
    parameters: Iterable[str],
    children: Sequence[str],
    taken: Sequence[Sum],
    known: bool,
) -> str | None:
    """Why a sum is not taken, if it is not."""
    mine = each.targets()
    outside = [
        str(n.target) for n in graph.nodes if n not in each.region and n.op in ("call_module", "get_attr")
    ]
    if any(_overlap(child, target) for child in children for target in mine):
        return NESTED[0]
    if any(other.total in each.region for other in taken):
        return NESTED[1]
    owned = [t for t in mine if any(_overlap(t, name) for name in parameters)]
    if shared := [t for t in owned if any(_overlap(t, other) for other in outside)]:
        return f"its branch shares {shared[0]} with what stands outside of it"
    if not known:
        return "its sum is not the same in training and in evaluation"
    return None


def _ran(module: nn.Module, graph: fx.Graph, called: Called) -> Recorder:
    recorder = Recorder(module, graph)
    with by_itself():
        with torch.no_grad(), in_mode(module, training=False), same_dice(module):
            recorder.run(*_own(called.values))
        in_place = any(_overwrites_input(module, node) for node in graph.nodes)
        wrong = fault(module, _rerun(module, graph), (called.args, called.kwargs), may_write=in_place)
    if wrong is not None:
        raise NotResidual(wrong)
    return recorder


@contextmanager
def by_itself() -> Iterator[None]:
    """A module is run alone on what it was given in the example; if it cannot be, it is no block."""
    try:
        yield
    except NotResidual:
        raise
    except Exception as error:  # whatever a module may raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotResidual(f"it cannot be run by itself on the example ({reason})") from error


def _rerun(module: nn.Module, graph: fx.Graph) -> Callable[..., Any]:
    """What was traced, with the arguments of the module."""
    forward = inspect.signature(author(module).forward)
    return lambda *args, **kwargs: Recorder(module, graph).run(*arrange(forward, args, kwargs)[1])


def _same_shape(found: Sum, ran: Recorder | None) -> bool:
    """Whether the skip alone has the shape of the total; without an example, it must be where the branch
    starts."""
    if ran is None:
        return found.skip in ancestors(found.branch)
    return ran.shapes[found.skip] == ran.shapes[found.total] == ran.shapes[found.branch]


def _as_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return copied(args), copied(kwargs)


def _own(values: Sequence[Any]) -> list[Any]:
    """Caches and the like change when a module runs."""
    return [copied(value) for value in values]


def _sides(sums: Iterable[Sum]) -> tuple[Side, ...]:
    """What stands beside the branches, in a form that holds for other graphs of the same forward."""
    sides: list[Side] = []
    for each in sums:
        for node, value in each.sides.items():
            place = element_of_child(node)
            assert place is not None
            sides.append((*place, None if value is None else str(value.target)))
    return tuple(dict.fromkeys(sides))


def _overlap(one: str, other: str) -> bool:
    """Whether two paths are the same, or one is inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _overwrites_input(module: nn.Module, node: fx.Node) -> bool:
    old = overwritten(module, node)
    return old is not None and old.op == "placeholder"


def _name(path: str, parameters: Mapping[str, nn.Parameter]) -> str:
    """After the child with most of the branch's parameters."""
    sizes: dict[str, int] = {}
    for name, parameter in parameters.items():
        child = name.partition(".")[0]
        sizes[child] = sizes.get(child, 0) + parameter.numel()
    child = max(sizes, key=sizes.__getitem__)
    return f"{path}.{child}" if path else child


def _named(path: str, strands: list[Strand], *, alone: bool) -> list[Strand]:
    """A single sum has the name of its module; names that stand twice get a number."""
    if len(strands) == 1 and alone and path:
        return [_renamed(strands[0], path)]
    names = [strand.name for strand in strands]
    return [
        strand if names.count(strand.name) == 1 else _renamed(strand, f"{strand.name}#{strand.index}")
        for strand in strands
    ]


def _renamed(strand: Strand, name: str) -> Strand:
    return Strand(**{**vars(strand), "name": name})
