"""What the command line prints: tables for a terminal."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from shallower.certificate import Certificate
from shallower.training import Result

out = Console()
TOGETHER = "Each verdict is with all the others in place; the ladder says what they earn when one has gone."


def show(result: Result, folder: Path) -> None:
    table = Table("", "dense", "pruned", title=f"{result.recipe}, seed {result.seed}")
    table.add_row("blocks", str(result.blocks), str(result.blocks_kept))
    table.add_row("parameters", f"{result.params_dense:,}", f"{result.params:,}  (-{result.ppr:.2f} %)")
    table.add_row("MACs", f"{result.macs_dense:,}", f"{result.macs:,}  (-{result.fpr:.2f} %)")
    table.add_row("training MACs", "1", f"{result.training_macs_ratio:.2f}")
    if result.test_accuracy is not None:
        table.add_row("test accuracy, %", "", f"{result.test_accuracy:.2f}")
    else:
        table.add_row("test RMSE", "", f"{result.test_rmse:.4f}")
    table.add_row("seconds", "", f"{result.seconds:.1f}")
    out.print(table)
    out.print(f"written to {folder}", highlight=False)


def show_ratios(found: dict[str, Any]) -> None:
    table = Table("against the dense network", "", title="trained in turn, on the same data")
    table.add_row("training load, survivors at full cost", f"{found['training_load_ratio']:.2f}")
    table.add_row("training MACs that really ran", f"{found['training_macs_ratio']:.2f}")
    table.add_row("training seconds", f"{found['seconds_ratio']:.2f}")
    if found["accuracy_difference"] is not None:
        table.add_row("test accuracy, points", f"{found['accuracy_difference']:+.2f}")
    table.add_row("test loss", f"{found['loss_difference']:+.4f}")
    out.print(table)


def _named(*columns: str, title: str) -> Table:
    """A table in which nothing is cut off: the blocks stand in one line each, all else is folded."""
    first, *middle, last = columns
    begin = Column(first, no_wrap=True, overflow="fold")
    others = [Column(name, overflow="fold") for name in (*middle, last)]
    return Table(begin, *others, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def show_blocks(name: str, params: int, macs: int, blocks: list[dict[str, Any]]) -> None:
    table = _named(
        "block", "parameters", "%", "MACs", "%", title=f"{name}: {params:,} parameters, {macs:,} MACs"
    )
    totals = {"params": max(params, 1), "macs": max(macs, 1)}
    for row in blocks:
        cells = [(f"{row[k]:,}", f"{100 * row[k] / total:.1f}") for k, total in totals.items()]
        table.add_row(str(row["name"]), *(text for cell in cells for text in cell))
    out.print(table)
    share = [100 * sum(row[k] for row in blocks) / total for k, total in totals.items()]
    out.print(f"{len(blocks)} blocks can be pruned: {share[0]:.1f} % of parameters, {share[1]:.1f} % of MACs")


def _show_survivors(found: Certificate) -> None:
    """`O1` is the least curvature found, and how far below that the smallest eigenvalue may be."""
    columns = "survivor", "earns (95 %)", "price", "first order", "O3", "O1", "", "verdict"
    table = _named(*columns, title="survivors")
    for row in found.survivors:
        earned = f"{row.benefit:.4g} ± {row.high - row.benefit:.2g}"
        bent = "" if row.curvature is None else f"{row.curvature:.3g} (-{row.gap:.1g})"
        estimate = "" if row.estimate is None else f"{row.estimate:.4g}"
        cells = f"{row.price:.4g}", estimate, f"{row.rest:.3f}", bent, row.minimum or "", row.verdict
        table.add_row(row.block, earned, *cells)
    out.print(table)
    if sum(row.verdict == "should have gone" for row in found.survivors) > 1:
        out.print(TOGETHER, highlight=False)


def _show_deaths(found: Certificate) -> None:
    """kappa and eta are at least, and the radius of A0 is at most, what is printed."""
    columns = "removed", "step", "theta", "|w|", "dL/dtheta", "Lambda", "kappa, eta", "A0", "found"
    table = _named(*columns, title="removed")
    for gone in found.deaths:
        path = f"{gone.lyapunov[0]:.3g}, {gone.lyapunov[-1]:.3g}" if gone.lyapunov else ""
        slope = f"{gone.slope:.3g}" + (f"±{gone.noise:.2g}" if gone.noise == gone.noise else "")
        bounds = f"{gone.kappa:.2g}, {gone.eta:.2g}"
        since = "" if gone.entered is None else f" from {gone.entered}"
        cells = f"{gone.theta:.1g}", f"{gone.norm:.3g}", slope, path, bounds, f"{gone.radius:.2g}"
        table.add_row(gone.block, str(gone.step), *cells, gone.finding + since)
    out.print(table)


def show_certificate(found: Certificate, unit: str) -> None:
    """Each survivor against O1 to O3, each removed block's evidence, the ladder, and the whole; scores are in
    `unit`."""
    _show_survivors(found)
    _show_deaths(found)
    if found.ladder:
        table = _named(
            "would go", "from log gamma", "blocks left", "training loss", unit, title="price ladder"
        )
        for rung in found.ladder:
            score = "" if rung.score is None else f"{rung.score:.2f}"
            table.add_row(rung.block, f"{rung.log_gamma:.4g}", str(rung.left), f"{rung.loss:.4f}", score)
        out.print(table)
    parts = f"weights {found.weights_residual:.3f}, theta {found.theta_residual:.3f}"
    out.print(f"KKT residual of the whole problem: {found.kkt_residual:.3f} ({parts})", highlight=False)
    for note in found.notes:
        out.print(note, highlight=False, markup=False)
