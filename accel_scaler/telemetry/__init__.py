"""What happened, one record per window: in memory and, with ``telemetry``, in a file.

A :class:`Recorder` observes the boundary and fills one ``Record`` per window; records wait until
their update is over, then go to the :class:`History` and the file. The training never depends on
it. ``Diagnosis`` adds records up, live and from the file; ``diagnose`` and ``verdict`` say in words
what they amount to.
"""

from typing import TYPE_CHECKING

from .diagnosis import LARGEST as LARGEST, Diagnosis as Diagnosis, headroom as headroom
from .findings import (
    Finding as Finding,
    as_set as as_set,
    diagnose as diagnose,
    ending as ending,
    verdict as verdict,
)
from .history import History as History
from .record import (
    FIRST_BYTES as FIRST_BYTES,
    FORMAT as FORMAT,
    BrokenLineError as BrokenLineError,
    End as End,
    Noted as Noted,
    Record as Record,
    Start as Start,
    decode as decode,
)
from .writer import path_of as path_of, refuse_unwritable as refuse_unwritable

if TYPE_CHECKING:
    from .recorder import make_recorder as make_recorder
else:

    def __getattr__(name: str) -> object:  # it needs torch (PEP 562): to read a file needs none
        if name != "make_recorder":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .recorder import make_recorder as make_recorder

        return make_recorder
