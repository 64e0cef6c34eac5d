"""Who is asked where an overflow began, before anything is updated."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from ..scaling import Window


class Explainer:
    """Asked by a boundary at each overflow; here nobody knows anything.

    What it finds it writes to the window.
    """

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """The verdict is known; parameters and gradients are still those of the window. The
        optimizer steps, or is skipped, next."""

    def optimizer_stepped(self, window: Window) -> None:
        """The optimizer has stepped, or was skipped."""
