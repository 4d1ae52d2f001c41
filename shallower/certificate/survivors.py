"""What the paper's optimality conditions ask of a survivor, theta = 1:

    O1   grad^2 C1(w) + lambda >= 0           its last layer is at a minimum, not at a saddle
    O2   C0 - C1 >= -log gamma                it earns its price
    O3   grad C1(w) + lambda w = 0            its last layer is at rest

C1 and C0 are costs over the whole dataset, N times the mean loss, with the block and without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from shallower.certificate.curvature import Eigenvalue, smallest_eigenvalue
from shallower.ledger import samples
from shallower.pruner import Pruner
from shallower.worth import Worth, as_in_training

Loss = Callable[[Any], Tensor]  # the mean loss of `pruner.model` on a batch
Verdict = Literal["earns its keep", "undecided", "should have gone"]
SIGMAS = 1.96  # of a confidence interval of 95 %


@dataclass(frozen=True)
class Survivor:
    """A block that is left, against its conditions; costs in nats over the dataset."""

    block: str
    benefit: float  # O2: C0 - C1
    low: float  # its confidence interval of 95 %
    high: float
    price: float
    estimate: float  # what the first-order estimator makes of the benefit: -w . grad C1
    norm: float  # |w|
    rest: float  # O3: |grad C1 + lambda w| against what single batches and the decay pull; 0 at rest
    curvature: float | None  # O1: the smallest eigenvalue of grad^2 C1 + lambda is at most this ...
    gap: float | None  # ... and, with 95 %, at least that much less
    verdict: Verdict


def verdict(worth: Worth) -> Verdict:
    """By O2: whether the confidence interval of what it earns lies above its price, below, or around it."""
    if worth.benefit - SIGMAS * worth.error > worth.price:
        return "earns its keep"
    return "should have gone" if worth.benefit + SIGMAS * worth.error < worth.price else "undecided"


@dataclass(frozen=True)
class Slope:
    """dC/dp, and the mean over the batches of what |dC/dp|^2 is in each alone."""

    mean: Tensor
    square: float


class Cost:
    """N times the mean loss over a dataset, and its derivatives; nothing of the model changes."""

    def __init__(self, pruner: Pruner, batches: Iterable[Any], loss: Loss) -> None:
        self.pruner, self.batches, self.loss = pruner, batches, loss

    def slopes(self, parameters: Sequence[nn.Parameter]) -> list[Slope]:
        """dC/dp for each of `parameters`."""
        sums, squares = [torch.zeros_like(p) for p in parameters], [0.0] * len(parameters)
        total = 0
        with _trainable(parameters), as_in_training(self.pruner.model):
            for batch in self.batches:
                size = samples(batch)
                found = _gradients(self.loss(batch), parameters)
                for s, g in zip(sums, found, strict=True):
                    s.add_(g, alpha=size)
                here = torch.stack([g.double().square().sum() for g in found]).tolist()
                squares = [old + size * square for old, square in zip(squares, here, strict=True)]
                total += size
        if total == 0:
            raise ValueError("There was no batch to measure on: give a loader that yields at least one.")
        n = self.pruner.dataset_size
        return [Slope(s * (n / total), n * n * q / total) for s, q in zip(sums, squares, strict=True)]

    def curvature(
        self, parameters: Sequence[nn.Parameter], decay: Tensor, limit: int, steps: int
    ) -> Eigenvalue:
        """The smallest eigenvalue of d^2C/dp^2 + lambda, on the first `limit` samples or so."""
        chosen, total = [], 0
        for batch in self.batches:
            chosen.append(batch)
            total += samples(batch)
            if total >= limit:
                break
        shapes = [p.shape for p in parameters]

        def product(v: Tensor) -> Tensor:
            parts = [
                part.view(s) for part, s in zip(v.split([s.numel() for s in shapes]), shapes, strict=True)
            ]
            image = torch.zeros_like(v)
            for batch in chosen:
                first = _gradients(self.loss(batch), parameters, again=True)
                moving = [(g, part) for g, part in zip(first, parts, strict=True) if g.requires_grad]
                along = sum((g * part).sum() for g, part in moving)
                if moving:  # else the loss is linear in them
                    second = _gradients(along, parameters)
                    image += samples(batch) * torch.cat([g.flatten() for g in second])
            return image * (self.pruner.dataset_size / total) + decay * v

        plain = sdpa_kernel(SDPBackend.MATH)  # the fused attention has no second derivative
        with _trainable(parameters), as_in_training(self.pruner.model), plain:
            like = parameters[0].detach()
            return smallest_eigenvalue(product, sum(s.numel() for s in shapes), steps=steps, like=like)

    def differentiate_twice(self, parameters: Sequence[nn.Parameter]) -> None:
        """On one batch, through every operator: asked for single gradients, PyTorch leaves out those that
        cannot, without a word."""
        kept = [(p, p.grad) for p in self.pruner.model.parameters()]
        try:
            self.pruner.model.zero_grad()
            with _trainable(parameters), as_in_training(self.pruner.model), sdpa_kernel(SDPBackend.MATH):
                first = _gradients(self.loss(next(iter(self.batches))), parameters, again=True)
                along = [g.square().sum() for g in first if g.requires_grad]
                if along:
                    torch.stack(along).sum().backward()
        finally:
            for p, gradient in kept:
                p.grad = gradient


def _gradients(value: Any, parameters: Sequence[nn.Parameter], *, again: bool = False) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(value, parameters, create_graph=again, allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))


@contextmanager
def _trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    with torch.enable_grad():
        before = [p.requires_grad for p in parameters]
        for p in parameters:
            p.requires_grad_(True)
        try:
            yield
        finally:
            for p, old in zip(parameters, before, strict=True):
                p.requires_grad_(old)


def decays(optimizer: Optimizer, size: int) -> dict[nn.Parameter, float]:
    """lambda of every parameter: N times the optimiser's weight decay."""
    return {
        p: size * group.get("weight_decay", 0.0) for group in optimizer.param_groups for p in group["params"]
    }


def rest(slopes: Sequence[Slope], pull: Sequence[Tensor]) -> float:
    """|dC/dw + lambda w|, against what a batch alone (rms) and what the decay pulls: 0 at rest, 1 at most.

    The scale shrinks with larger batches: compare networks at the same batch size.
    """
    left = _norm([slope.mean + p for slope, p in zip(slopes, pull, strict=True)])
    scale = sum(slope.square for slope in slopes) ** 0.5 + _norm(pull)
    return left / scale if scale > 0 else 0.0


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt()) if tensors else 0.0


def judge(
    cost: Cost, worth: Worth, slopes: Mapping[nn.Parameter, Slope], *, limit: int, steps: int
) -> Survivor:
    """One survivor against its conditions; `slopes` are those of the whole network."""
    pruner = cost.pruner
    w = [p for p in pruner.vitals.weights[worth.block] if isinstance(p, nn.Parameter)]
    decay = decays(pruner.optimizer, pruner.dataset_size)
    slope, pull = [slopes[p] for p in w], [decay.get(p, 0.0) * p.detach() for p in w]
    found: Eigenvalue | None = None
    if steps > 0:
        flat = torch.cat([torch.full_like(p, decay.get(p, 0.0)).flatten() for p in w]).detach()
        found = cost.curvature(w, flat, limit, steps)  # O1
    return Survivor(
        block=worth.block,
        benefit=worth.benefit,  # O2
        low=worth.benefit - SIGMAS * worth.error,
        high=worth.benefit + SIGMAS * worth.error,
        price=worth.price,
        estimate=-float(sum((s.mean * p.detach()).sum() for s, p in zip(slope, w, strict=True))),
        norm=_norm([p.detach() for p in w]),
        rest=rest(slope, pull),  # O3
        curvature=None if found is None else found.value,
        gap=None if found is None else found.gap,
        verdict=verdict(worth),
    )
