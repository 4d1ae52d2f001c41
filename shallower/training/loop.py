"""The training loop: train with pruning, finalise, fine-tune, evaluate."""

import hashlib
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from shallower import store
from shallower.data import Task
from shallower.files import locked, write_csv, write_text
from shallower.ledger import block_costs, count_macs, count_parameters, synchronize
from shallower.pruner import Pruner
from shallower.recipes import Recipe, label
from shallower.training.checkpoint import CHECKPOINT, RunError
from shallower.training.folder import JOB, RECIPE, check_folder, clear, on_a_full_disk
from shallower.training.result import (
    COMPARISON,
    RESULT,
    Result,
    compare,
    count_layers,
    evaluate,
    loss_of,
    versions,
)
from shallower.training.run import Machine, Run
from shallower.training.stopping import Interrupted, stopping
from shallower.worth import Worth
from shallower.worth import worth as measure

Report = Callable[[Run, int, float], None]  # the run, its epoch, the mean loss so far
ASK = 20  # steps after which several ranks ask each other whether to stop
DIVERGED = (
    "The checkpoint, if there is one, is that of the epoch before and still good. Start anew with a smaller "
    "learning rate: --overwrite --set lr=..."
)
Note = Callable[[Run, Path], None]  # after each epoch: the run and its folder


def train(
    recipe: Recipe,
    task: Task,
    folder: str | Path,
    *,
    seed: int = 0,
    machine: Machine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
    note: Note | None = None,
    worth: bool = True,
    job: str | None = None,
) -> Result:
    """Run `recipe` on `task` in `folder`, or go on where a stopped run left off, bit for bit.

    `report` is called now and then in an epoch, `note` after each; `worth` measures what survivors earn.
    `job` is the name of the torchrun that may start it again, see `begun_by`.
    """
    options: dict[str, Any] = {"seed": seed, "machine": machine, "resume": resume, "overwrite": overwrite}
    options["job"] = job
    with on_a_full_disk(Path(folder)), ExitStack() as held:
        run = _begin(recipe, task, Path(folder), held, **options)
        with stopping() as stop:
            for _ in _epochs(run, Path(folder), stop, report, note):
                pass
        _check_stopped(stop, Path(folder))
        return _finish(run, Path(folder), worth=worth)


def train_against_dense(
    recipe: Recipe,
    task: Task,
    folder: str | Path,
    *,
    report: Report | None = None,
    note: Note | None = None,
    worth: bool = True,
    **options: Any,
) -> tuple[Result, Result]:
    """`recipe` and its dense twin, epoch by epoch in turn: the same data in the same order, the same machine.

    The twin's run is in `folder/dense`. Returns both results, the pruned one first.
    """
    if recipe.dense:
        raise RunError(f"{recipe.name} is dense itself (log_gamma is null); choose a recipe that prunes.")
    folders = Path(folder), Path(folder) / "dense"
    twin = recipe.model_copy(update={"log_gamma": None})
    with on_a_full_disk(folders[0]), ExitStack() as held:
        runs = [_begin(recipe, task, folders[0], held, **options)]
        if options.get("resume") and not (folders[1] / CHECKPOINT).exists():  # stopped before the twin's
            options = {**options, "resume": False, "overwrite": True}
        runs.append(_begin(twin, task, folders[1], held, **options))
        pairs = list(zip(runs, folders, strict=True))
        with stopping() as stop:
            for _ in zip_longest(*(_epochs(run, where, stop, report, note) for run, where in pairs)):
                pass
        _check_stopped(stop, folders[0])
        pruned, dense = (_finish(run, where, worth=worth) for run, where in pairs)
        if runs[0].ranks.first:
            write_text(folders[0] / COMPARISON, json.dumps(compare(pruned, dense), indent=2))
    return pruned, dense


def _begin(
    recipe: Recipe,
    task: Task,
    folder: Path,
    held: ExitStack,
    *,
    seed: int = 0,
    machine: Machine | None = None,
    resume: bool = False,
    overwrite: bool = False,
    job: str | None = None,
) -> Run:
    """Check everything, then take the folder."""
    check_folder(folder, resume=resume, overwrite=overwrite)
    run = Run(recipe, task, seed=seed, machine=machine or Machine())
    _check_ranks(run, folder, resume=resume)  # and wait, before the folder that all have checked changes
    if resume:
        run.resume(folder)
    if run.ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        if not held.enter_context(locked(folder)):
            raise RunError(f"Another process trains in {folder}. Wait for it, or choose another with --out.")
        clear(folder, replace=overwrite)
        if job is not None:
            write_text(folder / JOB, job)
        _describe(run, folder, costs=not resume)
    return run


def _check_ranks(run: Run, folder: Path, *, resume: bool) -> None:
    """Ranks must begin with the same; on separate disks, one may lack the checkpoint that another has."""
    if run.ranks.size == 1:
        return
    path = folder / CHECKPOINT
    content = hashlib.sha256(path.read_bytes()).hexdigest() if resume and path.exists() else "none"
    begun = {"recipe": run.recipe.model_dump_json(), "seed": run.seed, "resume": resume}
    run.ranks.check_same(**begun, data=(run.size, len(run.loader)), checkpoint=content)


def _describe(run: Run, folder: Path, *, costs: bool) -> None:
    recipe = run.recipe
    write_text(folder / RECIPE, json.dumps({"seed": run.seed, **recipe.model_dump()}, indent=2))
    if run.pruner is not None and costs:
        batch, _ = next(iter(run.batches("test", recipe.batch_size)))
        with run.machine.autocast():
            rows = block_costs(run.pruner, batch)
        write_csv(folder / "costs.csv", [asdict(row) for row in rows])


def _epochs(
    run: Run, folder: Path, stop: list[int], report: Report | None, note: Note | None
) -> Iterator[None]:
    """Train epoch by epoch, with a checkpoint after each, and one where the user stops the run."""
    for epoch in range(run.loader.epoch, run.recipe.epochs):
        run.clock.start()
        loss = _epoch(run, epoch, stop, report)
        if stop:
            run.save(folder)
            return
        test_loss, accuracy = evaluate(run.model, run.test, run.task.kind, run.machine.autocast)
        run.clock.lap("evaluation")
        _note(run, epoch, loss, test_loss, accuracy)
        run.report(folder)
        run.save(folder)
        if note is not None and run.ranks.first:
            note(run, folder)
        yield


def _check_stopped(stop: list[int], folder: Path) -> None:
    if stop:
        raise Interrupted(f"Stopped; `--resume` goes on from {folder / CHECKPOINT}.", stop[0])


def _epoch(run: Run, epoch: int, stop: list[int], report: Report | None) -> float:
    """One pass over the data, or the rest of it; returns the mean training loss of the epoch."""
    recipe, clock = run.recipe, run.clock
    if run.pruner is not None and recipe.finalize_epoch == epoch and not run.pruner.finalized:
        run.pruner.finalize(recipe.threshold)
    if recipe.fresh_moments and recipe.finalize_epoch == epoch and run.loader.batch == 0:
        run.optimizer.state.clear()
    run.model.train()
    good = torch.ones((), dtype=torch.bool, device=run.loss.device)  # whether every loss so far was finite
    for inputs, labels in run.loader:
        clock.lap("data")
        run.optimizer.zero_grad()
        loss = run.loss_on(run.net, inputs, labels)
        loss.backward()
        run.optimizer.step()
        run.scheduler.step()
        run.loss += loss.detach()
        run.finite += good.logical_and_(loss.detach().isfinite())
        if run.pruner is not None and run.ledger is not None:
            if not run.pruner.finalized:  # the pruner would wait for the device, and its clock with it
                synchronize(run.loss.device)
            clock.lap("training")
            _prune(run, inputs, labels, epoch)
            run.ledger.step()
            clock.lap("pruner")
        else:
            clock.lap("training")
        if report is not None and (clock.since("report") > 0.2 or run.loader.batch == len(run.loader)):
            report(run, epoch, float(loss.detach()))
        if run.loader.batch % ASK == 0:
            _check_finite(run, epoch, good)
        if _to_stop(run, stop):
            break
    _check_finite(run, epoch, good)
    mean = float(run.ranks.sum(run.loss.clone())) / (run.ranks.size * len(run.loader))
    clock.lap("training")
    if not stop:
        run.loss.zero_()
        run.finite.zero_()
    return mean


def _check_finite(run: Run, epoch: int, good: torch.Tensor) -> None:
    if run.ranks.any(not bool(good)):
        step = epoch * len(run.loader) + int(run.finite)
        where = "" if run.ranks.size == 1 else " (of this rank; another may have been the first)"
        raise RunError(
            f"The training loss became nan or inf in epoch {epoch}, at step {step}{where}. {DIVERGED}"
        )


def _to_stop(run: Run, stop: list[int]) -> bool:
    """Ranks hear of a signal at different steps; now and then they ask each other, and stop together."""
    if run.ranks.size == 1:
        return bool(stop)
    last = run.loader.batch == len(run.loader)
    if (run.loader.batch % ASK == 0 or last) and run.ranks.any(bool(stop)) and not stop:
        stop.append(signal.SIGINT)
    return bool(stop) and (run.loader.batch % ASK == 0 or last)


def _prune(run: Run, inputs: torch.Tensor, labels: torch.Tensor, epoch: int) -> None:
    assert run.pruner is not None
    due = run.pruner.num_steps % (run.recipe.estimate_every or 1) == 0
    try:
        run.pruner.step(_closure(run, inputs, labels), learn=due and epoch >= (run.recipe.begin_epoch or 0))
    except FloatingPointError as error:
        raise RunError(f"In epoch {epoch}: {error} {DIVERGED}") from error


def _closure(run: Run, inputs: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """The loss as a function, for an estimator that runs the network again."""
    if run.recipe.estimator == "first_order":
        return None

    return lambda: run.loss_on(run.model, inputs, labels)


def _note(run: Run, epoch: int, loss: float, test_loss: float, accuracy: float | None) -> None:
    row = {
        "epoch": epoch,
        "lr": run.recipe.lr * run.scheduler.lr_lambdas[0](epoch * len(run.loader)),  # of its first step
        "train_loss": loss,
        "test_loss": test_loss,
        "test_accuracy": accuracy,
        **_size(run),
        "seconds": round(run.clock.training, 3),
        **{f"seconds_{name}": round(value, 3) for name, value in run.clock.seconds.items()},
    }
    if run.ledger is not None:
        row |= {f"load_{name}": value for name, value in vars(run.ledger.load).items()}
    run.history.append(row)
    if run.pruner is not None:
        run.rates.append({"epoch": epoch, **run.pruner.thetas})


def _size(run: Run) -> dict[str, int]:
    macs = count_macs(run.model, run.example)
    return {"blocks": len(run.alive), "params": count_parameters(run.model), "macs": macs}


def _finish(run: Run, folder: Path, *, worth: bool) -> Result:
    recipe, kind = run.recipe, run.task.kind
    if run.pruner is not None and not run.pruner.finalized:
        run.pruner.finalize(recipe.threshold)
        run.history[-1] |= _size(run)
        run.rates[-1] |= run.pruner.thetas
        run.report(folder)
    kept = run.alive
    if run.pruner is not None and worth:
        run.clock.start()
        rows = _worth(run, run.pruner)
        if run.ranks.first:
            write_csv(folder / "worth.csv", [asdict(row) for row in rows])
        run.clock.lap("evaluation")
    params, macs = count_parameters(run.model), count_macs(run.model, run.example)
    removed = [] if run.pruner is None else [event.block for event in run.pruner.events]
    net = run.model if run.pruner is None else run.pruner.finish()
    test_loss, accuracy = evaluate(net, run.test, kind, run.machine.autocast)
    load = None if run.ledger is None else run.ledger.load
    result = Result(
        recipe=recipe.name,
        label=label(recipe),
        seed=run.seed,
        settings=recipe.settings,
        test_accuracy=accuracy,
        test_loss=test_loss,
        test_rmse=math.sqrt(2 * test_loss) if kind == "regression" else None,
        layers=count_layers(recipe, len(kept)),
        blocks=len(kept) + len(removed),
        blocks_kept=len(kept),
        survivors=kept,
        params=params,
        params_dense=run.params_dense,
        params_absorbed=count_parameters(net),
        macs=macs,
        macs_dense=run.macs_dense,
        macs_absorbed=count_macs(net, run.example),
        ppr=100 * (1 - params / run.params_dense),
        fpr=100 * (1 - macs / run.macs_dense),
        training_macs_ratio=1.0 if load is None else load.ran / load.dense,
        training_load_ratio=1.0 if load is None else load.survivors / load.dense,
        seconds=run.clock.training,
        seconds_spent=run.clock.seconds,
        machine={
            **asdict(run.machine),
            "device": str(run.machine.where),
            "threads": torch.get_num_threads(),
            "ranks": run.ranks.size,
        },
        versions=versions(),
    )
    if run.ranks.first:
        store.save(folder, net, network=recipe.network, options=recipe.options, removed=removed)
        write_text(folder / RESULT, result.model_dump_json(indent=2))
    return result


def _worth(run: Run, pruner: Pruner) -> list[Worth]:
    """What each survivor earns on the training set, one pass over it in a random order."""
    batches = run.batches("train", run.recipe.batch_size, seed=run.seed)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with run.machine.autocast():
            return loss_of(run.task.kind, run.model(batch[0]), batch[1])

    return measure(pruner, batches, loss) if pruner.alive else []
