"""The cost of a network over a dataset, C = N times the mean loss, and its derivatives; nothing changes."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shallower.certificate.curvature import Eigenvalue, smallest_eigenvalue
from shallower.ledger import samples
from shallower.pruner import Pruner
from shallower.worth import as_in_training, rolled, student

Loss = Callable[[Any], Tensor]  # the mean loss of `pruner.model` on a batch


@dataclass(frozen=True)
class Slope:
    """dC/dp, and N^2 times the mean of |dloss/dp|^2 over single samples: what they pull one by one."""

    mean: Tensor
    square: float


class First:
    """The first batches of a dataset, until so many samples are together."""

    def __init__(self, batches: Iterable[Any], limit: int) -> None:
        self.batches, self.limit = batches, limit

    def __iter__(self) -> Iterator[Any]:
        total = 0
        for batch in self.batches:
            yield batch
            total += samples(batch)
            if total >= self.limit:
                return


class Cost:
    """C as a function of some parameters."""

    def __init__(self, pruner: Pruner, batches: Iterable[Any], loss: Loss) -> None:
        self.pruner, self.batches, self.loss = pruner, batches, loss

    def slopes(self, parameters: Sequence[nn.Parameter]) -> list[Slope]:
        """dC/dp for each of `parameters`.

        The gradients of batches vary by S / B, S being the variance of those of single samples: so S is known
        from batches of any size B, without a gradient for each sample.
        """
        sums, squares = [torch.zeros_like(p) for p in parameters], [0.0] * len(parameters)
        total = seen = 0
        with self._differentiable(parameters):
            for batch in self.batches:
                size = samples(batch)
                found = _gradients(self._loss(batch, seen), parameters)
                for s, g in zip(sums, found, strict=True):
                    s.add_(g, alpha=size)
                here = torch.stack([g.double().square().sum() for g in found]).tolist()
                squares = [old + size * square for old, square in zip(squares, here, strict=True)]
                total, seen = total + size, seen + 1
        n, rows = self.pruner.dataset_size, []
        for s, q in zip(sums, squares, strict=True):
            mean = float((s.double() / total).square().sum())
            spread = max(q - total * mean, 0.0) / max(seen - 1, 1)
            rows.append(Slope(s * (n / total), n * n * (mean + spread)))
        return rows

    def curvature(
        self, parameters: Sequence[nn.Parameter], decay: Tensor, limit: int, steps: int
    ) -> Eigenvalue:
        """The smallest eigenvalue of d^2C/dp^2 + lambda, C taken from the first `limit` samples or so."""
        some = list(enumerate(First(self.batches, limit)))
        size, like = sum(p.numel() for p in parameters), parameters[0].detach()
        with self._differentiable(parameters, alone=True):
            product = self._product(parameters, decay, some)
            return smallest_eigenvalue(product, size, steps=steps, like=like, sign=True)

    def bend(
        self, parameters: Sequence[nn.Parameter], decay: Tensor, along: Tensor, seen: int, limit: int
    ) -> tuple[float, float]:
        """v . (d^2C/dp^2 + lambda) v along a unit vector v, on some `limit` samples behind the first `seen`,
        and how far off that may be (95 %). If there are no more, on the whole dataset: then it is exact."""
        along, rows, total, whole = along.to(parameters[0].dtype), [], 0, True
        with self._differentiable(parameters, alone=True):
            for place, batch in enumerate(self.batches):
                if total >= seen + limit:
                    whole = False
                    break
                product = self._product(parameters, decay, [(place, batch)])
                rows.append((total, samples(batch), float(along @ product(along))))
                total += samples(batch)
        rows = rows if whole else [row for row in rows if row[0] >= seen]
        weights = [size for _, size, _ in rows]
        mean = sum(size * value for _, size, value in rows) / sum(weights)
        if whole:
            return mean, 0.0
        if len(rows) < 2:
            return mean, math.inf
        square = sum(size * (value - mean) ** 2 for _, size, value in rows) / sum(weights)
        return mean, student(len(rows) - 1) * math.sqrt(square / (len(rows) - 1))

    def _product(
        self, parameters: Sequence[nn.Parameter], decay: Tensor, batches: Sequence[tuple[int, Any]]
    ) -> Callable[[Tensor], Tensor]:
        """v -> (d^2C/dp^2 + lambda) v, on batches with their places."""
        shapes = [p.shape for p in parameters]

        def product(v: Tensor) -> Tensor:
            split = zip(v.split([s.numel() for s in shapes]), shapes, strict=True)
            parts = [part.view(s) for part, s in split]
            image, total = torch.zeros_like(v), 0
            for place, batch in batches:
                first = _gradients(self._loss(batch, place), parameters, again=True)
                moving = [(g, part) for g, part in zip(first, parts, strict=True) if g.requires_grad]
                along = sum((g * part).sum() for g, part in moving)
                if moving:  # else the loss is linear in them
                    second = _gradients(along, parameters)
                    image += samples(batch) * torch.cat([g.flatten() for g in second])
                total += samples(batch)
            return image * (self.pruner.dataset_size / total) + decay * v

        return product

    def differentiate_twice(self, parameters: Sequence[nn.Parameter]) -> None:
        """On one batch, through every operator: asked for single gradients, PyTorch leaves out those that
        cannot, without a word. Hooks of the user's, which may take a step, hear nothing of it."""
        kept = [(p, p.grad) for p in self.pruner.model.parameters()]
        hooks = [p._post_accumulate_grad_hooks for p, _ in kept if p._post_accumulate_grad_hooks]
        heard = [dict(some) for some in hooks]
        try:
            for some in hooks:
                some.clear()
            self.pruner.model.zero_grad()
            with self._differentiable(parameters):
                first = _gradients(self._loss(next(iter(self.batches)), 0), parameters, again=True)
                along = [g.square().sum() for g in first if g.requires_grad]
                if along:
                    torch.stack(along).sum().backward()
        finally:
            for p, gradient in kept:
                p.grad = gradient
            for some, old in zip(hooks, heard, strict=True):
                some.update(old)

    def _loss(self, batch: Any, place: int) -> Tensor:
        return rolled(self.pruner.model, self.loss, batch, place)

    @contextmanager
    def _differentiable(self, parameters: Sequence[nn.Parameter], *, alone: bool = False) -> Iterator[None]:
        """`parameters` are trained, and `alone` if nothing else is: what runs before them is then cheap."""
        model = self.pruner.model
        before = {p: p.requires_grad for p in [*model.parameters(), *parameters]}
        plain = sdpa_kernel(SDPBackend.MATH)  # the fused attention has no second derivative
        with torch.enable_grad(), as_in_training(model), plain:
            try:
                if alone:
                    for p in before:
                        p.requires_grad_(False)
                for p in parameters:
                    p.requires_grad_(True)
                yield
            finally:
                for p, old in before.items():
                    p.requires_grad_(old)


def _gradients(value: Any, parameters: Sequence[nn.Parameter], *, again: bool = False) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(value, parameters, create_graph=again, allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))
