"""What gates cost when they are all open: a training step with the pruner, against the network never gated.

Bounds on time: 1.03 for ResNet-56, 1.10 for FC-20 at batch 64 and for a 12-layer transformer encoder; on the
bytes that autograd keeps for the backward pass: 1.00.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import compare, verdict
from torch import Tensor, nn

from shallower import Pruner, Residual, models

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


def twins(model: nn.Module, inputs: Tensor) -> tuple[Step, Step, int, int]:
    """The gated and the plain step, and the bytes that each keeps for its backward pass."""
    labels = torch.randint(0, 10, (len(inputs),))
    model(inputs)  # lazy layers
    other = copy.deepcopy(model)
    ours, theirs = (
        torch.optim.SGD(m.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4) for m in (model, other)
    )
    pruner = Pruner(model, ours, dataset_size=50_000, log_gamma=-1.0, theta=1.0, theta_lr=1e-12)

    def gated() -> None:
        plain_step(model, inputs, labels, ours)
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


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    cases = {
        "ResNet-56, batch 32": (models.resnet56(), torch.randn(32, 3, 32, 32), 1.03, 20),
        "FC-20, batch 64": (models.fc(depth=20), torch.rand(64, 1, 28, 28), 1.10, 400),
        "encoder, 12 layers, batch 16": (encoder(), torch.randn(16, 32, 128), 1.10, 40),
    }
    rows = []
    for name, (model, inputs, bound, pairs) in cases.items():
        gated, plain, kept, kept_plain = twins(model, inputs)
        ratio, base = compare(gated, plain, pairs=pairs)
        measured = f"{ratio} of {1e3 * base:.2f} ms"
        rows.append((f"overhead, {name}: time", measured, f"{bound:.2f}", ratio.median <= bound))
        memory = kept / kept_plain
        rows.append((f"overhead, {name}: kept for backward", f"{memory:.4f}", "1.00", memory <= 1.0))
    verdict(rows)


if __name__ == "__main__":
    main()
