"""The front of a recipe: layers against accuracy over log gamma, with both estimators.

    python experiments/front.py --recipe mnist-cnn40 --into docs/results.md:front

For a row of the paper that its printed log gamma does not reach: which value does, if one does? The exact
estimator takes other prices (it values a block by what its loss would cost now, not at rest) and runs the
network once for every block, so theta learns from it in every fourth step, at four times the rate.
`--epochs` brings every schedule into a shorter run. Finished runs are not run again. A figure goes beside
the page.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from setting import Setting, parser, run_all, setting, spread, with_section

from shallower.recipes import recipe
from shallower.training import Result

ESTIMATORS = ("first_order", "flip")
EVERY = 4  # steps between two estimates of flip
Point = tuple[str, float, list[Result]]  # estimator, log gamma, runs


def rows(
    base: str, prices: Mapping[str, Sequence[float]], epochs: int | None
) -> list[tuple[str, float, Setting]]:
    found = []
    slow = {"estimate_every": EVERY, "theta_lr": EVERY * recipe(base).theta_lr}
    for estimator in ESTIMATORS:
        for price in prices[estimator]:
            fields = {"log_gamma": price, "estimator": estimator, **(slow if estimator == "flip" else {})}
            found.append((estimator, price, setting(base, f"{estimator} {price:g}", epochs, **fields)))
    return found


def table(points: Sequence[Point]) -> str:
    lines = [
        "| estimator | log gamma | seeds | accuracy % | layers | load | minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for estimator, price, runs in points:
        accuracy = spread([r.test_accuracy or 0.0 for r in runs])
        layers, load = spread([r.layers for r in runs]), spread([r.training_macs_ratio for r in runs])
        minutes = spread([r.seconds / 60 for r in runs], 1)
        lines.append(
            f"| {estimator} | {price:g} | {len(runs)} | {accuracy} | {layers} | {load} | {minutes} |"
        )
    return "\n".join(lines) + "\n"


def figure(points: Sequence[Point], base: str, path: Path) -> None:
    """Every run, and a line through the means of each estimator."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 4), layout="constrained")
    axes = drawing.add_subplot(xlabel="layers", ylabel="test accuracy, %", title=base)
    for place, estimator in enumerate(ESTIMATORS):
        some = [(price, runs) for name, price, runs in points if name == estimator]
        means = []
        for price, runs in some:
            layers, scores = [r.layers for r in runs], [r.test_accuracy or 0.0 for r in runs]
            axes.plot(layers, scores, "o", alpha=0.4, color=f"C{place}")
            means.append((sum(layers) / len(layers), sum(scores) / len(scores)))
            axes.annotate(f"{price:g}", means[-1], fontsize=8)
        axes.plot(*zip(*means, strict=True), "-", color=f"C{place}", label=estimator)
    paper = recipe(base).paper
    if paper is not None and paper.accuracy is not None and paper.layers is not None:
        axes.plot(paper.layers, paper.accuracy, "*", ms=12, color="black", label="paper")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def main() -> None:
    found = parser(__doc__, seeds=3)
    found.add_argument("--recipe", default="mnist-cnn40")
    found.add_argument("--log-gamma", type=float, nargs="+", default=[-50.0, -100.0, -200.0])
    found.add_argument("--log-gamma-of-flip", type=float, nargs="+", default=[-200.0, -400.0])
    given, show = with_section(found)
    torch.set_num_threads(1)
    prices = {"first_order": given.log_gamma, "flip": given.log_gamma_of_flip}
    wanted = rows(given.recipe, prices, given.epochs)
    runs = run_all([row for *_, row in wanted], given, range(given.seeds), ["--channels-last"])
    points = [(estimator, price, runs[row.label]) for estimator, price, row in wanted]
    show(table(points))
    if given.into:
        page = Path(given.into.rpartition(":")[0])
        figure(points, given.recipe, page.parent / "figures" / f"front-{given.recipe}.png")


if __name__ == "__main__":
    main()
