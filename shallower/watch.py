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


def new_xi(credits: list[Tensor]) -> Tensor:
    """xi as a leaf, of which only the gradient is used: it goes to `credits`.

    Through it the gradient also reaches the first block of a network, before which nothing is trained.
    """
    xi = torch.zeros((), requires_grad=True)
    xi.register_hook(credits.append)
    return xi
