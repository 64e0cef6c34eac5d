"""Making the gradients of a window again, before anything is updated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..scaling import (
    GradScaler,
    Share,
    Window,
    find_nonfinite,
    gradients_of,
    has_ranks,
    local,
    parameters_of,
)
from .gradients import WindowGradients
from .headroom import Headroom
from .meeting import Meeting
from .obstacle import Obstacle
from .recording import WindowRecording
from .rerun import as_overflowed, make_again

logger = logging.getLogger("accel_scaler")

MAX_RETRIES = 16
"""The most retries of one window: from the usual scale of 65536 down to 1."""


class GradientMaker:
    """Makes the gradients of the open window again: at a lower scale (``retry``), or after modules
    were put in float32 (``heal``).

    Args:
        scaler: the scaler of the windows.
        recording: the record of the present window, with its gradients.
        meeting: the ranks that communicate.
        looks_ahead: the scale grows only while gradients leave room for it.
        around_backward: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        recording: WindowRecording,
        meeting: Meeting,
        looks_ahead: bool,
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.recording, self.meeting = scaler, recording, meeting
        self.around_backward = around_backward
        assert recording.gradients is not None
        self.gradients: WindowGradients = recording.gradients
        self._room = Headroom(scaler.get_growth_interval()) if looks_ahead else None
        self._growth: tuple[Window | None, bool] = None, True
        """The window in which a growth was due last, and whether there was room for it."""
        self._logged: set[str] = set()

    def before_check(self) -> None:
        """Gradients are about to be unscaled, clipped or stepped."""
        window = self.scaler.window
        if window.closed:
            return
        looked_at = self._looked_at() if self._room is not None else []
        for optimizer in self.scaler.managed:
            record = window.known(optimizer)
            if record is None or record.stage is OptState.READY:
                self.gradients.before_check(parameters_of(optimizer))
                if self._room is not None and optimizer in looked_at:
                    scale = self.scaler.window_scale
                    self._room.look(parameters_of(optimizer), window.index, scale)
            elif record.stage is OptState.UNSCALED and record.verdict is None:
                self.gradients.obstacle = Obstacle.UNSCALED

    def overflowed(self, stepping: Optimizer | None) -> list[Optimizer]:
        """The optimizers whose gradients have overflowed in the open window.

        Args:
            stepping: it is about to; then the others are looked at, too, since afterwards it is
                too late.
        """
        window, managed = self.scaler.window, self.scaler.managed
        bad = [o for o in managed if (record := window.known(o)) is not None and record.is_bad]
        if stepping is not None and self._is_first(window):
            bad += [o for o in managed if o not in bad and self._is_bad(o, stepping)]
        return bad

    def retry(self, window: Window, bad: Sequence[Optimizer]) -> bool:
        """Make gradients again at the next lower scale. Returns whether that was done."""
        state = self.scaler.read_state()
        lower = self.scaler.rule.clamp(state.scale * self.scaler.get_backoff_factor())
        losses = [backward.loss for backward in self.recording.backwards]
        is_lost = not all(bool(local(loss).isfinite().all()) for loss in losses)
        is_lost = is_lost and not window.healed and not self.recording.obstacle()
        is_last = max(lower, 1.0) >= state.scale or window.retries == MAX_RETRIES
        if self.meeting.any(is_lost or is_last):
            return False  # no scale helps, or no lower one is left
        return self.make(window, bad, lower, changes_model=bool(window.healed))

    def make(
        self, window: Window, bad: Sequence[Optimizer], scale: float, changes_model: bool
    ) -> bool:
        """Make gradients again at this scale, on every rank or on none. Returns whether that was
        done. ``changes_model``: modules run in float32 since."""
        assert window.first_scale is not None
        optimizers, why = self._made_with(window, bad)
        params = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        why = why or self.recording.obstacle_to_gradients(params, changes_model)
        why = self.meeting.first(Obstacle.ALONE if self.meeting.is_alone else why)
        if not why:
            fine = {id(p) for o in self.scaler.managed if o not in bad for p in parameters_of(o)}
            why = self._make(params, fine, scale, scale / window.first_scale, changes_model)
        if why:
            if why not in self._logged:
                self._logged.add(why)
                logger.warning(
                    "step %d overflowed and is skipped, as its gradients cannot be made again: "
                    "%s. (Logged once for each reason.)",
                    window.index,
                    why,
                )
            return False
        for optimizer in optimizers:
            window.forget(optimizer)
        window.retries += 1
        state = self.scaler.read_state()
        if self._room is not None and not changes_model:
            self._room.has_overflowed(params, state.scale / scale)
        self.scaler.write_state(replace(state, scale=scale, growth_tracker=0))
        return True

    def _make(
        self,
        params: list[Tensor],
        fine: set[int],
        scale: float,
        factor: float,
        changes_model: bool,
    ) -> str:
        """Make these gradients again. Returns why that has failed on some rank, "" if on none.
        After a failure the gradients are as after any overflow."""
        given = self.recording, params, self.around_backward, scale, factor, changes_model
        put_back, why = as_overflowed(params, fine), "interrupted"
        try:
            why = self.meeting.first(make_again(*given))
        except Exception as error:  # the model raised it, or memory ran out; the log names it
            if has_ranks():
                raise  # other ranks wait for this one in a collective
            why = Obstacle.RAISED.format(f"{type(error).__name__}: {error}")
        finally:
            if why:
                put_back()
        return why

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

    def _is_first(self, window: Window) -> bool:
        """Whether no optimizer has stepped in the window, but for one that this rank has alone."""
        known, is_common = window.known, self.scaler.ranks.is_common
        records = [(o, record) for o in self.scaler.managed if (record := known(o)) is not None]
        stepped = [o for o, record in records if record.stage is OptState.STEPPED]
        return not any(not has_ranks() or is_common(optimizer) for optimizer in stepped)

    def _is_bad(self, optimizer: Optimizer, stepping: Optimizer) -> bool:
        """Whether unchecked gradients of ``optimizer`` have overflowed in this window."""
        record, params = self.scaler.window.known(optimizer), parameters_of(optimizer)
        ranks = self.scaler.ranks
        is_decided = record is not None and record.stage is not OptState.READY
        if optimizer is stepping or is_decided:
            return False
        is_common = ranks.has_parts(optimizer)
        if not (gradients_of(params) or is_common):
            return False
        is_asked = not has_ranks() or (self.meeting.is_everywhere and ranks.has_parts(stepping))
        if is_common and not is_asked:
            return False  # other ranks may not ask, or not have the optimizer that steps
        is_dirty = not self.gradients.dirty.isdisjoint(map(id, params))
        found = not is_dirty and next(find_nonfinite(gradients_of(params)), None) is not None
        return ranks.agree_on_overflow(found, optimizer, params[0].device)

    def has_room(self) -> bool:
        """Whether a growth of the scale is worth trying; the same on every rank."""
        if self._growth[0] is self.scaler.window:  # another optimizer has stepped in it
            return self._growth[1]
        if self._room is None:
            return True
        level = self._room.level() * self.scaler.window_scale * self.scaler.get_growth_factor()
        if has_ranks() and not self.meeting.is_everywhere:
            level = 0.0  # as on ranks that do not look
        self._growth = self.scaler.window, self._room.is_enough_for(level)
        return self._growth[1]

    def _looked_at(self) -> list[Optimizer]:
        """Optimizers whose gradients say whether the scale may grow. Ranks have to come to one
        answer, and are not known to come together for it. So they look at gradients that are the
        same on each rank. A rank that trains alone, as under LocalSGD, looks at all of its own, and
        no rank looks at parts of gradients."""
        ranks, managed = self.scaler.ranks, self.scaler.managed
        if not has_ranks():
            return managed
        shares = [ranks.share(each) for each in managed]
        wanted = Share.SAME if Share.SAME in shares else Share.ALONE
        if Share.PARTS in shares:
            return []
        return [each for each, share in zip(managed, shares, strict=True) if share is wanted]
