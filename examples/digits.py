"""Handwritten digits with a deep residual network, pruned while it trains, beside its dense twin.

Runs in under a minute on one core: `python examples/digits.py` (or `make demo`).
"""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import shallower
from shallower.data import Task, load
from shallower.ledger import Ledger, count_macs, count_parameters
from shallower.models import mlp


@dataclass
class Outcome:
    """One row of the table."""

    blocks: int
    accuracy: float
    parameters: int
    macs: int
    load: float  # multiply-accumulates per sample over the whole training
    seconds: float


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    model.eval()
    right = (model(inputs).argmax(1) == labels).float().mean().item()
    model.train()
    return 100 * right


def train(task: Task, *, price: float | None, depth: int, epochs: int, finetune: int, seed: int) -> Outcome:
    """Train one network; with a price, prune it while it trains."""
    torch.manual_seed(seed)
    model = mlp(64, 64, depth, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    loader = task.batches("train", 32, seed=seed)
    example, test = next(iter(loader))[0], next(iter(task.batches("test", len(task.test))))
    pruner = ledger = None
    if price is not None:
        pruner = shallower.Pruner(
            model, optimizer, dataset_size=len(task.train), price=price, theta=0.5, theta_lr=1e-2, seed=seed
        )
        ledger = Ledger(pruner, example)
    dense = 3 * count_macs(model, example) * epochs * len(loader)
    begun = time.perf_counter()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  blocks {task.fields[blocks]}"),
        TimeRemainingColumn(),
    ) as progress:
        bar = progress.add_task("pruned" if pruner else "dense ", total=epochs, loss=0.0, blocks=depth)
        for epoch in range(epochs):
            if epoch == epochs - finetune:
                for group in optimizer.param_groups:
                    group["lr"] = 1e-4
                if pruner:
                    pruner.finalize()
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                if pruner and ledger:
                    pruner.step()
                    ledger.step()
            alive = len(pruner.alive) if pruner else depth
            progress.update(bar, advance=1, loss=loss.item(), blocks=alive)
    net = pruner.finish() if pruner else model
    seconds = time.perf_counter() - begun
    return Outcome(
        blocks=alive,
        accuracy=accuracy(net, *test),
        parameters=count_parameters(net),
        macs=count_macs(net, example),
        load=ledger.load.ran if ledger else dense,
        seconds=seconds,
    )


def main(*, price: float = 0.02, depth: int = 16, epochs: int = 40, finetune: int = 5, seed: int = 0) -> None:
    torch.set_num_threads(1)
    task = load("digits")
    dense = train(task, price=None, depth=depth, epochs=epochs, finetune=finetune, seed=seed)
    pruned = train(task, price=price, depth=depth, epochs=epochs, finetune=finetune, seed=seed)

    table = Table(title=f"digits, {depth} residual blocks, price {price} nats per sample")
    for column in ("", "dense", "pruned", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows: list[tuple[str, float, float, str]] = [
        ("blocks kept", dense.blocks, pruned.blocks, "d"),
        ("test accuracy, %", dense.accuracy, pruned.accuracy, ".2f"),
        ("parameters", dense.parameters, pruned.parameters, ",d"),
        ("MACs per sample", dense.macs, pruned.macs, ",d"),
        ("training MACs per sample", dense.load, pruned.load, ",.0f"),
        ("training seconds", dense.seconds, pruned.seconds, ".1f"),
    ]
    for label, before, after, form in rows:
        ratio = "" if "accuracy" in label else f"{after / before:.2f}"
        table.add_row(label, f"{before:{form}}", f"{after:{form}}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
