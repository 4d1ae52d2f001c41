"""Train a neural network and prune its layers at the same time."""

from shallower.absorption import Absorption, absorb
from shallower.blocks import find_blocks, survey
from shallower.certificate import Certificate, certify
from shallower.estimators import at_the_sum, first_order, flip
from shallower.gate import Gate
from shallower.inspection import Inspection, inspect_model
from shallower.ledger import BlockCost, Ledger, block_costs, count_macs, count_parameters
from shallower.optim import RobbinsMonro, forget
from shallower.prior import constant, linear_ramp
from shallower.pruner import Pruner, Removal
from shallower.residual import ChannelCopy, Residual, ZeroPad
from shallower.split import Block, NotResidual, split
from shallower.store import apply_structure, load, save
from shallower.worth import Worth, worth

__version__ = "0.1.0"

__all__ = [
    "Absorption",
    "Block",
    "BlockCost",
    "Certificate",
    "ChannelCopy",
    "Gate",
    "Inspection",
    "Ledger",
    "NotResidual",
    "Pruner",
    "Removal",
    "Residual",
    "RobbinsMonro",
    "Worth",
    "ZeroPad",
    "absorb",
    "apply_structure",
    "at_the_sum",
    "block_costs",
    "certify",
    "constant",
    "count_macs",
    "count_parameters",
    "find_blocks",
    "first_order",
    "flip",
    "forget",
    "inspect_model",
    "linear_ramp",
    "load",
    "save",
    "split",
    "survey",
    "worth",
]
