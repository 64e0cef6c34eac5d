"""Rows of a wandb run that take no step which the script still needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("accel_scaler")

WINDOW = "scaler/window"
"""The x-axis of all that is ours."""

MOST_ROWS = 10_000
"""That wait; of more, every second is left out."""

MOST_DETAILED = 64
"""Of them, the newest, which keep their histograms."""


class WandbRows:
    """Puts rows into a run whose steps are the script's.

    wandb drops whatever comes with a lower step than the last, so a row of our own could cost a
    script that counts epochs one of its own. So a row of ours joins the script's last one, if none
    has; else it waits until the script's next step leaves room before it, or for the end, when all
    steps are free. In a chart each stands where it belongs: over ``scaler/window``.

    Args:
        run: wandb's.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._waiting: list[dict[str, Any]] = []
        self._newest: dict[str, Any] = {}
        self._joined: int | None = None
        """The step of the last of the script's rows that one of ours has joined."""
        self._script_logs = run.step > 0
        run.define_metric(WINDOW, hidden=True)
        run.define_metric("scaler/*", step_metric=WINDOW)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more, of a later window than those before."""
        self._newest = _scalars(row)
        step = self.run.step
        self._script_logs |= step > 0
        if self._script_logs and self._joined != step:
            self.run.log(dict(row), commit=False)
            self._joined = step
            return
        self._waiting.append(dict(row))
        if len(self._waiting) > MOST_DETAILED:
            self._waiting[-MOST_DETAILED - 1] = _scalars(self._waiting[-MOST_DETAILED - 1])
        if len(self._waiting) > MOST_ROWS:
            del self._waiting[::2]
        self.run.summary.update(self._newest)  # what can be seen of it until then

    def before_log(self, step: int | None) -> None:
        """The script is about to log with this step; None: with the run's own next one."""
        if self._waiting:
            last = self.run.step
            first = last + 1 if self._script_logs else last
            at = last if step is None else step
            if at > first:
                self._fill(first, at)
            elif at >= last and at != self._joined:
                self.run.log(self._waiting.pop(), step=step, commit=False)
                self._joined = at
        self._script_logs = True

    def finish(self) -> None:
        """The script logs no more: the rest goes behind its last row."""
        if self._waiting:
            first = self.run.step + 1 if self._script_logs else self.run.step
            self._fill(first, first + len(self._waiting))
            self.run.summary.update(self._newest)

    def _fill(self, first: int, end: int) -> None:
        """Give the newest of those that wait the steps from ``first`` up to ``end``: the numbers
        of their windows, where these are among them."""
        count = min(len(self._waiting), end - first)
        if count <= 0:
            return
        placed, self._waiting = self._waiting[-count:], self._waiting[:-count]
        steps = [int(row[WINDOW]) for row in placed]
        if steps[0] < first or steps[-1] >= end:
            steps = list(range(first, first + count))
        for step, row in zip(steps, placed, strict=True):
            self.run.log(row, step=step)


def _scalars(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}
