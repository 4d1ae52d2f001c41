"""Augmentation of a whole batch at once, on its own device; each image has its own draw.

Functions of (images, generator) to images, as `Batches(augment=...)` takes them. The generator lives on the
CPU. Crop and mirror are both a choice of rows and columns, so one gather does them together.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def crop(images: Tensor, generator: Generator, *, pad: int = 4) -> Tensor:
    """Pad each image with `pad` black pixels on every side and cut the old size out of it at random."""
    rows, columns = _windows(images, generator, pad)
    return _pick(F.pad(images, (pad,) * 4), rows, columns)


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror each image left to right with probability one half."""
    rows, columns = _whole(images)
    return _pick(images, rows, _mirror(columns, generator))


def crop_and_flip(images: Tensor, generator: Generator, *, pad: int = 4) -> Tensor:
    """`crop`, then `flip`: what CIFAR networks are trained with."""
    rows, columns = _windows(images, generator, pad)
    return _pick(F.pad(images, (pad,) * 4), rows, _mirror(columns, generator))


def _whole(images: Tensor) -> tuple[Tensor, Tensor]:
    n, _, height, width = images.shape
    rows = torch.arange(height, device=images.device).expand(n, height)
    return rows, torch.arange(width, device=images.device).expand(n, width)


def _windows(images: Tensor, generator: Generator, pad: int) -> tuple[Tensor, Tensor]:
    offsets = torch.randint(2 * pad + 1, (2, len(images), 1), generator=generator)
    offsets = _sent(offsets, images.device)
    rows, columns = _whole(images)
    return rows + offsets[0], columns + offsets[1]


def _mirror(columns: Tensor, generator: Generator) -> Tensor:
    mirrored = torch.rand(len(columns), 1, generator=generator) < 0.5
    return torch.where(_sent(mirrored, columns.device), columns.flip(1), columns)


def _sent(draws: Tensor, device: torch.device) -> Tensor:
    """Draws on the device of the images, without waiting for it."""
    return draws.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else draws.to(device)


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """images[i, :, rows[i], columns[i]] for every i: (n, channels, rows, columns)."""
    n, channels, _, width = images.shape
    index = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)  # (n, rows * columns)
    picked = images.flatten(2).gather(2, index.unsqueeze(1).expand(-1, channels, -1))
    return picked.view(n, channels, rows.shape[1], columns.shape[1])
