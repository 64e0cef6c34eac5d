"""Where the overflow of a window began, and what is done about it before anything is updated."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..models import unwrap
from ..optimizer_step import Observer, StepTiming
from ..scaling import GradScaler, Origin, Window, gather_objects, is_sharded, parameters_of
from .finder import OverflowFinder
from .heal import Healer
from .hooks import ForwardListener
from .rerun import WindowRecording, run_again

logger = logging.getLogger("accel_scaler")

T = TypeVar("T")

ONE_IN = 100
"""After the first overflow of a run of them one in so many is explained."""

MAX_WATCHED = 20
"""Windows after which watching ends: an overflow that no other follows is due to the scale, which
grows once in some thousand windows."""


class OverflowExplainer(Observer):
    """Finds out where each overflow began; writes it to the window's ``origin`` and to the log.

    Note [Ranks that explain together]
    Ranks communicate about an overflow only where all of them are known to have it and to have the
    same settings: their gradients are sharded, or the last backward was one that DDP synchronises.
    Otherwise each rank explains its own overflows, and no module is healed.

    Args:
        scaler: whose windows these are.
        how: ``watch``: modules are watched after an overflow, until the next one. ``replay``: a
            window that has overflowed is run again; where it cannot be, the next ones are watched.
            ``always``: every window is watched.
        healer: with one, a window that has overflowed is run again whatever ``how`` says.
        around_backward: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        how: Literal["watch", "replay", "always"],
        healer: Healer | None,
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.healer, self.around_backward = scaler, healer, around_backward
        self.always = how == "always"
        runs_again = how == "replay" or healer is not None
        self.recording = WindowRecording(healer is not None) if runs_again else None
        self.finder = OverflowFinder() if self.always else None
        self.is_everywhere = False
        """Every rank has the same settings."""
        self._models: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        self._prepared: weakref.WeakSet[Module] = weakref.WeakSet()
        self._is_synchronised = False
        """The gradients of the last backward are those of every rank."""
        self._is_together = False
        """In the present window ranks communicate: see Note [Ranks that explain together]."""
        self._device = torch.device("cpu")
        self._left_to_watch = 0
        """Windows until watching ends."""
        self._in_a_row = 0
        """Windows that have overflowed."""
        self._first_scale = 1.0
        """Of the first of them."""
        self._explained: Window | None = None
        """The window that overflowed last."""
        self._stepped: Window | None = None
        """The window in which an optimizer has stepped last; others may join it."""
        self._logged: set[str] = set()

    @property
    def models(self) -> list[Module]:
        """Those that are watched, without wrappers, in the order in which they were prepared."""
        return list(self._models)

    def watch(self, prepared: Module, inner: Module) -> None:
        """Explain the overflows of this model too; see :meth:`WindowRecording.watch`."""
        plain = unwrap(inner)
        self._prepared.add(prepared)
        self._models.setdefault(plain)
        if self.recording is not None:
            self.recording.watch(prepared, plain)
        if self.finder is not None:
            self.finder.watch(plain)

    def before_backward(self, loss: Tensor) -> None:
        stepped, self._stepped = self._stepped, None
        if stepped is not None and stepped is not self._explained:
            # The window was fine: a run of overflows is over.
            self._explained, self._in_a_row = None, 0
            self._left_to_watch -= 1
            if self._left_to_watch <= 0:
                self._stop_watching()
            if self.healer is not None:
                self.healer.window_was_fine()
        self._is_synchronised = all(
            isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
            for model in self._prepared
        )
        for listener in self._listeners():
            listener.before_backward(loss)

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Explain the window if it has overflowed, once."""
        overflowed = window.found_inf or not window.grad_norms.are_finite
        if not overflowed or self._explained is window:
            return
        self._explained = window
        self._in_a_row += 1
        if self._in_a_row == 1:
            self._first_scale = self.scaler.window_scale
        params = parameters_of(optimizer)
        self._device = params[0].device
        has_shards = self.scaler.sharded or is_sharded(params)
        self._is_together = self.is_everywhere and (has_shards or self._is_synchronised)
        # A rank may have overflowed alone before, and be in the midst of a run of overflows.
        answers = self._gather((self._in_a_row, self.finder is not None))
        self._in_a_row = max(in_a_row for in_a_row, _ in answers)
        if self.finder is None and any(watches for _, watches in answers):
            self._start_watching("another rank could not run it again" if self.recording else "")
        origin = self._explain()
        if origin is not None:
            window.origin, self.scaler.skips.origin = origin, origin.text
            logger.warning("window %d overflowed: %s", window.index, origin.text)
        if self.healer is not None:
            self._heal(self.healer, window, origin)

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

    def _listeners(self) -> list[ForwardListener]:
        return [each for each in (self.recording, self.finder) if each is not None]

    def _explain(self) -> Origin | None:
        if self.finder is not None:
            found = self._agreed(self.finder.find())
            self._left_to_watch -= 1
            if found is not None or self._left_to_watch <= 0:
                self._stop_watching()
            return found
        if (self._in_a_row - 1) % ONE_IN:
            return None
        if self.recording is None:
            self._start_watching("")
            return None
        found, why = self._run_again(self.recording)
        found = self._agreed(found)
        if found is None:
            self._start_watching(why or "all that was seen was finite when it was run again")
        return found

    def _run_again(
        self, recording: WindowRecording, factor: float | None = None
    ) -> tuple[Origin | None, str]:
        """On every rank or on none. Returns where it overflowed, or why it could not be run."""
        obstacle = recording.obstacle()
        if self._stepped is self._explained:  # the present one: another optimizer has stepped in it
            obstacle = "another optimizer has updated parameters in it already"
        why = next(filter(None, self._gather(obstacle)), "")
        if why:
            return None, why
        try:
            return run_again(recording, self.around_backward, factor), ""
        except Exception as error:  # the model's own, or out of memory; it is logged
            return None, f"it raised {type(error).__name__}: {error}"

    def _heal(self, healer: Healer, window: Window, origin: Origin | None) -> None:
        recording, scale = self.recording, self.scaler.window_scale
        assert recording is not None
        recording.restore_statistics()
        if dist.is_initialized() and dist.get_world_size() > 1 and not self._is_together:
            self._warn_once(
                "heal: the ranks do not overflow together (they step alone, have other settings, "
                "or were attached after prepare), so no module is put on float32. (Logged once.)"
            )
            return
        if any(self._gather(recording.obstacle())):
            return  # it cannot be run again, which was logged

        def at_scale_1() -> Origin | None:
            found, why = self._run_again(recording, factor=1 / max(scale, 1.0))
            return self._agreed(Origin("", "", "", 0, None, None, why) if why else found)

        found = origin
        if found is None or found.where not in ("forward", "loss"):
            found = at_scale_1()
        if found is None:
            healer.window_was_fine()
            return
        if found.where:  # else it cannot be run again
            window.healed = healer.heal(self.models, found, at_scale_1)
        if not window.healed:
            return
        logger.warning(
            "window %d: in float32 from now on: %s, since no scale cures: %s. %.2g%% of the "
            "parameters are in float32. In the config, from the start: fp32_modules: %s",
            window.index,
            ", ".join(window.healed),
            found.text,
            100 * healer.share(self.models),
            json.dumps(healer.fp32_modules.patterns),
        )
        # The scale did not fall because it was too large.
        state = self.scaler.read_state()
        self.scaler.write_state(replace(state, scale=max(self._first_scale, state.scale)))

    def _start_watching(self, why: str) -> None:
        """Watch modules while they run. ``why``: the window could not be run again."""
        if why:
            self._warn_once(
                f"the window that overflowed could not be run again: {why}. The next windows are "
                "watched while they run (see find_overflow)."
            )
        self.finder = OverflowFinder()
        self._left_to_watch = MAX_WATCHED if self.recording is None else 1
        for model in self.models:
            self.finder.watch(model)

    def _stop_watching(self) -> None:
        if self.finder is not None and not self.always:
            self.finder.close()
            self.finder = None

    def _warn_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s", message)

    # What ranks tell each other: nothing, unless they explain together.

    def _gather(self, value: T) -> list[T]:
        """``value`` of every rank, or of this one alone."""
        return gather_objects(value, self._device) if self._is_together else [value]

    def _agreed(self, found: Origin | None) -> Origin | None:
        """What the first rank has found that has found something, preferably in a module."""
        answers = [(n, other) for n, other in enumerate(self._gather(found)) if other is not None]
        if not self._is_together or not answers:
            return found
        rank, first = max(answers, key=lambda answer: bool(answer[1].module))
        return replace(first, text=f"{first.text} (rank {rank})")
