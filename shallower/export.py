"""A finished network in the forms that others read: ONNX, a torch.export program, or its tensors alone."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

TOLERANCE = 1e-5


def export_onnx(net: nn.Module, example: Any, path: Path) -> None:
    """An ONNX file with a free batch size, held against `net` with onnxruntime at two of them."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"ONNX needs onnx, onnxscript and onnxruntime ({error}): pip install shallower[onnx]"
        ) from error
    args, kwargs, shapes = _call(example)
    program = torch.onnx.export(net, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        feed = dict(zip(names, (x.numpy() for x in tree_leaves((args, kwargs))), strict=True))
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    _check(net, example, run)


def export_torch(net: nn.Module, example: Any, path: Path) -> None:
    """A torch.export program with a free batch size, saved and read back: `torch.export.load(path)`."""
    args, kwargs, shapes = _call(example)
    torch.export.save(torch.export.export(net, args, kwargs, dynamic_shapes=shapes), path)
    _check(net, example, torch.export.load(path).module())


def export_safetensors(net: nn.Module, example: Any, path: Path) -> None:
    """The tensors under their names; tied ones under the first."""
    once = {id(t): name for name, t in reversed(net.state_dict(keep_vars=True).items())}
    save_file({n: t.contiguous() for n, t in net.state_dict().items() if n in once.values()}, path)


FORMS: dict[str, tuple[str, Callable[[nn.Module, Any, Path], None]]] = {
    "onnx": ("model.onnx", export_onnx),
    "torch": ("model.pt2", export_torch),
    "safetensors": ("weights.safetensors", export_safetensors),
}


def export(net: nn.Module, example: Any, to: str, path: Path, *, fold: bool = False) -> Path:
    """Write `net`, in evaluation mode, to `path`; if `fold`, BatchNorm becomes part of the convolutions.

    `example` is an input: a tensor, a tuple of arguments or a dict of keyword arguments, the batch being the
    first dimension of each tensor. What is written is run and compared with `net` first; a file that was
    there before stays until then.
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


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments of two samples (a batch of one would be taken for a constant), and that the batch is free."""
    args, kwargs = _arguments(tree_map(lambda x: torch.cat([x, x])[:2], example))
    batch = torch.export.Dim("batch")
    free = tree_map(lambda x: {0: batch}, (args, kwargs))
    return args, kwargs, free[1] if kwargs else free[0]


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _check(net: nn.Module, example: Any, other: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)

    def like(x: Tensor, size: int) -> Tensor:
        if x.is_floating_point():
            return torch.randn(size, *x.shape[1:], generator=generator, dtype=x.dtype)
        return x[torch.randint(len(x), (size,), generator=generator)]

    for size in (1, 5):
        args, kwargs = _arguments(tree_map(partial(like, size=size), example))
        with torch.no_grad():
            ours, theirs = _tensors(net(*args, **kwargs)), _tensors(other(*args, **kwargs))
        pairs = list(zip(ours, theirs, strict=False))
        worst = max(float((a - b).abs().max() / a.abs().max().clamp(min=1.0)) for a, b in pairs)
        if not worst <= TOLERANCE or len(ours) != len(theirs):
            raise RuntimeError(
                f"What was exported differs from the network by {worst:.1e} at batch {size}; at most "
                f"{TOLERANCE:.0e} is allowed. Nothing was written."
            )


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
