"""The layers of a transformers model that were pruned leave its lists and its configuration.

Such a model is known by what it has: a `config` that counts the layers of a list. Nothing is imported for it.
"""

from typing import Any

from torch import nn

from shallower.rewrite import WEAVE
from shallower.weave import is_passage
from shallower.whole import Passed

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def compact(model: nn.Module) -> nn.Module:
    """Drop the layers that were pruned as a whole from a finished model and its configuration, in place.

    The layers that are left are numbered anew, so `generate` with a cache finds its keys and values. A layer
    that has lost its attention or its MLP alone stays: the library's configuration knows no such layer, so
    after `save_pretrained` such a model is loaded with `shallower.apply_structure`. A model that knows its
    layers by their numbers in other ways is refused, and nothing is changed.
    """
    stacks = _stacks(model)
    for path, layers in stacks:
        _check(model, path, layers)
    for path, layers in stacks:
        kept = [i for i, layer in enumerate(layers) if not _is_gone(layer)]
        if len(kept) < len(layers):
            _rewrite(model, path, len(layers), kept)
            remaining = [layers[i] for i in kept]
            layers._modules.clear()
            layers.extend(remaining)
        _renumber(layers)
    return model


def _stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The lists of layers that a configuration counts and that have lost something; none inside another."""
    found: list[tuple[str, nn.ModuleList]] = []
    for path, layers in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other, _ in found)
        if isinstance(layers, nn.ModuleList) and not inside and _counted(model, path, len(layers)):
            found.append((path, layers))
    return [(path, layers) for path, layers in found if any(_has_lost(layer) for layer in layers)]


def _has_lost(layer: nn.Module) -> bool:
    return isinstance(layer, Passed) or any(
        WEAVE in vars(m) or isinstance(m, Passed) for m in layer.modules()
    )


def _is_gone(layer: nn.Module) -> bool:
    return isinstance(layer, Passed) or is_passage(layer)


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
        types = getattr(config, "layer_types", None) or []
        first = next(layer for layer in layers if not _is_gone(layer))
        if len(set(types)) > 1 and not _attends(first):
            raise ValueError(
                f"The first layer of {path} has lost its attention alone, in a model with attention of "
                f"several kinds ({', '.join(sorted(set(types)))}), whose cache counts from the first. Gate "
                "layers as wholes: find_blocks(model, example, whole=True)."
            )


def _attends(layer: nn.Module) -> bool:
    """Whether a layer still has what is numbered for the cache, if it ever had."""
    numbered = [m for m in layer.modules() if isinstance(vars(m).get("layer_idx"), int)]
    return not numbered or any(True for m in numbered for _ in m.parameters())


def _renumber(layers: nn.ModuleList) -> None:
    """`layer_idx` is the place in the list; if the first layer attends to nothing any more, among those that
    do, because a cache tells its length by its first entry."""
    by_place, index = _attends(layers[0]), 0
    for layer in layers:
        for module in layer.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                vars(module)["layer_idx"] = index
        index += by_place or _attends(layer)


def _rewrite(model: nn.Module, path: str, before: int, kept: list[int]) -> None:
    """The number of layers, and every list with an entry for each, in the configurations that count them."""
    for config, name in _counted(model, path, before):
        setattr(config, name, len(kept))
        for other, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(config, other, [value[i] for i in kept])


def _counted(model: nn.Module, path: str, number: int) -> list[tuple[Any, str]]:
    """The configurations on the way to `path` that count so many layers there, and under which name."""
    side = next((side for side in ("decoder", "encoder") if side in path.split(".")), None)
    names = [f"{side}_layers", f"num_{side}_layers", *COUNTS] if side else list(COUNTS)
    found: dict[int, tuple[Any, str]] = {}
    parts = path.split(".")
    for depth in range(len(parts)):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        known = [n for n in names if config is not None and n in vars(config)]
        if known and vars(config)[known[0]] == number:
            found.setdefault(id(config), (config, known[0]))
    return list(found.values())
