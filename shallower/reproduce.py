"""Several runs at a time, each a process with one thread; a finished run is not run again."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from shallower.files import write_text
from shallower.recipes import Recipe, changes, label
from shallower.training.checkpoint import CHECKPOINT, RunError, differences, read
from shallower.training.result import RESULT, Result
from shallower.training.stopping import Interrupted, stopping

err = Console(stderr=True)
LONGEST = 180  # bytes of a folder's name; 255 are allowed nearly everywhere


def reproduce_all(
    chosen: Sequence[Recipe],
    *,
    seeds: Iterable[int],
    jobs: int,
    runs: Path,
    results: Path,
    data_dir: Path | None,
    flags: Sequence[str] = (),
) -> list[str]:
    """Run every recipe with every seed; returns the runs that failed.

    `flags` go to `shallower train` as they are. Ctrl-C and SIGTERM are passed on to the runs; when these have
    written their checkpoints, `Interrupted` is raised.
    """
    words = ["--threads", "1", *flags, *(["--data-dir", str(data_dir)] if data_dir else [])]
    every = [(recipe, seed, kept_at(results, recipe, seed)) for seed in seeds for recipe in chosen]
    for recipe, seed, kept in every:
        folder = runs / place(recipe) / f"seed{seed}"
        done = [file for file in (kept, folder / RESULT) if file.exists()]
        for file in done:
            _check(file, recipe, seed, flags)
        if not done and (folder / CHECKPOINT).exists():
            _check_begun(folder / CHECKPOINT, recipe, seed, flags)
    todo = [job for job in every if not job[2].exists()]

    children = Children()

    def one(job: tuple[Recipe, int, Path]) -> str | None:
        recipe, seed, kept = job
        name = place(recipe)
        folder = runs / name / f"seed{seed}"
        if children.signal is not None:
            return None
        if not (folder / RESULT).exists():
            err.print(f"{name} seed {seed}: in {folder}", highlight=False)
            if _run(recipe, seed, folder, words, children) != 0:
                return f"{name} seed {seed}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, (folder / RESULT).read_text())
        err.print(f"{name} seed {seed}: done", highlight=False)
        return None

    with stopping(children.stop) as stopped, ThreadPoolExecutor(jobs) as pool:
        failed = [failure for failure in pool.map(one, todo) if failure is not None]
    if stopped:
        left = sum(not kept.exists() for _, _, kept in todo)
        raise Interrupted(
            f"Stopped; {left} of {len(every)} runs are not finished. The same command goes on with them.",
            stopped[0],
        )
    return failed


class Children:
    """The processes at work, and the signal that was passed on to them."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.signal: int | None = None

    def stop(self, number: int) -> None:
        self.signal = number
        for child in list(self.running):
            child.send_signal(number)

    def run(self, command: Sequence[str], **options: Any) -> int:
        """The command's exit code."""
        with subprocess.Popen(command, **options) as child:
            self.running.add(child)
            if self.signal is not None:  # which came while the child was made
                child.send_signal(self.signal)
            code = child.wait()
            self.running.discard(child)
        return code


def place(recipe: Recipe) -> str:
    """The folder of a setting: what was set beside the recipe is part of it, so that no two share one.

    A name that is longer than file systems take ends in a hash of the setting instead.
    """
    name = re.sub(r"[^\w.=+-]+", "_", label(recipe))
    if len(name.encode()) <= LONGEST:
        return name
    setting = json.dumps(changes(recipe), sort_keys=True)
    digest = hashlib.sha256(setting.encode()).hexdigest()[:16]
    return f"{name.encode()[: LONGEST - 17].decode(errors='ignore')}_{digest}"


def kept_at(results: Path, recipe: Recipe, seed: int) -> Path:
    """Where the result of a run is kept."""
    return results / place(recipe) / f"seed{seed}.json"


def _check(kept: Path, recipe: Recipe, seed: int, flags: Sequence[str]) -> None:
    """A result of the same name may be of an older recipe or another seed, and must not pass for this."""
    try:
        result = Result.model_validate_json(kept.read_text())
    except (ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{kept} is no result of a run; remove it, and the run is made again.") from error
    defaults = {
        name: field.default for name, field in Recipe.model_fields.items()
    }  # of fields that are newer
    found = {**defaults, **result.settings, "bf16": result.machine.get("bf16", False)}
    found |= {"recipe": result.recipe, "seed": result.seed}
    now = {**recipe.settings, "bf16": "--bf16" in flags, "recipe": recipe.name, "seed": seed}
    other = [f"{k}={found.get(k)} (now {v})" for k, v in now.items() if not _same(found.get(k), v)]
    if other:
        raise ValueError(
            f"{kept} was made with other settings: {', '.join(other)}. Remove it, or keep the results of "
            "these settings elsewhere: --results DIR --runs DIR."
        )


def _same(one: Any, other: Any) -> bool:
    """Equal, as far as the name of a folder tells numbers apart."""
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-5) if both else one == other


def _check_begun(path: Path, recipe: Recipe, seed: int, flags: Sequence[str]) -> None:
    """A run that was begun is gone on with, and so must be of these settings."""
    try:
        begun = read(path)
        other = differences(path, begun, recipe, seed)
    except RunError as error:
        raise ValueError(f"{error} Or remove {path.parent}, and the run is made again.") from error
    now = {name: f"--{name.replace('_', '-')}" in flags for name in begun.arithmetic}
    other += [
        f"{name}={begun.arithmetic[name]} (now {on})"
        for name, on in now.items()
        if begun.arithmetic[name] != on
    ]
    if other:
        raise ValueError(
            f"{path} is of a run with other settings: {', '.join(other)}. Finish that run or remove "
            f"{path.parent}, or make the runs of these settings elsewhere: --runs DIR."
        )


def _run(recipe: Recipe, seed: int, folder: Path, words: Sequence[str], children: Children) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shallower", "train", recipe.name, "--seed", str(seed)]
    command += ["--out", str(folder), "--json", *words]
    command += [f"--set={field}={json.dumps(value)}" for field, value in changes(recipe).items()]
    command += ["--resume"] if (folder / CHECKPOINT).exists() else ["--overwrite"]
    with (folder / "log.txt").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return children.run(command, stdout=log, stderr=log, env=environment)
