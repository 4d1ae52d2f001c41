"""Lanczos: against the whole spectrum, and what it claims to know."""

import math

import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shallower.certificate import smallest_eigenvalue
from shallower.certificate.curvature import CONFIDENCE, PATIENCE, _gap


def symmetric(size: int, seed: int) -> Tensor:
    values = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + values.T


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 1000), steps=st.integers(1, 12))
def test_the_smallest_eigenvalue_is_at_most_what_lanczos_says_and_one_lies_within_its_residual(
    size: int, seed: int, steps: int
) -> None:
    matrix = symmetric(size, seed)
    exact = torch.linalg.eigvalsh(matrix)
    found = smallest_eigenvalue(lambda v: matrix @ v, size, steps=steps, seed=seed + 1)
    assert found.value >= float(exact[0]) - 1e-9
    assert float((exact - found.value).abs().min()) <= found.residual + 1e-8
    left = matrix @ found.vector - found.value * found.vector
    assert found.residual == pytest.approx(float(left.norm()), abs=1e-8)
    assert float(found.vector @ matrix @ found.vector) == pytest.approx(found.value, abs=1e-8)
    if found.steps == size:
        assert found.value == pytest.approx(float(exact[0]), abs=1e-8)
        assert found.gap == 0.0


def test_the_bound_below_the_eigenvalue_holds_for_nearly_all_random_starts() -> None:
    matrix = symmetric(60, 0)
    exact = float(torch.linalg.eigvalsh(matrix)[0])
    found = [smallest_eigenvalue(lambda v: matrix @ v, 60, steps=8, seed=seed) for seed in range(100)]
    assert all(one.value >= exact for one in found)
    assert sum(one.value - one.gap <= exact for one in found) >= 95
    assert min(one.value - exact for one in found) > 1e-3  # so the bound is needed


def test_a_start_that_spans_no_more_ends_early() -> None:
    found = smallest_eigenvalue(lambda v: 3.0 * v, 50, steps=20)
    assert (found.steps, found.gap) == (1, 0.0)
    assert found.residual == pytest.approx(0.0, abs=1e-12)
    assert found.value == pytest.approx(3.0)


@pytest.mark.parametrize(("low", "steps"), [(-50.0, 40), (90.0, 40)])
def test_asked_for_the_sign_it_ends_when_that_is_known(low: float, steps: int) -> None:
    values = torch.cat([torch.tensor([low]), torch.linspace(100.0, 101.0, 499)]).double()
    found = smallest_eigenvalue(lambda v: values * v, 500, steps=steps, sign=True)
    full = smallest_eigenvalue(lambda v: values * v, 500, steps=steps)
    assert found.steps < full.steps
    assert (found.value - found.gap > 0) if low > 0 else (found.value < 0)
    assert low > 0 or found.residual < 0.1 * -found.value
    assert float(found.vector @ (values * found.vector)) == pytest.approx(found.value)


def test_it_gives_up_where_the_rest_of_the_steps_would_not_tell() -> None:
    """The smallest is 1e-3 of a spread of 1e3: with 95 %, that is decided after many more steps than 60."""
    values = torch.logspace(-3, 3, 500, dtype=torch.float64)
    found = smallest_eigenvalue(lambda v: values * v, 500, steps=60, sign=True)
    assert found.steps == PATIENCE
    assert smallest_eigenvalue(lambda v: values * v, 500, steps=60).steps == 60


@pytest.mark.parametrize(("size", "steps"), [(50, 8), (10_000, 30), (10_000, 100)])
def test_the_gap_is_what_the_bound_leaves_at_both_ends(size: int, steps: int) -> None:
    """By solving the bound for e, and the spread found = (1 - 2 e) of the whole for the whole."""

    def chance(e: float) -> float:
        return 1.648 * math.sqrt(size) * math.exp(-math.sqrt(e) * (2 * steps - 1)) - (1 - CONFIDENCE) / 2

    e = float(scipy.optimize.brentq(chance, 1e-9, 0.5))
    whole = 7.0 / (1 - 2 * e)
    assert _gap(size, steps, 7.0) == pytest.approx(e * whole)
    assert _gap(size, 1, 7.0) == math.inf


@pytest.mark.parametrize("steps", [30, 150, 400])
def test_in_single_precision_it_stays_a_bound(steps: int) -> None:
    """A matrix of rank 40 and a decay: the space is used up after 41 steps, and noise begins."""
    dice = torch.Generator().manual_seed(0)
    low = torch.randn(300, 40, generator=dice)
    matrix = low @ low.T + 0.4 * torch.eye(300)
    found = smallest_eigenvalue(lambda v: matrix @ v, 300, steps=steps, like=matrix)
    exact = float(torch.linalg.eigvalsh(matrix.double())[0])
    assert found.value >= exact - found.rounding
    assert found.rounding < 0.05 * exact
    if steps > 41:
        assert found.steps <= 50
        assert found.value == pytest.approx(exact, abs=found.rounding + found.residual)
        assert found.residual < 0.01 * exact


def test_a_negative_eigenvalue_is_known_within_a_tenth() -> None:
    """Of many that lie close, the first negative value is far from the smallest."""
    values = torch.linspace(-50.0, 100.0, 500, dtype=torch.float64)
    found = smallest_eigenvalue(lambda v: values * v, 500, steps=200, sign=True)
    assert found.residual < 0.1 * -found.value
    assert 4 < found.steps < 200
