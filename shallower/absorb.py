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
from shallower.flow import Flow, NoFlow, inline
from shallower.graphs import chain, is_identity, replace
from shallower.operations import ChannelMap, is_layer, is_neutral, is_relu, is_transparent, map_of
from shallower.split import Block

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


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
        linear = [n for n in steps if n.op == "call_module" and _is_linear_map(bypass, n)]
        if len(linear) == 1 == len([n for n in steps if not is_neutral(bypass, n)]):
            return self._fold_linear(name, cast(Layer, bypass.get_submodule(str(linear[0].target))))
        maps = [n for n in steps if map_of(n) is not None]
        if maps and all(n in maps or is_transparent(bypass, n) for n in steps):
            return self._fold_map(name, graph, maps)
        if not maps and not linear:
            return self._drop_relu(name, bypass, steps)
        raise NoFlow("its linear map stands among others that it does not commute with")

    def _drop_relu(self, name: str, bypass: nn.Module, steps: list[fx.Node]) -> str:
        idle = all(is_neutral(bypass, n) or is_relu(bypass, n) for n in steps)
        if not (idle and self.flow.is_nonnegative(self.flow.node(name).all_input_nodes[0])):
            raise NoFlow("it holds no linear map, only operations without parameters")
        replace(self.model, name, nn.Identity())
        return "the ReLU before it"

    # -- a linear map W3 --------------------------------------------------------------------------

    def _fold_linear(self, name: str, bypass: Layer) -> str:
        reasons = []
        for find, compute in ((self._readers, _into_readers), (self._writers, _into_writers)):
            try:
                paths = find(name)
                layers = [_layer(self.model, path) for path in paths]
                folded = compute(layers, bypass)
                _check_size(layers, bypass, folded)
            except NoFlow as no:
                reasons.append(str(no))
                continue
            for layer, new in zip(layers, folded, strict=True):
                self._set(layer, new)
            if self.optimizer is not None:
                optim.forget(self.optimizer, bypass.parameters())
            replace(self.model, name, nn.Identity())
            return " and ".join(paths)
        raise NoFlow("; ".join(reasons))

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
            (_layer(self.model, path), _thinned(_layer(self.model, path), channel_maps))
            for path in readers.paths
        ]
        rebuilt = {block: self._with_map_on_skip(block, maps) for block in readers.blocks}
        for layer, folded in new:
            self._set(layer, folded)
        for block, module in rebuilt.items():
            replace(self.model, block, module)
        for node in maps:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        rest = nn.Identity() if is_identity(graph) else fx.GraphModule(self.model.get_submodule(name), graph)
        replace(self.model, name, rest)
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
    def _set(self, layer: Layer, new: "_Folded") -> None:
        _write(layer.weight, new.weight, self.optimizer)
        if new.bias is not None and layer.bias is not None:
            _write(layer.bias, new.bias, self.optimizer)
        elif new.bias is not None:
            layer.bias = nn.Parameter(new.bias.to(layer.weight), layer.weight.requires_grad)
            if self.optimizer is not None:
                optim.adopt(self.optimizer, layer.bias, like=layer.weight)
        for attribute, value in new.attributes.items():
            setattr(layer, attribute, value)


@dataclass
class _Folded:
    """New contents of a layer."""

    weight: Tensor
    bias: Tensor | None
    attributes: dict[str, Any]


def _write(parameter: Tensor, value: Tensor, optimizer: Optimizer | None) -> None:
    other = parameter.detach()
    # A graph that is still alive, as of the last loss, holds on to the old shape of `parameter` as the shape
    # of its gradient, unless the type changes on the way.
    parameter.data = parameter.data.to(torch.float64 if parameter.dtype != torch.float64 else torch.float32)
    parameter.data = value.to(other).contiguous()
    parameter.grad = None
    if optimizer is not None:
        optimizer.state.pop(parameter, None)


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


def _is_linear_map(module: nn.Module, node: fx.Node) -> bool:
    layer = module.get_submodule(str(node.target))
    if not is_layer(layer):
        return False
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return True
    pointwise = all(k == 1 for k in layer.kernel_size) and layer.groups == 1
    return pointwise and (not isinstance(layer.padding, str) and all(p == 0 for p in layer.padding))


def _matrix(layer: Layer) -> Tensor:
    return layer.weight.detach().double().flatten(1)


def _offset(layer: Layer) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach().double()


def _same_kind(layer: Layer, bypass: Layer) -> None:
    if type(layer) is not type(bypass):
        raise NoFlow(f"a {type(bypass).__name__} cannot be multiplied into a {type(layer).__name__}")
    if not isinstance(layer, nn.Linear) and layer.groups != 1:
        raise NoFlow("the neighbouring convolution has groups")


def _check_size(layers: Sequence[Layer], bypass: Layer, folded: Sequence["_Folded"]) -> None:
    """A narrow map between wide layers takes fewer parameters than their product."""
    before = sum(p.numel() for layer in (*layers, bypass) for p in layer.parameters())
    after = sum(new.weight.numel() + (0 if new.bias is None else new.bias.numel()) for new in folded)
    if after > before:
        raise NoFlow(f"it would take {after} parameters to do without it instead of {before}")


def _into_readers(layers: Sequence[Layer], bypass: Layer) -> list[_Folded]:
    return [_after(layer, bypass) for layer in layers]


def _into_writers(layers: Sequence[Layer], bypass: Layer) -> list[_Folded]:
    """W3 (sum of the layers) + b3: every layer is multiplied, and the first also takes the offset."""
    folded = [_before(layer, bypass) for layer in layers]
    if (b3 := _offset(bypass)) is not None:
        folded[0].bias = b3 if folded[0].bias is None else folded[0].bias + b3
    return folded


def _after(layer: Layer, bypass: Layer) -> _Folded:
    """`layer` of `bypass`, as one layer.                                                            (7)"""
    _same_kind(layer, bypass)
    weight, bias, b3 = layer.weight.detach().double(), _offset(layer), _offset(bypass)
    b3 = None if b3 is None or not b3.any() else b3
    new = torch.einsum("oc...,cd->od...", weight, _matrix(bypass))
    attributes: dict[str, Any] = {"in_features": new.shape[1]}
    if not isinstance(layer, nn.Linear):
        attributes = {"in_channels": new.shape[1], **_strided(layer, bypass)}
        if b3 is not None and _pads(layer):
            raise NoFlow("its bias would be missing in the border that the next convolution pads with zeros")
    if b3 is not None:
        shift = weight.flatten(1).unflatten(1, (weight.shape[1], -1)).sum(2) @ b3
        bias = shift if bias is None else bias + shift
    return _Folded(new, bias, attributes)


def _before(layer: Layer, bypass: Layer) -> _Folded:
    """`bypass` of `layer`, without its offset, as one layer."""
    _same_kind(layer, bypass)
    matrix, bias = _matrix(bypass), _offset(layer)
    new = torch.einsum("oc,c...->o...", matrix, layer.weight.detach().double())
    attributes: dict[str, Any] = {"out_features": new.shape[0]}
    if not isinstance(layer, nn.Linear) and not isinstance(bypass, nn.Linear):
        stride = tuple(a * b for a, b in zip(layer.stride, bypass.stride, strict=True))
        if layer.padding == "same" and stride != layer.stride:
            raise NoFlow('padding="same" allows no stride')
        attributes = {"out_channels": new.shape[0], "stride": stride}
    return _Folded(new, None if bias is None else matrix @ bias, attributes)


def _pads(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    return layer.padding == "same" or (not isinstance(layer.padding, str) and any(layer.padding))


def _strided(layer: Any, bypass: Any) -> dict[str, Any]:
    """A convolution on every s-th pixel is one on all pixels with stride, dilation and padding times s."""
    if all(s == 1 for s in bypass.stride):
        return {}
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        raise NoFlow("the skip has a stride, and the next convolution another padding than a number of zeros")
    names = ("stride", "dilation", "padding")
    scaled = {n: tuple(a * s for a, s in zip(getattr(layer, n), bypass.stride, strict=True)) for n in names}
    pad = [p for p in reversed(scaled["padding"]) for _ in range(2)]
    return {**scaled, "_reversed_padding_repeated_twice": pad}


def _thinned(layer: Layer, maps: list[ChannelMap]) -> _Folded:
    """The layer that reads the channels before the maps: columns that read copies of one are added up."""
    if not isinstance(layer, nn.Linear) and layer.groups != 1:
        raise NoFlow("the next convolution has groups")
    weight = layer.weight.detach().double()
    for channel_map in reversed(maps):
        weight = channel_map.fold(weight)
    attribute = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    return _Folded(weight, None, {attribute: weight.shape[1]})
