"""Which blocks of a model are gated: found by structure, whoever wrote the class, or named by the user."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from shallower.gate import Gated
from shallower.split import Block, NotResidual, split

CONTAINERS = (nn.Sequential.forward, nn.Module.forward)  # a forward that only chains, and none at all


class Survey(NamedTuple):
    """The blocks of a model, and the modules that hold a sum but cannot be gated, with the reason."""

    blocks: list[Block]
    rejected: dict[str, str]


BlockFinder = Callable[[nn.Module], Sequence[Block]]


def find_blocks(model: nn.Module) -> list[Block]:
    """Every residual block of `model`, in the order of `named_modules()`; no example input is needed.

    The innermost residual modules are taken, so a long skip around a stage does not swallow its blocks.
    """
    return survey(model).blocks


def survey(model: nn.Module) -> Survey:
    """`find_blocks`, and beside it what was passed over and why."""
    order = [name for name, _ in model.named_modules()]
    blocks: dict[str, Block] = {}
    rejected: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # children before their parents
        inside = f"{name}." if name else ""
        if any(other.startswith(inside) for other in blocks) or not _candidate(module):
            continue
        try:
            block = split(module, name=name)
            _check_ownership(model, block, module)
            blocks[name] = block
        except NotResidual as no:
            if no.near and not any(other.startswith(inside) for other in rejected):
                rejected[name] = str(no)
    return Survey([blocks[n] for n in order if n in blocks], {n: rejected[n] for n in order if n in rejected})


def _candidate(module: nn.Module) -> bool:
    bare = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    attention = isinstance(module, nn.MultiheadAttention)
    return not (bare or attention or type(module).forward in CONTAINERS) and any(
        True for _ in module.parameters()
    )


def _check_ownership(model: nn.Module, block: Block, module: nn.Module) -> None:
    """A block can only be removed if nothing else in the model needs its parameters."""
    if not block.name:
        raise NotResidual("the model itself is one residual block; wrap it: `nn.Sequential(model)`")
    names = [n for n, m in model.named_modules(remove_duplicate=False) if m is module]
    if len(names) > 1:
        raise NotResidual(f"the same module stands at {' and '.join(names)}; give each place its own copy")
    mine = {id(p) for p in block.prunable(module).values()}
    if not mine:
        raise NotResidual("its branch has no parameters of its own, so there is nothing to prune", near=False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in mine and not name.startswith(f"{block.name}."):
            raise NotResidual(f"its branch shares a parameter with {name}; untie the two to prune the block")


def choose(model: nn.Module, blocks: Sequence[str] | BlockFinder | None) -> Survey:
    """The blocks to gate, or an error that says why there are none."""
    gated = [name for name, module in model.named_modules() if isinstance(module, Gated)]
    if gated:
        raise ValueError(f"{gated} are gated already; use that Pruner, or `finish()` it first.")
    if callable(blocks):
        found = Survey(list(blocks(model)), {})
    else:
        found = survey(model)
        if blocks is not None:
            found = _select(found, blocks)
    if not found.blocks:
        reasons = "".join(f"\n  {name or 'the model'}: {reason}" for name, reason in found.rejected.items())
        raise ValueError(
            "Found no residual block that can be pruned; a block computes tail(skip(z) + branch(z))."
            + (f" These come near:{reasons}" if reasons else "")
            + "\nGive the layers a skip, as in `shallower.Residual(branch, skip, tail)`, or name the "
            "blocks with `blocks=`."
        )
    return found


def _select(found: Survey, names: Sequence[str]) -> Survey:
    by_name = {block.name: block for block in found.blocks}
    for name in names:
        if name not in by_name:
            reason = found.rejected.get(name, "no such residual block was found")
            raise ValueError(f"{name!r} cannot be gated: {reason}. Found were: {list(by_name)}.")
    return Survey([by_name[name] for name in by_name if name in set(names)], found.rejected)
