"""The record of each window: in memory and, with ``telemetry``, in a file.

A ``Recorder`` observes the boundary and fills one ``Record`` per window, which goes to the
:class:`History` and, once its update is over, to the file. The training never depends on it.
``Diagnosis`` adds records up, live and from the file; ``diagnose`` and ``verdict`` put the sums in
words.
"""

from typing import TYPE_CHECKING

from .diagnosis import Diagnosis as Diagnosis
from .findings import (
    Finding as Finding,
    diagnose as diagnose,
    ending as ending,
    verdict as verdict,
)
from .history import History as History
from .record import (
    FORMAT as FORMAT,
    BrokenLineError as BrokenLineError,
    End as End,
    Noted as Noted,
    Record as Record,
    Start as Start,
    decode as decode,
)
from .writer import path_of as path_of

if TYPE_CHECKING:
    from .recorder import make_recorder as make_recorder
else:

    def __getattr__(name: str) -> object:  # PEP 562: reading a file must not import torch
        if name != "make_recorder":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .recorder import make_recorder as make_recorder

        return make_recorder
