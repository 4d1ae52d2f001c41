"""One page about one or several runs: a single HTML file that needs no network, no server and no script."""

import io
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG

import shallower
from shallower.files import atomic, write_text
from shallower.ledger import WHOLE
from shallower.reports import figures
from shallower.reports.costs import NetworkCost
from shallower.reports.figures import Figure, matplotlib
from shallower.reports.runs import Record, groups
from shallower.reports.table import cells, rows_by_label

Item = TypeVar("Item", Figure, str)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser itself lets nothing out
AGAINST = {
    "seconds_ratio": "training seconds, of the twin's",
    "accuracy_difference": "test accuracy less the twin's, points",
    "loss_difference": "test loss less the twin's",
}
OPEN = 3  # with more runs than this, only the first is unfolded
PARTS = {
    "theta": "The rate of every block over time: blocks that earn their keep rise, the others go.",
    "worth": "What each survivor earns on the training set (the loss without it less the loss with it), "
    "against its price.",
    "network": "The network before and after, block by block.",
    "load": "Training load so far, against training the dense network to the end.",
    "parameters": "Parameters alive, as a share of the dense network.",
    "survivors": "In how many runs each block survived.",
    "front": "What was reached, and what it costs to run.",
}


def draw(runs: Sequence[Record]) -> tuple[dict[str, Figure], list[dict[str, Figure]]]:
    """The figures that compare all runs, and for each run its own."""
    own: list[dict[str, Figure]] = []
    for run in runs:
        found: dict[str, Figure] = {}
        if run.thetas:
            found["theta"] = figures.theta_figure(run)
        if run.column("load_survivors"):
            found["load"] = figures.load_figure([run])
        if run.worth:
            found["worth"] = figures.worth_figure(run)
        if run.cost.blocks:
            found["network"] = figures.network_figure(run)
        own.append(found)
    common = {"parameters": figures.parameters_figure(runs)}
    if len(runs) > 1 and any(run.column("load_survivors") for run in runs):
        common["load"] = figures.load_figure(runs)
    if len(runs) > 1 and any(run.result is not None and not run.recipe.dense for run in runs):
        common["survivors"] = figures.survivors_figure(runs)
    if sum(run.result is not None for run in runs) > 1:
        common["front"] = figures.front_figure(runs)
    return common, own


def write_report(runs: Sequence[Record], out: Path, figures_dir: Path | None = None) -> None:
    """Write the page to `out`, and every figure as PNG and SVG to `figures_dir`."""
    common, own = draw(runs)
    shared = {name: svg(figure, f"all-{name}") for name, figure in common.items()}
    each = [
        {name: svg(figure, f"run{place}-{name}") for name, figure in found.items()}
        for place, found in enumerate(own)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(runs, shared, each))
    if figures_dir is not None:
        figures_dir.mkdir(parents=True, exist_ok=True)
        texts = dict([*shared.items(), *_named(runs, each)])
        for name, figure in [*common.items(), *_named(runs, own)]:
            save(figure, texts[name], figures_dir / name)


def save(figure: Figure, text: str, path: Path) -> None:
    """`path`.png and `path`.svg, on white; `text` is the figure as SVG."""
    write_text(path.with_name(f"{path.name}.svg"), text.replace("<svg ", '<svg style="background:#fff" ', 1))
    figure.set_facecolor("white")
    figure.set_dpi(160)
    with atomic(path.with_name(f"{path.name}.png")) as part:
        FigureCanvasAgg(figure).print_png(part)


def svg(figure: Figure, salt: str) -> str:
    """The figure as SVG. Not by `savefig`, which would lay it out a second time."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.set_dpi(72)
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    return text.getvalue()


def _named(runs: Sequence[Record], own: Sequence[dict[str, Item]]) -> Iterable[tuple[str, Item]]:
    for number, (run, found) in enumerate(zip(runs, own, strict=True), start=1):
        title = re.sub(r"[^\w.=-]+", "-", f"{run.recipe.name}-seed{run.seed}")
        for name, item in found.items():
            yield f"{number:02}-{title}-{name}", item


def page(runs: Sequence[Record], common: dict[str, str], own: Sequence[dict[str, str]]) -> str:
    """The page as text, from the runs and their figures as SVG."""
    title = ", ".join(dict.fromkeys(run.recipe.name for run in runs))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_count(runs)} of shallower {escape(shallower.__version__)}</p>",
        '<section id="summary"><h2>Summary</h2>',
        *_summary(runs),
        "</section>",
        f'<section id="figures"><h2>{"Compared" if len(runs) > 1 else "Figures"}</h2>',
        _gallery(common, "all"),
        "</section>",
        '<section id="runs"><h2>Run by run</h2>' if len(runs) > 1 else '<section id="runs"><h2>The run</h2>',
        *(
            _run(run, found, number, len(runs))
            for number, (run, found) in enumerate(zip(runs, own, strict=True))
        ),
        "</section>",
        '<section id="costs"><h2>What each block costs</h2>',
        *_costs(runs),
        "</section>",
        '<section id="recipe"><h2>Recipe and versions</h2>',
        *_recipes(runs),
        "</section>",
    ]
    style = files("shallower.reports").joinpath("page.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · shallower</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _count(runs: Sequence[Record]) -> str:
    return "1 run" if len(runs) == 1 else f"{len(runs)} runs"


def _summary(runs: Sequence[Record]) -> list[str]:
    rows = rows_by_label(runs)
    if not rows:
        return [f"<p>Not finished: {escape('; '.join(f'{r.title}, {r.state}' for r in runs))}.</p>"]
    head, *body = cells(rows)
    text = [_table(head, body, kind="cards")]
    text.append(
        "<p>Mean ± standard deviation over seeds; “paper” is the published figure for the column before it. "
        "pPR and fPR are the share of parameters and MACs pruned; load is the training work that really ran, "
        "as a share of the dense network's.</p>"
    )
    open_ = [f"{run.title}, {run.state}" for run in runs if run.result is None]
    return text + ([f"<p>Not finished: {escape('; '.join(open_))}.</p>"] if open_ else [])


def _run(run: Record, found: dict[str, str], number: int, of: int) -> str:
    unfolded = " open" if of <= OPEN or number == 0 else ""
    return (
        f"<details{unfolded}><summary>{escape(run.title)} <small>{escape(run.state)}</small></summary>"
        f"{_table(('', 'dense', 'pruned' if not run.recipe.dense else 'trained'), _facts(run), kind='facts')}"
        f"{_gallery(found, f'run{number}')}</details>"
    )


def _facts(run: Record) -> list[list[str]]:
    blocks = len(run.cost.blocks)
    rows = [
        ["blocks", str(blocks), str(blocks - len(run.removed))],
        ["parameters", f"{run.cost.params:,}", _less(run.params, run.cost.params)],
        ["MACs", f"{run.cost.macs:,}", _less(run.macs, run.cost.macs)],
    ]
    dense = run.column("load_dense")
    for name, text in figures.CURVES.items():
        load = run.column(f"load_{name}")
        if dense is not None and load is not None:
            rows.append([f"training load: {text}", "1", f"{load[-1] / dense[-1]:.3f}"])
    accuracy, loss = run.column("test_accuracy"), run.column("test_loss")
    if accuracy is not None:
        last = accuracy[-1] if run.result is None else run.result.test_accuracy
        rows.append(["test accuracy, %", "", f"{last:.2f}"])
    if loss is not None:
        rows.append(["test loss", "", f"{loss[-1] if run.result is None else run.result.test_loss:.4f}"])
    if run.result is not None and run.result.test_rmse is not None:
        rows.append(["test RMSE", "", f"{run.result.test_rmse:.4f}"])
    for name, text in AGAINST.items():
        if run.against_dense.get(name) is not None:
            rows.append(
                [
                    text,
                    "",
                    f"{run.against_dense[name]:+.4g}" if "diff" in name else f"{run.against_dense[name]:.3f}",
                ]
            )
    for name in ("data", "training", "pruner", "evaluation"):
        seconds = run.column(f"seconds_{name}")
        if seconds is not None:
            what = "forward and backward" if name == "training" else name
            rows.append([f"seconds: {what}", "", f"{seconds[-1]:.1f}"])
    return rows


def _less(now: int, dense: int) -> str:
    return f"{now:,}" if now == dense else f"{now:,} (−{100 * (1 - now / dense):.2f} %)"


def _costs(runs: Sequence[Record]) -> list[str]:
    """A table for each setting; memory and time as the first of its runs measured them."""
    text: list[str] = []
    for name, some in groups(runs).items():
        cost = some[0].cost
        measured = {row.name: row for row in some[0].costs}
        head = ["block", "width", "parameters", "% of all", "MACs", "% of all", "alive"]
        rows, gone = [], []
        for block in cost.blocks:
            kept = sum(block.name not in run.removed for run in some)
            fate = f"{kept} of {len(some)}" if len(some) > 1 else ("yes" if kept else "no")
            rows.append([block.name, str(block.width), *_shares(block.params, block.macs, cost), fate])
            gone.append(kept == 0)
        rest = cost.params - sum(b.params for b in cost.blocks), cost.macs - sum(b.macs for b in cost.blocks)
        rows.append(["everything else", "", *_shares(*rest, cost), ""])
        rows.append([WHOLE, "", *_shares(cost.params, cost.macs, cost), ""])
        if measured:
            head[-1:-1] = ["kept for backward, bytes a sample", "ms a batch"]
            for row in rows:
                found = measured.get(row[0])
                row[-1:-1] = [f"{found.activations:,}", f"{1e3 * found.seconds:.3f}"] if found else ["", ""]
        text.append(f"<details{' open' if not text else ''}><summary>{escape(name)}</summary>")
        text.append(_table(head, rows, gone=gone, kind="costs") + "</details>")
    return text


def _shares(params: int, macs: int, of: NetworkCost) -> list[str]:
    shares = 100 * params / of.params, 100 * macs / of.macs
    return [f"{params:,}", f"{shares[0]:.1f}", f"{macs:,}", f"{shares[1]:.1f}"]


def _recipes(runs: Sequence[Record]) -> list[str]:
    text: list[str] = []
    for name, some in groups(runs).items():
        fields = some[0].recipe.model_dump(exclude={"paper"})
        rows = [
            [key, value if isinstance(value, str) else json.dumps(value)] for key, value in fields.items()
        ]
        seeds = ", ".join(str(run.seed) for run in some)
        rows = [["seeds", seeds], ["folders", ", ".join(str(run.folder) for run in some)], *rows]
        results = [run.result for run in some if run.result is not None]
        for kind in ("machine", "versions"):  # runs of one setting may have been made in several places
            for what in dict.fromkeys(key for r in results for key in getattr(r, kind)):
                values = dict.fromkeys(str(getattr(r, kind).get(what)) for r in results)
                rows.append([f"{kind}: {what}", ", ".join(values)])
        text.append(f"<details{' open' if not text else ''}><summary>{escape(name)}</summary>")
        text.append(_table(("field", "value"), rows, kind="texts") + "</details>")
    return text


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, gone: Sequence[bool] = (), kind: str = ""
) -> str:
    lines = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = f"<thead><tr>{lines}</tr></thead><tbody>"
    for place, row in enumerate(rows):
        mark = ' class="gone"' if place < len(gone) and gone[place] else ""
        named = zip(_spelt(head), row, strict=True)
        lines += f"<tr{mark}>"
        lines += (
            "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in named) + "</tr>"
        )
    return f'<div class="wide {kind}" tabindex="0"><table>{lines}</tbody></table></div>'


def _spelt(head: Sequence[str]) -> list[str]:
    """The names of columns where they stand alone, as on a phone: the paper's what?"""
    return [f"{head[k - 1]}, paper" if name == "paper" else name for k, name in enumerate(head)]


def _gallery(found: dict[str, str], place: str) -> str:
    cards = [
        f'<figure id="{place}-{name}"><figcaption>{escape(PARTS[name])}</figcaption>'
        f"{_element(text, PARTS[name])}</figure>"
        for name, text in found.items()
    ]
    return '<div class="figures">' + "\n".join(cards) + "</div>"


def _element(found: str, title: str) -> str:
    """SVG as an element of a page: no header, no size of its own, and no name that two could share."""
    found = found[found.index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r'<g id="[^"]*"', "<g", found)
    head, rest = found.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return f'<svg {box[0]} role="img" aria-label="{escape(title)}">{rest}'
