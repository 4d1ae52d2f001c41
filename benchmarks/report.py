"""How long a report takes: ten runs of sixty epochs, the page and all figures as PNG and SVG. Bound: 20 s.

No pair and no ratio: the bound is how long somebody waits, and there is nothing to hold it against.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

from side_by_side import seconds, verdict

from shallower.recipes import recipe
from shallower.reports import load_runs
from shallower.reports.costs import network_cost
from shallower.reports.page import write_report

EPOCHS = 60


def write_run(folder: Path, name: str, seed: int) -> None:
    """A run in which the blocks go one after the other, from the last on; two stay."""
    chosen = recipe(name).rescaled(EPOCHS)
    cost = network_cost(chosen)
    names = [block.name for block in cost.blocks]
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"seed": seed, **chosen.model_dump()}))
    metrics, rates, events, load = [], [], [], 0
    for epoch in range(EPOCHS):
        gone = min(epoch * len(names) // 40, len(names) - 2)
        lost = cost.blocks[len(names) - gone :]
        size = {
            "params": cost.params - sum(b.params for b in lost),
            "macs": cost.macs - sum(b.macs for b in lost),
        }
        load += 900 * size["macs"]
        loads = {
            "dense": 900 * cost.macs * (epoch + 1),
            "survivors": load,
            "expected": load / 2,
            "ran": load * 0.8,
        }
        scores = {"train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 98.0}
        metrics.append({"epoch": epoch, **scores, **size, **{f"load_{k}": 3 * v for k, v in loads.items()}})
        alive = {n: max(0.9 - (k + seed) % 7 / 100 - epoch / 99, 0.02) for k, n in enumerate(names)}
        rates.append(
            {
                "epoch": epoch,
                **{n: v if k < len(names) - gone else 0.0 for k, (n, v) in enumerate(alive.items())},
            }
        )
        done = {event["block"] for event in events}
        events += [{"step": 300 * epoch, "block": b.name, "theta": 0.01} for b in lost if b.name not in done]
    for file, rows in (("metrics.csv", metrics), ("thetas.csv", rates)):
        with (folder / file).open("w") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def main() -> None:
    rows = []
    for name in sys.argv[1:] or ["mnist-fc20", "cifar10-resnet56-250"]:
        with tempfile.TemporaryDirectory() as place:
            for seed in range(10):
                write_run(Path(place) / "runs" / str(seed), name, seed)

            def report(place: str = place) -> None:
                runs, _ = load_runs([Path(place) / "runs"])
                write_report(runs, Path(place) / "report.html", Path(place) / "figures")

            took = seconds(report)
        rows.append((f"report, 10 runs of {EPOCHS} epochs, {name}", f"{took:.1f} s", "20 s", took < 20))
    verdict(rows)


if __name__ == "__main__":
    main()
