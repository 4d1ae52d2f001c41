"""What a network costs, and what a run cost: parameters, multiply-accumulates, training load.

MACs are those of convolutions and matrix products, counted by PyTorch itself. A training step on one
sample is taken as three times its forward pass, one for the forward and two for the backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shallower.estimators import flip
from shallower.graphs import frozen_statistics
from shallower.pruner import Pruner

STEP = 3  # forward and backward, in forward passes


def count_parameters(model: nn.Module) -> int:
    """The number of trainable and frozen parameters."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of one sample's forward pass; `example` is a batch, of any size."""
    with _mode(model, training=False):
        return _macs_now(model, example)


def _macs_now(model: nn.Module, example: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops() // (2 * len(example))


@dataclass
class Load:
    """Multiply-accumulates per sample, summed over the steps of a run."""

    dense: int = 0  # had nothing been pruned
    survivors: int = 0  # the paper's: every surviving block at its full cost
    expected: float = 0.0  # every block at theta times its cost
    ran: int = 0  # open blocks forward and backward, closed ones forward only, and the estimator's own runs


class Ledger:
    """Adds up the training load of a pruned run, step by step.

    ledger = Ledger(pruner, images)
    ...
        pruner.step()
        ledger.step()
    print(ledger.load.ran / ledger.load.dense)
    """

    def __init__(self, pruner: Pruner, example: Tensor) -> None:
        self.pruner = pruner
        self.load = Load()
        self.idle = all(gate.watching for gate in pruner.gates.values())
        self.blocks, self.rest = _block_macs(pruner, example)
        self._open, self._thetas = self._draws(), pruner.thetas

    def step(self) -> None:
        """Count the training step that `pruner.step()` has just ended."""
        alive = {name: theta for name, theta in self._thetas.items() if name in self._open}
        self.load.dense += STEP * (self.rest + sum(self.blocks.values()))
        self.load.survivors += STEP * (self.rest + sum(self.blocks[name] for name in alive))
        self.load.expected += STEP * (self.rest + sum(t * self.blocks[n] for n, t in alive.items()))
        idle = 1 if self.idle else 0
        self.load.ran += STEP * self.rest + self._again()
        self.load.ran += sum(
            (STEP if is_open else idle) * self.blocks[n] for n, is_open in self._open.items()
        )
        self._open, self._thetas = self._draws(), self.pruner.thetas

    def _again(self) -> int:
        """The runs of `flip`: the network once, then for every gate what stands above it, with it flipped."""
        if self.pruner.estimator is not flip or self.pruner.finalized:
            return 0
        costs = [self.blocks[name] for name in self._open]
        active = [self.blocks[name] if is_open else 0 for name, is_open in self._open.items()]
        flips = [self.rest + (costs[k] - active[k]) + sum(active[k + 1 :]) for k in range(len(costs))]
        return self.rest + sum(active) + sum(flips)

    def resume(self, load: Load) -> None:
        """Go on from `load`, once the pruner has been resumed."""
        self.load = load
        self._open, self._thetas = self._draws(), self.pruner.thetas

    def _draws(self) -> dict[str, bool]:
        """The surviving blocks, and whether each is open now; after the end of pruning all are."""
        gates = self.pruner.gates
        return {name: gates[name].xi if name in gates else True for name in self.pruner.alive}


def _block_macs(pruner: Pruner, example: Tensor) -> tuple[dict[str, int], int]:
    """The MACs of every block's branch, and those of everything else: by closing one gate after the other."""
    draws = {name: gate.xi for name, gate in pruner.gates.items()}
    try:
        for gate in pruner.gates.values():
            gate.xi = True
        costs = dict.fromkeys(pruner.names, 0)
        with _mode(pruner.model, training=True):
            total = _macs_now(pruner.model, example)
            for name, gate in pruner.gates.items():
                gate.xi = False
                costs[name] = total - _macs_now(pruner.model, example)
                gate.xi = True
    finally:
        for name, gate in pruner.gates.items():
            gate.xi = draws[name]
    return costs, total - sum(costs.values())


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All of `model` in one mode for a while, with nothing learned and no statistics moved."""
    modes = {m: m.training for m in model.modules()}
    model.train(training)
    try:
        with torch.no_grad(), frozen_statistics(model.modules()):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
