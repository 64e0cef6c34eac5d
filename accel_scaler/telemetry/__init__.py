"""What happened, one record a window: in memory, and in a file where one is asked for.

A :class:`Recorder` observes the boundary and fills a ``Record`` a window; records wait until the
update that belongs to them is over, then go to the :class:`History` and the file. No number of the
training depends on it. ``Diagnosis`` adds records up, live and from the file; ``diagnose`` and
``verdict`` say what it comes to.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .diagnosis import LARGEST, Diagnosis, headroom
from .findings import Finding, Level, by_level, diagnose, ending, verdict
from .history import History
from .record import FORMAT, BrokenLineError, CutLineError, End, Names, Record, Start, decode

if TYPE_CHECKING:
    from .recorder import make_recorder, path_of
    from .writer import refuse_unwritable
else:
    LAZY = {"make_recorder": "recorder", "path_of": "recorder", "refuse_unwritable": "writer"}
    """Names whose modules need torch (PEP 562): to read a file needs none."""

    def __getattr__(name: str) -> object:
        if name not in LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)


__all__ = [
    "FORMAT",
    "LARGEST",
    "BrokenLineError",
    "CutLineError",
    "Diagnosis",
    "End",
    "Finding",
    "History",
    "Level",
    "Names",
    "Record",
    "Start",
    "by_level",
    "decode",
    "diagnose",
    "ending",
    "headroom",
    "make_recorder",
    "path_of",
    "refuse_unwritable",
    "verdict",
]
