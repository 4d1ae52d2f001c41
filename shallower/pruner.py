"""The controller: reads as the algorithm; the work is done elsewhere."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shallower import optim, prior
from shallower.absorption import Absorption, absorb
from shallower.aside import frozen_statistics
from shallower.blocks import BlockFinder, choose, unaliased
from shallower.checks import check_options, check_real, check_trainable
from shallower.compilation import Compiler
from shallower.estimators import Closure, Estimator, first_order, needs_loss
from shallower.fitting import AnyBlock, cut, fit, take_off, without
from shallower.followers import Follower, check_copy
from shallower.gate import Gate
from shallower.hook import BeforeStep
from shallower.ranks import DEFAULT, Group, Ranks, give_to_ddp, keep_from_ddp
from shallower.sharding import check_sharded, gathered_anew, is_sharded, leave_groups, leave_root
from shallower.split import Block
from shallower.stacks import check_stacks, compact
from shallower.state import VERSION, check_loads, check_state
from shallower.vitals import EVERY, Vitals
from shallower.whole import Whole


@dataclass(frozen=True)
class Removal:
    """A block was removed at `step`, when its rate had fallen to `theta`."""

    step: int
    block: str
    theta: float


class Pruner:
    """Trains a network and prunes its layers at the same time.

    Every residual block gets a gate that is open with a learned probability theta:

        z_next = tail(skip(z) + xi * branch(z)),    xi ~ Bernoulli(theta)                         (1)

    and theta descends the objective C(W, theta) + lambda/2 |W|^2 - log_gamma * sum(theta):

        dL/dtheta = N * (loss(xi=1) - loss(xi=0)) - log_gamma                                     (2)
        theta <- clip(theta - theta_lr * step(dL/dtheta), 0, 1)                                   (5)
        theta <= tolerance: the block is removed, its skip stays                                  (6)

    so a block survives if it lowers the mean training loss by more than its `price = -log_gamma / N`
    nats per sample. In a loop:

        pruner = Pruner(model, optimizer, dataset_size=50_000, log_gamma=-250)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            pruner.step()
        pruner.finalize()
        net = pruner.finish()

    Args:
        model: gated in place; no parameter changes its name.
        optimizer: the one that trains `model`, with all the parameters of its blocks.
        dataset_size: N, the number of training samples.
        log_gamma: the hyper-prior, negative, in nats over the dataset; a number or a function of the step.
        price: instead of log_gamma, in nats per sample; a number or a function of the step.
        multipliers: how many times the common log_gamma a block has, by name.
        blocks: the blocks to gate: their names, those that `find_blocks` found, or a function of the model.
        estimator: `first_order`, `flip`, or a function of the same signature.
        theta: where every rate starts.
        theta_lr: the learning rate of theta.
        theta_optimizer: called as `theta_optimizer([theta], lr=theta_lr)`; Adam.
        tolerance: a rate that falls to it is dead.
        seed: of the draws.
        grad_scaler: the GradScaler, if the loss is scaled with one.
        example: an input of the model (a tensor, a tuple of arguments, a dict of keyword arguments), to find
            blocks that read more than one; see `find_blocks`.
        process_group: the ranks that train `model` together, whose estimates are averaged: the default group
            where torch.distributed is initialised; None for this process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        dataset_size: int | None = None,
        log_gamma: float | prior.Schedule | None = None,
        price: float | prior.Schedule | None = None,
        multipliers: Mapping[str, float] | None = None,
        blocks: Sequence[str | AnyBlock] | BlockFinder | None = None,
        estimator: Estimator = first_order,
        theta: float = 0.75,
        theta_lr: float = 1e-4,
        theta_optimizer: Callable[..., Optimizer] = optim.ThetaAdam,
        tolerance: float = 0.01,
        seed: int = 0,
        grad_scaler: torch.amp.GradScaler | None = None,
        example: Any = None,
        process_group: Group = DEFAULT,
    ) -> None:
        check_options(optimizer, dataset_size, estimator, theta, tolerance)
        assert dataset_size is not None
        self.model, self.optimizer, self.estimator = model, optimizer, estimator
        self.dataset_size, self.tolerance, self.grad_scaler = dataset_size, tolerance, grad_scaler
        self.log_gamma = prior.schedule(log_gamma, price, dataset_size)
        found, self.rejected = choose(model, blocks, example)
        self.blocks = {block.name: block for block in found}
        check_trainable(model, optimizer, self.blocks)
        if not needs_loss(estimator):
            check_real(model, self.blocks)
        check_sharded(model, self.blocks)
        self.multipliers = prior.multiplier_vector(multipliers, self.names)
        self.theta = torch.full((len(found),), float(theta), dtype=torch.float64)  # on the host, which draws
        self._alive = torch.ones_like(self.theta)
        self.theta_optimizer = theta_optimizer([self.theta], lr=theta_lr)
        self.generator = torch.Generator().manual_seed(seed)
        self._prunable = {
            n: list(b.prunable(model.get_submodule(b.path)).values()) for n, b in self.blocks.items()
        }
        self._sizes = [sum(p.numel() for p in self._prunable[name]) for name in self.names]
        self.ranks = Ranks(process_group)
        if self.ranks.size > 1:
            self.ranks.check_same(
                blocks=(self.names, self._sizes),
                seed=seed,
                theta=(theta, theta_lr, tolerance),
                dataset_size=dataset_size,
                log_gamma=(self.log_gamma(0), self.multipliers.tolist()),
            )
        self._unaliased = unaliased(model, found)
        # Everything is checked; from here on the model changes.
        self.gates = {name: self._attach(name, theta) for name in self.names}
        self._buffers = [f"{self.blocks[n].path}.{gate.buffer}" for n, gate in self.gates.items()]
        if self.ranks.size > 1:
            keep_from_ddp(model, self._buffers)
        last = {name: [p for *_, p in gate.reader.last] for name, gate in self.gates.items()}
        self.vitals = Vitals(
            {n: p or self._prunable[n] for n, p in last.items()}, [n for n in last if last[n]]
        )
        self.events: list[Removal] = []
        self.absorption: Absorption | None = None
        self.num_steps, self.finalized, self.finished = 0, False, False
        self.estimated = False  # whether the estimator ran in the last step
        self.finalized_at: int | None = None  # the step after which the network was made deterministic
        self._compiler: Compiler | None = None
        self._followers: list[Follower] = []
        self._before = self._hook(optimizer)
        self._draw()

    def _hook(self, optimizer: Optimizer) -> BeforeStep:
        keep = needs_loss(self.estimator)
        return BeforeStep(
            optimizer, self.gates, self._prunable, grad_scaler=self.grad_scaler, keep_weights=keep
        )

    def use_optimizer(self, optimizer: Optimizer, *, grad_scaler: torch.amp.GradScaler | None = None) -> None:
        """Go on with another optimiser of the same parameters, as one that a trainer builds later, and with
        the GradScaler that it uses."""
        check_trainable(self.model, optimizer, {name: self.blocks[name] for name in self.gates})
        self.optimizer = optimizer
        self.grad_scaler = grad_scaler or self.grad_scaler
        if not self.finalized:
            self._before.remove()
            self._before = self._hook(optimizer)

    def _attach(self, name: str, theta: float) -> Gate:
        watching, free = not needs_loss(self.estimator), getattr(self.estimator, "free", True)
        # The output of a sharded module gets a hook, which must not be on its input.
        alias = name not in self._unaliased and not is_sharded(self._module(name))
        gate = fit(self.model, self.blocks[name], theta, watching=watching, free=free, alias=alias)
        gate.unseen = not isinstance(self.blocks[name], Whole)  # which run as their authors wrote them
        return gate

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(self.blocks[name].path)

    @property
    def names(self) -> list[str]:
        """The gated blocks as they were at the start, removed ones included."""
        return list(self.blocks)

    @property
    def alive(self) -> list[str]:
        """The blocks that are still there."""
        removed = {event.block for event in self.events}
        return [name for name in self.names if name not in removed]

    def prunable(self, name: str) -> list[nn.Parameter]:
        """The parameters that leave with the block `name`; none if it has left."""
        return self._prunable.get(name, [])

    @property
    def thetas(self) -> dict[str, float]:
        """The rate of every block; 0 for a removed one."""
        return dict(zip(self.blocks, self.theta.tolist(), strict=True))

    # -- one step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None, *, learn: bool = True) -> list[Removal]:
        """Learn theta, remove the dead blocks, draw the next network. Call it after `optimizer.step()`.

        Once per optimiser step, so that all micro-batches of a step see the same network. `closure` runs
        the model and returns the mean loss, where the estimator needs it. Returns what was removed.

        With `learn=False` no rate moves: for a while at the start, or in all but every k-th step where
        an estimator costs much (`theta_lr` is then the rate of a step that learns). The same on all ranks.
        """
        if self.finished:
            raise RuntimeError(
                "The pruner has finished and its model is plain; build a new Pruner to prune on."
            )
        self.estimated = False
        if self.finalized or not self.gates:
            self.num_steps += 1
            return []
        self.estimated = self._weights_moved() and learn
        delta_loss = self._estimate(closure) if self.estimated else None
        if not self.estimated:
            self._compare()
        if delta_loss is not None:
            delta_cost = self.dataset_size * delta_loss  # mean loss -> nats over the dataset
            self._learn(delta_cost - self.multipliers * self._log_gamma())  # (2)
            self.vitals.learn(delta_cost)
        self.discard()
        self.num_steps += 1
        if self.num_steps % EVERY == 0 and self.vitals.learned:
            self.vitals.note(self.num_steps, self.thetas, self.gates)
        dead = self._remove(self.tolerance)  # (6)
        self._draw()
        return dead

    def follow(self, copy: nn.Module) -> None:
        """Let a copy of the model lose its blocks with it, as an average of its weights must (EMA):

            ema = AveragedModel(model)
            pruner.follow(ema.module)

        In evaluation mode the copy runs as the mean network until `finalize()`, in training mode with every
        gate open; it is plain after `finish()`, as the model is.
        """
        if self.finished:
            raise RuntimeError("The pruner has finished; copy its model with copy.deepcopy(model).")
        check_copy(copy, self.model)
        rates = {name: self.thetas[name] for name in self.gates}
        self._followers.append(Follower(copy, self.blocks, rates, set(self._unaliased)))

    def compile(self, **options: Any) -> None:
        """Compile the gated blocks with `torch.compile(..., **options)`, one function for each kind of block.

        Draws and removals compile nothing anew. After `finalize()` the survivors are compiled as they are.
        """
        if self.finalized:
            raise RuntimeError(
                "The pruner is finalised and its model plain: compile that itself, `torch.compile(model)`."
            )
        self._compiler = Compiler(**options)
        for gate in self.gates.values():
            gate.compile(self._compiler)

    def _weights_moved(self) -> bool:
        """Whether `optimizer.step()` ran; a GradScaler leaves it out when a gradient overflowed."""
        skips = self.grad_scaler is not None and self.grad_scaler.is_enabled()
        if not self._before.ran and not skips:
            raise RuntimeError(
                "pruner.step() was called without an optimizer.step() before it. Call it once after each "
                "optimizer.step(); with gradient accumulation once per update, not per micro-batch. If the "
                "optimizer steps inside a GradScaler, pass it: `Pruner(..., grad_scaler=scaler)`."
            )
        return self._before.ran

    def discard(self) -> None:
        """Forget the backward passes since the last step, when their gradients are thrown away."""
        self._before.ran = False
        for gate in self.gates.values():
            gate.reader.clear()

    def _estimate(self, closure: Closure | None) -> Tensor | None:
        """loss(xi=1) - loss(xi=0) of every block, in nats of the mean loss; 0 for the removed ones.

        None if a scaled gradient has overflowed, as a GradScaler expects it now and then.
        """
        found = _vector(self._ask(closure), len(self.gates))
        if self._before.scale is not None and not needs_loss(self.estimator):
            found = found / self._before.scale
        if self._before.overflow is not None:
            found = found.where(self._before.overflow.to(found.device) == 0, math.nan)
        known = self.ranks.mean(found, self._stamp(learn=True), self._weights())  # the one transfer in a step
        if not all(map(math.isfinite, known)):
            if self.grad_scaler is not None:
                return None
            wrong = [name for name, value in zip(self.gates, known, strict=True) if not math.isfinite(value)]
            self.discard()
            raise FloatingPointError(
                f"At step {self.num_steps} the estimates of {wrong} are not finite, as after a loss of nan "
                "or inf. No rate has moved and no block has gone, but optimizer.step() has taken the weights "
                "along: go back to the last checkpoint, with a smaller learning rate."
            )
        of = dict(zip(self.gates, known, strict=True))
        return torch.tensor([of.get(name, 0.0) for name in self.blocks], dtype=self.theta.dtype)

    def _compare(self) -> None:
        """Hold the ranks against each other in a step that does not learn.

        The reduction is like that of one that does: a rank that learns alone is noticed, and does not wait.
        """
        if self.ranks.size > 1:
            where = next(iter(self.gates.values())).theta.device
            nothing = torch.zeros(len(self.gates), device=where)
            self.ranks.mean(nothing, self._stamp(learn=False), self._weights())

    def _stamp(self, *, learn: bool) -> bytes:
        """What ranks must have in common."""
        if self.ranks.size == 1:
            return b""
        draws = [gate.xi for gate in self.gates.values()]
        return repr((self.num_steps, learn, self.theta.tolist(), draws)).encode()

    def _weights(self) -> list[Tensor]:
        """The weights that ranks hold against each other's, now and then."""
        if self.ranks.size == 1 or self.num_steps % EVERY:
            return []
        return [p for p in self.model.parameters() if not hasattr(p, "to_local")]  # of a shard, each its part

    def _ask(self, closure: Closure | None) -> Sequence[Tensor] | Tensor:
        gates = list(self.gates.values())
        if not needs_loss(self.estimator) and closure is None:
            return self.estimator(gates, None)
        frozen = frozen_statistics(self.model.modules() if closure else ())
        with frozen, self._before.weights_before(), gathered_anew(self.model):
            return self.estimator(gates, closure)

    def _log_gamma(self) -> float:
        value = float(self.log_gamma(self.num_steps))
        if not -prior.MOST < value <= 0:
            raise ValueError(
                f"The schedule gave log_gamma={value} at step {self.num_steps}; it must be finite, "
                "and not positive."
            )
        return value

    def _learn(self, gradient: Tensor) -> None:
        self.theta.grad = gradient
        self.theta_optimizer.step()
        self.theta.grad = None
        self.theta.clamp_(0, 1)  # (5)
        self.theta.mul_(self._alive)  # a removed block's moments may still move its entry

    def _draw(self) -> None:
        """xi ~ Bernoulli(theta), one draw for the whole batch; as many numbers whatever was removed."""
        uniform = torch.rand(len(self.blocks), generator=self.generator).tolist()
        for name, u, rate in zip(self.blocks, uniform, self.theta.tolist(), strict=True):
            if (gate := self.gates.get(name)) is not None:
                gate.xi, gate.rate = u < rate, rate
                for follower in self._followers:
                    follower.rate(name, rate)

    # -- removal --------------------------------------------------------------------------------------

    def _remove(self, threshold: float, *, inclusive: bool = True) -> list[Removal]:
        rates = self.thetas
        gone = [n for n in self.gates if rates[n] < threshold or (inclusive and rates[n] == threshold)]
        if not gone:
            return []
        events = [Removal(self.num_steps, name, rates[name]) for name in gone]
        self.vitals.note(self.num_steps, rates, gone)
        for name in gone:
            self._cut(name)
        self.events += events
        return events

    def _cut(self, name: str) -> None:
        """The block leaves the module tree and the optimiser; skip and tail stay, under their names."""
        del self.gates[name]
        gone, module = self._prunable.pop(name), self._module(name)
        optim.forget(self.optimizer, gone)
        self.vitals.forget(name)
        leave_groups(self.model, gone)
        cut(self.model, self.blocks[name], alias=name not in self._unaliased)
        leave_root(module, self.model)
        for follower in self._followers:
            follower.cut(name)
        self._alive[self.names.index(name)] = 0.0
        self.theta.mul_(self._alive)

    def without(self, name: str) -> AbstractContextManager[None]:
        """The finalised model as it were without the survivor `name`, for a while."""
        return without(self.model, self.blocks[name], alias=name not in self._unaliased)

    def finalize(self, threshold: float = 0.1) -> list[Removal]:
        """Make the network deterministic: rates below `threshold` become 0, all others 1.

        The gates come off, so fine-tuning runs the plain network; `step()` does nothing from here on.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"Found threshold={threshold}; it must be in [0, 1].")
        if self.finalized:
            return []
        self._check_begun("finalize")
        self.ranks.check_same(step=self.num_steps, threshold=threshold)
        events = self._remove(threshold, inclusive=False)
        self._ungate()
        return events

    def _ungate(self) -> None:
        for name, gate in self.gates.items():
            module = take_off(gate, self.blocks[name])
            if self._compiler is not None:
                self._compiler.in_place(module)
            self.theta[self.names.index(name)] = 1.0
        self.gates.clear()
        for follower in self._followers:
            follower.ungate()
        self._before.remove()
        give_to_ddp(self.model, self._buffers)
        self.finalized, self.finalized_at = True, self.num_steps

    def finish(self) -> nn.Module:
        """The plain network: no gate is left, and linear skips are absorbed wherever that is exact.

        Layers of a transformers model that are gone as a whole leave its configuration, too (see `stacks`).
        It is `model` itself, changed in place; `pruner.absorption` tells what was folded and what stays.
        """
        self._check_begun("finish")
        between = [name for name in self.gates if 0 < self.thetas[name] < 1]
        if between:
            raise RuntimeError(
                f"{len(between)} blocks still have a rate between 0 and 1 ({', '.join(between[:3])}, ...): "
                "the network is random. Call `pruner.finalize()` first, and fine-tune what it leaves."
            )
        if not self.finalized:
            self._ungate()
        if not self.finished:
            check_stacks(self.model)
            modules = {name: block for name, block in self.blocks.items() if isinstance(block, Block)}
            survivors = [modules[name] for name in self.alive if name in modules]
            removed = [event.block for event in self.events if event.block in modules]
            self.absorption = absorb(self.model, removed, survivors, optimizer=self.optimizer)
            for follower in self._followers:
                follower.finish(removed, survivors)
            for model in (self.model, *(follower.model for follower in self._followers)):
                compact(model)  # which names layers anew
            self.finished = True
        return self.model

    def _check_begun(self, call: str) -> None:
        if self.num_steps == 0:
            raise RuntimeError(
                f"pruner.{call}() was called before any pruner.step(), so nothing was learned. Call "
                "`pruner.step()` after each `optimizer.step()`."
            )
        if self.vitals.learned == 0:
            raise RuntimeError(
                f"pruner.{call}() was called after {self.num_steps} steps of which none learned: each had "
                "`learn=False`, or its gradient overflowed. Let some learn: `pruner.step()`."
            )

    # -- state ----------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A Pruner is not copied and not pickled: a copy would lack its hooks on the optimiser. "
            "Build model, optimiser and Pruner anew, and load the state_dict() of each, the Pruner's first. "
            "The gated model alone may be copied (copy.deepcopy) or sent to another process, to be run there."
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the states of model and optimiser; saved with torch.save."""
        return {
            "version": VERSION,
            "names": self.names,
            "sizes": self._sizes,
            "num_steps": self.num_steps,
            "finalized": self.finalized,
            "finalized_at": self.finalized_at,
            "theta": self.theta.clone(),
            "xi": [name for name, gate in self.gates.items() if gate.xi],
            "theta_optimizer": self.theta_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "events": [asdict(event) for event in self.events],
            "vitals": self.vitals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Load it first: it removes the blocks that were removed, so
        that the states of the model and of the optimiser fit. On several ranks all of them call it."""
        check_state(state, self.state_dict())
        check_loads(self.theta_optimizer, state)
        where = {name: state[name] for name in ("num_steps", "events", "xi", "finalized")}
        self.ranks.check_same(**where, theta=state["theta"].tolist())  # before anything is cut
        removed = [Removal(**event) for event in state["events"]]
        for event in removed:
            if event.block in self.gates:
                self._cut(event.block)
        self.events = removed
        self.num_steps = int(state["num_steps"])
        self.theta_optimizer.load_state_dict(state["theta_optimizer"])
        self.generator.set_state(state["generator"])
        self.vitals.load_state_dict(state["vitals"])
        self.theta.copy_(state["theta"])
        if state["finalized"] and not self.finalized:
            self._ungate()
            self.finalized_at = state["finalized_at"]
        for name, gate in self.gates.items():
            gate.xi, gate.rate = name in state["xi"], self.thetas[name]
            for follower in self._followers:
                follower.rate(name, gate.rate)
        self.discard()


def _vector(found: Any, number: int) -> Tensor:
    """What an estimator returned, as one vector."""
    if not isinstance(found, Tensor):
        parts = [torch.as_tensor(value) for value in found]
        if all(part.numel() == 1 for part in parts) and parts:
            found = torch.stack([part.reshape(()) for part in parts])
    shape = tuple(found.shape) if isinstance(found, Tensor) else [tuple(part.shape) for part in parts]
    if shape != (number,):
        raise ValueError(
            f"The estimator returned values of the shape {shape} for {number} gates; "
            "it must return one number for each."
        )
    return found
