"""The arithmetic of folding: what a layer becomes when it takes in a linear map or a map of channels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shallower.absorption.flow import NoFlow
from shallower.absorption.operations import ChannelMap, is_layer

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass
class Folded:
    """New contents of a layer."""

    weight: Tensor
    bias: Tensor | None
    attributes: dict[str, Any]


def is_linear_map(module: nn.Module, node: fx.Node) -> bool:
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


def check_size(layers: Sequence[Layer], bypass: Layer, folded: Sequence[Folded]) -> None:
    """A narrow map between wide layers takes fewer parameters than their product."""
    before = sum(p.numel() for layer in (*layers, bypass) for p in layer.parameters())
    after = sum(new.weight.numel() + (0 if new.bias is None else new.bias.numel()) for new in folded)
    if after > before:
        raise NoFlow(f"it would take {after} parameters to do without it instead of {before}")


def into_readers(layers: Sequence[Layer], bypass: Layer) -> list[Folded]:
    return [_after(layer, bypass) for layer in layers]


def into_writers(layers: Sequence[Layer], bypass: Layer) -> list[Folded]:
    """W3 (sum of the layers) + b3: every layer is multiplied, and the first also takes the offset."""
    folded = [_before(layer, bypass) for layer in layers]
    if (b3 := _offset(bypass)) is not None:
        folded[0].bias = b3 if folded[0].bias is None else folded[0].bias + b3
    return folded


def _after(layer: Layer, bypass: Layer) -> Folded:
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
    return Folded(new, bias, attributes)


def _before(layer: Layer, bypass: Layer) -> Folded:
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
    return Folded(new, None if bias is None else matrix @ bias, attributes)


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


def thinned(layer: Layer, maps: list[ChannelMap]) -> Folded:
    """The layer that reads the channels before the maps: columns that read copies of one are added up."""
    if not isinstance(layer, nn.Linear) and layer.groups != 1:
        raise NoFlow("the next convolution has groups")
    weight = layer.weight.detach().double()
    for channel_map in reversed(maps):
        weight = channel_map.fold(weight)
    attribute = "in_features" if isinstance(layer, nn.Linear) else "in_channels"
    return Folded(weight, None, {attribute: weight.shape[1]})
