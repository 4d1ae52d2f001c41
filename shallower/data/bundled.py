"""The two sets that scikit-learn brings along: digits and diabetes. No download, no file."""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from shallower.data.sets import Samples
from shallower.data.sources import DataError

TEST_SHARE = 5  # one sample in five is for the test


def digits() -> tuple[Samples, Samples]:
    """1797 images (1, 8, 8) in [0, 1], ten classes; 1438 to train, 359 to test."""
    images, labels = _sklearn().load_digits(return_X_y=True)
    inputs = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)
    return _split(inputs, torch.from_numpy(labels).long())


def diabetes() -> tuple[Samples, Samples]:
    """442 patients, ten features, one target (n, 1); all standardised by the training split."""
    features, progress = _sklearn().load_diabetes(return_X_y=True, scaled=False)
    train, test = _split(torch.from_numpy(features), torch.from_numpy(progress).unsqueeze(1))
    inputs, targets = _statistics(train.inputs), _statistics(train.labels)
    standardised = [
        Samples(((s.inputs - inputs[0]) / inputs[1]).float(), ((s.labels - targets[0]) / targets[1]).float())
        for s in (train, test)
    ]
    return standardised[0], standardised[1]


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.mean(0), values.std(0, correction=0)


def _split(inputs: Tensor, labels: Tensor) -> tuple[Samples, Samples]:
    """The same split for ever: NumPy promises that `RandomState` keeps its stream."""
    order = torch.from_numpy(np.random.RandomState(0).permutation(len(inputs)))
    test, train = order[: len(order) // TEST_SHARE], order[len(order) // TEST_SHARE :]
    return Samples(inputs[train], labels[train]), Samples(inputs[test], labels[test])


def _sklearn() -> ModuleType:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError("digits and diabetes come with scikit-learn: `pip install scikit-learn`") from error
    return datasets
