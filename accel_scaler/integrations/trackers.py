"""Alerts to the trackers that a run has: wandb's and trackio's own, a number to all others."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

from ..telemetry import Alert

logger = logging.getLogger("accel_scaler")

KEY = "scaler/alert"
"""What trackers without alerts get: ``Cause`` as a number."""

OWN = ("wandb", "trackio")
"""Trackers with alerts: the names of their modules, and of Accelerate's trackers for them."""


class Trackers:
    """Sends alerts, from the main process only. Whatever a tracker raises is logged, once for each.

    Args:
        accelerator: whose trackers these are; held weakly.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._failed: set[str] = set()
        self.step: int | None = None
        """The last that the user has logged with."""
        self._pending = 0

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
            try:
                if name in trackers:
                    self._tell(name, trackers[name], alert)
                else:
                    _tell_active(name, alert)
            except Exception as error:
                self._note_failure(name, error)

    def _note_failure(self, name: str, error: Exception) -> None:
        if name not in self._failed:
            self._failed.add(name)
            logger.warning(
                "the tracker %r could not be sent an alert: %s: %s. Training goes on. (Said once.)",
                name,
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


def _name_of(tracker: Any) -> str:
    return str(getattr(tracker, "name", type(tracker).__name__))


def _tell_active(name: str, alert: Alert) -> None:
    """A run that was begun in this process, if there is one; imports nothing."""
    module: Any = sys.modules.get(name)
    run = None
    if module is not None and name == "wandb":
        run = getattr(module, "run", None)
    elif module is not None and hasattr(module, "context_vars"):
        run = module.context_vars.current_run.get()
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
