"""Models of the transformers library: pruned layers leave the configuration, too; a callback for its Trainer.

blocks = find_blocks(model, example, whole=True)      # layers as wholes: the model stays one of its class
pruner = Pruner(model, optimizer, blocks=[b.name for b in blocks], example=example, ...)
...
net = compact(pruner.finish())
net.save_pretrained("smaller")                        # AutoModelForCausalLM.from_pretrained("smaller")
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shallower.estimators import needs_loss
from shallower.pruner import Pruner
from shallower.weave import is_passage
from shallower.whole import Passed

STATE = "pruner.pt"  # beside the Trainer's own files in a checkpoint
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


class PruningCallback(TrainerCallback):
    """Prunes while a `transformers.Trainer` trains.

        pruner = Pruner(model, optimizer, dataset_size=tokens, log_gamma=-50.0, blocks=blocks)
        callback = PruningCallback(pruner, finalize_at=0.8)
        trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[callback], ...)
        trainer.train()
        net = compact(pruner.finish())

    The loss of a language model is a mean over tokens, so `dataset_size` is their number in the dataset. To
    resume, let the pruner remove what was removed before the Trainer loads the weights that are left:

        callback.resume(checkpoint)
        trainer.train(resume_from_checkpoint=checkpoint)

    Args:
        pruner: built with the optimiser that the Trainer is given.
        finalize_at: when the network is made deterministic: a part of all steps, or a step.
    """

    def __init__(self, pruner: Pruner, *, finalize_at: float | int = 0.8) -> None:
        if needs_loss(pruner.estimator):
            raise ValueError(
                "The Trainer keeps its loss to itself, so the estimator cannot run the network again: "
                "use shallower.first_order or shallower.at_the_sum."
            )
        self.pruner, self.finalize_at = pruner, finalize_at

    def resume(self, checkpoint: str | Path) -> None:
        """Bring the pruner, and with it the model and the optimiser, to where `checkpoint` was saved."""
        self.pruner.load_state_dict(torch.load(Path(checkpoint) / STATE, weights_only=True))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self.pruner.num_steps:
            raise RuntimeError(
                f"The Trainer is at step {state.global_step}, the pruner at {self.pruner.num_steps}. After a "
                "resume, call `callback.resume(checkpoint)` before `trainer.train(...)`."
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.pruner.step()
        at = self.finalize_at * state.max_steps if self.finalize_at < 1 else self.finalize_at
        if self.pruner.num_steps >= at and not self.pruner.finalized:
            self.pruner.finalize()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        torch.save(self.pruner.state_dict(), folder / STATE)
