"""What happened, one record a window: kept in memory, and in a file where one is asked for.

A :class:`Recorder` is told what a window did and fills a ``Record``; records wait in a queue until
the update that belongs to them is over, then go to the :class:`History` and the writer. It
observes: no number of the training depends on it. It does not know who reads the file.
"""

from .record import History, Record, Span
from .recorder import Recorder, make_recorder
from .writer import check_path

__all__ = ["History", "Record", "Recorder", "Span", "check_path", "make_recorder"]
