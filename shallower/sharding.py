"""FSDP2: blocks of a model to which `fully_shard` was applied leave its groups of parameters as well.

Apply `fully_shard` to the blocks and to the model, build the optimiser, then the Pruner. PyTorch has no
call that takes a parameter out of a group, so this file reads what `fully_shard` keeps; it is tested with the
PyTorch of constraints.txt, and says so where another keeps it otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import is_available

from shallower.fitting import AnyBlock
from shallower.split import Block


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this very module."""
    if not is_available():
        return False
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before FSDP2
        return False
    return isinstance(module, FSDPModule)


@contextmanager
def gathered_anew(model: nn.Module) -> Iterator[None]:
    """Whole weights that FSDP2 has kept from before are gathered again, here and afterwards.

    It keeps those of the root after a forward pass, for a backward pass that does not come without gradients.
    """
    parts = [module for module in model.modules() if is_sharded(module)]
    for part in parts:
        part.reshard()  # type: ignore[operator]
    try:
        yield
    finally:
        for part in parts:
            part.reshard()  # type: ignore[operator]


def check_sharded(model: nn.Module, blocks: Mapping[str, AnyBlock]) -> None:
    """A sharded model needs a root, and nothing in it that stays may need the hooks of what leaves."""
    parts = [name for name, module in model.named_modules() if is_sharded(module)]
    if parts and not is_sharded(model):
        raise ValueError(
            f"`fully_shard` was applied to {parts[0]!r}, but not to the model itself, so there is no root "
            "that could let go of what is removed. Apply it to the model, too, last: fully_shard(model)."
        )
    for name, block in blocks.items():
        module = model.get_submodule(block.path)
        if not isinstance(block, Block) or not is_sharded(module):
            continue
        mine = {id(p) for p in block.prunable(module).values()}
        staying = [n for n, p in module.named_parameters() if id(p) not in mine]
        if staying:
            raise ValueError(
                f"`fully_shard` was applied to the block {name!r}, of which {staying[0]} stays when its "
                "branch is removed. Apply it to what leaves and to what stays: fully_shard(block.branch), "
                "not fully_shard(block)."
            )


def leave_groups(model: nn.Module, gone: Sequence[Tensor]) -> None:
    """Take parameters that are pruned out of the groups that are gathered and reduced together."""
    ids = {id(p) for p in gone}
    for state in _states(model):
        try:
            groups = state._fsdp_param_groups
            for group in groups:
                group.fsdp_params = [p for p in group.fsdp_params if id(p.sharded_param) not in ids]
            state._fsdp_param_groups = [group for group in groups if group.fsdp_params]
        except AttributeError as error:
            raise RuntimeError(
                f"This version of PyTorch keeps the groups of fully_shard in another way ({error}); use "
                "shallower.distributed.DataParallel, or the PyTorch that constraints.txt names."
            ) from error


def whole(tensor: Tensor) -> Tensor:
    """A tensor, also if every rank has a part of it; then all of them come here."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def leave_root(module: nn.Module, model: nn.Module) -> None:
    """Let the root forget a module that has left the model."""
    staying = set(map(id, _states(model)))
    for state in _states(module):
        everyone = state._state_ctx.all_states
        if state in everyone and id(state) not in staying:
            everyone.remove(state)


def _states(model: nn.Module) -> Iterable[Any]:
    found = {id(s): s for s in (m._get_fsdp_state() for m in model.modules() if is_sharded(m))}  # type: ignore[operator]
    return list(found.values())
