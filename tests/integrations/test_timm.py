"""Families of timm, random weights: the laws hold, and every residual block is found."""

import pytest
import torch

from tests.integrations.laws import check_laws

timm = pytest.importorskip("timm")

# the number of blocks, the size of the images, and what makes the model smaller
FAMILIES: dict[str, tuple[int, int, dict[str, int]]] = {
    "beit_base_patch16_224": (6, 64, {"img_size": 64, "depth": 3}),
    "cait_xxs24_224": (10, 64, {"img_size": 64, "depth": 3}),
    "coat_lite_tiny": (8, 64, {"img_size": 64}),
    "coatnet_nano_rw_224": (25, 64, {"img_size": 64}),
    "convmixer_768_32": (32, 64, {}),
    "convnextv2_atto": (12, 64, {}),
    "cspresnet50": (13, 64, {}),
    "darknet53": (23, 64, {}),
    "deit_tiny_patch16_224": (6, 64, {"img_size": 64, "depth": 3}),
    "edgenext_xx_small": (12, 64, {}),
    "efficientformer_l1": (30, 224, {}),
    "efficientnet_b0": (9, 64, {}),
    "eva02_tiny_patch14_224": (6, 64, {"img_size": 64, "depth": 3}),
    "fbnetc_100": (15, 64, {}),
    "ghostnet_050": (16, 64, {}),
    "gmixer_12_224": (24, 64, {"img_size": 64}),
    "gmlp_ti16_224": (30, 64, {"img_size": 64}),
    "hiera_tiny_224": (24, 64, {"img_size": 64}),
    "hrnet_w18_small": (23, 64, {}),
    "inception_next_tiny": (18, 64, {}),
    "mambaout_femto": (18, 64, {}),
    "maxvit_pico_rw_256": (55, 64, {"img_size": 64}),
    "mixer_s32_224": (16, 64, {"img_size": 64}),
    "mnasnet_small": (10, 64, {}),
    "mobilenetv2_050": (10, 64, {}),
    "mobilenetv3_small_050": (7, 64, {}),
    "mobilevit_xxs": (21, 64, {"img_size": 64}),
    "nest_tiny": (24, 64, {"img_size": 64}),
    "nf_regnet_b0": (12, 64, {}),
    "poolformer_s12": (24, 64, {}),
    "pvt_v2_b0": (16, 64, {}),
    "regnetx_002": (13, 64, {}),
    "regnety_002": (13, 64, {}),
    "repvit_m0_9": (49, 64, {}),
    "res2net50_14w_8s": (16, 64, {}),
    "resmlp_12_224": (24, 64, {"img_size": 64}),
    "resnest14d": (4, 64, {}),
    "resnet18": (8, 64, {}),
    "resnext50_32x4d": (16, 64, {}),
    "seresnet18": (8, 64, {}),
    "skresnet18": (8, 64, {}),
    "starnet_s1": (15, 64, {}),
    "swin_tiny_patch4_window7_224": (24, 64, {"img_size": 64}),
    "swinv2_tiny_window8_256": (24, 64, {"img_size": 64}),
    "tnt_s_patch16_224": (15, 64, {"img_size": 64, "depth": 3}),
    "visformer_tiny": (5, 64, {"img_size": 64, "depth": 3}),
    "vit_tiny_patch16_224": (6, 64, {"img_size": 64, "depth": 3}),
    "xception41": (12, 64, {}),
    "xcit_nano_12_p16_224": (14, 64, {"img_size": 64, "depth": 3}),
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_laws_hold(name):
    blocks, size, smaller = FAMILIES[name]
    model = timm.create_model(name, pretrained=False, num_classes=10, **smaller)
    assert len(check_laws(model, torch.randn(2, 3, size, size))) == blocks
