"""What a boundary tells whoever listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from ..scaling import Window

if TYPE_CHECKING:
    from .stepper import StepTiming


class Observer:
    """Told by a boundary what happens; here every method does nothing.

    All that is known of a window, norms included, stands in the window. No number of the training
    depends on who listens, and nothing is computed for it but what these ask for:
    """

    wants_norms = False
    """On some rank a norm is read: where to find one the ranks communicate, all of them do."""
    wants_each_norm = False
    """The norm of each gradient is read, where one pass gives it beside that of all."""
    wants_shown_errors = False
    """A late update's timing is to say how far off it was what the model was shown of it."""

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """The scale is updated, the gradients are as they were checked; the optimizer steps, or
        is skipped, next. Where there was a check it has just waited for the device."""

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None, start: float
    ) -> None:
        """The optimizer has stepped, or was skipped.

        Args:
            timing: of its update, which may still run; None: there was none.
            start: when its step began, of ``perf_counter``.
        """

    def run_ended(self, error: str) -> None:
        """Too many skips in a row: ``error`` is about to be raised."""
