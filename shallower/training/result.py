"""What a run came to."""

import platform
from typing import Any

import torch
from pydantic import BaseModel, model_validator
from torch import Tensor, nn

import shallower
from shallower.data import Loader
from shallower.recipes import Recipe

RESULT = "result.json"
COMPARISON = "against_dense.json"
PAGE = "report.html"  # the page about the run, written by shallower.reports


class Result(BaseModel):
    """`result.json`. Pruning ratios count as the paper does, before skips are absorbed."""

    recipe: str
    label: str = ""  # the recipe and what was set beside it
    seed: int
    settings: dict[str, Any] = {}  # every field of the recipe as it ran
    test_accuracy: float | None  # per cent; None for a regression
    test_loss: float
    test_rmse: float | None  # of a regression, in standard deviations of the target
    layers: int
    blocks: int
    blocks_kept: int
    survivors: list[str]  # their names
    params: int
    params_dense: int
    params_absorbed: int
    macs: int
    macs_dense: int
    macs_absorbed: int
    ppr: float  # per cent of the parameters pruned
    fpr: float  # per cent of the MACs pruned
    training_macs_ratio: float  # what ran, against the dense network: the gates' overhead included
    training_load_ratio: float  # the paper's: every survivor at its full cost
    seconds: float  # of training: data, forward and backward passes, pruner
    seconds_spent: dict[str, float]  # the same in parts, and evaluation
    machine: dict[str, Any] = {}  # device, threads and the like, which seconds depend on
    versions: dict[str, str]

    @model_validator(mode="after")
    def _labelled(self) -> "Result":
        self.label = self.label or self.recipe
        return self


def compare(pruned: Result, dense: Result) -> dict[str, Any]:
    """What the paper claims, measured in one run: the pruned network against its dense twin."""
    accuracies = pruned.test_accuracy, dense.test_accuracy
    difference = None if None in accuracies else accuracies[0] - accuracies[1]  # type: ignore[operator]
    return {
        "training_load_ratio": pruned.training_load_ratio,
        "training_macs_ratio": pruned.training_macs_ratio,
        "seconds_ratio": pruned.seconds / dense.seconds,
        "accuracy_difference": difference,
        "loss_difference": pruned.test_loss - dense.test_loss,
        "pruned": pruned.model_dump(),
        "dense": dense.model_dump(),
    }


def versions() -> dict[str, str]:
    return {
        "shallower": shallower.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def loss_of(recipe_kind: str, output: Tensor, target: Tensor) -> Tensor:
    """The mean negative log-likelihood: categorical, or Gaussian of variance one without its constant."""
    if recipe_kind == "classification":
        return nn.functional.cross_entropy(output, target)
    return 0.5 * (output - target).square().sum(1).mean()


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, kind: str, autocast: Any) -> tuple[float, float | None]:
    """The mean loss, and the accuracy in per cent of a classifier."""
    model.eval()
    total, right, seen = 0.0, 0, 0
    for inputs, labels in loader:
        with autocast():
            output = model(inputs).float()
        total += float(loss_of(kind, output, labels)) * len(labels)
        right += int((output.argmax(1) == labels).sum()) if kind == "classification" else 0
        seen += len(labels)
    model.train()
    return total / seen, 100 * right / seen if kind == "classification" else None


def count_layers(recipe: Recipe, kept: int) -> int:
    return recipe.fixed_layers + recipe.layers_per_block * kept
