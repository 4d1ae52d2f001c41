"""A short run, dense against pruned, step by step in turn: do saved MACs become saved seconds?

Bound: the pruned run takes at most 1 / 0.95 of the seconds that the ledger's load promises. Every eight steps
a block dies, in the three stages in turn: blocks of all stages have as many MACs, but those of the first,
with the fewest channels and the largest images, take the most time for them, those of the last the least.
"""

import copy

import torch
import torch.nn.functional as F
from side_by_side import seconds, verdict
from torch import Tensor, nn

from shallower import Ledger, Pruner, models

THREADS, BATCH, STEPS = 1, 32, 60
DEATHS = ("stage1.2", "stage3.2", "stage2.2", "stage1.1", "stage3.1", "stage2.1")  # those of one width


def step(model: nn.Module, inputs: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = models.resnet20()
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (model, twin))
    pruner = Pruner(model, ours, dataset_size=50_000, log_gamma=-1.0, theta=0.5, theta_lr=1e-9)
    ledger = Ledger(pruner, torch.randn(2, 3, 32, 32))
    spent = {"pruned": 0.0, "dense": 0.0}
    for number in range(-3, STEPS):
        inputs, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

        def pruned(inputs: Tensor = inputs, labels: Tensor = labels) -> None:
            step(model, inputs, labels, ours)
            pruner.step()
            ledger.step()

        took = seconds(pruned), seconds(lambda x=inputs, y=labels: step(twin, x, y, theirs))
        if number == -1:
            ledger.load = type(ledger.load)()  # the first steps only warm up
        if number >= 0:
            spent = {name: spent[name] + t for name, t in zip(spent, took, strict=True)}
        if number > 0 and number % 8 == 0 and number // 8 <= len(DEATHS):  # a block dies now and then
            pruner.theta[pruner.names.index(DEATHS[number // 8 - 1])] = 0.0
    ratio, promised = spent["pruned"] / spent["dense"], ledger.load.ran / ledger.load.dense
    measured = f"{ratio:.3f} of dense; load {promised:.3f}; {promised / ratio:.3f}"
    rows = [("training, ResNet-20: load over seconds", measured, "at least 0.95", promised / ratio >= 0.95)]
    verdict(rows)


if __name__ == "__main__":
    main()
