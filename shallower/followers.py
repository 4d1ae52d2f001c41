"""Copies of a gated model that go along with it, as an average of its weights does (EMA)."""

from collections.abc import Mapping, Sequence

from torch import nn

from shallower.absorption import absorb
from shallower.fitting import AnyBlock, cut, fit, fitted, take_off
from shallower.gate import Gate
from shallower.split import Block


class Follower:
    """A copy with gates of its own that are never drawn: in evaluation it is the mean network, too."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, AnyBlock],
        thetas: Mapping[str, float],
        unaliased: set[str],
    ) -> None:
        self.model, self.blocks, self.unaliased = model, blocks, unaliased
        self.gates = {name: self._gate(name, rate) for name, rate in thetas.items()}

    def _gate(self, name: str, rate: float) -> Gate:
        gate = fitted(self.model, self.blocks[name])  # of a model copied with its gates
        if gate is None:
            options = {"watching": False, "free": False, "alias": name not in self.unaliased}
            gate = fit(self.model, self.blocks[name], rate, **options)
        gate.watching, gate.xi, gate.rate = False, True, rate
        return gate

    def rate(self, name: str, value: float) -> None:
        self.gates[name].rate = value

    def cut(self, name: str) -> None:
        del self.gates[name]
        cut(self.model, self.blocks[name], alias=name not in self.unaliased)

    def ungate(self) -> None:
        for name, gate in self.gates.items():
            take_off(gate, self.blocks[name])
        self.gates.clear()

    def finish(self, removed: Sequence[str], survivors: Sequence[Block]) -> None:
        absorb(self.model, removed, survivors)


def check_copy(copy: nn.Module, model: nn.Module) -> None:
    """A follower must have the parameters of the model, by name and shape."""
    ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
    theirs = {name: tuple(p.shape) for name, p in copy.named_parameters()}
    if copy is model or ours != theirs:
        odd = sorted(ours.items() ^ theirs.items())[:3]
        raise ValueError(
            "A follower must be a copy of the model as it is now"
            + (", but it is the model itself. " if copy is model else f"; these parameters differ: {odd}. ")
            + "Make it with copy.deepcopy(model), or pass the `.module` of an AveragedModel."
        )
