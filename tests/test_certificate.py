"""The certificate: each figure by a second road, and what it says of networks whose optimality is known."""

import copy
import json
import math
from functools import partial
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from small import WIDTH, finalized, normed, small
from torch import Tensor, nn
from typer.testing import CliRunner

from shallower import Pruner, Residual, certify
from shallower.certificate import Certificate
from shallower.certificate.survivors import verdict
from shallower.cli import app
from shallower.worth import Worth

# -- a problem that can be solved by hand --------------------------------------------------------------


def scalar(w: float) -> nn.Linear:
    """branch(z) = w z."""
    found = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(found.weight, w)
    return found


def by_hand(w: float, decay: float, price: float) -> tuple[nn.Module, Pruner, list[Tensor], Any]:
    """Loss (1.5 - (1 + w))^2 / 2 on one sample: C1 = (0.5 - w)^2 / 2, C0 = 0.125."""
    model = nn.Sequential(Residual(scalar(w)))
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
    assert (row.curvature, row.minimum) == (pytest.approx(1 + decay), "holds")  # O1
    assert (row.residual, row.gap) == (pytest.approx(0.0, abs=1e-12), 0.0)
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


def bent(signs: list[float]) -> tuple[nn.Module, Pruner, list[Tensor], Any]:
    """Loss sign * (w z)^2 / 2 at w = 0.3, z = 1: its curvature is their mean, and lambda is 0.25."""
    model, pruner, _, _ = by_hand(0.3, 0.25, 0.05)

    def loss(batch: Tensor) -> Tensor:
        return 0.5 * (batch[:, 1:] * (model(batch[:, :1]) - batch[:, :1]).square()).mean()

    return model, pruner, [torch.tensor([[1.0, sign]], dtype=torch.float64) for sign in signs], loss


@pytest.mark.parametrize(
    ("signs", "mean", "says"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0, "holds"),
        ([-1.0, -1.0, -1.0, -1.0], -1.0, "violated"),
        ([-1.0, 1.0, 1.0, 1.0], 0.5, "open"),  # negative on the first sample, and not on all
        ([-1.0, -1.0, -1.0, 1.0], -0.5, "violated"),
        ([1.0, -1.0, -1.0, -1.0], -0.5, "violated"),  # positive on the first, and not on all
        ([-1.0] + [-1.0] * 6 + [1.0] * 4 + [-1.0] * 9, -0.2, "open"),  # of ten others: to within 0.7
        ([-1.0] + [-1.0] * 9 + [1.0] * 10, -0.8, "violated"),  # to within 0.5; wrong, as one in 40 may be
        ([1.0] + [1.0] * 9 + [-1.0] * 10, 0.8, "holds"),  # likewise
        ([1.0] + [1.0] * 6 + [-1.0] * 4 + [1.0] * 9, 0.2, "open"),
    ],
)
def test_a_saddle_is_called_one_if_the_data_say_so(signs: list[float], mean: float, says: str) -> None:
    model, pruner, batches, loss = bent(signs)
    pruner.dataset_size = len(signs)
    pruner.optimizer.param_groups[0]["weight_decay"] /= len(signs)
    (row,) = certify(model, pruner, batches, loss, curvature_samples=1, ladder_samples=0).survivors
    assert (row.curvature, row.minimum) == (pytest.approx(mean * len(signs) + 0.25), says)


def test_a_saddle_is_weighed_by_the_samples_of_a_batch() -> None:
    """One sample of curvature -3, and nine of 1 in one batch: 6 in all."""
    model, pruner, _, loss = bent([])
    pruner.dataset_size = 10
    pruner.optimizer.param_groups[0]["weight_decay"] = 0.0
    batches = [torch.tensor([[1.0, sign]] * n, dtype=torch.float64) for n, sign in ((1, -3.0), (9, 1.0))]
    (row,) = certify(model, pruner, batches, loss, curvature_samples=1).survivors
    assert (row.curvature, row.minimum) == (pytest.approx(6.0), "open")


def test_one_batch_of_many_does_not_tell_whether_there_is_a_saddle() -> None:
    model, pruner, batches, loss = bent([-1.0] * 3)
    batches = [torch.cat([batch] * 20) for batch in batches]
    pruner.dataset_size = 60
    (row,) = certify(model, pruner, batches, loss, curvature_samples=2).survivors
    assert row.minimum == "open"


def test_a_flat_direction_is_no_saddle() -> None:
    """Without decay, in single precision, before a linear head: the loss is convex in w, and flat in most."""
    torch.manual_seed(0)
    for _ in range(6):
        model = nn.Sequential(Residual(nn.Linear(16, 16)), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = Pruner(model, optimizer, dataset_size=40, log_gamma=-0.1, theta=1.0)
        batches = [(torch.randn(20, 16), torch.randint(0, 3, (20,))) for _ in range(2)]
        found = certified(model, optimizer, pruner, batches)
        assert found.survivors[0].minimum != "violated"


@pytest.mark.parametrize("freedom", [*range(1, 12), 30, 49, 390])
def test_the_interval_is_that_of_student(freedom: int) -> None:
    row = Worth("b", 10.0, 2.0, 5.0, freedom + 1)
    reach = 2.0 * float(scipy.stats.t.ppf(0.975, freedom))
    assert row.interval == pytest.approx((10 - reach, 10 + reach), rel=2e-3)
    assert Worth("b", 10.0, 2.0, 5.0, 1).interval == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("benefit", "error", "says"),
    [(10, 2, "earns its keep"), (10, 3, "undecided"), (6, 1, "undecided"), (4, 0.4, "should have gone")],
)
def test_the_verdict_is_where_the_interval_lies(benefit: float, error: float, says: str) -> None:
    assert verdict(Worth("b", benefit, error, 5.0)) == says


# -- a small network -----------------------------------------------------------------------------------


def test_curvature_is_that_of_the_whole_hessian() -> None:
    model, pruner, batches, loss = finalized()
    rows = certify(
        model, pruner, batches, loss, curvature_steps=WIDTH * WIDTH + WIDTH, ladder_samples=0
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


def test_a_minimum_is_none_before_lanczos_knows_it() -> None:
    """Two steps in 20 dimensions: the least value found is positive, and the smallest may be anything."""
    rows = certify(*finalized(), curvature_steps=2, ladder_samples=0).survivors
    assert all(row.curvature > 0 and row.minimum == "open" for row in rows)


def test_o3_is_the_gradient_against_what_single_samples_pull_whatever_the_batch() -> None:
    model, pruner, batches, loss = finalized()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    trained = list(model.parameters())
    each = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss((x[i : i + 1], y[i : i + 1])), trained)])
        for i in range(60)
    ]
    pull = 0.01 * torch.cat([p.detach().flatten() for p in trained])
    mean = torch.stack(each).mean(0)
    one_by_one = (mean.square().sum() + torch.stack(each).var(0).sum()).sqrt()
    exact = float((mean + pull).norm() / (one_by_one + pull.norm()))
    options: dict[str, Any] = {"curvature_steps": 0, "ladder_samples": 0}
    for size, close in ((1, 1e-6), (3, 0.15), (10, 0.4)):
        some = [(x[i : i + size], y[i : i + size]) for i in range(0, 60, size)]
        found = certify(model, pruner, some, loss, **options)
        assert found.weights_residual == pytest.approx(exact, rel=close)
    head = {p.requires_grad_(False) for p in model[-1].parameters()}
    alone = certify(model, pruner, some, loss, **options)
    assert alone.weights_residual != pytest.approx(found.weights_residual)  # so the head was counted
    pruner.optimizer.param_groups[0]["params"] = [p for p in trained if p not in head]
    for p in model[-1].parameters():
        p.requires_grad_(True)
    assert certify(model, pruner, some, loss, **options).weights_residual == alone.weights_residual
    for p in trained:
        p.requires_grad_(False)
    found = certify(model, pruner, some, loss, **options)
    assert math.isnan(found.weights_residual)
    assert any("the last layer is not trained" in note for note in found.notes)


def test_the_residual_of_theta_is_that_of_the_worst() -> None:
    model, pruner, batches, loss = finalized()
    pruner.log_gamma = lambda step: -1000.0
    found = certify(model, pruner, batches, loss, curvature_steps=0)
    short = [1 - row.benefit / row.price for row in found.survivors]
    assert len(set(short)) > 1
    assert found.theta_residual == pytest.approx(max(short))
    assert {row.verdict for row in found.survivors} == {"should have gone"}


def test_a_branch_that_ends_in_no_affine_map_has_no_first_order_estimate_and_it_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=8, log_gamma=-1.0, theta=1.0)
    batch = torch.randn(8, 3), torch.arange(8) % 2

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    loss(batch).backward()
    optimizer.step()
    pruner.step()
    pruner.finalize()
    found = certify(model, pruner, [batch, batch], loss)
    assert found.survivors[0].estimate is None
    assert any("0: the branch does not end in an affine map" in note for note in found.notes)


def test_the_network_is_certified_as_in_training_whatever_its_mode() -> None:
    model, pruner, batches, loss = normed()
    modes = [certify(model.train(mode), pruner, batches, loss).as_dict() for mode in (True, False)]
    assert modes[0] == modes[1]
    model[2].p = 0.0  # dropout was off
    assert certify(model, pruner, batches, loss).as_dict() == modes[0]
    model.train()
    model[3].eval()  # as one that is frozen
    frozen = certify(model, pruner, batches, loss)
    with pruner.without("0"), torch.no_grad():
        gone = sum(float(loss(batch)) * 20 for batch in batches)
    with torch.no_grad():
        here = sum(float(loss(batch)) * 20 for batch in batches)
    assert frozen.survivors[0].benefit == pytest.approx(gone - here)
    assert not model[3].training


def test_compiled_blocks_have_their_curvature_too() -> None:
    model, pruner, batches, loss = finalized()
    plain = certify(model, pruner, batches, loss).as_dict()
    for name in pruner.alive:
        model.get_submodule(name).compile(backend="aot_eager")
    assert certify(model, pruner, batches, loss).as_dict() == plain


def certified(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pruner: Pruner,
    batches: list[tuple[Tensor, Tensor]],
    **options: Any,
) -> Certificate:
    """After one step."""

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    loss(batches[0]).backward()
    optimizer.step()
    pruner.step()
    pruner.finalize()
    return certify(model, pruner, batches, loss, **options)


def test_each_parameter_has_the_decay_of_its_group() -> None:
    """The Hessian of a loss that does not see the block is lambda alone: of the weight 3, of the bias 0.5."""
    model = nn.Sequential(Residual(nn.Linear(2, 2)), nn.Linear(2, 2))
    layer = model[0].branch
    groups = [
        {"params": [layer.weight], "weight_decay": 3 / 8},
        {"params": [layer.bias], "weight_decay": 0.5 / 8},
    ]
    optimizer = torch.optim.SGD([*groups, {"params": [*model[1].parameters()]}], lr=0.0)
    pruner = Pruner(model, optimizer, dataset_size=8, log_gamma=-1.0, theta=1.0)
    x = torch.randn(8, 2)
    model(x).sum().backward()
    optimizer.step()
    pruner.step()
    pruner.finalize()
    found = certify(model, pruner, [x, x], lambda x: 0.0 * model(x).sum())
    assert found.survivors[0].curvature == pytest.approx(0.5)
    assert found.survivors[0].rest == pytest.approx(1.0)  # only the decay pulls


def test_random_numbers_of_the_model_are_the_same_each_time_and_nobody_elses_are_used() -> None:
    class Rough(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return F.dropout(z, 0.3, training=self.training)

    torch.manual_seed(0)
    model = nn.Sequential(Residual(nn.Linear(4, 4)), Rough(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    pruner = Pruner(model, optimizer, dataset_size=40, log_gamma=-0.1, theta=1.0)
    batches = [(torch.randn(10, 4), torch.randint(0, 2, (10,))) for _ in range(4)]
    first = certified(model, optimizer, pruner, batches)
    torch.manual_seed(1)
    dice = torch.get_rng_state()
    again = certify(model, pruner, batches, lambda b: F.cross_entropy(model(b[0]), b[1]))
    assert torch.equal(torch.get_rng_state(), dice)
    assert again.as_dict() == first.as_dict()


def test_hooks_that_take_a_step_hear_nothing() -> None:
    model, pruner, batches, loss = finalized()
    before = copy.deepcopy(model.state_dict())

    def step(p: Tensor) -> None:
        p.data.sub_(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    certify(model, pruner, batches, loss)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    loss(batches[0]).backward()  # and afterwards they do
    assert not all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("cut", "size", "words"),
    [
        (1, 20, "One batch has no spread"),
        (3, 600, "60 samples and the pruner's dataset_size is 600"),
        (3, 70, None),  # as with a last batch that was dropped
    ],
)
def test_data_that_make_figures_other_than_they_seem_are_noted(
    cut: int, size: int, words: str | None
) -> None:
    model, pruner, batches, loss = finalized()
    pruner.dataset_size = size
    found = certify(model, pruner, batches[:cut], loss, curvature_steps=0)
    assert len(found.notes) == (words is not None)
    assert words is None or words in found.notes[0]


def test_in_half_precision_there_is_no_curvature_and_it_is_said() -> None:
    model = nn.Sequential(Residual(nn.Linear(4, 4)), nn.Linear(4, 2)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=20, log_gamma=-0.1, theta=1.0)
    batches = [(torch.randn(10, 4).bfloat16(), torch.randint(0, 2, (10,))) for _ in range(2)]
    found = certified(model, optimizer, pruner, batches)
    assert found.survivors[0].minimum is None
    assert any("half precision" in note for note in found.notes)


def test_the_price_is_that_of_the_last_step() -> None:
    model, pruner, batches, loss = finalized()
    pruner.log_gamma = lambda step: -float(step)
    assert certify(model, pruner, batches, loss, curvature_steps=0).survivors[0].price == pruner.num_steps


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"curvature_steps": -1}, "curvature_steps=-1"),
        ({"curvature_samples": 0}, "must be 1 or more"),
        ({"ladder_samples": -1}, "the others 0 or more"),
    ],
)
def test_a_wrong_number_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        certify(*finalized(), **options)


@pytest.mark.parametrize(
    ("wrong", "words"), [("each", "one number"), ("nan", "mean loss over the data is nan")]
)
def test_a_loss_that_is_no_mean_is_refused(wrong: str, words: str) -> None:
    model, pruner, batches, _ = finalized()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each if wrong == "each" else each.mean() * math.nan

    with pytest.raises(ValueError, match=words):
        certify(model, pruner, batches, loss)


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


def test_the_certificate_of_a_small_dataset_has_a_finite_interval(tmp_path) -> None:
    run, runner = tmp_path / "run", CliRunner()
    quick = ["--epochs", "2", "--set", "log_gamma=-1", "--no-worth", "--out", str(run)]
    assert runner.invoke(app, ["train", "diabetes", *quick]).exit_code == 0
    said = runner.invoke(app, ["certify", str(run), "--steps", "0", "--json"])
    rows = json.loads(said.output)["survivors"]
    assert rows
    assert all(row["low"] is not None and row["low"] < row["high"] for row in rows)


def test_what_is_no_finished_run_with_a_price_is_refused(tmp_path) -> None:
    runner = CliRunner()

    def refused(place: Any, words: str) -> None:
        said = runner.invoke(app, ["certify", str(place)])
        assert said.exit_code == 2
        assert words in " ".join(said.output.split())

    refused(tmp_path / "none", "does not exist")
    file = tmp_path / "file"
    file.write_text("")
    refused(file, "is a file")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no finished run")
    dense = tmp_path / "dense"
    quick = ["--epochs", "1", "--out", str(dense)]
    assert runner.invoke(app, ["train", "digits-dense", *quick]).exit_code == 0
    refused(dense, "without pruning")
    run = tmp_path / "run"
    assert runner.invoke(app, ["train", "digits", "--out", str(run), *QUICK]).exit_code == 0
    (run / "checkpoint.pt").unlink()
    refused(run, "has no checkpoint.pt")
    (run / "recipe.json").write_text("{}")
    refused(run, "recipe.json has no 'seed'")
    (run / "recipe.json").write_text("[]")
    refused(run, "cannot be read as a run")
