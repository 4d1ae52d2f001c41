"""The controller: one step, removal while training goes on, every end."""

import copy
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import shallower
from shallower import Pruner, Removal, Residual, RobbinsMonro, flip, linear_ramp
from shallower.optim import ThetaAdam

N = 1000


def network(depth: int = 4, *, seed: int = 0, norm: bool = False, skip: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)

    def block() -> Residual:
        middle = [nn.BatchNorm1d(8)] if norm else []
        branch = nn.Sequential(nn.Linear(8, 8), *middle, nn.ReLU(), nn.Linear(8, 8))
        return Residual(branch, nn.Linear(8, 8, bias=False) if skip else None)

    return nn.Sequential(nn.Linear(4, 8), *(block() for _ in range(depth)), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """With decay on matrices only, so that a block is split over two groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def batch(step: int, n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(model: nn.Module, optimizer, pruner: Pruner, steps: range) -> list[Removal]:
    removals = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        closure = (lambda x=x, y=y: F.cross_entropy(model(x), y)) if pruner.estimator is flip else None
        removals += pruner.step(closure)
    return removals


def started(model: nn.Module | None = None, *, make=sgd, **options):
    model = network() if model is None else model
    optimizer = make(model)
    given = {"dataset_size": N, "log_gamma": -20.0, "theta_lr": 0.02, **options}
    return model, optimizer, Pruner(model, optimizer, **given)


# -- one step ------------------------------------------------------------------------------------------


def test_a_step_that_does_not_learn_draws_anew_and_leaves_the_rates_alone():
    model = network(depth=30)
    optimizer = sgd(model)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-100.0, theta=0.5, theta_lr=0.1)
    draws = []
    for at in range(3):
        x, y = batch(at)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert pruner.step(learn=False) == []
        draws.append([gate.xi for gate in pruner.gates.values()])
    assert set(pruner.thetas.values()) == {0.5}
    assert draws[0] != draws[1] != draws[2]
    assert not pruner.theta_optimizer.state
    assert pruner.num_steps == 3
    train(model, optimizer, pruner, range(3, 4))  # of its own backward pass alone
    assert set(pruner.thetas.values()) != {0.5}


@pytest.mark.parametrize("call", ["finalize", "finish"])
def test_a_network_of_which_nothing_was_learned_is_not_final(call):
    model = network()
    optimizer = sgd(model)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0)
    for at in range(60):
        F.cross_entropy(model(batch(at)[0]), batch(at)[1]).backward()
        optimizer.step()
        pruner.step(learn=False)
    assert not any(pruner.vitals.rows.values())  # no estimate, no evidence
    with pytest.raises(RuntimeError, match="after 60 steps of which none learned"):
        getattr(pruner, call)()


def test_a_step_that_does_not_learn_must_follow_the_optimisers_too():
    model = network()
    pruner = Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)
    with pytest.raises(RuntimeError, match=r"without an optimizer.step\(\)"):
        pruner.step(learn=False)


def test_a_scaler_that_is_switched_off_skips_no_step_either():
    model = network()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    pruner = Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0, grad_scaler=scaler)
    with pytest.raises(RuntimeError, match=r"without an optimizer.step\(\)"):
        pruner.step()


def test_theta_descends_n_times_the_difference_minus_log_gamma():
    """With plain gradient descent the step is lr * (N * dC - m * log_gamma), by hand."""

    def estimator(gates, closure):
        return [torch.tensor(0.1 * k) for k, _ in enumerate(gates)]

    _, optimizer, pruner = started(
        estimator=estimator,
        log_gamma=-5.0,
        dataset_size=100,
        theta_lr=1e-3,
        theta_optimizer=torch.optim.SGD,
        multipliers={"2": 3.0},
    )
    optimizer.step()
    pruner.step()
    steps = [1e-3 * (100 * 0.1 * k + 5.0 * (3.0 if k == 1 else 1.0)) for k in range(4)]
    assert_close(list(pruner.thetas.values()), [0.75 - s for s in steps])


def test_theta_is_projected_onto_zero_and_one():
    def estimator(gates, closure):
        return [torch.tensor(-1.0) if gate.name == "1" else torch.tensor(1.0) for gate in gates]

    _, optimizer, pruner = started(estimator=estimator, theta_lr=1.0, theta_optimizer=torch.optim.SGD)
    optimizer.step()
    removed = pruner.step()
    assert pruner.thetas == {"1": 1.0, "2": 0.0, "3": 0.0, "4": 0.0}
    assert removed == [Removal(1, "2", 0.0), Removal(1, "3", 0.0), Removal(1, "4", 0.0)] == pruner.events


def test_gates_know_their_rates_and_learn_on_after_a_change_of_type():
    """The rates themselves are the pruner's, in double precision: bfloat16 could not hold a step of theta."""
    model, optimizer, pruner = started(theta_lr=1e-6)
    model.bfloat16()
    x, y = batch(0)
    F.cross_entropy(model(x.bfloat16()), y).backward()
    optimizer.step()
    pruner.step()
    assert all(abs(rate - 0.75) == pytest.approx(1e-6, rel=1e-3) for rate in pruner.thetas.values())
    model.float().eval()
    model(x)
    for name, rate in pruner.thetas.items():
        assert_close(float(pruner.gates[name].theta), rate)


def test_draws_follow_theta():
    model, optimizer, pruner = started(theta=0.3, theta_lr=1e-9)
    drawn = []
    for step in range(300):
        train(model, optimizer, pruner, range(step, step + 1))
        drawn += [gate.xi for gate in pruner.gates.values()]
    assert abs(sum(drawn) / len(drawn) - 0.3) < 0.05


def test_the_seed_decides_the_draws():
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 7 * len(draws))  # the global generator has no say
        _, _, pruner = started(network(depth=30), seed=seed)
        draws.append([gate.xi for gate in pruner.gates.values()])
    assert draws[0] == draws[1] != draws[2]


def test_micro_batches_of_one_step_give_the_estimate_of_the_whole_batch():
    seen = []

    def spy(gates, closure):
        values = shallower.first_order(gates, closure)
        seen.append(values)
        return values

    x, y = batch(0)
    for parts in (1, 4):
        model, optimizer, pruner = started(estimator=spy)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(xs), ys) / parts).backward()
        optimizer.step()
        pruner.step()
    assert_close(seen[0], seen[1])


def test_a_grad_scaler_changes_no_estimate_and_an_overflow_moves_nothing(monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", None)  # it waits for the device
    thetas = []
    x, y = batch(0)
    for scaled in (False, True):
        model = network()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        options = {"grad_scaler": scaler} if scaled else {}
        pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-20.0, theta_lr=0.02, **options)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update(512.0 if scaled else None)
        pruner.step()
        thetas.append(pruner.thetas)
    assert_close(thetas[0], thetas[1])
    optimizer.zero_grad()
    (scaler.scale(F.cross_entropy(model(x), y)) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    pruner.step()
    assert pruner.thetas == thetas[1]
    assert pruner.num_steps == 2


def test_decay_and_momentum_act_on_a_closed_block():
    model, optimizer, pruner = started(theta_lr=1e-9)
    for gate in pruner.gates.values():
        gate.xi = False
    weight = model[1].branch[0].weight
    before = weight.detach().clone()
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    assert weight.grad is None
    optimizer.step()
    assert_close(weight.detach(), before - 0.05 * 1e-3 * before)


def test_a_ramp_is_read_at_the_step():
    seen = []

    def spy(step: int) -> float:
        seen.append(step)
        return linear_ramp(-10.0, steps=5)(step)

    model, optimizer, pruner = started(log_gamma=spy)
    train(model, optimizer, pruner, range(3))
    assert seen == [0, 1, 2]


def test_robbins_monro_learns_theta():
    model, optimizer, pruner = started(theta_optimizer=RobbinsMonro, theta_lr=1e-3, log_gamma=-50.0)
    train(model, optimizer, pruner, range(20))
    assert max(pruner.thetas.values()) < 0.75


# -- removal -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(1, 4),
    dead=st.sets(st.integers(1, 4)),
    make=st.sampled_from([sgd, adamw]),
    norm=st.booleans(),
    skip=st.booleans(),
)
def test_removal_is_the_closed_gate_to_the_bit_and_leaves_survivors_alone(depth, dead, make, norm, skip):
    model, optimizer, pruner = started(network(depth, norm=norm, skip=skip), make=make, theta_lr=1e-6)
    train(model, optimizer, pruner, range(3))
    gone = [name for name in pruner.names if int(name) in dead]
    for name, gate in pruner.gates.items():
        gate.xi = name not in gone
    x, _ = batch(9)
    frozen = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    states = {n: copy.deepcopy(optimizer.state[p]) for n, p in parameters.items()}
    with torch.no_grad():
        expected = model(x)
    model.load_state_dict(frozen.state_dict())  # the forward pass above moved the statistics

    for name in gone:
        pruner._cut(name)

    with torch.no_grad():
        assert torch.equal(model(x), expected)
    alive = dict(model.named_parameters())
    assert all(not n.startswith(f"{name}.branch") for n in alive for name in gone)
    assert {n: id(p) for n, p in alive.items()} == {n: id(parameters[n]) for n in alive}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in alive.values()} == {id(p) for p in optimizer.state}
    for name, parameter in alive.items():
        for key, value in states[name].items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameter][key]), torch.as_tensor(value))


def test_training_goes_on_when_every_block_is_gone():
    model, optimizer, pruner = started(log_gamma=-1e6, theta_lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    removed = train(model, optimizer, pruner, range(30))
    scheduler.step()
    assert [event.block for event in removed] == pruner.names
    assert pruner.alive == []
    before = model[0].weight.detach().clone()
    train(model, optimizer, pruner, range(30, 33))
    assert not torch.equal(model[0].weight, before)
    pruner.finalize()
    net = pruner.finish()
    assert [type(m) for m in net] == [nn.Linear, *[nn.Identity] * 4, nn.Linear]


def test_a_removed_block_never_comes_back():
    model, optimizer, pruner = started(log_gamma=-20.0, multipliers={"1": 1e4}, theta_lr=0.1)
    train(model, optimizer, pruner, range(40))
    assert "1" not in pruner.alive
    assert pruner.thetas["1"] == 0.0


def test_a_user_holding_the_whole_network_sees_the_same_object():
    model, optimizer, pruner = started(log_gamma=-1e6, theta_lr=0.2)
    train(model, optimizer, pruner, range(10))
    pruner.finalize()
    assert pruner.finish() is model


# -- the end -------------------------------------------------------------------------------------------


def test_finalize_rounds_rates_and_takes_the_gates_off():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(1))
    pruner.theta.copy_(torch.tensor([0.05, 0.1, 0.5, 0.99]))
    kind = type(network()[1])
    events = pruner.finalize(threshold=0.1)
    assert [(e.block, round(e.theta, 6)) for e in events] == [("1", 0.05)]
    assert pruner.thetas == {"1": 0.0, "2": 1.0, "3": 1.0, "4": 1.0}
    assert [type(m) for m in model][1:5] == [nn.Identity, kind, kind, kind]
    assert all(p._backward_hooks is None for p in model.parameters())  # an empty list of them is called, too
    train(model, optimizer, pruner, range(1, 4))  # fine-tuning with the same loop
    assert pruner.thetas == {"1": 0.0, "2": 1.0, "3": 1.0, "4": 1.0}
    assert pruner.finalize() == []


def test_the_finished_network_is_plain():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(2))
    pruner.finalize()
    net = pruner.finish()
    assert not any("shallower_gate" in name or "Gated" in type(m).__name__ for name, m in net.named_modules())
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(RuntimeError, match="build a new Pruner"):
        pruner.step()


def test_finish_absorbs_and_reports():
    model, optimizer, pruner = started(network(skip=True))
    train(model, optimizer, pruner, range(2))
    pruner.theta.copy_(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    pruner.finalize()
    x, _ = batch(3)
    model.eval()
    before = model(x)
    net = pruner.finish()
    assert_close(net(x), before, rtol=1e-5, atol=1e-6)
    assert set(pruner.absorption.folded) == {"1", "3"}
    assert not pruner.absorption.kept


def test_a_new_pruner_can_take_over_a_finished_network():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(2))
    pruner.finalize()
    net = pruner.finish()
    second = Pruner(net, optimizer, dataset_size=N, log_gamma=-1.0)
    train(net, optimizer, second, range(2, 4))
    assert second.num_steps == 2


# -- every wrong end -----------------------------------------------------------------------------------


def snapshot(model: nn.Module, optimizer) -> tuple:
    types = [type(m) for m in model.modules()]
    groups = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
    return types, groups, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_size": None}, r"dataset_size=len\(loader.dataset\)"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"log_gamma": 250}, "must be negative"),
        ({"log_gamma": 0}, "must be negative"),
        ({"log_gamma": None}, "give one"),
        ({"price": 0.1}, "both of log_gamma and price"),
        ({"theta": 0.0}, "0 <= tolerance < theta <= 1"),
        ({"theta": 1.5}, "0 <= tolerance < theta <= 1"),
        ({"tolerance": 0.9}, "0 <= tolerance < theta <= 1"),
        ({"blocks": ["9"]}, "'9' cannot be gated"),
        ({"blocks": []}, "no residual block"),
        ({"blocks": lambda model: []}, "no residual block"),
        ({"multipliers": {"nine": 2.0}}, "no gated blocks"),
        ({"theta_lr": -1.0}, "learning rate"),
    ],
)
def test_a_wrong_option_is_refused_and_the_model_left_as_it_was(options, message):
    model = network()
    optimizer = sgd(model)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        Pruner(model, optimizer, **{"dataset_size": N, "log_gamma": -20.0, **options})
    after = snapshot(model, optimizer)
    assert before[:2] == after[:2]
    assert all(torch.equal(before[2][k], v) for k, v in after[2].items())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_network_without_residual_blocks_is_refused_with_the_way_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"shallower\.Residual\(branch, skip, tail\)"):
        Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)


def test_a_block_that_changes_shape_without_a_skip_is_no_block():
    class Widen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)

        def forward(self, z: Tensor) -> Tensor:
            return self.linear(z)

    model = nn.Sequential(Widen(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="no residual block"):
        Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)


def test_near_misses_are_named_with_what_to_do():
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, z: Tensor) -> Tensor:
            z += self.linear(z)
            return z

    model = nn.Sequential(Growing(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"0: its sum overwrites its input in place; write `x = x"):
        Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)
    model.append(Residual(nn.Linear(3, 3)))
    pruner = Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)
    assert list(pruner.rejected) == ["0"]


def test_parameters_that_the_optimizer_does_not_know_are_named():
    model = network()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "2.branch.0.weight"], lr=0.1)
    with pytest.raises(ValueError, match=r"2\.branch\.0\.weight.*model\.parameters\(\)"):
        Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0)


def test_frozen_blocks_need_no_optimizer():
    model = network()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0)
    train(model, optimizer, pruner, range(5))
    assert pruner.num_steps == 5


def test_gating_twice_is_refused():
    model, optimizer, _ = started()
    with pytest.raises(ValueError, match="gated already"):
        Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0)


def test_a_step_without_an_optimizer_step_is_refused():
    _, _, pruner = started()
    with pytest.raises(RuntimeError, match=r"once after each optimizer\.step\(\)"):
        pruner.step()


def test_a_step_without_a_backward_pass_is_refused_and_moves_nothing():
    _, optimizer, pruner = started()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"loss\.backward\(\)"):
        pruner.step()
    assert set(pruner.thetas.values()) == {0.75}
    assert pruner.num_steps == 0


@pytest.mark.parametrize("call", ["finish", "finalize"])
def test_an_end_before_any_step_is_refused(call):
    _, _, pruner = started()
    with pytest.raises(RuntimeError, match=rf"pruner\.{call}\(\) was called before any pruner\.step"):
        getattr(pruner, call)()


def test_finish_of_a_random_network_is_refused():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(1))
    with pytest.raises(RuntimeError, match=r"pruner\.finalize\(\)"):
        pruner.finish()


def test_a_threshold_outside_zero_and_one_is_refused():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(1))
    with pytest.raises(ValueError, match="threshold=2"):
        pruner.finalize(threshold=2)


def test_a_loss_of_nan_stops_before_theta_moves():
    model, optimizer, pruner = started()
    train(model, optimizer, pruner, range(2))
    before, moments = pruner.thetas, copy.deepcopy(pruner.theta_optimizer.state_dict()["state"])
    x, y = batch(2)
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * float("nan")).backward()
    optimizer.step()
    with pytest.raises(FloatingPointError, match="At step 2"):
        pruner.step()
    assert pruner.thetas == before
    assert all(
        torch.equal(moments[0][k], v) for k, v in pruner.theta_optimizer.state_dict()["state"][0].items()
    )


def test_a_schedule_that_turns_positive_is_refused():
    model, optimizer, pruner = started(log_gamma=lambda step: float(step - 1))
    train(model, optimizer, pruner, range(2))
    with pytest.raises(ValueError, match=r"log_gamma=1\.0 at step 2"):
        train(model, optimizer, pruner, range(2, 3))


def test_an_estimator_of_the_wrong_length_is_refused():
    _, optimizer, pruner = started(estimator=lambda gates, closure: [torch.zeros(())])
    optimizer.step()
    with pytest.raises(ValueError, match=r"shape \(1,\) for 4 gates"):
        pruner.step()


# -- state ---------------------------------------------------------------------------------------------


def saved(model: nn.Module, optimizer, pruner: Pruner) -> io.BytesIO:
    file = io.BytesIO()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
    torch.save(states, file)
    file.seek(0)
    return file


def resumed(file: io.BytesIO, make, **options):
    model, optimizer, pruner = started(network(seed=99, norm=True), make=make, **options)
    states = torch.load(file, weights_only=True)
    pruner.load_state_dict(states["pruner"])
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    return model, optimizer, pruner


@settings(max_examples=12, deadline=None)
@given(
    stop=st.integers(1, 39),
    make=st.sampled_from([sgd, adamw]),
    estimator=st.sampled_from([shallower.first_order, flip]),
    theta_optimizer=st.sampled_from([ThetaAdam, torch.optim.Adam, RobbinsMonro]),
)
def test_a_resumed_run_equals_one_that_never_stopped_bit_for_bit(stop, make, estimator, theta_optimizer):
    lr = 1e-3 if theta_optimizer is RobbinsMonro else 0.05
    options = {
        "estimator": estimator,
        "theta_optimizer": theta_optimizer,
        "theta_lr": lr,
        "log_gamma": linear_ramp(-200.0, steps=20),
    }
    model, optimizer, pruner = started(network(norm=True), make=make, **options)
    train(model, optimizer, pruner, range(stop))
    file = saved(model, optimizer, pruner)
    train(model, optimizer, pruner, range(stop, 40))
    pruner.finalize(0.5)
    train(model, optimizer, pruner, range(40, 43))

    model2, optimizer2, pruner2 = resumed(file, make, **options)
    train(model2, optimizer2, pruner2, range(stop, 40))
    pruner2.finalize(0.5)
    train(model2, optimizer2, pruner2, range(40, 43))

    assert pruner2.thetas == pruner.thetas
    assert pruner2.events == pruner.events
    assert pruner.events
    state, state2 = model.state_dict(), model2.state_dict()
    assert list(state) == list(state2)
    assert all(torch.equal(state[k], state2[k]) for k in state)


def test_a_finalised_run_resumes_without_gates():
    model, optimizer, pruner = started(network(norm=True))
    train(model, optimizer, pruner, range(3))
    pruner.theta[1] = 0.0
    pruner.finalize()
    model2, optimizer2, pruner2 = resumed(saved(model, optimizer, pruner), sgd)
    assert [str(type(m)) for m in model2] == [str(type(m)) for m in model]
    train(model, optimizer, pruner, range(3, 6))
    train(model2, optimizer2, pruner2, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters(), strict=True))


def test_the_public_names_are_these():
    assert shallower.__all__ == sorted(shallower.__all__)
    assert all(hasattr(shallower, name) for name in shallower.__all__)
    assert set(shallower.__all__) == {
        *("Absorption", "Block", "ChannelCopy", "Gate", "NotResidual", "Pruner", "Removal", "Residual"),
        *(
            "RobbinsMonro",
            "ZeroPad",
            "absorb",
            "at_the_sum",
            "constant",
            "find_blocks",
            "first_order",
            "flip",
        ),
        *("Certificate", "certify", "forget", "linear_ramp", "load", "split", "survey"),
        *("Inspection", "apply_structure", "inspect_model", "save"),
        *("BlockCost", "Ledger", "Worth", "block_costs", "count_macs", "count_parameters", "worth"),
    }


# -- what a user's loop may do ---------------------------------------------------------------------------


class InPlace(nn.Module):
    """Works in place on what a block returned, and reads the block's input again."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kept = nn.Identity() if how == "input" else nn.Tanh()  # a tanh needs its output for the backward pass
        self.how, self.stem, self.out = how, nn.Sequential(nn.Linear(4, 8), kept), nn.Linear(8, 3)
        self.block = Residual(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        h = self.block(a)
        if self.how == "add":
            h += 1
        elif self.how == "relu":
            h = self.relu(h)
        elif self.how == "view":
            h.view(-1, 8).mul_(2)
        elif self.how == "input":
            a.add_(1)
        return self.out(h + a if self.how != "relu" else h)


@pytest.mark.parametrize("how", ["add", "relu", "view", "input", "none"])
def test_a_neighbour_that_works_in_place_does_not_reach_through_a_closed_or_removed_block(how):
    """Against the same network written out of place, with the block's output in memory of its own."""
    model, x = InPlace(how=how), batch(0)[0]
    optimizer = sgd(model)
    a = model.stem(x).detach()
    expected = {
        "add": (a + 1) + a,
        "relu": torch.relu(a),
        "view": 2 * a + a,
        "input": a + (a + 1),
        "none": 2 * a,
    }[how]
    expected = model.out(expected).detach()
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0, theta_lr=1e-6)
    pruner.gates["block"].xi = False
    out = model(x)
    assert_close(out.detach(), expected)
    out.sum().backward()
    with torch.no_grad():
        assert_close(model(x), expected)
    pruner._cut("block")
    assert_close(model(x).detach(), expected)
    model(x).sum().backward()
    assert (type(model.block) is nn.Identity) == (how == "none")


def test_flip_is_not_disturbed_by_neighbours_that_work_in_place():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Residual(nn.Linear(4, 4)), Residual(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h += 1
            return self.b(h)

    model, x = Shifted(), batch(0)[0]
    optimizer = sgd(model)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-1.0, estimator=flip)
    for gate in pruner.gates.values():
        gate.xi = True
    found = flip(list(pruner.gates.values()), lambda: model(x).square().mean())
    with torch.no_grad():
        h = x + model.a.branch(x) + 1
        on = (h + model.b.branch(h)).square().mean()
        assert_close(found[1], on - h.square().mean())
        off = x + 1
        assert_close(found[0], on - (off + model.b.branch(off)).square().mean())


def test_flip_sees_the_weights_that_the_gradient_was_taken_at():
    """Evaluated behind the step on the very batch that was stepped on, it would be biased."""
    model, optimizer, pruner = started(estimator=flip, theta_lr=1e-3)
    for gate in pruner.gates.values():
        gate.xi = True
    x, y = batch(0)

    def closure() -> Tensor:
        return F.cross_entropy(model(x), y)

    before = flip(list(pruner.gates.values()), closure)
    seen = []
    pruner.estimator = lambda gates, closure: seen.extend(flip(gates, closure)) or seen
    pruner.estimator.needs_loss = True
    closure().backward()
    optimizer.step()
    moved = [p.detach().clone() for p in model.parameters()]
    pruner.step(closure)
    assert_close(seen, before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), moved, strict=True))
    assert not torch.equal(flip(list(pruner.gates.values()), closure)[0], before[0])


def test_flip_leaves_the_running_statistics_of_the_whole_network_alone():
    model, optimizer, pruner = started(network(norm=True), estimator=flip)
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
    pruner.step(lambda: F.cross_entropy(model(x), y))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if k in before)


def test_an_optimizer_that_runs_a_closure_decays_closed_blocks_too():
    model, optimizer, pruner = started(theta_lr=1e-9)
    for gate in pruner.gates.values():
        gate.xi = False
    weight = model[1].branch[0].weight
    before = weight.detach().clone()
    x, y = batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_close(weight.detach(), before - 0.05 * 1e-3 * before)
    pruner.step()


def test_a_penalty_in_the_loss_is_kept_out_by_at_the_sum():
    x, y = batch(0)
    worths = {}
    for penalty in (0.0, 1.0):
        for estimator in (shallower.first_order, shallower.at_the_sum):
            model, _, pruner = started(estimator=estimator)
            for gate in pruner.gates.values():
                gate.xi = True
            weights = sum(p.square().sum() for p in model.parameters())
            (F.cross_entropy(model(x), y) + penalty * weights).backward()
            worths[penalty, estimator] = torch.stack([g.worth for g in pruner.gates.values()])
    plain = worths[0.0, shallower.first_order]
    assert_close(worths[0.0, shallower.at_the_sum], plain, rtol=1e-4, atol=1e-5)
    assert_close(worths[1.0, shallower.at_the_sum], plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(worths[1.0, shallower.first_order], plain)


def test_a_batch_that_is_thrown_away_can_be_discarded():
    model, optimizer, pruner = started()
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    once = [gate.worth for gate in pruner.gates.values()]
    optimizer.zero_grad()
    pruner.discard()
    assert all(gate.worth is None for gate in pruner.gates.values())
    F.cross_entropy(model(x), y).backward()
    assert_close([gate.worth for gate in pruner.gates.values()], once)


def scaled_backward(model: nn.Module, pruner: Pruner) -> torch.amp.GradScaler:
    """A backward pass with every gate open, under a scaler that nobody told the pruner of."""
    for gate in pruner.gates.values():
        gate.xi = True
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch(0)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    return scaler


def test_a_grad_scaler_that_the_pruner_does_not_know_is_noticed():
    model, optimizer, pruner = started()
    scaler = scaled_backward(model, pruner)
    with pytest.raises(RuntimeError, match=r"65536 times smaller.*grad_scaler=scaler"):
        scaler.step(optimizer)


def test_a_grad_scaler_that_steps_a_fused_optimizer_is_noticed():
    """It leaves the gradients as they are, so nothing between backward pass and step tells of it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-20.0)
    scaler = scaled_backward(model, pruner)
    with pytest.raises(RuntimeError, match=r"stepped by a GradScaler.*grad_scaler=scaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    pruner.discard()
    assert train(model, optimizer, pruner, range(1)) == []  # without it all is well


def test_a_grad_scaler_behind_which_gradients_are_clipped_is_asked_about():
    model, optimizer, pruner = started()
    scaler = scaled_backward(model, pruner)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match=r"times smaller. If a GradScaler.*grad_scaler=scaler"):
        scaler.step(optimizer)


def test_clipping_is_not_taken_for_a_scaler():
    model, optimizer, pruner = started()
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    pruner.step()
    assert pruner.num_steps == 1


def test_hooks_that_were_there_before_change_no_estimate():
    """A hook that clips the gradients of a parameter comes before the reader, which must not believe it."""
    found = []
    for clipped in (False, True):
        model = network()
        if clipped:
            for p in model.parameters():
                p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        pruner = Pruner(model, sgd(model), dataset_size=N, log_gamma=-20.0, theta=1.0, theta_lr=1e-9)
        x, y = batch(0)
        F.cross_entropy(model(x), y).backward()
        found.append([gate.worth for gate in pruner.gates.values()])
    assert_close(found[0], found[1])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_overflow_beside_the_gates_moves_no_rate_fused_or_not(kind):
    """A fused optimiser is stepped all the same and does nothing by itself; the estimates are finite."""
    thetas = []
    for fused in (False, True):
        model = network()
        of = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
        optimizer = of(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-20.0, theta_lr=0.02, grad_scaler=scaler)
        model[0].weight.register_hook(lambda g: g * float("inf"))  # below the blocks
        weight, before = model[0].weight.detach().clone(), pruner.thetas
        x, y = batch(0)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        pruner.step()
        assert torch.equal(model[0].weight, weight)
        assert pruner.thetas == before
        thetas.append(pruner.thetas)
    assert thetas[0] == thetas[1]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_under_a_scaler_skips_the_rates_and_training_goes_on(fused):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    pruner = Pruner(model, optimizer, dataset_size=N, log_gamma=-20.0, theta_lr=0.02, grad_scaler=scaler)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        x, y = batch(step)
        before = pruner.thetas
        optimizer.zero_grad()
        (scaler.scale(F.cross_entropy(model(x), y)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        pruner.step()
        assert (pruner.thetas == before) == (factor != 1.0)


def test_the_scale_of_each_step_is_the_one_that_counts():
    thetas = []
    for scaled in (False, True):
        model = network()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        options = {"grad_scaler": scaler} if scaled else {}
        given = {"dataset_size": N, "log_gamma": -20.0, "theta_lr": 1e-5, "theta_optimizer": torch.optim.SGD}
        pruner = Pruner(model, optimizer, **given, **options)
        for step in range(2):
            x, y = batch(step)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update(1024.0 if scaled else None)  # from here on
            pruner.step()
        thetas.append(list(pruner.thetas.values()))
    assert_close(thetas[0], thetas[1], rtol=1e-5, atol=1e-7)


def test_a_rate_at_the_tolerance_is_dead_and_one_above_is_not():
    _, optimizer, pruner = started(
        estimator=lambda gates, closure: [0.0] * len(gates), log_gamma=lambda step: 0.0
    )
    pruner.theta.copy_(torch.tensor([0.01, 0.011, 0.5, 0.9]))
    optimizer.step()
    assert [event.block for event in pruner.step()] == ["1"]


def test_a_removed_block_changes_no_draw_of_the_others_and_its_rate_stays_zero():
    draws = []
    for cut in (False, True):
        _, optimizer, pruner = started(theta_lr=1e-9, estimator=lambda gates, closure: [0.0] * len(gates))
        optimizer.step()
        pruner.step()
        if cut:
            pruner.theta[0] = 0.0
        seen = []
        for _ in range(10):
            optimizer.step()
            pruner.step()
            seen.append([pruner.gates[name].xi for name in ("2", "3", "4")])
        assert not cut or pruner.thetas["1"] == 0.0
        draws.append(seen)
    assert draws[0] == draws[1]


def test_blocks_in_a_plain_list_are_not_run_silently_once_removed():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Residual(nn.Linear(4, 4)), Residual(nn.Linear(4, 4))
            self.order = [self.a, self.b]

        def forward(self, x: Tensor) -> Tensor:
            for block in self.order:
                x = block(x)
            return x

    model = Listed()
    pruner = Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0)
    pruner._cut("a")
    with pytest.raises(RuntimeError, match="outside of its module tree"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("finder", "message"),
    [
        (lambda model: [*shallower.find_blocks(model), *shallower.find_blocks(model)], "it stands 2 times"),
        (lambda model: [replace(shallower.find_blocks(model)[0], name="9")], "the model has no such block"),
        (lambda model: [shallower.split(model[1], name="1"), _inner(model)], "inside of '1'"),
        ("1", r"blocks=\['1'\]"),
    ],
)
def test_a_finder_that_breaks_the_rules_is_refused(finder, message):
    model = network()
    model[1].branch.append(Residual(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=message):
        Pruner(model, sgd(model), dataset_size=N, log_gamma=-1.0, blocks=finder)


def _inner(model: nn.Module):
    return shallower.split(model[1].branch[3], name="1.branch.3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "flip"}, r"estimator=shallower\.flip"),
        ({"estimator": None}, "a function is needed"),
        ({"optimizer": None}, "torch optimiser"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(options, message):
    model = network()
    given = {"optimizer": sgd(model), "dataset_size": N, "log_gamma": -1.0, **options}
    with pytest.raises(TypeError, match=message):
        Pruner(model, **given)


def test_a_run_resumes_in_another_process_to_the_same_bits(tmp_path):
    """Stopped before the first removal and resumed by a fresh interpreter."""
    script = tmp_path / "resume.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_pruner import resumed, sgd, train\n"
        "model, optimizer, pruner = resumed(sys.argv[1], sgd, log_gamma=-200.0, theta_lr=0.05)\n"
        "train(model, optimizer, pruner, range(5, 30))\n"
        "torch.save({'model': model.state_dict(), 'theta': pruner.theta}, sys.argv[2])\n"
    )
    model, optimizer, pruner = started(network(norm=True), log_gamma=-200.0, theta_lr=0.05)
    train(model, optimizer, pruner, range(5))
    (tmp_path / "saved.pt").write_bytes(saved(model, optimizer, pruner).getvalue())
    train(model, optimizer, pruner, range(5, 30))
    assert pruner.events
    command = [sys.executable, str(script), str(tmp_path / "saved.pt"), str(tmp_path / "end.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    assert torch.equal(end["theta"], pruner.theta)
    assert list(end["model"]) == list(model.state_dict())
    assert all(torch.equal(v, end["model"][k]) for k, v in model.state_dict().items())
