"""All that a run is made of, built from a recipe; saved and resumed as one."""

import hashlib
import inspect
import io
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shallower import estimators, models, optim, prior
from shallower.aside import OF_ALL_THREADS
from shallower.blocks import find_blocks
from shallower.compilation import Compiler
from shallower.data import Loader, Samples, Task, crop_and_flip
from shallower.distributed import DataParallel
from shallower.files import write_bytes, write_csv, write_text
from shallower.ledger import Ledger, Load, count_macs, count_parameters
from shallower.pruner import Pruner
from shallower.ranks import Ranks
from shallower.recipes import Recipe
from shallower.training.checkpoint import CHECKPOINT, Checkpoint, RunError, differences, read
from shallower.training.clock import Clock
from shallower.training.result import loss_of
from shallower.training.resumed import check_groups, check_history, check_moments, check_schedule, groups_of

THETA_OPTIMIZERS = {"adam": optim.ThetaAdam, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes; none of it changes what is computed, up to rounding."""

    device: str = "auto"
    bf16: bool = False
    channels_last: bool = False
    compile: bool = False  # the blocks, one function for each kind

    @property
    def arithmetic(self) -> dict[str, bool]:
        """What changes the rounding on one and the same device."""
        return {"bf16": self.bf16, "channels_last": self.channels_last, "compile": self.compile}

    @property
    def where(self) -> torch.device:
        if self.device != "auto":
            return _device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.where.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()


def _device(name: str) -> torch.device:
    try:
        torch.empty(1, device=name).item()  # which a device without memory, as meta is, does not have
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"The device {name!r} cannot be used here ({reason}); try --device cpu.") from error
    return torch.device(name)


class Run:
    """Model, optimiser, schedule, pruner, ledger, data and history of one run.

    On several ranks each has all of it, and its part of every batch; `net` is what the loop calls.
    """

    def __init__(self, recipe: Recipe, task: Task, *, seed: int, machine: Machine) -> None:
        self.recipe, self.task, self.seed, self.machine = recipe, task, seed, machine
        self.ranks = Ranks()
        if recipe.augment and len(task.input_shape) != 3:
            raise RunError(
                f"Images can be cropped and flipped, but {task.name} has inputs {task.input_shape}: "
                "set augment=false."
            )
        device, fmt = machine.where, torch.channels_last if machine.channels_last else torch.preserve_format
        with OF_ALL_THREADS:  # among it the generator of the initial weights
            torch.manual_seed(seed)
            model = _network(recipe)
        self.model: nn.Module = model.to(device, memory_format=fmt)  # type: ignore[call-overload]
        self.loader = self.batches(
            "train",
            recipe.batch_size,
            seed=seed,
            augment=crop_and_flip if recipe.augment else None,
            replacement=recipe.replacement,
            part=(self.ranks.rank, self.ranks.size),
        )
        whole = isinstance(task.test, Samples)  # in memory already; images from files are large
        self.test = self.batches("test", 2000 if whole else recipe.batch_size)
        self.size = len(task.train)
        self.optimizer = _optimizer(recipe, self.model, self.size)
        self.scheduler = _schedule(recipe, self.optimizer, len(self.loader))
        example = next(iter(self.batches("test", 2)))[0]
        self.params_dense = count_parameters(self.model)
        try:
            self.macs_dense = count_macs(self.model, example)
        except RuntimeError as error:
            raise RunError(
                f"The network {recipe.network}({recipe.options}) does not take the inputs {task.input_shape} "
                f"of {task.name}: {error}. Set other options: --set 'options={{...}}'."
            ) from error
        self.example = example
        _check_outputs(self.model, example, recipe, task)
        self.pruner = None if recipe.dense else self._gate()
        self.ledger = None if self.pruner is None else Ledger(self.pruner, example)
        self.history: list[dict[str, Any]] = []
        self.rates: list[dict[str, Any]] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # summed over the epoch so far
        self.finite = torch.zeros((), dtype=torch.int64, device=device)  # steps of the epoch until one is not
        self.clock = Clock()
        self._blocks = [block.name for block in find_blocks(self.model)] if self.pruner is None else []
        if machine.compile:
            self._compile()
        self.net = self.model if self.ranks.size == 1 else self._parallel()

    def batches(self, split: Literal["train", "test"], size: int, **options: Any) -> Loader:
        """Batches of the task on the run's device, with inputs as the recipe wants them."""
        normalised = self.recipe.pixels == "standard"
        return self.task.batches(split, size, device=self.machine.where, normalised=normalised, **options)

    def _gate(self) -> Pruner:
        recipe, steps = self.recipe, len(self.loader)
        assert recipe.log_gamma is not None
        begin, ramp = (recipe.begin_epoch or 0) * steps, round(recipe.ramp_epochs * steps)
        log_gamma = prior.linear_ramp(recipe.log_gamma, ramp, begin=begin) if ramp else recipe.log_gamma
        _check_learns(recipe, steps)
        names = [block.name for block in find_blocks(self.model)]
        multipliers = _multipliers(recipe, names)
        return Pruner(
            self.model,
            self.optimizer,
            dataset_size=self.size,
            log_gamma=log_gamma,
            multipliers=multipliers,
            estimator=getattr(estimators, recipe.estimator),
            theta=recipe.theta,
            theta_lr=recipe.theta_lr,
            theta_optimizer=THETA_OPTIMIZERS[recipe.theta_optimizer],
            tolerance=recipe.tolerance,
            seed=_seed_of_draws(self.seed),
        )

    def _parallel(self) -> nn.Module:
        if self.pruner is None:
            return DistributedDataParallel(self.model)
        return DataParallel(self.model, self.pruner)

    def loss_on(self, net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a training batch; of this rank's part, so that the mean of the ranks is that."""
        with self.machine.autocast():
            output = net(inputs)
            if self.ranks.size == 1:
                return loss_of(self.task.kind, output, labels)
            weight = self.loader.weight(self.loader.batch - 1)
            return weight * loss_of(self.task.kind, output, labels) if len(labels) else 0 * output.sum()

    def _compile(self) -> None:
        if self.pruner is not None:
            self.pruner.compile()
        compiler = Compiler()
        for name in self._blocks:
            compiler.in_place(self.model.get_submodule(name))

    @property
    def alive(self) -> list[str]:
        return self._blocks if self.pruner is None else self.pruner.alive

    @property
    def macs(self) -> int:
        """Of the network as it is now: nothing is counted anew."""
        if self.ledger is None:
            return self.macs_dense
        return self.ledger.rest + sum(self.ledger.blocks[name] for name in self.alive)

    # -- on disk --------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """The checkpoint, by the first rank; all ranks call it."""
        loss = self.ranks.sum(self.loss.clone()) / self.ranks.size
        if not self.ranks.first:
            return
        state = {
            "recipe": self.recipe.model_dump_json(),
            "seed": self.seed,
            "arithmetic": self.machine.arithmetic,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "loader": self.loader.state_dict(),
            "generator": torch.get_rng_state(),
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "load": None if self.ledger is None else asdict(self.ledger.load),
            "history": json.dumps(self.history),
            "rates": json.dumps(self.rates),
            "loss": loss,
            "finite": self.finite,
            "seconds": self.clock.seconds,
        }
        buffer = io.BytesIO()  # torch.save reports a full disk as an error of its own format
        torch.save(state, buffer)
        write_bytes(folder / CHECKPOINT, buffer.getbuffer())

    def resume(self, folder: Path) -> None:
        """Go on where the run in `folder` stopped."""
        path = folder / CHECKPOINT
        kept = read(path)
        other = differences(path, kept, self.recipe, self.seed)
        if other:
            raise RunError(
                f"{path} is of another run: {', '.join(other)}. Resume it with the same recipe, --seed and "
                "--set, or choose another folder with --out."
            )
        if kept.arithmetic != self.machine.arithmetic:
            raise RunError(
                f"{path} was computed with {kept.arithmetic}, this run is to go on with "
                f"{self.machine.arithmetic}, and would not be the same run. Give --bf16, --channels-last and "
                "--compile as they were."
            )
        try:
            self._take(kept)
        except Exception as error:  # what a state of another shape makes PyTorch raise
            raise RunError(
                f"{path} does not fit this run ({type(error).__name__}: {str(error).splitlines()[0]}). Start "
                "the run anew with --overwrite."
            ) from error

    def _take(self, kept: Checkpoint) -> None:
        """The states of all parts, each of which must be that of the same step."""
        self.loader.load_state_dict(kept.loader)
        steps = self.loader.epoch * len(self.loader) + self.loader.batch
        if self.pruner is not None and self.ledger is not None:
            if kept.pruner is None or kept.load is None:
                raise ValueError("it is of a run without pruning")
            own = groups_of(self.pruner.theta_optimizer)
            self.pruner.load_state_dict(kept.pruner)
            check_groups(self.pruner.theta_optimizer, own)
            self.ledger.resume(Load(**kept.load.model_dump()))
            if self.pruner.num_steps != steps or kept.load.dense != steps * self.ledger.dense_step:
                raise ValueError(f"its pruner is at step {self.pruner.num_steps}, its data at {steps}")
        self.model.load_state_dict(kept.model)
        own, base = groups_of(self.optimizer), list(self.scheduler.base_lrs)
        self.optimizer.load_state_dict(kept.optimizer)
        check_groups(self.optimizer, own, may_change=["lr"])
        check_moments(self.optimizer)
        self.scheduler.load_state_dict(kept.scheduler)
        check_schedule(self.scheduler, base, steps)
        check_history(kept.history, kept.rates, self.loader.epoch)
        torch.set_rng_state(kept.generator)
        if kept.seconds.keys() != self.clock.seconds.keys() or not bool(kept.loss.isfinite()):
            raise ValueError("its seconds or its loss are not those of a run")
        self.history, self.rates = kept.history, kept.rates
        self.loss.copy_(kept.loss)
        self.finite.copy_(kept.finite)
        self.clock.seconds = kept.seconds

    def report(self, folder: Path) -> None:
        """The run so far, for people and their tools."""
        if not self.ranks.first:
            return
        events = [] if self.pruner is None else self.pruner.events
        write_csv(folder / "metrics.csv", self.history)
        write_csv(folder / "thetas.csv", self.rates)
        write_text(folder / "events.jsonl", "".join(json.dumps(asdict(e)) + "\n" for e in events))


def _multipliers(recipe: Recipe, names: list[str]) -> dict[str, float]:
    """Of every block by its name: one given for the block itself, or for the innermost module around it."""
    found: dict[str, float] = {}
    strangers = []
    for place in sorted(recipe.multipliers, key=len):
        inside = [name for name in names if f"{name}.".startswith(f"{place}.")]
        found |= dict.fromkeys(inside, recipe.multipliers[place])
        strangers += [] if inside else [place]
    if strangers:
        raise RunError(
            f"{', '.join(strangers)} is no block, nor holds one, so these multipliers would do nothing. "
            f"The blocks are {', '.join(names)}."
        )
    return found


def _check_learns(recipe: Recipe, steps: int) -> None:
    """Theta must learn at least once before the network is finalised."""
    every, end = recipe.estimate_every or 1, (recipe.finalize_epoch or recipe.epochs) * steps
    first = math.ceil((recipe.begin_epoch or 0) * steps / every) * every
    if first >= end:
        raise RunError(
            f"theta would never learn: estimate_every={every} and begin_epoch={recipe.begin_epoch} let it do "
            f"so first in step {first}, but the network is finalised after {end}. Set a smaller one."
        )


def _seed_of_draws(seed: int) -> int:
    """Another than that of the initial weights, which would be drawn from the very same numbers."""
    return int.from_bytes(hashlib.blake2b(f"draws/{seed}".encode(), digest_size=7).digest(), "big")


def _network(recipe: Recipe) -> nn.Module:
    if recipe.network not in models.__all__:
        raise RunError(f"There is no network {recipe.network!r}; there are {', '.join(models.__all__)}.")
    build = getattr(models, recipe.network)
    try:
        return build(**recipe.options)
    except (TypeError, RuntimeError) as error:
        raise RunError(
            f"The options {recipe.options} do not fit {recipe.network}: {error}. "
            f"It has: {', '.join(inspect.signature(build).parameters) or 'none'}."
        ) from error


def _check_outputs(model: nn.Module, example: torch.Tensor, recipe: Recipe, task: Task) -> None:
    with torch.no_grad():
        shape = tuple(model.eval()(example).shape)
    model.train()
    few = len(shape) != 2 or shape[1] < task.num_classes  # a classifier may know more classes than there are
    if few or (task.kind == "regression" and shape[1] != task.num_classes):
        raise RunError(
            f"The network {recipe.network}({recipe.options}) gives {shape[1:]} values for a sample, but "
            f"{task.name} needs ({task.num_classes},). Set other options: --set 'options={{...}}'."
        )


def _optimizer(recipe: Recipe, model: nn.Module, size: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    common: dict[str, Any] = {"lr": recipe.lr, "weight_decay": recipe.decay / size, "fused": True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, **common)
    kind: Callable[..., torch.optim.Optimizer] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        recipe.optimizer
    ]
    return kind(parameters, **common)


def _schedule(
    recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate as a factor of the first, by the step."""
    last, begin = recipe.epochs * steps, (recipe.finalize_epoch or recipe.epochs) * steps

    def factor(step: int) -> float:
        if recipe.finetune_lr is not None and step >= begin:
            return recipe.finetune_lr / recipe.lr
        return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / last)).item()) if recipe.cosine else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
