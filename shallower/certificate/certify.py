"""The certificate of a network: every block against its conditions, the whole against the problem's."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shallower.certificate.deaths import Death, deaths
from shallower.certificate.ladder import Rung, price_ladder
from shallower.certificate.survivors import Cost, Survivor, decays, judge, rest
from shallower.pruner import Pruner
from shallower.worth import worth


def _decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it decays weights apart from its gradient."""
    groups = (group.get("decoupled_weight_decay", False) for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.AdamW) or any(groups)


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
    curvature_steps: int = 30,
    curvature_samples: int = 4096,
    ladder: bool = True,
    score: Callable[[], float] | None = None,
) -> Certificate:
    """Check the paper's optimality conditions on `model`, which `pruner` has finalised, and not finished.

    `data` gives the batches of the whole training set, and may be iterated many times; `loss(batch)` runs the
    model on one and returns the mean loss, as for `worth`:

        certify(model, pruner, loader, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))

    Curvature is taken with `curvature_steps` Lanczos steps on some `curvature_samples`; with 0, not at all.
    `score()` rates the model on each rung of the ladder, for example by its accuracy on a test set.
    """
    _check(model, pruner, data)
    cost = Cost(pruner, data, loss)
    earned = worth(pruner, data, loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    held = {p for row in earned for p in pruner.vitals.weights[row.block] if isinstance(p, nn.Parameter)}
    everything = list(dict.fromkeys([*trained, *held]))
    slopes = dict(zip(everything, cost.slopes(everything), strict=True))
    notes: list[str] = []
    steps = curvature_steps if _twice(cost, everything, notes) else 0
    options = {"limit": curvature_samples, "steps": steps}
    survivors = [judge(cost, row, slopes, **options) for row in earned]
    decay = decays(pruner.optimizer, pruner.dataset_size)
    if _decoupled(pruner.optimizer):
        notes.append("The optimiser decays weights apart from its gradient: at rest, O3 need not hold.")
    short = [max(0.0, row.price - row.benefit) / row.price for row in survivors if row.price > 0]
    return Certificate(
        survivors=survivors,
        deaths=deaths(pruner),
        ladder=price_ladder(pruner, data, loss, score) if ladder else [],
        weights_residual=rest(
            [slopes[p] for p in trained], [decay.get(p, 0.0) * p.detach() for p in trained]
        ),
        theta_residual=max(short, default=0.0),
        notes=notes,
    )


def _check(model: nn.Module, pruner: Pruner, data: Iterable[Any]) -> None:
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
    """Whether the loss can be differentiated twice, which not every operator can."""
    try:
        cost.differentiate_twice(parameters)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        notes.append(f"O1 was not checked: the loss has no second derivative here ({reason}).")
        return False
    return True
