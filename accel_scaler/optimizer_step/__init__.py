"""The end of a window: unscale, check, clip, update the scale, step, in this order.

:class:`Boundary` takes an optimizer whose gradients are accumulated, decides on the training
thread and hands what is left to do to the optimizer's :class:`Stepper`; the one here steps inline.
It writes what it learns to the window, and each :class:`Observer` receives the events. The folder
knows no optimizer thread, no Accelerate, no telemetry: what steps later is one more Stepper.
"""

from .arena import (
    Arena as Arena,
    Held as Held,
    Placed as Placed,
    are_same as are_same,
    flat as flat,
    is_dense as is_dense,
    length_of as length_of,
    place_of as place_of,
)
from .blocks import (
    Block as Block,
    Follower as Follower,
    Run as Run,
    Scratch as Scratch,
    neighbours as neighbours,
    rule_of as rule_of,
    stretches as stretches,
)
from .boundary import Boundary as Boundary, boundary_of as boundary_of
from .mistakes import DroppedBatches as DroppedBatches
from .mode_choice import ModeChoice as ModeChoice
from .observer import Observer as Observer
from .stepper import (
    ATTRIBUTE as ATTRIBUTE,
    InlineStepper as InlineStepper,
    Stepper as Stepper,
    StepTiming as StepTiming,
    async_stepper_of as async_stepper_of,
    is_replaced as is_replaced,
    raw_step as raw_step,
    register as register,
    stepper_of as stepper_of,
    unregister as unregister,
)
