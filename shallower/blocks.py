"""Which blocks of a model are gated: found by structure, whoever wrote the class, or named by the user."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from shallower.discovery import Called, by_itself, find_strands, joins, record_calls
from shallower.fitting import AnyBlock
from shallower.gate import Gated
from shallower.graphs import compiled
from shallower.residual import Residual
from shallower.split import VIEWS, Block, NotResidual, overwritten, split
from shallower.tracing import OwnForward, Untraceable, trace_modes
from shallower.verify import fault
from shallower.whole import find_whole

FRESH = {operator.add, operator.sub, operator.mul, torch.add, torch.cat, torch.relu, "mean", "size", "add"}
CONTAINERS = (nn.Sequential.forward, nn.Module.forward)  # a forward that only chains, and none at all


class Survey(NamedTuple):
    """The blocks of a model, and the modules that hold a sum but cannot be gated, with the reason."""

    blocks: list[AnyBlock]
    rejected: dict[str, str]


BlockFinder = Callable[[nn.Module], Sequence[AnyBlock]]


def find_blocks(model: nn.Module, example: Any = None, *, whole: bool = False) -> list[AnyBlock]:
    """Every residual block of `model`, in the order of `named_modules()`.

    A block is a module that computes one residual sum, or one of several sums that a module computes, as a
    transformer's layer does. The innermost are taken, so a long skip around a stage does not swallow its
    blocks. With an `example` of the model's input (a tensor, a tuple of arguments or a dict of keyword
    arguments), every module is looked at as the model calls it; without one, as its defaults have it.
    If `whole`, the layers of a ModuleList or Sequential that add to their input are one block each, as wanted
    of a transformer that is to stay one of its class; that takes an example.
    """
    return survey(model, example, whole=whole).blocks


def survey(model: nn.Module, example: Any = None, *, whole: bool = False) -> Survey:
    """`find_blocks`, and beside it what was passed over and why."""
    if whole and example is None:
        raise ValueError("Layers are found as wholes by running the model: give an example of its input.")
    order = [name for name, _ in model.named_modules()]
    calls = None if example is None else record_calls(model, example)
    opened = joins(model, calls)
    blocks: dict[str, list[AnyBlock]] = {}
    rejected: dict[str, str] = {}
    if whole and calls is not None:
        blocks, rejected = _layers(model, calls)
        return _in_order(order, blocks, rejected)
    for name, module in reversed(list(model.named_modules())):  # children before their parents
        if not _candidate(module) or (calls is not None and name not in calls):
            continue
        inside = f"{name}." if name else ""
        inner = [block for other in blocks if other.startswith(inside) for block in blocks[other]]
        try:
            blocks[name], others = _blocks_in(model, name, module, inner, calls, opened)
            if others:
                rejected[name] = f"of its other sums: {'; '.join(dict.fromkeys(others))}"
        except NotResidual as no:
            if no.near and not inner and not any(other.startswith(inside) for other in rejected):
                rejected[name] = str(no)
    return _in_order(order, blocks, rejected)


def _in_order(
    order: Sequence[str], blocks: Mapping[str, Sequence[AnyBlock]], rejected: Mapping[str, str]
) -> Survey:
    found = [block for name in order for block in blocks.get(name, ())]
    return Survey(found, {n: rejected[n] for n in order if n in rejected and not _belongs(n, found)})


def _layers(
    model: nn.Module, calls: Mapping[str, Called]
) -> tuple[dict[str, list[AnyBlock]], dict[str, str]]:
    """The layers of lists that are blocks as wholes, and why others are not."""
    found: dict[str, list[AnyBlock]] = {}
    rejected: dict[str, str] = {}
    for path, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential) or any(
            path.startswith(f"{n}.") for n in found
        ):
            continue
        for child, module in parent.named_children():
            name = f"{path}.{child}" if path else child
            if name in calls and _candidate(module):
                look = find_whole(name, module, calls[name].args, calls[name].kwargs)
                try:
                    if look.block is None:
                        raise NotResidual(look.reason, near=look.adds)
                    _check_ownership(model, look.block, module)
                    found[name] = [look.block]
                except NotResidual as no:
                    if no.near:
                        rejected[name] = f"as a whole: {no}"
    return found, rejected


def _belongs(name: str, blocks: Sequence[AnyBlock]) -> bool:
    """Whether a module is a part of a block, and so can be pruned with it."""
    return any(block.path and name.startswith(f"{block.path}.") for block in blocks)


def _blocks_in(
    model: nn.Module,
    name: str,
    module: nn.Module,
    inner: list[AnyBlock],
    calls: Mapping[str, Called] | None,
    opened: frozenset[type],
) -> tuple[list[AnyBlock], list[str]]:
    """The module as one block; or the sums in its forward that hold no block inside, and why others are
    none."""
    called = None if calls is None else calls[name]
    refusal: NotResidual | None = None
    block: Block | None = None
    if not inner and (called is None or called.plain(module)):
        try:
            block = split(module, name=name)
            _check_ownership(model, block, module)
            if called is not None:
                _check_on_example(module, block, called)
            return [block], []
        except NotResidual as no:
            if type(module).forward is Residual.forward:
                raise
            refusal = no
    try:
        strands, reasons = find_strands(name, module, called, opened, [block.path for block in inner])
    except NotResidual as no:
        if called is not None and not inner:
            look = find_whole(name, module, called.args, called.kwargs)
            if look.block is not None:
                _check_ownership(model, look.block, module)
                return [look.block], []
            no.near = no.near and (look.adds or block is not None)
        # Of the two reasons, that of the sums knows more, unless there was nothing to look at.
        lost = no.near and isinstance(no.__cause__, Untraceable)
        raise refusal if refusal and (lost or block is not None) else no from no
    kept: list[AnyBlock] = []
    for strand in strands:
        try:
            _check_ownership(model, strand, module)
            kept.append(strand)
        except NotResidual as no:
            refusal = refusal or no
            reasons.append(f"{strand.name}: {no}")
    if not kept:
        raise refusal or NotResidual("it computes no sum of two functions of its input", near=False)
    return kept, reasons


def _check_on_example(module: nn.Module, block: Block, called: Called) -> None:
    """Skip and branch must give what the module gives, and the skip alone something of that shape."""
    head, branch, skip, tail = (compiled(getattr(block, part)) for part in ("head", "branch", "skip", "tail"))

    def ours(*args: Any, **kwargs: Any) -> Any:
        z = head(module, args[0] if args else next(iter(kwargs.values())))
        left, right = skip(module, z), branch(module, z)
        if left.shape != right.shape:
            raise NotResidual(
                f"its skip gives {tuple(left.shape)}, its branch {tuple(right.shape)}: without the branch it "
                "would change its shape"
            )
        return tail(module, left + right)

    with by_itself():
        wrong = fault(module, ours, (called.args, called.kwargs), may_write=block.overwrites)
    if wrong is not None:
        raise NotResidual(wrong)


def _candidate(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    bare = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    attention = isinstance(module, nn.MultiheadAttention)
    return not (bare or attention or type(module).forward in CONTAINERS) and any(
        True for _ in module.parameters()
    )


def _check_ownership(model: nn.Module, block: AnyBlock, module: nn.Module) -> None:
    """A block can only be removed if nothing else in the model needs its parameters."""
    if isinstance(block, Block) and not block.path:
        raise NotResidual("the model itself is one residual block; wrap it: `nn.Sequential(model)`")
    names = [n for n, m in model.named_modules(remove_duplicate=False) if m is module]
    if len(names) > 1:
        raise NotResidual(f"the same module stands at {' and '.join(names)}; give each place its own copy")
    mine = {id(p) for p in block.prunable(module).values()}
    if not mine:
        raise NotResidual("its branch has no parameters of its own, so there is nothing to prune", near=False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = not block.path or name.startswith(f"{block.path}.")
        if id(parameter) in mine and not inside:
            raise NotResidual(f"its branch shares a parameter with {name}; untie the two to prune the block")


def choose(
    model: nn.Module, blocks: Sequence[str | AnyBlock] | BlockFinder | None, example: Any = None
) -> Survey:
    """The blocks to gate, or an error that says why there are none."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "Found a scripted model, whose forward is no longer Python's. Gate the model itself, and script "
            "what `finish()` returns."
        )
    gated = [name for name, module in model.named_modules() if isinstance(module, Gated)]
    if gated:
        raise ValueError(
            f"{gated} are gated already. `finish()` the Pruner that did it first; a copy of a gated model "
            "cannot be pruned on its own: copy the model before it is gated."
        )
    if isinstance(blocks, str):
        raise ValueError(f"Found blocks={blocks!r}; give a list of names: blocks=[{blocks!r}].")
    given = [b for b in blocks if not isinstance(b, str)] if isinstance(blocks, Sequence) else []
    if given and len(given) != len(blocks or ()):  # type: ignore[arg-type]
        raise ValueError(
            "Found names beside blocks in blocks=; give either names or what find_blocks returned."
        )
    if callable(blocks) or given:
        found = Survey(list(blocks(model)) if callable(blocks) else given, {})
        _check_found(model, found.blocks)
    else:
        found = survey(model, example)
        if blocks is not None:
            found = _select(found, [str(name) for name in blocks])
    if not found.blocks:
        reasons = "".join(f"\n  {name or 'the model'}: {reason}" for name, reason in found.rejected.items())
        raise ValueError(
            "Found no residual block that can be pruned; a block computes tail(skip(z) + branch(z))."
            + (f" These come near:{reasons}" if reasons else "")
            + "\nGive the layers a skip, as in `shallower.Residual(branch, skip, tail)`, or name the "
            "blocks with `blocks=`."
        )
    return found


def _check_found(model: nn.Module, blocks: Sequence[AnyBlock]) -> None:
    """A user's finder, or list, must keep to the rules that ours does."""
    modules = dict(model.named_modules())
    names = [block.name for block in blocks]
    for block in blocks:
        around = [name for name in names if block.name.startswith(f"{name}.")]
        module = modules.get(block.path)
        reason = None
        if module is None or not _fits(module, block):
            reason = "the model has no such block, so it is of another model"
        elif names.count(block.name) > 1:
            reason = f"it stands {names.count(block.name)} times"
        elif around:
            reason = f"it stands inside of {around[0]!r}"
        if reason or module is None:
            raise ValueError(
                f"Found the block {block.name!r} in blocks=, but {reason}. Each block must be "
                "a submodule of the model, once, and none inside of another; `find_blocks(model)` gives them."
            )
        try:
            _check_ownership(model, block, module)
        except NotResidual as no:
            raise ValueError(f"The block {block.name!r} in blocks= cannot be pruned: {no}.") from no


def _fits(module: nn.Module, block: AnyBlock) -> bool:
    """Whether `block` was found in a module like this: a gate would compute the other's skip in silence."""
    try:
        block.prunable(module)
        own = split(module) if isinstance(block, Block) else None
    except (AttributeError, NotResidual):
        return False
    parts = ("head", "branch", "skip", "tail")
    return own is None or all(str(getattr(own, part)) == str(getattr(block, part)) for part in parts)


def _select(found: Survey, names: Sequence[str]) -> Survey:
    by_name = {block.name: block for block in found.blocks}
    for name in names:
        if name not in by_name:
            reason = found.rejected.get(name, "no such residual block was found")
            raise ValueError(f"{name!r} cannot be gated: {reason}. Found were: {list(by_name)}.")
    return Survey([by_name[name] for name in by_name if name in set(names)], found.rejected)


# -- who works in place ---------------------------------------------------------------------------------


class _Outline(OwnForward):
    """Opens the user's modules, but not the blocks."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return own or module_qualified_name in self.leaves


def unaliased(model: nn.Module, blocks: Sequence[AnyBlock]) -> set[str]:
    """The blocks that must not hand on their very input when they are closed.

    An open block returns memory of its own. A closed one may return its input, which is the same unless
    somebody overwrites one of the two in place; where that cannot be excluded, it returns a copy.
    """
    everyone = {block.name for block in blocks}
    by_path = {block.path: block for block in blocks}
    try:
        graph, _ = trace_modes(model, lambda: _Outline(set(by_path)))
    except Untraceable:
        return everyone

    def overwrites(node: fx.Node, value: fx.Node) -> bool:
        if node.op == "call_module" and str(node.target) in by_path:
            return by_path[str(node.target)].overwrites
        return overwritten(model, node) is value

    def touched(value: fx.Node) -> bool:
        """Whether `value`, or what may be a view of it, is overwritten."""
        return any(
            overwrites(n, value) or (not _is_fresh(model, n, by_path) and touched(n)) for n in value.users
        )

    safe = set()
    for path in by_path:
        nodes = [n for n in graph.nodes if n.op == "call_module" and n.target == path]
        if len(nodes) == 1 and not touched(nodes[0]) and not touched(nodes[0].all_input_nodes[0]):
            safe.add(path)
    return {block.name for block in blocks if block.path not in safe}


def _is_fresh(model: nn.Module, node: fx.Node, blocks: Mapping[str, AnyBlock]) -> bool:
    """Whether `node` certainly returns memory of its own."""
    if node.op == "call_module":
        return str(node.target) in blocks or type(model.get_submodule(str(node.target))) not in VIEWS
    named = getattr(node.target, "__module__", "")
    functional = named == F.__name__ and node.target is not F.dropout
    return node.op == "output" or functional or node.target in FRESH
