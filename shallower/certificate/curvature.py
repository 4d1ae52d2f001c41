"""The smallest eigenvalue of a symmetric matrix that is known by its products with vectors (Lanczos)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Eigenvalue:
    """What Lanczos knows of the smallest eigenvalue after `steps` products.

    The smallest is at most `value`, and some eigenvalue lies within `residual` of it. With a probability of
    95 % over the random start, the smallest is at least `value - gap`.
    """

    value: float
    residual: float
    gap: float
    steps: int
    vector: Tensor


def smallest_eigenvalue(
    product: Product, size: int, *, steps: int = 30, seed: int = 0, like: Tensor | None = None
) -> Eigenvalue:
    """The smallest eigenvalue of the matrix A with `product(v) = A v`, with full reorthogonalisation."""
    if steps < 1:
        raise ValueError(f"Found steps={steps}; Lanczos needs at least one product.")
    device, dtype = (like.device, like.dtype) if like is not None else (torch.device("cpu"), torch.float64)
    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = [(start / start.norm()).to(device, dtype)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, size)):
        image = product(basis[-1])
        diagonal.append(float(torch.dot(image, basis[-1])))
        for _ in range(2):  # once is not enough in floating point
            image = image - torch.stack(basis).T @ (torch.stack(basis) @ image)
        beside.append(float(image.norm()))
        if beside[-1] <= 1e-10 * max(map(abs, diagonal)) or len(basis) == size:
            break  # the space that the start spans is used up
        basis.append(image / beside[-1])
    number = len(diagonal)
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for place, value in enumerate(beside[: number - 1]):
        small[place, place + 1] = small[place + 1, place] = value
    values, vectors = torch.linalg.eigh(small)
    used_up = number == size or len(basis) < number + 1
    residual = 0.0 if used_up else abs(beside[number - 1] * float(vectors[-1, 0]))
    vector = torch.stack(basis[:number]).T @ vectors[:, 0].to(device, dtype)
    gap = 0.0 if number == size else _gap(size, number, float(values[-1] - values[0]))
    return Eigenvalue(float(values[0]), residual, gap, number, vector / vector.norm())


def _gap(size: int, steps: int, spread: float) -> float:
    """How far the smallest eigenvalue may be below, with probability CONFIDENCE over a random start.

    Kuczynski and Wozniakowski (1992): after k steps in n dimensions, the chance that it is further off than e
    times the spread of all eigenvalues is at most 1.648 sqrt(n) exp(-sqrt(e) (2 k - 1)).
    """
    share = (math.log(1.648 * math.sqrt(size) / (1 - CONFIDENCE)) / (2 * steps - 1)) ** 2
    if share >= 1:
        return math.inf
    return share / (1 - share) * spread  # `spread` is that of the values found, at least (1 - e) of the whole
