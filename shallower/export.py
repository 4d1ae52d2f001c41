"""A finished network in the forms that others read: ONNX, a torch.export program, or its tensors alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

TOLERANCE = 1e-5


def export_onnx(net: nn.Module, example: Tensor, path: Path) -> None:
    """An ONNX file with a free batch size, held against `net` with onnxruntime at two of them."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"ONNX needs onnx, onnxscript and onnxruntime ({error}): pip install shallower[onnx]"
        ) from error
    program = torch.onnx.export(
        net, (_batch(example),), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
    )
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    _check(net, example, lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]))


def export_torch(net: nn.Module, example: Tensor, path: Path) -> None:
    """A torch.export program with a free batch size, saved and read back: `torch.export.load(path)`."""
    batch = torch.export.Dim("batch")
    torch.export.save(torch.export.export(net, (_batch(example),), dynamic_shapes=({0: batch},)), path)
    _check(net, example, torch.export.load(path).module())


def export_safetensors(net: nn.Module, example: Tensor, path: Path) -> None:
    """The tensors under their names; tied ones under the first."""
    once = {id(t): name for name, t in reversed(net.state_dict(keep_vars=True).items())}
    save_file({n: t.contiguous() for n, t in net.state_dict().items() if n in once.values()}, path)


FORMS: dict[str, tuple[str, Callable[[nn.Module, Tensor, Path], None]]] = {
    "onnx": ("model.onnx", export_onnx),
    "torch": ("model.pt2", export_torch),
    "safetensors": ("weights.safetensors", export_safetensors),
}


def export(net: nn.Module, example: Tensor, to: str, path: Path, *, fold: bool = False) -> Path:
    """Write `net`, in evaluation mode, to `path`; if `fold`, BatchNorm becomes part of the convolutions.

    What is written is run and compared with `net` first; a file that was there before stays until then.
    """
    if to not in FORMS:
        raise ValueError(f"There is no form {to!r}; there are {', '.join(FORMS)}.")
    net = net.eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_stem(f"{path.stem}-part")
    if fold:
        from torch.fx.experimental.optimization import fuse  # slow to import, and warns of other things

        folded = fuse(net)
        _check(net, example, folded)
        net = folded
    try:
        with torch.no_grad():
            FORMS[to][1](net, example, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _batch(example: Tensor) -> Tensor:
    """Two samples: a batch of one would be taken for a constant."""
    return torch.cat([example, example])[:2]


def _check(net: nn.Module, example: Tensor, other: Callable[[Tensor], Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5):
        x = torch.randn(size, *example.shape[1:], generator=generator)
        with torch.no_grad():
            ours, theirs = net(x), other(x)
        worst = float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1.0))
        if not worst <= TOLERANCE:
            raise RuntimeError(
                f"What was exported differs from the network by {worst:.1e} at batch {size}; at most "
                f"{TOLERANCE:.0e} is allowed. Nothing was written."
            )
