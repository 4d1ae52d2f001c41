"""Who reads and who writes a value: the data flow of a pruned network, for `absorb`."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shallower.graphs import is_identity
from shallower.split import Block, defaults

LAYERS = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}
# They act on each channel alone and send 0 to 0, so they commute with copies and zero padding of channels.
TRANSPARENT_MODULES = {
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d),
}
TRANSPARENT_CALLS = {
    *(torch.relu, torch.relu_, torch.tanh, F.relu, F.gelu, F.silu, F.leaky_relu, F.relu6, F.hardswish),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    *("relu", "relu_", "tanh"),
}
SIGN_KEEPING = {
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Flatten,
    nn.Dropout,
}
NEUTRAL_CALLS = {"clone", "contiguous"}

Passes = Callable[[nn.Module, fx.Node], bool]


class NoFlow(ValueError):
    """Why a map cannot be folded along the data flow."""


@dataclass(frozen=True)
class ChannelMap:
    """[z; ...; z] (`copies` times), or zeros, z, zeros (`before` and `after` channels of them)."""

    copies: int = 1
    before: int = 0
    after: int = 0

    def fold(self, weight: Tensor) -> Tensor:
        """The weight [out, channels, ...] of a layer that reads z instead of its map."""
        if self.copies > 1:
            return weight.unflatten(1, (self.copies, -1)).sum(1)
        return weight[:, self.before : weight.shape[1] - self.after]


def map_of(node: fx.Node) -> ChannelMap | None:
    """The map of channels that `node` computes, if it computes one."""
    args: Any = node.args
    kwargs: Any = node.kwargs
    if node.op == "call_function" and node.target in (torch.cat, torch.concat):
        parts: Any = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        same = dim == 1 and len(set(parts)) == 1
        return ChannelMap(copies=len(parts)) if same else None
    if node.op == "call_method" and node.target == "repeat":
        times = args[1] if isinstance(args[1], tuple | list) else args[1:]
        return (
            ChannelMap(copies=times[1]) if len(times) == 4 and (times[0], *times[2:]) == (1, 1, 1) else None
        )
    if node.op == "call_function" and node.target is F.pad:
        bound = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
        pad = tuple(bound["pad"])
        zeros = bound.get("mode", "constant") == "constant" and not bound.get("value")
        if zeros and len(pad) == 6 and not any(pad[:4]) and min(pad[4:]) >= 0:
            return ChannelMap(before=pad[4], after=pad[5])
    return None


def is_neutral(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.Identity
    return node.op == "call_method" and node.target in NEUTRAL_CALLS


def is_transparent(module: nn.Module, node: fx.Node) -> bool:
    if is_neutral(module, node):
        return True
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) in TRANSPARENT_MODULES
    if node.op == "call_function" and node.target is operator.getitem:
        index = node.args[1]
        whole = slice(None, None, None)
        return isinstance(index, tuple) and len(index) == 4 and index[0] == whole == index[1]
    return node.op in ("call_function", "call_method") and node.target in TRANSPARENT_CALLS


def is_relu(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.ReLU
    return node.target in (F.relu, torch.relu, torch.relu_, "relu", "relu_")


def _ends_in_relu(module: nn.Module, graph: fx.Graph) -> bool:
    end = next(n for n in graph.nodes if n.op == "output").args[0]
    return isinstance(end, fx.Node) and is_relu(module, end)


def is_flatten(module: nn.Module, node: fx.Node) -> bool:
    """From images to features, one after the other; channels are blocks of features then."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.Flatten
    if node.target in (torch.flatten, "flatten"):
        return node.args[1:] == (1,) or node.kwargs == {"start_dim": 1}
    if node.target in ("view", "reshape"):
        return len(node.args) == 3 and bool(node.args[2] == -1)
    return _is_mean(node)


def _is_mean(node: fx.Node) -> bool:
    if node.target not in ("mean", torch.mean):
        return False
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return (
        isinstance(dims, tuple | list)
        and sorted(dims) in ([2, 3], [-2, -1])
        and not node.kwargs.get("keepdim")
    )


def _is_one_pixel(module: nn.Module, node: fx.Node) -> bool:
    """Behind it, one feature per channel is left."""
    if node.op == "call_module":
        pool = module.get_submodule(str(node.target))
        sizes = getattr(pool, "output_size", None) if isinstance(pool, nn.AdaptiveAvgPool2d) else None
        return sizes in (1, (1, 1))
    return _is_mean(node) or (node.target is F.adaptive_avg_pool2d and node.args[1:] in ((1,), ((1, 1),)))


def inline(module: nn.Module, part: fx.Graph | None = None) -> fx.Graph:
    """`module`, or one part of it, as a graph of PyTorch's own layers: the user's modules are opened."""
    root = module if part is None else fx.GraphModule(module, part)
    try:
        return fx.Tracer().trace(root)
    except Exception as error:  # a user's module may raise anything on a symbolic input
        raise NoFlow(
            f"torch.fx cannot trace {type(module).__name__}: {str(error).splitlines()[0]}"
        ) from error


class _Flat(fx.Tracer):
    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)


@dataclass
class Readers:
    """The layers that read a value, by path; and the surviving blocks whose skip reads it as well."""

    paths: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)


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
        try:
            given = defaults(model)
            self.graph = _Flat(self.bypasses | set(blocks)).trace(model, concrete_args=given)
        except Exception as error:  # as in `inline`
            reason = str(error).splitlines()[0]
            raise NoFlow(
                f"torch.fx cannot trace the model, so its neighbours are unknown: {reason}"
            ) from error

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
        steps = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        before = [n for n in graph.nodes if n.op == "placeholder"] + steps
        if any(node.all_input_nodes != [value] for node, value in zip(steps, before, strict=False)):
            raise NoFlow("it is more than a chain of operations")
        return steps

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
            inner = _Place(bypass, name, lambda: self._walk(user, place, passes, channels, found), place.flat)
            self._walk(_source(inline(bypass)), inner, passes, channels, found)
        elif user.op == "call_module" and not place.prefix and str(user.target) in self.blocks:
            self._enter(str(user.target), passes, channels, found)
        elif user.op == "call_module" and type(place.module.get_submodule(str(user.target))) in LAYERS:
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
        if channels:
            found.blocks.append(name)
        else:
            self._walk(_source(inline(module, block.skip)), place, passes, channels, found)

    def _reach(self, user: fx.Node, place: _Place, channels: bool, found: Readers) -> None:
        layer, path = place.module.get_submodule(str(user.target)), place.path(user)
        if channels and type(layer) is nn.Linear and not (place.flat and place.pixels == 1):
            raise NoFlow(f"{path} reads it behind an unknown number of pixels")
        if channels and type(layer) is not nn.Linear and type(layer) is not nn.Conv2d:
            raise NoFlow(f"{path} is no 2-d convolution")
        self._check_single(user, layer, path)
        if path in found.paths:
            raise NoFlow(f"{path} reads it twice")
        found.paths.append(path)

    def _check_single(self, node: fx.Node, layer: nn.Module, path: str) -> None:
        runs = [n for n in node.graph.nodes if n.op == "call_module" and n.target == node.target]
        mine = {id(p) for p in layer.parameters()}
        owners = [n for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) in mine]
        if len(runs) > 1 or len(owners) > len(mine):
            raise NoFlow(f"{path} is used in more than one place")

    def is_nonnegative(self, value: fx.Node) -> bool:
        """Whether `value` has gone through a ReLU, so that another one does nothing."""
        if value.op != "call_module":
            return is_relu(self.model, value)
        name, module = str(value.target), self.model.get_submodule(str(value.target))
        if name in self.blocks:
            return _ends_in_relu(module, inline(module, self.blocks[name].tail))
        if name in self.bypasses and not is_identity(inline(module)):
            return _ends_in_relu(module, inline(module))
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
        if name in self.blocks:
            block = self.blocks[name]
            if not is_identity(block.tail):
                raise NoFlow(f"{name} changes its sum before it hands it on")
            return [self._end(module, name, part) for part in (block.branch, block.skip)]
        if name in self.bypasses:
            return [self._end(module, name, None)]
        if type(module) not in LAYERS:
            raise NoFlow(f"{name} writes it, which is no layer")
        self._check_single(value, module, name)
        return [name]

    def _end(self, module: nn.Module, name: str, part: fx.Graph | None) -> str:
        graph = inline(module, part)
        end = next(n for n in graph.nodes if n.op == "output").args[0]
        if not isinstance(end, fx.Node) or end.op != "call_module":
            raise NoFlow(f"{name} does not end in a layer")
        layer, path = module.get_submodule(str(end.target)), f"{name}.{end.target}"
        if type(layer) not in LAYERS:
            raise NoFlow(f"{path} is no layer")
        self._check_single(end, layer, path)
        return path


def _source(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "placeholder")


def _moved(place: _Place, node: fx.Node, *, flat: bool) -> _Place:
    pixels = 1 if _is_one_pixel(place.module, node) else place.pixels
    return _Place(place.module, place.prefix, place.onward, flat, pixels)
