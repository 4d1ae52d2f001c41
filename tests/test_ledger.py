"""What a run cost, counted by hand on a toy."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shallower import Pruner, Residual, find_blocks, flip, models
from shallower.graphs import replace
from shallower.ledger import Ledger, block_costs, count_macs, count_parameters
from shallower.recipes import recipe
from shallower.reports.costs import INPUTS, network_cost


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


def test_a_step_that_does_not_learn_runs_no_estimator():
    model, optimizer, pruner = started(flip)
    ledger = Ledger(pruner, torch.randn(5, 3))
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    active = 32 * sum(gate.xi for gate in pruner.gates.values())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    pruner.step(learn=False)  # and needs no closure
    ledger.step()
    assert ledger.load.ran == 3 * (20 + active)


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


@pytest.mark.parametrize("estimator", [None, flip])
def test_fine_tuning_counts_the_plain_network_from_its_first_step_on(estimator):
    """A removed block (32) costs nothing, the other its full cost, and no estimate is made any more."""
    model, optimizer, pruner = started(estimator)
    ledger = Ledger(pruner, torch.randn(5, 3))
    step(model, optimizer, pruner)
    ledger.step()
    pruner.theta[0] = 0.0
    pruner.gates["2"].xi = False
    pruner.finalize()
    for _ in range(2):
        before = copy.copy(ledger.load)
        step(model, optimizer, pruner)
        ledger.step()
        assert ledger.load.ran - before.ran == ledger.load.expected - before.expected == 3 * 52


def test_a_network_finalised_before_its_last_step_was_counted_is_counted_as_it_ran():
    model, optimizer, pruner = started()
    ledger = Ledger(pruner, torch.randn(5, 3))
    step(model, optimizer, pruner)
    pruner.theta[0] = 0.0
    pruner.finalize()
    ledger.step()
    assert ledger.load.survivors == 3 * 84


def test_a_ledger_that_would_count_wrongly_says_so():
    model, optimizer, pruner = started()
    ledger = Ledger(pruner, torch.randn(5, 3))
    with pytest.raises(RuntimeError, match="made 0 steps"):
        ledger.step()
    step(model, optimizer, pruner)
    step(model, optimizer, pruner)
    with pytest.raises(RuntimeError, match=r"`ledger\.step\(\)` once after each `pruner\.step\(\)`"):
        ledger.step()
    pruner.theta[0] = 0.0
    step(model, optimizer, pruner)
    with pytest.raises(ValueError, match=r"removed 1 blocks already.*ledger\.resume"):
        Ledger(pruner, torch.randn(5, 3))


def test_an_estimator_of_ones_own_must_say_what_it_runs():
    def own(gates, closure):
        return flip(gates, closure)

    own.needs_loss = True
    model, optimizer, pruner = started(own)
    with pytest.raises(ValueError, match="estimator_macs"):
        Ledger(pruner, torch.randn(5, 3))
    ledger = Ledger(pruner, torch.randn(5, 3), estimator_macs=1000)
    ran = sum(3 * 32 for gate in pruner.gates.values() if gate.xi) + 3 * 20
    step(model, optimizer, pruner)
    ledger.step()
    assert ledger.load.ran == ran + 1000


class Translator(nn.Module):
    """Two inputs, blocks called by keyword, dropout by function, BatchNorm, and a dict as its output."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.block = Residual(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))

    def forward(self, x, scale, flag=True):
        z = F.dropout(self.norm(self.stem(x) * scale), training=self.training)
        return {"logits": self.block(z=z), "flag": flag}


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize("keywords", [False, True])
def test_any_model_is_counted_from_one_example_as_it_is_called(samples, keywords):
    torch.manual_seed(0)
    model = Translator()
    pruner = Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset_size=10, log_gamma=-1.0, blocks=["block"]
    )
    x, scale = torch.randn(samples, 3), torch.ones(samples, 1)
    example = {"x": x, "scale": scale, "flag": False} if keywords else (x, scale)
    state, dice = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert Ledger(pruner, example).blocks == {"block": 32}
    block, whole = block_costs(pruner, example)
    assert (block.params, block.macs) == (40, 32)
    assert (whole.name, whole.params, whole.macs) == ("(whole network)", 3 * 4 + 4 + 8 + 40, 12 + 32)
    assert whole.activations > block.activations > 0
    assert whole.seconds > 0
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), dice)


def test_what_is_kept_for_backward_does_not_depend_on_the_size_of_the_example():
    """Also where the block's input is the batch itself, and a slice of it would share its memory."""
    model = nn.Sequential(Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=10, log_gamma=-1.0)
    few, many = block_costs(pruner, torch.randn(2, 4)), block_costs(pruner, torch.randn(256, 4))
    assert [row.activations for row in few] == [row.activations for row in many]


def test_an_example_without_tensors_is_refused():
    model, _, _ = started()
    for nothing in ({}, torch.zeros(0, 3), [1, 2]):
        with pytest.raises(TypeError, match="a tuple of arguments"):
            count_macs(model, nothing)


def test_an_encoder_layer_is_counted_in_evaluation_too():
    """PyTorch's fast path is made of operators that its counter does not know."""
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    projections, attention, mlp = 5 * 8 * 32, 2 * 5 * 5 * 8, 2 * 5 * 8 * 16
    assert count_macs(layer.eval(), torch.randn(3, 5, 8)) == projections + attention + mlp
    assert torch.backends.mha.get_fastpath_enabled()


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


def test_measuring_blocks_in_the_middle_of_a_step_changes_no_estimate():
    """What it runs is no forward pass of the step, and what the step has read stays."""
    model, _, pruner = started()
    gates = list(pruner.gates.values())
    for gate, xi in zip(gates, (True, False), strict=True):
        gate.xi = xi
    model(torch.randn(5, 3)).sum().backward()
    before = [gate.worth.clone() for gate in gates]
    block_costs(pruner, torch.randn(5, 3))
    assert [gate.reader.opened for gate in gates] == [True, False]
    assert torch.equal(torch.stack([gate.worth for gate in gates]), torch.stack(before))


def test_the_costs_of_a_block_by_hand():
    """For each sample, a training step keeps a hidden layer and the sum: twice 4 floats of 4 bytes."""
    model, _, pruner = started()
    draws = [gate.xi for gate in pruner.gates.values()]
    *rows, _ = block_costs(pruner, torch.randn(5, 3))
    assert [(row.name, row.params, row.macs) for row in rows] == [("1", 40, 32), ("2", 40, 32)]
    assert [row.activations for row in rows] == [32, 32]
    assert all(row.seconds > 0 for row in rows)
    assert [gate.xi for gate in pruner.gates.values()] == draws
    assert all(gate.worth is None for gate in pruner.gates.values())
    assert all(p.grad is None for p in model.parameters())


BEST_ROWS = [  # of the paper on CIFAR-10: survivors in each stage, whether the two transitions are among them
    (56, (5, 5, 6), (False, False), 39.48, 34.20),
    (56, (1, 5, 6), (True, False), 55.46, 36.93),
    (56, (2, 3, 5), (False, False), 62.04, 48.86),  # printed 48.87: exact if every convolution had a bias
    (56, (1, 2, 5), (False, False), 69.56, 51.58),
    (110, (4, 8, 10), (False, False), 58.78, 47.43),
    (110, (4, 6, 9), (False, False), 64.37, 53.86),
    (110, (2, 3, 6), (False, False), 79.30, 70.47),
]


@pytest.mark.parametrize(("depth", "survivors", "transitions", "fpr", "ppr"), BEST_ROWS)
def test_the_papers_best_rows_by_removal_and_by_what_the_ledger_says_of_the_blocks(
    depth, survivors, transitions, fpr, ppr
):
    """Two roads to each ratio: blocks taken out of the network, and their costs taken off its total."""
    found = network_cost(recipe(f"cifar10-resnet{depth}-dense"))
    assert (found.params, found.macs) == {56: (851_002, 125_485_696), 110: (1_723_930, 252_887_680)}[depth]
    with torch.device("meta"):
        model, example = models.resnet(depth=depth), torch.zeros(2, 3, 32, 32)
    parts = {block.name: block for block in find_blocks(model)}
    stages = [[name for name in parts if name.startswith(f"stage{k}")] for k in (1, 2, 3)]
    kept = set(stages[0][: survivors[0]])
    for stage, count, transition in zip(stages[1:], survivors[1:], transitions, strict=True):
        kept |= set(stage[0 if transition else 1 :][:count])
    for name in parts.keys() - kept:
        replace(model, name, parts[name].bypass(model.get_submodule(name)))
    left = found.macs - sum(block.macs for block in found.blocks if block.name not in kept)
    assert count_macs(model, example) == left
    assert round(100 * (1 - left / found.macs), 2) == fpr
    params = found.params - sum(block.params for block in found.blocks if block.name not in kept)
    assert count_parameters(model) == params
    assert round(100 * (1 - params / found.params), 2) == ppr


@pytest.mark.parametrize("name", ["mnist-cnn10", "cifar10-vgg16-dense", "cifar10-resnet56-dense"])
def test_macs_are_those_that_fvcore_counts(name):
    fvcore = pytest.importorskip("fvcore.nn")
    chosen = recipe(name)
    model = getattr(models, chosen.network)(**chosen.options).eval()
    analysis = fvcore.FlopCountAnalysis(model, torch.zeros(1, *INPUTS[chosen.task]))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counted = analysis.by_operator()
    assert network_cost(chosen).macs == counted["conv"] + counted["linear"]
