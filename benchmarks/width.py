"""Fewer layers against narrower ones, at equal MACs: latency of ResNet-56 with convolutions as shortcuts.

The narrow networks are Torch-Pruning's (pip install torch-pruning), by the magnitude of groups: one with the
numbers of channels that come out, one with multiples of eight (`round_to=8`), which suit the hardware. All
get about half the MACs of the dense network, at most. Bounds, at every batch size: the shallow one is at
least 0.9 times faster for each time fewer MACs, and no narrow one makes more of them.
"""

import copy
import sys

import torch
from side_by_side import Ratio, compare, verdict
from torch import Tensor, nn

from shallower import count_macs, find_blocks
from shallower.graphs import replace

THREADS, SHARE = 1, 0.5


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        same = inputs == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, z: Tensor) -> Tensor:
        return self.relu(self.shortcut(z) + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(z))))))


def resnet56() -> nn.Sequential:
    blocks, inputs = [], 16
    for width in (16, 32, 64):
        for number in range(9):
            blocks.append(Block(inputs, width, 2 if number == 0 and width > 16 else 1))
            inputs = width
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def narrow(model: nn.Sequential, example: Tensor, macs: int, *, round_to: int | None = None) -> nn.Module:
    """The widest network of Torch-Pruning with at most `macs`, by bisection of its ratio."""
    import torch_pruning as tp

    low, high, found = 0.0, 1.0, model
    for _ in range(8):
        ratio, net = (low + high) / 2, copy.deepcopy(model)
        tp.pruner.MagnitudePruner(
            net,
            example,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=[net[-1]],
            round_to=round_to,
        ).step()
        if count_macs(net, example) <= macs:
            high, found = ratio, net
        else:
            low = ratio
    return found


def shallow(model: nn.Sequential, example: Tensor, macs: int) -> nn.Module:
    """Blocks with identity shortcuts leave from the back of each stage in turn, until `macs` is reached."""
    net = copy.deepcopy(model)
    blocks = [b for b in find_blocks(net) if isinstance(net.get_submodule(b.name).shortcut, nn.Identity)]
    stages = {
        w: [b for b in blocks if net.get_submodule(b.name).conv1.out_channels == w] for w in (16, 32, 64)
    }
    while count_macs(net, example) > macs:
        block = max(stages.values(), key=len).pop()
        replace(net, block.name, block.bypass(net.get_submodule(block.name)))
    return net


def main() -> None:
    try:
        import torch_pruning  # noqa: F401
    except ImportError:
        print("width needs Torch-Pruning: pip install -c constraints.txt --no-deps torch-pruning")
        sys.exit(1)
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    dense, example = resnet56().eval(), torch.randn(2, 3, 32, 32)
    total = count_macs(dense, example)
    half = int(SHARE * total)
    nets = {
        "shallow": shallow(dense, example, half).eval(),
        "narrow": narrow(dense, example, half).eval(),
        "narrow in eights": narrow(dense, example, half, round_to=8).eval(),
    }
    fewer = {name: total / count_macs(net, example) for name, net in nets.items()}
    shares = ", ".join(f"{name} {times:.3f} times fewer" for name, times in fewer.items())
    print(f"MACs: dense {total:,}; {shares}\n")
    rows = []
    for batch, pairs in ((1, 60), (32, 12), (128, 8)):
        inputs = torch.randn(batch, 3, 32, 32)

        def faster(net: nn.Module, inputs: Tensor = inputs, pairs: int = pairs) -> Ratio:
            with torch.inference_mode():
                return compare(lambda: dense(inputs), lambda: net(inputs), pairs=pairs, warm=1)[0]

        found = {name: faster(net) for name, net in nets.items()}
        worth = {name: ratio.median / fewer[name] for name, ratio in found.items()}
        for name, ratio in found.items():
            ours = name == "shallow"
            bound = "at least 0.9 for each" if ours else f"at most {worth['shallow']:.2f} for each"
            holds = worth[name] >= 0.9 if ours else worth[name] <= worth["shallow"]
            measured = f"{ratio} times faster than dense; {worth[name]:.2f} for each time fewer MACs"
            rows.append((f"width, batch {batch}: {name}", measured, bound, holds))
    verdict(rows)


if __name__ == "__main__":
    main()
