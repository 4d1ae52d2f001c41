"""Fit a gate to a block, take it off, cut the block out: of either kind, a module of its own or a sum."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shallower.gate import GATE, Gate, attach, detach, retire
from shallower.graphs import replace
from shallower.rewrite import WEAVE
from shallower.split import Block
from shallower.weave import Strand, Weave, attach_sum, cut_sum, detach_sum, skipping
from shallower.whole import Whole, attach_whole, empty, pass_by, pass_through

AnyBlock = Block | Strand | Whole


def fit(model: nn.Module, block: AnyBlock, theta: float, **options: bool) -> Gate:
    """Gate `block` in place."""
    module = model.get_submodule(block.path)
    if isinstance(block, Strand):
        _without_nested_tensors(model, block.path)
        return attach_sum(module, block, theta, **options)
    if isinstance(block, Whole):
        return attach_whole(module, block, theta, **options)
    return attach(module, block, theta, **options)


def _without_nested_tensors(model: nn.Module, path: str) -> None:
    """PyTorch's encoder asks its first layer whether all may run on nested tensors; a gated one may not."""
    parts = path.split(".")
    for depth in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:depth]))
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False


def fitted(model: nn.Module, block: AnyBlock) -> Gate | None:
    """The gate of `block`, if it has one, as in a copy of a gated model."""
    held = vars(model.get_submodule(block.path))
    if isinstance(block, Strand):
        weave: Weave | None = held.get(WEAVE)
        return None if weave is None else weave.gates.get(block.index)
    return held.get(GATE)


def take_off(gate: Gate, block: AnyBlock) -> nn.Module:
    """Take the gate off again; the module where it was, which may have been wrapped in the meantime."""
    if isinstance(block, Strand):
        detach_sum(gate.module, block)
    else:
        detach(gate.module)
    return gate.module


def cut(model: nn.Module, block: AnyBlock, *, alias: bool = True) -> None:
    """The block leaves the module tree; skip and tail stay, under their names."""
    module = model.get_submodule(block.path)
    if isinstance(block, Strand):
        cut_sum(module, block, alias=alias)
        return
    if GATE in vars(module):
        detach(module)
    if isinstance(block, Whole):
        pass_by(module, block)
        empty(module)
        return
    replace(model, block.name, block.bypass(module, alias=alias))
    retire(module, block.name)


@contextmanager
def without(model: nn.Module, block: AnyBlock, *, alias: bool = True) -> Iterator[None]:
    """The model as it were if the block were gone, for a while."""
    module = model.get_submodule(block.path)
    if isinstance(block, Strand):
        with skipping(module, block):
            yield
        return
    if isinstance(block, Whole):
        pass_by(module, block)
        try:
            yield
        finally:
            pass_through(module)
        return
    replace(model, block.name, block.bypass(module, alias=alias))
    try:
        yield
    finally:
        replace(model, block.name, module)
