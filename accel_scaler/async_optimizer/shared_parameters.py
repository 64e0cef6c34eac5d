"""Parameters that several optimizers step: each gets their gradients, none a master of its own."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..errors import UnsupportedError
from ..scaling import parameters_of
from .master_rule import MasterRule

if TYPE_CHECKING:
    from .async_stepper import AsyncStepper

Wanted = tuple[Optimizer, str, MasterRule]
"""An optimizer, its step mode, and what has masters."""

_steppers: list[weakref.ref[AsyncStepper]] = []
"""Those that step an optimizer."""

_deref: Callable[[weakref.ref[AsyncStepper]], AsyncStepper | None] = weakref.ref.__call__


def enter(stepper: AsyncStepper) -> None:
    """It steps its optimizer from now on."""
    _steppers.append(weakref.ref(stepper))
    find_shared()


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


def _present() -> list[AsyncStepper]:
    return list(filter(None, map(_deref, _steppers)))


def refuse_sharing(wanted: Sequence[Wanted]) -> None:
    """Raise ``UnsupportedError`` where two optimizers would have a master each for a parameter.

    Args:
        wanted: optimizers to be stepped, with the mode and the masters of each; those that are
            already count too.
    """
    said = _sharing(wanted)
    if said is not None:
        gc.collect()  # an optimizer that nobody has any more steps nothing
        said = _sharing(wanted)
    if said is not None:
        raise UnsupportedError(said)


def _sharing(wanted: Sequence[Wanted]) -> str | None:
    asked = {id(optimizer) for optimizer, _, _ in wanted}
    mine = [e for e in _present() if id(e.optimizer) not in asked]
    present = [(e.optimizer, e.mode, e.replica.masters) for e in mine]
    for place, (one, mode, masters) in enumerate(wanted):
        own = set(map(id, parameters_of(one)))
        for other, its_mode, its_masters in [*present, *wanted[:place]]:
            common = [p for p in parameters_of(other) if id(p) in own and p.requires_grad]
            low = masters.rounded | its_masters.rounded
            rounded = next((p.dtype for p in common if p.dtype in low), None)
            if common and (rounded or "delayed" in (mode, its_mode)):
                why = f"parameters are {rounded}" if rounded else "step_mode='delayed'"
                return (
                    f"{type(one).__name__} shares {len(common)} parameters with a "
                    f"{type(other).__name__} that is stepped as well. Each would step float32 "
                    f"masters of its own ({why}) and not see the other's update. Use step_mode="
                    "'overlap' or 'sync' with float32 parameters (or bfloat16 ones and "
                    "master_weights='none'), close() or detach() the other one first, or put the "
                    "parameters in one optimizer."
                )
    return None
