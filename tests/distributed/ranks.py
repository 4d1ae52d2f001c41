"""Run a function of this package on several ranks, in processes of their own, on gloo."""

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60


def _rank(
    rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], queue: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    try:
        queue.put((rank, True, function(rank, *args)))
    except Exception:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns on each rank; fails with what any of them raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, function, args, queue), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        answers = [queue.get(timeout=3 * TIMEOUT) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    found = {rank: (good, value) for rank, good, value in answers}
    wrong = [value for good, value in found.values() if not good]
    assert not wrong, "\n".join(wrong)
    return [found[rank][1] for rank in range(size)]
