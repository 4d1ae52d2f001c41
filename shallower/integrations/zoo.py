"""Models by name, with random weights and an example of their input; nothing is downloaded.

timm:resnet50    torchvision:resnet50    transformers:gpt2    my.module:build
"""

import importlib
import sys
from typing import Any

import torch
from torch import nn

Brought = tuple[nn.Module, Any]
HUGE = 1_000_000_000  # parameters
FORMS = "timm:NAME, torchvision:NAME, transformers:TYPE, or my.module:build"


def bring(name: str) -> Brought:
    """The model that `name` stands for, and an example: a tensor, or a dict of keyword arguments."""
    source, _, what = name.partition(":")
    if not what:
        raise ValueError(f"{name!r} names no model; there are {FORMS}.")
    if source in _SOURCES:
        extra = "hf" if source == "transformers" else "vision"
        try:
            importlib.import_module(source)
        except Exception as error:  # also one that was built for another torch
            raise ValueError(
                f"{name!r} needs {source}, which cannot be imported ({error}): "
                f"pip install 'shallower[{extra}]', with versions that fit torch {torch.__version__}."
            ) from error
        try:
            return _SOURCES[source](what)
        except (ImportError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"{name!r} cannot be built ({error}). Write a function that returns the model and an example "
                "of its input, and name it: my.module:build."
            ) from error
    return _own(source, what)


def _timm(name: str) -> Brought:
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name[:6]}*")[:8]
        raise ValueError(f"timm has no model {name!r}" + (f"; it has {', '.join(near)}" if near else ""))
    model = timm.create_model(name, pretrained=False)
    return model, torch.zeros(1, *model.default_cfg.get("input_size", (3, 224, 224)))


def _torchvision(name: str) -> Brought:
    import torchvision

    if name not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no model {name!r}; see torchvision.models.list_models()")
    return torchvision.models.get_model(name, weights=None), torch.zeros(1, 3, 224, 224)


def _transformers(name: str) -> Brought:
    import transformers

    if name not in transformers.CONFIG_MAPPING:
        near = [known for known in transformers.CONFIG_MAPPING if known[:3] == name[:3]][:8]
        raise ValueError(f"transformers has no model type {name!r}" + (f"; near are {near}" if near else ""))
    config = transformers.AutoConfig.for_model(name)
    with torch.device("meta"):  # no memory and no arithmetic, which is all that counting needs
        model, example = transformers.AutoModel.from_config(config), example_for(config)
    if sum(p.numel() for p in model.parameters()) > HUGE:
        return model, example
    return transformers.AutoModel.from_config(config), example_for(config)


def example_for(config: Any) -> dict[str, torch.Tensor]:
    """A small input for a transformers model of that configuration."""
    size = getattr(config, "image_size", None)
    if size is not None:
        height, width = size if isinstance(size, tuple | list) else (size, size)
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width)}
    if hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", 1500)
        first = torch.ones(1, 4, dtype=torch.long)
        return {"input_features": torch.zeros(1, config.num_mel_bins, frames), "decoder_input_ids": first}
    words = {"input_ids": torch.ones(1, 16, dtype=torch.long)}
    if getattr(config, "is_encoder_decoder", False):
        words["decoder_input_ids"] = torch.ones(1, 16, dtype=torch.long)
    return words


_SOURCES = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}


def _own(module: str, function: str) -> Brought:
    """A user's function, which returns the model and an example."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file in the folder where the command is given
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"There is no {module}:{function} ({error}); there are {FORMS}.") from error
    try:
        made = build()
    except Exception as error:
        raise ValueError(f"{module}:{function}() raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"{module}:{function}() returned {type(made).__name__}; it must return the model and an example "
            "of its input: `return model, torch.zeros(1, 3, 224, 224)`."
        )
    return made
