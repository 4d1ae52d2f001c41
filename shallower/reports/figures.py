"""The pictures of runs: each function takes what `load_runs` reads, and gives a figure of matplotlib."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import takewhile
from textwrap import wrap
from typing import Any, ParamSpec

try:
    import matplotlib
except ImportError as error:
    raise ImportError('The figures need matplotlib: pip install "shallower[reports]".') from error
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from shallower.reports.runs import Record, groups

WIDTH, HEIGHT = 5.2, 3.5  # inches: the letters can still be read when a phone makes it three
INK, FAINT, ALIVE, IDLE, PRICE = "#1f2933", "#9aa5b1", "#0f766e", "#e5a4a4", "#b91c1c"
COLOURS = ("#0f766e", "#c2410c", "#1d4ed8", "#a21caf", "#4d7c0f", "#b91c1c", "#0e7490", "#854d0e")
CURVES = {
    "survivors": "survivors at full cost (paper)",
    "expected": "each block at theta",
    "ran": "what really ran",
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # letters stay letters: small files that can be searched and read aloud
}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """`draw`, in the style of these pages, laid out once for all the formats that it is saved in."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            if figure.get_layout_engine() is not None:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")
            return figure

    return drawn


@styled
def theta_figure(run: Record) -> Figure:
    """The rate of every block over time; a cross where a block was removed."""
    figure, axes = _axes("epoch", "theta, the rate of survival")
    names = [cost.name for cost in run.cost.blocks]
    scale, hues = Normalize(0, max(len(names) - 1, 1)), matplotlib.colormaps["turbo"]
    steps, end = run.steps or 1.0, run.recipe.finalize_epoch
    ends = {event.block: (event.step / steps, event.theta) for event in run.events}
    for place, name in enumerate(names):
        points = [(0.0, run.recipe.theta)]
        points += [((row["epoch"] or 0) + 1, row[name] or 0.0) for row in run.thetas if row.get(name)]
        if name in ends:
            points = [point for point in points if point[0] < ends[name][0]] + [ends[name]]
        elif end is not None and points[-1][0] > end:
            points = sorted([*points, (float(end), 1.0)])  # survivors are opened at once, not by and by
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=hues(scale(place)), lw=0.9 if name in ends else 1.6, label=name)
    if ends:
        x, y = zip(*ends.values(), strict=True)
        mark = axes.scatter(x, y, marker="x", s=26, color=INK, zorder=3, clip_on=False)
        axes.legend([mark], [f"removed ({len(ends)} of {len(names)})"], **_below(1))
    if end is not None and end < run.recipe.epochs:
        axes.axvline(end, color=INK, ls=":", lw=1)
        axes.text(end, 1.03, "pruning ends", ha="right", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, run.recipe.epochs)
    start, ticks = _ticks(names)
    bar = figure.colorbar(ScalarMappable(scale, hues), ax=axes, label=f"block, {start}*", pad=0.02)
    bar.locator, bar.formatter = MaxNLocator(integer=True, nbins=8), ticks
    bar.outline.set_visible(False)
    bar.update_ticks()
    return figure


@styled
def network_figure(run: Record) -> Figure:
    """The blocks in order, before and after; beside each its width, MACs and parameters."""
    rows = run.cost.blocks
    figure = Figure(figsize=(WIDTH, 0.24 * (len(rows) + 4)))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.axis("off")
    axes.set_xlim(0, 10.4)
    axes.set_ylim(len(rows) + 2.3, -1.7)
    heads = {1.55: "before", 4.85: "after" if run.result else "now"}
    for x, text in heads.items():
        axes.text(x, -0.9, text, ha="center", va="center", weight="bold")
    for x, text in {7.3: "width", 8.8: "MACs", 10.3: "params"}.items():
        axes.text(x, -0.9, text, ha="right", va="center", weight="bold")
    for y, cost in enumerate(rows):
        gone = cost.name in run.removed
        _box(axes, 0.1, y, cost.name, alive=True)
        _box(axes, 3.4, y, "removed" if gone else cost.name, alive=not gone)
        shade = FAINT if gone else INK
        for x, text in ((7.3, str(cost.width)), (8.8, short(cost.macs)), (10.3, short(cost.params))):
            axes.text(x, y, text, ha="right", va="center", color=shade, fontsize=8)
    kept = len(rows) - len(run.removed)
    for x, blocks, macs, params in (
        (1.55, len(rows), run.cost.macs, run.cost.params),
        (4.85, kept, run.macs, run.params),
    ):
        text = f"{blocks} blocks\n{short(macs)} MACs\n{short(params)} params"
        axes.text(x, len(rows) - 0.3, text, ha="center", va="top", fontsize=8)
    return figure


def _box(axes: Axes, x: float, y: float, text: str, *, alive: bool) -> None:
    look = {"fc": "#ccebe7", "ec": ALIVE} if alive else {"fc": "none", "ec": FAINT, "ls": (0, (3, 2))}
    axes.add_patch(
        FancyBboxPatch((x, y - 0.36), 2.9, 0.72, boxstyle="round,pad=0,rounding_size=0.15", **look)
    )
    axes.text(x + 1.45, y, text, ha="center", va="center", fontsize=7.5, color=INK if alive else FAINT)


@styled
def parameters_figure(runs: Sequence[Record]) -> Figure:
    """Parameters alive over time, one line for each run, as a share of the network before pruning."""
    figure, axes = _axes("epoch", "parameters, % of dense", legend=_lines(runs))
    for run, colour in _coloured(runs):
        share = [100 * value / run.cost.params for value in run.column("params") or []]
        axes.plot([0, *run.epochs], [100, *share], color=colour, lw=1.4)
    axes.set_ylim(0, 104)
    axes.set_xlim(0, max(run.recipe.epochs for run in runs))
    _legend(axes, runs)
    return figure


@styled
def load_figure(runs: Sequence[Record]) -> Figure:
    """Training load up to each epoch, against training the dense network to the end.

    One run shows all three ways to count it, several the paper's way and what really ran.
    """
    runs = [run for run in runs if run.column("load_survivors")]
    figure, axes = _axes("epoch", "training load, % of dense", legend=_lines(runs) + 2)
    last = max(run.recipe.epochs for run in runs)
    for epochs in sorted({run.recipe.epochs for run in runs}):
        axes.plot([0, epochs], [0, 100], color=FAINT, ls="--", lw=1.2, label="dense")
    names = list(CURVES) if len(runs) == 1 else ["survivors", "ran"]
    styles = dict(zip(names, ("-", "--", ":") if len(names) == 3 else ("-", ":"), strict=True))
    for run, colour in _coloured(runs):
        dense = run.column("load_dense")
        total = dense and dense[-1] / len(dense) * run.recipe.epochs
        for shade, name in zip(COLOURS, names, strict=False):
            load = run.column(f"load_{name}")
            if load is None or not total:
                continue
            curve = [100 * value / total for value in load]
            tint = shade if len(runs) == 1 else colour
            axes.plot([0, *run.epochs], [0, *curve], color=tint, ls=styles[name], lw=1.4, label=CURVES[name])
    axes.set_xlim(0, last)
    axes.set_ylim(0, 104)
    if len(runs) == 1:
        axes.legend(**_below(2))
    else:
        lines = [Line2D([], [], color=INK, ls=styles[name], label=CURVES[name]) for name in names]
        lines.append(Line2D([], [], color=FAINT, ls="--", label="dense"))
        _legend(axes, runs, lines)
    return figure


@styled
def survivors_figure(runs: Sequence[Record]) -> Figure:
    """In how many finished runs each block survived; one panel for each setting."""
    panels = groups([run for run in runs if run.result is not None and not run.recipe.dense])
    colours = {run.label: colour for run, colour in _coloured(runs)}
    figure = Figure(figsize=(WIDTH, 0.3 + 1.8 * max(len(panels), 1)), layout="constrained")
    for place, (name, some) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        names = [cost.name for cost in some[0].cost.blocks]
        counts = [sum(block not in run.removed for run in some) for block in names]
        axes.bar(range(len(names)), counts, color=colours[name], width=0.8)
        axes.set_title(folded(name))
        axes.set_ylabel(f"runs of {len(some)}")
        axes.set_ylim(0, len(some) * 1.05)
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        axes.grid(visible=False, axis="x")
        start, ticks = _ticks(names)
        axes.xaxis.set_major_formatter(ticks)
        axes.set_xlabel(f"block, {start}*")
    return figure


@styled
def worth_figure(run: Record) -> Figure:
    """What each survivor earns against what it has to earn, in nats over the training set."""
    rows = run.worth
    figure = Figure(figsize=(WIDTH, 1.5 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel="nats over the training set")
    places, names = range(len(rows)), [row.block for row in rows]
    kept = [ALIVE if row.benefit > row.price else IDLE for row in rows]
    axes.barh(places, [row.benefit for row in rows], color=kept, height=0.7)
    errors = [row.error if row.error < float("inf") else 0.0 for row in rows]
    axes.errorbar([row.benefit for row in rows], places, xerr=errors, fmt="none", ecolor=INK, lw=1)
    for place, row in zip(places, rows, strict=True):
        axes.plot([row.price] * 2, [place - 0.45, place + 0.45], color=PRICE, lw=2)
    price, most = max(row.price for row in rows), max(row.benefit for row in rows)
    if most > 20 * price:  # the price would vanish at the left
        axes.set_xscale("symlog", linthresh=price)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_yticks(places, names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    lines = [
        Line2D([], [], color=ALIVE, lw=6, label="earns its keep"),
        Line2D([], [], color=IDLE, lw=6, label="does not"),
        Line2D([], [], color=PRICE, lw=2, label="price, $-\\log\\gamma$"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=3)
    return figure


@styled
def front_figure(runs: Sequence[Record]) -> Figure:
    """Accuracy (or the error of a regression) against MACs, one panel for each task; the paper as stars."""
    done = [run for run in runs if run.result is not None]
    tasks = list(dict.fromkeys(run.recipe.task for run in done))
    figure = Figure(
        figsize=(WIDTH, 0.9 + 2.6 * max(len(tasks), 1) + 0.2 * _lines(done)), layout="constrained"
    )
    for place, task in enumerate(tasks, start=1):
        axes = figure.add_subplot(len(tasks), 1, place)
        axes.set_title(task)
        axes.set_xlabel("MACs of one forward pass")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        some = [(run, colour) for run, colour in _coloured(runs) if run in done and run.recipe.task == task]
        axes.set_ylabel("test accuracy, %" if _score(some[0][0])[1] else "test RMSE (less is better)")
        for run, colour in some:
            axes.plot(run.macs, _score(run)[0], "o", color=colour, alpha=0.75, ms=6, mec="white", mew=0.6)
        for colour, spot in {run.label: (colour, _printed(run)) for run, colour in some}.values():
            if spot is not None:
                axes.plot(*spot, "*", color=colour, ms=12, mfc="white")
        axes.margins(0.12)
        stars = [Line2D([], [], ls="", marker="*", color=INK, mfc="white", ms=10, label="the paper")]
        handles = stars if any(_printed(run) for run, _ in some) else []
        axes.legend(handles=[*_handles(some, ls="", marker="o"), *handles], **_below(1))
    return figure


def _score(run: Record) -> tuple[float, bool]:
    """What the run reached, and whether that is an accuracy."""
    assert run.result is not None
    accuracy, error = run.result.test_accuracy, run.result.test_rmse
    return (accuracy, True) if accuracy is not None else (error or 0.0, False)


def _printed(run: Record) -> tuple[float, float] | None:
    """Where the paper's figure stands in the front, if it has both coordinates."""
    if run.paper.accuracy is None or (run.paper.fpr is None and not run.recipe.dense):
        return None
    return run.cost.macs * (1 - (run.paper.fpr or 0.0) / 100), run.paper.accuracy


def short(value: float) -> str:
    """851,002 as 851k."""
    return f"{value:.0f}" if value < 1000 else EngFormatter(sep="", places=1)(value).replace(".0", "")


def _ticks(names: Sequence[str]) -> tuple[str, FuncFormatter]:
    """What all names begin with, and the rest of each as a label for its place."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = re.sub(r"\d+$", "", "".join(letters[0] for letters in same)) if len(names) > 1 else ""
    rest = {float(place): name.removeprefix(start) for place, name in enumerate(names)}
    return start, FuncFormatter(lambda place, _: rest.get(place, ""))


def _axes(xlabel: str, ylabel: str, *, legend: int = 1) -> tuple[Figure, Axes]:
    """One panel, with room for `legend` lines below it."""
    figure = Figure(figsize=(WIDTH, HEIGHT + 0.2 * legend), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _coloured(runs: Sequence[Record]) -> Iterator[tuple[Record, str]]:
    """A colour for each setting; seeds share it."""
    names = list(groups(runs))
    many = matplotlib.colormaps["turbo"]
    rest = [matplotlib.colors.to_hex(many(k / max(len(names) - 1, 1))) for k in range(len(names))]
    colours = dict(zip(names, COLOURS if len(names) <= len(COLOURS) else rest, strict=False))
    for run in runs:
        yield run, colours[run.label]


def _handles(coloured: Sequence[tuple[Record, str]], **look: Any) -> list[Line2D]:
    names = {run.label: colour for run, colour in coloured}
    return [
        Line2D([], [], color=colour, lw=2.5, label=folded(name), **look) for name, colour in names.items()
    ]


def folded(name: str) -> str:
    """A long label on several lines, so that it does not push the axes aside."""
    return "\n".join(wrap(name, 56, break_on_hyphens=False)) or name


def _lines(runs: Sequence[Record]) -> int:
    """The lines that the labels of the runs take in a legend."""
    return sum(folded(name).count("\n") + 1 for name in groups(runs))


def _legend(axes: Axes, runs: Sequence[Record], more: Sequence[Line2D] = ()) -> None:
    axes.legend(handles=[*_handles(list(_coloured(runs))), *more], **_below(1))


def _below(columns: int) -> dict[str, Any]:
    """A legend under the axes covers no curve."""
    return {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": columns}
