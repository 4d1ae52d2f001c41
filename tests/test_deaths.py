"""The evidence of removed blocks: what is kept of them, and how it is weighed."""

import math
from typing import Any

import pytest
import torch
from small import small

from shallower import first_order, flip
from shallower.certificate import Death
from shallower.certificate.deaths import deaths
from shallower.vitals import EVERY, Vital, Vitals


def test_vital_signs_are_the_rate_and_the_norm_of_the_last_layer() -> None:
    model, pruner, _, _ = small(EVERY, tolerance=0.0)
    for name in pruner.alive:
        (row,) = pruner.vitals.rows[name]
        last = model.get_submodule(name).branch[2]
        exact = math.sqrt(sum(p.detach().square().sum().item() for p in last.parameters()))
        assert (row.step, row.theta) == (EVERY, pruner.thetas[name])
        assert row.norm == pytest.approx(exact, rel=1e-6)


def test_the_last_row_of_a_removed_block_is_of_the_step_of_its_removal() -> None:
    _, pruner, _, _ = small()
    assert pruner.events
    for event, death in zip(pruner.events, deaths(pruner), strict=True):
        assert pruner.vitals.rows[event.block][-1].step == event.step == death.step
        assert death.theta == event.theta
        assert event.block not in pruner.vitals.weights


def test_vital_signs_are_resumed() -> None:
    _, pruner, _, _ = small(70)
    _, other, _, _ = small(10)
    other.load_state_dict(pruner.state_dict())
    assert other.vitals.rows == pruner.vitals.rows
    assert torch.equal(other.vitals.change, pruner.vitals.change)
    assert torch.equal(other.vitals.noise, pruner.vitals.noise)


def evidence(rows: list[Vital], price: float, *, estimator: Any = None, multiplier: float = 1.0) -> Death:
    """What is found of a removed block with these last rows."""
    _, pruner, _, _ = small()
    first = pruner.events[0].block
    pruner.log_gamma = lambda step: -price
    pruner.multipliers[pruner.names.index(first)] = multiplier
    pruner.estimator = estimator or pruner.estimator
    kept = pruner.vitals.rows[first]
    kept.clear()
    kept.extend(rows)
    return deaths(pruner)[0]


@pytest.mark.parametrize(
    ("rows", "finding", "entered"),
    [
        # theta, |w|, C1 - C0; kappa = 2 and a price of 8 make a radius of min(8 / 4, 1) = 1.
        ([(0.5, 0.9, -1.8), (0.2, 0.6, -1.2)], "dead", 1),
        ([(0.5, 0.9, -1.8), (0.2, 0.6, 0.0)], "dead", 1),
        ([(2.0, 3.0, -6.0), (0.1, 2.0, -4.0)], "dying", None),
        ([(0.1, 2.0, -4.0), (0.3, 3.5, -7.0)], "undecided", None),  # 1 nat, and its error is as large
        ([(0.1, 2.0, 9.0), (0.3, 3.5, 9.0)], "dying", None),  # it does harm
        ([(0.1, 0.5, -1.0), (0.2, 5.0, -10.0)], "undecided", None),  # it was in A0, and has left it
        ([(0.1, 1.5, -3.0), (0.2, 0.9, -1.8), (0.1, 0.4, -0.8)], "dead", 1),
        ([], "undecided", None),
    ],
)
def test_the_evidence_is_weighed(rows: list[tuple], finding: str, entered: int | None) -> None:
    kept = [Vital(step, *row, noise=1.0) for step, row in enumerate(rows)]
    found = evidence(kept, 8.0)
    assert (found.finding, found.entered) == (finding, entered)
    assert found.lyapunov == pytest.approx([(w * w + t * t) / 2 for t, w, _ in rows])
    if rows:
        assert found.kappa == found.eta == pytest.approx(max(abs(c) / w for _, w, c in rows))
        assert found.slope == pytest.approx(8.0 + rows[-1][2])
        assert found.noise == 1.0


def test_the_radius_is_the_price_of_the_block_against_what_it_can_do() -> None:
    row = Vital(1, 0.001, 0.1, -1.6, 0.0)  # kappa = eta = 16
    assert evidence([row], 8.0).radius == pytest.approx(8.0 / 32)
    twice = evidence([row], 8.0, multiplier=2.0)
    assert (twice.radius, twice.slope) == (pytest.approx(16.0 / 32), pytest.approx(16.0 - 1.6))


def test_at_the_dead_point_itself_a_block_is_dead_if_there_is_a_price() -> None:
    rows = [Vital(0, 0.1, 0.0, 0.0, 0.0), Vital(1, 0.0, 0.0, 0.0, 0.0)]
    assert (evidence(rows, 8.0).finding, evidence(rows, 8.0).kappa) == ("dead", 0.0)
    assert evidence(rows, 0.0).finding == "undecided"


def test_the_price_of_a_removed_block_is_that_of_the_step_that_removed_it() -> None:
    """Which is the one before: `step` counts it already when a block goes."""
    _, pruner, _, _ = small()
    pruner.log_gamma = lambda step: -float(step)
    for death in deaths(pruner):
        last = pruner.vitals.rows[death.block][-1]
        assert death.slope == pytest.approx(last.change + death.step - 1)


def test_an_exact_estimate_knows_eta_by_how_the_change_moves_with_w() -> None:
    rows = [Vital(0, 0.1, 2.0, -3.0, 0.0), Vital(1, 0.1, 1.0, -1.0, 0.0), Vital(2, 0.1, 1.001, 5.0, 0.0)]
    found = evidence(rows, 8.0, estimator=flip)
    assert (found.kappa, found.eta) == (pytest.approx(5 / 1.001), pytest.approx(2.0))
    assert evidence(rows, 3.0, estimator=flip).radius == pytest.approx(3.0 / (5 / 1.001 + 2.0))
    assert math.isnan(evidence(rows[:1], 8.0, estimator=flip).radius)


@pytest.mark.parametrize("exact", [True, False])
def test_a_block_that_would_come_back_is_not_called_dead(exact: bool) -> None:
    """C1 - C0 = (w^2 - w) / 2 at w = 0.95: worth 0.024 against a price of 0.05, but 0.125 when w has decayed
    to 0.5. What a closed gate estimates is the slope at w = 0, times w."""
    w, price = 0.95, 0.05
    row = Vital(1, 0.01, w, (w * w - w) / 2 if exact else -w / 2, 0.0)
    assert evidence([row], price, estimator=flip if exact else first_order).finding == "undecided"


def test_the_noise_of_the_change_is_its_standard_error() -> None:
    """Over 400 blocks with the same noise: their running means lie as far from the truth as each one says."""
    found = Vitals({str(n): [] for n in range(400)})
    dice = torch.Generator().manual_seed(0)
    found.learn(torch.ones(400, dtype=torch.float64))
    assert found.noise.isinf().all()  # of one
    found = Vitals({str(n): [] for n in range(400)})
    for steps in (3, 20, 200):
        for _ in range(steps - found.learned):
            found.learn(3.0 + 2.0 * torch.randn(400, generator=dice, dtype=torch.float64))
        off = float((found.change - 3.0).square().mean().sqrt())
        assert float(found.noise.square().mean().sqrt()) == pytest.approx(off, rel=0.15)


def test_a_state_without_noise_is_taken_and_leaves_its_findings_open() -> None:
    """As version 0.1 wrote it."""
    _, pruner, _, _ = small()
    state = pruner.state_dict()
    kept = state["vitals"]
    del kept["square"], kept["learned"]
    for rows in kept["rows"].values():
        for row in rows:
            del row["noise"]
    _, other, _, _ = small(10)
    other.load_state_dict(state)
    assert all(math.isnan(death.noise) and death.finding != "dying" for death in deaths(other))
