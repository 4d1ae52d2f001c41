"""The optimiser as a patient."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shallower.optim import RobbinsMonro, ThetaAdam, adopt, fill_gradients, forget, restart, unknown

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=True),
    "adam-fused": lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "sgd-fused": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.9),
}


def trained(name: str, number: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two groups, as for decay and no decay, after two steps."""
    torch.manual_seed(number)
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(number)]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.1}]
    optimizer = OPTIMIZERS[name](groups)
    for _ in range(2):
        step(optimizer, parameters)
    return parameters, optimizer


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for i, p in enumerate(parameters):
        p.grad = torch.full_like(p, i + 1.0)
    optimizer.step()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(OPTIMIZERS)), st.sets(st.integers(0, 5)))
def test_survivors_keep_place_state_and_future_bit_for_bit(name, dead):
    parameters, optimizer = trained(name, 6)
    untouched, twin = trained(name, 6)
    alive = [i for i in range(6) if i not in dead]
    before = {i: copy.deepcopy(optimizer.state[parameters[i]]) for i in alive}

    forget(optimizer, [parameters[i] for i in dead])

    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
        id(parameters[i]) for i in (0, 2, 4, 1, 3, 5) if i not in dead
    ]
    assert set(optimizer.state) == {parameters[i] for i in alive}
    assert [i for i in range(6) if parameters[i].grad is not None] == alive
    for i in alive:
        for key, value in before[i].items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameters[i]][key]), torch.as_tensor(value))
    step(optimizer, parameters)
    step(twin, untouched)
    assert all(torch.equal(parameters[i], untouched[i]) for i in alive)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_emptied_group_stays_so_that_schedulers_go_on(name):
    parameters, optimizer = trained(name, 4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    forget(optimizer, parameters[1::2])
    step(optimizer, parameters)
    scheduler.step()
    forget(optimizer, parameters)
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == scheduler.get_last_lr()
    assert len(optimizer.param_groups) == 2
    assert not optimizer.state


def test_decay_and_momentum_act_where_there_was_no_gradient():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=0.5)
    fill_gradients([p])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.95))


def test_filling_leaves_real_gradients_and_frozen_parameters_alone():
    p, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    p.grad = torch.full((2,), 3.0)
    fill_gradients([p, frozen])
    assert torch.equal(p.grad, torch.full((2,), 3.0))
    assert frozen.grad is None


def test_unknown_names_what_the_optimizer_does_not_hold():
    a, b, frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    frozen.requires_grad_(False)
    assert unknown(torch.optim.SGD([a], lr=0.1), {"a": a, "b": b, "frozen": frozen}) == ["b"]


def test_an_adopted_parameter_joins_the_group_of_its_fellow():
    parameters, optimizer = trained("sgd", 4)
    new = nn.Parameter(torch.zeros(3))
    adopt(optimizer, new, like=parameters[1])
    assert optimizer.param_groups[1]["params"][-1] is new
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_restarted_and_an_adopted_parameter_step_as_new_ones_beside_the_others(name):
    parameters, optimizer = trained(name, 4)
    twins = [nn.Parameter(parameters[0].detach().clone()) for _ in range(2)]
    restart(optimizer, parameters[0])
    adopt(optimizer, twins[0], like=parameters[0])
    fresh = OPTIMIZERS[name]([{"params": [twins[1]]}])
    for _ in range(2):
        for p in (parameters[0], *twins):
            p.grad = torch.ones_like(p)
        for p in parameters[1:]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        fresh.step()
    assert torch.equal(parameters[0], twins[1])
    assert torch.equal(twins[0], twins[1])


def test_thetas_adam_is_pytorchs_and_each_goes_on_from_the_others_state():
    torch.manual_seed(0)
    gradients = torch.randn(40, 6, dtype=torch.float64) * torch.logspace(-6, 3, 6, dtype=torch.float64)
    ours, theirs = (torch.full((6,), 0.5, dtype=torch.float64) for _ in range(2))
    lean, stock = ThetaAdam([ours], lr=1e-2), torch.optim.Adam([theirs], lr=1e-2)

    def walk(part: torch.Tensor) -> None:
        for gradient in part:
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
            lean.step()
            stock.step()

    walk(gradients[:20])
    states = lean.state_dict(), stock.state_dict()
    lean.load_state_dict(states[1])
    stock.load_state_dict(states[0])
    walk(gradients[20:])
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert not torch.allclose(ours, torch.full_like(ours, 0.5), atol=1e-2)
    ThetaAdam([ours], lr=1e-2).load_state_dict(ThetaAdam([theirs], lr=1e-2).state_dict())  # before any step


def test_the_robbins_monro_step_is_lr_over_one_plus_n():
    p = nn.Parameter(torch.zeros(1))
    optimizer = RobbinsMonro([p], lr=2.0, halving=1.0)
    seen = []
    for _ in range(4):
        p.grad = torch.ones(1)
        before = p.item()
        optimizer.step()
        seen.append(round(before - p.item(), 6))
    assert seen == [2.0, 1.0, round(2 / 3, 6), 0.5]


def test_the_robbins_monro_step_resumes_where_it_stopped():
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first, second = RobbinsMonro([p], lr=1.0), RobbinsMonro([q], lr=1.0)
    for _ in range(3):
        p.grad = torch.ones(1)
        first.step()
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["n"] == 3


@pytest.mark.parametrize("options", [{"power": 0.5}, {"power": 1.1}, {"lr": 0.0}, {"halving": 0.0}])
def test_a_step_that_breaks_the_conditions_is_refused(options):
    with pytest.raises(ValueError, match=r"Robbins-Monro|positive"):
        RobbinsMonro([nn.Parameter(torch.zeros(1))], **{"lr": 1.0, **options})
