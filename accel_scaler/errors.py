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


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxtuple = 3, 8, 8, 8
_repr.maxstring = _repr.maxother = 400

shown = _repr.repr
"""``repr``, of bounded length."""
