"""Accelerate and the Trainer: :func:`attach` and :func:`detach`.

An accelerator or a Trainer comes in and leaves with its class changed to one of ours, whose
overridden methods lead to the boundary and the asynchronous step; :func:`detach` is the way back.
No function of another library is replaced. The folder computes no gradient itself, and knows no
launcher.
"""

from .accelerator import ScaledAccelerator
from .attaching import attach, attach_default, detach
from .attachment import Attachment, call_when_attached
from .stock_scaler import scaled_elsewhere

__all__ = [
    "Attachment",
    "ScaledAccelerator",
    "attach",
    "attach_default",
    "call_when_attached",
    "detach",
    "scaled_elsewhere",
]
