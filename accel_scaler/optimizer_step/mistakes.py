"""Mistakes of a script that nothing refuses, told by the traces that they leave."""

from __future__ import annotations

import logging
from collections import Counter
from math import isclose
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

from ..scaling import GradScaler, Losses, first_version, parameters_of

logger = logging.getLogger("accel_scaler")

SAME = 5
"""Edited windows in a row whose scaled norm is the same, after which something has set it."""
TRIES = 20
"""Norms unlike the one before, after which nobody looks for a constant one any more."""
MAX_IDLE_WINDOWS = 10
"""Windows that an optimizer may go without its first gradient before it is named."""
LOSING = 2
"""Windows in a row that lose micro-batches: one may be a batch that is dropped on purpose."""


class ScaledClips:
    """Tells torch's own ``clip_grad_norm_`` of gradients that are still scaled.

    Then the scaled norm is ``max_norm`` in each window. Of a linear loss, and after a right clip to
    ``max_norm * scale``, the unscaled norm is constant: another case once the scale has moved.
    Until then only the digits tell: ``max_norm`` is a number that somebody has typed.
    """

    def __init__(self) -> None:
        self.tries = TRIES
        self._seen: WeakKeyDictionary[Optimizer, tuple[float, Counter[float]]] = WeakKeyDictionary()
        """The scaled norm, and how often it has come at each scale in a row."""

    def mistake(self, optimizer: Optimizer, scaled: float, scale: float) -> str | None:
        """What to say of the window's gradients, which were written to after the backward;
        ``scaled``: their norm, still multiplied by ``scale``. None: nothing so far."""
        norm = scaled / scale
        first, scales = self._seen.get(optimizer, (0.0, Counter()))
        if not isclose(scaled, first, rel_tol=1e-3):
            self.tries, first, scales = self.tries - 1, scaled, Counter()
        scales[scale] += 1
        self._seen[optimizer] = first, scales
        is_set = len(scales) > 1 or (_is_typed(scaled) and not _is_typed(norm))
        if not (scaled and is_set and scales.total() >= SAME):
            return None
        self.tries = 0
        return (
            f"The gradients of {type(optimizer).__name__} are clipped while they are multiplied by "
            f"the loss scale: their norm was {scaled:.4g} in {scales.total()} steps, so the "
            f"unscaled one is {norm:.3g}. Instead of torch.nn.utils.clip_grad_norm_ call "
            f"accelerator.clip_grad_norm_(model.parameters(), {scaled:.4g}), or before it "
            "accelerator.scaler.unscale_(optimizer)."
        )


def _is_typed(norm: float) -> bool:
    """Whether it is a number of two digits, but for rounding."""
    return isclose(norm, float(f"{norm:.2g}"), rel_tol=1e-4)


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


class IdleOptimizers:
    """Tells optimizers that are to step and never have a gradient, where torch's scaler raises at
    once. One may wait for its turn (GANs, adapters), and once it has had a gradient, go without for
    any number of windows, unless its model has other parameters now."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._idle: WeakKeyDictionary[Optimizer, set[Losses]] = WeakKeyDictionary()
        """``Window.losses`` of an optimizer's last windows, all without a gradient."""
        self._trained: WeakSet[Optimizer] = WeakSet()

    def has_trained(self, optimizer: Optimizer) -> None:
        """It has a gradient."""
        self._idle.pop(optimizer, None)
        self._trained.add(optimizer)

    def mistake(self, optimizer: Optimizer) -> str | None:
        """What to say of ``optimizer``, which has no gradient in its step; None: nothing."""
        windows, window = self._idle.setdefault(optimizer, set()), self._scaler.window
        if window.opened_by is None or len(windows) >= MAX_IDLE_WINDOWS:
            return None
        windows.add(window.losses)
        is_last, is_new = len(windows) == MAX_IDLE_WINDOWS, optimizer not in self._trained
        name = type(optimizer).__name__
        if (is_new or is_last) and self._is_left_behind(optimizer):
            return (
                f"{name} trains nothing: none of its parameters is the prepared model's any more, "
                "and no optimizer has those that the model has now. Make it anew, after whatever "
                "made new parameters (a load, a resume, a resize), and prepare it: optimizer = "
                f"accelerator.prepare({name}(model.parameters(), ...))."
            )
        if is_new and is_last:
            first = self._scaler.parameter_names.of(parameters_of(optimizer)[:1], optimizer)
            logger.warning(
                "%s was due in %d steps and has never had a gradient, so it trains nothing. Its "
                "first parameter is %s. Make it from the parameters of the model that computes the "
                "loss, after that was wrapped or moved, and unfreeze them. (Logged once.)",
                *(name, MAX_IDLE_WINDOWS, "".join(first)),
            )
        return None

    def _is_left_behind(self, optimizer: Optimizer) -> bool:
        """Whether it has no parameter of the prepared models, and these have gradients that no
        optimizer steps. A model whose turn another one waits for has an optimizer."""
        mine = set(map(id, parameters_of(optimizer)))
        owned = {id(p) for each in self._scaler.managed for p in parameters_of(each)}
        models = self._scaler.parameter_names.parameters()
        is_stray = any(p.grad is not None and id(p) not in owned for p in models)
        return is_stray and mine.isdisjoint(map(id, models))
