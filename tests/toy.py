"""Blocks as people write them, small."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block(forward: Callable[..., Any], **children: Any) -> nn.Module:
    """A module with these children and parameters, and this `forward`."""
    module = type("Toy", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def conv(channels: int, features: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, features, kernel, padding=kernel // 2, **options)


class BasicBlock(nn.Module):
    """torchvision's: one in-place ReLU for branch and tail, `out += identity`, `downsample` may be None."""

    def __init__(self, channels: int = 4, features: int = 4, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = conv(channels, features, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv(features, features, bias=False)
        self.bn2 = nn.BatchNorm2d(features)
        self.downsample = None
        if stride != 1 or channels != features:
            projection = nn.Conv2d(channels, features, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(features))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class PreActBlock(nn.Module):
    """kuangliu's: where it changes the shape, its shortcut starts behind the first BN and ReLU."""

    def __init__(self, channels: int = 4, features: int = 4, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = conv(channels, features, stride=stride, bias=False)
        self.bn2 = nn.BatchNorm2d(features)
        self.conv2 = conv(features, features, bias=False)
        if stride != 1 or channels != features:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, features, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class LambdaLayer(nn.Module):
    """akamaster's shortcut without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class PaddedBlock(nn.Module):
    """akamaster's block: the shortcut takes every second pixel and pads the channels with zeros."""

    def __init__(self, channels: int = 4, features: int = 8, stride: int = 2) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(channels, features, stride=stride), nn.BatchNorm2d(features)
        self.conv2, self.bn2 = conv(features, features), nn.BatchNorm2d(features)
        side = (features - channels) // 2
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or channels != features:
            self.shortcut = LambdaLayer(
                lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, side, side), "constant", 0)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class Drop(nn.Module):
    """timm's DropPath: a child that knows its mode."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = torch.empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * keep / (1 - self.p)


class Scale(nn.Module):
    """A layer that torch.nn does not know, with a parameter of its own called `weight`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
