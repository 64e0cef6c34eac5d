"""The events of a boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ..scaling import Window

if TYPE_CHECKING:
    from .stepper import StepTiming


class Observer:
    """Receives the events of a boundary, on the training thread; here every method does nothing.

    All that is known of a window, norms included, stands in the window. No number of the training
    depends on who observes, and only what this attribute asks for is computed for it:
    """

    wants_each_norm = False
    """The norm of each gradient is read, where the pass for the total norm gives it, too."""

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""

    def after_backward(self) -> None:
        """The backward finished without an exception."""

    def cause_of_skips(self) -> str:
        """Where the overflows of this run of skips begin and what helps; "": not known."""
        return ""

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """The scale is updated, the window's parameters and gradients are still in place; the
        optimizer steps, or is skipped, next. Where gradients were checked, this thread has just
        waited for the device."""

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """The optimizer has stepped, or was skipped. ``timing``: of its update, which may still
        run; None: there was no update."""

    def mistake_named(self, text: str) -> None:
        """The log has named a mistake of the script, and the code to write instead."""

    def run_ended(self, error: str) -> None:
        """Too many skips in a row: ``error`` is about to be raised."""


class Rerun(Protocol):
    """Makes overflowed gradients anew; without a Rerun their step is skipped."""

    def before_check(self) -> None:
        """Gradients are about to be checked, unscaled or clipped."""

    def make_again(self) -> bool:
        """Make the open window's gradients anew if they overflowed; returns whether it did."""
