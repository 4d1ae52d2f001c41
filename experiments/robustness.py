"""The method against its own claims, on MNIST with dense layers: five seeds each.

    python experiments/robustness.py [--recipe mnist-fc20] [--seeds 5] [--jobs 2] [--into docs/robustness.md]

Sensitivity to the initial weights, to the starting depth, to where theta starts; the first-order estimate
against the exact one; whether a rate ever comes back from below its tolerance; whether a block that was
removed early would have been useful. Finished runs are not run again. The figure needs the extra `reports`.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from setting import Setting, parser, run_all, setting, spread
from torch import nn

from shallower import Pruner, data, models
from shallower.files import write_text
from shallower.graphs import replace
from shallower.recipes import Recipe, recipe
from shallower.reports import check_section, write_section
from shallower.reproduce import place as folder
from shallower.training import Machine, Result, Run
from shallower.training.result import evaluate, loss_of

GAINS, STARTS, DEPTHS = (0.1, 0.3, 1.0, 2.0), (0.1, 0.3, 0.5, 0.75, 0.95), (10, 20, 50)
LOW, BACK = 0.01, 0.05  # a rate that has fallen to LOW and is above BACK later has come back


def settings(base: str, epochs: int | None) -> dict[str, list[Setting]]:
    """What is varied, one thing at a time, by the claim that it belongs to."""
    options = recipe(base).options

    def one(label: str, **fields: Any) -> Setting:
        return setting(base, label, epochs, **fields)

    return {
        "initial weights": [one(f"{g:g} of PyTorch's", options={**options, "gain": g}) for g in GAINS],
        "depth": [one(f"{d} layers", options={**options, "depth": d}) for d in DEPTHS],
        "theta starts at": [one(f"{t:g}", theta=t) for t in STARTS],
        "estimator": [one(name, estimator=name) for name in ("first_order", "flip")],
    }


# -- what the paper has never seen: a rate that comes back ------------------------------------------------


def recoveries(chosen: Recipe, task: data.Task, seed: int) -> dict[str, int]:
    """Train without removing anything: how many rates fell to the tolerance, and how many came back."""
    run = Run(chosen, task, seed=seed, machine=Machine("cpu"))
    pruner = run.pruner
    assert pruner is not None
    pruner.tolerance = -1.0  # no rate is that low
    low = torch.zeros(len(pruner.names), dtype=torch.bool)
    back = torch.zeros_like(low)

    def look() -> None:
        low.logical_or_(pruner.theta <= LOW)
        back.logical_or_(low & (pruner.theta > BACK))

    _train(run, run.model, run.optimizer, chosen.finalize_epoch or chosen.epochs, pruner, look)
    stayed = back & (pruner.theta > BACK)
    counts = {"low": low, "back": back, "alive_at_the_end": stayed}
    return {"blocks": len(low), **{name: int(found.sum()) for name, found in counts.items()}}


# -- premature pruning: put a removed block back, and train ----------------------------------------------


@dataclass(frozen=True)
class Return:
    """A block that was removed, back in the network that had learned without it."""

    seed: int
    block: str
    saved: float  # of the objective, its price apart, against the same training without it; in nats
    price: float
    gained: float  # test accuracy, in points, against the same


def returns(chosen: Recipe, task: data.Task, seed: int, *, epochs: int, number: int = 3) -> list[Return]:
    """The blocks that were removed first, put back one at a time with new weights, and trained with the rest.

    The last third of these epochs is at the rate of fine-tuning. Such a block would have been useful if
    training with it, rather than without it for as many epochs, saves more of the objective than its price.
    """
    run = Run(chosen, task, seed=seed, machine=Machine("cpu"))
    assert run.pruner is not None
    _train(run, run.model, run.optimizer, chosen.finalize_epoch or chosen.epochs, run.pruner)
    run.pruner.finalize(chosen.threshold)
    start = run.loader.state_dict()

    def trained(model: nn.Module) -> tuple[float, float]:
        run.loader.load_state_dict(start)  # all see the same batches
        optimizer, last = _adam(run, model), max(1, epochs // 3)
        _train(run, model, optimizer, epochs - last)
        for group in optimizer.param_groups:  # at the full rate, the loss is as noisy as what is looked for
            group["lr"] = chosen.finetune_lr or chosen.lr / 10
        _train(run, model, optimizer, last)
        return _objective(run, model), _accuracy(run, model)

    alone = trained(copy.deepcopy(run.model))
    rows = []
    for event in run.pruner.events[:number]:
        torch.manual_seed(1000 + seed)
        fresh = getattr(models, chosen.network)(**chosen.options)
        model = copy.deepcopy(run.model)
        replace(model, event.block, fresh.get_submodule(event.block))
        cost, accuracy = trained(model)
        price = -float(chosen.log_gamma or 0.0)
        rows.append(Return(seed, event.block, alone[0] - cost, price, accuracy - alone[1]))
    return rows


def _train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    pruner: Pruner | None = None,
    look: Callable[[], None] = lambda: None,
) -> None:
    exact = run.recipe.estimator == "flip"
    for _ in range(epochs):
        model.train()
        for inputs, labels in run.loader:
            optimizer.zero_grad()
            loss = partial(run.loss_on, model, inputs, labels)
            loss().backward()
            optimizer.step()
            if optimizer is run.optimizer:
                run.scheduler.step()
            if pruner is not None:
                pruner.step(loss if exact else None)
                look()


def _adam(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=run.recipe.lr, weight_decay=run.recipe.decay / run.size)


@torch.no_grad()
def _objective(run: Run, model: nn.Module) -> float:
    """The cost over the training set and the weights' term, in nats."""
    batches = run.batches("train", 1000)
    cost = sum(float(loss_of(run.task.kind, model(x), y)) * len(y) for x, y in batches)
    return cost + 0.5 * run.recipe.decay * sum(float(p.square().sum()) for p in model.parameters())


def _accuracy(run: Run, model: nn.Module) -> float:
    return evaluate(model, run.test, run.task.kind, run.machine.autocast)[1] or 0.0


# -- the page ---------------------------------------------------------------------------------------------


def table(rows: dict[str, list[Setting]], found: dict[str, list[Result]]) -> str:
    lines = ["| varied | | accuracy % | layers | load | seeds |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for claim, row in ((claim, row) for claim, some in rows.items() for row in some):
        runs = found[row.label]
        accuracy = spread([r.test_accuracy or 0.0 for r in runs])
        layers, load = spread([r.layers for r in runs]), spread([r.training_macs_ratio for r in runs])
        lines.append(f"| {claim} | {row.label} | {accuracy} | {layers} | {load} | {len(runs)} |")
    return "\n".join(lines) + "\n"


def figure(rows: dict[str, list[Setting]], found: dict[str, list[Result]], path: Path) -> None:
    """Accuracy and layers of every run, a panel for each claim, seeds side by side."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(3 * len(rows), 4.5), layout="constrained")
    panels = drawing.subplots(2, len(rows), sharey="row")
    for column, (claim, some) in enumerate(rows.items()):
        for place, row in enumerate(some):
            runs = found[row.label]
            beside = [place + 0.08 * (seed - (len(runs) - 1) / 2) for seed in range(len(runs))]
            for line, values in enumerate(([r.test_accuracy for r in runs], [r.layers for r in runs])):
                panels[line, column].plot(beside, values, "o", ms=5, alpha=0.7, color="C0")
        panels[0, column].set_title(claim)
        labels = [row.label.removesuffix(" of PyTorch's").removesuffix(" layers") for row in some]
        for line in range(2):
            panels[line, column].set(
                xticks=range(len(some)), xticklabels=labels, xlim=(-0.5, len(some) - 0.5)
            )
        panels[1, column].yaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].set_ylabel("test accuracy, %")
    panels[1, 0].set_ylabel("layers left")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def recovered(found: list[dict[str, int]]) -> str:
    sums = {key: sum(row[key] for row in found) for key in ("blocks", "low", "back", "alive_at_the_end")}
    return (
        f"Of {sums['blocks']} rates in {len(found)} runs, {sums['low']} fell to {LOW}. Above "
        f"{BACK} again at some later step: {sums['back']}; at the end: {sums['alive_at_the_end']}.\n"
    )


def premature(found: list[dict[str, Any]], extra: int) -> str:
    if not found:
        return "No block was removed.\n"
    useful = [row for row in found if row["saved"] > row["price"]]
    saved, gained = (spread([row[key] for row in found]) for key in ("saved", "gained"))
    return (
        f"Of {len(found)} blocks that were removed first and put back, {len(useful)} save more than their "
        f"price after {extra} more epochs ({saved} nats, at a price of {found[0]['price']:g}); test accuracy "
        f"against the same epochs without them: {gained} points.\n"
    )


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` gives, from the file where it was kept before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(make(), indent=2))
    return json.loads(path.read_text())


def parsed() -> argparse.Namespace:
    found = parser(__doc__, seeds=5)
    found.add_argument(
        "--recipe", default="mnist-fc20", help="one whose network has the options depth and gain"
    )
    found.add_argument("--into", type=Path, help="a page with the sections settings, recovery and return")
    return found.parse_args()


def main() -> None:
    given = parsed()
    if given.into is not None:
        for section in ("settings", "recovery", "return"):
            check_section(given.into, section)
    torch.set_num_threads(1)
    rows = settings(given.recipe, given.epochs)
    found = run_all([row for some in rows.values() for row in some], given, range(given.seeds))
    base = recipe(given.recipe)
    base = base if given.epochs is None else base.rescaled(given.epochs)
    task, place = data.load(base.task, given.data_dir), given.results / "robustness" / folder(base)
    back = [
        kept(place / f"recovery{seed}.json", lambda seed=seed: recoveries(base, task, seed))
        for seed in range(given.seeds)
    ]
    extra = max(1, base.epochs // 6)
    again = [
        row
        for seed in range(given.seeds)
        for row in kept(
            place / f"return{seed}.json",
            lambda seed=seed: [asdict(r) for r in returns(base, task, seed, epochs=extra)],
        )
    ]
    texts = {"settings": table(rows, found), "recovery": recovered(back), "return": premature(again, extra)}
    for section, text in texts.items():
        print(f"{section}\n\n{text}")
        if given.into is not None:
            write_section(given.into, section, text)
    if given.into is not None:
        figure(rows, found, given.into.parent / "figures" / "robustness.png")


if __name__ == "__main__":
    main()
