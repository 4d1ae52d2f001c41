"""What of a model can be pruned, and how much of it that is."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from shallower.blocks import survey
from shallower.fitting import without
from shallower.ledger import Example, count_macs, count_parameters


@dataclass(frozen=True)
class Found:
    """One block: how it was found, and what goes when it goes, in MACs per sample."""

    name: str
    kind: str  # Block: a module with one sum; Strand: one of its sums; Whole: a module that was not followed
    params: int
    macs: int


@dataclass(frozen=True)
class Inspection:
    params: int
    macs: int
    blocks: tuple[Found, ...]
    rejected: dict[str, str]

    @property
    def shares(self) -> tuple[float, float]:
        """The parts of parameters and MACs that can be pruned, in per cent."""
        params, macs = (sum(getattr(block, what) for block in self.blocks) for what in ("params", "macs"))
        return 100 * params / max(self.params, 1), 100 * macs / max(self.macs, 1)


def inspect_model(model: nn.Module, example: Example) -> Inspection:
    """Find the blocks of `model` and count each by leaving it out; the model is left as it was."""
    found = survey(model, example)
    total, blocks = count_macs(model, example), []
    for block in found.blocks:
        with without(model, block):
            macs = total - count_macs(model, example)
        own = block.prunable(model.get_submodule(block.path)).values()
        blocks.append(Found(block.name, type(block).__name__, sum(p.numel() for p in own), macs))
    return Inspection(count_parameters(model), total, tuple(blocks), found.rejected)


def as_json(found: Inspection) -> dict[str, Any]:
    blocks = [{"name": b.name, "kind": b.kind, "params": b.params, "macs": b.macs} for b in found.blocks]
    return {"params": found.params, "macs": found.macs, "blocks": blocks, "rejected": found.rejected}
