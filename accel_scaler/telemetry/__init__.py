"""What happened, one record a window: kept in memory, and in a file where one is asked for.

A :class:`Recorder` is told what a window did and fills a ``Record``; records wait in a queue until
the update that belongs to them is over, then go to the :class:`History` and the writer. It
observes: no number of the training depends on it. Who reads the file gets records back through
``decode``; the schema, both ways, is in one module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .diagnosis import MAX_FALLS, Diagnosis, Fall
from .float16 import LARGEST, headroom
from .history import History
from .outcome import THE_LOSS, Outcome, module_list, ran_away, told, verdict
from .record import FORMAT, BrokenLineError, CutLineError, End, Names, Record, Start, decode
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
    "MAX_FALLS",
    "THE_LOSS",
    "BrokenLineError",
    "CutLineError",
    "Diagnosis",
    "End",
    "Fall",
    "History",
    "Names",
    "Outcome",
    "Record",
    "Start",
    "decode",
    "headroom",
    "make_recorder",
    "module_list",
    "path_of",
    "ran_away",
    "refuse_unwritable",
    "told",
    "verdict",
]
