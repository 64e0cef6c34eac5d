"""Which module was the first to overflow, and what is done about it.

:class:`OverflowFinder` watches the modules of a model and finds the first that overflowed;
:class:`OverflowExplainer` asks it at each window that did, or runs the window again where that was
asked for. :class:`Healer` and :class:`ChosenModules` run modules in float32 within a float16 model,
and :func:`warn_past_float16` names weights that need it. Windows come in, an ``Origin`` and changed
modules go out. The folder knows no Accelerate and no step mode.
"""

from .chosen import ChosenModules
from .explaining import OverflowExplainer
from .heal import Healer
from .names import refuse_unmatched
from .past_float16 import warn_past_float16

__all__ = [
    "ChosenModules",
    "Healer",
    "OverflowExplainer",
    "refuse_unmatched",
    "warn_past_float16",
]
