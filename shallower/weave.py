"""Gates on the sums inside a module's forward, and the forward without those that are pruned.

A module keeps its place, its children and their names; its class changes, as that of a gated block does.
Its forward is written anew for each way in which it is called: every gated sum is a call of its gate,

    total = gate(skip, *what the branch reads),

a pruned one is its skip. While all gates are open, the author's own forward runs.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from shallower.calls import Call, arrange, trace_call
from shallower.compilation import Compiler
from shallower.gate import Gate, Gated, derived
from shallower.graphs import husk
from shallower.rewrite import WEAVE, Pattern, Side, constants, known_values, write
from shallower.split import last_affine_parameters
from shallower.sums import Mark, Sum, marked_sums
from shallower.tracing import GONE, author
from shallower.verify import check_first_use

MOST = 64  # ways of being called that are remembered


@dataclass(frozen=True)
class Strand:
    """One residual sum in the forward of the module at `path`: the `index`-th sum that it computes."""

    name: str
    path: str
    index: int
    call: Call
    parameters: tuple[str, ...]  # those that only the branch uses, by their names in the module
    mark: Mark
    opened: frozenset[type] = frozenset()
    sides: tuple[Side, ...] = ()
    touched: bool = False  # its module works on the total in place
    overwrites: bool = False  # its module's own forward changes its input in place

    def prunable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that leave when the sum is pruned."""
        return {name: module.get_parameter(name) for name in self.parameters}


# -- the gate -----------------------------------------------------------------------------------------


class SumGate(Gate):
    """The gate of one sum; see `Gate` for what it learns."""

    shared = ("branch", "compiled")

    def __init__(self, strand: Strand, module: nn.Module, **options: bool) -> None:
        self.index, self.block = strand.index, strand
        self.compiler: Compiler | None = None
        super().__init__(cast(Any, strand), module, **options)

    @property
    def buffer(self) -> str:
        return f"{super().buffer}_{self.index}"

    def _prepare(self, block: Any) -> None:
        pattern = weave_of(self.module, block).pattern(block.call, training=True)
        region = pattern.sums[self.index]
        inside = {m: None for t in region.targets() for m in _modules_at(self.module, t)}
        self.inside = list(inside)
        graph = pattern.graphs[self.index]
        self._read(last_affine_parameters(self.module, graph, pattern.graph) if self.wants_free else [])
        self.branch = pattern.branches[self.index]

    def compile(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.compiled = compiler(author(self.module).forward, self.module)

    def use(self, branch: Callable[..., Tensor]) -> None:
        """Run this branch: each way of calling the module has one."""
        self.branch = branch if self.compiler is None else self.compiler(branch, self.module)

    def sum(self, skip: Tensor, *reads: Any) -> Tensor:
        """skip + xi * branch(*reads), or what it was the last time (`estimators.flip`)."""
        if self.replay:
            return self.replay.popleft()()
        out = self._sum(skip, reads)
        if self.record is not None:
            self.record.append((self, out.clone()))
        return out

    def _sum(self, skip: Tensor, reads: Sequence[Any]) -> Tensor:
        module, watching = self.module, self.watching and torch.is_grad_enabled()
        if not module.training:
            self.theta.fill_(self.rate)
            self._hear(partial(self.branch, module, *reads))
            return skip + self.theta * self.branch(module, *reads)
        if self.xi:
            branch = self.branch(module, *reads)
            if self.may_run_whole():
                return skip + branch
            return self.listener.watch(skip + branch, branch, self.alias)  # (1), xi = 1
        if self.watching:
            # Without gradients, too, as in the first pass of reentrant checkpointing: it throws dice.
            idle = self._idle(skip.shape, *reads)
        if watching:
            return self.listener.watch(skip, idle, self.alias)  # (1) with xi = 0
        return skip if self.alias else skip.clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "index": self.index, "block": self.block, "compiler": None}


# -- what a module knows of its sums ------------------------------------------------------------------


class Weave:
    """What a module with gates on its sums knows: the gates, what was pruned, and its forwards so far."""

    def __init__(self, module: nn.Module, strand: Strand) -> None:
        self.module, self.call = module, strand.call
        self.opened, self.sides = strand.opened, strand.sides
        self.marks: dict[int, Mark] = {}  # of the gated and the removed sums
        self.gates: dict[int, SumGate] = {}
        self.removed: set[int] = set()
        self.gone: set[str] = set()  # the children that left with them
        self.copied: set[int] = set()  # of the removed: those that must not hand on their very input
        self._patterns: dict[Any, Pattern] = {}
        self.signature = inspect.signature(author(module).forward)

    def pattern(self, call: Call, *, training: bool) -> Pattern:
        """The forward for that call; numbers that the module holds are written into it."""
        first = next(self.module.parameters(), None)
        held = (*constants(self.module, self.opened), None if first is None else (first.dtype, first.device))
        if (call, training, held) not in self._patterns:
            if len(self._patterns) >= MOST:  # a constant that changes with every call
                self._patterns.clear()
            self._check_beside(call)
            for mode, graph in trace_call(self.module, call, opened=set(self.opened)).items():
                mine = marked_sums(self.module, graph, known_values(graph, self.sides), self.marks)
                if mine.keys() != self.marks.keys():
                    raise RuntimeError(
                        f"Called with {', '.join(call.live)} and {call.constants()}, "
                        f"{author(self.module).__name__} does not compute the sums that it computed when it "
                        "was gated. Call it as on the example."
                    )
                self._check_gone(graph, mine)
                self._patterns[call, mode, held] = write(graph, mine, self.removed, self.copied)
        return self._patterns[call, training, held]

    def _check_gone(self, graph: fx.Graph, sums: dict[int, Sum]) -> None:
        """What left the module with a sum must not be needed beside it now."""
        inside = {node for found in sums.values() for node in found.region}
        for node in graph.nodes:
            if node.op == "call_module" and str(node.target) in self.gone and node not in inside:
                raise RuntimeError(
                    f"{author(self.module).__name__} was called in a way that needs {node.target}, which was "
                    "removed with its block. Call it as it was called in training."
                )

    def _check_beside(self, call: Call) -> None:
        """What stands beside a branch is only known for the constants with which the module was split."""
        defaults = {p.name: p.default for p in self.signature.parameters.values()}
        flags, now = defaults | self.call.constants(), defaults | call.constants()
        # What was not given on the example, and is off now, asks for nothing more.
        asks = {n: v for n, v in now.items() if n in flags or v not in (None, False)}
        changed = [n for n, v in asks.items() if repr(flags.get(n)) != repr(v)]
        if self.sides and changed:
            raise TypeError(
                f"{author(self.module).__name__} was called with {changed[0]}={now[changed[0]]}, but was "
                f"split with {flags.get(changed[0])}: what it returns beside its sum is not known. Call it "
                "as on the example."
            )

    def run(self, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unseen = [gate for gate in self.gates.values() if gate.unseen and gate.compiled is None]
        if unseen and not self.removed:
            check_first_use(self.module, list(self.gates.values()), (args, kwargs))
        if not self.removed and self._all_open():
            compiled = next(iter(self.gates.values())).compiled
            return whole(*args, **kwargs) if compiled is None else compiled(self.module, *args, **kwargs)
        call, values = arrange(self.signature, args, kwargs)
        pattern = self.pattern(call, training=self.module.training)
        for index, gate in self.gates.items():
            if "inside" not in gate.__dict__:  # a pickled copy
                gate._prepare(gate.block)
            gate.use(pattern.branches[index])
        return pattern.main(self.module, self.module, *values)

    def _all_open(self) -> bool:
        gates = self.gates.values()
        if any("inside" not in gate.__dict__ for gate in gates):
            return False
        if not self.module.training or not all(g.xi and g.record is None and not g.replay for g in gates):
            return False
        return all([gate.may_run_whole() for gate in gates])

    def forget(self) -> None:
        self._patterns.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Weave":
        twin = memo[id(self)] = object.__new__(Weave)
        same = {n: vars(self)[n] for n in ("call", "opened", "sides", "signature")}
        own = {n: copy.copy(vars(self)[n]) for n in ("marks", "removed", "copied", "gone")}
        vars(twin).update(same, **own, _patterns={})
        twin.module = copy.deepcopy(self.module, memo)
        twin.gates = copy.deepcopy(self.gates, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_patterns": {}, "signature": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.signature = inspect.signature(author(self.module).forward)


def _modules_at(module: nn.Module, target: str) -> Iterable[nn.Module]:
    try:
        return module.get_submodule(target).modules()
    except AttributeError:  # a parameter
        return ()


# -- the class ----------------------------------------------------------------------------------------


class Woven(Gated):
    """The part of the class of a module with gated sums that comes before the class its author wrote."""

    _shallower_mixin = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = _outside_of_the_graph if torch.compiler.is_compiling() else _run
        return run(self, super(Gated, self).forward, args, kwargs)


class Pruned(nn.Module):
    """The same for a module that has lost sums, when the gates are off."""

    _shallower_mixin = True
    __reduce_ex__ = Gated.__reduce_ex__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, super().forward, args, kwargs)


def _run(module: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weave: Weave = module.__dict__[WEAVE]
    return weave.run(whole, args, kwargs)


_outside_of_the_graph = torch.compiler.disable(_run)


def weave_of(module: nn.Module, strand: Strand) -> Weave:
    if WEAVE not in vars(module):
        vars(module)[WEAVE] = Weave(module, strand)
    weave: Weave = vars(module)[WEAVE]
    if strand.index not in weave.marks:
        weave.marks[strand.index] = strand.mark
        weave.forget()
    return weave


def attach_sum(module: nn.Module, strand: Strand, theta: float, **options: bool) -> SumGate:
    """Gate one sum of `module` in place."""
    weave = weave_of(module, strand)
    options["alias"] = options.get("alias", True) and not strand.touched
    gate = SumGate(strand, module, **options)
    gate.rate = theta
    device = next(p.device for p in module.parameters())
    module.register_buffer(gate.buffer, torch.tensor(theta, device=device), persistent=False)
    weave.gates[strand.index] = gate
    _reclass(module)
    return gate


def detach_sum(module: nn.Module, strand: Strand) -> None:
    """Take the gate off one sum, which then always runs."""
    weave: Weave = vars(module)[WEAVE]
    gate = weave.gates.pop(strand.index)
    weave.marks.pop(strand.index)
    gate.reader.release()
    delattr(module, gate.buffer)
    weave.forget()
    _reclass(module)


def cut_sum(module: nn.Module, strand: Strand, *, alias: bool) -> None:
    """Prune one sum: what only its branch uses leaves the module, and the skip stays."""
    if WEAVE not in vars(module):
        vars(module)[WEAVE] = Weave(module, strand)
    weave: Weave = vars(module)[WEAVE]
    if strand.index in weave.gates:
        detach_sum(module, strand)
        vars(module).setdefault(WEAVE, weave)
    weave.marks[strand.index] = strand.mark
    weave.removed.add(strand.index)
    if not alias:
        weave.copied.add(strand.index)
    weave.forget()
    pattern = weave.pattern(strand.call, training=True)
    _drop(module, pattern.graph, pattern.sums[strand.index])
    _reclass(module)


@contextmanager
def skipping(module: nn.Module, strand: Strand) -> Iterator[None]:
    """One sum, not gated, is its skip for a while; nothing leaves the module."""
    weave: Weave = vars(module).get(WEAVE) or Weave(module, strand)
    vars(module)[WEAVE] = weave
    weave.marks[strand.index] = strand.mark
    weave.removed.add(strand.index)
    weave.forget()
    _reclass(module)
    try:
        yield
    finally:
        weave.removed.discard(strand.index)
        weave.marks.pop(strand.index)
        weave.forget()
        _reclass(module)


def _drop(module: nn.Module, graph: fx.Graph, found: Sum) -> None:
    outside = [
        str(n.target) for n in graph.nodes if n not in found.region and n.op in ("call_module", "get_attr")
    ]
    nodes = sorted(found.region, key=lambda node: node.op == "get_attr")  # children before parameters
    for target in dict.fromkeys(str(n.target) for n in nodes if n.op in ("call_module", "get_attr")):
        if any(t == target or t.startswith(f"{target}.") or target.startswith(f"{t}.") for t in outside):
            continue
        parent, _, name = target.rpartition(".")
        owner = module.get_submodule(parent)
        if name in owner._parameters:
            owner._parameters[name] = None
            vars(owner)[GONE] = (*vars(owner).get(GONE, ()), name)
        elif name in owner._modules:
            owner._modules[name] = husk(owner._modules[name])
            vars(module)[WEAVE].gone.add(target)


def is_passage(module: nn.Module) -> bool:
    """Whether a pruned module has nothing left but to hand on its first input."""
    weave: Weave | None = vars(module).get(WEAVE)
    if weave is None or weave.gates:
        return False
    graph = weave.pattern(weave.call, training=False).written
    source = [node for node in graph.nodes if node.op == "placeholder"][1]  # after the module itself
    value: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    value = value[0] if isinstance(value, tuple) and value else value
    while isinstance(value, fx.Node) and value.target == "clone":
        value = value.args[0]
    return value is source


def _reclass(module: nn.Module) -> None:
    """The class that fits: gated, pruned, or the author's own."""
    weave, cls = vars(module)[WEAVE], author(module)
    if weave.gates:
        module.__class__ = derived(Woven, cls)
    elif weave.removed:
        module.__class__ = derived(Pruned, cls)
    else:
        del vars(module)[WEAVE]
        module.__class__ = cls
