"""The networks against the paper's totals, and against the form that pruning needs."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from shallower import models
from shallower.residual import ChannelCopy, Residual, ZeroPad

MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)
STYLES = {"W-B-a-W": "W-B-a-W", "v1": "W-B-a-W-B", "v2": "B-a-W-B-a-W"}

Build = Callable[[], nn.Sequential]

EVERY_NETWORK: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "fc": (lambda: models.fc(10), MNIST, 10),
    "fc relu-inside": (lambda: models.fc(10, form="relu-inside"), MNIST, 10),
    "cnn": (lambda: models.cnn(10), MNIST, 10),
    "cnn after-stem": (lambda: models.cnn(10, pool="after-stem"), MNIST, 10),
    "lenet300": (models.lenet300, MNIST, 10),
    "lenet5": (models.lenet5, MNIST, 10),
    "vgg16": (lambda: models.vgg16(classes=7), CIFAR, 7),
    "resnet20": (models.resnet20, CIFAR, 10),
    "resnet20 v1": (lambda: models.resnet20(style="v1", classes=100), CIFAR, 100),
    "resnet20 v2": (lambda: models.resnet20(style="v2"), CIFAR, 10),
    "resnet20 final_norm": (lambda: models.resnet20(final_norm=True), CIFAR, 10),
    "resnet bare": (lambda: models.resnet(blocks=(1, 0, 2), transitions=False, style="v1"), CIFAR, 10),
    "resnet50": (lambda: models.resnet50(classes=5), (3, 64, 64), 5),
    "resnet50 v1": (lambda: models.resnet50(classes=5, style="v1"), (3, 64, 64), 5),
    "resnet50 v2": (lambda: models.resnet50(classes=5, style="v2"), (3, 64, 64), 5),
    "general": (lambda: models.general(4, 5, 8, 3), (5,), 3),
    "mlp": (lambda: models.mlp(64, 16, 3, 2), (64,), 2),
}
every_network = pytest.mark.parametrize("name", EVERY_NETWORK)


def unallocated(build: Build) -> nn.Sequential:
    with torch.device("meta"):
        return build()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def paper_parameters(model: nn.Module) -> int:
    """The paper's count, of VGG16 and of ResNets: every convolution with a bias, dense layers, no BN."""
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    dense = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return sum(m.weight.numel() + m.out_channels for m in convolutions) + sum(parameters(m) for m in dense)


def macs(model: nn.Module, shape: tuple[int, ...]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.to("meta")(torch.zeros(1, *shape, device="meta"))
    return counter.get_total_flops() // 2


def blocks(model: nn.Module) -> list[Residual]:
    return [module for module in model.modules() if isinstance(module, Residual)]


def order(branch: nn.Module) -> str:
    """The layers of a branch in the paper's letters."""
    letters = {nn.Linear: "W", nn.Conv2d: "W", nn.BatchNorm2d: "B", nn.ReLU: "a", nn.Tanh: "a"}
    layers = branch if isinstance(branch, nn.Sequential) else [branch]
    return "-".join(letters[type(layer)] for layer in layers)


def last_layer(branch: nn.Module) -> nn.Module:
    return branch[-1] if isinstance(branch, nn.Sequential) else branch


def prune(model: nn.Module, dead: list[Residual]) -> nn.Module:
    """Put the skip of every dead block in its place, and its tail behind it."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Residual) and module in dead:
            model.set_submodule(name, nn.Sequential(module.skip, module.tail))
    return model


def ratio(part: int, whole: int) -> float:
    """The percentage pruned, to the two digits of the paper's tables."""
    return round(100 * (1 - part / whole), 2)


def test_the_public_names_are_the_networks() -> None:
    functions = [name for name, value in vars(models).items() if inspect.isfunction(value)]
    assert sorted(models.__all__) == sorted(functions)
    assert set(models.__all__) == {
        *("cnn", "fc", "general", "lenet300", "lenet5", "mlp", "vgg16"),
        *("resnet", "resnet20", "resnet50", "resnet56", "resnet110"),
    }


@pytest.mark.parametrize(
    ("build", "total"),
    [
        (lambda: models.fc(10), 170_410),
        (lambda: models.fc(20), 271_410),
        (lambda: models.fc(50), 574_410),
        (lambda: models.fc(10, form="relu-inside"), 170_410),
        (lambda: models.cnn(10), 73_714),
        (lambda: models.cnn(20), 110_324),
        (lambda: models.cnn(40), 183_544),
        (lambda: models.cnn(40, pool="after-stem"), 183_544),
        (lambda: models.general(4, 5, 8, 3), 603),
        (lambda: models.mlp(64, 16, 3, 2), 2_706),
        (models.lenet300, 266_610),
        (models.lenet5, 44_426),
        (models.vgg16, 14_982_474 + 8_448),
        (models.resnet20, 269_050),
        (lambda: models.resnet(32), 463_034),
        (lambda: models.resnet(44), 657_018),
        (models.resnet56, 851_002),
        (models.resnet110, 1_723_930),
        (lambda: models.resnet20(style="v1"), 269_722),
        (lambda: models.resnet56(style="v1"), 853_018),
        (lambda: models.resnet110(style="v1"), 1_727_962),
        (lambda: models.resnet56(style="v2"), 853_018),
        (lambda: models.resnet56(final_norm=True), 851_002 + 128),
        (lambda: models.resnet56(classes=100), 851_002 + 90 * 65),
        (models.resnet50, 25_519_144),
        (lambda: models.resnet50(style="v1"), 25_557_032),  # torchvision's
        (lambda: models.resnet50(style="v2"), 25_549_352),
    ],
)
def test_every_network_has_the_published_number_of_parameters(build: Build, total: int) -> None:
    assert parameters(unallocated(build)) == total


@pytest.mark.parametrize(
    ("build", "shape", "total"),
    [
        (lambda: models.fc(10), MNIST, 169_400),
        (models.lenet300, MNIST, 266_200),
        (models.lenet5, MNIST, 281_640),
        (lambda: models.cnn(10), MNIST, 281_640 + 4 * (900 * 24**2 + 6_400 * 8**2)),
        (lambda: models.cnn(10, pool="after-stem"), MNIST, 281_640 + 4 * (900 * 12**2 + 6_400 * 4**2)),
        (models.vgg16, CIFAR, 313_463_808),
        (models.resnet20, CIFAR, 40_551_040),
        (models.resnet56, CIFAR, 125_485_696),
        (models.resnet110, CIFAR, 252_887_680),
        (lambda: models.resnet20(style="v1"), CIFAR, 40_551_040),
        (lambda: models.resnet20(style="v2"), CIFAR, 40_551_040),
        (models.resnet50, IMAGENET, 4_089_184_256),
    ],
)
def test_every_network_has_the_published_number_of_macs(
    build: Build, shape: tuple[int, ...], total: int
) -> None:
    assert macs(unallocated(build), shape) == total


def test_the_papers_count_leaves_out_batch_normalisation() -> None:
    assert paper_parameters(unallocated(models.vgg16)) == 14_982_474
    assert paper_parameters(unallocated(models.resnet56)) == 850_986
    assert paper_parameters(unallocated(models.resnet110)) == 1_723_914


@pytest.mark.parametrize(
    ("depth", "survivors", "transitions", "layers", "flops_pruned", "parameters_pruned"),
    [
        (56, (5, 5, 6), False, 34, 39.48, 34.20),
        (56, (1, 5, 6), (True, False), 26, 55.46, 36.93),
        (56, (4, 1, 7), (False, True), 26, 55.46, 36.93),
        (56, (2, 3, 5), False, 22, 62.04, 48.87),
        (56, (1, 2, 5), False, 18, 69.56, 51.58),
        (110, (4, 8, 10), False, 46, 58.78, 47.43),
        (110, (4, 6, 9), False, 40, 64.37, 53.86),
        (110, (2, 3, 6), False, 24, 79.30, 70.47),
        (110, (5, 8, 7), (True, False), 42, 62.97, 60.29),  # CIFAR-100, counted by the paper with 10 classes
    ],
)
def test_the_pruned_resnets_of_the_paper_come_out_to_the_digit(
    depth: int,
    survivors: tuple[int, int, int],
    transitions: bool | tuple[bool, bool],
    layers: int,
    flops_pruned: float,
    parameters_pruned: float,
) -> None:
    dense_parameters, dense_macs = {56: (850_986, 125_485_696), 110: (1_723_914, 252_887_680)}[depth]
    pruned = unallocated(lambda: models.resnet(blocks=survivors, transitions=transitions))
    assert 2 * len(blocks(pruned)) + 2 == layers
    assert ratio(macs(pruned, CIFAR), dense_macs) == flops_pruned
    assert ratio(paper_parameters(pruned), dense_parameters) == parameters_pruned


@pytest.mark.parametrize(
    ("dead", "parameters_pruned", "flops_pruned"),
    [((5, 8, 9, 11, 12, 13), 72.85, 33.12), ((4, 6, 8, 9, 10, 11, 12, 13), 91.55, 63.22)],
)
def test_the_pruned_vggs_of_the_paper_come_out_to_the_digit(
    dead: tuple[int, ...], parameters_pruned: float, flops_pruned: float
) -> None:
    dense = unallocated(models.vgg16)
    pruned = unallocated(models.vgg16)
    convolutions = dict(enumerate(blocks(pruned), start=2))
    prune(pruned, [convolutions[number] for number in dead])
    assert ratio(paper_parameters(pruned), paper_parameters(dense)) == parameters_pruned
    assert ratio(macs(pruned, CIFAR), macs(dense, CIFAR)) == flops_pruned


@pytest.mark.parametrize(("depth", "parameters_pruned"), [(10, 47.42), (20, 66.98)])
def test_the_pruned_dense_networks_of_the_paper_are_two_layers_deep(
    depth: int, parameters_pruned: float
) -> None:
    assert ratio(parameters(models.fc(2)), parameters(models.fc(depth))) == parameters_pruned


@pytest.mark.parametrize("style", STYLES)
def test_a_pruned_resnet_equals_the_one_built_shallow(style: str) -> None:
    pruned = models.resnet20(style=style).eval()
    first, second, third = (blocks(stage) for stage in list(pruned)[1:4])
    prune(pruned, [*first[1:], second[0], third[0], third[2]])
    shallow = models.resnet(blocks=(1, 2, 1), transitions=False, style=style).eval()
    state = zip(shallow.state_dict(), pruned.state_dict().values(), strict=True)
    shallow.load_state_dict(dict(state))
    images = torch.randn(2, *CIFAR)
    assert_close(shallow(images), pruned(images))


def test_blocks_for_each_stage_and_depth_are_two_ways_to_say_the_same() -> None:
    shapes = [(name, p.shape) for name, p in models.resnet20().named_parameters()]
    assert shapes == [(name, p.shape) for name, p in models.resnet(blocks=(3, 3, 3)).named_parameters()]


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: models.fc(10), 9),
        (lambda: models.cnn(10), 8),
        (lambda: models.cnn(40), 38),
        (models.lenet300, 0),
        (models.lenet5, 0),
        (models.vgg16, 12),
        (models.resnet20, 9),
        (models.resnet56, 27),
        (models.resnet110, 54),
        (models.resnet50, 16),
        (lambda: models.resnet(blocks=(0, 0, 0)), 0),
        (lambda: models.general(4, 5, 8, 3), 3),
        (lambda: models.mlp(64, 16, 3, 2), 3),
    ],
)
def test_every_prunable_layer_is_a_block_and_no_other(build: Build, count: int) -> None:
    assert len(blocks(unallocated(build))) == count


@every_network
def test_outputs_have_one_value_for_each_class_and_every_parameter_learns(name: str) -> None:
    build, shape, outputs = EVERY_NETWORK[name]
    torch.manual_seed(0)
    model = build()
    answer: Tensor = model(torch.randn(2, *shape))
    assert answer.shape == (2, outputs)
    answer.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", sorted(EVERY_NETWORK.keys() - {"fc relu-inside"}))
def test_every_branch_ends_in_a_linear_map(name: str) -> None:
    for block in blocks(unallocated(EVERY_NETWORK[name][0])):
        assert isinstance(last_layer(block.branch), nn.Linear | nn.Conv2d | nn.BatchNorm2d)


@every_network
def test_no_branch_starts_dead(name: str) -> None:
    for block in blocks(EVERY_NETWORK[name][0]()):
        weights = [p for p in block.branch.parameters() if p.dim() > 1]
        scales = [m.weight for m in block.branch.modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(weight.count_nonzero() > 0.99 * weight.numel() for weight in weights + scales)


@pytest.mark.parametrize(("style", "layers"), STYLES.items())
def test_a_style_sets_the_order_of_a_branch(style: str, layers: str) -> None:
    tail = nn.ReLU if style == "v1" else nn.Identity
    basic = blocks(unallocated(lambda: models.resnet20(style=style)))
    assert {order(block.branch) for block in basic} == {layers}
    assert {type(block.tail) for block in basic} == {tail}
    bottleneck = blocks(unallocated(lambda: models.resnet50(style=style)))
    longer = {"W-B-a-W": "W-B-a-W-B-a-W", "v1": "W-B-a-W-B-a-W-B", "v2": "B-a-W-B-a-W-B-a-W"}
    assert {order(block.branch) for block in bottleneck} == {longer[style]}
    assert {type(block.tail) for block in bottleneck} == {tail}


def test_only_v2_and_final_norm_normalise_before_the_head() -> None:
    def normalised(model: nn.Sequential) -> bool:
        return any(isinstance(layer, nn.BatchNorm2d) for layer in model[-1])

    assert normalised(models.resnet20(style="v2"))
    assert normalised(models.resnet20(final_norm=True))
    assert not normalised(models.resnet20())
    assert normalised(models.resnet20(final_norm="bare"))
    assert not normalised(models.resnet20(style="v1"))


def test_a_bare_final_norm_has_no_parameters() -> None:
    bare = unallocated(lambda: models.resnet56(final_norm="bare"))
    assert sum(p.numel() for p in bare.parameters()) == 851_002
    with pytest.raises(ValueError, match="final_norm='no' was given"):
        models.resnet20(final_norm="no")  # type: ignore[arg-type]


def test_the_dense_and_vgg_blocks_have_the_order_of_the_paper() -> None:
    def orders(build: Build) -> set[tuple[str, type[nn.Module]]]:
        return {(order(block.branch), type(block.tail)) for block in blocks(unallocated(build))}

    assert orders(lambda: models.fc(10)) == {("W", nn.ReLU)}
    assert orders(lambda: models.fc(10, form="relu-inside")) == {("W-a", nn.Identity)}
    assert orders(lambda: models.cnn(10)) == {("W", nn.ReLU)}
    assert orders(models.vgg16) == {("W-B", nn.ReLU)}
    assert orders(lambda: models.general(4, 5, 8, 3)) == {("W-a-W", nn.Identity)}
    assert orders(lambda: models.mlp(64, 16, 3, 2)) == {("W-a-W", nn.Identity)}


def test_a_skip_has_parameters_only_where_the_paper_gives_it_some() -> None:
    def skips(build: Build) -> list[type[nn.Module]]:
        return [
            type(block.skip) for block in blocks(unallocated(build)) if type(block.skip) is not nn.Identity
        ]

    assert skips(models.vgg16) == [ChannelCopy] * 3
    assert skips(models.resnet56) == [ZeroPad] * 2
    assert skips(models.resnet50) == [nn.Conv2d] * 4
    assert skips(lambda: models.resnet50(style="v1")) == [nn.Sequential] * 4
    assert skips(lambda: models.general(4, 5, 8, 3)) == [nn.Linear] * 3


def test_equation_1_is_what_the_general_network_computes() -> None:
    model = models.general(2, 5, 8, 3, hidden=6)
    (block,) = blocks(model)
    z = torch.randn(4, 5)
    w1, w2, w3, head = block.branch[0], block.branch[2], block.skip.weight, model[-1]
    hidden = torch.tanh(z @ w1.weight.T + w1.bias)
    assert w1.weight.shape == (6, 5)
    assert_close(model(z), head(z @ w3.T + hidden @ w2.weight.T + w2.bias))


def test_the_linear_path_of_the_general_network_starts_orthogonal() -> None:
    w3 = blocks(models.general(3, 8, 8, 2))[1].skip.weight
    assert_close(w3 @ w3.T, torch.eye(8), atol=1e-5, rtol=0)


def test_convolutions_on_cifar_start_as_he_proposed() -> None:
    torch.manual_seed(0)
    for model in (models.resnet20(), models.vgg16()):
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 10_000:
                expected = (2 / (9 * layer.out_channels)) ** 0.5
                assert abs(layer.weight.std().item() / expected - 1) < 0.05


def test_convolutions_on_mnist_start_as_pytorch_does() -> None:
    for layer in models.cnn(10).modules():
        if isinstance(layer, nn.Conv2d):
            bound = (25 * layer.in_channels) ** -0.5
            assert 0.8 * bound < layer.weight.abs().max().item() <= bound


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.fc(0), "depth=0 was given; it must be a whole number of at least 1"),
        (lambda: models.fc(10, width=2.5), "width=2.5 was given"),
        (
            lambda: models.fc(10, form="relu"),
            'form=\'relu\' was given; write form="relu-outside" or form="relu-inside"',
        ),
        (lambda: models.mlp(64, 16, 0, 2), "depth=0 was given"),
        (lambda: models.general(4, 5, 8, 3, hidden=0), "hidden=0 was given"),
        (
            lambda: models.general(4, 5, 8, 3, activation=nn.Sigmoid),
            r"Sigmoid takes 0 to 0\.5; .* activation=nn\.Tanh",
        ),
        (lambda: models.cnn(11), r"depth=11 was given; .* Write cnn\(10\) or cnn\(12\)"),
        (lambda: models.cnn(0), "depth=0 was given; it must be a whole number of at least 2"),
        (lambda: models.cnn(10, pool="never"), 'pool="end-of-stage" or pool="after-stem"'),
        (lambda: models.vgg16(classes=0), "classes=0 was given"),
        (
            lambda: models.resnet(57),
            r"depth=57 was given; .* 6n \+ 2 layers\. Write resnet\(56\) or resnet\(62\)",
        ),
        (lambda: models.resnet(2), r"depth=2 was given; .* Write resnet\(8\) or resnet\(14\)"),
        (lambda: models.resnet(20, style="v3"), "style='v3' was given; write style=\"W-B-a-W\" or"),
        (lambda: models.resnet50(style="v3"), "style='v3' was given"),
        (models.resnet, r"depth=None and blocks=None were given; exactly one"),
        (
            lambda: models.resnet(20, blocks=(3, 3, 3)),
            r"depth=20 and blocks=\(3, 3, 3\) were given; exactly one",
        ),
        (lambda: models.resnet(blocks=(3, 3)), r"has 2 numbers for 3 widths; .* blocks=\(3, 3, 3\)"),
        (lambda: models.resnet(blocks=(3, -1, 3)), r"blocks\[1\]=-1 was given"),
        (
            lambda: models.resnet(20, transitions=(True,)),
            r"has 1 values for 2 stages .* transitions=\(False, False\)",
        ),
        (
            lambda: models.resnet(blocks=(3, 0, 3), transitions=(True, True)),
            r"stage of no blocks\. Write transitions\[0\] = False or blocks\[1\] = 1",
        ),
        (
            lambda: models.resnet(20, widths=(64, 32, 16)),
            r"widths=\(64, 32, 16\) was given; a shortcut can add",
        ),
        (lambda: models.resnet(20, widths=(16, 0, 32)), r"widths\[1\]=0 was given"),
    ],
)
def test_an_impossible_network_is_refused_with_one_that_is_possible(build: Build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
