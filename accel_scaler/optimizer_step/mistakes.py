"""Mistakes of a script that nothing refuses, told by the traces that they leave."""

from __future__ import annotations

from math import isclose
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ..scaling import first_version

SAME = 5
"""Edited windows in a row whose scaled norm is the same, after which something has set it."""
TRIES = 20
"""Norms unlike the one before, after which nobody looks for a constant one any more."""
TINY = 0.01
"""Unscaled norms below it are of gradients that were clipped too much: losses seldom have them."""
LOSING = 2
"""Windows in a row that lose micro-batches: one may be a batch that is dropped on purpose."""


class ScaledClips:
    """Tells torch's own ``clip_grad_norm_`` of gradients that are still scaled: then the scaled
    norm is ``max_norm`` in each window, and what is left once it is unscaled is tiny."""

    def __init__(self) -> None:
        self.tries = TRIES
        self._seen: WeakKeyDictionary[Optimizer, tuple[float, int]] = WeakKeyDictionary()
        """The scaled norm, and how often it has come in a row."""

    def mistake(self, optimizer: Optimizer, scaled: float, scale: float) -> str | None:
        """What to say of the window's gradients, which were written to after the backward;
        ``scaled``: their norm, still multiplied by ``scale``. None: nothing so far."""
        first, count = self._seen.get(optimizer, (0.0, 0))
        if not isclose(scaled, first, rel_tol=1e-3):
            self.tries, first, count = self.tries - 1, scaled, 0
        self._seen[optimizer] = first, count + 1
        norm = scaled / scale
        if not 0.0 < norm < TINY or count + 1 < SAME:
            return None
        self.tries = 0
        return (
            f"The gradients of {type(optimizer).__name__} are clipped while they are multiplied by "
            f"the loss scale: their norm was {scaled:.4g} in {SAME} steps, so the unscaled one is "
            f"{norm:.3g}. Instead of torch.nn.utils.clip_grad_norm_ call "
            f"accelerator.clip_grad_norm_(model.parameters(), {scaled:.4g}), or before it "
            "accelerator.scaler.unscale_(optimizer)."
        )


class DroppedBatches:
    """Counts backwards whose gradients ``zero_grad`` drops before the optimizer steps. What was
    dropped in a micro-batch without a step was dropped on purpose."""

    def __init__(self) -> None:
        self._waiting = self._dropped = self._lost = self._windows = 0

    def backward(self, is_last: bool) -> None:
        """One more; ``is_last``: of its window."""
        if is_last:
            self._lost = self._dropped
        else:
            self._waiting, self._dropped = self._waiting + 1, 0

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Gradients of ``optimizer`` are about to be dropped, in the window's last micro-batch."""
        if first_version(optimizer) is not None:
            self._dropped, self._waiting, self._lost = self._dropped + self._waiting, 0, 0

    def step(self, optimizer: Optimizer) -> str | None:
        """What to say of ``optimizer``, which is about to step; None: nothing."""
        lost, self._waiting, self._dropped, self._lost = self._lost, 0, 0, 0
        self._windows = self._windows + 1 if lost else 0
        if self._windows != LOSING:
            return None
        return (
            f"zero_grad() of {type(optimizer).__name__} comes before the last backward of a "
            f"step, so it drops the gradients of {lost} backwards, and the last one "
            "trains alone. Call optimizer.zero_grad() after optimizer.step(), not before the "
            "backward."
        )
