"""The last steps of every block, kept as evidence: its rate, the size of its last layer, what it was worth.

w is the last affine map of a branch, the paper's W2: where w is 0, the block is as good as gone. A branch
that does not end in one is taken as a whole.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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


class Vitals:
    """Rows of every block, the oldest first; those of a removed one end where it was removed."""

    def __init__(self, weights: Mapping[str, Sequence[Tensor]]) -> None:
        self.weights = {name: list(found) for name, found in weights.items()}
        self.rows: dict[str, deque[Vital]] = {name: deque(maxlen=KEPT) for name in weights}
        self.change = torch.zeros(len(self.weights), dtype=torch.float64)
        self._places = {name: place for place, name in enumerate(weights)}

    def learn(self, delta_cost: Tensor, steps: int) -> None:
        """Take a step's estimates into the running mean, over about the steps between two rows."""
        self.change.lerp_(delta_cost, max(1 / (steps + 1), 1 / EVERY))

    def note(self, step: int, theta: Mapping[str, float], names: Iterable[str]) -> None:
        """A row for each of `names`, unless it has one of this step."""
        due = [n for n in names if not self.rows[n] or self.rows[n][-1].step != step]
        if not due:
            return
        squares = [sum(whole(w).detach().float().square().sum() for w in self.weights[n]) for n in due]
        norms = torch.stack([torch.as_tensor(square) for square in squares]).sqrt().tolist()
        for name, norm in zip(due, norms, strict=True):
            change = self.change[self._places[name]].item()
            self.rows[name].append(Vital(step, theta[name], norm, change))

    def forget(self, name: str) -> None:
        """The weights of a block that has gone; its rows stay."""
        self.weights.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        rows = {name: [asdict(row) for row in found] for name, found in self.rows.items() if found}
        return {"rows": rows, "change": self.change.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, found in self.rows.items():
            found.clear()
            found.extend(Vital(**row) for row in state["rows"].get(name, ()))
        self.change.copy_(state["change"])
