"""Does every recipe of a data set start, prune, finalise and resume on the real data?

    python experiments/starts.py [--data cifar10] [--images 512]

Each runs in miniature on the first images of the data set, with theta's rate so high that blocks go in these
few steps: once as a whole, and once stopped after an epoch and resumed, which must end the same to the bit.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from shallower import data
from shallower.recipes import RECIPES, Recipe
from shallower.training import Machine, Result, train

EPOCHS, THETA_LR = 3, 0.15
Row = tuple[str, Result, bool]


class Stop(Exception):
    """Raised after an epoch, in place of a kill."""


def stop(*args: object) -> None:
    raise Stop


def few(task: data.Task, images: int) -> data.Task:
    """The first images of both parts."""
    parts = {
        part: data.Samples(found.inputs[:images], found.labels[:images])
        for part, found in (("train", task.train), ("test", task.test))
        if isinstance(found, data.Samples)
    }
    if len(parts) < 2:
        raise SystemExit(f"{task.name} is not held in memory; take cifar10 or cifar100.")
    return dataclasses.replace(task, **parts)


def tried(recipe: Recipe, task: data.Task) -> Row:
    """The recipe's result, and whether a run that was stopped and resumed ended the same."""
    short = recipe.rescaled(EPOCHS)
    if not recipe.dense:
        short = short.model_copy(update={"theta_lr": THETA_LR, "ramp_epochs": min(short.ramp_epochs, 1)})
    machine = Machine("cpu", channels_last=True)
    with tempfile.TemporaryDirectory() as place:
        whole, parted = Path(place) / "whole", Path(place) / "parted"
        result = train(short, task, whole, machine=machine, worth=False)
        try:
            train(short, task, parted, machine=machine, worth=False, note=stop)
        except Stop:
            train(short, task, parted, machine=machine, worth=False, resume=True)
        one, other = (load_file(folder / "model.safetensors") for folder in (whole, parted))
        same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return recipe.name, result, same


def main() -> None:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--data", default="cifar10")
    found.add_argument("--images", type=int, default=512)
    found.add_argument("--data-dir", type=Path)
    given = found.parse_args()
    task = few(data.load(given.data, given.data_dir), given.images)
    print("| recipe | blocks | left | fPR % | resumed |\n| --- | ---: | ---: | ---: | --- |", flush=True)
    wrong = []
    for recipe in (r for r in RECIPES.values() if r.task == given.data):
        name, result, same = tried(recipe, task)
        blocks, left = result.blocks, result.blocks_kept
        if not same or (not recipe.dense and left == blocks):
            wrong.append(name)
        how = "the same, to the bit" if same else "NOT THE SAME"
        print(f"| {name} | {blocks} | {left} | {result.fpr:.2f} | {how} |", flush=True)
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: nothing was pruned, or a resumed run ended differently")


if __name__ == "__main__":
    main()
