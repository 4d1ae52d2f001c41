"""The gate on a residual block.

    z_next = tail(skip(z) + xi * branch(z)),    xi ~ Bernoulli(theta)                             (1)

A gated module keeps its place, its parameters and their names. Only its class changes, to one whose
`forward` asks the gate which of the two networks to run, as FSDP2's `fully_shard` does it.
"""

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shallower.aside import frozen_statistics, same_dice
from shallower.compilation import Compiled, Compiler
from shallower.euler import Reader
from shallower.graphs import compiled, source, used_modules
from shallower.idle import Branch, Circumstances
from shallower.split import Block, Owned, linear_parameters, split, used
from shallower.tracing import MIXIN, held_numbers
from shallower.verify import check_first_use
from shallower.watch import Listener

GATE, THETA = "shallower_gate", "shallower_theta"  # an attribute and a buffer of a gated module
PARTS = ("head", "branch", "skip", "tail")
Forward = Callable[..., Tensor]  # a module's own forward


class Gate:
    """What one gated block knows: its rate, its current draw, and what the backward pass said it is worth.

    `worth` is the first-order estimate of loss(xi=1) - loss(xi=0), eq. (3): <dloss/dsum, branch(z)>,
    summed over the backward passes of one optimiser step. An open gate reads it off the gradients of the
    branch's last affine map, at no cost in activations (`euler`); a closed gate runs its branch forward only.
    """

    parts: Branch | None = None  # what a branch that may run late is made of
    _fits = False  # whether branch and skip are known to have one shape
    unseen = False  # whether it is to be looked at when it first runs, see `verify`
    shared: tuple[str, ...] = (*PARTS, "inputs", "constants", "compiled")  # with copies of itself
    head: Callable[[nn.Module, Tensor], Tensor]
    branch: Callable[[nn.Module, Tensor], Tensor]
    skip: Callable[[nn.Module, Tensor], Tensor]
    tail: Callable[[nn.Module, Tensor], Tensor]

    def __init__(
        self, block: Block, module: nn.Module, *, watching: bool = True, free: bool = True, alias: bool = True
    ) -> None:
        self.name, self.module, self.overwrites = block.name, module, block.overwrites
        self.watching = watching  # whether `worth` is wanted; if not, a closed gate runs nothing
        self.wants_free = free  # whether Euler's identity may be used
        self.alias = alias  # whether a closed block may hand on its very input
        self.xi = True
        self.rate = 1.0  # theta as a number, handed to the buffer when the mean network runs
        self.credits: list[Tensor] = []
        self.listener = Listener(self.credits)
        self.compiled: Compiled | None = None  # the module's own forward, see `Pruner.compile`
        self.heard: list[Callable[[], Any]] | None = None  # its branch in evaluation, see `ledger`
        self.record: list[tuple[Gate, Tensor]] | None = None  # see `estimators.flip`
        self.replay: deque[Callable[[], Tensor]] = deque()  # what it returned before, see `estimators.flip`
        self._prepare(block)

    @property
    def training(self) -> bool:
        return self.module.training

    @property
    def buffer(self) -> str:
        """Under which name the module holds theta."""
        return THETA

    @property
    def theta(self) -> Tensor:
        """The rate of survival, in [0, 1]; a buffer, so that no weight optimiser sees it."""
        return getattr(self.module, self.buffer)

    def _prepare(self, block: Block) -> None:
        parts = [getattr(block, part) for part in PARTS]
        self.code = [source(part) for part in parts]
        self.head, self.branch, self.skip, self.tail = map(compiled, parts)
        self.inside = list(used_modules(self.module, block.branch))
        self.parts = Branch(self.module, self.inside, used(self.module, block.branch))
        self.constants = held_numbers(self.module)
        self.inputs = inspect.signature(type(self.module).forward).parameters
        self._read(linear_parameters(self.module, block) if self.wants_free else [])

    def _read(self, last: Sequence[Owned]) -> None:
        """Read the estimate (3) off the gradients of the branch's last affine map, if it is trained."""
        self.reader = Reader(last, self.credits, watching=self.watching)

    def compile(self, compiler: Compiler) -> None:
        """Run the block, and its branch where that runs alone, as compiled functions.

        Which of them runs is decided outside of both: a draw never compiles anything anew.
        """
        author: type[nn.Module] = type(self.module).__bases__[1]
        self.compiled = compiler(author.forward, self.module)
        self.branch = compiler(self.branch, self.module)

    # -- what the block is worth ----------------------------------------------------------------------

    @property
    def worth(self) -> Tensor | None:
        """The estimate (3) so far, or None where no gradient has reached the gate."""
        return sum(self.credits[1:], self.credits[0]) if self.credits else None

    # -- running --------------------------------------------------------------------------------------

    def run(self, whole: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The forward pass of the module, whose own forward is `whole`."""
        if self.replay:
            return self.replay.popleft()()
        if self.unseen and self.compiled is None:
            check_first_use(self.module, [self], (args, kwargs))
        z = args[0] if len(args) == 1 and not kwargs else self.input(args, kwargs)
        if not (self.xi and self.module.training and self.may_run_whole()):
            out = self._forward(z)
        else:  # open: as the module's author wrote it
            out = whole(z) if self.compiled is None else self.compiled(self.module, z)
        if self.record is not None:
            self.record.append((self, out.clone()))
        return out

    def may_run_whole(self) -> bool:
        if not (self.watching and torch.is_grad_enabled()):
            return True
        return self.reader.ready()

    def input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The one input; the other arguments must have the values that the block was split with."""
        names = list(self.inputs)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        others = {n: v for n, v in given.items() if n != names[0]}
        if names[0] not in given or not all(_is_default(self.inputs.get(n), v) for n, v in others.items()):
            raise TypeError(
                f"The block {self.name!r} was called with the arguments {list(given)}, but it was split into "
                f"skip and branch as a function of {names[0]!r} alone, every other argument at its default. "
                "Call it so, or leave the block out: `Pruner(..., blocks=[...])`."
            )
        return given[names[0]]

    def _forward(self, z: Tensor) -> Tensor:
        module, watching = self.module, self.watching and torch.is_grad_enabled()
        self._check_constants()
        z = self.head(module, z)
        if not module.training:
            self.theta.fill_(self.rate)
            self._hear(partial(self.branch, module, z))
            return self.tail(module, self.skip(module, z) + self.theta * self.branch(module, z))
        skip = self.skip(module, z)
        if self.xi:
            branch = self.branch(module, z)
            return self.tail(module, self.listener.watch(skip + branch, branch, self.alias))  # (1), xi = 1
        later = self.watching and self.later()
        if later:
            self._check_fits(skip, z)
        elif self.watching:
            # Without gradients, too, as in the first pass of reentrant checkpointing: it throws dice.
            idle = self._idle(skip.shape, z)
        if not watching:
            out = self.tail(module, skip)
            return out if self.alias else out.clone()
        if later:
            assert self.parts is not None
            run = partial(self._idle_later, skip.shape, Circumstances(self.parts, z.device))
            return self.tail(module, self.listener.watch_later(skip, z, run))  # (1) with xi = 0
        return self.tail(module, self.listener.watch(skip, idle, self.alias))  # (1) with xi = 0

    def later(self) -> bool:
        """Whether the closed branch may run as late as in the backward pass.

        Nobody overwrites what it reads, or the block could not hand on its very input; the rest see `idle`.
        """
        return self.alias and self.parts is not None and self.parts.plain and self.parts.may_wait()

    def _idle(self, shape: torch.Size, *reads: Any) -> Tensor:
        """The output of the branch alone, forward only."""
        with torch.no_grad(), frozen_statistics(self.inside):
            idle = self.branch(self.module, *reads)
        if idle.shape != shape:
            raise RuntimeError(
                f"The skip of {self.name!r} gives {tuple(shape)}, its branch {tuple(idle.shape)}: without "
                "the branch the block would change its shape. Give it a skip of the right shape, or leave it "
                "out: `Pruner(..., blocks=[...])`."
            )
        return idle

    def _idle_later(self, shape: torch.Size, circumstances: Circumstances, z: Tensor) -> Tensor:
        """The same in the backward pass, as it would have been before."""
        if circumstances.hold():
            return self._idle(shape, z)
        with circumstances.restored():
            return self._idle(shape, z)

    def _check_fits(self, skip: Tensor, z: Tensor) -> None:
        """Once, before the network goes on with a skip that may have another shape than the sum.

        Not while somebody counts or records what is run; the backward pass looks again.
        """
        if not self._fits and not torch._C._len_torch_dispatch_stack():
            with same_dice(self.module):
                self._idle(skip.shape, z.detach())  # as in the backward pass: a compiled branch looks at that
            self._fits = True

    def _hear(self, run: Callable[[], Any]) -> None:
        if self.heard is not None:
            self.heard.append(run)

    def _check_constants(self) -> None:
        """Numbers that the module holds are written into its parts; they must not have changed since."""
        now = held_numbers(self.module)
        if now == self.constants:
            return
        if MIXIN not in vars(type(self.module)):
            raise RuntimeError(
                f"The block {self.name!r} was given another class after it was gated, "
                f"{type(self.module).__name__}. Apply fully_shard and the like first, build the optimiser, "
                "then the Pruner."
            )
        with plain(self.module):
            block = split(self.module, name=self.name)
        if [source(getattr(block, part)) for part in PARTS] != self.code:
            changed = [k for k in now if now[k] != self.constants.get(k)]
            raise RuntimeError(
                f"The block {self.name!r} was gated when {', '.join(changed)} had another value, which its "
                "parts still have. Set such attributes before the Pruner is built."
            )
        self.constants = now

    # -- copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: compiled parts and hooks stay behind, and the copy splits its block again."""
        kept = ("name", "overwrites", "module", "watching", "wants_free", "alias", "xi", "rate", "code")
        return {name: vars(self)[name] for name in kept if name in vars(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, credits=[], compiled=None, heard=None, record=None, replay=deque())
        self.listener = Listener(self.credits)
        self.reader = Reader([], self.credits, watching=False)  # until it is split again

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gate":
        """A copy that runs the same parts; its estimates are its own."""
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        twin.module = copy.deepcopy(self.module, memo)
        for name in self.shared:
            setattr(twin, name, getattr(self, name))
        twin.inside = copy.deepcopy(self.inside, memo)
        twin.parts = copy.deepcopy(self.parts, memo)
        return twin

    def restore(self) -> None:
        """Split the block again, in a copy that was pickled."""
        code = self.code
        self._prepare(split(self.module, name=self.name))
        if self.code != code:
            raise RuntimeError(
                f"The block {self.name!r} was split by hand, and a pickled copy cannot know how: "
                "copy the model with copy.deepcopy, or save its state_dict()."
            )


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    if parameter is None or parameter.default is parameter.empty:
        return False
    simple = type(value) in (int, float, bool, str)
    return value is parameter.default or (simple and value == parameter.default)


# -- the gated class ----------------------------------------------------------------------------------


class Gated(nn.Module):
    """The part of a gated module's class that comes before the class its author wrote.

    torch.compile leaves the gate alone: it would compile the block anew for every draw.
    """

    _shallower_mixin = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return _outside_of_the_graph(self, super().forward, args, kwargs)
        return _run(self, super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, type(self).__bases__[:2], self.__dict__


def _run(module: Gated, whole: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    gate: Gate = module.__dict__[GATE]
    if "inside" not in gate.__dict__:
        with plain(module):
            gate.restore()
    return gate.run(whole, args, kwargs)


_outside_of_the_graph = torch.compiler.disable(_run)


class Removed(nn.Module):
    """The part of a removed module's class that keeps it from being run again."""

    _shallower_mixin = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError(
            f"The block {vars(self)['shallower_removed']!r} was removed, but the model still calls it: it "
            "holds the block outside of its module tree, as in a plain list. Keep blocks in an nn.ModuleList "
            "or nn.Sequential."
        )


_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}  # one class for each, as for isinstance


def derived(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    if (mixin, cls) not in _CLASSES:
        own = {"__module__": cls.__module__, "__doc__": cls.__doc__, MIXIN: True}
        _CLASSES.setdefault((mixin, cls), type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), own))
    return _CLASSES[mixin, cls]


def _empty(mixin: type[nn.Module], cls: type[nn.Module]) -> nn.Module:
    gated = derived(mixin, cls)
    return gated.__new__(gated)


def attach(module: nn.Module, block: Block, theta: float, **options: bool) -> Gate:
    """Gate `module` in place."""
    gate = Gate(block, module, **options)
    gate.rate = theta
    device = next(p.device for p in module.parameters())
    module.register_buffer(THETA, torch.tensor(theta, device=device), persistent=False)
    vars(module)[GATE] = gate
    module.__class__ = derived(Gated, type(module))
    return gate


def detach(module: nn.Module) -> None:
    """Make a gated module what it was."""
    vars(module).pop(GATE).reader.release()
    delattr(module, THETA)
    module.__class__ = type(module).__bases__[1]


def retire(module: nn.Module, name: str) -> None:
    """Let a module that has left the model raise if it is called all the same."""
    vars(module)["shallower_removed"] = name
    module.__class__ = derived(Removed, type(module))


@contextmanager
def plain(module: nn.Module) -> Iterator[None]:
    """A gated module in the class that its author wrote, for a while."""
    gated = type(module)
    module.__class__ = gated.__bases__[1]
    try:
        yield
    finally:
        module.__class__ = gated
