"""Folding what a removed block left behind: the function stays, the network gets smaller."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from toy import BasicBlock, PaddedBlock, block, conv

from shallower import Absorption, ChannelCopy, Residual, ZeroPad, absorb, find_blocks, forget, models
from shallower.graphs import replace
from shallower.split import Block

Parameters = dict[str, nn.Parameter]


def remove(model: nn.Module, *dead: str, optimizer: torch.optim.Optimizer | None = None) -> list[Block]:
    """Put the bypasses in the place of the dead blocks, as the pruner does; returns the survivors."""
    blocks = {found.name: found for found in find_blocks(model)}
    for name in dead:
        gone, module = blocks.pop(name), model.get_submodule(name)
        if optimizer is not None:
            forget(optimizer, gone.prunable(module).values())
        replace(model, name, gone.bypass(module))
    return list(blocks.values())


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-30))


def state(model: nn.Module) -> list[tuple[str, int, Any]]:
    return [(name, id(value), value.tolist()) for name, value in model.state_dict(keep_vars=True).items()]


def prune_and_absorb(model: nn.Module, dead: list[str], z: Tensor, **options: Any) -> Absorption:
    """Remove and absorb, and check all the laws that hold whatever the network is."""
    model.eval()
    survivors = remove(model, *dead, optimizer=options.get("optimizer"))
    before: Parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: p.detach().clone() for name, p in before.items()}
    modes = {name: m.training for name, m in model.named_modules()}
    with torch.no_grad():
        expected = model(z)
    size = count(model)

    report = absorb(model, dead, survivors, **options)

    with torch.no_grad():
        assert relative(model(z), expected) < (1e-10 if z.dtype == torch.float64 else 1e-5)
    assert count(model) <= size
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(p is before[name] for name, p in after.items() if name in before)
    new = after.keys() - before.keys()
    touched = " and ".join(report.folded.values()).split(" and ")
    assert all(name.removesuffix(".bias") in touched for name in new)
    for name, parameter in after.items():
        if name in before and name.rpartition(".")[0] not in touched:
            assert torch.equal(parameter, values[name])
    assert all(m.training == modes[name] for name, m in model.named_modules() if name in modes)
    return report


def kept_with(reason: str, model: nn.Module, dead: str, z: Tensor) -> None:
    """The bypass stays, for this reason, and the model is as it was to the bit."""
    model.eval()
    survivors = remove(model, dead)
    before, modules, expected = state(model), dict(model.named_modules()), model(z)
    report = absorb(model, [dead], survivors)
    assert report.folded == {}
    assert list(report.kept) == [dead]
    assert reason in report.kept[dead]
    assert state(model) == before
    assert dict(model.named_modules()) == modules
    assert torch.equal(model(z), expected)


def skipped(skip: nn.Module, inside: int = 2, outside: int = 2, tail: nn.Module | None = None) -> Residual:
    """A dense block that is all skip once its branch is gone."""
    return Residual(nn.Sequential(nn.Linear(inside, 9), nn.Tanh(), nn.Linear(9, outside)), skip, tail)


def convolved(
    skip: nn.Module | None, channels: int, features: int, *, stride: int = 1, tail: nn.Module | None = None
) -> Residual:
    return Residual(conv(channels, features, stride=stride), skip, tail)


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    layer.weight = nn.Parameter(torch.tensor(weight))
    if bias is not None:
        layer.bias = nn.Parameter(torch.tensor(bias))
    return layer


def images(channels: int, size: int = 8) -> Tensor:
    return torch.randn(2, channels, size, size)


# -- a linear map --------------------------------------------------------------------------------------


def test_a_linear_map_is_multiplied_into_the_next_layer() -> None:
    """(1 1) (1 2; 0 1) = (1 3), and 3 + (1 1) (1 0) = 4."""
    model = nn.Sequential(skipped(linear([[1.0, 2.0], [0.0, 1.0]], [1.0, 0.0])), linear([[1.0, 1.0]], [3.0]))
    report = prune_and_absorb(model, ["0"], torch.randn(5, 2))
    assert report == Absorption(folded={"0": "1"})
    assert type(model[0]) is nn.Identity
    assert model[1].weight.tolist() == [[1.0, 3.0]]
    assert model[1].bias.tolist() == [4.0]


def test_an_offset_makes_a_bias_where_there_was_none() -> None:
    model = nn.Sequential(skipped(linear([[2.0]], [5.0]), 1, 1), linear([[3.0]]))
    prune_and_absorb(model, ["0"], torch.randn(5, 1))
    assert (model[1].weight.item(), model[1].bias.item()) == (6.0, 15.0)


def test_an_offset_of_zero_makes_no_bias() -> None:
    model = nn.Sequential(skipped(linear([[2.0]], [0.0]), 1, 1), linear([[3.0]]))
    prune_and_absorb(model, ["0"], torch.randn(5, 1))
    assert model[1].bias is None


def test_equation_2_multiplies_the_map_into_w1_and_w3_of_the_next_block() -> None:
    model = models.general(3, 5, 8, 4, hidden=6).double()
    first, second = model.blocks
    w3 = first.skip.weight.detach().clone()
    expected = [second.branch[0].weight @ w3, second.skip.weight @ w3, second.branch[2].weight.clone()]
    report = prune_and_absorb(model, ["blocks.0"], torch.randn(7, 5, dtype=torch.float64))
    assert report == Absorption(folded={"blocks.0": "blocks.1.branch.0 and blocks.1.skip"})
    assert_close([second.branch[0].weight, second.skip.weight, second.branch[2].weight], expected)
    assert (second.branch[0].in_features, second.skip.in_features) == (5, 5)


def test_several_maps_in_a_row_become_one() -> None:
    model = models.general(5, 3, 3, 2).double()
    w3 = [residual.skip.weight.detach().clone() for residual in model.blocks]
    head = model.head.weight.detach().clone()
    report = prune_and_absorb(
        model, [f"blocks.{n}" for n in range(4)], torch.randn(5, 3, dtype=torch.float64)
    )
    assert report.kept == {}
    assert count(model) == 3 * 2 + 2
    assert_close(model.head.weight, head @ w3[3] @ w3[2] @ w3[1] @ w3[0])


def test_a_map_that_no_layer_reads_goes_into_the_layer_before() -> None:
    """(1 2; 0 1) (3; 4) = (11; 4), and the offsets add to (1 2; 0 1) (1; 1) + (5; 0) = (8; 1)."""
    model = nn.Sequential(
        linear([[3.0], [4.0]], [1.0, 1.0]),
        nn.Identity(),
        skipped(linear([[1.0, 2.0], [0.0, 1.0]], [5.0, 0.0])),
        nn.Tanh(),
    )
    report = prune_and_absorb(model, ["2"], torch.randn(5, 1))
    assert report == Absorption(folded={"2": "0"})
    assert model[0].weight.tolist() == [[11.0], [4.0]]
    assert model[0].bias.tolist() == [8.0, 1.0]


def test_a_map_goes_into_both_ends_of_the_block_before_and_its_offset_into_one() -> None:
    model = nn.Sequential(skipped(nn.Linear(2, 3), 2, 3), skipped(nn.Linear(3, 2), 3, 2), nn.Tanh())
    report = prune_and_absorb(model, ["1"], torch.randn(5, 2))
    assert report == Absorption(folded={"1": "0.branch.2 and 0.skip"})
    assert (model[0].branch[2].out_features, model[0].skip.out_features) == (2, 2)


def test_maps_in_a_row_that_no_layer_reads_go_back_to_the_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), skipped(nn.Linear(2, 2)), skipped(nn.Linear(2, 2)), nn.Tanh())
    assert prune_and_absorb(model, ["1", "2"], torch.randn(5, 2)).kept == {}
    assert [type(m) for m in model] == [nn.Linear, nn.Identity, nn.Identity, nn.Tanh]


def test_a_narrow_map_between_wide_layers_stays() -> None:
    """9 x 1 and 1 x 9 are 18 parameters; their product would be 81."""
    model = nn.Sequential(nn.Tanh(), skipped(nn.Linear(9, 1, bias=False), 9, 1), nn.Linear(1, 9, bias=False))
    kept_with("it would take 81 parameters to do without it instead of 18", model, "1", torch.randn(5, 9))


def test_a_map_among_others_goes_into_the_layer_that_it_stands_next_to() -> None:
    """The projection of a BasicBlock into the convolution before; W3 relu(z) into the layer behind."""
    model = nn.Sequential(conv(2, 3), BasicBlock(3, 2, 2), nn.Linear(4, 2))
    assert prune_and_absorb(model, ["1"], images(2)).folded == {"1": "0"}
    assert list(dict(model[1].named_parameters())) == ["downsample.1.weight", "downsample.1.bias"]
    assert (model[0].out_channels, model[0].stride) == (2, (2, 2))
    model = nn.Sequential(nn.Tanh(), skipped(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), nn.Linear(2, 2))
    assert prune_and_absorb(model, ["1"], torch.randn(5, 2)).folded == {"1": "2"}
    assert list(model[1].parameters()) == []


# -- a convolution of 1x1 ------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, database=None)
@given(
    size=st.integers(6, 9),
    bypass_stride=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    kernel=st.integers(1, 3),
    bias=st.booleans(),
)
def test_a_convolution_of_every_nth_pixel_is_one_with_stride_dilation_and_padding(
    size: int, bypass_stride: int, stride: int, dilation: int, padding: int, kernel: int, bias: bool
) -> None:
    skip = nn.Conv2d(2, 3, 1, bypass_stride, bias=bias and not padding)
    following = nn.Conv2d(3, 4, kernel, stride, padding, dilation)
    if (size - 1) // bypass_stride + 1 + 2 * padding < dilation * (kernel - 1) + 1:
        return  # the image is too small for this kernel
    model = nn.Sequential(convolved(skip, 2, 3, stride=bypass_stride), following).double()
    report = prune_and_absorb(model, ["0"], images(2, size).double())
    assert report == Absorption(folded={"0": "1"})
    assert model[1].in_channels == 2


def test_the_bias_of_a_convolution_is_folded_where_nothing_is_padded() -> None:
    """Both pixels of a 2x1 kernel see the offset 3: (1 + 2) 3 = 9."""
    skip, following = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, (2, 1), bias=False)
    skip.weight.data.fill_(1.0)
    skip.bias.data.fill_(3.0)
    following.weight.data = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    model = nn.Sequential(convolved(skip, 1, 1), following)
    prune_and_absorb(model, ["0"], images(1))
    assert model[1].bias.tolist() == [9.0]


def test_the_bias_of_a_convolution_stays_where_the_next_one_pads() -> None:
    for padding in (1, "same"):
        model = nn.Sequential(nn.Tanh(), convolved(nn.Conv2d(2, 2, 1), 2, 2), nn.Conv2d(2, 2, 3, 1, padding))
        kept_with("its bias would be missing in the border", model, "1", images(2))


def test_a_bias_of_zero_is_folded_under_padding() -> None:
    skip = nn.Conv2d(2, 2, 1)
    nn.init.zeros_(skip.bias)
    model = nn.Sequential(convolved(skip, 2, 2), conv(2, 4))
    assert prune_and_absorb(model, ["0"], images(2)).folded == {"0": "1"}


def test_a_strided_map_goes_into_the_convolution_before() -> None:
    model = nn.Sequential(conv(2, 3, stride=2), convolved(nn.Conv2d(3, 2, 1, 2), 3, 2, stride=2), nn.Tanh())
    assert prune_and_absorb(model, ["1"], images(2)).folded == {"1": "0"}
    assert (model[0].stride, model[0].out_channels) == ((4, 4), 2)


def test_a_strided_map_stays_out_of_what_pads_in_another_way() -> None:
    strided = nn.Conv2d(2, 2, 1, 2, bias=False)
    same = nn.Conv2d(2, 2, 3, padding="same")
    before = nn.Sequential(same, convolved(copy.deepcopy(strided), 2, 2, stride=2), nn.Tanh())
    kept_with('padding="same" allows no stride', before, "1", images(2))
    circular = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    after = nn.Sequential(nn.Tanh(), convolved(strided, 2, 2, stride=2), circular)
    kept_with("another padding than a number of zeros", after, "1", images(2))


# -- copies and zero padding of channels ---------------------------------------------------------------


def test_a_copy_of_channels_sums_the_columns_of_the_next_convolution() -> None:
    following = nn.Conv2d(4, 1, 1)
    following.weight.data = torch.tensor([1.0, 2.0, 30.0, 40.0]).view(1, 4, 1, 1)
    model = nn.Sequential(convolved(ChannelCopy(), 2, 4), following)
    report = prune_and_absorb(model, ["0"], images(2))
    assert report == Absorption(folded={"0": "1"})
    assert type(model[0]) is nn.Identity
    assert model[1].weight.flatten().tolist() == [31.0, 42.0]
    assert model[1].in_channels == 2


def test_a_padding_of_channels_drops_the_columns_that_read_zeros() -> None:
    following = nn.Conv2d(4, 1, 1)
    following.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
    model = nn.Sequential(convolved(ZeroPad(1, 2, stride=2), 1, 4, stride=2), following)
    prune_and_absorb(model, ["0"], images(1))
    assert model[1].weight.flatten().tolist() == [2.0]
    assert model[0](images(1)).shape == (2, 1, 4, 4)  # every second pixel is all that is left of the skip


def test_a_map_of_channels_goes_through_what_acts_on_each_channel_alone() -> None:
    between = (nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(), nn.GELU(), nn.AvgPool2d(2), nn.Identity())
    for skip in (ChannelCopy(3), ZeroPad(2, 2)):
        model = nn.Sequential(convolved(skip, 2, 6, tail=nn.ReLU()), *between, conv(6, 3))
        assert prune_and_absorb(model, ["0"], images(2)).folded == {"0": "7"}
        assert model[7].in_channels == 2


def test_maps_of_channels_go_through_removed_blocks_one_after_the_other() -> None:
    model = nn.Sequential(
        conv(3, 2),
        convolved(ChannelCopy(), 2, 4, tail=nn.ReLU()),
        convolved(None, 4, 4, tail=nn.ReLU()),
        convolved(ZeroPad(1, 1, 2), 4, 6, stride=2, tail=nn.ReLU()),
        nn.MaxPool2d(2),
        conv(6, 5),
    )
    report = prune_and_absorb(model, ["1", "2", "3"], images(3))
    assert report.folded == {"1": "5", "2": "the ReLU before it", "3": "5"}
    assert model[5].in_channels == 2


def test_a_map_moves_onto_the_identity_skip_of_the_block_that_reads_it() -> None:
    model = nn.Sequential(convolved(ChannelCopy(), 2, 4), convolved(None, 4, 4, tail=nn.ReLU()), conv(4, 3))
    weight = model[1].branch.weight
    report = prune_and_absorb(model, ["0"], images(2))
    assert report.folded == {"0": "1.branch"}
    assert model.get_parameter("1.branch.weight") is weight
    assert weight.shape == (4, 2, 3, 3)


def test_a_map_goes_into_a_convolution_on_the_skip_as_well() -> None:
    model = nn.Sequential(
        convolved(ZeroPad(1, 1), 2, 4), convolved(nn.Conv2d(4, 6, 1), 4, 6), nn.Tanh(), conv(6, 2)
    )
    assert prune_and_absorb(model, ["0"], images(2)).folded == {"0": "1.branch and 1.skip"}


def test_two_maps_move_onto_one_skip() -> None:
    model = nn.Sequential(
        conv(3, 2),
        convolved(ChannelCopy(), 2, 4, tail=nn.ReLU()),
        convolved(ZeroPad(1, 1), 4, 6),
        convolved(None, 6, 6),
        conv(6, 2),
    )
    assert prune_and_absorb(model, ["1", "2"], images(3)).folded == {"1": "3.branch", "2": "3.branch"}


@pytest.mark.parametrize("skip", [ChannelCopy(), ZeroPad(1, 1)])
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 1)).view(x.size(0), -1),
        lambda x: x.mean((2, 3)),
        lambda x: x.mean(dim=[-1, -2]),
    ],
)
def test_a_map_reaches_the_classifier_behind_global_pooling(
    skip: nn.Module, pool: Callable[[Tensor], Tensor]
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(pool(F.relu(self.block(x))))

    model = block(forward, block=convolved(copy.deepcopy(skip), 2, 4), head=nn.Linear(4, 3))
    assert prune_and_absorb(model, ["block"], images(2)).folded == {"block": "head"}
    assert model.head.in_features == 2


def test_a_copy_reaches_the_classifier_behind_any_number_of_pixels_and_padding_does_not() -> None:
    copied = nn.Sequential(convolved(ChannelCopy(), 2, 4), nn.Flatten(), nn.Linear(4 * 64, 3))
    assert prune_and_absorb(copied, ["0"], images(2)).folded == {"0": "2"}
    assert copied[2].in_features == 2 * 64
    padded = nn.Sequential(convolved(ZeroPad(1, 1), 2, 4), nn.Flatten(), nn.Linear(4 * 64, 3))
    kept_with("2 reads it behind an unknown number of pixels", padded, "0", images(2))


def test_the_shortcut_of_akamaster_is_folded_whoever_wrote_it() -> None:
    model = nn.Sequential(PaddedBlock(), conv(8, 3))
    assert prune_and_absorb(model, ["0"], images(4)).folded == {"0": "1"}
    assert model[1].in_channels == 4


# -- a ReLU --------------------------------------------------------------------------------------------


def test_a_relu_behind_a_relu_is_dropped() -> None:
    model = nn.Sequential(BasicBlock(), nn.MaxPool2d(2), BasicBlock(), BasicBlock(), conv(4, 2))
    report = prune_and_absorb(model, ["2", "3"], images(4))
    assert report.folded == {"2": "the ReLU before it", "3": "the ReLU before it"}
    assert [type(m) for m in model][2:4] == [nn.Identity, nn.Identity]


def test_a_relu_that_something_negative_may_reach_stays() -> None:
    model = nn.Sequential(conv(4, 4), BasicBlock(), conv(4, 2))
    kept_with("its ReLU is needed, because what it reads may be negative", model, "1", images(4))


# -- what stays, and why -------------------------------------------------------------------------------


def read_twice(self: Any, x: Tensor) -> Tensor:
    y = self.block(x)
    return self.f(y) + y.sum()


def run_twice(self: Any, x: Tensor) -> Tensor:
    return self.f(torch.tanh(self.block(self.block(x))))


def reader_run_twice(self: Any, x: Tensor) -> Tensor:
    return self.f(self.block(x)) + self.f(torch.tanh(x))


def reader_read_bare(self: Any, x: Tensor) -> Tensor:
    return self.f(self.block(x)) + F.linear(torch.tanh(x), self.f.weight)


def reader_tied(self: Any, x: Tensor) -> Tensor:
    return self.f(self.block(x)) + self.tied(torch.tanh(x))


def writer_read_twice(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    return torch.tanh(self.block(y)) + y


def other_in_training(self: Any, x: Tensor) -> Tensor:
    y = self.block(x)
    return self.f(torch.tanh(y)) if self.training else self.f(y)


def branching(self: Any, x: Tensor) -> Tensor:
    return self.f(self.block(x)) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (read_twice, "sum_1 reads it, which is no layer"),
        (run_twice, "the model runs it 2 times"),
        (reader_run_twice, "f is used in more than one place"),
        (reader_read_bare, "f is used in more than one place"),
        (reader_tied, "f is used in more than one place"),
        (writer_read_twice, "f writes it, or something else reads it as well"),
        (lambda self, x: self.block(x), "the output of the model needs it"),
        (lambda self, x: self.f(x), "the model's forward does not run it"),
        (other_in_training, "is not the same in training and in evaluation"),
        (branching, "torch.fx cannot trace its forward (TraceError"),
    ],
)
def test_a_map_stays_where_the_model_needs_it(forward: Callable[..., Tensor], reason: str) -> None:
    model = block(forward, block=skipped(nn.Linear(2, 2)), f=nn.Linear(2, 2), tied=nn.Linear(2, 2))
    model.tied.bias = model.f.bias
    if forward is not reader_tied:
        del model.tied
    kept_with(reason, model, "block", torch.ones(5, 2))


def weight_normed(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def masked(layer: nn.Module) -> nn.Module:
    """PyTorch's own pruning: the weight is computed anew, from `weight_orig`, at every call."""
    from torch.nn.utils import prune

    return prune.l1_unstructured(layer, "weight", 1)


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("skip", "following", "reason"),
    [
        (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), "2 reads it, which is no layer"),
        (nn.Conv2d(2, 2, 1, bias=False), conv(2, 2, groups=2), "the neighbouring convolution has groups"),
        (ChannelCopy(1), conv(2, 2, groups=2), "the next convolution has groups"),
        (nn.Conv2d(2, 2, 1), masked(conv(2, 2)), "2 reads it, which is no layer"),
        (nn.Conv2d(2, 2, 1), weight_normed(conv(2, 2)), "2 reads it, which is no layer"),
        (nn.Conv2d(2, 2, 1), Doubled(2, 2, 1), "conv2d reads it, which is no layer"),
        (Doubled(2, 2, 1), conv(2, 2), "it is more than a chain of operations"),
        (masked(nn.Conv2d(2, 2, 1)), conv(2, 2), "is no linear map that could be folded"),
        (nn.Conv2d(2, 2, 3, padding=1), conv(2, 2), "is no linear map that could be folded"),
        (nn.Conv2d(2, 2, 1, groups=2), conv(2, 2), "is no linear map that could be folded"),
        (
            nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)),
            conv(2, 2),
            "its linear map stands among others",
        ),
        (
            nn.Sequential(ChannelCopy(1), nn.BatchNorm2d(2)),
            conv(2, 2),
            "its map of channels stands among others",
        ),
        (ChannelCopy(1), nn.Sequential(nn.Sigmoid(), conv(2, 2)), "2.0 reads it, which is no layer"),
        (ChannelCopy(1), nn.Sequential(nn.Flatten(2), nn.Linear(64, 2)), "2.0 reads it, which is no layer"),
        (ChannelCopy(1), nn.Linear(8, 2), "2 may read another dimension than the channels"),
    ],
)
def test_a_skip_stays_where_folding_would_not_be_exact(
    skip: nn.Module, following: nn.Module, reason: str
) -> None:
    module = Residual(nn.Sequential(conv(2, 2), nn.Tanh()), skip)
    kept_with(reason, nn.Sequential(nn.Tanh(), module, following), "1", images(2))


def test_a_block_that_runs_several_times_takes_nothing_in() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.again(self.again(x))
        return torch.tanh(self.block(x))

    model = block(forward, again=skipped(nn.Linear(2, 2)), block=skipped(nn.Linear(2, 2)))
    kept_with("the model runs it 2 times", model, "block", torch.randn(5, 2))


def test_a_bypass_that_runs_several_times_takes_nothing_in() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(self.again(self.block(torch.tanh(self.again(x)))))

    model = block(forward, again=skipped(nn.Linear(2, 2)), block=skipped(nn.Linear(2, 2)))
    report = prune_and_absorb(model, ["again", "block"], torch.randn(5, 2))
    assert report.folded == {}
    assert report.kept.keys() == {"again", "block"}


def test_the_identity_needs_no_report() -> None:
    model = nn.Sequential(skipped(nn.Identity()), nn.Linear(2, 2))
    assert prune_and_absorb(model, ["0"], torch.randn(5, 2)) == Absorption()


# -- the optimiser -------------------------------------------------------------------------------------


def held(optimizer: torch.optim.Optimizer) -> list[int]:
    return sorted(id(p) for group in optimizer.param_groups for p in group["params"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, z: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model.train()(z).square().mean()
    loss.backward()
    optimizer.step()
    return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "AdamW, foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-3, foreach=True, amsgrad=True),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def test_the_last_graph_may_still_be_alive_when_a_weight_changes_its_shape() -> None:
    """The last loss is a variable of the user's loop, and holds on to the shapes of the old gradients."""
    model = nn.Sequential(skipped(nn.Linear(2, 3), 2, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    loss = train(model, optimizer, torch.randn(5, 2))
    prune_and_absorb(model, ["0"], torch.randn(5, 2), optimizer=optimizer)
    train(model, optimizer, torch.randn(5, 2))
    assert loss.requires_grad


def test_changed_weights_lose_their_momentum_and_the_others_keep_it_to_the_bit() -> None:
    model = nn.Sequential(skipped(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, optimizer, torch.randn(5, 2))
    momentum = optimizer.state[model[3].weight]["momentum_buffer"].clone()
    prune_and_absorb(model, ["0"], torch.randn(5, 2), optimizer=optimizer)
    assert set(optimizer.state) == {model[3].weight, model[3].bias}
    assert torch.equal(optimizer.state[model[3].weight]["momentum_buffer"], momentum)


def test_a_new_bias_is_trained_with_its_weight() -> None:
    model = nn.Sequential(skipped(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False))
    optimizer = OPTIMIZERS["SGD"](groups(model))
    prune_and_absorb(model, ["0"], torch.randn(5, 2), optimizer=optimizer)
    assert held(optimizer) == sorted(id(p) for p in model.parameters())
    assert any(p is model[1].bias for p in optimizer.param_groups[0]["params"])


def test_a_skip_that_stands_elsewhere_as_well_stays_in_the_optimiser() -> None:
    model = nn.Sequential(skipped(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh())
    model[3].weight = model[0].skip.weight
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    assert prune_and_absorb(model, ["0"], torch.randn(5, 2), optimizer=optimizer).folded == {"0": "1"}
    assert held(optimizer) == sorted(id(p) for p in model.parameters())


# -- whole networks ------------------------------------------------------------------------------------


def dense_layer(kind: str, features: int, width: int) -> list[nn.Module]:
    inside = nn.Sequential(nn.Linear(features, 3), nn.Tanh(), nn.Linear(3, width))
    return {
        "linear": [nn.Linear(features, width)],
        "linear, relu": [nn.Linear(features, width, bias=False), nn.ReLU()],
        "w3": [Residual(inside, nn.Linear(features, width))],
        "w3, tail": [Residual(inside, nn.Linear(features, width, bias=False), nn.ReLU())],
        "norm": [Residual(nn.Sequential(inside, nn.BatchNorm1d(width)), nn.Linear(features, width))],
        "identity": [Residual(nn.Linear(features, features)), nn.Linear(features, width)],
        "fc": [Residual(nn.Linear(features, features), tail=nn.ReLU(inplace=True))]
        + [nn.Linear(features, width)] * (width != features),
    }[kind]


DENSE = ("linear", "linear, relu", "w3", "w3, tail", "norm", "identity", "fc")


def convolution_layer(kind: str, channels: int) -> tuple[list[nn.Module], int]:
    wide = 2 * channels
    vgg = nn.Sequential(conv(channels, wide), nn.BatchNorm2d(wide))
    more = channels + 3
    strided = nn.Sequential(conv(channels, more, stride=2), nn.ReLU(), conv(more, more))
    return {
        "conv": ([conv(channels, 3), nn.ReLU()], 3),
        "conv, norm": ([conv(channels, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True)], 3),
        "valid": ([nn.Conv2d(channels, 2, 2)], 2),
        "identity": ([convolved(None, channels, channels)], channels),
        "BasicBlock": ([BasicBlock(channels, channels)], channels),
        "downsample": ([BasicBlock(channels, 4, 2)], 4),
        "copy": ([Residual(vgg, ChannelCopy(), nn.ReLU())], wide),
        "pad": ([Residual(strided, ZeroPad(1, 2, 2))], more),
        "1x1": ([convolved(nn.Conv2d(channels, 3, 1, bias=False), channels, 3)], 3),
        "1x1, stride": ([convolved(nn.Conv2d(channels, 4, 1, 2), channels, 4, stride=2)], 4),
        "pool": ([nn.MaxPool2d(3, 1, 1), nn.Dropout(0.1)], channels),
        "tanh": ([nn.Tanh()], channels),
    }[kind]


CONVOLUTIONS = (
    *("conv", "conv, norm", "valid", "identity", "BasicBlock", "downsample"),
    *("copy", "pad", "1x1", "1x1, stride", "pool", "tanh"),
)
HEADS: dict[str, Callable[[int], list[nn.Module]]] = {
    "global": lambda channels: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2)],
    "normed": lambda channels: [nn.BatchNorm2d(channels), *HEADS["global"](channels)],
    "four pixels": lambda channels: [nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 2)],
    "open": lambda channels: [],
}


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor, list[str]]:
    """A random network, an input, and the names of the blocks to remove."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    if draw(st.booleans()):
        z, layers, width = torch.randn(4, 3), [], 3
        for kind in draw(st.lists(st.sampled_from(DENSE), min_size=2, max_size=6)):
            features, width = width, draw(st.integers(2, 5))
            layers += dense_layer(kind, features, width)
    else:
        z, layers, channels = torch.randn(4, 2, 9, 9), [], 2
        for kind in draw(st.lists(st.sampled_from(CONVOLUTIONS), min_size=2, max_size=6)):
            more, channels = convolution_layer(kind, min(channels, 12))
            layers += more
            if channels > 12:
                layers.append(nn.Conv2d(channels, 12, 1))
                channels = 12
        layers += HEADS[draw(st.sampled_from(sorted(HEADS)))](channels)
    model = nn.Sequential(*layers)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.bias)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    names = [found.name for found in find_blocks(model)]
    dead = draw(st.sets(st.sampled_from(names))) if names else set()
    return model, z, [name for name in names if name in dead]


def shrunk(z: Tensor, model: nn.Module) -> bool:
    """Whether the images got too small for a kernel on the way."""
    try:
        with torch.no_grad():
            model.eval()(z)
    except RuntimeError as error:
        assert "Kernel size can't be greater" in str(error)  # noqa: PT017
        return True
    return False


@settings(max_examples=50, deadline=None, database=None)
@given(networks(), st.booleans())
def test_absorbing_preserves_the_function_of_any_network(
    network: tuple[nn.Sequential, Tensor, list[str]], double: bool
) -> None:
    model, z, dead = network
    if double:
        model, z = model.double(), z.double()
    if shrunk(z, model):
        return
    report = prune_and_absorb(model, dead, z)
    linked = [n for n in dead if type(model.get_submodule(n)) is not nn.Identity]
    assert report.folded.keys() | report.kept.keys() >= set(linked)
    assert not report.folded.keys() & report.kept.keys()
    assert relative(copy.deepcopy(model)(z), model(z)) == 0


@settings(max_examples=25, deadline=None, database=None)
@given(networks(), st.sampled_from(sorted(OPTIMIZERS)))
def test_the_optimiser_holds_the_parameters_of_the_model_after_absorbing_and_goes_on(
    network: tuple[nn.Sequential, Tensor, list[str]], kind: str
) -> None:
    model, z, dead = network
    if shrunk(z, model) or not list(model.parameters()):
        return
    optimizer = OPTIMIZERS[kind](groups(model))
    losses = [train(model, optimizer, z) for _ in range(2)]
    prune_and_absorb(model, dead, z, optimizer=optimizer)
    assert held(optimizer) == sorted(id(p) for p in model.parameters())
    assert set(optimizer.state) <= set(model.parameters())
    if list(model.parameters()):
        losses.append(train(model, optimizer, z))
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize(
    ("build", "shape", "dead", "left"),
    [
        (lambda: models.general(6, 5, 8, 3), (5,), (0, 2, 3), 2),
        (lambda: models.fc(8, width=10, inputs=12), (12,), (0, 1, 4, 6), 3),
        (lambda: models.fc(5, width=10, inputs=12, form="relu-inside"), (12,), (0, 1, 2, 3), 0),
        (lambda: models.cnn(8), (1, 28, 28), (0, 3, 4), 3),
        (lambda: models.resnet(14, widths=(4, 8, 16)), (3, 16, 16), (0, 2, 4), 3),
        (lambda: models.resnet(14, widths=(4, 8, 16), style="v1"), (3, 16, 16), (1, 2, 3, 4), 2),
        (lambda: models.resnet(14, widths=(4, 8, 16), style="v2"), (3, 16, 16), (0, 2, 4), 3),
    ],
)
def test_the_papers_networks_keep_their_function(
    build: Any, shape: tuple[int, ...], dead: tuple[int, ...], left: int
) -> None:
    torch.manual_seed(0)
    model = build()
    names = [found.name for found in find_blocks(model)]
    prune_and_absorb(model, [names[n] for n in dead], torch.randn(2, *shape))
    assert len(find_blocks(model)) == left


def narrow_vgg() -> nn.Sequential:
    """The 13 convolutions of VGG16 with 1/32 of their filters."""
    layers: list[nn.Module] = [conv(3, 2), nn.BatchNorm2d(2), nn.ReLU()]
    channels = 2
    for stage in ((2,), (4, 4), (8, 8, 8), (16, 16, 16), (16, 16, 16)):
        for features in stage:
            branch = nn.Sequential(conv(channels, features), nn.BatchNorm2d(features))
            layers.append(Residual(branch, None if features == channels else ChannelCopy(), nn.ReLU()))
            channels = features
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("dead", [(5, 8, 9, 11, 12, 13), (4, 6, 8, 9, 10, 11, 12, 13), range(2, 14)])
def test_every_skip_of_a_pruned_vgg_is_absorbed(dead: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = narrow_vgg()
    names = [found.name for found in find_blocks(model)]
    report = prune_and_absorb(model, [names[n - 2] for n in dead], torch.randn(2, 3, 32, 32))
    assert report.kept == {}
    assert all(type(model.get_submodule(names[n - 2])) is nn.Identity for n in dead)


def paper_parameters(model: nn.Module) -> int:
    """As the paper counts: convolutions and dense layers with their biases, no normalisation."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(count(layer) for layer in layers)


def macs(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32, device="meta"))
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("dead", "removed", "absorbed"),
    [
        ((5, 8, 9, 11, 12, 13), (72.85, 33.12), (82.69, 45.16)),
        ((4, 6, 8, 9, 10, 11, 12, 13), (91.55, 63.22), (92.43, 63.26)),
    ],
)
def test_absorbing_prunes_the_vggs_of_the_paper_further(
    dead: tuple[int, ...], removed: tuple[float, float], absorbed: tuple[float, float]
) -> None:
    """-1200: conv 6 reads 128 channels instead of 256, and conv 9 or 10 reads 256 instead of 512."""
    with torch.device("meta"):
        model = models.vgg16()
    whole = paper_parameters(model), macs(model)
    assert whole == (14_982_474, 313_463_808)

    def pruned() -> tuple[float, ...]:
        return tuple(
            round(100 * (1 - part / all), 2)
            for part, all in zip((paper_parameters(model), macs(model)), whole, strict=True)
        )

    names = [found.name for found in find_blocks(model)]
    survivors = remove(model, *(names[n - 2] for n in dead))
    assert pruned() == removed
    absorb(model, [names[n - 2] for n in dead], survivors)
    assert pruned() == absorbed


def test_a_linear_map_before_a_relu_is_folded_into_the_layer_that_wrote_it() -> None:
    torch.manual_seed(0)
    block = Residual(nn.Linear(4, 4), skip=nn.Linear(4, 4), tail=nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2)).eval()
    x = torch.randn(5, 3)
    (found,) = find_blocks(model)
    replace(model, "1", found.bypass(block))
    expected = model(x)
    report = absorb(model, ["1"])
    assert report.folded == {"1": "0"}
    assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert not list(model[1].parameters())


def test_a_pointwise_convolution_behind_a_pool_is_folded_into_the_next_convolution() -> None:
    torch.manual_seed(0)
    skip = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(3, 4, 1, bias=False))
    block = Residual(
        nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)), skip
    )
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), block, nn.Conv2d(4, 5, 3, padding=1)).eval()
    x = torch.randn(2, 1, 8, 8)
    (found,) = find_blocks(model)
    replace(model, "1", found.bypass(block))
    expected = model(x)
    report = absorb(model, ["1"])
    assert report.folded == {"1": "2"}
    assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert not list(model[1].parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_training_goes_on_in_channels_last_with_what_was_folded(kind, fused):
    """Zero padding folds into convolutions that go on with no momentum beside others that have theirs."""
    torch.manual_seed(0)
    last = torch.channels_last
    model = models.resnet(blocks=(1, 2, 2), widths=(4, 8, 8), final_norm="bare").to(memory_format=last)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, fused=fused, **options)
    x, y = torch.randn(8, 3, 8, 8).contiguous(memory_format=last), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    survivors = remove(model, "stage2.0", "stage3.0", optimizer=optimizer)
    folded = absorb(model, ["stage2.0", "stage3.0"], survivors, optimizer=optimizer).folded
    assert len(folded) == 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name])
        assert p.ndim != 4 or p.is_contiguous(memory_format=last)
