"""What steps an optimizer: one for each, inline here, or an asynchronous one."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..scaling import DeferredUnscale, stepped
from .fused_adam import FusedAdam, step_fused

logger = logging.getLogger("accel_scaler")


@dataclass(slots=True)
class StepTiming:
    """When one update ran, and what waited for it: host time, seconds of ``perf_counter``."""

    start: float = 0.0
    busy: float = 0.0
    """How long it ran."""
    finished: bool = False
    inline: bool = False
    """It ran on the training thread, which waited for all of it."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """``(start, length)`` of each wait."""
    delay_compensation: str | None = None
    """Of a late update: ``"preview"`` or ``"none"``; None: it was not late."""
    step_mode: str | None = None
    """How it ran where that was chosen for it (``"auto"``): ``"sync"`` or ``"overlap"``."""
    preview_error: float | None = None
    """Of a late update, where it was measured: norm of the preview's error / of the update."""


class Stepper(ABC):
    """Updates the parameters of one optimizer, perhaps later and on another thread."""

    optimizer: Optimizer
    timing: StepTiming | None = None
    """Of the last update."""
    fold_unscale = False
    """Unscaling and clipping may be left to the kernel."""
    reads_beside = False
    """An update that is not finished may read ``.grad``, on another thread."""
    measures_preview = False
    """Measure ``StepTiming.preview_error``."""

    @property
    def keeps_scaled(self) -> bool:
        """Some gradients are float16 or bfloat16 and so are never unscaled in place."""
        return False

    @property
    def defers_unscale(self) -> bool:
        """Gradients may be checked while they are scaled: unscaling goes along with the step."""
        return False

    @property
    def unscales(self) -> bool:
        """A deferred product is left to its step, which writes it to ``.grad``, too."""
        return False

    @property
    def divides(self) -> bool:
        """Its kernel divides gradients by ``grad_scale``."""
        takes_grad_scale = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        return self.fold_unscale and takes_grad_scale and not self.has_pre_hooks

    @property
    def has_pre_hooks(self) -> bool:
        """Hooks read the gradients just before the step."""
        everywhere = getattr(optimizer_module, "_global_optimizer_pre_hooks", {})
        return bool(everywhere or getattr(self.optimizer, "_optimizer_step_pre_hooks", {}))

    @abstractmethod
    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """Take the gradients, do what is ``deferred``, update."""

    def skip(self) -> None:  # noqa: B027
        """A boundary without an update: its gradients overflowed."""

    def wait(self) -> bool:
        """Wait until the update in flight, if any, is over; False: it failed."""
        return True

    def synchronize(self) -> None:  # noqa: B027
        """Finish the update in flight and publish it."""

    def still(self) -> AbstractContextManager[None]:
        """:meth:`synchronize`, and no step of another thread begins until the end."""
        return nullcontext()

    def wait_for_gradients(self) -> None:  # noqa: B027
        """Wait until no step reads ``.grad``: a backward is about to add to it."""


class InlineStepper(Stepper):
    """Steps on the training thread, as ``optimizer.step()`` does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._plan: FusedAdam | None = None

    @property
    def optimizer(self) -> Optimizer:  # type: ignore[override]
        """What is stepped."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """One update. ``deferred`` may only hold what the kernel divides by."""
        optimizer, start = self.optimizer, time.perf_counter()
        assert deferred is None or deferred.multiply is None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            divide = None if deferred is None else deferred.divide
            self._plan = step_fused(optimizer, self._plan, divide)
        else:
            optimizer.step()
        self.timing = StepTiming(start, time.perf_counter() - start, finished=True, inline=True)


ATTRIBUTE = "_accel_scaler_stepper"
"""Where an optimizer keeps its asynchronous stepper: that one holds the optimizer, so a table would
keep both alive for ever."""

_inline: weakref.WeakKeyDictionary[Optimizer, InlineStepper] = weakref.WeakKeyDictionary()


def stepper_of(optimizer: Optimizer) -> Stepper:
    """The stepper of ``optimizer``: the registered one, else an inline one."""
    optimizer = stepped(optimizer)
    found = async_stepper_of(optimizer) or _inline.get(optimizer)
    if found is None:
        found = _inline[optimizer] = InlineStepper(optimizer)
    return found


def async_stepper_of(optimizer: Optimizer) -> Stepper | None:
    """The registered stepper of ``optimizer``; None: it is stepped inline."""
    found: Stepper | None = stepped(optimizer).__dict__.get(ATTRIBUTE)
    return found


def register(stepper: Stepper) -> None:
    """``stepper`` steps its optimizer from now on."""
    stepper.optimizer.__dict__[ATTRIBUTE] = stepper


def unregister(optimizer: Optimizer) -> None:
    """The optimizer is stepped inline again."""
    optimizer.__dict__.pop(ATTRIBUTE, None)
