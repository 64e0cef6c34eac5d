"""What a process of ``accel-scaler launch`` does with the Accelerators and Trainers it makes.

Called by ``startup/sitecustomize.py``, once each has been constructed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from ..integrations import ScaledAccelerator, attach, attach_default, call_when_attached
from .totals import tell_at_end

call_when_attached(tell_at_end)


def meet_accelerator(accelerator: Any) -> None:
    """Attach a fresh ``accelerate.Accelerator`` with the settings of the environment.

    A ``ScaledAccelerator`` is about to set itself up, with the settings its script gave it.

    Raises:
        UnsupportedError, ConfigError: as :func:`accel_scaler.attach`.
    """
    if isinstance(accelerator, ScaledAccelerator):
        return
    with _without_warning():
        attach_default(accelerator)
    is_attached = isinstance(accelerator, ScaledAccelerator)
    if accelerator.mixed_precision != "fp16" and accelerator.is_local_main_process:
        _say_once(
            f"accel-scaler: mixed_precision={accelerator.mixed_precision!r} needs no gradient "
            f"scaling; {'only telemetry is written' if is_attached else 'nothing is attached'}."
        )


def meet_trainer(trainer: Any) -> None:
    """Attach a ``transformers.Trainer`` whose accelerator :func:`meet_accelerator` has met.

    That one scales right by itself; the Trainer adds the fence at the end of ``train()``.
    """
    with _without_warning():
        attach(trainer)


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """``attach`` warns of a run without fp16; a launched one says it in one line, once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="accel_scaler: mixed_precision=")
        yield


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
