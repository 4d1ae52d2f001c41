"""Train and prune a network after a recipe, in a folder that can be resumed at any step."""

from shallower.training.loop import Interrupted, train, train_against_dense
from shallower.training.result import Result
from shallower.training.run import Machine, RunError

__all__ = ["Interrupted", "Machine", "Result", "RunError", "train", "train_against_dense"]
