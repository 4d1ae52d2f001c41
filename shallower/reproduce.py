"""Several runs at a time, each a process with one thread; a finished run is not run again."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from shallower.files import write_text
from shallower.training.run import CHECKPOINT

err = Console(stderr=True)


def reproduce_all(
    names: Sequence[str],
    *,
    seeds: int,
    jobs: int,
    sets: Sequence[str],
    runs: Path,
    results: Path,
    data_dir: Path | None,
    flags: Sequence[str] = (),
) -> list[str]:
    """Run every recipe with the seeds 0 to `seeds` - 1; returns the runs that failed.

    `flags` go to `shallower train` as they are.
    """
    words = ["--threads", "1", *flags, *(part for pair in sets for part in ("--set", pair))]
    words += ["--data-dir", str(data_dir)] if data_dir else []
    todo = [(name, seed) for seed in range(seeds) for name in names]

    def one(job: tuple[str, int]) -> str | None:
        name, seed = job
        kept = results / name / f"seed{seed}.json"
        if kept.exists():
            return None
        folder = runs / name / f"seed{seed}"
        if not (folder / "result.json").exists() and _run(name, seed, folder, words) != 0:
            return f"{name} seed {seed}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, (folder / "result.json").read_text())
        err.print(f"{name} seed {seed}: done", highlight=False)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        return [failure for failure in pool.map(one, todo) if failure is not None]


def _run(name: str, seed: int, folder: Path, words: Sequence[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shallower", "train", name, "--seed", str(seed)]
    command += ["--out", str(folder), "--json", *words]
    command += ["--resume"] if (folder / CHECKPOINT).exists() else ["--overwrite"]
    with (folder / "log.txt").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
