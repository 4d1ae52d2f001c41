"""A small vision transformer of timm on CIFAR-10, with Lightning: dense against pruned.

    pip install "shallower[vision,lightning]"
    python examples/vit_lightning.py

Attention and MLP of every layer are pruned on their own. CIFAR-10 is fetched once, as by
`shallower data cifar10`.
"""

import argparse
import time
from typing import Any

import lightning as L
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallower import count_parameters, data
from shallower.integrations.lightning import PruningCallback

BATCH = 64


class Classifier(L.LightningModule):
    def __init__(self, depth: int, steps: int) -> None:
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "depth": depth}
        self.net = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **sizes)
        self.steps = steps

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(task: Any, steps: int, price: float | None, depth: int) -> dict[str, float]:
    torch.manual_seed(0)
    module = Classifier(depth, steps)
    loader = task.batches("train", BATCH, seed=0)
    options = {"dataset_size": len(task.train), "price": price, "theta": 0.9, "theta_lr": 1e-2}
    example = torch.zeros(2, 3, 32, 32)
    callbacks = [] if price is None else [PruningCallback(example=example, finalize_at=0.5, **options)]
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begun = time.perf_counter()
    trainer.fit(module, loader)
    seconds = time.perf_counter() - begun
    if callbacks:
        callbacks[0].pruner.finish()
    blocks = 2 * depth if price is None else len(callbacks[0].pruner.alive)
    loss, accuracy = evaluate(module, task)
    row = {"loss": loss, "accuracy": accuracy, "blocks": blocks, "parameters": count_parameters(module)}
    return {**row, "seconds": seconds, "images/s": throughput(module)}


@torch.no_grad()
def evaluate(module: nn.Module, task: Any) -> tuple[float, float]:
    module.eval()
    losses, right = 0.0, 0
    for images, labels in task.batches("test", 500):
        logits = module(images)
        losses += F.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(1) == labels).sum())
    return losses / len(task.test), 100 * right / len(task.test)


@torch.no_grad()
def throughput(module: nn.Module) -> float:
    """Images per second of inference, at a batch of 64."""
    module.eval()
    images, times = torch.zeros(BATCH, 3, 32, 32), []
    for _ in range(12):
        begun = time.perf_counter()
        module(images)
        times.append(time.perf_counter() - begun)
    return BATCH / sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prices", type=float, nargs="+", default=[0.001, 0.004], help="in nats per image")
    parser.add_argument("--depth", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = data.load("cifar10")
    rows = {"dense": train(task, given.steps, None, given.depth)}
    for price in given.prices:
        rows[f"pruned, price {price:g}"] = train(task, given.steps, price, given.depth)
    print("| ViT | loss | accuracy % | blocks | parameters | training s | images/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        quality = f"{row['loss']:.3f} | {row['accuracy']:.1f}"
        size = f"{row['blocks']} | {row['parameters']:,} | {row['seconds']:.0f} | {row['images/s']:,.0f}"
        print(f"| {name} | {quality} | {size} |")


if __name__ == "__main__":
    main()
