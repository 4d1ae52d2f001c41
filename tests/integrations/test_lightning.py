"""Lightning trains, the callback prunes; a stopped run goes on as if it had not stopped."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shallower import Residual

L = pytest.importorskip("lightning")
ModelCheckpoint = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint
PruningCallback = importlib.import_module("shallower.integrations.lightning").PruningCallback

INPUTS = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Residual(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))) for _ in range(5)]
        self.net = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, ckpt_path: Any = None, **options: Any) -> tuple[Module, PruningCallback]:
    module = Module()
    given = {"dataset_size": 64, "log_gamma": -20.0, "theta": 0.5, "theta_lr": 0.03}
    pruning = PruningCallback(example=INPUTS[:2], finalize_at=30, **given)
    saving = ModelCheckpoint(folder, every_n_train_steps=16, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        max_epochs=10,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[pruning, saving],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    trainer.fit(
        module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=ckpt_path, weights_only=True
    )
    return module, pruning


def test_it_prunes_and_resumes_where_it_stopped(tmp_path):
    module, callback = fit(tmp_path)
    pruner = callback.pruner
    assert pruner.num_steps == 40
    assert pruner.finalized
    assert pruner.events
    assert {id(p) for g in pruner.optimizer.param_groups for p in g["params"]} == set(
        map(id, module.parameters())
    )
    again, resumed = fit(tmp_path / "again", ckpt_path=tmp_path / "step=16.ckpt")
    assert resumed.pruner.events == pruner.events
    ours, theirs = again.state_dict(), module.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    pruner.finish()
    assert sum(p.numel() for p in module.parameters()) < sum(p.numel() for p in Module().parameters())
