"""A run while it goes on: its curves for TensorBoard, and its page, written anew after every epoch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shallower.reports.runs import load_runs
from shallower.training import Note, Run, RunError
from shallower.training.result import PAGE


@contextmanager
def following(folder: Path, *, tensorboard: bool = False, report: bool = False) -> Iterator[Note]:
    """What is to be done after each epoch of the runs in and below `folder`."""
    writer = _writer() if tensorboard else None
    if report:
        from shallower.reports.page import write_report  # matplotlib is an extra
    writers: dict[Path, Any] = {}

    def note(run: Run, where: Path) -> None:
        if writer is not None:
            if where not in writers:
                writers[where] = writer(str(where / "tensorboard"))
            for name, value, epoch in curves(run):
                writers[where].add_scalar(name, value, epoch)
        if report:
            write_report(load_runs([folder])[0], folder / PAGE)

    try:
        yield note
        if report:  # once more, with the result
            write_report(load_runs([folder])[0], folder / PAGE)
    finally:
        for one in writers.values():
            one.close()


def curves(run: Run) -> Iterator[tuple[str, float, int]]:
    """The last row of the run by name: the page's curves, as shares of the dense network, and all metrics."""
    row = run.history[-1]
    epoch = row["epoch"]
    for name, value in row.items():
        if name != "epoch" and value is not None:
            yield name, value, epoch
    yield "share/params", row["params"] / run.params_dense, epoch
    yield "share/macs", row["macs"] / run.macs_dense, epoch
    if run.ledger is not None:
        for name in ("survivors", "expected", "ran"):
            yield f"share/load_{name}", row[f"load_{name}"] / row["load_dense"], epoch
    for name, rate in run.rates[-1].items() if run.rates else ():
        if name != "epoch":
            yield f"theta/{name}", rate, epoch


def _writer() -> Callable[[str], Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError('TensorBoard is not installed: pip install "shallower[tensorboard]".') from error
    return SummaryWriter
