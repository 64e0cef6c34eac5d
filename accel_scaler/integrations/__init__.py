"""Accelerate and the Trainer: :func:`attach` and :func:`detach`.

``attach`` changes the class of an accelerator or a Trainer to one of ours, whose overridden methods
call the boundary and the asynchronous step; ``detach`` changes it back. No function of another
library is replaced. The folder computes no gradient itself, and knows no launcher.
"""

from .accelerator import ScaledAccelerator
from .attaching import attach, attach_default, detach
from .stock_scaler import scaled_elsewhere

__all__ = [
    "ScaledAccelerator",
    "attach",
    "attach_default",
    "detach",
    "scaled_elsewhere",
]
