"""Where the overflow of a window began, and what is done about it before anything is updated."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn import Module
from torch.optim import Optimizer

from ..models import unwrap
from ..optimizer_step import Observer, StepTiming
from ..scaling import (
    GradScaler,
    Origin,
    Share,
    Window,
    find_nonfinite,
    gather_objects,
    gradients_of,
    has_ranks,
    is_rank_0,
    is_sharded,
    local,
    parameters_of,
)
from .finder import OverflowFinder
from .headroom import Headroom
from .heal import Healer
from .hooks import ForwardListener
from .recording import WindowRecording
from .rerun import as_overflowed, make_again, run_again

logger = logging.getLogger("accel_scaler")

T = TypeVar("T")

ONE_IN = 100
"""In a run of overflows, after the first one that is explained, one in so many is."""

MAX_WATCHED = 20
"""Windows after which watching ends: an overflow that no other follows is due to the scale, which
grows once in some thousand windows."""


MAX_RETRIES = 16
"""Of one window; from the usual 65536 that is down to 1."""


ALONE = (
    "the ranks are not known to have overflowed together: they step alone, may run out of inputs "
    "(Join), have other settings, or were attached after prepare"
)


class OverflowExplainer(Observer):
    """Finds out where each overflow began; writes it to the window's ``origin`` and to the log.
    Makes the gradients of a window again, at a lower scale or with modules in float32.

    Note [Ranks that explain together]
    Ranks communicate about an overflow only where all of them are known to have it
    (:meth:`.Ranks.all_have`) and to have the same settings. Otherwise each rank explains its own
    overflows, no module is healed and nothing made again. In one window a rank may first be alone
    with the overflow of one optimizer, and then be together with the others about the next one:
    what was done alone is done again there, since the others wait for it.

    Args:
        scaler: whose windows these are.
        how: ``watch``: modules are watched after an overflow, until the next one. ``replay``: a
            window that has overflowed is run again; where it cannot be, the next ones are watched.
            ``always``: every window is watched. ``off``: no origin is searched for.
        after: the number of overflows in a row from which on their origin is searched for.
        retries: a window that has overflowed is made again at lower scales.
        looks_ahead: with ``retries``, the scale grows only while gradients leave room for it.
        healer: with one, a window that has overflowed is run again whatever ``how`` says.
        around_backward: entered around a backward, as the training loop does.
    """

    def __init__(
        self,
        scaler: GradScaler,
        how: Literal["watch", "replay", "always", "off"],
        after: int,
        retries: bool,
        looks_ahead: bool,
        healer: Healer | None,
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.scaler, self.healer, self.around_backward = scaler, healer, around_backward
        self.how, self.after, self.retries = how, after, retries
        self.always = how == "always"
        self.makes_again = retries or healer is not None
        self._room: Headroom | None = None
        self._asked: tuple[Window | None, bool] = None, True
        """The window in which a growth was due last, and whether there was room for it."""
        if retries and looks_ahead:
            self._room = Headroom(scaler.get_growth_interval())
        runs_again = how == "replay" or self.makes_again
        self.recording = WindowRecording(self.makes_again) if runs_again else None
        self.finder = OverflowFinder() if self.always else None
        self.is_everywhere = False
        """Every rank has the same settings."""
        self._models: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        self._is_together = False
        """About the present overflow ranks communicate: see Note [Ranks that explain together]."""
        self._device = torch.device("cpu")
        self._left_to_watch = 0
        """Windows until watching ends."""
        self._in_a_row = 0
        """Windows that have overflowed."""
        self._first_scale = 1.0
        """Of the first of them."""
        self._explained: Window | None = None
        """The window that overflowed last."""
        self._explained_together = False
        """It was explained by all ranks."""
        self._stepped: Window | None = None
        """The window in which an optimizer has stepped last; others may join it."""
        self._partners: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Optimizer]]
        self._partners = weakref.WeakKeyDictionary()
        """Those that stepped in the same window as an optimizer when it last did, itself too."""
        self._together: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._given_up: tuple[Window | None, bool] = None, False
        """The window that is not made again any more, and whether all ranks have given it up."""
        self._logged: set[str] = set()

    @property
    def models(self) -> list[Module]:
        """Those that are watched, without wrappers, in the order in which they were prepared."""
        return list(self._models)

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
        if stepped is not None and stepped is not self._explained:
            # The window was fine: a run of overflows is over.
            self._explained, self._in_a_row = None, 0
            self._left_to_watch -= 1
            if self._left_to_watch <= 0:
                self._stop_watching()
            if self.healer is not None:
                self.healer.window_was_fine()
        for listener in self._listeners():
            listener.before_backward(loss)
        if self.recording is not None and self.makes_again:
            self.recording.look_at(self._parameters())

    def after_backward(self) -> None:
        if self.recording is not None and self.makes_again:
            self.recording.look_after(self._parameters())

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Explain the window if it has overflowed, once."""
        if not window.found_inf and window.grad_norms.are_finite:
            return
        self._meet([optimizer], window)
        if not self._is_explained(window):
            self._find(window)
        if self.recording is not None and self.makes_again:
            self.recording.restore_statistics()
        state, before, first = self.scaler.read_state(), window.before, window.first_scale
        if window.found_inf and window.retries and before is not None and first is not None:
            # No lower scale has helped.
            state = self.scaler.rule.advance(replace(before, scale=first), True)
        elif window.healed:  # the scale did not fall because it was too large
            state = replace(state, scale=max(self._first_scale, state.scale))
        if state != self.scaler.read_state():
            self.scaler.write_state(state)

    def _meet(self, optimizers: Sequence[Optimizer], window: Window) -> None:
        """Find out whether ranks communicate about the overflow of these in this window."""
        self._device = parameters_of(optimizers[0])[0].device
        # Their own, not one that was caught from another optimizer, which may be this rank's alone.
        # None: a partner of the one that steps, looked at before its own check.
        own = [
            optimizer
            for optimizer in optimizers
            if (record := window.known(optimizer)) is None or record.verdict is not False
        ]
        self._is_together = self.is_everywhere and any(map(self.scaler.ranks.all_have, own))

    def _is_explained(self, window: Window) -> bool:
        return self._explained is window and (self._explained_together or not self._is_together)

    def _find(self, window: Window) -> None:
        """Find out where the window overflowed, and heal that."""
        self._in_a_row += self._explained is not window
        self._explained, self._explained_together = window, self._is_together
        if self._in_a_row == 1:
            self._first_scale = window.first_scale or self.scaler.window_scale
        # A rank may have overflowed alone before, and be in the midst of a run of overflows.
        mine = self._in_a_row, self._first_scale, self.finder is not None, window.losses.bad()
        in_a_row, first_scales, watches, bad = zip(*self._gather(mine), strict=True)
        self._in_a_row, self._first_scale = max(in_a_row), max(first_scales)
        window.bad_losses = sum(bad)
        if self.finder is None and any(watches):
            self._start_watching("another rank could not run it again" if self.recording else "")
        origin = self._explain(window) if self.how != "off" else None
        if origin is not None:
            window.origin, self.scaler.skips.origin = origin, origin.text
            if self._speaks:
                logger.warning("window %d overflowed: %s", window.index, origin.text)
        if self.healer is not None:
            self._heal(self.healer, window, origin)

    # Making the gradients of a window again.

    def before_check(self) -> None:
        """Gradients are about to be unscaled, clipped or stepped. Changes of the script's own since
        the backward would be lost where they are made again."""
        recording, window = self.recording, self.scaler.window
        if recording is None or window.closed:
            return
        looked_at = self._looked_at() if self._room is not None else []
        for optimizer in self.scaler.managed:
            record = window.known(optimizer)
            if record is None or record.stage is OptState.READY:
                recording.look_before_check(parameters_of(optimizer))
                if self._room is not None and optimizer in looked_at:
                    scale = self.scaler.window_scale
                    self._room.look(parameters_of(optimizer), window.index, scale)
            elif record.stage is OptState.UNSCALED and record.verdict is None:
                recording.changed = "they were unscaled by GradScaler.unscale_()"

    def make_again(self, stepping: Optimizer | None = None) -> bool:
        """Where gradients of the open window have overflowed: make them again, at a lower scale or
        with modules in float32. Returns whether there are others now, which are to be checked.

        Synchronises, and ranks communicate where they have overflowed together.

        Args:
            stepping: it is about to; then those that usually step with it have to be finite, too,
                since afterwards it is too late.
        """
        window, managed = self.scaler.window, self.scaler.managed
        bad = [o for o in managed if (record := window.known(o)) is not None and record.is_bad]
        if stepping is not None and self._is_first(window):
            bad += [o for o in managed if o not in bad and self._is_bad_partner(o, stepping)]
        if not bad:
            return False
        start = time.perf_counter()
        self._meet(bad, window)
        given_up, by_all = self._given_up
        if given_up is window and (by_all or not self._is_together):
            return False
        window.first_scale = window.first_scale or self.scaler.window_scale
        found = self._retry(window, bad) or self._keep_healed(window, bad)
        window.retry_s += time.perf_counter() - start
        if not found:
            self._given_up = window, self._is_together
        return found

    def has_room(self) -> bool:
        """Whether a growth of the scale is worth trying; the same on every rank."""
        if self._asked[0] is self.scaler.window:  # another optimizer has stepped in it
            return self._asked[1]
        if self._room is None:
            return True
        level = self._room.level() * self.scaler.window_scale * self.scaler.get_growth_factor()
        if has_ranks() and not self.is_everywhere:
            level = 0.0  # as on ranks that do not look
        self._asked = self.scaler.window, self._room.is_enough_for(level)
        return self._asked[1]

    def _looked_at(self) -> list[Optimizer]:
        """Optimizers whose gradients say whether the scale may grow. Ranks have to come to one
        answer, and are not known to come together for it. So they look at what is the same on each;
        a rank that trains alone, as under LocalSGD, at all; and nobody at parts."""
        ranks, managed = self.scaler.ranks, self.scaler.managed
        if not has_ranks():
            return managed
        shares = [ranks.share(each) for each in managed]
        wanted = Share.SAME if Share.SAME in shares else Share.ALONE
        if Share.PARTS in shares:
            return []
        return [each for each, share in zip(managed, shares, strict=True) if share is wanted]

    def _is_first(self, window: Window) -> bool:
        """No optimizer has stepped in it, but for one that this rank has alone."""
        known, is_common = window.known, self.scaler.ranks.is_common
        records = [(o, record) for o in self.scaler.managed if (record := known(o)) is not None]
        stepped = [o for o, record in records if record.stage is OptState.STEPPED]
        return not any(not has_ranks() or is_common(optimizer) for optimizer in stepped)

    def _is_bad_partner(self, optimizer: Optimizer, stepping: Optimizer) -> bool:
        record, params = self.scaler.window.known(optimizer), parameters_of(optimizer)
        partners, ranks = self._partners.get(stepping), self.scaler.ranks
        is_decided = record is not None and record.stage is not OptState.READY
        if optimizer is stepping or is_decided or (partners and optimizer not in partners):
            return False
        is_common = ranks.has_parts(optimizer)
        if self.recording is None or not (gradients_of(params) or is_common):
            return False
        is_asked = not has_ranks() or (self.is_everywhere and ranks.has_parts(stepping))
        if is_common and not is_asked:
            return False  # other ranks may not ask, or not have the one that steps
        is_dirty = not self.recording.dirty.isdisjoint(map(id, params))
        found = not is_dirty and next(find_nonfinite(gradients_of(params)), None) is not None
        return ranks.agree_on_overflow(found, optimizer, params[0].device)

    def _retry(self, window: Window, bad: Sequence[Optimizer]) -> bool:
        recording, state = self.recording, self.scaler.read_state()
        if not self.retries or recording is None:
            return False
        lower = self.scaler.rule.clamp(state.scale * self.scaler.get_backoff_factor())
        is_lost = not all(bool(local(loss).isfinite().all()) for loss in recording.losses)
        is_lost = is_lost and not window.healed and not recording.obstacle()
        is_last = max(lower, 1.0) >= state.scale or window.retries == MAX_RETRIES
        if self._any_rank(is_lost or is_last):
            return False  # no scale helps, or no lower one is left
        return self._make(window, bad, lower, changes_model=bool(window.healed))

    def _keep_healed(self, window: Window, bad: Sequence[Optimizer]) -> bool:
        """Keep a window that modules in float32 cure, where only losses came from the model."""
        if self.healer is None or window.healed or self._is_explained(window):
            return False
        self._find(window)
        if not window.healed:
            return False
        scale = max(self._first_scale, window.first_scale or 1.0)
        if not self._make(window, bad, scale, changes_model=True):
            return False
        self._explained, self._in_a_row = None, 0
        return True

    def _make(
        self, window: Window, bad: Sequence[Optimizer], scale: float, changes_model: bool = False
    ) -> bool:
        """Make the gradients again at this scale, on every rank or on none."""
        recording, state = self.recording, self.scaler.read_state()
        assert recording is not None
        assert window.first_scale is not None
        optimizers, why = self._made_with(window, bad)
        params = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        passing = None
        why = why or recording.obstacle() or recording.obstacle_for(params, self._parameters())
        if not why:
            passing = recording.passing(changes_model)
            if passing is None:
                why = "the gradient of an output was not finite, or the loss is not the model's"
        if has_ranks() and not self._is_together:
            why = ALONE
        why = next(filter(None, self._gather(why)), "")
        if not why:
            assert passing is not None
            factor, around, why = scale / window.first_scale, self.around_backward, "interrupted"
            given = recording, params, passing, around, scale, factor, changes_model
            fine = {id(p) for o in self.scaler.managed if o not in bad for p in parameters_of(o)}
            put_back = as_overflowed(params, fine)
            try:
                why = next(filter(None, self._gather(make_again(*given))), "")
            except Exception as error:  # the model's own, or out of memory; it is logged
                if has_ranks():
                    raise  # others wait for this one in a collective
                why = f"it raised {type(error).__name__}: {error}"
            finally:
                if why:
                    put_back()
        if why:
            self._warn_once(
                f"window {window.index} overflowed and is skipped, as its gradients cannot be made "
                f"again: {why}. (Logged once for each reason.)",
                why,
            )
            return False
        for optimizer in optimizers:
            window.forget(optimizer)
        window.retries += 1
        if self._room is not None and not changes_model:
            self._room.has_overflowed(params, state.scale / scale)
        self.scaler.write_state(replace(state, scale=scale, growth_tracker=0))
        return True

    def _made_with(self, window: Window, bad: Sequence[Optimizer]) -> tuple[list[Optimizer], str]:
        """The optimizers whose gradients are made again, or why those of ``bad`` cannot be.

        Others keep theirs: they are decided, or hold what an earlier window left."""
        assert self.recording is not None
        found, dirty = [], self.recording.dirty
        for optimizer in self.scaler.managed:
            record = window.known(optimizer)
            if record is None or optimizer in bad:
                pass
            elif record.stage is OptState.STEPPED:
                return [], "another optimizer has updated parameters in it already"
            elif record.stage is not OptState.READY or record.carried_over:
                continue
            if optimizer not in bad and dirty.intersection(map(id, parameters_of(optimizer))):
                if record is not None and record.is_carried:
                    return [], "another optimizer has gradients of an earlier window"
                continue
            if record is not None and record.returned is not None:
                return [], "an earlier clip is left to the step of an optimizer, and would be lost"
            found.append(optimizer)
        return found, ""

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self.scaler.managed for p in parameters_of(optimizer)]

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """Another optimizer may step, and overflow, in the same window."""
        if self.makes_again:
            if self._stepped is not window:
                self._together = weakref.WeakSet()
            self._together.add(optimizer)
            self._partners[optimizer] = self._together
            if self.recording is not None and not window.record(optimizer).is_skipped:
                self.recording.note_step(optimizer)
        for listener in self._listeners():
            listener.end_window()
        self._stepped = window

    def close(self) -> None:
        for listener in self._listeners():
            listener.close()
        self._explained = None

    def _listeners(self) -> list[ForwardListener]:
        return [each for each in (self.recording, self.finder) if each is not None]

    def _explain(self, window: Window) -> Origin | None:
        if self.finder is not None:
            found = self._agreed(self.finder.find())
            self._left_to_watch -= 1
            if found is not None or self._left_to_watch <= 0:
                self._stop_watching()
            return found
        if (self._in_a_row - self.after) % ONE_IN:
            return None
        if self.recording is None:
            self._start_watching("")
            return None
        factor = 1 / window.first_scale if window.first_scale and window.retries else None
        found, why = self._run_again(self.recording, factor)
        found = self._agreed(found)
        if found is None:
            self._start_watching(why or "all that was seen was finite")
        return found

    def _run_again(
        self, recording: WindowRecording, factor: float | None = None
    ) -> tuple[Origin | None, str]:
        """On every rank or on none. Returns where it overflowed, or why it could not be run."""
        obstacle = recording.obstacle()
        if self._stepped is self._explained:  # the present one: another optimizer has stepped in it
            obstacle = "another optimizer has updated parameters in it already"
        if has_ranks() and not self._is_together:
            obstacle = ALONE  # and a forward may communicate
        why = next(filter(None, self._gather(obstacle)), "")
        if why:
            return None, why
        try:
            return run_again(recording, self.around_backward, factor), ""
        except Exception as error:  # the model's own, or out of memory; it is logged
            if has_ranks() and any(is_sharded(model.parameters()) for model in self.models):
                raise  # others wait for this one in its forward
            return None, f"it raised {type(error).__name__}: {error}"

    def _heal(self, healer: Healer, window: Window, origin: Origin | None) -> None:
        recording, scale = self.recording, window.first_scale or self.scaler.window_scale
        assert recording is not None
        if has_ranks() and not self._is_together:
            self._warn_once(f"heal: {ALONE}. So no module is run in float32. (Logged once.)")
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
            window.healed = healer.heal(self.models, found, at_scale_1, self._any_rank)
        if window.healed and self._speaks:
            logger.warning(
                "window %d: no scale cures the %s, so in float32 from now on: %s (%.2g%% of the "
                "parameters in all)",
                window.index,
                found.short,
                ", ".join(window.healed),
                100 * healer.share(self.models),
            )

    def _start_watching(self, why: str) -> None:
        """Watch modules while they run. ``why``: the window could not be run again."""
        if why:
            self._warn_once(
                f"where the overflow began was not seen by running the window again: {why}. The "
                "next windows are watched while they run (see find_overflow)."
            )
        self.finder = OverflowFinder()
        self._left_to_watch = MAX_WATCHED if self.recording is None else 1
        for model in self.models:
            self.finder.watch(model)

    def _stop_watching(self) -> None:
        if self.finder is not None and not self.always:
            self.finder.close()
            self.finder = None

    def _warn_once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._logged:
            self._logged.add(key or message)
            logger.warning("%s", message)

    # What ranks tell each other: nothing, unless they explain together.

    @property
    def _speaks(self) -> bool:
        """Whether this rank logs what all have found."""
        return not self._is_together or is_rank_0()

    def _gather(self, value: T) -> list[T]:
        """``value`` of every rank, or of this one alone."""
        return gather_objects(value, self._device) if self._is_together else [value]

    def _any_rank(self, answer: bool) -> bool:
        return any(self._gather(answer))

    def _agreed(self, found: Origin | None) -> Origin | None:
        """What the first rank has found that has found something, preferably in a module."""
        answers = [(n, other) for n, other in enumerate(self._gather(found)) if other is not None]
        if not self._is_together or not answers:
            return found
        rank, first = max(answers, key=lambda answer: bool(answer[1].module))
        return replace(first, text=f"{first.text} (rank {rank})")
