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
    depends on who observes, and nothing is computed for an observer but what these ask for:
    """

    wants_norms = False
    """The norm of a clip made elsewhere is read, on some rank: to complete it ranks communicate."""
    wants_each_norm = False
    """The norm of each gradient is read, where one pass gives it beside that of all."""

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""

    def after_backward(self) -> None:
        """It has ended, and not by an exception."""

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """The scale is updated, parameters and gradients are still those of the window; the
        optimizer steps, or is skipped, next. Where there was a check it has just waited for the
        device."""

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """The optimizer has stepped, or was skipped. ``timing``: of its update, which may still
        run; None: there was none."""

    def run_ended(self, error: str) -> None:
        """Too many skips in a row: ``error`` is about to be raised."""


class Rerun(Protocol):
    """Makes gradients that have overflowed again; where there is none, they are skipped."""

    def before_check(self) -> None:
        """Gradients are about to be checked, unscaled or clipped."""

    def make_again(self, stepping: Optimizer | None) -> bool:
        """Whether there are others now in place of those that the window's verdict is about."""
