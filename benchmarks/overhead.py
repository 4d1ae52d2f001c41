"""What gates cost when they are all open: a training step with the pruner, against the network never gated.

Bounds on time: 1.03 for ResNet-56 and a 12-layer transformer encoder, 1.10 for FC-20 at batch 64; on the
bytes that autograd keeps for the backward pass: 1.00. Last, where the time of FC-20's gates goes, and what
the bare arithmetic of the method takes there: no gate, no hook, nothing checked, and wrong as soon as a
gradient is clipped or accumulated.
"""

import copy
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from side_by_side import compare, verdict
from torch import Tensor, nn

from shallower import Pruner, Residual, models
from shallower.optim import ThetaAdam

THREADS = 1
Step = Callable[[], None]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(z)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def encoder(layers: int = 12, width: int = 128) -> nn.Sequential:
    """Pre-norm, attention and MLP as blocks of their own."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks.append(Residual(Attention(width, 4)))
        mlp = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        blocks.append(Residual(nn.Sequential(*mlp)))
    return nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(10))


def plain_step(model: nn.Module, inputs: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def built(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, torch.optim.Optimizer, Pruner, Tensor]:
    """The never gated twin of `model`, its optimiser, the pruner of `model`, and labels."""
    labels = torch.randint(0, 10, (len(inputs),))
    model(inputs)  # lazy layers
    other = copy.deepcopy(model)
    ours, theirs = (
        torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4) for m in (model, other)
    )
    pruner = Pruner(model, ours, dataset_size=50_000, log_gamma=-1.0, theta=1.0, theta_lr=1e-12)
    return other, theirs, pruner, labels


def twins(model: nn.Module, inputs: Tensor) -> tuple[Step, Step, int, int]:
    """The gated and the plain step, and the bytes that each keeps for its backward pass."""
    other, theirs, pruner, labels = built(model, inputs)

    def gated() -> None:
        plain_step(model, inputs, labels, pruner.optimizer)
        pruner.step()

    def plain() -> None:
        plain_step(other, inputs, labels, theirs)

    gated()
    return gated, plain, kept_bytes(model, inputs, labels), kept_bytes(other, inputs, labels)


def kept_bytes(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    model.zero_grad()
    return sum(seen.values())


def where(model: nn.Module, inputs: Tensor, steps: int = 600) -> str:
    """What gates add to the parts of a step, in % of the plain step."""
    other, theirs, pruner, labels = built(model, inputs)

    def parts(net: nn.Module, optimizer: torch.optim.Optimizer, last: Step) -> list[float]:
        optimizer.zero_grad()
        marks = [time.perf_counter()]
        loss = F.cross_entropy(net(inputs), labels)
        marks.append(time.perf_counter())
        for run in (loss.backward, optimizer.step, last):
            run()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]

    ours, plain = [], []
    for _ in range(steps):
        ours.append(parts(model, pruner.optimizer, pruner.step))
        plain.append(parts(other, theirs, lambda: None))
    a, b = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in (ours, plain))
    shares = [100 * (x - y) / sum(b) for x, y in zip(a, b, strict=True)]
    return ", ".join(
        f"{name} {share:+.1f} %"
        for name, share in zip(("forward", "backward", "optimiser", "pruner"), shares, strict=True)
    )


def bare(model: nn.Module, inputs: Tensor) -> tuple[Step, Step]:
    """A step with eq. (2), (3) and (5) alone, for blocks that end in one linear layer; and the plain step."""
    other, theirs, pruner, labels = built(model, inputs)
    lasts = [[p for *_, p in gate.reader.last] for gate in pruner.gates.values()]
    pruner._before.remove()
    pruner._ungate()
    theta = torch.full((len(lasts),), 0.5, dtype=torch.float64)
    adam = ThetaAdam([theta], lr=1e-12)

    @torch.no_grad()
    def learn() -> None:
        worth = [sum(torch.dot(p.grad.view(-1), p.view(-1)).item() for p in last) for last in lasts]  # (3)
        theta.grad = pruner.dataset_size * torch.tensor(worth, dtype=theta.dtype) + 1.0  # (2)
        adam.step()
        theta.clamp_(0, 1)  # (5)
        (torch.rand(len(lasts)) < theta).tolist()

    def least() -> None:
        optimizer = pruner.optimizer
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        learn()
        optimizer.step()

    return least, lambda: plain_step(other, inputs, labels, theirs)


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    cases = {
        "ResNet-56, batch 32": (models.resnet56(), torch.randn(32, 3, 32, 32), 1.03, 20),
        "FC-20, batch 64": (models.fc(depth=20), torch.rand(64, 1, 28, 28), 1.10, 400),
        "encoder, 12 layers, batch 16": (encoder(), torch.randn(16, 32, 128), 1.03, 40),
    }
    rows = []
    for name, (model, inputs, bound, pairs) in cases.items():
        gated, plain, kept, kept_plain = twins(model, inputs)
        ratio, base = compare(gated, plain, pairs=pairs)
        measured = f"{ratio} of {1e3 * base:.2f} ms"
        rows.append((f"overhead, {name}: time", measured, f"{bound:.2f}", ratio.median <= bound))
        memory = kept / kept_plain
        rows.append((f"overhead, {name}: kept for backward", f"{memory:.4f}", "1.00", memory <= 1.0))
    torch.manual_seed(0)
    parts = where(models.fc(depth=20), torch.rand(64, 1, 28, 28))
    rows.append(("overhead, FC-20: where it goes", parts, "", None))
    least, base = compare(*bare(models.fc(depth=20), torch.rand(64, 1, 28, 28)), pairs=400)
    rows.append(
        ("overhead, FC-20: the bare arithmetic, nothing checked", f"{least} of {1e3 * base:.2f} ms", "", None)
    )
    verdict(rows)


if __name__ == "__main__":
    main()
