"""The errors of the package, and parts of their messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


class AccelScalerError(Exception):
    """Every error that this package raises on purpose."""


class ConfigError(AccelScalerError, ValueError, AssertionError):
    """A setting or a state dict that cannot be used.

    Also an ``AssertionError``, which ``torch.amp.GradScaler`` raises for a bad factor.
    """


class OrderError(AccelScalerError, RuntimeError):
    """A call that is not allowed at this point of the window, or on this thread."""


class OverflowStreakError(AccelScalerError, RuntimeError):
    """More windows in a row were skipped than ``max_consecutive_skips`` allows."""


class StepError(AccelScalerError, RuntimeError):
    """The optimizer thread failed or did not finish in time; ``__cause__`` is its error."""


class UnsupportedError(AccelScalerError, ValueError):
    """A model, an optimizer or a set-up that the package does not support."""


def listed(names: Sequence[str], total: int) -> str:
    """``a, b and 3 more``: the first ``names`` of ``total``; "" for none."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


RETIRED = {
    "save_overflow": "find_overflow='replay', which runs the window again at its skip and names "
    "the module, or heal=True, which keeps that module in float32.",
    "tracker_interval": "accelerator.log and the Trainer's log, which carry the scaler's values.",
    "accel-scaler doctor": "accel-scaler launch --dry_run, with the same arguments.",
    "accel-scaler replay": "find_overflow='replay' in the run itself, at the skip.",
    "accel-scaler report --live": "TensorBoard or wandb in the run: accelerator.log and the "
    "Trainer's log carry the scaler's values; or make the report while the run trains.",
    "accel-scaler report FILE FILE": "a report of each file, or TensorBoard or wandb, which "
    "compare runs whose accelerator.log or Trainer's log carries the scaler's values.",
    "accel-scaler report --format": "the page, which needs no server and prints: leave it out.",
    "attach": "accel-scaler launch --no_attach.",
    "delay_compensation='extrapolate'": "'auto', a preview where there is one, else none.",
}
"""Retired settings, values, commands and options, and what to use instead."""


def refuse_retired(name: str, written: str | None = None) -> None:
    """Raise ``ConfigError`` if ``name`` is one of ``RETIRED``; ``written`` as its user wrote it."""
    if name in RETIRED:
        raise ConfigError(f"{written or name} is retired. Instead: {RETIRED[name]}")


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxtuple = 3, 8, 8, 8
_repr.maxstring = _repr.maxother = 400

shown = _repr.repr
"""``repr``, of bounded length."""
