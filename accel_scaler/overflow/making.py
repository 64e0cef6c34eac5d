"""Making the gradients of a window again, before anything is updated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..scaling import (
    GradScaler,
    Window,
    has_ranks,
    local,
    parameters_of,
)
from .meeting import Meeting
from .obstacle import Obstacle
from .recording import WindowRecording
from .rerun import fill_with_inf, make_again

logger = logging.getLogger("accel_scaler")

MAX_RETRIES = 16
"""The most retries of one window: from the usual scale of 65536 down to 1."""


class GradientMaker:
    """The boundary's ``Rerun``. Makes the gradients of the open window again: at a lower scale
    (``retry``), or after modules were put in float32 (``heal``).

    Args:
        scaler: the scaler of the windows.
        recording: the record of the present window.
        meeting: the ranks that communicate.
        retries: whether a window that has overflowed is made again at lower scales.
        heal: heals a window. Returns the scale at which it is to be made again; None: not healed.
        around_backward: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        recording: WindowRecording,
        meeting: Meeting,
        retries: bool,
        heal: Callable[[Window], float | None],
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.recording, self.meeting = scaler, recording, meeting
        self.retries, self.heal, self.around_backward = retries, heal, around_backward
        self.gradients = recording.gradients
        self._given_up: Window | None = None
        """The window that is not made again any more."""
        self._logged: set[str] = set()

    def before_check(self) -> None:
        """Gradients are about to be unscaled, clipped or stepped. Does not synchronise."""
        window = self.scaler.window
        if window.closed:
            return
        for optimizer in self.scaler.managed:
            record = window.known(optimizer)
            if record is None or record.stage is OptState.READY:
                self.gradients.before_check(parameters_of(optimizer))
            elif record.stage is OptState.UNSCALED and record.verdict is None:
                self.gradients.obstacle = Obstacle.UNSCALED

    def has_room(self) -> bool:
        """The scale grows as torch's: a growth that was too much is made again."""
        return True

    def make_again(self) -> bool:
        """Where gradients of the open window have overflowed: make them again, at a lower scale or
        with modules in float32. Returns whether there are others now, which are to be checked.

        Synchronises, and ranks communicate where they have overflowed together.
        """
        window = self.scaler.window
        records = {optimizer: window.known(optimizer) for optimizer in self.scaler.managed}
        bad = [each for each, record in records.items() if record is not None and record.is_bad]
        if not bad:
            return False
        self.meeting.meet(bad, window)
        if self.meeting.is_alone:
            self._warn_once(window, Obstacle.ALONE)
            return False
        if self._given_up is window:
            return False
        start = time.perf_counter()
        window.first_scale = window.first_scale or self.scaler.window_scale
        is_made = self.retries and self._retry(window, bad)
        if not is_made and (scale := self.heal(window)) is not None:
            is_made = self._make(window, bad, scale)
        window.retry_s += time.perf_counter() - start
        if not is_made:
            self._given_up = window
        return is_made

    def _retry(self, window: Window, bad: Sequence[Optimizer]) -> bool:
        """Make gradients again at the next lower scale. Returns whether that was done."""
        state = self.scaler.read_state()
        lower = self.scaler.rule.clamp(state.scale * self.scaler.get_backoff_factor())
        losses = [backward.loss for backward in self.recording.backwards]
        is_lost = not all(bool(local(loss).isfinite().all()) for loss in losses)
        is_lost = is_lost and not window.healed and not self.recording.obstacle()
        is_last = max(lower, 1.0) >= state.scale or window.retries == MAX_RETRIES
        if self.meeting.any(is_lost or is_last):
            return False  # no scale helps, or no lower one is left
        return self._make(window, bad, lower)

    def _make(self, window: Window, bad: Sequence[Optimizer], scale: float) -> bool:
        """Make gradients again at this scale, on every rank or on none. Returns whether that was
        done. Where it fails midway all of them are inf."""
        assert window.first_scale is not None
        factor, changes_model = scale / window.first_scale, bool(window.healed)
        optimizers, why = self._made_with(window, bad)
        params = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        why = self.meeting.first(why or self.recording.obstacle_to_gradients(params, changes_model))
        if not why:
            given = self.recording, params, self.around_backward, scale, factor, changes_model
            try:
                why = make_again(*given)
            except Exception as error:  # the model raised it, or memory ran out; the log names it
                if has_ranks():
                    raise  # other ranks wait for this one in a collective
                why = Obstacle.RAISED.format(f"{type(error).__name__}: {error}")
            why = self.meeting.first(why)
            if why:
                fill_with_inf(params)
        if why:
            self._warn_once(window, why)
            return False
        for optimizer in optimizers:
            window.forget(optimizer)
        window.retries += 1
        state = self.scaler.read_state()
        self.scaler.write_state(replace(state, scale=scale, growth_tracker=0))
        return True

    def _made_with(self, window: Window, bad: Sequence[Optimizer]) -> tuple[list[Optimizer], str]:
        """The optimizers whose gradients are made again, or why those of ``bad`` cannot be.

        Other optimizers keep their gradients: they are decided, or an earlier window's."""
        found, dirty = [], self.gradients.dirty
        for optimizer in self.scaler.managed:
            record = window.known(optimizer)
            if record is None or optimizer in bad:
                pass
            elif record.stage is OptState.STEPPED:
                return [], Obstacle.STEPPED
            elif record.stage is not OptState.READY or record.carried_over:
                continue
            if optimizer not in bad and dirty.intersection(map(id, parameters_of(optimizer))):
                if record is not None and record.carried_over is not None:
                    return [], Obstacle.PARTNER_ADDED
                continue
            if record is not None and record.returned is not None:
                return [], Obstacle.CLIPPED
            found.append(optimizer)
        return found, ""

    def _warn_once(self, window: Window, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.warning(
                "step %d overflowed and is skipped, as its gradients cannot be made again: "
                "%s. (Logged once for each reason.)",
                window.index,
                why,
            )
