"""The derivative of the loss by a block's xi, taken at the block's sum."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Watch(torch.autograd.Function):
    """The identity on the sum; the derivative of the loss by xi is <dloss/dsum, branch>.

    xi is a leaf, so a backward pass counts if it reaches the leaves, not if it is for an input alone.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, branch: Tensor, xi: Tensor, alias: bool) -> Tensor:
        ctx.save_for_backward(branch)
        return _handed_on(total, alias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (branch,) = ctx.saved_tensors
        return gradient, None, inner(gradient, branch), None  # (3)


class WatchLater(torch.autograd.Function):
    """`Watch` of a closed block whose branch runs when the gradient has come, and is forgotten at once.

    Its output need not be kept from the forward pass to the backward pass, and is still in the cache when it
    meets the gradient; what it reads is mostly kept by other layers anyway.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, z: Tensor, xi: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(z)
        ctx.run = run
        return _handed_on(total, alias=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (z,) = ctx.saved_tensors
        return gradient, None, inner(gradient, ctx.run(z)), None  # (3)


def _handed_on(total: Tensor, alias: bool) -> Tensor:
    return total.view_as(total) if alias and total.requires_grad else total.clone()


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, multiplied and summed in single precision at least."""
    if a.dtype == b.dtype == torch.float32:
        if a.is_contiguous() and b.is_contiguous():
            return torch.dot(a.view(-1), b.view(-1))
        if a.ndim == 4 and a.stride() == b.stride() and a.is_contiguous(memory_format=torch.channels_last):
            return torch.dot(a.permute(0, 2, 3, 1).reshape(-1), b.permute(0, 2, 3, 1).reshape(-1))
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return (a.to(wide) * b.to(wide)).sum()


class Listener:
    """Hears the derivatives by one gate's xi, and gives them to `credits`.

    xi is a leaf of which only the gradient is used; through it the gradient also reaches the first block of
    a network, before which nothing is trained. There is one for each device, and it stays: to build a leaf
    with a hook in every step costs as much as a small block, and one on another device a wait.
    """

    def __init__(self, credits: list[Tensor]) -> None:
        self.credits = credits
        self._leaves: dict[torch.device, Tensor] = {}

    def watch(self, total: Tensor, branch: Tensor, alias: bool) -> Tensor:
        """`total` as it is, of which `branch` is the part that xi multiplies."""
        return Watch.apply(total, branch, self._xi(branch.device), alias)

    def watch_later(self, total: Tensor, z: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """The same, where that part is `run(z)` and not known yet."""
        return WatchLater.apply(total, z.detach(), self._xi(z.device), run)  # no gradient comes to z this way

    def _xi(self, device: torch.device) -> Tensor:
        xi = self._leaves.get(device)
        if xi is None:
            xi = self._leaves[device] = torch.zeros((), device=device, requires_grad=True)
            xi.register_post_accumulate_grad_hook(self._hear)
        return xi

    def _hear(self, xi: Tensor) -> None:
        assert xi.grad is not None
        self.credits.append(xi.grad.detach())
        xi.grad = None
