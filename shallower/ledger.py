"""What a network costs, and what a run cost: parameters, MACs, memory, time, training load.

MACs are those of convolutions and matrix products, counted by PyTorch itself. A training step on one
sample is taken as three times its forward pass, one for the forward and two for the backward.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from shallower.aside import in_mode, no_fast_path, same_dice
from shallower.discovery import run_example
from shallower.estimators import flip, needs_loss
from shallower.gate import Gate
from shallower.pruner import Pruner
from shallower.sharding import gathered_anew

STEP = 3  # forward and backward, in forward passes
WHOLE = "(whole network)"
Example = Tensor | Sequence[Any] | Mapping[str, Any]  # what a model is called with


def count_parameters(model: nn.Module) -> int:
    """The number of trainable and frozen parameters."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, example: Example) -> int:
    """Multiply-accumulates of one sample's forward pass; `example` is a batch, of any size.

    Counted are convolutions, matrix products and attention, as PyTorch's FlopCounterMode knows them; not what
    a fused recurrent layer (nn.LSTM, nn.GRU) does inside.
    """
    with _mode(model, training=False):
        return _macs_now(model, example)


def _macs_now(model: nn.Module, example: Example) -> int:
    size = samples(example)
    # Attention as plain matrix products: the counter does not know the fused operator of every device.
    with _constant(model), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call(model, example)
    return counter.get_total_flops() // (2 * size)


@contextmanager
def _constant(model: nn.Module) -> Iterator[None]:
    """The counter hangs hooks on what requires a gradient, which fails for views of parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        with gathered_anew(model):  # else FSDP2 would go on with what it has gathered without gradients
            yield
    finally:
        for p in trained:
            p.requires_grad_(True)


call = (
    run_example  # the model on a batch: one tensor, a tuple of arguments, or a mapping of keyword arguments
)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def samples(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor."""
    tensors = _tensors(dict(batch) if isinstance(batch, Mapping) else batch)
    if not tensors or tensors[0].ndim == 0 or len(tensors[0]) == 0:
        raise TypeError(
            f"Found a batch of type {type(batch).__name__} without a sample in a tensor. Give at least one, "
            "as the model is called: a tensor, a tuple of arguments, or a dict of keyword arguments."
        )
    return len(tensors[0])


def _two(example: Example) -> Example:
    """Two samples of a batch, in memory of their own: enough to count, and BatchNorm needs two."""
    size = samples(example)
    index = [0, 1 % size]

    def cut(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size
        return leaf[index] if batched else leaf

    return tree_map(cut, dict(example) if isinstance(example, Mapping) else example)


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

    Args:
        pruner: before its first removal, for the dense network is the measure of everything.
        example: what the model is called with: a batch, a tuple of arguments, or a mapping of keyword ones.
        estimator_macs: what an estimator of your own runs in each step, in MACs per sample, if it needs the
            loss; `flip` is known.
    """

    def __init__(self, pruner: Pruner, example: Example, *, estimator_macs: int | None = None) -> None:
        if pruner.events or pruner.finalized:
            raise ValueError(
                f"The pruner has removed {len(pruner.events)} blocks already, so the dense network cannot be "
                "counted. Build the Ledger right after the Pruner; after a resume, give it the load so far: "
                "`ledger.resume(load)`."
            )
        if needs_loss(pruner.estimator) and pruner.estimator is not flip and estimator_macs is None:
            raise ValueError(
                "The pruner's estimator runs the network again in a way that the ledger does not know. Say "
                "what it costs in each step: `Ledger(pruner, example, estimator_macs=...)`."
            )
        self.pruner, self.estimator_macs = pruner, estimator_macs
        self.load = Load()
        self.idle = 1 if all(gate.watching for gate in pruner.gates.values()) else 0
        self.blocks, self.rest = _block_macs(pruner, _two(example))
        self._costs = list(self.blocks.values())
        self._look()

    @property
    def params(self) -> int:
        """Parameters alive."""
        return count_parameters(self.pruner.model)

    @property
    def dense_step(self) -> int:
        """What a training step would take, had nothing been pruned: MACs per sample."""
        return STEP * (self.rest + sum(self._costs))

    def step(self) -> None:
        """Count the training step that `pruner.step()` has just ended."""
        if self.pruner.num_steps != self._seen + 1:
            raise RuntimeError(
                f"The pruner has made {self.pruner.num_steps - self._seen} steps since the ledger's last. "
                "Call `ledger.step()` once after each `pruner.step()`."
            )
        if self.pruner.finalized_at == self._seen:  # since the last look, before the step that is counted now
            self._look()
        active = sum(map(mul, self._open, self._costs))
        alive = sum(map(mul, self._alive, self._costs))
        self.load.dense += self.dense_step
        self.load.survivors += STEP * (self.rest + alive)
        self.load.expected += STEP * (self.rest + sum(map(mul, self._rates, self._costs)))
        self.load.ran += STEP * (self.rest + active) + self.idle * (alive - active) + self._again()
        self._look()

    def _again(self) -> int:
        """The runs of `flip`: the network once, then for every gate what stands above it, with it flipped."""
        if not self.pruner.estimated or not needs_loss(self.pruner.estimator):
            return 0
        if self.estimator_macs is not None:
            return self.estimator_macs
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
        self._seen = self.pruner.num_steps
        self._rates = self.pruner.theta.tolist()
        if gates:
            self._alive = [name in gates for name in self.blocks]
            self._open = [name in gates and gates[name].xi for name in self.blocks]
        else:
            self._alive = self._open = [rate > 0 for rate in self._rates]


def _block_macs(pruner: Pruner, example: Example) -> tuple[dict[str, int], int]:
    """The MACs of every block's branch, and those of everything else: by closing one gate after the other."""
    costs = dict.fromkeys(pruner.names, 0)
    with _all_open(pruner), _mode(pruner.model, training=True):
        total = _macs_now(pruner.model, example)
        for name, gate in pruner.gates.items():
            with _closed(gate):
                costs[name] = total - _macs_now(pruner.model, example)
    return costs, total - sum(costs.values())


def block_costs(pruner: Pruner, example: Example, *, repeats: int = 5) -> list[BlockCost]:
    """What each gated block costs now, counted and measured on a batch; last comes the whole network."""
    few = _two(example)
    model, (macs, rest) = pruner.model, _block_macs(pruner, few)
    rows = []
    with _all_open(pruner):
        kept = _saved_bytes(model, few)
        seconds, whole = _latencies(pruner, example, repeats)
        for name, gate in pruner.gates.items():
            with _closed(gate):
                without = _saved_bytes(model, few)
            params = sum(p.numel() for p in pruner.blocks[name].prunable(gate.module).values())
            rows.append(BlockCost(name, params, macs[name], (kept - without) // 2, seconds[name]))
    total = count_parameters(model), rest + sum(macs.values()), kept // 2, whole
    return [*rows, BlockCost(WHOLE, *total)]


def _saved_bytes(model: nn.Module, example: Example) -> int:
    """What autograd keeps of one training forward, parameters not counted; each memory once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    @torch.compiler.disable  # or it is compiled anew for every kind of tensor that a compiled block keeps
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with _mode(model, training=True), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call(model, example)
        del output
    return sum(seen.values())


def _latencies(pruner: Pruner, example: Example, repeats: int) -> tuple[dict[str, float], float]:
    """The median time of each branch alone, on what its block reads when `example` runs through the model,
    and that of the whole model."""
    device, seconds = next(pruner.model.parameters()).device, {}

    def median(run: Callable[[], Any]) -> float:
        return statistics.median([_timed(run, device) for _ in range(repeats + 1)][1:])

    with _mode(pruner.model, training=False):
        runs = _branches(pruner, example)
        for name in pruner.gates:
            seconds[name] = median(runs[name])
        return seconds, median(partial(call, pruner.model, example))


def _branches(pruner: Pruner, example: Example) -> dict[str, Callable[[], Any]]:
    """Each branch as a function of nothing, on what it reads when `example` runs through the model."""
    for gate in pruner.gates.values():
        gate.heard = []
    call(pruner.model, example)
    heard = {name: gate.heard or [] for name, gate in pruner.gates.items()}
    for gate in pruner.gates.values():
        gate.heard = None
    return {name: partial(_each, runs) for name, runs in heard.items()}


def _each(runs: Sequence[Callable[[], Any]]) -> None:
    for run in runs:
        run()


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that it was given; a CPU already has."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


@contextmanager
def _all_open(pruner: Pruner) -> Iterator[None]:
    """For a while; afterwards no gate waits for the gradients of what has run."""
    before = [(gate, gate.xi, gate.reader.opened) for gate in pruner.gates.values()]
    for gate in pruner.gates.values():
        gate.xi = True
    try:
        yield
    finally:
        for gate, xi, opened in before:
            gate.xi, gate.reader.opened = xi, opened


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
    """All of `model` in one mode for a while: nothing is learned, no statistics move, no dice are rolled."""
    # The operators of the fast path are not counted.
    with no_fast_path(), torch.no_grad(), in_mode(model, training=training), same_dice(model):
        yield
