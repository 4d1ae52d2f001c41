"""Networks on disk: no pickle, and a clear word for every wrong file."""

import json

import pytest
import torch
from torch import nn

import shallower
from shallower import Residual, find_blocks, models, store
from shallower.absorption import absorb
from shallower.graphs import replace


def pruned(network: str, options: dict, removed: list[str]) -> nn.Module:
    torch.manual_seed(0)
    net = getattr(models, network)(**options)
    blocks = {b.name: b for b in find_blocks(net)}
    for name in removed:
        replace(net, name, blocks[name].bypass(net.get_submodule(name)))
    absorb(net, removed, [b for n, b in blocks.items() if n not in removed])
    return net.eval()


@pytest.mark.parametrize(
    ("network", "options", "removed", "shape"),
    [
        ("fc", {"depth": 4}, ["blocks.0", "blocks.2"], (2, 1, 28, 28)),
        ("general", {"depth": 4, "inputs": 6, "width": 5, "outputs": 3}, ["blocks.1"], (2, 6)),
        ("resnet", {"depth": 20}, ["stage2.0", "stage3.0", "stage1.1"], (2, 3, 32, 32)),
        ("mlp", {"inputs": 4, "width": 4, "depth": 2, "outputs": 1}, ["blocks.0", "blocks.1"], (2, 4)),
    ],
)
def test_a_network_comes_back_to_the_bit(tmp_path, network, options, removed, shape):
    net = pruned(network, options, removed)
    store.save(tmp_path, net, network=network, options=options, removed=removed)
    before = torch.get_rng_state()
    again = shallower.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.randn(shape)
    with torch.no_grad():
        assert torch.equal(again(x), net(x))
    assert not again.training


def test_a_network_of_ones_own_is_built_by_ones_own_function(tmp_path):
    def build(width: int) -> nn.Module:
        return nn.Sequential(Residual(nn.Linear(width, width)), nn.Linear(width, 1))

    net = build(3)
    store.save(tmp_path, net, network="mine", options={"width": 3}, removed=[])
    with pytest.raises(ValueError, match="build="):
        shallower.load(tmp_path)
    assert torch.equal(shallower.load(tmp_path, build=build)[1].weight, net[1].weight)


def broken(tmp_path, **changes) -> None:
    net = pruned("fc", {"depth": 3}, ["blocks.0"])
    store.save(tmp_path, net, network="fc", options={"depth": 3}, removed=["blocks.0"])
    structure = {**json.loads((tmp_path / "structure.json").read_text()), **changes}
    (tmp_path / "structure.json").write_text(json.dumps(structure))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "version 1"),
        ({"removed": "all"}, "no structure"),
        ({"removed": ["blocks.9"]}, r"does not have"),
        ({"options": {"depth": 5}}, "does not hold the weights"),
        ({"options": {"depth": 10**30}}, "is more than the .* bytes of both files"),
        ({"sha256": None}, "no structure"),
        ({"sha256": "0"}, "its checksum is not that of the structure"),
    ],
)
def test_a_structure_that_does_not_fit_is_refused(tmp_path, changes, message):
    broken(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        shallower.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_structure_is_refused(tmp_path, content):
    broken(tmp_path)
    (tmp_path / "structure.json").write_bytes(content)
    with pytest.raises(ValueError, match="no structure"):
        shallower.load(tmp_path)


def test_damaged_or_missing_weights_are_refused(tmp_path):
    broken(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:100], b"\x80\x04pickle", b""):
        weights.write_bytes(damaged)
        with pytest.raises(ValueError, match="does not hold the weights"):
            shallower.load(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match="does not hold the weights"):
        shallower.load(tmp_path)


def test_an_empty_folder_says_what_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="shallower train RECIPE"):
        shallower.load(tmp_path)
