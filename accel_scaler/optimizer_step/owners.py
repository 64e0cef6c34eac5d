"""Several optimizers over the same parameters: the one that was prepared last owns them.

That is so where one of the two steps beside forward and backward, or has float32 masters of what
both step: neither would see the other's update. Else both step, as in torch.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..errors import OrderError
from ..scaling import parameters_of

if TYPE_CHECKING:
    from .replica_stepper import ReplicaStepper

logger = logging.getLogger("accel_scaler")

_steppers: weakref.WeakSet[ReplicaStepper] = weakref.WeakSet()
"""Steppers that own parameters."""

replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose parameters another one has taken over."""


def own_parameters(stepper: ReplicaStepper) -> None:
    """The optimizer of ``stepper`` was prepared last, or has new parameters: close other steppers
    of some of its parameters, each with a warning in the log. Raises ``StepError`` where the last
    step of one failed; it is closed all the same."""
    replaced.discard(stepper.optimizer)
    for other in [each for each in _steppers if each is not stepper and not each.is_closed]:
        if common := _conflict(stepper, other):
            replaced.add(other.optimizer)
            logger.warning(
                "an optimizer that was prepared after this %s owns its parameters, and this one is "
                "closed: both step %d parameters. The model keeps its last update; step() raises "
                "OrderError until it is prepared again.",
                type(other.optimizer).__name__,
                common,
            )
            other.give_way()
    _steppers.add(stepper)


def _conflict(one: ReplicaStepper, other: ReplicaStepper) -> int:
    """How many parameters both have, where only one may step them; else 0."""
    known = set(map(id, parameters_of(one.optimizer)))
    common = [p for p in parameters_of(other.optimizer) if id(p) in known]
    takes = one.replica.masters.takes, other.replica.masters.takes
    is_beside = one.reads_beside or other.reads_beside
    return len(common) if is_beside or any(take(p) for take in takes for p in common) else 0


def refuse_replaced_owner(optimizer: Optimizer) -> None:
    """Raise ``OrderError`` where another optimizer owns the parameters by now."""
    if optimizer in replaced:
        raise OrderError(
            f"step(): an optimizer that was prepared after this {type(optimizer).__name__} owns "
            "its parameters, and this one was closed. Call step() of that one, prepare a new one, "
            "or, to step both, use step_mode='sync'."
        )
