"""What a trace may miss, held against a second road: the original with the last layer of a branch at zero."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shallower import Pruner, find_blocks, survey
from shallower.whole import Whole

WIDTH = 6
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
MASK = torch.linspace(0, 1, WIDTH)


class Layer(nn.Module):
    """Two sums; what is odd about each is in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.m = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.config = SimpleNamespace(alpha=0.1)

    def rest(self, x: Tensor) -> Tensor:
        return x + self.m(self.n2(x))


class AsksForType(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.n1(x)
        if isinstance(mask, Tensor):
            h = h * mask
        return self.rest(x + self.a(h))


class StopsGradients(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            h = self.n1(x)
        return self.rest(x + self.a(h))


class AsksForGradients(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rest(x + (1.0 if torch.is_grad_enabled() else 2.0) * self.a(self.n1(x)))


class SwitchesAutocast(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.a(self.n1(x))
        return self.rest(x + h)


class ReadsDtype(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rest(x + self.a(self.n1(x.to(self.n1.weight.dtype))))


class HoldsNumbers(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rest(x + self.config.alpha * self.a(self.n1(x)))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], number: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(number))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x, mask)
        return x


def gate(model: nn.Module, example: Any = (X, MASK), **options: Any) -> Pruner:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Pruner(
        model, optimizer, dataset_size=10, log_gamma=-1.0, theta=1.0, **{"example": example, **options}
    )


def silence(model: nn.Module, block: Any) -> None:
    """The second road: what ends the branch gives zero."""
    layer = model.get_submodule(block.path)
    ends = [layer.a, layer.m] if isinstance(block, Whole) else [getattr(layer, block.name.rpartition(".")[2])]
    for branch in ends:
        nn.init.zeros_(branch[2].weight)
        nn.init.zeros_(branch[2].bias)


KINDS = [AsksForType, StopsGradients, AsksForGradients, SwitchesAutocast, ReadsDtype, HoldsNumbers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_or_removed_branch_is_one_that_gives_zero(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    original = copy.deepcopy(model)
    pruner = gate(model)
    assert_close(model.eval()(X, MASK), original.eval()(X, MASK))
    for name, block in pruner.blocks.items():
        mute = copy.deepcopy(original).train()
        silence(mute, block)
        pruner.gates[name].xi = False
        model.train()
        assert_close(model(X, MASK), mute(X, MASK))
        for net in (model, mute):
            net.zero_grad()
            net(X, MASK).square().sum().backward()
        assert_close(model.first.weight.grad, mute.first.weight.grad)
        pruner.gates[name].xi = True
        pruner.discard()
    gone = pruner.names[0]
    mute = copy.deepcopy(original).eval()
    silence(mute, pruner.blocks[gone])
    pruner.num_steps = pruner.vitals.learned = 1
    pruner.theta[0] = 0.0
    pruner.finalize()
    assert_close(pruner.finish().eval()(X, MASK), mute(X, MASK))


def test_a_number_in_a_configuration_may_change() -> None:
    model = Net(HoldsNumbers)
    original = copy.deepcopy(model)
    gate(model)
    model.eval()(X)
    for net in (model, original):
        for layer in net.layers:
            layer.config.alpha = 0.9
    assert_close(model(X), original.eval()(X))


class InPlace(nn.Module):
    """relu(x) + f(relu(x)), in the guise of x + f(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Inside()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.line = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.act(x))


def test_a_child_that_works_in_place_on_what_the_skip_reads_is_refused() -> None:
    found = survey(nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace()), X)
    assert not found.blocks
    assert "works in place" in found.rejected["1"]


def test_without_an_example_it_is_noticed_in_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), InPlace())
    gate(model, None)
    with pytest.raises(RuntimeError, match="'1' cannot be pruned: a part of it works in place on its input"):
        model.train()(X)


def test_a_block_whose_skip_has_another_shape_is_refused_on_the_example() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0, keepdim=True) + self.line(x)

    found = survey(nn.Sequential(nn.Linear(WIDTH, WIDTH), Spread()), X)
    assert not found.blocks
    assert "would change its shape" in found.rejected["1"]


class WritesToItself(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.aux, self.log, self.cache = None, [], {}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.a(self.n1(x))
        self.aux = x.mean()
        self.log.append(self.aux)
        self.cache["last"] = x
        return self.rest(x)


def test_finding_leaves_nothing_of_itself_in_the_model() -> None:
    model = Net(WritesToItself)
    assert not find_blocks(model)
    assert "writes to itself" in survey(model).rejected["layers.0"]
    assert all((layer.aux, layer.log, layer.cache) == (None, [], {}) for layer in model.layers)


class Dicey(Layer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rest(x + float(np.random.rand()) * self.a(self.n1(x)))


def test_numbers_that_numpy_draws_are_not_frozen() -> None:
    assert all(isinstance(block, Whole) for block in find_blocks(Net(Dicey), X))
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    find_blocks(Net(Dicey))
    assert np.random.rand() == expected


class Shared(nn.Module):
    """A table in a buffer, one for all layers, as of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def test_a_buffer_that_layers_share_is_not_written_to() -> None:
    shared = Shared()

    class WithTable(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(x + self.a(self.n1(x)))

    model = Net(WithTable).train()
    pruner = gate(model, X)
    pruner.gates["layers.1.a"].xi = False
    version = shared.table._version
    model(X).sum().backward()  # autograd would say that what it has saved was overwritten
    assert shared.table._version == version
    assert model.first.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_with_dropout_have_the_gradients_of_others(reentrant: bool) -> None:
    class Dropping(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a.append(nn.Dropout(0.5))
            self.m.append(nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(x + self.a(self.n1(x)))

    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Net(Dropping).train()
        pruner = gate(model, X)
        for layer in ("layers.0.a", "layers.1.a"):
            pruner.gates[layer].xi = False
        torch.manual_seed(1)
        x = model.first(X)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        x.square().sum().backward()
        gradients.append(model.first.weight.grad)
    assert_close(*gradients)
