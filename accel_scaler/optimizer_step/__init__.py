"""The end of a window: unscale, check, clip, update the scale, step, in this order.

:class:`Boundary` takes an optimizer whose gradients are accumulated, decides on the training
thread and hands what is left to do to the optimizer's :class:`Stepper`, which is inline here. What
it learns it writes to the window; each :class:`Observer` receives the events. It knows no optimizer
thread, no Accelerate and no telemetry: what steps later is a Stepper like any other.
"""

from .boundary import Boundary, boundary_of
from .fused_adam import AdamGroup, is_plain
from .observer import Observer
from .stepper import (
    ATTRIBUTE,
    Stepper,
    StepTiming,
    async_stepper_of,
    register,
    stepper_of,
    unregister,
)

__all__ = [
    "ATTRIBUTE",
    "AdamGroup",
    "Boundary",
    "Observer",
    "StepTiming",
    "Stepper",
    "async_stepper_of",
    "boundary_of",
    "is_plain",
    "register",
    "stepper_of",
    "unregister",
]
