"""Which blocks are found in a whole model, and what is said of those that are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toy import BasicBlock, PaddedBlock, PreActBlock, block

from shallower import NotResidual, Pruner, Residual, find_blocks, models, split, survey
from shallower.blocks import choose


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def names(model: nn.Module) -> list[str]:
    return [found.name for found in find_blocks(model)]


class ResNet(nn.Module):
    """torchvision's layout: stages made by a function, a stem and a head in the forward."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(kind(4, 4, 1), kind(4, 4, 1))
        self.layer2 = nn.Sequential(kind(4, 8, 2), kind(8, 8, 1))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@pytest.mark.parametrize("kind", [BasicBlock, PreActBlock, PaddedBlock])
def test_every_block_of_a_network_is_found_in_the_order_of_its_modules(kind: type[nn.Module]) -> None:
    assert names(ResNet(kind)) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert survey(ResNet(kind)).rejected == {}


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: models.fc(10), 9),
        (lambda: models.fc(4, form="relu-inside"), 3),
        (lambda: models.cnn(10), 8),
        (models.vgg16, 12),
        (models.resnet20, 9),
        (lambda: models.resnet20(style="v1"), 9),
        (lambda: models.resnet20(style="v2"), 9),
        (models.resnet50, 16),
        (lambda: models.general(4, 5, 8, 3), 3),
        (lambda: models.mlp(64, 16, 3, 2), 3),
        (models.lenet5, 0),
    ],
)
def test_the_papers_networks_have_as_many_blocks_as_residuals(build: Any, count: int) -> None:
    with torch.device("meta"):
        model = build()
    assert len(names(model)) == count == sum(isinstance(m, Residual) for m in model.modules())


def test_lists_dictionaries_and_long_forwards_are_looked_into() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.named["a"](x)

    model = block(
        forward,
        layers=nn.ModuleList([Residual(linear()), linear(), Residual(linear())]),
        named=nn.ModuleDict({"a": Residual(linear())}),
    )
    assert names(model) == ["layers.0", "layers.2", "named.a"]


def test_a_sequential_with_a_residual_forward_is_a_block() -> None:
    class Chained(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    assert names(nn.Sequential(Chained(linear(), nn.ReLU()), nn.Sequential(linear()))) == ["0"]


def test_the_finest_blocks_are_taken() -> None:
    """A long skip around two blocks does not swallow them."""
    assert names(nn.Sequential(Residual(nn.Sequential(Residual(linear()), Residual(linear()))))) == [
        "0.branch.0",
        "0.branch.1",
    ]


def test_a_block_is_found_around_one_that_cannot_be_split() -> None:
    inner = block(lambda self, x: x + self.f(x) if x.sum() > 0 else x, f=linear())
    found = survey(nn.Sequential(Residual(inner)))
    assert [b.name for b in found.blocks] == ["0"]
    assert found.rejected == {}  # what goes with its block is no loss


def test_names_that_only_begin_alike_are_not_inside_each_other() -> None:
    model = nn.Sequential()
    model.add_module("a", Residual(linear()))
    model.add_module("ab", Residual(linear()))
    assert names(model) == ["a", "ab"]


def test_a_block_that_runs_several_times_in_one_place_is_one_block() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x

    assert names(block(forward, layer=Residual(linear()))) == ["layer"]


def test_finding_changes_nothing() -> None:
    model = ResNet(BasicBlock)
    model.layer1[0].bn1.eval()
    before = [(n, id(v), v.tolist()) for n, v in model.state_dict(keep_vars=True).items()]
    modes, classes = [m.training for m in model.modules()], [type(m) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    survey(model)
    assert [(n, id(v), v.tolist()) for n, v in model.state_dict(keep_vars=True).items()] == before
    assert [m.training for m in model.modules()] == modes
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(vars(m)) for m in model.modules()] == attributes


def test_the_blocks_found_are_the_blocks_split() -> None:
    model = ResNet(PreActBlock)
    for found in find_blocks(model):
        alone = split(model.get_submodule(found.name), name=found.name)
        for part in ("head", "branch", "skip", "tail"):
            assert str(getattr(found, part)) == str(getattr(alone, part))


# -- what is passed over -------------------------------------------------------------------------------


def rejected(model: nn.Module) -> dict[str, str]:
    found = survey(model)
    assert found.blocks == []
    return found.rejected


def test_shared_parameters_are_refused_by_name() -> None:
    model = nn.Sequential(Residual(linear()), linear())
    model[1].weight = model[0].branch.weight
    assert rejected(model) == {
        "0": "its branch shares a parameter with 1.weight; untie the two to prune the block"
    }


def test_two_blocks_that_share_a_layer_are_both_refused() -> None:
    layer = linear()
    reasons = rejected(nn.Sequential(Residual(layer), Residual(layer)))
    assert reasons.keys() == {"0", "1"}
    assert "shares a parameter with 1.branch.weight" in reasons["0"]


def test_the_same_module_at_two_names_is_refused() -> None:
    same = Residual(linear())
    assert rejected(nn.Sequential(same, nn.ReLU(), same)) == {
        "0": "the same module stands at 0 and 2; give each place its own copy"
    }


def test_a_model_that_is_itself_a_block_asks_to_be_wrapped() -> None:
    assert rejected(Residual(linear())) == {
        "": "the model itself is one residual block; wrap it: `nn.Sequential(model)`"
    }
    assert names(nn.Sequential(Residual(linear()))) == ["0"]


def test_lazy_parameters_are_told_to_run_one_batch_first() -> None:
    model = nn.Sequential(Residual(nn.LazyLinear(2)))
    assert "run one batch" in rejected(model)["0"]
    model(torch.ones(1, 2))
    assert names(model) == ["0"]


def test_a_branch_without_parameters_is_no_block_and_comes_not_near() -> None:
    assert rejected(nn.Sequential(Residual(nn.ReLU(), skip=linear()))) == {}
    assert rejected(nn.Sequential(linear(), nn.ReLU())) == {}


def test_what_cannot_be_traced_is_named_with_what_to_do() -> None:
    wary = block(lambda self, x: x + self.f(x) if x.sum() > 0 else x, f=linear())
    assert "write the block as `shallower.Residual" in rejected(nn.ModuleList([wary]))["0"]


def test_two_sums_in_one_forward_are_two_blocks() -> None:
    own = block(lambda self, x: (y := x + self.f(x)) + self.g(y), f=linear(), g=linear())
    assert names(nn.ModuleList([own])) == ["0.f", "0.g"]


# -- choosing ------------------------------------------------------------------------------------------


def test_no_block_is_an_error_that_names_what_comes_near() -> None:
    near = block(lambda self, x: x + self.f(x) if x.sum() > 0 else x, f=linear())
    with pytest.raises(ValueError, match=r"(?s)no residual block .*come near:\n  0: torch.fx cannot trace"):
        choose(nn.Sequential(near), None)
    with pytest.raises(ValueError, match=r"branch\(z\)\)\.\nGive the layers a skip, as in `shallower"):
        choose(nn.Sequential(linear()), None)


def test_blocks_are_chosen_by_name_in_the_order_of_the_model() -> None:
    model = nn.Sequential(*(Residual(linear()) for _ in range(3)))
    assert [b.name for b in choose(model, ["2", "0"]).blocks] == ["0", "2"]


def test_an_unknown_name_is_refused_with_those_that_were_found() -> None:
    near = block(lambda self, x, y: x + self.f(y), f=linear())
    model = nn.Sequential(Residual(linear()), near)
    with pytest.raises(ValueError, match=r"'7' cannot be gated: no such .*Found were: \['0'\]"):
        choose(model, ["7"])
    with pytest.raises(ValueError, match=r"'1' cannot be gated: it adds one of its inputs to what"):
        choose(model, ["1"])


def test_a_finder_of_ones_own_decides_alone() -> None:
    model = nn.Sequential(Residual(linear()), Residual(linear()))
    assert [b.name for b in choose(model, lambda m: [split(m[1], name="1")]).blocks] == ["1"]
    with pytest.raises(ValueError, match="no residual block"):
        choose(model, lambda m: [])


def test_blocks_of_another_model_are_refused_even_if_its_children_have_the_same_names() -> None:
    mine = nn.Sequential(block(lambda self, x: torch.relu(x + self.f(x)), f=linear()))
    like = nn.Sequential(block(lambda self, x: torch.tanh(x + self.f(x)), f=linear()))
    other = nn.Sequential(Residual(linear()))
    away = nn.Sequential(linear(), Residual(linear()))
    assert choose(mine, find_blocks(mine)).blocks
    for model in (like, other, away):
        with pytest.raises(ValueError, match=r"Found the block '\d' in blocks=, but the model has no"):
            choose(mine, find_blocks(model))


def test_a_gated_model_is_not_gated_twice() -> None:
    model = nn.Sequential(Residual(linear()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Pruner(model, optimizer, dataset_size=10, log_gamma=-1)
    with pytest.raises(ValueError, match=r"\['0'\] are gated already\. `finish\(\)` the Pruner that did it"):
        choose(model, None)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, which wants scripts no more
def test_a_scripted_model_is_told_to_come_before_it_is_scripted() -> None:
    model = nn.Sequential(Residual(linear()), nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Found a scripted model"):
        choose(torch.jit.script(model), None)
    model[1] = torch.jit.script(model[1])
    assert names(model) == ["0"]


def test_a_reason_is_an_error_of_its_own_kind() -> None:
    assert issubclass(NotResidual, ValueError)
