"""What the pruner itself takes in a step: draw, estimate, theta's update, checks.

Bounds: linear in the number of gates (ten times the gates in at most twelve times the time), and under 2 % of
a step of ResNet-110, which has 54 gates.
"""

import statistics

import torch
import torch.nn.functional as F
from side_by_side import seconds, verdict
from torch import Tensor, nn

from shallower import Pruner, Residual, models

THREADS = 1


def pruner_seconds(model: nn.Module, inputs: Tensor, *, steps: int) -> tuple[float, float]:
    """The median time of `pruner.step()`, and of all that comes before it in a step."""
    labels = torch.randint(0, 10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta=0.5, theta_lr=1e-12)
    own, rest = [], []

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for _ in range(steps):
        rest.append(seconds(train))
        own.append(seconds(pruner.step))
    return statistics.median(own[1:]), statistics.median(rest[1:])


def tower(gates: int) -> nn.Sequential:
    blocks = [Residual(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) for _ in range(gates)]
    return nn.Sequential(nn.Linear(4, 4), *blocks, nn.Linear(4, 10))


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rows, times = [], {}
    for gates in (10, 100, 1000):
        times[gates], _ = pruner_seconds(tower(gates), torch.randn(2, 4), steps=30)
    for few, many in ((10, 100), (100, 1000)):
        ratio = times[many] / times[few]
        measured = f"{ratio:.1f} times ({1e3 * times[few]:.2f} to {1e3 * times[many]:.2f} ms)"
        rows.append((f"scale, {few} to {many} gates", measured, "12 times", ratio <= 12))
    own, rest = pruner_seconds(models.resnet110(), torch.randn(16, 3, 32, 32), steps=8)
    share = own / (own + rest)
    measured = f"{100 * share:.2f} % ({1e3 * own:.2f} of {1e3 * (own + rest):.0f} ms)"
    rows.append(("scale, ResNet-110, 54 gates, batch 16", measured, "2 %", share < 0.02))
    verdict(rows)


if __name__ == "__main__":
    main()
