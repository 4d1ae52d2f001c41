"""Models of the transformers library: pruned layers leave the configuration, too; a callback for its Trainer.

blocks = find_blocks(model, example, whole=True)      # layers as wholes: the model stays one of its class
pruner = Pruner(model, optimizer, blocks=[b.name for b in blocks], example=example, ...)
...
net = compact(pruner.finish())
net.save_pretrained("smaller")                        # AutoModelForCausalLM.from_pretrained("smaller")
"""

from typing import Any

from torch import nn

from shallower.weave import is_passage
from shallower.whole import Passed

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def compact(model: nn.Module) -> nn.Module:
    """Drop the layers that were pruned as a whole from a finished model and its configuration, in place.

    The layers that are left are numbered anew, so `generate` with a cache finds its keys and values. A layer
    that has lost its attention or its MLP alone stays: the library's configuration knows no such layer, so
    after `save_pretrained` such a model is loaded with `shallower.apply_structure`.
    """
    for path, layers in list(model.named_modules()):
        if isinstance(layers, nn.ModuleList):
            kept = [i for i, layer in enumerate(layers) if not _is_gone(layer)]
            if 0 < len(kept) < len(layers):
                _rewrite(model, path, len(layers), kept)
                remaining = [layers[i] for i in kept]
                layers._modules.clear()
                layers.extend(remaining)
            _renumber(layers)
    return model


def _is_gone(layer: nn.Module) -> bool:
    return isinstance(layer, Passed) or is_passage(layer)


def _renumber(layers: nn.ModuleList) -> None:
    """`layer_idx` counts the attentions that are left, because a cache holds one entry for each."""
    index = 0
    for layer in layers:
        numbered = [m for m in layer.modules() if isinstance(vars(m).get("layer_idx"), int)]
        for module in numbered:
            vars(module)["layer_idx"] = index
        index += any(True for m in numbered for _ in m.parameters())


def _rewrite(model: nn.Module, path: str, before: int, kept: list[int]) -> None:
    """The number of layers in every configuration that the model holds of them."""
    side = next((side for side in ("decoder", "encoder") if side in path), None)
    for config in _configurations(model, path):
        names = [f"{side}_layers", f"num_{side}_layers", *COUNTS] if side else list(COUNTS)
        for name in names:
            if vars(config).get(name) == before:
                setattr(config, name, len(kept))
                break
        types = vars(config).get("layer_types")
        if isinstance(types, list) and len(types) == before:
            config.layer_types = [types[i] for i in kept]


def _configurations(model: nn.Module, path: str) -> list[Any]:
    """Those of the model and of its parts down to the layers; each once."""
    found: dict[int, Any] = {}
    parts = path.split(".")
    for depth in range(len(parts)):
        config = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None:
            found.setdefault(id(config), config)
    return list(found.values())
