"""The last steps of every block, kept as evidence: its rate, the size of its last layer, what it was worth.

w is the last affine map of a branch, the paper's W2: where w is 0, the block is as good as gone. A branch
that does not end in one is taken as a whole.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shallower.sharding import whole

EVERY, KEPT = 50, 40  # a row every so many steps, and so many of them


@dataclass(frozen=True)
class Vital:
    """A block at a step."""

    step: int
    theta: float
    norm: float  # |w|
    change: float  # C1 - C0 in nats over the dataset: a running mean of the estimates so far
    noise: float = math.nan  # the standard error of `change`


class Vitals:
    """Rows of every block, the oldest first; those of a removed one end where it was removed.

    `affine` names the blocks whose branch ends in an affine map; `weights` are of that, or of all the branch.
    """

    def __init__(self, weights: Mapping[str, Sequence[Tensor]], affine: Collection[str] = ()) -> None:
        self.affine = set(affine)
        self.weights = {name: list(found) for name, found in weights.items()}
        self.rows: dict[str, deque[Vital]] = {name: deque(maxlen=KEPT) for name in weights}
        self.change = torch.zeros(len(self.weights), dtype=torch.float64)
        self.square = torch.zeros_like(self.change)  # a running mean of the squared estimates
        self.learned = 0  # how many are in these means
        self._places = {name: place for place, name in enumerate(weights)}

    def learn(self, delta_cost: Tensor) -> None:
        """Take a step's estimates into the running means, over about the last `EVERY` steps that learned."""
        self.learned += 1
        share = max(1 / self.learned, 1 / EVERY)
        self.change.lerp_(delta_cost, share)
        self.square.lerp_(delta_cost.square(), share)

    @property
    def noise(self) -> Tensor:
        """The standard error of `change`: of a plain mean at first, then of one that forgets."""
        if self.learned < 2:
            return torch.full_like(self.change, math.inf)
        share = max(1 / (self.learned - 1), 1 / (2 * EVERY - 2))
        return ((self.square - self.change.square()).clamp_min(0.0) * share).sqrt()

    def note(self, step: int, theta: Mapping[str, float], names: Iterable[str]) -> None:
        """A row for each of `names`, unless it has one of this step."""
        due = [n for n in names if not self.rows[n] or self.rows[n][-1].step != step]
        if not due:
            return
        squares = [sum(whole(w).detach().float().square().sum() for w in self.weights[n]) for n in due]
        norms = torch.stack([torch.as_tensor(square) for square in squares]).sqrt().tolist()
        changes, noises = self.change.tolist(), self.noise.tolist()
        for name, norm in zip(due, norms, strict=True):
            place = self._places[name]
            self.rows[name].append(Vital(step, theta[name], norm, changes[place], noises[place]))

    def forget(self, name: str) -> None:
        """The weights of a block that has gone; its rows stay."""
        self.weights.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        rows = {name: [asdict(row) for row in found] for name, found in self.rows.items() if found}
        return {
            "rows": rows,
            "change": self.change.clone(),
            "square": self.square.clone(),
            "learned": self.learned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, found in self.rows.items():
            found.clear()
            found.extend(Vital(**row) for row in state["rows"].get(name, ()))
        self.change.copy_(state["change"])
        self.square.copy_(state.get("square", torch.full_like(self.square, math.nan)))  # 0.1 has none
        self.learned = state.get("learned", EVERY)
