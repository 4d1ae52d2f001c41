"""Does the price ladder of a certificate tell what training at another price would leave?

    python experiments/prices.py [--recipe mnist-fc20] [--log-gamma -20] [--into docs/robustness.md:prices]

A network is trained at a low price and certified: the ladder says how many blocks would be left at higher
ones. Then networks are really trained at two of those prices, with both estimators. What the exact one
follows is what the ladder measures, C0 - C1; what the first-order one follows is, at rest, lambda |w|^2.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from setting import Setting, parser, run_all, setting, with_section

from shallower import data
from shallower.certificate import Certificate, Rung
from shallower.reproduce import place
from shallower.training import Result, certify_run

ESTIMATORS = ("flip", "first_order")


@dataclass(frozen=True)
class Foretold:
    """What the ladder says of a price."""

    price: float
    left: int
    accuracy: float | None  # of the network as it stands, not trained any further


def foretold(ladder: Sequence[Rung], above: float) -> list[Foretold]:
    """Two prices `above` the one that was trained at: in the middle, on a log scale, of the widest steps, and
    where there are not two of them, half as much again as the last rung, and then twice that."""
    steps = [(low, high) for low, high in pairwise(ladder) if high.price > low.price > above]
    widest = sorted(steps, key=lambda pair: pair[1].price / pair[0].price, reverse=True)[:2]
    rows = [
        Foretold(round(math.sqrt(low.price * high.price), 1), low.left, low.score) for low, high in widest
    ]
    if not ladder:
        return []  # nothing is left that could go
    last, beyond = ladder[-1], 1.5
    while len(rows) < 2:
        rows.append(Foretold(round(beyond * max(last.price, above), 1), last.left, last.score))
        beyond *= 2
    return sorted(rows, key=lambda row: row.price)


def certificate(row: Setting, given: argparse.Namespace, task: data.Task, seed: int) -> Certificate:
    return certify_run(given.runs / place(row.chosen) / f"seed{seed}", task, steps=0)


def main() -> None:
    found = parser(__doc__, seeds=1)
    found.add_argument("--recipe", default="mnist-fc20")
    found.add_argument("--log-gamma", type=float, default=-20.0, help="of the network that is certified")
    given, show = with_section(found)
    torch.set_num_threads(1)
    lines = [
        "| estimator | seed | price | blocks left: foretold | trained | accuracy %: foretold | trained |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    low = {e: _at(given, given.log_gamma, e) for e in ESTIMATORS}
    runs = run_all(list(low.values()), given, range(given.seeds))
    task = data.load(low["flip"].chosen.task, given.data_dir)
    for estimator, row in low.items():
        for seed in range(given.seeds):
            lines.append(_line(estimator, seed, None, runs[row.label][seed], -given.log_gamma))
            for say in foretold(certificate(row, given, task, seed).ladder, -given.log_gamma):
                now = _at(given, -say.price, estimator)
                (result,) = run_all([now], given, [seed])[now.label]
                lines.append(_line(estimator, seed, say, result, say.price))
    show("\n".join(lines) + "\n")


def _at(given: argparse.Namespace, log_gamma: float, estimator: str) -> Setting:
    fields = {"log_gamma": log_gamma, "estimator": estimator}
    return setting(given.recipe, f"{estimator} {log_gamma:g}", given.epochs, **fields)


def _line(estimator: str, seed: int, say: Foretold | None, result: Result, price: float) -> str:
    left, accuracy = ("", "") if say is None else (str(say.left), f"{say.accuracy or 0.0:.2f}")
    cells = [estimator, str(seed), f"{price:g}", left, str(result.blocks_kept), accuracy]
    return "| " + " | ".join([*cells, f"{result.test_accuracy or 0.0:.2f}"]) + " |"


if __name__ == "__main__":
    main()
