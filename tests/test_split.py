"""One module into head, branch, skip and tail: on blocks as people write them, against their own forward."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from toy import BasicBlock, Drop, LambdaLayer, PaddedBlock, PreActBlock, Scale, block, conv

from shallower import ChannelCopy, NotResidual, Residual, ZeroPad, split
from shallower.graphs import compiled
from shallower.split import linear_parameters

IMAGES, VECTORS, TOKENS = (3, 4, 6, 6), (3, 4), (3, 5, 4)


def targets(part):
    """The names of the children and parameters that `part` uses."""
    return [str(node.target) for node in part.nodes if node.op in ("call_module", "get_attr")]


class Bottleneck(nn.Module):
    """torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(4, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = conv(2, 2, 3, stride=2, bias=False), nn.BatchNorm2d(2)
        self.conv3, self.bn3 = conv(2, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(4, 8, 1, 2, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class WideBlock(nn.Module):
    """xternalz's WideResNet block: the input is activated before the fork where the shape changes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bn1, self.relu1 = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv1 = conv(4, features, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(features), nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.conv2 = conv(features, features, bias=False)
        self.equal = features == 4
        self.shortcut = None if self.equal else nn.Conv2d(4, features, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.equal:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.equal else x)))
        out = self.conv2(self.dropout(out))
        return torch.add(x if self.equal else self.shortcut(x), out)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dwconv = conv(4, 4, 3, groups=4)
        self.norm = nn.LayerNorm(4)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        self.gamma = nn.Parameter(torch.rand(4))
        self.drop_path = Drop()

    def forward(self, x: Tensor) -> Tensor:
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv2(self.act(self.pwconv1(x)))
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + self.drop_path(x)


class Excited(nn.Module):
    """Squeeze and excitation inside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(4, 4), nn.BatchNorm2d(4)
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        weight = torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return F.relu(y * weight + x)


class RepVGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(conv(4, 4, bias=False), nn.BatchNorm2d(4))
        self.one = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.identity, self.act = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x) + self.one(x) + self.identity(x))


class Mixer(nn.Module):
    """Mixes the tokens: transposed within the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        y = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        if mask is not None:
            y = y * mask
        return x + y * scale


class Chained(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Example(NamedTuple):
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    parts: str  # head | branch | skip | tail: the children in each
    bypass: Callable[[Any, Tensor], Tensor]


def same(_: nn.Module, z: Tensor) -> Tensor:
    return z


def relu(_: nn.Module, z: Tensor) -> Tensor:
    return F.relu(z)


def dense(forward: Callable[..., Tensor], **more: nn.Module) -> Callable[[], nn.Module]:
    return lambda: block(forward, f=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), **more)


def padded(z: Tensor) -> Tensor:
    """Every second pixel, with two channels of zeros on both sides."""
    zeros = torch.zeros(len(z), 2, 3, 3)
    return torch.cat([zeros, z[:, :, ::2, ::2], zeros], dim=1)


def pooled(self: Any, x: Tensor) -> Tensor:
    skip = torch.cat([self.pool(x), torch.zeros_like(self.pool(x))], dim=1)
    return self.conv(x) + skip


def grow(self: Any, x: Tensor) -> Tensor:
    x += self.f(x)
    return x


EXAMPLES = {
    "BasicBlock": Example(BasicBlock, IMAGES, "|conv1 bn1 relu conv2 bn2||relu", relu),
    "BasicBlock, downsample": Example(
        lambda: BasicBlock(4, 8, 2),
        IMAGES,
        "|conv1 bn1 relu conv2 bn2|downsample|relu",
        lambda m, z: F.relu(m.downsample[1](m.downsample[0](z))),
    ),
    "Bottleneck": Example(
        Bottleneck,
        IMAGES,
        "|conv1 bn1 relu conv2 bn2 relu conv3 bn3|downsample|relu",
        lambda m, z: F.relu(m.downsample(z)),
    ),
    "PreActBlock": Example(PreActBlock, IMAGES, "|bn1 conv1 bn2 conv2||", same),
    "PreActBlock, shared head": Example(
        lambda: PreActBlock(4, 8, 2),
        IMAGES,
        "bn1|conv1 bn2 conv2|shortcut|",
        lambda m, z: m.shortcut(F.relu(m.bn1(z))),
    ),
    "PaddedBlock": Example(
        PaddedBlock, IMAGES, "|conv1 bn1 conv2 bn2|shortcut|", lambda m, z: F.relu(padded(z))
    ),
    "PaddedBlock, empty shortcut": Example(
        lambda: PaddedBlock(4, 4, 1), IMAGES, "|conv1 bn1 conv2 bn2|shortcut|", relu
    ),
    "WideBlock": Example(lambda: WideBlock(4), IMAGES, "|bn1 relu1 conv1 bn2 relu2 dropout conv2||", same),
    "WideBlock, shared head": Example(
        lambda: WideBlock(6),
        IMAGES,
        "bn1 relu1|conv1 bn2 relu2 dropout conv2|shortcut|",
        lambda m, z: m.shortcut(F.relu(m.bn1(z))),
    ),
    "ConvNeXt": Example(ConvNeXt, IMAGES, "|dwconv norm pwconv1 act pwconv2 gamma drop_path||", same),
    "Mixer": Example(Mixer, TOKENS, "|norm mix||", same),
    "Excited": Example(Excited, IMAGES, "|conv bn down up||", relu),
    "RepVGG": Example(RepVGG, IMAGES, "|dense one|identity|act", lambda m, z: F.relu(m.identity(z))),
    "VGG": Example(
        lambda: Residual(nn.Sequential(conv(4, 8), nn.BatchNorm2d(8)), ChannelCopy(), nn.ReLU()),
        IMAGES,
        "|branch|skip|tail",
        lambda m, z: F.relu(torch.cat([z, z], dim=1)),
    ),
    "W-B-a-W": Example(
        lambda: Residual(
            nn.Sequential(conv(4, 8, stride=2), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8)), ZeroPad(2, 2, 2)
        ),
        IMAGES,
        "|branch|skip|tail",
        lambda m, z: padded(z),
    ),
    "learned W3": Example(
        lambda: block(
            lambda self, x: self.w3(x) + self.w2(torch.tanh(self.w1(x))),
            w1=nn.Linear(4, 4),
            w2=nn.Linear(4, 4),
            w3=nn.Linear(4, 4, bias=False),
        ),
        VECTORS,
        "|w1 w2|w3|",
        lambda m, z: z @ m.w3.weight.T,
    ),
    "average-pooled skip": Example(
        lambda: block(pooled, conv=conv(4, 8, stride=2), pool=nn.AvgPool2d(2)),
        IMAGES,
        "|conv|pool pool|",
        lambda m, z: torch.cat([F.avg_pool2d(z, 2), 0 * F.avg_pool2d(z, 2)], dim=1),
    ),
    "max-pooled skip": Example(
        lambda: block(
            lambda self, x: self.conv(x) + self.pool(x), conv=conv(4, 4, stride=2), pool=nn.MaxPool2d(2)
        ),
        IMAGES,
        "|conv|pool|",
        lambda m, z: F.max_pool2d(z, 2),
    ),
    "torch.add": Example(dense(lambda self, x: torch.add(x, self.f(x))), VECTORS, "|f||", same),
    "torch.add by keyword": Example(
        dense(lambda self, x: torch.add(other=self.f(x), input=x)), VECTORS, "|f||", same
    ),
    "alpha scales the branch": Example(
        dense(lambda self, x: torch.add(x, self.f(x), alpha=0.5)), VECTORS, "|f||", same
    ),
    "alpha scales the skip": Example(
        dense(lambda self, x: self.f(x).add(x, alpha=3)), VECTORS, "|f||", lambda m, z: 3 * z
    ),
    "x.add": Example(dense(lambda self, x: x.add(self.f(x))), VECTORS, "|f||", same),
    "x.add_": Example(dense(lambda self, x: self.f(x).add_(x)), VECTORS, "|f||", same),
    "tail behind a dropout, in place": Example(
        dense(lambda self, x: self.r(self.d(self.f(x) + x)), d=nn.Dropout(0.0), r=nn.ReLU(inplace=True)),
        VECTORS,
        "|f||d r",
        relu,
    ),
    "custom layer": Example(
        lambda: block(lambda self, x: x + self.scale(x) * self.gamma, scale=Scale(4), gamma=Scale(4).weight),
        VECTORS,
        "|scale gamma||",
        same,
    ),
    "buffer": Example(
        lambda: block(
            lambda self, x: x + self.f(x) * self.mask, f=nn.Linear(4, 4), mask=nn.Buffer(torch.ones(4))
        ),
        VECTORS,
        "|f mask||",
        same,
    ),
    "children in lists": Example(
        lambda: block(
            lambda self, x: x + self.d["3x3"](self.f[1](self.f[0](x))),
            f=nn.ModuleList([nn.Linear(4, 4), nn.ReLU(inplace=True)]),
            d=nn.ModuleDict({"3x3": nn.Linear(4, 4)}),
        ),
        VECTORS,
        "|f.0 f.1 d.3x3||",
        same,
    ),
    "Sequential with its own forward": Example(
        lambda: Chained(nn.Linear(4, 4), nn.ReLU()), VECTORS, "|0 1||", same
    ),
    "nested": Example(
        lambda: block(lambda self, x: x + self.g(x + self.f(x)), f=nn.Linear(4, 4), g=nn.Linear(4, 4)),
        VECTORS,
        "|f g||",
        same,
    ),
}
every_example = pytest.mark.parametrize("name", EXAMPLES)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def build(name: str, training: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module = EXAMPLES[name].build().train(training)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.normal_(norm.weight)
    return module, torch.randn(EXAMPLES[name].shape)


def seeded(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        return function(z.clone())


def snapshot(module: nn.Module) -> list[Any]:
    """All that splitting must not touch: values, objects, modes, attributes, the class, the dice."""
    state = module.state_dict(keep_vars=True).items()
    return [
        [(name, id(value), value.tolist()) for name, value in state],
        [m.training for m in module.modules()],
        sorted(vars(module)),
        type(module),
        torch.get_rng_state().tolist(),
        random.getstate(),
    ]


@every_example
@both_modes
def test_the_four_parts_add_up_to_the_modules_own_forward(name: str, training: bool) -> None:
    module, z = build(name, training)
    parts = split(module)
    head, branch, skip, tail = map(compiled, (parts.head, parts.branch, parts.skip, parts.tail))

    def written_out(z: Tensor) -> Tensor:
        h = head(module, z)
        return tail(module, skip(module, h) + branch(module, h))

    assert_close(seeded(written_out, z), seeded(module, z), atol=1e-6, rtol=1e-6)


@every_example
@both_modes
def test_a_bypass_is_the_forward_without_the_branch(name: str, training: bool) -> None:
    module, z = build(name, training)
    bypass = split(module).bypass(module)
    given = z.clone()
    out = bypass(given)
    assert_close(out, EXAMPLES[name].bypass(module, z), atol=1e-6, rtol=1e-6)
    assert torch.equal(given, z)  # not overwritten


@every_example
def test_every_child_goes_to_its_part(name: str) -> None:
    module, _ = build(name, training=True)
    parts = split(module)
    listed = [" ".join(targets(part)) for part in (parts.head, parts.branch, parts.skip, parts.tail)]
    assert "|".join(listed) == EXAMPLES[name].parts


@every_example
def test_a_bypass_has_the_very_same_parameters_under_the_same_names(name: str) -> None:
    module, _ = build(name, training=True)
    parts = split(module)
    bypass = parts.bypass(module)
    everything, kept = dict(module.named_parameters()), dict(bypass.named_parameters())
    assert all(everything[n] is p for n, p in kept.items())
    assert everything.keys() - kept.keys() == parts.prunable(module).keys()
    assert bypass.state_dict().keys() <= module.state_dict().keys()


@every_example
@both_modes
def test_splitting_changes_nothing(name: str, training: bool) -> None:
    module, _ = build(name, training)
    next(module.children()).training = not training  # a child may have been frozen
    before = snapshot(module)
    split(module).bypass(module)
    assert snapshot(module) == before


def test_a_forward_that_counts_its_calls_does_not_count_the_tracing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.count = self.count + 1
        return x + self.f(x)

    module = block(forward, f=nn.Linear(2, 2), calls=nn.Buffer(torch.zeros(())), count=0)
    split(module)
    assert (module.calls, module.count) == (0, 0)


def test_a_frozen_norm_in_the_skip_stays_frozen_in_the_bypass() -> None:
    module = BasicBlock(4, 8, 2).train()
    module.downsample[1].eval()
    bypass = split(module).bypass(module)
    assert bypass.training
    assert not bypass.downsample[1].training


def test_an_exchanged_child_counts_at_the_next_call() -> None:
    module = Residual(nn.Linear(2, 2))
    branch = compiled(split(module).branch)
    module.branch = nn.Flatten()
    assert_close(branch(module, torch.ones(1, 2)), torch.ones(1, 2))


def test_a_parameter_that_the_tail_also_uses_is_not_pruned() -> None:
    """Tied by hand, it has two names, of which PyTorch lists only the first."""
    module = block(lambda self, x: self.b(x + self.a(x)), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    module.b.weight = module.a.weight
    assert list(split(module).prunable(module)) == ["a.bias"]


def test_a_residual_has_the_skip_that_its_author_named() -> None:
    """What cannot be told from the operands is what `Residual` is there to tell."""
    for branch, skip in ((nn.Linear(2, 2), nn.Linear(2, 2)), (Scale(2), nn.Linear(2, 2))):
        parts = split(Residual(branch, skip))
        assert (list(targets(parts.branch)), list(targets(parts.skip))) == (["branch"], ["skip"])


# -- what is refused -----------------------------------------------------------------------------------


def fixed_dropout(self: Any, x: Tensor) -> Tensor:
    return x + F.dropout(self.f(x), 0.5, self.training)


def two_sums(self: Any, x: Tensor) -> Tensor:
    x = x + self.f(x)
    return x + self.g(x)


def branching(self: Any, x: Tensor) -> Tensor:
    return x + self.f(x) if x.sum() > 0 else x


def first_overwritten(self: Any, x: Tensor) -> Tensor:
    return x + self.f(F.relu_(x))


def first_shifted(self: Any, x: Tensor) -> Tensor:
    identity = x
    x += self.f.bias
    return self.f(x) + identity


def overwritten_last(self: Any, x: Tensor) -> Tensor:
    return self.g(x) + self.f(F.relu(x, inplace=True))


def silently_rectified(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    F.relu_(y)
    return x + self.g(y)


def rectified_under_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    view = y.view(-1, 2)
    F.relu_(y)
    return x + self.g(view)


def silently_summed(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    y.add_(x)
    return F.relu(y + 2 * y)


def shared_inside(self: Any, x: Tensor) -> Tensor:
    y = self.f(x)
    return y + self.g(y) * x


def chance(self: Any, x: Tensor) -> Tensor:
    return x + self.f(x) if random.random() < 2 else x


def torch_chance(self: Any, x: Tensor) -> Tensor:
    return x + self.f(x) if torch.rand(()) < 2 else x


def silent_failure(self: Any, x: Tensor) -> Tensor:
    raise NotImplementedError


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "F.dropout": (fixed_dropout, r"depends on `self.training`.*such as `nn.Dropout` for `F.dropout`"),
    "two sums": (two_sums, r"two residual sums, one after the other; .*`nn.Sequential\(shallower.Residual"),
    "two inputs": (lambda self, x, y: x + self.f(y), r"needs more than one input \(y\); write the block"),
    "variadic": (lambda self, x, *y: x + self.f(x, y), r"reads more than one input \(\*y\); write the block"),
    "tuple": (lambda self, x: (x + self.f(x), x), "something other than one tensor; return the sum itself"),
    "control flow": (branching, r"cannot trace its forward \(TraceError: .*write the block as `shallower"),
    "in place on the input": (first_overwritten, "relu_ overwrites x in place, which is read later"),
    "shifted input": (
        first_shifted,
        "iadd overwrites x in place, which is read later; write it out of place",
    ),
    "x += branch": (grow, r"its sum overwrites its input in place; write `x = x \+ branch`"),
    "overwritten last": (overwritten_last, "overwrites in place a value that its skip also reads"),
    "result thrown away": (silently_rectified, "relu_ overwrites f in place, which is read later"),
    "changed under a view": (rectified_under_a_view, "relu_ overwrites f in place, which is read later"),
    "sum thrown away": (silently_summed, "add_ overwrites f in place, which is read later"),
    "ambiguous": (lambda self, x: torch.tanh(self.f(x)) + torch.tanh(self.g(x)), r"which operand .*tanh_1"),
    "equal operands": (lambda self, x: self.f(x) + self.g(x), r"which operand .* is the skip \(f or g\)"),
    "doubled": (lambda self, x: self.f(x + x), "share more than their input"),
    "shared inside": (shared_inside, "its skip and its branch share more than their input; write the block"),
    "more than the sum": (lambda self, x: (x + self.f(x)) * x, "depends on more than its last sum"),
    "random": (chance, "draws random numbers, which tracing would freeze"),
    "random by torch": (torch_chance, "draws random numbers, which tracing would freeze"),
    "constant": (lambda self, x: x + self.f(x) * torch.ones(2), "makes a tensor, .* register it as a buffer"),
    "error without a text": (silent_failure, r"cannot trace its forward \(NotImplementedError: \); write"),
    "no sum": (lambda self, x: self.f(x), "computes no sum of two functions of its input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_with_the_reason_and_left_alone(name: str) -> None:
    forward, reason = REFUSED[name]
    module = block(forward, f=nn.Linear(2, 2), g=nn.Linear(2, 2))
    before = snapshot(module)
    with pytest.raises(NotResidual, match=reason):
        split(module)
    assert snapshot(module) == before


def test_an_in_place_child_at_the_start_of_a_sequential_is_seen() -> None:
    """Nested, and behind an identity and a dropout, which hand on their very input."""
    start = nn.Sequential(nn.Sequential(nn.Identity(), nn.Dropout()), nn.ReLU(inplace=True))
    with pytest.raises(NotResidual, match="branch overwrites"):
        split(Residual(nn.Sequential(start, nn.Linear(2, 2))))


def test_lazy_parameters_ask_for_one_batch() -> None:
    with pytest.raises(NotResidual, match="uninitialised lazy parameters; run one batch"):
        split(Residual(nn.LazyLinear(2)))


def test_a_forward_set_on_one_instance_is_refused() -> None:
    module = Residual(nn.Linear(2, 2))
    module.forward = lambda z: z  # type: ignore[method-assign]
    with pytest.raises(NotResidual, match="its forward was replaced on this one instance"):
        split(module)


@pytest.mark.parametrize(
    ("forward", "near"),
    [
        (lambda self, x: self.f(x), False),
        (lambda self, x: (self.f(x), x), False),
        (lambda self, x: (x + self.f(x), x), True),
        (silently_rectified, True),
        (lambda self, x: F.relu_(x) * self.f(x) * x, False),
    ],
)
def test_only_a_module_with_a_sum_comes_near(forward: Callable[..., Any], near: bool) -> None:
    with pytest.raises(NotResidual) as no:
        split(block(forward, f=nn.Linear(2, 2), g=nn.Linear(2, 2)))
    assert no.value.near is near


# -- what a branch ends in -----------------------------------------------------------------------------


def last(branch: nn.Module) -> list[nn.Parameter]:
    module = Residual(branch)
    owned = linear_parameters(module, split(module))
    assert all(getattr(owner, name) is parameter for owner, name, parameter in owned)
    return [parameter for _, _, parameter in owned]


def test_a_branch_ends_in_its_last_affine_map_with_dropout_behind_it() -> None:
    w = nn.Linear(2, 2)
    branch = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(w, nn.Dropout()), nn.Identity())
    assert [id(p) for p in last(branch)] == [id(w.weight), id(w.bias)]


def test_a_branch_that_is_not_linear_in_its_last_parameters_ends_in_none() -> None:
    w = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = w.weight
    spectral, older = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.utils.spectral_norm
    tanh = nn.Tanh()
    assert last(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == []
    assert last(nn.Sequential(w, nn.ReLU(), w)) == []  # quadratic in w
    assert last(nn.Sequential(tied, nn.ReLU(), w)) == []
    assert last(nn.Sequential(nn.ReLU(), spectral)) == []  # w / |w|
    assert last(nn.Sequential(nn.ReLU(), older(nn.Linear(2, 2)))) == []
    assert last(nn.Sequential(tanh, nn.Linear(2, 2), tanh)) == []
    assert last(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))) == []
    assert last(Scale(2)) == []
    assert last(LambdaLayer(torch.tanh)) == []


class Attention(nn.Module):
    """Attention of its author's own; `twice` uses its last layer for the values, too."""

    def __init__(self, *, twice: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(4, 12), nn.Linear(4, 4), nn.Dropout(0.0)
        self.twice, self.scaled = twice, scaled

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, self.out(v) if self.twice else v)
        found = self.drop(self.out(mixed))
        return found * 0.5 if self.scaled else found


def test_a_module_of_its_authors_own_ends_in_its_last_layer() -> None:
    own = Attention()
    nested = nn.Sequential(nn.LayerNorm(4), own, nn.ReLU())
    assert (
        [id(p) for p in last(own)] == [id(p) for p in last(nested)] == [id(own.out.weight), id(own.out.bias)]
    )
    assert last(Attention(twice=True)) == []  # quadratic in the last layer
    assert last(Attention(scaled=True)) == []  # homogeneous, but not plain from the types
    assert last(nn.Sequential(own, own)) == []
    branch = own(torch.randn(2, 3, 4))
    (branch * branch.detach().cos()).sum().backward()
    by_hand = (branch * branch.detach().cos()).sum()
    euler = sum((p.grad * p).sum() for p in last(own))
    torch.testing.assert_close(euler, by_hand)
