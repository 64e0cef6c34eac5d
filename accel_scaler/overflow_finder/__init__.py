"""Which module was the first to overflow, for ``find_overflow``.

:class:`OverflowFinder` puts hooks on a model; they leave the range of each tensor they see, on its
device. After a window that overflowed somebody asks the finder, which searches what was left and
answers with a sentence. It knows modules, tensors and errors: no scale, no window, no optimizer.
"""

from .finder import OverflowFinder
from .hooks import Hook, inert

__all__ = ["Hook", "OverflowFinder", "inert"]
