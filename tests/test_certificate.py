"""The certificate: each figure by a second road, and what it says of networks whose optimality is known."""

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from shallower import Pruner, Residual, certify
from shallower.certificate import price_ladder, smallest_eigenvalue
from shallower.certificate.deaths import deaths
from shallower.certificate.survivors import verdict
from shallower.cli import app
from shallower.vitals import EVERY, Vital
from shallower.worth import Worth

WIDTH = 4


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
    assert (found.steps, found.residual) == (1, 0.0)
    assert found.value == pytest.approx(3.0)


# -- a problem that can be solved by hand --------------------------------------------------------------


class Scalar(nn.Module):
    """branch(z) = w z."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return self.w * z


def by_hand(w: float, decay: float, price: float) -> tuple[nn.Module, Pruner, list[Tensor], Any]:
    """Loss (1.5 - (1 + w))^2 / 2 on one sample: C1 = (0.5 - w)^2 / 2, C0 = 0.125."""
    model = nn.Sequential(Residual(Scalar(w)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=decay)
    pruner = Pruner(model, optimizer, dataset_size=1, log_gamma=-price, theta=1.0, theta_lr=1e-9)
    z = torch.ones(1, 1, dtype=torch.float64)

    def loss(batch: Tensor) -> Tensor:
        return 0.5 * (1.5 - model(batch)).square().mean()

    loss(z.clone().requires_grad_()).backward()
    optimizer.step()
    pruner.step()
    pruner.finalize()
    return model, pruner, [z, z], loss


def test_at_the_solution_by_hand_all_conditions_hold_and_have_their_values() -> None:
    decay, price = 0.25, 0.05
    w = 0.5 / (1 + decay)  # where C1' + lambda w = 0
    found = certify(*by_hand(w, decay, price))
    (row,) = found.survivors
    assert row.benefit == pytest.approx(0.125 - 0.5 * (0.5 - w) ** 2)  # O2
    assert row.low == row.high == pytest.approx(row.benefit)  # two equal batches
    assert row.rest == pytest.approx(0.0, abs=1e-12)  # O3
    assert row.curvature == pytest.approx(1 + decay)  # O1
    assert row.estimate == pytest.approx(decay * w * w)  # Euler's identity at rest: lambda |w|^2
    assert (row.norm, row.price, row.verdict) == (pytest.approx(w), price, "earns its keep")
    assert found.kkt_residual == pytest.approx(0.0, abs=1e-12)
    assert [r.block for r in found.ladder] == ["0"]
    assert found.ladder[0].price == pytest.approx(row.benefit)
    assert found.ladder[0].loss == pytest.approx(0.125)


def test_off_the_solution_the_residuals_say_how_far() -> None:
    w, decay, price = 0.1, 0.25, 0.2
    found = certify(*by_hand(w, decay, price))
    (row,) = found.survivors
    slope, pull = -(0.5 - w), decay * w
    assert row.rest == pytest.approx(abs(slope + pull) / (abs(slope) + abs(pull)))
    assert found.weights_residual == pytest.approx(row.rest)
    assert row.verdict == "should have gone"
    assert found.theta_residual == pytest.approx((price - row.benefit) / price)
    assert found.kkt_residual == max(found.weights_residual, found.theta_residual)


@pytest.mark.parametrize(
    ("benefit", "error", "says"),
    [(10, 2, "earns its keep"), (10, 3, "undecided"), (6, 1, "undecided"), (4, 0.4, "should have gone")],
)
def test_the_verdict_is_where_the_interval_lies(benefit: float, error: float, says: str) -> None:
    assert verdict(Worth("b", benefit, error, 5.0)) == says


# -- a small network -----------------------------------------------------------------------------------


def branch() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


Small = tuple[nn.Sequential, Pruner, list[tuple[Tensor, Tensor]], Any]


def small(steps: int = 130, *, tolerance: float = 0.3, decay: float = 0.01) -> Small:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(branch()) for _ in range(4)), nn.Linear(WIDTH, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay)
    options: dict[str, Any] = {"theta": 0.5, "theta_lr": 5e-3, "tolerance": tolerance}
    pruner = Pruner(model, optimizer, dataset_size=60, log_gamma=-2.0, **options)
    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0)
    batches = [(x[i : i + 20], y[i : i + 20]) for i in range(0, 60, 20)]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for step in range(steps):
        optimizer.zero_grad()
        loss(batches[step % 3]).backward()
        optimizer.step()
        pruner.step()
    return model, pruner, batches, loss


def finalized(**options: Any) -> Small:
    model, pruner, batches, loss = small(**options)
    pruner.finalize(0.3)
    assert 2 <= len(pruner.alive) < 4
    return model, pruner, batches, loss


def test_curvature_is_that_of_the_whole_hessian() -> None:
    model, pruner, batches, loss = finalized()
    rows = certify(
        model, pruner, batches, loss, curvature_steps=WIDTH * WIDTH + WIDTH, ladder=False
    ).survivors
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for row in rows:
        last = model.get_submodule(row.block).branch[2]
        names = [n for n, p in model.named_parameters() if p is last.weight or p is last.bias]
        sizes = [last.weight.numel(), last.bias.numel()]

        def cost(flat: Tensor, names: list[str] = names, sizes: list[int] = sizes) -> Tensor:
            weight, bias = flat.split(sizes)
            values = dict(zip(names, (weight.view(WIDTH, WIDTH), bias), strict=True))
            return 60 * F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

        flat = torch.cat([last.weight.flatten(), last.bias]).detach()
        hessian = torch.autograd.functional.hessian(cost, flat) + 60 * 0.01 * torch.eye(
            len(flat), dtype=torch.float64
        )
        assert row.curvature == pytest.approx(float(torch.linalg.eigvalsh(hessian)[0]), rel=1e-6)
        gradient = torch.autograd.functional.jacobian(cost, flat)
        assert row.estimate == pytest.approx(-float(gradient @ flat), rel=1e-6)
        assert row.norm == pytest.approx(float(flat.norm()))


def test_what_is_not_finite_is_null_in_json() -> None:
    """One batch has no spread, so the interval is endless."""
    model, pruner, batches, loss = finalized()
    whole = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
    found = certify(model, pruner, whole, loss, curvature_steps=0)
    assert math.isinf(found.survivors[0].high)
    kept = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert kept["survivors"][0]["high"] is None
    assert kept["survivors"][0]["benefit"] == found.survivors[0].benefit


@pytest.mark.parametrize(
    ("optimizer", "noted"),
    [
        (torch.optim.SGD, False),
        (torch.optim.AdamW, True),
        (partial(torch.optim.NAdam, decoupled_weight_decay=True), True),
        (partial(torch.optim.NAdam, decoupled_weight_decay=False), False),
    ],
)
def test_decay_apart_from_the_gradient_is_noted(optimizer: Any, noted: bool) -> None:
    model, pruner, batches, loss = finalized()
    pruner.use_optimizer(optimizer(model.parameters(), lr=1e-3, weight_decay=0.01))
    found = certify(model, pruner, batches, loss, curvature_steps=0)
    assert any("apart from its gradient" in note for note in found.notes) == noted


def test_a_certificate_changes_nothing() -> None:
    model, pruner, batches, loss = finalized()
    model[0].requires_grad_(False)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    dice, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    certify(model, pruner, batches, loss)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    for p, old in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) if old is None else torch.equal(p.grad, old)
    assert torch.equal(torch.get_rng_state(), dice)
    assert [m.training for m in model.modules()] == modes


def test_the_ladder_takes_the_least_first_and_measures_the_others_again() -> None:
    model, pruner, batches, loss = finalized()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def mean() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(x), y))

    seen: list[float] = []
    rungs = price_ladder(pruner, batches, loss, lambda: seen.append(mean()) or seen[-1])
    assert [r.left for r in rungs] == list(range(len(pruner.alive)))[::-1]
    assert {r.block for r in rungs} == set(pruner.alive)
    assert [r.score for r in rungs] == seen
    losses = [mean(), *seen]
    for rung, before, after in zip(rungs, losses, losses[1:], strict=False):
        assert rung.loss == pytest.approx(after)
        assert rung.benefit == pytest.approx(60 * (after - before))
    assert [r.price for r in rungs] == pytest.approx(
        [max(r.benefit for r in rungs[: k + 1]) for k in range(len(rungs))]
    )
    assert mean() == pytest.approx(losses[0])  # all of them are back


@pytest.mark.parametrize("wrong", ["early", "finished", "iterator", "another"])
def test_what_cannot_be_certified_is_refused(wrong: str) -> None:
    model, pruner, batches, loss = small() if wrong == "early" else finalized()
    if wrong == "finished":
        pruner.finish()
    given: Any = iter(batches) if wrong == "iterator" else batches
    net = nn.Sequential() if wrong == "another" else model
    words = {"early": "not been finalised", "finished": "has finished", "iterator": "can be read once"}
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words.get(wrong, "another model")):
        certify(net, pruner, given, loss)


def test_a_loss_that_cannot_be_differentiated_twice_is_said_and_the_rest_is_measured() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    model, pruner, batches, _ = finalized()
    found = certify(
        model, pruner, batches, lambda batch: F.cross_entropy(Once.apply(model(batch[0])), batch[1])
    )
    assert all(row.curvature is None for row in found.survivors)
    assert len(found.notes) == 1
    assert "O1 was not checked" in found.notes[0]


# -- the removed ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("rows", "finding", "entered"),
    [
        # kappa = 2, price 8: the radius is min(8 / 4, 1) = 1.
        ([(0.5, 0.9), (0.2, 0.6)], "dead", 1),
        ([(2.0, 3.0), (0.1, 2.0)], "dying", None),
        ([(0.1, 2.0), (0.3, 3.0)], "undecided", None),
        ([(0.1, 0.5), (0.2, 3.0)], "undecided", 0),
    ],
)
def test_the_evidence_is_weighed(rows: list[tuple[float, float]], finding: str, entered: int | None) -> None:
    _, pruner, _, _ = small()
    pruner.log_gamma = lambda step: -8.0
    kept = pruner.vitals.rows[pruner.events[0].block]
    kept.clear()
    kept.extend(Vital(step, theta, norm, -2 * norm) for step, (theta, norm) in enumerate(rows))
    found = deaths(pruner)[0]
    assert (found.finding, found.entered) == (finding, entered)
    assert (found.kappa, found.radius) == (pytest.approx(2.0), 1.0)
    assert found.slope == pytest.approx(8.0 - 2 * rows[-1][1])
    assert found.lyapunov == pytest.approx([(w * w + t * t) / 2 for t, w in rows])


def test_the_radius_is_the_price_against_what_the_block_can_do() -> None:
    _, pruner, _, _ = small()
    pruner.log_gamma = lambda step: -8.0
    kept = pruner.vitals.rows[pruner.events[0].block]
    kept.clear()
    kept.append(Vital(1, 0.001, 0.1, -1.6))  # kappa = eta = 16
    assert deaths(pruner)[0].radius == pytest.approx(8.0 / 32)


# -- the command ---------------------------------------------------------------------------------------

QUICK = ["--epochs", "2", "--set", "theta_lr=0.03", "--no-worth"]


def test_a_run_is_certified_by_its_folder(tmp_path) -> None:
    run, runner = tmp_path / "run", CliRunner()
    assert runner.invoke(app, ["train", "digits", "--out", str(run), *QUICK]).exit_code == 0
    said = runner.invoke(app, ["certify", str(run), "--steps", "3", "--samples", "200"])
    assert said.exit_code == 0, said.output
    assert "KKT residual of the whole problem" in said.output
    found = json.loads((run / "certificate.json").read_text())
    result = json.loads((run / "result.json").read_text())
    assert [row["block"] for row in found["survivors"]] == result["survivors"]
    assert len(found["deaths"]) == result["blocks"] - result["blocks_kept"]
    assert found["ladder"][-1]["left"] == 0
    printed = runner.invoke(app, ["certify", str(run), "--steps", "0", "--json"])
    assert [row["curvature"] for row in json.loads(printed.output)["survivors"]] == [None] * len(
        result["survivors"]
    )


def test_a_run_that_has_not_ended_or_has_no_price_is_refused(tmp_path) -> None:
    runner = CliRunner()
    said = runner.invoke(app, ["certify", str(tmp_path / "none")])
    assert said.exit_code == 2
    assert "no finished run" in said.output
    dense = tmp_path / "dense"
    quick = ["--epochs", "1", "--out", str(dense)]
    assert runner.invoke(app, ["train", "digits-dense", *quick]).exit_code == 0
    said = runner.invoke(app, ["certify", str(dense)])
    assert said.exit_code == 2
    assert "without pruning" in said.output
