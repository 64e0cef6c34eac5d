"""What a process of ``accel-scaler launch`` does with each Accelerator and Trainer it constructs.

Called by ``startup/sitecustomize.py`` at the end of ``__init__``.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import warnings
import weakref
from typing import Any

from ..console import counted
from ..integrations import ScaledAccelerator, attach, attach_default
from ..telemetry import History, path_of


def attach_accelerator(accelerator: Any) -> None:
    """Attach an ``accelerate.Accelerator`` with the settings of the environment.

    A ``ScaledAccelerator`` attaches itself, with the settings that its script gives it.

    Raises:
        UnsupportedError, ConfigError: as :func:`accel_scaler.attach`.
    """
    if isinstance(accelerator, ScaledAccelerator):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accel_scaler: mixed_precision=")
        attachment = attach_default(accelerator)
    if accelerator.mixed_precision != "fp16" and accelerator.is_local_main_process:
        does = "nothing is attached" if attachment is None else "only telemetry is written"
        _print_once(
            f"accel-scaler: mixed_precision={accelerator.mixed_precision!r} needs no gradient "
            f"scaling; {does}."
        )
    if attachment is not None and attachment.rank == 0:
        path, recorder = path_of(attachment.config, 0), attachment.recorder
        weakref.finalize(recorder, _print_totals, os.getpid(), recorder.history, path)


def attach_trainer(trainer: Any) -> None:
    """Attach a ``transformers.Trainer``, whose accelerator is attached already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accel_scaler: mixed_precision=")
        attach(trainer)


def _print_totals(pid: int, history: History, path: str | None) -> None:
    """Print what an accelerator did, once it is collected or at the end of its process."""
    if history.boundaries == 0 or pid != os.getpid():  # a fork has a copy of the history
        return
    done = f"{counted(history.boundaries, 'window')}, {history.skips} skipped"
    report = "" if path is None else f"; to see them: accel-scaler report {shlex.quote(path)}"
    print(f"accel-scaler: {done}{report}", file=sys.stderr, flush=True)


@functools.cache
def _print_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
