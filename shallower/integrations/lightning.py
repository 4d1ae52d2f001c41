"""A callback for Lightning's Trainer."""

from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'shallower[lightning]'") from error

from shallower.blocks import find_blocks
from shallower.pruner import Pruner


class PruningCallback(Callback):
    """Prunes while a Lightning `Trainer` trains.

        callback = PruningCallback(example=batch[0], dataset_size=50_000, log_gamma=-250.0)
        trainer = Trainer(callbacks=[callback], ...)
        trainer.fit(module, loader)
        net = callback.pruner.finish()

    `trainer.fit(module, loader, ckpt_path=...)` resumes: what was removed is removed before the weights are
    loaded. The module has one optimiser.

    Args:
        example: an input of the module's forward: a tensor, a tuple of arguments or a dict of keyword ones.
        finalize_at: when the network is made deterministic: a part of all optimiser steps, or a step.
        whole: gate layers as wholes; see `find_blocks`.
        options: of the `Pruner`.
    """

    pruner: Pruner

    def __init__(
        self, *, example: Any, finalize_at: float | int = 0.8, whole: bool = False, **options: Any
    ) -> None:
        self.example, self.finalize_at, self.whole, self.options = example, finalize_at, whole, options

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before any weights are loaded and any optimiser is built: gate the module."""
        if stage != "fit":
            return
        blocks = find_blocks(pl_module, self.example, whole=self.whole)
        for_now = torch.optim.SGD(pl_module.parameters(), lr=0.0)
        self.pruner = Pruner(pl_module, for_now, blocks=blocks, **self.options)
        own = pl_module.on_load_checkpoint

        def remove_first(checkpoint: dict[str, Any]) -> None:
            saved = checkpoint.get("callbacks", {}).get(self.state_key)
            if saved is None:
                raise ValueError(
                    "The checkpoint was saved without this callback, so it does not say what was removed. "
                    "Load it into the module before it is fitted: `module.load_state_dict(...)`."
                )
            self.pruner.load_state_dict(saved["pruner"])
            own(checkpoint)

        # The one hook that runs before the weights are loaded is the module's.
        vars(pl_module)["on_load_checkpoint"] = remove_first

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"The module has {len(trainer.optimizers)} optimisers; the pruner needs one that trains all "
                "of its blocks."
            )
        vars(pl_module).pop("on_load_checkpoint", None)
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # with fp16
        self.pruner.use_optimizer(trainer.optimizers[0], grad_scaler=scaler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.pruner.num_steps:
            return  # a micro-batch: gradients are still being added up
        self.pruner.step()
        total = trainer.estimated_stepping_batches
        at = self.finalize_at * total if isinstance(self.finalize_at, float) else self.finalize_at
        if self.pruner.num_steps >= at and not self.pruner.finalized:
            self.pruner.finalize()

    def state_dict(self) -> dict[str, Any]:
        return {"pruner": self.pruner.state_dict()} if hasattr(self, "pruner") else {}
