"""A pruned, finished network against one built at that depth: equal to the bit, and as fast. Bound: 1.02."""

import torch
import torch.nn.functional as F
from side_by_side import compare, verdict
from torch import Tensor, nn

from shallower import Pruner, models

THREADS, BATCH, SURVIVORS = 1, 32, (5, 5, 6)  # the paper's ResNet-56 at log gamma -250


def pruned(inputs: Tensor, labels: Tensor) -> Pruner:
    torch.manual_seed(0)
    model = models.resnet56()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta=0.9, theta_lr=1e-12)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    pruner.step()
    for stage, count in enumerate(SURVIVORS, start=1):
        names = [name for name in pruner.names if name.startswith(f"stage{stage}")]
        keep = names[1 if stage > 1 else 0 :][:count]  # a transition is never among the paper's survivors
        for name in names:
            if name not in keep:
                pruner.theta[pruner.names.index(name)] = 0.0
    pruner.finalize()
    return pruner


def native(model: nn.Module) -> nn.Module:
    """Built at that depth; parameters and buffers in the same order as in what was pruned."""
    net = models.resnet(blocks=SURVIVORS, transitions=False)
    values = list(model.state_dict().values())
    net.load_state_dict(dict(zip(net.state_dict(), values, strict=True)))
    return net


def step(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()


def main() -> None:
    torch.set_num_threads(THREADS)
    inputs, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    pruner = pruned(inputs, labels)
    built = native(pruner.model)
    with torch.no_grad():
        equal = torch.equal(pruner.model.eval()(inputs), built.eval()(inputs))
    rows = [("native, ResNet-56: outputs before absorption", "equal" if equal else "differ", "equal", equal)]
    net = pruner.finish()
    with torch.no_grad():
        ratio, base = compare(lambda: net.eval()(inputs), lambda: built.eval()(inputs), pairs=40)
    rows.append(("native, inference", f"{ratio} of {1e3 * base:.0f} ms", "1.02", ratio.median <= 1.02))
    net.train(), built.train()
    ratio, base = compare(
        lambda: step(net, inputs, labels), lambda: step(built, inputs, labels), pairs=30, warm=2
    )
    rows.append(("native, training step", f"{ratio} of {1e3 * base:.0f} ms", "1.02", ratio.median <= 1.02))
    verdict(rows)


if __name__ == "__main__":
    main()
