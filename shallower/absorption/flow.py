"""Who reads and who writes a value: the data flow of a pruned network, for `absorb`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import fx, nn

from shallower.absorption.operations import (
    SIGN_KEEPING,
    ends_in_relu,
    is_flatten,
    is_layer,
    is_neutral,
    is_one_pixel,
    is_relu,
)
from shallower.graphs import is_identity
from shallower.split import Block
from shallower.tracing import Tracer, Untraceable, trace_modes

Passes = Callable[[nn.Module, fx.Node], bool]


class NoFlow(ValueError):
    """Why a map cannot be folded along the data flow."""


def inline(module: nn.Module, part: fx.Graph | None = None) -> fx.Graph:
    """`module`, or one part of it, as a graph of PyTorch's own layers: the user's modules are opened."""
    return _opened(module if part is None else fx.GraphModule(module, part), Tracer)


def _opened(module: nn.Module, tracer: Callable[[], Tracer]) -> fx.Graph:
    try:
        train, evaluate = trace_modes(module, tracer)
    except Untraceable as no:
        raise NoFlow(f"what stands around it is unknown: {no}") from no
    if _structure(train) != _structure(evaluate):
        raise NoFlow("what stands around it is not the same in training and in evaluation")
    return train


def _structure(graph: fx.Graph) -> list[Any]:
    """Which operations run on which values, whatever their constants."""
    return [(n.op, n.target, [i.name for i in n.all_input_nodes]) for n in graph.nodes]


class _Flat(Tracer):
    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)


@dataclass
class Readers:
    """The layers that read a value, by path; and the surviving blocks whose skip reads it as well.

    To the layers in `blurred`, a channel is as many features as an unknown number of pixels.
    """

    paths: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    blurred: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Place:
    """A graph that is being walked: its module, its path in the model, and what its output leads to."""

    module: nn.Module
    prefix: str = ""
    onward: Callable[[], None] | None = None
    flat: bool = False  # features instead of images
    pixels: int | None = None  # per channel, where known

    def path(self, node: fx.Node) -> str:
        return f"{self.prefix}.{node.target}" if self.prefix else str(node.target)


class Flow:
    """The graph of a whole model in which bypasses and surviving blocks are single nodes."""

    def __init__(self, model: nn.Module, bypasses: Sequence[str], blocks: Mapping[str, Block]) -> None:
        self.model, self.bypasses, self.blocks = model, set(bypasses), blocks
        self.graph = _opened(model, lambda: _Flat(self.bypasses | set(blocks)))

    def order(self, names: Sequence[str]) -> list[str]:
        """`names` in the order in which the model runs them."""
        run = [str(n.target) for n in self.graph.nodes if n.op == "call_module"]
        return sorted((name for name in names if name in run), key=run.index)

    def node(self, name: str) -> fx.Node:
        nodes = [n for n in self.graph.nodes if n.op == "call_module" and n.target == name]
        if len(nodes) != 1:
            raise NoFlow(f"the model runs it {len(nodes)} times")
        return nodes[0]

    @staticmethod
    def steps(graph: fx.Graph) -> list[fx.Node]:
        """The operations of a graph that is a chain."""
        nodes = list(graph.nodes)
        if any(node.all_input_nodes != [value] for value, node in pairwise(nodes)):
            raise NoFlow("it is more than a chain of operations")
        return nodes[1:-1]

    def readers(self, node: fx.Node, *, passes: Passes, channels: bool = False) -> Readers:
        """All layers that the value of `node` ends up in; NoFlow if it ends up anywhere else."""
        found = Readers()
        self._walk(node, _Place(self.model), passes, channels, found)
        return found

    def _walk(self, node: fx.Node, place: _Place, passes: Passes, channels: bool, found: Readers) -> None:
        for user in node.users:
            self._visit(user, place, passes, channels, found)

    def _visit(self, user: fx.Node, place: _Place, passes: Passes, channels: bool, found: Readers) -> None:
        if user.op == "output":
            if place.onward is None:
                raise NoFlow(f"the output of {place.prefix or 'the model'} needs it")
            place.onward()
        elif user.op == "call_module" and not place.prefix and str(user.target) in self.bypasses:
            bypass, name = self.model.get_submodule(str(user.target)), str(user.target)
            self.node(name)
            inner = _Place(bypass, name, lambda: self._walk(user, place, passes, channels, found), place.flat)
            self._walk(_source(inline(bypass)), inner, passes, channels, found)
        elif user.op == "call_module" and not place.prefix and str(user.target) in self.blocks:
            self._enter(str(user.target), passes, channels, found)
        elif user.op == "call_module" and is_layer(place.module.get_submodule(str(user.target))):
            self._reach(user, place, channels, found)
        elif user.op == "call_method" and user.target == "size" and user.args[1:] == (0,):
            pass  # the size of the batch
        elif channels and not place.flat and is_flatten(place.module, user):
            self._walk(user, _moved(place, user, flat=True), passes, channels, found)
        elif passes(place.module, user):
            self._walk(user, _moved(place, user, flat=place.flat), passes, channels, found)
        else:
            raise NoFlow(
                f"{place.path(user) if user.op == 'call_module' else user.name} reads it, which is no layer"
            )

    def _enter(self, name: str, passes: Passes, channels: bool, found: Readers) -> None:
        """Into a surviving block: its branch must read the value by layers, its skip may read a map."""
        block, module = self.blocks[name], self.model.get_submodule(name)
        self.node(name)
        if not is_identity(block.head):
            raise NoFlow(f"{name} has operations before its skip and branch part")
        place = _Place(module, name)
        self._walk(_source(inline(module, block.branch)), place, passes, channels, found)
        trial = Readers(list(found.paths), list(found.blocks), set(found.blurred))
        try:
            self._walk(_source(inline(module, block.skip)), place, passes, channels, trial)
        except NoFlow:
            if not channels:
                raise
            trial = Readers(found.paths, [*found.blocks, name], found.blurred)
        found.paths, found.blocks, found.blurred = trial.paths, trial.blocks, trial.blurred

    def _reach(self, user: fx.Node, place: _Place, channels: bool, found: Readers) -> None:
        layer, path = place.module.get_submodule(str(user.target)), place.path(user)
        if channels and type(layer) is nn.Linear and not place.flat:
            raise NoFlow(f"{path} may read another dimension than the channels")
        if channels and type(layer) is nn.Linear and place.pixels != 1:
            found.blurred.add(path)
        if channels and type(layer) is not nn.Linear and type(layer) is not nn.Conv2d:
            raise NoFlow(f"{path} is no 2-d convolution")
        self._check_single(user, layer, path)
        if path in found.paths:
            raise NoFlow(f"{path} reads it twice")
        found.paths.append(path)

    def _check_single(self, node: fx.Node, layer: nn.Module, path: str) -> None:
        """`layer` must be run once, and its parameters must not be read in any other way."""
        named = [n for graph in {node.graph, self.graph} for n in graph.nodes if n.op != "output"]
        runs = [n for n in node.graph.nodes if n.op == "call_module" and n.target == node.target]
        mine = {id(p) for p in layer.parameters()}
        owners = [n for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) in mine]
        bare = [n for n in named if n.op == "get_attr" and str(n.target) in owners]
        if len(runs) > 1 or len(owners) > len(mine) or bare:
            raise NoFlow(f"{path} is used in more than one place")

    def is_nonnegative(self, value: fx.Node) -> bool:
        """Whether `value` has gone through a ReLU, so that another one does nothing."""
        if value.op != "call_module":
            return is_relu(self.model, value)
        name, module = str(value.target), self.model.get_submodule(str(value.target))
        if name in self.blocks:
            return ends_in_relu(module, inline(module, self.blocks[name].tail))
        if name in self.bypasses and not is_identity(inline(module)):
            return ends_in_relu(module, inline(module))
        through = name in self.bypasses or is_neutral(self.model, value) or type(module) in SIGN_KEEPING
        return is_relu(self.model, value) or (through and self.is_nonnegative(value.all_input_nodes[0]))

    def writers(self, node: fx.Node) -> list[str]:
        """The layers whose outputs are summed, unchanged, into the only input of `node`."""
        (value,) = node.all_input_nodes
        while value.op == "call_module" and is_neutral(self.model, value) and len(value.users) == 1:
            (value,) = value.all_input_nodes
        if value.op != "call_module" or len(value.users) != 1:
            raise NoFlow(f"{value.name} writes it, or something else reads it as well")
        name = str(value.target)
        module = self.model.get_submodule(name)
        self.node(name)
        if name in self.blocks:
            block = self.blocks[name]
            if not all(is_neutral(module, n) for n in self.steps(inline(module, block.tail))):
                raise NoFlow(f"{name} changes its sum before it hands it on")
            return [self._end(module, name, part) for part in (block.branch, block.skip)]
        if name in self.bypasses:
            return [self._end(module, name, None)]
        if not is_layer(module):
            raise NoFlow(f"{name} writes it, which is no layer")
        self._check_single(value, module, name)
        return [name]

    def _end(self, module: nn.Module, name: str, part: fx.Graph | None) -> str:
        graph = inline(module, part)
        (end,) = next(n for n in graph.nodes if n.op == "output").all_input_nodes
        while is_neutral(module, end):
            (end,) = end.all_input_nodes
        if end.op != "call_module":
            raise NoFlow(f"{name} does not end in a layer")
        layer, path = module.get_submodule(str(end.target)), f"{name}.{end.target}"
        if not is_layer(layer):
            raise NoFlow(f"{path} is no layer")
        self._check_single(end, layer, path)
        return path


def _source(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "placeholder")


def _moved(place: _Place, node: fx.Node, *, flat: bool) -> _Place:
    pixels = 1 if is_one_pixel(place.module, node) else place.pixels
    return _Place(place.module, place.prefix, place.onward, flat, pixels)
