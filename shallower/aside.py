"""Running a model on the side: its modes, its statistics and the random numbers stay as they were."""

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# Held by whoever sets what all threads share: PyTorch's generator and switches, and nn.Module, which torch.fx
# patches.
OF_ALL_THREADS = threading.RLock()


class frozen_statistics:
    """Batch statistics are used as in training, but running ones and all other buffers stay as they were.

    To be entered at once: what there is to freeze is seen when it is made. Every closed gate comes here in
    every step, so it is a class and no generator, though used as a function.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._norms: list[dict[str, Any]] = []  # their attributes: nn.Module's way to set one takes its time
        self._buffers: list[tuple[Tensor, Tensor, int | None]] = []
        for m in modules:
            if isinstance(m, _NormBase):
                if m.track_running_stats and m.training:
                    self._norms.append(vars(m))
            elif m._buffers:
                found = [b for b in m._buffers.values() if b is not None]
                self._buffers += [(b, b.clone(), _version(b)) for b in found]

    def __enter__(self) -> None:
        for norm in self._norms:
            norm["track_running_stats"] = False

    def __exit__(self, *error: object) -> None:
        for norm in self._norms:
            norm["track_running_stats"] = True
        for buffer, old, version in self._buffers:
            # To write it is seen by autograd, if somebody else has saved it.
            if version is None or _version(buffer) != version:
                buffer.copy_(old)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; inference tensors do not count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def same_dice(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn here are drawn again afterwards; with a seed, they are the same every time."""
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    with OF_ALL_THREADS, torch.random.fork_rng([d.index for d in devices], device_type=kind):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def no_fast_path() -> Iterator[None]:
    """PyTorch's own encoders compute what their layers say, and not in one operator of their own."""
    with OF_ALL_THREADS:  # two that overlap would leave it switched off
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All of `model` in one mode for a while, with its running statistics frozen."""
    modes = {m: m.training for m in model.modules()}
    model.train(training)
    try:
        with frozen_statistics(model.modules()):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def copied(values: Any) -> Any:
    """Arguments as they were given: tensors themselves, everything else copied, with the tensors inside."""
    if isinstance(values, Tensor):
        return values
    if type(values) in (tuple, list):
        return type(values)(map(copied, values))
    if type(values) is dict:
        return {key: copied(value) for key, value in values.items()}
    inside: dict[int, Any] = {}
    _collect(values, inside)
    # PyTorch does not copy what has a history, as keys and values in a cache have in training.
    return copy.deepcopy(
        values, {key: v.detach().clone() for key, v in inside.items() if isinstance(v, Tensor)}
    )


def _collect(value: Any, found: dict[int, Any]) -> None:
    """All that is held by a value, by its identity."""
    if id(value) in found or isinstance(value, nn.Module | type):
        return
    found[id(value)] = value
    if isinstance(value, Tensor):
        return
    if isinstance(value, dict):
        parts = list(value.values())
    else:
        parts = list(value) if isinstance(value, list | tuple | set) else []
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        _collect(part, found)
