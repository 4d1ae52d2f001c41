"""The derivative of the loss by a block's xi, taken at the block's sum."""

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
        return total.view_as(total) if alias and total.requires_grad else total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (branch,) = ctx.saved_tensors
        return gradient, None, inner(gradient, branch), None  # (3)


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
        xi = self._leaves.get(branch.device)
        if xi is None:
            xi = self._leaves[branch.device] = torch.zeros((), device=branch.device, requires_grad=True)
            xi.register_post_accumulate_grad_hook(self._hear)
        return Watch.apply(total, branch, xi, alias)

    def _hear(self, xi: Tensor) -> None:
        assert xi.grad is not None
        self.credits.append(xi.grad.detach())
        xi.grad = None
