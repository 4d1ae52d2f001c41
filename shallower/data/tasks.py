"""The sets by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from shallower.data import bundled, cifar, folder, idx
from shallower.data.sets import Augment, Batches, Loader, Normalise, Samples
from shallower.data.sources import Contents, Damaged, DataError, Origin, obtain

Where = str | Path | None
Obtain = Callable[[Origin], Contents]


@dataclass(frozen=True, eq=False)
class Task:
    """A set to learn: its two splits, and what a network and a loss have to know about it.

        task = load("cifar10")
        train = task.batches("train", 128, seed=0, augment=crop_and_flip, device="cuda")
        test = task.batches("test", 1000, device="cuda")

    The size that the method calls N is `len(task.train)`.
    """

    name: str
    kind: Literal["classification", "regression"]
    train: Samples | folder.ImageFolder
    test: Samples | folder.ImageFolder
    num_classes: int  # outputs of the network: 1 for a regression
    mean: tuple[float, ...]  # of each channel of the training inputs, uint8 being scaled to [0, 1]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:]) if isinstance(self.train, Samples) else (3, 224, 224)

    def batches(
        self,
        split: Literal["train", "test"],
        batch_size: int,
        *,
        seed: int = 0,
        augment: Augment | None = None,
        device: torch.device | str | None = None,
        replacement: bool = False,
        drop_last: bool = False,
        normalised: bool = True,
        part: tuple[int, int] = (0, 1),
    ) -> Loader:
        """Batches: `train` shuffled, `test` in order; of mean 0 and variance 1, or else as in [0, 1]."""
        if split not in ("train", "test"):
            raise ValueError(f"The split {split!r} is unknown; there are 'train' and 'test'.")
        training = split == "train"
        samples = self.train if training else self.test
        normalise = Normalise(self.mean, self.std) if normalised else Normalise()
        if isinstance(samples, Samples):
            return Batches(
                samples.inputs,
                samples.labels,
                batch_size,
                seed=seed,
                shuffle=training,
                augment=augment,
                normalise=normalise,
                device=device,
                replacement=replacement,
                drop_last=drop_last,
                part=part,
            )
        return folder.FolderBatches(
            samples,
            batch_size,
            seed=seed,
            shuffle=training,
            view=folder.random_view if training else folder.centre_view,
            augment=augment,
            normalise=normalise,
            device=device,
            replacement=replacement,
            drop_last=drop_last,
            part=part,
        )


def load(name: str, data_dir: Where = None, download: bool = True, *, keep: bool = False) -> Task:
    """The set `name`, verified and in memory (ImageNet: on disk), fetched first if no data folder holds it.

    Looked for in `data_dir`, then in $SHALLOWER_DATA, then in ~/.cache/shallower. What has to be fetched is
    written into the first of these that is named, so that the next call needs no network; with `keep` also
    what was found in another, so that the folder can be taken elsewhere.
    """
    if name not in LOADERS:
        raise ValueError(f"There is no set {name!r}; there are {', '.join(LOADERS)}.")
    try:
        return LOADERS[name](data_dir, partial(obtain, data_dir=data_dir, download=download, keep=keep))
    except Damaged as error:
        command = f"shallower data {name}" + (f" --data-dir {data_dir}" if data_dir else "")
        raise DataError(
            f"{error} It is damaged or of another set: move it away, and `{command}` fetches a good copy."
        ) from error


def _digits(data_dir: Where, obtain: Obtain) -> Task:
    train, test = bundled.digits()
    mean, std = float(train.inputs.mean()), float(train.inputs.std(correction=0))
    return Task("digits", "classification", train, test, 10, (mean,), (std,))


def _diabetes(data_dir: Where, obtain: Obtain) -> Task:
    return Task("diabetes", "regression", *bundled.diabetes(), 1, (0.0,), (1.0,))


def _mnist(data_dir: Where, obtain: Obtain) -> Task:
    return _idx(idx.MNIST, 0.13066048, 0.30810780, obtain)


def _fashion_mnist(data_dir: Where, obtain: Obtain) -> Task:
    return _idx(idx.FASHION_MNIST, 0.28604060, 0.35302424, obtain)


def _idx(origin: Origin, mean: float, std: float, obtain: Obtain) -> Task:
    contents = obtain(origin)
    train, test = idx.read_idx_pair(contents, *idx.TRAIN), idx.read_idx_pair(contents, *idx.TEST)
    return Task(origin.name, "classification", train, test, 10, (mean,), (std,))


def _cifar10(data_dir: Where, obtain: Obtain) -> Task:
    contents = obtain(cifar.CIFAR10)
    train, test = (cifar.read_cifar(contents, files, (10,)) for files in (cifar.TRAIN_10, cifar.TEST_10))
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    return Task("cifar10", "classification", train, test, 10, mean, std)


def _cifar100(data_dir: Where, obtain: Obtain) -> Task:
    contents = obtain(cifar.CIFAR100)
    train, test = (
        cifar.read_cifar(contents, files, (20, 100)) for files in (cifar.TRAIN_100, cifar.TEST_100)
    )
    mean, std = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)
    return Task("cifar100", "classification", train, test, 100, mean, std)


def _imagenet(data_dir: Where, obtain: Obtain) -> Task:
    train, val = folder.imagenet(data_dir)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Task("imagenet", "classification", train, val, len(train.classes), mean, std)


LOADERS: dict[str, Callable[[Where, Obtain], Task]] = {
    "digits": _digits,
    "diabetes": _diabetes,
    "mnist": _mnist,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "imagenet": _imagenet,
}
NAMES = tuple(LOADERS)
