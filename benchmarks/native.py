"""A pruned network against one built at that depth: equal to the bit, and as fast. Bound: 1.02.

The pruned one is finalised and not absorbed: what absorption folds away, the other would still have to run. A
training step is all of it, with the optimiser's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import compare, verdict
from torch import Tensor, nn

from shallower import Pruner, models

THREADS, BATCH, SURVIVORS = 1, 32, (5, 5, 6)  # the paper's ResNet-56 at log gamma -250


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)


def pruned(inputs: Tensor, labels: Tensor) -> Pruner:
    torch.manual_seed(0)
    model = models.resnet56()
    optimizer = optimizer_of(model)
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


def training_step(model: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = optimizer_of(model.train())  # new for both, so that neither brings momentum along

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def same_outputs(when: str, a: nn.Module, b: nn.Module, inputs: Tensor) -> tuple[str, str, str, bool]:
    with torch.no_grad():
        equal = torch.equal(a.eval()(inputs), b.eval()(inputs))
    return f"native, ResNet-56: outputs {when}", "equal" if equal else "differ", "equal", equal


def main() -> None:
    torch.set_num_threads(THREADS)
    inputs, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    net = pruned(inputs, labels).model
    built = native(net)
    rows = [same_outputs("before absorption", net, built, inputs)]
    with torch.no_grad():
        ratio, base = compare(lambda: net(inputs), lambda: built(inputs), pairs=40)
    rows.append(("native, inference", f"{ratio} of {1e3 * base:.0f} ms", "1.02", ratio.median <= 1.02))
    steps = training_step(net, inputs, labels), training_step(built, inputs, labels)
    ratio, base = compare(*steps, pairs=30, warm=2)
    rows.append(("native, training step", f"{ratio} of {1e3 * base:.0f} ms", "1.02", ratio.median <= 1.02))
    rows.append(same_outputs("after these steps", net, built, inputs))
    verdict(rows)


if __name__ == "__main__":
    main()
