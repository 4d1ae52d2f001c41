"""What survivors earn: by hand, by the estimator `flip`, and against networks trained to need one block."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shallower import Pruner, Residual, flip, worth


def finalised(norm: bool = False, **options):
    torch.manual_seed(0)
    blocks = [
        Residual(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 4)))
        for _ in range(3)
    ]
    model = nn.Sequential(nn.Linear(3, 4), *blocks, nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=40, log_gamma=-7.0, **options)
    for batch in data():
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()
        pruner.step(lambda batch=batch: loss_of(model)(batch))
    pruner.theta[1] = 0.0
    pruner.finalize()
    return model, pruner


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = (16, 16, 8)
    return [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in sizes]


def loss_of(model):
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def test_the_benefit_is_the_loss_without_the_block_less_that_with_it():
    """By hand: each network written out, over the 40 samples at once."""
    model, pruner = finalised(multipliers={"3": 2.0})
    first, second = worth(pruner, data(), loss_of(model))
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    stem, a, b, head = model[0], model[1], model[3], model[5]
    with torch.no_grad():
        both = F.cross_entropy(head(b(a(stem(x)))), y)
        without_a, without_b = F.cross_entropy(head(b(stem(x))), y), F.cross_entropy(head(a(stem(x))), y)
    assert (first.block, second.block) == ("1", "3")
    assert first.benefit == pytest.approx(40 * float(without_a - both), rel=1e-4)
    assert second.benefit == pytest.approx(40 * float(without_b - both), rel=1e-4)
    assert (first.price, second.price) == (7.0, 14.0)


def test_the_error_is_the_spread_over_batches():
    """Three batches of equal size: the standard deviation of their gains over the root of three."""
    model, pruner = finalised()
    batches = [data()[0], data()[1], tuple(t[:16] for t in data()[0][::1])]
    each = [worth(pruner, [batch], loss_of(model))[0] for batch in batches]
    found = worth(pruner, batches, loss_of(model))[0]
    gains = torch.tensor([row.benefit for row in each])
    assert found.benefit == pytest.approx(float(gains.mean()), rel=1e-4)
    assert found.error == pytest.approx(float(gains.std()) / math.sqrt(3), rel=1e-3)
    assert all(math.isinf(row.error) for row in each)  # one batch has no spread


def test_batchnorm_uses_the_statistics_of_the_batch_and_nothing_is_changed():
    """Two roads: `flip` on the same batch, with every gate open, and the network as it stands."""
    model, pruner = finalised(norm=True, estimator=flip)
    model[4].p = 0.0
    batch = data()[0]
    twin = copy.deepcopy(model)
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.eval().modules()]
    found = worth(pruner, [batch], loss_of(model))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    again = Pruner(
        twin, torch.optim.SGD(twin.parameters(), lr=0.1), dataset_size=40, log_gamma=-7.0, estimator=flip
    )
    twin.train()
    for gate in again.gates.values():
        gate.xi = True
    values = flip(list(again.gates.values()), lambda: loss_of(twin)(batch))
    expected = [-40 * float(value) for value in values]
    assert [row.benefit for row in found] == pytest.approx(expected, rel=1e-4)


def test_dropout_is_off_so_measuring_twice_gives_the_same():
    model, pruner = finalised()
    assert worth(pruner, data(), loss_of(model)) == worth(pruner, data(), loss_of(model))
    assert model[4].training


def test_what_is_random_rolls_the_same_dice_with_the_block_as_without_it():
    """A block that adds nothing is worth nothing, also where dropout is called as a function."""
    model, pruner = finalised()
    model[4].forward = lambda z: F.dropout(z, 0.5, training=True)
    with torch.no_grad():
        model[1].branch[2].weight.zero_()
        model[1].branch[2].bias.zero_()
    dice = torch.get_rng_state()
    assert worth(pruner, data(), loss_of(model))[0].benefit == 0.0
    assert torch.equal(torch.get_rng_state(), dice)


def test_it_is_measured_between_finalise_and_finish_and_on_something():
    model, pruner = finalised()
    with pytest.raises(ValueError, match="no batch"):
        worth(pruner, [], loss_of(model))
    pruner.finish()
    with pytest.raises(RuntimeError, match="finished"):
        worth(pruner, data(), loss_of(model))
    fresh = nn.Sequential(Residual(nn.Linear(3, 3)), nn.Linear(3, 2))
    early = Pruner(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), dataset_size=40, log_gamma=-7.0)
    with pytest.raises(RuntimeError, match=r"pruner\.finalize"):
        worth(early, data(), loss_of(fresh))


def test_a_loss_that_fails_leaves_the_network_whole():
    model, pruner = finalised()
    before = list(model.named_modules())
    calls = []

    def loss(batch):
        calls.append(batch)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return loss_of(model)(batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        worth(pruner, data(), loss)
    assert list(model.named_modules()) == before
