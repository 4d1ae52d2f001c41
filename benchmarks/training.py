"""A whole short run, dense against pruned: do saved MACs become saved seconds?

Bound: the pruned run takes at most 1 / 0.95 of the seconds that the load which ran promises, by the ledger.
Both are runs of the library's own loop, ResNet-20 on pictures that can be learned; blocks die because theta
learns so, the network is finalised and fine-tuned. Seconds are those of the run's clock, without evaluation;
which of the two comes first changes from pair to pair, and each pair has a seed of its own. Blocks of more
than one stage must die: those of the first, with the fewest channels and the largest images, take the most
time for their MACs, those of the last the least.
"""

import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import Ratio, verdict

from shallower.data import Samples, Task
from shallower.recipes import Recipe
from shallower.training import Machine, Result, train

THREADS, PAIRS, IMAGES, CLASSES, NOISE = 1, 3, 768, 10, 0.7
PRUNED = Recipe(
    name="benchmark",
    task="pictures",
    network="resnet",
    options={"depth": 20, "final_norm": "bare"},
    fixed_layers=2,
    layers_per_block=2,
    epochs=6,
    batch_size=128,  # as the recipes for CIFAR have it
    augment=True,
    pixels="standard",
    optimizer="sgd",
    lr=0.1,
    cosine=True,
    log_gamma=-80.0,
    begin_epoch=2,  # of 6 steps each: in the first steps no block is worth anything
    theta_optimizer="sgd",
    theta_lr=0.002,
    finalize_epoch=4,
)
DENSE = PRUNED.model_copy(update={"log_gamma": None})


def pictures() -> Task:
    """Ten coarse patterns, each its own mirror image, under noise."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(CLASSES, 3, 4, 2, generator=generator)
    patterns = F.interpolate(torch.cat([left, left.flip(3)], dim=3), size=32, mode="bilinear")

    def samples(size: int) -> Samples:
        labels = torch.arange(size) % CLASSES
        noise = NOISE * torch.randn(size, 3, 32, 32, generator=generator)
        return Samples(patterns[labels] + noise, labels)

    seen = samples(IMAGES)
    of_channels = seen.inputs.mean((0, 2, 3)), seen.inputs.std((0, 2, 3))
    mean, std = (tuple(values.tolist()) for values in of_channels)
    return Task("pictures", "classification", seen, samples(100), CLASSES, mean, std)


def pair(task: Task, seed: int) -> tuple[Result, Result]:
    """The pruned run and the dense one."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for recipe in (PRUNED, DENSE) if seed % 2 else (DENSE, PRUNED):
            folder = Path(place) / ("dense" if recipe.dense else "pruned")
            found[recipe.dense] = train(recipe, task, folder, seed=seed, machine=Machine("cpu"), worth=False)
    return found[False], found[True]


def stages(result: Result) -> tuple[int, ...]:
    """How many blocks are left in each stage."""
    left = Counter(name.partition(".")[0] for name in result.survivors)
    return tuple(left[f"stage{number}"] for number in (1, 2, 3))


def main() -> None:
    torch.set_num_threads(THREADS)
    task = pictures()
    pairs = [pair(task, seed) for seed in range(PAIRS)]
    left = [stages(pruned) for pruned, _ in pairs]
    seconds = Ratio.of([pruned.seconds / dense.seconds for pruned, dense in pairs])
    load = Ratio.of([pruned.training_macs_ratio for pruned, _ in pairs])
    kept = Ratio.of([p.training_macs_ratio * d.seconds / p.seconds for p, d in pairs])
    died = all(sum(count < 3 for count in counts) > 1 for counts in left)
    rows = [
        ("training, ResNet-20: blocks left of (3, 3, 3)", ", ".join(map(str, left)), "fewer in two", died),
        ("training, seconds, pruned over dense", f"{seconds}", "", None),
        ("training, load that ran, pruned over dense", f"{load}", "", None),
        ("training, load over seconds", f"{kept}", "at least 0.95", kept.median >= 0.95),
    ]
    verdict(rows)


if __name__ == "__main__":
    main()
