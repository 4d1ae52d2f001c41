"""The branch of a closed block in the backward pass: it runs as late as its estimate needs it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class Branch:
    """What a branch is made of, and whether it may wait: nobody who looks must see that it ran late.

    It may if it is `plain`: made of PyTorch's own layers, which leave nothing behind but buffers, with
    weights that stay where they are, as those of FSDP2 do not. And for this once, if there are no hooks on
    its layers and its weights are its own, as they are not in torch.func.functional_call.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], weights: Mapping[str, nn.Parameter]
    ) -> None:
        self.layers = layers
        places = [(name.rpartition("."), p) for name, p in weights.items()]
        self.weights = [(module.get_submodule(path), name, p) for (path, _, name), p in places]
        ours = all(type(layer).__module__.startswith("torch.nn.") for layer in layers)
        whole = not any(hasattr(p, "to_local") for p in weights.values())  # no DTensor
        self.plain = ours and whole

    def may_wait(self) -> bool:
        for layer in self.layers:  # for every closed gate in every step, so no generators
            if layer._forward_hooks or layer._forward_pre_hooks:
                return False
        return self._has_its_weights() and not _has_any_global_hook()

    def _has_its_weights(self) -> bool:
        for owner, name, p in self.weights:
            if owner._parameters.get(name) is not p:
                return False
        return True

    def modes(self) -> list[bool]:
        return [layer.training for layer in self.layers]

    def versions(self) -> list[int] | None:
        """How often each weight was written to, or None if it has others now."""
        return [p._version for _, _, p in self.weights] if self._has_its_weights() else None


class Circumstances:
    """How a branch would run now: under which autocast, in which modes, with which weights."""

    def __init__(self, branch: Branch, device: torch.device) -> None:
        self.branch, self.kind = branch, device.type
        self.autocast, self.modes, self.versions = _autocast(self.kind), branch.modes(), branch.versions()

    def hold(self) -> bool:
        """Whether all is still as it was, which it mostly is."""
        if self.branch.versions() != self.versions:
            raise RuntimeError(
                "The weights of a closed block were changed between the forward and the backward pass, so "
                "what it is worth can no longer be told. Call `loss.backward()` before weights are written."
            )
        return _autocast(self.kind) == self.autocast and self.branch.modes() == self.modes

    @contextmanager
    def restored(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        now = self.branch.modes()
        _set_modes(self.branch.layers, self.modes)
        try:
            with torch.autocast(self.kind, dtype=dtype, enabled=enabled) if dtype else nullcontext():
                yield
        finally:
            _set_modes(self.branch.layers, now)


_has_autocast = cache(torch.amp.is_autocast_available)


def _autocast(kind: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for that kind of device, and to what it casts, if there is one."""
    if not _has_autocast(kind):
        return False, None
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _set_modes(layers: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for layer, mode in zip(layers, modes, strict=True):
        layer.training = mode
