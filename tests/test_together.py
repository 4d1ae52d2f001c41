"""What people train with, all at once: the same estimates as in the plainest loop, and nothing lost."""

import copy
import pickle
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from shallower import Pruner, Residual, first_order, flip, models

N = 200


class Net(nn.Module):
    """A stem, four residual blocks, each checkpointed if it is so wished, and a head."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            Residual(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))) for _ in range(4)
        )

    def forward(self, x):
        z = self.stem(x)
        for block in self.blocks:
            z = checkpoint(block, z, use_reentrant=False) if self.checkpointed else block(z)
        return self.head(z)


def run(*, accumulate=1, scaled=False, checkpointed=False, averaged=False, clip=None, estimator=None):
    """Twelve steps; theta learns by plain SGD, so that it adds the estimates up as they are."""
    torch.manual_seed(0)
    model = Net(checkpointed=checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    options = {} if estimator is None else {"estimator": estimator}
    pruner = Pruner(
        model,
        optimizer,
        dataset_size=N,
        log_gamma=-14.0,
        theta=0.5,
        theta_lr=3e-3,
        theta_optimizer=torch.optim.SGD,
        grad_scaler=scaler if scaled else None,
        **options,
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
    if ema is not None:
        pruner.follow(ema.module)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        x = torch.randn(16, 5, generator=generator)
        y = (x[:, 0] * x[:, 1] > 0).long()
        optimizer.zero_grad()
        for a, b in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            scaler.scale(F.cross_entropy(model(a), b) / accumulate).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        pruner.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        if ema is not None:
            ema.update_parameters(model)
    return model, pruner, ema


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("estimator", [None, flip])
def test_every_combination_learns_what_the_plain_loop_learns(clip, estimator):
    """Accumulation, GradScaler, checkpointing and averaging, each with and without each other."""
    plain, pruner, _ = run(clip=clip, estimator=estimator)
    assert 1 <= len(pruner.events) <= 3  # so that the rest is not about a run in which nothing happens
    for accumulate, scaled, checkpointed, averaged in product((1, 4), *[(False, True)] * 3):
        model, other, _ = run(
            accumulate=accumulate,
            scaled=scaled,
            checkpointed=checkpointed,
            averaged=averaged,
            clip=clip,
            estimator=estimator,
        )
        assert [(e.step, e.block) for e in other.events] == [(e.step, e.block) for e in pruner.events]
        assert other.theta.tolist() == pytest.approx(pruner.theta.tolist(), rel=1e-3, abs=1e-5)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_an_average_of_the_weights_loses_the_same_blocks_and_is_the_same_mean_network():
    model, pruner, ema = run(averaged=True)
    assert [n for n, _ in ema.module.named_parameters()] == [n for n, _ in model.named_parameters()]
    gone = pruner.events[0].block
    assert not list(ema.module.get_submodule(gone).parameters())
    x = torch.randn(6, 5)
    ema.module.load_state_dict(model.state_dict())
    assert torch.equal(ema.module.eval()(x), model.eval()(x))  # xi replaced by theta in both
    pruner.finalize(0.3)
    ema.update_parameters(model)
    ema.module.load_state_dict(model.state_dict())
    net = pruner.finish()
    assert torch.equal(ema.module.eval()(x), net.eval()(x))
    assert not any("shallower" in key for m in ema.module.modules() for key in vars(m))


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_made_before_or_after_gating_follows(gated, copied):
    torch.manual_seed(0)
    model = Net(checkpointed=False)
    twin = copied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-5.0, theta=0.25)
    twin = copied(model) if gated else twin
    pruner.follow(twin)
    x = torch.randn(6, 5)
    assert torch.equal(twin.eval()(x), model.eval()(x))


def test_a_pickled_copy_that_has_not_run_yet_loses_its_blocks_and_gates():
    torch.manual_seed(0)
    model = Net(checkpointed=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-5.0, theta=0.25)
    twin = pickled(model)
    pruner.follow(twin)
    pruner.theta[1] = 0.0
    model(torch.randn(6, 5)).square().mean().backward()
    optimizer.step()
    assert [event.block for event in pruner.step()] == ["blocks.1"]
    pruner.finalize(0.0)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(6, 5)
    assert torch.equal(twin.eval()(x), pruner.finish().eval()(x))


def test_blocks_that_were_wrapped_after_gating_lose_blocks_and_gates():
    torch.manual_seed(0)
    model = Net(checkpointed=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-5.0, theta=0.25)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Residual))
    pruner.theta[1] = 0.0
    x = torch.randn(6, 5)
    model(x).square().mean().backward()
    optimizer.step()
    pruner.step()
    pruner.finalize(0.0)
    assert not any("shallower" in key for module in model.modules() for key in vars(module))
    z = model.stem(x)
    for block in (model.blocks[0], *model.blocks[2:]):
        z = z + block.branch(z)
    assert torch.equal(model(x), model.head(z))


def test_the_average_of_a_resumed_run_follows_from_where_it_was():
    _, pruner, ema = run(averaged=True)
    torch.manual_seed(0)
    fresh = Net(checkpointed=False)
    twin = copy.deepcopy(fresh)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    again = Pruner(fresh, optimizer, dataset_size=N, log_gamma=-5.0, theta_optimizer=torch.optim.SGD)
    again.follow(twin)
    again.load_state_dict(pruner.state_dict())
    twin.load_state_dict(ema.module.state_dict())
    x = torch.randn(6, 5)
    assert torch.equal(twin.eval()(x), ema.module.eval()(x))


def test_what_is_no_copy_is_refused():
    model, pruner, _ = run()
    with pytest.raises(ValueError, match="the model itself"):
        pruner.follow(model)
    with pytest.raises(ValueError, match="these parameters differ"):
        pruner.follow(Net(checkpointed=False))
    pruner.finalize(0.3)
    pruner.finish()
    with pytest.raises(RuntimeError, match="deepcopy"):
        pruner.follow(copy.deepcopy(model))


class Images(nn.Module):
    """A ResNet with one convolution and BN in its blocks, these checkpointed as it is wished."""

    def __init__(self, style: str, reentrant: bool | None) -> None:
        super().__init__()
        self.net = models.resnet(blocks=(2, 1, 2), widths=(4, 8, 8), style=style, final_norm="bare")
        self.reentrant = reentrant

    def forward(self, x):
        z = self.net.stem(x)
        for block in (*self.net.stage1, *self.net.stage2, *self.net.stage3):
            if self.reentrant is None:
                z = block(z)
            else:
                z = checkpoint(block, z, use_reentrant=self.reentrant)
        return self.net.head(z)


def run_images(
    style, estimator, *, layout=torch.contiguous_format, reentrant=None, compiled=False, **optimiser
) -> Pruner:
    """Steps in two micro-batches each, clipped; theta adds its estimates up as they are."""
    torch.manual_seed(0)
    model = Images(style, reentrant).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3, **optimiser)
    pruner = Pruner(
        model,
        optimizer,
        dataset_size=N,
        log_gamma=-16.0,
        theta=0.5,
        theta_lr=2.5e-3,
        theta_optimizer=torch.optim.SGD,
        estimator=estimator,
    )
    if compiled:
        torch._dynamo.reset()
        pruner.compile(backend="aot_eager")
    generator = torch.Generator().manual_seed(1)
    for _ in range(14 if estimator is flip else 12):
        x = torch.randn(16, 3, 8, 8, generator=generator).contiguous(memory_format=layout)
        y = (x[:, 0].mean((1, 2)) > 0).long()
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (F.cross_entropy(model(a), b) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        pruner.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    survivors = [p for p in model.parameters() if p.ndim == 4]
    assert all(p.is_contiguous(memory_format=layout) for p in survivors)
    return pruner


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # where flip checkpoints
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # where dynamo looks
@pytest.mark.parametrize("style", ["W-B-a-W", "v1"])
@pytest.mark.parametrize("estimator", [first_order, flip])
def test_convolutions_learn_the_same_in_channels_last_checkpointed_and_compiled(style, estimator):
    plain = run_images(style, estimator)
    assert 1 <= len(plain.events) <= 4
    last = torch.channels_last
    for options in (
        {"layout": last},
        {"layout": last, "reentrant": False, "fused": True},
        {"layout": last, "reentrant": True},
        {"layout": last, "compiled": True},
    ):
        other = run_images(style, estimator, **options)
        assert [(e.step, e.block) for e in other.events] == [(e.step, e.block) for e in plain.events]
        assert other.theta.tolist() == pytest.approx(plain.theta.tolist(), rel=1e-3, abs=1e-5)
