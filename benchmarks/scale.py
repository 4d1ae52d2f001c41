"""What the pruner itself takes in a step: draw, estimate, theta's update, checks.

Bounds: linear in the number of gates (ten times the gates in at most twelve times the time), and under 2 % of
a step of ResNet-110, which has 54 gates, at the recipes' batch of 128; with 16 images there is no bound. A
part against its whole, so there is no pair to run in turn; towers of all sizes take their steps in turn.

Counted is `pruner.step()`; in the forward pass all that a gate does but run the parts of its block, so its
checks and statistics that must stay, and not the forward pass of a closed branch; in the backward pass the
hooks on last layers and the inner products of closed blocks; before the optimiser's step the pruner's hook,
with zero gradients for closed blocks. Half of the gates are closed. Not counted: what PyTorch takes to call
these (`overhead` and `closed` have it), and a row of evidence that is noted in every 50th step.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import Ratio, seconds, verdict
from torch import Tensor, nn

from shallower import Pruner, Residual, models
from shallower.euler import Reader
from shallower.gate import PARTS, Gate
from shallower.hook import BeforeStep
from shallower.watch import Listener, WatchLater

THREADS, WARM, BATCH, SMALL = 1, 3, 128, 16
Call = Callable[..., Any]


class Stopwatch:
    """Adds up the time in calls that are counted, without that in calls inside of them that are not."""

    def __init__(self) -> None:
        self.spent, self._runs, self._last = 0.0, False, 0.0

    def _switch(self, runs: bool) -> bool:
        now = time.perf_counter()
        self.spent += now - self._last if self._runs else 0.0
        before, self._runs, self._last = self._runs, runs, now
        return before

    def wrap(self, call: Call, *, counted: bool = True) -> Call:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._switch(counted)
            result = call(*args, **kwargs)
            self._switch(before)
            return result

        return timed

    def read(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent


def instrument(watch: Stopwatch) -> None:
    """From here on, `watch` counts what every pruner does beside its steps."""
    run, hooks = Gate.run, Reader._hooks

    def run_timed(gate: Gate, whole: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return run(gate, watch.wrap(whole, counted=False), args, kwargs)

    Gate.run = watch.wrap(run_timed)  # type: ignore[method-assign]
    Reader._hooks = lambda *given: tuple(map(watch.wrap, hooks(*given)))  # type: ignore[method-assign]
    WatchLater.backward = staticmethod(watch.wrap(WatchLater.backward))  # type: ignore[method-assign]
    Listener._hear = watch.wrap(Listener._hear)  # type: ignore[method-assign]
    BeforeStep.__call__ = watch.wrap(BeforeStep.__call__)  # type: ignore[method-assign]


def timed_step(model: nn.Module, inputs: Tensor, watch: Stopwatch) -> Callable[[], tuple[float, float]]:
    """A training step that returns the pruner's seconds, and its own."""
    labels = torch.randint(0, 10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)
    pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-1.0, theta=0.5, theta_lr=1e-12)
    for gate in pruner.gates.values():
        for part in PARTS:
            setattr(gate, part, watch.wrap(getattr(gate, part), counted=False))
    step = watch.wrap(pruner.step)

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step()

    def timed() -> tuple[float, float]:
        whole = seconds(train)
        return watch.read(), whole

    for _ in range(WARM):
        timed()
    return timed


def tower(gates: int) -> nn.Sequential:
    branches = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(gates)]
    for branch in branches:
        nn.init.normal_(branch[-1].weight, std=0.01)  # or a thousand of them multiply up to infinity
    return nn.Sequential(nn.Linear(4, 4), *map(Residual, branches), nn.Linear(4, 10))


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    watch = Stopwatch()
    instrument(watch)
    rows: list[tuple[str, str, str, bool | None]] = []
    sizes = (10, 100, 1000)
    steps = {gates: timed_step(tower(gates), torch.randn(2, 4), watch) for gates in sizes}
    rounds = [{gates: step()[0] for gates, step in steps.items()} for _ in range(40)]
    for few, many in pairwise(sizes):
        ratio = Ratio.of([times[many] / times[few] for times in rounds])
        a, b = (1e3 * Ratio.of([times[gates] for times in rounds]).median for gates in (few, many))
        measured = f"{ratio} times: {a:.2f} and {b:.2f} ms"
        rows.append((f"scale, {few} to {many} gates", measured, "12 times", ratio.median <= 12))
    for batch, count in ((BATCH, 20), (SMALL, 40)):
        step = timed_step(models.resnet110(), torch.randn(batch, 3, 32, 32), watch)
        times = [step() for _ in range(count)]
        share = Ratio.of([100 * own / whole for own, whole in times])
        own, whole = (1e3 * Ratio.of(list(column)).median for column in zip(*times, strict=True))
        measured = f"{share} % ({own:.2f} of {whole:.0f} ms)"
        bound, holds = ("2 %", share.median < 2) if batch == BATCH else ("", None)
        rows.append((f"scale, ResNet-110, 54 gates, batch {batch}", measured, bound, holds))
    verdict(rows)


if __name__ == "__main__":
    main()
