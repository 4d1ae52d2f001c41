"""Many steps of a tiny network, with removals and resumes: memory, step time and open files must stay flat.

    python benchmarks/soak.py [STEPS]        # 100,000

Half of them are taken by one Pruner, which lives as long as the command and writes a checkpoint to a file
every 500 steps. Between its rounds, others are built, stopped, resumed from a file, pruned and finished.
Exits with 1 if anything grows.
"""

import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from shallower import Pruner, Residual

ROUND, WIDTH = 1000, 8
GROWTH_MIB, SLOWDOWN = 4.0, 1.15


def network(blocks: int) -> nn.Sequential:
    def branch() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return nn.Sequential(
        nn.Linear(4, WIDTH), *(Residual(branch()) for _ in range(blocks)), nn.Linear(WIDTH, 3)
    )


def start(seed: int, blocks: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, Pruner]:
    torch.manual_seed(seed)
    model = network(blocks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"dataset_size": 1000, "log_gamma": -40.0, "theta": 0.5, "theta_lr": 0.01, "tolerance": 0.05}
    return model, optimizer, Pruner(model, optimizer, seed=seed, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner, number: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        x = torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0)).backward()
        optimizer.step()
        pruner.step()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Pruner, path: Path) -> None:
    torch.save([part.state_dict() for part in (pruner, model, optimizer)], path)


def one_round(seed: int, path: Path) -> int:
    """Half of the steps, a checkpoint, the other half in new objects; removals."""
    model, optimizer, pruner = start(seed)
    steps(model, optimizer, pruner, ROUND // 4, seed)
    save(model, optimizer, pruner, path)
    model, optimizer, pruner = start(seed)
    for part, state in zip((pruner, model, optimizer), torch.load(path, weights_only=True), strict=True):
        part.load_state_dict(state)
    steps(model, optimizer, pruner, ROUND // 4, seed + 1)
    pruner.finalize()
    pruner.finish()
    return len(pruner.events)


class Long:
    """One training that never ends; of its six blocks two go, in the first rounds."""

    def __init__(self) -> None:
        self.training = start(0, blocks=6)
        self.pruner = self.training[2]
        self.pruner.log_gamma = lambda step: -1e-9  # whatever helps at all stays
        self.rounds = 0

    def round(self, path: Path) -> float:
        """CPU seconds of a step: the process's own, whatever else the machine does."""
        begun = time.process_time()
        steps(*self.training, ROUND // 2, self.rounds)
        spent = time.process_time() - begun
        save(*self.training, path)
        self.pruner.theta.clamp_(min=0.5)  # none that hardly matters drifts to its end
        self.pruner.theta.mul_(self.pruner._alive)
        if self.rounds < 2:
            self.pruner.theta[self.rounds] = 0.0  # it goes at the next step
        self.rounds += 1
        return spent / (ROUND // 2)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    torch.set_num_threads(1)
    rounds = max(8, int(sys.argv[1]) // ROUND if sys.argv[1:] else 100)
    memory, seconds, handles, removals = [], [], [], 0
    long = Long()
    with tempfile.TemporaryDirectory() as place:
        for number in range(rounds):
            seconds.append(long.round(Path(place) / "long.pt"))
            removals += one_round(number, Path(place) / "short.pt")
            gc.collect()
            memory.append(resident_mib())
            handles.append(open_files())
    removals += len(long.pruner.events)
    quarter = rounds // 4
    # The first quarter fills PyTorch's own pools, and loses blocks.
    grown = median(memory[-quarter:]) - median(memory[quarter : 2 * quarter])
    slower = median(seconds[-quarter:]) / median(seconds[quarter : 2 * quarter])
    rows = [
        ("steps", f"{rounds * ROUND:,}", ""),
        ("blocks removed", f"{removals:,}", "more than 0"),
        ("resumes", f"{rounds:,}", ""),
        ("memory, last quarter against second, MiB", f"{grown:+.1f}", f"at most {GROWTH_MIB:g}"),
        ("step time, last quarter against second", f"{slower:.3f}", f"at most {SLOWDOWN:g}"),
        ("open files, end against beginning", f"{handles[-1] - handles[0]:+d}", "0"),
    ]
    print("| what | found | bound |\n| --- | ---: | ---: |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    good = removals > 0 and grown <= GROWTH_MIB and slower <= SLOWDOWN and handles[-1] == handles[0]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
