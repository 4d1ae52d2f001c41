"""Kill a training run again and again, resume it, and compare its end with that of an undisturbed one.

    python benchmarks/kill.py [KILLS]        # 50

Each kill is a SIGKILL that hit: at a random moment, or at a chosen one while a file is being written. Beside
them, the disk is full and the folder read-only for a while. The run must end with the same weights, rates,
removals and result, to the bit; at no time may there be a file that is written in part, or an epoch be lost
that a checkpoint had kept. Exits with 1 if any of that does not hold.
"""

import csv
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shallower import data, files
from shallower.recipes import Recipe, recipe
from shallower.training import CHECKPOINT, train

FIELDS: dict[str, Any] = {
    "epochs": 8,
    "finalize_epoch": 6,
    "theta_lr": 0.02,
    "log_gamma": -100.0,
    "options": {"inputs": 64, "width": 16, "depth": 4, "outputs": 10},
}
PARTS = ("data", "training", "pruner", "evaluation")
TIMES = {"seconds", "seconds_spent", *(f"seconds_{part}" for part in PARTS)}


def quick() -> Recipe:
    return recipe("digits", FIELDS)


@cache
def digits() -> data.Task:
    return data.load("digits")


def go_on(folder: Path) -> None:
    """Begin the run, or resume it, as a user would after a crash."""
    there = (folder / CHECKPOINT).exists()
    train(quick(), digits(), folder, resume=there, overwrite=not there)


def child(folder: Path, prepare: Callable[[], None]) -> int:
    """A process that goes on with the run. It is forked, so that it need not load PyTorch and data first."""
    digits()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sys.stderr = open(os.devnull, "w")
            prepare()
            go_on(folder)
            code = 0
        except OSError:
            code = 3
        finally:
            os._exit(code)
    return pid


# -- disturbances ---------------------------------------------------------------------------------------


def die_at(function: str, count: int) -> Callable[[], None]:
    """Kill the process in its `count`-th call of a function of the operating system: while it writes."""

    def prepare() -> None:
        own, calls = getattr(os, function), []

        def deadly(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args, **kwargs)

        setattr(os, function, deadly)

    return prepare


def die_half_written(count: int) -> Callable[[], None]:
    """Kill the process when half of a file is on disk."""

    def prepare() -> None:
        own, calls = Path.write_bytes, []

        def deadly(path: Path, content: Any) -> int:
            calls.append(1)
            if len(calls) == count:
                own(path, bytes(content)[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return own(path, content)

        Path.write_bytes = deadly  # type: ignore[method-assign]

    return prepare


def full_disk() -> None:
    """No file may grow beyond a few bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def read_only(folder: Path) -> Callable[[], None]:
    """The folder cannot be written to; root can write everywhere, so it becomes somebody else."""

    def prepare() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)

    folder.chmod(0o555)
    return prepare


# -- the campaign ---------------------------------------------------------------------------------------


def check_files(folder: Path) -> int:
    """Every file can be read; the number of epochs in the checkpoint."""
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    for path in folder.glob("*.csv"):
        text = path.read_text()
        assert not text or text.endswith("\n"), f"{path.name} ends in the middle of a line"
    if not (folder / CHECKPOINT).exists():
        return 0
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    return len(json.loads(state["history"]))


def disturb(folder: Path, kind: int, dice: random.Random, seconds: float) -> tuple[str, bool]:
    """One disturbance: what it was, and whether it hit a run that had not ended before."""
    folder.mkdir(exist_ok=True)
    if kind == 1:
        name, prepare = "between write and rename", die_at("replace", dice.randint(1, 8))
    elif kind == 2:
        name, prepare = "before a file reaches the disk", die_at("fsync", dice.randint(1, 8))
    elif kind == 3:
        name, prepare = "half of a file written", die_half_written(dice.randint(1, 3))
    elif kind == 4:
        name, prepare = "full disk", full_disk
    elif kind == 5:
        name, prepare = "read-only folder", read_only(folder)
    else:
        name, prepare = "at a random moment", lambda: None
    ended = (folder / "result.json").exists()  # what comes now finds nothing left to train
    try:
        pid = child(folder, prepare)
        if kind == 0:
            time.sleep(dice.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        folder.chmod(0o755)
    code = os.waitstatus_to_exitcode(status)
    wanted = 3 if kind in (4, 5) else -signal.SIGKILL
    assert code in (0, wanted), f"{name}: the run ended with {code}"
    return name, code == wanted and not ended


def ends(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    rows = [
        {k: v for k, v in row.items() if k not in TIMES}
        for row in csv.DictReader((folder / "metrics.csv").open())
    ]
    same = ("model.safetensors", "structure.json", "thetas.csv", "events.jsonl", "recipe.json", "worth.csv")
    return {
        "result": {k: v for k, v in result.items() if k not in TIMES},
        "metrics": rows,
        **{name: (folder / name).read_bytes() for name in same},
    }


ORDER = [(0, 1, 0, 4, 0), (0, 2, 0, 5, 0), (0, 3, 0, 1, 0)]  # the disturbances of a run, of the next, ...
KILLS = (
    *("at a random moment", "between write and rename"),
    *("before a file reaches the disk", "half of a file written"),
)


def campaign(kills: int, *, seed: int = 0) -> dict[str, int]:
    """Disturb runs until so many kills have hit; what was done, or AssertionError."""
    torch.set_num_threads(1)
    done: dict[str, int] = {}
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        begun = time.monotonic()
        os.waitpid(child(Path(place) / "undisturbed", lambda: None), 0)
        seconds, expected = time.monotonic() - begun, ends(Path(place) / "undisturbed")
        number = 0
        while sum(done.get(name, 0) for name in KILLS) < kills:
            folder, epochs = Path(place) / f"run{number}", 0
            for kind in ORDER[number % len(ORDER)]:
                name, hit = disturb(folder, kind, dice, seconds / 3)
                done[name] = done.get(name, 0) + hit
                now = check_files(folder)
                assert now >= epochs, f"{name}: {epochs - now} epochs were lost"
                epochs = now
            number += 1
            _, status = os.waitpid(child(folder, lambda: None), 0)
            assert os.waitstatus_to_exitcode(status) == 0, "the run could not be resumed"
            assert ends(folder) == expected, "the run ended in another way"
            assert not list(folder.glob(files.PARTS)), "a part of a file was left"
    return done


def main() -> None:
    kills = int(sys.argv[1]) if sys.argv[1:] else 50
    try:
        done = campaign(kills)
    except AssertionError as error:
        sys.exit(f"does not hold: {error}")
    for name, number in done.items():
        print(f"{number:3d}  {name}")
    hit = sum(number for name, number in done.items() if name in KILLS)
    others = sum(done.values()) - hit
    print(f"{hit} kills and {others} other faults: every run ended as the undisturbed one, to the bit")


if __name__ == "__main__":
    main()
