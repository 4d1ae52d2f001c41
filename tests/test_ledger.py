"""What a run cost, counted by hand on a toy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shallower import Pruner, Residual, flip
from shallower.ledger import Ledger, block_costs, count_macs, count_parameters


def started(estimator=None):
    """MACs per sample: stem 3*4 = 12, two blocks of 4*4 + 4*4 = 32, head 4*2 = 8."""
    torch.manual_seed(0)
    blocks = [Residual(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) for _ in range(2)]
    model = nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if estimator is None else {"estimator": estimator}
    pruner = Pruner(model, optimizer, dataset_size=10, log_gamma=-1.0, theta_lr=1e-6, **options)
    return model, optimizer, pruner


def step(model, optimizer, pruner) -> None:
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    pruner.step(lambda: F.cross_entropy(model(x), y))


def test_macs_and_parameters_by_hand():
    model, _, _ = started()
    assert count_macs(model, torch.randn(7, 3)) == 12 + 2 * 32 + 8
    assert count_parameters(model) == 3 * 4 + 4 + 2 * 2 * (4 * 4 + 4) + 4 * 2 + 2


@pytest.mark.parametrize("estimator", [None, flip])
def test_one_step_is_counted_as_it_ran(estimator):
    """One block open, one closed: the closed one runs forward only, and only if the estimate reads it."""
    model, optimizer, pruner = started(estimator)
    pruner.gates["1"].xi, pruner.gates["2"].xi = True, False
    ledger = Ledger(pruner, torch.randn(5, 3))
    step(model, optimizer, pruner)
    ledger.step()
    # flip runs the network as drawn (20 + 32), with the first block closed (20), the second open (20 + 32)
    again = 32 if estimator is None else 52 + 20 + 52
    assert ledger.load.dense == ledger.load.survivors == 3 * (20 + 64)
    assert ledger.load.expected == pytest.approx(3 * (20 + 0.75 * 64))
    assert ledger.load.ran == 3 * (20 + 32) + again


def test_what_flip_runs_is_what_pytorch_counts():
    model, optimizer, pruner = started(flip)
    for gate in pruner.gates.values():
        gate.xi = True
    ledger = Ledger(pruner, torch.randn(5, 3))
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with FlopCounterMode(display=False) as counter:
        pruner.step(lambda: F.cross_entropy(model(x), y))
    ledger.step()
    assert ledger.load.ran - 3 * 84 == counter.get_total_flops() // (2 * 5)


def test_a_removed_block_costs_nothing_from_the_next_step_on():
    model, optimizer, pruner = started()
    ledger = Ledger(pruner, torch.randn(5, 3))
    pruner.theta[0] = 0.0
    step(model, optimizer, pruner)
    ledger.step()
    assert ledger.load.survivors == 3 * 84
    step(model, optimizer, pruner)
    ledger.step()
    assert ledger.load.survivors == 3 * 84 + 3 * 52
    assert ledger.load.dense == 2 * 3 * 84


def test_fine_tuning_counts_the_plain_network():
    model, optimizer, pruner = started()
    ledger = Ledger(pruner, torch.randn(5, 3))
    step(model, optimizer, pruner)
    ledger.step()
    pruner.theta[0] = 0.0
    pruner.finalize()
    ledger.step()
    before = copy.copy(ledger.load)
    step(model, optimizer, pruner)
    ledger.step()
    assert ledger.load.ran - before.ran == ledger.load.expected - before.expected == 3 * 52


def test_counting_changes_nothing():
    model, _, pruner = started()
    model[1].eval()
    state = copy.deepcopy(model.state_dict())
    draws = [gate.xi for gate in pruner.gates.values()]
    Ledger(pruner, torch.randn(5, 3))
    count_macs(model, torch.randn(5, 3))
    assert [gate.xi for gate in pruner.gates.values()] == draws
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_the_costs_of_a_block_by_hand():
    """For each sample, a training step keeps a hidden layer and the sum: twice 4 floats of 4 bytes."""
    model, _, pruner = started()
    draws = [gate.xi for gate in pruner.gates.values()]
    rows = block_costs(pruner, torch.randn(5, 3))
    assert [(row.name, row.params, row.macs) for row in rows] == [("1", 40, 32), ("2", 40, 32)]
    assert [row.activations for row in rows] == [32, 32]
    assert all(row.seconds > 0 for row in rows)
    assert [gate.xi for gate in pruner.gates.values()] == draws
    assert all(gate.worth is None for gate in pruner.gates.values())
    assert all(p.grad is None for p in model.parameters())
