"""What a block is worth: two estimators against each other and against all 2^L networks."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shallower import Residual, estimators, first_order, flip, split
from shallower.aside import frozen_statistics
from shallower.gate import Gate, attach


def network(depth: int = 4, width: int = 6, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)

    def block() -> Residual:
        middle = [nn.BatchNorm1d(width)] if norm else []
        return Residual(nn.Sequential(nn.Linear(width, width), *middle, nn.Tanh(), nn.Linear(width, width)))

    return nn.Sequential(nn.Linear(3, width), *(block() for _ in range(depth)), nn.Linear(width, 5))


def gate_all(model: nn.Module, theta: float = 0.6) -> list[Gate]:
    blocks = [(name, m) for name, m in model.named_modules() if isinstance(m, Residual)]
    return [attach(m, split(m, name=name), theta) for name, m in blocks]


def batch(n: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def set_draws(gates: list[Gate], draws) -> None:
    for gate, xi in zip(gates, draws, strict=True):
        gate.xi = bool(xi)


@torch.no_grad()
def enumerated(model: nn.Module, gates: list[Gate], rates: list[float], closure) -> tuple[Tensor, Tensor]:
    """C / N and dC/dtheta / N, eq. (13): sums over all 2^L networks, each with its probability."""
    cost, slope = torch.zeros(()), torch.zeros(len(gates))
    for draws in product((0, 1), repeat=len(gates)):
        set_draws(gates, draws)
        loss = closure()
        chances = [r if xi else 1 - r for r, xi in zip(rates, draws, strict=True)]
        cost += torch.tensor(chances).prod() * loss
        for k, xi in enumerate(draws):  # d/dtheta_k of the product drops its k-th factor
            others = torch.tensor([c for i, c in enumerate(chances) if i != k]).prod()
            slope[k] += (1 if xi else -1) * others * loss
    return cost, slope


def test_flip_is_unbiased_for_the_slope_over_all_networks():
    """Its mean over many draws is C_1 - C_0 within three standard errors, for every block."""
    model, (x, y) = network(depth=4), batch()
    gates, rates = gate_all(model), [0.3, 0.6, 0.5, 0.8]

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    _, slope = enumerated(model, gates, rates, closure)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(600):
        set_draws(gates, torch.rand(4, generator=generator) < torch.tensor(rates))
        samples.append(torch.stack(flip(gates, closure)))
    values = torch.stack(samples)
    error = values.std(0) / len(samples) ** 0.5
    assert ((values.mean(0) - slope).abs() < 3 * error).all()
    assert (error < 0.2 * slope.abs().max()).all()


class Around(nn.Module):
    """What the first block returned is written over, and read again behind all others."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.first, self.begin, *rest, self.last = model
        self.rest = nn.Sequential(*rest)

    def forward(self, x: Tensor) -> Tensor:
        z = self.begin(self.first(x)).mul_(0.5)
        return self.last(self.rest(z) + z)


@pytest.mark.parametrize("draws", [(1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("kind", ["plain", "norm", "in place"])
def test_flip_with_its_shared_prefix_equals_two_whole_networks(draws, kind):
    model, (x, y) = network(norm=kind == "norm"), batch()
    if kind == "in place":
        model = Around(model)
    gates = gate_all(model)
    for gate in gates:  # as the pruner has it where layers work in place
        gate.alias = kind != "in place"
    set_draws(gates, draws)

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    with frozen_statistics(model.modules()):
        found = flip(gates, closure)
        for k, gate in enumerate(gates):
            with torch.no_grad():
                set_draws(gates, draws)
                gate.xi = True
                on = closure()
                gate.xi = False
                off = closure()
            assert_close(found[k], on - off, rtol=0, atol=1e-7)
    set_draws(gates, draws)


def test_flip_runs_half_the_blocks():
    """With L gates open, the flip of gate k runs the L - k gates above it: L (L - 1) / 2 runs in all."""
    model, (x, y) = network(depth=6), batch()
    gates = gate_all(model)
    for gate in gates:
        gate.watching = False  # as the pruner has it for an estimator that runs the network again
    runs = []
    for module in model:
        if isinstance(module, Residual):
            module.branch.register_forward_hook(lambda *_: runs.append(1))
    flip(gates, lambda: F.cross_entropy(model(x), y))
    assert len(runs) == 6 + sum(range(6))


def test_flip_leaves_draws_statistics_and_replays_as_they_were():
    model, (x, y) = network(norm=True), batch()
    gates = gate_all(model)
    set_draws(gates, (1, 0, 1, 0))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with frozen_statistics(model.modules()):
        flip(gates, lambda: F.cross_entropy(model(x), y))
    assert [g.xi for g in gates] == [True, False, True, False]
    assert all(not g.replay and g.record is None for g in gates)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_flip_cleans_up_when_the_closure_fails():
    model, (x, _) = network(), batch()
    gates = gate_all(model)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return model(x).sum()

    with pytest.raises(ZeroDivisionError):
        flip(gates, closure)
    assert all(g.xi and not g.replay and g.record is None for g in gates)


def test_a_block_that_runs_twice_is_flipped_in_both_places():
    block = Residual(nn.Linear(3, 3))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, z: Tensor) -> Tensor:
            return self.block(torch.tanh(self.block(z)))

    model, x = Recurrent(), torch.randn(4, 3)
    gate = attach(block, split(block, name="block"), 0.5)
    (difference,) = flip([gate], lambda: model(x).sum())
    on, off = model(x).sum(), torch.tanh(x).sum()
    assert_close(difference, (on - off).detach())


@pytest.mark.parametrize("draws", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_first_order_equals_flip_where_the_loss_is_linear_in_each_block(draws):
    """loss = mean of the output, blocks without hidden layer: the loss is multilinear in the xi."""
    model = nn.Sequential(Residual(nn.Linear(4, 4)), Residual(nn.Linear(4, 4)))
    gates, x = gate_all(model), torch.randn(8, 4)
    set_draws(gates, draws)
    model(x).mean().backward()
    estimates = first_order(gates)
    for found, exact in zip(estimates, flip(gates, lambda: model(x).mean()), strict=True):
        assert_close(found.detach(), exact, rtol=1e-4, atol=1e-6)


def test_first_order_approaches_flip_quadratically_as_the_last_layer_vanishes():
    """The first neglected term of the Taylor series has two factors W2."""
    errors = []
    for scale in (1e-1, 1e-2):
        model, (x, y) = network().double(), batch()
        x = x.double()
        gates = gate_all(model)
        for module in model:
            if isinstance(module, Residual):
                with torch.no_grad():
                    for p in module.branch[-1].parameters():
                        p.mul_(scale)
        worst = 0.0
        for draws in ((1, 1, 1, 1), (0, 1, 0, 1)):
            set_draws(gates, draws)
            for gate in gates:
                gate.reader.clear()
            F.cross_entropy(model(x), y).backward()
            exact = flip(gates, lambda: F.cross_entropy(model(x), y))  # noqa: B023
            worst = max(
                worst, *(float((a - b).abs()) for a, b in zip(first_order(gates), exact, strict=True))
            )
        errors.append(worst)
    assert errors[1] < errors[0] / 50  # 100 times smaller, up to terms of higher order


def test_first_order_without_a_backward_pass_says_so():
    gates = gate_all(network())
    with pytest.raises(RuntimeError, match=r"loss\.backward\(\)"):
        first_order(gates)


def test_flip_without_a_closure_shows_the_call():
    with pytest.raises(TypeError, match=r"pruner\.step\(lambda"):
        flip(gate_all(network()))


def test_flip_in_evaluation_mode_is_refused():
    model = network().eval()
    gates = gate_all(model)
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        flip(gates, lambda: model(torch.randn(2, 3)).sum())


def test_flip_with_a_closure_that_skips_the_model_is_refused():
    with pytest.raises(RuntimeError, match="gated model itself"):
        flip(gate_all(network()), lambda: torch.zeros(()))


@pytest.mark.parametrize("lengths", [(2, 2, 2), (1, 3, 2)])
def test_estimates_add_up_to_the_same_on_a_device_as_by_number(lengths):
    values = iter(torch.randn(sum(lengths)))
    parts = [[next(values) for _ in range(length)] for length in lengths]
    expected = torch.tensor([float(sum(row)) for row in parts])
    assert_close(estimators.sums(parts), expected)
    assert_close(estimators._sums_on_device(parts), expected)
