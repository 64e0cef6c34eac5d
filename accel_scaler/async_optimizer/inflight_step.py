"""The step in hand: who waits for which part of it, and what is said when it fails."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..devices import refuse_capture
from ..errors import OrderError, StepError, listed
from ..optimizer_step import StepTiming
from ..scaling import MOST_NAMES, ParameterNames, local
from .master_params import ParameterPair, place_of
from .pending_parameter import ParameterHold, can_hold_parameters, is_held
from .replica import Replica
from .streams import PartEvents, SideStreams
from .worker import Task

__all__ = ["Flight"]

SHORTEST_WAIT_S = 1e-5
"""A shorter one is none: the part was done."""

MOST_WAITS = 128
"""Noted of one update."""


class Flight:
    """The part of :class:`.async_stepper.AsyncStepper` that waits for the optimizer thread.

    Any thread may wait. ``lock`` guards what a wait leaves behind; nobody waits for a task under
    it that another thread has handed over.
    """

    optimizer: Optimizer
    steps: int
    replica: Replica
    streams: SideStreams
    parameter_names: ParameterNames

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Reentrant: a signal handler may look while its thread has it."""
        self.timing: StepTiming | None = None
        """When the last update handed over ran, and who waited for it."""
        self.unpublished = False
        """Masters are newer than the model (``delayed``)."""
        self.waits_at_root = False
        """A compiled or sharded model: its forward waits, not each use of a parameter."""
        self.waits_at_step = False
        """Something reads parameters that no hook can be put before: the step itself waits."""
        self._task: Task | None = None
        self._lead = 0
        """Parts of the task in hand that only publish what the step before computed."""
        self._of_user = False
        """The task in hand is a function given to ``submit``."""
        self._hold: ParameterHold | None = None
        self._events: list[Any] = []
        """Where on the device each part done ends; one more after a failure."""
        self._followed: Any = None
        self._versions: list[int] = []
        self._learning = False
        self._broken: str | None = None
        self._trainer = threading.current_thread()
        """The thread that trains, as far as is known."""

    def claim(self) -> None:
        """This thread trains from here on: it steps, loads or closes, and is told of failures."""
        self._trainer = threading.current_thread()

    def claim_if_gone(self) -> None:
        """The same in a training forward, where the thread that trained before has ended."""
        if not self._trainer.is_alive():
            self.claim()

    @property
    def is_trained_here(self) -> bool:
        """Whether this thread is the one that trains, or that one is gone."""
        trainer = self._trainer
        return trainer is threading.current_thread() or not trainer.is_alive()

    def hold_parameters(self, task: Task, whole: bool) -> None:
        replica = self.replica
        if self.waits_at_root or self.waits_at_step or not can_hold_parameters(replica.params):
            return
        ends, part_of = replica.ends, replica.part_of
        if whole:
            ends, part_of = [len(replica.params)], dict.fromkeys(part_of, 1)
        # Of this task: a reader on another thread may come back when the next one is in hand.
        wait = partial(self._await_part, task, self._events)
        self._hold = ParameterHold(
            replica.params, ends, part_of, wait, self._learning, self.order_of_parts()
        )

    def order_of_parts(self) -> PartEvents | None:
        """Of the step in hand, as the device does them; None where the host does."""
        return PartEvents(self.streams, self._events) if self.streams.copies_beside else None

    def _await(self, parts: int, where: str) -> None:
        """Wait for a part of the step in hand, if any; the device waits too."""
        task, events = self._task, self._events
        if task is not None:
            self._await_part(task, events, parts, where)

    def _await_part(
        self, task: Task, events: list[Any], parts: int, where: str | None = None
    ) -> int:
        """On whatever thread uses a parameter: wait for its part; the device waits too."""
        # Where a compiled model meets this line dynamo breaks its graph, once; not further down.
        if self.streams.copies_beside:
            refuse_capture(where or "a parameter whose update is due")
        start = time.perf_counter()
        is_due = not (task.finished or task.done >= parts)
        ok = task.wait(parts)
        if is_due:
            hold = self._hold
            seen = () if hold is None else hold.seen
            _note_wait(task, start, where or (seen[-1] if seen else "forward"))
        if not ok:
            self._finish(task, "forward")
        self._follow(events[parts - 1 : parts])
        # Later parts are enqueued perhaps, but the device has not been told to wait for them.
        return parts if self.streams.copies_beside else task.done

    def wait_for(self, task: Task, events: list[Any], parts: int) -> Callable[[], object]:
        """What waits for parts of ``task`` whoever keeps it, without keeping this stepper."""
        ref, streams = weakref.ref(self), self.streams

        def wait() -> None:
            flight = ref()
            if flight is not None:
                flight._await_part(task, events, parts, "gradient")
                return
            if not task.wait(parts):
                raise StepError(
                    "a gradient was used that was lost with its step, which failed on the "
                    f"optimizer thread ({type(task.error).__name__}: {task.error})."
                ) from task.error
            for event in events[parts - 1 : parts]:
                streams.follow(event)

        return wait

    def drop_lost(self) -> None:
        """Gradients of a step that failed are gone: ``.grad`` is None."""
        for p in self.replica.params:
            if is_held(p.grad):
                p.grad = None

    def _follow(self, events: Sequence[Any]) -> None:
        """What this thread enqueues from here on comes after ``events`` (one at most)."""
        for event in events:
            self.streams.follow(event)
            self._followed = event

    def wait_for_device(self) -> None:
        """Block until what was waited for is there, whatever stream is going to read it."""
        self.streams.wait_on_host(self._followed)

    def wait(self, where: str) -> bool:
        """Wait until the step in hand, if any, is over. False: it failed; :meth:`finish` says how.

        Raises:
            StepError: it will never be over.
        """
        task = self._task
        return True if task is None else self._wait(task, where)

    def _wait(self, task: Task, where: str) -> bool:
        start, is_due = time.perf_counter(), not task.finished
        try:
            ok = task.wait()
        except StepError as error:
            with self.lock:
                if self._task is task:
                    self._broken = str(error)
                    self._task = None
                    self._release(learn=False)
                    self.drop_lost()
            raise
        if is_due:
            _note_wait(task, start, where)
        return ok

    def finish(self, where: str = "synchronize", everywhere: bool = False) -> None:
        """Wait for the step in hand, if any. In ``delayed`` the model is as it was.

        ``everywhere``: for the device as well, and so on whatever stream it is looked at.

        Raises:
            StepError: it failed; says which parameters were updated. Once on the thread that
                trains: the next call works. Other threads are told until that one is.
        """
        task = self._task
        if task is not None:
            self._finish(task, where, everywhere)

    def _finish(self, task: Task, where: str, everywhere: bool = False) -> None:
        if self.streams.copies_beside:
            refuse_capture(where)
        ok = self._wait(task, where)
        if everywhere:
            self.streams.follow_last(on_host=True)
        failure: StepError | None = None
        with self.lock:
            if self._task is task:
                self._follow(self._events[-1:])
                failure = None if ok else self._failure_of(task)
                self._release(learn=ok)
                if ok or self.is_trained_here:
                    self._task = None
                    if not ok:
                        self.drop_lost()
                if self.is_trained_here:
                    # Kernels that ran on one thread have made the worker's number the default of
                    # new threads.
                    torch.set_num_threads(torch.get_num_threads())
        if failure is not None:
            raise failure from task.error
        if not ok:
            # The thread that trains was told while this one waited.
            raise StepError(
                f"{type(self.optimizer).__name__} failed on the optimizer thread "
                f"({type(task.error).__name__}: {task.error})."
            ) from task.error

    def _release(self, learn: bool = True) -> None:
        hold, self._hold = self._hold, None
        if hold is None:
            return
        hold.release()
        # Compiled code checks the class of its parameters before any of ours runs.
        self.waits_at_step |= hold.was_traced
        if self._learning and learn:
            self._learning = False
            before = self.replica.params
            self.replica.reorder(hold.seen)
            self._follow_order(before)

    def _follow_order(self, before: Sequence[Tensor]) -> None:
        """With masters: each parameter's last known version, where it stands in the parts now."""
        known = dict(zip(map(id, before), self._versions, strict=False))
        if self.replica.has_masters:
            self._versions = [known.get(id(p), p._version) for p in self.replica.params]
        else:
            self._versions = []

    def _failure_of(self, task: Task) -> StepError:
        error = task.error
        if self._of_user:
            return StepError(
                f"the function given to submit(), step {self.steps}, failed on the optimizer "
                f"thread ({type(error).__name__}: {error}). What it had stepped by then stays "
                "stepped; its gradients are gone. The next call works."
            )
        name = f"step {self.steps} of {type(self.optimizer).__name__}"  # skipped ones not counted
        updated = max(task.done - self._lead, 0)
        params = self.replica.params
        if not self.replica.splittable and not updated:
            return StepError(
                f"{name} failed on the training thread "
                f"({type(error).__name__}: {error}). It is stepped whole, as torch does it: what "
                f"it had updated by then of {self._names(params)}, and of its state, stays "
                "updated. The gradients of this step are gone; the next step works with new ones."
            )
        end = self.replica.parts[updated - 1].end if updated else 0
        return StepError(
            f"{name} failed on the optimizer thread "
            f"({type(error).__name__}: {error}). Updated: {self._names(params[:end])}. As before "
            f"the step: {self._names(params[end:])}; optimizer state may have moved for the next "
            "of these. The gradients of this step are gone; the next step works with new ones."
        )

    def settle_parts(self, params: Iterable[Tensor]) -> None:
        """Wait for parameters that cannot be held (shards), part by part."""
        task, wanted = self._task, {id(p) for p in params}
        if task is None or (self.unpublished and not self._lead):
            return
        last = 0
        for number, part in enumerate(self.replica.parts, 1):
            if any(id(pair.param) in wanted for pair in part.pairs):
                last = number
        if last:
            self._await(min(last, task.parts), "forward")

    def finish_model(self) -> None:
        """Wait until the model is what the next forward shall see, all of it."""
        task = self._task
        if task is None:
            self.streams.follow_last()  # who waited for it may have been on another stream
            return
        if self.unpublished and not self._lead:
            return
        if self.unpublished:
            self._await(self._lead, "forward")
        else:
            self.finish("forward")

    def keep_newer(self, before: Iterable[ParameterPair]) -> None:
        """Publish masters that a change from outside has ended, where the model still is.

        Raises:
            OrderError: it is elsewhere, or of another size.
        """
        now, moved = {id(pair.param): pair for pair in self.replica.pairs}, []
        for pair in before:
            if pair.is_master and now.get(id(pair.param)) is not pair:
                held = local(pair.param.detach())
                if place_of(held) == place_of(pair.target):
                    pair.publish(self.streams)
                else:
                    moved.append(pair.param)
        if moved:
            raise OrderError(
                f"{self._names(moved)} moved or changed shape while a newer value was waiting to "
                "be published (step_mode='delayed'). The newer value is lost, the change stays. "
                "Call optimizer.synchronize() before changing parameters."
            )

    def export_masters(self) -> list[Tensor | None]:
        """Masters that hold more than the model, in the optimizer's order; call it when idle."""
        return [pair.stepped.data if pair.is_rounded else None for pair in self.replica.pairs]

    def import_masters(self, masters: Iterable[Tensor | None]) -> None:
        """What :meth:`export_masters` of an optimizer like this one gave."""
        for pair, master in zip(self.replica.pairs, masters, strict=True):
            if master is not None:
                pair.refresh(master)

    def forgive(self) -> None:
        """State is about to be replaced: a lost step no longer matters."""
        self.claim()
        if self._broken is not None:
            self._broken, self._task = None, None
            self._release(learn=False)
            self.drop_lost()

    def _names(self, params: Sequence[Tensor]) -> str:
        names = self.parameter_names.of(params[:MOST_NAMES], self.optimizer)
        return listed(names, len(params)) or "none"


def _note_wait(task: Task, start: float, where: Any) -> None:
    length, waits = time.perf_counter() - start, task.timing.waits
    if length > SHORTEST_WAIT_S and len(waits) < MOST_WAITS:
        waits.append((start, length, where))
