"""GPT-2 on Python's own documentation, byte by byte, with the Trainer of transformers: dense against pruned.

    pip install "shallower[hf]"
    python examples/gpt2_trainer.py

Whole layers are pruned, so what comes out is a GPT-2 with fewer of them, which `from_pretrained` loads. Takes
a few minutes on one core and downloads nothing: the text comes with Python.
"""

import argparse
import tempfile
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shallower import Pruner, count_parameters, find_blocks
from shallower.integrations.transformers import PruningCallback

LENGTH, BATCH = 48, 8


class Text(Dataset):
    """Pieces of a text, byte by byte."""

    def __init__(self, data: Tensor) -> None:
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def texts() -> tuple[Text, Text]:
    data = torch.tensor(list("\n\n".join(topics.values()).encode()), dtype=torch.long)
    split = int(0.9 * len(data))
    return Text(data[:split]), Text(data[split:])


def train(steps: int, price: float | None, layers: int) -> dict[str, float]:
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    seen, unseen = texts()
    callbacks = []
    if price is not None:
        blocks = find_blocks(model, {"input_ids": seen[0]["input_ids"][None]}, whole=True)
        given = {"dataset_size": seen.pieces.numel(), "price": price, "theta": 0.9, "theta_lr": 1e-2}
        callbacks = [PruningCallback(Pruner(model, optimizer, blocks=blocks, **given), finalize_at=0.5)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=64,
            lr_scheduler_type="cosine",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=seen,
            eval_dataset=unseen,
            optimizers=(optimizer, None),
            callbacks=callbacks,
        )
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
        if callbacks:
            callbacks[0].pruner.finish()
        loss = trainer.evaluate()["eval_loss"]
    row = {"loss": loss, "layers": model.config.n_layer, "parameters": count_parameters(model)}
    return {**row, "seconds": seconds, "tokens/s": throughput(model)}


@torch.no_grad()
def throughput(model: GPT2LMHeadModel) -> float:
    """Tokens per second of inference, at a batch of 8."""
    model.eval()
    words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    times = []
    for _ in range(12):
        begun = time.perf_counter()
        model(words)
        times.append(time.perf_counter() - begun)
    return words.numel() / sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--price", type=float, default=0.02, help="in nats per token")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        "dense": train(given.steps, None, given.layers),
        f"pruned, price {given.price:g}": train(given.steps, given.price, given.layers),
    }
    print("| GPT-2 | loss (nats/byte) | layers | parameters | training s | tokens/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        cells = f"{row['loss']:.3f} | {row['layers']} | {row['parameters']:,} | {row['seconds']:.0f}"
        print(f"| {name} | {cells} | {row['tokens/s']:,.0f} |")


if __name__ == "__main__":
    main()
