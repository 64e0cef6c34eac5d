"""What steps an optimizer: one for each, inline here, or an asynchronous one."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..scaling import DeferredUnscale, parameters_of, stepped
from .fused_adam import FusedAdam, step_fused

logger = logging.getLogger("accel_scaler")


@dataclass(slots=True)
class StepTiming:
    """When one update ran, and who waited for it: host time, seconds of ``perf_counter``."""

    start: float = 0.0
    busy: float = 0.0
    """How long it ran."""
    finished: bool = False
    inline: bool = False
    """On the training thread, which so waits for all of it."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """``(start, length)`` of each wait."""
    delay_compensation: str | None = None
    """What the model was shown of it at first (``"none"``: nothing); None: it was not late."""
    shown_error: tuple[float, float] | None = None
    """Where that was measured: the norm of what it was off by, and that of the update."""


Unscale = Callable[[Sequence[Tensor]], object]
"""Unscales the memory of some gradients."""

HoldScaled = Callable[[Sequence[Tensor], Unscale], Callable[[], None] | None]
"""Calls one before the first use of any gradient: :func:`accel_scaler.async_optimizer.hold_scaled`.
It is handed in, since this folder does not know how a use is seen."""


class Stepper(ABC):
    """Updates the parameters of one optimizer, perhaps later and on another thread."""

    optimizer: Optimizer
    timing: StepTiming | None = None
    """Of the last update."""
    fold_unscale = False
    """Unscaling and clipping may be left to the kernel."""
    hold_scaled: HoldScaled | None = None
    """Sees to it that whoever looks at gradients that are left to the kernel has them unscaled."""
    measures_shown = False
    """``timing`` is to say how far off it was what the model was shown of a late update."""

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
        """A product that is due is left to its step, which does it where ``.grad`` is, too."""
        return False

    @property
    def divides(self) -> bool:
        """Its kernel is to divide gradients by ``grad_scale`` itself."""
        return self.fold_unscale and takes_grad_scale(self.optimizer) and not self.has_pre_hooks

    @property
    def has_pre_hooks(self) -> bool:
        """Somebody looks at the gradients just before the step."""
        everywhere = getattr(optimizer_module, "_global_optimizer_pre_hooks", {})
        return bool(everywhere or getattr(self.optimizer, "_optimizer_step_pre_hooks", {}))

    @abstractmethod
    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """Take the gradients, do what is ``deferred``, update."""

    def skip(self) -> None:  # noqa: B027
        """A boundary without an update: its gradients overflowed."""

    def wait(self, where: str) -> bool:
        """Wait until the update in hand, if any, is over; False if it failed (step tells how)."""
        return True

    def synchronize(self) -> None:  # noqa: B027
        """Finish what is in hand and publish it."""

    def still(self) -> AbstractContextManager[None]:
        """:meth:`synchronize`, and no step of another thread begins until the end."""
        return nullcontext()

    def synchronize_memory(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027
        """:meth:`synchronize`, where any of ``tensors`` shares a parameter's memory."""

    def settle_gradients(self) -> None:  # noqa: B027
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
        try:
            if takes_grad_scale(optimizer):
                divide = None if deferred is None else deferred.divide
                self._plan = step_fused(optimizer, self._plan, divide)
            else:
                optimizer.step()
        except BaseException as error:  # Ctrl-C, a handler of a signal, the optimizer itself
            logger.error(
                "the update of %s ended in %s: of its %d parameters, and of their state, some may "
                "have moved and others not. The window is closed, so training goes on with new "
                "gradients; to have all as before the step load the last checkpoint.",
                type(optimizer).__name__,
                type(error).__name__,
                len(parameters_of(optimizer)),
            )
            raise
        self.timing = StepTiming(start, time.perf_counter() - start, finished=True, inline=True)


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether its kernel divides gradients by ``grad_scale`` itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


ATTRIBUTE = "_accel_scaler_stepper"
"""Where an optimizer keeps an asynchronous one: it holds the optimizer, so a table would keep
both for ever."""

_inline: weakref.WeakKeyDictionary[Optimizer, InlineStepper] = weakref.WeakKeyDictionary()


def stepper_of(optimizer: Optimizer) -> Stepper:
    """What steps ``optimizer``: what was registered, else inline."""
    optimizer = stepped(optimizer)
    found = async_stepper_of(optimizer) or _inline.get(optimizer)
    if found is None:
        found = _inline[optimizer] = InlineStepper(optimizer)
    return found


def async_stepper_of(optimizer: Optimizer) -> Stepper | None:
    """What was registered to step ``optimizer``; None: it is stepped inline."""
    found: Stepper | None = stepped(optimizer).__dict__.get(ATTRIBUTE)
    return found


def register(stepper: Stepper) -> None:
    """``stepper`` steps its optimizer from now on."""
    stepper.optimizer.__dict__[ATTRIBUTE] = stepper


def unregister(optimizer: Optimizer) -> None:
    """The optimizer is stepped inline again."""
    optimizer.__dict__.pop(ATTRIBUTE, None)
