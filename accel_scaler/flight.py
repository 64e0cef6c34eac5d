"""The step in hand: who waits for which part of it, and what is said when it fails."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .config import StepError
from .culprits import Culprits
from .intake import Intake
from .pending import Hold, can_be_held, settle_all
from .shadow import Shadow
from .transfer import Lane
from .worker import Task

__all__ = ["Flight"]

MOST_NAMED = 5


class Flight:
    """The part of :class:`accel_scaler.engine.Engine` that waits for the optimizer thread."""

    optimizer: Optimizer
    shadow: Shadow
    lane: Lane
    intake: Intake
    culprits: Culprits

    def __init__(self) -> None:
        self.waited_s = 0.0
        """How long the training thread has waited for the optimizer thread."""
        self.unpublished = False
        """Masters are newer than the model (``delayed``)."""
        self.waits_at_root = False
        """A compiled or sharded model: its forward waits, not each use of a parameter."""
        self._task: Task | None = None
        self._lead = 0
        """Parts of the task in hand that only publish what the step before computed."""
        self._hold: Hold | None = None
        self._marks: list[Any] = []
        self._versions: list[int] = []
        self._learning = False
        self._broken: str | None = None

    @property
    def is_idle(self) -> bool:
        """No step is in hand, or it is done."""
        return self._task is None or self._task.finished

    def hold_parameters(self, whole: bool) -> None:
        shadow = self.shadow
        if self.waits_at_root or not all(map(can_be_held, shadow.params)):
            if not self.waits_at_root:
                self.finish()  # nobody would see them used
            return
        ends = [len(shadow.params)] if whole else [part.end for part in shadow.parts]
        part_of = {
            id(slot.param): 1 if whole else number
            for number, part in enumerate(shadow.parts, 1)
            for slot in part.slots
        }
        self._hold = Hold(shadow.params, ends, part_of, self._await, one_by_one=self._learning)

    def _await(self, parts: int) -> int:
        """On whatever thread uses a parameter: wait for its part; the device waits too."""
        task = self._task
        if task is None:
            return len(self.shadow.parts)
        start = time.perf_counter()
        ok = task.wait(parts)
        self.waited_s += time.perf_counter() - start
        if not ok:
            self.finish()
        if self._marks:
            self.lane.follow(self._marks[parts - 1])
        return task.done

    def finish(self) -> None:
        """Wait for the step in hand, if any. In ``delayed`` the model is as it was.

        Raises:
            StepError: it failed; says which parameters were updated. Once: the next call works.
        """
        task = self._task
        if task is None:
            return
        start = time.perf_counter()
        try:
            ok = task.wait()
        except StepError as error:
            self._broken = str(error)
            self._task = None
            self._release()
            raise
        self.waited_s += time.perf_counter() - start
        self._task = None
        self._release()
        if self._marks:
            self.lane.follow(self._marks[-1])
        self.shadow.collect_settings()
        if not ok:
            self._raise_failure(task)

    def _release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            return
        hold.release()
        if self._learning:
            self._learning = False
            self.shadow.reorder(hold.seen)
            self.intake.watch(self.shadow.ordered)
            if self._versions:
                self._versions = [p._version for p in self.shadow.params]

    def _raise_failure(self, task: Task) -> None:
        error = task.error
        updated = max(task.done - self._lead, 0)
        params = self.shadow.params
        end = self.shadow.parts[updated - 1].end if updated else 0
        raise StepError(
            f"{type(self.optimizer).__name__} failed on the optimizer thread "
            f"({type(error).__name__}: {error}). Updated: {self._names(params[:end])}. As before "
            f"the step: {self._names(params[end:])}; optimizer state may have moved for the next "
            "of these. The gradients of this step are gone; the next step works with new ones."
        ) from error

    def settle(self, params: Iterable[Tensor]) -> None:
        """Wait for those of ``params`` that are pending."""
        settle_all(list(params))

    def settle_parts(self, params: Iterable[Tensor]) -> None:
        """Wait for parameters that cannot be held (shards), part by part."""
        task, wanted = self._task, {id(p) for p in params}
        if task is None or (self.unpublished and not self._lead):
            return
        last = 0
        for number, part in enumerate(self.shadow.parts, 1):
            if any(id(slot.param) in wanted for slot in part.slots):
                last = number
        if last:
            self._await(min(last, task.parts))

    def finish_model(self) -> None:
        """Wait until the model is what the next forward shall see, all of it."""
        task = self._task
        if task is None or (self.unpublished and not self._lead):
            return
        if self.unpublished:
            self._await(self._lead)
        else:
            self.finish()

    def forgive(self) -> None:
        """State is about to be replaced: a lost step no longer matters."""
        if self._broken is not None:
            self._broken, self._task = None, None
            self._release()

    def _names(self, params: Sequence[Tensor]) -> str:
        names = self.culprits.names(params[:MOST_NAMED], self.optimizer)
        more = len(params) - len(names)
        return (", ".join(names) + (f" and {more} more" if more > 0 else "")) or "none"
