"""What single operations do: which are layers, which map channels, which let such maps through."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

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
NEUTRAL_CALLS = {"clone", "contiguous", torch.clone}


def is_layer(module: nn.Module) -> bool:
    """One of `LAYERS` that computes with its own weight and bias, and not with others made from them."""
    return type(module) in LAYERS and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


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
    return node.op in ("call_method", "call_function") and node.target in NEUTRAL_CALLS


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
    return node.op != "placeholder" and node.target in (F.relu, torch.relu, torch.relu_, "relu", "relu_")


def ends_in_relu(module: nn.Module, graph: fx.Graph) -> bool:
    end = next(n for n in graph.nodes if n.op == "output").args[0]
    return isinstance(end, fx.Node) and is_relu(module, end)


def is_flatten(module: nn.Module, node: fx.Node) -> bool:
    """From images to features, one after the other; channels are blocks of features then."""
    if node.op == "call_module":
        flatten = module.get_submodule(str(node.target))
        return type(flatten) is nn.Flatten and (flatten.start_dim, flatten.end_dim) == (1, -1)
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


def is_one_pixel(module: nn.Module, node: fx.Node) -> bool:
    """Behind it, one feature per channel is left."""
    if node.op == "call_module":
        pool = module.get_submodule(str(node.target))
        sizes = getattr(pool, "output_size", None) if isinstance(pool, nn.AdaptiveAvgPool2d) else None
        return sizes in (1, (1, 1))
    return _is_mean(node) or (node.target is F.adaptive_avg_pool2d and node.args[1:] in ((1,), ((1, 1),)))
