"""Every error that the package raises on purpose, and words for their messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

__all__ = [
    "BROKEN",
    "AccelScalerError",
    "ConfigError",
    "OrderError",
    "OverflowStreakError",
    "StepError",
    "UnsupportedError",
    "listed",
    "refuse_retired",
    "shown",
]


BROKEN = "parameters are inf or NaN themselves"
"""Part of a message, where it is so."""


class AccelScalerError(Exception):
    """Every error that this package raises on purpose."""


class ConfigError(AccelScalerError, ValueError, AssertionError):
    """A setting or a state dict that cannot be used.

    Also an ``AssertionError``, since ``torch.amp.GradScaler`` raises that for a bad factor.
    """


class OrderError(AccelScalerError, RuntimeError):
    """A call that is illegal at this point of the window, or on this thread."""


class OverflowStreakError(AccelScalerError, RuntimeError):
    """More windows in a row were skipped than ``max_consecutive_skips`` allows."""


class StepError(AccelScalerError, RuntimeError):
    """The optimizer thread failed, is gone, or did not finish in time; ``__cause__`` says why."""


class UnsupportedError(AccelScalerError, ValueError):
    """A set-up whose gradients this package cannot scale; the message says who does."""


def listed(names: Sequence[str], total: int) -> str:
    """``a, b and 3 more``: some names of ``total``; "" for none."""
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
    "delay_compensation='extrapolate'": "'auto', a preview where there is one, else none.",
}
"""Settings, values, commands and options that there were, and what to use instead."""


def refuse_retired(name: object, written: object, where: str) -> None:
    """Raise ``ConfigError`` where ``name`` is one of ``RETIRED``.

    Args:
        written: the name as it stands there.
    """
    if isinstance(name, str) and name in RETIRED:
        raise ConfigError(f"{where}: {written} is retired. Instead: {RETIRED[name]}")


class _Repr(reprlib.Repr):
    """All of a value where it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 3, 8, 8, 8, 8
        self.maxstring = self.maxother = 400

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write integers of thousands of digits."""
        return repr(x) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"


shown = _Repr().repr
"""``repr``, of bounded length whatever the value is."""
