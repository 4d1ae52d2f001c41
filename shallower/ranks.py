"""Several processes that train one network: what they share, and how they notice that they no longer do.

Every rank draws from the same seed and moves theta by the mean of all ranks' estimates, so draws, rates and
removals are the same everywhere without being sent. One small reduction per step carries the estimates, and
beside them a stamp of the rank's rates and draws: a rank that has gone its own way is noticed at once.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

IGNORED = "_ddp_params_and_buffers_to_ignore"  # what DistributedDataParallel asks a model for
Group = Any  # a ProcessGroup; "default": the default group, if there is one; None: this process alone
DEFAULT: Literal["default"] = "default"
TOLERANCE = 1e-4  # by which weights of ranks may differ


class Ranks:
    """The processes that train one model together; one, unless torch.distributed is in use."""

    def __init__(self, group: Group = DEFAULT) -> None:
        ready = dist.is_available() and dist.is_initialized()
        if group is not None and group != DEFAULT and not ready:
            raise ValueError("Found a process_group, but torch.distributed is not initialised.")
        self.group = dist.group.WORLD if ready and group == DEFAULT else group if ready else None
        self.size = dist.get_world_size(self.group) if self.group is not None else 1
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.waits = dist.is_available() and not ready and group == DEFAULT  # ranks may come yet

    def mean(self, values: Tensor, stamp: bytes, weights: Sequence[Tensor] = ()) -> list[float]:
        """The mean over the ranks of what each has found, if all of them have the same `stamp`, and, up to
        rounding, the same `weights`."""
        if self.size == 1:
            self._check_alone()
            return values.tolist()
        # Equal stamps have their own value as mean, exactly, and no variance.
        own = int.from_bytes(hashlib.blake2b(stamp, digest_size=4).digest(), "big") >> 12
        tail = torch.tensor([own, own * own], dtype=torch.float64, device=values.device)
        sizes = [w.detach().double().abs().sum().to(values.device) for w in weights]
        mine = torch.stack(sizes) if sizes else tail.new_zeros(0)
        sent = torch.cat([values.double(), mine, mine.square(), tail])
        dist.all_reduce(sent, group=self.group)
        *means, first, second = sent.div_(self.size).tolist()
        means, theirs, squares = means[: len(values)], *_halves(means[len(values) :])
        if (first, second) != (own, own * own):
            raise RuntimeError(
                f"Rank {self.rank} of {self.size}: the ranks no longer have the same rates and draws, and "
                "would train different networks. Give every rank the same seed, recipe and checkpoint, and "
                "call `pruner.step()` on all of them after every `optimizer.step()`."
            )
        # By the variance, which all ranks see: the one that is apart must not be alone in stopping.
        spread = [self.size * (s - m * m) for m, s in zip(theirs, squares, strict=True)]
        apart = [v > (TOLERANCE * m) ** 2 for m, v in zip(theirs, spread, strict=True)]
        if any(apart):
            raise RuntimeError(
                f"Rank {self.rank} of {self.size}: {sum(apart)} of {len(apart)} parameters are not the same "
                "on all ranks, which train different networks. Begin with the same weights everywhere, and "
                "let shallower.distributed.DataParallel average the gradients, or DistributedDataParallel "
                "with find_unused_parameters=True; to prune on each rank alone, "
                "`Pruner(..., process_group=None)`."
            )
        return means

    def _check_alone(self) -> None:
        if self.waits and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                "The Pruner was built before `init_process_group`, so it knows nothing of the other ranks. "
                "Build it afterwards; to prune on each rank alone, `Pruner(..., process_group=None)`."
            )

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of a tensor, in place."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank; all of them must ask."""
        if self.size == 1:
            return here
        return bool(self.sum(torch.tensor([float(here)], device=_device_of(self.group))).item())

    def check_same(self, **found: Any) -> None:
        """Refuse to begin if the ranks differ in any of `found`."""
        if self.size == 1:
            return
        own = [_number(repr(value).encode()) for value in found.values()]
        device = _device_of(self.group)
        sent = torch.tensor([own, [-n for n in own]], dtype=torch.int64, device=device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self.group)
        highest, lowest = sent.tolist()
        odd = [name for name, a, b in zip(found, highest, lowest, strict=True) if a != -b]
        if odd:
            raise ValueError(
                f"The {self.size} ranks differ in {_listed(odd)} (rank {self.rank}: "
                f"{', '.join(f'{name}={found[name]!r}'[:80] for name in odd)}). Their networks would not be "
                "the same: give every rank the same, or prune on each alone with `process_group=None`."
            )


def keep_from_ddp(model: nn.Module, buffers: Sequence[str]) -> None:
    """Let DistributedDataParallel not broadcast `buffers`, which come and go, before each forward pass."""
    vars(model)[IGNORED] = [*vars(model).get(IGNORED, ()), *buffers]


def give_to_ddp(model: nn.Module, buffers: Sequence[str]) -> None:
    """Take that back."""
    rest = [name for name in vars(model).pop(IGNORED, ()) if name not in buffers]
    if rest:
        vars(model)[IGNORED] = rest


def _halves(values: list[float]) -> tuple[list[float], list[float]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def _number(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


def _device_of(group: Any) -> torch.device:
    """Where the group's backend wants its tensors."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
