"""Where the overflow of a window began: it is run again, or its modules were watched."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..optimizer_step import Explainer
from ..overflow_finder import Origin, OverflowFinder, WindowRecording, obstacle, run_again
from ..scaling import GradScaler, Window, gather_objects, is_sharded, parameters_of

logger = logging.getLogger("accel_scaler")

ONE_IN = 100
"""After the first skip of a run, the windows of it that are run again."""

MOST_TOLD = 20
"""Overflows of which a warning is given that a lower scale may cure."""


class OverflowExplainer(Explainer):
    """Says of each overflow where it began, in the window's ``origin`` and in the log.

    Args:
        scaler: whose windows these are.
        replays: a window is run again once it has overflowed, and modules are watched only where
            that fails, while a run of skips lasts; False: modules are watched in every window.
        around: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        replays: bool,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.around = scaler, around
        self.recording = WindowRecording() if replays else None
        self.finder = None if replays else OverflowFinder()
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        self._prepared: weakref.WeakSet[Module] = weakref.WeakSet()
        self._is_same_everywhere = False
        """The gradients of the last backward are those of every rank."""
        self._overflows = 0
        """Windows in a row."""
        self._told = 0
        self._told_why = ""

    def watch(self, prepared: Module, inner: Module) -> None:
        """Explain the overflows of this model too.

        Args:
            prepared: what the training loop calls.
            inner: the model in it, whose modules' names are told.
        """
        self._prepared.add(prepared)
        self._models.add(inner)
        if self.recording is not None:
            self.recording.watch(prepared, inner)
        if self.finder is not None:
            self.finder.watch(inner)

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""
        self._is_same_everywhere = all(
            isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
            for model in self._prepared
        )
        if self.recording is not None:
            self.recording.note_backward(loss)
        if self.finder is not None:
            self.finder.note_loss(loss)

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Explain the window if it has overflowed, and nobody has yet."""
        scaled = self.scaler.is_enabled()
        overflowed = window.found_inf if scaled else not window.grad_norms.are_finite
        if not overflowed:
            return
        if window.origin is None:
            self._overflows += 1
            origin = self._explain(optimizer, window)
            if origin is not None:
                self._tell(window, origin)

    def optimizer_stepped(self, window: Window) -> None:
        """A window without overflow ends a run of them."""
        if self.recording is not None:
            self.recording.end_window()
        if self.finder is not None:
            self.finder.end_window()
        if not window.found_inf and window.origin is None:
            self._overflows = 0
            if self.recording is not None and self.finder is not None:
                self._watch_no_more()

    def close(self) -> None:
        """Remove every hook."""
        if self.recording is not None:
            self.recording.close()
        if self.finder is not None:
            self.finder.close()

    def _explain(self, optimizer: Optimizer, window: Window) -> Origin | None:
        if self.finder is not None:  # always, or since a window could not be run again
            found = self.finder.find()
            if found is not None and self.recording is not None:
                self._watch_no_more()
            return found
        if self.recording is None or (self._overflows - 1) % ONE_IN:
            return None
        return self._replay(self.recording, optimizer)

    def _replay(self, recording: WindowRecording, optimizer: Optimizer) -> Origin | None:
        """Run the window again on every rank, or on none."""
        params = parameters_of(optimizer)
        sharded = self.scaler.sharded or is_sharded(params)
        together = torch.distributed.is_initialized() and (sharded or self._is_same_everywhere)
        why, found = obstacle(recording), None
        if together:
            reasons = gather_objects(why, params[0].device)
            why = next(filter(None, reasons), "")
        if not why:
            found, why = self._run_again(recording, stops=not (together and sharded))
        if together:
            answers = gather_objects((found, why), params[0].device)
            for rank, (origin, _) in enumerate(answers):
                if origin is not None and found is None:
                    found = replace(origin, text=f"{origin.text} (rank {rank})")
            why = "" if found is not None else why
        if found is None:
            self._watch_from_now(why)
        return found

    def _run_again(self, recording: WindowRecording, stops: bool) -> tuple[Origin | None, str]:
        """``(origin, "")``, or why there is none."""
        try:
            result = run_again(recording, self.around, stops=stops)
        except Exception as error:  # the model's own, or no memory is left; it is told
            return None, f"it raised {type(error).__name__}: {error}"
        if result.differences:
            return None, f"it did not give the same numbers: {', '.join(result.differences)}"
        if result.is_finite:
            return None, "nothing was inf or NaN when it was run again"
        logger.debug("the window was run again in %.3g s", result.seconds)
        return result.origin, ""

    def _watch_from_now(self, why: str) -> None:
        """Modules are watched while they run, until this run of skips is over."""
        if why != self._told_why:
            self._told_why = why
            logger.info(
                "the window that overflowed could not be run again: %s. The next windows are "
                "watched while they run, until one does not overflow.",
                why,
            )
        self.finder = OverflowFinder()
        for model in self._models:
            self.finder.watch(model)

    def _watch_no_more(self) -> None:
        if self.finder is not None:
            self.finder.close()
            self.finder = None

    def _tell(self, window: Window, origin: Origin) -> None:
        """In the window, to who ends a run of skips, and in the log."""
        window.origin = origin
        evidence = self.scaler.overflow_streak.evidence
        evidence.first = origin.text + ". "
        made = origin.where == "forward" and origin.input and all(map(isfinite, origin.input))
        evidence.module = f"{origin.module or 'the model'} ({origin.cls})" if made else ""
        is_usual = origin.where not in ("forward", "loss") and self.scaler.window_scale > 1.0
        self._told += is_usual
        level = logging.INFO if is_usual and self._told > MOST_TOLD else logging.WARNING
        logger.log(level, "window %d overflowed: %s", window.index, origin.text)
