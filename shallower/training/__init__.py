"""Train and prune a network after a recipe, in a folder that can be resumed at any step."""

from shallower.training.certified import CERTIFICATE, certify_run, recipe_of
from shallower.training.checkpoint import CHECKPOINT, RunError
from shallower.training.folder import begun_by
from shallower.training.launch import launched
from shallower.training.loop import Note, train, train_against_dense
from shallower.training.result import Result, compare
from shallower.training.run import Machine, Run
from shallower.training.stopping import Interrupted

__all__ = [
    "CERTIFICATE",
    "CHECKPOINT",
    "Interrupted",
    "Machine",
    "Note",
    "Result",
    "Run",
    "RunError",
    "begun_by",
    "certify_run",
    "compare",
    "launched",
    "recipe_of",
    "train",
    "train_against_dense",
]
