"""A run on several processes, as torchrun starts them:

torchrun --nproc-per-node 2 --max-restarts 3 -m shallower train mnist-fc10
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shallower.training.run import Machine

RESTARTS, RUN_ID = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process: its rank, and whether the job was begun before."""

    rank: int = 0
    restarted: bool = False
    job: str | None = None  # a name that stays when ranks are started again, and no other job has

    @property
    def first(self) -> bool:
        """Whether it is the one that speaks and writes."""
        return self.rank == 0


@contextmanager
def launched(machine: Machine) -> Iterator[tuple[Launch, Machine]]:
    """Join the other processes, if there are any; each takes the device of its number."""
    size, restarts = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get(RESTARTS, "0"))
    # torchrun may give every job the same id; its own process stays the same for all restarts.
    job = f"{os.environ[RUN_ID]} {socket.gethostname()} {os.getppid()}" if RUN_ID in os.environ else None
    if size == 1 or not dist.is_available() or dist.is_initialized():
        yield Launch(restarted=restarts > 0, job=job), machine
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if machine.where.type == "cuda" and machine.device in ("auto", "cuda"):
        machine = replace(machine, device=f"cuda:{local}")
        torch.cuda.set_device(local)
    # torchrun may keep its store when it restarts the ranks, with the addresses of those that are gone.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"shallower/{restarts}", store)
    backend = "nccl" if machine.where.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield Launch(rank, restarts > 0, job), machine
    finally:
        dist.destroy_process_group()
