"""What each survivor earns: the loss over a whole dataset, with the block and without it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

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
    batches: int = 1000  # that `error` was taken from

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of 95 % of `benefit`; from one batch, everything."""
        if self.batches < 2:
            return -math.inf, math.inf
        reach = student(self.batches - 1) * self.error
        return self.benefit - reach, self.benefit + reach


def student(freedom: int) -> float:
    """The quantile of Student's t that leaves 2.5 % above it, by its expansion around that of the normal."""
    few = (12.706, 4.303, 3.182, 2.776)  # where the expansion has not converged
    if freedom <= len(few):
        return few[freedom - 1]
    z = 1.959964
    terms = [z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96]
    terms.append((3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class Measured:
    """What some blocks earn, each left out alone, in nats over the dataset."""

    benefits: dict[str, float]
    errors: dict[str, float]
    loss: float  # the mean loss with all of them
    batches: int
    samples: int


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
    return priced(pruner, measured(pruner, pruner.alive, batches, loss))


def priced(pruner: Pruner, found: Measured) -> list[Worth]:
    """What was measured, beside what it has to be."""
    prices = (-pruner.log_gamma(pruner.num_steps) * pruner.multipliers).tolist()
    price = dict(zip(pruner.names, prices, strict=True))
    return [
        Worth(name, benefit, found.errors[name], price[name], found.batches)
        for name, benefit in found.benefits.items()
    ]


@torch.no_grad()
def measured(
    pruner: Pruner, names: Sequence[str], batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> Measured:
    """The benefit of each of `names`, and its standard error."""
    sums, squares = [0.0] * len(names), [0.0] * len(names)
    whole, total, seen = 0.0, 0, 0
    with as_in_training(pruner.model):
        for batch in batches:
            size = samples(batch)
            run = partial(rolled, pruner.model, loss, batch, seen)
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
    benefits, errors = {}, {}
    for name, s, square in zip(names, sums, squares, strict=True):
        mean = s / total
        spread = math.sqrt(max(square / total - mean**2, 0.0) / max(seen - 1, 1))
        benefits[name] = pruner.dataset_size * mean
        errors[name] = pruner.dataset_size * spread if seen > 1 else math.inf
    return Measured(benefits, errors, whole / total, seen, total)


def rolled(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, seed: int) -> Tensor:
    """The loss of a batch, whatever is random in it from the same dice each time."""
    with same_dice(model, seed):
        found = loss(batch)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"`loss(batch)` gave {shape}; it must return the mean loss of the batch, one number."
        )
    return found.reshape(())


def _without(pruner: Pruner, name: str, run: Callable[[], Tensor]) -> Tensor:
    with pruner.without(name):
        return run()


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """BatchNorm with the statistics of each batch, unless it alone was put into evaluation mode, as frozen
    ones are; dropout layers off, and nothing learned."""
    kept = frozen_norms(model)
    with in_mode(model, training=True), without_dropout(model):
        for norm in kept:
            norm.eval()
        yield


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Those in evaluation mode in a model that is not."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and model.training and not m.training]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout layers off, for a while."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for layer in layers:
        layer.eval()
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
