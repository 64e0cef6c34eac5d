"""The observer that records each window, in memory and in a file if there is one."""

from __future__ import annotations

import os
import platform
import re
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import ScalerConfig
from ..devices import peak_memory
from ..optimizer_step import Observer, StepTiming
from ..scaling import GradNorm, GradScaler, Losses, ParameterNames, Window
from ..version import __version__
from .history import History
from .record import Record, Start
from .writer import Journal, path_of

EVALUATION = re.compile("(eval|val|valid|validation|test)[_/](?!.*(time|_per_second)$)")
"""The names of an evaluation's values, without its duration and its speed."""


class Recorder(Observer):
    """Records each window of ``scaler`` in memory and, with a ``journal``, in its file."""

    def __init__(self, scaler: GradScaler, journal: Journal | None, start: Start) -> None:
        self.scaler, self.journal = scaler, journal
        self.wants_each_norm = journal is not None
        self._is_scaled = scaler.is_enabled()
        self.history = History(start)
        self._table, self._noted = NameTable(scaler.parameter_names), 0
        self._open: Record | None = None
        """The record of the last window, which another optimizer may join."""
        self._late_losses: Losses | None = None
        """Losses of the last window on their way to the host, still to be read."""
        self._timings: list[StepTiming] = []
        """The last window's updates, which may still run."""
        self._start = time.perf_counter() if journal is None else journal.start_s
        self._reports = start.facts.get("rank", 0) == 0
        if self._reports:
            weakref.finalize(self, _report, self.history, os.getpid())
        if journal is not None:
            self._finish = weakref.finalize(self, journal.close, peak_memory)

    def cause_of_skips(self) -> str:
        return self.history.cause()

    def before_update(self, optimizer: Optimizer, window: Window) -> None:
        """Read the numbers that the update overwrites; the check has just waited for the device."""
        window.grad_norms.fetch()
        if self.journal is None:
            return
        names = self.scaler.parameter_names
        if self._noted != names.version:
            self._noted, params = names.version, names.parameters()
            found = {"parameters": sum(p.numel() for p in params)}
            found["parameters_trained"] = sum(p.numel() for p in params if p.requires_grad)
            found["parameter_bytes"] = sum(p.numel() * p.element_size() for p in params)
            self.journal.note(found)
        window.losses.send()  # a copy from a device is read when its record is written

    def optimizer_stepped(
        self, optimizer: Optimizer, window: Window, timing: StepTiming | None
    ) -> None:
        """Record the window, or the share of one more optimizer in it."""
        index, norms, losses = window.index, window.grad_norms, window.losses
        before_close = window.before
        assert before_close is not None
        found_inf = window.found_inf or not norms.are_finite  # also where nothing is checked
        bad = window.bad_losses if found_inf else 0
        max_norm, coefficient = norms.clip
        overflowed = [name for each in window.states.values() for name in each.names]
        if self._open is not None and self._open.index != index:
            self._close_window()
        before, is_late = self._open, self.wants_each_norm and not losses.is_there
        self._open = Record(
            index=index,
            scale=before_close.scale,
            next_scale=self.scaler.get_scale(),
            skipped=window.is_skipped,
            grad_norm=norms.total,
            max_norm=max_norm,
            clip_coefficient=None if found_inf else coefficient,
            overflowed=tuple(dict.fromkeys(overflowed)),
            found_inf=found_inf,
            spike=window.is_spike,
            growth_tracker=self.scaler.read_state().growth_tracker if self._is_scaled else 0,
            lr=(before.lr if before else ()) + tuple(map(_lr, optimizer.param_groups)),
            time=round(time.perf_counter() - self._start, 6),
            healed=window.healed,
            retries=window.retries,
            first_scale=window.first_scale if window.retries else None,
            retry_us=round(window.retry_s * 1e6) if window.retries else None,
            loss=losses.total() if losses.is_there else None,
            first=None if window.origin is None else window.origin.as_json(),
            loss_nonfinite=losses.bad() if bad is None else bad,
            **(self._table.norms(norms, optimizer) if self.wants_each_norm else {}),
        )
        self._late_losses = losses if is_late else None
        self._timings += [] if timing is None else [timing]
        self._add()

    def _add(self) -> None:
        """Add the open record, with the times of updates that have ended, or replace it."""
        assert self._open is not None
        if timings := [t for t in self._timings if t.finished]:
            busy = sum(t.busy for t in timings)
            waited = sum(t.busy if t.inline else sum(wait[1] for wait in t.waits) for t in timings)
            busy_us, waited_us = round(busy * 1e6), round(min(waited, busy) * 1e6)
            self._open = replace(self._open, optimizer_us=busy_us, waited_us=waited_us)
        self.history.add(self._open)
        if self.journal is not None:
            self.journal.add(self._open)

    def note(self, logged: Mapping[str, Any]) -> None:
        """Write the values of an evaluation, which their names tell, to the file."""
        if self.journal is not None:
            known = {str(k): v for k, v in logged.items() if isinstance(v, (int, float))}
            self.journal.note({k: v for k, v in known.items() if EVALUATION.match(k)})

    def _close_window(self) -> None:
        """Add the last window as it is known by now, with a loss from a device."""
        if self._open is None:
            return
        if self._late_losses is not None:
            self._open = replace(self._open, loss=self._late_losses.total())
        self._add()
        self._open, self._late_losses, self._timings = None, None, []

    def mistake_named(self, text: str) -> None:
        """Let the verdict repeat it, live and from the file."""
        self.history.add_mistake(text)
        if self.journal is not None:
            self.journal.note({}, text)

    def run_ended(self, error: str) -> None:
        """Write everything to the file, since ``error`` ends the run."""
        if self.journal is not None:
            self.journal.error = error
        self.flush()

    def flush(self) -> None:
        """Write the last window as far as it is known, and log the verdict where it is of use."""
        self._close_window()
        self.scaler.window.grad_norms.forget()
        if self.journal is not None:
            self.journal.flush()
        if self._reports:
            self.history.report()

    def close(self) -> None:
        self.flush()
        if self.journal is not None:
            self._finish()


def _report(history: History, pid: int) -> None:
    if pid == os.getpid():  # a fork has a copy
        history.report()


class NameTable:
    """Names norms. Remembers names, and holds parameters weakly."""

    def __init__(self, parameter_names: ParameterNames) -> None:
        self.parameter_names = parameter_names
        self._refs: list[weakref.ref[Tensor]] = []
        self._version = -1

    def norms(self, found: Iterable[GradNorm], optimizer: Optimizer) -> dict[str, Any]:
        """``names`` and ``norms`` of a record, if ``found``, on the host and of disjoint
        parameters, has norms. Parameters of no known model are named by the optimizer."""
        if not (known := [(m, m.each) for m in found if m.each is not None]):
            return {}
        params = [p for m, _ in known for p in m.parameters]
        is_same = len(params) == len(self._refs) and all(
            ref() is p for ref, p in zip(self._refs, params, strict=True)
        )
        if not is_same or self._version != self.parameter_names.version:
            called = self.parameter_names.of(params, optimizer)
            names = dict(zip(dict.fromkeys(map(id, params)), called, strict=True))
            self._names = tuple(names[id(p)] for p in params)
            self._refs = [weakref.ref(p) for p in params]
            self._version = self.parameter_names.version
        return {"names": self._names, "norms": tuple(n for _, e in known for n in e.tolist())}


def _lr(group: dict[str, Any]) -> float | None:
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return float(rate) if rate.device.type == "cpu" and rate.numel() == 1 else None
    return None if rate is None else float(rate)


def make_recorder(scaler: GradScaler, config: ScalerConfig, facts: dict[str, Any]) -> Recorder:
    """The recorder for ``config``; ``facts``, for the ``start`` line, have ``rank`` and ``ranks``.
    Raises ``ConfigError`` if ``telemetry`` cannot be written."""
    path, journal, settings = path_of(config, facts["rank"]), None, asdict(config)
    if path is not None:
        own = {
            "package": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "changed": [name for name in config.changed() if name != "telemetry"],
            "settings": settings,
        }
        journal = Journal(path, {**facts, **own})
    facts = facts | {"precision": "fp16" if scaler.is_enabled() else "no"}
    start = Start(facts=facts, settings=settings)
    return Recorder(scaler, journal, start)
