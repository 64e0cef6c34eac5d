"""Where an overflow began, and what is done about it.

:class:`OverflowFinder` watches the modules of a model and finds the first one that overflowed.
:class:`OverflowExplainer` asks it at each window that overflowed, or runs the window again where
that is configured. :class:`Healer` and :class:`Fp32Modules` run modules in float32 within a float16
model. Windows come in; an ``Origin`` and modules in float32 go out. The folder knows no Accelerate
and no step mode.
"""

from .explaining import OverflowExplainer as OverflowExplainer
from .fp32_modules import Fp32Modules as Fp32Modules
from .heal import Healer as Healer
from .module_names import refuse_unmatched as refuse_unmatched
