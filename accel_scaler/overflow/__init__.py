"""Finding the module in which an overflow began, and saving the window.

:class:`OverflowFinder` watches the modules of a model and finds the first one that overflowed.
:class:`OverflowExplainer` asks the finder at each window that overflowed, or makes the window again
where the settings ask for it. :class:`Healer` and :class:`Fp32Modules` run modules in float32
within a float16 model. Windows come in; an ``Origin`` and modules in float32 go out. The folder
knows no Accelerate and no step mode.
"""

from .explaining import OverflowExplainer as OverflowExplainer
from .fp32_modules import Fp32Modules as Fp32Modules
from .heal import Healer as Healer
from .module_names import refuse_unmatched as refuse_unmatched
