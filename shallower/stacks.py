"""The layers of a transformers model that were pruned leave its lists and its configuration.

Such a model is known by what it has: `save_pretrained`, and a `config` that counts the layers of a list.
Nothing is imported for it.
"""

import copy
import warnings
from typing import Any

import torch
from torch import nn

from shallower.rewrite import WEAVE
from shallower.weave import is_passage
from shallower.whole import Passed

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def check_stacks(model: nn.Module) -> None:
    """Refuse what `compact` cannot do, before anything is changed."""
    for path, layers in _stacks(model):
        _check(model, path, layers)


def compact(model: nn.Module) -> nn.Module:
    """Drop the layers that were pruned as a whole from a finished model and its configuration, in place.

    The layers that are left are numbered anew, so `generate` with a cache finds its keys and values. A layer
    that has lost its attention or its MLP alone stays: the library's configuration knows no such layer, so
    after `save_pretrained` such a model is loaded with `shallower.apply_structure`. So is one of which the
    configuration cannot tell which layers are left, as where a layer knows its number in other ways: its
    pruned layers stay in their places, empty, and a warning says so.
    """
    check_stacks(model)
    for path, layers in _stacks(model):
        kept = [i for i, layer in enumerate(layers) if not _is_gone(layer)]
        if len(kept) == len(layers):
            _renumber(layers)
            continue
        changes = _changes(model, path, len(layers), kept)
        reason = _misfit(model, path, kept, changes)
        if reason is None:
            for config, name, value in changes:
                setattr(config, name, value)
            remaining = [layers[i] for i in kept]
            layers._modules.clear()
            layers.extend(remaining)
        else:
            _keep_empty(model, path, layers, reason)
        _renumber(layers)
    return model


def _keep_empty(model: nn.Module, path: str, layers: nn.ModuleList, reason: str) -> None:
    mixed = any(_kinds(config) for config, _ in _counted(model, path, len(layers)))
    if mixed and not _attends(layers[0]):
        raise ValueError(
            f"The first layer of {path} was pruned, {reason}, and its attention is of several kinds, whose "
            "cache counts from the first. Leave the first layer out: `Pruner(..., blocks=...)`."
        )
    warnings.warn(
        f"The pruned layers of {path} stay in the model, empty: {reason}. It computes the right thing, but "
        "its configuration does not tell; save it with `shallower.save`, or load its weights after "
        "`shallower.apply_structure`.",
        stacklevel=4,
    )


def _stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The lists of layers that a configuration counts and that have lost something; none inside another."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, layers in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other, _ in found)
        if not isinstance(layers, nn.ModuleList) or inside or _home(model, path) is None:
            continue
        if _counted(model, path, len(layers)):
            found.append((path, layers))
    return [(path, layers) for path, layers in found if any(_has_lost(layer) for layer in layers)]


def _has_lost(layer: nn.Module) -> bool:
    return isinstance(layer, Passed) or any(
        WEAVE in vars(m) or isinstance(m, Passed) for m in layer.modules()
    )


def _is_gone(layer: nn.Module) -> bool:
    if isinstance(layer, Passed) or is_passage(layer):
        return True
    # T5's layer is a list of parts, each of which hands on its input when its sum is gone.
    return _has_lost(layer) and not any(True for _ in layer.parameters())


def _check(model: nn.Module, path: str, layers: nn.ModuleList) -> None:
    if all(map(_is_gone, layers)):
        raise ValueError(
            f"All layers of {path} were pruned, and transformers knows no model without any; the pruned one "
            "is `pruner.model`. Train at a smaller price, or leave a layer out: `Pruner(..., blocks=...)`."
        )
    for config, _ in _counted(model, path, len(layers)):
        if getattr(config, "scale_attn_by_inverse_layer_idx", False):
            raise ValueError(
                f"The layers of {path} divide by their own number (scale_attn_by_inverse_layer_idx), so they "
                "cannot be numbered anew. Set it to False before training."
            )
        first = next(layer for layer in layers if not _is_gone(layer))
        if _kinds(config) and not _attends(first):
            raise ValueError(
                f"The first layer of {path} has lost its attention alone, in a model with attention of "
                f"several kinds ({', '.join(_kinds(config))}), whose cache counts from the first. Gate "
                "layers as wholes: find_blocks(model, example, whole=True)."
            )


def _kinds(config: Any) -> list[str]:
    """The kinds of attention, if there is more than one."""
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    return kinds if len(kinds) > 1 else []


def _attends(layer: nn.Module) -> bool:
    """Whether a layer still has what is numbered for the cache, if it ever had."""
    numbered = [m for m in layer.modules() if isinstance(vars(m).get("layer_idx"), int)]
    inner = [m for m in numbered if not any(m is not n and n in m.modules() for n in numbered)]
    return not inner or any(True for m in inner for _ in m.parameters())


def _renumber(layers: nn.ModuleList) -> None:
    """`layer_idx` is the place in the list; if the first layer attends to nothing any more, among those that
    do, because a cache tells its length by its first entry."""
    by_place, index = _attends(layers[0]), 0
    for layer in layers:
        for module in layer.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                vars(module)["layer_idx"] = index
        index += by_place or _attends(layer)


Changes = list[tuple[Any, str, Any]]  # a configuration, an entry of it, and what it is to be


def _changes(model: nn.Module, path: str, before: int, kept: list[int]) -> Changes:
    """The number of layers, and what else the configurations say layer by layer, for those that are kept."""
    found: Changes = []
    for config, name in _counted(model, path, before):
        found.append((config, name, len(kept)))
        for other, value in vars(config).items():
            if "layer" not in other or not isinstance(value, list):
                continue
            if len(value) == before:
                found.append((config, other, [value[i] for i in kept]))
            elif value and all(type(v) is int and 0 <= v < before for v in value):  # numbers of layers
                found.append((config, other, [kept.index(i) for i in value if i in kept]))
    return found


def _misfit(model: nn.Module, path: str, kept: list[int], changes: Changes) -> str | None:
    """Why the library would not build this model from the changed configuration, if it would not."""
    home = _home(model, path)
    memo: dict[int, Any] = {}
    twin_config = copy.deepcopy(home.config, memo)
    for config, name, value in changes:
        if id(config) in memo:
            setattr(memo[id(config)], name, value)
    try:
        read = type(twin_config).from_dict(twin_config.to_dict())  # as from a file
        with torch.device("meta"):
            twin = type(home)(read)
    except Exception as error:  # whatever a configuration or a model says to it
        return f"{type(home).__name__} cannot be built with {len(kept)} of them ({error})".splitlines()[0]
    if getattr(read, "is_encoder_decoder", False) and not _cache_fits(read, twin):
        return "the library would take the number of its layers for that of the decoder's, in its cache"
    mine, theirs = home.state_dict(), twin.state_dict()
    inside = next(p for p, m in home.named_modules() if m is model.get_submodule(path))
    renamed = {f"{inside}.{i}.": f"{inside}.{j}." for j, i in enumerate(kept)}
    for name, tensor in mine.items():
        new = next((name.replace(old, now, 1) for old, now in renamed.items() if name.startswith(old)), name)
        if new not in theirs or theirs[new].shape != tensor.shape:
            return f"{new} would have another shape, or not be there"
    for old, now in renamed.items():
        one, other = home.get_submodule(old[:-1]), twin.get_submodule(now[:-1])
        odd = _unlike(one, other)
        if odd is not None:
            return f"its layers know their numbers in other ways ({odd})"
    return None


def _cache_fits(config: Any, twin: nn.Module) -> bool:
    """Whether a cache that is made from the configuration has a place for every layer of the decoder."""
    lists = (m for path, m in twin.named_modules() if isinstance(m, nn.ModuleList) and "decoder" in path)
    numbers = {m.layer_idx for layers in lists for m in layers.modules() if hasattr(m, "layer_idx")}
    places = config.get_text_config(decoder=True).num_hidden_layers
    return all(number is None or number < places for number in numbers)


def _unlike(one: nn.Module, other: nn.Module) -> str | None:
    """A plain attribute, or a parameter, that two layers do not have in common."""
    others = dict(other.named_modules())
    for path, module in one.named_modules():
        if path not in others:
            continue
        theirs = vars(others[path])
        for name, value in vars(module).items():
            plain = type(value) in (bool, int, float, str) and name in theirs
            ignored = name in ("training", "layer_idx", "p") or "drop" in name or name.startswith("_")
            if plain and not ignored and theirs[name] != value:
                return f"{path}.{name}" if path else name
    lost = set(other.state_dict()) - set(one.state_dict())
    whole = not any(WEAVE in vars(m) for m in one.modules())
    return min(lost) if lost and whole else None


def _home(model: nn.Module, path: str) -> Any:
    """The model of the library that holds `path`; who wrote another may count its layers in other places."""
    homes = (m for m in _way(model, path) if hasattr(m, "save_pretrained") and hasattr(m, "config"))
    return next(homes, None)


def _way(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules from the model down to what holds the one at `path`."""
    parts = path.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]


def _counted(model: nn.Module, path: str, number: int) -> list[tuple[Any, str]]:
    """The configurations on the way to `path` that count so many layers there, and under which name."""
    side = next((side for side in ("decoder", "encoder") if side in path.split(".")), None)
    own = (f"{side}_layers", f"num_{side}_layers", f"{side}_num_hidden_layers", f"num_{side}_hidden_layers")
    names = [*own, *COUNTS] if side else list(COUNTS)
    found: dict[int, tuple[Any, str]] = {}
    for module in _way(model, path):
        config = getattr(module, "config", None)
        known = [n for n in names if config is not None and n in vars(config)]
        if known and vars(config)[known[0]] == number:
            found.setdefault(id(config), (config, known[0]))
    return list(found.values())
