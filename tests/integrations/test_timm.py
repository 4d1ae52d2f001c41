"""Families of timm, random weights: the laws hold, and every residual block is found."""

import pytest
import torch

from tests.integrations.laws import check_laws

timm = pytest.importorskip("timm")

# model: the number of blocks, and the size of the images where that is not 64
FAMILIES: dict[str, tuple[int, int]] = {}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_laws_hold(name):
    blocks, size = FAMILIES[name]
    model = timm.create_model(name, pretrained=False, num_classes=10)
    assert len(check_laws(model, torch.randn(2, 3, size, size))) == blocks
