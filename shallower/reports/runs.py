"""The folder of a run, read back: finished, or as far as it has come."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import ValidationError

from shallower.ledger import STEP, BlockCost
from shallower.pruner import Removal
from shallower.recipes import RECIPES, Paper, Recipe, label
from shallower.reports.costs import NetworkCost, network_cost
from shallower.training.result import COMPARISON, Result
from shallower.worth import Worth

Row = dict[str, float | None]
KIND = {"task", "network", "options", "log_gamma", "multipliers"}  # what makes a row of the paper another one
Model = TypeVar("Model", Recipe, Result)
Row_ = TypeVar("Row_", BlockCost, Worth)


class FolderError(ValueError):
    """A folder that holds no run, or one that cannot be read; the text says which file is wrong, and how."""


@dataclass(frozen=True)
class Record:
    """All that a run has left in its folder; `result` is None while it has not finished."""

    folder: Path
    recipe: Recipe
    seed: int
    metrics: list[Row]
    thetas: list[Row]
    events: list[Removal]
    costs: list[BlockCost]
    worth: list[Worth]
    against_dense: dict[str, Any]  # the ratios to the dense twin, if it was trained beside
    result: Result | None

    @property
    def label(self) -> str:
        """The recipe and what was set beside it: runs of one label differ in nothing but the seed."""
        return label(self.recipe)

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def paper(self) -> Paper:
        return paper(self.recipe)

    @cached_property
    def cost(self) -> NetworkCost:
        """Of the network before pruning."""
        return network_cost(self.recipe)

    @property
    def removed(self) -> set[str]:
        if self.result is not None:
            return {block.name for block in self.cost.blocks} - set(self.result.survivors)
        return {event.block for event in self.events}

    @property
    def params(self) -> int:
        """Of the network as it is now."""
        if self.result is not None:
            return self.result.params
        return int(self.metrics[-1]["params"] or 0) if self.metrics else self.cost.params

    @property
    def macs(self) -> int:
        if self.result is not None:
            return self.result.macs
        return int(self.metrics[-1]["macs"] or 0) if self.metrics else self.cost.macs

    @property
    def epochs(self) -> list[float]:
        """The ends of the epochs; the first row of the metrics stands at 1."""
        return [(row["epoch"] or 0) + 1 for row in self.metrics]

    def column(self, name: str) -> list[float] | None:
        """A column of the metrics; None if the run has no such column, or not in every row."""
        values = [row.get(name) for row in self.metrics]
        return None if not values or None in values else [v for v in values if v is not None]

    @property
    def steps(self) -> float | None:
        """Optimiser steps in an epoch, from the load of the dense network."""
        dense = self.column("load_dense")
        return None if dense is None else dense[-1] / (STEP * self.cost.macs * len(dense))

    @property
    def state(self) -> str:
        if self.result is not None:
            return "finished"
        return f"{len(self.metrics)} of {self.recipe.epochs} epochs"


def paper(recipe: Recipe) -> Paper:
    """The paper's figures, if the recipe still is the one that they belong to."""
    base = RECIPES.get(recipe.name)
    if base is None or any(getattr(recipe, f) != getattr(base, f) for f in KIND):
        return Paper()
    return base.paper


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """The folders of runs at or below `places`, each once; none at all is an error."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.exists():
            raise FolderError(
                f"There is no {place}: give the folder of a run, or one with runs below it, as `runs`."
            )
        runs = sorted(file.parent for file in place.resolve().rglob("recipe.json"))
        if not runs:
            raise FolderError(
                f"No run lies in or below {place}: none of its folders has a recipe.json. "
                f"`shallower train RECIPE --out {place}` makes one."
            )
        found |= dict.fromkeys(_near(run) for run in runs)
    return list(found)


def _near(folder: Path) -> Path:
    """A path as a person would write it, the same however the run was named."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def load_run(folder: str | Path) -> Record:
    """The run in `folder`."""
    folder = Path(folder)
    if not (folder / "recipe.json").is_file():
        raise FolderError(f"{folder} is no folder of a run: it has no recipe.json.")
    settings = _json(folder / "recipe.json")
    if not isinstance(settings, dict) or not isinstance(settings.get("seed"), int):
        raise FolderError(f"{folder / 'recipe.json'} is no recipe of a run: it has no seed.")
    recipe = _valid(Recipe, {k: v for k, v in settings.items() if k != "seed"}, folder / "recipe.json")
    try:
        network_cost(recipe)
    except (ValueError, TypeError) as error:
        raise FolderError(f"{folder / 'recipe.json'} is of no network that can be built: {error}") from error
    file = folder / "result.json"
    return Record(
        folder=folder,
        recipe=recipe,
        seed=settings["seed"],
        metrics=_csv(folder / "metrics.csv", ("epoch", "params", "macs", "test_loss")),
        thetas=_csv(folder / "thetas.csv", ("epoch",)),
        events=_events(folder / "events.jsonl") if (folder / "metrics.csv").exists() else [],
        costs=_rows(folder / "costs.csv", BlockCost),
        worth=_rows(folder / "worth.csv", Worth) if file.is_file() else [],
        against_dense=_json(folder / COMPARISON) if (folder / COMPARISON).is_file() else {},
        result=_valid(Result, _json(file), file) if file.is_file() else None,
    )


def load_runs(places: Iterable[str | Path]) -> tuple[list[Record], list[str]]:
    """Every run at or below `places` in the order of the recipes, and what is wrong with those left out."""
    runs, wrong = [], []
    for folder in find_runs(places):
        try:
            runs.append(load_run(folder))
        except FolderError as error:
            wrong.append(str(error))
    if not runs:
        raise FolderError("No run could be read. " + " ".join(wrong))
    order = list(RECIPES)
    place = {name: i for i, name in enumerate(order)}
    runs.sort(
        key=lambda r: (place.get(r.recipe.name, len(order)), -(r.recipe.log_gamma or 0), r.label, r.seed)
    )
    return runs, wrong


def groups(runs: Sequence[Record]) -> dict[str, list[Record]]:
    """The runs by label: each group is one setting over several seeds."""
    found: dict[str, list[Record]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error


def _valid(kind: type[Model], found: Any, path: Path) -> Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        fields = ", ".join(sorted({str(e["loc"][0]) if e["loc"] else "all" for e in error.errors()}))
        raise FolderError(
            f"{path} does not fit this version of shallower ({fields}): leave it out, or run it again."
        ) from error


def _csv(path: Path, needed: Sequence[str]) -> list[Row]:
    """Numbers; an empty cell is None. A run that has not ended an epoch has no file yet."""
    if not path.is_file():
        return []
    try:
        rows: list[Row] = [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in csv.DictReader(path.read_text().splitlines())
        ]
    except (ValueError, TypeError, OSError) as error:
        raise FolderError(f"{path} cannot be read as a table of numbers: {error}") from error
    missing = [name for name in needed if rows and name not in rows[0]]
    if missing:
        raise FolderError(f"{path} has no column {', '.join(missing)}.")
    return rows


def _rows(path: Path, kind: type[Row_]) -> list[Row_]:
    """The rows of a table, each with the fields of `kind`; none if there is no file."""
    if not path.is_file():
        return []
    types = get_type_hints(kind)
    try:
        rows = csv.DictReader(path.read_text().splitlines())
        return [kind(**{name: types[name](cell) for name, cell in row.items()}) for row in rows]
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise FolderError(f"{path} cannot be read as a table of {', '.join(types)}: {error}") from error


def _events(path: Path) -> list[Removal]:
    if not path.is_file():
        return []
    try:
        return [Removal(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    except (ValueError, TypeError, OSError) as error:
        raise FolderError(f"{path} cannot be read as removals: {error}") from error
