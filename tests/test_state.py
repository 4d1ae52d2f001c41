"""A state that does not fit is refused before anything is touched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from shallower import Pruner, Residual, RobbinsMonro


def started(depth: int = 3, width: int = 4, *, steps: int = 2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(nn.Linear(width, width)) for _ in range(depth)), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"dataset_size": 100, "log_gamma": -5.0, "theta_lr": 0.01, **options}
    pruner = Pruner(model, optimizer, **given)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, width)), torch.randint(0, 2, (8,))).backward()
        optimizer.step()
        pruner.step()
    return model, optimizer, pruner


def broken(**changes):
    _, _, pruner = started()
    return {**pruner.state_dict(), **changes}


def optimizer_with(**changes):
    """A state whose theta optimiser has some of its parts exchanged."""
    state = broken()
    theirs = copy.deepcopy(state["theta_optimizer"])
    for name, value in changes.items():
        if name == "state":
            theirs["state"] = value
        elif name == "moment":
            theirs["state"][0] = value
        elif name == "exp_avg":
            theirs["state"][0][name] = value
        else:
            theirs["param_groups"][0][name] = value
    return {**state, "theta_optimizer": theirs}


def vitals_with(**changes):
    state = broken()
    return {**state, "vitals": {**state["vitals"], **changes}}


def without(key: str):
    state = broken()
    del state[key]
    return state


CASES = {
    "no mapping": (lambda: [1, 2], "no state of a Pruner"),
    "missing key": (lambda: without("theta"), "no state of a Pruner"),
    "extra key": (lambda: broken(more=1), "no state of a Pruner"),
    "version": (lambda: broken(version=99), "version 99"),
    "deeper": (lambda: started(depth=4)[2].state_dict(), "another model"),
    "wider": (lambda: started(width=5)[2].state_dict(), "another model"),
    "theta too large": (lambda: broken(theta=torch.tensor([0.5, 1.5, 0.5])), r"rates in \[0, 1\]"),
    "theta nan": (lambda: broken(theta=torch.full((3,), torch.nan)), r"rates in \[0, 1\]"),
    "theta short": (lambda: broken(theta=torch.ones(2)), r"rates in \[0, 1\]"),
    "theta no tensor": (lambda: broken(theta=[0.5] * 3), r"rates in \[0, 1\]"),
    "events": (lambda: broken(events=[{"block": "1"}]), "each needs"),
    "strange removal": (lambda: broken(events=[{"step": 1, "block": "x", "theta": 0.0}]), "no blocks"),
    "strange draw": (lambda: broken(xi=["x"]), "no blocks"),
    "theta optimizer": (lambda: started(theta_optimizer=RobbinsMonro)[2].state_dict(), "theta_optimizer"),
    "version of another kind": (lambda: broken(version=torch.ones(2)), "version"),
    "draws of another kind": (lambda: broken(xi=[[]]), "names of blocks"),
    "removal of another kind": (
        lambda: broken(events=[{"step": 1, "block": [], "theta": 0.0}]),
        "each needs",
    ),
    "vitals": (lambda: broken(vitals={"rows": []}), "vitals"),
    "learned from nothing": (lambda: vitals_with(learned=None), "vitals"),
    "learned from several numbers": (lambda: vitals_with(learned=torch.ones(2)), "vitals"),
    "learned from less than nothing": (lambda: vitals_with(learned=-1), "vitals"),
    "a mean of another shape": (lambda: vitals_with(square=torch.zeros(3, 2)), "vitals"),
    "a mean of nan": (lambda: vitals_with(change=torch.full((3,), torch.nan)), "vitals"),
    "a mean without numbers": (lambda: vitals_with(change=torch.zeros(3, device="meta")), "vitals"),
    "a sparse mean": (lambda: vitals_with(square=torch.zeros(3).to_sparse()), "vitals"),
    "a mean of truths": (lambda: vitals_with(change=torch.ones(3, dtype=torch.bool)), "vitals"),
    "no state of the optimizer": (lambda: optimizer_with(state=[]), "no state of an optimiser"),
    "moments without a step": (lambda: optimizer_with(moment={"exp_avg": torch.zeros(3)}), "KeyError"),
    "moments of nan": (lambda: optimizer_with(exp_avg=torch.full((3,), torch.nan)), "not finite"),
    "rate of nan": (lambda: optimizer_with(lr=float("nan")), "not finite"),
    "rate in words": (lambda: optimizer_with(lr="fast"), "cannot be gone on with"),
    "two parameters": (lambda: optimizer_with(params=[0, 1]), "cannot be gone on with"),
    "generator": (lambda: broken(generator=torch.zeros(3, dtype=torch.uint8)), "generator"),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_state_that_does_not_fit_is_refused_untouched(case):
    make, message = CASES[case]
    model, optimizer, pruner = started(steps=1)
    state = make()
    types = [type(m) for m in model.modules()]
    thetas, draws = pruner.thetas, [g.xi for g in pruner.gates.values()]
    vitals = copy.deepcopy(pruner.vitals.state_dict())
    generator = pruner.generator.get_state()
    with pytest.raises(ValueError, match=message):
        pruner.load_state_dict(state)
    assert [type(m) for m in model.modules()] == types
    assert (pruner.thetas, [g.xi for g in pruner.gates.values()], pruner.num_steps) == (thetas, draws, 1)
    assert torch.equal(pruner.generator.get_state(), generator)
    assert_close(pruner.vitals.state_dict(), vitals, rtol=0, atol=0, equal_nan=True)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_a_pruner_that_is_further_than_the_state_refuses_it():
    state = started()[2].state_dict()
    _, _, pruner = started()
    pruner.theta[0] = 0.0
    pruner.finalize()
    with pytest.raises(ValueError, match="cannot come back"):
        pruner.load_state_dict(state)


def test_a_state_is_a_snapshot_and_moves_with_nothing():
    _, _, pruner = started()
    state = pruner.state_dict()
    rates = state["theta"].clone()
    pruner.theta.fill_(0.5)
    assert torch.equal(state["theta"], rates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"theta_optimizer": {}}, "no state of an optimiser"),
        ({"events": None}, "a list is needed"),
        ({"xi": None}, "a list is needed"),
        ({"num_steps": -3}, "num_steps=-3"),
        ({"num_steps": "x"}, "num_steps='x'"),
        ({"finalized": "no"}, "finalized='no'"),
        ({"events": [{"step": 1, "block": "0", "theta": 0.0}]}, "rates are not 0"),
    ],
)
def test_a_malformed_state_is_refused_untouched(changes, message):
    model, _, pruner = started(steps=1)
    types, thetas = [type(m) for m in model.modules()], pruner.thetas
    with pytest.raises(ValueError, match=message):
        pruner.load_state_dict(broken(**changes))
    assert [type(m) for m in model.modules()] == types
    assert pruner.thetas == thetas
