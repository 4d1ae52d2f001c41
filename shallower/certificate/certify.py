"""The certificate of a network: every block against its conditions, the whole against the problem's."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shallower.aside import same_dice
from shallower.certificate.cost import Cost, First
from shallower.certificate.deaths import Death, deaths
from shallower.certificate.ladder import Rung, price_ladder
from shallower.certificate.survivors import Survivor, decays, judge, rest
from shallower.pruner import Pruner
from shallower.worth import Measured, measured, priced

APART = {"AdamW", "Adafactor", "Muon"}  # which decay weights apart from their gradient


def _decoupled(optimizer: torch.optim.Optimizer) -> bool:
    groups = (group.get("decoupled_weight_decay", False) for group in optimizer.param_groups)
    return any(kind.__name__ in APART for kind in type(optimizer).__mro__) or any(groups)


@dataclass(frozen=True)
class Certificate:
    """What is known of a trained network's optimality.

    The KKT residual has two parts: how far all weights are from rest, as for a survivor's O3, and by how much
    survivors fall short of their prices, as a share of these. Both are 0 at a solution. A removed block is at
    one of its own: w = 0, theta = 0, with the multiplier -log gamma > 0.
    """

    survivors: list[Survivor]
    deaths: list[Death]
    ladder: list[Rung]
    weights_residual: float
    theta_residual: float
    notes: list[str]

    @property
    def kkt_residual(self) -> float:
        """The larger of the two parts."""
        return max(self.weights_residual, self.theta_residual)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None where a number is not finite."""
        return _finite({**asdict(self), "kkt_residual": self.kkt_residual})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def certify(
    model: nn.Module,
    pruner: Pruner,
    data: Iterable[Any],
    loss: Callable[[Any], Tensor],
    *,
    curvature_steps: int = 100,
    curvature_samples: int = 1024,
    ladder_samples: int = 10_000,
    score: Callable[[], float] | None = None,
) -> Certificate:
    """Check the paper's optimality conditions on `model`, which `pruner` has finalised, and not finished.

    `data` gives the batches of the whole training set, and may be iterated many times; `loss(batch)` runs the
    model on one and returns the mean loss, as for `worth`:

        certify(model, pruner, loader, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))

    The interval of O2 comes from the spread over batches: give some dozens of them, in a random order.
    Curvature is taken with at most `curvature_steps` Lanczos steps on some `curvature_samples`, and tried on
    ten times as many others; with 0 steps, not at all. The first rung of the ladder is measured on all data,
    further ones on `ladder_samples`, and with 0 there is no ladder; `score()` rates the model on each, for
    example by its accuracy on a test set. Compiled blocks run as they were written: compiled ones have no
    second derivative. lambda is that of the pruner's optimiser: if another one fine-tuned the survivors,
    call `pruner.use_optimizer(it)` first.
    """
    _check(model, pruner, data, curvature_steps, curvature_samples, ladder_samples)
    with _eager(), same_dice(model):
        found = measured(pruner, pruner.alive, data, loss)
        if not math.isfinite(found.loss):
            raise ValueError(
                f"The mean loss over the data is {found.loss}: such a network has no optimality."
            )
        cost, notes = Cost(pruner, data, loss), [*_notes(pruner), *_of_data(pruner, found)]
        learned = {p for group in pruner.optimizer.param_groups for p in group["params"]}
        trained = [p for p in model.parameters() if p.requires_grad and p in learned]
        held = {p for n in pruner.alive for p in pruner.vitals.weights[n] if isinstance(p, nn.Parameter)}
        everything = list(dict.fromkeys([*trained, *held]))
        slopes = dict(zip(everything, cost.slopes(everything), strict=True))
        steps = curvature_steps if curvature_steps and _twice(cost, everything, notes) else 0
        options = {"limit": curvature_samples, "steps": steps}
        survivors = [judge(cost, row, slopes, **options) for row in priced(pruner, found)]
        some = First(data, ladder_samples)
        rungs = price_ladder(pruner, some, loss, score, start=found) if ladder_samples else []
    decay = decays(pruner.optimizer, pruner.dataset_size)
    pull = [decay.get(p, 0.0) * p.detach() for p in trained]
    short = [max(0.0, row.price - row.benefit) / row.price for row in survivors if row.price > 0]
    return Certificate(
        survivors=survivors,
        deaths=deaths(pruner),
        ladder=rungs,
        weights_residual=rest([slopes[p] for p in trained], pull),
        theta_residual=max(short, default=0.0),
        notes=notes,
    )


def _eager() -> AbstractContextManager[Any]:
    """Nothing runs compiled; before PyTorch 2.6 there is no way to say so, and O1 may go unchecked."""
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


def _notes(pruner: Pruner) -> list[str]:
    """What of this network the conditions do not cover."""
    notes = []
    if _decoupled(pruner.optimizer):
        notes.append("The optimiser decays weights apart from its gradient: at rest, O3 need not hold.")
    whole = [name for name in pruner.alive if name not in pruner.vitals.affine]
    if whole:
        notes.append(
            f"{', '.join(whole)}: the branch does not end in an affine map that is trained, so w is all of "
            "it, and there is no first-order estimate to print."
        )
    still = [n for n in pruner.alive if not any(p.requires_grad for p in pruner.vitals.weights[n])]
    if still:
        notes.append(f"{', '.join(still)}: the last layer is not trained, so O1 and O3 need not hold.")
    return notes


def _of_data(pruner: Pruner, found: Measured) -> list[str]:
    """What of these data makes figures other than they seem."""
    notes, n = [], pruner.dataset_size
    if found.batches == 1:
        notes.append("One batch has no spread: O2 has no interval, and O3 no scale but the gradient itself.")
    if abs(found.samples - n) > found.samples / found.batches:
        notes.append(
            f"The data have {found.samples:,} samples and the pruner's dataset_size is {n:,}: costs are "
            f"those of {n:,} samples like these."
        )
    return notes


def _check(
    model: nn.Module, pruner: Pruner, data: Iterable[Any], steps: int, samples: int, on_ladder: int
) -> None:
    if steps < 0 or samples < 1 or on_ladder < 0:
        raise ValueError(
            f"Found curvature_steps={steps}, curvature_samples={samples}, ladder_samples={on_ladder}; the "
            "second must be 1 or more, the others 0 or more."
        )
    if any(p.is_complex() for p in model.parameters()):
        raise TypeError("The model has complex parameters, whose optimality the conditions do not speak of.")
    if pruner.model is not model:
        raise ValueError("The pruner is of another model; pass the one that it was built with.")
    if not pruner.finalized or pruner.finished:
        raise RuntimeError(
            f"The pruner has {'finished' if pruner.finished else 'not been finalised'}. A network is "
            "certified between `pruner.finalize()` and `pruner.finish()`; the run of a recipe by "
            "`shallower certify RUN`."
        )
    if iter(data) is data:
        raise TypeError("Found an iterator, which can be read once; give a list of batches or a DataLoader.")


def _twice(cost: Cost, parameters: list[nn.Parameter], notes: list[str]) -> bool:
    """Whether the loss can be differentiated twice: not every operator can, and in half precision the second
    derivative would be rounding."""
    if any(torch.finfo(p.dtype).bits < 32 for p in parameters):
        notes.append("O1 was not checked: the parameters are in half precision. Certify `model.float()`.")
        return False
    try:
        cost.differentiate_twice(parameters)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        notes.append(f"O1 was not checked: the loss has no second derivative here ({reason}).")
        return False
    return True
