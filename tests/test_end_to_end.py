"""Every recipe on CIFAR and ImageNet from the files in their official layout to a pruned, stored network."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import shallower
from shallower import data
from shallower.data import cifar
from shallower.data import folder as folders
from shallower.recipes import RECIPES, recipe
from shallower.training import Interrupted, train

LARGE = [name for name in RECIPES if name.startswith(("cifar", "imagenet"))]


def records(seed: int, samples: int, labels: int) -> bytes:
    """Label bytes and pixels, as the binary files of CIFAR have them."""
    random = np.random.default_rng(seed)
    classes = np.column_stack([np.arange(samples) % 10] * labels)
    return np.column_stack([classes, random.integers(256, size=(samples, 3072))]).astype(np.uint8).tobytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """All three sets, tiny, where the library looks for them."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar-10-batches-bin").mkdir()
    for number, name in enumerate((*cifar.TRAIN_10, *cifar.TEST_10)):
        (folder / "cifar-10-batches-bin" / name).write_bytes(records(number, 4, 1))
    (folder / "cifar-100-binary").mkdir()
    for number, (name,) in enumerate((cifar.TRAIN_100, cifar.TEST_100)):
        (folder / "cifar-100-binary" / name).write_bytes(records(number, 20, 2))
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 1)):
        for label in ("n01440764", "n01443537"):
            where = folder / "imagenet" / split / label
            where.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(256, size=(80, 70, 3), dtype=np.uint8)
                image.fromarray(pixels).save(where / f"{label}_{number}.JPEG")
    return folder


@pytest.fixture
def loaded(place, monkeypatch):
    for name, folder, digest in (
        ("CIFAR10", "cifar-10-batches-bin", hashlib.md5),
        ("CIFAR100", "cifar-100-binary", hashlib.sha1),
    ):
        sums = {f.name: digest(f.read_bytes()).hexdigest() for f in (place / folder).iterdir()}
        monkeypatch.setattr(cifar, name, replace(getattr(cifar, name), files=sums))
    monkeypatch.setitem(folders.FolderBatches.__init__.__kwdefaults__, "size", 32)  # ImageNet's 224 take long
    return lambda task: data.load(task, place, download=False)


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_starts_prunes_finalises_resumes_and_is_stored(name, loaded, tmp_path):
    """Two epochs of two steps in proportion, with a theta that can fall in them, stopped after the first."""
    full = recipe(name)
    sizes = {"batch_size": 4 if full.task == "imagenet" else 10, "theta_lr": 0.5 * 2 / full.epochs}
    if not full.dense:
        sizes["log_gamma"] = -1e6  # larger than any worth on noise
    if full.network == "resnet":
        sizes["options"] = {**full.options, "depth": 20}
    short = recipe(name, sizes).rescaled(2)
    task = loaded(full.task)

    def stop(run, folder):
        raise Interrupted

    with pytest.raises(Interrupted):
        train(short, task, tmp_path, note=stop)
    result = train(short, task, tmp_path, resume=True, worth=False)
    assert result.macs_dense > 10**6
    if full.dense:
        assert result.blocks_kept == result.blocks
    else:
        assert result.blocks_kept < result.blocks
    net = shallower.load(tmp_path)
    images, _ = next(iter(task.batches("test", 2)))
    with torch.no_grad():
        assert net.eval()(images).shape == (
            2,
            short.options.get("classes", 1000 if full.task == "imagenet" else 10),
        )
