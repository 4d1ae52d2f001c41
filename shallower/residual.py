"""The residual block as a building block, and the parameter-free skips of the paper's networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """One residual block, written out: the plainest thing that `Pruner` can gate.

        z_next = tail(skip(z) + branch(z))

    Any module whose `forward` computes such a sum is recognised just as well; this class is for
    networks that are written from scratch, and for adding a skip where a network has none:

        nn.Sequential(Residual(nn.Linear(8, 8), tail=nn.ReLU()), nn.Linear(8, 2))
    """

    def __init__(
        self,
        branch: nn.Module,
        skip: nn.Module | None = None,
        tail: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.branch = branch
        self.skip = nn.Identity() if skip is None else skip
        self.tail = nn.Identity() if tail is None else tail

    def forward(self, z: Tensor) -> Tensor:
        return self.tail(self.skip(z) + self.branch(z))


class ChannelCopy(nn.Module):
    """[z; z]: the skip for a layer that multiplies the number of channels, as in the paper's VGG16."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times = times

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([z] * self.times, dim=1)

    def extra_repr(self) -> str:
        return f"times={self.times}"


class ZeroPad(nn.Module):
    """Every `stride`-th pixel, with channels of zeros on both sides: ResNet's parameter-free shortcut."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.before, self.after, self.stride = before, after, stride

    def forward(self, z: Tensor) -> Tensor:
        pixels = z[:, :, :: self.stride, :: self.stride]
        return F.pad(pixels, (0, 0, 0, 0, self.before, self.after))

    def extra_repr(self) -> str:
        return f"before={self.before}, after={self.after}, stride={self.stride}"
