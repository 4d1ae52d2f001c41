"""What counting costs: `ledger.step()` as a share of a training step with a pruner. Bound: 1 %.

A part against its whole and not two ways to do a thing, so there is no pair; steps and counts run in turn.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import seconds, verdict
from torch import Tensor, nn

from shallower import Ledger, Pruner, models

THREADS, STEPS, COUNTS = 1, 30, 2000


def training_step(model: nn.Module, inputs: Tensor, **options: float) -> tuple[Callable[[], None], Ledger]:
    labels = torch.randint(0, 10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta_lr=1e-9, **options)
    ledger = Ledger(pruner, inputs[:2])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        pruner.step()

    return step, ledger


def share(model: nn.Module, inputs: Tensor) -> tuple[float, float, float]:
    """Seconds of one `ledger.step()` and of one training step (medians), and their ratio."""
    step, ledger = training_step(model, inputs)

    def count() -> None:
        for _ in range(COUNTS // STEPS):
            ledger.pruner.num_steps += 1
            ledger.step()

    step(), ledger.step(), count()
    steps, counts = [], []
    for _ in range(STEPS):  # in turn: what slows the machine slows both
        steps.append(seconds(step))
        ledger.step()
        counts.append(seconds(count) / (COUNTS // STEPS))
    a, b = sorted(counts)[STEPS // 2], sorted(steps)[STEPS // 2]
    return a, b, a / b


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    cases = {
        "FC-20, batch 64": (models.fc(depth=20), torch.rand(64, 1, 28, 28)),
        "FC-50, batch 64": (models.fc(depth=50), torch.rand(64, 1, 28, 28)),
        "ResNet-20, batch 32": (models.resnet20(), torch.randn(32, 3, 32, 32)),
        "ResNet-110, batch 8": (models.resnet110(), torch.randn(8, 3, 32, 32)),
    }
    rows = []
    for name, (model, inputs) in cases.items():
        count, step, ratio = share(model, inputs)
        measured = f"{100 * ratio:.3f} % ({1e6 * count:.0f} µs of {1e3 * step:.2f} ms)"
        rows.append((f"ledger, {name}", measured, "1 %", ratio < 0.01))
    verdict(rows)


if __name__ == "__main__":
    main()
