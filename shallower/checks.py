"""What a user gives a pruner, checked before the model is touched."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shallower.fitting import AnyBlock
from shallower.optim import unknown


def check_options(optimizer: Any, dataset_size: Any, estimator: Any, theta: float, tolerance: float) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Found optimizer={optimizer!r}; the torch optimiser that trains the model is needed."
        )
    if isinstance(dataset_size, bool) or not isinstance(dataset_size, int) or dataset_size <= 0:
        raise ValueError(
            f"Found dataset_size={dataset_size!r}; the number of training samples is needed, because the "
            "price of a block is in nats over the dataset: dataset_size=len(loader.dataset)."
        )
    if not callable(estimator):
        raise TypeError(
            f"Found estimator={estimator!r}; a function is needed: estimator=shallower.flip, or "
            "shallower.first_order, or one of your own."
        )
    if not 0 <= tolerance < theta <= 1:
        raise ValueError(
            f"Found tolerance={tolerance} and theta={theta}; needed 0 <= tolerance < theta <= 1."
        )


def check_real(model: nn.Module, blocks: Mapping[str, AnyBlock]) -> None:
    for block in blocks.values():
        mine = block.prunable(model.get_submodule(block.path))
        odd = [f"{block.path}.{name}" for name, p in mine.items() if p.is_complex()]
        if odd:
            raise ValueError(
                f"{', '.join(odd[:3])} are complex, and the first-order estimate is of real weights. Use "
                "`estimator=shallower.flip`, or leave the block out with `blocks=`."
            )


def check_trainable(model: nn.Module, optimizer: Optimizer, blocks: Mapping[str, AnyBlock]) -> None:
    for block in blocks.values():
        mine = block.prunable(model.get_submodule(block.path))
        strangers = unknown(optimizer, mine)
        if strangers:
            raise ValueError(
                f"The optimizer does not hold {[f'{block.path}.{s}' for s in strangers]}. It must train "
                "every parameter of a gated block: build it from `model.parameters()` of this very model, "
                "set requires_grad=False on what is frozen, or leave the block out with `blocks=`."
            )
