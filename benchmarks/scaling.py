"""Steps and bytes on one and two processes, before and after pruning; a model of them, run out to N workers.

    python benchmarks/scaling.py

The processes train one network with `shallower.distributed.DataParallel` on gloo. What a step takes is
predicted from two things that are measured apart: the same two processes when they do not talk, and bare
reductions; and once more from the open network alone, by the MACs and bytes that closed and removed blocks
leave. Exits with 1 if a prediction of the first kind is off by more than 20 %, or one of the second by 30.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shallower import Pruner, Residual, models
from shallower.distributed import DataParallel
from shallower.ledger import Ledger, count_macs, count_parameters

BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at once
OFF, OFF_BY_MACS = 0.20, 0.30

# -- the model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What a network asks of a worker: multiply-accumulates of a sample's forward pass, and parameters."""

    macs: float
    params: float

    def towards(self, end: "Load", share: float) -> "Load":
        """On the way to `end`, as blocks disappear."""
        return Load(*(a + share * (b - a) for a, b in ((self.macs, end.macs), (self.params, end.params))))


@dataclass(frozen=True)
class Cluster:
    """Workers of so many multiply-accumulates a second, links of so many bytes, and the seconds of a hop."""

    speed: float
    bytes_per_second: float
    latency: float
    overlap: float = 1.0  # how much of what is sent travels during the backward pass, as long as that takes

    def reduce(self, size: float, workers: int) -> float:
        """Seconds of an all-reduce: each worker sends and receives 2 (N - 1) / N of it, in 2 log2 N hops."""
        hops = 2 * math.log2(workers) if workers > 1 else 0.0
        return hops * self.latency + 2 * (workers - 1) / workers * size / self.bytes_per_second

    def step(self, load: Load, batch: int, workers: int) -> float:
        """Seconds of a step: forward and backward, the gradients in buckets, the estimates after them."""
        forward = batch * load.macs / self.speed
        size = 4 * load.params
        buckets = 1 + math.ceil(size / BUCKET)  # the first of them is small, and sent at once
        sent = buckets * self.reduce(size / buckets, workers)
        hidden = self.overlap * min(2 * forward, sent)
        return 3 * forward + sent - hidden + self.reduce(0, workers)


def training(cluster: Cluster, dense: Load, end: Load, run: "Run", workers: int) -> tuple[float, float]:
    """Seconds of a whole training, dense and pruned: blocks go evenly until the price has its full height."""
    steps = math.ceil(run.samples / (run.batch * workers))
    seconds = [
        cluster.step(dense.towards(end, min(1.0, (epoch + 0.5) / run.ramp)), run.batch, workers)
        for epoch in range(run.epochs)
    ]
    return steps * run.epochs * cluster.step(dense, run.batch, workers), steps * sum(seconds)


@dataclass(frozen=True)
class Run:
    samples: int
    batch: int  # of each worker
    epochs: int
    ramp: int


# -- what is measured -------------------------------------------------------------------------------------


def small_resnet() -> tuple[nn.Module, Tensor, Tensor]:
    return models.resnet20(), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))


def wide_layers() -> tuple[nn.Module, Tensor, Tensor]:
    width = 1024
    blocks = (
        Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))) for _ in range(8)
    )
    return nn.Sequential(*blocks, nn.Linear(width, 10)), torch.randn(16, width), torch.randint(0, 10, (16,))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "ResNet-20, 32 images a worker": small_resnet,
    "8 blocks of 2 x 1,024 units, 16 samples a worker": wide_layers,
}
STATES = ("all open", "half closed", "half removed")


def share(name: str, state: str) -> float:
    """How much of a dense step's MACs a step in `state` runs, closed blocks forward only."""
    model, inputs, _ = NETWORKS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pruner = Pruner(model, optimizer, dataset_size=1, log_gamma=-1.0)
    ledger = Ledger(pruner, inputs[:2])
    costs = list(ledger.blocks.values())
    half, whole = sum(costs[::2]), ledger.rest + sum(costs)
    idle = {"all open": 3 * half, "half closed": half, "half removed": 0}[state]
    return (3 * (whole - half) + idle) / (3 * whole)


def prepared(name: str, state: str, group: Any) -> Callable[[], int]:
    """A function that takes one step and returns the bytes that it gave to reductions."""
    torch.manual_seed(0)
    model, inputs, labels = NETWORKS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pruner = Pruner(
        model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta=1.0, theta_lr=1e-12, process_group=group
    )
    ddp = DataParallel(model, pruner) if group is not None else None

    def step() -> int:
        sent = 0 if ddp is None else ddp.bytes_reduced
        optimizer.zero_grad()
        F.cross_entropy((ddp or model)(inputs), labels).backward()
        optimizer.step()
        estimates = 8 * (len(pruner.gates) + 2)
        pruner.step()
        return 0 if ddp is None else ddp.bytes_reduced - sent + estimates

    if state != "all open":
        for index in range(0, len(pruner.names), 2):
            pruner.theta[index] = 0.0 if state == "half removed" else 0.0101  # the draws close these
        pruner._draw()
    step()
    return step


def timed(step: Callable[[], int], number: int) -> tuple[float, float]:
    """Median seconds of a step, and bytes."""
    seconds, sizes = [], []
    for _ in range(number):
        begun = time.perf_counter()
        sizes.append(step())
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), statistics.median(sizes)


def alone(name: str, state: str) -> float:
    step = prepared(name, state, None)
    timed(step, 3)
    return timed(step, 25)[0]


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of so many processes."""
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": "scaling"}
    config = LaunchConfig(1, 1, size, **place, max_restarts=0, local_addr="127.0.0.1")
    found = elastic_launch(config, _started)(function, *args)
    return [found[rank] for rank in range(size)]


def _started(function: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


SMALL, LARGE = 64, 8 * 2**20  # bytes of the bare reductions


def together(name: str, state: str) -> tuple[float, ...]:
    """Seconds of a step of two processes that only wait for each other at its end; of two that reduce their
    gradients; of a small and a large reduction alone; and the bytes of a step. All in turn."""
    apart, token = prepared(name, state, None), torch.zeros(SMALL // 4)

    def waiting() -> int:
        apart()
        dist.all_reduce(token)
        return 0

    talking = prepared(name, state, dist.group.WORLD)
    runs = (waiting, talking, bare(SMALL), bare(LARGE))
    found: list[list[float]] = [[] for _ in runs]
    sent = 0.0
    for part in range(13):
        for run, seconds in zip(runs, found, strict=True):
            dist.barrier()
            each, size = timed(run, 3)
            sent = max(sent, size)
            if part:
                seconds.append(each)
    return *map(statistics.median, found), sent


def bare(size: int) -> Callable[[], int]:
    """Gradients copied into a bucket, reduced, and copied back, as DistributedDataParallel does it."""
    gradients, bucket = torch.ones(size // 4), torch.empty(size // 4)

    def reduce() -> int:
        bucket.copy_(gradients).div_(2)
        dist.all_reduce(bucket)
        gradients.copy_(bucket)
        return 0

    return reduce


COLUMNS = (
    *("network", "gates", "1 process, ms", "2 that wait, ms", "2 processes, ms", "predicted, ms", "off"),
    *("by MACs, ms", "off", "KB a step", "link, GB/s", "hop, us"),
)


def measure() -> bool:
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"| --- | --- |{' ---: |' * (len(COLUMNS) - 2)}")
    good = True
    for name in NETWORKS:
        whole = 0.0  # seconds of computing in an open step
        for state in STATES:
            (one,) = on_ranks(1, alone, name, state)
            slower = map(max, zip(*on_ranks(2, together, name, state), strict=True))
            silent, talking, small, large, size = slower
            # Two that wait: a forward pass is a third of that, so that it takes `silent` in all.
            link = (LARGE - SMALL) / (large - small)
            here = Cluster(1.0, link, small / 2, overlap=0.0)  # both cores compute: nothing is hidden
            load = Load((silent - here.reduce(0, 2)) / 3, size / 4)
            whole = whole or load.macs
            predicted = here.step(load, 1, 2)
            by_macs = here.step(Load(whole * share(name, state), size / 4), 1, 2)
            off, off_by_macs = talking / predicted - 1, talking / by_macs - 1
            good = good and abs(off) <= OFF and abs(off_by_macs) <= OFF_BY_MACS
            times = [f"{1e3 * v:.1f}" for v in (one, silent, talking, predicted)]
            numbers = [
                f"{100 * off:+.0f} %",
                f"{1e3 * by_macs:.1f}",
                f"{100 * off_by_macs:+.0f} %",
                f"{size / 1e3:,.0f}",
                f"{here.bytes_per_second / 1e9:.2f}",
                f"{1e6 * here.latency:.0f}",
            ]
            print(f"| {' | '.join([name, state, *times, *numbers])} |", flush=True)
    return good


# -- run out on paper -------------------------------------------------------------------------------------


def load_of(model: nn.Module, size: int) -> Load:
    return Load(count_macs(model, torch.zeros(1, 3, size, size)), count_parameters(model))


def predict() -> None:
    resnet50 = load_of(models.resnet50(), 224)
    cases = {
        # The paper's survivors at log gamma -250.
        "ResNet-110": (
            load_of(models.resnet110(), 32),
            load_of(models.resnet(blocks=(4, 6, 9), transitions=False), 32),
            Run(50_000, 8, 182, 105),
            Cluster(2e12, 1.25e9, 20e-6),
        ),
        # The paper's 2.80 G and 17.94 M.
        "ResNet-50": (
            resnet50,
            Load(2.80e9, 17.94e6),
            Run(1_281_167, 32, 90, 35),
            Cluster(2e13, 1.25e9, 20e-6),
        ),
    }
    for name, (dense, end, run, cluster) in cases.items():
        print(
            f"\n{name}: {dense.macs / 1e6:,.0f} -> {end.macs / 1e6:,.0f} M MACs, "
            f"{dense.params / 1e6:.2f} -> {end.params / 1e6:.2f} M parameters, {run.batch} images a worker, "
            f"{cluster.speed / 1e12:g} T MAC/s"
        )
        print("\n| workers | dense, h, 1.25 GB/s | pruned | ratio | dense, h, 12.5 GB/s | pruned | ratio |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for workers in (1, 2, 4, 16, 64, 256, 1024):
            cells = []
            for speed in (1.25e9, 12.5e9):
                both = training(Cluster(cluster.speed, speed, cluster.latency), dense, end, run, workers)
                cells += [f"{both[0] / 3600:.4g}", f"{both[1] / 3600:.4g}", f"{both[1] / both[0]:.2f}"]
            print(f"| {workers:,} | {' | '.join(cells)} |")


def main() -> None:
    torch.set_num_threads(1)
    good = measure()
    predict()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
