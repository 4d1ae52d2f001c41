"""The flattening hyper-prior against numerical integration, minimisation and differentiation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from torch.testing import assert_close

from shallower import prior
from shallower.prior import (
    J,
    J_star,
    constant,
    linear_ramp,
    log_density,
    multiplier_vector,
    pi_star,
    schedule,
)

thetas = st.floats(0.001, 0.999)
log_gammas = st.floats(-20.0, -0.01)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(log_gammas)
def test_the_density_integrates_to_one(log_gamma):
    whole, _ = quad(lambda pi: math.exp(log_density(scalar(pi), log_gamma)), 0, 1, limit=200)
    assert whole == pytest.approx(1.0, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(thetas, log_gammas)
def test_pi_star_minimises_J(theta, log_gamma):
    found = minimize_scalar(
        lambda logit: float(J(torch.sigmoid(scalar(logit)), scalar(theta), log_gamma)),
        bounds=(-40, 12),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert float(pi_star(scalar(theta), log_gamma)) == pytest.approx(1 / (1 + math.exp(-found.x)), rel=1e-3)
    assert found.fun == pytest.approx(float(J_star(scalar(theta), log_gamma)), abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(thetas, log_gammas)
def test_the_gradient_of_J_star_is_minus_log_gamma_at_every_theta(theta, log_gamma):
    at = scalar(theta).requires_grad_()
    (slope,) = torch.autograd.grad(J(pi_star(at, log_gamma), at, log_gamma), at)
    assert_close(slope, scalar(prior.gradient(log_gamma)), rtol=1e-6, atol=1e-6)


def test_pi_star_by_hand():
    """gamma = 1/2, theta = 1/2: (1/4) / (1 - 1/4) = 1/3."""
    assert_close(pi_star(scalar(0.5), math.log(0.5)), scalar(1 / 3))


@pytest.mark.parametrize("theta", [0.0, 0.5, 1.0])
def test_an_extreme_log_gamma_underflows_nowhere(theta):
    rate = pi_star(scalar(theta), -17_500.0)
    assert 0.0 <= float(rate) <= 1.0
    assert math.isfinite(float(log_density(scalar(0.5), -17_500.0)))


def test_a_ramp_runs_from_nothing_to_its_final_value():
    ramp = linear_ramp(-200.0, steps=10)
    assert [ramp(0), ramp(5), ramp(10), ramp(11)] == [0.0, -100.0, -200.0, -200.0]


def test_a_ramp_may_begin_later_and_ends_where_it_would():
    ramp = linear_ramp(-200.0, steps=10, begin=6)
    assert [ramp(0), ramp(6), ramp(7), ramp(10), ramp(11)] == [0.0, 0.0, -50.0, -200.0, -200.0]
    with pytest.raises(ValueError, match="and before it ends"):
        linear_ramp(-200.0, steps=10, begin=10)


def test_a_price_is_log_gamma_per_sample():
    assert schedule(None, 0.005, 50_000)(0) == pytest.approx(-250.0)
    assert schedule(None, lambda step: 0.001 * step, 1000)(2) == pytest.approx(-2.0)
    assert schedule(constant(-3.0), None, 10)(7) == -3.0


@pytest.mark.parametrize(
    ("log_gamma", "price", "message"),
    [
        (None, None, "neither of log_gamma and price"),
        (-250, 0.005, "both of log_gamma and price"),
        (250, None, "log_gamma=-250"),
        (0, None, "must be negative"),
        (float("nan"), None, "must be negative"),
        (float("-inf"), None, "must be negative"),
        (-1e308, None, "must be negative"),  # Adam would square it to infinity, and prune nothing
        (None, -0.005, "must be positive"),
        (None, 0.0, "must be positive"),
    ],
)
def test_a_wrong_prior_is_refused_with_the_right_call(log_gamma, price, message):
    with pytest.raises(ValueError, match=message):
        schedule(log_gamma, price, 50_000)


def test_a_ramp_over_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        linear_ramp(-1.0, steps=0)


def test_multipliers_are_one_unless_named():
    assert multiplier_vector({"b": 5.0}, ["a", "b"]).tolist() == [1.0, 5.0]
    assert multiplier_vector(None, ["a"]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("multipliers", "message"), [({"c": 2.0}, "no gated blocks"), ({"a": 0.0}, "positive")]
)
def test_wrong_multipliers_are_refused(multipliers, message):
    with pytest.raises(ValueError, match=message):
        multiplier_vector(multipliers, ["a", "b"])
