"""What ``delayed`` adds to a stepper: values that the masters have and the model has not yet.

Masters are updated exactly. Until the next boundary the model has the values before or a preview
(:mod:`.preview`). A fence (an evaluation, a state dict) publishes the masters, which the next
training forward then reads, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StepError
from .master_params import MASTER
from .preview import make_previews
from .replica import Replica
from .worker import Task, Worker


class DelayedUpdates:
    """The updates of one stepper, delayed after the first ``warmup_steps``. Every method is called
    under the stepper's lock, or while nothing is in flight."""

    def __init__(
        self, replica: Replica, worker: Worker, compensation: str, warmup_steps: int
    ) -> None:
        self._replica, self._streams, self._worker = replica, replica.streams, worker
        self._warmup_steps = warmup_steps
        self.previews = make_previews(compensation, replica)
        self.newer: list[Tensor] = []
        """Parameters whose masters are newer than the model."""
        self._preparation: Task | None = None
        """The task that prepares previews for the next boundary; None: none is due."""

    def is_stale(self, steps: int) -> bool:
        """Whether the update after ``steps`` others is published at the boundary after it."""
        return steps >= self._warmup_steps

    def follow(self) -> None:
        """Make preview buffers, after the replica has followed the optimizer."""
        if self.previews is not None:
            self.previews.follow()

    def publish(self) -> None:
        """Write the masters to the model, and wait until the device has done so."""
        with torch.no_grad():
            for pair in self._replica.pairs:
                pair.publish(self._streams)
        self._streams.wait_on_host(self._streams.record())
        torch.autograd.graph.increment_version(self.newer)
        self.newer = []

    # Previews are prepared right after the update before.

    def prepare(self, steps: int) -> None:
        """Prepare previews for the next boundary with the settings as they are now, once."""
        previews, streams = self.previews, self._streams
        if previews is None or not self.is_stale(steps) or not self._replica.has_settings:
            return
        if (prepared := previews.begin()) is None:
            return
        after = streams.record_at_home()

        def run(_: Task) -> None:
            with streams.beside(after):
                streams.wait_for_side()  # the memory that is overwritten may still be sent up
                previews.prepare(prepared)

        self._preparation = task = Task(run, 0)
        try:
            self._worker.submit(task)
        except BaseException as error:  # Ctrl-C, or no thread to be had
            if task.abandon(error):
                self._preparation = None
                previews.forget()
            raise

    @property
    def is_prepared(self) -> bool:
        """Previews are prepared, or being prepared."""
        return self.previews is not None and self.previews.is_prepared

    def finish_preparation(self) -> bool:
        """Wait until no task prepares previews, since that reads masters and state. Returns whether
        one did. Raises ``StepError`` where it failed."""
        task = self._preparation
        if task is None or self.previews is None:
            return False
        try:
            ok = task.wait()
        except StepError:
            self._preparation = None  # its thread is gone, or in another process
            self.previews.forget()
            raise
        if self._preparation is not task:
            return False  # another thread has waited, too
        self._preparation = None
        if not ok:
            self.previews.forget()
            raise StepError(
                f"the preview of the next step of {type(self._replica.optimizer).__name__} failed "
                f"on the optimizer thread ({type(task.error).__name__}: {task.error}). Nothing "
                "has moved; the next call works."
            ) from task.error
        return True

    def drop_preparation(self) -> None:
        """Discard what was prepared or is being prepared; waits for the task."""
        task, self._preparation = self._preparation, None
        if task is not None:
            task.wait()
        if self.previews is not None:
            self.previews.forget()


def entry_of(entries: dict[Any, Any], key: Any) -> dict[str, Any]:
    """One parameter's saved state; {}: there is none, or not as a dict."""
    entry = entries.get(key)
    return entry if isinstance(entry, dict) else {}


def without_master(entry: Any) -> Any:
    """A parameter's saved state without its master."""
    if not isinstance(entry, dict):
        return entry
    return {key: value for key, value in entry.items() if key != MASTER}


def holds_masters(state_dict: dict[str, Any]) -> bool:
    """Whether a state dict has float32 masters in it."""
    entries = state_dict.get("state", {})
    return any(MASTER in entry_of(entries, key) for key in entries)
