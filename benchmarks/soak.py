"""Many steps of a tiny network, with removals and resumes: memory, step time and open files must stay flat.

    python benchmarks/soak.py [STEPS]        # 100,000

Exits with 1 if they do not.
"""

import gc
import io
import os
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from shallower import Pruner, Residual

ROUND, WIDTH = 1000, 8
GROWTH_MIB, SLOWDOWN = 8.0, 1.15


def network() -> nn.Sequential:
    def branch() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return nn.Sequential(nn.Linear(4, WIDTH), *(Residual(branch()) for _ in range(4)), nn.Linear(WIDTH, 3))


def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Pruner]:
    torch.manual_seed(seed)
    model = network()
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


def one_round(seed: int) -> tuple[int, float]:
    """Half of the steps, a checkpoint, the other half in new objects; removals, and CPU seconds a step."""
    begun = time.process_time()  # of this process alone, whatever else the machine does
    model, optimizer, pruner = start(seed)
    steps(model, optimizer, pruner, ROUND // 2, seed)
    kept = io.BytesIO()
    torch.save([part.state_dict() for part in (pruner, model, optimizer)], kept)
    kept.seek(0)
    model, optimizer, pruner = start(seed)
    for part, state in zip((pruner, model, optimizer), torch.load(kept, weights_only=True), strict=True):
        part.load_state_dict(state)
    steps(model, optimizer, pruner, ROUND - ROUND // 2, seed + 1)
    pruner.finalize()
    pruner.finish()
    return len(pruner.events), (time.process_time() - begun) / ROUND


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    torch.set_num_threads(1)
    rounds = max(8, int(sys.argv[1]) // ROUND if sys.argv[1:] else 100)
    memory, seconds, handles, removals = [], [], [], 0
    for number in range(rounds):
        removed, each = one_round(number)
        gc.collect()
        removals += removed
        memory.append(resident_mib())
        seconds.append(each)
        handles.append(open_files())
    quarter = rounds // 4
    # The first quarter fills PyTorch's own pools.
    grown = median(memory[-quarter:]) - median(memory[quarter : 2 * quarter])
    slower = median(seconds[-quarter:]) / median(seconds[:quarter])
    rows = [
        ("steps", f"{rounds * ROUND:,}", ""),
        ("blocks removed", f"{removals:,}", "more than 0"),
        ("resumes", f"{rounds:,}", ""),
        ("memory, last quarter against second, MiB", f"{grown:+.1f}", f"at most {GROWTH_MIB:g}"),
        ("step time, last quarter against first", f"{slower:.3f}", f"at most {SLOWDOWN:g}"),
        ("open files, end against beginning", f"{handles[-1] - handles[0]:+d}", "0"),
    ]
    print("| what | found | bound |\n| --- | ---: | ---: |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    good = removals > 0 and grown <= GROWTH_MIB and slower <= SLOWDOWN and handles[-1] == handles[0]
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
