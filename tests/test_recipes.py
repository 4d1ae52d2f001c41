"""The table of recipes: every published number, and errors that list what exists."""

import pytest

from shallower import data, models
from shallower.blocks import find_blocks
from shallower.recipes import RECIPES, RecipeError, recipe


def test_every_number_of_the_paper_has_a_recipe():
    counts = {
        "mnist-fc": 3,
        "mnist-cnn": 3,
        "cifar10-vgg16": 3,
        "cifar10-resnet56": 5,
        "cifar10-resnet110": 4,
        "cifar100-resnet56": 4,
        "cifar100-resnet110": 4,
        "imagenet-resnet50": 2,
    }
    for start, number in counts.items():
        assert sum(name.startswith(start) for name in RECIPES) == number, start
    assert {"digits", "digits-dense", "diabetes", "cifar100-resnet110-500x5"} <= set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_fits_its_network_and_its_data(name):
    row = RECIPES[name]
    assert row.task in data.NAMES
    build = getattr(models, row.network)
    if row.network in ("resnet50", "vgg16"):  # large: only their names are checked
        return
    blocks = find_blocks(build(**row.options))
    assert bool(blocks) or row.dense
    assert all(any(b.name.startswith(start) for b in blocks) for start in row.multipliers)


def test_dense_baselines_have_no_price_and_the_others_have():
    assert all(row.dense == name.endswith("-dense") for name, row in RECIPES.items())


def test_the_printed_settings_of_the_resnets():
    row = RECIPES["cifar10-resnet56-250"]
    assert (row.epochs, row.finalize_epoch, row.ramp_epochs, row.batch_size) == (182, 150, 105, 128)
    assert (row.decay, row.lr, row.log_gamma, row.theta, row.theta_lr) == (1.5, 0.1, -250.0, 0.75, 1e-4)
    assert RECIPES["cifar100-resnet110-500x5"].multipliers == {"stage3": 5.0}


def test_any_field_can_be_set():
    row = recipe("mnist-fc10", {"log_gamma": -100, "options": {"depth": 5}, "cosine": True})
    options = {"depth": 5, "form": "relu-inside", "gain": 0.3}  # what is not named stays
    assert (row.log_gamma, row.options, row.cosine, row.name) == (-100.0, options, True, "mnist-fc10")
    assert recipe("mnist-fc10") == RECIPES["mnist-fc10"]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("mnist-fc11", {}, "There are: digits"),
        ("mnist-fc10", {"log_gama": -1}, "It has: .*log_gamma"),
        ("mnist-fc10", {"name": "x"}, "no field name"),
        ("mnist-fc10", {"log_gamma": 5}, "log_gamma: Input should be less than 0"),
        ("mnist-fc10", {"epochs": "many"}, "epochs: Input should be a valid integer"),
        ("mnist-fc10", {"estimator": "taylor"}, "'first_order' or 'flip'"),
        ("mnist-fc10", {"epochs": 10}, "finalize_epoch=50 lies behind.*--epochs 10"),
        (
            "cifar10-resnet56-250",
            {"epochs": 100, "finalize_epoch": 90},
            "ramp_epochs=105 are more than the 90",
        ),
        ("cifar10-resnet56-250", {"ramp_epochs": 151}, "are more than the 150 in which theta learns"),
        ("mnist-fc10", {"fixed_layers": -1}, "fixed_layers: Input should be greater"),
        ("cifar10-resnet56-250", {"begin_epoch": 105}, "begin_epoch=105 must lie before .*ramp_epochs=105"),
        ("mnist-fc10", {"begin_epoch": 50}, "before finalize_epoch=50"),
    ],
)
def test_a_wrong_recipe_field_or_value_lists_the_right_ones(name, overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(name, overrides)


def test_a_recipe_in_fewer_epochs_keeps_its_proportions():
    """ResNet-56: 182 epochs, log gamma ramped to 105, finalised at 150, theta at 1e-4 per step."""
    short = recipe("cifar10-resnet56-250").rescaled(26)
    assert (short.epochs, short.ramp_epochs, short.finalize_epoch) == (26, pytest.approx(15), 21)
    assert short.theta_lr == pytest.approx(1e-4 * 150 / 21)  # as far in the epochs in which it learns
    kept = {"epochs", "ramp_epochs", "finalize_epoch", "theta_lr"}
    long = recipe("cifar10-resnet56-250")
    assert {k: v for k, v in short.settings.items() if k not in kept} == {
        k: v for k, v in long.settings.items() if k not in kept
    }
    assert long.rescaled(182) == long
    late = recipe("cifar10-resnet56-250", {"begin_epoch": 30})
    assert [late.rescaled(n).begin_epoch for n in (91, 12, 6)] == [15, 2, 1]
    assert late.rescaled(12).theta_lr == pytest.approx(1e-4 * (150 - 30) / (10 - 2))
    with pytest.raises(RecipeError, match=r"In 2 epochs none is left .* --set begin_epoch=null"):
        late.rescaled(2)
    assert recipe("digits", {"begin_epoch": 1}).rescaled(4).begin_epoch == 1


@pytest.mark.parametrize("epochs", [2, 3, 6, 13])
@pytest.mark.parametrize("name", ["cifar10-resnet56-250", "mnist-fc20", "imagenet-resnet50"])
def test_a_miniature_is_ramped_and_finalised_and_fine_tuned_in_this_order(name, epochs):
    long, short = recipe(name), recipe(name).rescaled(epochs)
    assert short.ramp_epochs < short.finalize_epoch < epochs
    ramp = long.ramp_epochs / long.epochs * epochs  # or, where that would be too late, of what there is
    ramp = ramp if ramp < short.finalize_epoch else long.ramp_epochs / long.finalize_epoch
    assert short.ramp_epochs == pytest.approx(ramp)
    assert abs(short.finalize_epoch / epochs - long.finalize_epoch / long.epochs) <= 1 / epochs


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("epochs", [1, 2, 7, 1000])
def test_every_recipe_can_be_rescaled(name, epochs):
    short = recipe(name).rescaled(epochs)
    assert short.epochs == epochs
    if short.finalize_epoch is not None:
        assert 1 <= short.finalize_epoch <= epochs


def test_no_epochs_at_all_are_refused():
    with pytest.raises(RecipeError, match="at least 1"):
        recipe("digits").rescaled(0)


PRINTED = {  # of each family: what the paper prints for all of its rows
    "mnist-": {
        "epochs": 60,
        "batch_size": 64,
        "optimizer": "adam",
        "lr": 1e-3,
        "finetune_lr": 1e-4,
        "decay": 1.0,
    },
    "cifar10-vgg16": {"epochs": 300, "batch_size": 128, "optimizer": "sgd", "lr": 0.01, "decay": 150.0},
    "cifar10-resnet": {"epochs": 182, "batch_size": 128, "optimizer": "sgd", "lr": 0.1, "decay": 1.5},
    "cifar100-resnet": {"epochs": 182, "batch_size": 128, "optimizer": "sgd", "lr": 0.1, "decay": 1.5},
    "imagenet": {"epochs": 90, "batch_size": 256, "optimizer": "adamw", "decay": 25.0},
}
PRUNING = {  # and of those that are pruned
    "mnist-": {"finalize_epoch": 50, "threshold": 1e-3, "tolerance": 0.01, "ramp_epochs": 0},
    "cifar10-vgg16": {
        "finalize_epoch": 210,
        "threshold": 0.1,
        "theta": 0.75,
        "theta_lr": 1e-4,
        "ramp_epochs": 0,
    },
    "cifar10-resnet": {
        "finalize_epoch": 150,
        "threshold": 0.1,
        "theta": 0.75,
        "theta_lr": 1e-4,
        "ramp_epochs": 105,
    },
    "cifar100-resnet": {
        "finalize_epoch": 150,
        "threshold": 0.1,
        "theta": 0.75,
        "theta_lr": 1e-4,
        "ramp_epochs": 105,
    },
    "imagenet": {"ramp_epochs": 35, "log_gamma": -17_500.0},
}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(tuple(PRINTED))])
def test_every_recipe_has_the_printed_settings(name):
    (family,) = [start for start in PRINTED if name.startswith(start)]
    row = RECIPES[name]
    expected = PRINTED[family] | ({} if row.dense else PRUNING[family])
    assert {field: getattr(row, field) for field in expected} == expected
    assert row.cosine == (not name.startswith("mnist-"))
    assert row.augment == name.startswith("cifar")


@pytest.mark.parametrize(
    ("name", "log_gamma", "figures"),
    [
        ("mnist-fc50", -200, (98.25, 0.13, 2.17, 0.40, 84.11, 0.72, None, None)),
        ("mnist-cnn40", -50, (99.32, 0.07, 3.00, 0.67, 71.34, 2.32, None, None)),
        ("cifar10-vgg16-1800", -1800, (92.74, None, None, None, 91.55, None, 63.22, None)),
        ("cifar10-resnet56-800", -800, (92.64, 0.45, 21.6, 2.1, 46.10, 4.94, 62.89, 3.87)),
        ("cifar10-resnet110-150", -150, (94.25, 0.19, 51.2, 3.2, 44.35, 2.94, 53.97, 2.90)),
        ("cifar100-resnet56-1400x5", -1400, (70.45, None, 24, None, 52.11, None, 59.22, None)),
        ("cifar100-resnet110-100", -100, (75.34, None, 80, None, 8.06, None, 27.99, None)),
        ("imagenet-resnet50", -17500, (74.82, None, None, None, None, None, None, None, 17.94, 2.80)),
    ],
)
def test_a_row_of_each_table_stands_as_it_is_printed(name, log_gamma, figures):
    names = ("accuracy", "layers", "ppr", "fpr")
    fields = [field for name in names for field in (name, f"{name}_sd")] + ["params", "macs"]
    assert tuple(getattr(RECIPES[name].paper, field) for field in fields[: len(figures)]) == figures
    assert RECIPES[name].log_gamma == log_gamma
