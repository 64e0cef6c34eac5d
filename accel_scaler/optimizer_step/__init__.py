"""The end of a window: unscale, check, clip, update the scale, step, in this order.

:class:`Boundary` takes an optimizer whose gradients are accumulated, decides on the training
thread and leaves the update to the optimizer's :class:`Stepper`: torch's own step, or a
:class:`ReplicaStepper`, which has float32 masters. It writes what it learns to the window, and each
:class:`Observer` receives the events. The folder knows no optimizer thread, no Accelerate, no
telemetry: what steps beside the training is one more Stepper.
"""

from .boundary import Boundary as Boundary, boundary_of as boundary_of
from .masters import (
    MasterRule as MasterRule,
    goes_to_master as goes_to_master,
    holds_masters as holds_masters,
    is_stepped as is_stepped,
    master_rule as master_rule,
)
from .mistakes import DroppedBatches as DroppedBatches
from .observer import Observer as Observer
from .offloaded import ring_bytes as ring_bytes
from .replica import Replica as Replica
from .replica_stepper import ReplicaStepper as ReplicaStepper
from .stepper import (
    StepTiming as StepTiming,
    async_stepper_of as async_stepper_of,
    stepper_of as stepper_of,
)
from .supported_optimizers import (
    is_splittable as is_splittable,
    overlapping as overlapping,
    refuse_class as refuse_class,
    refuse_unsteppable as refuse_unsteppable,
)
