"""The paper's CIFAR-10 runs in miniature: dense, pruned at some prices, and built as shallow from the start.

    python experiments/miniature.py --depth 20 --epochs 12 --into docs/results.md:miniature-20

Every schedule is in proportion, but log gamma is ramped up in a quarter of the run and the network
finalised after a third of it: the survivors need the rest. The estimator is the exact one, and rates start
at 1: the first-order estimates of a short run are so noisy that rates hover between 0 and 1, and blocks
that are left out at random cost more accuracy than pruning does. The price is what a block is worth in a
network that always has it, far above the paper's (docs/results.md). Each pruned network has a native twin:
as many blocks in each stage, with stride 2 where the pruned one has it, trained for as many epochs.
Finished runs are not run again.
"""

from collections.abc import Sequence

import torch
from setting import Setting, parser, run_all, setting, spread, with_section

from shallower.recipes import Recipe
from shallower.training import Result

DENSE, PRUNED = "cifar10-resnet56-dense", "cifar10-resnet56-500"
STAGES = 3
Row = tuple[str, list[Result]]


def stages(survivors: Sequence[str]) -> dict[str, list[int] | list[bool]]:
    """Options of a network that is built with the blocks which are left: `stage2.0` has stride 2."""
    counts = [sum(name.startswith(f"stage{n}.") for name in survivors) for n in range(1, STAGES + 1)]
    entered = [f"stage{n}.0" in survivors for n in range(2, STAGES + 1)]
    return {"blocks": counts, "transitions": entered}


def native(row: Setting, result: Result, epochs: int | None) -> Setting:
    """The network that pruning has left, built as such."""
    options = {"depth": None, **stages(result.survivors)}
    return setting(DENSE, f"{row.label}, native", epochs, options=options)


def table(rows: Sequence[Row]) -> str:
    """Against the first row, the dense network."""
    lines = [
        "| network | seeds | accuracy % | layers | blocks by stage | MMACs | fewer, % | load | training s |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    dense = rows[0][1][0].macs
    for label, runs in rows:
        blocks = " ".join(str(tuple(stages(r.survivors)["blocks"])) for r in runs)
        accuracy = spread([r.test_accuracy or 0.0 for r in runs])
        fewer = spread([100 * (1 - r.macs / dense) for r in runs], 1)
        load = spread(
            [r.training_macs_ratio * r.macs_dense / dense for r in runs]
        )  # of a native one, its own
        macs, seconds = (spread([value(r) for r in runs], 1) for value in (_millions, _seconds))
        cells = [label, str(len(runs)), accuracy, spread([_layers(r) for r in runs], 1), blocks]
        lines.append("| " + " | ".join([*cells, macs, fewer, load, seconds]) + " |")
    return "\n".join(lines) + "\n"


def _millions(result: Result) -> float:
    return result.macs / 1e6


def _seconds(result: Result) -> float:
    return result.seconds


def _layers(result: Result) -> int:
    return 2 * len(result.survivors) + 2


def main() -> None:
    found = parser(__doc__, seeds=1)
    found.set_defaults(epochs=12)
    found.add_argument("--depth", type=int, default=20)
    found.add_argument("--log-gamma", type=float, nargs="+", default=[-8000.0, -10000.0])
    found.add_argument("--theta", type=float, default=1.0, help="where every rate starts")
    whole = "in the paper's 182 epochs; scaled with them"
    found.add_argument("--theta-lr", type=float, default=3.03333e-3, help="of a step that learns, as it is")
    found.add_argument("--theta-optimizer", choices=("adam", "sgd"), default="adam")
    found.add_argument("--begin-epoch", type=int, help=f"of learning theta, {whole}")
    found.add_argument("--ramp-epochs", type=float, default=45.5, help=whole)
    found.add_argument("--finalize-epoch", type=int, default=60, help=whole)
    found.add_argument("--estimator", choices=("first_order", "flip"), default="flip")
    found.add_argument("--estimate-every", type=int, help="so many steps theta learns once")
    found.add_argument("--single-precision", action="store_true", help="where bfloat16 is slower")
    given, show = with_section(found)
    torch.set_num_threads(1)
    flags = ["--channels-last", "--compile", "--no-worth"]
    flags += [] if given.single_precision else ["--bf16"]
    seeds, options = range(given.seeds), {"depth": given.depth}
    names = (
        "theta",
        "theta_optimizer",
        "begin_epoch",
        "ramp_epochs",
        "finalize_epoch",
        "estimator",
        "estimate_every",
    )
    fields = {"options": options, **{name: getattr(given, name) for name in names}}
    dense = setting(DENSE, f"ResNet-{given.depth}, dense", given.epochs, options=options)
    pruned = []
    for value in given.log_gamma:
        row = setting(PRUNED, f"log gamma {value:g}", given.epochs, log_gamma=value, **fields)
        own = {**row.chosen.model_dump(), "theta_lr": given.theta_lr}  # and not in proportion
        pruned.append(Setting(row.label, Recipe.model_validate(own)))
    runs = run_all([dense, *pruned], given, seeds, flags)
    built: dict[str, list[Result]] = {}
    for seed in seeds:  # pruning may leave another network with every seed
        twins = [native(row, runs[row.label][seed], given.epochs) for row in pruned]
        for label, some in run_all(twins, given, [seed], flags).items():
            built.setdefault(label, []).extend(some)
    rows: list[Row] = [(dense.label, runs[dense.label])]
    for row, label in ((row, f"{row.label}, native") for row in pruned):
        rows += [(row.label, runs[row.label]), (label, built[label])]
    show(table(rows))


if __name__ == "__main__":
    main()
