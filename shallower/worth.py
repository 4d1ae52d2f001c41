"""What each survivor earns: the loss over a whole dataset, with the block and without it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shallower.aside import in_mode, same_dice
from shallower.ledger import samples
from shallower.pruner import Pruner


@dataclass(frozen=True)
class Worth:
    """What a block earns and what it has to earn, in nats over the dataset."""

    block: str
    benefit: float  # C0 - C1: the loss without the block less that with it, times N
    error: float  # the standard error of `benefit`, from its spread over the batches
    price: float  # -log gamma: the block earns its keep if its benefit is larger


@torch.no_grad()
def worth(pruner: Pruner, batches: Iterable[Any], loss: Callable[[Any], Tensor]) -> list[Worth]:
    """C0 - C1 of every survivor, one left out at a time, all others in place.

    `loss` runs `pruner.model` on a batch and returns the mean loss: here of inputs and labels,

        worth(pruner, loader, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))

    Call it after `pruner.finalize()` (and fine-tuning) and before `pruner.finish()`. The model runs as in
    training, BatchNorm with the statistics of each batch: those that it keeps are of the network with all its
    survivors, and would count against a network with one less. Dropout layers are off, whatever else is
    random rolls the same dice with the block as without it, and nothing is learned.
    """
    if not pruner.finalized or pruner.finished:
        raise RuntimeError(
            f"The pruner has {'finished' if pruner.finished else 'not been finalised'}. What survivors are "
            "worth is measured between `pruner.finalize()` and `pruner.finish()`."
        )
    found, _ = measured(pruner, pruner.alive, batches, loss)
    prices = (-pruner.log_gamma(pruner.num_steps) * pruner.multipliers).tolist()
    price = dict(zip(pruner.names, prices, strict=True))
    return [Worth(name, *values, price[name]) for name, values in found.items()]


@torch.no_grad()
def measured(
    pruner: Pruner, names: Sequence[str], batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> tuple[dict[str, tuple[float, float]], float]:
    """The benefit of each of `names` and its standard error; and the mean loss with all of them."""
    sums, squares = [0.0] * len(names), [0.0] * len(names)
    whole, total, seen = 0.0, 0, 0
    with as_in_training(pruner.model):
        for batch in batches:
            size = samples(batch)
            run = partial(_run, pruner.model, loss, batch, seen)
            here = run()
            gains = [_without(pruner, name, run) - here for name in names]
            found = torch.stack([here, *gains]).tolist()
            whole += size * found.pop(0)
            sums = [s + size * gain for s, gain in zip(sums, found, strict=True)]
            squares = [s + size * gain * gain for s, gain in zip(squares, found, strict=True)]
            total, seen = total + size, seen + 1
    if seen == 0:
        raise ValueError(
            "There was no batch to measure on: give a loader that yields at least one, and if it is an "
            "iterator, a fresh one."
        )
    rows = {}
    for name, s, square in zip(names, sums, squares, strict=True):
        mean = s / total
        spread = math.sqrt(max(square / total - mean**2, 0.0) / max(seen - 1, 1))
        error = pruner.dataset_size * spread if seen > 1 else math.inf
        rows[name] = pruner.dataset_size * mean, error
    return rows, whole / total


def _run(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, seed: int) -> Tensor:
    with same_dice(model, seed):
        return loss(batch)


def _without(pruner: Pruner, name: str, run: Callable[[], Tensor]) -> Tensor:
    with pruner.without(name):
        return run()


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    with in_mode(model, training=True):
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        yield
