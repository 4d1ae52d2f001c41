"""The gate: two networks in one module, and what each costs."""

import copy
import io
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shallower import Residual, split
from shallower.gate import GATE, Gate, attach, detach, retire
from shallower.watch import inner


class Double(nn.Module):
    """branch(z) = w z with w = 2, so every expected value can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.runs: list[bool] = []

    def forward(self, z: Tensor) -> Tensor:
        self.runs.append(torch.is_grad_enabled())
        return self.w * z


def gated(module: nn.Module, *, xi: bool = True, theta: float = 0.75) -> Gate:
    gate = attach(module, split(module, name="block"), theta)
    gate.xi = xi
    return gate


def worth(module: nn.Module, gate: Gate, z: Tensor) -> Tensor:
    """Of the loss sum(z_next)."""
    gate.reader.clear()
    module(z).sum().backward()
    assert gate.worth is not None
    return gate.worth


def bottleneck(**options: nn.Module) -> Residual:
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return Residual(branch, **options)


def test_an_open_gate_is_the_module_itself():
    module, z = bottleneck(tail=nn.ReLU()), torch.randn(2, 4, 5, 5)
    expected = copy.deepcopy(module)(z)
    gated(module)
    assert torch.equal(module(z), expected)


def test_a_closed_gate_is_tail_of_skip():
    module, z = Residual(Double(), skip=nn.Linear(3, 3), tail=nn.ReLU()), torch.randn(2, 3)
    gated(module, xi=False)
    assert torch.equal(module(z), torch.relu(module.skip(z)))


def test_evaluation_runs_the_mean_network():
    module = Residual(Double()).eval()
    gated(module, theta=0.25)
    assert_close(module(torch.tensor([4.0])), torch.tensor([4.0 + 0.25 * 8.0]))


@pytest.mark.parametrize("xi", [True, False])
def test_the_estimate_is_gradient_times_branch_open_or_closed(xi):
    """loss = z + xi * 2 z, so loss(1) - loss(0) = 2 z."""
    module = Residual(Double())
    gate = gated(module, xi=xi)
    assert_close(worth(module, gate, torch.tensor([3.0, 1.0])), torch.tensor(8.0))


@pytest.mark.parametrize(
    "last",
    [
        nn.Linear(5, 3),
        nn.Linear(5, 3, bias=False),
        nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)),
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Linear(5, 3), nn.Identity()),
        nn.Sequential(nn.Linear(5, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(), nn.MaxPool1d(2)),
    ],
)
def test_the_free_estimate_equals_the_dot_product(last):
    """Euler's identity: sum(p.grad * p) over the last affine map is <dloss/dbranch, branch>."""
    torch.manual_seed(1)
    module = Residual(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), last), skip=nn.Linear(3, 3), tail=nn.Tanh())
    for p in module.parameters():
        nn.init.normal_(p)
    gate, z = gated(module), torch.randn(7, 3)
    assert gate.reader.last
    free = worth(module, gate, z)
    gate.reader.release()
    gate.reader.last = []
    watched = worth(module, gate, z)
    assert_close(free, watched)
    assert free.abs() > 1e-3


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_last_layer_is_watched_instead(frozen):
    module = Residual(nn.Linear(3, 3))
    getattr(module.branch, frozen).requires_grad_(False)
    gate, z = gated(module), torch.randn(2, 3)
    assert not gate.reader.last
    assert_close(worth(module, gate, z), module.branch(z).sum())


def test_a_convolution_ends_a_branch_as_well():
    module, z = bottleneck(), torch.randn(2, 4, 5, 5)
    gate = gated(module)
    assert gate.reader.last
    expected = copy.deepcopy(module.branch)(z).sum()  # the loss is the sum, so the gradient is one everywhere
    assert_close(worth(module, gate, z), expected, rtol=1e-4, atol=1e-4)


def test_a_closed_gate_runs_its_branch_forward_only_and_leaves_no_gradient():
    module = Residual(Double())
    gate = gated(module, xi=False)
    worth(module, gate, torch.tensor([3.0]))
    assert module.branch.runs == [False]
    assert module.branch.w.grad is None


def test_a_closed_gate_throws_the_same_dice_without_gradients_as_with_them():
    """The first pass of reentrant checkpointing is one without."""
    module = Residual(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    gated(module, xi=False)
    z, after = torch.ones(4, requires_grad=True), []
    for grad in (False, True):
        torch.manual_seed(0)
        with torch.set_grad_enabled(grad):
            module(z)
        after.append(torch.rand(3))
    assert torch.equal(*after)


def closed_at_once_and_later(module: nn.Module) -> list[tuple[nn.Module, Gate]]:
    """Two closed copies: one runs its branch in the forward pass, the other in the backward pass."""
    pairs = []
    for alias in (False, True):
        twin = copy.deepcopy(module)
        gate = attach(twin, split(twin, name="block"), 0.5, alias=alias)
        gate.xi = False
        assert gate.later() == alias
        pairs.append((twin, gate))
    return pairs


def with_autocast(module: nn.Module, z: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(z).square().sum()
    loss.backward()


def backward_with_autocast(module: nn.Module, z: Tensor) -> None:
    loss = module(z).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()


def evaluated_in_between(module: nn.Module, z: Tensor) -> None:
    loss = module(z).square().sum()
    module.eval()
    loss.backward()
    assert not any(m.training for m in module.modules())


def with_a_frozen_norm(module: nn.Module, z: Tensor) -> None:
    module.branch[1].eval()
    loss = module(z).square().sum()
    module.train()
    loss.backward()
    assert module.branch[1].training


def differentiated_twice(module: nn.Module, z: Tensor) -> None:
    (slope,) = torch.autograd.grad(module(z).square().sum(), z, create_graph=True)
    slope.square().sum().backward()


def for_an_input_alone(module: nn.Module, z: Tensor) -> None:
    torch.autograd.grad(module(z).square().sum(), z)


RUNS = [
    with_autocast,
    backward_with_autocast,
    evaluated_in_between,
    with_a_frozen_norm,
    differentiated_twice,
    for_an_input_alone,
]


@pytest.mark.parametrize("run", RUNS)
def test_a_branch_that_runs_later_is_worth_what_it_was_worth_then(run):
    z, found = torch.randn(3, 4, 5, 5), []
    for module, gate in closed_at_once_and_later(bottleneck()):
        before = copy.deepcopy(module.state_dict())
        run(module, z.clone().requires_grad_())
        found.append(gate.worth)
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    if run is for_an_input_alone:
        assert found == [None, None]
    else:
        assert found[0].abs() > 1e-3
        assert torch.equal(*found)


def test_a_closed_gate_keeps_nothing_of_its_branch_for_the_backward_pass():
    kept = []
    for module, _ in closed_at_once_and_later(bottleneck()):
        z, sizes = torch.randn(3, 4, 5, 5, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, z=z, sizes=sizes: sizes.append(t.data_ptr() != z.data_ptr()) or t, lambda t: t
        ):
            module(z)
        kept.append(sum(sizes))
    assert kept == [1, 0]


def test_dice_of_closed_branches_are_thrown_in_the_backward_pass_alone_also_in_the_first_step():
    """Or a resumed run, whose gates are new, would throw others than the run that went on."""
    module = Residual(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    gate, z, after = gated(module, xi=False), torch.ones(4, requires_grad=True), []
    for _ in range(2):
        torch.manual_seed(0)
        out = module(z)
        after.append(torch.rand(3))
        out.sum().backward()
        after.append(torch.rand(3))
    assert gate.later()
    assert torch.equal(after[0], after[2])
    assert torch.equal(after[1], after[3])


def test_a_branch_does_not_wait_if_anybody_could_see_that_it_ran_late():
    """Layers of the user's own, which may leave anything behind; hooks; weights that come and go."""
    own = gated(Residual(Double()), xi=False)
    assert not own.later()
    module = bottleneck()
    gate, heard = gated(module, xi=False), []
    assert gate.later()
    handle = module.branch[2].register_forward_hook(lambda *_: heard.append(torch.is_grad_enabled()))
    assert not gate.later()
    z = torch.randn(2, 4, 5, 5, requires_grad=True)
    module(z)
    assert heard == [False]
    handle.remove()
    assert gate.later()
    others = {name: 2 * p.detach() for name, p in module.named_parameters()}
    expected = copy.deepcopy(module)
    expected.load_state_dict(others, strict=False)
    torch.func.functional_call(module, others, (z,)).sum().backward()
    assert_close(gate.worth, worth(expected, vars(expected)[GATE], z))


def test_weights_that_change_before_the_backward_pass_are_an_error_as_for_open_blocks():
    module = bottleneck()
    gated(module, xi=False)
    loss = module(torch.randn(2, 4, 5, 5, requires_grad=True)).sum()
    with torch.no_grad():
        module.branch[0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        loss.backward()


def test_whoever_records_the_operators_of_a_forward_pass_finds_the_same_ones_again():
    """As selective checkpointing does: one more in the first pass, and each gets another's output."""

    def policy(ctx, op, *args, **kwargs):
        wanted = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    plain = nn.Sequential(nn.Linear(4, 4), Residual(branch, tail=nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 1))
    recorded, x = copy.deepcopy(plain), torch.randn(3, 4)
    gates = [gated(model[1], xi=False) for model in (plain, recorded)]
    plain(x).square().sum().backward()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(recorded, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    assert_close(gates[1].worth, gates[0].worth)


def test_no_gradient_comes_to_what_only_a_closed_branch_reads():
    """Not even a zero, with which an optimiser would decay it."""
    w, module = torch.ones(3, requires_grad=True), Residual(nn.Linear(3, 3), skip=Stopped())
    gate = gated(module, xi=False)
    assert gate.later()
    module(Copied.apply(w)).sum().backward()
    assert gate.worth is not None
    assert w.grad is None


class Stopped(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.detach()


class Copied(torch.autograd.Function):
    """Makes zeros of no gradient, as functions do that people write."""

    @staticmethod
    def forward(ctx, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def test_a_gate_whose_worth_nobody_reads_runs_nothing_when_closed_and_hooks_nothing():
    module = Residual(nn.Sequential(Double(), nn.Linear(1, 1)))
    gate = attach(module, split(module, name="block"), 0.5, watching=False)
    module(torch.ones(1, 1)).sum().backward()
    gate.xi = False
    module(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert module.branch[0].runs == [True]
    assert gate.worth is None
    assert all(p._backward_hooks is None for p in module.parameters())


def test_a_closed_gate_leaves_batch_statistics_untouched_and_an_open_one_does_not():
    module, z = bottleneck(), torch.randn(2, 4, 5, 5)
    before = copy.deepcopy(module.state_dict())
    gate = gated(module, xi=False)
    module(z).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.branch[1].track_running_stats
    gate.xi = True
    module(z)
    assert module.state_dict()["branch.1.num_batches_tracked"] == 1


def test_the_gradient_of_a_closed_gate_passes_unchanged():
    z = torch.randn(2, 3, requires_grad=True)
    module = Residual(nn.Linear(3, 3), tail=nn.Tanh())
    gated(module, xi=False)
    module(z).sum().backward()
    assert_close(z.grad, 1 - torch.tanh(z) ** 2)


def test_estimates_of_micro_batches_add_up():
    """Half the loss on each half of the batch: the same estimate as the whole."""
    module, z = bottleneck(), torch.randn(4, 4, 5, 5)
    module.branch[1].eval()
    for xi in (True, False):
        gate = gated(module, xi=xi)
        whole = worth(module, gate, z)
        gate.reader.clear()
        for half in z.chunk(2):
            module(half).sum().backward()
        assert_close(gate.worth, whole, rtol=1e-4, atol=1e-4)
        detach(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_converted_after_gating_is_estimated_in_single_precision_at_least(dtype):
    torch.manual_seed(0)
    module = Residual(nn.Linear(64, 64))
    gate = gated(module)
    module.to(dtype)
    module(torch.randn(32, 64, dtype=dtype)).square().mean().backward()
    by_hand = sum((p.grad.double() * p.detach().double()).sum() for p in module.branch.parameters())
    assert gate.worth.dtype == torch.promote_types(dtype, torch.float32)
    assert float(gate.worth) == pytest.approx(float(by_hand), rel=1e-5)


def test_clipping_after_the_backward_pass_does_not_reach_the_estimate():
    module, z = Residual(nn.Linear(3, 3)), torch.randn(2, 3)
    gate, expected = gated(module), module.branch(z).sum().detach()
    module(z).sum().backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-6)
    with torch.no_grad():
        module.branch.weight.zero_()
    assert_close(gate.worth, expected)


def test_a_tail_that_works_in_place_does_not_overwrite_the_input():
    module = Residual(nn.Linear(3, 3), tail=nn.ReLU(inplace=True))
    gated(module, xi=False)
    z = torch.tensor([[-1.0, 2.0, -3.0]])
    module(z).sum().backward()
    assert torch.equal(z, torch.tensor([[-1.0, 2.0, -3.0]]))


def test_gating_changes_no_name_and_detaching_leaves_no_trace():
    module = bottleneck(skip=nn.Conv2d(4, 4, 1))
    kind, attributes = type(module), set(vars(module))
    state, parameters = list(module.state_dict()), dict(module.named_parameters())
    gated(module)
    assert isinstance(module, kind)
    assert list(module.state_dict()) == state
    assert {n: id(p) for n, p in module.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    detach(module)
    assert type(module) is kind
    assert set(vars(module)) == attributes
    assert all(p._backward_hooks is None for p in module.parameters())
    assert all(p._post_accumulate_grad_hooks is None for p in module.parameters())


def test_a_users_hook_on_a_gated_parameter_outlives_the_gate():
    module = Residual(nn.Linear(4, 4))
    gated(module)
    weight, heard = module.branch.weight, []
    handle = weight.register_hook(heard.append)
    detach(module)
    module(torch.ones(1, 4)).sum().backward()
    assert len(heard) == 1
    handle.remove()
    module(torch.ones(1, 4)).sum().backward()
    assert len(heard) == 1


def test_gradients_that_somebody_asked_for_credit_nobody():
    """As torch.autograd.grad hands them out, to be logged; they run hooks on leaves, too."""
    module, z = Residual(nn.Linear(3, 3)), torch.randn(2, 3)
    for xi in (True, False):
        gate = gated(module, xi=xi)
        expected = worth(module, gate, z)
        gate.reader.clear()
        loss = module(z).sum()
        if xi:
            torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
            assert gate.worth is None
        loss.backward()
        assert_close(gate.worth, expected)
        detach(module)


def test_a_gradient_that_was_asked_for_is_not_credited_later():
    module, z = Residual(nn.Linear(3, 3)), torch.randn(2, 3)
    gate = gated(module)
    torch.autograd.grad(module(z).sum(), list(module.parameters()))
    gate.reader.clear()
    module.eval()(z).sum().backward()
    assert gate.worth is None


def test_theta_is_a_buffer_and_no_parameter():
    module = Residual(nn.Linear(3, 3))
    gated(module)
    assert [n for n, _ in module.named_buffers()] == ["shallower_theta"]
    assert all("theta" not in n for n, _ in module.named_parameters())
    assert all("theta" not in n for n in module.state_dict())


def test_plain_checkpoints_load_into_a_gated_module_and_back():
    plain, module = bottleneck(), bottleneck()
    gated(module)
    nn.init.ones_(plain.branch[0].weight)
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.branch[0].weight, plain.branch[0].weight)
    bottleneck().load_state_dict(module.state_dict())


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("training", [True, False])
def test_a_copy_of_a_gated_module_computes_the_same_and_stands_alone(way, training):
    module, z = bottleneck(tail=nn.ReLU()), torch.randn(2, 4, 5, 5)
    gated(module, xi=False, theta=0.3)
    module.train(training)
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        assert_close(other(z), module(z))
        nn.init.zeros_(other.branch[3].weight)
        assert module.branch[3].weight.any()


def test_a_child_that_is_exchanged_after_gating_counts():
    module = Residual(nn.Linear(3, 3)).eval()
    gated(module, theta=1.0)
    module.branch = nn.Identity()
    assert_close(module(torch.ones(1, 3)), 2 * torch.ones(1, 3))


def test_mixed_precision_keeps_the_type_and_the_estimate():
    module, z = Residual(nn.Linear(8, 8)), torch.randn(4, 8)
    gate = gated(module)
    exact = worth(module, gate, z)
    gate.reader.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(z).sum()
    loss.backward()
    assert_close(gate.worth, exact, rtol=0.05, atol=0.05)
    assert module.half().eval()(z.half()).dtype == torch.float16


def test_a_block_with_other_arguments_than_it_was_split_with_is_refused():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x + self.linear(x if mask is None else x * mask)

    module = Masked()
    gated(module, xi=False)
    z = torch.ones(1, 2)
    assert torch.equal(module(x=z), module(z))
    with pytest.raises(TypeError, match="a function of 'x' alone"):
        module(z, mask=torch.zeros(2))


def test_a_block_on_the_very_input_is_estimated_when_closed():
    """Nothing before the sum requires a gradient, yet the gradient must reach it."""
    module = Residual(nn.Linear(3, 3))
    gate = gated(module, xi=False)
    z = torch.randn(2, 3)
    module(z).sum().backward()
    assert_close(gate.worth, module.branch(z).sum())


def test_activation_checkpointing_sees_the_same_network_twice():
    from torch.utils.checkpoint import checkpoint

    module, z = bottleneck(), torch.randn(2, 4, 5, 5, requires_grad=True)
    for xi in (True, False):
        gate = gated(module, xi=xi)
        plain = worth(module, gate, z)
        gate.reader.clear()
        checkpoint(module, z, use_reentrant=False).sum().backward()
        assert_close(gate.worth, plain, rtol=1e-4, atol=1e-4)
        detach(module)


# -- where a wrong result would be silent ------------------------------------------------------------------


def test_a_block_may_subclass_sequential_or_loop_over_its_children():
    class Chained(nn.Sequential):
        def forward(self, z: Tensor) -> Tensor:
            return z + super().forward(z)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, z: Tensor) -> Tensor:
            out = z
            for child in self.children():
                out = child(out)
            return z + out

    for module in (Chained(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), Looped()):
        z = torch.randn(2, 3)
        expected, children = module(z), len(list(module.children()))
        gate = gated(module, theta=1.0)
        assert torch.equal(module(z), expected)
        assert len(list(module.children())) == children
        gate.xi = False
        assert torch.equal(module(z), z)
        assert_close(module.eval()(z), expected)


def test_a_last_layer_that_the_tail_uses_too_is_watched_instead():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

        def forward(self, z: Tensor) -> Tensor:
            return self.norm(z + self.norm(self.linear(z)))

    module, z = Shared(), torch.randn(4, 3)
    nn.init.normal_(module.norm.weight)
    gate = gated(module)
    xi = torch.ones((), requires_grad=True)
    module.norm(z + xi * module.norm(module.linear(z))).square().sum().backward()
    gate.reader.clear()
    module(z).square().sum().backward()
    assert_close(gate.worth, xi.grad)


@pytest.mark.parametrize("change", ["bias", "all", "norm"])
def test_freezing_or_reparametrising_after_gating_is_noticed(change):
    module, z = Residual(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))), torch.randn(4, 3)
    gate = gated(module)
    if change == "norm":
        nn.utils.parametrizations.weight_norm(module.branch[2])
    else:
        for p in [module.branch[2].bias] if change == "bias" else module.parameters():
            p.requires_grad_(False)
    assert_close(worth(module, gate, z), module.branch(z).sum().detach())


def test_a_backward_pass_for_an_input_alone_credits_nobody():
    """As an attack does it, or a saliency map."""
    module = Residual(nn.Linear(3, 3))
    for xi in (True, False):
        gate = gated(module, xi=xi)
        z = torch.randn(2, 3, requires_grad=True)
        torch.autograd.grad(module(z).sum(), z)
        assert gate.worth is None
        detach(module)


def test_a_graph_that_was_built_in_evaluation_credits_nobody():
    module, z = Residual(nn.Linear(3, 3)).eval(), torch.randn(2, 3)
    gate = gated(module)
    loss = module(z).sum()
    module.train()
    loss.backward()
    assert gate.worth is None


def test_a_number_that_changes_after_gating_is_refused_and_a_counter_is_not():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.alpha, self.calls = nn.Linear(3, 3), 0.1, 0

        def forward(self, z: Tensor) -> Tensor:
            self.calls += 1
            return z + self.alpha * self.linear(z)

    module, z = Scaled().eval(), torch.randn(2, 3)
    gated(module, theta=1.0)
    module.calls = 7
    assert_close(module(z), z + 0.1 * module.linear(z))
    module.alpha = 1.0
    with pytest.raises(RuntimeError, match="alpha had another value"):
        module(z)


def test_a_sum_that_broadcasts_is_refused_when_it_would_change_its_shape():
    module = Residual(nn.Linear(1, 8))
    gated(module, xi=False)
    for grad in (False, True):
        with pytest.raises(RuntimeError, match=r"gives \(3, 1\), its branch \(3, 8\)"):
            with torch.set_grad_enabled(grad):
                module(torch.randn(3, 1))


def test_half_precision_products_neither_overflow_nor_vanish():
    large = torch.full((8,), 3000.0, dtype=torch.float16), torch.full((8,), 30.0, dtype=torch.float16)
    small = torch.full((8,), 2e-5, dtype=torch.float16), torch.full((8,), 1e-3, dtype=torch.float16)
    assert_close(inner(*large), torch.tensor(720_000.0))
    assert inner(*small) > 1e-7


def test_other_statistics_than_batch_norms_stay_untouched_too():
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, z: Tensor) -> Tensor:
            self.mean.add_(z.detach().mean(0))
            return self.linear(z)

    module = Residual(Mine())
    gated(module, xi=False)
    module(torch.randn(4, 3)).sum().backward()
    assert torch.equal(module.branch.mean, torch.zeros(3))


def test_a_default_may_be_passed_explicitly():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return x + scale * self.linear(x)

    module, z = Masked(), torch.ones(1, 2)
    gated(module, xi=False)
    assert torch.equal(module(z, None, scale=1.0), z)


def test_a_block_that_was_split_by_hand_is_copied_as_it_was_and_not_pickled():
    module, z = Residual(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    found = split(module, name="block")
    block = replace(found, branch=found.skip, skip=found.branch)
    attach(module, block, 0.5).xi = False
    twin = copy.deepcopy(module)
    assert torch.equal(twin(z), module.branch(z))
    with pytest.raises(RuntimeError, match="split by hand"):
        pickle.loads(pickle.dumps(module))(z)


def test_a_module_that_was_removed_refuses_to_run():
    module = Residual(nn.Linear(3, 3))
    retire(module, "block")
    with pytest.raises(RuntimeError, match=r"'block' was removed.*nn\.ModuleList"):
        module(torch.ones(1, 3))


def test_an_inner_product_is_the_same_in_every_memory_format():
    torch.manual_seed(0)
    a, b = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    by_hand = sum(x * y for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True))
    formats = (torch.contiguous_format, torch.channels_last)
    for left in formats:
        for right in formats:
            mine, theirs = a.contiguous(memory_format=left), b.contiguous(memory_format=right)
            assert float(inner(mine, theirs)) == pytest.approx(by_hand, rel=1e-4)
            half = inner(mine.bfloat16(), theirs.bfloat16())
            assert float(half) == pytest.approx(by_hand, abs=0.1)
