"""A recipe with something set, over some seeds: what the experiments are made of."""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shallower.recipes import Recipe, RecipeError, recipe
from shallower.reports import check_section, write_section
from shallower.reproduce import kept_at, reproduce_all
from shallower.training import Interrupted, Result


@dataclass(frozen=True)
class Setting:
    """One row of a table."""

    label: str
    chosen: Recipe


def setting(base: str, label: str, epochs: int | None, **fields: Any) -> Setting:
    """The recipe `base` with some fields set, then brought into so many epochs."""
    try:
        found = recipe(base, fields)
        return Setting(label, found if epochs is None else found.rescaled(epochs))
    except RecipeError as error:
        raise SystemExit(str(error)) from error


def run_all(
    rows: Sequence[Setting], given: argparse.Namespace, seeds: Iterable[int], flags: Sequence[str] = ()
) -> dict[str, list[Result]]:
    """The results of every row by its label, those that are there already as they are."""
    places = {"runs": given.runs, "results": given.results, "data_dir": given.data_dir}
    seeds, chosen = list(seeds), list({row.chosen.model_dump_json(): row.chosen for row in rows}.values())
    try:
        failed = reproduce_all(chosen, seeds=seeds, jobs=given.jobs, flags=flags, **places)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    except ValueError as error:  # results of other settings are there
        raise SystemExit(str(error)) from error
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; each folder has a log.txt")

    def kept(row: Setting, seed: int) -> Result:
        return Result.model_validate_json(kept_at(given.results, row.chosen, seed).read_text())

    return {row.label: [kept(row, seed) for seed in seeds] for row in rows}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation; of one value, itself."""
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{sd}"


def with_section(found: argparse.ArgumentParser) -> tuple[argparse.Namespace, Callable[[str], None]]:
    """The arguments, and what shows a table: it prints it, and writes it where --into says, which is checked
    before anything runs."""
    found.add_argument("--into", help="FILE:SECTION of a Markdown file to put the table in")
    given = found.parse_args()
    path, _, section = (given.into or "").rpartition(":")
    if given.into:
        check_section(Path(path), section)

    def show(text: str) -> None:
        print(text)
        if given.into:
            write_section(Path(path), section, text)

    return given, show


def parser(about: str | None, *, seeds: int) -> argparse.ArgumentParser:
    """The options that all experiments have."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--seeds", type=int, default=seeds, help="runs with the seeds 0 to N-1")
    found.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    found.add_argument("--epochs", type=int, help="every schedule in proportion")
    found.add_argument("--runs", type=Path, default=Path("runs"))
    found.add_argument("--results", type=Path, default=Path("results"))
    found.add_argument("--data-dir", type=Path)
    return found
