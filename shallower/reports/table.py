"""The paper's tables again: mean ± sd over seeds, the paper's figure beside ours."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from shallower.files import write_text
from shallower.recipes import RECIPES, Paper
from shallower.training.result import Result

COLUMNS = (
    "recipe",
    "seeds",
    "accuracy %",
    "paper",
    "layers",
    "paper",
    "pPR %",
    "paper",
    "fPR %",
    "load",
    "minutes",
)


def read_results(folders: Iterable[str | Path]) -> list[Result]:
    """Every `result.json` (or `seed*.json`) below `folders`."""
    found = []
    for folder in map(Path, folders):
        files = (
            [folder]
            if folder.is_file()
            else sorted([*folder.rglob("result.json"), *folder.rglob("seed*.json")])
        )
        for file in files:
            try:
                found.append(Result.model_validate_json(file.read_text()))
            except ValidationError as error:
                raise ValueError(
                    f"{file} is no result of a run: {error.error_count()} fields do not fit."
                ) from error
    return found


def markdown_table(results: Sequence[Result]) -> str:
    """One row per recipe, in the order of the recipes."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " + "| ---: " * (len(COLUMNS) - 1) + "|"]
    for name in sorted({r.recipe for r in results}, key=_place):
        lines.append("| " + " | ".join(_row(name, [r for r in results if r.recipe == name])) + " |")
    return "\n".join(lines) + "\n"


def histogram_table(results: Sequence[Result]) -> str:
    """In how many runs each block survived, one row per recipe: the paper's figure as a table."""
    lines = ["| recipe | runs | survivors (block: runs) |", "| --- | ---: | --- |"]
    for name in sorted({r.recipe for r in results}, key=_place):
        runs = [r for r in results if r.recipe == name]
        counts = sorted(survivors(runs).items(), key=lambda item: _natural(item[0]))
        lines.append(f"| {name} | {len(runs)} | {', '.join(f'{block}: {n}' for block, n in counts)} |")
    return "\n".join(lines) + "\n"


def write_section(path: Path, section: str, text: str) -> None:
    """Put `text` between `<!-- section -->` and `<!-- /section -->` in a Markdown file."""
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    whole = path.read_text()
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise ValueError(
            f"{path} needs one line {begin!r} and after it one line {end!r}, to write between them."
        )
    before, after = whole.split(begin)[0], whole.split(end)[1]
    write_text(path, f"{before}{begin}\n{text}{end}{after}")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """So that blocks.10 stands behind blocks.9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def survivors(results: Sequence[Result]) -> dict[str, int]:
    """In how many runs each block survived: the paper's histogram."""
    return dict(Counter(block for result in results for block in result.survivors))


def _place(name: str) -> tuple[int, str]:
    return (list(RECIPES).index(name), name) if name in RECIPES else (len(RECIPES), name)


def _row(name: str, runs: list[Result]) -> list[str]:
    paper = RECIPES[name].paper if name in RECIPES else Paper()
    accuracy = [r.test_accuracy for r in runs if r.test_accuracy is not None]
    return [
        name,
        str(len(runs)),
        _spread(accuracy, 2),
        _printed(paper.accuracy, paper.accuracy_sd),
        _spread([r.layers for r in runs], 2),
        _printed(paper.layers, paper.layers_sd),
        _spread([r.ppr for r in runs], 2),
        _printed(paper.ppr, None),
        _spread([r.fpr for r in runs], 2),
        _spread([r.training_macs_ratio for r in runs], 2),
        f"{statistics.mean(r.seconds for r in runs) / 60:.1f}",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{sd}"


def _printed(value: float | None, sd: float | None) -> str:
    return "" if value is None else f"{value:.2f}" + ("" if sd is None else f" ± {sd:.2f}")
