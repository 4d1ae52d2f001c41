"""The folder of a run: what is in it, when it may be used, and what is cleared when a run is replaced."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shallower import store
from shallower.export import FORMS
from shallower.files import PARTS, Unwritten, remove_parts
from shallower.ranks import Ranks
from shallower.training.certified import CERTIFICATE
from shallower.training.checkpoint import CHECKPOINT, RunError
from shallower.training.result import COMPARISON, PAGE, RESULT

FILES = (
    *(CHECKPOINT, RESULT, store.WEIGHTS, store.STRUCTURE, COMPARISON),
    *("metrics.csv", "thetas.csv", "events.jsonl", "costs.csv", "worth.csv"),
    *(CERTIFICATE, PAGE),  # and what was made of the network afterwards
    *(*(name for name, _ in FORMS.values()), "model.onnx.data"),  # ONNX puts large weights beside
)
RECIPE = "recipe.json"  # by which the folder of a run is known
JOB = ".job"  # which torchrun began the run in a folder
BEFORE = (JOB, "log.txt")  # what may be there before the recipe; the log is that of `reproduce`


def check_folder(folder: Path, *, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise RunError(
            "Found --resume and --overwrite, of which one keeps the run in the folder and the other replaces "
            "it. Give one of them."
        )
    if resume or not folder.exists() or not any(folder.iterdir()):
        return
    if not _has_run(folder):
        raise RunError(
            f"{folder} exists and is not empty, and what is in it is no run: it has no recipe.json of one. "
            "Nothing was touched. Choose another folder with --out, or empty it yourself."
        )
    if not overwrite:
        way = "It was stopped before its first checkpoint: replace it by --overwrite"
        if (folder / CHECKPOINT).exists():
            way = "Go on with it by --resume, replace it by --overwrite"
        elif (folder / RESULT).exists():
            way = "It is finished, and its checkpoint is gone. Replace it by --overwrite"
        raise RunError(
            f"{folder} exists and is not empty; it holds a run. {way}, or choose another folder with --out."
        )


def _has_run(folder: Path) -> bool:
    """Whether there is a run, be it one that was killed before it could write its recipe."""
    if all(path.name in BEFORE or path.match(PARTS) for path in folder.iterdir()):
        return True
    try:
        return "seed" in json.loads((folder / RECIPE).read_text())
    except (OSError, ValueError, TypeError):
        return False


def clear(folder: Path, *, replace: bool) -> None:
    """What a killed process has left goes; of a run that is replaced, all that would not be written over."""
    remove_parts(folder)
    if replace:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        if (folder / "dense" / RECIPE).exists():
            shutil.rmtree(folder / "dense")


def begun_by(folder: Path, job: str | None) -> dict[str, bool]:
    """How a job that torchrun has started again goes on: with what it began itself, and with nothing else."""
    marker, ranks = folder / JOB, Ranks()
    mine = job is not None and marker.exists() and marker.read_text() == job
    if not ranks.any(mine):  # the machine that wrote the marker knows itself
        return {}
    found = ranks.any((folder / CHECKPOINT).exists())
    return {"resume": found, "overwrite": not found}


@contextmanager
def on_a_full_disk(folder: Path) -> Iterator[None]:
    """What could not be written is told with the way on, which only a checkpoint makes --resume."""
    try:
        yield
    except Unwritten as error:
        way = (
            "go on with --resume" if (folder / CHECKPOINT).exists() else "start the run anew with --overwrite"
        )
        raise Unwritten(error.errno, f"{error.strerror}, then {way}") from error
