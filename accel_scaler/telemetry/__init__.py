"""What happened, one record a window: in memory, and in a file where one is asked for.

A :class:`Recorder` observes the boundary and fills a ``Record`` a window; records wait in a queue
until the update that belongs to them is over, then go to the :class:`History` and the file. No
number of the training depends on it. ``Diagnosis`` adds records up, live and from the file, and
``verdict`` says in a sentence what became of the run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .diagnosis import (
    LARGEST,
    MANY_SKIPPED,
    REPEATED,
    SMALLEST_SCALE,
    THE_LOSS,
    Diagnosis,
    Fall,
    Session,
    headroom,
)
from .history import History
from .record import FORMAT, BrokenLineError, CutLineError, End, Names, Record, Start, decode
from .sentences import cause_of, module_list, ran_away, sentence, skip_counts, verdict
from .writer import refuse_unwritable

if TYPE_CHECKING:
    from .recorder import make_recorder, path_of
else:

    def __getattr__(name: str) -> object:
        """What needs torch, on first use (PEP 562): to read a file needs none."""
        if name not in ("make_recorder", "path_of"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.recorder"), name)


__all__ = [
    "FORMAT",
    "LARGEST",
    "MANY_SKIPPED",
    "REPEATED",
    "SMALLEST_SCALE",
    "THE_LOSS",
    "BrokenLineError",
    "CutLineError",
    "Diagnosis",
    "End",
    "Fall",
    "History",
    "Names",
    "Record",
    "Session",
    "Start",
    "cause_of",
    "decode",
    "headroom",
    "make_recorder",
    "module_list",
    "path_of",
    "ran_away",
    "refuse_unwritable",
    "sentence",
    "skip_counts",
    "verdict",
]
