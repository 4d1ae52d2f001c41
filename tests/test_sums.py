"""Sums inside a module's forward, and modules gated as a whole: the same laws as for a block of its own."""

import copy
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shallower
from shallower import Pruner, find_blocks, flip
from shallower.blocks import survey
from shallower.discovery import run_example
from shallower.fitting import cut
from shallower.ledger import block_costs, count_parameters
from shallower.weave import Strand
from shallower.whole import Whole

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
WIDTH, N = 6, 100


class Mixer(nn.Module):
    """Attention, as far as a network knows: it reads a mask and returns weights beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, weights: bool = False) -> tuple[Tensor, Any]:
        mixed = torch.tanh(self.value(x)) if mask is None else torch.tanh(self.value(x)) * mask
        return self.out(mixed), mixed if weights else None


class Layer(nn.Module):
    """A transformer's: two sums, more than one input, more than one output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2 = nn.LayerNorm(WIDTH), Mixer(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.rate = 0.0

    def forward(self, x: Tensor, *, mask: Tensor | None = None, weights: bool = False) -> Any:
        mixed, seen = self.mixer(self.norm1(x), mask=mask, weights=weights)
        x = x + F.dropout(mixed, self.rate, training=self.training)
        x = self.scale * self.down(torch.relu(self.up(self.norm2(x)))) + x
        return (x, seen) if weights else (x,)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            (x,) = layer(x, mask=mask)
        return self.last(x)


class Wary(nn.Module):
    """Adds to its input, but nobody can follow how: its forward looks at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        branch = self.line(x) if x.abs().max() > 0 else x
        return x + torch.tanh(branch), mask


class WaryNet(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Wary() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x, _ = layer(x, mask)
        return self.last(x)


class Parallel(Layer):
    """Two branches of one value, added in one expression."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, weights: bool = False) -> Any:
        z = self.norm1(x)
        mixed, _ = self.mixer(z, mask=mask)
        return (x + mixed + self.scale * self.down(torch.relu(self.up(self.norm2(z)))),)


class ParallelNet(Net):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Parallel() for _ in range(2))


INPUTS, LABELS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
MASK = (torch.arange(8 * WIDTH).reshape(8, WIDTH) % 3 > 0).float()
EXAMPLES: dict[str, Any] = {
    "alone": (Net, (INPUTS,)),
    "masked": (Net, {"x": INPUTS, "mask": MASK}),
    "whole": (WaryNet, (INPUTS, MASK)),
    "parallel": (ParallelNet, {"x": INPUTS, "mask": MASK}),
}


def started(kind: str = "masked", **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer, Pruner]:
    torch.manual_seed(0)
    build, example = EXAMPLES[kind]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"dataset_size": N, "log_gamma": -5.0, "example": example, **options}
    return model, example, optimizer, Pruner(model, optimizer, **given)


def loss_of(model: nn.Module, example: Any) -> Tensor:
    return F.cross_entropy(run_example(model, example), LABELS)


def train(model: nn.Module, example: Any, optimizer: Any, pruner: Pruner, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, example).backward()
        optimizer.step()
        closure = (lambda: loss_of(model, example)) if pruner.estimator is flip else None
        pruner.step(closure)


KINDS = pytest.mark.parametrize("kind", list(EXAMPLES))

# -- finding --------------------------------------------------------------------------------------------


def test_each_sum_is_a_block_named_after_its_branch():
    found = find_blocks(Net(), {"x": INPUTS, "mask": MASK})
    assert [b.name for b in found] == ["layers.0.mixer", "layers.0.up", "layers.1.mixer", "layers.1.up"]
    assert [b.path for b in found] == ["layers.0"] * 2 + ["layers.1"] * 2
    mine = found[1].prunable(Net().layers[0])
    assert set(mine) == {
        "scale",
        "norm2.weight",
        "norm2.bias",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }


def test_without_an_example_a_module_is_looked_at_as_its_defaults_have_it():
    assert [b.name for b in find_blocks(Net(1))] == ["layers.0.mixer", "layers.0.up"]


@pytest.mark.parametrize("example", ["hello", torch.ones(2, 9), {"y": torch.ones(2, 4)}, ()])
def test_an_example_that_the_model_cannot_take_is_named(example: Any):
    with pytest.raises(ValueError, match=r"The model cannot be run on the example \(\w+Error: .*Give a"):
        find_blocks(Net(), example)


def test_what_can_be_pruned_is_the_same_on_the_meta_device():
    real = shallower.inspect_model(Net(), (INPUTS, MASK))
    with torch.device("meta"):
        unreal = shallower.inspect_model(Net(), (torch.empty(INPUTS.shape), torch.empty(MASK.shape)))
    assert real == unreal
    assert len(real.blocks) == 4
    mine = sum(p.numel() for layer in Net().layers for p in layer.parameters())
    assert sum(block.params for block in real.blocks) == mine


def test_what_cannot_be_followed_is_gated_as_a_whole_if_the_example_shows_that_it_adds():
    found = find_blocks(WaryNet(), (INPUTS, MASK))
    assert [type(b) for b in found] == [Whole, Whole]
    assert not survey(WaryNet()).blocks  # nothing is assumed without an example


def test_what_multiplies_its_input_on_the_way_is_not_a_sum():
    class Doubling(Wary):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            return 2 * (super().forward(x, mask)[0]), mask

    model = WaryNet()
    model.layers[0] = Doubling()
    assert [b.name for b in find_blocks(model, (INPUTS, MASK))] == ["layers.1"]


def test_a_branch_whose_other_output_is_needed_is_refused():
    class Talking(Layer):
        def forward(self, x: Tensor, *, mask: Any = None) -> Any:
            mixed, seen = self.mixer(self.norm1(x), mask=mask, weights=True)
            return x + mixed * seen.mean(), seen

    class TalkingNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            x, seen = self.layers[0](self.first(x))
            return self.last(x) * seen.mean()

    model = TalkingNet()
    model.layers[0] = Talking()
    found = survey(model, (INPUTS,))
    assert all(b.path != "layers.0" for b in found.blocks)
    assert "mixer returns more than the branch" in found.rejected["layers.0"]


def test_a_sum_around_blocks_leaves_them_theirs():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = Layer(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.inner(x)[0]
            return x + self.after(x)

    names = [b.name for b in find_blocks(nn.Sequential(Outer()), torch.ones(2, WIDTH))]
    assert names == ["0.after", "0.inner.mixer", "0.inner.up"]


def test_an_input_added_in_a_child_is_a_sum_of_the_parent():
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
            return self.norm(self.dense(hidden) + residual)

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self, self.output = nn.Linear(WIDTH, WIDTH), Output()

        def forward(self, x: Tensor) -> Tensor:
            return self.output(torch.tanh(self.self(x)), x)

    model = nn.Sequential(Bert(), Bert())
    (first, _) = find_blocks(model, torch.ones(2, WIDTH))
    assert isinstance(first, Strand)
    assert first.name == "0"
    assert set(first.parameters) == {"self.weight", "self.bias", "output.dense.weight", "output.dense.bias"}
    x, expected = torch.randn(3, WIDTH), None
    expected = model[1](model[0].output.norm(x))
    cut(model, first)
    assert torch.equal(model(x), expected)
    assert not any(True for _ in model[0].output.dense.parameters())


# -- running --------------------------------------------------------------------------------------------


@KINDS
def test_open_gates_change_nothing(kind):
    model, example, _, _ = started(kind, theta=1.0)
    torch.manual_seed(0)
    plain = EXAMPLES[kind][0]()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(run_example(model, example), run_example(plain, example))
    assert torch.allclose(run_example(model.eval(), example), run_example(plain.eval(), example), atol=1e-6)


@KINDS
def test_a_closed_gate_is_a_removed_block_to_the_bit(kind):
    model, example, _, pruner = started(kind, theta=1.0)
    torch.manual_seed(0)
    plain = EXAMPLES[kind][0]()
    for name, gate in pruner.gates.items():
        gate.xi = False
        pruned = copy.deepcopy(plain)
        cut(pruned, pruner.blocks[name])
        for watching in (True, False):
            gate.watching = watching
            assert torch.equal(run_example(model, example), run_example(pruned, example))
        gate.xi = True
        lost = sum(p.numel() for p in pruner.blocks[name].prunable(gate.module).values())
        assert count_parameters(plain) - count_parameters(pruned) == lost > 0


@KINDS
def test_the_mean_network_weighs_each_branch_with_its_rate(kind):
    last = find_blocks(EXAMPLES[kind][0](), EXAMPLES[kind][1])[-1].name
    model, example, _, pruner = started(kind, theta=0.3, blocks=[last])
    gate = pruner.gates[last]
    model.eval()
    mean = run_example(model, example)
    gate.rate = 1.0
    whole = run_example(model, example)
    gate.rate = 0.0
    none = run_example(model, example)
    # The last sum is followed by one linear layer, so the mean of the outputs is the output of the mean.
    assert torch.allclose(mean, 0.3 * whole + 0.7 * none, atol=1e-6)
    assert not torch.allclose(whole, none, atol=1e-3)


@KINDS
@pytest.mark.parametrize("closed", [0, 1])
def test_the_estimate_is_the_derivative_by_xi(kind, closed):
    """Against the mean network, whose rates are xi: its loss is differentiated by finite differences."""
    model, example, _, pruner = started(kind, theta=1.0)
    model.double()
    example = (
        {k: v.double() for k, v in example.items()}
        if isinstance(example, dict)
        else tuple(v.double() for v in example)
    )
    gates = list(pruner.gates.values())
    gates[closed].xi = False
    loss_of(model, example).backward()
    worth = [gate.worth.item() for gate in gates]
    model.eval()
    rates = [1.0] * len(gates)
    rates[closed] = 0.0
    for k in range(len(gates)):
        ends = []
        for step in (-1e-5, 1e-5):
            for gate, rate in zip(gates, rates, strict=True):
                gate.rate = rate
            gates[k].rate = rates[k] + step
            ends.append(loss_of(model, example).item())
        assert worth[k] == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-3, abs=1e-6)


@KINDS
def test_flip_is_the_difference_of_two_networks(kind):
    model, example, _, pruner = started(kind, estimator=flip, theta=1.0)
    gates = list(pruner.gates.values())
    with torch.no_grad():
        for draw in itertools.product((True, False), repeat=2):
            gates[0].xi, gates[1].xi = draw
            found = flip(gates, lambda: loss_of(model, example))
            for gate, value in zip(gates, found, strict=True):
                before, both = gate.xi, []
                for xi in (True, False):
                    gate.xi = xi
                    both.append(loss_of(model, example))
                gate.xi = before
                assert torch.allclose(value, both[0] - both[1], atol=1e-6)


# -- training -------------------------------------------------------------------------------------------


@KINDS
def test_training_removes_blocks_and_what_is_left_is_plain(kind):
    model, example, optimizer, pruner = started(kind, theta=0.5, theta_lr=0.05, log_gamma=-60.0)
    total = count_parameters(model)
    train(model, example, optimizer, pruner, 30)
    assert pruner.events
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert known == {id(p) for p in model.parameters()}
    pruner.finalize()
    net = pruner.finish()
    assert count_parameters(net) < total
    assert not [n for n, _ in net.named_buffers() if "shallower" in n]
    assert "Gated" not in str({type(m).__mro__ for m in net.modules()})
    net.eval()
    out = run_example(net, example)
    assert torch.equal(run_example(copy.deepcopy(net), example), out)
    assert torch.equal(run_example(pickle.loads(pickle.dumps(net)), example), out)


@KINDS
def test_survivors_keep_their_moments_to_the_bit(kind):
    model, example, optimizer, pruner = started(kind, theta=1.0)
    train(model, example, optimizer, pruner, 3)
    name = pruner.names[0]
    gone = {id(p) for p in pruner.blocks[name].prunable(pruner.gates[name].module).values()}
    kept = {n: p for n, p in model.named_parameters() if id(p) not in gone}
    before = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in kept.items()}
    pruner.theta[0] = 0.0
    pruner._remove(pruner.tolerance)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in kept.items()}
    for n, p in kept.items():
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in before[n].items())


@KINDS
def test_a_resumed_run_equals_one_that_never_stopped(kind):
    options = {"theta": 0.5, "theta_lr": 0.05, "log_gamma": -30.0}
    model, example, optimizer, pruner = started(kind, **options)
    train(model, example, optimizer, pruner, 15)
    states = copy.deepcopy((pruner.state_dict(), model.state_dict(), optimizer.state_dict()))
    train(model, example, optimizer, pruner, 15)
    model2, _, optimizer2, pruner2 = started(kind, **options)
    for part, state in zip((pruner2, model2, optimizer2), states, strict=True):
        part.load_state_dict(state)
    train(model2, example, optimizer2, pruner2, 15)
    assert pruner2.thetas == pruner.thetas
    assert pruner2.events == pruner.events
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), model2.state_dict().values(), strict=True)
    )


@KINDS
def test_an_average_follows(kind):
    model, example, optimizer, pruner = started(kind, theta=0.5, theta_lr=0.05, log_gamma=-60.0)
    ema = torch.optim.swa_utils.AveragedModel(model)
    pruner.follow(ema.module)
    train(model, example, optimizer, pruner, 20)
    ema.update_parameters(model)
    assert [n for n, _ in ema.module.named_parameters()] == [n for n, _ in model.named_parameters()]
    model.eval(), ema.eval()
    assert torch.allclose(run_example(model, example), run_example(ema.module, example), atol=1e-6)


@KINDS
def test_what_survivors_are_worth_is_measured_by_leaving_them_out(kind):
    model, example, optimizer, pruner = started(kind, theta=1.0)
    train(model, example, optimizer, pruner, 2)
    pruner.finalize()
    before = run_example(model, example)
    rows = shallower.worth(pruner, [(INPUTS,)], lambda batch: loss_of(model, example))
    assert torch.equal(run_example(model, example), before)
    for row in rows:
        pruned = copy.deepcopy(model)
        cut(pruned, pruner.blocks[row.block])
        expected = N * (loss_of(pruned, example) - loss_of(model, example)).item()
        assert row.benefit == pytest.approx(expected, rel=1e-4, abs=1e-4)


@KINDS
def test_the_ledger_knows_what_they_cost(kind):
    _, example, _, pruner = started(kind, theta=1.0)
    given = tuple(example.values()) if isinstance(example, dict) else example
    rows = block_costs(pruner, given, repeats=1)
    assert [r.name for r in rows[:-1]] == pruner.names
    assert all(r.macs > 0 and r.seconds > 0 and r.params > 0 for r in rows)
    linear = sum(p.numel() for p in pruner.gates[pruner.names[0]].module.parameters() if p.ndim == 2)
    assert sum(r.macs for r in rows[:-1] if r.name.startswith("layers.0")) == linear


def test_another_way_of_calling_is_followed_as_well():
    model, _, _, pruner = started("masked", theta=1.0)
    pruner.gates["layers.0.up"].xi = False
    with_mask, without = model(INPUTS, MASK), model(INPUTS)
    pruned = copy.deepcopy(model)
    assert not torch.equal(with_mask, without)
    pruner.gates["layers.0.up"].xi = True
    plain = Net()
    plain.load_state_dict(model.state_dict())
    cut(plain, pruner.blocks["layers.0.up"])
    assert torch.equal(without, plain(INPUTS))
    assert torch.equal(with_mask, plain(INPUTS, MASK))
    del pruned


def test_a_call_that_needs_more_of_the_branch_than_its_sum_is_refused():
    model, _, _, pruner = started("masked", theta=1.0)
    layer, z = model.layers[0], torch.randn(8, WIDTH)
    pruner.gates["layers.0.mixer"].xi = False
    layer(z, mask=MASK)
    with pytest.raises(RuntimeError, match=r"Layer does not compute the sums"):
        layer(z, mask=MASK, weights=True)
    plain = Net()
    cut(plain, pruner.blocks["layers.0.mixer"])
    with pytest.raises(RuntimeError, match=r"Layer does not compute the sums"):
        plain.layers[0](z, mask=MASK, weights=True)


# -- what would be wrong --------------------------------------------------------------------------------


def made(forward: Any, **children: nn.Module) -> nn.Module:
    """A module of that forward in a network, with what is around it."""
    cls = type("Made", (nn.Module,), {"forward": forward})
    module = cls()
    for name, child in children.items():
        module.add_module(name, child)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), module, nn.Linear(WIDTH, WIDTH))


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def test_a_sum_in_the_branch_of_another_is_the_block():
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x + self.f(torch.tanh(x))
        z = x + self.g(torch.tanh(y))
        return z + self.h(torch.tanh(z))

    model = made(forward, f=line(), g=line(), h=line())
    found = find_blocks(model, X)
    assert [set(b.prunable(model[1])) for b in found] == [{"f.weight", "f.bias"}, {"h.weight", "h.bias"}]
    cut(model, found[0])
    x = model[0](X)
    z = x + model[1].g(torch.tanh(x))
    assert torch.equal(model(X), model[2](z + model[1].h(torch.tanh(z))))


def test_a_sum_is_known_by_its_branch_and_not_by_its_number():
    def forward(self: Any, x: Tensor, pos: Tensor | None = None) -> Tensor:
        if pos is not None:
            x = x + self.pos(pos)
        x = x + self.a(torch.tanh(x))
        return x + self.b(torch.tanh(x))

    model = made(forward, pos=line(), a=line(), b=line())[1]
    blocks = find_blocks(nn.ModuleList([model]))
    (strand,) = [b for b in blocks if b.name.endswith("a")]
    pruned = copy.deepcopy(model)
    cut(nn.ModuleList([pruned]), strand)
    x = X + model.pos(X)
    assert torch.equal(pruned(X, pos=X), x + model.b(torch.tanh(x)))


def test_numbers_that_a_module_holds_may_change():
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.scale * self.a(x)
        return x + self.b(x)

    model = made(forward, a=line(), b=line())
    model[1].scale = 1.0
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0, theta=1.0, example=X)
    for scale in (1.0, 3.0, 1.0):
        model[1].scale = plain[1].scale = scale
        assert torch.allclose(model.eval()(X), plain.eval()(X), atol=1e-6)


def test_one_and_true_are_two_constants():
    def forward(self: Any, x: Tensor, k: Any = None) -> Tensor:
        x = x + self.a(x) * (100.0 if k is True else 1.0)
        return x + self.b(x)

    model = made(forward, a=line(), b=line())[1]
    holder, plain = nn.ModuleList([model]), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Pruner(holder, optimizer, dataset_size=N, log_gamma=-1.0, theta=1.0)
    for k in (1, True, 1.0):
        assert torch.allclose(model.eval()(X, k=k), plain(X, k=k), rtol=1e-5)


IN_PLACE: dict[str, Any] = {
    "scaled": lambda self, x: (x + self.a(x)).mul_(2),
    "a multiple": lambda self, x: torch.add(self.a(x), x, alpha=3),
    "turned": lambda self, x: x.transpose(0, 1) + self.a(x),
    "twice": lambda self, x: (x + self.a(x)) + x,
    "rectified": lambda self, x: F.relu_(x + self.a(x)),
    "copied over": lambda self, x: (x + 1).copy_(self.a(x)),
    "written into": lambda self, x: torch.mul(x, self.a(x), out=(x + 1)),
    "in evaluation only": lambda self, x: self.a(x) if self.training else x + self.a(x),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_what_is_more_than_its_input_plus_something_is_no_whole(name):
    model = made(
        lambda self, x: IN_PLACE[name](self, x) if x.abs().max() > 0 else x, a=line()
    )  # nobody can follow it
    square = torch.randn(WIDTH, WIDTH)
    with torch.no_grad():
        assert find_blocks(model, square, whole=False) == []
        assert find_blocks(model, square, whole=True) == []


def test_work_in_place_on_a_view_or_on_the_input_is_refused():
    def through_a_view(self: Any, x: Tensor) -> Tensor:
        y = x + self.a(torch.tanh(x))
        z = y.view(-1, WIDTH).mul_(2)
        return z + self.b(torch.tanh(z))

    def on_the_input(self: Any, x: Tensor) -> Tensor:
        x += self.a(torch.tanh(x))
        return x + self.b(x)

    for forward in (through_a_view, on_the_input):
        found = survey(made(forward, a=line(), b=line()), X)
        assert not [b for b in found.blocks if "a.weight" in b.prunable(made(forward, a=line(), b=line())[1])]


def test_a_child_that_is_needed_elsewhere_too_is_not_taken_apart():
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.a(x)
        return (x + self.b(x)) * self.a[0].weight.mean()

    model = made(forward, a=nn.Sequential(line(), nn.Tanh(), line()), b=line())
    found = survey(model, X)
    assert [b.name for b in found.blocks] == ["1.b"]
    assert set(found.blocks[0].prunable(model[1])) == {"b.weight", "b.bias"}
    assert "of its other sums: its branch shares a" in found.rejected["1"]


def test_the_estimate_of_a_child_that_is_called_otherwise_than_by_default():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.o = line(), line()

        def forward(self, x: Tensor, mix: bool = False) -> Tensor:
            return torch.tanh(self.v(x)) * self.o(x) if mix else self.v(x)

    model = made(lambda self, x: x + self.att(x, mix=True), att=Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0, theta=1.0, example=X)
    model(X).square().mean().backward()
    (gate,) = pruner.gates.values()
    model.eval()
    ends = []
    for rate in (0.99, 1.01):
        gate.rate = rate
        ends.append(model(X).square().mean().item())
    assert gate.worth.item() == pytest.approx((ends[1] - ends[0]) / 0.02, rel=1e-2)


def test_finding_leaves_buffers_alone():
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.a(x)

    model = made(forward, a=line())
    model[1].register_buffer("count", torch.zeros(()))
    find_blocks(model, X)
    assert model[1].count == 0


@KINDS
def test_a_pickled_gated_model_runs(kind):
    model, example, _, _ = started(kind, theta=0.5)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.allclose(run_example(twin.eval(), example), run_example(model.eval(), example), atol=1e-6)
    run_example(twin.train(), example)


@KINDS
def test_compiled_blocks_compute_the_same(kind):
    model, example, optimizer, pruner = started(kind, theta=0.5)
    twin, _, twin_optimizer, twin_pruner = started(kind, theta=0.5)
    pruner.compile(backend="eager")
    train(model, example, optimizer, pruner, 4)
    train(twin, example, twin_optimizer, twin_pruner, 4)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("norm_first", [True, False])
def test_pytorchs_own_encoder_layer_is_two_blocks(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first)
    model, z = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, WIDTH)
    padding = torch.arange(15).reshape(3, 5) % 4 == 3
    example = {"src": z, "src_key_padding_mask": padding}
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-5.0, theta=1.0, example=example)
    assert pruner.names == [f"layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "linear1")]
    assert torch.equal(model(**example), plain(**example))
    pruner.gates["layers.0.self_attn"].xi = False
    x = z if norm_first else plain.layers[0].norm1(z)
    first = plain.layers[0]
    fed = x + first._ff_block(first.norm2(x)) if norm_first else first.norm2(x + first._ff_block(x))
    expected = plain.layers[1](fed, src_key_padding_mask=torch.zeros(3, 5).masked_fill(padding, -torch.inf))
    assert torch.equal(model(**example), expected)


@KINDS
def test_a_pruned_model_comes_back_into_its_own_class(kind, tmp_path):
    model, example, optimizer, pruner = started(kind, theta=0.5, theta_lr=0.05, log_gamma=-60.0)
    train(model, example, optimizer, pruner, 30)
    pruner.finalize()
    net = pruner.finish().eval()
    removed = [event.block for event in pruner.events]
    assert removed
    shallower.save(tmp_path, net, network="mine", options={}, removed=removed)
    again = shallower.load(tmp_path, build=EXAMPLES[kind][0], example=example)
    assert torch.equal(run_example(again, example), run_example(net, example))
    assert isinstance(again, type(net))
    untouched = EXAMPLES[kind][0]()
    with pytest.raises(ValueError, match=r"removes \['nowhere'\]"):
        shallower.apply_structure(untouched, {"removed": [removed[0], "nowhere"]}, example=example)
    assert count_parameters(untouched) > count_parameters(net)


def test_a_model_of_ones_own_keeps_its_list_of_layers_though_it_has_a_configuration():
    """Its forward may know the layers by their places."""

    class Counted(Net):
        def __init__(self) -> None:
            super().__init__(3)
            self.config = SimpleNamespace(num_layers=3)
            self.scales = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                x = layer(x)[0] * self.scales[i]
            return self.last(x)

    torch.manual_seed(0)
    model = Counted()
    gone = [b.name for b in find_blocks(model, (INPUTS,)) if b.path == "layers.0"]
    mute = copy.deepcopy(model)
    for name in ("mixer.out", "down"):
        for parameter in mute.layers[0].get_submodule(name).parameters():
            nn.init.zeros_(parameter)
    net = shallower.apply_structure(model, {"removed": gone}, example=(INPUTS,))
    assert (len(net.layers), net.config.num_layers) == (3, 3)
    assert torch.allclose(net(INPUTS), mute(INPUTS), atol=1e-6)
