"""What must hold for any model that is gated, whoever wrote it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shallower import Pruner, find_blocks
from shallower.discovery import run_example
from shallower.fitting import AnyBlock, cut
from shallower.ledger import count_parameters

RATES = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drop_prob", "attn_drop", "p")


def tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returns; caches are not compared."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [t for k, v in value.items() if k != "past_key_values" for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def tamed(model: nn.Module) -> nn.Module:
    """No dice are rolled, no statistics move, and no scale starts at zero, which would hide a lost branch."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0
        for name in RATES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    for parameter in model.parameters():
        if parameter.ndim == 1 or parameter.detach().abs().max() < 1e-3:
            nn.init.normal_(parameter, 0.5, 0.1)
    return model


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    torch.manual_seed(1)
    return tensors(run_example(model, example))


def loss(model: nn.Module, example: Any) -> Tensor:
    return torch.stack([out.float().square().mean() for out in outputs(model, example)]).sum()


def check_laws(model: nn.Module, example: Any, *, closings: int = 3, whole: bool = False) -> list[AnyBlock]:
    """Gate `model` and hold it against the original; returns the blocks that were found."""
    original = copy.deepcopy(tamed(model))
    blocks = find_blocks(model, example, whole=whole)
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pruner = Pruner(model, optimizer, dataset_size=10, log_gamma=-1.0, theta=1.0, blocks=blocks)
    assert list(model.state_dict()) == names
    _open_is_the_original(model, original, example)
    _every_parameter_moves(model, original, example, pruner)
    some = pruner.names[:: max(1, len(pruner.names) // closings)] + pruner.names[-1:]
    for name in dict.fromkeys(some):
        _closed_is_removed(model, original, example, pruner, name)
    for gate in pruner.gates.values():
        gate.xi = False
    outputs(model, example)  # all gates closed runs
    _finished_is_plain(model, original, example, pruner)
    return blocks


def _open_is_the_original(model: nn.Module, original: nn.Module, example: Any) -> None:
    for training in (True, False):
        ours, theirs = outputs(model.train(training), example), outputs(original.train(training), example)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(b.detach().abs().max()))


def _every_parameter_moves(model: nn.Module, original: nn.Module, example: Any, pruner: Pruner) -> None:
    for net in (model.train(), original.train()):
        loss(net, example).backward()
    moved = [{n for n, p in net.named_parameters() if p.grad is not None} for net in (model, original)]
    assert moved[0] == moved[1]
    theirs = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            size = float(theirs[name].grad.abs().max())
            assert torch.allclose(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5 * size), name
    _estimates_are_derivatives(model, example, pruner)
    pruner.optimizer.zero_grad()
    original.zero_grad()
    pruner.discard()


def _estimates_are_derivatives(model: nn.Module, example: Any, pruner: Pruner) -> None:
    """The last gate's estimate, against the loss of the network in which its branch counts a little less.

    Batch statistics would differ between the two networks' modes, so models with BatchNorm are left out.
    """
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        return
    gate = list(pruner.gates.values())[-1]
    with torch.no_grad():
        ends = []
        for rate in (0.98, 1.02):
            gate.rate = rate
            ends.append(loss(model.eval(), example).item())
    gate.rate = 1.0
    model.train()
    slope = (ends[1] - ends[0]) / 0.04
    assert abs(gate.worth.item() - slope) <= 0.05 * abs(slope) + 1e-4 * abs(ends[0])


def _closed_is_removed(
    model: nn.Module, original: nn.Module, example: Any, pruner: Pruner, name: str
) -> None:
    block, gate = pruner.blocks[name], pruner.gates[name]
    pruned = copy.deepcopy(original)
    cut(pruned, block)
    gate.xi = False
    closed, removed = outputs(model.train(), example), outputs(pruned.train(), example)
    gate.xi = True
    assert all(torch.equal(a, b) for a, b in zip(closed, removed, strict=True)), name
    own = block.prunable(original.get_submodule(block.path)).values()
    assert count_parameters(original) - count_parameters(pruned) == sum(p.numel() for p in own) > 0


def _finished_is_plain(model: nn.Module, original: nn.Module, example: Any, pruner: Pruner) -> None:
    """Every second block goes; what is left has no gate, and is the original less those blocks."""
    pruner.discard()
    pruner.num_steps = pruner.vitals.learned = 1
    gone = pruner.names[::2]
    for index, name in enumerate(pruner.names):
        pruner.theta[index] = 0.0 if name in gone else 1.0
    pruner.finalize()
    net = pruner.finish().eval()
    for name in gone:
        cut(original, pruner.blocks[name])
    ours, theirs = outputs(net, example), outputs(original.eval(), example)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))
    assert not any("shallower_gate" in vars(m) for m in net.modules())
    assert not any("shallower" in n for n, _ in net.named_buffers())
    twin = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(original.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(outputs(twin.eval(), example), theirs, strict=True))
