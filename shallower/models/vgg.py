"""VGG16 for CIFAR, with a skip around every convolution but the first."""

from collections import OrderedDict

from torch import nn

from shallower.models._common import at_least, he_
from shallower.residual import ChannelCopy, Residual

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(*, classes: int = 10) -> nn.Sequential:
    """VGG16 for images of 32x32: 13 convolutions of 3x3 with batch normalisation, two dense layers.

        z_next = relu(skip(z) + BN(W z + b))

    Convolutions 2 to 13 are blocks of their own. The skip is the identity, or [z; z] where the number
    of filters doubles; each of the five stages ends in a max-pool, outside the blocks.
    """
    at_least(1, classes=classes)
    stages, channels = OrderedDict[str, nn.Module](), 3
    for number, filters in enumerate(STAGES, start=1):
        layers: list[nn.Module] = []
        for count in filters:
            layers.append(_layer(channels, count))
            channels = count
        stages[f"stage{number}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes))
    model = nn.Sequential(OrderedDict(**stages, head=head))
    he_(model)
    return model


def _layer(channels: int, filters: int) -> nn.Module:
    branch = nn.Sequential(nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters))
    if channels == 3:
        return branch.append(nn.ReLU())
    skip = nn.Identity() if channels == filters else ChannelCopy(filters // channels)
    return Residual(branch, skip, tail=nn.ReLU())
