"""The smallest eigenvalue of a symmetric matrix that is known by its products with vectors (Lanczos)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
CONFIDENCE, PATIENCE = 0.95, 30


@dataclass(frozen=True)
class Eigenvalue:
    """What Lanczos knows of the smallest eigenvalue after `steps` products.

    The smallest is at most `value`, and some eigenvalue lies within `residual` of it. With a probability of
    95 % over the random start, the smallest is at least `value - gap`. All up to `rounding`, that of the
    products.
    """

    value: float
    residual: float
    gap: float
    rounding: float
    steps: int
    vector: Tensor


def smallest_eigenvalue(
    product: Product,
    size: int,
    *,
    steps: int = 30,
    seed: int = 0,
    like: Tensor | None = None,
    sign: bool = False,
) -> Eigenvalue:
    """The smallest eigenvalue of the matrix A with `product(v) = A v`, with full reorthogonalisation.

    `product` takes and gives vectors `like` a tensor; all else is done in double precision, for rounding
    makes the basis lose its orthogonality, and values come out that are none. With `sign`, it ends as soon
    as the eigenvalue is known to be positive, or to be negative within 10 %, or after PATIENCE steps if it is
    negative by then, or the rest of them would not show it to be positive.
    """
    if steps < 1:
        raise ValueError(f"Found steps={steps}; Lanczos needs at least one product.")
    device, dtype = (like.device, like.dtype) if like is not None else (torch.device("cpu"), torch.float64)

    def image_of(v: Tensor) -> Tensor:
        return product(v.to(dtype)).double()

    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = (start / start.norm()).to(device)[None]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = image_of(basis[-1])
        diagonal.append(float(torch.dot(image, basis[-1])))
        for _ in range(2):  # once is not enough in floating point
            image = image - basis.T @ (basis @ image)
        beside.append(float(image.norm()))
        values, vectors = _ritz(diagonal, beside)
        value, number = float(values[0]), len(diagonal)
        rounding = 64 * torch.finfo(dtype).eps * float(values.abs().max())
        # The space that the start spans may be used up; a random start has a part in every eigenspace.
        used_up = beside[-1] <= rounding or number == size
        spread = float(values[-1] - values[0])
        residual = abs(beside[-1] * float(vectors[-1, 0]))
        gap = 0.0 if used_up else _gap(size, number, spread)
        known = value - gap > 0 or (value < 0 and residual < 0.1 * -value)
        in_vain = number >= PATIENCE and value < _gap(size, steps, spread)
        if used_up or number == steps or (sign and (known or in_vain)):
            break
        basis = torch.cat([basis, image[None] / beside[-1]])
    vector = basis.T @ vectors[:, 0].to(device)
    vector = vector / vector.norm()
    image = image_of(vector)  # whatever went before, this is a bound, and its error
    value = float(vector @ image)
    residual = float((image - value * vector).norm())
    return Eigenvalue(value, residual, gap, rounding, number, vector)


def _ritz(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of what Lanczos makes of the matrix: tridiagonal, and small."""
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for place, value in enumerate(beside[: len(diagonal) - 1]):
        small[place, place + 1] = small[place + 1, place] = value
    values, vectors = torch.linalg.eigh(small)
    return values, vectors


def _gap(size: int, steps: int, spread: float) -> float:
    """How far the smallest eigenvalue may be below, with probability CONFIDENCE over a random start.

    Kuczynski and Wozniakowski (1992): after k steps in n dimensions, the chance that one end of the spectrum
    is further off than e times its spread is at most 1.648 sqrt(n) exp(-sqrt(e) (2 k - 1)). The spread is
    known from both ends, each of which is so bounded with half of the remaining chance.
    """
    chance = (1 - CONFIDENCE) / 2
    share = (math.log(1.648 * math.sqrt(size) / chance) / (2 * steps - 1)) ** 2
    if share >= 0.5:
        return math.inf
    return share / (1 - 2 * share) * spread  # `spread` is that of the values found: 1 - 2 e of the whole
