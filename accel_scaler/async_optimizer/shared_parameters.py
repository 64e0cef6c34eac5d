"""Parameters that several optimizers step: each gets their gradients, none a master of its own.

Where they have float32 masters one optimizer owns them: the one that was prepared last.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from ..errors import OrderError, StepError, UnsupportedError
from ..scaling import parameters_of
from .master_rule import MasterRule
from .phases import WaitAt
from .shared_memory import overlapping

if TYPE_CHECKING:
    from .async_stepper import AsyncStepper

logger = logging.getLogger("accel_scaler")

Wanted = tuple[Optimizer, str, MasterRule]
"""An optimizer, its step mode, and what has masters."""

_steppers: list[weakref.ref[AsyncStepper]] = []
"""Those that step an optimizer."""

_successors: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
"""Optimizers whose parameters another one has taken over, and the class of that one."""

_deref: Callable[[weakref.ref[AsyncStepper]], AsyncStepper | None] = weakref.ref.__call__


def enter(stepper: AsyncStepper) -> None:
    """It steps its optimizer from now on."""
    forget_successor(stepper.optimizer)
    _steppers.append(weakref.ref(stepper))
    find_shared()
    find_tied(stepper)


def leave(stepper: AsyncStepper) -> None:
    """It does not any more."""
    _steppers[:] = [ref for ref in _steppers if ref() is not stepper]
    find_shared()


def others_of(stepper: AsyncStepper) -> list[AsyncStepper]:
    """Those that step some of its parameters, too."""
    if not stepper.shared:
        return []
    return [e for e in _present() if e is not stepper and e.shared & stepper.shared]


def find_shared() -> None:
    """Tell every stepper which of its parameters others step, too."""
    _steppers[:] = [ref for ref in _steppers if ref() is not None]
    steppers = _present()
    owned = [set(map(id, parameters_of(stepper.optimizer))) for stepper in steppers]
    counts = Counter(chain.from_iterable(owned))
    for stepper, own in zip(steppers, owned, strict=True):
        stepper.shared = frozenset(i for i in own if counts[i] > 1)


def find_tied(stepper: AsyncStepper) -> None:
    """Have steps awaited that write to memory in which others have parameters of their own: a use
    of those would not wait."""
    for other in _present():
        if other is not stepper and _tied(stepper.optimizer, other.optimizer):
            stepper.wait_at = other.wait_at = WaitAt.STEP


def _present() -> list[AsyncStepper]:
    return list(filter(None, map(_deref, _steppers)))


def refuse_sharing(wanted: Sequence[Wanted], beside_others: bool = True) -> None:
    """Raise ``UnsupportedError`` where two optimizers would have a master each for a parameter.

    Args:
        wanted: optimizers to be stepped, with the mode and the masters of each; of one that is
            stepped already its own count.
        beside_others: those that are stepped already count too; else :func:`take_over` follows.
    """
    said = _sharing(wanted, beside_others)
    if said is not None and beside_others:
        gc.collect()  # an optimizer that nobody has any more steps nothing
        said = _sharing(wanted, beside_others)
    if said is not None:
        raise UnsupportedError(said)


def refuse_successor(optimizer: Optimizer, call: str) -> None:
    """Raise ``OrderError`` in a call of an optimizer whose parameters another one owns by now."""
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
    """It was prepared again."""
    _successors.pop(optimizer, None)


def take_over(wanted: Sequence[Wanted]) -> None:
    """These own their parameters from now on, since they were prepared last: others that have
    masters of them are closed, which a line in the log says for each.

    Args:
        wanted: with the mode and the masters of each; as yet they may be stepped without any, while
            those parameters are frozen.

    Raises:
        StepError: the last step of one of those failed; it is closed all the same.
    """
    newest = {id(optimizer) for optimizer, _, _ in wanted}
    failed: StepError | None = None
    for other in [e for e in _present() if id(e.optimizer) not in newest]:
        for owner in wanted:
            reason = _reason(owner, _wanted(other), frozen_too=True)
            if reason is None:
                continue
            count, why = reason
            name = type(owner[0]).__name__
            logger.warning(
                "the %s that was prepared last owns its parameters, since float32 masters have one "
                "owner: another %s that stepped %d of them (%s) is closed. The model keeps its "
                "last update; its step() raises OrderError until it is prepared again.",
                name,
                type(other.optimizer).__name__,
                count,
                why,
            )
            _successors[other.optimizer] = name
            try:
                other.give_way()
            except StepError as error:
                failed = error
            break
    if failed is not None:
        raise failed


def _sharing(wanted: Sequence[Wanted], beside_others: bool) -> str | None:
    present = {id(e.optimizer): _wanted(e) for e in _present()}
    asked = [present.pop(id(each[0]), each) for each in wanted]
    others = list(present.values()) if beside_others else []
    for place, one in enumerate(asked):
        for other in [*others, *asked[:place]]:
            reason = _reason(one, other)
            if reason is not None:
                return (
                    f"{type(one[0]).__name__} shares {reason[0]} parameters with a "
                    f"{type(other[0]).__name__} that is stepped as well. Each would step float32 "
                    f"masters of its own ({reason[1]}) and not see the other's update. Use "
                    "step_mode='overlap' or 'sync' with float32 parameters (or bfloat16 ones and "
                    "master_weights='none'), or put the parameters in one optimizer. One that is "
                    "to replace the other is prepared after it, in a call of its own."
                )
    return None


def _wanted(stepper: AsyncStepper) -> Wanted:
    return stepper.optimizer, stepper.mode, stepper.replica.masters


def _reason(one: Wanted, other: Wanted, frozen_too: bool = False) -> tuple[int, str] | None:
    """How many parameters they share, and why not both can step them; None: both can.

    Args:
        frozen_too: count those that are frozen now, too, and may be trained again.
    """
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
    """Trained parameters of ``other``, none of ``one``, that have memory in common with its own."""
    own = parameters_of(one)
    known = set(map(id, own))
    others = [p for p in parameters_of(other) if id(p) not in known and p.requires_grad]
    groups = overlapping([*own, *others]) if others else []
    mixed = [group for group in groups if group[0] < len(own) <= group[-1]]
    return [others[i - len(own)] for group in mixed for i in group if i >= len(own)]
