"""The price ladder: by hand, with its statistics and its prices."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import finalized, normed
from torch import nn

from shallower import Pruner, certify
from shallower.certificate import price_ladder
from shallower.worth import Measured, measured


def test_a_rung_is_scored_with_statistics_of_its_own_network() -> None:
    """By hand: the network without the block, its BatchNorm fed with the same batches."""
    model, pruner, batches, loss = normed()
    before = copy.deepcopy(model.state_dict())
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def score(net: nn.Module = model) -> float:
        net.eval()
        with torch.no_grad():
            return float(F.cross_entropy(net(x), y))

    rungs = price_ladder(pruner, batches, loss, score)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.momentum == 0.1 for m in model.modules() if isinstance(m, nn.BatchNorm1d))
    bare = copy.deepcopy(model)
    bare[int(rungs[0].block)] = nn.Identity()
    stale = score(bare)
    for m in bare.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.reset_running_stats()
            m.momentum = None
    bare.train()
    bare[2].eval()
    with torch.no_grad():
        for batch in batches:
            bare(batch[0])
    assert rungs[0].score == pytest.approx(score(bare))
    assert stale != pytest.approx(score(bare), rel=1e-3)


def test_the_ladder_goes_by_the_price_that_each_block_is_asked() -> None:
    _, pruner, batches, loss = finalized()
    plain = price_ladder(pruner, batches, loss)
    last = plain[-1].block
    pruner.multipliers[pruner.names.index(last)] = 1e6  # it is asked so much that it goes first
    rungs = price_ladder(pruner, batches, loss)
    assert rungs[0].block == last
    assert rungs[0].price == pytest.approx(rungs[0].benefit)
    assert rungs[0].log_gamma == pytest.approx(-rungs[0].benefit / 1e6)
    assert rungs[1].log_gamma == -rungs[1].price


def test_a_ladder_on_some_of_the_data_starts_from_what_all_of_them_said() -> None:
    model, pruner, batches, loss = finalized()
    found = certify(model, pruner, batches, loss, curvature_steps=0, ladder_samples=20)
    earned = {row.block: row.benefit for row in found.survivors}
    first, second = found.ladder[:2]
    assert first.benefit == min(earned.values()) == earned[first.block]
    others = [name for name in pruner.alive if name != first.block]
    with pruner.without(first.block):
        few = measured(pruner, others, batches[:1], loss)
    assert second.benefit == min(few.benefits.values())
    assert second.loss == pytest.approx(first.loss + second.benefit / 60)


def test_a_rung_costs_at_least_as_much_as_those_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is left earns less, once another has gone."""
    _, pruner, batches, loss = finalized()
    names = pruner.alive
    earns = iter([dict.fromkeys(names, 5.0), *({name: value for name in names} for value in (2.0, 9.0))])

    def measure(pruner: Pruner, left: list[str], *rest: Any) -> Measured:
        now = next(earns)
        return Measured({n: now[n] for n in left}, dict.fromkeys(left, 0.0), 1.0, 3, 60)

    monkeypatch.setattr("shallower.certificate.ladder.measured", measure)
    rungs = price_ladder(pruner, batches, loss)
    assert [r.benefit for r in rungs] == [5.0, 2.0, 9.0][: len(rungs)]
    assert [r.price for r in rungs] == [5.0, 5.0, 9.0][: len(rungs)]


def test_the_ladder_takes_the_least_first_and_measures_the_others_again() -> None:
    model, pruner, batches, loss = finalized()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def mean() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y))

    seen: list[float] = []
    rungs = price_ladder(pruner, batches, loss, lambda: seen.append(mean()) or seen[-1])
    assert [r.left for r in rungs] == list(range(len(pruner.alive)))[::-1]
    assert {r.block for r in rungs} == set(pruner.alive)
    assert [r.score for r in rungs] == seen
    losses = [mean(), *seen]
    for rung, before, after in zip(rungs, losses, losses[1:], strict=False):
        assert rung.loss == pytest.approx(after)
        assert rung.benefit == pytest.approx(60 * (after - before))
    assert [r.price for r in rungs] == pytest.approx(
        [max(r.benefit for r in rungs[: k + 1]) for k in range(len(rungs))]
    )
    assert mean() == pytest.approx(losses[0])  # all of them are back


def test_a_norm_that_is_frozen_keeps_its_statistics_on_every_rung() -> None:
    model, pruner, batches, loss = normed()
    model.train()
    model[3].eval()
    others = [model[0].branch[1], model[1].branch[1]]
    kept, before, seen = model[3].running_mean.clone(), [m.running_mean.clone() for m in others], []

    def score() -> float:
        seen.append([m.running_mean.clone() for m in (model[3], *others)])
        return 0.0

    price_ladder(pruner, batches, loss, score)
    assert all(torch.equal(found[0], kept) for found in seen)
    assert any(not torch.equal(a, b) for a, b in zip(seen[0][1:], before, strict=True))  # taken anew
    assert not model[3].training
