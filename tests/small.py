"""Small networks after some steps of training, with their data and their loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallower import Pruner, Residual

WIDTH = 4
Small = tuple[nn.Sequential, Pruner, list[tuple[Tensor, Tensor]], Any]


def branch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def small(steps: int = 130, *, tolerance: float = 0.3, decay: float = 0.01) -> Small:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(branch()) for _ in range(4)), nn.Linear(WIDTH, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay)
    options: dict[str, Any] = {"theta": 0.5, "theta_lr": 5e-3, "tolerance": tolerance}
    pruner = Pruner(model, optimizer, dataset_size=60, log_gamma=-2.0, **options)
    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0)
    batches = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 60, 20)]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for step in range(steps):
        optimizer.zero_grad()
        loss(batches[step % 3]).backward()
        optimizer.step()
        pruner.step()
    return model, pruner, batches, loss


def finalized(**options: Any) -> Small:
    model, pruner, batches, loss = small(**options)
    pruner.finalize(0.3)
    assert 2 <= len(pruner.alive) < 4
    return model, pruner, batches, loss


def normed() -> Small:
    """Two blocks with BatchNorm, and a dropout."""
    torch.manual_seed(0)
    blocks = [
        Residual(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)))
        for _ in range(2)
    ]
    model = nn.Sequential(*blocks, nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    pruner = Pruner(model, optimizer, dataset_size=60, log_gamma=-1.0, theta=1.0, theta_lr=1e-6)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    batches = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 60, 20)]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for step in range(60):
        optimizer.zero_grad()
        loss(batches[step % 3]).backward()
        optimizer.step()
        pruner.step()
    pruner.finalize()
    with torch.no_grad():
        for name in "01":  # so that what follows sees whether they are there
            model.get_submodule(name).branch[3].weight.mul_(5.0)
    return model, pruner, batches, loss
