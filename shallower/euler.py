"""What an open block is worth, read off the gradients of the last affine map of its branch.

The parameters p of that map satisfy, by Euler's identity,

    <dloss/dbranch, branch> = sum(p.grad * p),

at no cost in activations, as long as the loss sees p through this branch alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shallower.split import Owned
from shallower.watch import inner


class Reader:
    """Reads one gate's estimates (3) into `credits`, a number for each parameter of the last affine map.

    `last` is empty where the identity cannot be used, and the gradient is to be watched at the sum: as where
    p has hooks already, which come before ours and may change the gradient, to clip it.
    """

    def __init__(self, last: Sequence[Owned], credits: list[Tensor], *, watching: bool) -> None:
        readable = all(p.requires_grad and not p._backward_hooks for _, _, p in last)
        self.last, self.credits = list(last) if readable else [], credits
        self.opened = False  # a training forward of the open block has run since the last step
        self._handles: list[RemovableHandle] = []
        for _, _, p in self.last if watching else ():
            read, keep = self._hooks(p)
            self._handles += [p.register_hook(read), p.register_post_accumulate_grad_hook(keep)]

    def ready(self) -> bool:
        """Whether the identity holds for the forward pass that begins: the last map still has its parameters,
        and they are trained. If so, the backward pass will be read."""
        for owner, name, p in self.last:  # in every forward pass, so no generator
            if owner._parameters.get(name) is not p or not p.requires_grad:
                return False
        self.opened = self.opened or bool(self.last)
        return bool(self.last)

    def clear(self) -> None:
        self.credits.clear()
        self.opened = False

    def release(self) -> None:
        """Take the hooks off the parameters, and the empty list that stays behind, which is called, too."""
        for handle in self._handles:
            handle.remove()
        for _, _, p in self.last:
            if not p._backward_hooks:
                p._backward_hooks = None
            if not p._post_accumulate_grad_hooks:
                p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._handles = []

    def _hooks(self, parameter: nn.Parameter) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        """For the backward pass: one is handed the gradient of this very pass, the other hears that it went
        to `p.grad`, and not to somebody who asked torch.autograd.grad for it.

        They run once for each parameter and step, so they do without attributes and calls where they can.
        """
        credits, found, dot, single = self.credits, list[Tensor](), torch.dot, torch.float32

        @unserializable_hook
        def read(gradient: Tensor) -> None:
            """The weights have not moved yet, and nothing has been clipped."""
            found.clear()
            if not self.opened:
                return
            if gradient.dtype is single is parameter.dtype and not gradient.requires_grad:
                try:
                    found.append(dot(gradient.view(-1), parameter.view(-1)))  # (3)
                    return
                except RuntimeError:  # not contiguous, as with channels_last
                    pass
            # A gradient that requires one belongs to a backward pass that is itself differentiated.
            found.append(inner(gradient, parameter.detach()))

        def keep(parameter: Tensor) -> None:
            if found:
                credits.append(found.pop())

        return read, keep
