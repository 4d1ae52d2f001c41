"""Steps with a share of the gates closed, against the ideal line. Bound: 1.05, at the recipes' batch of 128.

What a gate costs beside its branch is Python more than arithmetic, so it is a larger share of a smaller
batch: the last row has 16 images, all gates closed, and no bound.

The ideal runs the open blocks natively, forward and backward, and the branches of the closed ones forward
only, for their estimates; its optimiser holds all parameters, because those of closed blocks decay and keep
their momentum. So it has no gates, no draws and no pruner.
"""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from side_by_side import compare, verdict
from torch import Tensor, nn

from shallower import Pruner, find_blocks, models
from shallower.graphs import replace

THREADS, BATCH, SMALL, PAIRS = 1, 128, 16, 8


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)


def step(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    optimizer: torch.optim.Optimizer,
    without: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """`without` are parameters that get no gradient, each with a zero one."""
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    for p, zero in without:
        p.grad = zero
    optimizer.step()


def idle_branches(model: nn.Module, names: list[str], inputs: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """The branches of the closed blocks, with what they read."""
    found: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append((module.branch, args[0].detach()))

    handles = [model.get_submodule(name).register_forward_pre_hook(keep) for name in names]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


def case(share: float, batch: int) -> tuple[Callable[[], None], Callable[[], None]]:
    torch.manual_seed(0)
    model, inputs, labels = models.resnet56(), torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    blocks = find_blocks(model)
    closed = [b.name for k, b in enumerate(blocks) if int((k + 1) * share) > int(k * share)]
    ideal = copy.deepcopy(model)
    idle = idle_branches(ideal, closed, inputs)
    theirs = optimizer_of(ideal)
    zeros = [(p, torch.zeros_like(p)) for name in closed for p in ideal.get_submodule(name).parameters()]
    for block in blocks:
        if block.name in closed:
            replace(ideal, block.name, block.bypass(ideal.get_submodule(block.name)))
    ours = optimizer_of(model)
    pruner = Pruner(model, ours, dataset_size=50_000, log_gamma=-1.0, theta=0.5, theta_lr=1e-12)

    def gated() -> None:
        for name, gate in pruner.gates.items():
            gate.xi = name not in closed
        step(model, inputs, labels, ours)
        pruner.step()

    def plain() -> None:
        step(ideal, inputs, labels, theirs, zeros)
        with torch.no_grad():
            for branch, z in idle:
                branch(z)

    return gated, plain


def main() -> None:
    torch.set_num_threads(THREADS)
    rows: list[tuple[str, str, str, bool | None]] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        ratio, base = compare(*case(share, BATCH), pairs=PAIRS, warm=1)
        what = f"closed, ResNet-56, batch {BATCH}, {100 * share:.0f} % of the gates"
        rows.append((what, f"{ratio} of {1e3 * base:.0f} ms", "1.05", ratio.median <= 1.05))
    ratio, base = compare(*case(1.0, SMALL), pairs=4 * PAIRS, warm=1)
    rows.append((f"closed, ResNet-56, batch {SMALL}, 100 %", f"{ratio} of {1e3 * base:.0f} ms", "", None))
    verdict(rows)


if __name__ == "__main__":
    main()
