"""Compiled blocks: one function for each kind, none anew for a draw or a removal, and the same numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from shallower import Pruner, Residual, flip

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(width: int) -> Residual:
    return Residual(
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
    )


def started(**options):
    torch.manual_seed(0)
    blocks = [*(block(8) for _ in range(4)), nn.Linear(8, 6), *(block(6) for _ in range(3))]
    model = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    options = {"dataset_size": 300, "log_gamma": -2.0, "theta": 0.5, "theta_lr": 0.02, **options}
    return model, optimizer, Pruner(model, optimizer, **options)


def train(model, optimizer, pruner, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(12, 5, generator=generator)
        y = (x[:, 0] * x[:, 1] > 0).long()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        pruner.step(lambda x=x, y=y: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("estimator", [None, flip])
def test_a_compiled_run_is_the_run_and_compiles_each_kind_once(estimator):
    """Two kinds of block, each open (forward and backward) and closed (forward of the branch alone)."""
    options = {} if estimator is None else {"estimator": estimator}
    plain, ours = started(**options), started(**options)
    counter = CompileCounterWithBackend("aot_eager")
    ours[2].compile(backend=counter)
    train(*plain, steps=5)
    train(*ours, steps=5)
    kinds = counter.frame_count
    assert kinds <= (4 if estimator is None else 6)  # flip runs them without gradients, too
    train(*plain, steps=60, seed=1)
    train(*ours, steps=60, seed=1)
    assert len(ours[2].events) >= 1
    assert ours[2].events == plain[2].events
    assert ours[2].theta.tolist() == pytest.approx(plain[2].theta.tolist(), rel=1e-5)
    for a, b in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert counter.frame_count == kinds


def test_survivors_stay_compiled_and_the_finished_network_is_plain():
    model, optimizer, pruner = started()
    counter = CompileCounterWithBackend("aot_eager")
    pruner.compile(backend=counter)
    train(model, optimizer, pruner, steps=5)
    pruner.finalize(0.0)
    assert all(vars(model.get_submodule(name)).get("_compiled_call_impl") for name in pruner.alive)
    before = counter.frame_count
    train(model, optimizer, pruner, steps=2)
    assert counter.frame_count <= before + 2  # one for each kind, whose class is the author's again
    net = pruner.finish()
    assert not any("shallower" in key for m in net.modules() for key in vars(m))
    twin = copy.deepcopy(net)
    x = torch.randn(4, 5)
    torch.testing.assert_close(twin.eval()(x), net.eval()(x))
    with pytest.raises(RuntimeError, match=r"torch\.compile\(model\)"):
        pruner.compile()


def test_survivors_of_many_kinds_are_not_given_up_on():
    """PyTorch recompiles a class's forward a number of times for all its modules together."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for width in (3, 4, 5, 6) for layer in (block(width), nn.Linear(width, width + 1)))
    )
    x, y = torch.randn(12, 3), torch.randint(0, 7, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = Pruner(model, optimizer, dataset_size=12, log_gamma=-1e-3, theta=1.0)
    pruner.compile(backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
            pruner.step()
            pruner.finalize()
            with torch.no_grad():
                model.eval()(x)
    assert len(pruner.alive) == 4  # and no kind of them raised


def test_a_hook_on_a_compiled_survivor_runs():
    model, optimizer, pruner = started()
    pruner.compile(backend="aot_eager")
    train(model, optimizer, pruner, steps=2)
    pruner.finalize(0.0)
    seen = []
    model.get_submodule(pruner.alive[0]).register_forward_hook(lambda *args: seen.append(args))
    model(torch.randn(4, 5))
    assert len(seen) == 1


def test_a_whole_model_that_is_compiled_compiles_nothing_anew_for_a_draw():
    """The gates stay outside of the graphs; everything between them is compiled once."""
    model, optimizer, pruner = started(theta_lr=1e-9)
    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(model, backend=counter)
    train(whole, optimizer, pruner, steps=3)
    before = counter.frame_count
    train(whole, optimizer, pruner, steps=20, seed=1)
    assert counter.frame_count == before
    plain = started(theta_lr=1e-9)
    train(*plain, steps=3)
    train(*plain, steps=20, seed=1)
    assert pruner.theta.tolist() == pytest.approx(plain[2].theta.tolist(), rel=1e-9)
    for a, b in zip(model.parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def scaled(factor: float) -> nn.Module:
    """A class for each factor: the same text, and `times` means another function in each."""

    def times(z):
        return factor * z

    class Scaled(Residual):
        def forward(self, z):
            return times(z) + self.branch(z)

    return Scaled(nn.Linear(5, 5))


def test_two_classes_of_one_text_are_two_kinds():
    torch.manual_seed(0)
    model = nn.Sequential(scaled(2.0), scaled(3.0), nn.Linear(5, 2))
    x = torch.randn(4, 5)
    expected = model(x).detach()
    options = {"dataset_size": 10, "log_gamma": -1.0, "theta": 1.0}
    pruner = Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    pruner.compile(backend="aot_eager")
    torch.testing.assert_close(model(x), expected)
