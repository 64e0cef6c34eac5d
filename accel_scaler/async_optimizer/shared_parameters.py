"""Parameters of several optimizers. One that steps beside forward and backward, or through float32
masters, owns its parameters alone; of several such optimizers the one prepared last does.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..errors import OrderError, UnsupportedError
from ..scaling import parameters_of
from .master_params import MasterRule
from .shared_memory import are_tied

if TYPE_CHECKING:
    from .async_stepper import AsyncStepper

logger = logging.getLogger("accel_scaler")

Wanted = tuple[Optimizer, str, MasterRule]
"""An optimizer, its step mode, and what has masters."""

_steppers: weakref.WeakSet[AsyncStepper] = weakref.WeakSet()
"""All steppers in use."""

replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose parameters another one has taken over."""


def enter(stepper: AsyncStepper) -> None:
    """``stepper`` steps its optimizer from now on."""
    replaced.discard(stepper.optimizer)
    _steppers.add(stepper)


def leave(stepper: AsyncStepper) -> None:
    """``stepper`` no longer steps its optimizer."""
    _steppers.discard(stepper)


def refuse_sharing(wanted: Sequence[Wanted], beside_others: bool = True) -> None:
    """Raise ``UnsupportedError`` where two of the ``wanted`` optimizers cannot both step their
    parameters, or (``beside_others``; else :func:`take_over` follows) one of them and another that
    is stepped already. Of a wanted one that is stepped already the present mode counts."""
    message = _sharing(wanted, beside_others)
    if message is not None and beside_others:
        gc.collect()  # an optimizer without references steps nothing
        message = _sharing(wanted, beside_others)
    if message is not None:
        raise UnsupportedError(message)


def refuse_replaced_owner(optimizer: Optimizer) -> None:
    """Raise ``OrderError`` where another optimizer owns the parameters by now."""
    if optimizer in replaced:
        raise OrderError(
            f"step(): an optimizer that was prepared after this {type(optimizer).__name__} owns "
            "its parameters, and this one was closed. Call step() of that one, prepare a new one, "
            "or, to step both, use step_mode='sync'."
        )


def take_over(wanted: Sequence[Wanted]) -> None:
    """These were prepared last: close the others that own some of their parameters, each with a
    warning in the log. Frozen parameters count, too, and those that have no master yet. Raises
    ``StepError`` where the last step of one failed; it is closed all the same."""
    newest = {id(optimizer) for optimizer, _, _ in wanted}
    for other in [e for e in _steppers if id(e.optimizer) not in newest]:
        conflicts = (_conflict(one, _wanted(other), frozen_too=True) for one in wanted)
        if (conflict := next(filter(None, conflicts), None)) is None:
            continue
        replaced.add(other.optimizer)
        logger.warning(
            "an optimizer that was prepared after this %s owns its parameters, and this one is "
            "closed: both step %s. The model keeps its last update; step() raises OrderError until "
            "it is prepared again.",
            type(other.optimizer).__name__,
            conflict,
        )
        other.give_way()


def _sharing(wanted: Sequence[Wanted], beside_others: bool) -> str | None:
    stepped = {id(e.optimizer): _wanted(e) for e in list(_steppers)}
    new = [stepped.pop(id(each[0]), each) for each in wanted]
    others = list(stepped.values()) if beside_others else []
    for place, one in enumerate(new):
        for other in [*others, *new[:place]]:
            if (conflict := _conflict(one, other)) is not None:
                return (
                    f"a {type(one[0]).__name__} and a {type(other[0]).__name__} both step "
                    f"{conflict}: neither would see the other's update. Put them in one optimizer, "
                    "or use step_mode='sync' without offload, with float32 parameters (or bfloat16 "
                    "ones and master_weights='none'). One that is to replace the other is prepared "
                    "after it, in a call of its own."
                )
    return None


def _wanted(stepper: AsyncStepper) -> Wanted:
    return stepper.optimizer, stepper.mode, stepper.replica.masters


def _conflict(one: Wanted, other: Wanted, frozen_too: bool = False) -> str | None:
    """In words: what both have and not both can step; None: there is no such thing."""
    if one[0] is other[0]:
        return None
    own, theirs = parameters_of(one[0]), parameters_of(other[0])
    known, modes = set(map(id, own)), {one[1], other[1]}
    common = [p for p in theirs if id(p) in known and (frozen_too or p.requires_grad)]
    is_beside = modes != {"sync"} and any(p.requires_grad for p in common)
    if is_beside or any(one[2].takes(p) or other[2].takes(p) for p in common):
        return f"{len(common)} parameters"
    others = [p for p in theirs if id(p) not in known and p.requires_grad]
    # A use of one would not wait for an update of the other, nor follow its master.
    has_masters = any(one[2].takes(p) or other[2].takes(p) for p in others)
    if (has_masters or modes != {"sync"}) and are_tied(own, others):
        return "different parameters in one memory"
    return None
