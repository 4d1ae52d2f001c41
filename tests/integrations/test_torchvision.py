"""torchvision's residual classifiers, random weights."""

import pytest
import torch

from tests.integrations.laws import check_laws

vision = pytest.importorskip("torchvision").models

# the number of blocks, and the size of the images
MODELS = {
    "resnet18": (8, 64),
    "resnext50_32x4d": (16, 64),
    "regnet_x_400mf": (22, 64),
    "regnet_y_400mf": (16, 64),
    "mobilenet_v2": (10, 64),
    "mobilenet_v3_small": (6, 64),
    "mnasnet0_5": (10, 64),
    "efficientnet_b0": (9, 64),
    "efficientnet_v2_s": (35, 64),
    "convnext_tiny": (18, 64),
    "vit_b_32": (24, 224),
    "swin_t": (24, 64),
    "swin_v2_t": (24, 64),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_laws_hold(name):
    blocks, size = MODELS[name]
    model = vision.get_model(name, weights=None, num_classes=10)
    assert len(check_laws(model, torch.randn(2, 3, size, size))) == blocks
