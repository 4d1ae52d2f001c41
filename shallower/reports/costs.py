"""What each block of a recipe's network costs, counted on the network before pruning."""

import json
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from shallower import models
from shallower.blocks import find_blocks
from shallower.ledger import count_macs, count_parameters
from shallower.recipes import Recipe
from shallower.split import Block

INPUTS = {
    "digits": (1, 8, 8),
    "diabetes": (10,),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "imagenet": (3, 224, 224),
}


@dataclass(frozen=True)
class Cost:
    """What goes when the block goes; `width` is the number of features or channels that it adds to."""

    name: str
    params: int
    macs: int
    width: int


@dataclass(frozen=True)
class NetworkCost:
    params: int
    macs: int
    blocks: tuple[Cost, ...]


def network_cost(recipe: Recipe) -> NetworkCost:
    """Parameters and MACs of the network of `recipe`, in all and for each block that can be pruned."""
    if recipe.network not in models.__all__ or recipe.task not in INPUTS:
        raise ValueError(
            f"The recipe {recipe.name} has the network {recipe.network!r} and the task {recipe.task!r}; "
            f"there are the networks {', '.join(models.__all__)} and the tasks {', '.join(INPUTS)}."
        )
    try:
        return _counted(recipe.model_dump_json(include={"network", "options", "task"}))
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"The options {recipe.options} do not fit {recipe.network} on {recipe.task}: {error}. "
            "Set others: --set 'options={...}'."
        ) from error


@lru_cache(maxsize=64)
def _counted(text: str) -> NetworkCost:
    """On the meta device: no memory, no arithmetic, and no number drawn from a run that goes on meanwhile."""
    found = json.loads(text)
    with torch.device("meta"):
        model: nn.Module = getattr(models, found["network"])(**found["options"])
        example = torch.zeros(2, *INPUTS[found["task"]])
    blocks = [block for block in find_blocks(model) if isinstance(block, Block)]
    inputs: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(block.name).register_forward_pre_hook(partial(_keep, inputs, block.name))
        for block in blocks
    ]
    macs = count_macs(model, example)
    for handle in handles:
        handle.remove()
    rows = tuple(_cost(block, model.get_submodule(block.name), inputs[block.name]) for block in blocks)
    return NetworkCost(count_parameters(model), macs, rows)


def _keep(inputs: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    inputs[name] = args[0]


def _cost(block: Block, module: nn.Module, z: Tensor) -> Cost:
    own = block.prunable(module).values()
    macs = count_macs(module, z) - count_macs(block.bypass(module), z)
    width = [p.shape[0] for p in own if p.ndim > 1][-1:] or [0]
    return Cost(block.name, sum(p.numel() for p in own), macs, width[0])
