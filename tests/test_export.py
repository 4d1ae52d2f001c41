"""What is written for others computes what the network computes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shallower
from shallower.export import FORMS, export
from shallower.models import resnet20

WARNINGS = ("FutureWarning", "DeprecationWarning", "UserWarning")  # of the exporters
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in WARNINGS]


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """A ResNet-20 that has lost blocks, one of them with a shortcut that changes the shape."""
    torch.manual_seed(0)
    model = resnet20()
    blocks = [block.name for block in shallower.find_blocks(model)]
    shallower.apply_structure(model, {"removed": [blocks[0], blocks[3], blocks[7]]})
    with torch.no_grad():
        for _ in range(3):  # statistics that BatchNorm's folding has to get right
            model(torch.randn(8, 3, 32, 32))
    return model.eval()


EXAMPLE = torch.zeros(1, 3, 32, 32)


@pytest.mark.parametrize("fold", [False, True])
def test_a_program_of_torch_export_takes_any_batch(net, tmp_path, fold):
    path = export(net, EXAMPLE, "torch", tmp_path / "net.pt2", fold=fold)
    program = torch.export.load(path).module()
    for size in (1, 3, 7):
        x = torch.randn(size, 3, 32, 32)
        assert torch.allclose(program(x), net(x), atol=1e-5)
    names = {type(m).__name__ for m in program.modules()}
    assert "Gated" not in str(names)


def test_folding_leaves_no_batch_norm(net, tmp_path):
    export(net, EXAMPLE, "safetensors", tmp_path / "a.safetensors")
    export(net, EXAMPLE, "safetensors", tmp_path / "b.safetensors", fold=True)
    plain, folded = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert any("running_mean" in name for name in plain)
    assert not any("running_mean" in name for name in folded)
    assert set(plain) == set(net.state_dict())


def test_onnx_takes_any_batch(net, tmp_path, monkeypatch):
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = export(net, EXAMPLE, "onnx", tmp_path / "net.onnx")
    session = runtime.InferenceSession(str(path))
    for size in (1, 4):
        x = torch.randn(size, 3, 32, 32)
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert torch.allclose(torch.from_numpy(out), net(x), atol=1e-5)


def test_what_differs_is_not_left_on_disk(net, tmp_path, monkeypatch):
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return net(x) + 1e-3

    monkeypatch.setattr(torch.export, "load", lambda path: type("P", (), {"module": lambda self: Other()})())
    (tmp_path / "net.pt2").write_text("what was there before")
    with pytest.raises(RuntimeError, match="differs from the network by"):
        export(net, EXAMPLE, "torch", tmp_path / "net.pt2")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["what was there before"]


def test_tied_weights_are_written_once(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    export(model, torch.zeros(1, 3), "safetensors", tmp_path / "tied.safetensors")
    assert set(load_file(tmp_path / "tied.safetensors")) == {"0.weight", "0.bias", "1.bias"}


def test_an_unknown_form_is_named():
    with pytest.raises(ValueError, match=", ".join(FORMS)):
        export(nn.Identity(), EXAMPLE, "tflite", Path("nowhere"))


class Words(nn.Module):
    """Whole numbers and a mask in, two tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.table(words)
        return z + self.line(z) * mask.unsqueeze(-1), z.mean(1)


@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_inputs_may_be_several_and_whole_numbers(tmp_path, to):
    if to == "onnx":
        pytest.importorskip("onnxscript")
    words = torch.arange(10).reshape(2, 5) % 9
    path = export(Words(), {"words": words, "mask": torch.ones(2, 5)}, to, tmp_path / FORMS[to][0])
    assert path.exists()
