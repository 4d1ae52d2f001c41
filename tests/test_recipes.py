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
    assert (row.log_gamma, row.options, row.cosine, row.name) == (-100.0, {"depth": 5}, True, "mnist-fc10")
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
        ("mnist-fc10", {"epochs": 10}, "finalize_epoch=50 lies behind"),
    ],
)
def test_a_wrong_recipe_field_or_value_lists_the_right_ones(name, overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(name, overrides)


def test_a_recipe_in_fewer_epochs_keeps_its_proportions():
    """ResNet-56: 182 epochs, log gamma ramped to 105, finalised at 150, theta at 1e-4 per step."""
    short = recipe("cifar10-resnet56-250").rescaled(26)
    assert (short.epochs, short.ramp_epochs, short.finalize_epoch) == (26, 15, 21)
    assert short.theta_lr == pytest.approx(7e-4)
    kept = {"epochs", "ramp_epochs", "finalize_epoch", "theta_lr"}
    long = recipe("cifar10-resnet56-250")
    assert {k: v for k, v in short.settings.items() if k not in kept} == {
        k: v for k, v in long.settings.items() if k not in kept
    }
    assert long.rescaled(182) == long


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
