"""MNIST convolutional networks: the paper's CNN-L, and the LeNet baselines."""

from collections import OrderedDict
from typing import Literal, get_args

from torch import nn

from shallower.models._common import Form, at_least, layer_block, one_of

Pool = Literal["end-of-stage", "after-stem"]


def cnn(
    depth: int,
    *,
    pool: Pool = "end-of-stage",
    form: Form = "relu-outside",
    gain: float = 1.0,
    classes: int = 10,
) -> nn.Sequential:
    """MNIST CNN-L with L = `depth` convolutions of 5x5, half with 6 features and half with 16.

        relu-outside    z_next = relu(z + W z + b)
        relu-inside     z_next = z + relu(W z + b)

    The first convolution of each half changes the number of features (1 to 6, 6 to 16), has no skip
    and is never pruned; the other L/2 - 1 of each half are blocks. `pool` sets where a half is
    pooled: "end-of-stage" runs its blocks on 24x24 and 8x8 images, "after-stem" on 12x12 and 4x4,
    at a quarter of their cost and with the same parameters. Blocks start at `gain` times PyTorch's default.
    """
    at_least(2, depth=depth)
    at_least(1, classes=classes)
    if depth % 2:
        raise ValueError(
            f"depth={depth} was given; half of the convolutions have 6 features and half have 16, so the "
            f"depth is even. Write cnn({depth - 1}) or cnn({depth + 1})."
        )
    one_of(get_args(Pool), pool=pool)
    one_of(get_args(Form), form=form)

    def stage(channels: int, features: int) -> nn.Sequential:
        entry = [nn.Conv2d(channels, features, 5), nn.ReLU()]
        blocks = [
            layer_block(nn.Conv2d(features, features, 5, padding=2), form, gain)
            for _ in range(depth // 2 - 1)
        ]
        if pool == "end-of-stage":
            return nn.Sequential(*entry, *blocks, nn.MaxPool2d(2))
        return nn.Sequential(*entry, nn.MaxPool2d(2), *blocks)

    return nn.Sequential(
        OrderedDict(
            stage1=stage(1, 6),
            stage2=stage(6, 16),
            head=nn.Sequential(
                nn.Flatten(),
                nn.Linear(256, 120),
                nn.ReLU(),
                nn.Linear(120, 84),
                nn.ReLU(),
                nn.Linear(84, classes),
            ),
        )
    )


def lenet5() -> nn.Sequential:
    """LeNet5 for MNIST: the CNN-L of two convolutions, without a block to prune."""
    return cnn(2)


def lenet300() -> nn.Sequential:
    """LeNet300-100 for MNIST: dense layers of 300 and 100, without a block to prune."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
