"""Where the transformers library trains: a callback for its Trainer.

blocks = find_blocks(model, example, whole=True)      # layers as wholes: the model stays one of its class
pruner = Pruner(model, optimizer, blocks=blocks, ...)
trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[PruningCallback(pruner)], ...)
trainer.train()
net = pruner.finish()
net.save_pretrained("smaller")                        # AutoModelForCausalLM.from_pretrained("smaller")
"""

from pathlib import Path
from typing import Any

import torch

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'shallower[hf]'") from error

from shallower.estimators import needs_loss
from shallower.pruner import Pruner

STATE = "pruner.pt"  # beside the Trainer's own files in a checkpoint


class PruningCallback(TrainerCallback):
    """Prunes while a `transformers.Trainer` trains.

        pruner = Pruner(model, optimizer, dataset_size=tokens, log_gamma=-50.0, blocks=blocks)
        callback = PruningCallback(pruner, finalize_at=0.8)
        trainer = Trainer(model, args, optimizers=(optimizer, None), callbacks=[callback], ...)
        trainer.train()
        net = pruner.finish()

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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end would load the weights of a checkpoint with more layers into what is "
                "left of the model, in part. Set it to False; a checkpoint that you prefer is loaded into a "
                "model that `callback.resume(checkpoint)` has brought to its shape."
            )
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)  # of accelerate's wrapper, with fp16
        if scaler is not None:
            self.pruner.use_optimizer(self.pruner.optimizer, grad_scaler=scaler)

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
        at = self.finalize_at * state.max_steps if isinstance(self.finalize_at, float) else self.finalize_at
        if self.pruner.num_steps >= at and not self.pruner.finalized:
            self.pruner.finalize()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        torch.save(self.pruner.state_dict(), folder / STATE)
