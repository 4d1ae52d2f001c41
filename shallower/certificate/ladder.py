"""At which price the survivors would go: the trade of depth against loss, without another training.

The block that earns least goes first; then the others are measured again, for they earn more without it. What
is not seen is training: at a higher price the others would learn to do without a block before it goes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from shallower.pruner import Pruner
from shallower.worth import Measured, frozen_norms, measured, without_dropout

Score = Callable[[], float]
Loss = Callable[[Any], Any]


@dataclass(frozen=True)
class Rung:
    """One block less."""

    block: str
    benefit: float  # what it earns when those above have gone, in nats over the dataset
    error: float  # the standard error of `benefit`
    price: float  # the -log gamma from which on it goes: the largest benefit so far
    log_gamma: float  # the common one that asks that price of it
    left: int  # blocks that are left
    loss: float  # the mean loss without it, and without those above
    score: float | None  # of the network then, as it stands


def price_ladder(
    pruner: Pruner,
    batches: Iterable[Any],
    loss: Loss,
    score: Score | None = None,
    *,
    start: Measured | None = None,
) -> list[Rung]:
    """The survivors in the order in which they would go; `score()` rates the model as it then is.

    `start` is what all of them earn, where that is known already, perhaps from more data than `batches`.
    """
    rungs: list[Rung] = []
    multiplier = dict(zip(pruner.names, pruner.multipliers.tolist(), strict=True))
    left, price = list(pruner.alive), 0.0
    found = start
    after = None if start is None else start.loss
    with ExitStack() as gone:
        while left:
            found = measured(pruner, left, batches, loss) if found is None else found
            benefits, errors = found.benefits, found.errors
            worst = min(left, key=lambda name: benefits[name] / multiplier[name])
            price = max(price, benefits[worst] / multiplier[worst])
            after = (found.loss if after is None else after) + benefits[worst] / pruner.dataset_size
            gone.enter_context(pruner.without(worst))
            left.remove(worst)
            now = None
            if score is not None:
                with own_statistics(pruner.model, batches, loss):
                    now = score()
            cells = benefits[worst], errors[worst], price * multiplier[worst], -price
            rungs.append(Rung(worst, *cells, len(left), after, now))
            found = None
    return rungs


@contextmanager
def own_statistics(model: nn.Module, batches: Iterable[Any], loss: Loss) -> Iterator[None]:
    """BatchNorm with statistics of this network, for a while: those that it keeps are of the one with all its
    survivors, and a network without one of them is not that bad."""
    frozen = set(frozen_norms(model))
    found = (m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats)
    norms = [m for m in found if m not in frozen]
    if not norms:
        yield
        return
    kept = [(b, b.clone()) for b in model.buffers()]
    momenta, modes = [m.momentum for m in norms], {m: m.training for m in model.modules()}
    try:
        for m in norms:
            m.reset_running_stats()
            m.momentum = None  # the mean over all batches
        model.train()
        for norm in frozen:
            norm.eval()
        with torch.no_grad(), without_dropout(model):
            for batch in batches:
                loss(batch)
        for module, mode in modes.items():
            module.training = mode
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
        for buffer, old in kept:
            buffer.copy_(old)
