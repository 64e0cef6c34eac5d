"""Which module was the first to overflow, for ``find_overflow``.

:class:`OverflowFinder` puts hooks on a model; they leave the range of each tensor they see, on its
device. After a window that overflowed somebody asks the finder, which searches what was left and
answers with a sentence. :class:`WindowRecording` keeps what a window's forwards were given, and
:func:`run_again` runs it again under a finder, once it has overflowed. They know modules, tensors
and errors: no scale, no window's verdict, no optimizer.
"""

from .finder import OverflowFinder
from .hooks import inert, is_fsdp2, is_in_backward
from .recording import WindowRecording, is_replaying, without_wrappers
from .replay import Replay, obstacle, overflowed_sum, run_again
from .search import Origin

__all__ = [
    "Origin",
    "OverflowFinder",
    "Replay",
    "WindowRecording",
    "inert",
    "is_fsdp2",
    "is_in_backward",
    "is_replaying",
    "obstacle",
    "overflowed_sum",
    "run_again",
    "without_wrappers",
]
