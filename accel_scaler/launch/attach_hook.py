"""Attaches each Accelerator and Trainer of a process under ``accel-scaler launch``.

``startup/sitecustomize.py`` calls it at the end of ``__init__``.
"""

from __future__ import annotations

import os
import shlex
import sys
import weakref
from typing import Any

from ..console import counted
from ..integrations import ScaledAccelerator, attach, attach_default
from ..telemetry import History, path_of


def attach_accelerator(accelerator: Any) -> None:
    """Attach an ``accelerate.Accelerator`` with the settings of the environment."""
    if isinstance(accelerator, ScaledAccelerator):  # it was made with settings of the script
        return
    attachment = attach_default(accelerator)
    if attachment.rank == 0:
        path, recorder = path_of(attachment.config, 0), attachment.recorder
        weakref.finalize(recorder, _print_totals, os.getpid(), recorder.history, path)


def attach_trainer(trainer: Any) -> None:
    """Attach a ``transformers.Trainer``, whose accelerator is attached already."""
    if isinstance(trainer.accelerator, ScaledAccelerator):
        attach(trainer)


def _print_totals(pid: int, history: History, path: str | None) -> None:
    """Print the totals of an accelerator, once it is collected or at the end of its process."""
    if history.boundaries == 0 or pid != os.getpid():  # a fork has a copy of the history
        return
    done = f"{counted(history.boundaries, 'step')}, {history.skips} skipped"
    report = "" if path is None else f"; to see them: accel-scaler report {shlex.quote(path)}"
    print(f"accel-scaler: {done}{report}", file=sys.stderr, flush=True)
