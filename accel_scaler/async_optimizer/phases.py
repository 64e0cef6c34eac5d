"""Where an optimizer stands between two boundaries, and where its updates are awaited."""

from __future__ import annotations

from enum import Enum, IntEnum


class Phase(Enum):
    """Where an optimizer stands between two boundaries.

    Derived from what there is, never stored: an interrupt at any line leaves it right.
    """

    IDLE = "idle"
    """The model has the newest values."""
    RUNNING = "running"
    """An update is on the optimizer thread."""
    COMPUTED = "computed"
    """It is done; the model gets it at the next boundary or fence (``delayed``)."""
    FENCED = "fenced"
    """A fence has published it; the next training forward gets its previews back (``delayed``)."""
    LOST = "lost"
    """The optimizer thread has ended with an update."""
    CLOSED = "closed"
    """The optimizer is torch's again."""


class WaitAt(IntEnum):
    """Where an update is awaited; a higher value only replaces a lower one."""

    USE = 0
    """Where a parameter is used."""
    FORWARD = 1
    """Before a forward that uses parameters unseen: compiled, sharded, ``DataParallel``."""
    STEP = 2
    """In ``step()``: something reads parameters that no hook comes before."""
