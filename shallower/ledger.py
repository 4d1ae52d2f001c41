"""What a network costs, and what a run cost: parameters, MACs, memory, time, training load.

MACs are those of convolutions and matrix products, counted by PyTorch itself. A training step on one
sample is taken as three times its forward pass, one for the forward and two for the backward.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shallower.estimators import flip
from shallower.gate import Gate
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


@dataclass(frozen=True)
class BlockCost:
    """What one block's branch costs, for each sample: it goes when the block goes."""

    name: str
    params: int
    macs: int
    activations: int  # bytes that a training step keeps for the backward pass
    seconds: float  # measured, of one forward pass of the whole example batch


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
        self.idle = 1 if all(gate.watching for gate in pruner.gates.values()) else 0
        self.blocks, self.rest = _block_macs(pruner, example)
        self._costs = list(self.blocks.values())
        self._look()

    def step(self) -> None:
        """Count the training step that `pruner.step()` has just ended."""
        active = sum(map(mul, self._open, self._costs))
        alive = sum(map(mul, self._alive, self._costs))
        self.load.dense += STEP * (self.rest + sum(self._costs))
        self.load.survivors += STEP * (self.rest + alive)
        self.load.expected += STEP * (self.rest + sum(map(mul, self._rates, self._costs)))
        self.load.ran += STEP * (self.rest + active) + self.idle * (alive - active) + self._again()
        self._look()

    def _again(self) -> int:
        """The runs of `flip`: the network once, then for every gate what stands above it, with it flipped."""
        if self.pruner.estimator is not flip or not self._gated:
            return 0
        costs = [cost for cost, alive in zip(self._costs, self._alive, strict=True) if alive]
        active = [c * o for c, o, alive in zip(self._costs, self._open, self._alive, strict=True) if alive]
        flips = [self.rest + (costs[k] - active[k]) + sum(active[k + 1 :]) for k in range(len(costs))]
        return self.rest + sum(active) + sum(flips)

    def resume(self, load: Load) -> None:
        """Go on from `load`, once the pruner has been resumed."""
        self.load = load
        self._look()

    def _look(self) -> None:
        """The network that the next step will train; after the end of pruning all survivors are open."""
        gates = self.pruner.gates
        self._gated, self._rates = bool(gates), self.pruner.theta.tolist()
        if gates:
            self._alive = [name in gates for name in self.blocks]
            self._open = [name in gates and gates[name].xi for name in self.blocks]
        else:
            self._alive = self._open = [rate > 0 for rate in self._rates]


def _block_macs(pruner: Pruner, example: Tensor) -> tuple[dict[str, int], int]:
    """The MACs of every block's branch, and those of everything else: by closing one gate after the other."""
    costs = dict.fromkeys(pruner.names, 0)
    with _all_open(pruner), _mode(pruner.model, training=True):
        total = _macs_now(pruner.model, example)
        for name, gate in pruner.gates.items():
            with _closed(gate):
                costs[name] = total - _macs_now(pruner.model, example)
    return costs, total - sum(costs.values())


def block_costs(pruner: Pruner, example: Tensor, *, repeats: int = 5) -> list[BlockCost]:
    """What each gated block costs now: counted, and measured on the batch `example`."""
    few = example[:2]
    macs, _ = _block_macs(pruner, few)
    rows = []
    with _all_open(pruner):
        kept = _saved_bytes(pruner.model, few)
        seconds = _latencies(pruner, example, repeats)
        for name, gate in pruner.gates.items():
            with _closed(gate):
                without = _saved_bytes(pruner.model, few)
            params = sum(p.numel() for p in pruner.blocks[name].prunable(gate.module).values())
            rows.append(BlockCost(name, params, macs[name], (kept - without) // len(few), seconds[name]))
    return rows


def _saved_bytes(model: nn.Module, example: Tensor) -> int:
    """What autograd keeps of one training forward, parameters not counted; each memory once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _mode(model, training=True), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(example).sum()
        del loss
    for module in model.modules():
        gate: Any = vars(module).get("shallower_gate")
        if gate is not None:
            gate.clear()
    return sum(seen.values())


def _latencies(pruner: Pruner, example: Tensor, repeats: int) -> dict[str, float]:
    """The median time of each branch alone, on what its block reads when `example` runs through the model."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0]

    handles = [g.module.register_forward_pre_hook(partial(keep, n)) for n, g in pruner.gates.items()]
    seconds = {}
    with _mode(pruner.model, training=False):
        pruner.model(example)
        for handle in handles:
            handle.remove()
        for name, gate in pruner.gates.items():
            z = gate.head(gate.module, inputs.pop(name))
            run = partial(gate.branch, gate.module, z)
            seconds[name] = statistics.median([_timed(run, z.device) for _ in range(repeats + 1)][1:])
    return seconds


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


@contextmanager
def _all_open(pruner: Pruner) -> Iterator[None]:
    draws = {name: gate.xi for name, gate in pruner.gates.items()}
    for gate in pruner.gates.values():
        gate.xi = True
    try:
        yield
    finally:
        for name, gate in pruner.gates.items():
            gate.xi = draws[name]


@contextmanager
def _closed(gate: Gate) -> Iterator[None]:
    """As if the block were gone: a closed gate that watches would still run its branch."""
    watching = gate.watching
    gate.xi = gate.watching = False
    try:
        yield
    finally:
        gate.xi, gate.watching = True, watching


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
