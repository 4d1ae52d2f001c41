"""The three lines in a loop of accelerate: mixed precision and accumulation are its business, draws are ours.

pip install "shallower[hf]"
python examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from shallower import Pruner, count_parameters, data
from shallower.models import mlp


def main(epochs: int = 12) -> nn.Module:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    task = data.load("digits")
    model = mlp(64, 64, 8, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    pruner = Pruner(  # with the optimiser that was not prepared: accelerate's wrapper steps it
        model,
        optimizer,
        dataset_size=len(task.train),
        price=0.02,
        theta=0.5,
        theta_lr=1e-2,
        grad_scaler=accelerator.scaler,
    )
    prepared, stepper = accelerator.prepare(model, optimizer)
    for epoch in range(epochs):
        for images, labels in task.batches("train", 32, seed=epoch):
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                stepper.step()
                if accelerator.sync_gradients:
                    pruner.step()
                stepper.zero_grad()
        print(f"epoch {epoch}: {len(pruner.alive)} blocks, {count_parameters(model):,} parameters")
    pruner.finalize()
    return pruner.finish()


if __name__ == "__main__":
    main()
