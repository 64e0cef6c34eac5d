"""Parameters that several optimizers step.

Each optimizer gets their gradients. Where they have float32 masters, one optimizer owns them: the
one that was prepared last.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from ..errors import OrderError, StepError, UnsupportedError
from ..scaling import parameters_of
from .inflight_step import WaitAt
from .master_params import MasterRule
from .shared_memory import overlapping

if TYPE_CHECKING:
    from .async_stepper import AsyncStepper

logger = logging.getLogger("accel_scaler")

Wanted = tuple[Optimizer, str, MasterRule]
"""An optimizer, its step mode, and what has masters."""

_steppers: weakref.WeakSet[AsyncStepper] = weakref.WeakSet()
"""All that step an optimizer."""

_successors: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters another one has taken over, and the class of that one."""


def enter(stepper: AsyncStepper) -> None:
    """``stepper`` steps its optimizer from now on."""
    forget_successor(stepper.optimizer)
    _steppers.add(stepper)
    find_shared()
    find_tied(stepper)


def leave(stepper: AsyncStepper) -> None:
    """``stepper`` no longer steps its optimizer."""
    _steppers.discard(stepper)
    find_shared()


def others_of(stepper: AsyncStepper) -> list[AsyncStepper]:
    """The other steppers of some of its parameters."""
    if not stepper.shared:
        return []
    return [e for e in _steppers if e is not stepper and e.shared & stepper.shared]


def find_shared() -> None:
    """Set on every stepper which of its parameters other ones step, too."""
    owned = {e: set(map(id, parameters_of(e.optimizer))) for e in _steppers}
    counts = Counter(chain.from_iterable(owned.values()))
    for stepper, own in owned.items():
        stepper.shared = frozenset(i for i in own if counts[i] > 1)


def find_tied(stepper: AsyncStepper) -> None:
    """Await the steps of two optimizers that have different parameters in one memory: a use of one
    does not wait for an update of the other."""
    for other in list(_steppers):
        if other is not stepper and _tied(stepper.optimizer, other.optimizer):
            stepper.wait_at = other.wait_at = WaitAt.STEP


def refuse_sharing(wanted: Sequence[Wanted], beside_others: bool = True) -> None:
    """Raise ``UnsupportedError`` where two optimizers would have a master each for a parameter.

    Args:
        wanted: optimizers to be stepped; of one that is stepped already its present mode counts.
        beside_others: those that are stepped already count too; else :func:`take_over` follows.
    """
    message = _sharing(wanted, beside_others)
    if message is not None and beside_others:
        gc.collect()  # an optimizer without references steps nothing
        message = _sharing(wanted, beside_others)
    if message is not None:
        raise UnsupportedError(message)


def refuse_successor(optimizer: Optimizer, call: str) -> None:
    """Raise ``OrderError`` where another optimizer owns the parameters by now."""
    if has_successor(optimizer):
        raise OrderError(
            f"{call}(): a {_successors[optimizer]} that was prepared after this "
            f"{type(optimizer).__name__} owns its parameters, since float32 masters have one "
            f"owner, and this one was closed. Call {call}() of that one, or prepare a new one."
        )


def has_successor(optimizer: Optimizer) -> bool:
    """Whether another one has taken over its parameters."""
    return optimizer in _successors


def forget_successor(optimizer: Optimizer) -> None:
    """``optimizer`` was prepared again."""
    _successors.pop(optimizer, None)


def take_over(wanted: Sequence[Wanted]) -> None:
    """These were prepared last: close the others that have masters of their parameters, each with
    a warning in the log.

    Args:
        wanted: their parameters count though they are frozen, and stepped without masters as yet.

    Raises:
        StepError: the last step of one of those failed; it is closed all the same.
    """
    newest = {id(optimizer) for optimizer, _, _ in wanted}
    failed: StepError | None = None
    for other in [e for e in _steppers if id(e.optimizer) not in newest]:
        conflicts = ((one, _conflict(one, _wanted(other), frozen_too=True)) for one in wanted)
        owner, conflict = next((each for each in conflicts if each[1]), (None, None))
        if owner is None or conflict is None:
            continue
        _successors[other.optimizer] = name = type(owner[0]).__name__
        logger.warning(
            "the %s that was prepared last owns its parameters, since float32 masters have one "
            "owner: another %s that stepped %d of them (%s) is closed. The model keeps its last "
            "update; its step() raises OrderError until it is prepared again.",
            name,
            type(other.optimizer).__name__,
            *conflict,
        )
        try:
            other.give_way()
        except StepError as error:
            failed = error
    if failed is not None:
        raise failed


def _sharing(wanted: Sequence[Wanted], beside_others: bool) -> str | None:
    stepped = {id(e.optimizer): _wanted(e) for e in list(_steppers)}
    new = [stepped.pop(id(each[0]), each) for each in wanted]
    others = list(stepped.values()) if beside_others else []
    for place, one in enumerate(new):
        for other in [*others, *new[:place]]:
            conflict = _conflict(one, other)
            if conflict is not None:
                return (
                    f"{type(one[0]).__name__} shares {conflict[0]} parameters with a "
                    f"{type(other[0]).__name__} that is stepped as well. Each would step float32 "
                    f"masters of its own ({conflict[1]}) and not see the other's update. Use "
                    "step_mode='overlap' or 'sync' with float32 parameters (or bfloat16 ones and "
                    "master_weights='none'), or put the parameters in one optimizer. One that is "
                    "to replace the other is prepared after it, in a call of its own."
                )
    return None


def _wanted(stepper: AsyncStepper) -> Wanted:
    return stepper.optimizer, stepper.mode, stepper.replica.masters


def _conflict(one: Wanted, other: Wanted, frozen_too: bool = False) -> tuple[int, str] | None:
    """How many parameters they share, and why not both can step them; None: both can."""
    if one[0] is other[0]:
        return None
    own = set(map(id, parameters_of(one[0])))
    common = [
        p for p in parameters_of(other[0]) if id(p) in own and (frozen_too or p.requires_grad)
    ]
    low = one[2].rounded | other[2].rounded
    rounded = next((p.dtype for p in common if p.dtype in low), None)
    if common and (rounded is not None or "delayed" in (one[1], other[1])):
        return len(common), f"parameters are {rounded}" if rounded else "step_mode='delayed'"
    tied = _tied(one[0], other[0])
    if any(one[2].takes(p) or other[2].takes(p) for p in tied):
        return len(tied), "in one memory"
    return None


def _tied(one: Optimizer, other: Optimizer) -> list[Tensor]:
    """Trained parameters of ``other``, none of ``one``, that share memory with those of ``one``."""
    own = parameters_of(one)
    known = set(map(id, own))
    others = [p for p in parameters_of(other) if id(p) not in known and p.requires_grad]
    groups = overlapping([*own, *others]) if others else []
    mixed = [group for group in groups if group[0] < len(own) <= group[-1]]
    return [others[i - len(own)] for group in mixed for i in group if i >= len(own)]
