"""The sets of the paper, verified and in memory, and their batches."""

from shallower.data.augment import crop, crop_and_flip, flip
from shallower.data.folder import FolderBatches, ImageFolder
from shallower.data.sets import Augment, Batches, Loader, Normalise, Samples
from shallower.data.sources import DataError, data_folders
from shallower.data.tasks import NAMES, Task, load

__all__ = [
    "NAMES",
    "Augment",
    "Batches",
    "DataError",
    "FolderBatches",
    "ImageFolder",
    "Loader",
    "Normalise",
    "Samples",
    "Task",
    "crop",
    "crop_and_flip",
    "data_folders",
    "flip",
    "load",
]
