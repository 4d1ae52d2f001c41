"""One recipe for each number that the paper publishes: every hyper-parameter, and the figure beside it.

Where a recipe departs from the printed settings, or fills in what the paper leaves open, `departs` says so.
Common to all but the FC recipes: an epoch is a permutation of the data, where Algorithm 1 draws with
replacement. Common to those on MNIST: inputs in [0, 1], and the optimiser's moments are new when fine-tuning
begins; the paper says neither.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class Paper(BaseModel):
    """What the paper reports: mean and, where it has one, standard deviation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracy: float | None = None
    accuracy_sd: float | None = None
    layers: float | None = None
    layers_sd: float | None = None
    ppr: float | None = None
    ppr_sd: float | None = None
    fpr: float | None = None
    fpr_sd: float | None = None
    params: float | None = None  # of the pruned network, in millions
    macs: float | None = None  # in billions


class Recipe(BaseModel):
    """Everything that decides a run but its seed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    task: str
    network: str  # a function of shallower.models
    options: dict[str, Any] = {}  # its arguments
    fixed_layers: int = Field(default=0, ge=0)  # "layers": these, and for each block kept so many more,
    layers_per_block: int = Field(default=1, ge=1)  # as the paper counts

    epochs: int = Field(ge=1)
    batch_size: int = Field(default=64, ge=1)
    replacement: bool = False
    augment: bool = False
    pixels: Literal["unit", "standard"] = "unit"  # inputs in [0, 1], or of mean 0 and variance 1
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: float = Field(default=1e-3, gt=0)
    cosine: bool = False
    finetune_lr: float | None = Field(
        default=None, gt=0
    )  # from the finalising epoch on; else the schedule goes on
    fresh_moments: bool = False  # of the optimiser, when fine-tuning begins
    decay: float = Field(default=1.0, ge=0)  # lambda; the optimiser's weight decay is lambda / N

    log_gamma: float | None = Field(default=None, lt=0)  # None: the dense network
    begin_epoch: int | None = Field(default=None, ge=0)  # of learning theta, and of the ramp; None: at once
    ramp_epochs: float = Field(default=0, ge=0)  # log_gamma is reached at their end
    multipliers: dict[str, float] = {}  # of log_gamma, by a block's name or the module that it is in
    estimator: Literal["first_order", "flip"] = "first_order"
    estimate_every: int | None = Field(default=None, ge=1)  # theta learns in every k-th step; None: in each
    theta: float = Field(default=0.75, gt=0, le=1)
    theta_lr: float = Field(default=1e-4, gt=0)
    theta_optimizer: Literal["adam", "sgd"] = "adam"  # sgd: steps in proportion to what a block lacks
    tolerance: float = Field(default=0.01, ge=0, lt=1)
    finalize_epoch: int | None = Field(default=None, ge=1)  # epochs before it are stochastic
    threshold: float = Field(default=0.1, ge=0, le=1)

    paper: Paper = Paper()
    departs: str = ""  # from the printed settings

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.finalize_epoch is not None and self.finalize_epoch > self.epochs:
            raise ValueError(
                f"finalize_epoch={self.finalize_epoch} lies behind the last of {self.epochs} epochs; "
                f"`--epochs {self.epochs}` brings the whole recipe into so many"
            )
        begin, end = self.begin_epoch or 0, self.finalize_epoch or self.epochs
        if self.ramp_epochs > end:
            raise ValueError(
                f"ramp_epochs={self.ramp_epochs:g} are more than the {end} in which theta learns, so "
                "log_gamma would never be reached"
            )
        if begin >= end or (self.ramp_epochs and begin >= self.ramp_epochs):
            raise ValueError(
                f"begin_epoch={begin} must lie before finalize_epoch={end}, and before the end of the ramp, "
                f"ramp_epochs={self.ramp_epochs:g}, if there is one"
            )
        return self

    @property
    def dense(self) -> bool:
        return self.log_gamma is None

    def rescaled(self, epochs: int) -> "Recipe":
        """The same run in another number of epochs: a miniature in which everything happens in proportion.

        The learning rate follows its schedule over the whole run, log gamma is ramped and the network
        finalised at the same fractions of it, and theta, which has fewer steps for the same way, takes
        longer ones. A run is finalised between two epochs, and fine-tuned for one at least, if there are two;
        the steps of theta are as long as the epochs in which it then learns ask for.
        """
        if epochs < 1:
            raise RecipeError(f"Found epochs={epochs}; a run has at least 1.")
        ratio = epochs / self.epochs
        begin, ramp, end = self.begin_epoch, self.ramp_epochs * ratio, self.finalize_epoch
        if end is not None:
            last = epochs - 1 if end < self.epochs and epochs > 1 else epochs
            end = min(max(round(end * ratio), 1), last)
            if ramp >= end:  # in the few epochs that there are
                ramp = self.ramp_epochs / (self.finalize_epoch or 1) * end
        latest = min(math.ceil(ramp) or epochs, end or epochs) - 1
        if begin and latest < 1:
            raise RecipeError(
                f"In {epochs} epochs none is left before theta learns (begin_epoch={begin} of {self.epochs}, "
                f"finalize_epoch={self.finalize_epoch}, ramp_epochs={self.ramp_epochs:g}). Take more epochs, "
                "or let it learn from the first step: --set begin_epoch=null."
            )
        begin = begin and min(max(round(begin * ratio), 1), latest)
        learning = (self.finalize_epoch or self.epochs) - (self.begin_epoch or 0)  # in so many epochs
        changes = {
            "epochs": epochs,
            "begin_epoch": begin,
            "ramp_epochs": ramp,
            "finalize_epoch": end,
            "theta_lr": self.theta_lr * (learning / ((end or epochs) - (begin or 0))),
        }
        return Recipe.model_validate({**self.model_dump(), **changes})

    @property
    def settings(self) -> dict[str, Any]:
        """What a run depends on; neither names nor the paper's figures."""
        return self.model_dump(mode="json", exclude={"name", "paper", "departs"})


class RecipeError(ValueError):
    """A recipe, a field or a value that does not exist; the text lists those that do."""


def recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe `name`, with some fields set to other values."""
    if name not in RECIPES:
        raise RecipeError(f"There is no recipe {name!r}. There are: {', '.join(RECIPES)}.")
    found = RECIPES[name]
    wrong = [key for key in overrides or {} if key not in Recipe.model_fields or key in ("name", "paper")]
    if wrong:
        fields = [f for f in Recipe.model_fields if f not in ("name", "paper")]
        raise RecipeError(f"A recipe has no field {', '.join(wrong)}. It has: {', '.join(fields)}.")
    values = {**found.model_dump(), **(overrides or {})}
    if isinstance(values["options"], Mapping) and values["network"] == found.network:  # the others stay
        values["options"] = {**found.options, **values["options"]}
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc'])) or name}: {e['msg']}" for e in error.errors())
        raise RecipeError(f"These values do not fit the recipe {name}: {reasons}.") from error


def changes(recipe: Recipe) -> dict[str, Any]:
    """The fields in which a recipe differs from the one of its name; `recipe(name, changes)` is it again."""
    base = RECIPES.get(recipe.name, recipe).settings
    return {field: value for field, value in recipe.settings.items() if value != base[field]}


def label(recipe: Recipe) -> str:
    """`digits`, or `digits log_gamma=-100` where a field differs from the recipe's."""
    found = changes(recipe).items()
    words = ["dense" if f == "log_gamma" and v is None else f"{f}={_short(v)}" for f, v in found]
    return " ".join([recipe.name, *words])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mnist(name: str, *, task: str = "mnist", epochs: int = 60, **fields: Any) -> Recipe:
    """50 epochs of Adam at 1e-3 and 10 at 1e-4, batches of 64, lambda 1."""
    common: dict[str, Any] = {"finalize_epoch": 50, "threshold": 1e-3, "theta": 0.1, "theta_lr": 1e-3}
    common |= {"finetune_lr": 1e-4, "fresh_moments": True}
    return Recipe(name=name, task=task, epochs=epochs, **{**common, **fields})


_FC: dict[str, Any] = {
    "network": "fc",
    "fixed_layers": 1,
    "log_gamma": -200.0,
    "theta_lr": 2e-3,
    "replacement": True,
    "departs": (
        "theta starts at 0.1 and learns at 2e-3, the blocks' initial weights are 0.3 of PyTorch's; "
        "the block is z + relu(W z + b)"
    ),
}
_CNN: dict[str, Any] = {
    "network": "cnn",
    "fixed_layers": 1,
    "log_gamma": -50.0,
    "theta": 0.15,
    "theta_lr": 2.5e-3,
    "departs": (
        "theta starts at 0.15 and learns at 2.5e-3, the blocks' initial weights are 0.45 of PyTorch's, "
        "pooling at the end of each stage; the block is z + relu(W z + b)"
    ),
}


def _fc(depth: int, figures: Paper) -> Recipe:
    return _mnist(
        f"mnist-fc{depth}", options={"depth": depth, "form": "relu-inside", "gain": 0.3}, paper=figures, **_FC
    )


def _cnn(depth: int, figures: Paper) -> Recipe:
    return _mnist(
        f"mnist-cnn{depth}",
        options={"depth": depth, "pool": "end-of-stage", "form": "relu-inside", "gain": 0.45},
        paper=figures,
        **_CNN,
    )


def _resnet(
    dataset: str, depth: int, label: str, log_gamma: float | None, paper: Paper, **fields: Any
) -> Recipe:
    """182 epochs of SGD with a cosine, log gamma ramped up to epoch 105, finalised at 150."""
    options = {"depth": depth, "classes": 10 if dataset == "cifar10" else 100, "final_norm": "bare"}
    return Recipe(
        name=f"{dataset}-resnet{depth}-{label}",
        task=dataset,
        network="resnet",
        options=options,
        fixed_layers=2,
        layers_per_block=2,
        epochs=182,
        batch_size=128,
        augment=True,
        pixels="standard",
        optimizer="sgd",
        lr=0.1,
        cosine=True,
        decay=1.5,
        log_gamma=log_gamma,
        ramp_epochs=0 if log_gamma is None else 105,
        finalize_epoch=None if log_gamma is None else 150,
        paper=paper,
        departs=(
            "BN without parameters and ReLU before the average over the image: without them the network "
            "diverges at the printed learning rate of 0.1, within some ten steps"
        ),
        **fields,
    )


def _vgg(label: str, log_gamma: float | None, paper: Paper) -> Recipe:
    """300 epochs of SGD with a cosine, finalised at 210, lambda 150."""
    return Recipe(
        name=f"cifar10-vgg16-{label}",
        task="cifar10",
        network="vgg16",
        fixed_layers=3,
        epochs=300,
        batch_size=128,
        augment=True,
        pixels="standard",
        optimizer="sgd",
        lr=0.01,
        cosine=True,
        decay=150.0,
        log_gamma=log_gamma,
        finalize_epoch=None if log_gamma is None else 210,
        paper=paper,
    )


def _imagenet(name: str, log_gamma: float | None, paper: Paper) -> Recipe:
    return Recipe(
        name=name,
        task="imagenet",
        network="resnet50",
        fixed_layers=2,
        layers_per_block=3,
        epochs=90,
        batch_size=256,
        pixels="standard",
        optimizer="adamw",
        cosine=True,
        decay=25.0,
        log_gamma=log_gamma,
        ramp_epochs=0 if log_gamma is None else 35,
        finalize_epoch=None if log_gamma is None else 75,
        paper=paper,
        departs="unsaid: learning rate 1e-3, theta's 1e-4, finalised at epoch 75 and at 0.1, crops and flips",
    )


Spread = tuple[float, float] | float | None  # mean and standard deviation, or one run, or nothing


def _figures(accuracy: Spread, layers: Spread, ppr: Spread, fpr: Spread = None) -> Paper:
    values = {"accuracy": accuracy, "layers": layers, "ppr": ppr, "fpr": fpr}
    pairs = {k: v if isinstance(v, tuple) else (v, None) for k, v in values.items()}
    return Paper(**{k: v[0] for k, v in pairs.items()}, **{f"{k}_sd": v[1] for k, v in pairs.items()})


_ROWS = {  # on CIFAR-10, by depth and -log gamma: accuracy, layers, pPR, fPR
    (56, 250): _figures((93.66, 0.23), (34.4, 2.1), (28.24, 4.15), (38.73, 3.88)),
    (56, 500): _figures((93.10, 0.17), (26.2, 1.5), (38.83, 6.66), (54.52, 2.73)),
    (56, 800): _figures((92.64, 0.45), (21.6, 2.1), (46.10, 4.94), (62.89, 3.87)),
    (56, 1200): _figures((92.45, 0.43), (19.4, 1.9), (51.20, 6.14), (66.93, 3.57)),
    (110, 150): _figures((94.25, 0.19), (51.2, 3.2), (44.35, 2.94), (53.97, 2.90)),
    (110, 250): _figures((93.86, 0.17), (41.4, 3.1), (52.66, 2.81), (63.11, 3.02)),
    (110, 800): _figures((92.83, 0.14), (24.0, 1.3), (68.63, 2.86), (79.44, 1.26)),
}
_X5 = {"multipliers": {"stage3": 5.0}}

_TABLE = [
    Recipe(
        name="digits",
        task="digits",
        network="mlp",
        options={"inputs": 64, "width": 64, "depth": 16, "outputs": 10},
        fixed_layers=2,
        layers_per_block=2,
        epochs=40,
        batch_size=32,
        pixels="standard",
        decay=0.15,
        log_gamma=-28.0,
        theta=0.5,
        theta_lr=1e-2,
        finalize_epoch=35,
        finetune_lr=1e-4,
    ),
    Recipe(
        name="diabetes",
        task="diabetes",
        network="mlp",
        options={"inputs": 10, "width": 32, "depth": 8, "outputs": 1},
        fixed_layers=2,
        layers_per_block=2,
        epochs=60,
        batch_size=32,
        decay=1.0,
        log_gamma=-10.0,  # by five random fifths of the training samples: lower prices keep what overfits
        theta=0.5,
        theta_lr=1e-2,
        finalize_epoch=50,
        finetune_lr=1e-4,
    ),
    _fc(10, _figures((98.27, 0.13), (2.0, 0.0), (47.42, 0.0))),
    _fc(20, _figures((98.22, 0.07), (2.0, 0.0), (66.98, 0.0))),
    _fc(50, _figures((98.25, 0.13), (2.17, 0.40), (84.11, 0.72))),
    _cnn(10, _figures((99.23, 0.06), (2.20, 0.42), (32.62, 3.68))),
    _cnn(20, _figures((99.23, 0.07), (2.70, 0.82), (52.59, 4.13))),
    _cnn(40, _figures((99.32, 0.07), (3.00, 0.67), (71.34, 2.32))),
    _mnist(
        "mnist-lenet300-dense",
        network="lenet300",
        fixed_layers=2,
        paper=Paper(accuracy=98.46, accuracy_sd=0.09),
    ),
    _mnist(
        "mnist-lenet5-dense", network="lenet5", fixed_layers=2, paper=Paper(accuracy=99.20, accuracy_sd=0.08)
    ),
    _mnist(
        "fashion-fc20", task="fashion-mnist", options={"depth": 20, "form": "relu-inside", "gain": 0.3}, **_FC
    ),
    _mnist(
        "fashion-cnn20",
        task="fashion-mnist",
        options={"depth": 20, "pool": "after-stem", "form": "relu-inside", "gain": 0.45},
        **{
            **_CNN,
            "departs": _CNN["departs"].replace("at the end of each stage", "after stem and transition"),
        },
    ),
    _vgg("dense", None, Paper(accuracy=94.05)),
    _vgg("1200", -1200.0, Paper(accuracy=93.86, ppr=72.85, fpr=33.12)),
    _vgg("1800", -1800.0, Paper(accuracy=92.74, ppr=91.55, fpr=63.22)),
    _resnet("cifar10", 56, "dense", None, Paper(accuracy=94.26, accuracy_sd=0.15)),
    *(_resnet("cifar10", 56, f"{price}", -float(price), _ROWS[56, price]) for price in (250, 500, 800, 1200)),
    _resnet("cifar10", 110, "dense", None, Paper(accuracy=94.70, accuracy_sd=0.20)),
    *(_resnet("cifar10", 110, f"{price}", -float(price), _ROWS[110, price]) for price in (150, 250, 800)),
    _resnet("cifar100", 56, "dense", None, Paper(accuracy=72.71)),
    _resnet("cifar100", 56, "250", -250.0, _figures(72.57, 44, 6.53, 22.56)),
    _resnet("cifar100", 56, "1000x5", -1000.0, _figures(72.04, 30, 39.09, 47.94), **_X5),
    _resnet("cifar100", 56, "1400x5", -1400.0, _figures(70.45, 24, 52.11, 59.22), **_X5),
    _resnet("cifar100", 110, "dense", None, Paper(accuracy=75.50)),
    _resnet("cifar100", 110, "100", -100.0, _figures(75.34, 80, 8.06, 27.99)),
    _resnet("cifar100", 110, "100x5", -100.0, _figures(75.05, 88, 19.56, 20.06), **_X5),
    _resnet("cifar100", 110, "500x5", -500.0, _figures(73.98, 42, 60.29, 62.97), **_X5),
    _imagenet("imagenet-resnet50", -17_500.0, Paper(accuracy=74.82, params=17.94, macs=2.80)),
    _imagenet("imagenet-resnet50-dense", None, Paper(accuracy=76.04)),
]
_TWINS = [
    row.model_copy(
        update={
            "name": f"{row.name}-dense",
            "log_gamma": None,
            "departs": f"the network of {row.name}, with its initial weights" if row.departs else "",
        }
    )
    for row in _TABLE
    if row.name in ("digits", "diabetes", "fashion-fc20", "fashion-cnn20")
]
RECIPES: dict[str, Recipe] = {row.name: row for row in [*_TABLE, *_TWINS]}
