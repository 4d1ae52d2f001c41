"""The paper's tables again: mean ± sd over seeds, the paper's figure beside ours."""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shallower.files import write_text
from shallower.recipes import RECIPES, Paper
from shallower.reports.runs import Record, groups
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
    "paper",
    "RMSE",
    "load",
    "minutes",
)
CSV_COLUMNS = ("accuracy", "layers", "ppr", "fpr", "rmse", "load", "minutes")
FORMATS = ("markdown", "latex", "csv")


@dataclass(frozen=True)
class Row:
    """One setting over its seeds, and what the paper has for it."""

    name: str
    results: list[Result]
    paper: Paper


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
            except (ValidationError, UnicodeDecodeError) as error:
                why = "it is no text" if isinstance(error, UnicodeDecodeError) else "fields do not fit"
                raise ValueError(f"{file} is no result of a run: {why}.") from error
    return found


def rows_by_name(results: Sequence[Result]) -> list[Row]:
    """One row per setting, in the order of the recipes; the paper beside those that are as published."""
    return [
        Row(name, some, RECIPES[name].paper if name in RECIPES else Paper())
        for name, some in _by_label(results).items()
    ]


def _by_label(results: Sequence[Result]) -> dict[str, list[Result]]:
    labels = {r.label: r.recipe for r in results}
    order = sorted(labels, key=lambda name: (*_place(labels[name]), _natural(name)))
    return {name: [r for r in results if r.label == name] for name in order}


def rows_by_label(runs: Sequence[Record]) -> list[Row]:
    """One row per recipe and what was set beside it, so that no mean is taken over different settings."""
    return [
        Row(name, [run.result for run in some if run.result is not None], some[0].paper)
        for name, some in groups(runs).items()
        if any(run.result is not None for run in some)
    ]


def markdown_table(results: Sequence[Result]) -> str:
    """One row per setting, in the order of the recipes."""
    return as_markdown(rows_by_name(results))


def format_table(rows: Sequence[Row], kind: str) -> str:
    """The table as `markdown`, `latex` or `csv`."""
    writers = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
    if kind not in writers:
        raise ValueError(f"There is no format {kind!r} for a table. There are: {', '.join(FORMATS)}.")
    return writers[kind](rows)


def as_markdown(rows: Sequence[Row]) -> str:
    head, *body = cells(rows)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def as_latex(rows: Sequence[Row]) -> str:
    """A tabular with the rules of the package booktabs."""
    head, *body = (" & ".join(map(_tex, line)) + r" \\" for line in cells(rows))
    columns = "l" + "r" * (len(cells(rows)[0]) - 1)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Numbers in full, mean and deviation apart; a cell is empty where there is none."""
    text = io.StringIO()
    pairs = [column for name in CSV_COLUMNS for column in (name, f"{name}_sd")]
    printed = [f"paper_{name}" for name in Paper.model_fields]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["recipe", "seeds", *pairs, *printed])
    for row in rows:
        found = _columns(row.results)
        spread = [cell for name in CSV_COLUMNS for cell in _moments(found[name])]
        writer.writerow([row.name, len(row.results), *spread, *row.paper.model_dump().values()])
    return text.getvalue()


def histogram_table(results: Sequence[Result]) -> str:
    """In how many runs each block survived, one row per recipe: the paper's figure as a table."""
    lines = ["| recipe | runs | survivors (block: runs) |", "| --- | ---: | --- |"]
    for name, runs in _by_label(results).items():
        counts = sorted(survivors(runs).items(), key=lambda item: _natural(item[0]))
        lines.append(f"| {name} | {len(runs)} | {', '.join(f'{block}: {n}' for block, n in counts)} |")
    return "\n".join(lines) + "\n"


def check_section(path: Path, section: str) -> str:
    """The text of a Markdown file that has a place for `section`."""
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
    whole = path.read_text() if path.is_file() else ""
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise ValueError(
            f"{path} needs one line {begin!r} and after it one line {end!r}, to write between them."
        )
    return whole


def write_section(path: Path, section: str, text: str) -> None:
    """Put `text` between `<!-- section -->` and `<!-- /section -->` in a Markdown file."""
    whole = check_section(path, section)
    begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
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


def _columns(runs: Sequence[Result]) -> dict[str, list[float]]:
    return {
        "accuracy": [r.test_accuracy for r in runs if r.test_accuracy is not None],
        "layers": [r.layers for r in runs],
        "ppr": [r.ppr for r in runs],
        "fpr": [r.fpr for r in runs],
        "rmse": [r.test_rmse for r in runs if r.test_rmse is not None],
        "load": [r.training_macs_ratio for r in runs],
        "minutes": [r.seconds / 60 for r in runs],
    }


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The head, then each row as text; columns in which no row has anything are left out."""
    columns = zip(COLUMNS, *map(_cells, rows), strict=True)
    full = [column for column in columns if any(column[1:]) or not rows]
    return [list(line) for line in zip(*full, strict=True)]


def _cells(row: Row) -> list[str]:
    found, paper = _columns(row.results), row.paper
    return [
        row.name,
        str(len(row.results)),
        _spread(found["accuracy"], 2),
        _printed(paper.accuracy, paper.accuracy_sd),
        _spread(found["layers"], 2),
        _printed(paper.layers, paper.layers_sd),
        _spread(found["ppr"], 2),
        _printed(paper.ppr, paper.ppr_sd),
        _spread(found["fpr"], 2),
        _printed(paper.fpr, paper.fpr_sd),
        _spread(found["rmse"], 4),
        _spread(found["load"], 2),
        f"{statistics.mean(found['minutes']):.1f}",
    ]


def _moments(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample deviation, None where there are too few values."""
    mean = statistics.mean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _tex(text: str) -> str:
    for mark in "&%$#_{}":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("±", r"$\pm$").replace("=-", "=$-$")


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    sd = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{sd}"


def _printed(value: float | None, sd: float | None) -> str:
    return "" if value is None else f"{value:.2f}" + ("" if sd is None else f" ± {sd:.2f}")
