"""What goes on record when a window closes, and when its update is known to be done."""

from __future__ import annotations

import logging
import os
import platform
import time
import weakref
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import ScalerConfig
from ..optimizer_step import Observer, StepTiming
from ..scaling import (
    GradScaler,
    Losses,
    Window,
    count_nonfinite,
    gradients_of,
    parameters_of,
)
from ..version import __version__
from .gradient_range import Measure, measure
from .history import History
from .name_table import NameTable
from .record import Record
from .record_queue import OpenRecord, RecordQueue
from .writer import Journal

logger = logging.getLogger("accel_scaler")

RANK = "{rank}"
"""In a path: each rank writes its own file."""


class Recorder(Observer):
    """Collects what happens in a window and puts it on record: in memory, and in a file if any.

    Args:
        scaler: whose windows these are.
        journal: the telemetry file; None: records in memory, without norms of each parameter.
        underflow_interval: windows between two looks at how much of float16's range gradients take.
    """

    def __init__(
        self,
        scaler: GradScaler,
        journal: Journal | None = None,
        underflow_interval: int = 100,
    ) -> None:
        self.scaler, self.journal = scaler, journal
        self.wants_norms = self.wants_each_norm = journal is not None
        min_scale = scaler.rule.min_scale if scaler.is_enabled() else None
        self.history = History(scaler.is_enabled(), min_scale)
        self.underflow_interval = underflow_interval
        self._table = NameTable(scaler.parameter_names)
        self._queue = None if journal is None else RecordQueue(journal)
        self._open: OpenRecord | None = None
        """The window on record last, which another optimizer may join."""
        self._losses: Losses | None = None
        """Those that ``_loss`` is the sum of."""
        self._loss: float | None = None
        self._measures: list[Measure] = []
        """Of a window, whose numbers are read in a later one."""
        self._measured_in = -1
        """The window that was measured last."""
        self._measures_from = 0
        self._told_healed: tuple[str, ...] = ()
        self._told_low = False
        self._start = time.perf_counter() if journal is None else journal.start_s
        if self._queue is not None:
            self._finish = weakref.finalize(self, self._queue.close)

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Look at what the update will take away; the check has just waited for the device."""
        window.grad_norms.fetch()
        self._read_loss(window)
        if self._measures and self._measures[0].window != window.index:
            self._read_range()
        if self.wants_each_norm and not window.record(optimizer).found_inf:
            self._measure_range(optimizer, window)

    def _read_loss(self, window: Window) -> None:
        """Where it is there, as it is where it came with the norms. Else it is sent for, and read
        when its record is written."""
        losses = window.losses
        if losses is self._losses:
            return
        self._losses, self._loss = losses, None
        if self.wants_each_norm and losses.is_there:
            self._loss = losses.total()
        elif self.wants_each_norm:
            losses.send()

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """Put the window, or what one more optimizer did in it, on record."""
        index, measured, closed_at = window.index, window.grad_norms, window.before
        assert closed_at is not None
        scaled = self.scaler.is_enabled()
        found_inf = window.found_inf if scaled else not measured.are_finite
        max_norm, coefficient = measured.clip
        names = [name for each in window.states.values() for name in each.names]
        if self._open is not None and self._open.record.index != index:
            self._close_window()
        before = None if self._open is None else self._open.record
        record = Record(
            index=index,
            scale=closed_at.scale,
            next_scale=self.scaler.get_scale(),
            skipped=found_inf and scaled,
            grad_norm=measured.total,
            max_norm=max_norm,
            clip_coefficient=None if found_inf else coefficient,
            overflowed=tuple(dict.fromkeys(names)),
            found_inf=found_inf,
            growth_tracker=self.scaler.read_state().growth_tracker if scaled else 0,
            lr=(before.lr if before else ()) + tuple(map(_lr, optimizer.param_groups)),
            time=time.perf_counter() - self._start,
            healed=window.healed,
            loss=self._loss,
            **self._details(optimizer, window, found_inf, before),
        )
        if self._open is None:
            late = window.losses if self.wants_each_norm and self._loss is None else None
            self._open = OpenRecord(record, late)
            if self._queue is not None:
                self._queue.add(self._open)
        self._open.record, self._open.names = record, self._table.known
        if timing is not None:
            self._open.timings.append(timing)
        self.history.add(record)
        self._warn(record)

    def _details(
        self, optimizer: Optimizer, window: Window, found_inf: bool, before: Record | None
    ) -> dict[str, Any]:
        """What is known of single parameters and modules, as far as somebody asked for it."""
        details: dict[str, Any] = {}
        if before is not None:
            details = {"nonfinite": before.nonfinite, "loss_nonfinite": before.loss_nonfinite}
        details["first"] = None if window.origin is None else window.origin.as_json()
        if not self.wants_each_norm:
            return details
        if found_inf:
            params = [p for p in parameters_of(optimizer) if p.grad is not None]
            numbers = self._table.numbers_of(params, optimizer)
            counts = count_nonfinite(gradients_of(params))
            offenders = dict(details.get("nonfinite", ()))
            offenders |= {n: c for n, c in zip(numbers, counts, strict=True) if c}
            details["nonfinite"] = tuple(offenders.items())
            details["loss_nonfinite"] = window.losses.bad()
        found = [(m.parameters, m.ids, m.each) for m in window.grad_norms]
        details["norms"] = self._table.place_norms(found, optimizer)
        details["names"] = self._table.known.names
        return details

    def _warn(self, record: Record) -> None:
        if record.next_scale < 1.0 and not self._told_low:
            self._told_low = True
            names = ", ".join(record.overflowed) or "no single tensor"
            logger.warning(
                "the loss scale fell below 1, so gradients overflow whatever it is. Last seen in: "
                f"{names}. min_scale keeps it up, max_consecutive_skips ends such a run. "
                "(Said once.)"
            )

    def _measure_range(self, optimizer: Optimizer, window: Window) -> None:
        """Once every ``underflow_interval`` windows, in one that did not overflow. The numbers are
        read in a later window, when the device is idle anyway."""
        index = window.index
        if index != self._measured_in:
            if index < self._measures_from:
                return
            self._measured_in = index
            self._measures_from = (index // self.underflow_interval + 1) * self.underflow_interval
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        numbers = self._table.numbers_of(params, optimizer)
        closed_at = window.before
        scale = closed_at.scale if closed_at is not None and self.scaler.is_enabled() else None
        self._measures += measure(params, numbers, window, window.record(optimizer), scale)

    def _read_range(self) -> None:
        measures, self._measures = self._measures, []
        window = self._open
        for each in measures:
            # Of a window whose update failed there is no record.
            if window is not None and each.window == window.record.index:
                window.range.add(each)
                self.history.note_largest(window.range.largest, window.record.scale)

    def _close_window(self) -> None:
        """The window on record last is over."""
        window, self._open = self._open, None
        if window is None:
            return
        window.read_loss()
        self.history.complete(window.close() if window.is_complete else window.record)

    def run_ended(self, error: str) -> None:
        """Write all that is known: ``error`` ends the run."""
        self.flush(error)

    def flush(self, error: str | None = None) -> None:
        """Write what is known of the last window now, and say the verdict where modules were
        healed. ``error``: what ends the run."""
        self._read_range()
        self._close_window()
        self.scaler.window.grad_norms.forget()
        if self._queue is not None:
            self._queue.error = error or self._queue.error
            self._queue.flush()
        if self.history.healed != self._told_healed:
            self._told_healed = self.history.healed
            logger.warning(self.history.verdict())

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        if self._queue is not None:
            self._finish()


def _lr(group: dict[str, Any]) -> float | None:
    """None: on a device, where to read it would wait."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return None if rate is None else float(rate)


def path_of(config: ScalerConfig, rank: int) -> str | None:
    """The telemetry file that this rank writes; None: it writes none."""
    path = None if config.telemetry is None else os.fspath(config.telemetry)
    if path is None or (rank != 0 and RANK not in path):
        return None
    return path.replace(RANK, str(rank))


def make_recorder(scaler: GradScaler, config: ScalerConfig, facts: dict[str, Any]) -> Recorder:
    """The recorder that ``config`` asks for; only rank 0 writes, unless the path has
    ``{rank}``.

    Args:
        facts: for the ``start`` line; ``rank`` and ``ranks`` among them.

    Raises:
        ConfigError: ``telemetry`` cannot be written.
    """
    path, journal = path_of(config, facts["rank"]), None
    if path is not None:
        own = {
            "package": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "changed": [name for name in config.changed() if name != "telemetry"],
            "settings": asdict(config),
        }
        journal = Journal(path, {**facts, **own})
    recorder = Recorder(scaler, journal, config.underflow_interval)
    recorder.wants_norms = config.telemetry is not None
    return recorder
