"""``on_overflow="retry"``: the gradients of a window are made again before anything is updated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..scaling import GradScaler, Window, has_ranks, local, parameters_of
from .meeting import ALONE, Meeting, raised
from .recording import WindowRecording
from .rerun import fill_with_inf, make_again

STEPPED = "another optimizer has updated parameters in it already"

MAX_RETRIES = 16
"""The most retries of one window: from the usual scale of 65536 down to 1."""


class Retry:
    """The boundary's ``Rerun``: makes the gradients of the open window again at lower scales.

    ``around_backward`` is entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        recording: WindowRecording,
        meeting: Meeting,
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.recording, self.meeting = scaler, recording, meeting
        self.gradients, self.around_backward = recording.gradients, around_backward
        self._given_up: Window | None = None
        """The window that is not made again any more."""

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
                self.gradients.obstacle = "they were unscaled by GradScaler.unscale_()"

    def make_again(self) -> bool:
        """Where gradients of the open window have overflowed: make them again at the next lower
        scale. Returns whether there are others now, which are to be checked.

        Synchronises, and ranks communicate where they have overflowed together.
        """
        window = self.scaler.window
        records = {optimizer: window.known(optimizer) for optimizer in self.scaler.managed}
        bad = [each for each, record in records.items() if record is not None and record.is_bad]
        if not bad:
            return False
        self.meeting.meet(bad, window)
        if self.meeting.is_alone:
            return self._give_up(window, ALONE)
        if self._given_up is window:
            return False
        start = time.perf_counter()
        window.first_scale = window.first_scale or self.scaler.window_scale
        scale = self.scaler.read_state().scale
        lower = self.scaler.rule.clamp(scale * self.scaler.get_backoff_factor())
        losses = [backward.loss for backward in self.recording.backwards]
        # No scale helps, or no lower one is left.
        is_lost = not all(bool(local(loss).isfinite().all()) for loss in losses)
        is_last = max(lower, 1.0) >= scale or window.retries == MAX_RETRIES
        is_made = not self.meeting.any(is_lost or is_last) and self._make(window, bad, lower)
        window.retry_s += time.perf_counter() - start
        if not is_made:
            self._given_up = window
        return is_made

    def _make(self, window: Window, bad: Sequence[Optimizer], scale: float) -> bool:
        """Make gradients again at this scale, on every rank or on none. Returns whether that was
        done. Where it fails midway all of them are inf."""
        assert window.first_scale is not None
        factor = scale / window.first_scale
        optimizers, why = self._made_with(window, bad)
        params = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        why = self.meeting.first(why or self.recording.obstacle_to_gradients(params))
        if not why:
            try:
                why = make_again(self.recording, params, self.around_backward, factor)
            except Exception as error:  # the model raised it, or memory ran out; the log names it
                if has_ranks():
                    raise  # other ranks wait for this one in a collective
                why = raised(error)
            why = self.meeting.first(why)
            if why:
                fill_with_inf(params)
        if why:
            return self._give_up(window, why)
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
                return [], STEPPED
            elif record.stage is not OptState.READY or record.carried_over:
                continue
            if optimizer not in bad and dirty.intersection(map(id, parameters_of(optimizer))):
                if record is not None and record.carried_over is not None:
                    return [], "another optimizer has gradients of an earlier step"
                continue
            if record is not None and record.returned is not None:
                return [], "an earlier clip is left to the step of an optimizer"
            found.append(optimizer)
        return found, ""

    def _give_up(self, window: Window, why: str) -> bool:
        self.meeting.warn_once(
            f"overflowed and is skipped, as its gradients cannot be made again: {why}. (Logged "
            "once for each reason.)",
            f"step {window.index} ",
        )
        return False
