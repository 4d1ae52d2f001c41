"""ImageNet, or any folder like it: train/<class>/*.JPEG and val/<class>/*, decoded batch by batch."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shallower.data.sets import Augment, Batch, Loader, Normalise
from shallower.data.sources import DataError, data_folders, pillow

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LOOKAHEAD = 2  # batches that are decoded while the network works on another

View = Callable[
    [Any, list[float], int], Any
]  # (Pillow image, five draws from [0, 1), size) -> image of that size


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """One split on disk: a sub-folder for each class, the classes numbered in the order of their names.

    Single images have no published checksum, so that they are checked only as they are decoded.
    """

    root: Path
    classes: tuple[str, ...]
    paths: list[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.paths)


def scan(root: Path) -> ImageFolder:
    """List the images below `root`; an empty class, or images outside a class, are errors."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    if not classes:
        loose = sum(name.lower().endswith(IMAGE_SUFFIXES) for name in os.listdir(root))
        raise DataError(
            f"{root}: found {loose:,} images and no folder of a class; needed {root}/<class>/<image>. "
            "Sort the images into a folder for each class, named as in train."
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(file for file in os.listdir(root / name) if file.lower().endswith(IMAGE_SUFFIXES))
        if not images:
            raise DataError(
                f"{root / name}: found no image named {', '.join(IMAGE_SUFFIXES)}; needed at least one. "
                "Unpack the class again, or remove its folder from train and val."
            )
        paths += [str(root / name / file) for file in images]
        labels += [label] * len(images)
    return ImageFolder(root, tuple(classes), paths, torch.tensor(labels))


def imagenet(data_dir: str | Path | None = None) -> tuple[ImageFolder, ImageFolder]:
    """The two splits, out of DIR/imagenet or DIR."""
    pillow()
    places = [place for folder in data_folders(data_dir) for place in (folder / "imagenet", folder)]
    root = next((place for place in places if (place / "train").is_dir() and (place / "val").is_dir()), None)
    if root is None:
        raise DataError(
            "No data for 'imagenet'. Looked for the folders train and val in:\n  "
            + "\n  ".join(map(str, places))
            + "\nImageNet is given out by image-net.org only. Unpack it to DIR/train/<class>/*.JPEG and "
            "DIR/val/<class>/*.JPEG and name DIR by `--data-dir DIR`, `data_dir=DIR` or SHALLOWER_DATA."
        )
    train, val = scan(root / "train"), scan(root / "val")
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise DataError(
            f"{root}: found {len(train.classes)} classes in train and {len(val.classes)} in val; "
            f"needed the same. Complete or remove {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}."
        )
    return train, val


def _in_colour(image: Any) -> Any:
    """An image as RGB of eight bits; Pillow would cut 16 bits at 255 instead of scaling them."""
    if image.mode.startswith("I"):
        image = pillow().fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of an unknown range")
    return image.convert("RGB")


def random_view(image: Any, draws: list[float], size: int) -> Any:
    """A part (8 to 100 % of the area, 3:4 to 4:3 in shape) scaled to size x size, half of them mirrored.

    A part that would stick out of the image is cut to it, where others draw again.
    """
    width, height = image.size
    area = width * height * (0.08 + 0.92 * draws[0])
    ratio = math.exp(math.log(3 / 4) + draws[1] * math.log(16 / 9))
    w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = draws[2] * (width - w), draws[3] * (height - h)
    part = image.resize((size, size), pillow().Resampling.BILINEAR, box=(left, top, left + w, top + h))
    return part.transpose(pillow().Transpose.FLIP_LEFT_RIGHT) if draws[4] < 0.5 else part


def centre_view(image: Any, draws: list[float], size: int) -> Any:
    """The middle 224/256 of the shorter side, as a square, scaled to size x size."""
    width, height = image.size
    side = min(width, height) * 224 / 256
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), pillow().Resampling.BILINEAR, box=(left, top, left + side, top + side))


class FolderBatches(Loader):
    """Batches of a folder of images, decoded by threads a little ahead of the network.

        train = FolderBatches(folder, 256, seed=0, view=random_view, normalise=Normalise(mean, std))

    The draws of a batch are made before the threads see it: its tensors do not depend on their number.
    """

    def __init__(
        self,
        folder: ImageFolder,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        view: View = random_view,
        augment: Augment | None = None,
        normalise: Normalise | None = None,
        device: torch.device | str | None = None,
        replacement: bool = False,
        drop_last: bool = False,
        part: tuple[int, int] = (0, 1),
        size: int = 224,
        workers: int | None = None,
    ) -> None:
        options = {"seed": seed, "shuffle": shuffle, "replacement": replacement, "drop_last": drop_last}
        super().__init__(len(folder), batch_size, **options, part=part)  # type: ignore[arg-type]
        self.folder, self.view, self.image_size = folder, view, size
        self.augment = augment
        self.device = torch.device(device or "cpu")
        self.normalise = (normalise or Normalise()).like(
            torch.empty(0, 3, 1, 1, dtype=torch.uint8), self.device
        )
        self.workers = workers or min(8, os.cpu_count() or 1)

    def pairs(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self.order(epoch)
        waiting: deque[tuple[list[Future[Tensor]], Tensor, int]] = deque()
        pool = ThreadPoolExecutor(self.workers)
        try:
            for batch in range(start, len(self)):
                index = order[self.span(batch)]
                draws = torch.rand(len(index), 5, generator=self.generator(epoch, batch))
                index, mine = index[self.own(batch)], draws[self.own(batch)].tolist()
                images = [pool.submit(self._decode, *job) for job in zip(index.tolist(), mine, strict=True)]
                waiting.append((images, index, batch))
                if len(waiting) > LOOKAHEAD:
                    yield self._collect(epoch, *waiting.popleft())
            while waiting:
                yield self._collect(epoch, *waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _collect(self, epoch: int, images: list[Future[Tensor]], index: Tensor, batch: int) -> Batch:
        size = self.image_size
        none = torch.empty(0, 3, size, size, dtype=torch.uint8)  # a rank's part of a small batch
        inputs = torch.stack([image.result() for image in images]) if images else none
        inputs = inputs.to(self.device, non_blocking=True)
        if self.augment is not None:
            inputs = self._augmented(inputs, epoch, batch)
        return self.normalise(inputs), self.folder.labels[index].to(self.device, non_blocking=True)

    def _augmented(self, inputs: Tensor, epoch: int, batch: int) -> Tensor:
        """Draws are for all ranks, of which this one has decoded its own part."""
        assert self.augment is not None
        mine, number = self.own(batch), len(range(self.size)[self.span(batch)])
        whole = inputs.new_zeros(number, *inputs.shape[1:])
        whole[mine] = inputs
        return self.augment(whole, self.generator(epoch, batch, 1))[mine]

    def _decode(self, index: int, draws: list[float]) -> Tensor:
        path = self.folder.paths[index]
        try:
            with pillow().open(path) as image:
                pixels = np.array(self.view(_in_colour(image), draws, self.image_size))
        except Exception as error:  # Pillow's decoders raise whatever a damaged file makes them
            raise DataError(
                f"{path}: found an image that does not decode ({error}); needed a whole JPEG or PNG. "
                "Unpack it again, or remove it."
            ) from error
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
