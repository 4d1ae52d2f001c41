"""What of other people's models can be pruned: the table of docs/models.md. Nothing is downloaded.

python benchmarks/models.py            # all; needs timm, torchvision and transformers
python benchmarks/models.py timm:resnet50 my.module:build
"""

import contextlib
import sys
import warnings
from pathlib import Path

import torch

from shallower import Inspection, inspect_model
from shallower.integrations.zoo import bring

PAGE, MARK = Path(__file__).parents[1] / "docs" / "models.md", "models"
TIMM = """resnet18 resnet50 resnext50_32x4d seresnet18 res2net50_14w_8s resnest14d skresnet18 regnetx_002
regnety_002 tresnet_m cspresnet50 darknet53 dla34 hrnet_w18_small xception41 nf_regnet_b0
efficientnet_b0 mobilenetv2_050 mobilenetv3_small_050 mnasnet_small ghostnet_050 fbnetc_100
convmixer_768_32 convnext_atto convnextv2_atto inception_next_tiny focalnet_tiny_srf starnet_s1
mambaout_femto repvit_m0_9 fastvit_t8 poolformer_s12 caformer_s18 edgenext_xx_small mobilevit_xxs
efficientformer_l1 vit_tiny_patch16_224 deit_tiny_patch16_224 beit_base_patch16_224
eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p16_224 swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 twins_svt_small pvt_v2_b0 nest_tiny tnt_s_patch16_224 visformer_tiny
volo_d1_224 crossvit_tiny_240 davit_tiny hiera_tiny_224 coat_lite_tiny coatnet_nano_rw_224
maxvit_pico_rw_256 mixer_s32_224 resmlp_12_224 gmlp_ti16_224 gmixer_12_224 sequencer2d_s"""
TORCHVISION = """resnet50 wide_resnet50_2 regnet_y_400mf mobilenet_v3_small efficientnet_v2_s convnext_tiny
vit_b_32 swin_t swin_v2_t maxvit_t"""
TRANSFORMERS = "gpt2 llama qwen2 mistral bert roberta t5 vit whisper distilbert opt gpt_neo"


def names() -> list[str]:
    rows = (("timm", TIMM), ("torchvision", TORCHVISION), ("transformers", TRANSFORMERS))
    return [f"{source}:{name}" for source, text in rows for name in text.split()]


def row(name: str, found: Inspection) -> str:
    kinds = [block.kind for block in found.blocks]
    how = ", ".join(f"{kinds.count(k)} {k}" for k in ("Block", "Strand", "Whole") if k in kinds)
    params, macs = found.shares
    size = f"{found.params / 1e6:.1f} M"
    return f"| {name} | {size} | {len(kinds)} | {how} | {params:.1f} | {macs:.1f} | {len(found.rejected)} |"


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for operator in ("nms", "qnms"):  # missing where torchvision was built for another torch
        with contextlib.suppress(RuntimeError):
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
    lines = ["| model | parameters | blocks | of the kind | % of parameters | % of MACs | refused |"]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    print("\n".join(lines))
    for name in sys.argv[1:] or names():
        lines.append(row(name, inspect_model(*bring(name))))
        print(lines[-1], flush=True)
    if not sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(f"<!-- {MARK} -->\n")
        after = rest.partition(f"<!-- /{MARK} -->")[2]
        table = "\n".join(lines)
        PAGE.write_text(f"{before}<!-- {MARK} -->\n{table}\n<!-- /{MARK} -->{after}")


if __name__ == "__main__":
    main()
