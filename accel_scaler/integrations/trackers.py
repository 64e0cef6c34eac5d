"""What the trackers of a run are told: alerts, and every so often the scaler's values.

Everything here runs on the training thread, on the main process.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..telemetry import Alert, TrackedWindow, TrackedWindows
from .wandb_rows import WINDOW, WandbRows

logger = logging.getLogger("accel_scaler")

KEY = "scaler/alert"
"""What trackers without alerts get: ``Cause`` as a number."""

OWN = ("wandb", "trackio")
"""Trackers with alerts and histograms of their own: the names of their modules, and of Accelerate's
trackers for them."""

GRADIENTS = "scaler/gradients/"
"""Before a parameter's name: the histogram of its gradient."""


@dataclass(frozen=True, slots=True)
class Sink:
    """One of whom a window is told."""

    name: str
    takes_histograms: bool
    deliver: Callable[[TrackedWindow], None]


class Trackers:
    """Tells every tracker. Whatever one raises is logged, once for each.

    Args:
        accelerator: whose trackers these are; held weakly.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._failed: set[tuple[str, str]] = set()
        self.step: int | None = None
        """The last that the user has logged with."""
        self._pending = 0
        self.follows = False
        """They are told of windows."""
        self.others: Callable[[], list[Sink]] = list
        """Those that the accelerator does not know: a Trainer's callbacks."""
        self._flush: Callable[[], None] = _nothing
        self._at_exit: Callable[[], None] | None = None
        self._rows: WandbRows | None = None
        self._told_none = False

    def take_pending(self) -> int:
        """The highest number since the last call, for who logs by himself (a Trainer); 0: none."""
        pending, self._pending = self._pending, 0
        return pending

    def send(self, alert: Alert) -> None:
        """To every tracker of the accelerator, and to a run of wandb's or trackio's that the script
        or a Trainer's callback has begun."""
        accelerator = self._accelerator()
        if accelerator is None or not accelerator.is_main_process:
            return
        self._pending = max(self._pending, int(alert.cause))
        trackers = {_name_of(each): each for each in getattr(accelerator, "trackers", ())}
        for name in dict.fromkeys((*trackers, *OWN)):
            with self._noting(name, "an alert"):
                if name in trackers:
                    self._tell(name, trackers[name], alert)
                else:
                    _tell_active(name, alert)

    def follow(self, windows: TrackedWindows, flush: Callable[[], None]) -> None:
        """Tell of these windows; ``flush`` makes them send what they still have."""
        self.follows, self._flush = True, flush
        windows.send, windows.wants_histograms = self.send_window, self._take_histograms

    def send_window(self, window: TrackedWindow) -> None:
        """To a Trainer's reporting callbacks, every tracker of the accelerator, and a run of
        wandb's or trackio's that the script has begun. At the step that is the window's number; a
        Trainer's callbacks at its global step."""
        sinks = self._sinks()
        if self._at_exit is None:  # not before wandb has begun: what comes last goes first
            self._at_exit = _AtExit(self)
            atexit.register(self._at_exit)
        if not sinks and not self._told_none:
            self._told_none = True
            logger.warning(self._no_tracker())
        for sink in sinks:
            with self._noting(sink.name, "the scaler's values"):
                sink.deliver(window)

    def before_log(self, step: int | None) -> None:
        """The script is about to log with this step."""
        if self._rows is not None:
            with self._noting("wandb", "the scaler's values"):
                self._rows.before_log(step)

    def close(self, is_end: bool = True) -> None:
        """Nothing more is sent. ``is_end``: the script logs no more."""
        self._flush()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        rows, self._rows = self._rows, None
        if rows is not None and not is_end:
            atexit.register(rows.finish)
        elif rows is not None:
            with self._noting("wandb", "the scaler's values"):
                rows.finish()

    def _take_histograms(self) -> bool:
        return any(sink.takes_histograms for sink in self._sinks())

    def _sinks(self) -> list[Sink]:
        accelerator = self._accelerator()
        if accelerator is None or not accelerator.is_main_process:
            return []
        sinks = self.others()
        for tracker in getattr(accelerator, "trackers", ()):
            name = _name_of(tracker)
            with self._noting(name, "the scaler's values"):  # whose run may not have begun
                run = tracker.tracker
                if name == "wandb":
                    sinks.append(Sink(name, True, partial(self._add_row, run)))
                else:
                    sinks.append(Sink(name, takes_histograms(name, run), partial(_log, tracker)))
        known = {sink.name for sink in sinks}
        if "wandb" not in known and (run := _active("wandb")) is not None:
            sinks.append(Sink("wandb", True, partial(self._add_row, run)))
        if "trackio" not in known and (run := _active("trackio")) is not None:
            sinks.append(Sink("trackio", True, partial(_log_to_trackio, run)))
        return sinks

    def _add_row(self, run: Any, window: TrackedWindow) -> None:
        if self._rows is None or self._rows.run is not run:
            self._rows = WandbRows(run)
        histograms = as_values("wandb", window, GRADIENTS)
        self._rows.add({WINDOW: window.index, **window.values, **histograms})

    def _no_tracker(self) -> str:
        accelerator = self._accelerator()
        asked = getattr(accelerator, "log_with", ()), getattr(accelerator, "trackers", ())
        begun = "this run has no tracker: give Accelerator a log_with and call init_trackers"
        if asked[0] and not asked[1]:
            begun = "init_trackers was not called: call it"
        return (
            f"tracker_interval is set, but {begun}, begin a run of wandb or trackio, or name a "
            "tracker in a Trainer's report_to. Training goes on; from when there is one it is told "
            "of windows. (Said once.)"
        )

    @contextmanager
    def _noting(self, name: str, what: str) -> Iterator[None]:
        """What a tracker raises in the block does not end training."""
        try:
            yield
        except Exception as error:
            if (name, what) not in self._failed:
                self._failed.add((name, what))
                logger.warning(
                    "the tracker %r could not be sent %s: %s: %s. Training goes on. (Said once.)",
                    name,
                    what,
                    type(error).__name__,
                    error,
                )

    def _tell(self, name: str, tracker: Any, alert: Alert) -> None:
        run = tracker.tracker
        if name in OWN and _alert(name, run, alert):
            return
        tracker.log({KEY: int(alert.cause)}, step=self.step)
        if hasattr(run, "add_text"):  # TensorBoard's writer
            run.add_text(KEY, f"{alert.title}: {alert.text}", global_step=self.step)


class _AtExit:
    """Closes trackers that nobody has closed; it does not keep them."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = weakref.ref(trackers)

    def __call__(self) -> None:
        if (trackers := self._trackers()) is not None:
            trackers.close()


def _nothing() -> None:
    """Where nothing is to be done."""


def _name_of(tracker: Any) -> str:
    return str(getattr(tracker, "name", type(tracker).__name__))


def _log(tracker: Any, window: TrackedWindow) -> None:
    """To a tracker of Accelerate's."""
    name, run, values = _name_of(tracker), tracker.tracker, window.values
    if name == "dvclive":  # its step is the script's, and log() moves it on
        step = run.step
        try:
            run.step = window.index
            for key, value in values.items():
                run.log_metric(key, value)
        finally:
            run.step = step
        return
    tracker.log({**values, **as_values(name, window, GRADIENTS)}, step=window.index)
    write_histograms(run, window, window.index)


def _log_to_trackio(run: Any, window: TrackedWindow) -> None:
    run.log({**window.values, **as_values("trackio", window, GRADIENTS)}, step=window.index)


def takes_histograms(name: str, run: Any) -> bool:
    """The tracker of this name shows histograms; ``run``: what it wraps."""
    return name in OWN or hasattr(run, "add_histogram_raw")


def as_values(name: str, window: TrackedWindow, prefix: str) -> dict[str, Any]:
    """The histograms as what the tracker of this name logs like numbers; {}: it does not."""
    module: Any = sys.modules.get(name) if name in OWN else None
    if not hasattr(module, "Histogram"):
        return {}
    return {
        prefix + each.name: module.Histogram(np_histogram=(list(each.counts), each.edges))
        for each in window.histograms
    }


def write_histograms(writer: Any, window: TrackedWindow, step: int) -> None:
    """The histograms, with TensorBoard's writer; nothing, if it is another's."""
    if not hasattr(writer, "add_histogram_raw"):
        return
    for each in window.histograms:
        writer.add_histogram_raw(
            GRADIENTS + each.name,
            min=each.lowest,
            max=each.highest,
            num=each.elements,
            sum=each.total,
            sum_squares=each.norm**2,
            bucket_limits=each.edges[1:],
            bucket_counts=list(each.counts),
            global_step=step,
        )


def _active(name: str) -> Any:
    """A run that was begun in this process, if there is one; imports nothing."""
    module: Any = sys.modules.get(name)
    if module is not None and name == "wandb":
        return getattr(module, "run", None)
    if module is not None and hasattr(module, "context_vars"):
        return module.context_vars.current_run.get()
    return None


def _tell_active(name: str, alert: Alert) -> None:
    run = _active(name)
    if run is not None:
        _alert(name, run, alert)


def _alert(name: str, run: Any, alert: Alert) -> bool:
    """By the tracker's own alert; False: this version of it has none."""
    if not hasattr(run, "alert"):
        return False
    level: Any = alert.cause.level
    if name == "trackio":  # which takes no text for it
        level = sys.modules[name].AlertLevel[level]
    run.alert(title=alert.title, text=alert.text, level=level)
    return True
