"""Residual networks for CIFAR and ImageNet, in the paper's style and in the two original ones."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from torch import nn

from shallower.models._common import at_least, he_, one_of
from shallower.residual import Residual, ZeroPad

Style = Literal["W-B-a-W", "v1", "v2"]
Last = bool | Literal["bare"]


def resnet(
    depth: int | None = None,
    *,
    blocks: Sequence[int] | None = None,
    transitions: bool | Sequence[bool] = True,
    style: Style = "W-B-a-W",
    classes: int = 10,
    widths: Sequence[int] = (16, 32, 64),
    final_norm: Last = False,
) -> nn.Sequential:
    """A CIFAR ResNet of `depth` layers, or with a number of `blocks` for each stage.

        W-B-a-W    z_next = skip(z) + W2 relu(BN(W1 z))
        v1         z_next = relu(skip(z) + BN(W2 relu(BN(W1 z))))
        v2         z_next = skip(z) + W2 relu(BN(W1 relu(BN(z))))

    Each W is a 3x3 convolution without bias. A stage that follows another is entered with stride 2,
    by a shortcut without parameters: every second pixel, and channels of zeros. Three stages of n
    blocks make 6n + 2 layers. `final_norm` puts BN and ReLU before the average over the image; they
    are part of v2 in any case. "bare" puts a BN without parameters of its own there, so that the totals
    are those of the network without.

    `transitions` tells, for each stage but the first, whether its first block is the one with stride
    2. Without it the shortcut stands bare and every block of the stage is of equal width: what is
    left where pruning has taken the block with stride 2. A stage of no blocks is its bare shortcut.
    ResNet-56 pruned to 5, 5 and 6 blocks is

        resnet(blocks=(5, 5, 6), transitions=False)
    """
    one_of(get_args(Style), style=style)
    at_least(1, classes=classes)
    _check_widths(widths)
    counts = _counts(depth, blocks, len(widths))
    entered = _entered_by_block(transitions, counts)

    def stage(number: int) -> Iterator[nn.Module]:
        width, count = widths[number], counts[number]
        if number > 0:
            channels = widths[number - 1]
            added = width - channels
            shortcut = ZeroPad(added // 2, added - added // 2, stride=2)
            if entered[number - 1]:
                yield _block(_basic(channels, width, 2, style), shortcut, style)
                count -= 1
            else:
                yield shortcut
        for _ in range(count):
            yield _block(_basic(width, width, 1, style), None, style)

    stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), *_stem_norm(widths[0], style))
    stages = [nn.Sequential(*stage(number)) for number in range(len(widths))]
    return _assemble(stem, stages, _head(widths[-1], classes, final_norm or style == "v2"))


def resnet20(*, style: Style = "W-B-a-W", classes: int = 10, final_norm: Last = False) -> nn.Sequential:
    """`resnet(20)`: 3 stages of 3 blocks."""
    return resnet(20, style=style, classes=classes, final_norm=final_norm)


def resnet56(*, style: Style = "W-B-a-W", classes: int = 10, final_norm: Last = False) -> nn.Sequential:
    """`resnet(56)`: 3 stages of 9 blocks."""
    return resnet(56, style=style, classes=classes, final_norm=final_norm)


def resnet110(*, style: Style = "W-B-a-W", classes: int = 10, final_norm: Last = False) -> nn.Sequential:
    """`resnet(110)`: 3 stages of 18 blocks."""
    return resnet(110, style=style, classes=classes, final_norm=final_norm)


def resnet50(*, classes: int = 1000, style: Style = "W-B-a-W", final_norm: Last = False) -> nn.Sequential:
    """The ImageNet ResNet-50: 3, 4, 6 and 3 bottlenecks of 1x1, 3x3 and 1x1 convolutions.

        W-B-a-W    z_next = skip(z) + W3 relu(BN(W2 relu(BN(W1 z))))
        v1         z_next = relu(skip(z) + BN(W3 relu(BN(W2 relu(BN(W1 z))))))
        v2         z_next = skip(z) + W3 relu(BN(W2 relu(BN(W1 relu(BN(z))))))

    The first block of each stage has a 1x1 convolution as its skip, which stays where the block is
    pruned; v1 normalises it, the other styles leave it linear. Stride 2 is in the 3x3 convolution.
    """
    one_of(get_args(Style), style=style)
    at_least(1, classes=classes)
    stages: list[nn.Sequential] = []
    channels = 64
    for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        stride = 2 if stages else 1
        entry = _block(
            _bottleneck(channels, width, stride, style),
            _projection(channels, 4 * width, stride, style),
            style,
        )
        channels = 4 * width
        rest = (_block(_bottleneck(channels, width, 1, style), None, style) for _ in range(count - 1))
        stages.append(nn.Sequential(entry, *rest))
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        *_stem_norm(64, style),
        nn.MaxPool2d(3, 2, padding=1),
    )
    return _assemble(stem, stages, _head(channels, classes, final_norm or style == "v2"))


def _basic(channels: int, width: int, stride: int, style: Style) -> nn.Sequential:
    return _branch(
        [
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        ],
        style,
    )


def _bottleneck(channels: int, width: int, stride: int, style: Style) -> nn.Sequential:
    return _branch(
        [
            nn.Conv2d(channels, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        ],
        style,
    )


def _branch(convolutions: Sequence[nn.Conv2d], style: Style) -> nn.Sequential:
    """BN and ReLU between the convolutions; v2 has them before the first too, v1 has BN after the last."""
    layers: list[nn.Module] = []
    for position, convolution in enumerate(convolutions):
        if position > 0 or style == "v2":
            layers += [nn.BatchNorm2d(convolution.in_channels), nn.ReLU()]
        layers.append(convolution)
    if style == "v1":
        layers.append(nn.BatchNorm2d(convolutions[-1].out_channels))
    return nn.Sequential(*layers)


def _block(branch: nn.Module, skip: nn.Module | None, style: Style) -> Residual:
    return Residual(branch, skip, tail=nn.ReLU() if style == "v1" else None)


def _projection(channels: int, features: int, stride: int, style: Style) -> nn.Module:
    convolution = nn.Conv2d(channels, features, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(features)) if style == "v1" else convolution


def _stem_norm(width: int, style: Style) -> list[nn.Module]:
    """BN and ReLU after the first convolution; in v2 the first block brings its own."""
    return [] if style == "v2" else [nn.BatchNorm2d(width), nn.ReLU()]


def _head(features: int, classes: int, norm: Last) -> nn.Sequential:
    if norm not in (True, False, "bare"):
        raise ValueError(f'final_norm={norm!r} was given; write final_norm=True, final_norm=False or "bare".')
    last = [nn.BatchNorm2d(features, affine=norm != "bare"), nn.ReLU()] if norm else []
    return nn.Sequential(*last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def _assemble(stem: nn.Module, stages: Sequence[nn.Module], head: nn.Module) -> nn.Sequential:
    named = {f"stage{number}": stage for number, stage in enumerate(stages, start=1)}
    model = nn.Sequential(OrderedDict(stem=stem, **named, head=head))
    he_(model)
    return model


def _counts(depth: int | None, blocks: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    if (depth is None) == (blocks is None):
        raise ValueError(
            f"depth={depth} and blocks={blocks} were given; exactly one of them says how deep the network "
            "is. Write resnet(56) or resnet(blocks=(9, 9, 9))."
        )
    if blocks is not None:
        if len(blocks) != stages:
            raise ValueError(
                f"blocks={tuple(blocks)} has {len(blocks)} numbers for {stages} widths; write one number of "
                f"blocks for each stage, as in blocks={(3,) * stages}."
            )
        at_least(0, **{f"blocks[{stage}]": count for stage, count in enumerate(blocks)})
        return tuple(blocks)
    assert depth is not None
    at_least(1, depth=depth)
    layers = 2 * stages
    count, odd = divmod(depth - 2, layers)
    if odd or count < 1:
        below = max(count, 1) * layers + 2
        raise ValueError(
            f"depth={depth} was given; {stages} stages of n blocks make {layers}n + 2 layers. "
            f"Write resnet({below}) or resnet({below + layers}), or give blocks for each stage."
        )
    return (count,) * stages


def _entered_by_block(transitions: bool | Sequence[bool], counts: Sequence[int]) -> tuple[bool, ...]:
    """For each stage but the first: is there a block with stride 2? A stage without blocks has none."""
    later = counts[1:]
    if isinstance(transitions, bool):
        return tuple(transitions and count > 0 for count in later)
    if len(transitions) != len(later):
        raise ValueError(
            f"transitions={tuple(transitions)} has {len(transitions)} values for {len(later)} stages entered "
            f"with stride 2; write one for all or one for each, as in transitions={(False,) * len(later)}."
        )
    for number, (entered, count) in enumerate(zip(transitions, later, strict=True), start=1):
        if entered and count == 0:
            raise ValueError(
                f"transitions={tuple(transitions)} asks for a block with stride 2 in a stage of no blocks. "
                f"Write transitions[{number - 1}] = False or blocks[{number}] = 1."
            )
    return tuple(transitions)


def _check_widths(widths: Sequence[int]) -> None:
    at_least(1, **{f"widths[{stage}]": width for stage, width in enumerate(widths)})
    if not widths or sorted(widths) != list(widths):
        raise ValueError(
            f"widths={tuple(widths)} was given; a shortcut can add channels but not drop them, so write one "
            "width or more, none smaller than the one before, as in widths=(16, 32, 64)."
        )
