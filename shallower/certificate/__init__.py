"""The paper's optimality conditions, checked on a trained network.

    certificate = certify(model, pruner, batches, loss)

`survivors` measures the conditions of a block that stays, `curvature` the smallest eigenvalue that one of
them needs, `deaths` weighs the evidence for a block that has gone, `ladder` says at which price others would.
"""

from shallower.certificate.certify import Certificate, certify
from shallower.certificate.curvature import Eigenvalue, smallest_eigenvalue
from shallower.certificate.deaths import Death
from shallower.certificate.ladder import Rung, price_ladder
from shallower.certificate.survivors import Survivor

__all__ = [
    "Certificate",
    "Death",
    "Eigenvalue",
    "Rung",
    "Survivor",
    "certify",
    "price_ladder",
    "smallest_eigenvalue",
]
