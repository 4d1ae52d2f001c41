"""A pruned network on disk: its weights as safetensors, its structure as JSON, and no pickle.

The structure names the function that builds the starting network, its arguments, and the blocks that were
removed; `load` builds, removes and absorbs again, which gives every layer its shape, then loads weights.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read
from safetensors.torch import save as dump
from torch import nn
from torch.utils._pytree import tree_leaves

from shallower import models
from shallower.absorption import absorb
from shallower.aside import OF_ALL_THREADS
from shallower.blocks import find_blocks, unaliased
from shallower.files import write_bytes, write_text
from shallower.fitting import cut
from shallower.ranks import Ranks
from shallower.sharding import whole
from shallower.split import Block
from shallower.stacks import check_stacks, compact

WEIGHTS, STRUCTURE, VERSION = "model.safetensors", "structure.json", 1
Build = Callable[..., nn.Module]


def save(
    folder: str | Path, net: nn.Module, *, network: str, options: dict[str, Any], removed: Sequence[str]
) -> None:
    """Write what `Pruner.finish()` returned for the network `network(**options)` of `shallower.models`.

    For a model of your own, `network` is any name for it, and `load` is given the function that builds it. Of
    a model that is sharded, all ranks come here, and the first writes.
    """
    folder = Path(folder)
    kept, state = _untied(net), net.state_dict()
    tensors = {n: whole(t).detach().cpu().contiguous() for n, t in state.items() if n in kept}
    if any(hasattr(t, "full_tensor") for t in state.values()) and not Ranks().first:
        return
    folder.mkdir(parents=True, exist_ok=True)
    content = dump(tensors)
    structure = {
        "version": VERSION,
        "network": network,
        "options": options,
        "removed": list(removed),
        "sha256": hashlib.sha256(content).hexdigest(),  # of the weights
    }
    write_bytes(folder / WEIGHTS, content)
    write_text(folder / STRUCTURE, json.dumps(structure, indent=2))


def _untied(net: nn.Module) -> set[str]:
    """The names in the state of `net`, one for each tensor: tied weights are written once."""
    seen: dict[Any, str] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), name)
    return set(seen.values())


def load(folder: str | Path, *, build: Build | None = None, example: Any = None) -> nn.Module:
    """The plain network that a run left in `folder`, in evaluation mode.

    `build(**options)` makes the starting network; by default it is the function of `shallower.models` that
    the structure names. A model whose blocks were found with an example needs one here.
    """
    folder = Path(folder)
    structure = _structure(folder / STRUCTURE)
    weights = folder / WEIGHTS
    try:
        content = weights.read_bytes()
        if structure["sha256"] != hashlib.sha256(content).hexdigest():
            raise ValueError("its checksum is not that of the structure: one of them is damaged")
    except (OSError, ValueError) as error:
        raise ValueError(f"{weights} does not hold the weights of this structure: {error}") from error
    _check_sizes(folder / STRUCTURE, structure["options"], len(content))
    name = structure["network"]
    if build is None:
        if name not in models.__all__:
            raise ValueError(
                f"{folder / STRUCTURE} was saved from {name!r}, which is no network of shallower.models "
                f"({', '.join(models.__all__)}). Pass the function that builds it: `load(folder, build=...)`."
            )
        build = getattr(models, name)
    try:
        with OF_ALL_THREADS, torch.random.fork_rng(devices=[]):
            net = build(**structure["options"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The options {structure['options']} of {folder / STRUCTURE} do not fit {name}: {error}"
        ) from error
    apply_structure(net, folder, example=example)
    try:
        missing, strange = net.load_state_dict(read(content), strict=False)
        lacking = set(missing) & _untied(net)
        if lacking or strange:
            raise RuntimeError(f"missing {sorted(lacking)}, not known {sorted(strange)}")
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights} does not hold the weights of this structure: {error}") from error
    return net.eval()


def apply_structure(
    model: nn.Module, structure: str | Path | Mapping[str, Any], *, example: Any = None
) -> nn.Module:
    """Remove from `model`, in place, the blocks that a structure names, as the Pruner that wrote it did.

        net = apply_structure(GPT2LMHeadModel(config), "runs/gpt2", example={"input_ids": ids})
        net.load_state_dict(...)

    `structure` is the folder of a run, its structure.json, or what that holds. Nothing is changed if the
    model lacks one of the blocks.
    """
    if not isinstance(structure, Mapping):
        path = Path(structure)
        structure = _structure(path / STRUCTURE if path.is_dir() or path.suffix != ".json" else path)
    if not isinstance(structure.get("removed"), list | tuple):
        raise ValueError(f"Found a structure of {sorted(structure)}; it needs 'removed', a list of blocks.")
    removed = list(structure["removed"])
    if not all(isinstance(name, str) for name in removed):
        raise ValueError(f"The structure removes {removed}; names of blocks are needed.")
    twice = sorted({name for name in removed if removed.count(name) > 1})
    if twice:
        raise ValueError(f"The structure removes {twice} more than once; it is damaged.")
    blocks = {block.name: block for block in find_blocks(model, example)}
    if example is not None and any(name not in blocks for name in removed):
        layers = {block.name: block for block in find_blocks(model, example, whole=True)}
        blocks = layers if all(name in layers for name in removed) else blocks
    strangers = [name for name in removed if name not in blocks]
    if strangers:
        raise ValueError(
            f"The structure removes {strangers}, which this {type(model).__name__} does not have; it has "
            f"{list(blocks)}. Blocks that read more than one input are found with `example=`."
        )
    copied = unaliased(model, list(blocks.values()))
    for name in removed:
        cut(model, blocks[name], alias=name not in copied)
    modules = {name: block for name, block in blocks.items() if isinstance(block, Block)}
    survivors = [block for name, block in modules.items() if name not in removed]
    check_stacks(model)
    absorb(model, [name for name in removed if name in modules], survivors)
    return compact(model)  # which names layers anew


def _check_sizes(path: Path, options: Any, weights: int) -> None:
    """A number of layers or features that is larger than the files themselves would only fill the memory.

    Each layer that is left has a byte in the weights at least, each that is gone has its name.
    """
    room = weights + path.stat().st_size
    for value in tree_leaves(options):
        if isinstance(value, int | float) and abs(value) > room:
            raise ValueError(
                f"The options {options} of {path} are not those of the weights beside it: "
                f"{value} is more than the {room} bytes of both files."
            )


def _structure(path: Path) -> dict[str, Any]:
    try:
        structure = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no {path}; a finished run has one: `shallower train RECIPE --out {path.parent}`."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no structure of a network: {error}") from error
    needed = {"version": int, "network": str, "options": dict, "removed": list, "sha256": str}
    fits = isinstance(structure, dict) and all(isinstance(structure.get(k), t) for k, t in needed.items())
    if not fits or structure["version"] != VERSION:
        raise ValueError(
            f"{path} is no structure of a network, version {VERSION}: it needs {sorted(needed)}."
        )
    return structure
