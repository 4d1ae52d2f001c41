"""What the networks share: the checks of their arguments and the initial weights of the image networks."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import nn

from shallower.residual import Residual

Form = Literal["relu-outside", "relu-inside"]


def at_least(least: int, **sizes: int) -> None:
    """Raise `ValueError` unless every one of `sizes` is a whole number of at least `least`."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < least:
            raise ValueError(f"{name}={size!r} was given; it must be a whole number of at least {least}.")


def one_of(possible: Sequence[str], **choice: str) -> None:
    """Raise `ValueError` unless the one `choice` is among `possible`."""
    for name, value in choice.items():
        if value not in possible:
            calls = " or ".join(f'{name}="{option}"' for option in possible)
            raise ValueError(f"{name}={value!r} was given; write {calls}.")


def he_(model: nn.Module) -> None:
    """He's initial weights for every convolution, in place.

        W ~ Normal(0, 2 / (filters * kernel area)),    b = 0

    Normalisations keep scale 1 and dense layers keep PyTorch's default. No block starts at zero:
    a branch whose last layer is zero has zero worth, and the method would never wake it.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def layer_block(layer: nn.Module, form: Form, gain: float) -> Residual:
    """A block of a single layer W, with the ReLU outside of the gate or inside.

        relu-outside    z_next = relu(z + W z + b)
        relu-inside     z_next = z + relu(W z + b)

    Its initial weights are `gain` times PyTorch's default.
    """
    one_of(get_args(Form), form=form)
    if not gain > 0:
        raise ValueError(f"gain={gain} was given; it must be positive: a layer at zero would never wake up.")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(gain)
    return (
        Residual(layer, tail=nn.ReLU())
        if form == "relu-outside"
        else Residual(nn.Sequential(layer, nn.ReLU()))
    )
