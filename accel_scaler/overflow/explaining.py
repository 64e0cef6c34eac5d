"""The handling of a window that has overflowed, before anything is updated."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..models import unwrap
from ..optimizer_step import Observer, StepTiming
from ..scaling import GradScaler, Origin, Window, has_ranks, is_sharded, parameters_of
from .finder import OverflowFinder
from .heal import Healer
from .meeting import ALONE, Meeting, raised
from .recording import WindowRecording
from .rerun import run_again
from .retry import STEPPED, Retry

logger = logging.getLogger("accel_scaler")

ONE_IN = 100
"""In a run of overflows, after the first one that is explained, one in so many is."""

MAX_WATCHED = 20
"""Windows after which watching ends: an overflow that no other follows is due to the scale, which
grows once in some thousand windows."""


class OverflowExplainer(Observer):
    """Finds out where each overflow began; writes it to the window's ``origin`` and to the log.

    See Note [Ranks that explain together].

    Args:
        scaler: the scaler of the windows.
        how: ``watch``: modules are watched after an overflow, until the next one. ``replay``: a
            window that has overflowed is run again; where it cannot be, the next ones are watched.
            ``always``: every window is watched. ``off``: no origin is searched for.
        after: the number of overflows in a row from which on their origin is searched for.
        retries: a window that has overflowed is made again at lower scales.
        healer: with a healer, a window that has overflowed is run again whatever ``how`` says.
        around_backward: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        how: Literal["watch", "replay", "always", "off"],
        after: int,
        retries: bool,
        healer: Healer | None,
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.healer, self.around_backward = scaler, healer, around_backward
        self.how, self.after = how, after
        self.meeting = Meeting(scaler)
        self.recording: WindowRecording | None = None
        self.retry: Retry | None = None
        """Makes gradients again, where that is asked for."""
        if retries or healer is not None or how == "replay":
            self.recording = WindowRecording(self._parameters)
            if retries:
                self.retry = Retry(scaler, self.recording, self.meeting, around_backward)
        self.finder = OverflowFinder() if how == "always" else None
        self._models: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        self._left_to_watch = 0
        """The number of windows until watching ends."""
        self._in_a_row = 0
        """The number of windows in a row that have overflowed."""
        self._explained: Window | None = None
        """The window that overflowed last."""
        self._explained_together = False
        """All ranks have explained that window together."""
        self._stepped: Window | None = None
        """The window in which an optimizer has stepped last; others may join it."""

    @property
    def models(self) -> list[Module]:
        """The watched models without wrappers, in the order in which they were prepared."""
        return list(self._models)

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self.scaler.managed for p in parameters_of(optimizer)]

    def watch(self, prepared: Module, inner: Module) -> None:
        """Explain the overflows of this model too; see :meth:`WindowRecording.watch`."""
        plain = unwrap(inner)
        self._models.setdefault(plain)
        if self.recording is not None:
            self.recording.watch(prepared, plain)
        if self.finder is not None:
            self.finder.watch(plain)

    def before_backward(self, loss: Tensor) -> None:
        stepped, self._stepped = self._stepped, None
        if stepped is not None and (stepped is not self._explained or not stepped.found_inf):
            # The window was fine, or was cured: a run of overflows is over.
            self._explained, self._in_a_row = None, 0
            self._count_watched()
        for listener in self._listeners():
            listener.before_backward(loss)

    def after_backward(self) -> None:
        if self.recording is not None:
            self.recording.after_backward()

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Explain the window if it has overflowed, once."""
        if not window.found_inf and window.grad_norms.are_finite:
            return
        self.meeting.meet([optimizer], window)
        is_explained = self._explained_together or not self.meeting.is_together
        if self._explained is not window or not is_explained:
            self._find(window)
        if self.recording is not None and (self.retry or self.healer):  # looking changes nothing
            self.recording.restore_statistics()
        if window.before is not None and window.found_inf and (window.healed or window.retries):
            # No lower scale has helped: the skip halves the first scale, as any other skip.
            before = replace(window.before, scale=window.first_scale or window.before.scale)
            after = self.scaler.rule.advance(before, True)
            if window.healed:  # the scale was not too large
                after = replace(after, scale=before.scale)
            self.scaler.write_state(after)

    def _find(self, window: Window) -> None:
        """Find out where the window overflowed, and heal that."""
        self._in_a_row += self._explained is not window
        self._explained, self._explained_together = window, self.meeting.is_together
        # A rank may have overflowed alone before, and be in the midst of a run of overflows.
        mine = self._in_a_row, self.finder is not None, window.losses.bad()
        in_a_row, watches, bad = zip(*self.meeting.gather(mine), strict=True)
        self._in_a_row, window.bad_losses = max(in_a_row), sum(bad)
        if self.finder is None and any(watches):
            self._start_watching()
        origin = self._explain(window) if self.how != "off" else None
        if origin is not None:
            window.origin, self.scaler.skips.origin = origin, origin.text
            if self.meeting.speaks:
                how = "skipped" if origin.is_of_data else "overflowed"
                logger.warning("step %d %s: %s", window.index, how, origin.text)
        if self.healer is not None and self.recording is not None:
            self._heal(self.healer, self.recording, window, origin)

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """Another optimizer may step, and overflow, in the same window."""
        for listener in self._listeners():
            listener.end_window()
        self._stepped = window

    def close(self) -> None:
        for listener in self._listeners():
            listener.close()
        self._explained = None

    def _listeners(self) -> list[WindowRecording | OverflowFinder]:
        return [each for each in (self.recording, self.finder) if each is not None]

    def _explain(self, window: Window) -> Origin | None:
        if self.finder is not None:
            found = self.meeting.agreed(self.finder.find())
            self._count_watched(found is not None)
            return found
        if (self._in_a_row - self.after) % ONE_IN:
            return None
        if self.recording is None:
            self._start_watching()
            return None
        factor = 1 / window.first_scale if window.first_scale and window.retries else None
        found, why = self._run_again(self.recording, factor)
        found = self.meeting.agreed(found)
        if found is None:
            self._start_watching(why or "all that was seen was finite")
        return found

    def _run_again(
        self, recording: WindowRecording, factor: float | None = None
    ) -> tuple[Origin | None, str]:
        """Run the window again, on every rank or on none. Returns where it overflowed, or why it
        could not run."""
        obstacle = recording.obstacle()
        if self._stepped is self._explained:  # another optimizer has stepped in it
            obstacle = STEPPED
        if self.meeting.is_alone:
            obstacle = ALONE  # and a forward may communicate
        why = self.meeting.first(obstacle)
        if why:
            return None, why
        try:
            return run_again(recording, self.around_backward, factor), ""
        except Exception as error:  # the model raised it, or memory ran out; the log names it
            if has_ranks() and any(is_sharded(model.parameters()) for model in self.models):
                raise  # other ranks wait for this one in its forward
            return None, raised(error)

    def _heal(
        self, healer: Healer, recording: WindowRecording, window: Window, origin: Origin | None
    ) -> None:
        if self.meeting.is_alone or self.meeting.first(recording.obstacle()):
            return  # the window cannot run again, as the log says
        scale = window.first_scale or self.scaler.window_scale

        def at_scale_1() -> Origin | None:
            found, why = self._run_again(recording, factor=1 / max(scale, 1.0))
            return self.meeting.agreed(Origin("", "", "", 0, None, None, why) if why else found)

        found = origin
        if found is None or found.where not in ("forward", "loss"):
            found = at_scale_1()
        if found is None or not found.where:  # all is finite, or the window cannot run again
            return
        window.healed = healer.heal(self.models, found, window.index, at_scale_1, self.meeting.any)
        if window.healed and self.meeting.speaks:
            logger.warning(
                "step %d: no scale cures the %s, so in float32 from now on: %s (%.2g%% of the "
                "parameters in all)",
                window.index,
                found.short,
                ", ".join(window.healed),
                100 * healer.share(self.models),
            )

    def _start_watching(self, why: str = "") -> None:
        """Watch modules while they run. ``why``: the window could not be run again."""
        if why:
            self.meeting.warn_once(
                f"where the overflow began was not seen by running the step again: {why}. The next "
                "steps are watched while they run (see find_overflow)."
            )
        self.finder = OverflowFinder()
        self._left_to_watch = MAX_WATCHED if self.recording is None else 1
        for model in self.models:
            self.finder.watch(model)

    def _count_watched(self, has_found: bool = False) -> None:
        self._left_to_watch -= 1
        is_over = has_found or self._left_to_watch <= 0
        if is_over and self.finder is not None and self.how != "always":
            self.finder.close()
            self.finder = None
