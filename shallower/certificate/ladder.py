"""At which price the survivors would go: the trade of depth against loss, without another training.

The block that earns least goes first; then the others are measured again, for they earn more without it. What
is not seen is training: at a higher price the others would learn to do without a block before it goes.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from shallower.pruner import Pruner
from shallower.worth import measured

Score = Callable[[], float]


@dataclass(frozen=True)
class Rung:
    """One block less."""

    block: str
    benefit: float  # what it earns when those above have gone, in nats over the dataset
    price: float  # the -log gamma from which on it goes: the largest benefit so far
    log_gamma: float  # the common one that asks that price of it
    left: int  # blocks that are left
    loss: float  # the mean loss without it, and without those above
    score: float | None  # of the network then, as it stands


def price_ladder(
    pruner: Pruner, batches: Iterable[Any], loss: Callable[[Any], Any], score: Score | None = None
) -> list[Rung]:
    """The survivors in the order in which they would go; `score()` rates the model as it then is."""
    rungs: list[Rung] = []
    multiplier = dict(zip(pruner.names, pruner.multipliers.tolist(), strict=True))
    left, price = list(pruner.alive), 0.0
    with ExitStack() as gone:
        while left:
            found, whole = measured(pruner, left, batches, loss)
            worst = min(left, key=lambda name: found[name][0] / multiplier[name])
            benefit = found[worst][0]
            price = max(price, benefit / multiplier[worst])
            gone.enter_context(pruner.without(worst))
            left.remove(worst)
            after = whole + benefit / pruner.dataset_size
            now = None if score is None else score()
            rungs.append(Rung(worst, benefit, price * multiplier[worst], -price, len(left), after, now))
    return rungs
