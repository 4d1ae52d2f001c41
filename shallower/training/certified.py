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
from shallower.training.checkpoint import CHECKPOINT, RunError
from shallower.training.result import RESULT, Result, evaluate, loss_of
from shallower.training.run import Machine, Run

CERTIFICATE = "certificate.json"
AT_ONCE, BATCHES = 1000, 50  # samples at most and batches at least, where a batch's size changes nothing
AS_THEY_ARE = (
    "The network was trained on images that were cropped and mirrored at random, and is checked on them as "
    "they are: O1 to O3 are of that, slightly other problem."
)


def recipe_of(folder: Path) -> tuple[Recipe, Result]:
    """The recipe and the result of a finished run."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise RunError(f"{folder} {what}; give the folder of a finished run, as `shallower train` prints it.")
    try:
        settings = json.loads((folder / "recipe.json").read_text())
        result = Result.model_validate_json((folder / RESULT).read_text())
        settings.pop("seed")
        return Recipe.model_validate(settings), result
    except FileNotFoundError as error:
        raise RunError(
            f"{folder} holds no finished run ({error.filename} is not there). Finish it: "
            f"`shallower train RECIPE --out {folder} --resume`."
        ) from error
    except KeyError as error:
        raise RunError(f"{folder / 'recipe.json'} has no {error}; it was not written by a run.") from error
    except (ValueError, TypeError, OSError) as error:
        raise RunError(f"{folder} cannot be read as a run: {error}") from error


def certify_run(
    folder: str | Path, task: Task, *, device: str = "auto", steps: int = 100, samples: int = 1024
) -> Certificate:
    """Build the network of the run in `folder` as it was at its end, check it, and write certificate.json."""
    folder = Path(folder)
    recipe, result = recipe_of(folder)
    if recipe.dense:
        raise RunError(f"{folder} is a run without pruning; there is no price to hold its blocks against.")
    flags = {name: bool(result.machine.get(name, False)) for name in ("bf16", "channels_last", "compile")}
    if not (folder / CHECKPOINT).is_file():
        raise RunError(
            f"{folder} has no {CHECKPOINT}, which holds the network as it was before it was made plain. "
            f"Train it again: `shallower train {recipe.name} --seed {result.seed}`."
        )
    run = Run(recipe, task, seed=result.seed, machine=Machine(device, **flags))
    run.resume(folder)
    assert run.pruner is not None
    run.pruner.finalize(recipe.threshold)
    norms = any(isinstance(m, _NormBase) for m in run.model.modules())
    size = recipe.batch_size if norms else max(1, min(AT_ONCE, run.size // BATCHES))
    batches = _Passes(run, size)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(task.kind, run.model(batch[0]), batch[1])

    def score() -> float:
        found, accuracy = evaluate(run.model, run.test, task.kind, run.machine.autocast)
        return found if accuracy is None else accuracy

    options: dict[str, Any] = {"curvature_steps": steps, "curvature_samples": samples}
    found = certify(run.model, run.pruner, batches, loss, score=score, **options)
    if recipe.augment:
        found.notes.append(AS_THEY_ARE)
    if run.machine.bf16:
        found.notes.append(
            "The network was trained with bfloat16 autocast, and is checked in full precision."
        )
    write_text(folder / CERTIFICATE, json.dumps(found.as_dict(), indent=2))
    return found


class _Passes:
    """The training set, in the same batches on every pass, as it is: nothing cropped, nothing mirrored."""

    def __init__(self, run: Run, size: int) -> None:
        self.run, self.size = run, size

    def __iter__(self) -> Any:
        return iter(self.run.batches("train", self.size, seed=self.run.seed))
