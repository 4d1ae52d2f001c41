"""The checkpoint of a run as a file: read without running anything in it, and checked field by field."""

import zipfile
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

from shallower.recipes import Recipe
from shallower.training.result import RESULT

CHECKPOINT = "checkpoint.pt"

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
State = dict[str, Any]


class RunError(RuntimeError):
    """A run that cannot begin or go on; the text says what to do."""


class Amounts(BaseModel):
    """The load of a run so far, as in `ledger.Load`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dense: Annotated[int, Field(gt=0)]
    survivors: Annotated[int, Field(ge=0)]
    expected: Amount
    ran: Annotated[int, Field(ge=0)]


class Checkpoint(BaseModel):
    """What stands in a checkpoint; what PyTorch's own states hold is for those to say who read them."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    recipe: str
    seed: int
    arithmetic: dict[str, bool]
    model: State
    optimizer: State
    scheduler: State
    loader: dict[str, int | bool]
    generator: torch.Tensor
    pruner: State | None
    load: Amounts | None
    history: Json[list[dict[str, Any]]]
    rates: Json[list[dict[str, int | float]]]
    loss: torch.Tensor
    finite: torch.Tensor
    seconds: dict[str, Amount]


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or RunError."""
    try:
        _check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        if (path.parent / RESULT).exists():
            raise RunError(
                f"There is no {path} to resume from: the run is finished, and its checkpoint is gone. "
                "Choose another folder with --out."
            ) from error
        begun = path.parent.is_dir() and any(path.parent.iterdir())
        way = "anew, with --overwrite in place of" if begun else "without"
        raise RunError(f"There is no {path} to resume from; start the run {way} --resume.") from error
    except Exception as error:  # a damaged file may raise anything from inside torch
        raise RunError(f"{path} cannot be read ({error}); start the run anew with --overwrite.") from error
    try:
        return Checkpoint.model_validate(state)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise RunError(
            f"{path} is no checkpoint of a run ({wrong}). Start the run anew with --overwrite."
        ) from error


def differences(path: Path, kept: Checkpoint, recipe: Recipe, seed: int) -> list[str]:
    """In what the run of a checkpoint is another than that of `recipe` and `seed`; remarks do not count."""
    try:
        theirs = Recipe.model_validate_json(kept.recipe)
    except ValueError as error:
        raise RunError(f"{path} has a recipe that cannot be read: {error}. Start the run anew.") from error
    found = {"recipe": theirs.name, "seed": kept.seed, **theirs.settings}
    now = {"recipe": recipe.name, "seed": seed, **recipe.settings}
    return [f"{name}={found[name]} (now {value})" for name, value in now.items() if found[name] != value]


def _check_sums(path: Path) -> None:
    """PyTorch writes a checksum for every part of a file, and does not look at it when it reads."""
    with zipfile.ZipFile(path) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise ValueError(f"its part {wrong} is damaged")
