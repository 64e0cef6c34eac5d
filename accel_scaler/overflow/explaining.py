"""Where the overflow of a window began, and what is done about it.

The modules were watched while they ran, which only observes; or, where that was asked for, the
window is run again. With ``heal`` what overflows at any scale runs in float32 from then on. All of
it happens before anything is updated.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..models import unwrap
from ..optimizer_step import Observer, StepTiming
from ..scaling import (
    LOW_PRECISION,
    GradScaler,
    Origin,
    Window,
    gather_objects,
    is_sharded,
    parameters_of,
)
from .finder import OverflowFinder
from .heal import Finding, Healer, Trial, locate
from .recording import WindowRecording
from .replay import Replay, obstacle, overflowed_sum, run_again

logger = logging.getLogger("accel_scaler")

T = TypeVar("T")

ONE_IN = 100
"""After the first skip of a run, the skips of it that are explained."""

MOST_WATCHED = 20
"""Windows without an overflow after which watching ends: an overflow that no other follows is the
scale's, once in some thousand windows."""

MOST_TOLD = 20
"""Overflows of which a warning is given; of later ones records and the log's level INFO tell."""


class OverflowExplainer(Observer):
    """Says of each overflow where it began, in the window's ``origin`` and in the log.

    Args:
        scaler: whose windows these are.
        how: ``watch``, modules are watched after an overflow, until the next one; ``replay``, a
            window that has overflowed is run again, and modules are watched only where that fails,
            while a run of skips lasts; ``always``, modules are watched in every window.
        healer: puts modules that overflow at any scale on float32; None: nobody does.
        around: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        how: Literal["watch", "replay", "always"],
        healer: Healer | None,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.around = scaler, around
        self._stepped: frozenset[Module] = frozenset()
        """Models that another optimizer has updated in it already."""
        self.always, self.healer = how == "always", healer
        runs_again = how == "replay" or healer is not None
        self.recording = WindowRecording() if runs_again else None
        self.finder = OverflowFinder() if self.always else None
        self._left_to_watch = 0
        """Windows without an overflow until watching ends."""
        self._models: list[weakref.ref[Module]] = []
        """In the order in which they came, which is the same on every rank."""
        self._prepared: weakref.WeakSet[Module] = weakref.WeakSet()
        self.is_everywhere = False
        """Every rank has the same settings, so that they may communicate."""
        self._is_same_everywhere = False
        """The gradients of the last backward are those of every rank."""
        self._overflows = 0
        """Windows in a row."""
        self._first_scale = 1.0
        """Of the first of them."""
        self._explained: Window | None = None
        """The window that overflowed last."""
        self._closed: Window | None = None
        """The window in which an optimizer has stepped last; others may join it."""
        self._told = 0
        self._told_why = ""
        self._told_alone = False

    @property
    def models(self) -> list[Module]:
        """Those that are watched, without their wrappers."""
        return [model for ref in self._models if (model := ref()) is not None]

    def watch(self, prepared: Module, inner: Module) -> None:
        """Explain the overflows of this model too.

        Args:
            prepared: what the training loop calls.
            inner: the model in it, whose modules' names are told.
        """
        plain = unwrap(inner)
        self._prepared.add(prepared)
        if not any(plain is model for model in self.models):
            self._models.append(weakref.ref(plain))
        if self.recording is not None:
            self.recording.watch(prepared, plain)
            if self.healer is not None:
                self.healer.statistics.watch(plain)
                self.recording.before_window = self.healer.statistics.keep
        if self.finder is not None:
            self.finder.watch(plain)

    def before_backward(self, loss: Tensor) -> None:
        """A backward from this unscaled loss is about to start."""
        closed, self._closed = self._closed, None
        if closed is not None and closed is not self._explained:
            self._window_was_fine()
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
        if not overflowed or self._explained is window:
            return
        self._explained = window
        self._overflows += 1
        if self._overflows == 1:
            self._first_scale = self.scaler.window_scale
        params = parameters_of(optimizer)
        ranks = _Ranks(params[0].device, self.scaler.sharded or is_sharded(params))
        if self.is_everywhere and (ranks.are_sharded or self._is_same_everywhere):
            # One of them may have overflowed alone before, and be in the midst of a run.
            ranks.are_together = True
            overflows, watch = zip(
                *ranks.gather((self._overflows, self.finder is not None)), strict=True
            )
            self._overflows = max(overflows)
            if any(watch) and self.finder is None:
                self._watch_from_now("another rank could not" if self.recording else "")
        self._stepped = self._stepped_in(window, optimizer)
        origin = self._explain(params, ranks)
        if origin is not None:
            self._tell(window, origin)
        if self.healer is not None and scaled:
            self._heal(self.healer, window, origin, ranks)
            self.healer.statistics.put_back()

    def _stepped_in(self, window: Window, optimizer: Optimizer) -> frozenset[Module]:
        """Models whose parameters another optimizer has updated in this window."""
        records = [(o, window.known(o)) for o in self.scaler.managed if o is not optimizer]
        updated = {
            id(p)
            for other, record in records
            if record and record.stage is OptState.STEPPED and not record.found_inf
            for p in parameters_of(other)
        }
        return frozenset(
            model
            for model in self.models
            if updated and not updated.isdisjoint(map(id, Module.parameters(model)))
        )

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """Another optimizer may step, and overflow, in the same window."""
        if self.recording is not None:
            self.recording.end_window()
        if self.finder is not None:
            self.finder.end_window()
        self._closed = window

    def _window_was_fine(self) -> None:
        """A run of overflows is over."""
        self._explained, self._overflows = None, 0
        self._left_to_watch -= 1
        if self._left_to_watch <= 0:
            self._watch_no_more()
        if self.healer is not None:
            self.healer.window_was_fine()

    def close(self) -> None:
        """Remove every hook."""
        if self.recording is not None:
            self.recording.close()
        if self.finder is not None:
            self.finder.close()
        self._explained = None

    def _explain(self, params: Sequence[Tensor], ranks: _Ranks) -> Origin | None:
        if self.finder is not None:
            found = self.finder.find(sums=not ranks.are_together)
            if ranks.are_together:
                found, _ = ranks.first_origin(found)
                found = found or self.finder.find()
            if found is not None and self.healer is None:
                self._watch_no_more()
            return found
        if (self._overflows - 1) % ONE_IN:
            return None
        if self.recording is None:
            self._watch_from_now("")
            return None
        result, why = self._run_again(self.recording, ranks)
        if result is not None and result.differences:
            why = f"it did not give the same numbers: {', '.join(result.differences)}"
        elif result is not None:
            logger.debug("the window was run again in %.3g s", result.seconds)
        found = None if result is None or result.differences else result.origin
        found, why = ranks.first_origin(found, why)
        if found is None and not why:
            if ranks.are_together or any(p.dtype in LOW_PRECISION for p in params):
                found = overflowed_sum(self.models, self.recording.backwards - 1)
            why = "nothing was inf or NaN when it was run again"
        if found is None:
            self._watch_from_now(why)
        return found

    def _run_again(
        self, recording: WindowRecording, ranks: _Ranks, **how: float
    ) -> tuple[Replay | None, str]:
        """On every rank or on none; and why not."""
        why = obstacle(recording, self._stepped)
        if ranks.are_together:
            why = next(filter(None, ranks.gather(why)), "")
        if why:
            return None, why
        stops = not (ranks.are_together and ranks.are_sharded)
        try:
            return run_again(recording, self.around, stops=stops, stepped=self._stepped, **how), ""  # type: ignore[arg-type]
        except Exception as error:  # the model's own, or no memory is left; it is told
            return None, f"it raised {type(error).__name__}: {error}"

    def _heal(self, healer: Healer, window: Window, origin: Origin | None, ranks: _Ranks) -> None:
        """Put on float32 what overflows at any scale."""
        recording, models, scale = self.recording, self.models, self.scaler.window_scale
        if recording is None or (healer.has_given_up and (self._overflows - 1) % ONE_IN):
            return
        if ranks.are_several and not ranks.are_together:
            self._tell_not_healed()
            return

        def at_scale_1() -> Finding | None:
            result, _ = self._run_again(recording, ranks, cures=True, factor=1 / max(scale, 1.0))
            found = None
            if result is None:
                found = Finding(Origin("", "", "", 0, None, None, "it cannot be run again"), None)
            elif result.origin is not None:
                found = Finding(result.origin, locate(models, result.origin))
            return ranks.first(found)

        finding = ranks.first(None if origin is None else Finding(origin, locate(models, origin)))
        trial: Trial | None = at_scale_1
        if self.finder is not None and not self.always:  # it could not be run again
            trial = None
            if finding is None or (scale > 1 and not finding.is_in_forward):
                return
        elif finding is None or not finding.is_in_forward:
            finding = at_scale_1()
        if finding is None:
            healer.window_was_fine()
            return
        window.healed = healer.heal(models, finding, trial)
        if window.healed:
            self._tell_healed(window, healer, finding)

    def _tell_not_healed(self) -> None:
        if not self._told_alone:
            self._told_alone = True
            logger.warning(
                "heal: the ranks do not overflow together (they step alone, have other settings, "
                "or were attached after prepare), so none of them puts a module on float32 that "
                "the others do not. (Said once.)"
            )

    def _tell_healed(self, window: Window, healer: Healer, finding: Finding) -> None:
        share = healer.share(self.models)
        logger.warning(
            "window %d: in float32 from now on: %s, since no scale cures: %s. %.2g%% of the "
            "parameters are in float32. In the config, from the start: fp32_modules: %s",
            window.index,
            ", ".join(window.healed),
            finding.origin.text,
            100 * share,
            json.dumps(healer.chosen.patterns),
        )
        # What brought it down was not its size.
        state = self.scaler.read_state()
        self.scaler.write_state(replace(state, scale=max(self._first_scale, state.scale)))

    def _watch_from_now(self, why: str) -> None:
        """Modules are watched while they run. ``why``: the window could not be run again."""
        if why != self._told_why:
            self._told_why = why
            logger.warning(
                "the window that overflowed could not be run again: %s. The next windows are "
                "watched while they run, until one does not overflow.",
                why,
            )
        self.finder = OverflowFinder()
        self._left_to_watch = MOST_WATCHED if self.recording is None else 1
        for model in self.models:
            self.finder.watch(model)

    def _watch_no_more(self) -> None:
        if self.finder is not None and not self.always:
            self.finder.close()
            self.finder = None

    def _tell(self, window: Window, origin: Origin) -> None:
        """In the window, to who ends a run of skips, and in the log."""
        window.origin = origin
        self.scaler.skips.origin = origin.text
        self._told += 1
        level = logging.WARNING if self._told <= MOST_TOLD else logging.INFO
        logger.log(level, "window %d overflowed: %s", window.index, origin.text)


class _Ranks:
    """The ranks that run a window again."""

    def __init__(self, device: torch.device, are_sharded: bool) -> None:
        self.device, self.are_sharded = device, are_sharded
        self.are_several = dist.is_initialized() and dist.get_world_size() > 1
        self.are_together = False
        """All of them have overflowed in it, and so may communicate."""

    def gather(self, value: T) -> list[T]:
        """The value of every rank."""
        return gather_objects(value, self.device)

    def first_origin(self, found: Origin | None, why: str = "") -> tuple[Origin | None, str]:
        """What the first rank has found, and why another could not be asked."""
        answers = self.gather((found, why)) if self.are_together else []
        for rank, (origin, _) in enumerate(answers):
            if origin is not None and found is None:
                found = replace(origin, text=f"{origin.text} (rank {rank})")
        return found, next((other for _, other in answers if other), why)

    def first(self, found: Finding | None) -> Finding | None:
        """What the first rank has found; one that has it from another does not know its module."""
        answers = self.gather(found) if self.are_together else [found]
        told = [answer for answer in answers if answer is not None]
        return next((answer for answer in told if answer.at is not None), next(iter(told), None))
