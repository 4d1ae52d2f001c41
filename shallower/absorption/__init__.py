"""Fold the skips that removed blocks left behind into the layers around them."""

from shallower.absorption.surgery import Absorption, absorb

__all__ = ["Absorption", "absorb"]
