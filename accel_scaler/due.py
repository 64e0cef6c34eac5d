"""What passes from a boundary to whatever updates the parameters of one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["ATTRIBUTE", "Due", "Stepper", "Timing", "stepper_of"]

ATTRIBUTE = "_accel_scaler_stepper"
"""Where an optimizer keeps the one that steps for it."""


@dataclass(slots=True)
class Due:
    """What is still to be done to finite gradients before the update. Scalars, float32, shape ().

    At most one of the two is set.
    """

    multiply: Tensor | None = None
    """Unscale and clip, as one product."""
    divide: Tensor | None = None
    """The same, left to torch's fused kernel (its ``grad_scale``)."""


@dataclass(slots=True)
class Timing:
    """When one update ran, and who waited for it: host time, seconds of ``perf_counter``."""

    start: float = 0.0
    busy: float = 0.0
    """How long it ran."""
    finished: bool = False
    inline: bool = False
    """On the training thread, which so waits for all of it."""
    waits: list[tuple[float, float, Any]] = field(default_factory=list)
    """``(start, length, where)``: the parameter whose use waited, or what else did."""


class Stepper(Protocol):
    """Updates parameters in an optimizer's place, perhaps later and on another thread."""

    timing: Timing | None
    """Of the last update handed over."""

    @property
    def low_precision(self) -> bool:
        """Some gradients are float16 or bfloat16, so they may not be unscaled in place."""

    def step(self, due: Due) -> None:
        """Take the gradients, do what is ``due``, update."""

    def skip(self) -> None:
        """A boundary without an update: its gradients overflowed."""

    def wait(self, where: str) -> bool:
        """Wait until the update in hand, if any, is over; False if it failed (finish tells how)."""

    def synchronize(self) -> None:
        """Finish what is in hand and publish it."""

    def synchronize_memory(self, tensors: Iterable[Tensor]) -> None:
        """The same, where any of ``tensors`` shares a parameter's memory."""

    def zero_taken(self, set_to_none: bool) -> None:
        """Zeros for the gradients that the last step took, unless they are to be None."""


def stepper_of(optimizer: Optimizer) -> Stepper | None:
    """What steps in the place of ``optimizer``, if anything does."""
    return cast("Stepper | None", optimizer.__dict__.get(ATTRIBUTE))
