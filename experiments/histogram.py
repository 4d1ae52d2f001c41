"""The paper's histograms: in how many runs each layer was left, by its index in the network.

    python experiments/histogram.py mnist-cnn10 mnist-cnn20 mnist-cnn40 --out layers.png

From the results that `shallower reproduce` has kept; nothing is trained. Layers are counted as the paper
does: the first is never pruned, nor is the one that changes the number of features, which has no bar.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shallower.recipes import recipe
from shallower.reports import read_results
from shallower.reports.costs import network_cost
from shallower.reproduce import kept_at
from shallower.training import Result


def indices(names: Sequence[str]) -> dict[str, int]:
    """The layer that each block is: behind the first of its stage, which is never pruned."""
    found: dict[str, int] = {}
    layer, stage = 0, None
    for name in names:
        if name.partition(".")[0] != stage:
            stage, layer = name.partition(".")[0], layer + 1  # the layer that begins the stage
        layer += 1
        found[name] = layer
    return found


def counts(names: Sequence[str], runs: Sequence[Result]) -> dict[int, int]:
    """In how many runs each layer was left; the first in all of them."""
    left = {index: sum(name in run.survivors for run in runs) for name, index in indices(names).items()}
    return {1: len(runs), **left}


def panel(figure: Figure, place: tuple[int, int, int], name: str, results: Path) -> None:
    chosen = recipe(name)
    if chosen.network not in ("fc", "cnn"):
        raise SystemExit(f"{name} has the network {chosen.network}; layers are counted for fc and cnn alone.")
    kept = kept_at(results, chosen, 0).parent
    runs = read_results([kept]) if kept.is_dir() else []
    if not runs:
        raise SystemExit(f"{kept} holds no results; `shallower reproduce {name}` makes them.")
    found = counts([block.name for block in network_cost(chosen).blocks], runs)
    axes = figure.add_subplot(*place, title=name, xlabel="layer")
    axes.bar(list(found), list(found.values()), width=0.8)
    axes.set_xlim(0.2, max(found) + 0.8)
    axes.set_ylabel(f"runs of {len(runs)}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def main() -> None:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("recipes", nargs="+")
    found.add_argument("--results", type=Path, default=Path("results"))
    found.add_argument("--out", type=Path, required=True)
    given = found.parse_args()
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(3.2 * len(given.recipes), 2.4), layout="constrained")
        for number, name in enumerate(given.recipes, start=1):
            panel(figure, (1, len(given.recipes), number), name, given.results)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(given.out, dpi=120)


if __name__ == "__main__":
    main()
