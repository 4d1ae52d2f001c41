"""The certificate of a run in its folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from shallower.certificate import Certificate, certify
from shallower.data import Task
from shallower.files import write_text
from shallower.recipes import Recipe
from shallower.training.checkpoint import RunError
from shallower.training.result import Result, evaluate, loss_of
from shallower.training.run import Machine, Run

CERTIFICATE = "certificate.json"
AT_ONCE = 1000  # samples, where the size of a batch changes nothing


def recipe_of(folder: Path) -> tuple[Recipe, Result]:
    """The recipe and the result of a finished run."""
    try:
        settings = json.loads((folder / "recipe.json").read_text())
        result = Result.model_validate_json((folder / "result.json").read_text())
        settings.pop("seed")
        return Recipe.model_validate(settings), result
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} holds no finished run ({error.filename} is not there). Finish it: "
            f"`shallower train RECIPE --out {folder} --resume`."
        ) from error
    except (ValueError, KeyError) as error:
        raise RunError(f"{folder} cannot be read as a run: {error}") from error


def certify_run(
    folder: str | Path, task: Task, *, device: str = "auto", steps: int = 30, samples: int = 4096
) -> Certificate:
    """Build the network of the run in `folder` as it was at its end, check it, and write certificate.json."""
    folder = Path(folder)
    recipe, result = recipe_of(folder)
    if recipe.dense:
        raise RunError(f"{folder} is a run without pruning; there is no price to hold its blocks against.")
    flags = {name: bool(result.machine.get(name, False)) for name in ("bf16", "channels_last", "compile")}
    run = Run(recipe, task, seed=result.seed, machine=Machine(device, **flags))
    run.resume(folder)
    assert run.pruner is not None
    run.pruner.finalize(recipe.threshold)
    size = recipe.batch_size if any(isinstance(m, _NormBase) for m in run.model.modules()) else AT_ONCE
    batches = _Passes(run, size)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(task.kind, run.model(batch[0]), batch[1])

    def score() -> float:
        found, accuracy = evaluate(run.model, run.test, task.kind, run.machine.autocast)
        return found if accuracy is None else accuracy

    options: dict[str, Any] = {"curvature_steps": steps, "curvature_samples": samples}
    found = certify(run.model, run.pruner, batches, loss, score=score, **options)
    write_text(folder / CERTIFICATE, json.dumps(found.as_dict(), indent=2))
    return found


class _Passes:
    """The training set, in the same batches on every pass, as it is: nothing cropped, nothing mirrored."""

    def __init__(self, run: Run, size: int) -> None:
        self.run, self.size = run, size

    def __iter__(self) -> Any:
        return iter(self.run.batches("train", self.size, seed=self.run.seed))
