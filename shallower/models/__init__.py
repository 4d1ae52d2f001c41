"""The paper's networks, as plain modules: every block that may be pruned is a `Residual`."""

from shallower.models.lenet import cnn, lenet5, lenet300
from shallower.models.mlp import fc, general, mlp
from shallower.models.resnet import resnet, resnet20, resnet50, resnet56, resnet110
from shallower.models.vgg import vgg16

__all__ = [
    "cnn",
    "fc",
    "general",
    "lenet5",
    "lenet300",
    "mlp",
    "resnet",
    "resnet20",
    "resnet50",
    "resnet56",
    "resnet110",
    "vgg16",
]
