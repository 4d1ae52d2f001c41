"""Fold the skip that a removed block left behind into its neighbours, wherever that is exact.

A linear map, z -> W3 z + b3, is multiplied into all the layers that read it (7), or into those that wrote
it; a map of channels (copies, zero padding) is summed into the next convolution, which then reads fewer
channels. What stands between may be anything that commutes with the map.

    W <- W W3,   b <- b + W b3                                                                      (7)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from shallower import optim
from shallower.absorption.flow import Flow, NoFlow, inline
from shallower.absorption.fold import (
    Folded,
    Layer,
    check_size,
    into_readers,
    into_writers,
    is_linear_map,
    thinned,
)
from shallower.absorption.operations import ChannelMap, is_neutral, is_relu, is_transparent, map_of
from shallower.graphs import chain, is_identity, replace, without_identities
from shallower.split import Block


@dataclass(frozen=True)
class Absorption:
    """What became of the skips that were left behind: where each was folded, or why it stays."""

    folded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def absorb(
    model: nn.Module,
    removed: Sequence[str],
    survivors: Sequence[Block] = (),
    *,
    optimizer: Optimizer | None = None,
) -> Absorption:
    """Fold the bypasses at the names in `removed`; the function of `model` in evaluation stays the same.

    Changed parameters remain the same objects. `optimizer`, if given, forgets the momentum of those that
    were multiplied, since it belongs to other coordinates.
    """
    report = Absorption()
    left = [name for name in removed if not isinstance(model.get_submodule(name), nn.Identity)]
    blocks = {block.name: block for block in survivors}
    if any(hasattr(p, "to_local") for p in model.parameters()):  # FSDP2 reads memory of its own
        reason = "the weights are shards of fully_shard; fold a copy of the network that holds them whole"
        report.kept.update(dict.fromkeys(left, reason))
        return report
    try:
        order = Flow(model, left, blocks).order(left)
    except NoFlow as no:
        report.kept.update(dict.fromkeys(left, str(no)))
        return report
    for name in reversed(order):  # a bypass that feeds another finds it folded
        surgery = _Surgery(model, Flow(model, left, blocks), blocks, optimizer)
        try:
            report.folded[name] = surgery.fold(name)
        except NoFlow as no:
            report.kept[name] = str(no)
    report.kept.update({name: "the model's forward does not run it" for name in left if name not in order})
    return report


class _Surgery:
    """Folds one bypass. Every way is checked to its end before a weight changes."""

    def __init__(
        self, model: nn.Module, flow: Flow, blocks: dict[str, Block], optimizer: Optimizer | None
    ) -> None:
        self.model, self.flow, self.blocks, self.optimizer = model, flow, blocks, optimizer

    def fold(self, name: str) -> str:
        bypass = self.model.get_submodule(name)
        graph = inline(bypass)
        steps = self.flow.steps(graph)
        real = [n for n in steps if not is_neutral(bypass, n)]
        linear = [n for n in real if n.op == "call_module" and is_linear_map(bypass, n)]
        maps = [n for n in steps if map_of(n) is not None]
        if maps and all(n in maps or is_transparent(bypass, n) for n in steps):
            return self._fold_map(name, graph, maps)
        if linear:
            return self._fold_linear(name, graph, real, linear)
        if maps:
            raise NoFlow("its map of channels stands among others that it does not commute with")
        return self._drop_relu(name, graph, real)

    def _drop_relu(self, name: str, graph: fx.Graph, real: list[fx.Node]) -> str:
        bypass = self.model.get_submodule(name)
        for n in real:
            if not is_relu(bypass, n):
                raise NoFlow(f"its {n.name} is no linear map that could be folded")
        if not self._reads_nonnegative(name):
            raise NoFlow("its ReLU is needed, because what it reads may be negative")
        self._shrink(name, graph, real)
        return "the ReLU before it"

    def _reads_nonnegative(self, name: str) -> bool:
        return self.flow.is_nonnegative(self.flow.node(name).all_input_nodes[0])

    def _shrink(self, name: str, graph: fx.Graph, gone: list[fx.Node]) -> None:
        """The bypass without the operations in `gone`, nor the copies that were made for them to work on."""
        bypass = self.model.get_submodule(name)
        copies = [n for n in graph.nodes if n.target == "clone" and set(n.users) <= set(gone)]
        for node in [*gone, *copies]:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        graph = without_identities(bypass, graph)
        replace(self.model, name, nn.Identity() if is_identity(graph) else fx.GraphModule(bypass, graph))

    # -- a linear map W3 --------------------------------------------------------------------------

    def _fold_linear(self, name: str, graph: fx.Graph, real: list[fx.Node], linear: list[fx.Node]) -> str:
        """The last operation into the layers that read it, or the first into those that wrote it."""
        bypass, reasons = self.model.get_submodule(name), []
        ways = [(real[-1], self._readers, into_readers), (real[0], self._writers, into_writers)]
        for node, find, compute in ways:
            if node not in linear:
                reasons.append("its linear map stands among others that it does not commute with")
                continue
            mine = cast(Layer, bypass.get_submodule(str(node.target)))
            try:
                paths = find(name)
                layers = [_layer(self.model, path) for path in paths]
                folded = compute(layers, mine)
                check_size(layers, mine, folded)
            except NoFlow as no:
                reasons.append(str(no))
                continue
            for layer, new in zip(layers, folded, strict=True):
                self._set(layer, new)
            self._shrink(name, graph, [node])
            if self.optimizer is not None:
                optim.forget(self.optimizer, set(mine.parameters()) - set(self.model.parameters()))
            return " and ".join(paths)
        raise NoFlow("; ".join(dict.fromkeys(reasons)))

    def _readers(self, name: str) -> list[str]:
        """All layers that read the bypass, or none: every way on must end in one."""
        return self.flow.readers(self.flow.node(name), passes=is_neutral).paths

    def _writers(self, name: str) -> list[str]:
        """The layers whose sum the bypass reads, if nothing else reads it."""
        return self.flow.writers(self.flow.node(name))

    # -- a map of channels ------------------------------------------------------------------------

    def _fold_map(self, name: str, graph: fx.Graph, maps: list[fx.Node]) -> str:
        channel_maps = [cast(ChannelMap, map_of(n)) for n in maps]
        readers = self.flow.readers(self.flow.node(name), passes=is_transparent, channels=True)
        if readers.blurred and any(m.copies == 1 for m in channel_maps):
            raise NoFlow(f"{min(readers.blurred)} reads it behind an unknown number of pixels")
        new = [
            (_layer(self.model, path), thinned(_layer(self.model, path), channel_maps))
            for path in readers.paths
        ]
        rebuilt = {block: self._with_map_on_skip(block, maps) for block in readers.blocks}
        for layer, folded in new:
            self._set(layer, folded)
        for block, module in rebuilt.items():
            replace(self.model, block, module)
        bypass, nonnegative = self.model.get_submodule(name), self._reads_nonnegative(name)
        idle = [n for n in graph.nodes if nonnegative and is_relu(bypass, n)]
        self._shrink(name, graph, [*maps, *idle])
        return " and ".join(readers.paths)

    def _with_map_on_skip(self, name: str, maps: list[fx.Node]) -> nn.Module:
        """The surviving block, reading the channels before the map: only its skip still needs them all."""
        block, module = self.blocks[name], self.model.get_submodule(name)
        whole = fx.Graph()
        z = whole.placeholder("z")
        mapped = _copy(_maps_graph(maps), whole, z)
        parts = {"skip": mapped, "branch": z}
        values = [_copy(getattr(block, part), whole, source) for part, source in parts.items()]
        total = whole.call_function(torch.add, tuple(values))
        whole.output(_copy(block.tail, whole, total))
        self.blocks[name] = Block(
            name=name,
            head=block.head,
            branch=block.branch,
            skip=chain(_maps_graph(maps), block.skip),
            tail=block.tail,
        )
        return fx.GraphModule(module, whole, class_name=type(module).__name__)

    # -- writing weights --------------------------------------------------------------------------

    @torch.no_grad()
    def _set(self, layer: Layer, new: Folded) -> None:
        _write(layer.weight, new.weight, self.optimizer)
        if new.bias is not None and layer.bias is not None:
            _write(layer.bias, new.bias, self.optimizer)
        elif new.bias is not None:
            layer.bias = nn.Parameter(new.bias.to(layer.weight), layer.weight.requires_grad)
            if self.optimizer is not None:
                optim.adopt(self.optimizer, layer.bias, like=layer.weight)
        for attribute, value in new.attributes.items():
            setattr(layer, attribute, value)


def _write(parameter: Tensor, value: Tensor, optimizer: Optimizer | None) -> None:
    other = parameter.detach()
    # A graph that is still alive, as of the last loss, holds on to the old shape of `parameter` as the shape
    # of its gradient, unless the type changes on the way.
    parameter.data = parameter.data.to(torch.float64 if parameter.dtype != torch.float64 else torch.float32)
    parameter.data = _laid_out(value.to(other), like=other)
    parameter.grad = None
    if optimizer is not None:
        optim.restart(optimizer, parameter)


def _laid_out(value: Tensor, *, like: Tensor) -> Tensor:
    """`value` in the memory format of `like`, as channels_last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    found = formats.get(like.ndim)
    if found is None or like.is_contiguous() or not like.is_contiguous(memory_format=found):
        return value.contiguous()
    return value.contiguous(memory_format=found)


def _layer(model: nn.Module, path: str) -> Layer:
    return cast(Layer, model.get_submodule(path))


def _copy(part: fx.Graph, into: fx.Graph, source: fx.Node) -> Any:
    (placeholder,) = (node for node in part.nodes if node.op == "placeholder")
    return into.graph_copy(part, {placeholder: source})


def _maps_graph(maps: list[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("z")
    for node in maps:
        value = graph.node_copy(node, dict.fromkeys(node.all_input_nodes, value).__getitem__)
    graph.output(value)
    return graph
